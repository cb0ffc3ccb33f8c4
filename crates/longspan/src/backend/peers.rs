//! Who else holds a part of the same sequences.

use std::fmt::Debug;

/// The processes that each hold a stretch of the same sequences, as one of them sees them. All make the same calls in the same
/// order.
pub trait Peers: Debug + Send + Sync {
    /// This one's place in the order of stretches.
    fn rank(&self) -> usize;

    /// How many there are.
    fn count(&self) -> usize;

    /// The numbers of all, in their order; each gives as many.
    fn gather(&self, numbers: &[f32]) -> Vec<Vec<f32>>;
}
