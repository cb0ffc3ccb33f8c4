//! AFT-simple: no bias, so that a row's mean is that of all keys up to a place, and a key collects what all rows from a place on
//! give. One running mean goes through a head's keys in the forward, one sum of rows back through its rows in the backward.
//!
//! Channels do not know of each other: a task is a head of keys, or some channels of it where heads are few. What is summed in which
//! order does not depend on that.

use std::ops::Range;

use super::backward::GradientSink;
use super::keys::KeyItems;
use super::problem::{CHUNK, Problem};
use super::state;
use super::state_gradient::{Links, far_item};
use super::walk::{Items, clear, join_all, join_items};
use crate::aft::log_sum::{GatedMean, KeyGradient, OutputRow, PARTS, RowCotangent, Tokens, join};
use crate::aft::running::{
    ConstantCotangents, ConstantGradients, ConstantMeans, FindRunningMax, OutputRows, RunningGradients, RunningMeans,
    TokenGradients,
};
use crate::call::{Arena, Cotangent, Dims, Scratch, Sequence, SharedRows, State, View, ViewMut};
use crate::simd::rows::{Rows, line, padded};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

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

/// All tasks of a call: heads, cut into parts if there are not enough of them for all threads.
struct Tasks {
    heads: usize,
    parts: usize,
    count: usize,
}

impl Tasks {
    fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let (heads, lines) = (problem.dims.kv_heads, problem.width / line::<T>());
        let all = problem.sequences.len() * heads;
        let parts = (2 * threads::count()).div_ceil(all.max(1)).clamp(1, lines.max(1));
        Self { heads, parts, count: all * parts }
    }

    fn get<T: Real>(&self, problem: &Problem<'_, T>, index: usize) -> Task {
        let (head, part) = (index / self.parts, index % self.parts);
        let lines = problem.width / line::<T>();
        let bound = |part: usize| (part * lines / self.parts * line::<T>()).min(problem.dims.head_dim);
        Task { sequence: head / self.heads, kv_head: head % self.heads, channels: bound(part)..bound(part + 1) }
    }
}

/// The rows of one batch entry and head from a token on, in some channels.
fn rows_of<'a, T>(view: &View<'a, T>, batch: usize, head: usize, token: usize, channels: &Range<usize>) -> Rows<'a, T> {
    let rows = view.rows(batch, head).skip(token);
    Rows { data: &rows.data[channels.start.min(rows.data.len())..], ..rows }
}

/// Numbers of a task's working memory: seven means, the tops, and a block of items and gradients.
fn work_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    let mean = problem.mean();
    8 * mean + (2 * CHUNK + 2) * mean + 12 * line::<T>() * BLOCK + 64
}

