//! What the crates of Longspan share: the choice among instruction sets and loops over their registers ([`simd`]), the threads of a
//! call ([`threads`]), large blocks of [`memory`], and what can be wrong with a call ([`error`]).
//!
//! It is for those crates alone and changes with them: what a program needs of it, [`longspan-kernels`] shows again.
//!
//! [`longspan-kernels`]: https://docs.rs/longspan-kernels

pub mod error;
pub mod memory;
pub mod simd;
pub mod threads;
