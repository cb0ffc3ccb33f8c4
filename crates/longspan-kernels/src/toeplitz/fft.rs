//! Correlations with `e^{b_δ}` by fast Fourier transforms in doubles: O(L log L) in the length, features · values of them.
//!
//! With `x_fg = k̄_f ∘ v⁺_g` (keys in order) and `c_δ = e^{b_δ − max b}`, `N⁺_ig = Σ_f q̄_if (c ⋆ x_fg)_i`. One column of
//! values at a time goes through, so that memory is O(L) for each thread beside the transposes of one head.
//!
//! Spectra and columns are doubles whatever the number type; a scratch holds both.
//!
//! The error of a transform is relative to the largest numbers that go into it, so a row whose weights are all small
//! may lose every digit. Each row therefore carries a certificate, `ε log₂N ‖c‖ ‖B‖ ‖q̄_i‖ ≤ tol·D_i` with
//! `‖B‖² = Σ_j ‖k̄_j‖² ‖v⁺_j‖²`; blocks of rows in which one fails are computed by tiles. Transforms would also spread a
//! NaN to all rows: heads with keys or values that are not finite go by tiles altogether.

use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};

use super::gradient::{KeyUnit, Left};
use super::map_sums::MapSums;
use super::problem::{Problem, Shared, TILE, Unit};
use super::state::StateGradients;
use super::tiled::{self, GradientSink, Sink, Task, load_cotangent};
use crate::call::{Arena, Cotangent, Scratch, Sequence, ViewMut};
use crate::feature_map::elementwise::copy_rows;
use crate::feature_map::mapping::MapBuffers;
use crate::feature_map::rows::Side;
use crate::simd::block::{add_scaled, multiply, store};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};
use crate::toeplitz::spectrum::{AddConjugateProducts, MultiplySpectrum, add_products};

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

/// Buffers of one transform.
struct Work<'s> {
    signal: &'s mut [f64],
    spectrum: &'s mut [Complex<f64>],
    scratch: &'s mut [Complex<f64>],
}

/// Doubles as complex numbers, half as many.
fn complex(numbers: &mut [f64]) -> &mut [Complex<f64>] {
    // SAFETY: a complex number is its two doubles in order (`repr(C)`), and `len / 2` of them lie in the slice.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len() / 2) }
}

/// Doubles that an arena hands out for pieces of these sizes.
fn doubles(pieces: &[usize]) -> usize {
    pieces.iter().map(|&piece| padded::<f64>(piece)).sum()
}

impl Line {
    fn new<T: Real>(problem: &Problem<'_, T>, sequence: &Sequence<'_>, planner: &mut RealFftPlanner<f64>) -> Self {
        let (keys, queries) = (sequence.keys, sequence.queries);
        let place = |token: isize| problem.toeplitz.bias.place(token);
        let places = |first: isize, count: usize| -> Vec<usize> {
            (0..count as isize).map(|n| (place(first + n) - place(first)) as usize).collect()
        };
        let (mut key_places, mut query_places) = (None, None);
        let (mut key_range, mut query_range) = (keys, queries);
        if problem.is_grid() {
            let range = |places: &[usize]| places.last().map_or(0, |last| last + 1);
            let (of_keys, of_queries) = (places(0, keys), places(problem.offset, queries));
            (key_range, query_range) = (range(&of_keys), range(&of_queries));
            (key_places, query_places) = (Some(of_keys), Some(of_queries));
        }
        let length = transform_length(key_range, query_range);
        Self {
            origin: place(problem.offset) - place(0),
            key_count: keys,
            query_count: queries,
            keys: key_places,
            queries: query_places,
            length,
            forward: planner.plan_fft_forward(length),
            inverse: planner.plan_fft_inverse(length),
        }
    }

    /// Doubles of a spectrum.
    fn spectrum_len(&self) -> usize {
        2 * (self.length / 2 + 1)
    }

    fn scratch_len(&self) -> usize {
        2 * self.forward.get_scratch_len().max(self.inverse.get_scratch_len())
    }

    fn work_len(&self) -> usize {
        doubles(&[self.length, self.spectrum_len(), self.scratch_len()])
    }

