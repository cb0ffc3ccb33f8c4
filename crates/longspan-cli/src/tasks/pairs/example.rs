//! A source with its targets, and a pair of them as ids.

use std::collections::HashMap;

use crate::tasks::tokens::END;

/// One source with every target that counts as right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    pub source: String,
    /// At least one, no two alike.
    pub targets: Vec<String>,
    /// The line that each target stands in.
    pub lines: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub line: usize,
    pub source: String,
    pub target: String,
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

/// A source as the encoder gets it: with its end marked.
pub fn source_ids(source: &[u32]) -> Vec<u32> {
    [source, &[END]].concat()
}

/// Gathers pairs by source, in the order of first appearance. A pair that comes again is dropped; also how many were.
pub fn group(entries: impl IntoIterator<Item = Entry>) -> (Vec<Example>, usize) {
    let mut dropped = 0;
    let mut examples: Vec<Example> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for Entry { line, source, target } in entries {
        let place = *places.entry(source).or_insert_with_key(|source| {
            examples.push(Example { source: source.clone(), targets: Vec::new(), lines: Vec::new() });
            examples.len() - 1
        });
        let Example { targets, lines, .. } = &mut examples[place];
        if targets.contains(&target) {
            dropped += 1;
        } else {
            targets.push(target);
            lines.push(line);
        }
    }
    (examples, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_one_source_stay_together_and_unique() {
        let entries = [("x", "1"), ("y", "2"), ("x", "3"), ("x", "1")];
        let entries = entries.into_iter().zip(1..).map(|((source, target), line)| Entry {
            line,
            source: source.into(),
            target: target.into(),
        });
        let (examples, dropped) = group(entries);
        assert_eq!((examples.len(), dropped), (2, 1));
        let expected = Example { source: "x".into(), targets: vec!["1".into(), "3".into()], lines: vec![1, 3] };
        assert_eq!(examples[0], expected);
    }
}
