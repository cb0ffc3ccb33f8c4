//! A person's own pairs: tab-separated columns, CSV, or JSON lines with the keys `source` and `target`.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::Value;

use super::example::{Entry, Example, group};
use crate::tasks::csv::two_columns;
use crate::tasks::lines::{self, Format};
use crate::terminal::notes::note;

/// Reads pairs, gathered by source. The name decides on the format: `.jsonl` or `.ndjson`, `.csv`, otherwise tab-separated.
///
/// Lines that are entirely empty are passed over. A column may be empty.
pub fn read(path: &Path) -> Result<Vec<Example>> {
    let (name, bytes) = (lines::name(path), lines::read(path)?);
    let entries = parse(&bytes, Format::of(path, &bytes), &name)?;
    let (examples, dropped) = group(entries);
    if dropped > 0 {
        note(format_args!("{name}: {dropped} pairs are repeated; each counts once"));
    }
    Ok(examples)
}

/// The pairs in the contents of a file; `name` is its name in errors.
pub fn parse(bytes: &[u8], format: Format, name: &str) -> Result<Vec<Entry>> {
    let bytes = lines::unmarked(bytes, name)?;
    let entries = if format == Format::Csv { from_table(bytes, name)? } else { by_line(bytes, format, name)? };
    if entries.is_empty() {
        bail!("{name}: no pairs in it; give a file with one pair a line");
    }
    Ok(entries)
}

fn by_line(bytes: &[u8], format: Format, name: &str) -> Result<Vec<Entry>> {
    let found = lines::each(bytes, name, |text, line| {
        let (source, targets) = if format == Format::JsonLines {
            json_pair(text).map_err(|problem| {
                format!("{problem}; expected an object such as {{\"source\": \"cat\", \"target\": \"K AE T\"}}")
            })?
        } else {
            let [source, target] = lines::two_columns(text, ["source", "target"])?;
            (source.to_owned(), vec![target.to_owned()])
        };
        Ok::<_, String>(Some(targets.into_iter().map(move |target| Entry { line, source: source.clone(), target })))
    })?;
    Ok(found.into_iter().flatten().collect())
}

fn from_table(bytes: &[u8], name: &str) -> Result<Vec<Entry>> {
    let rows = two_columns(bytes, name, ["source", "target"])?.into_iter();
    Ok(rows.map(|(line, [source, target])| Entry { line, source, target }).collect())
}

/// The keys `source` and `target` of an object; others are not looked at. A target may be a list of texts.
fn json_pair(text: &str) -> Result<(String, Vec<String>), String> {
    let value = lines::json(text)?;
    let Value::Object(mut object) = value else { return Err(format!("{value} is not an object")) };
    if object.contains_key("text") && object.contains_key("label") {
        return Err("it has a text and a label; give labelled texts with --labelled".into());
    }
    let mut take = |key: &str| object.remove(key).ok_or_else(|| format!("the key `{key}` is missing"));
    let string = |key: &str, value: Value| match value {
        Value::String(text) => Ok(text),
        other => Err(format!("`{key}` is {other}, not a text")),
    };
    let source = string("source", take("source")?)?;
    let targets = match take("target")? {
        Value::Array(targets) if targets.is_empty() => {
            return Err("the list `target` is empty: give at least one target or remove the line".into());
        }
        Value::Array(targets) => {
            targets.into_iter().map(|target| string("target", target)).collect::<Result<_, _>>()?
        }
        one => vec![string("target", one)?],
    };
    Ok((source, targets))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(bytes: &[u8], format: Format) -> Vec<(usize, String, String)> {
        let entries = parse(bytes, format, "x").unwrap();
        entries.into_iter().map(|Entry { line, source, target }| (line, source, target)).collect()
    }

    fn message(bytes: &[u8], json: bool) -> String {
        parse(bytes, if json { Format::JsonLines } else { Format::Tabs }, "x").unwrap_err().to_string()
    }

    #[test]
    fn columns_may_be_empty_and_line_ends_may_be_windows() {
        let pairs = texts(b"\xef\xbb\xbfa\tb\r\n\n\tc\r\nd\t", Format::Tabs);
        let expected = [(1, "a", "b"), (3, "", "c"), (4, "d", "")].map(|(n, a, b)| (n, a.to_string(), b.to_string()));
        assert_eq!(pairs, expected);
    }

    #[test]
    fn json_lines_take_one_target_or_several() {
        let pairs = b"{\"source\":\"a\",\"target\":[\"1\",\"2\"]}\n{\"source\":\"b\",\"target\":\"3\"}";
        assert_eq!(texts(pairs, Format::JsonLines).len(), 3);
        assert!(message(b"{\"source\":\"a\"}", true).starts_with("x, line 1: the key `target` is missing"));
        assert!(message(b"\n{", true).starts_with("x, line 2: no JSON: EOF"));
        assert!(message(b"{\"source\":\"a\",\"target\":[]}", true).contains("is empty"));
        assert!(message(b"{\"source\":\"a\",\"target\":[1]}", true).contains("`target` is 1, not a text"));
        assert!(message(b"{\"source\":\"a\",\"target\":null}", true).contains("`target` is null, not a text"));
        assert!(message(b"[1]", true).contains("[1] is not an object"));
    }

    #[test]
    fn utf_16_is_recognised() {
        assert!(message(b"\xff\xfea\0\t\0b\0\n\0", false).contains("UTF-16 text; convert it"));
    }

    #[test]
    fn the_end_of_the_name_decides() {
        let of = |name: &str, bytes: &[u8]| Format::of(Path::new(name), bytes);
        assert!(of("a.JSONL", b"") == Format::JsonLines && of("a.jsonl.GZ", b"") == Format::JsonLines);
        assert!(of("a.tsv", b"{") == Format::Tabs && of("b", b"") == Format::Tabs);
        assert!(of("-", b" {}") == Format::JsonLines && of("-", b"a\tb") == Format::Tabs);
    }
}
