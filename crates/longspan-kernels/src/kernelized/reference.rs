//! The definition in `f64`, O(queries · keys): what every fast path is tested against. Never optimised.

use super::{KernelizedAttention, Score};
use crate::call::{Call, Reference, Sequence, check_reference, distance};
use crate::error::Error;
use crate::feature_map::reference::{Divisor, Feature, Map, Seen, Term, quotient};
use crate::feature_map::rows::Side;
use crate::fourier::{self, reference::Place};
use crate::shaw::{self, RelativeMap};

/// `out_i = Σ_j w_ij v_j / Σ_j w_ij` over the keys `j` that row `i` sees, with `w_ij = γ^{−δ} e^{g_{j+1} + … + g_i} Σ_f Σ_terms`.
pub(crate) fn reference(attention: &KernelizedAttention, call: &Call<'_, f64>) -> Result<Reference, Error> {
    check_reference(attention, call)?;
    let dims = &call.dims;
    let own = attention.feature_map.parameters(dims).len();
    let (parameters, log_decay) = attention.split_gate(call.parameters);
    let map = Map::new(attention.feature_map, dims, &parameters[parameters.len() - own..]);
    let keys = map.keys(call);
    let divisor = match (attention.normalizes(), attention.wants_positive()) {
        (false, _) => Divisor::One,
        (true, false) => Divisor::Denominator,
        (true, true) => Divisor::PositiveDenominator,
    };
    let sequences = call.mask.sequences(dims);
    // Tokens between the one after the last key and the row: all weights fall over them alike.
    let beyond = |batch: usize, i: usize| {
        let of_row = |s: &&Sequence<'_>| s.batch == batch && (s.query_start..s.query_start + s.queries).contains(&i);
        let sequence = sequences.iter().find(of_row).filter(|_| attention.normalizes());
        sequence.map_or(0, |s| ((i - s.query_start) as isize + call.mask.offset - s.keys as isize).max(0))
    };
    Ok(Reference::of_rows(dims, |[batch, head, i]| {
        let beyond = beyond(batch, i);
        let kv_head = head / dims.group();
        let gamma = attention.decay.as_ref().map_or(1.0, |decay| decay[kv_head]);
        let q = map.row(Side::Query(head), call.q.rows(batch, head).row(i, dims.head_dim));
        let seen = |j: usize| {
            let delta = distance(call, [batch, i, j])?;
            let k = &keys[(batch * dims.kv_heads + kv_head) * dims.keys + j];
            let terms = terms(attention, call, &map, &Place { batch, head, i, j, delta }, &q, k);
            let value = call.v.rows(batch, kv_head).row(j, dims.value_dim);
            // The gates of the tokens after the key, up to the row's own; ignored ones see nothing of themselves.
            let gates = log_decay.map_or(0.0, |log_decay| {
                let log_decay = &log_decay[(batch * dims.kv_heads + kv_head) * dims.keys..];
                (j + 1..=i).filter(|&t| distance(call, [batch, t, t]).is_some()).map(|t| log_decay[t]).sum()
            });
            Some(Seen { value, scale: gamma.powf((-delta - beyond) as f64) * gates.exp(), terms })
        };
        quotient(&(0..dims.keys).filter_map(seen).collect::<Vec<_>>(), dims.value_dim, divisor)
    }))
}

/// `φ(q)·φ(k)` and `φ(q)·ρ(r_δ)`, feature by feature.
fn terms(
    attention: &KernelizedAttention,
    call: &Call<'_, f64>,
    map: &Map<'_>,
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
            RelativeMap::Same => map.row(Side::Key(head / call.dims.group()), r),
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
    use crate::call::{Dims, Keys, Mask};
    use crate::feature_map::FeatureMap;
    use crate::shaw::Shaw;

    /// One head of width 1 over `q` and `k`, with values 10, 20, 30, …
    fn rows(attention: &KernelizedAttention, q: &[f64], k: &[f64], table: &[f64], mask: Mask<'_>) -> Reference {
        let dims = Dims { queries: q.len(), keys: k.len(), ..Dims::square(1, 1, 0, 1) };
        let v: Vec<f64> = k.iter().zip(1..).map(|(k, n)| if k.is_nan() { *k } else { 10.0 * f64::from(n) }).collect();
        let parameters: &[&[f64]] = if table.is_empty() { &[] } else { &[table] };
        let call = Call::row_major(dims, [q, k, &v]).with_parameters(parameters).with_mask(mask);
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
