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
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use serde_json::{Map, Value, json};

use super::Outcome;
use crate::run::checkpoint::Best;
use crate::run::columns::Columns;
use crate::run::config::{Config, TaskKind, TaskSettings};
use crate::run::draft::Draft;
use crate::run::folder::{CURVE, Lock, RunFolder};
use crate::run::keys::{self, Flag, KEYS, Key};
use crate::run::settings::Settings;
use crate::run::write::write_pictures;
use crate::tasks::attention;
use crate::tasks::feed::Feed;
use crate::tasks::ranks::Ranks;
use crate::tasks::task::{Answering, Scores as _, Shown};
use crate::tasks::{Task, for_task, lines};
use crate::terminal::notes::note;
use crate::terminal::samples::counted;
use crate::terminal::shell;
use crate::terminal::signals::Stop;
use schedule::relative_rate;
use session::Session;

#[derive(Args)]
#[command(after_long_help = keys_help())]
pub struct Arguments {
    #[command(flatten)]
    flags: Flags,
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
}

fn whole(text: &str) -> Result<u64, &'static str> {
    text.parse().map_err(|_| "not a whole number")
}

/// The flags of settings that have one, as they were given.
struct Flags(ArgMatches);

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        KEYS.iter().filter(|key| key.flag != Flag::No).fold(command, |command, key| {
            let names = if key.name == "attention" { format!(": {}", attention::names()) } else { String::new() };
            // Not the key alone: `--text-column` is called `text`, too.
            let arg = Arg::new(key.option()).long(key.long()).help(format!("{}{names}", key.help));
            let arg = match key.flag {
                Flag::No | Flag::Switch => arg.action(ArgAction::SetTrue),
                Flag::Whole(name) => arg.value_name(name).value_parser(whole),
                Flag::Number(name) => arg.value_name(name).value_parser(value_parser!(f64)),
                Flag::Word(name) => arg.value_name(name),
                Flag::File => arg.value_name("FILE").value_parser(value_parser!(PathBuf)),
                Flag::Paths => arg.value_name("PATH").value_parser(value_parser!(PathBuf)).num_args(1..),
            };
            command.arg(if key.name == "minutes" { arg.conflicts_with("--steps") } else { arg })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self(matches.clone());
        Ok(())
    }
}

impl Flags {
    /// The value of a setting, if its flag was given.
    fn value(&self, key: &Key) -> Result<Option<Value>> {
        let flag = key.option();
        let texts = || {
            let paths = self.0.get_many::<PathBuf>(&flag).into_iter().flatten();
            paths.map(|path| text(&flag, path)).collect::<Result<Vec<Value>>>()
        };
        Ok(match key.flag {
            Flag::No => None,
            Flag::Switch => self.0.get_flag(&flag).then_some(Value::Bool(true)),
            Flag::Whole(_) => self.0.get_one::<u64>(&flag).map(|number| json!(number)),
            Flag::Number(_) => match self.0.get_one::<f64>(&flag) {
                // JSON has neither infinity nor NaN.
                Some(number) if !number.is_finite() => bail!("{flag} {number}: expected a finite number"),
                number => number.map(|number| json!(number)),
            },
            Flag::Word(_) => self.0.get_one::<String>(&flag).map(|word| json!(word)),
            Flag::File => texts()?.pop(),
            Flag::Paths => Some(texts()?).filter(|paths| !paths.is_empty()).map(Value::Array),
        })
    }
}

/// Settings that --resume may change. Data may have moved: that they are the same is checked by their content.
const CHANGEABLE: [&str; 12] = [
    "steps",
    "checkpoint_steps",
    "evaluate",
    "answer_tokens",
    "split_sequence",
    "workers",
    "pairs",
    "text",
    "labelled",
    "series",
    "development",
    "held_out",
];

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

