//! Sequences that are drawn: what is to be recalled stands in them.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::str::FromStr;

use anyhow::{Error, Result, anyhow, bail};

use crate::tasks::batches::Random;

/// The least and the largest size.
const SIZES: std::ops::RangeInclusive<usize> = 1..=1 << 20;

/// A task with its sizes, such as `mqar:pairs=16,length=256,vocabulary=8192`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recall {
    pub kind: Kind,
    /// Pairs of key and value, or tokens to copy.
    pub pairs: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Tokens that keys and values, or contents, are drawn from.
    pub vocabulary: usize,
}

/// What is to be recalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Multi-query associative recall (Arora et al. 2024): `k₁ v₁ … kₙ vₙ`, then each key once more among random tokens, where its
    /// value is to be given. Keys come from the first half of the vocabulary, values from the second. Near places are likelier: the
    /// `x`-th has the weight `x^(a−1)` with `a = 0.01`.
    Mqar,
    /// In-context recall (Poli et al. 2024): pairs of a key and its value up to the end of the sequence, keys drawn from `pairs` many;
    /// the value of a key that has come before is to be given.
    Recall,
    /// Selective copying (Gu and Dao 2023): tokens at random places among blanks, then as many markers, where these tokens are to be
    /// given in their order.
    Copying,
}

impl Kind {
    const ALL: [(&str, Self); 3] = [("mqar", Self::Mqar), ("recall", Self::Recall), ("copying", Self::Copying)];
}

/// A sequence, and what is to be given at each place of it, if anything is.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub right: Vec<Option<u32>>,
}

impl FromStr for Recall {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        let Some((_, kind)) = Kind::ALL.into_iter().find(|(known, _)| *known == name.trim()) else {
            bail!("unknown synthetic task {name:?}; known are {}", Kind::ALL.map(|(name, _)| name).join(", "));
        };
        let (pairs, length, vocabulary) = match kind {
            Kind::Mqar => (8, 128, 256),
            Kind::Recall => (16, 128, 64),
            Kind::Copying => (16, 128, 16),
        };
        let mut found = Self { kind, pairs, length, vocabulary };
        for option in options.split(',').filter(|option| !option.trim().is_empty()) {
            let wrong = || anyhow!("--synthetic {text}: {option:?}; expected pairs=N, length=N or vocabulary=N");
            let (key, value) = option.split_once('=').ok_or_else(wrong)?;
            let value: usize = value.trim().parse().map_err(|_| wrong())?;
            if !SIZES.contains(&value) {
                bail!("--synthetic {text}: {option:?}; expected a size from {} to {}", SIZES.start(), SIZES.end());
            }
            match key.trim() {
                "pairs" => found.pairs = value,
                "length" => found.length = value,
                "vocabulary" => found.vocabulary = value,
                _ => return Err(wrong()),
            }
        }
        found.check().map_err(|problem| anyhow!("--synthetic {found}: {problem}"))?;
        Ok(found)
    }
}

impl Display for Recall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Kind::ALL.iter().find(|(_, kind)| *kind == self.kind).map_or("", |(name, _)| name);
        write!(f, "{name}:pairs={},length={},vocabulary={}", self.pairs, self.length, self.vocabulary)
    }
}

impl Recall {
    /// Whether the sizes have room for each other.
    fn check(&self) -> Result<(), String> {
        let Self { kind, pairs, length, vocabulary } = *self;
        if kind != Kind::Copying && vocabulary < 2 * pairs {
            return Err(format!("{pairs} different keys and their values need vocabulary={} or more", 2 * pairs));
        }
        let least = match kind {
            Kind::Mqar => 4 * pairs,
            Kind::Recall => 2 * pairs + 2,
            Kind::Copying => 2 * pairs,
        };
        if kind == Kind::Recall && !length.is_multiple_of(2) {
            return Err(format!("pairs fill an even length, such as length={}", length + 1));
        }
        if length < least {
            return Err(format!("{pairs} pairs need length={least} or more"));
        }
        Ok(())
    }

