//! Sequences that are drawn: what is to be told stands in them, or in all that came before them.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::str::FromStr;

use anyhow::{Error, Result, anyhow, bail};

use super::listops;
use crate::run::config::COMPRESSION;
use crate::tasks::batches::Random;

const LARGEST: usize = 1 << 20;

/// Tokens of their own that noise is drawn from.
const NOISE: usize = 16;

/// A task with its sizes, such as `mqar:pairs=16,length=256,vocabulary=8192`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    kind: Kind,
    /// By name, in the order in which they are written.
    sizes: Vec<(&'static str, usize)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Multi-query associative recall (Arora et al. 2024): `k₁ v₁ … kₙ vₙ`, then each key once more among random tokens, where its
    /// value is to be given. Keys come from the first half of the vocabulary, values from the second. Near places are likelier: the
    /// `x`-th has the weight `x^(a−1)` with `a = 0.01`.
    Mqar,
    /// In-context recall (Poli et al. 2024): pairs of a key and its value up to the end of the sequence, keys drawn from `pairs` many;
    /// the value of a key that has come before is to be given. So many percent of the pairs are two tokens of noise instead.
    Recall,
    /// Fuzzy in-context recall (Poli et al. 2024): the same where keys and values are 1 to `motif` tokens long. Those of the sequences
    /// held out have the longest keys.
    Fuzzy,
    /// Selective copying (Gu and Dao 2023): tokens at random places among blanks, then as many markers, where these tokens are to be
    /// given in their order.
    Copying,
    /// Memorization (Poli et al. 2024): keys, and after each a marker, where its value is to be given: the same one in every
    /// sequence, so that weights must hold it.
    Memorization,
    /// Compression (Poli et al. 2024): random tokens and a marker, at which one row is to hold them all.
    Compression,
    /// Nested lists of operations on digits (Nangia and Bowman 2018) as in Long Range Arena (Tay et al. 2021): the value of the whole
    /// is to be given at its end.
    ListOps,
}

/// A size: its name, what it is if nobody says, the least it can be.
type Size = (&'static str, usize, usize);

const ALL: [(&str, Kind, &[Size]); 7] = [
    ("mqar", Kind::Mqar, &[("pairs", 8, 1), ("length", 128, 1), ("vocabulary", 256, 1)]),
    ("recall", Kind::Recall, &[("pairs", 16, 1), ("length", 128, 1), ("vocabulary", 64, 1), ("noise", 0, 0)]),
    ("fuzzy", Kind::Fuzzy, &[("motif", 3, 1), ("length", 128, 1), ("vocabulary", 16, 1)]),
    ("copying", Kind::Copying, &[("pairs", 16, 1), ("length", 128, 1), ("vocabulary", 16, 1)]),
    ("memorization", Kind::Memorization, &[("length", 32, 2), ("vocabulary", 256, 2)]),
    (COMPRESSION, Kind::Compression, &[("length", 32, 2), ("vocabulary", 16, 2)]),
    ("listops", Kind::ListOps, &[("shortest", 500, 4), ("length", 2000, 4), ("depth", 10, 2), ("arguments", 10, 2)]),
];

/// A sequence, and what is to be given at each place of it, if anything is.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub right: Vec<Option<u32>>,
}

/// A token, and what is to be given there.
type Place = (u32, Option<u32>);

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        let Some((_, kind, known)) = ALL.into_iter().find(|(known, ..)| *known == name.trim()) else {
            bail!("unknown synthetic task {name:?}; known are {}", ALL.map(|(name, ..)| name).join(", "));
        };
        let mut found = Self { kind, sizes: known.iter().map(|&(name, size, _)| (name, size)).collect() };
        for option in options.split(',').filter(|option| !option.trim().is_empty()) {
            let wrong = || {
                let expected: Vec<String> = known.iter().map(|(name, ..)| format!("{name}=N")).collect();
                anyhow!("--synthetic {text}: {option:?}; expected {}", expected.join(", "))
            };
            let (key, value) = option.split_once('=').ok_or_else(wrong)?;
            let value: usize = value.trim().parse().map_err(|_| wrong())?;
            let at = known.iter().position(|(name, ..)| *name == key.trim()).ok_or_else(wrong)?;
            let least = known[at].2;
            if !(least..=LARGEST).contains(&value) {
                bail!("--synthetic {text}: {option:?}; expected a size from {least} to {LARGEST}");
            }
            found.sizes[at].1 = value;
        }
        found.check().map_err(|problem| anyhow!("--synthetic {found}: {problem}"))?;
        Ok(found)
    }
}

