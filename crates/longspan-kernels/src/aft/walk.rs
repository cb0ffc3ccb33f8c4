//! Means over windows: before, near and after, in linear time. The forward pass walks keys for each query, the backward
//! rows for each key; both are this walk.

use std::ops::Range;

use super::chunks::{Chunks, Window, Workers};
use super::items::{Items, join_all};
use super::log_sum::{clear, join};
use super::problem::Problem;
use crate::call::{Arena, Sequence, SharedRows};
use crate::simd::block::Transpose;
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};
use crate::threads::share;

/// The means of all items before and of all after the windows of each chunk of outputs, of every sequence and head.
pub(super) struct Edges<'a, T> {
    before: &'a [T],
    after: &'a [T],
    mean: usize,
}

impl<'a, T: Real> Edges<'a, T> {
    /// Of `items(sequence, head)`. The means between the edges of neighbours are formed side by side, and then joined one after the
    /// other: `before` from the first chunk on, `after` from the last.
    pub fn new<I: Items<T>>(
        chunks: &Chunks,
        items: impl Fn(usize, usize) -> I + Sync,
        mean: usize,
        arena: &mut Arena<'a, T>,
        workers: &mut Workers<'_, T>,
    ) -> Self {
        let [before, after] = Self::memory(chunks, mean, arena);
        let [to_before, to_after] = [&mut *before, &mut *after].map(|means| SharedRows::new(means, [0, 0, mean]));
        // SAFETY: the caller has these chunks alone, and the slices end with its task.
        let of = |first: usize, count: usize| unsafe {
            (to_before.row(0, 0, first, count * mean), to_after.row(0, 0, first, count * mean))
        };
        workers.run(chunks.tasks(), |task, work| {
            let (sequence, head, chunk) = chunks.task(task);
            let (window, items) = (&chunks.windows[sequence], items(sequence, head));
            let (before, after) = of(task, 1);
            let range = |chunk: usize| {
                let (from, to) = window.chunk(chunk);
                window.range(from, to)
            };
            let (start, end) = range(chunk);
            if chunk == 0 {
                items.start(before)
            } else {
                clear(before)
            }
            clear(after);
            if window.before {
                let from = if chunk == 0 { window.first } else { range(chunk - 1).0 };
                join_all(&items, from, start, before, work);
            }
            if window.after {
                let to = if chunk + 1 == window.chunks() { window.end } else { range(chunk + 1).1 };
                join_all(&items, end, to, after, work);
            }
        });
        share(0..chunks.windows.len() * chunks.heads, |task| {
            let (sequence, head) = (task / chunks.heads, task % chunks.heads);
            let window = &chunks.windows[sequence];
            let count = window.chunks();
            let (before, after) = of(chunks.index(sequence, head, 0), count);
            for n in (1..count).filter(|_| window.before) {
                let (earlier, own) = before.split_at_mut(n * mean);
                join(&mut own[..mean], &earlier[(n - 1) * mean..], T::ZERO);
            }
            for n in (1..count).rev().filter(|_| window.after) {
                let (own, later) = after.split_at_mut(n * mean);
                join(&mut own[(n - 1) * mean..], &later[..mean], T::ZERO);
            }
        });
        Self { before, after, mean }
    }

    /// Memory for the edges of these chunks.
    pub fn memory(chunks: &Chunks, mean: usize, arena: &mut Arena<'a, T>) -> [&'a mut [T]; 2] {
        [(); 2].map(|()| arena.take(chunks.tasks() * mean))
    }

    /// The means before and after one chunk.
    pub fn of(&self, chunk: usize) -> (&'a [T], &'a [T]) {
        let of = |means: &'a [T]| &means[chunk * self.mean..][..self.mean];
        (of(self.before), of(self.after))
    }
}

