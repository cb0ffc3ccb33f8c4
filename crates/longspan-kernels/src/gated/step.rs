//! One token at a time: the state decays, is corrected or added to, and is read.

use super::loops::{Arriving, TakeToken};
use super::{Gate, GatedAttention};
use crate::call::{Compute, Dims, PARTS, State, StepMemory, Token, check_token, step_rows, token_dims};
use crate::convolution;
use crate::error::Error;
use crate::simd::block::{Exp, dot, scale_by};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};
use crate::threads;

/// Takes one token into `state` and writes its output. `gates` writes the log decays of a key/value head and gives its `β`; taps are those
/// of queries, keys and values, head by head, if they are convolved.
pub(super) fn step<T: Real>(
    mechanism: &impl Compute,
    attention: &GatedAttention,
    head_dim: usize,
    token: &Token<'_, T>,
    (gates, taps): (impl Fn(usize, &mut [T]) -> Option<T> + Sync, Option<[&[T]; 3]>),
    state: &mut State<T>,
    out: &mut [T],
) -> Result<(), Error> {
    // Keys may be wider, by what gates are made of.
    let keys = &token.k[..(state.shape().batch * state.shape().kv_heads * head_dim).min(token.k.len())];
    let dims = token_dims(mechanism, token, keys, state)?;
    let Dims { batch, kv_heads, value_dim, .. } = dims;
    check_token(mechanism, &dims, token, state, out)?;
    let (group, gate, key_dim) = (dims.group(), attention.gate_len(head_dim), mechanism.key_dim(&dims));
    let (row, scale) = (padded::<T>(head_dim), T::from_f64(attention.scale(head_dim)));
    let normalize = |x: &mut [T]| {
        if attention.l2_norm {
            let inverse = T::from_f64(1.0 / (dot(x, x).to_f64() + 1e-6).sqrt());
            scale_by(x, inverse);
        }
    };
    let run = |(unit, ([sum, decayed_by, _, past_q, past_k, past_v], out)): (usize, ([&mut [T]; PARTS], &mut [T])),
               memory: &mut StepMemory<T>| {
        // Without queries one of nothing meets the state.
        let queries = group.max(1);
        let wide = padded::<T>(head_dim.max(value_dim));
        let memory = memory.take((2 + queries) * row + padded::<T>(gate.max(1)) + 2 * value_dim + wide);
        let (k, memory) = memory.split_at_mut(row);
        let (known, memory) = memory.split_at_mut(row);
        let (q, memory) = memory.split_at_mut(queries * row);
        let (factors, memory) = memory.split_at_mut(padded::<T>(gate.max(1)));
        let (convolved, memory) = memory.split_at_mut(wide);
        let (v, nothing) = memory.split_at_mut(value_dim);
        // The convolution of one head's row, if there is one.
        let mut convolve = |row: &mut [T], past: &mut [T], n: usize, head: usize| {
            let Some(taps) = taps else { return };
            let len = past.len() + row.len();
            convolution::take_row(row, past, &taps[n][head * len..][..len], convolved);
        };
        let (k, known) = (&mut k[..head_dim], &mut known[..head_dim]);
        k.copy_from_slice(&token.k[unit * key_dim..][..head_dim]);
        convolve(k, past_k, 1, unit % kv_heads);
        normalize(k);
        q.fill(T::ZERO);
        for (n, to) in q.chunks_exact_mut(row.max(1)).take(group).enumerate() {
            let to = &mut to[..head_dim];
            to.copy_from_slice(&token.q[(unit * group + n) * head_dim..][..head_dim]);
            let len = past_q.len() / queries;
            convolve(to, &mut past_q[n * len..][..len], 0, unit % kv_heads * group + n);
            normalize(to);
        }
        factors.fill(T::ZERO);
        let beta = gates(unit, &mut factors[..gate]);
        decayed_by.iter_mut().zip(&*factors).for_each(|(sum, &g)| *sum += g);
        dispatch(Exp { to: factors });
        let factors = if attention.gate == Gate::Channel { &factors[..head_dim] } else { &factors[..1] };
        let known = beta.map(|beta| {
            for (n, (to, &k)) in known.iter_mut().zip(&*k).enumerate() {
                *to = -k * factors[if factors.len() == 1 { 0 } else { n }];
            }
            (&*known, beta)
        });
        v.copy_from_slice(&token.v[unit * value_dim..][..value_dim]);
        convolve(v, past_v, 2, unit % kv_heads);
        let out = if group == 0 { nothing } else { out };
        dispatch(TakeToken { sum, token: Arriving { factors, k, known, v, q, q_row: row }, out });
        scale_by(out, scale);
    };
    let heads = state.heads_mut().zip(step_rows(out, group * value_dim)).enumerate();
    threads::share_many_with(batch * kv_heads * head_dim * value_dim, heads, StepMemory::new, run);
    Ok(())
}
