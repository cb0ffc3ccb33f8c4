//! Sums of tokens as a caller's tensors hold them: under one exponent a channel, or joined to a mean.

use super::log_sum::{Factors, PARTS, by_registers, fits, part, parts, set_part};
use crate::simd::block::floor;
use crate::simd::rows::{Rows, covers, get};
use crate::simd::{Real, Vector, operation};

/// How far below the largest exponent of a block that of any sum may be, if all are to be relative to the largest: what sums
/// divide by is then at least `e^{−24}`, and terms that an exponential loses, below `e^{−87}` (`f32`), are nothing beside it.
pub(super) const DEEPEST: f64 = 24.0;

#[derive(Clone, Copy)]
pub(super) struct Tokens<'a, T> {
    pub keys: Rows<'a, T>,
    /// Numbers in a key: those of a value, or 1.
    pub key_dim: usize,
    pub values: Rows<'a, T>,
    pub count: usize,
    pub head_dim: usize,
}

impl<'a, T> Tokens<'a, T> {
    /// One token.
    pub fn single(key: &'a [T], value: &'a [T]) -> Self {
        let [keys, values] = [key, value].map(|data| Rows { data, stride: data.len() });
        Self { keys, key_dim: key.len(), values, count: 1, head_dim: value.len() }
    }

    pub fn are_there(&self) -> bool {
        let values = covers(&self.values, self.count, self.head_dim);
        values && covers(&self.keys, self.count, self.key_dim) && self.key_dim > 0
    }

    /// A register of a token's key; one key a head stands for all channels.
    ///
    /// # Safety
    /// There is such a token, with so many channels from the column on.
    #[inline(always)]
    unsafe fn key<V: Vector<Element = T>, const WHOLE: bool>(&self, token: usize, column: usize, left: usize) -> V
    where
        T: Copy,
    {
        // SAFETY: forwarded to the caller.
        unsafe {
            if self.key_dim == self.head_dim {
                return self.keys.register::<V, WHOLE>(token, column, left);
            }
            V::splat(*self.keys.data.as_ptr().add(token * self.keys.stride))
        }
    }
}

// Brings tokens to one exponent a channel, as [`FactorMeans`](super::log_sum::FactorMeans) does with their means: `e^{k−X}·v`, if
// there is room for numerators, `e^{k−X}` and `X`. Returns the largest range of keys of any channel, with those that stand for nothing.
operation!(FactorTokens, |tokens: Tokens<'a, T>, to: Factors<'a, T>| -> T {
    let Factors { reference, numerators, denominators } = to;
    let (count, width) = (tokens.count, reference.len() / 2);
    assert!(width.is_multiple_of(V::LANES) && tokens.head_dim <= width && tokens.are_there());
    assert!(denominators.len() >= count * width && (numerators.is_empty() || numerators.len() >= count * width));
    reference.fill(T::ZERO);
    if tokens.head_dim < width {
        let numbers = (count * width).min(numerators.len());
        numerators[..numbers].fill(T::ZERO);
        denominators[..count * width].fill(T::ZERO);
    }
    let mut widest = T::ZERO;
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        by_registers!(tokens.head_dim, 4, N, WHOLE, |column, left| {
            let (zero, bottom) = (V::splat(T::ZERO), V::splat(floor()));
            let key = |token: usize, n: usize| tokens.key::<V, WHOLE>(token, column + n * V::LANES, left);
            let (mut most, mut least) = ([bottom; N], [zero.sub(bottom); N]);
            for token in 0..count {
                for n in 0..N {
                    let key = key(token, n);
                    most[n] = key.max(most[n]);
                    least[n] = key.min(least[n]);
                }
            }
            set_part(reference, width, 0, column, most);
            let numerators = (!numerators.is_empty()).then(|| numerators.as_mut_ptr().add(column));
            let denominators = denominators.as_mut_ptr().add(column);
            for token in 0..count {
                for (n, &most) in most.iter().enumerate() {
                    let at = token * width + n * V::LANES;
                    let weight = key(token, n).sub(most).exp_nonpositive();
                    weight.store(denominators.add(at));
                    if let Some(numerators) = numerators {
                        let value = tokens.values.register::<V, WHOLE>(token, column + n * V::LANES, left);
                        value.mul(weight).store(numerators.add(at));
                    }
                }
            }
            for (most, least) in most.into_iter().zip(least) {
                widest = widest.max(most.sub(least).largest());
            }
        })
    };
    widest
});

