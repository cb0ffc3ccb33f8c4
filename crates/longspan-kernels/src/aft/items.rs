//! What is summed: items in order, each a mean.

use super::chunks::{CHUNK, Chunks, Window, Workers};
use super::log_sum::{FactorMeans, Factors, join, join_items};
use super::tiles::widest;
use crate::call::SharedRows;
use crate::simd::block::{Transpose, floor, multiply};
use crate::simd::rows::line;
use crate::simd::{Real, dispatch};
use crate::threads::{self, share};

/// Items that are brought to one exponent at a time: the columns of the largest tile. References are changed, and rows joined, once
/// a tile, which 64 columns show (a tenth of the backward); the factors of 256 items of 64 channels (128 kB of `f32`) stay in a
/// core's second cache.
pub(super) const REACH: usize = 256;

pub(super) trait Items<T: Real> {
    /// The items from `from` on, `count` of them, one after the other; `block` has room for as many.
    fn load<'a>(&'a self, from: isize, count: usize, block: &'a mut [T]) -> &'a [T];

    /// The mean of `count` items from `from` on; `block` has room for as many.
    fn sum(&self, from: isize, count: usize, mean: &mut [T], block: &mut [T]) {
        join_items(self.load(from, count, block), mean);
    }

    /// The items from `from` on relative to the largest exponent of each channel, and the range of exponents. `block` has room for
    /// as many as `count` items.
    fn factor(&self, from: isize, count: usize, to: Factors<'_, T>, block: &mut [T]) -> T {
        dispatch(FactorMeans { items: self.load(from, count, block), to })
    }

    /// Blocks of items that have been brought to one exponent.
    fn blocks(&self) -> Option<Blocks<'_, T>> {
        None
    }

    /// The mean of what came before the first item.
    fn start(&self, mean: &mut [T]);
}

/// Joins the items `from..to` to `sum`, a chunk at a time: rounding errors then grow with the number of chunks and not of
/// items, and what is joined to a long sum is of its size. `block` has room for a chunk of items and one more.
pub(super) fn join_all<T: Real>(items: &impl Items<T>, from: isize, to: isize, sum: &mut [T], block: &mut [T]) {
    let (part, block) = block.split_at_mut(sum.len());
    for at in (from..to).step_by(CHUNK) {
        threads::check();
        items.sum(at, (to - at).min(CHUNK as isize) as usize, part, block);
        join(sum, part, T::ZERO);
    }
}

/// Items of one head in blocks of [`REACH`], each brought to one exponent a channel, or all to the same: every chunk that sees all of
/// a table's items takes the same blocks.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a, T> {
    window: Window,
    width: usize,
    numbers: &'a [T],
}

impl<'a, T: Real> Blocks<'a, T> {
    /// Some items, if they are a block.
    pub fn get(&self, from: isize, count: usize) -> Option<BlockParts<'a, T>> {
        let place = (from - self.window.first) as usize;
        if !place.is_multiple_of(REACH) || (self.window.end - from).min(REACH as isize) != count as isize {
            return None;
        }
        let len = block_len::<T>(self.width);
        let block = &self.numbers[place / REACH * len..][..len];
        let (reference, block) = block.split_at(2 * self.width);
        let (range, factors) = block.split_at(line::<T>());
        Some(BlockParts { reference, factors, range: range[0] })
    }

    /// The exponents of all blocks, where they are the same.
    pub fn common(&self) -> Option<&'a [T]> {
        let (reference, rest) = self.numbers.split_at_checked(2 * self.width)?;
        (rest.get(1) == Some(&T::ONE)).then_some(reference)
    }
}

pub(super) struct BlockParts<'a, T> {
    /// The exponents of its channels, as of [`Factored`](super::log_sum::Factored).
    pub reference: &'a [T],
    /// Numerators and then denominators, [`REACH`] rows each; panels as of [`transpose`] where the table is transposed.
    pub factors: &'a [T],
    pub range: T,
}

/// Columns of a panel: four registers of the widest kind, so that a product reads a panel from the first cache whatever its depth.
pub(super) const fn panel<T>() -> usize {
    4 * line::<T>()
}

/// Turns `count` of [`REACH`] rows of numerators and as many of denominators round: into panels of [`panel`] columns, each with its
/// numerators above its denominators.
pub(super) fn transpose<T: Real>(from: &[T], to: &mut [T], width: usize, count: usize) {
    let (rows, len) = (panel::<T>(), panel::<T>() * width);
    for (half, from) in from.chunks_exact(REACH * width).enumerate() {
        for (from, to) in from.chunks_exact(len).zip(to.chunks_exact_mut(2 * len)).take(count.div_ceil(rows)) {
            let to = &mut to[half * len..][..len];
            dispatch(Transpose { from, from_row: width, rows, columns: width, to, to_row: rows });
        }
    }
}

