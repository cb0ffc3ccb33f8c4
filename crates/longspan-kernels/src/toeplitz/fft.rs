//! Correlations with `e^{b_δ}` by fast Fourier transforms in doubles: O(L log L) in the length, features · values of them.
//!
//! With `x_fg = k̄_f ∘ v⁺_g` (keys in order) and `c_δ = e^{b_δ − max b}`, `N⁺_ig = Σ_f q̄_if (c ⋆ x_fg)_i`. One column of
//! values at a time goes through, so that memory is O(L) for each thread beside the transposes of one head.
//!
//! Doubles stand in vectors of the call's own, because a scratch is of the number type.
//!
//! The error of a transform is relative to the largest numbers that go into it, so a row whose weights are all small
//! may lose every digit. Each row therefore carries a certificate, `ε log₂N ‖c‖ ‖B‖ ‖q̄_i‖ ≤ tol·D_i` with
//! `‖B‖² = Σ_j ‖k̄_j‖² ‖v⁺_j‖²`; blocks of rows in which one fails are computed by tiles. Transforms would also spread a
//! NaN to all rows: heads with keys or values that are not finite go by tiles altogether.

use std::sync::Arc;

use rayon::prelude::*;
use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};

use super::problem::{Problem, Shared, TILE, Unit, top};
use super::state::StateGradients;
use super::tiled::{self, GradientSink, Sink, Task, load_cotangent};
use crate::feature_map::FeatureMap;
use crate::mechanism::Cotangent;
use crate::real::Real;
use crate::scratch::{Arena, Scratch};

/// What a certified row or key may lose to a transform, in units of `ε √L` of the number type: sums of as many terms
/// lose about as much by rounding anyway.
const LOSS: f64 = 2.0;

/// Tasks that features or values are dealt to in the backward pass: each keeps a spectrum of its own.
const GROUPS: usize = 8;

/// The least length of at least `n` with no prime factor above 5, and even, as transforms of real numbers like it.
fn smooth(n: usize) -> usize {
    (n.max(2)..)
        .find(|&n| {
            let mut rest = n;
            for prime in [2, 3, 5] {
                while rest.is_multiple_of(prime) {
                    rest /= prime;
                }
            }
            rest == 1 && n.is_multiple_of(2)
        })
        .unwrap_or(n)
}

/// The length of the transforms of a sequence: the places of keys and queries, less the one that both count.
pub(super) fn transform_length(key_places: usize, query_places: usize) -> usize {
    let least = key_places.saturating_add(query_places).saturating_sub(1);
    // Beyond all memory the cost model alone asks.
    if least > 1 << 48 { least } else { smooth(least) }
}

/// Where the tokens of one sequence stand, and the transforms of its length.
struct Line {
    /// Place of each key and query, counted from the first; `None` where they stand side by side.
    keys: Option<Vec<usize>>,
    queries: Option<Vec<usize>>,
    key_count: usize,
    query_count: usize,
    /// The first query's place minus the first key's.
    origin: isize,
    length: usize,
    forward: Arc<dyn RealToComplex<f64>>,
    inverse: Arc<dyn ComplexToReal<f64>>,
}

/// Buffers of one task.
struct Work {
    signal: Vec<f64>,
    spectrum: Vec<Complex<f64>>,
    scratch: Vec<Complex<f64>>,
}

