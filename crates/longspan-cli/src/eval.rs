//! `longspan eval`: error rates of a run on a file of pairs.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::Outcome;
use crate::answer::Search;
use crate::data;
use crate::metrics::ErrorRates;

/// What `longspan eval` takes.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    search: Search,
    /// Pairs: a .tsv (source, tab, target) or a .jsonl; a source that comes several times may be answered by any of its
    /// targets
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Scores all pairs of a file.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let (trained, workers) = arguments.search.open()?;
    let examples = data::pairs::read(&arguments.file)?;
    let answerer = trained.answerer(arguments.search.beam, &workers);
    let rates = ErrorRates::of(&answerer.score(&examples)?);
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut value = serde_json::to_value(&rates)?;
        value["run"] = json!(arguments.search.run.display().to_string());
        value["file"] = json!(arguments.file.display().to_string());
        value["beam"] = json!(arguments.search.beam);
        writeln!(out, "{value}")?;
    } else {
        writeln!(out, "{} sources, {} target tokens", rates.sequences, rates.tokens)?;
        writeln!(out, "token error rate     {}", rates.token_error_rate)?;
        writeln!(out, "sequence error rate  {}", rates.sequence_error_rate)?;
    }
    Ok(Outcome::Done)
}
