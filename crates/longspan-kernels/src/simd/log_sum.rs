//! Sums of exponentials under a running maximum, one for each channel: `(max, num, den)` and how two of them join.
//!
//! A *mean* is a block of four rows of one width: the exponent `x`, its positional part `b`, the numerator `n` and the
//! denominator `d`, standing for `e^{x+b}·n` and `e^{x+b}·d`. The exponent is kept in two parts because keys of 10⁴ and
//! biases of 10⁻¹ have no common sum in `f32`, while differences of each have. Joining means is associative, to
//! rounding; its unit is `(floor, 0, 0, 0)`. A single key is the mean `(k, 0, v, 1)`.

use super::vector::{Constants, Vector, exp_nonpositive};
use crate::real::Real;

/// The exponent of the unit: finite, so that differences with −∞ have a meaning, and below all that keys can be.
pub(crate) fn floor<T: Real>() -> T {
    -(T::ONE / T::MIN_POSITIVE)
}

/// Rows of a mean.
pub(crate) const PARTS: usize = 4;

/// Joins `e^bias · item` to `to`.
#[inline(always)]
pub(crate) unsafe fn join<V: Vector>(to: &mut [V::Element], item: &[V::Element], bias: V::Element)
where
    V::Element: Constants,
{
    let width = to.len() / PARTS;
    assert!(width.is_multiple_of(V::LANES) && to.len() == PARTS * width && item.len() >= to.len());
    let (to, item) = (to.as_mut_ptr(), item.as_ptr());
    let mut column = 0;
    while column < width {
        // SAFETY: every row of both means has a register at `column` by the assertion above.
        unsafe {
            let row = |n: usize| n * width + column;
            let (x, b) = (V::load(item.add(row(0))), V::load(item.add(row(1))).add(V::splat(bias)));
            let (own_x, own_b) = (V::load(to.add(row(0))), V::load(to.add(row(1))));
            let rise = x.sub(own_x).add(b.sub(own_b));
            let zero = V::splat(V::Element::ZERO);
            let one = V::splat(V::Element::ONE);
            let small = exp_nonpositive(zero.sub(rise.abs()));
            // Where `rise` is NaN so is `small`, which the item's factor then carries on.
            let (own, other) = (rise.if_positive(small, one), rise.if_positive(one, small));
            rise.if_positive(x, own_x).store(to.add(row(0)));
            rise.if_positive(b, own_b).store(to.add(row(1)));
            for n in [row(2), row(3)] {
                V::load(to.add(n)).mul(own).add(V::load(item.add(n)).mul(other)).store(to.add(n));
            }
        }
        column += V::LANES;
    }
}

/// `σ(x)` and `1 − σ(x)`, both to full relative precision.
#[inline(always)]
unsafe fn sigmoid<V: Vector>(x: V) -> (V, V)
where
    V::Element: Constants,
{
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let one = V::splat(V::Element::ONE);
        let small = exp_nonpositive(zero.sub(x.abs()));
        let large = one.div(one.add(small));
        let small = small.mul(large);
        (x.if_positive(large, small), x.if_positive(small, large))
    }
}

/// A register from a row of any width; missing numbers are 0.
#[inline(always)]
unsafe fn load_part<V: Vector>(row: &[V::Element], column: usize) -> V {
    let row = &row[column..];
    // SAFETY: a whole register lies in the row, or in the buffer that replaces it.
    unsafe {
        if row.len() >= V::LANES {
            return V::load(row.as_ptr());
        }
        let mut buffer = [V::Element::ZERO; 16];
        buffer[..row.len()].copy_from_slice(row);
        V::load(buffer.as_ptr())
    }
}

/// Writes a register to a row of any width, as much as fits.
#[inline(always)]
unsafe fn store_part<V: Vector>(register: V, row: &mut [V::Element], column: usize) {
    let row = &mut row[column..];
    // SAFETY: a whole register lies in the row, or in the buffer that replaces it.
    unsafe {
        if row.len() >= V::LANES {
            return register.store(row.as_mut_ptr());
        }
        let mut buffer = [V::Element::ZERO; 16];
        register.store(buffer.as_mut_ptr());
        row.copy_from_slice(&buffer[..row.len()]);
    }
}

/// `out = σ(q) ⊙ num / den`, 0 where there is nothing; an empty `q` is no gate.
#[inline(always)]
pub(crate) unsafe fn gated_mean<V: Vector>(mean: &[V::Element], q: &[V::Element], out: &mut [V::Element])
where
    V::Element: Constants,
{
    let width = mean.len() / PARTS;
    assert!(out.len() <= width && width.is_multiple_of(V::LANES) && (q.is_empty() || q.len() == out.len()));
    let mut column = 0;
    while column < out.len() {
        // SAFETY: every row of the mean has a register at `column` by the assertion above.
        unsafe {
            let (num, den) =
                (V::load(mean.as_ptr().add(2 * width + column)), V::load(mean.as_ptr().add(3 * width + column)));
            let mut value = num.div(den);
            if !q.is_empty() {
                value = value.mul(sigmoid(load_part::<V>(q, column)).0);
            }
            // Not a plain 0: a denominator that is NaN shows.
            store_part(den.if_positive(value, den), out, column);
        }
        column += V::LANES;
    }
}

