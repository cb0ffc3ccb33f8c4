//! The sequence-to-sequence transformer: a bidirectional encoder, a causal decoder, cross-attention between them.

use std::ops::Range;

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, Embedding, Linear};
use burn::tensor::{Device, Int, Tensor};

use super::block::{BlockConfig, DecoderBlock, EncoderBlock};
use super::positions::Positions;
use super::stack;
use super::stored::{StoredDecoder, in_segments};
use crate::attention::{AttentionConfig, AttentionMask, AttentionState, MemoryState, index_tensor};
use crate::error::{Result, argument};
use crate::layers::{
    Activation, After, CrossEntropyLoss, Targets, TokenNorm, apply, check_types, cross_entropy, fresh,
};

/// Makes a [`Seq2Seq`].
#[derive(Config, Debug, PartialEq)]
pub struct Seq2SeqConfig {
    /// Number of source tokens.
    pub source_vocab: usize,
    /// Number of target tokens.
    pub target_vocab: usize,
    /// Its blocks, but for their mechanisms.
    #[config(default = "BlockConfig::new()")]
    pub block: BlockConfig,
    /// Blocks of the encoder.
    #[config(default = 2)]
    pub encoder_layers: usize,
    /// Blocks of the decoder.
    #[config(default = 2)]
    pub decoder_layers: usize,
    /// Self-attention of encoder and decoder.
    #[config(default = "AttentionConfig::shaw()")]
    pub attention: AttentionConfig,
    /// Attention of the decoder to the encoder's output.
    #[config(default = "AttentionConfig::kernelized()")]
    pub cross_attention: AttentionConfig,
    /// Absolute positions.
    #[config(default = "Positions::None")]
    pub positions: Positions,
}

/// A sequence-to-sequence transformer.
#[derive(Module, Debug)]
pub struct Seq2Seq {
    /// `[source_vocab, d_model]`.
    pub source_embedding: Embedding,
    /// `[target_vocab, d_model]`.
    pub target_embedding: Embedding,
    /// The encoder's blocks.
    pub encoder: Vec<EncoderBlock>,
    /// The norm after a pre-norm encoder.
    pub encoder_norm: Option<TokenNorm>,
    /// The decoder's blocks.
    pub decoder: Vec<DecoderBlock>,
    /// The norm after a pre-norm decoder.
    pub decoder_norm: Option<TokenNorm>,
    /// `[d_model, target_vocab]`.
    pub output: Linear,
    dropout: Dropout,
    #[module(skip)]
    positions: Positions,
    d_model: usize,
}

impl Seq2SeqConfig {
    /// Makes the model with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, sizes that do not divide, and what a mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<Seq2Seq> {
        const NAME: &str = "Seq2SeqConfig";
        let (block, d_model) = (&self.block, self.block.d_model);
        stack::check(NAME, block, &[("source_vocab", self.source_vocab), ("target_vocab", self.target_vocab)])?;
        let decoder = |_| block.decoder(&self.attention, &self.cross_attention, device);
        let attention = std::slice::from_ref(&self.attention);
        let last_norm = || stack::last_norm(block, device);
        Ok(Seq2Seq {
            source_embedding: stack::embedding(self.source_vocab, d_model, 1.0, device),
            target_embedding: stack::embedding(self.target_vocab, d_model, 1.0, device),
            encoder: stack::blocks(NAME, block, attention, self.encoder_layers, device)?,
            encoder_norm: last_norm()?,
            decoder: (0..self.decoder_layers).map(decoder).collect::<Result<_>>()?,
            decoder_norm: last_norm()?,
            output: fresh(d_model, self.target_vocab, device),
            dropout: block.dropout()?,
            positions: self.positions,
            d_model,
        })
    }
}

impl Seq2Seq {
    /// Tokens from which on one source alone is read in segments, in the memory of the encoder's rows, on the CPU backend without autodiff,
    /// under mechanisms whose keys can be given as states: kernelized attention and Shaw's positions.
    pub const LONG_SOURCE: usize = 1 << 16;

    /// Logits of every next target token, for training.
    ///
    /// # Shapes
    /// - `source`: `[batch, source_tokens]`; what stands beyond `source_lengths[b]` does not matter but must be a token
    /// - `source_lengths`: one for each batch entry
    /// - `target`: `[batch, target_tokens]`, beginning with the start token
    /// - output: `[batch, target_tokens, target_vocab]`; position `t` predicts what follows `target[.., ..=t]`
    ///
    /// # Errors
    /// Batch sizes that differ, a length beyond `source_tokens`, or not one length for each batch entry.
    pub fn forward(
        &self,
        source: Tensor<2, Int>,
        source_lengths: &[usize],
        target: Tensor<2, Int>,
    ) -> Result<Tensor<3>> {
        let x = self.decode(source, source_lengths, target)?;
        apply(&self.output, x, Activation::Identity, After::default())
    }