impl Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ALL.iter().find(|(_, kind, _)| *kind == self.kind).map_or("", |(name, ..)| name);
        let sizes: Vec<String> = self.sizes.iter().map(|(name, size)| format!("{name}={size}")).collect();
        write!(f, "{name}:{}", sizes.join(","))
    }
}

impl Spec {
    /// A size; 0 where the task has none of this name.
    fn size(&self, name: &str) -> usize {
        self.sizes.iter().find(|(known, _)| *known == name).map_or(0, |(_, size)| *size)
    }

    pub fn length(&self) -> usize {
        self.size("length")
    }

    fn check(&self) -> Result<(), String> {
        let [pairs, length, vocabulary, motif] = ["pairs", "length", "vocabulary", "motif"].map(|name| self.size(name));
        if matches!(self.kind, Kind::Mqar | Kind::Recall) && vocabulary < 2 * pairs {
            return Err(format!("{pairs} different keys and their values need vocabulary={} or more", 2 * pairs));
        }
        if self.kind == Kind::Fuzzy && vocabulary < 2 * motif {
            return Err(format!("motifs of {motif} different tokens need vocabulary={} or more", 2 * motif));
        }
        if self.size("noise") > 90 {
            return Err("noise is the percentage of pairs that are noise; expected 0 to 90".into());
        }
        if self.kind == Kind::ListOps {
            let [shortest, depth, arguments] = ["shortest", "depth", "arguments"].map(|name| self.size(name));
            if shortest > length {
                return Err(format!("the longest is to be of at least length={shortest}"));
            }
            if !listops::can_be(shortest..=length, depth, arguments) {
                return Err("lists of such a length do not turn up; give a greater depth or more arguments".into());
            }
        }
        if matches!(self.kind, Kind::Recall | Kind::Memorization) && !length.is_multiple_of(2) {
            return Err(format!("pairs fill an even length, such as length={}", length + 1));
        }
        let (what, least) = match self.kind {
            Kind::Mqar => (format!("{pairs} pairs"), 4 * pairs),
            Kind::Recall => (format!("{pairs} pairs"), 2 * pairs + 2),
            Kind::Copying => (format!("{pairs} pairs"), 2 * pairs),
            Kind::Fuzzy => (format!("motifs of {motif} tokens"), 8 * motif),
            Kind::Memorization | Kind::Compression | Kind::ListOps => return Ok(()),
        };
        if length < least {
            return Err(format!("{what} need length={least} or more"));
        }
        Ok(())
    }

    pub fn tokens(&self) -> usize {
        let own = match self.kind {
            Kind::Mqar => 0,
            Kind::Recall if self.size("noise") == 0 => 0,
            Kind::Recall => NOISE,
            Kind::Fuzzy | Kind::Memorization | Kind::Compression => 1,
            Kind::Copying => 2,
            Kind::ListOps => listops::TOKENS,
        };
        self.size("vocabulary") + own
    }

    /// Draws a sequence, to learn from or to be held out.
    pub fn draw(&self, random: &mut Random, held_out: bool) -> Sequence {
        let places = match self.kind {
            Kind::Mqar => self.mqar(random),
            Kind::Recall => self.recall(random),
            Kind::Fuzzy => self.fuzzy(random, held_out),
            Kind::Copying => self.copying(random),
            Kind::Memorization => self.memorization(random),
            Kind::Compression => self.compression(random),
            Kind::ListOps => self.listops(random),
        };
        let (tokens, right) = places.into_iter().unzip();
        Sequence { tokens, right }
    }

    /// So many different keys, and a value for each.
    fn keys_and_values(&self, random: &mut Random) -> (Vec<u32>, Vec<u32>) {
        let (pairs, vocabulary) = (self.size("pairs"), self.size("vocabulary"));
        let half = vocabulary / 2;
        let keys = distinct(random, half, pairs);
        let values = distinct(random, vocabulary - half, pairs);
        (keys, values.into_iter().map(|value| value + half as u32).collect())
    }

