//! How far a result may be from the expected one, and how a failure is reported.

use std::fmt;

use longspan_kernels::Error;

use crate::execute::Backward;
use crate::subject::Number;

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(format!("refused a call that makes sense: {error}"))
    }
}

/// Fails with `message` unless `condition`.
pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure(message())) }
}

/// Rounding errors of one term, in ulps: two feature maps at up to two each, a product, a division, a rescaling.
const ROUNDINGS: f64 = 8.0;

/// The only tolerance of the suite: `c · eps · √terms · scale`.
///
/// `scale` is the sum of the magnitudes of the terms of the exact value, so cancellation is allowed for and nothing
/// else; the rounding errors of `terms` additions add up like a random walk.
pub fn tolerance<T: Number>(terms: usize, scale: f64) -> f64 {
    ROUNDINGS * T::EPSILON.to_f64() * (terms.max(1) as f64).sqrt() * scale
}

/// The error that underflow may cause in a sum of `terms`: a feature or weight below the least normal number counts as
/// 0, and its factors are at most as large as the largest scale of the tensor.
fn underflow<T: Number>(terms: usize, scale: &[f64]) -> f64 {
    let least = if size_of::<T>() == 4 { f64::from(f32::MIN_POSITIVE) } else { f64::MIN_POSITIVE };
    least * terms as f64 * scale.iter().copied().fold(1.0, f64::max)
}

/// Checks every element against `expected` under [`tolerance`], and reports the worst.
pub fn close<T: Number>(what: &str, got: &[T], expected: &[f64], scale: &[f64], terms: usize) -> Result<(), Failure> {
    assert_eq!(expected.len(), scale.len(), "{what}: a check without scales");
    ensure(got.len() == expected.len(), || format!("{what}: {} elements instead of {}", got.len(), expected.len()))?;
    let lost = underflow::<T>(terms, scale);
    let allowed = |scale: f64| if scale == 0.0 { 0.0 } else { tolerance::<T>(terms, scale) + lost };
    let mut worst: Option<(f64, usize)> = None;
    for (n, ((&got, &expected), &scale)) in got.iter().zip(expected).zip(scale).enumerate() {
        let error = (got.to_f64() - expected).abs();
        let ratio = if error.is_nan() { f64::INFINITY } else { error / allowed(scale) };
        let same = got.to_f64() == expected || (got.to_f64().is_nan() && expected.is_nan());
        if !same && ratio > 1.0 && worst.is_none_or(|(w, _)| ratio > w) {
            worst = Some((ratio, n));
        }
    }
    let Some((ratio, n)) = worst else { return Ok(()) };
    let wrong = got.iter().zip(expected).zip(scale).filter(|((g, e), s)| {
        let error = (g.to_f64() - **e).abs();
        error.is_nan() || error > allowed(**s)
    });
    Err(Failure(format!(
        "{what}: {} of {} elements beyond tolerance, worst at {n}: got {:e}, expected {:e}, scale {:e}, {ratio:.1} × the \
         tolerance",
        wrong.count(),
        got.len(),
        got[n].to_f64(),
        expected[n],
        scale[n],
    )))
}

/// The largest error of the numbers of each list, relative to its largest number.
pub fn worst<T: Number>(got: &[Vec<T>], expected: &[Vec<f64>]) -> f64 {
    let larger = |most: f64, x: f64| if x > most || x.is_nan() { x } else { most };
    let each = got.iter().zip(expected).map(|(got, expected)| {
        assert_eq!(got.len(), expected.len());
        let largest = expected.iter().fold(f64::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let errors = got.iter().zip(expected).map(|(got, expected)| (got.to_f64() - expected).abs());
        errors.fold(0.0, larger) / largest
    });
    each.fold(0.0, larger)
}

/// Checks that all bits are equal, and reports the first that is not.
pub fn same_bits<T: Number>(what: &str, got: &[T], expected: &[T]) -> Result<(), Failure> {
    ensure(got.len() == expected.len(), || format!("{what}: {} elements instead of {}", got.len(), expected.len()))?;
    match got.iter().zip(expected).position(|(a, b)| a.bits() != b.bits()) {
        None => Ok(()),
        Some(n) => {
            Err(Failure(format!("{what}: element {n} is {:e} instead of {:e}", got[n].to_f64(), expected[n].to_f64())))
        }
    }
}

/// [`same_bits`] for every gradient; `what` follows its name.
pub fn same_gradients<T: Number>(what: &str, got: &Backward<T>, expected: &Backward<T>) -> Result<(), Failure> {
    let mut pairs = got.named().zip(&expected.gradients);
    pairs.try_for_each(|((name, got), expected)| same_bits(&format!("{name} {what}"), got, expected))
}

/// [`close`] for every gradient; `what` follows its name.
pub fn close_gradients<T: Number>(
    what: &str,
    got: &Backward<T>,
    expected: &Backward<f64>,
    scale: &Backward<f64>,
    terms: usize,
) -> Result<(), Failure> {
    let mut pairs = got.named().zip(expected.gradients.iter().zip(&scale.gradients));
    pairs.try_for_each(|((name, got), (expected, scale))| close(&format!("{name}{what}"), got, expected, scale, terms))
}
