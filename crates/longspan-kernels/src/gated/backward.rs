//! The gradient: a key/value head of a sequence at a time, forwards for the states before each chunk, then back.

use super::Gate;
use super::chunk::{Chunk, decay_state, load_rows};
use super::forward::load_state;
use super::loops::Weigh;
use super::pairs::{Gradients as ChunkGradients, add_transposed, pull_back};
use super::problem::{CHUNK, Problem, Unit};
use super::solve::solve_transposed;
use crate::call::{Arena, Cotangent, GradientSink, Gradients, Scratch, SharedRows, StateSink};
use crate::simd::block::{add_products, add_scaled, dot, scale_rows, store, transpose};
use crate::simd::product::{Band, Product, zero_outside};
use crate::simd::rows::Rows;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

struct Places<'a, T> {
    sink: GradientSink<'a, T>,
    log_decay: Option<SharedRows<'a, T>>,
    beta: Option<SharedRows<'a, T>>,
    initial_state: Option<StateSink<'a, T>>,
}

struct Worker<'s, T> {
    chunk: Chunk<'s, T>,
    /// The states before each chunk, and after the last.
    states: &'s mut [T],
    /// Of every token, under the delta rule: `u`, and what it was solved from.
    updates: &'s mut [T],
    rests: &'s mut [T],
    /// The gradient of the state after the chunk, then of that before it.
    d_state: &'s mut [T],
    state_t: &'s mut [T],
    d_state_t: &'s mut [T],
    u_t: &'s mut [T],
    d_u: &'s mut [T],
    d_out: &'s mut [T],
    d_tiles: &'s mut [T],
    /// Gradients of the rows of operands, and of the keys that they are compared with.
    d_operands: &'s mut [T],
    d_keys: &'s mut [T],
    system: &'s mut [T],
    d_logs: &'s mut [T],
}

impl<'s, T: Real> Worker<'s, T> {
    fn new(problem: &Problem<'_, T>, chunks: usize, arena: &mut Arena<'s, T>) -> Self {
        let (row, wide) = (problem.row, problem.wide);
        let delta = usize::from(problem.attention.is_delta());
        // Rows are transposed by whole registers.
        let padded_tokens = problem.dims.keys + CHUNK;
        Self {
            chunk: Chunk::new(problem, true, arena),
            states: arena.take((chunks + 1) * row * wide),
            updates: arena.take(padded_tokens * wide),
            rests: arena.take(delta * padded_tokens * wide),
            d_state: arena.take(row * wide),
            state_t: arena.take(wide * row),
            d_state_t: arena.take(wide * row),
            u_t: arena.take(wide * CHUNK),
            d_u: arena.take(CHUNK * wide),
            d_out: arena.take(CHUNK * wide),
            d_tiles: arena.take(problem.operands().next_multiple_of(2) * CHUNK * CHUNK),
            d_operands: arena.take((problem.dims.group() + 1) * CHUNK * row),
            d_keys: arena.take(CHUNK * row),
            system: arena.take(delta * CHUNK * CHUNK),
            d_logs: arena.take(CHUNK * problem.gate_row()),
        }
    }
}

pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    gradients: Gradients<'_, '_, T>,
    scratch: &mut Scratch<T>,
) {
    let dims = &problem.dims;
    let Gradients { mut dq, mut dk, mut dv, parameters, initial_state } = gradients;
    let each = |width: usize| [dims.kv_heads * dims.keys * width, dims.keys * width, width];
    let mut given = parameters.iter_mut();
    let gate = problem.attention.gate_len(dims.head_dim);
    let log_decay = if problem.attention.gate != Gate::None {
        given.next().map(|to| SharedRows::new(to, each(gate)))
    } else {
        None
    };
    let places = Places {
        sink: GradientSink { dq: dq.shared(), dk: dk.shared(), dv: dv.shared() },
        log_decay,
        beta: given.next().map(|to| SharedRows::new(to, each(1))),
        initial_state: initial_state.map(StateSink::new),
    };
    let tasks = problem.units();
    let mut lists = vec![Vec::new(); tasks];
    let list = |(n, to): (usize, &mut Vec<_>)| *to = problem.chunks(&problem.unit(n), true);
    threads::share(lists.iter_mut().enumerate(), list);
    let chunks = lists.iter().map(Vec::len).max().unwrap_or(0);
    let per_worker = Arena::measure(|arena| Worker::new(problem, chunks, arena));
    let workers = threads::count().min(tasks);
    parallel(tasks, scratch.take(workers * per_worker), per_worker, |task, scratch| {
        let mut worker = Worker::new(problem, chunks, &mut Arena::new(scratch));
        let unit = problem.unit(task);
        let size = problem.row * problem.wide;
        load_state(problem, &unit, &mut worker.states[..size]);
        for (n, &(first, rows)) in lists[task].iter().enumerate() {
            threads::check();
            forwards(problem, &unit, &mut worker, (n, first, rows));
        }
        load_d_state(problem, cotangent, &unit, worker.d_state);
        for (n, &(first, rows)) in lists[task].iter().enumerate().rev() {
            threads::check();
            back(problem, cotangent, &places, &unit, &mut worker, (n, first, rows));
        }
        if let Some(to) = &places.initial_state {
            let width = dims.value_dim;
            // SAFETY: a call with such a gradient has one sequence for each batch entry, so each head belongs to one task.
            let (sum, gates) = unsafe { (to.part(task, 0, 0, dims.head_dim * width), to.part(task, 1, 0, gate)) };
            for (to, row) in sum.chunks_exact_mut(width.max(1)).zip(worker.d_state.chunks_exact(problem.wide.max(1))) {
                to.copy_from_slice(&row[..width]);
            }
            if let Some(state) = cotangent.final_state {
                gates.copy_from_slice(state.head(unit.sequence.batch, unit.kv_head)[1]);
            }
        }
    });
}

fn load_d_state<T: Real>(problem: &Problem<'_, T>, cotangent: &Cotangent<'_, T>, unit: &Unit<'_>, to: &mut [T]) {
    to.fill(T::ZERO);
    if let Some(state) = cotangent.final_state {
        let [sum, ..] = state.head(unit.sequence.batch, unit.kv_head);
        let stride = problem.dims.value_dim;
        load_rows(Rows { data: sum, stride }, stride, (to, problem.wide), problem.dims.head_dim, |_| false);
    }
}

/// The state after a chunk, and what its tokens added.
fn forwards<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_>,
    worker: &mut Worker<'_, T>,
    (n, first, rows): (usize, usize, usize),
) {
    let wide = problem.wide;
    let (size, values) = (problem.row * wide, CHUNK * wide);
    let Worker { chunk, states, updates, rests, .. } = worker;
    let (before, after) = states[n * size..].split_at_mut(size);
    let u = &mut updates[first * wide..][..values];
    let rest = problem.attention.is_delta().then(|| &mut rests[first * wide..][..values]);
    chunk.load(problem, unit, first, rows);
    chunk.weigh(problem);
    chunk.updates(problem, before, u, rest);
    after[..size].copy_from_slice(before);
    chunk.advance(problem, &mut after[..size], u);
}

