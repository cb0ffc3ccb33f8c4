//! A checked call, with everything that its tasks share.

use std::ops::Range;

use super::chunks::{CHUNK, Window, chunk_len};
use super::kernel;
use super::log_sum::PARTS;
use super::options::{Aft, Variant};
use super::state::{self, Head};
use crate::call::{Call, Dims, Keys, Mechanism, Order, Sequence, check_call, check_initial_state};
use crate::error::{Error, expect, refuse};
use crate::simd::Real;
use crate::simd::product::Product;
use crate::simd::rows::padded;

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
        let (row, across) = (padded::<T>(rank), length + CHUNK);
        let in_lines = |from: &[T]| {
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
        Self { u: in_lines(u), z: in_lines(z), row, rank, turned, across }
    }
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(aft: &'a Aft, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let operation = aft.name();
        let dims = call.dims;
        // Before the parameters are asked for: their sizes come from the options.
        aft.check_options(&dims)?;
        check_call(aft, call)?;
        let causal = call.mask.order == Order::Causal;
        check_initial_state(aft, call)?;
        let combination = "an initial state with an offset";
        let help = "use a causal mask with offset 0";
        refuse(call.initial_state.is_some() && call.mask.offset != 0, operation, combination, help)?;
        if let Variant::Conv2d { image: [height, width], .. } = aft.variant {
            let plain = !causal && call.mask.offset == 0;
            let combination = "an image under a causal mask, with an offset, lengths or packed sequences";
            let help = "use a bidirectional mask without an offset, and a padding mask for keys to be ignored";
            let refused = !plain || matches!(call.mask.keys, Keys::Lengths(_) | Keys::Packed { .. });
            refuse(refused, operation, combination, help)?;
            for (name, count) in [("queries", dims.queries), ("keys", dims.keys)] {
                let expected = || format!("{height} × {width} = {}, the places of the image", height * width);
                expect(count == height * width, operation, name, expected, || count.to_string())?;
            }
        }
        let sequences = call.mask.sequences(&dims);
        if let Some(length) = aft.table_length() {
            for sequence in &sequences {
                let past = call.initial_state.map_or(0, |state| state::position(state, sequence.batch));
                let first = call.mask.offset.saturating_add_unsigned(past);
                let end = first.saturating_add_unsigned(sequence.queries);
                // A causal row before the first key sees nothing and needs no bias.
                let fits = sequence.queries == 0 || ((causal || first >= 0) && end <= length as isize);
                let expected = || {
                    format!(
                        "positions in 0..{length}, the length of the table of biases (a longer table, or a shorter call)"
                    )
                };
                expect(fits, operation, "queries", expected, || format!("positions {first}..{end}"))?;
                let end = past + sequence.keys;
                let fits = !matches!(aft.variant, Variant::Full { .. }) || end <= length;
                let expected =
                    || format!("at most {length}, the length of the table of biases, with those of the initial state");
                expect(fits, operation, "keys", expected, || end.to_string())?;
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
            ring: if call.initial_state.is_some() { aft.reach(causal).0 } else { 0 },
            lend: false,
            bias,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.dims.head_dim == 0 || self.dims.heads == 0
    }

    pub fn mean(&self) -> usize {
        PARTS * self.width
    }

    /// How queries see keys.
    pub fn keys_of_queries(&self, sequence: &Sequence<'_>) -> Window {
        let (back, ahead) = self.aft.reach(self.causal);
        Window {
            outputs: sequence.queries,
            chunk_len: chunk_len(self.aft, sequence.queries),
            shift: self.call.mask.offset,
            back: back as isize,
            ahead: ahead as isize,
            before: true,
            // The windows of a full table hold all items.
            after: !self.causal && !self.full(),
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
        let (back, ahead) = self.aft.reach(self.causal);
        let outputs = sequence.keys + self.lent(sequence);
        Window {
            outputs,
            chunk_len: chunk_len(self.aft, outputs),
            shift: -self.call.mask.offset - self.lent(sequence) as isize,
            back: ahead as isize,
            ahead: back as isize,
            before: !self.causal && !self.full(),
            after: !self.full(),
            first: 0,
            end: sequence.queries as isize,
        }
    }

    /// One head's state before key 0.
    pub fn initial(&self, sequence: &Sequence<'_>, kv_head: usize) -> Option<Head<&'a [T]>> {
        self.call.initial_state.map(|state| Head::from(state.head(sequence.batch, kv_head)))
    }

    /// Tokens before key 0, where there is a table by position.
    fn past(&self, sequence: &Sequence<'_>) -> Option<usize> {
        self.aft.table_length()?;
        Some(self.call.initial_state.map_or(0, |state| state::position(state, sequence.batch)))
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

    /// The biases of one query and the keys from `key` on; 0 outside its window, and for a query before the first key.
    pub fn biases_of(&self, sequence: &Sequence<'_>, query: usize, key: isize, to: &mut [T]) {
        to.fill(T::ZERO);
        let place = query as isize + self.call.mask.offset;
        let position = place + self.origin(sequence);
        let (from, row) = match &self.bias {
            // These have walks of their own, or tiles only.
            Bias::Zero | Bias::Kernel { .. } | Bias::LowRank(_) => return,
            Bias::Table { .. } | Bias::Rows { by_position: true, .. } if position < 0 => return,
            Bias::Table { table, length } => {
                (-self.origin(sequence), &table[self.bias_row(sequence, query) * length..][..*length])
            }
            Bias::Rows { table, columns, .. } => {
                let (back, _) = self.aft.reach(self.causal);
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
        queries: Range<usize>,
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
        let u = &factors.u[(first + skipped as isize) as usize * factors.row..];
        let z = &factors.turned[(key + self.origin(sequence)) as usize..];
        let sizes = [queries.len() - skipped, count, factors.rank];
        Product::of((u, factors.row), (z, factors.across), (to, row), sizes).compute();
    }
}

/// Some of a call's work: the key heads `heads` of some sequences, with the query heads that read them.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub sequences: Range<usize>,
    pub heads: Range<usize>,
}

impl Block {
    pub fn whole<T: Real>(problem: &Problem<'_, T>) -> Self {
        Self { sequences: 0..problem.sequences.len(), heads: 0..problem.dims.kv_heads }
    }

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
    pub fn sequences<'p, T>(&self, problem: &'p Problem<'_, T>) -> &'p [Sequence<'p>] {
        &problem.sequences[self.sequences.clone()]
    }

    pub fn query_heads<T>(&self, problem: &Problem<'_, T>) -> usize {
        self.heads.len() * problem.dims.group()
    }

    /// The first row of each sequence and the number of rows in all, with the rows of all heads one after the other.
    pub fn rows<T>(&self, problem: &Problem<'_, T>) -> (Vec<usize>, usize) {
        let (mut starts, mut count) = (Vec::new(), 0);
        for sequence in self.sequences(problem) {
            starts.push(count);
            count += sequence.queries * self.query_heads(problem);
        }
        (starts, count)
    }
}
