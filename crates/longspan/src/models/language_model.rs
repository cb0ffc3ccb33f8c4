//! The language model: a causal stack of blocks that predicts the next token, of texts of any length.

use std::sync::Arc;

use burn::config::Config;
use burn::module::{Module, Param, ParamId};
use burn::nn::{Dropout, Embedding, Linear};
use burn::tensor::{Device, Int, Tensor};

use super::block::{BlockConfig, EncoderBlock};
use super::positions::Positions;
use super::stack;
use crate::attention::{AttentionConfig, AttentionMask, AttentionState, StoredState, index_tensor};
use crate::backend::Peers;
use crate::error::{Result, argument};
use crate::layers::{
    Activation, After, CrossEntropyLoss, Targets, TokenNorm, apply, check_types, cross_entropy, fresh,
};

const NAME: &str = "language model";

/// Makes a [`LanguageModel`].
#[derive(Config, Debug, PartialEq)]
pub struct LanguageModelConfig {
    /// Number of tokens.
    pub vocab: usize,
    /// Its blocks, but for their mechanisms.
    #[config(default = "BlockConfig::new()")]
    pub block: BlockConfig,
    /// Blocks.
    #[config(default = 4)]
    pub layers: usize,
    /// The mechanisms of the blocks, from the first block on; where there are more blocks the list begins anew. Three
    /// `shaw` and one `softmax` are three blocks of the one to each of the other.
    #[config(default = "vec![AttentionConfig::shaw()]")]
    pub attention: Vec<AttentionConfig>,
    /// Absolute positions. A causal mask alone lets a model tell the order of tokens, so none by default.
    #[config(default = "Positions::None")]
    pub positions: Positions,
    /// Whether the embedding is the output layer as well.
    #[config(default = true)]
    pub tied: bool,
}

/// A decoder-only transformer. Over a text of any length it runs in segments, with the states of the blocks carried over
/// each cut, and after any of them token by token:
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use longspan::models::{BlockConfig, LanguageModelConfig, LanguageState};
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_dropout(0.0);
/// let model = LanguageModelConfig::new(10).with_block(block).init(&device)?;
/// let text = Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5, 6, 7, 8]], &device);
/// let whole = model.forward(text.clone())?;
///
/// let mut state = LanguageState::default();
/// model.advance(text.clone().narrow(1, 0, 5), &mut state)?;    // five tokens at once
/// model.step(&[6], &mut state)?;                               // then one
/// let last = model.prefill(text.narrow(1, 6, 2), &mut state)?; // then two, of which the last one's logits matter
/// let difference = (last - whole.narrow(1, 7, 1).squeeze_dim(1)).abs().max().into_scalar::<f32>();
/// assert!(difference < 1e-4);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct LanguageModel {
    /// `[vocab, d_model]`.
    pub embedding: Embedding,
    /// The blocks.
    pub blocks: Vec<EncoderBlock>,
    /// The norm after pre-norm blocks.
    pub norm: Option<TokenNorm>,
    /// `[d_model, vocab]`; none where the embedding is tied.
    pub output: Option<Linear>,
    dropout: Dropout,
    #[module(skip)]
    pub(super) positions: Positions,
    d_model: usize,
}

impl LanguageModelConfig {
    /// Makes the model with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, sizes that do not divide, no mechanism, and what a mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<LanguageModel> {
        const NAME: &str = "LanguageModelConfig";
        let (block, d_model) = (&self.block, self.block.d_model);
        stack::check(NAME, block, &[("vocab", self.vocab)])?;
        // Tied, it is read times √d, so that what blocks get has variance 1 and logits begin near 0.
        let std = if self.tied { (d_model as f64).powf(-0.5) } else { 1.0 };
        Ok(LanguageModel {
            embedding: stack::embedding(self.vocab, d_model, std, device),
            blocks: stack::blocks(NAME, block, &self.attention, self.layers, device)?,
            norm: stack::last_norm(block, device)?,
            output: (!self.tied).then(|| fresh(d_model, self.vocab, device)),
            dropout: block.dropout()?,
            positions: self.positions,
            d_model,
        })
    }
}

