//! The classifier: a stack of blocks over a whole sequence, one row of it all, and scores of classes.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Dropout, Embedding, Linear};
use burn::tensor::{Device, Int, Tensor};

use super::block::{BlockConfig, EncoderBlock};
use super::pooling::{self, Pooling};
use super::positions::Positions;
use super::stack;
use crate::attention::AttentionConfig;
use crate::error::Result;
use crate::layers::{
    Activation, After, CrossEntropyLoss, Targets, TokenNorm, apply, cross_entropy, fresh, squared_error,
};

/// Makes a [`Classifier`].
#[derive(Config, Debug, PartialEq)]
pub struct ClassifierConfig {
    /// Number of tokens.
    pub vocab: usize,
    /// Number of classes, or of numbers to foretell.
    pub outputs: usize,
    /// Its blocks, but for their mechanisms.
    #[config(default = "BlockConfig::new()")]
    pub block: BlockConfig,
    /// Blocks.
    #[config(default = 2)]
    pub layers: usize,
    /// The mechanisms of the blocks, from the first block on; where there are more blocks the list begins anew.
    #[config(default = "vec![AttentionConfig::shaw()]")]
    pub attention: Vec<AttentionConfig>,
    /// Whether a token sees only those before it.
    #[config(default = false)]
    pub causal: bool,
    /// How the rows of a sequence become one.
    #[config(default = "Pooling::Mean")]
    pub pooling: Pooling,
    /// Absolute positions.
    #[config(default = "Positions::None")]
    pub positions: Positions,
}

/// A transformer that tells the class of a sequence, or numbers about it:
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use longspan::models::{BlockConfig, ClassifierConfig};
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = BlockConfig::new().with_d_model(16).with_d_ff(32);
/// let model = ClassifierConfig::new(10, 3).with_block(block).init(&device)?;
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
    /// `w` of [`Pooling::Attention`], `[d_model]`.
    pub pooling_query: Option<Param<Tensor<1>>>,
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
        let (block, d_model) = (&self.block, self.block.d_model);
        stack::check(NAME, block, &[("vocab", self.vocab), ("outputs", self.outputs)])?;
        Ok(Classifier {
            embedding: stack::embedding(self.vocab, d_model, 1.0, device),
            blocks: stack::blocks(NAME, block, &self.attention, self.layers, device)?,
            norm: stack::last_norm(block, device)?,
            pooling_query: self.pooling.query(d_model, device),
            output: fresh(d_model, self.outputs, device),
            dropout: block.dropout()?,
            positions: self.positions,
            pooling: self.pooling,
            causal: self.causal,
            d_model,
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
        Ok(apply(&self.output, row, Activation::Identity, After::default())?.squeeze_dim(1))
    }

    /// The loss of sequences whose classes are known: [`cross_entropy`] of what [`forward`](Self::forward) gives.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`cross_entropy`].
    pub fn loss(
        &self,
        tokens: Tensor<2, Int>,
        lengths: &[usize],
        classes: impl Into<Targets>,
        smoothing: f64,
    ) -> Result<CrossEntropyLoss> {
        let row = self.pooled(tokens, lengths)?;
        cross_entropy(row, &self.output, classes, smoothing)
    }

    /// The loss of sequences about which numbers are known: [`squared_error`] of what [`forward`](Self::forward) gives.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`squared_error`].
    pub fn squared_error(&self, tokens: Tensor<2, Int>, lengths: &[usize], targets: &[f32]) -> Result<Tensor<1>> {
        squared_error(self.forward(tokens, lengths)?, targets)
    }

    /// One row for each sequence, `[batch, 1, d_model]`.
    fn pooled(&self, tokens: Tensor<2, Int>, lengths: &[usize]) -> Result<Tensor<3>> {
        let mask = pooling::mask(lengths, tokens.dims(), self.causal, &self.embedding.weight.device())?;
        let mut x = stack::embed(&self.embedding, tokens, 1.0, (self.positions, 0), &self.dropout)?;
        for block in &self.blocks {
            x = block.forward(x, &mask)?;
        }
        let x = stack::end(self.norm.as_ref(), x)?;
        self.pooling.pool(x, lengths, self.pooling_query.as_ref())
    }
}
