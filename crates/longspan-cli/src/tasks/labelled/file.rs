//! A person's own labelled texts: tab-separated columns, or JSON lines with the keys `text` and `label`.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde_json::Value;

use crate::tasks::lines::{self, utf8};
use crate::terminal::notes::note;

/// A text and its label.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Labelled {
    pub text: String,
    pub label: String,
}

/// Reads labelled texts. The name decides on the format: `.jsonl` or `.ndjson`, otherwise tab-separated. Empty lines are
/// passed over.
pub fn read(path: &Path) -> Result<Vec<Labelled>> {
    let (name, bytes) = (lines::name(path), lines::read(path)?);
    let ending = path.to_string_lossy().to_lowercase();
    let ending = ending.strip_suffix(".gz").unwrap_or(&ending);
    let braced = lines::is_standard_input(path) && bytes.trim_ascii_start().starts_with(b"{");
    let json = braced || ending.ends_with(".jsonl") || ending.ends_with(".ndjson");
    let (all, again) = parse(&bytes, json, &name)?;
    if again > 0 {
        note(format_args!("{name}: {again} lines come again and count once"));
    }
    Ok(all)
}

/// The labelled texts, no two alike, and how many lines came again.
fn parse(bytes: &[u8], json: bool, name: &str) -> Result<(Vec<Labelled>, usize)> {
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        bail!("{name}: UTF-16 text; convert it, such as with `iconv -f utf-16 -t utf-8`");
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let (mut all, mut known, mut again) = (Vec::new(), HashSet::new(), 0);
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let at = format!("{name}, line {}", index + 1);
        let line = utf8(line, &at)?;
        let labelled = if json { from_json(line) } else { from_columns(line) };
        let labelled = labelled.map_err(|problem| anyhow!("{at}: {problem}"))?;
        if labelled.label.is_empty() {
            bail!("{at}: the label is empty; give one, or remove the line");
        }
        if known.insert(labelled.clone()) {
            all.push(labelled);
        } else {
            again += 1;
        }
    }
    if all.is_empty() {
        bail!("{name}: no labelled texts in it; give a file with one text and its label a line");
    }
    Ok((all, again))
}

fn from_columns(line: &str) -> Result<Labelled, String> {
    let columns: Vec<&str> = line.split('\t').collect();
    let [text, label] = columns[..] else {
        let plural = if columns.len() == 1 { "" } else { "s" };
        let help = if columns.len() == 1 {
            "separate text and label by a tab, or learn a text as it is with --text"
        } else {
            "keep two columns, as `cut -f 1,2` does"
        };
        return Err(format!("{} column{plural}, expected two (text, tab, label); {help}", columns.len()));
    };
    Ok(Labelled { text: text.into(), label: label.trim().into() })
}

fn from_json(line: &str) -> Result<Labelled, String> {
    const EXAMPLE: &str = "expected an object such as {\"text\": \"how nice\", \"label\": \"good\"}";
    let value: Value = serde_json::from_str(line).map_err(|error| {
        // serde_json counts from the line it was given: its own "line 1" would mislead.
        let problem = error.to_string();
        format!("no JSON: {}; {EXAMPLE}", problem.split(" at line ").next().unwrap_or_default())
    })?;
    if value.get("source").is_some() && value.get("target").is_some() {
        return Err("it has a source and a target; give such pairs with --pairs".into());
    }
    let text = value["text"].as_str().ok_or_else(|| format!("the key `text` has no text; {EXAMPLE}"))?;
    let label = match &value["label"] {
        Value::String(label) => label.trim().to_owned(),
        label @ (Value::Number(_) | Value::Bool(_)) => label.to_string(),
        _ => return Err(format!("the key `label` has no label; {EXAMPLE}")),
    };
    Ok(Labelled { text: text.into(), label })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_give_the_same() {
        let tabs = parse(b"\xef\xbb\xbfab c\tgood\r\n\nd\t1\nd\t1\n", false, "f").unwrap();
        let json = b"{\"text\": \"ab c\", \"label\": \"good\"}\n{\"label\": 1, \"text\": \"d\", \"other\": []}\n";
        let json = parse(json, true, "f").unwrap();
        assert_eq!(tabs.0, json.0);
        assert_eq!((tabs.1, json.1), (1, 0));
        assert_eq!(tabs.0[1], Labelled { text: "d".into(), label: "1".into() });
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let error = |bytes: &[u8], json| parse(bytes, json, "f").unwrap_err().to_string();
        assert!(error(b"a\tb\nc\n", false).contains("f, line 2: 1 column, expected two (text, tab, label)"));
        assert!(error(b"a\tb\tc\n", false).contains("3 columns"));
        assert!(error(b"a\t \n", false).contains("the label is empty"));
        assert!(error(b"a\xff\tb\n", false).contains("line 1, byte 2: invalid UTF-8"));
        assert!(error(b"\n", false).contains("no labelled texts"));
        assert!(error(b"{\"text\": 1, \"label\": 2}", true).contains("`text` has no text"));
        assert!(error(b"{\"text\": \"a\", \"label\": null}", true).contains("`label` has no label"));
        assert!(error(b"{\"source\": \"a\", \"target\": \"b\"}", true).contains("--pairs"));
        assert!(error(b"{a", true).contains("no JSON"));
    }
}
