//! The loss of a batch of pairs.

use anyhow::Result;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Tensor, TensorData};
use longspan::models::Seq2Seq;

use super::example::Pair;
use crate::tasks::batches::padded;
use crate::tasks::task::Loss;
use crate::tasks::tokens::{END, START};

/// The loss of a batch of pairs.
pub fn loss(model: &Seq2Seq, batch: &[&Pair], smoothing: f64, device: &Device) -> Result<Loss> {
    let sources: Vec<Vec<u32>> = batch.iter().map(|pair| source_ids(&pair.source)).collect();
    let inputs: Vec<Vec<u32>> = batch.iter().map(|pair| [&[START], pair.target.as_slice()].concat()).collect();
    let labels: Vec<Vec<u32>> = batch.iter().map(|pair| [pair.target.as_slice(), &[END]].concat()).collect();
    let rows = |ids: &[Vec<u32>]| {
        let rows: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
        padded(&rows, device)
    };
    let (source, source_lengths) = rows(&sources);
    let (input, lengths) = rows(&inputs);
    let (label, _) = rows(&labels);
    let log_p = log_softmax(model.forward(source, &source_lengths, input)?, 2);
    let [batch, longest, vocabulary] = log_p.dims();
    let counted: Vec<f32> =
        lengths.iter().flat_map(|&length| (0..longest).map(move |at| f32::from(u8::from(at < length)))).collect();
    let counted = Tensor::<2>::from_data(TensorData::new(counted, [batch, longest]), device);
    let right: Tensor<2> = log_p.clone().gather(2, label.unsqueeze_dim::<3>(2)).squeeze_dim(2);
    let plain = (right * counted.clone()).sum().neg();
    if smoothing == 0.0 {
        return Ok(Loss { plain: plain.clone(), smoothed: plain });
    }
    let mean: Tensor<2> = log_p.sum_dim(2).squeeze_dim(2).div_scalar(vocabulary as f64);
    let spread = (mean * counted).sum().neg();
    let smoothed = plain.clone().mul_scalar(1.0 - smoothing) + spread.mul_scalar(smoothing);
    Ok(Loss { plain, smoothed })
}

/// A source as the encoder gets it: with its end marked.
pub fn source_ids(source: &[u32]) -> Vec<u32> {
    [source, &[END]].concat()
}
