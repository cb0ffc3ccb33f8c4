//! What distance does to the product of two features, by the definition.

use super::{Fourier, FourierNormalizer, Tensors, Wave};
use crate::call::Dims;

/// One product `q̄_x k̄_y`: the features, what multiplies them in the weight, and what in the denominator.
pub(crate) struct Product {
    pub query: usize,
    pub key: usize,
    pub weight: f64,
    pub share: f64,
}

/// Where a query and a key are.
pub(crate) struct Place {
    pub batch: usize,
    pub head: usize,
    pub i: usize,
    pub j: usize,
    /// `δ = j − (i + o)`, for counted positions.
    pub delta: isize,
}

/// `S_ij` as products of features.
pub(crate) fn products(
    fourier: &Fourier,
    tensors: &Tensors<&[f64]>,
    dims: &Dims,
    features: usize,
    place: &Place,
) -> Vec<Product> {
    let axes = fourier.positions.axes();
    let angles = fourier.angles(features);
    let kv_head = place.head / dims.group();
    let between: Vec<f64> = match tensors.positions {
        None => vec![-place.delta as f64],
        Some((queries, keys)) => {
            let query = &queries[(place.batch * dims.queries + place.i) * axes..][..axes];
            let key = &keys[(place.batch * dims.keys + place.j) * axes..][..axes];
            query.iter().zip(key).map(|(query, key)| query - key).collect()
        }
    };
    let a = tensors.a.unwrap_or(&[]);
    let angle = |k: usize| -> f64 {
        let rates = &a[(kv_head * angles + k) * axes..][..axes];
        rates.iter().zip(&between).map(|(rate, step)| rate * step).sum()
    };
    let of = |tensor: Option<&[f64]>, k: usize| tensor.map(|tensor| tensor[place.head * features + k]);
    let unrotated = fourier.normalizer == FourierNormalizer::Unrotated;
    let mut list = Vec::new();
    match fourier.wave {
        Wave::Each => {
            for k in 0..features {
                let c = of(tensors.c, k).unwrap_or(1.0);
                let beta = match fourier.normalizer {
                    FourierNormalizer::Literal | FourierNormalizer::Unrotated => 0.0,
                    FourierNormalizer::OnePlus => 1.0,
                    FourierNormalizer::Dominant => {
                        c.abs() + crate::FeatureMap::Softplus.apply(of(tensors.beta, k).unwrap_or(0.0))
                    }
                    FourierNormalizer::None => of(tensors.beta, k).unwrap_or(0.0),
                };
                let weight = beta + c * (of(tensors.b, k).unwrap_or(0.0) + angle(k)).cos();
                list.push(Product { query: k, key: k, weight, share: if unrotated { 1.0 } else { weight } });
            }
        }
        Wave::Pairs => {
            for k in 0..angles {
                // R(a·p_i) q̄ · R(a·p_j) k̄ for the pair (k, k + m/2).
                let (sin, cos) = angle(k).sin_cos();
                let other = k + angles;
                for (query, key, weight) in [(k, k, cos), (other, other, cos), (k, other, sin), (other, k, -sin)] {
                    let same = if query == key { 1.0 } else { 0.0 };
                    list.push(Product { query, key, weight, share: if unrotated { same } else { weight } });
                }
            }
        }
    }
    list
}
