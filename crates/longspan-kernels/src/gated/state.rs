//! The state: `S`, and how far it has decayed.

use super::GatedAttention;
use crate::call::{CombineGradients, Dims, Mechanism, State, StateShape, Stateful, check_log_decays_of, fingerprint};
use crate::error::{Error, refuse};
use crate::simd::Real;
use crate::simd::block::{add_scaled, dot};

/// The sizes of the state for calls of these sizes; behind a convolution of some width, with what that keeps of the past.
pub(super) fn shape(attention: &GatedAttention, dims: &Dims, convolution: Option<(usize, [usize; 3])>) -> StateShape {
    let sums = dims.head_dim.saturating_mul(dims.value_dim);
    let (options, [q, k, v]) = convolution.map_or((attention.fingerprint(), [0; 3]), |(width, past)| {
        (fingerprint([attention.fingerprint(), width as u64]), past)
    });
    let parts = [sums, attention.gate_len(dims.head_dim), 0, q, k, v];
    StateShape::new(attention.name(), options, dims, parts).in_lines(2)
}

/// Checks two states that follow each other, and that they have a sum.
fn check_both<T: Real>(attention: &GatedAttention, earlier: &State<T>, later: &State<T>) -> Result<(), Error> {
    let operation = attention.name();
    let combination = "the sum of two states";
    let help =
        "what a token adds depends on the state before it: give the earlier state to the call of the later tokens";
    refuse(attention.is_delta(), operation, combination, help)?;
    let own = earlier.shape();
    let dims = own.dims(0, 0);
    earlier.check(operation, "earlier state", StateShape::new(operation, attention.fingerprint(), &dims, own.parts))?;
    later.check(operation, "later state", own)?;
    attention.check_marks(earlier, "earlier state")?;
    attention.check_marks(later, "later state")
}

/// The rows of `S` that share a decay: one or all of them.
fn rows<'s, T>(sum: &'s [T], gates: &[T]) -> impl Iterator<Item = &'s [T]> {
    sum.chunks(sum.len().div_ceil(gates.len().max(1)).max(1))
}

fn factor<T: Real>(gates: &[T], n: usize) -> T {
    gates.get(n).map_or(T::ONE, |g| g.exp())
}

impl Stateful for GatedAttention {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        Ok(shape(self, dims, None))
    }

    /// Refuses a state that has grown.
    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        check_log_decays_of(self.name(), argument, state, 1)
    }

    /// `S = e^{G of later} S of earlier + S of later`.
    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, _: &[&[T]]) -> Result<State<T>, Error> {
        check_both(self, earlier, later)?;
        let mut both = later.try_clone()?;
        for ([sum, gates, ..], [before, past, ..]) in both.heads_mut().zip(earlier.heads()) {
            let mut to = sum;
            for (n, row) in rows(before, gates).enumerate() {
                let (own, rest) = to.split_at_mut(row.len());
                add_scaled(own, factor(gates, n), row);
                to = rest;
            }
            gates.iter_mut().zip(past).for_each(|(g, &past)| *g += past);
        }
        Ok(both)
    }

    fn combine_backward<T: Real>(
        &self,
        earlier: &State<T>,
        later: &State<T>,
        parameters: &[&[T]],
        d_combined: &State<T>,
    ) -> Result<CombineGradients<T>, Error> {
        check_both(self, earlier, later)?;
        d_combined.check(self.name(), "gradient of the sum", earlier.shape())?;
        let (mut d_earlier, mut d_later) = (State::zeros(earlier.shape())?, d_combined.try_clone()?);
        let heads = d_earlier.heads_mut().zip(d_later.heads_mut());
        let given = earlier.heads().zip(later.heads()).zip(d_combined.heads());
        for (([to, d_past, ..], [_, d_gates, ..]), (([before, ..], [_, gates, ..]), [d, d_sum_gates, ..])) in
            heads.zip(given)
        {
            let mut to = to;
            for (n, (row, d)) in rows(before, gates).zip(rows(d, gates)).enumerate() {
                let (own, rest) = to.split_at_mut(row.len());
                add_scaled(own, factor(gates, n), d);
                if let Some(d_gate) = d_gates.get_mut(n) {
                    *d_gate += factor(gates, n) * dot(row, d);
                }
                to = rest;
            }
            d_past.copy_from_slice(d_sum_gates);
        }
        let parameters = parameters.iter().map(|numbers| vec![T::ZERO; numbers.len()]).collect();
        Ok(CombineGradients { earlier: d_earlier, later: d_later, parameters })
    }
}
