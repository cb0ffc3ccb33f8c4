//! The exponents that weights are counted from: of every row, and of every piece of keys.

use std::ops::Range;

use super::problem::{Problem, TILE, Unit};
use super::state::EXPONENT;
use crate::call::{Arena, SharedRows};
use crate::simd::Real;
use crate::simd::block::floor;
use crate::threads;

/// How far the exponents of rows in one tile, or of keys in one piece, may lie apart: beyond it they are taken one row
/// at a time, so that e⁻³⁰ of the precision range is the most that a row can lose to its neighbours.
const RISE: f64 = 30.0;

/// Numbers of a list that one task fills: some ten microseconds of work.
const PART: usize = 4096;

/// The largest exponents of a unit's keys from its first on, under an exponential map: of each key (−∞ where it does not
/// count), of all before it, and of it and all after it.
type RunningMax<'s, T> = [&'s [T]; 3];

#[derive(Clone, Copy)]
pub(super) struct Piece<T> {
    /// The first row, and how many.
    pub row: usize,
    pub rows: usize,
    /// The key that the first row stands at.
    pub stands: isize,
    /// The last row sees the keys before this one.
    pub end: isize,
    /// The exponent that the weights of all its rows are relative to.
    pub level: T,
}

/// What all tasks know: the biases by difference of places, and the exponents of rows.
#[derive(Clone, Copy)]
pub(super) struct Shared<'s, T> {
    /// `[heads, line_width]`: `b` at every difference of places from `low − TILE` on.
    lines: &'s [T],
    line_width: usize,
    /// `[units × group, queries]`: the exponent of each row.
    levels: &'s [T],
    /// `[units × group, pieces]`: 1 where the rows of a piece must be taken one by one.
    splits: &'s [T],
    queries: usize,
    group: usize,
}

/// Largest finite entry, if there is one: NaN and infinities say nothing of scale and spread by themselves.
fn top<T: Real>(row: &[T]) -> Option<T> {
    let top = row.iter().copied().fold(T::NEG_INFINITY, |a, b| if b > a && b.is_finite() { b } else { a });
    top.is_finite().then_some(top)
}

