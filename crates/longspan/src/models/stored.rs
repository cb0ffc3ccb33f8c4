//! Blocks as numbers, for calls without tensors: a token at a time, or a long sequence in segments.

use std::ops::Range;

use burn::tensor::Tensor;
use longspan_kernels::{Error as KernelError, Mask, Scratch, State};
use longspan_layers::{Linear, Norm as NormCall, NormWeights, StepBuffers};

use super::block::{DecoderBlock, EncoderBlock, Norm};
use super::seq2seq::Seq2Seq;
use crate::attention::stored::StoredAttention;
use crate::attention::{AttentionState, MemoryState};
use crate::backend::with_scratch;
use crate::cpu::from_flex;
use crate::error::Result;
use crate::layers::TokenNorm;
use crate::layers::flex::{are_f32, is_f32, numbers, taken, tensor};
use crate::layers::stored::{StoredFeedForward, StoredLayer, StoredNorm};

/// The tensors of an [`EncoderBlock`].
#[derive(Debug)]
pub(super) struct StoredBlock {
    place: Norm,
    pub attention: StoredAttention,
    attention_norm: StoredNorm,
    feed_forward: StoredFeedForward,
    feed_forward_norm: StoredNorm,
}

impl StoredBlock {
    pub fn new(block: &EncoderBlock) -> Result<Self> {
        Ok(Self {
            place: block.branches.place,
            attention: StoredAttention::new(&block.attention)?,
            attention_norm: StoredNorm::new(&block.attention_norm),
            feed_forward: StoredFeedForward::new(&block.feed_forward),
            feed_forward_norm: StoredNorm::new(&block.feed_forward_norm),
        })
    }

    /// One token of each of `batch` texts: from `x`, by `y`, to `x`.
    pub fn step(
        &self,
        batch: usize,
        state: &mut State<f32>,
        buffers: &mut StepBuffers,
        x: &mut Vec<f32>,
        y: &mut Vec<f32>,
    ) -> Result<()> {
        self.attend(batch, state, buffers, x, y)?;
        self.feed(buffers, x, y)
    }

    /// Self-attention's part of a step.
    fn attend(
        &self,
        batch: usize,
        state: &mut State<f32>,
        buffers: &mut StepBuffers,
        x: &mut Vec<f32>,
        y: &mut Vec<f32>,
    ) -> Result<()> {
        let parameters = self.attention.parameters();
        let norm = self.before(&self.attention_norm);
        self.attention.call(x, batch, norm, &parameters, Mask::causal()).step(state, buffers, y)?;
        self.end(&self.attention_norm, x, y)
    }

    /// The feed-forward part of a step.
    fn feed(&self, buffers: &mut StepBuffers, x: &mut Vec<f32>, y: &mut Vec<f32>) -> Result<()> {
        let norm = self.before(&self.feed_forward_norm);
        self.feed_forward.call(x, self.attention.width(), norm).step(buffers, y)?;
        self.end(&self.feed_forward_norm, x, y)
    }

    /// A part's norm, where it stands before the part.
    fn before<'n>(&self, norm: &'n StoredNorm) -> Option<NormWeights<'n>> {
        (self.place == Norm::Pre).then(|| norm.weights())
    }

    /// What a part has written to `y` goes to `x`, by the norm where it stands after the sum.
    fn end(&self, norm: &StoredNorm, x: &mut Vec<f32>, y: &mut Vec<f32>) -> Result<()> {
        match self.place {
            Norm::Pre => std::mem::swap(x, y),
            Norm::Post => norm.weights().step(y, x)?,
        }
        Ok(())
    }

    /// Replaces the rows of one sequence by the block's results in both directions, so many at a time.
    fn in_segments(&self, x: &mut [f32], segment: usize, scratch: &mut Scratch<f32>) -> Result<()> {
        let parameters = self.attention.parameters();
        let width = self.attention.width();
        let [before, between, after] = match self.place {
            Norm::Pre => [Some(&self.attention_norm), None, None],
            Norm::Post => [None, Some(&self.attention_norm), Some(&self.feed_forward_norm)],
        };
        let normed = |norm: Option<&StoredNorm>, rows: Vec<f32>| match norm {
            Some(norm) => NormCall { x: &rows, weights: norm.weights() }.forward(),
            None => Ok(rows),
        };
        let inner = self.before(&self.feed_forward_norm);
        let attention =
            self.attention.call(&[], 1, before.map(StoredNorm::weights), &parameters, Mask::bidirectional());
        Ok(attention.in_segments(x, segment, scratch, |rows| -> Result<Vec<f32>, KernelError> {
            let rows = normed(between, rows)?;
            normed(after, self.feed_forward.call(&rows, width, inner).forward()?)
        })?)
    }
}

/// The decoder of a [`Seq2Seq`] and its output layer.
#[derive(Debug)]
pub(super) struct StoredDecoder {
    blocks: Vec<StoredDecoderBlock>,
    norm: Option<StoredNorm>,
    output: StoredLayer,
}

/// The tensors of a [`DecoderBlock`]: of a block around cross-attention.
#[derive(Debug)]
struct StoredDecoderBlock {
    block: StoredBlock,
    cross_attention: StoredAttention,
    cross_attention_norm: StoredNorm,
}

