//! How a command ends.

/// How a command ended, if not by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// A signal asked to stop; the work until then is saved.
    Interrupted,
}
