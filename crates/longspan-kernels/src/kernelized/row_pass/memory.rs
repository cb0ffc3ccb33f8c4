//! The working memory of the pass over the rows.

use super::super::pass::PassMemory;
use super::super::problem::Problem;
use super::super::tile::{Buffers, Sizes};
use super::segments::{cut_count, segment_count};
use crate::call::{Arena, Sequence};
use crate::simd::Real;
use crate::simd::rows::padded;

pub(in crate::kernelized) struct Worker<'s, T> {
    pub buffers: Buffers<'s, T>,
    pub running: &'s mut [T],
    pub checkpoints: &'s mut [T],
}

/// The sizes of all working memory of a forward call.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernelized) struct Memory {
    sizes: Sizes,
    /// `v⁺` of one row.
    pub entry: usize,
    /// Far sums of a unit, under a bidirectional mask.
    far: usize,
    checkpoints: usize,
    /// Whether gradients of queries are taken back to their raw rows.
    gradients: bool,
}

impl Memory {
    /// For a forward call, or for the gradients of queries.
    pub fn new<T: Real>(problem: &Problem<'_, T>, gradients: bool) -> Self {
        let sizes = Sizes::new(problem);
        let entry = problem.value_width + padded::<T>(1);
        let most = |count: &dyn Fn(&Sequence<'_>) -> usize| problem.sequences.iter().map(count).max().unwrap_or(0);
        let rows = most(&|s| s.queries.min(problem.segment(s.queries)));
        let (mut far, mut checkpoints) = (0, 0);
        if !problem.causal && problem.radius.is_some() {
            far = 2 * (most(&|s| cut_count(problem, s.keys)) + 1) * entry;
            checkpoints = (rows.div_ceil(sizes.chunk) + 1) * entry;
        }
        Self { sizes, entry, far, checkpoints, gradients }
    }

    pub fn pass<T: Real>(&self, problem: &Problem<'_, T>) -> PassMemory {
        let stages = (0..problem.units()).map(|index| segment_count(problem, &problem.unit(index)));
        let worker = Arena::measure(|arena| self.worker(problem, arena));
        PassMemory::new(problem, stages.max().unwrap_or(0), self.far, worker)
    }

    pub fn worker<'s, T: Real>(&self, problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Worker<'s, T> {
        Worker {
            buffers: Buffers::new(problem, self.sizes, self.gradients, arena),
            running: arena.take(self.entry),
            checkpoints: arena.take(self.checkpoints),
        }
    }
}
