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
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

pub use kernelized::{KernelConfig, KernelizedAttention, KernelizedAttentionConfig, RelativeConfig};
pub use mask::{AttentionMask, KeyMask};
pub use multi_head::{MultiHeadAttention, MultiHeadAttentionConfig};
pub use softmax::{SoftmaxAttention, SoftmaxAttentionConfig, SoftmaxState};

use crate::backend::{self, KernelizedState, Total};
use crate::error::{Error, Result};

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

    /// The state before the first token.
    pub fn empty_state(&self) -> AttentionState {
        match self {
            Self::Kernelized(_) => AttentionState::Kernelized(KernelizedState::empty()),
            Self::Softmax(_) => AttentionState::Softmax(SoftmaxState::default()),
        }
    }

    /// Takes one token into `state` and gives its output; shapes and errors as in [`KernelizedAttention::step`].
    pub fn step(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, state: &mut AttentionState) -> Result<Tensor<4>> {
        match (self, state) {
            (Self::Kernelized(attention), AttentionState::Kernelized(state)) => attention.step(q, k, v, state),
            (Self::Softmax(attention), AttentionState::Softmax(state)) => attention.step(q, k, v, state),
            (_, _) => Err(Error::Argument {
                operation: "attention step",
                argument: "state",
                expected: "a state of the same mechanism".into(),
                got: "one of another".into(),
            }),
        }
    }

    /// Takes in keys and values that queries will come to one by one, as in a decoder's attention to its memory.
    ///
    /// # Shapes
    /// - `k`: `[batch, kv_heads, keys, head_dim]`
    /// - `v`: `[batch, kv_heads, keys, value_dim]`
    ///
    /// # Errors
    /// A mask of the wrong size.
    pub fn remember(&self, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Result<MemoryState> {
        backend::check_mask(mask, &k)?;
        Ok(match self {
            Self::Kernelized(attention) if attention.relative.is_none() => {
                MemoryState(Remembered::Total(attention.total(k, v, mask)))
            }
            _ => MemoryState(Remembered::Whole(k, v, mask.clone())),
        })
    }

    /// What [`Attention::forward`] under a bidirectional mask gives for queries that stand at position `first` and after:
    /// O(1) a query for kernelized attention, O(keys) with relative positions and for softmax.
    ///
    /// # Shapes
    /// `q`: `[batch, heads, queries, head_dim]`; output `[batch, heads, queries, value_dim]`.
    ///
    /// # Errors
    /// Shapes that do not fit the memory.
    pub fn recall(&self, q: Tensor<4>, first: usize, memory: &MemoryState) -> Result<Tensor<4>> {
        match (self, &memory.0) {
            (Self::Kernelized(attention), Remembered::Total(total)) => Ok(total.recall(attention.options(), q)),
            (_, Remembered::Whole(k, v, mask)) => {
                self.forward(q, k.clone(), v.clone(), &mask.clone().with_offset(first as isize))
            }
            (Self::Softmax(_), Remembered::Total(_)) => Err(Error::Argument {
                operation: "attention recall",
                argument: "memory",
                expected: "a memory of the same mechanism".into(),
                got: "one of another".into(),
            }),
        }
    }
}

/// The state of a prefix under any mechanism.
#[derive(Debug, Clone)]
pub enum AttentionState {
    /// Of constant size.
    Kernelized(KernelizedState),
    /// All keys and values so far.
    Softmax(SoftmaxState),
}

impl AttentionState {
    /// The states of the batch entries `indices`, in that order; an entry may come several times (beam search).
    ///
    /// # Errors
    /// An index beyond the batch.
    pub fn select(&self, indices: &[usize], device: &Device) -> Result<Self> {
        Ok(match self {
            Self::Kernelized(state) => Self::Kernelized(state.select(indices, device)?),
            Self::Softmax(state) => Self::Softmax(state.select(&index_tensor(indices, device))),
        })
    }
}

/// Keys and values that queries come to one by one. Made by [`Attention::remember`].
#[derive(Debug, Clone)]
pub struct MemoryState(Remembered);

#[derive(Debug, Clone)]
enum Remembered {
    /// The sums that content-only queries need.
    Total(Total),
    /// Keys, values and which of them are there.
    Whole(Tensor<4>, Tensor<4>, AttentionMask),
}

impl MemoryState {
    /// The memories of the batch entries `indices`, in that order; an entry may come several times.
    pub(crate) fn select(&self, indices: &[usize], device: &Device) -> Self {
        let rows = index_tensor(indices, device);
        Self(match &self.0 {
            Remembered::Total(total) => Remembered::Total(total.select(&rows)),
            Remembered::Whole(k, v, mask) => {
                let keys = k.dims()[2];
                let take = |x: &Tensor<4>| x.clone().select(0, rows.clone());
                Remembered::Whole(take(k), take(v), mask.select(indices, keys))
            }
        })
    }
}

/// Indices of batch entries on a device.
pub(crate) fn index_tensor(indices: &[usize], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i64> = indices.iter().map(|&i| i as i64).collect();
    let count = indices.len();
    Tensor::from_data(TensorData::new(indices, [count]), device)
}
