//! Weights of pairs under `taylor2`, `1 + t + t²/2` of `t = q·k/√d`, without the features of which they are the products.
//!
//! A row of features begins with 1 and `x′ = d^{-1/4} x`, so that a tile of them has what `t` is made of, and a gradient of `t` goes
//! to those columns alone.

use std::ops::Range;

use crate::simd::block::add_scaled;
use crate::simd::{Real, operation};

/// Where `t` comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Taylor {
    /// The first of the `d` columns whose products, times `scale`, are `t`.
    pub first: usize,
    pub scale: f64,
}

impl Taylor {
    /// The columns of rows of features that a gradient of `t` goes to.
    pub fn columns(&self, head_dim: usize) -> Range<usize> {
        self.first..self.first + head_dim
    }
}

/// Adds some columns of `rows` rows to those of others, of both the numbers and the distance from one row to the next.
pub(super) fn add_columns<T: Real>(
    columns: Range<usize>,
    rows: usize,
    (from, from_row): (&[T], usize),
    (to, to_row): (&mut [T], usize),
) {
    for row in 0..rows {
        add_scaled(&mut to[row * to_row..][columns.clone()], T::ONE, &from[row * from_row + columns.start..]);
    }
}

/// Takes products `q·k` to weights.
pub(super) struct Weigh<'a, T> {
    pub taylor: Taylor,
    pub rows: usize,
    pub keys: usize,
    /// `rows` lines, `row_length` apart; up to whole registers.
    pub weights: &'a mut [T],
    pub row_length: usize,
    /// 1 for each key, but 0 for those ignored, and beyond the last one as far as registers reach.
    pub present: &'a [T],
    /// What weights change by with `q·k`, in the same places; empty where nobody asks.
    pub slopes: &'a mut [T],
}

operation!(Weigh, |Self { taylor, rows, keys, weights, row_length, present, slopes }| {
    let columns = keys.next_multiple_of(V::LANES);
    if rows == 0 || columns == 0 {
        return;
    }
    let end = (rows - 1) * row_length + columns;
    assert!(end <= weights.len() && columns <= present.len() && (slopes.is_empty() || end <= slopes.len()));
    // SAFETY: whole registers lie in each line of the weights, in that of the keys, and in the slopes if there are any.
    unsafe {
        let (scale, one, half) = (V::splat(T::from_f64(taylor.scale)), V::splat(T::ONE), V::splat(T::from_f64(0.5)));
        for row in 0..rows {
            for column in (0..columns).step_by(V::LANES) {
                let at = row * row_length + column;
                let weight = weights.as_mut_ptr().add(at);
                let t = V::load(weight).mul(scale);
                let there = V::load(present.as_ptr().add(column));
                // `t` of what is not there is 0.
                t.mul_add(t.mul_add(half, one), there).store(weight);
                if !slopes.is_empty() {
                    t.mul_add(scale, scale).store(slopes.as_mut_ptr().add(at));
                }
            }
        }
    }
});
