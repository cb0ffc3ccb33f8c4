//! Rows that see a key as one of their far ones: they share its weight, so a running sum of them is all a key needs.

use super::super::problem::CHUNK;
use super::super::summary::Summary;
use super::key_buffers::KeyBuffers;
use super::key_walk::KeyWalk;
use crate::kernelized::running_sum::{AddRunning, Run};
use crate::simd::block::{add_scaled, decay_by, dot};
use crate::simd::rows::pieces;
use crate::simd::{Real, dispatch};
use crate::threads;

impl<T: Real> KeyWalk<'_, '_, T> {
    /// Empties the far rows for the positions `first..first + count`.
    pub fn clear_far_rows(&self, first: isize, count: usize, buffers: &mut KeyBuffers<'_, T>) {
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        buffers.far_rows[..count * width].fill(T::ZERO);
        buffers.far_counts[..count].fill(T::ZERO);
        // The final far sum holds key `j` as a row at `L − 1` does, one token further, up to `j = L − 1 − R`.
        let place = usize::try_from(self.unit.sequence.keys as isize - 1 - first).ok().filter(|&place| place < count);
        if let (Some(state), Some(place)) = (&self.d_final, place)
            && self.unit.sequence.keys > 0
        {
            let keys = self.unit.sequence.keys as isize;
            let decay = self.unit.decay.between(keys - 1, keys);
            let row = &mut buffers.far_rows[place * width..][..value_dim];
            add_scaled(row, decay, &state.far[..value_dim]);
            buffers.far_counts[place] = decay * state.far[value_dim];
        }
    }

    /// Adds `w·[dN, c]` of the window's rows `first..first + count` to the far rows, where `w` is their weight for row
    /// `column` of the table.
    ///
    /// The weights are taken as dots, not from `relative`, so that a segment's far sum has the same bits whether its
    /// keys are looked at or only summed up.
    pub fn add_far_rows(
        &self,
        head: usize,
        first: usize,
        count: usize,
        column: usize,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let Some(table) = &self.table else { return };
        let entry = &table.rows(head)[column * head_width..][..head_width];
        for n in 0..count {
            let row = first + n;
            let mut weight = dot(&buffers.q[row * head_width..][..head_width], entry);
            if problem.exponential && weight != T::ZERO {
                weight *= (table.shift(head) - buffers.shift[row]).exp();
            }
            let d = &buffers.d[row * value_width..][..value_width];
            add_scaled(&mut buffers.far_rows[n * value_width..][..value_width], weight, d);
            buffers.far_counts[n] += weight * buffers.c[row];
        }
    }

    /// Runs the far sum down over `count` far rows, and adds it to those of `to` with the weights `gains`. At a position it is the sum of
    /// the far rows from there on, each with its decay since there.
    pub fn run_far(&self, count: usize, far: &mut [T], (to, gains): (&mut [T], &[T]), rows: &[T], steps: &[T]) {
        let width = self.problem.value_width;
        let Some(others) = count.checked_sub(1) else { return };
        if steps[others] != T::ONE {
            decay_by(far, steps[others]);
        }
        // The first position, which comes last, is not followed by a decay.
        let (first, rows) = rows.split_at(width);
        let (to_first, to) = to.split_at_mut(width.min(to.len()));
        let (ones, weights) = (&[T::ONE; CHUNK], gains.get(1..).unwrap_or_default());
        let run = Run {
            rows,
            row_length: width,
            count: others,
            reverse: true,
            gains: ones,
            decays: steps,
            weights,
            weight_step: 1,
        };
        dispatch(AddRunning { sum: far, run, to, to_row: width });
        add_scaled(far, T::ONE, first);
        if !to_first.is_empty() {
            add_scaled(to_first, gains[0], far);
        }
    }

    /// Runs the far sum of a summary down over `count` far rows.
    pub fn sum_far(&self, count: usize, local: &mut Summary<'_, T>, buffers: &KeyBuffers<'_, T>) {
        self.run_far(count, local.far(), (&mut [], &[]), buffers.far_rows, buffers.far_steps);
        let total = local.count();
        for (&term, &step) in buffers.far_counts[..count].iter().zip(&*buffers.far_steps).rev() {
            *total = *total * step + term;
        }
    }

    /// Adds the share of rows that stand `R` or more before a key (bidirectional), first key to last.
    pub fn add_rows_before(&self, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let Some(radius) = problem.radius.filter(|&radius| radius > 0 && !problem.causal) else { return };
        let unit = &self.unit;
        let width = problem.value_width;
        let far = std::mem::take(&mut buffers.running);
        far.fill(T::ZERO);
        let lag = |key: usize| key as isize - radius as isize;
        // Rows that stand more than R before key 0; under a far offset they end long before it.
        let std::ops::Range { start: mut position, end } = self.positions();
        let end = lag(0).min(end);
        while position < end {
            let count = ((end - position) as usize).min(buffers.chunk);
            self.run_before(position, count, radius, far, false, buffers);
            position += count as isize;
        }
        for (key, keys) in pieces(0..unit.sequence.keys, buffers.chunk) {
            buffers.dv[..keys * width].fill(T::ZERO);
            self.run_before(lag(key), keys, radius, far, true, buffers);
            for n in (0..keys).filter(|&n| !unit.sequence.ignores(key + n)) {
                let token = unit.sequence.key_start + key + n;
                // SAFETY: all of a unit's keys belong to the task that calls.
                let dv =
                    unsafe { self.sink.rows.dv.row(unit.sequence.batch, unit.kv_head, token, problem.dims.value_dim) };
                add_scaled(dv, T::ONE, &buffers.dv[n * width..]);
            }
        }
        buffers.running = far;
    }

    fn run_before(
        &self,
        from: isize,
        count: usize,
        radius: usize,
        far: &mut [T],
        writes: bool,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        threads::check();
        let width = self.problem.value_width;
        buffers.far_rows[..count * width].fill(T::ZERO);
        buffers.far_counts[..count].fill(T::ZERO);
        for head in self.problem.heads(&self.unit) {
            self.load_rows(head, from, count, buffers);
            self.add_far_rows(head, 0, count, 2 * radius, buffers);
        }
        let run = Run {
            rows: buffers.far_rows,
            row_length: width,
            count,
            reverse: false,
            gains: &[T::ONE; CHUNK],
            decays: &[T::ONE; CHUNK],
            weights: &[T::ONE],
            weight_step: 0,
        };
        let to: &mut [T] = if writes { buffers.dv } else { &mut [] };
        dispatch(AddRunning { sum: far, run, to, to_row: width });
    }
}