impl Line {
    fn new<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, planner: &mut RealFftPlanner<f64>) -> Self {
        let (keys, queries) = (unit.sequence.keys, unit.sequence.queries);
        let place = |token: isize| problem.toeplitz.bias.place(token);
        let places = |first: isize, count: usize| -> Vec<usize> {
            (0..count as isize).map(|n| (place(first + n) - place(first)) as usize).collect()
        };
        let span = |places: &[usize]| places.last().map_or(0, |last| last + 1);
        let (key_places, query_places) = (places(0, keys), places(problem.offset, queries));
        let length = transform_length(span(&key_places), span(&query_places));
        let grid = problem.is_grid();
        Self {
            origin: place(problem.offset) - place(0),
            key_count: keys,
            query_count: queries,
            keys: grid.then_some(key_places),
            queries: grid.then_some(query_places),
            length,
            forward: planner.plan_fft_forward(length),
            inverse: planner.plan_fft_inverse(length),
        }
    }

    fn work(&self) -> Work {
        Work {
            signal: vec![0.0; self.length],
            spectrum: vec![Complex::default(); self.length / 2 + 1],
            scratch: vec![Complex::default(); self.forward.get_scratch_len().max(self.inverse.get_scratch_len())],
        }
    }

    /// Transforms the signal that has `a[n] · b[n]` (or `a[n]`) at the place of token `n`.
    fn transform(&self, places: &Option<Vec<usize>>, a: &[f64], b: Option<&[f64]>, work: &mut Work) {
        let filled = if places.is_none() { a.len() } else { 0 };
        work.signal[filled..].fill(0.0);
        match (places, b) {
            (None, Some(b)) => work.signal.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to = a * b),
            (None, None) => work.signal[..a.len()].copy_from_slice(a),
            (Some(places), _) => {
                for (n, (&place, a)) in places.iter().zip(a).enumerate() {
                    work.signal[place] = a * b.map_or(1.0, |b| b[n]);
                }
            }
        }
        self.forward_signal(work);
    }

    fn forward_signal(&self, work: &mut Work) {
        let Work { signal, spectrum, scratch } = work;
        // Lengths are those of the plan.
        let done = self.forward.process_with_scratch(signal, spectrum, scratch);
        debug_assert!(done.is_ok());
    }

    /// Transforms the spectrum back.
    fn inverse(&self, work: &mut Work) {
        let Work { signal, spectrum, scratch } = work;
        // What rounding left in the two numbers that are real.
        spectrum[0].im = 0.0;
        spectrum[self.length / 2].im = 0.0;
        let done = self.inverse.process_with_scratch(spectrum, signal, scratch);
        debug_assert!(done.is_ok());
    }

    /// `to[n] += factor[n] · signal` at the place of token `n`.
    fn add(&self, places: &Option<Vec<usize>>, factor: Option<&[f64]>, signal: &[f64], to: &mut [f64]) {
        match (places, factor) {
            (None, Some(factor)) => to.iter_mut().zip(factor).zip(signal).for_each(|((to, f), s)| *to += f * s),
            (None, None) => to.iter_mut().zip(signal).for_each(|(to, s)| *to += s),
            (Some(places), _) => {
                for (n, (&place, to)) in places.iter().zip(to).enumerate() {
                    *to += factor.map_or(1.0, |factor| factor[n]) * signal[place];
                }
            }
        }
    }

    /// Where the factor of the difference `key − query` of places stands in the kernel that is convolved with keys.
    fn kernel_index(&self, difference: isize) -> usize {
        (-(difference + self.origin)).rem_euclid(self.length as isize) as usize
    }
}

/// `e^{b − max b}` of one head over one sequence.
struct Kernel {
    spectrum: Vec<Complex<f64>>,
    /// `max b`.
    largest: f64,
    /// `‖c‖`.
    norm: f64,
}

impl Kernel {
    fn new<T: Real>(problem: &Problem<'_, T>, line: &Line, biases: &[T], work: &mut Work) -> Self {
        let (low, high) = line.differences();
        let value = |difference: isize| biases[problem.line_index(difference) as usize].to_f64();
        let known = |difference: &isize| {
            let index = problem.line_index(*difference);
            (0..biases.len() as isize).contains(&index)
        };
        let largest = (low..=high).filter(known).map(value).fold(f64::NEG_INFINITY, f64::max);
        let largest = if largest.is_finite() { largest } else { 0.0 };
        work.signal.fill(0.0);
        let mut squares = 0.0;
        // A sequence with the length of its places has no difference outside the line.
        for difference in (low..=high).filter(known) {
            let c = (value(difference) - largest).exp();
            squares += c * c;
            work.signal[line.kernel_index(difference)] = c / line.length as f64;
        }
        line.forward_signal(work);
        Self { spectrum: work.spectrum.clone(), largest, norm: squares.sqrt() }
    }
}

impl Line {
    /// `Σ x_j y_i` over the pairs of a key and a query, by where their difference stands in the kernel.
    fn pairs(&self, x: &[f64], y: &[f64], work: &mut Work) -> Vec<f64> {
        self.transform(&self.keys, x, None, work);
        let spectrum = work.spectrum.clone();
        self.transform(&self.queries, y, None, work);
        work.spectrum.iter_mut().zip(&spectrum).for_each(|(y, x)| *y *= x.conj());
        self.inverse(work);
        let length = self.length as f64;
        work.signal.iter().map(|sum| sum / length).collect()
    }

