//! Synthetic tasks: sequences that are drawn from a seed, about which a model is to tell something.
//!
//! Reading order: [`generate`] and [`listops`] draw; [`model`] and [`compressor`] tell; this file joins them.

mod compressor;
mod generate;
mod listops;
mod model;

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use burn::tensor::Device;
use burn::tensor::activation::log_softmax;
use longspan::layers::CrossEntropyLoss;
use longspan::models::LanguageModel;
use serde::Serialize;

use super::batches::{Random, padded, values};
use super::feed::Feed;
use super::lines;
use super::scores::{Interval, likeliest};
use super::task::{self, Answer, Asked, Data, Loss, Predict, Shown, Task, Told, Vocabulary};
use crate::run::config::{self, SyntheticSettings};
use crate::run::folder::RunFolder;
use crate::run::seal::sha256;
use crate::terminal::samples::counted;
use crate::terminal::shell;
use compressor::Compressor;
use generate::{Sequence, Spec};
use model::Model;

type Config = config::Config<SyntheticSettings>;
type Answering<'a> = task::Answering<'a, SyntheticSettings>;

/// Sequences of the development loss, and those held out.
const DEVELOPMENT: u64 = 256;
const HELD_OUT: u64 = 1000;

const BATCH: usize = 16;

/// What the random streams of a seed are for.
const TRAINING: u64 = 0;
const FOR_DEVELOPMENT: u64 = 1;
const FOR_SCORES: u64 = 2;

/// A run on drawn sequences, and the model that it trains.
pub struct Synthetic<M> {
    spec: Spec,
    model: PhantomData<fn() -> M>,
}

/// What a language model tells at places of a sequence.
pub type Telling = Synthetic<LanguageModel>;

/// What a model tells of a whole sequence from one row.
pub type Compressing = Synthetic<Compressor>;

/// Sequences drawn anew for every step, from the seed and the step alone.
pub struct Drawn {
    spec: Spec,
    seed: u64,
    batch: Vec<Sequence>,
    batch_size: usize,
}

impl Feed for Drawn {
    type Example = Sequence;

    fn per_epoch(&self) -> usize {
        1
    }

    fn tokens(&self) -> f64 {
        f64::INFINITY
    }

    fn batch(&mut self, step: usize) -> Result<Vec<&Sequence>> {
        let first = step as u64 * self.batch_size as u64;
        self.batch = (0..self.batch_size as u64).map(|n| draw(&self.spec, self.seed, TRAINING, first + n)).collect();
        Ok(self.batch.iter().collect())
    }

    fn probe(&self) -> &[Sequence] {
        &self.batch
    }
}

fn draw(spec: &Spec, seed: u64, what_for: u64, n: u64) -> Sequence {
    spec.draw(&mut Random::new(seed, 3 * n + what_for), what_for == FOR_SCORES)
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recalled {
    pub sequences: usize,
    pub questions: usize,
    pub recalled: Interval,
}

impl task::Scores for Recalled {}

impl Display for Recalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {}", counted(self.sequences, "sequences"), counted(self.questions, "questions"))?;
        writeln!(f, "recalled             {}", self.recalled.in_percent())
    }
}

impl<M: Model> Task for Synthetic<M> {
    const EXAMPLES: &str = "sequences";

    type Example = Sequence;
    type Feed = Drawn;
    type Carried = ();
    type Text = Sequence;
    type Model = M;
    type Scores = Recalled;
    type Settings = SyntheticSettings;

    fn begin(config: &mut Config) -> Result<(Self, Data<Self>)> {
        let task = Self::of(config)?;
        config.task.synthetic = task.spec.to_string();
        let data = task.data(config)?;
        Ok((task, data))
    }

    fn load(_: &RunFolder, config: &Config) -> Result<Self> {
        Self::of(config)
    }

    fn store(&self, _: &RunFolder) -> Result<()> {
        Ok(())
    }

