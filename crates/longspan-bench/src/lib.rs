//! Longspan's kernels against their definition, the machine, and each other.
//!
//! Reading order: [`registry`] lists what can be measured; [`conformance`] checks it first, since the speed of a wrong kernel
//! means nothing, and [`accuracy`] tells how many digits `f32` keeps; [`machine`] measures products and copies; [`sweep`]
//! measures over lengths, [`goals`] against the project's own targets; [`memory`] counts bytes; [`statistics`] has medians,
//! fits and crossings; [`report`] holds all of it as JSON, CSV and text; [`plot`] and [`page`] show it. [`turns`] is what the
//! programs in `benches/` share.
//!
//! Everything is measured on the current rayon pool; [`on_threads`] makes one.

// The example of the kernels' README is compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../longspan-kernels/README.md")]
struct KernelsReadme;

pub mod accuracy;
pub mod conformance;
mod error;
pub mod goals;
mod inputs;
pub mod machine;
pub mod memory;
pub mod page;
pub mod plot;
pub mod quantity;
mod random;
pub mod registry;
pub mod report;
pub mod statistics;
pub mod sweep;
pub mod table;
pub mod timing;
pub mod turns;
mod workload;

pub use error::Error;
pub use workload::Pass;

/// Runs `body` on a pool of its own.
///
/// # Errors
/// If the threads cannot be started.
pub fn on_threads<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> Result<R, Error> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| Error::Threads { threads, reason: error.to_string() })?;
    Ok(pool.install(body))
}
