//! Gradients of AFT-conv, in two walks as for the other variants. A pair's weight is one number, so that the first one needs
//! no values: exponents and weights of all rows come from keys alone.

use super::band;
use super::field::{Work, clear, header, join};
use super::geometry::{Edges, Geometry};
use super::sources::{KeySource, RowSource, kernel};
use super::walk::{add_tap_gradients, walk};
use crate::aft::chunks::{CHUNK, Chunks, Window, Workers};
use crate::aft::gradients::{BLOCK_NUMBERS, Backward, GROUPS};
use crate::aft::kernel as reparametrized;
use crate::aft::options::Variant;
use crate::aft::outputs::{PullBackRows, PullBackSums, TokenGradients};
use crate::aft::problem::{Bias, Block, Problem};
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::block::{Exp, floor, scale_by};
use crate::simd::rows::{Columns, Rows};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Numbers that a block keeps, up to which a thread of its own has it.
const BLOCK_ALONE: usize = 1 << 20;

/// A block with its lines.
struct Sides {
    block: Block,
    /// Of queries, on keys.
    queries: Vec<Window>,
    /// Of keys, on queries.
    keys: Vec<Window>,
    /// The first row of each sequence, and how many there are in all.
    starts: Vec<usize>,
    rows: usize,
}

/// Rows as keys see them, of all units one after the other: exponents in two parts, weights and rows.
type RowMemory<'m, T> = [&'m mut [T]; 4];

impl Sides {
    fn new<T: Real>(problem: &Problem<'_, T>, geometry: &Geometry, block: Block) -> Self {
        let (starts, rows) = block.rows(problem);
        let queries = geometry.windows(problem, &block, false);
        Self { queries, keys: geometry.turned().windows(problem, &block, true), block, starts, rows }
    }

    /// Memory beside that of workers: of rows, and of the edges of either side.
    fn memory<'m, T: Real>(
        &self,
        problem: &Problem<'_, T>,
        geometry: &Geometry,
        arena: &mut Arena<'m, T>,
    ) -> (RowMemory<'m, T>, [&'m mut [T]; 2]) {
        let rows = [1, 1, 1, problem.width].map(|width| arena.take(self.rows * width));
        let queries = Edges::<T>::memory(geometry, &self.queries, self.block.heads.len(), 0);
        let keys = Edges::<T>::memory(geometry, &self.keys, self.block.query_heads(problem), problem.width);
        (rows, [arena.take(queries), arena.take(keys)])
    }
}

pub(in crate::aft) fn backward<T: Real>(
    call: &Backward<'_, T>,
    geometry: Geometry,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let problem = call.problem;
    let dims = &problem.dims;
    let Bias::Kernel { kernels, taps } = &problem.bias else { return };
    let reversed: Vec<T> = kernels.chunks_exact(*taps).flat_map(|kernel| kernel.iter().rev().copied()).collect();
    let blocks = Block::all(problem, BLOCK_NUMBERS).into_iter();
    let blocks: Vec<Sides> = blocks.map(|block| Sides::new(problem, &geometry, block)).collect();
    let sums = 2 * (header::<T>() + problem.width);
    let each = (Work::<T>::len(geometry.most(), problem.width) + CHUNK.max(sums)).next_multiple_of(64);
    let memory_of = |sides: &Sides| Arena::measure(|arena| sides.memory(problem, &geometry, arena));
    let memory = blocks.iter().map(memory_of).max().unwrap_or(0).next_multiple_of(64);
    // Blocks side by side, if all threads have as many and the second cache holds what they keep; else one after the other, each on all
    // threads. The numbers are the same.
    let workers = threads::count().max(1);
    let apart = memory <= BLOCK_ALONE && (blocks.len().is_multiple_of(workers) || blocks.len() >= 16 * workers);
    // Each head of each sequence has so many sums, whatever the number of threads.
    let planes = problem.sequences.len() * dims.heads * GROUPS;
    let own = if apart { workers.min(blocks.len()) * (memory + each) } else { memory };
    let shared = if apart { 0 } else { workers * each };
    let taken = Arena::<T>::measure(|arena| [planes * taps, own, shared].map(|len| arena.take(len)));
    let mut arena = Arena::new(scratch.take(taken));
    let [d_taps, own, shared] = [planes * taps, own, shared].map(|len| arena.take(len));
    d_taps.fill(T::ZERO);
    let planes = SharedRows::new(&mut *d_taps, [0, 0, *taps]);
    let one = |sides: &Sides, memory: &mut [T], workers: &mut Workers<'_, T>| {
        block(call, &geometry, sides, &reversed, planes, memory, workers);
    };
    if apart {
        parallel(blocks.len(), own, memory + each, |index, own| {
            let (memory, work) = own.split_at_mut(memory);
            one(&blocks[index], memory, &mut Workers::alone(work));
        });
    } else {
        let mut workers = Workers::new(workers, each, &mut Arena::new(shared));
        blocks.iter().for_each(|sides| one(sides, own, &mut workers));
    }
    let add = |to: &mut [T]| {
        to.fill(T::ZERO);
        for (plane, part) in d_taps.chunks_exact(*taps).enumerate() {
            let head = plane / GROUPS % dims.heads;
            to[head * taps..][..*taps].iter_mut().zip(part).for_each(|(to, &d)| *to += d);
        }
    };
    match problem.aft.variant {
        Variant::Conv { normalized: true, .. } | Variant::Conv2d { normalized: true, .. } => {
            let mut d = vec![T::ZERO; kernels.len()];
            add(&mut d);
            reparametrized::pull_back(problem.call.parameters, *taps, &d, parameters);
        }
        _ => add(parameters[0]),
    }
}

