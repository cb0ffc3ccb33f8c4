//! The pass over the rows of a call that forward and backward share.
//!
//! A unit (one key/value head of one sequence) is walked in segments of rows, a segment in chunks. Each chunk reads the
//! state of all earlier keys, shows its rows to a [`Visitor`] and lets its keys enter the state.

mod far_sums;
mod memory;
mod segments;
mod walk;

use super::pass::{Pass, Wanted};
use super::problem::{Problem, Table};
use super::summary::{Carry, Place, Summary, SummaryRef, add_values, store_state};
use crate::call::Arena;
use crate::simd::Real;
use far_sums::{FarSums, accumulate};
pub(super) use memory::{Memory, Worker};
pub(super) use segments::{Segment, cut, cut_count, first_row, segments, whole_units};
pub(super) use walk::{Scales, Scene, Visitor, Walk};

/// The pass over all rows of a call.
pub(super) struct RowPass<'w, 'p, 'a, T: 'static, F> {
    pub problem: &'w Problem<'a, T>,
    pub memory: Memory,
    pub table: Option<Table<'w, T>>,
    /// Gives the visitor of the rows of a unit and a segment. Without it the pass is one over all keys, for the state after them.
    pub make: Option<&'w F>,
    /// Where the state after the last row goes, one place a unit.
    pub last: Option<&'w [Place<'p, T>]>,
}

impl<'w, 'p, 'a, T: Real, V: Visitor<T>, F: Fn(usize, usize) -> V> RowPass<'w, 'p, 'a, T, F> {
    pub fn unit(&self, index: usize) -> UnitPass<'_, 'w, 'p, 'a, T, F> {
        let unit = self.problem.unit(index);
        let ring = self.problem.call.initial_state.map(|state| unit.head(state));
        UnitPass { pass: self, index, walk: Walk { problem: self.problem, unit, table: self.table, ring } }
    }
}

/// The pass over the rows of one unit.
pub(super) struct UnitPass<'x, 'w, 'p, 'a, T: 'static, F> {
    pass: &'x RowPass<'w, 'p, 'a, T, F>,
    index: usize,
    walk: Walk<'w, 'a, T>,
}

impl<T: Real, V: Visitor<T>, F: Fn(usize, usize) -> V> Pass<T> for UnitPass<'_, '_, '_, '_, T, F> {
    type Stage = Segment;
    type Worker<'s> = Worker<'s, T>;

    fn stages(&self) -> Vec<Segment> {
        let (problem, unit) = (self.walk.problem, &self.walk.unit);
        if self.pass.make.is_none() { cut(problem, 0, unit.sequence.keys, 0, false) } else { segments(problem, unit) }
    }

    fn writes(segment: &Segment) -> bool {
        segment.writes
    }

    fn idle(&self, segment: &Segment) -> [T; 2] {
        self.walk.unit.idle(segment.idle)
    }

    fn keeps(&self) -> bool {
        self.pass.last.is_some()
    }

    fn worker<'s>(&self, arena: &mut Arena<'s, T>) -> Worker<'s, T> {
        let mut worker = self.pass.memory.worker(self.walk.problem, arena);
        worker.buffers.start(self.walk.problem, &self.walk.unit);
        worker
    }

    fn begin(&self, carry: &mut Carry<'_, T>, memory: &mut [T], far: &mut [T]) {
        let (problem, unit) = (self.walk.problem, &self.walk.unit);
        // Rows that stand before the first key see nothing.
        let unseen = first_row(problem, unit);
        if let Some(make) = self.pass.make.filter(|_| unseen > 0) {
            let mut visitor = make(self.index, 0);
            for head in problem.heads(unit) {
                (0..unseen).for_each(|row| visitor.unseen(problem, unit, head, row));
            }
        }
        if let Some(state) = self.walk.ring {
            carry.load(unit, state, problem.dims.value_dim);
        }
        if let Some(outside) = problem.call.outside {
            carry.load_outside(problem, unit, outside, memory);
        }
        if !far.is_empty() && unit.sequence.keys == 0 {
            self.accumulate_far(far);
        }
    }

    fn visit(
        &self,
        segment: Segment,
        start: SummaryRef<'_, T>,
        wanted: Wanted,
        local: &mut Summary<'_, T>,
        far: &[T],
        worker: &mut Worker<'_, T>,
    ) {
        let RowPass { problem, memory, make, .. } = self.pass;
        let Worker { buffers, running, checkpoints } = worker;
        let mut visitor =
            make.filter(|_| wanted.results && segment.writes).map(|make| make(self.index, segment.number));
        if problem.causal {
            let visitor = visitor.as_mut().map(|visitor| visitor as &mut dyn Visitor<T>);
            self.walk.causal(segment, start, (local, wanted.sums), running, visitor, buffers);
        } else if let Some(visitor) = &mut visitor {
            let far = FarSums::new(problem, self.walk.unit.sequence.keys, memory.entry, far);
            let rows = (segment.from, segment.to);
            self.walk.bidirectional_rows(rows, start, &far, visitor, buffers, checkpoints);
            visitor.end(problem);
        } else if !segment.writes {
            self.walk.bidirectional_keys(segment.from, segment.to, local, buffers);
        }
    }

    fn leave(&self, segment: Segment, carry: &mut Carry<'_, T>, local: SummaryRef<'_, T>, far: &mut [T]) {
        let (problem, unit) = (self.walk.problem, &self.walk.unit);
        if segment.writes && !problem.causal {
            return;
        }
        if !far.is_empty() {
            self.keep_far(segment.number, local, far);
            if segment.to == unit.sequence.keys {
                self.accumulate_far(far);
            }
        }
        carry.add(problem, unit.passes(&segment), local);
    }

    fn end(&self, sums: &Summary<'_, T>) {
        if let Some(places) = self.pass.last {
            store_state(self.walk.problem, &self.walk.unit, self.walk.ring, sums, &places[self.index]);
        }
    }
}

impl<T: Real, V: Visitor<T>, F: Fn(usize, usize) -> V> UnitPass<'_, '_, '_, '_, T, F> {
    fn key_segments(&self) -> usize {
        cut_count(self.walk.problem, self.walk.unit.sequence.keys)
    }

    /// Keeps the far sum of the `n`-th segment of keys.
    fn keep_far(&self, n: usize, local: SummaryRef<'_, T>, far: &mut [T]) {
        let (entry, width) = (self.pass.memory.entry, self.walk.problem.value_width);
        let to = &mut far[(self.key_segments() + 1 + n) * entry..][..entry];
        to.fill(T::ZERO);
        to[..width].copy_from_slice(local.far());
        to[width] = local.count();
    }

    fn accumulate_far(&self, far: &mut [T]) {
        let (problem, unit) = (self.walk.problem, &self.walk.unit);
        let (entry, segments) = (self.pass.memory.entry, self.key_segments());
        let (before, after) = far[..2 * (segments + 1) * entry].split_at_mut((segments + 1) * entry);
        accumulate(entry, [before, after]);
        for (state, sums) in problem.call.outside.into_iter().flatten().zip([before, after]) {
            for sum in sums.chunks_exact_mut(entry) {
                let (sums, count) = sum.split_at_mut(problem.value_width);
                add_values(unit.head(state), problem.dims.value_dim, sums, &mut count[0]);
            }
        }
    }
}
