//! The state of a short convolution: its latest products, and how many tokens there were.

use super::ShortConvolution;
use crate::call::{Dims, Mechanism, State, StateShape, check_state, fingerprint, is_count};
use crate::error::{Error, expect};
use crate::simd::Real;

/// The sizes of the state for calls of these sizes, which were checked.
pub(super) fn shape(convolution: &ShortConvolution, dims: &Dims) -> StateShape {
    let products = convolution.before().saturating_mul(dims.value_dim);
    StateShape::new(convolution.name(), fingerprint([convolution.width as u64]), dims, [products, 0, 1, 0, 0, 0])
}

/// How many tokens a state that was checked has seen, up to those that it holds.
pub(super) fn tokens<T: Real>(state: &State<T>, batch: usize, kv_head: usize) -> usize {
    state.head(batch, kv_head)[2][0].to_f64() as usize
}

/// Checks the counts of a state of the right sizes.
pub(super) fn check_marks<T: Real>(
    convolution: &ShortConvolution,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    let most = convolution.before();
    let wrong = state.each(2).map(|tokens| tokens[0]).find(|&n| !is_count(n, most + 1));
    let expected = || format!("a whole number up to {most} as the number of tokens");
    expect(wrong.is_none(), convolution.name(), argument, expected, || wrong.unwrap_or(T::ZERO).to_string())
}

/// Checks two states that follow each other, and gives the numbers of a product and of products.
fn check_both<T: Real>(
    convolution: &ShortConvolution,
    earlier: &State<T>,
    later: &State<T>,
) -> Result<[usize; 2], Error> {
    let shape = earlier.shape();
    later.check(convolution.name(), "later state", shape)?;
    let before = convolution.width.saturating_sub(1);
    // The width of a head follows from a state only where it holds products.
    let width = shape.parts[0].checked_div(before).unwrap_or(0);
    let dims = shape.dims(if convolution.gated { width } else { 0 }, width);
    check_state(convolution, &dims, earlier, "earlier state")?;
    check_state(convolution, &dims, later, "later state")?;
    Ok([width, before])
}

pub(super) fn combine<T: Real>(
    convolution: &ShortConvolution,
    earlier: &State<T>,
    later: &State<T>,
) -> Result<State<T>, Error> {
    let [width, before] = check_both(convolution, earlier, later)?;
    let mut both = later.try_clone()?;
    for ([products, _, held, ..], [older, _, earlier, ..]) in both.heads_mut().zip(earlier.heads()) {
        let tokens = held[0].to_f64() as usize;
        let kept = (before - tokens) * width;
        products[..kept].copy_from_slice(&older[tokens * width..]);
        held[0] = T::from_f64((tokens as f64 + earlier[0].to_f64()).min(before as f64));
    }
    Ok(both)
}

/// The gradients of both states from that of their sum.
pub(super) fn combine_backward<T: Real>(
    convolution: &ShortConvolution,
    earlier: &State<T>,
    later: &State<T>,
    d_combined: &State<T>,
) -> Result<(State<T>, State<T>), Error> {
    let [width, before] = check_both(convolution, earlier, later)?;
    d_combined.check(convolution.name(), "gradient of the sum", earlier.shape())?;
    let (mut d_earlier, mut d_later) = (State::zeros(earlier.shape())?, State::zeros(earlier.shape())?);
    let heads = d_earlier.heads_mut().zip(d_later.heads_mut()).zip(later.heads().zip(d_combined.heads()));
    for (([to_earlier, ..], [to_later, ..]), ([_, _, held, ..], [d, ..])) in heads {
        let tokens = held[0].to_f64() as usize;
        let kept = (before - tokens) * width;
        to_earlier[tokens * width..].copy_from_slice(&d[..kept]);
        to_later[kept..].copy_from_slice(&d[kept..]);
    }
    Ok((d_earlier, d_later))
}
