//! Feature maps in tensor operations.
//!
//! A map of whole rows takes two steps: [`lift`] gives exponents or features, and [`elementwise`] names the map that
//! each number still has to go through. So all other code handles elementwise maps only, and exponents in one place.

use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Tensor, TensorData};
use longspan_kernels::{FeatureMap, HedgehogNorm};

use super::tensor::{repeat_heads, widen};

/// The learned matrices of a map: of queries, `[heads, width, head_dim]`, and of keys, `[kv_heads, width, head_dim]`.
pub(crate) type Learned = Option<[Tensor<3>; 2]>;

/// Whose rows are mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side {
    Queries,
    Keys,
}

/// The elementwise map that completes `map` after [`lift`].
pub(crate) fn elementwise(map: FeatureMap) -> FeatureMap {
    match map {
        map if map.is_elementwise() => map,
        map if map.is_exponential() => FeatureMap::Exp,
        _ => FeatureMap::Identity,
    }
}

/// The first step of `map`: `[batch, heads, tokens, head_dim]` → `[batch, heads, tokens, m]`, for [`elementwise`].
pub(crate) fn lift(map: FeatureMap, learned: &Learned, side: Side, x: Tensor<4>) -> Tensor<4> {
    let [_, heads, _, width] = x.dims();
    let projected = |x: Tensor<4>| {
        let rows = map.projection(width).unwrap_or_default();
        let rows = TensorData::new(rows.to_vec(), [1, 1, map.features(width), width]);
        let rows = Tensor::<4>::from_data(rows, (&x.device(), x.dtype()));
        x.matmul(rows.swap_dims(2, 3))
    };
    let scale = (width as f64).sqrt().sqrt().recip();
    match map {
        FeatureMap::Prf(_) => {
            let half = x.clone().powi_scalar(2).sum_dim(3) * (scale * scale / 2.0);
            projected(x) - (half + (map.features(width) as f64).ln() / 2.0)
        }
        FeatureMap::Nprf(_) => {
            // A row of zeros has no direction: it stays zero, with gradient 0. The squares of others are at least 1 together.
            let largest = x.clone().detach().abs().max_dim(3);
            let none = largest.clone().equal_elem(0.0);
            let shape = x.shape();
            let x = x / largest.mask_fill(none.clone(), 1.0);
            let square = x.clone().powi_scalar(2).sum_dim(3).mask_fill(none.clone(), 1.0);
            let direction = (x / square.sqrt()).mask_fill(none.expand(shape), 0.0);
            (projected(direction) - 0.5).exp() * (map.features(width) as f64).sqrt().recip()
        }
        FeatureMap::Dpfp { order } => {
            let parts = Tensor::cat(vec![relu(x.clone()), relu(-x)], 3);
            let products = (1..=order).map(|n| match n % (2 * width) {
                0 => parts.clone() * parts.clone(),
                n => {
                    let (end, start) = (parts.clone().narrow(3, n, 2 * width - n), parts.clone().narrow(3, 0, n));
                    parts.clone() * Tensor::cat(vec![end, start], 3)
                }
            });
            Tensor::cat(products.collect(), 3)
        }
        FeatureMap::Taylor2 => {
            let x = x * scale;
            let mut list = vec![x.clone().narrow(3, 0, 1).ones_like(), x.clone()];
            for i in 0..width {
                let own = x.clone().narrow(3, i, 1);
                list.push(own.clone() * own.clone() * std::f64::consts::FRAC_1_SQRT_2);
                if i + 1 < width {
                    list.push(own * x.clone().narrow(3, i + 1, width - i - 1));
                }
            }
            Tensor::cat(list, 3)
        }
        FeatureMap::Hedgehog { norm, .. } => {
            let Some([queries, keys]) = learned else { return x };
            let matrix = match side {
                Side::Queries => queries,
                Side::Keys => keys,
            };
            let matrix = repeat_heads(widen(matrix.clone()).unsqueeze_dim::<4>(0), heads);
            let exponents = x.matmul(matrix.swap_dims(2, 3));
            let exponents = Tensor::cat(vec![exponents.clone(), -exponents], 3);
            if norm == HedgehogNorm::Softmax { softmax(exponents, 3) } else { exponents }
        }
        _ => x,
    }
}