    /// The least and largest `key − query` of places.
    fn differences(&self) -> (isize, isize) {
        let span = |places: &Option<Vec<usize>>, count: usize| {
            places.as_ref().map_or(count, |places| places.last().map_or(0, |last| last + 1)) as isize
        };
        let (keys, queries) = (span(&self.keys, self.key_count), span(&self.queries, self.query_count));
        (1 - queries - self.origin, keys - 1 - self.origin)
    }
}

/// Keys, values and queries by columns, in doubles.
struct Columns {
    /// `columns × count`.
    numbers: Vec<f64>,
    count: usize,
}

impl Columns {
    fn new(columns: usize, count: usize) -> Self {
        Self { numbers: vec![0.0; columns * count], count }
    }

    fn column(&self, column: usize) -> &[f64] {
        &self.numbers[column * self.count..][..self.count]
    }

    /// Puts rows of a block at the rows from `first` on.
    fn put<T: Real>(&mut self, first: usize, rows: usize, block: &[T], row_length: usize, width: usize) {
        for column in 0..width {
            let to = &mut self.numbers[column * self.count + first..][..rows];
            for (row, to) in to.iter_mut().enumerate() {
                *to = block[row * row_length + column].to_f64();
            }
        }
    }

    /// The norm of each row.
    fn norms(&self) -> Vec<f64> {
        let mut squares = vec![0.0; self.count];
        for column in self.numbers.chunks_exact(self.count.max(1)) {
            squares.iter_mut().zip(column).for_each(|(s, x)| *s += x * x);
        }
        squares.iter().map(|s| s.sqrt()).collect()
    }
}

/// What the transforms of one key/value head start from.
struct Keys {
    /// `φ(k)`, features × keys, 0 where ignored.
    k: Columns,
    /// `v⁺ = [v, 1]`, (values + 1) × keys, 0 where ignored.
    v: Columns,
    /// The exponent subtracted from the keys.
    exponent: f64,
    /// `‖k̄_j‖ ‖v⁺_j‖`.
    norms: Vec<f64>,
}

impl Keys {
    fn new<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> Self {
        let (keys, head_dim, value_dim) = (unit.sequence.keys, problem.dims.head_dim, problem.dims.value_dim);
        let mut exponent = T::ZERO;
        if problem.map == FeatureMap::Exp {
            let tops = (0..keys).filter(|&key| !unit.ignores(key)).filter_map(|key| top(unit.k.row(key, head_dim)));
            let highest = tops.fold(T::NEG_INFINITY, |a, b| a.max(b));
            exponent = if highest.is_finite() { highest } else { T::ZERO };
        }
        let (mut k, mut v) = (Columns::new(head_dim, keys), Columns::new(value_dim + 1, keys));
        let mut block = vec![T::ZERO; TILE * problem.head_width.max(problem.value_width)];
        for first in (0..keys).step_by(TILE) {
            let rows = (keys - first).min(TILE);
            let padding = unit.sequence.padding.map(|padding| &padding[first..first + rows]);
            let from = unit.k.skip(first);
            problem.ops.load(problem.map, exponent, from, rows, head_dim, padding, &mut block, problem.head_width);
            k.put(first, rows, &block, problem.head_width, head_dim);
            let (from, identity) = (unit.v.skip(first), FeatureMap::Identity);
            problem.ops.load(identity, T::ZERO, from, rows, value_dim, padding, &mut block, problem.value_width);
            v.put(first, rows, &block, problem.value_width, value_dim);
        }
        for key in 0..keys {
            v.numbers[value_dim * keys + key] = if unit.ignores(key) { 0.0 } else { 1.0 };
        }
        let norms = k.norms().iter().zip(v.norms()).map(|(k, v)| k * v).collect();
        Self { k, v, exponent: exponent.to_f64(), norms }
    }
}

/// Mapped queries by columns, and the exponents subtracted from them.
fn query_columns<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize) -> (Columns, Vec<T>) {
    let (queries, head_dim) = (unit.sequence.queries, problem.dims.head_dim);
    let mut columns = Columns::new(head_dim, queries);
    let mut shifts = vec![T::ZERO; queries];
    let mut block = vec![T::ZERO; TILE * problem.head_width];
    for first in (0..queries).step_by(TILE) {
        let rows = (queries - first).min(TILE);
        problem.load_queries(problem.queries(unit, head), first, rows, &mut block, &mut shifts[first..]);
        columns.put(first, rows, &block, problem.head_width, head_dim);
    }
    (columns, shifts)
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The norm of the products `x ∘ y`.
fn norm_of(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * x * y * y).sum::<f64>().sqrt()
}

