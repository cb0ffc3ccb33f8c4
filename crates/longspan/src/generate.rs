//! Decoding, a token at a time: greedy and beam search on a [`Seq2Seq`], and texts that a [`LanguageModel`] draws.
//!
//! All are deterministic: equal scores are broken by the lower token, then by the earlier beam, and draws come from a seed.

use burn::tensor::{Int, Tensor};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

use crate::attention::index_tensor;
use crate::error::{Error, Result, argument};
use crate::models::{DecoderState, LanguageModel, LanguageState, Seq2Seq};
use crate::sample::SampleOptions;

/// Where targets begin and end.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// The token that the decoder sees first.
    pub start: usize,
    /// The token that ends a target; it is not part of a hypothesis.
    pub end: usize,
    /// The longest target, without start and end.
    pub max_tokens: usize,
    /// `α` in the score `log p / (tokens + 1)^α` by which beam search ranks hypotheses of different lengths; 1 compares
    /// the mean log-probability of a token, 0 the probability of the whole.
    pub length_penalty: f64,
    /// Tokens that no target holds, such as padding: they are never candidates. Probabilities are the model's all the same.
    pub excluded: Vec<usize>,
}

impl GenerateOptions {
    /// Targets between `start` and `end` of at most `max_tokens` tokens, ranked by their mean log-probability.
    pub fn new(start: usize, end: usize, max_tokens: usize) -> Self {
        Self { start, end, max_tokens, length_penalty: 1.0, excluded: Vec::new() }
    }

    /// The same without these tokens.
    #[must_use]
    pub fn without(self, excluded: impl Into<Vec<usize>>) -> Self {
        Self { excluded: excluded.into(), ..self }
    }
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// The target's tokens, without start and end.
    pub tokens: Vec<usize>,
    /// The natural logarithm of the probability that the model gives these tokens, and the end if it came.
    pub log_probability: f64,
    /// `log_probability / (tokens + 1)^length_penalty`.
    pub score: f64,
    /// Whether the end token came before the limit of tokens.
    pub finished: bool,
}

/// Greedy search: takes the most likely next token until the end token comes, one hypothesis for each source. Finished
/// sources take no part in the remaining steps.
///
/// # Shapes
/// As in [`Seq2Seq::forward`].
///
/// # Errors
/// What [`Seq2Seq::encode`] refuses, tokens outside the vocabulary, and logits that are NaN or all −∞.
pub fn greedy(
    model: &Seq2Seq,
    source: Tensor<2, Int>,
    source_lengths: &[usize],
    options: &GenerateOptions,
) -> Result<Vec<Hypothesis>> {
    let hypotheses = beam_search(model, source, source_lengths, 1, options)?;
    Ok(hypotheses.into_iter().filter_map(|best| best.into_iter().next()).collect())
}

/// Beam search: keeps the `width` most likely prefixes of each source and gives up to `width` hypotheses for each, the
/// best score first. A prefix that ends keeps its place in the beam, and the search is over when all have ended. A
/// width of 1 is greedy search.
///
/// # Shapes
/// As in [`Seq2Seq::forward`].
///
/// # Errors
/// What [`Seq2Seq::encode`] refuses, a width of 0, tokens outside the vocabulary, and logits that are NaN or all −∞.
pub fn beam_search(
    model: &Seq2Seq,
    source: Tensor<2, Int>,
    source_lengths: &[usize],
    width: usize,
    options: &GenerateOptions,
) -> Result<Vec<Vec<Hypothesis>>> {
    let vocabulary = model.target_vocab();
    argument(width > 0, "beam search", "width", || "at least 1".into(), || width.to_string())?;
    let excluded = options.excluded.contains(&options.end);
    argument(!excluded, "beam search", "excluded", || "other tokens than the end".into(), || options.end.to_string())?;
    let penalty = options.length_penalty;
    argument(penalty.is_finite(), "beam search", "length_penalty", || "a number".into(), || penalty.to_string())?;
    let excluded = options.excluded.iter().map(|&token| ("excluded", token));
    for (name, token) in [("start", options.start), ("end", options.end)].into_iter().chain(excluded) {
        let expected = || format!("a token below {vocabulary}");
        argument(token < vocabulary, "beam search", name, expected, || token.to_string())?;
    }
    let state = model.start(model.encode_for(source, source_lengths, options.max_tokens.saturating_add(1))?);
    Search { model, options, width, answers: vec![Vec::new(); state.batch()] }.run(state)
}

/// A prefix that has not ended.
#[derive(Debug, Clone)]
struct Prefix {
    source: usize,
    tokens: Vec<usize>,
    log_probability: f64,
}

/// A prefix with one more token.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    row: usize,
    token: usize,
    log_probability: f64,
}

