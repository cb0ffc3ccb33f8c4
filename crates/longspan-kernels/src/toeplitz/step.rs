//! One token at a time: the weights of the ring's tokens one by one, and the sum of all earlier ones.

use rayon::prelude::*;

use super::problem::top;
use super::state::{self, EXPONENT, Head, SLOT, TOKENS, Writer};
use super::{OPERATION, Toeplitz};
use crate::error::{Error, expect};
use crate::feature_map::FeatureMap;
use crate::mechanism::{Token, check_token, step_rows, token_dims};
use crate::real::Real;
use crate::scratch::padded;
use crate::shape::{Dims, Rows};
use crate::simd::Ops;
use crate::state::State;

/// Numbers of state below which handing heads to other threads costs more than it saves: a rayon hand-over takes a few
/// microseconds, in which one thread reads about this many.
const PARALLEL_NUMBERS: usize = 1 << 17;

/// Takes one token into `state` and writes its output.
pub(super) fn step<T: Real>(
    toeplitz: &Toeplitz,
    token: &Token<'_, T>,
    state: &mut State<T>,
    out: &mut [T],
) -> Result<(), Error> {
    toeplitz.bias.check()?;
    let dims = token_dims(toeplitz, token, token.k, state)?;
    let Dims { batch, kv_heads, head_dim, value_dim, .. } = dims;
    state::check(toeplitz, &dims, state, "state")?;
    check_token(toeplitz, &dims, token, out)?;
    let bias = token.parameters[0];
    let wrong = bias.iter().find(|b| !b.is_finite());
    expect(wrong.is_none(), OPERATION, "bias", || "finite numbers".into(), || format!("{wrong:?}"))?;
    for index in 0..batch * kv_heads {
        state::check_reach(toeplitz, "state", Head::from(state.head(0, index)).mark(TOKENS) + 1)?;
    }

    let group = dims.group();
    let numbers = state.numbers().len();
    let ops = T::ops();
    let run = |(index, (head, out)): (usize, (Head<&mut [T]>, &mut [T]))| {
        let entries = toeplitz.bias.entries();
        let token = HeadToken {
            toeplitz,
            ops,
            q: &token.q[index * group * head_dim..][..group * head_dim],
            k: &token.k[index * head_dim..][..head_dim],
            v: &token.v[index * value_dim..][..value_dim],
            bias: &bias[index % kv_heads * group * entries..][..group * entries],
        };
        token.step(head, out);
    };
    let tasks = state.heads_mut().map(Head::from).zip(step_rows(out, group * value_dim)).enumerate();
    if numbers < PARALLEL_NUMBERS {
        tasks.for_each(run);
    } else {
        let tasks: Vec<_> = tasks.collect();
        tasks.into_par_iter().for_each(run);
    }
    Ok(())
}

/// The token of one key/value head and the query heads that read it.
struct HeadToken<'a, T: 'static> {
    toeplitz: &'a Toeplitz,
    ops: &'static Ops<T>,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    /// The tables of the query heads.
    bias: &'a [T],
}

impl<T: Real> HeadToken<'_, T> {
    fn step(&self, state: Head<&mut [T]>, out: &mut [T]) {
        let (head_dim, value_dim) = (self.k.len(), self.v.len());
        let near = self.toeplitz.bias.near();
        let mut features = vec![T::ZERO; padded::<T>(head_dim)];
        let exponent = self.map(self.k, &mut features);
        let mut writer = Writer::new(near, state);
        writer.push(&features[..head_dim], exponent, self.v, T::ONE);
        let state = writer.head;
        let (slot, tokens) = (state.mark(SLOT), state.mark(TOKENS));
        let mut weights = vec![T::ZERO; tokens];
        let mut far_sum = vec![T::ZERO; value_dim];
        let entries = self.toeplitz.bias.entries();
        for (n, (q, out)) in self.q.chunks_exact(head_dim.max(1)).zip(step_rows(out, value_dim)).enumerate() {
            let q_shift = self.map(q, &mut features);
            let q = &features[..head_dim];
            let bias = &self.bias[n * entries..][..entries];
            // The exponents first, because weights count from the largest.
            let mut level = T::NEG_INFINITY;
            for (age, weight) in weights.iter_mut().enumerate() {
                let b = self.entry(tokens, age).map_or(T::NEG_INFINITY, |entry| bias[entry]);
                let own = state.ring_exponents.get(ring_slot(slot, near, age)).copied().unwrap_or(T::ZERO);
                *weight = b;
                level = level.max(b + own);
            }
            let far = self.toeplitz.bias.far().map_or(T::NEG_INFINITY, |entry| bias[entry]);
            level = level.max(far + state.marks[EXPONENT]);
            if !level.is_finite() {
                level = T::ZERO;
            }
            out.fill(T::ZERO);
            let mut sum = T::ZERO;
            for (age, weight) in weights.iter().enumerate() {
                let from = ring_slot(slot, near, age);
                let row = &state.ring_values[from * (value_dim + 1)..][..value_dim + 1];
                let own = state.ring_exponents.get(from).copied().unwrap_or(T::ZERO);
                // The large numbers first: their difference is exact where it matters.
                let weight = (*weight + (own - level)).exp();
                if row[value_dim] != T::ONE || weight == T::ZERO {
                    continue;
                }
                let weight = weight * self.ops.dot(q, &state.ring_keys[from * head_dim..][..head_dim]);
                self.ops.add_scaled(out, weight, &row[..value_dim]);
                sum += weight;
            }
            let weight = (far + (state.marks[EXPONENT] - level)).exp();
            if weight > T::ZERO {
                far_sum.fill(T::ZERO);
                self.ops.read_token(state.sum, q, &mut far_sum);
                self.ops.add_scaled(out, weight, &far_sum);
                sum += weight * self.ops.dot(q, state.keys);
            }
            if !self.toeplitz.normalize {
                self.ops.scale(out, (level + q_shift).exp());
            } else if sum.vanishes() {
                out.fill(T::ZERO);
            } else {
                self.ops.scale(out, T::ONE / sum);
            }
        }
    }

    /// The entry of the token `age` tokens before this one, which is the last of `tokens` in the ring.
    fn entry(&self, tokens: usize, age: usize) -> Option<usize> {
        let bias = &self.toeplitz.bias;
        // A grid's ring holds the image from its first pixel on; elsewhere only the difference counts.
        let query = tokens as isize - 1;
        bias.entry(bias.place(query - age as isize) - bias.place(query))
    }

    /// `φ(x)` relative to the exponent that it returns.
    fn map(&self, x: &[T], to: &mut [T]) -> T {
        let map = self.toeplitz.feature_map;
        let shift = if map == FeatureMap::Exp { top(x).unwrap_or(T::ZERO) } else { T::ZERO };
        let row = to.len();
        self.ops.load(map, shift, Rows { data: x, stride: x.len() }, 1, x.len(), None, to, row);
        shift
    }
}

/// The ring's row of `age` tokens before the last.
fn ring_slot(slot: usize, near: usize, age: usize) -> usize {
    (slot + 2 * near - 1 - age) % near
}
