//! What one token of a decoder asks of long lists of rows: all their scores at once, and their weighted sum.
//!
//! Rows stand as the caller has them, without gaps, so here a row's end may lie inside a register.

use super::block::feature;
use super::vector::{Constants, Vector};
use crate::feature_map::FeatureMap;
use crate::real::Real;

/// Rows whose scores are formed side by side: their feature maps and sums hide each other's latency.
const ROWS: usize = 4;

/// Numbers of the widest register.
const WIDEST: usize = 16;

/// `to[r] = φ(rows[r] − shift)·q` for rows of `width` numbers, one after the other.
#[inline(always)]
pub(crate) unsafe fn feature_dots<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    rows: &[V::Element],
    width: usize,
    q: &[V::Element],
    to: &mut [V::Element],
) where
    V::Element: Constants,
{
    // One loop for each map: a choice inside it would be made for every register.
    macro_rules! each {
        ($($map:ident),*) => {
            match map {
                // SAFETY: forwarded to the caller.
                $(FeatureMap::$map => unsafe { dots_of::<V>(FeatureMap::$map, shift, rows, width, q, to) },)*
            }
        };
    }
    each!(EluPlusOne, Relu, Softplus, Exp, Identity);
}

#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn dots_of<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    rows: &[V::Element],
    width: usize,
    q: &[V::Element],
    to: &mut [V::Element],
) where
    V::Element: Constants,
{
    assert!(rows.len() >= to.len() * width && q.len() >= width);
    let whole = width / V::LANES * V::LANES;
    let count = to.len();
    for first in (0..count).step_by(ROWS) {
        // Rows beyond the last repeat it.
        let places: [usize; ROWS] = std::array::from_fn(|r| (first + r).min(count - 1));
        let mut totals = [V::Element::ZERO; ROWS];
        // SAFETY: `width` numbers of every row and of `q` lie in their slices by the assertion above; the tail holds a
        // register.
        unsafe {
            let shift = V::splat(shift);
            let from: [*const V::Element; ROWS] = std::array::from_fn(|r| rows.as_ptr().add(places[r] * width));
            let mut sums = [V::splat(V::Element::ZERO); ROWS];
            let mut column = 0;
            while column < whole {
                let q = V::load(q.as_ptr().add(column));
                for r in 0..ROWS {
                    sums[r] = feature(map, V::load(from[r].add(column)), shift).mul_add(q, sums[r]);
                }
                column += V::LANES;
            }
            for r in 0..ROWS {
                totals[r] = sums[r].sum();
            }
            if whole < width {
                for r in 0..ROWS {
                    let mut tail = [V::Element::ZERO; WIDEST];
                    tail[..width - whole].copy_from_slice(&rows[places[r] * width + whole..][..width - whole]);
                    feature(map, V::load(tail.as_ptr()), shift).store(tail.as_mut_ptr());
                    for (&x, &q) in tail.iter().zip(&q[whole..width]) {
                        totals[r] += x * q;
                    }
                }
            }
        }
        for r in 0..ROWS {
            to[places[r]] = totals[r];
        }
    }
}

/// `to += Σ weights[r] · v_r` over rows `v⁺ = [v, 1]`; returns the same sum of their last numbers.
#[inline(always)]
pub(crate) unsafe fn add_weighed_values<V: Vector>(
    rows: &[V::Element],
    weights: &[V::Element],
    to: &mut [V::Element],
) -> V::Element {
    let (width, row_length) = (to.len(), to.len() + 1);
    assert!(rows.len() >= weights.len() * row_length);
    let whole = width / V::LANES * V::LANES;
    let mut column = 0;
    while column < whole {
        let registers = ((whole - column) / V::LANES).min(4);
        // SAFETY: `registers` registers from `column` lie in `to` and in each of the rows, of which there are as many as
        // weights by the assertion above.
        unsafe {
            macro_rules! columns {
                ($n:literal) => {{
                    let sums = weighed_sum::<V, $n>(rows.as_ptr().add(column), row_length, weights);
                    for n in 0..$n {
                        let at = to.as_mut_ptr().add(column + n * V::LANES);
                        V::load(at).add(sums[n]).store(at);
                    }
                }};
            }
            match registers {
                4 => columns!(4),
                3 => columns!(3),
                2 => columns!(2),
                _ => columns!(1),
            }
        }
        column += registers * V::LANES;
    }
    // What is left ends with the number after the values. A register that ends there reads some of them again.
    let rest = row_length - whole;
    let mut tail = [V::Element::ZERO; WIDEST];
    let tail = if row_length >= V::LANES {
        // SAFETY: the last register of a row lies in it, and the tail holds one.
        unsafe {
            let [sum] = weighed_sum::<V, 1>(rows.as_ptr().add(row_length - V::LANES), row_length, weights);
            sum.store(tail.as_mut_ptr());
        }
        &tail[V::LANES - rest..V::LANES]
    } else {
        for (row, &weight) in rows.chunks_exact(row_length).zip(weights) {
            tail.iter_mut().zip(row).for_each(|(sum, &x)| *sum += weight * x);
        }
        &tail[..rest]
    };
    to[whole..].iter_mut().zip(tail).for_each(|(to, &x)| *to += x);
    tail[rest - 1]
}

/// `Σ weights[r] · rows[r]` for `N` registers of rows; two sums a register hide the latency of the fused products.
///
/// # Safety
/// As for [`Vector`]; `N` registers of as many rows as there are weights must be valid to read.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn weighed_sum<V: Vector, const N: usize>(
    rows: *const V::Element,
    row_length: usize,
    weights: &[V::Element],
) -> [V; N] {
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut sums = [[V::splat(V::Element::ZERO); N]; 2];
        let add = |row: usize, sums: &mut [V; N]| {
            let weight = V::splat(*weights.get_unchecked(row));
            for n in 0..N {
                sums[n] = weight.mul_add(V::load(rows.add(row * row_length + n * V::LANES)), sums[n]);
            }
        };
        for pair in 0..weights.len() / 2 {
            add(2 * pair, &mut sums[0]);
            add(2 * pair + 1, &mut sums[1]);
        }
        if !weights.len().is_multiple_of(2) {
            add(weights.len() - 1, &mut sums[0]);
        }
        std::array::from_fn(|n| sums[0][n].add(sums[1][n]))
    }
}
