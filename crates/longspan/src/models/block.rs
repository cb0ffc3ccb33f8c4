//! The blocks of an encoder and a decoder: attention and a feed-forward layer, each as a residual branch with a norm.
//!
//! Pre-norm: `x + f(norm(x))`. Post-norm: `norm(x + f(x))`.

use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer};
use burn::tensor::{Device, Tensor};

use super::stack::probability;
use crate::attention::{
    AttentionConfig, AttentionMask, AttentionState, MemoryState, MultiHeadAttention, MultiHeadAttentionConfig,
};
use crate::backend::Peers;
use crate::error::{Result, config};
use crate::layers::{
    Activation, Around, FeedForward, FeedForwardConfig, NormKind, TokenNorm, TokenNormConfig, check_types,
};

/// Where the norm of a residual branch stands.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Norm {
    /// Before the branch; such a model needs one more norm after its last block.
    Pre,
    /// After the sum, as in the first transformer.
    Post,
}

/// How a block's parts become residual branches.
#[derive(Module, Debug)]
pub struct Branches {
    /// Where the norms stand.
    #[module(skip)]
    pub(super) place: Norm,
    dropout: Dropout,
    #[module(skip)]
    recompute: bool,
}

impl Branches {
    /// `x + part(norm(x))` or `norm(x + part(x))`.
    fn run(
        &self,
        x: Tensor<3>,
        norm: &TokenNorm,
        part: impl FnOnce(Tensor<3>, Around<'_>) -> Result<Tensor<3>>,
    ) -> Result<Tensor<3>> {
        let (place, recompute, dropout) = (self.place, self.recompute, probability(&self.dropout));
        let before = (place == Norm::Pre).then_some(norm);
        let y = part(x, Around { norm: before, dropout, residual: true, recompute })?;
        if place == Norm::Post { norm.forward(y) } else { Ok(y) }
    }
}

/// Makes an [`EncoderBlock`] or a [`DecoderBlock`]: all but their mechanisms.
#[derive(Config, Debug, PartialEq)]
pub struct BlockConfig {
    /// Width of a token between layers.
    #[config(default = 128)]
    pub d_model: usize,
    /// Query heads; they divide `d_model`.
    #[config(default = 4)]
    pub heads: usize,
    /// Key/value heads if fewer than query heads; `heads` is a multiple of them.
    pub kv_heads: Option<usize>,
    /// Width inside the feed-forward layer.
    #[config(default = 512)]
    pub d_ff: usize,
    /// Probability with which a number of a branch's output, or of a model's embeddings, is dropped in training.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Where the norms stand.
    #[config(default = "Norm::Pre")]
    pub norm: Norm,
    /// Which norm.
    #[config(default = "NormKind::Layer")]
    pub norm_kind: NormKind,
    /// Between the two layers of the feed-forward part.
    #[config(default = "Activation::Relu")]
    pub activation: Activation,
    /// Whether a second product multiplies the activations; with SiLU this is SwiGLU.
    #[config(default = false)]
    pub gated: bool,
    /// Whether heads' outputs go through a [`GatedRmsNorm`](crate::layers::GatedRmsNorm) before the attention's output layer.
    #[config(default = false)]
    pub gated_attention: bool,
    /// Whether the backward forms again what it needs beside each part's input: a third more time for the memory of most of a
    /// training step. On the CPU backend in `f32`; elsewhere Burn's gradient checkpointing does.
    #[config(default = false)]
    pub recompute: bool,
    /// What draws the weights of the linear layers, queries, keys and values each by itself, with biases of 0. By default Xavier's uniform
    /// initializer draws all of a layer.
    pub initializer: Option<Initializer>,
}

impl BlockConfig {
    /// Makes a block of an encoder, or of a decoder without a memory, with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, heads that do not divide, a dropout outside `[0, 1)`, and what the mechanism refuses.
    pub fn encoder(&self, attention: &AttentionConfig, device: &Device) -> Result<EncoderBlock> {
        Ok(EncoderBlock {
            branches: self.branches()?,
            attention: self.attention(attention, device)?,
            attention_norm: self.token_norm(device)?,
            feed_forward: self.feed_forward(device)?,
            feed_forward_norm: self.token_norm(device)?,
        })
    }

    /// Makes a block of a decoder, with the mechanisms of its self-attention and of the attention to the memory.
    ///
    /// # Errors
    /// As [`encoder`](Self::encoder).
    pub fn decoder(
        &self,
        attention: &AttentionConfig,
        cross_attention: &AttentionConfig,
        device: &Device,
    ) -> Result<DecoderBlock> {
        Ok(DecoderBlock {
            branches: self.branches()?,
            attention: self.attention(attention, device)?,
            attention_norm: self.token_norm(device)?,
            cross_attention: self.attention(cross_attention, device)?,
            cross_attention_norm: self.token_norm(device)?,
            feed_forward: self.feed_forward(device)?,
            feed_forward_norm: self.token_norm(device)?,
        })
    }

    /// The dropout, checked, for blocks and models.
    pub(super) fn dropout(&self) -> Result<Dropout> {
        let probability = self.dropout;
        config((0.0..1.0).contains(&probability), "BlockConfig", "dropout", "a number in [0, 1)", probability)?;
        Ok(DropoutConfig::new(probability).init())
    }

    fn branches(&self) -> Result<Branches> {
        Ok(Branches { place: self.norm, dropout: self.dropout()?, recompute: self.recompute })
    }

    pub(super) fn token_norm(&self, device: &Device) -> Result<TokenNorm> {
        TokenNormConfig::new(self.d_model).with_kind(self.norm_kind).init(device)
    }

