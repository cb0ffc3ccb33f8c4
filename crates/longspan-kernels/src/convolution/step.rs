//! One token at a time: the state's products and its own, weighed; then the state moves on by one.

use super::taps::silu;
use super::{ShortConvolution, check_options};
use crate::call::{Dims, PARTS, State, StepMemory, Token, check_token, step_rows, token_dims};
use crate::error::Error;
use crate::simd::Real;
use crate::simd::block::{add_products, set_products};
use crate::simd::rows::padded;
use crate::threads;

/// Takes one token into `state` and writes its output.
pub(super) fn step<T: Real>(
    convolution: &ShortConvolution,
    token: &Token<'_, T>,
    state: &mut State<T>,
    out: &mut [T],
) -> Result<(), Error> {
    let dims = token_dims(convolution, token, token.k, state)?;
    let Dims { batch, kv_heads, head_dim, .. } = dims;
    check_options(convolution, &dims)?;
    check_token(convolution, &dims, token, state, out)?;
    let (width, before, group) = (convolution.width, convolution.before(), dims.group());
    let block = padded::<T>(head_dim);
    let run = |(unit, ([products, _, tokens, ..], out)): (usize, ([&mut [T]; PARTS], &mut [T])),
               memory: &mut StepMemory<T>| {
        let (own, sum) = memory.take(2 * block).split_at_mut(block);
        let own = &mut own[..head_dim];
        let taps = &token.parameters[0][unit % kv_heads * width * head_dim..][..width * head_dim];
        set_products(row(token.k, unit, head_dim), row(token.v, unit, head_dim), own);
        set_products(&taps[..head_dim], own, &mut sum[..head_dim]);
        for t in 1..width {
            add_products(row(taps, t, head_dim), row(products, before - t, head_dim), &mut sum[..head_dim]);
        }
        if convolution.silu {
            silu(sum, None);
        }
        for n in 0..group {
            set_products(sum, row(token.q, unit * group + n, head_dim), &mut out[n * head_dim..][..head_dim]);
        }
        if before > 0 {
            products.copy_within(head_dim.., 0);
            products[(before - 1) * head_dim..].copy_from_slice(own);
            tokens[0] = T::from_f64((tokens[0].to_f64() + 1.0).min(before as f64));
        }
    };
    let heads = state.heads_mut().zip(step_rows(out, group * head_dim)).enumerate();
    threads::share_many_with(batch * kv_heads * width * head_dim, heads, StepMemory::new, run);
    Ok(())
}

fn row<T>(numbers: &[T], n: usize, width: usize) -> &[T] {
    &numbers[n * width..][..width]
}
