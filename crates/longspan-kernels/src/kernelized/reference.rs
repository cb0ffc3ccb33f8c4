//! The definition in doubles, O(queries · keys): what every fast path is tested against. Never optimised.

use super::{KernelizedAttention, Score};
use crate::error::{Error, expect};
use crate::feature_map::FeatureMap;
use crate::mask::{Keys, Mask, Order};
use crate::mechanism::{Call, Mechanism, Reference};
use crate::shape::Dims;
use crate::shaw::{self, RelativeMap};

/// `out_i = Σ_j w_ij v_j / Σ_j w_ij` over the keys `j` that row `i` sees.
pub(crate) fn reference(attention: &KernelizedAttention, call: &Call<'_, f64>) -> Result<Reference, Error> {
    Mechanism::<f64>::check(attention, call)?;
    expect(
        call.initial_state.is_none(),
        "kernelized_attention reference",
        "initial_state",
        || "none: prepend the earlier tokens instead".into(),
        || "a state".into(),
    )?;
    Ok(definition(attention, call))
}

/// The same for a call that makes sense.
fn definition(attention: &KernelizedAttention, call: &Call<'_, f64>) -> Reference {
    let dims = &call.dims;
    let mut out = Vec::new();
    let mut denominators = Vec::new();
    for batch in 0..dims.batch {
        for head in 0..dims.heads {
            for i in 0..dims.queries {
                let (row, denominator) = row(attention, call, batch, head, i);
                out.extend(row);
                denominators.push(denominator);
            }
        }
    }
    Reference { out, denominators }
}

/// One row of the output and its denominator.
fn row(attention: &KernelizedAttention, call: &Call<'_, f64>, batch: usize, head: usize, i: usize) -> (Vec<f64>, f64) {
    let dims = &call.dims;
    let kv_head = head / dims.group();
    let q = call.q.rows(batch, head).row(i, dims.head_dim);
    let k = |j| call.k.rows(batch, kv_head).row(j, dims.head_dim);
    let v = |j| call.v.rows(batch, kv_head).row(j, dims.value_dim);

    // The keys that this row sees, each as the terms of its weight `w_ij = γ^{−δ} Σ_f Σ_terms`.
    let seen: Vec<(usize, isize, Vec<Term>)> = (0..dims.keys)
        .filter_map(|j| Some((j, distance(&call.mask, dims, batch, i, j)?)))
        .map(|(j, delta)| (j, delta, terms(attention, call, head, q, k(j), delta)))
        .collect();

    // e^{q+k} overflows where the quotient does not: exponents count from the largest one of the row.
    let largest = seen.iter().flat_map(|(.., terms)| terms).map(|t| t.exponent).fold(f64::NEG_INFINITY, f64::max);
    let shift = if largest.is_finite() { largest } else { 0.0 };

    let mut numerator = vec![0.0; dims.value_dim];
    let mut denominator = 0.0;
    for (j, delta, terms) in &seen {
        let gamma = attention.decay.as_ref().map_or(1.0, |decay| decay[kv_head]);
        let score: f64 = terms.iter().map(|t| t.factor * (t.exponent - shift).exp()).sum();
        let weight = gamma.powf(-*delta as f64) * score;
        for (n, &value) in numerator.iter_mut().zip(v(*j)) {
            *n += weight * value;
        }
        denominator += weight;
    }

    if !attention.normalize {
        return (numerator.into_iter().map(|n| unshift(n, shift)).collect(), 1.0);
    }
    // Not `> 0`: a NaN that the row sees must come out, and signed features may have a negative denominator.
    let out = numerator.into_iter().map(|n| if denominator == 0.0 { 0.0 } else { n / denominator }).collect();
    (out, unshift(denominator, shift))
}

/// `x · e^shift`, where an exact 0 stays 0 however large the shift.
fn unshift(x: f64, shift: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x * shift.exp() }
}

/// The distance `δ = j − (i + o)` if row `i` sees key `j`; within its own sequence if several are packed.
fn distance(mask: &Mask<'_>, dims: &Dims, batch: usize, i: usize, j: usize) -> Option<isize> {
    let (i, j, present) = match mask.keys {
        Keys::All => (i, j, true),
        Keys::Lengths(lengths) => (i, j, j < lengths[batch]),
        Keys::Padding(ignored) => (i, j, !ignored[batch * dims.keys + j]),
        Keys::Packed { queries, keys } => {
            let own = (1..queries.len()).find(|&s| i < queries[s])? - 1;
            (i - queries[own], j.saturating_sub(keys[own]), (keys[own]..keys[own + 1]).contains(&j))
        }
    };
    let delta = j as isize - (i as isize + mask.offset);
    let seen = match mask.order {
        Order::Bidirectional => present,
        Order::Causal => present && delta <= 0,
    };
    seen.then_some(delta)
}

/// `factor · e^exponent`: one feature's part of a weight.
struct Term {
    factor: f64,
    exponent: f64,
}

/// `φ(q)·φ(k)` and `φ(q)·ρ(r_δ)`, feature by feature.
fn terms(
    attention: &KernelizedAttention,
    call: &Call<'_, f64>,
    head: usize,
    q: &[f64],
    k: &[f64],
    delta: isize,
) -> Vec<Term> {
    let phi = |x: f64| match attention.feature_map {
        FeatureMap::Exp => Term { factor: 1.0, exponent: x },
        map => Term { factor: map.apply(x), exponent: 0.0 },
    };
    let times = |a: Term, b: Term| Term { factor: a.factor * b.factor, exponent: a.exponent + b.exponent };
    let mut terms = Vec::new();
    if let Score::Content | Score::Combined(_) = attention.score {
        terms.extend(q.iter().zip(k).map(|(&q, &k)| times(phi(q), phi(k))));
    }
    if let Score::Relative(shaw) | Score::Combined(shaw) = attention.score {
        let r = shaw::reference::row(&shaw, call.parameters[0], head, call.dims.head_dim, delta);
        let rho = |x: f64| match shaw.map {
            RelativeMap::Same => phi(x),
            RelativeMap::Identity => Term { factor: x, exponent: 0.0 },
        };
        terms.extend(q.iter().zip(r).map(|(&q, &r)| times(phi(q), rho(r))));
    }
    terms
}
