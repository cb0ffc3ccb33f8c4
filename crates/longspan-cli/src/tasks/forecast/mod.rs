//! Forecasts: a model of points learns to tell the next values of a series at their times, with quantiles.

mod calibration;
mod scores;
mod window;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use burn::module::Param;
use burn::tensor::{Device, Int, Tensor, TensorData};
use jiff::civil::Weekday;
use longspan::layers::pinball;
use longspan::models::{Pooling, SeriesModel, SeriesModelConfig};
use rayon::prelude::*;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::feed;
use super::labels::{self, shown};
use super::lines;
use super::scores::{Interval, decimals};
use super::series::file::{self, Found, Point, Reading, Series};
use super::series::scaling::{Scaling, usual_gap};
use super::series::{next, padded, settle, times};
use super::simple::Simple;
use super::simple::smoothing::{Channel, Form, Smoothing};
use super::split::{self, Split, evenly};
use super::stack::stacked;
use super::table::dates::Calendar;
use super::task::{self, Asked, Data, Loss, Predict, Shown, Task, Titles, Told, Vocabulary};
use crate::run::config::{self, ForecastSettings, Missing};
use crate::run::folder::{CONFIG, RunFolder};
use crate::terminal::forecasts::{Drawing, Forecasts, Written};
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::{self, Sample, counted};
use scores::{Scores, Sums};
use window::{Drawn, Example, Seen, Sizes, Stretch, Window, inputs};

type Config = config::Config<ForecastSettings>;
type Answering<'a> = task::Answering<'a, ForecastSettings>;

/// What is told of every value: the ends of the interval that holds four of five, of the one that holds half, and the median.
const QUANTILES: [f32; 5] = [0.1, 0.25, 0.5, 0.75, 0.9];
const MEDIAN: usize = 2;

/// From so many series on some are held out whole; of fewer the end of each.
const MANY: usize = 50;

/// The fewest points that are seen, where series are so long.
const CONTEXT: usize = 64;

/// What stands for a missing value.
const INSTEAD: &str = "the value before";

/// Points of the longest season of a calendar that is tried.
const SEASON: usize = 2048;

const DRAWN: usize = 4;

const LEARNED: usize = 500;

const DEVELOPMENT: usize = 512;

/// Windows for development, side by side, from which intervals of a simple method are widened.
const SURE: usize = 10;

pub struct Forecast {
    scaling: Scaling,
    sizes: Sizes,
}

impl Task for Forecast {
    type Example = Example;
    type Feed = Drawn;
    type Carried = ();
    type Text = Window;
    type Model = SeriesModel;
    type Scores = Scores;
    type Settings = ForecastSettings;

    const EXAMPLES: &str = "windows";
    const LENGTH: &str = "points";

    fn begin(config: &mut Config) -> Result<(Self, Data<Self>)> {
        let reading = Reading { columns: Some(&config.task.files.columns), ..Reading::default() };
        let mut found = read(config, config.first().unwrap_or(Path::new("-")), &reading)?;
        let all = std::mem::take(&mut found.series);
        settle(config.data_name(), &mut config.task.files, found)?;
        let known = all.first().map_or(Vec::new(), |one| config.task.files.columns.known_among(&one.names));
        let dates = all.first().and_then(|one| one.dates.clone());
        let told = config.task.forecast;
        let (name, max_tokens) = (config.data_name(), config.task.files.max_tokens);
        if max_tokens <= told {
            bail!(
                "forecast = {told} and max_tokens = {max_tokens}: no point before them is seen; raise --set max_tokens=…"
            );
        }
        let most = max_tokens - told;
        // Nine of ten series are long enough for a window, which has a quarter of these points and those to predict.
        let mut lengths: Vec<usize> = all.iter().map(|one| one.times.len()).collect();
        lengths.sort_unstable();
        let longest = lengths.last().copied().unwrap_or(0);
        let short = lengths.get(lengths.len() / 10).map_or(0, |short| short.saturating_sub(told));
        let usual = (4 * told).max(CONTEXT).min((4 * short).max(8)).min(longest.saturating_sub(told)).clamp(1, most);
        let context = *config.task.context.get_or_insert(usual);
        if context > most {
            bail!(
                "context = {context} and forecast = {told} are more than max_tokens = {max_tokens}; change one with --set"
            );
        }
        let sizes = Sizes { told, context };
        let needed = sizes.least() + told;
        if longest < needed {
            bail!(
                "{name}: the longest series has {}, and {needed} are needed to predict {told} from {} before them; give \
                 longer series, or lower --forecast or context",
                counted(longest, "points"),
                sizes.least()
            );
        }
        if config.model.attention == "fourier" {
            // Weights that add up to 1 and are never negative give a mean, which goes beyond no value that was seen.
            config.model.attention_options.entry("normalizer").or_insert(json!("unrotated"));
        }
        let reading =
            Reading { columns: Some(&config.task.files.columns), dates: dates.as_deref(), ..Reading::default() };
        let parts = parts(config, all, sizes, &reading)?;
        let learned: Vec<Series> = parts.train.iter().map(|part| part.series.first(part.points.end)).collect();
        let mut scaling = Scaling::of(&learned, None);
        // Of series whose times lie further or less apart than most, the first is named.
        let mut long = learned.iter().filter(|one| one.times.len() > 20);
        long.any(|one| scaling.say_other_times(&format!("{name}, line {}", one.line), std::iter::once(&one.times[..])));
        scaling.known = known;
        let is_same = |n: &usize| {
            let mut values = learned.iter().flat_map(|one| one.channel(*n)).filter(|value| !value.is_nan());
            let first = values.next();
            scaling.is_known(*n) && values.all(|value| Some(value) == first)
        };
        for n in (0..scaling.channels()).filter(is_same) {
            note(format_args!(
                "{name}: `{}` is known ahead, but the same at all points to learn from: nothing is learned of what it does",
                scaling.names()[n]
            ));
        }
        scaling.floors = scaling.floors(&learned);
        if config.task.stack.base {
            scaling.base = task_base(&scaling, &parts.train, told);
        }
        let task = Self { scaling, sizes };
        let data = task.windows(parts, config)?;
        Ok((task, data))
    }

