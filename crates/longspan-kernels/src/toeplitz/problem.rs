//! A checked call: sequences, heads, the line of biases, and the exponents that weights are counted from.

use super::state::{self, EXPONENT, Head, SLOT, TOKENS};
use super::{Bias, OPERATION, Toeplitz};
use crate::call::{
    Arena, Call, Dims, Order, Scratch, Sequence, State, ViewMut, check_call, check_final_mask, check_initial_mask,
};
use crate::error::{Error, expect};
use crate::feature_map::mapping::{MapBuffers, Mapping};
use crate::feature_map::rows::{Shift, Side};
use crate::simd::Real;
use crate::simd::block::all_finite;
use crate::simd::rows::{Rows, padded};
use crate::threads;

/// Rows and keys of a tile: 64 × 64 scores of `f32` are 16 KiB, so a tile, its keys and its values stay in the
/// second-level cache while the rows of a [`CHUNK`] pass by.
pub(super) const TILE: usize = 64;

/// Rows that meet a loaded block of keys before the next is loaded: mapping and transposing 64 keys takes about the
/// sixth part of one tile's products, and a chunk spreads that over four.
pub(super) const CHUNK: usize = 4 * TILE;

/// How far the exponents of rows in one tile, or of keys in one block, may lie apart: beyond it they are taken one row
/// at a time, so that e⁻³⁰ of the precision range is the most that a row can lose to its neighbours.
const RISE: f64 = 30.0;

/// Numbers of a list that one task fills: some ten microseconds of work.
const PART: usize = 4096;

/// A checked call.
pub(super) struct Problem<'a, T: 'static> {
    pub toeplitz: &'a Toeplitz,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub mapping: Mapping<'a, T>,
    /// Features of a row.
    pub features: usize,
    pub causal: bool,
    pub offset: isize,
    pub sequences: Vec<Sequence<'a>>,
    /// Widths of features and of values in blocks: whole cache lines.
    pub head_width: usize,
    pub value_width: usize,
    /// The places that any two tokens of a sequence may lie apart.
    low: isize,
    high: isize,
}

/// One key/value head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a, T> {
    pub index: usize,
    pub sequence: Sequence<'a>,
    pub kv_head: usize,
    pub k: Rows<'a, T>,
    pub v: Rows<'a, T>,
    /// The tokens before key 0, if the call goes on from a state.
    pub past: Option<Past<'a, T>>,
}

/// The tokens that a state keeps.
#[derive(Clone, Copy)]
pub(super) struct Past<'a, T> {
    pub head: Head<&'a [T]>,
    /// Tokens in the ring.
    pub tokens: usize,
    /// Where the next token would go in the ring.
    pub slot: usize,
    /// Tokens that the ring can hold.
    pub near: usize,
}

/// The largest exponents of a unit's keys from its first on, under an exponential map: of each key (−∞ where it does not
/// count), of all before it, and of it and all after it.
#[derive(Clone, Copy)]
struct RunningMax<'s, T> {
    own: &'s [T],
    before: &'s [T],
    after: &'s [T],
}

impl<'s, T> RunningMax<'s, T> {
    fn new(numbers: &'s [T]) -> Self {
        let len = numbers.len() / 3;
        Self { own: &numbers[..len], before: &numbers[len..2 * len], after: &numbers[2 * len..] }
    }
}

/// Consecutive rows that are computed together.
#[derive(Clone, Copy)]
pub(super) struct Block<T> {
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

/// What all tasks know: the line of biases and the levels.
#[derive(Clone, Copy)]
pub(super) struct Shared<'s, T> {
    /// `[heads, line_width]`: `b` at every difference of places from `low − TILE` on.
    pub lines: &'s [T],
    pub line_width: usize,
    /// `[units × group, queries]`: the exponent of each row.
    pub levels: &'s [T],
    /// `[units × group, blocks]`: 1 where the rows of a block must be taken one by one.
    splits: &'s [T],
    queries: usize,
    group: usize,
}

