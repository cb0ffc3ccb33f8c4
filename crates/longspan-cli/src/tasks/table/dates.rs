//! Dates as people write them: one format for a column, found from its texts, and the calendar that they step on.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use jiff::civil::{DateTime, Weekday};
use jiff::fmt::strtime::{self, BrokenDownTime};
use jiff::tz::Offset;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// How dates are written, and what a step from one to the next is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dates {
    /// As `strftime` has it, and `%q` for a quarter.
    pub format: String,
    pub calendar: Calendar,
    /// Seconds from UTC, where the format has a time zone.
    #[serde(default)]
    offset: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Calendar {
    Seconds,
    /// Seconds on the clock of the place: all dates are at one time of the day, and its distance from UTC changes.
    Days,
    /// Months since the year 0: all dates are on one day of the month, or its last where it is shorter, at one second of the day, or an
    /// hour from it: clocks of a place change, and its midnights in UTC with them.
    Months {
        day: i8,
        second: i64,
    },
}

/// Days, as people write them,
const DAYS: &str = "%Y-%m-%d|%Y/%m/%d|%Y.%m.%d|%Y%m%d|%d.%m.%Y|%d.%m.%y|%d/%m/%Y|%m/%d/%Y|%d-%m-%Y|%m-%d-%Y|%d/%m/%y|%m/%d/%y|\
                    %d-%m-%y|%m-%d-%y|%y/%m/%d|%y-%m-%d|%y.%m.%d|\
                    %b %d %Y|%b %d, %Y|%b-%d-%Y|%B %d %Y|%B %d, %Y|%d %b %Y|%d-%b-%Y|%d-%b-%y|%d %b %y|%d %B %Y|%Y-%b-%d|%d/%b/%Y|\
                    %d. %m. %Y|%Y_%m_%d|%Y年%m月%d日|%A %d %B %Y|\
                    %a, %d %b %Y|%a, %b %d, %Y|%a %b %d %Y|%a %d %b %Y|%a %d.%m.%Y|%a %d/%m/%Y|%a %m/%d/%Y|%A, %B %d, %Y|%A, %d %B %Y";

/// months, quarters, weeks, and a year and the next one (a space is none or more),
const MONTHS: &str = "%Y-%m|%Y/%m|%Y_%m|%Y年%m月|%Y %b|%Y-%b|%Y %B|%b %Y|%b. %Y|%B %Y|%B, %Y|%b-%Y|%b-%y|%b %y|%b'%y|%m/%Y|%YM%m|%Y-M%m|\
                      %Y Q%q|%Y - Q%q|%Y/Q%q|%Y.Q%q|%Y-%q|%Y/%q|Q%q %Y|Q%q-%Y|Q%q/%Y|q%q %Y|%Yq%q|%qQ %Y|%qQ %y|Q%q %y|Q%q FY%Y|\
                      Q%q FY%y|FY%Y Q%q|FY%Y-Q%q|FY%y Q%q|FY%Y|FY%y|%Ym%m|%Y-%B|%G-W%V-%u|%G-W%V|%G W%V|%Y/%y|%Y-%y|%Y/%Y|%Y-%Y";

/// times of the day after a day and a space or a T,
const TIMES: &str = "%H:%M|%H:%M:%S|%H:%M:%S%.f|%H:%M:%S,%f|%H-%M-%S|%H%M%S|%H%M|%I:%M %p|%I:%M:%S %p";

/// time zones after them,
const ZONES: &str = "|Z|%:z|%z|%:::z| %:z| %z| UTC| GMT";

/// those of logs, of C and of hours,
const LOGS: &str = "%d/%b/%Y:%H:%M:%S %z|%a %b %d %H:%M:%S %Y|%Y%m%d_%H%M%S|\
                    %Y-%m-%d %H|%Y-%m-%d-%H|%Y-%m-%dT%H|%Y-%m-%dT%HZ|%Y/%m/%d %H|%Y%m%d %H";

/// dates that look like numbers, by their length; 0 is any.
const NUMBERS: [(usize, &str); 13] = [
    (8, "%Y%m%d"),
    (8, "%d%m%Y"),
    (8, "%m%d%Y"),
    (10, "%Y%m%d%H"),
    (6, "%Y%m"),
    (6, "%G%V"),
    (6, "%y%m%d"),
    (7, "%Y.%m"),
    (12, "%Y%m%d%H%M"),
    (14, "%Y%m%d%H%M%S"),
    (5, "%Y%q"),
    (6, "%Y.%q"),
    (0, "%Y.%m"),
];

/// and counts since 1970, in nanoseconds.
const EPOCHS: [(&str, i128); 4] =
    [("seconds", 1_000_000_000), ("milliseconds", 1_000_000), ("microseconds", 1_000), ("nanoseconds", 1)];

/// Days as spreadsheets count them, with the time of the day as a fraction; this one begins 1970.
pub const EXCEL: &str = "excel";
const EXCEL_1970: f64 = 25_569.0;
const DAY: f64 = 86_400.0;

/// Seconds by which the clocks of a place change.
const HOUR: i64 = 3600;

/// Texts that are tried for the way in which a format prints.
const SOME: usize = 500;

