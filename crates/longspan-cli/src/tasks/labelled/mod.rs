//! Texts and their labels: a classifier learns to tell the label.

mod file;
mod model;
mod scores;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use burn::tensor::Device;
use burn::tensor::activation::log_softmax;
use longspan::layers::CrossEntropyLoss;
use longspan::models::Classifier;
use sha2::{Digest, Sha256};

use super::batches::{micro_batches, padded};
use super::feed::Shuffled;
use super::lines;
use super::split::{Split, split};
use super::task::{Answer, Answering, Data, Loss, Task, Vocabulary};
use super::tokens::{END, Kind, Tokenizer};
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::run::write::write_atomic;
use file::Labelled;
use scores::Confusion;

/// The side that the tokenizer's file is named for, and the file of the labels.
const SIDE: &str = "text";
const LABELS: &str = "labels.json";

/// Development texts: enough for two digits, few enough to cost little.
const DEVELOPMENT: usize = 512;

/// Texts answered together.
const BATCH: usize = 64;

/// The tokenizer and the labels of a run.
pub struct Labels {
    tokenizer: Tokenizer,
    /// In the order of their ids.
    labels: Vec<String>,
}

/// A text as ids, and its label.
#[derive(Debug, Clone)]
pub struct Example {
    tokens: Vec<u32>,
    label: u32,
}

impl Task for Labels {
    type Example = Example;
    type Feed = Shuffled<Example>;
    type Carried = ();
    type Text = Labelled;
    type Model = Classifier;
    type Scores = Confusion;

    const EXAMPLES: &str = "texts";

    fn begin(config: &mut RunConfig) -> Result<(Self, Data<Self>)> {
        let split = read_split(config)?;
        let kind = config.tokens.as_ref().map_or(Ok(Kind::Characters), |name| name.parse())?;
        let tokenizer = Tokenizer::build(&kind, split.train.iter().map(|labelled| labelled.text.as_str()))?;
        let task = Self { tokenizer, labels: labels(&split.train, config)? };
        let data = task.encode(split, config)?;
        let paths = [&mut config.labelled, &mut config.development, &mut config.held_out];
        for path in paths.into_iter().flatten().filter(|path| !lines::is_standard_input(path)) {
            // The run may be resumed from another folder.
            *path = std::path::absolute(&*path)?;
        }
        config.tokens.get_or_insert(task.tokenizer.kind().into());
        Ok((task, data))
    }

