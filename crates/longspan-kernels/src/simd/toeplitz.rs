//! Weights that depend on the distance, over a tile of scores.

use super::block::Band;
use super::vector::Vector;
use crate::real::Real;

/// The factor of element `(i, j)` of a tile is `values[start + i·step + j]`.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a, T> {
    pub values: &'a [T],
    pub start: usize,
    pub step: isize,
}

/// Multiplies the elements of a tile inside `band` by their factors, makes those outside it 0 whatever they were, and
/// adds each row's sum to `sums`; whole registers up to `columns` are written.
#[inline(always)]
pub(crate) unsafe fn weigh<V: Vector>(
    tile: &mut [V::Element],
    row_length: usize,
    columns: usize,
    factors: Factors<'_, V::Element>,
    band: Band,
    sums: &mut [V::Element],
) {
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
}
