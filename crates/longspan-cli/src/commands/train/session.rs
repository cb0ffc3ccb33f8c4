//! A run while it trains: steps, checkpoints, the log.

use std::rc::Rc;
use std::time::Instant;

use anyhow::{Result, anyhow, bail};
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use longspan::layers::clip_gradients;

use super::gradients::{Share, draw, gradients, mean_loss};
use super::schedule::{TIMED_STEPS, relative_rate};
use super::sizes;
#[cfg(feature = "mpi")]
use super::together;
use crate::commands::Outcome;
use crate::run::checkpoint::{Best, Checkpoint, Place, Saved, optimizer};
use crate::run::config::Config;
use crate::run::draft::Draft;
use crate::run::folder::{Lock, RunFolder};
use crate::run::log::MetricsLog;
use crate::run::seal::LOG;
use crate::tasks::Task;
use crate::tasks::batches::{Random, micro_batches};
use crate::tasks::feed::Feed;
use crate::tasks::ranks::Ranks;
use crate::tasks::simple::Simple;
use crate::tasks::task::Data;
use crate::tasks::workers::Workers;
use crate::terminal::notes::note;
use crate::terminal::progress::{Progress, duration};
use crate::terminal::samples::counted;
use crate::terminal::shell;
use crate::terminal::signals::Stop;

pub struct Session<T: Task> {
    pub folder: RunFolder,
    _lock: Lock,
    pub config: Config<T::Settings>,
    pub task: T,
    pub data: Data<T>,
    pub workers: Workers,
    pub model: T::Model,
    optimizer: ModuleOptimizer,
    pub saved: Saved,
    pub log: MetricsLog,
    /// The processes that share each batch, where there are others.
    pub ranks: Option<Rc<Ranks>>,
    /// What the model's sizes were chosen for, where they are not the usual ones.
    pub sized_for: Option<String>,
    /// When the run was begun or resumed, and the minutes that it is to take with its scores, or may take where nobody said how long.
    began: Instant,
    minutes: Option<f64>,
    /// The most steps of a run whose minutes nobody gave.
    usual: usize,
    /// Seconds for the development loss, the last time.
    probed: f64,
    /// What simple methods give on what is held out, once they were asked.
    simple: Option<Rc<[Simple]>>,
}

enum Taken {
    /// Its loss, the norm of its gradient, and the size of its batch.
    Step((f64, f64, usize)),
    Stopped,
    NoData(anyhow::Error),
}

impl<T: Task> Session<T> {
    /// A new run. What is not `given` of the model's sizes and dropout is chosen here.
    pub fn begin(draft: Draft, mut config: Config<T::Settings>, given: impl Fn(&[&str]) -> bool) -> Result<Self> {
        let began = Instant::now();
        let minutes = config
            .training
            .minutes
            .or((config.common().base && config.training.steps.is_none()).then_some(USUAL_MINUTES));
        let (task, data) = T::begin(&mut config)?;
        config = config.absolute()?;
        let tokens = data.train.tokens();
        let learned = config.training.minutes.map(sizes::learned_in).transpose()?;
        let sized_for = if given(&sizes::KEYS) { None } else { sizes::choose(&mut config, tokens, learned)? };
        config.training.steps.get_or_insert(T::usual_steps(data.train.per_epoch()));
        if !given(&["dropout"]) {
            let passes = sizes::passes(&config, (tokens, data.train.per_epoch()), learned);
            config.model.dropout = task.usual_dropout(passes).unwrap_or(config.model.dropout);
        }
        config.training.workers.get_or_insert(Workers::usual_count());
        let model = draw(task.model(&config, &Device::flex().autodiff())?, config.training.seed);
        let optimizer = optimizer(&config.training);
        let saved = Saved { data_sha256: data.sha256.clone(), ..Saved::default() };
        let (folder, lock) = draft.finish(|folder| {
            folder.save_config(&config)?;
            task.store(folder)?;
            folder.write(LOG, b"")?;
            folder.save(&model, &optimizer, &saved, Vec::new())
        })?;
        let checkpoint = Checkpoint { model, optimizer, saved, place: Place::default() };
        // What a person says is kept, in steps or minutes.
        let usual =
            if config.training.minutes.is_some() { usize::MAX } else { config.training.steps.unwrap_or(usize::MAX) };
        Ok(Self { sized_for, minutes, usual, ..Self::new(began, folder, lock, config, task, data, checkpoint)? })
    }

