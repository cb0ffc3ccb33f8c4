//! The model of a run: built from its settings, read from and written to bytes.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::store::{ModuleStore, SafetensorsStore};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use longspan::attention::{AttentionConfig, KernelConfig, RelativeConfig};
use longspan::kernels::FeatureMap;
use longspan::models::{Norm, Positions, Seq2Seq, Seq2SeqConfig};

use crate::config::{RunConfig, nearest};
use crate::run::{Checkpoint, RunFolder};
use crate::tokens::{PAD, Tokenizer};

/// The mechanisms that `attention` names.
const ATTENTIONS: [&str; 3] = ["kernelized", "shaw", "softmax"];

/// The model's configuration for these settings and vocabulary sizes.
pub fn configure(config: &RunConfig, source_vocab: usize, target_vocab: usize) -> Result<Seq2SeqConfig> {
    let feature_map: FeatureMap = config.feature_map.parse()?;
    let kernel = KernelConfig { feature_map, ..KernelConfig::default() };
    let relative = RelativeConfig { radius: config.radius, ..RelativeConfig::default() };
    let attention = match config.attention.as_str() {
        "kernelized" => AttentionConfig::Kernelized { kernel },
        "shaw" => AttentionConfig::Shaw { relative, kernel },
        "softmax" => AttentionConfig::softmax(),
        other => {
            let nearest = nearest(other, &ATTENTIONS).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
            bail!("unknown attention {other:?}; {nearest}known are {}", ATTENTIONS.join(", "))
        }
    };
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
        .with_cross_attention(attention.clone())
        .with_attention(attention)
        .with_norm(norm)
        .with_positions(positions))
}

/// A model with fresh weights that depend on the seed alone.
pub fn fresh(config: &Seq2SeqConfig, seed: u64, device: &Device) -> Result<Seq2Seq> {
    device.seed(seed);
    Ok(numbered(config.init(device)?))
}

/// A model with the weights of a safetensors file.
pub fn from_bytes(config: &Seq2SeqConfig, bytes: Vec<u8>, device: &Device) -> Result<Seq2Seq> {
    let mut model = config.init(device)?;
    let mut store = SafetensorsStore::from_bytes(Some(bytes));
    let result = store.apply_to(&mut model).map_err(|error| error.to_string());
    match result {
        Ok(result) if result.errors.is_empty() && result.missing.is_empty() && result.unused.is_empty() => {
            Ok(numbered(model))
        }
        Ok(_) => bail!("the weights do not fit the sizes in config.json; restore both files from one run"),
        Err(error) => {
            let first = error.lines().next().unwrap_or_default().trim_end_matches(':').to_string();
            bail!("the weights do not fit the sizes in config.json ({first}); restore both files from one run")
        }
    }
}

/// The weights as a safetensors file.
pub fn to_bytes(model: &Seq2Seq) -> Result<Vec<u8>> {
    let mut store = SafetensorsStore::from_bytes(None);
    store.collect_from(model).map_err(|error| anyhow!("cannot serialise the weights: {error}"))?;
    store.get_bytes().map_err(|error| anyhow!("cannot serialise the weights: {error}"))
}

/// Gives parameters their place in the model as identity. Fresh identities are random, and the optimiser's state, which
/// refers to parameters by identity, must find them again in another process. Lazy weights are drawn on the way.
fn numbered(model: Seq2Seq) -> Seq2Seq {
    struct Numbering(u64);
    impl Numbering {
        fn next(&mut self) -> ParamId {
            self.0 += 1;
            ParamId::from(self.0)
        }
    }
    impl ModuleMapper for Numbering {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (_, tensor, mapper) = param.consume();
            Param::from_mapped_value(self.next(), tensor, mapper)
        }
        fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
            let (_, tensor, mapper) = param.consume();
            Param::from_mapped_value(self.next(), tensor, mapper)
        }
        fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
            let (_, tensor, mapper) = param.consume();
            Param::from_mapped_value(self.next(), tensor, mapper)
        }
    }
    model.map(&mut Numbering(0))
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
    pub checkpoint: Checkpoint,
    pub folder: RunFolder,
}

impl Trained {
    /// Reads and verifies a run.
    pub fn load(path: &Path) -> Result<Self> {
        let folder = RunFolder::open(path)?;
        let config = RunConfig::load(&folder.config())?;
        let source = Tokenizer::load(&folder.source_tokenizer())?;
        let target = Tokenizer::load(&folder.target_tokenizer())?;
        let checkpoint = Checkpoint::last(&folder)?;
        let weights = checkpoint.model(&folder)?;
        let sizes = configure(&config, source.len(), target.len())?;
        let model = from_bytes(&sizes, weights, &Device::flex())
            .map_err(|error| anyhow!("{}: {error:#}", folder.model().display()))?;
        Ok(Self { config, source, target, model, checkpoint, folder })
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
    fn weights_depend_on_the_seed_and_survive_bytes() {
        let device = Device::flex();
        let one = to_bytes(&fresh(&tiny(), 1, &device).unwrap()).unwrap();
        assert_eq!(to_bytes(&fresh(&tiny(), 1, &device).unwrap()).unwrap(), one);
        assert_ne!(to_bytes(&fresh(&tiny(), 2, &device).unwrap()).unwrap(), one);
        let again = from_bytes(&tiny(), one.clone(), &device).unwrap();
        assert_eq!(to_bytes(&again).unwrap(), one);
    }

    #[test]
    fn weights_of_other_sizes_are_refused() {
        let device = Device::flex();
        let bytes = to_bytes(&fresh(&tiny(), 1, &device).unwrap()).unwrap();
        for other in [tiny().with_d_ff(16), tiny().with_encoder_layers(3), tiny().with_encoder_layers(1)] {
            let error = from_bytes(&other, bytes.clone(), &device).unwrap_err().to_string();
            assert!(error.contains("do not fit the sizes"), "{error}");
            assert!(!error.contains('\n'), "{error}");
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
