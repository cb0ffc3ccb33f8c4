//! A checked call, with what its tasks share.

use super::{Gate, GatedAttention};
use crate::call::{Call, Dims, Mechanism, Sequence, check_call, check_initial_state, check_log_decay};
use crate::error::{Error, expect};
use crate::simd::Real;
use crate::simd::block::all_finite;
use crate::simd::rows::{Rows, padded, pieces};

/// Tokens of a chunk: as for kernelized attention, what stands in one fits the second cache.
pub(super) const CHUNK: usize = 64;

/// Tokens whose decays to each other are taken one by one, and rows of a triangle that are solved one by one. A whole number of
/// any register.
pub(super) const BLOCK: usize = 16;

pub(super) struct Problem<'a, T: 'static> {
    pub attention: &'a GatedAttention,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub sequences: Vec<Sequence<'a>>,
    /// Length of rows of queries and keys in blocks.
    pub row: usize,
    pub wide: usize,
    /// What outputs are multiplied by.
    pub scale: T,
    log_decay: Option<&'a [T]>,
    beta: Option<&'a [T]>,
}

/// A key/value head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    pub sequence: Sequence<'a>,
    pub kv_head: usize,
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(attention: &'a GatedAttention, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let (operation, mut dims) = (attention.name(), call.dims);
        check_call(attention, call)?;
        attention.check_options(&dims, &call.mask)?;
        check_initial_state(attention, call)?;
        let mut given = call.parameters.iter().copied();
        let log_decay = if attention.gate == Gate::None { None } else { given.next() };
        let beta = if attention.is_delta() { given.next() } else { None };
        check_gates(operation, log_decay, beta)?;
        let sequences = call.mask.sequences(&dims);
        attention.check_sequences(&dims, &sequences)?;
        if dims.queries == 0 {
            // For a state alone no head compares anything.
            dims.heads = 0;
        }
        let (row, wide) = (padded::<T>(dims.head_dim), padded::<T>(dims.value_dim));
        let scale = T::from_f64(attention.scale(dims.head_dim));
        Ok(Self { attention, call, dims, sequences, row, wide, scale, log_decay, beta })
    }

    pub fn units(&self) -> usize {
        self.sequences.len() * self.dims.kv_heads
    }

    pub fn unit(&self, index: usize) -> Unit<'a> {
        let kv_heads = self.dims.kv_heads.max(1);
        Unit { sequence: self.sequences[index / kv_heads], kv_head: index % kv_heads }
    }

    /// Blocks of rows that a chunk compares with its keys: those of the query heads, and its keys under the delta rule. One at least:
    /// decays of keys are formed on the way.
    pub fn operands(&self) -> usize {
        (self.dims.group() + usize::from(self.attention.is_delta())).max(1)
    }

    /// Whether each channel of a key has a decay of its own.
    pub fn by_channel(&self) -> bool {
        self.attention.gate == Gate::Channel && self.dims.head_dim > 0
    }

    /// Numbers of a token's gates in blocks: one, or a row.
    pub fn gate_row(&self) -> usize {
        if self.by_channel() { self.row } else { 1 }
    }

    pub fn queries(&self, unit: &Unit<'_>, head: usize) -> Rows<'a, T> {
        self.call.q.rows(unit.sequence.batch, head).skip(unit.sequence.query_start)
    }

    pub fn keys(&self, unit: &Unit<'_>) -> Rows<'a, T> {
        self.call.k.rows(unit.sequence.batch, unit.kv_head).skip(unit.sequence.key_start)
    }

    pub fn values(&self, unit: &Unit<'_>) -> Rows<'a, T> {
        self.call.v.rows(unit.sequence.batch, unit.kv_head).skip(unit.sequence.key_start)
    }

    /// Where a unit's tokens stand among those of a parameter.
    pub fn place(&self, unit: &Unit<'_>) -> usize {
        unit.sequence.place(&self.dims, unit.kv_head)
    }

    /// The gates of a unit's tokens; no numbers where there are none.
    pub fn log_decays(&self, unit: &Unit<'_>) -> Rows<'a, T> {
        let stride = self.attention.gate_len(self.dims.head_dim);
        Rows { data: self.log_decay.unwrap_or_default(), stride }.skip(self.place(unit))
    }

    /// `β` of a unit's tokens, if there are any.
    pub fn betas(&self, unit: &Unit<'_>) -> Option<&'a [T]> {
        self.beta.map(|beta| &beta[self.place(unit)..])
    }

    /// Whether what some tokens bring to the state is finite.
    fn brings_numbers(&self, unit: &Unit<'_>, first: usize, count: usize) -> bool {
        let Dims { head_dim, value_dim, .. } = self.dims;
        let gates = self.log_decays(unit);
        let finite = |first: usize, count: usize| {
            all_finite(self.keys(unit).skip(first), count, head_dim)
                && all_finite(self.values(unit).skip(first), count, value_dim)
                && all_finite(gates.skip(first), count, gates.stride)
                && self.betas(unit).is_none_or(|beta| beta[first..][..count].iter().all(|beta| beta.is_finite()))
        };
        let keys = unit.sequence.keys;
        unit.sequence.all(first.min(keys)..(first + count).min(keys), finite)
    }

    /// The chunks of a unit: first token and length. A token that brings what is no number is a chunk of its own, since a weight of 0
    /// times that is none either. A gradient, which keeps a state for each chunk, asks for no more cuts after the first.
    pub fn chunks(&self, unit: &Unit<'_>, gradient: bool) -> Vec<(usize, usize)> {
        let mut chunks = Vec::new();
        let mut lost = false;
        for (first, count) in pieces(0..unit.tokens(), CHUNK) {
            let mut from = first;
            if !lost && !self.brings_numbers(unit, first, count) {
                for token in (first..first + count).filter(|&token| !self.brings_numbers(unit, token, 1)) {
                    if !lost {
                        chunks.extend((from < token).then_some((from, token - from)));
                        chunks.push((token, 1));
                        from = token + 1;
                        lost = gradient;
                    }
                }
            }
            let end = first + count;
            chunks.extend((from < end).then_some((from, end - from)));
        }
        chunks
    }
}

impl Unit<'_> {
    /// Its tokens, with ignored ones after the last key.
    pub fn tokens(&self) -> usize {
        self.sequence.keys + self.sequence.absent
    }

    pub fn ignores(&self, token: usize) -> bool {
        !self.sequence.has(token)
    }
}

/// Refuses gates out of range; what is no number spreads by itself.
pub(super) fn check_gates<T: Real>(
    operation: &'static str,
    log_decay: Option<&[T]>,
    beta: Option<&[T]>,
) -> Result<(), Error> {
    log_decay.map_or(Ok(()), |log_decay| check_log_decay(operation, log_decay))?;
    let two = T::from_f64(2.0);
    let wrong = beta.and_then(|beta| beta.iter().find(|&&beta| beta < T::ZERO || beta > two));
    let got = || wrong.map_or(String::new(), T::to_string);
    expect(wrong.is_none(), operation, "beta", || "numbers from 0 to 2".into(), got)
}