    /// A run resumed from its last checkpoint, with settings that may have changed.
    pub fn resume(folder: RunFolder, lock: Lock, config: Config<T::Settings>) -> Result<Self> {
        let began = Instant::now();
        let task = T::load(&folder, &config)?;
        let model = task.model(&config, &Device::flex().autodiff())?;
        let mut checkpoint = folder.load_checkpoint(model, optimizer(&config.training))?;
        let Checkpoint { model, saved, place, .. } = &mut checkpoint;
        if config.training.known_steps().is_some_and(|steps| steps < saved.step) {
            bail!(
                "the run has taken {}, more than {}; give as many or more with --steps",
                counted(saved.step, "steps"),
                config.training.steps.unwrap_or_default()
            );
        }
        let mut data = task.data(&config).map_err(|error| {
            let moved = config.first().is_some_and(|path| !path.exists() && path.as_os_str() != "-");
            if !moved {
                return error;
            }
            anyhow!("{error}; if the file has moved, name where it is now with {}", config.kind().data_flag())
        })?;
        if let Some(name) = config.changed(&saved.data_sha256, &data.sha256) {
            let is_own = name != config.data_name();
            let flag = if is_own { "--development or --held-out" } else { config.kind().data_flag() };
            bail!(
                "{name} is not what this run began with; restore the file, name where it is now with {flag}, or train a new run with --out"
            );
        }
        folder.sealed_metrics()?;
        if saved.step > 0 {
            task.return_to(&mut data.train, model, std::mem::take(place))?;
        }
        folder.repair(model, saved)?;
        folder.save_config(&config)?;
        Self::new(began, folder, lock, config, task, data, checkpoint)
    }

    /// A run as it was stored, that has taken no step yet since `began`.
    fn new(
        began: Instant,
        folder: RunFolder,
        lock: Lock,
        config: Config<T::Settings>,
        task: T,
        data: Data<T>,
        Checkpoint { model, optimizer, saved, .. }: Checkpoint<T::Model>,
    ) -> Result<Self> {
        let log = MetricsLog::open(&folder, saved.step)?;
        let workers = Workers::new(config.training.workers.unwrap_or(1))?;
        let minutes = config.training.minutes;
        Ok(Self {
            folder,
            _lock: lock,
            config,
            task,
            data,
            workers,
            model,
            optimizer,
            saved,
            log,
            ranks: None,
            sized_for: None,
            began,
            minutes,
            usual: usize::MAX,
            probed: 0.0,
            simple: None,
        })
    }

    pub fn simple(&mut self) -> Result<Rc<[Simple]>> {
        if self.simple.is_none() {
            let held_out = self.data.scored(&self.config);
            let found =
                if held_out.is_empty() { vec![] } else { self.task.simple(&self.data, &held_out, &self.config)? };
            self.simple = Some(found.into());
        }
        Ok(self.simple.clone().unwrap_or_default())
    }