/// The bound on what the transforms of a signal lose, relative to its norm.
fn lost(line: &Line, kernel: &Kernel) -> f64 {
    f64::EPSILON * (line.length as f64).log2() * kernel.norm
}

/// What they may lose, relative to the sum of the magnitudes.
fn allowed<T: Real>(line: &Line) -> f64 {
    LOSS * T::EPSILON.to_f64() * (line.key_count.max(line.query_count) as f64).sqrt()
}

/// A sum of which transforms leave no more than they lose is 0: it may be one of no terms.
fn clear(x: &mut f64, bound: f64) {
    if x.abs() <= bound {
        *x = 0.0;
    }
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = tiled::forward_len(problem);
    let workers = rayon::current_num_threads();
    let mut arena = Arena::new(scratch.take(problem.shared_len() + workers * per_worker));
    let shared = problem.shared(&mut arena);
    let mut planner = RealFftPlanner::new();
    let mut tasks = Vec::new();
    for unit in (0..problem.units()).map(|index| problem.unit(index)) {
        let keys = unit.sequence.keys as isize;
        if keys == 0 || unit.sequence.queries == 0 || !unit.is_finite(problem, 0, keys) {
            for head in problem.heads(&unit) {
                tiled::push_strips(&mut tasks, unit.index, head, 0..unit.sequence.queries);
            }
            continue;
        }
        let line = Line::new(problem, &unit, &mut planner);
        let columns = Keys::new(problem, &unit);
        for head in problem.heads(&unit) {
            forward_head(problem, &shared, &unit, head, &line, &columns, sink, &mut tasks);
        }
    }
    tiled::run(problem, &shared, &tasks, sink, (arena.rest(), per_worker));
}

/// Computes the outputs of one head, and tells of the rows that tiles must compute.
#[allow(clippy::too_many_arguments)]
fn forward_head<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    line: &Line,
    keys: &Keys,
    sink: Sink<'_, T>,
    tasks: &mut Vec<Task>,
) {
    let (head_dim, value_dim, queries) = (problem.dims.head_dim, problem.dims.value_dim, unit.sequence.queries);
    let kernel = Kernel::new(problem, line, shared.line(head), &mut line.work());
    let (q, q_shifts) = query_columns(problem, unit, head);
    let mut sums = Columns::new(value_dim + 1, queries);
    sums.numbers.par_chunks_exact_mut(queries).enumerate().for_each_init(
        || line.work(),
        |work, (value, to)| {
            for feature in 0..head_dim {
                line.transform(&line.keys, keys.k.column(feature), Some(keys.v.column(value)), work);
                work.spectrum.iter_mut().zip(&kernel.spectrum).for_each(|(x, c)| *x *= c);
                line.inverse(work);
                line.add(&line.queries, Some(q.column(feature)), &work.signal, to);
            }
        },
    );

    let q_norms = q.norms();
    let k_norms = keys.k.norms();
    for (value, sums) in sums.numbers.chunks_exact_mut(queries).enumerate() {
        let bound = lost(line, &kernel) * norm_of(&k_norms, keys.v.column(value));
        sums.iter_mut().zip(&q_norms).for_each(|(sum, q)| clear(sum, bound * q));
    }
    let bound = lost(line, &kernel) * norm(&keys.norms) / allowed::<T>(line);
    let denominators = sums.column(value_dim);
    for first in (0..queries).step_by(TILE) {
        let rows = first..(first + TILE).min(queries);
        let sees = |row: usize| problem.end(unit, row) > unit.begin();
        // What fails goes by tiles in runs of rows, and its neighbours do not know of it: a NaN fails nothing.
        let fails = |row: &usize| sees(*row) && bound * q_norms[*row] > denominators[*row].abs();
        let mut row = rows.start;
        while row < rows.end {
            let run = (row..rows.end).take_while(&fails).count();
            if run > 0 {
                tiled::push_strips(tasks, unit.index, head, row..row + run);
            }
            row += run.max(1);
        }
        for row in rows.filter(|row| !fails(row)) {
            let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
            // SAFETY: each (batch, head, token) is written once, here or by the tiles of a failing block.
            let out = unsafe { sink.out.row(batch, head, token, value_dim) };
            let level = shared.level(unit, head, row).to_f64();
            let exponent = kernel.largest + keys.exponent;
            let mut denominator = T::from_f64(denominators[row] * (exponent - level).exp());
            let mut factor = 1.0 / denominators[row];
            if !problem.toeplitz.normalize {
                (factor, denominator) = ((exponent + q_shifts[row].to_f64()).exp(), T::ONE);
            }
            if !sees(row) || denominator.vanishes() {
                out.fill(T::ZERO);
                denominator = if problem.toeplitz.normalize { T::ZERO } else { T::ONE };
            } else {
                for (value, out) in out.iter_mut().enumerate() {
                    *out = T::from_f64(sums.column(value)[row] * factor);
                }
            }
            if let Some(places) = sink.denominators {
                // SAFETY: as above.
                unsafe { places.row(batch, head, token, 1)[0] = denominator };
            }
        }
    }
}

