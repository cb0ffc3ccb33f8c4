//! The CMU pronouncing dictionary.

use std::io::Read;

use anyhow::Result;
use flate2::read::GzDecoder;

use super::example::{Entry, Example, group};

/// `word P1 P2 … # comment`, one pronunciation a line; further ones of a word are marked `word(2)`. The file of the crate `cmudict-fast`
/// 0.8, in gzip.
const DICTIONARY: &[u8] = include_bytes!("../../../assets/cmudict.dict.gz");

/// Every word with all its pronunciations, phonemes separated by spaces, without stress marks.
pub fn examples() -> Result<Vec<Example>> {
    let mut text = String::new();
    GzDecoder::new(DICTIONARY).read_to_string(&mut text)?;
    let entries = text.lines().zip(1..).filter_map(|(text, line)| {
        let (source, target) = entry(text)?;
        Some(Entry { line, source, target })
    });
    Ok(group(entries).0)
}

fn entry(line: &str) -> Option<(String, String)> {
    let line = line.split('#').next().unwrap_or_default();
    if line.starts_with(";;") {
        return None;
    }
    let mut parts = line.split_whitespace();
    let label = parts.next()?;
    let word = match label.find('(') {
        // A leading bracket is part of the word.
        Some(at) if at > 0 => &label[..at],
        _ => label,
    };
    let phonemes: Vec<&str> = parts.map(|symbol| symbol.trim_end_matches(|c: char| c.is_ascii_digit())).collect();
    Some((word.to_string(), phonemes.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stress_comments_and_variant_marks_are_removed() {
        assert_eq!(entry("hiv EY1 CH AY1 V IY1 # abbrev"), Some(("hiv".into(), "EY CH AY V IY".into())));
        assert_eq!(entry("spieth(2) S P AY1 AH0 TH # old"), Some(("spieth".into(), "S P AY AH TH".into())));
        assert_eq!(entry(";; a comment"), None);
        assert_eq!(entry(""), None);
    }

    #[test]
    fn the_whole_dictionary_has_39_phonemes_and_its_variants() {
        let examples = examples().unwrap();
        assert!(examples.len() > 120_000, "{} words", examples.len());
        let mut phonemes: Vec<&str> =
            examples.iter().flat_map(|e| &e.targets).flat_map(|target| target.split(' ')).collect();
        phonemes.sort_unstable();
        phonemes.dedup();
        assert_eq!(phonemes.len(), 39, "{phonemes:?}");
        let read = examples.iter().find(|e| e.source == "read").expect("the word is listed");
        assert_eq!(read.targets, ["R EH D", "R IY D"]);
    }
}
