//! The blocks of an encoder and a decoder: attention and a feed-forward layer, each as a residual branch with a norm.
//!
//! Pre-norm: `x + f(norm(x))`. Post-norm: `norm(x + f(x))`.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use crate::attention::{
    AttentionConfig, AttentionMask, AttentionState, MemoryState, MultiHeadAttention, MultiHeadAttentionConfig,
};
use crate::error::{Result, config};
use crate::layers::{self, Activation, After, apply};

/// Where the norm of a residual branch stands.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Norm {
    /// Before the branch; such a model needs one more norm after its last block.
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
        self.forward_with(x, After::default())
    }

    /// [`forward`](Self::forward) and what follows it.
    fn forward_with(&self, x: Tensor<3>, after: After) -> Tensor<3> {
        let inner = apply(&self.inner, x, Activation::Relu, After::default());
        apply(&self.outer, inner, Activation::Identity, after)
    }
}

/// Checks the sizes that both blocks have and makes their dropout.
fn dropout(name: &'static str, d_ff: usize, probability: f64) -> Result<Dropout> {
    config(d_ff > 0, name, "d_ff", "at least 1", d_ff)?;
    config((0.0..1.0).contains(&probability), name, "dropout", "a number in [0, 1)", probability)?;
    Ok(DropoutConfig::new(probability).init())
}

/// Keeps the division by the standard deviation finite.
const EPSILON: f64 = 1e-5;

/// A fresh norm over `width` numbers.
pub(super) fn layer_norm(width: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(width).with_epsilon(EPSILON).init(device)
}

/// A norm that [`layer_norm`] made, applied to each token.
pub(super) fn normalize(norm: &LayerNorm, x: Tensor<3>) -> Tensor<3> {
    layers::layer_norm(norm, EPSILON, x)
}

/// One residual branch, which drops and adds as its last layer does.
fn residual(
    x: Tensor<3>,
    norm: &LayerNorm,
    place: Norm,
    dropout: &Dropout,
    branch: impl FnOnce(Tensor<3>, After) -> Result<Tensor<3>>,
) -> Result<Tensor<3>> {
    let after = After { dropout: dropout.prob, residual: Some(x.clone()) };
    match place {
        Norm::Pre => branch(normalize(norm, x), after),
        Norm::Post => Ok(normalize(norm, branch(x, after)?)),
    }
}

/// Makes an [`EncoderBlock`].
#[derive(Config, Debug, PartialEq)]
pub struct EncoderBlockConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Query heads; they divide `d_model`.
    pub heads: usize,
    /// Width inside the feed-forward layer.
    pub d_ff: usize,
    /// Key/value heads if fewer than query heads; `heads` is a multiple of them.
    pub kv_heads: Option<usize>,
    /// Probability with which a number of a branch's output is dropped in training.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Where the norms stand.
    #[config(default = "Norm::Pre")]
    pub norm: Norm,
    /// The mechanism of the self-attention.
    #[config(default = "AttentionConfig::shaw()")]
    pub attention: AttentionConfig,
}

impl EncoderBlockConfig {
    /// Makes the block with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, heads that do not divide, a dropout outside `[0, 1)`, and what the mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<EncoderBlock> {
        let dropout = dropout("EncoderBlockConfig", self.d_ff, self.dropout)?;
        let attention = MultiHeadAttentionConfig::new(self.d_model, self.heads)
            .with_kv_heads(self.kv_heads)
            .with_attention(self.attention.clone());
        Ok(EncoderBlock {
            attention: attention.init(device)?,
            attention_norm: layer_norm(self.d_model, device),
            feed_forward: FeedForward::new(self.d_model, self.d_ff, device),
            feed_forward_norm: layer_norm(self.d_model, device),
            dropout,
            norm: self.norm,
        })
    }
}

/// Self-attention and a feed-forward layer, each as a residual branch with a norm. Under a bidirectional mask it is a
/// block of an encoder, under a causal one a block of a decoder-only model, which can also step token by token:
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use longspan::attention::{AttentionMask, AttentionState};
/// use longspan::models::EncoderBlockConfig;
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = EncoderBlockConfig::new(32, 4, 64).init(&device)?;
/// let x = Tensor::<3>::random([2, 10, 32], Distribution::Normal(0.0, 1.0), &device);
/// let whole = block.forward(x.clone(), &AttentionMask::causal())?;
///
/// let mut state = AttentionState::default();
/// for t in 0..10 {
///     let row = block.step(x.clone().narrow(1, t, 1), &mut state)?;
///     let difference = (row - whole.clone().narrow(1, t, 1)).abs().max().into_scalar::<f32>();
///     assert!(difference < 1e-4);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct EncoderBlock {
    /// Self-attention.
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
    /// The block over whole sequences, in the direction that `mask` says.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn forward(&self, x: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        let x = residual(x, &self.attention_norm, self.norm, &self.dropout, |x, after| {
            self.attention.self_attention_with(x, mask, after)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x, after| {
            Ok(self.feed_forward.forward_with(x, after))
        })
    }

    /// One token: takes it into `state`, which before the first token is the default, and gives its row of
    /// [`EncoderBlock::forward`] under a causal mask.
    ///
    /// # Shapes
    /// `x` and output: `[batch, 1, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state of another batch or mechanism.
    pub fn step(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        let x = residual(x, &self.attention_norm, self.norm, &self.dropout, |x, after| {
            self.attention.step_with(x, state, after)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x, after| {
            Ok(self.feed_forward.forward_with(x, after))
        })
    }
}