    /// Number of tokens, those of the task's own included.
    pub fn tokens(&self) -> usize {
        self.vocabulary + if self.kind == Kind::Copying { 2 } else { 0 }
    }

    /// Draws a sequence.
    pub fn draw(&self, random: &mut Random) -> Sequence {
        match self.kind {
            Kind::Mqar => self.mqar(random),
            Kind::Recall => self.recall(random),
            Kind::Copying => self.copying(random),
        }
    }

    /// So many different keys, and a value for each.
    fn keys_and_values(&self, random: &mut Random) -> (Vec<u32>, Vec<u32>) {
        let half = self.vocabulary / 2;
        let keys = distinct(random, half, self.pairs);
        let values = distinct(random, self.vocabulary - half, self.pairs);
        (keys, values.into_iter().map(|value| value + half as u32).collect())
    }

    fn mqar(&self, random: &mut Random) -> Sequence {
        let (keys, values) = self.keys_and_values(random);
        let mut tokens: Vec<u32> = (0..self.length).map(|_| below(random, self.vocabulary)).collect();
        let mut right = vec![None; self.length];
        for (n, (&key, &value)) in keys.iter().zip(&values).enumerate() {
            (tokens[2 * n], tokens[2 * n + 1]) = (key, value);
        }
        // A draw without replacement by weights: the largest of ln(u)/w (Efraimidis and Spirakis 2006).
        let first = 2 * self.pairs;
        let mut places: Vec<(f64, usize)> = (0..(self.length - first) / 2)
            .map(|x| (unit(random).ln() / ((x + 1) as f64).powf(0.01 - 1.0), first + 2 * x))
            .collect();
        places.sort_by(|a, b| b.0.total_cmp(&a.0));
        for ((_, place), (key, value)) in places.into_iter().zip(keys.into_iter().zip(values)) {
            (tokens[place], right[place]) = (key, Some(value));
        }
        Sequence { tokens, right }
    }

    fn recall(&self, random: &mut Random) -> Sequence {
        let (keys, values) = self.keys_and_values(random);
        let (mut known, mut begun) = (HashMap::new(), None);
        let (mut tokens, mut right) = (Vec::new(), Vec::new());
        while tokens.len() + 2 <= self.length {
            // The last pair asks for one that has come, so that no sequence is without a question.
            let last = tokens.len() + 4 > self.length;
            let n = if last { begun.unwrap_or(0) } else { below(random, self.pairs) as usize };
            begun.get_or_insert(n);
            right.extend([known.insert(keys[n], values[n]), None]);
            tokens.extend([keys[n], values[n]]);
        }
        Sequence { tokens, right }
    }

    fn copying(&self, random: &mut Random) -> Sequence {
        let [blank, marker] = [0, 1].map(|n| (self.vocabulary + n) as u32);
        let room = self.length - self.pairs;
        let mut places = distinct(random, room, self.pairs);
        places.sort_unstable();
        let mut tokens = vec![blank; room];
        let mut right = vec![None; room];
        for place in places {
            let token = below(random, self.vocabulary);
            tokens[place as usize] = token;
            right.push(Some(token));
        }
        tokens.resize(self.length, marker);
        Sequence { tokens, right }
    }
}

/// A number below `limit`.
fn below(random: &mut Random, limit: usize) -> u32 {
    (random.next() % limit as u64) as u32
}

