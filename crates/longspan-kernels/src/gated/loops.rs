//! The loops over registers that gates ask for.

use super::problem::BLOCK;
use crate::simd::block::Exp;
use crate::simd::product::by_whole_registers;
use crate::simd::rows::padded;
use crate::simd::{Real, Vector, dispatch, operation};

// `to = from ⊙ factors` for rows of whole registers, where a row has as many factors as numbers, or one.
operation!(Weigh, |from: &'a [T], row: usize, rows: usize, factors: &'a [T], by_channel: bool, to: &'a mut [T]| {
    assert!(row.is_multiple_of(V::LANES) && from.len() >= rows * row && to.len() >= rows * row);
    assert!(factors.len() >= if by_channel { rows * row } else { rows });
    // SAFETY: rows of whole registers by the assertions.
    unsafe {
        for n in 0..rows {
            for column in (0..row).step_by(V::LANES) {
                let at = n * row + column;
                let factor = if by_channel { V::load(factors.as_ptr().add(at)) } else { V::splat(factors[n]) };
                V::load(from.as_ptr().add(at)).mul(factor).store(to.as_mut_ptr().add(at));
            }
        }
    }
});

// `block ← block ⊙ factors` for rows of whole registers with one factor a column.
operation!(WeighColumns, |block: &'a mut [T], row: usize, rows: usize, factors: &'a [T]| {
    assert!(factors.len().is_multiple_of(V::LANES) && factors.len() <= row && block.len() >= rows * row);
    // SAFETY: rows of whole registers by the assertion.
    unsafe {
        for n in 0..rows {
            for column in (0..factors.len()).step_by(V::LANES) {
                let at = block.as_mut_ptr().add(n * row + column);
                V::load(at).mul(V::load(factors.as_ptr().add(column))).store(at);
            }
        }
    }
});

// The decays of a chunk's tokens from each other, `e^{g_{j+1} + … + g_i}` for `j ≤ i`; what stands above is not written. `sums` is as
// long as a row.
operation!(DecayTile, |logs: &'a [T], sums: &'a mut [T], tile: &'a mut [T]| {
    let row = sums.len();
    assert!(row.is_multiple_of(V::LANES) && tile.len() >= logs.len() * row);
    sums.fill(T::NEG_INFINITY);
    for (i, &g) in logs.iter().enumerate() {
        // SAFETY: rows of whole registers by the assertion.
        unsafe {
            for column in (0..row).step_by(V::LANES) {
                let sum = sums.as_mut_ptr().add(column);
                V::load(sum).add(V::splat(g)).store(sum);
            }
            sums[i] = T::ZERO;
            for column in (0..=i).step_by(V::LANES) {
                V::load(sums.as_ptr().add(column)).exp_nonpositive().store(tile.as_mut_ptr().add(i * row + column));
            }
        }
    }
});

// `tile ← tile ⊙ decays` up to the diagonal, or below it, and 0 elsewhere.
operation!(WeighTile, |tile: &'a mut [T], decays: &'a [T], row: usize, rows: usize, below: bool| {
    assert!(row.is_multiple_of(V::LANES) && tile.len() >= rows * row && decays.len() >= rows * row);
    for i in 0..rows {
        let end = if below { i } else { i + 1 };
        // SAFETY: rows of whole registers by the assertion.
        unsafe {
            for column in (0..end).step_by(V::LANES) {
                let at = tile.as_mut_ptr().add(i * row + column);
                V::load(at).mul(V::load(decays.as_ptr().add(i * row + column))).store(at);
            }
        }
        tile[i * row + end..(i + 1) * row].fill(T::ZERO);
    }
});

