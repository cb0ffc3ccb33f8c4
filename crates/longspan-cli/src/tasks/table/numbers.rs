//! Numbers as people write them: of a column all in one way, which is found from all its cells.

use std::cell::OnceCell;

use anyhow::{Result, bail};
use serde_json::Value;

use super::{Row, Table, is_missing, text, value};
use crate::run::columns::{Columns, Decimal};
use crate::terminal::notes::note;
use crate::terminal::samples::listed;

/// Signs of money,
const MONEY: [char; 14] = ['$', '€', '£', '¥', '₹', '₽', '₩', '₺', '₫', '₴', '₦', '₪', '฿', '₱'];

/// words for it before a number,
const CODES: &str =
    "USD|EUR|GBP|CHF|JPY|CNY|INR|RUB|BRL|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|MXN|ZAR|TRY|KRW|Rs|Rs.|Fr.|kr";

/// letters right behind it for thousands and more, as in exports of share prices, with powers of ten: `1.2M`, `350K`,
const POWERS: [(char, &str); 5] = [('K', "3"), ('k', "3"), ('M', "6"), ('B', "9"), ('T', "12")];

/// words that are 0 and 1,
const TRUTHS: [[&str; 2]; 5] = [["false", "true"], ["no", "yes"], ["off", "on"], ["n", "y"], ["f", "t"]];

/// and what says that a number is negative.
const MINUS: [char; 3] = ['-', '−', '–'];

/// How the numbers of a column are written.
#[derive(Debug, Clone, Default)]
struct Notation<'a> {
    /// What stands before and after each, such as `$` or `%`.
    units: [&'a str; 2],
    /// Whether one has a letter for thousands or more behind it.
    has_power: bool,
    /// The decimal mark, if something tells it.
    told: Option<Decimal>,
    /// A number whose mark, if nothing else tells, is a decimal one or stands between thousands.
    doubt: Option<&'a str>,
}

/// A number without its sign and what stands around it.
struct Written<'a> {
    is_negative: bool,
    units: [&'a str; 2],
    digits: &'a str,
    power: Option<&'static str>,
}

