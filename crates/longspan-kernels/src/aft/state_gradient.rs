//! Gradients that come from the final state and go to the initial one.
//!
//! They are those of the numbers as they are stored, with exponents held fixed; exponents and marks have gradient 0. As a
//! state stands for `e^exponent` times its numbers whatever the exponent, this is all there is to carry back.
//!
//! A final state's mean sees, without biases, every key that no window reaches any more, as a row after the last would: with
//! the exponent `x` of that mean it is one more item `(−x, 0, d num, −d den)` for those keys. The ring's gradients are those
//! of the keys that stand in it. The initial state's mean is seen by every row, as a key with `v = 0` is.

use std::ops::Range;

use super::keys::{KeyItems, write_item};
use super::problem::{CHUNK, Problem, reach};
use super::state::{Head, OLDEST, advance};
use super::walk::{Items, join_all};
use crate::call::{Cotangent, Sequence, SharedRows, State, ViewMut};
use crate::simd::Real;
use crate::simd::block::floor;

/// The gradients at both ends of a call.
pub(super) struct Links<'a, T> {
    /// The final state's gradient, and its mean as an item for each head.
    last: Option<(&'a State<T>, Vec<T>)>,
    /// All numbers of the initial state's.
    first: Option<SharedRows<'a, T>>,
    ring: usize,
    mean: usize,
    kv_heads: usize,
}

impl<'a, T: Real> Links<'a, T> {
    /// Clears the gradient of the initial state.
    pub fn new(problem: &Problem<'_, T>, cotangent: &Cotangent<'a, T>, first: Option<&'a mut ViewMut<'_, T>>) -> Self {
        let (mean, kv_heads) = (problem.mean(), problem.dims.kv_heads);
        let ring = reach(problem.aft, true).0;
        let last = cotangent.final_state.map(|state| {
            let mut items = vec![T::ZERO; problem.sequences.len() * kv_heads * mean];
            let mut work = vec![T::ZERO; (CHUNK + 2) * mean];
            for (index, item) in items.chunks_exact_mut(mean).enumerate() {
                let (sequence, kv_head) = (&problem.sequences[index / kv_heads], index % kv_heads);
                far(problem, sequence, kv_head, item, &mut work);
                let head = Head::from(state.head(sequence.batch, kv_head));
                let (width, len) = (problem.width, problem.dims.head_dim);
                for channel in 0..width {
                    let x = item[channel];
                    let there = channel < len && x > floor();
                    let denominator = head.denominator[channel.min(head.denominator.len() - 1)];
                    item[channel] = if there { -x } else { T::NEG_INFINITY };
                    item[width + channel] = T::ZERO;
                    item[2 * width + channel] = if there { head.numerator[channel] } else { T::ZERO };
                    item[3 * width + channel] = if there { -denominator } else { T::ZERO };
                }
            }
            (state, items)
        });
        Self { last, first: first.map(|view| view.shared()), ring, mean, kv_heads }
    }

    /// The final state's mean as key `key` sees it, if no window reaches that any more.
    pub fn leaving(&self, sequence: &Sequence<'_>, kv_head: usize, key: isize) -> Option<&[T]> {
        let (_, items) = self.last.as_ref()?;
        let left = key < sequence.keys as isize - self.ring as isize;
        left.then(|| &items[(sequence.batch * self.kv_heads + kv_head) * self.mean..][..self.mean])
    }

    /// The final state's mean, which the initial one's is part of.
    pub fn last_item(&self, sequence: &Sequence<'_>, kv_head: usize) -> Option<&[T]> {
        self.leaving(sequence, kv_head, isize::MIN)
    }

    /// The final state's gradients of a key that stands in its ring.
    pub fn kept(
        &self,
        problem: &Problem<'_, T>,
        sequence: &Sequence<'_>,
        kv_head: usize,
        key: isize,
    ) -> Option<(&'a [T], &'a [T])> {
        let (state, _) = self.last.as_ref()?;
        let back = sequence.keys as isize - key;
        if back > self.ring as isize {
            return None;
        }
        let none = [T::ZERO; 3];
        let before = problem.call.initial_state.map(|state| Head::from(state.head(sequence.batch, kv_head)).marks);
        let marks = advance(problem.aft, before.unwrap_or(&none), sequence.keys);
        let row = (marks[OLDEST].to_f64() as usize + self.ring - back as usize) % self.ring;
        let (head, key_dim, width) =
            (Head::from(state.head(sequence.batch, kv_head)), problem.key_dim, problem.dims.head_dim);
        Some((&head.ring_keys[row * key_dim..][..key_dim], &head.ring_values[row * width..][..width]))
    }

