//! Texts and their labels: a classifier learns to tell the label.

pub mod file;

use std::path::Path;

use anyhow::{Result, bail};
use burn::tensor::Device;
use longspan::models::{Classifier, ClassifierConfig};
use sha2::Digest;

use super::batches::padded;
use super::feed::{self, Shuffled};
use super::labels::{self, Scores, Target};
use super::simple::Simple;
use super::simple::bag::Bag;
use super::split::{self, Split, evenly};
use super::stack::{self, stacked};
use super::task::{self, Answer, Asked, Data, Loss, Predict, Shown, Task, Titles, Told, Vocabulary};
use super::tokens::{END, Kind, Tokenizer};
use crate::run::columns::Columns;
use crate::run::config::{self, LabelledSettings};
use crate::run::folder::RunFolder;
use crate::terminal::samples::counted;
use file::Labelled;

type Config = config::Config<LabelledSettings>;
type Answering<'a> = task::Answering<'a, LabelledSettings>;

const SIDE: &str = "text";

const BAG: &str = "bag.safetensors";

pub struct Labels {
    tokenizer: Tokenizer,
    target: Target,
    /// None in runs of earlier versions.
    bag: Option<Bag>,
}

type Example = labels::Example<Vec<u32>>;

impl Task for Labels {
    type Example = Example;
    type Feed = Shuffled<Example>;
    type Carried = ();
    type Text = Labelled;
    type Model = Classifier;
    type Scores = Scores;
    type Settings = LabelledSettings;

    const EXAMPLES: &str = "texts";

    fn begin(config: &mut Config) -> Result<(Self, Data<Self>)> {
        let (split, columns) = read_split(config)?;
        config.task.files.columns = columns;
        let kind = config.task.tokens.as_ref().map_or(Ok(Kind::Characters), |name| name.parse())?;
        let tokenizer = Tokenizer::build(&kind, split.train.iter().map(|labelled| labelled.text.as_str()))?;
        let name = config.data_name();
        let labels = split.train.iter().map(|labelled| labelled.label.as_str());
        let target = Target::of(labels, &mut config.task.labels.target, &name, Self::EXAMPLES)?;
        target.say_unlearned(&split, config.scored_names(), |one| &one.label);
        let (bag, unseen) = bag(&target, &split)?;
        let task = Self { tokenizer, target, bag: Some(bag) };
        let data = task.encode(split, unseen, config)?;
        config.task.tokens.get_or_insert(task.tokenizer.kind().into());
        Ok((task, data))
    }

    fn load(folder: &RunFolder, config: &Config) -> Result<Self> {
        let target = Target::load(folder)?;
        let has_bag = config.task.stack.base || folder.file(BAG).exists();
        let bag = has_bag.then(|| Bag::load(folder, BAG, target.outputs())).transpose()?;
        Ok(Self { tokenizer: Tokenizer::load(folder, SIDE)?, target, bag })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        self.tokenizer.store(folder, SIDE)?;
        self.bag.iter().try_for_each(|bag| bag.store(folder, BAG))?;
        self.target.store(folder)
    }

    fn data(&self, config: &Config) -> Result<Data<Self>> {
        let split = read_split(config)?.0;
        let unseen = if config.task.stack.base { bag(&self.target, &split)?.1 } else { Vec::new() };
        self.encode(split, unseen, config)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        vec![
            Vocabulary { side: SIDE, kind: self.tokenizer.kind(), size: self.tokenizer.len() },
            self.target.vocabulary(),
        ]
    }

    fn model(&self, config: &Config, device: &Device) -> Result<Classifier> {
        let (outputs, pooling) = (self.target.outputs(), config.task.labels.pooling);
        stacked!(ClassifierConfig::new(self.tokenizer.len(), outputs), config, pooling, outputs, device)
    }

    fn size(example: &Example) -> (usize, usize) {
        (1, example.input.len())
    }

    fn loss(&self, model: &Classifier, batch: &[&Example], smoothing: f64, device: &Device) -> Result<Loss> {
        let texts: Vec<&[u32]> = batch.iter().map(|example| example.input.as_slice()).collect();
        let (tokens, lengths) = padded(&texts, device);
        self.target.loss(batch, smoothing, model.forward(tokens, &lengths)?)
    }