    fn work<'s>(&self, arena: &mut Arena<'s, f64>) -> Work<'s> {
        Work {
            signal: arena.take(self.length),
            spectrum: complex(arena.take(self.spectrum_len())),
            scratch: complex(arena.take(self.scratch_len())),
        }
    }

    /// Transforms the signal that has `a[n] · b[n]` (or `a[n]`) at the place of token `n`.
    fn transform(&self, places: &Option<Vec<usize>>, a: &[f64], b: Option<&[f64]>, work: &mut Work<'_>) {
        match places {
            None => {
                let (filled, rest) = work.signal.split_at_mut(a.len());
                filled.copy_from_slice(a);
                rest.fill(0.0);
                if let Some(b) = b {
                    multiply(filled, b);
                }
            }
            Some(places) => {
                work.signal.fill(0.0);
                for (n, (&place, a)) in places.iter().zip(a).enumerate() {
                    work.signal[place] = a * b.map_or(1.0, |b| b[n]);
                }
            }
        }
        self.forward_signal(work);
    }

    fn forward_signal(&self, work: &mut Work<'_>) {
        let Work { signal, spectrum, scratch } = work;
        let scratch = &mut scratch[..self.forward.get_scratch_len()];
        // Lengths are those of the plan.
        let done = self.forward.process_with_scratch(signal, spectrum, scratch);
        debug_assert!(done.is_ok());
    }

    /// Transforms the spectrum back.
    fn inverse(&self, work: &mut Work<'_>) {
        let Work { signal, spectrum, scratch } = work;
        let scratch = &mut scratch[..self.inverse.get_scratch_len()];
        // What rounding left in the two numbers that are real.
        spectrum[0].im = 0.0;
        spectrum[self.length / 2].im = 0.0;
        let done = self.inverse.process_with_scratch(spectrum, signal, scratch);
        debug_assert!(done.is_ok());
    }

    /// Convolves what was transformed last with a kernel, or with a kernel reversed.
    fn convolve(&self, kernel: &Kernel<'_>, reversed: bool, work: &mut Work<'_>) {
        dispatch(MultiplySpectrum { x: work.spectrum, by: kernel.spectrum, conjugate: reversed });
        self.inverse(work);
    }

    /// `to[n] += factor[n] · signal` at the place of token `n`.
    fn add(&self, places: &Option<Vec<usize>>, factor: Option<&[f64]>, signal: &[f64], to: &mut [f64]) {
        match (places, factor) {
            (None, Some(factor)) => add_products(to, factor, signal),
            (None, None) => add_scaled(to, 1.0, signal),
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

/// The lines of all sequences that transforms may take.
fn lines<T: Real>(problem: &Problem<'_, T>) -> Vec<Option<Line>> {
    let mut planner = RealFftPlanner::new();
    let line = |sequence: &Sequence<'_>| {
        let any = sequence.keys > 0 && sequence.queries > 0;
        any.then(|| Line::new(problem, sequence, &mut planner))
    };
    problem.sequences.iter().map(line).collect()
}

/// The largest of some size of the lines.
fn most(lines: &[Option<Line>], size: impl Fn(&Line) -> usize) -> usize {
    lines.iter().flatten().map(size).max().unwrap_or(0)
}

/// `e^{b − max b}` of one head over one sequence.
struct Kernel<'s> {
    spectrum: &'s [Complex<f64>],
    /// `max b`.
    largest: f64,
    /// `‖c‖`.
    norm: f64,
}

impl<'s> Kernel<'s> {
    fn new<T: Real>(
        problem: &Problem<'_, T>,
        line: &Line,
        biases: &[T],
        work: &mut Work<'_>,
        to: &'s mut [f64],
    ) -> Self {
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
        let spectrum = complex(to);
        spectrum.copy_from_slice(work.spectrum);
        Self { spectrum, largest, norm: squares.sqrt() }
    }
}

impl Line {
    /// `Σ x_j y_i` over the pairs of a key and a query, by where their difference stands in the kernel.
    fn pairs(&self, x: &[f64], y: &[f64], work: &mut Work<'_>, spectrum: &mut [f64], to: &mut [f64]) {
        self.transform(&self.keys, x, None, work);
        let spectrum = complex(spectrum);
        spectrum.copy_from_slice(work.spectrum);
        self.transform(&self.queries, y, None, work);
        dispatch(MultiplySpectrum { x: work.spectrum, by: spectrum, conjugate: true });
        self.inverse(work);
        to.fill(0.0);
        add_scaled(to, 1.0 / self.length as f64, work.signal);
    }

    /// The least and largest `key − query` of places.
    fn differences(&self) -> (isize, isize) {
        let range = |places: &Option<Vec<usize>>, count: usize| {
            places.as_ref().map_or(count, |places| places.last().map_or(0, |last| last + 1)) as isize
        };
        let (keys, queries) = (range(&self.keys, self.key_count), range(&self.queries, self.query_count));
        (1 - queries - self.origin, keys - 1 - self.origin)
    }
}

/// Keys, values and queries by columns, in doubles.
struct Columns<'s> {
    /// `columns × count`.
    numbers: &'s mut [f64],
    count: usize,
}

impl<'s> Columns<'s> {
    fn new(columns: usize, count: usize, arena: &mut Arena<'s, f64>) -> Self {
        Self { numbers: arena.take(columns * count), count }
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
    fn norms(&self, to: &'s mut [f64]) -> &'s [f64] {
        to.fill(0.0);
        for column in self.numbers.chunks_exact(self.count.max(1)) {
            add_products(to, column, column);
        }
        to.iter_mut().for_each(|s| *s = s.sqrt());
        to
    }
}

/// What the transforms of one key/value head start from.
struct Keys<'s> {
    /// `φ(k)`, features × keys, 0 where ignored.
    k: Columns<'s>,
    /// `v⁺ = [v, 1]`, (values + 1) × keys, 0 where ignored.
    v: Columns<'s>,
    /// The exponent subtracted from the keys.
    exponent: f64,
    /// `‖k̄_j‖`, `‖v⁺_j‖` and their products.
    k_norms: &'s [f64],
    v_norms: &'s [f64],
    norms: &'s [f64],
}

impl<'s> Keys<'s> {
    fn len<T: Real>(problem: &Problem<'_, T>, line: &Line) -> usize {
        let (keys, dims) = (line.key_count, &problem.dims);
        doubles(&[problem.features * keys, (dims.value_dim + 1) * keys, keys, keys, keys])
    }

