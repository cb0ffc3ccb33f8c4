//! Means of all tokens up to each one, and what the tokens from each one on collect in the backward, channel by channel.
//!
//! All exponentials of a block of tokens are taken relative to one *running max* for each channel, the largest key up to the end
//! of the block, so that a token costs one exponential and sums are plain. [`FindRunningMax`] says whether that keeps every sum: no
//! row of the block may have a largest key that is more than [`DEEPEST`] below the running max.

use super::log_sum::{PARTS, by_registers, fits, part, set_part};
use super::outputs::{OutputRows, TokenGradients};
use super::tokens::{DEEPEST, Tokens};
use crate::simd::block::floor;
use crate::simd::rows::{Columns, Rows, covers, put};
use crate::simd::{Real, Vector, operation};

// The largest key of each channel up to the last token, those of `before` included. Returns whether all sums may be relative
// to them.
operation!(FindRunningMax, |tokens: Tokens<'a, T>, before: &'a [T], running_max: &'a mut [T]| -> bool {
    let width = running_max.len();
    assert!(fits::<V>(before, tokens.head_dim) && width * PARTS == before.len());
    assert!(tokens.key_dim == tokens.head_dim && tokens.are_there() && tokens.count > 0);
    let mut deepest = T::ZERO;
    // SAFETY: keys and means are as large as the assertions say.
    unsafe {
        by_registers!(tokens.head_dim, 4, N, WHOLE, |column, left| {
            let key = |token: usize, n: usize| tokens.keys.register::<V, WHOLE>(token, column + n * V::LANES, left);
            let mut most = part::<V, N>(before, width, 0, column);
            let mut least = most;
            for (n, least) in least.iter_mut().enumerate() {
                *least = key(0, n).max(*least);
            }
            for token in 0..tokens.count {
                for (n, most) in most.iter_mut().enumerate() {
                    *most = key(token, n).max(*most);
                }
            }
            set_part(running_max, 0, 0, column, most);
            for (most, least) in most.into_iter().zip(least) {
                // A channel that has seen no key yet has no sum to keep.
                let seen = least.sub(V::splat(floor()));
                let depth = seen.if_positive(most.sub(least), V::splat(T::ZERO).sub(V::splat(floor())));
                deepest = deepest.max(depth.largest());
            }
        })
    };
    deepest <= T::from_f64(DEEPEST)
});

/// `numerator/denominator` times `σ(q)`, with one division; `q` is none without a gate.
#[inline(always)]
unsafe fn gate<V: Vector>(numerator: V, denominator: V, q: Option<V>) -> V {
    // SAFETY: forwarded to the caller.
    unsafe {
        let Some(q) = q else { return numerator.div(denominator) };
        let one = V::splat(V::Element::ONE);
        let small = V::splat(V::Element::ZERO).sub(q.abs()).exp_nonpositive();
        numerator.mul(q.if_positive(one, small)).div(denominator.mul(one.add(small)))
    }
}

// Writes the output after each token, for tokens whose [running max](FindRunningMax) keeps every sum, and takes them into the mean.
operation!(RunningMeans, |tokens: Tokens<'a, T>,
                          queries: Option<Rows<'a, T>>,
                          running_max: &'a [T],
                          mean: &'a mut [T],
                          to: Columns<'a, T>| {
    let (count, head_dim, width) = (tokens.count, tokens.head_dim, running_max.len());
    assert!(fits::<V>(mean, head_dim) && tokens.key_dim == head_dim && width * PARTS == mean.len());
    assert!(tokens.are_there() && queries.is_none_or(|queries| covers(&queries, count, head_dim)));
    assert!(to.rows() >= count && to.width() >= head_dim);
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        by_registers!(head_dim, 4, N, WHOLE, |column, left| {
            let zero = V::splat(T::ZERO);
            let max = part::<V, N>(running_max, 0, 0, column);
            let x = part::<V, N>(mean, width, 0, column);
            let mut n_before = part::<V, N>(mean, width, 2, column);
            let mut d_before = part::<V, N>(mean, width, 3, column);
            for n in 0..N {
                let scale = x[n].sub(max[n]).exp_nonpositive();
                (n_before[n], d_before[n]) = (n_before[n].mul(scale), d_before[n].mul(scale));
            }
            // What is added up here is added to what was before only when it is read: errors grow with the number of blocks.
            let (mut numerator, mut denominator) = ([zero; N], [zero; N]);
            for token in 0..count {
                for n in 0..N {
                    let at = column + n * V::LANES;
                    let load = |rows: &Rows<'_, T>| rows.register::<V, WHOLE>(token, at, left);
                    let weight = load(&tokens.keys).sub(max[n]).exp_nonpositive();
                    numerator[n] = weight.mul_add(load(&tokens.values), numerator[n]);
                    denominator[n] = denominator[n].add(weight);
                    let q = queries.as_ref().map(load);
                    let value = gate(numerator[n].add(n_before[n]), denominator[n].add(d_before[n]), q);
                    put::<V, WHOLE>(value, to.at(token, at), left);
                }
            }
            for n in 0..N {
                numerator[n] = numerator[n].add(n_before[n]);
                denominator[n] = denominator[n].add(d_before[n]);
            }
            set_part(mean, width, 0, column, max);
            set_part(mean, width, 2, column, numerator);
            set_part(mean, width, 3, column, denominator);
        })
    };
});