    fn load(folder: &RunFolder, config: &Config) -> Result<Self> {
        let context = config.task.context.ok_or_else(|| folder.damaged(CONFIG, "no context"))?;
        Ok(Self { scaling: Scaling::load(folder)?, sizes: Sizes { told: config.task.forecast, context } })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        self.scaling.store(folder)
    }

    fn data(&self, config: &Config) -> Result<Data<Self>> {
        let reading = self.reading(config);
        let all = read(config, config.first().unwrap_or(Path::new("-")), &reading)?.series;
        self.windows(parts(config, all, self.sizes, &reading)?, config)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        let next = Vocabulary { side: "forecast", kind: "next points", size: self.sizes.told };
        vec![Vocabulary { side: "series", kind: "channels", size: self.scaling.channels() }, next]
    }

    fn model(&self, config: &Config, device: &Device) -> Result<SeriesModel> {
        // Every point has its row: none is made of all.
        let (sizes, outputs) = (SeriesModelConfig::new(inputs(&self.scaling), self.outputs()), self.outputs());
        let mut model: SeriesModel = stacked!(sizes, config, Pooling::Mean, outputs, device)?;
        if config.task.stack.base {
            // It begins as the simple methods, with the quantiles of their errors.
            let errors = self.scaling.base.iter().flat_map(|base| base.quantiles.iter().map(|q| *q as f32));
            let bias = TensorData::new(errors.collect::<Vec<_>>(), [self.outputs()]);
            model.output.bias = Some(Param::from_tensor(Tensor::from_data(bias, device)));
        }
        Ok(model)
    }

    fn size(example: &Example) -> (usize, usize) {
        let known = example.targets.iter().filter(|target| !target.is_nan()).count();
        (known, example.seen.points.1.len())
    }

    fn loss(&self, model: &SeriesModel, batch: &[&Example], _: f64, device: &Device) -> Result<Loss> {
        let rows = self.rows(model, batch.iter().map(|example| &example.seen), None, device)?;
        let targets: Vec<f32> = batch.iter().flat_map(|example| example.targets.iter().copied()).collect();
        let loss = pinball(rows.reshape([targets.len(), QUANTILES.len()]), &targets, &QUANTILES)?;
        let loss = loss.div_scalar(QUANTILES.len() as f64);
        Ok(Loss { plain: loss.clone().detach(), smoothed: loss })
    }

