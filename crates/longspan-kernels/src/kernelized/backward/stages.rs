//! The walk over the keys in stages, one after the other or side by side.

use super::super::problem::Problem;
use super::super::row_pass::{cut, cut_count, whole_units};
use super::super::summary::{Carry, Layout, Summary, SummaryRef};
use super::super::tile::Sizes;
use super::key_buffers::KeyBuffers;
use super::key_pass::{Stage, Work};
use super::key_walk::KeyWalk;
use crate::call::{Arena, SharedRows};
use crate::simd::Real;
use crate::threads::parallel;

/// The stages of a unit in the order of the walk: rows that every key must know of first, then the keys, last to first.
fn stages<T: Real>(walk: &KeyWalk<'_, '_, T>) -> Vec<Stage> {
    let problem = walk.problem;
    let keys = walk.unit.sequence.keys as isize;
    let positions = walk.positions();
    let mut list = Vec::new();
    let mut add = |from: isize, to: isize, work: Work| {
        let (from, to) = (from, to.max(from));
        let mut parts = cut(problem, 0, (to - from) as usize, 0, false);
        parts.reverse();
        let place = |at: usize| from + at as isize;
        list.extend(parts.into_iter().map(|part| Stage {
            from: place(part.from),
            to: place(part.to),
            work,
            idle: 0,
            number: 0,
        }));
    };
    let mut idle = 0;
    if !positions.is_empty() {
        let reach = problem.radius.unwrap_or(0) as isize;
        let mut rows = |from, to, content, far| add(from, to, Work::Rows { content, far });
        if problem.causal {
            let from = keys.max(positions.start - reach);
            rows(from, positions.end, problem.content, problem.radius);
            if positions.end > from {
                idle = (from - keys) as usize;
            }
        } else {
            match problem.radius {
                Some(0) => rows(positions.start, positions.end, false, Some(0)),
                Some(radius) => rows(keys.max(positions.start - reach), positions.end - reach, false, Some(radius)),
                None => {}
            }
        }
    }
    let end = |from: isize, to: isize, work: Work| Stage { from, to, work, idle: 0, number: 0 };
    let rows = list.len();
    if walk.row_sums.is_some() {
        list.push(end(0, 0, Work::RowSums));
    }
    if walk.d_final.is_some() {
        list.push(end(keys, keys, Work::FinalState));
    }
    let mut parts = cut(problem, 0, keys as usize, 0, true);
    parts.reverse();
    list.extend(parts.into_iter().map(|part| end(part.from as isize, part.to as isize, Work::Keys)));
    if walk.d_initial.is_some() {
        list.push(end(-(problem.radius.unwrap_or(0) as isize), 0, Work::InitialState));
    }
    if let Some(stage) = list.get_mut(rows) {
        stage.idle = idle;
    }
    list.iter_mut().enumerate().for_each(|(number, stage)| stage.number = number);
    list
}

/// Sizes of the working memory of the walk over the keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyMemory {
    layout: Layout,
    summary: usize,
    chunk: usize,
    pub per_worker: usize,
}

