//! The models under Burn's `Learner`, with the feature `train`: batches, how they are made, and the steps of training and of validation.
//! `examples/learner.rs` trains one. Burn's steps return no error, so a mistake in a batch panics with the error's text.

use burn::data::dataloader::batcher::Batcher;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, ExecutionError, Int, Tensor, TensorData};
use burn::train::metric::{Adaptor, LossInput};
use burn::train::{ClassificationOutput, InferenceStep, ItemLazy, TrainOutput, TrainStep};

use crate::error::Result;
use crate::layers::CrossEntropyLoss;
use crate::models::{Classifier, LanguageModel, Seq2Seq};

/// Texts for a [`LanguageModel`].
#[derive(Debug, Clone)]
pub struct TextBatch {
    /// `[batch, tokens]`.
    pub tokens: Tensor<2, Int>,
    /// The token after each of them, below 0 where none is learned.
    pub next: Tensor<2, Int>,
}

/// Sources and targets for a [`Seq2Seq`].
#[derive(Debug, Clone)]
pub struct PairBatch {
    /// `[batch, source_tokens]`.
    pub source: Tensor<2, Int>,
    /// Tokens of each source.
    pub source_lengths: Vec<usize>,
    /// `[batch, target_tokens]`, beginning with the start token.
    pub target: Tensor<2, Int>,
    /// The token after each of them, below 0 where none is learned.
    pub next: Tensor<2, Int>,
}

/// Texts and their classes for a [`Classifier`].
#[derive(Debug, Clone)]
pub struct LabelledBatch {
    /// `[batch, tokens]`.
    pub tokens: Tensor<2, Int>,
    /// Tokens of each text.
    pub lengths: Vec<usize>,
    /// `[batch]`.
    pub classes: Tensor<1, Int>,
}

/// Makes batches of tokens: a [`TextBatch`] of texts, a [`PairBatch`] of pairs of a source and a target with its start and end, a
/// [`LabelledBatch`] of texts and classes. Shorter ones are filled up, which is not learned.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenBatcher;

/// Rows of tokens, filled up with a number.
fn rows(texts: &[&[u32]], fill: i64, device: &Device) -> Tensor<2, Int> {
    let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
    let row = |text: &&[u32]| {
        let row: Vec<i64> =
            text.iter().map(|&token| token.into()).chain(std::iter::repeat(fill)).take(longest).collect();
        row
    };
    let numbers: Vec<i64> = texts.iter().flat_map(row).collect();
    Tensor::from_data(TensorData::new(numbers, [texts.len(), longest]), device)
}

/// The tokens of texts but their last, and those but their first.
fn shifted(texts: &[&[u32]], device: &Device) -> [Tensor<2, Int>; 2] {
    let end = |text: &[u32]| text.len().saturating_sub(1);
    let tokens: Vec<&[u32]> = texts.iter().map(|text| &text[..end(text)]).collect();
    let next: Vec<&[u32]> = texts.iter().map(|text| &text[text.len() - end(text)..]).collect();
    [rows(&tokens, 0, device), rows(&next, -1, device)]
}

impl Batcher<Vec<u32>, TextBatch> for TokenBatcher {
    fn batch(&self, texts: Vec<Vec<u32>>, device: &Device) -> TextBatch {
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let [tokens, next] = shifted(&texts, device);
        TextBatch { tokens, next }
    }
}

impl Batcher<(Vec<u32>, Vec<u32>), PairBatch> for TokenBatcher {
    fn batch(&self, pairs: Vec<(Vec<u32>, Vec<u32>)>, device: &Device) -> PairBatch {
        let (sources, targets): (Vec<&[u32]>, Vec<&[u32]>) =
            pairs.iter().map(|(source, target)| (source.as_slice(), target.as_slice())).unzip();
        let [target, next] = shifted(&targets, device);
        let source_lengths = sources.iter().map(|source| source.len()).collect();
        PairBatch { source: rows(&sources, 0, device), source_lengths, target, next }
    }
}

impl Batcher<(Vec<u32>, u32), LabelledBatch> for TokenBatcher {
    fn batch(&self, labelled: Vec<(Vec<u32>, u32)>, device: &Device) -> LabelledBatch {
        let texts: Vec<&[u32]> = labelled.iter().map(|(text, _)| text.as_slice()).collect();
        let classes: Vec<i64> = labelled.iter().map(|&(_, class)| class.into()).collect();
        LabelledBatch {
            tokens: rows(&texts, 0, device),
            lengths: texts.iter().map(|text| text.len()).collect(),
            classes: Tensor::from_data(classes.as_slice(), device),
        }
    }
}