    /// The loss of targets that follow sources: [`cross_entropy`] of the logits that [`forward`](Self::forward) gives, which are
    /// never held whole.
    ///
    /// # Shapes
    /// `next`: for each token of `target`, sequence after sequence, the one that comes after it, or none: [`Targets`].
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`cross_entropy`].
    pub fn loss(
        &self,
        source: Tensor<2, Int>,
        source_lengths: &[usize],
        target: Tensor<2, Int>,
        next: impl Into<Targets>,
        smoothing: f64,
    ) -> Result<CrossEntropyLoss> {
        cross_entropy(self.decode(source, source_lengths, target)?, &self.output, next, smoothing)
    }

    /// What the decoder gives to the output layer.
    fn decode(&self, source: Tensor<2, Int>, source_lengths: &[usize], target: Tensor<2, Int>) -> Result<Tensor<3>> {
        let ([batch, _], [target_batch, _]) = (source.dims(), target.dims());
        let expected = || format!("a batch of {batch}, like the source");
        argument(batch == target_batch, "seq2seq", "target", expected, || target_batch.to_string())?;
        let (memory, mask) = self.encode_source(source, source_lengths)?;
        let mut x = self.embed(&self.target_embedding, target, 0)?;
        for block in &self.decoder {
            x = block.forward(x, memory.clone(), &mask)?;
        }
        stack::end(self.decoder_norm.as_ref(), x)
    }

    /// Reads the sources, once for all targets that will be decoded from them. A model on a training device applies
    /// dropout here as well: decode with `model.valid()`.
    ///
    /// # Shapes
    /// As in [`Seq2Seq::forward`].
    ///
    /// # Errors
    /// A length beyond `source_tokens`, or not one for each batch entry.
    pub fn encode(&self, source: Tensor<2, Int>, source_lengths: &[usize]) -> Result<Memory> {
        self.encode_for(source, source_lengths, usize::MAX)
    }

    /// [`encode`](Self::encode) for targets of at most `longest` tokens, the start token among them: of one long source, on the CPU backend without autodiff and
    /// with mechanisms whose keys can be given as states, little more is held at any time than a row of `d_model` numbers a token.
    ///
    /// # Errors
    /// As [`encode`](Self::encode). A [`step`](Self::step) beyond `longest` may be refused.
    pub fn encode_for(&self, source: Tensor<2, Int>, source_lengths: &[usize], longest: usize) -> Result<Memory> {
        let batch = source.dims()[0];
        let device = source.device();
        let (memory, mask) = self.encode_source(source, source_lengths)?;
        let layers = self
            .decoder
            .iter()
            .map(|block| block.cross_attention.remember_for(memory.clone(), &mask, longest))
            .collect::<Result<_>>()?;
        Ok(Memory { layers, batch, device })
    }

    /// The decoder before its first token.
    pub fn start(&self, memory: Memory) -> DecoderState {
        DecoderState {
            layers: vec![AttentionState::default(); self.decoder.len()],
            sources: (0..memory.batch).collect(),
            memory,
            position: 0,
        }
    }

    /// Takes in one target token of each batch entry, the start token first, and gives the logits of the next,
    /// `[batch, target_vocab]`: a row of [`Seq2Seq::forward`]. Memory and time for a token do not depend on how many
    /// came before where the state does not grow, as [`AttentionState`] says. A state holds no weights, but what those of its tokens made of them: after a
    /// change of weights, [`encode`](Self::encode) anew.
    ///
    /// # Errors
    /// Not one token for each batch entry, a token outside the vocabulary, a state of another model. The state is then as it was.
    pub fn step(&self, tokens: &[usize], state: &mut DecoderState) -> Result<Tensor<2>> {
        self.step_by(&self.stepper(state)?, tokens, state)
    }

    /// The decoder of many [`step`](Self::step)s, between which no weight changes.
    pub(crate) fn stepper(&self, state: &DecoderState) -> Result<Stepper> {
        Ok(Stepper(StoredDecoder::new(self, &state.layers, &state.memory.layers)?))
    }

    /// [`step`](Self::step) by this decoder.
    pub(crate) fn step_by(&self, by: &Stepper, tokens: &[usize], state: &mut DecoderState) -> Result<Tensor<2>> {
        let vocabulary = self.target_vocab();
        let holds = tokens.len() == state.memory.batch && tokens.iter().all(|&t| t < vocabulary);
        let expected = || format!("{} tokens below {vocabulary}", state.memory.batch);
        argument(holds, "seq2seq step", "tokens", expected, || format!("{tokens:?}"))?;
        let blocks = self.decoder.len();
        let found = [state.layers.len(), state.memory.layers.len()];
        let expected = || format!("one of {blocks} blocks and their memories");
        argument(found == [blocks; 2], "seq2seq step", "state", expected, || format!("{found:?}"))?;
        let tokens = index_tensor(tokens, &state.memory.device).unsqueeze_dim::<2>(1);
        let mut x = self.embed(&self.target_embedding, tokens, state.position)?;
        let DecoderState { layers, memory: Memory { layers: memories, .. }, position, .. } = state;
        // All blocks take the token, or none.
        for ((block, layer), memory) in self.decoder.iter().zip(&*layers).zip(&*memories) {
            block.attention.check_step(&x, layer)?;
            block.cross_attention.check_recall(&x, *position, memory)?;
        }
        if let Some(decoder) = &by.0 {
            let logits = decoder.step(x, *position, layers, memories)?;
            *position += 1;
            return Ok(logits);
        }
        check_types("seq2seq step", self)?;
        for ((block, layer), memory) in self.decoder.iter().zip(layers).zip(memories) {
            x = block.step_in(x, *position, layer, memory)?;
        }
        *position += 1;
        let x = stack::end(self.decoder_norm.as_ref(), x)?;
        Ok(apply(&self.output, x, Activation::Identity, After::default())?.squeeze_dim(1))
    }

    /// Number of target tokens.
    pub fn target_vocab(&self) -> usize {
        self.target_embedding.weight.dims()[0]
    }

    /// The encoder's output, `[batch, source_tokens, d_model]`, and the mask under which to look at it.
    fn encode_source(&self, source: Tensor<2, Int>, lengths: &[usize]) -> Result<(Tensor<3>, AttentionMask)> {
        let [batch, tokens] = source.dims();
        let holds = lengths.len() == batch && lengths.iter().all(|&n| n <= tokens);
        let expected = || format!("{batch} lengths, each at most {tokens}");
        argument(holds, "seq2seq", "source_lengths", expected, || format!("{lengths:?}"))?;
        let mut mask = AttentionMask::bidirectional();
        if lengths.iter().any(|&n| n < tokens) {
            mask = mask.with_lengths(lengths).on([batch, tokens], &self.source_embedding.weight.device());
        }
        if let ([length], 1) = (lengths, batch)
            && *length == tokens
        {
            let rows = |rows: Range<usize>| {
                self.embed(&self.source_embedding, source.clone().narrow(1, rows.start, rows.len()), rows.start)
            };
            if let Some(x) = in_segments(&self.encoder, self.encoder_norm.as_ref(), tokens, rows)? {
                return Ok((x, mask));
            }
        }
        let mut x = self.embed(&self.source_embedding, source, 0)?;
        for block in &self.encoder {
            x = block.forward(x, &mask)?;
        }
        Ok((stack::end(self.encoder_norm.as_ref(), x)?, mask))
    }

    /// Embeddings, `[batch, tokens, d_model]`, of tokens from position `first` on.
    fn embed(&self, embedding: &Embedding, tokens: Tensor<2, Int>, first: usize) -> Result<Tensor<3>> {
        stack::embed(embedding, tokens, 1.0, (self.positions, first), &self.dropout)
    }
}

