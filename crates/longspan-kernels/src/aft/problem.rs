//! A checked call, with everything that its tasks share.

use super::{Aft, Variant, kernel, state};
use crate::error::{Error, expect};
use crate::mask::{Order, Sequence};
use crate::mechanism::{Call, Mechanism, check_call};
use crate::real::Real;
use crate::shape::Dims;
use crate::simd::Ops;
use crate::simd::log_sum::PARTS;

/// Outputs of one chunk. A chunk loads the keys of its windows anew, so it should be no shorter than usual windows; the
/// means at its edges are kept, so they are a few per cent of the keys.
pub(super) const CHUNK: usize = 64;

/// A checked call.
pub(super) struct Problem<'a, T: 'static> {
    pub aft: &'a Aft,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub key_dim: usize,
    pub ops: &'static Ops<T>,
    pub causal: bool,
    pub sequences: Vec<Sequence<'a>>,
    /// Channels in whole cache lines: the width of one row of a mean.
    pub width: usize,
    /// Keys of the initial state that windows still reach.
    pub ring: usize,
    pub bias: Bias<'a, T>,
}

/// `w`, ready to be read.
pub(super) enum Bias<'a, T> {
    /// 0 everywhere.
    Zero,
    /// A row for each query, a column for each distance from `−back` on.
    Rows { table: &'a [T], columns: usize, by_position: bool },
    /// A kernel for each head over the same columns.
    Kernel { kernels: Vec<T>, taps: usize },
}

/// How far to both sides biases reach: the keys `t − back ..= t + ahead` of the query at `t`.
pub(super) fn reach(aft: &Aft, causal: bool) -> (usize, usize) {
    match aft.variant {
        Variant::Simple => (0, 0),
        Variant::Local { window, .. } => (window - 1, if causal { 0 } else { window - 1 }),
        Variant::Conv { taps, .. } => {
            let back = if causal { taps - 1 } else { (taps - 1) / 2 };
            (back, taps - 1 - back)
        }
    }
}

/// Checks the options that every call and state shares.
pub(super) fn check_options<T: Real>(aft: &Aft, dims: &Dims) -> Result<(), Error> {
    let operation = Mechanism::<T>::name(aft);
    expect(
        dims.value_dim == dims.head_dim,
        operation,
        "value_dim",
        || format!("head_dim, {}: gate, keys and values share their channels", dims.head_dim),
        || dims.value_dim.to_string(),
    )?;
    let (name, size, length) = match aft.variant {
        Variant::Simple => return Ok(()),
        Variant::Local { window, length } => ("window", window, length),
        Variant::Conv { taps, .. } => ("taps", taps, None),
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
        length.is_none_or(|length| length < 1 << 24),
        operation,
        "length",
        || "less than 2²⁴".into(),
        || format!("{length:?}"),
    )
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(aft: &'a Aft, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let operation = Mechanism::<T>::name(aft);
        let dims = call.dims;
        // Before the parameters are asked for: their sizes come from the options.
        check_options::<T>(aft, &dims)?;
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
        let sequences = call.mask.sequences(&dims);
        if let Variant::Local { length: Some(length), .. } = aft.variant {
            for sequence in &sequences {
                let past = call.initial_state.map_or(0, |state| state::position(state, sequence.batch));
                check_positions(operation, sequence, call.mask.offset, past, causal, length)?;
            }
        }
        let bias = match aft.variant {
            Variant::Simple => Bias::Zero,
            Variant::Local { window, length } => {
                Bias::Rows { table: call.parameters[0], columns: 2 * window - 1, by_position: length.is_some() }
            }
            Variant::Conv { taps, normalized } => Bias::Kernel {
                kernels: if normalized {
                    kernel::normalized(call.parameters, taps)
                } else {
                    call.parameters[0].to_vec()
                },
                taps,
            },
        };
        Ok(Self {
            aft,
            call,
            dims,
            key_dim: Mechanism::<T>::key_dim(aft, &dims),
            ops: T::ops(),
            causal,
            sequences,
            width: dims.head_dim.next_multiple_of(64 / size_of::<T>()),
            ring: if call.initial_state.is_some() { reach(aft, causal).0 } else { 0 },
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
            first: -(self.ring as isize),
            end: sequence.keys as isize,
        }
    }

    /// How keys see queries: the same turned round.
    pub fn queries_of_keys(&self, sequence: &Sequence<'_>) -> Window {
        let (back, ahead) = reach(self.aft, self.causal);
        Window {
            outputs: sequence.keys,
            shift: -self.call.mask.offset,
            back: ahead as isize,
            ahead: back as isize,
            before: !self.causal,
            after: true,
            first: 0,
            end: sequence.queries as isize,
        }
    }

    /// The biases of one query, by distance from the start of its window on. Only where its window holds a key.
    pub fn bias(&self, sequence: &Sequence<'_>, head: usize, query: usize) -> &[T] {
        match &self.bias {
            Bias::Zero => &[],
            Bias::Rows { table, columns, .. } => &table[self.bias_row(sequence, query) * columns..][..*columns],
            Bias::Kernel { kernels, taps } => &kernels[head * taps..][..*taps],
        }
    }

    /// The table's row for one query, where there is a table.
    pub fn bias_row(&self, sequence: &Sequence<'_>, query: usize) -> usize {
        match self.bias {
            Bias::Rows { by_position: true, .. } => {
                let past = self.call.initial_state.map_or(0, |state| state::position(state, sequence.batch));
                (query as isize + self.call.mask.offset) as usize + past
            }
            _ => query,
        }
    }

    /// The bias of one pair in a window.
    pub fn pair(&self, sequence: &Sequence<'_>, head: usize, query: usize, key: isize) -> T {
        let (back, _) = reach(self.aft, self.causal);
        let column = key - (query as isize + self.call.mask.offset) + back as isize;
        self.bias(sequence, head, query).get(column as usize).copied().unwrap_or(T::ZERO)
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
        self.span(n, n + 1)
    }

    /// The items in any window of the outputs `from..to`: those before are before every window, those after are after.
    pub fn span(&self, from: usize, to: usize) -> (isize, isize) {
        let start = self.clamp(from as isize + self.shift - self.back);
        (start, self.clamp(to as isize + self.shift + self.ahead).max(start))
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
