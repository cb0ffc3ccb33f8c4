//! The language model that settings describe.

use anyhow::Result;
use burn::tensor::Device;
use longspan::attention::AttentionConfig;
use longspan::models::{LanguageModel, LanguageModelConfig, Positions};
use serde_json::{Value, json};

use super::Config;
use crate::tasks::{attention, stack};

pub fn configure(config: &Config, vocab: usize) -> Result<LanguageModelConfig> {
    let attention = attention::of_layers(&config.model, carried(config))?;
    let attention: Vec<_> =
        attention.into_iter().map(|one| forgetting(one, config.model.heads)).collect::<Result<_>>()?;
    // A decay tells order, too. Softmax has none, and begins anew before positions come that training has not seen.
    let whole = config.model.attention.split(',').any(|name| name.trim() == "softmax");
    let positions = if whole { stack::positions(&attention) } else { Positions::None };
    Ok(LanguageModelConfig::new(vocab)
        .with_block(stack::block(&config.model))
        .with_layers(config.task.layers)
        .with_attention(attention)
        .with_positions(positions))
}

/// Tokens after which states begin anew in training: `carry` segments, in steps of `backpropagate`.
fn carried(config: &Config) -> usize {
    config.task.segment * config.task.carry.next_multiple_of(config.task.backpropagate)
}

/// The mechanism with a decay, where it takes one and none is given, nor gates: a text has no end, and sums over all of it would drown
/// what is near. After 400 steps on a text of 4 MB, 2.45 bits per byte with it and 3.35 without.
fn forgetting(attention: AttentionConfig, heads: usize) -> Result<AttentionConfig> {
    let mut value = serde_json::to_value(&attention)?;
    if value.pointer("/kernel/gates") == Some(&Value::Bool(true)) {
        return Ok(attention);
    }
    match value.pointer_mut("/kernel/decay") {
        Some(decay @ Value::Null) => *decay = json!(decays(heads)),
        _ => return Ok(attention),
    }
    Ok(serde_json::from_value(value)?)
}

/// A decay for each head: `1 − 2^{−x}` with `x` from 3 to 10, so that heads look back over 8 to 1,024 tokens (as in retention,
/// Sun et al. 2023, which has 32 to 4,096).
fn decays(heads: usize) -> Vec<f64> {
    let step = 7.0 / (heads.max(2) - 1) as f64;
    (0..heads).map(|head| 1.0 - (-(3.0 + step * head as f64)).exp2()).collect()
}

/// Tokens after which a state begins anew outside of training too, where the mechanism cannot go on for ever: softmax
/// attention keeps all keys, and tables by position have an end.
pub fn limit(config: &Config) -> Option<usize> {
    let ends = |name: &str| ["softmax", "aft-full", "aft-local"].contains(&name.trim());
    // With room for a beginning and what comes after it.
    config.model.attention.split(',').any(ends).then_some(carried(config).max(16))
}

pub fn model(config: &Config, vocab: usize, device: &Device) -> Result<LanguageModel> {
    const LOWER: &str =
        "lower d_model, d_ff, layers, radius or workers with --set, or take a tokenizer with a smaller vocabulary";
    let sizes = configure(config, vocab)?;
    let one = sizes.clone().with_layers(1).init(device)?;
    stack::check(&one, &one.blocks, config, device, LOWER)?;
    Ok(sizes.init(device)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::config::with;

    #[test]
    fn heads_forget_unless_settings_say_otherwise() {
        let decay = |options: Value, heads: usize| {
            let given =
                json!({ "text": ["a"], "attention": "kernelized", "attention_options": options, "heads": heads });
            let config = with(given);
            serde_json::to_value(&configure(&config, 9).unwrap().attention[0]).unwrap()["kernel"]["decay"].clone()
        };
        assert_eq!(decay(json!({}), 4).as_array().unwrap().len(), 4);
        assert_eq!(decay(json!({}), 1), json!([0.875]));
        assert_eq!(decay(json!({}), 2), json!([0.875, 1.0 - 1.0 / 1024.0]));
        assert_eq!(decay(json!({ "kernel": { "decay": [1.0, 1.0] } }), 2), json!([1.0, 1.0]));
        assert_eq!(decay(json!({ "kernel": { "gates": true } }), 2), json!(null));
    }

    #[test]
    fn softmax_alone_counts_tokens() {
        for (attention, positions) in [
            ("softmax", Positions::Sinusoidal),
            ("kernelized,softmax", Positions::Sinusoidal),
            ("short-convolution,softmax", Positions::None),
            ("kernelized", Positions::None),
            ("softmax-window", Positions::None),
        ] {
            let config = with(json!({ "text": ["a"], "attention": attention }));
            assert_eq!(configure(&config, 9).unwrap().positions, positions, "{attention}");
        }
    }
}
