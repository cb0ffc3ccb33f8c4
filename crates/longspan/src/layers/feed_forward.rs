//! The feed-forward part of a block.

use burn::backend::DispatchTensor;
use burn::config::Config;
use burn::module::Module;
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, Tensor};
use longspan_kernels::Error;
use longspan_layers::{self as kernels, Dropout, FeedForwardGradients, NormWeights, Weights};

use super::dropout;
use super::flex::{gradients, is_f32, numbers, of_layer, push_layer, shape, tensor, weights};
use super::linear::{activate, apply, drawn};
use super::norm::NormSettings;
use super::{Activation, After, Around};
use crate::backend::operation::{Operation, run};
use crate::cpu::FlexTensor;
use crate::error::{Result, config, fits};

/// Makes a [`FeedForward`].
#[derive(Config, Debug, PartialEq)]
pub struct FeedForwardConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Width between the two layers.
    pub d_ff: usize,
    /// `f`.
    #[config(default = "Activation::Relu")]
    pub activation: Activation,
    /// Whether a second product multiplies the activations (Shazeer 2020): with SiLU this is known as SwiGLU.
    #[config(default = false)]
    pub gated: bool,
    /// What draws the weights, for each of the products by itself, with biases of 0. By default Xavier's uniform initializer draws all of a
    /// layer, biases too.
    pub initializer: Option<Initializer>,
}

impl FeedForwardConfig {
    /// Makes the part with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0.
    pub fn init(&self, device: &Device) -> Result<FeedForward> {
        const NAME: &str = "FeedForwardConfig";
        config(self.d_model > 0, NAME, "d_model", "at least 1", self.d_model)?;
        config(self.d_ff > 0, NAME, "d_ff", "at least 1", self.d_ff)?;
        fits(NAME, "d_ff", &[self.d_model, self.d_ff, 2])?;
        let (columns, by) = (&[self.d_ff; 2][..1 + usize::from(self.gated)], self.initializer.as_ref());
        let (inner, outer) = (drawn(by, self.d_model, columns, device), drawn(by, self.d_ff, &[self.d_model], device));
        Ok(FeedForward { inner, outer, activation: self.activation, gated: self.gated })
    }
}

/// `f(x·W₁ + b₁)·W₂ + b₂` of each token; gated, `(f(a) ⊙ b)·W₂ + b₂` for `[a, b] = x·W₁ + b₁`. On the CPU backend one operation
/// each way, which never holds more than some tokens' activations.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// `[d_model, d_ff]`; gated `[d_model, 2·d_ff]`, the columns of `a` first.
    pub inner: Linear,
    /// `[d_ff, d_model]`.
    pub outer: Linear,
    #[module(skip)]
    activation: Activation,
    gated: bool,
}

impl FeedForward {
    /// `[batch, tokens, d_model]` → `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// Another width or number type.
    pub fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        self.forward_in(x, Around::default())
    }

    /// [`forward`](Self::forward) and what stands around it.
    pub(crate) fn forward_in(&self, x: Tensor<3>, around: Around<'_>) -> Result<Tensor<3>> {
        super::check_rows("feed-forward", "x", &x, &self.inner.weight)?;
        if is_f32(&x) && is_f32(&self.inner.weight.val()) {
            return Ok(self.as_one(x, around)?);
        }
        self.in_tensors(x, around)
    }

    /// [`forward_in`](Self::forward_in) as one operation of the CPU backend.
    fn as_one(&self, x: Tensor<3>, around: Around<'_>) -> Result<Tensor<3>, Error> {
        let mut others = Vec::new();
        let operation = FeedForwardOperation {
            norm: around.norm.map(|norm| NormSettings::push(norm, &mut others)),
            dropout: dropout::drawn(around.dropout, [&x.device(), &self.inner.weight.device()]),
            recompute: around.recompute,
            ..FeedForwardOperation::push(self, around.residual, &mut others)
        };
        run(operation, x.into_dispatch(), others)
    }

    /// [`forward_in`](Self::forward_in) in tensor operations.
    pub(super) fn in_tensors(&self, x: Tensor<3>, around: Around<'_>) -> Result<Tensor<3>> {
        let (n, after) = around.split(x)?;
        let sums = apply(&self.inner, n, Activation::Identity, After::default())?;
        let inner = if self.gated {
            let width = sums.dims()[2] / 2;
            let gate = sums.clone().narrow(2, width, width);
            activate(sums.narrow(2, 0, width), self.activation) * gate
        } else {
            activate(sums, self.activation)
        };
        apply(&self.outer, inner, Activation::Identity, after)
    }
}

/// What the operation does. Its tensors: `x`, the norm's, and of both layers the weight and, if it has one, the bias.
#[derive(Debug, Clone)]
pub(crate) struct FeedForwardOperation {
    norm: Option<NormSettings>,
    biases: [bool; 2],
    activation: kernels::Activation,
    gated: bool,
    dropout: Option<Dropout>,
    residual: bool,
    recompute: bool,
}

impl FeedForwardOperation {
    /// Of a module alone, whose tensors are added to those of an operation.
    pub fn push(layers: &FeedForward, residual: bool, tensors: &mut Vec<DispatchTensor>) -> Self {
        let biases = [&layers.inner, &layers.outer].map(|layer| push_layer(layer, tensors));
        let (activation, gated) = (layers.activation.into(), layers.gated);
        Self { norm: None, biases, activation, gated, dropout: None, residual, recompute: false }
    }

    fn call<'a>(&self, tensors: &'a [FlexTensor]) -> kernels::FeedForward<'a> {
        let [x, others @ ..] = tensors else { unreachable!("x") };
        let mut others = others.iter();
        let norm = self.norm.map(|norm| norm.weights(&mut others));
        self.call_on((numbers(x), shape(x)[2]), norm, &mut others)
    }

    /// On rows of so many numbers, by the layers' tensors.
    pub fn call_on<'a>(
        &self,
        (x, width): (&'a [f32], usize),
        norm: Option<NormWeights<'a>>,
        others: &mut impl Iterator<Item = &'a FlexTensor>,
    ) -> kernels::FeedForward<'a> {
        let [inner, outer]: [Weights<'a>; 2] = self.biases.map(|bias| weights(others, bias));
        kernels::FeedForward {
            x,
            width,
            hidden: outer.weight.len() / width.max(1),
            norm,
            inner,
            activation: self.activation,
            gated: self.gated,
            outer,
            dropout: self.dropout,
            residual: self.residual,
        }
    }
}

impl Operation for FeedForwardOperation {
    const NAME: &'static str = "feed-forward parts";

    /// The sums of the first layer.
    type Kept = Option<Vec<f32>>;

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
        Ok(tensor(self.call(tensors).forward()?, shape(&tensors[0])))
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Self::Kept), Error> {
        let call = self.call(tensors);
        let (out, sums) = if self.recompute {
            (call.forward()?, None)
        } else {
            let (out, sums) = call.training()?;
            (out, Some(sums))
        };
        Ok((tensor(out, shape(&tensors[0])), sums))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        sums: &Self::Kept,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let found = self.call(tensors).backward(sums.as_deref(), numbers(&d_out))?;
        let FeedForwardGradients { dx, d_norm, d_inner, d_outer } = found;
        let ([inner, outer], norm) = (self.biases, self.norm.map(|norm| norm.gradients(d_norm)));
        let layers = of_layer(d_inner, inner).chain(of_layer(d_outer, outer));
        Ok(gradients([dx].into_iter().chain(norm.into_iter().flatten()).chain(layers), tensors))
    }
}
