//! The walk over the keys of one unit, last to first: the rows that it loads and lets enter the sums of later ones.

use super::super::problem::{Problem, Table, Unit};
use super::super::row_pass::first_row;
use super::super::state::Head;
use super::super::summary::{Place, Summary, SummaryRef};
use super::key_buffers::KeyBuffers;
use super::row_sums;
use super::source::{GradientSink, Source};
use crate::call::SharedRows;
use crate::simd::Real;
use crate::simd::block::{scale_by, scale_rows};
use crate::simd::rows::{Ahead, padded};

pub(super) struct KeyWalk<'w, 'a, T: 'static> {
    pub problem: &'w Problem<'a, T>,
    pub unit: Unit<'a, T>,
    pub table: Option<Table<'w, T>>,
    pub source: Source<'w, T>,
    pub sink: GradientSink<'w, T>,
    /// Keys of a chunk.
    pub chunk: usize,
    /// Its number, and where the gradients of the parameters of Fourier positions go, `[unit, stage]`.
    pub index: usize,
    pub sums: SharedRows<'w, T>,
    /// The exponent of each row's piece, head by head; under an exponential map only.
    pub shifts: &'w [T],
    /// The sums of all rows, where every key reads them.
    pub row_sums: Option<SummaryRef<'w, T>>,
    /// Where gradients of gates go, `[batch, kv_heads, keys]`.
    pub gates: Option<SharedRows<'w, T>>,
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
        let of_head = self.shifts.len() / problem.dims.group().max(1);
        let shifts = &self.shifts[(head - problem.heads(&self.unit).start) * of_head..];
        if exp {
            for n in 0..b - a {
                // Kept for the scale of an unnormalised row until `shift` takes its final meaning below.
                buffers.shift[a + n] += shifts[row + n];
            }
        }
        let shift = &*buffers.shift;
        let scale = |n: usize| if exp { shift[a + n].exp() } else { T::ONE };
        let (d, c) = (&mut buffers.d[a * value_width..], &mut buffers.c[a..]);
        self.source.load(problem, &self.unit, head, row, b - a, scale, d, c);
        for n in a..b {
            buffers.shift[n] = if exp { shifts[row + n - a] } else { T::ZERO };
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
        if !self.unit.decay.is_none() {
            scale_rows((buffers.q, head_width), head_width, &buffers.decays.from_start[..rows]);
        }
        row_sums::absorb(problem, rows, (&*buffers.q, &*buffers.d, &*buffers.c), ahead, local);
    }
}
