//! Models of one stack of blocks, as settings describe them.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, TensorData};
use longspan::attention::AttentionConfig;
use longspan::models::{BlockConfig, EncoderBlock, Positions};

use super::memory;
use crate::run::config::RunConfig;

/// Blocks of these sizes and forms.
pub fn block(config: &RunConfig) -> Result<BlockConfig> {
    Ok(BlockConfig {
        d_model: config.d_model,
        heads: config.heads,
        kv_heads: None,
        d_ff: config.d_ff,
        dropout: config.dropout,
        norm: config.norm()?,
        norm_kind: config.norm_kind()?,
        activation: config.activation()?,
        gated: config.gated,
        gated_attention: config.gated_attention,
        recompute: config.recompute,
    })
}

/// Absolute positions where no mechanism sees the order of tokens.
pub fn positions(attention: &[AttentionConfig]) -> Positions {
    if attention.iter().any(AttentionConfig::sees_order) { Positions::None } else { Positions::Sinusoidal }
}

/// Lets a model that corrects a simple method begin with no corrections.
pub fn begin_at_zero(output: &mut Linear, config: &RunConfig, outputs: usize, device: &Device) {
    if config.base {
        output.weight = Initializer::Zeros.init([config.d_model, outputs], device);
        output.bias = Some(Initializer::Zeros.init([outputs], device));
    }
}

/// Whether a model corrects nothing, so that it need not be asked.
pub fn is_at_zero(output: &Linear, config: &RunConfig) -> bool {
    let zeros = |data: TensorData| data.iter::<f32>().all(|x| x == 0.0);
    let bias = output.bias.as_ref().is_none_or(|bias| zeros(bias.val().into_data()));
    config.base && bias && zeros(output.weight.val().into_data())
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