    fn measure(&self) -> &'static str {
        self.target.measure()
    }

    fn score(&self, model: &Classifier, texts: &[Labelled], how: &Answering<'_>) -> Result<Scores> {
        let (sources, labels): (Vec<&str>, Vec<&str>) =
            texts.iter().map(|labelled| (labelled.text.as_str(), labelled.label.as_str())).unzip();
        self.target.score(&labels, &self.outputs(model, &sources, how)?, Self::EXAMPLES)
    }

    fn simple(&self, data: &Data<Self>, texts: &[Labelled], _: &Config) -> Result<Vec<Simple>> {
        let labels: Vec<&str> = texts.iter().map(|labelled| labelled.label.as_str()).collect();
        let regression = if let Target::Labels(_) = self.target { "logistic" } else { "ridge" };
        let of_bag = |bag: &Bag| {
            let rows = texts.iter().map(|one| bag.predict(&one.text)).collect();
            (format!("{regression} regression on words and pairs of words"), rows)
        };
        let goals = data.train.examples.iter().map(|example| example.goal);
        self.target.simple(&labels, goals, self.bag.iter().map(of_bag).collect(), Self::EXAMPLES)
    }

    fn evaluate(&self, model: &Classifier, path: &Path, how: &Answering<'_>) -> Result<Scores> {
        self.score(model, &file::read(path, &how.config.task.files.columns)?.0, how)
    }

    fn show(&self, model: &Classifier, held_out: &[Labelled], how: &Answering<'_>, folder: &str) -> Result<Shown> {
        let wanted = evenly(held_out, 6).into_iter().map(|one| (one.text, Some(one.label))).collect();
        task::sampled(wanted, |texts| self.answer(model, texts, how), folder)
    }

    fn introduce(&self, config: &Config, data: &Data<Self>) -> String {
        format!(
            "{}: {} to learn from, {} held out; {}{}",
            config.data_name(),
            counted(data.train.examples.len(), "texts"),
            data.held_out.len(),
            self.target.introduce(data.train.examples.iter().map(|example| example.goal)),
            match &self.bag {
                Some(bag) if config.task.stack.base =>
                    format!("; the model corrects a regression on {} words and pairs of words", bag.rarity.len()),
                _ => String::new(),
            }
        )
    }

    fn unknown_pieces(&self, text: &str) -> Vec<String> {
        self.tokenizer.unknown(text)
    }
}

impl Predict for Labels {
    fn asked(&self, path: &Path, config: &Config) -> Result<Option<Vec<Asked>>> {
        file::TEXT.asked(path, config.task.files.columns.text.as_ref())
    }

    fn titles(&self, config: &Config) -> Titles {
        self.target
            .titles(config.task.files.columns.text.as_deref().unwrap_or(file::TEXT.key), &config.task.files.columns)
    }

    fn predict(&self, model: &Classifier, asked: &[Asked], how: &Answering<'_>) -> Result<Vec<Told>> {
        task::answered(asked, |texts| self.answer(model, texts, how), Target::cells)
    }
}

impl Labels {
    fn answer(&self, model: &Classifier, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<Answer>>> {
        let found = self.outputs(model, texts, how)?;
        // An empty text has no label.
        let answers = |text: &str, row: &[f32]| if text.is_empty() { Vec::new() } else { self.target.answers(row) };
        Ok(texts.iter().zip(&found).map(|(text, row)| answers(text, row)).collect())
    }

    /// A text as the model gets it: with its end marked, so that none is empty.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text)?;
        ids.push(END);
        Ok(ids)
    }

    fn outputs(&self, model: &Classifier, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<f32>>> {
        let of_bag = |bag: &Bag| texts.iter().map(|text| bag.predict(text)).collect();
        let base: Vec<Vec<f32>> = self.base(how.config).map_or(Vec::new(), of_bag);
        if !base.is_empty() && stack::is_at_zero(&model.output, how.config) {
            return Ok(base);
        }
        let rows = texts.iter().map(|text| self.ids(text)).collect::<Result<Vec<_>>>()?;
        let found = labels::outputs(&rows, Vec::len, self.target.outputs(), how, |batch| {
            let (tokens, lengths) = padded(batch, &Device::flex());
            Ok(model.forward(tokens, &lengths)?)
        })?;
        Ok(labels::joined(found, base))
    }

    fn base(&self, config: &Config) -> Option<&Bag> {
        self.bag.as_ref().filter(|_| config.task.stack.base)
    }

    /// Texts as ids; `unseen` is what bags that have not seen them tell of those to learn from.
    fn encode(&self, split: Split<Labelled>, unseen: Vec<Vec<f32>>, config: &Config) -> Result<Data<Self>> {
        let base = self.base(config);
        let examples = |texts: &[Labelled], base: &dyn Fn(usize) -> Vec<f32>| {
            self.target.examples(texts, |one| &one.label, |one| self.ids(&one.text), base)
        };
        let train = examples(&split.train, &|n| base.map_or(Vec::new(), |_| unseen[n].clone()))?;
        let development =
            examples(&split.development, &|n| base.map_or(Vec::new(), |bag| bag.predict(&split.development[n].text)))?;
        let length = |example: &Example| example.input.len();
        feed::data(
            train,
            development,
            split.held_out,
            config,
            length,
            |Example { input: tokens, goal, .. }, hash| {
                hash.update((tokens.len() as u64).to_le_bytes());
                goal.hash(hash);
                tokens.iter().for_each(|id| hash.update(id.to_le_bytes()));
            },
            |one: &Labelled| vec![&one.text, &one.label],
        )
    }
}

/// The bag of the texts to learn from, and what is told of each by one that has not seen it.
fn bag(target: &Target, split: &Split<Labelled>) -> Result<(Bag, Vec<Vec<f32>>)> {
    let texts: Vec<&str> = split.train.iter().map(|one| one.text.as_str()).collect();
    Ok(Bag::fit(&texts, &target.goals(split.train.iter().map(|one| one.label.as_str()))?, target.outputs()))
}

/// The texts by their use, and what the columns of the main file are called.
fn read_split(config: &Config) -> Result<(Split<Labelled>, Columns)> {
    let Some(path) = config.first() else { bail!("no labelled texts are given; name them with --labelled") };
    let (all, columns) = file::read(path, &config.task.files.columns)?;
    let read = |path: &Path| Ok(file::read(path, &columns)?.0);
    let split = split::of(&config.task.files, &config.data_name(), all, Labels::EXAMPLES, read, |one| &one.text)?;
    Ok((split, columns))
}
