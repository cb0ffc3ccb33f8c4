//! Outputs: the mean of every query's keys, times its gate.

use super::keys::KeyItems;
use super::problem::{CHUNK, Chunks, Problem};
use super::walk::{Edges, edges, walk, walk_len};
use crate::real::Real;
use crate::scratch::{Arena, Scratch, parallel};
use crate::shape::SharedRows;

/// Chunks of queries, once for each head of keys.
pub(super) fn chunks<T: Real>(problem: &Problem<'_, T>, heads: usize) -> Chunks {
    Chunks::new(problem.sequences.iter().map(|sequence| problem.keys_of_queries(sequence)).collect(), heads)
}

/// Forms the edges of all keys, before and after every chunk of queries.
pub(super) fn key_edges<'s, T: Real>(
    problem: &Problem<'_, T>,
    chunks: &Chunks,
    arena: &mut Arena<'s, T>,
    work: &mut [T],
) -> (&'s [T], &'s [T]) {
    let len = chunks.tasks() * problem.mean();
    let (before, after) = (arena.take(len), arena.take(len));
    let items = |sequence: usize, head: usize| KeyItems::new(problem, &problem.sequences[sequence], head);
    edges(problem.ops, chunks, items, problem.mean(), Edges { before: &mut *before, after: &mut *after }, work);
    (before, after)
}

/// The working memory of one task that walks.
pub(super) fn work_len<T: Real>(problem: &Problem<'_, T>, chunks: &Chunks) -> usize {
    let mean = problem.mean();
    let longest = chunks.windows.iter().map(|window| walk_len(window, mean)).max().unwrap_or(0);
    longest.max((CHUNK + 2) * mean).next_multiple_of(64)
}

/// Writes every output.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, out: SharedRows<'_, T>, scratch: &mut Scratch<T>) {
    let (dims, mean) = (&problem.dims, problem.mean());
    if dims.head_dim == 0 || dims.heads == 0 {
        return;
    }
    let by_key = chunks(problem, dims.kv_heads);
    let by_query = chunks(problem, dims.heads);
    let per_worker = work_len(problem, &by_key);
    let workers = rayon::current_num_threads().min(by_query.tasks()).max(1);
    let edge_len = (by_key.tasks() * mean).next_multiple_of(64);
    let mut arena = Arena::new(scratch.take(2 * edge_len + workers * per_worker + 64));
    let work = arena.take(workers * per_worker);
    let (before, after) = key_edges(problem, &by_key, &mut arena, work);
    parallel(by_query.tasks(), work, per_worker, |task, work| {
        let (index, head, chunk) = by_query.task(task);
        let (sequence, kv_head) = (&problem.sequences[index], head / dims.group());
        let items = KeyItems::new(problem, sequence, kv_head);
        let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
        let edge = by_key.index(index, kv_head, chunk) * mean;
        let edges = (&before[edge..][..mean], &after[edge..][..mean]);
        let bias = |query: usize, key: isize| problem.pair(sequence, head, query, key);
        walk(problem.ops, &items, &by_query.windows[index], chunk, edges, bias, work, |i, row, _, _| {
            let q = if problem.aft.gate { queries.row(i, dims.head_dim) } else { &[] };
            // SAFETY: every row belongs to one chunk of one head, and the slice ends here.
            let to = unsafe { out.row(sequence.batch, head, sequence.query_start + i, dims.head_dim) };
            problem.ops.gated_mean(row, q, to);
        });
    });
}
