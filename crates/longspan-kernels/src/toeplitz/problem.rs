//! A checked call: its units, what each row sees, and where a bias stands in the line of its head.

use super::state::{self, Head, SLOT, TOKENS};
use super::{Bias, OPERATION, Toeplitz};
use crate::call::{Call, Dims, Order, Scratch, Sequence, check_call, check_initial_state};
use crate::error::{Error, expect};
use crate::feature_map::mapping::Mapping;
use crate::simd::Real;
use crate::simd::block::all_finite;
use crate::simd::rows::{Rows, padded};

/// Rows and keys of a tile: 64 × 64 scores of `f32` are 16 KiB, so a tile, its keys and its values stay in the
/// second-level cache while the rows of a [`CHUNK`] pass by.
pub(super) const TILE: usize = 64;

/// Rows that meet a loaded block of keys before the next is loaded: mapping and transposing 64 keys takes about the
/// sixth part of one tile's products, and a chunk spreads that over four.
pub(super) const CHUNK: usize = 4 * TILE;

/// At most so many tasks share the keys of a unit, each with a line of biases' gradients of its own: that bounds their
/// memory, and the order of sums does not depend on the number of threads.
const SEGMENTS: usize = 8;

pub(super) struct Problem<'a, T: 'static> {
    pub toeplitz: &'a Toeplitz,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub mapping: Mapping<'a, T>,
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
    pub tokens: usize,
    /// Where the next token would go in the ring.
    pub slot: usize,
    /// Tokens that the ring can hold.
    pub near: usize,
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
        check_initial_state(toeplitz, call)?;
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

    /// Whether the bias reaches all tokens that a final state would keep.
    pub fn check_reach(&self, argument: &'static str) -> Result<(), Error> {
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

    pub fn heads(&self, unit: &Unit<'_, T>) -> std::ops::Range<usize> {
        self.dims.heads_of(unit.kv_head)
    }

    pub fn queries(&self, unit: &Unit<'_, T>, head: usize) -> Rows<'a, T> {
        self.call.q.rows(unit.sequence.batch, head).skip(unit.sequence.query_start)
    }

    pub fn table(&self, head: usize) -> &'a [T] {
        let entries = self.toeplitz.bias.entries();
        &self.call.parameters[0][head * entries..][..entries]
    }

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

    /// The keys before this one are seen by some row.
    pub fn seen(&self, unit: &Unit<'_, T>) -> isize {
        unit.sequence.queries.checked_sub(1).map_or(unit.begin(), |last| self.end(unit, last))
    }

    /// Whether some row sees key `key` of the call.
    pub fn is_seen(&self, unit: &Unit<'_, T>, key: usize) -> bool {
        (key as isize) < self.seen(unit) && !unit.sequence.ignores(key)
    }

    /// Segments of the keys of a unit, for the gradients of keys.
    pub fn segments(&self) -> usize {
        self.most_keys().div_ceil(CHUNK).clamp(1, SEGMENTS)
    }

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

    pub fn is_grid(&self) -> bool {
        matches!(self.toeplitz.bias, Bias::Grid { .. })
    }

    /// The place in the line of the bias between a key and a row.
    pub fn bias_index(&self, unit: &Unit<'_, T>, key: isize, row: usize) -> usize {
        // Places count from the first token of the sequence.
        let place = |token| self.toeplitz.bias.place(token - unit.begin());
        self.line_index(place(key) - place(self.stands(row))) as usize
    }
}

impl<'a, T: Real> Unit<'a, T> {
    /// The first key, negative where a state is gone on from.
    pub fn begin(&self) -> isize {
        self.past.map_or(0, |past| -(past.tokens as isize))
    }

    pub fn key_place(&self, key: usize) -> [usize; 3] {
        [self.sequence.batch, self.kv_head, self.sequence.key_start + key]
    }

    /// Whether there are tokens beyond the ring of an initial state.
    pub fn has_far(&self) -> bool {
        self.past.is_some_and(|past| !past.head.keys.is_empty())
    }

    /// Whether the keys `from..to` that are not ignored, and their values, are finite.
    pub fn is_finite(&self, problem: &Problem<'_, T>, from: isize, to: isize) -> bool {
        self.sequence.all(from.max(0) as usize..to.max(0) as usize, |from, count| {
            problem.mapping.all_finite(self.k.skip(from), count)
                && all_finite(self.v.skip(from), count, problem.dims.value_dim)
        })
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
