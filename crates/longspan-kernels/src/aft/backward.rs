//! Gradients, in two walks: over keys for every query, which finds the means again, and over queries for every key.
//!
//! The means of the forward pass are formed anew instead of kept: one number a channel would not do, since the logarithm
//! of a sum near 10⁴ has no digits left behind the point in `f32`, and reading two back costs what forming them does.

use super::forward::{chunks, key_edges, work_len};
use super::keys::KeyItems;
use super::problem::{Bias, Chunks, Problem};
use super::walk::{Edges, Items, by_mean, clear, edges, walk};
use super::{Variant, kernel};
use crate::mechanism::Cotangent;
use crate::real::Real;
use crate::scratch::{Arena, Scratch, parallel};
use crate::shape::{SharedRows, View, ViewMut};
use crate::simd::log_sum::OutputRow;

/// Where the gradients of q, k and v go.
pub(super) struct GradientSink<'a, T> {
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
}

/// Heads are dealt into at most so many groups, each with a sum of its own for the gradients of biases: a number that
/// does not depend on threads, so that neither do the bits.
const GROUPS: usize = 16;

/// Numbers that the sums of all groups may take, if there is to be more than one.
const GROUP_NUMBERS: usize = 1 << 22;

/// Rows as keys see them, one after the other.
struct RowItems<'a, T> {
    rows: &'a [T],
    mean: usize,
}

impl<T: Real> Items<T> for RowItems<'_, T> {
    fn load<'b>(&'b self, from: isize, count: usize, _: &'b mut [T]) -> &'b [T] {
        &self.rows[from as usize * self.mean..][..count * self.mean]
    }

    fn start(&self, mean: &mut [T]) {
        clear(mean);
    }
}

/// The sums of the gradients of biases: `groups` planes of rows.
struct Sums {
    groups: usize,
    rows: usize,
    columns: usize,
}

impl Sums {
    fn new<T: Real>(problem: &Problem<'_, T>, units: usize, chunks: usize) -> Self {
        let (rows, columns) = match &problem.bias {
            Bias::Zero => return Self { groups: units.max(1), rows: 0, columns: 0 },
            // Rows of a table belong to one chunk each.
            Bias::Rows { table, columns, .. } => (table.len() / columns, *columns),
            // All chunks share the kernels.
            Bias::Kernel { kernels, .. } => (chunks, kernels.len()),
        };
        let groups = (GROUP_NUMBERS / (rows * columns).max(1)).clamp(1, GROUPS).min(units.max(1));
        Self { groups, rows, columns }
    }

    fn len(&self) -> usize {
        if self.columns == 0 { 0 } else { self.groups * self.rows * self.columns }
    }
}

