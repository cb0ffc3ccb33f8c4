//! Where sums end: outputs from means, and the gradients of queries, keys and values.

use super::log_sum::{PARTS, by_registers, fits, part, parts};
use super::tokens::Tokens;
use crate::simd::block::floor;
use crate::simd::rows::{Columns, Rows, covers, get, load_part, put, store_part};
use crate::simd::{Real, Vector, operation};

/// `σ(x)` and `1 − σ(x)`, both to full relative precision.
#[inline(always)]
unsafe fn sigmoid<V: Vector>(x: V) -> (V, V) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let one = V::splat(V::Element::ONE);
        let small = zero.sub(x.abs()).exp_nonpositive();
        let large = one.div(one.add(small));
        let small = small.mul(large);
        (x.if_positive(large, small), x.if_positive(small, large))
    }
}

// Writes outputs that have all the same mean, `σ(q) ⊙ num / den`; 0 in channels that have seen nothing. No queries are no gate.
operation!(GatedMean, |mean: &'a [T], queries: Option<Rows<'a, T>>, to: Columns<'a, T>| {
    assert!(fits::<V>(mean, to.width()) && queries.is_none_or(|queries| covers(&queries, to.rows(), to.width())));
    let width = mean.len() / PARTS;
    // SAFETY: all rows are as large as the assertion says.
    unsafe {
        by_registers!(to.width(), 4, N, WHOLE, |column, left| {
            let mut value = part::<V, N>(mean, width, 2, column);
            let denominator = part::<V, N>(mean, width, 3, column);
            for (value, denominator) in value.iter_mut().zip(denominator) {
                // Not a plain 0: a denominator that is NaN shows.
                *value = denominator.if_positive(value.div(denominator), denominator);
            }
            for row in 0..to.rows() {
                for (n, &value) in value.iter().enumerate() {
                    let at = column + n * V::LANES;
                    let gated = match &queries {
                        Some(queries) => value.mul(sigmoid(queries.register::<V, WHOLE>(row, at, left)).0),
                        None => value,
                    };
                    put::<V, WHOLE>(gated, to.at(row, at), left);
                }
            }
        })
    };
});

/// Rows of outputs in the backward.
#[derive(Clone, Copy)]
pub(super) struct OutputRows<'a, T> {
    /// For a gate.
    pub q: Option<Rows<'a, T>>,
    pub d_out: Rows<'a, T>,
    pub out: Rows<'a, T>,
    pub count: usize,
}

impl<T: Real> OutputRows<'_, T> {
    pub fn are_there(&self, width: usize) -> bool {
        let gated = self.q.is_none_or(|q| covers(&q, self.count, width));
        gated && covers(&self.d_out, self.count, width) && covers(&self.out, self.count, width)
    }

    /// A register of a row's `g = G ⊙ σ(q)`, of `G·Y` and of `dq`, 0 without a gate.
    ///
    /// # Safety
    /// There is such a row, with so many channels from the column on.
    #[inline(always)]
    unsafe fn pull_back_gate<V: Vector<Element = T>, const WHOLE: bool>(
        &self,
        (row, column, left): (usize, usize, usize),
    ) -> [V; 3] {
        // SAFETY: forwarded to the caller.
        unsafe {
            let load = |rows: &Rows<'_, T>| rows.register::<V, WHOLE>(row, column, left);
            let g = load(&self.d_out);
            let product = g.mul(load(&self.out));
            let Some(q) = &self.q else { return [g, product, V::splat(T::ZERO)] };
            let (gate, rest) = sigmoid(load(q));
            [g.mul(gate), product, product.mul(rest)]
        }
    }
}

