//! A person's own series: JSON lines, tables with a point a row, or the files of archives.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::archive;
use crate::run::columns::Columns;
use crate::run::config::{Files, LabelKind};
use crate::run::words::nearest;
use crate::tasks::lines;
use crate::tasks::split::composed;
use crate::tasks::table::columns::{
    ID, Roles, counts_excel_days, counts_rows, is_different, is_time, named_id, names, no_time, plain_names, time_text,
};
use crate::tasks::table::dates::{Dates, EXCEL};
use crate::tasks::table::numbers::is_number;
use crate::tasks::table::{By, Form, Row, Table, contents, is_missing, json, value};
use crate::tasks::task::Asked;
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    pub times: Vec<f64>,
    /// Point after point, `width` numbers each; NaN where one is missing.
    pub values: Vec<f64>,
    pub width: usize,
    pub names: Arc<[String]>,
    pub label: Option<String>,
    pub id: Option<String>,
    /// Points after the last one that has a value to learn from: their values are to be predicted.
    pub ahead: Vec<Point>,
    /// How the file writes times, where they are dates.
    pub dates: Option<Arc<Dates>>,
    /// A hash of times and values, which decides on whether the series is held out.
    pub key: String,
    pub line: usize,
    /// Whether its points had to be sorted, and whether two of them have the same time.
    pub backwards: bool,
    pub repeats: bool,
}

impl Series {
    /// The label; nothing where there is none.
    pub fn label(&self) -> &str {
        self.label.as_deref().unwrap_or_default()
    }

    pub fn first(&self, count: usize) -> Self {
        let (times, values) = (self.times[..count].to_vec(), self.values[..count * self.width].to_vec());
        Self { times, values, ..self.clone() }
    }

    pub fn points(&self, range: Range<usize>) -> Vec<Point> {
        range.map(|n| (self.times[n], self.values[n * self.width..(n + 1) * self.width].to_vec())).collect()
    }

    pub fn time(&self, time: f64) -> String {
        self.dates.as_ref().map_or_else(|| time.to_string(), |dates| dates.text(time))
    }
}

pub type Point = (f64, Vec<f64>);

#[derive(Debug, Clone, Copy, Default)]
pub struct Reading<'a> {
    /// The columns that a person named, or that the run learned from.
    pub columns: Option<&'a Columns>,
    /// The dates that the run learned from, on whose calendar times count.
    pub dates: Option<&'a Dates>,
    pub labels: bool,
    pub learned: bool,
}

impl<'a> Reading<'a> {
    pub fn learned(files: &'a Files, dates: Option<&'a Dates>, labels: bool) -> Self {
        Self { columns: Some(&files.columns), dates, labels, learned: true }
    }

    pub fn of(&self, asked: &Asked, name: &str) -> Result<Series> {
        let read = || from_json(&asked.text, asked.line, self).map_err(lines::in_line(name, asked.line));
        asked.series.clone().map_or_else(read, Ok)
    }
}

#[derive(Debug, Default)]
pub struct Found {
    pub series: Vec<Series>,
    pub target: Option<LabelKind>,
    /// The columns as they were found in a table, and in words.
    pub columns: Option<(Columns, String)>,
}

/// A series of points in any order. Points at the end that have no value, but for channels that are `known` ahead, are those to
/// predict.
pub fn series(mut points: Vec<Point>, known: &[bool], label: Option<String>, line: usize) -> Result<Series, String> {
    let width = points.first().map_or(0, |(_, values)| values.len());
    for (time, values) in &points {
        if !time.is_finite() {
            return Err(format!("the time {time} of a point is no finite number; give one, or leave the point out"));
        }
        if values.len() != width {
            let values = counted(values.len(), "values");
            return Err(format!("a point has {values}, those before it {width}; give as many to each"));
        }
        if values.iter().any(|value| value.is_infinite()) {
            return Err("a value is infinite; give a finite number, or leave it empty".into());
        }
    }
    let backwards = points.windows(2).any(|pair| pair[0].0 > pair[1].0);
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let is_known = |channel: usize| known.get(channel).copied().unwrap_or(false);
    let has_value = |(_, values): &Point| values.iter().enumerate().any(|(n, value)| !value.is_nan() && !is_known(n));
    let Some(last) = points.iter().rposition(has_value) else {
        return Err(NO_VALUE.into());
    };
    let ahead = points.split_off(last + 1);
    let repeats = points.windows(2).any(|pair| pair[0].0 == pair[1].0);
    let (times, values): (Vec<f64>, Vec<Vec<f64>>) = points.into_iter().unzip();
    let values = values.concat();
    let mut hash = Sha256::new();
    times.iter().chain(&values).for_each(|number| hash.update(number.to_le_bytes()));
    let mut key = format!("{:x}", hash.finalize());
    key.truncate(32);
    Ok(Series { times, values, width, label, ahead, key, line, backwards, repeats, ..Series::default() })
}

const NO_VALUE: &str = "no point of it has a value; leave the series out";

/// Reads series, and says what is unusual about them. `refuse` refuses missing values, for which `instead` stands otherwise.
pub fn read(path: &Path, reading: &Reading<'_>, refuse: bool, instead: &str) -> Result<Found> {
    let (name, bytes) = contents(path)?;
    let found = parse(&bytes, &lines::ending(path), &name, reading)?;
    let all = &found.series;
    say_unusual(&name, all);
    let missing = |one: &Series| one.values.iter().filter(|value| value.is_nan()).count();
    if let (true, Some(one)) = (refuse, all.iter().find(|one| missing(one) > 0)) {
        let place = one.values.iter().position(|value| value.is_nan()).unwrap_or(0);
        let channel = one.names.get(place % one.width).map_or(String::new(), |name| format!(" of `{name}`"));
        bail!(
            "{name}, line {}: the series that begins here has no value{channel} at the time {}; fill in what is missing, or take it as it \
             is with --set missing=mask",
            one.line,
            one.time(one.times[place / one.width])
        );
    }
    note_some(all.iter().map(missing).sum(), |some| {
        let of: usize = all.iter().map(|one| one.values.len()).sum();
        let share = 100.0 * some as f64 / of as f64;
        format!("{name}: {some} of {of} values missing ({share:.1} %); {instead} stands for each")
    });
    Ok(found)
}

/// So many different values are no classes.
const DIFFERENT: usize = 10;

/// Up to it a double holds all whole numbers.
const LARGEST: f64 = 9_007_199_254_740_992.0;

/// Says what is unusual about times and values.
pub fn say_unusual(name: &str, all: &[Series]) {
    let count = |holds: fn(&Series) -> bool| all.iter().filter(|one| holds(one)).count();
    note_some(count(|one| one.backwards), |some| {
        format!("{name}: times that run backwards in {some} series; points are sorted")
    });
    let is_rounded = |one: &&Series| one.repeats && one.times.iter().any(|time| time.abs() > LARGEST);
    let kept = match all.iter().find(is_rounded) {
        Some(_) => format!("those beyond {LARGEST} are rounded: count from a later start"),
        None => "all are kept".into(),
    };
    note_some(count(|one| one.repeats), |some| format!("{name}: several points at one time in {some} series; {kept}"));
    let far = |one: &Series| {
        let (times, last) = (&one.times, one.times.len() - 1);
        let is_far = |(far, near): &(usize, usize)| 2.0 * (times[*far] - times[*near]).abs() > times[last] - times[0];
        let (far, _) = [(0, 1), (last, last - 1)].into_iter().find(is_far)?;
        Some(one.time(times[far]))
    };
    if let Some(date) = all.iter().filter(|one| one.dates.is_some() && one.times.len() > DIFFERENT).find_map(far) {
        note(format_args!(
            "{name}: {date} is further from all other dates than those are from one another; if it says that none is known, leave the row out"
        ));
    }
    codes(all)
        .iter()
        .for_each(|code| note(format_args!("{name}: {code}; if it says that a value is missing, leave it empty")));
}

/// The series of a file that is answered whole, once each is checked; `None` of lines of JSON, which are answered as they come.
pub fn asked(
    path: &Path,
    reading: &Reading<'_>,
    instead: &str,
    check: impl Fn(&Series) -> Result<()>,
) -> Result<Option<Vec<Asked>>> {
    // Series that are lines of JSON are answered one by one as they come; anything else, points in such lines too, is a whole file.
    if lines::is_standard_input(path) || ["jsonl", "ndjson"].contains(&lines::ending(path).as_str()) {
        let line = lines::first_line(path)?;
        if line.is_empty() || line.trim_start().starts_with('{') && holds_series(&line) {
            return Ok(None);
        }
    }
    let name = lines::name(path);
    let all = read(path, reading, false, instead)?.series;
    all.iter().try_for_each(|one| check(one).map_err(lines::in_line(&name, one.line)))?;
    Ok(Some(all.into_iter().map(|one| Asked { line: one.line, text: String::new(), series: Some(one) }).collect()))
}

/// What is asked but for empty lines between series.
pub fn not_empty(asked: &[Asked]) -> impl Iterator<Item = &Asked> {
    asked.iter().filter(|one| one.series.is_some() || !one.text.trim().is_empty())
}

