//! The plots of a report, and one page that holds everything and needs nothing else.

use std::fmt::Write;

use crate::error::Error;
use crate::goals::{EXTRA_TARGET, Goals};
use crate::plot::{Line, Look, Mark, Plot, Unit};
use crate::quantity::{bytes, flop_rate, time, times, tokens};
use crate::registry::{BASELINE, registry};
use crate::report::{Curve, QUADRATIC, Report, distinct, groups, mechanisms, points, signed};
use crate::statistics::Crossover;
use crate::sweep::{OrderName, Row};
use crate::workload::Pass;

/// Sets whose rows redraw a published figure have names that begin so.
pub const FIGURE: &str = "figure";

/// A file to write.
#[derive(Debug, Clone, PartialEq)]
pub struct File {
    /// Its name in the folder.
    pub name: String,
    /// What stands in it.
    pub contents: Vec<u8>,
}

/// `bench.html`, `bench.csv`, `bench.json`, and every plot as `.svg` and `.png`. [`use_font`](crate::plot::use_font) comes
/// first.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn files(report: &Report) -> Result<Vec<File>, Error> {
    let mut files = Vec::new();
    let mut add = |name: &str, contents: Vec<u8>| files.push(File { name: name.to_owned(), contents });
    let plots = plots(report);
    for plot in &plots {
        add(&format!("{}.svg", plot.name), plot.svg()?.into_bytes());
        add(&format!("{}.png", plot.name), plot.png()?);
    }
    add("bench.csv", report.to_csv().into_bytes());
    add("bench.json", report.to_json()?.into_bytes());
    add("bench.html", page(report, &plots)?.into_bytes());
    Ok(files)
}

/// What plots call a mechanism.
fn title(name: &str) -> String {
    registry().iter().find(|entry| entry.name == name).map_or_else(|| name.to_owned(), |entry| entry.title.to_owned())
}

/// A mechanism has the same colour in all plots of a report.
fn colour(report: &Report, name: &str) -> Option<usize> {
    mechanisms(&report.rows).into_iter().filter(|other| *other != BASELINE).position(|other| other == name)
}

fn sizes(row: &Row) -> String {
    format!("B={} H={} d={}, f32, {} threads", row.batch, row.heads, row.head_dim, row.threads)
}

/// Every plot of a report.
pub fn plots(report: &Report) -> Vec<Plot> {
    let mut plots = Vec::new();
    let (figures, sweeps): (Vec<_>, Vec<_>) =
        groups(&report.rows).into_iter().partition(|key| key.0.starts_with(FIGURE));
    plots.extend(sweeps.iter().filter_map(|&key| overview(report, key)));
    let sets = distinct(sweeps.iter().map(|key| key.0));
    for set in &sets {
        for pass in [Pass::Forward, Pass::ForwardBackward] {
            plots.extend(memory(report, (set, OrderName::Causal, pass)));
        }
    }
    for set in &sets {
        let rows = || report.rows.iter().filter(|row| row.set == *set);
        for name in mechanisms(rows()) {
            if distinct(rows().filter(|row| row.mechanism == name).map(|row| row.algorithm.as_str())).len() > 1 {
                plots.extend(algorithms(report, set, name, None));
            }
        }
    }
    for set in distinct(figures.iter().map(|key| key.0)) {
        plots.extend(published(report, set));
    }
    plots.extend(growth(report));
    plots
}

