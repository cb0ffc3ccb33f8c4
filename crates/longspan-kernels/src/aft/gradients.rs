//! What a backward call starts from, and where it writes, states among it.
//!
//! Gradients of states are those of the numbers as they are stored, with exponents held fixed; exponents and marks have gradient 0. As a
//! state stands for `e^exponent` times its numbers whatever the exponent, this is all there is to carry back.
//!
//! A final state's mean sees, without biases, every key that no window reaches any more, as a row after the last would: with
//! the exponent `x` of that mean it is one more item `(−x, 0, d num, −d den)` for those keys. The ring's gradients are those
//! of the keys that stand in it. The initial state's mean is seen by every row, as a key with `v = 0` is.

use std::ops::Range;

use super::chunks::CHUNK;
use super::final_state::{far, marks};
use super::keys::KeyItems;
use super::outputs::OutputRows;
use super::problem::Problem;
use super::state::{Head, OLDEST, ring_place};
use crate::call::{Cotangent, Mechanism, Sequence, SharedRows, State, StateSink, View};
use crate::simd::Real;
use crate::simd::block::floor;
use crate::simd::rows::Rows;

/// Heads are dealt into at most so many groups, each with a sum of its own for the gradients of biases: a number that
/// does not depend on threads, so that neither do the bits.
pub(super) const GROUPS: usize = 16;

/// Numbers that the rows of one block may take, if it has more than one head.
pub(super) const BLOCK_NUMBERS: usize = 1 << 20;

pub(super) struct Backward<'a, T: 'static> {
    pub problem: &'a Problem<'a, T>,
    pub cotangent: &'a Cotangent<'a, T>,
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
    /// The final state's gradient, and its mean as an item for each head.
    pub last: Option<(&'a State<T>, Vec<T>)>,
    /// Where the gradient of the initial state goes, which is 0.
    pub first: Option<StateSink<'a, T>>,
}

impl<'a, T: Real> Backward<'a, T> {
    /// What the forward kept of the mean of a row, where there is a table of all biases.
    pub fn kept(&self, batch: usize, head: usize, token: usize) -> &[T] {
        let shape = self.problem.aft.denominators(&self.problem.dims);
        View::contiguous(self.cotangent.denominators, shape).token(batch, head, token, shape[3])
    }

    /// `count` rows of a head from the sequence's row `from` on, from a column on.
    pub fn rows(
        &self,
        sequence: &Sequence<'_>,
        head: usize,
        from: usize,
        count: usize,
        column: usize,
    ) -> OutputRows<'_, T> {
        OutputRows {
            q: self.problem.aft.gate.then(|| rows_of(&self.problem.call.q, sequence, head, from, column)),
            d_out: rows_of(&self.cotangent.d_out, sequence, head, from, column),
            out: rows_of(&self.cotangent.out, sequence, head, from, column),
            count,
        }
    }

    /// Takes one key's gradient: `add(key, value, dk, dv)` adds to what stands in `dk` and `dv`. These are cleared before and get what
    /// the final state's ring gives if this is the `first` of its heads of queries.
    ///
    /// # Safety
    /// No two tasks may have the same key of a head at one time.
    pub unsafe fn add_to_key(
        &self,
        items: &KeyItems<'_, T>,
        sequence: &Sequence<'_>,
        kv_head: usize,
        key: isize,
        first: bool,
        add: impl FnOnce((&[T], &[T]), &mut [T], &mut [T]),
    ) {
        let (key_dim, head_dim) = (self.problem.key_dim, self.problem.dims.head_dim);
        // SAFETY: the caller's promise; the slices end here.
        let places = unsafe {
            if key < 0 {
                self.ring_row(sequence, kv_head, key.unsigned_abs())
            } else {
                let at = sequence.key_start + key as usize;
                let dk = self.dk.row(sequence.batch, kv_head, at, key_dim);
                Some((dk, self.dv.row(sequence.batch, kv_head, at, head_dim)))
            }
        };
        let Some((dk, dv)) = places else { return };
        if first {
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
        }
        let Some(token) = items.token(key) else { return };
        add(token, dk, dv);
        if let Some((d_key, d_value)) = self.kept_by_state(sequence, kv_head, key).filter(|_| first) {
            dv.iter_mut().zip(d_value).for_each(|(to, &d)| *to += d);
            dk.iter_mut().zip(d_key).for_each(|(to, &d)| *to += d);
        }
    }

    /// The final state's mean as key `key` sees it, if no window reaches that any more.
    pub fn leaving(&self, sequence: &Sequence<'_>, kv_head: usize, key: isize) -> Option<&[T]> {
        let (_, items) = self.last.as_ref()?;
        let (mean, kv_heads) = (self.problem.mean(), self.problem.dims.kv_heads);
        let left = key < sequence.keys as isize - self.problem.aft.ring() as isize;
        left.then(|| &items[(sequence.batch * kv_heads + kv_head) * mean..][..mean])
    }

