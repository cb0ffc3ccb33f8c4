//! The working memory of the pass over the rows.

use super::super::problem::Problem;
use super::super::summary::Layout;
use super::super::tile::{Buffers, Sizes};
use super::segments::{segment_count, whole_units};
use crate::call::Arena;
use crate::simd::Real;
use crate::simd::rows::padded;
use crate::threads;

pub(in crate::kernelized) struct Worker<'s, T> {
    pub buffers: Buffers<'s, T>,
    pub running: &'s mut [T],
    pub carry: [&'s mut [T]; 2],
    pub local: &'s mut [T],
    pub far: &'s mut [T],
    pub checkpoints: &'s mut [T],
}

/// The sizes of all working memory of a forward call.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernelized) struct Memory {
    sizes: Sizes,
    pub layout: Layout,
    pub summary: usize,
    /// `v⁺` of one row.
    pub entry: usize,
    /// Most segments of a unit.
    pub segments: usize,
    far: usize,
    pub checkpoints: usize,
    /// Whether gradients of queries are taken back to their raw rows.
    gradients: bool,
}

impl Memory {
    /// For a forward call, or for the gradients of queries.
    pub fn new<T: Real>(problem: &Problem<'_, T>, gradients: bool) -> Self {
        let layout = Layout::new(problem);
        let sizes = Sizes::new(problem);
        let units = 0..problem.units();
        let segments = units.map(|index| segment_count(problem, &problem.unit(index))).max().unwrap_or(0);
        let rows = problem.sequences.iter().map(|s| s.queries.min(problem.segment(s.queries))).max().unwrap_or(0);
        let keeps_far = !problem.causal && problem.radius.is_some();
        let entry = problem.value_width + padded::<T>(1);
        Self {
            sizes,
            layout,
            summary: layout.len::<T>(),
            entry,
            segments,
            far: if keeps_far { 2 * (segments + 1) * entry } else { 0 },
            checkpoints: if keeps_far { (rows.div_ceil(sizes.chunk) + 1) * entry } else { 0 },
            gradients,
        }
    }

    pub fn states_len(&self) -> usize {
        (self.segments + 1) * self.summary
    }

    /// Numbers shared between the tasks of a unit whose segments run side by side.
    pub fn unit_len(&self) -> usize {
        self.states_len() + self.far
    }

    pub fn worker_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        Arena::measure(|arena| self.worker(problem, arena))
    }

    /// Numbers of scratch that [`visit_rows`](super::visit_rows) takes beside the table's.
    pub fn visit_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let cut = problem.units() - whole_units(problem);
        cut * self.unit_len() + threads::count() * self.worker_len(problem)
    }

    pub fn worker<'s, T: Real>(&self, problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Worker<'s, T> {
        Worker {
            buffers: Buffers::new(problem, self.sizes, self.gradients, arena),
            running: arena.take(self.entry),
            carry: [arena.take(self.summary), arena.take(self.summary)],
            local: arena.take(self.summary),
            far: arena.take(self.far),
            checkpoints: arena.take(self.checkpoints),
        }
    }
}
