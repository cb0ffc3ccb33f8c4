//! Tables in JSON that are no objects, one for each row: lists of lists, a list for each column, objects of objects, dictionaries.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use serde_json::{Map, Value};

use super::columns::is_time;
use super::{counted_names, json};
use crate::terminal::samples::{counted, listed};

type Object = Map<String, Value>;

/// Keys of an object that is a row or a series itself, whatever else it holds.
const OWN: [&str; 6] = ["text", "source", "target", "label", "values", "times"];

/// Keys from which one object of texts is a dictionary, and not a row; more where a key is that of a row.
const DICTIONARY: usize = 50;

/// Rows and keys that are looked at to tell what they are.
const LOOKED_AT: usize = 100;

/// The table that a text of JSON is, or the only one within its object, as objects in the lines where rows begin, and what is said of it;
/// `None` where that is nothing new.
pub fn as_objects(text: &str, name: &str) -> Result<Option<(String, String)>> {
    let read = |rows: &[Object], of: &str| {
        let titles: BTreeSet<&String> = rows.iter().take(LOOKED_AT).flat_map(Map::keys).collect();
        let titles: Vec<String> = titles.into_iter().map(|title| format!("`{title}`")).collect();
        format!(
            "{name}: read {of}as a table of {} with the columns {}",
            counted(rows.len(), "rows"),
            listed(&titles, 12)
        )
    };
    if let Some(inner) = text.trim_start().strip_prefix('[') {
        let (mut items, mut lines) = (Vec::new(), Vec::new());
        let take = |value, line| {
            items.push(value);
            lines.push(line);
            Ok(())
        };
        // What is wrong with it is said where objects are read.
        if inner.trim_start().starts_with('{') || json::each(text, name, take).is_err() {
            return Ok(None);
        }
        let Some(rows) = lists(&items, &Map::new()) else { return Ok(None) };
        lines.drain(..items.len() - rows.len());
        return Ok(Some((in_lines(&rows, lines), read(&rows, ""))));
    }
    let Ok(Value::Object(whole)) = json::line(text) else { return Ok(None) };
    if let Some(rows) = object(&whole) {
        return Ok(Some((in_lines(&rows, vec![1; rows.len()]), read(&rows, ""))));
    }
    if OWN.iter().any(|key| whole.contains_key(*key)) {
        return Ok(None);
    }
    let mut found = Vec::new();
    within(&whole, &|value, _| objects(value), &mut found);
    if found.is_empty() {
        within(&whole, &table, &mut found);
    }
    let (key, value, rows) = match &found[..] {
        [] => return Ok(None),
        [one] => one,
        [(one, ..), (other, ..), ..] => {
            bail!("{name}: an object with several tables, such as `{one}` and `{other}`; give a file with one of them")
        }
    };
    let lines = starts(text, key, value, rows.len());
    Ok(Some((in_lines(rows, lines), read(rows, &format!("`{key}`, and nothing beside it, ")))))
}

/// The lines in which so many rows begin, the last of the items of this entry of an object; of what is no list, its own.
fn starts(text: &str, key: &str, value: &Value, rows: usize) -> Vec<usize> {
    let quoted = Value::from(key).to_string();
    let place = text.match_indices(&quoted).find_map(|(at, _)| {
        let rest = text[at + quoted.len()..].trim_start().strip_prefix(':')?.trim_start();
        let (_, read) = json::first(rest).ok().filter(|(found, _)| found == value)?;
        Some((text.len() - rest.len(), &rest[..read]))
    });
    let (begin, own) = place.unwrap_or((0, ""));
    let before = text[..begin].matches('\n').count();
    let mut lines = Vec::new();
    if value.is_array() {
        // It has been read before.
        let _ = json::each(own, "", |_, line| {
            lines.push(before + line);
            Ok(())
        });
    }
    if lines.len() < rows { vec![before + 1; rows] } else { lines.split_off(lines.len() - rows) }
}

fn in_lines(rows: &[Object], lines: Vec<usize>) -> String {
    let (mut text, mut at) = (String::new(), 1);
    for (row, line) in rows.iter().zip(lines) {
        text.extend(std::iter::repeat_n('\n', line - at));
        text += &serde_json::to_string(row).unwrap_or_default();
        text.push(' ');
        at = line;
    }
    text
}