impl LanguageModel {
    /// Logits of every next token, of texts that begin with `tokens`.
    ///
    /// # Shapes
    /// `tokens`: `[batch, tokens]`; output: `[batch, tokens, vocab]`, where position `t` predicts what follows
    /// `tokens[.., ..=t]`.
    ///
    /// # Errors
    /// What a mechanism refuses, such as more tokens than its table has rows for.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        self.logits(self.whole(tokens)?)
    }

    /// Some rows of what [`forward`](Self::forward) gives: of large vocabularies most of its time and memory are logits.
    ///
    /// # Shapes
    /// `tokens`: `[batch, tokens]`; `rows`: numbers below `batch · tokens`, text after text; output: `[rows, vocab]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and rows beyond the tokens.
    pub fn forward_at(&self, tokens: Tensor<2, Int>, rows: &[usize]) -> Result<Tensor<2>> {
        let count = tokens.shape().num_elements();
        let beyond = rows.iter().find(|&&row| row >= count);
        let expected = || format!("rows below {count}");
        argument(beyond.is_none(), NAME, "rows", expected, || beyond.map_or(String::new(), usize::to_string))?;
        let x = self.whole(tokens)?;
        if rows.is_empty() {
            return Ok(Tensor::zeros([0, self.vocab()], (&x.device(), x.dtype())));
        }
        let x = x.reshape([count, self.d_model]);
        let x = x.select(0, index_tensor(rows, &self.embedding.weight.device())).unsqueeze_dim::<3>(1);
        Ok(self.logits(x)?.squeeze_dim(1))
    }

    /// The loss of texts that begin with `tokens`: [`cross_entropy`] of the logits that [`forward`](Self::forward) gives,
    /// which are never held whole.
    ///
    /// # Shapes
    /// `next`: for each token, text after text, the one that comes after it, or none: [`Targets`].
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`cross_entropy`].
    pub fn loss(&self, tokens: Tensor<2, Int>, next: impl Into<Targets>, smoothing: f64) -> Result<CrossEntropyLoss> {
        cross_entropy(self.whole(tokens)?, &self.output(), next, smoothing)
    }

    /// The loss of tokens that follow those of `state`, which then takes them in. Shapes as in [`loss`](Self::loss). A
    /// gradient reaches these tokens, but not those before: what is learned of a long text is truncated at the cuts.
    ///
    /// # Errors
    /// As [`loss`](Self::loss), and a state of another batch or model. The state is then as it was.
    pub fn loss_from(
        &self,
        tokens: Tensor<2, Int>,
        next: impl Into<Targets>,
        smoothing: f64,
        state: &mut LanguageState,
    ) -> Result<CrossEntropyLoss> {
        self.after(tokens, state, None, |x| cross_entropy(x, &self.output(), next, smoothing))
    }

    /// This process's part of [`loss_from`](Self::loss_from): `peers` compute the others, each that of a stretch of the tokens, in
    /// the order of ranks; the last is a 24th longer. All give the same tokens and the same state. The sums over all of them are the
    /// loss and its gradient; the state takes all tokens in.
    ///
    /// A process sends each other one its blocks' states in the forward and as many numbers again in the backward, however many tokens
    /// there are. Kernelized attention, also with Shaw's and Fourier's positions, and short convolutions, on the CPU backend.
    ///
    /// # Errors
    /// As [`loss_from`](Self::loss_from), and a mechanism whose states have no sum with a gradient.
    pub fn loss_over(
        &self,
        tokens: Tensor<2, Int>,
        next: &[Option<u32>],
        smoothing: f64,
        state: &mut LanguageState,
        peers: &Arc<dyn Peers>,
    ) -> Result<CrossEntropyLoss> {
        let [batch, count] = tokens.dims();
        let expected = || format!("{} tokens", batch * count);
        argument(next.len() == batch * count, NAME, "next", expected, || next.len().to_string())?;
        let enough = count >= peers.count();
        let expected = || format!("one or more for each of {} processes", peers.count());
        argument(enough, NAME, "tokens", expected, || count.to_string())?;
        // The last stretch hands no state on, which spares its backward a pass over its keys: it is longer by a 24th.
        let (rank, ranks) = (peers.rank(), peers.count());
        let alike = count - count / (24 * ranks);
        let from = alike * rank / ranks;
        let to = if rank + 1 == ranks { count } else { alike * (rank + 1) / ranks };
        let next: Vec<_> = next.chunks(count.max(1)).flat_map(|text| &text[from..to]).copied().collect();
        let tokens = tokens.narrow(1, from, to - from);
        let stretch = Some((peers, from, count));
        self.after(tokens, state, stretch, |x| cross_entropy(x, &self.output(), next, smoothing))
    }

    /// Takes tokens into `state`, all at once, and gives their logits: the rows of [`forward`](Self::forward) that stand
    /// after those of the state. Time and memory do not depend on how many tokens came before where the state does not grow, as
    /// [`AttentionState`] says.
    ///
    /// # Shapes
    /// As in [`forward`](Self::forward).
    ///
    /// # Errors
    /// A state of another batch or model, and what a mechanism refuses.
    pub fn advance(&self, tokens: Tensor<2, Int>, state: &mut LanguageState) -> Result<Tensor<3>> {
        self.after(tokens, state, None, |x| self.logits(x))
    }

    /// Takes tokens into `state`, all at once, and gives the logits of what follows the last, `[batch, vocab]`.
    ///
    /// # Errors
    /// As [`advance`](Self::advance), and no tokens at all.
    pub fn prefill(&self, tokens: Tensor<2, Int>, state: &mut LanguageState) -> Result<Tensor<2>> {
        let count = tokens.dims()[1];
        argument(count > 0, NAME, "tokens", || "at least one".into(), || "none".into())?;
        self.after(tokens, state, None, |x| Ok(self.logits(x.narrow(1, count - 1, 1))?.squeeze_dim(1)))
    }

    /// Takes one token of each text into `state` and gives the logits of the next, `[batch, vocab]`. Memory and time as in
    /// [`advance`](Self::advance).
    ///
    /// # Errors
    /// A token outside the vocabulary, a state of another batch or model. The state is then as it was.
    pub fn step(&self, tokens: &[usize], state: &mut LanguageState) -> Result<Tensor<2>> {
        let vocab = self.vocab();
        let expected = || format!("tokens below {vocab}");
        argument(tokens.iter().all(|&t| t < vocab), NAME, "tokens", expected, || format!("{tokens:?}"))?;
        let some = !tokens.is_empty();
        let tokens = index_tensor(tokens, &self.embedding.weight.device()).unsqueeze_dim::<2>(1);
        let states = state.of(self)?;
        let mut x = self.embed(tokens, states.position)?;
        // All blocks take the token, or none.
        check_types(NAME, self)?;
        for (block, layer) in self.blocks.iter().zip(&states.layers) {
            block.attention.check_step(&x, layer)?;
        }
        for (block, layer) in self.blocks.iter().zip(&mut states.layers) {
            x = block.step_in(x, layer)?;
        }
        states.position += usize::from(some);
        Ok(self.logits(stack::end(self.norm.as_ref(), x)?)?.squeeze_dim(1))
    }

    /// Number of tokens.
    pub fn vocab(&self) -> usize {
        self.embedding.weight.dims()[0]
    }

    /// Whether a state grows with every token, since a block attends to all keys and values.
    pub fn keeps_past(&self) -> bool {
        self.blocks.iter().any(|block| block.attention.attention.keeps_past())
    }

    /// The state of each block as numbers that can be saved. Nothing is rounded.
    ///
    /// # Errors
    /// A device that gives no numbers back, a state of another model.
    pub fn store(&self, state: &LanguageState) -> Result<Vec<StoredState>> {
        let mut state = state.clone();
        let layers = &state.of(self)?.layers;
        self.blocks.iter().zip(layers).map(|(block, layer)| block.attention.attention.store(layer)).collect()
    }

    /// Rebuilds a state after `position` tokens from what [`LanguageModel::store`] returned, also in another process.
    ///
    /// # Errors
    /// Numbers of another model.
    pub fn restore(&self, stored: &[StoredState], position: usize) -> Result<LanguageState> {
        let (device, blocks) = (self.embedding.weight.device(), self.blocks.len());
        let expected = || format!("those of {blocks} blocks");
        argument(stored.len() == blocks, NAME, "states", expected, || stored.len().to_string())?;
        // Numbers of more are not whole ones any more.
        let expected = || "fewer than 2⁵³ tokens".into();
        argument(position < 1 << 53, NAME, "position", expected, || position.to_string())?;
        let layers = self.blocks.iter().zip(stored);
        let layers =
            layers.map(|(block, one)| block.attention.attention.restore(one, &device)).collect::<Result<_>>()?;
        Ok(LanguageState { layers, position, uneven: false })
    }

    /// What the last layer makes of the blocks' rows.
    fn logits(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        apply(&self.output(), x, Activation::Identity, After::default())
    }

    /// What the blocks make of whole texts.
    fn whole(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        let mut x = self.embed(tokens, 0)?;
        for block in &self.blocks {
            x = block.forward(x, &AttentionMask::causal())?;
        }
        stack::end(self.norm.as_ref(), x)
    }

    /// What `end` makes of the blocks' rows of tokens after those of a state; or of a stretch of them, from one on of so many, of which
    /// peers hold the others.
    fn after<R>(
        &self,
        tokens: Tensor<2, Int>,
        state: &mut LanguageState,
        stretch: Option<(&Arc<dyn Peers>, usize, usize)>,
        end: impl FnOnce(Tensor<3>) -> Result<R>,
    ) -> Result<R> {
        let (first, count) = stretch.map_or((0, tokens.dims()[1]), |(_, first, count)| (first, count));
        // All blocks take the tokens, or after an error none.
        let mut next = state.clone();
        let states = next.of(self)?;
        let mut x = self.embed(tokens, states.position + first)?;
        for (block, layer) in self.blocks.iter().zip(&mut states.layers) {
            x = block.advance_between(x, layer, stretch.map(|(peers, ..)| peers))?;
        }
        states.position += count;
        let out = end(stack::end(self.norm.as_ref(), x)?)?;
        *state = next;
        Ok(out)
    }

    /// Embeddings, `[batch, tokens, d_model]`, of tokens from position `first` on.
    fn embed(&self, tokens: Tensor<2, Int>, first: usize) -> Result<Tensor<3>> {
        let place = (self.positions, first);
        stack::embed(&self.embedding, tokens, self.embedding_scale(), place, &self.dropout)
    }

    /// What embeddings are multiplied by.
    pub(super) fn embedding_scale(&self) -> f64 {
        if self.output.is_none() { (self.d_model as f64).sqrt() } else { 1.0 }
    }

    /// The last layer: its own, or the embedding the other way round.
    pub(super) fn output(&self) -> Linear {
        self.output.clone().unwrap_or_else(|| Linear {
            weight: Param::initialized(ParamId::new(), self.embedding.weight.val().transpose()),
            bias: None,
        })
    }
}