// From the mean that all of some rows have: `dq`, and the rows as their keys see them, `(−x, −b, Σ g/den, Σ G·Y/den)` with
// `g = G ⊙ σ(q)`.
operation!(PullBackMean, |mean: &'a [T], rows: OutputRows<'a, T>, item: &'a mut [T], dq: Columns<'a, T>| {
    let (head_dim, width) = (dq.width(), mean.len() / PARTS);
    assert!(fits::<V>(mean, head_dim) && item.len() == mean.len());
    assert!(dq.rows() >= rows.count && rows.are_there(head_dim));
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        let zero = V::splat(T::ZERO);
        by_registers!(head_dim, 4, N, WHOLE, |column, left| {
            let denominator = part::<V, N>(mean, width, 3, column);
            let (mut gates, mut products) = ([zero; N], [zero; N]);
            for row in 0..rows.count {
                for n in 0..N {
                    let at = column + n * V::LANES;
                    let [g, product, mut d_query] = rows.pull_back_gate::<V, WHOLE>((row, at, left));
                    if rows.q.is_some() {
                        d_query = denominator[n].if_positive(d_query, denominator[n]);
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
        });
        for column in (head_dim.next_multiple_of(V::LANES)..width).step_by(V::LANES) {
            for (row, x) in [V::splat(floor()), zero, zero, zero].into_iter().enumerate() {
                x.store(item.as_mut_ptr().add(row * width + column));
            }
        }
    };
});

/// Where the gradients of some tokens go.
pub(super) struct TokenGradients<'a, T> {
    pub dk: Columns<'a, T>,
    pub dv: Columns<'a, T>,
    /// Whether something stands there that they are added to.
    pub add: bool,
}

impl<T: Real> TokenGradients<'_, T> {
    pub fn have_room(&self, count: usize, width: usize) -> bool {
        [&self.dk, &self.dv].into_iter().all(|to| to.rows() >= count && to.width() >= width)
    }

    /// Writes a register of one token's, or adds it.
    ///
    /// # Safety
    /// There is such a token, with so many channels from the column on.
    #[inline(always)]
    pub unsafe fn put<V: Vector<Element = T>, const WHOLE: bool>(
        &mut self,
        (token, column, left): (usize, usize, usize),
        mut dk: V,
        mut dv: V,
    ) {
        // SAFETY: forwarded to the caller.
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

// The gradients of tokens that are seen by the same rows, whose sum is `rows`: `dv = e^{k+x+b}·num`, `dk = v·dv − e^{k+x+b}·den`.
operation!(PullBackTokens, |tokens: Tokens<'a, T>, rows: &'a [T], to: TokenGradients<'a, T>| {
    let mut to = to;
    let (head_dim, width) = (tokens.head_dim, rows.len() / PARTS);
    assert!(fits::<V>(rows, head_dim) && tokens.key_dim == head_dim && tokens.are_there());
    assert!(to.have_room(tokens.count, head_dim));
    // SAFETY: all rows are as large as the assertions say.
    unsafe {
        by_registers!(head_dim, 4, N, WHOLE, |column, left| {
            let zero = V::splat(T::ZERO);
            let [x, b, numerator, denominator] = parts::<V, N>(rows, width, column);
            for token in 0..tokens.count {
                for n in 0..N {
                    let at = column + n * V::LANES;
                    let load = |rows: &Rows<'_, T>| rows.register::<V, WHOLE>(token, at, left);
                    let weight = load(&tokens.keys).add(x[n]).add(b[n]).exp_nonpositive();
                    let dv = weight.mul(numerator[n]);
                    let dk = load(&tokens.values).mul(dv).sub(weight.mul(denominator[n]));
                    // A key that no row sees has gradient 0 whatever it is.
                    let seen = x[n].sub(V::splat(floor()));
                    let dv = seen.if_positive(dv, numerator[n].mul(zero));
                    let dk = seen.if_positive(dk, denominator[n].mul(zero));
                    to.put::<V, WHOLE>((token, at, left), dk, dv);
                }
            }
        })
    };
});

// `out = σ(q) ⊙ factor·sum` for rows of sums one after the other; no `queries` are no gate.
operation!(GatedRows, |sums: &'a [T], factors: &'a [T], queries: Option<Rows<'a, T>>, to: Columns<'a, T>| {
    let (count, head_dim) = (factors.len(), to.width());
    let width = sums.len() / count.max(1);
    assert!(width.is_multiple_of(V::LANES) && head_dim <= width && to.rows() >= count);
    assert!(queries.is_none_or(|queries| covers(&queries, count, head_dim)));
    for (row, (sum, &factor)) in sums.chunks_exact(width.max(1)).zip(factors).enumerate() {
        // SAFETY: sums, queries and outputs have such rows by the assertions above.
        unsafe {
            by_registers!(head_dim, 1, N, WHOLE, |column, left| {
                let mut value = V::load(sum.as_ptr().add(column)).mul(V::splat(factor));
                if let Some(queries) = &queries {
                    value = value.mul(sigmoid(queries.register::<V, WHOLE>(row, column, left)).0);
                }
                put::<V, WHOLE>(value, to.at(row, column), left);
            });
        }
    }
});

// Rows of the backward whose sums have one exponent: `dq`; into `items` `factor·G ⊙ σ(q)`, one after the other; and into `sums`
// `factor·G·Y`. A row whose factor is 0 sees nothing, and all of this is 0.
operation!(PullBackRows, |rows: OutputRows<'a, T>,
                          factors: &'a [T],
                          dq: Columns<'a, T>,
                          items: &'a mut [T],
                          sums: &'a mut [T]| {
    let mut dq = dq;
    let (count, head_dim) = (factors.len(), dq.width());
    let width = items.len() / count.max(1);
    assert!(width.is_multiple_of(V::LANES) && head_dim <= width && sums.len() >= count);
    assert!(rows.count == count && dq.rows() >= count && rows.are_there(head_dim));
    for (row, (item, &factor)) in items.chunks_exact_mut(width.max(1)).zip(factors).enumerate() {
        if factor == T::ZERO {
            dq.row(row).fill(T::ZERO);
            item.fill(T::ZERO);
            sums[row] = T::ZERO;
            continue;
        }
        item[head_dim..].fill(T::ZERO);
        // SAFETY: items, rows and gradients have such rows by the assertions above.
        unsafe {
            let factor = V::splat(factor);
            let mut sum = V::splat(T::ZERO);
            by_registers!(head_dim, 1, N, WHOLE, |column, left| {
                let [g, product, d_query] = rows.pull_back_gate::<V, WHOLE>((row, column, left));
                put::<V, WHOLE>(d_query, dq.at(row, column), left);
                g.mul(factor).store(item.as_mut_ptr().add(column));
                sum = sum.add(product);
            });
            sums[row] = sum.mul(factor).sum();
        }
    }
});

