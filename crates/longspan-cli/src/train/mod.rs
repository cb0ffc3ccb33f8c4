//! `longspan train`: from pairs to a run folder.

mod corpus;
mod log;
mod schedule;
mod step;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, anyhow, bail};
use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Device;
use clap::Args;
use longspan::models::Seq2Seq;
use serde_json::{Value, json};

pub use step::{Workers, source_ids};

use crate::Outcome;
use crate::answer::Answerer;
use crate::attention;
use crate::config::{self, RunConfig, Settings};
use crate::data::batches::{Batches, SplitMix};
use crate::metrics::ErrorRates;
use crate::model;
use crate::progress::{Progress, Status, duration, note};
use crate::run::{Lock, RunFolder, Saved, write_atomic};
use crate::signals::Stop;
use crate::tokens::Tokenizer;
use corpus::Corpus;
use log::MetricsLog;
use schedule::{TIMED_STEPS, relative_rate};
use step::Pair;

/// What `longspan train` takes. Flags win over --set, --set wins over --config.
#[derive(Args)]
#[command(after_long_help = keys_help())]
pub struct Arguments {
    /// Pairs to learn from: a .tsv (source, tab, target) or a .jsonl with "source" and "target"; without it, the CMU
    /// pronouncing dictionary
    #[arg(long, value_name = "FILE")]
    pairs: Option<PathBuf>,
    /// The folder to make for the run; by default one under runs/
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    out: Option<PathBuf>,
    /// Go on with a run that was interrupted
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

/// What a run that goes on may change.
const CHANGEABLE: [&str; 4] = ["steps", "checkpoint_steps", "evaluate", "answer_tokens"];

/// Trains, and reports how well the run does on what it has not seen.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let stop = Stop::listen()?;
    let mut session = match &arguments.resume {
        Some(path) => Session::resume(path, arguments)?,
        None => Session::begin(arguments)?,
    };
    session.introduce();
    if session.train(&stop)? == Outcome::Interrupted {
        let name = session.folder.path().display();
        note(format_args!(
            "stopped after step {} and saved; go on with: longspan train --resume {name}",
            session.step()
        ));
        return Ok(Outcome::Interrupted);
    }
    stop.nothing_to_save();
    session.report()?;
    Ok(Outcome::Done)
}

/// A run in the making.
struct Session {
    folder: RunFolder,
    _lock: Lock,
    config: RunConfig,
    tokenizers: [Tokenizer; 2],
    corpus: Corpus,
    workers: Workers,
    model: Seq2Seq,
    optimizer: ModuleOptimizer,
    saved: Saved,
    log: MetricsLog,
}

impl Session {
    /// A new run.
    fn begin(arguments: &Arguments) -> Result<Self> {
        let mut settings = Settings::new()?;
        gather(&mut settings, arguments)?;
        let mut config = settings.finish()?;
        let path = match &arguments.out {
            Some(path) => path.clone(),
            None => unused_default(&config),
        };
        if path.join("config.json").exists() {
            let name = path.display();
            bail!("{name} holds a run already; go on with --resume {name}, or choose another folder with --out");
        }
        let split = corpus::read(&config)?;
        if let Some(pairs) = &mut config.pairs {
            // The run may be resumed from another folder.
            *pairs = std::path::absolute(&*pairs)?;
        }
        let tokenizers = corpus::tokenizers(&config, &split)?;
        let corpus = Corpus::encode(split, &tokenizers, &config)?;
        config.source_tokens.get_or_insert(tokenizers[0].kind().into());
        config.target_tokens.get_or_insert(tokenizers[1].kind().into());
        config.answer_tokens.get_or_insert((corpus.longest_target() * 5).div_ceil(4).max(1));
        let per_epoch = corpus.train.len().div_ceil(config.batch_size);
        config.steps.get_or_insert(8000.min((60 * per_epoch).max(1000)));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        config.workers.get_or_insert(cores.min(8));

        let sizes = model::configure(&config, tokenizers[0].len(), tokenizers[1].len())?;
        let model = model::fresh(&sizes, config.seed, &Device::flex().autodiff())?;
        let optimizer = optimizer(&config);
        let saved = Saved { step: 0, seconds: 0.0, data_sha256: corpus.fingerprint() };
        let (folder, lock) = RunFolder::create(&path, |draft| {
            write_config(draft, &config)?;
            write_atomic(&draft.source_tokenizer(), tokenizers[0].to_json()?.as_bytes())?;
            write_atomic(&draft.target_tokenizer(), tokenizers[1].to_json()?.as_bytes())?;
            write_atomic(&draft.metrics(), b"")?;
            draft.save(&model, &optimizer, &saved)
        })?;
        let log = MetricsLog::open(&folder, 0)?;
        let workers = Workers::new(config.workers.unwrap_or(1))?;
        Ok(Self { folder, _lock: lock, config, tokenizers, corpus, workers, model, optimizer, saved, log })
    }

