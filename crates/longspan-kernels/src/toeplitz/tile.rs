//! Tiles of pairs: blocks of keys, the weights by distance, and the products that the passes share.

use std::ops::Range;

use super::Bias;
use super::exponents::{Piece, Shared};
use super::problem::{Problem, TILE, Unit};
use super::weigh::{Factors, WeighByDistance};
use crate::call::Arena;
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::{Shift, load_exponentials, load_features};
use crate::feature_map::mapping::MapBuffers;
use crate::simd::block::{scale_by, transpose};
use crate::simd::product::{Band, Product};
use crate::simd::rows::{Rows, padded};
use crate::simd::{Real, dispatch};
use crate::threads;

pub(super) struct KeyBlock<'s, T> {
    pub from: isize,
    pub count: usize,
    /// The exponent subtracted from the keys.
    pub exponent: T,
    /// `φ(k)`, `TILE × head_width`, and its transpose.
    pub k: &'s mut [T],
    pub k_columns: &'s mut [T],
    /// Values, `TILE × value_width`, and, for gradients, their transpose.
    pub v: &'s mut [T],
    pub v_columns: &'s mut [T],
}

impl<'s, T: Real> KeyBlock<'s, T> {
    pub fn new(problem: &Problem<'_, T>, gradients: bool, arena: &mut Arena<'s, T>) -> Self {
        Self {
            from: 0,
            count: 0,
            exponent: T::ZERO,
            k: arena.take(TILE * problem.head_width),
            k_columns: arena.take(TILE * problem.head_width),
            v: arena.take(TILE * problem.value_width),
            v_columns: arena.take(if gradients { TILE * problem.value_width } else { 0 }),
        }
    }

    /// Loads the next piece of the keys from `from` on and before `end`.
    pub fn load(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        (from, end): (isize, isize),
        map: &mut MapBuffers<'_, T>,
    ) {
        let (count, exponent) = problem.key_piece(unit, from, end);
        (self.from, self.count, self.exponent) = (from, count, exponent);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let (features, value_dim) = (problem.features, problem.dims.value_dim);
        let kept = ((-from).max(0) as usize).min(count);
        if let Some(past) = &unit.past {
            for row in 0..kept {
                let slot = past.ring_slot(from + row as isize);
                let k = &mut self.k[row * head_width..][..head_width];
                k[..features].copy_from_slice(&past.head.ring_keys[slot * features..][..features]);
                k[features..].fill(T::ZERO);
                if let Some(&own) = past.head.ring_exponents.get(slot) {
                    scale_by(k, (own - exponent).exp());
                }
                let v = &mut self.v[row * value_width..][..value_width];
                v[..value_dim].copy_from_slice(&past.head.ring_values[slot * (value_dim + 1)..][..value_dim]);
                v[value_dim..].fill(T::ZERO);
            }
        }
        if kept < count {
            let (first, rows) = ((from + kept as isize) as usize, count - kept);
            problem.load_keys(unit, (first, rows), Shift::One(exponent), &mut self.k[kept * head_width..], map);
            problem.load_values(unit, (first, rows), &mut self.v[kept * value_width..]);
        }
        // Products and transposes take whole registers of rows.
        let whole = padded::<T>(count).min(TILE);
        self.k[count * head_width..whole * head_width].fill(T::ZERO);
        self.v[count * value_width..whole * value_width].fill(T::ZERO);
        transpose((self.k, head_width), (whole, head_width), (self.k_columns, TILE));
        if !self.v_columns.is_empty() {
            transpose((self.v, value_width), (whole, value_width), (self.v_columns, TILE));
        }
    }

    /// What the rows of a piece see of it, if anything.
    pub fn seen(&self, problem: &Problem<'_, T>, piece: &Piece<T>) -> Option<Seen> {
        let keys = (piece.end - self.from).clamp(0, self.count as isize) as usize;
        let band = if problem.causal { Band::up_to(piece.stands - self.from) } else { Band::ALL };
        (keys > 0).then_some(Seen { rows: piece.rows, keys, band })
    }

    /// Fills a tile with the products `φ(q_i)·φ(k_j)`.
    pub fn scores(&self, problem: &Problem<'_, T>, q: &[T], seen: Seen, tile: &mut [T]) {
        let sizes = [seen.rows, seen.keys, problem.features];
        Product::of((q, problem.head_width), (self.k_columns, TILE), (tile, TILE), sizes).c_band(seen.band).compute();
    }

    /// Fills a tile with `dN_i·v⁺_j = d_i·v_j + c_i`.
    pub fn value_products(&self, problem: &Problem<'_, T>, d: &[T], c: &[T], seen: Seen, tile: &mut [T]) {
        for (row, &c) in c[..seen.rows].iter().enumerate() {
            tile[row * TILE..(row + 1) * TILE].fill(c);
        }
        let sizes = [seen.rows, seen.keys, problem.dims.value_dim];
        Product::of((d, problem.value_width), (self.v_columns, TILE), (tile, TILE), sizes)
            .accumulate(true)
            .c_band(seen.band)
            .compute();
    }
}

