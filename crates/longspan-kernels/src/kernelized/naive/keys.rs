//! The keys of a unit, what a row sees of them, and the tiles of weights between them and a block of rows.

use super::super::features::Lift;
use super::super::pairs::Weigh;
use super::super::problem::{Problem, Table, Unit};
use crate::call::Arena;
use crate::feature_map::elementwise::{Shift, copy_rows, load_exponentials};
use crate::simd::block::{add_row_dots, add_scaled, multiply, scale_by, transpose};
use crate::simd::product::{Band, Product};
use crate::simd::rows::{padded, pieces};
use crate::simd::{Real, dispatch};

/// Rows of a block, and keys of a tile: 64 × 64 weights of `f32` are 16 KiB, which stays in the first-level cache beside
/// the rows of 64 features that pass by.
pub(in super::super) const TILE: usize = 64;

/// Fewer keys than this are scored by dot products: to transpose a register's worth of rows would cost more.
const FEW_KEYS: usize = 8;

pub(super) struct Keys<'x, 'a, T: 'static> {
    pub problem: &'x Problem<'a, T>,
    pub unit: Unit<'a, T>,
    pub table: Option<Table<'x, T>>,
    /// `φ(k)`, keys × head_width, and each tile's transpose, head_width × tile_width.
    pub k: &'x mut [T],
    pub k_columns: &'x mut [T],
    /// Values, keys × value_width, and in backward each tile's transpose; 0 where a key is ignored.
    pub v: &'x mut [T],
    pub v_columns: &'x mut [T],
    /// The exponent subtracted from each key, NaN for one without; and for each head, of a row that sees the keys up to each, the exponent
    /// that weights are relative to, and what brings the table's terms to it. Under an exponential map only.
    pub row_max: &'x mut [T],
    shifts: &'x mut [T],
    positions: &'x mut [T],
    /// 1 for each key that is there, 0 for ignored ones; empty where none is ignored, but for weights that are polynomials.
    pub present: &'x mut [T],
    /// `γⁿ` for n = keys − 1 down to 0, if there is decay.
    pub powers: &'x mut [T],
    /// Keys of a tile in whole cache lines.
    pub tile_width: usize,
    /// The first key that is not ignored.
    pub first: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Sight<T> {
    /// The key that the row stands at.
    pub stands: isize,
    /// Keys before this one, but for those ignored.
    pub end: usize,
    /// Decay since the last of them.
    pub decay: T,
    /// The exponent that all weights are relative to, the query's own aside.
    pub shift: T,
    /// What brings the table's terms to that exponent.
    pub position: T,
}

pub(super) struct Block<'s, T> {
    /// `φ(q)`, rows × head_width.
    pub q: &'s mut [T],
    /// The exponents that sums are relative to, the query's own included.
    pub exponents: &'s mut [T],
    /// Weights, rows × tile_width.
    pub tile: &'s mut [T],
    /// In backward, what the weights change by with `q·k`, where they are polynomials of it.
    pub slopes: &'s mut [T],
    /// `φ(q)·ρ(r)`, rows × table width.
    pub relative: &'s mut [T],
    /// What a row's weights in one tile are multiplied by.
    pub factors: &'s mut [T],
    /// Outputs, or the gradients of outputs, rows × value_width.
    pub o: &'s mut [T],
    pub sums: &'s mut [T],
}

/// A block of rows of one head, and the keys that its last one sees.
#[derive(Clone, Copy)]
pub(super) struct RowRange {
    pub head: usize,
    pub row: usize,
    pub rows: usize,
    pub end: usize,
}

impl<'s, T: Real> Block<'s, T> {
    pub fn new(problem: &Problem<'_, T>, backward: bool, arena: &mut Arena<'s, T>) -> Self {
        let rows = most_rows(problem);
        let tile_width = tile_width::<T>(most_keys(problem));
        let slopes = if backward && problem.taylor.is_some() { rows * tile_width } else { 0 };
        Self {
            q: arena.take(rows * problem.head_width),
            exponents: arena.take(rows),
            tile: arena.take(rows * tile_width),
            slopes: arena.take(slopes),
            relative: arena.take(rows * problem.table_width()),
            factors: arena.take(tile_width),
            o: arena.take(rows * problem.value_width),
            sums: arena.take(rows),
        }
    }
}