/// Computes every gradient of a call. Blocks of queries in which a certificate fails go by tiles; keys, values and biases
/// of a key/value head do so altogether if any row, key or distance fails, because what such a row adds to the gradients
/// of keys would drown in those of others.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    d_bias: &mut [T],
    scratch: &mut Scratch<T>,
) {
    tiled::backward_with(problem, cotangent, sink, d_bias, StateGradients::NONE, scratch, |shared, d_lines| {
        let mut planner = RealFftPlanner::new();
        let (mut tasks, mut units) = (Vec::new(), Vec::new());
        for unit in (0..problem.units()).map(|index| problem.unit(index)) {
            let keys = unit.sequence.keys as isize;
            if keys == 0 || unit.sequence.queries == 0 || !unit.is_finite(problem, 0, keys) {
                for head in problem.heads(&unit) {
                    tiled::push_strips(&mut tasks, unit.index, head, 0..unit.sequence.queries);
                }
                units.push(unit.index);
                continue;
            }
            let lines = super::gradient::unit_lines(problem, d_lines, unit.index);
            let whole = Whole { problem, shared, cotangent, unit, line: Line::new(problem, &unit, &mut planner), sink };
            if !whole.backward(&mut tasks, lines) {
                units.push(unit.index);
            }
        }
        (tasks, units)
    });
}

/// One unit of the backward pass.
struct Whole<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    shared: &'x Shared<'x, T>,
    cotangent: &'x Cotangent<'x, T>,
    unit: Unit<'a, T>,
    line: Line,
    sink: GradientSink<'x, T>,
}

/// What one query head brings into the gradients of its unit.
struct HeadColumns {
    kernel: Kernel,
    q: Columns,
    /// `dN⁺_i` relative to the kernel's largest factor, (values + 1) × queries.
    d: Columns,
    q_norms: Vec<f64>,
    d_norms: Vec<f64>,
}

impl HeadColumns {
    /// `‖q̄_i‖ ‖dN⁺_i‖`.
    fn norms(&self) -> Vec<f64> {
        self.q_norms.iter().zip(&self.d_norms).map(|(q, d)| q * d).collect()
    }
}

impl<T: Real> Whole<'_, '_, T> {
    /// Computes the gradients of queries, but for those that it adds to `tasks`, and, unless it says false, of keys,
    /// values and biases.
    fn backward(&self, tasks: &mut Vec<Task>, lines: &mut [T]) -> bool {
        let Self { problem, unit, line, .. } = self;
        let keys = Keys::new(problem, unit);
        let mut work = line.work();
        let heads: Vec<HeadColumns> = problem
            .heads(unit)
            .map(|head| {
                let kernel = Kernel::new(problem, line, self.shared.line(head), &mut work);
                let (q, q_shifts) = query_columns(problem, unit, head);
                let d = self.cotangent_columns(head, &kernel, &keys, &q_shifts);
                HeadColumns { kernel, q_norms: q.norms(), d_norms: d.norms(), q, d }
            })
            .collect();
        let certified = heads.iter().all(|columns| self.certified(&keys, columns, &mut work));
        let mut dk = Columns::new(problem.dims.head_dim, unit.sequence.keys);
        for (n, (head, columns)) in problem.heads(unit).zip(&heads).enumerate() {
            let (dq, spectrum) = self.features(&keys, columns, certified.then_some(&mut dk));
            self.write_queries(head, &keys, columns, dq, tasks, &mut work);
            if let Some(spectrum) = spectrum {
                let d_line = &mut lines[n * super::gradient::line_len(problem)..][..problem.line_width()];
                self.biases(head, &keys, columns, spectrum, d_line, &mut work);
            }
        }
        if certified {
            let dv = self.values(&keys, &heads);
            self.write_keys(&keys, &heads, dk, dv);
        }
        certified
    }

