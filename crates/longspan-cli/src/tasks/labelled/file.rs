//! A person's own labelled texts: tab-separated columns, CSV or JSON, with the columns `text` and `label`.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde_json::Value;

use crate::run::columns::Columns;
use crate::tasks::lines;
use crate::tasks::split::composed;
use crate::tasks::table::columns::{TextColumn, holds_dates, say_read};
use crate::tasks::table::{Form, Table, contents};
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;

pub const TEXT: TextColumn = TextColumn {
    key: "text",
    flag: "--text-column",
    names: &["sentence", "review", "comment", "message", "content", "body", "document", "tweet", "title", "question"],
};
pub const LABEL: TextColumn =
    TextColumn { key: "label", flag: "--label", names: &["class", "category", "target", "sentiment", "labels", "y"] };

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Labelled {
    pub text: String,
    pub label: String,
}

/// The labelled texts of a file, and what its columns are called.
pub fn read(path: &Path, columns: &Columns) -> Result<(Vec<Labelled>, Columns)> {
    let (name, bytes) = contents(path)?;
    let (all, again, found) = parse(&bytes, &lines::ending(path), &name, columns)?;
    note_some(again, |again| {
        format!("{name}: {} with a text and label that came before; each counts once", counted(again, "lines"))
    });
    let texts: HashSet<&str> = all.iter().map(|one| one.text.as_str()).collect();
    note_some(all.len() - texts.len(), |more| {
        format!("{name}: {} with another label than before; each counts as an example", counted(more, "texts"))
    });
    Ok((all, found))
}

/// The labelled texts, no two alike, how many lines came again, and what the columns are called.
pub fn parse(bytes: &[u8], ending: &str, name: &str, columns: &Columns) -> Result<(Vec<Labelled>, usize, Columns)> {
    let text = lines::text(bytes, name)?;
    let (text, ending) = after_marks(&text, name)?.map_or((text, ending), |rows| (Cow::Owned(rows), "tsv"));
    let none = || anyhow!("{name}: no labelled texts in it; give a file with one text and its label a line");
    let mut table =
        Table::of_texts(&text, Form::of(ending, &text), name, &[&TEXT, &LABEL], columns)?.ok_or_else(none)?;
    table.name_decimal(columns);
    let has = |key: &str| table.find(key).is_some();
    if columns.text.is_none() && !has("text") && has("source") && has("target") {
        bail!("{}: it has a source and a target; give such pairs with --pairs", table.at_header());
    }
    if columns.text.is_none() && !has("text") && has("values") {
        bail!("{}: it has values; give numeric series with --series", table.at_header());
    }
    let (place, label) = match guessed(&table, columns) {
        Some(found) => found,
        None => {
            let place = TEXT.place(&table, columns.text.as_ref(), None)?;
            (place, LABEL.place(&table, columns.label.as_ref(), Some(place))?)
        }
    };
    say_read(&table, [(&TEXT, place), (&LABEL, label)]);
    table.say_empty(place);
    let (own, own_label) = (TEXT.named(&table, place, &columns.text), LABEL.named(&table, label, &columns.label));
    let found = Columns { text: own, label: own_label, ..columns.clone() };
    table.settle_numbers(&[], Some(label))?;
    let plain = table.with_plain_numbers(&[], Some(label));
    let table = plain.as_ref().unwrap_or(&table);
    let (mut all, mut known, mut again) = (Vec::new(), HashSet::new(), 0);
    for row in &table.rows {
        let Value::String(text) = &row.cells[place] else {
            return Err(row.wrong(name, format_args!("the key `{}` has no text; {EXAMPLE}", table.header[place])));
        };
        let label = match &row.cells[label] {
            Value::String(label) => composed(label).into_owned(),
            label @ (Value::Number(_) | Value::Bool(_)) => label.to_string(),
            Value::Array(_) => {
                let several =
                    format_args!("the key `{}` has a list; give one label, or a line for each", table.header[label]);
                return Err(row.wrong(name, several));
            }
            _ => return Err(row.wrong(name, format_args!("the key `{}` has no label; {EXAMPLE}", table.header[label]))),
        };
        if label.is_empty() {
            return Err(row.wrong(name, "the label is empty; give one, or remove the line"));
        }
        let labelled = Labelled { text: text.clone(), label };
        if known.insert(labelled.clone()) {
            all.push(labelled);
        } else {
            again += 1;
        }
    }
    if all.is_empty() {
        return Err(none());
    }
    let texts: HashSet<&str> = all.iter().map(|one| one.text.as_str()).collect();
    let labels: HashSet<&str> = all.iter().map(|one| one.label.as_str()).collect();
    if 10 * texts.len() <= labels.len() {
        let (texts, labels) = (counted(texts.len(), "texts"), counted(labels.len(), "labels"));
        bail!(
            "{name}: {texts} and {labels}, as if each label stood before its text; put the text first, or name the columns with \
             --text-column and --label"
        );
    }
    Ok((all, again, found))
}