    pub fn train(&mut self, stop: &Stop) -> Result<Outcome> {
        let first = self.saved.step;
        if self.minutes.is_some() {
            // Their time is part of the minutes.
            self.simple()?;
        }
        let mut progress = Progress::new();
        if self.config.common().base && first == 0 && !self.data.development.is_empty() {
            let probing = Instant::now();
            let (loss, start) = self.development(&self.data.development)?;
            self.probed = probing.elapsed().as_secs_f64();
            self.saved = Saved { best: Some(Best { step: 0, loss }), start, ..self.saved.clone() };
        }
        let (started, before) = (Instant::now(), self.saved.seconds);
        let mut fitted = false;
        let mut recent = Recent::default();
        let mut step = first;
        // Until the length of a run in minutes is known, as long as it takes.
        while self.config.training.known_steps().is_none_or(|steps| step < steps) {
            // Asked before a step, so that a run that was killed after this checkpoint ends here too.
            if self.is_stale(step) {
                progress.note(format_args!("stopped early: no checkpoint since step {} did better", self.kept()));
                self.config.training.steps = Some(step);
                self.folder.save_config(&self.config)?;
                break;
            }
            let step_started = Instant::now();
            let steps = self.config.training.known_steps().unwrap_or(usize::MAX);
            let rate =
                self.config.training.learning_rate * relative_rate(step, self.config.training.warmup_steps, steps);
            let (loss, norm, examples) = match self.take(step, rate, stop)? {
                Taken::Step(found) => found,
                // Other processes would wait for a checkpoint of theirs.
                Taken::NoData(error) if self.ranks.is_some() => return Err(error),
                ended => {
                    drop(progress);
                    self.save_checkpoint(step, before + started.elapsed().as_secs_f64(), true)?;
                    if let Taken::NoData(error) = ended {
                        let (program, folder) = (shell::program(), shell::path(self.folder.path()));
                        bail!("{error}; {step} steps are saved: {program} train --resume {folder}");
                    }
                    return Ok(Outcome::Interrupted);
                }
            };
            step += 1;
            let elapsed = started.elapsed().as_secs_f64();
            self.log.step(step, loss, rate, norm, before + elapsed)?;
            recent.add(loss, examples, step_started.elapsed().as_secs_f64());
            if let Some(minutes) = self.minutes.filter(|_| !fitted) {
                let known = step >= self.config.training.warmup_steps.max(TIMED_STEPS);
                if known
                    || elapsed >= TIMED * 60.0 * minutes && step >= TIMED_STEPS
                    || elapsed >= 4.0 * TIMED * 60.0 * minutes
                {
                    fitted = true;
                    let steps = self.fit(step, elapsed / (step - first) as f64, before, true)?;
                    if steps < self.usual {
                        let more = if self.usual < usize::MAX { "; for more give --minutes or --steps" } else { "" };
                        progress.note(format_args!("{minutes} minutes make {steps} steps{more}"));
                    }
                }
            }
            let steps = self.config.training.known_steps();
            let left = match steps {
                Some(steps) => {
                    let seconds = elapsed / (step - first) as f64 * (steps - step) as f64;
                    format!("{} left", duration(seconds))
                }
                None => "timing the first steps".into(),
            };
            let of = steps.map_or("?".into(), |steps| steps.to_string());
            let (loss, per_second) = (recent.loss / recent.weight, recent.examples / recent.seconds.max(1e-9));
            let line = format_args!("step {step}/{of}  loss {loss:.3}  {per_second:.0} {}/s  {left}", T::EXAMPLES);
            progress.update(step, steps, line);
            if step.is_multiple_of(self.config.training.checkpoint_steps) && steps != Some(step) {
                self.save_checkpoint(step, before + started.elapsed().as_secs_f64(), false)?;
                // The machine may have become slower or faster. In a run of seconds it does not matter.
                if fitted && self.minutes.is_some_and(|minutes| minutes > SHORT) {
                    self.fit(step, started.elapsed().as_secs_f64() / (step - first) as f64, before, false)?;
                }
            }
        }
        drop(progress);
        if step > self.saved.step {
            let seconds = before + started.elapsed().as_secs_f64();
            self.save_checkpoint(step, seconds, false)?;
            note(format_args!("{} in {}", counted(step, "steps"), duration(seconds)));
        }
        Ok(Outcome::Done)
    }

    /// Takes one step, unless its batch cannot be read or a signal asks to stop.
    fn take(&mut self, step: usize, rate: f64, stop: &Stop) -> Result<Taken> {
        let batch = match self.data.train.batch(step) {
            Ok(batch) => batch,
            Err(error) => return Ok(Taken::NoData(error)),
        };
        let examples = batch.len();
        let seed = Random::new(self.config.training.seed, step as u64 + 1).next();
        let smoothing = self.config.common().label_smoothing;
        let count = self.ranks.as_ref().map_or(1, |ranks| ranks.count());
        let split = self.config.common().split_sequence.is_some() && count > 1;
        if split && stop.asked() {
            return Ok(Taken::Stopped);
        }
        let share = Share::of(&batch, T::size, (0, count), split);
        let own = || gradients(&self.task, &self.model, &share, smoothing, seed, &self.workers, stop);
        let found = match &self.ranks {
            None => own()?,
            #[cfg(feature = "mpi")]
            Some(ranks) => together::of_all::<T>(ranks, &self.model, (step, rate), stop, || {
                together::or_abort(ranks, split, own())
            })?,
            #[cfg(not(feature = "mpi"))]
            Some(ranks) => match **ranks {},
        };
        let Some(mut found) = found else { return Ok(Taken::Stopped) };
        let norm = clip_gradients(&self.model, &mut found.gradients, self.config.training.clip_norm)?;
        for (name, value) in [("loss", found.loss), ("gradient", norm)] {
            if !value.is_finite() {
                return Err(self.diverged(step + 1, name, value));
            }
        }
        let (optimizer, model) = (&mut self.optimizer, self.model.clone());
        // From a thread of the pool, which hands parts to the others soonest.
        self.model = rayon::scope(|_| optimizer.step(rate, model, found.gradients));
        self.task.carry(&mut self.data.train, found.carried)?;
        Ok(Taken::Step((found.loss, norm, examples)))
    }