// Within a block of tokens: `tile[n]_ij = Σ_c x[n]_ic k_jc e^{g_{j+1} + … + g_i}` for two operands, up to the diagonal; what stands above
// is 0. `keys_t` gets the keys decayed to the end of the block, a row a channel: a register holds a channel of several keys, so that no
// sum runs across one.
operation!(DiagonalTiles, |x: [&'a [T]; 2],
                           decays: &'a [T],
                           keys: &'a [T],
                           row: usize,
                           width: usize,
                           rows: usize,
                           tiles: [&'a mut [T]; 2],
                           tile_row: usize,
                           keys_t: &'a mut [T]| {
    assert!(rows > 0 && rows <= BLOCK && width <= row && decays.len() >= rows * row && keys.len() >= rows * row);
    assert!(keys_t.len() >= (width.max(1) - 1) * tile_row + BLOCK && x.iter().all(|x| x.len() >= rows * row));
    assert!(tiles.iter().all(|tile| tile.len() >= (rows - 1) * tile_row + BLOCK));
    let [first, second] = tiles;
    for i in 0..rows {
        let own = i * row..i * row + width;
        let (a, b, decay, key) = (&x[0][own.clone()], &x[1][own.clone()], &decays[own.clone()], &keys[own]);
        // Numbers without full precision slow a processor down; now and then is often enough.
        let flush = i % 4 == 3;
        for part in (0..BLOCK).step_by(V::LANES) {
            if part > i {
                // SAFETY: whole registers of a block's columns.
                unsafe {
                    V::splat(T::ZERO).store(first.as_mut_ptr().add(i * tile_row + part));
                    V::splat(T::ZERO).store(second.as_mut_ptr().add(i * tile_row + part));
                }
                continue;
            }
            let mut place = [T::ZERO; BLOCK];
            if part + V::LANES > i {
                place[i - part] = T::ONE;
            }
            // SAFETY: whole registers of a block's columns, of which each channel's row has as many.
            unsafe {
                let place = V::load(place.as_ptr());
                let mut sums = [V::splat(T::ZERO); 4];
                for c in 0..width {
                    let at = keys_t.as_mut_ptr().add(c * tile_row + part);
                    let before = if i == part { V::splat(T::ZERO) } else { V::load(at).mul(V::splat(decay[c])) };
                    let before = if flush { before.normal_or_zero() } else { before };
                    let found = place.mul_add(V::splat(key[c]), before);
                    found.store(at);
                    let odd = c % 2;
                    sums[odd] = V::splat(a[c]).mul_add(found, sums[odd]);
                    sums[2 + odd] = V::splat(b[c]).mul_add(found, sums[2 + odd]);
                }
                sums[0].add(sums[1]).store(first.as_mut_ptr().add(i * tile_row + part));
                sums[2].add(sums[3]).store(second.as_mut_ptr().add(i * tile_row + part));
            }
        }
    }
    // Columns that no key came to.
    for part in (0..BLOCK).step_by(V::LANES).filter(|&part| part >= rows) {
        for c in 0..width {
            // SAFETY: as above.
            unsafe { V::splat(T::ZERO).store(keys_t.as_mut_ptr().add(c * tile_row + part)) };
        }
    }
});

// `block ← factors ⊙ block`, a factor a row, of rows of which whole registers count; numbers without full precision become 0.
operation!(DecayRows, |block: &'a mut [T], row: usize, width: usize, factors: &'a [T]| {
    assert!(width.is_multiple_of(V::LANES) && width <= row && block.len() >= factors.len() * row);
    for (n, &factor) in factors.iter().enumerate() {
        for column in (0..width).step_by(V::LANES) {
            // SAFETY: rows of whole registers by the assertion.
            unsafe {
                let at = block.as_mut_ptr().add(n * row + column);
                V::load(at).mul(V::splat(factor)).normal_or_zero().store(at);
            }
        }
    }
});

// The gates of some tokens as factors, a channel a column: `e^{g_0 + … + g_i}`, and `e^{g_{j+1} + …}`. Sums are of one sign: nothing
// cancels.
operation!(Decays, |logs: &'a [T], row: usize, rows: usize, from_start: &'a mut [T], to_end: &'a mut [T]| {
    assert!(row.is_multiple_of(V::LANES) && logs.len() >= rows * row);
    assert!(from_start.len() >= rows * row && to_end.len() >= rows * row);
    for column in (0..row).step_by(V::LANES) {
        // SAFETY: rows of whole registers by the assertions.
        unsafe {
            let (mut before, mut after) = (V::splat(T::ZERO), V::splat(T::ZERO));
            for i in 0..rows {
                let (at, back) = (i * row + column, (rows - 1 - i) * row + column);
                before = before.add(V::load(logs.as_ptr().add(at)));
                before.exp_nonpositive().store(from_start.as_mut_ptr().add(at));
                after.exp_nonpositive().store(to_end.as_mut_ptr().add(back));
                after = after.add(V::load(logs.as_ptr().add(back)));
            }
        }
    }
});