    fn simple(&self, _: &Data<Self>, windows: &[Window], _: &Config) -> Result<Vec<Simple>> {
        // The season that most channels have, the longest of these.
        let seasons = || self.predicted().filter_map(|channel| Some(self.scaling.base.get(channel)?.way.season));
        let channels = |season: &usize| seasons().filter(|one| one == season).count();
        let season =
            seasons().filter(|season| *season > 1).max_by_key(|season| (channels(season), *season)).unwrap_or(1);
        let ways = [Form::Repeated, Form::Damped].map(|form| Smoothing::new(form, season, false));
        let chosen = self.scaling.base.clone();
        let of = |ways: Vec<Smoothing>| -> Result<Simple> {
            let scaling = Scaling { base: ways.clone(), ..self.scaling.clone() };
            let errors = |window: &Window| -> Result<Vec<(f64, f64)>> {
                let ends = window.example(&scaling, None)?.seen.ends;
                let known = self.known(window);
                Ok(known.map(|(n, y, unit)| ((y - ends[n].value(0.0)).abs() / unit, 1.0)).collect())
            };
            let errors = windows.par_iter().map(errors).collect::<Result<Vec<_>>>()?.concat();
            let found = Interval::ratio(&errors).rate;
            let mut told = self.predicted().map(|channel| ways[channel].way);
            let first = told.next().unwrap_or(ways[0].way);
            let name =
                if told.all(|way| way == first) { first.words() } else { "a way chosen for each channel".into() };
            Ok(Simple { name, shown: format!("mean absolute error {found:.0$}", decimals(found)), score: found })
        };
        let each = |way: &Smoothing| vec![way.clone(); self.scaling.channels()];
        let mut all: Vec<Simple> = ways.iter().map(|way| of(each(way))).collect::<Result<_>>()?;
        let other = |way: &Smoothing| self.predicted().any(|channel| chosen[channel].way != way.way);
        if !chosen.is_empty() && ways.iter().all(other) {
            all.push(of(chosen)?);
        }
        Ok(all)
    }

    fn overlap(feed: &Drawn, development: usize) -> f64 {
        feed.overlap(development)
    }

    fn usual_steps(per_epoch: usize) -> usize {
        (60 * per_epoch).clamp(300, 1500)
    }

    fn measure(&self) -> &'static str {
        "mean pinball loss, in deviations of what is seen"
    }

    fn calibrated(
        &self,
        model: &SeriesModel,
        data: &Data<Self>,
        alone: bool,
        how: &Answering<'_>,
    ) -> Result<Option<SeriesModel>> {
        // The intervals of a simple method are those of windows that it had not seen: few others do not know better.
        if alone && data.train.development < SURE * self.sizes.told {
            return Ok(None);
        }
        let mut distances = calibration::Distances::default();
        let rows = self.numbers(model, &data.development.iter().map(|one| &one.seen).collect::<Vec<_>>(), how)?;
        for (example, row) in data.development.iter().zip(rows) {
            for (target, row) in example.targets.iter().zip(row.chunks(QUANTILES.len())) {
                distances.add(*target, &in_order(row));
            }
        }
        Ok(calibration::widened(model.clone(), distances))
    }

    fn score(&self, model: &SeriesModel, windows: &[Window], how: &Answering<'_>) -> Result<Scores> {
        self.scaling.say_other_times(how.name, windows.iter().map(|one| &one.series.times[one.known.clone()]));
        let seen: Vec<Seen> =
            windows.par_iter().map(|window| Ok(window.example(&self.scaling, None)?.seen)).collect::<Result<_>>()?;
        let told = self.quantiles(model, &seen.iter().collect::<Vec<_>>(), how)?;
        let mut by_series: BTreeMap<(&str, usize), Vec<Sums>> = BTreeMap::new();
        for ((window, seen), told) in windows.iter().zip(&seen).zip(told) {
            let mut sums = Sums::default();
            for (n, y, unit) in self.known(window) {
                let (row, channel) = (&told[n], n % self.scaling.channels());
                let losses = row.iter().zip(QUANTILES).map(|(found, q)| {
                    let (q, above) = (f64::from(q), y - found);
                    (q * above).max((q - 1.0) * above)
                });
                let (mean, last) = (seen.measures[channel].0, window.last(channel).unwrap_or(seen.measures[channel].0));
                sums.values += 1.0;
                sums.errors += (y - row[MEDIAN]).abs() / unit;
                sums.of_last += (y - last).abs() / unit;
                sums.of_mean += (y - mean).abs() / unit;
                sums.pinball += losses.sum::<f64>() / QUANTILES.len() as f64 / unit;
                sums.inside += f64::from(u8::from((row[0]..=row[QUANTILES.len() - 1]).contains(&y)));
            }
            by_series.entry((window.series.key.as_str(), window.series.line)).or_default().push(sums);
        }
        Ok(Scores::of(&by_series.into_values().collect::<Vec<_>>(), self.predicted().count() > 1))
    }

    fn evaluate(&self, model: &SeriesModel, path: &Path, how: &Answering<'_>) -> Result<Scores> {
        let (name, all) = (lines::name(path), read(how.config, path, &self.reading(how.config))?.series);
        all.iter().try_for_each(|one| self.scaling.check(one).map_err(lines::in_line(&name, one.line)))?;
        let windows: Vec<Window> =
            all.into_iter().flat_map(|one| self.sizes.whole(one).windows(self.sizes, self.sizes.told)).collect();
        if windows.is_empty() {
            let least = self.sizes.least();
            bail!(
                "{name}: no series has more than {least} points, from which the next are predicted; give longer ones"
            );
        }
        self.score(model, &windows, how)
    }

    fn show(&self, model: &SeriesModel, held_out: &[Window], how: &Answering<'_>, folder: &str) -> Result<Shown> {
        let (mut all, mut pictures) = (Vec::new(), Vec::new());
        let width = self.scaling.channels();
        let channel = self.predicted().next().unwrap_or(0);
        for (n, window) in evenly(held_out, DRAWN).into_iter().enumerate() {
            let seen = window.example(&self.scaling, None)?.seen;
            let told = self.quantiles(model, &[&seen], how)?.concat();
            let times = &window.series.times[window.known.end..window.until];
            let known = window.series.first(window.known.end);
            let truth = window.truth(&self.scaling);
            pictures.extend(self.picture_of(&known, times, &told, &truth).0);
            if n >= 2 {
                continue;
            }
            let values = truth.iter().zip(&told).skip(channel).step_by(width).zip(times);
            all.extend(values.take(6).map(|((y, row), time)| {
                let [low, _, median, _, high] = rounded(row, seen.measures[channel].1);
                let time = match &window.series.dates {
                    Some(dates) => dates.text(*time),
                    None => format!("time {}", shown(*time, self.scaling.step)),
                };
                Sample {
                    source: time,
                    answer: format!("{median} ({low} … {high})"),
                    cut: false,
                    expected: (!y.is_nan()).then(|| shown(*y, seen.measures[channel].1).to_string()),
                }
            }));
        }
        let picture = (!pictures.is_empty()).then_some(Forecasts(pictures));
        Ok(Shown { text: samples::table(&all), next: next(folder, how.config.first()), picture })
    }

    fn introduce(&self, config: &Config, data: &Data<Self>) -> String {
        let Sizes { told, context } = self.sizes;
        let stretches = &data.train.stretches;
        let by_time = stretches.iter().any(|part| part.points.end < part.series.times.len());
        let what = match config.held_out() {
            Some(path) => format!("{} is", lines::name(path)),
            None if by_time => "the last points of series are".into(),
            None => "other series are".into(),
        };
        let held_out = match data.held_out.len() {
            0 => "nothing is held out".into(),
            count => format!("{what} held out, {}", counted(count, "windows")),
        };
        format!(
            "{}: the next {} from up to {context} before them; {} series of {} to learn from, {}; \
             {held_out}; {}{}",
            config.data_name(),
            counted(told, "points"),
            stretches.len(),
            counted(self.scaling.channels(), "channels"),
            counted(data.train.count() as usize, "windows"),
            times(&config.model, &self.scaling),
            match self.predicted().find_map(|channel| self.scaling.base.get(channel)) {
                Some(base) => format!("; the model corrects {}, chosen on the points to learn from", base.way.words()),
                None => String::new(),
            }
        )
    }
}

