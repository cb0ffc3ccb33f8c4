//! Which columns of a table are what: by the names that a person gave, else where the header leaves no doubt.

use std::borrow::Cow;
use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde_json::Value;

use super::dates::{Dates, epoch};
use super::{By, Form, Row, Table, contents, first_line, looks_like_name, text, value};
use crate::run::columns::Columns;
use crate::tasks::lines;
use crate::tasks::task::Asked;
use crate::terminal::notes::note;
use crate::terminal::samples::{listed, visible};
use crate::terminal::shell;

/// Names of a column of times,
const TIMES: &str = "time|date|datetime|timestamp|ds|date_time|datestamp|t|ts|epoch|unixtime|yearmonth|yyyymm|yyyymmdd";

/// of columns that are a part of a time,
const PARTS: &str = "year|yr|quarter|qtr|month|mon|month_name|week|day|hour|hr|minute|second|period|weekday|wday|dow|dayofweek|\
                     day_of_week|day_name|day_of_month|date_of_month|mday|day_of_year|dayofyear|yday|doy";

/// the parts of a day,
const CLOCK: [&[&str]; 3] = [&["hour", "hr"], &["minute"], &["second"]];

/// months as their names begin,
pub const MONTHS: [&str; 12] = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];

/// units in names of times,
const UNITS: [&str; 14] =
    ["s", "sec", "seconds", "ms", "us", "ns", "min", "minutes", "h", "hours", "d", "days", "utc", "unix"];

/// of those that say which series a row is of,
const IDS: &str = "id|unique_id|series_id|item_id|store_id|sensor_id|series|symbol|ticker|item|store|sensor|station|firm|\
                   subject|patient|participant";

/// of labels of series,
const LABELS: [&str; 2] = ["label", "class"];

/// and words in names of columns that may number rows.
const NUMBERS: [&str; 12] =
    ["row", "no", "nr", "num", "number", "idx", "index", "rec", "record", "seq", "line", "rowid"];

/// Columns and pairs of columns of numbers of which it is tried whether they say which series a row is of.
const TRIED: usize = 100;

pub const ID: By = By::Flag("--id");

/// Rows from which it is guessed what a column holds.
const SOME: usize = 200;

