//! Answers of a model to texts, and their scores against targets.

use std::cmp::Reverse;

use anyhow::{Result, anyhow};
use burn::tensor::Device;
use longspan::generate::{GenerateOptions, Hypothesis, beam_search};
use longspan::models::Seq2Seq;

use super::Answering;
use super::example::{Example, source_ids};
use super::model;
use crate::tasks::batches::{micro_batches, padded};
use crate::tasks::memory::{self, NUMBER};
use crate::tasks::scores::{self, Score};
use crate::tasks::task::Answer;
use crate::tasks::tokens::{END, START, Tokenizer};

/// Sources decoded together. Decoding costs per step, not per source, until the matrix products fill the caches.
const BATCH: usize = 128;

/// Fewer only where there is not as much for every thread.
const LEAST: usize = 32;

/// Up to `beam` hypotheses for each text, the likeliest first. An empty text has one empty answer, which is certain.
pub fn search(
    seq2seq: &Seq2Seq,
    [tokenizer, target]: [&Tokenizer; 2],
    texts: &[&str],
    how: &Answering<'_>,
) -> Result<Vec<Vec<Hypothesis>>> {
    let mut answers: Vec<Vec<Hypothesis>> = vec![Vec::new(); texts.len()];
    let mut sources = Vec::new();
    for (place, text) in texts.iter().enumerate() {
        let at = |error| anyhow!("{}, line {}: {error}", how.name, (how.line)(place));
        let ids = tokenizer.encode(text).map_err(at)?;
        if ids.is_empty() {
            answers[place] = vec![Hypothesis { tokens: Vec::new(), log_probability: 0.0, score: 0.0, finished: true }];
        } else {
            sources.push((place, source_ids(&ids)));
        }
    }
    // Sources of similar lengths share a batch, so that little is padded.
    sources.sort_by_key(|(_, ids)| Reverse(ids.len()));
    let device = Device::flex();
    let longest = how.config.common().longest_answer.unwrap_or_default();
    let never = target.never();
    let beam = widest(seq2seq.target_vocab() - never.len(), longest).min(how.beam);
    let options = GenerateOptions::new(START as usize, END as usize, longest).without(never);
    check_beam(how, beam)?;
    // So many batches that no thread waits long for the last.
    let share = |batches: usize| sources.len().div_ceil(batches * how.workers.count);
    let size = share(4).max(LEAST).min(share(1)).min(BATCH / beam).max(1);
    let batches: Vec<_> =
        sources.chunks(size).flat_map(|part| micro_batches(part, |(_, ids)| (0, ids.len()))).collect();
    // Long sources take turns where the memory has no room for several.
    let each =
        sources.first().map_or(0.0, |(_, ids)| ids.len() as f64 * model::answering_bytes(how.config, beam, ids.len()));
    let in_turn = each * how.workers.count as f64 > memory::available();
    if let (true, Some((place, ids))) = (in_turn, sources.first()) {
        let what = || format!("{}, line {}: a text of {} tokens", how.name, (how.line)(*place), ids.len());
        memory::check(each, what, "shorten it, or keep fewer prefixes with --beam")?;
    }
    let answer = |batch: &&[(usize, Vec<u32>)]| {
        let rows: Vec<&[u32]> = batch.iter().map(|(_, ids)| ids.as_slice()).collect();
        let (source, lengths) = padded(&rows, &device);
        Ok(beam_search(seq2seq, source, &lengths, beam, &options)?)
    };
    // Each on all threads, or all at the same time.
    let turns = batches.chunks(if in_turn { 1 } else { batches.len().max(1) });
    let found = turns.map(|batches| how.workers.each(batches, answer)).collect::<Result<Vec<_>>>()?.concat();
    for ((place, _), hypotheses) in batches.into_iter().flatten().zip(found.into_iter().flatten()) {
        answers[*place] = hypotheses;
    }
    Ok(answers)
}

/// As many answers as there are: a wider beam finds nothing more.
fn widest(vocabulary: usize, tokens: usize) -> usize {
    // Every answer of up to so many tokens, the end among the vocabulary.
    u32::try_from(tokens).ok().and_then(|tokens| vocabulary.checked_pow(tokens)).unwrap_or(usize::MAX)
}

/// Refuses a beam whose decoder states the memory has no room for.
fn check_beam(how: &Answering<'_>, beam: usize) -> Result<()> {
    let config = how.config;
    // Of self- and cross-attention: a matrix and a vector for each head. Kept, selected, and computed from.
    let state = 2 * config.task.decoder_layers * config.model.d_model * (config.model.d_model / config.model.heads + 1);
    let bytes = 3.0 * NUMBER * beam as f64 * state as f64 * how.workers.count as f64;
    memory::check(bytes, || format!("--beam {beam}"), "keep fewer prefixes, such as --beam 8")
}

/// The hypotheses of a beam as text. Of those that print the same the likeliest stays.
pub fn to_texts(tokenizer: &Tokenizer, beam: &[Hypothesis]) -> Result<Vec<Answer>> {
    let mut answers: Vec<Answer> = Vec::with_capacity(beam.len());
    for hypothesis in beam {
        let target = tokenizer.decode(&ids(hypothesis))?;
        if !answers.iter().any(|answer| answer.target == target) {
            let Hypothesis { log_probability, score, finished, .. } = *hypothesis;
            answers.push(Answer { target, log_probability, score, finished });
        }
    }
    Ok(answers)
}

/// Scores the likeliest hypothesis for each example against its targets; `name` says where the examples come from.
pub fn score(tokenizer: &Tokenizer, examples: &[Example], found: &[Vec<Hypothesis>], name: &str) -> Result<Vec<Score>> {
    let mut scores = Vec::with_capacity(examples.len());
    for (example, hypotheses) in examples.iter().zip(found) {
        let answer = hypotheses.first().map(ids).unwrap_or_default();
        let targets: Vec<Vec<u32>> = example
            .targets
            .iter()
            .zip(&example.lines)
            .map(|(target, line)| {
                let ids = tokenizer.encode(target).map_err(|error| anyhow!("{name}, line {line}: {error}"))?;
                // What an answer does not print equals nothing: a target with an unknown token is not matched by "unknown".
                Ok(ids.into_iter().map(|id| if tokenizer.is_hidden(id) { u32::MAX } else { id }).collect())
            })
            .collect::<Result<_>>()?;
        scores.extend(scores::score(&answer, &targets));
    }
    Ok(scores)
}

fn ids(hypothesis: &Hypothesis) -> Vec<u32> {
    hypothesis.tokens.iter().map(|&token| token as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beam_is_no_wider_than_there_are_answers() {
        assert_eq!(widest(3, 2), 9);
        assert_eq!(widest(40, 0), 1);
        assert_eq!(widest(40, 1_000_000), usize::MAX);
    }
}
