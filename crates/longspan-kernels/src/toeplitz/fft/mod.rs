//! Correlations with `e^{b_δ}` by fast Fourier transforms: O(L log L) in the length, features · values of them.
//!
//! With `x_fg = k̄_f ∘ v⁺_g` (keys in order) and `c_δ = e^{b_δ − max b}`, `N⁺_ig = Σ_f q̄_if (c ⋆ x_fg)_i`. One column of
//! values at a time goes through, so that memory is O(L) for each thread beside the transposes of one head.
//!
//! Spectra and columns are `f64` whatever the number type; a scratch holds both.
//!
//! The error of a transform is relative to the largest numbers that go into it, so a row whose weights are all small
//! may lose every digit. Each row therefore carries a certificate, `ε log₂N ‖c‖ ‖B‖ ‖q̄_i‖ ≤ tol·D_i` with
//! `‖B‖² = Σ_j ‖k̄_j‖² ‖v⁺_j‖²`; blocks of rows in which one fails are computed by tiles. Transforms would also spread a
//! NaN to all rows: heads with keys or values that are not finite go by tiles altogether.

mod backward;
mod columns;
mod forward;
mod line;
mod spectrum;

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use line::transform_length;

use super::problem::{Problem, Unit};
use crate::simd::Real;
use line::{Kernel, Line};

/// What a certified row or key may lose to a transform, in units of `ε √L` of the number type: sums of as many terms
/// lose about as much by rounding anyway.
const LOSS: f64 = 2.0;

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The norm of the products `x ∘ y`.
fn norm_of(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * x * y * y).sum::<f64>().sqrt()
}

/// The bound on what the transforms of a signal lose, relative to its norm.
fn lost(line: &Line, kernel: &Kernel<'_>) -> f64 {
    line.rounding() * kernel.norm
}

/// What they may lose, relative to the sum of the magnitudes.
fn allowed<T: Real>(line: &Line) -> f64 {
    LOSS * T::EPSILON.to_f64() * (line.keys.count.max(line.queries.count) as f64).sqrt()
}

/// A sum of which transforms leave no more than they lose is 0: it may be one of no terms.
fn clear(x: &mut f64, bound: f64) {
    if x.abs() <= bound {
        *x = 0.0;
    }
}

/// Whether transforms may take a unit: a NaN or infinity would spread to all its rows.
fn transforms<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> bool {
    unit.sequence.queries > 0 && unit.sequence.keys > 0 && unit.is_finite(problem, 0, unit.sequence.keys as isize)
}
