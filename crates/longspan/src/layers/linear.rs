//! Linear layers with what follows them, on tokens.

use std::f64::consts::FRAC_1_SQRT_2;

use burn::config::Config;
use burn::module::{Module, Param, ParamId};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::module::linear as plain_linear;
use burn::tensor::{DType, Device, Tensor};
use longspan_kernels::Error;
use longspan_layers::{self as kernels, Dropout, Kept, LinearGradients};

use super::flex::{gradients, is_f32, numbers, of_layer, places, shape, tensor};
use crate::backend::operation::{Operation, run};
use crate::backend::tensor::{narrow_float, sigmoid, silu, widen};
use crate::backend::{meet, place};
use crate::cpu::FlexTensor;
use crate::error::{Result, argument};

/// What a linear layer does to each of its sums.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `x Φ(x)`, with the normal distribution's `Φ` (Hendrycks and Gimpel 2016).
    Gelu,
    /// GELU's approximation by a hyperbolic tangent.
    GeluTanh,
    /// `x / (1 + e⁻ˣ)`, also known as swish.
    Silu,
}

/// What follows a layer: `residual + dropout(y)`.
#[derive(Debug, Clone, Default)]
pub struct After<const D: usize = 3> {
    /// With which probability a number of `y` is dropped, on a device that trains.
    pub dropout: f64,
    /// As large as `y`.
    pub residual: Option<Tensor<D>>,
}

/// `residual + dropout(f(x·weight + bias))` for each token, as one operation on the CPU backend.
///
/// Gradients, for `z = x·W + b` and `dz = dropout(dy) ⊙ f′(z)`: `dx = dz·Wᵀ`, `dW = xᵀ·dz`, `db = Σ dz`; that of the residual is `dy`.
///
/// # Shapes
/// `x`: `[.., inputs]`; `weight`: `[inputs, outputs]`; `bias`: `[outputs]`; `residual` and output: `[.., outputs]`.
///
/// # Errors
/// Shapes or number types that do not fit.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: Activation,
    After { dropout, residual }: After<D>,
) -> Result<Tensor<D>> {
    const NAME: &str = "linear";
    check_rows(NAME, "x", &x, &weight)?;
    let mut shape = x.dims();
    let ([inputs, outputs], rows) = (weight.dims(), shape[..D - 1].iter().product::<usize>());
    shape[D - 1] = outputs;
    let dtype = x.dtype();
    if let Some(bias) = &bias {
        check_like(NAME, "bias", bias, [outputs], &x)?;
    }
    if let Some(residual) = &residual {
        check_like(NAME, "residual", residual, shape, &x)?;
    }
    super::dropout::check(dropout)?;
    if rows * outputs == 0 {
        return Ok(Tensor::zeros(shape, (&x.device(), dtype)));
    }
    // One product of all rows: Burn's own choice for a batch may be a small one for each entry.
    let x = reshape(x, [rows, inputs]);
    let residual = residual.map(|residual| residual.reshape([rows, outputs]));
    if is_f32(&x) && is_f32(&weight) {
        let dropout = super::dropout::drawn(dropout, [&x.device(), &weight.device()]);
        let activation = activation.into();
        let operation = LinearOperation { activation, dropout, bias: bias.is_some(), residual: residual.is_some() };
        let mut others = vec![weight.into_dispatch()];
        others.extend(bias.map(Tensor::into_dispatch));
        others.extend(residual.map(Tensor::into_dispatch));
        let y: Tensor<2> = run(operation, x.into_dispatch(), others)?;
        return Ok(y.reshape(shape));
    }
    let sums = match (inputs, bias) {
        // Not every backend has a product of rows without numbers.
        (0, Some(bias)) => bias.unsqueeze::<2>().expand([rows, outputs]),
        (0, None) => Tensor::zeros([rows, outputs], (&x.device(), dtype)),
        (_, bias) => plain_linear(x, weight, bias),
    };
    let y = activate(sums, activation);
    let y = super::dropout(y, dropout)?;
    let y = match residual {
        Some(residual) => residual + y,
        None => y,
    };
    Ok(y.reshape(shape))
}

/// Checks that rows have the width and the number type of what a layer has learned, `[width, ..]`.
pub(crate) fn check_rows<const D: usize, const E: usize>(
    operation: &'static str,
    name: &'static str,
    x: &Tensor<D>,
    learned: &Tensor<E>,
) -> Result<()> {
    let (width, dtype) = (learned.dims()[0], learned.dtype());
    let [device, own] = [x.device(), learned.device()];
    let alike = meet(&device, &own) && (x.dtype() == dtype || matches!(dtype, DType::QFloat(_)));
    let expected = || format!("rows of {width} numbers of {dtype:?} on {own:?}, as the layer has them");
    let got = || format!("{:?} of {:?} on {device:?}", x.dims(), x.dtype());
    argument(alike && x.dims()[D - 1] == width, operation, name, expected, got)
}

/// Checks that all that a module has learned is of one number type, before a step changes a state.
pub(crate) fn check_types(operation: &'static str, module: &impl Module) -> Result<()> {
    let mut types: Vec<DType> = places(module).into_iter().map(|(_, dtype)| dtype).collect();
    types.retain(|dtype| !matches!(dtype, DType::QFloat(_)));
    types.dedup();
    let expected = || "one for all that is learned; cast the others".into();
    argument(types.len() < 2, operation, "number types", expected, || format!("{types:?}"))
}