impl Dates {
    /// The dates that all these texts are, in `wanted` where a person said how they are written; `None` where they are numbers or no
    /// dates at all. Numbers are dates where all are like `20230227`, `202302`, `230227` or `2023.02`.
    pub fn of(texts: &[&str], wanted: Option<&str>) -> Result<Option<Self>, String> {
        let Some(first) = texts.first().copied().filter(|_| wanted != Some("number")) else { return Ok(None) };
        let candidates = match wanted {
            Some(format) if parse(format, first).is_none() => {
                return Err(format!(
                    "{first:?} is no date of the form {format}; see `strftime` for what stands after %"
                ));
            }
            Some(format) => vec![format.to_string()],
            None if texts.iter().all(|text| text.parse::<f64>().is_ok()) => {
                let are_dates = |(length, format): &(usize, &str)| {
                    let year = |text: &&str| parse(format, text).map(|(date, _)| date.year());
                    // Counts of seconds since 1970 have as many digits as hours, and begin with 17 today.
                    let first = if *length == 10 { 1900 } else { 1700 };
                    texts.iter().all(|text| {
                        [text.len(), 0].contains(length) && year(text).is_some_and(|year| (first..2200).contains(&year))
                    })
                };
                // Within one month, or one year of weeks or quarters, numbers might as well count up.
                let differ = |format: &str, of: fn(DateTime) -> i16| {
                    texts.iter().filter_map(|text| Some(of(parse(format, text)?.0))).collect::<BTreeSet<_>>().len() > 1
                };
                let fits = |form: &&(usize, &str)| {
                    are_dates(form)
                        && match form.1 {
                            "%y%m%d" | "%d%m%Y" | "%m%d%Y" => differ(form.1, |date| i16::from(date.month())),
                            "%G%V" | "%Y%q" | "%Y.%q" => differ(form.1, DateTime::year),
                            // 2018.1 and 2018.10 are two months where all twelve are there.
                            "%Y.%m" if form.0 == 0 => {
                                let is_there = |month| texts.iter().any(|text| text.ends_with(&format!(".{month}")));
                                (1..=12).all(is_there)
                            }
                            _ => true,
                        }
                };
                let mut found: Vec<&str> = NUMBERS.iter().filter(fits).map(|(_, format)| *format).collect();
                // Of others than the day and the month that change places the first one counts.
                found.truncate(if found.starts_with(&["%d%m%Y", "%m%d%Y"]) { 2 } else { 1 });
                found.extend(epoch_of(texts).filter(|_| found.is_empty()));
                if found.is_empty() && are_bare_months(texts) {
                    let october = texts.iter().find(|text| text.ends_with(".1")).unwrap_or(&first);
                    return Err(format!(
                        "{october:?} looks like a year and a month, whose last 0 is gone in October: write 2024-10, or give --dates number"
                    ));
                }
                found.into_iter().map(String::from).collect()
            }
            None => formats_of(first).collect(),
        };
        let readable = |format: &str| texts.iter().take_while(|text| parse(format, text).is_some()).count();
        let counts: Vec<usize> = candidates.iter().map(|format| readable(format)).collect();
        let most = counts.iter().max().copied().unwrap_or(0);
        if most == 0 {
            return Ok(None);
        }
        let mut candidates: Vec<String> =
            candidates.into_iter().zip(counts).filter(|(_, count)| *count == most).map(|(format, _)| format).collect();
        if candidates.len() > 1 {
            // A year and the next one are months where there are few of them, and quarters have one digit.
            let years = |format: &str| {
                let dates = texts[..most].iter().filter_map(|text| parse(format, text));
                dates.map(|(date, _)| date.year()).collect::<BTreeSet<_>>().len()
            };
            let are_two = candidates.iter().any(|format| of_two_years(format).is_some() && years(format) > 2);
            let may_be_quarters = texts.iter().all(|text| text.len() == 6) && years("%Y-%q").max(years("%Y/%q")) > 1;
            candidates.retain(|format| match &format[..] {
                "%Y-%q" | "%Y/%q" => may_be_quarters,
                _ => of_two_years(format).is_some() == are_two,
            });
        }
        // Two digits of a year stand first or last: where only one of both brings the dates into an order, it is that.
        let year_first = |format: &String| format.starts_with("%y");
        let in_order = |format: &&String| {
            let dates: Vec<_> =
                texts[..most].iter().filter_map(|text| parse(format, text)).map(|(date, _)| date).collect();
            is_ordered(&dates)
        };
        let in_order: Vec<String> = candidates.iter().filter(in_order).cloned().collect();
        let ordered: BTreeSet<bool> = in_order.iter().map(year_first).collect();
        if let (Some(first), 1) = (ordered.first(), ordered.len()) {
            candidates.retain(|format| year_first(format) == *first);
        }
        // Months such as 1/1/1957 and 2/1/1957 might be days as well, but then the years tear them apart.
        let is_even = |format: &&String| candidates.len() > 1 && steps_evenly(format, &texts[..most]);
        let even: Vec<String> = candidates.iter().filter(is_even).cloned().collect();
        if even.len() == 1 {
            candidates = even;
        }
        let Some(best) = candidates.first() else { return Ok(None) };
        if wanted.is_none()
            && !in_order.contains(best)
            && let Some(text) = swapped(best, &texts[..most])
        {
            return Err(format!(
                "dates are in order only if the day and the month change places in some, such as {text:?}, as programs do that read \
                 dates of another country; write all in one way, or say which it is with --dates '{best}'"
            ));
        }
        // The same texts as other days: the day and the month change places.
        for other in &candidates[1..] {
            if let Some(text) = texts[..most].iter().find(|text| parse(best, text) != parse(other, text)) {
                return Err(format!(
                    "{text:?} may be two days (%d is the day, %m the month, %y the year); say which with --dates '{best}' or --dates '{other}'"
                ));
            }
        }
        let some = &texts[..most.min(SOME)];
        let fraction = some.iter().map(|text| digits_of_fraction(text)).max().unwrap_or(0);
        let printed: Vec<String> = candidates.iter().flat_map(|format| variants(format, fraction)).collect();
        // The first of those that print the most texts as they stand.
        let printed = printed.into_iter().rev().max_by_key(|format| printed_alike(format, some));
        let format = printed.filter(|_| wanted.is_none()).unwrap_or_else(|| best.clone());
        let dates: Vec<(DateTime, Option<Offset>)> =
            texts[..most].iter().filter_map(|text| parse(&format, text)).collect();
        let years: BTreeSet<i16> = dates.iter().map(|(date, _)| date.year()).collect();
        if format.contains("%y") && years.iter().zip(years.iter().skip(1)).any(|(year, next)| next - year > 50) {
            return Err(format!(
                "of two digits of a year, 69 to 99 are read as 19.. and others as 20.., which tears dates such as {first:?} apart; write four"
            ));
        }
        let offset = dates.last().and_then(|(_, offset)| *offset).map_or(0, Offset::seconds);
        Ok(Some(Self { calendar: Calendar::of(&dates), format, offset }))
    }

