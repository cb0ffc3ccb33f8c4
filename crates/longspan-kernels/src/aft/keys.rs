//! The keys and values of one head as items of a walk.

use std::ops::Range;

use super::problem::Problem;
use super::state::Head;
use super::tiles::Blocks;
use super::walk::{Factors, Items, clear, join_items};
use crate::aft::log_sum::{FactorMeans, Tokens};
use crate::aft::running::{FactorTokens, SumTokens};
use crate::call::Sequence;
use crate::simd::rows::{Ahead, Rows, padded};
use crate::simd::{Real, dispatch};

/// The keys of one head of a sequence; those before 0 stand in the initial state's ring.
pub(super) struct KeyItems<'a, T> {
    keys: Rows<'a, T>,
    values: Rows<'a, T>,
    ignored: Option<&'a [bool]>,
    /// Keys of the sequence; there may be places after the last.
    count: usize,
    initial: Option<Head<&'a [T]>>,
    key_dim: usize,
    head_dim: usize,
    width: usize,
    blocks: Option<Blocks<'a, T>>,
}

impl<'a, T: Real> KeyItems<'a, T> {
    pub fn new(problem: &Problem<'a, T>, sequence: &Sequence<'a>, kv_head: usize) -> Self {
        let call = problem.call;
        Self {
            keys: call.k.rows(sequence.batch, kv_head).skip(sequence.key_start),
            values: call.v.rows(sequence.batch, kv_head).skip(sequence.key_start),
            ignored: sequence.padding,
            count: sequence.keys,
            initial: call.initial_state.map(|state| Head::from(state.head(sequence.batch, kv_head))),
            key_dim: problem.key_dim,
            head_dim: problem.dims.head_dim,
            width: problem.width,
            blocks: None,
        }
    }

    /// The same, with blocks of them at hand.
    pub fn with(self, blocks: Option<Blocks<'a, T>>) -> Self {
        Self { blocks, ..self }
    }

    /// The same in some channels.
    pub fn columns(self, columns: Range<usize>) -> Self {
        let narrow = |rows: Rows<'a, T>| Rows { data: &rows.data[columns.start.min(rows.data.len())..], ..rows };
        Self {
            keys: narrow(self.keys),
            values: narrow(self.values),
            initial: self.initial.map(|head| head.columns(columns.clone())),
            key_dim: columns.len(),
            head_dim: columns.len(),
            width: padded::<T>(columns.len()),
            blocks: None,
            ..self
        }
    }

    /// Whether key `j` takes part in nothing.
    pub fn ignores(&self, key: isize) -> bool {
        key >= self.count as isize || self.ignored.is_some_and(|ignored| key >= 0 && ignored[key as usize])
    }

    /// Some keys and values as they stand in the caller's tensors, if all are there and none is ignored.
    pub fn tokens(&self, from: isize, count: usize) -> Option<Tokens<'a, T>> {
        let there = from >= 0 && from as usize + count <= self.count;
        let plain = there && self.ignored.is_none_or(|all| !all[from as usize..][..count].contains(&true));
        plain.then(|| Tokens {
            keys: self.keys.skip(from as usize),
            key_dim: self.key_dim,
            values: self.values.skip(from as usize),
            queries: None,
            count,
            head_dim: self.head_dim,
        })
    }

    /// The values of the keys `from..to`, as far as they are there, to be read soon.
    pub fn ahead(&self, from: isize, to: isize) -> Ahead<T> {
        Ahead::new(self.values, from, to, self.count, self.head_dim)
    }

    /// The mean of `count` keys from `from` on, whose numerator may be 0.
    pub fn sum_weights(&self, from: isize, count: usize, mean: &mut [T], block: &mut [T]) {
        match self.tokens(from, count) {
            Some(tokens) => dispatch(SumTokens { tokens, numerators: false, to: mean }),
            None => join_items(self.load(from, count, block), mean),
        }
    }

    /// Key `j` and its value, unless it is ignored.
    pub fn token(&self, key: isize) -> Option<(&'a [T], &'a [T])> {
        if key < 0 {
            return self.initial?.ring_row(key.unsigned_abs(), self.key_dim, self.head_dim);
        }
        if self.ignores(key) {
            return None;
        }
        let key = key as usize;
        Some((self.keys.row(key, self.key_dim), self.values.row(key, self.head_dim)))
    }
}

/// One token as a mean.
pub(super) fn write_item<T: Real>(token: Option<(&[T], &[T])>, width: usize, item: &mut [T]) {
    let (x, rest) = item.split_at_mut(width);
    let (bias, rest) = rest.split_at_mut(width);
    let (numerator, denominator) = rest.split_at_mut(width);
    bias.fill(T::ZERO);
    denominator.fill(T::ONE);
    let Some((key, value)) = token else {
        // e^{−∞} is 0 whatever it is multiplied with, as long as that is finite.
        x.fill(T::NEG_INFINITY);
        numerator.fill(T::ZERO);
        return;
    };
    if key.len() == value.len() {
        x[..key.len()].copy_from_slice(key);
        x[key.len()..].fill(T::ZERO);
    } else {
        x.fill(key[0]);
    }
    numerator[..value.len()].copy_from_slice(value);
    numerator[value.len()..].fill(T::ZERO);
}

impl<T: Real> Items<T> for KeyItems<'_, T> {
    fn load<'b>(&'b self, from: isize, count: usize, block: &'b mut [T]) -> &'b [T] {
        let mean = crate::aft::log_sum::PARTS * self.width;
        let block = &mut block[..count * mean];
        for (item, key) in block.chunks_exact_mut(mean).zip(from..) {
            write_item(self.token(key), self.width, item);
        }
        block
    }

    fn sum(&self, from: isize, count: usize, mean: &mut [T], block: &mut [T]) {
        match self.tokens(from, count) {
            Some(tokens) => dispatch(SumTokens { tokens, numerators: true, to: mean }),
            None => join_items(self.load(from, count, block), mean),
        }
    }

    fn factor(&self, from: isize, count: usize, to: Factors<'_, T>, block: &mut [T]) -> T {
        let Factors { reference, numerators, denominators } = to;
        match self.tokens(from, count) {
            Some(tokens) => dispatch(FactorTokens { tokens, reference, numerators, denominators }),
            None => dispatch(FactorMeans { items: self.load(from, count, block), reference, numerators, denominators }),
        }
    }

    fn blocks(&self) -> Option<Blocks<'_, T>> {
        self.blocks
    }

    fn start(&self, mean: &mut [T]) {
        clear(mean);
        if let Some(initial) = &self.initial {
            initial.read(mean);
        }
    }
}