    /// How many steps of so many seconds each fit into the minutes, with a development loss now and then and the scores; writes them down.
    fn fit(&mut self, step: usize, seconds: f64, spent: f64, first: bool) -> Result<usize> {
        let Some(minutes) = self.minutes else { return Ok(step) };
        let development = self.data.development.len().max(1) as f64;
        if self.probed == 0.0 {
            // Nothing was measured yet: a part tells the time of all.
            let examples =
                if self.data.development.is_empty() { self.data.train.probe() } else { &self.data.development };
            let (part, started) = (micro_batches(examples, T::size)[0].len(), Instant::now());
            self.development(&examples[..part])?;
            self.probed = started.elapsed().as_secs_f64() * development / part as f64;
        }
        let scores = self.probed * T::scoring(&self.data, &self.config)?;
        let budget = 60.0 * minutes;
        let left = budget - spent - self.began.elapsed().as_secs_f64() - scores;
        // A tenth of the time for development losses, of which some come.
        let checkpoints = (0.1 * budget / self.probed.max(1e-6)).clamp(2.0, 20.0);
        let losses = if first { checkpoints } else { 1.0 };
        let each = (left - losses * self.probed) / seconds;
        let mut steps = (step + each.max(0.0) as usize).min(self.usual);
        if let Some(before) =
            self.config.training.known_steps().filter(|before| (steps as f64 / *before as f64 - 1.0).abs() < 0.03)
        {
            steps = before;
        }
        self.config.training.checkpoint_steps =
            self.config.training.checkpoint_steps.min(steps.div_ceil(checkpoints as usize)).max(1);
        (self.config.training.steps, self.config.training.minutes) = (Some(steps), None);
        self.folder.save_config(&self.config)?;
        Ok(steps)
    }

    /// The loss of examples, and those of some parts.
    fn development(&self, examples: &[T::Example]) -> Result<(f64, Vec<f64>)> {
        let all = self.config.training.batch_size.max(64);
        // Parts tell how certain a difference is.
        let batch = if self.config.common().base { all.min(examples.len().div_ceil(PARTS)) } else { all };
        mean_loss(&self.task, &self.model, examples, batch, &self.workers)
    }

    fn kept(&self) -> usize {
        self.saved.best.map_or(self.saved.step, |best| best.step)
    }

    /// Whether the model corrects a simple method, and at the checkpoint of this step has not done better for long.
    fn is_stale(&self, step: usize) -> bool {
        let every = self.config.training.checkpoint_steps;
        let patience = (PATIENCE * every).max(self.config.training.known_steps().unwrap_or(usize::MAX) / 3);
        let at_checkpoint = step == self.saved.step && step.is_multiple_of(every);
        self.config.common().base && at_checkpoint && step >= self.kept().saturating_add(patience)
    }

    fn diverged(&self, step: usize, what: &str, value: f64) -> anyhow::Error {
        anyhow!(
            "the {what} became {value} at step {step}; the checkpoint of step {} in {} is kept: train again with a lower \
             --learning-rate than {}",
            self.saved.step,
            self.folder.path().display(),
            self.config.training.learning_rate
        )
    }

    /// Saves weights that are known to give finite losses, with the curve so far. A `quick` one, where a signal asked to stop, tries a few
    /// development examples and does not log their loss.
    fn save_checkpoint(&mut self, step: usize, seconds: f64, quick: bool) -> Result<()> {
        if step == self.saved.step {
            return Ok(());
        }
        // Without development examples, training examples serve to check that the loss is finite.
        let mut examples =
            if self.data.development.is_empty() { self.data.train.probe() } else { &self.data.development };
        if quick {
            examples = micro_batches(examples, T::size)[0];
        }
        let started = Instant::now();
        let (loss, parts) = self.development(examples)?;
        if !quick {
            self.probed = started.elapsed().as_secs_f64();
        }
        if !loss.is_finite() {
            return Err(self.diverged(step, "held-out loss", loss));
        }
        let mut best = self.saved.best;
        if !quick && !self.data.development.is_empty() {
            self.log.development(step, loss)?;
            let sure = best.is_none_or(|best| best.step > 0) || {
                let others = T::overlap(&self.data.train, examples.len()) - 1.0;
                let overlap = shared(others * parts.len() as f64 / examples.len() as f64);
                is_lower(&self.saved.start, &parts, overlap)
            };
            if best.is_none_or(|best| loss < best.loss) && sure {
                best = Some(Best { step, loss });
            }
        }
        self.log.draw(&self.title(), self.task.measure())?;
        let others = match &self.ranks {
            #[cfg(feature = "mpi")]
            Some(ranks) if self.config.common().split_sequence.is_none() => together::places(ranks, step)?,
            _ => Vec::new(),
        };
        let Place { note, tensors } = self.task.place(&self.data.train, &self.model, others)?;
        let saved = Saved { step, seconds, best, place: note, ..self.saved.clone() };
        self.folder.save(&self.model, &self.optimizer, &saved, tensors)?;
        self.saved = saved;
        Ok(())
    }

