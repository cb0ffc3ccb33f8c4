//! Which examples are held out: by a hash of the source, so that the split is the same everywhere and always.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

use anyhow::{Result, bail};
use tokenizers::NormalizedString;

use super::lines;
use crate::run::config::Files;
use crate::terminal::notes::note;

#[derive(Debug)]
pub struct Split<E> {
    pub train: Vec<E>,
    /// For the loss curve of the development examples, and for choosing settings.
    pub development: Vec<E>,
    /// For the scores at the end. Nothing else looks at them.
    pub held_out: Vec<E>,
}

/// Sources are spread over so many buckets; one is for development, and one is held out, more where it would hold too few for a score.
const BUCKETS: u64 = 20;
/// So many sources are to be held out, as long as that is no more than a fifth.
const SCORED: u64 = 50;

/// The sources of a file, which are spread over buckets: bucket 1 is for development, bucket 0 and the last ones are held out.
///
/// A hash rather than a random draw: the split is the same on every machine, in every run and for every order of the
/// lines, and all targets of one source are on the same side.
struct Sources {
    version: u32,
    known: HashSet<u64>,
}

impl Sources {
    fn of<'a>(version: u32, sources: impl Iterator<Item = &'a str>) -> Self {
        let known = sources.map(|source| hash(&composed(source))).collect();
        Self { version, known }
    }

    /// The hash that decides. Version 1 is FNV-1a alone, whose lowest bit is the parity of the lowest bits of all bytes. Version 2
    /// mixes its bits, and is the same for one source composed or decomposed, and for `word(2)` where `word` is there too.
    fn hash(&self, source: &str) -> u64 {
        if self.version == 1 {
            return fnv(source);
        }
        let source = composed(source);
        let word = variant_of(&source).map(hash).filter(|hash| self.known.contains(hash));
        word.unwrap_or_else(|| hash(&source))
    }

    /// How many buckets are held out: one, since version 3 up to four.
    fn buckets(&self) -> u64 {
        let sources = self.known.len().max(1) as u64;
        if self.version < 3 { 1 } else { (SCORED * BUCKETS).div_ceil(sources).clamp(1, 4) }
    }
}

fn fnv(text: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325u64, step)
}

/// FNV-1a, and the last steps of MurmurHash3 (`fmix64`), after which every bit depends on all others.
pub fn hash(text: &str) -> u64 {
    let mix = |hash: u64, factor: u64| (hash ^ (hash >> 33)).wrapping_mul(factor);
    let hash = mix(mix(fnv(text), 0xff51_afd7_ed55_8ccd), 0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// A text without white space around it, in composed form (NFC): texts that look alike are one.
pub fn composed(source: &str) -> Cow<'_, str> {
    let source = source.trim();
    if source.is_ascii() { source.into() } else { NormalizedString::from(source).nfc().get().to_owned().into() }
}

/// A text as it stands, then composed and decomposed, where these may differ.
pub fn spellings(text: &str) -> Vec<Cow<'_, str>> {
    if text.is_ascii() {
        return vec![text.into()];
    }
    let [mut composed, mut decomposed] = [text, text].map(NormalizedString::from);
    vec![text.into(), composed.nfc().get().to_owned().into(), decomposed.nfd().get().to_owned().into()]
}

/// What `word(2)` is a variant of, as pronouncing dictionaries number them.
fn variant_of(source: &str) -> Option<&str> {
    let (word, number) = source.strip_suffix(')')?.rsplit_once('(')?;
    let numbered = (1..=2).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    Some(word.trim_end()).filter(|word| numbered && !word.is_empty())
}

/// Examples by their use, and those of the files for development and scores that the settings name. `name` is that of the main file, `examples`
/// what a person calls them. Says how many of those files are in the training data too.
pub fn of<E>(
    files: &Files,
    name: &str,
    all: Vec<E>,
    examples: &str,
    reader: impl Fn(&Path) -> Result<Vec<E>>,
    source: impl Fn(&E) -> &str,
) -> Result<Split<E>> {
    let sources = Sources::of(files.split_version, all.iter().map(&source));
    // What would have been held out is learned from where a file of its own is.
    let further = if files.held_out.is_some() { 0 } else { sources.buckets() - 1 };
    let mut split = Split { train: Vec::new(), development: Vec::new(), held_out: Vec::new() };
    for example in all {
        let part = match sources.hash(source(&example)) % BUCKETS {
            0 => &mut split.held_out,
            1 => &mut split.development,
            bucket if bucket >= BUCKETS - further => &mut split.held_out,
            _ => &mut split.train,
        };
        part.push(example);
    }
    let own = [(&files.development, "development"), (&files.held_out, "held-out")];
    for (part, (path, _)) in [&mut split.development, &mut split.held_out].into_iter().zip(own) {
        if let Some(path) = path {
            // What would have been held out is learned from instead.
            split.train.extend(std::mem::replace(part, reader(path)?));
        }
    }
    let learned: HashSet<u64> = split.train.iter().map(|example| sources.hash(source(example))).collect();
    for (part, (path, used)) in [&split.development, &split.held_out].into_iter().zip(own) {
        if let Some(path) = path {
            let found = part.iter().filter(|example| learned.contains(&sources.hash(source(example)))).count();
            say_learned(path, found, part.len(), used, examples);
        }
    }
    if split.train.is_empty() {
        bail!("{name}: no {examples} are left to train on after some are held out; give more {examples}");
    }
    Ok(split)
}

