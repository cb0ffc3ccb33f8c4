//! `longspan predict`: answers lines as they come.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use clap::Args;

use super::search::Search;
use super::{Outcome, check_picture, draw};
use crate::run::columns::Columns;
use crate::run::config::{Config, TaskKind};
use crate::run::folder::RunFolder;
use crate::tasks::task::{Answering, Asked, Predict, Titles, Told};
use crate::tasks::workers::Workers;
use crate::tasks::{Trained, for_predicting, lines};
use crate::terminal::forecasts::Forecasts;
use crate::terminal::notes::note;
use crate::terminal::samples::{CUT, counted, listed, one_line};
use crate::terminal::shell;

/// Lines answered together, if so many are there already: at first,
const FIRST: usize = 256;

/// and at most.
const MOST: usize = 1024;

/// More lines are taken where answers come sooner than this, and fewer where they come later.
const WAIT: Duration = Duration::from_millis(200);

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    search: Search,
    /// Lines of text, a table whose columns are found by name, or series as the run learned from; also in gzip or zip; standard input if
    /// not given or `-`
    file: Option<PathBuf>,
    #[command(flatten)]
    columns: Columns,
    /// Print a table of CSV with a header, with what was asked beside the answers
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Draw forecasts: a .svg or a .png
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Print a JSON object for each line, with all answers of the beam and their log-probabilities
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let (folder, config) = arguments.search.open(&arguments.columns)?;
    let forecasts = config.kind() == TaskKind::Forecast;
    check_picture(arguments.picture.as_deref(), forecasts, "forecasts are drawn, and this run makes none")?;
    for_predicting!(config, answer(arguments, folder), _ => {
        let (program, run) = (shell::program(), shell::path(folder.path()));
        bail!("this run generates text and does not predict for lines; use: {program} generate {run}")
    })
}

fn answer<T: Predict>(config: Config<T::Settings>, arguments: &Arguments, folder: RunFolder) -> Result<Outcome> {
    let trained = Trained::<T>::load(folder, config)?;
    let workers = Workers::new(Workers::usual_count())?;
    let path = arguments.file.as_deref().unwrap_or(Path::new("-"));
    let name = lines::name(path);
    let questions = match trained.task.asked(path, &trained.config)? {
        Some(asked) => in_order(asked),
        None => {
            if let Some(column) = arguments.columns.source.as_ref().or(arguments.columns.text.as_ref()) {
                bail!(
                    "{name}: read as lines of text, which have no column `{column}`; give a table whose first line names it, or leave the \
                     name out"
                );
            }
            read_ahead(lines::open(path)?, name.clone())
        }
    };
    let mut out = Answers::new(arguments, trained.task.titles(&trained.config))?;
    let mut unknown = BTreeSet::new();
    let mut cut = 0;
    let mut pictures = Vec::new();
    let mut most = FIRST;
    while let Some((batch, failure)) = next_batch(&questions, most) {
        let started = Instant::now();
        // What came before a bad line is still answered.
        unknown.extend(batch.iter().flat_map(|one| trained.task.unknown_pieces(&one.text)));
        let (config, beam, line) = (&trained.config, arguments.search.beam, |place: usize| batch[place].line);
        let how = Answering { config, beam, workers: &workers, name: &name, line: &line };
        for told in trained.task.predict(&trained.model, &batch, &how)? {
            cut += usize::from(told.cut);
            out.write(&told)?;
            pictures
                .extend(told.picture.filter(|_| arguments.picture.is_some()).into_iter().flat_map(|picture| picture.0));
        }
        out.out.flush()?;
        most = if started.elapsed() < WAIT { 2 * most } else { most / 2 }.clamp(FIRST, MOST);
        if let Some(error) = failure {
            return Err(error);
        }
    }
    if let Some(path) = &arguments.picture {
        if pictures.is_empty() {
            bail!("--picture: {name} has no series whose forecast could be drawn");
        }
        draw(&Forecasts(pictures), path)?;
    }
    say_unknown(&unknown);
    if cut > 0 {
        let limit = trained.config.common().longest_answer.unwrap_or_default();
        let mark = match (arguments.json, arguments.csv) {
            (true, _) => ", and marked by \"finished\": false",
            (_, true) => "",
            _ => &format!(", and marked by {}", CUT.trim()),
        };
        note(format_args!("note: {} did not end within {limit} tokens, cut there{mark}", counted(cut, "answers")));
    }
    Ok(Outcome::Done)
}

