//! The classifier that settings describe.

use anyhow::Result;
use burn::tensor::Device;
use longspan::models::{Classifier, ClassifierConfig};

use crate::run::config::RunConfig;
use crate::tasks::{attention, stack};

/// A model, its weights not yet drawn.
pub fn model(config: &RunConfig, vocab: usize, outputs: usize, device: &Device) -> Result<Classifier> {
    const LOWER: &str = "lower d_model, d_ff, layers, radius, max_tokens or workers with --set, or take a tokenizer with a smaller vocabulary";
    let attention = attention::of_layers(config, config.max_tokens)?;
    let sizes = ClassifierConfig::new(vocab, outputs)
        .with_block(stack::block(config)?)
        .with_layers(config.layers)
        .with_positions(stack::positions(&attention))
        .with_attention(attention)
        .with_causal(config.causal)
        .with_pooling(config.pooling()?);
    let one = sizes.clone().with_layers(1).init(device)?;
    stack::check(&one, &one.blocks, config, device, LOWER)?;
    let mut model = sizes.init(device)?;
    stack::begin_at_zero(&mut model.output, config, outputs, device);
    Ok(model)
}
