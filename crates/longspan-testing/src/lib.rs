//! The conformance suite: checks that every attention mechanism has to pass, whatever it computes.
//!
//! Reading order: a [`Case`] is one call without its numbers, [`Inputs`] are the numbers, a [`Subject`] is a mechanism
//! in both number types with what the checks may assume of it. [`execute`] runs calls on poisoned memory. The checks
//! take a subject and a case: [`accuracy`] compares with the definition, [`isolation`] checks that masked and unrelated
//! inputs have no influence, [`memory`] covers layouts and scratch, [`streaming`] and [`state_gradients`] states,
//! [`threads`] reproducible bits, [`rejection`] wrong calls. [`published`] is a
//! second oracle, the published algorithm. [`grid`] draws cases that hit every boundary; [`suite`]
//! runs checks over them and reports.

pub mod accuracy;
pub mod case;
pub mod compare;
pub mod execute;
pub mod grid;
pub mod isolation;
pub mod memory;
pub mod published;
pub mod random;
pub mod rejection;
pub mod state_gradients;
pub mod streaming;
pub mod subject;
pub mod suite;
pub mod threads;

pub use case::{Case, Inputs, KeyMask, per_key};
pub use compare::Failure;
pub use subject::{Assumptions, Number, Subject};