// Gradients of tokens with one key a head, from the sums of the rows that see each: `dv = factor·sum`, `dk = factor·(sum·v − d)`.
operation!(PullBackSums, |sums: &'a [T],
                          width: usize,
                          factors: &'a [T],
                          d: &'a [T],
                          values: Rows<'a, T>,
                          to: TokenGradients<'a, T>| {
    let mut to = to;
    let (count, head_dim) = (factors.len(), to.dv.width());
    assert!(width.is_multiple_of(V::LANES) && head_dim <= width && sums.len() >= count * width && d.len() >= count);
    assert!(to.dv.rows() >= count && to.dk.rows() >= count && to.dk.width() > 0);
    for (n, &factor) in factors.iter().enumerate() {
        let (value, add) = (values.row(n, head_dim), to.add);
        let dv = to.dv.row(n);
        // SAFETY: the sums have a register at every column by the assertions above.
        let dot = unsafe {
            let mut dot = V::splat(T::ZERO);
            for column in (0..head_dim).step_by(V::LANES) {
                let own = V::load(sums.as_ptr().add(n * width + column));
                dot = own.mul_add(load_part::<V>(value, column), dot);
                let mut own = own.mul(V::splat(factor));
                if add {
                    own = own.add(load_part::<V>(dv, column));
                }
                store_part(own, dv, column);
            }
            dot.sum()
        };
        let dk = &mut to.dk.row(n)[0];
        let own = factor * (dot - d[n]);
        *dk = if add { *dk + own } else { own };
    }
});
