//! A few answers of a model, as a table that fits the terminal.

use console::{Term, measure_text_width, truncate_str};

const WIDTH: usize = 100;

const SOURCE: usize = 14;

/// Ends an answer that was cut at the limit.
pub const CUT: &str = " …";

pub struct Sample {
    pub source: String,
    pub answer: String,
    pub cut: bool,
    /// What would be right, where that is known.
    pub expected: Option<String>,
}

/// Sources, answers, and what was expected of those that are wrong.
pub fn table(samples: &[Sample]) -> String {
    let width = Term::stdout().size_checked().map_or(WIDTH, |(_, columns)| usize::from(columns).max(40));
    samples.iter().map(|sample| line(sample, width)).collect()
}

fn line(sample: &Sample, width: usize) -> String {
    let cell = |text: &str, columns: usize| truncate_str(&visible(text), columns, "…").into_owned();
    // Margins, the mark and the words between take 22 columns.
    let each = width.saturating_sub(22) / 3;
    let source = cell(&sample.source, each);
    let padding = " ".repeat(SOURCE.min(each).saturating_sub(measure_text_width(&source)));
    let wrong = sample.expected.as_ref().filter(|expected| **expected != sample.answer);
    let wrong = wrong.map(|expected| format!("  (expected {})", cell(expected, each))).unwrap_or_default();
    let mark = if sample.cut { CUT } else { "" };
    format!("  {source}{padding} {}{mark}{wrong}\n", cell(&sample.answer, each))
}

/// So many things: `1 label`, `2 labels`, `1 series`.
pub fn counted(count: usize, things: &str) -> String {
    let is_one = count == 1 && !things.ends_with("series");
    format!("{count} {}", if is_one { things.trim_end_matches('s') } else { things })
}

/// A list with so many of these at most, and how many more there are.
pub fn listed(all: &[String], most: usize) -> String {
    let more = all.len().saturating_sub(most);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    all[..all.len().min(most)].join(", ") + &more
}

/// A text in one line, without characters that a terminal would obey.
pub fn visible(text: &str) -> String {
    escaped(text, |c| c.is_control() || ends_line(c))
}

/// A text in one line: whatever some program takes for the end of a line is written as `\n` or `\u{2028}`.
pub fn one_line(text: &str) -> String {
    escaped(text, ends_line)
}

fn ends_line(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn escaped(text: &str, which: impl Fn(char) -> bool) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if which(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_one_line_for_every_program() {
        let text = "a\nb\rc\x0bd\x0ce\x1cf\u{85}g\u{2028}h\u{2029}i\tj\x1fk 猫";
        let line = one_line(text);
        assert_eq!(line, "a\\nb\\rc\\u{b}d\\u{c}e\\u{1c}f\\u{85}g\\u{2028}h\\u{2029}i\tj\x1fk 猫");
        assert_eq!(visible("a\u{2028}\tb"), "a\\u{2028}\\tb");
    }

    #[test]
    fn a_sample_fits_one_line_and_sends_no_control_character() {
        let long = |c: &str| c.repeat(200);
        let sample = Sample {
            source: long("猫"),
            answer: format!("\u{1b}[2J\n{}", long("b")),
            cut: true,
            expected: Some(long("c")),
        };
        for width in [40, 80, 100] {
            let line = line(&sample, width);
            assert!(measure_text_width(line.trim_end()) <= width, "{line}");
            assert!(line.trim_end().chars().all(|c| !c.is_control()) && line.contains("expected c"), "{line}");
        }
        let right = Sample { source: "a".into(), answer: "b".into(), cut: false, expected: Some("b".into()) };
        assert_eq!(line(&right, 80), format!("  a{} b\n", " ".repeat(13)));
        assert_eq!(line(&Sample { cut: true, ..right }, 80), format!("  a{} b …\n", " ".repeat(13)));
    }
}