/// Sources that have been read. Made by [`Seq2Seq::encode`].
#[derive(Debug, Clone)]
pub struct Memory {
    layers: Vec<MemoryState>,
    batch: usize,
    device: Device,
}

impl Memory {
    /// Number of sources.
    pub fn batch(&self) -> usize {
        self.batch
    }
}

/// A decoder in the middle of its targets, a plain value: clone it to try two continuations.
#[derive(Debug, Clone)]
pub struct DecoderState {
    layers: Vec<AttentionState>,
    memory: Memory,
    /// Which source each batch entry of the memory was at the start.
    sources: Vec<usize>,
    position: usize,
}

/// A decoder without tensors, where it can do without.
#[derive(Debug)]
pub(crate) struct Stepper(Option<StoredDecoder>);

impl DecoderState {
    /// Number of batch entries.
    pub fn batch(&self) -> usize {
        self.memory.batch
    }

    /// Tokens taken in so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The states of the batch entries `indices`, in that order; an entry may come several times (beam search).
    ///
    /// # Errors
    /// An index beyond the batch.
    pub fn select(&self, indices: &[usize]) -> Result<Self> {
        let batch = self.memory.batch;
        let expected = || format!("indices below {batch}");
        argument(indices.iter().all(|&i| i < batch), "seq2seq select", "indices", expected, || format!("{indices:?}"))?;
        let device = &self.memory.device;
        let layers = self.layers.iter().map(|layer| layer.select(indices)).collect::<Result<_>>()?;
        let sources: Vec<usize> = indices.iter().map(|&i| self.sources[i]).collect();
        // Beams of one source change places among themselves, and their memories are alike.
        let memory = if sources == self.sources {
            self.memory.clone()
        } else {
            Memory {
                layers: self.memory.layers.iter().map(|layer| layer.select(indices, device)).collect::<Result<_>>()?,
                batch: indices.len(),
                device: device.clone(),
            }
        };
        Ok(Self { layers, memory, sources, position: self.position })
    }
}