    /// Whether every row, key and distance of a head keeps its digits in the gradients of keys, values and biases: what
    /// transforms may lose is compared with sums of norms, themselves correlated by transforms.
    fn certified(&self, keys: &Keys, columns: &HeadColumns, work: &mut Work) -> bool {
        let Self { problem, unit, line, .. } = self;
        let numbers = columns.q.numbers.iter().chain(&columns.d.numbers);
        if !numbers.clone().all(|x| x.is_finite()) {
            return false;
        }
        let (lost, allowed) = (lost(line, &columns.kernel), allowed::<T>(line));
        let row_norms = columns.norms();
        let mut scales = vec![0.0; unit.sequence.keys];
        line.transform(&line.queries, &row_norms, None, work);
        work.spectrum.iter_mut().zip(&columns.kernel.spectrum).for_each(|(x, c)| *x *= c.conj());
        line.inverse(work);
        line.add(&line.keys, None, &work.signal, &mut scales);
        let seen = problem.end(unit, unit.sequence.queries - 1);
        let bound = lost * norm(&row_norms);
        let keys_pass = scales.iter().enumerate().all(|(key, &scale)| {
            key as isize >= seen || unit.ignores(key) || keys.norms[key] == 0.0 || bound <= allowed * scale.abs()
        });
        if !keys_pass {
            return false;
        }
        // Distances: how many pairs have one at all is a whole number, which no transform loses.
        let sign = |x: &[f64]| -> Vec<f64> { x.iter().map(|&x| if x > 0.0 { 1.0 } else { 0.0 }).collect() };
        let pairs = line.pairs(&sign(&keys.norms), &sign(&row_norms), work);
        let scales = line.pairs(&keys.norms, &row_norms, work);
        let bound = f64::EPSILON * (line.length as f64).log2() * norm(&keys.norms) * norm(&row_norms);
        pairs.iter().zip(&scales).all(|(pairs, scale)| pairs.round() == 0.0 || bound <= allowed * scale)
    }

    /// Gradients of mapped queries; with `dk` those of mapped keys too, and the spectrum of those of the biases.
    fn features(
        &self,
        keys: &Keys,
        columns: &HeadColumns,
        dk: Option<&mut Columns>,
    ) -> (Columns, Option<Vec<Complex<f64>>>) {
        let line = &self.line;
        let HeadColumns { kernel, q, d, .. } = columns;
        let (key_count, query_count) = (line.key_count, line.query_count);
        let (head_dim, value_dim) = (self.problem.dims.head_dim, self.problem.dims.value_dim);
        let width = head_dim.div_ceil(GROUPS).max(1);
        let mut dq = Columns::new(head_dim, query_count);
        let with_keys = dk.is_some();
        let mut unwanted = Vec::new();
        let dk = match dk {
            Some(dk) => &mut dk.numbers,
            None => {
                unwanted.resize(head_dim * key_count, 0.0);
                &mut unwanted
            }
        };
        let spectra: Vec<Vec<Complex<f64>>> = dq
            .numbers
            .par_chunks_mut(width * query_count)
            .zip(dk.par_chunks_mut(width * key_count))
            .enumerate()
            .map(|(group, (dq, dk))| {
                let (mut work, mut other) = (line.work(), line.work());
                let mut bias = vec![Complex::default(); line.length / 2 + 1];
                let pairs = dq.chunks_exact_mut(query_count).zip(dk.chunks_exact_mut(key_count));
                for (feature, (dq, dk)) in pairs.enumerate() {
                    let feature = group * width + feature;
                    for value in 0..=value_dim {
                        line.transform(&line.keys, keys.k.column(feature), Some(keys.v.column(value)), &mut work);
                        if with_keys {
                            line.transform(&line.queries, q.column(feature), Some(d.column(value)), &mut other);
                            for ((to, x), f) in bias.iter_mut().zip(&work.spectrum).zip(&other.spectrum) {
                                *to += x.conj() * f;
                            }
                            other.spectrum.iter_mut().zip(&kernel.spectrum).for_each(|(x, c)| *x *= c.conj());
                            line.inverse(&mut other);
                            line.add(&line.keys, Some(keys.v.column(value)), &other.signal, dk);
                        }
                        work.spectrum.iter_mut().zip(&kernel.spectrum).for_each(|(x, c)| *x *= c);
                        line.inverse(&mut work);
                        line.add(&line.queries, Some(d.column(value)), &work.signal, dq);
                    }
                }
                bias
            })
            .collect();
        let mut sum = vec![Complex::default(); line.length / 2 + 1];
        for spectrum in &spectra {
            sum.iter_mut().zip(spectrum).for_each(|(to, x)| *to += x);
        }
        (dq, with_keys.then_some(sum))
    }