/// The same as columns where each line begins with its label as fastText writes it.
fn after_marks(text: &str, name: &str) -> Result<Option<String>> {
    const MARK: &str = "__label__";
    let is_marked = |line: &str| line.trim().is_empty() || line.starts_with(MARK);
    if !text.starts_with(MARK) || !text.lines().all(is_marked) {
        return Ok(None);
    }
    let row = |(n, line): (usize, &str)| {
        let Some(line) = line.strip_prefix(MARK) else { return Ok("\n".into()) };
        let (label, text) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if text.starts_with(MARK) {
            bail!("{name}, line {}: several labels; give one, or a line for each", n + 1);
        }
        Ok(format!("{}\t{label}\n", text.replace('\t', " ")))
    };
    text.lines().enumerate().map(row).collect::<Result<_>>().map(Some)
}

/// Of two columns whose names say nothing, that of the texts and that of the labels, which come again and again.
fn guessed(table: &Table, columns: &Columns) -> Option<(usize, usize)> {
    let are_known = table.header.iter().any(|title| TEXT.knows(title) || LABEL.knows(title));
    if are_known || columns.text.is_some() || columns.label.is_some() || table.header.len() != 2 {
        return None;
    }
    let different = [0, 1].map(|place| table.texts(place).collect::<HashSet<_>>().len());
    let label = usize::from(different[1] < different[0]);
    let [texts, labels] = [different[1 - label], different[label]];
    let (place, rows) = (1 - label, table.rows.len());
    if 2 * texts < rows || 10 * labels > rows || table.numbers(place).is_ok() || holds_dates(table, place) {
        return None;
    }
    note(format_args!(
        "{}: the texts are taken from the column `{}`, the labels from `{}`; --text-column and --label decide otherwise",
        table.name,
        table.title(place),
        table.title(label)
    ));
    Some((place, label))
}

const EXAMPLE: &str = "expected an object such as {\"text\": \"how nice\", \"label\": \"good\"}";

#[cfg(test)]
mod tests {
    use super::*;

    fn found(bytes: &[u8], ending: &str) -> (Vec<Labelled>, usize, Columns) {
        parse(bytes, ending, "f", &Columns::default()).unwrap()
    }

