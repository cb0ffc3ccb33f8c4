//! The content weights of a tile of pairs from features of rows and keys, and their gradients taken back to these features.
//!
//! Weights are products of features, but under `taylor2`, `1 + t + t²/2` of `t = q·k/√d`, they are formed without. There a row of features
//! begins with 1 and `x′ = d^{-1/4} x`, so that a tile of them has what `t` is made of, and a gradient of `t` goes to those columns alone.

use std::ops::Range;

use super::problem::Problem;
use super::tile::linear_width;
use crate::simd::block::add_scaled;
use crate::simd::product::{Band, Product};
use crate::simd::{Real, dispatch, operation};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Taylor {
    /// The first of the `d` columns whose products, times `scale`, are `t`.
    pub first: usize,
    pub scale: f64,
}

impl<T: Real> Problem<'_, T> {
    /// Writes the weights of rows and keys up to the diagonal, and their slopes where there is room for them. Features of keys stand
    /// transposed, in lines of `chunk`.
    pub fn weigh_pairs(
        &self,
        q: &[T],
        (k_columns, chunk): (&[T], usize),
        (weights, row_length): (&mut [T], usize),
        [rows, keys]: [usize; 2],
        slopes: &mut [T],
    ) {
        let (first, depth) = self.taylor.map_or((0, self.depth), |taylor| (taylor.first, self.dims.head_dim));
        let (q, k) = ((&q[first..], self.head_width), (&k_columns[first * chunk..], chunk));
        Product::of(q, k, (&mut *weights, row_length), [rows, keys, depth]).c_band(Band::up_to(0)).compute();
        if let Some(taylor) = self.taylor {
            // The first feature of a key is 1 if it is there.
            dispatch(Weigh { taylor, rows, keys, weights, row_length, present: &k_columns[..chunk], slopes });
        }
    }

    /// From the gradients of weights in a tile to those of some columns of the features of its rows, or `of_keys` of its columns; with
    /// `accumulate` they are added. `others` are the features on the other side. `linear` is working memory under `taylor2`.
    #[allow(clippy::too_many_arguments)]
    pub fn pull_back_pairs(
        &self,
        of_keys: bool,
        tile: (&[T], usize),
        others: &[T],
        (to, linear): (&mut [T], &mut [T]),
        [count, other_count]: [usize; 2],
        columns: Range<usize>,
        accumulate: bool,
    ) {
        let width = self.head_width;
        let product = |columns: Range<usize>, to: &mut [T], row: usize, accumulate: bool| {
            let (others, to) = ((&others[columns.start..], width), (&mut to[columns.start..], row));
            let sizes = [count, columns.len(), other_count];
            let product = match of_keys {
                true => Product::of_transposed(tile, others, to, sizes).a_band(Band::starting_at(0)),
                false => Product::of(tile, others, to, sizes).a_band(Band::up_to(0)),
            };
            product.accumulate(accumulate).compute();
        };
        let Some(taylor) = self.taylor else { return product(columns, to, width, accumulate) };
        let row = linear_width(self);
        let columns = taylor.first..taylor.first + self.dims.head_dim;
        product(0..columns.end, linear, row, false);
        if !accumulate {
            to[..count * width].fill(T::ZERO);
        }
        for n in 0..count {
            add_scaled(&mut to[n * width..][columns.clone()], T::ONE, &linear[n * row + columns.start..]);
        }
    }
}

// Takes products `q·k` to weights, in `rows` lines `row_length` apart, up to whole registers. `present` is 1 for each key, but 0 for
// those ignored, and beyond the last one as far as registers reach. `slopes`, in the same places, is what weights change by with `q·k`;
// empty where nobody asks.
operation!(Weigh, |taylor: Taylor,
                   rows: usize,
                   keys: usize,
                   weights: &'a mut [T],
                   row_length: usize,
                   present: &'a [T],
                   slopes: &'a mut [T]| {
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
