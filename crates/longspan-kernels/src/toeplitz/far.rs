//! Keys and rows that share one weight because they lie far apart: which they are for a chunk, and their sums
//! `Σ k̄_j v⁺_jᵀ` and `Σ q̄_i dN⁺_iᵀ`.

use std::ops::Range;

use super::problem::{Problem, Unit};
use super::state::{Head, raise};
use crate::call::SharedRows;
use crate::simd::Real;
use crate::simd::block::{add_scaled, dot, scale_by, transpose};
use crate::simd::product::Product;
use crate::simd::rows::padded;
use crate::threads::{self, parallel};

/// Rows or keys that share one sum. Two sums of 64 × 65 numbers for every 128 rows are as much memory as q, and a tile
/// that is 128 keys wider than the table reaches costs about what reading the sums does.
pub(super) const ROWS: usize = 128;

/// The keys that some rows meet by tiles; those before and after have one weight each.
pub(super) fn near_keys<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, rows: &Range<usize>) -> (isize, isize) {
    let bias = &problem.toeplitz.bias;
    let (first, last) = (problem.stands(rows.start), problem.stands(rows.end - 1));
    let (begin, keys) = (unit.begin(), unit.sequence.keys as isize);
    let from = if bias.far().is_some() { (first - bias.near() as isize + 1).clamp(begin, keys) } else { begin };
    let to = match bias.after() {
        _ if problem.causal => problem.end(unit, rows.end - 1),
        Some((distance, _)) => (last + distance).clamp(from, keys),
        None => keys,
    };
    (from, to)
}

/// The rows that some keys meet by tiles: those before have the weight of the farthest keys after, those from there on
/// that of the farthest keys before.
pub(super) fn near_rows<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, keys: &Range<isize>) -> Range<usize> {
    let (bias, rows) = (&problem.toeplitz.bias, unit.sequence.queries as isize);
    let end = match bias.far() {
        Some(_) => (bias.near() as isize + keys.end - 1 - problem.offset).clamp(0, rows),
        None => rows,
    };
    let start = match bias.after() {
        Some((distance, _)) if !problem.causal => (keys.start - distance - problem.offset + 1).clamp(0, end),
        _ => 0,
    };
    start as usize..end as usize
}

/// Sides on which keys may lie far from rows: before them, and without a causal mask after.
pub(super) fn sides<T: Real>(problem: &Problem<'_, T>) -> usize {
    if problem.causal { 1 } else { 2 }
}

/// The sum of keys that rows see with one weight, or of rows that see keys with one.
#[derive(Clone, Copy)]
pub(super) struct Far<'s, T> {
    /// `Σ k̄_j v_jᵀ` or `Σ q̄_i dN_iᵀ`, `head_width × value_width`.
    pub outer: &'s [T],
    /// `Σ k̄_j` or `Σ c_i q̄_i`: the column of the ones in `v⁺`.
    pub features: &'s [T],
    /// The exponent subtracted from both.
    pub exponent: T,
    /// The bias between them and what they meet.
    pub bias: T,
}

