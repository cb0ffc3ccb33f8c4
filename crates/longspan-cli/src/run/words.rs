//! Settings that are words, as what they stand for.

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
