//! Answers of a model to texts, and their scores against targets.

use std::path::PathBuf;

use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::Args;
use longspan::generate::{GenerateOptions, Hypothesis, beam_search};
use longspan::models::Seq2Seq;

use crate::data::Example;
use crate::metrics::{self, Score};
use crate::model::{Trained, padded};
use crate::tokens::{END, START, Tokenizer, UNKNOWN};
use crate::train::{Workers, source_ids};

/// Sources decoded together. Decoding costs per step, not per source, until the matrix products fill the caches.
const BATCH: usize = 128;

/// Which run answers and how: the arguments of every command that asks one.
#[derive(Args)]
pub struct Search {
    /// The folder of a run
    pub run: PathBuf,
    /// Keep so many prefixes while searching; 1 takes the likeliest token each time
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub beam: usize,
}

impl Search {
    /// Reads the run, and starts threads to answer on.
    pub fn open(&self) -> Result<(Trained, Workers)> {
        if self.beam == 0 {
            bail!("--beam 0: expected at least 1");
        }
        let trained = Trained::load(&self.run)?;
        let workers = Workers::new(std::thread::available_parallelism().map_or(1, usize::from).min(8))?;
        Ok((trained, workers))
    }
}

/// What answering needs of a run.
pub struct Answerer<'a> {
    pub model: &'a Seq2Seq,
    pub source: &'a Tokenizer,
    pub target: &'a Tokenizer,
    /// The longest answer.
    pub max_tokens: usize,
    pub beam: usize,
    pub workers: &'a Workers,
}

impl Answerer<'_> {
    /// Up to `beam` answers to each text, the likeliest first. An empty text has one empty answer, which is certain.
    pub fn answer(&self, texts: &[&str]) -> Result<Vec<Vec<Hypothesis>>> {
        let mut answers: Vec<Vec<Hypothesis>> = vec![Vec::new(); texts.len()];
        let mut sources = Vec::new();
        for (place, text) in texts.iter().enumerate() {
            let ids = self.source.encode(text)?;
            if ids.is_empty() {
                answers[place] =
                    vec![Hypothesis { tokens: Vec::new(), log_probability: 0.0, score: 0.0, finished: true }];
            } else {
                sources.push((place, source_ids(&ids)));
            }
        }
        // Of similar lengths, so that little is padded.
        sources.sort_by_key(|(_, ids)| ids.len());
        let device = Device::flex();
        let options = GenerateOptions::new(START as usize, END as usize, self.max_tokens);
        let size = BATCH.min(sources.len().div_ceil(self.workers.count())).max(1);
        let batches: Vec<_> = sources.chunks(size).collect();
        let found = self.workers.run(&batches, false, |batches| {
            let mut found = Vec::new();
            for batch in batches {
                let rows: Vec<&[u32]> = batch.iter().map(|(_, ids)| ids.as_slice()).collect();
                let (source, lengths) = padded(&rows, &device);
                let hypotheses = beam_search(self.model, source, &lengths, self.beam, &options)?;
                found.extend(batch.iter().map(|(place, _)| *place).zip(hypotheses));
            }
            Ok(found)
        })?;
        for (place, hypotheses) in found.into_iter().flatten() {
            answers[place] = hypotheses;
        }
        Ok(answers)
    }

    /// An answer as text.
    pub fn text(&self, hypothesis: &Hypothesis) -> Result<String> {
        self.target.decode(&ids(hypothesis))
    }

    /// Scores the likeliest answer to each example against its targets.
    pub fn score(&self, examples: &[Example]) -> Result<Vec<Score>> {
        let texts: Vec<&str> = examples.iter().map(|example| example.source.as_str()).collect();
        let answers = self.answer(&texts)?;
        let mut scores = Vec::with_capacity(examples.len());
        for (example, hypotheses) in examples.iter().zip(&answers) {
            let answer = hypotheses.first().map(ids).unwrap_or_default();
            let targets: Vec<Vec<u32>> = example
                .targets
                .iter()
                .map(|target| Ok(self.target.encode(target)?.into_iter().map(distinct).collect()))
                .collect::<Result<_>>()?;
            scores.extend(metrics::score(&answer, &targets));
        }
        Ok(scores)
    }
}

fn ids(hypothesis: &Hypothesis) -> Vec<u32> {
    hypothesis.tokens.iter().map(|&token| token as u32).collect()
}

/// A token of a target that the model has no name for must not count as right when the model answers "unknown".
fn distinct(id: u32) -> u32 {
    if id == UNKNOWN { u32::MAX } else { id }
}
