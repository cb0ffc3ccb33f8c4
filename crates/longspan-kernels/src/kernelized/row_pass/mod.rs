//! The pass over the rows of a call that forward and backward share.
//!
//! A unit (one key/value head of one sequence) is walked in segments of rows, a segment in chunks. Each chunk reads the
//! state of all earlier keys, shows its rows to a [`Visitor`] and lets its keys enter the state. The state of a segment
//! starts from zero (`local`) beside that of all earlier segments (`start`), so segments may run one after the other or
//! at the same time: the sums are the same to the bit.

mod far_sums;
mod memory;
mod segments;
mod walk;

use super::problem::{Problem, Table, Unit};
use super::summary::{Carry, Place, Summary, SummaryRef, add_values, store_state};
use crate::call::{Arena, SharedRows};
use crate::simd::Real;
use crate::threads::parallel;
use far_sums::{FarSums, accumulate};
pub(super) use memory::{Memory, Worker};
pub(super) use segments::{Segment, cut, cut_count, first_row, segments, whole_units};
pub(super) use walk::{Scales, Scene, Visitor, Walk};

/// Shows every row of the units from `from` on to the visitor that `make` gives for its unit and segment, and leaves the state after
/// the last row in `last`, one place a unit. `from` is at most [`whole_units`].
pub(super) fn visit_rows<T: Real, V: Visitor<T>>(
    problem: &Problem<'_, T>,
    memory: Memory,
    table: Option<Table<'_, T>>,
    make: &(impl Fn(usize, usize) -> V + Sync),
    last: Option<&[Place<'_, T>]>,
    from: usize,
    scratch: &mut [T],
) {
    let whole = whole_units(problem);
    let (per_unit, per_worker) = (memory.unit_len(), memory.worker_len(problem));
    let (shared, scratch) = scratch.split_at_mut((problem.units() - whole) * per_unit);
    let call = Visit { problem, memory, table, make, last };
    parallel(whole - from, scratch, per_worker, |n, scratch| call.unit(from + n, scratch));

    // The units that are left; `n` counts them.
    let units = whole..problem.units();
    if units.is_empty() {
        return;
    }
    let states_len = memory.states_len();
    let plans: Vec<Vec<Segment>> = units.clone().map(|index| segments(problem, &problem.unit(index))).collect();
    let tasks: Vec<(usize, usize)> =
        plans.iter().enumerate().flat_map(|(unit, plan)| (0..plan.len()).map(move |s| (unit, s))).collect();
    {
        let states = SharedRows::new(&mut *shared, [per_unit, 0, memory.summary]);
        parallel(tasks.len(), scratch, per_worker, |task, scratch| {
            let mut worker = memory.worker(problem, &mut Arena::new(scratch));
            let (n, segment) = tasks[task];
            // SAFETY: each (unit, segment) is one task's own.
            let numbers = unsafe { states.row(n, 0, segment, memory.summary) };
            call.summarize(whole + n, plans[n][segment], numbers, &mut worker);
        });
        parallel(units.len(), scratch, per_worker, |n, scratch| {
            let mut worker = memory.worker(problem, &mut Arena::new(scratch));
            // SAFETY: each unit's states are one task's own.
            let states = unsafe { states.row(n, 0, 0, per_unit) };
            call.chain(whole + n, &plans[n], states, &mut worker);
        });
    }
    let shared = &*shared;
    let tasks: Vec<(usize, usize, Segment)> = (0..units.len())
        .flat_map(|n| {
            let rows = if problem.causal {
                plans[n].clone()
            } else {
                cut(problem, 0, problem.unit(whole + n).sequence.queries, problem.offset, true)
            };
            rows.into_iter().enumerate().map(move |(at, segment)| (n, at, segment))
        })
        .filter(|(_, _, segment)| segment.writes)
        .collect();
    units.for_each(|index| call.visit_unseen_rows(index));
    parallel(tasks.len(), scratch, per_worker, |task, scratch| {
        let mut worker = memory.worker(problem, &mut Arena::new(scratch));
        let (n, at, segment) = tasks[task];
        let (index, plan) = (whole + n, &plans[n]);
        let states = &shared[n * per_unit..][..per_unit];
        let state = |at: usize| SummaryRef::new(memory.layout, &states[at * memory.summary..][..memory.summary]);
        let walk = call.walk(index);
        worker.buffers.start(problem, &walk.unit);
        let Worker { buffers, running, local, checkpoints, .. } = &mut worker;
        let mut visitor = make(index, segment.number);
        if problem.causal {
            let mut local = Summary::new(memory.layout, local);
            walk.causal(segment, state(at), (&mut local, false), running, Some(&mut visitor), buffers);
        } else {
            let far = FarSums::new(plan, memory.entry, &states[states_len..]);
            let rows = (segment.from, segment.to);
            walk.bidirectional_rows(rows, state(plan.len()), &far, &mut visitor, buffers, checkpoints);
            visitor.end(problem);
        }
    });
}

/// The same of one unit alone, its segments one after the other.
pub(super) fn visit_unit<T: Real, V: Visitor<T>>(
    problem: &Problem<'_, T>,
    memory: Memory,
    table: Option<Table<'_, T>>,
    make: &(impl Fn(usize, usize) -> V + Sync),
    index: usize,
    scratch: &mut [T],
) {
    Visit { problem, memory, table, make, last: None }.unit(index, scratch);
}

struct Visit<'w, 'p, 'a, T: 'static, F> {
    problem: &'w Problem<'a, T>,
    memory: Memory,
    table: Option<Table<'w, T>>,
    make: &'w F,
    last: Option<&'w [Place<'p, T>]>,
}

