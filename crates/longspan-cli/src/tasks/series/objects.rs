//! Series as objects of JSON, such as `{"times": [0, 0.5], "values": [1, 2]}`.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use serde_json::Value;

use super::file::{Found, Reading, Series, dates_of, series};
use crate::run::words::nearest;
use crate::tasks::lines;
use crate::tasks::split::composed;
use crate::tasks::table::dates::Dates;
use crate::tasks::table::{is_missing, json};
use crate::terminal::samples::counted;

/// Whether the first object of JSON is a series rather than a point.
pub fn holds_series(text: &str) -> bool {
    let first = text.trim_start().trim_start_matches('[');
    let value = serde_json::Deserializer::from_str(first).into_iter::<Value>().next();
    // What is no JSON is named by the reader of series.
    !matches!(value, Some(Ok(Value::Object(object))) if object.values().all(|cell| !cell.is_array()) && !object.contains_key("text"))
}

pub fn from_lines(text: &str, name: &str, reading: &Reading<'_>) -> Result<Found> {
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
