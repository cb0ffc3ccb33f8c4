//! Means of all tokens up to each one, and what the tokens from each one on collect in the backward, channel by channel.
//!
//! All exponentials of a block of tokens are taken relative to one *top* for each channel, the largest key up to the end of the
//! block, so that a token costs one exponential and sums are plain. [`running_max`] says whether that keeps every sum: no row of the
//! block may have a largest key that is more than [`DEEPEST`] below the top.

use super::log_sum::{PARTS, Tokens, sigmoid};
use crate::simd::block::floor;
use crate::simd::rows::{Columns, Rows, covers, get, put};
use crate::simd::{Operation, Real, Vector, exp_nonpositive};

/// How far below the block's top the largest key of a row may be: every denominator is then at least `e^{−24}`, and terms that
/// an exponential loses, below `e^{−87}` (`f32`), are nothing beside it.
pub(crate) const DEEPEST: f64 = 24.0;

/// The rows of a block of outputs in the backward.
#[derive(Clone, Copy)]
pub(crate) struct OutputRows<'a, T> {
    /// For a gate.
    pub q: Option<Rows<'a, T>>,
    pub d_out: Rows<'a, T>,
    pub out: Rows<'a, T>,
    pub count: usize,
}

/// Calls `$body::<V, N, WHOLE>(arguments, column, left)` for all columns, four registers at a time where there are so many.
macro_rules! by_registers {
    ($width:expr, $body:ident($($argument:expr),*)) => {{
        let (mut column, width) = (0, $width);
        while column < width {
            let left = width - column;
            if left >= 4 * V::LANES {
                $body::<V, 4, true>($($argument,)* column, left);
                column += 4 * V::LANES;
            } else if left >= V::LANES {
                $body::<V, 1, true>($($argument,)* column, left);
                column += V::LANES;
            } else {
                $body::<V, 1, false>($($argument,)* column, left);
                column = width;
            }
        }
    }};
}

/// Register `n` of `N` of row `row` of a mean of `width`.
#[inline(always)]
unsafe fn part<V: Vector, const N: usize>(mean: &[V::Element], width: usize, row: usize, column: usize) -> [V; N] {
    // SAFETY: the caller's mean has these registers.
    std::array::from_fn(|n| unsafe { V::load(mean.as_ptr().add(row * width + column + n * V::LANES)) })
}

/// The same of all rows. A map over their numbers would be a call, and registers would go through memory.
#[inline(always)]
unsafe fn parts<V: Vector, const N: usize>(mean: &[V::Element], width: usize, column: usize) -> [[V; N]; PARTS] {
    // SAFETY: forwarded to the caller.
    unsafe {
        [
            part(mean, width, 0, column),
            part(mean, width, 1, column),
            part(mean, width, 2, column),
            part(mean, width, 3, column),
        ]
    }
}

/// Writes what [`part`] reads.
#[inline(always)]
unsafe fn set_part<V: Vector, const N: usize>(
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
fn fits<V: Vector>(mean: &[V::Element], head_dim: usize) -> bool {
    let width = mean.len() / PARTS;
    mean.len() == PARTS * width && width.is_multiple_of(V::LANES) && head_dim <= width
}

/// The largest key of each channel up to the last token, those of `before` included. Returns whether all sums may be relative
/// to them.
pub(crate) struct FindRunningMax<'a, T> {
    pub tokens: Tokens<'a, T>,
    pub before: &'a [T],
    pub running_max: &'a mut [T],
}

impl<T: Real> Operation for FindRunningMax<'_, T> {
    type Element = T;
    type Output = bool;

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) -> bool {
        let Self { tokens, before, running_max } = self;
        assert!(fits::<V>(before, tokens.head_dim) && tokens.key_dim == tokens.head_dim && tokens.count > 0);
        assert!(running_max.len() * PARTS == before.len() && covers(&tokens.keys, tokens.count, tokens.key_dim));
        let mut deepest = V::Element::ZERO;
        // SAFETY: keys and means are as large as the assertions say.
        unsafe { by_registers!(tokens.head_dim, tops_of(&tokens, before, running_max, &mut deepest)) };
        deepest <= V::Element::from_f64(DEEPEST)
    }
}

