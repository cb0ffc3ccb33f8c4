//! One run over the processes of `mpirun`: rank 0 holds the run and takes its steps as it would alone; for the gradient of each
//! batch the others take their share of the examples.
//!
//! Rank 0 announces a step and spreads its weights. Every rank finds the gradient of its examples; rank 0 adds them up in the order
//! of ranks, so a repetition has the same bits. All but rank 0 read the run's folder, and write nothing.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::gradients::{Found, Share, gradients};
use super::session::Session;
use crate::commands::Outcome;
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::tasks::batches::Random;
use crate::tasks::feed::Feed;
use crate::tasks::ranks::Ranks;
use crate::tasks::workers::Workers;
use crate::tasks::{Task, for_task};
use crate::terminal::signals::Stop;

/// What rank 0 announces.
#[derive(Serialize, Deserialize)]
enum Word {
    /// Get ready for this run.
    Run { version: String, folder: PathBuf, settings: Box<RunConfig>, data_sha256: String },
    /// The gradient of this step's batch.
    Step(usize),
    /// Nothing more.
    End,
}

/// What became of a rank's share.
#[derive(Serialize, Deserialize)]
enum Reply {
    /// There is a loss, and a gradient that follows.
    Done(f64),
    /// A signal asked to stop.
    Stopped,
    Failed(String),
}

/// Rank 0: gets the others ready for its run.
pub fn invite<T: Task>(ranks: &Ranks, session: &Session<T>) -> Result<()> {
    let folder = std::path::absolute(session.folder.path())?;
    let (settings, data_sha256) = (Box::new(session.config.clone()), session.data.sha256.clone());
    let version = env!("CARGO_PKG_VERSION").into();
    ranks.announce(&serde_json::to_vec(&Word::Run { version, folder, settings, data_sha256 })?);
    let failed = (1..ranks.count()).filter_map(|rank| match answer(ranks, rank) {
        Ok(Reply::Failed(error)) => Some(anyhow!("rank {rank}: {error}")),
        Err(error) => Some(error),
        Ok(_) => None,
    });
    // All are heard, whatever the first one says.
    failed.collect::<Vec<_>>().into_iter().next().map_or(Ok(()), Err)
}

/// Rank 0: lets the others go.
pub fn end(ranks: &Ranks) -> Result<()> {
    ranks.announce(&serde_json::to_vec(&Word::End)?);
    Ok(())
}

fn answer(ranks: &Ranks, rank: usize) -> Result<Reply> {
    serde_json::from_slice(&ranks.answer_of(rank))
        .map_err(|_| anyhow!("rank {rank} speaks another language; start the same version everywhere"))
}

/// Rank 0: the loss and gradient of a whole batch, as [`gradients`] finds them alone.
pub fn of_all<T: Task>(
    ranks: &Ranks,
    model: &T::Model,
    step: usize,
    own: impl FnOnce() -> Result<Option<Found<T::Carried>>>,
) -> Result<Option<Found<T::Carried>>> {
    ranks.announce(&serde_json::to_vec(&Word::Step(step))?);
    let mut numbers = weights(model);
    ranks.spread(&mut numbers);
    let own = own();
    // All others are heard before anything is said about them: they wait for it.
    let (mut loss, mut stopped, mut failed) = (0.0, false, None);
    let mut sum = match &own {
        Ok(Some(found)) => flat(model, &found.gradients),
        _ => vec![0.0; numbers.len()],
    };
    for rank in 1..ranks.count() {
        match answer(ranks, rank)? {
            Reply::Done(share) => {
                loss += share;
                ranks.take(rank, &mut numbers);
                sum.iter_mut().zip(&numbers).for_each(|(sum, x)| *sum += x);
            }
            Reply::Stopped => stopped = true,
            Reply::Failed(error) => failed = failed.or(Some(anyhow!("rank {rank}: {error}"))),
        }
    }
    match (own?, failed) {
        (_, Some(error)) => Err(error),
        (Some(found), None) if !stopped => {
            Ok(Some(Found { loss: found.loss + loss, gradients: of_flat(model, &sum), ..found }))
        }
        _ => Ok(None),
    }
}

