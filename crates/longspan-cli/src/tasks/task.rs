//! The trait of all tasks.

use std::fmt::{self, Display};
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use longspan::backend::Peers;
use serde::Serialize;
use serde_json::{Value, json};

use super::feed::Feed;
use super::series::file::Series;
use super::simple::Simple;
use super::split::evenly;
use super::workers::Workers;
use crate::run::checkpoint::{Place, Saved, optimizer};
use crate::run::config::{Config, TaskSettings};
use crate::run::folder::{CHECKPOINT, RunFolder};
use crate::terminal::forecasts::Forecasts;
use crate::terminal::plot::Matrix;
use crate::terminal::samples::{self, Sample, visible};
use crate::terminal::shell;

/// A task: data → examples → model → loss → answers → scores. A value holds what turns text into ids and back.
///
/// A run answers lines (then the task is [`Predict`] too), or it is one of text, with which `generate` goes on.
pub trait Task: Sized + Sync {
    /// What a person calls the things that a batch is made of.
    const EXAMPLES: &str = "examples";
    /// What the length of an example is counted in.
    const LENGTH: &str = "tokens";

    /// The settings that it has beside those of all models.
    type Settings: TaskSettings;
    type Example: Sync;
    type Feed: Feed<Example = Self::Example>;
    /// What a batch leaves to the next one, such as states; `()` where batches are independent.
    type Carried: Send;
    /// An example as text, with what counts as right.
    type Text: Clone;
    type Model: Module + Sync;
    type Scores: Scores;

    /// For a new run: reads the data, makes the tokenizers, and settles the settings that follow from both.
    fn begin(config: &mut Config<Self::Settings>) -> Result<(Self, Data<Self>)>;

    /// For a run that exists: reads what [`store`](Self::store) wrote.
    fn load(folder: &RunFolder, config: &Config<Self::Settings>) -> Result<Self>;

    /// Writes all that the run needs beside its settings and weights.
    fn store(&self, folder: &RunFolder) -> Result<()>;

    /// Reads the data that the settings name.
    fn data(&self, config: &Config<Self::Settings>) -> Result<Data<Self>>;

    /// The vocabularies, in the order of the text's way through the model.
    fn vocabularies(&self) -> Vec<Vocabulary>;

    /// A model of these settings, its weights not yet drawn.
    fn model(&self, config: &Config<Self::Settings>, device: &Device) -> Result<Self::Model>;

    /// How many tokens the model predicts for an example, and how many it reads beside them. Batches are of similar sizes.
    fn size(example: &Self::Example) -> (usize, usize);

    fn loss(&self, model: &Self::Model, batch: &[&Self::Example], smoothing: f64, device: &Device) -> Result<Loss>;

    /// As [`loss`](Self::loss), of a part of a training batch, and what it leaves to the next batch.
    fn learn(
        &self,
        model: &Self::Model,
        batch: &[&Self::Example],
        smoothing: f64,
        device: &Device,
    ) -> Result<(Loss, Option<Self::Carried>)> {
        Ok((self.loss(model, batch, smoothing, device)?, None))
    }

    /// From now on [`learn`](Self::learn) computes this process's stretches of the examples, and `peers` the others.
    fn split_among(&mut self, _peers: Arc<dyn Peers>) {}

    /// Takes note that a step was completed, with what the parts of its batch left, in their order.
    fn carry(&self, _feed: &mut Self::Feed, _carried: Vec<Self::Carried>) -> Result<()> {
        Ok(())
    }

    /// Where the feed stands, if the seed and the step do not tell; from what the other ranks say of their shares, in their order.
    fn place(&self, _feed: &Self::Feed, _model: &Self::Model, _others: Vec<Place>) -> Result<Place> {
        Ok(Place::default())
    }

    /// Brings the feed back to where [`place`](Self::place) said.
    fn return_to(&self, _feed: &mut Self::Feed, _model: &Self::Model, _place: Place) -> Result<()> {
        Ok(())
    }

    /// How many development examples share what is to be told, on average.
    fn overlap(_feed: &Self::Feed, _development: usize) -> f64 {
        1.0
    }

    fn usual_steps(per_epoch: usize) -> usize {
        8000.min((60 * per_epoch).max(1000))
    }

    /// The dropout of a run that goes over its data so many times, where that decides it.
    fn usual_dropout(&self, _passes: f64) -> Option<f64> {
        None
    }