/// The tile of a piece of rows and a block of keys: its sizes, and which of its elements are seen.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub rows: usize,
    pub keys: usize,
    pub band: Band,
}

impl Seen {
    /// Multiplies a tile by its factors, makes what is not seen 0, and adds each row's sum to `sums`.
    pub fn weigh<T: Real>(self, tile: &mut [T], factors: Factors<'_, T>, sums: &mut [T]) {
        let (columns, band, sums) = (self.keys, self.band, &mut sums[..self.rows]);
        dispatch(WeighByDistance { tile, row_length: TILE, columns, factors, band, sums });
    }

    /// Adds to what belongs to rows the features or values of keys, weighed by a tile.
    pub fn add_keys<T: Real>(self, tile: &[T], (keys, width): (&[T], usize), to: &mut [T]) {
        Product::of((tile, TILE), (keys, width), (to, width), [self.rows, width, self.keys])
            .accumulate(true)
            .a_band(self.band)
            .compute();
    }

    /// Adds to what belongs to keys a block of rows, weighed by a tile.
    pub fn add_rows<T: Real>(self, tile: &[T], (rows, width): (&[T], usize), to: &mut [T]) {
        Product::of_transposed((tile, TILE), (rows, width), (to, width), [self.keys, width, self.rows])
            .accumulate(true)
            .a_band(self.band.transposed())
            .compute();
    }
}

/// Calls `visit` for every tile of the rows `rows` of a head and the keys of a range: with the place of its first row among
/// the rows, the piece, the block of keys, and what is seen.
#[allow(clippy::too_many_arguments)]
pub(super) fn each_tile<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    (unit, head): (&Unit<'_, T>, usize),
    rows: &Range<usize>,
    (mut from, end): (isize, isize),
    keys: &mut KeyBlock<'_, T>,
    map: &mut MapBuffers<'_, T>,
    mut visit: impl FnMut(usize, &Piece<T>, &KeyBlock<'_, T>, Seen),
) {
    while from < end {
        threads::check();
        keys.load(problem, unit, (from, end), map);
        shared.pieces(problem, unit, head, rows.clone(), |piece| {
            if let Some(seen) = keys.seen(problem, &piece) {
                visit(piece.row - rows.start, &piece, keys, seen);
            }
        });
        from += keys.count as isize;
    }
}

/// The numbers that the weights of a tile are made of.
pub(super) struct Weights<'s, T> {
    values: &'s mut [T],
    /// The exponents of a grid's tile, gathered from the line.
    raw: &'s mut [T],
}

impl<'s, T: Real> Weights<'s, T> {
    pub fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        let (values, raw) = if problem.is_grid() { (TILE * TILE, TILE * TILE) } else { (2 * TILE, 0) };
        Self { values: arena.take(values), raw: arena.take(raw) }
    }

    /// Forms `e^{b_δ}` for a tile, times what brings the keys' exponent to the piece's level.
    pub fn form(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        line: &[T],
        piece: &Piece<T>,
        (keys, seen): (&KeyBlock<'_, T>, Seen),
    ) -> Factors<'_, T> {
        let shift = piece.level - keys.exponent;
        if problem.is_grid() {
            for row in 0..piece.rows {
                each_run(problem, unit, piece.row + row, keys.from, seen.keys, |column, index, len| {
                    self.raw[row * TILE + column..][..len].copy_from_slice(&line[index..][..len]);
                });
            }
            let (raw, sizes) = (Rows { data: &*self.raw, stride: TILE }, (piece.rows, seen.keys));
            load_features((FeatureMap::Exp, shift), raw, sizes, None, (self.values, TILE));
            return Factors { values: self.values, start: 0, step: TILE as isize };
        }
        // Row r and column c need the difference from + c − (stands + r).
        let first = problem.line_index(keys.from - (piece.stands + piece.rows as isize - 1)) as usize;
        load_exponentials(&line[first..][..piece.rows + seen.keys - 1], shift, self.values);
        Factors { values: self.values, start: piece.rows - 1, step: -1 }
    }
}

/// Calls `body(column, index, len)` for the runs of keys of a grid that lie side by side in the line of biases.
pub(super) fn each_run<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    row: usize,
    from: isize,
    count: usize,
    mut body: impl FnMut(usize, usize, usize),
) {
    let Bias::Grid { width, .. } = problem.toeplitz.bias else {
        body(0, problem.bias_index(unit, from, row), count);
        return;
    };
    let mut column = 0;
    while column < count {
        let key = from + column as isize;
        let left = width - (key - unit.begin()).rem_euclid(width as isize) as usize;
        let len = left.min(count - column);
        body(column, problem.bias_index(unit, key, row), len);
        column += len;
    }
}
