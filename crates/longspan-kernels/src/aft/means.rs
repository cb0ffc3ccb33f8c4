//! The means of all outputs of some heads, whose tasks are chunks.

use super::chunks::{CHUNK, Chunks, Window, Workers};
use super::items::BlockTable;
use super::keys::KeyItems;
use super::problem::{Block, Problem};
use super::tiles::{self, BiasTiles};
use super::walk::{Biases, Edges, Outputs, walk_len};
use crate::call::Arena;
use crate::simd::Real;
use crate::threads;

/// The working memory of one task, behind its tiles of biases.
pub(super) fn work_len<T: Real>(problem: &Problem<'_, T>, chunks: &Chunks) -> usize {
    let mean = problem.mean();
    let of = |window: &Window| {
        if problem.aft.tiled(problem.causal) {
            tiles::work_len::<T>(mean, window.chunk_len)
        } else {
            walk_len(window, mean)
        }
    };
    let longest = chunks.windows.iter().map(of).max().unwrap_or(0);
    longest.max((CHUNK + 2) * mean).next_multiple_of(64)
}

/// Numbers of a worker's memory for the biases of a chunk's tiles.
pub(super) fn bias_tiles_len<T: Real>(problem: &Problem<'_, T>, chunks: &Chunks) -> usize {
    let longest = chunks.windows.iter().map(tiles::bias_tiles_len).max().unwrap_or(0);
    if problem.aft.tiled(problem.causal) { longest.next_multiple_of(64) } else { 0 }
}

/// Chunks of outputs, each for some of `heads` heads that a worker takes one after the other with the same tiles of biases: for as
/// many as leave work for all threads. The bits do not depend on it.
pub(super) struct HeadGroups {
    tasks: Chunks,
    heads: usize,
}

impl HeadGroups {
    pub fn new<T: Real>(problem: &Problem<'_, T>, windows: &[Window], heads: usize) -> Self {
        let chunks: usize = windows.iter().map(Window::chunks).sum();
        let wanted = (4 * threads::count()).div_ceil(chunks.max(1));
        let groups = if problem.aft.tiled(problem.causal) { wanted.clamp(1, heads.max(1)) } else { heads };
        Self { tasks: Chunks::new(windows.to_vec(), groups), heads }
    }

    pub fn tasks(&self) -> usize {
        self.tasks.tasks()
    }

    /// Calls `body(sequence, head, chunk, bias_tiles, work)` for every chunk of every head.
    pub fn run<T: Real>(
        &self,
        bias_tiles_len: usize,
        workers: &mut Workers<'_, T>,
        body: impl Fn(usize, usize, usize, Option<&mut BiasTiles<'_, T>>, &mut [T]) + Sync,
    ) {
        workers.run(self.tasks(), |task, work| {
            let (index, group, chunk) = self.tasks.task(task);
            let (bias_tiles, work) = work.split_at_mut(bias_tiles_len);
            let mut bias_tiles = BiasTiles::new(bias_tiles, self.tasks.windows[index].chunk_len);
            for head in group * self.heads / self.tasks.heads..(group + 1) * self.heads / self.tasks.heads {
                body(index, head, chunk, bias_tiles.as_mut(), work);
            }
        });
    }
}

/// The keys of a block of heads as its queries see them.
pub(super) struct KeySide<'a, 's, T: 'static> {
    problem: &'s Problem<'a, T>,
    block: &'s Block,
    /// Queries, once for each head of keys.
    chunks: &'s Chunks,
    edges: Edges<'s, T>,
    /// Keys in blocks, if every chunk of queries takes the same.
    table: BlockTable,
    blocks: &'s [T],
}

impl<'a, 's, T: Real> KeySide<'a, 's, T> {
    /// Chunks of the queries of a block, once for each of so many heads.
    pub fn chunks(problem: &Problem<'_, T>, block: &Block, heads: usize) -> Chunks {
        let windows = block.sequences(problem).iter().map(|sequence| problem.keys_of_queries(sequence));
        Chunks::new(windows.collect(), heads)
    }

    fn table(problem: &Problem<'_, T>, chunks: &Chunks) -> BlockTable {
        BlockTable::new(if problem.full() { &chunks.windows } else { &[] }, chunks.heads, problem.width)
    }

    pub fn memory(problem: &Problem<'_, T>, chunks: &Chunks, arena: &mut Arena<'s, T>) {
        Edges::memory(chunks, problem.mean(), arena);
        arena.take(Self::table(problem, chunks).len::<T>());
    }

    /// `transposed`: the keys' blocks are for [`tiles::bias_gradients`], not for [`tiles::means`].
    pub fn new(
        problem: &'s Problem<'a, T>,
        block: &'s Block,
        chunks: &'s Chunks,
        transposed: bool,
        arena: &mut Arena<'s, T>,
        workers: &mut Workers<'_, T>,
    ) -> Self {
        let items = |index: usize, head: usize| {
            KeyItems::new(problem, &block.sequences(problem)[index], block.heads.start + head)
        };
        let edges = Edges::new(chunks, items, problem.mean(), arena, workers);
        let table = Self::table(problem, chunks);
        let blocks = arena.take(table.len::<T>());
        table.fill(items, transposed, blocks, workers);
        Self { problem, block, chunks, edges, table, blocks }
    }

    /// The keys of a head, counted from the block's first on.
    pub fn items(&self, index: usize, kv_head: usize) -> KeyItems<'_, T> {
        let items =
            KeyItems::new(self.problem, &self.block.sequences(self.problem)[index], self.block.heads.start + kv_head);
        items.with(self.table.of(self.blocks, index, kv_head))
    }

    /// A chunk of queries as they see the keys of a head.
    pub fn outputs<'o>(
        &'o self,
        items: &'o KeyItems<'o, T>,
        index: usize,
        kv_head: usize,
        chunk: usize,
    ) -> Outputs<'o, T, KeyItems<'o, T>> {
        let sequence = &self.block.sequences(self.problem)[index];
        Outputs {
            items,
            biases: Biases { problem: self.problem, sequence, lent: None },
            window: &self.chunks.windows[index],
            chunk,
            edges: self.edges.of(self.chunks.index(index, kv_head, chunk)),
        }
    }
}