    fn measure(&self) -> &'static str {
        "nats per token"
    }

    /// A trained model as its answers to development examples want it, where they want it otherwise; the third is whether it adds nothing to
    /// the simple method that it began as.
    fn calibrated(&self, _: &Self::Model, _: &Data<Self>, _: bool, _: &How<'_, Self>) -> Result<Option<Self::Model>> {
        Ok(None)
    }

    /// Answers texts and scores the likeliest answer to each.
    fn score(&self, model: &Self::Model, texts: &[Self::Text], how: &How<'_, Self>) -> Result<Self::Scores>;

    /// How many times as long as the development loss, about, the scores of all that is held out take.
    fn scoring(data: &Data<Self>, config: &Config<Self::Settings>) -> Result<f64> {
        let scored = data.held_out.len().min(config.training.scored());
        Ok(scored as f64 / data.development.len().max(1) as f64)
    }

    /// What simple methods give on held-out texts.
    fn simple(&self, _: &Data<Self>, _: &[Self::Text], _: &Config<Self::Settings>) -> Result<Vec<Simple>> {
        Ok(Vec::new())
    }

    /// Scores a person's file.
    fn evaluate(&self, model: &Self::Model, path: &Path, how: &How<'_, Self>) -> Result<Self::Scores>;

    /// What a run that has ended shows of itself, and what a person may try next, as arguments after `folder`.
    fn show(&self, model: &Self::Model, held_out: &[Self::Text], how: &How<'_, Self>, folder: &str) -> Result<Shown>;

    /// The data in a line, for the beginning of training.
    fn introduce(&self, config: &Config<Self::Settings>, data: &Data<Self>) -> String;

    /// The size of the model's stack, such as `4 blocks`.
    fn blocks(config: &Config<Self::Settings>) -> String {
        samples::counted(config.common().blocks, "blocks")
    }

    /// The pieces of a text that the model does not know, in order.
    fn unknown_pieces(&self, _text: &str) -> Vec<String> {
        Vec::new()
    }
}

/// How well texts were answered, for people and for programs.
pub trait Scores: Display + Serialize {
    /// Whether a simple method with this score does better.
    fn is_behind(&self, _simple: f64) -> bool {
        false
    }

    /// The picture that shows them, if there is one.
    fn picture(&self) -> Option<Matrix> {
        None
    }
}

/// A task whose runs answer questions.
pub trait Predict: Task {
    /// What a person's file asks, where that is not simply its lines.
    fn asked(&self, _path: &Path, _config: &Config<Self::Settings>) -> Result<Option<Vec<Asked>>> {
        Ok(None)
    }

    /// What the columns of [`predict`](Self::predict) are called.
    fn titles(&self, _config: &Config<Self::Settings>) -> Titles {
        Titles { key: vec!["source".into()], answer: vec!["target".into()], always: false }
    }

    /// What is printed of each question.
    fn predict(&self, model: &Self::Model, asked: &[Asked], how: &How<'_, Self>) -> Result<Vec<Told>>;
}

/// What is printed of texts: up to a beam of answers to each, the likeliest first, of which `cells` go into a row.
pub fn answered(
    asked: &[Asked],
    answer: impl FnOnce(&[&str]) -> Result<Vec<Vec<Answer>>>,
    cells: impl Fn(&[Answer]) -> Vec<String>,
) -> Result<Vec<Told>> {
    let texts: Vec<&str> = asked.iter().map(|one| one.text.as_str()).collect();
    let answers = answer(&texts)?;
    let one = |(text, answers): (&str, Vec<Answer>)| {
        let best = answers.first();
        let cut = best.is_some_and(|answer| !answer.finished);
        let (target, score) = (best.map(|answer| &answer.target), best.map(|answer| answer.score));
        let json = json!({ "source": text, "target": target, "score": score, "answers": answers });
        let row = std::iter::once(text.to_string()).chain(cells(&answers)).collect();
        Told { rows: vec![row], json, cut, picture: None }
    };
    Ok(texts.into_iter().zip(answers).map(one).collect())
}

pub fn likeliest(answers: &[Answer]) -> Vec<String> {
    vec![answers.first().map_or_else(String::new, |best| best.target.clone())]
}

/// A few texts with their answers, and with what would be right where that is known.
pub fn sampled(
    wanted: Vec<(String, Option<String>)>,
    answer: impl FnOnce(&[&str]) -> Result<Vec<Vec<Answer>>>,
    folder: &str,
) -> Result<Shown> {
    let sources: Vec<&str> = wanted.iter().map(|(source, _)| source.as_str()).collect();
    let answers = if sources.is_empty() { Vec::new() } else { answer(&sources)? };
    let sample = |((source, expected), beam): (&(String, Option<String>), Vec<Answer>)| {
        let best = beam.into_iter().next();
        let cut = best.as_ref().is_some_and(|best| !best.finished);
        let answer = best.map(|best| best.target).unwrap_or_default();
        Sample { source: source.clone(), answer, cut, expected: expected.clone() }
    };
    let samples: Vec<Sample> = wanted.iter().zip(answers).map(sample).collect();
    let short = |text: &&&str| text.len() <= 40 && !text.is_empty() && **text == visible(text);
    let example = shell::quoted(sources.iter().find(short).unwrap_or(&"hello"));
    let next = format!("printf '%s\\n' {example} | {} predict {folder}", shell::program());
    Ok(Shown { text: samples::table(&samples), next, picture: None })
}

#[derive(Debug, Clone)]
pub struct Asked {
    pub line: usize,
    pub text: String,
    /// Where the file was read whole as series.
    pub series: Option<Series>,
}

pub struct Told {
    /// Rows of cells, as [`Titles`] names them.
    pub rows: Vec<Vec<String>>,
    pub json: Value,
    /// Whether it was cut at the limit.
    pub cut: bool,
    pub picture: Option<Forecasts>,
}

pub struct Titles {
    /// Of what is asked, which is not repeated where a line is answered by a line,
    pub key: Vec<String>,
    /// and of what is answered.
    pub answer: Vec<String>,
    /// Whether they stand above answers to a person too.
    pub always: bool,
}

pub struct Shown {
    /// Lines of samples; may be empty.
    pub text: String,
    pub next: String,
    pub picture: Option<Forecasts>,
}

/// All that a run learns from and is measured on.
pub struct Data<T: Task> {
    pub train: T::Feed,
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

impl<T: Task> Data<T> {
    /// The held-out texts whose answers are scored: all, or as many as the settings say.
    pub fn scored(&self, config: &Config<T::Settings>) -> Vec<T::Text> {
        evenly(&self.held_out, config.training.scored())
    }
}

/// A run that has been read back, ready to answer.
pub struct Trained<T: Task> {
    pub config: Config<T::Settings>,
    pub task: T,
    pub model: T::Model,
    pub folder: RunFolder,
}

impl<T: Task> Trained<T> {
    pub fn load(folder: RunFolder, config: Config<T::Settings>) -> Result<Self> {
        let task = T::load(&folder, &config)?;
        let model = folder.load_weights(task.model(&config, &Device::flex())?)?;
        Ok(Self { config, task, model, folder })
    }

    /// How far the training has come; reads and verifies the checkpoint. `None` if the run was written without one, which the
    /// Python package does.
    pub fn load_saved(&self) -> Result<Option<Saved>> {
        self.folder.verify(|name| name == CHECKPOINT)?;
        if !self.folder.file(CHECKPOINT).exists() {
            return Ok(None);
        }
        let model = self.task.model(&self.config, &Device::flex())?;
        Ok(Some(self.folder.load_checkpoint(model, optimizer(&self.config.training))?.saved))
    }
}

/// Sums over the predicted tokens of a batch.
pub struct Loss {
    /// `Σ −log p(token)`.
    pub plain: Tensor<1>,
    /// `Σ −(1−ε)·log p(token) − ε·mean_v log p(v)`: what is minimised, `ε` being the label smoothing.
    pub smoothed: Tensor<1>,
}

pub struct Vocabulary {
    /// What it is of, such as `source`.
    pub side: &'static str,
    pub kind: &'static str,
    pub size: usize,
}

impl Display for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What has no tokenizer has no tokens.
        if ["label", "series", "forecast"].contains(&self.side) {
            let one = self.kind.trim_end_matches('s');
            return write!(f, "{} {}", self.size, if self.size == 1 { one } else { self.kind });
        }
        write!(f, "{} ({} tokens)", self.kind, self.size)
    }
}

/// As a task answers.
pub type How<'a, T> = Answering<'a, <T as Task>::Settings>;

pub struct Answering<'a, S> {
    pub config: &'a Config<S>,
    pub beam: usize,
    pub workers: &'a Workers,
    /// Where the texts come from, and the line in which each stands: for errors.
    pub name: &'a str,
    pub line: &'a (dyn Fn(usize) -> usize + Sync),
}

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
