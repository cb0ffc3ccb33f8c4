//! Layers as numbers, for calls without tensors: what an operation is and its tensors, contiguous.

use burn::backend::DispatchTensor;
use burn::nn::Linear;
use burn::tensor::Tensor;
use longspan_layers::{FeedForward as Call, GatedNormWeights, NormWeights, Weights};

use super::feed_forward::FeedForwardOperation;
use super::flex::{push_layer, taken, weights};
use super::gated_norm::GatedNormSettings;
use super::norm::NormSettings;
use super::{FeedForward, GatedRmsNorm, TokenNorm};
use crate::cpu::FlexTensor;

/// A part of a model.
#[derive(Debug)]
pub(crate) struct Stored<S> {
    settings: S,
    tensors: Vec<FlexTensor>,
}

/// A linear layer, and whether it has a bias.
pub(crate) type StoredLayer = Stored<bool>;
pub(crate) type StoredNorm = Stored<NormSettings>;
pub(crate) type StoredGatedNorm = Stored<GatedNormSettings>;
pub(crate) type StoredFeedForward = Stored<FeedForwardOperation>;

impl<S> Stored<S> {
    fn of(push: impl FnOnce(&mut Vec<DispatchTensor>) -> S) -> Self {
        let mut tensors = Vec::new();
        let settings = push(&mut tensors);
        // The number of axes does not matter to numbers.
        Self { settings, tensors: tensors.into_iter().map(|x| taken(Tensor::<1>::from_dispatch(x))).collect() }
    }
}

impl StoredLayer {
    pub fn new(layer: &Linear) -> Self {
        Self::of(|tensors| push_layer(layer, tensors))
    }

    pub fn weights(&self) -> Weights<'_> {
        weights(&mut self.tensors.iter(), self.settings)
    }
}

impl StoredNorm {
    pub fn new(norm: &TokenNorm) -> Self {
        Self::of(|tensors| NormSettings::push(norm, tensors))
    }

    pub fn weights(&self) -> NormWeights<'_> {
        self.settings.weights(&mut self.tensors.iter())
    }
}

impl StoredGatedNorm {
    pub fn new(norm: &GatedRmsNorm) -> Self {
        Self::of(|tensors| GatedNormSettings::push(norm, tensors))
    }

    pub fn weights(&self) -> GatedNormWeights<'_> {
        self.settings.weights(&mut self.tensors.iter())
    }
}

impl StoredFeedForward {
    pub fn new(layers: &FeedForward) -> Self {
        Self::of(|tensors| FeedForwardOperation::push(layers, true, tensors))
    }

    /// The part on rows, which are added to its results.
    pub fn call<'a>(&'a self, x: &'a [f32], width: usize, norm: Option<NormWeights<'a>>) -> Call<'a> {
        self.settings.call_on((x, width), norm, &mut self.tensors.iter())
    }
}
