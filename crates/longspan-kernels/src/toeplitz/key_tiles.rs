//! The gradients that tiles give to a chunk of keys, to the biases, and to the rows that meet the keys.
//!
//! With `p_ij = e^{b_δ} φ(q_i)·φ(k_j)` and `E_ij = dN⁺_i·v⁺_j`: `dv_j = Σ_i p_ij dN_i`, `dk̄_j = Σ_i e^{b_δ} E_ij q̄_i`,
//! `db_δ = Σ_{j−i=δ} p_ij E_ij`.

use std::ops::Range;

use super::backward::Pass;
use super::chunks::RowBlock;
use super::exponents::Piece;
use super::left::Left;
use super::problem::{CHUNK, Problem, TILE, Unit};
use super::tile::{KeyBlock, Weights, each_run};
use crate::call::Arena;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::block::{add_scaled, all_finite, multiply};
use crate::simd::product::zero_outside;
use crate::simd::rows::Rows;
use crate::threads;

/// Key blocks that are kept while rows pass by.
pub(super) const KEPT: usize = CHUNK / TILE;

/// A block of keys and values, and their gradients.
pub(super) struct KeyGradients<'s, T> {
    pub keys: KeyBlock<'s, T>,
    pub dk: &'s mut [T],
    pub dv: &'s mut [T],
}

impl<'s, T: Real> KeyGradients<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        Self {
            keys: KeyBlock::new(problem, true, arena),
            dk: arena.take(TILE * problem.head_width),
            dv: arena.take(TILE * problem.value_width),
        }
    }
}

pub(super) fn key_gradients<'s, T: Real>(
    problem: &Problem<'_, T>,
    arena: &mut Arena<'s, T>,
) -> [KeyGradients<'s, T>; KEPT] {
    std::array::from_fn(|_| KeyGradients::new(problem, arena))
}

pub(super) struct TileBuffers<'s, T> {
    pub rows: RowBlock<'s, T>,
    tile: &'s mut [T],
    products: &'s mut [T],
    weights: Weights<'s, T>,
    pub map: MapBuffers<'s, T>,
    /// Gradients of a chunk of rows, where they are taken in the same pass.
    pub dq: &'s mut [T],
}

impl<'s, T: Real> TileBuffers<'s, T> {
    /// With `queries`, for their gradients too.
    pub fn new(problem: &Problem<'_, T>, queries: bool, arena: &mut Arena<'s, T>) -> Self {
        Self {
            rows: RowBlock::new(problem, TILE, arena),
            tile: arena.take(TILE * TILE),
            products: arena.take(TILE * TILE),
            weights: Weights::new(problem, arena),
            map: MapBuffers::new(&problem.mapping, TILE, arena),
            dq: arena.take(if queries { CHUNK * problem.head_width } else { 0 }),
        }
    }
}

impl<T: Real> Pass<'_, '_, T> {
    /// Adds what the tiles between the rows `near` of a unit's `n`-th head and some blocks of keys give to the gradients of
    /// these, to those of the biases in a line from its index `first` on, and, where there is memory for them, to those of
    /// the rows; only what is `left`, if that is said.
    #[allow(clippy::too_many_arguments)]
    pub fn tiles(
        &self,
        unit: &Unit<'_, T>,
        (n, head): (usize, usize),
        left: Option<&Left>,
        near: Range<usize>,
        blocks: &mut [KeyGradients<'_, T>],
        (d_line, first): (&mut [T], usize),
        buffers: &mut TileBuffers<'_, T>,
    ) {
        let (problem, shared) = (self.call.problem, &self.shared);
        let (line, head_width, value_width) = (shared.line(head), problem.head_width, problem.value_width);
        let TileBuffers { rows, tile, products, weights, map, dq } = buffers;
        let wants_keys = |keys: &KeyBlock<'_, T>| left.is_none_or(|left| left.keys_of(keys));
        let wants_biases = |keys: &KeyBlock<'_, T>, row: usize, rows: usize| {
            left.is_none_or(|left| left.distances_of(problem, n, keys, (problem.stands(row), rows)))
        };
        for row in (near.start / TILE * TILE..near.end).step_by(TILE) {
            threads::check();
            let range = row.max(near.start)..(row + TILE).min(near.end);
            let (row, count) = (range.start, range.len());
            if !blocks.iter().any(|of| wants_keys(&of.keys) || wants_biases(&of.keys, row, count)) {
                continue;
            }
            self.load_rows((unit, head), range.clone(), rows, map);
            let RowBlock { q, d, c, .. } = &*rows;
            let finite = all_finite(Rows { data: q, stride: head_width }, count, head_width)
                && all_finite(Rows { data: d, stride: value_width }, count, value_width)
                && c[..count].iter().all(|c| c.is_finite());
            let mut tile_of = |piece: &Piece<T>, KeyGradients { keys, dk, dv }: &mut KeyGradients<'_, T>| {
                let Some(seen) = keys.seen(problem, piece) else { return };
                let keys_wanted = wants_keys(keys);
                if !keys_wanted && !wants_biases(keys, piece.row, piece.rows) {
                    return;
                }
                let at = piece.row - row;
                let (q, d) = (&q[at * head_width..], &d[at * value_width..]);
                keys.scores(problem, q, seen, tile);
                keys.value_products(problem, d, &c[at..], seen, products);
                let unused = &mut [T::ZERO; TILE];
                let factors = weights.form(problem, unit, line, piece, (keys, seen));
                seen.weigh(tile, factors, unused);
                if keys_wanted {
                    seen.add_rows(tile, (d, value_width), dv);
                }
                // Unseen elements of the tile are 0, but those of the products may be anything.
                zero_outside((products, TILE), (seen.rows, seen.keys), seen.band);
                for r in 0..piece.rows {
                    let weights = &mut tile[r * TILE..][..seen.keys];
                    multiply(weights, &products[r * TILE..][..seen.keys]);
                    each_run(problem, unit, piece.row + r, keys.from, seen.keys, |column, index, len| {
                        let (to, from) = (&mut d_line[index - first..][..len], &weights[column..][..len]);
                        match left {
                            None => add_scaled(to, T::ONE, from),
                            Some(left) => (0..len).for_each(|at| {
                                if left.distance(n, index + at) {
                                    to[at] += from[at];
                                }
                            }),
                        }
                    });
                }
                if !keys_wanted {
                    return;
                }
                seen.weigh(products, factors, unused);
                if !dq.is_empty() {
                    let dq = &mut dq[(piece.row - near.start) * head_width..];
                    seen.add_keys(products, (keys.k, head_width), dq);
                }
                seen.add_rows(products, (q, head_width), dk);
            };
            shared.pieces(problem, unit, head, range, |piece| {
                if finite || !problem.causal {
                    blocks.iter_mut().for_each(|of| tile_of(&piece, of));
                    return;
                }
                // A product of 0 and NaN would reach keys that a row which is NaN does not see.
                for row in piece.row..piece.row + piece.rows {
                    let (stands, end) = (problem.stands(row), problem.end(unit, row));
                    let piece = Piece { row, rows: 1, stands, end, ..piece };
                    blocks.iter_mut().for_each(|of| tile_of(&piece, of));
                }
            });
        }
    }
}
