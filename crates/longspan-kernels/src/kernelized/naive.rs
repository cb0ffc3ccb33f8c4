//! Every pair of query and key, forward and backward, in dense tiles: O(queries · keys) work, memory linear in the keys.
//!
//! A task takes one key/value head of one sequence with all its query heads, so that the gradients of keys and values
//! have one writer. Rows are taken in blocks, and each block meets the keys in tiles whose borders depend on the keys
//! alone: a row's sums run over the keys in order, whatever the number of threads and whatever the other rows hold.
//!
//! A tile that not all rows of a block see fully has weights of 0 where they do not, and 0 · NaN is NaN: a block is cut
//! to single rows where a number that it could carry that way is not finite.
//!
//! Under an exponential map a key is stored relative to its own largest entry, and every row counts its weights from
//! the largest entry among the keys that it sees and the table: no weight exceeds the head's width, and keys that a row
//! does not see have no influence on its rounding. Denominators are relative to that exponent and the query's own, and
//! [`backward`] forms the same exponents anew.

use std::ops::Range;

use super::backward::{GradientSink, reduce_table};
use super::features::{Lift, PositionSink};
use super::forward::Sink;
use super::problem::{Problem, Table, Unit};
use crate::call::{Arena, Cotangent, Scratch, ViewMut};
use crate::feature_map::elementwise::{copy_rows, load_exponentials};
use crate::feature_map::rows::Shift;
use crate::simd::Real;
use crate::simd::block::{add_row_dots, add_scaled, all_finite, dot, multiply, scale_by, store, transpose};
use crate::simd::product::{Band, Product, mask_and_sum, zero_outside};
use crate::simd::rows::padded;
use crate::threads::{self, parallel};

/// Rows of a block, and keys of a tile: 64 × 64 weights of `f32` are 16 KiB, which stays in the first-level cache beside
/// the rows of 64 features that pass by.
pub(super) const TILE: usize = 64;

/// Fewer keys than this are scored by dot products: to transpose a register's worth of rows would cost more.
const FEW_KEYS: usize = 8;

/// The keys of one unit.
struct Keys<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    unit: Unit<'a, T>,
    table: Option<Table<'x, T>>,
    /// `φ(k)`, keys × head_width, and each tile's transpose, head_width × tile_width.
    k: &'x mut [T],
    k_columns: &'x mut [T],
    /// Values, keys × value_width, and in backward each tile's transpose; 0 where a key is ignored.
    v: &'x mut [T],
    v_columns: &'x mut [T],
    /// The exponent subtracted from each key, NaN for one without, and the largest of them up to each key; under
    /// an exponential map only.
    row_max: &'x mut [T],
    highest: &'x mut [T],
    /// 1 for each key that is there, 0 for ignored ones; empty where none is ignored.
    present: &'x mut [T],
    /// `γⁿ` for n = keys − 1 down to 0, if there is decay.
    powers: &'x mut [T],
    /// Keys of a tile in whole cache lines.
    tile_width: usize,
    /// The first key that is not ignored.
    first: usize,
}

/// What one row sees.
#[derive(Clone, Copy)]
struct Sight<T> {
    /// The key that the row stands at.
    stands: isize,
    /// Keys before this one, but for those ignored.
    end: usize,
    /// Decay since the last of them.
    decay: T,
    /// The exponent that all weights are relative to, the query's own aside.
    shift: T,
    /// What brings the table's terms to that exponent.
    position: T,
}

/// Working memory for a block of rows.
struct Block<'s, T> {
    /// `φ(q)`, rows × head_width.
    q: &'s mut [T],
    /// The exponents that sums are relative to, the query's own included.
    exponents: &'s mut [T],
    /// Weights, rows × tile_width.
    tile: &'s mut [T],
    /// `φ(q)·ρ(r)`, rows × table width.
    relative: &'s mut [T],
    /// What a row's weights in one tile are multiplied by.
    factors: &'s mut [T],
    /// Outputs, or the gradients of outputs, rows × value_width.
    o: &'s mut [T],
    sums: &'s mut [T],
}

