//! The definition of a row's features in `f64`, each as `factor · e^exponent`. Never optimised.

use std::sync::Arc;

use super::rows::Side;
use super::{FeatureMap, HedgehogNorm, scale};
use crate::call::{Call, Dims};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Feature {
    pub factor: f64,
    pub exponent: f64,
}

/// `φ(x)` of rows of one width, with what it takes beside them.
pub(crate) struct Map<'a> {
    map: FeatureMap,
    dims: &'a Dims,
    /// The random rows.
    projection: Arc<Vec<f64>>,
    /// The map's own parameters.
    parameters: &'a [&'a [f64]],
}

impl<'a> Map<'a> {
    pub fn new(map: FeatureMap, dims: &'a Dims, parameters: &'a [&'a [f64]]) -> Self {
        Self { map, dims, projection: map.projection(dims.head_dim).unwrap_or_default(), parameters }
    }

    /// Those of every key of a call, `[batch, kv_heads, keys]`.
    pub fn keys(&self, call: &Call<'_, f64>) -> Vec<Vec<Feature>> {
        let dims = self.dims;
        let heads = (0..dims.batch).flat_map(|batch| (0..dims.kv_heads).map(move |head| (batch, head)));
        let keys = heads.flat_map(|(batch, head)| (0..dims.keys).map(move |j| (batch, head, j)));
        keys.map(|(batch, head, j)| self.row(Side::Key(head), call.k.rows(batch, head).row(j, dims.head_dim))).collect()
    }

    /// The features of one row.
    pub fn row(&self, side: Side, x: &[f64]) -> Vec<Feature> {
        let d = x.len();
        let plain = |factor| Feature { factor, exponent: 0.0 };
        let exponential = |exponent| Feature { factor: 1.0, exponent };
        let square: f64 = x.iter().map(|x| x * x).sum();
        match self.map {
            FeatureMap::Exp => x.iter().map(|&x| exponential(x)).collect(),
            FeatureMap::Prf(_) => {
                let features = self.map.features(d) as f64;
                let half = scale(d) * scale(d) * square / 2.0 + features.ln() / 2.0;
                products(&self.projection, x).map(|product| exponential(product - half)).collect()
            }
            FeatureMap::Nprf(_) => {
                let length = if square == 0.0 { 1.0 } else { square.sqrt() };
                let factor = (self.map.features(d) as f64).sqrt().recip();
                products(&self.projection, x).map(|product| plain(factor * (product / length - 0.5).exp())).collect()
            }
            FeatureMap::Dpfp { order } => {
                let parts: Vec<f64> = x.iter().copied().chain(x.iter().map(|x| -x)).map(|x| x.max(0.0)).collect();
                let pairs = (1..=order).flat_map(|n| (0..2 * d).map(move |i| (i, (i + n) % (2 * d))));
                pairs.map(|(i, j)| plain(parts[i] * parts[j])).collect()
            }
            FeatureMap::Taylor2 => {
                let x: Vec<f64> = x.iter().map(|x| x * scale(d)).collect();
                let mut all = vec![plain(1.0)];
                all.extend(x.iter().map(|&x| plain(x)));
                for i in 0..d {
                    all.push(plain(x[i] * x[i] / std::f64::consts::SQRT_2));
                    // x_i x_j / √2 stands twice in x⊗x/√2.
                    all.extend(x[i + 1..].iter().map(|y| plain(x[i] * y)));
                }
                all
            }
            FeatureMap::Hedgehog { norm, .. } => {
                let (head, heads, parameter) = match side {
                    Side::Query(head) => (head, self.dims.heads, self.parameters[0]),
                    Side::Key(head) => (head, self.dims.kv_heads, self.parameters[1]),
                };
                let len = parameter.len() / heads;
                let exponents: Vec<f64> = products(&parameter[head * len..][..len], x).collect();
                let exponents: Vec<f64> = exponents.iter().copied().chain(exponents.iter().map(|e| -e)).collect();
                match norm {
                    HedgehogNorm::Exp => exponents.into_iter().map(exponential).collect(),
                    HedgehogNorm::Softmax => {
                        let top = exponents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let sum: f64 = exponents.iter().map(|e| (e - top).exp()).sum();
                        exponents.into_iter().map(|e| plain((e - top).exp() / sum)).collect()
                    }
                }
            }
            map => x.iter().map(|&x| plain(map.apply(x))).collect(),
        }
    }
}

/// `w·x` for every row `w`.
fn products<'x>(rows: &'x [f64], x: &'x [f64]) -> impl Iterator<Item = f64> + 'x {
    rows.chunks_exact(x.len().max(1)).map(move |w| w.iter().zip(x).map(|(w, x)| w * x).sum())
}

/// `factor · e^exponent`: one feature's part of a weight, and `share · e^exponent`, its part of the denominator.
pub(crate) struct Term {
    pub factor: f64,
    pub share: f64,
    pub exponent: f64,
}

/// A key that a row sees: its value, and its weight as `scale · Σ terms`.
pub(crate) struct Seen<'a> {
    pub value: &'a [f64],
    pub scale: f64,
    pub terms: Vec<Term>,
}

/// What a row's weighed sum of values is divided by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Divisor {
    One,
    /// The denominator.
    Denominator,
    /// The same where it is positive; else the row gives 0.
    PositiveDenominator,
}

/// One row of the output and its denominator.
pub(crate) fn quotient(seen: &[Seen<'_>], value_dim: usize, divisor: Divisor) -> (Vec<f64>, f64) {
    // Exponentials overflow where the quotient does not: exponents count from the largest one of the row.
    let largest = seen.iter().flat_map(|key| &key.terms).map(|t| t.exponent).fold(f64::NEG_INFINITY, f64::max);
    let shift = if largest.is_finite() { largest } else { 0.0 };

    let mut numerator = vec![0.0; value_dim];
    let mut denominator = 0.0;
    for Seen { value, scale, terms } in seen {
        let sum = |part: fn(&Term) -> f64| -> f64 {
            scale * terms.iter().map(|t| part(t) * (t.exponent - shift).exp()).sum::<f64>()
        };
        let weight = sum(|term| term.factor);
        numerator.iter_mut().zip(*value).for_each(|(n, value)| *n += weight * value);
        denominator += sum(|term| term.share);
    }

    // An exact 0 stays 0 however large the shift.
    let unshift = |x: f64| if x == 0.0 { 0.0 } else { x * shift.exp() };
    if divisor == Divisor::One {
        return (numerator.into_iter().map(unshift).collect(), 1.0);
    }
    // Not `> 0`: a NaN that the row sees must come out, and signed features may have a negative denominator.
    let nothing = denominator == 0.0 || (divisor == Divisor::PositiveDenominator && denominator < 0.0);
    let out = numerator.into_iter().map(|n| if nothing { 0.0 } else { n / denominator }).collect();
    (out, unshift(denominator))
}
