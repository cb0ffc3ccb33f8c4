//! Tables that are laid out for the eye: columns with spaces or bars between them, lines before the names, several lines of names.

use serde_json::Value;

use super::columns::is_time;
use super::{Row, Table, is_comment, value};
use crate::terminal::notes::note;

/// Lines before the one that names the columns, at most.
const BEFORE: usize = 30;

/// As CSV, each line in its place, where columns have spaces or drawn bars between them; `None` of any other text.
pub fn as_csv(text: &str) -> Option<String> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !is_comment(line));
    let first = lines.next()?;
    let is_rule = |line: &str| line.contains("--") && line.trim().chars().all(|c| "|+-:= ".contains(c));
    if is_rule(first) && first.contains('+') || first.contains('|') && lines.next().is_some_and(is_rule) {
        let cells = |line: &str| {
            let line = line.trim();
            let cells = line.strip_prefix('|').unwrap_or(line);
            let cells = cells.strip_suffix('|').unwrap_or(cells).split('|').map(str::trim);
            // Rules, and what stands before and after the table.
            if is_rule(line) || !line.contains('|') { String::new() } else { record(cells) }
        };
        return Some(text.lines().map(|line| cells(line) + "\n").collect());
    }
    if first.contains([',', ';', '\t', '|', '@']) {
        return None;
    }
    let rows: Vec<Vec<&str>> = text.lines().filter(|line| !is_comment(line)).map(fields).collect();
    let full: Vec<&Vec<&str>> = rows.iter().filter(|row| !row.is_empty()).collect();
    let width = full.last()?.len();
    // R leaves the column of its rows' names without one.
    let are_even =
        full[1..].iter().all(|row| row.len() == width) && [width, (width - 1).max(2)].contains(&full[0].len());
    let is_number = |n: &usize| full[1..].iter().all(|row| value(row[*n]).is_some());
    if width < 2 || full.len() < 3 || !are_even || 2 * (0..width).filter(is_number).count() < width {
        return None;
    }
    // NumPy writes names as a comment.
    let has_names = full[0].iter().any(|cell| value(cell).is_none());
    let comments = text.lines().enumerate().take_while(|(_, line)| line.trim().is_empty() || is_comment(line));
    let named =
        comments.filter(|(_, line)| !has_names && fields(line.trim_start_matches(['#', '%'])).len() == width).last();
    let line = |(n, line): (usize, &str)| {
        let cells = match named {
            Some((at, names)) if at == n => fields(names.trim_start_matches(['#', '%'])),
            _ if is_comment(line) => Vec::new(),
            _ => fields(line),
        };
        let missing = (cells.len() + 1 == width).then_some("");
        record(missing.into_iter().chain(cells)) + "\n"
    };
    Some(text.lines().enumerate().map(line).collect())
}

fn record<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    let is_plain = |cell: &str| !cell.contains([',', '"']);
    let cell = |cell: &str| if is_plain(cell) { cell.into() } else { format!("\"{}\"", cell.replace('"', "\"\"")) };
    cells.map(cell).collect::<Vec<_>>().join(",")
}

/// What stands between spaces, or in quotes.
fn fields(line: &str) -> Vec<&str> {
    let (mut rest, mut all) = (line.trim(), Vec::new());
    while !rest.is_empty() {
        let quoted = rest.strip_prefix('"').and_then(|rest| rest.split_once('"'));
        let (field, after) = quoted.or_else(|| rest.split_once(char::is_whitespace)).unwrap_or((rest, ""));
        all.push(field);
        rest = after.trim_start();
    }
    all
}

impl Table {
    /// The same without lines before the one that names the columns: they have fewer cells, and all after them as many as it.
    pub fn without_preamble(mut self) -> Self {
        let widths: Vec<usize> = self.rows.iter().map(|row| row.cells.len()).collect();
        let Some(&width) = widths.last() else { return self };
        let first = widths.iter().position(|count| *count == width).unwrap_or(0);
        let is_table = widths[first..].iter().all(|count| *count == width) && widths.len() > first + 2;
        let ends_open = self.rows[first..].iter().all(|row| row.cells.last().is_some_and(|cell| cell == ""));
        if !(1..BEFORE).contains(&first) || !is_table || ends_open && widths[0] + 1 == width {
            return self;
        }
        let Row { line, cells } = &self.rows[first];
        let names = cells.iter().filter_map(Value::as_str).filter(|text| !is_time(text)).count();
        if first == 1 && widths[0] > 1 && widths[0] + 1 == width && names < width {
            // R leaves the column of its rows' names without one.
            self.rows[0].cells.insert(0, "".into());
        } else if 2 * names >= width.min(4) {
            note(format_args!("{}: line {line} names the columns; those before it are left out", self.name));
            self.rows.drain(..first);
        }
        self
    }