/// The gradients of a chunk's tokens, and of the state before it.
fn back<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    places: &Places<'_, T>,
    unit: &Unit<'_>,
    worker: &mut Worker<'_, T>,
    (n, first, rows): (usize, usize, usize),
) {
    let (row, wide, dims) = (problem.row, problem.wide, &problem.dims);
    let [width, columns, group] = [dims.head_dim, dims.value_dim, dims.group()];
    let (size, values, tile) = (row * wide, CHUNK * wide, CHUNK * CHUNK);
    let Worker { chunk, states, updates, rests, d_state, state_t, d_state_t, u_t, d_u, d_out, .. } = worker;
    let Worker { d_tiles, d_operands, d_keys, system, d_logs, .. } = worker;
    chunk.load(problem, unit, first, rows);
    chunk.weigh(problem);
    let before = &states[n * size..][..size];
    let u = &updates[first * wide..][..values];
    transpose((before, wide), (width, columns), (state_t, row));
    transpose((d_state, wide), (width, columns), (d_state_t, row));
    transpose((u, wide), (rows, columns), (u_t, CHUNK));
    // By the state after the chunk.
    Product::of_transposed((chunk.keys_t, CHUNK), (d_state, wide), (&mut *d_u, wide), [rows, columns, width]).compute();
    Product::of((u, wide), (d_state_t, row), (&mut *d_keys, row), [rows, width, columns]).compute();
    decay_state(chunk.total(problem.gate_row()), &mut d_state[..width * wide], wide);
    // What the keys needed of it is done.
    let d_after = &mut d_state_t[..size];
    d_after.copy_from_slice(d_state);
    // By the outputs.
    for (n, head) in dims.heads_of(unit.kv_head).enumerate() {
        let from = cotangent.d_out.rows(unit.sequence.batch, head).skip(unit.sequence.query_start + first);
        load_rows(from, columns, (d_out, wide), rows, |_| false);
        scale_rows((&mut *d_out, wide), wide, &[problem.scale; CHUNK][..rows]);
        add_transposed(chunk.tile(n), (d_out, wide), (d_u, wide), [rows, columns]);
        form_tile((d_out, u_t), &mut d_tiles[n * tile..][..tile], problem, rows, 0);
        let to = &mut d_operands[n * CHUNK * row..][..CHUNK * row];
        through_state(problem, chunk, n, (d_out, state_t), to, d_state);
    }
    if problem.attention.is_delta() {
        let mut negative = [T::ZERO; CHUNK];
        negative.iter_mut().zip(&chunk.beta[..rows]).for_each(|(to, &beta)| *to = -beta);
        system.copy_from_slice(chunk.tile(group));
        scale_rows((&mut *system, CHUNK), CHUNK, &negative[..rows]);
        solve_transposed(system, rows, d_u, [wide, columns]);
        let d_tile = &mut d_tiles[group * tile..][..tile];
        form_tile((d_u, u_t), d_tile, problem, rows, -1);
        if let Some(to) = &places.beta {
            let rest = &rests[first * wide..][..values];
            for i in 0..rows {
                let token = unit.sequence.key_start + first + i;
                // SAFETY: each token belongs to one task.
                let to = unsafe { to.row(unit.sequence.batch, unit.kv_head, token, 1) };
                let by_pairs = dot(&d_tile[i * CHUNK..][..i], &chunk.tile(group)[i * CHUNK..][..i]);
                let own = dot(&d_u[i * wide..][..columns], &rest[i * wide..][..columns]);
                to[0] = if unit.ignores(first + i) { T::ZERO } else { own - by_pairs };
            }
        }
        scale_rows((d_tile, CHUNK), CHUNK, &negative[..rows]);
        // −dV, which goes on to the state that was read.
        scale_rows((&mut *d_u, wide), wide, &negative[..rows]);
        let to = &mut d_operands[group * CHUNK * row..][..CHUNK * row];
        through_state(problem, chunk, group, (d_u, state_t), to, d_state);
        scale_rows((&mut *d_u, wide), wide, &[-T::ONE; CHUNK][..rows]);
    } else {
        d_operands[group * CHUNK * row..][..rows * row].fill(T::ZERO);
        if group == 0 {
            d_tiles[..tile].fill(T::ZERO);
        }
    }
    let logs = places.log_decay.as_ref().map(|_| {
        by_states(problem, cotangent, unit, chunk, d_operands, (before, d_after), d_logs);
        &mut d_logs[..]
    });
    pull_back(problem, chunk, ChunkGradients { tiles: d_tiles, operands: d_operands, keys: d_keys, logs });
    if let Some(to) = &places.log_decay {
        let len = problem.attention.gate_len(width);
        for i in 0..rows {
            // SAFETY: each token belongs to one task.
            let to = unsafe { to.row(unit.sequence.batch, unit.kv_head, unit.sequence.key_start + first + i, len) };
            if unit.ignores(first + i) {
                to.fill(T::ZERO)
            } else {
                to.copy_from_slice(&d_logs[i * problem.gate_row()..][..len])
            }
        }
    }
    let d_key_rows = &mut d_operands[group * CHUNK * row..];
    add_scaled(&mut d_keys[..rows * row], T::ONE, d_key_rows);
    for i in 0..rows {
        let token = first + i;
        for (n, head) in dims.heads_of(unit.kv_head).enumerate() {
            // SAFETY: each (batch, head, token) belongs to one task.
            let to = unsafe { places.sink.dq.row(unit.sequence.batch, head, unit.sequence.query_start + token, width) };
            let at = (n * CHUNK + i) * row;
            through_norm(problem, chunk, n * CHUNK + i, &d_operands[at..][..row], to);
        }
        // SAFETY: as above.
        let (dk, dv) =
            unsafe { places.sink.key([unit.sequence.batch, unit.kv_head, unit.sequence.key_start + token], dims) };
        if unit.ignores(token) {
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
        } else {
            through_norm(problem, chunk, group * CHUNK + i, &d_keys[i * row..][..row], dk);
            dv.copy_from_slice(&d_u[i * wide..][..columns]);
        }
    }
}

