//! Which algorithm serves a call: what each would do, how long that takes, and the choice.

mod algorithm;
mod rates;

pub use algorithm::{Algorithm, Estimate, Plan, Purpose};
pub use rates::{Rate, Work};