/// Checks that a tensor has this shape, and the number type and the device of another.
pub(crate) fn check_like<const D: usize, const E: usize>(
    operation: &'static str,
    name: &'static str,
    x: &Tensor<D>,
    shape: [usize; D],
    like: &Tensor<E>,
) -> Result<()> {
    let ((device, dtype), (expected_device, expected_dtype)) = (place(x), place(like));
    let alike = dtype == expected_dtype || [dtype, expected_dtype].iter().any(|x| matches!(x, DType::QFloat(_)));
    let expected = || format!("{shape:?} of {expected_dtype:?} on {expected_device:?}");
    let got = || format!("{:?} of {dtype:?} on {device:?}", x.dims());
    argument(x.dims() == shape && alike && meet(&device, &expected_device), operation, name, expected, got)
}

/// `x` in another shape. Burn reads a size of 0 as that of the same axis before.
pub(crate) fn reshape<const D: usize, const E: usize>(x: Tensor<D>, shape: [usize; E]) -> Tensor<E> {
    if shape.contains(&0) { Tensor::zeros(shape, (&x.device(), x.dtype())) } else { x.reshape(shape) }
}

/// An activation in tensor operations.
pub(super) fn activate<const D: usize>(z: Tensor<D>, activation: Activation) -> Tensor<D> {
    match activation {
        Activation::Identity => z,
        Activation::Relu => relu(z),
        // Burn's own has the gradient of the approximation.
        Activation::Gelu => {
            let (dtype, z) = (z.dtype(), widen(z));
            narrow_float(z.clone() * ((z * FRAC_1_SQRT_2).erf() + 1.0) * 0.5, dtype)
        }
        Activation::GeluTanh => {
            // A third power soon has no place in `f16`.
            let (dtype, z) = (z.dtype(), widen(z));
            let inner = (z.clone() + z.clone().powi_scalar(3) * 0.044_715) * (8.0 / std::f64::consts::PI).sqrt();
            narrow_float(z * sigmoid(inner), dtype)
        }
        Activation::Silu => silu(z),
    }
}

/// A layer with fresh weights.
pub(crate) fn fresh(inputs: usize, outputs: usize, device: &Device) -> Linear {
    LinearConfig::new(inputs, outputs).with_initializer(Initializer::XavierUniform { gain: 1.0 }).init(device)
}

/// A layer whose weights an initializer draws, if one is given, each part of the columns by itself: its size is the fan. Biases are then 0.
pub(crate) fn drawn(initializer: Option<&Initializer>, inputs: usize, parts: &[usize], device: &Device) -> Linear {
    let outputs = parts.iter().sum();
    let Some(initializer) = initializer.cloned() else { return fresh(inputs, outputs, device) };
    let parts = parts.to_vec();
    let draw = move |device: &Device, require_grad: bool| {
        let part = |&columns: &usize| {
            let part: Param<Tensor<2>> = initializer.init_with([inputs, columns], Some(inputs), Some(columns), device);
            part.val()
        };
        // Cut from the graph last: what a graph has made of others is no parameter.
        let weight = Tensor::cat(parts.iter().map(part).collect(), 1).detach();
        if require_grad { weight.require_grad() } else { weight }
    };
    let weight = Param::uninitialized(ParamId::new(), draw, device.clone(), true, [inputs, outputs].into());
    Linear { weight, bias: Some(Initializer::Zeros.init([outputs], device)) }
}

/// [`linear`] by a layer's parameters.
pub(crate) fn apply(layer: &Linear, x: Tensor<3>, activation: Activation, after: After) -> Result<Tensor<3>> {
    linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()), activation, after)
}

impl From<Activation> for kernels::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Identity => Self::Identity,
            Activation::Relu => Self::Relu,
            Activation::Gelu => Self::Gelu,
            Activation::GeluTanh => Self::GeluTanh,
            Activation::Silu => Self::Silu,
        }
    }
}

/// What the operation does, and which of its tensors are there: `x`, the weight, the bias, the residual.
#[derive(Debug, Clone, Copy)]
struct LinearOperation {
    activation: kernels::Activation,
    dropout: Option<Dropout>,
    bias: bool,
    residual: bool,
}

impl LinearOperation {
    fn call<'a>(&self, tensors: &'a [FlexTensor]) -> kernels::Linear<'a> {
        let [x, weight, others @ ..] = tensors else { unreachable!("x and a weight") };
        let ([rows, inputs], [_, outputs]) = (shape(x).dims(), shape(weight).dims::<2>());
        let mut others = others.iter().map(numbers);
        let Self { activation, dropout, bias, residual } = *self;
        kernels::Linear::new(numbers(x), numbers(weight), [rows, inputs, outputs])
            .with_bias(bias.then(|| others.next()).flatten())
            .with_activation(activation)
            .with_dropout(dropout)
            .with_residual(residual.then(|| others.next()).flatten())
    }
}

impl Operation for LinearOperation {
    const NAME: &'static str = "linear layers";

    /// The result, and what the kernel keeps.
    type Kept = (FlexTensor, Kept);

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
        let call = self.call(tensors);
        Ok(tensor(call.forward()?, [call.rows, call.outputs]))
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Self::Kept), Error> {
        let call = self.call(tensors);
        let sizes = [call.rows, call.outputs];
        let (out, kept) = call.training()?;
        let out = tensor(out, sizes);
        Ok((out.clone(), (out, kept)))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        (out, kept): &Self::Kept,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let found = self.call(tensors).backward(numbers(out), kept, numbers(&d_out))?;
        let LinearGradients { dx, d_weight, d_bias, .. } = found;
        let mut all = gradients([dx].into_iter().chain(of_layer([d_weight, d_bias], self.bias)), tensors);
        all.extend(self.residual.then_some(Some(d_out)));
        Ok(all)
    }
}
