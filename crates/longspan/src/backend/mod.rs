//! Runs attention, over whole sequences or token by token, in the kernels or in tensor operations.
//!
//! `attend` checks shapes and chooses. On Burn's CPU backend (Flex) the kernels run on the tensors' own numbers,
//! without a copy, with a backward of their own that keeps no more than the outputs and the denominators. On every
//! other backend the same mathematics runs in plain tensor operations, which Burn differentiates. Both work for any
//! mechanism: the first calls an [`AnyKernel`], the second the tensor operations of the mechanism's module, a `Layer`.

mod advance;
pub(crate) mod feature_map;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "flex")]
pub(crate) mod operation;
pub(crate) mod pairs;
mod peers;
mod running;
mod state;
#[cfg(feature = "flex")]
mod stretches;
pub(crate) mod tensor;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod tests;

use std::fmt::Debug;
use std::sync::Arc;

#[cfg(feature = "flex")]
use burn::backend::{DispatchDevice, Flex};
#[cfg(feature = "flex")]
use burn::tensor::DType;
use burn::tensor::{Device, Tensor};
pub use longspan_kernels::AnyKernel;
use longspan_kernels::{Call, Dims, Kernel, Parameter, View};

pub(crate) use advance::advance;
#[cfg(feature = "flex")]
pub(crate) use advance::states_of;
pub(crate) use feature_map::Learned;
#[cfg(all(test, feature = "flex"))]
pub(crate) use flex::copies::count as count_copy;
#[cfg(feature = "flex")]
pub(crate) use flex::{Outside, States, adjacent_rows, split_parameters, view_f32, with_scratch};
pub use peers::Peers;
pub(crate) use running::Running;
#[cfg(feature = "flex")]
use state::Inner;
pub(crate) use state::TensorState;
pub use state::{AttentionState, StateForm, StoredState};
pub(crate) use tensor::Total;

use crate::attention::{AttentionMask, Heads, KeyMask};
use crate::error::{Error, Result, argument};

/// What attention needs to know of a mechanism's module.
pub(crate) trait Layer: Debug {
    /// The mechanism's name.
    fn name(&self) -> &'static str;

    /// The kernel with the module's options.
    fn kernel(&self) -> Arc<dyn AnyKernel>;

    /// Whether a state holds all keys and values so far. A kernel's state has a fixed size, so such mechanisms step in
    /// tensor operations, where the state can grow.
    fn keeps_past(&self) -> bool {
        false
    }

    /// Numbers of heads and their width.
    fn heads(&self) -> Heads;

    /// Fails if a call needs more than q, k, v and a mask.
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Numbers in a key of one head.
    fn key_dim(&self) -> usize {
        self.kernel().key_dim(&self.heads().dims(0, 0, 0))
    }

    /// The learned tensors, flat, in the kernel's order.
    fn parameters(&self) -> Vec<Tensor<1>>;

    /// The same attention in tensor operations. Shapes have been checked, none is empty, and sequences are not packed.
    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4>;

    /// Steps in tensor operations with a state of constant size; `None` where it has to hold all keys and values.
    fn sums(&self) -> Option<&dyn Sums> {
        None
    }

    /// A summary of a memory that answers queries, where one smaller than its keys and values exists.
    fn total(&self, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Option<Total> {
        let _ = (k, v, mask);
        None
    }
}

/// Steps in tensor operations with a state of constant size.
pub(crate) trait Sums {
    /// The state before the first token, for queries such as `like` and values of `value_dim`.
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running;