/// Writes every output, and the means after the last key into the final state, if one is asked for.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    out: SharedRows<'_, T>,
    final_state: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let Dims { head_dim, heads, kv_heads, .. } = problem.dims;
    let mut state = final_state.map(|state| {
        state::write_marks(problem, state);
        let len = state.shape().head_len();
        ViewMut::strided(state.numbers_mut(), [0, 0, len])
    });
    if head_dim == 0 || (heads == 0 && state.is_none()) {
        return;
    }
    let state = state.as_mut().map(|numbers| numbers.shared());
    let tasks = Tasks::new(problem);
    let per_worker = work_len(problem).next_multiple_of(64);
    let workers = threads::count().min(tasks.count).max(1);
    parallel(tasks.count, scratch.take(workers * per_worker), per_worker, |task, work| {
        let task = tasks.get(problem, task);
        let sum = means(problem, &task, out, state.is_some(), work);
        let Some(state) = state else { return };
        let (width, Range { start, end }) = (sum.len() / PARTS, task.channels);
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
    let mean = PARTS * width;
    let mut arena = Arena::new(work);
    let [sum, own, part] = [(); 3].map(|()| arena.take(mean));
    let running_max = arena.take(width);
    let block = arena.take((CHUNK + 1) * mean);
    let group = problem.dims.group();
    let heads = task.kv_head * group..(task.kv_head + 1) * group;
    let queries = |head: usize, row: usize| {
        let rows = || rows_of(&problem.call.q, sequence.batch, head, sequence.query_start + row, &task.channels);
        problem.aft.gate.then(rows)
    };
    let outputs = |head: usize, row: usize, count: usize| {
        let place = [sequence.batch, head, sequence.query_start + row];
        // SAFETY: these channels of a head belong to one task, which has one block of its rows at a time.
        unsafe { out.columns(place, count, task.channels.clone()) }
    };
    let constant = |rows: Range<usize>, sum: &[T]| {
        for head in heads.clone() {
            let mut to = outputs(head, rows.start, rows.len());
            dispatch(ConstantMeans { queries: queries(head, rows.start), mean: sum, to: &mut to });
        }
    };
    items.start(sum);
    constant(0..sight.row, sum);
    join_all(&items, 0, sight.key as isize, sum, block);
    for at in sight.blocks() {
        let (row, key, count) = (sight.row + at.start, (sight.key + at.start) as isize, at.len());
        if let Some(tokens) = items
            .tokens(key, count)
            .filter(|tokens| dispatch(FindRunningMax { tokens: *tokens, before: sum, running_max }))
        {
            for head in heads.clone() {
                own.copy_from_slice(sum);
                let tokens = Tokens { queries: queries(head, row), ..tokens };
                dispatch(RunningMeans { tokens, running_max, mean: own, to: &mut outputs(head, row, count) });
            }
            sum.copy_from_slice(own);
            continue;
        }
        let own_items = items.load(key, count, block);
        for head in heads.clone() {
            own.copy_from_slice(sum);
            let (queries, mut to) = (queries(head, row), outputs(head, row, count));
            for (n, item) in own_items.chunks_exact(mean).enumerate() {
                join(own, item, T::ZERO);
                let q = queries.map_or(&[][..], |queries| queries.row(n, task.channels.len()));
                dispatch(GatedMean { mean: own, q, out: to.row(n) });
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

/// Writes every gradient.
pub(super) fn backward<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    links: &Links<'_, T>,
    scratch: &mut Scratch<T>,
) {
    let tasks = Tasks::new(problem);
    let blocks = problem.sequences.iter().map(|sequence| Sight::new(problem, sequence).blocks().len()).max();
    let edges = blocks.unwrap_or(0) * 2 * problem.width;
    let per_worker = (work_len(problem) + edges).next_multiple_of(64);
    let workers = threads::count().min(tasks.count).max(1);
    parallel(tasks.count, scratch.take(workers * per_worker), per_worker, |task, work| {
        gradients(problem, cotangent, sink, links, &tasks.get(problem, task), work);
    });
}

/// Writes the gradients of one task: forward through the keys for the means of rows, of which denominators are all that counts; and
/// back through rows and keys at once, with the sum of the rows from each on.
fn gradients<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    links: &Links<'_, T>,
    task: &Task,
    work: &mut [T],
) {
    let sequence = &problem.sequences[task.sequence];
    let items = KeyItems::new(problem, sequence, task.kv_head).columns(task.channels.clone());
    let sight = Sight::new(problem, sequence);
    let channels = &task.channels;
    let width = padded::<T>(channels.len());
    let mean = PARTS * width;
    let mut arena = Arena::new(work);
    let [start, end, own, after, item, far] = [(); 6].map(|()| arena.take(mean));
    let running_max = arena.take(width);
    let block = arena.take((CHUNK + 1) * mean);
    let rows_block = arena.take(BLOCK * mean);
    let kept = arena.take(12 * line::<T>() * BLOCK);
    let edges = arena.take(sight.blocks().len() * 2 * width);
    items.start(start);
    end.copy_from_slice(start);
    let add = |keys: Range<usize>, end: &mut [T], block: &mut [T]| {
        let (part, block) = block.split_at_mut(mean);
        items.sum_weights(keys.start as isize, keys.len(), part, block);
        join(end, part, T::ZERO);
    };
    for key in (0..sight.key).step_by(CHUNK) {
        add(key..(key + CHUNK).min(sight.key), end, block);
    }
    for (at, edge) in sight.blocks().zip(edges.chunks_exact_mut(2 * width)) {
        edge[..width].copy_from_slice(&end[..width]);
        edge[width..].copy_from_slice(&end[3 * width..]);
        add(sight.key + at.start..sight.key + at.end, end, block);
    }

    clear(far);
    for (index, head) in (task.kv_head * problem.dims.group()..).take(problem.dims.group()).enumerate() {
        let output_rows = |rows: &Range<usize>| {
            let of =
                |view: &View<'a, T>| rows_of(view, sequence.batch, head, sequence.query_start + rows.start, channels);
            OutputRows {
                q: problem.aft.gate.then(|| of(&problem.call.q)),
                d_out: of(&cotangent.d_out),
                out: of(&cotangent.out),
                count: rows.len(),
            }
        };
        let d_queries = |rows: &Range<usize>| {
            let place = [sequence.batch, head, sequence.query_start + rows.start];
            // SAFETY: these channels of a head belong to one task, which has one block of its rows at a time.
            unsafe { sink.dq.columns(place, rows.len(), channels.clone()) }
        };
        let d_tokens = |keys: &Range<usize>| {
            let place = [sequence.batch, task.kv_head, sequence.key_start + keys.start];
            // SAFETY: as for the queries.
            let (dk, dv) = unsafe {
                (
                    sink.dk.columns(place, keys.len(), channels.clone()),
                    sink.dv.columns(place, keys.len(), channels.clone()),
                )
            };
            TokenGradients { dk, dv, add: index > 0 }
        };
        // Rows that all have one mean.
        let constant_rows = |rows: Range<usize>, mean: &[T], after: &mut [T], item: &mut [T]| {
            for from in rows.clone().step_by(CHUNK).rev() {
                let rows = from..(from + CHUNK).min(rows.end);
                clear(item);
                dispatch(ConstantCotangents { rows: output_rows(&rows), mean, item, dq: &mut d_queries(&rows) });
                join(after, item, T::ZERO);
            }
        };
        // A key that is not there like the others.
        let single_key = |key: usize, after: &[T], item: &mut [T], own: &mut [T]| {
            let (d_key, d_value) = own.split_at_mut(2 * width);
            if items.token(key as isize).is_some() {
                dispatch(KeyGradient { rows: after, key: items.load(key as isize, 1, item), dk: d_key, dv: d_value });
            } else {
                d_key.fill(T::ZERO);
                d_value.fill(T::ZERO);
            }
            let mut to = d_tokens(&(key..key + 1));
            let add = to.add;
            for (to, d) in [(to.dk.row(0), d_key), (to.dv.row(0), d_value)] {
                to.iter_mut().zip(d).for_each(|(to, d)| *to = if add { *to + *d } else { *d });
            }
        };
        // Keys that are all seen by the same rows.
        let constant_keys = |keys: Range<usize>, after: &[T], item: &mut [T], own: &mut [T]| {
            for from in keys.clone().step_by(CHUNK) {
                let keys = from..(from + CHUNK).min(keys.end);
                match items.tokens(from as isize, keys.len()) {
                    Some(tokens) => dispatch(ConstantGradients { tokens, rows: after, to: &mut d_tokens(&keys) }),
                    None => keys.for_each(|key| single_key(key, after, item, own)),
                }
            }
        };
        clear(after);
        if let Some(last) = links.last_item(sequence, task.kv_head).filter(|_| index == 0) {
            for (to, from) in after.chunks_exact_mut(width).zip(last.chunks_exact(problem.width)) {
                to.copy_from_slice(&from[channels.start..][..width]);
            }
        }
        constant_keys(sight.key + sight.count..sequence.keys, after, item, own);
        constant_rows(sight.row + sight.count..sequence.queries, end, after, item);
        for (at, edge) in sight.blocks().zip(edges.chunks_exact(2 * width)).rev() {
            let (rows, keys) = (sight.row + at.start..sight.row + at.end, sight.key + at.start..sight.key + at.end);
            clear(own);
            own[..width].copy_from_slice(&edge[..width]);
            own[3 * width..].copy_from_slice(&edge[width..]);
            let tokens = items.tokens(keys.start as isize, keys.len());
            if let Some(tokens) =
                tokens.filter(|tokens| dispatch(FindRunningMax { tokens: *tokens, before: own, running_max }))
            {
                let (mut dq, mut to) = (d_queries(&rows), d_tokens(&keys));
                dispatch(RunningGradients {
                    tokens,
                    rows: output_rows(&rows),
                    running_max,
                    before: own,
                    after,
                    work: kept,
                    dq: &mut dq,
                    to: &mut to,
                });
                continue;
            }
            let (output_rows, mut dq) = (output_rows(&rows), d_queries(&rows));
            let own_items = items.load(keys.start as isize, keys.len(), block);
            let row_items = &mut rows_block[..keys.len() * mean];
            for (n, (key, row)) in own_items.chunks_exact(mean).zip(row_items.chunks_exact_mut(mean)).enumerate() {
                join(own, key, T::ZERO);
                let of = |rows: &Rows<'a, T>| rows.row(n, channels.len());
                let output = OutputRow {
                    q: output_rows.q.as_ref().map_or(&[][..], of),
                    d_out: of(&output_rows.d_out),
                    out: of(&output_rows.out),
                };
                dispatch(RowCotangent { mean: own, row: output, dq: dq.row(n), item: row });
            }
            for (key, row) in keys.zip(row_items.chunks_exact(mean)).rev() {
                join(after, row, T::ZERO);
                single_key(key, after, item, own);
            }
        }
        constant_keys(0..sight.key, after, item, own);
        constant_rows(0..sight.row, start, after, item);
        join(far, after, T::ZERO);
    }

    // The initial state's mean is a key without a value that every row sees.
    // SAFETY: these channels of a head have one task.
    let to = unsafe { links.far_gradient(problem, sequence.batch, task.kv_head, channels.clone()) };
    if let Some((head, numerator, denominator)) = to {
        far_item(&head.columns(channels.clone()), width, item);
        let (d_key, d_value) = own.split_at_mut(2 * width);
        dispatch(KeyGradient { rows: far, key: item, dk: d_key, dv: d_value });
        numerator.copy_from_slice(&d_value[..channels.len()]);
        denominator.copy_from_slice(&d_key[..channels.len()]);
    }
}
