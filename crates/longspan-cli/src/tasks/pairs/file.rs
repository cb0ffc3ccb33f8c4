//! A person's own pairs: tab-separated columns, or JSON lines with the keys `source` and `target`.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;

use super::example::{Example, group};
use crate::tasks::lines::utf8;

/// One line of a JSON-lines file; other keys are not looked at.
#[derive(Deserialize)]
struct JsonPair {
    source: String,
    target: JsonTarget,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum JsonTarget {
    One(String),
    Several(Vec<String>),
}

/// Reads pairs, gathered by source. The name decides on the format: `.jsonl` or `.ndjson`, otherwise tab-separated.
///
/// Lines that are entirely empty are passed over. A column may be empty.
pub fn read(path: &Path) -> Result<Vec<Example>> {
    let bytes = std::fs::read(path)
        .with_context(|| format!("cannot read {}", path.display()))
        .map_err(|error| anyhow!("{error:#}; check the name and the permissions"))?;
    let json = path.extension().is_some_and(|e| e == "jsonl" || e == "ndjson");
    let pairs = parse(&bytes, json, &path.display().to_string())?;
    Ok(group(pairs))
}

fn parse(bytes: &[u8], json: bool, name: &str) -> Result<Vec<(String, String)>> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut pairs = Vec::new();
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let at = format!("{name}, line {}", index + 1);
        let text = utf8(line, &at)?;
        if json {
            let pair: JsonPair = serde_json::from_str(text).map_err(|error| {
                // serde_json counts from the line it was given: its own "line 1" would mislead.
                let problem = error.to_string();
                let problem = problem.split(" at line ").next().unwrap_or_default();
                anyhow!("{at}: {problem}; expected an object such as {{\"source\": \"cat\", \"target\": \"K AE T\"}}")
            })?;
            match pair.target {
                JsonTarget::One(target) => pairs.push((pair.source, target)),
                JsonTarget::Several(targets) if targets.is_empty() => {
                    bail!("{at}: the list `target` is empty; give at least one target or remove the line")
                }
                JsonTarget::Several(targets) => pairs.extend(targets.into_iter().map(|t| (pair.source.clone(), t))),
            }
        } else {
            let columns: Vec<&str> = text.split('\t').collect();
            let [source, target] = columns[..] else {
                let mend = if columns.len() == 1 {
                    "separate source and target by a tab"
                } else {
                    "keep two columns, as `cut -f 1,2` does"
                };
                let plural = if columns.len() == 1 { "" } else { "s" };
                bail!("{at}: {} column{plural}, expected two (source, tab, target); {mend}", columns.len());
            };
            pairs.push((source.to_string(), target.to_string()));
        }
    }
    if pairs.is_empty() {
        bail!("{name}: no pairs in it; give a file with one pair a line");
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: &[u8], json: bool) -> String {
        parse(bytes, json, "x").unwrap_err().to_string()
    }

    #[test]
    fn columns_may_be_empty_and_line_ends_may_be_windows() {
        let pairs = parse(b"\xef\xbb\xbfa\tb\r\n\n\tc\r\nd\t", false, "x").unwrap();
        let expected = [("a", "b"), ("", "c"), ("d", "")].map(|(a, b)| (a.to_string(), b.to_string()));
        assert_eq!(pairs, expected);
    }

    #[test]
    fn a_bad_line_is_named_with_its_number() {
        assert!(message(b"a\tb\nc\n", false).starts_with("x, line 2: 1 column, expected two"));
        assert!(message(b"a\tb\tc\n", false).starts_with("x, line 1: 3 columns, expected two"));
        assert!(message(b"a\tb\nab\xff\tc\n", false).starts_with("x, line 2, byte 3: invalid UTF-8 (0xff)"));
        assert!(message(b"", false).starts_with("x: no pairs"));
    }

    #[test]
    fn json_lines_take_one_target_or_several() {
        let pairs =
            parse(b"{\"source\":\"a\",\"target\":[\"1\",\"2\"]}\n{\"source\":\"b\",\"target\":\"3\"}", true, "x");
        assert_eq!(pairs.unwrap().len(), 3);
        assert!(message(b"{\"source\":\"a\"}", true).starts_with("x, line 1: missing field `target`"));
        assert!(message(b"\n{", true).starts_with("x, line 2: EOF"));
        assert!(message(b"{\"source\":\"a\",\"target\":[]}", true).contains("is empty"));
    }
}