    /// A run that goes on from its last checkpoint.
    fn resume(path: &Path, arguments: &Arguments) -> Result<Self> {
        let folder = RunFolder::open(path)?;
        let lock = folder.lock()?;
        let stored = RunConfig::load(&folder.config())?;
        let mut settings = Settings::of(&stored)?;
        gather(&mut settings, arguments)?;
        let config = settings.finish()?;
        if let Some(key) = settings.changed(&stored)?.into_iter().find(|key| !CHANGEABLE.contains(&key.as_str())) {
            bail!(
                "--resume {}: `{key}` is fixed by the run; only {} may change: train a new run with --out",
                path.display(),
                CHANGEABLE.join(", ")
            );
        }
        let tokenizers = [Tokenizer::load(&folder.source_tokenizer())?, Tokenizer::load(&folder.target_tokenizer())?];
        let sizes = model::configure(&config, tokenizers[0].len(), tokenizers[1].len())?;
        let model = sizes.init(&Device::flex().autodiff())?;
        let (model, optimizer, saved) = folder.load_checkpoint(model, optimizer(&config))?;
        let corpus = Corpus::encode(corpus::read(&config)?, &tokenizers, &config)?;
        if corpus.fingerprint() != saved.data_sha256 {
            let name = config.pairs.as_deref().unwrap_or(Path::new("the dictionary")).display();
            bail!("{name} is not what this run began with; restore the file, or train a new run with --out");
        }
        folder.repair(&model)?;
        if config != stored {
            write_config(&folder, &config)?;
        }
        let log = MetricsLog::open(&folder, saved.step)?;
        let workers = Workers::new(config.workers.unwrap_or(1))?;
        Ok(Self { folder, _lock: lock, config, tokenizers, corpus, workers, model, optimizer, saved, log })
    }

    /// Steps taken up to the last checkpoint.
    fn step(&self) -> usize {
        self.saved.step
    }

    /// Says what is about to happen.
    fn introduce(&self) {
        let name = match &self.config.pairs {
            Some(path) => path.display().to_string(),
            None => "the CMU pronouncing dictionary".into(),
        };
        note(format_args!(
            "{name}: {} training pairs, {} held-out sources; {} → {}",
            self.corpus.train.len(),
            self.corpus.held_out.len(),
            self.tokenizers[0].kind(),
            self.tokenizers[1].kind()
        ));
        if self.corpus.too_long > 0 {
            note(format_args!(
                "{} pairs have more than {} tokens and are left out; --set max_tokens=… takes them in",
                self.corpus.too_long, self.config.max_tokens
            ));
        }
        let [encoder, decoder] = [self.config.encoder_layers, self.config.decoder_layers];
        note(format_args!(
            "{} attention, {encoder}+{decoder} blocks, width {}: {} parameters; run folder {}",
            self.config.attention,
            self.config.d_model,
            self.model.num_params(),
            self.folder.path().display()
        ));
    }

