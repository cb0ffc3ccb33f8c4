//! What stands around attention in a model: linear layers with activation, dropout and residual sum, norms, the loss of a
//! vocabulary, and AdamW.
//!
//! On Burn's CPU backend in `f32` each is one operation with a backward of its own, by
//! [`longspan_kernels::layers`]; on every other backend, and for other numbers, the same in plain tensor operations.

mod adamw;
mod cross_entropy;
#[cfg(feature = "flex")]
mod flex;
mod linear;
mod norm;
#[cfg(all(test, feature = "flex"))]
mod tests;

pub use adamw::FusedAdamW;
pub use cross_entropy::{CrossEntropyLoss, cross_entropy};
pub(crate) use linear::apply;
pub use linear::{Activation, After, linear};
pub(crate) use norm::layer_norm;