/// The simple method that does best for each channel on the points to learn from.
fn task_base(scaling: &Scaling, parts: &[Stretch], told: usize) -> Vec<Smoothing> {
    // Seasons of a calendar; others show in the data.
    let per_day = 86_400.0 / scaling.step;
    // Working days alone come again after five, and after a year of them.
    let week = 7 - parts.first().map_or(0, |part| days_off(&part.series).len());
    let calendar = scaling.dates.as_ref().map(|dates| &dates.calendar);
    let four_years = match calendar {
        Some(Calendar::Seconds | Calendar::Days) if per_day >= 1.0 => (1461.0 / 7.0 * week as f64 * per_day) as usize,
        _ => 0,
    };
    let seasons = match calendar {
        Some(Calendar::Months { .. }) if scaling.step == 1.0 => vec![12],
        Some(Calendar::Months { .. }) if scaling.step == 3.0 => vec![4],
        Some(Calendar::Seconds | Calendar::Days) if scaling.step == 604_800.0 => vec![52],
        Some(Calendar::Seconds | Calendar::Days) if per_day == 1.0 => vec![week, 365 * week / 7],
        Some(Calendar::Seconds) if per_day >= 2.0 && per_day.fract() == 0.0 => {
            [1, 7].map(|days| days * per_day as usize).into_iter().filter(|season| *season <= SEASON).collect()
        }
        // Years with months or quarters behind the point.
        None if (12.0 * scaling.step - 1.0).abs() < 1e-2 => vec![12],
        None if scaling.step == 0.25 => vec![4],
        _ => Vec::new(),
    };
    // What is known has nothing to choose by.
    let parts_of = |channel| if scaling.is_known(channel) { Vec::new() } else { evenly(parts, LEARNED) };
    let of = |channel: usize| {
        let history = |part: &Stretch| {
            let values = |channel: usize| scaling.channel(&part.series, channel, part.points.end);
            let known = (0..scaling.channels()).filter(|one| scaling.is_known(*one));
            let (known, values) = (known.map(values).collect(), values(channel));
            let first = (part.points.start * values.len()).checked_div(part.points.end).unwrap_or(0);
            // The later half: what comes next follows as much.
            let first = first.max(values.len() / 2).min(values.len().saturating_sub(told));
            Channel { values, known, first }
        };
        parts_of(channel).iter().map(history).collect()
    };
    let columns: Vec<Vec<Channel>> = (0..scaling.channels()).map(of).collect();
    Smoothing::choose(&columns, told, &seasons, four_years, &QUANTILES)
}

