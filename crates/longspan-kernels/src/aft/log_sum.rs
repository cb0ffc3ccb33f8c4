//! Sums of exponentials under a running maximum, one for each channel: `(max, num, den)` and how two of them join.
//!
//! A *mean* is a block of four rows of one width: the exponent `x`, its positional part `b`, the numerator `n` and the
//! denominator `d`, standing for `e^{x+b}·n` and `e^{x+b}·d`. The exponent is kept in two parts because keys of 10⁴ and
//! biases of 10⁻¹ have no common sum in `f32`, while differences of each have. Joining means is associative, to
//! rounding; its unit is `(floor, 0, 0, 0)`. A single key is the mean `(k, 0, v, 1)`.

use crate::simd::block::floor;
use crate::simd::{Real, Vector, dispatch, operation};

/// Rows of a mean.
pub(super) const PARTS: usize = 4;

/// Empties a mean.
pub(super) fn clear<T: Real>(mean: &mut [T]) {
    let width = mean.len() / PARTS;
    mean.fill(T::ZERO);
    mean[..width].fill(floor());
}

/// Makes `item` the mean of one token; of nothing without one.
pub(super) fn write_item<T: Real>(token: Option<(&[T], &[T])>, width: usize, item: &mut [T]) {
    let (x, rest) = item.split_at_mut(width);
    let (bias, rest) = rest.split_at_mut(width);
    let (numerator, denominator) = rest.split_at_mut(width);
    bias.fill(T::ZERO);
    denominator.fill(T::ONE);
    let Some((key, value)) = token else {
        // e^{−∞} is 0 whatever it is multiplied with, as long as that is finite.
        x.fill(T::NEG_INFINITY);
        numerator.fill(T::ZERO);
        return;
    };
    if key.len() == value.len() {
        x[..key.len()].copy_from_slice(key);
        x[key.len()..].fill(T::ZERO);
    } else {
        x.fill(key[0]);
    }
    numerator[..value.len()].copy_from_slice(value);
    numerator[value.len()..].fill(T::ZERO);
}

/// Joins `e^{x+b}·(n, d)` to one register of a mean whose rows start at `to` and are `width` apart.
#[inline(always)]
unsafe fn join_register<V: Vector>(to: *mut V::Element, width: usize, [x, b, n, d]: [V; PARTS]) {
    // SAFETY: the caller gives a mean that has a register at `to` in each of its rows.
    unsafe {
        let (own_x, own_b) = (V::load(to), V::load(to.add(width)));
        let rise = x.sub(own_x).add(b.sub(own_b));
        let zero = V::splat(V::Element::ZERO);
        let one = V::splat(V::Element::ONE);
        let small = zero.sub(rise.abs()).exp_nonpositive();
        // Where `rise` is NaN so is `small`, which the item's factor then carries on.
        let (own, other) = (rise.if_positive(small, one), rise.if_positive(one, small));
        rise.if_positive(x, own_x).store(to);
        rise.if_positive(b, own_b).store(to.add(width));
        for (row, item) in [(2, n), (3, d)] {
            let place = to.add(row * width);
            V::load(place).mul(own).add(item.mul(other)).store(place);
        }
    }
}

operation!(JoinMean, |to: &'a mut [T], item: &'a [T], bias: T| {
    let width = to.len() / PARTS;
    assert!(width.is_multiple_of(V::LANES) && to.len() == PARTS * width && item.len() >= to.len());
    for column in (0..width).step_by(V::LANES) {
        // SAFETY: every row of both means has a register at `column` by the assertion above.
        unsafe {
            let row = |n: usize| V::load(item.as_ptr().add(n * width + column));
            let parts = [row(0), row(1).add(V::splat(bias)), row(2), row(3)];
            join_register::<V>(to.as_mut_ptr().add(column), width, parts);
        }
    }
});

/// Joins `e^bias · item` to `to`.
pub(super) fn join<T: Real>(to: &mut [T], item: &[T], bias: T) {
    dispatch(JoinMean { to, item, bias })
}

/// Makes `mean` that of some items without biases.
pub(super) fn join_items<T: Real>(items: &[T], mean: &mut [T]) {
    clear(mean);
    for item in items.chunks_exact(mean.len()) {
        join(mean, item, T::ZERO);
    }
}