// The gradients of the rows `x` of `DiagonalTiles` from that of a tile, added to `to`; `keys` as there.
operation!(DiagonalRows, |d_tile: &'a [T],
                          decays: &'a [T],
                          keys: &'a mut [T],
                          row: usize,
                          rows: usize,
                          tile_row: usize,
                          to: &'a mut [T]| {
    assert!(row.is_multiple_of(V::LANES) && decays.len() >= rows * row && keys.len() >= rows * row);
    assert!(to.len() >= rows * row && d_tile.len() >= (rows - 1) * tile_row + rows);
    for column in (0..row).step_by(V::LANES) {
        for i in 0..rows {
            // SAFETY: rows of whole registers by the assertions.
            unsafe {
                let decay = V::load(decays.as_ptr().add(i * row + column));
                let own = to.as_mut_ptr().add(i * row + column);
                let mut sum = V::splat(d_tile[i * tile_row + i])
                    .mul_add(V::load(keys.as_ptr().add(i * row + column)), V::load(own));
                for j in 0..i {
                    let place = keys.as_mut_ptr().add(j * row + column);
                    let key = V::load(place).mul(decay).normal_or_zero();
                    key.store(place);
                    sum = V::splat(d_tile[i * tile_row + j]).mul_add(key, sum);
                }
                sum.store(own);
            }
        }
    }
});

