//! `longspan-bench`: time and memory of attention over length, as a table, as files, and as one page with plots.
//!
//! Results go to standard output; progress and errors to standard error, an error as one line.

mod model;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use console::Term;
use longspan::attention::AttentionConfig;
use longspan_allocator::{Keeping, keep_small_blocks};
use longspan_bench::goals::{self, GoalSettings, Goals};
use longspan_bench::memory::Counting;
use longspan_bench::registry::{Entry, registry, select};
use longspan_bench::report::Report;
use longspan_bench::sweep::{OrderName, Progress, Settings, Sweep, Watch, sweep};
use longspan_bench::{Pass, accuracy, on_threads, page, plot};

/// The command's allocator, counted.
#[global_allocator]
static ALLOCATOR: Counting<Keeping> = Counting(Keeping);

/// DejaVu Sans, reduced to Latin. A bitmap needs a font, and not every machine has one.
const FONT: &[u8] = include_bytes!("../../assets/DejaVuSans-latin.ttf");

/// Tokens over which `--accuracy` measures errors.
const ACCURACY_LENGTH: usize = 4096;

/// Heads that it takes at most: the definition takes seconds a head.
const ACCURACY_HEADS: usize = 2;

/// Measure time and memory of attention over length, and draw them.
#[derive(Parser)]
#[command(name = "longspan-bench", version)]
struct Arguments {
    /// Stop within a minute: the project's own targets, growth with length, and a short sweep
    #[arg(long)]
    quick: bool,
    /// Also measure the axes of the published figures (one head; d=256, radius 10 and d=64)
    #[arg(long)]
    figures: bool,
    /// Measure errors instead of time: singles against doubles over one length, --max-length or 4096, as a Markdown table
    #[arg(long, conflicts_with_all = ["quick", "figures", "json", "out"])]
    accuracy: bool,
    /// Measure a whole language model instead: training step, prompt and token, of kernelized, shaw and softmax attention over
    /// 1024, 4096 and 16384 tokens
    #[arg(long, conflicts_with_all = ["quick", "figures", "accuracy", "out", "draw"])]
    model: bool,
    /// With --model, a backward that forms again what it needs: for long sequences in little memory
    #[arg(long, requires = "model")]
    recompute: bool,
    /// Mechanisms to measure, separated by commas; `list` shows them
    #[arg(long, value_delimiter = ',')]
    mechanisms: Vec<String>,
    /// Independent sequences
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Attention heads
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Numbers in one query, key or value of one head
    #[arg(long, default_value_t = 64)]
    dim: usize,
    /// Threads; one for each core if not given
    #[arg(long)]
    threads: Option<usize>,
    /// The first length; lengths double from here. 32, with --model 1024, and lengths grow by 4
    #[arg(long)]
    min_length: Option<usize>,
    /// The last length; 131072, with --quick 2048 for the sweep and 262144 for growth, with --model 16384
    #[arg(long)]
    max_length: Option<usize>,
    /// Seconds spent on each point
    #[arg(long)]
    seconds: Option<f64>,
    /// A series ends before a call would take longer than this, in seconds
    #[arg(long, default_value_t = 1.0)]
    longest_call: f64,
    /// A series ends before it would need more memory than this, in GiB
    #[arg(long, default_value_t = 4.0)]
    memory: f64,
    /// Do not also time calls whose outputs are allocated anew
    #[arg(long)]
    no_fresh: bool,
    /// Folder for bench.html, bench.csv, bench.json and the plots; without --quick, runs/bench if not given
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the report as one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Measure nothing: draw the page and the plots of a bench.json again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "figures", "accuracy"])]
    draw: Option<PathBuf>,
}

fn main() -> ExitCode {
    keep_small_blocks();
    match run(&Arguments::parse()) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        // 128 + SIGINT, as shells report it.
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        // A closed pipe, as after `| head`, is not an error.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", format!("error: {error:#}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|error| error.kind() == ErrorKind::BrokenPipe)
}

enum Outcome {
    Done,
    Interrupted,
}