/// Writes the gradients of one block, and adds to those of taps.
fn block<T: Real>(
    call: &Backward<'_, T>,
    geometry: &Geometry,
    sides: &Sides,
    reversed: &[T],
    d_taps: SharedRows<'_, T>,
    memory: &mut [T],
    workers: &mut Workers<'_, T>,
) {
    let problem = call.problem;
    let (dims, width) = (&problem.dims, problem.width);
    let Sides { block, keys, starts, .. } = sides;
    let (sequences, kv_heads) = (block.sequences(problem), block.heads.len());
    let (mut row_memory, [query_edges, key_edges]) = sides.memory(problem, geometry, &mut Arena::new(memory));
    let of_rows = row_memory.each_mut().map(|part| &mut **part);
    query_side(call, geometry, sides, of_rows, d_taps, query_edges, workers);

    let [x, b, d, rows] = row_memory.map(|part| &*part);
    let turned = geometry.turned();
    let source = |index: usize, local: usize| {
        let queries = sequences[index].queries;
        let own = starts[index] + local * queries..starts[index] + (local + 1) * queries;
        let [x, b, d] = [x, b, d].map(|part| &part[own.clone()]);
        RowSource { x, b, d, rows: &rows[own.start * width..own.end * width], places: geometry.places }
    };
    let of_keys = (&keys[..], block.query_heads(problem), width);
    let edges = Edges::new(&turned, of_keys, source, |_, _, _| (), key_edges, workers);

    // The initial state's mean is a key without a value that every row sees.
    let far = if problem.lend { sequences.len() * kv_heads } else { 0 };
    let len = header::<T>() + width;
    workers.run(far, |task, work| {
        let (index, own_head) = (task / kv_heads, task % kv_heads);
        let (sequence, kv_head) = (&sequences[index], block.heads.start + own_head);
        let (sums, work) = work.split_at_mut(2 * len);
        let (all, own) = sums.split_at_mut(len);
        clear(all);
        for local in dims.heads_of(own_head) {
            let mut work = Work::new(&mut *work, geometry.most(), width);
            let range = (0, sequence.queries as isize);
            turned.field(keys[index], 0, &[]).sum(&source(index, local), range, &mut work, own);
            join(all, own);
        }
        if let Some(last) = call.last_item(sequence, kv_head) {
            // A mean with an exponent for each channel, all the same.
            own[..header::<T>()].fill(T::ZERO);
            (own[0], own[2]) = (last[0].max(floor()), last[3 * width]);
            own[header::<T>()..].copy_from_slice(&last[2 * width..3 * width]);
            join(all, own);
        }
        // SAFETY: every head of every sequence has one task.
        let far = unsafe { call.far_gradient(sequence, kv_head, 0..dims.head_dim) };
        let Some((head, numerator, denominator)) = far else { return };
        let factor = ((head.exponent[0] + all[0]) + all[1]).exp();
        for (to, &d) in numerator.iter_mut().zip(&all[header::<T>()..]) {
            *to = factor * d;
        }
        denominator[0] = -factor * all[2];
    });

    let chunks = Chunks::new(keys.clone(), kv_heads);
    workers.run_chunks(chunks.tasks(), |task, work| {
        let (line, own_head, chunk) = chunks.task(task);
        let (index, window) = (line / geometry.lines, &keys[line]);
        let (sequence, kv_head) = (&sequences[index], block.heads.start + own_head);
        let items = KeySource::new(problem, geometry, block.sequences.start + index, kv_head).items;
        let lent = problem.lent(sequence) as isize;
        let (factors, work) = work.split_at_mut(CHUNK);
        let (from, to) = window.chunk(chunk);
        let place = |n: usize| (geometry.start(line) + from + n) as isize - lent;
        // Keys that have no more than the gradients of this call's rows.
        let tokens = if call.last.is_some() || problem.lend { None } else { items.tokens(place(0), to - from) };
        for local in dims.heads_of(own_head) {
            let head = block.heads.start * dims.group() + local;
            let first = local == dims.heads_of(own_head).start;
            let kernel = &reversed[head * kernel(problem, head).len()..];
            let field = turned.field(*window, line % geometry.lines, kernel);
            let mut work = Work::new(&mut *work, geometry.most(), width);
            let edges = edges.of(window, line, local, chunk);
            let one = walk(&source(index, local), &field, chunk, edges, &mut work);
            let mut largest = T::ZERO;
            for (n, factor) in factors.iter_mut().enumerate().take(to - from) {
                let k = items.token(place(n)).map_or(T::NEG_INFINITY, |(key, _)| key[0]);
                *factor = (k + work.x[n]) + work.b[n];
                largest = largest.max(*factor);
            }
            // Relative to one exponent for many rows, that of a row may be above its key's.
            factors.iter_mut().for_each(|factor| *factor -= largest);
            dispatch(Exp { to: factors });
            if largest > T::ZERO {
                scale_by(factors, largest.exp());
            }
            if let Some(tokens) = tokens.filter(|_| one) {
                let token = [sequence.batch, kv_head, sequence.key_start + place(0) as usize];
                // SAFETY: every key belongs to one chunk of one key head, and the columns end here.
                let to = unsafe {
                    TokenGradients {
                        dk: call.dk.columns(token, tokens.count, 0..1),
                        dv: call.dv.columns(token, tokens.count, 0..dims.head_dim),
                        add: !first,
                    }
                };
                let (factors, values) = (&factors[..tokens.count], tokens.values);
                dispatch(PullBackSums { sums: work.sums, width, factors, d: work.d, values, to });
                continue;
            }
            for (n, factor) in factors.iter().enumerate().take(to - from) {
                let key = place(n);
                let add = |(own_key, value): (&[T], &[T]), dk: &mut [T], dv: &mut [T]| {
                    let mut add = |sums: &[T], factor: &T, d: &T| {
                        let to = TokenGradients { dk: Columns::single(dk), dv: Columns::single(dv), add: true };
                        let (factors, d) = (std::slice::from_ref(factor), std::slice::from_ref(d));
                        let values = Rows { data: value, stride: 0 };
                        dispatch(PullBackSums { sums, width, factors, d, values, to });
                    };
                    // A key that no row sees has gradient 0 whatever it is.
                    if work.x[n] - floor() > T::ZERO {
                        add(&work.sums[n * width..][..width], factor, &work.d[n]);
                    }
                    if let Some(last) = call.leaving(sequence, kv_head, key).filter(|_| first) {
                        add(&last[2 * width..3 * width], &(own_key[0] + last[0]).exp(), &last[3 * width]);
                    }
                };
                // SAFETY: every key belongs to one chunk of one key head.
                unsafe { call.add_to_key(&items, sequence, kv_head, key, first, add) };
            }
        }
    });
}

