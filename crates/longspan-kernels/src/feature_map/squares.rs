//! The features of `taylor2`, `[1, x′, x′⊗x′/√2]` of `x′ = d^{-1/4} x`, and gradients back, for blocks of rows. Of the squares those with
//! i ≤ j are held, row after row of a triangle: `x′_i²/√2` and behind it `x′_i x′_j`, which stand for two.

use super::scale;
use crate::simd::block::WIDEST;
use crate::simd::rows::{Rows, load_part, padded, store_part};
use crate::simd::{Vector, operation};

/// Numbers of a row of `head_dim` that registers can be read from anywhere, up to its last number.
fn room<T>(head_dim: usize) -> usize {
    padded::<T>(head_dim) + WIDEST
}

pub(super) fn work_len<T>(head_dim: usize) -> usize {
    room::<T>(head_dim) + head_dim * WIDEST
}

/// The row in working memory, with zeros behind it, and the rest.
#[inline(always)]
unsafe fn copied<'w, V: Vector>(
    x: &[V::Element],
    work: &'w mut [V::Element],
) -> (&'w [V::Element], &'w mut [V::Element]) {
    let (copy, rest) = work.split_at_mut(room::<V::Element>(x.len()));
    for (n, to) in copy.chunks_exact_mut(V::LANES).enumerate() {
        // SAFETY: `to` is as long as a register.
        unsafe { load_part::<V>(&x[(n * V::LANES).min(x.len())..], 0).store(to.as_mut_ptr()) };
    }
    (copy, rest)
}

// Writes features, and 0 behind them, in rows `row` apart.
operation!(Squares, |from: Rows<'a, T>,
                     count: usize,
                     head_dim: usize,
                     to: &'a mut [T],
                     row: usize,
                     work: &'a mut [T]| {
    let scale = scale(head_dim);
    let (linear, square) = (T::from_f64(scale), T::from_f64(scale * scale));
    let half = T::from_f64(scale * scale * std::f64::consts::FRAC_1_SQRT_2);
    for n in 0..count {
        let to = &mut to[n * row..][..row];
        // SAFETY: registers are read up to a whole one behind the row's last number, where the copy has room for the widest, and
        // written where `to` has room for whole ones; what they write beyond a line of the triangle the next line replaces.
        unsafe {
            let (x, _) = copied::<V>(from.row(n, head_dim), work);
            to[0] = T::ONE;
            let linear = V::splat(linear);
            for column in (0..head_dim).step_by(V::LANES) {
                store_part(V::load(x.as_ptr().add(column)).mul(linear), to, 1 + column);
            }
            let mut at = 1 + head_dim;
            for (i, &own) in x[..head_dim].iter().enumerate() {
                let (factor, len) = (V::splat(own * square), head_dim - i);
                let from = x.as_ptr().add(i);
                let mut column = 0;
                if at + len.next_multiple_of(V::LANES) <= to.len() {
                    let line = to.as_mut_ptr().add(at);
                    while column < len {
                        V::load(from.add(column)).mul(factor).store(line.add(column));
                        column += V::LANES;
                    }
                } else {
                    while column < len {
                        store_part(V::load(from.add(column)).mul(factor), to, at + column);
                        column += V::LANES;
                    }
                }
                to[at] = own * own * half;
                at += len;
            }
            to[at..].fill(T::ZERO);
        }
    }
});

// Writes `dx`, the gradient of raw rows, whole cache lines apart, from `d`, that of their features, in rows `row` apart.
// Goes down the triangle for a register of columns at a time: what a line adds to these columns stays in a register, and what they
// add to the line's own number is summed in memory.
operation!(SquaresBack, |from: Rows<'a, T>,
                         count: usize,
                         head_dim: usize,
                         d: &'a [T],
                         row: usize,
                         dx: &'a mut [T],
                         work: &'a mut [T]| {
    let scale = scale(head_dim);
    let (linear, square) = (T::from_f64(scale), T::from_f64(scale * scale));
    let twice = T::from_f64(scale * scale * std::f64::consts::SQRT_2);
    // Read from `WIDEST − n` on, 0 for lanes below n.
    let mut behind = [T::ONE; 2 * WIDEST];
    behind[..WIDEST].fill(T::ZERO);
    for n in 0..count {
        let (d, dx) = (&d[n * row..], &mut dx[n * padded::<T>(head_dim)..][..head_dim]);
        // SAFETY: registers of the row are read up to a whole one behind its last number, where the copy has room for the widest;
        // each number has a register of sums, and all else is checked where it is read.
        unsafe {
            let (x, sums) = copied::<V>(from.row(n, head_dim), work);
            sums[..head_dim * V::LANES].fill(T::ZERO);
            let linear = V::splat(linear);
            for first in (0..head_dim).step_by(V::LANES) {
                let others = V::load(x.as_ptr().add(first));
                let mut sum = load_part::<V>(d, 1 + first).mul(linear);
                let mut at = 1 + head_dim;
                for (i, &own) in x[..head_dim.min(first + V::LANES)].iter().enumerate() {
                    let own_sums = sums.as_mut_ptr().add(i * V::LANES);
                    let line = &d[..at + head_dim - i];
                    let (factor, d) = (V::splat(own * square), load_part::<V>(line, at + first - i));
                    let (factor, others) = if i < first {
                        (factor, others)
                    } else {
                        let behind = V::load(behind.as_ptr().add(WIDEST - 1 - (i - first)));
                        (factor.mul(behind), others.mul(behind))
                    };
                    sum = d.mul_add(factor, sum);
                    d.mul_add(others, V::load(own_sums)).store(own_sums);
                    at += head_dim - i;
                }
                store_part(sum, dx, first);
            }
            let mut at = 1 + head_dim;
            for (i, &own) in x[..head_dim].iter().enumerate() {
                dx[i] += d[at] * own * twice + square * V::load(sums.as_ptr().add(i * V::LANES)).sum();
                at += head_dim - i;
            }
        }
    }
});