    fn data(&self, config: &Config) -> Result<Data<Self>> {
        let (spec, seed) = (&self.spec, config.training.seed);
        let some = |what_for, count| (0..count).map(|n| draw(spec, seed, what_for, n)).collect();
        let sha256 = sha256(format!("{spec} {seed}").as_bytes());
        Ok(Data {
            train: Drawn { spec: spec.clone(), seed, batch: Vec::new(), batch_size: config.training.batch_size },
            development: some(FOR_DEVELOPMENT, DEVELOPMENT),
            held_out: some(FOR_SCORES, HELD_OUT),
            too_long: 0,
            longest: spec.length(),
            sha256,
        })
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        vec![Vocabulary { side: "sequence", kind: "numbers", size: self.spec.tokens() }]
    }

    fn model(&self, config: &Config, device: &Device) -> Result<M> {
        M::new(config, self.spec.tokens(), self.spec.length(), device)
    }

    fn size(sequence: &Sequence) -> (usize, usize) {
        let asked = sequence.right.iter().flatten().count();
        (asked, sequence.tokens.len() - asked)
    }

    fn loss(&self, model: &M, batch: &[&Sequence], smoothing: f64, device: &Device) -> Result<Loss> {
        let rows: Vec<&[u32]> = batch.iter().map(|sequence| sequence.tokens.as_slice()).collect();
        let (tokens, _) = padded(&rows, device);
        let longest = tokens.dims()[1];
        let right = |sequence: &&Sequence| {
            let beyond = longest - sequence.right.len();
            sequence.right.clone().into_iter().chain(std::iter::repeat_n(None, beyond))
        };
        let right = batch.iter().flat_map(right).collect();
        let CrossEntropyLoss { plain, smoothed } = model.loss(tokens, right, smoothing)?;
        Ok(Loss { plain, smoothed })
    }

    fn usual_steps(_: usize) -> usize {
        4000
    }

    fn score(&self, model: &M, sequences: &[Sequence], how: &Answering<'_>) -> Result<Recalled> {
        for (place, sequence) in sequences.iter().enumerate() {
            let checked = self.check(&sequence.tokens, sequence.right.iter().flatten().copied());
            checked.map_err(lines::in_line(how.name, (how.line)(place)))?;
        }
        let vocabulary = self.spec.tokens();
        let found = how.workers.run(sequences, |_, part| {
            let mut found = Vec::new();
            for batch in part.chunks(BATCH) {
                let tokens: Vec<&[u32]> = batch.iter().map(|sequence| sequence.tokens.as_slice()).collect();
                let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
                let asked = |sequence: &Sequence| {
                    let places = 0..sequence.right.len();
                    places.filter_map(|at| Some((at, sequence.right[at]? as usize))).collect::<Vec<_>>()
                };
                let asked: Vec<Vec<(usize, usize)>> = batch.iter().map(asked).collect();
                let rows =
                    asked.iter().enumerate().flat_map(|(n, asked)| asked.iter().map(move |(at, _)| n * longest + at));
                let rows: Vec<usize> = rows.collect();
                let logits = values(model.at(padded(&tokens, &Device::flex()).0, &rows)?)?;
                let mut told = logits.chunks(vocabulary).map(likeliest);
                for asked in asked {
                    let right = asked.iter().zip(&mut told).filter(|((_, right), told)| right == told).count();
                    found.push((right as f64, asked.len() as f64));
                }
            }
            Ok(found)
        })?;
        let found = found.concat();
        let recalled = Interval::share(&found).within(0.0, 1.0);
        let questions = found.iter().map(|(_, asked)| asked).sum::<f64>() as usize;
        Ok(Recalled { sequences: sequences.len(), questions, recalled })
    }

    fn evaluate(&self, model: &M, path: &Path, how: &Answering<'_>) -> Result<Recalled> {
        self.score(model, &Self::read(path)?, how)
    }

    fn show(&self, _: &M, _: &[Sequence], _: &Answering<'_>, folder: &str) -> Result<Shown> {
        Ok(Shown { text: String::new(), next: format!("{} info {folder}", shell::program()), picture: None })
    }

    fn introduce(&self, config: &Config, _: &Data<Self>) -> String {
        let length = self.spec.length();
        format!(
            "{}: sequences of up to {length} tokens, drawn anew for every step; {HELD_OUT} held out",
            config.data_name()
        )
    }
}

