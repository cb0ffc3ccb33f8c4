//! What was measured and what follows from it: as JSON, as CSV, as text.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::goals::Goals;
use crate::machine::Machine;
use crate::quantity::{bytes, time, times, tokens};
use crate::registry::BASELINE;
use crate::statistics::Crossover;
use crate::sweep::{Ending, Key, OrderName, Row, Settings, Sweep};
use crate::table::{Table, WIDTH};
use crate::workload::Pass;

/// Everything that a benchmark found, with all that a reader needs to judge it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the program.
    pub version: String,
    /// Where it ran.
    pub machine: Machine,
    /// How it was called.
    pub command: String,
    /// Against the project's targets.
    pub goals: Option<Goals>,
    /// One for each set of rows.
    pub settings: Vec<Settings>,
    /// All points.
    pub rows: Vec<Row>,
    /// What is missing, and why.
    pub endings: Vec<Ending>,
    /// Who passes whom, and where.
    pub comparisons: Vec<Comparison>,
    /// How well the cost model chose.
    pub choice: Option<Choice>,
}

/// One curve against another of the same set, mask and pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// As [`Settings::set`].
    pub set: String,
    /// The mask.
    pub order: OrderName,
    /// What was timed.
    pub pass: Pass,
    /// The mechanism that is hoped to be faster; by the algorithm that the cost model chooses unless one is named.
    pub ours: Curve,
    /// The other.
    pub theirs: Curve,
    /// From where on `ours` is faster.
    pub crossover: Crossover,
    /// The longest length that both have.
    pub longest: usize,
    /// Their time over ours there.
    pub speedup: f64,
}

/// A mechanism, by an algorithm or by that which the cost model chooses at each length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Curve {
    /// The entry's name.
    pub mechanism: String,
    /// `None` for the cost model's choice.
    pub algorithm: Option<String>,
}

impl Curve {
    /// Whether a row is a point of it.
    pub fn has(&self, row: &Row) -> bool {
        row.mechanism == self.mechanism
            && match &self.algorithm {
                Some(algorithm) => row.algorithm == *algorithm,
                None => row.chosen,
            }
    }

    /// As text shows it.
    pub fn label(&self) -> String {
        match &self.algorithm {
            Some(algorithm) => format!("{} by {algorithm}", self.mechanism),
            None => self.mechanism.clone(),
        }
    }
}

/// How often the cost model's choice was near the best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Points with more than one algorithm.
    pub points: usize,
    /// Of these, points where the choice took at most 1.1 × the time of the best.
    pub within_a_tenth: usize,
    /// The largest time of the choice over that of the best.
    pub worst: f64,
    /// Where that was.
    pub worst_at: String,
}

/// `(length, seconds)` of the rows of a set, mask and pass that a curve has.
pub fn points(rows: &[Row], key: Key<'_>, curve: &Curve) -> Vec<(f64, f64)> {
    rows.iter()
        .filter(|row| row.key() == key && curve.has(row))
        .map(|row| (row.length as f64, row.seconds.median))
        .collect()
}

/// The sets, masks and passes of rows, in the order in which they come.
pub fn groups(rows: &[Row]) -> Vec<Key<'_>> {
    distinct(rows.iter().map(Row::key))
}

/// The mechanisms of rows, in the order in which they come.
pub fn mechanisms<'r>(rows: impl IntoIterator<Item = &'r Row>) -> Vec<&'r str> {
    distinct(rows.into_iter().map(|row| row.mechanism.as_str()))
}

pub(crate) fn distinct<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}

