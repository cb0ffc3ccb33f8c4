//! The plots of a report, and one page that holds everything and needs nothing else.

use minijinja::{Environment, context};

use crate::error::Error;
use crate::plot::{Line, Look, Mark, Plot, Unit};
use crate::registry::{BASELINE, registry};
use crate::report::{Comparison, Curve, QUADRATIC, Report, distinct, groups, mechanisms, points};
use crate::statistics::Crossover;
use crate::sweep::{Key, OrderName, Row};
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
    let mut add = |name: String, contents: Vec<u8>| files.push(File { name, contents });
    let mut figures = Vec::new();
    for plot in plots(report) {
        let svg = plot.svg()?;
        add(format!("{}.png", plot.name), plot.png()?);
        add(format!("{}.svg", plot.name), svg.clone().into_bytes());
        figures.push((plot.name, svg));
    }
    add("bench.csv".to_owned(), report.to_csv().into_bytes());
    add("bench.json".to_owned(), report.to_json()?.into_bytes());
    add("bench.html".to_owned(), page(report, figures)?.into_bytes());
    Ok(files)
}

/// One page: text, tables and plots, nothing fetched.
fn page(report: &Report, figures: Vec<(String, String)>) -> Result<String, Error> {
    // Inside a page an SVG needs no name space, and so the page holds no address at all.
    let plot = |(name, svg): &(String, String)| {
        context! { name => name.as_str(), svg => svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1) }
    };
    let (published, rest): (Vec<_>, Vec<_>) = figures.iter().partition(|(name, _)| name.starts_with(FIGURE));
    let sections = [
        ("Time and memory over length", "Each mechanism by the algorithm that the cost model chooses.", rest),
        ("The published figures' axes", "Lengths, sizes and curves as published; times of this machine.", published),
    ];
    let sections = sections.into_iter().filter(|(_, _, plots)| !plots.is_empty()).map(|(heading, words, plots)| {
        context! { heading, words, plots => plots.into_iter().map(plot).collect::<Vec<_>>() }
    });
    let goals = report.goals.as_ref().map(|goals| {
        context! { sizes => goals.sizes(), limits => goals.limits(), table => goals.table(), fits => goals.fits() }
    });
    let context = context! {
        machine => [
            report.machine.processor.clone(),
            format!("{} cores", report.machine.cores),
            report.machine.instructions.clone(),
            report.machine.system.clone(),
            format!("longspan {}", report.version),
        ]
        .join(" · "),
        command => report.command.as_str(),
        goals,
        sections => sections.collect::<Vec<_>>(),
        crossovers => report.crossovers(),
        choice => report.choice.as_ref().map(|choice| choice.sentence()),
        points => report.points(),
        ended => report.ended(),
    };
    Environment::new()
        .render_named_str("bench.html", include_str!("page.html"), context)
        .map_err(|error| Error::File { path: "bench.html".into(), reason: error.to_string() })
}

/// What plots call a mechanism.
fn title(name: &str) -> String {
    registry().iter().find(|entry| entry.name == name).map_or(name, |entry| entry.title).to_owned()
}

/// A mechanism has the same colour in all plots of a report.
fn look(report: &Report, name: &str) -> Look {
    let mut others = mechanisms(&report.rows).into_iter().filter(|other| *other != BASELINE);
    Look { colour: others.position(|other| other == name), dashed: false }
}

fn curve(mechanism: &str, algorithm: Option<&str>) -> Curve {
    Curve { mechanism: mechanism.to_owned(), algorithm: algorithm.map(str::to_owned) }
}

/// A mark for each crossing of the group that `look` has a look for.
fn marks(report: &Report, key: Key<'_>, look: impl Fn(&Comparison) -> Option<Look>) -> Vec<Mark> {
    let own = report.comparisons.iter().filter(|found| (found.set.as_str(), found.order, found.pass) == key);
    own.filter_map(|found| mark(found.crossover, look(found)?)).collect()
}