/// Gradients of queries, sums of those of taps, and the rows as keys see them.
fn query_side<T: Real>(
    call: &Backward<'_, T>,
    geometry: &Geometry,
    sides: &Sides,
    of_rows: RowMemory<'_, T>,
    d_taps: SharedRows<'_, T>,
    memory: &mut [T],
    workers: &mut Workers<'_, T>,
) {
    let problem = call.problem;
    let (dims, width) = (&problem.dims, problem.width);
    let Sides { block, queries, starts, .. } = sides;
    let (heads, kv_heads) = (block.query_heads(problem), block.heads.len());
    let source = |index: usize, head: usize| {
        KeySource::new(problem, geometry, block.sequences.start + index, block.heads.start + head)
    };
    let initial = |index: usize, head: usize, sum: &mut [T]| {
        if let Some(far) = problem.initial(&block.sequences(problem)[index], block.heads.start + head) {
            (sum[0], sum[2]) = (far.exponent[0], far.denominator[0]);
        }
    };
    let edges = Edges::new(geometry, (queries, kv_heads, 0), source, initial, memory, workers);
    let taps = kernel(problem, 0).len();
    let [x, b, d, rows] = of_rows;
    let [x, b, d] = [x, b, d].map(|line| SharedRows::new(line, [0, 0, 1]));
    let rows = SharedRows::new(rows, [0, 0, width]);
    workers.run(block.sequences.len() * heads * GROUPS, |task, work| {
        let (unit, group) = (task / GROUPS, task % GROUPS);
        let (index, local) = (unit / heads, unit % heads);
        let sequence = &block.sequences(problem)[index];
        let head = block.heads.start * dims.group() + local;
        let own_head = local / dims.group();
        let per_line = queries[index * geometry.lines].chunks();
        let count = per_line * geometry.lines;
        let kernel = kernel(problem, head);
        let plane = ((block.sequences.start + index) * dims.heads + head) * GROUPS + group;
        // SAFETY: every group of every head of every sequence has a plane of its own.
        let d_taps = unsafe { d_taps.row(0, 0, plane, taps) };
        let (c, work) = work.split_at_mut(CHUNK);
        for at in group * count / GROUPS..(group + 1) * count / GROUPS {
            let (y, chunk) = (at / per_line, at % per_line);
            let line = index * geometry.lines + y;
            let (window, items) = (&queries[line], source(index, own_head));
            let field = geometry.field(*window, y, kernel);
            let mut work = Work::new(&mut *work, geometry.most(), width);
            let one = walk(&items, &field, chunk, edges.of(window, line, own_head, chunk), &mut work);
            let (from, to) = window.chunk(chunk);
            let start = geometry.start(line);
            let (count, at) = (to - from, starts[index] + local * sequence.queries + start + from);
            let token = sequence.query_start + start + from;
            // SAFETY: every row belongs to one chunk of one head, and slices and columns end with the chunk.
            let (dq, own, x, b, d) = unsafe {
                (
                    call.dq.columns([sequence.batch, head, token], count, 0..dims.head_dim),
                    rows.row(0, 0, at, count * width),
                    x.row(0, 0, at, count),
                    b.row(0, 0, at, count),
                    d.row(0, 0, at, count),
                )
            };
            for n in 0..count {
                let seen = work.d[n] != T::ZERO;
                (x[n], b[n]) = if seen { (-work.x[n], -work.b[n]) } else { (T::NEG_INFINITY, T::ZERO) };
                d[n] = if seen { T::ONE / work.d[n] } else { T::ZERO };
            }
            let output_rows = call.rows(sequence, head, start + from, count, 0);
            dispatch(PullBackRows { rows: output_rows, factors: d, dq, items: own, sums: c });
            c[count..].fill(T::ZERO);
            d.copy_from_slice(&c[..count]);
            let d_taps = &mut d_taps[(kernel.len() - field.kernel.len()).min(taps)..];
            if one {
                let base = from as isize + window.shift - window.back;
                band::add_tap_gradients(&items, &field, base, own, c, width, &mut work, d_taps);
                continue;
            }
            let (row_items, rest) = work.sums[..CHUNK * width].split_at_mut(count * width);
            row_items.copy_from_slice(own);
            rest.fill(T::ZERO);
            add_tap_gradients(&items, &field, chunk, width, c, &mut work, d_taps);
        }
    });
}