/// The series in the contents of a file whose name has this end; `name` is its name in errors.
pub fn parse(bytes: &[u8], ending: &str, name: &str, reading: &Reading<'_>) -> Result<Found> {
    let text = lines::text(bytes, name)?;
    let form = Form::of(ending, &text);
    let is_archive =
        text.lines().any(|line| line.trim_start().starts_with('@')) && text.trim_start().starts_with(['@', '#', '%']);
    let has = |word: &str| text.lines().take(200).any(|line| line.trim_start().to_lowercase().starts_with(word));
    let is_wide = reading.columns.is_some_and(|columns| columns.wide);
    let known_ending = ["json", "jsonl", "ndjson", "csv", "tsv"].contains(&ending);
    let found = match ending {
        "ts" => archive::read(&text, name, reading)?,
        "tsf" => archive::forecasting(&text, name)?,
        "arff" => archive::attributes(&text, name)?,
        _ if is_archive && !known_ending && has("@frequency") => archive::forecasting(&text, name)?,
        _ if is_archive && !known_ending && has("@attribute") => archive::attributes(&text, name)?,
        _ if is_archive && !known_ending => archive::read(&text, name, reading)?,
        _ if form == Form::Json && holds_series(&text) => from_lines(&text, name, reading)?,
        _ if form == Form::Tabs && !is_wide && is_row_of_numbers(&text) => {
            let series = lines::each(&text, name, |text, line| {
                if text.trim().is_empty() { Ok(None) } else { archive::from_columns(text, line).map(Some) }
            })?;
            let first = series.first().filter(|one| one.values.windows(2).all(|pair| pair[1] - pair[0] == 1.0));
            if let Some(label) = first.and_then(|one| one.label.as_deref()).filter(|label| value(label).is_none()) {
                note(format_args!(
                    "{name}: the first line is read as a series with the label {label:?}; if it names columns, give --wide"
                ));
            }
            Found { series, ..Found::default() }
        }
        _ => match Table::read(&text, form, name)? {
            Some(table) => from_table(table, reading)?,
            None => Found::default(),
        },
    };
    let Some(first) = found.series.first() else {
        bail!("{name}: no series in it; give a .jsonl, .csv, .ts, .tsf, .arff or .tsv of numeric series");
    };
    // Archives say by their heads whether they have dates, and objects may have no times.
    let kind = |dates: Option<&Dates>| dates.map_or("no dates".into(), |dates| format!("dates in {}", dates.counted()));
    if (reading.learned || reading.dates.is_some())
        && let Some(other) = found.series.iter().find(|one| kind(one.dates.as_deref()) != kind(reading.dates))
    {
        bail!(
            "{name}, line {}: it has {}, and this run learned from {}; give times like those",
            other.line,
            kind(other.dates.as_deref()),
            kind(reading.dates)
        );
    }
    if let Some(other) = found.series.iter().find(|one| one.width != first.width) {
        bail!(
            "{name}, line {}: {}, the series before have {}; give as many to each",
            other.line,
            counted(other.width, "channels"),
            first.width
        );
    }
    Ok(found)
}

/// Whether the first line is a row of the UCR archive: a label, then numbers.
fn is_row_of_numbers(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let values: Vec<&str> = first.split('\t').skip(1).collect();
    let are_numbers = values.iter().any(|text| !is_missing(text)) && values.iter().all(|text| value(text).is_some());
    are_numbers && !begins_with_times(text)
}

/// Whether lines begin with dates, or with numbers that run up: those are times, and no labels.
fn begins_with_times(text: &str) -> bool {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let first: Vec<&str> = lines.filter_map(|line| line.split('\t').next()).map(str::trim).collect();
    match first.iter().map(|text| value(text)).collect::<Option<Vec<f64>>>() {
        Some(numbers) => numbers.len() > DIFFERENT && numbers.windows(2).all(|pair| pair[1] > pair[0]),
        None => !matches!(Dates::of(&first, None), Ok(None)),
    }
}

/// Whether the first object of JSON is a series rather than a point.
fn holds_series(text: &str) -> bool {
    let first = text.trim_start().trim_start_matches('[');
    let value = serde_json::Deserializer::from_str(first).into_iter::<Value>().next();
    // What is no JSON is named by the reader of series.
    !matches!(value, Some(Ok(Value::Object(object))) if object.values().all(|cell| !cell.is_array()) && !object.contains_key("text"))
}

/// Dates that these texts are, on the calendar of those that the run learned from; none where they are numbers.
pub fn dates_of(texts: &[&str], reading: &Reading<'_>) -> Result<Option<Arc<Dates>>, String> {
    if texts.is_empty() {
        return Ok(None);
    }
    let wanted = reading.columns.and_then(|columns| columns.dates.as_deref());
    let found = match reading.dates {
        Some(known) if texts.iter().all(|text| known.number(text).is_some()) => Some(known.in_zone_of(texts)),
        Some(known) => Dates::of(texts, wanted)?.map(|found| found.on(known.calendar)),
        // Earlier runs learned from counts since 1970, and from quarters without a letter, as numbers.
        None => Dates::of(texts, wanted)?.filter(|found| {
            !reading.learned || !found.is_epoch() && !["%Y%q", "%Y.%q"].contains(&found.format.as_str())
        }),
    };
    match (reading.learned, reading.dates.is_some(), found.is_some()) {
        (true, true, false) => {
            Err(format!("times such as {:?} are no dates, and this run learned from dates; give such", texts[0]))
        }
        (true, false, true) => {
            Err(format!("times such as {:?} are dates, and this run learned from numbers; give such", texts[0]))
        }
        _ => Ok(found.map(Arc::new)),
    }
}

fn from_lines(text: &str, name: &str, reading: &Reading<'_>) -> Result<Found> {
    // Dates are of one format in all series.
    let mut texts: Vec<String> = Vec::new();
    json::each(text, name, |value, _| {
        texts.extend(date_texts(&value, reading));
        Ok(())
    })?;
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let dates = dates_of(&texts, reading).map_err(|problem| anyhow!("{name}: {problem}"))?;
    let mut series = Vec::new();
    json::each(text, name, |value, line| {
        series.push(from_value(&value, line, dates.clone()).map_err(lines::in_line(name, line))?);
        Ok(())
    })?;
    Ok(Found { series, ..Found::default() })
}

pub fn from_json(text: &str, line: usize, reading: &Reading<'_>) -> Result<Series, String> {
    let value = json::line(text).map_err(|problem| format!("{problem}; {EXAMPLE}"))?;
    if reading.labels && !value["forecast"].is_null() {
        return Err("it has times to forecast, and this run predicts labels; train one with --forecast N".into());
    }
    let times = date_texts(&value, reading);
    let dates = dates_of(&times.iter().map(String::as_str).collect::<Vec<_>>(), reading)?;
    if reading.dates.is_some() && dates.is_none() {
        return Err("it has no dates in `times`, and this run learned from dates; give them".into());
    }
    from_value(&value, line, dates)
}

/// The times of a series that are dates: texts, and numbers where the run learned from counts since 1970.
fn date_texts(series: &Value, reading: &Reading<'_>) -> Vec<String> {
    let text = |time: &Value| match time {
        Value::String(text) => Some(text.clone()),
        Value::Number(count) if reading.dates.is_some_and(Dates::is_epoch) => Some(count.to_string()),
        _ => None,
    };
    series["times"].as_array().into_iter().flatten().filter_map(text).collect()
}

const EXAMPLE: &str =
    "expected an object such as {\"times\": [0, 0.5, 2], \"values\": [1.5, 1.4, 0.2], \"label\": \"a\"}";

const KEYS: [&str; 5] = ["times", "values", "label", "id", "forecast"];

/// A series from an object of JSON. Without times, points are counted.
fn from_value(value: &Value, line: usize, dates: Option<Arc<Dates>>) -> Result<Series, String> {
    let Value::Object(object) = value else { return Err(format!("{value} is no series; {EXAMPLE}")) };
    if object.contains_key("text") {
        return Err("it has a text; give labelled texts with --labelled".into());
    }
    if let Some(key) = object.keys().find(|key| !KEYS.contains(&key.as_str())) {
        let help = if object.contains_key("values") { "" } else { "; a table is a list of objects, one for each row" };
        return Err(format!("unknown key `{key}`; {}known are {}{help}", nearest(key, &KEYS), KEYS.join(", ")));
    }
    let number = |value: &Value| match value {
        Value::Null => Some(f64::NAN),
        Value::String(text) if is_missing(text) => Some(f64::NAN),
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
    let time = |value: &Value| match (value, &dates) {
        (Value::String(text), Some(dates)) => {
            dates.number(text).ok_or_else(|| format!("{text:?} is no date as those before it"))
        }
        (Value::Number(count), Some(dates)) if dates.is_epoch() => {
            dates.number(&count.to_string()).ok_or_else(|| format!("{count} counts no whole date"))
        }
        _ => value.as_f64().ok_or_else(|| format!("a time is no number and no date: {value}")),
    };
    let list = |key: &str| match &value[key] {
        Value::Null => Ok(None),
        Value::Array(times) => times.iter().map(time).collect::<Result<Vec<f64>, _>>().map(Some),
        _ => Err(format!("the key `{key}` has no list of times; {EXAMPLE}")),
    };
    let times = list("times")?.unwrap_or_else(|| (0..points.len()).map(|n| n as f64).collect());
    if times.len() != points.len() {
        let (times, values) = (counted(times.len(), "times"), counted(points.len(), "values"));
        return Err(format!("{times} and {values}; give a time to each"));
    }
    let text = |key: &str| match &value[key] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(composed(text).into_owned())),
        text @ (Value::Number(_) | Value::Bool(_)) => Ok(Some(text.to_string())),
        _ => Err(format!("the {key} is neither text nor number")),
    };
    let mut one = series(times.into_iter().zip(points).collect(), &[], text("label")?, line)?;
    if let Some(mut ahead) = list("forecast")? {
        let last = one.times.last().copied().unwrap_or(0.0);
        if let Some(early) = ahead.iter().find(|time| **time <= last) {
            return Err(format!(
                "the time {early} in `forecast` is not after {last}, the last that has a value; give later times"
            ));
        }
        ahead.sort_by(f64::total_cmp);
        one.ahead = ahead.into_iter().map(|time| (time, vec![f64::NAN; one.width])).collect();
    }
    Ok(Series { id: text("id")?, dates, ..one })
}

