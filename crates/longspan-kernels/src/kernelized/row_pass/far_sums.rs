//! Sums of values beyond the reach of near weights, under a bidirectional mask.

use super::super::problem::Problem;
use super::segments::cut_count;
use crate::simd::Real;

/// Far sums of one unit, `[sum of v⁺ (value_width), count (a line)]` each: those of key segments `0..n`, and behind them those of
/// segments `n..`, for n from 0 to the number of segments.
pub(in crate::kernelized) struct FarSums<'s, T> {
    numbers: &'s [T],
    entry: usize,
    segments: usize,
    /// Keys of a segment.
    step: usize,
}

impl<'s, T: Real> FarSums<'s, T> {
    pub fn new(problem: &Problem<'_, T>, keys: usize, entry: usize, numbers: &'s [T]) -> Self {
        Self { numbers, entry, segments: cut_count(problem, keys), step: problem.segment(keys).min(keys).max(1) }
    }

    /// Writes the sum of the whole segments before `key`; returns the key that they end at.
    pub fn before(&self, key: usize, to: &mut [T]) -> usize {
        let segment = key / self.step;
        to.copy_from_slice(&self.numbers[segment * self.entry..][..self.entry]);
        segment * self.step
    }

    /// Writes the sum of the whole segments from `key` on; returns the key that they start at.
    pub fn after(&self, key: usize, to: &mut [T]) -> usize {
        let segment = key.div_ceil(self.step).min(self.segments);
        to.copy_from_slice(&self.numbers[(self.segments + 1 + segment) * self.entry..][..self.entry]);
        segment * self.step
    }
}

/// Makes far sums of those of single segments, which stand where the sums from each segment on will.
pub(super) fn accumulate<T: Real>(entry: usize, [before, after]: [&mut [T]; 2]) {
    let end = before.len() - entry;
    before[..entry].fill(T::ZERO);
    after[end..].fill(T::ZERO);
    for at in 0..end {
        before[at + entry] = before[at] + after[at];
    }
    for at in (0..end).rev() {
        after[at] = after[at + entry] + after[at];
    }
}
