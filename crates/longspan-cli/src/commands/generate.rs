//! `longspan generate`: goes on with a text, as it comes.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use longspan::sample::SampleOptions;
use serde_json::json;

use super::Outcome;
use super::predict::say_unknown;
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::tasks::text::{Generated, Stops, Text, Wish};
use crate::tasks::{Task, Trained, lines};
use crate::terminal::notes::note;
use crate::terminal::samples::counted;
use crate::terminal::shell;

#[derive(Args)]
pub struct Arguments {
    /// The folder of a run on text
    run: PathBuf,
    /// The prompt, or - to read it from standard input
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Maximum number of tokens; 0 for as many as are read
    #[arg(long, default_value_t = 256, value_name = "N")]
    tokens: usize,
    /// Below 1 likely tokens come more often; 0 always takes the likeliest
    #[arg(long, default_value_t = 0.8, value_name = "T", allow_negative_numbers = true)]
    temperature: f64,
    /// Draw from the N likeliest tokens only; 0 for all
    #[arg(long, default_value_t = 0, value_name = "N")]
    top_k: usize,
    /// Nucleus sampling: draw from the smallest set of tokens with a total probability of at least P
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    top_p: f64,
    /// Seed of the random draws
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Do not let the text end by itself
    #[arg(long)]
    no_end: bool,
    /// Print one JSON object at the end instead
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    if !(arguments.temperature >= 0.0 && arguments.temperature.is_finite()) {
        bail!("--temperature {}: expected a number from 0", arguments.temperature);
    }
    if !(arguments.top_p > 0.0 && arguments.top_p <= 1.0) {
        bail!("--top-p {}: expected a number above 0, at most 1", arguments.top_p);
    }
    if arguments.stop.iter().any(String::is_empty) {
        bail!("--stop is empty; give the text to stop before");
    }
    if arguments.json && arguments.tokens == 0 {
        bail!("--json prints at the end, and --tokens 0 has none; give a number of tokens");
    }
    let folder = RunFolder::open(&arguments.run)?;
    let RunConfig::Text(config) = folder.load_config()? else {
        let (program, run) = (shell::program(), shell::path(folder.path()));
        bail!("this run predicts for lines and does not generate text; use: {program} predict {run}");
    };
    let trained = Trained::<Text>::load(folder, config)?;
    let prompt = match arguments.prompt.as_deref() {
        Some("-") => lines::utf8(&lines::read(Path::new("-"))?, "standard input")?.to_owned(),
        Some(text) => text.to_owned(),
        None => String::new(),
    };
    if arguments.prompt.is_some() && prompt.is_empty() {
        note("note: the prompt is empty");
    }
    let unknown = trained.task.unknown_pieces(&prompt);
    if !unknown.is_empty() && unknown.iter().map(|piece| piece.len()).sum::<usize>() == prompt.len() {
        bail!("nothing in the prompt occurred in training; give another one");
    }
    say_unknown(&unknown.into_iter().collect::<BTreeSet<_>>());
    let wish = Wish {
        prompt: &prompt,
        tokens: (arguments.tokens > 0).then_some(arguments.tokens),
        sample: SampleOptions { temperature: arguments.temperature, top_k: arguments.top_k, top_p: arguments.top_p },
        seed: arguments.seed,
        may_end: !arguments.no_end,
    };
    let started = Instant::now();
    let mut out = io::stdout().lock();
    let mut stops = Stops::new(&arguments.stop);
    let (mut whole, mut open, mut stopped) = (String::new(), false, false);
    // The prompt is read when the first token is there.
    let mut begun = None;
    let mut show = |text: &str| -> Result<()> {
        if arguments.json {
            whole.push_str(text);
        } else if !text.is_empty() {
            open = !text.ends_with('\n');
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    };
    let Generated { read, drawn, ended } =
        trained.task.generate(&trained.model, &trained.config, &wish, &mut |text| {
            begun.get_or_insert_with(Instant::now);
            let (text, found) = stops.push(text);
            show(&text)?;
            stopped = found;
            Ok(!found)
        })?;
    show(&stops.rest())?;
    let seconds = started.elapsed().as_secs_f64();
    if arguments.json {
        let how = json!({
            "run": arguments.run.display().to_string(), "prompt": prompt, "text": whole, "prompt_tokens": read,
            "tokens": drawn, "ended": ended, "stopped": stopped, "seconds": seconds,
        });
        writeln!(out, "{how}")?;
        return Ok(Outcome::Done);
    }
    if open {
        writeln!(out)?;
    }
    let end = match (ended, stopped) {
        (true, _) => "; the text ended by itself",
        (_, true) => "; a stop string came",
        _ => "",
    };
    let writing = begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
    let prompt = match read {
        0 => String::new(),
        _ => format!("; a prompt of {} in {:.1} s", counted(read, "tokens"), seconds - writing),
    };
    note(format_args!(
        "{} in {writing:.1} s, {:.0} a second{prompt}{end}",
        counted(drawn, "tokens"),
        drawn.saturating_sub(1) as f64 / writing.max(1e-9)
    ));
    Ok(Outcome::Done)
}
