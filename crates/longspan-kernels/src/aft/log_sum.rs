//! Sums of exponentials under a running maximum, one for each channel: `(max, num, den)` and how two of them join.
//!
//! A *mean* is a block of four rows of one width: the exponent `x`, its positional part `b`, the numerator `n` and the
//! denominator `d`, standing for `e^{x+b}·n` and `e^{x+b}·d`. The exponent is kept in two parts because keys of 10⁴ and
//! biases of 10⁻¹ have no common sum in `f32`, while differences of each have. Joining means is associative, to
//! rounding; its unit is `(floor, 0, 0, 0)`. A single key is the mean `(k, 0, v, 1)`.

use crate::simd::block::floor;
use crate::simd::rows::{Rows, load_part, store_part};
use crate::simd::{Operation, Real, Vector, dispatch, exp_nonpositive};

/// Rows of a mean.
pub(crate) const PARTS: usize = 4;

/// Joins `e^{x+b}·(n, d)` to one register of a mean whose rows start at `to` and are `width` apart.
#[inline(always)]
unsafe fn join_register<V: Vector>(to: *mut V::Element, width: usize, [x, b, n, d]: [V; PARTS]) {
    // SAFETY: the caller gives a mean that has a register at `to` in each of its rows.
    unsafe {
        let (own_x, own_b) = (V::load(to), V::load(to.add(width)));
        let rise = x.sub(own_x).add(b.sub(own_b));
        let zero = V::splat(V::Element::ZERO);
        let one = V::splat(V::Element::ONE);
        let small = exp_nonpositive(zero.sub(rise.abs()));
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

/// Joins `e^bias · item` to `to`.
pub(crate) struct JoinMean<'a, T> {
    pub to: &'a mut [T],
    pub item: &'a [T],
    pub bias: T,
}

impl<T: Real> Operation for JoinMean<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { to, item, bias } = self;
        let width = to.len() / PARTS;
        assert!(width.is_multiple_of(V::LANES) && to.len() == PARTS * width && item.len() >= to.len());
        let mut column = 0;
        while column < width {
            // SAFETY: every row of both means has a register at `column` by the assertion above.
            unsafe {
                let row = |n: usize| V::load(item.as_ptr().add(n * width + column));
                let parts = [row(0), row(1).add(V::splat(bias)), row(2), row(3)];
                join_register::<V>(to.as_mut_ptr().add(column), width, parts);
            }
            column += V::LANES;
        }
    }
}

/// Joins `e^bias · item` to `to`.
pub(crate) fn join<T: Real>(to: &mut [T], item: &[T], bias: T) {
    dispatch(JoinMean { to, item, bias })
}

/// The tokens of one head, as a caller's tensors hold them.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a, T> {
    pub keys: Rows<'a, T>,
    /// Numbers in a key: those of a value, or 1.
    pub key_dim: usize,
    pub values: Rows<'a, T>,
    /// For a gate.
    pub queries: Option<Rows<'a, T>>,
    pub count: usize,
    /// Numbers in a value.
    pub head_dim: usize,
}

/// Means whose exponents are `e^{reference}` of their channel: `Σ_j a_ij·num_j` and `Σ_j a_ij·den_j` before they are
/// joined to row `i`, or the `num_j` and `den_j` themselves.
#[derive(Clone, Copy)]
pub(crate) struct Factored<'a, T> {
    /// The exponent's two parts, `2·width`.
    pub reference: &'a [T],
    /// Rows of `width`.
    pub numerators: &'a [T],
    /// As many.
    pub denominators: &'a [T],
}

/// Joins row `i` of `from` to mean `i` of `to`, times `e^{biases[i]}`.
pub(crate) struct JoinFactored<'a, T> {
    pub to: &'a mut [T],
    pub from: Factored<'a, T>,
    pub biases: &'a [T],
}