/// Measures, prints and writes.
fn run(arguments: &Arguments) -> Result<Outcome> {
    let entries = registry();
    if arguments.mechanisms == ["list"] {
        let mut out = std::io::stdout().lock();
        for entry in &entries {
            writeln!(out, "{:<14} {}{}", entry.name, entry.title, if entry.usual { "" } else { " (on request)" })?;
        }
        return Ok(Outcome::Done);
    }
    if arguments.model {
        return model(arguments);
    }
    let file = !(arguments.quick || arguments.accuracy);
    let folder = arguments.out.clone().or_else(|| file.then(|| PathBuf::from("runs/bench")));
    if let Some(path) = &arguments.draw {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let report = Report::from_json(&text, path)?;
        return show(arguments, folder.as_deref(), &report).map(|()| Outcome::Done);
    }
    // Before minutes of measuring, not after.
    if let Some(folder) = &folder {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    let wanted: Vec<Entry> = select(&entries, &arguments.mechanisms)?;
    let threads = threads(arguments)?;
    if arguments.accuracy {
        let settings = Settings { max_length: arguments.max_length.unwrap_or(ACCURACY_LENGTH), ..settings(arguments) };
        settings.check()?;
        let sizes = (settings.max_length, settings.heads.min(ACCURACY_HEADS), settings.head_dim);
        let rows = watched(threads, |watch| Ok(accuracy::measure(&wanted, sizes, watch)?))?;
        write!(std::io::stdout().lock(), "{}", accuracy::table(&rows))?;
        return Ok(Outcome::Done);
    }
    let (goals, sweeps, interrupted) = watched(threads, |watch| measure(arguments, &entries, &wanted, watch))?;
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let report = Report::new(format!("longspan-bench {command}"), goals, sweeps);
    show(arguments, folder.as_deref(), &report)?;
    if interrupted {
        eprintln!("interrupted: what was measured until then is reported");
        return Ok(Outcome::Interrupted);
    }
    Ok(Outcome::Done)
}

/// Whole models.
fn model(arguments: &Arguments) -> Result<Outcome> {
    let (first, last) = (arguments.min_length.unwrap_or(1024), arguments.max_length.unwrap_or(16384));
    if first == 0 || first > last {
        bail!("--min-length {first}: expected 1 to --max-length, which is {last}");
    }
    let wanted = match arguments.mechanisms.as_slice() {
        [] => ["kernelized", "shaw", "softmax"].map(str::to_owned).to_vec(),
        given => given.to_vec(),
    };
    let named = |name: String| {
        let known = AttentionConfig::by_name(&name);
        let unknown = || anyhow!("--mechanisms {name}: no attention of models; longspan info --mechanisms lists them");
        known.ok_or_else(unknown).map(|attention| (name.clone(), attention))
    };
    let attention: Vec<_> = wanted.into_iter().map(named).collect::<Result<_>>()?;
    let lengths =
        std::iter::successors(Some(first), |length| length.checked_mul(4)).take_while(|&length| length <= last);
    let (lengths, seconds) = (lengths.collect(), arguments.seconds.unwrap_or(3.0));
    let plan = model::Plan { attention, lengths, seconds, recompute: arguments.recompute };
    let mut interrupted = false;
    let total = plan.attention.len() * plan.lengths.len();
    let report = listening(threads(arguments)?, |stop| {
        let mut done = 0;
        model::measure(&plan, &mut |label| {
            show_progress(done, total, label);
            done += 1;
            interrupted = stop.load(Ordering::Relaxed);
            if interrupted { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    })?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", report.to_text()?)?;
    }
    Ok(if interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// As many threads as asked for, or as there are cores.
fn threads(arguments: &Arguments) -> Result<usize> {
    match arguments.threads {
        Some(0) => bail!("--threads 0: expected at least 1"),
        Some(threads) => Ok(threads),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

/// Runs `body` on a pool of this many threads, with a flag that Ctrl-C sets; a second one ends the program.
fn listening<R: Send>(threads: usize, body: impl FnOnce(&AtomicBool) -> Result<R> + Send) -> Result<R> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot listen for Ctrl-C")?;
    }
    let result = on_threads(threads, || body(&stop));
    let terminal = Term::stderr();
    if terminal.is_term() {
        let _ = terminal.clear_line();
    }
    result?
}

/// Says in a terminal what is measured now. The display is a help, and no reason to fail.
fn show_progress(done: usize, total: usize, label: &str) {
    let terminal = Term::stderr();
    if terminal.is_term() {
        let columns = usize::from(terminal.size().1).saturating_sub(3);
        let line = format!("{done}/{total}  {label}");
        let _ = terminal.clear_line().and_then(|()| terminal.write_str(&console::truncate_str(&line, columns, "…")));
    }
}

/// Runs `body` on a pool of so many threads, shows its progress, and tells it when a signal asks to stop.
fn watched<R: Send>(threads: usize, body: impl FnOnce(Watch<'_>) -> Result<R> + Send) -> Result<R> {
    listening(threads, |stop| {
        body(&mut |at: &Progress| {
            show_progress(at.done, at.total, &at.label);
            if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    })
}

/// Results, and whether a signal asked to stop.
type Measured = (Option<Goals>, Vec<(Settings, Sweep)>, bool);

fn measure(arguments: &Arguments, entries: &[Entry], wanted: &[Entry], watch: Watch<'_>) -> Result<Measured> {
    let settings = settings(arguments);
    let mut plans: Vec<(Vec<Entry>, Settings)> = vec![(wanted.to_vec(), settings.clone())];
    if arguments.figures {
        for (names, figure) in figures(&settings) {
            // A mechanism of a figure that this build does not have is left out of it.
            let known = entries.iter().filter(|entry| names.contains(&entry.name)).cloned().collect();
            plans.push((known, figure));
        }
    }
    let longest = arguments.max_length.unwrap_or(usize::MAX);
    let goal_settings =
        GoalSettings { heads: arguments.heads, head_dim: arguments.dim, ..GoalSettings::default() }.up_to(longest);
    let mut sweeps = Vec::new();
    // Settings are checked by the first sweep; goals take the same sizes.
    settings.check()?;
    let Some(goals) = goals::measure(entries, &goal_settings, watch)? else { return Ok((None, sweeps, true)) };
    for (entries, settings) in plans {
        let result = sweep(&entries, &settings, watch)?;
        let interrupted = result.interrupted;
        sweeps.push((settings, result));
        if interrupted {
            return Ok((Some(goals), sweeps, true));
        }
    }
    Ok((Some(goals), sweeps, false))
}

fn settings(arguments: &Arguments) -> Settings {
    let usual = Settings::default();
    let (max_length, seconds) =
        if arguments.quick { (1 << 11, 0.01) } else { (usual.max_length, usual.seconds_per_point) };
    Settings {
        batch: arguments.batch,
        heads: arguments.heads,
        head_dim: arguments.dim,
        min_length: arguments.min_length.unwrap_or(usual.min_length),
        max_length: arguments.max_length.unwrap_or(max_length),
        seconds_per_point: arguments.seconds.unwrap_or(seconds),
        longest_call: arguments.longest_call,
        memory_limit: (arguments.memory.max(0.0) * f64::from(1 << 30)) as usize,
        fresh: !arguments.no_fresh && !arguments.quick,
        ..usual
    }
}

/// The published figures: softmax, kernelized and kernelized with relative positions, bidirectional, d=256, radius 10;
/// naive and linear, masked and not, d=64, for kernelized attention and for relative positions alone. One head, 32 to
/// 8,192 tokens.
fn figures(usual: &Settings) -> [(Vec<&'static str>, Settings); 3] {
    let figure = |name: &str, head_dim, orders| Settings {
        set: name.to_owned(),
        batch: 1,
        heads: 1,
        head_dim,
        min_length: 1 << 5,
        max_length: usual.max_length.min(1 << 13),
        passes: vec![Pass::Forward],
        orders,
        fresh: false,
        longest_call: usual.longest_call.max(10.0),
        ..usual.clone()
    };
    let both = || vec![OrderName::Causal, OrderName::Bidirectional];
    [
        (vec!["softmax", "kernelized", "shaw-10"], figure("figure-1", 256, vec![OrderName::Bidirectional])),
        (vec!["kernelized"], figure("figure-2", 64, both())),
        (vec!["relative-10"], figure("figure-3", 64, both())),
    ]
}

fn show(arguments: &Arguments, folder: Option<&Path>, report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", report.to_json()?)?;
    } else {
        write!(out, "{}", report.to_text())?;
    }
    let Some(folder) = folder else { return Ok(()) };
    plot::use_font(FONT)?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    for file in page::files(report)? {
        let path = folder.join(&file.name);
        fs::write(&path, &file.contents).with_context(|| format!("cannot write {}", path.display()))?;
    }
    eprintln!("plots, tables and data: {}", folder.join("bench.html").display());
    Ok(())
}