    /// `memory` holds a block of keys or values.
    fn new<T: Real>(
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        memory: &mut [T],
        arena: &mut Arena<'s, f64>,
    ) -> Self {
        let (keys, features, value_dim) = (unit.sequence.keys, problem.features, problem.dims.value_dim);
        let (block, mut map) = block(problem, memory);
        let mut exponent = T::ZERO;
        if problem.mapping.exponential {
            let row_max = (0..keys as isize).filter_map(|key| problem.key_max(unit, key));
            let highest = row_max.fold(T::NEG_INFINITY, |a, b| a.max(b));
            exponent = if highest.is_finite() { highest } else { T::ZERO };
        }
        let (mut k, mut v) = (Columns::new(features, keys, arena), Columns::new(value_dim + 1, keys, arena));
        for first in (0..keys).step_by(TILE) {
            let rows = (keys - first).min(TILE);
            let padding = unit.sequence.padding.map(|padding| &padding[first..first + rows]);
            problem.load_keys(unit, (first, rows), exponent, block, &mut map);
            k.put(first, rows, block, problem.head_width, features);
            copy_rows(unit.v.skip(first), (rows, value_dim), padding, (block, problem.value_width));
            v.put(first, rows, block, problem.value_width, value_dim);
        }
        for key in 0..keys {
            v.numbers[value_dim * keys + key] = if unit.ignores(key) { 0.0 } else { 1.0 };
        }
        let (k_norms, v_norms) = (k.norms(arena.take(keys)), v.norms(arena.take(keys)));
        let norms = arena.take(keys);
        norms.copy_from_slice(k_norms);
        multiply(norms, v_norms);
        Self { k, v, exponent: exponent.to_f64(), k_norms, v_norms, norms }
    }
}

/// A block of features or values of either side, and what maps work with, in a worker's memory.
fn block<'s, T: Real>(problem: &Problem<'_, T>, memory: &'s mut [T]) -> (&'s mut [T], MapBuffers<'s, T>) {
    let mut arena = Arena::new(memory);
    let block = arena.take(TILE * problem.head_width.max(problem.value_width));
    (block, MapBuffers::new(&problem.mapping, TILE, &mut arena))
}

/// Mapped queries by columns. `memory` holds a block of them.
fn query_columns<'s, T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    memory: &mut [T],
    arena: &mut Arena<'s, f64>,
) -> Columns<'s> {
    let (queries, features) = (unit.sequence.queries, problem.features);
    let (block, mut map) = block(problem, memory);
    let mut columns = Columns::new(features, queries, arena);
    let mut shifts = [T::ZERO; TILE];
    for first in (0..queries).step_by(TILE) {
        let rows = (queries - first).min(TILE);
        problem.load_queries(unit, head, first, rows, block, &mut shifts, &mut map);
        columns.put(first, rows, block, problem.head_width, features);
    }
    columns
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The norm of the products `x ∘ y`.
fn norm_of(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * x * y * y).sum::<f64>().sqrt()
}

/// The bound on what the transforms of a signal lose, relative to its norm.
fn lost(line: &Line, kernel: &Kernel<'_>) -> f64 {
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

/// Whether transforms may take a unit: a NaN or infinity would spread to all its rows.
fn transforms<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> bool {
    unit.sequence.queries > 0 && unit.sequence.keys > 0 && unit.is_finite(problem, 0, unit.sequence.keys as isize)
}

/// Doubles of working memory of one unit in the forward pass.
fn forward_len<T: Real>(problem: &Problem<'_, T>, line: &Line) -> usize {
    let (group, dims, queries) = (problem.dims.group(), &problem.dims, line.query_count);
    Keys::len(problem, line)
        + line.work_len()
        + group * doubles(&[line.spectrum_len(), problem.features * queries, queries])
        + doubles(&[group * (dims.value_dim + 1) * queries])
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = tiled::forward_len(problem);
    let workers = threads::count();
    let lines = lines(problem);
    // A transform of keys is multiplied by the kernel of each head that reads them.
    let works = if problem.dims.group() > 1 { 2 } else { 1 };
    let per_transform = most(&lines, |line| works * line.work_len());
    let unit_len = most(&lines, |line| forward_len(problem, line));
    let (numbers, doubles) =
        scratch.take_with_doubles(problem.shared_len() + workers * per_worker, unit_len + workers * per_transform);
    let mut arena = Arena::new(numbers);
    let shared = problem.shared(&mut arena);
    let rest = arena.rest();
    let mut tasks = Vec::new();
    for unit in (0..problem.units()).map(|index| problem.unit(index)) {
        match &lines[unit.index / problem.dims.kv_heads] {
            Some(line) if transforms(problem, &unit) => {
                let memory = (&mut *rest, &mut *doubles, per_transform);
                forward_unit(problem, &shared, &unit, line, memory, sink, &mut tasks);
            }
            _ => {
                for head in problem.heads(&unit) {
                    tiled::push_chunks(&mut tasks, unit.index, head, 0..unit.sequence.queries);
                }
            }
        }
    }
    tiled::run(problem, &shared, &tasks, sink, (rest, per_worker));
}

/// Computes the outputs of one unit, and tells of the rows that tiles must compute.
fn forward_unit<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    unit: &Unit<'_, T>,
    line: &Line,
    (block, doubles, per_transform): (&mut [T], &mut [f64], usize),
    sink: Sink<'_, T>,
    tasks: &mut Vec<Task>,
) {
    let (features, value_dim, queries) = (problem.features, problem.dims.value_dim, unit.sequence.queries);
    let group = problem.dims.group();
    let mut arena = Arena::new(doubles);
    let mut work = line.work(&mut arena);
    let keys = Keys::new(problem, unit, block, &mut arena);
    let heads: Vec<(Kernel<'_>, Columns<'_>)> = problem
        .heads(unit)
        .map(|head| {
            let kernel = Kernel::new(problem, line, shared.line(head), &mut work, arena.take(line.spectrum_len()));
            (kernel, query_columns(problem, unit, head, block, &mut arena))
        })
        .collect();
    let q_norms: Vec<&[f64]> = heads.iter().map(|(_, q)| q.norms(arena.take(queries))).collect();
    // `[values + 1, group, queries]`
    let sums = arena.take((value_dim + 1) * group * queries);
    {
        let mut places = ViewMut::strided(&mut *sums, [group * queries, queries, 0]);
        let places = places.shared();
        parallel(value_dim + 1, arena.rest(), per_transform, |value, memory| {
            let mut arena = Arena::new(memory);
            let mut work = line.work(&mut arena);
            let mut other = (group > 1).then(|| line.work(&mut arena));
            // SAFETY: each column of values is one task's own.
            let sums = unsafe { places.row(value, 0, 0, group * queries) };
            sums.fill(0.0);
            for feature in 0..features {
                line.transform(&line.keys, keys.k.column(feature), Some(keys.v.column(value)), &mut work);
                for ((kernel, q), to) in heads.iter().zip(sums.chunks_exact_mut(queries)) {
                    let work = match &mut other {
                        None => &mut work,
                        Some(other) => {
                            other.spectrum.copy_from_slice(work.spectrum);
                            other
                        }
                    };
                    line.convolve(kernel, false, work);
                    line.add(&line.queries, Some(q.column(feature)), work.signal, to);
                }
            }
        });
    }
    for (n, (head, (kernel, _))) in problem.heads(unit).zip(&heads).enumerate() {
        let lost = lost(line, kernel);
        for (value, sums) in sums.chunks_exact_mut(group * queries).enumerate() {
            let bound = lost * norm_of(keys.k_norms, keys.v.column(value));
            let sums = &mut sums[n * queries..][..queries];
            sums.iter_mut().zip(q_norms[n]).for_each(|(sum, q)| clear(sum, bound * q));
        }
        let column = |value: usize| &sums[(value * group + n) * queries..][..queries];
        let bound = lost * norm(keys.norms) / allowed::<T>(line);
        let whole = HeadRows { problem, shared, unit, head, q_norms: q_norms[n], bound, sink };
        whole.write(kernel.largest + keys.exponent, column(value_dim), column, tasks, block);
    }
}