type Quantiles = [f64; QUANTILES.len()];

/// Each is learned by itself, so that two may cross.
fn in_order(row: &[f32]) -> [f32; QUANTILES.len()] {
    let mut row: [f32; QUANTILES.len()] = std::array::from_fn(|q| row[q]);
    row.sort_unstable_by(f32::total_cmp);
    row
}

/// With the digits that they have beside a unit, or beside their interval where it is narrower.
fn rounded(row: &Quantiles, unit: f64) -> Quantiles {
    let width = row[QUANTILES.len() - 1] - row[0];
    // What is narrower is rounding.
    let unit = if width > 0.0 { width.clamp(1e-9 * unit, unit) } else { unit };
    row.map(|value| shown(value, unit))
}

fn levels() -> Vec<f64> {
    QUANTILES.iter().map(|q| (f64::from(*q) * 100.0).round() / 100.0).collect()
}

fn weekday(one: &Series, time: f64) -> Option<Weekday> {
    one.dates.as_ref().and_then(|dates| dates.weekday(time))
}

/// Days of the week that a series leaves out, as far as it tells: in less than two weeks only a weekend.
fn days_off(one: &Series) -> Vec<Weekday> {
    let known: Vec<Weekday> = one.times.iter().filter_map(|time| weekday(one, *time)).collect();
    let Some(first) = known.first().filter(|_| known.len() > 7) else { return Vec::new() };
    let off: Vec<Weekday> = first.cycle_forward().take(7).filter(|day| !known.contains(day)).collect();
    let span = one.times[one.times.len() - 1] - one.times[0];
    if span >= 14.0 * 86_400.0 || off == [Weekday::Saturday, Weekday::Sunday] { off } else { Vec::new() }
}

fn read(config: &Config, path: &Path, reading: &Reading<'_>) -> Result<Found> {
    file::read(path, reading, config.task.missing == Missing::Refuse, INSTEAD)
}

/// The points of all series that are told, by use: of some series all, or of each the first and the last.
fn parts(config: &Config, all: Vec<Series>, sizes: Sizes, reading: &Reading<'_>) -> Result<Split<Stretch>> {
    let (least, told, count) = (sizes.least(), sizes.told, all.len());
    let all: Vec<Series> = all.into_iter().filter(|one| one.times.len() >= least + told).collect();
    if all.len() < count {
        note(format_args!(
            "left out, with fewer than {1} points: {0} of {count} series",
            count - all.len(),
            least + told
        ));
    }
    let whole = |all: Vec<Series>| all.into_iter().map(|one| sizes.whole(one)).collect();
    let reader = |path: &Path| Ok(read(config, path, reading)?.series);
    if all.len() >= MANY || (config.task.files.development.is_some() && config.task.files.held_out.is_some()) {
        let split = split::of(&config.task.files, &config.data_name(), all, "series", reader, |one| &one.key)?;
        return Ok(Split {
            train: whole(split.train),
            development: whole(split.development),
            held_out: whole(split.held_out),
        });
    }
    let mut split = Split { train: Vec::new(), development: Vec::new(), held_out: Vec::new() };
    for one in all {
        let count = one.times.len();
        let share = count.div_ceil(10).max(told);
        let series = Arc::new(one);
        let mut end = count;
        // Where there is too little for both, for the scores.
        for (part, own) in [
            (&mut split.held_out, &config.task.files.held_out),
            (&mut split.development, &config.task.files.development),
        ] {
            if own.is_none() && end >= least + told + share {
                part.push(Stretch { series: Arc::clone(&series), points: end - share..end });
                end -= share;
            }
        }
        split.train.push(Stretch { series, points: least..end });
    }
    for (part, own, used) in [
        (&mut split.held_out, &config.task.files.held_out, "held-out"),
        (&mut split.development, &config.task.files.development, "development"),
    ] {
        if let Some(path) = own {
            *part = whole(reader(path)?);
            let windows = |parts: &[Stretch], stride| -> Vec<u64> {
                parts.iter().flat_map(|part| part.windows(sizes, stride)).map(|window| window.hash()).collect()
            };
            let learned: HashSet<u64> = windows(&split.train, 1).into_iter().collect();
            let of = windows(part, told);
            let found = of.iter().filter(|window| learned.contains(window)).count();
            split::say_learned(path, found, of.len(), used, Forecast::EXAMPLES);
        }
    }
    Ok(split)
}

