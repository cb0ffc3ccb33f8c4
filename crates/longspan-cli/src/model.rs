//! The model of a run: built from its settings, and read with all that answering needs.

use std::path::Path;

use anyhow::{Result, bail};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::{AftFullOptions, AftLocalOptions, AttentionConfig};
use longspan::kernels::FeatureMap;
use longspan::models::{Norm, Positions, Seq2Seq, Seq2SeqConfig};
use serde_json::json;

use crate::answer::Answerer;
use crate::attention;
use crate::config::RunConfig;
use crate::run::{RunFolder, Saved};
use crate::tokens::{PAD, Tokenizer};
use crate::train::{Workers, optimizer};

/// The model's configuration for these settings and vocabulary sizes.
pub fn configure(config: &RunConfig, source_vocab: usize, target_vocab: usize) -> Result<Seq2SeqConfig> {
    let feature_map: FeatureMap = config.feature_map.parse()?;
    // The settings that have keys of their own, for the mechanisms that have such an option.
    // Tables by position have a row for the longest sequence, with the token that it starts with.
    let positions = config.max_tokens.max(config.answer_tokens.unwrap_or(0)) + 1;
    let feature_map = json!(feature_map.to_string());
    let everywhere = [
        ("/kernel/feature_map", feature_map.clone()),
        ("/feature_map", feature_map),
        ("/relative/radius", json!(config.radius)),
        ("/length", json!(AftLocalOptions::default().length.max(positions))),
    ];
    let attention = attention::named(&config.attention, &everywhere, &config.attention_options)?;
    if let AttentionConfig::AftFull(AftFullOptions { length, .. })
    | AttentionConfig::AftLocal(AftLocalOptions { length, .. }) = &attention
        && *length < positions
    {
        bail!(
            "attention_options: length = {length} has no room for the {positions} positions that max_tokens and \
             answer_tokens allow; raise it, or lower those with --set"
        );
    }
    let norm = match config.norm.as_str() {
        "pre" => Norm::Pre,
        "post" => Norm::Post,
        other => bail!("unknown norm {other:?}; known are pre, post"),
    };
    let positions = if attention.sees_order() { Positions::None } else { Positions::Sinusoidal };
    Ok(Seq2SeqConfig::new(source_vocab, target_vocab)
        .with_d_model(config.d_model)
        .with_heads(config.heads)
        .with_encoder_layers(config.encoder_layers)
        .with_decoder_layers(config.decoder_layers)
        .with_d_ff(config.d_ff)
        .with_dropout(config.dropout)
        .with_cross_attention(attention.cross_attention())
        .with_attention(attention)
        .with_norm(norm)
        .with_positions(positions))
}

/// A model with fresh weights that depend on the seed alone.
pub fn fresh(config: &Seq2SeqConfig, seed: u64, device: &Device) -> Result<Seq2Seq> {
    /// Weights are drawn when they are first looked at; this looks at them in the order of the model.
    struct Draw;
    impl ModuleVisitor for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            param.val();
        }
    }
    device.seed(seed);
    let model = config.init(device)?;
    model.visit(&mut Draw);
    Ok(model)
}

/// A batch of token lists, `[batch, longest]`, padded at the ends; and their lengths.
pub fn padded(rows: &[&[u32]], device: &Device) -> (Tensor<2, Int>, Vec<usize>) {
    let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let mut ids = Vec::with_capacity(rows.len() * longest);
    for row in rows {
        ids.extend(row.iter().map(|&id| id as i32));
        ids.extend(std::iter::repeat_n(PAD as i32, longest - row.len()));
    }
    let tensor = Tensor::from_data(TensorData::new(ids, [rows.len(), longest]), device);
    (tensor, rows.iter().map(|row| row.len()).collect())
}

/// A trained run, ready to answer.
pub struct Trained {
    pub config: RunConfig,
    pub source: Tokenizer,
    pub target: Tokenizer,
    pub model: Seq2Seq,
    pub folder: RunFolder,
}

impl Trained {
    /// Reads and verifies a run.
    pub fn load(path: &Path) -> Result<Self> {
        let folder = RunFolder::open(path)?;
        let config = RunConfig::load(&folder.config())?;
        let source = Tokenizer::load(&folder.source_tokenizer())?;
        let target = Tokenizer::load(&folder.target_tokenizer())?;
        let sizes = configure(&config, source.len(), target.len())?;
        let model = folder.load_weights(sizes.init(&Device::flex())?)?;
        Ok(Self { config, source, target, model, folder })
    }

    /// The run with threads to answer on.
    pub fn answerer<'a>(&'a self, beam: usize, workers: &'a Workers) -> Answerer<'a> {
        Answerer {
            model: &self.model,
            source: &self.source,
            target: &self.target,
            max_tokens: self.config.answer_tokens.unwrap_or(self.config.max_tokens),
            beam,
            workers,
        }
    }

    /// How far the training has come; reads and verifies the checkpoint.
    pub fn load_saved(&self) -> Result<Saved> {
        let sizes = configure(&self.config, self.source.len(), self.target.len())?;
        let model = sizes.init(&Device::flex())?;
        Ok(self.folder.load_checkpoint(model, optimizer(&self.config))?.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Seq2SeqConfig {
        let config = RunConfig { d_model: 8, heads: 2, d_ff: 8, radius: 2, ..RunConfig::default() };
        configure(&config, 7, 9).unwrap()
    }

    #[test]
    fn weights_depend_on_the_seed() {
        let place = tempfile::tempdir().unwrap();
        let bytes = |seed| {
            let path = place.path().join("weights");
            let model = fresh(&tiny(), seed, &Device::flex()).unwrap();
            longspan::checkpoint::save_weights(&path, &model).unwrap();
            std::fs::read(&path).unwrap()
        };
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1), bytes(2));
    }

    #[test]
    fn tables_have_room_for_the_longest_sequence() {
        for name in ["aft-full", "aft-local"] {
            let with = |max_tokens, options: &str| {
                let attention_options = crate::attention::options(options).unwrap();
                configure(
                    &RunConfig { attention: name.into(), max_tokens, attention_options, ..RunConfig::default() },
                    7,
                    9,
                )
            };
            let length = |config: Seq2SeqConfig| serde_json::to_value(config.attention).unwrap()["length"].clone();
            assert_eq!(length(with(3000, "{}").unwrap()), 3001);
            assert_eq!(length(with(100, "length=101").unwrap()), 101);
            let error = with(512, "length=300").unwrap_err().to_string();
            assert!(error.contains("length = 300") && error.contains("513"), "{error}");
        }
    }

    #[test]
    fn unknown_names_are_listed() {
        let with = |change: &dyn Fn(&mut RunConfig)| {
            let mut config = RunConfig::default();
            change(&mut config);
            configure(&config, 7, 9).unwrap_err().to_string()
        };
        assert!(with(&|c| c.attention = "shw".into()).contains("did you mean `shaw`"));
        assert!(with(&|c| c.feature_map = "gelu".into()).contains("known are elu+1"));
        assert!(with(&|c| c.norm = "both".into()).contains("known are pre, post"));
    }
}