/// The other ranks: do what rank 0 says until it ends.
pub fn help(ranks: &Ranks, stop: &Stop) -> Result<Outcome> {
    let Word::Run { version, folder, settings, data_sha256 } = hear(ranks)? else { return Ok(Outcome::Done) };
    if version != env!("CARGO_PKG_VERSION") {
        let error = format!(
            "longspan {} beside {version} on rank 0; start the same version everywhere",
            env!("CARGO_PKG_VERSION")
        );
        ranks.reply(&serde_json::to_vec(&Reply::Failed(error))?);
        return Ok(Outcome::Done);
    }
    fn with<T: Task>(
        ranks: &Ranks,
        stop: &Stop,
        folder: &RunFolder,
        config: &RunConfig,
        sha256: &str,
    ) -> Result<Outcome> {
        helper::<T>(ranks, stop, folder, config, sha256)
    }
    let folder = RunFolder::at(&folder, true);
    for_task!(&*settings, with(ranks, stop, &folder, &settings, &data_sha256))
}

fn hear(ranks: &Ranks) -> Result<Word> {
    serde_json::from_slice(&ranks.hear())
        .map_err(|_| anyhow!("rank 0 speaks another language; start the same version everywhere"))
}

fn helper<T: Task>(
    ranks: &Ranks,
    stop: &Stop,
    folder: &RunFolder,
    config: &RunConfig,
    sha256: &str,
) -> Result<Outcome> {
    let ready = || {
        let task = T::load(folder)?;
        let data = task.data(config)?;
        if data.sha256 != sha256 {
            bail!("{} is not what rank 0 has; give every process the same file", config.data_name());
        }
        let model = task.model(config, &Device::flex().autodiff())?;
        Ok((task, data, model, Workers::new(config.workers.unwrap_or(1))?))
    };
    let (task, mut data, mut model, workers) = match ready() {
        Ok(ready) => ready,
        Err(error) => {
            // Rank 0 says it, in the one line that there is.
            ranks.reply(&serde_json::to_vec(&Reply::Failed(format!("{error:#}")))?);
            return Ok(Outcome::Done);
        }
    };
    ranks.reply(&serde_json::to_vec(&Reply::Done(0.0))?);
    let mut numbers = weights(&model);
    while let Word::Step(step) = hear(ranks)? {
        ranks.spread(&mut numbers);
        model = with_weights(model, &numbers);
        let found = data.train.batch(step).and_then(|batch| {
            let share = Share::of(&batch, T::size, ranks.rank(), ranks.count());
            let seed = Random::new(config.seed, step as u64 + 1).next();
            gradients(&task, &model, &share, config.label_smoothing, seed, &workers, stop)
        });
        let reply = match &found {
            Ok(Some(found)) => Reply::Done(found.loss),
            Ok(None) => Reply::Stopped,
            Err(error) => Reply::Failed(format!("{error:#}")),
        };
        ranks.reply(&serde_json::to_vec(&reply)?);
        if let Ok(Some(found)) = found {
            ranks.give(&flat(&model, &found.gradients));
        }
    }
    Ok(Outcome::Done)
}

/// All weights, in the order of the model.
fn weights(model: &impl Module) -> Vec<f32> {
    struct Read(Vec<f32>);
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

fn with_weights<M: Module>(model: M, numbers: &[f32]) -> M {
    struct Write<'a>(&'a [f32]);
    impl ModuleMapper for Write<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, old, mapper) = param.consume();
            let value = tensor(&mut self.0, old.dims(), &old.device()).set_require_grad(old.is_require_grad());
            Param::from_mapped_value(id, value, mapper)
        }
    }
    model.map(&mut Write(numbers))
}

/// The next numbers as a tensor.
fn tensor<const D: usize>(numbers: &mut &[f32], dims: [usize; D], device: &Device) -> Tensor<D> {
    let (own, rest) = numbers.split_at(dims.iter().product());
    *numbers = rest;
    Tensor::from_data(TensorData::new(own.to_vec(), dims), device)
}

/// A gradient's numbers, in the order of the weights; 0 where there is none.
fn flat(model: &impl Module, gradients: &GradientsParams) -> Vec<f32> {
    struct Read<'a>(&'a GradientsParams, Vec<f32>);
    impl ModuleVisitor for Read<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match self.0.get::<D>(param.id) {
                Some(gradient) => self.1.extend(gradient.into_data().iter::<f32>()),
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
            let gradient = tensor(&mut self.1, param.val().dims(), &Device::flex());
            self.0.register(param.id, gradient);
        }
    }
    let mut write = Write(GradientsParams::new(), numbers);
    model.visit(&mut write);
    write.0
}
