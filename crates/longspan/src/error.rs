//! What can go wrong, each with the operation, the argument, what was expected and what came.

use std::fmt::Display;
use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] longspan_kernels::Error),
    /// A configuration that no module can be made from.
    #[error("{config}: {field}: expected {expected}, got {got}")]
    Config {
        /// The configuration, such as `Seq2SeqConfig`.
        config: &'static str,
        /// The field at fault.
        field: &'static str,
        /// What the field takes.
        expected: String,
        /// What it held.
        got: String,
    },
    /// A tensor or list of the wrong shape or value.
    #[error("{operation}: {argument}: expected {expected}, got {got}")]
    Argument {
        /// The operation that was called.
        operation: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// What the operation takes.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// A file that is not what it should be.
    #[error("{}: {problem}; {help}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        help: &'static str,
    },
    /// A file that cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// `read` or `write`.
        action: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// The device could not return numbers.
    #[error("the device gave no numbers back: {0}")]
    Device(String),
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Checks one field of a configuration.
pub(crate) fn config(
    holds: bool,
    config: &'static str,
    field: &'static str,
    expected: impl Display,
    got: impl Display,
) -> Result<()> {
    if holds {
        return Ok(());
    }
    Err(Error::Config { config, field, expected: expected.to_string(), got: got.to_string() })
}

/// Checks that a table of as many numbers as the product of `sizes` has a place in memory: processors have addresses of 47 bits.
pub(crate) fn fits(config: &'static str, field: &'static str, sizes: &[usize]) -> Result<()> {
    let numbers = sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    let holds = numbers.is_some_and(|numbers| numbers < 1 << 45);
    self::config(holds, config, field, "a table that fits memory", format_args!("sizes {sizes:?}"))
}

/// Checks one argument of an operation.
pub(crate) fn argument(
    holds: bool,
    operation: &'static str,
    argument: &'static str,
    expected: impl FnOnce() -> String,
    got: impl FnOnce() -> String,
) -> Result<()> {
    if holds {
        return Ok(());
    }
    Err(Error::Argument { operation, argument, expected: expected(), got: got() })
}