/// Writes every gradient.
pub(super) fn backward<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let (dims, mean) = (&problem.dims, problem.mean());
    clear_absent(problem, &sink);
    if dims.head_dim == 0 || dims.heads == 0 {
        parameters.iter_mut().for_each(|d| d.fill(T::ZERO));
        return;
    }
    let by_key = chunks(problem, dims.kv_heads);
    let keys = |heads| {
        Chunks::new(problem.sequences.iter().map(|sequence| problem.queries_of_keys(sequence)).collect(), heads)
    };
    let (keys_by_query, keys_by_key) = (keys(dims.heads), keys(dims.kv_heads));
    let units = problem.sequences.len() * dims.heads;
    let most_chunks = by_key.windows.iter().map(|window| window.chunks()).max().unwrap_or(0);
    let sums = Sums::new(problem, units, most_chunks);

    let line = |len: usize| len.next_multiple_of(64);
    let rows_len: usize = problem.sequences.iter().map(|s| s.queries).sum::<usize>() * dims.heads * mean;
    let per_worker = work_len(problem, &by_key).max(work_len(problem, &keys_by_key)) + line(2 * mean);
    let tasks = (sums.groups * most_chunks).max(keys_by_key.tasks()).max(by_key.tasks());
    let workers = rayon::current_num_threads().min(tasks).max(1);
    let edge_len = 2 * line(by_key.tasks() * mean) + 2 * line(keys_by_query.tasks() * mean);
    let wanted = workers * per_worker + edge_len + line(rows_len) + line(sums.len()) + 64;
    let mut arena = Arena::new(scratch.take(wanted));
    let work = arena.take(workers * per_worker);
    let rows = arena.take(rows_len);
    let d_bias = arena.take(sums.len());

    let (before, after) = key_edges(problem, &by_key, &mut arena, work);
    query_side(
        problem,
        cotangent,
        &sink,
        &by_key,
        (before, after),
        &sums,
        (&mut *rows, &mut *d_bias),
        work,
        per_worker,
    );
    reduce(problem, &sums, d_bias, parameters);

    let rows: &[T] = rows;
    let starts: Vec<usize> = problem
        .sequences
        .iter()
        .scan(0, |start, sequence| {
            let own = *start;
            *start += sequence.queries * dims.heads;
            Some(own)
        })
        .collect();
    let items = |index: usize, head: usize| {
        let queries = problem.sequences[index].queries;
        RowItems { rows: &rows[(starts[index] + head * queries) * mean..][..queries * mean], mean }
    };
    let (before, after) = (arena.take(keys_by_query.tasks() * mean), arena.take(keys_by_query.tasks() * mean));
    edges(problem.ops, &keys_by_query, items, mean, Edges { before: &mut *before, after: &mut *after }, work);
    let (before, after): (&[T], &[T]) = (before, after);

    parallel(keys_by_key.tasks(), work, per_worker, |task, work| {
        let (index, kv_head, chunk) = keys_by_key.task(task);
        let sequence = &problem.sequences[index];
        let key_items = KeyItems::new(problem, sequence, kv_head);
        let (own, work) = work.split_at_mut(2 * mean);
        let (key, gradients) = own.split_at_mut(mean);
        let (d_key, d_value) = gradients.split_at_mut(2 * problem.width);
        for head in kv_head * dims.group()..(kv_head + 1) * dims.group() {
            let first = head == kv_head * dims.group();
            let items = items(index, head);
            let edge = keys_by_query.index(index, head, chunk) * mean;
            let edges = (&before[edge..][..mean], &after[edge..][..mean]);
            let bias = |key: usize, query: isize| problem.pair(sequence, head, query as usize, key as isize);
            walk(problem.ops, &items, &keys_by_key.windows[index], chunk, edges, bias, work, |j, sum, _, _| {
                let token = sequence.key_start + j;
                // SAFETY: every key belongs to one chunk of one key head, and the slices end here.
                let (dk, dv) = unsafe {
                    (
                        sink.dk.row(sequence.batch, kv_head, token, problem.key_dim),
                        sink.dv.row(sequence.batch, kv_head, token, dims.head_dim),
                    )
                };
                if first {
                    dk.fill(T::ZERO);
                    dv.fill(T::ZERO);
                }
                if key_items.ignores(j as isize) {
                    return;
                }
                problem.ops.key_gradient(sum, key_items.load(j as isize, 1, key), d_key, d_value);
                dv.iter_mut().zip(&*d_value).for_each(|(to, &d)| *to += d);
                if problem.key_dim == dims.head_dim {
                    dk.iter_mut().zip(&*d_key).for_each(|(to, &d)| *to += d);
                } else {
                    dk[0] += d_key[..dims.head_dim].iter().copied().sum();
                }
            });
        }
    });
}

