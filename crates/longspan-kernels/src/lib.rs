//! Attention over long sequences at linear cost, with relative positions: kernels over slices, without a framework.
//!
//! Reading order: [`Dims`], [`View`] and [`Mask`] say what a call works on; [`Mechanism`] and its [`Kernel`]s are the way to call it;
//! [`KernelizedAttention`], with [`Shaw`]'s or [`Fourier`] positions, [`Toeplitz`] and [`Aft`] are the mechanisms,
//! [`SoftmaxAttention`] the baseline; [`State`] is what streaming carries; [`Algorithm`] and [`Plan`] say how a call is
//! computed and why, by the [`Rates`] of the machine; [`halves`] brings two-byte numbers in and out;
//! [`threads`] runs calls on other threads than rayon's.

pub mod aft;
mod algorithm;
mod error;
mod feature_map;
pub mod fourier;
pub mod halves;
pub mod kernelized;
mod mask;
mod mechanism;
mod rates;
mod scratch;
mod shape;
pub mod shaw;
mod simd;
pub mod softmax;
mod state;
pub mod threads;
pub mod toeplitz;

pub use aft::Aft;
pub use algorithm::{Algorithm, Estimate, Plan, Purpose};
pub use error::Error;
pub use feature_map::{FeatureMap, HedgehogNorm, RandomFeatures};
pub use fourier::{Fourier, FourierNormalizer, Positions, Wave};
pub use kernelized::{KernelizedAttention, Score};
pub use mask::{Keys, Mask, Order};
pub use mechanism::{
    AnyKernel, Call, Cotangent, Gradients, Kernel, Mechanism, Output, Parameter, Parameters, Reference, Token,
};
pub use rates::{Rate, Rates, Work};
pub use scratch::Scratch;
pub use shape::{Dims, View, ViewMut};
pub use shaw::{RelativeMap, Shaw};
pub use simd::Real;
pub use softmax::SoftmaxAttention;
pub use state::{State, StateShape};
pub use toeplitz::{Beyond, Bias, Toeplitz};