fn mark(crossover: Crossover, look: Look) -> Option<Mark> {
    match crossover {
        Crossover::At { length, height } => Some(Mark { at: (length, height), look }),
        Crossover::Always | Crossover::Never => None,
    }
}

/// Every plot of a report.
pub fn plots(report: &Report) -> Vec<Plot> {
    let (figures, sweeps): (Vec<_>, Vec<_>) =
        groups(&report.rows).into_iter().partition(|key| key.0.starts_with(FIGURE));
    let mut plots: Vec<Plot> = sweeps.iter().filter_map(|&key| overview(report, key)).collect();
    for set in distinct(sweeps.iter().map(|key| key.0)) {
        for pass in [Pass::Forward, Pass::ForwardBackward] {
            plots.extend(memory(report, (set, OrderName::Causal, pass)));
        }
        for name in mechanisms(report.rows.iter().filter(|row| row.set == set)) {
            plots.extend(algorithms(report, set, name).filter(|plot| plot.lines.len() > 2));
        }
    }
    plots.extend(distinct(figures.iter().map(|key| key.0)).into_iter().filter_map(|set| published(report, set)));
    plots.extend(growth(report));
    plots
}

/// One curve for each mechanism, as the cost model runs it.
fn overview(report: &Report, key: Key<'_>) -> Option<Plot> {
    let (set, order, pass) = key;
    let kind = |what| (format!("{set}-{}-{pass}", order.name()), format!("{}, {what}", capital(order.name())));
    let rows = || report.rows.iter().filter(|row| row.key() == key);
    let (name, heading) = match pass {
        Pass::Forward => kind("forward"),
        Pass::ForwardBackward => kind("forward and backward"),
        Pass::Decode => (format!("{set}-{pass}"), "Decoding: one token after a prefix".to_owned()),
    };
    Some(Plot {
        name,
        title: heading,
        subtitle: rows().next()?.sizes(),
        quantity: if pass == Pass::Decode { "time per token" } else { "time per call" },
        unit: Unit::Time,
        lines: mechanisms(rows())
            .into_iter()
            .map(|name| Line {
                label: title(name),
                points: points(&report.rows, key, &curve(name, None)),
                look: look(report, name),
            })
            .collect(),
        marks: marks(report, key, |found| {
            (found.theirs == curve(BASELINE, None)).then(|| look(report, &found.ours.mechanism))
        }),
    })
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Bytes beyond inputs and outputs.
fn memory(report: &Report, key: Key<'_>) -> Option<Plot> {
    let rows = || report.rows.iter().filter(|row| row.key() == key && row.chosen);
    let points = |name: &str| {
        let own = rows().filter(|row| row.mechanism == name && row.extra_bytes > 0);
        own.map(|row| (row.length as f64, row.extra_bytes as f64)).collect()
    };
    let what = if key.2 == Pass::Forward { "forward" } else { "forward and backward" };
    Some(Plot {
        name: format!("{}-memory-{}", key.0, key.2),
        title: format!("Memory beyond inputs and outputs, {} {what}", key.1.name()),
        subtitle: rows().next()?.sizes(),
        quantity: "peak extra memory",
        unit: Unit::Memory,
        lines: mechanisms(rows())
            .into_iter()
            .map(|name| Line { label: title(name), points: points(name), look: look(report, name) })
            .collect(),
        marks: Vec::new(),
    })
}

/// One mechanism by every algorithm, masked and not.
fn algorithms(report: &Report, set: &str, mechanism: &str) -> Option<Plot> {
    let rows: Vec<&Row> = (report.rows.iter())
        .filter(|row| row.set == set && row.mechanism == mechanism && row.pass == Pass::Forward)
        .collect();
    let names = distinct(rows.iter().map(|row| row.algorithm.as_str()));
    let look = |algorithm: &str, order| Look {
        colour: names.iter().position(|name| *name == algorithm),
        dashed: order == OrderName::Bidirectional,
    };
    let mut plot = Plot {
        name: format!("{set}-{mechanism}-algorithms"),
        title: format!("{}: algorithms, forward", title(mechanism)),
        subtitle: rows.first()?.sizes(),
        quantity: "time per call",
        unit: Unit::Time,
        lines: Vec::new(),
        marks: Vec::new(),
    };
    for order in [OrderName::Causal, OrderName::Bidirectional] {
        let key = (set, order, Pass::Forward);
        let mask = if order == OrderName::Causal { "masked" } else { "bidirectional" };
        plot.lines.extend(names.iter().map(|name| Line {
            label: format!("{name}, {mask}"),
            points: points(&report.rows, key, &curve(mechanism, Some(name))),
            look: look(name, order),
        }));
        plot.marks.extend(marks(report, key, |found| {
            let inner = found.theirs == curve(mechanism, Some(QUADRATIC));
            found.ours.algorithm.as_deref().filter(|_| inner).map(|algorithm| look(algorithm, order))
        }));
    }
    Some(plot)
}

/// A published figure's axes: several mechanisms by their linear algorithm, or one by all.
fn published(report: &Report, set: &str) -> Option<Plot> {
    let rows = || report.rows.iter().filter(|row| row.set == set);
    let names = mechanisms(rows());
    if let [only] = names.as_slice() {
        let plot = algorithms(report, set, only)?;
        return Some(Plot {
            name: set.to_owned(),
            title: format!("{}: naive and linear, masked and not", title(only)),
            ..plot
        });
    }
    let first = rows().next()?;
    let key = (set, first.order, Pass::Forward);
    let line = |name: &&str| {
        let found = distinct(rows().filter(|row| row.mechanism == *name).map(|row| row.algorithm.as_str()));
        let algorithm = found.iter().find(|name| **name != QUADRATIC).or(found.first())?;
        let points = points(&report.rows, key, &curve(name, Some(algorithm)));
        Some(Line { label: title(name), points, look: look(report, name) })
    };
    let lines: Vec<Line> = names.iter().filter_map(line).collect();
    let baseline = lines.iter().find(|line| line.look.colour.is_none());
    let others = lines.iter().filter(|line| line.look.colour.is_some());
    let marks = others.filter_map(|line| mark(Crossover::of(&line.points, &baseline?.points)?, line.look)).collect();
    Some(Plot {
        name: set.to_owned(),
        title: format!("Linear attention and softmax, {} forward", first.order.name()),
        subtitle: first.sizes(),
        quantity: "time per call",
        unit: Unit::Time,
        lines,
        marks,
    })
}

/// Time over length; straight lines of slope one are linear.
fn growth(report: &Report) -> Option<Plot> {
    let goals = report.goals.as_ref()?;
    let lines = goals.growths.iter().enumerate().map(|(n, growth)| Line {
        label: title(&growth.mechanism),
        points: growth.points.iter().map(|point| (point.length as f64, point.seconds)).collect(),
        look: Look { colour: look(report, &growth.mechanism).colour.or(Some(n)), dashed: false },
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::{tests::FONT, use_font};
    use crate::report::tests::example;

    #[test]
    fn the_page_needs_nothing_else() {
        use_font(FONT).unwrap();
        let mut report = example();
        report.command = "longspan-bench --out \"<script>\"".into();
        let files = files(&report).unwrap();
        let page = files.iter().find(|file| file.name == "bench.html").unwrap();
        let html = String::from_utf8(page.contents.clone()).unwrap();
        for fetched in ["http", "src=", "href=", "@import", "url(", "<script"] {
            assert!(!html.contains(fetched), "{fetched}");
        }
        assert_eq!(html.matches("<svg").count(), plots(&report).len());
        assert_eq!(html.matches("<table").count(), html.matches("</table>").count());
        for part in ["Kernelized", "Crossover lengths", "longspan-bench --out", "36 of 36"] {
            assert!(html.contains(part), "{part}");
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
        let empty = Report::new("longspan-bench".into(), None, Vec::new());
        assert!(files(&empty).unwrap().iter().any(|file| file.name == "bench.html"));
    }
}