impl<T: Real> Operation for JoinFactored<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { to, from, biases } = self;
        let width = from.reference.len() / 2;
        assert!(width.is_multiple_of(V::LANES) && to.len() >= biases.len() * PARTS * width);
        assert!(from.numerators.len().min(from.denominators.len()) >= biases.len() * width);
        for (row, &bias) in biases.iter().enumerate() {
            let mut column = 0;
            while column < width {
                // SAFETY: every row has a register at `column` by the assertions above.
                unsafe {
                    let at = |from: &[V::Element], n: usize| V::load(from.as_ptr().add(n * width + column));
                    let parts = [
                        at(from.reference, 0),
                        at(from.reference, 1).add(V::splat(bias)),
                        at(from.numerators, row),
                        at(from.denominators, row),
                    ];
                    join_register::<V>(to.as_mut_ptr().add(row * PARTS * width + column), width, parts);
                }
                column += V::LANES;
            }
        }
    }
}

/// Brings means to one exponent a channel, the largest: `e^{x+b−X−B}·n`, if there is room for numerators,
/// `e^{x+b−X−B}·d`, and `(X, B)`. Returns the largest range of exponents of any channel, without those at the floor or below,
/// which stand for nothing.
pub(crate) struct FactorMeans<'a, T> {
    pub items: &'a [T],
    pub reference: &'a mut [T],
    pub numerators: &'a mut [T],
    pub denominators: &'a mut [T],
}

impl<T: Real> Operation for FactorMeans<'_, T> {
    type Element = T;
    type Output = T;

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) -> T {
        let Self { items, reference, numerators, denominators } = self;
        let width = reference.len() / 2;
        let count = items.len() / (PARTS * width).max(1);
        assert!(width.is_multiple_of(V::LANES) && denominators.len() >= count * width);
        assert!(numerators.is_empty() || numerators.len() >= count * width);
        let mut widest = V::Element::ZERO;
        let mut column = 0;
        while column < width {
            // SAFETY: every row has a register at `column` by the assertion above.
            unsafe {
                let at = |item: usize, row: usize| V::load(items.as_ptr().add((item * PARTS + row) * width + column));
                let zero = V::splat(V::Element::ZERO);
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
                    range = own.sub(bottom).if_positive(depth, zero).max(range);
                    let weight = exp_nonpositive(zero.sub(depth));
                    if !numerators.is_empty() {
                        at(item, 2).mul(weight).store(numerators.as_mut_ptr().add(item * width + column));
                    }
                    at(item, 3).mul(weight).store(denominators.as_mut_ptr().add(item * width + column));
                }
                widest = widest.max(range.largest());
            }
            column += V::LANES;
        }
        widest
    }
}

/// Brings rows as their keys see them to one exponent a row, for keys whose exponents are relative to `(X, B)` of their
/// channel: `e^{x+b+X+B−t}·n` and `−e^{x+b+X+B−t}·d` side by side, and the `t` into `tops`.
pub(crate) struct ProjectRows<'a, T> {
    pub rows: &'a [T],
    pub reference: &'a [T],
    pub to: &'a mut [T],
    pub running_max: &'a mut [T],
}

impl<T: Real> Operation for ProjectRows<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { rows, reference, to, running_max } = self;
        let width = reference.len() / 2;
        assert!(width.is_multiple_of(V::LANES) && rows.len() >= running_max.len() * PARTS * width);
        assert!(to.len() >= running_max.len() * 2 * width);
        for (row, top) in running_max.iter_mut().enumerate() {
            // SAFETY: every row has a register at each column by the assertions above.
            unsafe {
                let at = |n: usize, column: usize| V::load(rows.as_ptr().add((row * PARTS + n) * width + column));
                let zero = V::splat(V::Element::ZERO);
                let exponent = |column: usize| {
                    let x = at(0, column).add(V::load(reference.as_ptr().add(column)));
                    x.add(at(1, column).add(V::load(reference.as_ptr().add(width + column))))
                };
                let mut most = V::splat(floor());
                let mut column = 0;
                while column < width {
                    most = exponent(column).max(most);
                    column += V::LANES;
                }
                *top = most.largest().max(floor());
                column = 0;
                while column < width {
                    let weight = exp_nonpositive(exponent(column).sub(V::splat(*top)));
                    let to = to.as_mut_ptr().add(row * 2 * width + column);
                    at(2, column).mul(weight).store(to);
                    zero.sub(at(3, column).mul(weight)).store(to.add(width));
                    column += V::LANES;
                }
            }
        }
    }
}

