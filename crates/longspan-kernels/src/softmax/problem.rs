//! A checked call, with everything that its tasks share.

use super::{SoftmaxAttention, state};
use crate::call::{
    Arena, Call, Dims, Order, Sequence, State, check_call, check_final_mask, check_initial_gradient, check_initial_mask,
};
use crate::error::{Error, expect};
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

/// A checked call.
pub(super) struct Problem<'a, T: 'static> {
    pub attention: &'a SoftmaxAttention,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    /// What scores are multiplied by.
    pub scale: T,
    pub causal: bool,
    pub offset: isize,
    pub sequences: Vec<Sequence<'a>>,
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
    /// From an initial state: every row sees all of them.
    pub past: bool,
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(attention: &'a SoftmaxAttention, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let operation = "softmax";
        let dims = call.dims;
        check_call(attention, call)?;
        if let Some(scale) = attention.scale {
            expect(scale.is_finite(), operation, "scale", || "a finite number".into(), || scale.to_string())?;
        }
        let causal = call.mask.order == Order::Causal;
        if let Some(initial) = call.initial_state {
            state::check(attention, &dims, initial, "initial_state")?;
            check_initial_mask(operation, &call.mask)?;
        }
        let scale = attention.scale.unwrap_or(1.0 / (dims.head_dim.max(1) as f64).sqrt());
        Ok(Self {
            attention,
            call,
            dims,
            scale: T::from_f64(scale),
            causal,
            offset: call.mask.offset,
            sequences: call.mask.sequences(&dims),
            head_width: padded::<T>(dims.head_dim),
            value_width: padded::<T>(dims.value_dim),
        })
    }

    /// Whether the call may have a final state, or the gradient of one, of this shape, and whether it fits.
    pub fn check_final_state(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        let operation = "softmax";
        state.check(operation, argument, state::shape(self.attention, &self.dims)?)?;
        check_final_mask(operation, &self.call.mask)?;
        for (batch, sequence) in self.sequences.iter().enumerate() {
            let own = (0..sequence.keys).filter(|&key| !sequence.padding.is_some_and(|ignored| ignored[key])).count();
            for kv_head in 0..self.dims.kv_heads {
                let past = self.call.initial_state.map_or(0, |state| state::count(state, batch, kv_head));
                state::check_room(self.attention, argument, past + own)?;
            }
        }
        Ok(())
    }

    /// Whether the gradient of the initial state can be had, and fits its place.
    pub fn check_initial_gradient(&self, to: &State<T>) -> Result<(), Error> {
        let operation = "softmax";
        to.check(operation, "gradient of the initial state", state::shape(self.attention, &self.dims)?)?;
        check_initial_gradient(operation, self.call)
    }

    /// The keys that rows of a head see: those of an initial state, then the call's own.
    pub fn segments(&self, sequence: &Sequence<'a>, kv_head: usize) -> [Segment<'a, T>; 2] {
        let own = Segment {
            k: self.call.k.rows(sequence.batch, kv_head).skip(sequence.key_start),
            v: self.call.v.rows(sequence.batch, kv_head).skip(sequence.key_start),
            keys: sequence.keys,
            padding: sequence.padding,
            past: false,
        };
        let past = match self.call.initial_state {
            None => Segment { keys: 0, padding: None, past: true, ..own },
            Some(state) => {
                let [keys, values, ..] = state.head(sequence.batch, kv_head);
                Segment {
                    k: Rows { data: keys, stride: self.dims.head_dim },
                    v: Rows { data: values, stride: self.dims.value_dim },
                    keys: state::count(state, sequence.batch, kv_head),
                    padding: None,
                    past: true,
                }
            }
        };
        [past, own]
    }

    /// Keys of a segment before this one may be seen by row `row`.
    pub fn end(&self, segment: &Segment<'_, T>, row: usize) -> usize {
        if segment.past || !self.causal {
            return segment.keys;
        }
        (row as isize + self.offset + 1).clamp(0, segment.keys as isize) as usize
    }

    /// Whether keys that some of the rows see and others do not hold a number that is not finite, which a weight of 0
    /// would carry to all of them.
    pub fn carries(&self, segment: &Segment<'_, T>, row: usize, rows: usize) -> bool {
        let (from, to) = (self.end(segment, row), self.end(segment, row + rows - 1));
        let finite = |key| {
            all_finite(segment.v.skip(key), 1, self.dims.value_dim)
                && all_finite(segment.k.skip(key), 1, self.dims.head_dim)
        };
        let ignored = |key: usize| segment.padding.is_some_and(|ignored| ignored[key]);
        !(from..to).all(|key| ignored(key) || finite(key))
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

/// Column `i` of a tile, row `row + i`, sees its lines, the keys from `key` on, up to `i` plus this.
pub(super) fn ahead<T: Real>(problem: &Problem<'_, T>, segment: &Segment<'_, T>, row: usize, key: usize) -> isize {
    match segment.past || !problem.causal {
        true => isize::MAX / 2,
        false => row as isize + problem.offset - key as isize,
    }
}

/// Fills what is not seen of a tile of `keys` lines, by mask or because the key is ignored.
pub(super) fn clear_unseen<T: Real>(
    (tile, columns): (&mut [T], usize),
    keys: usize,
    (ahead, ignored): (isize, Option<&[bool]>),
    fill: T,
) {
    for (line, numbers) in tile.chunks_exact_mut(columns).take(keys).enumerate() {
        let unseen = (line as isize - ahead).clamp(0, columns as isize) as usize;
        let unseen = if ignored.is_some_and(|ignored| ignored[line]) { columns } else { unseen };
        numbers[..unseen].fill(fill);
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