/// What the rows of one head are certified and written by.
struct HeadRows<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    shared: &'x Shared<'x, T>,
    unit: &'x Unit<'a, T>,
    head: usize,
    q_norms: &'x [f64],
    /// What transforms may have lost of a denominator, over `‖q̄‖` and over what it may lose.
    bound: f64,
    sink: Sink<'x, T>,
}

impl<T: Real> HeadRows<'_, '_, T> {
    /// Writes the rows that keep their digits; adds the others to `tasks`.
    fn write<'c>(
        &self,
        exponent: f64,
        denominators: &[f64],
        column: impl Fn(usize) -> &'c [f64],
        tasks: &mut Vec<Task>,
        memory: &mut [T],
    ) {
        let Self { problem, shared, unit, head, sink, .. } = *self;
        let queries = unit.sequence.queries;
        let sees = |row: usize| problem.end(unit, row) > unit.begin();
        for first in (0..queries).step_by(TILE) {
            let rows = first..(first + TILE).min(queries);
            // Rows that fail are computed by tiles, in runs; other rows are not touched. A NaN does not fail.
            let fails = |row: &usize| sees(*row) && self.bound * self.q_norms[*row] > denominators[*row].abs();
            let mut row = rows.start;
            while row < rows.end {
                let run = (row..rows.end).take_while(&fails).count();
                if run > 0 {
                    tiled::push_chunks(tasks, unit.index, head, row..row + run);
                }
                row += run.max(1);
            }
            // A row's own exponent, which cancels but without normalisation.
            let mut q_shift = [T::ZERO; TILE];
            if problem.mapping.exponential && !problem.toeplitz.normalize {
                let queries = problem.queries(unit, head).skip(first);
                let (_, map) = block(problem, memory);
                problem.mapping.query_shifts(head, queries, rows.len(), &mut q_shift, map.work);
            }
            for row in rows.filter(|row| !fails(row)) {
                let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
                // SAFETY: each (batch, head, token) is written once, here or by the tiles of a failing block.
                let out = unsafe { sink.out.row(batch, head, token, problem.dims.value_dim) };
                let level = shared.level(unit, head, row).to_f64();
                let mut denominator = T::from_f64(denominators[row] * (exponent - level).exp());
                let mut factor = 1.0 / denominators[row];
                if !problem.toeplitz.normalize {
                    (factor, denominator) = ((exponent + q_shift[row - first].to_f64()).exp(), T::ONE);
                }
                if !sees(row) || denominator.vanishes() {
                    out.fill(T::ZERO);
                    denominator = if problem.toeplitz.normalize { T::ZERO } else { T::ONE };
                } else {
                    for (value, out) in out.iter_mut().enumerate() {
                        *out = T::from_f64(column(value)[row] * factor);
                    }
                }
                if let Some(places) = sink.denominators {
                    // SAFETY: as above.
                    unsafe { places.row(batch, head, token, 1)[0] = denominator };
                }
            }
        }
    }
}

