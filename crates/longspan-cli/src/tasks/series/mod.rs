//! Numeric series at any times, and their labels: a model of points learns to tell the label, or a number.

mod archive;
pub mod file;
mod objects;
pub mod scaling;
mod table;
pub mod unusual;
mod wide;

use std::path::Path;

use anyhow::{Result, bail};
use burn::tensor::{Device, Tensor, TensorData};
use longspan::models::{SeriesModel, SeriesModelConfig};
use serde_json::json;
use sha2::Digest;

use super::attention;
use super::feed::{self, Shuffled};
use super::labels::{self, Goal, Scores, Target};
use super::lines;
use super::simple::Simple;
use super::simple::kernels::{Grid, Kernels, nearest};
use super::split::{self, Split, evenly};
use super::stack::{self, stacked};
use super::task::{self, Asked, Data, Loss, Predict, Shown, Task, Titles, Told, Vocabulary};
use crate::run::columns::Columns;
use crate::run::config::{self, Files, Missing, ModelSettings, SeriesSettings};
use crate::run::folder::RunFolder;
use crate::terminal::notes::note;
use crate::terminal::samples::{self, Sample, counted};
use crate::terminal::shell;
use file::{Found, Reading, Series};
use scaling::{Clock, Scaling};

type Config = config::Config<SeriesSettings>;
type Answering<'a> = task::Answering<'a, SeriesSettings>;

const KERNELS: &str = "kernels.safetensors";

/// What stands for a missing value.
const INSTEAD: &str = "the mean of the channel";

pub struct SeriesTask {
    scaling: Scaling,
    target: Target,
    /// None in runs of earlier versions.
    kernels: Option<Kernels>,
    /// What was learned from, for the nearest of it; empty in runs that are read back.
    learned: Vec<Grid>,
    goals: Vec<Goal>,
}

type Example = labels::Example<Points>;

pub type Points = (Vec<f32>, Vec<f32>);

impl Task for SeriesTask {
    type Example = Example;
    type Feed = Shuffled<Example>;
    type Carried = ();
    type Text = Series;
    type Model = SeriesModel;
    type Scores = Scores;
    type Settings = SeriesSettings;

    const EXAMPLES: &str = "series";
    const LENGTH: &str = "points";

    fn begin(config: &mut Config) -> Result<(Self, Data<Self>)> {
        let (split, found) = read_split(
            config,
            &Reading { columns: Some(&config.task.files.columns), labels: true, ..Reading::default() },
        )?;
        config.task.labels.target = config.task.labels.target.or(found.target);
        settle(config.data_name(), &mut config.task.files, found)?;
        let labels = split.train.iter().map(Series::label);
        let name = config.data_name();
        let target = Target::of(labels, &mut config.task.labels.target, &name, Self::EXAMPLES)?;
        target.say_unlearned(&split, config.scored_names(), Series::label);
        let clock = if config.task.clock.unwrap_or(true) { Clock::of(&split.train) } else { None };
        if config.task.clock == Some(true) && clock.is_none() {
            bail!(
                "clock is set, and the series do not share a start near 0; leave it out, or count times from each start"
            );
        }
        let mut task = Self {
            scaling: Scaling::of(&split.train, clock),
            target,
            kernels: None,
            learned: Vec::new(),
            goals: Vec::new(),
        };
        let (kernels, unseen) = task.unseen(&split)?;
        task.kernels = Some(kernels);
        (task.learned, task.goals) =
            (split.train.iter().map(|one| task.scaling.even(one)).collect(), task.goals_of(&split)?);
        let data = task.measured(split, unseen, config)?;
        Ok((task, data))
    }

    fn load(folder: &RunFolder, config: &Config) -> Result<Self> {
        let (scaling, target) = (Scaling::load(folder)?, Target::load(folder)?);
        let load = || Kernels::load(folder, KERNELS, scaling.channels(), target.outputs());
        let has_kernels = config.task.stack.base || folder.file(KERNELS).exists();
        let kernels = has_kernels.then(load).transpose()?;
        Ok(Self { scaling, target, kernels, learned: Vec::new(), goals: Vec::new() })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        self.scaling.store(folder)?;
        self.kernels.iter().try_for_each(|kernels| kernels.store(folder, KERNELS))?;
        self.target.store(folder)
    }

