//! The working memory of the pass over the rows.

use super::super::problem::Problem;
use super::super::summary::Layout;
use super::super::tile::{Buffers, Sizes};
use super::far_sums::FarMemory;
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
    pub far: FarMemory<'s, T>,
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
    /// Most key segments of a unit whose far sums are kept.
    far_segments: usize,
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
            far_segments: if keeps_far { segments.max(1) } else { 0 },
            checkpoints: if keeps_far { (rows.div_ceil(sizes.chunk) + 1) * entry } else { 0 },
            gradients,
        }
    }

    pub fn states_len(&self) -> usize {
        (self.segments + 1) * self.summary
    }

    /// Numbers shared between the tasks of a unit whose segments run side by side.
    pub fn unit_len(&self) -> usize {
        self.states_len() + self.far_len()
    }

    fn far_len(&self) -> usize {
        if self.far_segments == 0 { 0 } else { (3 * self.far_segments + 2) * self.entry }
    }

    pub fn worker_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        Arena::measure(|arena| self.worker(problem, arena))
    }

    /// Numbers of scratch that [`visit_rows`](super::visit_rows) takes beside the table's.
    pub fn visit_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let cut = problem.units() - whole_units(problem);
        cut * self.unit_len() + threads::count() * self.worker_len(problem)
    }

    pub fn far<'s, T: Real>(&self, arena: &mut Arena<'s, T>) -> FarMemory<'s, T> {
        let entry = self.entry;
        let n = if self.far_len() == 0 { 0 } else { self.far_segments + 1 };
        FarMemory {
            sums: arena.take(self.far_segments * entry),
            prefix: arena.take(n * entry),
            suffix: arena.take(n * entry),
        }
    }

    /// The prefixes and suffixes in memory laid out by [`far`](Self::far).
    pub fn far_totals<'s, T>(&self, memory: &'s [T]) -> (&'s [T], &'s [T]) {
        if memory.is_empty() {
            return (&[], &[]);
        }
        memory[self.far_segments * self.entry..].split_at((self.far_segments + 1) * self.entry)
    }

    pub fn worker<'s, T: Real>(&self, problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Worker<'s, T> {
        Worker {
            buffers: Buffers::new(problem, self.sizes, self.gradients, arena),
            running: arena.take(self.entry),
            carry: [arena.take(self.summary), arena.take(self.summary)],
            local: arena.take(self.summary),
            far: self.far(arena),
            checkpoints: arena.take(self.checkpoints),
        }
    }
}