fn from_table(mut table: Table, reading: &Reading<'_>) -> Result<Found> {
    let none = Columns::default();
    let columns = reading.columns.unwrap_or(&none);
    table.name_decimal(columns);
    if columns.wide {
        return from_wide(&table, columns, reading);
    }
    let name = &table.name.clone();
    let named = table.rows.len();
    let table = table.headed();
    if table.rows.len() > named {
        note(format_args!(
            "{name}: the first line has numbers and no names; it is read as a row, and columns are called `column 1`, …"
        ));
    }
    let (mut table, said) = table.without_units();
    said.iter().for_each(|said| note(format_args!("{name}, {said}")));
    if !reading.labels
        && let Some((melted, said)) = table.melted(columns)
    {
        note(format_args!("{name}: {said}"));
        table = melted;
    }
    let one_hot = categories(&table, columns, reading)?;
    let (table, columns) = one_hot.as_ref().map_or((&table, columns), |(table, columns)| (table, columns));
    let roles = Roles::of(table, columns, reading.labels, reading.learned)?;
    let decimal = table.settle_numbers(&roles.channels, roles.label)?;
    let plain = table.with_plain_numbers(&roles.time, roles.label);
    let table = plain.as_ref().unwrap_or(table);
    let is_serial = matches!(roles.time[..], [time] if !reading.learned && counts_excel_days(table, time));
    let dates = columns.dates.clone().or(is_serial.then(|| EXCEL.into()));
    let columns = &Columns { dates, ..columns.clone() };
    let reading = &Reading { columns: Some(columns), ..*reading };
    let texts: Vec<Option<String>> = (0..table.rows.len()).map(|row| time_text(table, &roles.time, row)).collect();
    let some: Vec<&str> = texts.iter().flatten().map(String::as_str).filter(|_| !roles.time.is_empty()).collect();
    let dates = dates_of(&some, reading).map_err(|problem| anyhow!("{name}: {problem}"))?;
    let mut numbers = Vec::with_capacity(roles.channels.len());
    for &place in &roles.channels {
        numbers.push(table.numbers(place).map_err(|row| no_number(table, &roles, place, row))?);
    }
    let names: Arc<[String]> = roles.channels.iter().map(|&place| table.header[place].clone()).collect();
    if let Some(wanted) =
        columns.known.iter().find(|wanted| !names.iter().any(|name| name.to_lowercase() == wanted.to_lowercase()))
    {
        bail!("{}: --known {wanted}: no such channel; they are {}", table.at_header(), names.join(", "));
    }
    let known = columns.known_among(&names);
    if !known.is_empty() && known.iter().all(|known| *known) {
        bail!("{}: --known names all channels; leave out those that are to be predicted", table.at_header());
    }
    let mut places: HashMap<Vec<String>, usize> = HashMap::new();
    let mut found: Vec<(usize, String, Vec<Point>, Option<String>)> = Vec::new();
    for (n, row) in table.rows.iter().enumerate() {
        let id: Vec<String> = roles.id.iter().map(|place| cell(row, *place)).collect();
        if id.iter().any(String::is_empty) {
            let ids = plain_names(table, &roles.id);
            return Err(row.wrong(
                name,
                format_args!("the column `{ids}` is empty; say which series the row is of, or leave it out"),
            ));
        }
        let place = *places.entry(id).or_insert_with_key(|id| {
            found.push((row.line, id.join(","), Vec::new(), None));
            found.len() - 1
        });
        let (_, _, points, label) = &mut found[place];
        let time = match (&texts[n], &dates) {
            _ if roles.time.is_empty() => points.len() as f64,
            (None, _) => {
                return Err(row.wrong(
                    name,
                    format_args!(
                        "the column `{}` is empty; give a time, or leave the row out",
                        plain_names(table, &roles.time)
                    ),
                ));
            }
            (Some(text), Some(dates)) => dates.number(text).ok_or_else(|| {
                let others = || {
                    format!("no date as the others, such as {:?}; mend it, or take out a row of sums or words", some[0])
                };
                let problem = dates.off_calendar(text).map_or_else(others, |why| format!("not on the calendar: {why}"));
                row.wrong(
                    name,
                    format_args!("{text:?} in the column `{}` is {problem}", plain_names(table, &roles.time)),
                )
            })?,
            (Some(text), None) => {
                value(text).filter(|time| !time.is_nan()).ok_or_else(|| no_time(table, &roles.time, row, text))?
            }
        };
        points.push((time, numbers.iter().map(|channel| channel[n]).collect()));
        if let Some(own) = roles.label.map(|place| cell(row, place)).filter(|own| !own.is_empty()) {
            match label {
                Some(known) if *known != own => {
                    return Err(row.wrong(name, format_args!(
                        "the label is {own:?}, and {known:?} in a line before with the same id; give a series one label"
                    )));
                }
                _ => *label = Some(own),
            }
        }
    }
    let series_found = with_values(
        name,
        found.into_iter().map(|(line, id, points, label)| {
            let id = (!roles.id.is_empty()).then_some(id);
            (
                line,
                series(points, &known, label, line).map(|one| Series {
                    names: names.clone(),
                    id,
                    dates: dates.clone(),
                    ..one
                }),
            )
        }),
    )?;
    say_partly_known(name, &series_found, &known);
    if !reading.learned {
        note_some(series_found.iter().map(|one| one.ahead.len()).sum(), |rows| {
            format!("{name}: {} after the last value, which are not learned from, but predicted", counted(rows, "rows"))
        });
    }
    let named = Columns { decimal: columns.decimal.or(decimal), ..roles.named(table, columns) };
    let columns = (named, roles.introduce(table, dates.as_deref()));
    Ok(Found { series: series_found, target: None, columns: Some(columns) })
}

/// Series from their lines, without those that have no value, if others have.
fn with_values(name: &str, all: impl Iterator<Item = (usize, Result<Series, String>)>) -> Result<Vec<Series>> {
    let (mut found, mut empty) = (Vec::new(), Vec::new());
    for (line, one) in all {
        match one {
            Ok(one) => found.push(one),
            Err(problem) if problem == NO_VALUE => empty.push(line),
            Err(problem) => return Err(lines::in_line(name, line)(problem)),
        }
    }
    match (&empty[..], found.len()) {
        ([], _) => {}
        ([line, ..], 0) => return Err(lines::in_line(name, *line)(NO_VALUE)),
        (_, count) => {
            let (empty, all) = (empty.len(), empty.len() + count);
            note(format_args!("{name}: left out, without any value: {empty} of {all} series"));
        }
    }
    Ok(found)
}

const CATEGORIES: usize = 20;

/// The table with a channel of 0 and 1, `column=text`, for each text of columns of categories, if there are some: those that a run learned
/// from, or else where labels are learned, or the column is known ahead, so that it is not predicted.
fn categories(table: &Table, columns: &Columns, reading: &Reading<'_>) -> Result<Option<(Table, Columns)>> {
    let name = &table.name;
    let of_channel = |channel: &String| {
        let (title, text) = channel.split_once('=').filter(|_| table.find(channel).is_none())?;
        Some((table.find(title)?, text.to_owned()))
    };
    let mut found: Vec<(usize, String)> = columns.channels.iter().filter_map(of_channel).collect();
    if !found.is_empty() {
        for place in found.iter().map(|(place, _)| *place).collect::<BTreeSet<_>>() {
            let is_new = |text: &String| !found.contains(&(place, text.clone()));
            note_some(table.texts(place).flatten().filter(is_new).count(), |rows| {
                let (title, rows) = (&table.header[place], counted(rows, "rows"));
                format!("{name}: texts in the column `{title}` that did not occur in training, in {rows}")
            });
        }
        return Ok(Some((table.one_hot(&found), columns.clone())));
    }
    let roles = Roles::of(table, columns, reading.labels, reading.learned)?;
    let mut named = roles.named(table, columns);
    named.channels.clear();
    for place in roles.channels {
        let title = &table.header[place];
        let texts: BTreeSet<String> = table.texts(place).flatten().collect();
        // A slip in a column of numbers makes no categories.
        let is_plain = |text: &&String| is_number(text) && !text.contains(char::is_alphabetic);
        let numbers = texts.iter().filter(is_plain).count();
        let wanted = (reading.labels || columns.has_known(title)) && table.numbers(place).is_err();
        if !wanted || 2 * numbers >= texts.len() || !(2..=CATEGORIES).contains(&texts.len()) {
            named.channels.push(title.clone());
            continue;
        }
        note(format_args!("{name}: the {} texts of the column `{title}` become channels of 0 and 1", texts.len()));
        let channels: Vec<String> = texts.iter().map(|text| format!("{title}={text}")).collect();
        if columns.has_known(title) {
            named.known.retain(|known| known.to_lowercase() != title.to_lowercase());
            named.known.extend(channels.iter().cloned());
        }
        named.channels.extend(channels);
        found.extend(texts.into_iter().map(|text| (place, text)));
    }
    Ok((!found.is_empty()).then(|| (table.one_hot(&found), named)))
}

