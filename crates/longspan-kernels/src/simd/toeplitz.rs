//! Weights that depend on the distance: over a tile of scores, and in the spectra of whole sequences.

use realfft::num_complex::Complex;

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

/// `to[i] += x[i] · y[i]`.
#[inline(always)]
pub(crate) unsafe fn add_products<V: Vector>(to: &mut [V::Element], x: &[V::Element], y: &[V::Element]) {
    let whole = to.len() / V::LANES * V::LANES;
    assert!(x.len() >= to.len() && y.len() >= to.len());
    // SAFETY: `whole` numbers lie in all three slices.
    unsafe {
        let mut at = 0;
        while at < whole {
            let place = to.as_mut_ptr().add(at);
            V::load(x.as_ptr().add(at)).mul_add(V::load(y.as_ptr().add(at)), V::load(place)).store(place);
            at += V::LANES;
        }
    }
    for at in whole..to.len() {
        to[at] += x[at] * y[at];
    }
}

/// `x[i] ← x[i] · by[i]`, or by its conjugate.
// Plain loops: under the features that each table is compiled for, the compiler makes vectors of them.
#[inline(always)]
pub(crate) unsafe fn multiply_spectrum<V: Vector>(
    x: &mut [Complex<V::Element>],
    by: &[Complex<V::Element>],
    conjugate: bool,
) {
    if conjugate {
        for (x, y) in x.iter_mut().zip(by) {
            *x = Complex { re: x.re * y.re + x.im * y.im, im: x.im * y.re - x.re * y.im };
        }
    } else {
        for (x, y) in x.iter_mut().zip(by) {
            *x = Complex { re: x.re * y.re - x.im * y.im, im: x.im * y.re + x.re * y.im };
        }
    }
}

/// `to[i] += conj(x[i]) · y[i]`.
#[inline(always)]
pub(crate) unsafe fn add_conjugate_products<V: Vector>(
    to: &mut [Complex<V::Element>],
    x: &[Complex<V::Element>],
    y: &[Complex<V::Element>],
) {
    for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
        to.re += x.re * y.re + x.im * y.im;
        to.im += x.re * y.im - x.im * y.re;
    }
}