impl<'a> Written<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let is_digit = |c: char| c.is_ascii_digit();
        let (first, end) = (&text[..text.find(is_digit)?], text.rfind(is_digit)? + 1);
        // `.5` begins with its point, `Rs.5` does not.
        let before = first.strip_suffix(['.', ',']).filter(|rest| !rest.ends_with(char::is_alphabetic));
        let (before, after) = (before.unwrap_or(first), &text[end..]);
        let found = POWERS.iter().find_map(|(letter, power)| Some((after.strip_prefix(*letter)?, *power)));
        let (after, power) = match found {
            Some((after, power)) if !after.starts_with(char::is_alphanumeric) => (after.trim(), Some(power)),
            _ => (after.trim(), None),
        };
        // Some programs write the sign last, and accounts put what is negative in brackets.
        let is_last = after == "-";
        let signs = before.matches(MINUS).count() + before.matches('(').count() + usize::from(is_last);
        let around = |c: char| c.is_whitespace() || MINUS.contains(&c) || "+(".contains(c);
        let units = [before.trim_matches(around), if is_last { "" } else { after.trim_matches(')').trim() }];
        let is_money = units[0].contains(MONEY) && units[0].chars().count() <= 4;
        let is_before = is_money || units[0].is_empty() || CODES.split('|').any(|code| code == units[0]);
        let is_unit = |c: char| c.is_alphabetic() || MONEY.contains(&c) || "%‰°/.²³".contains(c);
        let is_after = units[1].chars().count() <= 8 && units[1].chars().all(is_unit);
        let is_whole = signs < 2 && before.contains('(') == after.contains(')') && is_before && is_after;
        is_whole.then_some(Self { is_negative: signs > 0, units, digits: &text[before.len()..end], power })
    }

    /// The decimal mark by this number alone, and whether it may as well stand between thousands: three digits follow it, and few come before.
    fn mark(&self) -> Option<(Decimal, bool)> {
        let at = self.digits.rfind(['.', ','])?;
        let (before, after) = (&self.digits[..at], &self.digits[at + 1..]);
        let is_point = self.digits[at..].starts_with('.');
        if before.contains(&self.digits[at..=at]) {
            return Some((if is_point { Decimal::Comma } else { Decimal::Point }, false));
        }
        let are_digits = before.bytes().chain(after.bytes()).all(|byte| byte.is_ascii_digit());
        let may_group = (1..=3).contains(&before.len()) && after.len() == 3 && !before.starts_with('0');
        Some((if is_point { Decimal::Point } else { Decimal::Comma }, are_digits && may_group))
    }

    /// The number; `None` where marks that are not decimal do not stand between thousands.
    fn number(&self, decimal: Decimal) -> Option<f64> {
        if !self.digits.contains(',')
            && (decimal == Decimal::Point || !self.digits.contains('.'))
            && let Some(number) = self.signed(self.digits)
        {
            return Some(number);
        }
        let (mantissa, exponent) = self.digits.split_at(self.digits.find(['e', 'E']).unwrap_or(self.digits.len()));
        let (whole, fraction) = mantissa.split_once(decimal.mark()).unwrap_or((mantissa, ""));
        let without_marks;
        let mut plain = whole;
        if let Some(mark) = whole.chars().find(|c| !c.is_ascii_digit()) {
            let parts: Vec<&str> = whole.split(mark).collect();
            let (first, rest) = parts.split_first()?;
            let (last, middle) = rest.split_last()?;
            // In India pairs of digits come before the last three.
            let is_group = |digits: usize| middle.iter().all(|part| part.len() == digits);
            let is_mark = mark.is_whitespace() || ['.', ',', '\'', '’'].contains(&mark);
            let are_groups = is_group(3) || mark == ',' && is_group(2);
            if !is_mark || !are_groups || last.len() != 3 || !(1..=3).contains(&first.len()) || first.starts_with('0') {
                return None;
            }
            without_marks = parts.concat();
            plain = &without_marks;
        }
        self.signed(&[plain, ".", fraction, exponent].concat())
    }

    fn signed(&self, digits: &str) -> Option<f64> {
        let number = self.power.map_or_else(|| digits.parse(), |power| [digits, "e", power].concat().parse());
        let number: f64 = number.ok()?;
        number.is_finite().then_some(if self.is_negative { -number } else { number })
    }
}

impl Notation<'_> {
    fn decimal(&self) -> Decimal {
        let is_comma = self.doubt.is_some_and(|text| text.contains(','));
        self.told.unwrap_or(if is_comma { Decimal::Comma } else { Decimal::Point })
    }
}

impl Table {
    /// Takes the decimal mark that a person or the run names.
    pub fn name_decimal(&mut self, columns: &Columns) {
        if columns.decimal.is_some() {
            self.decimal = OnceCell::from(columns.decimal);
        }
    }

    /// The numbers of a column, NaN where one is missing, or the first row whose cell is no number as the others are.
    pub fn numbers(&self, place: usize) -> Result<Vec<f64>, &Row> {
        let numbers = match self.plain_numbers(place) {
            Some(numbers) => numbers,
            None => {
                let decimal = self.notation(place)?.decimal();
                let number = |row: &Row| match text_of(&row.cells[place]) {
                    Some(text) => Written::of(text)?.number(decimal),
                    None => plain(&row.cells[place]),
                };
                self.rows.iter().map(|row| number(row).ok_or(row)).collect::<Result<_, _>>()?
            }
        };
        // Beside 0 and 1 alone a truth value is a number.
        let others = numbers.iter().any(|number| !number.is_nan() && ![0.0, 1.0].contains(number));
        let slip = self.rows.iter().find(|row| others && truth(&row.cells[place]).is_some());
        slip.map_or(Ok(numbers), Err)
    }

