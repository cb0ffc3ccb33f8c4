//! `longspan eval`: how well a run does on a file, as error rates on pairs and as bits per byte on a text.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;

use super::Outcome;
use super::search::Search;
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::run::write::write_atomic;
use crate::tasks::task::Answering;
use crate::tasks::workers::Workers;
use crate::tasks::{Task, Trained, for_task, lines};
use crate::terminal::plot::{Matrix, Picture};

/// What `longspan eval` takes.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    search: Search,
    /// As the run was trained on: pairs (a .tsv, a .csv or a .jsonl; a source that comes several times may be answered by any
    /// of its targets), labelled texts, series, or a text of any length; also in gzip, or `-`
    file: PathBuf,
    /// Draw which labels are taken for which: a .svg or a .png
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Scores a file.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let (folder, config) = arguments.search.open()?;
    for_task!(&config, score(arguments, folder, config))
}

fn score<T: Task>(arguments: &Arguments, folder: RunFolder, config: RunConfig) -> Result<Outcome> {
    let trained = Trained::<T>::load(folder, config)?;
    let workers = Workers::new(Workers::usual_count())?;
    let name = lines::name(&arguments.file);
    let how = Answering {
        config: &trained.config,
        beam: arguments.search.beam,
        workers: &workers,
        name: &name,
        // The texts know their lines.
        line: &|place| place + 1,
    };
    let scores = trained.task.evaluate(&trained.model, &arguments.file, &how)?;
    if let Some(path) = &arguments.picture {
        draw(T::picture(&scores), path)?;
    }
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

/// Draws scores into a file.
fn draw(picture: Option<Matrix<'_>>, path: &Path) -> Result<()> {
    let Some(picture) = picture else { bail!("--picture: a run that tells labels has a picture, this one has none") };
    match lines::ending(path).as_str() {
        "svg" => write_atomic(path, picture.svg()?.as_bytes()),
        "png" => write_atomic(path, &picture.png()?),
        _ => bail!("--picture {}: expected a name that ends in .svg or .png", path.display()),
    }
}
