//! What a chunk's rows weigh its keys, and the way back: by a tile of decays, or channel by channel.

use super::chunk::Chunk;
use super::loops::{
    DecayRows, DecayTile, DiagonalKeys, DiagonalRows, DiagonalTiles, PairsAcross, Weigh, WeighColumns, WeighTile,
};
use super::problem::{BLOCK, CHUNK, Problem};
use crate::simd::block::{add_products, add_scaled, all_finite, dot, multiply, transpose};
use crate::simd::product::{Band, Product};
use crate::simd::rows::{Rows, padded, pieces};
use crate::simd::{Real, dispatch};

const TILE: usize = CHUNK * CHUNK;

/// Forms the tiles of all operands, and the keys decayed to the end of the chunk.
pub(super) fn weigh<T: Real>(problem: &Problem<'_, T>, chunk: &mut Chunk<'_, T>) {
    if problem.by_channel() { by_channel(problem, chunk) } else { by_head(problem, chunk) }
}

/// The gradients of what a chunk's tokens bring.
pub(super) struct Gradients<'a, T> {
    /// Of the tiles; used up.
    pub tiles: &'a mut [T],
    /// Of the operands, to which are added those that come by tiles.
    pub operands: &'a mut [T],
    /// Of the decayed keys, then of the keys.
    pub keys: &'a mut [T],
    /// Of the log decays, to which are added those that come by tiles and keys; none where there is no gate.
    pub logs: Option<&'a mut [T]>,
}

/// Takes the gradients of tiles and of decayed keys back.
pub(super) fn pull_back<T: Real>(problem: &Problem<'_, T>, chunk: &mut Chunk<'_, T>, gradients: Gradients<'_, T>) {
    if problem.by_channel() {
        back_by_channel(problem, chunk, gradients);
    } else {
        back_by_head(problem, chunk, gradients);
    }
}

fn by_head<T: Real>(problem: &Problem<'_, T>, chunk: &mut Chunk<'_, T>) {
    let (row, rows, width) = (problem.row, chunk.rows, problem.dims.head_dim);
    let group = problem.dims.group();
    transpose((&chunk.x[group * CHUNK * row..], row), (rows, width), (chunk.keys_t, CHUNK));
    dispatch(DecayTile { logs: &chunk.logs[..rows], sums: &mut [T::ZERO; CHUNK], tile: chunk.decay_tile });
    for n in 0..problem.operands() {
        let operand = (&chunk.x[n * CHUNK * row..], row);
        let tile = &mut chunk.tiles[n * TILE..][..TILE];
        let product = Product::of(operand, (chunk.keys_t, CHUNK), (&mut *tile, CHUNK), [rows, rows, width]);
        product.c_band(Band::up_to(0)).compute();
        dispatch(WeighTile { tile, decays: chunk.decay_tile, row: CHUNK, rows, below: n == group });
    }
    // Columns beyond the last key are read by nobody.
    let factors = &chunk.to_end[..padded::<T>(rows)];
    dispatch(WeighColumns { block: chunk.keys_t, row: CHUNK, rows: width, factors });
}

fn back_by_head<T: Real>(problem: &Problem<'_, T>, chunk: &mut Chunk<'_, T>, gradients: Gradients<'_, T>) {
    let (row, rows, width) = (problem.row, chunk.rows, problem.dims.head_dim);
    let group = problem.dims.group();
    let Gradients { tiles: d_tiles, operands: d_operands, keys: d_keys, logs } = gradients;
    let keys = (&chunk.x[group * CHUNK * row..], row);
    chunk.hat[..rows * row].copy_from_slice(&d_keys[..rows * row]);
    let factors = &*chunk.to_end;
    dispatch(Weigh { from: chunk.hat, row, rows, factors, by_channel: false, to: d_keys });
    if let Some(logs) = logs {
        // A token's decay is in that of each earlier key to the end of the chunk.
        let mut earlier = T::ZERO;
        for (n, log) in logs[..rows].iter_mut().enumerate() {
            *log += earlier;
            earlier += dot(&keys.0[n * row..][..width], &d_keys[n * row..][..width]);
        }
        for n in 0..problem.operands() {
            let (d_tile, tile) = (&d_tiles[n * TILE..][..TILE], &chunk.tiles[n * TILE..][..TILE]);
            dispatch(PairsAcross { d_tile, tile, row: CHUNK, below: &mut [T::ZERO; CHUNK], sums: &mut logs[..rows] });
        }
    }
    for n in 0..problem.operands() {
        let d_tile = &mut d_tiles[n * TILE..][..TILE];
        dispatch(WeighTile { tile: d_tile, decays: chunk.decay_tile, row: CHUNK, rows, below: n == group });
        let to = (&mut d_operands[n * CHUNK * row..], row);
        let product = Product::of((d_tile, CHUNK), keys, to, [rows, width, rows]);
        product.accumulate(true).a_band(Band::up_to(0)).compute();
        let operand = (&chunk.x[n * CHUNK * row..], row);
        add_transposed(d_tile, operand, (d_keys, row), [rows, width]);
    }
}

