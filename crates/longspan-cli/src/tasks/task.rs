//! The trait of all tasks.

use std::fmt::Display;
use std::path::Path;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use serde::Serialize;

use super::workers::Workers;
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;

/// A task: data → examples → model → loss → answers → scores. A value holds what turns text into ids and back.
pub trait Task: Sized + Sync {
    /// A training example as ids.
    type Example: Sync;
    /// An example as text, with what counts as right.
    type Text: Clone;
    /// The model.
    type Model: Module + Sync;
    /// How well texts were answered, for people and for programs.
    type Scores: Display + Serialize;

    /// For a new run: reads the data, makes the tokenizers, and settles the settings that follow from both.
    fn begin(config: &mut RunConfig) -> Result<(Self, Data<Self>)>;

    /// For a run that exists: reads what [`store`](Self::store) wrote.
    fn load(folder: &RunFolder) -> Result<Self>;

    /// Writes all that the run needs beside its settings and weights.
    fn store(&self, folder: &RunFolder) -> Result<()>;

    /// Reads the data that the settings name.
    fn data(&self, config: &RunConfig) -> Result<Data<Self>>;

    /// The texts of a person's file, for `longspan eval`.
    fn read(path: &Path) -> Result<Vec<Self::Text>>;

    /// The vocabularies, in the order of the text's way through the model.
    fn vocabularies(&self) -> Vec<Vocabulary>;

    /// A model of these settings, its weights not yet drawn.
    fn model(&self, config: &RunConfig, device: &Device) -> Result<Self::Model>;

    /// How many tokens the model predicts for an example, and how many it reads beside them. Batches are of similar sizes.
    fn size(example: &Self::Example) -> (usize, usize);

    /// The loss of a batch.
    fn loss(&self, model: &Self::Model, batch: &[&Self::Example], smoothing: f64, device: &Device) -> Result<Loss>;

    /// Up to `beam` answers to each text, the likeliest first.
    fn answer(&self, model: &Self::Model, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<Answer>>>;

    /// Answers texts and scores the likeliest answer to each.
    fn score(&self, model: &Self::Model, texts: &[Self::Text], how: &Answering<'_>) -> Result<Self::Scores>;

    /// A few texts whose answers tell a person what has been learnt, with what would be right where that is known.
    fn samples(config: &RunConfig, held_out: &[Self::Text]) -> Vec<(String, Option<String>)>;

    /// The pieces of a text that the model does not know, in order.
    fn unknown_pieces<'a>(&self, text: &'a str) -> Vec<&'a str>;
}

/// All that a run learns from and is measured on.
pub struct Data<T: Task> {
    /// What the model learns from.
    pub train: Vec<T::Example>,
    /// For the second loss curve, and for choosing settings.
    pub development: Vec<T::Example>,
    /// For the scores at the end alone.
    pub held_out: Vec<T::Text>,
    /// Training examples left out for their length.
    pub too_long: usize,
    /// Tokens of the longest, on its longer side, those left out included.
    pub longest: usize,
    /// SHA-256 over all training examples in order: a run is resumed only with the examples it began with.
    pub sha256: String,
}

/// Sums over the predicted tokens of a batch.
pub struct Loss {
    /// `Σ −log p(token)`.
    pub plain: Tensor<1>,
    /// `Σ −(1−ε)·log p(token) − ε·mean_v log p(v)`: what is minimised, `ε` being the label smoothing.
    pub smoothed: Tensor<1>,
}

/// One vocabulary of a task.
pub struct Vocabulary {
    /// What it is of, such as `source`.
    pub side: &'static str,
    /// The kind of its tokenizer.
    pub kind: &'static str,
    /// Number of ids.
    pub size: usize,
}

/// How texts are answered.
#[derive(Clone, Copy)]
pub struct Answering<'a> {
    pub config: &'a RunConfig,
    /// Prefixes that are kept while searching.
    pub beam: usize,
    pub workers: &'a Workers,
    /// Where the texts come from, and the line in which each stands: for errors.
    pub name: &'a str,
    pub line: &'a (dyn Fn(usize) -> usize + Sync),
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    pub target: String,
    /// The natural logarithm of the probability that the model gives it.
    pub log_probability: f64,
    /// `log_probability` by the number of tokens, the end included.
    pub score: f64,
    /// Whether it ended by itself, rather than at the limit.
    pub finished: bool,
}