/// The tables within an object and those in it that `read` finds, with their keys.
fn within<'a>(
    object: &'a Object,
    read: &impl Fn(&Value, &Object) -> Option<Vec<Object>>,
    found: &mut Vec<(&'a str, &'a Value, Vec<Object>)>,
) {
    for (key, value) in object {
        match (read(value, object), value) {
            (Some(rows), _) => found.push((key, value, rows)),
            (None, Value::Object(inner)) => within(inner, read, found),
            _ => {}
        }
    }
}

fn objects(value: &Value) -> Option<Vec<Object>> {
    let items = value.as_array().filter(|items| !items.is_empty())?;
    items.iter().map(|item| item.as_object().cloned()).collect()
}

/// A value that is a table, within an object.
fn table(value: &Value, beside: &Object) -> Option<Vec<Object>> {
    match value {
        Value::Array(items) if items.iter().all(Value::is_array) => lists(items, beside),
        Value::Object(inner) => object(inner),
        _ => None,
    }
}

fn is_scalar(value: &Value) -> bool {
    !value.is_array() && !value.is_object()
}

fn are_times<'a>(keys: impl Iterator<Item = &'a String>) -> bool {
    keys.take(LOOKED_AT).all(|key| is_time(key))
}

/// Rows of lists, or of numbers alone. Their columns are named by a list of texts beside them, by the first of them, or counted.
fn lists(items: &[Value], beside: &Object) -> Option<Vec<Object>> {
    let cells = |item: &'_ Value| match item {
        Value::Array(cells) => Some(cells.clone()),
        Value::Number(_) | Value::Null => Some(vec![item.clone()]),
        _ => None,
    };
    let mut rows: Vec<Vec<Value>> = items.iter().map(cells).collect::<Option<_>>()?;
    let width = rows.first()?.len();
    if rows.len() < 2 || width == 0 || rows.iter().any(|row| row.len() != width || !row.iter().all(is_scalar)) {
        return None;
    }
    let texts = |list: &[Value]| -> Option<Vec<String>> {
        let texts: Vec<String> = list.iter().map(|cell| cell.as_str().map(String::from)).collect::<Option<_>>()?;
        let different: BTreeSet<&String> = texts.iter().collect();
        (texts.len() == width && different.len() == width).then_some(texts)
    };
    let mut named = beside.values().filter_map(|list| texts(list.as_array()?));
    let titles = named.next().or_else(|| {
        let titles = texts(&rows[0])?;
        let is_number = |cell: &Value| cell.as_str().map_or(!cell.is_boolean(), is_time);
        let below = &rows[1..rows.len().min(LOOKED_AT)];
        let has_numbers = |n: usize| below.iter().any(|row| row[n].is_number());
        let names = |n: usize| below.iter().all(|row| is_number(&row[n])) && (!is_time(&titles[n]) || has_numbers(n));
        let is_header =
            titles.iter().any(|title| OWN.contains(&title.to_lowercase().as_str())) || (0..width).any(names);
        is_header.then(|| {
            rows.remove(0);
            titles
        })
    });
    let titles = titles.unwrap_or_else(|| counted_names(width));
    Some(rows.into_iter().map(|row| titles.iter().cloned().zip(row).collect()).collect())
}

