//! The keys and values of one head as items.

use std::ops::Range;

use super::items::{Blocks, Items};
use super::log_sum::{FactorMeans, Factors, PARTS, clear, join_items, write_item};
use super::problem::Problem;
use super::state::Head;
use super::tokens::{FactorTokens, SumTokens, Tokens};
use crate::call::{Sequence, View};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};

/// The keys of one head of a sequence; those before 0 stand in the initial state's ring. There may be places after the last.
pub(super) struct KeyItems<'a, T> {
    all: Tokens<'a, T>,
    ignored: Option<&'a [bool]>,
    initial: Option<Head<&'a [T]>>,
    /// Numbers in a row of a mean.
    width: usize,
    blocks: Option<Blocks<'a, T>>,
}

impl<'a, T: Real> KeyItems<'a, T> {
    pub fn new(problem: &Problem<'a, T>, sequence: &Sequence<'a>, kv_head: usize) -> Self {
        let rows = |view: &View<'a, T>| view.rows(sequence.batch, kv_head).skip(sequence.key_start);
        let all = Tokens {
            keys: rows(&problem.call.k),
            key_dim: problem.key_dim,
            values: rows(&problem.call.v),
            count: sequence.keys,
            head_dim: problem.dims.head_dim,
        };
        let initial = problem.initial(sequence, kv_head);
        Self { all, ignored: sequence.padding, initial, width: problem.width, blocks: None }
    }

    /// The same, with blocks of them at hand.
    pub fn with(self, blocks: Option<Blocks<'a, T>>) -> Self {
        Self { blocks, ..self }
    }

    /// The same in some channels.
    pub fn columns(self, columns: Range<usize>) -> Self {
        let (keys, values) = (self.all.keys.skip_columns(columns.start), self.all.values.skip_columns(columns.start));
        let all = Tokens { keys, key_dim: columns.len(), values, head_dim: columns.len(), ..self.all };
        let initial = self.initial.map(|head| head.columns(columns.clone()));
        Self { all, initial, width: padded::<T>(columns.len()), blocks: None, ..self }
    }

    /// Some keys and values as they stand in the caller's tensors, if all are there and none is ignored.
    pub fn tokens(&self, from: isize, count: usize) -> Option<Tokens<'a, T>> {
        let first = usize::try_from(from).ok().filter(|first| first + count <= self.all.count)?;
        let plain = self.ignored.is_none_or(|all| !all[first..][..count].contains(&true));
        let (keys, values) = (self.all.keys.skip(first), self.all.values.skip(first));
        plain.then_some(Tokens { keys, values, count, ..self.all })
    }

    /// The mean of `count` keys from `from` on, whose numerator may be 0 if `numerators` are not wanted.
    pub fn sum_of(&self, from: isize, count: usize, numerators: bool, mean: &mut [T], block: &mut [T]) {
        match self.tokens(from, count) {
            Some(tokens) => dispatch(SumTokens { tokens, numerators, to: mean }),
            None => join_items(self.load(from, count, block), mean),
        }
    }

    /// Key `j` and its value, unless it is ignored.
    pub fn token(&self, key: isize) -> Option<(&'a [T], &'a [T])> {
        let Tokens { keys, key_dim, values, count, head_dim } = self.all;
        if key < 0 {
            return self.initial?.ring_row(key.unsigned_abs(), key_dim, head_dim);
        }
        let key = key as usize;
        let there = key < count && self.ignored.is_none_or(|ignored| !ignored[key]);
        there.then(|| (keys.row(key, key_dim), values.row(key, head_dim)))
    }
}

impl<T: Real> Items<T> for KeyItems<'_, T> {
    fn load<'b>(&'b self, from: isize, count: usize, block: &'b mut [T]) -> &'b [T] {
        let mean = PARTS * self.width;
        let block = &mut block[..count * mean];
        for (item, key) in block.chunks_exact_mut(mean).zip(from..) {
            write_item(self.token(key), self.width, item);
        }
        block
    }

    fn sum(&self, from: isize, count: usize, mean: &mut [T], block: &mut [T]) {
        self.sum_of(from, count, true, mean, block);
    }

    fn factor(&self, from: isize, count: usize, to: Factors<'_, T>, block: &mut [T]) -> T {
        match self.tokens(from, count) {
            Some(tokens) => dispatch(FactorTokens { tokens, to }),
            None => dispatch(FactorMeans { items: self.load(from, count, block), to }),
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