struct Search<'a> {
    model: &'a Seq2Seq,
    options: &'a GenerateOptions,
    width: usize,
    /// Hypotheses of each source.
    answers: Vec<Vec<Hypothesis>>,
}

impl Search<'_> {
    fn run(mut self, mut state: DecoderState) -> Result<Vec<Vec<Hypothesis>>> {
        let mut prefixes: Vec<Prefix> =
            (0..state.batch()).map(|source| Prefix { source, tokens: Vec::new(), log_probability: 0.0 }).collect();
        let stepper = self.model.stepper(&state)?;
        while !prefixes.is_empty() {
            let last: Vec<usize> =
                prefixes.iter().map(|p| p.tokens.last().copied().unwrap_or(self.options.start)).collect();
            let logits = self.model.step_by(&stepper, &last, &mut state)?;
            let chosen = self.extend(&prefixes, &rows_of(logits)?)?;
            let rows: Vec<usize> = chosen.iter().map(|candidate| candidate.row).collect();
            prefixes = chosen
                .into_iter()
                .map(|Candidate { row, token, log_probability }| {
                    let mut tokens = prefixes[row].tokens.clone();
                    tokens.push(token);
                    Prefix { source: prefixes[row].source, tokens, log_probability }
                })
                .collect();
            if !rows.iter().copied().eq(0..state.batch()) {
                state = state.select(&rows)?;
            }
        }
        for answers in &mut self.answers {
            // Stable: of equal scores the one that ended first stays ahead.
            answers.sort_by(|a, b| b.score.total_cmp(&a.score));
        }
        Ok(self.answers)
    }

    /// Adds one token to each prefix: stores those that end, and returns those that go on, source by source.
    fn extend(&mut self, prefixes: &[Prefix], logits: &[Vec<f32>]) -> Result<Vec<Candidate>> {
        let mut going_on = Vec::new();
        let mut first = 0;
        for group in prefixes.chunk_by(|a, b| a.source == b.source) {
            let source = group[0].source;
            let rows = first..first + group.len();
            first += group.len();
            if group[0].tokens.len() == self.options.max_tokens {
                for (row, prefix) in rows.zip(group) {
                    let next = self.candidates(row, prefix, &logits[row])?[0];
                    let ended = next.token == self.options.end;
                    let log_probability = if ended { next.log_probability } else { prefix.log_probability };
                    self.store(source, prefix.tokens.clone(), log_probability, ended);
                }
                continue;
            }
            let mut candidates = Vec::new();
            for row in rows {
                candidates.extend(self.candidates(row, &prefixes[row], &logits[row])?);
            }
            candidates.sort_by(|a, b| {
                b.log_probability.total_cmp(&a.log_probability).then(a.token.cmp(&b.token)).then(a.row.cmp(&b.row))
            });
            // An answer keeps its place in the beam, so a beam narrows as its prefixes end.
            for candidate in candidates.into_iter().take(self.width - self.answers[source].len()) {
                if candidate.token == self.options.end {
                    let tokens = prefixes[candidate.row].tokens.clone();
                    self.store(source, tokens, candidate.log_probability, true);
                } else {
                    going_on.push(candidate);
                }
            }
        }
        Ok(going_on)
    }

    /// The likeliest continuations of one prefix, best first, as many as could survive.
    fn candidates(&self, row: usize, prefix: &Prefix, logits: &[f32]) -> Result<Vec<Candidate>> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let finite = largest.is_finite() && !logits.iter().any(|x| x.is_nan());
        let got = || format!("NaN or infinity after {} tokens; the model's weights are broken", prefix.tokens.len());
        argument(finite, "generate", "logits", || "finite numbers".into(), got)?;
        let total = logits.iter().map(|&x| f64::from(x - largest).exp()).sum::<f64>().ln();
        let mut best: Vec<Candidate> = logits
            .iter()
            .enumerate()
            .filter(|(token, _)| !self.options.excluded.contains(token))
            .map(|(token, &x)| Candidate {
                row,
                token,
                log_probability: prefix.log_probability + f64::from(x - largest) - total,
            })
            .collect();
        let wanted = self.width.min(best.len());
        let order =
            |a: &Candidate, b: &Candidate| b.log_probability.total_cmp(&a.log_probability).then(a.token.cmp(&b.token));
        if wanted < best.len() {
            best.select_nth_unstable_by(wanted, order);
            best.truncate(wanted);
        }
        best.sort_by(order);
        Ok(best)
    }

    fn store(&mut self, source: usize, tokens: Vec<usize>, log_probability: f64, finished: bool) {
        let score = log_probability / ((tokens.len() + 1) as f64).powf(self.options.length_penalty);
        self.answers[source].push(Hypothesis { tokens, log_probability, score, finished });
    }
}

