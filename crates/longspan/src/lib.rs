//! Linear-cost attention with relative positions for [Burn](burn): modules, a sequence-to-sequence model, a language model,
//! decoding and checkpoints.
//!
//! Reading order: [`attention`] holds the mechanisms as modules, and
//! [`MultiHeadAttention`](attention::MultiHeadAttention) over all of them; [`backend`] runs them, in the kernels on the
//! CPU and in plain tensor operations elsewhere; [`layers`] is what stands around them;
//! [`models`] stacks them into blocks, a [`Seq2Seq`](models::Seq2Seq), a [`LanguageModel`](models::LanguageModel) and a
//! [`Classifier`](models::Classifier);
//! [`generate`] searches, [`sample`] draws; [`profile`] tells where time goes; [`checkpoint`] keeps weights and training states on disk. With the
//! feature `train` the models are those of Burn's `Learner`.
//!
//! Errors: everything that depends on a caller's data returns a [`Result`] and does not panic. Configs are checked by
//! `init`, shapes by `forward` and `step`.

#![cfg_attr(
    not(all(feature = "autodiff", feature = "flex")),
    allow(dead_code, reason = "operations of the CPU backend, or their gradients, are compiled and never run")
)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod attention;
pub mod backend;
pub mod checkpoint;
#[cfg_attr(not(feature = "flex"), path = "without_cpu.rs")]
mod cpu;
mod error;
pub mod generate;
pub mod layers;
pub mod models;
pub mod profile;
pub mod sample;
#[cfg(feature = "train")]
pub mod train;

pub use error::{Error, Result};
pub use longspan_kernels as kernels;
