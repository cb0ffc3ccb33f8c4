//! Outputs in chunks, and the windows of items that they see.

use std::ops::Range;

use super::options::{Aft, Variant};
use crate::call::{Arena, Scratch};
use crate::simd::Real;
use crate::threads::{self, parallel};

/// Outputs of one chunk, unless each sees all items. A chunk loads the keys of its windows anew, so it should be no shorter than
/// usual windows; the means at its edges are kept, so they are a few per cent of the keys.
pub(super) const CHUNK: usize = 64;

const MOST: usize = 256;

/// Outputs of one chunk. Where each sees all items, these pass by for every chunk, from the third cache: four times as many outputs take
/// 8 % less time. Chunks stay so many that threads share them.
pub(super) fn chunk_len(aft: &Aft, outputs: usize) -> usize {
    let most = if let Variant::Full { .. } = aft.variant { MOST } else { CHUNK };
    (outputs / 16).next_multiple_of(CHUNK).clamp(CHUNK, most)
}

/// Which items an output sees, and how: output `n` stands at item `n + shift`; the items from `back` before to `ahead`
/// after count with a bias of their own, those before and after with none, or not at all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub outputs: usize,
    pub chunk_len: usize,
    pub shift: isize,
    pub back: isize,
    pub ahead: isize,
    /// Whether items before the window count.
    pub before: bool,
    /// Whether items after it count.
    pub after: bool,
    /// The first item there is; negative where an initial state lends some.
    pub first: isize,
    /// One past the last.
    pub end: isize,
}

impl Window {
    fn clamp(&self, item: isize) -> isize {
        item.clamp(self.first, self.end.max(self.first))
    }

    /// The items with a bias for output `n`.
    pub fn near(&self, n: usize) -> (isize, isize) {
        self.range(n, n + 1)
    }

    /// The items in any window of the outputs `from..to`: those before are before every window, those after are after.
    pub fn range(&self, from: usize, to: usize) -> (isize, isize) {
        let start = self.clamp(from as isize + self.shift - self.back);
        (start, self.clamp(to as isize + self.shift + self.ahead).max(start))
    }

    /// The items that output `n` sees.
    pub fn seen(&self, n: usize) -> (isize, isize) {
        let (near, behind) = self.near(n);
        (if self.before { self.first } else { near }, if self.after { self.end.max(self.first) } else { behind })
    }

    /// Whether all of some outputs see all of the items `from..to`.
    pub fn all_see(&self, outputs: &Range<usize>, from: isize, to: isize) -> bool {
        self.seen(outputs.end - 1).0 <= from && to <= self.seen(outputs.start).1
    }

    pub fn chunks(&self) -> usize {
        self.outputs.div_ceil(self.chunk_len)
    }

    pub fn chunk(&self, index: usize) -> (usize, usize) {
        (index * self.chunk_len, ((index + 1) * self.chunk_len).min(self.outputs))
    }
}

/// Chunks of outputs of every sequence and head, in the order in which their edges stand.
pub(super) struct Chunks {
    /// One a sequence.
    pub windows: Vec<Window>,
    pub heads: usize,
    /// Chunks of all earlier sequences, and of all.
    starts: Vec<usize>,
}

impl Chunks {
    pub fn new(windows: Vec<Window>, heads: usize) -> Self {
        let mut starts = vec![0];
        starts.extend(windows.iter().scan(0, |sum, window| {
            *sum += window.chunks();
            Some(*sum)
        }));
        Self { windows, heads, starts }
    }

    pub fn tasks(&self) -> usize {
        self.starts[self.windows.len()] * self.heads
    }

    /// Which one a chunk is.
    pub fn index(&self, sequence: usize, head: usize, chunk: usize) -> usize {
        self.starts[sequence] * self.heads + head * self.windows[sequence].chunks() + chunk
    }

    pub fn task(&self, index: usize) -> (usize, usize, usize) {
        let sequence = self.starts.partition_point(|&start| start * self.heads <= index) - 1;
        let (rest, chunks) = (index - self.starts[sequence] * self.heads, self.windows[sequence].chunks());
        (sequence, rest / chunks, rest % chunks)
    }
}

/// Threads of a call that share tasks, each with working memory of its own.
pub(super) struct Workers<'w, T> {
    memory: &'w mut [T],
    each: usize,
}

impl<'w, T: Real> Workers<'w, T> {
    /// As many as there are threads and tasks for them, with so many numbers each.
    pub fn new(tasks: usize, each: usize, arena: &mut Arena<'w, T>) -> Self {
        let each = each.next_multiple_of(64);
        Self { memory: arena.take(threads::count().min(tasks).max(1) * each), each }
    }

    /// The same in the caller's scratch, of which nothing else is wanted.
    pub fn in_scratch(tasks: usize, each: usize, scratch: &'w mut Scratch<T>) -> Self {
        let memory = Arena::<T>::measure(|arena| Workers::new(tasks, each, arena));
        Self::new(tasks, each, &mut Arena::new(scratch.take(memory)))
    }

    /// The caller's own thread, with its memory.
    pub fn alone(memory: &'w mut [T]) -> Self {
        Self { each: memory.len(), memory }
    }

    pub fn run(&mut self, tasks: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        parallel(tasks, self.memory, self.each, body);
    }

    /// The same for chunks of a few microseconds, on each thread some one after the other: so many that threads seldom wait for each other
    /// to be given some, and so few that none waits long for the last of another.
    pub fn run_chunks(&mut self, chunks: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        let run = (chunks / (8 * threads::count())).clamp(1, 16);
        self.run(chunks.div_ceil(run), |task, work| {
            (task * run..((task + 1) * run).min(chunks)).for_each(|chunk| body(chunk, work));
        });
    }
}
