//! What tells something about drawn sequences: a language model, or one that has to compress them.

use std::ops::Range;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use longspan::layers::CrossEntropyLoss;
use longspan::models::{LanguageModel, LanguageModelConfig};

use super::Config;
use crate::tasks::attention;
use crate::tasks::stack;

/// A model that gives logits of tokens at places of sequences.
pub trait Model: Module + Sync {
    /// Whether it takes sequences of the task's own length alone.
    const WHOLE: bool = false;

    /// A model, its weights not yet drawn, for sequences of up to so many tokens.
    fn new(config: &Config, tokens: usize, longest: usize, device: &Device) -> Result<Self>;

    /// The loss of what is to be given at each place, of one sequence after the other; `None` where nothing is asked.
    fn loss(&self, tokens: Tensor<2, Int>, right: Vec<Option<u32>>, smoothing: f64) -> Result<CrossEntropyLoss>;

    /// Logits at these places, counted over all sequences.
    fn at(&self, tokens: Tensor<2, Int>, places: &[usize]) -> Result<Tensor<2>>;

    fn asked(tokens: usize) -> Range<usize>;
}

/// What to lower where a model is too large.
pub const LOWER: &str = "lower d_model, d_ff, layers, radius, workers or the vocabulary";

impl Model for LanguageModel {
    fn new(config: &Config, tokens: usize, longest: usize, device: &Device) -> Result<Self> {
        let attention = attention::of_layers(&config.model, longest)?;
        let positions = stack::positions(&attention);
        let sizes = LanguageModelConfig::new(tokens)
            .with_block(stack::block(&config.model))
            .with_layers(config.task.layers)
            .with_attention(attention)
            .with_positions(positions);
        let one = sizes.clone().with_layers(1).init(device)?;
        stack::check(&one, &one.blocks, config, device, LOWER)?;
        Ok(sizes.init(device)?)
    }

    fn loss(&self, tokens: Tensor<2, Int>, right: Vec<Option<u32>>, smoothing: f64) -> Result<CrossEntropyLoss> {
        Ok(self.loss(tokens, right, smoothing)?)
    }

    fn at(&self, tokens: Tensor<2, Int>, places: &[usize]) -> Result<Tensor<2>> {
        Ok(self.forward_at(tokens, places)?)
    }

    fn asked(tokens: usize) -> Range<usize> {
        tokens - 1..tokens
    }
}
