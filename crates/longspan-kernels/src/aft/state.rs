//! The state of an attention-free transformer: what each part of a [`State`] means here.

use std::ops::{Deref, Range};

use super::log_sum::{PARTS as MEAN_PARTS, clear, join, write_item};
use super::options::{Aft, Variant};
use crate::call::{Dims, Mechanism, PARTS, State, StateShape, Stateful, check_state, fingerprint, is_count};
use crate::error::{Error, expect, refuse};
use crate::simd::Real;
use crate::simd::block::floor;
use crate::simd::rows::padded;

#[derive(Debug, Clone, Copy)]
pub(super) struct Head<S> {
    /// `Σ e^{k_j − x} v_j` over the keys that windows no longer reach, `head_dim`.
    pub numerator: S,
    /// `Σ e^{k_j − x}`, `key_dim`.
    pub denominator: S,
    /// `x`, `key_dim`.
    pub exponent: S,
    /// The last keys, in a circle; −∞ where a key is ignored or before the first token.
    pub ring_keys: S,
    /// Their values; 0 where a key is ignored or before the first token.
    pub ring_values: S,
    /// Three numbers, and what fills cache lines: which row of the ring is the oldest, how many rows hold a token, and how
    /// many tokens came before, up to the table's length (0 without a table).
    pub marks: S,
}

/// Places of [`Head::marks`].
pub(super) const OLDEST: usize = 0;
pub(super) const FILLED: usize = 1;
pub(super) const POSITION: usize = 2;
pub(super) const MARKS: usize = 3;
const MARKS_PART: usize = 5;

/// The row of a ring for the token of `back` tokens ago.
pub(super) fn ring_place<T: Real>(oldest: T, rows: usize, back: usize) -> usize {
    (oldest.to_f64() as usize + rows - back) % rows
}

impl<S> From<[S; PARTS]> for Head<S> {
    fn from([numerator, denominator, exponent, ring_keys, ring_values, marks]: [S; PARTS]) -> Self {
        Self { numerator, denominator, exponent, ring_keys, ring_values, marks }
    }
}

impl<'a, T: Real> Head<&'a [T]> {
    /// The token of `back` tokens ago (1 is the last one).
    pub fn ring_row(&self, back: usize, key_dim: usize, head_dim: usize) -> Option<(&'a [T], &'a [T])> {
        let rows = self.ring_keys.len() / key_dim.max(1);
        if back > rows {
            return None;
        }
        let row = ring_place(self.marks[OLDEST], rows, back);
        Some((&self.ring_keys[row * key_dim..][..key_dim], &self.ring_values[row * head_dim..][..head_dim]))
    }

    /// The same in some channels, of a state without a ring and with a key for each channel.
    pub fn columns(self, columns: Range<usize>) -> Self {
        Self {
            numerator: &self.numerator[columns.clone()],
            denominator: &self.denominator[columns.clone()],
            exponent: &self.exponent[columns],
            ..self
        }
    }
}

impl<T: Real, S: Deref<Target = [T]>> Head<S> {
    pub fn read(&self, mean: &mut [T]) {
        let (width, len) = (mean.len() / MEAN_PARTS, self.numerator.len());
        mean[2 * width..][..len].copy_from_slice(&self.numerator);
        for (from, row) in [(&self.exponent, 0), (&self.denominator, 3)] {
            let to = &mut mean[row * width..][..len];
            // One key a head stands for all channels.
            if from.len() == len { to.copy_from_slice(from) } else { to.fill(from[0]) }
        }
    }
}

impl<T: Real> Head<&mut [T]> {
    /// From the rows of a mean without biases.
    pub fn write(&mut self, mean: &[T]) {
        let width = mean.len() / MEAN_PARTS;
        // No channels, and so no means: one exponent for all of them would have no place to come from.
        if width == 0 {
            return;
        }
        for (to, row) in [(&mut self.exponent, 0), (&mut self.numerator, 2), (&mut self.denominator, 3)] {
            let len = to.len();
            to.copy_from_slice(&mean[row * width..][..len]);
        }
    }
}

/// Tokens before a state's next one, where there is a table of biases.
pub(super) fn position<T: Real>(state: &State<T>, batch: usize) -> usize {
    if state.shape().kv_heads == 0 || batch >= state.shape().batch {
        return 0;
    }
    Head::from(state.head(batch, 0)).marks[POSITION].to_f64() as usize
}

