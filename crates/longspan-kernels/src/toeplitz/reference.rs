//! The definition in `f64`, O(queries · keys): what every fast path is tested against. Never optimised.

use super::{OPERATION, Toeplitz};
use crate::call::{Call, Compute, Keys, Order, Reference};
use crate::error::{Error, expect};
use crate::feature_map::reference::{Feature, Map};
use crate::feature_map::rows::Side;

/// `out_i = Σ_j e^{b_δ} φ(q_i)·φ(k_j) v_j / Σ_j e^{b_δ} φ(q_i)·φ(k_j)` over the keys `j` that row `i` sees.
pub(super) fn reference(toeplitz: &Toeplitz, call: &Call<'_, f64>) -> Result<Reference, Error> {
    Compute::check(toeplitz, call)?;
    let expected = || "none: prepend the earlier tokens instead".into();
    expect(call.initial_state.is_none(), OPERATION, "initial_state of the reference", expected, || "a state".into())?;
    let dims = &call.dims;
    let mut reference = Reference { out: Vec::new(), denominators: Vec::new() };
    let map = Map::new(toeplitz.feature_map, dims, &call.parameters[1..]);
    let heads = (0..dims.batch).flat_map(|batch| (0..dims.kv_heads).map(move |head| (batch, head)));
    let keys = heads.flat_map(|(batch, head)| (0..dims.keys).map(move |j| (batch, head, j)));
    let key = |(batch, head, j)| map.row(Side::Key(head), call.k.rows(batch, head).row(j, dims.head_dim));
    let keys: Vec<Vec<Feature>> = keys.map(key).collect();
    for batch in 0..dims.batch {
        for head in 0..dims.heads {
            for i in 0..dims.queries {
                let (row, denominator) = row(toeplitz, call, (&map, &keys), (batch, head, i));
                reference.out.extend(row);
                reference.denominators.push(denominator);
            }
        }
    }
    Ok(reference)
}

/// One row of the output and its denominator.
fn row(
    toeplitz: &Toeplitz,
    call: &Call<'_, f64>,
    (map, keys): (&Map<'_>, &[Vec<Feature>]),
    (batch, head, i): (usize, usize, usize),
) -> (Vec<f64>, f64) {
    let dims = &call.dims;
    let kv_head = head / dims.group();
    let q = map.row(Side::Query(head), call.q.rows(batch, head).row(i, dims.head_dim));
    let bias = &call.parameters[0][head * toeplitz.bias.entries()..];

    // Each weight as a sum of `factor · e^exponent`, one term a feature.
    let seen: Vec<(usize, Vec<(f64, f64)>)> = (0..dims.keys)
        .filter_map(|j| {
            let (query, key) = places(call, batch, i, j)?;
            let entry = toeplitz.bias.entry(toeplitz.bias.place(key) - toeplitz.bias.place(query))?;
            let k = &keys[(batch * dims.kv_heads + kv_head) * dims.keys + j];
            let term = |(q, k): (&Feature, &Feature)| (q.factor * k.factor, bias[entry] + q.exponent + k.exponent);
            Some((j, q.iter().zip(k).map(term).collect()))
        })
        .collect();

    // Exponentials overflow where the quotient does not: exponents count from the largest one of the row.
    let largest = seen.iter().flat_map(|(_, terms)| terms).map(|term| term.1).fold(f64::NEG_INFINITY, f64::max);
    let shift = if largest.is_finite() { largest } else { 0.0 };

    let mut numerator = vec![0.0; dims.value_dim];
    let mut denominator = 0.0;
    for (j, terms) in &seen {
        let weight: f64 = terms.iter().map(|(factor, exponent)| factor * (exponent - shift).exp()).sum();
        for (n, value) in numerator.iter_mut().zip(call.v.rows(batch, kv_head).row(*j, dims.value_dim)) {
            *n += weight * value;
        }
        denominator += weight;
    }
    let unshift = |x: f64| if x == 0.0 { 0.0 } else { x * shift.exp() };
    if !toeplitz.normalize {
        return (numerator.into_iter().map(unshift).collect(), 1.0);
    }
    // Not `> 0`: a NaN that the row sees must come out, and signed features may have a negative denominator.
    let out = numerator.into_iter().map(|n| if denominator == 0.0 { 0.0 } else { n / denominator }).collect();
    (out, unshift(denominator))
}

/// Where row `i` and key `j` stand in their sequence, if the row sees the key.
fn places(call: &Call<'_, f64>, batch: usize, i: usize, j: usize) -> Option<(isize, isize)> {
    let (i, j, present) = match call.mask.keys {
        Keys::All => (i, j, true),
        Keys::Lengths(lengths) => (i, j, j < lengths[batch]),
        Keys::Padding(ignored) => (i, j, !ignored[batch * call.dims.keys + j]),
        Keys::Packed { queries, keys } => {
            let own = (1..queries.len()).find(|&s| i < queries[s])? - 1;
            (i - queries[own], j.saturating_sub(keys[own]), (keys[own]..keys[own + 1]).contains(&j))
        }
    };
    let (query, key) = (i as isize + call.mask.offset, j as isize);
    (present && (call.mask.order == Order::Bidirectional || key <= query)).then_some((query, key))
}
