//! Attention mechanisms as modules.
//!
//! A mechanism takes queries, keys and values that are already split into heads, `[batch, heads, tokens, head_dim]`;
//! [`MultiHeadAttention`] adds the projections and runs any of them. [`AttentionConfig`] is how a model, a run folder
//! or a command line names one.
//!
//! Each mechanism is one file here, with its options, its module, and what it computes on devices that have no kernels;
//! it joins the others in `registry.rs`.

mod aft;
mod by_name;
mod convolution;
mod feature_map;
mod fourier;
mod gated;
mod gates;
mod heads;
mod kernelized;
mod mask;
mod multi_head;
mod registry;
mod softmax;
pub(crate) mod stored;
#[cfg(all(test, feature = "autodiff", feature = "flex"))]
pub(crate) mod tests;
mod toeplitz;

use burn::tensor::{Device, Int, Tensor, TensorData};

pub use aft::{AftAttention, AftConvOptions, AftFullOptions, AftLocalOptions, AftSimpleOptions, ImageOptions};
pub use convolution::{ShortConvolution, ShortConvolutionOptions};
pub use feature_map::LearnedMap;
pub use fourier::{FourierAttention, FourierNormalizerConfig, FourierOptions};
pub use gated::{DeltaOptions, GateConfig, GatedAttention, GatedDeltaOptions, GatedOptions};
pub use heads::Heads;
pub use kernelized::{KernelConfig, KernelizedAttention, KernelizedOptions, RelativeConfig, ShawOptions};
pub use mask::{AttentionMask, DeviceMask, KeyMask};
pub use multi_head::{MultiHeadAttention, MultiHeadAttentionConfig};
pub use registry::{Attention, AttentionConfig, MemoryState};
pub use softmax::{SoftmaxAttention, SoftmaxOptions, SoftmaxWindowOptions};
pub use toeplitz::{BiasConfig, ToeplitzAttention, ToeplitzOptions};

pub use crate::backend::{AttentionState, StateForm, StoredState};

/// Indices of batch entries on a device.
pub(crate) fn index_tensor(indices: &[usize], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i64> = indices.iter().map(|&i| i as i64).collect();
    let count = indices.len();
    Tensor::from_data(TensorData::new(indices, [count]), device)
}