/// The marks after `tokens` more.
pub(super) fn advance<T: Real>(aft: &Aft, marks: &[T], tokens: usize) -> [T; MARKS] {
    let ring = aft.ring();
    let [oldest, filled, position] = [OLDEST, FILLED, POSITION].map(|n| marks[n].to_f64() as usize);
    let position = aft.table_length().map_or(0, |length| (position + tokens).min(length));
    [(oldest + tokens) % ring.max(1), (filled + tokens).min(ring), position].map(|n| T::from_f64(n as f64))
}

impl Stateful for Aft {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        self.check_options(dims)?;
        let operation = self.name();
        let combination = "a state with biases that belong to one call";
        let help = "give the table of biases a length, so that its rows are positions";
        refuse(matches!(self.variant, Variant::Local { length: None, .. }), operation, combination, help)?;
        let combination = "a state of an image, whose places look both ways";
        let help = "give the call the whole image";
        refuse(matches!(self.variant, Variant::Conv2d { .. }), operation, combination, help)?;
        let ring = self.ring();
        let (width, key_dim) = (dims.head_dim, self.key_dim(dims));
        let parts = [width, key_dim, key_dim, ring * key_dim, ring * width, MARKS];
        Ok(StateShape::new(self.name(), fingerprint(self.variant.state_id()), dims, parts).in_lines(MARKS_PART))
    }

    fn empty_state<T: Real>(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(self.name())?;
        let mut state = State::zeros(self.state_shape::<T>(dims)?)?;
        for head in state.heads_mut().map(Head::from) {
            head.exponent.fill(floor());
            head.ring_keys.fill(T::NEG_INFINITY);
        }
        Ok(state)
    }

    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        let rows = self.ring().max(1);
        for marks in state.each(MARKS_PART) {
            let fits = is_count(marks[OLDEST], rows)
                && is_count(marks[FILLED], rows + 1)
                && is_count(marks[POSITION], 1 << 24);
            let expected = || {
                format!(
                    "a whole number below {rows} as the index of the ring's oldest row, and its length and position"
                )
            };
            expect(fits, self.name(), argument, expected, || format!("{:?}", &marks[..MARKS]))?;
        }
        Ok(())
    }

    /// The state of two ranges of tokens, one after the other.
    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, _: &[&[T]]) -> Result<State<T>, Error> {
        let width = earlier.shape().parts[0];
        let dims = earlier.shape().dims(width, width);
        check_state(self, &dims, earlier, "earlier state")?;
        check_state(self, &dims, later, "later state")?;
        let key_dim = self.key_dim(&dims);
        let ring = self.ring();
        let padded = padded::<T>(width);
        let mut work = vec![T::ZERO; 2 * MEAN_PARTS * padded];
        let (sum, item) = work.split_at_mut(MEAN_PARTS * padded);
        let mut combined = earlier.try_clone()?;
        for (index, mut head) in combined.heads_mut().map(Head::from).enumerate() {
            let later = Head::from(later.head(0, index));
            let tokens = later.marks[FILLED].to_f64() as usize;
            let oldest = head.marks[OLDEST].to_f64() as usize;
            clear(sum);
            head.read(sum);
            // The earlier sight's oldest tokens leave the reach of windows, and the later one's take their places.
            for n in 0..tokens {
                let row = (oldest + n) % ring;
                let key = &mut head.ring_keys[row * key_dim..][..key_dim];
                let value = &mut head.ring_values[row * width..][..width];
                write_item(Some((&*key, &*value)), padded, item);
                join(sum, item, T::ZERO);
            }
            clear(item);
            later.read(item);
            join(sum, item, T::ZERO);
            head.write(sum);
            let [own, added] = [&*head.marks, later.marks].map(|marks| marks[POSITION].to_f64() as usize);
            let mut marks = advance(self, head.marks, later.marks[OLDEST].to_f64() as usize);
            marks[FILLED] = T::from_f64((head.marks[FILLED].to_f64() as usize + tokens).min(ring) as f64);
            if let Some(length) = self.table_length() {
                marks[POSITION] = T::from_f64((own + added).min(length) as f64);
            }
            head.marks[..MARKS].copy_from_slice(&marks);
            for back in 1..=tokens {
                let Some((key, value)) = later.ring_row(back, key_dim, width) else { continue };
                let row = ring_place(marks[OLDEST], ring, back);
                head.ring_keys[row * key_dim..][..key_dim].copy_from_slice(key);
                head.ring_values[row * width..][..width].copy_from_slice(value);
            }
        }
        Ok(combined)
    }
}
