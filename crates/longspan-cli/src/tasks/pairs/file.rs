//! A person's own pairs: tab-separated columns, CSV, or JSON, with the columns `source` and `target`.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde_json::Value;

use super::example::{Entry, Example, group};
use crate::run::columns::Columns;
use crate::tasks::lines;
use crate::tasks::table::columns::{TextColumn, is_time, say_read};
use crate::tasks::table::{Form, Table, contents, counted_names};
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;

pub const SOURCE: TextColumn = TextColumn {
    key: "source",
    flag: "--source",
    names: &["src", "input", "question", "prompt", "instruction", "word", "from", "key"],
};
pub const TARGET: TextColumn = TextColumn {
    key: "target",
    flag: "--target",
    names: &["tgt", "output", "answer", "response", "completion", "pronunciation", "to", "value"],
};

/// The pairs of a file, and what its columns are called.
pub fn read(path: &Path, columns: &Columns) -> Result<(Vec<Example>, Columns)> {
    let (name, bytes) = contents(path)?;
    let (entries, found) = parse(&bytes, &lines::ending(path), &name, columns)?;
    let (examples, dropped) = group(entries);
    note_some(dropped, |dropped| format!("{name}: {}; each counts once", counted(dropped, "repeated pairs")));
    Ok((examples, found))
}

/// The pairs in the contents of a file whose name has this end; `name` is its name in errors. A target may be a list of texts.
///
/// Lines that are entirely empty are passed over. A column may be empty.
pub fn parse(bytes: &[u8], ending: &str, name: &str, columns: &Columns) -> Result<(Vec<Entry>, Columns)> {
    let text = lines::text(bytes, name)?;
    let none = || anyhow!("{name}: no pairs in it; give a file with one pair a line");
    let table =
        Table::of_texts(&text, Form::of(ending, &text), name, &[&SOURCE, &TARGET], columns)?.ok_or_else(none)?;
    if columns.source.is_none() && table.find("text").is_some() && table.find("label").is_some() {
        bail!("{}: it has a text and a label; give labelled texts with --labelled", table.at_header());
    }
    let (source, target) = if are_in_order(&table, columns) {
        (0, 1)
    } else {
        let source = SOURCE.place(&table, columns.source.as_ref(), None)?;
        (source, TARGET.place(&table, columns.target.as_ref(), Some(source))?)
    };
    say_read(&table, [(&SOURCE, source), (&TARGET, target)]);
    let mut entries = Vec::new();
    for row in &table.rows {
        let string = |key: &str, value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            other => {
                let missing = format!("the key `{key}` is missing");
                let problem = if other.is_null() { missing } else { format!("`{key}` is {other}, not a text") };
                Err(row.wrong(name, format_args!("{problem}; expected an object such as {EXAMPLE}")))
            }
        };
        let targets = match &row.cells[target] {
            Value::Array(targets) if targets.is_empty() => {
                return Err(row.wrong(name, "the list `target` is empty: give at least one target or remove the line"));
            }
            Value::Array(targets) => targets.iter().map(|target| string("target", target)).collect::<Result<_>>()?,
            one => vec![string("target", one)?],
        };
        let text = string("source", &row.cells[source])?;
        entries.extend(targets.into_iter().map(|target| Entry { line: row.line, source: text.clone(), target }));
    }
    if entries.is_empty() {
        return Err(none());
    }
    for (side, is_empty) in [
        ("source", entries.iter().all(|entry| entry.source.is_empty())),
        ("target", entries.iter().all(|entry| entry.target.is_empty())),
    ] {
        if is_empty {
            bail!("{name}: every {side} is empty, so there is nothing to learn; name the column with --{side}");
        }
    }
    [source, target].into_iter().for_each(|place| table.say_empty(place));
    let (source, target) =
        (SOURCE.named(&table, source, &columns.source), TARGET.named(&table, target, &columns.target));
    Ok((entries, Columns { source, target, ..columns.clone() }))
}

/// Whether the first column is the source and the second the target, where names say nothing, and both hold texts: of two columns, or of those
/// that have no names.
fn are_in_order(table: &Table, columns: &Columns) -> bool {
    let header = &table.header;
    let are_known = header.iter().any(|title| SOURCE.knows(title) || TARGET.knows(title));
    let have_names = *header != counted_names(header.len());
    if are_known || columns.source.is_some() || columns.target.is_some() || header.len() < 2 {
        return false;
    }
    // The keys of objects have no order.
    if have_names && (header.len() > 2 || table.keys) {
        return false;
    }
    let holds_texts = |place| {
        let some: Vec<String> = table.texts(place).flatten().take(100).collect();
        2 * some.iter().filter(|text| is_time(text)).count() < some.len()
    };
    if !(0..2).all(holds_texts) {
        return false;
    }
    if have_names {
        note(format_args!(
            "{}: the source is taken from the column `{}`, the target from `{}`; --source and --target decide otherwise",
            table.name,
            table.title(0),
            table.title(1)
        ));
    }
    true
}