    /// Takes steps until the run is complete or someone asks to stop.
    fn train(&mut self, stop: &Stop) -> Result<Outcome> {
        let lengths = self.corpus.train.iter().map(|pair| (pair.predicted(), pair.source.len())).collect();
        let mut batches = Batches::new(lengths, self.config.batch_size, self.config.seed);
        let first = self.step();
        let mut progress = Progress::new(first);
        let (started, before) = (Instant::now(), self.saved.seconds);
        let mut recent = Recent::default();
        let mut step = first;
        // Until the length of a run in minutes is known, as long as it takes.
        while self.config.known_steps().is_none_or(|steps| step < steps) {
            if stop.asked() {
                progress.finish();
                self.save_checkpoint(step, before + started.elapsed().as_secs_f64())?;
                return Ok(Outcome::Interrupted);
            }
            let step_started = Instant::now();
            let batch = batches.at(step);
            let pairs = batch.len();
            let steps = self.config.known_steps().unwrap_or(usize::MAX);
            let rate = self.config.learning_rate * relative_rate(step, self.config.warmup_steps, steps);
            let (loss, norm) = self.take(step, batch, rate).inspect_err(|_| progress.finish())?;
            step += 1;
            let elapsed = started.elapsed().as_secs_f64();
            self.log.step(step, loss, rate, norm, before + elapsed)?;
            recent.add(loss, pairs, step_started.elapsed().as_secs_f64());
            if let (Some(minutes), true) = (self.config.minutes, step >= TIMED_STEPS) {
                let seconds_each = elapsed / (step - first) as f64;
                let left = (minutes * 60.0 - before - elapsed).max(0.0) / seconds_each;
                let steps = step + left.round() as usize;
                (self.config.steps, self.config.minutes) = (Some(steps), None);
                write_config(&self.folder, &self.config)?;
                progress.note(&format!("{minutes} minutes make {steps} steps"));
            }
            let steps = self.config.known_steps();
            progress.update(&Status { step, steps, loss: recent.loss(), pairs_per_second: recent.pairs_per_second() });
            if step.is_multiple_of(self.config.checkpoint_steps) && steps != Some(step) {
                self.save_checkpoint(step, before + started.elapsed().as_secs_f64())
                    .inspect_err(|_| progress.finish())?;
            }
        }
        progress.finish();
        if step > self.step() {
            let seconds = before + started.elapsed().as_secs_f64();
            self.save_checkpoint(step, seconds)?;
            note(format_args!("{step} steps in {}", duration(seconds)));
        }
        Ok(Outcome::Done)
    }

    /// Takes one step; returns its loss and the norm of its gradient.
    fn take(&mut self, step: usize, places: &[usize], rate: f64) -> Result<(f64, f64)> {
        let batch: Vec<&Pair> = places.iter().map(|&place| &self.corpus.train[place]).collect();
        let dropout = self.config.dropout > 0.0;
        if dropout {
            let seed = SplitMix::new(self.config.seed, step as u64 + 1).next();
            Device::flex().seed(seed);
        }
        let mut found = step::gradients(&self.model, &batch, self.config.label_smoothing, dropout, &self.workers)?;
        let norm = step::clip(&self.model, &mut found.gradients, self.config.clip_norm);
        for (name, value) in [("loss", found.loss), ("gradient", norm)] {
            if !value.is_finite() {
                return Err(self.diverged(step + 1, name, value));
            }
        }
        self.model = self.optimizer.step(rate, self.model.clone(), found.gradients);
        Ok((found.loss, norm))
    }

    fn diverged(&self, step: usize, what: &str, value: f64) -> anyhow::Error {
        anyhow!(
            "the {what} became {value} at step {step}; the checkpoint of step {} in {} is kept: train again with a lower \
             --learning-rate than {}",
            self.step(),
            self.folder.path().display(),
            self.config.learning_rate
        )
    }

    /// Saves weights that are known to give finite losses, with the curve so far.
    fn save_checkpoint(&mut self, step: usize, seconds: f64) -> Result<()> {
        if step == self.step() {
            return Ok(());
        }
        // Where nothing is held out for development, training pairs tell as well whether the weights are sound.
        let probe = if self.corpus.development.is_empty() {
            &self.corpus.train[..self.corpus.train.len().min(self.config.batch_size)]
        } else {
            &self.corpus.development
        };
        let loss = step::mean_loss(&self.model, probe, self.config.batch_size.max(64), &self.workers)?;
        if !loss.is_finite() {
            return Err(self.diverged(step, "held-out loss", loss));
        }
        if !self.corpus.development.is_empty() {
            self.log.development(step, loss)?;
        }
        self.log.sync(&self.title())?;
        let saved = Saved { step, seconds, ..self.saved.clone() };
        self.folder.save(&self.model, &self.optimizer, &saved)?;
        self.saved = saved;
        Ok(())
    }