    /// The dates from one on, that count in months or in seconds.
    pub fn starting(text: &str, months: bool) -> Option<Self> {
        let format = formats_of(text).max_by_key(|format| printed_alike(format, &[text]))?;
        let (date, offset) = parse(&format, text)?;
        let calendar =
            if months { Calendar::Months { day: date.day(), second: seconds(date) } } else { Calendar::Seconds };
        Some(Self { format, calendar, offset: offset.map_or(0, Offset::seconds) })
    }

    pub fn on(self, calendar: Calendar) -> Self {
        Self { calendar, ..self }
    }

    /// The same in the time zone of the last of these texts, where they have one.
    pub fn in_zone_of(&self, texts: &[&str]) -> Self {
        let offset = texts.last().and_then(|text| parse(&self.format, text)?.1);
        Self { offset: offset.map_or(self.offset, Offset::seconds), ..self.clone() }
    }

    /// The number of a date on the calendar; `None` where the text is no such date, or not on the calendar.
    pub fn number(&self, text: &str) -> Option<f64> {
        let (date, offset) = parse(&self.format, text)?;
        match self.calendar {
            Calendar::Seconds | Calendar::Days => {
                let offset = offset.filter(|_| self.calendar == Calendar::Seconds);
                let at = offset.unwrap_or(Offset::UTC).to_timestamp(date).ok()?;
                Some(at.as_second() as f64 + f64::from(at.subsec_nanosecond()) / 1e9)
            }
            Calendar::Months { day, second } => {
                let near = (seconds(date) - second).abs() <= HOUR;
                let fits = date.day() == day.min(date.days_in_month()) && near;
                fits.then(|| f64::from(date.year()) * 12.0 + f64::from(date.month() - 1))
            }
        }
    }

    /// The date of a number on the calendar, as the file writes dates; the number itself where no date is so far away.
    pub fn text(&self, number: f64) -> String {
        self.date(number).and_then(|date| print(&self.format, date, self.offset)).unwrap_or_else(|| number.to_string())
    }

    fn date(&self, number: f64) -> Option<DateTime> {
        match self.calendar {
            Calendar::Seconds | Calendar::Days => {
                // Rounded, since a number of seconds is seldom a fraction of two.
                let at = Timestamp::from_microsecond((number * 1e6).round() as i64).ok()?;
                let offset = if self.calendar == Calendar::Days { 0 } else { self.offset };
                Some(Offset::from_seconds(offset).ok()?.to_datetime(at))
            }
            Calendar::Months { day, second } => {
                let (years, month) = ((number / 12.0).floor(), number.rem_euclid(12.0).floor());
                let first = DateTime::new(years as i16, month as i8 + 1, 1, 0, 0, 0, 0).ok()?;
                let date = first.with().day(day.min(first.days_in_month())).build().ok()?;
                date.checked_add(SignedDuration::from_secs(second)).ok()
            }
        }
    }

    pub fn weekday(&self, number: f64) -> Option<Weekday> {
        self.date(number).map(DateTime::weekday)
    }

    /// Whether they are written as numbers that count since 1970.
    pub fn is_epoch(&self) -> bool {
        unit(&self.format).is_some() || self.format == EXCEL
    }

    /// Why a text that is a date in this format has no number; `None` where it is no such date.
    pub fn off_calendar(&self, text: &str) -> Option<String> {
        let Calendar::Months { day, .. } = self.calendar else { return None };
        let day = if day == 31 { "the last day".into() } else { format!("day {day}") };
        parse(&self.format, text)
            .map(|_| format!("dates count in months here, on {day} of each at one time of the day"))
    }

    pub fn counted(&self) -> &'static str {
        match self.calendar {
            Calendar::Seconds | Calendar::Days => "seconds",
            Calendar::Months { .. } => "months",
        }
    }
}

