//! `longspan train`: from data to a run folder.
//!
//! Reading order: this file gathers settings and reports; [`sizes`] chooses those of the model; [`session`] takes the steps;
//! [`gradients`] and [`schedule`] say what a step does.

mod gradients;
mod schedule;
mod session;
mod sizes;
#[cfg(feature = "mpi")]
mod together;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Result, anyhow, bail};
use burn::module::Module;
use clap::Args;
use serde_json::{Map, Value, json};

use super::Outcome;
use crate::run::columns::Columns;
use crate::run::config::RunConfig;
use crate::run::draft::Draft;
use crate::run::folder::{Lock, RunFolder};
use crate::run::keys::KEYS;
use crate::run::settings::Settings;
use crate::run::write::write_picture;
use crate::tasks::attention;
use crate::tasks::feed::Feed;
use crate::tasks::ranks::Ranks;
use crate::tasks::task::{Answering, Shown};
use crate::tasks::{Task, for_task, lines};
use crate::terminal::notes::note;
use crate::terminal::plot::Picture;
use crate::terminal::samples::number_of;
use crate::terminal::shell;
use crate::terminal::signals::Stop;
use schedule::relative_rate;
use session::Session;

/// What `longspan train` takes. Flags win over --set, --set wins over --config.
#[derive(Args)]
#[command(after_long_help = keys_help())]
pub struct Arguments {
    /// Pairs to learn from: a .tsv (source, tab, target), a .csv or a .jsonl with "source" and "target", also
    /// in gzip, or - for standard input; without it, the CMU pronouncing dictionary
    #[arg(long, value_name = "FILE")]
    pairs: Option<PathBuf>,
    /// Plain text for a language model: files, folders, or - for standard input; also in gzip
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["pairs", "development", "held_out"])]
    text: Vec<PathBuf>,
    /// Labelled texts to learn from: a .tsv (text, tab, label), a .csv or a .jsonl with "text" and "label", also in gzip, or -
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pairs", "text"])]
    labelled: Option<PathBuf>,
    /// Numeric series to learn from, at any times: a .jsonl ("times", "values", "label"), a .csv (id, time, channels, label), a .ts or
    /// .tsv of the UEA and UCR archives, also in gzip, or -
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pairs", "text", "labelled"])]
    series: Option<PathBuf>,
    /// Forecast the next N points of a series, with quantiles, instead of predicting its label
    #[arg(long, value_name = "N")]
    forecast: Option<usize>,
    /// Sequences to draw and learn from: mqar, recall, fuzzy, copying, memorization, compression or listops, with sizes such as
    /// mqar:pairs=16,length=256,vocabulary=8192
    #[arg(long, value_name = "NAME", conflicts_with_all = ["pairs", "text", "labelled", "series"])]
    synthetic: Option<String>,
    /// Segments of a text that a step learns from (truncated backpropagation through time)
    #[arg(long, value_name = "N")]
    backpropagate: Option<usize>,
    /// Over several processes, give each a stretch of every sequence of a text rather than some of the sequences
    #[arg(long)]
    split_sequence: bool,
    /// What a text is cut into: characters, bytes or a tokenizer.json; with --text also bpe, which is learned from the text, with
    /// --labelled also words
    #[arg(long, value_name = "TOKENS")]
    tokens: Option<String>,
    /// Byte-pair encoding with so many entries, learned from the text
    #[arg(long, value_name = "N")]
    vocabulary: Option<usize>,
    /// Pairs, labelled texts or series for the development loss, instead of a twentieth of --pairs, --labelled or --series
    #[arg(long, value_name = "FILE")]
    development: Option<PathBuf>,
    /// The same for the scores at the end
    #[arg(long, value_name = "FILE")]
    held_out: Option<PathBuf>,
    #[command(flatten)]
    columns: Columns,
    /// The folder to make for the run; by default one under runs/
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    out: Option<PathBuf>,
    /// Resume a run
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// Settings from a TOML file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, such as --set d_model=96; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[arg(long, value_name = "NAME", help = format!("The mechanism: {}", attention::names()))]
    attention: Option<String>,
    /// characters, words, bytes, or a tokenizer.json
    #[arg(long, value_name = "TOKENS")]
    source_tokens: Option<String>,
    /// characters, words, bytes, or a tokenizer.json
    #[arg(long, value_name = "TOKENS")]
    target_tokens: Option<String>,
    /// Optimiser steps
    #[arg(long, value_name = "N", conflicts_with = "minutes")]
    steps: Option<usize>,
    /// Train about this long: the first steps are timed, then the number of steps is fixed
    #[arg(long, value_name = "M")]
    minutes: Option<f64>,
    /// Of initial weights and the order of examples
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Pairs in a batch
    #[arg(long, value_name = "N")]
    batch_size: Option<usize>,
    /// The largest learning rate
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,
}