/// How a language model goes on with a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct TextOptions {
    /// The most tokens that are drawn; 256 by default.
    pub max_tokens: usize,
    /// How each is drawn.
    pub sample: SampleOptions,
    /// What the draws begin with: the same seed gives the same text.
    pub seed: u64,
    /// Tokens that end the text; they are not part of it.
    pub stop: Vec<usize>,
    /// Tokens that are never drawn, such as padding.
    pub excluded: Vec<usize>,
    /// What positive logits of tokens that are in the prompt or the text are divided by, and negative ones multiplied (Keskar et al. 2019); 1
    /// by default, for none.
    pub repetition_penalty: f32,
}

impl Default for TextOptions {
    fn default() -> Self {
        let (stop, excluded) = (Vec::new(), Vec::new());
        Self { max_tokens: 256, sample: SampleOptions::default(), seed: 0, stop, excluded, repetition_penalty: 1.0 }
    }
}

/// Goes on with a prompt after the tokens of `state`, and gives the tokens that it draws: each of them to `each` at once, which ends the
/// text by `false`. The state takes the prompt and all these tokens in; after an error it is as it was. A model on a training device applies
/// dropout: give `model.valid()`.
///
/// # Errors
/// No prompt, tokens outside the vocabulary, a repetition penalty of 0 or less, what [`SampleOptions::draw`] and
/// [`LanguageModel::prefill`] refuse.
pub fn generate_text(
    model: &LanguageModel,
    prompt: &[usize],
    state: &mut LanguageState,
    options: &TextOptions,
    mut each: impl FnMut(usize) -> bool,
) -> Result<Vec<usize>> {
    /// Tokens of a prompt that are read at a time.
    const SEGMENT: usize = 512;
    const NAME: &str = "generate text";
    let TextOptions { max_tokens, sample, seed, stop, excluded, repetition_penalty } = options;
    let vocabulary = model.vocab();
    let beyond = prompt.iter().chain(stop).chain(excluded).find(|&&token| token >= vocabulary);
    let got = || beyond.map_or("no prompt".into(), usize::to_string);
    let expected = || format!("one token or more, all below {vocabulary}");
    argument(!prompt.is_empty() && beyond.is_none(), NAME, "tokens", expected, got)?;
    let some = (0..vocabulary).any(|token| !excluded.contains(&token));
    argument(some, NAME, "excluded", || "fewer than all tokens".into(), || excluded.len().to_string())?;
    let holds = *repetition_penalty > 0.0 && repetition_penalty.is_finite();
    argument(holds, NAME, "repetition_penalty", || "a number above 0".into(), || repetition_penalty.to_string())?;
    let mut next = state.clone();
    let mut logits = Vec::new();
    for part in prompt.chunks(SEGMENT) {
        let ids = index_tensor(part, &model.embedding.weight.device()).unsqueeze::<2>();
        logits = rows_of(model.prefill(ids, &mut next)?)?.swap_remove(0);
    }
    let mut decoder = model.decoder(&next, 1).ok();
    let mut seen = vec![false; vocabulary];
    prompt.iter().for_each(|&token| seen[token] = true);
    let mut random = SplitMix64::seed_from_u64(*seed);
    let (mut tokens, mut goes_on) = (Vec::new(), true);
    while goes_on && tokens.len() < *max_tokens {
        // What is infinite stays so: it is never drawn, or an error.
        for (logit, _) in logits.iter_mut().zip(&seen).filter(|(logit, seen)| **seen && logit.is_finite()) {
            let penalized = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            *logit = penalized.clamp(f32::MIN, f32::MAX);
        }
        excluded.iter().for_each(|&token| logits[token] = f32::NEG_INFINITY);
        // 53 bits, as many as a number between 0 and 1 has.
        let token = sample.draw(&logits, (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64)?;
        if stop.contains(&token) {
            break;
        }
        tokens.push(token);
        seen[token] = true;
        goes_on = each(token);
        if let Some(decoder) = &mut decoder {
            logits = decoder.step(&[token])?.to_vec();
            continue;
        }
        logits = rows_of(model.step(&[token], &mut next)?)?.swap_remove(0);
    }
    if let Some(decoder) = decoder {
        next = decoder.state()?;
    }
    *state = next;
    Ok(tokens)
}

/// The rows of `[batch, vocabulary]`.
fn rows_of(logits: Tensor<2>) -> Result<Vec<Vec<f32>>> {
    let [_, vocabulary] = logits.dims();
    let numbers = logits.try_into_vec_as::<f32>().map_err(|error| Error::Device(error.to_string()))?;
    Ok(numbers.chunks(vocabulary).map(<[f32]>::to_vec).collect())
}