/// `to ← e^{to + shift}·factors` for whole registers, as long as no exponent overflows.
pub(crate) struct ScaleByExponents<'a, T> {
    pub to: &'a mut [T],
    pub shift: T,
    pub factors: &'a [T],
}

impl<T: Real> Operation for ScaleByExponents<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { to, shift, factors } = self;
        assert!(to.len().is_multiple_of(V::LANES) && factors.len() >= to.len());
        let mut column = 0;
        while column < to.len() {
            // SAFETY: both slices have a register at `column` by the assertion above.
            unsafe {
                let at = to.as_mut_ptr().add(column);
                let weight = exp_nonpositive(V::load(at).add(V::splat(shift)));
                weight.mul(V::load(factors.as_ptr().add(column))).store(at);
            }
            column += V::LANES;
        }
    }
}

/// `σ(x)` and `1 − σ(x)`, both to full relative precision.
#[inline(always)]
pub(super) unsafe fn sigmoid<V: Vector>(x: V) -> (V, V) {
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

/// `σ(q) · num / den`, 0 where there is nothing; no `q` is no gate.
#[inline(always)]
unsafe fn gated<V: Vector>(numerator: V, denominator: V, q: Option<V>) -> V {
    // SAFETY: forwarded to the caller.
    unsafe {
        let mean = numerator.div(denominator);
        let value = match q {
            Some(q) => mean.mul(sigmoid(q).0),
            None => mean,
        };
        // Not a plain 0: a denominator that is NaN shows.
        denominator.if_positive(value, denominator)
    }
}

/// `out = σ(q) ⊙ num / den`, 0 where there is nothing; an empty `q` is no gate.
pub(crate) struct GatedMean<'a, T> {
    pub mean: &'a [T],
    pub q: &'a [T],
    pub out: &'a mut [T],
}

impl<T: Real> Operation for GatedMean<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { mean, q, out } = self;
        let width = mean.len() / PARTS;
        assert!(out.len() <= width && width.is_multiple_of(V::LANES) && (q.is_empty() || q.len() == out.len()));
        let mut column = 0;
        while column < out.len() {
            // SAFETY: every row of the mean has a register at `column` by the assertion above.
            unsafe {
                let (num, den) =
                    (V::load(mean.as_ptr().add(2 * width + column)), V::load(mean.as_ptr().add(3 * width + column)));
                let q = (!q.is_empty()).then(|| load_part::<V>(q, column));
                store_part(gated(num, den, q), out, column);
            }
            column += V::LANES;
        }
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
pub(crate) struct RowCotangent<'a, T> {
    pub mean: &'a [T],
    pub row: OutputRow<'a, T>,
    pub dq: &'a mut [T],
    pub item: &'a mut [T],
}

impl<T: Real> Operation for RowCotangent<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { mean, row, dq, item } = self;
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
}

/// From the sum of the rows that see a key: `dv = e^{k+x+b}·num`, `dk = v·dv − e^{k+x+b}·den`. All are whole rows.
pub(crate) struct KeyGradient<'a, T> {
    pub rows: &'a [T],
    pub key: &'a [T],
    pub dk: &'a mut [T],
    pub dv: &'a mut [T],
}

impl<T: Real> Operation for KeyGradient<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { rows, key, dk, dv } = self;
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
}

/// The gradient of the bias of one pair: `Σ_channels p·(g·v − G·Y)`, from the row as its keys see it.
pub(crate) struct BiasGradient<'a, T> {
    pub row: &'a [T],
    pub key: &'a [T],
    pub bias: T,
}

impl<T: Real> Operation for BiasGradient<'_, T> {
    type Element = T;
    type Output = T;

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) -> T {
        let Self { row, key, bias } = self;
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
}
