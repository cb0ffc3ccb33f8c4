//! Models of one stack of blocks, as settings describe them.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, TensorData};
use longspan::attention::AttentionConfig;
use longspan::models::{BlockConfig, EncoderBlock, Positions};

use super::memory;
use crate::run::config::{Config, ModelSettings, TaskSettings};

pub fn block(settings: &ModelSettings) -> BlockConfig {
    BlockConfig {
        d_model: settings.d_model,
        heads: settings.heads,
        kv_heads: None,
        d_ff: settings.d_ff,
        dropout: settings.dropout,
        norm: settings.norm,
        norm_kind: settings.norm_kind,
        activation: settings.activation,
        gated: settings.gated,
        gated_attention: settings.gated_attention,
        recompute: settings.recompute,
        initializer: None,
    }
}

/// Absolute positions where no mechanism sees the order of tokens.
pub fn positions(attention: &[AttentionConfig]) -> Positions {
    if attention.iter().any(AttentionConfig::sees_order) { Positions::None } else { Positions::Sinusoidal }
}

/// Lets a model that corrects a simple method begin with no corrections.
pub fn begin_at_zero<S: TaskSettings>(output: &mut Linear, config: &Config<S>, outputs: usize, device: &Device) {
    if config.common().base {
        output.weight = Initializer::Zeros.init([config.model.d_model, outputs], device);
        output.bias = Some(Initializer::Zeros.init([outputs], device));
    }
}

/// Whether a model corrects nothing, so that it need not be asked.
pub fn is_at_zero<S: TaskSettings>(output: &Linear, config: &Config<S>) -> bool {
    let zeros = |data: TensorData| data.iter::<f32>().all(|x| x == 0.0);
    let bias = output.bias.as_ref().is_none_or(|bias| zeros(bias.val().into_data()));
    config.common().base && bias && zeros(output.weight.val().into_data())
}

/// Refuses sizes that the memory has no room for before it is asked for. `one` is the model with one block, `blocks` its blocks; blocks
/// are alike, so one tells the size of all, and a billion of them could not even be listed. `lower` says what to lower.
pub fn check<S: TaskSettings>(
    one: &impl Module,
    blocks: &Vec<EncoderBlock>,
    config: &Config<S>,
    device: &Device,
    lower: &str,
) -> Result<()> {
    let numbers = memory::numbers(one) + (config.common().blocks as f64 - 1.0) * memory::numbers(blocks);
    memory::check_model(numbers, &config.training, device, lower)
}

/// A model of one stack, its weights not yet drawn, from what says the numbers of its inputs and outputs.
macro_rules! stacked {
    ($sizes:expr, $config:expr, $pooling:expr, $outputs:expr, $device:expr) => {{
        const LOWER: &str = "lower d_model, d_ff, layers, radius, max_tokens or workers with --set, or take a tokenizer with a smaller \
                             vocabulary";
        let (config, device) = ($config, $device);
        let attention = $crate::tasks::attention::of_layers(&config.model, config.task.files.max_tokens)?;
        let sizes = $sizes
            .with_block($crate::tasks::stack::block(&config.model))
            .with_layers(config.task.stack.layers)
            .with_positions($crate::tasks::stack::positions(&attention))
            .with_attention(attention)
            .with_causal(config.task.stack.causal)
            .with_pooling($pooling);
        let one = sizes.clone().with_layers(1).init(device)?;
        $crate::tasks::stack::check(&one, &one.blocks, config, device, LOWER)?;
        let mut model = sizes.init(device)?;
        $crate::tasks::stack::begin_at_zero(&mut model.output, config, $outputs, device);
        anyhow::Ok(model)
    }};
}
pub(crate) use stacked;
