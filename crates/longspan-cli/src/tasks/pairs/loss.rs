//! The loss of a batch of pairs.

use anyhow::Result;
use burn::tensor::Device;
use longspan::layers::CrossEntropyLoss;
use longspan::models::Seq2Seq;

use super::example::Pair;
use crate::tasks::batches::padded;
use crate::tasks::task::Loss;
use crate::tasks::tokens::{END, START};

pub fn loss(model: &Seq2Seq, batch: &[&Pair], smoothing: f64, device: &Device) -> Result<Loss> {
    let sources: Vec<Vec<u32>> = batch.iter().map(|pair| source_ids(&pair.source)).collect();
    let inputs: Vec<Vec<u32>> = batch.iter().map(|pair| [&[START], pair.target.as_slice()].concat()).collect();
    let labels: Vec<Vec<u32>> = batch.iter().map(|pair| [pair.target.as_slice(), &[END]].concat()).collect();
    let (source, source_lengths) = padded(&sources, device);
    let (input, lengths) = padded(&inputs, device);
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let next: Vec<_> = labels.iter().flat_map(|labels| (0..longest).map(|at| labels.get(at).copied())).collect();
    let CrossEntropyLoss { plain, smoothed } = model.loss(source, &source_lengths, input, next, smoothing)?;
    Ok(Loss { plain, smoothed })
}

/// A source as the encoder gets it: with its end marked.
pub fn source_ids(source: &[u32]) -> Vec<u32> {
    [source, &[END]].concat()
}