impl Calendar {
    /// Months, where all dates are on one day of the month, as far as months have it, at one time, in more than one month.
    fn of(dates: &[(DateTime, Option<Offset>)]) -> Self {
        let last = dates.iter().all(|(date, _)| date.day() == date.days_in_month());
        let day = if last { 31 } else { dates.iter().map(|(date, _)| date.day()).max().unwrap_or(1) };
        let alike = dates.iter().all(|(date, _)| date.day() == day.min(date.days_in_month()));
        let times: BTreeSet<i64> = dates.iter().map(|(date, _)| seconds(*date)).collect();
        let months: BTreeSet<(i16, i8)> = dates.iter().map(|(date, _)| (date.year(), date.month())).collect();
        let whole = dates.iter().all(|(date, _)| date.subsec_nanosecond() == 0);
        let different: BTreeSet<DateTime> = dates.iter().map(|(date, _)| *date).collect();
        let near = times.last().zip(times.first()).is_some_and(|(last, first)| last - first <= HOUR);
        match dates.last() {
            Some((date, _)) if whole && months.len() > 1 && near && alike && different.len() == months.len() => {
                Self::Months { day, second: seconds(*date) }
            }
            _ => {
                let offsets: BTreeSet<Option<Offset>> = dates.iter().map(|(_, offset)| *offset).collect();
                if whole && times.len() == 1 && offsets.len() > 1 { Self::Days } else { Self::Seconds }
            }
        }
    }
}

fn is_ordered(dates: &[impl PartialOrd]) -> bool {
    dates.is_sorted() || dates.iter().rev().is_sorted()
}

/// Whether each of five texts and more is as far from the one before it, in months or in seconds.
fn steps_evenly(format: &str, texts: &[&str]) -> bool {
    let dates: Vec<_> = texts.iter().filter_map(|text| parse(format, text)).collect();
    let dates = Dates { calendar: Calendar::of(&dates), format: format.into(), offset: 0 };
    let numbers: Vec<f64> = texts.iter().filter_map(|text| dates.number(text)).collect();
    texts.len() > 4 && numbers.windows(3).all(|at| at[1] != at[0] && at[2] - at[1] == at[1] - at[0])
}

/// Of dates that are in no order, but would be if the day and the month changed places wherever they may, the first where they do.
fn swapped<'a>(format: &str, texts: &[&'a str]) -> Option<&'a str> {
    let other = format.replace("%d", "\0").replace("%m", "%d").replace('\0', "%m");
    if texts.len() < 10 || other == format || format.starts_with("%Y") {
        return None;
    }
    let date = |format: &str, text: &str| Some(parse(format, text)?.0);
    let as_read: Vec<_> = texts.iter().map(|text| date(format, text)).collect();
    let changed: Vec<_> =
        texts.iter().zip(&as_read).map(|(text, date_read)| date(&other, text).or(*date_read)).collect();
    let place = as_read.iter().zip(&changed).position(|(read, changed)| read != changed);
    place.filter(|_| is_ordered(&changed)).map(|place| texts[place])
}

/// The unit of counts since 1970.
fn unit(format: &str) -> Option<i128> {
    EPOCHS.iter().find(|(name, _)| *name == format).map(|(_, unit)| *unit)
}

/// The unit in which whole numbers may count since 1970: the largest lies between 1973 and 2103.
pub fn epoch(mut numbers: impl Iterator<Item = f64>) -> Option<&'static str> {
    let largest =
        numbers.try_fold(0.0, |largest: f64, number| (number.fract() == 0.0).then(|| largest.max(number.abs())))?;
    let is_within = |unit: i128| (1e17..4.2e18).contains(&(largest * unit as f64));
    EPOCHS.into_iter().find(|(_, unit)| is_within(*unit)).map(|(name, _)| name)
}

/// The same where all are on whole days, which have weeks and months; other numbers serve as they are.
fn epoch_of(texts: &[&str]) -> Option<&'static str> {
    let format = epoch(texts.iter().filter_map(|text| text.parse::<f64>().ok()))?;
    let dates: Option<Vec<DateTime>> = texts.iter().map(|text| Some(parse(format, text)?.0)).collect();
    let dates = dates?;
    let times: BTreeSet<i64> = dates.iter().map(|date| seconds(*date)).collect();
    let days: BTreeSet<_> = dates.iter().map(|date| date.date()).collect();
    // Where clocks change, a day begins at two times.
    let whole = dates.iter().all(|date| date.subsec_nanosecond() == 0) && times.len() <= 2;
    (whole && days.len() > 2).then_some(format)
}

/// Whether numbers are years and months, such as 2024.09 and 2024.1 for October, as programs write them that take them for numbers.
fn are_bare_months(texts: &[&str]) -> bool {
    let month = |text: &str| {
        let (year, month) = text.split_once('.')?;
        let hundredths = 100.0 * format!("0.{month}").parse::<f64>().ok()?;
        let is_month = (hundredths - hundredths.round()).abs() < 0.02 && (1.0..12.5).contains(&hundredths.round());
        let is_year = year.parse::<u16>().is_ok_and(|year| (1700..2200).contains(&year));
        (is_year && is_month).then(|| hundredths.round() as u8)
    };
    let found: Option<BTreeSet<u8>> = texts.iter().map(|text| month(text)).collect();
    found.is_some_and(|months| months.len() == 12)
}

