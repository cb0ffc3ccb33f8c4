//! A chunk of a unit in working memory, and its way forwards.

use super::loops::{Weigh, decays};
use super::pairs;
use super::problem::{BLOCK, CHUNK, Problem, Unit};
use super::solve::solve;
use crate::call::Arena;
use crate::simd::block::{Exp, decay_by, dot, scale_rows};
use crate::simd::product::{Band, Product};
use crate::simd::rows::{Rows, padded, pieces};
use crate::simd::{Real, dispatch};

/// What a chunk's tokens bring, and how they weigh each other. The *operands* are the rows that are compared with the keys: the
/// queries of each head of the group and, under the delta rule, the keys themselves.
pub(super) struct Chunk<'s, T> {
    pub rows: usize,
    /// Queries of each head, then keys, `CHUNK × row` each.
    pub x: &'s mut [T],
    /// `1/|x|` of each of these rows, or 1.
    pub inverse_lengths: &'s mut [T],
    pub v: &'s mut [T],
    pub logs: &'s mut [T],
    pub beta: &'s mut [T],
    /// Decays from before the first token to each, and from each to after the last.
    pub from_start: &'s mut [T],
    pub to_end: &'s mut [T],
    /// With a decay a channel: the same within each block, and of each token alone.
    pub within: &'s mut [T],
    pub steps: &'s mut [T],
    /// With a decay a head: the decays of all pairs.
    pub decay_tile: &'s mut [T],
    /// For each operand what its rows weigh the keys, up to the diagonal; below it for keys.
    pub tiles: &'s mut [T],
    /// Keys decayed to the end of the chunk, transposed: `row × CHUNK`.
    pub keys_t: &'s mut [T],
    /// Working memory: rows of a chunk, and of two blocks.
    pub hat: &'s mut [T],
    pub block: &'s mut [T],
    pub block_keys: &'s mut [T],
    /// For the gradient, with a decay a channel: the keys before each block, decayed to its start.
    pub keys_before: &'s mut [T],
}

impl<'s, T: Real> Chunk<'s, T> {
    pub fn new(problem: &Problem<'_, T>, gradient: bool, arena: &mut Arena<'s, T>) -> Self {
        let (row, gates) = (problem.row, padded::<T>(CHUNK * problem.gate_row()));
        let own_decays = if problem.by_channel() { CHUNK * row } else { 0 };
        // Tiles by twos.
        let tiles = problem.operands().next_multiple_of(2);
        Self {
            rows: 0,
            x: arena.take((problem.dims.group() + 1) * CHUNK * row),
            inverse_lengths: arena.take((problem.dims.group() + 1) * CHUNK),
            v: arena.take(CHUNK * problem.wide),
            logs: arena.take(gates),
            beta: arena.take(CHUNK),
            from_start: arena.take(gates),
            to_end: arena.take(gates),
            within: arena.take(own_decays),
            steps: arena.take(own_decays),
            decay_tile: arena.take(if problem.by_channel() { 0 } else { CHUNK * CHUNK }),
            tiles: arena.take(tiles * CHUNK * CHUNK),
            keys_t: arena.take(row * CHUNK),
            hat: arena.take(CHUNK * row.max(1)),
            block: arena.take(BLOCK * row),
            block_keys: arena.take(BLOCK * row),
            keys_before: arena.take(if gradient { own_decays * (CHUNK / BLOCK - 1) / 2 } else { 0 }),
        }
    }

    /// Reads the tokens `first..first + rows` of a unit.
    pub fn load(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_>, first: usize, rows: usize) {
        let (dims, row) = (&problem.dims, problem.row);
        self.rows = rows;
        let normalize = problem.attention.l2_norm;
        let heads = dims.heads_of(unit.kv_head).map(|head| (problem.queries(unit, head), false));
        let blocks = self.x.chunks_exact_mut((CHUNK * row).max(1)).zip(self.inverse_lengths.chunks_exact_mut(CHUNK));
        for ((from, ignores), (block, lengths)) in heads.chain([(problem.keys(unit), true)]).zip(blocks) {
            load_rows(from.skip(first), dims.head_dim, (block, row), rows, |n| ignores && unit.ignores(first + n));
            if normalize {
                let rows = block.chunks_exact(row.max(1));
                let inverse = |x: &[T]| T::from_f64(1.0 / (dot(x, x).to_f64() + 1e-6).sqrt());
                lengths.iter_mut().zip(rows.take(self.rows)).for_each(|(to, x)| *to = inverse(x));
                scale_rows((block, row), row, &lengths[..self.rows]);
            }
        }
        load_rows(problem.values(unit).skip(first), dims.value_dim, (self.v, problem.wide), rows, |n| {
            unit.ignores(first + n)
        });
        if let Some(beta) = problem.betas(unit) {
            for (n, (to, &beta)) in self.beta.iter_mut().zip(&beta[first..][..rows]).enumerate() {
                *to = if unit.ignores(first + n) { T::ZERO } else { beta };
            }
        }
        let gates = problem.gate_row();
        let from = problem.log_decays(unit);
        load_rows(from.skip(first), from.stride, (self.logs, gates), rows, |n| unit.ignores(first + n));
        decays(self.logs, gates, rows, self.from_start, self.to_end);
        if problem.by_channel() {
            for (start, count) in pieces(0..rows, BLOCK) {
                let (from, to) = (start * row, (start + count) * row);
                decays(&self.logs[from..to], row, count, &mut self.within[from..to], &mut self.steps[from..to]);
            }
            self.steps[..rows * row].copy_from_slice(&self.logs[..rows * row]);
            dispatch(Exp { to: &mut self.steps[..rows * row] });
        }
    }

