//! The gradient of gates.
//!
//! The gate of token `t` is in the weight of each pair `j < t ≤ i`. With `C_j` the sum of `w ∂w` over the pairs of key `j`, and `R_i` that
//! over those of row `i`, its gradient is `Σ_{i ≥ t} R_i − Σ_{j ≥ t} C_j`, or, where a later call takes up the final state, as much as
//! `Σ_{j < t} C_j − Σ_{i < t} R_i` with the initial state as the first of the keys. `C_j = v_j·dv_j`, and as much for a value of 1 that
//! denominators sum up. `R_i = o_i·do_i`, or 0 where rows are divided by their denominators: as much is lost as won.

use std::sync::PoisonError;

use super::super::state::Head;
use super::key_walk::KeyWalk;
use crate::simd::Real;
use crate::simd::block::dot;

impl<T: Real> KeyWalk<'_, '_, T> {
    /// Turns the sums over the pairs of each key, where the gradients of its gates go, into those; and hands on what the final state says
    /// of all log decays.
    pub fn finish_gates(&self) {
        let Some(gates) = &self.gates else { return };
        let (sequence, problem) = (&self.unit.sequence, self.problem);
        // SAFETY: all of a unit's keys belong to the task that calls.
        let to = |token: usize| unsafe {
            &mut gates.row(sequence.batch, self.unit.kv_head, sequence.key_start + token, 1)[0]
        };
        let of_row = |row: usize| {
            if problem.attention.normalizes() || row >= sequence.queries {
                return 0.0;
            }
            let head = |head: usize| {
                let (out, d_out) = self.source.rows(&self.unit, head);
                dot(out.row(row, problem.dims.value_dim), d_out.row(row, problem.dims.value_dim)).to_f64()
            };
            problem.heads(&self.unit).map(head).sum()
        };
        if let Some(d_final) = &self.d_final {
            let d_passed = d_final.passed[0];
            let mut sum = d_passed.to_f64() + self.of_initial_state(d_passed);
            for token in 0..sequence.keys {
                let of_key = std::mem::replace(to(token), T::from_f64(sum));
                sum += of_key.to_f64() - of_row(token);
            }
        } else {
            let mut sum = 0.0;
            for token in (0..sequence.queries.max(sequence.keys)).rev() {
                sum += of_row(token);
                if token < sequence.keys {
                    sum -= to(token).to_f64();
                    *to(token) = T::from_f64(sum);
                }
            }
        }
        for token in 0..sequence.keys + sequence.absent {
            if !sequence.has(token) {
                *to(token) = T::ZERO;
            }
        }
    }

    /// The sum over the pairs of the initial state, whose own gradient gets what the final one says of log decays.
    fn of_initial_state(&self, d_passed: T) -> f64 {
        let (Some(state), Some(place)) = (&self.initial, self.d_initial) else { return 0.0 };
        let mut d_state = place.lock().unwrap_or_else(PoisonError::into_inner);
        d_state.passed[0] = d_passed;
        let Head { sum, keys, far, ring, .. } = &*d_state;
        let both = |x: &[T], d: &[T]| -> f64 { x.iter().zip(d).map(|(x, d)| x.to_f64() * d.to_f64()).sum() };
        let entry = self.problem.dims.value_dim + 1;
        let weights = (entry - 1..ring.len()).step_by(entry);
        let of_ring: f64 = weights.map(|n| state.ring[n].to_f64() * ring[n].to_f64()).sum();
        both(state.sum, sum) + both(state.keys, keys) + both(state.far, far) + of_ring
    }
}
