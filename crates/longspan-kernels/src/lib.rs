//! Attention over long sequences at linear cost, with relative positions: kernels over slices, without a framework.
//!
//! Reading order: [`Dims`], [`View`] and [`Mask`] say what a call works on; [`Mechanism`] and its [`Kernel`]s are the way to call it;
//! [`KernelizedAttention`], with [`Shaw`]'s or [`Fourier`] positions, [`Toeplitz`] and [`Aft`] are the mechanisms,
//! [`ShortConvolution`] what stands between them, [`SoftmaxAttention`] the baseline; [`State`] is what streaming carries; [`Algorithm`] and [`Plan`] say how a call is
//! computed and why; [`half`] brings two-byte numbers in and out;
//! [`threads`] runs calls on other threads than rayon's.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod aft;
mod call;
pub mod convolution;
mod feature_map;
pub mod fourier;
pub mod gated;
pub mod half;
pub mod kernelized;
mod plan;
pub mod shaw;
pub mod softmax;
pub mod toeplitz;

/// On which threads a call's tasks run, and how it ends early.
pub mod threads {
    pub use longspan_core::threads::{Stop, Team, alone, on_team, until};
    pub(crate) use longspan_core::threads::{check, count, parallel, share, share_many, share_many_with};
}
pub use aft::Aft;
pub use call::{
    AnyKernel, Call, CombineGradients, Cotangent, Dims, Gradients, Kernel, Keys, Mask, Mechanism, Order, Output,
    Parameter, Parameters, Reference, Scratch, State, StateShape, Token, View, ViewMut,
};
pub use convolution::ShortConvolution;
pub use feature_map::{FeatureMap, HedgehogNorm, RandomFeatures};
pub use fourier::{Fourier, FourierNormalizer, Positions, Wave};
pub use gated::{Gate, GatedAttention, LearnedGates, Update};
pub use kernelized::{KernelizedAttention, Score};
pub use longspan_core::error::Error;
pub use longspan_core::simd::{Real, instructions};
use longspan_core::{error, memory, simd};
pub use plan::{Algorithm, Estimate, Plan, Purpose, Rate, Work};
pub use shaw::{RelativeMap, Shaw};
pub use softmax::SoftmaxAttention;
pub use toeplitz::{Beyond, Bias, Toeplitz};
