//! The sequence-to-sequence model that settings describe.

use anyhow::Result;
use burn::tensor::Device;
use longspan::models::{Positions, Seq2Seq, Seq2SeqConfig};

use super::Config;
use crate::tasks::attention;
use crate::tasks::memory::{self, NUMBER};
use crate::tasks::stack;

pub fn configure(config: &Config, source_vocab: usize, target_vocab: usize) -> Result<Seq2SeqConfig> {
    // A sequence is one longer with its start or end.
    let attention =
        attention::of_run(&config.model, config.task.files.max_tokens.max(config.task.answer_tokens.unwrap_or(0)) + 1)?;
    let positions = if attention.sees_order() { Positions::None } else { Positions::Sinusoidal };
    Ok(Seq2SeqConfig::new(source_vocab, target_vocab)
        .with_block(stack::block(&config.model))
        .with_encoder_layers(config.task.encoder_layers)
        .with_decoder_layers(config.task.decoder_layers)
        .with_cross_attention(attention.cross_attention())
        .with_attention(attention)
        .with_positions(positions))
}

/// A model, its weights not yet drawn. Sizes that the memory has no room for are refused before it is asked for.
pub fn model(config: &Config, sizes: &Seq2SeqConfig, device: &Device) -> Result<Seq2Seq> {
    // Blocks are alike, so one of each tells the size of all; a billion of them could not even be listed.
    let one = sizes.clone().with_encoder_layers(1).with_decoder_layers(1).init(device)?;
    let more = |layers: usize, block: f64| (layers as f64 - 1.0) * block;
    let numbers = memory::numbers(&one)
        + more(sizes.encoder_layers, memory::numbers(&one.encoder))
        + more(sizes.decoder_layers, memory::numbers(&one.decoder));
    memory::check_model(
        numbers,
        &config.training,
        device,
        "lower d_model, d_ff, encoder_layers, decoder_layers, radius, max_tokens or workers with --set, or take tokenizers \
         with smaller vocabularies",
    )?;
    Ok(sizes.init(device)?)
}

/// Bytes that training keeps for a token of the source and for one of the target; measured, rounded up.
pub fn training_bytes(config: &Config) -> [f64; 2] {
    let [d_model, d_ff] = [config.model.d_model, config.model.d_ff].map(|size| size as f64);
    // Each attention keeps its gates.
    let gates = if config.model.gated_attention { d_model } else { 0.0 };
    let encoder = config.task.encoder_layers as f64 * (14.0 * d_model + gates + 2.0 * d_ff);
    [encoder * NUMBER, config.task.decoder_layers as f64 * (10.0 * d_model + 2.0 * gates + d_ff) * NUMBER]
}

/// Bytes that answering a source of so many tokens with a beam takes for each of them; measured, rounded up.
pub fn answering_bytes(config: &Config, beam: usize, tokens: usize) -> f64 {
    let [d_model, d_ff] = [config.model.d_model, config.model.d_ff].map(|size| size as f64);
    // Read in segments, of which only the encoder's rows remain.
    if tokens >= Seq2Seq::LONG_SOURCE && ["kernelized", "shaw"].contains(&config.model.attention.as_str()) {
        return 1.2 * d_model * NUMBER;
    }
    // Without positions sums stand for all keys and values; otherwise every layer keeps them, and once more for each prefix.
    let kept = if config.model.attention == "kernelized" {
        0
    } else {
        config.task.decoder_layers * if beam > 1 { 1 + beam } else { 1 }
    };
    let attention = if config.model.gated_attention { 7.0 } else { 6.0 };
    (attention * d_model).max(2.0 * d_model + d_ff).max((2.0 + 2.0 * kept as f64) * d_model) * NUMBER
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn tables_have_room_for_the_longest_sequence() {
        for name in ["aft-full", "aft-local"] {
            let with = |max_tokens: usize, options: Value| {
                let given =
                    json!({ "pairs": "a", "attention": name, "max_tokens": max_tokens, "attention_options": options });
                configure(&crate::run::config::with(given), 7, 9)
            };
            let length = |config: Seq2SeqConfig| serde_json::to_value(config.attention).unwrap()["length"].clone();
            assert_eq!(length(with(3000, json!({})).unwrap()), 3001);
            assert_eq!(length(with(100, json!({ "length": 101 })).unwrap()), 101);
            let error = with(512, json!({ "length": 300 })).unwrap_err().to_string();
            assert!(error.contains("length = 300") && error.contains("513"), "{error}");
        }
    }
}
