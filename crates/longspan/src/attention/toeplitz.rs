//! Toeplitz relative positions (Luo et al. 2021): kernelized attention whose weights are multiplied by `e^{b_δ}`, a
//! learned bias for every distance `δ = j − i`.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels as kernels;
use longspan_kernels::{Algorithm, Bias, FeatureMap, Mechanism, Toeplitz};
use serde::{Deserialize, Serialize};

use super::feature_map::LearnedMap;
use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, by_name, index_tensor};
use crate::backend::feature_map::{Side, lift};
use crate::backend::pairs::{Pairs, hide};
use crate::backend::tensor::{divide, features, flattened, largest, narrow_float, repeat_heads, widen, with_ones};
use crate::backend::{AnyKernel, Layer};
use crate::error::{Result, config};

/// Which distances have a bias of their own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum BiasConfig {
    /// Those up to `radius` tokens to either side; farther ones share the bias at that end.
    Clipped {
        /// The farthest distance with a bias of its own.
        radius: usize,
    },
    /// Those below `reach` to either side; a call with farther ones is refused.
    Table {
        /// One more than the farthest distance.
        reach: usize,
    },
    /// The buckets of T5: exact for small distances, logarithmic up to `max_distance`.
    Buckets {
        /// Biases of each head.
        buckets: usize,
        /// All distances from here on share the last bucket.
        max_distance: usize,
        /// Whether keys after the query have buckets of their own (the second half); for decoders `false`.
        bidirectional: bool,
    },
    /// Displacements between the pixels of an image whose tokens come row after row.
    Grid {
        /// Rows of the image.
        height: usize,
        /// Columns of the image.
        width: usize,
    },
}

impl BiasConfig {
    /// The kernels' form of it, and the number of entries in one head's table.
    fn kernel(self) -> (Bias, usize) {
        match self {
            Self::Clipped { radius } => (Bias::clipped(radius), radius.saturating_mul(2).saturating_add(1)),
            Self::Table { reach } => (Bias::symmetric(reach), reach.saturating_mul(2).saturating_sub(1)),
            Self::Buckets { buckets, max_distance, bidirectional } => {
                (Bias::Buckets { buckets, max_distance, bidirectional }, buckets)
            }
            Self::Grid { height, width } => {
                let side = |n: usize| n.saturating_mul(2).saturating_sub(1);
                (Bias::Grid { height, width }, side(height).saturating_mul(side(width)))
            }
        }
    }
}

/// Kernelized attention with a learned bias for each distance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToeplitzOptions {
    /// Which distances have a bias of their own; those up to 64 by default.
    pub bias: BiasConfig,
    /// `φ`, by its name; `elu+1` by default.
    #[serde(with = "by_name")]
    pub feature_map: FeatureMap,
    /// Whether to divide by the sum of the weights; yes by default.
    pub normalize: bool,
    /// How the CPU kernels compute it: `auto` by default.
    #[serde(with = "by_name")]
    pub algorithm: Algorithm,
}

impl Default for ToeplitzOptions {
    fn default() -> Self {
        Self {
            bias: BiasConfig::Clipped { radius: 64 },
            feature_map: FeatureMap::default(),
            normalize: true,
            algorithm: Algorithm::Auto,
        }
    }
}

/// Toeplitz attention over heads: kernelized attention with the weights `e^{b_{j−i}} φ(q_i)·φ(k_j)`, and its learned
/// biases `b`.
#[derive(Module, Debug)]
pub struct ToeplitzAttention {
    /// The biases `[heads, entries]`, by distance from the farthest key before the query to the farthest after it, or
    /// by bucket, or by row and column of the displacement. They start close to 0: every distance alike.
    pub bias: Param<Tensor<2>>,
    /// What the feature map learns, if anything.
    pub map: Option<LearnedMap>,
    #[module(skip)]
    toeplitz: Arc<Toeplitz>,
    #[module(skip)]
    heads: Heads,
}

impl Options for ToeplitzOptions {
    type Module = ToeplitzAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<ToeplitzAttention> {
        let (bias, entries) = self.bias.kernel();
        config(
            (1..1 << 24).contains(&entries),
            "ToeplitzOptions",
            "bias",
            "between 1 and 2²⁴ entries a head",
            format_args!("{:?}", self.bias),
        )?;
        let toeplitz = Arc::new(Toeplitz {
            feature_map: self.feature_map,
            normalize: self.normalize,
            algorithm: self.algorithm,
            ..Toeplitz::new(bias)
        });
        toeplitz.check_feature_map(&heads.dims(1, 1, 1))?;
        let bias = Initializer::Normal { mean: 0.0, std: 0.02 }.init([heads.heads, entries], device);
        let map = LearnedMap::new(self.feature_map, heads, device);
        Ok(ToeplitzAttention { bias, map, toeplitz, heads })
    }
}

