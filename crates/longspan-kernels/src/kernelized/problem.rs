//! A checked call, with everything that its tasks share.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::decays::Decay;
use super::layout::FeatureLayout;
use super::pairs::Taylor;
use super::row_pass::Segment;
use super::state::Head;
use super::{KernelizedAttention, Score};
use crate::call::{
    Arena, Call, Dims, Lines, Mechanism, Order, Scratch, Sequence, State, check_call, check_initial_state,
    check_log_decay, check_state,
};
use crate::error::{Error, expect, refuse};
use crate::feature_map::elementwise::{Shift, load_features};
use crate::feature_map::mapping::Mapping;
use crate::feature_map::rows::{RawRows, Side as MapSide};
use crate::feature_map::{self, FeatureMap};
use crate::fourier::Positions;
use crate::fourier::rotation::{self, Rotations};
use crate::shaw::{RelativeMap, Shaw};
use crate::simd::block::{Exp, all_finite, largest, transpose};
use crate::simd::rows::{Ahead, Rows, padded};
use crate::simd::{Real, dispatch};

/// Rows of one chunk. In-chunk scores cost `chunk/2 · (d + dv)` products a row and the running sum `2·d·dv`, so a
/// chunk as long as a head is wide keeps the former below the latter; 64 rows of 64 `f32` are 16 KiB, and the five such
/// blocks that a chunk touches stay in the second-level cache.
pub(super) const CHUNK: usize = 64;

/// Rows whose prefix state is formed on its own, so that segments can run on different threads. Sums restart from zero
/// in every segment and are carried across segments in compensated form, with one thread as with many: that makes the
/// bits independent of the number of threads.
const SEGMENT: usize = 1024;

/// At most so many segments, or as many as have states no larger than all values.
const SEGMENTS: usize = 64;

/// How far a key may rise above the running maximum inside one piece of a chunk under an exponential map: beyond it
/// the piece ends, so that rows before the rise keep e⁻³⁰ of the precision range.
const EXP_RISE: f64 = 30.0;

pub(super) struct Problem<'a, T: 'static> {
    pub attention: &'a KernelizedAttention,
    pub call: &'a Call<'a, T>,
    /// The parameters of positions and of the feature map.
    pub parameters: &'a [&'a [T]],
    /// Under gates the factor that each key brings, `[batch, kv_heads, keys]`: [`gates`](Self::gates).
    pub factors: &'a [T],
    pub dims: Dims,
    pub map: FeatureMap,
    pub mapping: Mapping<'a, T>,
    /// Whether features are relative to an exponent.
    pub exponential: bool,
    pub content: bool,
    pub causal: bool,
    pub offset: isize,
    pub sequences: Vec<Sequence<'a>>,
    /// How features lie in a block row.
    pub layout: FeatureLayout,
    /// Numbers of a feature row that make up the weights.
    pub depth: usize,
    /// The angles of Fourier positions, if there are any.
    pub rotations: Option<Rotations<'a, T>>,
    /// Under `taylor2` alone, how weights are formed without its features.
    pub taylor: Option<Taylor>,
    pub lost: LostRows,
    /// Widths of features, v and table rows in blocks: whole cache lines.
    pub head_width: usize,
    pub value_width: usize,
    /// Relative positions, if any.
    pub radius: Option<usize>,
}

/// The table of relative positions after its feature map: for each head, or for all that share it and a map.
#[derive(Clone, Copy)]
pub(super) struct Table<'a, T> {
    /// `[tables, rows, head_width]`.
    pub rows: &'a [T],
    /// Transposed, `[tables, head_width, row_count padded]`.
    pub columns: &'a [T],
    /// Rows of one table that matter: `R + 1` under a causal mask, else `2R + 1`.
    pub count: usize,
    /// `count` in whole cache lines.
    pub width: usize,
    head_width: usize,
    /// Query heads that share one table.
    heads: usize,
    /// The exponent subtracted from each table under an exponential map.
    shifts: &'a [T],
}

