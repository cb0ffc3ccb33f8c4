//! The blocks of an encoder and a decoder: attention and a feed-forward layer, each with a residual and a norm.
//!
//! Pre-norm: `x + f(norm(x))`. Post-norm: `norm(x + f(x))`.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

use crate::attention::{
    AttentionConfig, AttentionMask, AttentionState, MemoryState, MultiHeadAttention, MultiHeadAttentionConfig,
};
use crate::error::{Result, config};

/// Where the norm of a residual branch stands.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Norm {
    /// Before the branch: trains without a warm-up.
    Pre,
    /// After the sum, as in the first transformer.
    Post,
}

/// Two linear layers with a ReLU between them, on each token.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// `[d_model, d_ff]`.
    pub inner: Linear,
    /// `[d_ff, d_model]`.
    pub outer: Linear,
}

impl FeedForward {
    fn new(d_model: usize, d_ff: usize, device: &Device) -> Self {
        let initializer = Initializer::XavierUniform { gain: 1.0 };
        let layer = |input, output| LinearConfig::new(input, output).with_initializer(initializer.clone()).init(device);
        Self { inner: layer(d_model, d_ff), outer: layer(d_ff, d_model) }
    }

    /// `[batch, tokens, d_model]` → `[batch, tokens, d_model]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.outer.forward(relu(self.inner.forward(x)))
    }
}

/// What the blocks of one model have in common.
#[derive(Debug, Clone)]
pub(super) struct BlockOptions {
    pub d_model: usize,
    pub heads: usize,
    pub kv_heads: Option<usize>,
    pub d_ff: usize,
    pub dropout: f64,
    pub norm: Norm,
}

impl BlockOptions {
    fn attention(&self, attention: &AttentionConfig, device: &Device) -> Result<MultiHeadAttention> {
        MultiHeadAttentionConfig::new(self.d_model, self.heads)
            .with_kv_heads(self.kv_heads)
            .with_attention(attention.clone())
            .init(device)
    }

    fn dropout(&self) -> Result<Dropout> {
        config((0.0..1.0).contains(&self.dropout), "Seq2SeqConfig", "dropout", "a number in [0, 1)", self.dropout)?;
        Ok(DropoutConfig::new(self.dropout).init())
    }

    fn norm(&self, device: &Device) -> LayerNorm {
        LayerNormConfig::new(self.d_model).init(device)
    }
}

/// One residual branch.
fn residual(
    x: Tensor<3>,
    norm: &LayerNorm,
    place: Norm,
    dropout: &Dropout,
    branch: impl FnOnce(Tensor<3>) -> Result<Tensor<3>>,
) -> Result<Tensor<3>> {
    Ok(match place {
        Norm::Pre => x.clone() + dropout.forward(branch(norm.forward(x))?),
        Norm::Post => norm.forward(x.clone() + dropout.forward(branch(x)?)),
    })
}

/// Self-attention in both directions and a feed-forward layer.
#[derive(Module, Debug)]
pub struct EncoderBlock {
    /// Bidirectional self-attention.
    pub attention: MultiHeadAttention,
    /// The norm of the attention's branch.
    pub attention_norm: LayerNorm,
    /// The feed-forward layer.
    pub feed_forward: FeedForward,
    /// The norm of the feed-forward layer's branch.
    pub feed_forward_norm: LayerNorm,
    dropout: Dropout,
    #[module(skip)]
    norm: Norm,
}

impl EncoderBlock {
    pub(super) fn new(options: &BlockOptions, attention: &AttentionConfig, device: &Device) -> Result<Self> {
        Ok(Self {
            attention: options.attention(attention, device)?,
            attention_norm: options.norm(device),
            feed_forward: FeedForward::new(options.d_model, options.d_ff, device),
            feed_forward_norm: options.norm(device),
            dropout: options.dropout()?,
            norm: options.norm,
        })
    }

    /// `[batch, tokens, d_model]` → `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::self_attention`].
    pub fn forward(&self, x: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        let x =
            residual(x, &self.attention_norm, self.norm, &self.dropout, |x| self.attention.self_attention(x, mask))?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x| Ok(self.feed_forward.forward(x)))
    }
}

/// Causal self-attention, attention to the memory, and a feed-forward layer.
#[derive(Module, Debug)]
pub struct DecoderBlock {
    /// Causal self-attention.
    pub attention: MultiHeadAttention,
    /// The norm of the self-attention's branch.
    pub attention_norm: LayerNorm,
    /// Bidirectional attention to the memory.
    pub cross_attention: MultiHeadAttention,
    /// The norm of the cross-attention's branch.
    pub cross_attention_norm: LayerNorm,
    /// The feed-forward layer.
    pub feed_forward: FeedForward,
    /// The norm of the feed-forward layer's branch.
    pub feed_forward_norm: LayerNorm,
    dropout: Dropout,
    #[module(skip)]
    norm: Norm,
}

impl DecoderBlock {
    pub(super) fn new(
        options: &BlockOptions,
        attention: &AttentionConfig,
        cross_attention: &AttentionConfig,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            attention: options.attention(attention, device)?,
            attention_norm: options.norm(device),
            cross_attention: options.attention(cross_attention, device)?,
            cross_attention_norm: options.norm(device),
            feed_forward: FeedForward::new(options.d_model, options.d_ff, device),
            feed_forward_norm: options.norm(device),
            dropout: options.dropout()?,
            norm: options.norm,
        })
    }

    /// `x` and output `[batch, queries, d_model]`, `memory` `[batch, keys, d_model]`.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::cross_attention`].
    pub fn forward(&self, x: Tensor<3>, memory: Tensor<3>, memory_mask: &AttentionMask) -> Result<Tensor<3>> {
        let causal = AttentionMask::causal();
        let x =
            residual(x, &self.attention_norm, self.norm, &self.dropout, |x| self.attention.self_attention(x, &causal))?;
        let x = residual(x, &self.cross_attention_norm, self.norm, &self.dropout, |x| {
            self.cross_attention.cross_attention(x, memory, memory_mask)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x| Ok(self.feed_forward.forward(x)))
    }

    /// The token at `position`, `[batch, 1, d_model]` → `[batch, 1, d_model]`: its row of [`DecoderBlock::forward`].
    ///
    /// # Errors
    /// As [`MultiHeadAttention::step`] and [`MultiHeadAttention::recall`].
    pub fn step(
        &self,
        x: Tensor<3>,
        position: usize,
        state: &mut AttentionState,
        memory: &MemoryState,
    ) -> Result<Tensor<3>> {
        let x = residual(x, &self.attention_norm, self.norm, &self.dropout, |x| self.attention.step(x, state))?;
        let x = residual(x, &self.cross_attention_norm, self.norm, &self.dropout, |x| {
            self.cross_attention.recall(x, position, memory)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x| Ok(self.feed_forward.forward(x)))
    }
}
