//! The gradients of states: what a final one gives to the tokens of a call, and where that of the initial one goes.

use super::problem::{Problem, Unit};
use super::state::{EXPONENT, Head};
use crate::call::{State, StateSink};
use crate::simd::Real;

/// The gradients that a call takes from its final state and leaves for its initial one.
#[derive(Clone, Copy)]
pub(super) struct StateGradients<'s, T> {
    /// Of the loss with respect to the final state.
    pub last: Option<&'s State<T>>,
    /// Where that of the initial one goes, all 0 to begin with.
    pub first: Option<StateSink<'s, T>>,
}

/// What the final state of a unit gives to the gradients of its tokens.
#[derive(Clone, Copy)]
pub(super) struct Last<'s, T> {
    pub head: Head<&'s [T]>,
    /// Tokens before this one are beyond the ring.
    pub ring_from: isize,
    /// Where key 0 goes in the ring.
    slot: isize,
    /// The exponent of the state's sums; −∞ if there is nothing in them.
    pub exponent: T,
}

impl<'s, T: Real> Last<'s, T> {
    pub fn new(problem: &Problem<'_, T>, unit: &Unit<'_, T>, gradient: &'s State<T>) -> Self {
        let keys = unit.sequence.keys as isize;
        let ring_from = keys - problem.toeplitz.bias.near() as isize;
        let mut exponent = unit.past.map_or(T::NEG_INFINITY, |past| past.head.marks[EXPONENT]);
        for key in unit.begin()..ring_from.max(unit.begin()) {
            exponent = exponent.max(match (problem.mapping.exponential, usize::try_from(key)) {
                (_, Ok(key)) if unit.sequence.ignores(key) => T::NEG_INFINITY,
                (true, Ok(_)) => problem.key_piece(unit, key, key + 1).1,
                (true, Err(_)) => unit.past.and_then(|past| past.exponent(key)).unwrap_or(T::NEG_INFINITY),
                _ => T::ZERO,
            });
        }
        let head = Head::from(gradient.head(unit.sequence.batch, unit.kv_head));
        let slot = unit.past.map_or(0, |past| past.slot) as isize;
        Self { head, ring_from, slot, exponent }
    }

    /// The gradients of a ring's row: of `φ(k)` and of `[v, 1]`.
    pub fn ring_row(&self, problem: &Problem<'_, T>, key: isize) -> (&'s [T], &'s [T]) {
        let (features, width) = (problem.features, problem.dims.value_dim + 1);
        let slot = (self.slot + key).rem_euclid(problem.toeplitz.bias.near() as isize) as usize;
        (&self.head.ring_keys[slot * features..][..features], &self.head.ring_values[slot * width..][..width])
    }
}
