//! What stands around attention in a model, over slices of `f32`: embeddings, linear layers with their activation, dropout and
//! residual sum, norms, the cross-entropy of a vocabulary, AdamW and Muon.
//!
//! Each is one pass where a framework takes several, with a backward of its own. Work is cut by sizes alone, so the bits do not
//! depend on the number of threads, which are those of [`threads`](longspan_kernels::threads). Results are new memory that is not cleared
//! first. Rows are contiguous.
//!
//! Shapes are checked as everywhere. Numbers that are not finite are not: they give what the formula gives.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod activation;
mod adamw;
mod cross_entropy;
mod dropout;
mod embedding;
mod feed_forward;
mod few_rows;
mod gated_norm;
pub mod gradients;
mod linear;
mod multi_head;
mod muon;
mod norm;
mod products;
mod segments;

pub use activation::Activation;
pub use adamw::AdamW;
pub use cross_entropy::{CrossEntropy, Loss, LossGradients};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use feed_forward::{FeedForward, FeedForwardGradients, Weights};
pub use few_rows::{Projected, StepBuffers};
pub use gated_norm::{GatedNorm, GatedNormGradients, GatedNormWeights};
pub use linear::{Kept, Linear, LinearGradients};
pub use multi_head::{KeptAttention, Memory, MultiHead, MultiHeadGradients, Stretches};
pub use muon::Muon;
pub use norm::{Norm, NormGradients, NormWeights};
