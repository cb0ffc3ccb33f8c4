//! AFT-simple: no bias, so that a row's mean is that of all keys up to a place, and a key collects what all rows from a place on
//! give. One running mean goes through a head's keys in the forward, one sum of rows back through its rows in the backward.
//!
//! Channels do not know of each other: a task is a head of keys, or some channels of it where heads are few. What is summed in which
//! order does not depend on that.

use std::ops::Range;

use super::chunks::{CHUNK, Workers};
use super::gradients::{Backward, rows_of};
use super::items::{Items, join_all};
use super::keys::KeyItems;
use super::log_sum::{PARTS, clear, join, join_items};
use super::outputs::{GatedMean, PullBackMean, PullBackTokens, TokenGradients};
use super::problem::Problem;
use super::running::{FindRunningMax, RunningGradients, RunningMeans};
use super::tokens::Tokens;
use crate::call::{Arena, Dims, Scratch, Sequence, SharedRows, State};
use crate::simd::rows::{Columns, line, padded};
use crate::simd::{Real, dispatch};
use crate::threads;

/// Tokens that are summed under one exponent. Those of a block of keys, values, queries and outputs stay in a core's first cache
/// (16 kB with 64 channels of `f32`) while they are read twice.
const BLOCK: usize = 64;

/// How the rows of a sequence see its keys: some see only the initial state; then come rows that see all keys up to one that is theirs,
/// one more with every row; and rows that see all keys.
struct Sight {
    /// The first row with a key of its own.
    row: usize,
    /// That key: all before are seen by it too.
    key: usize,
    count: usize,
}

impl Sight {
    fn new<T: Real>(problem: &Problem<'_, T>, sequence: &Sequence<'_>) -> Self {
        if !problem.causal {
            return Self { row: 0, key: sequence.keys, count: 0 };
        }
        let offset = problem.call.mask.offset;
        let (row, key) = (offset.min(0).unsigned_abs(), offset.max(0) as usize);
        let (row, key) = (row.min(sequence.queries), key.min(sequence.keys));
        Self { row, key, count: (sequence.queries - row).min(sequence.keys - key) }
    }

    /// Pieces of the sight, as distances from its beginning.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        let count = self.count;
        (0..count.div_ceil(BLOCK)).map(move |n| n * BLOCK..((n + 1) * BLOCK).min(count))
    }
}

/// Channels of a head of a sequence.
struct Task {
    sequence: usize,
    kv_head: usize,
    channels: Range<usize>,
}

/// Calls `body` for every task of a call, with `each` numbers of memory: heads, cut into parts if there are not enough of them for all
/// threads.
fn for_each_task<T: Real>(
    problem: &Problem<'_, T>,
    each: usize,
    scratch: &mut Scratch<T>,
    body: impl Fn(&Task, &mut [T]) + Sync,
) {
    let (kv_heads, lines) = (problem.dims.kv_heads, problem.width / line::<T>());
    let heads = problem.sequences.len() * kv_heads;
    let parts = (2 * threads::count()).div_ceil(heads.max(1)).clamp(1, lines.max(1));
    let bound = |part: usize| (part * lines / parts * line::<T>()).min(problem.dims.head_dim);
    Workers::in_scratch(heads * parts, each, scratch).run(heads * parts, |task, work| {
        let (head, part) = (task / parts, task % parts);
        let channels = bound(part)..bound(part + 1);
        body(&Task { sequence: head / kv_heads, kv_head: head % kv_heads, channels }, work);
    });
}

/// Memory for the forward pass of one task: three means, largest keys, and items of a chunk and one more.
fn means_memory<'w, T: Real>(arena: &mut Arena<'w, T>, width: usize) -> [&'w mut [T]; 5] {
    let mean = PARTS * width;
    [mean, mean, mean, width, (CHUNK + 1) * mean].map(|len| arena.take(len))
}

/// Writes every output, and the means after the last key into the final state, if one is asked for.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    out: SharedRows<'_, T>,
    final_state: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let Dims { head_dim, kv_heads, .. } = problem.dims;
    let state = final_state.map(|state| {
        let len = state.shape().head_len();
        SharedRows::new(state.numbers_mut(), [0, 0, len])
    });
    let each = Arena::measure(|arena| means_memory::<T>(arena, problem.width));
    for_each_task(problem, each, scratch, |task, work| {
        let sum = means(problem, task, out, state.is_some(), work);
        let Some(state) = state else { return };
        let (width, Range { start, end }) = (sum.len() / PARTS, task.channels.clone());
        let index = problem.sequences[task.sequence].batch * kv_heads + task.kv_head;
        // Numerators, denominators and exponents.
        for (part, row) in [2, 3, 0].into_iter().enumerate() {
            let columns = part * head_dim + start..part * head_dim + end;
            // SAFETY: these channels of a head belong to one task, and the columns end here.
            let mut to = unsafe { state.columns([0, 0, index], 1, columns) };
            to.row(0).copy_from_slice(&sum[row * width..][..end - start]);
        }
    });
}

