//! One run over the processes of `mpirun`: rank 0 holds the run and takes its steps as it would alone; for the gradient of each
//! batch the others take their share of the examples.
//!
//! Rank 0 announces a step. Every rank finds the gradient of its examples; they are added up in the order of ranks, so a repetition has
//! the same bits, and every rank takes the step: all have the same weights, those of the run's folder first, since all compute the same
//! of the same sums with the same instructions. All but rank 0 read that folder, and write nothing.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use longspan::layers::clip_gradients;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::gradients::{Found, Share, gradients};
use super::session::Session;
use crate::commands::Outcome;
use crate::run::checkpoint::{Checkpoint, Place, optimizer};
use crate::run::config::{Config, RunConfig, TaskKind};
use crate::run::folder::RunFolder;
use crate::tasks::batches::Random;
use crate::tasks::feed::Feed;
use crate::tasks::ranks::{Ranks, awaited};
use crate::tasks::workers::Workers;
use crate::tasks::{Task, for_task};
use crate::terminal::notes::note;
use crate::terminal::signals::Stop;

#[derive(Serialize, Deserialize)]
enum Word {
    /// Get ready for this run, which has taken so many steps.
    Run {
        program: String,
        folder: PathBuf,
        kind: TaskKind,
        settings: Map<String, Value>,
        data_sha256: String,
        step: usize,
    },
    /// This step, at this learning rate. All steps before are completed.
    Step(usize, f64),
    /// Where the feed stands after so many steps.
    Place(usize),
    /// All steps are taken; scores take as long as they take.
    Trained,
    End,
}

#[derive(Serialize, Deserialize)]
enum Reply {
    /// There is a loss, as bits since JSON has no NaN, and a gradient that was added; and whether a signal asks this rank to stop.
    Done(u64, bool),
    Place(Value, Vec<TensorData>),
    Stopped,
    Failed(String),
}

/// What must be the same on every rank for the same bits.
fn program() -> Result<String> {
    let instructions = longspan::kernels::instructions()?;
    Ok(format!("longspan {} with {instructions} instructions", env!("CARGO_PKG_VERSION")))
}

pub fn invite<T: Task>(ranks: &Ranks, session: &Session<T>) -> Result<()> {
    let folder = std::path::absolute(session.folder.path())?;
    let (kind, settings, data_sha256) = (session.config.kind(), session.config.to_map()?, session.data.sha256.clone());
    let (program, step) = (program()?, session.saved.step);
    ranks.watch()?;
    ranks.announce(&serde_json::to_vec(&Word::Run { program, folder, kind, settings, data_sha256, step })?);
    answers(ranks).map(drop)
}

pub fn trained(ranks: &Ranks) -> Result<()> {
    ranks.announce(&serde_json::to_vec(&Word::Trained)?);
    Ok(())
}

pub fn end(ranks: &Ranks) -> Result<()> {
    ranks.announce(&serde_json::to_vec(&Word::End)?);
    Ok(())
}

/// Rank 0: what all others answer. They are all heard, whatever the first one says.
fn answers(ranks: &Ranks) -> Result<Vec<Reply>> {
    let answer = |rank| {
        let other = |_| anyhow!("rank {rank} speaks another language; start the same version everywhere");
        match serde_json::from_slice(&ranks.answer_of(rank)).map_err(other)? {
            Reply::Failed(error) => bail!("rank {rank}: {error}"),
            reply => Ok(reply),
        }
    };
    (1..ranks.count()).map(answer).collect::<Vec<_>>().into_iter().collect()
}

/// Rank 0: where the feeds of the others stand after so many steps.
pub fn places(ranks: &Ranks, step: usize) -> Result<Vec<Place>> {
    ranks.announce(&serde_json::to_vec(&Word::Place(step))?);
    let place = |(rank, reply)| match reply {
        Reply::Place(note, tensors) => Ok(Place { note, tensors }),
        _ => bail!("rank {rank} does not say where it stands"),
    };
    (1..).zip(answers(ranks)?).map(place).collect()
}

/// Rank 0: the loss and gradient of a whole batch, as [`gradients`] finds them alone.
pub fn of_all<T: Task>(
    ranks: &Ranks,
    model: &T::Model,
    (step, rate): (usize, f64),
    stop: &Stop,
    own: impl FnOnce() -> Result<Option<Found<T::Carried>>>,
) -> Result<Option<Found<T::Carried>>> {
    ranks.announce(&serde_json::to_vec(&Word::Step(step, rate))?);
    let own = own();
    let sum = added(ranks, model, &own);
    let others = answers(ranks);
    let Some(mut found) = own? else { return Ok(None) };
    for reply in others? {
        let Reply::Done(loss, stops) = reply else { return Ok(None) };
        found.loss += f64::from_bits(loss);
        if stops {
            stop.ask();
        }
    }
    found.gradients = of_flat(model, &sum);
    Ok(Some(found))
}

/// What a rank found. Of stretches of the same sequences there is no part without the others, which wait in the middle of it: a
/// failure ends all.
pub fn or_abort<F>(ranks: &Ranks, split: bool, found: Result<F>) -> Result<F> {
    if let (true, Err(error)) = (split, &found) {
        note(format_args!("error: rank {}: {error:#}", ranks.rank()));
        ranks.abort();
    }
    found
}

/// The sum of all ranks' gradients. A rank without one adds 0: the others wait for it.
fn added<C>(ranks: &Ranks, model: &impl Module, found: &Result<Option<Found<C>>>) -> Vec<f32> {
    let none = GradientsParams::new();
    let mut numbers = flat(model, found.as_ref().ok().and_then(Option::as_ref).map_or(&none, |found| &found.gradients));
    ranks.sum(&mut numbers);
    numbers
}

