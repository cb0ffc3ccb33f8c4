//! Series from a table with a point a row: by their ids, with the columns that were named or found.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use serde_json::Value;

use super::file::{Found, NO_VALUE, Point, Reading, Series, dates_of, series};
use super::wide::from_wide;
use crate::run::columns::Columns;
use crate::tasks::lines;
use crate::tasks::split::composed;
use crate::tasks::table::columns::{Roles, counts_excel_days, no_time, plain_names, time_text};
use crate::tasks::table::dates::EXCEL;
use crate::tasks::table::numbers::is_number;
use crate::tasks::table::{Row, Table, value};
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;

pub fn from_table(mut table: Table, reading: &Reading<'_>) -> Result<Found> {
    let none = Columns::default();
    let columns = reading.columns.unwrap_or(&none);
    table.name_decimal(columns);
    if columns.wide {
        return from_wide(&table, columns, reading);
    }
    let name = &table.name.clone();
    let (table, said) = table.headed(columns);
    said.iter().for_each(note);
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
    let [ids, times] = [&roles.id, &roles.time].map(|places| plain_names(table, places));
    let mut places: HashMap<Vec<String>, usize> = HashMap::new();
    let mut found: Vec<(usize, String, Vec<Point>, Option<String>)> = Vec::new();
    for (n, row) in table.rows.iter().enumerate() {
        let wrong = |problem: String| row.wrong(name, problem);
        let id: Vec<String> = roles.id.iter().map(|place| cell(row, *place)).collect();
        if id.iter().any(String::is_empty) {
            return Err(wrong(format!("the column `{ids}` is empty; say which series the row is of, or leave it out")));
        }
        let place = *places.entry(id).or_insert_with_key(|id| {
            found.push((row.line, id.join(","), Vec::new(), None));
            found.len() - 1
        });
        let (_, _, points, label) = &mut found[place];
        let time = match (&texts[n], &dates) {
            _ if roles.time.is_empty() => points.len() as f64,
            (None, _) => {
                return Err(wrong(format!("the column `{times}` is empty; give a time, or leave the row out")));
            }
            (Some(text), Some(dates)) => dates.number(text).ok_or_else(|| {
                let others = || {
                    format!("no date as the others, such as {:?}; mend it, or take out a row of sums or words", some[0])
                };
                let problem = dates.off_calendar(text).map_or_else(others, |why| format!("not on the calendar: {why}"));
                wrong(format!("{text:?} in the column `{times}` is {problem}"))
            })?,
            (Some(text), None) => {
                value(text).filter(|time| !time.is_nan()).ok_or_else(|| no_time(table, &roles.time, row, text))?
            }
        };
        points.push((time, numbers.iter().map(|channel| channel[n]).collect()));
        if let Some(own) = roles.label.map(|place| cell(row, place)).filter(|own| !own.is_empty())
            && let Some(known) = label.replace(own.clone()).filter(|known| *known != own)
        {
            let problem = "in a line before with the same id; give a series one label";
            return Err(wrong(format!("the label is {own:?}, and {known:?} {problem}")));
        }
    }
    let mut again = 0;
    // Where labels are learned, two things may well happen at once.
    let may_repeat =
        |points: &[Point]| !points.is_sorted_by(|a, b| a.0 < b.0) && !points.is_sorted_by(|a, b| a.0 > b.0);
    for (_, _, points, _) in found.iter_mut().filter(|(_, _, points, _)| !reading.labels && may_repeat(points)) {
        let (count, mut known) = (points.len(), HashSet::new());
        points.retain(|(time, values)| {
            known.insert(values.iter().chain([time]).map(|n| n.to_bits()).collect::<Vec<_>>())
        });
        again += count - points.len();
    }
    note_some(again, |rows| {
        format!("{name}: {} with a time and values that came before; each counts once", counted(rows, "rows"))
    });
    let of_points = |(line, id, points, label)| {
        let (names, id, dates) = (names.clone(), (!roles.id.is_empty()).then_some(id), dates.clone());
        (line, series(points, &known, label, line).map(|one| Series { names, id, dates, ..one }))
    };
    let series_found = with_values(name, found.into_iter().map(of_points))?;
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
pub fn with_values(name: &str, all: impl Iterator<Item = (usize, Result<Series, String>)>) -> Result<Vec<Series>> {
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
pub fn cell(row: &Row, place: usize) -> String {
    match &row.cells[place] {
        Value::Null => String::new(),
        Value::String(text) => composed(text).into_owned(),
        other => other.to_string(),
    }
}

/// Says that a cell of a channel is no number, and what helps.
fn no_number(table: &Table, roles: &Roles, place: usize, row: &Row) -> anyhow::Error {
    let texts: Vec<String> = table.texts(place).flatten().collect();
    let numbers = texts.iter().filter(|text| is_number(text)).count();
    let title = &table.header[place];
    let text: String = cell(row, place).chars().take(60).collect();
    let is_written_otherwise = text.trim_start_matches(|c: char| !c.is_alphanumeric()).starts_with(char::is_numeric);
    let is_nested = row.cells[place].is_object() || row.cells[place].is_array();
    if is_written_otherwise || is_nested || 2 * numbers >= texts.len() {
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

/// A note where the last points of series have some channels, and others not up to the end: they may be meant to be predicted.
fn say_partly_known(name: &str, all: &[Series], known: &[bool]) {
    let Some(first) = all.first().filter(|one| one.width > 1 && known.is_empty()) else { return };
    let end_of = |one: &Series, channel: usize| one.channel(channel).rev().take_while(|value| value.is_nan()).count();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::series::file::parse;

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
        for case in [
            // A date, an id by its name, a row number of pandas, and a part of the time.
            ",symbol,date,price\n0,b,Jan 1 2000,1\n1,a,Jan 1 2000,2\n2,b,Feb 1 2000,3\n => times `date` (dates of the form %b %-d %Y, in months), ids `symbol`, channels `price`; not read: `` (row numbers) & ids b|a; values [1.0, 3.0]; times Jan 1 2000|Feb 1 2000;",
            "date,x\nmay 2000,1\njun 2000,2\n => (dates of the form %b %Y, in months, printed such as May 2000)",
            "YEAR,x,TIME\n1951,3,1\n1952,4,2\n => times `TIME` (numbers), channels `x`; not read: `YEAR` (a part of the time)",
            "year,quarter,x\n1959,4,1\n1960,1,2\n => times 1959 Q4|1960 Q1;",
            "year,x\n1959,1\n1960,2\n => times 1959|1960;",
            // Parts of times in columns of their own, and times with their unit.
            "year,month,x\n1959,Nov,1\n1959,Dec,2\n => times 1959-Nov|1959-Dec;",
            "year,month,x\n1959.0,1.0,1\n1959.0,2.0,2\n => times 1959-01|1959-02;",
            "yearmonth,x\n201012,1\n201101,2\n => times 201012|201101;",
            "year,month,date_of_month,x\n1959,1,31,1\n1959,2,1,2\n => times 1959-01-31|1959-02-01;",
            "quarter,year,x\nQ4,1959,1\nQ1,1960,2\n => times 1959 Q4|1960 Q1;",
            "year,week,x\n2020,9,1\n2020,10,2\n => times 2020-W09|2020-W10;",
            "date,hr,x\n2020-01-31,22,1\n2020-01-31,24,2\n => times 2020-01-31 22:00|2020-02-01 00:00;",
            "year,month,day,hour,minute,x\n2020,1,31,9,5,1\n2020,1,31,9,6,2\n => times 2020-01-31 09:05|2020-01-31 09:06;",
            "Datum;Uhrzeit;x\n30.01.2024;00:00;1\n30.01.2024;12:00;2\n31.01.2024;00:00;3\n31.01.2024;12:00;4\n => times 30.01.2024 00:00|30.01.2024 12:00|31.01.2024 00:00|31.01.2024 12:00;",
            "Time (s),x\n0.5,1\n0.7,2\n => times 0.5|0.7;",
            // Names that speak of time where numbers rise.
            ",Days,x\n1,0,184.35\n2,4,182.5\n3,7,180.4\n => times `Days` (numbers), channels `x`",
            ",Days,x\n1,4,184.35\n2,0,182.5\n3,7,180.4\n => channels `Days`, `x`",
            "x,Days,Subject\n249,0,308\n258,1,308\n222,0,309\n205,1,309\n => times `Days` (numbers), ids `Subject`, channels `x`",
            "AYear,x\n2001,259\n2002,301\n2004,343\n => times `AYear` (numbers), channels `x`",
            "time;x\n0,5;1\n1.000,25;2,5\n => times 0.5|1000.25;",
            // Numbers without a name are the time where no other column is.
            ",0\n1821,269\n1822,321\n => values [269.0, 321.0]",
            "date,x\n20230228,1\n20230301,2\n => times 20230228|20230301;",
            // Texts that tell rows of one time apart are ids; spaces around them count as nothing.
            "shop,time,x\n é,0,1\nb ,0,2\ne\u{301},1,3\nb,1,4\n => ids é|b;",
            "id,ts,store,shelf_id,x\n1,0,1,7,5\n2,0,1,8,6\n3,0,2,7,7\n4,1,1,7,8\n5,1,1,8,9\n6,1,2,7,10\n7,2,1,7,5\n8,2,1,8,6\n => times `ts` (numbers), ids `store` and `shelf_id`, channels `x`; not read: `id` (different in each row) & ids 1,7|1,8|",
            // Counts since 1970 are times, and beside a date the same again.
            "ts,date,x\n1704067200,2024-01-01,1\n1704153600,2024-01-02,2\n => times `date` & channels `x`; not read: `ts` (another time)",
            "ts,month_sales\n1704067200,170406720\n1704153600,180415360\n => channels `month_sales`",
            "ts,x\n1704067200000,1\n1704067260000,2\n => times 1704067200000|1704067260000;",
            // Texts that tell rows apart together.
            "date,site,wday,kind,x\n0,n,Mon,a,1\n0,n,Mon,b,2\n0,s,Mon,a,3\n0,s,Mon,b,4\n1,n,Tue,a,5\n1,n,Tue,b,6\n1,s,Tue,a,7\n1,s,Tue,b,8\n => ids `site` and `kind`, channels `x`; not read: `wday` (a part of the time) & ids n,a|n,b|s,a|s,b; values [1.0, 5.0]",
            "rownames,time,x,on\n20.1,0,1,TRUE\n3,1,2,false\n => values [1.0, 1.0, 2.0, 0.0]",
            "date,Datum,x\n,30.12.1999,1\n,31.12.1999,2\n => times 30.12.1999|31.12.1999;",
            "date,x\n991230,1\n000102,2\n000103,3\n => times 991230|000102|000103;",
            // Columns that number rows, whatever the file calls them, and columns without values are no channels.
            "No.,date,row_number,x,notes\n7,2024-01-01,1,0.5,\n8,2024-01-02,2,0.7,\n9,2024-01-03,3,0.1,\n => channels `x`; not read: `No.` (row numbers), `row_number` (row numbers), `notes` (nothing in it)",
            // It may be a count where no label is learned.
            &format!("{counting} => channels `entry`"),
            &format!(
                "date,instant,decimal date,x\n{beside} => channels `x`; not read: `instant` (row numbers), `decimal date` (another time)"
            ),
            &format!("date,t,decimal date,x\n{beside} => times `date` & channels `x`; not read: `t` (row numbers)"),
            &format!("id,visit,date,x\n{each} => ids `id`, channels `x`; not read: `visit` (row numbers)"),
            // A row that comes again counts once, and another one of its time is kept.
            "time,x\n0,5\n1,6\n0,5\n1,7\n2,6\n3,1\n4,1\n5,2\n6,2\n => values [5.0, 6.0, 7.0, 6.0, 1.0, 1.0, 2.0, 2.0]; times 0|1|1|2|3|4|5|6;",
            // A second line of units.
            "time,x,y\n,°C,[%]\n0,20,1\n1,21,2\n => values [20.0, 1.0, 21.0, 2.0]",
            // Days that a spreadsheet counts, with the time of the day, and of months, whose days differ.
            "Datum;x\n45292,5;1\n45292,75;2\n45293;3\n => (dates of the form excel, in seconds) & times 45292.5|45292.75|45293;",
            "Date,x\n45292,1\n45323,2\n45352,3\n => (dates of the form excel, in months) & times 45292|45323|45352;",
            "date,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24\n0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24\n => channels `1`, `2`",
            // Without a header the first line is a row.
            "1,0.5\n2,0.7\n => times `column 1` (numbers), channels `column 2` & values [0.5, 0.7]",
        ] {
            let (text, parts) = case.split_once(" => ").unwrap();
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
        let id = |name: &str| Columns { id: Some(name.into()), ..Columns::default() };
        let time = |name: &str| Columns { time: Some(name.into()), ..Columns::default() };
        let channels = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
        let y_x = Columns { channels: channels(&["y", "x"]), ..id("store") };
        for (text, columns, parts) in [
            ("a,b,time,x\np q,r,0,1\np,q r,0,2\np q,r,1,3\n", id("a,b"), "ids p q,r|p,q r; values [1.0, 3.0]"),
            ("store,time,x,y,\n1,0,1,2,\n2,0,3,4,\n", y_x, "ids 1|2; values [2.0, 1.0]"),
            ("a,b\n1,2\n3,4\n", time("row"), "rows are counted & values [1.0, 2.0, 3.0, 4.0]; times 0|1;"),
            ("year,x\n90,1.5\n90,2.5\n", time("year"), "values [1.5, 2.5]"),
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
        for case in [
            "time,Time,x\n0,0,1\n => f, line 1: `time`, `Time` may all be times; say which with --time",
            &format!(
                "date,time,x\n{} => `date`, `time` may all be times",
                (0..10).map(|n| format!("2024-01-01,{n},5\n")).collect::<String>()
            ),
            "time,x,x\n0,1,1\n => two columns are called `x`",
            "year,time,x\n1990,9.9,1\n1991,9.8,2\n1992,9.85,2\n => `time`, `year` may all be times; say which with --time",
            "year,day,x\n90,1,0.5\n90,2,1.5\n91,1,2.5\n91,2,3.5\n91,3,3.5\n => 5 of 5 rows share the time `year` with another row; name all columns that say which series a row is of with --id, or those of the time with --time, count rows with --time row, or keep it with --time 'year'",
            "a,b\n1,2\n => no column of times is known among `a`, `b`; name it with --time NAME, or count the rows with --time row",
            "time,,x\n0,5,1\n1,3,1\n => f, line 1: column 2 has no name",
            "date,store,dept,x\n0,1,1,0.5\n0,1,2,0.5\n0,2,1,0.5\n0,2,2,1.5\n1,1,1,0.5\n1,1,2,0.5\n1,2,1,0.5\n1,2,2,1.5\n => `dept` may say which series each is of: say so with --id 'store,dept'",
            "time,income,size\n0,1,1\n0,1,2\n1,2,1\n1,3,1\n2,4,1\n2,2,2\n3,3,2\n3,4,2\n4,1,1\n4,2,2\n5,1,2\n5,3,1\n6,2,1\n6,4,2\n7,3,2\n7,4,1\n => 16 of 16 rows share the time `time` with another row; name all columns",
            "shop,time,x\n1,0,0.5\n2,0,0.5\n1,1,0.5\n2,1,0.5\n => `shop` may say which series each is of: say so with --id shop",
            "time,x,kind\n0,1,rain\n1,2,sun\n => \"rain\" in the column `kind` is no number; if it says which series a row is of, give --id 'kind', else leave the column out: --channels 'x'",
            "time,x\n0,cold\n1,21\n2,22\n => line 2: \"cold\"",
            "time,x\n0,\"1,101\"\n1,\"1,102\"\n => \"1,101\" in the column `x` may be 1101 or 1.101",
            "TrackID,time,x\n1,0,5\n1,1,6\n2,7,5\n2,8,6\n => `TrackID` may say which series a row is of: say so with --id TrackID, or name all channels with --channels",
            "date,x\n01/02/2024,1\n02/03/2024,2\n => --dates '%d/%m/%Y'",
            "id,time,x\na,0,1\na,1,1\n,1,2\n => f, line 4: the column `id` is empty; say which series the row is of",
            "time;x\n0;1,5\n1;1.25\n => f, line 3: \"1.25\" in the column `x` is no number; others of it are written otherwise; write all alike",
            ",Week,x\n1,1991 weeks 6,1\n2,1991 weeks 7,2\n => f, line 2: \"1991 weeks 6\" in the column `Week` is neither a number nor a date that is known",
            "year,x\n1991,1\n1992,2\nTotal,3\n => f, line 4: \"Total\" in the column `year` is neither",
            "time x\n0 1\n => columns have commas, semicolons, tabs or bars between them, not spaces",
            "land,1990,1991\na,1,2\n => a column a time, give --wide",
            "land,Lat,1/22/20,1/23/20,1/24/20\na,5,1,2,3\n => a column a time, give --wide",
            "date,x\n2024-01-01,1\nTotal,2\n => mend it, or take out a row of sums or words",
            "date,x\n2024-01-01,1\nsoon,2\n => f, line 3: \"soon\" in the column `date` is no date as the others",
        ] {
            let (text, part) = case.split_once(" => ").unwrap();
            let error = of_table(text, &none).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let x = Columns { channels: channels(&[" x"]), ..none.clone() };
        for (text, columns, part) in [
            ("time,x,X\n0,1,1\n", x, "two columns are called `x`"),
            ("time,x\n0,1\n", id("y"), "--id y: no such column; the header is `time`, `x`"),
            ("1.5,0.5,2.5\n1,2,3\n", columns, "line 1: it names the columns, by numbers that do not run on"),
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
}
