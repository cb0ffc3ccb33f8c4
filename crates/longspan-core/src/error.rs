//! What can be wrong with a call, in words that name the operation, the argument, what was expected and what came.

/// An error of a kernel call. Nothing has been written to the outputs when one is returned, but for
/// [`NegativeDenominators`](Error::NegativeDenominators) and [`ErasedDenominators`](Error::ErasedDenominators).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument has the wrong length, shape or value.
    #[error("{operation}: {argument}: expected {expected}, got {got}")]
    Argument {
        /// The operation that was called, such as `kernelized_attention`.
        operation: &'static str,
        /// The argument at fault, such as `key_padding`.
        argument: &'static str,
        /// What the operation takes.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// Two options that are fine alone have no meaning together.
    #[error("{operation}: {combination} has no meaning; {help}")]
    Unsupported {
        /// The operation that was called.
        operation: &'static str,
        /// The options that exclude each other.
        combination: &'static str,
        /// What to do instead.
        help: &'static str,
    },
    /// The sum of a row's weights is negative, so that its quotient would mean nothing. Outputs have been written; such
    /// rows are 0 in them, and so are their gradients.
    #[error(
        "{operation}: the weights of {rows} rows sum to a negative number, the first of them row {row} of head {head} of \
         batch entry {batch}; choose a normaliser under which weights are positive, such as OnePlus"
    )]
    NegativeDenominators {
        /// The operation that was called.
        operation: &'static str,
        /// How many rows there are.
        rows: usize,
        /// Where the first of them is.
        batch: usize,
        /// Its head.
        head: usize,
        /// Its query.
        row: usize,
    },
    /// Rows see their own keys, and yet their weights are less than the least number: under an exponential feature map a key far larger than
    /// theirs came before and has decayed since. Outputs have been written; such rows are 0 in them.
    #[error(
        "{operation}: the weights of {rows} rows are too small for this number type, the first of them row {row} of head {head} of batch \
         entry {batch}: an earlier key is so much larger that nothing is left of later ones under an exponential feature map, and it has \
         decayed; take f64, keys of like size, or another feature map"
    )]
    ErasedDenominators {
        /// The operation that was called.
        operation: &'static str,
        /// How many rows there are.
        rows: usize,
        /// Where the first of them is.
        batch: usize,
        /// Its head.
        head: usize,
        /// Its query.
        row: usize,
    },
    /// The machine has not the memory for a state.
    #[error("state: no memory for {bytes} bytes; take a smaller batch, width or capacity")]
    Memory {
        /// What was asked for.
        bytes: usize,
    },
    /// A name, such as that of a feature map, is not known.
    #[error("unknown {kind} {got:?}; known are {known}")]
    UnknownName {
        /// What the name should name: `feature map`, `algorithm`.
        kind: &'static str,
        /// The name as given.
        got: String,
        /// All names that are known, separated by commas.
        known: String,
    },
}

/// Checks `condition` for one argument and says what was expected otherwise.
pub fn expect(
    condition: bool,
    operation: &'static str,
    argument: &'static str,
    expected: impl FnOnce() -> String,
    got: impl FnOnce() -> String,
) -> Result<(), Error> {
    if condition {
        return Ok(());
    }
    Err(Error::Argument { operation, argument, expected: expected(), got: got() })
}

/// Refuses options that have no meaning together, and says what helps.
pub fn refuse(
    refused: bool,
    operation: &'static str,
    combination: &'static str,
    help: &'static str,
) -> Result<(), Error> {
    if refused { Err(Error::Unsupported { operation, combination, help }) } else { Ok(()) }
}