// The mean of tokens that are all there, relative to the largest key of each channel; without `numerators` these are 0.
operation!(SumTokens, |tokens: Tokens<'a, T>, numerators: bool, to: &'a mut [T]| {
    assert!(fits::<V>(to, tokens.head_dim) && tokens.are_there());
    let width = to.len() / PARTS;
    to[..width].fill(floor());
    to[width..].fill(T::ZERO);
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        by_registers!(tokens.head_dim, 4, N, WHOLE, |column, left| {
            let zero = V::splat(T::ZERO);
            let key = |token: usize, n: usize| tokens.key::<V, WHOLE>(token, column + n * V::LANES, left);
            let mut max = [V::splat(floor()); N];
            for token in 0..tokens.count {
                for (n, max) in max.iter_mut().enumerate() {
                    *max = key(token, n).max(*max);
                }
            }
            let (mut numerator, mut denominator) = ([zero; N], [zero; N]);
            if numerators {
                for token in 0..tokens.count {
                    for n in 0..N {
                        let weight = key(token, n).sub(max[n]).exp_nonpositive();
                        let value = tokens.values.register::<V, WHOLE>(token, column + n * V::LANES, left);
                        numerator[n] = weight.mul_add(value, numerator[n]);
                        denominator[n] = denominator[n].add(weight);
                    }
                }
            } else {
                for token in 0..tokens.count {
                    for n in 0..N {
                        denominator[n] = denominator[n].add(key(token, n).sub(max[n]).exp_nonpositive());
                    }
                }
            }
            set_part(to, width, 0, column, max);
            set_part(to, width, 2, column, numerator);
            set_part(to, width, 3, column, denominator);
        })
    };
});

/// Tokens that [`JoinTokens`] takes at once.
pub(super) const JOINED: usize = 64;

// Joins tokens with a bias each to a mean: what joining one after the other gives, with one exponential a number, or a token with
// one key a head.
//
// Where biases are near each other, all exponents are relative to the largest key and the largest bias: no sum is then further below
// that than biases are apart.
operation!(JoinTokens, |tokens: Tokens<'a, T>, biases: &'a [T], mean: &'a mut [T]| {
    let (count, width) = (tokens.count, tokens.head_dim);
    assert!(fits::<V>(mean, width) && tokens.are_there() && (1..=JOINED).contains(&count) && biases.len() == count);
    let padded = mean.len() / PARTS;
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        let zero = V::splat(T::ZERO);
        let (mut least, mut most) = (zero, zero);
        for numbers in [biases, &mean[padded..padded + width]] {
            for at in (0..numbers.len()).step_by(V::LANES) {
                let own = match numbers.len() - at {
                    left if left < V::LANES => get::<V, false>(numbers.as_ptr().add(at), left),
                    _ => V::load(numbers.as_ptr().add(at)),
                };
                (least, most) = (own.min(least), own.max(most));
            }
        }
        let (low, common) = (-zero.sub(least).largest(), most.largest());
        let near = common - low <= T::from_f64(DEEPEST);
        if near && tokens.key_dim < width {
            return join_single_keys::<V>(&tokens, biases, common, mean);
        }
        if near {
            by_registers!(width, 4, N, WHOLE, |column, left| {
                let key = |token: usize, n: usize| tokens.keys.register::<V, WHOLE>(token, column + n * V::LANES, left);
                let mut x = part::<V, N>(mean, padded, 0, column);
                for token in 0..count {
                    for (n, x) in x.iter_mut().enumerate() {
                        *x = key(token, n).max(*x);
                    }
                }
                let (b, shift) = ([V::splat(common); N], |bias: T, _| V::splat(bias - common));
                join_under::<V, N, WHOLE>(&tokens, biases, [x, b], key, shift, mean, column, left);
            });
            return;
        }
        by_registers!(width, 4, N, WHOLE, |column, left| {
            let key = |token: usize, n: usize| tokens.key::<V, WHOLE>(token, column + n * V::LANES, left);
            let [mut x, mut b] = [part::<V, N>(mean, padded, 0, column), part::<V, N>(mean, padded, 1, column)];
            for (token, &bias) in biases.iter().enumerate() {
                let bias = V::splat(bias);
                for n in 0..N {
                    let key = key(token, n);
                    let rise = key.sub(x[n]).add(bias.sub(b[n]));
                    (x[n], b[n]) = (rise.if_positive(key, x[n]), rise.if_positive(bias, b[n]));
                }
            }
            let shift = |bias: T, n: usize| V::splat(bias).sub(b[n]);
            join_under::<V, N, WHOLE>(&tokens, biases, [x, b], key, shift, mean, column, left);
        })
    }
});