/// Runs `$body` for all columns of a row: `$most` registers at a time where there are so many, else one, of which the last may not
/// be full. Their number `$n` and whether they are `$whole` are constants in it; `$left` numbers are left from `$column` on.
macro_rules! by_registers {
    ($width:expr, $most:literal, $n:ident, $whole:ident, |$column:ident, $left:ident| $body:block) => {{
        let (mut column, width) = (0, $width);
        while column < width {
            let $left = width - column;
            // Several registers of arrays are no quicker, and most of what the compiler would be busy with.
            if const { V::BLOCK_COLUMNS > 1 } && $left >= $most * V::LANES {
                by_registers!(@body column, $most, true, $n, $whole, $column, $body);
            } else if $left >= V::LANES {
                by_registers!(@body column, 1, true, $n, $whole, $column, $body);
            } else {
                by_registers!(@body column, 1, false, $n, $whole, $column, $body);
            }
        }
    }};
    (@body $at:ident, $count:literal, $is_whole:literal, $n:ident, $whole:ident, $column:ident, $body:block) => {{
        #[allow(dead_code)]
        const $n: usize = $count;
        const $whole: bool = $is_whole;
        let $column = $at;
        $body
        $at += $count * V::LANES;
    }};
}

pub(super) use by_registers;

/// `N` registers of row `row` of a mean of `width`.
#[inline(always)]
pub(super) unsafe fn part<V: Vector, const N: usize>(
    mean: &[V::Element],
    width: usize,
    row: usize,
    column: usize,
) -> [V; N] {
    // SAFETY: the caller's mean has these registers.
    std::array::from_fn(|n| unsafe { V::load(mean.as_ptr().add(row * width + column + n * V::LANES)) })
}

/// The same of all rows. A map over their numbers would be a call, and registers would go through memory.
#[inline(always)]
pub(super) unsafe fn parts<V: Vector, const N: usize>(
    mean: &[V::Element],
    width: usize,
    column: usize,
) -> [[V; N]; PARTS] {
    // SAFETY: forwarded to the caller.
    unsafe {
        let (x, b) = (part(mean, width, 0, column), part(mean, width, 1, column));
        [x, b, part(mean, width, 2, column), part(mean, width, 3, column)]
    }
}

/// Writes what [`part`] reads.
#[inline(always)]
pub(super) unsafe fn set_part<V: Vector, const N: usize>(
    mean: &mut [V::Element],
    width: usize,
    row: usize,
    column: usize,
    registers: [V; N],
) {
    for (n, register) in registers.into_iter().enumerate() {
        // SAFETY: the caller's mean has these registers.
        unsafe { register.store(mean.as_mut_ptr().add(row * width + column + n * V::LANES)) };
    }
}

/// Whether a mean holds a head's channels in whole registers.
pub(super) fn fits<V: Vector>(mean: &[V::Element], head_dim: usize) -> bool {
    let width = mean.len() / PARTS;
    mean.len() == PARTS * width && width.is_multiple_of(V::LANES) && head_dim <= width
}

/// Means whose exponents are `e^{reference}` of their channel: `Σ_j a_ij·num_j` and `Σ_j a_ij·den_j` before they are
/// joined to row `i`, or the `num_j` and `den_j` themselves.
#[derive(Clone, Copy)]
pub(super) struct Factored<'a, T> {
    /// The exponent's two parts, `2·width`.
    pub reference: &'a [T],
    /// Rows of `width`.
    pub numerators: &'a [T],
    /// Rows of `width`, as many as numerators.
    pub denominators: &'a [T],
}

/// Where such means go.
pub(super) struct Factors<'a, T> {
    pub reference: &'a mut [T],
    /// Empty where they are not wanted.
    pub numerators: &'a mut [T],
    pub denominators: &'a mut [T],
}

// Joins row `i` of `from` to mean `i` of `to`, times `e^{biases[i]}`.
operation!(JoinFactored, |to: &'a mut [T], from: Factored<'a, T>, biases: &'a [T]| {
    let width = from.reference.len() / 2;
    assert!(width.is_multiple_of(V::LANES) && to.len() >= biases.len() * PARTS * width);
    assert!(from.numerators.len().min(from.denominators.len()) >= biases.len() * width);
    for (row, &bias) in biases.iter().enumerate() {
        for column in (0..width).step_by(V::LANES) {
            // SAFETY: every row has a register at `column` by the assertions above.
            unsafe {
                let at = |from: &[T], n: usize| V::load(from.as_ptr().add(n * width + column));
                let b = at(from.reference, 1).add(V::splat(bias));
                let parts = [at(from.reference, 0), b, at(from.numerators, row), at(from.denominators, row)];
                join_register::<V>(to.as_mut_ptr().add(row * PARTS * width + column), width, parts);
            }
        }
    }
});

// Brings numerators and denominators of rows from one exponent a row to a larger one.
operation!(RaiseRows, |sums: [&'a mut [T]; 2], from: &'a [T], to: &'a [T]| {
    let [numerators, denominators] = sums;
    let width = numerators.len() / from.len().max(1);
    assert!(width.is_multiple_of(V::LANES) && to.len() == from.len());
    assert!(numerators.len() == from.len() * width && denominators.len() == numerators.len());
    for (row, (from, to)) in from.iter().zip(to).enumerate().filter(|(_, (from, to))| from != to) {
        // SAFETY: both have a register at each column of a row by the assertions above.
        unsafe {
            let factor = V::splat(*from - *to).exp_nonpositive();
            for sums in [&mut *numerators, &mut *denominators] {
                for column in (0..width).step_by(V::LANES) {
                    let place = sums.as_mut_ptr().add(row * width + column);
                    V::load(place).mul(factor).store(place);
                }
            }
        }
    }
});

