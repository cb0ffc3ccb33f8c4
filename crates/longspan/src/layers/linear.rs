//! Linear layers with what follows them, on tokens.

#![cfg_attr(
    feature = "flex",
    allow(
        deprecated,
        reason = "the dispatch that `backend_extension` generates names backends that Burn has deprecated"
    )
)]

use burn::nn::{DropoutConfig, Linear};
use burn::tensor::module::linear as plain_linear;
use burn::tensor::{Tensor, activation as burn_activation};
pub use longspan_kernels::layers::Activation;

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
/// # Panics
/// If the shapes do not fit, as Burn's own operations do.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: Activation,
    After { dropout, residual }: After<D>,
) -> Tensor<D> {
    let mut shape = x.dims();
    let ([inputs, outputs], rows) = (weight.dims(), shape[..D - 1].iter().product::<usize>());
    assert_eq!(shape[D - 1], inputs, "linear: x has rows of {}, the weight {inputs}", shape[D - 1]);
    shape[D - 1] = outputs;
    // One product of all rows: Burn's own choice for a batch may be a small one for each entry.
    let x = x.reshape([rows, inputs]);
    let residual = residual.map(|residual| residual.reshape([rows, outputs]));
    #[cfg(feature = "flex")]
    if super::flex::is_f32(&x) && super::flex::is_f32(&weight) {
        let dropout = if x.device().is_autodiff() { fused::drawn(dropout, &x) } else { None };
        return fused::linear(x, weight, bias, residual, activation, dropout).reshape(shape);
    }
    let z = plain_linear(x, weight, bias);
    let y = match activation {
        Activation::Identity => z,
        Activation::Relu => burn_activation::relu(z),
        Activation::Gelu => burn_activation::gelu(z),
        Activation::GeluTanh => {
            let inner = (z.clone() + z.clone().powi_scalar(3) * 0.044_715) * (8.0 / std::f64::consts::PI).sqrt();
            z * burn_activation::sigmoid(inner)
        }
        Activation::Silu => burn_activation::silu(z),
    };
    let y = if dropout > 0.0 { DropoutConfig::new(dropout).init().forward(y) } else { y };
    let y = match residual {
        Some(residual) => residual + y,
        None => y,
    };
    y.reshape(shape)
}

/// [`linear`] by a layer's parameters.
pub(crate) fn apply(layer: &Linear, x: Tensor<3>, activation: Activation, after: After) -> Tensor<3> {
    linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()), activation, after)
}

#[cfg(feature = "flex")]
mod fused {
    use burn::backend::autodiff::checkpoint::base::Checkpointer;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
    use burn::tensor::{Distribution, Shape, Tensor};
    use burn_flex::FlexTensor;
    use longspan_kernels::layers::{Activation, Dropout, Kept, Linear};

    use crate::layers::flex::{absent, numbers, tensor};

    /// What the operation does, and which of its tensors are there.
    #[derive(Debug, Clone, Copy)]
    pub struct Settings {
        activation: Activation,
        dropout: Option<Dropout>,
        bias: bool,
        residual: bool,
    }

