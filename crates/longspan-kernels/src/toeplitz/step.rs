//! One token at a time: the weights of the ring's tokens one by one, and the sum of all earlier ones.

use smallvec::SmallVec;

use super::state::{self, EXPONENT, Head, SLOT, TOKENS, Writer};
use super::{Bias, OPERATION, Toeplitz};
use crate::call::{Arena, Dims, State, Step, StepMemory, Token, check_token, step_rows, token_dims};
use crate::error::{Error, expect};
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::{FeatureDots, Shift, load_exponentials, load_features};
use crate::feature_map::rows::{RawRows, RowMap, Side};
use crate::simd::block::{add_scaled, all_finite, dot, largest, multiply, scale_by};
use crate::simd::rows::{Rows, padded};
use crate::simd::token::{AddWeighedValues, ReadToken};
use crate::simd::{Real, dispatch};
use crate::threads;

impl Step for Toeplitz {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        self.bias.check()?;
        let dims = token_dims(self, token, token.k, state)?;
        self.check_feature_map(&dims)?;
        let Dims { batch, kv_heads, head_dim, value_dim, .. } = dims;
        check_token(self, &dims, token, state, out)?;
        let bias = token.parameters[0];
        let mut most = 0;
        for index in 0..batch * kv_heads {
            let tokens = Head::from(state.head(0, index)).mark(TOKENS) + 1;
            state::check_reach(self, "state", tokens)?;
            most = most.max(tokens);
        }
        let entries = self.bias.entries();
        // A table may be far longer than what a token reads of it.
        let read = self.bias.entries_before(most);
        for table in bias.chunks_exact(entries).map(|table| &table[read.clone()]) {
            if !all_finite(Rows { data: table, stride: table.len() }, 1, table.len()) {
                let wrong = table.iter().find(|b| !b.is_finite());
                expect(wrong.is_none(), OPERATION, "bias", || "finite numbers".into(), || format!("{wrong:?}"))?;
            }
        }

        let group = dims.group();
        let numbers = state.numbers().len();
        // Not prepared: that takes longer than one row of each side does.
        let own = token.parameters.get(1..).unwrap_or_default();
        let row_map = RowMap::new(self.feature_map, &dims, own);
        let run = |(index, (head, out)): (usize, (Head<&mut [T]>, &mut [T])), memory: &mut StepMemory<T>| {
            let token = HeadToken {
                toeplitz: self,
                row_map: row_map.as_ref(),
                kv_head: index % kv_heads,
                q: &token.q[index * group * head_dim..][..group * head_dim],
                k: &token.k[index * head_dim..][..head_dim],
                v: &token.v[index * value_dim..][..value_dim],
                bias: &bias[index % kv_heads * group * entries..][..group * entries],
            };
            token.step(head, out, memory);
        };
        let heads = state.heads_mut().map(Head::from).zip(step_rows(out, group * value_dim)).enumerate();
        threads::share_many_with(numbers, heads, StepMemory::new, run);
        Ok(())
    }
}

/// The token of one key/value head and the query heads that read it.
struct HeadToken<'a, T: 'static> {
    toeplitz: &'a Toeplitz,
    row_map: Option<&'a RowMap<'a, T>>,
    kv_head: usize,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    bias: &'a [T],
}

