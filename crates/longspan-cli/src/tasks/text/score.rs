//! How well a model predicts texts: bits per byte.

use std::fmt::{self, Display};
use std::sync::Arc;

use anyhow::Result;
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::models::{LanguageModel, LanguageState};
use serde::Serialize;

use super::corpus::{Corpus, Piece};
use crate::tasks::scores::{Interval, Z};
use crate::tasks::tokens::{START, Tokenizer, UNKNOWN};
use crate::terminal::samples::counted;

/// Tokens computed at a time.
const SEGMENT: usize = 512;

/// A stretch of a corpus.
#[derive(Debug, Clone)]
pub struct Passage {
    pub corpus: Arc<Corpus>,
    pub from: u64,
    pub to: u64,
}

/// Reads texts in order and sums up what they cost. Its memory does not grow.
pub struct Scorer<'a> {
    model: &'a LanguageModel,
    tokenizer: &'a Tokenizer,
    /// Tokens after which the state begins anew, if it has to.
    limit: Option<usize>,
    state: LanguageState,
    last: u32,
    pub sums: Sums,
}

/// Sums over pieces of text: of bits, bytes, and their products.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sums {
    pieces: f64,
    bits: f64,
    bytes: f64,
    bits_bits: f64,
    bits_bytes: f64,
    bytes_bytes: f64,
    tokens: usize,
    unknown: usize,
}

impl<'a> Scorer<'a> {
    /// Before a text.
    pub fn new(model: &'a LanguageModel, tokenizer: &'a Tokenizer, limit: Option<usize>) -> Self {
        Self { model, tokenizer, limit, state: LanguageState::default(), last: START, sums: Sums::default() }
    }

    /// Another text begins.
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
            let loss = self.model.loss_from(row(&read, &Device::flex()), some, 0.0, &mut self.state)?;
            bits += f64::from(loss.plain.into_scalar::<f32>()) / std::f64::consts::LN_2;
            self.last = some[some.len() - 1];
            rest = others;
        }
        self.sums.add(bits, bytes.len() as f64);
        self.sums.tokens += tokens.len();
        self.sums.unknown += unknown;
        Ok(())
    }
}

/// One row of tokens.
pub fn row(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), device)
}

impl Sums {
    /// One more piece.
    fn add(&mut self, bits: f64, bytes: f64) {
        self.pieces += 1.0;
        self.bits += bits;
        self.bytes += bytes;
        self.bits_bits += bits * bits;
        self.bits_bytes += bits * bytes;
        self.bytes_bytes += bytes * bytes;
    }

    /// The sums of both.
    pub fn join(self, other: Self) -> Self {
        Self {
            pieces: self.pieces + other.pieces,
            bits: self.bits + other.bits,
            bytes: self.bytes + other.bytes,
            bits_bits: self.bits_bits + other.bits_bits,
            bits_bytes: self.bits_bytes + other.bits_bytes,
            bytes_bytes: self.bytes_bytes + other.bytes_bytes,
            tokens: self.tokens + other.tokens,
            unknown: self.unknown + other.unknown,
        }
    }

    /// Bits per byte, with the interval of the ratio estimator over pieces (Cochran 1977, §6.4).
    pub fn result(self) -> BitsPerByte {
        let rate = if self.bytes > 0.0 { self.bits / self.bytes } else { 0.0 };
        let n = self.pieces;
        let interval = (n >= 2.0).then(|| {
            let squares = self.bits_bits - 2.0 * rate * self.bits_bytes + rate * rate * self.bytes_bytes;
            let half = Z * (n / (n - 1.0) * squares.max(0.0)).sqrt() / self.bytes;
            [(rate - half).max(0.0), rate + half]
        });
        let [low, high] = interval.map_or([None; 2], |interval| interval.map(Some));
        BitsPerByte {
            bits_per_byte: Interval { rate, low, high },
            bytes: self.bytes as u64,
            tokens: self.tokens,
            unknown: self.unknown,
        }
    }
}

/// How well a text was predicted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BitsPerByte {
    pub bits_per_byte: Interval,
    pub bytes: u64,
    pub tokens: usize,
    /// Tokens that did not occur in training.
    pub unknown: usize,
}

impl Display for BitsPerByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Interval { rate, .. } = self.bits_per_byte;
        write!(f, "{rate:.3} bits per byte{}", self.bits_per_byte.confidence(3))?;
        writeln!(f, "\n{} in {}", counted(self.bytes as usize, "bytes"), counted(self.tokens, "tokens"))?;
        if self.unknown > 0 {
            let unknown = counted(self.unknown, "tokens");
            writeln!(f, "{unknown} did not occur in training and cost 8 bits a byte more")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_that_of_the_ratio_estimator() {
        let pieces = [(20.0, 10.0), (33.0, 12.0), (9.0, 6.0), (41.0, 20.0)];
        let mut sums = Sums::default();
        for (bits, bytes) in pieces {
            sums.add(bits, bytes);
        }
        let found = sums.result().bits_per_byte;
        let rate = 103.0 / 48.0;
        let squares: f64 = pieces.iter().map(|(bits, bytes)| (bits - rate * bytes).powi(2)).sum();
        let half = Z * (4.0 / 3.0 * squares).sqrt() / 48.0;
        assert!((found.rate - rate).abs() < 1e-12);
        assert!((found.low.unwrap() - (rate - half)).abs() < 1e-9);
        assert!((found.high.unwrap() - (rate + half)).abs() < 1e-9);
        let mut one = Sums::default();
        one.add(20.0, 10.0);
        assert_eq!(one.result().bits_per_byte, Interval { rate: 2.0, low: None, high: None });
        let mut rest = Sums::default();
        pieces[1..].iter().for_each(|&(bits, bytes)| rest.add(bits, bytes));
        assert_eq!(one.join(rest), sums);
    }
}
