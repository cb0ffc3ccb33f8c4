//! The walk over the keys of one unit, last to first, with the sums of all rows that stand beyond.

use super::super::problem::{Problem, Table, Unit};
use super::super::row_pass::{Place, first_row};
use super::super::state::Head;
use super::super::summary::{Carry, Summary, SummaryRef};
use super::key_buffers::KeyBuffers;
use super::stages::{Stage, Work};
use super::{GradientSink, Source, row_sums};
use crate::call::SharedRows;
use crate::simd::Real;
use crate::simd::block::{all_finite, scale_by};
use crate::simd::rows::{Ahead, padded};

/// The walk over the keys of one unit.
pub(super) struct KeyWalk<'w, 'a, T: 'static> {
    pub problem: &'w Problem<'a, T>,
    pub unit: Unit<'a, T>,
    pub table: Option<Table<'w, T>>,
    pub source: Source<'w, T>,
    pub sink: GradientSink<'w, T>,
    /// Its number, and where the gradients of the parameters of Fourier positions go, `[unit, stage]`.
    pub index: usize,
    pub sums: SharedRows<'w, T>,
    /// The exponent of each row's piece; under an exponential map only.
    pub shifts: &'w [T],
    /// The sums of all rows, where every key reads them.
    pub row_sums: Option<SummaryRef<'w, T>>,
    /// Whether the call's rows take part. If not, gradients are added to what another pass wrote.
    pub rows: bool,
    /// The initial state, the place for its gradient, and the gradient of the final state.
    pub initial: Option<Head<&'w [T]>>,
    pub d_initial: Option<&'w Place<'w, T>>,
    pub d_final: Option<Head<&'w [T]>>,
}

impl<T: Real> KeyWalk<'_, '_, T> {
    /// Rows of the call that stand at a key, as positions `t`.
    pub fn positions(&self) -> std::ops::Range<isize> {
        if !self.rows {
            return 0..0;
        }
        let first = first_row(self.problem, &self.unit) as isize;
        first + self.problem.offset..self.unit.sequence.queries as isize + self.problem.offset
    }

    /// Loads `count` rows from position `from` on into the window; positions without a row become 0.
    pub fn load_rows(&self, head: usize, from: isize, count: usize, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let positions = self.positions();
        let within = |t: isize| (t - from).clamp(0, count as isize) as usize;
        let (a, b) = if positions.is_empty() { (0, 0) } else { (within(positions.start), within(positions.end)) };
        let padded_count = count.next_multiple_of(padded::<T>(1)).min(buffers.window);
        for range in [0..a, b..padded_count] {
            buffers.q[range.start * head_width..range.end * head_width].fill(T::ZERO);
            buffers.d[range.start * value_width..range.end * value_width].fill(T::ZERO);
            buffers.c[range.clone()].fill(T::ZERO);
            buffers.shift[range].fill(T::ZERO);
        }
        if a == b {
            return;
        }
        let row = (from + a as isize - problem.offset) as usize;
        let exp = problem.exponential;
        let q = &mut buffers.q[a * head_width..];
        problem.load_queries(&self.unit, head, row, b - a, &mut buffers.shift[a..], q, &mut buffers.lift);
        if exp {
            for n in 0..b - a {
                // Kept for the scale of an unnormalised row until `shift` takes its final meaning below.
                buffers.shift[a + n] += self.shifts[row + n];
            }
        }
        let shift = &*buffers.shift;
        let scale = |n: usize| if exp { shift[a + n].exp() } else { T::ONE };
        let (d, c) = (&mut buffers.d[a * value_width..], &mut buffers.c[a..]);
        self.source.load(problem, &self.unit, head, row, b - a, scale, d, c);
        for n in a..b {
            buffers.shift[n] = if exp { self.shifts[row + n - a] } else { T::ZERO };
        }
    }

    /// Queries, outputs and their gradients of the rows at the positions `from..to`, which come soon.
    pub fn rows_ahead(&self, head: usize, from: isize, to: isize) -> [Ahead<T>; 3] {
        let (from, to) = (from - self.problem.offset, to - self.problem.offset);
        let [out, d_out] = self.source.ahead(self.problem, &self.unit, head, from, to);
        [self.problem.queries_ahead(&self.unit, head, from, to), out, d_out]
    }

    /// Lets the rows of the window's first `rows` positions enter the state: `R += φ(q) dNᵀ`, `z += c φ(q)`.
    pub fn absorb(&self, rows: usize, ahead: &[Ahead<T>], local: &mut Summary<'_, T>, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let head_width = problem.head_width;
        if problem.exponential {
            // Row i counts e^{−M_i}; the exponent of the state is the largest −M_i.
            let mut top = *local.shift();
            for row in 0..rows {
                if buffers.q[row * head_width..][..head_width].iter().any(|&x| x != T::ZERO) {
                    top = top.max(-buffers.shift[row]);
                }
            }
            if !top.is_finite() {
                return;
            }
            local.raise(top);
            for row in 0..rows {
                let factor = (-buffers.shift[row] - top).exp();
                let factor = if factor.is_finite() { factor } else { T::ZERO };
                scale_by(&mut buffers.q[row * head_width..][..head_width], factor);
            }
        }
        if self.unit.gamma != 1.0 {
            for row in 1..rows {
                let factor = self.unit.decay(row);
                scale_by(&mut buffers.q[row * head_width..][..head_width], factor);
            }
        }
        row_sums::absorb(problem, rows, (&*buffers.q, &*buffers.d, &*buffers.c), ahead, local);
    }

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
            local.scale_content(self.unit.decay(count));
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
        if let Some(start) = start {
            far.copy_from_slice(start.far());
        }
        let mut end = to;
        while end > from {
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
                    let decay = self.unit.decay((to - stop) as usize);
                    self.piece(stage.number, at, count, start, decay, local, far, buffers);
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

    /// Forms the summary of a stage in `local`, and writes the gradients of its keys if given what the stage starts from.
    pub fn visit(
        &self,
        stage: Stage,
        start: Option<SummaryRef<'_, T>>,
        local: &mut Summary<'_, T>,
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
            Work::Keys | Work::InitialState => self.keys(stage, start, local, buffers),
        }
    }

    /// Lets a stage's summary enter the sums of all later ones; `last` ones may stay as they are.
    pub fn leave(&self, stage: Stage, last: bool, carry: &mut Carry<'_, T>, local: SummaryRef<'_, T>) {
        let initial = stage.work == Work::InitialState;
        if initial {
            self.store_content(carry.high.view());
        }
        if initial || !last {
            carry.add(self.problem, &self.unit, stage.passes(self.problem), local);
        }
        if initial {
            self.store_far(carry.high.view());
        }
    }

    /// What is left once every key has been walked over.
    pub fn finish(&self, buffers: &mut KeyBuffers<'_, T>) {
        if !self.rows {
            return;
        }
        self.add_rows_before(buffers);
        let sequence = &self.unit.sequence;
        for token in sequence.key_start + sequence.keys..sequence.key_start + sequence.keys + sequence.absent {
            let dims = &self.problem.dims;
            // SAFETY: all of a unit's keys belong to the task that calls.
            unsafe {
                self.sink.dk.row(sequence.batch, self.unit.kv_head, token, dims.head_dim).fill(T::ZERO);
                self.sink.dv.row(sequence.batch, self.unit.kv_head, token, dims.value_dim).fill(T::ZERO);
            }
        }
    }
}
