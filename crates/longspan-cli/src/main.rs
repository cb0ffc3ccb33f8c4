//! The command `longspan`: trains transformers of linear cost on pairs of texts or on texts as they are, runs and scores
//! them.
//!
//! Reading order, each room knowing only those below it: this file reads arguments; [`commands`] has one file a verb;
//! [`tasks`] says what can be learned; [`run`] is the folder on disk; [`terminal`] shows progress and plots.
//!
//! Results go to standard output; progress, notes and errors to standard error, an error as one line.

mod commands;
#[cfg(test)]
mod fuzz;
mod run;
mod tasks;
mod terminal;

use std::io;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use longspan_allocator::{Keeping, keep_small_blocks};

use crate::commands::{Outcome, completions, eval, generate, info, predict, train};
use crate::tasks::ranks;
use crate::terminal::notes::note;
use crate::terminal::signals;

#[global_allocator]
static ALLOCATOR: Keeping = Keeping;

/// The version, and the notice that the embedded dictionary asks to be passed on with it.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\n\nThis program carries the CMU pronouncing dictionary, which comes with this notice:\n\n",
    include_str!("../assets/cmudict.LICENSE")
);

/// Attention over long sequences at linear cost: train, run and score.
#[derive(Parser)]
#[command(name = "longspan", version, long_version = LONG_VERSION, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model on pairs of texts, plain text, labelled text or series; without arguments a demo that learns English pronunciation
    Train(Box<train::Arguments>),
    /// Predict for each line of a file or of standard input with a trained run
    Predict(predict::Arguments),
    /// Generate text with a run that was trained on text
    Generate(generate::Arguments),
    /// Score a run on a file, or on what it held out
    Eval(eval::Arguments),
    /// Describe a run folder and verify it, or all mechanisms
    Info(info::Arguments),
    /// Print what a shell needs to complete this command's arguments
    Completions(completions::Arguments),
}

fn main() -> ExitCode {
    keep_small_blocks();
    signals::report_large_files();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    let result = match arguments.command {
        Command::Train(arguments) => train::run(&arguments),
        Command::Predict(arguments) => ranks::alone().and_then(|()| predict::run(&arguments)),
        Command::Generate(arguments) => ranks::alone().and_then(|()| generate::run(&arguments)),
        Command::Eval(arguments) => ranks::alone().and_then(|()| eval::run(&arguments)),
        Command::Info(arguments) => ranks::alone().and_then(|()| info::run(&arguments)),
        Command::Completions(arguments) => completions::run(&arguments, &mut Arguments::command()),
    };
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        // 128 + SIGINT, as shells report it.
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        // A closed pipe, as after `| head`, is not an error.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // All other files are named where they are written.
            let what = if error.is::<io::Error>() { "cannot write to standard output: " } else { "" };
            note(format!("error: {what}{error:#}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

/// Help and version as asked for; a mistake in the arguments as one line.
fn usage(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return match error.print() {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                note(format_args!("error: cannot write to standard output: {error}"));
                ExitCode::FAILURE
            }
            _ => ExitCode::SUCCESS,
        };
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        note("error: no subcommand; give train, predict, generate, eval, info or completions, or see longspan --help");
        return ExitCode::from(2);
    }
    let text = error.to_string();
    let parts: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .take_while(|line| !line.starts_with("Usage:"))
        .collect();
    let line = parts.join("; ");
    note(format_args!(
        "{}; see longspan --help",
        line.trim_end_matches("For more information, try '--help'.").trim_end_matches("; ")
    ));
    ExitCode::from(2)
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