    /// The same where pandas wrote names of columns in two lines and more, and the name of the rows alone in another: each with all of its names
    /// that differ.
    pub fn with_one_line_of_names(mut self) -> Self {
        let is_empty = |cell: &Value| cell == "";
        let names_rows = |cells: &[Value]| {
            let is_name = cells[0].as_str().is_some_and(|name| !name.is_empty() && !is_time(name));
            is_name && cells.len() > 1 && cells[1..].iter().all(is_empty)
        };
        let Some(last) = self.rows.iter().take(4).position(|row| names_rows(&row.cells)) else { return self };
        let below = &self.rows[last + 1..];
        let is_number =
            |place: usize| below.iter().all(|row| row.cells[place].as_str().is_none_or(|cell| value(cell).is_some()));
        let are_names =
            |row: &[Value]| row[1..].iter().all(|cell| cell.as_str().is_some_and(|name| value(name).is_none()));
        if last == 0
            || below.is_empty()
            || !(1..self.header.len()).any(is_number)
            || !self.rows[..last].iter().all(|row| are_names(&row.cells))
        {
            return self;
        }
        let mut lines: Vec<Vec<String>> = vec![std::mem::take(&mut self.header)];
        lines.extend(self.rows.drain(..=last).map(|row| row.titles()));
        let own = lines.pop().unwrap_or_default();
        let width = own.len();
        let differ = |line: &&Vec<String>| line[2..].iter().any(|name| *name != line[1]);
        let telling: Vec<&Vec<String>> = lines.iter().filter(differ).collect();
        let telling = if telling.is_empty() { vec![&lines[0]] } else { telling };
        let name = |place: usize| telling.iter().map(|line| line[place].as_str()).collect::<Vec<_>>().join(" ");
        self.header = std::iter::once(own[0].clone()).chain((1..width).map(name)).collect();
        note(format_args!("{}: the first {} lines name the columns: {}", self.name, lines.len() + 1, self.titles()));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::table::Form;

    fn read(text: &str) -> (usize, Vec<String>, Vec<String>) {
        let table = Table::read(text, Form::Csv, "f").unwrap().unwrap();
        let cells = |row: &Row| format!("{} {}", row.line, row.titles().join("|"));
        (table.line, table.header.clone(), table.rows.iter().map(cells).collect())
    }

    #[test]
    fn columns_may_have_spaces_or_bars_between_them() {
        let expected = ["", "a,b c", "1.5,2", "-3,NA", "4,1"];
        for text in ["\n a  \"b c\" \n1.5   2\n  -3 NA\n4 1\n", "# of mine\n# a \"b c\"\n1.5 2\n-3  NA\n4 1"] {
            assert_eq!(as_csv(text).unwrap().lines().collect::<Vec<_>>(), expected, "{text}");
        }
        let drawn = ["a,b c", "", "1.5,2", "-3,NA"];
        assert_eq!(
            as_csv("| a | b c |\n|---|:--:|\n| 1.5 | 2 |\n|-3| NA|").unwrap().lines().collect::<Vec<_>>(),
            drawn
        );
        assert_eq!(
            as_csv(" a   | b c\n-----+----\n 1.5 |   2\n -3  | NA\n(2 rows)")
                .unwrap()
                .lines()
                .take(4)
                .collect::<Vec<_>>(),
            drawn
        );
        let framed = "+-----+-----+\n| a   | b c |\n+-----+-----+\n| 1.5 |   2 |\n+-----+-----+\n";
        assert_eq!(as_csv(framed).unwrap(), "\na,b c\n\n1.5,2\n\n");
        assert_eq!(
            as_csv("| a | b |\n|--|--|\n| x, y | \"z\" |\n").unwrap().lines().last(),
            Some("\"x, y\",\"\"\"z\"\"\"")
        );
        // Names of rows as R writes them.
        assert_eq!(as_csv("\"x\" \"y\"\n\"1\" 5 6\n\"2\" 7 8\n").unwrap(), ",x,y\n1,5,6\n2,7,8\n");
        for other in [
            "text\ngood 5\nbad 3\n",
            "a b\nc d\ne f\n",
            "a,b\n1 2,3\n",
            "1 2\n3 4 5\n",
            "one\n1\n2\n",
            "x\t1 2\ny\t3 4\nz\t5 6\n",
            "a|b\n1|2\n",
        ] {
            assert_eq!(as_csv(other), None, "{other}");
        }
    }

    #[test]
    fn lines_before_the_names_are_left_out() {
        let (line, header, rows) = read("Source,World,\n\nUpdated,2024\n\nname,code,2000,2001\na,b,1,2\nc,d,3,4\n");
        assert_eq!((line, header.join("|")), (5, "name|code|2000|2001".into()));
        assert_eq!(rows, ["6 a|b|1|2", "7 c|d|3|4"]);
        let (_, header, rows) = read("Bank of A,statement\n\ndate,x,y\n2020-01-01,1,2\n2020-01-02,3,4\n");
        assert_eq!((header.join("|"), rows.len()), ("date|x|y".into(), 2));
        let (_, header, rows) = read("x,y\n\"a\",b,2\nc,d,4\ne,f,6\n");
        assert_eq!((header.join("|"), &*rows[0]), ("|x|y".into(), "2 a|b|2"), "names of rows as R writes them");
        assert_eq!(read("x,y\na,b,\nc,d,\ne,f,\n").1.join("|"), "x|y");
        // Not where the table itself is uneven, or has no names.
        assert!(Table::read("x\na,b\n1,2\n3\n", Form::Csv, "f").is_err());
        assert!(Table::read("x\n1,2\n3,4\n5,6\n", Form::Csv, "f").is_err());
    }

    #[test]
    fn names_may_take_several_lines() {
        let rows = "2020-01-01,1,2\n2020-01-02,3,4\n";
        let named = |names: &str| read(&format!("{names}\n{rows}")).1.join("|");
        assert_eq!(named("Price,Close,High\nTicker,AA,AA\nDate,,"), "Date|Close|High");
        assert_eq!(named("Price,Close,Close\nTicker,AA,BB\nDate,,"), "Date|AA|BB");
        let several = read("Price,Close,Close,High\nTicker,AA,BB,AA\nDate,,,\n2020-01-01,1,2,3\n2020-01-02,4,5,6\n").1;
        assert_eq!(several.join("|"), "Date|Close AA|Close BB|High AA");
        assert_eq!(read(&format!("Price,Close,High\nTicker,AA,AA\nDate,,\n{rows}")).2[0], "4 2020-01-01|1|2");
        // A day without values is none.
        assert_eq!(named("Date,a,b\n2019-01-01,,"), "Date|a|b");
        assert_eq!(named("name,a,b\nAruba,,"), "name|a|b");
    }
}
