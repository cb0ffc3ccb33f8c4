//! What a range of keys leaves behind for later queries, in the layout of the kernels.

use std::sync::{Mutex, PoisonError};

use super::layout::FeatureLayout;
use super::problem::{Problem, Unit};
use super::state::{Head, OLDEST, SHIFT};
use crate::call::State;
use crate::kernelized::running_sum::add_compensated;
use crate::simd::Real;
use crate::simd::block::{add_scaled, decay_by, scale_by};
use crate::simd::rows::padded;

#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub features: FeatureLayout,
    /// Features of the weights and of the denominators, without the gaps between their multiples.
    counts: (usize, usize),
    /// Features in whole cache lines, so that `S` can be transposed in place of its own.
    pub rows: usize,
    pub value_width: usize,
    pub head_width: usize,
}

/// Numbers after the sums: the far count, the shift, and whether content and far sums hold anything.
const FLAGS: usize = 4;

impl Layout {
    pub fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        Self {
            features: problem.layout,
            counts: if problem.content { problem.layout.counts() } else { (0, 0) },
            rows: if problem.content { problem.head_width } else { 0 },
            value_width: problem.value_width,
            head_width: problem.head_width,
        }
    }

    pub fn len<T>(self) -> usize {
        self.flags() + padded::<T>(FLAGS)
    }

    fn keys(self) -> usize {
        self.rows * self.value_width
    }

    fn far(self) -> usize {
        self.keys() + self.head_width
    }

    fn flags(self) -> usize {
        self.far() + self.value_width
    }
}

/// `S = Σ φ(k) vᵀ` (`rows × value_width`), `z = Σ φ(k)`, the far sum `Σ v⁺` and its count, and the exponent that
/// was subtracted from the keys.
pub(super) struct Summary<'s, T> {
    pub layout: Layout,
    pub numbers: &'s mut [T],
}

#[derive(Clone, Copy)]
pub(super) struct SummaryRef<'s, T> {
    layout: Layout,
    numbers: &'s [T],
}

impl<'s, T: Real> SummaryRef<'s, T> {
    pub fn new(layout: Layout, numbers: &'s [T]) -> Self {
        Self { layout, numbers }
    }
    pub fn sum(&self) -> &'s [T] {
        &self.numbers[..self.layout.keys()]
    }
    pub fn keys(&self) -> &'s [T] {
        &self.numbers[self.layout.keys()..self.layout.far()]
    }
    pub fn far(&self) -> &'s [T] {
        &self.numbers[self.layout.far()..self.layout.flags()]
    }
    pub fn count(&self) -> T {
        self.numbers[self.layout.flags()]
    }
    pub fn shift(&self) -> T {
        self.numbers[self.layout.flags() + 1]
    }
    /// Whether any key has gone into `S` and `z`.
    pub fn has_content(&self) -> bool {
        self.numbers[self.layout.flags() + 2] != T::ZERO
    }
}

impl<'s, T: Real> Summary<'s, T> {
    pub fn new(layout: Layout, numbers: &'s mut [T]) -> Self {
        Self { layout, numbers }
    }