impl<T: Real> Far<'_, T> {
    /// Adds to a block of `dN⁺` or `v⁺` what the sum makes of it: `to_i += weight·(S y_i + ones_i·z)` with `y_i` in `y` and
    /// where `ones` is none 1. `turned` and `tile` are working memory. Returns `weight · Σ x_i·(S y_i + ones_i·z)`.
    pub fn add_features(
        &self,
        problem: &Problem<'_, T>,
        weight: T,
        (y, ones, count): (&[T], Option<&[T]>, usize),
        (x, to): (&[T], &mut [T]),
        (turned, tile): (&mut [T], &mut [T]),
    ) -> T {
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        transpose((self.outer, value_width), (head_width, value_width), (turned, head_width));
        let sizes = [count, head_width, problem.dims.value_dim];
        Product::of((y, value_width), (turned, head_width), (tile, head_width), sizes).compute();
        let mut sum = T::ZERO;
        for row in 0..count {
            let line = &mut tile[row * head_width..][..head_width];
            add_scaled(line, ones.map_or(T::ONE, |ones| ones[row]), self.features);
            sum += dot(&x[row * head_width..][..head_width], line);
            add_scaled(&mut to[row * head_width..][..head_width], weight, line);
        }
        weight * sum
    }

    /// Adds `weight·Sᵀ x_i` for each row of a block of features.
    pub fn add_values(
        &self,
        problem: &Problem<'_, T>,
        weight: T,
        (x, count): (&[T], usize),
        to: &mut [T],
        tile: &mut [T],
    ) {
        let value_width = problem.value_width;
        let sizes = [count, value_width, problem.features];
        Product::of((x, problem.head_width), (self.outer, value_width), (tile, value_width), sizes).compute();
        for row in 0..count {
            let line = &tile[row * value_width..][..value_width];
            add_scaled(&mut to[row * value_width..][..value_width], weight, line);
        }
    }
}

/// A sum to be formed: `head_width × value_width` numbers, then one a feature, then the exponent subtracted from both.
pub(super) struct FarSum<'s, T> {
    pub outer: &'s mut [T],
    pub features: &'s mut [T],
    exponent: &'s mut T,
}

impl<'s, T: Real> FarSum<'s, T> {
    pub fn len(problem: &Problem<'_, T>) -> usize {
        problem.head_width * (problem.value_width + 1) + padded::<T>(1)
    }

    pub fn empty(problem: &Problem<'_, T>, numbers: &'s mut [T]) -> Self {
        numbers.fill(T::ZERO);
        let (outer, rest) = numbers.split_at_mut(problem.head_width * problem.value_width);
        let (features, rest) = rest.split_at_mut(problem.head_width);
        rest[0] = T::NEG_INFINITY;
        Self { outer, features, exponent: &mut rest[0] }
    }

    pub fn exponent(&self) -> T {
        *self.exponent
    }

    /// Brings it to an exponent if that is above its own; returns its exponent.
    pub fn raise(&mut self, to: T) -> T {
        raise(self.exponent, [&mut *self.outer, &mut *self.features], to);
        *self.exponent
    }

    /// Adds the sums of a state, or of the gradient of one, under an exponent.
    pub fn add_state(&mut self, problem: &Problem<'_, T>, head: &Head<&[T]>, exponent: T) {
        let (value_dim, value_width) = (problem.dims.value_dim, problem.value_width);
        let factor = (exponent - self.raise(exponent)).exp();
        for (feature, &number) in head.keys.iter().enumerate() {
            let row = &head.sum[feature * value_dim..][..value_dim];
            add_scaled(&mut self.outer[feature * value_width..][..value_dim], factor, row);
            self.features[feature] += factor * number;
        }
    }

    pub fn add_outer(&mut self, problem: &Problem<'_, T>, x: &[T], y: &[T], count: usize) {
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let sizes = [head_width, value_width, count];
        Product::of_transposed((x, head_width), (y, value_width), (self.outer, value_width), sizes)
            .accumulate(true)
            .compute();
    }
}

/// Sums on both sides of every chunk of several owners, `[owners, sides, chunks]`.
#[derive(Clone, Copy)]
pub(super) struct FarSums<'s, T> {
    numbers: &'s [T],
    sides: usize,
    chunks: usize,
    len: usize,
}

impl<'s, T: Real> FarSums<'s, T> {
    pub fn len(problem: &Problem<'_, T>, owners: usize, chunks: usize) -> usize {
        owners * sides(problem) * chunks * FarSum::len(problem)
    }