// The gradients of tokens that rows see from their own on, and of these rows' queries; for tokens whose
// [running max](FindRunningMax) keeps every sum. `before` is the mean before the first token, of which numerators are not read;
// `after` what is collected from later rows, to which these are joined. `work` has room for three registers a token, four times.
operation!(RunningGradients, |tokens: Tokens<'a, T>,
                              rows: OutputRows<'a, T>,
                              running_max: &'a [T],
                              before: &'a [T],
                              after: &'a mut [T],
                              work: &'a mut [T],
                              dq: Columns<'a, T>,
                              to: TokenGradients<'a, T>| {
    let mut to = to;
    let (count, head_dim, width) = (tokens.count, tokens.head_dim, running_max.len());
    assert!(fits::<V>(before, head_dim) && tokens.key_dim == head_dim && width * PARTS == before.len());
    assert!(after.len() == before.len() && rows.count == count && work.len() >= 12 * V::LANES * count);
    assert!(tokens.are_there() && rows.are_there(head_dim) && to.have_room(count, head_dim));
    assert!(dq.rows() >= count && dq.width() >= head_dim);
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        let (zero, one) = (V::splat(T::ZERO), V::splat(T::ONE));
        let work = work.as_mut_ptr();
        by_registers!(head_dim, 4, N, WHOLE, |column, left| {
            let kept = |token: usize, n: usize| work.add((token * N + n) * 3 * V::LANES);
            let max = part::<V, N>(running_max, 0, 0, column);
            let x = part::<V, N>(before, width, 0, column);
            let mut d_before = part::<V, N>(before, width, 3, column);
            for n in 0..N {
                d_before[n] = d_before[n].mul(x[n].sub(max[n]).exp_nonpositive());
            }
            let mut sum = [zero; N];
            for token in 0..count {
                for n in 0..N {
                    let at = column + n * V::LANES;
                    let load = |rows: &Rows<'_, T>| rows.register::<V, WHOLE>(token, at, left);
                    let weight = load(&tokens.keys).sub(max[n]).exp_nonpositive();
                    sum[n] = sum[n].add(weight);
                    let denominator = sum[n].add(d_before[n]);
                    let mut g = load(&rows.d_out);
                    let mut product = g.mul(load(&rows.out));
                    let mut d_query = zero;
                    if let Some(q) = &rows.q {
                        // σ(q) and 1 − σ(q) are `large` and `rest` over `whole`; one division serves them and the mean.
                        let q = load(q);
                        let small = zero.sub(q.abs()).exp_nonpositive();
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
            let mut n_after = part::<V, N>(after, width, 2, column);
            let mut d_after = part::<V, N>(after, width, 3, column);
            for n in 0..N {
                let scale = x[n].add(max[n]).exp_nonpositive();
                (n_after[n], d_after[n]) = (n_after[n].mul(scale), zero.sub(d_after[n].mul(scale)));
            }
            let (mut numerator, mut denominator) = ([zero; N], [zero; N]);
            for token in (0..count).rev() {
                for n in 0..N {
                    let at = column + n * V::LANES;
                    let kept = kept(token, n);
                    let weight = V::load(kept);
                    numerator[n] = numerator[n].add(V::load(kept.add(V::LANES)));
                    denominator[n] = denominator[n].sub(V::load(kept.add(2 * V::LANES)));
                    let value = tokens.values.register::<V, WHOLE>(token, at, left);
                    let dv = weight.mul(numerator[n].add(n_after[n]));
                    let dk = value.mul_add(dv, weight.mul(denominator[n].add(d_after[n])));
                    to.put::<V, WHOLE>((token, at, left), dk, dv);
                }
            }
            for n in 0..N {
                let to = after.as_mut_ptr().add(column + n * V::LANES);
                zero.sub(max[n]).store(to);
                zero.store(to.add(width));
                numerator[n].add(n_after[n]).store(to.add(2 * width));
                zero.sub(denominator[n].add(d_after[n])).store(to.add(3 * width));
            }
        })
    };
});
