//! The classifier: a stack of blocks over a whole sequence, one row of it all, and scores of classes.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::block::{EncoderBlock, EncoderBlockConfig, Norm};
use super::positions::Positions;
use crate::attention::{AttentionConfig, AttentionMask};
use crate::error::{Result, argument, config};
use crate::layers::{
    Activation, After, CrossEntropyLoss, NormKind, TokenNorm, TokenNormConfig, apply, cross_entropy, dropout,
};

/// How the rows of a sequence become one.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The last one. Under a causal mask it has seen all others.
    Last,
}

/// Makes a [`Classifier`].
#[derive(Config, Debug, PartialEq)]
pub struct ClassifierConfig {
    /// Number of tokens.
    pub vocab: usize,
    /// Number of classes, or of numbers to foretell.
    pub outputs: usize,
    /// Width of a token between layers.
    #[config(default = 128)]
    pub d_model: usize,
    /// Attention heads; they divide `d_model`.
    #[config(default = 4)]
    pub heads: usize,
    /// Key/value heads if fewer than `heads`.
    pub kv_heads: Option<usize>,
    /// Blocks.
    #[config(default = 2)]
    pub layers: usize,
    /// Width inside the feed-forward layers.
    #[config(default = 512)]
    pub d_ff: usize,
    /// Probability with which a number is dropped in training.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// The mechanisms of the blocks, from the first block on; where there are more blocks the list begins anew.
    #[config(default = "vec![AttentionConfig::shaw()]")]
    pub attention: Vec<AttentionConfig>,
    /// Whether a token sees only those before it.
    #[config(default = false)]
    pub causal: bool,
    /// How the rows of a sequence become one.
    #[config(default = "Pooling::Mean")]
    pub pooling: Pooling,
    /// Where the norms stand.
    #[config(default = "Norm::Pre")]
    pub norm: Norm,
    /// Which norm.
    #[config(default = "NormKind::Layer")]
    pub norm_kind: NormKind,
    /// Between the two layers of the feed-forward parts.
    #[config(default = "Activation::Relu")]
    pub activation: Activation,
    /// Whether a second product multiplies the activations; with SiLU this is SwiGLU.
    #[config(default = false)]
    pub gated: bool,
    /// Absolute positions.
    #[config(default = "Positions::None")]
    pub positions: Positions,
}

/// A transformer that tells the class of a sequence, or numbers about it:
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use longspan::models::ClassifierConfig;
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let model = ClassifierConfig::new(10, 3).with_d_model(16).with_d_ff(32).init(&device)?;
/// // Two sequences of 4 and 2 tokens, padded with 0.
/// let tokens = Tensor::<2, Int>::from_data([[5, 6, 7, 8], [9, 9, 0, 0]], &device);
/// assert_eq!(model.forward(tokens, &[4, 2])?.dims(), [2, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Classifier {
    /// `[vocab, d_model]`.
    pub embedding: Embedding,
    /// The blocks.
    pub blocks: Vec<EncoderBlock>,
    /// The norm after pre-norm blocks.
    pub norm: Option<TokenNorm>,
    /// `[d_model, outputs]`.
    pub output: Linear,
    dropout: Dropout,
    #[module(skip)]
    positions: Positions,
    #[module(skip)]
    pooling: Pooling,
    #[module(skip)]
    causal: bool,
    d_model: usize,
}