    /// The numbers of a column as programs write them, whose points cannot stand between thousands.
    fn plain_numbers(&self, place: usize) -> Option<Vec<f64>> {
        let numbers = self.rows.iter().map(|row| plain(&row.cells[place])).collect::<Option<Vec<f64>>>()?;
        let texts = self.rows.iter().filter_map(|row| text_of(&row.cells[place])).filter(|text| text.contains('.'));
        let mut marks = texts.map(|text| Written::of(text)?.mark()).filter(|_| self.commas).peekable();
        let are_doubtful = marks.peek().is_some() && marks.all(|mark| mark.is_some_and(|(_, doubt)| doubt));
        (!are_doubtful || self.decimal() == Some(Decimal::Point)).then_some(numbers)
    }

    /// How a column is written as far as it tells itself, or the first row that is written otherwise.
    fn own_notation(&self, place: usize) -> Result<Notation<'_>, &Row> {
        let mut found = Notation::default();
        let mut units = None;
        for row in &self.rows {
            let text = match &row.cells[place] {
                Value::Array(_) | Value::Object(_) => return Err(row),
                Value::Number(_) => "0",
                cell => match text_of(cell) {
                    Some(text) => text,
                    None => continue,
                },
            };
            let one = Written::of(text).filter(|one| *units.get_or_insert(one.units) == one.units).ok_or(row)?;
            found.has_power |= one.power.is_some();
            match one.mark() {
                Some((decimal, false)) => drop(found.told.get_or_insert(decimal)),
                Some(_) => drop(found.doubt.get_or_insert(text)),
                None => {}
            }
            one.number(found.told.unwrap_or_default()).ok_or(row)?;
        }
        let doubt = found.doubt.filter(|_| found.told.is_none());
        Ok(Notation { units: units.unwrap_or_default(), doubt, ..found })
    }

    /// The same, and as other columns tell.
    fn notation(&self, place: usize) -> Result<Notation<'_>, &Row> {
        let own = self.own_notation(place)?;
        let Some(text) = own.doubt else { return Ok(own) };
        if let Some(told) = self.decimal() {
            return Ok(Notation { told: Some(told), doubt: None, ..own });
        }
        // What costs dollars or pounds has no decimal comma, and programs write points, but where spreadsheets write semicolons.
        let is_comma = text.contains(',');
        let is_clear = if is_comma { own.units.concat().contains(['$', '£']) } else { self.delimiter != b';' };
        Ok(Notation { told: is_clear.then_some(Decimal::Point), ..own })
    }

    /// The decimal mark of the file: that which a person named, or else that of its columns, where all that tell have the same.
    fn decimal(&self) -> Option<Decimal> {
        *self.decimal.get_or_init(|| {
            let mut found = (0..self.header.len()).filter_map(|place| self.own_notation(place).ok()?.told);
            let first = found.next()?;
            found.all(|other| other == first).then_some(first)
        })
    }

    /// A label, unless its numbers have words or letters beside them: `5 stars` and `10K` are names of classes.
    fn without_words(&self, label: Option<usize>) -> Option<usize> {
        let has_words = |one: Notation<'_>| one.has_power || one.units.concat().contains(char::is_alphabetic);
        label.filter(|place| !self.own_notation(*place).is_ok_and(has_words))
    }

    /// Says of numbers, and of labels that may be some, how they are written where they are no plain ones, and asks where that may mean two
    /// things. The decimal mark, where one matters.
    pub fn settle_numbers(&self, places: &[usize], label: Option<usize>) -> Result<Option<Decimal>> {
        let (mut said, mut decimal, label) = (Vec::new(), None, self.without_words(label));
        for place in places {
            let first = self.rows.iter().find_map(|row| Some((text(&row.cells[*place])?, truth(&row.cells[*place]))));
            if let Some((text, Some(flag))) = first
                && self.numbers(*place).is_ok()
            {
                said.push(format!("{text:?} of `{}` is {}", self.header[*place], u8::from(flag)));
            }
        }
        for place in places.iter().copied().chain(label).filter(|place| self.plain_numbers(*place).is_none()) {
            let (Ok(one), title) = (self.notation(place), &self.header[place]) else { continue };
            if let (Some(text), None) = (one.doubt, one.told) {
                // As a label it stays a text.
                if label == Some(place) && text.contains(',') {
                    continue;
                }
                let number = |decimal| Written::of(text).and_then(|one| one.number(decimal)).unwrap_or(f64::NAN);
                let [point, comma] = [Decimal::Point, Decimal::Comma].map(number);
                bail!(
                    "{}: {text:?} in the column `{title}` may be {point} or {comma}, and no other number tells; say which mark is decimal with \
                     --decimal point or --decimal comma",
                    self.at_header()
                );
            }
            decimal = decimal.or(one.told);
            // Between semicolons a decimal comma is usual, and between commas a point.
            let usual = |text: &str| value(&if self.delimiter == b',' { text.into() } else { text.replace(',', ".") });
            let is_said =
                |text: &str, number| usual(text) != Some(number) || self.delimiter == b'\t' && one.doubt.is_some();
            said.extend(self.rows.iter().find_map(|row| {
                let text = text_of(&row.cells[place])?;
                let number = Written::of(text)?.number(one.decimal())?;
                is_said(text, number).then(|| format!("{text:?} of `{title}` is {number}"))
            }));
        }
        if !said.is_empty() {
            note(format_args!(
                "{}: numbers are read as they are written: {}; answers are plain numbers in the same units",
                self.name,
                listed(&said, 3)
            ));
        }
        Ok(decimal)
    }

    /// Refuses columns of the same kind some of which have another unit than the first.
    pub fn check_units(&self, places: &[usize]) -> Result<()> {
        let mut first = None;
        for &place in places {
            let Some(row) = self.rows.iter().find(|row| text_of(&row.cells[place]).is_some()) else { continue };
            let text = text_of(&row.cells[place]).unwrap_or_default();
            let units = Written::of(text).map_or(["", ""], |one| one.units);
            if *first.get_or_insert(units) != units {
                let title = &self.header[place];
                let problem =
                    format_args!("{text:?} in the column `{title}` is no number as in other columns; write all alike");
                return Err(row.wrong(&self.name, problem));
            }
        }
        Ok(())
    }

    /// The same with plain numbers in those of these columns that hold others, if any does: times and labels are read as numbers later.
    pub fn with_plain_numbers(&self, times: &[usize], label: Option<usize>) -> Option<Self> {
        let found = |place: usize| {
            let is_time = label != Some(place);
            let numbers = self.numbers(place).ok().filter(|_| self.plain_numbers(place).is_none())?;
            let Notation { units, told, doubt, .. } = self.notation(place).ok()?;
            (told.is_some() || doubt.is_none()).then_some((place, numbers)).filter(|_| units == ["", ""] || !is_time)
        };
        let labels = self.without_words(label);
        let columns: Vec<(usize, Vec<f64>)> = times.iter().copied().chain(labels).filter_map(found).collect();
        let mut plain = (!columns.is_empty()).then(|| self.clone())?;
        for (place, numbers) in columns {
            for (row, number) in plain.rows.iter_mut().zip(numbers) {
                row.cells[place] = if number.is_nan() { Value::Null } else { Value::String(number.to_string()) };
            }
        }
        Some(plain)
    }
}

