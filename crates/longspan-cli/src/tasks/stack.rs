//! Models of one stack of blocks, as settings describe them.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Device;
use longspan::attention::AttentionConfig;
use longspan::models::{EncoderBlock, Positions};

use super::memory;
use crate::run::config::RunConfig;

/// A model's configuration with the sizes and forms of its blocks.
macro_rules! stack {
    ($model:expr, $config:expr, $attention:expr) => {
        $model
            .with_d_model($config.d_model)
            .with_heads($config.heads)
            .with_layers($config.layers)
            .with_d_ff($config.d_ff)
            .with_dropout($config.dropout)
            .with_attention($attention)
            .with_norm($config.norm()?)
            .with_norm_kind($config.norm_kind()?)
            .with_activation($config.activation()?)
            .with_gated($config.gated)
            .with_gated_attention($config.gated_attention)
            .with_recompute($config.recompute)
    };
}
pub(crate) use stack;

/// The same for a model that makes one row of all.
macro_rules! pooled {
    ($model:expr, $config:expr) => {{
        let attention = $crate::tasks::attention::of_layers($config, $config.max_tokens)?;
        let positions = $crate::tasks::stack::positions(&attention);
        $crate::tasks::stack::stack!($model, $config, attention)
            .with_causal($config.causal)
            .with_pooling($config.pooling()?)
            .with_positions(positions)
    }};
}
pub(crate) use pooled;

/// Absolute positions where no mechanism sees the order of tokens.
pub fn positions(attention: &[AttentionConfig]) -> Positions {
    if attention.iter().any(AttentionConfig::sees_order) { Positions::None } else { Positions::Sinusoidal }
}

/// Refuses sizes that the memory has no room for before it is asked for. `one` is the model with one block, `blocks` its blocks; blocks
/// are alike, so one tells the size of all, and a billion of them could not even be listed. `lower` says what to lower.
pub fn check(
    one: &impl Module,
    blocks: &Vec<EncoderBlock>,
    config: &RunConfig,
    device: &Device,
    lower: &str,
) -> Result<()> {
    let numbers = memory::numbers(one) + (config.layers as f64 - 1.0) * memory::numbers(blocks);
    memory::check_model(numbers, config, device, lower)
}