/// `to += Aᵀ X` for a tile that is 0 above its diagonal. Rows of `X` that are no numbers reach those before them alone.
pub(super) fn add_transposed<T: Real>(
    tile: &[T],
    (x, row): (&[T], usize),
    (to, to_row): (&mut [T], usize),
    [rows, width]: [usize; 2],
) {
    if all_finite(Rows { data: x, stride: row }, rows, width) {
        let product = Product::of_transposed((tile, CHUNK), (x, row), (to, to_row), [rows, width, rows]);
        return product.accumulate(true).a_band(Band::starting_at(0)).compute();
    }
    for i in 0..rows {
        for (to, &weight) in to.chunks_exact_mut(to_row.max(1)).zip(&tile[i * CHUNK..=i * CHUNK + i]) {
            add_scaled(&mut to[..width], weight, &x[i * row..]);
        }
    }
}

/// Block after block: the keys before a block stand decayed to its start, its rows decay from there, and no factor is above 1.
fn by_channel<T: Real>(problem: &Problem<'_, T>, chunk: &mut Chunk<'_, T>) {
    let (row, rows, width) = (problem.row, chunk.rows, problem.dims.head_dim);
    let group = problem.dims.group();
    let Chunk { x, within, steps, tiles, keys_t, block, .. } = chunk;
    for (first, count) in pieces(0..rows, BLOCK) {
        let from = first * row;
        let own = |n: usize| &x[n * CHUNK * row + from..][..count * row];
        for n in 0..problem.operands() {
            let tile = &mut tiles[n * TILE..][..TILE];
            if first > 0 {
                let factors = &within[from..];
                dispatch(Weigh { from: own(n), row, rows: count, factors, by_channel: true, to: block });
                let to = (&mut tile[first * CHUNK..], CHUNK);
                Product::of((block, row), (keys_t, CHUNK), to, [count, first, width]).compute();
            }
            let beyond = first + BLOCK;
            tile[first * CHUNK..].chunks_exact_mut(CHUNK).take(count).for_each(|line| line[beyond..].fill(T::ZERO));
        }
        let total = &within[from + (count - 1) * row..][..width];
        dispatch(DecayRows { block: keys_t, row: CHUNK, width: first, factors: total });
        for n in (0..problem.operands()).step_by(2) {
            let (one, two) = tiles[n * TILE..][..2 * TILE].split_at_mut(TILE);
            let at = first * CHUNK + first;
            // Where operands are odd the last is weighed twice, the second time into a tile of nobody's.
            let second = if n + 1 < problem.operands() { n + 1 } else { n };
            dispatch(DiagonalTiles {
                x: [own(n), own(second)],
                decays: &steps[from..],
                keys: own(group),
                row,
                width,
                rows: count,
                tiles: [&mut one[at..], &mut two[at..]],
                tile_row: CHUNK,
                keys_t: &mut keys_t[first..],
            });
        }
        if problem.attention.is_delta() {
            let tile = &mut tiles[group * TILE..][..TILE];
            (first..first + count).for_each(|i| tile[i * CHUNK + i] = T::ZERO);
        }
    }
}

