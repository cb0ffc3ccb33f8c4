//! A run that has been read back, ready to answer.

use anyhow::Result;
use burn::tensor::Device;

use super::task::Task;
use crate::run::checkpoint::{Saved, optimizer};
use crate::run::config::Config;
use crate::run::folder::{CHECKPOINT, RunFolder};

pub struct Trained<T: Task> {
    pub config: Config<T::Settings>,
    pub task: T,
    pub model: T::Model,
    pub folder: RunFolder,
}

impl<T: Task> Trained<T> {
    pub fn load(folder: RunFolder, config: Config<T::Settings>) -> Result<Self> {
        let task = T::load(&folder, &config)?;
        let model = folder.load_weights(task.model(&config, &Device::flex())?)?;
        Ok(Self { config, task, model, folder })
    }

    /// How far the training has come; reads and verifies the checkpoint. `None` if the run was written without one, which the
    /// Python package does.
    pub fn load_saved(&self) -> Result<Option<Saved>> {
        self.folder.verify(|name| name == CHECKPOINT)?;
        if !self.folder.checkpoint().exists() {
            return Ok(None);
        }
        let model = self.task.model(&self.config, &Device::flex())?;
        Ok(Some(self.folder.load_checkpoint(model, optimizer(&self.config.training))?.saved))
    }
}