    fn mqar(&self, random: &mut Random) -> Vec<Place> {
        let (pairs, length) = (self.size("pairs"), self.length());
        let (keys, values) = self.keys_and_values(random);
        let mut all: Vec<Place> = (0..length).map(|_| (below(random, self.size("vocabulary")), None)).collect();
        for (n, (&key, &value)) in keys.iter().zip(&values).enumerate() {
            (all[2 * n].0, all[2 * n + 1].0) = (key, value);
        }
        // A draw without replacement by weights: the largest of ln(u)/w (Efraimidis and Spirakis 2006).
        let first = 2 * pairs;
        let mut places: Vec<(f64, usize)> = (0..(length - first) / 2)
            .map(|x| (unit(random).ln() / ((x + 1) as f64).powf(0.01 - 1.0), first + 2 * x))
            .collect();
        places.sort_by(|a, b| b.0.total_cmp(&a.0));
        for ((_, place), (key, value)) in places.into_iter().zip(keys.into_iter().zip(values)) {
            all[place] = (key, Some(value));
        }
        all
    }

    fn recall(&self, random: &mut Random) -> Vec<Place> {
        let (length, vocabulary, noise) = (self.length(), self.size("vocabulary"), self.size("noise"));
        let (keys, values) = self.keys_and_values(random);
        let (mut known, mut begun, mut all) = (HashMap::new(), None, Vec::new());
        while all.len() + 2 <= length {
            // The last pair asks for one that has come, so that no sequence is without a question.
            let last = all.len() + 4 > length;
            if begun.is_some() && !last && noise > 0 && below(random, 100) < noise as u32 {
                all.extend([0, 1].map(|_| (vocabulary as u32 + below(random, NOISE), None)));
                continue;
            }
            let n = if last { begun.unwrap_or(0) } else { below(random, keys.len()) as usize };
            begun.get_or_insert(n);
            all.extend([(keys[n], known.insert(keys[n], values[n])), (values[n], None)]);
        }
        all
    }

    fn fuzzy(&self, random: &mut Random, held_out: bool) -> Vec<Place> {
        let (length, vocabulary, motif) = (self.length(), self.size("vocabulary"), self.size("motif"));
        let half = vocabulary / 2;
        let some = |random: &mut Random| 1 + below(random, motif) as usize;
        let mut known: HashMap<Vec<u32>, Vec<u32>> = HashMap::new();
        let mut begun = None;
        let (mut tokens, mut right) = (Vec::new(), Vec::new());
        loop {
            let room = length - tokens.len();
            // As in `recall`, the last pair has come before.
            let last = room < 4 * motif;
            let key = match &begun {
                Some(key) if last => Vec::clone(key),
                _ => {
                    let len = if held_out { motif } else { some(random) };
                    distinct(random, half, len)
                }
            };
            begun.get_or_insert_with(|| key.clone());
            let asked = known.get(&key).cloned();
            let value = asked.clone().unwrap_or_else(|| {
                let len = some(random);
                distinct(random, vocabulary - half, len).iter().map(|token| token + half as u32).collect()
            });
            // A token is told at the one before it.
            right.resize(tokens.len() + key.len() - 1, None);
            right.extend(value.iter().map(|&token| asked.is_some().then_some(token)));
            tokens.extend_from_slice(&key);
            tokens.extend_from_slice(&value);
            right.resize(tokens.len(), None);
            known.insert(key, value);
            if last {
                break;
            }
        }
        // What room is left stands before it all.
        let room = length - tokens.len();
        std::iter::repeat_n((vocabulary as u32, None), room).chain(tokens.into_iter().zip(right)).collect()
    }

    fn memorization(&self, random: &mut Random) -> Vec<Place> {
        let vocabulary = self.size("vocabulary");
        let half = vocabulary / 2;
        // The same pairs in every run and sequence.
        let values = distinct(&mut Random::new(0, 0), half, half);
        let pair = |key: u32| [(key, None), (vocabulary as u32, Some(values[key as usize] + half as u32))];
        (0..self.length() / 2).flat_map(|_| pair(below(random, half))).collect()
    }

    fn compression(&self, random: &mut Random) -> Vec<Place> {
        let (length, vocabulary) = (self.length(), self.size("vocabulary"));
        let asked = (1..length).map(|_| below(random, vocabulary)).map(|token| (token, Some(token)));
        asked.chain([(vocabulary as u32, None)]).collect()
    }

