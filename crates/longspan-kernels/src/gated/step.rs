//! One token at a time: the state decays, is corrected or added to, and is read.

use super::loops::{ChangeState, Exp};
use super::{Gate, GatedAttention};
use crate::call::{Compute, Dims, PARTS, State, StepMemory, Token, check_token, step_rows, token_dims};
use crate::error::Error;
use crate::simd::block::{dot, scale_by};
use crate::simd::rows::padded;
use crate::simd::token::ReadToken;
use crate::simd::{Real, dispatch};
use crate::threads;

/// Takes one token into `state` and writes its output. `gates` writes the log decays of a key/value head and gives its `β`.
pub(super) fn step<T: Real>(
    mechanism: &impl Compute,
    attention: &GatedAttention,
    head_dim: usize,
    token: &Token<'_, T>,
    gates: impl Fn(usize, &mut [T]) -> Option<T> + Sync,
    state: &mut State<T>,
    out: &mut [T],
) -> Result<(), Error> {
    // Keys may be wider, by what gates are made of.
    let keys = &token.k[..(state.shape().batch * state.shape().kv_heads * head_dim).min(token.k.len())];
    let dims = token_dims(mechanism, token, keys, state)?;
    let Dims { batch, kv_heads, value_dim, .. } = dims;
    check_token(mechanism, &dims, token, state, out)?;
    let (group, gate, key_dim) = (dims.group(), attention.gate_len(head_dim), mechanism.key_dim(&dims));
    let (row, wide, scale) = (padded::<T>(head_dim), padded::<T>(value_dim), T::from_f64(attention.scale(head_dim)));
    let normalize = |x: &mut [T]| {
        if attention.l2_norm {
            let inverse = T::from_f64(1.0 / (dot(x, x).to_f64() + 1e-6).sqrt());
            scale_by(x, inverse);
        }
    };
    let run = |(unit, ([sum, decayed_by, ..], out)): (usize, ([&mut [T]; PARTS], &mut [T])),
               memory: &mut StepMemory<T>| {
        let memory = memory.take(3 * row + wide + padded::<T>(1));
        let (k, memory) = memory.split_at_mut(row);
        let (decayed, memory) = memory.split_at_mut(row);
        let (u, factors) = memory.split_at_mut(wide);
        let (k, decayed, u) = (&mut k[..head_dim], &mut decayed[..head_dim], &mut u[..value_dim]);
        k.copy_from_slice(&token.k[unit * key_dim..][..head_dim]);
        normalize(k);
        factors.fill(T::ZERO);
        let beta = gates(unit, &mut factors[..gate]);
        decayed_by.iter_mut().zip(&*factors).for_each(|(sum, &g)| *sum += g);
        dispatch(Exp { to: factors });
        let factors = if attention.gate == Gate::Channel { &factors[..head_dim] } else { &factors[..1] };
        u.fill(T::ZERO);
        let v = &token.v[unit * value_dim..][..value_dim];
        if let Some(beta) = beta {
            for (n, (to, &k)) in decayed.iter_mut().zip(&*k).enumerate() {
                *to = -k * factors[if factors.len() == 1 { 0 } else { n }];
            }
            dispatch(ReadToken { sum, q: decayed, out: u });
            u.iter_mut().zip(v).for_each(|(u, &v)| *u = beta * (*u + v));
        } else {
            u.copy_from_slice(v);
        }
        dispatch(ChangeState { sum, factors, k, u });
        for n in 0..group {
            decayed.copy_from_slice(&token.q[(unit * group + n) * head_dim..][..head_dim]);
            normalize(decayed);
            let out = &mut out[n * value_dim..][..value_dim];
            out.fill(T::ZERO);
            dispatch(ReadToken { sum, q: decayed, out });
            scale_by(out, scale);
        }
    };
    let heads = state.heads_mut().zip(step_rows(out, group * value_dim)).enumerate();
    threads::share_many_with(batch * kv_heads * head_dim * value_dim, heads, StepMemory::new, run);
    Ok(())
}
