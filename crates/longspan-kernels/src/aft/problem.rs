//! A checked call, with everything that its tasks share.

use super::{Aft, Variant, kernel, state};
use crate::aft::log_sum::PARTS;
use crate::call::{Call, Dims, Keys, Mechanism, Order, Sequence, check_call};
use crate::error::{Error, expect};
use crate::simd::block::dot;
use crate::simd::product::{Band, Product};
use crate::simd::rows::{line, padded};
use crate::simd::{Real, dispatch};

/// Outputs of one chunk. A chunk loads the keys of its windows anew, so it should be no shorter than usual windows; the
/// means at its edges are kept, so they are a few per cent of the keys.
pub(super) const CHUNK: usize = 64;

/// A checked call.
pub(super) struct Problem<'a, T: 'static> {
    pub aft: &'a Aft,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub key_dim: usize,
    pub causal: bool,
    pub sequences: Vec<Sequence<'a>>,
    /// Channels in whole cache lines: the width of one row of a mean.
    pub width: usize,
    /// Keys of the initial state that windows still reach.
    pub ring: usize,
    /// Whether those have gradients.
    pub lend: bool,
    pub bias: Bias<'a, T>,
}

/// `w`, ready to be read.
pub(super) enum Bias<'a, T> {
    /// 0 everywhere.
    Zero,
    /// A row for each query, a column for each distance from `−back` on.
    Rows { table: &'a [T], columns: usize, by_position: bool },
    /// A kernel for each head.
    Kernel { kernels: Vec<T>, taps: usize },
    /// A row for each position of a query, a column for each position of a key.
    Table { table: &'a [T], length: usize },
    /// The same as a product.
    LowRank(LowRank<T>),
}

impl<T: Real> Bias<'_, T> {
    fn kernel(parameters: &[&[T]], taps: usize, normalized: bool) -> Self {
        let kernels = if normalized { kernel::normalized(parameters, taps) } else { parameters[0].to_vec() };
        Self::Kernel { kernels, taps }
    }
}

/// Two factors of a table, in rows of whole cache lines.
pub(super) struct LowRank<T> {
    /// `[length, row]`, zeros beyond the rank.
    pub u: Vec<T>,
    /// As `u`.
    pub z: Vec<T>,
    pub row: usize,
    pub rank: usize,
    /// `z` turned round, `[rank, across]`, and so much longer than the table that a tile may start anywhere.
    turned: Vec<T>,
    across: usize,
}

impl<T: Real> LowRank<T> {
    fn new(u: &[T], z: &[T], length: usize, rank: usize) -> Self {
        let line = line::<T>();
        let (row, across) = (rank.next_multiple_of(line), length + CHUNK);
        let padded = |from: &[T]| {
            let mut to = vec![T::ZERO; length * row];
            for (to, from) in to.chunks_exact_mut(row).zip(from.chunks_exact(rank)) {
                to[..rank].copy_from_slice(from);
            }
            to
        };
        let mut turned = vec![T::ZERO; rank * across];
        for (position, z) in z.chunks_exact(rank).enumerate() {
            z.iter().enumerate().for_each(|(n, &z)| turned[n * across + position] = z);
        }
        Self { u: padded(u), z: padded(z), row, rank, turned, across }
    }
}

/// From how many keys with biases on tiles are faster than walking from pair to pair.
pub(super) const TILED: usize = 12;

/// How far to both sides biases reach: the keys `t − back ..= t + ahead` of the query at `t`.
pub(super) fn reach(aft: &Aft, causal: bool) -> (usize, usize) {
    match aft.variant {
        Variant::Simple => (0, 0),
        Variant::Local { window, .. } => (window - 1, if causal { 0 } else { window - 1 }),
        // A table has no pair that is farther apart.
        Variant::Full { length, .. } => (length - 1, if causal { 0 } else { length - 1 }),
        Variant::Conv { taps, .. } => {
            let back = if causal { taps - 1 } else { (taps - 1) / 2 };
            (back, taps - 1 - back)
        }
        // A kernel's rows, with all that stands between them.
        Variant::Conv2d { image: [_, width], taps, .. } => {
            let reach = |taps: [usize; 2]| (taps[0] * width).saturating_add(taps[1]);
            let back = taps.map(|taps| (taps - 1) / 2);
            (reach(back), reach([0, 1].map(|axis| taps[axis] - 1 - back[axis])))
        }
    }
}