    fn title(&self) -> String {
        let name = match self.config.first() {
            Some(path) => path.file_name().unwrap_or_default().display().to_string(),
            None => self.config.data_name(),
        };
        format!("{name}, {} attention", self.config.model.attention)
    }
}

/// Minutes that a run takes at most that begins as a simple method, where nobody said how long: it may be of use at once.
const USUAL_MINUTES: f64 = 1.5;

/// The part of the minutes in which steps are timed, and minutes in which nothing is decided again.
const TIMED: f64 = 0.05;
const SHORT: f64 = 0.25;

/// Parts of the development examples, at least, whose losses are compared with those of the simple method that a model corrects.
const PARTS: usize = 16;

/// Checkpoints without a better one after which such a model is as good as it gets.
const PATIENCE: usize = 6;

/// Whether sums of losses fell, by more than twice the standard error of the fall: a few examples would tell by chance, at one of many
/// checkpoints, that a model does better than the simple method that it begins as. Examples that overlap tell as much as fewer ([`shared`]).
fn is_lower(before: &[f64], after: &[f64], overlap: f64) -> bool {
    let falls: Vec<f64> = before.iter().zip(after).map(|(before, after)| before - after).collect();
    let (count, sum) = (falls.len() as f64, falls.iter().sum::<f64>());
    let squares: f64 = falls.iter().map(|fall| (fall - sum / count).powi(2)).sum();
    count >= 4.0 && sum > 2.0 * (overlap * count / (count - 1.0) * squares).sqrt()
}

/// How many times as large the variance of a sum over parts is as the sum of their variances, where an example overlaps so many parts: as much
/// as it shares with each (a triangle), of neighbours that lie beside each other.
fn shared(parts: f64) -> f64 {
    if parts > 1.0 { parts / (1.0 - 1.0 / (3.0 * parts)) } else { 1.0 / (1.0 - parts / 3.0) }
}

#[derive(Default)]
struct Recent {
    weight: f64,
    loss: f64,
    examples: f64,
    seconds: f64,
}

impl Recent {
    /// Takes in a step; one of 30 steps ago weighs a third of it.
    fn add(&mut self, loss: f64, examples: usize, seconds: f64) {
        const KEEP: f64 = 0.965;
        self.weight = KEEP * self.weight + 1.0;
        self.loss = KEEP * self.loss + loss;
        self.examples = KEEP * self.examples + examples as f64;
        self.seconds = KEEP * self.seconds + seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_overlapping_examples_share_what_sums_of_them_do() {
        for (overlap, each) in [(1, 5), (12, 1), (12, 6), (12, 12), (12, 32)] {
            let alike = |a: usize, b: usize| (1.0 - a.abs_diff(b) as f64 / overlap as f64).max(0.0);
            let variance = |n: usize| (0..n).flat_map(|a| (0..n).map(move |b| alike(a, b))).sum::<f64>();
            let exact = variance(32 * each) / (32.0 * variance(each));
            let found = shared((overlap - 1) as f64 / each as f64);
            assert!((found / exact - 1.0).abs() < 0.1, "{overlap} {each}: {found} {exact}");
        }
    }

    #[test]
    fn a_fall_counts_beyond_its_standard_error() {
        let start = [1.0; 16];
        let falls = |fall: fn(usize) -> f64| is_lower(&start, &std::array::from_fn::<_, 16, _>(|n| 1.0 - fall(n)), 1.0);
        assert!(falls(|_| 0.01));
        assert!(!falls(|_| -0.01));
        // 16 falls of deviation 1 sum up to 1.6; twice their sum's error is 8.3.
        assert!(!falls(|n| 0.1 + if n % 2 == 0 { 1.0 } else { -1.0 }));
        assert!(falls(|n| 0.6 + if n % 2 == 0 { 1.0 } else { -1.0 }));
        assert!(!is_lower(&start[..3], &[0.0; 3], 1.0), "three parts tell nothing");
    }
}
