//! One token through a whole encoder layer as one call: around products of one row, PyTorch's own operations take several times as
//! long as the products.

use std::cell::Cell;

use longspan_kernels::layers::{Activation, NormWeights, Weights};
use longspan_kernels::{Dims, Error, Kernel, State as KernelState, Token};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{Dtype, Precision, Tensor};
use crate::call::Mechanism;
use crate::precise::Precise;
use crate::results::Fresh;
use crate::state::State;
use crate::{error, threads};

/// What the layer has learned, in the order of its computation.
const NAMES: [&str; 6] = ["in_proj", "out_proj", "norm1", "linear1", "linear2", "norm2"];

thread_local! {
    static MEMORY: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A layer's weights, and what it does with them.
struct Layer<'a> {
    kernel: &'a dyn Kernel<f32>,
    dims: Dims,
    parameters: &'a [&'a [f32]],
    projection: Weights<'a>,
    output: Weights<'a>,
    norms: [NormWeights<'a>; 2],
    inner: Weights<'a>,
    activation: Activation,
    outer: Weights<'a>,
    norm_first: bool,
}

impl Layer<'_> {
    /// Numbers that the weights of products have.
    fn numbers(&self) -> usize {
        [self.projection, self.output, self.inner, self.outer].iter().map(|weights| weights.weight.len()).sum()
    }

    /// Writes the layer's rows for `x`, one of each sequence, and takes them into the state.
    fn step(
        &self,
        x: &[f32],
        state: &mut KernelState<f32>,
        out: &mut [f32],
        memory: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let width = self.dims.heads * self.dims.head_dim;
        let hidden = self.inner.weight.len() / width;
        let (batch, key_dim) = (self.dims.batch, self.kernel.key_dim(&self.dims));
        let columns = [width, self.dims.kv_heads * key_dim, self.dims.kv_heads * self.dims.head_dim];
        memory.clear();
        memory.resize(batch * (3 * width + columns.iter().sum::<usize>() + hidden), 0.0);
        let mut rest = memory.as_mut_slice();
        let mut take = |len: usize| {
            let (piece, others) = std::mem::take(&mut rest).split_at_mut(batch * len);
            rest = others;
            piece
        };
        let (normed, heads, middle, sums) = (take(width), take(width), take(width), take(hidden));
        let [q, k, v] = columns.map(take);

        let input = if self.norm_first { norm_of(&self.norms[0], x, normed)? } else { x };
        let mut first = 0;
        for (to, len) in [(&mut *q, columns[0]), (&mut *k, columns[1]), (&mut *v, columns[2])] {
            let weight = &self.projection.weight[first * width..][..len * width];
            let bias = self.projection.bias.map(|bias| &bias[first..][..len]);
            Weights { weight, bias }.step_transposed(input, width, to)?;
            first += len;
        }
        self.kernel.step(&Token { q, k, v, parameters: self.parameters }, state, heads)?;
        self.add(0, self.output, (heads, width), x, middle, normed)?;
        let input = if self.norm_first { norm_of(&self.norms[1], middle, normed)? } else { &*middle };
        self.inner.step_transposed(input, width, sums)?;
        self.activation.step(sums);
        self.add(1, self.outer, (sums, hidden), middle, out, normed)
    }

    /// `out = x + branch·Wᵀ + b`, or its norm.
    fn add(
        &self,
        part: usize,
        weights: Weights<'_>,
        (branch, inputs): (&[f32], usize),
        x: &[f32],
        out: &mut [f32],
        memory: &mut [f32],
    ) -> Result<(), Error> {
        let sum = if self.norm_first { &mut *out } else { &mut *memory };
        weights.step_transposed(branch, inputs, sum)?;
        sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += x);
        if self.norm_first { Ok(()) } else { self.norms[part].step(memory, out) }
    }
}

fn norm_of<'m>(norm: &NormWeights<'_>, x: &[f32], memory: &'m mut [f32]) -> Result<&'m [f32], Error> {
    norm.step(x, memory)?;
    Ok(memory)
}

/// A layer's weight and bias, as arrays.
struct Learned<'py> {
    weight: Tensor<'py>,
    bias: Option<Tensor<'py>>,
}

impl<'py> Learned<'py> {
    fn new(operation: &str, name: &str, weight: &Bound<'py, PyAny>, bias: &Bound<'py, PyAny>) -> PyResult<Self> {
        let given = |value: &Bound<'py, PyAny>| Tensor::like(operation, name, value, Dtype::F32)?.row_major();
        Ok(Self { weight: given(weight)?, bias: (!bias.is_none()).then(|| given(bias)).transpose()? })
    }