/// Checks the options that every call and state shares.
pub(super) fn check_options(aft: &Aft, dims: &Dims) -> Result<(), Error> {
    let operation = aft.name();
    expect(
        dims.value_dim == dims.head_dim,
        operation,
        "value_dim",
        || format!("head_dim, {}: gate, keys and values share their channels", dims.head_dim),
        || dims.value_dim.to_string(),
    )?;
    let (name, size, length) = match aft.variant {
        Variant::Simple => return Ok(()),
        Variant::Full { length, rank } => ("rank", rank.unwrap_or(1), Some(length)),
        Variant::Local { window, length } => ("window", window, length),
        Variant::Conv { taps, .. } => ("taps", taps, None),
        Variant::Conv2d { image, taps, .. } => {
            // Sides whose product is as small as a sequence's length, and kernels no larger.
            let range = |sides: [usize; 2]| match sides {
                [0, _] | [_, 0] => 0,
                [a, b] => a.saturating_mul(b),
            };
            let fits = (1..1 << 24).contains(&range(image));
            let expected = || "sides of at least 1 whose product is below 2²⁴".into();
            expect(fits, operation, "image", expected, || format!("{image:?}"))?;
            let fits = (1..1 << 24).contains(&range(taps));
            return expect(fits, operation, "taps", expected, || format!("{taps:?}"));
        }
    };
    // Marks of a state are numbers of its type: whole ones up to 2²⁴.
    expect(
        (1..1 << 24).contains(&size),
        operation,
        name,
        || "between 1 and 2²⁴ (aft-simple is the mechanism without biases)".into(),
        || size.to_string(),
    )?;
    expect(
        length.is_none_or(|length| (1..1 << 24).contains(&length)),
        operation,
        "length",
        || "between 1 and 2²⁴".into(),
        || format!("{length:?}"),
    )
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(aft: &'a Aft, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let operation = aft.name();
        let dims = call.dims;
        // Before the parameters are asked for: their sizes come from the options.
        check_options(aft, &dims)?;
        check_call(aft, call)?;
        let causal = call.mask.order == Order::Causal;
        if let Some(initial) = call.initial_state {
            state::check(aft, &dims, initial, "initial_state")?;
            if !causal || call.mask.offset != 0 {
                return Err(Error::Unsupported {
                    operation,
                    combination: "an initial state with a bidirectional mask or an offset",
                    mend: "use a causal mask with offset 0",
                });
            }
        }
        if let Variant::Conv2d { image: [height, width], .. } = aft.variant {
            let plain = !causal && call.mask.offset == 0;
            if !plain || matches!(call.mask.keys, Keys::Lengths(_) | Keys::Packed { .. }) {
                return Err(Error::Unsupported {
                    operation,
                    combination: "an image under a causal mask, with an offset, lengths or packed sequences",
                    mend: "use a bidirectional mask without an offset, and a padding mask for keys to be ignored",
                });
            }
            for (name, count) in [("queries", dims.queries), ("keys", dims.keys)] {
                let expected = || format!("{height} × {width} = {}, the places of the image", height * width);
                expect(count == height * width, operation, name, expected, || count.to_string())?;
            }
        }
        let sequences = call.mask.sequences(&dims);
        if let Some(length) = table_length(aft) {
            for sequence in &sequences {
                let past = call.initial_state.map_or(0, |state| state::position(state, sequence.batch));
                check_positions(operation, sequence, call.mask.offset, past, causal, length)?;
                expect(
                    !matches!(aft.variant, Variant::Full { .. }) || past + sequence.keys <= length,
                    operation,
                    "keys",
                    || format!("at most {length}, the length of the table of biases, with those of the initial state"),
                    || (past + sequence.keys).to_string(),
                )?;
            }
        }
        let bias = match aft.variant {
            Variant::Simple => Bias::Zero,
            Variant::Full { length, rank: None } => Bias::Table { table: call.parameters[0], length },
            Variant::Full { length, rank: Some(rank) } => {
                Bias::LowRank(LowRank::new(call.parameters[0], call.parameters[1], length, rank))
            }
            Variant::Local { window, length } => {
                Bias::Rows { table: call.parameters[0], columns: 2 * window - 1, by_position: length.is_some() }
            }
            Variant::Conv { taps, normalized } => Bias::kernel(call.parameters, taps, normalized),
            Variant::Conv2d { taps, normalized, .. } => Bias::kernel(call.parameters, taps[0] * taps[1], normalized),
        };
        Ok(Self {
            aft,
            call,
            dims,
            key_dim: aft.key_dim(&dims),
            causal,
            sequences,
            width: padded::<T>(dims.head_dim),
            ring: if call.initial_state.is_some() { reach(aft, causal).0 } else { 0 },
            lend: false,
            bias,
        })
    }

    /// Numbers in a mean.
    pub fn mean(&self) -> usize {
        PARTS * self.width
    }

    /// How queries see keys.
    pub fn keys_of_queries(&self, sequence: &Sequence<'_>) -> Window {
        let (back, ahead) = reach(self.aft, self.causal);
        Window {
            outputs: sequence.queries,
            shift: self.call.mask.offset,
            back: back as isize,
            ahead: ahead as isize,
            before: true,
            after: !self.causal,
            first: -(self.ring.min(self.past(sequence).unwrap_or(self.ring)) as isize),
            end: sequence.keys as isize,
        }
    }

    /// Keys of the initial state that stand before key 0 when keys see queries.
    pub fn lent(&self, sequence: &Sequence<'_>) -> usize {
        if self.lend { self.keys_of_queries(sequence).first.unsigned_abs() } else { 0 }
    }

    /// How keys see queries: the same turned round, with those that the initial state lends.
    pub fn queries_of_keys(&self, sequence: &Sequence<'_>) -> Window {
        let (back, ahead) = reach(self.aft, self.causal);
        Window {
            outputs: sequence.keys + self.lent(sequence),
            shift: -self.call.mask.offset - self.lent(sequence) as isize,
            back: ahead as isize,
            ahead: back as isize,
            before: !self.causal,
            after: true,
            first: 0,
            end: sequence.queries as isize,
        }
    }

    /// Tokens before key 0, where there is a table by position.
    fn past(&self, sequence: &Sequence<'_>) -> Option<usize> {
        table_length(self.aft)?;
        Some(self.call.initial_state.map_or(0, |state| state::position(state, sequence.batch)))
    }

    /// Whether biases are so many that tiles are worth their while.
    pub fn tiled(&self) -> bool {
        let (back, ahead) = reach(self.aft, self.causal);
        self.full() || back + ahead >= TILED
    }

    /// Whether there is a bias for every pair, so that chunks of outputs share their items.
    pub fn full(&self) -> bool {
        matches!(self.bias, Bias::Table { .. } | Bias::LowRank(_))
    }

    /// The position of key 0, where there is a table by position.
    pub fn origin(&self, sequence: &Sequence<'_>) -> isize {
        self.past(sequence).unwrap_or(0) as isize
    }

    /// The table's row for one query, where there is a table.
    pub fn bias_row(&self, sequence: &Sequence<'_>, query: usize) -> usize {
        match self.bias {
            Bias::Rows { by_position: false, .. } => query,
            _ => (query as isize + self.call.mask.offset + self.origin(sequence)) as usize,
        }
    }

    /// The bias of one pair in a window.
    pub fn pair(&self, sequence: &Sequence<'_>, query: usize, key: isize) -> T {
        let mut bias = [T::ZERO];
        self.biases_of(sequence, query, key, &mut bias);
        bias[0]
    }

    /// The biases of one query and the keys from `key` on; 0 outside its window, and for a query before the first key.
    fn biases_of(&self, sequence: &Sequence<'_>, query: usize, key: isize, to: &mut [T]) {
        to.fill(T::ZERO);
        let place = query as isize + self.call.mask.offset;
        let position = place + self.origin(sequence);
        let (from, row) = match &self.bias {
            // Kernels have walks of their own.
            Bias::Zero | Bias::Kernel { .. } => return,
            Bias::Table { .. } | Bias::LowRank(_) | Bias::Rows { by_position: true, .. } if position < 0 => return,
            Bias::Table { table, length } => {
                (-self.origin(sequence), &table[self.bias_row(sequence, query) * length..][..*length])
            }
            Bias::LowRank(factors) => {
                let u = &factors.u[self.bias_row(sequence, query) * factors.row..][..factors.row];
                for (position, to) in ((key + self.origin(sequence)) as usize..).zip(to) {
                    *to = dot(u, &factors.z[position * factors.row..][..factors.row]);
                }
                return;
            }
            Bias::Rows { table, columns, .. } => {
                let (back, _) = reach(self.aft, self.causal);
                (place - back as isize, &table[self.bias_row(sequence, query) * columns..][..*columns])
            }
        };
        let skipped = (from - key).clamp(0, to.len() as isize);
        let start = (key - from).clamp(0, row.len() as isize) as usize;
        let to = &mut to[skipped as usize..];
        let count = to.len().min(row.len() - start);
        to[..count].copy_from_slice(&row[start..start + count]);
    }

    /// The biases of `count` keys from `key` on for some queries, in rows of `row`.
    pub fn tile(
        &self,
        sequence: &Sequence<'_>,
        queries: std::ops::Range<usize>,
        key: isize,
        count: usize,
        to: &mut [T],
        row: usize,
    ) {
        let Bias::LowRank(factors) = &self.bias else {
            for (query, to) in queries.zip(to.chunks_exact_mut(row)) {
                self.biases_of(sequence, query, key, &mut to[..count]);
            }
            return;
        };
        let first = queries.start as isize + self.call.mask.offset + self.origin(sequence);
        // Rows before the first key see nothing.
        let skipped = (-first).clamp(0, queries.len() as isize) as usize;
        let (unseen, to) = to.split_at_mut(skipped * row);
        unseen.fill(T::ZERO);
        if skipped == queries.len() {
            return;
        }
        dispatch(Product {
            a: &factors.u[(first + skipped as isize) as usize * factors.row..],
            a_row: factors.row,
            a_column: 1,
            b: &factors.turned[(key + self.origin(sequence)) as usize..],
            b_row: factors.across,
            c: to,
            c_row: row,
            rows: queries.len() - skipped,
            columns: count,
            depth: factors.rank,
            accumulate: false,
            a_band: Band::ALL,
            c_band: Band::ALL,
        });
    }
}

