//! `longspan info`: what a run folder holds, verified, or how a file of data would be read.

mod file;
mod mechanisms;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, bail};
use burn::module::Module;
use clap::Args;
use serde_json::{Value, json};

use super::Outcome;
use crate::run::checkpoint::{Best, Saved};
use crate::run::columns::Columns;
use crate::run::config::{Config, ModelSettings};
use crate::run::folder::RunFolder;
use crate::run::seal;
use crate::tasks::scores::decimals;
use crate::tasks::{Task, Trained, for_task, lines};
use crate::terminal::progress::duration;
use crate::terminal::shell;

#[derive(Args)]
pub struct Arguments {
    /// The folder of a run, or a file of data: then its columns, and how each task would read it
    #[arg(required_unless_present = "mechanisms")]
    run: Option<PathBuf>,
    #[command(flatten)]
    columns: Columns,
    /// Compare all mechanisms instead: what each can do and what it costs
    #[arg(long, conflicts_with = "run")]
    mechanisms: bool,
    /// Take the run's files as they are, though a person changed them: from now on they are what the run is
    #[arg(long, conflicts_with = "mechanisms")]
    accept_changes: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let is_file = arguments.run.as_ref().is_some_and(|run| run.is_file() || lines::is_standard_input(run));
    if is_file && arguments.accept_changes {
        bail!("--accept-changes is not used by a file of data: leave it out, or give the folder of a run");
    }
    if !is_file && arguments.columns != Columns::default() {
        bail!("--time, --id and their like are used by a file of data alone: leave them out");
    }
    let Some(run) = &arguments.run else { return mechanisms::run(arguments.json) };
    if is_file {
        file::run(run, &arguments.columns, arguments.json)?;
        return Ok(Outcome::Done);
    }
    let folder = if arguments.accept_changes { RunFolder::open_changed(run)? } else { RunFolder::open(run)? };
    let config = folder.load_config()?;
    for_task!(config, describe(arguments, folder))
}

fn describe<T: Task>(config: Config<T::Settings>, arguments: &Arguments, folder: RunFolder) -> Result<Outcome> {
    let trained = Trained::<T>::load(folder, config)?;
    // Answering does not need the checkpoint; --resume does.
    let saved = trained.load_saved()?;
    if arguments.accept_changes {
        let _lock = trained.folder.lock()?;
        seal::seal(trained.folder.path())?;
    }
    let metrics = trained.folder.sealed_metrics()?;
    let metrics: Vec<Value> = metrics.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let last = |key: &str| metrics.iter().rev().map(|line| &line[key]).find(|value| !value.is_null()).cloned();
    let (config, run) = (&trained.config, trained.folder.path());
    let vocabularies = trained.task.vocabularies();
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut value = json!({
            "run": run.display().to_string(),
            "step": saved.as_ref().map(|saved| saved.step),
            "finished": saved.as_ref().map(|saved| config.training.known_steps().is_some_and(|steps| saved.step >= steps)),
            "best_step": saved.as_ref().map(|saved| saved.best.map_or(saved.step, |best| best.step)),
            "seconds": saved.as_ref().map(|saved| saved.seconds),
            "parameters": trained.model.num_params(),
            "loss": last("loss"),
            "development_loss": last("development_loss"),
            "held_out": last("held_out"),
            "config": config.to_map()?,
        });
        for vocabulary in vocabularies {
            value[format!("{}_vocabulary", vocabulary.side)] = json!(vocabulary.size);
        }
        writeln!(out, "{value}")?;
        return Ok(Outcome::Done);
    }
    let tokens: Vec<String> = vocabularies.iter().map(ToString::to_string).collect();
    let mut rows =
        vec![("run", run.display().to_string()), ("data", config.data_name()), ("tokens", tokens.join(" → "))];
    let channels = config.common().files.map_or(&[][..], |files| &files.columns.channels);
    if !channels.is_empty() {
        rows.push(("channels", channels.join(", ")));
    }
    let ModelSettings { attention, d_model, heads, .. } = &config.model;
    let (blocks, parameters) = (T::blocks(config), trained.model.num_params());
    rows.push((
        "model",
        format!("{attention} attention, {blocks}, width {d_model}, {heads} heads: {parameters} parameters"),
    ));
    let steps = config.training.known_steps();
    let of = steps.map_or("?".into(), |steps| steps.to_string());
    let training = |saved: &Saved| format!("step {} of {of}, {}", saved.step, duration(saved.seconds));
    let lost = || "cannot be resumed: the folder has weights and no checkpoint".into();
    rows.push(("training", saved.as_ref().map_or_else(lost, training)));
    let measure = trained.task.measure();
    if let Some(Best { step, loss }) = saved.as_ref().and_then(|saved| saved.best.filter(|best| best.step < saved.step))
    {
        rows.push(("weights", format!("of step {step}, the best on development examples ({loss:.3} {measure})")));
    }
    if let Some(loss) = last("development_loss").and_then(|loss| loss.as_f64()) {
        rows.push(("loss", format!("{loss:.3} {measure} on development examples")));
    }
    if let Some(held_out) = last("held_out") {
        let number = |key: &str, part: &str| held_out[key][part].as_f64();
        let percent = |key: &str| {
            let [rate, low, high] = ["rate", "low", "high"].map(|part| number(key, part).map(|share| 100.0 * share));
            Some(format!("{:.1} % ({:.1} … {:.1} %)", rate?, low?, high?))
        };
        let decimal = |key: &str, usual: usize, unit: &str| {
            let rate = number(key, "rate")?;
            let decimals = if usual < 4 { usual } else { decimals(rate) };
            let interval = number(key, "low").zip(number(key, "high"));
            let interval = interval.map(|(low, high)| format!(" ({low:.decimals$} … {high:.decimals$})"));
            Some(format!("{rate:.decimals$}{unit}{}", interval.unwrap_or_default()))
        };
        for (key, name) in [("token_error_rate", "token"), ("sequence_error_rate", "sequence")] {
            rows.extend(percent(key).map(|rate| (name, format!("error rate {rate} on held-out sources"))));
        }
        for (name, found) in [
            ("", decimal("bits_per_byte", 3, " bits per byte")),
            ("R² ", decimal("r_squared", 4, "")),
            ("mean absolute error ", decimal("mean_absolute_error", 4, "")),
            ("error over that of the last value ", decimal("error_over_last", 4, "")),
            ("accuracy ", percent("accuracy")),
            ("recalled ", percent("recalled")),
            ("80 % interval holds ", percent("coverage")),
        ] {
            rows.extend(found.map(|found| ("held out", format!("{name}{found}"))));
        }
    }
    if saved.is_some_and(|saved| steps.is_none_or(|steps| saved.step < steps)) {
        let (program, run) = (shell::program(), shell::path(run));
        rows.push(("unfinished", format!("resume it with: {program} train --resume {run}")));
    }
    rows.iter().try_for_each(|(name, text)| writeln!(out, "{name:<11} {text}"))?;
    Ok(Outcome::Done)
}
