//! What the passes of a backward call share.

use std::ops::Range;

use super::bias_gradient;
use super::chunks::RowBlock;
use super::exponents::Shared;
use super::map_sums::{self, MapSums};
use super::problem::{Problem, Unit};
use super::state_gradient::StateGradients;
use crate::call::{Arena, Cotangent, GradientSink, Scratch};
use crate::feature_map::elementwise::copy_rows;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::rows::padded;
use crate::threads;

#[derive(Clone, Copy)]
pub(super) struct Backward<'x, 'a, T: 'static> {
    pub problem: &'x Problem<'a, T>,
    pub cotangent: &'x Cotangent<'x, T>,
    pub sink: GradientSink<'x, T>,
    pub states: StateGradients<'x, T>,
}

pub(super) struct Pass<'x, 'a, T: 'static> {
    pub call: Backward<'x, 'a, T>,
    pub shared: Shared<'x, T>,
    pub map_sums: MapSums<'x, T>,
}

/// Numbers that an algorithm wants: for each worker, for itself, and of `f64` whatever the number type.
#[derive(Default)]
pub(super) struct Sizes {
    pub per_worker: usize,
    pub own: usize,
    pub own_f64: usize,
}

/// The memory of that many numbers, and lines of 0 for the gradients of biases.
pub(super) struct Memory<'m, T> {
    pub lines: &'m mut [T],
    pub workers: &'m mut [T],
    pub per_worker: usize,
    pub own: &'m mut [T],
    pub own_f64: &'m mut [f64],
}

impl<'x, 'a, T: Real> Backward<'x, 'a, T> {
    /// Computes every gradient of the call: `passes` all but those of parameters, which are summed up here from what it leaves
    /// in the lines and in the sums for a learned map.
    pub fn run(
        self,
        parameters: &mut [&mut [T]],
        sizes: Sizes,
        scratch: &mut Scratch<T>,
        passes: impl FnOnce(&Pass<'_, 'a, T>, Memory<'_, T>),
    ) {
        let problem = self.problem;
        let Sizes { per_worker, own, own_f64 } = sizes;
        let (lines_len, map_len) = (bias_gradient::lines_len(problem), MapSums::len(problem));
        let len = problem.shared_len() + [lines_len, map_len, own].map(padded::<T>).iter().sum::<usize>();
        let (numbers, own_f64) = scratch.take_with_f64(len + threads::count() * per_worker, own_f64);
        let mut arena = Arena::new(numbers);
        let shared = problem.shared(&mut arena);
        let (lines, map_numbers, own) = (arena.take(lines_len), arena.take(map_len), arena.take(own));
        lines.fill(T::ZERO);
        let map_sums = MapSums::new(problem, &mut *map_numbers);
        let memory = Memory { lines: &mut *lines, workers: arena.rest(), per_worker, own, own_f64 };
        passes(&Pass { call: self, shared, map_sums }, memory);
        let [d_bias, of_map @ ..] = parameters else { return };
        bias_gradient::reduce(problem, lines, d_bias);
        map_sums::write(problem, map_numbers, of_map);
    }
}

impl<T: Real> Pass<'_, '_, T> {
    pub fn load_rows(
        &self,
        head: (&Unit<'_, T>, usize),
        rows: Range<usize>,
        block: &mut RowBlock<'_, T>,
        map: &mut MapBuffers<'_, T>,
    ) {
        let RowBlock { q, q_shifts, d, c } = block;
        self.call.problem.load_queries(head, (rows.start, rows.len()), (q, q_shifts), map);
        self.load_cotangent(head, rows, q_shifts, (d, c));
    }

    /// Loads `d` and `c` of rows of a head, as [`RowBlock`] has them.
    pub fn load_cotangent(
        &self,
        (unit, head): (&Unit<'_, T>, usize),
        rows: Range<usize>,
        q_shifts: &[T],
        (d, c): (&mut [T], &mut [T]),
    ) {
        let (Backward { problem, cotangent, .. }, shared) = (&self.call, &self.shared);
        let (width, sequence) = (problem.value_width, &unit.sequence);
        let from = cotangent.d_out.rows(sequence.batch, head).skip(sequence.query_start + rows.start);
        copy_rows(from, (rows.len(), problem.dims.value_dim), None, (d, width));
        let (first, normalizes) = (rows.start, problem.toeplitz.normalize);
        let gain = |row: usize, denominator: T| match normalizes {
            _ if !problem.sees(unit, row) => None,
            false => Some((shared.level(unit, head, row) + q_shifts[row - first]).exp()),
            true => (!denominator.vanishes()).then(|| T::ONE / denominator),
        };
        cotangent.weigh_rows(&problem.dims, (sequence, head, rows), normalizes, gain, (d, width), c);
    }
}