    #[test]
    fn all_formats_give_the_same() {
        let tabs = found(b"\xef\xbb\xbfab c\tgood\r\n\nd\t1\nd\t1\n", "tsv");
        let json = b"{\"text\": \"ab c\", \"label\": \"good\"}\n{\"label\": 1, \"text\": \"d\", \"other\": []}\n";
        let list = b"[{\"text\": \"ab c\", \"label\": \"good\"},\n{\"label\": 1, \"text\": \"d\", \"other\": []}]\n";
        let table = b"label,other,Text\ngood,3,\"ab c\"\n 1 ,,d\n";
        for (bytes, ending) in [
            (&json[..], "jsonl"),
            (json, "json"),
            (json, ""),
            (list, "json"),
            (list, ""),
            (table, "csv"),
            (table, ""),
            (b"review;sentiment;n\nab c;good;1\nd;1;2\n", "csv"),
            (b"text\tlabel\nab c\tgood\nd\t1\n", "tsv"),
        ] {
            assert_eq!(found(bytes, ending).0, tabs.0, "{ending}: {}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(tabs.1, 1);
        assert_eq!(found("a\te\u{301}\nb\té\n".as_bytes(), "tsv").0[0].label, "é", "one label in two spellings");
        assert_eq!(tabs.0[1], Labelled { text: "d".into(), label: "1".into() });
        let columns = Columns { text: Some("name".into()), label: Some("state".into()), ..Columns::default() };
        let named = parse(b"state,name,n\ngood,ab c,1\n1,d,2\n", "csv", "f", &columns).unwrap();
        assert_eq!(named.0, tabs.0);
        let decimal = found(b"text;label\na,b;1,5\nc;1.002,0\n", "csv").0;
        assert_eq!([&*decimal[0].text, &*decimal[0].label, &*decimal[1].label], ["a,b", "1.5", "1002"]);
        assert_eq!(found(b"text;label\na;1,500\n", "csv").0[0].label, "1,500", "perhaps thousands");
    }

    #[test]
    fn a_first_line_of_names_that_are_not_known_is_read_by_the_flags() {
        let rows: String = (0..12).map(|n| format!("t{n}\t{}\n", n % 2)).collect();
        let text = format!("Phrase\tMood\n{rows}");
        assert_eq!(found(text.as_bytes(), "tsv").0.len(), 13);
        let columns = Columns { text: Some("Phrase".into()), label: Some("Mood".into()), ..Columns::default() };
        assert_eq!(parse(text.as_bytes(), "tsv", "f", &columns).unwrap().0.len(), 12);
    }

    #[test]
    fn labels_may_be_marks() {
        let (all, ..) = found(b"__label__good ab c\n\n__label__1 d\n", "txt");
        assert_eq!(all, found(b"ab c\tgood\n\nd\t1\n", "tsv").0);
        let several = parse(b"__label__a x\n__label__a __label__b y\n", "", "f", &Columns::default());
        assert_eq!(several.unwrap_err().to_string(), "f, line 2: several labels; give one, or a line for each");
    }

    #[test]
    fn a_table_without_names_has_all_its_rows() {
        let rows = |n: usize| format!("\"{}\",\"text {n}, of\nlines\"\n", if n.is_multiple_of(2) { -1 } else { 1 });
        let text: String = (0..40).map(rows).collect();
        let (all, again, columns) = found(text.as_bytes(), "csv");
        assert_eq!((all.len(), again, &*all[0].text, &*all[0].label), (40, 0, "text 0, of\nlines", "-1"));
        let is = |columns: &Columns, text: &str, label: &str| {
            assert_eq!([columns.text.as_deref(), columns.label.as_deref()], [Some(text), Some(label)]);
        };
        is(&columns, "column 2", "column 1");
        // Too few to show it: as the run, or a person, calls them.
        assert_eq!(parse(rows(3).as_bytes(), "csv", "f", &columns).unwrap().0.len(), 1);
        // Names that say nothing are still names, those of pandas among them.
        for names in ["Mood,Phrase", "0,1"] {
            let (all, _, columns) = found(format!("{names}\n{text}").as_bytes(), "csv");
            assert_eq!(all.len(), 40);
            let (label, text) = names.split_once(',').unwrap();
            is(&columns, text, label);
        }
        // Numbers of questions, and not their answers.
        let answers: String = (0..40).map(|n| format!("text {n},{},{}\n", n % 2, n % 3)).collect();
        let table = Table::read(&format!("who,1,2\n{answers}"), Form::Csv, "f").unwrap().unwrap();
        assert_eq!(table.headed(&Columns::default()).1, None);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let error = |bytes: &[u8], ending| parse(bytes, ending, "f", &Columns::default()).unwrap_err().to_string();
        assert!(error(b"{\"text\": 1, \"label\": 2}", "jsonl").contains("`text` has no text"));
        assert!(error(b"{\"text\": \"a\", \"label\": null}", "jsonl").contains("`label` has no label"));
        assert!(
            error(b"a,b,c\na,b,c\n", "csv")
                .contains("no column `text` among `a`, `b`, `c`; name it with --text-column NAME")
        );
    }
}