impl Report {
    /// Draws the conclusions from what was measured here.
    pub fn new(command: String, goals: Option<Goals>, sweeps: Vec<(Settings, Sweep)>) -> Self {
        let mut report = Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: Machine::here(),
            command,
            goals,
            settings: Vec::new(),
            rows: Vec::new(),
            endings: Vec::new(),
            comparisons: Vec::new(),
            choice: None,
        };
        for (settings, sweep) in sweeps {
            report.settings.push(settings);
            report.rows.extend(sweep.rows);
            report.endings.extend(sweep.endings);
        }
        report.comparisons = comparisons(&report.rows);
        report.choice = choice(&report.rows);
        report
    }

    /// One JSON object.
    ///
    /// # Errors
    /// If a number is not finite, which no measurement gives.
    pub fn to_json(&self) -> Result<String, Error> {
        serde_json::to_string_pretty(self)
            .map_err(|error| Error::File { path: "bench.json".into(), reason: error.to_string() })
    }

    /// What [`to_json`](Self::to_json) gave.
    ///
    /// # Errors
    /// For text that is not such a report; `path` says where it came from.
    pub fn from_json(text: &str, path: &std::path::Path) -> Result<Self, Error> {
        serde_json::from_str(text).map_err(|error| Error::File {
            path: path.to_owned(),
            reason: format!("not a report of longspan-bench: {error}"),
        })
    }

    /// One line for each row under a line of names; no field holds a comma.
    pub fn to_csv(&self) -> String {
        let mut text = String::from(
            "set,mechanism,algorithm,chosen,mask,pass,batch,heads,head_dim,threads,length,seconds,seconds_lower_quartile,\
             seconds_upper_quartile,runs,fresh_seconds,flops,roofline_seconds,call_bytes,extra_bytes\n",
        );
        let optional = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
        for row in &self.rows {
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
                row.set,
                row.mechanism,
                row.algorithm,
                row.chosen,
                row.order.name(),
                row.pass,
                row.batch,
                row.heads,
                row.head_dim,
                row.threads,
                row.length,
                row.seconds.median,
                row.seconds.lower,
                row.seconds.upper,
                row.seconds.runs,
                optional(row.fresh_seconds),
                optional(row.flops),
                optional(row.roofline_seconds),
                row.call_bytes,
                row.extra_bytes,
            );
        }
        text
    }

    /// Tables for a terminal.
    pub fn to_text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}, {} cores, {}, longspan {}\n",
            machine.processor, machine.cores, machine.instructions, self.version
        );
        if let Some(goals) = &self.goals {
            text.push_str(&goals.to_text());
        }
        for key in groups(&self.rows) {
            text.push_str(&self.group_text(key));
        }
        if !self.comparisons.is_empty() {
            let _ = write!(text, "\nFrom which length on the first is faster:\n{}", self.crossovers().to_text());
        }
        if let Some(choice) = &self.choice {
            let _ = writeln!(text, "\n{}", choice.sentence());
        }
        text
    }

    /// The mechanisms' times at each length, by the cost model's choice; several tables where one would be too wide.
    fn group_text(&self, key: Key<'_>) -> String {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.key() == key && row.chosen).collect();
        let Some(first) = rows.first() else { return String::new() };
        let (set, order, pass) = key;
        let mut text = format!("\n{set}: {} {pass}, {}, median", order.name(), first.sizes());
        text.push_str(match pass {
            Pass::Decode => " of one token after so many\n",
            Pass::Forward => " and multiple of the roofline\n",
            Pass::ForwardBackward => "\n",
        });
        let mut lengths: Vec<usize> = rows.iter().map(|row| row.length).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let cell = |length: usize, name: &str| {
            let row = rows.iter().find(|row| row.length == length && row.mechanism == name);
            row.map_or("·".to_owned(), |row| {
                let multiple = row.rooflines().map(|multiple| format!(" {:>7}", format!("{multiple:.2} ×")));
                format!("{}{}", time(row.seconds.median), multiple.unwrap_or_default())
            })
        };
        // `tokens`, then columns of a time, a multiple and the space before them.
        let columns = (WIDTH - 9) / mechanisms(rows.iter().copied()).iter().map(|name| name.len()).fold(18, usize::max);
        for names in mechanisms(rows.iter().copied()).chunks(columns) {
            let head: Vec<&str> = std::iter::once("tokens").chain(names.iter().copied()).collect();
            let line = |&length: &usize| {
                std::iter::once(tokens(length)).chain(names.iter().map(|name| cell(length, name))).collect()
            };
            text.push_str(&Table::new(0, &head, lengths.iter().map(line)).to_text());
        }
        text
    }

    /// Which curve is below which from where on.
    pub(crate) fn crossovers(&self) -> Table {
        let rows = self.comparisons.iter().map(|comparison| {
            let Comparison { set, order, pass, ours, theirs, crossover, longest, speedup } = comparison;
            let pass = if *pass == Pass::ForwardBackward { "fwd+bwd" } else { pass.name() };
            vec![
                set.clone(),
                format!("{} {pass}", order.name()),
                ours.label(),
                theirs.algorithm.as_ref().unwrap_or(&theirs.mechanism).clone(),
                match crossover {
                    Crossover::Always => "always".to_owned(),
                    Crossover::At { length, .. } => tokens(length.round() as usize),
                    Crossover::Never => "never".to_owned(),
                },
                format!("{} at {}", times(*speedup), tokens(*longest)),
            ]
        });
        Table::new(4, &["set", "call", "first", "second", "from", "times faster"], rows)
    }

    /// Every row.
    pub(crate) fn points(&self) -> Table {
        let rows = self.rows.iter().map(|row| {
            vec![
                row.set.clone(),
                row.mechanism.clone(),
                format!("{}{}", row.algorithm, if row.chosen { " →" } else { "" }),
                format!("{} {}", row.order.name(), row.pass),
                tokens(row.length),
                time(row.seconds.median),
                format!("{} – {}", time(row.seconds.lower), time(row.seconds.upper)),
                row.fresh_seconds.map_or_else(String::new, time),
                row.rooflines().map_or_else(String::new, |multiple| format!("{multiple:.2}")),
                bytes(row.extra_bytes as f64),
            ]
        });
        let head = ["set", "mechanism", "algorithm", "call", "tokens", "median", "quartiles", "fresh outputs"];
        Table::new(4, &[&head[..], &["× roofline", "extra memory"]].concat(), rows)
    }

    /// Which series end before the longest length, and why.
    pub(crate) fn ended(&self) -> Table {
        let rows = self.endings.iter().map(|ending| {
            vec![
                ending.set.clone(),
                ending.mechanism.clone(),
                ending.algorithm.clone(),
                format!("{} {}", ending.order.name(), ending.pass),
                ending.reason.clone(),
                if ending.length == 0 { "–".to_owned() } else { tokens(ending.length) },
            ]
        });
        Table::new(5, &["set", "mechanism", "algorithm", "call", "why", "first missing length"], rows)
    }
}