#[inline(always)]
unsafe fn tops_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    before: &[V::Element],
    running_max: &mut [V::Element],
    deepest: &mut V::Element,
    column: usize,
    left: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let keys = tokens.keys.data.as_ptr().add(column);
        let mut most = part::<V, N>(before, running_max.len(), 0, column);
        let mut least = most;
        for (n, least) in least.iter_mut().enumerate() {
            *least = get::<V, WHOLE>(keys.add(n * V::LANES), left).max(*least);
        }
        for token in 0..tokens.count {
            let key = keys.add(token * tokens.keys.stride);
            for (n, most) in most.iter_mut().enumerate() {
                *most = get::<V, WHOLE>(key.add(n * V::LANES), left).max(*most);
            }
        }
        set_part(running_max, 0, 0, column, most);
        let zero = V::splat(V::Element::ZERO);
        for (most, least) in most.into_iter().zip(least) {
            // A channel that has seen nothing yet is one whose sums are not kept.
            let seen = least.sub(V::splat(floor()));
            let depth = seen.if_positive(most.sub(least), zero.sub(V::splat(floor())));
            *deepest = deepest.max(depth.largest());
        }
    }
}

/// A register of a token's key; one key a head stands for all channels.
#[inline(always)]
unsafe fn key<V: Vector, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    token: usize,
    column: usize,
    left: usize,
) -> V {
    // SAFETY: the caller's tokens have such a row and column.
    unsafe {
        let row = tokens.keys.data.as_ptr().add(token * tokens.keys.stride);
        if tokens.key_dim == tokens.head_dim { get::<V, WHOLE>(row.add(column), left) } else { V::splat(*row) }
    }
}

/// Brings tokens to one exponent a channel, as [`factor`](super::log_sum::factor) does with their means: `e^{k−X}·v`, if there is room
/// for numerators, `e^{k−X}` and `X`. Returns the largest range of keys of any channel.
pub(crate) struct FactorTokens<'a, T> {
    pub tokens: Tokens<'a, T>,
    pub reference: &'a mut [T],
    pub numerators: &'a mut [T],
    pub denominators: &'a mut [T],
}

impl<T: Real> Operation for FactorTokens<'_, T> {
    type Element = T;
    type Output = T;

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) -> T {
        let Self { tokens, reference, numerators, denominators } = self;
        let (count, width) = (tokens.count, reference.len() / 2);
        assert!(width.is_multiple_of(V::LANES) && tokens.head_dim <= width && tokens.key_dim > 0);
        assert!(denominators.len() >= count * width && (numerators.is_empty() || numerators.len() >= count * width));
        assert!(covers(&tokens.keys, count, tokens.key_dim) && covers(&tokens.values, count, tokens.head_dim));
        reference.fill(V::Element::ZERO);
        if tokens.head_dim < width {
            let numbers = (count * width).min(numerators.len());
            numerators[..numbers].fill(V::Element::ZERO);
            denominators[..count * width].fill(V::Element::ZERO);
        }
        let mut widest = V::Element::ZERO;
        // SAFETY: all rows are as large as the assertions say.
        unsafe {
            by_registers!(tokens.head_dim, factor_tokens_of(&tokens, reference, numerators, denominators, &mut widest))
        };
        widest
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn factor_tokens_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    reference: &mut [V::Element],
    numerators: &mut [V::Element],
    denominators: &mut [V::Element],
    widest: &mut V::Element,
    column: usize,
    left: usize,
) {
    let width = reference.len() / 2;
    // SAFETY: forwarded to the caller.
    unsafe {
        let (zero, bottom) = (V::splat(V::Element::ZERO), V::splat(floor()));
        let key = |token: usize, n: usize| key::<V, WHOLE>(tokens, token, column + n * V::LANES, left);
        // Keys below the floor stand for nothing, and have no depth.
        let (mut most, mut least) = ([bottom; N], [zero.sub(bottom); N]);
        for token in 0..tokens.count {
            for n in 0..N {
                let key = key(token, n);
                most[n] = key.max(most[n]);
                least[n] = key.sub(bottom).if_positive(key, least[n]).min(least[n]);
            }
        }
        set_part(reference, width, 0, column, most);
        let numerators = (!numerators.is_empty()).then(|| numerators.as_mut_ptr().add(column));
        let denominators = denominators.as_mut_ptr().add(column);
        for token in 0..tokens.count {
            let row = tokens.values.data.as_ptr().add(token * tokens.values.stride + column);
            for (n, &most) in most.iter().enumerate() {
                let at = token * width + n * V::LANES;
                let weight = exp_nonpositive(key(token, n).sub(most));
                weight.store(denominators.add(at));
                if let Some(numerators) = numerators {
                    get::<V, WHOLE>(row.add(n * V::LANES), left).mul(weight).store(numerators.add(at));
                }
            }
        }
        for (most, least) in most.into_iter().zip(least) {
            *widest = widest.max(most.sub(least).largest());
        }
    }
}