struct Answers {
    out: io::StdoutLock<'static>,
    titles: Titles,
    json: bool,
    csv: bool,
}

impl Answers {
    fn new(arguments: &Arguments, titles: Titles) -> io::Result<Self> {
        let mut answers = Self { out: io::stdout().lock(), titles, json: arguments.json, csv: arguments.csv };
        let Titles { key, answer, always } = &answers.titles;
        if answers.csv {
            let titles = [&key[..], answer].concat();
            answers.record(titles.iter().map(String::as_str))?;
        } else if *always && !answers.json {
            writeln!(answers.out, "{}", line(answer))?;
        }
        Ok(answers)
    }

    /// A row of CSV.
    fn record<'a>(&mut self, cells: impl Iterator<Item = &'a str>) -> io::Result<()> {
        let mut writer = csv::Writer::from_writer(&mut self.out);
        writer.write_record(cells)?;
        writer.flush()
    }

    fn write(&mut self, told: &Told) -> io::Result<()> {
        if self.json {
            return writeln!(self.out, "{}", told.json);
        }
        let (key, width) = (self.titles.key.len(), self.titles.key.len() + self.titles.answer.len());
        for row in &told.rows {
            if self.csv {
                // What was empty has no answer, and every row as many cells.
                self.record(row.iter().map(String::as_str).chain(std::iter::repeat("")).take(width))?;
            } else {
                let cut = if told.cut { CUT } else { "" };
                writeln!(self.out, "{}{cut}", line(row.get(key..).unwrap_or_default()))?;
            }
        }
        Ok(())
    }
}

/// Cells with tabs between them, each in one line and one column.
fn line(cells: &[String]) -> String {
    cells.iter().map(|cell| one_line(cell).replace('\t', "\\t")).collect::<Vec<_>>().join("\t")
}

type Questions = Receiver<Result<Asked>>;

/// Reads lines on a thread of its own: a line is answered as soon as it is there, and lines that wait are answered together.
fn read_ahead(mut reader: Box<dyn BufRead + Send>, name: String) -> Questions {
    let (sender, receiver) = mpsc::sync_channel(MOST);
    thread::spawn(move || {
        let mut number = 0;
        loop {
            let mut line = Vec::new();
            number += 1;
            let message = match reader.read_until(b'\n', &mut line) {
                Ok(0) => return,
                // The only line: those of old Macs end otherwise.
                Ok(_) if number == 1 && !line.ends_with(b"\n") && line.contains(&b'\r') => {
                    line.iter_mut().filter(|byte| **byte == b'\r').for_each(|byte| *byte = b'\n');
                    (reader, number) = (Box::new(io::Cursor::new(line)), 0);
                    continue;
                }
                Ok(_) => {
                    let line = line.strip_suffix(b"\n").unwrap_or(&line);
                    let line = line.strip_suffix(b"\r").unwrap_or(line);
                    let text = lines::utf8(line, &format!("{name}, line {number}"));
                    text.map(|text| Asked { line: number, text: text.into(), series: None })
                }
                Err(error) => Err(anyhow!(
                    "cannot read {name} after line {}: {error}; check that it is a file of text",
                    number - 1
                )),
            };
            let failed = message.is_err();
            if sender.send(message).is_err() || failed {
                return;
            }
        }
    });
    receiver
}

fn in_order(asked: Vec<Asked>) -> Questions {
    let (sender, receiver) = mpsc::channel();
    // The receiver is at hand: nothing is refused.
    asked.into_iter().for_each(|one| drop(sender.send(Ok(one))));
    receiver
}

/// Waits for a question and takes those that are there already, up to `most`, with the error that ended them. `None` at the end.
fn next_batch(questions: &Questions, most: usize) -> Option<(Vec<Asked>, Option<anyhow::Error>)> {
    let mut batch = Vec::new();
    let mut message = questions.recv().ok()?;
    loop {
        match message {
            Ok(one) => batch.push(one),
            Err(error) => return Some((batch, Some(error))),
        }
        if batch.len() == most {
            return Some((batch, None));
        }
        message = match questions.try_recv() {
            Ok(next) => next,
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Some((batch, None)),
        };
    }
}

const NAMED: usize = 5;

pub fn say_unknown(pieces: &BTreeSet<String>) {
    let named: Vec<String> = pieces.iter().map(|piece| format!("{piece:?}")).collect();
    if !named.is_empty() {
        note(format_args!("note: {} did not occur in training: taken as unknown", listed(&named, NAMED)));
    }
}
