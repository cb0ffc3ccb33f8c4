//! A person's own series: JSON lines, tables with a point a row, or the files of archives.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

use super::archive;
use super::objects::{from_json, from_lines, holds_series};
use super::table::from_table;
use super::unusual::{DIFFERENT, say_unusual};
use crate::run::columns::Columns;
use crate::run::config::{Files, LabelKind};
use crate::tasks::lines;
use crate::tasks::table::dates::Dates;
use crate::tasks::table::{Form, Table, contents, is_missing, value};
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

    pub fn channel(&self, channel: usize) -> impl DoubleEndedIterator<Item = f64> {
        self.values.iter().skip(channel).step_by(self.width).copied()
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

pub const NO_VALUE: &str = "no point of it has a value; leave the series out";

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

/// Whether lines begin with dates, years, or numbers that run up: those are times, and no labels.
fn begins_with_times(text: &str) -> bool {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let first: Vec<&str> = lines.filter_map(|line| line.split('\t').next()).map(str::trim).collect();
    match first.iter().map(|text| value(text)).collect::<Option<Vec<f64>>>() {
        Some(numbers) => {
            let are_years = numbers.iter().all(|year| year.fract() == 0.0 && (1700.0..2200.0).contains(year));
            let runs_up = |pair: &[f64]| pair[1] > pair[0] || are_years && pair[1] == pair[0];
            numbers.len() > DIFFERENT && numbers.windows(2).all(runs_up)
        }
        None => !matches!(Dates::of(&first, None), Ok(None)),
    }
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
        let years: String = (0..24).map(|n| format!("{}\t{}\t5.5\n", 1990 + n / 12, n % 12 + 1)).collect();
        let error = parse(years.as_bytes(), "tsv", "f", &Reading::default()).unwrap_err().to_string();
        assert!(error.contains("no column of times is known among `column 1`, `column 2`, `column 3`"), "{error}");
        let repeated = from_json("{\"times\": [1, 1], \"values\": [1, 2]}", 1, &Reading::default()).unwrap();
        assert!(repeated.repeats && repeated.label.is_none());
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
        let error = from_json("{\"values\": [1], \"times\": [\"2024-03-31\"]}", 1, &reading).unwrap_err();
        assert!(error.contains("this run learned from numbers"), "{error}");
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