/// An object that is a table itself.
fn object(object: &Object) -> Option<Vec<Object>> {
    let is_own = OWN.iter().any(|key| object.contains_key(*key));
    let row = |key: &str, value: &Value, of: &str, is: &str| {
        Map::from_iter([(of.into(), key.into()), (is.into(), value.clone())])
    };
    let is_text =
        |value: &Value| value.as_array().map_or(value.is_string(), |texts| texts.iter().all(Value::is_string));
    if object.len() >= if is_own { 20 * DICTIONARY } else { DICTIONARY } && object.values().all(is_text) {
        return Some(object.iter().map(|(key, value)| row(key, value, "key", "value")).collect());
    }
    if object.len() > 2 && object.values().all(is_scalar) && are_times(object.keys()) {
        return Some(in_order(object).map(|(key, value)| row(key, value, "time", "value")).collect());
    }
    let columns: Vec<(&String, &Vec<Value>)> =
        object.iter().filter_map(|(key, value)| Some((key, value.as_array()?))).collect();
    if let [(_, first), _, ..] = columns[..] {
        let is_table = columns.iter().all(|(_, cells)| cells.len() == first.len() && cells.iter().all(is_scalar));
        let is_alone = object.values().all(|value| value.is_array() || is_scalar(value));
        let is_row = OWN.iter().any(|key| object.get(*key).is_some_and(is_scalar)) || object.contains_key("values");
        if first.len() < 2 || !is_table || !is_alone || is_row {
            return None;
        }
        let row = |n: usize| columns.iter().map(|(key, cells)| ((*key).clone(), cells[n].clone())).collect();
        return Some((0..first.len()).map(row).collect());
    }
    let inner: Vec<(&String, &Object)> =
        object.iter().map(|(key, value)| Some((key, value.as_object()?))).collect::<Option<_>>()?;
    let of_rows = inner.first()?.1;
    if !inner.iter().all(|(_, object)| !object.is_empty() && object.values().all(is_scalar)) {
        return None;
    }
    // Rows have numbers or dates, columns names.
    match (are_times(object.keys()), are_times(of_rows.keys())) {
        (true, _) => Some(with_keys(object)),
        (false, true) => {
            let mut rows = Object::new();
            for (title, column) in inner {
                for (key, cell) in column {
                    rows.entry(key).or_insert_with(|| Object::new().into())[title] = cell.clone();
                }
            }
            Some(with_keys(&rows))
        }
        _ => None,
    }
}

/// The entries of an object whose keys are dates as they stand, or numbers, by their size.
fn in_order(object: &Object) -> impl Iterator<Item = (&String, &Value)> {
    let mut entries: Vec<(&String, &Value)> = object.iter().collect();
    let number = |key: &str| key.parse::<f64>().unwrap_or(f64::NAN);
    entries.sort_by(|a, b| number(a.0).total_cmp(&number(b.0)));
    entries.into_iter()
}