/// How many positions the table of biases has, if they are positions.
pub(super) fn table_length(aft: &Aft) -> Option<usize> {
    match aft.variant {
        Variant::Full { length, .. } | Variant::Local { length: Some(length), .. } => Some(length),
        _ => None,
    }
}

/// Whether a table by position has a row for every query that sees something.
fn check_positions(
    operation: &'static str,
    sequence: &Sequence<'_>,
    offset: isize,
    past: usize,
    causal: bool,
    length: usize,
) -> Result<(), Error> {
    let first = offset.saturating_add_unsigned(past);
    let end = first.saturating_add_unsigned(sequence.queries);
    // A causal row before the first key sees nothing and needs no bias.
    let fits = sequence.queries == 0 || ((causal || first >= 0) && end <= length as isize);
    expect(
        fits,
        operation,
        "queries",
        || format!("positions in 0..{length}, the length of the table of biases (a longer table, or a shorter call)"),
        || format!("positions {first}..{end}"),
    )
}

/// Some of a call's work: the key heads `heads` of some sequences, with the query heads that read them.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub sequences: std::ops::Range<usize>,
    pub heads: std::ops::Range<usize>,
}

impl Block {
    /// Cuts a call into blocks whose rows are no more than `most` numbers, or else one key head's.
    pub fn all<T: Real>(problem: &Problem<'_, T>, most: usize) -> Vec<Self> {
        let heads = problem.dims.kv_heads;
        let row = problem.dims.group() * problem.mean();
        let mut blocks: Vec<Self> = Vec::new();
        let mut taken = usize::MAX;
        for (index, sequence) in problem.sequences.iter().enumerate() {
            let len = sequence.queries * row;
            if len * heads > most {
                let step = (most / len).max(1);
                let cut = |start| Self { sequences: index..index + 1, heads: start..(start + step).min(heads) };
                blocks.extend((0..heads).step_by(step).map(cut));
                taken = usize::MAX;
            } else if let (Some(last), true) = (blocks.last_mut(), taken.saturating_add(len * heads) <= most) {
                last.sequences.end += 1;
                taken += len * heads;
            } else {
                blocks.push(Self { sequences: index..index + 1, heads: 0..heads });
                taken = len * heads;
            }
        }
        blocks
    }
}

