//! The files of archives of series: `.ts`, `.tsv` and `.arff` of UCR and UEA, and `.tsf` of Monash. Their heads say what is in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};

use super::file::{Found, Point, Reading, Series, dates_of, series};
use crate::run::config::LabelKind;
use crate::tasks::lines;
use crate::tasks::table::dates::Dates;
use crate::tasks::table::value;
use crate::terminal::notes::note;

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
    let points = values.into_iter().enumerate().map(|(n, value)| (n as f64, vec![value])).collect();
    series(points, &[], (!label.is_empty()).then_some(label), line)
}

fn number(text: &str, help: &str) -> Result<f64, String> {
    value(text).ok_or_else(|| format!("{:?} is no number; {help}", text.trim()))
}

#[derive(Default)]
struct Head {
    timed: bool,
    channels: Option<usize>,
    /// Whether there are labels, and which; and whether they are numbers.
    labelled: Option<bool>,
    labels: Vec<String>,
    numbers: bool,
    /// Points of each series, where all have as many.
    length: Option<usize>,
    unequal: bool,
}

impl Head {
    fn take(&mut self, words: &str) -> Result<(), String> {
        let mut words = words.split_whitespace();
        let key = words.next().unwrap_or_default().to_lowercase();
        let rest: Vec<&str> = words.collect();
        let first = rest.first().map(|word| word.to_lowercase()).unwrap_or_default();
        let holds = first == "true";
        let count = || first.parse().map(Some).map_err(|_| format!("@{key} {first}: expected a number"));
        match key.as_str() {
            "timestamps" => self.timed = holds,
            "univariate" if holds => self.channels = Some(1),
            "dimension" | "dimensions" => self.channels = count()?,
            "equallength" => self.unequal = !holds,
            "serieslength" => self.length = count()?,
            "classlabel" => {
                self.labelled = Some(self.labelled == Some(true) || holds);
                self.labels = rest.iter().skip(1).map(ToString::to_string).collect();
            }
            "targetlabel" => {
                self.labelled = Some(self.labelled == Some(true) || holds);
                self.numbers |= holds;
            }
            _ => {}
        }
        Ok(())
    }

    fn fields<'a>(&self, text: &'a str) -> Result<(Vec<&'a str>, Option<&'a str>), String> {
        // A colon within brackets is one of a time.
        let mut depth = 0usize;
        let is_cut = |c: char| {
            match c {
                '(' if self.timed => depth += 1,
                ')' if self.timed => depth = depth.saturating_sub(1),
                _ => {}
            }
            c == ':' && depth == 0
        };
        // What comes after the last channel is the label, with any colons.
        let mut fields: Vec<&str> = match self.channels {
            Some(count) => text.splitn(count + 1, is_cut).collect(),
            None => text.split(is_cut).collect(),
        };
        // Of a file that does not say, the last field is a label where it is no list of numbers.
        let is_list = |text: &str| text.contains(',') && text.split(',').all(|one| value(one).is_some());
        let last = fields.last().is_some_and(|last| !is_list(last) && !last.starts_with('('));
        let labelled = self.labelled.unwrap_or(self.channels.map_or(last, |count| fields.len() > count));
        if let Some(count) = self.channels
            && fields.len() != count + usize::from(labelled)
        {
            let label = if labelled { " and a label" } else { "" };
            return Err(format!(
                "{} fields, and the head says {count} channels{label}, with colons between them",
                fields.len()
            ));
        }
        let labelled = labelled && fields.len() > 1;
        let label = if labelled { fields.pop().map(str::trim) } else { None };
        Ok((fields, label))
    }

    fn check(&self, label: Option<&str>, points: usize) -> Result<(), String> {
        if let Some(label) = label.filter(|label| !self.labels.is_empty() && !label.is_empty()) {
            let same = |known: &String| known == label || value(known).zip(value(label)).is_some_and(|(a, b)| a == b);
            if !self.labels.iter().any(same) {
                return Err(format!(
                    "the label {label:?} is none that @classLabel lists ({}); correct one of them",
                    self.labels.join(", ")
                ));
            }
        }
        match self.length {
            Some(length) if !self.unequal && points != length && self.channels.is_some() => Err(format!(
                "{points} points, and @seriesLength says {length}; correct one of them, or write @equalLength false"
            )),
            _ => Ok(()),
        }
    }
}

type Lines<'a> = Vec<(usize, &'a str)>;