impl Choice {
    /// As a sentence.
    pub fn sentence(&self) -> String {
        format!(
            "The cost model's choice is within 10 % of the best algorithm at {} of {} points;\nat worst {:.2} × ({}).",
            self.within_a_tenth, self.points, self.worst, self.worst_at
        )
    }
}

/// Every mechanism against the baseline, and every mechanism's linear algorithms against its quadratic one.
fn comparisons(rows: &[Row]) -> Vec<Comparison> {
    let mut found = Vec::new();
    for key in groups(rows) {
        let own: Vec<&Row> = rows.iter().filter(|row| row.key() == key).collect();
        let automatic = |mechanism: &str| Curve { mechanism: mechanism.to_owned(), algorithm: None };
        for mechanism in mechanisms(own.iter().copied()).into_iter().filter(|name| *name != BASELINE) {
            found.extend(compare(rows, key, automatic(mechanism), automatic(BASELINE)));
        }
        if key.2 != Pass::Forward {
            continue;
        }
        for mechanism in mechanisms(own.iter().copied()) {
            let algorithms =
                distinct(own.iter().filter(|row| row.mechanism == mechanism).map(|row| row.algorithm.as_str()));
            let by = |algorithm: &str| Curve { mechanism: mechanism.to_owned(), algorithm: Some(algorithm.to_owned()) };
            for algorithm in algorithms.into_iter().filter(|algorithm| *algorithm != QUADRATIC) {
                found.extend(compare(rows, key, by(algorithm), by(QUADRATIC)));
            }
        }
    }
    found
}

