//! Where a backward pass starts from, and where it writes.

use super::super::features::PositionSink;
use super::super::problem::{Problem, Unit};
use crate::call::{self, Cotangent, View};
use crate::feature_map::elementwise::copy_rows;
use crate::simd::Real;
use crate::simd::rows::{Ahead, Rows};

#[derive(Clone, Copy)]
pub(in crate::kernelized) struct GradientSink<'a, T> {
    pub rows: call::GradientSink<'a, T>,
    /// For given positions.
    pub positions: Option<PositionSink<'a, T>>,
}

/// What the rows' gradients start from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a, T> {
    pub cotangent: &'a Cotangent<'a, T>,
}

impl<'a, T: Real> Source<'a, T> {
    pub fn rows(&self, unit: &Unit<'_, T>, head: usize) -> (Rows<'a, T>, Rows<'a, T>) {
        let sequence = &unit.sequence;
        let of = |view: &View<'a, T>| view.rows(sequence.batch, head).skip(sequence.query_start);
        (of(&self.cotangent.out), of(&self.cotangent.d_out))
    }

    /// The same that come soon: the rows `from..to` of the sequence.
    pub fn ahead(
        &self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        head: usize,
        from: isize,
        to: isize,
    ) -> [Ahead<T>; 2] {
        let (out, d_out) = self.rows(unit, head);
        [out, d_out].map(|rows| Ahead::new(rows, from, to, unit.sequence.queries, problem.dims.value_dim))
    }

    /// Writes `dN` of `count` rows from `first` into a block and `c` beside it; `scale[n]` multiplies row `n` where the
    /// call does not normalise.
    #[allow(clippy::too_many_arguments)]
    pub fn load(
        &self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        head: usize,
        first: usize,
        count: usize,
        scale: impl Fn(usize) -> T,
        d: &mut [T],
        c: &mut [T],
    ) {
        let (width, value_dim) = (problem.value_width, problem.dims.value_dim);
        copy_rows(self.rows(unit, head).1.skip(first), (count, value_dim), None, (d, width));
        let normalizes = problem.attention.normalizes();
        let gain = |row: usize, denominator: T| match normalizes {
            false => Some(scale(row - first)),
            true => (!problem.gives_nothing(denominator)).then(|| T::ONE / denominator),
        };
        let rows = (&unit.sequence, head, first..first + count);
        self.cotangent.weigh_rows(&problem.dims, rows, normalizes, gain, (d, width), c);
    }
}