/// The lines of a head, without the `@` that they begin with, and the series after `@data`.
fn parts<'a>(text: &'a str, name: &str) -> Result<(Lines<'a>, Lines<'a>)> {
    let (mut heads, mut rows, mut begun) = (Lines::new(), Lines::new(), false);
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.is_empty() || line.starts_with(['#', '%']) {
        } else if let Some(words) = line.strip_prefix('@') {
            begun |= words.to_lowercase().starts_with("data");
            heads.push((number, words));
        } else if begun {
            rows.push((number, line));
        } else {
            return Err(lines::in_line(name, number)(
                "a series before the line @data; put the lines that begin with @ first",
            ));
        }
    }
    if !begun {
        bail!("{name}: no line @data; give a file of the UEA, UCR or Monash archive");
    }
    Ok((heads, rows))
}

/// Values with the texts of their times, or counted.
type Channel<'a> = Vec<(Option<&'a str>, f64)>;

/// Series from a `.ts`: lines that begin with `@` say what is in it, those after `@data` are series.
pub fn read(text: &str, name: &str, reading: &Reading<'_>) -> Result<Found> {
    let (heads, rows) = parts(text, name)?;
    let mut head = Head::default();
    heads.iter().try_for_each(|(line, words)| head.take(words).map_err(lines::in_line(name, *line)))?;
    let mut found: Vec<(usize, Vec<Channel<'_>>, Option<String>)> = Vec::new();
    for (number, line) in rows {
        let wrong = lines::in_line(name, number);
        let (fields, label) = head.fields(line).map_err(&wrong)?;
        let channels =
            fields.into_iter().map(|field| if head.timed { timed_points(field) } else { plain_points(field) });
        let channels = channels.collect::<Result<Vec<_>, _>>().map_err(&wrong)?;
        head.check(label, channels.iter().map(Vec::len).max().unwrap_or(0)).map_err(&wrong)?;
        found.push((number, channels, label.map(String::from)));
    }
    let texts: Vec<&str> =
        found.iter().flat_map(|(_, channels, _)| channels.iter().flatten()).filter_map(|(time, _)| *time).collect();
    let dates = dates_of(&texts, reading).map_err(|problem| anyhow!("{name}: {problem}"))?;
    let one = |(line, channels, label): (usize, Vec<Channel<'_>>, Option<String>)| {
        let points = together(&channels, dates.as_deref()).map_err(lines::in_line(name, line))?;
        let one = series(points, &[], label, line).map_err(lines::in_line(name, line))?;
        Ok(Series { dates: dates.clone(), ..one })
    };
    let target = if head.numbers { LabelKind::Number } else { LabelKind::Label };
    let labelled = head.labelled == Some(true);
    Ok(Found {
        series: found.into_iter().map(one).collect::<Result<_>>()?,
        target: labelled.then_some(target),
        ..Found::default()
    })
}

fn together(channels: &[Channel<'_>], dates: Option<&Dates>) -> Result<Vec<Point>, String> {
    // By a number that sorts as the time does; several points of a channel at one time are all kept.
    let mut rows: BTreeMap<(i64, usize), Point> = BTreeMap::new();
    for (channel, points) in channels.iter().enumerate() {
        for (n, (text, value)) in points.iter().enumerate() {
            let time = match (text, dates) {
                (None, _) => n as f64,
                (Some(text), Some(dates)) => {
                    dates.number(text).ok_or_else(|| format!("{text:?} is no date as those before it"))?
                }
                (Some(text), None) => text.parse().map_err(|_| {
                    format!("{text:?} is no point such as (0.5,1.25): its time is neither a number nor a date")
                })?,
            };
            let bits = time.to_bits() as i64;
            let order = if bits < 0 { bits ^ i64::MAX } else { bits };
            let is_taken = |nth: &usize| rows.get(&(order, *nth)).is_some_and(|(_, row)| !row[channel].is_nan());
            let nth = (0..).take_while(is_taken).count();
            rows.entry((order, nth)).or_insert_with(|| (time, vec![f64::NAN; channels.len()])).1[channel] = *value;
        }
    }
    Ok(rows.into_values().collect())
}

fn plain_points(text: &str) -> Result<Channel<'_>, String> {
    text.split(',').map(|text| Ok((None, number(text, "write ? for a missing value")?))).collect()
}

/// `(time,value),(time,value)`, with numbers or dates for times.
fn timed_points(text: &str) -> Result<Channel<'_>, String> {
    let points = text.trim().split("),").map(|point| {
        let inner = point.trim().trim_start_matches('(').trim_end_matches(')');
        let wrong = || format!("\"({inner})\" is no point such as (0.5,1.25)");
        let (time, text) = inner.rsplit_once(',').ok_or_else(wrong)?;
        Ok((Some(time.trim()), value(text).ok_or_else(wrong)?))
    });
    points.collect()
}