/// Settings that --resume may change. Data may have moved: that they are the same is checked by their content.
const CHANGEABLE: [&str; 11] = [
    "steps",
    "checkpoint_steps",
    "evaluate",
    "answer_tokens",
    "split_sequence",
    "pairs",
    "text",
    "labelled",
    "series",
    "development",
    "held_out",
];

/// Trains, and reports how well the run does on what it has not seen.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let ranks = Ranks::join()?.map(Rc::new);
    let stop = Stop::listen()?;
    #[cfg(feature = "mpi")]
    if let Some(ranks) = &ranks {
        if ranks.rank() > 0 {
            return together::help(ranks, &stop);
        }
        let outcome = train(arguments, Some(Rc::clone(ranks)), &stop);
        together::end(ranks)?;
        return outcome;
    }
    train(arguments, ranks, &stop)
}

fn train(arguments: &Arguments, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    match &arguments.resume {
        Some(path) => resume(arguments, path, ranks, stop),
        None => begin(arguments, ranks, stop),
    }
}

/// A new run.
fn begin(arguments: &Arguments, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    let mut settings = Settings::new()?;
    gather(&mut settings, arguments)?;
    if let Some(defaults) = settings.defaults_of_task() {
        settings = Settings::of(&defaults)?;
        gather(&mut settings, arguments)?;
    }
    let config = settings.finish()?;
    settings.check_use(config.kind())?;
    attention::check_options(&config, |key| settings.gives(&[key]))?;
    config.check_words()?;
    check_ranks(&config, ranks.as_deref())?;
    let draft = match &arguments.out {
        Some(path) => Draft::claim(path)?.ok_or_else(|| {
            anyhow!("another process is making {} at this moment; choose another folder with --out", path.display())
        })?,
        None => claim_default(&config)?,
    };
    fn with<T: Task>(
        draft: Draft,
        config: RunConfig,
        sizes_open: bool,
        ranks: Option<Rc<Ranks>>,
        stop: &Stop,
    ) -> Result<Outcome> {
        finish(Session::<T>::begin(draft, config, sizes_open)?, ranks, stop)
    }
    let sizes_open = !settings.gives(&sizes::KEYS);
    for_task!(&config, with(draft, config, sizes_open, ranks, stop))
}

/// A run that goes on from its last checkpoint.
fn resume(arguments: &Arguments, path: &Path, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    let folder = RunFolder::open(path)?;
    let lock = folder.lock()?;
    let stored = folder.load_config()?;
    let mut settings = Settings::of(&stored)?;
    gather(&mut settings, arguments)?;
    let mut config = settings.finish()?;
    settings.check_use(config.kind())?;
    check_ranks(&config, ranks.as_deref())?;
    // A run that was stopped before its minutes became steps may be given a number of steps.
    let changeable = |key: &str| CHANGEABLE.contains(&key) || (key == "minutes" && stored.minutes.is_some());
    if let Some(key) = settings.changed(&stored)?.into_iter().find(|key| !changeable(key)) {
        bail!(
            "--resume {}: `{key}` is fixed by the run; only {} may change: train a new run with --out",
            path.display(),
            CHANGEABLE.join(", ")
        );
    }
    lines::make_absolute(&mut config)?;
    fn with<T: Task>(
        folder: RunFolder,
        lock: Lock,
        configs: [RunConfig; 2],
        ranks: Option<Rc<Ranks>>,
        stop: &Stop,
    ) -> Result<Outcome> {
        let [config, stored] = configs;
        let session = Session::<T>::resume(folder, lock, config)?;
        say_jump(&session, &stored);
        finish(session, ranks, stop)
    }
    for_task!(&config, with(folder, lock, [config, stored], ranks, stop))
}