/// Computes every gradient of a call. Blocks of queries, blocks of keys and distances in which a certificate fails go by
/// tiles; those of an image's keys and distances do so altogether if any fails.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let lines = lines(problem);
    let unit_len = most(&lines, |line| Whole::memory(problem, line));
    let per_transform = most(&lines, |line| 2 * line.work_len());
    let doubles_len = unit_len + threads::count() * per_transform;
    let others =
        |shared: &Shared<'_, T>, d_lines: &mut [T], sums: MapSums<'_, T>, block: &mut [T], doubles: &mut [f64]| {
            let (mut tasks, mut units) = (Vec::new(), Vec::new());
            for unit in (0..problem.units()).map(|index| problem.unit(index)) {
                let line = lines[unit.index / problem.dims.kv_heads].as_ref().filter(|_| transforms(problem, &unit));
                let Some(line) = line else {
                    for head in problem.heads(&unit) {
                        tiled::push_chunks(&mut tasks, unit.index, head, 0..unit.sequence.queries);
                    }
                    units.push(KeyUnit::whole(unit.index));
                    continue;
                };
                let d_lines = super::gradient::unit_lines(problem, d_lines, unit.index);
                let whole = Whole { problem, shared, cotangent, unit, line, sink, per_transform, sums };
                let index = unit.index;
                match whole.backward(&mut tasks, d_lines, block, doubles) {
                    None => units.push(KeyUnit::whole(index)),
                    Some(left) if left.any() => units.push(KeyUnit { index, left: Some(left) }),
                    Some(_) => {}
                }
            }
            (tasks, units)
        };
    tiled::backward_with(problem, cotangent, sink, parameters, StateGradients::NONE, scratch, doubles_len, others);
}

/// One unit of the backward pass.
struct Whole<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    shared: &'x Shared<'x, T>,
    cotangent: &'x Cotangent<'x, T>,
    unit: Unit<'a, T>,
    line: &'x Line,
    sink: GradientSink<'x, T>,
    /// Doubles of working memory of a task of transforms.
    per_transform: usize,
    sums: MapSums<'x, T>,
}

/// What one query head brings into the gradients of its unit.
struct HeadColumns<'s> {
    kernel: Kernel<'s>,
    q: Columns<'s>,
    /// `dN⁺_i` relative to the kernel's largest factor, (values + 1) × queries.
    d: Columns<'s>,
    /// `‖q̄_i‖`, `‖dN⁺_i‖` and their products.
    q_norms: &'s [f64],
    d_norms: &'s [f64],
    norms: &'s [f64],
}

/// Working memory for sums that are taken once a head.
struct Sums<'s> {
    keys: &'s mut [f64],
    queries: &'s mut [f64],
    spectrum: &'s mut [f64],
    pairs: [&'s mut [f64]; 2],
}