const EXAMPLE: &str = "{\"source\": \"cat\", \"target\": \"K AE T\"}";

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(bytes: &[u8], ending: &str) -> Vec<(usize, String, String)> {
        let entries = parse(bytes, ending, "x", &Columns::default()).unwrap().0;
        entries.into_iter().map(|Entry { line, source, target }| (line, source, target)).collect()
    }

    fn message(bytes: &[u8], ending: &str) -> String {
        parse(bytes, ending, "x", &Columns::default()).unwrap_err().to_string()
    }

    #[test]
    fn columns_may_be_empty_and_line_ends_may_be_windows() {
        let pairs = texts(b"\xef\xbb\xbfa\tb\r\n\n\tc\r\nd\t", "tsv");
        let expected = [(1, "a", "b"), (3, "", "c"), (4, "d", "")].map(|(n, a, b)| (n, a.to_string(), b.to_string()));
        assert_eq!(pairs, expected);
        // Those of old Macs; a first line that names the columns, in any order; the columns by names that they often have.
        assert_eq!(texts(b"a\tb\rc\td\r", "tsv").len(), 2);
        let named = [(2, "a", "b")].map(|(n, a, b)| (n, a.to_string(), b.to_string()));
        for (bytes, ending) in [
            (&b"Target\tnote\tsource\nb\tx\ta\n"[..], "tsv"),
            (b"question;answer\na;b\n", "csv"),
            (b"src,other\na,b\n", "csv"),
        ] {
            assert_eq!(texts(bytes, ending), named);
        }
        // Names that say nothing, and none: from left to right.
        for (bytes, ending) in [
            (&b"en,fr\na,b\n"[..], "csv"),
            (b"\na\tb\tby x\n", "tsv"),
            (b"{\"column 1\":\n\"a\",\"column 2\":\"b\"}", "json"),
        ] {
            let found: Vec<(String, String)> = texts(bytes, ending).into_iter().map(|(_, a, b)| (a, b)).collect();
            assert_eq!(found, [("a".to_string(), "b".to_string())]);
        }
        // To predict for, in a run that learned from such a file.
        let columns = Columns { text: Some("column 2".into()), ..Columns::default() };
        for text in ["a\tb\tc\nd\te\tf\n", "a\tb\nc\td\n"] {
            let asked = Table::of_texts(text, Form::Tabs, "x", &[&SOURCE], &columns).unwrap().unwrap();
            assert_eq!((asked.find("column 2"), asked.rows.len()), (Some(1), 2));
        }
        assert!(message(b"date,fr\n2020-01-01,b\n", "csv").contains("no column `source`"));
        let columns = Columns { source: Some("en".into()), target: Some("fr".into()), ..Columns::default() };
        assert_eq!(parse(b"fr,de,en\nb,x,a\n", "csv", "x", &columns).unwrap().0[0].source, "a");
        assert!(
            message(b"fr,de,en\nb,x,a\n", "csv")
                .contains("no column `source` among `fr`, `de`, `en`; name it with --source NAME")
        );
    }

    #[test]
    fn json_takes_one_target_or_several() {
        let pairs = b"{\"source\":\"a\",\"target\":[\"1\",\"2\"]}\n{\"source\":\"b\",\"target\":\"3\"}";
        assert_eq!(texts(pairs, "jsonl").len(), 3);
        assert_eq!(
            texts(b"[{\"source\":\"a\",\"target\":\"1\"},\n{\"source\":\"b\",\"target\":\"3\"}]", "json").len(),
            2
        );
        for (text, part) in [
            ("{\"source\":\"a\"}\n{\"source\":\"a\",\"target\":\"b\"}", "x, line 1: the key `target` is missing"),
            ("\n{", "x, line 2: no JSON: EOF"),
            ("{\"source\":\"a\",\"target\":[]}", "is empty"),
            ("{\"source\":\"a\",\"target\":[1]}", "`target` is 1, not a text"),
            ("{\"source\":\"a\",\"target\":7}", "`target` is 7, not a text"),
            ("[[1]]", "[1] is not an object"),
        ] {
            assert!(message(text.as_bytes(), "jsonl").contains(part), "{text}");
        }
    }

    #[test]
    fn utf_16_is_recognised() {
        assert!(message(b"\xff\xfea\0\t\0b\0\n\0", "tsv").contains("UTF-16 text; convert it"));
    }
}