// The gradients of the block's keys, and of its tokens' log decays, to which they are added: `d_keys` begins as those of the keys
// decayed to the end of the block.
operation!(DiagonalKeys, |d_tiles: [&'a [T]; 2],
                          x: [&'a [T]; 2],
                          keys: &'a [T],
                          decays: &'a [T],
                          row: usize,
                          rows: usize,
                          tile_row: usize,
                          d_keys: &'a mut [T],
                          d_logs: &'a mut [T]| {
    assert!(row.is_multiple_of(V::LANES) && rows <= BLOCK && decays.len() >= rows * row && d_keys.len() >= rows * row);
    assert!(keys.len() >= rows * row && d_logs.len() >= rows * row && x.iter().all(|x| x.len() >= rows * row));
    assert!(d_tiles.iter().all(|tile| tile.len() >= (rows - 1) * tile_row + rows));
    for column in (0..row).step_by(V::LANES) {
        // SAFETY: rows of whole registers by the assertions.
        unsafe {
            // Each key as the token `i` finds it, its own decay done.
            let mut found = [[V::splat(T::ZERO); BLOCK]; BLOCK];
            for i in 0..rows {
                let decay = V::load(decays.as_ptr().add(i * row + column));
                for j in 0..i {
                    found[i][j] = found[i - 1][j].mul(decay).normal_or_zero();
                }
                found[i][i] = V::load(keys.as_ptr().add(i * row + column));
            }
            for i in (0..rows).rev() {
                let a = V::load(x[0].as_ptr().add(i * row + column));
                let b = V::load(x[1].as_ptr().add(i * row + column));
                let decay = V::load(decays.as_ptr().add(i * row + column));
                let d_log = d_logs.as_mut_ptr().add(i * row + column);
                let mut by_decay = V::load(d_log);
                for j in 0..=i {
                    let place = d_keys.as_mut_ptr().add(j * row + column);
                    let sum = V::splat(d_tiles[0][i * tile_row + j]).mul_add(a, V::load(place));
                    let sum = V::splat(d_tiles[1][i * tile_row + j]).mul_add(b, sum);
                    if j == i {
                        sum.store(place);
                    } else {
                        by_decay = found[i][j].mul_add(sum, by_decay);
                        sum.mul(decay).normal_or_zero().store(place);
                    }
                }
                by_decay.store(d_log);
            }
        }
    }
});

// `sums_t += Σ_{j<t≤i} x_ij` for a tile below its diagonal: what a token's log decay has of all pairs that it stands between. `below`
// is as long as a row.
operation!(PairsAcross, |d_tile: &'a [T], tile: &'a [T], row: usize, below: &'a mut [T], sums: &'a mut [T]| {
    let rows = sums.len();
    assert!(row.is_multiple_of(V::LANES) && below.len() == row && rows <= row);
    assert!(tile.len() >= rows * row && d_tile.len() >= rows * row);
    below.fill(T::ZERO);
    for t in (1..rows).rev() {
        // SAFETY: rows of whole registers by the assertions.
        unsafe {
            for column in (0..t).step_by(V::LANES) {
                let product =
                    V::load(d_tile.as_ptr().add(t * row + column)).mul(V::load(tile.as_ptr().add(t * row + column)));
                let at = below.as_mut_ptr().add(column);
                V::load(at).add(product).store(at);
            }
        }
        sums[t] += below[..t].iter().copied().sum();
    }
});

// `u_i += Σ_{j<i} a_ij u_j` from the first row of a block on; or `u_i += Σ_{j>i} a_ji u_j` from the last on.
operation!(SolveBlock, |a: &'a [T], a_row: usize, rows: usize, transposed: bool, u: &'a mut [T], row: usize| {
    assert!(row.is_multiple_of(V::LANES) && rows > 0 && u.len() >= rows * row && a.len() >= (rows - 1) * a_row + rows);
    let step = if row.is_multiple_of(2 * V::LANES) { 2 } else { 1 };
    for column in (0..row).step_by(step * V::LANES) {
        for n in 0..rows {
            let i = if transposed { rows - 1 - n } else { n };
            let others = if transposed { i + 1..rows } else { 0..i };
            // SAFETY: rows of whole registers by the assertions; a second one is there where the step is two.
            unsafe {
                let own = u.as_mut_ptr().add(i * row + column);
                let second = (step - 1) * V::LANES;
                let mut sums = [V::load(own), V::load(own.add(second))];
                for j in others {
                    let factor = V::splat(if transposed { a[j * a_row + i] } else { a[i * a_row + j] });
                    let other = u.as_ptr().add(j * row + column);
                    sums =
                        [factor.mul_add(V::load(other), sums[0]), factor.mul_add(V::load(other.add(second)), sums[1])];
                }
                sums[0].store(own);
                sums[1].store(own.add(second));
            }
        }
    }
});

/// A token as it meets a state.
#[derive(Clone, Copy)]
pub(super) struct Arriving<'a, T> {
    /// `f`: what a row of the state decays by, one for all or one each.
    pub factors: &'a [T],
    pub k: &'a [T],
    /// `−f ⊙ k` and `β` under the delta rule.
    pub known: Option<(&'a [T], T)>,
    pub v: &'a [T],
    /// Rows of queries, so far apart.
    pub q: &'a [T],
    pub q_row: usize,
}

impl<T: Real> Arriving<'_, T> {
    #[inline(always)]
    fn factor(&self, channel: usize) -> T {
        self.factors[if self.factors.len() == 1 { 0 } else { channel }]
    }
}

