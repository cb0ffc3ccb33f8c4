//! Weights that depend on the distance, over a tile of scores.

use crate::simd::product::Band;
use crate::simd::{Real, dispatch, operation};

// `sum += factor · x yᵀ`; `sum` is `x.len() × y.len()`, row-major.
operation!(AddOuter, |sum: &'a mut [T], factor: T, x: &'a [T], y: &'a [T]| {
    let width = y.len();
    assert!(sum.len() >= x.len() * width);
    let whole = width / V::LANES * V::LANES;
    for (row, &x) in sum.chunks_exact_mut(width.max(1)).zip(x) {
        let gain = factor * x;
        // SAFETY: registers below `whole` lie in a row and in `y`.
        unsafe {
            let all = V::splat(gain);
            let mut column = 0;
            while column < whole {
                let at = row.as_mut_ptr().add(column);
                all.mul_add(V::load(y.as_ptr().add(column)), V::load(at)).store(at);
                column += V::LANES;
            }
        }
        row[whole..].iter_mut().zip(&y[whole..]).for_each(|(to, &y)| *to += gain * y);
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
        line[..from].fill(V::Element::ZERO);
        line[to..].fill(V::Element::ZERO);
        // SAFETY: as above.
        unsafe {
            let mut sum = V::splat(V::Element::ZERO);
            let mut column = from / V::LANES * V::LANES;
            while column < filled {
                sum = sum.add(V::load(line.as_ptr().add(column)));
                column += V::LANES;
            }
            *total += sum.sum();
        }
    }
});

/// Weighs a tile of rows `row_length` apart, as [`WeighByDistance`].
pub(super) fn weigh<T: Real>(
    (tile, row_length): (&mut [T], usize),
    columns: usize,
    factors: Factors<'_, T>,
    band: Band,
    sums: &mut [T],
) {
    dispatch(WeighByDistance { tile, row_length, columns, factors, band, sums })
}