/// What stands between a year and the next one, and how many digits that has.
fn of_two_years(format: &str) -> Option<(&str, usize)> {
    let (mark, next) = format.strip_prefix("%Y")?.split_at_checked(1)?;
    [("%y", 2), ("%Y", 4)].into_iter().find(|(year, _)| *year == next).map(|(_, digits)| (mark, digits))
}

/// The last so many digits of the year after a date.
fn next_year(date: DateTime, digits: usize) -> String {
    let next = format!("{:04}", date.year() + 1);
    next[next.len() - digits..].into()
}

static FORMATS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut all: Vec<String> =
        DAYS.split('|').chain(MONTHS.split('|')).chain(LOGS.split('|')).map(String::from).collect();
    for day in DAYS.split('|') {
        for between in [" ", "T", ", "] {
            for time in TIMES.split('|') {
                all.extend(ZONES.split('|').map(|zone| format!("{day}{between}{time}{zone}")));
            }
        }
    }
    all
});

/// The formats in which a text is a date.
fn formats_of(text: &str) -> impl Iterator<Item = String> {
    let may_be = |format: &&String| text.contains(':') || !format.contains(":%M");
    FORMATS.iter().filter(may_be).filter(|format| parse(format, text).is_some()).cloned()
}

fn seconds(date: DateTime) -> i64 {
    i64::from(date.hour()) * 3600 + i64::from(date.minute()) * 60 + i64::from(date.second())
}

/// A text as a date of this format, with its time zone.
fn parse(format: &str, text: &str) -> Option<(DateTime, Option<Offset>)> {
    if format == EXCEL {
        let days: f64 = text.trim().parse().ok().filter(|days: &f64| days.is_finite())?;
        // Their digits tell about a second.
        let at = Timestamp::from_second(((days - EXCEL_1970) * DAY).round() as i64).ok()?;
        return Some((Offset::UTC.to_datetime(at), None));
    }
    if let Some(unit) = unit(format) {
        let text = text.trim();
        let whole = |number: f64| (number.fract() == 0.0).then_some(number as i128);
        let count = text.parse().ok().or_else(|| whole(text.parse().ok()?))?;
        let at = Timestamp::from_nanosecond(unit.checked_mul(count)?).ok()?;
        return Some((Offset::UTC.to_datetime(at), None));
    }
    if let Some((mark, digits)) = of_two_years(format) {
        let (year, next) = text.trim().split_once(mark)?;
        let (date, _) = parse("%Y", year)?;
        return (next == next_year(date, digits)).then_some((date, None));
    }
    if let Some(end) = [" 24:00", "T24:00"].into_iter().find(|end| text.contains(end) && format.contains("%H:%M")) {
        // The end of a day, which is the beginning of the next one.
        let (date, offset) = parse(format, &text.replace(end, &end.replace("24", "00")))?;
        return (seconds(date) == 0).then_some((date.tomorrow().ok()?, offset));
    }
    // A quarter is read where a month would stand.
    let mut found = strtime::parse(format.replace("%q", "%m"), text.trim()).ok()?;
    if found.iso_week().or(found.monday_based_week()).or(found.sunday_based_week()).is_some() {
        found.set_weekday(Some(found.weekday().unwrap_or(Weekday::Monday)));
    } else if found.day_of_year().is_none() {
        let month = found.month().unwrap_or(1);
        let month = if format.contains("%q") { (month <= 4).then_some(3 * month - 2)? } else { month };
        found.set_month(Some(month)).ok()?;
        found.set_day(Some(found.day().unwrap_or(1))).ok()?;
    }
    let (date, offset) = (found.to_datetime().ok()?, found.offset());
    (1000..=9999).contains(&date.year()).then_some((date, offset))
}

fn print(format: &str, date: DateTime, offset: i32) -> Option<String> {
    let at = || Offset::UTC.to_timestamp(date).ok();
    if format == EXCEL {
        let days = at()?.as_second() as f64 / DAY + EXCEL_1970;
        return Some(((days * 1e6).round() / 1e6).to_string());
    }
    if let Some(unit) = unit(format) {
        return Some((at()?.as_nanosecond() / unit).to_string());
    }
    if let Some((mark, digits)) = of_two_years(format) {
        return Some(format!("{:04}{mark}{}", date.year(), next_year(date, digits)));
    }
    let mut broken = BrokenDownTime::from(date);
    broken.set_offset(Some(Offset::from_seconds(offset).ok()?));
    broken.to_string(format).ok()
}

/// Digits after the last point or comma of a text.
fn digits_of_fraction(text: &str) -> usize {
    text.rsplit_once(['.', ',']).map_or(0, |(_, end)| end.bytes().take_while(u8::is_ascii_digit).count())
}

/// A format with numbers padded or not, names of months in capitals or not, small letters for a.m. and p.m., without the spaces that a text
/// need not have, and with so many digits of fractions.
fn variants(format: &str, fraction: usize) -> Vec<String> {
    let format = format.replace("%.f", &format!("%.{fraction}f")).replace("%f", &format!("%{fraction}f"));
    let with = |codes: &[&str], flag| {
        codes.iter().fold(format.clone(), |format, code| format.replace(&format!("%{code}"), &format!("%{flag}{code}")))
    };
    let bare = [&[][..], &["d", "V"], &["m"], &["d", "m"], &["H", "I"], &["d", "m", "H", "I"]];
    let spaced = bare.map(|codes| with(codes, "-")).into_iter().chain([with(&["b", "B"], "^")]);
    let close = |format: String| [format.clone(), format.replace(" %p", "%p"), format.replace(' ', "")];
    let small = |format: String| [format.clone(), format.replace("%p", "%P")];
    spaced.flat_map(close).flat_map(small).collect()
}

