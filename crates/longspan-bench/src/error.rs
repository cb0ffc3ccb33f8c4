//! What can keep a benchmark from its numbers.

use std::path::PathBuf;

/// A benchmark that cannot go on. Nothing is reported for what it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel that is wrong has no speed.
    #[error("{candidate}, {order}, {length} tokens: {failure}; no speed is reported for a kernel that is wrong")]
    Wrong {
        /// Mechanism and algorithm.
        candidate: String,
        /// Causal or bidirectional.
        order: &'static str,
        /// Length of the check that failed.
        length: usize,
        /// What differs from the definition.
        failure: String,
    },
    /// A kernel refused a call that it took during the check.
    #[error("{candidate}, {length} tokens: {source}")]
    Kernel {
        /// Mechanism and algorithm.
        candidate: String,
        /// Tokens of the call.
        length: usize,
        /// What the kernel says.
        source: longspan_kernels::Error,
    },
    /// No entry of the registry has this name.
    #[error("unknown mechanism {name:?}; known are {known}")]
    UnknownMechanism {
        /// As given.
        name: String,
        /// All names, separated by commas.
        known: String,
    },
    /// A size that leaves nothing to measure.
    #[error("{setting} {got}: expected {expected}")]
    Setting {
        /// Its flag.
        setting: &'static str,
        /// As given.
        got: String,
        /// What would do.
        expected: &'static str,
    },
    /// Threads could not be started.
    #[error("no pool of {threads} threads: {reason}")]
    Threads {
        /// As asked for.
        threads: usize,
        /// What the system says.
        reason: String,
    },
    /// A plot could not be drawn.
    #[error("cannot draw {plot}: {reason}")]
    Plot {
        /// Its name.
        plot: String,
        /// What the drawing library says.
        reason: String,
    },
    /// A file of results that cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what helps.
        reason: String,
    },
}