impl<'x, 'a, T: Real> Keys<'x, 'a, T> {
    pub fn len(problem: &Problem<'_, T>, backward: bool) -> usize {
        let keys = padded::<T>(most_keys(problem)).next_multiple_of(tile_width::<T>(most_keys(problem)).max(1));
        keys * (2 * problem.head_width + if backward { 2 } else { 1 } * problem.value_width)
            + 2 * padded::<T>(most_keys(problem))
            + 2 * padded::<T>(problem.dims.group() * most_keys(problem))
            + keys
    }

    pub fn new(
        problem: &'x Problem<'a, T>,
        index: usize,
        table: Option<Table<'x, T>>,
        backward: bool,
        lift: &mut Lift<'_, T>,
        arena: &mut Arena<'x, T>,
    ) -> Self {
        let unit = problem.unit(index);
        let (keys, padding) = (unit.sequence.keys, unit.sequence.padding);
        let tile_width = tile_width::<T>(keys);
        let whole = keys.next_multiple_of(tile_width.max(1));
        let (width, value_width) = (problem.head_width, problem.value_width);
        let content = if problem.content { whole } else { 0 };
        let exp = problem.content && problem.exponential;
        let mut all = Self {
            problem,
            unit,
            table,
            k: arena.take(content * width),
            k_columns: arena.take(content * width),
            v: arena.take(whole * value_width),
            v_columns: arena.take(if backward { whole * value_width } else { 0 }),
            row_max: arena.take(if exp { keys } else { 0 }),
            shifts: arena.take(if exp { problem.dims.group() * keys } else { 0 }),
            positions: arena.take(if exp { problem.dims.group() * keys } else { 0 }),
            present: arena.take(if problem.taylor.is_some() { whole } else { usize::from(padding.is_some()) * keys }),
            powers: arena.take(if unit.decay.is_none() { 0 } else { keys }),
            tile_width,
            first: (0..keys).find(|&key| !unit.sequence.ignores(key)).unwrap_or(keys),
        };
        all.load(lift);
        for (n, power) in all.powers.iter_mut().rev().enumerate() {
            *power = unit.decay.power(n);
        }
        for (key, present) in all.present.iter_mut().enumerate() {
            *present = if key >= keys || unit.sequence.ignores(key) { T::ZERO } else { T::ONE };
        }
        for key in (0..keys).step_by(tile_width.max(1)) {
            let (k, k_to) = (&all.k[(key * width).min(all.k.len())..], &mut *all.k_columns);
            if problem.content && keys >= FEW_KEYS {
                transpose((k, width), (tile_width, width), (&mut k_to[key * width..], tile_width));
            }
            if backward {
                let (v, to) = (&all.v[key * value_width..], &mut all.v_columns[key * value_width..]);
                transpose((v, value_width), (tile_width, value_width), (to, tile_width));
            }
        }
        all
    }

    fn load(&mut self, lift: &mut Lift<'_, T>) {
        let (problem, unit) = (self.problem, self.unit);
        let (keys, padding) = (unit.sequence.keys, unit.sequence.padding);
        let width = problem.head_width;
        let (value_width, value_dim) = (problem.value_width, problem.dims.value_dim);
        copy_rows(unit.v, (keys, value_dim), padding, (self.v, value_width));
        self.v[keys * value_width..].fill(T::ZERO);
        if !problem.content {
            return;
        }
        self.k[keys * width..].fill(T::ZERO);
        if problem.exponential {
            problem.all_key_max(&unit, self.row_max);
        }
        for (key, top) in self.row_max.iter_mut().enumerate() {
            if unit.sequence.ignores(key) {
                *top = T::NEG_INFINITY;
            } else if !top.is_finite() {
                *top = T::from_f64(f64::NAN);
            }
        }
        let of_heads = self.shifts.chunks_exact_mut(keys.max(1)).zip(self.positions.chunks_exact_mut(keys.max(1)));
        for (head, (shifts, positions)) in problem.heads(&unit).zip(of_heads) {
            let of_table = self.table.map(|table| table.shift(head));
            let mut highest = of_table.unwrap_or(T::NEG_INFINITY);
            for ((top, shift), position) in self.row_max.iter().zip(shifts).zip(positions) {
                // NaN does not count.
                highest = highest.max(*top);
                *shift = if highest.is_finite() { highest } else { T::ZERO };
                *position = of_table.map_or(T::ONE, |of_table| (of_table - *shift).exp());
            }
        }
        let k = std::mem::take(&mut self.k);
        for (first, count) in pieces(0..keys, TILE) {
            self.load_range(first, count, &mut k[first * width..], lift);
        }
        self.k = k;
    }

