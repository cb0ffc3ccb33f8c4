//! Means over windows: before, near and after, in linear time. The forward pass walks keys for each query, the backward
//! rows for each key; both are this walk.

use super::problem::{CHUNK, Chunks, Window};
use super::tiles::Blocks;
use crate::aft::log_sum::{FactorMeans, PARTS, join};
use crate::call::ViewMut;
use crate::simd::block::floor;
use crate::simd::{Real, dispatch};
use crate::threads::{parallel, share};

/// Where items go that are brought to one exponent a channel.
pub(super) struct Factors<'a, T> {
    pub reference: &'a mut [T],
    /// Empty where they are not wanted.
    pub numerators: &'a mut [T],
    pub denominators: &'a mut [T],
}

/// What is summed: items in order, each a mean.
pub(super) trait Items<T> {
    /// The items from `from` on, `count` of them, one after the other; `block` has room for as many.
    fn load<'a>(&'a self, from: isize, count: usize, block: &'a mut [T]) -> &'a [T];

    /// The mean of `count` items from `from` on; `block` has room for as many.
    fn sum(&self, from: isize, count: usize, mean: &mut [T], block: &mut [T])
    where
        T: Real,
    {
        join_items(self.load(from, count, block), mean);
    }

    /// The items from `from` on relative to the largest exponent of each channel, and the range of exponents; see
    /// [`factor`](crate::aft::log_sum::factor). `block` has room for as many as `count` items.
    fn factor(&self, from: isize, count: usize, to: Factors<'_, T>, block: &mut [T]) -> T
    where
        T: Real,
    {
        dispatch(FactorMeans {
            items: self.load(from, count, block),
            reference: to.reference,
            numerators: to.numerators,
            denominators: to.denominators,
        })
    }

    /// Blocks of items that have been brought to one exponent.
    fn blocks(&self) -> Option<Blocks<'_, T>> {
        None
    }

    /// The mean of what came before the first item.
    fn start(&self, mean: &mut [T]);
}

/// The means of all items before and of all after the windows of each chunk of outputs.
pub(super) struct Edges<'a, T> {
    pub before: &'a mut [T],
    pub after: &'a mut [T],
}

/// Makes a mean that of nothing.
pub(super) fn clear<T: Real>(mean: &mut [T]) {
    let width = mean.len() / PARTS;
    mean.fill(T::ZERO);
    mean[..width].fill(floor());
}

/// Makes `mean` that of some items without biases.
pub(super) fn join_items<T: Real>(items: &[T], mean: &mut [T]) {
    clear(mean);
    for item in items.chunks_exact(mean.len()) {
        join(mean, item, T::ZERO);
    }
}

/// Joins the items `from..to` to `sum`, a chunk at a time: rounding errors then grow with the number of chunks and not of
/// items, and what is joined to a long sum is of its size. `block` has room for a chunk of items and one more.
pub(super) fn join_all<T: Real>(items: &impl Items<T>, from: isize, to: isize, sum: &mut [T], block: &mut [T]) {
    let (part, block) = block.split_at_mut(sum.len());
    let mut at = from;
    while at < to {
        let count = (to - at).min(CHUNK as isize) as usize;
        items.sum(at, count, part, block);
        join(sum, part, T::ZERO);
        at += count as isize;
    }
}

/// The means of the items between the edges of one chunk and of its neighbour: what [`scan`] makes edges of.
pub(super) fn between<T: Real>(
    items: &impl Items<T>,
    window: &Window,
    chunk: usize,
    edges: Edges<'_, T>,
    block: &mut [T],
) {
    let range = |chunk: usize| {
        let (from, to) = window.chunk(chunk);
        window.range(from, to)
    };
    let (start, end) = range(chunk);
    if chunk == 0 {
        items.start(edges.before);
    } else {
        clear(edges.before);
    }
    clear(edges.after);
    if window.before {
        let from = if chunk == 0 { window.first } else { range(chunk - 1).0 };
        join_all(items, from, start, edges.before, block);
    }
    if window.after {
        let to = if chunk + 1 == window.chunks() { window.end } else { range(chunk + 1).1 };
        join_all(items, end, to, edges.after, block);
    }
}