    /// The gradients of a head's biases from their spectrum.
    fn biases(
        &self,
        head: usize,
        keys: &Keys,
        columns: &HeadColumns,
        spectrum: Vec<Complex<f64>>,
        d_line: &mut [T],
        work: &mut Work,
    ) {
        let Self { problem, line, .. } = self;
        work.spectrum = spectrum;
        line.inverse(work);
        let (low, high) = line.differences();
        let length = line.length as f64;
        let bound = f64::EPSILON * length.log2() * norm(&keys.norms) * norm(&columns.norms());
        for difference in low..=high {
            let index = problem.line_index(difference);
            if let Some(to) = usize::try_from(index).ok().and_then(|index| d_line.get_mut(index)) {
                let mut sum = work.signal[line.kernel_index(difference)] / length;
                clear(&mut sum, bound);
                let c = (self.shared.line(head)[index as usize].to_f64() - columns.kernel.largest).exp();
                *to = T::from_f64(c * sum);
            }
        }
    }

    /// The gradients of values.
    fn values(&self, keys: &Keys, heads: &[HeadColumns]) -> Columns {
        let line = &self.line;
        let mut dv = Columns::new(self.problem.dims.value_dim, line.key_count);
        dv.numbers.par_chunks_exact_mut(line.key_count).enumerate().for_each_init(
            || line.work(),
            |work, (value, to)| {
                for columns in heads {
                    for feature in 0..self.problem.dims.head_dim {
                        let (q, d) = (columns.q.column(feature), columns.d.column(value));
                        line.transform(&line.queries, q, Some(d), work);
                        work.spectrum.iter_mut().zip(&columns.kernel.spectrum).for_each(|(x, c)| *x *= c.conj());
                        line.inverse(work);
                        line.add(&line.keys, Some(keys.k.column(feature)), &work.signal, to);
                    }
                }
            },
        );
        dv
    }

    /// `dN⁺` of every row of a head, relative to the kernel's largest factor and the keys' exponent.
    fn cotangent_columns(&self, head: usize, kernel: &Kernel, keys: &Keys, q_shifts: &[T]) -> Columns {
        let Self { problem, shared, unit, .. } = self;
        let (queries, value_dim) = (unit.sequence.queries, problem.dims.value_dim);
        let mut columns = Columns::new(value_dim + 1, queries);
        let mut block = vec![T::ZERO; TILE * problem.value_width];
        let mut c = [T::ZERO; TILE];
        for first in (0..queries).step_by(TILE) {
            let rows = first..(first + TILE).min(queries);
            let shifts = &q_shifts[rows.clone()];
            load_cotangent(problem, shared, self.cotangent, unit, head, rows.clone(), shifts, &mut block, &mut c);
            columns.put(first, rows.len(), &block, problem.value_width, value_dim);
            for row in rows {
                columns.numbers[value_dim * queries + row] = c[row - first].to_f64();
                let level = shared.level(unit, head, row).to_f64();
                let scale = (kernel.largest + keys.exponent - level).exp();
                for value in 0..=value_dim {
                    let number = &mut columns.numbers[value * queries + row];
                    // 0 stays 0 however large the scale.
                    *number = if *number == 0.0 { 0.0 } else { *number * scale };
                }
            }
        }
        columns
    }

