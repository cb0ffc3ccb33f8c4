//! `longspan predict`: answers lines as they come.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use super::Outcome;
use super::search::Search;
use crate::run::config::RunConfig;
use crate::run::folder::RunFolder;
use crate::tasks::task::{Answering, Verb};
use crate::tasks::workers::Workers;
use crate::tasks::{Task, Trained, for_task, lines};
use crate::terminal::notes::note;
use crate::terminal::samples::CUT;
use crate::terminal::shell;

/// Lines answered together, if so many are there already: at first,
const FIRST: usize = 256;

/// and at most.
const MOST: usize = 1024;

/// More lines are taken where answers come sooner than this, and fewer where they come later.
const WAIT: Duration = Duration::from_millis(200);

/// What `longspan predict` takes.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    search: Search,
    /// A file with one source a line, also in gzip; standard input if not given or `-`
    file: Option<PathBuf>,
    /// Print a JSON object for each line, with all answers of the beam and their log-probabilities
    #[arg(long)]
    json: bool,
}

/// Answers every line in order, each as soon as it can be.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let (folder, config) = arguments.search.open()?;
    for_task!(&config, answer(arguments, folder, config))
}

fn answer<T: Task>(arguments: &Arguments, folder: RunFolder, config: RunConfig) -> Result<Outcome> {
    if T::VERB != Verb::Predict {
        let (program, run) = (shell::program(), shell::path(folder.path()));
        bail!("this run generates text and does not predict for lines; use: {program} generate {run}");
    }
    let trained = Trained::<T>::load(folder, config)?;
    let workers = Workers::new(Workers::usual_count())?;
    let path = arguments.file.as_deref().unwrap_or(Path::new("-"));
    let name = lines::name(path);
    let lines = match trained.task.lines(path)? {
        Some(lines) => in_order(lines),
        None => read_ahead(lines::open(path)?),
    };
    let mut out = io::stdout().lock();
    let mut unknown = BTreeSet::new();
    let mut cut = 0;
    let mut number = 0;
    let mut most = FIRST;
    while let Some((batch, failure)) = next_batch(&lines, most) {
        let started = Instant::now();
        let mut texts = Vec::with_capacity(batch.len());
        let mut bad_line = None;
        for line in batch {
            number += 1;
            match lines::utf8(&line, &format!("{name}, line {number}")) {
                Ok(text) => texts.push(text.to_string()),
                Err(error) => {
                    bad_line = Some(error);
                    break;
                }
            }
        }
        // What came before a bad line is still answered.
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        unknown.extend(texts.iter().flat_map(|text| trained.task.unknown_pieces(text)).map(String::from));
        let first = number - texts.len() + 1 - usize::from(bad_line.is_some());
        let how = Answering {
            config: &trained.config,
            beam: arguments.search.beam,
            workers: &workers,
            name: &name,
            line: &|place| first + place,
        };
        for (line, is_cut) in trained.task.told(&trained.model, &texts, &how, arguments.json)? {
            cut += usize::from(is_cut);
            writeln!(out, "{line}")?;
        }
        out.flush()?;
        most = if started.elapsed() < WAIT { 2 * most } else { most / 2 }.clamp(FIRST, MOST);
        if let Some(error) = bad_line {
            return Err(error);
        }
        if let Some(error) = failure {
            bail!("cannot read {name} after line {number}: {error}; check that it is a file of text");
        }
    }
    say_unknown(&unknown);
    if cut > 0 {
        let limit = trained.config.answer_tokens.unwrap_or(trained.config.max_tokens);
        let answers = if cut == 1 { "1 answer" } else { &format!("{cut} answers") };
        let mark = if arguments.json { "\"finished\": false" } else { CUT.trim() };
        note(format_args!("note: {answers} did not end within {limit} tokens, cut there and marked by {mark}"));
    }
    Ok(Outcome::Done)
}

/// Reads lines on a thread of its own: a line is answered as soon as it is there, and lines that wait are answered together.
fn read_ahead(mut reader: Box<dyn BufRead + Send>) -> Receiver<io::Result<Vec<u8>>> {
    let (sender, receiver) = mpsc::sync_channel(MOST);
    thread::spawn(move || {
        loop {
            let mut line = Vec::new();
            let message = match reader.read_until(b'\n', &mut line) {
                Ok(0) => return,
                Ok(_) => {
                    if line.ends_with(b"\n") {
                        line.pop();
                    }
                    if line.ends_with(b"\r") {
                        line.pop();
                    }
                    Ok(line)
                }
                Err(error) => Err(error),
            };
            let failed = message.is_err();
            if sender.send(message).is_err() || failed {
                return;
            }
        }
    });
    receiver
}

/// Lines that are all there.
fn in_order(lines: Vec<String>) -> Receiver<io::Result<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    // The receiver is at hand: nothing is refused.
    lines.into_iter().for_each(|line| drop(sender.send(Ok(line.into_bytes()))));
    receiver
}

/// Waits for a line and takes those that are there already, up to `most`, with the error that ended them. `None` at the end.
fn next_batch(lines: &Receiver<io::Result<Vec<u8>>>, most: usize) -> Option<(Vec<Vec<u8>>, Option<io::Error>)> {
    let mut batch = Vec::new();
    let mut message = lines.recv().ok()?;
    loop {
        match message {
            Ok(line) => batch.push(line),
            Err(error) => return Some((batch, Some(error))),
        }
        if batch.len() == most {
            return Some((batch, None));
        }
        message = match lines.try_recv() {
            Ok(next) => next,
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Some((batch, None)),
        };
    }
}

/// Pieces that are named one by one.
const NAMED: usize = 5;

/// Says which pieces did not occur in training.
pub fn say_unknown(pieces: &BTreeSet<String>) {
    let named: Vec<String> = pieces.iter().take(NAMED).map(|piece| format!("{piece:?}")).collect();
    match pieces.len() {
        0 => {}
        1 => note(format_args!("note: {} did not occur in training; it is taken as unknown", named[0])),
        count => {
            let rest = count.saturating_sub(NAMED);
            let rest = if rest > 0 { format!(" and {rest} others") } else { String::new() };
            note(format_args!("note: {}{rest} did not occur in training; they are taken as unknown", named.join(", ")));
        }
    }
}