/// The mean of tokens that are all there, relative to the largest key of each channel; without `numerators` these are 0.
pub(crate) struct SumTokens<'a, T> {
    pub tokens: Tokens<'a, T>,
    pub numerators: bool,
    pub to: &'a mut [T],
}

impl<T: Real> Operation for SumTokens<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { tokens, numerators, to } = self;
        let width = tokens.head_dim;
        assert!(fits::<V>(to, width) && covers(&tokens.keys, tokens.count, tokens.key_dim) && tokens.key_dim > 0);
        assert!(covers(&tokens.values, tokens.count, width));
        let (exponents, rest) = to.split_at_mut(to.len() / PARTS);
        exponents.fill(floor());
        rest.fill(V::Element::ZERO);
        // SAFETY: all rows are as large as the assertions say.
        unsafe { by_registers!(width, sum_tokens_of(&tokens, numerators, to)) };
    }
}

#[inline(always)]
unsafe fn sum_tokens_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    numerators: bool,
    to: &mut [V::Element],
    column: usize,
    left: usize,
) {
    let width = to.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let key = |token: usize, n: usize| key::<V, WHOLE>(tokens, token, column + n * V::LANES, left);
        let mut top = [V::splat(floor()); N];
        for token in 0..tokens.count {
            for (n, top) in top.iter_mut().enumerate() {
                *top = key(token, n).max(*top);
            }
        }
        let (mut numerator, mut denominator) = ([zero; N], [zero; N]);
        if numerators {
            for token in 0..tokens.count {
                let row = tokens.values.data.as_ptr().add(token * tokens.values.stride + column);
                for n in 0..N {
                    let weight = exp_nonpositive(key(token, n).sub(top[n]));
                    numerator[n] = weight.mul_add(get::<V, WHOLE>(row.add(n * V::LANES), left), numerator[n]);
                    denominator[n] = denominator[n].add(weight);
                }
            }
        } else {
            for token in 0..tokens.count {
                for n in 0..N {
                    denominator[n] = denominator[n].add(exp_nonpositive(key(token, n).sub(top[n])));
                }
            }
        }
        set_part(to, width, 0, column, top);
        set_part(to, width, 2, column, numerator);
        set_part(to, width, 3, column, denominator);
    }
}

/// Tokens that [`join_tokens`] takes at once.
pub(crate) const JOINED: usize = 64;

/// Joins tokens with a bias each to a mean: what joining one after the other gives, with one exponential a number, or a token with
/// one key a head.
///
/// Where biases are near each other, all exponents are relative to the largest key and the largest bias: no sum is then further below
/// that than biases are apart.
pub(crate) struct JoinTokens<'a, T> {
    pub tokens: Tokens<'a, T>,
    pub biases: &'a [T],
    pub mean: &'a mut [T],
}

impl<T: Real> Operation for JoinTokens<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { tokens, biases, mean } = self;
        let (count, width) = (tokens.count, tokens.head_dim);
        assert!(fits::<V>(mean, width) && tokens.key_dim > 0 && (1..=JOINED).contains(&count) && biases.len() == count);
        assert!(covers(&tokens.keys, count, tokens.key_dim) && covers(&tokens.values, count, width));
        let padded = mean.len() / PARTS;
        // SAFETY: all rows are as large as the assertions say.
        unsafe {
            let zero = V::splat(V::Element::ZERO);
            let (mut least, mut most) = (zero, zero);
            for numbers in [biases, &mean[padded..padded + width]] {
                let mut at = 0;
                while at < numbers.len() {
                    let own = match numbers.len() - at {
                        left if left < V::LANES => get::<V, false>(numbers.as_ptr().add(at), left),
                        _ => V::load(numbers.as_ptr().add(at)),
                    };
                    (least, most) = (own.min(least), own.max(most));
                    at += V::LANES;
                }
            }
            let (low, high) = (-zero.sub(least).largest(), most.largest());
            let near = high - low <= V::Element::from_f64(DEEPEST);
            match (near, tokens.key_dim < width) {
                (true, true) => join_single_keys::<V>(&tokens, biases, high, mean),
                (true, false) => by_registers!(width, join_near_of(&tokens, biases, high, mean)),
                (false, _) => by_registers!(width, join_tokens_of(&tokens, biases, mean)),
            }
        }
    }
}