    /// Writes the gradients of one head's queries from those of their features, or leaves them to tiles. Whether it
    /// does depends on keys and values and on the rows of a block alone.
    fn write_queries(
        &self,
        head: usize,
        keys: &Keys,
        columns: &HeadColumns,
        mut dq: Columns,
        tasks: &mut Vec<Task>,
        work: &mut Work,
    ) {
        let Self { problem, unit, line, .. } = self;
        let (width, head_dim) = (problem.head_width, problem.dims.head_dim);
        let lost = lost(line, &columns.kernel);
        let v_norms = keys.v.norms();
        for (feature, dq) in dq.numbers.chunks_exact_mut(line.query_count).enumerate() {
            let bound = lost * norm_of(keys.k.column(feature), &v_norms);
            dq.iter_mut().zip(&columns.d_norms).for_each(|(x, d)| clear(x, bound * d));
        }
        let mut scales = vec![0.0; line.query_count];
        line.transform(&line.keys, &keys.norms, None, work);
        work.spectrum.iter_mut().zip(&columns.kernel.spectrum).for_each(|(x, c)| *x *= c);
        line.inverse(work);
        line.add(&line.queries, None, &work.signal, &mut scales);
        let bound = lost * norm(&keys.norms) / allowed::<T>(line);
        let sees = |row: usize| problem.end(unit, row) > unit.begin();

        let (mut phi, mut block) = (vec![T::ZERO; TILE * width], vec![T::ZERO; TILE * width]);
        let mut shifts = [T::ZERO; TILE];
        let queries = problem.queries(unit, head);
        for first in (0..dq.count).step_by(TILE) {
            let rows = (dq.count - first).min(TILE);
            if (first..first + rows).any(|row| sees(row) && bound > scales[row].abs()) {
                tiled::push_strips(tasks, unit.index, head, first..first + rows);
                continue;
            }
            problem.load_queries(queries, first, rows, &mut phi, &mut shifts);
            dq.take(first, rows, &mut block, width);
            problem.ops.pull_back(problem.map, queries.skip(first), &phi, &mut block, rows, head_dim, width);
            for row in 0..rows {
                let token = unit.sequence.query_start + first + row;
                // SAFETY: each (batch, head, token) belongs to one unit.
                let to = unsafe { self.sink.dq.row(unit.sequence.batch, head, token, head_dim) };
                if sees(first + row) {
                    problem.ops.store(&block[row * width..], T::ONE, to);
                } else {
                    to.fill(T::ZERO);
                }
            }
        }
    }

    /// Writes the gradients of the unit's keys and values.
    fn write_keys(&self, keys: &Keys, heads: &[HeadColumns], mut dk: Columns, mut dv: Columns) {
        let Self { problem, unit, line, .. } = self;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let head_dim = problem.dims.head_dim;
        let (k_norms, v_norms) = (keys.k.norms(), keys.v.norms());
        for (feature, dk) in dk.numbers.chunks_exact_mut(line.key_count).enumerate() {
            let bound = |columns: &HeadColumns| {
                lost(line, &columns.kernel) * norm_of(columns.q.column(feature), &columns.d_norms)
            };
            let bound: f64 = heads.iter().map(bound).sum();
            dk.iter_mut().zip(&v_norms).for_each(|(x, v)| clear(x, bound * v));
        }
        for (value, dv) in dv.numbers.chunks_exact_mut(line.key_count).enumerate() {
            let bound = |columns: &HeadColumns| {
                lost(line, &columns.kernel) * norm_of(columns.d.column(value), &columns.q_norms)
            };
            let bound: f64 = heads.iter().map(bound).sum();
            dv.iter_mut().zip(&k_norms).for_each(|(x, k)| clear(x, bound * k));
        }
        let exponent = T::from_f64(keys.exponent);
        let (mut phi, mut d_k) = (vec![T::ZERO; TILE * head_width], vec![T::ZERO; TILE * head_width]);
        let mut d_v = vec![T::ZERO; TILE * value_width];
        let seen = problem.end(unit, unit.sequence.queries - 1);
        for first in (0..dk.count).step_by(TILE) {
            let rows = (dk.count - first).min(TILE);
            let from = unit.k.skip(first);
            problem.ops.load(problem.map, exponent, from, rows, head_dim, None, &mut phi, head_width);
            dk.take(first, rows, &mut d_k, head_width);
            dv.take(first, rows, &mut d_v, value_width);
            problem.ops.pull_back(problem.map, from, &phi, &mut d_k, rows, head_dim, head_width);
            for row in 0..rows {
                let key = first + row;
                let there = (key as isize) < seen && !unit.ignores(key);
                let rows = (&d_k[row * head_width..], &d_v[row * value_width..]);
                super::gradient::write(problem, unit, key, self.sink, there.then_some(rows));
            }
        }
        for key in dk.count..dk.count + unit.sequence.absent {
            super::gradient::write(problem, unit, key, self.sink, None);
        }
    }
}

impl Columns {
    /// Takes the rows from `first` on into a block whose rows are filled up with 0.
    fn take<T: Real>(&self, first: usize, rows: usize, block: &mut [T], row_length: usize) {
        block[..rows * row_length].fill(T::ZERO);
        for (column, from) in self.numbers.chunks_exact(self.count.max(1)).enumerate() {
            for row in 0..rows {
                block[row * row_length + column] = T::from_f64(from[first + row]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_smooth() {
        assert_eq!([1, 2, 7, 11, 127, 8191, 16383].map(smooth), [2, 2, 8, 12, 128, 8192, 16384]);
        assert!((1..2000).all(|n| smooth(n) >= n && smooth(n) < 2 * n + 2));
    }
}