/// Numbers of a block: the exponents; their largest range, and 1 if those of all blocks are the same; numerators and denominators.
fn block_len<T>(width: usize) -> usize {
    2 * width + line::<T>() + 2 * REACH * width
}

/// Where the [`Blocks`] of the heads of some sequences stand.
pub(super) struct BlockTable {
    width: usize,
    /// Blocks as chunks.
    blocks: Chunks,
}

impl BlockTable {
    /// For the items of these windows.
    pub fn new(windows: &[Window], heads: usize, width: usize) -> Self {
        let blocks = |window: &Window| ((window.end - window.first).max(0) as usize).div_ceil(REACH);
        let as_chunks = |window: &Window| Window { outputs: blocks(window), chunk_len: 1, ..*window };
        let blocks = Chunks::new(windows.iter().map(as_chunks).collect(), heads);
        Self { width, blocks }
    }

    pub fn len<T: Real>(&self) -> usize {
        self.blocks.tasks() * block_len::<T>(self.width)
    }

    /// Forms every block of `items(sequence, head)`; `transposed` where products of rows with them are to be formed.
    pub fn fill<T: Real, I: Items<T>>(
        &self,
        items: impl Fn(usize, usize) -> I + Sync,
        transposed: bool,
        memory: &mut [T],
        workers: &mut Workers<'_, T>,
    ) {
        let len = block_len::<T>(self.width);
        let memory = SharedRows::new(memory, [0, 0, len]);
        workers.run(self.blocks.tasks(), |task, work| {
            let (sequence, head, index) = self.blocks.task(task);
            let window = &self.blocks.windows[sequence];
            let from = window.first + (index * REACH) as isize;
            // SAFETY: every block has one task, and the slice ends with it.
            let block = unsafe { memory.row(0, 0, task, len) };
            let (reference, block) = block.split_at_mut(2 * self.width);
            let (range, factors) = block.split_at_mut(line::<T>());
            let (numerators, denominators) = factors.split_at_mut(REACH * self.width);
            let to = Factors { reference, numerators, denominators };
            let count = (window.end - from).min(REACH as isize) as usize;
            range[1] = T::ZERO;
            range[0] = items(sequence, head).factor(from, count, to, work);
            if transposed {
                let rows = &mut work[..factors.len()];
                rows.copy_from_slice(factors);
                transpose(rows, factors, self.width, count);
            }
        });
        if !transposed {
            let windows = self.blocks.windows.len();
            share(0..windows * self.blocks.heads, |task| {
                let (sequence, head) = (task / self.blocks.heads, task % self.blocks.heads);
                let (first, count) = (self.blocks.index(sequence, head, 0), self.blocks.windows[sequence].chunks());
                // SAFETY: every head has one task, and the slice ends with it.
                self.share_exponents(unsafe { memory.row(0, 0, first, count * len) });
            });
        }
    }

    /// Brings all blocks of a head to the largest exponent of each channel, if none is then farther below than [`widest`]: sums over
    /// several need not be joined.
    fn share_exponents<T: Real>(&self, blocks: &mut [T]) {
        let (len, width) = (block_len::<T>(self.width), self.width);
        let mut largest = vec![T::ZERO; 2 * width];
        largest[..width].fill(floor());
        for block in blocks.chunks_exact(len) {
            for channel in 0..width {
                let [x, b] = [channel, width + channel];
                if (block[x] - largest[x]) + (block[b] - largest[b]) > T::ZERO {
                    (largest[x], largest[b]) = (block[x], block[b]);
                }
            }
        }
        // How far a block's exponents are below.
        let below = |block: &[T], channel: usize| {
            (largest[channel] - block[channel]) + (largest[width + channel] - block[width + channel])
        };
        let depth =
            |block: &[T]| (0..width).map(|channel| below(block, channel)).fold(T::ZERO, T::max) + block[2 * width];
        if !blocks.chunks_exact(len).all(|block| depth(block) <= widest()) {
            return;
        }
        let mut factors = vec![T::ZERO; width];
        for block in blocks.chunks_exact_mut(len) {
            let depth = depth(block);
            factors.iter_mut().enumerate().for_each(|(channel, factor)| *factor = (-below(block, channel)).exp());
            block[..2 * width].copy_from_slice(&largest);
            (block[2 * width], block[2 * width + 1]) = (depth, T::ONE);
            let rows = block[2 * width + line::<T>()..].chunks_exact_mut(width);
            rows.for_each(|row| multiply(row, &factors));
        }
    }

    /// The blocks of one head; `None` from a table for no sequences.
    pub fn of<'a, T: Real>(&self, memory: &'a [T], sequence: usize, head: usize) -> Option<Blocks<'a, T>> {
        let (window, len) = (*self.blocks.windows.get(sequence)?, block_len::<T>(self.width));
        Some(Blocks { window, width: self.width, numbers: &memory[self.blocks.index(sequence, head, 0) * len..] })
    }
}