impl StoredDecoder {
    /// None where a step needs tensors: on other devices, for other numbers, in training, for states that grow or are tensors, and memories of sums.
    pub fn new(model: &Seq2Seq, states: &[AttentionState], memories: &[MemoryState]) -> Result<Option<Self>> {
        let weight = model.target_embedding.weight.val();
        let grows = model.decoder.iter().any(|block| block.attention.attention.keeps_past());
        let without = memories.iter().all(|memory| memory.rows().is_some());
        let followed = states.iter().any(AttentionState::is_followed);
        if grows || followed || !without || !are_f32(model) || weight.device().is_autodiff() {
            return Ok(None);
        }
        let block = |block: &DecoderBlock| {
            Ok(StoredDecoderBlock {
                block: StoredBlock {
                    place: block.branches.place,
                    attention: StoredAttention::new(&block.attention)?,
                    attention_norm: StoredNorm::new(&block.attention_norm),
                    feed_forward: StoredFeedForward::new(&block.feed_forward),
                    feed_forward_norm: StoredNorm::new(&block.feed_forward_norm),
                },
                cross_attention: StoredAttention::new(&block.cross_attention)?,
                cross_attention_norm: StoredNorm::new(&block.cross_attention_norm),
            })
        };
        Ok(Some(Self {
            blocks: model.decoder.iter().map(block).collect::<Result<_>>()?,
            norm: model.decoder_norm.as_ref().map(StoredNorm::new),
            output: StoredLayer::new(&model.output),
        }))
    }

    /// Logits after one token of each text, from the embeddings of these tokens at `position`.
    pub fn step(
        &self,
        embedded: Tensor<3>,
        position: usize,
        states: &mut [AttentionState],
        memories: &[MemoryState],
    ) -> Result<Tensor<2>> {
        let [batch, _, width] = embedded.dims();
        let mut x = numbers(&taken(embedded)).to_vec();
        // What a text is answered does not depend on those beside it.
        let (mut y, mut buffers) = (vec![0.0; x.len()], StepBuffers::independent());
        for ((StoredDecoderBlock { block, cross_attention, cross_attention_norm }, state), memory) in
            self.blocks.iter().zip(states).zip(memories)
        {
            let attention = &block.attention;
            let state = attention.state_in(state, batch)?;
            block.attend(batch, state, &mut buffers, &mut x, &mut y)?;
            let norm = block.before(cross_attention_norm);
            cross_attention.recall(&x, [batch, position], norm, memory, &mut buffers, &mut y)?;
            block.end(cross_attention_norm, &mut x, &mut y)?;
            block.feed(&mut buffers, &mut x, &mut y)?;
        }
        if let Some(norm) = &self.norm {
            norm.weights().step(&x, &mut y)?;
            std::mem::swap(&mut x, &mut y);
        }
        let output = self.output.weights();
        let outputs = output.weight.len() / width;
        let logits = Linear::new(&x, output.weight, [batch, width, outputs]).with_bias(output.bias).forward()?;
        Ok(from_flex(tensor(logits, [batch, outputs])))
    }
}

/// Rows of a segment of a long sequence.
const SEGMENT: usize = 1 << 14;

/// Runs blocks and a norm in both directions over one sequence of `tokens`, whose embeddings `[1, count, width]` `embed` gives for any
/// stretch: in the memory of its rows and of a segment's work. None for a sequence that is not long, on other devices, for other numbers,
/// in training, and for mechanisms whose keys can't be given as states.
pub(super) fn in_segments(
    blocks: &[EncoderBlock],
    norm: Option<&TokenNorm>,
    tokens: usize,
    embed: impl Fn(Range<usize>) -> Result<Tensor<3>>,
) -> Result<Option<Tensor<3>>> {
    let reach = |block: &EncoderBlock| block.attention.attention.layer().kernel().reach().is_some_and(|r| r <= SEGMENT);
    if tokens < Seq2Seq::LONG_SOURCE || !blocks.iter().all(reach) {
        return Ok(None);
    }
    let segments = || (0..tokens).step_by(SEGMENT).map(|from| from..(from + SEGMENT).min(tokens));
    let mut x: Vec<f32> = Vec::new();
    for rows in segments() {
        let embedded = embed(rows)?;
        if !blocks.iter().all(are_f32) || !is_f32(&embedded) || embedded.device().is_autodiff() {
            return Ok(None);
        }
        let width = embedded.dims()[2];
        let missing = tokens * width - x.len();
        x.try_reserve_exact(missing).map_err(|_| KernelError::Memory { bytes: missing * size_of::<f32>() })?;
        x.extend_from_slice(numbers(&taken(embedded)));
    }
    let width = x.len() / tokens;
    for block in blocks {
        let block = StoredBlock::new(block)?;
        with_scratch(|scratch| block.in_segments(&mut x, SEGMENT, scratch))?;
    }
    if let Some(norm) = norm.map(StoredNorm::new) {
        for rows in segments() {
            let rows = &mut x[rows.start * width..rows.end * width];
            let normed = NormCall { x: rows, weights: norm.weights() }.forward()?;
            rows.copy_from_slice(&normed);
        }
    }
    Ok(Some(from_flex(tensor(x, [1, tokens, width]))))
}