    /// Where the gradients of the key of `back` tokens before key 0 and of its value go.
    ///
    /// # Safety
    /// No two tasks may have the same key at one time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn ring_row(
        &self,
        problem: &Problem<'_, T>,
        batch: usize,
        kv_head: usize,
        back: usize,
    ) -> Option<(&mut [T], &mut [T])> {
        let (first, state) = (self.first.as_ref()?, problem.call.initial_state?);
        let oldest = Head::from(state.head(batch, kv_head)).marks[OLDEST].to_f64() as usize;
        let row = (oldest + self.ring - back) % self.ring;
        let (key_dim, width) = (problem.key_dim, problem.dims.head_dim);
        let parts = state.shape().parts;
        let start = (batch * self.kv_heads + kv_head) * state.shape().head_len();
        let keys = start + parts[0] + parts[1] + parts[2];
        // SAFETY: the parts of a head and the rows of its ring lie apart; the caller promises one task a key.
        unsafe {
            Some((
                first.row(0, 0, keys + row * key_dim, key_dim),
                first.row(0, 0, keys + parts[3] + row * width, width),
            ))
        }
    }

    /// Whether a state at either end has a gradient.
    pub fn any(&self) -> bool {
        self.last.is_some() || self.first.is_some()
    }

    /// Whether the gradient of the initial state is wanted.
    pub fn lends(&self) -> bool {
        self.first.is_some()
    }

    /// Where the gradients of numerator and denominator of some channels of one head of the initial state go.
    ///
    /// # Safety
    /// No two tasks may have the same channels of a head at one time; with one key a head there is one denominator.
    #[allow(clippy::mut_from_ref, clippy::type_complexity)]
    pub unsafe fn far_gradient<'p>(
        &self,
        problem: &Problem<'p, T>,
        batch: usize,
        kv_head: usize,
        channels: Range<usize>,
    ) -> Option<(Head<&'p [T]>, &mut [T], &mut [T])> {
        let (first, state) = (self.first.as_ref()?, problem.call.initial_state?);
        let parts = state.shape().parts;
        let start = (batch * self.kv_heads + kv_head) * state.shape().head_len();
        let of_keys = if parts[1] == parts[0] { channels.clone() } else { 0..parts[1] };
        // SAFETY: the parts of a head lie apart; the caller promises one task for these channels.
        unsafe {
            let (numerator, denominator) = (
                first.row(0, 0, start + channels.start, channels.len()),
                first.row(0, 0, start + parts[0] + of_keys.start, of_keys.len()),
            );
            Some((Head::from(state.head(batch, kv_head)), numerator, denominator))
        }
    }
}

/// The mean of the keys that no window reaches any more after the last one; `work` has room for a chunk and two more.
pub(super) fn far<T: Real>(
    problem: &Problem<'_, T>,
    sequence: &Sequence<'_>,
    kv_head: usize,
    sum: &mut [T],
    work: &mut [T],
) {
    let items = KeyItems::new(problem, sequence, kv_head);
    let ring = reach(problem.aft, true).0 as isize;
    let reached = (sequence.keys as isize - ring).max(-(problem.ring as isize));
    items.start(sum);
    join_all(&items, -(problem.ring as isize), reached, sum, work);
}

/// The initial state's mean as an item that its rows' sum turns into gradients: numerator for `dv`, denominator for `dk`.
pub(super) fn far_item<T: Real>(head: &Head<&[T]>, width: usize, item: &mut [T]) {
    write_item(None, width, item);
    let len = head.numerator.len();
    for (channel, x) in item[..len].iter_mut().enumerate() {
        *x = head.exponent[channel.min(head.exponent.len() - 1)];
    }
    item[len..width].fill(floor());
}