impl<'w, 'a, T: Real, V: Visitor<T>, F: Fn(usize, usize) -> V> Visit<'w, '_, 'a, T, F> {
    fn walk(&self, index: usize) -> Walk<'w, 'a, T> {
        let unit = self.problem.unit(index);
        let ring = self.problem.call.initial_state.map(|state| unit.head(state));
        Walk { problem: self.problem, unit, table: self.table, ring }
    }

    /// What was before key 0, and what comes after the last one. `memory` is as large as a summary.
    fn carry<'s>(&self, unit: &Unit<'_, T>, [high, low]: [&'s mut [T]; 2], memory: &mut [T]) -> Carry<'s, T> {
        let mut carry = Carry::new(self.memory.layout, high, low);
        if let Some(state) = self.problem.call.initial_state {
            carry.load(unit, unit.head(state), self.problem.dims.value_dim);
        }
        if let Some(outside) = self.problem.call.outside {
            carry.load_outside(self.problem, unit, outside, memory);
        }
        carry
    }

    fn summarize(&self, index: usize, segment: Segment, numbers: &mut [T], worker: &mut Worker<'_, T>) {
        let walk = self.walk(index);
        worker.buffers.start(self.problem, &walk.unit);
        let mut local = Summary::new(self.memory.layout, numbers);
        if self.problem.causal {
            let mut nothing = Summary::new(self.memory.layout, worker.local);
            nothing.clear();
            walk.causal(segment, nothing.view(), (&mut local, true), worker.running, None, &mut worker.buffers);
        } else {
            walk.bidirectional_keys(segment.from, segment.to, &mut local, &mut worker.buffers);
        }
    }

    /// Turns the summaries of a unit's segments into what each segment starts from; the total comes after the last.
    fn chain(&self, index: usize, plan: &[Segment], shared: &mut [T], worker: &mut Worker<'_, T>) {
        let Memory { layout, summary, .. } = self.memory;
        let unit = self.problem.unit(index);
        let (states, far) = shared.split_at_mut(self.memory.states_len());
        let [high, low] = &mut worker.carry;
        let mut carry = self.carry(&unit, [high, low], worker.local);
        for (n, segment) in plan.iter().enumerate() {
            carry.pass(unit.idle(segment.idle));
            worker.local.copy_from_slice(&states[n * summary..][..summary]);
            states[n * summary..][..summary].copy_from_slice(carry.high.numbers);
            let local = SummaryRef::new(layout, worker.local);
            self.keep_far([n, plan.len()], local, far);
            carry.add(self.problem, unit.passes(segment), local);
        }
        states[plan.len() * summary..][..summary].copy_from_slice(carry.high.numbers);
        self.leave(index, &carry.high);
        self.accumulate_far(&unit, plan.len(), far);
    }

    /// Keeps the far sum of segment `n` of `segments`, where `far` has memory for those of a bidirectional call.
    fn keep_far(&self, [n, segments]: [usize; 2], local: SummaryRef<'_, T>, far: &mut [T]) {
        if !far.is_empty() {
            let to = &mut far[(segments + 1 + n) * self.memory.entry..][..self.memory.entry];
            to.fill(T::ZERO);
            to[..self.problem.value_width].copy_from_slice(local.far());
            to[self.problem.value_width] = local.count();
        }
    }

    fn accumulate_far(&self, unit: &Unit<'_, T>, segments: usize, far: &mut [T]) {
        if far.is_empty() {
            return;
        }
        let entry = self.memory.entry;
        let (before, after) = far[..2 * (segments + 1) * entry].split_at_mut((segments + 1) * entry);
        accumulate(entry, [before, after]);
        for (state, sums) in self.problem.call.outside.into_iter().flatten().zip([before, after]) {
            for sum in sums.chunks_exact_mut(entry) {
                let (sums, count) = sum.split_at_mut(self.problem.value_width);
                add_values(unit.head(state), self.problem.dims.value_dim, sums, &mut count[0]);
            }
        }
    }

    /// One unit from its first segment to its last.
    fn unit(&self, index: usize, scratch: &mut [T]) {
        let problem = self.problem;
        let walk = self.walk(index);
        let unit = &walk.unit;
        self.visit_unseen_rows(index);
        let mut worker = self.memory.worker(problem, &mut Arena::new(scratch));
        let Worker { buffers, running, carry: [high, low], local, far, checkpoints } = &mut worker;
        buffers.start(problem, unit);
        let mut carry = self.carry(unit, [high, low], local);
        let mut local = Summary::new(self.memory.layout, local);
        let plan = segments(problem, unit);
        for (n, &segment) in plan.iter().enumerate() {
            carry.pass(unit.idle(segment.idle));
            // Nothing reads what would be carried beyond the last rows.
            let ends = problem.causal && n + 1 == plan.len() && self.last.is_none();
            if problem.causal {
                let mut visitor = segment.writes.then(|| (self.make)(index, segment.number));
                let visitor = visitor.as_mut().map(|visitor| visitor as &mut dyn Visitor<T>);
                walk.causal(segment, carry.high.view(), (&mut local, !ends), running, visitor, buffers);
            } else {
                walk.bidirectional_keys(segment.from, segment.to, &mut local, buffers);
                self.keep_far([n, plan.len()], local.view(), far);
            }
            if ends {
                return;
            }
            carry.add(problem, unit.passes(&segment), local.view());
        }
        if problem.causal {
            self.leave(index, &carry.high);
            return;
        }
        self.accumulate_far(unit, plan.len(), far);
        let far = FarSums::new(&plan, self.memory.entry, far);
        for rows in cut(problem, 0, unit.sequence.queries, problem.offset, true) {
            let total = carry.high.view();
            let mut visitor = (self.make)(index, rows.number);
            walk.bidirectional_rows((rows.from, rows.to), total, &far, &mut visitor, buffers, checkpoints);
            visitor.end(problem);
        }
    }

    /// Leaves the state after a unit's last row, if it is wanted.
    fn leave(&self, index: usize, sums: &Summary<'_, T>) {
        if let Some(places) = self.last {
            let walk = self.walk(index);
            store_state(self.problem, &walk.unit, walk.ring, sums, &places[index]);
        }
    }

    /// Rows that stand before the first key see nothing.
    fn visit_unseen_rows(&self, index: usize) {
        let unit = self.problem.unit(index);
        let rows = first_row(self.problem, &unit);
        if rows > 0 {
            let mut visitor = (self.make)(index, 0);
            for head in self.problem.heads(&unit) {
                (0..rows).for_each(|row| visitor.unseen(self.problem, &unit, head, row));
            }
        }
    }
}