    pub fn view(&self) -> SummaryRef<'_, T> {
        SummaryRef { layout: self.layout, numbers: self.numbers }
    }

    /// Nothing, with no exponent.
    pub fn clear(&mut self) {
        self.numbers.fill(T::ZERO);
        *self.shift() = T::NEG_INFINITY;
    }

    pub fn copy(&mut self, other: SummaryRef<'_, T>) {
        self.numbers.copy_from_slice(other.numbers);
    }

    pub fn sum(&mut self) -> &mut [T] {
        &mut self.numbers[..self.layout.keys()]
    }
    pub fn keys(&mut self) -> &mut [T] {
        &mut self.numbers[self.layout.keys()..self.layout.far()]
    }
    pub fn far(&mut self) -> &mut [T] {
        &mut self.numbers[self.layout.far()..self.layout.flags()]
    }
    pub fn count(&mut self) -> &mut T {
        &mut self.numbers[self.layout.flags()]
    }
    pub fn shift(&mut self) -> &mut T {
        &mut self.numbers[self.layout.flags() + 1]
    }
    pub fn set_content(&mut self) {
        self.numbers[self.layout.flags() + 2] = T::ONE;
    }

    pub fn scale_content(&mut self, factor: T) {
        if factor != T::ONE {
            let far = self.layout.far();
            decay_by(&mut self.numbers[..far], factor);
        }
    }

    pub fn raise(&mut self, shift: T) {
        let old = *self.shift();
        if shift > old {
            if old.is_finite() {
                self.scale_content((old - shift).exp());
            }
            *self.shift() = shift;
        }
    }

    /// Takes the state of earlier calls.
    pub fn load(&mut self, state: Head<&[T]>, value_dim: usize) {
        self.clear();
        let width = self.layout.value_width;
        let Layout { features, counts, .. } = self.layout;
        for feature in 0..counts.0 {
            let to = features.place(feature) * width;
            self.sum()[to..][..value_dim].copy_from_slice(&state.sum[feature * value_dim..][..value_dim]);
        }
        for feature in 0..counts.1 {
            self.keys()[features.denominator() + features.place(feature)] = state.keys[feature];
        }
        if !state.far.is_empty() {
            self.far()[..value_dim].copy_from_slice(&state.far[..value_dim]);
            *self.count() = state.far[value_dim];
        }
        *self.shift() = state.marks[SHIFT];
        if state.keys.iter().chain(state.sum.iter()).any(|&x| x != T::ZERO) {
            self.set_content();
        }
    }

    /// Takes the sums of all tokens of a state, those of its ring too.
    pub fn load_all(&mut self, state: Head<&[T]>, value_dim: usize) {
        self.load(state, value_dim);
        let from = self.layout.far();
        let (sums, count) = self.numbers[from..].split_at_mut(self.layout.value_width);
        sums.fill(T::ZERO);
        count[0] = T::ZERO;
        add_values(state, value_dim, sums, &mut count[0]);
    }

    /// Leaves a state for later calls, all but its ring.
    pub fn store(&self, state: &mut Head<&mut [T]>, value_dim: usize, exponent: bool) {
        let view = self.view();
        let width = self.layout.value_width;
        let Layout { features, counts, .. } = self.layout;
        for feature in 0..counts.0 {
            let from = features.place(feature) * width;
            state.sum[feature * value_dim..][..value_dim].copy_from_slice(&view.sum()[from..][..value_dim]);
        }
        for feature in 0..counts.1 {
            state.keys[feature] = view.keys()[features.denominator() + features.place(feature)];
        }
        if !state.far.is_empty() {
            state.far[..value_dim].copy_from_slice(&view.far()[..value_dim]);
            state.far[value_dim] = view.count();
        }
        // Only an exponential leaves one behind.
        state.marks[SHIFT] = if exponent { view.shift() } else { T::ZERO };
    }
}

pub(super) fn add_values<T: Real>(state: Head<&[T]>, value_dim: usize, sums: &mut [T], count: &mut T) {
    for row in state.values(value_dim) {
        add_scaled(&mut sums[..value_dim], T::ONE, &row[..value_dim]);
        *count += row[value_dim];
    }
}

/// A sum of summaries along segments, compensated: what rounding takes from `high` is kept in `low`, so the error does
/// not grow with the number of segments.
pub(super) struct Carry<'s, T> {
    pub high: Summary<'s, T>,
    low: &'s mut [T],
    /// Whether nothing has come in yet.
    empty: bool,
}

impl<'s, T: Real> Carry<'s, T> {
    pub fn new(layout: Layout, high: &'s mut [T], low: &'s mut [T]) -> Self {
        low.fill(T::ZERO);
        let mut high = Summary::new(layout, high);
        high.clear();
        Self { high, low, empty: true }
    }

    /// Goes on with the sum that [`new`](Self::new) once began in this memory.
    pub fn resume(layout: Layout, high: &'s mut [T], low: &'s mut [T]) -> Self {
        Self { high: Summary::new(layout, high), low, empty: false }
    }

    /// Takes the state of earlier calls, as a unit's first token finds it.
    pub fn load(&mut self, unit: &Unit<'_, T>, state: Head<&[T]>, value_dim: usize) {
        self.high.load(state, value_dim);
        self.empty = false;
        self.pass([unit.decay.entry(); 2]);
    }

