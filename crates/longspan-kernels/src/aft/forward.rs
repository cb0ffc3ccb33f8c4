//! Outputs: the mean of every query's keys, times its gate.

use std::ops::Range;

use super::keys::KeyItems;
use super::problem::{Block, CHUNK, Chunks, Problem, Window};
use super::tiles::{self, BiasTiles, BlockTable, Parts};
use super::walk::{Edges, edges, walk, walk_len};
use crate::aft::log_sum::GatedMean;
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Chunks of the queries of some sequences, once for each of so many heads.
pub(super) fn chunks<T: Real>(problem: &Problem<'_, T>, sequences: Range<usize>, heads: usize) -> Chunks {
    let sequences = &problem.sequences[sequences];
    Chunks::new(sequences.iter().map(|sequence| problem.keys_of_queries(sequence)).collect(), heads)
}

/// Forms the edges of the keys of a block, before and after every chunk of queries.
pub(super) fn key_edges<'s, T: Real>(
    problem: &Problem<'_, T>,
    block: &Block,
    chunks: &Chunks,
    arena: &mut Arena<'s, T>,
    work: &mut [T],
) -> (&'s [T], &'s [T]) {
    let len = chunks.tasks() * problem.mean();
    let (before, after) = (arena.take(len), arena.take(len));
    let items = |sequence: usize, head: usize| {
        KeyItems::new(problem, &problem.sequences[block.sequences.start + sequence], block.heads.start + head)
    };
    edges(chunks, items, problem.mean(), Edges { before: &mut *before, after: &mut *after }, work);
    (before, after)
}

/// The working memory of one task that walks.
pub(super) fn work_len<T: Real>(problem: &Problem<'_, T>, chunks: &Chunks) -> usize {
    let mean = problem.mean();
    let walk = || chunks.windows.iter().map(|window| walk_len(window, mean)).max().unwrap_or(0);
    let longest = if problem.tiled() { tiles::work_len::<T>(mean) } else { walk() };
    longest.max((CHUNK + 2) * mean).next_multiple_of(64)
}

/// Numbers of a worker's memory for the biases of a chunk's tiles.
pub(super) fn bias_tiles_len<T: Real>(problem: &Problem<'_, T>, chunks: &Chunks) -> usize {
    let longest = chunks.windows.iter().map(tiles::bias_tiles_len).max().unwrap_or(0);
    if problem.tiled() { longest.next_multiple_of(64) } else { 0 }
}

/// Into how many groups heads are dealt that a worker takes one after the other, with the same biases: as few as leave work
/// for all. The bits do not depend on it.
pub(super) fn groups<T: Real>(problem: &Problem<'_, T>, windows: &[Window], heads: usize) -> usize {
    let chunks: usize = windows.iter().map(Window::chunks).sum();
    let wanted = (4 * threads::count()).div_ceil(chunks.max(1));
    if problem.tiled() { wanted.clamp(1, heads.max(1)) } else { heads }
}

/// Writes every output.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, out: SharedRows<'_, T>, scratch: &mut Scratch<T>) {
    let (dims, mean) = (&problem.dims, problem.mean());
    if dims.head_dim == 0 || dims.heads == 0 {
        return;
    }
    let all = Block { sequences: 0..problem.sequences.len(), heads: 0..dims.kv_heads };
    let by_key = chunks(problem, all.sequences.clone(), dims.kv_heads);
    let groups = groups(problem, &by_key.windows, dims.heads);
    let by_query = chunks(problem, all.sequences.clone(), groups);
    let bias_tiles_len = bias_tiles_len(problem, &by_key);
    let per_worker = work_len(problem, &by_key) + bias_tiles_len;
    let workers = threads::count().min(by_query.tasks()).max(1);
    let edge_len = (by_key.tasks() * mean).next_multiple_of(64);
    let block_table = BlockTable::new(if problem.full() { &by_key.windows } else { &[] }, dims.kv_heads, problem.width);
    let mut arena = Arena::new(scratch.take(2 * edge_len + block_table.len::<T>() + workers * per_worker + 128));
    let work = arena.take(workers * per_worker);
    let block_table_memory = arena.take(block_table.len::<T>());
    let (before, after) = key_edges(problem, &all, &by_key, &mut arena, work);
    let items = |index: usize, kv_head: usize| KeyItems::new(problem, &problem.sequences[index], kv_head);
    block_table.fill(items, block_table_memory, work, per_worker);
    let block_table_memory = &*block_table_memory;
    let one = |index: usize, head: usize, chunk: usize, bias_tiles: Option<&mut BiasTiles<'_, T>>, work: &mut [T]| {
        let (sequence, kv_head) = (&problem.sequences[index], head / dims.group());
        let items = items(index, kv_head).with(block_table.of(block_table_memory, index, kv_head));
        let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
        let edge = by_key.index(index, kv_head, chunk) * mean;
        let edges = (&before[edge..][..mean], &after[edge..][..mean]);
        let window = &by_query.windows[index];
        let visit = |i: usize, row: &[T]| {
            let q = if problem.aft.gate { queries.row(i, dims.head_dim) } else { &[] };
            // SAFETY: every row belongs to one chunk of one head, and the slice ends here.
            let to = unsafe { out.row(sequence.batch, head, sequence.query_start + i, dims.head_dim) };
            dispatch(GatedMean { mean: row, q, out: to });
        };
        if let Some(bias_tiles) = bias_tiles {
            let bias = |queries: Range<usize>, from: isize, to: isize, tile: &mut [T], row: usize, _: &mut [T]| {
                problem.tile(sequence, queries, from, (to - from) as usize, tile, row);
            };
            tiles::means(&items, window, chunk, edges, Parts::All, bias, bias_tiles, work, visit);
        } else {
            let bias = |query: usize, key: isize| problem.pair(sequence, query, key);
            walk(&items, window, chunk, edges, bias, work, |i, row, _, _| visit(i, row));
        }
    };
    parallel(by_query.tasks(), work, per_worker, |task, work| {
        let (index, group, chunk) = by_query.task(task);
        let (bias_tiles, work) = work.split_at_mut(bias_tiles_len);
        let mut bias_tiles = (bias_tiles_len > 0).then(|| BiasTiles::new(bias_tiles));
        for head in group * dims.heads / groups..(group + 1) * dims.heads / groups {
            one(index, head, chunk, bias_tiles.as_mut(), work);
        }
    });
}
