//! Norms of tokens.

use burn::backend::DispatchTensor;
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels::Error;
use longspan_layers::{Norm, NormGradients, NormWeights};

use super::flex::{gradients, is_f32, numbers, shape, tensor};
use crate::backend::operation::{Operation, run};
use crate::backend::tensor::{narrow_float, widen};
use crate::cpu::FlexTensor;
use crate::error::{Result, config, fits};

/// What a norm subtracts before it divides.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// The mean of a token's numbers: layer norm (Ba et al. 2016). It learns `γ` and `β`.
    Layer,
    /// Nothing: RMS norm (Zhang and Sennrich 2019). It learns `γ`.
    Rms,
}

/// Makes a [`TokenNorm`].
#[derive(Config, Debug, PartialEq)]
pub struct TokenNormConfig {
    /// Numbers of a token.
    pub width: usize,
    /// Which norm.
    #[config(default = "NormKind::Layer")]
    pub kind: NormKind,
    /// Keeps the division finite.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl TokenNormConfig {
    /// Makes the norm: `γ` is 1, `β` is 0.
    ///
    /// # Errors
    /// A width of 0, an epsilon that is not a positive number.
    pub fn init(&self, device: &Device) -> Result<TokenNorm> {
        const NAME: &str = "TokenNormConfig";
        config(self.width > 0, NAME, "width", "at least 1", self.width)?;
        fits(NAME, "width", &[self.width])?;
        // As the kernels have it: further down it is 0, and a row of zeros would be NaN.
        let positive = (self.epsilon as f32).is_normal() && self.epsilon > 0.0;
        config(positive, NAME, "epsilon", "a positive number of single precision", self.epsilon)?;
        Ok(TokenNorm {
            gamma: Initializer::Ones.init([self.width], device),
            beta: (self.kind == NormKind::Layer).then(|| Initializer::Zeros.init([self.width], device)),
            kind: self.kind,
            epsilon: self.epsilon,
        })
    }
}

/// `(x − m) / √(mean((x − m)²) + ε) · γ + β` of each token, with `m = mean(x)` in a layer norm and 0 in an RMS norm, which has no
/// `β`. On the CPU backend one operation each way; the backward keeps nothing but `x`.
#[derive(Module, Debug)]
pub struct TokenNorm {
    /// `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// `[width]`.
    pub beta: Option<Param<Tensor<1>>>,
    #[module(skip)]
    kind: NormKind,
    epsilon: f64,
}

impl TokenNorm {
    /// Of each token of `x`, `[batch, tokens, width]`.
    ///
    /// # Errors
    /// Another width or number type.
    pub fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        super::check_rows("norm", "x", &x, &self.gamma)?;
        if is_f32(&x) && is_f32(&self.gamma) {
            let mut tensors = Vec::new();
            let settings = NormSettings::push(self, &mut tensors);
            return Ok(run(settings, x.into_dispatch(), tensors)?);
        }
        Ok(self.in_tensors(x))
    }

    /// [`forward`](Self::forward) in tensor operations.
    pub(super) fn in_tensors(&self, x: Tensor<3>) -> Tensor<3> {
        let (dtype, x) = (x.dtype(), widen(x));
        let x = match self.kind {
            NormKind::Layer => x.clone() - x.mean_dim(2),
            NormKind::Rms => x,
        };
        let scale = (x.clone().powi_scalar(2).mean_dim(2) + self.epsilon).sqrt();
        let y = x / scale * widen(self.gamma.val()).unsqueeze();
        let y = match &self.beta {
            Some(beta) => y + widen(beta.val()).unsqueeze(),
            None => y,
        };
        narrow_float(y, dtype)
    }
}

/// What a norm is, beside its tensors `γ` and, of a layer norm, `β`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormSettings {
    kind: NormKind,
    epsilon: f64,
}

impl NormSettings {
    /// Of a module, whose tensors are added to those of an operation.
    pub fn push(norm: &TokenNorm, tensors: &mut Vec<DispatchTensor>) -> Self {
        tensors.push(norm.gamma.val().into_dispatch());
        tensors.extend(norm.beta.as_ref().map(|beta| beta.val().into_dispatch()));
        Self { kind: norm.kind, epsilon: norm.epsilon }
    }

    /// Takes the norm's tensors from those of an operation.
    pub fn weights<'a>(&self, tensors: &mut impl Iterator<Item = &'a FlexTensor>) -> NormWeights<'a> {
        let centred = self.kind == NormKind::Layer;
        let gamma = tensors.next().map_or(&[][..], numbers);
        let beta = centred.then(|| tensors.next().map(numbers)).flatten();
        NormWeights { gamma, beta, centred, epsilon: self.epsilon as f32 }
    }

    /// The gradients of its tensors.
    pub fn gradients(self, [d_gamma, d_beta]: [Vec<f32>; 2]) -> impl Iterator<Item = Vec<f32>> {
        std::iter::once(d_gamma).chain((self.kind == NormKind::Layer).then_some(d_beta))
    }
}

impl Operation for NormSettings {
    const NAME: &'static str = "norms";

    type Kept = ();

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Self::Kept), Error> {
        let weights = self.weights(&mut tensors[1..].iter());
        let out = Norm { x: numbers(&tensors[0]), weights }.forward()?;
        Ok((tensor(out, shape(&tensors[0])), ()))
    }

    fn backward(&self, tensors: &[FlexTensor], (): &(), d_out: FlexTensor) -> Result<Vec<Option<FlexTensor>>, Error> {
        let weights = self.weights(&mut tensors[1..].iter());
        let norm = Norm { x: numbers(&tensors[0]), weights };
        let NormGradients { dx, d_gamma, d_beta } = norm.backward(numbers(&d_out))?;
        Ok(gradients([dx].into_iter().chain(self.gradients([d_gamma, d_beta])), tensors))
    }
}