#[inline(always)]
unsafe fn join_tokens_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    biases: &[V::Element],
    mean: &mut [V::Element],
    column: usize,
    left: usize,
) {
    let width = mean.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let key = |token: usize, n: usize| key::<V, WHOLE>(tokens, token, column + n * V::LANES, left);
        let [mut x, mut b] = [part(mean, width, 0, column), part(mean, width, 1, column)];
        for (token, &bias) in biases.iter().enumerate() {
            let bias = V::splat(bias);
            for n in 0..N {
                let key = key(token, n);
                let rise = key.sub(x[n]).add(bias.sub(b[n]));
                (x[n], b[n]) = (rise.if_positive(key, x[n]), rise.if_positive(bias, b[n]));
            }
        }
        let shift = |bias: V::Element, n: usize| V::splat(bias).sub(b[n]);
        join_under::<V, N, WHOLE>(tokens, biases, [x, b], key, shift, mean, column, left);
    }
}

/// The same for tokens with a key for each channel, whose biases are near the largest of them, `common`.
#[inline(always)]
unsafe fn join_near_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    biases: &[V::Element],
    common: V::Element,
    mean: &mut [V::Element],
    column: usize,
    left: usize,
) {
    // SAFETY: forwarded to the caller, whose keys are as wide as its values.
    unsafe {
        let keys = tokens.keys.data.as_ptr().add(column);
        let key = |token: usize, n: usize| get::<V, WHOLE>(keys.add(token * tokens.keys.stride + n * V::LANES), left);
        let mut x = part::<V, N>(mean, mean.len() / PARTS, 0, column);
        for token in 0..tokens.count {
            for (n, x) in x.iter_mut().enumerate() {
                *x = key(token, n).max(*x);
            }
        }
        let (b, shift) = ([V::splat(common); N], |bias: V::Element, _| V::splat(bias - common));
        join_under::<V, N, WHOLE>(tokens, biases, [x, b], key, shift, mean, column, left);
    }
}

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
            let scale = exp_nonpositive(own_x[n].sub(x[n]).add(own_b[n].sub(b[n])));
            (numerator[n], denominator[n]) = (numerator[n].mul(scale), denominator[n].mul(scale));
        }
        for (token, &bias) in biases.iter().enumerate() {
            let value = tokens.values.data.as_ptr().add(token * tokens.values.stride + column);
            for n in 0..N {
                let weight = exp_nonpositive(key(token, n).sub(x[n]).add(shift(bias, n)));
                numerator[n] = weight.mul_add(get::<V, WHOLE>(value.add(n * V::LANES), left), numerator[n]);
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
    let (padded, width) = (mean.len() / PARTS, tokens.head_dim);
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
        let top = most.largest();
        let mut sum = V::splat(V::Element::ZERO);
        for at in (0..whole).step_by(V::LANES) {
            let place = keys.as_mut_ptr().add(at);
            let exponent = V::load(place).sub(V::splat(top)).add(V::load(shifts.as_ptr().add(at)));
            let weight = exp_nonpositive(exponent);
            weight.store(place);
            sum = sum.add(weight);
        }
        let scale = exp_nonpositive(V::splat(mean[0]).sub(V::splat(top)).add(V::splat(mean[padded] - common)));
        let denominator = V::splat(mean[3 * padded]).mul(scale).add(V::splat(sum.sum()));
        by_registers!(width, add_weighed_of(tokens, &keys, scale, mean));
        for column in (0..padded).step_by(V::LANES) {
            let to = mean.as_mut_ptr().add(column);
            V::splat(top).store(to);
            V::splat(common).store(to.add(padded));
            denominator.store(to.add(3 * padded));
        }
    }
}