/// Which items an output sees, and how: output `n` stands at item `n + shift`; the items from `back` before to `ahead`
/// after count with a bias of their own, those before and after with none, or not at all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub outputs: usize,
    pub shift: isize,
    pub back: isize,
    pub ahead: isize,
    /// Whether items before the window count.
    pub before: bool,
    /// Whether items after it count.
    pub after: bool,
    /// The first item there is; negative where an initial state lends some.
    pub first: isize,
    /// One past the last.
    pub end: isize,
}

impl Window {
    fn clamp(&self, item: isize) -> isize {
        item.clamp(self.first, self.end.max(self.first))
    }

    /// The items with a bias for output `n`.
    pub fn near(&self, n: usize) -> (isize, isize) {
        self.range(n, n + 1)
    }

    /// The items in any window of the outputs `from..to`: those before are before every window, those after are after.
    pub fn range(&self, from: usize, to: usize) -> (isize, isize) {
        let start = self.clamp(from as isize + self.shift - self.back);
        (start, self.clamp(to as isize + self.shift + self.ahead).max(start))
    }

    /// The items that output `n` sees.
    pub fn seen(&self, n: usize) -> (isize, isize) {
        let (near, behind) = self.near(n);
        (if self.before { self.first } else { near }, if self.after { self.end.max(self.first) } else { behind })
    }