/// Series from a `.tsf`: attributes of a series, with colons between them, then its values.
pub fn forecasting(text: &str, name: &str) -> Result<Found> {
    let (mut attributes, mut frequency) = (Vec::new(), (0.0, 0.0));
    let (heads, rows) = parts(text, name)?;
    for (_, words) in heads {
        match words.to_lowercase().split_whitespace().collect::<Vec<_>>()[..] {
            ["attribute", title, kind, ..] => attributes.push((title.to_string(), kind == "date")),
            ["frequency", word, ..] => {
                if step_of(word).is_none() {
                    note(format_args!("{name}: @frequency {word} is not known; points are counted, without dates"));
                }
                frequency = step_of(word).unwrap_or_default();
            }
            _ => {}
        }
    }
    let one = |(line, text)| from_monash(text, &attributes, frequency, line).map_err(lines::in_line(name, line));
    Ok(Found { series: rows.into_iter().map(one).collect::<Result<_>>()?, ..Found::default() })
}

/// The months and the seconds from a point to the next one, of words such as `monthly`, `half_hourly` and `6_hours`.
fn step_of(frequency: &str) -> Option<(f64, f64)> {
    let (count, unit) = match frequency.split_once('_') {
        Some(("half", unit)) => (0.5, unit.trim_end_matches("ly")),
        Some((count, unit)) => (count.parse::<f64>().ok().filter(|count| *count > 0.0)?, unit.trim_end_matches('s')),
        None => (1.0, frequency.trim_end_matches("ly")),
    };
    let step: (f64, f64) = match unit {
        "year" => (12.0 * count, 0.0),
        "quarter" => (3.0 * count, 0.0),
        "month" => (count, 0.0),
        "week" => (0.0, 604_800.0 * count),
        "day" | "dai" => (0.0, 86_400.0 * count),
        "hour" => (0.0, 3600.0 * count),
        "minute" => (0.0, 60.0 * count),
        "second" => (0.0, count),
        _ => return None,
    };
    Some(step).filter(|(months, _)| months.fract() == 0.0)
}

fn from_monash(
    text: &str,
    attributes: &[(String, bool)],
    (months, seconds): (f64, f64),
    line: usize,
) -> Result<Series, String> {
    let fields: Vec<&str> = text.split(':').collect();
    let (Some(values), true) = (fields.last(), fields.len() == attributes.len() + 1) else {
        return Err(format!(
            "{} fields, and the head says {} attributes, then values, with colons between them",
            fields.len(),
            attributes.len()
        ));
    };
    let values =
        values.split(',').map(|text| number(text, "write ? for a missing value")).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<&str> =
        attributes.iter().zip(&fields).filter(|((_, date), _)| !date).map(|(_, text)| text.trim()).collect();
    let start = attributes.iter().zip(&fields).find(|((_, date), _)| *date).map(|(_, text)| text.trim());
    let dates = match start {
        Some(text) if months + seconds > 0.0 => {
            let dates = Dates::starting(text, months > 0.0)
                .ok_or_else(|| format!("{text:?} is no date such as 1979-01-31 00-00-00"))?;
            let first = dates.number(text).unwrap_or(0.0);
            Some((Arc::new(dates), first))
        }
        _ => None,
    };
    let time = |n: usize| dates.as_ref().map_or(n as f64, |(_, first)| first + n as f64 * (months + seconds));
    let points = values.into_iter().enumerate().map(|(n, value)| (time(n), vec![value])).collect();
    let one = series(points, &[], None, line)?;
    Ok(Series { id: (!names.is_empty()).then(|| names.join(" ")), dates: dates.map(|(dates, _)| dates), ..one })
}

/// Series from an `.arff`: a row of values and a label, or several rows in quotes, with `\n` between channels.
pub fn attributes(text: &str, name: &str) -> Result<Found> {
    let (mut named, mut numbers, mut classes) = (false, false, 0);
    let (heads, rows) = parts(text, name)?;
    for (line, words) in heads {
        let lower = words.to_lowercase();
        if lower.starts_with("data") && classes > usize::from(named) {
            let problem = "an attribute before the last one has names in braces, and the last one is the label; put the label last, and \
                           leave other names out";
            return Err(lines::in_line(name, line)(problem));
        } else if lower.starts_with("attribute") {
            // The last one says what labels are.
            named = words.ends_with('}');
            classes += usize::from(named);
            numbers = !named && (lower.ends_with("numeric") || lower.ends_with("real"));
        }
    }
    let one = |(line, text)| from_attributes(text, line).map_err(lines::in_line(name, line));
    let target = if named { Some(LabelKind::Label) } else { numbers.then_some(LabelKind::Number) };
    Ok(Found { series: rows.into_iter().map(one).collect::<Result<_>>()?, target, ..Found::default() })
}