/// A cell as it stands, without the space around it.
fn cell(row: &Row, place: usize) -> String {
    match &row.cells[place] {
        Value::Null => String::new(),
        Value::String(text) => composed(text).into_owned(),
        other => other.to_string(),
    }
}

/// Says that a cell of a channel is no number, and what helps.
fn no_number(table: &Table, roles: &Roles, place: usize, row: &Row) -> anyhow::Error {
    let numbers = table.texts(place).filter(|cell| cell.as_ref().is_none_or(|text| is_number(text))).count();
    let title = &table.header[place];
    let text: String = cell(row, place).chars().take(60).collect();
    let is_written_otherwise = text.trim_start_matches(|c: char| !c.is_alphanumeric()).starts_with(char::is_numeric);
    let is_nested = row.cells[place].is_object() || row.cells[place].is_array();
    if is_written_otherwise || is_nested || 2 * numbers >= table.rows.len() {
        let help = if is_nested {
            "give what is in it columns of its own, as pandas' json_normalize does"
        } else if is_number(&text) {
            "others of it are written otherwise; write all alike"
        } else if is_written_otherwise {
            "write numbers such as 1234.5, all in one way; if it holds none, name it with --id, or the others with --channels"
        } else {
            "leave it empty if it is missing"
        };
        return row.wrong(&table.name, format_args!("{text:?} in the column `{title}` is no number; {help}"));
    }
    let others: Vec<&str> = roles
        .channels
        .iter()
        .filter(|other| table.numbers(**other).is_ok())
        .map(|other| table.header[*other].as_str())
        .collect();
    let without = if others.is_empty() { "NAMES".into() } else { others.join(",") };
    row.wrong(
        &table.name,
        format_args!(
            "{text:?} in the column `{title}` is no number; if it says which series a row is of, give --id '{title}', else leave the column out: --channels '{without}'"
        ),
    )
}

/// Numbers that may stand for missing values: the least or the greatest, further off than all others from one another, which come again or
/// are all nines, such as -999; and zeros at the end of a series that has no others.
fn codes(all: &[Series]) -> Vec<String> {
    let mut found = Vec::new();
    for channel in 0..all.first().map_or(0, |one| one.width) {
        let of = all[0].names.get(channel).map_or(String::new(), |name| format!(" of `{name}`"));
        let values = |one: &'_ Series| -> Vec<f64> {
            let values = one.values.iter().skip(channel).step_by(one.width).copied();
            values.filter(|value| !value.is_nan()).collect()
        };
        let before = found.len();
        let mut sorted: Vec<f64> = all.iter().flat_map(values).collect();
        sorted.sort_by(f64::total_cmp);
        for code in sorted.first().into_iter().chain(sorted.last()).copied() {
            let mut others: Vec<f64> = sorted.iter().copied().filter(|value| *value != code).collect();
            let count = sorted.len() - others.len();
            others.dedup();
            let (Some(&low), Some(&high)) = (others.first(), others.last()) else { continue };
            let is_nines = code.abs() >= 99.0 && (code.abs() + 1.0).log10().fract() == 0.0;
            let is_code = is_nines || count > 1 && others.len() >= DIFFERENT;
            if is_code && low < high && (low - code).max(code - high) > high - low {
                found.push(format!("{}{of}: {code}, the others from {low} to {high}", counted(count, "values")));
            }
        }
        let zeros_at_end = |one: &Series| {
            let values = values(one);
            let others = values.iter().rposition(|value| *value != 0.0)? + 1;
            let are_all = !values[..others].contains(&0.0);
            (values.len() > others + 1 && others >= DIFFERENT && are_all).then(|| values.len() - others)
        };
        if let (Some(count), true) = (all.iter().find_map(zeros_at_end), found.len() == before) {
            found.push(format!("the last {count} points{of} are 0, as no others are"));
        }
    }
    found
}

/// A note where the last points of series have some channels, and others not up to the end: they may be meant to be predicted.
fn say_partly_known(name: &str, all: &[Series], known: &[bool]) {
    let Some(first) = all.first().filter(|one| one.width > 1 && known.is_empty()) else { return };
    let end_of = |one: &Series, channel: usize| {
        let values = one.values.iter().skip(channel).step_by(one.width);
        values.rev().take_while(|value| value.is_nan()).count()
    };
    let ends: Vec<usize> =
        (0..first.width).map(|channel| all.iter().map(|one| end_of(one, channel)).min().unwrap_or(0)).collect();
    let (Some(channel), true) = (ends.iter().position(|end| *end > 0), ends.contains(&0)) else { return };
    let list = |open: bool| {
        let some = first.names.iter().zip(&ends).filter(|(_, end)| (**end > 0) == open).map(|(name, _)| name.as_str());
        some.collect::<Vec<_>>().join(",")
    };
    note(format_args!(
        "{name}: no {1} at the end ({0}), where it counts as a missing value of points that are known: to predict it there, train with --known {2}",
        counted(ends[channel], "points"),
        list(true),
        list(false)
    ));
}

/// The numbers of columns such as `v1`, `v2`, …, from the first of them on; none where they have other names.
fn numbered(titles: &[&str]) -> Option<Vec<f64>> {
    let cut = |title: &&str| title.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let name = |title: &&str| title[..cut(title)].to_string();
    let numbers: Vec<u32> = titles.iter().map(|title| title[cut(title)..].parse().ok()).collect::<Option<_>>()?;
    let (alike, different) =
        (titles.iter().map(name).collect::<BTreeSet<_>>(), numbers.iter().collect::<BTreeSet<_>>());
    let first = numbers.iter().min().filter(|_| alike.len() == 1 && different.len() == numbers.len())?;
    Some(numbers.iter().map(|number| f64::from(number - first)).collect())
}

