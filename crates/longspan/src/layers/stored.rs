//! Layers as numbers, for calls without tensors.

use crate::cpu::FlexTensor;
use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::Tensor;
use longspan_layers::{FeedForward as Call, GatedNormWeights, NormWeights, Weights};

use super::flex::{numbers, taken};
use super::{FeedForward, GatedRmsNorm, NormKind, TokenNorm};

/// A linear layer's tensors, contiguous.
#[derive(Debug)]
pub(crate) struct StoredLayer {
    weight: FlexTensor,
    bias: Option<FlexTensor>,
}

impl StoredLayer {
    pub fn new(layer: &Linear) -> Self {
        Self { weight: taken(layer.weight.val()), bias: layer.bias.as_ref().map(|bias| taken(bias.val())) }
    }

    pub fn weights(&self) -> Weights<'_> {
        Weights { weight: numbers(&self.weight), bias: self.bias.as_ref().map(numbers) }
    }
}

/// A norm's tensors.
#[derive(Debug)]
pub(crate) struct StoredNorm {
    gamma: FlexTensor,
    beta: Option<FlexTensor>,
    centred: bool,
    epsilon: f32,
}

impl StoredNorm {
    pub fn new(norm: &TokenNorm) -> Self {
        let stored = |param: &Param<Tensor<1>>| taken(param.val());
        Self {
            gamma: stored(&norm.gamma),
            beta: norm.beta.as_ref().map(stored),
            centred: norm.kind() == NormKind::Layer,
            epsilon: norm.epsilon() as f32,
        }
    }

    pub fn weights(&self) -> NormWeights<'_> {
        let (gamma, beta) = (numbers(&self.gamma), self.beta.as_ref().map(numbers));
        NormWeights { gamma, beta, centred: self.centred, epsilon: self.epsilon }
    }
}

/// A gated norm's tensor.
#[derive(Debug)]
pub(crate) struct StoredGatedNorm {
    gamma: FlexTensor,
    epsilon: f32,
}

impl StoredGatedNorm {
    pub fn new(norm: &GatedRmsNorm) -> Self {
        Self { gamma: taken(norm.gamma.val()), epsilon: norm.epsilon() as f32 }
    }

    pub fn weights(&self) -> GatedNormWeights<'_> {
        GatedNormWeights { gamma: numbers(&self.gamma), epsilon: self.epsilon }
    }
}

/// A feed-forward part's tensors.
#[derive(Debug)]
pub(crate) struct StoredFeedForward {
    inner: StoredLayer,
    outer: StoredLayer,
    activation: longspan_layers::Activation,
    gated: bool,
}

impl StoredFeedForward {
    pub fn new(layers: &FeedForward) -> Self {
        Self {
            inner: StoredLayer::new(&layers.inner),
            outer: StoredLayer::new(&layers.outer),
            activation: layers.activation().into(),
            gated: layers.gated(),
        }
    }

    /// The part on rows, which are added to its results.
    pub fn call<'a>(&'a self, x: &'a [f32], width: usize, norm: Option<NormWeights<'a>>) -> Call<'a> {
        Call {
            x,
            width,
            hidden: numbers(&self.outer.weight).len() / width,
            norm,
            inner: self.inner.weights(),
            activation: self.activation,
            gated: self.gated,
            outer: self.outer.weights(),
            dropout: None,
            residual: true,
        }
    }
}
