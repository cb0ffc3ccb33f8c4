//! The gated RMS norm of heads' outputs.

use burn::backend::DispatchTensor;
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels::Error;
use longspan_layers::{GatedNorm, GatedNormGradients, GatedNormWeights};

use super::flex::{gradients, is_f32, numbers, shape, tensor};
use super::linear::activate;
use super::{Activation, reshape};
use crate::backend::operation::{Operation, run};
use crate::backend::tensor::{narrow_float, widen};
use crate::cpu::FlexTensor;
use crate::error::{Result, config, fits};

/// Makes a [`GatedRmsNorm`].
#[derive(Config, Debug, PartialEq)]
pub struct GatedRmsNormConfig {
    /// Heads of a token.
    pub heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Keeps the division finite.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl GatedRmsNormConfig {
    /// Makes the norm: `γ` is 1.
    ///
    /// # Errors
    /// Sizes of 0, an epsilon that is not a positive number.
    pub fn init(&self, device: &Device) -> Result<GatedRmsNorm> {
        const NAME: &str = "GatedRmsNormConfig";
        config(self.heads > 0, NAME, "heads", "at least 1", self.heads)?;
        config(self.head_dim > 0, NAME, "head_dim", "at least 1", self.head_dim)?;
        fits(NAME, "head_dim", &[self.heads, self.head_dim])?;
        // As the kernels have it: further down it is 0, and a row of zeros would be NaN.
        let positive = (self.epsilon as f32).is_normal() && self.epsilon > 0.0;
        config(positive, NAME, "epsilon", "a positive number of single precision", self.epsilon)?;
        let gamma = Initializer::Ones.init([self.heads * self.head_dim], device);
        Ok(GatedRmsNorm { gamma, head_dim: self.head_dim, epsilon: self.epsilon })
    }
}

/// `(x / √(mean(x²) + ε)) ⊙ γ ⊙ SiLU(z)` of each head's numbers `x` and a gate `z` of the same size: what stands between attention and its
/// output layer in RetNet (Sun et al. 2023, §2.2, a group norm there) and gated linear attention (Yang et al. 2024). Mamba-2 (Dao and Gu
/// 2024) gates first and then norms. On the CPU backend one operation each way; the backward keeps nothing but `x` and `z`.
#[derive(Module, Debug)]
pub struct GatedRmsNorm {
    /// `[heads·head_dim]`.
    pub gamma: Param<Tensor<1>>,
    head_dim: usize,
    epsilon: f64,
}

impl GatedRmsNorm {
    /// Of the heads of each token, which stand side by side.
    ///
    /// # Shapes
    /// `x`, `gate` and output: `[batch, tokens, heads·head_dim]`.
    ///
    /// # Errors
    /// Another width, a gate of another shape than `x`.
    pub fn forward(&self, x: Tensor<3>, gate: Tensor<3>) -> Result<Tensor<3>> {
        const NAME: &str = "gated norm";
        super::check_rows(NAME, "x", &x, &self.gamma.val())?;
        super::check_like(NAME, "gate", &gate, x.dims(), &x)?;
        if is_f32(&x) && is_f32(&gate) && is_f32(&self.gamma.val()) {
            let mut tensors = vec![gate.into_dispatch()];
            let settings = GatedNormSettings::push(self, &mut tensors);
            return Ok(run(settings, x.into_dispatch(), tensors)?);
        }
        Ok(self.in_tensors(x, gate))
    }

    /// [`forward`](Self::forward) in tensor operations.
    pub(super) fn in_tensors(&self, x: Tensor<3>, gate: Tensor<3>) -> Tensor<3> {
        let ([batch, tokens, width], dtype) = (x.dims(), x.dtype());
        let heads = reshape(widen(x), [batch, tokens, width / self.head_dim, self.head_dim]);
        let scale = (heads.clone().powi_scalar(2).mean_dim(3) + self.epsilon).sqrt();
        let normal = reshape(heads / scale, [batch, tokens, width]);
        narrow_float(normal * widen(self.gamma.val()).unsqueeze() * activate(widen(gate), Activation::Silu), dtype)
    }
}

/// What a gated norm is, beside its tensor `γ`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GatedNormSettings {
    head_dim: usize,
    epsilon: f64,
}

impl GatedNormSettings {
    /// Of a module, whose tensor is added to those of an operation.
    pub fn push(norm: &GatedRmsNorm, tensors: &mut Vec<DispatchTensor>) -> Self {
        tensors.push(norm.gamma.val().into_dispatch());
        Self { head_dim: norm.head_dim, epsilon: norm.epsilon }
    }

    /// Takes the norm's tensor from those of an operation.
    pub fn weights<'a>(&self, tensors: &mut impl Iterator<Item = &'a FlexTensor>) -> GatedNormWeights<'a> {
        GatedNormWeights { gamma: tensors.next().map_or(&[][..], numbers), epsilon: self.epsilon as f32 }
    }

    /// The kernels' form of a call on `x`, the gate and `γ`.
    fn call<'a>(&self, tensors: &'a [FlexTensor]) -> GatedNorm<'a> {
        let [x, gate, others @ ..] = tensors else { unreachable!("x and gate") };
        let weights = self.weights(&mut others.iter());
        GatedNorm { x: numbers(x), gate: numbers(gate), head_dim: self.head_dim, weights }
    }
}

impl Operation for GatedNormSettings {
    const NAME: &'static str = "gated norms";

    type Kept = ();

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Self::Kept), Error> {
        Ok((tensor(self.call(tensors).forward()?, shape(&tensors[0])), ()))
    }

    fn backward(&self, tensors: &[FlexTensor], (): &(), d_out: FlexTensor) -> Result<Vec<Option<FlexTensor>>, Error> {
        let found = self.call(tensors).backward(numbers(&d_out))?;
        let GatedNormGradients { dx, d_gate, d_gamma } = found;
        Ok(gradients([dx, d_gate, d_gamma], tensors))
    }
}