#[inline(always)]
unsafe fn add_weighed_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    weights: &[V::Element],
    scale: V,
    mean: &mut [V::Element],
    column: usize,
    left: usize,
) {
    let width = mean.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut numerator = part::<V, N>(mean, width, 2, column);
        for numerator in &mut numerator {
            *numerator = numerator.mul(scale);
        }
        for (token, &weight) in weights.iter().enumerate().take(tokens.count) {
            let row = tokens.values.data.as_ptr().add(token * tokens.values.stride + column);
            for (n, numerator) in numerator.iter_mut().enumerate() {
                *numerator = V::splat(weight).mul_add(get::<V, WHOLE>(row.add(n * V::LANES), left), *numerator);
            }
        }
        set_part(mean, width, 2, column, numerator);
    }
}

/// `numerator/denominator` times `σ(q)`, with one division; `q` is none without a gate.
#[inline(always)]
unsafe fn gate<V: Vector>(numerator: V, denominator: V, q: Option<V>) -> V {
    // SAFETY: forwarded to the caller.
    unsafe {
        let Some(q) = q else { return numerator.div(denominator) };
        let one = V::splat(V::Element::ONE);
        let small = exp_nonpositive(V::splat(V::Element::ZERO).sub(q.abs()));
        numerator.mul(q.if_positive(one, small)).div(denominator.mul(one.add(small)))
    }
}

/// Writes the output after each token, for tokens whose [`running_max`] keep every sum, and takes them into the mean.
pub(crate) struct RunningMeans<'a, 'b, T> {
    pub tokens: Tokens<'a, T>,
    pub running_max: &'a [T],
    pub mean: &'a mut [T],
    pub to: &'a mut Columns<'b, T>,
}

impl<T: Real> Operation for RunningMeans<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { tokens, running_max, mean, to } = self;
        let (count, width) = (tokens.count, tokens.head_dim);
        assert!(fits::<V>(mean, width) && tokens.key_dim == width && running_max.len() * PARTS == mean.len());
        assert!(covers(&tokens.keys, count, width) && covers(&tokens.values, count, width));
        assert!(tokens.queries.is_none_or(|queries| covers(&queries, count, width)));
        assert!(to.rows() >= count && to.width() >= width);
        // SAFETY: all rows are as large as the assertions say.
        unsafe { by_registers!(width, running_means_of(&tokens, running_max, mean, to)) };
    }
}

#[inline(always)]
unsafe fn running_means_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    running_max: &[V::Element],
    mean: &mut [V::Element],
    to: &mut Columns<'_, V::Element>,
    column: usize,
    left: usize,
) {
    let width = running_max.len();
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let top = part::<V, N>(running_max, 0, 0, column);
        let x = part::<V, N>(mean, width, 0, column);
        let (mut n_before, mut d_before) = (part::<V, N>(mean, width, 2, column), part::<V, N>(mean, width, 3, column));
        for n in 0..N {
            let scale = exp_nonpositive(x[n].sub(top[n]));
            (n_before[n], d_before[n]) = (n_before[n].mul(scale), d_before[n].mul(scale));
        }
        // What is added up here is added to what was before only when it is read: errors grow with the number of blocks.
        let (mut numerator, mut denominator) = ([zero; N], [zero; N]);
        for token in 0..tokens.count {
            for n in 0..N {
                let at = column + n * V::LANES;
                let load = |rows: &Rows<'_, V::Element>| {
                    get::<V, WHOLE>(rows.data.as_ptr().add(token * rows.stride + at), left)
                };
                let weight = exp_nonpositive(load(&tokens.keys).sub(top[n]));
                numerator[n] = weight.mul_add(load(&tokens.values), numerator[n]);
                denominator[n] = denominator[n].add(weight);
                let q = tokens.queries.as_ref().map(load);
                let value = gate(numerator[n].add(n_before[n]), denominator[n].add(d_before[n]), q);
                put::<V, WHOLE>(value, to.at(token, at), left);
            }
        }
        for n in 0..N {
            numerator[n] = numerator[n].add(n_before[n]);
            denominator[n] = denominator[n].add(d_before[n]);
        }
        set_part(mean, width, 0, column, top);
        set_part(mean, width, 2, column, numerator);
        set_part(mean, width, 3, column, denominator);
    }
}

/// Writes outputs that have all the same mean; 0 in channels that have seen nothing.
pub(crate) struct ConstantMeans<'a, 'b, T> {
    pub queries: Option<Rows<'a, T>>,
    pub mean: &'a [T],
    pub to: &'a mut Columns<'b, T>,
}

