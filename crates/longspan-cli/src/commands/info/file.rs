//! What a file of data holds: its columns, and how each task would read it.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::run::columns::Columns;
use crate::tasks::lines;
use crate::tasks::series::file::{self as series, Found, Reading};
use crate::tasks::series::unusual::say_unusual;
use crate::tasks::table::{Form, Table, contents};
use crate::tasks::{labelled, pairs};
use crate::terminal::samples::counted;

/// Columns that are listed at most.
const SHOWN: usize = 100;

pub fn run(path: &Path, columns: &Columns, as_json: bool) -> Result<()> {
    let (name, bytes) = contents(path)?;
    let ending = lines::ending(path);
    let text = lines::text(&bytes, &name)?;
    let form = Form::of(&ending, &text);
    let is_table = !["ts", "tsf", "arff"].contains(&ending.as_str()) && !text.trim_start().starts_with('@');
    // Tabs may have no header.
    let table = if is_table && form != Form::Tabs {
        Table::read(&text, form, &name).ok().flatten().map(|table| table.headed(columns).0.without_units().0)
    } else {
        None
    };
    let all: Vec<(String, String)> = table
        .iter()
        .flat_map(|table| (0..table.header.len()).map(move |place| (table.title(place), table.held(place))))
        .collect();
    // Not kept beside those that are read next: a table may be large.
    let rows = table.map(|table| table.rows.len());
    let series = |labels| {
        series::parse(&bytes, &ending, &name, &Reading { columns: Some(columns), labels, ..Reading::default() })
    };
    // What has no labels, or none that can be read, is still to forecast.
    let forecast = series(false);
    let titled = columns.label.is_some()
        || all.iter().any(|(title, _)| ["label", "class"].contains(&title.to_lowercase().as_str()));
    let has_labels = titled || forecast.as_ref().is_ok_and(|found| found.series.iter().any(|one| one.label.is_some()));
    let (labelled, forecast) = if has_labels { (series(true), Some(forecast)) } else { (forecast, None) };
    if let Some(found) = labelled.as_ref().ok().or(forecast.as_ref().and_then(|found| found.as_ref().ok())) {
        say_unusual(&name, &found.series);
    }
    let forecast = forecast.filter(|found| labelled.is_err() && found.is_ok());
    let said = |found: Result<String>| {
        let error = |error: anyhow::Error| {
            format!("no: {}", error.to_string().trim_start_matches(&name).trim_start_matches([',', ':', ' ']))
        };
        found.unwrap_or_else(error)
    };
    let texts = || {
        let (all, ..) = labelled::file::parse(&bytes, &ending, &name, columns)?;
        let labels: BTreeSet<&str> = all.iter().map(|one| one.label.as_str()).collect();
        Ok(format!("{} with {}", counted(all.len(), "texts"), counted(labels.len(), "labels")))
    };
    let pairs = || Ok(counted(pairs::file::parse(&bytes, &ending, &name, columns)?.0.len(), "pairs"));
    let tasks = [
        ("--series", Some(labelled.map(|found| in_words(&found)))),
        ("--forecast", forecast.map(|found| found.map(|found| in_words(&found)))),
        ("--labelled", Some(texts())),
        ("--pairs", Some(pairs())),
    ];
    let tasks = tasks.into_iter().filter_map(|(flag, found)| Some((flag, said(found?))));
    let mut out = std::io::stdout().lock();
    if as_json {
        let columns: Vec<Value> = all.iter().map(|(title, holds)| json!({ "name": title, "holds": holds })).collect();
        let tasks: serde_json::Map<String, Value> =
            tasks.map(|(flag, said)| (flag.trim_start_matches('-').to_string(), json!(said))).collect();
        writeln!(out, "{}", json!({ "file": name, "rows": rows, "columns": columns, "tasks": tasks }))?;
        return Ok(());
    }
    writeln!(out, "file        {name}")?;
    if let Some(rows) = rows {
        let (rows, columns) = (counted(rows, "rows"), counted(all.len(), "columns"));
        writeln!(out, "table       {rows}, {columns}")?;
        let width = all.iter().map(|(title, _)| title.chars().count()).max().unwrap_or(0).min(24);
        for (title, holds) in all.iter().take(SHOWN) {
            writeln!(out, "  {title:<width$}  {holds}")?;
        }
        if all.len() > SHOWN {
            writeln!(out, "  and {} more; --json lists all", all.len() - SHOWN)?;
        }
    }
    for (flag, said) in tasks {
        writeln!(out, "{flag:<11} {said}")?;
    }
    Ok(())
}

fn in_words(found: &Found) -> String {
    let all = &found.series;
    let lengths: Vec<usize> = all.iter().map(|one| one.times.len()).collect();
    let (least, most) = (lengths.iter().min().copied().unwrap_or(0), lengths.iter().max().copied().unwrap_or(0));
    let points = if least == most { counted(most, "points") } else { format!("{least} to {most} points") };
    let missing = all.iter().flat_map(|one| &one.values).filter(|value| value.is_nan()).count();
    let labelled = all.iter().filter(|one| one.label.is_some()).count();
    let columns = found.columns.as_ref().map_or(String::new(), |(_, said)| format!("; {said}"));
    let channels = counted(all.first().map_or(0, |one| one.width), "channels");
    format!(
        "{} series of {points} and {channels}, {} missing, {labelled} with a label{columns}",
        all.len(),
        counted(missing, "values")
    )
}
