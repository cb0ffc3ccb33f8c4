//! The state of softmax attention: a cache of keys and values, filled from the front, or with a window a ring in which the token
//! at position `p` stands in row `p mod window`.

use std::ops::Range;

use super::{SoftmaxAttention, check_options};
use crate::call::{
    Dims, Mechanism, Sequence, State, StateShape, Stateful, check_count, check_state, fingerprint, is_count,
};
use crate::error::{Error, expect};
use crate::simd::Real;

/// The part of a head's state that says of each row of a ring whether its token is there (1) or ignored (0).
pub(super) const PRESENT: usize = 3;

#[derive(Debug, Clone, Copy)]
pub(super) struct Cache {
    window: Option<usize>,
    /// Tokens so far; of a ring that is full, a number from `window` on that is the same modulo `window`, below `2·window`.
    count: usize,
}

impl Cache {
    /// Before the first token.
    pub fn empty(attention: &SoftmaxAttention) -> Self {
        Self { window: attention.window, count: 0 }
    }

    /// That of a state that was checked.
    pub fn of<T: Real>(attention: &SoftmaxAttention, state: &State<T>, batch: usize, kv_head: usize) -> Self {
        Self::marked(attention, state.head(batch, kv_head)[2][0])
    }

    pub fn marked<T: Real>(attention: &SoftmaxAttention, mark: T) -> Self {
        Self { count: mark.to_f64() as usize, ..Self::empty(attention) }
    }

    pub fn mark<T: Real>(self) -> T {
        T::from_f64(self.count as f64)
    }

    pub fn rows(self) -> usize {
        self.window.map_or(self.count, |window| self.count.min(window))
    }

    /// Those rows from the oldest token to the newest.
    pub fn in_order(self) -> [Range<usize>; 2] {
        let newer = self.window.filter(|&window| self.count > window).map_or(0, |window| self.count - window);
        [newer..self.rows(), 0..newer]
    }

    /// The row of a later token, `key` tokens on and `n` if ignored ones don't count.
    pub fn row(self, key: usize, n: usize) -> usize {
        self.window.map_or(self.count + n, |window| (self.count + key) % window)
    }

    pub fn plus(self, tokens: usize) -> Self {
        let count = self.count + tokens;
        let within = |window: usize| if count < window { count } else { window + count % window };
        Self { count: self.window.map_or(count, within), ..self }
    }

    /// After the keys of a call. A ring counts ignored ones, whose places move windows on.
    pub fn after(self, sequence: &Sequence<'_>) -> Self {
        let ignored = sequence.padding.map_or(0, |padding| padding.iter().filter(|&&ignored| ignored).count());
        self.plus(sequence.keys - self.window.map_or(ignored, |_| 0))
    }
}

/// Checks that a cache has room for so many tokens.
pub(super) fn check_room(attention: &SoftmaxAttention, argument: &'static str, tokens: usize) -> Result<(), Error> {
    let expected = || format!("at most {} tokens; make the mechanism with a larger capacity", attention.capacity);
    expect(tokens <= attention.capacity, attention.name(), argument, expected, || tokens.to_string())
}

impl Stateful for SoftmaxAttention {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        check_options(self)?;
        let rows = self.rows();
        if self.window.is_none() {
            check_count::<T>(self.name(), "capacity", rows)?;
        }
        let present = self.window.unwrap_or(0);
        let options = self.window.map_or(0, |window| fingerprint([window as u64]));
        let parts = [rows.saturating_mul(dims.head_dim), rows.saturating_mul(dims.value_dim), 1, present, 0, 0];
        Ok(StateShape::new(self.name(), options, dims, parts))
    }

    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        let limit = self.window.map_or(self.capacity, |window| 2 * window - 1);
        for held in state.each(2).map(|head| head[0]) {
            let expected = || format!("a whole number up to {limit} as the number of tokens");
            let holds = is_count(held, limit.saturating_add(1));
            expect(holds, self.name(), argument, expected, || held.to_string())?;
        }
        let marks = state.each(PRESENT).flatten();
        let other = marks.copied().find(|&mark| mark != T::ZERO && mark != T::ONE);
        let expected = || "0 or 1 for each token of a window".into();
        expect(other.is_none(), self.name(), argument, expected, || other.unwrap_or(T::ZERO).to_string())
    }

    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, _: &[&[T]]) -> Result<State<T>, Error> {
        let shape = earlier.shape();
        later.check(self.name(), "later state", shape)?;
        let rows = self.rows().max(1);
        let [keys, values, ..] = shape.parts;
        let dims = shape.dims(keys / rows, values / rows);
        check_state(self, &dims, earlier, "earlier state")?;
        check_state(self, &dims, later, "later state")?;
        let mut sum = earlier.try_clone()?;
        for (unit, [keys, values, held, present, ..]) in sum.heads_mut().enumerate() {
            let (batch, kv_head) = (unit / shape.kv_heads, unit % shape.kv_heads);
            let first = Cache::marked(self, held[0]);
            let second = Cache::of(self, later, batch, kv_head);
            let both = first.plus(second.count);
            if self.window.is_none() {
                check_room(self, "sum of two states", both.rows())?;
            }
            let [later_keys, later_values, _, later_present, ..] = later.head(batch, kv_head);
            for row in 0..second.rows() {
                // A later token's row is its position modulo the window, counted from the later state's first token.
                let to = first.row(row, row);
                let widths = [dims.head_dim, dims.value_dim, self.window.map_or(0, |_| 1)];
                let parts = [(&mut *keys, later_keys), (&mut *values, later_values), (&mut *present, later_present)];
                for ((to_part, from), width) in parts.into_iter().zip(widths) {
                    to_part[to * width..][..width].copy_from_slice(&from[row * width..][..width]);
                }
            }
            held[0] = both.mark();
        }
        Ok(sum)
    }
}