/// Gradients of queries, sums of those of biases, and the rows as keys see them.
#[allow(clippy::too_many_arguments)]
fn query_side<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    by_key: &Chunks,
    (before, after): (&[T], &[T]),
    sums: &Sums,
    (rows, d_bias): (&mut [T], &mut [T]),
    work: &mut [T],
    per_worker: usize,
) {
    let (dims, mean) = (&problem.dims, problem.mean());
    let most_chunks = by_key.windows.iter().map(|window| window.chunks()).max().unwrap_or(0);
    let units = problem.sequences.len() * dims.heads;
    d_bias.fill(T::ZERO);
    let mut rows = by_mean(rows, mean);
    let rows = rows.shared();
    let mut d_bias = ViewMut::strided(d_bias, [0, sums.rows * sums.columns, sums.columns]);
    let d_bias = d_bias.shared();
    let mut starts = vec![0];
    starts.extend(problem.sequences.iter().scan(0, |start, sequence| {
        *start += sequence.queries * dims.heads;
        Some(*start)
    }));
    parallel(sums.groups * most_chunks, work, per_worker, |task, work| {
        let (group, chunk) = (task / most_chunks, task % most_chunks);
        for unit in group * units / sums.groups..(group + 1) * units / sums.groups {
            let (index, head) = (unit / dims.heads, unit % dims.heads);
            let window = &by_key.windows[index];
            if chunk >= window.chunks() {
                continue;
            }
            let (sequence, kv_head) = (&problem.sequences[index], head / dims.group());
            let items = KeyItems::new(problem, sequence, kv_head);
            let rows_of = |view: &View<'a, T>| view.rows(sequence.batch, head).skip(sequence.query_start);
            let (queries, d_outs) = (rows_of(&problem.call.q), rows_of(&cotangent.d_out));
            let outs = rows_of(&cotangent.out);
            let edge = by_key.index(index, kv_head, chunk) * mean;
            let edges = (&before[edge..][..mean], &after[edge..][..mean]);
            let bias = |query: usize, key: isize| problem.pair(sequence, head, query, key);
            walk(problem.ops, &items, window, chunk, edges, bias, work, |i, row, near, keys| {
                let output = OutputRow {
                    q: if problem.aft.gate { queries.row(i, dims.head_dim) } else { &[] },
                    d_out: d_outs.row(i, dims.head_dim),
                    out: outs.row(i, dims.head_dim),
                };
                // SAFETY: every row belongs to one chunk of one head, and the slices end here.
                let (dq, item) = unsafe {
                    (
                        sink.dq.row(sequence.batch, head, sequence.query_start + i, dims.head_dim),
                        rows.row(0, 0, starts[index] + head * sequence.queries + i, mean),
                    )
                };
                problem.ops.row_cotangent(row, output, dq, item);
                if sums.columns == 0 || keys.is_empty() {
                    return;
                }
                let (place, column) = match problem.bias {
                    Bias::Kernel { taps, .. } => (chunk, head * taps),
                    _ => (problem.bias_row(sequence, i), 0),
                };
                // SAFETY: the groups have planes of their own; a table's row belongs to one chunk of queries, whatever
                // the head, and a kernel's to one task.
                let to = unsafe { d_bias.row(0, group, place, sums.columns) };
                let first = (near - (i as isize + window.shift - window.back)) as usize;
                let bias = problem.bias(sequence, head, i);
                for (key, n) in keys.chunks_exact(mean).zip(first..) {
                    to[column + n] += problem.ops.bias_gradient(item, key, bias[n]);
                }
            });
        }
    });
}

/// Adds the groups' sums and hands them to the parameters.
fn reduce<T: Real>(problem: &Problem<'_, T>, sums: &Sums, d_bias: &[T], parameters: &mut [&mut [T]]) {
    if parameters.is_empty() {
        return;
    }
    let len = match &problem.bias {
        Bias::Kernel { kernels, .. } => kernels.len(),
        _ => sums.rows * sums.columns,
    };
    let add = |to: &mut [T]| {
        to.fill(T::ZERO);
        for part in d_bias.chunks_exact(len.max(1)) {
            to.iter_mut().zip(part).for_each(|(to, &d)| *to += d);
        }
    };
    match problem.aft.variant {
        Variant::Conv { taps, normalized: true } => {
            let mut d = vec![T::ZERO; len];
            add(&mut d);
            kernel::pull_back(problem.call.parameters, taps, &d, parameters);
        }
        _ => add(parameters[0]),
    }
}

/// Keys beyond the end of a sequence have gradient 0.
fn clear_absent<T: Real>(problem: &Problem<'_, T>, sink: &GradientSink<'_, T>) {
    for sequence in &problem.sequences {
        for head in 0..problem.dims.kv_heads {
            for token in sequence.key_start + sequence.keys..sequence.key_start + sequence.keys + sequence.absent {
                // SAFETY: no task runs yet, and the slices end here.
                unsafe {
                    sink.dk.row(sequence.batch, head, token, problem.key_dim).fill(T::ZERO);
                    sink.dv.row(sequence.batch, head, token, problem.dims.head_dim).fill(T::ZERO);
                }
            }
        }
    }
}
