//! A person's own series: JSON lines, CSV with a point a line, or the files of the UEA and UCR archives.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::archive;
use crate::run::seal::hex;
use crate::tasks::csv::Table;
use crate::tasks::lines;
use crate::terminal::notes::note;

/// What stands for a missing value, beside an empty field.
pub const MISSING: [&str; 4] = ["?", "NaN", "nan", "NA"];

/// A series: points in the order of their times.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub times: Vec<f64>,
    /// Point after point, `width` numbers each; NaN where one is missing.
    pub values: Vec<f64>,
    pub width: usize,
    /// Names of the channels, where the file has them.
    pub names: Arc<[String]>,
    pub label: Option<String>,
    /// What the file calls the series.
    pub id: Option<String>,
    /// Times after the last point whose values are to be told, in their order.
    pub ahead: Vec<f64>,
    /// A hash of times and values, which decides on whether the series is held out.
    pub key: String,
    /// The line in which it begins.
    pub line: usize,
    /// Whether its points had to be sorted, and whether two of them have the same time.
    pub backwards: bool,
    pub repeats: bool,
}

impl Series {
    /// The same up to a point.
    pub fn first(&self, count: usize) -> Self {
        let (times, values) = (self.times[..count].to_vec(), self.values[..count * self.width].to_vec());
        Self { times, values, ..self.clone() }
    }
}

/// A point: its time and its values.
pub type Point = (f64, Vec<f64>);

/// A series of points in any order. A point without any value is left out.
pub fn series(mut points: Vec<Point>, label: Option<String>, line: usize) -> Result<Series, String> {
    let width = points.first().map_or(0, |(_, values)| values.len());
    for (time, values) in &points {
        if !time.is_finite() {
            return Err(format!("the time {time} of a point is no finite number; give one, or leave the point out"));
        }
        if values.len() != width {
            return Err(format!("a point has {} values, those before it {width}; give as many to each", values.len()));
        }
        if values.iter().any(|value| value.is_infinite()) {
            return Err("a value is infinite; give a finite number, or leave it empty".into());
        }
    }
    points.retain(|(_, values)| values.iter().any(|value| !value.is_nan()));
    if points.is_empty() {
        return Err("no point of it has a value; leave the series out".into());
    }
    let backwards = points.windows(2).any(|pair| pair[0].0 > pair[1].0);
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let repeats = points.windows(2).any(|pair| pair[0].0 == pair[1].0);
    let (times, values): (Vec<f64>, Vec<Vec<f64>>) = points.into_iter().unzip();
    let values = values.concat();
    let mut hash = Sha256::new();
    times.iter().chain(&values).for_each(|number| hash.update(number.to_le_bytes()));
    let key = hex(&hash.finalize()[..16]);
    Ok(Series {
        times,
        values,
        width,
        names: Arc::new([]),
        label,
        id: None,
        ahead: Vec::new(),
        key,
        line,
        backwards,
        repeats,
    })
}

/// The times of points without any value after the last one that has some.
fn ahead(points: &[Point]) -> Vec<f64> {
    let (known, empty): (Vec<&Point>, Vec<&Point>) =
        points.iter().partition(|(_, values)| values.iter().any(|value| !value.is_nan()));
    let last = known.iter().map(|(time, _)| *time).fold(f64::NEG_INFINITY, f64::max);
    let mut times: Vec<f64> = empty.into_iter().map(|(time, _)| *time).filter(|time| *time > last).collect();
    times.sort_by(f64::total_cmp);
    times
}

/// A value as text: `None` where it is no number, NaN where it is missing.
pub fn value(text: &str) -> Option<f64> {
    let text = text.trim();
    if text.is_empty() || MISSING.contains(&text) { Some(f64::NAN) } else { text.parse().ok() }
}

/// Reads series, and says what is unusual about them. `refuse` refuses missing values.
pub fn read(path: &Path, refuse: bool) -> Result<Vec<Series>> {
    let (name, bytes) = (lines::name(path), lines::read(path)?);
    let all = parse(&bytes, &lines::ending(path), &name)?;
    let count = |holds: fn(&Series) -> bool| all.iter().filter(|one| holds(one)).count();
    let missing = |one: &Series| one.values.iter().filter(|value| value.is_nan()).count();
    if let (true, Some(one)) = (refuse, all.iter().find(|one| missing(one) > 0)) {
        bail!(
            "{name}, line {}: values are missing; fill them in, or take them as they are with --set missing=mask",
            one.line
        );
    }
    match count(|one| one.backwards) {
        0 => {}
        some => note(format_args!("{name}: the times of {some} series run backwards; their points are sorted")),
    }
    match count(|one| one.repeats) {
        0 => {}
        some => note(format_args!("{name}: {some} series have several points at one time; all are kept")),
    }
    match all.iter().map(missing).sum::<usize>() {
        0 => {}
        some => {
            let of: usize = all.iter().map(|one| one.values.len()).sum();
            let share = 100.0 * some as f64 / of as f64;
            note(format_args!(
                "{name}: {some} of {of} values are missing ({share:.1} %); the mean of the channel stands for each"
            ));
        }
    }
    Ok(all)
}

