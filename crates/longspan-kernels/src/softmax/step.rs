//! One token at a time: the cache takes in its key and value, its queries read the cache.

use super::SoftmaxAttention;
use super::problem::KEYS;
use super::state::{self, Cache};
use crate::call::{Dims, PARTS, State, Step, Token, check_token, step_rows, token_dims};
use crate::error::Error;
use crate::feature_map::elementwise::load_exponentials;
use crate::simd::Real;
use crate::simd::block::{add_row_dots, add_scaled, scale_by};
use crate::simd::rows::pieces;
use crate::threads;

impl Step for SoftmaxAttention {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let dims = token_dims(self, token, token.k, state)?;
        let Dims { batch, kv_heads, head_dim, value_dim, .. } = dims;
        check_token(self, &dims, token, state, out)?;
        let rows = state.each(2).map(|held| Cache::marked(self, held[0]).plus(1).rows());
        let longest = rows.max().unwrap_or(0);
        if self.window.is_none() {
            state::check_room(self, "state", longest)?;
        }
        let group = dims.group();
        let scale = T::from_f64(self.scale.unwrap_or(1.0 / (head_dim.max(1) as f64).sqrt()));
        let run = |(unit, ([keys, values, held, present, ..], out)): (usize, ([&mut [T]; PARTS], &mut [T]))| {
            let before = Cache::marked(self, held[0]);
            let (place, after) = (before.row(0, 0), before.plus(1));
            keys[place * head_dim..][..head_dim].copy_from_slice(&token.k[unit * head_dim..][..head_dim]);
            values[place * value_dim..][..value_dim].copy_from_slice(&token.v[unit * value_dim..][..value_dim]);
            if let Some(present) = present.get_mut(place) {
                *present = T::ONE;
            }
            held[0] = after.mark();
            for n in 0..group {
                let q = &token.q[(unit * group + n) * head_dim..][..head_dim];
                let out = &mut out[n * value_dim..][..value_dim];
                attend(q, scale, (keys, values, present), after.rows(), out);
            }
        };
        let heads = state.heads_mut().zip(step_rows(out, group * value_dim)).enumerate();
        threads::share_many(batch * kv_heads * longest * (head_dim + value_dim), heads, run);
        Ok(())
    }
}

/// One row of queries against the first rows of a cache; `present` is empty where no key is ignored.
fn attend<T: Real>(q: &[T], scale: T, (keys, values, present): (&[T], &[T], &[T]), held: usize, out: &mut [T]) {
    let (head_dim, value_dim) = (q.len(), out.len());
    let mut scores = [T::ZERO; KEYS];
    let mut weights = [T::ZERO; KEYS];
    let mut highest = -(T::ONE / T::MIN_POSITIVE);
    let mut sum = T::ZERO;
    out.fill(T::ZERO);
    for (key, count) in pieces(0..held, KEYS) {
        let scores = &mut scores[..count];
        scores.fill(T::ZERO);
        add_row_dots(&keys[key * head_dim..], head_dim, q, scores);
        scale_by(scores, scale);
        for (score, _) in scores.iter_mut().zip(present.iter().skip(key)).filter(|(_, present)| **present == T::ZERO) {
            *score = T::NEG_INFINITY;
        }
        let top = scores.iter().copied().fold(highest, T::max);
        if top > highest {
            let factor = (highest - top).exp();
            sum *= factor;
            scale_by(out, factor);
            highest = top;
        }
        load_exponentials(scores, highest, &mut weights);
        for (&weight, value) in weights[..count].iter().zip(values[key * value_dim..].chunks_exact(value_dim.max(1))) {
            add_scaled(out, weight, value);
        }
        sum += weights[..count].iter().copied().sum();
    }
    scale_by(out, T::ONE / sum);
}