/// A block of rows of one head, and the keys that its last one sees.
#[derive(Clone, Copy)]
struct RowRange {
    head: usize,
    row: usize,
    rows: usize,
    end: usize,
}

impl<'s, T: Real> Block<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        let rows = most_rows(problem);
        let tile_width = tile_width::<T>(most_keys(problem));
        Self {
            q: arena.take(rows * problem.head_width),
            exponents: arena.take(rows),
            tile: arena.take(rows * tile_width),
            relative: arena.take(rows * problem.table_width()),
            factors: arena.take(tile_width),
            o: arena.take(rows * problem.value_width),
            sums: arena.take(rows),
        }
    }
}

impl<'x, 'a, T: Real> Keys<'x, 'a, T> {
    /// Numbers of scratch for the longest unit.
    fn len(problem: &Problem<'_, T>, backward: bool) -> usize {
        let keys = padded::<T>(most_keys(problem)).next_multiple_of(tile_width::<T>(most_keys(problem)).max(1));
        keys * (2 * problem.head_width + if backward { 2 } else { 1 } * problem.value_width)
            + 4 * padded::<T>(most_keys(problem))
    }

    fn new(
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
            highest: arena.take(if exp { keys } else { 0 }),
            present: arena.take(if padding.is_some() { keys } else { 0 }),
            powers: arena.take(if unit.gamma == 1.0 { 0 } else { keys }),
            tile_width,
            first: (0..keys).find(|&key| !unit.ignores(key)).unwrap_or(keys),
        };
        all.load(lift);
        for (n, power) in all.powers.iter_mut().rev().enumerate() {
            *power = unit.decay(n);
        }
        for (key, present) in all.present.iter_mut().enumerate() {
            *present = if unit.ignores(key) { T::ZERO } else { T::ONE };
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
        let mut shifts = [T::ZERO; TILE];
        let mut highest = T::NEG_INFINITY;
        for first in (0..keys).step_by(TILE) {
            let count = TILE.min(keys - first);
            for key in first..if problem.exponential { first + count } else { first } {
                let top = if unit.ignores(key) { T::NEG_INFINITY } else { problem.key_max(&unit, key) };
                let found = Some(top).filter(|top| top.is_finite());
                highest = highest.max(found.unwrap_or(T::NEG_INFINITY));
                self.highest[key] = highest;
                self.row_max[key] = match found {
                    None if unit.ignores(key) => T::NEG_INFINITY,
                    found => found.unwrap_or(T::from_f64(f64::NAN)),
                };
                shifts[key - first] = found.unwrap_or(T::ZERO);
            }
            let shift = if problem.exponential { Shift::Each(&shifts) } else { Shift::One(T::ZERO) };
            problem.load_keys(&unit, first, count, shift, &mut self.k[first * width..], lift);
        }
    }

    /// What row `row` sees, or none if it sees nothing.
    fn sight(&self, row: usize) -> Option<Sight<T>> {
        let problem = self.problem;
        let stands = row as isize + problem.offset;
        let end = if problem.causal { self.unit.clamp(stands + 1) } else { self.unit.sequence.keys };
        if self.first >= end {
            return None;
        }
        let mut sight = Sight { stands, end, decay: T::ONE, shift: T::ZERO, position: T::ONE };
        if self.unit.gamma != 1.0 {
            // Decay comes with a causal mask alone, so the row stands at the last key that it sees or later.
            sight.decay = self.unit.decay((stands + 1 - end as isize) as usize);
        }
        if problem.exponential {
            let of_keys = self.highest.get(end - 1).copied().unwrap_or(T::NEG_INFINITY);
            let shift = self.table.map_or(of_keys, |table| of_keys.max(table.shift));
            sight.shift = if shift.is_finite() { shift } else { T::ZERO };
            if let Some(table) = &self.table {
                sight.position = (table.shift - sight.shift).exp();
            }
        }
        Some(sight)
    }