fn begin(arguments: &Arguments, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    let settings = gather(arguments)?;
    fn with<T: Task>(
        config: Config<T::Settings>,
        arguments: &Arguments,
        settings: &Settings,
        ranks: Option<Rc<Ranks>>,
        stop: &Stop,
    ) -> Result<Outcome> {
        attention::check_options(&config.model, |key| settings.gives(&[key]))?;
        check_ranks(&config, ranks.as_deref())?;
        let draft = match &arguments.out {
            Some(path) => Draft::claim(path)?.ok_or_else(|| {
                anyhow!("another process is making {} at this moment; choose another folder with --out", path.display())
            })?,
            None => claim_default(&config)?,
        };
        finish(Session::<T>::begin(draft, config, |keys| settings.gives(keys))?, ranks, stop)
    }
    for_task!(settings.resolve()?, with(arguments, &settings, ranks, stop))
}

fn resume(arguments: &Arguments, path: &Path, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    let folder = RunFolder::open(path)?;
    let lock = folder.lock()?;
    let stored = folder.load_config()?;
    let before = stored.training();
    let config = gather(arguments)?.change(&stored, |key| {
        // A run that was stopped before its minutes became steps may be given a number of steps.
        if CHANGEABLE.contains(&key) || (key == "minutes" && before.minutes.is_some()) {
            return Ok(());
        }
        bail!(
            "--resume {}: `{key}` is fixed by the run; only {} may change: train a new run with --out",
            path.display(),
            CHANGEABLE.join(", ")
        )
    })?;
    fn with<T: Task>(
        config: Config<T::Settings>,
        folder: RunFolder,
        lock: Lock,
        before: Option<usize>,
        ranks: Option<Rc<Ranks>>,
        stop: &Stop,
    ) -> Result<Outcome> {
        check_ranks(&config, ranks.as_deref())?;
        let session = Session::<T>::resume(folder, lock, config.absolute()?)?;
        say_jump(&session, before);
        finish(session, ranks, stop)
    }
    for_task!(config, with(folder, lock, before.known_steps(), ranks, stop))
}

/// Says it where another number of steps makes the learning rate jump up.
fn say_jump<T: Task>(session: &Session<T>, before: Option<usize>) {
    let (training, step) = (&session.config.training, session.saved.step);
    let (Some(steps), Some(before)) = (training.known_steps(), before) else { return };
    let rate = |step, steps| training.learning_rate * relative_rate(step, training.warmup_steps, steps);
    if step == 0 || step >= steps || step < training.warmup_steps {
        return;
    }
    let (last, next) = (rate(step - 1, before), rate(step, steps));
    if next > 1.5 * last {
        note(format_args!(
            "with {steps} steps instead of {before} the learning rate goes up from {last:.1e} to {next:.1e}, so the loss may rise at first"
        ));
    }
}

/// Refuses what several processes cannot share.
fn check_ranks<S: TaskSettings>(config: &Config<S>, ranks: Option<&Ranks>) -> Result<()> {
    if ranks.is_some() && config.paths().any(lines::is_standard_input) {
        let flag = S::KIND.data_flag();
        bail!("{flag}: every process reads the data, and standard input has one reader; give a file");
    }
    let Some(tokens) = config.common().split_sequence else { return Ok(()) };
    attention::check_split(&config.model)?;
    let count = ranks.map_or(1, Ranks::count);
    if tokens < count {
        bail!(
            "--split-sequence: sequences of {tokens} tokens have no stretch for each of {count} processes; raise --set segment=…"
        );
    }
    Ok(())
}

fn finish<T: Task>(mut session: Session<T>, ranks: Option<Rc<Ranks>>, stop: &Stop) -> Result<Outcome> {
    session.ranks = ranks;
    if let Some(ranks) = &session.ranks {
        let split = session.config.common().split_sequence.is_some();
        if split {
            session.task.split_among(ranks.peers());
        } else {
            session.data.train.keep_share(0, ranks.count())?;
        }
        #[cfg(feature = "mpi")]
        together::invite(ranks, &session)?;
        let what = if split { "stretch of every sequence" } else { "share of every batch" };
        note(format_args!("{} processes take their {what}", ranks.count()));
    }
    introduce(&session);
    if session.train(stop)? == Outcome::Interrupted {
        let (step, program, folder) = (session.saved.step, shell::program(), shell::path(session.folder.path()));
        note(format_args!("stopped after step {step} and saved; resume with: {program} train --resume {folder}"));
        return Ok(Outcome::Interrupted);
    }
    stop.nothing_to_save();
    #[cfg(feature = "mpi")]
    if let Some(ranks) = &session.ranks {
        together::trained(ranks)?;
    }
    report(&mut session)?;
    Ok(Outcome::Done)
}

