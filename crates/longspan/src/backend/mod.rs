//! Runs attention, over whole sequences or token by token, in the kernels or in tensor operations.
//!
//! `attend` checks shapes and chooses. On Burn's CPU backend (Flex) the kernels run on the tensors' own numbers,
//! without a copy, with a backward of their own that keeps no more than the outputs and the denominators. On every
//! other backend the same mathematics runs in plain tensor operations, which Burn differentiates. Both work for any
//! mechanism: the first calls an [`AnyKernel`], the second the tensor operations of the mechanism's module, a `Layer`.

mod advance;
pub(crate) mod feature_map;
mod flex;
pub(crate) mod operation;
pub(crate) mod pairs;
mod peers;
mod running;
mod state;
mod stretches;
pub(crate) mod tensor;
#[cfg(all(test, feature = "autodiff", feature = "flex"))]
pub(crate) mod tests;

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
pub use longspan_kernels::AnyKernel;
use longspan_kernels::{Call, Dims, Kernel, Parameter, View};

pub(crate) use advance::states_of;
pub(crate) use advance::{advance, check_step, foreign_state, kernels_take, step};
pub(crate) use feature_map::Learned;
#[cfg(all(test, feature = "flex"))]
pub(crate) use flex::copies::count as count_copy;
pub(crate) use flex::{Outside, States, adjacent_rows, check_token, split_parameters, view_f32, with_scratch};
pub use peers::Peers;
pub(crate) use running::{Running, zeros_like};
pub use state::{AttentionState, StateForm, StoredState};
pub(crate) use state::{TensorState, maker};
pub(crate) use tensor::Total;

use crate::attention::{AttentionMask, Heads, KeyMask};
use crate::error::{Result, argument};

/// What attention needs to know of a mechanism's module.
pub(crate) trait Layer: Debug {
    /// The mechanism's name.
    fn name(&self) -> &'static str;

    /// The kernel with the module's options.
    fn kernel(&self) -> Arc<dyn AnyKernel>;

    /// The same at positions that are given with each call, where the mechanism takes them.
    fn kernel_at_positions(&self) -> Option<Arc<dyn AnyKernel>> {
        None
    }

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

    /// Numbers in a value of one head, where what is learned says so.
    fn value_dim(&self) -> Option<usize> {
        None
    }

    /// The learned tensors, flat, in the kernel's order.
    fn parameters(&self) -> Vec<Tensor<1>>;

    /// The same attention in tensor operations. Shapes have been checked, none is empty, and sequences are not packed.
    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4>;

    /// How many of the latest tokens a query sees under a causal mask, its own among them; `None` where it sees all.
    fn sees(&self) -> Option<usize> {
        None
    }

    /// A state of sums in tensors; `None` where it is the keys and values that are [seen](Self::sees).
    fn sums(&self) -> Option<&dyn Sums> {
        None
    }

    /// What the feature map learns.
    fn learned(&self) -> Learned {
        None
    }

    /// A summary of a memory that answers queries, where one smaller than its keys and values exists.
    fn total(&self, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Option<Total> {
        let _ = (k, v, mask);
        None
    }
}

/// A state of sums in tensors, of constant size.
pub(crate) trait Sums {
    /// The state before the first token, for queries such as `like` and values of `value_dim`.
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running;

    /// Takes the tokens of queries, keys and values in and gives their outputs.
    fn advance(&self, qkv: [Tensor<4>; 3], state: &mut Running) -> Tensor<4>;

    /// How many places of a table of positions the tokens of a state have taken.
    fn taken(&self, _: &Running) -> usize {
        0
    }
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
    if is_flex(&q) {
        let parameters = flat(layer, place(&q))?;
        let mask = mask.listed(layer.name(), [q.dims()[0], k.dims()[2]])?;
        return run(flex::Settings::new(layer.kernel(), mask), q, k, v, parameters);
    }
    in_tensors(layer, q, k, v, mask)
}

/// [`attend`] on the CPU backend in both directions with keys before and after those that are given: queries stand at the keys from
/// `first` on.
pub(crate) fn attend_between(
    layer: &dyn Layer,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    first: usize,
    outside: &Outside,
) -> Result<Tensor<4>> {
    check(layer, &q, &k, &v)?;
    let parameters = flat(layer, place(&q))?;
    let mask = AttentionMask::bidirectional().with_offset(first as isize);
    let settings = flex::Settings { outside: Some(outside.clone()), ..flex::Settings::new(layer.kernel(), mask) };
    run(settings, q, k, v, parameters)
}

/// Attention by the kernels on tensors of the CPU backend.
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
    learned(layer, place(&q))?;
    check_by_kernel(layer, dims_of(&q, &v), mask)?;
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

/// The device and the number type of a tensor.
pub(crate) fn place<const D: usize>(x: &Tensor<D>) -> (Device, DType) {
    (x.device(), x.dtype())
}

/// Whether tensors of these devices can be in one operation: with autodiff or without, but under one strategy of gradient checkpointing.
pub(crate) fn meet(one: &Device, other: &Device) -> bool {
    #[cfg(feature = "autodiff")]
    {
        let strategies = [one, other].map(Device::gradient_checkpointing_strategy);
        if strategies[0] != strategies[1] && !strategies.contains(&None) {
            return false;
        }
    }
    one == other
}

/// A tensor without autodiff.
pub(crate) fn plain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "autodiff")]
    let x = x.without_autodiff();
    x
}

