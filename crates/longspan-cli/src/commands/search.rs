//! The arguments of commands that ask a run for answers.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::run::columns::Columns;
use crate::run::config::{RunConfig, TaskKind};
use crate::run::folder::RunFolder;
use crate::run::settings::Settings;

#[derive(Args)]
pub struct Search {
    /// The folder of a run
    pub run: PathBuf,
    /// Beam width; 1 is greedy decoding
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub beam: usize,
}

impl Search {
    /// Checks the arguments, and reads the run's settings; columns may have other names here.
    pub fn open(&self, columns: &Columns) -> Result<(RunFolder, RunConfig)> {
        if self.beam == 0 {
            bail!("--beam 0: expected at least 1");
        }
        let folder = RunFolder::open(&self.run)?;
        let stored = folder.load_config()?;
        let mut settings = Settings::default();
        settings.name_columns(columns)?;
        let config = settings.change(&stored, |_| Ok(()))?;
        if self.beam > 1 && ![TaskKind::Pairs, TaskKind::Synthetic].contains(&config.kind()) {
            bail!("--beam is not used by {}: leave it out", config.kind().flag());
        }
        Ok((folder, config))
    }
}