/// Says it where another number of steps makes the learning rate jump up.
fn say_jump<T: Task>(session: &Session<T>, stored: &RunConfig) {
    let (config, step) = (&session.config, session.step());
    let (Some(steps), Some(before)) = (config.known_steps(), stored.known_steps()) else { return };
    let rate = |step, steps| config.learning_rate * relative_rate(step, config.warmup_steps, steps);
    if step > 0 && step < steps {
        let (last, next) = (rate(step - 1, before), rate(step, steps));
        if next > 1.5 * last && step >= config.warmup_steps {
            note(format_args!(
                "with {steps} steps instead of {before} the learning rate goes up from {last:.1e} to {next:.1e}, so the loss may rise \
                 at first"
            ));
        }
    }
}

/// Refuses what several processes cannot share.
fn check_ranks(config: &RunConfig, ranks: Option<&Ranks>) -> Result<()> {
    let files = [config.data(), config.development.as_deref(), config.held_out.as_deref()].into_iter().flatten();
    let mut files = files.chain(config.text.iter().map(PathBuf::as_path));
    if ranks.is_some() && files.any(lines::is_standard_input) {
        bail!("{}: every process reads the data, and standard input has one reader; give a file", config.data_flag());
    }
    attention::check_split(config)?;
    let (tokens, count) = (config.segment * config.backpropagate, ranks.map_or(1, Ranks::count));
    if config.split_sequence && tokens < count {
        bail!(
            "--split-sequence: sequences of {tokens} tokens have no stretch for each of {count} processes; raise --set segment=…"
        );
    }
    Ok(())
}

/// Takes the steps that are left, and reports.
fn finish<T: Task>(mut session: Session<T>, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    session.ranks = ranks;
    if let Some(ranks) = &session.ranks {
        if session.config.split_sequence {
            session.task.split_among(ranks.peers());
        } else {
            session.data.train.keep_share(0, ranks.count())?;
        }
        #[cfg(feature = "mpi")]
        together::invite(ranks, &session)?;
        let what = if session.config.split_sequence { "stretch of every sequence" } else { "share of every batch" };
        note(format_args!("{} processes take their {what}", ranks.count()));
    }
    introduce(&session);
    if session.train(stop)? == Outcome::Interrupted {
        let (step, program, folder) = (session.step(), shell::program(), shell::path(session.folder.path()));
        note(format_args!("stopped after step {step} and saved; resume with: {program} train --resume {folder}"));
        return Ok(Outcome::Interrupted);
    }
    stop.nothing_to_save();
    report(&mut session)?;
    Ok(Outcome::Done)
}

/// Says what is about to happen.
fn introduce<T: Task>(session: &Session<T>) {
    let Session { config, data, .. } = session;
    note(session.task.introduce(config, data));
    if data.too_long > 0 {
        note(format_args!(
            "{} of the training examples have more than {} {} and are left out; --set max_tokens={} keeps all",
            data.too_long,
            config.max_tokens,
            T::LENGTH,
            data.longest
        ));
    }
    let sized_for = session.sized_for.as_ref();
    let sized_for = sized_for.map_or(String::new(), |what| format!(" (for {what}; another with --set d_model=…)"));
    note(format_args!(
        "{} attention, {}, width {}{sized_for}: {} parameters; run folder {}",
        config.attention,
        T::blocks(config),
        config.d_model,
        session.model.num_params(),
        session.folder.path().display()
    ));
}