const SPACES: &str = "; columns have commas, semicolons, tabs or bars between them, not spaces";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roles {
    /// Columns that are one time together; none where rows are counted.
    pub time: Vec<usize>,
    pub id: Vec<usize>,
    pub label: Option<usize>,
    pub channels: Vec<usize>,
    unread: Vec<(usize, &'static str)>,
}

impl Roles {
    /// Those of a table. `labels` says whether labels are learned; `soft` whether ids and labels that are named may be missing, as in a
    /// file to predict from.
    pub fn of(table: &Table, columns: &Columns, labels: bool, soft: bool) -> Result<Self> {
        let mut unread = Vec::new();
        let by = |flag, what| if soft { By::Run(what) } else { By::Flag(flag) };
        let channel = |name: &String| table.named(name, by("--channels", "channel"));
        let channels = columns.channels.iter().map(channel).collect::<Result<Vec<_>>>()?;
        let label = match &columns.label {
            Some(name) if table.find(name).is_some() || !soft => Some(table.named(name, By::Flag("--label"))?),
            _ => only(table, &LABELS, &channels),
        };
        let mut taken: HashSet<usize> = channels.iter().copied().chain(label).collect();
        let time = match &columns.time {
            Some(name) if name == "row" && table.find(name).is_none() => Vec::new(),
            Some(names) => table.several(names, by("--time", "column of times"))?,
            None => time(table, &taken)?,
        };
        taken.extend(&time);
        let is_free = |taken: &HashSet<usize>, place: usize| !taken.contains(&place);
        // Beside times what counts rows tells nothing, but it may be all there is.
        let has_others = |taken: &HashSet<usize>, place: usize| {
            let mut others = (0..table.header.len()).filter(|other| *other != place && is_free(taken, *other));
            others.any(|other| holds_numbers(table, other) && !counts_rows(table, other, true))
        };
        let lower: Vec<String> = table.header.iter().map(|title| title.to_lowercase()).collect();
        for (place, title) in lower.iter().enumerate() {
            let why = if !is_free(&taken, place) {
                continue;
            } else if table.texts(place).all(|text| text.is_none()) && !columns.has_known(title) {
                "nothing in it"
            } else if is_index(title) && is_row_numbers(table, place)
                || counts_rows(table, place, labels)
                || !time.is_empty() && counts_rows(table, place, true) && has_others(&taken, place)
            {
                "row numbers"
            } else if columns.channels.is_empty()
                && (place == 0 || !title.is_empty())
                && is_row_name(title)
                && is_different(table, place)
            {
                "row names"
            } else if is_one(PARTS, title) && !time.is_empty() {
                "a part of the time"
            } else if columns.channels.is_empty()
                && (holds_epochs(table, place) || !time.is_empty() && has_word(title, |word| word == "decimal"))
            {
                "another time"
            } else {
                continue;
            };
            unread.push((place, why));
            taken.insert(place);
        }
        if columns.channels.is_empty()
            && let Some(place) =
                (0..table.header.len()).find(|place| is_free(&taken, *place) && lower[*place].is_empty())
        {
            bail!(
                "{}: column {} has no name; name it, or those that are read with --channels, or take the line out if it names none",
                table.at_header(),
                place + 1
            );
        }
        let id = match &columns.id {
            Some(names) if !soft || table.several(names, ID).is_ok() => table.several(names, ID)?,
            _ => {
                let is_id = |place: usize| {
                    let speaks = || speaks_of_id(&table.header[place]) && is_different(table, place);
                    is_free(&taken, place) && (is_one(IDS, &lower[place]) || speaks())
                };
                let named = (0..table.header.len()).filter(|place| is_id(*place));
                // A number for each row is no series.
                let (single, named): (Vec<usize>, Vec<usize>) =
                    named.partition(|place| table.rows.len() > 1 && is_different(table, *place));
                taken.extend(&single);
                let is_single = !single.is_empty();
                unread.extend(single.into_iter().map(|place| (place, "different in each row")));
                let first = named.iter().copied().find(|place| ["id", "unique_id"].contains(&lower[*place].as_str()));
                let named = first.map_or(named, |place| vec![place]);
                taken.extend(&named);
                // Where each row has an id, times may well come again.
                let is_open = !is_single || sharing(table, &[&named, &time]) * 2 > table.rows.len();
                let more = if is_open { guessed_id(table, &named, &time, &taken, columns)? } else { Vec::new() };
                [named, more].concat()
            }
        };
        taken.extend(&id);
        // What counts the rows of each id tells as little.
        if !time.is_empty() && !id.is_empty() && columns.channels.is_empty() {
            let pairs = neighbours(table, &id);
            let (counts, others): (Vec<usize>, Vec<usize>) = (0..table.header.len())
                .filter(|place| is_free(&taken, *place))
                .partition(|place| counts_each(table, &pairs, *place));
            if others.iter().any(|place| !counts.is_empty() && holds_numbers(table, *place)) {
                taken.extend(&counts);
                unread.extend(counts.into_iter().map(|place| (place, "row numbers")));
            }
        }
        let counts_rows = time.iter().all(|place| is_index(&lower[*place]));
        let is_open = columns.time.is_none() || columns.id.is_none();
        if is_open && counts_rows && columns.channels.is_empty() {
            let free: Vec<usize> = (0..table.header.len()).filter(|place| is_free(&taken, *place)).collect();
            if let Some(found) = repeated(table, if id.is_empty() { &free } else { &id }, &free) {
                bail!("{}: {}, or name all channels with --channels", table.at_header(), anew(table, found));
            }
        }
        if columns.id.is_none() && columns.channels.is_empty() {
            let is_open = |place: &usize| is_free(&taken, *place) && speaks_of_id(&table.header[*place]);
            if let Some(place) = (0..table.header.len()).filter(is_open).find(|place| holds_numbers(table, *place)) {
                let title = &table.header[place];
                bail!(
                    "{}: `{title}` may say which series a row is of: say so with --id {}, or name all channels with --channels",
                    table.at_header(),
                    shell::quoted(title)
                );
            }
        }
        if columns.time.is_none() && columns.id.is_none() && !time.is_empty() {
            let shared = sharing(table, &[&id, &time]);
            if shared * 2 > table.rows.len() {
                let time = plain_names(table, &time);
                bail!(
                    "{}: {shared} of {} rows share the time `{time}` with another row{}; name all columns that say which series a row \
                     is of with --id, or those of the time with --time, count rows with --time row, or keep it with --time '{time}'",
                    table.at_header(),
                    table.rows.len(),
                    if id.is_empty() { String::new() } else { format!(" of the same {}", names(table, &id, " and ")) }
                );
            }
        }
        let channels = if channels.is_empty() {
            (0..table.header.len()).filter(|place| is_free(&taken, *place)).collect()
        } else {
            unread.extend(
                (0..table.header.len()).filter(|place| is_free(&taken, *place)).map(|place| (place, "no channel")),
            );
            channels
        };
        let label = match label {
            Some(place) if !labels => {
                unread.push((place, "labels are not looked at"));
                None
            }
            found => found,
        };
        let roles = Self { time, id, label, channels, unread };
        roles.check(table)?;
        Ok(roles)
    }

    fn check(&self, table: &Table) -> Result<()> {
        if self.channels.is_empty() {
            let help = match &table.header[..] {
                [one] if one.contains(' ') => SPACES,
                _ => "; name some with --channels",
            };
            bail!(
                "{}: no column of values beside {}{help}",
                table.at_header(),
                if self.time.is_empty() { "ids and labels" } else { "times, ids and labels" }
            );
        }
        let mut used = HashSet::new();
        for place in [&self.time[..], &self.id, &self.channels].concat() {
            let title = &table.header[place];
            // Channels of categories have texts in their names, which may differ in case alone.
            let name = if title.contains('=') { title.clone() } else { title.to_lowercase() };
            if !used.insert(name) {
                bail!(
                    "{}: two columns are called `{title}`; rename one, or name those that are read with --channels",
                    table.at_header()
                );
            }
        }
        Ok(())
    }

    /// What was found, as a person would name it.
    pub fn named(&self, table: &Table, columns: &Columns) -> Columns {
        let word = |places: &[usize]| (!places.is_empty()).then(|| plain_names(table, places));
        Columns {
            time: word(&self.time).or(Some("row".into())),
            id: word(&self.id),
            channels: self.channels.iter().map(|place| table.header[*place].clone()).collect(),
            label: self.label.map(|place| table.header[place].clone()),
            ..columns.clone()
        }
    }

    pub fn introduce(&self, table: &Table, dates: Option<&Dates>) -> String {
        let names = |places: &[usize]| names(table, places, " and ");
        let time = match (self.time.is_empty(), dates) {
            (true, _) => "rows are counted as times".into(),
            (_, Some(dates)) => {
                let mut texts = (0..table.rows.len()).filter_map(|row| time_text(table, &self.time, row));
                let other =
                    texts.find_map(|text| Some(dates.text(dates.number(&text)?)).filter(|printed| *printed != text));
                let printed = other.map_or(String::new(), |printed| format!(", printed such as {printed}"));
                let (form, counted) = (&dates.format, dates.counted());
                format!("times {} (dates of the form {form}, in {counted}{printed})", names(&self.time))
            }
            _ => format!("times {} (numbers)", names(&self.time)),
        };
        let id = if self.id.is_empty() { String::new() } else { format!(", ids {}", names(&self.id)) };
        let label = self.label.map_or(String::new(), |place| format!(", labels `{}`", table.title(place)));
        const MOST: usize = 8;
        let channels: Vec<String> = self.channels.iter().map(|place| format!("`{}`", table.title(*place))).collect();
        let channels = listed(&channels, MOST);
        let unread: Vec<String> =
            self.unread.iter().map(|(place, why)| format!("`{}` ({why})", table.title(*place))).collect();
        let unread = if unread.is_empty() { String::new() } else { format!("; not read: {}", listed(&unread, MOST)) };
        format!(
            "columns: {time}{id}{label}, channels {channels}{unread}; --time, --id, --label, --channels and --dates decide otherwise"
        )
    }
}

impl Table {
    /// The places of a column, or of several with commas between them, that were named so.
    pub fn several(&self, names: &str, by: By) -> Result<Vec<usize>> {
        if let Ok(place) = self.named(names, by) {
            return Ok(vec![place]);
        }
        names.split(',').map(|name| self.named(name.trim(), by)).collect()
    }

    /// What a column holds, in words.
    pub fn held(&self, place: usize) -> String {
        let texts: Vec<String> = self.texts(place).flatten().collect();
        let missing = self.rows.len() - texts.len();
        let missing = if missing > 0 { format!(", {missing} missing") } else { String::new() };
        let known: Vec<&str> = texts.iter().map(String::as_str).collect();
        let (Some(first), Some(last)) = (known.first(), known.last()) else { return "nothing".into() };
        if self.rows.iter().any(|row| row.cells[place].is_array()) {
            return format!("lists{missing}");
        }
        if let Ok(Some(dates)) = Dates::of(&known, None) {
            return format!("dates of the form {}: {first} … {last}{missing}", dates.format);
        }
        if let Ok(numbers) = self.numbers(place) {
            let numbers = || numbers.iter().copied().filter(|number| !number.is_nan());
            let (low, high) = (numbers().fold(f64::INFINITY, f64::min), numbers().fold(f64::NEG_INFINITY, f64::max));
            let is_worded = first.contains(char::is_alphabetic);
            let written = if is_worded { format!(", such as {first:?}") } else { String::new() };
            return format!("numbers from {low} to {high}{written}{missing}");
        }
        let different: HashSet<&str> = known.iter().copied().collect();
        let short = |text: &str| visible(text).chars().take(40).collect::<String>();
        format!("texts, {} different, such as {:?}{missing}", different.len(), short(first))
    }
}

/// The one free column with one of these names.
fn only(table: &Table, names: &[&str], taken: &[usize]) -> Option<usize> {
    let is = |place: &usize| !taken.contains(place) && names.contains(&table.header[*place].to_lowercase().as_str());
    let mut found = (0..table.header.len()).filter(is);
    found.next().filter(|_| found.next().is_none())
}

fn some(table: &Table, place: usize) -> Vec<String> {
    table.texts(place).flatten().take(SOME).collect()
}

/// Whether a column holds dates that are no numbers.
pub fn holds_dates(table: &Table, place: usize) -> bool {
    let texts = some(table, place);
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    // In doubt about the day and the month they are dates.
    texts.iter().any(|text| text.parse::<f64>().is_err()) && !matches!(Dates::of(&texts, None), Ok(None))
}

/// Whether a column holds times of the day.
fn holds_clocks(table: &Table, place: usize) -> bool {
    let texts = some(table, place);
    !texts.is_empty() && texts.iter().all(|text| text.contains(':') && text.len() <= 12)
}

fn holds_numbers(table: &Table, place: usize) -> bool {
    table.numbers(place).is_ok()
}

/// Whether a column holds numbers, as parts of times are, or months or quarters by their names.
fn holds_parts(table: &Table, place: usize) -> bool {
    let is_named = |text: &String| {
        let text = text.to_lowercase();
        let month = MONTHS.iter().any(|month| text.starts_with(month)) && text.chars().all(char::is_alphabetic);
        month || text.strip_prefix('q').is_some_and(|number| ["1", "2", "3", "4"].contains(&number))
    };
    holds_numbers(table, place) || some(table, place).iter().all(is_named)
}

fn is_one(names: &str, title: &str) -> bool {
    names.split('|').any(|name| name == title)
}

/// Whether a name is that of numbers of things: `device_id`, `TrackID` or `tripid`.
fn speaks_of_id(title: &str) -> bool {
    let lower = title.to_lowercase();
    let is_camel =
        title.strip_suffix("ID").or(title.strip_suffix("Id")).is_some_and(|of| of.ends_with(char::is_lowercase));
    let is_of_thing =
        |of: &str| of.ends_with([' ', '_', '.', '-']) || is_one("track|trip|user|device|vehicle|traj", of);
    is_camel || lower.strip_suffix("id").is_some_and(is_of_thing)
}

/// Whether a name has one of some words, in small letters.
fn has_word(title: &str, is_wanted: impl Fn(&str) -> bool) -> bool {
    title.to_lowercase().split(|c: char| !c.is_alphanumeric()).any(is_wanted)
}

/// Whether a column holds whole numbers that count since 1970, and its name has the word of a time.
fn holds_epochs(table: &Table, place: usize) -> bool {
    let is_named = has_word(&table.header[place], |word| is_one(TIMES, word));
    is_named && table.numbers(place).is_ok_and(|all| epoch(all.into_iter().filter(|number| !number.is_nan())).is_some())
}

/// Whether a column that is called a date holds numbers from those of 1970 to those of 2100 as spreadsheets count days, and parts of them.
pub fn counts_excel_days(table: &Table, place: usize) -> bool {
    let is_day = |number: &f64| (25_569.0..73_051.0).contains(number);
    has_word(&table.header[place], |word| ["date", "datetime", "datum", "day"].contains(&word))
        && table.rows.len() > 2
        && table.numbers(place).is_ok_and(|all| all.iter().all(is_day))
}

/// Whether a name in small letters is that of a time and its unit, such as `time (s)` or `timestamp_ms`.
fn is_measured_time(title: &str) -> bool {
    let mut words = title.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.next().is_some_and(|word| is_one(TIMES, word))
        && words.next().is_some_and(|word| UNITS.contains(&word))
        && words.next().is_none()
}

/// Whether a name is a number or a date, as those of the columns of a wide table are.
pub fn is_time(title: &str) -> bool {
    value(title).is_some_and(f64::is_finite)
        || title.contains(|c: char| c.is_ascii_digit()) && !matches!(Dates::of(&[title], None), Ok(None))
}

/// Whether a name in small letters is that under which pandas and R write the names of rows.
fn is_row_name(title: &str) -> bool {
    ["", "row", "rownames", "row.names", "row_names"].contains(&title) || title.starts_with("unnamed:")
}

/// Whether a name in small letters is that of numbers of rows.
fn is_index(title: &str) -> bool {
    ["index", "obs", "observation", "column 1"].contains(&title) || is_row_name(title)
}

fn is_row_numbers(table: &Table, place: usize) -> bool {
    let Ok(numbers) = table.numbers(place) else { return false };
    numbers.iter().all(|number| number.fract() == 0.0) && numbers.windows(2).all(|pair| pair[1] > pair[0])
}

/// Whether they count up by one, from row to row, and the name says so; or `whatever` the name, such as where they would tell labels by which
/// the rows are sorted.
pub fn counts_rows(table: &Table, place: usize, whatever: bool) -> bool {
    let title = &table.header[place];
    let named = has_word(title, |word| NUMBERS.contains(&word));
    let steps = |all: Vec<f64>| all.windows(2).all(|pair| pair[1] - pair[0] == 1.0);
    // Two rows tell most columns, before all are read.
    let two: Vec<f64> = table.rows.iter().take(2).filter_map(|row| sure_number(&row.cells[place])).collect();
    (named || whatever && table.rows.len() >= 10)
        && table.rows.len() > 2
        && (two.len() < 2 || steps(two))
        && table.numbers(place).is_ok_and(steps)
}

/// The number of a cell, where it is the same however its column is written: no point has three digits behind it, as one between thousands has.
fn sure_number(cell: &Value) -> Option<f64> {
    let text = text(cell)?;
    text.split_once('.').is_none_or(|(_, digits)| digits.len() != 3).then(|| text.parse().ok())?
}

/// Each two rows, one after the other, that have the same in the columns of ids.
fn neighbours(table: &Table, id: &[usize]) -> Vec<[usize; 2]> {
    let (mut last, mut pairs) = (HashMap::new(), Vec::new());
    for (n, row) in table.rows.iter().enumerate() {
        let key: Vec<Option<Cow<'_, str>>> = id.iter().map(|place| text(&row.cells[*place])).collect();
        pairs.extend(last.insert(key, n).map(|before| [before, n]));
    }
    pairs
}

/// Whether they count up by one from each of these rows to the next.
fn counts_each(table: &Table, pairs: &[[usize; 2]], place: usize) -> bool {
    let is_step = |[before, after]: [f64; 2]| after - before == 1.0;
    let sure = pairs.first().map(|pair| pair.map(|n| sure_number(&table.rows[n].cells[place])));
    // Two rows tell most columns, before all are read.
    let may_be = if let Some([Some(before), Some(after)]) = sure { is_step([before, after]) } else { true };
    let steps = |all: Vec<f64>| pairs.iter().all(|pair| is_step(pair.map(|n| all[n])));
    may_be && pairs.len() >= 10 && table.numbers(place).is_ok_and(steps)
}

/// The one column whose name says that it tells series apart.
pub fn named_id(table: &Table) -> Option<usize> {
    only(table, &IDS.split('|').collect::<Vec<_>>(), &[])
}

pub fn is_different(table: &Table, place: usize) -> bool {
    counts(table, &[&[place]]).len() == table.rows.len()
}

fn time(table: &Table, taken: &HashSet<usize>) -> Result<Vec<usize>> {
    let has_values = |place: &usize| table.rows.is_empty() || table.texts(*place).any(|text| text.is_some());
    let free: Vec<usize> =
        (0..table.header.len()).filter(|place| !taken.contains(place) && has_values(place)).collect();
    let lower = |place: usize| table.header[place].to_lowercase();
    let asked = |found: &[usize]| {
        anyhow!("{}: {} may all be times; say which with --time", table.at_header(), names(table, found, ", "))
    };
    let part = |names: &[&str]| {
        free.iter().copied().find(|place| names.contains(&lower(*place).as_str()) && holds_parts(table, *place))
    };
    // A day, whose hours stand in columns of their own, whatever a column of times that come again on other days is called.
    let with_hours = |day: usize| {
        if is_different(table, day) || some(table, day).iter().any(|text| text.contains(':')) {
            return vec![day];
        }
        let hours: Vec<usize> = CLOCK.into_iter().map_while(part).collect();
        let is_clock =
            |place: &usize| holds_dates(table, day) && holds_clocks(table, *place) && is_repeated(table, &[*place]);
        let clock = free.iter().copied().find(|place| hours.is_empty() && is_clock(place));
        std::iter::once(day).chain(hours).chain(clock).collect()
    };
    let is_named = |place: &usize| is_one(TIMES, &lower(*place)) || is_measured_time(&lower(*place));
    let mut strong: Vec<usize> = free.iter().copied().filter(is_named).collect();
    // Dates and the same times as counts, or, where dates differ, the number of the row.
    let dates: Vec<usize> = strong.iter().copied().filter(|place| holds_dates(table, *place)).collect();
    let differ = dates.iter().any(|place| is_different(table, *place));
    strong.retain(|place| {
        dates.is_empty() || !(holds_epochs(table, *place) || differ && counts_rows(table, *place, true))
    });
    match strong[..] {
        [one] => {
            // Numbers that do not run on, beside a year or a day that does: a duration, or the time of a day.
            let runs =
                |place: usize| table.numbers(place).is_ok_and(|all| all.is_sorted() || all.iter().rev().is_sorted());
            let whole = |place: &usize| {
                ["year", "yr", "month", "day"].contains(&lower(*place).as_str())
                    && counts(table, &[&[*place]]).len() > 1
                    && runs(*place)
            };
            if let Some(other) = free.iter().copied().find(whole).filter(|_| holds_numbers(table, one) && !runs(one)) {
                return Err(asked(&[one, other]));
            }
            return Ok(with_hours(one));
        }
        [a, b] => {
            // A day and a time of the day.
            for (day, time) in [(a, b), (b, a)] {
                if holds_dates(table, day) && holds_clocks(table, time) {
                    return Ok(vec![day, time]);
                }
            }
            return Err(asked(&strong));
        }
        [] => {}
        _ => return Err(asked(&strong)),
    }
    let speaks_of_time =
        |place: usize| has_word(&table.header[place], |word| is_one(TIMES, word) || is_one(PARTS, word));
    let is_dated = |place: &usize| speaks_of_time(*place) && holds_dates(table, *place);
    let mut dated: Vec<usize> = free.iter().copied().filter(is_dated).collect();
    if dated.is_empty() {
        let counts_days = |place: &usize| holds_epochs(table, *place) || counts_excel_days(table, *place);
        dated = free.iter().copied().filter(counts_days).collect();
    }
    match dated[..] {
        [one] => return Ok(with_hours(one)),
        [] => {}
        _ => return Err(asked(&dated)),
    }
    // From the year to the second, as far as there are columns without a gap.
    if let Some(year) = part(&["year"]) {
        if let (Some(of_year), None) = (part(&["quarter", "qtr"]).or(part(&["week"])), part(&["month"])) {
            return Ok(vec![year, of_year]);
        }
        let parts = [&["month"][..], &["day", "day_of_month", "date_of_month", "mday"]]
            .into_iter()
            .chain(CLOCK)
            .map_while(part);
        return Ok(std::iter::once(year).chain(parts).collect());
    }
    let numbered = |names: &[&str]| {
        let found = only(table, names, &taken.iter().copied().collect::<Vec<_>>())?;
        let numbers = table.numbers(found).ok()?;
        (numbers.is_sorted() || numbers.iter().all(|number| number.fract() == 0.0)).then_some(found)
    };
    if let Some(one) = numbered(&["month", "week", "day", "hour", "period", "step"]) {
        return Ok(vec![one]);
    }
    let all: Vec<usize> = free.iter().copied().filter(|place| holds_dates(table, *place)).collect();
    if let [one] = all[..] {
        return Ok(with_hours(one));
    }
    // What speaks of time in another way and rises from each row of a series to the next.
    let pairs = LazyCell::new(|| neighbours(table, &named_id(table).into_iter().collect::<Vec<_>>()));
    let rises = |place: usize| {
        let title = lower(place);
        let is_named = title.strip_suffix('s').is_some_and(|one| is_one(TIMES, one) || is_one(PARTS, one));
        let is_right = |all: Vec<f64>| {
            (is_named || all.iter().all(|year| (1000.0..3000.0).contains(year)))
                && pairs.len() > 1
                && pairs.iter().all(|[before, after]| all[*after] > all[*before])
        };
        (is_named || title.contains("year")) && table.numbers(place).is_ok_and(is_right)
    };
    let rising: Vec<usize> = free.iter().copied().filter(|place| rises(*place)).collect();
    match rising[..] {
        [one] => return Ok(vec![one]),
        [] => {}
        _ => return Err(asked(&rising)),
    }
    // What may be the time is not passed over for the number of the row.
    let is_strange = |place: usize| {
        free.len() > 1 && speaks_of_time(place) && is_different(table, place) && !holds_dates(table, place)
    };
    for place in free.iter().copied().filter(|place| is_strange(*place)) {
        if let Err(row) = table.numbers(place) {
            return Err(no_time(table, &[place], row, &text(&row.cells[place]).unwrap_or_default()));
        }
    }
    if let Some(one) = free.iter().copied().find(|place| is_index(&lower(*place)) && is_row_numbers(table, *place)) {
        return Ok(vec![one]);
    }
    let texts = table.rows.is_empty() || !free.iter().any(|place| holds_numbers(table, *place));
    let times = free.iter().filter(|place| is_time(&table.header[**place])).count();
    let help = match &table.header[..] {
        [one] if one.contains(' ') => SPACES,
        all if 2 * times > all.len() => "; if a row is a whole series, and a column a time, give --wide",
        all if all.iter().any(String::is_empty) => "; if this line does not name the columns, take it out",
        _ if texts => "; labelled texts are learned with --labelled",
        _ => &repeated(table, &free, &free).map_or_else(
            || "; rows that are examples of their own, and no points in time, are not learned from".into(),
            |found| format!("; {}", anew(table, found)),
        ),
    };
    bail!(
        "{}: no column of times is known among {}; name it with --time NAME, or count the rows with --time row{help}",
        table.at_header(),
        table.titles()
    )
}

/// Says that a text is no time.
pub fn no_time(table: &Table, places: &[usize], row: &Row, text: &str) -> anyhow::Error {
    let titles = plain_names(table, places);
    let help = if text.contains(':') && text.len() <= 12 {
        "put the day before a time of the day, write a duration as a number, or count the rows with --time row"
    } else if !text.contains(|c: char| c.is_ascii_digit()) {
        "take out a row of sums or words, or name the column of times with --time"
    } else {
        "say how dates are written, such as --dates %d.%m.%Y"
    };
    row.wrong(
        &table.name,
        format_args!("{text:?} in the column `{titles}` is neither a number nor a date that is known; {help}"),
    )
}

/// The text of a time that several columns are together.
pub fn time_text(table: &Table, places: &[usize], row: usize) -> Option<String> {
    let cell = |place: &usize| text(&table.rows[row].cells[*place]).map(Cow::into_owned);
    let cells: Vec<String> = places.iter().map(cell).collect::<Option<_>>()?;
    let is = |n: usize, names: &[&str]| {
        places.get(n).is_some_and(|place| names.contains(&table.header[*place].to_lowercase().as_str()))
    };
    // Whole numbers may be written as 7.0, beside missing ones.
    let two = |part: &String| format!("{:0>2}", part.strip_suffix(".0").unwrap_or(part));
    let clock = |parts: &[String]| match parts {
        [hour] => format!("{}:00", two(hour)),
        _ => parts.iter().map(two).collect::<Vec<_>>().join(":"),
    };
    let year = cells.first().map(|year| year.strip_suffix(".0").unwrap_or(year)).filter(|_| is(0, &["year"]));
    Some(match (year, &cells[..]) {
        (Some(year), [_, quarter]) if is(1, &["quarter", "qtr"]) => {
            format!("{year} Q{}", two(quarter).trim_start_matches(['0', 'Q', 'q']))
        }
        (Some(year), [_, week]) if is(1, &["week"]) => format!("{year}-W{}", two(week)),
        (Some(year), [_, month]) => format!("{year}-{}", two(month)),
        (Some(year), [_, month, day]) => format!("{year}-{}-{}", two(month), two(day)),
        (Some(year), [_, month, day, rest @ ..]) => format!("{year}-{}-{} {}", two(month), two(day), clock(rest)),
        (None, [day, rest @ ..]) if is(1, CLOCK[0]) => format!("{day} {}", clock(rest)),
        _ => cells.join(" "),
    })
}

/// Columns of texts, and of numbers whose names end as those of ids, that say beside those that are `named` which series a row is of, where
/// times come again otherwise.
fn guessed_id(
    table: &Table,
    named: &[usize],
    time: &[usize],
    taken: &HashSet<usize>,
    columns: &Columns,
) -> Result<Vec<usize>> {
    if time.is_empty() || !columns.channels.is_empty() && columns.channels.len() + time.len() == table.header.len() {
        return Ok(Vec::new());
    }
    // Once or twice a year an hour comes twice.
    let shared = sharing(table, &[named, time]);
    if shared * 10 < table.rows.len() || shared == 0 {
        return Ok(Vec::new());
    }
    let apart = |places: &[usize]| sharing(table, &[named, places, time]) == 0;
    let free = (0..table.header.len()).filter(|place| !taken.contains(place));
    let is_id = |place: usize| table.header[place].to_lowercase().ends_with("_id");
    let (numbers, mut texts): (Vec<usize>, Vec<usize>) =
        free.partition(|place| holds_numbers(table, *place) && !is_id(*place));
    texts.retain(|place| is_repeated(table, &[*place]));
    let found: Vec<usize> = texts.iter().copied().filter(|place| apart(&[*place])).collect();
    match found[..] {
        [one] => return Ok(vec![one]),
        [] => {}
        _ => bail!(
            "{}: rows share times, and {} may say which series each is of; say which with --id",
            table.at_header(),
            names(table, &found, ", ")
        ),
    }
    // Texts that only together tell rows apart, without those that are not needed for it.
    if is_repeated(table, &texts) && apart(&texts) {
        for place in texts.clone().into_iter().rev() {
            let others: Vec<usize> = texts.iter().copied().filter(|other| *other != place).collect();
            if apart(&others) {
                texts = others;
            }
        }
        return Ok(texts);
    }
    let whole = |place: &usize| table.numbers(*place).is_ok_and(|all| all.iter().all(|number| number.fract() == 0.0));
    // Series are there at most times; measures that tell rows apart by chance are not.
    let times = counts(table, &[time]).len();
    let lasts = |places: &[usize]| counts(table, &[places]).len() * times <= 2 * table.rows.len();
    let tells_apart = |places: &Vec<usize>| {
        let all = [named, places].concat();
        is_repeated(table, &all) && lasts(&all) && apart(places)
    };
    let numbers: Vec<usize> = numbers.into_iter().filter(whole).filter(|place| is_repeated(table, &[*place])).collect();
    let all = [&texts[..], &numbers].concat();
    let pairs = all.iter().enumerate().flat_map(|(n, a)| all[..n].iter().map(|b| vec![*b, *a]));
    let most = shared * 2 > table.rows.len();
    let singles = numbers.iter().map(|place| vec![*place]).filter(|_| most || named.is_empty());
    let found = singles.chain(pairs.filter(|_| most)).take(TRIED).find(tells_apart);
    if let (Some(found), true) = (found, columns.channels.is_empty()) {
        bail!(
            "{}: rows share times, and {} may say which series each is of: say so with --id {}, or name all channels with --channels",
            table.at_header(),
            names(table, &found, " and "),
            shell::quoted(&plain_names(table, &[named, &found].concat()))
        );
    }
    Ok(Vec::new())
}

/// Of repeated measures, whose rows stand together by subject, the column of subjects and one of numbers that runs up anew in each.
fn repeated(table: &Table, subjects: &[usize], free: &[usize]) -> Option<(usize, usize)> {
    let subjects = subjects.iter().copied().filter(|place| !is_one(PARTS, &table.header[*place].to_lowercase()));
    subjects.filter(|place| is_repeated(table, &[*place])).find_map(|subject| {
        let texts: Vec<Option<String>> = table.texts(subject).collect();
        let starts: Vec<bool> = texts.windows(2).map(|pair| pair[0] != pair[1]).collect();
        let blocks = 1 + starts.iter().filter(|start| **start).count();
        if blocks < 2 || counts(table, &[&[subject]]).len() != blocks {
            return None;
        }
        let runs_anew = |place: &usize| {
            let runs = |all: Vec<f64>| all.windows(2).zip(&starts).all(|(pair, start)| (pair[1] > pair[0]) != *start);
            *place != subject && table.numbers(*place).is_ok_and(runs)
        };
        let times = free.iter().copied().filter(runs_anew).min_by_key(|place| counts(table, &[&[*place]]).len())?;
        Some((subject, times))
    })
}

fn anew(table: &Table, (subject, times): (usize, usize)) -> String {
    let [subject, times] = [subject, times].map(|place| &table.header[place]);
    let flags = [subject, times].map(|title| shell::quoted(title));
    format!(
        "`{times}` runs up anew for each `{subject}`: if each is a series, give --id {} --time {}",
        flags[0], flags[1]
    )
}

/// Whether what these columns have together comes twice and more, in the mean.
fn is_repeated(table: &Table, places: &[usize]) -> bool {
    counts(table, &[places]).len() * 2 <= table.rows.len()
}

/// How many rows have the same in all of these columns, for the hash of each that one has.
fn counts(table: &Table, places: &[&[usize]]) -> HashMap<u64, usize> {
    let mut counts = HashMap::new();
    for row in &table.rows {
        let mut key = DefaultHasher::new();
        places.iter().copied().flatten().for_each(|place| text(&row.cells[*place]).hash(&mut key));
        *counts.entry(key.finish()).or_default() += 1;
    }
    counts
}

/// How many rows have the same in all of these columns as another row.
fn sharing(table: &Table, places: &[&[usize]]) -> usize {
    counts(table, places).into_values().filter(|count| *count > 1).sum()
}

pub fn names(table: &Table, places: &[usize], between: &str) -> String {
    places.iter().map(|place| format!("`{}`", table.title(*place))).collect::<Vec<_>>().join(between)
}

/// As a person gives several to a flag.
pub fn plain_names(table: &Table, places: &[usize]) -> String {
    places.iter().map(|place| table.header[*place].as_str()).collect::<Vec<_>>().join(",")
}

/// Says which of more columns than these are read.
pub fn say_read(table: &Table, read: [(&TextColumn, usize); 2]) {
    let unread: Vec<usize> =
        (0..table.header.len()).filter(|place| read.iter().all(|(_, used)| used != place)).collect();
    if !unread.is_empty() {
        let found = read.map(|(column, place)| format!("{} `{}`", column.key, table.title(place))).join(", ");
        let [a, b] = read.map(|(column, _)| column.flag);
        note(format_args!(
            "{}: columns: {found}; not read: {}; {a} and {b} decide otherwise",
            table.name,
            names(table, &unread, ", ")
        ));
    }
}

/// A column of texts: its name on the command line, and names that it often has.
pub struct TextColumn {
    pub key: &'static str,
    pub flag: &'static str,
    pub names: &'static [&'static str],
}

