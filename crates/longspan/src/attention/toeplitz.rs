//! Toeplitz relative positions (Luo et al. 2021): kernelized attention whose weights are multiplied by `e^{b_δ}`, a
//! learned bias for every distance `δ = j − i`.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan_kernels as kernels;
use longspan_kernels::{Algorithm, Bias, FeatureMap, Mechanism, Toeplitz};
use serde::{Deserialize, Serialize};

use super::feature_map::LearnedMap;
use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, by_name};
use crate::backend::feature_map::{Side, lift};
use crate::backend::pairs::Pairs;
use crate::backend::tensor::{divide, features, largest, narrow_float, repeat_heads, widen, with_ones};
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
        std::iter::once(self.bias.val().reshape([-1])).chain(map).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let Toeplitz { feature_map, bias, normalize, .. } = *self.toeplitz;
        let dtype = q.dtype();
        let [_, heads, queries, _] = q.dims();
        let value_dim = v.dims()[3];
        let pairs = Pairs::new(&q, k.dims()[2], mask);
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
        let table = widen(self.bias.val());
        let chunks = (0..queries).step_by(Pairs::ROWS).map(|first| {
            let rows = Pairs::ROWS.min(queries - first);
            let entries = (first..first + rows).flat_map(|i| {
                let query = i as isize + mask.offset;
                // The kernel's check has passed, so a pair without an entry is one that the mask hides.
                (0..pairs.keys()).map(move |j| bias.between(query, j as isize).unwrap_or(0) as i64)
            });
            let entries: Vec<i64> = entries.collect();
            let entries = Tensor::<1, Int>::from_data(TensorData::new(entries, [rows * pairs.keys()]), &q.device());
            let mut exponents = table.clone().select(1, entries).reshape([1, heads, rows, pairs.keys()]);
            if normalize {
                // Relative to the largest exponent among the keys that the row sees.
                let seen = pairs.hidden_as(exponents.clone().detach(), first, f32::NEG_INFINITY);
                exponents = exponents - largest_of_row(seen);
            }
            // Hidden pairs get exponent 0: an infinite `exp` times a weight of 0 would make the gradient NaN.
            let exponents = pairs.hidden_as(exponents, first, 0.0);
            let scores = q.clone().narrow(2, first, rows).matmul(k.clone());
            let weights = pairs.hidden_as(scores * exponents.exp(), first, 0.0);
            weights.matmul(values.clone())
        });
        let sums = Tensor::cat(chunks.collect(), 2);
        narrow_float(divide(sums, value_dim, normalize), dtype)
    }
}

/// The largest entry of each row; 0 where there is none.
fn largest_of_row(x: Tensor<4>) -> Tensor<4> {
    let top = x.max_dim(3);
    let none = top.clone().equal_elem(f32::NEG_INFINITY);
    top.mask_fill(none, 0.0)
}
