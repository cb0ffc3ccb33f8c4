//! Kernelized attention: `out_i = Σ_j w_ij v_j / Σ_j w_ij` with `w_ij = φ(q_i)·φ(k_j)`, and with relative positions
//! `w_ij = φ(q_i)·(φ(k_j) + ρ(r_{clip(j−i, −R, R)+R}))`. Linear in the number of tokens.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels as kernels;
use longspan_kernels::{Algorithm, FeatureMap, Mechanism, RelativeMap, Score, Shaw};
use serde::{Deserialize, Serialize};

use super::feature_map::LearnedMap;
use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, by_name, gates};
use crate::backend::tensor::flattened;
use crate::backend::{AnyKernel, Layer, Learned, Running, Sums, Total, tensor};
use crate::error::{Result, config, fits};

/// Kernelized attention without positions.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelizedOptions {
    /// The weight of a pair.
    pub kernel: KernelConfig,
}

/// Kernelized attention with relative positions.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShawOptions {
    /// The table of relative positions.
    pub relative: RelativeConfig,
    /// The weight of a pair.
    pub kernel: KernelConfig,
}

impl ShawOptions {
    /// Tokens this far apart or more share a row of the table.
    ///
    /// ```
    /// use longspan::attention::{AttentionConfig, ShawOptions};
    ///
    /// let attention: AttentionConfig = ShawOptions::default().with_radius(4).into();
    /// ```
    #[must_use]
    pub fn with_radius(mut self, radius: usize) -> Self {
        self.relative.radius = radius;
        self
    }
}

impl Options for KernelizedOptions {
    type Module = KernelizedAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<KernelizedAttention> {
        module(heads, &self.kernel, None, device)
    }
}

impl Options for ShawOptions {
    type Module = KernelizedAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<KernelizedAttention> {
        module(heads, &self.kernel, Some(&self.relative), device)
    }
}

/// The weight of a pair of tokens by their contents, and how it is computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelConfig {
    /// `φ`, by its name: `elu+1` (default), `relu`, `softplus`, `exp`, `identity`, `prf`, `nprf`, `dpfp`, `taylor2`,
    /// `hedgehog`, some with options: `prf:128:seed=7` has 128 features, drawn from the seed 7. [`FeatureMap`] defines
    /// them all.
    #[serde(with = "by_name")]
    pub feature_map: FeatureMap,
    /// Whether to divide by the sum of the weights; yes by default.
    pub normalize: bool,
    /// `γ` in (0, 1], one for each key/value head: a key's weight is multiplied by `γ` for every token after it. Causal
    /// masks only; none by default.
    pub decay: Option<Vec<f64>>,
    /// Whether each token brings a decay of its own, a number a key/value head, by which the weights of all earlier keys fall: gates of
    /// Mamba-2, with the map, the normaliser and the positions. Keys are then one number wider. Causal masks without offset, and no
    /// `decay`; no by default.
    pub gates: bool,
    /// How the CPU kernels compute it: `auto` (default), `naive` or `chunked`.
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
            gates: false,
            algorithm: defaults.algorithm,
        }
    }
}

impl KernelConfig {
    pub(super) fn check_decay(&self, heads: Heads) -> Result<()> {
        let alone = !self.gates || self.decay.is_none() && self.algorithm != Algorithm::Naive;
        config(alone, "KernelConfig", "gates", "false beside a decay or the naive algorithm", true)?;
        let Some(decay) = &self.decay else { return Ok(()) };
        let holds = decay.len() == heads.kv_heads && decay.iter().all(|g| *g > 0.0 && *g <= 1.0);
        let expected = || format!("{} numbers in (0, 1], one for each key/value head", heads.kv_heads);
        config(holds, "KernelConfig", "decay", expected(), format_args!("{decay:?}"))
    }
}

/// A table of relative positions (Shaw et al. 2018).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RelativeConfig {
    /// `R`: tokens `R` or more apart share a row; 16 by default.
    pub radius: usize,
    /// Whether the weight has the content term `φ(q)·φ(k)` as well; yes by default.
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

/// Kernelized attention over heads: `out_i = Σ_j w_ij v_j / Σ_j w_ij` with `w_ij = φ(q_i)·φ(k_j)`, or, with a learned
/// table `r` of relative positions, `w_ij = φ(q_i)·(φ(k_j) + φ(r_{clip(j−i, −R, R)+R}))`. Under a decay `w_ij` is
/// multiplied by `γ^{i−j}`.
#[derive(Module, Debug)]
pub struct KernelizedAttention {
    /// Shaw's table `[heads, 2R+1, head_dim]`, or `[1, 2R+1, head_dim]` if shared; a raw one has as many numbers a row
    /// as the map has features. Rows start at random with a standard deviation of 0.5.
    pub relative: Option<Param<Tensor<3>>>,
    /// What the feature map learns, if anything.
    pub map: Option<LearnedMap>,
    /// Of the gates, if there are any, `[kv_heads]`: `log_decay = −e^rate · softplus(x + bias)`, with `x` the last number of a key.
    pub rate: Option<Param<Tensor<1>>>,
    /// Of the gates, `[kv_heads, 1]`. Both begin as those of [`GatedAttention`](super::GatedAttention).
    pub bias: Option<Param<Tensor<2>>>,
    #[module(skip)]
    options: Arc<kernels::KernelizedAttention>,
    #[module(skip)]
    heads: Heads,
}