    pub fn chunks(&self) -> usize {
        self.outputs.div_ceil(CHUNK)
    }

    /// The outputs of a chunk.
    pub fn chunk(&self, index: usize) -> (usize, usize) {
        (index * CHUNK, ((index + 1) * CHUNK).min(self.outputs))
    }
}

/// Chunks of outputs of every sequence and head, in the order in which their edges stand.
pub(super) struct Chunks {
    /// One a sequence.
    pub windows: Vec<Window>,
    pub heads: usize,
    /// Chunks of all earlier sequences, and of all.
    starts: Vec<usize>,
}

impl Chunks {
    pub fn new(windows: Vec<Window>, heads: usize) -> Self {
        let mut starts = vec![0];
        starts.extend(windows.iter().scan(0, |sum, window| {
            *sum += window.chunks();
            Some(*sum)
        }));
        Self { windows, heads, starts }
    }

    /// Chunks of all sequences and heads.
    pub fn tasks(&self) -> usize {
        self.starts[self.windows.len()] * self.heads
    }

    /// Which one a chunk is.
    pub fn index(&self, sequence: usize, head: usize, chunk: usize) -> usize {
        self.starts[sequence] * self.heads + head * self.windows[sequence].chunks() + chunk
    }

    /// The sequence, head and chunk of an index.
    pub fn task(&self, index: usize) -> (usize, usize, usize) {
        let sequence = self.starts.partition_point(|&start| start * self.heads <= index) - 1;
        let (rest, chunks) = (index - self.starts[sequence] * self.heads, self.windows[sequence].chunks());
        (sequence, rest / chunks, rest % chunks)
    }
}
