//! Texts and their labels: a classifier learns to tell the label.

pub mod file;
mod model;

use std::path::Path;

use anyhow::{Result, bail};
use burn::tensor::Device;
use longspan::models::Classifier;
use sha2::Digest;

use super::batches::padded;
use super::feed::Shuffled;
use super::labels::{self, Scores, Target};
use super::lines;
use super::split::{self, Split, evenly};
use super::task::{Answer, Answering, Asked, Data, Loss, Task, Titles, Vocabulary};
use super::tokens::{END, Kind, Tokenizer};
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::run::write::write_atomic;
use crate::terminal::plot::Matrix;
use file::Labelled;

/// The side that the tokenizer's file is named for.
const SIDE: &str = "text";

/// The tokenizer of a run, and what it tells of a text.
pub struct Labels {
    tokenizer: Tokenizer,
    target: Target,
}

/// A text as ids, and what is to be told of it.
type Example = labels::Example<Vec<u32>>;

impl Task for Labels {
    type Example = Example;
    type Feed = Shuffled<Example>;
    type Carried = ();
    type Text = Labelled;
    type Model = Classifier;
    type Scores = Scores;

    const EXAMPLES: &str = "texts";

    fn begin(config: &mut RunConfig) -> Result<(Self, Data<Self>)> {
        let split = read_split(config)?;
        let kind = config.tokens.as_ref().map_or(Ok(Kind::Characters), |name| name.parse())?;
        let tokenizer = Tokenizer::build(&kind, split.train.iter().map(|labelled| labelled.text.as_str()))?;
        let target = Target::of(split.train.iter().map(|labelled| labelled.label.as_str()), config, Self::EXAMPLES)?;
        let task = Self { tokenizer, target };
        let data = task.encode(split, config)?;
        lines::make_absolute(config)?;
        config.tokens.get_or_insert(task.tokenizer.kind().into());
        Ok((task, data))
    }

    fn load(folder: &RunFolder) -> Result<Self> {
        Ok(Self { tokenizer: Tokenizer::load(&folder.tokenizer(SIDE))?, target: Target::load(folder)? })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        write_atomic(&folder.tokenizer(SIDE), self.tokenizer.to_json()?.as_bytes())?;
        self.target.store(folder)
    }

    fn data(&self, config: &RunConfig) -> Result<Data<Self>> {
        self.encode(read_split(config)?, config)
    }

    fn read(path: &Path, config: &RunConfig) -> Result<Vec<Labelled>> {
        file::read(path, &config.columns)
    }

    fn asked(&self, path: &Path, config: &RunConfig) -> Result<Option<Vec<Asked>>> {
        file::TEXT.asked(path, config.columns.text.as_ref())
    }

    fn titles(&self, config: &RunConfig) -> Titles {
        self.target.titles(config.columns.text.as_deref().unwrap_or(file::TEXT.key), &config.columns)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        vec![
            Vocabulary { side: SIDE, kind: self.tokenizer.kind(), size: self.tokenizer.len() },
            self.target.vocabulary(),
        ]
    }

    fn model(&self, config: &RunConfig, device: &Device) -> Result<Classifier> {
        model::model(config, self.tokenizer.len(), self.target.outputs(), device)
    }

    fn size(example: &Example) -> (usize, usize) {
        (1, example.input.len())
    }

    fn loss(&self, model: &Classifier, batch: &[&Example], smoothing: f64, device: &Device) -> Result<Loss> {
        let rows: Vec<&[u32]> = batch.iter().map(|example| example.input.as_slice()).collect();
        let (tokens, lengths) = padded(&rows, device);
        self.target.loss(
            batch.iter().map(|example| example.goal),
            |classes| model.loss(tokens.clone(), &lengths, classes, smoothing),
            |numbers| model.squared_error(tokens.clone(), &lengths, numbers),
        )
    }

    fn answer(&self, model: &Classifier, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<Answer>>> {
        let found = self.outputs(model, texts, how)?;
        Ok(found.iter().map(|row| self.target.answers(row)).collect())
    }

    fn cells(answers: &[Answer]) -> Vec<String> {
        Target::cells(answers)
    }

    fn measure(&self) -> &'static str {
        self.target.measure()
    }

    fn score(&self, model: &Classifier, texts: &[Labelled], how: &Answering<'_>) -> Result<Scores> {
        let (sources, labels): (Vec<&str>, Vec<&str>) =
            texts.iter().map(|labelled| (labelled.text.as_str(), labelled.label.as_str())).unzip();
        self.target.score(&labels, &self.outputs(model, &sources, how)?, Self::EXAMPLES)
    }

    fn picture(scores: &Scores) -> Option<Matrix> {
        scores.picture()
    }

    fn samples(_: &RunConfig, held_out: &[Labelled]) -> Vec<(String, Option<String>)> {
        evenly(held_out, 6).into_iter().map(|one| (one.text, Some(one.label))).collect()
    }

    fn introduce(&self, config: &RunConfig, data: &Data<Self>) -> String {
        format!(
            "{}: {} texts to learn from, {} held out; {}",
            config.data_name(),
            data.train.examples().len(),
            data.held_out.len(),
            self.target.introduce(data.train.examples().iter().map(|example| example.goal))
        )
    }

    fn unknown_pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        self.tokenizer.unknown_pieces(text)
    }
}

impl Labels {
    /// A text as the model gets it: with its end marked, so that none is empty.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text)?;
        ids.push(END);
        Ok(ids)
    }

    /// What the model gives for each text.
    fn outputs(&self, model: &Classifier, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<f32>>> {
        let rows = texts.iter().map(|text| self.ids(text)).collect::<Result<Vec<_>>>()?;
        labels::outputs(&rows, Vec::len, self.target.outputs(), how, |batch| {
            let (tokens, lengths) = padded(batch, &Device::flex());
            Ok(model.forward(tokens, &lengths)?)
        })
    }

    /// Texts as ids.
    fn encode(&self, split: Split<Labelled>, config: &RunConfig) -> Result<Data<Self>> {
        let examples = |texts: &[Labelled]| self.target.examples(texts, |one| &one.label, |one| self.ids(&one.text));
        let (train, development) = (examples(&split.train)?, examples(&split.development)?);
        labels::data(train, development, split.held_out, config, |Example { input: tokens, goal }, hash| {
            hash.update((tokens.len() as u64).to_le_bytes());
            goal.hash(hash);
            tokens.iter().for_each(|id| hash.update(id.to_le_bytes()));
        })
    }
}

/// Reads the texts that the settings name, by use.
fn read_split(config: &RunConfig) -> Result<Split<Labelled>> {
    let Some(path) = &config.labelled else { bail!("no labelled texts are given; name them with --labelled") };
    let read = |path: &Path| file::read(path, &config.columns);
    split::of(config, read(path)?, Labels::EXAMPLES, read, |labelled| &labelled.text)
}