    fn attention(&self, mechanism: &AttentionConfig, device: &Device) -> Result<MultiHeadAttention> {
        MultiHeadAttentionConfig::new(self.d_model, self.heads)
            .with_kv_heads(self.kv_heads)
            .with_attention(mechanism.clone())
            .with_gated(self.gated_attention)
            .with_initializer(self.initializer.clone())
            .init(device)
    }

    fn feed_forward(&self, device: &Device) -> Result<FeedForward> {
        FeedForwardConfig::new(self.d_model, self.d_ff)
            .with_activation(self.activation)
            .with_gated(self.gated)
            .with_initializer(self.initializer.clone())
            .init(device)
    }
}

/// Self-attention and a feed-forward layer, each as a residual branch with a norm. Under a bidirectional mask it is a
/// block of an encoder, under a causal one a block of a decoder-only model, which can also step token by token:
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use longspan::attention::{AttentionConfig, AttentionMask, AttentionState};
/// use longspan::models::BlockConfig;
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = BlockConfig::new().with_d_model(32).with_d_ff(64).encoder(&AttentionConfig::shaw(), &device)?;
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
    pub attention_norm: TokenNorm,
    /// The feed-forward layer.
    pub feed_forward: FeedForward,
    /// The norm of the feed-forward layer's branch.
    pub feed_forward_norm: TokenNorm,
    pub(super) branches: Branches,
}

impl EncoderBlock {
    /// The attention that `attend` runs, then the feed-forward layer.
    fn run(&self, x: Tensor<3>, attend: impl FnOnce(Tensor<3>, Around<'_>) -> Result<Tensor<3>>) -> Result<Tensor<3>> {
        let x = self.branches.run(x, &self.attention_norm, attend)?;
        self.branches.run(x, &self.feed_forward_norm, |x, around| self.feed_forward.forward_in(x, around))
    }

    /// The block over whole sequences, in the direction that `mask` says.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn forward(&self, x: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.run(x, |x, around| self.attention.self_attention_in(x, mask, around))
    }

    /// [`EncoderBlock::forward`] at positions that are given, as in [`MultiHeadAttention::self_attention_at`].
    ///
    /// # Shapes
    /// `positions`: `[batch, tokens, axes]`.
    ///
    /// # Errors
    /// As [`EncoderBlock::forward`], and positions of another shape or number type.
    pub fn forward_at(&self, x: Tensor<3>, positions: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.run(x, |x, around| self.attention.self_attention_at_in(x, positions, mask, around))
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
        check_types("block step", self)?;
        self.step_in(x, state)
    }

    /// Of a model whose number types were checked.
    pub(super) fn step_in(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        self.run(x, |x, around| self.attention.step_in(x, state, around))
    }

    /// Several tokens after those of `state`: what [`EncoderBlock::step`] gives one after the other, in the parallel form. A
    /// gradient reaches these tokens, but not those before.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state of another batch or mechanism.
    pub fn advance(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        check_types("block", self)?;
        self.advance_between(x, state, None)
    }

    /// [`advance`](Self::advance) where others may hold stretches of the same sequences.
    pub(super) fn advance_between(
        &self,
        x: Tensor<3>,
        state: &mut AttentionState,
        peers: Option<&Arc<dyn Peers>>,
    ) -> Result<Tensor<3>> {
        self.run(x, |x, around| self.attention.advance_in(x, state, peers, around))
    }
}

/// Causal self-attention, cross-attention to a memory (an encoder's output), and a feed-forward layer, each as a
/// residual branch with a norm:
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use longspan::attention::{AttentionConfig, AttentionMask, AttentionState};
/// use longspan::models::BlockConfig;
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let config = BlockConfig::new().with_d_model(32).with_d_ff(64);
/// let block = config.decoder(&AttentionConfig::shaw(), &AttentionConfig::kernelized(), &device)?;
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
    pub attention_norm: TokenNorm,
    /// Bidirectional attention to the memory.
    pub cross_attention: MultiHeadAttention,
    /// The norm of the cross-attention's branch.
    pub cross_attention_norm: TokenNorm,
    /// The feed-forward layer.
    pub feed_forward: FeedForward,
    /// The norm of the feed-forward layer's branch.
    pub feed_forward_norm: TokenNorm,
    pub(super) branches: Branches,
}

impl DecoderBlock {
    /// The attentions that `attend` and `recall` run, then the feed-forward layer.
    fn run(
        &self,
        x: Tensor<3>,
        attend: impl FnOnce(Tensor<3>, Around<'_>) -> Result<Tensor<3>>,
        recall: impl FnOnce(Tensor<3>, Around<'_>) -> Result<Tensor<3>>,
    ) -> Result<Tensor<3>> {
        let x = self.branches.run(x, &self.attention_norm, attend)?;
        let x = self.branches.run(x, &self.cross_attention_norm, recall)?;
        self.branches.run(x, &self.feed_forward_norm, |x, around| self.feed_forward.forward_in(x, around))
    }

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
        self.run(
            x,
            |x, around| self.attention.self_attention_in(x, &causal, around),
            |x, around| self.cross_attention.cross_attention_in(x, memory, memory_mask, around),
        )
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
        check_types("block step", self)?;
        self.step_in(x, position, state, memory)
    }

    /// Of a model whose number types were checked.
    pub(super) fn step_in(
        &self,
        x: Tensor<3>,
        position: usize,
        state: &mut AttentionState,
        memory: &MemoryState,
    ) -> Result<Tensor<3>> {
        self.run(
            x,
            |x, around| self.attention.step_in(x, state, around),
            |x, around| self.cross_attention.recall_in(x, position, memory, around),
        )
    }
}
