//! The classifier that settings describe.

use anyhow::{Result, bail};
use burn::tensor::Device;
use longspan::models::{Classifier, ClassifierConfig, Pooling, Positions};

use crate::run::config::RunConfig;
use crate::tasks::attention;
use crate::tasks::memory;

/// A model, its weights not yet drawn. Sizes that the memory has no room for are refused before it is asked for.
pub fn model(config: &RunConfig, vocab: usize, labels: usize, device: &Device) -> Result<Classifier> {
    let attention = attention::of_layers(config, config.max_tokens)?;
    let pooling = match config.pooling.as_str() {
        "mean" => Pooling::Mean,
        "last" => Pooling::Last,
        other => bail!("unknown pooling {other:?}; known are mean, last"),
    };
    let positions = if attention.iter().any(|one| one.sees_order()) { Positions::None } else { Positions::Sinusoidal };
    let sizes = ClassifierConfig::new(vocab, labels)
        .with_d_model(config.d_model)
        .with_heads(config.heads)
        .with_layers(config.layers)
        .with_d_ff(config.d_ff)
        .with_dropout(config.dropout)
        .with_attention(attention)
        .with_causal(config.causal)
        .with_pooling(pooling)
        .with_norm(config.norm()?)
        .with_positions(positions);
    // Blocks are alike, so one tells the size of all; a billion of them could not even be listed.
    let one = sizes.clone().with_layers(1).init(device)?;
    let numbers = memory::numbers(&one) + (config.layers as f64 - 1.0) * memory::numbers(&one.blocks);
    memory::check_model(
        numbers,
        config,
        device,
        "lower d_model, d_ff, layers, radius, max_tokens or workers with --set, or take a tokenizer with a smaller vocabulary",
    )?;
    Ok(sizes.init(device)?)
}
