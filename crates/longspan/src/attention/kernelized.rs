//! Kernelized attention: `out_i = Σ_j w_ij v_j / Σ_j w_ij` with `w_ij = φ(q_i)·φ(k_j)`, and with relative positions
//! `w_ij = φ(q_i)·(φ(k_j) + ρ(r_{clip(j−i, −R, R)+R}))`. Linear in the number of tokens.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels as kernels;
use longspan_kernels::{Algorithm, FeatureMap, RelativeMap, Score, Shaw};
use serde::{Deserialize, Serialize};

use super::AttentionMask;
use super::by_name;
use crate::backend::{self, KernelizedState, Total};
use crate::error::{Result, config};

/// The weight of a pair of tokens by their contents, and how it is computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelConfig {
    /// `φ`, by its name: `elu+1` (default), `relu`, `softplus`, `exp`, `identity`.
    #[serde(with = "by_name")]
    pub feature_map: FeatureMap,
    /// Whether to divide by the sum of the weights; yes by default.
    pub normalize: bool,
    /// Factors in (0, 1], one for each key/value head, by which a key's weight falls with every token. Causal masks only;
    /// none by default.
    pub decay: Option<Vec<f64>>,
    /// How the CPU kernels compute it: `auto` (default), `naive`, `cumsum`, `chunked`.
    #[serde(with = "by_name")]
    pub algorithm: Algorithm,
}

impl Default for KernelConfig {
    fn default() -> Self {
        let defaults = kernels::KernelizedAttention::default();
        Self {
            feature_map: defaults.feature_map,
            normalize: defaults.normalize,
            decay: None,
            algorithm: defaults.algorithm,
        }
    }
}

/// A table of relative positions (Shaw et al. 2018).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RelativeConfig {
    /// `R`: tokens `R` or more apart share a row; 16 by default.
    pub radius: usize,
    /// Whether contents take part in the weight as well; yes by default.
    pub content: bool,
    /// One table for all heads instead of one each; no by default.
    pub shared: bool,
    /// Use the table's rows as they are instead of through the feature map; no by default. Denominators may then have
    /// any sign.
    pub raw: bool,
}

impl Default for RelativeConfig {
    fn default() -> Self {
        Self { radius: 16, content: true, shared: false, raw: false }
    }
}

/// Makes a [`KernelizedAttention`].
#[derive(Config, Debug)]
pub struct KernelizedAttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Numbers in a query or key of one head.
    pub head_dim: usize,
    /// Key/value heads if fewer than query heads; `heads` is a multiple of them.
    pub kv_heads: Option<usize>,
    /// The weight of a pair by its contents.
    #[config(default = "KernelConfig::default()")]
    pub kernel: KernelConfig,
    /// Relative positions, if any.
    pub relative: Option<RelativeConfig>,
}

/// Kernelized attention over heads, with a learned table of relative positions if configured.
#[derive(Module, Debug)]
pub struct KernelizedAttention {
    /// Shaw's table `[heads, 2R+1, head_dim]`, or `[1, 2R+1, head_dim]` if shared.
    pub relative: Option<Param<Tensor<3>>>,
    #[module(skip)]
    options: kernels::KernelizedAttention,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KernelizedAttentionConfig {
    /// Makes the module. Table rows start at random with a standard deviation of 0.5.
    ///
    /// # Errors
    /// Heads that do not divide, a decay that is not in (0, 1] for each key/value head.
    pub fn init(&self, device: &Device) -> Result<KernelizedAttention> {
        const NAME: &str = "KernelizedAttentionConfig";
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        config(self.head_dim > 0, NAME, "head_dim", "at least 1", self.head_dim)?;
        config(
            kv_heads > 0 && self.heads > 0 && self.heads.is_multiple_of(kv_heads),
            NAME,
            "kv_heads",
            format_args!("a divisor of the {} heads", self.heads),
            kv_heads,
        )?;
        if let Some(decay) = &self.kernel.decay {
            config(
                decay.len() == kv_heads && decay.iter().all(|g| *g > 0.0 && *g <= 1.0),
                NAME,
                "decay",
                format_args!("{kv_heads} numbers in (0, 1], one for each key/value head"),
                format_args!("{decay:?}"),
            )?;
        }
        let score = match &self.relative {
            None => Score::Content,
            Some(relative) => {
                let map = if relative.raw { RelativeMap::Identity } else { RelativeMap::Same };
                let shaw = Shaw { radius: relative.radius, map, shared: relative.shared };
                if relative.content { Score::Combined(shaw) } else { Score::Relative(shaw) }
            }
        };
        let relative = score.shaw().map(|shaw| {
            let tables = if shaw.shared { 1 } else { self.heads };
            Initializer::Normal { mean: 0.0, std: 0.5 }.init([tables, shaw.rows(), self.head_dim], device)
        });
        let options = kernels::KernelizedAttention {
            feature_map: self.kernel.feature_map,
            score,
            decay: self.kernel.decay.clone(),
            normalize: self.kernel.normalize,
            algorithm: self.kernel.algorithm,
        };
        Ok(KernelizedAttention { relative, options, heads: self.heads, kv_heads, head_dim: self.head_dim })
    }
}

impl KernelizedAttention {
    /// Attention over whole sequences.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, queries, head_dim]`, before the feature map
    /// - `k`: `[batch, kv_heads, keys, head_dim]`, before the feature map
    /// - `v`: `[batch, kv_heads, keys, value_dim]`
    /// - output: `[batch, heads, queries, value_dim]`; a row that sees no key gives 0
    ///
    /// # Errors
    /// Shapes that do not fit each other, the module or the mask.
    pub fn forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Result<Tensor<4>> {
        backend::attend(&self.options, q, k, v, self.relative.as_ref().map(|table| table.val()), mask)
    }

    /// Takes one token into `state` and gives its output: the row that [`KernelizedAttention::forward`] gives under a causal
    /// mask.
    ///
    /// # Shapes
    /// As in [`KernelizedAttention::forward`], with one query and one key.
    ///
    /// # Errors
    /// Shapes that do not fit each other, the module or the state.
    pub fn step(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, state: &mut KernelizedState) -> Result<Tensor<4>> {
        backend::step(&self.options, q, k, v, self.relative.as_ref().map(|table| table.val()), state)
    }

    /// The sums that content-only queries need of `k` and `v`.
    pub(super) fn total(&self, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Total {
        Total::new(&self.options, self.heads, k, v, mask)
    }

    /// The options of the kernel behind it.
    pub fn options(&self) -> &kernels::KernelizedAttention {
        &self.options
    }
}