impl Predict for Forecast {
    fn asked(&self, path: &Path, config: &Config) -> Result<Option<Vec<Asked>>> {
        file::asked(path, &self.reading(config), INSTEAD, |one| self.ahead(one).map(drop))
    }

    fn titles(&self, config: &Config) -> Titles {
        let columns = &config.task.files.columns;
        let id = columns.id.clone().unwrap_or("id".into());
        let time = columns.time.clone().filter(|name| name != "row").unwrap_or("time".into());
        let names = self.scaling.names();
        let several = self.predicted().count() > 1;
        let quantiles = self.predicted().flat_map(|channel| {
            let name = if several { format!("{} ", names[channel]) } else { String::new() };
            levels().into_iter().map(move |q| format!("{name}{q}"))
        });
        Titles { key: Vec::new(), answer: [id, time].into_iter().chain(quantiles).collect(), always: true }
    }

    fn predict(&self, model: &SeriesModel, asked: &[Asked], how: &Answering<'_>) -> Result<Vec<Told>> {
        let reading = self.reading(how.config);
        let read = |asked: &Asked| {
            let one = reading.of(asked, how.name)?;
            let (seen, times) = self.ahead(&one).map_err(lines::in_line(how.name, asked.line))?;
            Ok((one, seen, times))
        };
        let all = file::not_empty(asked).map(read).collect::<Result<Vec<_>>>()?;
        let Sizes { told, .. } = self.sizes;
        self.scaling.say_other_times(how.name, all.iter().map(|(one, ..)| one.times.as_slice()));
        let is_strange = |(one, seen, _): &&(Series, Seen, Vec<f64>)| {
            let is_far = |time: &f32| *time > 1.5 * told as f32;
            !one.ahead.is_empty() && seen.points.1.last().is_some_and(is_far) || one.times.len() < self.sizes.least()
        };
        note_some(all.iter().filter(is_strange).count(), |strange| {
            format!(
                "note: fewer than {} points, or times further ahead than {told} points, in {strange} series, unlike those learned from: \
                 intervals may be too narrow",
                self.sizes.least()
            )
        });
        note_some(all.iter().filter(|(one, ..)| (1..told).contains(&one.ahead.len())).count(), |few| {
            format!(
                "note: fewer than {told} times without a value at the end of {few} series, which alone are predicted; without any the next {told} are"
            )
        });
        let lacks = |(_, values): &&Point| {
            values.iter().enumerate().any(|(n, value)| value.is_nan() && self.scaling.is_known(n))
        };
        note_some(all.iter().flat_map(|(one, ..)| &one.ahead).filter(lacks).count(), |lacking| {
            format!(
                "note: {} to predict without something that is known ahead ({}); the last known value stands for it",
                counted(lacking, "points"),
                self.list(|channel| self.scaling.is_known(channel))
            )
        });
        let width = self.scaling.channels();
        for n in (0..width).filter(|n| self.scaling.is_known(*n)) {
            let of = |(_, values): &Point| (values[n] - self.scaling.means[n]).abs() / self.scaling.deviations[n];
            let away = all.iter().flat_map(|(one, ..)| &one.ahead).map(of).fold(0.0, f64::max);
            if away > 8.0 {
                note(format_args!(
                    "{}: `{}` is up to {away:.0} deviations of training from its mean at points to predict; nothing was learned of that",
                    how.name,
                    self.scaling.names()[n]
                ));
            }
        }
        let seen: Vec<&Seen> = all.iter().map(|(_, seen, _)| seen).collect();
        let found = self.quantiles(model, &seen, how)?;
        let answered = || all.iter().zip(&found).map(|((one, seen, _), found)| (one, seen, found));
        let rows =
            |found: &'_ Vec<Quantiles>, n: usize| found.iter().skip(n).step_by(width).copied().collect::<Vec<_>>();
        let is_flat = |(_, seen, found): &(&Series, &Seen, &Vec<Quantiles>)| {
            let is_narrow = |n: usize, [low, .., high]: Quantiles| high - low < 1e-6 * seen.measures[n].1;
            self.predicted().any(|n| rows(found, n).into_iter().all(|row| is_narrow(n, row)))
        };
        note_some(answered().filter(is_flat).count(), |flat| {
            format!(
                "note: intervals of {flat} series have no width, since their past, or all of training, was predicted without an error; \
                 what comes may differ"
            )
        });
        let is_below = |(one, _, found): &(&Series, &Seen, &Vec<Quantiles>)| {
            let never = |n: usize| one.channel(n).all(|value| value.is_nan() || value >= 0.0);
            self.predicted().any(|n| rows(found, n).iter().any(|row| row[0] < 0.0) && never(n))
        };
        note_some(answered().filter(is_below).count(), |below| {
            format!(
                "note: predictions below 0 for {below} series that never were; where values cannot be, read them as 0"
            )
        });
        let line = |((one, seen, times), found): (&(Series, Seen, Vec<f64>), Vec<Quantiles>)| {
            let name = one.id.clone().unwrap_or_else(|| one.line.to_string());
            let point = |point: &[Quantiles]| -> Vec<Quantiles> {
                self.predicted().map(|n| rounded(&point[n], seen.measures[n].1)).collect()
            };
            let points: Vec<Vec<Quantiles>> = found.chunks(width).map(point).collect();
            let written: Vec<String> = times.iter().map(|time| one.time(*time)).collect();
            let names = self.scaling.names();
            let count = |time: &String| json!(time.parse::<i64>().ok());
            let json = json!({
                "id": name,
                "times": match &one.dates {
                    Some(dates) if dates.is_epoch() => written.iter().map(count).collect(),
                    Some(_) => json!(written),
                    None => json!(times),
                },
                "channels": self.predicted().map(|n| &names[n]).collect::<Vec<_>>(),
                "quantiles": levels(),
                "values": points,
            });
            let rows = points.iter().zip(&written).map(|(point, time)| {
                [name.clone(), time.clone()]
                    .into_iter()
                    .chain(point.iter().flatten().map(ToString::to_string))
                    .collect()
            });
            Told { rows: rows.collect(), json, cut: false, picture: Some(self.picture_of(one, times, &found, &[])) }
        };
        Ok(all.iter().zip(found).map(line).collect())
    }
}