impl<T: Real> Operation for ConstantMeans<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { queries, mean, to } = self;
        assert!(fits::<V>(mean, to.width()) && queries.is_none_or(|queries| covers(&queries, to.rows(), to.width())));
        // SAFETY: all rows are as large as the assertion says.
        unsafe { by_registers!(to.width(), constant_means_of(queries.as_ref(), mean, to)) };
    }
}

#[inline(always)]
unsafe fn constant_means_of<V: Vector, const N: usize, const WHOLE: bool>(
    queries: Option<&Rows<'_, V::Element>>,
    mean: &[V::Element],
    to: &mut Columns<'_, V::Element>,
    column: usize,
    left: usize,
) {
    let width = mean.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let (mut value, denominator) = (part::<V, N>(mean, width, 2, column), part::<V, N>(mean, width, 3, column));
        for (value, denominator) in value.iter_mut().zip(denominator) {
            // Not a plain 0: a denominator that is NaN shows.
            *value = denominator.if_positive(value.div(denominator), denominator);
        }
        for row in 0..to.rows() {
            for (n, value) in value.iter().enumerate() {
                let at = column + n * V::LANES;
                let gated = match queries {
                    Some(queries) => {
                        let q = get::<V, WHOLE>(queries.data.as_ptr().add(row * queries.stride + at), left);
                        value.mul(sigmoid(q).0)
                    }
                    None => *value,
                };
                put::<V, WHOLE>(gated, to.at(row, at), left);
            }
        }
    }
}

/// Writes `dq` of rows that all have the same mean and joins them as their keys see them, `(−x, −b, Σ g/d, Σ G·Y/d)`, to what is
/// collected from the later ones.
pub(crate) struct ConstantCotangents<'a, 'b, T> {
    pub rows: OutputRows<'a, T>,
    pub mean: &'a [T],
    pub item: &'a mut [T],
    pub dq: &'a mut Columns<'b, T>,
}

impl<T: Real> Operation for ConstantCotangents<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { rows, mean, item, dq } = self;
        let width = dq.width();
        assert!(fits::<V>(mean, width) && item.len() == mean.len() && dq.rows() >= rows.count);
        assert!(rows.q.is_none_or(|q| covers(&q, rows.count, width)));
        assert!(covers(&rows.d_out, rows.count, width) && covers(&rows.out, rows.count, width));
        // SAFETY: all rows are as large as the assertions say.
        unsafe { by_registers!(width, constant_cotangents_of(&rows, mean, item, dq)) };
    }
}

#[inline(always)]
unsafe fn constant_cotangents_of<V: Vector, const N: usize, const WHOLE: bool>(
    rows: &OutputRows<'_, V::Element>,
    mean: &[V::Element],
    item: &mut [V::Element],
    dq: &mut Columns<'_, V::Element>,
    column: usize,
    left: usize,
) {
    let width = mean.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let denominator = part::<V, N>(mean, width, 3, column);
        let (mut gates, mut products) = ([zero; N], [zero; N]);
        for row in 0..rows.count {
            for n in 0..N {
                let at = column + n * V::LANES;
                let load =
                    |rows: &Rows<'_, V::Element>| get::<V, WHOLE>(rows.data.as_ptr().add(row * rows.stride + at), left);
                let mut g = load(&rows.d_out);
                let product = g.mul(load(&rows.out));
                let mut d_query = zero;
                if let Some(q) = &rows.q {
                    let (gate, rest) = sigmoid(load(q));
                    g = g.mul(gate);
                    d_query = denominator[n].if_positive(product.mul(rest), denominator[n]);
                }
                put::<V, WHOLE>(d_query, dq.at(row, at), left);
                (gates[n], products[n]) = (gates[n].add(g), products[n].add(product));
            }
        }
        for n in 0..N {
            let (d, at) = (denominator[n], column + n * V::LANES);
            let x = zero.sub(V::load(mean.as_ptr().add(at)));
            let to = item.as_mut_ptr().add(at);
            d.if_positive(x, V::splat(floor())).store(to);
            zero.sub(V::load(mean.as_ptr().add(width + at))).store(to.add(width));
            d.if_positive(gates[n].div(d), d).store(to.add(2 * width));
            d.if_positive(products[n].div(d), d).store(to.add(3 * width));
        }
    }
}

/// Where the gradients of some tokens go.
pub(crate) struct TokenGradients<'a, T> {
    pub dk: Columns<'a, T>,
    pub dv: Columns<'a, T>,
    /// Whether something stands there that they are added to.
    pub add: bool,
}