/// Joins tokens to a mean whose exponents become `x` and `b`, which are as large as any token's or larger; `shift(bias, n)` is a
/// bias relative to `b`.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn join_under<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    biases: &[V::Element],
    [x, b]: [[V; N]; 2],
    key: impl Fn(usize, usize) -> V,
    shift: impl Fn(V::Element, usize) -> V,
    mean: &mut [V::Element],
    column: usize,
    left: usize,
) {
    let width = mean.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let [own_x, own_b, mut numerator, mut denominator] = parts::<V, N>(mean, width, column);
        for n in 0..N {
            let scale = own_x[n].sub(x[n]).add(own_b[n].sub(b[n])).exp_nonpositive();
            (numerator[n], denominator[n]) = (numerator[n].mul(scale), denominator[n].mul(scale));
        }
        for (token, &bias) in biases.iter().enumerate() {
            for n in 0..N {
                let weight = key(token, n).sub(x[n]).add(shift(bias, n)).exp_nonpositive();
                let value = tokens.values.register::<V, WHOLE>(token, column + n * V::LANES, left);
                numerator[n] = weight.mul_add(value, numerator[n]);
                denominator[n] = denominator[n].add(weight);
            }
        }
        for (row, registers) in [x, b, numerator, denominator].into_iter().enumerate() {
            set_part(mean, width, row, column, registers);
        }
    }
}

/// The same for tokens with one key for all channels, whose mean has one exponent.
#[inline(always)]
unsafe fn join_single_keys<V: Vector>(
    tokens: &Tokens<'_, V::Element>,
    biases: &[V::Element],
    common: V::Element,
    mean: &mut [V::Element],
) {
    let padded = mean.len() / PARTS;
    // Exponents of −∞ where there is no token.
    let (mut keys, mut shifts) = ([V::Element::NEG_INFINITY; JOINED], [V::Element::ZERO; JOINED]);
    for (token, (key, shift)) in keys.iter_mut().zip(&mut shifts).enumerate().take(tokens.count) {
        (*key, *shift) = (tokens.keys.row(token, 1)[0], biases[token] - common);
    }
    let whole = tokens.count.next_multiple_of(V::LANES);
    // SAFETY: whole registers lie in the arrays, whose length is a multiple of every register's.
    unsafe {
        let mut most = V::splat(mean[0]);
        for at in (0..whole).step_by(V::LANES) {
            most = V::load(keys.as_ptr().add(at)).max(most);
        }
        let max = most.largest();
        let mut sum = V::splat(V::Element::ZERO);
        for at in (0..whole).step_by(V::LANES) {
            let place = keys.as_mut_ptr().add(at);
            let exponent = V::load(place).sub(V::splat(max)).add(V::load(shifts.as_ptr().add(at)));
            let weight = exponent.exp_nonpositive();
            weight.store(place);
            sum = sum.add(weight);
        }
        let scale = V::splat(mean[0]).sub(V::splat(max)).add(V::splat(mean[padded] - common)).exp_nonpositive();
        let denominator = V::splat(mean[3 * padded]).mul(scale).add(V::splat(sum.sum()));
        by_registers!(tokens.head_dim, 4, N, WHOLE, |column, left| {
            let mut numerator = part::<V, N>(mean, padded, 2, column);
            for numerator in &mut numerator {
                *numerator = numerator.mul(scale);
            }
            for (token, &weight) in keys.iter().enumerate().take(tokens.count) {
                for (n, numerator) in numerator.iter_mut().enumerate() {
                    let value = tokens.values.register::<V, WHOLE>(token, column + n * V::LANES, left);
                    *numerator = V::splat(weight).mul_add(value, *numerator);
                }
            }
            set_part(mean, padded, 2, column, numerator);
        });
        for column in (0..padded).step_by(V::LANES) {
            let to = mean.as_mut_ptr().add(column);
            V::splat(max).store(to);
            V::splat(common).store(to.add(padded));
            denominator.store(to.add(3 * padded));
        }
    }
}