    fn data(&self, config: &Config) -> Result<Data<Self>> {
        let split = read_split(config, &self.reading(config))?.0;
        let unseen = if config.task.stack.base { self.unseen(&split)?.1 } else { Vec::new() };
        self.measured(split, unseen, config)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        vec![Vocabulary { side: "series", kind: "channels", size: self.scaling.channels() }, self.target.vocabulary()]
    }

    fn model(&self, config: &Config, device: &Device) -> Result<SeriesModel> {
        let (outputs, pooling) = (self.target.outputs(), config.task.labels.pooling);
        stacked!(SeriesModelConfig::new(self.scaling.inputs(), outputs), config, pooling, outputs, device)
    }

    fn size(example: &Example) -> (usize, usize) {
        (1, example.input.1.len())
    }

    fn loss(&self, model: &SeriesModel, batch: &[&Example], smoothing: f64, device: &Device) -> Result<Loss> {
        let (values, times, lengths) =
            padded(batch.iter().map(|example| &example.input), self.scaling.inputs(), device);
        self.target.loss(batch, smoothing, model.forward(values, times, &lengths)?)
    }

    fn measure(&self) -> &'static str {
        self.target.measure()
    }

    fn score(&self, model: &SeriesModel, series: &[Series], how: &Answering<'_>) -> Result<Scores> {
        self.scaling.say_other(how.name, series);
        let measured = |one: &Series| self.scaling.apply(one).map_err(lines::in_line(how.name, one.line));
        let points = series.iter().map(measured).collect::<Result<Vec<_>>>()?;
        let labels: Vec<&str> = series.iter().map(Series::label).collect();
        self.target.score(&labels, &self.outputs(model, series, &points, how)?, Self::EXAMPLES)
    }

    fn simple(&self, data: &Data<Self>, series: &[Series], _: &Config) -> Result<Vec<Simple>> {
        let labels: Vec<&str> = series.iter().map(Series::label).collect();
        let mut others = Vec::new();
        let even: Vec<Grid> = series.iter().map(|one| self.scaling.even(one)).collect();
        if let Some(places) = nearest(&self.learned, &even) {
            let rows = places.iter().map(|place| self.target.certain(self.goals[*place])).collect();
            others.push(("the nearest series, warped in time within a tenth (DTW)".into(), rows));
        }
        if let Some(kernels) = &self.kernels {
            others.push(("ridge regression on random convolutions (MiniRocket)".into(), kernels.predict(&even)));
        }
        let goals = data.train.examples.iter().map(|example| example.goal);
        self.target.simple(&labels, goals, others, Self::EXAMPLES)
    }

    fn evaluate(&self, model: &SeriesModel, path: &Path, how: &Answering<'_>) -> Result<Scores> {
        let found = labelled(path, how.config, &self.reading(how.config))?;
        self.score(model, &found.series, how)
    }

    fn show(&self, model: &SeriesModel, held_out: &[Series], how: &Answering<'_>, folder: &str) -> Result<Shown> {
        let some = evenly(held_out, 6);
        let points = some.iter().map(|one| self.scaling.apply(one)).collect::<Result<Vec<_>>>()?;
        let rows = self.outputs(model, &some, &points, how)?;
        let sample = |(one, row): (&Series, &Vec<f32>)| Sample {
            source: format!("{} points", one.times.len()),
            answer: self.target.answers(row).first().map_or_else(String::new, |best| best.target.clone()),
            cut: false,
            expected: one.label.clone(),
        };
        let samples: Vec<Sample> = some.iter().zip(&rows).map(sample).collect();
        let file = how.config.task.files.held_out.as_deref().or(how.config.first());
        Ok(Shown { text: samples::table(&samples), next: next(folder, file), picture: None })
    }

    fn introduce(&self, config: &Config, data: &Data<Self>) -> String {
        let examples = &data.train.examples;
        let mut lengths: Vec<usize> = examples.iter().map(|example| example.input.1.len()).collect();
        lengths.sort_unstable();
        let channels = counted(self.scaling.channels(), "channels");
        let masked = if self.scaling.masked { ", as many more say what is missing" } else { "" };
        format!(
            "{}: {} series to learn from, {} held out; {channels}{masked}, {} points in the middle one; {}; {}{}",
            config.data_name(),
            examples.len(),
            data.held_out.len(),
            lengths.get(lengths.len() / 2).copied().unwrap_or(0),
            times(&config.model, &self.scaling),
            self.target.introduce(examples.iter().map(|example| example.goal)),
            if config.task.stack.base { "; the model corrects a ridge regression on random convolutions" } else { "" }
        )
    }
}

