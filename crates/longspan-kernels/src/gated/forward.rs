//! The forward pass: a key/value head of a sequence at a time, chunk after chunk.

use super::chunk::{Chunk, load_rows};
use super::problem::{Problem, Unit};
use crate::call::{Arena, Scratch, SharedRows, Sink, State};
use crate::simd::Real;
use crate::simd::block::store;
use crate::simd::rows::Rows;
use crate::threads::{self, parallel};

struct Worker<'s, T> {
    chunk: Chunk<'s, T>,
    state: &'s mut [T],
    u: &'s mut [T],
    out: &'s mut [T],
}

impl<'s, T: Real> Worker<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        let values = super::problem::CHUNK * problem.wide;
        Self {
            chunk: Chunk::new(problem, false, arena),
            state: arena.take(problem.row * problem.wide),
            u: arena.take(values),
            out: arena.take(values),
        }
    }
}

/// Computes every output of a call, and the state after its last key.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    sink: Sink<'_, T>,
    final_state: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let tasks = problem.units();
    let per_worker = Arena::measure(|arena| Worker::new(problem, arena));
    let workers = threads::count().min(tasks);
    let final_state = final_state.map(|state| {
        let len = state.shape().head_len();
        SharedRows::new(state.numbers_mut(), [len, 0, 0])
    });
    parallel(tasks, scratch.take(workers * per_worker), per_worker, |task, scratch| {
        let mut worker = Worker::new(problem, &mut Arena::new(scratch));
        let unit = problem.unit(task);
        load_state(problem, &unit, worker.state);
        for (first, rows) in problem.chunks(&unit, false) {
            threads::check();
            // Nobody reads the state after the last chunk unless it is asked for.
            let goes_on = first + rows < unit.tokens() || final_state.is_some();
            one_chunk(problem, sink, &unit, &mut worker, (first, rows), goes_on);
        }
        if let Some(places) = &final_state {
            // SAFETY: a call with a final state has one sequence for each batch entry, so each head belongs to one task.
            let to = unsafe { places.row(task, 0, 0, problem.state_len()) };
            store_state(problem, &unit, worker.state, to);
        }
    });
}

fn one_chunk<T: Real>(
    problem: &Problem<'_, T>,
    sink: Sink<'_, T>,
    unit: &Unit<'_>,
    worker: &mut Worker<'_, T>,
    (first, rows): (usize, usize),
    goes_on: bool,
) {
    let Worker { chunk, state, u, out } = worker;
    chunk.load(problem, unit, first, rows);
    chunk.weigh(problem);
    chunk.updates(problem, state, u, None);
    for (n, head) in problem.dims.heads_of(unit.kv_head).enumerate() {
        chunk.outputs(problem, n, state, u, out);
        for token in 0..rows {
            let place = [unit.sequence.batch, head, unit.sequence.query_start + first + token];
            // SAFETY: each (batch, head, token) belongs to one task.
            let to = unsafe { sink.out.row(place[0], place[1], place[2], problem.dims.value_dim) };
            store(&out[token * problem.wide..], problem.scale, to);
            // SAFETY: as above.
            unsafe { sink.set_denominator(place, &[T::ONE]) };
        }
    }
    if goes_on {
        chunk.advance(problem, state, u);
    }
}

impl<T: Real> Problem<'_, T> {
    /// Numbers of one head's state that mean something.
    pub fn state_len(&self) -> usize {
        self.dims.head_dim * self.dims.value_dim + self.attention.gate_len(self.dims.head_dim)
    }
}

/// The state before a unit's first token.
pub(super) fn load_state<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_>, to: &mut [T]) {
    let (width, wide) = (problem.dims.value_dim, problem.wide);
    match problem.call.initial_state {
        Some(state) => {
            let [sum, ..] = state.head(unit.sequence.batch, unit.kv_head);
            load_rows(Rows { data: sum, stride: width }, width, (to, wide), problem.dims.head_dim, |_| false);
        }
        None => to.fill(T::ZERO),
    }
}

/// Writes `S` and the sum of all log decays.
fn store_state<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_>, state: &[T], to: &mut [T]) {
    let (width, wide) = (problem.dims.value_dim, problem.wide);
    let (sum, gates) = to.split_at_mut(problem.dims.head_dim * width);
    for (to, row) in sum.chunks_exact_mut(width.max(1)).zip(state.chunks_exact(wide.max(1))) {
        to.copy_from_slice(&row[..width]);
    }
    match problem.call.initial_state {
        Some(state) => gates.copy_from_slice(state.head(unit.sequence.batch, unit.kv_head)[1]),
        None => gates.fill(T::ZERO),
    }
    let logs = problem.log_decays(unit);
    for token in (0..unit.sequence.keys).filter(|&token| !unit.ignores(token)) {
        gates.iter_mut().zip(logs.row(token, logs.stride)).for_each(|(sum, &g)| *sum += g);
    }
}