fn introduce<T: Task>(session: &Session<T>) {
    let Session { config, data, .. } = session;
    note(session.task.introduce(config, data));
    if data.too_long > 0 {
        note(format_args!(
            "{}, with more than {} {}, left out; --set max_tokens={} keeps all",
            counted(data.too_long, "training examples"),
            config.common().files.map_or(0, |files| files.max_tokens),
            T::LENGTH,
            data.longest
        ));
    }
    let sized_for = session.sized_for.as_ref();
    let sized_for = sized_for.map_or(String::new(), |what| format!(" (for {what}; another with --set d_model=…)"));
    note(format_args!(
        "{} attention, {}, width {}{sized_for}: {} parameters; run folder {}",
        config.model.attention,
        T::blocks(config),
        config.model.d_model,
        session.model.num_params(),
        session.folder.path().display()
    ));
}

fn report<T: Task>(session: &mut Session<T>) -> Result<()> {
    let mut model = session.model.valid();
    if let Some(best) = session.saved.best.filter(|best| best.step < session.saved.step) {
        model = session.folder.load_weights(model)?;
        let last = session.log.development.last().map_or(f64::NAN, |point| point.1);
        let (Best { step, loss }, now) = (best, session.saved.step);
        if session.config.common().base && step == 0 {
            note(format_args!(
                "the model does not do better than the simple method that it corrects (development loss {loss:.3}, of step {now} {last:.3}), \
                 so that method answers alone"
            ));
        } else {
            // Less is the chance of a few hundred examples.
            let overfit = last > 1.01 * loss;
            let advice =
                if overfit { "; the steps since overfit, so fewer --steps or more data would do better" } else { "" };
            note(format_args!(
                "the weights of step {step} are kept: their development loss was {loss:.3}, that of step {now} is {last:.3}{advice}"
            ));
        }
    }
    let simple = session.simple()?;
    let [_, name] = session.config.scored_names();
    let (config, workers) = (&session.config, &session.workers);
    let how = Answering { config, beam: 1, workers, name: &name, line: &|place| place + 1 };
    let alone = session.saved.best.is_some_and(|best| best.step == 0);
    if let Some(calibrated) = session.task.calibrated(&model, &session.data, alone, &how)? {
        session.folder.save_weights(&calibrated)?;
        model = calibrated;
    }
    let held_out = session.data.scored(&session.config);
    let mut text = String::new();
    if held_out.is_empty() {
        text.push_str("there was too little data to hold any out: no scores\n");
    } else {
        note(format_args!("scoring {}", counted(held_out.len(), &format!("held-out {}", T::EXAMPLES))));
        let scores = session.task.score(&model, &held_out, &how)?;
        if let Some(picture) = scores.picture() {
            write_pictures(&session.folder.file("confusion"), &picture)?;
        }
        let named: Map<String, Value> = simple.iter().map(|one| (one.name.clone(), json!(one.score))).collect();
        session.log.write(&json!({ "step": session.saved.step, "held_out": scores, "simple": named }))?;
        session.folder.replace(&[])?;
        text.push_str("On held-out examples:\n");
        text.extend(scores.to_string().lines().map(|line| format!("  {line}\n")));
        if !simple.is_empty() {
            text.push_str("Simple methods on the same:\n");
        }
        text.extend(simple.iter().map(|one| format!("  {}: {}\n", one.name, one.shown)));
        for one in simple.iter().filter(|one| scores.is_behind(one.score)) {
            text.push_str(&format!("{} does better than the model on these.\n", one.name));
        }
    }
    let folder = shell::path(session.folder.path());
    let Shown { text: samples, next, picture } = session.task.show(&model, &held_out, &how, &folder)?;
    if !samples.is_empty() {
        text.push_str(&format!("\nSamples:\n{samples}"));
    }
    if let Some(picture) = &picture {
        let path = session.folder.file("forecast");
        write_pictures(&path, picture)?;
        text.push_str(&format!("\nForecasts beside what was held out: {}\n", shell::path(&path.with_extension("svg"))));
    }
    let curve = shell::path(&session.folder.file(CURVE));
    text.push_str(&format!("\nThe run is in {folder}; its loss curve is {curve}. Next:\n  {next}\n"));
    use std::io::Write as _;
    write!(std::io::stdout(), "{text}")?;
    Ok(())
}