/// Writes the outputs of one task. Returns the mean of all keys, if it is wanted.
fn means<'w, T: Real>(
    problem: &Problem<'_, T>,
    task: &Task,
    out: SharedRows<'_, T>,
    to_the_end: bool,
    work: &'w mut [T],
) -> &'w [T] {
    let sequence = &problem.sequences[task.sequence];
    let items = KeyItems::new(problem, sequence, task.kv_head).columns(task.channels.clone());
    let sight = Sight::new(problem, sequence);
    let width = padded::<T>(task.channels.len());
    let [sum, own, part, running_max, block] = means_memory(&mut Arena::new(work), width);
    let heads = problem.dims.heads_of(task.kv_head);
    // Queries from a row on, and outputs.
    let of = |head: usize, row: usize, count: usize| {
        let queries = || rows_of(&problem.call.q, sequence, head, row, task.channels.start);
        let place = [sequence.batch, head, sequence.query_start + row];
        // SAFETY: these channels of a head belong to one task, which has one block of its rows at a time.
        let outputs = unsafe { out.columns(place, count, task.channels.clone()) };
        (problem.aft.gate.then(queries), outputs)
    };
    let constant = |rows: Range<usize>, mean: &[T]| {
        for head in heads.clone() {
            let (queries, to) = of(head, rows.start, rows.len());
            dispatch(GatedMean { mean, queries, to });
        }
    };
    items.start(sum);
    constant(0..sight.row, sum);
    join_all(&items, 0, sight.key as isize, sum, block);
    for at in sight.blocks() {
        threads::check();
        let (row, key, count) = (sight.row + at.start, (sight.key + at.start) as isize, at.len());
        let running = items.tokens(key, count).filter(|&tokens| {
            let running_max = &mut *running_max;
            dispatch(FindRunningMax { tokens, before: sum, running_max })
        });
        if let Some(tokens) = running {
            for head in heads.clone() {
                own.copy_from_slice(sum);
                let (queries, to) = of(head, row, count);
                dispatch(RunningMeans { tokens, queries, running_max, mean: own, to });
            }
            sum.copy_from_slice(own);
            continue;
        }
        let own_items = items.load(key, count, block);
        for head in heads.clone() {
            own.copy_from_slice(sum);
            for (n, item) in own_items.chunks_exact(sum.len()).enumerate() {
                join(own, item, T::ZERO);
                let (queries, to) = of(head, row + n, 1);
                dispatch(GatedMean { mean: own, queries, to });
            }
        }
        join_items(own_items, part);
        join(sum, part, T::ZERO);
    }
    constant(sight.row + sight.count..sequence.queries, sum);
    if to_the_end {
        join_all(&items, (sight.key + sight.count) as isize, sequence.keys as isize, sum, block);
    }
    sum
}

/// Memory for the backward pass of one task: six means, largest keys, items of a chunk and one more, rows of a block, what a block of
/// tokens keeps for the way back, and exponents and denominators before each block of the sight.
fn gradients_memory<'w, T: Real>(
    arena: &mut Arena<'w, T>,
    width: usize,
    blocks: usize,
) -> ([&'w mut [T]; 6], [&'w mut [T]; 5]) {
    let mean = PARTS * width;
    let others = [width, (CHUNK + 1) * mean, BLOCK * mean, 12 * line::<T>() * BLOCK, blocks * 2 * width];
    ([mean; 6].map(|len| arena.take(len)), others.map(|len| arena.take(len)))
}

pub(super) fn backward<T: Real>(call: &Backward<'_, T>, scratch: &mut Scratch<T>) {
    let problem = call.problem;
    let blocks = problem.sequences.iter().map(|sequence| Sight::new(problem, sequence).blocks().len()).max();
    let each = Arena::measure(|arena| gradients_memory::<T>(arena, problem.width, blocks.unwrap_or(0)));
    for_each_task(problem, each, scratch, |task, work| gradients(call, task, work));
}

