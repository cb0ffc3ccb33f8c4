//! How much of a text that is held out was learned from.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use anyhow::Result;

use super::score::Passage;
use crate::terminal::notes::note;

/// Shorter lines occur everywhere, such as a closing brace.
const LEAST: usize = 40;

#[derive(Default)]
pub struct Overlap {
    /// By the hash of a line that was not found yet, its bytes, as often as it comes.
    lines: HashMap<u64, usize>,
    bytes: usize,
    found: usize,
}

/// The lines of some bytes that are long enough, by their hash.
fn lines(bytes: &[u8]) -> impl Iterator<Item = (u64, usize)> {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let long = bytes.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| line.len() >= LEAST);
    long.map(move |line| (hasher.hash_one(line), line.len()))
}

impl Overlap {
    pub fn of(passages: &[Passage]) -> Result<Self> {
        let mut overlap = Self::default();
        for Passage { corpus, from, to } in passages {
            for piece in corpus.pieces(*from..*to) {
                let bytes = piece?.bytes;
                overlap.bytes += bytes.len();
                lines(&bytes).for_each(|(hash, length)| *overlap.lines.entry(hash).or_default() += length);
            }
        }
        Ok(overlap)
    }

    pub fn learn(&mut self, bytes: &[u8]) {
        if !self.lines.is_empty() {
            lines(bytes).for_each(|(hash, _)| self.found += self.lines.remove(&hash).unwrap_or(0));
        }
    }

    /// Says it, from a hundredth on.
    pub fn say(&self, name: &str) {
        let share = 100.0 * self.found as f64 / self.bytes.max(1) as f64;
        if share >= 1.0 {
            note(format_args!(
                "{name}: {share:.0} % of the held-out text is in lines that are also in the training data, so the bits per byte are fewer \
                 than on a new text"
            ));
        }
    }
}
