//! `longspan eval`: error rates of a run on a file of pairs.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::Outcome;
use super::search::Search;
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::tasks::task::Answering;
use crate::tasks::workers::Workers;
use crate::tasks::{Task, Trained, for_task, lines};

/// What `longspan eval` takes.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    search: Search,
    /// Pairs: a .tsv (source, tab, target), a .csv or a .jsonl with "source" and "target", also in gzip, or `-`; a source
    /// that comes several times may be answered by any of its targets
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Scores all pairs of a file.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let (folder, config) = arguments.search.open()?;
    for_task!(&config, score(arguments, folder, config))
}

fn score<T: Task>(arguments: &Arguments, folder: RunFolder, config: RunConfig) -> Result<Outcome> {
    let trained = Trained::<T>::load(folder, config)?;
    let texts = T::read(&arguments.file)?;
    let workers = Workers::new(Workers::usual_count())?;
    let name = lines::name(&arguments.file);
    // The texts know their lines.
    let how = Answering {
        config: &trained.config,
        beam: arguments.search.beam,
        workers: &workers,
        name: &name,
        line: &|place| place + 1,
    };
    let scores = trained.task.score(&trained.model, &texts, &how)?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut value = serde_json::to_value(&scores)?;
        value["run"] = json!(arguments.search.run.display().to_string());
        value["file"] = json!(arguments.file.display().to_string());
        value["beam"] = json!(arguments.search.beam);
        writeln!(out, "{value}")?;
    } else {
        write!(out, "{scores}")?;
    }
    Ok(Outcome::Done)
}
