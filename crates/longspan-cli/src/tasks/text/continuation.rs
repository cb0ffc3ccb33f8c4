//! Going on with a text, token by token, in memory that does not grow.

use std::collections::VecDeque;

use anyhow::{Result, anyhow};
use burn::tensor::Device;
use longspan::models::{LanguageDecoder, LanguageModel, LanguageState};
use longspan::sample::SampleOptions;

use crate::tasks::batches::{Random, padded};
use crate::tasks::tokens::{END, START, Tokenizer};

/// Tokens of a prompt that are read at a time.
const SEGMENT: usize = 512;

pub struct Wish<'a> {
    pub prompt: &'a str,
    /// The most tokens; `None` for as many as are read.
    pub tokens: Option<usize>,
    pub sample: SampleOptions,
    pub seed: u64,
    /// Whether the text may end by itself, where the model has seen texts end.
    pub may_end: bool,
}

pub struct Generated {
    pub read: usize,
    pub drawn: usize,
    pub ended: bool,
}

/// Goes on with a prompt: hands text to `out` as it is complete, until `out` gives `false` or nothing is left to do. Where the
/// state cannot go on for ever it begins anew after `limit` tokens, from the latest eighth of them.
pub fn generate(
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    limit: Option<usize>,
    wish: &Wish<'_>,
    out: &mut dyn FnMut(&str) -> Result<bool>,
) -> Result<Generated> {
    let prompt = tokenizer.encode(wish.prompt)?;
    let mut walk = Walk { model, limit, state: LanguageState::default(), decoder: None, latest: VecDeque::new() };
    let beginning: Vec<u32> = std::iter::once(START).chain(prompt.iter().copied()).collect();
    let mut logits = Vec::new();
    for part in beginning.chunks(SEGMENT) {
        logits = walk.read(part)?;
    }
    let mut generated = Generated { read: prompt.len(), drawn: 0, ended: false };
    let mut decoder = tokenizer.decoder();
    // Only so that the first words join the prompt as the tokenizer joins words.
    for &token in &prompt[prompt.len().saturating_sub(8)..] {
        decoder.push(token)?;
    }
    let mut random = Random::new(wish.seed, 0);
    let never = tokenizer.never();
    while wish.tokens.is_none_or(|tokens| generated.drawn < tokens) {
        for &never in &never {
            logits[never] = f32::NEG_INFINITY;
        }
        if !wish.may_end {
            logits[END as usize] = f32::NEG_INFINITY;
        }
        // 53 bits, as many as a number between 0 and 1 has.
        let uniform = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
        let token = wish.sample.draw(&logits, uniform)? as u32;
        generated.drawn += 1;
        if token == END {
            generated.ended = true;
            break;
        }
        let text = decoder.push(token)?;
        if !out(&text)? {
            return Ok(generated);
        }
        logits = walk.read(&[token])?;
    }
    let rest = decoder.finish()?;
    if !rest.is_empty() {
        out(&rest)?;
    }
    Ok(generated)
}

/// A state that goes on for ever.
struct Walk<'a> {
    model: &'a LanguageModel,
    limit: Option<usize>,
    state: LanguageState,
    /// What takes single tokens after the prompt, where the state goes on for ever.
    decoder: Option<LanguageDecoder>,
    /// The latest tokens, where the state has a limit.
    latest: VecDeque<u32>,
}

impl Walk<'_> {
    /// Takes tokens in, and gives the logits of the next.
    fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let Some(limit) = self.limit else { return self.take(tokens) };
        let (mut logits, mut rest) = (None, tokens);
        while !rest.is_empty() {
            if self.state.position() >= limit {
                self.state = LanguageState::default();
                let latest: Vec<u32> = std::iter::once(START).chain(self.latest.iter().copied()).collect();
                self.take(&latest)?;
            }
            let (some, others) = rest.split_at(rest.len().min(limit - self.state.position()));
            self.latest.extend(some);
            let old = self.latest.len().saturating_sub(limit / 8);
            self.latest.drain(..old);
            logits = Some(self.take(some)?);
            rest = others;
        }
        logits.ok_or_else(|| anyhow!("no tokens to read; this is a bug: report it"))
    }

    fn take(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let logits = match tokens {
            [token] if self.limit.is_none() => {
                let decoder = match &mut self.decoder {
                    Some(decoder) => decoder,
                    None => self.decoder.insert(self.model.decoder(&self.state, 1)?),
                };
                return Ok(decoder.step(&[*token as usize])?.to_vec());
            }
            [token] => self.model.step(&[*token as usize], &mut self.state)?,
            _ => self.model.prefill(padded(&[tokens], &Device::flex()).0, &mut self.state)?,
        };
        logits.try_into_vec_as().map_err(|error| anyhow!("the device gave no numbers back: {error}"))
    }
}

/// Holds back text that may be the beginning of a stop string.
pub struct Stops<'a> {
    stops: &'a [String],
    held: String,
}

impl<'a> Stops<'a> {
    pub fn new(stops: &'a [String]) -> Self {
        Self { stops, held: String::new() }
    }

    /// The text that may be shown after `text` came, and whether a stop string came; what stands before it is then shown, and
    /// the string itself is not.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(place) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(place);
            return (std::mem::take(&mut self.held), true);
        }
        let begun = |from: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[from..]));
        let place = self.held.char_indices().map(|(place, _)| place).find(|&place| begun(place));
        let rest = self.held.split_off(place.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, rest), false)
    }

    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_string_is_found_over_pieces_and_not_shown() {
        let stops = ["END".to_string(), "\n\n".to_string()];
        let shown = |pieces: &[&str]| {
            let mut watch = Stops::new(&stops);
            let mut text = String::new();
            for piece in pieces {
                let (some, stopped) = watch.push(piece);
                text.push_str(&some);
                if stopped {
                    return (text, true);
                }
            }
            text.push_str(&watch.rest());
            (text, false)
        };
        assert_eq!(shown(&["a", "E", "N", "D", "b"]), ("a".into(), true));
        assert_eq!(shown(&["aEN", "d\n", "c", "\n\n"]), ("aENd\nc".into(), true));
        assert_eq!(shown(&["ab EN"]), ("ab EN".into(), false));
        assert_eq!(shown(&["EEND"]), ("E".into(), true));
        let mut none = Stops::new(&[]);
        assert_eq!(none.push("ä"), ("ä".into(), false));
    }
}
