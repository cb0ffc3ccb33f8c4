//! `longspan completions`: what a shell needs to complete arguments.

use std::io::Write;

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::{Shell, generate};

use super::Outcome;

#[derive(Args)]
pub struct Arguments {
    /// The shell
    shell: Shell,
}

pub fn run(arguments: &Arguments, command: &mut Command) -> Result<Outcome> {
    let mut script = Vec::new();
    generate(arguments.shell, command, "longspan", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(Outcome::Done)
}
