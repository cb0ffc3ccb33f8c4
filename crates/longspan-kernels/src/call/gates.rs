//! Decays that tokens bring, whatever mechanism they go to.

use super::State;
use crate::error::{Error, expect};
use crate::simd::Real;
use crate::simd::block::largest;

/// Refuses what would grow; what is no number spreads by itself.
pub(crate) fn check_log_decay<T: Real>(operation: &'static str, log_decay: &[T]) -> Result<(), Error> {
    let top = largest(log_decay);
    expect(top <= T::ZERO, operation, "log_decay", || "numbers that are at most 0".into(), || top.to_string())
}

/// Refuses a state whose sums of log decays, one of its parts, have grown.
pub(crate) fn check_log_decays_of<T: Real>(
    operation: &'static str,
    argument: &'static str,
    state: &State<T>,
    part: usize,
) -> Result<(), Error> {
    let wrong = state.each(part).flatten().find(|&&g| g > T::ZERO);
    let expected = || "sums of log decays, at most 0".into();
    expect(wrong.is_none(), operation, argument, expected, || wrong.map_or(String::new(), T::to_string))
}