/// `D Uᵀ` up to a diagonal.
fn form_tile<T: Real>((d, u_t): (&[T], &[T]), to: &mut [T], problem: &Problem<'_, T>, rows: usize, diagonal: isize) {
    let sizes = [rows, rows, problem.dims.value_dim];
    let band = Band::up_to(diagonal);
    Product::of((d, problem.wide), (u_t, CHUNK), (&mut *to, CHUNK), sizes).c_band(band).compute();
    zero_outside((to, CHUNK), (rows, CHUNK), band);
}

/// What rows `x̂ S` have for gradients, given those of what they read: of `x`, and of `S`, to which it is added.
fn through_state<T: Real>(
    problem: &Problem<'_, T>,
    chunk: &mut Chunk<'_, T>,
    operand: usize,
    (d, state_t): (&[T], &[T]),
    d_rows: &mut [T],
    d_state: &mut [T],
) {
    let (row, wide, rows) = (problem.row, problem.wide, chunk.rows);
    let [width, columns] = [problem.dims.head_dim, problem.dims.value_dim];
    chunk.decay_operand(problem, operand);
    let product = Product::of_transposed((chunk.hat, row), (d, wide), (d_state, wide), [width, columns, rows]);
    product.accumulate(true).compute();
    Product::of((d, wide), (state_t, row), (chunk.hat, row), [rows, width, columns]).compute();
    let (factors, by_channel) = (&*chunk.from_start, problem.by_channel());
    dispatch(Weigh { from: chunk.hat, row, rows, factors, by_channel, to: d_rows });
}

/// The gradients of log decays by the states before and after a chunk: each token is in the decay of the one to the other and, with
/// its rows and those after it, in what they read.
fn by_states<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    unit: &Unit<'_>,
    chunk: &mut Chunk<'_, T>,
    d_operands: &[T],
    (before, d_after): (&[T], &[T]),
    d_logs: &mut [T],
) {
    let (row, wide, rows, gates) = (problem.row, problem.wide, chunk.rows, problem.gate_row());
    let [width, columns] = [problem.dims.head_dim, problem.dims.value_dim];
    let all = &mut chunk.hat[..row.max(1)];
    all.fill(T::ZERO);
    for channel in 0..width {
        let at = channel * wide..channel * wide + columns;
        // Already decayed over the chunk.
        all[if problem.by_channel() { channel } else { 0 }] += dot(&before[at.clone()], &d_after[at]);
    }
    if let Some(state) = cotangent.final_state {
        // Every token adds its log decay to that of the state.
        let [_, sums, ..] = state.head(unit.sequence.batch, unit.kv_head);
        add_scaled(&mut all[..sums.len()], T::ONE, sums);
    }
    for i in (0..rows).rev() {
        let own = &mut d_logs[i * gates..][..gates];
        for n in 0..problem.operands() {
            let at = (n * CHUNK + i) * row;
            let (x, d) = (&chunk.x[at..][..width], &d_operands[at..][..width]);
            if problem.by_channel() { add_products(x, d, &mut all[..width]) } else { all[0] += dot(x, d) }
        }
        own.copy_from_slice(&all[..gates]);
    }
}

/// The gradient of a row from that of the row divided by its length.
fn through_norm<T: Real>(problem: &Problem<'_, T>, chunk: &Chunk<'_, T>, n: usize, d: &[T], to: &mut [T]) {
    if !problem.attention.l2_norm {
        to.copy_from_slice(&d[..to.len()]);
        return;
    }
    let x = &chunk.x[n * problem.row..][..to.len()];
    let inverse = chunk.inverse_lengths[n];
    store(d, inverse, to);
    add_scaled(to, -(inverse * dot(x, &d[..x.len()])), x);
}
