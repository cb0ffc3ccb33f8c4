//! One token at a time: the state's products and its own, weighed; then the state moves on by one.

use super::taps::{silu, through_gate};
use super::{ShortConvolution, check_options};
use crate::call::{Dims, Mechanism, PARTS, State, Step, StepMemory, Token, check_token, step_rows, token_dims};
use crate::error::Error;
use crate::simd::Real;
use crate::simd::block::{add_products, add_scaled, set_products};
use crate::simd::rows::padded;
use crate::threads;

impl Step for ShortConvolution {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let mut dims = token_dims(self, token, token.k, state)?;
        if !self.gated {
            // Queries of no width do not say how many heads there are.
            dims.heads = out.len() / (dims.batch * dims.value_dim).max(1);
            dims.check(self.name())?;
        }
        let Dims { batch, kv_heads, head_dim, value_dim: channels, .. } = dims;
        check_options(self, &dims)?;
        check_token(self, &dims, token, state, out)?;
        let (width, before, group) = (self.width, self.before(), dims.group());
        let block = padded::<T>(channels);
        let run = |(unit, ([products, _, tokens, ..], out)): (usize, ([&mut [T]; PARTS], &mut [T])),
                   memory: &mut StepMemory<T>| {
            let (own, sum) = memory.take(2 * block).split_at_mut(block);
            let own = &mut own[..channels];
            let taps = &token.parameters[0][unit % kv_heads * width * channels..][..width * channels];
            through_gate(row(token.k, unit, head_dim), row(token.v, unit, channels), own);
            weigh(own, products, taps, &mut sum[..channels]);
            if self.bias {
                add_scaled(&mut sum[..channels], T::ONE, row(token.parameters[1], unit % kv_heads, channels));
            }
            if self.silu {
                silu(sum, None);
            }
            for n in 0..group {
                through_gate(row(token.q, unit * group + n, head_dim), sum, &mut out[n * channels..][..channels]);
            }
            if before > 0 {
                move_on(own, products);
                tokens[0] = T::from_f64((tokens[0].to_f64() + 1.0).min(before as f64));
            }
        };
        let heads = state.heads_mut().zip(step_rows(out, group * channels)).enumerate();
        threads::share_many_with(batch * kv_heads * width * channels, heads, StepMemory::new, run);
        Ok(())
    }
}

/// Puts the SiLU of its convolution in the place of a row; `past` are those right before it, oldest first, which move on by one. `sum` has
/// room for whole registers.
pub(crate) fn take_row<T: Real>(own: &mut [T], past: &mut [T], taps: &[T], sum: &mut [T]) {
    weigh(own, past, taps, &mut sum[..own.len()]);
    silu(&mut sum[..padded::<T>(own.len())], None);
    if !past.is_empty() {
        move_on(own, past);
    }
    own.copy_from_slice(&sum[..own.len()]);
}

/// The row and those before it, oldest first, weighed by their taps.
fn weigh<T: Real>(own: &[T], past: &[T], taps: &[T], sum: &mut [T]) {
    let channels = own.len();
    set_products(&taps[..channels], own, sum);
    for (tap, row) in taps.chunks_exact(channels.max(1)).skip(1).zip(past.chunks_exact(channels.max(1)).rev()) {
        add_products(tap, row, sum);
    }
}

/// The oldest row gives way to a new one.
fn move_on<T: Real>(own: &[T], past: &mut [T]) {
    past.copy_within(own.len().., 0);
    let last = past.len() - own.len();
    past[last..].copy_from_slice(own);
}

fn row<T>(numbers: &[T], n: usize, width: usize) -> &[T] {
    &numbers[n * width..][..width]
}