/// Writes the gradients of one task: forward through the keys for the means of rows, of which denominators are all that counts; and
/// back through rows and keys at once, with the sum of the rows from each on.
fn gradients<T: Real>(call: &Backward<'_, T>, task: &Task, work: &mut [T]) {
    let problem = call.problem;
    let sequence = &problem.sequences[task.sequence];
    let items = KeyItems::new(problem, sequence, task.kv_head).columns(task.channels.clone());
    let sight = Sight::new(problem, sequence);
    let channels = &task.channels;
    let width = padded::<T>(channels.len());
    let mean = PARTS * width;
    let ([start, end, own, after, far, item], [running_max, block, rows_block, kept, edges]) =
        gradients_memory(&mut Arena::new(work), width, sight.blocks().len());
    items.start(start);
    end.copy_from_slice(start);
    let add = |keys: Range<usize>, end: &mut [T], block: &mut [T]| {
        let (part, block) = block.split_at_mut(mean);
        items.sum_of(keys.start as isize, keys.len(), false, part, block);
        join(end, part, T::ZERO);
    };
    for key in (0..sight.key).step_by(CHUNK) {
        add(key..(key + CHUNK).min(sight.key), end, block);
    }
    for (at, edge) in sight.blocks().zip(edges.chunks_exact_mut(2 * width)) {
        threads::check();
        edge[..width].copy_from_slice(&end[..width]);
        edge[width..].copy_from_slice(&end[3 * width..]);
        add(sight.key + at.start..sight.key + at.end, end, block);
    }

    clear(far);
    for (index, head) in problem.dims.heads_of(task.kv_head).enumerate() {
        let output_rows = |rows: &Range<usize>| call.rows(sequence, head, rows.start, rows.len(), channels.start);
        let d_queries = |rows: &Range<usize>| {
            let place = [sequence.batch, head, sequence.query_start + rows.start];
            // SAFETY: these channels of a head belong to one task, which has one block of its rows at a time.
            unsafe { call.dq.columns(place, rows.len(), channels.clone()) }
        };
        let d_tokens = |keys: &Range<usize>| {
            let place = [sequence.batch, task.kv_head, sequence.key_start + keys.start];
            // SAFETY: as for the queries.
            unsafe {
                let dk = call.dk.columns(place, keys.len(), channels.clone());
                TokenGradients { dk, dv: call.dv.columns(place, keys.len(), channels.clone()), add: index > 0 }
            }
        };
        // Rows that all have one mean.
        let constant_rows = |rows: Range<usize>, mean: &[T], after: &mut [T], item: &mut [T]| {
            for from in rows.clone().step_by(CHUNK).rev() {
                let rows = from..(from + CHUNK).min(rows.end);
                let item = &mut *item;
                dispatch(PullBackMean { mean, rows: output_rows(&rows), item, dq: d_queries(&rows) });
                join(after, item, T::ZERO);
            }
        };
        // Keys that are all seen by the same rows.
        let constant_keys = |keys: Range<usize>, rows: &[T]| {
            for from in keys.clone().step_by(CHUNK) {
                let keys = from..(from + CHUNK).min(keys.end);
                if let Some(tokens) = items.tokens(from as isize, keys.len()) {
                    dispatch(PullBackTokens { tokens, rows, to: d_tokens(&keys) });
                    continue;
                }
                for key in keys {
                    let mut to = d_tokens(&(key..key + 1));
                    match items.token(key as isize) {
                        Some((key, value)) => dispatch(PullBackTokens { tokens: Tokens::single(key, value), rows, to }),
                        None if to.add => (),
                        None => [&mut to.dk, &mut to.dv].into_iter().for_each(|to| to.row(0).fill(T::ZERO)),
                    }
                }
            }
        };
        clear(after);
        if let Some(last) = call.last_item(sequence, task.kv_head).filter(|_| index == 0) {
            for (to, from) in after.chunks_exact_mut(width).zip(last.chunks_exact(problem.width)) {
                to.copy_from_slice(&from[channels.start..][..width]);
            }
        }
        constant_keys(sight.key + sight.count..sequence.keys, after);
        constant_rows(sight.row + sight.count..sequence.queries, end, after, item);
        for (at, edge) in sight.blocks().zip(edges.chunks_exact(2 * width)).rev() {
            threads::check();
            let (rows, keys) = (sight.row + at.start..sight.row + at.end, sight.key + at.start..sight.key + at.end);
            clear(own);
            own[..width].copy_from_slice(&edge[..width]);
            own[3 * width..].copy_from_slice(&edge[width..]);
            let running = items.tokens(keys.start as isize, keys.len()).filter(|&tokens| {
                let running_max = &mut *running_max;
                dispatch(FindRunningMax { tokens, before: own, running_max })
            });
            if let Some(tokens) = running {
                let (dq, to, work) = (d_queries(&rows), d_tokens(&keys), &mut *kept);
                let rows = output_rows(&rows);
                dispatch(RunningGradients { tokens, rows, running_max, before: own, after, work, dq, to });
                continue;
            }
            let own_items = items.load(keys.start as isize, keys.len(), block);
            let row_items = &mut rows_block[..keys.len() * mean];
            for (row, (key, item)) in rows.zip(own_items.chunks_exact(mean).zip(row_items.chunks_exact_mut(mean))) {
                join(own, key, T::ZERO);
                let row = row..row + 1;
                dispatch(PullBackMean { mean: own, rows: output_rows(&row), item, dq: d_queries(&row) });
            }
            for (key, row) in keys.zip(row_items.chunks_exact(mean)).rev() {
                join(after, row, T::ZERO);
                constant_keys(key..key + 1, after);
            }
        }
        constant_keys(0..sight.key, after);
        constant_rows(0..sight.row, start, after, item);
        join(far, after, T::ZERO);
    }

    // The initial state's mean is a key without a value that every row sees.
    // SAFETY: these channels of a head have one task.
    let to = unsafe { call.far_gradient(sequence, task.kv_head, channels.clone()) };
    if let Some((head, numerator, denominator)) = to {
        let zeros = &mut item[..channels.len()];
        zeros.fill(T::ZERO);
        let tokens = Tokens::single(&head.exponent[channels.clone()], zeros);
        let to = TokenGradients { dk: Columns::single(denominator), dv: Columns::single(numerator), add: false };
        dispatch(PullBackTokens { tokens, rows: far, to });
    }
}