impl KeyMemory {
    pub fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let chunk = Sizes::new(problem).chunk;
        let layout = Layout::new(problem);
        let summary = layout.len::<T>();
        Self {
            layout,
            summary,
            chunk,
            per_worker: Arena::measure(|arena| KeyBuffers::new(problem, chunk, arena)) + 3 * summary,
        }
    }

    /// Most stages that a unit can have: segments of rows and of keys, and two states.
    pub fn most_stages<T: Real>(problem: &Problem<'_, T>) -> usize {
        let count = |tokens: usize| cut_count(problem, tokens);
        problem.sequences.iter().map(|s| count(s.queries) + 4 + count(s.keys)).max().unwrap_or(0)
    }

    pub fn len<T: Real>(&self, problem: &Problem<'_, T>, workers: usize) -> usize {
        let cut = problem.units() - whole_units(problem);
        cut * Self::most_stages(problem) * self.summary + workers * self.per_worker
    }

    /// Walks over the keys of a unit whose stages come one after the other.
    pub fn unit<T: Real>(&self, walk: &KeyWalk<'_, '_, T>, scratch: &mut [T]) {
        let &Self { layout, summary, chunk, .. } = self;
        let mut arena = Arena::new(scratch);
        let mut buffers = KeyBuffers::new(walk.problem, chunk, &mut arena);
        let mut carry = Carry::new(layout, arena.take(summary), arena.take(summary));
        let mut local = Summary::new(layout, arena.take(summary));
        buffers.start(&walk.unit, walk.problem);
        let plan = stages(walk);
        for (n, &stage) in plan.iter().enumerate() {
            carry.pass(walk.unit.idle(stage.idle));
            walk.visit(stage, Some(carry.high.view()), &mut local, &mut buffers);
            walk.leave(stage, n + 1 == plan.len(), &mut carry, local.view());
        }
        walk.finish(&mut buffers);
    }

    /// Walks over the keys of the units from `from` on, which is at most [`whole_units`].
    pub fn run<'w, 'a, T: Real>(
        &self,
        problem: &'w Problem<'a, T>,
        walk: &(impl Fn(usize) -> KeyWalk<'w, 'a, T> + Sync),
        from: usize,
        scratch: &mut [T],
    ) {
        let &Self { layout, summary, chunk, per_worker } = self;
        let whole = whole_units(problem);
        let most = Self::most_stages(problem);
        let (shared, scratch) = scratch.split_at_mut((problem.units() - whole) * most * summary);
        parallel(whole - from, scratch, per_worker, |n, scratch| self.unit(&walk(from + n), scratch));

        // The units that are left; `n` counts them.
        let units = problem.units() - whole;
        if units == 0 {
            return;
        }
        let walk = |n: usize| walk(whole + n);
        let plans: Vec<Vec<Stage>> = (0..units).map(|n| stages(&walk(n))).collect();
        let tasks: Vec<(usize, usize)> =
            plans.iter().enumerate().flat_map(|(unit, plan)| (0..plan.len()).map(move |n| (unit, n))).collect();
        {
            let states = SharedRows::new(&mut *shared, [most * summary, 0, summary]);
            parallel(tasks.len(), scratch, per_worker, |task, scratch| {
                let mut buffers = KeyBuffers::new(problem, chunk, &mut Arena::new(scratch));
                let (index, n) = tasks[task];
                let walk = walk(index);
                buffers.start(&walk.unit, problem);
                // SAFETY: each (unit, stage) is one task's own.
                let mut local = Summary::new(layout, unsafe { states.row(index, 0, n, summary) });
                walk.visit(plans[index][n], None, &mut local, &mut buffers);
            });
            parallel(units, scratch, per_worker, |index, scratch| {
                let mut arena = Arena::new(scratch);
                let mut carry = Carry::new(layout, arena.take(summary), arena.take(summary));
                let local = arena.take(summary);
                let walk = walk(index);
                for (n, &stage) in plans[index].iter().enumerate() {
                    carry.pass(walk.unit.idle(stage.idle));
                    // SAFETY: each unit's states are one task's own.
                    let state = unsafe { states.row(index, 0, n, summary) };
                    local.copy_from_slice(state);
                    state.copy_from_slice(carry.high.numbers);
                    walk.leave(stage, n + 1 == plans[index].len(), &mut carry, SummaryRef::new(layout, local));
                }
            });
        }
        let shared = &*shared;
        let tasks: Vec<(usize, usize)> = tasks.into_iter().filter(|&(index, n)| plans[index][n].writes()).collect();
        parallel(tasks.len(), scratch, per_worker, |task, scratch| {
            let mut arena = Arena::new(scratch);
            let mut buffers = KeyBuffers::new(problem, chunk, &mut arena);
            let mut local = Summary::new(layout, arena.take(summary));
            let (index, n) = tasks[task];
            let walk = walk(index);
            buffers.start(&walk.unit, problem);
            let state = SummaryRef::new(layout, &shared[(index * most + n) * summary..][..summary]);
            walk.visit(plans[index][n], Some(state), &mut local, &mut buffers);
        });
        parallel(units, scratch, per_worker, |index, scratch| {
            let mut buffers = KeyBuffers::new(problem, chunk, &mut Arena::new(scratch));
            walk(index).finish(&mut buffers);
        });
    }
}
