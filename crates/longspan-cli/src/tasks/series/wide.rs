//! Series from a table with a series a row, and a column for each time.

use std::collections::BTreeSet;

use anyhow::{Result, anyhow, bail};

use super::file::{Found, Reading, Series, dates_of, series};
use super::table::{cell, with_values};
use crate::run::columns::Columns;
use crate::tasks::table::columns::{ID, counts_rows, is_different, is_time, named_id, names};
use crate::tasks::table::{By, Row, Table, value};

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
pub fn from_wide(table: &Table, columns: &Columns, reading: &Reading<'_>) -> Result<Found> {
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