    /// Takes one token in and gives its output.
    fn step(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, state: &mut Running) -> Tensor<4>;
}

/// Attention over whole sequences.
///
/// # Shapes
/// - `q`: `[batch, heads, queries, head_dim]`; `k`: `[batch, kv_heads, keys, key_dim]`;
///   `v`: `[batch, kv_heads, keys, value_dim]`
/// - output: `[batch, heads, queries, value_dim]`
///
/// # Errors
/// Shapes or options that do not fit together.
pub(crate) fn attend(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: &AttentionMask,
) -> Result<Tensor<4>> {
    check(layer, &q, &k, &v)?;
    #[cfg(feature = "flex")]
    if is_flex(&q) {
        let parameters = flat(layer, q.dtype())?;
        return run(flex::Settings::new(layer.kernel(), mask.clone()), q, k, v, parameters);
    }
    in_tensors(layer, q, k, v, mask)
}

/// [`attend`] on the CPU backend in both directions with keys before and after those that are given: queries stand at the keys from
/// `first` on.
#[cfg(feature = "flex")]
pub(crate) fn attend_between(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    first: usize,
    outside: &Outside,
) -> Result<Tensor<4>> {
    check(layer, &q, &k, &v)?;
    let parameters = flat(layer, q.dtype())?;
    let mask = AttentionMask::bidirectional().with_offset(first as isize);
    let settings = flex::Settings { outside: Some(outside.clone()), ..flex::Settings::new(layer.kernel(), mask) };
    run(settings, q, k, v, parameters)
}

/// Attention by the kernels on tensors of the CPU backend.
#[cfg(feature = "flex")]
fn run(
    settings: flex::Settings,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    parameters: Option<Tensor<1>>,
) -> Result<Tensor<4>> {
    let mut others = vec![k.into_dispatch(), v.into_dispatch()];
    others.extend(parameters.map(Tensor::into_dispatch));
    Ok(operation::run(settings, q.into_dispatch(), others)?)
}

/// [`attend`] in tensor operations.
pub(crate) fn in_tensors(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: &AttentionMask,
) -> Result<Tensor<4>> {
    check_by_kernel(layer, &q, &k, &v, mask)?;
    let ([batch, heads, queries, _], [_, _, keys, value_dim]) = (q.dims(), v.dims());
    let nothing = |queries| Tensor::zeros([batch, heads, queries, value_dim], (&q.device(), q.dtype()));
    if batch * heads * queries * keys * value_dim == 0 {
        return Ok(nothing(queries));
    }
    let KeyMask::Packed { queries: query_bounds, keys: key_bounds } = &mask.keys else {
        return Ok(layer.in_tensors(q, k, v, mask));
    };
    let alone = AttentionMask { keys: KeyMask::All, ..mask.clone() };
    let part = |x: &Tensor<4>, bounds: &[usize]| x.clone().narrow(2, bounds[0], bounds[1] - bounds[0]);
    let sequences = query_bounds.windows(2).zip(key_bounds.windows(2)).filter(|(rows, _)| rows[0] < rows[1]);
    let outputs = sequences.map(|(rows, keys)| {
        if keys[0] == keys[1] {
            return nothing(rows[1] - rows[0]);
        }
        layer.in_tensors(part(&q, rows), part(&k, keys), part(&v, keys), &alone)
    });
    Ok(Tensor::cat(outputs.collect(), 2))
}

/// All learned tensors, concatenated.
///
/// # Errors
/// If they are not of the type that the layer is called with.
#[cfg(feature = "flex")]
pub(crate) fn flat(layer: &dyn Layer, dtype: DType) -> Result<Option<Tensor<1>>> {
    let mut all = layer.parameters();
    for learned in &all {
        let expected =
            || format!("{:?} everywhere, like the layer's learned tensors; cast one of them", learned.dtype());
        let got = || format!("{dtype:?} queries, keys and values");
        argument(learned.dtype() == dtype, layer.name(), "number types", expected, got)?;
    }
    Ok(if all.len() > 1 { Some(Tensor::cat(all, 0)) } else { all.pop() })
}

/// Whether a tensor lies on the CPU backend, with or without autodiff.
#[cfg(feature = "flex")]
fn is_flex(x: &Tensor<4>) -> bool {
    matches!(x.device().inner().as_dispatch(), DispatchDevice::Flex(_))
}

/// Whether a step with this query can run in the kernels.
pub(crate) fn steps_in_kernels(q: &Tensor<4>) -> bool {
    #[cfg(feature = "flex")]
    return is_flex(q) && !q.device().is_autodiff();
    #[cfg(not(feature = "flex"))]
    {
        let _ = q;
        false
    }
}

/// Takes one token into `state` and gives its output: the row that [`attend`] gives under a causal mask.
///
/// # Shapes
/// As in [`attend`] with one query and one key.
///
/// # Errors
/// Shapes or options that do not fit together or the state.
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
    #[cfg(feature = "flex")]
    if steps_in_kernels(&q) && !layer.keeps_past() {
        return step_kernel(layer, q, k, v, state);
    }
    let mut inner = match state.inner.take() {
        None => None,
        Some(state::Inner::Tensors(inner)) => Some(inner),
        #[cfg(feature = "flex")]
        Some(other) => {
            state.inner = Some(other);
            return Err(foreign_state(layer));
        }
    };
    let out = step_in_tensors(layer, q, k, v, &mut inner);
    state.inner = inner.map(state::Inner::Tensors);
    out
}