/// The walk of `by_channel` once more for the rows, then from the last block to the first for the keys, each decay taken back where
/// it was made.
fn back_by_channel<T: Real>(problem: &Problem<'_, T>, chunk: &mut Chunk<'_, T>, gradients: Gradients<'_, T>) {
    let (row, rows, width) = (problem.row, chunk.rows, problem.dims.head_dim);
    let group = problem.dims.group();
    let Gradients { tiles: d_tiles, operands: d_operands, keys: d_keys, logs } = gradients;
    let Some(d_logs) = logs else { return };
    let Chunk { x, within, steps, block, block_keys, keys_before, .. } = chunk;
    let own_keys = &x[group * CHUNK * row..][..CHUNK * row];
    // Where the keys before a block stand in `keys_before`.
    let before =
        |first: usize| first * (first - BLOCK) / (2 * BLOCK) * row..first * (first + BLOCK) / (2 * BLOCK) * row;
    for (first, count) in pieces(0..rows, BLOCK) {
        let from = first * row;
        for n in 0..problem.operands() {
            let d_tile = &d_tiles[n * TILE + first * CHUNK..];
            let to = &mut d_operands[n * CHUNK * row + from..][..count * row];
            if first > 0 {
                let keys = &keys_before[before(first)];
                Product::of((d_tile, CHUNK), (keys, row), (&mut *block, row), [count, width, first]).compute();
                multiply(&mut block[..count * row], &within[from..]);
                add_scaled(to, T::ONE, &block[..count * row]);
                // A row's decay from the block's first token on.
                multiply(&mut block[..count * row], &x[n * CHUNK * row + from..]);
                for i in (0..count).rev() {
                    let (own, later) = block.split_at_mut((i + 1) * row);
                    if i + 1 < count {
                        add_scaled(&mut own[i * row..], T::ONE, &later[..row]);
                    }
                    add_scaled(&mut d_logs[from + i * row..][..row], T::ONE, &own[i * row..]);
                }
            }
            block_keys[..count * row].copy_from_slice(&own_keys[from..][..count * row]);
            let (d_tile, decays) = (&d_tile[first..], &steps[from..]);
            dispatch(DiagonalRows { d_tile, decays, keys: block_keys, row, rows: count, tile_row: CHUNK, to });
        }
        let next = first + count;
        if next < rows {
            let (done, to) = keys_before.split_at_mut(before(next).start);
            if first > 0 {
                to[..from].copy_from_slice(&done[before(first)]);
            }
            let total = &within[(next - 1) * row..][..row];
            to[..from].chunks_exact_mut(row.max(1)).for_each(|key| multiply(key, total));
            to[from..][..count * row].copy_from_slice(&block_keys[..count * row]);
        }
    }
    if problem.operands() % 2 == 1 {
        d_tiles[problem.operands() * TILE..][..TILE].fill(T::ZERO);
    }
    for (first, count) in pieces(0..rows, BLOCK).rev() {
        let from = first * row;
        let own = |n: usize| &x[n * CHUNK * row + from..][..count * row];
        if first > 0 {
            let total = &within[from + (count - 1) * row..][..row];
            d_keys[..from].chunks_exact_mut(row.max(1)).for_each(|key| multiply(key, total));
            // Every token of the block is in the decay of each earlier key over all of it.
            let sum = &mut block[..row];
            sum.fill(T::ZERO);
            let keys = keys_before[before(first)].chunks_exact(row.max(1));
            keys.zip(d_keys.chunks_exact(row.max(1))).for_each(|(key, d_key)| add_products(key, d_key, sum));
            d_logs[from..][..count * row].chunks_exact_mut(row.max(1)).for_each(|log| add_scaled(log, T::ONE, sum));
        }
        for n in (0..problem.operands()).filter(|_| first > 0) {
            dispatch(Weigh { from: own(n), row, rows: count, factors: &within[from..], by_channel: true, to: block });
            let d_tile = (&d_tiles[n * TILE + first * CHUNK..], CHUNK);
            let product = Product::of_transposed(d_tile, (block, row), (&mut *d_keys, row), [first, width, count]);
            product.accumulate(true).compute();
        }
        for n in (0..problem.operands()).step_by(2) {
            let at = first * CHUNK + first;
            let second = if n + 1 < problem.operands() { n + 1 } else { n };
            let (one, two) = (&d_tiles[n * TILE + at..], &d_tiles[(n + 1) * TILE + at..]);
            // Decays take what is there already with them, so only the first two may begin with it.
            let to = if n == 0 { &mut d_keys[from..][..count * row] } else { &mut block[..count * row] };
            if n > 0 {
                to.fill(T::ZERO);
            }
            dispatch(DiagonalKeys {
                d_tiles: [one, two],
                x: [own(n), own(second)],
                keys: &own_keys[from..],
                decays: &steps[from..],
                row,
                rows: count,
                tile_row: CHUNK,
                d_keys: to,
                d_logs: &mut d_logs[from..],
            });
            if n > 0 {
                add_scaled(&mut d_keys[from..][..count * row], T::ONE, &block[..count * row]);
            }
        }
    }
}
