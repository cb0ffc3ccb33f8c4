//! The examples of a run as ids, and the tokenizers that make them.

use std::path::Path;

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

use super::step::Pair;
use crate::config::RunConfig;
use crate::data::{self, Example, Split};
use crate::tokens::{Kind, Tokenizer};

/// Development examples behind the held-out loss of the curve: enough for a second digit, few enough to cost little.
const DEVELOPMENT: usize = 512;

/// All that a run learns from and is measured on.
pub struct Corpus {
    pub train: Vec<Pair>,
    pub development: Vec<Pair>,
    pub held_out: Vec<Example>,
    /// Training pairs left out for their length.
    pub too_long: usize,
}

/// Reads the examples that the settings name, by use.
pub fn read(config: &RunConfig) -> Result<Split> {
    let examples = match &config.pairs {
        Some(path) => data::pairs::read(path)?,
        None => data::cmudict::examples(),
    };
    let split = data::split(examples);
    if split.train.is_empty() {
        let name = config.pairs.as_deref().unwrap_or(Path::new("the dictionary")).display();
        bail!("{name}: no pairs are left to train on after a tenth is held out; give more pairs");
    }
    Ok(split)
}

/// Tokenizers for the training examples, of the kinds that the settings name.
pub fn tokenizers(config: &RunConfig, split: &Split) -> Result<[Tokenizer; 2]> {
    let kind = |name: &Option<String>, default: Kind| name.as_ref().map_or(Ok(default), |name| name.parse());
    let target_default = if config.pairs.is_none() { Kind::Words } else { Kind::Characters };
    let source_kind = kind(&config.source_tokens, Kind::Characters)?;
    let target_kind = kind(&config.target_tokens, target_default)?;
    let sources = split.train.iter().map(|example| example.source.as_str());
    let targets = split.train.iter().flat_map(|example| &example.targets).map(String::as_str);
    Ok([Tokenizer::build(&source_kind, sources)?, Tokenizer::build(&target_kind, targets)?])
}

impl Corpus {
    /// Examples as ids.
    pub fn encode(split: Split, [source, target]: &[Tokenizer; 2], config: &RunConfig) -> Result<Self> {
        let all = pairs(&split.train, source, target)?;
        let count = all.len();
        let train: Vec<Pair> =
            all.into_iter().filter(|pair| pair.source.len().max(pair.target.len()) <= config.max_tokens).collect();
        if train.is_empty() {
            bail!("every training pair has more than {} tokens; raise it with --set max_tokens=…", config.max_tokens);
        }
        let too_long = count - train.len();
        let mut development = pairs(&split.development, source, target)?;
        development.retain(|pair| pair.source.len().max(pair.target.len()) <= config.max_tokens);
        development.truncate(DEVELOPMENT);
        Ok(Self { train, development, held_out: split.held_out, too_long })
    }

    /// The longest training target.
    pub fn longest_target(&self) -> usize {
        self.train.iter().map(|pair| pair.target.len()).max().unwrap_or(0)
    }

    /// SHA-256 over all training pairs in order: tells whether a run that goes on still has the pairs it began with.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        for pair in &self.train {
            for ids in [&pair.source, &pair.target] {
                hash.update((ids.len() as u64).to_le_bytes());
                for id in ids {
                    hash.update(id.to_le_bytes());
                }
            }
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn pairs(examples: &[Example], source: &Tokenizer, target: &Tokenizer) -> Result<Vec<Pair>> {
    let mut pairs = Vec::new();
    for example in examples {
        let ids = source.encode(&example.source)?;
        for text in &example.targets {
            pairs.push(Pair { source: ids.clone(), target: target.encode(text)? });
        }
    }
    Ok(pairs)
}
