//! A model that makes one row of a sequence, and tells every token from it alone.

use std::ops::Range;

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::layers::{
    Activation, After, CrossEntropyLoss, FeedForward, FeedForwardConfig, TokenNorm, TokenNormConfig, cross_entropy,
    linear,
};
use longspan::models::{Classifier, ClassifierConfig, Pooling};

use super::Config;
use super::model::{LOWER, Model};
use crate::tasks::attention;
use crate::tasks::stack;

/// The task's model in Poli et al. 2024: the row at the last token, to which a feed-forward part adds what makes it tell the token at
/// a place: `x = row + place`, `x + f(norm(x))`, logits.
#[derive(Module, Debug)]
pub struct Compressor {
    /// From a sequence to its row: causal blocks, of which the last row counts.
    encoder: Classifier,
    places: Embedding,
    norm: TokenNorm,
    decoder: FeedForward,
    output: Linear,
}

impl Compressor {
    fn init(config: &Config, layers: usize, tokens: usize, longest: usize, device: &Device) -> Result<Self> {
        let width = config.model.d_model;
        let attention = attention::of_layers(&config.model, longest)?;
        let positions = stack::positions(&attention);
        let encoder = ClassifierConfig::new(tokens, width)
            .with_block(stack::block(&config.model))
            .with_layers(layers)
            .with_attention(attention)
            .with_causal(true)
            .with_pooling(Pooling::Last)
            .with_positions(positions)
            .init(device)?;
        Ok(Self {
            encoder,
            places: EmbeddingConfig::new(longest, width).init(device),
            norm: TokenNormConfig::new(width).init(device)?,
            decoder: FeedForwardConfig::new(width, 4 * width)
                .with_activation(Activation::Silu)
                .with_gated(true)
                .init(device)?,
            output: LinearConfig::new(width, tokens).init(device),
        })
    }

    /// What the logits at these places are of, `[places, 1, d_model]`.
    fn decoded(&self, tokens: Tensor<2, Int>, places: &[usize]) -> Result<Tensor<3>> {
        let ([batch, longest], device) = (tokens.dims(), tokens.device());
        let ids = |of: fn(usize, usize) -> usize| {
            let ids: Vec<i64> = places.iter().map(|&place| of(place, longest) as i64).collect();
            Tensor::<1, Int>::from_data(TensorData::new(ids, [places.len()]), &device)
        };
        let rows =
            self.encoder.forward(tokens, &vec![longest; batch])?.select(0, ids(|place, longest| place / longest));
        let place = self.places.forward(ids(|place, longest| place % longest).unsqueeze_dim(1));
        let x = rows.unsqueeze_dim(1) + place;
        Ok(x.clone() + self.decoder.forward(self.norm.forward(x)?)?)
    }
}

impl Model for Compressor {
    /// The marker stands where it always stood.
    const WHOLE: bool = true;

    fn new(config: &Config, tokens: usize, longest: usize, device: &Device) -> Result<Self> {
        let one = Self::init(config, 1, tokens, longest, device)?;
        stack::check(&one, &one.encoder.blocks, config, device, LOWER)?;
        Self::init(config, config.task.layers, tokens, longest, device)
    }

    fn loss(&self, tokens: Tensor<2, Int>, right: Vec<Option<u32>>, smoothing: f64) -> Result<CrossEntropyLoss> {
        let (places, right): (Vec<usize>, Vec<_>) =
            right.into_iter().enumerate().filter(|(_, token)| token.is_some()).unzip();
        let rows = self.decoded(tokens, &places)?;
        Ok(cross_entropy(rows, &self.output, right, smoothing)?)
    }

    fn at(&self, tokens: Tensor<2, Int>, places: &[usize]) -> Result<Tensor<2>> {
        let rows = self.decoded(tokens, places)?;
        let bias = self.output.bias.as_ref().map(|bias| bias.val());
        Ok(linear(rows, self.output.weight.val(), bias, Activation::Identity, After::default())?.squeeze_dim(1))
    }

    /// Every token but the last, after which the sequence is compressed.
    fn asked(tokens: usize) -> Range<usize> {
        0..tokens - 1
    }
}
