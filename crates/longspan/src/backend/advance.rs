//! Several tokens after those of a state, in the parallel form.

#[cfg(feature = "flex")]
use burn::tensor::DType;
use burn::tensor::Tensor;

#[cfg(feature = "flex")]
use super::flex::{PrefixState, Settings, States, computed};
use super::state::Inner;
use super::{AttentionState, Layer, TensorState, attend, check, foreign_state, join_past, step};
use crate::attention::AttentionMask;
use crate::error::Result;

/// Takes tokens into `state` and gives their outputs: the rows that [`attend`] gives under a causal mask to these tokens
/// after those of the state. No gradient passes through the state.
///
/// # Shapes
/// As in [`attend`], with as many keys as queries.
///
/// # Errors
/// Shapes or options that do not fit together or the state.
pub(crate) fn advance(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut AttentionState,
) -> Result<Tensor<4>> {
    check(layer, &q, &k, &v)?;
    #[cfg(feature = "flex")]
    if super::is_flex(&q) && !layer.keeps_past() {
        return in_kernels(layer, q, k, v, state);
    }
    if layer.sums().is_some() {
        return in_steps(layer, q, k, v, state);
    }
    let (keys, values) = match &state.inner {
        None => (k, v),
        Some(Inner::Tensors(TensorState::Past(past))) => join_past(layer, past, k, v)?,
        Some(_) => return Err(foreign_state(layer)),
    };
    let before = keys.dims()[2] - q.dims()[2];
    let mask = AttentionMask::causal().with_offset(before as isize);
    let out = attend(layer, q, keys.clone(), values.clone(), &mask)?;
    state.inner = Some(Inner::Tensors(TensorState::Past(Box::new([keys.detach(), values.detach()]))));
    Ok(out)
}

/// [`advance`] token by token, for sums in tensors: only the kernels have a parallel form that begins with such.
pub(super) fn in_steps(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut AttentionState,
) -> Result<Tensor<4>> {
    let row = |x: &Tensor<4>, t| x.clone().narrow(2, t, 1);
    let mut after = state.clone();
    let rows = (0..q.dims()[2]).map(|t| step(layer, row(&q, t), row(&k, t), row(&v, t), &mut after));
    let rows: Vec<_> = rows.collect::<Result<_>>()?;
    // The next segment's backward ends here.
    after.detach();
    *state = after;
    Ok(if rows.is_empty() {
        v.narrow(2, 0, 0).repeat_dim(1, layer.heads().heads / layer.heads().kv_heads)
    } else {
        Tensor::cat(rows, 2)
    })
}

/// [`advance`] in the kernels.
#[cfg(feature = "flex")]
fn in_kernels(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut AttentionState,
) -> Result<Tensor<4>> {
    let parameters = super::flat(layer, q.dtype())?;
    let [batch, _, tokens, _] = q.dims();
    let states = states_of(layer, [batch, tokens], q.dtype(), state)?;
    let settings = Settings { states: Some(states.clone()), ..Settings::new(layer.kernel(), AttentionMask::causal()) };
    let out = super::run(settings, q, k, v, parameters)?;
    *state = states.into_state();
    Ok(out)
}

/// The states at both ends of a call of the kernels on so many sequences and tokens after `state`.
#[cfg(feature = "flex")]
pub(crate) fn states_of(
    layer: &dyn Layer,
    [batch, tokens]: [usize; 2],
    dtype: DType,
    state: &AttentionState,
) -> Result<States> {
    let dims = layer.heads().dims(batch, tokens, tokens);
    let states = States::new(match &state.inner {
        None => PrefixState::empty_for(&*layer.kernel(), &dims, dtype)?,
        Some(Inner::Kernels(before)) if before.dtype() == computed(dtype) => before.clone(),
        Some(_) => return Err(foreign_state(layer)),
    });
    Ok(match &state.peers {
        None => states,
        Some(peers) => states.between(peers.clone(), layer.kernel())?,
    })
}