/// What a person may try next with a run: a command, with a file of series where there is one.
pub fn next(folder: &str, file: Option<&Path>) -> String {
    let file = file.filter(|path| !lines::is_standard_input(path)).map_or_else(|| "FILE".into(), shell::path);
    format!("{} predict {folder} {file}", shell::program())
}

/// What becomes of times, in words.
pub fn times(model: &ModelSettings, scaling: &Scaling) -> String {
    // Where positions count, every mechanism has room for one.
    match attention::of_layers(model, 1) {
        Ok(all) if !all.iter().any(|one| one.takes_positions()) => {
            format!("{} attention counts points, only fourier sees their times", model.attention)
        }
        _ => format!("the usual distance of times is {}", scaling.distance(scaling.step)),
    }
}

/// Keeps what was found in a table, and says it. Of any other file a person can name no columns.
pub fn settle(name: String, files: &mut Files, found: Found) -> Result<()> {
    if let Some((columns, said)) = found.columns {
        note(format_args!("{name}: {said}"));
        files.columns = columns;
    } else if (Columns { dates: None, ..files.columns.clone() }) != Columns::default() {
        bail!(
            "{name}: it is no table, so it has no columns that flags such as --time and --channels could name; leave them out"
        );
    }
    Ok(())
}

/// Reads the series that the settings name, by use; the main file's are taken out of what was found.
fn read_split(config: &Config, reading: &Reading<'_>) -> Result<(Split<Series>, Found)> {
    let Some(path) = config.first() else { bail!("no series are given; name them with --series") };
    let mut found = labelled(path, config, reading)?;
    let columns = found.columns.as_ref().map_or(&config.task.files.columns, |(columns, _)| columns).clone();
    let series = std::mem::take(&mut found.series);
    let dates = series.first().and_then(|one| one.dates.clone());
    let other = Reading { columns: Some(&columns), dates: dates.as_deref(), ..*reading };
    let read = |path: &Path| Ok(labelled(path, config, &other)?.series);
    Ok((split::of(&config.task.files, &config.data_name(), series, SeriesTask::EXAMPLES, read, |one| &one.key)?, found))
}

fn labelled(path: &Path, config: &Config, reading: &Reading<'_>) -> Result<Found> {
    let found = file::read(path, reading, config.task.missing == Missing::Refuse, INSTEAD)?;
    match found.series.iter().find(|one| one.label.as_ref().is_none_or(String::is_empty)) {
        Some(one) => bail!(
            "{}, line {}: the series has no label; give one, or remove it; of a table --label names the column",
            lines::name(path),
            one.line
        ),
        None => Ok(found),
    }
}

impl Predict for SeriesTask {
    fn asked(&self, path: &Path, config: &Config) -> Result<Option<Vec<Asked>>> {
        file::asked(path, &self.reading(config), INSTEAD, |one| self.scaling.apply(one).map(drop))
    }

    fn titles(&self, config: &Config) -> Titles {
        self.target.titles(config.task.files.columns.id.as_deref().unwrap_or("id"), &config.task.files.columns)
    }

    fn predict(&self, model: &SeriesModel, asked: &[Asked], how: &Answering<'_>) -> Result<Vec<Told>> {
        let reading = self.reading(how.config);
        let read = |one: &Asked| {
            let read = reading.of(one, how.name)?;
            let points = self.scaling.apply(&read).map_err(lines::in_line(how.name, one.line))?;
            Ok((read, points))
        };
        let (all, points): (Vec<Series>, Vec<Points>) =
            file::not_empty(asked).map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        self.scaling.say_other(how.name, &all);
        let rows = self.outputs(model, &all, &points, how)?;
        let told = |(one, row): (&Series, &Vec<f32>)| {
            let answers = self.target.answers(row);
            let id = one.id.clone().unwrap_or_else(|| one.line.to_string());
            let best = answers.first();
            let json = json!({ "id": id, "target": best.map(|best| &best.target), "score": best.map(|best| best.score), "answers": answers });
            let row = std::iter::once(id).chain(Target::cells(&answers)).collect();
            Told { rows: vec![row], json, cut: false, picture: None }
        };
        Ok(all.iter().zip(&rows).map(told).collect())
    }
}