/// One row of the backward: its query (empty without a gate), the gradient of its output, and the output.
#[derive(Clone, Copy)]
pub(crate) struct OutputRow<'a, T> {
    pub q: &'a [T],
    pub d_out: &'a [T],
    pub out: &'a [T],
}

/// From the mean of a row: `dq`, and the row as its keys see it, `(−x, −b, g/den, G·Y/den)` with `g = G ⊙ σ(q)`.
#[inline(always)]
pub(crate) unsafe fn row_cotangent<V: Vector>(
    mean: &[V::Element],
    row: OutputRow<'_, V::Element>,
    dq: &mut [V::Element],
    item: &mut [V::Element],
) where
    V::Element: Constants,
{
    let width = mean.len() / PARTS;
    assert!(width.is_multiple_of(V::LANES) && item.len() >= mean.len() && dq.len() <= width);
    assert!(row.d_out.len() == dq.len() && row.out.len() == dq.len());
    assert!(row.q.is_empty() || row.q.len() == dq.len());
    let mut column = 0;
    while column < width {
        // SAFETY: every row of both means has a register at `column` by the assertion above.
        unsafe {
            let at = |n: usize| n * width + column;
            let zero = V::splat(V::Element::ZERO);
            let den = V::load(mean.as_ptr().add(at(3)));
            let (mut g, mut product, mut d_query) = (zero, zero, zero);
            if column < dq.len() {
                g = load_part::<V>(row.d_out, column);
                product = g.mul(load_part::<V>(row.out, column));
                if !row.q.is_empty() {
                    let (gate, rest) = sigmoid(load_part::<V>(row.q, column));
                    g = g.mul(gate);
                    d_query = den.if_positive(product.mul(rest), den);
                }
                store_part(d_query, dq, column);
            }
            let x = zero.sub(V::load(mean.as_ptr().add(at(0))));
            let to = item.as_mut_ptr();
            den.if_positive(x, V::splat(floor())).store(to.add(at(0)));
            zero.sub(V::load(mean.as_ptr().add(at(1)))).store(to.add(at(1)));
            den.if_positive(g.div(den), den).store(to.add(at(2)));
            den.if_positive(product.div(den), den).store(to.add(at(3)));
        }
        column += V::LANES;
    }
}

/// From the sum of the rows that see a key: `dv = e^{k+x+b}·num`, `dk = v·dv − e^{k+x+b}·den`. All are whole rows.
#[inline(always)]
pub(crate) unsafe fn key_gradient<V: Vector>(
    rows: &[V::Element],
    key: &[V::Element],
    dk: &mut [V::Element],
    dv: &mut [V::Element],
) where
    V::Element: Constants,
{
    let width = rows.len() / PARTS;
    assert!(width.is_multiple_of(V::LANES) && key.len() >= rows.len());
    assert!(dk.len() >= width && dv.len() >= width);
    let mut column = 0;
    while column < width {
        // SAFETY: every row has a register at `column` by the assertions above.
        unsafe {
            let row = |from: &[V::Element], n: usize| V::load(from.as_ptr().add(n * width + column));
            let weight = exp_nonpositive(row(key, 0).add(row(rows, 0)).add(row(rows, 1)));
            let value = weight.mul(row(rows, 2));
            let slope = row(key, 2).mul(value).sub(weight.mul(row(rows, 3)));
            // A key that no row sees has gradient 0 whatever it is.
            let seen = row(rows, 0).sub(V::splat(floor()));
            let zero = V::splat(V::Element::ZERO);
            seen.if_positive(value, row(rows, 2).mul(zero)).store(dv.as_mut_ptr().add(column));
            seen.if_positive(slope, row(rows, 3).mul(zero)).store(dk.as_mut_ptr().add(column));
        }
        column += V::LANES;
    }
}

/// The gradient of the bias of one pair: `Σ_channels p·(g·v − G·Y)`, from the row as its keys see it.
#[inline(always)]
pub(crate) unsafe fn bias_gradient<V: Vector>(row: &[V::Element], key: &[V::Element], bias: V::Element) -> V::Element
where
    V::Element: Constants,
{
    let width = row.len() / PARTS;
    assert!(width.is_multiple_of(V::LANES) && key.len() >= row.len());
    let mut column = 0;
    // SAFETY: every row of both has a register at `column` by the assertion above.
    unsafe {
        let bias = V::splat(bias);
        let mut sum = V::splat(V::Element::ZERO);
        while column < width {
            let at = |from: &[V::Element], n: usize| V::load(from.as_ptr().add(n * width + column));
            let weight = exp_nonpositive(at(key, 0).add(at(row, 0)).add(bias.add(at(row, 1))));
            let term = at(row, 2).mul(at(key, 2)).sub(at(row, 3));
            sum = weight.mul_add(term, sum);
            column += V::LANES;
        }
        sum.sum()
    }
}
