//! A person's table: CSV with any delimiter, tabs, or objects of JSON, as columns with names and rows with their lines.

pub mod columns;
pub mod dates;
pub mod json;
mod layout;
pub mod numbers;
pub mod shapes;

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use csv::{ReaderBuilder, Terminator};
use serde_json::Value;

use super::lines;
use super::memory;
use super::split::composed;
use crate::run::columns::{Columns, Decimal};
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::{counted, listed, visible};
use crate::terminal::shell;
use columns::{MONTHS, TextColumn, holds_dates, is_time};

/// What stands for a missing value, beside an empty field.
const MISSING: [&str; 20] = [
    "?", "NaN", "nan", "-nan", "NAN", "NA", "na", "N/A", "n/a", "#N/A", "#NA", "<NA>", "null", "NULL", "None", "-",
    "--", ".", "..", ":",
];

/// What errors call a file of data, and its contents: of JSON that is a table in another form than objects, such objects; of a table with
/// spaces between its columns, or with drawn lines, CSV.
pub fn contents(path: &Path) -> Result<(String, Vec<u8>)> {
    let (name, bytes) = (lines::name(path), lines::read(path)?);
    let text = lines::text(&bytes, &name)?;
    let found = if text.trim_start().starts_with(['{', '[']) {
        shapes::as_objects(&text, &name)?
    } else {
        let csv = layout::as_csv(&text).filter(|_| !["tsv", "tab"].contains(&lines::ending(path).as_str()));
        csv.map(|csv| (csv, format!("{name}: read as columns with spaces or bars between them")))
    };
    let Some((text, said)) = found else { return Ok((name, bytes)) };
    note(said);
    Ok((name, text.into_bytes()))
}

/// What a cell takes of memory while a table is read, about.
const BYTES: f64 = 130.0;

#[derive(Debug, Clone)]
pub struct Table {
    pub name: String,
    pub line: usize,
    /// Names of the columns, without the space around them.
    pub header: Vec<String>,
    pub rows: Vec<Row>,
    /// Whether the names are keys of objects, not a line of their own.
    pub keys: bool,
    delimiter: u8,
    /// Whether fields may have commas in them.
    commas: bool,
    /// The decimal mark, where a person or the run names it, or numbers tell.
    pub decimal: OnceCell<Option<Decimal>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub line: usize,
    pub cells: Vec<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Objects, one after the other or in a list.
    Json,
    /// Columns with tabs between them, and fields as they stand.
    Tabs,
    /// CSV: fields with the delimiter in them stand in quotes.
    Csv,
}