    #[backend_extension(Flex, Autodiff)]
    pub trait FusedLinear: Backend {
        fn fused_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            settings: Settings,
        ) -> FloatTensor<Self>;
    }

    pub fn linear(
        x: Tensor<2>,
        weight: Tensor<2>,
        bias: Option<Tensor<1>>,
        residual: Option<Tensor<2>>,
        activation: Activation,
        dropout: Option<Dropout>,
    ) -> Tensor<2> {
        let settings = Settings { activation, dropout, bias: bias.is_some(), residual: residual.is_some() };
        let bias = bias.unwrap_or_else(|| absent(&x));
        let residual = residual.unwrap_or_else(|| absent(&x));
        Tensor::from_dispatch(<Dispatch as FusedLinear>::fused_linear(
            x.into_dispatch(),
            weight.into_dispatch(),
            bias.into_dispatch(),
            residual.into_dispatch(),
            settings,
        ))
    }

    /// What is dropped with this probability: the seed comes from the device's own generator.
    pub fn drawn(probability: f64, like: &Tensor<2>) -> Option<Dropout> {
        if probability <= 0.0 {
            return None;
        }
        let drawn = Tensor::<1>::random([4], Distribution::Uniform(0.0, 65_536.0), &like.device().inner());
        let seed = drawn.into_data().iter::<f32>().fold(0, |seed, part| (seed << 16) | part as u64);
        Dropout::new(probability, seed)
    }

    /// The operands, contiguous.
    #[derive(Debug, Clone)]
    struct Operands {
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        residual: FlexTensor,
        settings: Settings,
    }

    impl Operands {
        fn new([x, weight, bias, residual]: [FlexTensor; 4], settings: Settings) -> Self {
            let [x, weight, bias, residual] = [x, weight, bias, residual].map(|x| x.to_contiguous());
            Self { x, weight, bias, residual, settings }
        }

        fn call(&self) -> Linear<'_> {
            let [rows, inputs] = self.x.layout().shape().dims();
            let [_, outputs] = self.weight.layout().shape().dims();
            let Settings { activation, dropout, bias, residual } = self.settings;
            Linear::new(numbers(&self.x), numbers(&self.weight), [rows, inputs, outputs])
                .with_bias(bias.then(|| numbers(&self.bias)))
                .with_activation(activation)
                .with_dropout(dropout)
                .with_residual(residual.then(|| numbers(&self.residual)))
        }

        fn shape(&self) -> Shape {
            let ([rows, _], [_, outputs]) = (self.x.layout().shape().dims(), self.weight.layout().shape().dims::<2>());
            Shape::from([rows, outputs])
        }
    }

    impl FusedLinear for Flex {
        fn fused_linear(
            x: FlexTensor,
            weight: FlexTensor,
            bias: FlexTensor,
            residual: FlexTensor,
            settings: Settings,
        ) -> FlexTensor {
            let operands = Operands::new([x, weight, bias, residual], settings);
            let out = operands.call().forward().unwrap_or_else(|error| panic!("{error}"));
            tensor(out, operands.shape())
        }
    }

    impl<C: CheckpointStrategy> FusedLinear for Autodiff<Flex, C> {
        fn fused_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            settings: Settings,
        ) -> FloatTensor<Self> {
            let all = [&x, &weight, &bias, &residual];
            let preparation =
                Backward::<Flex, 4>::prepare::<C>(LinearBackward, all.map(|x| x.node())).compute_bound().stateful();
            let operands = Operands::new(all.map(|x| x.primitive().clone()), settings);
            let shape = operands.shape();
            match preparation {
                OpsKind::Tracked(preparation) => {
                    let (out, kept) = operands.call().training().unwrap_or_else(|error| panic!("{error}"));
                    let out = tensor(out, shape);
                    preparation.finish(Saved { operands, kept, out: out.clone() }, out)
                }
                OpsKind::UnTracked(preparation) => {
                    let out = operands.call().forward().unwrap_or_else(|error| panic!("{error}"));
                    preparation.finish(tensor(out, shape))
                }
            }
        }
    }

    #[derive(Debug, Clone)]
    struct Saved {
        operands: Operands,
        kept: Kept,
        out: FlexTensor,
    }

    #[derive(Debug)]
    struct LinearBackward;

    impl Backward<Flex, 4> for LinearBackward {
        type State = Saved;

        fn backward(self, ops: Ops<Saved, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
            let d_out = grads.consume::<Flex>(&ops.node).to_contiguous();
            let Saved { operands, kept, out } = ops.state;
            let found = operands.call().backward(numbers(&out), &kept, numbers(&d_out));
            let found = found.unwrap_or_else(|error| panic!("{error}"));
            let shape = |x: &FlexTensor| x.layout().shape().clone();
            let bias = operands.settings.bias.then(|| tensor(found.d_bias, shape(&operands.bias)));
            let gradients = [
                Some(tensor(found.dx, shape(&operands.x))),
                Some(tensor(found.d_weight, shape(&operands.weight))),
                bias,
                operands.settings.residual.then_some(d_out),
            ];
            for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                if let (Some(parent), Some(gradient)) = (parent, gradient) {
                    grads.register::<Flex>(parent.id, gradient);
                }
            }
        }
    }
}
