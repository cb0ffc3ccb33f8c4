//! Tokens after those of a state: several in the parallel form, or one.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use longspan_kernels::Dims;

use super::flex::{Operands, PrefixState, Settings, States};
use super::state::{Inner, maker};
use super::tensor::widen_type;
use super::{AttentionState, Layer, TensorState, attend, check, check_by_kernel, dims_of, learned, meet, place};
use crate::attention::AttentionMask;
use crate::cpu::{from_flex, to_flex};
use crate::error::{Error, Result, argument};

/// Takes tokens into `state` and gives their outputs: the rows that [`attend`] gives under a causal mask to these tokens
/// after those of the state. No gradient passes through the state.
///
/// # Shapes
/// As in [`attend`], with as many keys as queries.
///
/// # Errors
/// Shapes or options that do not fit together or the state, which is then as it was.
pub(crate) fn advance(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut AttentionState,
) -> Result<Tensor<4>> {
    check(layer, &q, &k, &v)?;
    let [queries, keys] = [&q, &k].map(|x| x.dims()[2]);
    let expected = || format!("{queries} keys, as many as queries");
    argument(queries == keys, layer.name(), "tokens", expected, || keys.to_string())?;
    if kernels_take(layer, &q, state, true) {
        return in_kernels(layer, [q, k, v], state);
    }
    let (out, mut next) = in_tensors(layer, [q, k, v], state)?;
    // The next segment's backward ends here.
    next.detach();
    *state = next;
    Ok(out)
}

/// [`advance`] of one token. On a device that trains a gradient passes through a state that only steps have made.
///
/// # Errors
/// As [`advance`], and not one token.
pub(crate) fn step(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut AttentionState,
) -> Result<Tensor<4>> {
    check(layer, &q, &k, &v)?;
    let expected = || "1 query and 1 key in a step".into();
    let got = || format!("{} and {}", q.dims()[2], k.dims()[2]);
    argument(q.dims()[2] == 1 && k.dims()[2] == 1, layer.name(), "tokens", expected, got)?;
    if q.dims()[0] == 0 {
        return Ok(Tensor::zeros(dims_of(&q, &v).out(), (&q.device(), q.dtype())));
    }
    let trains = trains(layer, &q);
    if kernels_take(layer, &q, state, !trains) {
        return if trains { in_kernels(layer, [q, k, v], state) } else { step_in_kernels(layer, [q, k, v], state) };
    }
    let (out, next) = in_tensors(layer, [q, k, v], state)?;
    *state = next;
    Ok(out)
}

/// Checks that `state` takes one token more of each text, as a [`step`] does before it changes anything. `x` is what the token's
/// attention is made of, `[batch, 1, ·]`.
pub(crate) fn check_step(layer: &dyn Layer, x: &Tensor<3>, state: &AttentionState) -> Result<()> {
    layer.ready()?;
    let dims = layer.heads().dims(x.dims()[0], 1, 1);
    if kernels_take(layer, x, state, !trains(layer, x)) {
        let learned = super::flat(layer, place(x))?;
        let learned = learned.map(|x| to_flex(super::plain(x))).transpose()?;
        return match &state.inner {
            Some(Inner::Kernels(before)) if before.dtype() == widen_type(x.dtype()) => {
                Ok(before.check(&*layer.kernel(), &dims, learned.as_ref())?)
            }
            Some(_) => Err(foreign_state(layer)),
            None => check_by_kernel(layer, dims, &AttentionMask::causal()),
        };
    }
    check_tensors(layer, dims, place(x), state).map(drop)
}

/// Whether gradients are followed through tokens of a layer: theirs, or those of what it has learned.
fn trains<const D: usize>(layer: &dyn Layer, x: &Tensor<D>) -> bool {
    x.device().is_autodiff() || layer.parameters().iter().any(|learned| learned.device().is_autodiff())
}

/// Whether the kernels take tokens after this state: what took its first tokens takes all others, too.
pub(crate) fn kernels_take<const D: usize>(
    layer: &dyn Layer,
    x: &Tensor<D>,
    state: &AttentionState,
    at_first: bool,
) -> bool {
    super::is_flex(x)
        && match &state.inner {
            None => at_first && !layer.keeps_past(),
            Some(Inner::Tensors(_)) => false,
            Some(Inner::Kernels(_)) => true,
        }
}

/// Tokens after a state in tensor operations: their outputs, and the state after them.
fn in_tensors(
    layer: &dyn Layer,
    [q, k, v]: [Tensor<4>; 3],
    state: &AttentionState,
) -> Result<(Tensor<4>, AttentionState)> {
    let dims = dims_of(&q, &v);
    let mask = check_tensors(layer, dims, place(&q), state)?;
    if dims.out().contains(&0) {
        return Ok((Tensor::zeros(dims.out(), (&q.device(), q.dtype())), state.clone()));
    }
    let (out, next) = match (layer.sums(), &state.inner) {
        (Some(sums), before) => {
            let mut running = match before {
                Some(Inner::Tensors(TensorState::Sums(running))) => running.clone(),
                _ => Box::new(sums.empty(&q, dims.value_dim)),
            };
            (sums.advance([q, k, v], &mut running), TensorState::Sums(running))
        }
        (None, before) => {
            let [keys, values] = match before {
                Some(Inner::Tensors(TensorState::Past(past))) => {
                    let [keys, values] = *past.clone();
                    [Tensor::cat(vec![keys, k], 2), Tensor::cat(vec![values, v], 2)]
                }
                _ => [k, v],
            };
            // What no later token sees is forgotten.
            let kept = |x: Tensor<4>| {
                let tokens = x.dims()[2];
                let kept = layer.sees().map_or(tokens, |sees| sees.min(tokens));
                x.narrow(2, tokens - kept, kept)
            };
            let out = attend(layer, q, keys.clone(), values.clone(), &mask)?;
            (out, TensorState::Past(Box::new([keys, values].map(kept))))
        }
    };
    Ok((out, AttentionState { inner: Some(Inner::Tensors(next)), made_by: maker(layer) }))
}

