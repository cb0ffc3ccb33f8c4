//! A checked call, with everything that its tasks share.

use std::ops::Range;

use super::state::{self, Cache};
use super::{SoftmaxAttention, check_options};
use crate::call::{Arena, Call, Dims, Order, Sequence, check_call, check_initial_state};
use crate::error::Error;
use crate::feature_map::elementwise::copy_rows;
use crate::simd::Real;
use crate::simd::block::{all_finite, scale_by, transpose};
use crate::simd::product::{Band, Product};
use crate::simd::rows::{Rows, padded};

/// Queries of a chunk: four AVX-512 registers, the width of the matrix product's own block.
pub(super) const ROWS: usize = 64;

/// Keys of a tile. 64 × 64 scores of `f32` are 16 KiB; with the chunk's queries and outputs of 64 features that is the
/// first-level cache.
pub(super) const KEYS: usize = 64;

pub(super) struct Problem<'a, T: 'static> {
    pub attention: &'a SoftmaxAttention,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub scale: T,
    /// The query at position `p` sees the keys from `p − behind` to `p + ahead`.
    behind: isize,
    ahead: isize,
    pub sequences: Vec<Sequence<'a>>,
    /// Which rows of the initial state's rings hold an ignored key; empty where none does.
    past_padding: Vec<bool>,
    /// Widths of k and v in blocks: whole cache lines.
    pub head_width: usize,
    pub value_width: usize,
}

/// Keys of one head that stand one after the other.
#[derive(Clone, Copy)]
pub(super) struct Segment<'a, T> {
    pub k: Rows<'a, T>,
    pub v: Rows<'a, T>,
    pub keys: usize,
    /// `true` means ignored; `None` where no key is.
    pub padding: Option<&'a [bool]>,
    /// The position of the first, where a call's own first key is at 0.
    at: isize,
    /// The row of the initial state's cache that holds the first; `None` for a call's own keys.
    pub row: Option<usize>,
}

impl<T> Segment<'_, T> {
    pub fn ignores(&self, key: usize) -> bool {
        self.padding.is_some_and(|ignored| ignored[key])
    }
}

