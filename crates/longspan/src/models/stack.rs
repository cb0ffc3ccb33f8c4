//! What the models share: their blocks, the norm after them, and the layers at both ends.

use burn::nn::{Dropout, Embedding, EmbeddingConfig, Initializer};
use burn::tensor::{Device, Int, Tensor};

use super::block::{BlockConfig, EncoderBlock, Norm};
use super::positions::Positions;
use crate::attention::AttentionConfig;
use crate::error::{Result, config, fits};
use crate::layers::{self, TokenNorm, dropout};

/// Checks that none of a model's sizes is 0.
pub(super) fn check(name: &'static str, block: &BlockConfig, sizes: &[(&'static str, usize)]) -> Result<()> {
    for &(field, size) in
        sizes.iter().chain(&[("d_model", block.d_model), ("heads", block.heads), ("d_ff", block.d_ff)])
    {
        config(size > 0, name, field, "at least 1", size)?;
        fits(name, field, &[size, block.d_model])?;
    }
    Ok(())
}

/// So many blocks. Their mechanisms are those of the list in turn.
pub(super) fn blocks(
    name: &'static str,
    block: &BlockConfig,
    attention: &[AttentionConfig],
    layers: usize,
    device: &Device,
) -> Result<Vec<EncoderBlock>> {
    config(!attention.is_empty(), name, "attention", "at least one mechanism", "none")?;
    attention.iter().cycle().take(layers).map(|attention| block.encoder(attention, device)).collect()
}

/// The norm after the last block, which pre-norm blocks need.
pub(super) fn last_norm(block: &BlockConfig, device: &Device) -> Result<Option<TokenNorm>> {
    (block.norm == Norm::Pre).then(|| block.token_norm(device)).transpose()
}

/// What comes after the last block.
pub(super) fn end(norm: Option<&TokenNorm>, x: Tensor<3>) -> Result<Tensor<3>> {
    norm.map_or(Ok(x.clone()), |norm| norm.forward(x))
}

/// With which probability a part drops numbers on a device that trains: none once `freeze` has stopped it.
pub(super) fn probability(dropout: &Dropout) -> f64 {
    if dropout.training.is_enabled() { dropout.prob } else { 0.0 }
}

/// Embeddings whose numbers have the standard deviation `std`.
pub(super) fn embedding(tokens: usize, d_model: usize, std: f64, device: &Device) -> Embedding {
    EmbeddingConfig::new(tokens, d_model).with_initializer(Initializer::Normal { mean: 0.0, std }).init(device)
}

/// `scale · E[token]` with positions, `[batch, tokens, d_model]`, of tokens from position `first` on.
pub(super) fn embed(
    embedding: &Embedding,
    tokens: Tensor<2, Int>,
    scale: f64,
    (positions, first): (Positions, usize),
    drop: &Dropout,
) -> Result<Tensor<3>> {
    let weight = embedding.weight.val();
    let shape = [tokens.dims()[1], weight.dims()[1]];
    let rows = positions.rows(first, shape, (&weight.device(), weight.dtype()));
    dropout(layers::embedding(tokens, weight, scale, rows)?, probability(drop))
}