/// The algorithm that looks at every pair.
pub(crate) const QUADRATIC: &str = "naive";

fn compare(rows: &[Row], key: Key<'_>, ours: Curve, theirs: Curve) -> Option<Comparison> {
    let (mine, other) = (points(rows, key, &ours), points(rows, key, &theirs));
    let crossover = Crossover::of(&mine, &other)?;
    let at = |length: f64| mine.iter().find(|point| point.0 == length);
    let (length, time, own) = other.iter().rev().find_map(|&(length, time)| Some((length, time, at(length)?.1)))?;
    Some(Comparison {
        set: key.0.to_owned(),
        order: key.1,
        pass: key.2,
        ours,
        theirs,
        crossover,
        longest: length as usize,
        speedup: time / own,
    })
}

/// The time of the chosen algorithm over that of the fastest, at every point with a choice.
fn choice(rows: &[Row]) -> Option<Choice> {
    let mut choice = Choice { points: 0, within_a_tenth: 0, worst: 0.0, worst_at: String::new() };
    for chosen in rows.iter().filter(|row| row.chosen && row.pass != Pass::Decode) {
        let same =
            |row: &&Row| (row.key(), &row.mechanism, row.length) == (chosen.key(), &chosen.mechanism, chosen.length);
        if rows.iter().filter(same).count() < 2 {
            continue;
        }
        let best = rows.iter().filter(same).map(|row| row.seconds.median).fold(f64::INFINITY, f64::min);
        let ratio = chosen.seconds.median / best;
        choice.points += 1;
        choice.within_a_tenth += usize::from(ratio <= 1.1);
        if ratio > choice.worst {
            choice.worst = ratio;
            choice.worst_at = format!(
                "{}, {} {}, {} tokens",
                chosen.mechanism,
                chosen.order.name(),
                chosen.pass,
                tokens(chosen.length)
            );
        }
    }
    (choice.points > 0).then_some(choice)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::statistics::Spread;
    use crate::workload::Pass;

    /// A report of made-up curves: the baseline and the naive algorithm quadratic, the other linear.
    pub(crate) fn example() -> Report {
        let mut rows = Vec::new();
        type Seconds = fn(f64) -> f64;
        let curves: [(&str, &str, Seconds); 4] = [
            ("kernelized", "chunked", |l| 1e-6 + 2e-7 * l),
            ("kernelized", "naive", |l| 1e-7 + 1e-9 * l * l),
            ("shaw-16", "chunked", |l| 1e-6 + 3e-7 * l),
            (BASELINE, "chunked", |l| 1e-7 + 2e-9 * l * l),
        ];
        for order in [OrderName::Causal, OrderName::Bidirectional] {
            for pass in Pass::ALL {
                if (order, pass) == (OrderName::Bidirectional, Pass::Decode) {
                    continue;
                }
                for exponent in 5..14 {
                    for (mechanism, algorithm, seconds) in curves {
                        let length = 1usize << exponent;
                        let l = length as f64;
                        let median = seconds(l);
                        let fastest = mechanism != "kernelized" || (algorithm == "naive") == (length < 256);
                        rows.push(Row {
                            set: "sweep".into(),
                            mechanism: mechanism.into(),
                            algorithm: algorithm.into(),
                            chosen: fastest,
                            order,
                            pass,
                            batch: 1,
                            heads: 8,
                            head_dim: 64,
                            threads: 2,
                            length,
                            seconds: Spread { median, lower: 0.9 * median, upper: 1.2 * median, runs: 7 },
                            fresh_seconds: (pass != Pass::Decode).then_some(1.5 * median),
                            flops: Some(l * 1e4),
                            roofline_seconds: (pass == Pass::Forward).then_some(0.7 * median),
                            call_bytes: length * 8192,
                            extra_bytes: 500_000,
                        });
                    }
                }
            }
        }
        let sweep = Sweep { rows, endings: Vec::new(), interrupted: false };
        Report::new("longspan-bench --example".into(), None, vec![(Settings::default(), sweep)])
    }

    #[test]
    fn json_comes_back_as_it_went() {
        let report = example();
        let text = report.to_json().unwrap();
        let again = Report::from_json(&text, "x.json".as_ref()).unwrap().to_json().unwrap();
        assert_eq!(again.lines().count(), text.lines().count());
        for (again, line) in again.lines().zip(text.lines()) {
            // The reader of JSON rounds numbers to the nearest but one at worst.
            let number = |line: &str| line.rsplit(' ').next().and_then(|x| x.trim_end_matches(',').parse::<f64>().ok());
            let close = number(again).zip(number(line)).is_some_and(|(a, b)| (a - b).abs() <= 4e-16 * b.abs());
            assert!(again == line || close, "{again} {line}");
        }
        let error = Report::from_json(&text[..text.len() / 2], "x.json".as_ref()).unwrap_err().to_string();
        assert!(error.starts_with("x.json: not a report"), "{error}");
    }

    #[test]
    fn csv_holds_every_row_to_the_last_bit() {
        let report = example();
        let text = report.to_csv();
        let mut lines = text.lines();
        let names: Vec<&str> = lines.next().unwrap().split(',').collect();
        let at = |name: &str| names.iter().position(|n| *n == name).unwrap_or_else(|| panic!("{name}"));
        for (line, row) in lines.by_ref().zip(&report.rows) {
            let fields: Vec<&str> = line.split(',').collect();
            assert_eq!(fields.len(), names.len(), "{line}");
            assert_eq!(fields[at("mechanism")], row.mechanism);
            assert_eq!(fields[at("mask")], row.order.name());
            assert_eq!(fields[at("pass")], row.pass.name());
            assert_eq!(fields[at("length")].parse::<usize>().unwrap(), row.length);
            assert_eq!(fields[at("seconds")].parse::<f64>().unwrap().to_bits(), row.seconds.median.to_bits());
            assert_eq!(fields[at("fresh_seconds")].parse::<f64>().ok(), row.fresh_seconds);
            assert_eq!(fields[at("extra_bytes")].parse::<usize>().unwrap(), row.extra_bytes);
        }
        assert_eq!(lines.next(), None);
        assert_eq!(text.lines().count(), report.rows.len() + 1);
    }

    #[test]
    fn conclusions_are_drawn() {
        let report = example();
        let find = |ours: &str, theirs: &str, algorithm: Option<&str>| {
            let found = report.comparisons.iter().find(|c| {
                c.pass == Pass::Forward
                    && c.order == OrderName::Causal
                    && c.ours.mechanism == ours
                    && c.theirs.mechanism == theirs
                    && c.ours.algorithm.as_deref() == algorithm
            });
            found.unwrap_or_else(|| panic!("{ours} {theirs}"))
        };
        assert_eq!(find("kernelized", BASELINE, None).crossover, Crossover::Always);
        let Crossover::At { length, .. } = find("shaw-16", BASELINE, None).crossover else { panic!("no crossing") };
        assert!((150.0..160.0).contains(&length), "{length}");
        let inner = find("kernelized", "kernelized", Some("chunked"));
        let Crossover::At { length, .. } = inner.crossover else { panic!("no crossing") };
        assert!((200.0..210.0).contains(&length), "{length}");
        assert_eq!(inner.longest, 8192);
        let choice = report.choice.as_ref().unwrap();
        // At 256 tokens chunked takes 52 µs, naive 66: the switch at 256 is right everywhere.
        assert_eq!((choice.points, choice.within_a_tenth), (36, 36), "{choice:?}");
        let text = report.to_text();
        for part in
            ["causal forward, B=1 H=8 d=64, f32, 2 threads", "shaw-16", "kernelized by chunked  naive", "36 of 36"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
    }
}