impl<'x, T: Real> Whole<'x, '_, T> {
    /// Doubles that one unit takes, beside those of tasks.
    fn memory(problem: &Problem<'_, T>, line: &Line) -> usize {
        let (dims, keys, queries) = (&problem.dims, line.key_count, line.query_count);
        let head = [line.spectrum_len(), problem.features * queries, (dims.value_dim + 1) * queries];
        let head = doubles(&head) + 3 * doubles(&[queries]);
        Keys::len(problem, line)
            + dims.group() * head
            + doubles(&[problem.features * keys, dims.value_dim * keys, problem.features * queries])
            + doubles(&[keys, queries, line.spectrum_len(), line.length, line.length])
            + (GROUPS + 1) * doubles(&[line.spectrum_len()])
            + line.work_len()
    }

    /// Computes the gradients of queries, but for those that it adds to `tasks`, and, unless it gives `None`, of keys,
    /// values and biases but for those that it gives.
    fn backward(&self, tasks: &mut Vec<Task>, lines: &mut [T], block: &mut [T], memory: &mut [f64]) -> Option<Left> {
        let Self { problem, unit, line, .. } = self;
        let (dims, key_count, queries) = (&problem.dims, line.key_count, line.query_count);
        let mut arena = Arena::new(memory);
        let keys = Keys::new(problem, unit, block, &mut arena);
        let mut work = line.work(&mut arena);
        let heads: Vec<HeadColumns<'_>> = problem
            .heads(unit)
            .map(|head| {
                let spectrum = arena.take(line.spectrum_len());
                let kernel = Kernel::new(problem, line, self.shared.line(head), &mut work, spectrum);
                let q = query_columns(problem, unit, head, block, &mut arena);
                let mut d = Columns::new(dims.value_dim + 1, queries, &mut arena);
                self.cotangent_columns(head, &kernel, &keys, block, &mut d);
                let (q_norms, d_norms) = (q.norms(arena.take(queries)), d.norms(arena.take(queries)));
                let norms = arena.take(queries);
                norms.copy_from_slice(q_norms);
                multiply(norms, d_norms);
                HeadColumns { kernel, q, d, q_norms, d_norms, norms }
            })
            .collect();
        let mut sums = Sums {
            keys: arena.take(key_count),
            queries: arena.take(queries),
            spectrum: arena.take(line.spectrum_len()),
            pairs: [arena.take(line.length), arena.take(line.length)],
        };
        let mut failing = vec![false; key_count];
        let distances: Option<Vec<Vec<bool>>> =
            heads.iter().map(|columns| self.certify(&keys, columns, &mut failing, &mut sums, &mut work)).collect();
        let left = distances.map(|distances| Left::new(&failing, &distances));
        // What is left of an image would be scattered over its tiles; under `exp` a key that fails may have lost, beside the
        // largest, what it brings to distances that do not.
        let whole = problem.is_grid() || problem.mapping.exponential;
        let left = left.filter(|left| !whole || !left.any());
        let certified = left.is_some();
        let mut dk = Columns::new(problem.features, key_count, &mut arena);
        let mut dv = Columns::new(dims.value_dim, key_count, &mut arena);
        let mut dq = Columns::new(problem.features, queries, &mut arena);
        let spectra = arena.take(GROUPS * line.spectrum_len());
        let rest = arena.rest();
        dk.numbers.fill(0.0);
        for (n, (head, columns)) in problem.heads(unit).zip(&heads).enumerate() {
            self.features(&keys, columns, &mut dq, certified.then_some((&mut dk, &mut *spectra)), rest);
            self.write_queries(head, &keys, columns, &mut dq, (tasks, block), &mut sums, &mut work);
            if let Some(left) = &left {
                let d_line = &mut lines[n * super::gradient::line_len(problem)..][..problem.line_width()];
                self.biases((n, head), &keys, columns, spectra, left, d_line, &mut work);
            }
        }
        if let Some(left) = &left {
            self.values(&keys, &heads, &mut dv, rest);
            self.write_keys(&keys, &heads, left, &mut dk, &mut dv, block);
        }
        left
    }

    /// Marks the keys of a head that lose digits in their gradients, and gives marks for the distances that do, by index
    /// of the head's line: what transforms may lose is compared with sums of norms, themselves correlated by transforms.
    /// `None` if there are numbers that are not finite, or norms that overflow: these say nothing of any key.
    fn certify(
        &self,
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        failing: &mut [bool],
        sums: &mut Sums<'_>,
        work: &mut Work<'_>,
    ) -> Option<Vec<bool>> {
        let Self { problem, unit, line, .. } = self;
        if !columns.q.numbers.iter().chain(&*columns.d.numbers).all(|x| x.is_finite()) {
            return None;
        }
        let (lost, allowed) = (lost(line, &columns.kernel), allowed::<T>(line));
        line.transform(&line.queries, columns.norms, None, work);
        line.convolve(&columns.kernel, true, work);
        sums.keys.fill(0.0);
        line.add(&line.keys, None, work.signal, sums.keys);
        let seen = problem.end(unit, unit.sequence.queries - 1);
        let bound = lost * norm(columns.norms);
        let of_distances = f64::EPSILON * (line.length as f64).log2() * norm(keys.norms) * norm(columns.norms);
        if !bound.is_finite() || !of_distances.is_finite() {
            return None;
        }
        for (key, (failing, &scale)) in failing.iter_mut().zip(&*sums.keys).enumerate() {
            let there = (key as isize) < seen && !unit.ignores(key);
            // An exponential of 0 was a number before it was taken relative to the largest.
            let faded = problem.mapping.exponential && keys.k_norms[key].powi(2) < T::MIN_POSITIVE.to_f64();
            *failing |= there && faded;
            let counts = there && keys.norms[key] != 0.0;
            // A scale that is NaN passes nothing.
            let passes = bound <= allowed * scale.abs();
            *failing |= counts && !passes;
        }
        // Distances: how many pairs have one at all is a whole number, which no transform loses.
        let sign = |x: &[f64], to: &mut [f64]| {
            to.iter_mut().zip(x).for_each(|(to, &x)| *to = if x > 0.0 { 1.0 } else { 0.0 });
        };
        sign(keys.norms, sums.keys);
        sign(columns.norms, sums.queries);
        let [pairs, scales] = &mut sums.pairs;
        line.pairs(sums.keys, sums.queries, work, sums.spectrum, pairs);
        line.pairs(keys.norms, columns.norms, work, sums.spectrum, scales);
        let mut marks = vec![false; problem.line_width()];
        let (low, high) = line.differences();
        for difference in low..=high {
            let at = line.kernel_index(difference);
            let index = usize::try_from(problem.line_index(difference)).ok();
            let index = index.filter(|&index| problem.line_difference(index).is_some());
            if let Some(mark) = index.and_then(|index| marks.get_mut(index)) {
                let passes = of_distances <= allowed * scales[at];
                *mark = pairs[at].round() != 0.0 && !passes;
            }
        }
        Some(marks)
    }

    /// Gradients of mapped queries; with `more` those of mapped keys too, which are added, and the spectrum of those of
    /// the biases, which comes first of [`GROUPS`].
    fn features(
        &self,
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        dq: &mut Columns<'_>,
        more: Option<(&mut Columns<'_>, &mut [f64])>,
        memory: &mut [f64],
    ) {
        let line = self.line;
        let HeadColumns { kernel, q, d, .. } = columns;
        let (key_count, query_count, spectrum_len) = (line.key_count, line.query_count, line.spectrum_len());
        let (features, value_dim) = (self.problem.features, self.problem.dims.value_dim);
        let width = features.div_ceil(GROUPS).max(1);
        let groups = features.div_ceil(width);
        let mut dq = ViewMut::strided(&mut *dq.numbers, [query_count, 0, 0]);
        let dq = dq.shared();
        let mut more = more.map(|(dk, spectra)| {
            (ViewMut::strided(&mut *dk.numbers, [key_count, 0, 0]), ViewMut::strided(spectra, [spectrum_len, 0, 0]))
        });
        {
            let more = more.as_mut().map(|(dk, spectra)| (dk.shared(), spectra.shared()));
            parallel(groups, memory, self.per_transform, |group, memory| {
                let mut arena = Arena::new(memory);
                let (mut work, mut other) = (line.work(&mut arena), line.work(&mut arena));
                // SAFETY: each group has a spectrum of its own.
                let mut bias =
                    more.as_ref().map(|(_, spectra)| complex(unsafe { spectra.row(group, 0, 0, spectrum_len) }));
                if let Some(bias) = &mut bias {
                    bias.fill(Complex::default());
                }
                for feature in group * width..((group + 1) * width).min(features) {
                    // SAFETY: each feature is one group's own.
                    let dq = unsafe { dq.row(feature, 0, 0, query_count) };
                    // SAFETY: as above.
                    let mut dk = more.as_ref().map(|(dk, _)| unsafe { dk.row(feature, 0, 0, key_count) });
                    dq.fill(0.0);
                    for value in 0..=value_dim {
                        line.transform(&line.keys, keys.k.column(feature), Some(keys.v.column(value)), &mut work);
                        if let (Some(dk), Some(bias)) = (&mut dk, &mut bias) {
                            line.transform(&line.queries, q.column(feature), Some(d.column(value)), &mut other);
                            dispatch(AddConjugateProducts { to: bias, x: work.spectrum, y: other.spectrum });
                            line.convolve(kernel, true, &mut other);
                            line.add(&line.keys, Some(keys.v.column(value)), other.signal, dk);
                        }
                        line.convolve(kernel, false, &mut work);
                        line.add(&line.queries, Some(d.column(value)), work.signal, dq);
                    }
                }
            });
        }
        if let Some((_, spectra)) = &mut more {
            let spectra = spectra.shared();
            for group in 1..groups {
                // SAFETY: two rows of one thread's.
                let (to, from) =
                    unsafe { (spectra.row(0, 0, 0, spectrum_len), spectra.row(group, 0, 0, spectrum_len)) };
                add_scaled(to, 1.0, from);
            }
        }
    }

    /// The gradients of the biases of the `n`-th head from their spectrum.
    #[allow(clippy::too_many_arguments)]
    fn biases(
        &self,
        (n, head): (usize, usize),
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        spectrum: &mut [f64],
        left: &Left,
        d_line: &mut [T],
        work: &mut Work<'_>,
    ) {
        let Self { problem, line, .. } = self;
        if problem.features == 0 {
            return;
        }
        work.spectrum.copy_from_slice(complex(&mut spectrum[..line.spectrum_len()]));
        line.inverse(work);
        let (low, high) = line.differences();
        let length = line.length as f64;
        let bound = f64::EPSILON * length.log2() * norm(keys.norms) * norm(columns.norms);
        for difference in low..=high {
            let index = problem.line_index(difference);
            let place = usize::try_from(index).ok().filter(|&index| !left.distance(n, index));
            if let Some(to) = place.and_then(|index| d_line.get_mut(index)) {
                let mut sum = work.signal[line.kernel_index(difference)] / length;
                clear(&mut sum, bound);
                let c = (self.shared.line(head)[index as usize].to_f64() - columns.kernel.largest).exp();
                *to = T::from_f64(c * sum);
            }
        }
    }

    /// The gradients of values.
    fn values(&self, keys: &Keys<'_>, heads: &[HeadColumns<'_>], dv: &mut Columns<'_>, memory: &mut [f64]) {
        let line = self.line;
        let mut places = ViewMut::strided(&mut *dv.numbers, [line.key_count, 0, 0]);
        let places = places.shared();
        parallel(self.problem.dims.value_dim, memory, self.per_transform, |value, memory| {
            let mut work = line.work(&mut Arena::new(memory));
            // SAFETY: each column is one task's own.
            let to = unsafe { places.row(value, 0, 0, line.key_count) };
            to.fill(0.0);
            for columns in heads {
                for feature in 0..self.problem.features {
                    let (q, d) = (columns.q.column(feature), columns.d.column(value));
                    line.transform(&line.queries, q, Some(d), &mut work);
                    line.convolve(&columns.kernel, true, &mut work);
                    line.add(&line.keys, Some(keys.k.column(feature)), work.signal, to);
                }
            }
        });
    }

    /// `dN⁺` of every row of a head, relative to the kernel's largest factor and the keys' exponent.
    fn cotangent_columns(
        &self,
        head: usize,
        kernel: &Kernel<'_>,
        keys: &Keys<'_>,
        memory: &mut [T],
        columns: &mut Columns<'_>,
    ) {
        let Self { problem, shared, unit, .. } = self;
        let (block, map) = block(problem, memory);
        let (queries, value_dim) = (unit.sequence.queries, problem.dims.value_dim);
        let (mut c, mut shifts) = ([T::ZERO; TILE], [T::ZERO; TILE]);
        for first in (0..queries).step_by(TILE) {
            let rows = first..(first + TILE).min(queries);
            let raw = problem.queries(unit, head).skip(first);
            problem.mapping.query_shifts(head, raw, rows.len(), &mut shifts, map.work);
            load_cotangent(problem, shared, self.cotangent, unit, head, rows.clone(), &shifts, block, &mut c);
            columns.put(first, rows.len(), block, problem.value_width, value_dim);
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
    }

    /// Writes the gradients of one head's queries from those of their features, or leaves them to tiles. Whether it
    /// does depends on keys and values and on the rows of a block alone.
    #[allow(clippy::too_many_arguments)]
    fn write_queries(
        &self,
        head: usize,
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        dq: &mut Columns<'_>,
        (tasks, blocks): (&mut Vec<Task>, &mut [T]),
        sums: &mut Sums<'_>,
        work: &mut Work<'_>,
    ) {
        let Self { problem, unit, line, .. } = self;
        let (width, head_dim) = (problem.head_width, problem.dims.head_dim);
        let lost = lost(line, &columns.kernel);
        for (feature, dq) in dq.numbers.chunks_exact_mut(line.query_count).enumerate() {
            let bound = lost * norm_of(keys.k.column(feature), keys.v_norms);
            dq.iter_mut().zip(columns.d_norms).for_each(|(x, d)| clear(x, bound * d));
        }
        let scales = &mut *sums.queries;
        scales.fill(0.0);
        line.transform(&line.keys, keys.norms, None, work);
        line.convolve(&columns.kernel, false, work);
        line.add(&line.queries, None, work.signal, scales);
        let bound = lost * norm(keys.norms) / allowed::<T>(line);
        let sees = |row: usize| problem.end(unit, row) > unit.begin();

        let mut arena = Arena::new(blocks);
        let (phi, block) = (arena.take(TILE * width), arena.take(TILE * width));
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        // SAFETY: the tasks that share it come later.
        let map_sums = unsafe { self.sums.of_queries(unit.index, head, 0) };
        let mut shifts = [T::ZERO; TILE];
        let queries = problem.queries(unit, head);
        for first in (0..dq.count).step_by(TILE) {
            let rows = (dq.count - first).min(TILE);
            if (first..first + rows).any(|row| sees(row) && bound > scales[row].abs()) {
                tiled::push_chunks(tasks, unit.index, head, first..first + rows);
                continue;
            }
            problem.load_queries(unit, head, first, rows, phi, &mut shifts, &mut map);
            dq.take(first, rows, block, width);
            let (side, from, counts) = (Side::Query(head), queries.skip(first), |row: usize| sees(first + row));
            let (raw, width) = problem.pull_back(side, from, rows, counts, phi, block, map_sums, &mut map);
            for row in 0..rows {
                let token = unit.sequence.query_start + first + row;
                // SAFETY: each (batch, head, token) belongs to one unit.
                let to = unsafe { self.sink.dq.row(unit.sequence.batch, head, token, head_dim) };
                if sees(first + row) {
                    store(&raw[row * width..], T::ONE, to);
                } else {
                    to.fill(T::ZERO);
                }
            }
        }
    }

    /// Writes the gradients of the unit's keys and values, but for the blocks of keys that tiles take.
    fn write_keys(
        &self,
        keys: &Keys<'_>,
        heads: &[HeadColumns<'_>],
        left: &Left,
        dk: &mut Columns<'_>,
        dv: &mut Columns<'_>,
        blocks: &mut [T],
    ) {
        let Self { problem, unit, line, .. } = self;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        for (feature, dk) in dk.numbers.chunks_exact_mut(line.key_count).enumerate() {
            let bound = |columns: &HeadColumns<'_>| {
                lost(line, &columns.kernel) * norm_of(columns.q.column(feature), columns.d_norms)
            };
            let bound: f64 = heads.iter().map(bound).sum();
            dk.iter_mut().zip(keys.v_norms).for_each(|(x, v)| clear(x, bound * v));
        }
        for (value, dv) in dv.numbers.chunks_exact_mut(line.key_count).enumerate() {
            let bound = |columns: &HeadColumns<'_>| {
                lost(line, &columns.kernel) * norm_of(columns.d.column(value), columns.q_norms)
            };
            let bound: f64 = heads.iter().map(bound).sum();
            dv.iter_mut().zip(keys.k_norms).for_each(|(x, k)| clear(x, bound * k));
        }
        let exponent = T::from_f64(keys.exponent);
        let mut arena = Arena::new(blocks);
        let (phi, d_k) = (arena.take(TILE * head_width), arena.take(TILE * head_width));
        let d_v = arena.take(TILE * value_width);
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        // SAFETY: the tasks that share it come later.
        let map_sums = unsafe { self.sums.of_keys(unit.index, 0) };
        let seen = problem.end(unit, unit.sequence.queries - 1);
        for first in (0..dk.count).step_by(TILE) {
            let rows = (dk.count - first).min(TILE);
            if left.keys(first, rows) {
                continue;
            }
            problem.load_keys(unit, (first, rows), exponent, phi, &mut map);
            dk.take(first, rows, d_k, head_width);
            dv.take(first, rows, d_v, value_width);
            let there = |row: usize| ((first + row) as isize) < seen && !unit.ignores(first + row);
            let (side, from) = (Side::Key(unit.kv_head), unit.k.skip(first));
            let (d_k, width) = problem.pull_back(side, from, rows, there, phi, d_k, map_sums, &mut map);
            for row in 0..rows {
                let rows = (&d_k[row * width..], &d_v[row * value_width..]);
                super::gradient::write(problem, unit, first + row, self.sink, there(row).then_some(rows));
            }
        }
        for key in dk.count..dk.count + unit.sequence.absent {
            super::gradient::write(problem, unit, key, self.sink, None);
        }
    }
}

impl Columns<'_> {
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