fn from_attributes(text: &str, line: usize) -> Result<Series, String> {
    let quote = text.chars().next().filter(|c| ['\'', '"'].contains(c));
    let (channels, label) = match quote.and_then(|quote| text[1..].split_once(quote)) {
        Some((values, label)) => (values.split("\\n").collect(), label.trim_start_matches(',')),
        None => {
            let (values, label) =
                text.rsplit_once(',').ok_or("one field, expected values and a label, with commas between them")?;
            (vec![values], label)
        }
    };
    let channels = channels.into_iter().map(plain_points).collect::<Result<Vec<_>, _>>()?;
    let label = label.trim().trim_matches(['\'', '"']);
    series(together(&channels, None)?, &[], (!label.is_empty() && label != "?").then(|| label.to_string()), line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::series::file::parse;

    #[test]
    fn heads_of_archives_are_believed() {
        let of = |text: &str, ending: &str| {
            parse(text.as_bytes(), ending, "f", &Reading { labels: true, ..Reading::default() })
        };
        let shape = |text: &str| {
            let found = of(text, "ts").unwrap();
            let one = &found.series[0];
            (one.width, one.label.clone(), found.target)
        };
        let named = |label: &str| Some(label.to_string());
        assert_eq!(
            shape("@dimensions 2\n@classLabel true 12:30 18:00\n@data\n0,2:4,5:12:30\n"),
            (2, named("12:30"), Some(LabelKind::Label))
        );
        assert_eq!(shape("@data\n0,2,3:4,5,6\n"), (2, None, None), "a list of numbers is no label");
        assert_eq!(shape("% of mine\n@univariate true\n@data\n0,2,3:4\n"), (1, named("4"), None));
        assert_eq!(shape("@targetLabel true\n@data\n0,2,3:4.5\n"), (1, named("4.5"), Some(LabelKind::Number)));
        assert_eq!(shape("@targetlabel false\n@classLabel false\n@data\n0,2,3\n"), (1, None, None));
        for (head, line, part) in [
            ("@classLabel true a b", "1,2:c", "the label \"c\" is none that @classLabel lists (a, b)"),
            ("@univariate true\n@seriesLength 9", "1,2:c", "2 points, and @seriesLength says 9"),
            ("@dimensions 3\n@classLabel true a", "1,2:3,4:a", "3 fields, and the head says 3 channels and a label"),
        ] {
            let error = of(&format!("{head}\n@data\n{line}\n"), "ts").unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let dated = of("@timestamps true\n@data\n(2019-01-01 10:00:00,1),(2019-01-01 11:00:00,2):a\n", "ts").unwrap();
        assert_eq!(
            (dated.series[0].width, dated.series[0].time(dated.series[0].times[1])),
            (1, "2019-01-01 11:00:00".into())
        );
        let twice = of("@timestamps true\n@data\n(0,1),(0,2),(1,3):(0,4),(1,5):a\n", "ts").unwrap();
        assert_eq!(format!("{:?}", twice.series[0].values), "[1.0, 4.0, 2.0, NaN, 3.0, 5.0]", "two points at one time");
        let holes = of("@classLabel true a\n@data\n1,?,3,?:a\n", "ts").unwrap();
        assert_eq!((holes.series[0].times.len(), holes.series[0].values[1].is_nan()), (3, true));

        let monthly = "# x\n@attribute series_name string\n@attribute start_timestamp date\n@frequency monthly\n@data\nT1:1979-11-30 00-00-00:1,?,3\n";
        let found = of(monthly, "tsf").unwrap();
        let one = &found.series[0];
        assert_eq!((one.id.as_deref(), one.time(one.times[2])), (Some("T1"), "1980-01-30 00-00-00".into()));
        for (frequency, third) in [("6_hours", "1979-11-30 12-00-00"), ("fortnightly", "2")] {
            let other = monthly
                .replace("monthly", frequency)
                .replace("@attribute", "@Attribute")
                .replace("date", "Date")
                .replace("@data", "@Data");
            let found = of(&other, "tsf").unwrap();
            assert_eq!(found.series[0].time(found.series[0].times[2]), third);
        }
        let error = of("@relation x\n@attribute c {1,2}\n@attribute a numeric\n@data\n1,0.5\n", "arff")
            .unwrap_err()
            .to_string();
        assert!(error.contains("f, line 4: an attribute before the last one has names in braces"), "{error}");
        let rows = of("@relation x\n@attribute a numeric\n@attribute c {1,2}\n@data\n0.5,?,2,1\n", "arff").unwrap();
        assert_eq!(
            (rows.series[0].times.len(), rows.series[0].label.as_deref(), rows.target),
            (3, Some("1"), Some(LabelKind::Label))
        );
        let rows = of("@relation x\n@attribute r relational\n@attribute a numeric\n@end r\n@attribute c {1,2}\n@data\n'1,2\\n3,4',2\n", "").unwrap();
        assert_eq!(
            (rows.series[0].width, &rows.series[0].values, rows.series[0].label.as_deref()),
            (2, &vec![1.0, 3.0, 2.0, 4.0], Some("2"))
        );
    }
}
