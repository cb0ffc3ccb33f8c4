//! The definition in `f64`, O(queries · keys): what every fast path is tested against. Never optimised.

use super::Toeplitz;
use crate::call::{Call, Reference, check_reference, places};
use crate::error::Error;
use crate::feature_map::reference::{Divisor, Map, Seen, Term, quotient};
use crate::feature_map::rows::Side;

/// `out_i = Σ_j e^{b_δ} φ(q_i)·φ(k_j) v_j / Σ_j e^{b_δ} φ(q_i)·φ(k_j)` over the keys `j` that row `i` sees.
pub(super) fn reference(toeplitz: &Toeplitz, call: &Call<'_, f64>) -> Result<Reference, Error> {
    check_reference(toeplitz, call)?;
    let dims = &call.dims;
    let map = Map::new(toeplitz.feature_map, dims, &call.parameters[1..]);
    let keys = map.keys(call);
    let divisor = if toeplitz.normalize { Divisor::Denominator } else { Divisor::One };
    Ok(Reference::of_rows(dims, |[batch, head, i]| {
        let kv_head = head / dims.group();
        let q = map.row(Side::Query(head), call.q.rows(batch, head).row(i, dims.head_dim));
        let bias = &call.parameters[0][head * toeplitz.bias.entries()..];
        let seen = |j: usize| {
            let (query, key) = places(call, [batch, i, j])?;
            let [query, key] = [query as isize + call.mask.offset, key as isize].map(|at| toeplitz.bias.place(at));
            let bias = bias[toeplitz.bias.entry(key - query)?];
            let k = &keys[(batch * dims.kv_heads + kv_head) * dims.keys + j];
            let terms = q.iter().zip(k).map(|(q, k)| {
                let factor = q.factor * k.factor;
                Term { factor, share: factor, exponent: bias + q.exponent + k.exponent }
            });
            let value = call.v.rows(batch, kv_head).row(j, dims.value_dim);
            Some(Seen { value, scale: 1.0, terms: terms.collect() })
        };
        quotient(&(0..dims.keys).filter_map(seen).collect::<Vec<_>>(), dims.value_dim, divisor)
    }))
}
