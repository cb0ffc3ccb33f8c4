//! Weights, optimiser and progress of a run.

use anyhow::{Result, anyhow, bail};
use burn::module::{Module, ParamGroup};
use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;
use longspan::checkpoint;
use longspan::layers::{FusedAdamW, FusedMuon};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::{Optimizer, TrainingSettings};
use super::folder::{CHECKPOINT, MODEL, RunFolder};
use super::seal;
use crate::terminal::shell;

/// How far a run has come: stored with its weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    pub step: usize,
    pub seconds: f64,
    /// The weights that answer, if they are not those of this step.
    #[serde(default)]
    pub best: Option<Best>,
    /// Losses of parts of the development examples before the first step, where a model begins as a simple method.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start: Vec<f64>,
    /// Of the training examples: a run is resumed only with the examples it began with.
    pub data_sha256: String,
    /// What [`Place::note`] says.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub place: Value,
}

/// Where the data of a run stand, if the seed and the step do not tell.
#[derive(Debug, Default)]
pub struct Place {
    pub note: Value,
    pub tensors: Vec<TensorData>,
}

/// The checkpoint with the least loss on the development examples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: usize,
    pub loss: f64,
}

pub fn optimizer(settings: &TrainingSettings) -> ModuleOptimizer {
    let decay = settings.weight_decay as f32;
    // β₂ as in Vaswani et al. 2017: the usual 0.999 averages over more steps than a short run has.
    let adamw = ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, decay).without_decay_of_vectors());
    match settings.optimizer {
        Optimizer::AdamW => adamw,
        Optimizer::Muon => adamw.with_group(matrices_of_blocks(), FusedMuon::new(0.95, decay), None),
    }
}

/// Not embeddings, nor the last product to tokens: their rows are learned one by one.
fn matrices_of_blocks() -> ParamGroup {
    ParamGroup::from_regex(r"^(blocks|encoder|decoder)\.\d+\..*\.weight$").unwrap_or_else(|error| panic!("{error:?}"))
}

pub struct Checkpoint<M> {
    pub model: M,
    pub optimizer: ModuleOptimizer,
    pub saved: Saved,
    pub place: Place,
}

impl RunFolder {
    /// Writes a checkpoint, and its weights alone where they are the best so far, and seals both. A process that is killed
    /// between the two leaves weights that are one checkpoint older.
    pub fn save(
        &self,
        model: &impl Module,
        optimizer: &ModuleOptimizer,
        saved: &Saved,
        place: Vec<TensorData>,
    ) -> Result<()> {
        let training = checkpoint::training_to_bytes(self.file(CHECKPOINT), model, optimizer, saved, place)?;
        let mut files = vec![(CHECKPOINT, training.as_slice())];
        let are_best = saved.best.is_none_or(|best| best.step == saved.step);
        let weights = are_best.then(|| checkpoint::weights_to_bytes(self.file(MODEL), model)).transpose()?;
        files.extend(weights.as_deref().map(|weights| (MODEL, weights)));
        self.replace(&files)
    }

    pub fn save_weights(&self, model: &impl Module) -> Result<()> {
        self.replace(&[(MODEL, &checkpoint::weights_to_bytes(self.file(MODEL), model)?)])
    }

    pub fn load_weights<M: Module>(&self, model: M) -> Result<M> {
        let name = shell::path(self.path());
        let anew = |error: anyhow::Error| {
            anyhow!("{error}; `longspan train --resume {name}` writes it anew from the checkpoint")
        };
        let model = checkpoint::load_weights(self.file(MODEL), model).map_err(|error| anew(error.into()))?;
        self.verify(|name| name == MODEL).map_err(anew)?;
        Ok(model)
    }

    pub fn load_checkpoint<M: Module>(&self, model: M, optimizer: ModuleOptimizer) -> Result<Checkpoint<M>> {
        if !self.file(CHECKPOINT).exists() {
            self.verify(|name| name == CHECKPOINT)?;
            let name = self.path().display();
            bail!("{name} has no checkpoint, so its training cannot be resumed; train a new run with --out");
        }
        let (model, optimizer, saved, tensors) =
            checkpoint::load_training::<M, Saved>(self.file(CHECKPOINT), model, optimizer)?;
        self.verify(|name| name == CHECKPOINT)?;
        let place = Place { note: saved.place.clone(), tensors };
        Ok(Checkpoint { model, optimizer, saved, place })
    }

    /// Brings the weights in line with the checkpoint that was just read, and removes temporary files of a killed process.
    /// Damaged weights are replaced by those of the checkpoint, though others were better.
    pub fn repair(&self, model: &impl Module, saved: &mut Saved) -> Result<()> {
        let are_best = saved.best.is_none_or(|best| best.step == saved.step);
        let damaged = self.verify(|name| name == MODEL).is_err();
        if are_best || damaged {
            self.save_weights(model)?;
        }
        if damaged && !are_best {
            saved.best = None;
        }
        seal::remove_drafts(self.path())
    }
}