/// A [`LanguageModel`] in the middle of its texts, a plain value: clone it to try two continuations. The default is the
/// state before the first token.
#[derive(Debug, Clone, Default)]
pub struct LanguageState {
    pub(super) layers: Vec<AttentionState>,
    pub(super) position: usize,
    /// Whether some texts are shorter: the position is that of the longest.
    pub(super) uneven: bool,
}

impl LanguageState {
    /// Tokens taken in so far, by the longest of its texts.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The states of the batch entries `indices`, in that order; an entry may come several times.
    ///
    /// # Errors
    /// An index beyond the batch.
    pub fn select(&self, indices: &[usize]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.select(indices)).collect::<Result<_>>()?;
        Ok(Self { layers, ..*self })
    }

    /// The states of several batches as those of one, in that order: of prompts of different lengths, too, for models without absolute
    /// positions whose states do not grow.
    ///
    /// # Errors
    /// States of different models, or of different numbers of keys and values.
    pub fn join(states: &[&Self]) -> Result<Self> {
        let Some(first) = states.first() else { return Ok(Self::default()) };
        let (blocks, position) = (first.layers.len(), states.iter().map(|state| state.position).max().unwrap_or(0));
        let unlike = states.iter().find(|state| state.layers.len() != blocks);
        let got = || unlike.map_or(String::new(), |state| format!("one of {}", state.layers.len()));
        argument(unlike.is_none(), NAME, "states", || format!("states of {blocks} blocks"), got)?;
        let layer = |n: usize| AttentionState::join(&states.iter().map(|state| &state.layers[n]).collect::<Vec<_>>());
        let layers = (0..blocks).map(layer).collect::<Result<_>>()?;
        let uneven = states.iter().any(|state| state.uneven || state.position != position);
        Ok(Self { layers, position, uneven })
    }

    /// With a state for each block of `model`.
    pub(super) fn of(&mut self, model: &LanguageModel) -> Result<&mut Self> {
        let even = !self.uneven || model.positions == Positions::None;
        let expected = || "texts of equally many tokens, which absolute positions count".into();
        argument(even, NAME, "state", expected, || "one of different numbers".into())?;
        let (blocks, layers) = (model.blocks.len(), self.layers.len());
        if layers == 0 && self.position == 0 {
            self.layers = vec![AttentionState::default(); blocks];
        } else {
            argument(layers == blocks, NAME, "state", || format!("{blocks} layers"), || layers.to_string())?;
        }
        Ok(self)
    }
}
