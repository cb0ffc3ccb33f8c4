//! What stands around attention in a model: embeddings, linear layers with activation, dropout and residual sum, norms, the loss
//! of a vocabulary, and AdamW.
//!
//! On Burn's CPU backend in `f32` each is one operation with a backward of its own, by
//! [`longspan_layers`]; on every other backend, and for other numbers, the same in plain tensor operations.

#[cfg(feature = "autodiff")]
mod adamw;
mod around;
mod cross_entropy;
pub(crate) mod dropout;
mod embedding;
mod feed_forward;
pub(crate) mod flex;
pub(crate) mod gated_norm;
#[cfg(feature = "autodiff")]
mod gradients;
pub(crate) mod linear;
#[cfg(feature = "autodiff")]
mod muon;
pub(crate) mod norm;
mod pinball;
mod squared_error;
pub(crate) mod stored;
#[cfg(all(test, feature = "autodiff", feature = "flex"))]
pub(crate) mod tests;

#[cfg(feature = "autodiff")]
pub use adamw::FusedAdamW;
pub(crate) use around::Around;
pub use cross_entropy::{CrossEntropyLoss, Targets, cross_entropy};
pub use dropout::{dropout, with_dropout_seed};
pub use embedding::embedding;
pub use feed_forward::{FeedForward, FeedForwardConfig};
pub use gated_norm::{GatedRmsNorm, GatedRmsNormConfig};
#[cfg(feature = "autodiff")]
pub use gradients::{add_gradients, clip_gradients};
pub use linear::{Activation, After, linear};
pub(crate) use linear::{apply, check_like, check_rows, check_types, drawn, fresh, reshape};
#[cfg(feature = "autodiff")]
pub use muon::FusedMuon;
pub use norm::{NormKind, TokenNorm, TokenNormConfig};
pub use pinball::pinball;
pub use squared_error::squared_error;