/// The series of a file that is answered whole, once each is checked; `None` of JSON lines, which are answered as they come.
pub fn read_whole(path: &Path, check: impl Fn(&Series) -> Result<()>) -> Result<Option<Vec<Series>>> {
    if lines::is_standard_input(path) || ["jsonl", "ndjson"].contains(&lines::ending(path).as_str()) {
        return Ok(None);
    }
    let (name, all) = (lines::name(path), read(path, false)?);
    all.iter().try_for_each(|one| check(one).map_err(lines::in_line(&name, one.line)))?;
    Ok(Some(all))
}

/// The series in the contents of a file whose name has this end; `name` is its name in errors.
pub fn parse(bytes: &[u8], ending: &str, name: &str) -> Result<Vec<Series>> {
    let bytes = lines::unmarked(bytes, name)?;
    let start = bytes.trim_ascii_start().first().copied().unwrap_or(b' ');
    let all = match ending {
        "jsonl" | "ndjson" => by_line(bytes, name, from_json)?,
        "csv" => from_table(bytes, name)?,
        "ts" => archive::read(bytes, name)?,
        "tsv" => by_line(bytes, name, archive::from_columns)?,
        _ if start == b'{' => by_line(bytes, name, from_json)?,
        _ if start == b'@' || start == b'#' => archive::read(bytes, name)?,
        _ if bytes.split(|&byte| byte == b'\n').next().is_some_and(|line| line.contains(&b'\t')) => {
            by_line(bytes, name, archive::from_columns)?
        }
        _ => from_table(bytes, name)?,
    };
    let Some(first) = all.first() else {
        bail!("{name}: no series in it; give a .jsonl, .csv, .ts or .tsv of numeric series");
    };
    if let Some(other) = all.iter().find(|one| one.width != first.width) {
        bail!(
            "{name}, line {}: {} channels, the series before it have {}; give as many to each",
            other.line,
            other.width,
            first.width
        );
    }
    Ok(all)
}

/// A series on each line that is not empty.
fn by_line(bytes: &[u8], name: &str, read: impl Fn(&str, usize) -> Result<Series, String>) -> Result<Vec<Series>> {
    lines::each(bytes, name, |text, line| if text.trim().is_empty() { Ok(None) } else { read(text, line).map(Some) })
}

/// A series as a line of JSON, which a run answers.
pub fn to_json(one: &Series) -> String {
    let number = |value: &f64| if value.is_nan() { Value::Null } else { json!(value) };
    let values: Vec<Vec<Value>> =
        one.values.chunks(one.width.max(1)).map(|point| point.iter().map(number).collect()).collect();
    let mut object = json!({ "times": one.times, "values": values });
    if !one.ahead.is_empty() {
        object["forecast"] = json!(one.ahead);
    }
    if let Some(id) = &one.id {
        object["id"] = json!(id);
    }
    object.to_string()
}

/// A series from a line of JSON. Without times, points are counted.
pub fn from_json(text: &str, line: usize) -> Result<Series, String> {
    const EXAMPLE: &str =
        "expected an object such as {\"times\": [0, 0.5, 2], \"values\": [1.5, 1.4, 0.2], \"label\": \"a\"}";
    let value = lines::json(text).map_err(|problem| format!("{problem}; {EXAMPLE}"))?;
    if value.get("text").is_some() {
        return Err("it has a text; give labelled texts with --labelled".into());
    }
    let number = |value: &Value| match value {
        Value::Null => Some(f64::NAN),
        Value::String(text) if MISSING.contains(&text.as_str()) => Some(f64::NAN),
        other => other.as_f64(),
    };
    let values = value["values"].as_array().ok_or_else(|| format!("the key `values` has no list; {EXAMPLE}"))?;
    let point = |value: &Value| match value {
        Value::Array(channels) => channels.iter().map(number).collect(),
        other => number(other).map(|number| vec![number]),
    };
    let points = values.iter().map(point).collect::<Option<Vec<Vec<f64>>>>();
    let points = points
        .ok_or_else(|| format!("an entry of `values` is neither a number, nor null, nor a list of them; {EXAMPLE}"))?;
    let list = |key: &str| match &value[key] {
        Value::Null => Ok(None),
        Value::Array(times) => {
            times.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>().map(Some).ok_or("a time is no number".into())
        }
        _ => Err(format!("the key `{key}` has no list of times; {EXAMPLE}")),
    };
    let times = list("times")?.unwrap_or_else(|| (0..points.len()).map(|n| n as f64).collect());
    if times.len() != points.len() {
        return Err(format!("{} times and {} values; give a time to each", times.len(), points.len()));
    }
    let text = |key: &str| match &value[key] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.trim().to_owned())),
        text @ (Value::Number(_) | Value::Bool(_)) => Ok(Some(text.to_string())),
        _ => Err(format!("the {key} is neither text nor number")),
    };
    let one = series(times.into_iter().zip(points).collect(), text("label")?, line)?;
    let (mut ahead, last) = (list("forecast")?.unwrap_or_default(), one.times.last().copied().unwrap_or(0.0));
    if let Some(early) = ahead.iter().find(|time| **time <= last) {
        return Err(format!(
            "the time {early} in `forecast` is not after {last}, the last that has a value; give later times"
        ));
    }
    ahead.sort_by(f64::total_cmp);
    Ok(Series { ahead, id: text("id")?, ..one })
}