    /// The next block of rows from `row` on. `carries` says whether rows hold a number that is not finite.
    fn range(&self, head: usize, row: usize, carries: impl FnOnce(usize, usize) -> bool) -> RowRange {
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
    fn load_rows(&self, range: RowRange, block: &mut Block<'_, T>, lift: &mut Lift<'_, T>) {
        let problem = self.problem;
        let RowRange { head, row, rows, .. } = range;
        let width = problem.head_width;
        problem.load_queries(&self.unit, head, row, rows, block.exponents, block.q, lift);
        let Some(table) = &self.table else { return };
        Product::of(
            (block.q, width),
            (table.columns(range.head), table.width),
            (block.relative, table.width),
            [range.rows, table.width, problem.depth],
        )
        .compute();
        if problem.exponential {
            for row in 0..range.rows {
                let position = self.sight(range.row + row).map_or(T::ONE, |sight| sight.position);
                scale_by(&mut block.relative[row * table.width..][..table.width], position);
            }
        }
    }

    /// The elements of the tile at `key` that the rows of a block see.
    fn band(&self, range: RowRange, key: usize) -> Band {
        if self.problem.causal {
            Band::up_to(range.row as isize + self.problem.offset - key as isize)
        } else {
            Band::ALL
        }
    }

    /// Where a row's near keys stand in the tile of `keys` keys from `key` on: the table's first row belongs to those
    /// before, its last row to those behind. With the table's row of the first of them.
    fn near(&self, stands: isize, key: usize, keys: usize) -> Option<(usize, usize, usize)> {
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
    fn weigh(&self, range: RowRange, key: usize, keys: usize, denominators: bool, block: &mut Block<'_, T>) {
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
        if problem.radius.is_none() && self.row_max.is_empty() && self.powers.is_empty() {
            return;
        }
        for row in 0..range.rows {
            let Some(sight) = self.sight(range.row + row).filter(|sight| sight.end > key) else { continue };
            let line = &mut block.tile[row * row_length..][..keys.min(sight.end - key)];
            self.content_factors(&sight, key, line.len(), block.factors, |factors| multiply(line, factors));
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

    /// Hands over what brings the content terms of a row to its exponent, if anything.
    fn content_factors(&self, sight: &Sight<T>, key: usize, keys: usize, to: &mut [T], apply: impl FnOnce(&[T])) {
        if self.row_max.is_empty() {
            return;
        }
        load_exponentials(&self.row_max[key..][..keys], sight.shift, &mut to[..self.tile_width]);
        apply(to);
    }

    /// Multiplies what belongs to the keys from `key` on by their decay to the last key that the row sees.
    fn decay(&self, sight: &Sight<T>, key: usize, line: &mut [T]) {
        if !self.powers.is_empty() {
            multiply(line, &self.powers[self.powers.len() - sight.end + key..]);
        }
    }
}

/// Keys of one tile of a sequence of `keys`, in whole cache lines.
fn tile_width<T>(keys: usize) -> usize {
    padded::<T>(keys.min(TILE))
}

/// Rows of the largest block.
fn most_rows<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.sequences.iter().map(|sequence| sequence.queries).max().unwrap_or(0).min(TILE)
}

/// Writes one row of a unit from its weighted sum of values and of ones, and the exponent that both are relative to.
pub(super) fn write_row<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    sink: &Sink<'_, T>,
    (head, row): (usize, usize),
    (sum, denominator, exponent): (&[T], T, T),
) {
    let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
    // SAFETY: each (batch, head, token) belongs to one unit, so to one task, which holds no other slice of it.
    let out = unsafe { sink.out.row(batch, head, token, problem.dims.value_dim) };
    // A denominator that is no normal number is what a long decay leaves: the row gives 0 and says so, so that its
    // gradient is 0 too instead of infinite.
    let denominator = if denominator.vanishes() { T::ZERO } else { denominator };
    if !problem.attention.normalizes() {
        let factor = if problem.exponential { exponent.exp() } else { T::ONE };
        store(sum, factor, out);
    } else if problem.gives_nothing(denominator) {
        problem.negative.see(denominator, (batch * problem.dims.heads + head) * problem.dims.queries + token);
        out.fill(T::ZERO);
    } else {
        store(sum, T::ONE / denominator, out);
    }
    if let Some(denominators) = sink.denominators {
        // SAFETY: as above.
        let place = unsafe { denominators.row(batch, head, token, 1) };
        place[0] = if problem.attention.normalizes() { denominator } else { T::ONE };
    }
}

/// Numbers that a task takes for its rows and for forming features.
fn rows_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    Arena::measure(|arena| {
        Lift::new(problem, TILE, [true; 2], arena);
        Block::new(problem, arena);
    })
}

/// Keys of the longest sequence.
pub(super) fn most_keys<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.sequences.iter().map(|sequence| sequence.keys).max().unwrap_or(0)
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let value_width = problem.value_width;
    let separate = problem.layout.separate().is_some();
    let per_worker = Keys::len(problem, false) + rows_len(problem);
    let workers = threads::count().min(problem.units());
    let mut arena = Arena::new(scratch.take(problem.table_len() + workers * per_worker));
    let table = problem.table(&mut arena);
    parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
        let mut arena = Arena::new(scratch);
        let mut lift = Lift::new(problem, TILE, [false; 2], &mut arena);
        lift.start(problem, &problem.unit(index));
        let keys = Keys::new(problem, index, table, false, &mut lift, &mut arena);
        let mut block = Block::new(problem, &mut arena);
        for head in problem.heads(&keys.unit) {
            let mut row = 0;
            while row < keys.unit.sequence.queries {
                let range = keys.range(head, row, |_, _| false);
                keys.load_rows(range, &mut block, &mut lift);
                block.sums[..range.rows].fill(T::ZERO);
                block.o[..range.rows * value_width].fill(T::ZERO);
                for key in (0..range.end).step_by(keys.tile_width.max(1)) {
                    let count = (range.end - key).min(keys.tile_width);
                    let band = keys.band(range, key);
                    keys.weigh(range, key, count, separate, &mut block);
                    mask_and_sum((block.tile, keys.tile_width), count, band, &mut block.sums[..range.rows]);
                    if separate {
                        keys.weigh(range, key, count, false, &mut block);
                        zero_outside((block.tile, keys.tile_width), (range.rows, count), band);
                    }
                    Product::of(
                        (block.tile, keys.tile_width),
                        (&keys.v[key * value_width..], value_width),
                        (block.o, value_width),
                        [range.rows, value_width, count],
                    )
                    .accumulate(true)
                    .a_band(band)
                    .compute();
                }
                for at in 0..range.rows {
                    let sum = &mut block.o[at * value_width..][..value_width];
                    let (mut denominator, mut exponent) = (T::ZERO, T::ZERO);
                    if let Some(sight) = keys.sight(row + at) {
                        exponent = if problem.exponential { sight.shift + block.exponents[at] } else { T::ZERO };
                        denominator = block.sums[at] * sight.decay;
                        if sight.decay != T::ONE {
                            scale_by(sum, sight.decay);
                        }
                    } else {
                        // A query that is not finite has left its trace in weights of 0.
                        sum.fill(T::ZERO);
                    }
                    write_row(problem, &keys.unit, &sink, (head, row + at), (sum, denominator, exponent));
                }
                row += range.rows;
            }
        }
    });
}