/// Turns the means between edges into those up to them: `before` from the first chunk on, `after` from the last.
pub(super) fn scan<T: Real>(window: &Window, edges: Edges<'_, T>, mean: usize) {
    if window.before {
        for n in 1..window.chunks() {
            let (earlier, own) = edges.before.split_at_mut(n * mean);
            join(&mut own[..mean], &earlier[(n - 1) * mean..], T::ZERO);
        }
    }
    if window.after {
        for n in (1..window.chunks()).rev() {
            let (own, later) = edges.after.split_at_mut(n * mean);
            join(&mut own[(n - 1) * mean..], &later[..mean], T::ZERO);
        }
    }
}

/// Forms the edges of every chunk of every head.
pub(super) fn edges<T: Real, I: Items<T>>(
    chunks: &Chunks,
    items: impl Fn(usize, usize) -> I + Sync,
    mean: usize,
    edges: Edges<'_, T>,
    work: &mut [T],
) {
    let (mut before, mut after) = (by_mean(edges.before, mean), by_mean(edges.after, mean));
    let (before, after) = (before.shared(), after.shared());
    parallel(chunks.tasks(), work, (CHUNK + 1) * mean, |task, work| {
        let (sequence, head, chunk) = chunks.task(task);
        // SAFETY: every task has an index of its own, and the slices end with it.
        let edges = unsafe { Edges { before: before.row(0, 0, task, mean), after: after.row(0, 0, task, mean) } };
        between(&items(sequence, head), &chunks.windows[sequence], chunk, edges, work);
    });
    share(0..chunks.windows.len() * chunks.heads, |task| {
        let (sequence, head) = (task / chunks.heads, task % chunks.heads);
        let window = &chunks.windows[sequence];
        let (first, len) = (chunks.index(sequence, head, 0), window.chunks() * mean);
        // SAFETY: the chunks of one head are adjacent, and no other task has them.
        let edges = unsafe { Edges { before: before.row(0, 0, first, len), after: after.row(0, 0, first, len) } };
        scan(window, edges, mean);
    });
}

/// Means one after the other.
pub(super) fn by_mean<T>(means: &mut [T], mean: usize) -> ViewMut<'_, T> {
    ViewMut::strided(means, [0, 0, mean])
}

/// Numbers of working memory that [`walk`] and [`join_all`] take, for windows that reach `reach` items in all.
pub(super) fn walk_len(window: &Window, mean: usize) -> usize {
    let (back, ahead) = (window.back as usize, window.ahead as usize);
    let range = (CHUNK + back + ahead).min((window.end - window.first).max(0) as usize).max(CHUNK);
    (range + CHUNK + 3) * mean
}

/// Forms the mean of every output of a chunk and hands it to `visit`, with the items of its window and where they start.
///
/// `bias(n, item)` is that of output `n`.
#[allow(clippy::too_many_arguments)]
pub(super) fn walk<T: Real>(
    items: &impl Items<T>,
    window: &Window,
    chunk: usize,
    edges: (&[T], &[T]),
    bias: impl Fn(usize, isize) -> T,
    work: &mut [T],
    mut visit: impl FnMut(usize, &[T], isize, &[T]),
) {
    let mean = edges.0.len();
    let (from, to) = window.chunk(chunk);
    let (start, end) = window.range(from, to);
    let (before, work) = work.split_at_mut(mean);
    let (own, work) = work.split_at_mut(mean);
    let (after, block) = work.split_at_mut((CHUNK + 1) * mean);
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
            join(own, item(key), bias(n, key));
        }
        if window.after {
            join(own, &after[(n - from) * mean..][..mean], T::ZERO);
        }
        visit(n, own, near, &block[(near - start) as usize * mean..(behind - start) as usize * mean]);
    }
}