fn gather(arguments: &Arguments) -> Result<Settings> {
    let mut settings = Settings::default();
    if let Some(path) = &arguments.config {
        settings.read_file(path)?;
    }
    for assignment in &arguments.set {
        settings.set_text(assignment)?;
    }
    for key in &KEYS {
        if let Some(value) = arguments.flags.value(key)? {
            settings.set(key.name, value, &key.option())?;
            if key.name == "steps" {
                // `minutes` in a file would win over `steps`.
                settings.set("minutes", Value::Null, "--steps")?;
            }
        }
    }
    settings.name_columns(&arguments.columns)?;
    Ok(settings)
}

fn text(flag: &str, path: &Path) -> Result<Value> {
    let text =
        path.to_str().ok_or_else(|| anyhow!("{flag} {}: the name is not UTF-8; rename the file", path.display()))?;
    Ok(json!(text))
}

/// The first folder of `runs/NAME`, `runs/NAME-2`, … that nobody has.
fn claim_default<S: TaskSettings>(config: &Config<S>) -> Result<Draft> {
    let stem = match config.first() {
        Some(path) if lines::is_standard_input(path) => "standard-input".into(),
        Some(path) if path.file_stem().is_none() => "text".into(),
        Some(path) => path.file_stem().unwrap_or_default().display().to_string(),
        None => config.common().drawn.map_or("cmudict", |name| name.split(':').next().unwrap_or(name)).into(),
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

/// The table of keys for `--help`: defaults, those of tasks that have others, and the tasks where not all have the key.
fn keys_help() -> String {
    let mut text = String::from("Keys of --config and --set, with their defaults:\n");
    let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from).replace("null", "-");
    let named = |kind: TaskKind| match kind {
        TaskKind::Forecast => "--forecast",
        kind => kind.flag(),
    };
    let usual = keys::defaults();
    let tasks = TaskKind::ALL.map(|kind| (kind, kind.keys().unwrap_or_default(), kind.defaults(&usual)));
    for key in &KEYS {
        let having = || tasks.iter().filter(|(_, own, _)| own.iter().any(|own| own == key.name));
        let own = having().filter(|(_, _, own)| own[key.name] != usual[key.name]);
        // Without --pairs these are the defaults of the dictionary.
        let flag = |kind| if kind == TaskKind::Pairs { "the dictionary" } else { named(kind) };
        let own: Vec<String> =
            own.map(|(kind, _, own)| format!("{} for {}", shown(&own[key.name]), flag(*kind))).collect();
        let few: Vec<&str> =
            having().map(|(kind, ..)| named(*kind)).filter(|_| having().count() < tasks.len()).collect();
        let notes: Vec<String> = [few.join(" "), own.join(", ")].into_iter().filter(|note| !note.is_empty()).collect();
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        let flag = format!("as {}", key.option());
        let meaning = if key.flag == Flag::No { key.help } else { &flag };
        text.push_str(&format!("  {:<17} {:<7} {meaning}{notes}\n", key.name, shown(&usual[key.name])));
    }
    text
}