impl TextColumn {
    /// Whether a column with this name would be taken for it.
    pub fn knows(&self, title: &str) -> bool {
        let title = title.to_lowercase();
        title == self.key || self.names.contains(&title.as_str())
    }

    /// Whether it is the column of this name, or that a person named.
    fn is(&self, title: &str, wanted: Option<&String>) -> bool {
        title.to_lowercase() == wanted.map_or(self.key.into(), |name| name.to_lowercase())
    }

    /// The texts of a file that is a table by its name or its first line, each with its line; `None` of any other file, whose lines are
    /// texts. Of tabs without names the first column.
    pub fn asked(&self, path: &Path, wanted: Option<&String>) -> Result<Option<Vec<Asked>>> {
        let (ending, name) = (lines::ending(path), lines::name(path));
        if !["csv", "tsv", "json", "jsonl", "ndjson"].contains(&ending.as_str()) {
            let line = lines::first_line(path)?;
            let found = match self.title_in(&line, wanted) {
                Some(title) => format!("a table, of which the column `{title}`"),
                // Objects over several lines.
                None if ["[", "{", "[{"].contains(&line.trim()) => {
                    format!("JSON, of which the column `{}`", wanted.map_or(self.key, String::as_str))
                }
                None if line.contains('\t') => {
                    let which = wanted.map_or("the first".into(), |name| format!("`{name}`"));
                    format!("columns with tabs between them, of which {which}")
                }
                None => return Ok(None),
            };
            note(format_args!("{name}: read as {found} is predicted for"));
        }
        let (_, bytes) = contents(path)?;
        let text = lines::text(&bytes, &name)?;
        let form = Form::of(&ending, &text);
        let titles: Vec<&str> = first_line(&text).split('\t').map(str::trim).collect();
        let is_header = titles.len() > 1 && titles.iter().all(|title| looks_like_name(title));
        // In the first column a text may be such a word, too.
        let known = titles.iter().skip(1).find(|title| is_header && self.knows(title));
        // One known name is a header: what is beside it may have any.
        let named = form != Form::Tabs || titles.iter().any(|title| self.is(title, wanted) || self.is(title, None));
        if let (Some(title), false) = (known, named) {
            let flag = self.flag;
            note(format_args!(
                "{name}: the first line names the columns, and `{title}` is predicted for; {flag} decides otherwise"
            ));
        }
        let table = if form == Form::Tabs && (named || known.is_some()) {
            Table::read(&text, form, &name)?
        } else {
            Table::of_texts(&text, form, &name, &[self], &Columns { text: wanted.cloned(), ..Columns::default() })?
        };
        let Some(table) = table else { return Ok(Some(Vec::new())) };
        let place = if table.header.is_empty() { 0 } else { self.place(&table, wanted, None)? };
        let asked = |row: &Row| match &row.cells[place] {
            Value::String(text) => Ok(Asked { line: row.line, text: text.clone(), series: None }),
            other => Err(row.wrong(&name, format_args!("`{}` is {other}, not a text", table.header[place]))),
        };
        table.rows.iter().map(asked).collect::<Result<_>>().map(Some)
    }

