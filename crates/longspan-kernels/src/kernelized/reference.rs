//! The definition in `f64`, O(queries · keys): what every fast path is tested against. Never optimised.

use super::{KernelizedAttention, Score};
use crate::call::{Call, Compute, Dims, Keys, Mask, Order, Reference};
use crate::error::{Error, expect};
use crate::feature_map::reference::{Feature, Map};
use crate::feature_map::rows::Side;
use crate::fourier::{self, reference::Place};
use crate::shaw::{self, RelativeMap};

/// `out_i = Σ_j w_ij v_j / Σ_j w_ij` over the keys `j` that row `i` sees.
pub(crate) fn reference(attention: &KernelizedAttention, call: &Call<'_, f64>) -> Result<Reference, Error> {
    Compute::check(attention, call)?;
    let expected = || "none: prepend the earlier tokens instead".into();
    let got = || "a state".into();
    expect(call.initial_state.is_none(), "kernelized_attention reference", "initial_state", expected, got)?;
    Ok(definition(attention, call))
}

/// The same for a call that makes sense.
fn definition(attention: &KernelizedAttention, call: &Call<'_, f64>) -> Reference {
    let dims = &call.dims;
    let mut out = Vec::new();
    let mut denominators = Vec::new();
    let features = Features::new(attention, call);
    for batch in 0..dims.batch {
        for head in 0..dims.heads {
            for i in 0..dims.queries {
                let (row, denominator) = row(attention, call, &features, (batch, head, i));
                out.extend(row);
                denominators.push(denominator);
            }
        }
    }
    Reference { out, denominators }
}

/// What rows become.
struct Features<'a> {
    map: Map<'a>,
    /// Those of every key, `[batch, kv_heads, keys]`.
    keys: Vec<Vec<Feature>>,
}

impl<'a> Features<'a> {
    fn new(attention: &KernelizedAttention, call: &'a Call<'_, f64>) -> Self {
        let dims = &call.dims;
        let own = attention.feature_map.parameters(dims).len();
        let map = Map::new(attention.feature_map, dims, &call.parameters[call.parameters.len() - own..]);
        let heads = (0..dims.batch).flat_map(|batch| (0..dims.kv_heads).map(move |head| (batch, head)));
        let keys = heads.flat_map(|(batch, head)| (0..dims.keys).map(move |j| (batch, head, j)));
        let row = |(batch, head, j)| map.row(Side::Key(head), call.k.rows(batch, head).row(j, dims.head_dim));
        let keys = keys.map(row).collect();
        Self { map, keys }
    }
}