/// One curve for each mechanism, as the cost model runs it.
fn overview(report: &Report, key: (&str, OrderName, Pass)) -> Option<Plot> {
    let (set, order, pass) = key;
    let rows: Vec<&Row> = report.rows.iter().filter(|row| (row.set.as_str(), row.order, row.pass) == key).collect();
    let first = rows.first()?;
    let curve = |name: &str| Curve { mechanism: name.to_owned(), algorithm: None };
    let look = |name: &str| Look { colour: colour(report, name), dashed: false, hollow: false };
    let names = mechanisms(rows.iter().copied());
    let line =
        |name: &&str| Line { label: title(name), points: points(&report.rows, key, &curve(name)), look: look(name) };
    let lines: Vec<Line> = names.iter().map(line).collect();
    let marks = report.comparisons.iter().filter(|comparison| {
        (comparison.set.as_str(), comparison.order, comparison.pass) == key && comparison.theirs == curve(BASELINE)
    });
    let marks = marks.filter_map(|comparison| mark(comparison.crossover, look(&comparison.ours.mechanism))).collect();
    let what = match pass {
        Pass::Forward => "forward",
        Pass::ForwardBackward => "forward and backward",
        Pass::Decode => "decoding one token",
    };
    let title = match pass {
        Pass::Decode => "Decoding: one token after a prefix".to_owned(),
        _ => format!("{}, {what}", capital(order.name())),
    };
    let name = match pass {
        Pass::Decode => format!("{set}-{pass}"),
        _ => format!("{set}-{}-{pass}", order.name()),
    };
    let quantity = if pass == Pass::Decode { "time per token" } else { "time per call" };
    Some(Plot { name, title, subtitle: sizes(first), quantity, unit: Unit::Time, lines, marks })
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn mark(crossover: Crossover, look: Look) -> Option<Mark> {
    match crossover {
        Crossover::At { length, height } => Some(Mark { length, height, look }),
        Crossover::Always | Crossover::Never => None,
    }
}

/// Bytes beyond inputs and outputs.
fn memory(report: &Report, key: (&str, OrderName, Pass)) -> Option<Plot> {
    let rows: Vec<&Row> =
        report.rows.iter().filter(|row| (row.set.as_str(), row.order, row.pass) == key && row.chosen).collect();
    let first = rows.first()?;
    let line = |name: &str| Line {
        label: title(name),
        points: rows
            .iter()
            .filter(|row| row.mechanism == name && row.extra_bytes > 0)
            .map(|row| (row.length as f64, row.extra_bytes as f64))
            .collect(),
        look: Look { colour: colour(report, name), dashed: false, hollow: false },
    };
    let lines: Vec<Line> = mechanisms(rows.iter().copied()).into_iter().map(line).collect();
    let what = if key.2 == Pass::Forward { "forward" } else { "forward and backward" };
    Some(Plot {
        name: format!("{}-memory-{}", key.0, key.2),
        title: format!("Memory beyond inputs and outputs, {} {what}", key.1.name()),
        subtitle: sizes(first),
        quantity: "peak extra memory",
        unit: Unit::Memory,
        lines,
        marks: Vec::new(),
    })
}

/// One mechanism by every algorithm, masked and not.
fn algorithms(report: &Report, set: &str, mechanism: &str, heading: Option<String>) -> Option<Plot> {
    let of = |row: &&Row| row.set == set && row.mechanism == mechanism && row.pass == Pass::Forward;
    let rows: Vec<&Row> = report.rows.iter().filter(of).collect();
    let first = rows.first()?;
    let names = distinct(rows.iter().map(|row| row.algorithm.as_str()));
    let look = |algorithm: &str, order: OrderName| Look {
        colour: names.iter().position(|name| *name == algorithm),
        dashed: order == OrderName::Bidirectional,
        hollow: order == OrderName::Bidirectional,
    };
    let mut lines = Vec::new();
    let mut marks = Vec::new();
    for order in [OrderName::Causal, OrderName::Bidirectional] {
        for name in &names {
            let curve = Curve { mechanism: mechanism.to_owned(), algorithm: Some((*name).to_owned()) };
            let label =
                if order == OrderName::Causal { format!("{name}, masked") } else { format!("{name}, bidirectional") };
            lines.push(Line {
                label,
                points: points(&report.rows, (set, order, Pass::Forward), &curve),
                look: look(name, order),
            });
            let against_quadratic = report.comparisons.iter().find(|comparison| {
                (comparison.set.as_str(), comparison.order, comparison.pass) == (set, order, Pass::Forward)
                    && comparison.ours == curve
                    && comparison.theirs.algorithm.as_deref() == Some(QUADRATIC)
            });
            marks.extend(against_quadratic.and_then(|found| mark(found.crossover, look(name, order))));
        }
    }
    Some(Plot {
        name: format!("{set}-{mechanism}-algorithms"),
        title: heading.unwrap_or_else(|| format!("{}: algorithms, forward", title(mechanism))),
        subtitle: sizes(first),
        quantity: "time per call",
        unit: Unit::Time,
        lines,
        marks,
    })
}

/// A published figure's axes: several mechanisms by their linear algorithm, or one by all.
fn published(report: &Report, set: &str) -> Option<Plot> {
    let rows: Vec<&Row> = report.rows.iter().filter(|row| row.set == set).collect();
    let first = rows.first()?;
    let names = mechanisms(rows.iter().copied());
    if let [only] = names.as_slice() {
        let plot = algorithms(report, set, only, Some(format!("{}: naive and linear, masked and not", title(only))))?;
        return Some(Plot { name: set.to_owned(), ..plot });
    }
    let key = (set, first.order, Pass::Forward);
    let mut lines: Vec<Line> = Vec::new();
    for name in &names {
        let own = rows.iter().filter(|row| row.mechanism == *name);
        let found = distinct(own.map(|row| row.algorithm.as_str()));
        let Some(algorithm) = found.iter().find(|name| **name != QUADRATIC).or(found.first()) else { continue };
        let curve = Curve { mechanism: (*name).to_owned(), algorithm: Some((*algorithm).to_owned()) };
        lines.push(Line {
            label: title(name),
            points: points(&report.rows, key, &curve),
            look: Look { colour: colour(report, name), dashed: false, hollow: false },
        });
    }
    let baseline = lines.iter().find(|line| line.look.colour.is_none()).map(|line| line.points.clone());
    let marks = lines
        .iter()
        .filter(|line| line.look.colour.is_some())
        .filter_map(|line| mark(Crossover::of(&line.points, baseline.as_ref()?)?, line.look));
    let marks = marks.collect();
    Some(Plot {
        name: set.to_owned(),
        title: format!("Linear attention and softmax, {} forward", first.order.name()),
        subtitle: sizes(first),
        quantity: "time per call",
        unit: Unit::Time,
        lines,
        marks,
    })
}

/// Time a token over length: flat is linear.
fn growth(report: &Report) -> Option<Plot> {
    let goals = report.goals.as_ref()?;
    let lines = goals.growths.iter().enumerate().map(|(n, growth)| Line {
        label: title(&growth.mechanism),
        points: growth.points.iter().map(|point| (point.length as f64, point.seconds)).collect(),
        look: Look { colour: Some(colour(report, &growth.mechanism).unwrap_or(n)), dashed: false, hollow: false },
    });
    Some(Plot {
        name: "growth".to_owned(),
        title: "Growth with length, causal forward".to_owned(),
        subtitle: format!(
            "B=1 H={} d={}, f32, {} threads",
            goals.settings.heads, goals.settings.head_dim, goals.threads
        ),
        quantity: "time per call",
        unit: Unit::Time,
        lines: lines.collect(),
        marks: Vec::new(),
    })
}

const STYLE: &str = "
:root{color-scheme:light}
body{margin:0;background:#f7f7f5;color:#222;font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:40px 24px 80px}
h1{font-size:28px;line-height:1.2;margin:0 0 6px}
h2{font-size:20px;margin:44px 0 10px}
p{margin:8px 0;max-width:72ch}
.facts{color:#555;font-size:14px}
code{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;background:#ececea;border-radius:4px;padding:1px 5px;overflow-wrap:anywhere}
figure{margin:18px 0;background:#fff;border:1px solid #e2e2df;border-radius:8px;padding:14px}
figure svg{display:block;width:100%;height:auto}
figcaption{color:#555;font-size:13px;margin-top:6px}
table{border-collapse:collapse;background:#fff;font-size:14px;font-variant-numeric:tabular-nums;width:100%}
.wide{overflow-x:auto;border:1px solid #e2e2df;border-radius:8px;margin:12px 0}
th,td{padding:5px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid #eee}
th{color:#555;font-weight:600;background:#fbfbfa}
td.name,th.name{text-align:left}
tr:last-child td{border-bottom:0}
.yes{color:#00714f;font-weight:600}.no{color:#a83f00;font-weight:600}
details{margin:14px 0}summary{cursor:pointer;font-weight:600}
";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A table whose first `names` columns are words.
fn table(names: usize, head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let class = |column: usize| if column < names { " class=\"name\"" } else { "" };
    let mut html = String::from("<div class=\"wide\"><table><thead><tr>");
    for (n, cell) in head.iter().enumerate() {
        let _ = write!(html, "<th{}>{cell}</th>", class(n));
    }
    html.push_str("</tr></thead><tbody>\n");
    for row in rows {
        html.push_str("<tr>");
        for (n, cell) in row.iter().enumerate() {
            let _ = write!(html, "<td{}>{cell}</td>", class(n));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody></table></div>\n");
    html
}

fn verdict(reached: bool) -> String {
    if reached {
        "<span class=\"yes\">reached</span>".to_owned()
    } else {
        "<span class=\"no\">missed</span>".to_owned()
    }
}

/// One page: text, tables and plots inside, nothing fetched.
fn page(report: &Report, plots: &[Plot]) -> Result<String, Error> {
    let machine = &report.machine;
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Longspan benchmark</title><style>{STYLE}</style></head><body><main>\n\
         <h1>Longspan benchmark</h1>\n<p class=\"facts\">{} · {} cores · {} · {} · longspan {}<br><code>{}</code></p>\n",
        escape(&machine.processor),
        machine.cores,
        escape(&machine.instructions),
        escape(&machine.system),
        escape(&report.version),
        escape(&report.command),
    );
    html.push_str(
        "<p>Medians of alternating runs. Before any time was taken, every mechanism and algorithm was checked against its \
         definition in doubles: outputs, gradients, and token by token.</p>\n",
    );
    if let Some(goals) = &report.goals {
        html.push_str(&goals_html(goals));
    }
    let (figures, rest): (Vec<&Plot>, Vec<&Plot>) = plots.iter().partition(|plot| plot.name.starts_with(FIGURE));
    let sections = [
        ("Time and memory over length", rest, "Each mechanism by the algorithm that the cost model chooses."),
        ("The published figures' axes", figures, "Lengths, sizes and curves as published; times of this machine."),
    ];
    for (heading, plots, words) in sections {
        if plots.is_empty() {
            continue;
        }
        let _ = write!(
            html,
            "<h2>{heading}</h2>\n<p>{words} Both axes are logarithmic: twice as steep is quadratic.</p>\n"
        );
        for plot in plots {
            // Inside a page an SVG needs no name space, and so the page holds no address at all.
            let svg = plot.svg()?.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1);
            let _ = writeln!(
                html,
                "<figure>{svg}<figcaption>Also as {0}.svg and {0}.png.</figcaption></figure>",
                escape(&plot.name)
            );
        }
    }
    html.push_str(&comparisons_html(report));
    html.push_str(&rows_html(report));
    html.push_str("</main></body></html>\n");
    Ok(html)
}

fn goals_html(goals: &Goals) -> String {
    let (settings, rates) = (&goals.settings, &goals.rates);
    let mut html = format!(
        "<h2>Against the machine's own limits</h2>\n<p>Causal forward, B=1 H={} L={} d={}, f32, {} threads. In the same turns \
         this machine multiplies 64³ streaming tiles at {}{} and copies inputs and outputs in {} ({:.1} GB/s read and \
         written). The wall is the product of the same flops at the better rate, plus that copy.</p>\n",
        settings.heads,
        tokens(settings.length),
        settings.head_dim,
        goals.threads,
        flop_rate(rates.tiles),
        rates.large.map_or_else(String::new, |large| format!(", 1024³ at {}", flop_rate(large))),
        time(rates.copy_seconds),
        rates.copy / 1e9,
    );
    let rows = goals.goals.iter().map(|goal| {
        vec![
            escape(&title(&goal.mechanism)),
            time(goal.seconds.median),
            format!("{:.3}", goal.flops / 1e9),
            format!("{:.2}", goal.ratio),
            format!("≤ {:.1}", goal.target),
            format!("{:.2}", goal.ratio_to_tiles),
            bytes(goal.extra_bytes as f64),
            format!("≤ {}", bytes(EXTRA_TARGET as f64)),
            verdict(goal.reached()),
        ]
    });
    let head = ["", "time", "GFLOP", "× wall", "goal", "× wall of tiles", "extra memory", "goal", ""];
    html.push_str(&table(1, &head, rows));
    let fits = goals.growths.iter().flat_map(|growth| {
        let what = [("time", &growth.time, time as fn(f64) -> String), ("memory", &growth.memory, bytes)];
        let range = growth.points.first().zip(growth.points.last());
        let range = range.map_or_else(String::new, |(a, b)| format!("{} – {}", tokens(a.length), tokens(b.length)));
        what.into_iter().filter_map(move |(name, fit, show)| {
            let fit = (*fit)?;
            Some(vec![
                escape(&title(&growth.mechanism)),
                name.to_owned(),
                range.clone(),
                format!("L<sup>{:.3}</sup>", fit.power),
                times(fit.power_worst),
                format!("{} + {} · L", signed(fit.fixed, show), show(fit.per_token)),
                format!("{:.0} %", 100.0 * fit.line_worst),
                format!("{:.4}", fit.r_squared),
            ])
        })
    });
    html.push_str("<p>How time and memory (inputs, outputs and all beside them) grow: as a power and as a line.</p>\n");
    html.push_str(&table(2, &["", "", "tokens", "power", "worst point", "line", "worst point", "R²"], fits));
    html
}

fn comparisons_html(report: &Report) -> String {
    let mut html = String::new();
    if !report.comparisons.is_empty() {
        html.push_str("<h2>Crossover lengths</h2>\n<p>From which length on the first is faster than the second.</p>\n");
        let rows = report.comparisons.iter().map(|comparison| {
            vec![
                escape(&comparison.set),
                format!("{} {}", comparison.order.name(), comparison.pass),
                escape(&comparison.ours.label()),
                escape(&comparison.theirs.label()),
                match comparison.crossover {
                    Crossover::Always => "always".to_owned(),
                    Crossover::At { length, .. } => tokens(length.round() as usize),
                    Crossover::Never => "never".to_owned(),
                },
                format!("{} at {}", times(comparison.speedup), tokens(comparison.longest)),
            ]
        });
        html.push_str(&table(4, &["set", "call", "first", "second", "from (tokens)", "how much faster"], rows));
    }
    if let Some(choice) = &report.choice {
        let _ = writeln!(html, "<p>{}{}</p>", escape(&choice.sentence()), escape(&report.rates_sentence()));
    }
    html
}

fn rows_html(report: &Report) -> String {
    if report.rows.is_empty() {
        return String::new();
    }
    let rows = report.rows.iter().map(|row| {
        vec![
            escape(&row.set),
            escape(&row.mechanism),
            format!("{}{}", escape(&row.algorithm), if row.chosen { " →" } else { "" }),
            format!("{} {}", row.order.name(), row.pass),
            tokens(row.length),
            time(row.seconds.median),
            format!("{} – {}", time(row.seconds.lower), time(row.seconds.upper)),
            row.fresh_seconds.map_or_else(String::new, time),
            row.wall_seconds.map_or_else(String::new, |wall| format!("{:.2}", row.seconds.median / wall)),
            bytes(row.extra_bytes as f64),
        ]
    });
    let head = [
        "set",
        "mechanism",
        "algorithm",
        "call",
        "tokens",
        "median",
        "quartiles",
        "fresh outputs",
        "× wall",
        "extra memory",
    ];
    let mut html = format!(
        "<h2>All points</h2>\n<p>The arrow marks the cost model's choice; × wall is the time over that of the same flops as \
         64³ streaming products plus a copy of inputs and outputs, measured in the same turns.</p>\n\
         <details><summary>{} points</summary>\n{}</details>\n",
        report.rows.len(),
        table(4, &head, rows)
    );
    if !report.endings.is_empty() {
        let endings = report.endings.iter().map(|ending| {
            vec![
                escape(&ending.set),
                escape(&ending.mechanism),
                escape(&ending.algorithm),
                format!("{} {}", ending.order.name(), ending.pass),
                escape(&ending.reason),
                if ending.length == 0 { "–".to_owned() } else { tokens(ending.length) },
            ]
        });
        let _ = write!(
            html,
            "<details><summary>Where series end early</summary>\n{}</details>\n",
            table(5, &["set", "mechanism", "algorithm", "call", "why", "first missing length"], endings)
        );
    }
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::{tests::FONT, use_font};
    use crate::report::tests::example;

    #[test]
    fn the_page_needs_nothing_else() {
        use_font(FONT).unwrap();
        let mut report = example();
        report.command = "longspan bench --out \"<script>\"".into();
        let files = files(&report).unwrap();
        let page = files.iter().find(|file| file.name == "bench.html").unwrap();
        let html = String::from_utf8(page.contents.clone()).unwrap();
        for fetched in ["http", "src=", "href=", "@import", "url(", "<script"] {
            assert!(!html.contains(fetched), "{fetched}");
        }
        assert_eq!(html.matches("<svg").count(), plots(&report).len());
        assert_eq!(html.matches("<table").count(), html.matches("</table>").count());
        for part in ["Kernelized", "Crossover lengths", "longspan bench --out", &report.machine.processor, "36 of 36"] {
            assert!(html.contains(&escape(part)), "{part}");
        }
        for plot in plots(&report) {
            for extension in ["svg", "png"] {
                let name = format!("{}.{extension}", plot.name);
                assert_eq!(files.iter().filter(|file| file.name == name).count(), 1, "{name}");
            }
        }
    }

    #[test]
    fn overviews_mark_where_the_baseline_is_passed() {
        let report = example();
        let plots = plots(&report);
        let causal = plots.iter().find(|plot| plot.name == "sweep-causal-forward").unwrap();
        assert_eq!(causal.lines.len(), 3);
        assert_eq!(causal.lines.iter().filter(|line| line.look.colour.is_none()).count(), 1);
        // The kernelized one is faster everywhere, so only one crossing is left to mark.
        assert_eq!(causal.marks.len(), 1);
        assert_eq!(causal.marks[0].look.colour, Some(1));
        let inner = plots.iter().find(|plot| plot.name == "sweep-kernelized-algorithms").unwrap();
        assert_eq!((inner.lines.len(), inner.marks.len()), (4, 2));
        assert!(plots.iter().any(|plot| plot.name == "sweep-memory-forward"));
    }

    #[test]
    fn published_figures_show_the_linear_algorithm_or_all() {
        let mut report = example();
        report.rows.retain(|row| row.order == OrderName::Bidirectional && row.pass == Pass::Forward);
        report.rows.iter_mut().for_each(|row| row.set = "figure-1".into());
        let several = &plots(&report)[0];
        assert_eq!((several.name.as_str(), several.lines.len()), ("figure-1", 3));
        let kernelized = &several.lines[0];
        assert_eq!(kernelized.points[0].1, 1e-6 + 2e-7 * 32.0, "by the linear algorithm at every length");
        assert_eq!(several.marks.len(), 2);
        report.rows.retain(|row| row.mechanism == "kernelized");
        assert_eq!(plots(&report)[0].lines.iter().filter(|line| !line.points.is_empty()).count(), 2);
    }

    #[test]
    fn a_report_of_nothing_is_a_page_too() {
        use_font(FONT).unwrap();
        let empty = Report::new("longspan bench".into(), None, Vec::new());
        assert!(files(&empty).unwrap().iter().any(|file| file.name == "bench.html"));
    }
}