/// Checks that a state in tensors takes the tokens of a call of these sizes. The mask of their attention to all tokens so far.
fn check_tensors(
    layer: &dyn Layer,
    dims: Dims,
    (device, dtype): (Device, DType),
    state: &AttentionState,
) -> Result<AttentionMask> {
    let Dims { batch, heads, kv_heads, value_dim, .. } = dims;
    let elsewhere = state.device().is_some_and(|own| !meet(&own, &device));
    if elsewhere || state.inner.is_some() && state.made_by != maker(layer) {
        return Err(foreign_state(layer));
    }
    let past = match (&state.inner, layer.sums()) {
        (None, _) => 0,
        (Some(Inner::Tensors(TensorState::Sums(sums))), Some(own)) => {
            let text = |([batch, heads, dim], dtype): ([usize; 3], DType)| {
                move || format!("batch {batch}, {heads} heads, values of {dim} numbers of {dtype:?}")
            };
            let expected = ([batch, heads, value_dim], widen_type(dtype));
            let got = (sums.shape, sums.tensors.first().map_or(expected.1, Tensor::dtype));
            argument(expected == got, layer.name(), "state", text(expected), text(got))?;
            own.taken(sums)
        }
        (Some(Inner::Tensors(TensorState::Past(past))), None) => {
            let sizes = |x: &Tensor<4>| {
                let [batch, heads, _, width] = x.dims();
                ([batch, heads, width], x.dtype())
            };
            let text = |both: [([usize; 3], DType); 2]| {
                move || format!("keys and values of batch, heads, width and type {both:?}")
            };
            let widths = [layer.kernel().key_dim(&dims), value_dim];
            let (expected, got) = (widths.map(|width| ([batch, kv_heads, width], dtype)), past.each_ref().map(sizes));
            argument(expected == got, layer.name(), "state", text(expected), text(got))?;
            past[0].dims()[2]
        }
        _ => return Err(foreign_state(layer)),
    };
    let mask = AttentionMask::causal().with_offset(past as isize);
    learned(layer, (device, dtype))?;
    check_by_kernel(layer, Dims { keys: past + dims.keys, ..dims }, &mask)?;
    Ok(mask)
}

/// [`advance`] in the kernels.
fn in_kernels(layer: &dyn Layer, [q, k, v]: [Tensor<4>; 3], state: &mut AttentionState) -> Result<Tensor<4>> {
    let parameters = super::flat(layer, place(&q))?;
    let dims = dims_of(&q, &v);
    let states = states_of(layer, dims, q.dtype(), state)?;
    let settings = Settings { states: Some(states.clone()), ..Settings::new(layer.kernel(), AttentionMask::causal()) };
    let out = super::run(settings, q, k, v, parameters)?;
    *state = states.into_state();
    Ok(out)
}

/// The states at both ends of a call of the kernels on sequences of these sizes after `state`.
pub(crate) fn states_of(layer: &dyn Layer, dims: Dims, dtype: DType, state: &AttentionState) -> Result<States> {
    Ok(States::new(match &state.inner {
        None => Arc::new(PrefixState::empty(&*layer.kernel(), &dims, dtype)?),
        Some(Inner::Kernels(before)) if before.dtype() == widen_type(dtype) => before.clone(),
        Some(_) => return Err(foreign_state(layer)),
    }))
}

/// [`step`] in the kernels, which change the state in its place.
fn step_in_kernels(layer: &dyn Layer, [q, k, v]: [Tensor<4>; 3], state: &mut AttentionState) -> Result<Tensor<4>> {
    let kernel = &*layer.kernel();
    let sizes = [k.dims()[0], k.dims()[1]];
    let parameters = super::flat(layer, place(&q))?.map(to_flex).transpose()?;
    let operands = Operands { q: to_flex(q)?, k: to_flex(k)?, v: to_flex(v)?, parameters }.with_adjacent_rows();
    if state.inner.is_none() {
        let empty = PrefixState::empty(kernel, &operands.dims(), operands.q.dtype())?;
        state.inner = Some(Inner::Kernels(Arc::new(empty)));
    }
    match &mut state.inner {
        Some(Inner::Kernels(prefix)) if prefix.dtype() == widen_type(operands.q.dtype()) => {
            // Heads and their width are one number to the kernel, which sees their product alone.
            let shape = prefix.shape();
            let text = |[batch, heads]: [usize; 2]| move || format!("batch {batch}, {heads} key/value heads");
            let got = [shape.batch, shape.kv_heads];
            argument(got == sizes, layer.name(), "state", text(sizes), text(got))?;
            Ok(from_flex(Arc::make_mut(prefix).step(kernel, &operands)?))
        }
        _ => Err(foreign_state(layer)),
    }
}

pub(crate) fn foreign_state(layer: &dyn Layer) -> Error {
    Error::Argument {
        operation: layer.name(),
        argument: "state",
        expected: "a state of the same mechanism, options, device and number type".into(),
        got: "one of another".into(),
    }
}
