//! A language model without tensors: a token through all of it without a graph, in memory that is used again.

use crate::cpu::FlexTensor;
use burn::tensor::DType;
use longspan_kernels::State;
use longspan_layers::StepBuffers;

use super::language_model::{LanguageModel, LanguageState};
use super::positions::{Positions, sinusoids};
use super::stored::StoredBlock;
use crate::attention::AttentionState;
use crate::backend;
use crate::error::{Result, argument};
use crate::layers::flex::{are_f32, numbers, shape, taken};
use crate::layers::stored::{StoredLayer, StoredNorm};

/// A [`LanguageModel`] that takes one token of each text after the other, on the CPU backend in `f32`. Made by
/// [`LanguageModel::decoder`].
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use longspan::models::{BlockConfig, LanguageModelConfig, LanguageState};
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_dropout(0.0);
/// let model = LanguageModelConfig::new(10).with_block(block).init(&device)?;
/// let mut state = LanguageState::default();
/// model.prefill(Tensor::<2, Int>::from_data([[1, 2, 3]], &device), &mut state)?; // the prompt, all at once
/// let mut decoder = model.decoder(&state, 1)?;
/// let logits = decoder.step(&[4])?; // of the token after [1, 2, 3, 4]
/// assert_eq!(logits.len(), 10);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LanguageDecoder {
    embedding: FlexTensor,
    /// What embeddings are multiplied by.
    scale: f32,
    positions: Positions,
    blocks: Vec<StoredBlock>,
    norm: Option<StoredNorm>,
    output: StoredLayer,
    states: Vec<State<f32>>,
    position: usize,
    batch: usize,
    x: Vec<f32>,
    y: Vec<f32>,
    logits: Vec<f32>,
    buffers: StepBuffers,
}

impl LanguageModel {
    /// The model for one token of each of `batch` texts after the other, after those of `state`; the default is before the first.
    ///
    /// # Errors
    /// A model that is not on the CPU backend without autodiff (`model.valid()` is) or not of `f32`, a mechanism whose state grows
    /// with every token, a state of another batch or model.
    pub fn decoder(&self, state: &LanguageState, batch: usize) -> Result<LanguageDecoder> {
        const NAME: &str = "language decoder";
        let weight = self.embedding.weight.val();
        let expected = || "all of it of f32 on the CPU backend, without autodiff".into();
        let got =
            || format!("embeddings of {:?} on {:?}, or other tensors of another type", weight.dtype(), weight.device());
        argument(are_f32(self) && !weight.device().is_autodiff(), NAME, "model", expected, got)?;
        let got = || "one whose state grows with every token: use LanguageModel::step".into();
        argument(!self.keeps_past(), NAME, "model", || "mechanisms with states of constant size".into(), got)?;
        argument(batch > 0, NAME, "batch", || "at least 1".into(), || "0".into())?;
        let blocks = self.blocks.iter().map(StoredBlock::new).collect::<Result<Vec<_>>>()?;
        let [vocabulary, width] = shape(&taken(weight.clone())).dims();
        let mut state = state.clone();
        let states = blocks.iter().zip(&self.blocks).zip(&state.of(self)?.layers).map(|((block, own), state)| {
            let layer = own.attention.attention.layer();
            let state = backend::states_of(layer, layer.heads().dims(batch, 1, 1), DType::F32, state)?;
            let state = state.before().ok_or_else(|| backend::foreign_state(layer))?.try_clone()?;
            block.attention.check_step(batch, &state)?;
            Ok(state)
        });
        let states = states.collect::<Result<_>>()?;
        let position = state.position();
        Ok(LanguageDecoder {
            embedding: taken(weight),
            scale: self.embedding_scale() as f32,
            positions: self.positions,
            blocks,
            norm: self.norm.as_ref().map(StoredNorm::new),
            output: StoredLayer::new(&self.output()),
            states,
            position,
            batch,
            x: vec![0.0; batch * width],
            y: vec![0.0; batch * width],
            logits: vec![0.0; batch * vocabulary],
            buffers: StepBuffers::default(),
        })
    }
}

impl LanguageDecoder {
    /// Takes in one token of each text and gives the logits of the next, `[batch, vocab]` row-major. Time and memory do not depend on
    /// how many came before.
    ///
    /// # Errors
    /// Not one token for each text, or a token outside the vocabulary.
    pub fn step(&mut self, tokens: &[usize]) -> Result<&[f32]> {
        let [vocabulary, width] = shape(&self.embedding).dims();
        let holds = tokens.len() == self.batch && tokens.iter().all(|&token| token < vocabulary);
        let expected = || format!("{} tokens below {vocabulary}", self.batch);
        argument(holds, "language decoder", "tokens", expected, || format!("{tokens:?}"))?;
        let table = numbers(&self.embedding);
        for (x, &token) in self.x.chunks_exact_mut(width).zip(tokens) {
            x.iter_mut().zip(&table[token * width..]).for_each(|(x, &e)| *x = e * self.scale);
        }
        if self.positions == Positions::Sinusoidal {
            let row = sinusoids(self.position, 1, width);
            self.x.chunks_exact_mut(width).for_each(|x| x.iter_mut().zip(&row).for_each(|(x, p)| *x += p));
        }
        // All blocks take the token, or none.
        for (block, state) in self.blocks.iter().zip(&self.states) {
            block.attention.check_step(self.batch, state)?;
        }
        for (block, state) in self.blocks.iter().zip(&mut self.states) {
            block.step(self.batch, state, &mut self.buffers, &mut self.x, &mut self.y)?;
        }
        if let Some(norm) = &self.norm {
            norm.weights().step(&self.x, &mut self.y)?;
            std::mem::swap(&mut self.x, &mut self.y);
        }
        self.output.weights().step(&self.x, width, &mut self.logits)?;
        self.position += 1;
        Ok(&self.logits)
    }

    /// Tokens of each text taken in so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The state of the tokens so far, with which the model goes on.
    ///
    /// # Errors
    /// Memory that is not there.
    pub fn state(&self) -> Result<LanguageState> {
        let layers = self.states.iter().map(|state| Ok(AttentionState::from(state.try_clone()?)));
        Ok(LanguageState { layers: layers.collect::<Result<_>>()?, position: self.position, uneven: false })
    }
}
