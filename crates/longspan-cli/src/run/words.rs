//! Settings that are words, as what they stand for, and errors in words.

use std::fmt::Display;

use anyhow::{Result, bail};
use longspan::layers::{Activation, NormKind};
use longspan::models::{Norm, Pooling};

use super::config::RunConfig;

/// What a word stands for.
fn meant<T: Copy>(key: &str, word: &str, known: &[(&str, T)]) -> Result<T> {
    match known.iter().find(|(name, _)| *name == word) {
        Some((_, meant)) => Ok(*meant),
        None => {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            bail!("unknown {key} {word:?}; known are {}", names.join(", "))
        }
    }
}

impl RunConfig {
    /// Whether all words are known. A run that exists may have one that its task does not use.
    pub fn check_words(&self) -> Result<()> {
        self.norm()?;
        self.norm_kind()?;
        self.activation()?;
        self.pooling().map(drop)
    }

    /// Where norms stand.
    pub fn norm(&self) -> Result<Norm> {
        meant("norm", &self.norm, &[("pre", Norm::Pre), ("post", Norm::Post)])
    }

    /// Which norms.
    pub fn norm_kind(&self) -> Result<NormKind> {
        meant("norm_kind", &self.norm_kind, &[("layer", NormKind::Layer), ("rms", NormKind::Rms)])
    }

    /// What stands between the layers of feed-forward parts.
    pub fn activation(&self) -> Result<Activation> {
        use Activation::{Gelu, GeluTanh, Relu, Silu};
        let known = [("relu", Relu), ("gelu", Gelu), ("gelu-tanh", GeluTanh), ("silu", Silu)];
        meant("activation", &self.activation, &known)
    }

    /// How the rows of a sequence become one.
    pub fn pooling(&self) -> Result<Pooling> {
        let known = [("mean", Pooling::Mean), ("last", Pooling::Last), ("attention", Pooling::Attention)];
        meant("pooling", &self.pooling, &known)
    }
}

/// An error of a reader of JSON or TOML without the names of Rust's types.
pub fn plain(error: &(impl Display + ?Sized)) -> String {
    const NAMES: [(&str, &str); 13] = [
        ("expected usize", "expected a whole number from 0"),
        ("expected u64", "expected a whole number from 0"),
        ("expected u32", "expected a whole number from 0"),
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected f64", "expected a number"),
        ("expected a map", "expected a table such as {relative = {shared = true}}"),
        ("expected a sequence", "expected a list such as [\"novel.txt\"]"),
        ("invalid type: map", "invalid type: table"),
        ("expected struct ", "expected an object: "),
        ("expected internally tagged enum ", "expected an object with a `type`: "),
        ("data did not match any variant of untagged enum ", "no known kind of "),
        ("UnkIdNotInVocabulary", "whose `unk_id` is not in it"),
        ("expected ident", "this is no JSON"),
    ];
    let text = NAMES.iter().fold(error.to_string(), |text, (rust, words)| text.replace(rust, words));
    ["Untagged", "Wrapper", "Helper", "Deserializer"].iter().fold(text, |text, suffix| text.replace(suffix, ""))
}

/// The known name closest to `name`, if one is close enough to be meant.
pub fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let plain = |text: &str| text.to_lowercase().replace('-', "_");
    let wanted = plain(name);
    known
        .iter()
        .map(|candidate| (strsim::levenshtein(&wanted, &plain(candidate)), *candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= candidate.len().max(wanted.len()) / 2)
        .map(|(_, candidate)| candidate)
}