/// Series from CSV: a point a line, with the column `time`, perhaps `id` and `label`, and a column for each channel. Without `id` all
/// points are of one series.
fn from_table(bytes: &[u8], name: &str) -> Result<Vec<Series>> {
    let Some(table) = Table::read(bytes, name)? else { return Ok(Vec::new()) };
    let time = table.column("time", "the columns `time`, one for each channel, and perhaps `id` and `label`")?;
    let (id, label) = (table.find("id"), table.find("label"));
    let channels: Vec<usize> =
        (0..table.header.len()).filter(|n| Some(*n) != id && *n != time && Some(*n) != label).collect();
    if channels.is_empty() {
        bail!("{name}, line 1: no column beside id, time and label; give one for each channel");
    }
    let names: Arc<[String]> = channels.iter().map(|&n| table.header[n].clone()).collect();
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut found: Vec<(usize, Vec<Point>, Option<String>)> = Vec::new();
    for (line, fields) in &table.records {
        let at = format!("{name}, line {line}");
        let read = |n: usize| {
            value(&fields[n]).ok_or_else(|| {
                let mend =
                    if n == time { "write times as numbers, not as dates" } else { "leave it empty if it is missing" };
                anyhow!("{at}: {:?} in the column `{}` is no number; {mend}", fields[n], table.header[n])
            })
        };
        let place = *places.entry(id.map_or("", |n| &fields[n])).or_insert_with(|| {
            found.push((*line, Vec::new(), None));
            found.len() - 1
        });
        let (_, points, known) = &mut found[place];
        points.push((read(time)?, channels.iter().map(|&n| read(n)).collect::<Result<_>>()?));
        if let Some(own) = label.map(|n| fields[n].trim()).filter(|own| !own.is_empty()) {
            match known {
                Some(known) if known.as_str() != own => {
                    bail!(
                        "{at}: the label is {own:?}, and {known:?} in a line before with the same id; give a series one label"
                    )
                }
                _ => *known = Some(own.into()),
            }
        }
    }
    let ids: HashMap<usize, &str> = places.into_iter().map(|(id, place)| (place, id)).collect();
    let one = |(place, (line, points, label)): (usize, (usize, Vec<Point>, Option<String>))| {
        let ahead = ahead(&points);
        let one = series(points, label, line).map_err(lines::in_line(name, line))?;
        let id = ids.get(&place).filter(|_| id.is_some()).map(|id| id.trim().to_owned());
        Ok(Series { names: names.clone(), id, ahead, ..one })
    };
    found.into_iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, ending: &str) -> Vec<(Vec<f64>, String, Option<String>)> {
        let all = parse(text.as_bytes(), ending, "f").unwrap();
        all.into_iter().map(|one| (one.times, format!("{:?}", one.values), one.label)).collect()
    }

    #[test]
    fn all_formats_give_the_same() {
        let json = "{\"times\": [0, 1, 2], \"values\": [[1, 2.5], [3, null], [5, 6]], \"label\": \"a\"}\n\n\
                    {\"values\": [[1, 0], [2, 0], [7, 0]], \"label\": 3}\n";
        let csv = "id,Time,x,y,label\none,0,1,2.5,a\ntwo,0,1,0,\none,2,5,6,\none,1,3,NaN,a\ntwo,1,2,0,3\ntwo,2,7,0,3\n";
        let archive =
            "# words\n@problemName x\n@timeStamps false\n@classLabel true a 3\n@data\n1,3,5:2.5,?,6:a\n1,2,7:0,0,0:3\n";
        let timed = "@timestamps true\n@classlabel true a 3\n@data\n(0,1),(1,3),(2,5):(0,2.5),(2,6):a\n(0,1),(1,2),(2,7):(0,0),(1,0),(2,0):3\n";
        let expected = found(json, "jsonl");
        assert_eq!(expected[0].1, "[1.0, 2.5, 3.0, NaN, 5.0, 6.0]");
        for (text, ending) in [(csv, "csv"), (archive, "ts"), (timed, "ts"), (json, ""), (csv, "txt"), (archive, "")] {
            assert_eq!(found(text, ending), expected, "{text}");
        }
        let all = parse(csv.as_bytes(), "csv", "f").unwrap();
        assert!(all[0].backwards && !all[1].backwards && !all[0].repeats);
        assert_eq!(&*all[0].names, ["x".to_string(), "y".to_string()]);
        let one = found("1\t0.5\t-2\tNaN\n2\t1\t\t3\n", "tsv");
        assert_eq!(
            one[0],
            (vec![0.0, 1.0], "[0.5, -2.0]".into(), Some("1".into())),
            "what is missing at the end is no point"
        );
        assert_eq!(one[1].0, [0.0, 2.0], "a point without values is none");
        let again = from_json(&to_json(&all[0]), 1).unwrap();
        assert_eq!((again.times, again.key), (all[0].times.clone(), all[0].key.clone()));
        let open = parse(b"time,x\n1,5\n4,\n2,\n3,6\n6,?\n5,\n", "csv", "f").unwrap();
        assert_eq!((open[0].times.as_slice(), open[0].ahead.as_slice()), (&[1.0, 3.0][..], &[4.0, 5.0, 6.0][..]));
        assert_eq!(from_json(&to_json(&open[0]), 1).unwrap().ahead, open[0].ahead);
        let repeated = from_json("{\"times\": [1, 1], \"values\": [1, 2]}", 1).unwrap();
        assert!(repeated.repeats && repeated.label.is_none());
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, ending, part) in [
            ("{\"values\": [1]}\n{\"values\": [\"x\"]}\n", "jsonl", "f, line 2: an entry of `values`"),
            ("{\"values\": [1, 2], \"times\": [1]}\n", "jsonl", "1 times and 2 values"),
            ("{\"values\": [[1, 2], [1]]}\n", "jsonl", "a point has 1 values, those before it 2"),
            ("{\"values\": [null]}\n", "jsonl", "no point of it has a value"),
            ("{\"values\": [1], \"times\": [\"x\"]}\n", "jsonl", "a time is no number"),
            ("{\"text\": \"a\", \"label\": 1}\n", "jsonl", "--labelled"),
            ("{a\n", "jsonl", "f, line 1: no JSON"),
            (
                "{\"values\": [1]}\n{\"values\": [[1, 2]]}\n",
                "jsonl",
                "f, line 2: 2 channels, the series before it have 1",
            ),
            ("", "jsonl", "f: no series in it"),
            ("a,b\n1,2\n", "csv", "no column `time`; let the first line name the columns `time`"),
            (
                "time,x\n2024-01-31,2\n",
                "csv",
                "\"2024-01-31\" in the column `time` is no number; write times as numbers",
            ),
            (
                "{\"values\": [1, 2], \"forecast\": [3, 1]}\n",
                "jsonl",
                "f, line 1: the time 1 in `forecast` is not after 1",
            ),
            ("{\"values\": [1, 2], \"forecast\": 3}\n", "jsonl", "the key `forecast` has no list of times"),
            ("id,time,label\n1,2,a\n", "csv", "no column beside id, time and label"),
            ("id,time,x\n1,2,3\n1,b,3\n", "csv", "f, line 3: \"b\" in the column `time` is no number"),
            ("id,time,x\n1,,3\n", "csv", "f, line 2: the time NaN"),
            ("id,time,x\n1,2,inf\n", "csv", "a value is infinite"),
            ("id,time,x,label\n1,2,3,a\n1,3,3,b\n", "csv", "f, line 3: the label is \"b\", and \"a\" in a line before"),
            (
                "good\tthe film\n",
                "tsv",
                "f, line 1: \"the film\" is no number; labelled texts are learned with --labelled",
            ),
            ("1\n", "tsv", "f, line 1: one column"),
            ("@data\n1,2:a\n1,x:b\n", "ts", "f, line 3: \"x\" is no number"),
            ("@timestamps true\n@data\n(0,1),(b,1):a\n", "ts", "f, line 3: \"(b,1)\" is no point such as (0.5,1.25)"),
            ("@classlabel true a\n1,2:a\n", "ts", "f, line 2: a series before the line @data"),
            ("@problem x\n", "ts", "f: no line @data"),
        ] {
            let error = parse(text.as_bytes(), ending, "f").unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
        let error = parse(b"{\"values\": [1]}\n\xff\n", "jsonl", "f").unwrap_err().to_string();
        assert!(error.contains("f, line 2, byte 1: invalid UTF-8"), "{error}");
    }
}