/// One row of the output and its denominator.
fn row(
    attention: &KernelizedAttention,
    call: &Call<'_, f64>,
    features: &Features<'_>,
    (batch, head, i): (usize, usize, usize),
) -> (Vec<f64>, f64) {
    let dims = &call.dims;
    let kv_head = head / dims.group();
    let q = features.map.row(Side::Query(head), call.q.rows(batch, head).row(i, dims.head_dim));
    let k = |j: usize| &*features.keys[(batch * dims.kv_heads + kv_head) * dims.keys + j];
    let v = |j| call.v.rows(batch, kv_head).row(j, dims.value_dim);

    // The keys that this row sees, each as the terms of its weight `w_ij = γ^{−δ} Σ_f Σ_terms`.
    let seen: Vec<(usize, isize, Vec<Term>)> = (0..dims.keys)
        .filter_map(|j| Some((j, distance(&call.mask, dims, batch, i, j)?)))
        .map(|(j, delta)| (j, delta, terms(attention, call, features, &Place { batch, head, i, j, delta }, &q, k(j))))
        .collect();

    // e^{q+k} overflows where the quotient does not: exponents count from the largest one of the row.
    let largest = seen.iter().flat_map(|(.., terms)| terms).map(|t| t.exponent).fold(f64::NEG_INFINITY, f64::max);
    let shift = if largest.is_finite() { largest } else { 0.0 };

    let mut numerator = vec![0.0; dims.value_dim];
    let mut denominator = 0.0;
    for (j, delta, terms) in &seen {
        let gamma = attention.decay.as_ref().map_or(1.0, |decay| decay[kv_head]);
        let sum = |part: fn(&Term) -> f64| -> f64 {
            gamma.powf(-*delta as f64) * terms.iter().map(|t| part(t) * (t.exponent - shift).exp()).sum::<f64>()
        };
        let weight = sum(|term| term.factor);
        for (n, &value) in numerator.iter_mut().zip(v(*j)) {
            *n += weight * value;
        }
        denominator += sum(|term| term.share);
    }

    if !attention.normalizes() {
        return (numerator.into_iter().map(|n| unshift(n, shift)).collect(), 1.0);
    }
    // Not `> 0`: a NaN that the row sees must come out, and signed features may have a negative denominator.
    let nothing = denominator == 0.0 || (attention.wants_positive() && denominator < 0.0);
    let out = numerator.into_iter().map(|n| if nothing { 0.0 } else { n / denominator }).collect();
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

/// `factor · e^exponent`: one feature's part of a weight, and `share · e^exponent`, its part of the denominator.
struct Term {
    factor: f64,
    share: f64,
    exponent: f64,
}

/// `φ(q)·φ(k)` and `φ(q)·ρ(r_δ)`, feature by feature.
fn terms(
    attention: &KernelizedAttention,
    call: &Call<'_, f64>,
    features: &Features<'_>,
    place: &Place,
    q: &[Feature],
    k: &[Feature],
) -> Vec<Term> {
    let &Place { head, delta, .. } = place;
    let times = |a: &Feature, b: &Feature| {
        let factor = a.factor * b.factor;
        Term { factor, share: factor, exponent: a.exponent + b.exponent }
    };
    let mut terms = Vec::new();
    if let Score::Content | Score::Combined(_) = attention.score {
        terms.extend(q.iter().zip(k).map(|(q, k)| times(q, k)));
    }
    if let Score::Relative(shaw) | Score::Combined(shaw) = attention.score {
        let len = shaw.row_len(attention.feature_map, call.dims.head_dim);
        let r = shaw::reference::row(&shaw, call.parameters[0], head, len, delta);
        let r = match shaw.map {
            RelativeMap::Same => features.map.row(Side::Key(head / call.dims.group()), r),
            RelativeMap::Identity => r.iter().map(|&x| Feature { factor: x, exponent: 0.0 }).collect(),
        };
        terms.extend(q.iter().zip(&r).map(|(q, r)| times(q, r)));
    }
    if let Score::Fourier(fourier) = attention.score {
        let tensors = fourier.tensors(call.parameters);
        for product in fourier::reference::products(&fourier, &tensors, &call.dims, q.len(), place) {
            let term = times(&q[product.query], &k[product.key]);
            terms.push(Term { factor: term.factor * product.weight, share: term.share * product.share, ..term });
        }
    }
    terms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::View;
    use crate::feature_map::FeatureMap;
    use crate::shaw::Shaw;

    /// One head of width 1 over `q` and `k`, with values 10, 20, 30, …
    fn rows(attention: &KernelizedAttention, q: &[f64], k: &[f64], table: &[f64], mask: Mask<'_>) -> Reference {
        let dims = Dims { queries: q.len(), keys: k.len(), ..Dims::square(1, 1, 0, 1) };
        let v: Vec<f64> = k.iter().zip(1..).map(|(k, n)| if k.is_nan() { *k } else { 10.0 * f64::from(n) }).collect();
        let parameters: &[&[f64]] = if table.is_empty() { &[] } else { &[table] };
        let call = Call::new(
            dims,
            View::contiguous(q, dims.q()),
            View::contiguous(k, dims.k()),
            View::contiguous(&v, dims.v()),
        )
        .with_parameters(parameters)
        .with_mask(mask);
        reference(attention, &call).expect("a call that makes sense")
    }

    fn with(feature_map: FeatureMap, score: Score) -> KernelizedAttention {
        KernelizedAttention { feature_map, score, ..Default::default() }
    }

    #[test]
    fn weights_are_products_of_features() {
        let identity = with(FeatureMap::Identity, Score::Content);
        let all = rows(&identity, &[2.0], &[1.0, 3.0], &[], Mask::bidirectional());
        assert_eq!((all.out, all.denominators), (vec![(2.0 * 10.0 + 6.0 * 20.0) / 8.0], vec![8.0]));
        let causal = rows(&identity, &[2.0, 1.0], &[1.0, 3.0], &[], Mask::causal());
        assert_eq!((causal.out, causal.denominators), (vec![10.0, 17.5], vec![2.0, 4.0]));
        let decay = KernelizedAttention { decay: Some(vec![0.5]), ..identity };
        assert_eq!(rows(&decay, &[1.0, 1.0], &[2.0, 3.0], &[], Mask::causal()).out, [10.0, (10.0 + 60.0) / 4.0]);
    }

    #[test]
    fn rows_that_see_nothing_give_0_and_ignored_keys_are_not_read() {
        let elu = with(FeatureMap::EluPlusOne, Score::Content);
        let blind = rows(&elu, &[1.0, 1.0], &[0.5], &[], Mask::causal().with_offset(-1));
        assert_eq!((blind.out, blind.denominators), (vec![0.0, 10.0], vec![0.0, 3.0]));
        let mask = Mask::bidirectional().with_keys(Keys::Padding(&[false, true]));
        assert_eq!(rows(&elu, &[1.0], &[0.5, f64::NAN], &[], mask).out, [10.0]);
    }

    #[test]
    fn exponentials_beyond_the_range_of_doubles_keep_their_ratios() {
        let exp = with(FeatureMap::Exp, Score::Content);
        for level in [1e4, -1e4] {
            let out = rows(&exp, &[0.3], &[level, level + 2.0], &[], Mask::bidirectional()).out[0];
            let expected = (10.0 + 20.0 * 2.0f64.exp()) / (1.0 + 2.0f64.exp());
            assert!((out - expected).abs() < 1e-12, "{out} instead of {expected}");
        }
    }

    #[test]
    fn the_table_starts_at_the_past() {
        let shaw = with(FeatureMap::Identity, Score::Relative(Shaw::new(1)));
        // Before, here, after: weights 1, 10, 100 for the query at key 1.
        let mask = Mask::bidirectional().with_offset(1);
        let row = rows(&shaw, &[1.0], &[9.0, 9.0, 9.0], &[1.0, 10.0, 100.0], mask);
        assert_eq!((row.out, row.denominators), (vec![(10.0 + 200.0 + 3000.0) / 111.0], vec![111.0]));
    }
}
