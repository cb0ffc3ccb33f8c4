//! Attention mechanisms as modules.
//!
//! A mechanism takes queries, keys and values that are already split into heads, `[batch, heads, tokens, head_dim]`;
//! [`MultiHeadAttention`] adds the projections and runs any of them. [`AttentionConfig`] is how a model, a run folder or a
//! command line names one.

mod by_name;
mod kernelized;
mod mask;
mod multi_head;
mod softmax;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

pub use kernelized::{KernelConfig, KernelizedAttention, KernelizedAttentionConfig, RelativeConfig};
pub use mask::{AttentionMask, KeyMask};
pub use multi_head::{MultiHeadAttention, MultiHeadAttentionConfig};
pub use softmax::{SoftmaxAttention, SoftmaxAttentionConfig};

use crate::error::Result;

/// Names a mechanism and its options, without sizes: `{"mechanism": "shaw", "relative": {"radius": 8}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "mechanism", rename_all = "lowercase", deny_unknown_fields)]
pub enum AttentionConfig {
    /// Kernelized attention, blind to positions (Katharopoulos et al. 2020).
    Kernelized {
        /// The weight of a pair.
        #[serde(default)]
        kernel: KernelConfig,
    },
    /// Kernelized attention with Shaw's relative positions (the Linear Scalable Transformer).
    Shaw {
        /// The table of relative positions.
        #[serde(default)]
        relative: RelativeConfig,
        /// The weight of a pair.
        #[serde(default)]
        kernel: KernelConfig,
    },
    /// Scaled dot-product attention, blind to positions: the baseline, of quadratic cost.
    Softmax {},
}

impl Config for AttentionConfig {}

impl Default for AttentionConfig {
    /// [`AttentionConfig::shaw`].
    fn default() -> Self {
        Self::shaw()
    }
}

impl AttentionConfig {
    /// Kernelized attention with its default options.
    pub fn kernelized() -> Self {
        Self::Kernelized { kernel: KernelConfig::default() }
    }

    /// Kernelized attention with relative positions and its default options.
    pub fn shaw() -> Self {
        Self::Shaw { relative: RelativeConfig::default(), kernel: KernelConfig::default() }
    }

    /// Softmax attention.
    pub fn softmax() -> Self {
        Self::Softmax {}
    }

    /// The name of the mechanism in configurations and on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kernelized { .. } => "kernelized",
            Self::Shaw { .. } => "shaw",
            Self::Softmax {} => "softmax",
        }
    }

    /// Whether the mechanism itself sees the order of tokens under a bidirectional mask; where it does not, a model wants
    /// absolute positions.
    pub fn sees_order(&self) -> bool {
        matches!(self, Self::Shaw { .. })
    }

    /// The mechanism over `heads` query heads and `kv_heads` key/value heads of `head_dim` numbers.
    ///
    /// # Errors
    /// Options or sizes that no mechanism can be made from.
    pub fn init(&self, heads: usize, kv_heads: usize, head_dim: usize, device: &Device) -> Result<Attention> {
        let kernelized = |kernel: &KernelConfig, relative| {
            KernelizedAttentionConfig::new(heads, head_dim)
                .with_kv_heads(Some(kv_heads))
                .with_kernel(kernel.clone())
                .with_relative(relative)
                .init(device)
                .map(Attention::Kernelized)
        };
        match self {
            Self::Kernelized { kernel } => kernelized(kernel, None),
            Self::Shaw { relative, kernel } => kernelized(kernel, Some(relative.clone())),
            Self::Softmax {} => SoftmaxAttentionConfig::new(heads, head_dim)
                .with_kv_heads(Some(kv_heads))
                .init()
                .map(Attention::Softmax),
        }
    }
}

/// Any mechanism.
#[derive(Module, Debug)]
pub enum Attention {
    /// Kernelized, with or without relative positions.
    Kernelized(KernelizedAttention),
    /// Scaled dot products.
    Softmax(SoftmaxAttention),
}

impl Attention {
    /// Attention over whole sequences; shapes and errors as in [`KernelizedAttention::forward`].
    pub fn forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Result<Tensor<4>> {
        match self {
            Self::Kernelized(attention) => attention.forward(q, k, v, mask),
            Self::Softmax(attention) => attention.forward(q, k, v, mask),
        }
    }
}