/// [`step`] in tensor operations.
fn step_in_tensors(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut Option<TensorState>,
) -> Result<Tensor<4>> {
    let ([batch, heads, _, _], [_, _, _, value_dim]) = (q.dims(), v.dims());
    if let Some(sums) = layer.sums() {
        let empty = || TensorState::Sums(Box::new(sums.empty(&q, value_dim)));
        if let TensorState::Sums(running) = state.get_or_insert_with(empty) {
            let (expected, got) = (running.shape(), [batch, heads, value_dim]);
            let text =
                |[batch, heads, dim]: [usize; 3]| move || format!("batch {batch}, {heads} heads, values of {dim}");
            argument(expected == got, layer.name(), "state", text(got), text(expected))?;
            check_by_kernel(layer, &q, &k, &v, &AttentionMask::causal())?;
            return Ok(sums.step(q, k, v, running));
        }
    }
    let (keys, values) = match state {
        None => (k, v),
        Some(TensorState::Sums(_)) => return Err(foreign_state(layer)),
        Some(TensorState::Past(past)) => join_past(layer, past, k, v)?,
    };
    let mask = AttentionMask::causal().with_offset(keys.dims()[2] as isize - 1);
    let out = in_tensors(layer, q, keys.clone(), values.clone(), &mask)?;
    *state = Some(TensorState::Past(Box::new([keys, values])));
    Ok(out)
}

/// The keys and values of a state and those that come after them.
fn join_past(layer: &dyn Layer, past: &[Tensor<4>; 2], k: Tensor<4>, v: Tensor<4>) -> Result<(Tensor<4>, Tensor<4>)> {
    let [keys, values] = past;
    let rest = |x: &Tensor<4>| (x.dims()[..2].to_vec(), x.dims()[3], x.dtype());
    let expected = || format!("keys and values such as {:?} and {:?}", k.dims(), v.dims());
    let got = || format!("{:?} and {:?}", keys.dims(), values.dims());
    argument(rest(keys) == rest(&k) && rest(values) == rest(&v), layer.name(), "state", expected, got)?;
    Ok((Tensor::cat(vec![keys.clone(), k], 2), Tensor::cat(vec![values.clone(), v], 2)))
}