/// The mean loss of a batch's tokens, `[1]`, for Burn's `LossMetric`.
#[derive(Debug, Clone)]
pub struct MeanLoss(pub Tensor<1>);

impl ItemLazy for MeanLoss {
    fn sync(self) -> Result<Self, ExecutionError> {
        self.0.device().flush()?;
        Ok(Self(self.0.without_autodiff()))
    }
}

impl Adaptor<LossInput> for MeanLoss {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.0.clone())
    }
}

/// The mean over the tokens that are learned.
fn mean(loss: Result<CrossEntropyLoss>, next: &Tensor<2, Int>) -> Tensor<1> {
    let loss = loss.unwrap_or_else(|error| panic!("{error}")).smoothed;
    let counted = next.clone().greater_equal_elem(0).int().sum().clamp_min(1).to_device(&loss.device());
    loss.clone() / counted.cast(burn::tensor::FloatDType::from(loss.dtype()))
}

macro_rules! steps {
    ($model:ident, $batch:ident -> $output:ident, $loss:expr, $item:expr) => {
        impl TrainStep for $model {
            type Input = $batch;
            type Output = $output;

            fn step(&self, batch: $batch) -> TrainOutput<$output> {
                let (loss, rest) = $loss(self, batch);
                TrainOutput::new(self, loss.backward(), $item(loss, rest))
            }
        }

        impl InferenceStep for $model {
            type Input = $batch;
            type Output = $output;

            fn step(&self, batch: $batch) -> $output {
                let (loss, rest) = $loss(self, batch);
                $item(loss, rest)
            }
        }
    };
}

steps!(
    LanguageModel,
    TextBatch -> MeanLoss,
    |model: &LanguageModel, TextBatch { tokens, next }| (mean(model.loss(tokens, next.clone(), 0.0), &next), ()),
    |loss, ()| MeanLoss(loss)
);
steps!(
    Seq2Seq,
    PairBatch -> MeanLoss,
    |model: &Seq2Seq, PairBatch { source, source_lengths, target, next }| {
        (mean(model.loss(source, &source_lengths, target, next.clone(), 0.0), &next), ())
    },
    |loss, ()| MeanLoss(loss)
);
steps!(
    Classifier,
    LabelledBatch -> ClassificationOutput,
    |model: &Classifier, LabelledBatch { tokens, lengths, classes }| {
        let logits = model.forward(tokens, &lengths).unwrap_or_else(|error| panic!("{error}"));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        (loss.forward(logits.clone(), classes.clone()), (logits, classes))
    },
    |loss, (logits, classes)| ClassificationOutput::new(loss, logits, classes)
);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::models::{BlockConfig, LanguageModelConfig};

    #[test]
    fn what_fills_a_batch_up_is_not_learned() {
        let device = Device::flex().autodiff();
        let model = LanguageModelConfig::new(7).with_block(BlockConfig::new().with_d_model(8).with_dropout(0.0));
        let model = model.init(&device).unwrap();
        let texts = [vec![1, 2, 3, 4], vec![5, 6]];
        let loss = |texts: &[Vec<u32>]| {
            let batch: TextBatch = TokenBatcher.batch(texts.to_vec(), &device);
            let TrainOutput { item, grads } = TrainStep::step(&model, batch);
            assert!(grads.len() > 0);
            item.0.into_scalar::<f32>()
        };
        let TextBatch { tokens, next } = TokenBatcher.batch(texts.to_vec(), &device);
        assert_eq!(tokens.try_into_vec_as::<i64>().unwrap(), [1, 2, 3, 5, 0, 0]);
        assert_eq!(next.try_into_vec_as::<i64>().unwrap(), [2, 3, 4, 6, -1, -1]);
        let expected = (3.0 * loss(&texts[..1]) + loss(&texts[1..])) / 4.0;
        assert!((loss(&texts) - expected).abs() < 1e-5);
        let pairs: PairBatch = TokenBatcher.batch(vec![(vec![3], vec![1, 2]), (vec![4, 5], vec![1, 6, 2])], &device);
        assert_eq!(pairs.source.try_into_vec_as::<i64>().unwrap(), [3, 0, 4, 5]);
        assert_eq!(pairs.source_lengths, [1, 2]);
        assert_eq!(pairs.next.try_into_vec_as::<i64>().unwrap(), [2, -1, 6, 2]);
    }
}
