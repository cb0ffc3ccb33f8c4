//! Linear-cost attention with relative positions for [Burn](burn): modules, a sequence-to-sequence model, decoding and
//! checkpoints.
//!
//! Reading order: [`attention`] holds the mechanisms as modules, and [`MultiHeadAttention`](attention::MultiHeadAttention)
//! over all of them; [`backend`] is how their one operation reaches the kernels on the CPU and plain tensor operations
//! elsewhere; [`models`] stacks them into [`Seq2Seq`](models::Seq2Seq); [`generate`] decodes;
//! [`checkpoint`] keeps weights and training states on disk.
//!
//! One rule for mistakes: whatever depends on a caller's data returns a [`Result`]; nothing here panics on it. Configs are
//! checked by `init`, shapes by `forward` and `step`.

pub mod attention;
pub mod backend;
pub mod checkpoint;
mod error;
pub mod generate;
pub mod models;

pub use error::{Error, Result};
pub use longspan_kernels as kernels;