/// A number above 0 and up to 1.
fn unit(random: &mut Random) -> f64 {
    ((random.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// So many different numbers below `limit` (Floyd's method), in random order.
fn distinct(random: &mut Random, limit: usize, count: usize) -> Vec<u32> {
    let mut found: Vec<u32> = Vec::with_capacity(count);
    let mut known = std::collections::HashSet::with_capacity(count);
    for n in limit - count..limit {
        let drawn = below(random, n + 1);
        let taken = if known.insert(drawn) { drawn } else { n as u32 };
        known.insert(taken);
        found.insert(below(random, found.len() + 1) as usize, taken);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(spec: &str, seed: u64) -> (Recall, Sequence) {
        let recall: Recall = spec.parse().unwrap();
        let sequence = recall.draw(&mut Random::new(seed, 1));
        assert_eq!((sequence.tokens.len(), sequence.right.len()), (recall.length, recall.length), "{spec}");
        assert!(sequence.tokens.iter().all(|&token| (token as usize) < recall.tokens()), "{spec}");
        (recall, sequence)
    }

    #[test]
    fn what_is_asked_stands_in_the_sequence() {
        for seed in 0..50 {
            for spec in ["mqar", "mqar:pairs=4,length=16,vocabulary=8", "mqar:pairs=64,length=512,vocabulary=8192"] {
                let (recall, Sequence { tokens, right }) = drawn(spec, seed);
                let context: HashMap<u32, u32> =
                    tokens[..2 * recall.pairs].chunks(2).map(|pair| (pair[0], pair[1])).collect();
                assert_eq!(context.len(), recall.pairs, "keys differ");
                let asked: Vec<usize> = (0..recall.length).filter(|&at| right[at].is_some()).collect();
                assert!(asked.len() == recall.pairs && asked[0] >= 2 * recall.pairs);
                assert!(asked.iter().all(|&at| right[at] == context.get(&tokens[at]).copied()));
                let half = recall.vocabulary as u32 / 2;
                assert!(context.iter().all(|(&key, &value)| key < half && value >= half));
            }
            let (_, Sequence { tokens, right }) = drawn("recall:pairs=6,length=30,vocabulary=12", seed);
            assert!(right.iter().any(Option::is_some));
            for at in (0..30).step_by(2) {
                let before = (0..at).step_by(2).find(|&earlier| tokens[earlier] == tokens[at]);
                assert_eq!(right[at], before.map(|earlier| tokens[earlier + 1]));
                assert!(before.is_none_or(|earlier| tokens[earlier + 1] == tokens[at + 1]));
                assert_eq!(right[at + 1], None);
            }
            let (recall, Sequence { tokens, right }) = drawn("copying:pairs=5,length=20,vocabulary=3", seed);
            let contents: Vec<u32> = tokens[..15].iter().copied().filter(|&token| token < 3).collect();
            let asked: Vec<u32> = right.into_iter().flatten().collect();
            assert!(contents.len() == 5 && contents == asked && tokens[15..] == [recall.vocabulary as u32 + 1; 5]);
        }
        assert_eq!(drawn("mqar", 3), drawn("mqar", 3));
        assert_ne!(drawn("mqar", 3).1, drawn("mqar", 4).1);
    }

    #[test]
    fn near_places_are_asked_more_often() {
        let recall: Recall = "mqar:pairs=4,length=128,vocabulary=64".parse().unwrap();
        let mut random = Random::new(1, 1);
        let mut near = 0;
        for _ in 0..500 {
            let right = recall.draw(&mut random).right;
            near += right[8..20].iter().flatten().count();
        }
        // Six of 60 places, which evenly would have a tenth of all 2,000.
        assert!(near > 800, "{near}");
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        for (spec, part) in [
            ("mqr", "unknown synthetic task \"mqr\"; known are mqar, recall, copying"),
            ("mqar:pairs", "expected pairs=N, length=N or vocabulary=N"),
            ("mqar:pairs=x", "expected pairs=N"),
            ("mqar:width=3", "expected pairs=N"),
            ("mqar:pairs=0", "expected a size from 1"),
            ("mqar:pairs=16,length=60", "16 pairs need length=64 or more"),
            ("mqar:pairs=16,vocabulary=30", "need vocabulary=32 or more"),
            ("recall:length=35", "pairs fill an even length, such as length=36"),
            ("copying:pairs=65", "65 pairs need length=130"),
        ] {
            let error = spec.parse::<Recall>().unwrap_err().to_string();
            assert!(error.contains(part), "{spec}: {error}");
        }
        let again: Recall = "recall:length=64".parse().unwrap();
        assert_eq!(again.to_string().parse::<Recall>().unwrap(), again);
    }
}