    /// The final state's mean, which the initial one's is part of.
    pub fn last_item(&self, sequence: &Sequence<'_>, kv_head: usize) -> Option<&[T]> {
        self.leaving(sequence, kv_head, isize::MIN)
    }

    /// The final state's gradients of a key that stands in its ring.
    pub fn kept_by_state(&self, sequence: &Sequence<'_>, kv_head: usize, key: isize) -> Option<(&'a [T], &'a [T])> {
        let (state, _) = self.last.as_ref()?;
        let (back, ring) = (sequence.keys as isize - key, self.problem.aft.ring());
        if back > ring as isize {
            return None;
        }
        let row = ring_place(marks(self.problem, sequence, kv_head)[OLDEST], ring, back as usize);
        let (key_dim, width) = (self.problem.key_dim, self.problem.dims.head_dim);
        let head = Head::from(state.head(sequence.batch, kv_head));
        Some((&head.ring_keys[row * key_dim..][..key_dim], &head.ring_values[row * width..][..width]))
    }

    /// Where the gradients of the key of `back` tokens before key 0 and of its value go.
    ///
    /// # Safety
    /// No two tasks may have the same key at one time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn ring_row(
        &self,
        sequence: &Sequence<'_>,
        kv_head: usize,
        back: usize,
    ) -> Option<(&mut [T], &mut [T])> {
        let (first, initial) = (self.first.as_ref()?, self.problem.initial(sequence, kv_head)?);
        let row = ring_place(initial.marks[OLDEST], self.problem.aft.ring(), back);
        let (key_dim, width) = (self.problem.key_dim, self.problem.dims.head_dim);
        let part = |n: usize, width: usize| {
            // SAFETY: the parts of a head and the rows of its ring lie apart; the caller promises one task a key.
            unsafe { first.part(sequence.batch * self.problem.dims.kv_heads + kv_head, n, row * width, width) }
        };
        Some((part(3, key_dim), part(4, width)))
    }

    /// One head of the initial state, and where the gradients of numerator and denominator of some of its channels go.
    ///
    /// # Safety
    /// No two tasks may have the same channels of a head at one time; with one key a head there is one denominator.
    #[allow(clippy::mut_from_ref, clippy::type_complexity)]
    pub unsafe fn far_gradient(
        &self,
        sequence: &Sequence<'_>,
        kv_head: usize,
        channels: Range<usize>,
    ) -> Option<(Head<&'a [T]>, &mut [T], &mut [T])> {
        let (first, head) = (self.first.as_ref()?, self.problem.initial(sequence, kv_head)?);
        let unit = sequence.batch * self.problem.dims.kv_heads + kv_head;
        let of_keys = if head.denominator.len() == head.numerator.len() { channels.clone() } else { 0..1 };
        // SAFETY: the parts of a head lie apart; the caller promises one task for these channels.
        unsafe {
            let numerator = first.part(unit, 0, channels.start, channels.len());
            Some((head, numerator, first.part(unit, 1, of_keys.start, of_keys.len())))
        }
    }
}

/// The final state's mean as an item for each head, from the gradient of the state.
pub(super) fn last_items<T: Real>(problem: &Problem<'_, T>, d_state: &State<T>) -> Vec<T> {
    let (mean, width, kv_heads) = (problem.mean(), problem.width, problem.dims.kv_heads);
    let mut items = vec![T::ZERO; problem.sequences.len() * kv_heads * mean];
    let mut work = vec![T::ZERO; (CHUNK + 1) * mean];
    for (index, item) in items.chunks_exact_mut(mean).enumerate() {
        let (sequence, kv_head) = (&problem.sequences[index / kv_heads], index % kv_heads);
        far(problem, sequence, kv_head, item, &mut work);
        let head = Head::from(d_state.head(sequence.batch, kv_head));
        for channel in 0..width {
            let x = item[channel];
            let seen = channel < problem.dims.head_dim && x > floor();
            let parts = if seen {
                let denominator = head.denominator[channel.min(head.denominator.len() - 1)];
                [-x, T::ZERO, head.numerator[channel], -denominator]
            } else {
                [T::NEG_INFINITY, T::ZERO, T::ZERO, T::ZERO]
            };
            parts.into_iter().enumerate().for_each(|(row, x)| item[row * width + channel] = x);
        }
    }
    items
}

/// The rows of a head of queries from the sequence's row `from` on, from a column on.
pub(super) fn rows_of<'v, T: Real>(
    view: &View<'v, T>,
    sequence: &Sequence<'_>,
    head: usize,
    from: usize,
    column: usize,
) -> Rows<'v, T> {
    view.rows(sequence.batch, head).skip(sequence.query_start + from).skip_columns(column)
}