impl EncoderBlock {
    /// Several tokens after those of `state`: what [`EncoderBlock::step`] gives one after the other, in the parallel form. A
    /// gradient reaches these tokens, but not those before.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state of another batch or mechanism.
    pub fn advance(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        let x = residual(x, &self.attention_norm, self.norm, &self.dropout, |x, after| {
            self.attention.advance_with(x, state, after)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x, after| {
            Ok(self.feed_forward.forward_with(x, after))
        })
    }
}

/// Makes a [`DecoderBlock`].
#[derive(Config, Debug, PartialEq)]
pub struct DecoderBlockConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Query heads of both attentions; they divide `d_model`.
    pub heads: usize,
    /// Width inside the feed-forward layer.
    pub d_ff: usize,
    /// Key/value heads of both attentions if fewer than query heads; `heads` is a multiple of them.
    pub kv_heads: Option<usize>,
    /// Probability with which a number of a branch's output is dropped in training.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Where the norms stand.
    #[config(default = "Norm::Pre")]
    pub norm: Norm,
    /// The mechanism of the self-attention.
    #[config(default = "AttentionConfig::shaw()")]
    pub attention: AttentionConfig,
    /// The mechanism of the attention to the memory.
    #[config(default = "AttentionConfig::kernelized()")]
    pub cross_attention: AttentionConfig,
}

impl DecoderBlockConfig {
    /// Makes the block with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, heads that do not divide, a dropout outside `[0, 1)`, and what a mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<DecoderBlock> {
        let dropout = dropout("DecoderBlockConfig", self.d_ff, self.dropout)?;
        let attention = |mechanism: &AttentionConfig| {
            MultiHeadAttentionConfig::new(self.d_model, self.heads)
                .with_kv_heads(self.kv_heads)
                .with_attention(mechanism.clone())
                .init(device)
        };
        Ok(DecoderBlock {
            attention: attention(&self.attention)?,
            attention_norm: layer_norm(self.d_model, device),
            cross_attention: attention(&self.cross_attention)?,
            cross_attention_norm: layer_norm(self.d_model, device),
            feed_forward: FeedForward::new(self.d_model, self.d_ff, device),
            feed_forward_norm: layer_norm(self.d_model, device),
            dropout,
            norm: self.norm,
        })
    }
}

/// Causal self-attention, cross-attention to a memory (an encoder's output), and a feed-forward layer, each as a
/// residual branch with a norm:
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use longspan::attention::{AttentionMask, AttentionState};
/// use longspan::models::DecoderBlockConfig;
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = DecoderBlockConfig::new(32, 4, 64).init(&device)?;
/// let random = |tokens| Tensor::<3>::random([2, tokens, 32], Distribution::Normal(0.0, 1.0), &device);
/// let (x, memory) = (random(5), random(7));
/// let mask = AttentionMask::bidirectional().with_lengths(&[7, 4]);
/// let whole = block.forward(x.clone(), memory.clone(), &mask)?;
///
/// // Token by token: the memory is read once.
/// let memory = block.cross_attention.remember(memory, &mask)?;
/// let mut state = AttentionState::default();
/// for t in 0..5 {
///     let row = block.step(x.clone().narrow(1, t, 1), t, &mut state, &memory)?;
///     let difference = (row - whole.clone().narrow(1, t, 1)).abs().max().into_scalar::<f32>();
///     assert!(difference < 1e-4);
/// }
/// # Ok(())
/// # }
/// ```
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
    /// The block over whole sequences: causal self-attention, then attention to `memory` under `memory_mask`.
    ///
    /// # Shapes
    /// - `x` and output: `[batch, queries, d_model]`
    /// - `memory`: `[batch, keys, d_model]`
    ///
    /// # Errors
    /// Wrong widths, different batch sizes, or a mask of the wrong size.
    pub fn forward(&self, x: Tensor<3>, memory: Tensor<3>, memory_mask: &AttentionMask) -> Result<Tensor<3>> {
        let causal = AttentionMask::causal();
        let x = residual(x, &self.attention_norm, self.norm, &self.dropout, |x, after| {
            self.attention.self_attention_with(x, &causal, after)
        })?;
        let x = residual(x, &self.cross_attention_norm, self.norm, &self.dropout, |x, after| {
            self.cross_attention.cross_attention_with(x, memory, memory_mask, after)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x, after| {
            Ok(self.feed_forward.forward_with(x, after))
        })
    }

    /// One token: takes it into `state`, which before the first token is the default, and gives its row of
    /// [`DecoderBlock::forward`]. `position` is its place in the sequence, from 0; `memory` is what
    /// [`MultiHeadAttention::remember`] of the field [`cross_attention`](DecoderBlock::cross_attention) gave.
    ///
    /// # Shapes
    /// `x` and output: `[batch, 1, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state or memory of another batch or mechanism.
    pub fn step(
        &self,
        x: Tensor<3>,
        position: usize,
        state: &mut AttentionState,
        memory: &MemoryState,
    ) -> Result<Tensor<3>> {
        let x = residual(x, &self.attention_norm, self.norm, &self.dropout, |x, after| {
            self.attention.step_with(x, state, after)
        })?;
        let x = residual(x, &self.cross_attention_norm, self.norm, &self.dropout, |x, after| {
            self.cross_attention.recall_with(x, position, memory, after)
        })?;
        residual(x, &self.feed_forward_norm, self.norm, &self.dropout, |x, after| {
            Ok(self.feed_forward.forward_with(x, after))
        })
    }
}