// A token's change of a state of adjacent rows, `S_c ← f_c S_c + k_c u`, and what its queries, one at least, read then. Some columns after
// the other, so that the state comes from memory once.
operation!(TakeToken, |sum: &'a mut [T], token: Arriving<'a, T>, out: &'a mut [T]| {
    let width = token.v.len();
    let queries = out.len().checked_div(width).unwrap_or(1);
    assert!(
        queries > 0
            && sum.len() >= token.k.len() * width
            && (token.factors.len() == 1 || token.factors.len() >= token.k.len())
    );
    assert!(token.known.is_none_or(|(known, _)| known.len() >= token.k.len()));
    assert!(token.q.len() >= (queries - 1) * token.q_row + token.k.len());
    let whole = width / V::LANES * V::LANES;
    // SAFETY: as many columns of rows as the assertions say.
    unsafe { by_whole_registers!(0, whole, 4, take_columns(sum, &token, out)) };
    for column in whole..width {
        let value = |row: usize, sum: &[V::Element]| sum[row * width + column];
        let mut u = token.v[column];
        if let Some((known, beta)) = token.known {
            u = beta * (known.iter().enumerate().map(|(row, &x)| x * value(row, sum)).sum::<V::Element>() + u);
        }
        for (row, &k) in token.k.iter().enumerate() {
            let decayed = value(row, sum) * token.factor(row);
            sum[row * width + column] = k * u + if decayed.vanishes() { T::ZERO } else { decayed };
        }
        for (query, out) in out.chunks_exact_mut(width).enumerate() {
            let q = &token.q[query * token.q_row..][..token.k.len()];
            out[column] = q.iter().enumerate().map(|(row, &q)| q * value(row, sum)).sum::<V::Element>();
        }
    }
});

#[inline(always)]
unsafe fn take_columns<V: Vector, const N: usize>(
    sum: &mut [V::Element],
    token: &Arriving<'_, V::Element>,
    out: &mut [V::Element],
    column: usize,
) {
    let width = token.v.len();
    // SAFETY: the caller has `N` registers from `column` in every row of the state, in `v` and in each row of `out`.
    unsafe {
        let zero = || [V::splat(V::Element::ZERO); N];
        let place = |row: usize, n: usize| row * width + column + n * V::LANES;
        let mut u = zero();
        if let Some((known, beta)) = token.known {
            for (row, &known) in known.iter().enumerate() {
                let known = V::splat(known);
                for (n, u) in u.iter_mut().enumerate() {
                    *u = known.mul_add(V::load(sum.as_ptr().add(place(row, n))), *u);
                }
            }
            for (n, u) in u.iter_mut().enumerate() {
                *u = V::splat(beta).mul(u.add(V::load(token.v.as_ptr().add(column + n * V::LANES))));
            }
        } else {
            u.iter_mut().enumerate().for_each(|(n, u)| *u = V::load(token.v.as_ptr().add(column + n * V::LANES)));
        }
        for (query, out) in out.chunks_exact_mut(width).enumerate() {
            let q = &token.q[query * token.q_row..][..token.k.len()];
            let mut total = zero();
            for (row, (&k, &q)) in token.k.iter().zip(q).enumerate() {
                let (f, k, q) = (V::splat(token.factor(row)), V::splat(k), V::splat(q));
                for (n, total) in total.iter_mut().enumerate() {
                    let at = sum.as_mut_ptr().add(place(row, n));
                    // The first query finds the state as it was.
                    let own = if query == 0 {
                        let own = k.mul_add(u[n], V::load(at).mul(f).normal_or_zero());
                        own.store(at);
                        own
                    } else {
                        V::load(at)
                    };
                    *total = q.mul_add(own, *total);
                }
            }
            total.iter().enumerate().for_each(|(n, total)| total.store(out.as_mut_ptr().add(column + n * V::LANES)));
        }
    }
}

/// The gates of a chunk as factors: `e^{g_0 + … + g_i}` from before its first token to a row, and `e^{g_{j+1} + …}` from a key to
/// after its last.
pub(super) fn decays<T: Real>(logs: &[T], row: usize, rows: usize, from_start: &mut [T], to_end: &mut [T]) {
    if row != 1 {
        return dispatch(Decays { logs, row, rows, from_start, to_end });
    }
    let len = padded::<T>(rows);
    from_start[..len].fill(T::ZERO);
    to_end[..len].fill(T::ZERO);
    for at in 0..rows {
        from_start[at] = logs[at] + if at == 0 { T::ZERO } else { from_start[at - 1] };
    }
    for at in (1..rows).rev() {
        to_end[at - 1] = to_end[at] + logs[at];
    }
    dispatch(Exp { to: &mut from_start[..len] });
    dispatch(Exp { to: &mut to_end[..len] });
}