impl<M: Model> Predict for Synthetic<M> {
    fn predict(&self, model: &M, asked: &[Asked], how: &Answering<'_>) -> Result<Vec<Told>> {
        task::answered(asked, |texts| self.answer(model, texts, how), task::likeliest)
    }
}

impl<M: Model> Synthetic<M> {
    /// Lines of tokens as numbers, then a tab and what is to be given after the last one, or, of what is compressed, all but the last.
    fn read(path: &Path) -> Result<Vec<Sequence>> {
        let (name, bytes) = (lines::name(path), lines::read(path)?);
        let all = lines::each(&lines::text(&bytes, &name)?, &name, |line, _| {
            let Some((tokens, right)) = line.split_once('\t') else {
                bail!("no tab; write tokens such as `3 130 7 201 3`, a tab, and what is right after them");
            };
            let (tokens, right) = (numbers(tokens)?, numbers(right)?);
            let places = M::asked(tokens.len());
            if right.len() != places.len() {
                bail!("{} tokens after the tab, expected {}", right.len(), places.len());
            }
            let mut asked = vec![None; tokens.len()];
            places.zip(right).for_each(|(place, token)| asked[place] = Some(token));
            Ok(Some(Sequence { tokens, right: asked }))
        })?;
        if all.is_empty() {
            bail!("{name}: no sequences in it; give lines of tokens, a tab, and what is right after them");
        }
        Ok(all)
    }

    fn answer(&self, model: &M, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<Answer>>> {
        let mut all = Vec::with_capacity(texts.len());
        for (place, text) in texts.iter().enumerate() {
            let tokens = numbers(text).and_then(|tokens| self.check(&tokens, None).map(|()| tokens));
            let tokens = tokens.map_err(lines::in_line(how.name, (how.line)(place)))?;
            let places: Vec<usize> = M::asked(tokens.len()).collect();
            let logits = model.at(padded(&[&tokens], &Device::flex()).0, &places)?;
            let found = values(log_softmax(logits, 1))?;
            let mut beam = vec![(Vec::new(), 0.0)];
            for found in found.chunks(self.spec.tokens()) {
                // What is told at one place does not depend on the others.
                let one = |(told, sum): &(Vec<String>, f64)| {
                    let tokens = found.iter().enumerate();
                    let more = |(token, p): (usize, &f32)| {
                        ([told.as_slice(), &[token.to_string()]].concat(), sum + f64::from(*p))
                    };
                    tokens.map(more).collect::<Vec<_>>()
                };
                beam = beam.iter().flat_map(one).collect();
                beam.sort_by(|a, b| b.1.total_cmp(&a.1));
                beam.truncate(how.beam);
            }
            let answer = |(told, log_probability): (Vec<String>, f64)| {
                let score = log_probability / told.len() as f64;
                Answer { target: told.join(" "), log_probability, score, finished: true }
            };
            all.push(beam.into_iter().map(answer).collect());
        }
        Ok(all)
    }

    fn of(config: &Config) -> Result<Self> {
        Ok(Self { spec: config.task.synthetic.parse()?, model: PhantomData })
    }

    /// Refuses tokens that are not of this task, and too many or too few of them.
    fn check(&self, tokens: &[u32], right: impl IntoIterator<Item = u32>) -> Result<()> {
        let (limit, length) = (self.spec.tokens(), self.spec.length());
        if let Some(token) = tokens.iter().copied().chain(right).find(|&token| token as usize >= limit) {
            bail!("the token {token} is unknown; those of this run are 0 to {}", limit - 1);
        }
        if M::WHOLE && tokens.len() != length {
            bail!("{} tokens; this run takes {length}, the last of them {}", tokens.len(), limit - 1);
        }
        Ok(())
    }
}

fn numbers(text: &str) -> Result<Vec<u32>> {
    let number =
        |word: &str| word.parse().map_err(|_| anyhow!("{word:?} is no token; write whole numbers with space between"));
    let found: Vec<u32> = text.split_whitespace().map(number).collect::<Result<_>>()?;
    if found.is_empty() {
        bail!("no token in it; write whole numbers with space between");
    }
    Ok(found)
}