impl<T: Real> TokenGradients<'_, T> {
    /// Writes a register of one token's, or adds it.
    #[inline(always)]
    unsafe fn put<V: Vector<Element = T>, const WHOLE: bool>(
        &mut self,
        (token, column, left): (usize, usize, usize),
        mut dk: V,
        mut dv: V,
    ) {
        // SAFETY: the caller's token and column are there.
        unsafe {
            let (to_k, to_v) = (self.dk.at(token, column), self.dv.at(token, column));
            if self.add {
                dk = dk.add(get::<V, WHOLE>(to_k, left));
                dv = dv.add(get::<V, WHOLE>(to_v, left));
            }
            put::<V, WHOLE>(dk, to_k, left);
            put::<V, WHOLE>(dv, to_v, left);
        }
    }
}

/// The gradients of tokens that rows see from their own on, and of these rows' queries; for tokens whose [`running_max`] keep every sum.
/// `before` is the mean before the first token, of which numerators are not read; `after` what is collected from later rows,
/// to which these are joined. `work` has room for three registers a token, four times.
pub(crate) struct RunningGradients<'a, 'b, T> {
    pub tokens: Tokens<'a, T>,
    pub rows: OutputRows<'a, T>,
    pub running_max: &'a [T],
    pub before: &'a [T],
    pub after: &'a mut [T],
    pub work: &'a mut [T],
    pub dq: &'a mut Columns<'b, T>,
    pub to: &'a mut TokenGradients<'b, T>,
}

impl<T: Real> Operation for RunningGradients<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { tokens, rows, running_max, before, after, work, dq, to } = self;
        let (count, width) = (tokens.count, tokens.head_dim);
        assert!(fits::<V>(before, width) && tokens.key_dim == width && running_max.len() * PARTS == before.len());
        assert!(after.len() == before.len() && rows.count == count && work.len() >= 12 * V::LANES * count);
        assert!(covers(&tokens.keys, count, width) && covers(&tokens.values, count, width));
        assert!(rows.q.is_none_or(|q| covers(&q, count, width)));
        assert!(covers(&rows.d_out, count, width) && covers(&rows.out, count, width));
        for to in [&*dq, &to.dk, &to.dv] {
            assert!(to.rows() >= count && to.width() >= width);
        }
        // SAFETY: all rows are as large as the assertions say.
        unsafe { by_registers!(width, running_gradients_of(&tokens, &rows, running_max, before, after, work, dq, to)) };
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn running_gradients_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    rows: &OutputRows<'_, V::Element>,
    running_max: &[V::Element],
    before: &[V::Element],
    after: &mut [V::Element],
    work: &mut [V::Element],
    dq: &mut Columns<'_, V::Element>,
    to: &mut TokenGradients<'_, V::Element>,
    column: usize,
    left: usize,
) {
    let width = running_max.len();
    // SAFETY: forwarded to the caller.
    unsafe {
        let (zero, one) = (V::splat(V::Element::ZERO), V::splat(V::Element::ONE));
        let work = work.as_mut_ptr();
        let kept = |token: usize, n: usize| work.add((token * N + n) * 3 * V::LANES);
        let top = part::<V, N>(running_max, 0, 0, column);
        let x = part::<V, N>(before, width, 0, column);
        let mut d_before = part::<V, N>(before, width, 3, column);
        for n in 0..N {
            d_before[n] = d_before[n].mul(exp_nonpositive(x[n].sub(top[n])));
        }
        let mut sum = [zero; N];
        for token in 0..tokens.count {
            for n in 0..N {
                let at = column + n * V::LANES;
                let load = |rows: &Rows<'_, V::Element>| {
                    get::<V, WHOLE>(rows.data.as_ptr().add(token * rows.stride + at), left)
                };
                let weight = exp_nonpositive(load(&tokens.keys).sub(top[n]));
                sum[n] = sum[n].add(weight);
                let denominator = sum[n].add(d_before[n]);
                let mut g = load(&rows.d_out);
                let mut product = g.mul(load(&rows.out));
                let mut d_query = zero;
                if let Some(q) = &rows.q {
                    // σ(q) and 1 − σ(q) are `large` and `rest` over `whole`; one division serves them and the mean.
                    let q = load(q);
                    let small = exp_nonpositive(zero.sub(q.abs()));
                    let (large, rest) = (q.if_positive(one, small), q.if_positive(small, one));
                    let whole = one.add(small);
                    let inverse = one.div(whole.mul(denominator));
                    d_query = product.mul(rest).mul(inverse.mul(denominator));
                    g = g.mul(large).mul(inverse);
                    product = product.mul(whole).mul(inverse);
                } else {
                    let inverse = one.div(denominator);
                    (g, product) = (g.mul(inverse), product.mul(inverse));
                }
                put::<V, WHOLE>(d_query, dq.at(token, at), left);
                let kept = kept(token, n);
                weight.store(kept);
                g.store(kept.add(V::LANES));
                product.store(kept.add(2 * V::LANES));
            }
        }
        // Numerators, and denominators with the other sign.
        let x = part::<V, N>(after, width, 0, column);
        let (mut n_after, mut d_after) = (part::<V, N>(after, width, 2, column), part::<V, N>(after, width, 3, column));
        for n in 0..N {
            let scale = exp_nonpositive(x[n].add(top[n]));
            (n_after[n], d_after[n]) = (n_after[n].mul(scale), zero.sub(d_after[n].mul(scale)));
        }
        let (mut numerator, mut denominator) = ([zero; N], [zero; N]);
        for token in (0..tokens.count).rev() {
            for n in 0..N {
                let at = column + n * V::LANES;
                let kept = kept(token, n);
                let weight = V::load(kept);
                numerator[n] = numerator[n].add(V::load(kept.add(V::LANES)));
                denominator[n] = denominator[n].sub(V::load(kept.add(2 * V::LANES)));
                let values = &tokens.values;
                let value = get::<V, WHOLE>(values.data.as_ptr().add(token * values.stride + at), left);
                let dv = weight.mul(numerator[n].add(n_after[n]));
                let dk = value.mul_add(dv, weight.mul(denominator[n].add(d_after[n])));
                to.put::<V, WHOLE>((token, at, left), dk, dv);
            }
        }
        for n in 0..N {
            let to = after.as_mut_ptr().add(column + n * V::LANES);
            zero.sub(top[n]).store(to);
            zero.store(to.add(width));
            numerator[n].add(n_after[n]).store(to.add(2 * width));
            zero.sub(denominator[n].add(d_after[n])).store(to.add(3 * width));
        }
    }
}