    /// The decay from before the chunk to after it: one number, or one a channel.
    pub fn total(&self, gate_row: usize) -> &[T] {
        &self.from_start[(self.rows - 1) * gate_row..][..gate_row]
    }

    pub fn tile(&self, n: usize) -> &[T] {
        &self.tiles[n * CHUNK * CHUNK..][..CHUNK * CHUNK]
    }

    /// Operand `n`, each row decayed from before the chunk, in `hat`.
    pub fn decay_operand(&mut self, problem: &Problem<'_, T>, n: usize) {
        let (row, by_channel) = (problem.row, problem.by_channel());
        let from = &self.x[n * CHUNK * row..][..CHUNK * row];
        dispatch(Weigh { from, row, rows: self.rows, factors: self.from_start, by_channel, to: self.hat });
    }

    /// What the tokens add to the state beside their keys: their values, or what is left of them. With `rest` that gets
    /// `V − K̂ S`, of which `u` is `β` times, solved.
    pub fn updates(&mut self, problem: &Problem<'_, T>, state: &[T], u: &mut [T], rest: Option<&mut [T]>) {
        let (rows, wide, dims) = (self.rows, problem.wide, &problem.dims);
        u[..rows * wide].copy_from_slice(&self.v[..rows * wide]);
        if !problem.attention.is_delta() {
            return;
        }
        let keys = dims.group();
        self.decay_operand(problem, keys);
        // The product is added, so its rows are those of −K̂.
        scale_rows((self.hat, problem.row), problem.row, &[-T::ONE; CHUNK][..rows]);
        let sizes = [rows, dims.value_dim, dims.head_dim];
        Product::of((self.hat, problem.row), (state, wide), (&mut *u, wide), sizes).accumulate(true).compute();
        if let Some(rest) = rest {
            rest[..rows * wide].copy_from_slice(&u[..rows * wide]);
        }
        scale_rows((&mut *u, wide), wide, &self.beta[..rows]);
        let mut negative = [T::ZERO; CHUNK];
        negative.iter_mut().zip(&self.beta[..rows]).for_each(|(to, &beta)| *to = -beta);
        let tile = &mut self.tiles[keys * CHUNK * CHUNK..][..CHUNK * CHUNK];
        scale_rows((&mut *tile, CHUNK), CHUNK, &negative[..rows]);
        solve(tile, rows, u, [wide, dims.value_dim]);
    }

    /// `O = Q̂ S + P U` of query head `n` of the group.
    pub fn outputs(&mut self, problem: &Problem<'_, T>, n: usize, state: &[T], u: &[T], out: &mut [T]) {
        let (rows, wide, dims) = (self.rows, problem.wide, &problem.dims);
        self.decay_operand(problem, n);
        let sizes = [rows, dims.value_dim, dims.head_dim];
        Product::of((self.hat, problem.row), (state, wide), (&mut *out, wide), sizes).compute();
        let product = Product::of((self.tile(n), CHUNK), (u, wide), (out, wide), [rows, dims.value_dim, rows]);
        product.accumulate(true).a_band(Band::up_to(0)).compute();
    }

    /// `S ← D S + K̃ᵀ U`.
    pub fn advance(&mut self, problem: &Problem<'_, T>, state: &mut [T], u: &[T]) {
        let (wide, dims) = (problem.wide, &problem.dims);
        decay_state(self.total(problem.gate_row()), &mut state[..dims.head_dim * wide], wide);
        let sizes = [dims.head_dim, dims.value_dim, self.rows];
        Product::of((self.keys_t, CHUNK), (u, wide), (state, wide), sizes).accumulate(true).compute();
    }

    /// Forms the tiles and `keys_t`.
    pub fn weigh(&mut self, problem: &Problem<'_, T>) {
        pairs::weigh(problem, self);
    }
}

/// Rows of `S` by one factor each, or all by one.
pub(super) fn decay_state<T: Real>(factors: &[T], state: &mut [T], wide: usize) {
    match factors {
        [one] => decay_by(state, *one),
        _ => state.chunks_exact_mut(wide.max(1)).zip(factors).for_each(|(row, &factor)| decay_by(row, factor)),
    }
}

/// Copies rows into a block, those that are ignored as zeros.
pub(super) fn load_rows<T: Real>(
    from: Rows<'_, T>,
    width: usize,
    (block, row): (&mut [T], usize),
    rows: usize,
    ignores: impl Fn(usize) -> bool,
) {
    for (n, to) in block.chunks_exact_mut(row.max(1)).take(rows).enumerate() {
        let (own, rest) = to.split_at_mut(width.min(row));
        rest.fill(T::ZERO);
        if ignores(n) {
            own.fill(T::ZERO);
        } else {
            own.copy_from_slice(from.row(n, own.len()));
        }
    }
}