/// The objects of an object as rows, with their keys in a column, unless those count them.
fn with_keys(object: &Object) -> Vec<Object> {
    let mut rows: Vec<(&String, Object)> =
        in_order(object).filter_map(|(key, row)| Some((key, row.as_object()?.clone()))).collect();
    let are_counts = rows.iter().enumerate().all(|(n, (key, _))| **key == n.to_string());
    let title = if rows.iter().any(|(_, row)| row.contains_key("time")) { "index" } else { "time" };
    for (key, row) in rows.iter_mut().filter(|_| !are_counts) {
        row.insert(title.into(), key.as_str().into());
    }
    rows.into_iter().map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<Vec<Value>> {
        let (objects, _) = as_objects(text, "f").unwrap()?;
        let mut all = Vec::new();
        json::each(&objects, "f", |value, _| {
            all.push(value);
            Ok(())
        })
        .unwrap();
        Some(all)
    }

    #[test]
    fn every_form_of_a_table_gives_the_same() {
        let rows = "{\"date\":\"2020-01-01\",\"v\":1} {\"date\":\"2020-01-02\",\"v\":null} {\"date\":\"2020-01-03\",\"v\":2.5}";
        let expected: Vec<Value> = rows.split(' ').map(|row| serde_json::from_str(row).unwrap()).collect();
        let cells = "[\"2020-01-01\",1],[\"2020-01-02\",null],[\"2020-01-03\",2.5]";
        for text in [
            &format!("[[\"date\",\"v\"],{cells}]"),
            &format!("{{\"columns\":[\"date\",\"v\"],\"index\":[0,1,2],\"data\":[{cells}]}}"),
            &format!("{{\"dataset\":{{\"id\":7,\"column_names\":[\"date\",\"v\"],\"data\":[{cells}]}}}}"),
            "{\"date\":[\"2020-01-01\",\"2020-01-02\",\"2020-01-03\"],\"v\":[1,null,2.5],\"of\":\"a\"}",
            "{\"date\":{\"0\":\"2020-01-01\",\"1\":\"2020-01-02\",\"2\":\"2020-01-03\"},\"v\":{\"0\":1,\"1\":null,\"2\":2.5}}",
            "{\"0\":{\"date\":\"2020-01-01\",\"v\":1},\"1\":{\"date\":\"2020-01-02\",\"v\":null},\"2\":{\"date\":\"2020-01-03\",\"v\":2.5}}",
            &format!("{{\"a\":{{\"b\":1,\"rows\":[{}]}}}}", rows.replace(' ', ",")),
        ] {
            assert_eq!(found(text).as_ref(), Some(&expected), "{text}");
        }
        let by_time = |text: &str| found(&text.replace('d', "2020-01-0")).map(|rows| Value::from(rows).to_string());
        let expected = "[{\"time\":\"2020-01-01\",\"value\":1},{\"time\":\"2020-01-02\",\"value\":2},{\"time\":\"2020-01-03\",\"value\":3}]";
        for text in [
            "{\"d1\":1,\"d2\":2,\"d3\":3}",
            "{\"value\":{\"d1\":1,\"d2\":2,\"d3\":3}}",
            "{\"d1\":{\"value\":1},\"d2\":{\"value\":2},\"d3\":{\"value\":3}}",
            "{\"Meta\":{\"of\":\"x\"},\"Daily\":{\"d1\":{\"value\":1},\"d2\":{\"value\":2},\"d3\":{\"value\":3}}}",
        ] {
            assert_eq!(by_time(text).as_deref(), Some(expected), "{text}");
        }
        // A year in quotes above numbers.
        assert_eq!(found("[[\"2019\",\"of\"],[1,\"a\"],[2,\"b\"]]").unwrap().len(), 2);
        // Rows keep their lines, and those with numbers their order.
        let (objects, said) = as_objects("[\n[\"a\", \"b\"],\n[\"c\",\n\"d\"], [\"e\", \"f\"]]", "f").unwrap().unwrap();
        let rows = "\n{\"column 1\":\"a\",\"column 2\":\"b\"} \n{\"column 1\":\"c\",\"column 2\":\"d\"} \n{\"column 1\":\"e\",\"column 2\":\"f\"} ";
        assert_eq!(objects, rows);
        assert_eq!(said, "f: read as a table of 3 rows with the columns `column 1`, `column 2`");
        for (text, own) in [
            ("{\"n\":\"rows\",\n\"rows\":[\n{\"a\":1},\n\n{\"a\":2}]}", "\n\n{\"a\":1} \n\n{\"a\":2} "),
            ("{\"of\":[\"a\"],\n\"rows\":[[1],\n[2]]}", "\n{\"a\":1} \n{\"a\":2} "),
        ] {
            assert_eq!(as_objects(text, "f").unwrap().unwrap().0, own);
        }
        let counts: String = (0..12).map(|n| format!("\"{n}\":{n},")).collect();
        let values = found(&format!("{{\"x\":{{{}}}}}", counts.trim_end_matches(','))).unwrap();
        assert!(values.iter().enumerate().all(|(n, row)| row["x"] == n && row.as_object().unwrap().len() == 1));
    }

    #[test]
    fn a_dictionary_is_pairs() {
        let entries = |count: usize, more: &str| {
            let all: Vec<String> = (0..count).map(|n| format!("\"w{n}\":\"v{n}\"")).collect();
            found(&format!("{{{more}{}}}", all.join(",\n")))
        };
        let all = entries(60, "").unwrap();
        assert!(all.len() == 60 && all.contains(&serde_json::json!({"key": "w59", "value": "v59"})), "{all:?}");
        assert_eq!(entries(60, "\"to\":[\"a\",\"b\"],").unwrap().len(), 61);
        // A word of it may be the name of a column; a row with many others is a row.
        assert_eq!(entries(1000, "\"source\":\"x\",").unwrap().len(), 1001);
        assert_eq!(entries(60, "\"source\":\"x\",\"target\":\"y\","), None);
    }

    #[test]
    fn what_is_a_row_or_a_series_itself_is_left() {
        for text in [
            "{\"times\":[1,2],\"values\":[[1,2],[3,4]]}",
            "{\"values\":[1,2],\"label\":\"a\"}",
            "{\"text\":\"a\",\"x\":[1,2],\"y\":[3,4]}",
            "{\"source\":\"a\",\"target\":[\"b\",\"c\"]}",
            "{\"a\":1}\n{\"a\":2}",
            "[{\"a\":[1,2]}]",
            "[[1,2],[3]]",
            "[[1,2],[3,4]",
            "[[1,[2]],[3,[4]]]",
            "[\"a\",\"b\"]",
            "{\"2020\":12345678901234567890123,\"2021\":1,\"2022\":2}",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
        let several = as_objects("{\"prices\":[[1,2],[3,4]],\"caps\":[[1,2],[3,4]]}", "f").unwrap_err().to_string();
        assert_eq!(
            several,
            "f: an object with several tables, such as `caps` and `prices`; give a file with one of them"
        );
    }
}