/// Says how many examples of a file for development or scores are in the training data too, if any.
pub fn say_learned(path: &Path, found: usize, of: usize, used: &str, examples: &str) {
    if found > 0 {
        let score = if used == "development" { "the development loss is lower" } else { "the scores are better" };
        let name = lines::name(path);
        note(format_args!(
            "{name}: also in the training data: {found} of {of} {used} {examples}, so {score} than on new ones"
        ));
    }
}

/// At most `count` items from all over a list, which may be sorted.
pub fn evenly<T: Clone>(items: &[T], count: usize) -> Vec<T> {
    let count = count.min(items.len());
    (0..count).map(|n| items[n * items.len() / count].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::columns::Columns;

    fn bucket(version: u32, source: &str) -> u64 {
        Sources::of(version, std::iter::empty()).hash(source) % BUCKETS
    }

    #[test]
    fn the_first_version_is_fnv_1a() {
        // Values of the published test vectors, modulo 20.
        assert_eq!(bucket(1, ""), 0xcbf2_9ce4_8422_2325 % 20);
        assert_eq!(bucket(1, "a"), 0xaf63_dc4c_8601_ec8c % 20);
        assert_eq!(bucket(1, "foobar"), 0x8594_4171_f739_67e8 % 20);
    }

    #[test]
    fn held_out_sources_do_not_follow_the_parity_of_their_bytes() {
        // All strings of 14 bits: in each bucket a twentieth, of which about half have an even number of ones.
        let mut counts = [[0i32; 2]; BUCKETS as usize];
        for bits in 0..1u32 << 14 {
            counts[bucket(2, &format!("{bits:014b}")) as usize][(bits.count_ones() % 2) as usize] += 1;
        }
        // Five standard deviations of a fair draw of 8,192 each.
        for [even, odd] in counts {
            assert!((even - 410).abs() < 100 && (odd - 410).abs() < 100, "{counts:?}");
        }
    }

    #[test]
    fn of_few_sources_enough_for_a_score_are_held_out() {
        let split = |split_version, count: usize| {
            let columns = Columns::default();
            let files = Files { columns, development: None, held_out: None, split_version, max_tokens: 9 };
            let all: Vec<String> = (0..count).map(|n| n.to_string()).collect();
            of(&files, "a file", all, "texts", |_| unreachable!(), String::as_str).unwrap()
        };
        for (count, share) in [(100, 0.2), (333, 0.2), (500, 0.1), (1000, 0.05), (5000, 0.05)] {
            let (new, old) = (split(3, count), split(2, count));
            for (found, share) in [(new.held_out.len(), share), (old.held_out.len(), 0.05)] {
                let mean = count as f64 * share;
                // Four deviations of a fair draw.
                assert!((found as f64 - mean).abs() < 4.0 * (mean * (1.0 - share)).sqrt(), "{count}: {found}");
            }
            assert_eq!(new.development, old.development);
        }
    }

    #[test]
    fn variants_and_forms_of_one_source_stay_together() {
        let words: Vec<String> = (0..200).map(|n| format!("w{n}é")).collect();
        let sources = Sources::of(2, words.iter().map(String::as_str));
        for word in &words {
            let hash = sources.hash(word);
            let decomposed = word.replace('é', "e\u{301}");
            for same in [
                format!("{word}(2)"),
                format!("{word} (13)"),
                format!(" {word}\t"),
                decomposed.clone(),
                format!("{decomposed}(1)"),
            ] {
                assert_eq!(sources.hash(&same), hash, "{same:?}");
            }
        }
        // Where the word itself is no source, such as a function and its argument, they are different sources.
        let calls: HashSet<u64> = (0..100).map(|n| sources.hash(&format!("sin({n})"))).collect();
        assert_eq!(calls.len(), 100);
        for other in ["(2)", "w1é(x)", "w1é(123)", "w1é()", "w1é(2)b"] {
            assert_ne!(sources.hash(other), sources.hash("w1é"), "{other}");
        }
    }
}
