//! Weights that depend on the distance, over a tile of scores.

use crate::simd::block::AddScaled;
use crate::simd::operation;
use crate::simd::product::{Band, mask_and_sum_row};

// `sum += factor · x yᵀ`; `sum` is `x.len() × y.len()`, row-major.
operation!(AddOuter, |sum: &'a mut [T], factor: T, x: &'a [T], y: &'a [T]| {
    assert!(sum.len() >= x.len() * y.len());
    for (row, &x) in sum.chunks_exact_mut(y.len().max(1)).zip(x) {
        // SAFETY: forwarded to the caller.
        unsafe { AddScaled { to: row, a: factor * x, x: y }.run::<V>() };
    }
});

/// The factor of element `(i, j)` of a tile is `values[start + i·step + j]`.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a, T> {
    pub values: &'a [T],
    pub start: usize,
    pub step: isize,
}

// Multiplies the elements of a tile inside `band` by their factors, makes those outside it 0 whatever they were, and
// adds each row's sum to `sums`; whole registers up to `columns` are written.
operation!(WeighByDistance, |tile: &'a mut [T],
                             row_length: usize,
                             columns: usize,
                             factors: Factors<'a, T>,
                             band: Band,
                             sums: &'a mut [T]| {
    let whole = columns.next_multiple_of(V::LANES);
    for (row, total) in sums.iter_mut().enumerate() {
        let line = &mut tile[row * row_length..][..whole];
        let start = factors.start as isize + row as isize * factors.step;
        let (from, to) = band.columns(row, row, columns);
        let filled = to.next_multiple_of(V::LANES);
        let values = &factors.values[start as usize..][..filled];
        // SAFETY: both slices hold the registers below `filled`.
        unsafe {
            let mut column = 0;
            while column < filled {
                let at = line.as_mut_ptr().add(column);
                V::load(at).mul(V::load(values.as_ptr().add(column))).store(at);
                column += V::LANES;
            }
        }
        // SAFETY: forwarded to the caller.
        *total += unsafe { mask_and_sum_row::<V>(line, (from, to)) };
    }
});