/// Beyond every distance, offsets of at most a quarter of the numbers included, and far from overflow.
const EVERYTHING: isize = isize::MAX / 2;

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(attention: &'a SoftmaxAttention, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let dims = call.dims;
        check_call(attention, call)?;
        check_options(attention)?;
        check_initial_state(attention, call)?;
        let behind = attention.window.map_or(EVERYTHING, |window| window as isize - 1);
        let ahead = if call.mask.order == Order::Causal { 0 } else { behind };
        let mut past_padding = Vec::new();
        if let Some(initial) = call.initial_state {
            let ignored = || initial.each(state::PRESENT).flatten().map(|&present| present == T::ZERO);
            if ignored().any(|ignored| ignored) {
                past_padding.extend(ignored());
            }
        }
        let scale = attention.scale.unwrap_or(1.0 / (dims.head_dim.max(1) as f64).sqrt());
        Ok(Self {
            attention,
            call,
            dims,
            scale: T::from_f64(scale),
            behind,
            ahead,
            past_padding,
            sequences: call.mask.sequences(&dims),
            head_width: padded::<T>(dims.head_dim),
            value_width: padded::<T>(dims.value_dim),
        })
    }

    /// Whether the cache has room for the keys of the call, so that it may have a final state.
    pub fn check_room(&self, argument: &'static str) -> Result<(), Error> {
        if self.attention.window.is_some() {
            return Ok(());
        }
        for sequence in &self.sequences {
            for kv_head in 0..self.dims.kv_heads {
                state::check_room(self.attention, argument, self.cache(sequence, kv_head).after(sequence).rows())?;
            }
        }
        Ok(())
    }

    /// What the cache holds before a call's own keys.
    pub fn cache(&self, sequence: &Sequence<'_>, kv_head: usize) -> Cache {
        let state = self.call.initial_state;
        state.map_or(Cache::empty(self.attention), |state| Cache::of(self.attention, state, sequence.batch, kv_head))
    }

    /// The keys of a head in the order of their positions: those of an initial state, whose ring may begin anywhere, then the
    /// call's own.
    pub fn segments<'s>(&'s self, sequence: &Sequence<'s>, kv_head: usize) -> [Segment<'s, T>; 3] {
        let own = Segment {
            k: self.call.k.rows(sequence.batch, kv_head).skip(sequence.key_start),
            v: self.call.v.rows(sequence.batch, kv_head).skip(sequence.key_start),
            keys: sequence.keys,
            padding: sequence.padding,
            at: 0,
            row: None,
        };
        let Some(state) = self.call.initial_state else {
            let none = Segment { keys: 0, padding: None, ..own };
            return [none, none, own];
        };
        let cache = self.cache(sequence, kv_head);
        let unit = sequence.batch * self.dims.kv_heads + kv_head;
        let [keys, values, ..] = state.head(sequence.batch, kv_head);
        let padding = self.past_padding.chunks(self.attention.rows().max(1)).nth(unit);
        let mut at = -(cache.rows() as isize);
        let [older, newer] = cache.in_order().map(|rows| {
            let segment = Segment {
                k: Rows { data: keys, stride: self.dims.head_dim }.skip(rows.start),
                v: Rows { data: values, stride: self.dims.value_dim }.skip(rows.start),
                keys: rows.len(),
                padding: padding.map(|padding| &padding[rows.clone()]),
                at,
                row: Some(rows.start),
            };
            at += rows.len() as isize;
            segment
        });
        [older, newer, own]
    }

    /// The keys of a segment that a row sees, if they are not ignored.
    pub fn seen(&self, segment: &Segment<'_, T>, row: usize) -> Range<usize> {
        let position = row as isize + self.call.mask.offset - segment.at;
        let within = |key: isize| key.clamp(0, segment.keys as isize) as usize;
        let from = within(position - self.behind);
        from..within(position + self.ahead + 1).max(from)
    }

    /// The keys of a segment that any of the rows sees.
    pub fn seen_by_any(&self, segment: &Segment<'_, T>, row: usize, rows: usize) -> Range<usize> {
        self.seen(segment, row).start..self.seen(segment, row + rows - 1).end
    }

    /// Whether keys that some of the rows see and others do not hold a number that is not finite, which a weight of 0
    /// would carry to all of them.
    pub fn carries(&self, segment: &Segment<'_, T>, row: usize, rows: usize) -> bool {
        let by_all = self.seen(segment, row + rows - 1).start..self.seen(segment, row).end;
        let finite = |key| {
            all_finite(segment.v.skip(key), 1, self.dims.value_dim)
                && all_finite(segment.k.skip(key), 1, self.dims.head_dim)
        };
        !self.seen_by_any(segment, row, rows).all(|key| by_all.contains(&key) || segment.ignores(key) || finite(key))
    }

    /// What is seen of a tile: a line for each key of a segment from `key` on, a column for each row from `row` on.
    pub fn band(&self, segment: &Segment<'_, T>, row: usize, key: usize) -> Band {
        let apart = segment.at + key as isize - row as isize - self.call.mask.offset;
        Band { from: apart - self.ahead, to: apart + self.behind + 1 }
    }

    /// The keys of a segment that the cache after the call holds, and the row of each there.
    pub fn kept(
        &self,
        segment: &Segment<'_, T>,
        sequence: &Sequence<'_>,
        kv_head: usize,
    ) -> impl Iterator<Item = (usize, usize)> {
        let (cache, window) = (self.cache(sequence, kv_head), self.attention.window);
        let beyond = window.map_or(0, |window| sequence.keys as isize - segment.at - window as isize);
        let first = beyond.clamp(0, segment.keys as isize) as usize;
        let kept = (first..segment.keys).filter(|&key| !segment.ignores(key)).enumerate();
        kept.map(move |(n, key)| (key, segment.row.map_or_else(|| cache.row(key, n), |first| first + key)))
    }

    /// Loads rows of a caller's tensor, times `factor`, and their transpose with lines of `columns`.
    pub fn load_block(
        &self,
        from: Rows<'_, T>,
        (rows, width): (usize, usize),
        factor: T,
        block: &mut [T],
        (transposed, columns): (&mut [T], usize),
    ) {
        let row_length = padded::<T>(width);
        copy_rows(from, (rows, width), None, (block, row_length));
        scale_by(&mut block[..rows * row_length], factor);
        block[rows * row_length..columns * row_length].fill(T::ZERO);
        transpose((block, row_length), (columns, row_length), (transposed, columns));
    }
}

