//! How well a model predicts texts: bits per byte.

use std::fmt::{self, Display};
use std::sync::Arc;

use anyhow::Result;
use burn::tensor::Device;
use longspan::models::{LanguageModel, LanguageState};
use serde::Serialize;

use super::corpus::{Corpus, Piece};
use crate::tasks::batches::padded;
use crate::tasks::scores::Interval;
use crate::tasks::task;
use crate::tasks::tokens::{START, Tokenizer, UNKNOWN};
use crate::terminal::samples::counted;

const SEGMENT: usize = 512;

#[derive(Debug, Clone)]
pub struct Passage {
    pub corpus: Arc<Corpus>,
    pub from: u64,
    pub to: u64,
}

/// Reads texts in order and adds up what they cost. Beside the cost of each piece its memory does not grow.
pub struct Scorer<'a> {
    model: &'a LanguageModel,
    tokenizer: &'a Tokenizer,
    /// Tokens after which the state begins anew, if it has to.
    limit: Option<usize>,
    state: LanguageState,
    last: u32,
    pub cost: Cost,
}

#[derive(Debug, Clone, Default)]
pub struct Cost {
    /// Bits and bytes of each piece.
    pieces: Vec<(f64, f64)>,
    tokens: usize,
    unknown: usize,
}

impl<'a> Scorer<'a> {
    pub fn new(model: &'a LanguageModel, tokenizer: &'a Tokenizer, limit: Option<usize>) -> Self {
        Self { model, tokenizer, limit, state: LanguageState::default(), last: START, cost: Cost::default() }
    }

    pub fn begin(&mut self) {
        (self.state, self.last) = (LanguageState::default(), START);
    }

    /// Reads on. An unknown piece of text costs its bytes beside the token that stands for it: 8 bits each.
    pub fn read(&mut self, Piece { bytes, before, .. }: &Piece) -> Result<()> {
        let tokens = self.tokenizer.encode_piece(before, bytes)?;
        let mut bits = 0.0;
        let unknown = tokens.iter().filter(|&&token| token == UNKNOWN).count();
        if unknown > 0 {
            let pieces = self.tokenizer.unknown_pieces(std::str::from_utf8(bytes)?);
            bits += 8.0 * pieces.iter().map(|piece| piece.len() as f64).sum::<f64>();
        }
        let mut rest = tokens.as_slice();
        while !rest.is_empty() {
            if self.limit.is_some_and(|limit| self.state.position() >= limit) {
                self.begin();
            }
            let room = self.limit.map_or(SEGMENT, |limit| SEGMENT.min(limit - self.state.position()));
            let (some, others) = rest.split_at(rest.len().min(room));
            let read: Vec<u32> = std::iter::once(self.last).chain(some.iter().copied()).take(some.len()).collect();
            let loss = self.model.loss_from(padded(&[read], &Device::flex()).0, some, 0.0, &mut self.state)?;
            bits += f64::from(loss.plain.into_scalar::<f32>()) / std::f64::consts::LN_2;
            self.last = some[some.len() - 1];
            rest = others;
        }
        self.cost.pieces.push((bits, bytes.len() as f64));
        self.cost.tokens += tokens.len();
        self.cost.unknown += unknown;
        Ok(())
    }
}

impl Cost {
    pub fn add(&mut self, other: Self) {
        self.pieces.extend(other.pieces);
        self.tokens += other.tokens;
        self.unknown += other.unknown;
    }

    pub fn result(&self) -> BitsPerByte {
        BitsPerByte {
            bits_per_byte: Interval::ratio(&self.pieces).within(0.0, f64::INFINITY),
            bytes: self.pieces.iter().map(|(_, bytes)| *bytes as u64).sum(),
            tokens: self.tokens,
            unknown: self.unknown,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BitsPerByte {
    pub bits_per_byte: Interval,
    pub bytes: u64,
    pub tokens: usize,
    pub unknown: usize,
}

impl task::Scores for BitsPerByte {
    fn is_behind(&self, simple: f64) -> bool {
        simple < self.bits_per_byte.rate
    }
}

impl Display for BitsPerByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Interval { rate, .. } = self.bits_per_byte;
        write!(f, "{rate:.3} bits per byte{}", self.bits_per_byte.confidence(3, ""))?;
        writeln!(f, "\n{} in {}", counted(self.bytes as usize, "bytes"), counted(self.tokens, "tokens"))?;
        if self.unknown > 0 {
            let unknown = counted(self.unknown, "tokens");
            writeln!(f, "{unknown} did not occur in training and cost 8 bits a byte more")?;
        }
        Ok(())
    }
}
