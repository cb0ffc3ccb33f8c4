//! The stages of the walk over the keys of one unit.

use super::super::pass::{Pass, Wanted};
use super::super::problem::{Problem, Unit};
use super::super::summary::{Carry, Summary, SummaryRef};
use super::key_buffers::KeyBuffers;
use super::key_walk::KeyWalk;
use super::stages::stages;
use crate::call::Arena;
use crate::simd::Real;
use crate::simd::block::all_finite;
use crate::threads;

#[derive(Debug, Clone, Copy)]
pub(super) struct Stage {
    /// Positions, or keys.
    pub from: isize,
    pub to: isize,
    pub work: Work,
    /// Positions without row or key between the stage before and this one.
    pub idle: usize,
    /// Its place among the unit's stages.
    pub number: usize,
}

impl Stage {
    /// What content and far sums fall by over the stage; without a causal mask the order of time has no meaning, nor has decay. The
    /// far sum at a key is that of rows from `R` later on.
    pub fn passes<T: Real>(&self, problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> [T; 2] {
        if !problem.causal {
            return [T::ONE; 2];
        }
        let radius = problem.radius.unwrap_or(0) as isize;
        [0, radius].map(|lag| unit.decay.between(self.from + lag, self.to + lag))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Rows that only enter the sums: whether the state, and how many positions later the far sum.
    Rows { content: bool, far: Option<usize> },
    /// The sums of all rows, which the pass over the rows formed.
    RowSums,
    /// The gradient of the final state enters the sums.
    FinalState,
    /// Keys whose gradients are wanted.
    Keys,
    /// The ring of the initial state, and all that the state holds beside it.
    InitialState,
}

impl<T: Real> KeyWalk<'_, '_, T> {
    /// Sums up the rows of a stage that come before any key is looked at.
    fn sum_rows(
        &self,
        (from, to): (isize, isize),
        (content, far): (bool, Option<usize>),
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        local.clear();
        let mut end = to;
        while end > from {
            threads::check();
            let start = (end - buffers.chunk as isize).max(from);
            self.pass(start, (end - start) as usize, content, far, local, buffers);
            end = start;
        }
    }

    /// Lets `count` positions from `start` on pass: rows at them enter the state, rows `far` later the far sum.
    fn pass(
        &self,
        start: isize,
        count: usize,
        content: bool,
        far: Option<usize>,
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        if content {
            buffers.decays.load(self.unit.decay, start, count, (0, 0, 0));
            local.scale_content(buffers.decays.total());
            for head in problem.heads(&self.unit) {
                self.load_rows(head, start, count, buffers);
                let ahead = self.rows_ahead(head, start - buffers.chunk as isize, start);
                self.absorb(count, &ahead, local, buffers);
            }
        }
        if let Some(lag) = far {
            self.clear_far_rows(start + lag as isize, count, buffers);
            for head in problem.heads(&self.unit) {
                self.load_rows(head, start + lag as isize, count, buffers);
                self.add_far_rows(head, 0, count, 0, buffers);
            }
            self.unit.decay.steps(start + lag as isize, &mut buffers.far_steps[..count]);
            self.sum_far(count, local, buffers);
        }
    }

    /// Walks the keys of a stage, last to first; `local` becomes the summary of the rows that stand at them. Their
    /// gradients are written if `start`, the state of all rows that stand beyond them, is given.
    fn keys(
        &self,
        stage: Stage,
        start: Option<SummaryRef<'_, T>>,
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        local.clear();
        let Stage { from, to, .. } = stage;
        buffers.state_transposed = false;
        let far = std::mem::take(&mut buffers.running);
        let mut far_count = T::ZERO;
        if let Some(start) = start {
            far.copy_from_slice(start.far());
            far_count = start.count();
        }
        let mut start_decay = T::ONE;
        let mut end = to;
        while end > from {
            threads::check();
            let begin = (end - buffers.chunk as isize).max(from);
            // Pieces from the chunk's first key on, the last one first.
            let mut cuts = vec![begin];
            let mut at = begin + self.piece_len(begin, end) as isize;
            while at < end {
                cuts.push(at);
                at += self.piece_len(at, end) as isize;
            }
            let mut stop = end;
            for &at in cuts.iter().rev() {
                let count = (stop - at) as usize;
                if let Some(start) = start {
                    let far = (&mut *far, &mut far_count);
                    self.piece(stage.number, (at, count), (start, start_decay), local, far, buffers);
                    start_decay = self.unit.decay.over_both([start_decay, buffers.decays.total()], (at, to));
                } else {
                    let far = problem.radius.filter(|&radius| problem.causal || radius > 0);
                    let content = problem.content && problem.causal && at >= 0;
                    self.pass(at, count, content, far, local, buffers);
                }
                stop = at;
            }
            end = begin;
        }
        buffers.running = far;
    }

    /// How many keys from `at` one dense tile may hold: all up to `end`, unless a row's inputs are not finite (then one,
    /// so that 0 · NaN reaches no key that the row does not see) or a key rises far above the first.
    fn piece_len(&self, at: isize, end: isize) -> usize {
        let problem = self.problem;
        let all = (end - at) as usize;
        // Every row sees the ring of the initial state.
        let Ok(key) = usize::try_from(at) else { return all };
        if !problem.causal {
            return all;
        }
        let positions = self.positions();
        let from = at.max(positions.start);
        let count = (end.min(positions.end) - from).max(0) as usize;
        if count > 0 {
            let row = (from - problem.offset) as usize;
            for head in problem.heads(&self.unit) {
                let (out, d_out) = self.source.rows(&self.unit, head);
                let q = problem.queries(&self.unit, head);
                let dv = problem.dims.value_dim;
                let finite = problem.mapping.all_finite(q.skip(row), count)
                    && all_finite(d_out.skip(row), count, dv)
                    && all_finite(out.skip(row), count, dv);
                if !finite {
                    return 1;
                }
            }
        }
        if problem.content && problem.exponential {
            return self.unit.exp_piece(problem, key, key + all, T::NEG_INFINITY).0;
        }
        all
    }
}

impl<T: Real> Pass<T> for KeyWalk<'_, '_, T> {
    type Stage = Stage;
    type Worker<'s> = KeyBuffers<'s, T>;

    fn stages(&self) -> Vec<Stage> {
        stages(self)
    }

    fn writes(stage: &Stage) -> bool {
        matches!(stage.work, Work::Keys | Work::InitialState)
    }

    fn idle(&self, stage: &Stage) -> [T; 2] {
        self.unit.idle(stage.idle)
    }

    fn keeps(&self) -> bool {
        self.d_initial.is_some()
    }

    fn worker<'s>(&self, arena: &mut Arena<'s, T>) -> KeyBuffers<'s, T> {
        let mut buffers = KeyBuffers::new(self.problem, self.chunk, arena);
        buffers.start(&self.unit, self.problem);
        buffers
    }

    fn visit(
        &self,
        stage: Stage,
        start: SummaryRef<'_, T>,
        wanted: Wanted,
        local: &mut Summary<'_, T>,
        _: &[T],
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        match stage.work {
            Work::Rows { content, far } => self.sum_rows((stage.from, stage.to), (content, far), local, buffers),
            Work::RowSums => {
                if let Some(sums) = self.row_sums {
                    local.copy(sums);
                }
            }
            Work::FinalState => self.load_final(local),
            Work::Keys | Work::InitialState => self.keys(stage, wanted.results.then_some(start), local, buffers),
        }
    }

    fn leave(&self, stage: Stage, carry: &mut Carry<'_, T>, local: SummaryRef<'_, T>, _: &mut [T]) {
        let initial = stage.work == Work::InitialState;
        if initial {
            self.store_content(carry.high.view());
        }
        carry.add(self.problem, stage.passes(self.problem, &self.unit), local);
        if initial {
            self.store_far(carry.high.view());
        }
    }

    fn finish(&self, buffers: &mut KeyBuffers<'_, T>) {
        if self.rows {
            self.finish_gates();
            self.add_rows_before(buffers);
        }
    }
}
