//! The definition in `f64`, token by token: what the fast path is tested against. Never optimised.

use super::{Gate, GatedAttention};
use crate::call::{Call, Reference, check_reference};
use crate::error::Error;

/// The recurrence of the module's page, from an empty state on.
pub(super) fn reference(attention: &GatedAttention, call: &Call<'_, f64>) -> Result<Reference, Error> {
    check_reference(attention, call)?;
    let (dims, scale) = (&call.dims, attention.scale(call.dims.head_dim));
    let (width, value_dim) = (dims.head_dim, dims.value_dim);
    let normalized = |row: &[f64]| -> Vec<f64> {
        let length = if attention.l2_norm { (row.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt() } else { 1.0 };
        row.iter().map(|x| x / length).collect()
    };
    let mut out = vec![0.0; dims.out().iter().product()];
    for sequence in call.mask.sequences(dims) {
        for head in 0..dims.heads {
            let (batch, kv_head) = (sequence.batch, head / dims.group());
            let mut state = vec![vec![0.0; value_dim]; width];
            for token in 0..sequence.queries {
                let at = sequence.key_start + token;
                let place = (batch * dims.kv_heads + kv_head) * dims.keys + at;
                if sequence.has(token) {
                    for (channel, row) in state.iter_mut().enumerate() {
                        let g = match attention.gate {
                            Gate::None => 0.0,
                            Gate::Head => call.parameters[0][place],
                            Gate::Channel => call.parameters[0][place * width + channel],
                        };
                        row.iter_mut().for_each(|s| *s *= g.exp());
                    }
                    let k = normalized(call.k.rows(batch, kv_head).row(at, width));
                    let v = call.v.rows(batch, kv_head).row(at, value_dim);
                    let u: Vec<f64> = (0..value_dim)
                        .map(|column| {
                            if !attention.is_delta() {
                                return v[column];
                            }
                            let known: f64 = k.iter().zip(&state).map(|(k, row)| k * row[column]).sum();
                            call.parameters[call.parameters.len() - 1][place] * (v[column] - known)
                        })
                        .collect();
                    for (row, k) in state.iter_mut().zip(&k) {
                        row.iter_mut().zip(&u).for_each(|(s, u)| *s += k * u);
                    }
                }
                let q = normalized(call.q.rows(batch, head).row(sequence.query_start + token, width));
                let row = (batch * dims.heads + head) * dims.queries + sequence.query_start + token;
                for (column, out) in out[row * value_dim..][..value_dim].iter_mut().enumerate() {
                    *out = scale * q.iter().zip(&state).map(|(q, row)| q * row[column]).sum::<f64>();
                }
            }
        }
    }
    Ok(Reference { out, denominators: vec![1.0; dims.batch * dims.heads * dims.queries] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Update;
    use crate::call::{Dims, Mask};

    /// Two tokens of one number, by hand.
    #[test]
    fn a_state_decays_and_corrects_itself() {
        let dims = Dims::square(1, 1, 2, 1);
        let half: &[f64] = &[0.0, 0.5f64.ln()];
        let beta: &[f64] = &[1.0, 0.5];
        let call = Call::row_major(dims, [&[1.0, 2.0], &[1.0, 3.0], &[4.0, 5.0]]).with_mask(Mask::causal());
        let attention = GatedAttention { update: Update::Sum, gate: Gate::Head, l2_norm: false, scale: Some(1.0) };
        let sum = reference(&attention, &call.with_parameters(&[half])).expect("a call that makes sense");
        // S: 4, then 2 + 15.
        assert_eq!(sum.out, [4.0, 34.0]);
        let delta = GatedAttention { update: Update::Delta, ..attention };
        let delta = reference(&delta, &call.with_parameters(&[half, beta])).expect("a call that makes sense");
        // S: 4, then 2 + 3 · ½ (5 − 6).
        assert_eq!(delta.out, [4.0, 1.0]);
    }
}