    /// Writes `φ(k)` of up to [`TILE`] keys relative to their exponents, of which those that are not finite count as 0.
    pub fn load_range(&self, first: usize, count: usize, to: &mut [T], lift: &mut Lift<'_, T>) {
        let mut shifts = [T::ZERO; TILE];
        for (shift, top) in shifts.iter_mut().zip(self.row_max.iter().skip(first)).filter(|(_, top)| top.is_finite()) {
            *shift = *top;
        }
        let shift = if self.problem.exponential { Shift::Each(&shifts) } else { Shift::One(T::ZERO) };
        self.problem.load_keys(&self.unit, first, count, shift, to, lift);
    }

    /// What row `row` of a head sees, or none if it sees nothing.
    pub fn sight(&self, head: usize, row: usize) -> Option<Sight<T>> {
        let problem = self.problem;
        let stands = row as isize + problem.offset;
        let end = if problem.causal { self.unit.clamp(stands + 1) } else { self.unit.sequence.keys };
        if self.first >= end {
            return None;
        }
        let mut sight = Sight { stands, end, decay: T::ONE, shift: T::ZERO, position: T::ONE };
        // Decay comes with a causal mask alone, so the row stands at the last key that it sees or later.
        sight.decay = self.unit.decay.between(end as isize - 1, stands);
        if problem.exponential {
            let of_table = self.table.map_or(T::ZERO, |table| table.shift(head));
            let place = (head - problem.heads(&self.unit).start) * self.unit.sequence.keys + end - 1;
            sight.shift = self.shifts.get(place).copied().unwrap_or(of_table);
            sight.position = self.positions.get(place).copied().unwrap_or(T::ONE);
        }
        Some(sight)
    }

    /// The next block of rows from `row` on. `carries` says whether rows hold a number that is not finite.
    pub fn range(&self, head: usize, row: usize, carries: impl FnOnce(usize, usize) -> bool) -> RowRange {
        let (problem, sequence) = (self.problem, &self.unit.sequence);
        let end = |row: usize| self.unit.clamp(row as isize + problem.offset + 1);
        let rows = (sequence.queries - row).min(TILE);
        if !problem.causal {
            return RowRange { head, row, rows, end: sequence.keys };
        }
        let (from, to) = (end(row), end(row + rows - 1));
        let rows = if from < to && (!self.unit.is_finite(problem, from, to) || carries(row, rows)) { 1 } else { rows };
        RowRange { head, row, rows, end: end(row + rows - 1) }
    }

    /// Loads `φ(q)` of a block's rows and its products with the table.
    pub fn load_rows(&self, range: RowRange, block: &mut Block<'_, T>, lift: &mut Lift<'_, T>) {
        let problem = self.problem;
        let RowRange { head, row, rows, .. } = range;
        let width = problem.head_width;
        problem.load_queries(&self.unit, head, row, rows, block.exponents, block.q, lift);
        let Some(table) = &self.table else { return };
        let sizes = [range.rows, table.width, problem.depth];
        Product::of((block.q, width), (table.columns(range.head), table.width), (block.relative, table.width), sizes)
            .compute();
        if problem.exponential {
            for row in 0..range.rows {
                let position = self.sight(range.head, range.row + row).map_or(T::ONE, |sight| sight.position);
                scale_by(&mut block.relative[row * table.width..][..table.width], position);
            }
        }
    }

    /// The elements of the tile at `key` that the rows of a block see.
    pub fn band(&self, range: RowRange, key: usize) -> Band {
        if self.problem.causal {
            Band::up_to(range.row as isize + self.problem.offset - key as isize)
        } else {
            Band::ALL
        }
    }

    /// Where a row's near keys stand in the tile of `keys` keys from `key` on: the table's first row belongs to those
    /// before, its last row to those behind. With the table's row of the first of them.
    pub fn near(&self, stands: isize, key: usize, keys: usize) -> Option<(usize, usize, usize)> {
        let radius = self.problem.radius? as isize;
        let clamp = |at: isize| (at - key as isize).clamp(0, keys as isize) as usize;
        let from = clamp(stands - radius + 1);
        let to = clamp(if self.problem.causal { stands + 1 } else { stands + radius }).max(from);
        // Empty near parts have no first row.
        let first = if from < to { key as isize + from as isize - stands + radius } else { 0 };
        Some((from, to, first as usize))
    }

