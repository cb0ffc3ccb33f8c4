//! How a command ends.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// A signal asked to stop; the work until then is saved.
    Interrupted,
}