    fn listops(&self, random: &mut Random) -> Vec<Place> {
        let [shortest, longest, depth, arguments] =
            ["shortest", "length", "depth", "arguments"].map(|name| self.size(name));
        let (tokens, value) = listops::draw(random, shortest..=longest, depth, arguments);
        let last = tokens.len() - 1;
        tokens.into_iter().enumerate().map(|(n, token)| (token, (n == last).then_some(value))).collect()
    }

    fn copying(&self, random: &mut Random) -> Vec<Place> {
        let (pairs, vocabulary) = (self.size("pairs"), self.size("vocabulary"));
        let [blank, marker] = [0, 1].map(|n| (vocabulary + n) as u32);
        let room = self.length() - pairs;
        let mut places = distinct(random, room, pairs);
        places.sort_unstable();
        let mut all = vec![(blank, None); room];
        for place in places {
            let token = below(random, vocabulary);
            all[place as usize].0 = token;
            all.push((marker, Some(token)));
        }
        all
    }
}

pub fn below(random: &mut Random, limit: usize) -> u32 {
    (random.next() % limit as u64) as u32
}

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

    fn drawn(text: &str, seed: u64) -> (Spec, Sequence) {
        let spec: Spec = text.parse().unwrap();
        let sequence = spec.draw(&mut Random::new(seed, 1), false);
        assert_eq!((sequence.tokens.len(), sequence.right.len()), (spec.length(), spec.length()), "{text}");
        assert!(sequence.tokens.iter().all(|&token| (token as usize) < spec.tokens()), "{text}");
        assert!(sequence.right.iter().any(Option::is_some), "{text}");
        (spec, sequence)
    }

    #[test]
    fn what_is_asked_stands_in_the_sequence() {
        for seed in 0..50 {
            for text in ["mqar", "mqar:pairs=4,length=16,vocabulary=8", "mqar:pairs=64,length=512,vocabulary=8192"] {
                let (spec, Sequence { tokens, right }) = drawn(text, seed);
                let pairs = spec.size("pairs");
                let context: HashMap<u32, u32> = tokens[..2 * pairs].chunks(2).map(|pair| (pair[0], pair[1])).collect();
                assert_eq!(context.len(), pairs, "keys differ");
                let asked: Vec<usize> = (0..spec.length()).filter(|&at| right[at].is_some()).collect();
                assert!(asked.len() == pairs && asked[0] >= 2 * pairs);
                assert!(asked.iter().all(|&at| right[at] == context.get(&tokens[at]).copied()));
                let half = spec.size("vocabulary") as u32 / 2;
                assert!(context.iter().all(|(&key, &value)| key < half && value >= half));
            }
            for text in ["recall:pairs=6,length=30,vocabulary=12", "recall:pairs=6,length=60,vocabulary=12,noise=50"] {
                let (_, Sequence { tokens, right }) = drawn(text, seed);
                for at in (0..tokens.len()).step_by(2) {
                    let before = (0..at).step_by(2).find(|&earlier| tokens[earlier] == tokens[at] && tokens[at] < 12);
                    assert_eq!(right[at], before.map(|earlier| tokens[earlier + 1]));
                    assert!(before.is_none_or(|earlier| tokens[earlier + 1] == tokens[at + 1]));
                    assert_eq!(right[at + 1], None);
                }
                assert_eq!(text.contains("noise"), tokens.iter().any(|&token| token >= 12), "seed {seed}");
            }
            let (spec, Sequence { tokens, right }) = drawn("copying:pairs=5,length=20,vocabulary=3", seed);
            let contents: Vec<u32> = tokens[..15].iter().copied().filter(|&token| token < 3).collect();
            let asked: Vec<u32> = right.into_iter().flatten().collect();
            assert!(
                contents.len() == 5 && contents == asked && tokens[15..] == [spec.size("vocabulary") as u32 + 1; 5]
            );
        }
        assert_eq!(drawn("mqar", 3), drawn("mqar", 3));
        assert_ne!(drawn("mqar", 3).1, drawn("mqar", 4).1);
    }

    #[test]
    fn fuzzy_keys_and_values_are_motifs_of_several_tokens() {
        let spec: Spec = "fuzzy:motif=3,length=60,vocabulary=12".parse().unwrap();
        let mut lengths = std::collections::HashSet::new();
        for seed in 0..50 {
            for held_out in [false, true] {
                let Sequence { tokens, right } = spec.draw(&mut Random::new(seed, 1), held_out);
                assert_eq!((tokens.len(), right.len()), (60, 60));
                // What is to be given comes next.
                assert!((0..60).all(|at| right[at].is_none_or(|token| tokens[at + 1] == token)));
                let begin = tokens.iter().position(|&token| token < 12).unwrap();
                let mut known: HashMap<&[u32], &[u32]> = HashMap::new();
                for pair in tokens[begin..].chunk_by(|&a, &b| a < 6 || b >= 6) {
                    let cut = pair.iter().position(|&token| token >= 6).unwrap();
                    let (key, value) = pair.split_at(cut);
                    assert!(key.len() <= 3 && value.len() <= 3 && (!held_out || key.len() == 3));
                    lengths.insert((key.len(), value.len()));
                    assert_eq!(*known.entry(key).or_insert(value), value, "a key has one value");
                }
                assert!(right.iter().any(Option::is_some), "seed {seed}");
            }
        }
        assert_eq!(lengths.len(), 9, "every length of keys and values");
    }

    #[test]
    fn what_is_to_be_memorized_is_the_same_in_every_sequence() {
        let mut known = HashMap::new();
        for seed in 0..50 {
            let (_, Sequence { tokens, right }) = drawn("memorization", seed);
            for at in (0..32).step_by(2) {
                assert_eq!((tokens[at + 1], right[at]), (256, None));
                let value = right[at + 1].unwrap();
                assert!(tokens[at] < 128 && (128..256).contains(&value));
                assert_eq!(*known.entry(tokens[at]).or_insert(value), value);
            }
        }
        assert!(known.len() > 100);
    }

    #[test]
    fn all_that_is_compressed_is_asked() {
        let (_, Sequence { tokens, right }) = drawn("compression:length=9,vocabulary=5", 3);
        let (last, tokens) = tokens.split_last().unwrap();
        assert_eq!((*last, right[8]), (5, None));
        assert!(tokens.iter().zip(&right).all(|(token, right)| *token < 5 && *right == Some(*token)));
    }

    #[test]
    fn lists_are_asked_at_their_end() {
        let spec: Spec = "listops:shortest=20,length=60".parse().unwrap();
        for seed in 0..20 {
            let Sequence { tokens, right } = spec.draw(&mut Random::new(seed, 1), false);
            assert!((20..=60).contains(&tokens.len()));
            let asked: Vec<usize> = (0..tokens.len()).filter(|&at| right[at].is_some()).collect();
            assert!(asked == [tokens.len() - 1] && right[asked[0]].unwrap() < 10);
        }
    }

    #[test]
    fn near_places_are_asked_more_often() {
        let spec: Spec = "mqar:pairs=4,length=128,vocabulary=64".parse().unwrap();
        let mut random = Random::new(1, 1);
        let mut near = 0;
        for _ in 0..500 {
            let right = spec.draw(&mut random, false).right;
            near += right[8..20].iter().flatten().count();
        }
        // Six of 60 places, which evenly would have a tenth of all 2,000.
        assert!(near > 800, "{near}");
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        for (text, part) in [
            ("mqr", "unknown synthetic task \"mqr\"; known are mqar, recall, fuzzy"),
            ("mqar:pairs", "expected pairs=N, length=N, vocabulary=N"),
            ("mqar:pairs=x", "expected pairs=N"),
            ("mqar:width=3", "expected pairs=N"),
            ("mqar:noise=3", "expected pairs=N"),
            ("mqar:pairs=0", "expected a size from 1"),
            ("mqar:pairs=16,length=60", "16 pairs need length=64 or more"),
            ("mqar:pairs=16,vocabulary=30", "need vocabulary=32 or more"),
            ("recall:length=35", "pairs fill an even length, such as length=36"),
            ("recall:noise=95", "expected 0 to 90"),
            ("copying:pairs=65", "65 pairs need length=130"),
            ("fuzzy:motif=9", "motifs of 9 different tokens need vocabulary=18"),
            ("fuzzy:length=20", "motifs of 3 tokens need length=24"),
            ("memorization:length=7", "such as length=8"),
            ("listops:shortest=3000", "at least length=3000"),
            ("listops:arguments=2", "lists of such a length do not turn up"),
        ] {
            let error = text.parse::<Spec>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        for (name, ..) in ALL {
            let spec: Spec = name.parse().unwrap();
            assert_eq!(spec.to_string().parse::<Spec>().unwrap(), spec);
        }
    }
}