    fn title(&self) -> String {
        let name = match &self.config.pairs {
            Some(path) => path.file_name().unwrap_or_default().display().to_string(),
            None => "CMU dictionary".into(),
        };
        format!("{name}, {} attention", self.config.attention)
    }

    /// Scores held-out examples and prints what to do next.
    fn report(&mut self) -> Result<()> {
        let model = self.model.valid();
        let answerer = Answerer {
            model: &model,
            source: &self.tokenizers[0],
            target: &self.tokenizers[1],
            max_tokens: self.config.answer_tokens.unwrap_or(self.config.max_tokens),
            beam: 1,
            workers: &self.workers,
        };
        let limit = if self.config.evaluate == 0 { usize::MAX } else { self.config.evaluate };
        let held_out = spread(&self.corpus.held_out, limit);
        let dictionary = self.config.pairs.is_none();
        let mut text = String::new();
        if held_out.is_empty() {
            writeln!(text, "no pairs were held out (about a twentieth is, by a hash of the source): no error rates")?;
        } else {
            note(format_args!("scoring {} held-out sources", held_out.len()));
            let rates = ErrorRates::of(&answerer.score(&held_out)?);
            self.log.write(&json!({ "step": self.step(), "held_out": rates }))?;
            let [token, sequence] = if dictionary { ["phoneme", "word"] } else { ["token", "sequence"] }
                .map(|unit| format!("{unit} error rate"));
            let count = rates.sequences;
            writeln!(text, "On {count} held-out {}:", if dictionary { "words" } else { "sources" })?;
            writeln!(text, "  {token:<20} {}", rates.token_error_rate)?;
            writeln!(text, "  {sequence:<20} {}", rates.sequence_error_rate)?;
        }
        let samples: Vec<&str> = if dictionary {
            vec!["longspan", "transformer", "linear", "attention", "kernel", "rust"]
        } else {
            held_out.iter().take(6).map(|example| example.source.as_str()).collect()
        };
        if !samples.is_empty() {
            writeln!(text, "\nIt says:")?;
            for (source, answers) in samples.iter().zip(answerer.answer(&samples)?) {
                let answer = answers.first().map(|best| answerer.text(best)).transpose()?.unwrap_or_default();
                writeln!(text, "  {source:<14} {answer}")?;
            }
        }
        let name = self.folder.path().display();
        let example = samples.iter().find(|sample| !sample.contains('\'')).unwrap_or(&"hello");
        writeln!(text, "\nThe run is in {name}; its loss curve is {name}/loss.svg. Next:")?;
        writeln!(text, "  echo '{example}' | {} predict {name}", program())?;
        use std::io::Write as _;
        write!(std::io::stdout(), "{text}")?;
        Ok(())
    }
}

/// How this program was called, for commands that can be typed as they are.
fn program() -> String {
    // `cargo run` sets this for the programs it starts.
    if std::env::var_os("CARGO").is_some() { "cargo run --release --".into() } else { "longspan".into() }
}