    /// Fills the tile with the weights of the `keys` keys from `key` on, but for the rows' own decay; elements that a
    /// row does not see hold anything. With features of their own for denominators, `denominators` asks for those parts.
    pub fn weigh(&self, range: RowRange, key: usize, keys: usize, denominators: bool, block: &mut Block<'_, T>) {
        let problem = self.problem;
        let (width, row_length) = (problem.head_width, self.tile_width);
        let features = if denominators { problem.layout.denominator()..width } else { 0..problem.depth };
        if !problem.content {
            block.tile[..range.rows * row_length].fill(T::ZERO);
        } else if self.unit.sequence.keys < FEW_KEYS {
            for row in 0..range.rows {
                let line = &mut block.tile[row * row_length..][..row_length];
                line.fill(T::ZERO);
                let q = &block.q[row * width..][features.clone()];
                add_row_dots(&self.k[key * width + features.start..], width, q, &mut line[..keys]);
            }
        } else {
            Product::of(
                (&block.q[features.start..], width),
                (&self.k_columns[key * width + features.start * row_length..], row_length),
                (block.tile, row_length),
                [range.rows, keys, features.len()],
            )
            .c_band(self.band(range, key))
            .compute();
        }
        if let Some(taylor) = problem.taylor {
            let (weights, present) = (&mut *block.tile, &self.present[key..]);
            dispatch(Weigh { taylor, rows: range.rows, keys, weights, row_length, present, slopes: block.slopes });
        }
        if problem.radius.is_none() && self.row_max.is_empty() && self.powers.is_empty() {
            return;
        }
        let mut factors = ContentFactors::new(key);
        for row in 0..range.rows {
            let Some(sight) = self.sight(range.head, range.row + row).filter(|sight| sight.end > key) else { continue };
            let line = &mut block.tile[row * row_length..][..keys.min(sight.end - key)];
            factors.multiply(self, &sight, block.factors, line);
            if let (Some(table), Some((from, to, first))) = (&self.table, self.near(sight.stands, key, line.len())) {
                let relative = &block.relative[row * table.width..][..table.width];
                line[..from].iter_mut().for_each(|weight| *weight += relative[0]);
                add_scaled(&mut line[from..to], T::ONE, &relative[first..]);
                if let Some(behind) = line.get_mut(to..).filter(|behind| !behind.is_empty()) {
                    let last = relative[table.count - 1];
                    behind.iter_mut().for_each(|weight| *weight += last);
                }
                if !self.present.is_empty() {
                    multiply(line, &self.present[key..]);
                }
            }
            self.decay(&sight, key, line);
        }
    }

    /// Multiplies what belongs to the keys from `key` on by their decay to the last key that the row sees.
    pub fn decay(&self, sight: &Sight<T>, key: usize, line: &mut [T]) {
        if !self.powers.is_empty() {
            multiply(line, &self.powers[self.powers.len() - sight.end + key..]);
        }
    }
}

/// What brings the content terms of rows to their exponents, for the keys of one tile: formed again where rows differ in it.
pub(super) struct ContentFactors<T> {
    key: usize,
    formed: Option<(T, usize)>,
}

impl<T: Real> ContentFactors<T> {
    pub fn new(key: usize) -> Self {
        Self { key, formed: None }
    }

    /// Multiplies what belongs to the first keys of the tile, if anything; `memory` holds the factors from row to row.
    pub fn multiply(&mut self, keys: &Keys<'_, '_, T>, sight: &Sight<T>, memory: &mut [T], line: &mut [T]) {
        if keys.row_max.is_empty() {
            return;
        }
        if self.formed.is_none_or(|(shift, count)| shift != sight.shift || count < line.len()) {
            load_exponentials(&keys.row_max[self.key..][..line.len()], sight.shift, &mut memory[..keys.tile_width]);
            self.formed = Some((sight.shift, line.len()));
        }
        multiply(line, memory);
    }
}

/// Keys of one tile of a sequence of `keys`, in whole cache lines.
pub(super) fn tile_width<T>(keys: usize) -> usize {
    padded::<T>(keys.min(TILE))
}

pub(super) fn most_rows<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.sequences.iter().map(|sequence| sequence.queries).max().unwrap_or(0).min(TILE)
}

/// Numbers that a task takes for its rows and for forming features.
pub(super) fn rows_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    Arena::measure(|arena| {
        Lift::new(problem, TILE, [true; 2], arena);
        Block::new(problem, true, arena);
    })
}

pub(super) fn most_keys<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.sequences.iter().map(|sequence| sequence.keys).max().unwrap_or(0)
}