    fn load(folder: &RunFolder) -> Result<Self> {
        let path = labels_of(folder);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| anyhow!("cannot read {}: {error}; the run folder is incomplete", path.display()))?;
        let labels = serde_json::from_str(&text)
            .map_err(|error| anyhow!("{}: {error}; the file is damaged: restore it or train again", path.display()))?;
        Ok(Self { tokenizer: Tokenizer::load(&folder.tokenizer(SIDE))?, labels })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        write_atomic(&folder.tokenizer(SIDE), self.tokenizer.to_json()?.as_bytes())?;
        write_atomic(&labels_of(folder), serde_json::to_string_pretty(&self.labels)?.as_bytes())
    }

    fn data(&self, config: &RunConfig) -> Result<Data<Self>> {
        self.encode(read_split(config)?, config)
    }

    fn read(path: &Path) -> Result<Vec<Labelled>> {
        file::read(path)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        vec![
            Vocabulary { side: SIDE, kind: self.tokenizer.kind(), size: self.tokenizer.len() },
            Vocabulary { side: "label", kind: "labels", size: self.labels.len() },
        ]
    }

    fn model(&self, config: &RunConfig, device: &Device) -> Result<Classifier> {
        model::model(config, self.tokenizer.len(), self.labels.len(), device)
    }

    fn size(example: &Example) -> (usize, usize) {
        (1, example.tokens.len())
    }

    fn loss(&self, model: &Classifier, batch: &[&Example], smoothing: f64, device: &Device) -> Result<Loss> {
        let rows: Vec<&[u32]> = batch.iter().map(|example| example.tokens.as_slice()).collect();
        let (tokens, lengths) = padded(&rows, device);
        let classes: Vec<u32> = batch.iter().map(|example| example.label).collect();
        let CrossEntropyLoss { plain, smoothed } = model.loss(tokens, &lengths, &classes, smoothing)?;
        Ok(Loss { plain, smoothed })
    }

    fn answer(&self, model: &Classifier, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<Answer>>> {
        let found = self.probabilities(model, texts, how)?;
        Ok(found.into_iter().map(|row| self.best(&row)).collect())
    }

    fn line(answers: &[Answer]) -> String {
        answers.first().map_or_else(String::new, |best| format!("{}\t{:.4}", best.target, best.log_probability.exp()))
    }

    fn score(&self, model: &Classifier, texts: &[Labelled], how: &Answering<'_>) -> Result<Confusion> {
        let sources: Vec<&str> = texts.iter().map(|labelled| labelled.text.as_str()).collect();
        let found = self.probabilities(model, &sources, how)?;
        let places = self.places();
        let answers: Vec<_> = texts
            .iter()
            .zip(&found)
            .map(|(labelled, row)| (places.get(labelled.label.as_str()).map(|&place| place as usize), likeliest(row)))
            .collect();
        Ok(Confusion::of(&self.labels, &answers))
    }

    fn samples(_: &RunConfig, held_out: &[Labelled]) -> Vec<(String, Option<String>)> {
        evenly(held_out, 6).into_iter().map(|one| (one.text, Some(one.label))).collect()
    }

    fn introduce(&self, config: &RunConfig, data: &Data<Self>) -> String {
        let mut counts = vec![0usize; self.labels.len()];
        data.train.examples().iter().for_each(|example| counts[example.label as usize] += 1);
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|&label| std::cmp::Reverse(counts[label]));
        let some = |label: &usize| format!("{} {}", self.labels[*label], counts[*label]);
        let named: Vec<String> = order.iter().take(5).map(some).collect();
        let more = order.len().saturating_sub(5);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        // A model that always gives the commonest label is right so often.
        let share = 100.0 * counts[order[0]] as f64 / data.train.examples().len().max(1) as f64;
        format!(
            "{}: {} texts to learn from, {} held out; {} labels: {}{more}; the commonest has {share:.0} %",
            config.data_name(),
            data.train.examples().len(),
            data.held_out.len(),
            self.labels.len(),
            named.join(", ")
        )
    }

    fn blocks(config: &RunConfig) -> String {
        format!("{} blocks", config.layers)
    }

    fn unknown_pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        self.tokenizer.unknown_pieces(text)
    }
}

fn labels_of(folder: &RunFolder) -> PathBuf {
    folder.path().join(LABELS)
}

/// Reads the texts that the settings name, by use.
fn read_split(config: &RunConfig) -> Result<Split<Labelled>> {
    let Some(path) = &config.labelled else { bail!("no labelled texts are given; name them with --labelled") };
    let mut split = split(file::read(path)?, |labelled| &labelled.text);
    for (part, own) in [(&mut split.development, &config.development), (&mut split.held_out, &config.held_out)] {
        if let Some(path) = own {
            // What would have been held out is learned from instead.
            split.train.extend(std::mem::replace(part, file::read(path)?));
        }
    }
    if split.train.is_empty() {
        bail!("{}: no texts are left to train on after a tenth is held out; give more texts", config.data_name());
    }
    Ok(split)
}

/// The labels of the training texts, by name.
fn labels(train: &[Labelled], config: &RunConfig) -> Result<Vec<String>> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for labelled in train {
        *counts.entry(&labelled.label).or_default() += 1;
    }
    let name = config.data_name();
    if let [(only, _)] = counts.iter().collect::<Vec<_>>()[..] {
        bail!("{name}: every text to train on has the label {only:?}; give texts of at least two labels");
    }
    if train.len() >= 8 && counts.len() * 2 > train.len() {
        bail!(
            "{name}: {} texts have {} labels; a label should come often: to answer with texts, train with --pairs",
            train.len(),
            counts.len()
        );
    }
    Ok(counts.into_keys().map(String::from).collect())
}