impl<'a, T: Real> Table<'a, T> {
    pub fn of(&self, head: usize) -> usize {
        head / self.heads
    }

    /// The exponent subtracted from the rows of one head: heads whose tables are far below another's keep theirs.
    pub fn shift(&self, head: usize) -> T {
        self.shifts[self.of(head)]
    }

    /// `ρ(r)` of one head, row-major.
    pub fn rows(&self, head: usize) -> &'a [T] {
        let len = self.width * self.head_width;
        &self.rows[self.of(head) * len..][..len]
    }

    pub fn columns(&self, head: usize) -> &'a [T] {
        let len = self.width * self.head_width;
        &self.columns[self.of(head) * len..][..len]
    }
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(attention: &'a KernelizedAttention, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let operation = attention.name();
        let dims = call.dims;
        check_call(attention, call)?;
        let causal = call.mask.order == Order::Causal;

        attention.check_options(&dims)?;
        let help = "use a causal mask or leave the decay out";
        refuse(attention.decays() && !causal, operation, "decay with a bidirectional mask", help)?;
        let (parameters, log_decay) = attention.split_gate(call.parameters);
        check_initial_state(attention, call)?;
        check_outside(attention, call)?;
        let map = attention.feature_map;
        let layout = FeatureLayout::new::<T>(map.features(dims.head_dim), &attention.score);
        let sequences = call.mask.sequences(&dims);
        if let Some(log_decay) = log_decay {
            check_gates(operation, &dims, call.mask.offset, &sequences, log_decay)?;
        }
        let rotations = match attention.score {
            Score::Fourier(fourier) => {
                // Packed sequences share one batch entry and ignore nothing.
                let ignored = |batch: usize, key: usize| {
                    let sequence: Option<&Sequence<'_>> = sequences.get(batch).filter(|_| !call.mask.is_packed());
                    sequence.is_some_and(|sequence| !sequence.has(key))
                };
                rotation::check_positions(&fourier, operation, &dims, parameters, ignored)?;
                Some(Rotations::new(fourier, dims, layout.mapped, parameters))
            }
            _ => None,
        };
        Ok(Self {
            attention,
            call,
            parameters,
            factors: &[],
            dims,
            map,
            mapping: Mapping::new(map, &dims, parameters),
            exponential: map.is_exponential(),
            content: attention.score.content(),
            causal,
            offset: call.mask.offset,
            sequences,
            head_width: layout.width(),
            depth: layout.depth(),
            layout,
            rotations,
            taylor: attention.is_polynomial().then_some(Taylor { first: 1, scale: 1.0 }),
            lost: LostRows::new(attention),
            value_width: padded::<T>(dims.value_dim),
            radius: attention.score.shaw().map(|shaw| shaw.radius),
        })
    }

    /// The same for who forms the weight of every pair, if that takes no features: rows of `d` numbers in the place of `d²/2`.
    pub fn by_pairs(&self) -> Option<Self> {
        self.taylor?;
        let scale = feature_map::scale(self.dims.head_dim).powi(2);
        let layout = FeatureLayout::new::<T>(self.dims.head_dim, &self.attention.score);
        Some(Self {
            map: FeatureMap::Identity,
            mapping: Mapping::new(FeatureMap::Identity, &self.dims, &[]),
            sequences: self.sequences.clone(),
            head_width: layout.width(),
            depth: layout.depth(),
            layout,
            rotations: None,
            taylor: Some(Taylor { first: 0, scale }),
            lost: LostRows::new(self.attention),
            ..*self
        })
    }

    /// What [`factors`](Self::factors) are to be: `e^g`, 1 where a key is ignored.
    pub fn gates(&self) -> Result<Lines<T>, Error> {
        let (_, Some(log_decay)) = self.attention.split_gate(self.call.parameters) else { return Lines::zeros(0) };
        let mut factors = Lines::zeros(log_decay.len().next_multiple_of(padded::<T>(1)))?;
        factors[..log_decay.len()].copy_from_slice(log_decay);
        dispatch(Exp { to: &mut factors });
        for (sequence, kv_head) in
            self.sequences.iter().flat_map(|s| (0..self.dims.kv_heads).map(move |head| (s, head)))
        {
            let place = sequence.place(&self.dims, kv_head);
            let ignored = (0..sequence.keys).filter(|&key| sequence.ignores(key));
            ignored.for_each(|key| factors[place + key] = T::ONE);
        }
        Ok(factors)
    }

    pub fn log_decays(&self, unit: &Unit<'_, T>) -> T {
        let (_, Some(log_decay)) = self.attention.split_gate(self.call.parameters) else { return T::ZERO };
        let sequence = &unit.sequence;
        let place = sequence.place(&self.dims, unit.kv_head);
        let keys = (0..sequence.keys).filter(|&key| !sequence.ignores(key));
        T::from_f64(keys.map(|key| log_decay[place + key].to_f64()).sum())
    }

    /// Does what the map needs before any row is looked at.
    pub fn prepare(&mut self, scratch: &mut Scratch<T>) {
        self.mapping.prepare(Some(&self.call.k).filter(|_| self.content), &self.dims, scratch);
    }

    /// The largest exponent of a key of an exponential map; not finite where none is.
    pub fn key_max(&self, unit: &Unit<'_, T>, key: usize) -> T {
        let place = (unit.sequence.batch, unit.kv_head, unit.sequence.key_start + key);
        self.mapping.key_max(place, unit.k.row(key, self.dims.head_dim))
    }

    /// The same of all keys of a unit.
    pub fn all_key_max(&self, unit: &Unit<'_, T>, to: &mut [T]) {
        self.mapping.all_key_max([unit.sequence.batch, unit.kv_head, unit.sequence.key_start], unit.k, to);
    }

    /// Independent (sequence, key/value head) pairs.
    pub fn units(&self) -> usize {
        self.sequences.len() * self.dims.kv_heads
    }

    pub fn unit(&self, index: usize) -> Unit<'a, T> {
        let (sequence, kv_head) = (self.sequences[index / self.dims.kv_heads], index % self.dims.kv_heads);
        let decay = match &self.attention.decay {
            _ if self.attention.gate => {
                let place = sequence.place(&self.dims, kv_head);
                Decay::Gates(self.factors.get(place..place + sequence.keys).unwrap_or_default())
            }
            Some(decay) if decay[kv_head] != 1.0 => {
                let end = if self.attention.normalizes() { sequence.keys as isize } else { isize::MAX };
                Decay::Constant { gamma: decay[kv_head], end }
            }
            _ => Decay::None,
        };
        Unit {
            sequence,
            kv_head,
            k: self.call.k.rows(sequence.batch, kv_head).skip(sequence.key_start),
            v: self.call.v.rows(sequence.batch, kv_head).skip(sequence.key_start),
            decay,
            origin: self.origin(sequence.batch, kv_head),
        }
    }

    /// Tokens before the call, where they are counted.
    fn origin(&self, batch: usize, kv_head: usize) -> f64 {
        let counted = self.attention.score.fourier().is_some_and(|f| f.positions == Positions::Counted);
        let state = self.call.initial_state.filter(|_| counted);
        state.map_or(0.0, |state| Head::from(state.head(batch, kv_head)).tokens() as f64)
    }

    /// Whether a row has nothing to be divided by, so that it gives 0.
    pub fn gives_nothing(&self, denominator: T) -> bool {
        self.lost.gives_nothing(denominator)
    }

    /// Whether a row sees the key of its own token, and that has a number.
    pub fn sees_itself(&self, unit: &Unit<'_, T>, row: usize) -> bool {
        let own = row.checked_add_signed(self.offset).filter(|&key| unit.sequence.has(key));
        own.is_some_and(|key| largest(unit.k.row(key, self.dims.head_dim)).is_finite())
    }

    pub fn queries(&self, unit: &Unit<'_, T>, head: usize) -> Rows<'a, T> {
        self.call.q.rows(unit.sequence.batch, head).skip(unit.sequence.query_start)
    }

    /// Queries of a head that come soon: the rows `from..to` of its sequence.
    pub fn queries_ahead(&self, unit: &Unit<'_, T>, head: usize, from: isize, to: isize) -> Ahead<T> {
        Ahead::new(self.queries(unit, head), from, to, unit.sequence.queries, self.dims.head_dim)
    }

    /// Keys and values that come soon.
    pub fn keys_ahead(&self, unit: &Unit<'_, T>, from: isize, to: isize) -> [Ahead<T>; 2] {
        let keys = unit.sequence.keys;
        [
            Ahead::new(unit.k, from, to, keys, self.dims.head_dim),
            Ahead::new(unit.v, from, to, keys, self.dims.value_dim),
        ]
    }

    pub fn heads(&self, unit: &Unit<'a, T>) -> std::ops::Range<usize> {
        self.dims.heads_of(unit.kv_head)
    }

    /// Rows of one segment for sequences of `rows`; a multiple of [`CHUNK`].
    pub fn segment(&self, rows: usize) -> usize {
        let radius = self.radius.unwrap_or(0);
        let most = SEGMENTS.max(rows / self.layout.width().max(1));
        SEGMENT.max(rows.div_ceil(most).next_multiple_of(SEGMENT)).max(radius.next_multiple_of(SEGMENT))
    }

    /// Numbers that [`table`](Self::table) takes from an arena.
    pub fn table_len(&self) -> usize {
        let Some(shaw) = self.attention.score.shaw() else { return 0 };
        let (tables, _) = self.tables(shaw);
        let work = self.mapping.rows.as_ref().map_or(0, |map| map.work_len(self.table_count()));
        2 * tables * self.table_width() * self.head_width + padded::<T>(work) + padded::<T>(tables)
    }

    /// Numbers in one row of the table: raw ones go through the map, others stand beside its features.
    pub fn table_dim(&self) -> usize {
        self.attention.score.shaw().map_or(0, |shaw| shaw.row_len(self.map, self.dims.head_dim))
    }

    /// How many tables of features there are, and for how many query heads each: one that all heads share is one for each
    /// key/value head where these have maps of their own.
    pub fn tables(&self, shaw: Shaw) -> (usize, usize) {
        let (heads, group) = (self.dims.heads, self.dims.group().max(1));
        match (shaw.shared, shaw.map == RelativeMap::Same && self.mapping.parameters > 0) {
            (false, _) => (heads, 1),
            (true, true) => (self.dims.kv_heads, group),
            // It is there even where no head is.
            (true, false) => (1, heads.max(1)),
        }
    }

    fn table_count(&self) -> usize {
        self.radius.map_or(0, |radius| if self.causal { radius + 1 } else { 2 * radius + 1 })
    }

    pub fn table_width(&self) -> usize {
        padded::<T>(self.table_count())
    }

    /// Maps the table of relative positions once for all tasks.
    pub fn table<'s>(&self, arena: &mut Arena<'s, T>) -> Option<Table<'s, T>> {
        let shaw = self.attention.score.shaw()?;
        let source = self.parameters[0];
        let same = shaw.map == RelativeMap::Same;
        let map = if same { self.map } else { FeatureMap::Identity };
        let row_map = self.mapping.rows.as_ref().filter(|_| same);
        let (count, width, head_width) = (self.table_count(), self.table_width(), self.head_width);
        let table_dim = self.table_dim();
        let (tables, heads) = self.tables(shaw);
        let rows = arena.take(tables * width * head_width);
        let columns = arena.take(tables * width * head_width);
        let work = arena.take(row_map.map_or(0, |map| map.work_len(count)));
        let shifts = arena.take(tables);
        let group = self.dims.group().max(1);
        let of = |table: usize| {
            let given = if shaw.shared { 0 } else { table };
            let data = &source[given * shaw.rows() * table_dim..];
            RawRows::new(MapSide::Key(table * heads / group), Rows { data, stride: table_dim }, count)
        };
        let len = width * head_width;
        for (table, shift) in shifts.iter_mut().enumerate() {
            let (rows, columns) = (&mut rows[table * len..][..len], &mut columns[table * len..][..len]);
            // Of the rows that are seen: under a causal mask none for later tokens.
            let top = match row_map {
                Some(map) if self.exponential => {
                    let row_max = &mut columns[..count];
                    map.row_max(of(table), row_max, work);
                    row_max.iter().copied().filter(|top| top.is_finite()).fold(T::NEG_INFINITY, T::max)
                }
                None if map == FeatureMap::Exp => largest(&of(table).from.data[..count * table_dim]),
                _ => T::ZERO,
            };
            *shift = if top.is_finite() { top } else { T::ZERO };
            if let Some(map) = row_map {
                map.write(of(table), Shift::One(*shift), rows, head_width, work);
            } else {
                load_features((map, *shift), of(table).from, (count, table_dim), None, (rows, head_width));
            }
            rows[count * head_width..].fill(T::ZERO);
            transpose((rows, head_width), (width, head_width), (columns, width));
        }
        Some(Table { rows, columns, count, width, head_width, heads, shifts })
    }
}

