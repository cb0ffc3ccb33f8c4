//! A person's own labelled texts: tab-separated columns, or JSON lines or CSV with the keys `text` and `label`.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::tasks::csv::two_columns;
use crate::tasks::lines::{self, Format};
use crate::terminal::notes::note;

/// A text and its label.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Labelled {
    pub text: String,
    pub label: String,
}

/// Reads labelled texts. The name decides on the format: `.jsonl` or `.ndjson`, `.csv`, otherwise tab-separated. Empty lines are
/// passed over.
pub fn read(path: &Path) -> Result<Vec<Labelled>> {
    let (name, bytes) = (lines::name(path), lines::read(path)?);
    let (all, again) = parse(&bytes, Format::of(path, &bytes), &name)?;
    if again > 0 {
        note(format_args!("{name}: {again} lines repeat a text and its label; each counts once"));
    }
    Ok(all)
}

/// The labelled texts, no two alike, and how many lines came again.
fn parse(bytes: &[u8], format: Format, name: &str) -> Result<(Vec<Labelled>, usize)> {
    let bytes = lines::unmarked(bytes, name)?;
    let (mut all, mut known, mut again) = (Vec::new(), HashSet::new(), 0);
    let found = if format == Format::Csv { from_table(bytes, name)? } else { by_line(bytes, format, name)? };
    for (line, labelled) in found {
        if labelled.label.is_empty() {
            bail!("{name}, line {line}: the label is empty; give one, or remove the line");
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

/// Labelled texts, each with the line in which it begins.
type Found = Vec<(usize, Labelled)>;

fn by_line(bytes: &[u8], format: Format, name: &str) -> Result<Found> {
    let read = if format == Format::JsonLines { from_json } else { from_columns };
    lines::each(bytes, name, |text, line| Ok::<_, String>(Some((line, read(text)?))))
}

fn from_table(bytes: &[u8], name: &str) -> Result<Found> {
    let rows = two_columns(bytes, name, ["text", "label"])?.into_iter();
    Ok(rows.map(|(line, [text, label])| (line, Labelled { text, label: label.trim().into() })).collect())
}

fn from_columns(line: &str) -> Result<Labelled, String> {
    let [text, label] = lines::two_columns(line, ["text", "label"])?;
    Ok(Labelled { text: text.into(), label: label.trim().into() })
}

fn from_json(line: &str) -> Result<Labelled, String> {
    const EXAMPLE: &str = "expected an object such as {\"text\": \"how nice\", \"label\": \"good\"}";
    let value = lines::json(line).map_err(|problem| format!("{problem}; {EXAMPLE}"))?;
    if value.get("source").is_some() && value.get("target").is_some() {
        return Err("it has a source and a target; give such pairs with --pairs".into());
    }
    if value.get("values").is_some() {
        return Err("it has values; give numeric series with --series".into());
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
    fn all_formats_give_the_same() {
        let tabs = parse(b"\xef\xbb\xbfab c\tgood\r\n\nd\t1\nd\t1\n", Format::Tabs, "f").unwrap();
        let json = b"{\"text\": \"ab c\", \"label\": \"good\"}\n{\"label\": 1, \"text\": \"d\", \"other\": []}\n";
        let json = parse(json, Format::JsonLines, "f").unwrap();
        let table = b"label,other,Text\ngood,3,\"ab c\"\n 1 ,,d\n";
        let table = parse(table, Format::Csv, "f").unwrap();
        assert_eq!((&tabs.0, &tabs.0), (&json.0, &table.0));
        assert_eq!((tabs.1, json.1), (1, 0));
        assert_eq!(tabs.0[1], Labelled { text: "d".into(), label: "1".into() });
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let error = |bytes: &[u8], json| {
            let format = if json { Format::JsonLines } else { Format::Tabs };
            parse(bytes, format, "f").unwrap_err().to_string()
        };
        assert!(error(b"a\tb\nc\n", false).contains("f, line 2: 1 column, expected two (text, tab, label)"));
        assert!(error(b"a\tb\tc\n", false).contains("3 columns"));
        assert!(error(b"a\t \n", false).contains("the label is empty"));
        assert!(error(b"a\xff\tb\n", false).contains("line 1, byte 2: invalid UTF-8"));
        assert!(error(b"\n", false).contains("no labelled texts"));
        assert!(error(b"{\"text\": 1, \"label\": 2}", true).contains("`text` has no text"));
        assert!(error(b"{\"text\": \"a\", \"label\": null}", true).contains("`label` has no label"));
        assert!(error(b"{\"source\": \"a\", \"target\": \"b\"}", true).contains("--pairs"));
        assert!(error(b"{a", true).contains("no JSON"));
        let error = |bytes: &[u8]| parse(bytes, Format::Csv, "f").unwrap_err().to_string();
        assert!(
            error(b"source,target\na,b\n").contains("no column `text`; let the first line name two columns `text`")
        );
        assert!(error(b"text,label\na,b\n\nc,\n").contains("f, line 4: the label is empty"));
    }
}
