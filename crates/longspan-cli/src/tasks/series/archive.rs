//! The files of the UCR and UEA archives: `.tsv`, a label and a value a step in each line, and `.ts`, whose header says what is in it.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::file::{Point, Series, series, value};
use crate::tasks::lines;

/// A series from a line of a `.tsv`: the label, then values at the times 0, 1, 2, …. Missing ones at the end are padding.
pub fn from_columns(text: &str, line: usize) -> Result<Series, String> {
    let mut columns = text.split('\t');
    let label = columns.next().unwrap_or_default().trim().to_owned();
    let values = columns
        .map(|text| number(text, "labelled texts are learned with --labelled"))
        .collect::<Result<Vec<_>, _>>()?;
    if values.is_empty() {
        return Err("one column, expected a label and values, with tabs between them".into());
    }
    series(counted(values), (!label.is_empty()).then_some(label), line)
}

fn number(text: &str, help: &str) -> Result<f64, String> {
    value(text).ok_or_else(|| format!("{text:?} is no number; {help}"))
}

fn counted(values: Vec<f64>) -> Vec<Point> {
    values.into_iter().enumerate().map(|(n, value)| (n as f64, vec![value])).collect()
}

/// Series from a `.ts`: lines that begin with `@` say what is in it, those after `@data` are series.
pub fn read(bytes: &[u8], name: &str) -> Result<Vec<Series>> {
    let (mut timed, mut labelled, mut begun) = (false, None, false);
    let all = lines::each(bytes, name, |text, line| {
        let text = text.trim();
        if text.is_empty() || text.starts_with('#') {
            return Ok(None);
        }
        if let Some(words) = text.strip_prefix('@') {
            let words = words.to_lowercase();
            let mut words = words.split_whitespace();
            let (key, holds) = (words.next().unwrap_or_default(), words.next() == Some("true"));
            match key {
                "timestamps" => timed = holds,
                "classlabel" | "targetlabel" => labelled = Some(labelled == Some(true) || holds),
                "data" => begun = true,
                _ => {}
            }
            return Ok(None);
        }
        if !begun {
            return Err("a series before the line @data; put the lines that begin with @ first".into());
        }
        // Of a file that does not say, the last field is a label where it is no list of numbers.
        from_line(text, timed, labelled.unwrap_or(true), line).map(Some)
    })?;
    if !begun {
        bail!("{name}: no line @data; give a .ts file of the UEA or UCR archive");
    }
    Ok(all)
}

/// Channels with colons between them, then the label.
fn from_line(text: &str, timed: bool, labelled: bool, line: usize) -> Result<Series, String> {
    let mut channels: Vec<&str> = text.split(':').collect();
    let label = if labelled && channels.len() > 1 { channels.pop().map(|label| label.trim().to_owned()) } else { None };
    // By the bits of the time, which sort as times do from 0 on, and serve to find equal ones below.
    let mut rows: BTreeMap<Time, Vec<f64>> = BTreeMap::new();
    let width = channels.len();
    for (channel, text) in channels.into_iter().enumerate() {
        let points = if timed { timed_points(text)? } else { plain_points(text)? };
        for (time, value) in points {
            rows.entry(Time(time)).or_insert_with(|| vec![f64::NAN; width])[channel] = value;
        }
    }
    series(rows.into_iter().map(|(Time(time), values)| (time, values)).collect(), label, line)
}

/// A time as a key.
#[derive(PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

fn plain_points(text: &str) -> Result<Vec<(f64, f64)>, String> {
    let values = text.split(',').map(|text| number(text, "write ? for a missing value"));
    values.enumerate().map(|(n, value)| Ok((n as f64, value?))).collect()
}

/// `(time,value),(time,value)`, with numbers for times.
fn timed_points(text: &str) -> Result<Vec<(f64, f64)>, String> {
    let points = text.trim().split("),").map(|point| {
        let inner = point.trim().trim_start_matches('(').trim_end_matches(')');
        let wrong = || format!("\"({inner})\" is no point such as (0.5,1.25); write times as numbers, not as dates");
        let (time, text) = inner.split_once(',').ok_or_else(wrong)?;
        let time = time.trim().parse().map_err(|_| wrong())?;
        Ok((time, value(text).ok_or_else(wrong)?))
    });
    points.collect()
}