#[derive(Clone, Copy)]
pub(super) struct Unit<'a, T> {
    pub sequence: Sequence<'a>,
    pub kv_head: usize,
    pub k: Rows<'a, T>,
    pub v: Rows<'a, T>,
    pub decay: Decay<'a, T>,
    /// The counted position of its first token.
    pub origin: f64,
}

/// Rows of a call that have no denominator where that is an error: the count and the first of those that are negative, and of those that are
/// too small although their own keys count.
pub(super) struct LostRows {
    wants_positive: bool,
    falls: bool,
    negative: [AtomicUsize; 2],
    erased: [AtomicUsize; 2],
}

impl LostRows {
    pub fn new(attention: &KernelizedAttention) -> Self {
        let none = || [AtomicUsize::new(0), AtomicUsize::new(usize::MAX)];
        Self {
            wants_positive: attention.wants_positive(),
            falls: attention.feature_map.is_exponential() && (attention.gate || attention.decay.is_some()),
            negative: none(),
            erased: none(),
        }
    }

    /// Whether a row has nothing to be divided by, so that it gives 0.
    pub fn gives_nothing<T: Real>(&self, denominator: T) -> bool {
        denominator.vanishes() || (self.wants_positive && denominator < T::ZERO)
    }

    /// Counts row `row` of `[batch, heads, queries]`, which gives nothing; `own` says whether its own key should have counted.
    pub fn see<T: Real>(&self, denominator: T, row: usize, own: impl FnOnce() -> bool) {
        let [count, first] = match denominator.vanishes() {
            false => &self.negative,
            true if self.falls && own() => &self.erased,
            true => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
        first.fetch_min(row, Ordering::Relaxed);
    }

    pub fn report(&self, operation: &'static str, dims: &Dims) -> Result<(), Error> {
        let found = |[count, first]: &[AtomicUsize; 2]| {
            let (rows, first) = (count.load(Ordering::Relaxed), first.load(Ordering::Relaxed));
            (rows > 0).then(|| {
                let head = first / dims.queries;
                (rows, head / dims.heads, head % dims.heads, first % dims.queries)
            })
        };
        if let Some((rows, batch, head, row)) = found(&self.negative) {
            return Err(Error::NegativeDenominators { operation, rows, batch, head, row });
        }
        if let Some((rows, batch, head, row)) = found(&self.erased) {
            return Err(Error::ErasedDenominators { operation, rows, batch, head, row });
        }
        Ok(())
    }
}

/// Checks log decays, and that each token brings one: as many queries as keys.
fn check_gates<T: Real>(
    operation: &'static str,
    dims: &Dims,
    offset: isize,
    sequences: &[Sequence<'_>],
    log_decay: &[T],
) -> Result<(), Error> {
    check_log_decay(operation, log_decay)?;
    let uneven = sequences.iter().find(|s| dims.queries > 0 && s.queries != s.keys + s.absent);
    let expected = || "as many as keys, and no offset, since each token brings a gate; or none, for a state".into();
    let got = || uneven.map_or(format!("offset {offset}"), |s| format!("{} for {} keys", s.queries, s.keys + s.absent));
    expect(uneven.is_none() && offset == 0, operation, "queries", expected, got)
}

/// Checks the states of keys outside a call, and that no query stands too close to them.
fn check_outside<T: Real>(attention: &KernelizedAttention, call: &Call<'_, T>) -> Result<(), Error> {
    let (Some(outside), Some(reach)) = (call.outside, attention.reach()) else { return Ok(()) };
    for state in outside {
        check_state(attention, &call.dims, state, "outside")?;
    }
    let [before, after] = outside.map(|state| state.heads().map(Head::from).any(|head| head.tokens() > 0));
    let (reach, keys, first) = (reach as isize, call.dims.keys as isize, call.mask.offset);
    let end = first + call.dims.queries as isize;
    let expected = || format!("queries at least {reach} keys away from those given as states");
    let got = || format!("queries at {first}..{end} of {keys} keys");
    expect((!before || first >= reach) && (!after || end + reach <= keys), attention.name(), "outside", expected, got)
}

impl<T: Real> Unit<'_, T> {
    /// Its part of a state.
    pub fn head<'s>(&self, state: &'s State<T>) -> Head<&'s [T]> {
        state.head(self.sequence.batch, self.kv_head).into()
    }

    /// What content and far sums fall by over a segment, to the token after it.
    pub fn passes(&self, segment: &Segment) -> [T; 2] {
        let place = |row: usize| row as isize + segment.offset;
        [self.decay.between(place(segment.from), place(segment.to)); 2]
    }

    /// The same over so many tokens behind the last key, where no row stands.
    pub fn idle(&self, tokens: usize) -> [T; 2] {
        let end = self.sequence.keys as isize;
        [self.decay.between(end, end + tokens as isize); 2]
    }

    /// Key indices bounded to the sequence.
    pub fn clamp(&self, key: isize) -> usize {
        key.clamp(0, self.sequence.keys as isize) as usize
    }

    /// Whether the keys `from..to` that are not ignored, and their values, are finite.
    pub fn is_finite(&self, problem: &Problem<'_, T>, from: usize, to: usize) -> bool {
        self.sequence.all(from..to, |from, count| {
            all_finite(self.v.skip(from), count, problem.dims.value_dim)
                && (!problem.content || problem.mapping.all_finite(self.k.skip(from), count))
        })
    }

    /// The largest finite exponent of the keys `from..to`, at least `before`.
    pub fn highest(&self, problem: &Problem<'_, T>, from: usize, to: usize, before: T) -> T {
        (from..to).filter(|&key| !self.sequence.ignores(key)).fold(before, |highest, key| {
            let top = problem.key_max(self, key);
            if top.is_finite() { highest.max(top) } else { highest }
        })
    }

    /// How many of the keys `from..to` the next piece takes under an exponential map, given the running maximum before
    /// it, and the maximum after it. A piece ends before a key that rises too far above what its first row knows.
    pub fn exp_piece(&self, problem: &Problem<'_, T>, from: usize, to: usize, before: T) -> (usize, T) {
        let mut highest = before;
        let mut limit = None;
        for key in from..to {
            if self.sequence.ignores(key) {
                continue;
            }
            let top = problem.key_max(self, key);
            if let Some(limit) = limit
                && top > limit
            {
                return (key - from, highest);
            }
            // NaN and infinities say nothing of scale; they spread by themselves.
            if top.is_finite() {
                highest = highest.max(top);
            }
            limit.get_or_insert(highest + T::from_f64(EXP_RISE));
        }
        (to - from, highest)
    }
}