/// Products of the rows of a segment with those of a block: `to = rows · blockᵀ`, a line for each key from `key` on.
pub(super) fn against<T: Real>(
    (rows, width): (Rows<'_, T>, usize),
    keys: usize,
    (transposed, columns): (&[T], usize),
    to: &mut [T],
    band: Band,
) {
    Product::of((rows.data, rows.stride), (transposed, columns), (to, columns), [keys, columns, width])
        .c_band(band)
        .compute();
}

/// Fills what is not seen of a tile of `keys` lines, by mask or because the key is ignored.
pub(super) fn clear_unseen<T: Real>(
    (tile, columns): (&mut [T], usize),
    keys: usize,
    (band, ignored): (Band, Option<&[bool]>),
    fill: T,
) {
    for (line, numbers) in tile.chunks_exact_mut(columns).take(keys).enumerate() {
        let (from, to) = band.columns(line, line, columns);
        let (from, to) = if ignored.is_some_and(|ignored| ignored[line]) { (columns, columns) } else { (from, to) };
        numbers[..from].fill(fill);
        numbers[to..].fill(fill);
    }
}

/// Rows of a segment as the right side of a product: as they stand where that can be read in whole registers, else
/// through a block, with 0 for ignored ones.
pub(super) fn right_side<'b, T: Real>(
    (rows, width): (Rows<'b, T>, usize),
    keys: usize,
    ignored: Option<&[bool]>,
    block: &'b mut [T],
) -> (&'b [T], usize) {
    let row_length = padded::<T>(width);
    if ignored.is_none() && row_length == width {
        return (rows.data, rows.stride);
    }
    copy_rows(rows, (keys, width), ignored, (block, row_length));
    (block, row_length)
}

/// Chunks of rows over all sequences and heads: the tasks of a forward pass.
pub(super) struct Chunks {
    /// Chunks before each sequence, and after the last.
    before: Vec<usize>,
    heads: usize,
}

impl Chunks {
    pub fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let heads = problem.dims.heads;
        let mut before = vec![0];
        for sequence in &problem.sequences {
            before.push(before[before.len() - 1] + heads * sequence.queries.div_ceil(ROWS));
        }
        Self { before, heads }
    }

    pub fn len(&self) -> usize {
        self.before[self.before.len() - 1]
    }

    /// Sequence, head and chunk of a task. Late chunks come first: under a causal mask they are the longest.
    pub fn task(&self, task: usize) -> (usize, usize, usize) {
        let task = self.len() - 1 - task;
        let sequence = self.before.partition_point(|&before| before <= task) - 1;
        let within = task - self.before[sequence];
        (sequence, within % self.heads, within / self.heads)
    }
}

/// Memory of one chunk of rows, forward and backward.
pub(super) struct Block<'s, T> {
    /// `s·q`, ROWS × head_width, and its transpose.
    pub q: &'s mut [T],
    pub q_columns: &'s mut [T],
    /// Scores or weights, a line of ROWS for each key of a tile.
    pub tile: &'s mut [T],
    /// Values of a tile where they cannot be read as they stand.
    pub v: &'s mut [T],
    /// Outputs, or gradients of outputs, ROWS × value_width.
    pub o: &'s mut [T],
    /// One number a row each.
    pub highest: &'s mut [T],
    pub sums: &'s mut [T],
    pub factors: &'s mut [T],
}

impl<'s, T: Real> Block<'s, T> {
    pub fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        Self {
            q: arena.take(ROWS * problem.head_width),
            q_columns: arena.take(ROWS * problem.head_width),
            tile: arena.take(ROWS * KEYS),
            v: arena.take(KEYS * problem.value_width),
            o: arena.take(ROWS * problem.value_width),
            highest: arena.take(ROWS),
            sums: arena.take(ROWS),
            factors: arena.take(ROWS),
        }
    }
}