/// At most `count` items from all over a list, which may be sorted by label.
fn evenly<T: Clone>(items: &[T], count: usize) -> Vec<T> {
    let count = count.min(items.len());
    (0..count).map(|n| items[n * items.len() / count].clone()).collect()
}

/// The place of the largest number, of equal ones the first.
fn likeliest(row: &[f32]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap_or(0)
}

impl Labels {
    /// The place of each label.
    fn places(&self) -> HashMap<&str, u32> {
        self.labels.iter().map(String::as_str).zip(0..).collect()
    }

    /// A text as the model gets it: with its end marked, so that none is empty.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text)?;
        ids.push(END);
        Ok(ids)
    }

    /// The natural logarithms of the labels' probabilities, for each text.
    fn probabilities(&self, model: &Classifier, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<f32>>> {
        let mut rows =
            texts.iter().enumerate().map(|(place, text)| Ok((place, self.ids(text)?))).collect::<Result<Vec<_>>>()?;
        // Texts of similar lengths share a batch, so that little is padded.
        rows.sort_by_key(|(_, ids)| ids.len());
        let batches: Vec<_> =
            rows.chunks(BATCH).flat_map(|part| micro_batches(part, |(_, ids)| (1, ids.len()))).collect();
        let found = how.workers.run(&batches, |_, batches| {
            let mut found = Vec::new();
            for batch in batches {
                let ids: Vec<&[u32]> = batch.iter().map(|(_, ids)| ids.as_slice()).collect();
                let (tokens, lengths) = padded(&ids, &Device::flex());
                let logits = log_softmax(model.forward(tokens, &lengths)?, 1);
                let numbers: Vec<f32> =
                    logits.try_into_vec_as().map_err(|error| anyhow!("the device gave no numbers back: {error}"))?;
                let rows = numbers.chunks(self.labels.len()).map(<[f32]>::to_vec);
                found.extend(batch.iter().map(|(place, _)| *place).zip(rows));
            }
            Ok(found)
        })?;
        let mut all = vec![Vec::new(); texts.len()];
        for (place, row) in found.into_iter().flatten() {
            if row.iter().any(|x| x.is_nan()) {
                bail!("the model gives NaN; its weights are broken: train again");
            }
            all[place] = row;
        }
        Ok(all)
    }

    /// All labels, the likeliest first.
    fn best(&self, row: &[f32]) -> Vec<Answer> {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        let answer = |label: usize| {
            let log_probability = f64::from(row[label]);
            let target = self.labels[label].clone();
            Answer { target, log_probability, score: log_probability, finished: true }
        };
        order.into_iter().map(answer).collect()
    }

    /// Texts as ids.
    fn encode(&self, split: Split<Labelled>, config: &RunConfig) -> Result<Data<Self>> {
        let places = self.places();
        let ids = |texts: &[Labelled]| {
            let known = texts.iter().filter_map(|one| Some((one, *places.get(one.label.as_str())?)));
            known.map(|(one, label)| Ok(Example { tokens: self.ids(&one.text)?, label })).collect::<Result<Vec<_>>>()
        };
        let all = ids(&split.train)?;
        let fits = |example: &Example| example.tokens.len() <= config.max_tokens;
        let train: Vec<Example> = all.iter().filter(|example| fits(example)).cloned().collect();
        let longest = all.iter().map(|example| example.tokens.len()).max().unwrap_or(0);
        if train.is_empty() {
            bail!(
                "every training text has more than {} tokens, the longest {longest}: take them in with --set \
                 max_tokens={longest}",
                config.max_tokens
            );
        }
        let mut development = ids(&split.development)?;
        development.retain(fits);
        let development = evenly(&development, DEVELOPMENT);
        let (too_long, sha256) = (all.len() - train.len(), fingerprint(&train));
        let train = Shuffled::new(train, Self::size, config.batch_size, config.seed);
        Ok(Data { train, development, held_out: split.held_out, too_long, longest, sha256 })
    }
}

fn fingerprint(examples: &[Example]) -> String {
    let mut hash = Sha256::new();
    for Example { tokens, label } in examples {
        hash.update((tokens.len() as u64).to_le_bytes());
        hash.update(label.to_le_bytes());
        for id in tokens {
            hash.update(id.to_le_bytes());
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