impl Forecast {
    fn outputs(&self) -> usize {
        self.scaling.channels() * QUANTILES.len()
    }

    /// The values of a window that are known: the place of each, and the unit in which its error counts.
    fn known(&self, window: &Window) -> impl Iterator<Item = (usize, f64, f64)> {
        let channels = self.scaling.channels();
        let several = self.predicted().count() > 1;
        let unit = move |n: usize| if several { self.scaling.deviations[n % channels] } else { 1.0 };
        let truth = window.truth(&self.scaling).into_iter().enumerate().filter(|(_, y)| !y.is_nan());
        truth.map(move |(n, y)| (n, y, unit(n)))
    }

    fn windows(&self, parts: Split<Stretch>, config: &Config) -> Result<Data<Self>> {
        let mut hash = Sha256::new();
        let [development, held_out] = config.scored_names();
        for (part, name) in
            [(&parts.train, config.data_name()), (&parts.development, development), (&parts.held_out, held_out)]
        {
            for Stretch { series, points } in part {
                // What no model can take is found before a run is made.
                self.seen(series, 0..series.times.len(), &[]).map_err(lines::in_line(&name, series.line))?;
                hash.update(format!("{} {} {}\n", series.key, points.start, points.end));
            }
        }
        let all = |parts: &[Stretch], stride| -> Vec<Window> {
            parts.iter().flat_map(|part| part.windows(self.sizes, stride)).collect()
        };
        let development = all(&parts.development, 1);
        let count = development.len();
        let development = evenly(&development, DEVELOPMENT);
        let held_out = all(&parts.held_out, self.sizes.told);
        let mut train =
            Drawn::new(self.scaling.clone(), parts.train, self.sizes, config.training.batch_size, config.training.seed);
        train.development = count;
        Ok(Data {
            train,
            development: development
                .par_iter()
                .map(|window| window.example(&self.scaling, None))
                .collect::<Result<_>>()?,
            held_out,
            too_long: 0,
            longest: self.sizes.context + self.sizes.told,
            sha256: feed::hashes(hash, config)?,
        })
    }

    fn reading<'a>(&'a self, config: &'a Config) -> Reading<'a> {
        Reading::learned(&config.task.files, self.scaling.dates.as_ref(), false)
    }

    fn predicted(&self) -> impl Iterator<Item = usize> {
        (0..self.scaling.channels()).filter(|channel| !self.scaling.is_known(*channel))
    }

