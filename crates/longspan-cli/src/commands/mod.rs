//! One file a verb. A command reads its arguments, asks the task of its run, and prints.

pub mod bench;
pub mod completions;
pub mod eval;
pub mod explain;
pub mod generate;
pub mod info;
pub mod man;
mod outcome;
pub mod predict;
mod search;
pub mod train;

pub use outcome::Outcome;