/// The text of a cell that is neither missing nor a truth value.
fn text_of(cell: &Value) -> Option<&str> {
    cell.as_str().filter(|text| !is_missing(text) && truth(cell).is_none())
}

/// A finite number as programs write it, NaN where it is missing, `None` where a cell is neither.
fn plain(cell: &Value) -> Option<f64> {
    let number = match cell {
        Value::Null => Some(f64::NAN),
        Value::Number(number) => number.as_f64(),
        Value::String(text) => value(text),
        _ => None,
    };
    number.or_else(|| truth(cell).map(|flag| f64::from(u8::from(flag))))
}

fn truth(cell: &Value) -> Option<bool> {
    match cell {
        Value::Bool(flag) => Some(*flag),
        Value::String(text) => {
            let place = TRUTHS.as_flattened().iter().position(|word| text.trim().eq_ignore_ascii_case(word));
            place.map(|place| place % 2 == 1)
        }
        _ => None,
    }
}

/// Whether a text is a number in some way of writing.
pub fn is_number(text: &str) -> bool {
    let marks = [Decimal::Point, Decimal::Comma];
    Written::of(text).is_some_and(|one| marks.into_iter().any(|decimal| one.number(decimal).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::table::Form;

    fn read(text: &str) -> Table {
        let form = if text.contains('\t') { Form::Tabs } else { Form::Csv };
        Table::read(text, form, "f").unwrap().expect("a table")
    }

    /// The numbers of the first column, or the line that is none, once what may be two numbers is asked about.
    fn numbers(text: &str) -> Result<Vec<f64>, String> {
        let table = read(text);
        let found = table.numbers(0).map_err(|row| format!("line {}", row.line))?;
        table.settle_numbers(&[0], None).map_err(|error| error.to_string())?;
        Ok(found)
    }

    #[test]
    fn numbers_are_read_in_the_way_of_their_column() {
        for (text, expected) in [
            ("x,y\n\"$1,234.56\",a\n$5.00,b\n($12.50),c\n-$1,d\n", &[1234.56, 5.0, -12.5, -1.0][..]),
            ("x;y\n€ 12,50;a\n€ 1.000,00;b\n", &[12.5, 1000.0]),
            ("x,y\n12%,a\n+1.5 %,b\n(3%),c\nNA,d\n", &[12.0, 1.5, -3.0, f64::NAN]),
            ("x,y\n\"1,234,567\",a\n999,b\n\"1,000\",c\n", &[1_234_567.0, 999.0, 1000.0]),
            ("x;y\n1 234;a\n12\u{a0}345;b\n7;c\n", &[1234.0, 12_345.0, 7.0]),
            ("x;y\n1\u{202f}234,5;a\n0,25;b\n", &[1234.5, 0.25]),
            ("x,y\n5'000,a\n1’250’000.5,b\n", &[5000.0, 1_250_000.5]),
            ("x,y\n\"12,34,567\",a\n\"1,23,456.5\",b\n", &[1_234_567.0, 123_456.5]),
            ("x,y\n(12.5),a\n−3,b\n4,c\n", &[-12.5, -3.0, 4.0]),
            ("x;y\n12,5-;a\n3,0;b\n", &[-12.5, 3.0]),
            ("x,y\nUSD 5,a\nUSD 1.5,b\n", &[5.0, 1.5]),
            ("x,y\nRs.500,a\nRs.70,b\n", &[500.0, 70.0]),
            ("x,y\n20.5 °C,a\n-3 °C,b\n", &[20.5, -3.0]),
            ("x,y\n\"1,5\",a\n\"0,25\",b\n", &[1.5, 0.25]),
            // A mark is told by other numbers of its column, then by other columns, by dollars, and by what programs write.
            ("x,y\n\"1,234\",a\n\"1,234.5\",b\n", &[1234.0, 1234.5]),
            ("x,y\n\"1,234\",0.5\n999,0.7\n", &[1234.0, 999.0]),
            ("x\ty\n1,500\t2.25\n", &[1500.0]),
            ("x;y\n1,500;2,5\n2,250;3,5\n", &[1.5, 2.25]),
            ("x,y\n\"$1,234\",a\n$999,b\n", &[1234.0, 999.0]),
            ("x;y\n1,5;a\n1.234,5;b\n2;c\n", &[1.5, 1234.5, 2.0]),
            ("x;y\n1.5;a\n1.250;b\n", &[1.5, 1.25]),
            ("x;y\n1.500;2,5\n12.000;1,5\n7;1,5\n", &[1500.0, 12_000.0, 7.0]),
            ("x;y\n1.500;2,5\n0.25;1,5\n", &[1.5, 0.25]),
            ("x;y\n0.500;2,5\n0.250;1,5\n", &[0.5, 0.25]),
            ("x\ty\n1.500\ta\n999\tb\n", &[1.5, 999.0]),
            ("x,y\n1.500,a\n999,b\n", &[1.5, 999.0]),
            ("sep=;\r\nx;y\r\n1,5;a\r\n", &[1.5]),
            ("x;y\n-12.345.678,5;a\n1e3;b\n1,5e-1;c\n", &[-12_345_678.5, 1e3, 0.15]),
            ("x,y\n1.5,a\n.5,b\n1e-3,c\n", &[1.5, 0.5, 1e-3]),
            ("x\n1\nTRUE\nfalse\n", &[1.0, 1.0, 0.0]),
            ("x,y\nYes,1\nno,2\n-,3\n", &[1.0, 0.0, f64::NAN]),
            ("x,y\noff,1\nON,2\n", &[0.0, 1.0]),
            // Thousands and more by their letters, whichever a file has.
            ("x,y\n1.2M,a\n350.5K,b\n2.3B,c\n-,d\n999,e\n", &[1.2e6, 350_500.0, 2.3e9, f64::NAN, 999.0]),
            ("x,y\n\"$1,234.5M\",a\n($2M),b\n", &[1_234_500_000.0, -2e6]),
            ("x;y\n1,2M;a\n350K;b\n", &[1.2e6, 350_000.0]),
            ("x,y\n300 K,a\n295.5 K,b\n", &[300.0, 295.5]),
            ("x,y\nNA,1\n,2\n#N/A,3\nnull,4\n", &[f64::NAN; 4]),
        ] {
            let found = numbers(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
            assert!(found.len() == expected.len() && found.iter().zip(expected).all(same), "{text}: {found:?}");
        }
    }

    #[test]
    fn what_is_no_number_as_the_others_is_named_and_what_may_be_two_is_asked_about() {
        for (text, line) in [
            ("x;y\n1,5;a\n1.25;b\n", 3),
            ("x;y\n1,5;a\n1,234.5;b\n", 3),
            ("x;y\n1,5;a\n1.2345,6;b\n", 3),
            ("x;y\n1,5;a\n12345.678,9;b\n", 3),
            ("x,y\n$5,a\n€5,b\n", 3),
            ("x,y\n5%,a\n0.05,b\n", 3),
            ("x,y\n1.2M,a\n900 K,b\n", 3),
            ("x,y\nyes,a\nperhaps,b\n", 3),
            ("x\n1\ninf\n", 3),
            ("x\n1.5\nTRUE\n0\n", 3),
            ("x\n12-13\n", 2),
            ("x\nSKU 12\n", 2),
            ("x\nA12\n", 2),
            ("x\n(5\n", 2),
            ("x\n12 34\n", 2),
            ("x\n31.12.2023\n", 2),
        ] {
            assert_eq!(numbers(text).unwrap_err(), format!("line {line}"), "{text}");
        }
        for (text, part) in [
            ("x,y\n\"1,101\",a\n\"1,102\",b\n", "\"1,101\" in the column `x` may be 1101 or 1.101"),
            ("x;y\n999;a\n1,500;b\n", "\"1,500\" in the column `x` may be 1500 or 1.5"),
            ("x;y\n2.999;a\n1.500;b\n", "\"2.999\" in the column `x` may be 2.999 or 2999"),
            // Other columns contradict each other.
            ("x;y;z\n1.500;2,5;2.5\n", "\"1.500\" in the column `x` may be 1.5 or 1500"),
        ] {
            let error = numbers(text).unwrap_err();
            assert!(error.contains(part) && error.contains("--decimal point or --decimal comma"), "{text}: {error}");
        }
        // Of labels words are kept, and signs are not.
        for (text, expected) in
            [("x,y\n5 stars,a\n1 stars,b\n", None), ("x,y\n10K,a\n5K,b\n", None), ("x,y\n5%,a\n1%,b\n", Some("5"))]
        {
            let plain = read(text).with_plain_numbers(&[], Some(0));
            assert_eq!(plain.as_ref().and_then(|table| table.rows[0].cells[0].as_str()), expected, "{text}");
        }
        for (decimal, expected) in [(Decimal::Point, [1500.0, 999.0]), (Decimal::Comma, [1.5, 999.0])] {
            let mut table = read("x;y\n1,500;a\n999;b\n");
            table.name_decimal(&Columns { decimal: Some(decimal), ..Columns::default() });
            assert_eq!(table.numbers(0).unwrap(), expected);
            assert_eq!(table.settle_numbers(&[0], None).unwrap(), Some(decimal));
        }
    }
}
