//! `longspan man`: manual pages of the command and of every verb.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Command};

use super::Outcome;

#[derive(Args)]
pub struct Arguments {
    /// The folder to write to, such as ~/.local/share/man/man1
    folder: PathBuf,
}

pub fn run(arguments: &Arguments, command: Command) -> Result<Outcome> {
    let folder = &arguments.folder;
    let failed = || format!("cannot write manual pages to {}; choose a folder that can be written", folder.display());
    fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(command, folder).with_context(failed)?;
    Ok(Outcome::Done)
}
