//! Where examples come from, which are held out, and which go into which batch.

pub mod batches;
pub mod cmudict;
pub mod pairs;

use std::collections::HashMap;

/// One source with every target that counts as right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    pub source: String,
    /// At least one, no two alike.
    pub targets: Vec<String>,
}

/// Examples by their use.
#[derive(Debug, Default)]
pub struct Split {
    pub train: Vec<Example>,
    /// For the curve of the held-out loss while training, and for choosing settings.
    pub development: Vec<Example>,
    /// For the error rates at the end. Nothing else ever looks at them.
    pub held_out: Vec<Example>,
}

/// Of so many buckets of sources one is held out and another is for development.
const BUCKETS: u64 = 20;

/// The bucket of a source: FNV-1a (64 bit) of its UTF-8, modulo 20. Bucket 0 is held out, bucket 1 is for development.
///
/// A hash, and not a random draw: the split is the same on every machine, in every run and for every order of the lines,
/// and all targets of one source fall on the same side.
fn bucket(source: &str) -> u64 {
    let hash = source
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    hash % BUCKETS
}

/// Splits examples by [`bucket`].
pub fn split(examples: Vec<Example>) -> Split {
    let mut split = Split::default();
    for example in examples {
        match bucket(&example.source) {
            0 => split.held_out.push(example),
            1 => split.development.push(example),
            _ => split.train.push(example),
        }
    }
    split
}

/// Gathers pairs by source, in the order of first appearance; a pair that comes again is dropped.
pub fn group(pairs: impl IntoIterator<Item = (String, String)>) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (source, target) in pairs {
        let place = *places.entry(source).or_insert_with_key(|source| {
            examples.push(Example { source: source.clone(), targets: Vec::new() });
            examples.len() - 1
        });
        let targets = &mut examples[place].targets;
        if !targets.contains(&target) {
            targets.push(target);
        }
    }
    examples
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

    #[test]
    fn targets_of_one_source_stay_together_and_unique() {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        let examples = group([pair("x", "1"), pair("y", "2"), pair("x", "3"), pair("x", "1")]);
        assert_eq!(examples.len(), 2);
        assert_eq!(examples[0], Example { source: "x".into(), targets: vec!["1".into(), "3".into()] });
    }
}