impl<T: Real> HeadToken<'_, T> {
    fn step(&self, state: Head<&mut [T]>, out: &mut [T], memory: &mut StepMemory<T>) {
        let (head_dim, value_dim) = (self.k.len(), self.v.len());
        let features = self.toeplitz.feature_map.features(head_dim);
        let near = self.toeplitz.bias.near();
        let (wide, room) = (padded::<T>(features), (state.mark(TOKENS) + 1).min(near));
        let work_len = self.row_map.map_or(0, |map| map.work_len(1));
        let numbers = wide + 3 * padded::<T>(room) + padded::<T>(value_dim) + padded::<T>(work_len);
        let mut arena = Arena::new(memory.take(numbers));
        let (row, work) = (arena.take(wide), arena.take(work_len));
        let exponent = self.map(Side::Key(self.kv_head), self.k, row, work);
        let mut writer = Writer::new(near, state);
        writer.push(&row[..features], exponent, self.v, T::ONE);
        let state = writer.head;
        let tokens = state.mark(TOKENS);
        let oldest = (state.mark(SLOT) + near - tokens) % near.max(1);
        // The tokens in their order stand in two ranges of the ring.
        let until = (oldest + tokens).min(near);
        let ranges = [(oldest..until, 0), (0..tokens - (until - oldest), until - oldest)];
        let (weights, dots) = (arena.take(tokens), arena.take(tokens));
        let (exponentials, far_sum) = (arena.take(padded::<T>(tokens)), arena.take(value_dim));
        let entries = self.toeplitz.bias.entries();
        let nearest = self.entries(tokens);
        for (n, (q, out)) in self.q.chunks_exact(head_dim.max(1)).zip(step_rows(out, value_dim)).enumerate() {
            let q_shift = self.map(Side::Query(self.kv_head * self.group() + n), q, row, work);
            let q = &row[..features];
            let bias = &self.bias[n * entries..][..entries];
            // The exponents first, because weights count from the largest.
            match &nearest {
                Entries::Run(run) => weights.copy_from_slice(&bias[run.clone()]),
                Entries::Each(each) => {
                    for (weight, entry) in weights.iter_mut().zip(each) {
                        *weight = entry.map_or(T::NEG_INFINITY, |entry| bias[entry]);
                    }
                }
            }
            let own = ranges.clone().into_iter().flat_map(|(slots, _)| state.ring_exponents.get(slots).unwrap_or(&[]));
            let mut level = if state.ring_exponents.is_empty() {
                largest(weights)
            } else {
                weights.iter().zip(own.clone()).fold(T::NEG_INFINITY, |level, (&b, &own)| level.max(b + own))
            };
            let far = self.toeplitz.bias.far().map_or(T::NEG_INFINITY, |entry| bias[entry]);
            level = level.max(far + state.marks[EXPONENT]);
            if !level.is_finite() {
                level = T::ZERO;
            }
            let mut shift = level;
            if !state.ring_exponents.is_empty() {
                // The large numbers first: their difference is exact where it matters.
                weights.iter_mut().zip(own).for_each(|(weight, &own)| *weight += own - level);
                shift = T::ZERO;
            }
            load_exponentials(weights, shift, exponentials);
            out.fill(T::ZERO);
            let mut sum = T::ZERO;
            for (slots, first) in &ranges {
                let dots = &mut dots[*first..][..slots.len()];
                let exponentials = &exponentials[*first..][..slots.len()];
                let keys = &state.ring_keys[slots.start * features..];
                let values = &state.ring_values[slots.start * (value_dim + 1)..];
                dispatch(FeatureDots {
                    map: FeatureMap::Identity,
                    shift: T::ZERO,
                    rows: keys,
                    width: features,
                    q,
                    to: dots,
                });
                multiply(dots, exponentials);
                // What is ignored has no number that counts, whatever it is.
                let counts = |row: &[T], exponential: T| row[value_dim] == T::ONE && exponential != T::ZERO;
                let rows = values.chunks_exact(value_dim + 1);
                if rows.clone().zip(exponentials).all(|(row, &exponential)| counts(row, exponential)) {
                    sum += dispatch(AddWeighedValues { rows: values, weights: dots, to: out });
                    continue;
                }
                for ((row, &exponential), &weight) in rows.zip(exponentials).zip(&*dots) {
                    if counts(row, exponential) {
                        add_scaled(out, weight, &row[..value_dim]);
                        sum += weight;
                    }
                }
            }
            let weight = (far + (state.marks[EXPONENT] - level)).exp();
            if weight > T::ZERO {
                far_sum.fill(T::ZERO);
                dispatch(ReadToken { sum: state.sum, q, out: far_sum });
                add_scaled(out, weight, far_sum);
                sum += weight * dot(q, state.keys);
            }
            if !self.toeplitz.normalize {
                scale_by(out, (level + q_shift).exp());
            } else if sum.vanishes() {
                out.fill(T::ZERO);
            } else {
                scale_by(out, T::ONE / sum);
            }
        }
    }

    /// The entries of the last `tokens` tokens, the oldest first.
    fn entries(&self, tokens: usize) -> Entries {
        let bias = &self.toeplitz.bias;
        if let Bias::Table { first, count, .. } = *bias
            && let Ok(start) = usize::try_from(1 - first - tokens as isize)
            && start + tokens <= count
        {
            return Entries::Run(start..start + tokens);
        }
        // A grid's ring holds the image from its first pixel on; elsewhere only the difference counts.
        let query = tokens as isize - 1;
        Entries::Each((0..=query).map(|key| bias.between(query, key)).collect())
    }

    fn group(&self) -> usize {
        self.q.len() / self.k.len().max(1)
    }

    /// `φ(x)` relative to the exponent that it returns.
    fn map(&self, side: Side, x: &[T], to: &mut [T], work: &mut [T]) -> T {
        let (map, row) = (self.toeplitz.feature_map, to.len());
        if let Some(row_map) = self.row_map {
            let mut top = [T::ZERO];
            row_map.write(RawRows::one(side, x), Shift::Own(&mut top), to, row, work);
            return if map.is_exponential() { top[0] } else { T::ZERO };
        }
        let top = if map == FeatureMap::Exp { largest(x) } else { T::ZERO };
        let shift = if top.is_finite() { top } else { T::ZERO };
        load_features((map, shift), Rows { data: x, stride: x.len() }, (1, x.len()), None, (to, row));
        shift
    }
}

/// Which entries of the table some tokens have.
#[allow(clippy::large_enum_variant)]
enum Entries {
    /// Neighbours.
    Run(std::ops::Range<usize>),
    /// One for each token, where it has any. On the stack, for a step allocates nothing.
    Each(SmallVec<[Option<usize>; 64]>),
}