    /// Takes the sums of keys before and after those of a call; `memory` is as large as a summary.
    pub fn load_outside(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        outside: [&State<T>; 2],
        memory: &mut [T],
    ) {
        let value_dim = problem.dims.value_dim;
        for state in outside {
            let mut summary = Summary::new(self.high.layout, &mut *memory);
            summary.load_all(unit.head(state), value_dim);
            self.add(problem, [T::ONE; 2], summary.view());
        }
    }

    /// Lets tokens pass, with which content and far sums fall.
    pub fn pass(&mut self, [content, far]: [T; 2]) {
        let layout = self.high.layout;
        let (keys, end) = (layout.far(), layout.flags());
        for (range, decay) in [(0..keys, content), (keys..end, far)] {
            if decay != T::ONE {
                decay_by(&mut self.high.numbers[range.clone()], decay);
                decay_by(&mut self.low[range], decay);
            }
        }
        *self.high.count() *= far;
    }

    /// Lets tokens pass and adds the summary of their keys.
    pub fn add(&mut self, problem: &Problem<'_, T>, passed: [T; 2], local: SummaryRef<'_, T>) {
        if std::mem::take(&mut self.empty) {
            self.high.numbers.copy_from_slice(local.numbers);
            return;
        }
        self.pass(passed);
        let layout = self.high.layout;
        let mut factor = T::ONE;
        if problem.exponential && local.has_content() {
            let before = *self.high.shift();
            self.high.raise(local.shift());
            let now = *self.high.shift();
            if now > before && before.is_finite() {
                let far = layout.far();
                scale_by(&mut self.low[..far], (before - now).exp());
            }
            // Without an exponent every key was ignored, and there is nothing to bring to scale.
            factor = if local.shift().is_finite() { (local.shift() - now).exp() } else { T::ZERO };
        }
        let mut from = 0;
        for (to, factor) in [(layout.far(), factor), (layout.flags() + 1, T::ONE)] {
            let (high, low) = (&mut self.high.numbers[from..to], &mut self.low[from..to]);
            add_compensated(high, low, &local.numbers[from..to], factor);
            from = to;
        }
        if local.has_content() {
            self.high.set_content();
        }
    }
}

/// One head's place for its state. One task at a time writes to it.
pub(super) type Place<'a, T> = Mutex<Head<&'a mut [T]>>;

pub(super) fn places<T: Real>(state: &mut State<T>) -> Vec<Place<'_, T>> {
    state.heads_mut().map(|head| Mutex::new(head.into())).collect()
}

/// Writes the state after the last key of a unit: its sums, and the ring of its last values, or of those of the initial
/// state.
pub(super) fn store_state<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    ring: Option<Head<&[T]>>,
    sums: &Summary<'_, T>,
    place: &Place<'_, T>,
) {
    // One task holds each head; a poisoned lock would mean that another panicked, which ends the call anyway.
    let mut head = place.lock().unwrap_or_else(PoisonError::into_inner);
    sums.store(&mut head, problem.dims.value_dim, problem.exponential);
    let keys = unit.sequence.keys;
    let entry = problem.dims.value_dim + 1;
    let radius = head.ring.len() / entry;
    head.marks[OLDEST] = T::ZERO;
    head.set_tokens(ring.map_or(0, |before| before.tokens()) + keys as u64);
    let last = keys as isize - 1;
    if let [passed] = &mut *head.passed {
        *passed = ring.map_or(T::ZERO, |before| before.passed[0]) + problem.log_decays(unit);
    }
    let left = |key: isize| if problem.attention.gate { unit.decay.between(key, last) } else { T::ONE };
    for (slot, to) in head.ring.chunks_exact_mut(entry).enumerate() {
        to.fill(T::ZERO);
        let key = (keys + slot) as isize - radius as isize;
        if key >= 0 && !unit.sequence.ignores(key as usize) {
            to[..entry - 1].copy_from_slice(unit.v.row(key as usize, entry - 1));
            to[entry - 1] = left(key);
        } else if let Some(row) = ring.and_then(|before| before.ring_row(-key as usize, entry))
            && key < 0
        {
            to.copy_from_slice(row);
            to[entry - 1] *= left(key);
        }
    }
}