/// Series from a table with a series a row and a column for each time.
fn from_wide(table: &Table, columns: &Columns, reading: &Reading<'_>) -> Result<Found> {
    let name = &table.name;
    if let Some(known) = columns.known.first() {
        bail!("{name}: --known {known} names a channel, and with --wide a series has one; leave it out");
    }
    let label = match &columns.label {
        Some(title) => Some(table.named(title, By::Flag("--label"))?),
        None => table.find("label").or(table.find("class")),
    };
    let mut id = match (&columns.id, &columns.time) {
        (Some(names), _) | (_, Some(names)) => table.several(names, ID)?,
        _ => table.find("year").or(named_id(table)).into_iter().collect(),
    };
    let chosen = |title: &String| table.named(title, By::Flag("--channels"));
    let chosen = columns.channels.iter().map(chosen).collect::<Result<Vec<_>>>()?;
    let free = (0..table.header.len()).filter(|place| Some(*place) != label && !id.contains(place));
    let free = free.filter(|place| !table.header[*place].is_empty() && !counts_rows(table, *place, label.is_some()));
    // The World Bank's are `1990 [YR1990]`.
    let title = |place: &usize| table.header[*place].split(" [").next().unwrap_or_default();
    let (timed, others): (Vec<usize>, Vec<usize>) = free.partition(|place| is_time(title(place)));
    let (values, texts): (Vec<usize>, Vec<usize>) = others.into_iter().partition(|place| table.numbers(*place).is_ok());
    let mut values = if chosen.is_empty() { values } else { chosen };
    // Where most names are times, the others are none, and what these hold has to be numbers.
    if columns.channels.is_empty() {
        values = if timed.len() > values.len() { timed } else { [timed, values].concat() };
        values.sort_unstable();
    }
    if values.is_empty() {
        bail!("{}: --wide: no column of numbers", table.at_header());
    }
    let titles: Vec<&str> = values.iter().map(title).collect();
    let dates = dates_of(&titles, reading).map_err(|problem| anyhow!("{}: {problem}", table.at_header()))?;
    let times: Option<Vec<f64>> = match &dates {
        Some(dates) => titles.iter().map(|title| dates.number(title)).collect(),
        None => titles.iter().map(|title| value(title).filter(|time| time.is_finite())).collect(),
    };
    let run_on = |times: &Vec<f64>| times.is_sorted() || times.iter().rev().is_sorted();
    if times.as_ref().is_some_and(|times| !run_on(times) && times.iter().any(|time| time.fract() != 0.0)) {
        bail!(
            "{}: it names the columns, by numbers that do not run on, as if it were a series; put a line with names before it, such as t1, t2, …",
            table.at_header()
        );
    }
    let counted = times.is_none();
    let numbers = numbered(&titles);
    let mut columns = columns.clone();
    if counted && numbers.is_none() {
        if reading.learned && columns.channels.is_empty() {
            bail!("{}: no columns of times, as in training, among {}", table.at_header(), table.titles());
        }
        // Names that do not tell their order keep that of the columns that were learned from.
        columns.channels = values.iter().map(|place| table.header[*place].clone()).collect();
    }
    let times = times.or(numbers).unwrap_or_else(|| (0..titles.len()).map(|n| n as f64).collect());
    // Texts that name each row, one or all of them together.
    if id.is_empty() {
        let is_name = |place: &usize| is_different(table, *place) && table.texts(*place).all(|text| text.is_some());
        let first = texts.iter().copied().find(is_name);
        id = first.map_or(texts, |place| vec![place]);
    }
    let id_of = |row: &Row| {
        let cells = id.iter().map(|place| cell(row, *place)).filter(|cell| id.len() == 1 || !cell.is_empty());
        (!id.is_empty()).then(|| cells.collect::<Vec<_>>().join(","))
    };
    let wrong = |row: &Row, place: usize| {
        let (text, title) = (cell(row, place), &table.header[place]);
        row.wrong(name, format_args!("{text:?} in the column `{title}` is no number; leave it empty if it is missing"))
    };
    let numbers = values.iter().map(|place| table.numbers(*place).map_err(|row| wrong(row, *place)));
    let numbers = numbers.collect::<Result<Vec<_>>>()?;
    table.check_units(&values)?;
    columns.decimal = columns.decimal.or(table.settle_numbers(&values, label)?);
    let found = with_values(
        name,
        table.rows.iter().enumerate().map(|(n, row)| {
            let points = times.iter().zip(&numbers).map(|(time, column)| (*time, vec![column[n]])).collect();
            let own = label.map(|place| cell(row, place)).filter(|own| !own.is_empty());
            let one = series(points, &[], own, row.line);
            (row.line, one.map(|one| Series { id: id_of(row), dates: dates.clone(), ..one }))
        }),
    )?;
    let used = |place: &usize| values.contains(place) || id.contains(place) || label == Some(*place);
    let unread: Vec<String> = (0..table.header.len())
        .filter(|place| !used(place))
        .map(|place| format!("`{}`", table.header[place]))
        .collect();
    let unread = if unread.is_empty() { String::new() } else { format!("; not read: {}", unread.join(", ")) };
    let said = format!(
        "columns: a series a row, {} {} `{}` … `{}`{}{}{unread}",
        titles.len(),
        if counted { "values" } else { "times" },
        titles[0],
        titles[titles.len() - 1],
        if id.is_empty() { String::new() } else { format!(", ids {}", names(table, &id, " and ")) },
        label.map_or(String::new(), |place| format!(", labels `{}`", table.header[place]))
    );
    Ok(Found { series: found, target: None, columns: Some((columns, said)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str, ending: &str) -> Vec<Series> {
        parse(text.as_bytes(), ending, "f", &Reading { labels: true, ..Reading::default() }).unwrap().series
    }

    fn found(text: &str, ending: &str) -> Vec<(Vec<f64>, String, Option<String>)> {
        all(text, ending).into_iter().map(|one| (one.times, format!("{:?}", one.values), one.label)).collect()
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
        let series = all(csv, "csv");
        assert!(series[0].backwards && !series[1].backwards && !series[0].repeats);
        assert_eq!(&*series[0].names, ["x".to_string(), "y".to_string()]);
        let one = found("1\t0.5\t-2\tNaN\n2\t1\t\t3\n", "tsv");
        assert_eq!(
            one[0],
            (vec![0.0, 1.0], "[0.5, -2.0]".into(), Some("1".into())),
            "what is missing at the end is no point"
        );
        assert_eq!(one[1].1, "[1.0, NaN, 3.0]", "what is missing elsewhere is");
        let open = &all("time,x\n1,5\n4,\n2,\n3,6\n6,?\n5,\n", "csv")[0];
        let ahead: Vec<f64> = open.ahead.iter().map(|(time, _)| *time).collect();
        assert_eq!((open.times.as_slice(), ahead.as_slice()), (&[1.0, 2.0, 3.0][..], &[4.0, 5.0, 6.0][..]));
        let repeated = from_json("{\"times\": [1, 1], \"values\": [1, 2]}", 1, &Reading::default()).unwrap();
        assert!(repeated.repeats && repeated.label.is_none());
    }

    /// What is found in a table: columns in words, ids, and of the first series the values and times.
    fn of_table(text: &str, columns: &Columns) -> Result<String> {
        let found = parse(text.as_bytes(), "csv", "f", &Reading { columns: Some(columns), ..Reading::default() })?;
        let ids: Vec<&str> = found.series.iter().map(|one| one.id.as_deref().unwrap_or("-")).collect();
        let first = &found.series[0];
        let times: Vec<String> = first.times.iter().map(|time| first.time(*time)).collect();
        let (said, ids, times) = (found.columns.unwrap().1, ids.join("|"), times.join("|"));
        Ok(format!("{said}; ids {ids}; values {:?}; times {times};", first.values))
    }

    #[test]
    fn columns_are_found_by_their_names_and_contents() {
        let none = Columns::default();
        let counting: String = (0..10).map(|n| format!("{n},s,{},a\n", n + 4)).collect();
        let counting = format!("time,id,entry,label\n{counting}");
        let beside: String = (1..=10).map(|n| format!("2024-01-{n:02},{n},2024.0{},{}\n", 27 * n, n % 3)).collect();
        let each: String =
            (1..=7).flat_map(|n| ["a", "b"].map(|id| format!("{id},{n},2024-01-{n:02},{}\n", n % 3))).collect();
        for (text, parts) in [
            // A date, an id by its name, a row number of pandas, and a part of the time.
            (
                ",symbol,date,price\n0,b,Jan 1 2000,1\n1,a,Jan 1 2000,2\n2,b,Feb 1 2000,3\n",
                "times `date` (dates of the form %b %-d %Y, in months), ids `symbol`, channels `price`; not read: `` (row numbers) & ids b|a; values [1.0, 3.0]; times Jan 1 2000|Feb 1 2000;",
            ),
            ("date,x\nmay 2000,1\njun 2000,2\n", "(dates of the form %b %Y, in months, printed such as May 2000)"),
            (
                "YEAR,x,TIME\n1951,3,1\n1952,4,2\n",
                "times `TIME` (numbers), channels `x`; not read: `YEAR` (a part of the time)",
            ),
            ("year,quarter,x\n1959,4,1\n1960,1,2\n", "times 1959 Q4|1960 Q1;"),
            ("year,x\n1959,1\n1960,2\n", "times 1959|1960;"),
            // Parts of times in columns of their own, and times with their unit.
            ("year,month,x\n1959,Nov,1\n1959,Dec,2\n", "times 1959-Nov|1959-Dec;"),
            ("year,month,x\n1959.0,1.0,1\n1959.0,2.0,2\n", "times 1959-01|1959-02;"),
            ("yearmonth,x\n201012,1\n201101,2\n", "times 201012|201101;"),
            ("year,month,date_of_month,x\n1959,1,31,1\n1959,2,1,2\n", "times 1959-01-31|1959-02-01;"),
            ("quarter,year,x\nQ4,1959,1\nQ1,1960,2\n", "times 1959 Q4|1960 Q1;"),
            ("year,week,x\n2020,9,1\n2020,10,2\n", "times 2020-W09|2020-W10;"),
            ("date,hr,x\n2020-01-31,22,1\n2020-01-31,24,2\n", "times 2020-01-31 22:00|2020-02-01 00:00;"),
            (
                "year,month,day,hour,minute,x\n2020,1,31,9,5,1\n2020,1,31,9,6,2\n",
                "times 2020-01-31 09:05|2020-01-31 09:06;",
            ),
            (
                "Datum;Uhrzeit;x\n30.01.2024;00:00;1\n30.01.2024;12:00;2\n31.01.2024;00:00;3\n31.01.2024;12:00;4\n",
                "times 30.01.2024 00:00|30.01.2024 12:00|31.01.2024 00:00|31.01.2024 12:00;",
            ),
            ("Time (s),x\n0.5,1\n0.7,2\n", "times 0.5|0.7;"),
            ("time;x\n0,5;1\n1.000,25;2,5\n", "times 0.5|1000.25;"),
            // Numbers without a name are the time where no other column is.
            (",0\n1821,269\n1822,321\n", "values [269.0, 321.0]"),
            ("date,x\n20230228,1\n20230301,2\n", "times 20230228|20230301;"),
            // Texts that tell rows of one time apart are ids; spaces around them count as nothing.
            ("shop,time,x\n é,0,1\nb ,0,2\ne\u{301},1,3\nb,1,4\n", "ids é|b;"),
            (
                "id,ts,store,shelf_id,x\n1,0,1,7,5\n2,0,1,8,6\n3,0,2,7,7\n4,1,1,7,8\n5,1,1,8,9\n6,1,2,7,10\n7,2,1,7,5\n8,2,1,8,6\n",
                "times `ts` (numbers), ids `store` and `shelf_id`, channels `x`; not read: `id` (different in each row) & ids 1,7|1,8|",
            ),
            // Counts since 1970 are times, and beside a date the same again.
            (
                "ts,date,x\n1704067200,2024-01-01,1\n1704153600,2024-01-02,2\n",
                "times `date` & channels `x`; not read: `ts` (another time)",
            ),
            ("ts,month_sales\n1704067200,170406720\n1704153600,180415360\n", "channels `month_sales`"),
            ("ts,x\n1704067200000,1\n1704067260000,2\n", "times 1704067200000|1704067260000;"),
            // Texts that tell rows apart together.
            (
                "date,site,wday,kind,x\n0,n,Mon,a,1\n0,n,Mon,b,2\n0,s,Mon,a,3\n0,s,Mon,b,4\n1,n,Tue,a,5\n1,n,Tue,b,6\n1,s,Tue,a,7\n1,s,Tue,b,8\n",
                "ids `site` and `kind`, channels `x`; not read: `wday` (a part of the time) & ids n,a|n,b|s,a|s,b; values [1.0, 5.0]",
            ),
            ("rownames,time,x,on\n20.1,0,1,TRUE\n3,1,2,false\n", "values [1.0, 1.0, 2.0, 0.0]"),
            ("date,Datum,x\n,30.12.1999,1\n,31.12.1999,2\n", "times 30.12.1999|31.12.1999;"),
            ("date,x\n991230,1\n000102,2\n000103,3\n", "times 991230|000102|000103;"),
            // Columns that number rows, whatever the file calls them, and columns without values are no channels.
            (
                "No.,date,row_number,x,notes\n7,2024-01-01,1,0.5,\n8,2024-01-02,2,0.7,\n9,2024-01-03,3,0.1,\n",
                "channels `x`; not read: `No.` (row numbers), `row_number` (row numbers), `notes` (nothing in it)",
            ),
            // It may be a count where no label is learned.
            (&counting, "channels `entry`"),
            (
                &format!("date,instant,decimal date,x\n{beside}"),
                "channels `x`; not read: `instant` (row numbers), `decimal date` (another time)",
            ),
            (&format!("id,visit,date,x\n{each}"), "ids `id`, channels `x`; not read: `visit` (row numbers)"),
            // A second line of units.
            ("time,x,y\n,°C,[%]\n0,20,1\n1,21,2\n", "values [20.0, 1.0, 21.0, 2.0]"),
            // Days that a spreadsheet counts: of months, whose days differ.
            ("Date,x\n45292,1\n45323,2\n45352,3\n", "(dates of the form excel, in months) & times 45292|45323|45352;"),
            (
                "date,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24\n0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24\n",
                "channels `1`, `2`",
            ),
            // Without a header the first line is a row.
            ("1,0.5\n2,0.7\n", "times `column 1` (numbers), channels `column 2` & values [0.5, 0.7]"),
        ] {
            let found = of_table(text, &none).unwrap();
            parts.split(" & ").for_each(|part| assert!(found.contains(part), "{part}: {text}: {found}"));
        }
        for title in ["ts", "timestamp", "date", "time", "event_ts", "unixtime"] {
            let text = format!("{title},x\n1704067200000,1\n1704153600000,2\n1704240000000,3\n");
            let wanted = format!("times `{title}` (dates of the form milliseconds, in seconds), channels `x`;");
            assert!(of_table(&text, &none).unwrap().contains(&wanted));
        }
        let labelled = Reading { labels: true, ..Reading::default() };
        assert!(
            parse(counting.as_bytes(), "csv", "f", &labelled).unwrap_err().to_string().contains("no column of values")
        );
        // Hours, and parts of them, in columns of their own.
        for (first, titles, begin, end) in [
            (1, "H", "2024-01-01 01:00", "2024-01-03 00:00"),
            (0, "hour_", "2024-01-01 00:00", "2024-01-02 23:00"),
            (0, "", "2024-01-01 00:00", "2024-01-02 23:00"),
        ] {
            let titles: Vec<String> = (first..first + 24).map(|n| format!("{titles}{n:02}")).collect();
            let row = |day: usize| (0..24).map(|n| (24 * day + n).to_string()).collect::<Vec<_>>().join(",");
            let table = format!("date,{}\n2024-01-01,{}\n2024-01-02,{}\n", titles.join(","), row(0), row(1));
            let values = format!("values {:?}; times {begin}|", (0..48).map(f64::from).collect::<Vec<_>>());
            for part in ["times `date` and `clock`", &values, &format!("|{end};")] {
                let found = of_table(&table, &none).unwrap();
                assert!(found.contains(part), "{part}: {found}");
            }
        }
        // Columns that a person names: several are one id together, in any order, with one without a name or values.
        let wide = || Columns { wide: true, ..Columns::default() };
        for (text, columns, parts) in [
            (
                "a,b,time,x\np q,r,0,1\np,q r,0,2\np q,r,1,3\n",
                Columns { id: Some("a,b".into()), ..none.clone() },
                "ids p q,r|p,q r; values [1.0, 3.0]",
            ),
            (
                "store,time,x,y,\n1,0,1,2,\n2,0,3,4,\n",
                Columns { id: Some("store".into()), channels: vec!["y".into(), "x".into()], ..none.clone() },
                "ids 1|2; values [2.0, 1.0]",
            ),
            (
                "a,b\n1,2\n3,4\n",
                Columns { time: Some("row".into()), ..none.clone() },
                "rows are counted & values [1.0, 2.0, 3.0, 4.0]; times 0|1;",
            ),
            ("year,x\n90,1.5\n90,2.5\n", Columns { time: Some("year".into()), ..none.clone() }, "values [1.5, 2.5]"),
            ("name,1990,1991\na,1,2\nb,,\nc,3,4\n", wide(), "ids a|c; values [1.0, 2.0]; times 1990|1991;"),
            (
                "id,no,v1,v2,kind\n7,1,5,6,a\n8,2,7,8,b\n9,3,7,8,b\n",
                wide(),
                "2 values `v1` … `v2`, ids `id`; not read: `no`, `kind` & ids 7|8|9; values [5.0, 6.0]",
            ),
            // Names that are dates, beside numbers that are none, and ids of two columns.
            (
                "Province,Country,Lat,1/30/20,1/31/20,2/1/20\n,a,5.5,1,2,3\nb,c,6.5,4,5,6\nd,c,7.5,7,8,9\n",
                wide(),
                "3 times `1/30/20` … `2/1/20`, ids `Province` and `Country`; not read: `Lat` & ids a|b,c|d,c; values [1.0, 2.0, 3.0]; times 1/30/20|1/31/20|2/1/20;",
            ),
        ] {
            let found = of_table(text, &columns).unwrap();
            parts.split(" & ").for_each(|part| assert!(found.contains(part), "{part}: {text}: {found}"));
        }
        // Columns in another order are the same times: by their numbers, or else by the names that were learned from.
        let wide = |text: &str, columns: &Columns| {
            let reading = Reading { columns: Some(columns), ..Reading::default() };
            let found = parse(text.as_bytes(), "csv", "f", &reading).unwrap();
            (found.series[0].times.clone(), found.series[0].values.clone(), found.columns.unwrap().0)
        };
        let columns = Columns { wide: true, ..none.clone() };
        let (times, values, _) = wide("id,v10,v1,v2\n7,3,1,2\n8,3,1,2\n", &columns);
        assert_eq!((times, values), (vec![0.0, 1.0, 9.0], vec![1.0, 2.0, 3.0]));
        let (_, values, learned) = wide("id,low,mid,high\n7,1,2,3\n8,1,2,3\n", &columns);
        assert_eq!(values, [1.0, 2.0, 3.0]);
        assert_eq!(wide("high,id,low,mid\n3,7,1,2\n3,8,1,2\n", &learned).1, [1.0, 2.0, 3.0]);
        for (text, part) in [
            ("time,Time,x\n0,0,1\n", "f, line 1: `time`, `Time` may all be times; say which with --time"),
            ("time,x,x\n0,1,1\n", "two columns are called `x`"),
            (
                "year,time,x\n1990,9.9,1\n1991,9.8,2\n1992,9.85,2\n",
                "`time`, `year` may all be times; say which with --time",
            ),
            (
                "year,day,x\n90,1,0.5\n90,2,1.5\n91,1,2.5\n91,2,3.5\n91,3,3.5\n",
                "5 of 5 rows share the time `year` with another row; name all columns that say which series a row is of with --id, or those \
                 of the time with --time, count rows with --time row, or keep it with --time 'year'",
            ),
            (
                "a,b\n1,2\n",
                "no column of times is known among `a`, `b`; name it with --time NAME, or count the rows with --time row",
            ),
            ("time,,x\n0,5,1\n1,3,1\n", "f, line 1: column 2 has no name"),
            (
                "date,store,dept,x\n0,1,1,0.5\n0,1,2,0.5\n0,2,1,0.5\n0,2,2,1.5\n1,1,1,0.5\n1,1,2,0.5\n1,2,1,0.5\n1,2,2,1.5\n",
                "`dept` may say which series each is of: say so with --id 'store,dept'",
            ),
            (
                "time,income,size\n0,1,1\n0,1,2\n1,2,1\n1,3,1\n2,4,1\n2,2,2\n3,3,2\n3,4,2\n4,1,1\n4,2,2\n5,1,2\n5,3,1\n6,2,1\n6,4,2\n7,3,2\n7,4,1\n",
                "16 of 16 rows share the time `time` with another row; name all columns",
            ),
            (
                "shop,time,x\n1,0,0.5\n2,0,0.5\n1,1,0.5\n2,1,0.5\n",
                "`shop` may say which series each is of: say so with --id shop",
            ),
            (
                "time,x,kind\n0,1,rain\n1,2,sun\n",
                "\"rain\" in the column `kind` is no number; if it says which series a row is of, give --id 'kind', else leave the column out: --channels 'x'",
            ),
            ("time,x\n0,cold\n1,21\n2,22\n", "line 2: \"cold\""),
            ("time,x\n0,\"1,101\"\n1,\"1,102\"\n", "\"1,101\" in the column `x` may be 1101 or 1.101"),
            (
                "TrackID,time,x\n1,0,5\n1,1,6\n2,7,5\n2,8,6\n",
                "`TrackID` may say which series a row is of: say so with --id TrackID, or name all channels with --channels",
            ),
            ("date,x\n01/02/2024,1\n02/03/2024,2\n", "--dates '%d/%m/%Y'"),
            ("id,time,x\na,0,1\na,1,1\n,1,2\n", "f, line 4: the column `id` is empty; say which series the row is of"),
            (
                "time;x\n0;1,5\n1;1.25\n",
                "f, line 3: \"1.25\" in the column `x` is no number; others of it are written otherwise; write all alike",
            ),
            (
                ",Week,x\n1,1991 weeks 6,1\n2,1991 weeks 7,2\n",
                "f, line 2: \"1991 weeks 6\" in the column `Week` is neither a number nor a date that is known",
            ),
            ("year,x\n1991,1\n1992,2\nTotal,3\n", "f, line 4: \"Total\" in the column `year` is neither"),
            ("time x\n0 1\n", "columns have commas, semicolons, tabs or bars between them, not spaces"),
            ("land,1990,1991\na,1,2\n", "a column a time, give --wide"),
            ("land,Lat,1/22/20,1/23/20,1/24/20\na,5,1,2,3\n", "a column a time, give --wide"),
            ("date,x\n2024-01-01,1\nTotal,2\n", "mend it, or take out a row of sums or words"),
            ("date,x\n2024-01-01,1\nsoon,2\n", "f, line 3: \"soon\" in the column `date` is no date as the others"),
        ] {
            let error = of_table(text, &none).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        for (text, columns, part) in [
            (
                "time,x,X\n0,1,1\n",
                Columns { channels: vec![" x".into()], ..none.clone() },
                "two columns are called `x`",
            ),
            (
                "time,x\n0,1\n",
                Columns { id: Some("y".into()), ..none.clone() },
                "--id y: no such column; the header is `time`, `x`",
            ),
            (
                "1.5,0.5,2.5\n1,2,3\n",
                Columns { wide: true, ..none.clone() },
                "line 1: it names the columns, by numbers that do not run on",
            ),
        ] {
            let error = of_table(text, &columns).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn categories_are_channels_of_0_and_1() {
        let read = |text: &str, columns: &Columns, labels: bool| {
            parse(text.as_bytes(), "csv", "f", &Reading { columns: Some(columns), labels, ..Reading::default() })
        };
        let text = "time,x,sky,label\n0,1,sun,a\n1,2,rain,a\n2,3,,a\n";
        let found = read(text, &Columns::default(), true).unwrap();
        let one = &found.series[0];
        assert_eq!(one.names[..], ["x", "sky=rain", "sky=sun"]);
        assert_eq!((one.width, &one.values[..6]), (3, &[1.0, 0.0, 1.0, 2.0, 1.0, 0.0][..]));
        assert!(one.values[7].is_nan() && one.values[8].is_nan(), "a missing text is missing");
        // Another file has the same channels, with other texts or without some.
        let columns = found.columns.unwrap().0;
        let other = read("sky,time,x,label\nsnow,0,1,a\nsun,1,2,a\n", &columns, true).unwrap();
        assert_eq!(other.series[0].names, one.names);
        assert_eq!(other.series[0].values[..], [1.0, 0.0, 0.0, 2.0, 0.0, 1.0]);
        let case = read("time,x,sky,label\n0,1,Sun,a\n1,2,sun,a\n2,3,rain,a\n", &Columns::default(), true).unwrap();
        assert_eq!(case.series[0].names[..], ["x", "sky=Sun", "sky=rain", "sky=sun"]);
        let decimal = read("time;x;label\n0;20,5;a\n1;21,5;a\n", &Columns::default(), true).unwrap();
        assert_eq!(decimal.series[0].values[..], [20.5, 21.5], "numbers are none, with decimal commas either");
        // Of forecasts they may be known ahead, and are not predicted.
        let known = Columns { known: vec!["Sky".into()], ..Columns::default() };
        let found = read(text, &known, false).unwrap();
        assert_eq!(
            (found.series[0].width, &found.columns.unwrap().0.known[..]),
            (3, &["sky=rain", "sky=sun"].map(String::from)[..])
        );
        for (text, labels) in [
            (text.to_string(), false),
            (format!("time,x,sky\n{}", (0..21).map(|n| format!("{n},1,w{n}\n")).collect::<String>()), true),
        ] {
            let error = read(&text, &Columns::default(), labels).unwrap_err().to_string();
            assert!(error.contains("in the column `sky` is no number") && error.contains("--channels 'x'"), "{error}");
        }
    }

    #[test]
    fn heads_of_archives_are_believed() {
        let of = |text: &str, ending: &str| {
            parse(text.as_bytes(), ending, "f", &Reading { labels: true, ..Reading::default() })
        };
        let shape = |text: &str| {
            let found = of(text, "ts").unwrap();
            let one = &found.series[0];
            (one.width, one.label.clone(), found.target)
        };
        let named = |label: &str| Some(label.to_string());
        assert_eq!(
            shape("@dimensions 2\n@classLabel true 12:30 18:00\n@data\n0,2:4,5:12:30\n"),
            (2, named("12:30"), Some(LabelKind::Label))
        );
        assert_eq!(shape("@data\n0,2,3:4,5,6\n"), (2, None, None), "a list of numbers is no label");
        assert_eq!(shape("% of mine\n@univariate true\n@data\n0,2,3:4\n"), (1, named("4"), None));
        assert_eq!(shape("@targetLabel true\n@data\n0,2,3:4.5\n"), (1, named("4.5"), Some(LabelKind::Number)));
        assert_eq!(shape("@targetlabel false\n@classLabel false\n@data\n0,2,3\n"), (1, None, None));
        for (head, line, part) in [
            ("@classLabel true a b", "1,2:c", "the label \"c\" is none that @classLabel lists (a, b)"),
            ("@univariate true\n@seriesLength 9", "1,2:c", "2 points, and @seriesLength says 9"),
            ("@dimensions 3\n@classLabel true a", "1,2:3,4:a", "3 fields, and the head says 3 channels and a label"),
        ] {
            let error = of(&format!("{head}\n@data\n{line}\n"), "ts").unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let dated = of("@timestamps true\n@data\n(2019-01-01 10:00:00,1),(2019-01-01 11:00:00,2):a\n", "ts").unwrap();
        assert_eq!(
            (dated.series[0].width, dated.series[0].time(dated.series[0].times[1])),
            (1, "2019-01-01 11:00:00".into())
        );
        let twice = of("@timestamps true\n@data\n(0,1),(0,2),(1,3):(0,4),(1,5):a\n", "ts").unwrap();
        assert_eq!(format!("{:?}", twice.series[0].values), "[1.0, 4.0, 2.0, NaN, 3.0, 5.0]", "two points at one time");
        let holes = of("@classLabel true a\n@data\n1,?,3,?:a\n", "ts").unwrap();
        assert_eq!((holes.series[0].times.len(), holes.series[0].values[1].is_nan()), (3, true));

        let monthly = "# x\n@attribute series_name string\n@attribute start_timestamp date\n@frequency monthly\n@data\nT1:1979-11-30 00-00-00:1,?,3\n";
        let found = of(monthly, "tsf").unwrap();
        let one = &found.series[0];
        assert_eq!((one.id.as_deref(), one.time(one.times[2])), (Some("T1"), "1980-01-30 00-00-00".into()));
        for (frequency, third) in [("6_hours", "1979-11-30 12-00-00"), ("fortnightly", "2")] {
            let other = monthly
                .replace("monthly", frequency)
                .replace("@attribute", "@Attribute")
                .replace("date", "Date")
                .replace("@data", "@Data");
            let found = of(&other, "tsf").unwrap();
            assert_eq!(found.series[0].time(found.series[0].times[2]), third);
        }
        let error = of("@relation x\n@attribute c {1,2}\n@attribute a numeric\n@data\n1,0.5\n", "arff")
            .unwrap_err()
            .to_string();
        assert!(error.contains("f, line 4: an attribute before the last one has names in braces"), "{error}");
        let rows = of("@relation x\n@attribute a numeric\n@attribute c {1,2}\n@data\n0.5,?,2,1\n", "arff").unwrap();
        assert_eq!(
            (rows.series[0].times.len(), rows.series[0].label.as_deref(), rows.target),
            (3, Some("1"), Some(LabelKind::Label))
        );
        let rows = of("@relation x\n@attribute r relational\n@attribute a numeric\n@end r\n@attribute c {1,2}\n@data\n'1,2\\n3,4',2\n", "").unwrap();
        assert_eq!(
            (rows.series[0].width, &rows.series[0].values, rows.series[0].label.as_deref()),
            (2, &vec![1.0, 3.0, 2.0, 4.0], Some("2"))
        );
    }

    #[test]
    fn dates_of_a_run_are_dates_of_what_it_reads() {
        let padded = from_json(
            "{\"values\": [1, null, 2, null]}",
            1,
            &Reading { labels: true, learned: true, ..Reading::default() },
        )
        .unwrap();
        assert_eq!(padded.times, [0.0, 1.0, 2.0], "points without a value at the end are none");
        let learned = all("{\"times\": [\"2024-01-31\", \"2024-02-29\"], \"values\": [1, 2]}\n", "jsonl");
        let dates = learned[0].dates.as_deref().unwrap();
        let reading = Reading { dates: Some(dates), learned: true, ..Reading::default() };
        let one =
            from_json("{\"times\": [\"2024-03-31\"], \"values\": [1], \"forecast\": [\"2024-04-30\"]}", 1, &reading)
                .unwrap();
        assert_eq!((one.times[0] - learned[0].times[1], one.ahead[0].0 - one.times[0]), (1.0, 1.0));
        // Days of a place that were learned in winter, and are asked about in summer.
        let winter = "time,x\n2023-03-25T00:00+01:00,1\n2023-03-26T00:00+01:00,2\n2023-03-27T00:00+02:00,3\n2023-10-30T00:00+01:00,4\n";
        let winter = all(winter, "csv")[0].dates.clone();
        let summer = Reading { dates: winter.as_deref(), learned: true, ..Reading::default() };
        let one = from_json("{\"times\": [\"2023-07-01T00:00+02:00\"], \"values\": [1]}", 1, &summer).unwrap();
        assert_eq!(one.time(one.times[0] + 86_400.0), "2023-07-02T00:00+02:00");
        for text in ["{\"values\": [1]}", "{\"values\": [1], \"times\": [5]}"] {
            assert!(from_json(text, 1, &reading).unwrap_err().contains("this run learned from dates"));
        }
        let monthly = "@attribute start date\n@frequency monthly\n@data\n1979-11-30 00-00-00:1,2,3\n";
        for (text, ending) in [
            ("{\"values\": [1]}\n", "jsonl"),
            ("1\t5\t6\n", "tsv"),
            ("@data\n1,2:a\n", "ts"),
            (&monthly.replace("monthly", "daily"), "tsf"),
        ] {
            let error = parse(text.as_bytes(), ending, "f", &reading).unwrap_err().to_string();
            assert!(error.contains("and this run learned from dates in months"), "{error}");
        }
        assert!(parse(monthly.as_bytes(), "tsf", "f", &reading).is_ok());
        let columns = Columns { time: Some("t".into()), channels: vec!["x".into()], ..Columns::default() };
        let reading = Reading { learned: true, columns: Some(&columns), ..Reading::default() };
        let quarters = parse(b"t,x\n20203,1\n20204,2\n20211,3\n", "csv", "f", &reading).unwrap();
        assert_eq!(quarters.series[0].times, [20203.0, 20204.0, 20211.0], "as in runs that learned from such numbers");
        let reading = Reading { columns: None, ..reading };
        let error = parse(monthly.as_bytes(), "tsf", "f", &reading).unwrap_err().to_string();
        assert!(error.contains("it has dates in months, and this run learned from no dates"), "{error}");
        assert!(
            from_json("{\"values\": [1], \"times\": [\"2024-03-31\"]}", 1, &reading)
                .unwrap_err()
                .contains("this run learned from numbers")
        );
    }

    #[test]
    fn numbers_that_stand_for_missing_values_are_found() {
        let codes = |text: &str| codes(&all(text, "csv"));
        assert_eq!(codes("time,x\n0,5\n1,-999\n2,7\n3,-999\n"), ["2 values of `x`: -999, the others from 5 to 7"]);
        let rows = |code: &str| {
            let row = |n| if n % 7 == 3 { format!("{n},{code}\n") } else { format!("{n},{}\n", 20 + n) };
            format!("time,x\n{}", (0..14).map(row).collect::<String>())
        };
        for code in ["-1", "0", "-6999", "100000000000000000000"] {
            assert_eq!(codes(&rows(code)), [format!("2 values of `x`: {code}, the others from 20 to 33")]);
        }
        for other in ["time,x\n0,-990\n1,-999\n2,7\n3,-999\n", "time,x\n0,99\n1,99\n", "time,x\n0,9\n1,0\n2,1\n3,9\n"] {
            assert!(codes(other).is_empty(), "{other}");
        }
        assert!(codes(&rows("10")).is_empty(), "as near as they are wide");
        let ends = |end: &str| {
            format!("time,x\n{}20,0\n21,{end}\n", (0..20).map(|n| format!("{n},{}\n", 7 + n % 11)).collect::<String>())
        };
        assert_eq!(codes(&ends("0"))[..], ["the last 2 points of `x` are 0, as no others are"]);
        assert!(codes(&ends("1")).is_empty());
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, ending, part) in [
            (
                "{\"values\": [1], \"label\": 1, \"values\": [2]}\n",
                "jsonl",
                "f, line 1: the key `values` comes twice; take one out",
            ),
            ("t\0i\0m\0e\0,\0x\0\n\0", "csv", "f: no text, since it has bytes of 0"),
            ("time,x\n0,5.\n1,3/4\n", "csv", "\"3/4\" in the column `x` is no number; write numbers such as 1234.5"),
            ("{\"values\": [1]}\n{\"values\": [\"x\"]}\n", "jsonl", "f, line 2: an entry of `values`"),
            ("{\"values\": [1, 2], \"times\": [1]}\n", "jsonl", "1 time and 2 values"),
            ("{\"values\": [[1, 2], [1]]}\n", "jsonl", "a point has 1 value, those before it 2"),
            ("{\"values\": [null]}\n", "jsonl", "no point of it has a value"),
            ("{\"values\": [1], \"timestamps\": [5]}\n", "jsonl", "unknown key `timestamps`; did you mean `times`?"),
            ("{\"values\": [1, NaN]}\n", "jsonl", "it has no NaN; write null"),
            ("{\"text\": \"a\", \"label\": 1}\n", "jsonl", "--labelled"),
            ("{a\n", "jsonl", "f, line 1: no JSON"),
            ("id,time,label\n1,2,a\n1,3,a\n", "csv", "no column of values beside times, ids and labels"),
            ("id,time,x\n1,2,3\n1,b,3\n", "csv", "f, line 3: \"b\" in the column `time` is neither"),
            ("id,time,x\n1,2,3\n1,,3\n", "csv", "f, line 3: the column `time` is empty"),
            ("time,x\n1,2\n2,inf\n3,4\n", "csv", "f, line 3: \"inf\" in the column `x` is no number"),
            ("id,time,x,label\n1,2,3,a\n1,3,3,b\n", "csv", "f, line 3: the label is \"b\", and \"a\" in a line before"),
            ("1\t5\tx\n", "tsv", "f, line 1: no column of times is known among `1`, `5`, `x`"),
            ("1\t5\n2\tx\n", "tsv", "f, line 2: \"x\" is no number; labelled texts are learned with --labelled"),
            ("1\t2\n1\n", "tsv", "f, line 2: one column"),
            ("@data\n1,2:a\n1,x:b\n", "ts", "f, line 3: \"x\" is no number"),
            ("@timestamps true\n@data\n(0,1),(b,1):a\n", "ts", "f, line 3: \"b\" is no point such as (0.5,1.25)"),
            ("@classlabel true a\n1,2:a\n", "ts", "f, line 2: a series before the line @data"),
            ("@problem x\n", "ts", "f: no line @data"),
        ] {
            let error = parse(text.as_bytes(), ending, "f", &Reading { labels: true, ..Reading::default() })
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
        let error = parse(b"{\"values\": [1]}\n\xff\n", "jsonl", "f", &Reading::default()).unwrap_err().to_string();
        assert!(error.contains("f, line 2, byte 1: invalid UTF-8"), "{error}");
    }
}
