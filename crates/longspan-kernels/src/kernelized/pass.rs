//! A pass along a unit in stages, the one walk of forward and backward: over rows first to last, or over keys last to first.
//!
//! A stage forms its sums from zero (`local`) beside those of all stages before (`start`), so stages may come one after the other or
//! side by side: the sums are the same to the bit.

use super::problem::Problem;
use super::row_pass::whole_units;
use super::summary::{Carry, Layout, Summary, SummaryRef};
use crate::call::{Arena, SharedRows};
use crate::simd::Real;
use crate::threads::{self, parallel};

/// The pass along one unit. `shared` is what its stages share beside their sums.
pub(super) trait Pass<T: Real> {
    type Stage: Copy + Send + Sync;
    type Worker<'s>;

    fn stages(&self) -> Vec<Self::Stage>;

    /// Whether a stage writes results, for which it must know the sums of all stages before.
    fn writes(stage: &Self::Stage) -> bool;

    /// What sums fall by between the stage before and this one.
    fn idle(&self, stage: &Self::Stage) -> [T; 2];

    /// Whether the sums after the last stage are wanted.
    fn keeps(&self) -> bool;

    fn worker<'s>(&self, arena: &mut Arena<'s, T>) -> Self::Worker<'s>;

    /// Called before any stage writes results: adds what there is before the first stage to the carry. `memory` is as large as a summary.
    fn begin(&self, _carry: &mut Carry<'_, T>, _memory: &mut [T], _shared: &mut [T]) {}

    /// Forms the sums of a stage in `local` and, from those of all stages before, its results.
    fn visit(
        &self,
        stage: Self::Stage,
        start: SummaryRef<'_, T>,
        wanted: Wanted,
        local: &mut Summary<'_, T>,
        shared: &[T],
        worker: &mut Self::Worker<'_>,
    );

    /// Adds a stage's sums to those that all later stages start from.
    fn leave(&self, stage: Self::Stage, carry: &mut Carry<'_, T>, local: SummaryRef<'_, T>, shared: &mut [T]);

    /// Called once the sums of all stages are carried.
    fn end(&self, _sums: &Summary<'_, T>) {}

    /// Called when all results are written.
    fn finish(&self, _worker: &mut Self::Worker<'_>) {}
}

/// What a visit of a stage is for.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub results: bool,
    pub sums: bool,
}

/// Sizes of the memory of passes of one kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassMemory {
    layout: Layout,
    summary: usize,
    /// The sums of the stages of a unit that come side by side, and all that these share.
    states: usize,
    shared: usize,
    pub per_worker: usize,
}

impl PassMemory {
    /// For units of at most `stages`, which share `shared` numbers, and workers of `worker` numbers.
    pub fn new<T: Real>(problem: &Problem<'_, T>, stages: usize, shared: usize, worker: usize) -> Self {
        let layout = Layout::new(problem);
        let summary = layout.len::<T>();
        Self { layout, summary, states: stages * summary, shared, per_worker: worker + 3 * summary + shared }
    }