attention_module!(ToeplitzAttention);

impl ToeplitzAttention {
    /// The options of the kernel behind it.
    pub fn options(&self) -> &kernels::Toeplitz {
        &self.toeplitz
    }
}

impl Layer for ToeplitzAttention {
    fn name(&self) -> &'static str {
        self.toeplitz.name()
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        self.toeplitz.clone()
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let map = self.map.iter().flat_map(LearnedMap::parameters);
        std::iter::once(flattened(self.bias.val())).chain(map).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let Toeplitz { feature_map, bias, normalize, .. } = *self.toeplitz;
        let dtype = q.dtype();
        let ([_, heads, queries, _], [_, _, keys, value_dim]) = (q.dims(), v.dims());
        let pairs = Pairs::new(&q, keys, mask, None);
        let (mut q, k, v) = (widen(q), widen(repeat_heads(k, heads)), widen(repeat_heads(v, heads)));
        let (mut k, v) = (pairs.without_ignored(k), pairs.without_ignored(v));
        let learned = self.map.as_ref().map(LearnedMap::tensors);
        q = lift(feature_map, &learned, Side::Queries, q);
        k = lift(feature_map, &learned, Side::Keys, k);
        if feature_map.is_exponential() && normalize {
            // Any factor common to a row's weights cancels in the division.
            let top = q.clone().detach().max_dim(3);
            q = q - top;
            let top = largest(pairs.ignored_as(k.clone(), f32::NEG_INFINITY));
            k = k - top;
        }
        let (q, k) = (features(feature_map, q), features(feature_map, k).swap_dims(2, 3));
        let values = with_ones(v, None, normalize);
        // The bias is a function of the difference of two places. The kernel's check has passed, so a difference without an entry is one
        // that the mask hides.
        let entry = |query: isize, key: isize| bias.between(query, key).unwrap_or(0);
        let query = |i: usize| i as isize + mask.offset;
        let ints = |of: Vec<usize>| index_tensor(&of, &q.device());
        let table = widen(self.bias.val());
        let (by_difference, of_query, of_key): (_, Vec<usize>, Vec<usize>) = if let Bias::Grid { .. } = bias {
            let of_key = (0..keys).map(|j| entry(0, j as isize) - entry(0, 0));
            (table, (0..queries).map(|i| entry(query(i), 0)).collect(), of_key.collect())
        } else {
            let differences = (0..queries + keys - 1).map(|n| entry(query(queries - 1), n as isize)).collect();
            (table.select(1, ints(differences)), (0..queries).rev().collect(), (0..keys).collect())
        };
        let (of_query, of_key) = (ints(of_query), ints(of_key));
        let pieces = (0..queries).step_by(Pairs::ROWS).map(|first| {
            let rows = first..queries.min(first + Pairs::ROWS);
            let seen = pairs.seen(&rows);
            let [count, seen_count] = [rows.len(), seen.len()];
            let steps = of_query.clone().narrow(0, first, count).unsqueeze_dim::<2>(1)
                + of_key.clone().narrow(0, seen.start, seen_count).unsqueeze::<2>();
            let exponents = by_difference.clone().select(1, steps.reshape([count * seen_count]));
            let mut exponents = exponents.reshape([1, heads, count, seen_count]);
            let hidden = pairs.hidden(&rows, &seen);
            if normalize {
                // Relative to the largest exponent among the keys that the row sees.
                exponents = exponents.clone() - largest_of_row(hide(exponents.detach(), &hidden, f32::NEG_INFINITY));
            }
            // Hidden pairs get exponent 0: an infinite `exp` times a weight of 0 would make the gradient NaN.
            let exponents = hide(exponents, &hidden, 0.0);
            let k = k.clone().narrow(3, seen.start, seen_count);
            let scores = q.clone().narrow(2, first, count).matmul(k);
            let weights = hide(scores * exponents.exp(), &hidden, 0.0);
            weights.matmul(values.clone().narrow(2, seen.start, seen_count))
        });
        let sums = Tensor::cat(pieces.collect(), 2);
        narrow_float(divide(sums, value_dim, normalize), dtype)
    }
}

/// The largest entry of each row; 0 where there is none.
fn largest_of_row(x: Tensor<4>) -> Tensor<4> {
    let top = x.max_dim(3);
    let none = top.clone().equal_elem(f32::NEG_INFINITY);
    top.mask_fill(none, 0.0)
}
