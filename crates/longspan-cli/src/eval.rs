//! `longspan eval`: error rates of a run on a file of pairs.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;

use crate::Outcome;
use crate::answer::Answerer;
use crate::data;
use crate::metrics::ErrorRates;
use crate::model::Trained;
use crate::train::Workers;

/// What `longspan eval` takes.
#[derive(Args)]
pub struct Arguments {
    /// The folder of a run
    run: PathBuf,
    /// Pairs: a .tsv (source, tab, target) or a .jsonl; a source that comes several times may be answered by any of its
    /// targets
    file: PathBuf,
    /// Keep so many prefixes while searching
    #[arg(long, default_value_t = 1, value_name = "N")]
    beam: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Scores all pairs of a file.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    if arguments.beam == 0 {
        bail!("--beam 0: expected at least 1");
    }
    let trained = Trained::load(&arguments.run)?;
    let examples = data::pairs::read(&arguments.file)?;
    let workers = Workers::new(std::thread::available_parallelism().map_or(1, usize::from).min(8))?;
    let answerer = Answerer {
        model: &trained.model,
        source: &trained.source,
        target: &trained.target,
        max_tokens: trained.config.answer_tokens.unwrap_or(trained.config.max_tokens),
        beam: arguments.beam,
        workers: &workers,
    };
    let rates = ErrorRates::of(&answerer.score(&examples)?);
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut value = serde_json::to_value(&rates)?;
        value["run"] = json!(arguments.run.display().to_string());
        value["file"] = json!(arguments.file.display().to_string());
        value["beam"] = json!(arguments.beam);
        writeln!(out, "{value}")?;
    } else {
        writeln!(out, "{} sources, {} target tokens", rates.sequences, rates.tokens)?;
        writeln!(out, "token error rate     {}", rates.token_error_rate)?;
        writeln!(out, "sequence error rate  {}", rates.sequence_error_rate)?;
    }
    Ok(Outcome::Done)
}