/// Largest finite entry, if there is one: NaN and infinities say nothing of scale and spread by themselves.
pub(super) fn top<T: Real>(row: &[T]) -> Option<T> {
    let top = row.iter().copied().fold(T::NEG_INFINITY, |a, b| if b > a && b.is_finite() { b } else { a });
    top.is_finite().then_some(top)
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(toeplitz: &'a Toeplitz, call: &'a Call<'a, T>) -> Result<Self, Error> {
        toeplitz.bias.check()?;
        toeplitz.algorithm.check(OPERATION, &Toeplitz::ALGORITHMS)?;
        check_call(toeplitz, call)?;
        toeplitz.check_feature_map(&call.dims)?;
        let (dims, mask) = (call.dims, &call.mask);
        let causal = mask.order == Order::Causal;
        let wrong = call.parameters[0].iter().find(|b| !b.is_finite());
        expect(wrong.is_none(), OPERATION, "bias", || "finite numbers".into(), || format!("{wrong:?}"))?;
        let sequences = mask.sequences(&dims);
        if let Some(initial) = call.initial_state {
            state::check(toeplitz, &dims, initial, "initial_state")?;
            check_initial_mask(OPERATION, mask)?;
        }
        let (mut low, mut high) = (isize::MAX, isize::MIN);
        for sequence in &sequences {
            let past = call.initial_state.map_or(0, |state| {
                let tokens = |head| Head::from(state.head(sequence.batch, head)).mark(TOKENS);
                (0..dims.kv_heads).map(tokens).max().unwrap_or(0)
            });
            toeplitz.bias.check_sequence(sequence, mask.order, mask.offset, past)?;
            if let Some((from, to)) = Bias::distances(sequence, mask.order, mask.offset, past) {
                (low, high) = (low.min(from), high.max(to));
            }
        }
        if matches!(toeplitz.bias, Bias::Grid { .. }) {
            // The table is the line, whatever the call.
            (low, high) = (-toeplitz.bias.centre(), toeplitz.bias.centre());
        }
        if low > high {
            (low, high) = (0, 0);
        }
        let mapping = Mapping::new(toeplitz.feature_map, &dims, call.parameters);
        let features = mapping.features;
        Ok(Self {
            toeplitz,
            call,
            dims,
            mapping,
            features,
            causal,
            offset: mask.offset,
            sequences,
            head_width: padded::<T>(features),
            value_width: padded::<T>(dims.value_dim),
            low,
            high,
        })
    }

    /// Does what the feature map needs before any row is loaded.
    pub fn prepare(&mut self, scratch: &mut Scratch<T>) {
        self.mapping.prepare(Some(&self.call.k), &self.dims, scratch);
    }

    /// Whether the call may have a final state, or the gradient of one, of this shape, and whether its bias reaches it.
    pub fn check_final_state(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        state.check(OPERATION, argument, state::shape(self.toeplitz, &self.dims))?;
        check_final_mask(OPERATION, &self.call.mask)?;
        for unit in (0..self.units()).map(|index| self.unit(index)) {
            let tokens = unit.sequence.keys + unit.past.map_or(0, |past| past.tokens);
            state::check_reach(self.toeplitz, argument, tokens)?;
        }
        Ok(())
    }

    /// Independent (sequence, key/value head) pairs.
    pub fn units(&self) -> usize {
        self.sequences.len() * self.dims.kv_heads
    }

    /// One of [`units`](Self::units).
    pub fn unit(&self, index: usize) -> Unit<'a, T> {
        let (sequence, kv_head) = (self.sequences[index / self.dims.kv_heads], index % self.dims.kv_heads);
        let past = self.call.initial_state.map(|state| {
            let head = Head::from(state.head(sequence.batch, kv_head));
            let near = self.toeplitz.bias.near();
            Past { tokens: head.mark(TOKENS), slot: head.mark(SLOT), near, head }
        });
        Unit {
            index,
            sequence,
            kv_head,
            k: self.call.k.rows(sequence.batch, kv_head).skip(sequence.key_start),
            v: self.call.v.rows(sequence.batch, kv_head).skip(sequence.key_start),
            past,
        }
    }

    /// The query heads of a unit.
    pub fn heads(&self, unit: &Unit<'_, T>) -> std::ops::Range<usize> {
        let group = self.dims.group();
        unit.kv_head * group..(unit.kv_head + 1) * group
    }

    /// Queries of one head of a sequence.
    pub fn queries(&self, unit: &Unit<'_, T>, head: usize) -> Rows<'a, T> {
        self.call.q.rows(unit.sequence.batch, head).skip(unit.sequence.query_start)
    }

    /// The biases of one head.
    pub fn table(&self, head: usize) -> &'a [T] {
        let entries = self.toeplitz.bias.entries();
        &self.call.parameters[0][head * entries..][..entries]
    }

    /// Queries of the longest sequence.
    pub fn most_queries(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.queries).max().unwrap_or(0)
    }

    /// Keys of the longest unit, those of an initial state's ring among them.
    pub fn most_keys(&self) -> usize {
        let keys = |unit: Unit<'_, T>| (unit.sequence.keys as isize - unit.begin()) as usize;
        (0..self.units()).map(|index| keys(self.unit(index))).max().unwrap_or(0)
    }

    /// The place that row `row` stands at.
    pub fn stands(&self, row: usize) -> isize {
        row as isize + self.offset
    }

    /// A row sees the keys before this one.
    pub fn end(&self, unit: &Unit<'_, T>, row: usize) -> isize {
        let keys = unit.sequence.keys as isize;
        if self.causal { (self.stands(row) + 1).clamp(unit.begin(), keys) } else { keys }
    }

    /// Whether a row sees any key at all.
    pub fn sees(&self, unit: &Unit<'_, T>, row: usize) -> bool {
        self.end(unit, row) > unit.begin() || unit.has_far()
    }

    /// Numbers of one head's line.
    pub fn line_width(&self) -> usize {
        (self.high - self.low + 1) as usize + 2 * TILE
    }

    /// The place in a head's line of a difference of places.
    pub fn line_index(&self, difference: isize) -> isize {
        difference - self.low + TILE as isize
    }

    /// The difference of places that an index of a line stands for, if any distance has it.
    pub fn line_difference(&self, index: usize) -> Option<isize> {
        let difference = index as isize + self.low - TILE as isize;
        let high = if self.causal { self.high.min(0) } else { self.high };
        (self.low..=high).contains(&difference).then_some(difference)
    }

    /// Whether tokens are the pixels of an image.
    pub fn is_grid(&self) -> bool {
        matches!(self.toeplitz.bias, Bias::Grid { .. })
    }

    fn blocks(&self) -> usize {
        self.most_queries().div_ceil(TILE)
    }

    /// Numbers that [`shared`](Self::shared) takes from an arena.
    pub fn shared_len(&self) -> usize {
        let heads = self.units() * self.dims.group();
        padded::<T>(self.dims.heads * self.line_width())
            + padded::<T>(heads * self.most_queries())
            + padded::<T>(heads * self.blocks())
            + padded::<T>(self.units() * self.tops_len())
    }

    /// Numbers of the [`RunningMax`] of one unit.
    fn tops_len(&self) -> usize {
        if self.mapping.exponential { 3 * (self.most_keys() + 1) } else { 0 }
    }

    /// Lays out the biases, and finds each row's exponent.
    pub fn shared<'s>(&self, arena: &mut Arena<'s, T>) -> Shared<'s, T> {
        let (line_width, group, queries) = (self.line_width(), self.dims.group(), self.most_queries());
        let lines = arena.take(self.dims.heads * line_width);
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
        let lines = &*lines;
        let tops_len = self.tops_len();
        let row_max = arena.take(self.units() * tops_len);
        if tops_len > 0 {
            self.find_max(row_max, tops_len);
        }
        let row_max = &*row_max;
        let levels = arena.take(self.units() * group * queries);
        let splits = arena.take(self.units() * group * self.blocks());
        let mut level_rows = ViewMut::strided(&mut *levels, [queries, 0, 0]);
        let level_rows = level_rows.shared();
        let mut split_rows = ViewMut::strided(&mut *splits, [self.blocks(), 1, 0]);
        let split_rows = split_rows.shared();
        let blocks = self.blocks();
        threads::share(0..self.units() * group * blocks, |task| {
            let (index, block) = (task / blocks, task % blocks);
            let unit = self.unit(index / group);
            let rows = block * TILE..((block + 1) * TILE).min(unit.sequence.queries);
            if rows.is_empty() {
                return;
            }
            let head = unit.kv_head * group + index % group;
            let line = &lines[head * line_width..][..line_width];
            // SAFETY: each block of rows is one task's own.
            let (levels, split) = unsafe {
                let levels = level_rows.row(index, 0, 0, rows.end);
                (&mut levels[rows.start..], &mut split_rows.row(index, block, 0, 1)[0])
            };
            let row_max = RunningMax::new(&row_max[index / group * tops_len..][..tops_len]);
            *split = if self.levels(&unit, head, line, row_max, rows, levels) { T::ONE } else { T::ZERO };
        });
        Shared { lines, line_width, levels, splits, queries, group }
    }

    /// Finds the largest exponent of every key of the units under an exponential map, and of all keys before and after each.
    fn find_max(&self, row_max: &mut [T], tops_len: usize) {
        let mut parts = Vec::new();
        for (index, to) in row_max.chunks_exact_mut(tops_len).enumerate() {
            let unit = self.unit(index);
            let own = &mut to[..tops_len / 3];
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
        for to in row_max.chunks_exact_mut(tops_len) {
            let (own, rest) = to.split_at_mut(tops_len / 3);
            let (before, after) = rest.split_at_mut(tops_len / 3);
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

    /// Finds the exponents of a block's rows; returns whether they must be taken one by one.
    fn levels(
        &self,
        unit: &Unit<'_, T>,
        head: usize,
        line: &[T],
        row_max: RunningMax<'_, T>,
        rows: std::ops::Range<usize>,
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
        row_max: RunningMax<'_, T>,
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
                level = row_max.before[place(from)] + line[self.bias_index(unit, from - 1, first)];
            }
        }
        if let Some((distance, _)) = bias.after().filter(|_| !self.causal) {
            to = (self.stands(last) + distance).clamp(from, end);
            if to < end {
                level = level.max(row_max.after[place(to)] + line[self.bias_index(unit, to, last)]);
            }
        }
        if first == last {
            let exponents = (from..to).map(|key| row_max.own[place(key)] + line[self.bias_index(unit, key, first)]);
            return exponents.fold(level, T::max);
        }
        let table_max = if self.is_grid() { top(line) } else { None };
        while from < to {
            let next = (from + TILE as isize).min(to);
            let highest = row_max.own[place(from)..place(next)].iter().copied().fold(T::NEG_INFINITY, T::max);
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

    /// The place in the line of the bias between a key and a row.
    pub fn bias_index(&self, unit: &Unit<'_, T>, key: isize, row: usize) -> usize {
        // Places count from the first token of the sequence.
        let place = |token| self.toeplitz.bias.place(token - unit.begin());
        self.line_index(place(key) - place(self.stands(row))) as usize
    }

    /// The largest exponent of a key that counts, under an exponential map.
    pub fn key_max(&self, unit: &Unit<'_, T>, key: isize) -> Option<T> {
        match usize::try_from(key) {
            Ok(key) if unit.ignores(key) => None,
            Ok(key) if self.mapping.rows.is_none() => top(unit.k.row(key, self.dims.head_dim)),
            Ok(key) => {
                let place = (unit.sequence.batch, unit.kv_head, unit.sequence.key_start + key);
                Some(self.mapping.key_max(place, &[])).filter(|top| top.is_finite())
            }
            Err(_) => unit.past.and_then(|past| past.exponent(key)),
        }
    }

    /// How many keys from `from` on, before `end`, one block takes, and the exponent subtracted from them. A block ends
    /// before a key that rises too far above its first.
    pub fn key_block(&self, unit: &Unit<'_, T>, from: isize, end: isize) -> (usize, T) {
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
        (most, found.map_or(T::ZERO, |(_, highest)| highest))
    }

    /// Loads the features of `rows` queries of a head, and the exponents subtracted from them.
    #[allow(clippy::too_many_arguments)]
    pub fn load_queries(
        &self,
        unit: &Unit<'_, T>,
        head: usize,
        row: usize,
        rows: usize,
        to: &mut [T],
        shifts: &mut [T],
        map: &mut MapBuffers<'_, T>,
    ) {
        let queries = self.queries(unit, head).skip(row);
        for first in (0..rows).step_by(TILE) {
            let (count, shifts) = ((rows - first).min(TILE), &mut shifts[first..]);
            let to = &mut to[first * self.head_width..];
            let (side, shift) = (Side::Query(head), self.mapping.query_shift(&mut shifts[..count]));
            self.mapping.write(side, queries.skip(first), count, None, shift, to, self.head_width, map.work);
        }
    }

    /// Loads the features, relative to `exponent`, of at most [`TILE`] keys from `first` on; 0 for those ignored.
    pub fn load_keys(
        &self,
        unit: &Unit<'_, T>,
        (first, count): (usize, usize),
        exponent: T,
        to: &mut [T],
        map: &mut MapBuffers<'_, T>,
    ) {
        let (side, from) = (Side::Key(unit.kv_head), unit.k.skip(first));
        let padding = unit.sequence.padding.map(|padding| &padding[first..first + count]);
        self.mapping.write(side, from, count, padding, Shift::One(exponent), to, self.head_width, map.work);
    }

    /// The same of keys from `first` on, each relative to an exponent of its own.
    pub fn load_each_key(
        &self,
        unit: &Unit<'_, T>,
        first: usize,
        exponents: &[T],
        to: &mut [T],
        map: &mut MapBuffers<'_, T>,
    ) {
        let (side, from, count) = (Side::Key(unit.kv_head), unit.k.skip(first), exponents.len());
        let padding = unit.sequence.padding.map(|padding| &padding[first..first + count]);
        self.mapping.write(side, from, count, padding, Shift::Each(exponents), to, self.head_width, map.work);
    }

    /// The gradients of at most [`TILE`] raw rows, and the length of a row in them, from their features and the gradients
    /// of those. Rows that do not `count` get anything, and what stands in them reaches no sum; those of the map's own
    /// matrix are added to `sums`.
    #[allow(clippy::too_many_arguments)]
    pub fn pull_back<'x>(
        &self,
        side: Side,
        from: Rows<'_, T>,
        rows: usize,
        counts: impl Fn(usize) -> bool,
        features: &mut [T],
        d: &'x mut [T],
        sums: &mut [T],
        map: &'x mut MapBuffers<'_, T>,
    ) -> (&'x [T], usize) {
        let width = self.head_width;
        let mut ignored = [false; TILE];
        for row in (0..rows).filter(|&row| !counts(row)) {
            ignored[row] = true;
            features[row * width..][..width].fill(T::ZERO);
            d[row * width..][..width].fill(T::ZERO);
        }
        self.mapping.pull_back(side, from, rows, Some(&ignored[..rows]), features, d, width, sums, map)
    }
}

impl<'a, T: Real> Unit<'a, T> {
    /// The first key, negative where a state is gone on from.
    pub fn begin(&self) -> isize {
        self.past.map_or(0, |past| -(past.tokens as isize))
    }

    /// Whether key `j` is ignored.
    pub fn ignores(&self, key: usize) -> bool {
        self.sequence.padding.is_some_and(|padding| padding[key])
    }

    /// Whether there are tokens beyond the ring of an initial state.
    pub fn has_far(&self) -> bool {
        self.past.is_some_and(|past| !past.head.keys.is_empty())
    }

    /// Whether the keys `from..to` that are not ignored, and their values, are finite.
    pub fn is_finite(&self, problem: &Problem<'_, T>, from: isize, to: isize) -> bool {
        let finite = |from: usize, count: usize| {
            problem.mapping.all_finite(self.k.skip(from), count)
                && all_finite(self.v.skip(from), count, problem.dims.value_dim)
        };
        let (from, to) = (from.max(0) as usize, to.max(0) as usize);
        match self.sequence.padding {
            _ if from >= to => true,
            None => finite(from, to - from),
            Some(_) => (from..to).filter(|&key| !self.ignores(key)).all(|key| finite(key, 1)),
        }
    }
}

impl<'a, T: Real> Past<'a, T> {
    /// The place in the ring of the token `key` (−1 is the last one).
    pub fn ring_slot(&self, key: isize) -> usize {
        (self.slot + self.near - key.unsigned_abs()) % self.near
    }

    /// Whether a kept key was ignored.
    pub fn ignores(&self, key: isize) -> bool {
        let width = self.head.ring_values.len() / self.near;
        self.head.ring_values[(self.ring_slot(key) + 1) * width - 1] != T::ONE
    }

    /// The exponent of a kept key, unless it was ignored.
    pub fn exponent(&self, key: isize) -> Option<T> {
        let exponent = self.head.ring_exponents[self.ring_slot(key)];
        exponent.is_finite().then_some(exponent)
    }
}

impl<'s, T: Real> Shared<'s, T> {
    /// The line of one head.
    pub fn line(&self, head: usize) -> &'s [T] {
        &self.lines[head * self.line_width..][..self.line_width]
    }

    /// Calls `body` for the blocks of rows `rows` of one head.
    pub fn blocks(
        &self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        head: usize,
        rows: std::ops::Range<usize>,
        mut body: impl FnMut(Block<T>),
    ) {
        let index = unit.index * self.group + head % self.group;
        let levels = &self.levels[index * self.queries..][..self.queries];
        let splits = &self.splits[index * self.queries.div_ceil(TILE)..][..self.queries.div_ceil(TILE)];
        let mut row = rows.start;
        while row < rows.end {
            let block_end = (row / TILE + 1) * TILE;
            let count = if splits[row / TILE] == T::ONE { 1 } else { rows.end.min(block_end) - row };
            body(Block {
                row,
                rows: count,
                stands: problem.stands(row),
                end: problem.end(unit, row + count - 1),
                level: levels[row],
            });
            row += count;
        }
    }

    /// The level of a row.
    pub fn level(&self, unit: &Unit<'_, T>, head: usize, row: usize) -> T {
        self.levels[(unit.index * self.group + head % self.group) * self.queries + row]
    }
}