/// Scores held-out examples and prints what to do next.
fn report<T: Task>(session: &mut Session<T>) -> Result<()> {
    let mut model = session.model.valid();
    if let Some(best) = session.saved.best.filter(|best| best.step < session.step()) {
        model = session.folder.load_weights(model)?;
        let last = session.log.development.last().map_or(f64::NAN, |point| point.1);
        // Less is the chance of a few hundred examples.
        let overfit = last > 1.01 * best.loss;
        let advice =
            if overfit { "; the steps since overfit, so fewer --steps or more data would do better" } else { "" };
        if session.config.base && best.step == 0 {
            note(format_args!(
                "the model does not do better than the simple method that it corrects (development loss {:.3}, of step {} {last:.3}), so that \
                 method answers alone",
                best.loss,
                session.step()
            ));
        } else {
            note(format_args!(
                "the weights of step {} are kept: their development loss was {:.3}, that of step {} is {last:.3}{advice}",
                best.step,
                best.loss,
                session.step()
            ));
        }
    }
    let simple = session.simple()?;
    let name = session.config.held_out.as_deref().map_or(session.config.data_name(), lines::name);
    let how = Answering {
        config: &session.config,
        beam: 1,
        workers: &session.workers,
        name: &name,
        line: &|place| place + 1,
    };
    let held_out = session.data.scored(&session.config);
    let mut text = String::new();
    if held_out.is_empty() {
        text.push_str("there was too little data to hold any out: no scores\n");
    } else {
        note(format_args!("scoring {} held-out {}", held_out.len(), number_of(held_out.len(), T::EXAMPLES)));
        let scores = session.task.score(&model, &held_out, &how)?;
        if let Some(picture) = T::picture(&scores) {
            let path = session.folder.path().join("confusion");
            write_picture(&path.with_extension("svg"), picture.svg()?.as_bytes())?;
            write_picture(&path.with_extension("png"), &picture.png()?)?;
        }
        let named: Map<String, Value> = simple.iter().map(|one| (one.name.clone(), json!(one.score))).collect();
        session.log.write(&json!({ "step": session.saved.step, "held_out": scores, "simple": named }))?;
        session.folder.seal_metrics()?;
        text.push_str("On held-out examples:\n");
        text.extend(scores.to_string().lines().map(|line| format!("  {line}\n")));
        if !simple.is_empty() {
            text.push_str("Simple methods on the same:\n");
        }
        text.extend(simple.iter().map(|one| format!("  {}: {}\n", one.name, one.shown)));
        for one in simple.iter().filter(|one| T::is_behind(&scores, one.score)) {
            text.push_str(&format!("{} does better than the model on these.\n", one.name));
        }
    }
    let folder = shell::path(session.folder.path());
    let Shown { text: samples, next, picture } = session.task.show(&model, &held_out, &how, &folder)?;
    if !samples.is_empty() {
        text.push_str(&format!("\nSamples:\n{samples}"));
    }
    if let Some(picture) = &picture {
        let path = session.folder.path().join("forecast");
        write_picture(&path.with_extension("svg"), picture.svg()?.as_bytes())?;
        write_picture(&path.with_extension("png"), &picture.png()?)?;
        text.push_str(&format!("\nForecasts beside what was held out: {}\n", shell::path(&path.with_extension("svg"))));
    }
    let curve = shell::path(&session.folder.loss_curve("svg"));
    text.push_str(&format!("\nThe run is in {folder}; its loss curve is {curve}. Next:\n  {next}\n"));
    use std::io::Write as _;
    write!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// Gathers settings: flags win over --set, --set wins over the file.
fn gather(settings: &mut Settings, arguments: &Arguments) -> Result<()> {
    if let Some(path) = &arguments.config {
        settings.read_file(path)?;
    }
    for assignment in &arguments.set {
        settings.set_text(assignment)?;
    }
    let whole = |n: Option<usize>| n.map(Value::from);
    let word = |word: &Option<String>| word.as_deref().map(Value::from);
    let path = |flag, path: &Option<PathBuf>| path.as_ref().map(|path| text(flag, path)).transpose();
    let flags: [(&str, &str, Option<Value>); 20] = [
        ("development", "--development", path("--development", &arguments.development)?),
        ("held_out", "--held-out", path("--held-out", &arguments.held_out)?),
        ("pairs", "--pairs", path("--pairs", &arguments.pairs)?),
        ("labelled", "--labelled", path("--labelled", &arguments.labelled)?),
        ("series", "--series", path("--series", &arguments.series)?),
        ("forecast", "--forecast", whole(arguments.forecast)),
        ("synthetic", "--synthetic", word(&arguments.synthetic)),
        ("backpropagate", "--backpropagate", whole(arguments.backpropagate)),
        ("split_sequence", "--split-sequence", arguments.split_sequence.then_some(Value::Bool(true))),
        ("text", "--text", texts(&arguments.text)?),
        ("tokens", "--tokens", word(&arguments.tokens)),
        ("vocabulary", "--vocabulary", whole(arguments.vocabulary)),
        ("attention", "--attention", word(&arguments.attention)),
        ("source_tokens", "--source-tokens", word(&arguments.source_tokens)),
        ("target_tokens", "--target-tokens", word(&arguments.target_tokens)),
        ("steps", "--steps", whole(arguments.steps)),
        ("minutes", "--minutes", number("--minutes", arguments.minutes)?),
        ("seed", "--seed", arguments.seed.map(Value::from)),
        ("batch_size", "--batch-size", whole(arguments.batch_size)),
        ("learning_rate", "--learning-rate", number("--learning-rate", arguments.learning_rate)?),
    ];
    for (key, flag, value) in flags {
        if let Some(value) = value {
            settings.set(key, value, flag)?;
        }
    }
    settings.merge("columns", &serde_json::to_value(&arguments.columns)?, "--time, --id and their like")?;
    if arguments.steps.is_some() {
        // `minutes` in a file would win over `steps`.
        settings.set("minutes", Value::Null, "--steps")?;
    }
    Ok(())
}

/// Paths as a setting; `None` without any.
fn texts(paths: &[PathBuf]) -> Result<Option<Value>> {
    let paths: Vec<Value> = paths.iter().map(|path| text("--text", path)).collect::<Result<_>>()?;
    Ok((!paths.is_empty()).then_some(Value::Array(paths)))
}

/// A path as a setting, which is text.
fn text(flag: &str, path: &Path) -> Result<Value> {
    let text =
        path.to_str().ok_or_else(|| anyhow!("{flag} {}: the name is not UTF-8; rename the file", path.display()))?;
    Ok(json!(text))
}

/// A number as a setting: JSON has neither infinity nor NaN.
fn number(flag: &str, value: Option<f64>) -> Result<Option<Value>> {
    if let Some(value) = value.filter(|value| !value.is_finite()) {
        bail!("{flag} {value}: expected a finite number");
    }
    Ok(value.map(Value::from))
}

/// The first folder of `runs/NAME`, `runs/NAME-2`, … that nobody has.
fn claim_default(config: &RunConfig) -> Result<Draft> {
    let stem = match config.data() {
        Some(path) if lines::is_standard_input(path) => "standard-input".into(),
        Some(path) if path.file_stem().is_none() => "text".into(),
        Some(path) => path.file_stem().unwrap_or_default().display().to_string(),
        None => config.synthetic.as_ref().map_or("cmudict", |name| name.split(':').next().unwrap_or(name)).into(),
    };
    for n in 1u32.. {
        let path = Path::new("runs").join(if n == 1 { stem.clone() } else { format!("{stem}-{n}") });
        if path.exists() {
            continue;
        }
        match Draft::claim(&path) {
            Ok(Some(draft)) => return Ok(draft),
            Ok(None) => {}
            // Another process has just taken it.
            Err(_) if path.exists() => {}
            Err(error) => return Err(error),
        }
    }
    bail!("runs/ has no free name left; choose a folder with --out")
}

/// The table of keys for `--help`.
fn keys_help() -> String {
    let mut text = String::from("Keys of --config and --set, with their defaults:\n");
    let defaults = serde_json::to_value(RunConfig::default()).unwrap_or_default();
    for (key, _, meaning) in KEYS {
        let default = match &defaults[key] {
            Value::Null => "-".into(),
            Value::String(name) => name.clone(),
            other => other.to_string(),
        };
        text.push_str(&format!("  {key:<17} {default:<7} {meaning}\n"));
    }
    text
}