pub fn help(ranks: &Ranks, stop: &Stop) -> Result<Outcome> {
    let Word::Run { program: first, folder, kind, settings, data_sha256, step } = hear(ranks)? else {
        return Ok(Outcome::Done);
    };
    let own = program()?;
    if first != own {
        let error = format!(
            "{own} beside {first} on rank 0; start the same version everywhere, where processors differ with LONGSPAN_SIMD set"
        );
        ranks.reply(&serde_json::to_vec(&Reply::Failed(error))?);
        return Ok(Outcome::Done);
    }
    ranks.watch()?;
    let folder = RunFolder::at(&folder, true);
    let config = RunConfig::of(kind, &settings)?;
    for_task!(config, helper(ranks, stop, &folder, (&data_sha256, step)))
}

fn hear(ranks: &Ranks) -> Result<Word> {
    serde_json::from_slice(&ranks.hear())
        .map_err(|_| anyhow!("rank 0 speaks another language; start the same version everywhere"))
}

fn helper<T: Task>(
    config: Config<T::Settings>,
    ranks: &Ranks,
    stop: &Stop,
    folder: &RunFolder,
    (sha256, step): (&str, usize),
) -> Result<Outcome> {
    let split = config.common().split_sequence.is_some();
    let ready = || {
        let mut task = T::load(folder, &config)?;
        let mut data = task.data(&config)?;
        if data.sha256 != sha256 {
            bail!("{} is not what rank 0 has; give every process the same file", config.data_name());
        }
        let model = task.model(&config, &Device::flex().autodiff())?;
        let Checkpoint { model, optimizer, place, .. } = folder.load_checkpoint(model, optimizer(&config.training))?;
        if step > 0 {
            task.return_to(&mut data.train, &model, place)?;
        }
        if split {
            task.split_among(ranks.peers());
        } else {
            data.train.keep_share(ranks.rank(), ranks.count())?;
        }
        Ok((task, data, model, optimizer, Workers::new(config.training.workers.unwrap_or(1))?))
    };
    let (task, mut data, mut model, mut optimizer, workers) = match ready() {
        Ok(ready) => ready,
        Err(error) => {
            // Rank 0 says it, in the one line that there is.
            ranks.reply(&serde_json::to_vec(&Reply::Failed(format!("{error:#}")))?);
            return Ok(Outcome::Done);
        }
    };
    ranks.reply(&serde_json::to_vec(&Reply::Done(0, false))?);
    // The last step that was found, and what it left for the next one.
    let mut left: Option<(usize, Vec<T::Carried>)> = None;
    loop {
        let word = awaited(|| hear(ranks))?;
        if matches!(word, Word::Trained) {
            hear(ranks)?;
        }
        let (Word::Step(step, _) | Word::Place(step)) = word else { return Ok(Outcome::Done) };
        if let Some((_, carried)) = left.take_if(|(found, _)| *found < step) {
            task.carry(&mut data.train, carried)?;
        }
        let Word::Step(_, rate) = word else {
            let reply = match task.place(&data.train, &model, Vec::new()) {
                Ok(Place { note, tensors }) => Reply::Place(note, tensors),
                Err(error) => Reply::Failed(format!("{error:#}")),
            };
            ranks.reply(&serde_json::to_vec(&reply)?);
            continue;
        };
        let found = data.train.batch(step).and_then(|batch| {
            let share = Share::of(&batch, T::size, (ranks.rank(), ranks.count()), split);
            let seed = Random::new(config.training.seed, step as u64 + 1).next();
            gradients(&task, &model, &share, config.common().label_smoothing, seed, &workers, stop)
        });
        let found = or_abort(ranks, split, found);
        let sum = added(ranks, &model, &found);
        let reply = match found {
            Ok(Some(found)) => {
                left = Some((step, found.carried));
                Reply::Done(found.loss.to_bits(), stop.asked())
            }
            Ok(None) => Reply::Stopped,
            Err(error) => Reply::Failed(format!("{error:#}")),
        };
        ranks.reply(&serde_json::to_vec(&reply)?);
        // Where a rank could not, rank 0 ends the run.
        let mut gradients = of_flat(&model, &sum);
        clip_gradients(&model, &mut gradients, config.training.clip_norm)?;
        model = optimizer.step(rate, model, gradients);
    }
}

/// A gradient's numbers, in the order of the weights; 0 where there is none.
fn flat(model: &impl Module, gradients: &GradientsParams) -> Vec<f32> {
    struct Read<'a>(&'a GradientsParams, Vec<f32>);
    impl ModuleVisitor for Read<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match self.0.get::<D>(param.id) {
                Some(gradient) => {
                    let data = gradient.into_data();
                    match data.as_slice::<f32>() {
                        Ok(numbers) => self.1.extend_from_slice(numbers),
                        Err(_) => self.1.extend(data.iter::<f32>()),
                    }
                }
                None => self.1.resize(self.1.len() + param.val().dims().iter().product::<usize>(), 0.0),
            }
        }
    }
    let mut read = Read(gradients, Vec::new());
    model.visit(&mut read);
    read.1
}

fn of_flat(model: &impl Module, numbers: &[f32]) -> GradientsParams {
    struct Write<'a>(GradientsParams, &'a [f32]);
    impl ModuleVisitor for Write<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let dims: [usize; D] = param.val().dims();
            let (own, rest) = self.1.split_at(dims.iter().product());
            self.1 = rest;
            self.0.register(param.id, Tensor::<D>::from_data(TensorData::new(own.to_vec(), dims), &Device::flex()));
        }
    }
    let mut write = Write(GradientsParams::new(), numbers);
    model.visit(&mut write);
    write.0
}