    /// Numbers of scratch that [`run`](Self::run) takes.
    pub fn len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        (problem.units() - whole_units(problem)) * (self.states + self.shared) + threads::count() * self.per_worker
    }

    /// A unit whose stages come one after the other.
    pub fn unit<T: Real, P: Pass<T>>(&self, pass: &P, scratch: &mut [T]) {
        let mut arena = Arena::new(scratch);
        let mut carry = Carry::new(self.layout, arena.take(self.summary), arena.take(self.summary));
        let (local, shared) = (arena.take(self.summary), arena.take(self.shared));
        let mut worker = pass.worker(&mut arena);
        pass.begin(&mut carry, local, shared);
        let mut local = Summary::new(self.layout, local);
        let stages = pass.stages();
        for (n, &stage) in stages.iter().enumerate() {
            carry.pass(pass.idle(&stage));
            // Nothing reads what would be carried beyond the last one.
            let wanted = Wanted { results: true, sums: n + 1 < stages.len() || pass.keeps() };
            pass.visit(stage, carry.high.view(), wanted, &mut local, shared, &mut worker);
            if wanted.sums {
                pass.leave(stage, &mut carry, local.view(), shared);
            }
        }
        pass.end(&carry.high);
        pass.finish(&mut worker);
    }

    /// The units from `from` on, which is at most [`whole_units`].
    pub fn run<T: Real, P: Pass<T>>(
        &self,
        problem: &Problem<'_, T>,
        pass: &(impl Fn(usize) -> P + Sync),
        from: usize,
        scratch: &mut [T],
    ) {
        let &Self { layout, summary, per_worker, .. } = self;
        let (whole, per_unit) = (whole_units(problem), self.states + self.shared);
        let (memory, scratch) = scratch.split_at_mut((problem.units() - whole) * per_unit);
        parallel(whole - from, scratch, per_worker, |n, scratch| self.unit(&pass(from + n), scratch));

        // The units that are left, counted from 0.
        let units = problem.units() - whole;
        if units == 0 {
            return;
        }
        let pass = |unit: usize| pass(whole + unit);
        let plans: Vec<Vec<P::Stage>> = (0..units).map(|unit| pass(unit).stages()).collect();
        let tasks: Vec<(usize, usize)> =
            plans.iter().enumerate().flat_map(|(unit, plan)| (0..plan.len()).map(move |n| (unit, n))).collect();
        {
            let places = SharedRows::new(&mut *memory, [per_unit, 0, summary]);
            parallel(tasks.len(), scratch, per_worker, |task, scratch| {
                let mut arena = Arena::new(scratch);
                let mut nothing = Summary::new(layout, arena.take(summary));
                nothing.clear();
                let (unit, n) = tasks[task];
                let pass = pass(unit);
                // SAFETY: each (unit, stage) is one task's own.
                let mut local = Summary::new(layout, unsafe { places.row(unit, 0, n, summary) });
                let wanted = Wanted { results: false, sums: true };
                let worker = &mut pass.worker(&mut arena);
                pass.visit(plans[unit][n], nothing.view(), wanted, &mut local, &[], worker);
            });
            parallel(units, scratch, per_worker, |unit, scratch| {
                let mut arena = Arena::new(scratch);
                let mut carry = Carry::new(layout, arena.take(summary), arena.take(summary));
                let local = arena.take(summary);
                let (pass, stages) = (pass(unit), plans[unit].iter());
                // SAFETY: each unit's numbers are one task's own.
                let (states, shared) = unsafe { places.row(unit, 0, 0, per_unit) }.split_at_mut(self.states);
                pass.begin(&mut carry, local, shared);
                for (n, (&stage, state)) in stages.zip(states.chunks_exact_mut(summary)).enumerate() {
                    carry.pass(pass.idle(&stage));
                    local.copy_from_slice(state);
                    state.copy_from_slice(carry.high.numbers);
                    if n + 1 < plans[unit].len() || pass.keeps() {
                        pass.leave(stage, &mut carry, SummaryRef::new(layout, local), shared);
                    }
                }
                pass.end(&carry.high);
            });
        }
        let memory = &*memory;
        let tasks: Vec<(usize, usize)> = tasks.into_iter().filter(|&(unit, n)| P::writes(&plans[unit][n])).collect();
        parallel(tasks.len(), scratch, per_worker, |task, scratch| {
            let mut arena = Arena::new(scratch);
            let mut local = Summary::new(layout, arena.take(summary));
            let (unit, n) = tasks[task];
            let pass = pass(unit);
            let (states, shared) = memory[unit * per_unit..][..per_unit].split_at(self.states);
            let start = SummaryRef::new(layout, &states[n * summary..][..summary]);
            let (wanted, worker) = (Wanted { results: true, sums: false }, &mut pass.worker(&mut arena));
            pass.visit(plans[unit][n], start, wanted, &mut local, shared, worker);
        });
        parallel(units, scratch, per_worker, |unit, scratch| {
            let pass = pass(unit);
            pass.finish(&mut pass.worker(&mut Arena::new(scratch)));
        });
    }
}