// Brings means to one exponent a channel, the largest: `e^{x+b−X−B}·n`, if there is room for numerators,
// `e^{x+b−X−B}·d`, and `(X, B)`. Returns the largest range of exponents of any channel: with those at the floor or below, which
// stand for nothing, because a bias of theirs may be the largest of its row.
operation!(FactorMeans, |items: &'a [T], to: Factors<'a, T>| -> T {
    let Factors { reference, numerators, denominators } = to;
    let width = reference.len() / 2;
    let count = items.len() / (PARTS * width).max(1);
    assert!(width.is_multiple_of(V::LANES) && denominators.len() >= count * width);
    assert!(numerators.is_empty() || numerators.len() >= count * width);
    let mut widest = T::ZERO;
    for column in (0..width).step_by(V::LANES) {
        // SAFETY: every row has a register at `column` by the assertion above.
        unsafe {
            let at = |item: usize, row: usize| V::load(items.as_ptr().add((item * PARTS + row) * width + column));
            let zero = V::splat(T::ZERO);
            let bottom = V::splat(floor());
            let (mut x, mut b) = (bottom, zero);
            for item in 0..count {
                let (own_x, own_b) = (at(item, 0), at(item, 1));
                let rise = own_x.sub(x).add(own_b.sub(b));
                (x, b) = (rise.if_positive(own_x, x), rise.if_positive(own_b, b));
            }
            x.store(reference.as_mut_ptr().add(column));
            b.store(reference.as_mut_ptr().add(width + column));
            let mut range = zero;
            for item in 0..count {
                let own = at(item, 0);
                let depth = x.sub(own).add(b.sub(at(item, 1)));
                range = depth.max(range);
                let weight = zero.sub(depth).exp_nonpositive();
                if !numerators.is_empty() {
                    at(item, 2).mul(weight).store(numerators.as_mut_ptr().add(item * width + column));
                }
                at(item, 3).mul(weight).store(denominators.as_mut_ptr().add(item * width + column));
            }
            widest = widest.max(range.largest());
        }
    }
    widest
});

// Rows as their keys see them, for keys whose exponents are relative to `(X, B)` of their channel and biases relative to the largest
// of a row: `e^{x+b+X+B+bias}·n` and `−e^{x+b+X+B+bias}·d` side by side.
operation!(ProjectRows, |rows: &'a [T], reference: &'a [T], biases: &'a [T], to: &'a mut [T]| {
    let width = reference.len() / 2;
    assert!(width.is_multiple_of(V::LANES) && rows.len() >= biases.len() * PARTS * width);
    assert!(to.len() >= biases.len() * 2 * width);
    for (row, &bias) in biases.iter().enumerate() {
        for column in (0..width).step_by(V::LANES) {
            // SAFETY: every row has a register at each column by the assertions above.
            unsafe {
                let at = |n: usize| V::load(rows.as_ptr().add((row * PARTS + n) * width + column));
                let reference = |n: usize| V::load(reference.as_ptr().add(n * width + column));
                let x = at(0).add(reference(0));
                let weight = x.add(at(1).add(reference(1).add(V::splat(bias)))).exp_nonpositive();
                let to = to.as_mut_ptr().add(row * 2 * width + column);
                at(2).mul(weight).store(to);
                V::splat(T::ZERO).sub(at(3).mul(weight)).store(to.add(width));
            }
        }
    }
});

// The gradient of the bias of one pair: `Σ_channels p·(g·v − G·Y)`, from the row as its keys see it.
operation!(BiasGradient, |row: &'a [T], key: &'a [T], bias: T| -> T {
    let width = row.len() / PARTS;
    assert!(width.is_multiple_of(V::LANES) && key.len() >= row.len());
    // SAFETY: every row of both has a register at `column` by the assertion above.
    unsafe {
        let bias = V::splat(bias);
        let mut sum = V::splat(T::ZERO);
        for column in (0..width).step_by(V::LANES) {
            let at = |from: &[T], n: usize| V::load(from.as_ptr().add(n * width + column));
            let weight = at(key, 0).add(at(row, 0)).add(bias.add(at(row, 1))).exp_nonpositive();
            let term = at(row, 2).mul(at(key, 2)).sub(at(row, 3));
            sum = weight.mul_add(term, sum);
        }
        sum.sum()
    }
});