/// Computes every gradient of a call. With the weights `p_ij = w_ij / D_i` of the normalised row and `c_i = −G_i·A_i`,
/// `dv_j = Σ_i p_ij G_i`, and what multiplies `φ(q_i)·φ(k_j)` in `p_ij` also multiplies `G_i·v_j + c_i` in the gradients
/// of both vectors. Dividing the weights rather than `G` keeps a small denominator from overflowing on its own.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
    let table_width = problem.table_width();
    let (sums_len, units) = (problem.sums_len(), problem.units());
    let entry = table_width * head_width + sums_len;
    let per_unit = problem.dims.group() * entry;
    let (most_keys, most_rows) = (most_keys(problem), most_rows(problem));
    let per_worker = Keys::len(problem, true)
        + most_keys * (head_width + value_width)
        + most_rows * (tile_width::<T>(most_keys) + table_width + head_width)
        + rows_len(problem)
        + 2 * padded::<T>(most_rows);
    let workers = threads::count().min(problem.units());
    let [query_positions, key_positions] = problem.position_lens();
    let positions_len = query_positions + key_positions + 4 * padded::<T>(1);
    let shared = problem.table_len() + units * (per_unit + sums_len) + positions_len;
    let mut arena = Arena::new(scratch.take(shared + workers * per_worker));
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(units * per_unit);
    let key_sums = arena.take(units * sums_len);
    let (query_positions, key_positions) = (arena.take(query_positions), arena.take(key_positions));
    let separate = problem.layout.separate();
    {
        let mut positions = problem.position_views(query_positions, key_positions);
        let sink = GradientSink { positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)), ..sink };
        let mut key_sums = ViewMut::strided(&mut *key_sums, [sums_len, 0, 0]);
        let key_sums = key_sums.shared();
        let mut gradients = ViewMut::strided(&mut *table_gradients, [per_unit, 0, 0]);
        let gradients = gradients.shared();
        parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
            let mut arena = Arena::new(scratch);
            let mut lift = Lift::new(problem, TILE, [true; 2], &mut arena);
            lift.start(problem, &problem.unit(index));
            let keys = Keys::new(problem, index, table, true, &mut lift, &mut arena);
            let mut block = Block::new(problem, &mut arena);
            let (unit, sequence, tile_width) = (&keys.unit, keys.unit.sequence, keys.tile_width);
            let (dk, dv) = (arena.take(sequence.keys * head_width), arena.take(sequence.keys * value_width));
            let d_tile = arena.take(most_rows * tile_width);
            let (dw, dq) = (arena.take(most_rows * table_width), arena.take(most_rows * head_width));
            // What a row's weights are multiplied by, 0 for one that gives 0 whatever the inputs are; and `c`.
            let (gains, c) = (arena.take(most_rows), arena.take(most_rows));
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
            // SAFETY: each unit is one task's own.
            let (d_table, key_sums) =
                unsafe { (gradients.row(index, 0, 0, per_unit), key_sums.row(index, 0, 0, sums_len)) };
            d_table.fill(T::ZERO);
            key_sums.fill(T::ZERO);
            // Keys from here on are seen by no row.
            let mut end = 0;
            for (n, head) in problem.heads(unit).enumerate() {
                let queries = problem.queries(unit, head);
                let [out, d_out] = [cotangent.out, cotangent.d_out]
                    .map(|view| view.rows(sequence.batch, head).skip(sequence.query_start));
                let mut row = 0;
                while row < sequence.queries {
                    let range = keys.range(head, row, |row, rows| {
                        !problem.mapping.all_finite(queries.skip(row), rows)
                            || !all_finite(d_out.skip(row), rows, value_dim)
                    });
                    keys.load_rows(range, &mut block, &mut lift);
                    let from = d_out.skip(row);
                    copy_rows(from, (range.rows, value_dim), None, (block.o, value_width));
                    for at in 0..range.rows {
                        let d = &mut block.o[at * value_width..][..value_width];
                        (gains[at], c[at]) = (T::ZERO, T::ZERO);
                        if let Some(sight) = keys.sight(row + at) {
                            end = end.max(sight.end);
                            if problem.attention.normalizes() {
                                let rows = sequence.batch * problem.dims.heads + head;
                                let place = rows * problem.dims.queries + sequence.query_start + row + at;
                                let denominator = cotangent.denominators[place];
                                if !problem.gives_nothing(denominator) {
                                    gains[at] = sight.decay / denominator;
                                    c[at] = -dot(out.row(row + at, value_dim), d);
                                }
                            } else {
                                gains[at] = sight.decay;
                                if problem.exponential {
                                    scale_by(d, (sight.shift + block.exponents[at]).exp());
                                }
                            }
                        }
                        if gains[at] == T::ZERO {
                            // Nothing of the row counts, not even what is not finite.
                            d.fill(T::ZERO);
                            block.q[at * head_width..][..head_width].fill(T::ZERO);
                        }
                    }
                    dw[..range.rows * table_width].fill(T::ZERO);
                    dq[..range.rows * head_width].fill(T::ZERO);
                    for key in (0..range.end).step_by(tile_width.max(1)) {
                        let count = (range.end - key).min(tile_width);
                        let band = keys.band(range, key);
                        keys.weigh(range, key, count, false, &mut block);
                        zero_outside((block.tile, tile_width), (range.rows, count), band);
                        Product::of(
                            (block.o, value_width),
                            (&keys.v_columns[key * value_width..], tile_width),
                            (d_tile, tile_width),
                            [range.rows, count, value_dim],
                        )
                        .c_band(band)
                        .compute();
                        for at in 0..range.rows {
                            let (line, d_line) =
                                (&mut block.tile[at * tile_width..], &mut d_tile[at * tile_width..][..tile_width]);
                            let Some(sight) = keys.sight(row + at).filter(|s| s.end > key && gains[at] != T::ZERO)
                            else {
                                line[..tile_width].fill(T::ZERO);
                                d_line.fill(T::ZERO);
                                continue;
                            };
                            let seen = count.min(sight.end - key);
                            scale_by(&mut line[..seen], gains[at]);
                            let (d_seen, unseen) = d_line.split_at_mut(seen);
                            unseen.fill(T::ZERO);
                            let c = if separate.is_some() { T::ZERO } else { c[at] };
                            d_seen.iter_mut().for_each(|d| *d = (*d + c) * gains[at]);
                            keys.decay(&sight, key, d_seen);
                            if let Some((from, to, first)) = keys.near(sight.stands, key, seen) {
                                if !keys.present.is_empty() {
                                    multiply(d_seen, &keys.present[key..]);
                                }
                                let dw = &mut dw[at * table_width..][..table_width];
                                let last = table.map_or(0, |table| table.count - 1);
                                dw[0] += sight.position * d_seen[..from].iter().copied().sum();
                                add_scaled(&mut dw[first..][..to - from], sight.position, &d_seen[from..]);
                                dw[last] += sight.position * d_seen[to..].iter().copied().sum();
                            }
                            keys.content_factors(&sight, key, seen, block.factors, |factors| {
                                multiply(d_seen, factors);
                            });
                        }
                        // `to += aᵀ b` and `dq += a k`, both over some columns.
                        let back = |a: &[T], b: &[T], to: &mut [T], width: usize, columns: Range<usize>| {
                            Product::of_transposed(
                                (a, tile_width),
                                (&b[columns.start..], width),
                                (&mut to[key * width + columns.start..], width),
                                [count, columns.len(), range.rows],
                            )
                            .accumulate(true)
                            .compute();
                        };
                        let mut forth = |a: &[T], columns: Range<usize>| {
                            Product::of(
                                (a, tile_width),
                                (&keys.k[key * head_width + columns.start..], head_width),
                                (&mut dq[columns.start..], head_width),
                                [range.rows, columns.len(), count],
                            )
                            .accumulate(true)
                            .a_band(band)
                            .compute();
                        };
                        back(block.tile, block.o, dv, value_width, 0..value_width);
                        if problem.content {
                            let columns = 0..separate.unwrap_or(head_width);
                            back(d_tile, block.q, dk, head_width, columns.clone());
                            forth(d_tile, columns);
                        }
                        let Some(from) = separate else { continue };
                        // What a key adds to the denominator has its own features, and `c` for its gradient.
                        for at in 0..range.rows {
                            let d_line = &mut d_tile[at * tile_width..][..tile_width];
                            d_line.fill(T::ZERO);
                            let sight = keys.sight(row + at).filter(|s| s.end > key && gains[at] != T::ZERO);
                            let Some(sight) = sight else { continue };
                            let d_seen = &mut d_line[..count.min(sight.end - key)];
                            d_seen.fill(c[at] * gains[at]);
                            keys.decay(&sight, key, d_seen);
                            keys.content_factors(&sight, key, d_seen.len(), block.factors, |factors| {
                                multiply(d_seen, factors);
                            });
                        }
                        back(d_tile, block.q, dk, head_width, from..head_width);
                        forth(d_tile, from..head_width);
                    }
                    if let Some(table) = &table {
                        let d_table = &mut d_table[n * entry..][..entry - sums_len];
                        Product::of(
                            (dw, table_width),
                            (table.rows(head), head_width),
                            (dq, head_width),
                            [range.rows, head_width, table.count],
                        )
                        .accumulate(true)
                        .compute();
                        Product::of_transposed(
                            (dw, table_width),
                            (block.q, head_width),
                            (d_table, head_width),
                            [table.count, head_width, range.rows],
                        )
                        .accumulate(true)
                        .compute();
                    }
                    let (sums, positions) = (&mut d_table[(n + 1) * entry - sums_len..][..sums_len], sink.positions);
                    let (raw, raw_row) =
                        problem.pull_back_queries(unit, head, row, range.rows, block.q, dq, sums, positions, &mut lift);
                    for at in 0..range.rows {
                        let token = sequence.query_start + row + at;
                        // SAFETY: each (batch, head, token) belongs to one unit, so to one task.
                        let to = unsafe { sink.dq.row(sequence.batch, head, token, head_dim) };
                        if gains[at] == T::ZERO {
                            to.fill(T::ZERO);
                        } else {
                            store(&raw[at * raw_row..], T::ONE, to);
                        }
                    }
                    row += range.rows;
                }
            }
            for key in 0..sequence.keys + sequence.absent {
                let token = sequence.key_start + key;
                // SAFETY: all of a unit's keys belong to its task.
                let (to_k, to_v) = unsafe {
                    let (batch, head) = (sequence.batch, unit.kv_head);
                    (sink.dk.row(batch, head, token, head_dim), sink.dv.row(batch, head, token, value_dim))
                };
                if key >= end || unit.ignores(key) {
                    // What stands in such a key may be NaN, which no slope of 0 would hold back.
                    to_k.fill(T::ZERO);
                    to_v.fill(T::ZERO);
                    continue;
                }
                store(&dv[key * value_width..], T::ONE, to_v);
                let d = &mut dk[key * head_width..][..head_width];
                if !problem.content {
                    to_k.fill(T::ZERO);
                    continue;
                }
                // With positions, what stands between raw keys and features has been overwritten by later ones.
                if problem.rotations.is_some() {
                    let shift = keys.row_max.get(key).copied().filter(|top| top.is_finite()).unwrap_or(T::ZERO);
                    problem.load_keys(unit, key, 1, Shift::One(shift), block.q, &mut lift);
                }
                let features = &keys.k[key * head_width..][..head_width];
                let positions = sink.positions;
                let (raw, _) = problem.pull_back_keys(unit, key, 1, features, d, key_sums, positions, &mut lift);
                store(raw, T::ONE, to_k);
            }
        });
    }
    let query_sums =
        |index: usize, n: usize| vec![&table_gradients[index * per_unit + (n + 1) * entry - sums_len..][..sums_len]];
    let unit_sums = |index: usize| vec![&key_sums[index * sums_len..][..sums_len]];
    let positions: [&[T]; 2] = [query_positions, key_positions];
    problem.write_feature_gradients(&query_sums, &unit_sums, positions, false, parameters);
    if let Some(table) = &table {
        reduce_table(problem, table, table_gradients, per_unit, &|_| 1, parameters);
    }
}