/// How many texts a format prints as they stand.
fn printed_alike(format: &str, texts: &[&str]) -> usize {
    let again = |text: &str| {
        let (date, offset) = parse(format, text)?;
        print(format, date, offset.map_or(0, Offset::seconds))
    };
    texts.iter().filter(|text| again(text).as_deref() == Some(text.trim())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> Dates {
        Dates::of(texts, None).unwrap().unwrap_or_else(|| panic!("{texts:?}"))
    }

    #[test]
    fn dates_are_printed_as_they_are_written_and_count_on_their_calendar() {
        // What comes after the last, a step later.
        for case in [
            "1949-10 | 1949-11 | 1949-12 | 1950-01",
            "1991 Oct | 1991 Nov | 1991 Dec | 1992 Jan",
            "1970 Q2 | 1970 Q3 | 1970 Q4 | 1971 Q1",
            "202052 | 202053 | 202101 | 202102",
            "Fri Dec 29 23:00:00 2023 | Sat Dec 30 23:00:00 2023 | Sun Dec 31 23:00:00 2023 | Mon Jan 01 23:00:00 2024",
            "01/Jan/2024:10:00:00 +0000 | 01/Jan/2024:11:00:00 +0000 | 01/Jan/2024:12:00:00 +0000 | 01/Jan/2024:13:00:00 +0000",
            "Friday, March 1, 2024 | Saturday, March 2, 2024 | Sunday, March 3, 2024 | Monday, March 4, 2024",
            "1974Q1 | 1974Q2 | 1974Q3 | 1974Q4",
            "2Q 2015 | 3Q 2015 | 4Q 2015 | 1Q 2016",
            "2015.Q2 | 2015.Q3 | 2015.Q4 | 2016.Q1",
            "1999/00 | 2000/01 | 2001/02 | 2002/03",
            "2009-10 | 2010-11 | 2011-12 | 2012-13",
            "1980-1981 | 1981-1982 | 1982-1983 | 1983-1984",
            "FY1998 | FY1999 | FY2000 | FY2001",
            "Oct1999 | Nov1999 | Dec1999 | Jan2000",
            "28FEB2024 | 29FEB2024 | 01MAR2024 | 02MAR2024",
            "28. 2. 2024 | 29. 2. 2024 | 1. 3. 2024 | 2. 3. 2024",
            "30122023 | 31122023 | 01012024 | 02012024",
            "2023123122 | 2023123123 | 2024010100 | 2024010101",
            "2023-12-31 22 | 2023-12-31 23 | 2024-01-01 00 | 2024-01-01 01",
            "2023-12-31 10:00pm | 2023-12-31 11:00pm | 2024-01-01 12:00am | 2024-01-01 01:00am",
            "31/12/2023, 22:00:00 | 31/12/2023, 23:00:00 | 01/01/2024, 00:00:00 | 01/01/2024, 01:00:00",
            "2024-02-29 12:00:00,100 | 2024-02-29 12:00:00,200 | 2024-02-29 12:00:00,300 | 2024-02-29 12:00:00,400",
            "2020-W8 | 2020-W9 | 2020-W10 | 2020-W11",
            "2Q15 | 3Q15 | 4Q15 | 1Q16",
            "20203 | 20204 | 20211 | 20212",
            "2020.3 | 2020.4 | 2021.1 | 2021.2",
            "FY2015Q2 | FY2015Q3 | FY2015Q4 | FY2016Q1",
            "Q2 FY15 | Q3 FY15 | Q4 FY15 | Q1 FY16",
            "2015q2 | 2015q3 | 2015q4 | 2016q1",
            "1999m8 | 1999m9 | 1999m10 | 1999m11",
            "1991 W51 | 1991 W52 | 1992 W01 | 1992 W02",
            "Jan 1 2000 | Feb 1 2000 | Mar 1 2000 | Apr 1 2000",
            "Jan-1-1995 | Feb-1-1995 | Mar-1-1995 | Apr-1-1995",
            "2012-01-31 | 2012-02-29 | 2012-03-31 | 2012-04-30",
            "2001-01-01 | 2002-01-01 | 2003-01-01 | 2004-01-01",
            "2023-02-26 | 2023-02-27 | 2023-02-28 | 2023-03-01",
            "20230226 | 20230227 | 20230228 | 20230301",
            "230227 | 230228 | 230301 | 230302",
            "20230228T2200 | 20230228T2300 | 20230301T0000 | 20230301T0100",
            "202210 | 202211 | 202212 | 202301",
            "2022.10 | 2022.11 | 2022.12 | 2023.01",
            "202302282200 | 202302282300 | 202303010000 | 202303010100",
            "2012/1/9 | 2012/1/10 | 2012/1/11 | 2012/1/12",
            "29.02.2024 | 01.03.2024 | 02.03.2024 | 03.03.2024",
            "12/30/2023 | 12/31/2023 | 01/01/2024 | 01/02/2024",
            "2010/01/01 22:00 | 2010/01/01 23:00 | 2010/01/02 00:00 | 2010/01/02 01:00",
            "2021-05-01 00:00:00+00:00 | 2021-05-01 00:30:00+00:00 | 2021-05-01 01:00:00+00:00 | 2021-05-01 01:30:00+00:00",
            "2013-01-01T06:00:00Z | 2013-01-01T07:00:00Z | 2013-01-01T08:00:00Z | 2013-01-01T09:00:00Z",
            "2013-01-01T06:00:00-0500 | 2013-01-01T07:00:00-0500 | 2013-01-01T08:00:00-0500 | 2013-01-01T09:00:00-0500",
            "1970-01-01 00:04:40.000 | 1970-01-01 00:04:40.015 | 1970-01-01 00:04:40.030 | 1970-01-01 00:04:40.045",
            "1/31/24 1:00 PM | 1/31/24 2:00 PM | 1/31/24 3:00 PM | 1/31/24 4:00 PM",
            "2023-12-30 | 2024-01-30 | 2024-02-29 | 2024-03-30",
            "OCT-1999 | NOV-1999 | DEC-1999 | JAN-2000",
            "2020-W51 | 2020-W52 | 2020-W53 | 2021-W01",
            "20/02/28 | 20/02/29 | 20/03/01 | 20/03/02",
            "28.02.20 | 29.02.20 | 01.03.20 | 02.03.20",
            // Fractions that no number of seconds has.
            "2024-02-29 12:00:00.1 | 2024-02-29 12:00:00.2 | 2024-02-29 12:00:00.3 | 2024-02-29 12:00:00.4",
            // Counts since 1970 of days and months.
            "1704067200000 | 1706745600000 | 1709251200000 | 1711929600000",
            "1704067200 | 1704153600 | 1704240000 | 1704326400",
            "631152000000000000 | 631238400000000000 | 631324800000000000 | 631411200000000000",
        ] {
            let all: [&str; 4] = case.split(" | ").collect::<Vec<_>>().try_into().unwrap();
            let (texts, next) = ([all[0], all[1], all[2]], all[3]);
            let dates = of(&texts);
            let numbers = texts.map(|text| dates.number(text).unwrap_or_else(|| panic!("{text}: {dates:?}")));
            for (text, number) in texts.iter().zip(numbers) {
                assert_eq!(dates.text(number), *text, "{dates:?}");
            }
            let step = numbers[2] - numbers[1];
            assert!((numbers[1] - numbers[0] - step).abs() < 1e-5, "{texts:?}: {numbers:?}");
            assert_eq!(dates.text(numbers[2] + step), next, "{dates:?}");
            let stored = serde_json::to_string(&dates).unwrap();
            assert_eq!(serde_json::from_str::<Dates>(&stored).unwrap(), dates);
        }
        // Days of a place whose clocks change.
        let days = of(&["2023-03-11 00:00:00-05:00", "2023-03-12 00:00:00-05:00", "2023-03-13 00:00:00-04:00"]);
        let [day, next] =
            ["2023-03-12 00:00:00-05:00", "2023-03-13 00:00:00-04:00"].map(|text| days.number(text).unwrap());
        assert_eq!((next - day, days.weekday(next)), (86_400.0, Some(Weekday::Monday)));
        assert_eq!(days.text(next + 86_400.0), "2023-03-14 00:00:00-04:00");
        // Months of a place whose clocks change, in UTC.
        for (texts, next) in [
            (
                ["2024-02-01T08:00:00.000Z", "2024-03-01T08:00:00.000Z", "2024-04-01T07:00:00.000Z"],
                "2024-05-01T07:00:00.000Z",
            ),
            (["2024-01-31T23:00:00Z", "2024-02-29T23:00:00Z", "2024-03-31T22:00:00Z"], "2024-04-30T22:00:00Z"),
            (["1706770800000", "1709276400000", "1711951200000"], "1714543200000"),
        ] {
            let dates = of(&texts);
            let [first, _, last] = texts.map(|text| dates.number(text).unwrap());
            assert_eq!((last - first, dates.text(last + 1.0).as_str()), (2.0, next), "{dates:?}");
        }
        assert_eq!(of(&["2024-01-01T00:00Z", "2024-01-01T01:00Z", "2024-02-01T00:00Z"]).counted(), "seconds");
        let bare: Vec<String> = (1..=12).map(|month| format!("2018.{month}")).collect();
        let bare = of(&bare.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(bare.number("2018.10").unwrap() - bare.number("2018.1").unwrap(), 9.0);
        let mixed = of(&["2024-02-29 12:00:00", "2024-02-29 12:00:00.250000"]);
        let number = mixed.number("2024-02-29 12:00:00.250000").unwrap();
        assert_eq!(mixed.text(number + 0.25), "2024-02-29 12:00:00.500000");
        let at = |text: &str| of(&[text]).number(text);
        assert_eq!(at("2024-02-29T12:00:00+01:00"), Some(1_709_204_400.0));
        assert_eq!(at("1970-01-02"), Some(86400.0));
        assert_eq!([at("1970-01-01 24:00"), at("1970-01-01T24:00:00Z")], [Some(86400.0); 2]);
        let ends = of(&["2023-12-31", "2024-01-31", "2024-02-29"]);
        assert_eq!((ends.number("2024-02-28"), ends.off_calendar("soon")), (None, None));
        assert!(ends.off_calendar("2024-02-28").unwrap().contains("on the last day of each"));
        assert_eq!(of(&["2024-03-02"]).weekday(at("2024-03-02").unwrap()), Some(Weekday::Saturday));
    }

    #[test]
    fn numbers_are_none_and_what_may_be_two_days_is_asked_about() {
        for texts in [
            &["1", "2"][..],
            &["2018.1", "2018.5", "2018.10"],
            &["12012000", "12012001"],
            &["2024-01-01 24:30"],
            &["2024-01-01 24:00:30"],
            &["1949", "1950"],
            &["20201", "20202"],
            &["20204", "20205", "20211"],
            &["20230227", "20231300"],
            &["202312", "202313"],
            &["2023.12", "2023.13"],
            &["1704067200000", "1704067260000", "1704067320000"],
            &["1704067200000", "1704153600000", "1704240000000.5"],
            &["1.5"],
            &["a", "b"],
            &[],
        ] {
            assert_eq!(Dates::of(texts, None).unwrap(), None, "{texts:?}");
        }
        let months: Vec<String> = (1..=24).map(|n| format!("{}.{:02}", 2023 + n / 13, (n - 1) % 12 + 1)).collect();
        let bare: Vec<&str> = months.iter().map(|text| text.trim_end_matches('0')).collect();
        // As spreadsheets of another country leave dates of which they read some.
        let days: Vec<String> =
            (1..=31).map(|day| if day > 12 { format!("{day}/05/2023") } else { format!("05/{day:02}/2023") }).collect();
        let days: Vec<&str> = days.iter().map(String::as_str).collect();
        for (texts, part) in [
            (&["01/02/2024", "05/06/2024"][..], "\"01/02/2024\" may be two days"),
            (&["01/02/2024", "05/06/2024"], "--dates '%d/%m/%Y' or --dates '%m/%d/%Y'"),
            // Days of January, or firsts of months.
            (&["1/1/2024", "1/2/2024", "1/3/2024", "1/4/2024", "1/5/2024"], "\"1/2/2024\" may be two days"),
            (&["01022024", "05062024"], "--dates '%d%m%Y' or --dates '%m%d%Y'"),
            (&["2015-3", "2015-4", "2016-1"], "--dates '%Y-%m' or --dates '%Y-%q'"),
            (&bare, "\"2023.1\" looks like a year and a month"),
            // One order of the year is as good as the other.
            (&["20/01/31", "05/06/11", "07/08/29"], "--dates '%d/%m/%y' or --dates '%y/%m/%d'"),
            (&["Nov-68", "Dec-68", "Jan-69"], "such as \"Nov-68\" apart; write four"),
            (&days, "change places in some, such as \"05/01/2023\""),
        ] {
            let error = Dates::of(texts, None).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(of(&["2015-3", "2015-4"]).format, "%Y-%-m", "in one year they count up as months do");
        assert_eq!(of(&["2011/12", "2012/01"]).format, "%Y/%m", "two months, and no years");
        assert_eq!(of(&["2018/19", "2019/20"]).format, "%Y/%y");
        assert_eq!(of(&["10/1/1957", "11/1/1957", "12/1/1957", "1/1/1958", "2/1/1958"]).format, "%-m/%-d/%Y");
        assert_eq!(of(&["1/10/1957", "1/11/1957", "1/12/1957", "1/1/1958", "1/2/1958"]).format, "%-d/%-m/%Y");
        assert_eq!(Dates::of(&bare[..9], None).unwrap().unwrap().format, "%Y.%m");
        assert_eq!(Dates::of(&bare, Some("number")).unwrap(), None);
        assert_eq!(Dates::of(&days, Some("%d/%m/%Y")).unwrap().unwrap().format, "%d/%m/%Y");
        let days = Dates::of(&["45123.5", "45123.541667", "45123.583333333336"], Some(EXCEL)).unwrap().unwrap();
        let at = |text| days.number(text).unwrap();
        assert_eq!((at("45123.541667") - at("45123.5"), at("25570")), (3600.0, 86_400.0));
        assert_eq!(days.text(at("45123.583333333336") + 3600.0), "45123.625");
        assert_eq!((days.text(at("45123.541667")).as_str(), days.number("1e300")), ("45123.541667", None));
        let week = |format, text: &str| Dates::of(&[text], Some(format)).unwrap().unwrap().number(text);
        assert_eq!(week("%Y-%j", "1970-032"), Some(31.0 * 86400.0));
        assert_eq!(week("%G-W%V", "1970-W02"), Some(4.0 * 86400.0));
        assert_eq!(week("%Y/%W", "1970/01"), Some(4.0 * 86400.0));
        assert_eq!(week("%m/%d/%Y", "01/02/2024"), Some(1_704_153_600.0));
        assert_eq!(Dates::of(&["20230227"], Some("number")).unwrap(), None);
        assert!(Dates::of(&["x"], Some("%Y")).unwrap_err().contains("no date of the form %Y"));
        // One that is not like those before it is left to the reader of the line.
        let dates = of(&["2024-01-01", "2024-01-02", "soon"]);
        assert_eq!((dates.number("soon"), dates.number("2024-01-05").is_some()), (None, true));
    }
}
