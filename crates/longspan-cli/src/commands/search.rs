//! The arguments of commands that ask a run for answers.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;

/// Which run answers, and how.
#[derive(Args)]
pub struct Search {
    /// The folder of a run
    pub run: PathBuf,
    /// Beam width; 1 is greedy decoding
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub beam: usize,
}

impl Search {
    /// Checks the arguments, and reads the run's settings.
    pub fn open(&self) -> Result<(RunFolder, RunConfig)> {
        if self.beam == 0 {
            bail!("--beam 0: expected at least 1");
        }
        let folder = RunFolder::open(&self.run)?;
        let config = folder.load_config()?;
        Ok((folder, config))
    }
}