    /// `add([owner, side, chunk], sum, scratch)` adds what is each chunk's own. Sums are carried from the first chunk to the last on side
    /// 0, and on side 1 from the last to the first; the other way round if not `rising`.
    pub fn new(
        problem: &Problem<'_, T>,
        numbers: &'s mut [T],
        (owners, chunks): (usize, usize),
        rising: bool,
        (scratch, per_worker): (&mut [T], usize),
        add: impl Fn([usize; 3], &mut FarSum<'_, T>, &mut [T]) + Sync,
    ) -> Self {
        let (sides, len) = (sides(problem), FarSum::len(problem));
        let places = SharedRows::new(&mut *numbers, [len, 0, 0]);
        parallel(owners * sides * chunks, scratch, per_worker, |task, scratch| {
            // SAFETY: each sum is one task's own.
            let mut sum = FarSum::empty(problem, unsafe { places.row(task, 0, 0, len) });
            add([task / chunks / sides, task / chunks % sides, task % chunks], &mut sum, scratch);
        });
        let order = |side: usize, n: usize| match rising == (side == 0) {
            true => (n, n - 1),
            false => (chunks - 1 - n, chunks - n),
        };
        accumulate(problem, numbers, (owners, chunks), order);
        Self { numbers, sides, chunks, len }
    }

    /// One side's sum of a chunk, if there is anything in it, with the bias of a head.
    pub fn get(
        &self,
        problem: &Problem<'_, T>,
        (owner, head): (usize, usize),
        side: usize,
        chunk: usize,
    ) -> Option<Far<'s, T>> {
        let bias = &problem.toeplitz.bias;
        let entry = if side == 0 { bias.far() } else { bias.after().map(|(_, entry)| entry) };
        let entry = entry.filter(|_| side < self.sides)?;
        let numbers = &self.numbers[((owner * self.sides + side) * self.chunks + chunk) * self.len..][..self.len];
        let (outer, rest) = numbers.split_at(problem.head_width * problem.value_width);
        let (features, exponent) = rest.split_at(problem.head_width);
        let far = Far { outer, features, exponent: exponent[0], bias: problem.table(head)[entry] };
        (far.exponent > T::NEG_INFINITY).then_some(far)
    }
}

/// Parts that the numbers of a sum are dealt to: a running sum has an order along the chunks and none across a sum.
const PARTS: usize = 8;

/// Carries the sums of chunks on; `order(side, n)` says for `1 ≤ n < chunks` to which chunk in turn the sum of which neighbour is added.
fn accumulate<T: Real>(
    problem: &Problem<'_, T>,
    numbers: &mut [T],
    (owners, chunks): (usize, usize),
    order: impl Fn(usize, usize) -> (usize, usize) + Sync,
) {
    let (sides, len) = (sides(problem), FarSum::len(problem));
    let (end, all) = (len - padded::<T>(1), owners * sides);
    let part = padded::<T>(end.div_ceil(PARTS));
    let own: Vec<T> = numbers.chunks_exact(len).map(|sum| sum[end]).collect();
    let places = SharedRows::new(numbers, [chunks * len, len, 1]);
    threads::share(0..all * PARTS, |task| {
        let (owner, from) = (task / PARTS, (task % PARTS * part).min(end));
        let width = part.min(end - from);
        // SAFETY: these numbers of an owner's sums are one task's own, and no two rows are the same.
        let row = |chunk: usize| unsafe { places.row(owner, chunk, from, width) };
        let mut running = None;
        for n in 1..chunks {
            let (to, before) = order(owner % sides, n);
            let old = running.unwrap_or(own[owner * chunks + before]);
            let new = own[owner * chunks + to];
            let highest = old.max(new);
            if new < highest {
                scale_by(row(to), factor(new, highest));
            }
            if old > T::NEG_INFINITY {
                add_scaled(row(to), factor(old, highest), row(before));
            }
            running = Some(highest);
        }
    });
    for owner in 0..all {
        for n in 1..chunks {
            let (to, before) = order(owner % sides, n);
            let sum = |chunk: usize| (owner * chunks + chunk) * len + end;
            numbers[sum(to)] = numbers[sum(to)].max(numbers[sum(before)]);
        }
    }
}

/// `e^{from − to}` for `from ≤ to`.
fn factor<T: Real>(from: T, to: T) -> T {
    if from == to { T::ONE } else { (from - to).exp() }
}