/// The gradients of tokens that are seen by the same rows, whose sum is `rows`.
pub(crate) struct ConstantGradients<'a, 'b, T> {
    pub tokens: Tokens<'a, T>,
    pub rows: &'a [T],
    pub to: &'a mut TokenGradients<'b, T>,
}

impl<T: Real> Operation for ConstantGradients<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { tokens, rows, to } = self;
        let (count, width) = (tokens.count, tokens.head_dim);
        assert!(fits::<V>(rows, width) && tokens.key_dim == width);
        assert!(covers(&tokens.keys, count, width) && covers(&tokens.values, count, width));
        assert!([&to.dk, &to.dv].into_iter().all(|to| to.rows() >= count && to.width() >= width));
        // SAFETY: all rows are as large as the assertions say.
        unsafe { by_registers!(width, constant_gradients_of(&tokens, rows, to)) };
    }
}

#[inline(always)]
unsafe fn constant_gradients_of<V: Vector, const N: usize, const WHOLE: bool>(
    tokens: &Tokens<'_, V::Element>,
    rows: &[V::Element],
    to: &mut TokenGradients<'_, V::Element>,
    column: usize,
    left: usize,
) {
    let width = rows.len() / PARTS;
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let [x, b, numerator, denominator] = parts::<V, N>(rows, width, column);
        for token in 0..tokens.count {
            for n in 0..N {
                let at = column + n * V::LANES;
                let load = |rows: &Rows<'_, V::Element>| {
                    get::<V, WHOLE>(rows.data.as_ptr().add(token * rows.stride + at), left)
                };
                let weight = exp_nonpositive(load(&tokens.keys).add(x[n]).add(b[n]));
                let dv = weight.mul(numerator[n]);
                let dk = load(&tokens.values).mul(dv).sub(weight.mul(denominator[n]));
                // A key that no row sees has gradient 0 whatever it is.
                let seen = x[n].sub(V::splat(floor()));
                let dv = seen.if_positive(dv, numerator[n].mul(zero));
                let dk = seen.if_positive(dk, denominator[n].mul(zero));
                to.put::<V, WHOLE>((token, at, left), dk, dv);
            }
        }
    }
}