/// Numbers of working memory that [`walk`] takes.
pub(super) fn walk_len(window: &Window, mean: usize) -> usize {
    let (back, ahead) = (window.back as usize, window.ahead as usize);
    let chunk = window.chunk_len;
    let range = (chunk + back + ahead).min((window.end - window.first).max(0) as usize).max(chunk);
    (range + chunk + 3) * mean
}

/// Biases of the pairs of outputs and items: of queries and the keys that they see, or of keys and the queries that see them.
#[derive(Clone, Copy)]
pub(super) struct Biases<'a, T: 'static> {
    pub problem: &'a Problem<'a, T>,
    pub sequence: &'a Sequence<'a>,
    /// Where outputs are keys, how many stand before key 0.
    pub lent: Option<isize>,
}

impl<T: Real> Biases<'_, T> {
    /// The bias of one pair in a window.
    pub fn pair(&self, output: usize, item: isize) -> T {
        let mut bias = [T::ZERO];
        let (query, key) = self.lent.map_or((output, item), |lent| (item as usize, output as isize - lent));
        self.problem.biases_of(self.sequence, query, key, &mut bias);
        bias[0]
    }

    /// Those of some outputs and the items `from..to`, in rows of `row`; `spare` has room for as many.
    pub fn tile(&self, outputs: Range<usize>, from: isize, to: isize, tile: &mut [T], row: usize, spare: &mut [T]) {
        let items = (to - from) as usize;
        let Some(lent) = self.lent else {
            return self.problem.tile(self.sequence, outputs, from, items, tile, row);
        };
        let (first, columns) = (outputs.start as isize - lent, outputs.len());
        let from_row = padded::<T>(columns);
        self.problem.tile(self.sequence, from as usize..to as usize, first, columns, spare, from_row);
        dispatch(Transpose { from: spare, from_row, rows: items, columns, to: tile, to_row: row });
    }
}

/// The outputs of a chunk, and what they see.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a, T: 'static, I> {
    pub items: &'a I,
    pub biases: Biases<'a, T>,
    pub window: &'a Window,
    pub chunk: usize,
    /// The means before and after all of their windows.
    pub edges: (&'a [T], &'a [T]),
}

/// Forms the mean of every output and hands it to `visit`, with the first item of its window and those there are.
pub(super) fn walk<T: Real>(
    outputs: &Outputs<'_, T, impl Items<T>>,
    work: &mut [T],
    mut visit: impl FnMut(usize, &[T], isize, &[T]),
) {
    let Outputs { items, biases, window, chunk, edges } = outputs;
    let mean = edges.0.len();
    let (from, to) = window.chunk(*chunk);
    let (start, end) = window.range(from, to);
    let (before, work) = work.split_at_mut(mean);
    let (own, work) = work.split_at_mut(mean);
    let (after, block) = work.split_at_mut((window.chunk_len + 1) * mean);
    let block = items.load(start, (end - start) as usize, block);
    let item = |n: isize| &block[(n - start) as usize * mean..][..mean];

    if window.after {
        // After the last output's window comes what comes after all; the earlier ones collect from the right.
        let mut edge = end;
        for n in (from..to).rev() {
            let (own, later) = after[(n - from) * mean..].split_at_mut(mean);
            own.copy_from_slice(if n + 1 == to { edges.1 } else { &later[..mean] });
            let (_, behind) = window.near(n);
            while edge > behind {
                edge -= 1;
                join(own, item(edge), T::ZERO);
            }
        }
    }
    before.copy_from_slice(edges.0);
    let mut edge = start;
    for n in from..to {
        let (near, behind) = window.near(n);
        if window.before {
            while edge < near {
                join(before, item(edge), T::ZERO);
                edge += 1;
            }
            own.copy_from_slice(before);
        } else {
            clear(own);
        }
        for key in near..behind {
            join(own, item(key), biases.pair(n, key));
        }
        if window.after {
            join(own, &after[(n - from) * mean..][..mean], T::ZERO);
        }
        visit(n, own, near, &block[(near - start) as usize * mean..(behind - start) as usize * mean]);
    }
}
