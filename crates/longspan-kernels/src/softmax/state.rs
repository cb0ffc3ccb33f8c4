//! The state of softmax attention: a cache of keys and values.

use super::SoftmaxAttention;
use crate::call::{Dims, State, StateShape, VERSION};
use crate::error::{Error, expect};
use crate::simd::Real;

/// The sizes of the state of `attention` for calls of these sizes.
pub(super) fn shape(attention: &SoftmaxAttention, dims: &Dims) -> Result<StateShape, Error> {
    let numbers = |width: usize| attention.capacity.checked_mul(width);
    let heads = dims.batch.checked_mul(dims.kv_heads);
    let head = numbers(dims.head_dim).zip(numbers(dims.value_dim)).and_then(|(k, v)| k.checked_add(v)?.checked_add(1));
    let bytes = head.zip(heads).and_then(|(head, heads)| head.checked_mul(heads)?.checked_mul(8));
    expect(
        bytes.is_some_and(|bytes| bytes < isize::MAX as usize),
        "softmax",
        "capacity",
        || "a state that fits the address space".into(),
        || attention.capacity.to_string(),
    )?;
    Ok(StateShape {
        mechanism: "softmax",
        version: VERSION,
        options: 0,
        batch: dims.batch,
        kv_heads: dims.kv_heads,
        parts: [attention.capacity * dims.head_dim, attention.capacity * dims.value_dim, 1, 0, 0, 0],
    })
}

/// The state before the first token.
pub(super) fn empty<T: Real>(attention: &SoftmaxAttention, dims: &Dims) -> Result<State<T>, Error> {
    dims.check("softmax")?;
    State::zeros(shape(attention, dims)?)
}

/// Tokens that one head's cache holds.
pub(super) fn count<T: Real>(state: &State<T>, batch: usize, kv_head: usize) -> usize {
    state.head(batch, kv_head)[2][0].to_f64() as usize
}

/// Checks sizes and counts of a state that a caller gives.
pub(super) fn check<T: Real>(
    attention: &SoftmaxAttention,
    dims: &Dims,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    state.check("softmax", argument, shape(attention, dims)?)?;
    for batch in 0..dims.batch {
        for kv_head in 0..dims.kv_heads {
            let held = state.head(batch, kv_head)[2][0].to_f64();
            expect(
                held >= 0.0 && held <= attention.capacity as f64 && held.fract() == 0.0,
                "softmax",
                argument,
                || format!("a whole number up to the capacity of {} as the number of tokens", attention.capacity),
                || held.to_string(),
            )?;
        }
    }
    Ok(())
}

/// Checks that a cache has room for so many tokens.
pub(super) fn check_room(attention: &SoftmaxAttention, argument: &'static str, tokens: usize) -> Result<(), Error> {
    expect(
        tokens <= attention.capacity,
        "softmax",
        argument,
        || format!("at most {} tokens; make the mechanism with a larger capacity", attention.capacity),
        || tokens.to_string(),
    )
}

/// Makes every number 0.
pub(super) fn clear<T: Real>(state: &mut State<T>) {
    state.heads_mut().flatten().for_each(|part| part.fill(T::ZERO));
}

/// The tokens of `earlier`, then those of `later`.
pub(super) fn combine<T: Real>(
    attention: &SoftmaxAttention,
    earlier: &State<T>,
    later: &State<T>,
) -> Result<State<T>, Error> {
    let shape = earlier.shape();
    later.check("softmax", "later state", shape)?;
    let capacity = attention.capacity.max(1);
    let [keys, values, ..] = shape.parts;
    let dims = Dims {
        batch: shape.batch,
        heads: shape.kv_heads,
        kv_heads: shape.kv_heads,
        queries: 0,
        keys: 0,
        head_dim: keys / capacity,
        value_dim: values / capacity,
    };
    check(attention, &dims, earlier, "earlier state")?;
    check(attention, &dims, later, "later state")?;
    let mut sum = earlier.try_clone()?;
    for (unit, [keys, values, held, ..]) in sum.heads_mut().enumerate() {
        let (batch, kv_head) = (unit / shape.kv_heads, unit % shape.kv_heads);
        let (first, second) = (count(earlier, batch, kv_head), count(later, batch, kv_head));
        check_room(attention, "sum of two states", first + second)?;
        let [later_keys, later_values, ..] = later.head(batch, kv_head);
        for (to, from, width) in [(keys, later_keys, dims.head_dim), (values, later_values, dims.value_dim)] {
            to[first * width..][..second * width].copy_from_slice(&from[..second * width]);
        }
        held[0] = T::from_f64((first + second) as f64);
    }
    Ok(sum)
}
