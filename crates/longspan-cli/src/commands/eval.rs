//! `longspan eval`: how well a run does on a file or on what it held out, as error rates on pairs and as bits per byte on a text.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use serde_json::json;

use super::search::Search;
use super::{Outcome, check_picture, draw};
use crate::run::columns::Columns;
use crate::run::config::Config;
use crate::run::folder::RunFolder;
use crate::tasks::task::{Answering, Scores as _};
use crate::tasks::workers::Workers;
use crate::tasks::{Task, Trained, for_task, lines};
use crate::terminal::notes::note;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    search: Search,
    /// As the run was trained on: pairs (a .tsv, a .csv or a .jsonl; a source that comes several times may be answered by any
    /// of its targets), labelled texts, series, or a text of any length; also in gzip, or `-`. Without it, what the run held out
    file: Option<PathBuf>,
    /// Draw the confusion matrix of labels: a .svg or a .png
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    #[command(flatten)]
    columns: Columns,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let (folder, config) = arguments.search.open(&arguments.columns)?;
    let has_labels = config.to_map()?.get("target").is_some_and(|target| target != "number");
    let what = "a run that predicts labels has a picture of its scores, this one has none";
    check_picture(arguments.picture.as_deref(), has_labels, what)?;
    for_task!(config, score(arguments, folder))
}

fn score<T: Task>(config: Config<T::Settings>, arguments: &Arguments, folder: RunFolder) -> Result<Outcome> {
    let trained = Trained::<T>::load(folder, config)?;
    let workers = Workers::new(Workers::usual_count())?;
    let file = arguments.file.as_deref();
    let name = file.map_or_else(|| trained.config.scored_names()[1].clone(), lines::name);
    let (config, beam) = (&trained.config, arguments.search.beam);
    // The texts know their lines.
    let how = Answering { config, beam, workers: &workers, name: &name, line: &|place| place + 1 };
    if file.is_some_and(|path| is_learned_from(path, &trained.config.data)) {
        note(format_args!("{name} is what the run learned from, so the scores are better than on new data"));
    }
    let scores = match file {
        Some(path) => trained.task.evaluate(&trained.model, path, &how)?,
        None => trained.task.score(&trained.model, &held_out(&trained)?, &how)?,
    };
    if let Some(path) = &arguments.picture {
        // Runs of earlier versions do not say what they predict.
        let none = || anyhow!("--picture: numbers have no picture of their scores; leave it out");
        draw(&scores.picture().ok_or_else(none)?, path)?;
    }
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut value = serde_json::to_value(&scores)?;
        value["run"] = json!(arguments.search.run.display().to_string());
        value["file"] = json!(file.map(|path| path.display().to_string()));
        value["beam"] = json!(arguments.search.beam);
        writeln!(out, "{value}")?;
    } else {
        write!(out, "{scores}")?;
    }
    Ok(Outcome::Done)
}

/// Whether a file, or the folder that it lies in, is one that the run learned from.
fn is_learned_from(path: &Path, data: &[PathBuf]) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    data.iter().any(|data| data.canonicalize().is_ok_and(|data| path.starts_with(data)))
}

/// What a run held out, if its data are still those that it learned from.
fn held_out<T: Task>(trained: &Trained<T>) -> Result<Vec<T::Text>> {
    let Some(saved) = trained.load_saved()? else {
        bail!("this run has no checkpoint, which knows what it learned from; name a file to score");
    };
    let data = trained.task.data(&trained.config).map_err(|error| anyhow!("{error}; name a file to score instead"))?;
    if let Some(name) = trained.config.changed(&saved.data_sha256, &data.sha256) {
        bail!("{name} is not what this run learned from; restore it, or name a file to score");
    }
    let held_out = data.scored(&trained.config);
    if held_out.is_empty() {
        bail!("this run held out nothing, since there was too little; name a file to score");
    }
    Ok(held_out)
}