fn module(
    heads: Heads,
    kernel: &KernelConfig,
    relative: Option<&RelativeConfig>,
    device: &Device,
) -> Result<KernelizedAttention> {
    kernel.check_decay(heads)?;
    let score = match relative {
        None => Score::Content,
        Some(relative) => {
            let map = if relative.raw { RelativeMap::Identity } else { RelativeMap::Same };
            let shaw = Shaw { radius: relative.radius, map, shared: relative.shared };
            if relative.content { Score::Combined(shaw) } else { Score::Relative(shaw) }
        }
    };
    let options = Arc::new(kernels::KernelizedAttention {
        feature_map: kernel.feature_map,
        score,
        decay: kernel.decay.clone(),
        gate: kernel.gates,
        normalize: kernel.normalize,
        algorithm: kernel.algorithm,
    });
    let dims = heads.dims(1, 1, 1);
    options.check_feature_map(&dims)?;
    let most = options.parameters(&dims).iter().map(kernels::Parameter::len).max().unwrap_or(0);
    fits("AttentionConfig", "radius", &[most])?;
    let relative = score.shaw().map(|shaw| {
        let tables = if shaw.shared { 1 } else { heads.heads };
        let row = shaw.row_len(options.feature_map, heads.head_dim);
        Initializer::Normal { mean: 0.0, std: 0.5 }.init([tables, shaw.rows(), row], device)
    });
    let map = LearnedMap::new(options.feature_map, heads, device);
    let (rate, bias) = kernel.gates.then(|| gates::fresh(heads.kv_heads, 1, device)).unzip();
    Ok(KernelizedAttention { relative, map, rate, bias, options, heads })
}

attention_module!(KernelizedAttention);

impl KernelizedAttention {
    /// The options of the kernel behind it.
    pub fn options(&self) -> &kernels::KernelizedAttention {
        &self.options
    }

    /// With these options and this table, which a gradient follows.
    #[cfg(test)]
    pub(crate) fn given(options: &kernels::KernelizedAttention, table: Option<Tensor<3>>, heads: Heads) -> Self {
        let relative = table.map(Param::from_tensor);
        Self { relative, map: None, rate: None, bias: None, options: Arc::new(options.clone()), heads }
    }

    fn table(&self) -> Option<Tensor<3>> {
        self.relative.as_ref().map(|table| table.val())
    }

    /// Tokens after those of a state, in chunks where they bring gates.
    fn advance_under(&self, qkv: [Tensor<4>; 3], mask: &AttentionMask, state: &mut Running) -> Tensor<4> {
        let (table, learned) = (self.table(), self.learned());
        gates::advance((&self.rate, &self.bias), qkv, mask, state, |qkv, mask, state| {
            state.advance(&self.options, qkv, mask, (table.clone(), &learned), tensor::CHUNK, |_, q, k| (q, k))
        })
    }
}

impl Layer for KernelizedAttention {
    fn name(&self) -> &'static str {
        self.options.name()
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        gates::kernel(&self.options)
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let table = self.table().into_iter().map(flattened);
        let others = table.chain(self.map.iter().flat_map(LearnedMap::parameters));
        others.chain(gates::parameters(&self.rate, &self.bias)).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        if self.options.gate {
            let mut state = self.empty(&q, v.dims()[3]);
            return self.advance_under([q, k, v], mask, &mut state);
        }
        tensor::attend(&self.options, q, k, v, (self.table(), &self.learned()), mask, tensor::CHUNK)
    }

    fn sums(&self) -> Option<&dyn Sums> {
        Some(self)
    }

    fn learned(&self) -> Learned {
        self.map.as_ref().map(LearnedMap::tensors)
    }

    fn total(&self, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Option<Total> {
        let total = || Total::new(self.options.clone(), &self.learned(), self.heads.heads, k, v, mask);
        self.relative.is_none().then(total)
    }
}

impl Sums for KernelizedAttention {
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running {
        Running::empty(&self.options, like, value_dim, None)
    }

    fn advance(&self, qkv: [Tensor<4>; 3], state: &mut Running) -> Tensor<4> {
        self.advance_under(qkv, &AttentionMask::causal(), state)
    }
}