    /// The end of a series as the model gets it, and the times to predict: its own, or the next ones at the usual distance.
    fn ahead(&self, one: &Series) -> Result<(Seen, Vec<f64>)> {
        let count = one.times.len();
        let known = count.saturating_sub(self.sizes.context)..count;
        let mut ahead = one.ahead.clone();
        if ahead.is_empty() {
            let gap = usual_gap([&one.times[known.clone()]].into_iter()).unwrap_or(self.scaling.step);
            let last = one.times.last().copied().unwrap_or(0.0);
            let days_off = if gap == 86_400.0 { days_off(one) } else { Vec::new() };
            let is_off = |time: &f64| weekday(one, *time).is_some_and(|day| days_off.contains(&day));
            let next = (1..).map(|n| shown(last + gap * f64::from(n), gap)).filter(|time| !is_off(time));
            ahead = next.take(self.sizes.told).map(|time| (time, vec![f64::NAN; one.width])).collect();
            if !self.scaling.known.is_empty() {
                bail!(
                    "no row after the last known one has what is known ahead ({}); add rows with it, and without {}",
                    self.list(|channel| self.scaling.is_known(channel)),
                    self.list(|channel| !self.scaling.is_known(channel))
                );
            }
        }
        let times = ahead.iter().map(|(time, _)| *time).collect();
        Ok((self.seen(one, known, &ahead)?, times))
    }

    fn list(&self, holds: impl Fn(usize) -> bool) -> String {
        let names = self.scaling.names().into_iter().enumerate().filter(|(channel, _)| holds(*channel));
        names.map(|(_, name)| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    }

    /// A forecast to draw, for each channel that is predicted: what is known before it, and what was right, if that is known.
    fn picture_of(&self, one: &Series, times: &[f64], found: &[Quantiles], truth: &[f64]) -> Forecasts {
        let width = self.scaling.channels();
        let names = self.scaling.names();
        let from = one.times.len().saturating_sub(self.sizes.context.min(4 * times.len().max(8)));
        let draw = |channel: usize| {
            let history = (from..one.times.len()).map(|n| (one.times[n], one.values[n * width + channel]));
            let of =
                |q: usize| times.iter().enumerate().map(|(n, time)| (*time, found[n * width + channel][q])).collect();
            let truth =
                times.iter().enumerate().filter_map(|(n, time)| Some((*time, *truth.get(n * width + channel)?)));
            let name = names[channel].clone();
            Drawing {
                title: one.id.as_ref().map_or_else(|| name.clone(), |id| format!("{id}: {name}")),
                history: history.collect(),
                quantiles: std::array::from_fn(of),
                truth: truth.collect(),
                dates: one.dates.clone().map(|dates| Arc::new(move |time| dates.text(time)) as Written),
            }
        };
        Forecasts(self.predicted().map(draw).collect())
    }

    /// Some points of any series as the model gets them.
    fn seen(&self, one: &Series, known: Range<usize>, ahead: &[Point]) -> Result<Seen> {
        self.scaling.check(one)?;
        Seen::of(&self.scaling, one, known, ahead, None)
    }

    /// What the model gives at the points that are to be told, `[points, outputs]`; `width` points for each window, if given, the last one again
    /// where there are fewer.
    fn rows<'a>(
        &self,
        model: &SeriesModel,
        batch: impl Iterator<Item = &'a Seen> + Clone,
        width: Option<usize>,
        device: &Device,
    ) -> Result<Tensor<2>> {
        let (values, times, lengths) = padded(batch.clone().map(|seen| &seen.points), inputs(&self.scaling), device);
        let found = model.at_points(values, times, &lengths)?;
        let [count, longest, outputs] = found.dims();
        let places = batch.zip(&lengths).enumerate().flat_map(|(n, (seen, length))| {
            let (first, end) = (n * longest + length - seen.told, n * longest + length);
            (first..first + width.unwrap_or(seen.told)).map(move |place| place.min(end - 1) as i32)
        });
        let places: Vec<i32> = places.collect();
        let places = Tensor::<1, Int>::from_data(TensorData::from(places.as_slice()), device);
        Ok(found.reshape([count * longest, outputs]).select(0, places))
    }

    /// What the model gives for the points to be told of each window.
    fn numbers(&self, model: &SeriesModel, seen: &[&Seen], how: &Answering<'_>) -> Result<Vec<Vec<f32>>> {
        let most = seen.iter().map(|seen| seen.told).max().unwrap_or(0);
        let width = most * self.outputs();
        labels::outputs(
            seen,
            |seen| seen.points.1.len(),
            width,
            how,
            |batch| {
                let rows = self.rows(model, batch.iter().copied().copied(), Some(most), &Device::flex())?;
                Ok(rows.reshape([batch.len(), width]))
            },
        )
    }

    /// What is told of every value of each window, point after point, in the unit of its series.
    fn quantiles(&self, model: &SeriesModel, seen: &[&Seen], how: &Answering<'_>) -> Result<Vec<Vec<Quantiles>>> {
        let of = |seen: &Seen, row: &[f32]| {
            let values = row.chunks(QUANTILES.len()).take(seen.told * self.scaling.channels()).enumerate();
            values.map(|(n, told)| in_order(told).map(|number| seen.value(n, number))).collect()
        };
        Ok(seen.iter().zip(&self.numbers(model, seen, how)?).map(|(seen, row)| of(seen, row)).collect())
    }
}