impl ClassifierConfig {
    /// Makes the model with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, sizes that do not divide, no mechanism, and what a mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<Classifier> {
        const NAME: &str = "ClassifierConfig";
        let sizes = [
            ("vocab", self.vocab),
            ("outputs", self.outputs),
            ("d_model", self.d_model),
            ("heads", self.heads),
            ("d_ff", self.d_ff),
        ];
        for (field, size) in sizes {
            config(size > 0, NAME, field, "at least 1", size)?;
        }
        config((0.0..1.0).contains(&self.dropout), NAME, "dropout", "a number in [0, 1)", self.dropout)?;
        config(!self.attention.is_empty(), NAME, "attention", "at least one mechanism", "none")?;
        let block = |attention: &AttentionConfig| {
            EncoderBlockConfig::new(self.d_model, self.heads, self.d_ff)
                .with_kv_heads(self.kv_heads)
                .with_dropout(self.dropout)
                .with_norm(self.norm)
                .with_norm_kind(self.norm_kind)
                .with_activation(self.activation)
                .with_gated(self.gated)
                .with_attention(attention.clone())
                .init(device)
        };
        let norm = TokenNormConfig::new(self.d_model).with_kind(self.norm_kind);
        Ok(Classifier {
            embedding: EmbeddingConfig::new(self.vocab, self.d_model)
                .with_initializer(Initializer::Normal { mean: 0.0, std: 1.0 })
                .init(device),
            blocks: self.attention.iter().cycle().take(self.layers).map(block).collect::<Result<_>>()?,
            norm: (self.norm == Norm::Pre).then(|| norm.init(device)).transpose()?,
            output: LinearConfig::new(self.d_model, self.outputs)
                .with_initializer(Initializer::XavierUniform { gain: 1.0 })
                .init(device),
            dropout: DropoutConfig::new(self.dropout).init(),
            positions: self.positions,
            pooling: self.pooling,
            causal: self.causal,
            d_model: self.d_model,
        })
    }
}

impl Classifier {
    /// Logits of the classes, or the numbers.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, tokens]`; what stands beyond `lengths[b]` does not matter but must be a token
    /// - `lengths`: one for each sequence, at least 1
    /// - output: `[batch, outputs]`
    ///
    /// # Errors
    /// A length of 0 or beyond `tokens`, not one length for each sequence, and what a mechanism refuses.
    pub fn forward(&self, tokens: Tensor<2, Int>, lengths: &[usize]) -> Result<Tensor<2>> {
        let row = self.pooled(tokens, lengths)?;
        Ok(apply(&self.output, row, Activation::Identity, After::default()).squeeze_dim(1))
    }

    /// The loss of sequences whose classes are known: [`cross_entropy`] of what [`forward`](Self::forward) gives.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`cross_entropy`].
    pub fn loss(
        &self,
        tokens: Tensor<2, Int>,
        lengths: &[usize],
        classes: &[u32],
        smoothing: f64,
    ) -> Result<CrossEntropyLoss> {
        let row = self.pooled(tokens, lengths)?;
        cross_entropy(row, &self.output, classes.iter().copied().map(Some).collect(), smoothing)
    }

    /// One row for each sequence, `[batch, 1, d_model]`.
    fn pooled(&self, tokens: Tensor<2, Int>, lengths: &[usize]) -> Result<Tensor<3>> {
        let [batch, count] = tokens.dims();
        argument(
            lengths.len() == batch && lengths.iter().all(|n| (1..=count).contains(n)),
            "classifier",
            "lengths",
            || format!("{batch} lengths from 1 to {count}"),
            || format!("{lengths:?}"),
        )?;
        let mut mask = if self.causal { AttentionMask::causal() } else { AttentionMask::bidirectional() };
        if lengths.iter().any(|&n| n < count) {
            mask = mask.with_lengths(lengths);
        }
        let mut x = dropout(self.positions.add(self.embedding.forward(tokens), 0), self.dropout.prob);
        let place = (x.device(), x.dtype());
        for block in &self.blocks {
            x = block.forward(x, &mask)?;
        }
        if let Some(norm) = &self.norm {
            x = norm.forward(x);
        }
        let weight = |length: usize, t: usize| match self.pooling {
            Pooling::Mean if t < length => 1.0 / length as f32,
            Pooling::Last if t + 1 == length => 1.0,
            _ => 0.0,
        };
        let weights: Vec<f32> = lengths.iter().flat_map(|&n| (0..count).map(move |t| weight(n, t))).collect();
        let weights = Tensor::<3>::from_data(TensorData::new(weights, [batch, count, 1]), (&place.0, place.1));
        Ok((x * weights).sum_dim(1))
    }
}
