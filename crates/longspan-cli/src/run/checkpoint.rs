//! Weights, optimiser and progress of a run.

use std::fs;

use anyhow::{Result, anyhow};
use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use longspan::checkpoint;
use serde::{Deserialize, Serialize};

use super::config::RunConfig;
use super::folder::RunFolder;
use super::write::{cannot_write, write_error};

/// How far a run has come: stored with its weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Steps that have been taken.
    pub step: usize,
    /// Seconds spent on them.
    pub seconds: f64,
    /// Of the training examples: a run is resumed only with the examples it began with.
    pub data_sha256: String,
}

/// The optimiser that the settings name.
pub fn optimizer(config: &RunConfig) -> ModuleOptimizer {
    // β₂ as in Vaswani et al. 2017: the usual 0.999 averages over more steps than a short run has.
    AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.98)
        .with_epsilon(1e-9)
        .with_weight_decay(config.weight_decay as f32)
        .init()
}

impl RunFolder {
    /// Writes a checkpoint, then the weights alone. Each is replaced in one piece; a process that is killed between the two
    /// leaves weights that are one checkpoint older.
    pub fn save(&self, model: &impl Module, optimizer: &ModuleOptimizer, saved: &Saved) -> Result<()> {
        let training = checkpoint::save_training(self.checkpoint(), model, optimizer, saved);
        training.and_then(|()| checkpoint::save_weights(self.model(), model)).map_err(write_error)
    }

    /// Reads the weights into a model made from the same settings.
    pub fn load_weights<M: Module>(&self, model: M) -> Result<M> {
        checkpoint::load_weights(self.model(), model).map_err(|error| {
            let name = self.path().display();
            anyhow!("{error}; `longspan train --resume {name}` writes it anew from the checkpoint")
        })
    }

    /// Reads weights, optimiser and progress into ones made from the same settings.
    pub fn load_checkpoint<M: Module>(
        &self,
        model: M,
        optimizer: ModuleOptimizer,
    ) -> Result<(M, ModuleOptimizer, Saved)> {
        Ok(checkpoint::load_training(self.checkpoint(), model, optimizer)?)
    }

    /// Rewrites the weights from the checkpoint that was just read, and removes temporary files of a killed process.
    pub fn repair(&self, model: &impl Module) -> Result<()> {
        checkpoint::save_weights(self.model(), model).map_err(write_error)?;
        let failed = |error| cannot_write(self.path(), error);
        for entry in fs::read_dir(self.path()).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".tmp")) {
                fs::remove_file(&path).map_err(failed)?;
            }
        }
        Ok(())
    }
}