impl<T: Real> Problem<'_, T> {
    fn pieces(&self) -> usize {
        self.most_queries().div_ceil(TILE)
    }

    fn row_max_len(&self) -> usize {
        if self.mapping.exponential { 3 * (self.most_keys() + 1) } else { 0 }
    }

    /// The memory of [`shared`](Self::shared): lines, largest exponents of keys, levels and splits.
    fn shared_memory<'s>(&self, arena: &mut Arena<'s, T>) -> [&'s mut [T]; 4] {
        let heads = self.units() * self.dims.group();
        [
            self.dims.heads * self.line_width(),
            self.units() * self.row_max_len(),
            heads * self.most_queries(),
            heads * self.pieces(),
        ]
        .map(|len| arena.take(len))
    }

    /// Numbers that [`shared`](Self::shared) takes from an arena.
    pub fn shared_len(&self) -> usize {
        Arena::measure(|arena| self.shared_memory(arena))
    }

    /// Lays out the biases, and finds each row's exponent.
    pub fn shared<'s>(&self, arena: &mut Arena<'s, T>) -> Shared<'s, T> {
        let (line_width, group, queries) = (self.line_width(), self.dims.group(), self.most_queries());
        let [lines, row_max, levels, splits] = self.shared_memory(arena);
        // The entries of all heads are the same ones.
        let entries = self.toeplitz.bias.entries();
        let heads = lines.chunks_exact_mut(line_width).zip(self.call.parameters[0].chunks_exact(entries));
        let parts: Vec<_> =
            heads.flat_map(|(line, table)| line.chunks_mut(PART).enumerate().map(move |part| (part, table))).collect();
        threads::share(parts.into_iter(), |((part, line), table)| {
            for (index, b) in line.iter_mut().enumerate() {
                let entry = self.line_difference(part * PART + index).and_then(|d| self.toeplitz.bias.entry(d));
                // What no row sees has weight 0.
                *b = entry.map_or(T::NEG_INFINITY, |entry| table[entry]);
            }
        });
        let (lines, row_max_len, pieces) = (&*lines, self.row_max_len(), self.pieces());
        if row_max_len > 0 {
            self.find_max(row_max, row_max_len);
        }
        let row_max = &*row_max;
        let level_rows = SharedRows::new(levels, [queries, 0, 1]);
        let split_rows = SharedRows::new(splits, [pieces, 1, 0]);
        threads::share(0..self.units() * group * pieces, |task| {
            let (index, piece) = (task / pieces, task % pieces);
            let unit = self.unit(index / group);
            let rows = piece * TILE..((piece + 1) * TILE).min(unit.sequence.queries);
            if rows.is_empty() {
                return;
            }
            let head = unit.kv_head * group + index % group;
            let line = &lines[head * line_width..][..line_width];
            // SAFETY: each piece of rows is one task's own.
            let (levels, split) = unsafe {
                (level_rows.row(index, 0, rows.start, rows.len()), &mut split_rows.row(index, piece, 0, 1)[0])
            };
            let third = row_max_len / 3;
            let row_max = [0, 1, 2].map(|n| &row_max[index / group * row_max_len + n * third..][..third]);
            *split = if self.levels(&unit, head, line, row_max, rows, levels) { T::ONE } else { T::ZERO };
        });
        Shared { lines, line_width, levels, splits, queries, group }
    }

    /// Finds the largest exponent of every key of the units under an exponential map, and of all keys before and after each.
    fn find_max(&self, row_max: &mut [T], row_max_len: usize) {
        let mut parts = Vec::new();
        for (index, to) in row_max.chunks_exact_mut(row_max_len).enumerate() {
            let unit = self.unit(index);
            let own = &mut to[..row_max_len / 3];
            own.fill(T::NEG_INFINITY);
            let seen = &mut own[..(unit.sequence.keys as isize - unit.begin()) as usize];
            parts.extend(seen.chunks_mut(PART).enumerate().map(|part| (index, part)));
        }
        threads::share(parts.into_iter(), |(index, (part, to))| {
            let unit = self.unit(index);
            let begin = unit.begin() + (part * PART) as isize;
            for (key, to) in (begin..).zip(to) {
                *to = self.key_max(&unit, key).unwrap_or(T::NEG_INFINITY);
            }
        });
        for to in row_max.chunks_exact_mut(row_max_len) {
            let (own, rest) = to.split_at_mut(row_max_len / 3);
            let (before, after) = rest.split_at_mut(row_max_len / 3);
            let mut highest = T::NEG_INFINITY;
            for (to, &own) in before.iter_mut().zip(&*own) {
                *to = highest;
                highest = highest.max(own);
            }
            let mut highest = T::NEG_INFINITY;
            for (to, &own) in after.iter_mut().zip(&*own).rev() {
                highest = highest.max(own);
                *to = highest;
            }
        }
    }

    /// Finds the exponents of a piece's rows; returns whether they must be taken one by one.
    fn levels(
        &self,
        unit: &Unit<'_, T>,
        head: usize,
        line: &[T],
        row_max: RunningMax<'_, T>,
        rows: Range<usize>,
        levels: &mut [T],
    ) -> bool {
        let (first, last) = (rows.start, rows.end - 1);
        let (begin, end) = (unit.begin(), self.end(unit, last));
        let finite = |level: T| if level.is_finite() { level } else { T::ZERO };
        let Some(seeing) = rows.clone().find(|&row| self.sees(unit, row)) else {
            levels.fill(T::ZERO);
            return false;
        };
        let far = self.far_exponent(unit, head, T::ZERO);
        let highest = |end: isize, first: usize, last: usize| {
            far.max(match self.mapping.exponential {
                true => self.highest_weight(unit, line, row_max, end, (first, last)),
                false => self.highest(line, begin, end, first, last),
            })
        };
        let level = highest(end, first, last);
        let own = |row: usize| highest(self.end(unit, row), row, row);
        let lowest = own(seeing);
        let last_level = own(last);
        let lowest = if lowest < last_level { lowest } else { last_level };
        if lowest.is_finite() && level.to_f64() - lowest.to_f64() > RISE {
            for (row, level) in rows.zip(levels) {
                *level = finite(own(row));
            }
            return true;
        }
        levels.fill(finite(level));
        // A product of 0 and NaN would reach rows that do not see the NaN.
        let (seen_by_all, end) = (self.end(unit, first), end);
        !unit.is_finite(self, seen_by_all.max(0), end)
    }

    /// The exponent, relative to `level`, of the tokens beyond the ring of an initial state, their bias included; −∞
    /// without any.
    pub fn far_exponent(&self, unit: &Unit<'_, T>, head: usize, level: T) -> T {
        match (&unit.past, self.toeplitz.bias.far()) {
            // The large numbers first: their difference is exact where it matters.
            (Some(past), Some(entry)) => (past.head.marks[EXPONENT] - level) + self.table(head)[entry],
            _ => T::NEG_INFINITY,
        }
    }

    /// The largest exponent, key and bias together, between the keys before `end` and the rows `first..=last`, or more;
    /// exactly it for a single row. For exponential maps.
    fn highest_weight(
        &self,
        unit: &Unit<'_, T>,
        line: &[T],
        [own, before, after]: RunningMax<'_, T>,
        end: isize,
        (first, last): (usize, usize),
    ) -> T {
        let (bias, begin) = (&self.toeplitz.bias, unit.begin());
        let place = |key: isize| (key - begin) as usize;
        let (mut from, mut to, mut level) = (begin, end, T::NEG_INFINITY);
        // Keys beyond the ends of the table share a bias, and the largest of them is known.
        if bias.far().is_some() {
            from = (self.stands(first) - bias.near() as isize + 1).clamp(begin, end);
            if from > begin {
                level = before[place(from)] + line[self.bias_index(unit, from - 1, first)];
            }
        }
        if let Some((distance, _)) = bias.after().filter(|_| !self.causal) {
            to = (self.stands(last) + distance).clamp(from, end);
            if to < end {
                level = level.max(after[place(to)] + line[self.bias_index(unit, to, last)]);
            }
        }
        if first == last {
            let exponents = (from..to).map(|key| own[place(key)] + line[self.bias_index(unit, key, first)]);
            return exponents.fold(level, T::max);
        }
        let table_max = if self.is_grid() { top(line) } else { None };
        while from < to {
            let next = (from + TILE as isize).min(to);
            let highest = own[place(from)..place(next)].iter().copied().fold(T::NEG_INFINITY, T::max);
            level = level.max(highest + table_max.unwrap_or_else(|| self.highest(line, from, next, first, last)));
            from = next;
        }
        level
    }

    /// The largest bias between the keys `from..to` and the rows `first..=last`, or more.
    fn highest(&self, line: &[T], from: isize, to: isize, first: usize, last: usize) -> T {
        if from >= to {
            return T::NEG_INFINITY;
        }
        if self.is_grid() {
            return top(line).unwrap_or(T::NEG_INFINITY);
        }
        let (mut low, mut high) = (from - self.stands(last), to - 1 - self.stands(first));
        // Beyond these distances the line is constant, and long.
        if self.toeplitz.bias.far().is_some() {
            low = low.max(-(self.toeplitz.bias.near() as isize)).min(high);
        }
        if let Some((distance, _)) = self.toeplitz.bias.after() {
            high = high.min(distance).max(low);
        }
        let low = self.line_index(low).max(0) as usize;
        let high = (self.line_index(high) + 1).clamp(0, line.len() as isize) as usize;
        top(&line[low.min(high)..high]).unwrap_or(T::NEG_INFINITY)
    }

    /// The largest exponent of a key that counts, under an exponential map.
    pub fn key_max(&self, unit: &Unit<'_, T>, key: isize) -> Option<T> {
        match usize::try_from(key) {
            Ok(key) if unit.sequence.ignores(key) => None,
            Ok(key) if self.mapping.rows.is_none() => top(unit.k.row(key, self.dims.head_dim)),
            Ok(key) => {
                let place = (unit.sequence.batch, unit.kv_head, unit.sequence.key_start + key);
                Some(self.mapping.key_max(place, &[])).filter(|top| top.is_finite())
            }
            Err(_) => unit.past.and_then(|past| past.exponent(key)),
        }
    }

    /// How many keys from `from` on, before `end`, one piece takes, and the exponent subtracted from them. A piece ends
    /// before a key that rises too far above its first.
    pub fn key_piece(&self, unit: &Unit<'_, T>, from: isize, end: isize) -> (usize, T) {
        let most = ((end - from) as usize).min(TILE);
        if !self.mapping.exponential {
            return (most, T::ZERO);
        }
        let mut found: Option<(T, T)> = None;
        for count in 0..most {
            let Some(top) = self.key_max(unit, from + count as isize) else { continue };
            match found {
                Some((limit, highest)) if top > limit => return (count, highest),
                Some((limit, highest)) => found = Some((limit, highest.max(top))),
                None => found = Some((top + T::from_f64(RISE), top)),
            }
        }
        // Ignored keys alone must not raise the exponent of the sums that they enter.
        (most, found.map_or_else(floor, |(_, highest)| highest))
    }
}

impl<'s, T: Real> Shared<'s, T> {
    pub fn line(&self, head: usize) -> &'s [T] {
        &self.lines[head * self.line_width..][..self.line_width]
    }

    /// Calls `body` for the pieces of rows `rows` of one head.
    pub fn pieces(
        &self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        head: usize,
        rows: Range<usize>,
        mut body: impl FnMut(Piece<T>),
    ) {
        let index = unit.index * self.group + head % self.group;
        let levels = &self.levels[index * self.queries..][..self.queries];
        let splits = &self.splits[index * self.queries.div_ceil(TILE)..][..self.queries.div_ceil(TILE)];
        let mut row = rows.start;
        while row < rows.end {
            let piece_end = (row / TILE + 1) * TILE;
            let count = if splits[row / TILE] == T::ONE { 1 } else { rows.end.min(piece_end) - row };
            body(Piece {
                row,
                rows: count,
                stands: problem.stands(row),
                end: problem.end(unit, row + count - 1),
                level: levels[row],
            });
            row += count;
        }
    }

    pub fn level(&self, unit: &Unit<'_, T>, head: usize, row: usize) -> T {
        self.levels[(unit.index * self.group + head % self.group) * self.queries + row]
    }
}
