//! Blocks as numbers, for calls without tensors: a token at a time, or a long sequence in segments.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_flex::Flex;
use longspan_kernels::layers::{Norm as NormCall, StepBuffers};
use longspan_kernels::{Error as KernelError, Mask, Scratch, State};

use super::block::{EncoderBlock, Norm};
use super::seq2seq::Seq2Seq;
use crate::attention::stored::StoredAttention;
use crate::backend::with_scratch;
use crate::error::Result;
use crate::layers::TokenNorm;
use crate::layers::flex::{is_f32, numbers, tensor};
use crate::layers::gradients::fused::taken;
use crate::layers::stored::{StoredFeedForward, StoredNorm};

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
            place: block.place(),
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
        let parameters = self.attention.parameters();
        let pre = self.place == Norm::Pre;
        let norm = pre.then(|| self.attention_norm.weights());
        self.attention.call(x, batch, norm, &parameters, Mask::causal()).step(state, buffers, y)?;
        self.end(&self.attention_norm, x, y)?;
        let norm = pre.then(|| self.feed_forward_norm.weights());
        self.feed_forward.call(x, self.attention.width(), norm).step(buffers, y)?;
        self.end(&self.feed_forward_norm, x, y)
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
        let inner = (self.place == Norm::Pre).then(|| self.feed_forward_norm.weights());
        let attention =
            self.attention.call(&[], 1, before.map(StoredNorm::weights), &parameters, Mask::bidirectional());
        Ok(attention.in_segments(x, segment, scratch, |rows| -> Result<Vec<f32>, KernelError> {
            let rows = normed(between, rows)?;
            normed(after, self.feed_forward.call(&rows, width, inner).forward()?)
        })?)
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
    embed: impl Fn(Range<usize>) -> Tensor<3>,
) -> Result<Option<Tensor<3>>> {
    let reach = |block: &EncoderBlock| block.attention.attention.layer().kernel().reach().is_some_and(|r| r <= SEGMENT);
    if tokens < Seq2Seq::LONG_SOURCE || !blocks.iter().all(reach) {
        return Ok(None);
    }
    let segments = || (0..tokens).step_by(SEGMENT).map(|from| from..(from + SEGMENT).min(tokens));
    let mut x: Vec<f32> = Vec::new();
    for rows in segments() {
        let embedded = embed(rows);
        if !is_f32(&embedded) || embedded.device().is_autodiff() {
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
    Ok(Some(Tensor::from_primitive::<Flex>(tensor(x, [1, tokens, width]))))
}