/// [`step`] in the kernels.
#[cfg(feature = "flex")]
fn step_kernel(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    state: &mut AttentionState,
) -> Result<Tensor<4>> {
    fn primitive<const D: usize>(x: Tensor<D>) -> Result<burn_flex::FlexTensor> {
        x.try_into_primitive::<Flex>().map_err(|error| Error::Device(format!("{error:?}")))
    }
    let kernel = &*layer.kernel();
    let sizes = [k.dims()[0], k.dims()[1]];
    let parameters = flat(layer, q.dtype())?.map(primitive).transpose()?;
    let operands =
        flex::Operands { q: primitive(q)?, k: primitive(k)?, v: primitive(v)?, parameters }.with_adjacent_rows();
    if state.inner.is_none() {
        state.inner = Some(Inner::Kernels(flex::PrefixState::empty(kernel, &operands)?));
    }
    match &mut state.inner {
        Some(Inner::Kernels(prefix)) if prefix.dtype() == flex::computed(operands.q.dtype()) => {
            // Heads and their width are one number to the kernel, which sees their product alone.
            let shape = prefix.shape();
            let text = |[batch, heads]: [usize; 2]| move || format!("batch {batch}, {heads} key/value heads");
            let got = [shape.batch, shape.kv_heads];
            argument(got == sizes, layer.name(), "state", text(sizes), text(got))?;
            Ok(Tensor::from_primitive::<Flex>(prefix.step(kernel, &operands)?))
        }
        _ => Err(foreign_state(layer)),
    }
}

pub(crate) fn foreign_state(layer: &dyn Layer) -> Error {
    Error::Argument {
        operation: layer.name(),
        argument: "state",
        expected: "a state of the same mechanism, device and number type, with or without autodiff".into(),
        got: "one of another".into(),
    }
}

/// `state` as numbers.
pub(crate) fn store(layer: &dyn Layer, state: &AttentionState) -> Result<StoredState> {
    state.to_stored(layer.name())
}

/// Rebuilds a state of `layer` on `device` from its numbers.
pub(crate) fn restore(layer: &dyn Layer, stored: &StoredState, device: &Device) -> Result<AttentionState> {
    AttentionState::from_stored(layer, stored, device)
}

/// Checks that the tensors fit the module and each other.
pub(crate) fn check(layer: &dyn Layer, q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
    layer.ready()?;
    let name = layer.name();
    let Heads { heads, kv_heads, head_dim } = layer.heads();
    let key_dim = layer.key_dim();
    let ([batch, _, queries, _], [_, _, keys, _], [_, _, _, value_dim]) = (q.dims(), k.dims(), v.dims());
    for (argument_name, x, shape, text) in [
        ("q", q, [batch, heads, queries, head_dim], format!("[batch, {heads}, queries, {head_dim}]")),
        ("k", k, [batch, kv_heads, keys, key_dim], format!("[{batch}, {kv_heads}, keys, {key_dim}]")),
        ("v", v, [batch, kv_heads, keys, value_dim], format!("[{batch}, {kv_heads}, {keys}, value_dim]")),
    ] {
        argument(x.dims() == shape, name, argument_name, || text, || format!("{:?}", x.dims()))?;
    }
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    let expected = || format!("{:?} everywhere, like q", q.dtype());
    argument(dtypes.iter().all(|&dtype| dtype == q.dtype()), name, "number types", expected, || format!("{dtypes:?}"))
}

/// The kernel's own checks of options, mask and sizes, for calls that run in tensor operations.
pub(crate) fn check_by_kernel(
    layer: &dyn Layer,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    mask: &AttentionMask,
) -> Result<()> {
    let ([batch, heads, queries, head_dim], [_, kv_heads, keys, key_dim]) = (q.dims(), k.dims());
    let dims = Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim: v.dims()[3] };
    let kernel = layer.kernel();
    let kernel: &dyn Kernel<f32> = &*kernel;
    // The numbers do not matter to the checks: one row of zeros is every row.
    let zeros = vec![0.0_f32; head_dim.max(key_dim).max(dims.value_dim)];
    let rows = || View::strided(&zeros, [0; 3]);
    let parameters: Vec<Vec<f32>> = kernel.parameters(&dims).iter().map(|p: &Parameter| vec![0.0; p.len()]).collect();
    let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
    let mask = mask.as_kernel();
    Ok(kernel.check(&Call::new(dims, rows(), rows(), rows()).with_parameters(&parameters).with_mask(mask))?)
}
