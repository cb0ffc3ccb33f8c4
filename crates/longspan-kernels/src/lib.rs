//! Attention over long sequences at linear cost, with relative positions: kernels over slices, without a framework.
//!
//! Reading order: [`Dims`], [`View`] and [`Mask`] say what a call works on; [`Mechanism`] and its [`Kernel`]s are the way to call it;
//! [`KernelizedAttention`], with [`Shaw`]'s or [`Fourier`] positions, [`Toeplitz`] and [`Aft`] are the mechanisms,
//! [`ShortConvolution`] what stands between them, [`SoftmaxAttention`] the baseline; [`State`] is what streaming carries; [`Algorithm`] and [`Plan`] say how a call is
//! computed and why; [`half`] brings two-byte numbers in and out;
//! [`threads`] runs calls on other threads than rayon's.

pub mod aft;
mod call;
pub mod convolution;
mod error;
mod feature_map;
pub mod fourier;
pub mod gated;
pub mod half;
pub mod kernelized;
pub mod layers;
pub mod memory;
mod plan;
pub mod shaw;
mod simd;
pub mod softmax;
pub mod threads;
pub mod toeplitz;

pub use aft::Aft;
pub use call::{
    AnyKernel, Call, CombineGradients, Cotangent, Dims, Gradients, Kernel, Keys, Mask, Mechanism, Order, Output,
    Parameter, Parameters, Reference, Scratch, State, StateShape, Token, View, ViewMut,
};
pub use convolution::ShortConvolution;
pub use error::Error;
pub use feature_map::{FeatureMap, HedgehogNorm, RandomFeatures};
pub use fourier::{Fourier, FourierNormalizer, Positions, Wave};
pub use gated::{Gate, GatedAttention, LearnedGates, Update};
pub use kernelized::{KernelizedAttention, Score};
pub use plan::{Algorithm, Estimate, Plan, Purpose, Rate, Work};
pub use shaw::{RelativeMap, Shaw};
pub use simd::{Real, instructions};
pub use softmax::SoftmaxAttention;
pub use toeplitz::{Beyond, Bias, Toeplitz};
