//! Which examples are held out: by a hash of the source, so that the split is the same everywhere and always.

use std::path::Path;

use anyhow::{Result, bail};

use crate::run::config::RunConfig;

/// Examples by their use.
#[derive(Debug)]
pub struct Split<E> {
    pub train: Vec<E>,
    /// For the loss curve of the development examples, and for choosing settings.
    pub development: Vec<E>,
    /// For the scores at the end. Nothing else looks at them.
    pub held_out: Vec<E>,
}

/// Sources are spread over so many buckets; one is held out and another is for development.
const BUCKETS: u64 = 20;

/// The bucket of a source: FNV-1a (64 bit) of its UTF-8, modulo 20. Bucket 0 is held out, bucket 1 is for development.
///
/// A hash rather than a random draw: the split is the same on every machine, in every run and for every order of the
/// lines, and all targets of one source are on the same side.
fn bucket(source: &str) -> u64 {
    let hash = source
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    hash % BUCKETS
}

/// Splits examples by the bucket of their source.
fn split<E>(examples: Vec<E>, source: impl Fn(&E) -> &str) -> Split<E> {
    let mut split = Split { train: Vec::new(), development: Vec::new(), held_out: Vec::new() };
    for example in examples {
        match bucket(source(&example)) {
            0 => split.held_out.push(example),
            1 => split.development.push(example),
            _ => split.train.push(example),
        }
    }
    split
}

/// Examples by their use, and those of the files for development and scores that the settings name. `examples` is what a person
/// calls them.
pub fn of<E>(
    config: &RunConfig,
    all: Vec<E>,
    examples: &str,
    reader: impl Fn(&Path) -> Result<Vec<E>>,
    source: impl Fn(&E) -> &str,
) -> Result<Split<E>> {
    let mut split = split(all, source);
    for (part, own) in [(&mut split.development, &config.development), (&mut split.held_out, &config.held_out)] {
        if let Some(path) = own {
            // What would have been held out is learned from instead.
            split.train.extend(std::mem::replace(part, reader(path)?));
        }
    }
    if split.train.is_empty() {
        bail!(
            "{}: no {examples} are left to train on after a tenth is held out; give more {examples}",
            config.data_name()
        );
    }
    Ok(split)
}

/// At most `count` items from all over a list, which may be sorted.
pub fn evenly<T: Clone>(items: &[T], count: usize) -> Vec<T> {
    let count = count.min(items.len());
    (0..count).map(|n| items[n * items.len() / count].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bucket_is_fnv_1a() {
        // Values of the published test vectors, modulo 20.
        assert_eq!(bucket(""), 0xcbf2_9ce4_8422_2325 % 20);
        assert_eq!(bucket("a"), 0xaf63_dc4c_8601_ec8c % 20);
        assert_eq!(bucket("foobar"), 0x8594_4171_f739_67e8 % 20);
    }
}
