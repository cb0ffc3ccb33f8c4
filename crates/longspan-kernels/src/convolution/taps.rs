//! The loops over taps and channels. Blocks have rows of whole registers.

use crate::simd::block::set_products;
use crate::simd::{self, Real, dispatch, operation};

// `to[r] = b + Σ_t taps[t] ⊙ from[r + w − 1 − t]`, or with `ahead` `Σ_t taps[t] ⊙ from[r + t]`, for each row of `to`. The bias stands after
// the taps.
operation!(Convolve, |from: &'a [T], taps: &'a [T], row: usize, ahead: bool, to: &'a mut [T]| {
    let width = taps.len() / row - 1;
    assert!(row.is_multiple_of(V::LANES) && width > 0 && from.len() + row >= to.len() + width * row);
    for (first, to) in to.chunks_exact_mut(row).enumerate() {
        for column in (0..row).step_by(V::LANES) {
            // SAFETY: by the assertion `width` rows of `from` begin at the row's own number.
            unsafe {
                let bias = V::load(taps.as_ptr().add(width * row + column));
                let mut sum = if ahead { V::splat(T::ZERO) } else { bias };
                for t in 0..width {
                    let at = first + if ahead { t } else { width - 1 - t };
                    let tap = V::load(taps.as_ptr().add(t * row + column));
                    sum = tap.mul_add(V::load(from.as_ptr().add(at * row + column)), sum);
                }
                sum.store(to.as_mut_ptr().add(column));
            }
        }
    }
});

/// The sum of a query's latest products, for each row of `to`; the first row of `from` is the oldest that the first one sees.
pub(super) fn convolve<T: Real>(from: &[T], taps: &[T], row: usize, to: &mut [T]) {
    dispatch(Convolve { from, taps, row, ahead: false, to });
}

/// The gradient of a product: the sum over the rows that see it, which begin with its own.
pub(super) fn convolve_back<T: Real>(from: &[T], taps: &[T], row: usize, to: &mut [T]) {
    dispatch(Convolve { from, taps, row, ahead: true, to });
}

// The gradients of taps, `to[t] = Σ_r d[r] ⊙ from[r + w − 1 − t]`, then that of the bias, `Σ_r d[r]`.
operation!(TapSums, |d: &'a [T], from: &'a [T], row: usize, to: &'a mut [T]| {
    let width = to.len() / row - 1;
    assert!(row.is_multiple_of(V::LANES) && width > 0 && from.len() + row >= d.len() + width * row);
    for (t, to) in to.chunks_exact_mut(row).enumerate() {
        for column in (0..row).step_by(V::LANES) {
            // SAFETY: by the assertion every row of `d` has `width` rows of `from` from its own number on.
            unsafe {
                let mut sum = V::splat(T::ZERO);
                for r in 0..d.len() / row {
                    let d = V::load(d.as_ptr().add(r * row + column));
                    sum = if t == width {
                        sum.add(d)
                    } else {
                        d.mul_add(V::load(from.as_ptr().add((r + width - 1 - t) * row + column)), sum)
                    };
                }
                sum.store(to.as_mut_ptr().add(column));
            }
        }
    }
});

/// The gradients of taps and bias from those of the sums of rows.
pub(super) fn tap_sums<T: Real>(d: &[T], from: &[T], row: usize, to: &mut [T]) {
    dispatch(TapSums { d, from, row, to });
}

/// `to ← gate ⊙ x`; without a gate, whose row has no numbers, `x` itself.
pub(super) fn through_gate<T: Real>(gate: &[T], x: &[T], to: &mut [T]) {
    if gate.is_empty() {
        to.copy_from_slice(&x[..to.len()]);
    } else {
        set_products(gate, x, to);
    }
}

operation!(Silu, |numbers: &'a mut [T], slopes: Option<&'a mut [T]>| {
    let (len, mut slopes) = (numbers.len(), slopes);
    assert!(len.is_multiple_of(V::LANES) && slopes.as_ref().is_none_or(|slopes| slopes.len() == len));
    for at in (0..len).step_by(V::LANES) {
        // SAFETY: whole registers lie in both slices.
        unsafe {
            let place = numbers.as_mut_ptr().add(at);
            let (value, slope) = simd::silu(V::load(place));
            value.store(place);
            if let Some(slopes) = &mut slopes {
                slope.store(slopes.as_mut_ptr().add(at));
            }
        }
    }
});

/// `SiLU(s)` in place, and `SiLU'(s)` if there is room for it.
pub(super) fn silu<T: Real>(numbers: &mut [T], slopes: Option<&mut [T]>) {
    dispatch(Silu { numbers, slopes });
}
