//! Sums of values beyond the reach of near weights, under a bidirectional mask.

use crate::simd::Real;
use crate::simd::rows::padded;

/// Far sums of the key segments of one unit: `[sum of v⁺ (value_width), count (a line)]` for each, and their totals
/// before and after.
pub(in crate::kernelized) struct FarSums<'s, T> {
    pub segment: usize,
    pub width: usize,
    /// Sums of segments `0..n`, for n from 0 to the number of segments.
    pub prefix: &'s [T],
    /// Sums of segments `n..`, for n from 0 to the number of segments.
    pub suffix: &'s [T],
    pub segments: usize,
}

impl<T: Real> FarSums<'_, T> {
    fn entry(&self) -> usize {
        self.width + padded::<T>(1)
    }

    /// Writes the sum of the whole segments before `key`; returns the key that they end at.
    pub fn prefix(&self, key: usize, sums: &mut [T], count: &mut T) -> usize {
        let segment = key / self.segment;
        let from = &self.prefix[segment * self.entry()..];
        sums.copy_from_slice(&from[..self.width]);
        *count = from[self.width];
        segment * self.segment
    }

    /// Writes the sum of the whole segments from `key` on; returns the key that they start at.
    pub fn suffix(&self, key: usize, sums: &mut [T], count: &mut T) -> usize {
        let segment = key.div_ceil(self.segment).min(self.segments);
        let from = &self.suffix[segment * self.entry()..];
        sums.copy_from_slice(&from[..self.width]);
        *count = from[self.width];
        segment * self.segment
    }
}

/// Fills the prefix and suffix totals of `sums`, one entry a segment; each has one entry more.
pub(in crate::kernelized) fn accumulate<T: Real>(sums: &[T], entry: usize, prefix: &mut [T], suffix: &mut [T]) {
    let segments = sums.len() / entry;
    prefix[..entry].fill(T::ZERO);
    suffix[segments * entry..].fill(T::ZERO);
    for index in 0..segments {
        for at in 0..entry {
            prefix[(index + 1) * entry + at] = prefix[index * entry + at] + sums[index * entry + at];
            let back = segments - 1 - index;
            suffix[back * entry + at] = suffix[(back + 1) * entry + at] + sums[back * entry + at];
        }
    }
}

/// Far sums of one unit: for each key segment, and their prefixes and suffixes.
pub(in crate::kernelized) struct FarMemory<'s, T> {
    pub sums: &'s mut [T],
    pub prefix: &'s mut [T],
    pub suffix: &'s mut [T],
}