    fn weights(&self) -> Weights<'_> {
        Weights { weight: self.weight.numbers(), bias: self.bias.as_ref().map(Tensor::numbers) }
    }

    fn norm(&self, epsilon: f32) -> NormWeights<'_> {
        let Weights { weight, bias } = self.weights();
        NormWeights { gamma: weight, beta: bias, centred: true, epsilon }
    }
}

/// One token of each sequence, ``[batch, width]``, through an encoder layer in single precision: its rows, and the state, changed
/// in place. ``weights`` are weight and bias, or ``None``, of the input and output projections, the first norm, both linear layers and
/// the second norm, as `torch.nn` lays them out; ``heads`` those of queries and of keys.
#[pyfunction]
#[pyo3(signature = (mechanism, x, weights, parameters, heads, epsilons, activation, norm_first, state=None))]
#[allow(clippy::too_many_arguments)]
pub fn encoder_layer_step<'py>(
    py: Python<'py>,
    mechanism: PyRef<'py, Mechanism>,
    x: &Bound<'py, PyAny>,
    weights: &Bound<'py, PyTuple>,
    parameters: &Bound<'py, PyTuple>,
    heads: (usize, usize),
    epsilons: (f32, f32),
    activation: &str,
    norm_first: bool,
    state: Option<Bound<'py, State>>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, State>)> {
    let operation = mechanism.operation();
    let x = Tensor::like(operation, "token", x, Dtype::F32)?.row_major()?;
    let &[batch, width] = x.shape() else {
        return Err(error::value(operation, "token", "shape (batch, width)", format_args!("{} axes", x.shape().len())));
    };
    let mut learned = Vec::with_capacity(NAMES.len());
    for (n, name) in NAMES.into_iter().enumerate() {
        learned.push(Learned::new(operation, name, &weights.get_item(2 * n)?, &weights.get_item(2 * n + 1)?)?);
    }
    let [projection, output, first_norm, inner, outer, second_norm] = &learned[..] else {
        unreachable!("as many as there are names");
    };
    let head_dim = width.checked_div(heads.0).unwrap_or(0);
    let dims = Dims { batch, heads: heads.0, kv_heads: heads.1, queries: 1, keys: 1, head_dim, value_dim: head_dim };
    let kernel = f32::kernel(mechanism.kernel());
    let columns = width + heads.1 * (kernel.key_dim(&dims) + head_dim);
    let hidden = inner.weight.shape().first().copied().unwrap_or(0);
    let expected: [(&Learned<'_>, &[usize]); 6] = [
        (projection, &[columns, width]),
        (output, &[width, width]),
        (first_norm, &[width]),
        (inner, &[hidden, width]),
        (outer, &[width, hidden]),
        (second_norm, &[width]),
    ];
    for ((learned, shape), name) in expected.into_iter().zip(NAMES) {
        mechanism.expect_shape(name, &learned.weight, shape)?;
        learned.bias.as_ref().map_or(Ok(()), |bias| mechanism.expect_shape(name, bias, &shape[..1]))?;
    }
    let parameters = mechanism.parameters(&dims, Dtype::F32, parameters)?;
    let parameters: Vec<&[f32]> = parameters.iter().map(Tensor::numbers).collect();
    let activation = match activation {
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        other => return Err(error::value(operation, "activation", "relu or gelu", other)),
    };
    let layer = Layer {
        kernel,
        dims,
        parameters: &parameters,
        projection: projection.weights(),
        output: output.weights(),
        norms: [first_norm.norm(epsilons.0), second_norm.norm(epsilons.1)],
        inner: inner.weights(),
        activation,
        outer: outer.weights(),
        norm_first,
    };
    let state = mechanism.state_of_step(py, &dims, state, Precision::F32)?;
    let mut out = Fresh::new(py, &[batch, width], Dtype::F32)?;
    if batch > 0 && width > 0 {
        let mut held = mechanism.held(&state, batch, heads.1)?;
        let held = mechanism.state_mut::<f32>(&mut held)?;
        let (x, numbers) = (x.numbers::<f32>(), out.numbers_mut::<f32>());
        // Both are read once, weights from a cache at best.
        let seconds = layer.numbers() as f64 * 0.1e-9 + held.numbers().len() as f64 * 0.5e-9;
        py.detach(|| {
            let mut memory = MEMORY.take();
            let done = threads::run(seconds, || layer.step(x, held, numbers, &mut memory), None);
            MEMORY.set(memory);
            done
        })
        .map_err(|e| mechanism.failed(e))?;
    }
    Ok((out.finish().into_any(), state))
}
