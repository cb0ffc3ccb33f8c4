//! What the models share: their blocks, the norm after them, and the layers at both ends.

use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::block::{EncoderBlock, EncoderBlockConfig, Norm};
use crate::attention::AttentionConfig;
use crate::error::{Result, config};
use crate::layers::{NormKind, TokenNorm, TokenNormConfig};

/// The blocks that a model's configuration describes, but for their mechanisms.
macro_rules! block_config {
    ($model:expr, $block:ident) => {
        $block::new($model.d_model, $model.heads, $model.d_ff)
            .with_kv_heads($model.kv_heads)
            .with_dropout($model.dropout)
            .with_norm($model.norm)
            .with_norm_kind($model.norm_kind)
            .with_activation($model.activation)
            .with_gated($model.gated)
            .with_gated_attention($model.gated_attention)
            .with_recompute($model.recompute)
    };
}
pub(super) use block_config;

/// Checks the sizes of a model and of its blocks.
pub(super) fn check(name: &'static str, sizes: &[(&'static str, usize)], block: &EncoderBlockConfig) -> Result<()> {
    let EncoderBlockConfig { d_model, heads, d_ff, dropout, .. } = *block;
    for &(field, size) in sizes.iter().chain(&[("d_model", d_model), ("heads", heads), ("d_ff", d_ff)]) {
        config(size > 0, name, field, "at least 1", size)?;
    }
    config((0.0..1.0).contains(&dropout), name, "dropout", "a number in [0, 1)", dropout)
}

/// So many blocks. Their mechanisms are those of the list in turn.
pub(super) fn blocks(
    name: &'static str,
    block: &EncoderBlockConfig,
    attention: &[AttentionConfig],
    layers: usize,
    device: &Device,
) -> Result<Vec<EncoderBlock>> {
    config(!attention.is_empty(), name, "attention", "at least one mechanism", "none")?;
    let one = |attention: &AttentionConfig| block.clone().with_attention(attention.clone()).init(device);
    attention.iter().cycle().take(layers).map(one).collect()
}

/// The norm after the last block, which pre-norm blocks need.
pub(super) fn last_norm(norm: Norm, kind: NormKind, d_model: usize, device: &Device) -> Result<Option<TokenNorm>> {
    (norm == Norm::Pre).then(|| TokenNormConfig::new(d_model).with_kind(kind).init(device)).transpose()
}

/// What comes after the last block.
pub(super) fn end(norm: Option<&TokenNorm>, x: Tensor<3>) -> Tensor<3> {
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}

/// Embeddings whose numbers have the standard deviation `std`.
pub(super) fn embedding(tokens: usize, d_model: usize, std: f64, device: &Device) -> Embedding {
    EmbeddingConfig::new(tokens, d_model).with_initializer(Initializer::Normal { mean: 0.0, std }).init(device)
}

/// A linear layer at an end of a model.
pub(super) fn linear(from: usize, to: usize, device: &Device) -> Linear {
    LinearConfig::new(from, to).with_initializer(Initializer::XavierUniform { gain: 1.0 }).init(device)
}