/// Who named a column: a person with a flag, or the run, of what it learned from.
#[derive(Debug, Clone, Copy)]
pub enum By {
    Flag(&'static str),
    Run(&'static str),
}

impl Form {
    /// By the end of a file's name where it is known, else by how the text begins.
    pub fn of(ending: &str, text: &str) -> Self {
        let first = first_line(text);
        let start: String = text.chars().filter(|c| !c.is_whitespace()).take(2).collect();
        match ending {
            "json" | "jsonl" | "ndjson" => Self::Json,
            "csv" => Self::Csv,
            "tsv" | "tab" => Self::Tabs,
            _ if ["{\"", "[{"].contains(&&*start) => Self::Json,
            _ if first.contains('\t') => Self::Tabs,
            _ if first.contains([',', ';', '|']) => Self::Csv,
            _ => Self::Tabs,
        }
    }
}

/// The first line with anything in it that is no comment.
fn first_line(text: &str) -> &str {
    text.lines().find(|line| !line.trim().is_empty() && !is_comment(line)).unwrap_or_default()
}

/// Whether a line before the header is none of the table: a comment, or the delimiter for a spreadsheet, `sep=;`.
fn is_comment(line: &str) -> bool {
    line.starts_with(['#', '%']) || line.trim_end().len() == 5 && line.to_lowercase().starts_with("sep=")
}

impl Table {
    /// Reads a table whose first line names the columns; `None` where it has nothing but empty lines.
    pub fn read(text: &str, form: Form, name: &str) -> Result<Option<Self>> {
        if form == Form::Json {
            return Self::from_json(text, name);
        }
        let mut table = records(text, form, name)?.without_preamble();
        if table.rows.is_empty() {
            return Ok(None);
        }
        let first = table.rows.remove(0);
        let table = Self { line: first.line, header: first.titles(), ..table }.with_even_rows()?;
        Ok(Some(table.with_one_line_of_names()))
    }

    fn new(name: &str, delimiter: u8, commas: bool) -> Self {
        let (header, rows, decimal) = (Vec::new(), Vec::new(), OnceCell::new());
        Self { name: name.into(), line: 1, header, rows, keys: false, delimiter, commas, decimal }
    }

    /// As [`read`](Self::read), of the columns of text `expected`; with tabs between them a first line that has none of their names, or of
    /// those that a person gave in `columns`, is a row already, and rows have these two, or more, or anything after the first where one is expected.
    pub fn of_texts(
        text: &str,
        form: Form,
        name: &str,
        expected: &[&TextColumn],
        columns: &Columns,
    ) -> Result<Option<Self>> {
        if form != Form::Tabs {
            let Some(table) = Self::read(text, form, name)? else { return Ok(None) };
            let is_name =
                |title: &String| columns.names_text(title) || expected.iter().any(|column| column.knows(title));
            if table.header.iter().any(is_name) {
                return Ok(Some(table));
            }
            let (table, said) = table.headed(columns);
            said.iter().for_each(note);
            return Ok(Some(table));
        }
        let mut table = records(text, form, name)?;
        let Some(first) = table.rows.first() else { return Ok(None) };
        (table.line, table.header) = (first.line, first.titles());
        let titles = &table.header;
        let is_name = |title: &&String| columns.names_text(title) || expected.iter().any(|column| column.knows(title));
        if titles.iter().filter(is_name).count() >= titles.len().min(2) {
            table.rows.remove(0);
            return table.with_even_rows().map(Some);
        }
        let width = titles.len();
        let is_wide = expected.len() == 2 && width > 2 || columns.named().any(|titles| are_counted(titles));
        if is_wide && table.rows.iter().all(|row| row.cells.len() == width) {
            table.header = counted_names(width);
            note(table.is_headless());
            return Ok(Some(table));
        }
        if let ([first, second], Some(Row { line, cells })) =
            (expected, table.rows.iter().find(|row| row.cells.len() != 2))
        {
            let (first, second) = (first.key, second.key);
            let help = match cells.len() {
                1 => format!("separate {first} and {second} by a tab, or learn a text as it is with --text"),
                _ => "keep as many in each line, as `cut -f 1,2` does".into(),
            };
            bail!(
                "{name}, line {line}: {}, expected two ({first}, tab, {second}); {help}",
                counted(cells.len(), "columns")
            );
        }
        if let [first, second] = expected
            && table.rows.len() > 10
            && titles.iter().all(|title| looks_like_name(title))
            && (0..2).any(|place| {
                let names = table.rows.iter().filter(|row| row.cells[place].as_str().is_some_and(looks_like_name));
                names.count() * 10 <= table.rows.len()
            })
        {
            note(format_args!(
                "{}: read as a row, the {} {:?} and the {} {:?}; if the line names the columns, give {} {} {} {}",
                table.at_header(),
                first.key,
                titles[0],
                second.key,
                titles[1],
                first.flag,
                shell::quoted(&titles[0]),
                second.flag,
                shell::quoted(&titles[1])
            ));
        }
        table.header = expected.iter().map(|column| column.key.into()).collect();
        Ok(Some(table))
    }

    /// The same if its first line names the columns, else with that line as a row, and what is said of it: where it has nothing but numbers,
    /// beside dates, or something that comes again and again in the rows below, or where a person or the run names columns by their numbers.
    pub fn headed(self, columns: &Columns) -> (Self, Option<String>) {
        // As pandas numbers the columns of a frame without names.
        let titles = || self.header.iter().skip_while(|title| title.is_empty());
        let count_up = titles().enumerate().all(|(n, title)| *title == n.to_string());
        let is_number = |title: &&String| value(title).is_some_and(f64::is_finite);
        let numbers = self.header.iter().filter(is_number).count();
        let are_numbers = || numbers > 0 && self.header.iter().all(|title| is_time(title));
        let row = Row { line: self.line, cells: self.header.iter().map(|title| Value::from(title.as_str())).collect() };
        let comes_again = |place: usize| {
            let is_again = |other: &&Row| other.cells[place] == row.cells[place] && other.cells != row.cells;
            let count = self.rows.iter().filter(is_again).count();
            // Several numbers may name questions or doses, whose answers are such numbers, too.
            let may_name = is_missing(&self.header[place]) || numbers > 1 && is_number(&&self.header[place]);
            !may_name && count > 1 && count * 10 >= self.rows.len()
        };
        let is_row = if columns.named().any(|titles| are_counted(titles) && self.find(titles).is_none()) {
            true
        } else if are_numbers() {
            !count_up || self.header.len() < 4 && (0..self.header.len()).all(|place| self.numbers(place).is_ok())
        } else {
            !count_up && (0..self.header.len()).any(comes_again)
        };
        if self.keys || !is_row {
            return (self, None);
        }
        let (said, header) = (self.is_headless(), counted_names(self.header.len()));
        let rows = std::iter::once(row).chain(self.rows).collect();
        (Self { header, rows, ..self }, Some(said))
    }

    fn is_headless(&self) -> String {
        format!("{}: the first line is a row and names nothing, so columns are called `column 1`, …", self.name)
    }

    /// The same without a second line of units, where it has texts alone, above numbers and dates; with what is said of it.
    pub fn without_units(mut self) -> (Self, Option<String>) {
        let is_unit = |text: &str| !numbers::is_number(text) && !is_time(text);
        let may_be = |cell: &Value| text(cell).is_none_or(|text| is_unit(&text));
        if self.rows.len() < 3 || !self.rows[0].cells.iter().all(may_be) {
            return (self, None);
        }
        let first = self.rows.remove(0);
        let named: Vec<usize> = (0..self.header.len()).filter(|place| text(&first.cells[*place]).is_some()).collect();
        let are_numbers = |place: &usize| self.numbers(*place).is_ok();
        let fits =
            |place: &usize| !self.header[*place].is_empty() && (are_numbers(place) || holds_dates(&self, *place));
        if named.iter().all(fits) && named.iter().any(are_numbers) {
            let said = format!("line {}: left out, since it seems to name units", first.line);
            return (self, Some(said));
        }
        self.rows.insert(0, first);
        (self, None)
    }

    /// The same with a column of 0 and 1, `column=text`, for each of these texts of columns.
    pub fn one_hot(&self, texts: &[(usize, String)]) -> Self {
        let titles = texts.iter().map(|(place, text)| format!("{}={text}", self.header[*place]));
        let header = self.header.iter().cloned().chain(titles).collect();
        let row = |row: &Row| {
            let is = |(place, wanted): &(usize, String)| match text(&row.cells[*place]) {
                Some(found) => Value::from(u8::from(found == *wanted)),
                None => Value::Null,
            };
            Row { line: row.line, cells: row.cells.iter().cloned().chain(texts.iter().map(is)).collect() }
        };
        self.with(header, self.rows.iter().map(row).collect())
    }

    /// The same with a row for each month or quarter of a year, or each time of a day, where rows have a column for each; with what is said of it.
    pub fn melted(&self, columns: &Columns) -> Option<(Self, String)> {
        let lower: Vec<String> = self.header.iter().map(|title| title.to_lowercase()).collect();
        let clocks = lower.iter().filter(|title| title.contains(':')).count().max(2);
        let (part, names, first, whole) = [clocks, 12, 4, 96, 48, 24].into_iter().find_map(|count| {
            let found = |(first, titles)| Some((first, parts_of_time(titles, count == clocks)?));
            let (first, (part, names)) = lower.windows(count).enumerate().find_map(found)?;
            let is_whole = |n: &usize| if part == "clock" { holds_dates(self, *n) } else { lower[*n] == "year" };
            Some((part, names, first, (0..first).find(is_whole)?))
        })?;
        let titles = &self.header[first..first + names.len()];
        let is_named = columns.time.as_ref().is_some_and(|time| !time.split(',').any(|name| name == part));
        if is_named || titles.iter().any(|title| columns.channels.contains(title)) {
            return None;
        }
        let header = [&self.header[..first], &[part.into(), "value".into()]].concat();
        let row = |row: &Row, n: usize| {
            let cells = [names[n].as_str().into(), row.cells[first + n].clone()];
            Row { line: row.line, cells: [&row.cells[..first], &cells].concat() }
        };
        let rows = self.rows.iter().flat_map(|one| (0..names.len()).map(|n| row(one, n)).collect::<Vec<_>>()).collect();
        let [begin, end] = [0, names.len() - 1];
        let after = if first + names.len() < self.header.len() { " (those after them are not read)" } else { "" };
        let said = format!(
            "a row for each {}, from the columns `{}` … `{}`{after}; --time {} takes each for a channel",
            if part == "clock" { format!("time of the day, {} … {}", names[begin], names[end]) } else { part.into() },
            titles[begin],
            titles[end],
            shell::quoted(&self.header[whole])
        );
        Some((self.with(header, rows), said))
    }

    fn with(&self, header: Vec<String>, rows: Vec<Row>) -> Self {
        Self { name: self.name.clone(), header, rows, decimal: self.decimal.clone(), ..*self }
    }

    /// The same with as many cells in each row as there are columns.
    fn with_even_rows(mut self) -> Result<Self> {
        let width = self.header.len();
        for Row { cells, .. } in &mut self.rows {
            // A delimiter at the end of each line but the header's.
            if cells.len() == width + 1 && cells.last().is_some_and(|cell| cell == "") {
                cells.pop();
            }
        }
        // Excel ends tables with rows of delimiters alone.
        while width > 1 && self.rows.last().is_some_and(|row| row.cells.iter().all(|cell| cell == "")) {
            self.rows.pop();
        }
        let others: Vec<&Row> = self.rows.iter().filter(|row| row.cells.len() != width).collect();
        if let Some(Row { line, cells }) = others.first() {
            let found = counted(cells.len(), "columns");
            let help = match self.delimiter {
                _ if cells.len() < width => "fill it up, or take out a line that is no row",
                _ if 2 * others.len() > self.rows.len() => {
                    "the first line names the columns: take out what stands before it"
                }
                b',' => "put a field with commas in quotes",
                _ => "put a field with semicolons, tabs or bars in quotes",
            };
            bail!("{}, line {line}: {found}, the header has {width}; {help}", self.name);
        }
        Ok(self)
    }

    /// Objects, whose keys are the columns.
    fn from_json(text: &str, name: &str) -> Result<Option<Self>> {
        let mut table = Self { keys: true, ..Self::new(name, b',', true) };
        let mut places: HashMap<String, usize> = HashMap::new();
        json::each(text, name, |value, line| {
            let Value::Object(object) = value else {
                bail!("{name}, line {line}: {value} is not an object such as {{\"key\": 1}}")
            };
            let mut cells = vec![Value::Null; table.header.len()];
            for (key, value) in object {
                let place = *places.entry(key).or_insert_with_key(|key| {
                    table.header.push(key.clone());
                    cells.push(Value::Null);
                    table.header.len() - 1
                });
                cells[place] = value;
            }
            table.rows.push(Row { line, cells });
            Ok(())
        })?;
        if let [Row { line, cells }] = &table.rows[..]
            && cells.iter().all(Value::is_object)
            && !cells.is_empty()
        {
            bail!(
                "{name}, line {line}: an object for each column; write one for each row, as pandas' to_json(orient=\"records\") does"
            );
        }
        let width = table.header.len();
        table.rows.iter_mut().for_each(|row| row.cells.resize(width, Value::Null));
        Ok((!table.rows.is_empty()).then_some(table))
    }

    /// The place of the one column of this name: as it stands or else whatever the case of its letters.
    pub fn find(&self, name: &str) -> Option<usize> {
        let exact = self.header.iter().position(|title| title == name);
        exact.or_else(|| self.header.iter().position(|title| title.to_lowercase() == name.trim().to_lowercase()))
    }

    /// The place of a column that was named so.
    pub fn named(&self, name: &str, by: By) -> Result<usize> {
        let place = self.find(name).ok_or_else(|| {
            let (who, help) = match by {
                By::Flag(flag) => (flag.into(), ""),
                By::Run(what) => (format!("the run's {what}"), "; call it as in training"),
            };
            anyhow!("{}: {who} {name}: no such column; the header is {}{help}", self.at_header(), self.titles())
        })?;
        let is_exact = self.header[place] == name;
        let same = |title: &&String| {
            if is_exact { *title == name } else { title.to_lowercase() == name.trim().to_lowercase() }
        };
        if self.header.iter().filter(same).count() > 1 {
            bail!("{}: two columns are called `{}`; rename one of them", self.at_header(), self.header[place]);
        }
        Ok(place)
    }

    pub fn at_header(&self) -> String {
        format!("{}, line {}", self.name, self.line)
    }

    pub fn titles(&self) -> String {
        listed(&(0..self.header.len()).map(|place| format!("`{}`", self.title(place))).collect::<Vec<_>>(), 12)
    }

    /// The name of a column as it is shown: in one line, and not a whole text.
    pub fn title(&self, place: usize) -> String {
        let title = &self.header[place];
        match title.char_indices().nth(60) {
            Some((end, _)) => visible(&title[..end]) + "…",
            None => visible(title),
        }
    }

    /// The texts of a column, as they stand without the space around them; `None` where one is missing.
    pub fn texts(&self, place: usize) -> impl Iterator<Item = Option<String>> {
        self.rows.iter().map(move |row| text(&row.cells[place]).map(Cow::into_owned))
    }

    /// Says how many rows have nothing in a column of texts.
    pub fn say_empty(&self, place: usize) {
        let is_empty = |row: &&Row| row.cells[place].as_str().is_some_and(|text| text.trim().is_empty());
        note_some(self.rows.iter().filter(is_empty).count(), |rows| {
            format!("{}: nothing in the column `{}` of {}", self.name, self.header[place], counted(rows, "rows"))
        });
    }
}

impl Row {
    /// As names of columns.
    fn titles(&self) -> Vec<String> {
        self.cells.iter().map(|cell| cell.as_str().unwrap_or_default().trim().to_owned()).collect()
    }

    pub fn wrong(&self, name: &str, problem: impl std::fmt::Display) -> anyhow::Error {
        anyhow!("{name}, line {}: {problem}", self.line)
    }
}

/// Which part of a time columns of these names are, in small letters, and how each is written beside the rest of it.
fn parts_of_time(titles: &[String], are_clocks: bool) -> Option<(&'static str, Vec<String>)> {
    let count = titles.len();
    let each = |name: &dyn Fn(usize, &str) -> Option<String>| -> Option<Vec<String>> {
        titles.iter().enumerate().map(|(n, title)| name(n, title)).collect()
    };
    let month = |n: usize, title: &str| {
        (title.starts_with(MONTHS[n]) || title.parse() == Ok(n + 1)).then(|| (n + 1).to_string())
    };
    let quarter = |n: usize, title: &str| (title == format!("q{}", n + 1)).then(|| (n + 1).to_string());
    let clock = |_: usize, title: &str| {
        let begin = title.split('-').next()?.trim();
        (begin.contains(':') && begin.parse::<jiff::civil::Time>().is_ok()).then(|| begin.to_string())
    };
    // `h01` to `h24`, `0` to `23`, or as many halves or quarters of an hour.
    let number = |title: &str| {
        let name = title.trim_end_matches(|c: char| c.is_ascii_digit());
        let is_known =
            ["", "h", "hr", "he", "hour", "sp", "p", "period"].contains(&name.trim_end_matches([' ', '_', '-']));
        title[name.len()..].parse::<usize>().ok().filter(|_| is_known)
    };
    // `1` to `24` may be anything.
    let first = number(&titles[0]).filter(|first| *first < 2 && titles[0] != "1");
    let hour = |n: usize, title: &str| {
        let minutes = number(title).filter(|number| first.is_some_and(|first| *number == first + n))? * 1440 / count;
        Some(format!("{:02}:{:02}", minutes / 60, minutes % 60))
    };
    let (part, names) = match count {
        _ if are_clocks => ("clock", each(&clock)),
        12 => ("month", each(&month)),
        4 => ("quarter", each(&quarter)),
        24 | 48 | 96 => ("clock", each(&hour)),
        _ => ("clock", None),
    };
    Some((part, names?))
}

/// What columns without names are called.
pub fn counted_names(count: usize) -> Vec<String> {
    (1..=count).map(|n| format!("column {n}")).collect()
}

/// Whether these are such names, perhaps several of one time.
fn are_counted(titles: &str) -> bool {
    let is_count = |title: &str| title.strip_prefix("column ").is_some_and(|n| n.parse::<usize>().is_ok());
    titles.split(',').all(|title| is_count(title.trim()))
}

/// Whether a text looks like the name of a column: one word of letters, digits and `_`, which begins with a letter.
fn looks_like_name(text: &str) -> bool {
    text.starts_with(char::is_alphabetic) && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// Whether a field says that its value is missing.
pub fn is_missing(text: &str) -> bool {
    let text = text.trim();
    text.is_empty() || MISSING.contains(&text)
}

/// A cell as text without the space around it; `None` where it is missing.
pub fn text(cell: &Value) -> Option<Cow<'_, str>> {
    match cell {
        Value::Null => None,
        Value::String(text) if is_missing(text) => None,
        Value::String(text) => Some(composed(text)),
        other => Some(other.to_string().into()),
    }
}

/// A finite number as text: NaN where it is missing, `None` where it is none.
pub fn value(text: &str) -> Option<f64> {
    if is_missing(text) { Some(f64::NAN) } else { text.trim().parse().ok().filter(|number: &f64| number.is_finite()) }
}

/// All records but empty lines as rows.
fn records(text: &str, form: Form, name: &str) -> Result<Table> {
    // Comments before the header.
    let comments = |line: &&str| form == Form::Csv && is_comment(line);
    let skipped: usize = text.split_inclusive('\n').take_while(comments).map(str::len).sum();
    let first = first_line(text);
    let delimiter = if form == Form::Tabs { b'\t' } else { delimiter(first) };
    let quoted = form == Form::Tabs && is_quoted(text);
    let quote = if first.starts_with('\'') && !first.contains('"') { b'\'' } else { b'"' };
    let cells = text.bytes().filter(|byte| *byte == delimiter || *byte == b'\n').count();
    let what = || format!("{name}: its table");
    memory::check(BYTES * cells as f64, what, "give fewer rows or columns, or more coarse times")?;
    // Within quotes that are never closed the end is no end of a record, and the reader would not say so.
    const END: &str = "\u{1}";
    let input = format!("{}\n{END}\n", &text[skipped..]);
    // A carriage return within a line is a character of a field, which Python writes without quotes.
    let mut reader = ReaderBuilder::new();
    reader.has_headers(false).flexible(true).delimiter(delimiter).quote(quote).quoting(form == Form::Csv || quoted);
    let mut reader = reader.terminator(Terminator::Any(b'\n')).from_reader(input.as_bytes());
    let (mut record, mut rows) = (csv::StringRecord::new(), Vec::new());
    let (mut at, mut line) = (0, 1 + text[..skipped].matches('\n').count());
    while reader.read_record(&mut record).map_err(|error| anyhow!("{name}: {error}; check that it is a table"))? {
        // The reader passes over empty lines, and begins the record with them.
        let begin = record.position().map_or(at, |position| position.byte() as usize);
        let begin = begin + input[begin..].bytes().take_while(|byte| b"\r\n".contains(byte)).count();
        line += input[at..begin].matches('\n').count();
        at = begin;
        let mut cells: Vec<Value> = record.iter().map(Value::from).collect();
        if let Some(Value::String(last)) =
            cells.last_mut().filter(|cell| cell.as_str().is_some_and(|text| text.ends_with('\r')))
        {
            last.pop();
        }
        // A line with nothing but its end has a field.
        if !(cells.len() == 1 && cells[0] == "") {
            rows.push(Row { line, cells });
        }
    }
    match rows.pop() {
        Some(last) if last.cells == [Value::from(END)] => {
            let is_doubled = |field: &str| is_wrapped(field) && field[1..field.len() - 1].contains("\"\"");
            if quoted && rows.len() > 1 {
                note(format_args!("{name}: fields in double quotes are read without them"));
            } else if form == Form::Tabs && text.lines().flat_map(|line| line.split('\t')).any(is_doubled) {
                note(format_args!(
                    "{name}: double quotes are read as they stand, doubled ones too; if they enclose fields, call the file .csv"
                ));
            }
            Ok(Table { rows, ..Table::new(name, delimiter, delimiter != b',' || text.contains('"')) })
        }
        last => bail!(
            "{name}, line {}: a quote is opened and never closed; close it, or double it where it is meant as a character",
            last.map_or(1, |row| row.line)
        ),
    }
}

fn is_wrapped(field: &str) -> bool {
    field.len() > 1 && field.starts_with('"') && field.ends_with('"')
}

/// Whether fields between tabs stand in quotes, as R and spreadsheets write texts: some do in each line, and no other has a quote.
fn is_quoted(text: &str) -> bool {
    let is_quoted = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let (quoted, others): (Vec<&str>, Vec<&str>) = fields.iter().partition(|field| is_wrapped(field));
        fields.len() > 1 && !quoted.is_empty() && others.iter().all(|field| !field.contains('"'))
    };
    let mut lines = text.lines().filter(|line| !line.trim().is_empty()).peekable();
    lines.peek().is_some() && lines.all(is_quoted)
}

/// What stands between the columns of a line: the commonest of tab, semicolon and comma.
fn delimiter(line: &str) -> u8 {
    let mut quoted = false;
    let mut counts = [(b',', 0), (b';', 0), (b'\t', 0), (b'|', 0)];
    for byte in line.bytes() {
        quoted ^= byte == b'"';
        for (delimiter, count) in &mut counts {
            *count += usize::from(!quoted && byte == *delimiter);
        }
    }
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map_or(b',', |(delimiter, _)| delimiter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, form: Form) -> Result<Table> {
        Ok(Table::read(text, form, "x")?.expect("a table"))
    }

    fn rows(text: &str, form: Form) -> Vec<(usize, Vec<String>)> {
        let table = read(text, form).unwrap();
        let cells = |row: &Row| {
            row.cells.iter().map(|cell| cell.as_str().map_or_else(|| cell.to_string(), String::from)).collect()
        };
        std::iter::once((table.line, table.header.clone()))
            .chain(table.rows.iter().map(|row| (row.line, cells(row))))
            .collect()
    }

    fn expected(rows: &[(usize, &[&str])]) -> Vec<(usize, Vec<String>)> {
        rows.iter().map(|(line, cells)| (*line, cells.iter().map(|cell| cell.to_string()).collect())).collect()
    }

    #[test]
    fn fields_may_be_quoted_and_records_keep_their_lines() {
        let text = "id, Target ,source\r\n1,b,a\r\n\r\n2,\"x, \"\"y\"\"\nz\",\"\"\r\n3,,c";
        let all = expected(&[
            (1, &["id", "Target", "source"]),
            (2, &["1", "b", "a"]),
            (4, &["2", "x, \"y\"\nz", ""]),
            (6, &["3", "", "c"]),
        ]);
        assert_eq!(rows(text, Form::Csv), all);
        assert!(Table::read("\n\n", Form::Csv, "x").unwrap().is_none());
        // Comments, other delimiters, other quotes, a delimiter at the end of lines.
        let all = expected(&[(3, &["a", "b"]), (4, &["1", "2"])]);
        for text in [
            "# of mine\n% and\na,b\n1,2\n",
            "#\n#\na;b\n1;2",
            "#\n#\na\tb\n1\t2\n",
            "#\n\n'a'\t'b'\n'1'\t2\n",
            "#\n#\na,b\n1,2,\n",
        ] {
            assert_eq!(rows(text, Form::Csv), all, "{text}");
        }
        let text = "a,b\r\n1,x\ry\r\n\"2\",\"z\"\r\n";
        let all = expected(&[(1, &["a", "b"]), (2, &["1", "x\ry"]), (3, &["2", "z"])]);
        assert_eq!(rows(text, Form::Csv), all, "a carriage return in a line is none of its end");
        let text = "a\tb\r\n\"x\ty\rz\r\n\n\tv\n";
        assert_eq!(
            rows(text, Form::Tabs),
            expected(&[(1, &["a", "b"]), (2, &["\"x", "y\rz"]), (4, &["", "v"])]),
            "tabs have no quotes"
        );
        let json = "[{\"a\": \"1\", \"b\": null},\n{\"c\": [2], \"a\": 3}]";
        assert_eq!(
            rows(json, Form::Json),
            expected(&[(1, &["a", "b", "c"]), (1, &["1", "null", "null"]), (2, &["3", "null", "[2]"])])
        );
    }

    #[test]
    fn fields_between_tabs_may_be_quoted_in_every_line() {
        let quoted = "\"a\"\t\"b\"\n\n\"1 \"\"x\"\"\"\t2\n";
        assert_eq!(rows(quoted, Form::Tabs), expected(&[(1, &["a", "b"]), (3, &["1 \"x\"", "2"])]));
        for stands in ["\"a\"\tb\n1\t2\n", "\"a\"\t\"b\" c\n", "\"a\" b\t\"c\"\n"] {
            assert!(rows(stands, Form::Tabs)[0].1.iter().any(|field| field.starts_with('"')), "{stands}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, part) in [
            ("source,target\na,b\n\na,b,c\n", "x, line 4: 3 columns, the header has 2"),
            ("source,target\na\n", "x, line 2: 1 column, the header has 2; fill it up"),
            (
                "Sales of May\n\na,b\n",
                "x, line 3: 2 columns, the header has 1; the first line names the columns: take out",
            ),
            ("source,target\r\n\"a\r\nb\",c\r\n\"d,e\r\n", "x, line 4: a quote is opened and never closed"),
        ] {
            let error = read(text, Form::Csv).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        for (text, part) in [
            ("1\n", "x, line 1: 1 is not an object"),
            ("{\"a\": {\"0\": 1}, \"b\": {\"0\": 2}}", "x, line 1: an object for each column; write one for each row"),
        ] {
            let error = read(text, Form::Json).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_form_is_found() {
        for (ending, text, form) in [
            ("json", "", Form::Json),
            ("csv", "{", Form::Csv),
            ("tsv", "a,b", Form::Tabs),
            ("", " {\"a\": 1}", Form::Json),
            ("txt", "[{\"a\": 1}]", Form::Json),
            ("txt", "a,b\n", Form::Csv),
            ("", "sep=;\r\na;b\n", Form::Csv),
            ("txt", "a|b\n", Form::Csv),
            ("", "a, b\tc\n", Form::Tabs),
            ("", "one", Form::Tabs),
        ] {
            assert_eq!(Form::of(ending, text), form, "{ending} {text}");
        }
    }
}
