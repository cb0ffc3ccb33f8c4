//! A source with its targets, and a pair of them as ids.

use std::collections::HashMap;

/// One source with every target that counts as right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    pub source: String,
    /// At least one, no two alike.
    pub targets: Vec<String>,
}

/// A training pair as ids, without start and end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    pub source: Vec<u32>,
    pub target: Vec<u32>,
}

impl Pair {
    /// Tokens that the decoder predicts: the target and its end.
    pub fn predicted(&self) -> usize {
        self.target.len() + 1
    }
}

/// Gathers pairs by source, in the order of first appearance. A pair that comes again is dropped; also how many were.
pub fn group(pairs: impl IntoIterator<Item = (String, String)>) -> (Vec<Example>, usize) {
    let mut dropped = 0;
    let mut examples: Vec<Example> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (source, target) in pairs {
        let place = *places.entry(source).or_insert_with_key(|source| {
            examples.push(Example { source: source.clone(), targets: Vec::new() });
            examples.len() - 1
        });
        let targets = &mut examples[place].targets;
        if targets.contains(&target) {
            dropped += 1;
        } else {
            targets.push(target);
        }
    }
    (examples, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_one_source_stay_together_and_unique() {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        let (examples, dropped) = group([pair("x", "1"), pair("y", "2"), pair("x", "3"), pair("x", "1")]);
        assert_eq!((examples.len(), dropped), (2, 1));
        assert_eq!(examples[0], Example { source: "x".into(), targets: vec!["1".into(), "3".into()] });
    }
}