    /// What the column is called in the first line of a table of several columns; `None` if the line is no header, nor an object.
    fn title_in(&self, line: &str, wanted: Option<&String>) -> Option<String> {
        let form = Form::of("", line);
        let titles: Vec<String> = if form == Form::Json {
            let object: Value =
                serde_json::from_str(line.trim_start_matches('[').trim_end().trim_end_matches([',', ']'])).ok()?;
            object.as_object()?.keys().cloned().collect()
        } else {
            Table::read(line, form, "").ok()??.header
        };
        let find = |wanted| titles.iter().find(|title| self.is(title, wanted));
        find(wanted).or(find(None)).filter(|_| form == Form::Json || titles.len() > 1).cloned()
    }

    /// What a run calls the column in other files: as a person named it, or as the file does, where that is not its usual name.
    pub fn named(&self, table: &Table, place: usize, wanted: &Option<String>) -> Option<String> {
        let title = Some(&table.header[place]).filter(|title| *title != self.key);
        wanted.as_ref().or(title).cloned()
    }

    pub fn place(&self, table: &Table, wanted: Option<&String>, other: Option<usize>) -> Result<usize> {
        if let Some(name) = wanted {
            // One of its usual names was found in training, perhaps, and this file has another.
            if self.knows(name) && table.find(name).is_none() {
                let place = self.place(table, None, other)?;
                note(format_args!("{}: no column `{name}`, so `{}` is read", table.name, table.header[place]));
                return Ok(place);
            }
            return table.named(name, By::Flag(self.flag));
        }
        if let Some(place) = table.find(self.key) {
            return table.named(&table.header[place], By::Flag(self.flag));
        }
        let known: Vec<usize> = (0..table.header.len())
            .filter(|place| Some(*place) != other && self.knows(&table.header[*place]))
            .collect();
        if let [one] = known[..] {
            return Ok(one);
        }
        // Of two columns the other one.
        if let (Some(other), 2) = (other, table.header.len()) {
            return Ok(1 - other);
        }
        let (flag, key, titles) = (self.flag, self.key, table.titles());
        let help = if table.keys { "" } else { &format!(", or with {flag} 'column 1' if the first line is a row") };
        bail!("{}: no column `{key}` among {titles}; name it with {flag} NAME{help}", table.at_header())
    }
}