impl SeriesTask {
    fn reading<'a>(&'a self, config: &'a Config) -> Reading<'a> {
        Reading::learned(&config.task.files, self.scaling.dates.as_ref(), true)
    }

    /// The convolutions of the series to learn from, and what is told of each by some that have not seen it.
    fn unseen(&self, split: &Split<Series>) -> Result<(Kernels, Vec<Vec<f32>>)> {
        split.train.iter().try_for_each(|one| self.scaling.check(one))?;
        let learned: Vec<Grid> = split.train.iter().map(|one| self.scaling.even(one)).collect();
        Ok(Kernels::fit(&learned, &self.goals_of(split)?, self.target.outputs()))
    }

    fn goals_of(&self, split: &Split<Series>) -> Result<Vec<Goal>> {
        self.target.goals(split.train.iter().map(Series::label))
    }

    /// What the convolutions that the model corrects tell of series.
    fn base(&self, series: &[Series], config: &Config) -> Vec<Vec<f32>> {
        let kernels = self.kernels.as_ref().filter(|_| config.task.stack.base);
        kernels.map_or(Vec::new(), |kernels| {
            kernels.predict(&series.iter().map(|one| self.scaling.even(one)).collect::<Vec<_>>())
        })
    }

    /// Series as the model gets them; `unseen` is what is told of those to learn from without them.
    fn measured(&self, split: Split<Series>, unseen: Vec<Vec<f32>>, config: &Config) -> Result<Data<Self>> {
        let name = config.data_name();
        // What no model can take is found before a run is made.
        for (part, name) in [&split.development, &split.held_out].into_iter().zip(config.scored_names()) {
            let check = |one: &Series| self.scaling.apply(one).map(drop).map_err(lines::in_line(&name, one.line));
            part.iter().try_for_each(check)?;
        }
        let points = |one: &Series| self.scaling.apply(one).map_err(lines::in_line(&name, one.line));
        let bases = [if config.task.stack.base { unseen } else { Vec::new() }, self.base(&split.development, config)];
        let examples = |all: &[Series], base: &[Vec<f32>]| {
            let base = |n: usize| base.get(n).cloned().unwrap_or_default();
            self.target.examples(all, Series::label, points, base)
        };
        let (train, development) = (examples(&split.train, &bases[0])?, examples(&split.development, &bases[1])?);
        feed::data(
            train,
            development,
            split.held_out,
            config,
            |example: &Example| example.input.1.len(),
            |Example { input: (values, times), goal, .. }, hash| {
                hash.update((times.len() as u64).to_le_bytes());
                goal.hash(hash);
                values.iter().chain(times).for_each(|number| hash.update(number.to_bits().to_le_bytes()));
            },
            |one: &Series| vec![&one.key, one.label()],
        )
    }

    fn outputs(
        &self,
        model: &SeriesModel,
        series: &[Series],
        points: &[Points],
        how: &Answering<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let base = self.base(series, how.config);
        if !base.is_empty() && stack::is_at_zero(&model.output, how.config) {
            return Ok(base);
        }
        let found = labels::outputs(
            points,
            |(_, times)| times.len(),
            self.target.outputs(),
            how,
            |batch| {
                let (values, times, lengths) = padded(batch.iter().copied(), self.scaling.inputs(), &Device::flex());
                Ok(model.forward(values, times, &lengths)?)
            },
        )?;
        Ok(labels::joined(found, base))
    }
}

/// Series as tensors, padded with zeros: values, `inputs` at a point, times, and how many points count.
pub fn padded<'a>(
    batch: impl Iterator<Item = &'a Points> + Clone,
    inputs: usize,
    device: &Device,
) -> (Tensor<3>, Tensor<2>, Vec<usize>) {
    let lengths: Vec<usize> = batch.clone().map(|(_, times)| times.len()).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let (mut values, mut times) = (Vec::new(), Vec::new());
    for (row, at) in batch {
        values.extend_from_slice(row);
        values.resize(values.len() + (longest - at.len()) * inputs, 0.0);
        times.extend_from_slice(at);
        times.resize(times.len() + longest - at.len(), 0.0);
    }
    let values = TensorData::new(values, [lengths.len(), longest, inputs]);
    let times = TensorData::new(times, [lengths.len(), longest]);
    (Tensor::from_data(values, device), Tensor::from_data(times, device), lengths)
}