/// All learned tensors.
///
/// # Errors
/// If they are not of the device and the type that the layer is called with.
pub(crate) fn learned(layer: &dyn Layer, called: (Device, DType)) -> Result<Vec<Tensor<1>>> {
    let all = layer.parameters();
    for (device, dtype) in all.iter().map(place) {
        let expected = || format!("{dtype:?} everywhere, like the layer's learned tensors; cast one of them");
        let got = || format!("{:?} queries, keys and values", called.1);
        argument(dtype == called.1, layer.name(), "number types", expected, got)?;
        let expected = || format!("{device:?} everywhere, like the layer's learned tensors; move one of them");
        argument(meet(&device, &called.0), layer.name(), "devices", expected, || format!("{:?}", called.0))?;
    }
    Ok(all)
}

/// All [learned] tensors, concatenated.
pub(crate) fn flat(layer: &dyn Layer, called: (Device, DType)) -> Result<Option<Tensor<1>>> {
    let mut all = learned(layer, called)?;
    Ok(if all.len() > 1 { Some(Tensor::cat(all, 0)) } else { all.pop() })
}

/// Whether a tensor lies on the CPU backend, with or without autodiff.
pub(crate) fn is_flex<const D: usize>(x: &Tensor<D>) -> bool {
    crate::cpu::is_flex(&x.device())
}

/// Checks that the tensors fit the module and each other.
pub(crate) fn check(layer: &dyn Layer, q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
    layer.ready()?;
    let name = layer.name();
    let Heads { heads, kv_heads, head_dim } = layer.heads();
    let key_dim = layer.key_dim();
    let ([batch, _, queries, _], [_, _, keys, _], [_, _, _, value_dim]) = (q.dims(), k.dims(), v.dims());
    let (value_dim, of_values) =
        layer.value_dim().map_or((value_dim, "value_dim".into()), |dim| (dim, dim.to_string()));
    for (argument_name, x, shape, text) in [
        ("q", q, [batch, heads, queries, head_dim], format!("[batch, {heads}, queries, {head_dim}]")),
        ("k", k, [batch, kv_heads, keys, key_dim], format!("[{batch}, {kv_heads}, keys, {key_dim}]")),
        ("v", v, [batch, kv_heads, keys, value_dim], format!("[{batch}, {kv_heads}, {keys}, {of_values}]")),
    ] {
        argument(x.dims() == shape, name, argument_name, || text, || format!("{:?}", x.dims()))?;
    }
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    let expected = || format!("{:?} everywhere, like q", q.dtype());
    argument(dtypes.iter().all(|&dtype| dtype == q.dtype()), name, "number types", expected, || format!("{dtypes:?}"))?;
    let devices = [q, k, v].map(Tensor::device);
    let expected = || format!("{:?} everywhere, like q", devices[0]);
    let alike = meet(&devices[0], &devices[1]) && meet(&devices[0], &devices[2]) && meet(&devices[1], &devices[2]);
    argument(alike, name, "devices", expected, || format!("{devices:?}"))
}

/// The sizes of a call.
pub(crate) fn dims_of(q: &Tensor<4>, v: &Tensor<4>) -> Dims {
    let ([batch, heads, queries, head_dim], [_, kv_heads, keys, value_dim]) = (q.dims(), v.dims());
    Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim }
}

/// The kernel's own checks of options, mask and sizes, for calls that run in tensor operations.
pub(crate) fn check_by_kernel(layer: &dyn Layer, dims: Dims, mask: &AttentionMask) -> Result<()> {
    let kernel = layer.kernel();
    let kernel: &dyn Kernel<f32> = &*kernel;
    let mask = mask.unread(layer.name(), [dims.batch, dims.keys])?;
    // The numbers do not matter to the checks: one row of zeros is every row, and a part of them every learned tensor.
    let learned = kernel.parameters(&dims);
    let widths = [dims.head_dim, kernel.key_dim(&dims), dims.value_dim];
    let most = learned.iter().map(Parameter::len).chain(widths).max().unwrap_or(0);
    let zeros = vec![0.0_f32; most];
    let rows = || View::strided(&zeros, [0; 3]);
    let parameters: Vec<&[f32]> = learned.iter().map(|learned| &zeros[..learned.len()]).collect();
    Ok(kernel
        .check(&Call::new(dims, rows(), rows(), rows()).with_parameters(&parameters).with_mask(mask.as_kernel()))?)
}