/// Puts settings over each other: file, then --set, then flags.
fn gather(settings: &mut Settings, arguments: &Arguments) -> Result<()> {
    if let Some(path) = &arguments.config {
        settings.read_file(path)?;
    }
    for assignment in &arguments.set {
        settings.set_text(assignment)?;
    }
    let flags: [(&str, &str, Option<Value>); 9] = [
        ("pairs", "--pairs", arguments.pairs.as_ref().map(|path| text("--pairs", path)).transpose()?),
        ("attention", "--attention", arguments.attention.as_ref().map(|name| json!(name))),
        ("source_tokens", "--source-tokens", arguments.source_tokens.as_ref().map(|name| json!(name))),
        ("target_tokens", "--target-tokens", arguments.target_tokens.as_ref().map(|name| json!(name))),
        ("steps", "--steps", arguments.steps.map(|n| json!(n))),
        ("minutes", "--minutes", arguments.minutes.map(|n| number("--minutes", n)).transpose()?),
        ("seed", "--seed", arguments.seed.map(|n| json!(n))),
        ("batch_size", "--batch-size", arguments.batch_size.map(|n| json!(n))),
        (
            "learning_rate",
            "--learning-rate",
            arguments.learning_rate.map(|n| number("--learning-rate", n)).transpose()?,
        ),
    ];
    for (key, flag, value) in flags {
        if let Some(value) = value {
            settings.set(key, value, flag)?;
        }
    }
    if arguments.steps.is_some() {
        // A number of steps on the command line is meant to win over minutes in a file.
        settings.set("minutes", Value::Null, "--steps")?;
    }
    Ok(())
}

/// A path as a setting, which is text.
fn text(flag: &str, path: &Path) -> Result<Value> {
    let text =
        path.to_str().ok_or_else(|| anyhow!("{flag} {}: the name is not UTF-8; rename the file", path.display()))?;
    Ok(json!(text))
}

/// A number as a setting: JSON has neither infinity nor NaN.
fn number(flag: &str, value: f64) -> Result<Value> {
    if value.is_finite() { Ok(json!(value)) } else { bail!("{flag} {value}: expected a finite number") }
}

/// A folder under `runs/` that is not there yet.
fn unused_default(config: &RunConfig) -> PathBuf {
    let stem = match &config.pairs {
        Some(path) => path.file_stem().unwrap_or_default().display().to_string(),
        None => "cmudict".into(),
    };
    let first = Path::new("runs").join(&stem);
    let numbered = (2..).map(|n: u32| Path::new("runs").join(format!("{stem}-{n}")));
    std::iter::once(first.clone()).chain(numbered).find(|path| !path.exists()).unwrap_or(first)
}

/// At most `limit` examples, evenly from all.
fn spread(examples: &[crate::data::Example], limit: usize) -> Vec<crate::data::Example> {
    let count = examples.len().min(limit);
    (0..count).map(|place| examples[place * examples.len() / count].clone()).collect()
}

/// The optimiser that the settings name.
pub fn optimizer(config: &RunConfig) -> ModuleOptimizer {
    // β₂ of the first transformer: the usual 0.999 remembers longer than a short run lasts.
    AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.98)
        .with_epsilon(1e-9)
        .with_weight_decay(config.weight_decay as f32)
        .init()
}

fn write_config(folder: &RunFolder, config: &RunConfig) -> Result<()> {
    write_atomic(&folder.config(), format!("{}\n", serde_json::to_string_pretty(config)?).as_bytes())
}

/// Means over the last steps, for the display.
#[derive(Default)]
struct Recent {
    weight: f64,
    loss: f64,
    pairs: f64,
    seconds: f64,
}

impl Recent {
    /// Takes in a step; one of 30 steps ago weighs a third of it.
    fn add(&mut self, loss: f64, pairs: usize, seconds: f64) {
        const KEEP: f64 = 0.965;
        self.weight = KEEP * self.weight + 1.0;
        self.loss = KEEP * self.loss + loss;
        self.pairs = KEEP * self.pairs + pairs as f64;
        self.seconds = KEEP * self.seconds + seconds;
    }

    fn loss(&self) -> f64 {
        self.loss / self.weight
    }

    fn pairs_per_second(&self) -> f64 {
        self.pairs / self.seconds.max(1e-9)
    }
}

/// The table of keys for `--help`.
fn keys_help() -> String {
    let mut text = String::from("Keys of --config and --set, with their defaults:\n");
    let defaults = serde_json::to_value(RunConfig::default()).unwrap_or_default();
    for (key, meaning) in config::KEYS {
        let default = match &defaults[key] {
            Value::Null => "-".into(),
            Value::String(name) => name.clone(),
            other => other.to_string(),
        };
        text.push_str(&format!("  {key:<17} {default:<7} {meaning}\n"));
    }
    text
}
