//! Forecasts by exponential smoothing with a season and a damped trend (Holt 1957, Winters 1960, Gardner and McKenzie 1985) or by a regression
//! on earlier values, and which form does best on the series to learn from.

use std::collections::HashMap;
use std::f64::consts::TAU;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::ridge::inverted;
use crate::tasks::labels::moments;

/// How a channel is forecast, chosen on the series to learn from, and how large the errors are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Smoothing {
    pub way: Way,
    /// Errors `h` points ahead are `growth[0]·h^growth[1]` times as large as the deviation of fitted values.
    growth: [f64; 2],
    /// Mean errors: as a part of the largest value seen, or of 1 for logarithms, and by themselves; 0 in earlier runs.
    #[serde(default)]
    usual: [f64; 2],
    /// Quantiles of errors, divided by what they usually are that far ahead.
    pub quantiles: Vec<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Way {
    pub form: Form,
    /// Points after which values repeat; 1 for none.
    pub season: usize,
    /// Whether logarithms are forecast, where variation grows with the level.
    pub log: bool,
    /// Whether usual errors are at least a hundredth of the range of values; not in earlier runs.
    #[serde(default)]
    pub bounded: bool,
    #[serde(default)]
    pub known: Effect,
    /// Points of four years where waves of the year are taken off, 0 elsewhere.
    #[serde(default)]
    pub four_years: usize,
}

/// What values that are known ahead, in columns beside, are taken to do: nothing, or something by their number, or by its square too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    #[default]
    None,
    Linear,
    Squared,
}

/// A channel to choose a way on: its values, columns that are known ahead, each as long, and the first place that may be told.
pub struct Channel {
    pub values: Vec<f64>,
    pub known: Vec<Vec<f64>>,
    pub first: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// The last season again, or the last value.
    Repeated,
    /// A level that follows the values, a trend that fades, a season.
    Damped,
    /// The mean of forecasts without a trend, with one, and with one that fades.
    Mean,
    /// A regression on the values before, and on those a season before; where there are too few, as `Damped`.
    Regression,
    /// The mean of that and of `Damped`.
    Combined,
}

/// The middle of what is predicted of a value, and the size of usual errors, both of logarithms where `log`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct End {
    pub centre: f64,
    pub unit: f64,
    pub log: bool,
    /// Whether no value is below 0.
    pub floor: bool,
}

impl End {
    /// A value in this measure.
    pub fn measured(&self, value: f64) -> f64 {
        let value = match self.log {
            // A value that has no logarithm is far below all that have; a missing one stays missing, which `max` would not leave it.
            true if !value.is_nan() => value.max(f64::MIN_POSITIVE).ln(),
            _ => value,
        };
        (value - self.centre) / self.unit
    }

    /// The value of a number in this measure.
    pub fn value(&self, number: f64) -> f64 {
        let value = self.centre + self.unit * number;
        match self.log {
            true => value.exp(),
            false if self.floor => value.max(0.0),
            false => value,
        }
    }
}

/// Points that are learned from at most, in seasons and in all.
const SEASONS: usize = 12;
const POINTS: usize = 240;

/// Windows on which forms are compared, and errors measured.
const COMPARED: usize = 48;
const MEASURED: usize = 192;

const LONGEST: usize = 400;

/// Values from which it is not known how far the next may be.
const FEW: usize = 4;

/// What a way loses in all columns of a table counts so many times what it loses in one. There the logarithm of a column's loss counts up to so much,
/// and errors count from so much of a usual step on: else a column that hardly changes would decide for all.
const POOLED: f64 = 2.0;
const MOST_LOSS: f64 = 0.7;
const LEAST_ERROR: f64 = 1e-2;

/// Smaller errors are of rounding.
const EXACT: f64 = 1e-10;

/// What a regression takes: neighbours, lengths of means of values, points to learn from at most, and how many of them at least for each weight.
const NEIGHBOURS: usize = 12;
const MEANS: [usize; 4] = [16, 32, 64, 128];
const REGRESSED: usize = 4096;
const PER_WEIGHT: usize = 10;

/// Waves of a year: the year itself, its half, its third, its quarter.
const WAVES: usize = 4;

/// Its penalty, by the mean square of what it takes.
const PENALTY: f64 = 1e-3;

/// What smoothing found: the mean square of its errors one point ahead, and where it ended.
struct Fitted {
    square: f64,
    level: f64,
    slope: f64,
    damping: f64,
    season: Vec<f64>,
    count: usize,
}

/// Smooths with `[α, β, γ, φ]`: shares of an error that change level, trend and season, and what is left of a trend a point later.
fn smooth(values: &[f64], season: usize, trend: bool, [alpha, beta, gamma, damping]: [f64; 4]) -> Fitted {
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
    let (mut level, mut slope, mut seasonal) = (values[0], 0.0, vec![0.0; season]);
    if season > 1 {
        let [first, second] = [mean(&values[..season]), mean(&values[season..2 * season])];
        (level, slope) = (first, (second - first) / season as f64);
        // Of each place in a season what its values have beyond the line through both means.
        for (n, place) in seasonal.iter_mut().enumerate() {
            let line = |at: usize| first + slope * (at as f64 - (season as f64 - 1.0) / 2.0);
            *place = (values[n] - line(n) + values[n + season] - line(n + season)) / 2.0;
        }
        level -= slope * (season as f64 + 1.0) / 2.0;
    } else if values.len() > 1 {
        let near = (values.len() - 1).min(4);
        slope = (values[near] - values[0]) / near as f64;
        level -= slope;
    }
    if !trend {
        (level, slope) = (level + slope, 0.0);
    }
    let mut sum = 0.0;
    for (n, value) in values.iter().enumerate() {
        let before = level + damping * slope;
        let error = value - before - seasonal[n % season];
        level = before + alpha * error;
        slope = damping * slope + if trend { alpha * beta * error } else { 0.0 };
        seasonal[n % season] += gamma * (1.0 - alpha) * error;
        sum += error * error;
    }
    Fitted { square: sum / values.len() as f64, level, slope, damping, season: seasonal, count: values.len() }
}

impl Fitted {
    fn ahead(&self, ahead: usize) -> f64 {
        let fading: f64 = if self.damping < 1.0 {
            self.damping * (1.0 - self.damping.powi(ahead as i32)) / (1.0 - self.damping)
        } else {
            ahead as f64
        };
        self.level + self.slope * fading + self.season[(self.count + ahead - 1) % self.season.len()]
    }
}

/// Smooths with the shares that leave the least errors.
fn fitted(values: &[f64], season: usize, trend: bool, damped: bool) -> Fitted {
    let share = |x: f64, low: f64, high: f64| low + (high - low) / (1.0 + (-x).exp());
    let shares = |at: &[f64; 4]| {
        let damping = if damped { share(at[3], 0.8, 0.98) } else { 1.0 };
        let seasonal = if season > 1 { share(at[2], 0.0, 1.0) } else { 0.0 };
        [share(at[0], 1e-3, 0.999), share(at[1], 0.0, 1.0), seasonal, damping]
    };
    let error = |at: &[f64; 4]| smooth(values, season, trend, shares(at)).square;
    smooth(values, season, trend, shares(&least(error, [-0.5, -2.0, -2.0, 0.5])))
}

/// Forecasts of the next `far` values, each from values before it and forecasts of them, and the mean square of errors one point ahead. None
/// where values are too few.
fn regressed(values: &[f64], season: usize, far: usize) -> Option<(Vec<f64>, f64)> {
    let count = values.len();
    // Sums of what is left lose no digits to the level.
    let level = values.iter().sum::<f64>() / count as f64;
    let values: Vec<f64> = values.iter().map(|value| value - level).collect();
    // A season of weeks has days.
    let seasons =
        [season, if season.is_multiple_of(7) { season / 7 } else { 1 }].into_iter().filter(|season| *season > 1);
    let around = seasons.flat_map(|season| [season, 2 * season]).flat_map(|lag| lag - 1..=lag + 1);
    let mut lags: Vec<usize> = (1..=NEIGHBOURS.min(count / 6)).chain(around.filter(|lag| *lag <= count / 3)).collect();
    lags.sort_unstable();
    lags.dedup();
    let lengths = MEANS.into_iter().filter(|length| *length <= count / 3);
    // Values `from..to` before the one to predict, of which the mean is taken.
    let taken: Vec<(usize, usize)> =
        lags.into_iter().map(|lag| (lag, 1)).chain(lengths.map(|length| (length, length))).collect();
    let first = taken.iter().map(|(from, _)| *from).max()?;
    let rows = count - first;
    if rows < PER_WEIGHT * taken.len() {
        return None;
    }
    let mut sums = vec![0.0];
    let add = |sums: &mut Vec<f64>, value: f64| sums.push(sums[sums.len() - 1] + value);
    values.iter().for_each(|value| add(&mut sums, *value));
    let mean = |sums: &[f64], at: usize, (from, length): (usize, usize)| {
        (sums[at - from + length] - sums[at - from]) / length as f64
    };
    let centred = |of: &dyn Fn(usize) -> f64| -> (f64, Vec<f64>) {
        let all: Vec<f64> = (first..count).map(of).collect();
        let centre = all.iter().sum::<f64>() / rows as f64;
        (centre, all.into_iter().map(|value| value - centre).collect())
    };
    let (centres, columns): (Vec<f64>, Vec<Vec<f64>>) =
        taken.iter().map(|&one| centred(&|at| mean(&sums, at, one))).unzip();
    let (centre, wanted) = centred(&|at| values[at]);
    let weights = weights(&columns, &wanted);
    let error = |row: usize| {
        wanted[row] - columns.iter().zip(&weights).map(|(column, weight)| column[row] * weight).sum::<f64>()
    };
    let square = (0..rows).map(|row| error(row).powi(2)).sum::<f64>() / rows as f64;
    // Forecasts of forecasts may grow without end; none goes beyond what was seen by more than the width of that.
    let (low, high) = range(&values);
    let next = |_| {
        let told = taken
            .iter()
            .zip(&centres)
            .zip(&weights)
            .map(|((one, centre), weight)| (mean(&sums, sums.len() - 1, *one) - centre) * weight);
        let value = (centre + told.sum::<f64>()).clamp(2.0 * low - high, 2.0 * high - low);
        add(&mut sums, value);
        level + value
    };
    Some(((0..far).map(next).collect(), square))
}

/// Weights of columns whose sum is near to what is wanted (ridge regression, Hoerl and Kennard 1970).
fn weights(columns: &[Vec<f64>], wanted: &[f64]) -> Vec<f64> {
    let products = columns.iter().enumerate().map(|(n, a)| columns[..=n].iter().map(|b| product(a, b)).collect());
    let (mut lower, count): (Vec<Vec<f64>>, _) = (products.collect(), columns.len());
    let penalty = PENALTY * (0..count).map(|n| lower[n][n]).sum::<f64>() / count as f64;
    (0..count).for_each(|n| lower[n][n] += penalty.max(1e-300));
    let (inverse, right) =
        (inverted(lower), columns.iter().map(|column| product(column, wanted)).collect::<Vec<f64>>());
    (0..count).map(|n| (0..count).map(|m| inverse[n.max(m)][n.min(m)] * right[m]).sum()).collect()
}

/// What known columns, and waves, add to values and to those ahead. Found from changes over a season, in which neither level, trend nor season
/// count; None where values are too few.
fn effect(values: &[f64], known: &[&[f64]], waves: Vec<Vec<f64>>, season: usize, squared: bool) -> Option<Vec<f64>> {
    let (count, per_weight) = (values.len(), if squared { PER_WEIGHT } else { PER_WEIGHT / 2 });
    let mut terms = waves;
    for column in known.iter().map(|column| filled(column)).filter(|column| count > season && !column.is_empty()) {
        let ((low, high), (centre, unit)) = (range(&column[..count]), moments(&column[..count]));
        if high - low <= 1e-12 * centre.abs() {
            continue;
        }
        let column: Vec<f64> = column.iter().map(|value| (value - centre) / unit).collect();
        let [low, high] = [low, high].map(|value| (value - centre) / unit);
        let square = |value: &f64| {
            // Beyond what was seen it goes on straight.
            let near = value.clamp(low, high);
            near * (2.0 * value - near)
        };
        let two = column[..count].iter().all(|value| [low, high].contains(value));
        let squares = (squared && !two).then(|| column.iter().map(square).collect());
        terms.extend([column].into_iter().chain(squares));
    }
    if terms.is_empty() || count < season + per_weight * terms.len() {
        return None;
    }
    // Less their mean, which is the trend's.
    let changes = |of: &[f64]| -> Vec<f64> {
        let all: Vec<f64> = (season..count).map(|n| of[n] - of[n - season]).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        all.into_iter().map(|change| change - mean).collect()
    };
    let weights = weights(&terms.iter().map(|term| changes(term)).collect::<Vec<_>>(), &changes(values));
    let sum = |n: usize| terms.iter().zip(&weights).map(|(term, weight)| term[n] * weight).sum();
    Some((0..terms[0].len()).map(sum).collect())
}

/// By eight sums side by side: a single one waits for each addition.
fn product(a: &[f64], b: &[f64]) -> f64 {
    let (mut a, mut b, mut sums) = (a.chunks_exact(8), b.chunks_exact(8), [0.0; 8]);
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        (0..8).for_each(|n| sums[n] += a[n] * b[n]);
    }
    sums.iter().sum::<f64>() + a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum::<f64>()
}

fn range(values: &[f64]) -> (f64, f64) {
    let wider = |(low, high): (f64, f64), value: &f64| (low.min(*value), high.max(*value));
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), wider)
}

/// Where a function is least, by moving simplices (Nelder and Mead 1965).
fn least(error: impl Fn(&[f64; 4]) -> f64, start: [f64; 4]) -> [f64; 4] {
    let mut all: Vec<([f64; 4], f64)> = (0..5)
        .map(|n| {
            let mut at = start;
            if n < 4 {
                at[n] += 1.5;
            }
            (at, error(&at))
        })
        .collect();
    for _ in 0..90 {
        all.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (best, worst) = (all[0], all[4]);
        if worst.1 - best.1 <= 1e-6 * best.1.abs() {
            break;
        }
        let centre: [f64; 4] = std::array::from_fn(|k| all[..4].iter().map(|(at, _)| at[k]).sum::<f64>() / 4.0);
        // Bounded, so that an exponential of it has a value.
        let beyond = |by: f64| -> ([f64; 4], f64) {
            let at = std::array::from_fn(|k| (centre[k] + by * (centre[k] - worst.0[k])).clamp(-8.0, 8.0));
            (at, error(&at))
        };
        let mirrored = beyond(1.0);
        all[4] = if mirrored.1 < best.1 {
            let further = beyond(2.0);
            if further.1 < mirrored.1 { further } else { mirrored }
        } else if mirrored.1 < all[3].1 {
            mirrored
        } else {
            let nearer = beyond(if mirrored.1 < worst.1 { 0.5 } else { -0.5 });
            if nearer.1 < worst.1.min(mirrored.1) {
                nearer
            } else {
                for one in &mut all[1..] {
                    one.0 = std::array::from_fn(|k| (one.0[k] + best.0[k]) / 2.0);
                    one.1 = error(&one.0);
                }
                continue;
            }
        };
    }
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    all[0].0
}

impl Way {
    /// Forecasts after these values, so many points ahead of the last, and the deviation of what was fitted. Columns that are known have the places
    /// of values, and then those ahead. Missing values lie on a line between their neighbours; of values that have no logarithm none is taken, of
    /// fewer than two seasons no season is found.
    fn ends(self, values: &[f64], known: &[&[f64]], ahead: &[usize]) -> Vec<End> {
        let mut values = filled(values);
        let log = self.log && values.iter().all(|value| *value > 0.0);
        let season = if values.len() >= 2 * self.season { self.season } else { 1 };
        // Of a year that was seen once nobody knows what of it comes again.
        let yearly = self.four_years > 0 && 2 * values.len() >= self.four_years;
        let most = REGRESSED.max(SEASONS * season).max(if yearly { 2 * self.four_years } else { 0 });
        let from = values.len().saturating_sub(most);
        values.drain(..from);
        if log {
            values.iter_mut().for_each(|value| *value = value.ln());
        }
        let known: Vec<&[f64]> = match self.known {
            Effect::None => Vec::new(),
            _ => known.iter().map(|column| &column[from..]).collect(),
        };
        let places = || (0..values.len()).chain(ahead.iter().map(|ahead| values.len() + ahead - 1));
        let wave = |n: usize| {
            let (times, shift) = ((n / 2 + 1) as f64 * 4.0 / self.four_years as f64, (n % 2) as f64 / 4.0);
            places().map(|place| (TAU * (times * place as f64 + shift)).sin()).collect()
        };
        let waves: Vec<Vec<f64>> = (0..if yearly { 2 * WAVES } else { 0 }).map(wave).collect();
        let effect = effect(&values, &known, waves, season, self.known == Effect::Squared);
        if let Some(effect) = &effect {
            values.iter_mut().zip(effect).for_each(|(value, effect)| *value -= effect);
        }
        let latest = |most: usize| &values[values.len().saturating_sub(most)..];
        let smoothed = latest(POINTS.max(SEASONS * season));
        let Some(last) = smoothed.last() else {
            return vec![End { centre: 0.0, unit: 1.0, log: false, floor: false }; ahead.len()];
        };
        let fit = |&(trend, damped): &(bool, bool)| {
            let found = fitted(smoothed, season, trend, damped);
            (ahead.iter().map(|ahead| found.ahead(*ahead)).collect(), found.square)
        };
        let again = || {
            let next = ahead.iter().map(|ahead| smoothed[smoothed.len() - season + (ahead - 1) % season]);
            let squares: Vec<f64> = smoothed.windows(season + 1).map(|part| (part[season] - part[0]).powi(2)).collect();
            (next.collect(), squares.iter().sum::<f64>() / squares.len().max(1) as f64)
        };
        let regression = || {
            let far = ahead.iter().copied().max().unwrap_or(0);
            let (next, square) = regressed(latest(REGRESSED), season, far)?;
            Some((ahead.iter().map(|ahead| next[ahead - 1]).collect(), square))
        };
        const DAMPED: (bool, bool) = (true, true);
        let all: Vec<(Vec<f64>, f64)> = match self.form {
            Form::Repeated => vec![again()],
            Form::Damped => vec![fit(&DAMPED)],
            Form::Mean => [(false, false), (true, false), DAMPED].iter().map(fit).collect(),
            Form::Regression => vec![regression().unwrap_or_else(|| fit(&DAMPED))],
            Form::Combined => regression().into_iter().chain([fit(&DAMPED)]).collect(),
        };
        let added = |n: usize| effect.as_ref().map_or(0.0, |effect| effect[values.len() + n]);
        let centres =
            (0..ahead.len()).map(|n| all.iter().map(|(next, _)| next[n]).sum::<f64>() / all.len() as f64 + added(n));
        let square = all.iter().map(|(_, square)| square).sum::<f64>() / all.len() as f64;
        // Where all that was seen is foretold, what comes need not be: one error of many units would count as many others.
        let (low, high) = range(smoothed);
        let least = if self.bounded { 1e-2 * (high - low) } else { 0.0 };
        let unit = square.sqrt().max(least).max(1e-9 * last.abs()).max(1e-12);
        centres.map(|centre| End { centre, unit, log, floor: false }).collect()
    }

    /// What is predicted after so many of a channel's values.
    fn after(self, channel: &Channel, cut: usize, ahead: &[usize]) -> Vec<End> {
        let known: Vec<&[f64]> = channel.known.iter().map(|column| &column[..cut + ahead.len()]).collect();
        self.ends(&channel.values[..cut], &known, ahead)
    }

    /// All that are tried on a column.
    fn tried(channels: &[Channel], seasons: &[usize], four_years: usize) -> Vec<Self> {
        let mut seasons: Vec<usize> = seasons.iter().copied().chain(found_seasons(channels)).chain([1]).collect();
        seasons.sort_unstable();
        seasons.dedup();
        let positive = channels.iter().all(|one| one.values.iter().all(|value| value.is_nan() || *value > 0.0));
        let logs: &[bool] = if positive { &[false, true] } else { &[false] };
        let effects: &[Effect] = match channels.iter().all(|one| one.known.is_empty()) {
            true => &[Effect::None],
            false => &[Effect::None, Effect::Linear, Effect::Squared],
        };
        let forms = [Form::Repeated, Form::Damped, Form::Mean, Form::Regression, Form::Combined];
        let mut ways: Vec<Self> = Vec::new();
        for &season in &seasons {
            // A season that is about a year leaves no wave of it.
            let years: &[usize] = if 8 * season < four_years { &[0, four_years] } else { &[0] };
            for (form, &four_years) in forms.into_iter().flat_map(|form| years.iter().map(move |years| (form, years))) {
                for (&log, &known) in logs.iter().flat_map(|log| effects.iter().map(move |known| (log, known))) {
                    ways.push(Self { form, season, log, bounded: true, known, four_years });
                }
            }
        }
        ways.retain(|way| way.form != Form::Repeated || !way.log);
        ways
    }

    pub fn words(self) -> String {
        let known = if self.known == Effect::None { "" } else { ", with the effect of what is known ahead" };
        let effect = if self.four_years == 0 { known.into() } else { format!(", with waves of the year{known}") };
        let season = match (self.season, self.form) {
            (1, Form::Repeated) => return format!("the last value{effect}"),
            (1, _) => String::new(),
            (season, Form::Repeated) => return format!("the last {season} points repeated{effect}"),
            (season, _) => format!(" with a season of {season} points"),
        };
        let log = if self.log { ", of logarithms" } else { "" };
        let form = match self.form {
            Form::Regression => "a regression on earlier points",
            Form::Combined => "the mean of a regression on earlier points and a damped trend",
            Form::Mean => "the mean of three trends",
            _ => "a damped trend",
        };
        format!("{form}{season}{log}{effect}")
    }
}

impl Smoothing {
    /// One way to forecast, whose errors are not known yet.
    pub fn new(form: Form, season: usize, log: bool) -> Self {
        Self::of(Way { form, season, log, bounded: true, known: Effect::None, four_years: 0 })
    }

    fn of(way: Way) -> Self {
        Self { way, growth: [1.0, 0.0], usual: [0.0; 2], quantiles: Vec::new() }
    }

    /// What is predicted after these values, so many points ahead of the last.
    pub fn ends(&self, values: &[f64], known: &[&[f64]], ahead: &[usize]) -> Vec<End> {
        self.grown(values, &self.way.ends(values, known, ahead), ahead)
    }

    /// As far ahead as they are, after these values.
    fn grown(&self, values: &[f64], ends: &[End], ahead: &[usize]) -> Vec<End> {
        let mut seen = values.iter().filter(|value| !value.is_nan());
        let (first, few, level) = (seen.next(), seen.clone().nth(FEW - 1).is_none(), level(values));
        // Of few values, or of one that comes again and again, nobody knows how far the next is from what is foretold.
        let share = if few || seen.all(|value| Some(value) == first) { 1.0 } else { 1e-2 };
        let [part, alone] = self.usual;
        let one = |(end, far): (&End, &usize)| {
            let usual = if end.log {
                part
            } else if level > 0.0 {
                part * level
            } else {
                alone
            };
            End { unit: end.unit.max(share * usual) * self.growth[0] * (*far as f64).powf(self.growth[1]), ..*end }
        };
        ends.iter().zip(ahead).map(one).collect()
    }

    /// For each column of a table, which is a channel of every series, the way that does best in telling the next `told` values from those before,
    /// over windows of it, and over those of all columns. Quantiles are of these shares. `seasons` are tried beside what the
    /// series show, and waves of the year where it is known how many points four have.
    pub fn choose(
        columns: &[Vec<Channel>],
        told: usize,
        seasons: &[usize],
        four_years: usize,
        shares: &[f32],
    ) -> Vec<Self> {
        let ahead: Vec<usize> = (1..=told).collect();
        let ways: Vec<Vec<Way>> = columns.iter().map(|channels| Way::tried(channels, seasons, four_years)).collect();
        // The best on a few windows are compared on more.
        let first: Vec<Vec<(Way, f64)>> =
            columns.iter().zip(ways).map(|(channels, ways)| errors(ways, channels, &ahead, COMPARED / 4)).collect();
        let count = columns.iter().filter(|channels| !channels.is_empty()).count();
        let tables: Vec<HashMap<Way, f64>> =
            first.iter().map(|errors| losses(errors, LEAST_ERROR).into_iter().collect()).collect();
        let in_all = |way: Way| -> f64 {
            // Where a season was not found, or values have no logarithms, it would be the way without.
            let alike = [(way.season, way.log), (way.season, false), (1, way.log), (1, false)];
            let alike = alike.map(|(season, log)| Way { season, log, ..way });
            let loss =
                |tried: &HashMap<Way, f64>| alike.iter().find_map(|way| tried.get(way)).map(|loss| loss.min(MOST_LOSS));
            POOLED * tables.iter().filter_map(loss).sum::<f64>() / count as f64
        };
        let mut pooled: HashMap<Way, f64> = HashMap::new();
        if count > 1 {
            for (way, _) in first.iter().flatten() {
                pooled.entry(*way).or_insert_with(|| in_all(*way));
            }
        }
        let of = |(column, channels): (usize, &Vec<Channel>)| {
            // What repeats after 4 points repeats after 8 too, by chance a little better, and with more to learn.
            let again = |season: usize| {
                let shorter =
                    |(way, _): &(Way, f64)| (2..season).contains(&way.season) && season.is_multiple_of(way.season);
                if first[column].iter().any(shorter) { 0.1 } else { 0.0 }
            };
            let sort = |errors: &[(Way, f64)]| -> Vec<Way> {
                let mut losses = losses(errors, EXACT);
                losses.iter_mut().for_each(|(way, loss)| *loss += pooled.get(way).unwrap_or(&0.0) + again(way.season));
                losses.sort_by(|a, b| a.1.total_cmp(&b.1));
                losses.into_iter().map(|(way, _)| way).collect()
            };
            let mut best = sort(&first[column]);
            best.truncate(8);
            let best = sort(&errors(best, channels, &ahead, COMPARED));
            Self::of(best[0]).measure(channels, &windows(channels, told, MEASURED), &ahead, shares)
        };
        columns.iter().enumerate().map(of).collect()
    }

    fn measure(mut self, channels: &[Channel], cuts: &[(usize, usize)], ahead: &[usize], shares: &[f32]) -> Self {
        let told = |&(n, cut): &(usize, usize)| {
            let (values, next) = channels[n].values.split_at(cut);
            (values, next, self.way.after(&channels[n], cut, ahead))
        };
        let told: Vec<(&[f64], &[f64], Vec<End>)> = cuts.par_iter().map(told).collect();
        let (mut sums, mut count) = ([0.0; 3], 0.0);
        for (values, next, ends) in &told {
            let level = level(values);
            for (end, value) in ends.iter().zip(*next).filter(|(end, value)| end.log == self.way.log && !value.is_nan())
            {
                sums[0] += end.unit * end.measured(*value).abs();
                sums[1] += if end.log { 1.0 } else { level };
                sums[2] += (end.value(0.0) - value).abs();
                count += 1.0;
            }
        }
        let of = |sum: f64, whole: f64| if whole > 0.0 { sum / whole } else { 0.0 };
        self.usual = [of(sums[0], sums[1]), of(sums[2], count)];
        let errors = |way: &Self| -> Vec<Vec<f64>> {
            let one = |(values, next, ends): &(&[f64], &[f64], Vec<End>)| {
                let ends = way.grown(values, ends, ahead);
                ends.iter().zip(*next).map(|(end, value)| end.measured(*value).abs()).collect()
            };
            told.iter().map(one).collect()
        };
        let found = errors(&self);
        // A line through the logarithms of mean errors.
        let sizes = (0..ahead.len()).filter_map(|n| {
            let known: Vec<f64> = found.iter().map(|row| row[n]).filter(|error| error.is_finite()).collect();
            let mean = known.iter().sum::<f64>() / known.len() as f64;
            (mean > 0.0).then(|| ((ahead[n] as f64).ln(), mean.ln()))
        });
        let sizes: Vec<(f64, f64)> = sizes.collect();
        let count = sizes.len() as f64;
        if sizes.is_empty() {
            self.quantiles = vec![0.0; shares.len()];
            return self;
        }
        let (x, y) = sizes.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x / count, b + y / count));
        let (above, below) =
            sizes.iter().fold((0.0, 0.0), |(a, b), (u, v)| (a + (u - x) * (v - y), b + (u - x).powi(2)));
        let power = if below > 0.0 { (above / below).clamp(0.0, 1.5) } else { 0.0 };
        self.growth = [(y - power * x).exp(), power];
        let mut all: Vec<f64> = errors(&self).into_iter().flatten().filter(|error| error.is_finite()).collect();
        all.sort_unstable_by(f64::total_cmp);
        // On both sides of the forecast alike: to which side the errors of a few windows fell says little of the next.
        let quantile = |share: &f32| {
            let beyond = 2.0 * (f64::from(*share) - 0.5);
            let at = beyond.abs() * (all.len() - 1) as f64;
            let (low, part) = (at.floor() as usize, at.fract());
            beyond.signum() * (all[low] + part * (all[(low + 1).min(all.len() - 1)] - all[low]))
        };
        self.quantiles = shares.iter().map(|share| if *share == 0.5 { 0.0 } else { quantile(share) }).collect();
        self
    }
}

/// Windows of a column, `most` of them: the series of each, and how many of its values are known.
fn windows(channels: &[Channel], told: usize, most: usize) -> Vec<(usize, usize)> {
    let cuts = |(n, one): (usize, &Channel)| {
        (one.first.max(1)..(one.values.len() + 1).saturating_sub(told)).map(move |cut| (n, cut))
    };
    let all: Vec<(usize, usize)> = channels.iter().enumerate().flat_map(cuts).collect();
    crate::tasks::split::evenly(&all, most)
}

/// The mean error of each way over so many windows of a column, in usual steps of each window's past.
fn errors(ways: Vec<Way>, channels: &[Channel], ahead: &[usize], most: usize) -> Vec<(Way, f64)> {
    let cuts = windows(channels, ahead.len(), most);
    let step = |parts: &[&[f64]]| -> Option<f64> {
        let squares =
            |part: &&[f64]| filled(part).windows(2).map(|pair| (pair[1] - pair[0]).powi(2)).collect::<Vec<_>>();
        let squares: Vec<f64> = parts.iter().flat_map(squares).collect();
        Some((squares.iter().sum::<f64>() / squares.len() as f64).sqrt()).filter(|step| *step > 0.0)
    };
    // Of the whole column where a past has none.
    let usual = step(&channels.iter().map(|one| &one.values[..]).collect::<Vec<_>>()).unwrap_or(1.0);
    let scale = |(n, cut): (usize, usize)| (n, cut, step(&[&channels[n].values[..cut]]).unwrap_or(usual));
    let cuts: Vec<(usize, usize, f64)> = cuts.into_iter().map(scale).collect();
    let error = |way: Way| -> (Way, f64) {
        let one = |&(n, cut, scale): &(usize, usize, f64)| {
            let ends = way.after(&channels[n], cut, ahead);
            let errors = ends.iter().zip(&channels[n].values[cut..]).map(|(end, value)| (end.value(0.0) - value).abs());
            let known: Vec<f64> = errors.filter(|error| !error.is_nan()).collect();
            let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
            // One wild window decides no more than others.
            (mean / scale).min(1e3)
        };
        let all: Vec<f64> = cuts.par_iter().map(one).collect();
        (way, all.iter().sum::<f64>() / all.len().max(1) as f64)
    };
    ways.into_iter().map(error).collect()
}

/// By how much errors are larger than the least, as logarithms; those up to `exact` are alike.
fn losses(errors: &[(Way, f64)], exact: f64) -> Vec<(Way, f64)> {
    let log = |error: f64| error.max(exact).ln();
    let least = errors.iter().map(|(_, error)| log(*error)).fold(f64::INFINITY, f64::min);
    errors.iter().map(|(way, error)| (*way, log(*error) - least)).collect()
}

/// How far from 0 values go.
fn level(values: &[f64]) -> f64 {
    values.iter().filter(|value| !value.is_nan()).fold(0.0, |most, value| value.abs().max(most))
}

/// Values, with a line over those that are missing.
fn filled(values: &[f64]) -> Vec<f64> {
    let mut all = values.to_vec();
    let mut known = values.iter().enumerate().filter(|(_, value)| !value.is_nan()).map(|(n, _)| n).peekable();
    let Some(&first) = known.peek() else { return Vec::new() };
    all[..first].fill(values[first]);
    while let Some(at) = known.next() {
        let next = known.peek().copied();
        let end = next.unwrap_or(values.len());
        let step = next.map_or(0.0, |next| (values[next] - values[at]) / (next - at) as f64);
        (1..).zip(&mut all[at + 1..end]).for_each(|(n, value)| *value = values[at] + f64::from(n) * step);
    }
    all
}

/// Distances after which the changes of series are most alike, up to two.
fn found_seasons(channels: &[Channel]) -> Vec<usize> {
    let longest = channels.iter().map(|one| one.values.len()).max().unwrap_or(0);
    let most = (longest / 3).min(LONGEST);
    // The means of correlations, over a few series.
    let mut sums = vec![0.0; most + 2];
    for Channel { values, .. } in crate::tasks::split::evenly(&channels.iter().collect::<Vec<_>>(), 16) {
        let values = filled(&values[values.len().saturating_sub(4 * LONGEST)..]);
        let changes: Vec<f64> = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = changes.iter().sum::<f64>() / changes.len().max(1) as f64;
        let changes: Vec<f64> = changes.iter().map(|change| change - mean).collect();
        let square: f64 = changes.iter().map(|change| change * change).sum();
        for (lag, sum) in sums.iter_mut().enumerate().filter(|(lag, _)| *lag < changes.len()) {
            *sum += changes.iter().zip(&changes[lag..]).map(|(a, b)| a * b).sum::<f64>() / square.max(1e-300);
        }
    }
    let count = channels.len().min(16) as f64;
    let peak = |lag: &usize| sums[*lag] > 0.25 * count && sums[*lag] >= sums[lag - 1] && sums[*lag] >= sums[lag + 1];
    let mut found: Vec<usize> = (2..=most).filter(peak).collect();
    found.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
    found.truncate(2);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(seed: u64) -> impl FnMut() -> f64 {
        let mut random = crate::tasks::batches::Random::new(seed, 1);
        move || (0..12).map(|_| (random.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
    }

    fn alone(values: Vec<f64>, first: usize) -> Channel {
        Channel { values, known: Vec::new(), first }
    }

    fn chosen(one: Channel, told: usize, seasons: &[usize], four_years: usize) -> Smoothing {
        Smoothing::choose(&[vec![one]], told, seasons, four_years, &[0.1, 0.25, 0.5, 0.75, 0.9]).remove(0)
    }

    #[test]
    fn smoothing_follows_its_recursion() {
        let found = smooth(&[10.0, 13.0, 14.0, 15.0, 18.0], 1, true, [0.5, 0.2, 0.0, 1.0]);
        // By hand: slope (18 − 10)/4 = 2, level 8; 10: error 0, level 10; 13: 12, error 1, level 12.5, slope 2.1; 14: 14.6, error −0.6,
        // level 14.3, slope 2.04; 15: 16.34, error −1.34, level 15.67, slope 1.906; 18: 17.576, error 0.424, level 17.788, slope 1.9484.
        assert!(
            (found.level - 17.788).abs() < 1e-12 && (found.slope - 1.9484).abs() < 1e-12,
            "{} {}",
            found.level,
            found.slope
        );
        let squares = 1.0 + 0.36 + 1.34f64.powi(2) + 0.424f64.powi(2);
        assert!((found.square - squares / 5.0).abs() < 1e-12);
        assert!((found.ahead(3) - 17.788 - 3.0 * 1.9484).abs() < 1e-12);
        let damped = smooth(&[10.0, 12.0], 1, true, [0.5, 0.2, 0.0, 0.9]);
        assert!((damped.ahead(2) - damped.level - damped.slope * (0.9 + 0.81)).abs() < 1e-12);
    }

    #[test]
    fn a_season_on_a_line_is_told_exactly() {
        let at = |n: usize| 3.0 * n as f64 + [5.0, -2.0, 0.0, -3.0][n % 4];
        let values: Vec<f64> = (0..40).map(at).collect();
        let (trend, seasonal) = (fitted(&values, 4, true, false), [40, 43, 47]);
        assert!(seasonal.iter().all(|n| (trend.ahead(n - 39) - at(*n)).abs() < 1e-6), "{:?}", trend.season);
        let again = Smoothing::new(Form::Repeated, 4, false).ends(&values, &[], &[1, 2, 6]);
        assert_eq!(again.iter().map(|end| end.centre).collect::<Vec<_>>(), [at(36), at(37), at(37)]);
        assert_eq!(again[0].unit, 12.0);
        // What always was foretold may not be: usual errors are a hundredth of the range, but in runs that were made without that.
        let before: Way = serde_json::from_str(r#"{"form": "repeated", "season": 2, "log": false}"#).unwrap();
        let unit = |way: Way| way.ends(&[0.0, 10.0, 0.0, 10.0, 0.0, 10.0], &[], &[1])[0].unit;
        assert_eq!([unit(before), unit(Way { bounded: true, ..before })], [1e-8, 0.1]);
        assert_eq!(filled(&[f64::NAN, 1.0, f64::NAN, 2.0, f64::NAN]), [1.0, 1.0, 1.5, 2.0, 2.0]);
    }

    #[test]
    fn a_regression_finds_what_values_before_and_a_season_before_tell() {
        let mut normal = normal(3);
        // Far from 0, so that sums of values lose digits if the level is not taken off; its mean is 1e6 + 50.
        let mut values = vec![0.0, 0.0];
        for n in 2..3000 {
            values.push(1.6 * values[n - 1] - 0.8 * values[n - 2] + 10.0 + normal());
        }
        values.iter_mut().for_each(|value| *value += 1e6);
        let (told, square) = regressed(&values, 1, 12).unwrap();
        assert!((square - 1.0).abs() < 0.1, "{square}");
        let [mut before, mut last] = [2998, 2999].map(|n| values[n] - 1e6);
        for told in told {
            (before, last) = (last, 1.6 * last - 0.8 * before + 10.0);
            // A quarter of how far values go from their mean.
            assert!((told - 1e6 - last).abs() < 0.9, "{told} {last}");
        }
        let found = chosen(alone(values, 1500), 6, &[7], 0);
        assert_eq!(found.way.form, Form::Regression, "{found:?}");
        // Weeks of 7 days of 6 points, of which days are alike but for the last.
        let at = |n: usize| [3.0, 9.0, 20.0, 14.0, 8.0, 4.0][n % 6] * if n / 6 % 7 == 6 { 0.5 } else { 1.0 };
        let weeks: Vec<f64> = (0..700).map(|n| at(n) + 0.1 * normal()).collect();
        let (told, _) = regressed(&weeks, 42, 84).unwrap();
        told.iter().enumerate().for_each(|(n, told)| assert!((told - at(700 + n)).abs() < 0.5, "{n}: {told}"));
        assert!(regressed(&weeks[..100], 42, 1).is_none(), "too few for its weights");
    }

    #[test]
    fn what_known_columns_do_is_told_with_the_rest() {
        let (mut draw, mut noise) = (normal(5), normal(6));
        let warmth: Vec<f64> = (0..76).map(|_| draw().clamp(-2.0, 2.0)).collect();
        let offers: Vec<f64> = (0..76).map(|n| f64::from(u8::from(n * n % 7 == 2))).collect();
        let effect_of = |n: usize| 20.0 * offers[n] + 3.0 * warmth[n] + 2.0 * warmth[n] * warmth[n];
        let rest = |n: usize| 100.0 + n as f64 + [5.0, -2.0, 0.0, -3.0][n % 4];
        let values: Vec<f64> = (0..72).map(|n| rest(n) + effect_of(n)).collect();
        let (known, far): ([&[f64]; 3], _) = ([&warmth, &[7.0; 76], &offers], [1, 2, 3, 4]);
        let way = |known| Way { known, ..Smoothing::new(Form::Damped, 4, false).way };
        let errors = |effect: Effect, known: &[&[f64]]| -> f64 {
            let ends = way(effect).ends(&values, known, &far).into_iter().zip(72..);
            ends.map(|(end, n)| (end.value(0.0) - rest(n) - effect_of(n)).abs()).fold(0.0, f64::max)
        };
        let found = [Effect::None, Effect::Linear, Effect::Squared].map(|effect| errors(effect, &known));
        assert!(found[2] < 0.3 && found[1] > 1.0 && found[0] > found[1], "{found:?}");
        // A missing number lies between those beside it; a column of them says nothing.
        let mut hole = offers.clone();
        hole[8] = f64::NAN;
        assert_eq!(errors(Effect::Squared, &[&warmth, &[f64::NAN; 76], &hole]), found[2]);
        assert!(effect(&values[..8], &[&warmth[..9]], Vec::new(), 4, false).is_none(), "too few");
        // A square goes on straight beyond what was seen, from 4 with a slope of 4.
        let line: Vec<f64> = (0..=40).map(|n| f64::from(n) / 10.0 - 2.0).chain([3.0]).collect();
        let square: Vec<f64> = line[..41].iter().map(|x| x * x).collect();
        let told = effect(&square, &[&line], Vec::new(), 1, true).unwrap();
        assert!((told[41] - told[40] - 4.0).abs() < 0.05, "{} {}", told[40], told[41]);
        let column = Channel { values: (0..72).map(|n| values[n] + noise()).collect(), known: vec![offers], first: 36 };
        let chosen = chosen(column, 4, &[], 0);
        assert!(chosen.way.known != Effect::None && chosen.way.words().ends_with("known ahead"), "{chosen:?}");
    }

    #[test]
    fn a_year_that_was_seen_twice_is_told_beside_a_week() {
        let mut normal = normal(8);
        let year =
            |n: usize| 20.0 * (n as f64 * TAU / 365.25 + 1.0).cos() + 8.0 * (n as f64 * TAU * 3.0 / 365.25).sin();
        let at = |n: usize| 100.0 + year(n) + if n % 7 < 5 { 9.0 } else { 0.0 };
        let values: Vec<f64> = (0..1300).map(|n| at(n) + normal()).collect();
        let found = chosen(alone(values.clone(), 800), 60, &[7, 365], 1461);
        assert_eq!((found.way.season, found.way.four_years), (7, 1461), "{found:?}");
        assert!(found.way.words().ends_with("a season of 7 points, with waves of the year"), "{}", found.way.words());
        // Two points ahead alone are the same as among others.
        let ahead: Vec<usize> = (1..=90).collect();
        let ends = found.ends(&values, &[], &ahead);
        ends.iter().zip(1300..).for_each(|(end, n)| assert!((end.value(0.0) - at(n)).abs() < 4.0, "{n}: {end:?}"));
        let two = found.ends(&values, &[], &[30, 90]);
        assert!((two[0].centre - ends[29].centre).abs() < 1e-9 && (two[1].centre - ends[89].centre).abs() < 1e-9);
        let without = Way { four_years: 0, ..found.way };
        assert_eq!(found.way.ends(&values[..700], &[], &[9]), without.ends(&values[..700], &[], &[9]), "one year");
    }

    #[test]
    fn a_column_follows_those_beside_it_unless_it_tells_otherwise() {
        let mut normal = normal(9);
        let mut column = |noise: f64, season: &[f64]| {
            vec![alone((0..28).map(|n| season[n % season.len()] + noise * normal()).collect(), 12)]
        };
        let quarters = [6.0, 0.0, -4.0, 2.0];
        let seasons = |columns: &[Vec<Channel>]| -> Vec<usize> {
            Smoothing::choose(columns, 4, &[4], 0, &[0.1, 0.9]).iter().map(|one| one.way.season).collect()
        };
        let mut columns = vec![column(0.5, &quarters), column(0.5, &quarters)];
        columns.push(column(0.1, &[9.0, 0.0, 3.0, -7.0, 5.0, -2.0, 4.0]));
        assert_eq!(seasons(&columns), [4, 4, 7]);
        columns.truncate(2);
        columns.extend((0..6).map(|_| column(5.0, &quarters)));
        let each: Vec<usize> = columns.chunks(1).flat_map(seasons).collect();
        assert!(each.iter().any(|season| *season != 4), "{each:?}");
        for noisy in 2..8 {
            columns.swap(2, noisy);
            assert_eq!(seasons(&columns[..3]), [4; 3], "{noisy}");
        }
    }

    #[test]
    fn a_column_that_hardly_changes_does_not_decide_for_those_beside_it() {
        let mut normal = normal(4);
        let waves: Vec<f64> =
            (0..400).map(|n| 10.0 * (n as f64 * TAU / 20.0).sin() + 0.01 * n as f64 + 0.5 * normal()).collect();
        let beside = |flag: Vec<f64>| {
            let both = [vec![alone(waves.clone(), 200)], vec![alone(flag, 200)]];
            Smoothing::choose(&both, 6, &[], 0, &[0.1, 0.9]).remove(0).way
        };
        assert_eq!(beside(vec![0.0; 400]), chosen(alone(waves.clone(), 200), 6, &[], 0).way);
        let found = beside((0..400).map(|n| f64::from(u8::from(n == 30))).collect());
        assert!(found.season == 20 && found.form != Form::Repeated, "{found:?}");
    }

    #[test]
    fn the_way_follows_the_data_and_its_quantiles_hold_their_share() {
        let mut normal = normal(1);
        let grown: Vec<f64> = (0..160)
            .map(|n| {
                (3.0 + 0.01 * n as f64 + 0.5 * (n as f64 * std::f64::consts::TAU / 12.0).sin() + 0.03 * normal()).exp()
            })
            .collect();
        let found = chosen(alone(grown.clone(), 30), 12, &[], 0);
        assert_eq!((found.way.season, found.way.log), (12, true), "{found:?}");
        let complete = found;
        // Of quarters alone 8 points would have done better than 4 on these; with weekends 14 do better than 2.
        let quarters = (0..96).map(|n| [90.0, 40.0, 10.0, 60.0][n % 4] + 3.0 * normal()).collect();
        let found = chosen(alone(quarters, 48), 8, &[], 0);
        assert_eq!(found.way.season, 4, "{found:?}");
        let halves = |n: usize| [10.0, 20.0][n % 2] + if n / 2 % 7 < 5 { 9.0 } else { 0.0 };
        let days = (0..140).map(|n| halves(n) + normal()).collect();
        let found = chosen(alone(days, 70), 14, &[], 0);
        assert_eq!(found.way.season, 14, "{found:?}");
        let mut level = 0.0;
        let walk: Vec<f64> = (0..400)
            .map(|_| {
                level += normal();
                level
            })
            .collect();
        let found = chosen(alone(walk[..200].to_vec(), 20), 5, &[], 0);
        assert!(!found.way.log && found.way.season == 1, "{found:?}");
        let mut held = 0;
        for cut in 200..390 {
            for (end, value) in found.ends(&walk[..cut], &[], &[1, 2, 3, 4, 5]).iter().zip(&walk[cut..]) {
                held += usize::from((found.quantiles[0]..=found.quantiles[4]).contains(&end.measured(*value)));
            }
        }
        assert!((665..875).contains(&held), "{held} of 950 in the interval that should hold 760");
        let mut holes = grown;
        holes[100] = f64::NAN;
        let with_holes = chosen(alone(holes, 30), 12, &[], 0);
        assert!(with_holes.way.log && with_holes.growth[0] < 1.2 * complete.growth[0], "{with_holes:?}, {complete:?}");
        let few = chosen(alone(vec![5.0; 9], 2), 3, &[], 0);
        assert!(few.ends(&[5.0; 9], &[], &[1, 3]).iter().all(|end| (end.value(0.0) - 5.0).abs() < 1e-9), "{few:?}");
        assert!(few.ends(&[f64::NAN, 7.0], &[], &[1])[0].centre.is_finite() && few.ends(&[], &[], &[1])[0].unit == 1.0);
    }

    #[test]
    fn what_tells_no_error_makes_none_large() {
        // Of one point, or of one value that comes again, the fitted error is 0; others are as large as before.
        let all = |series: Vec<Vec<f64>>| -> Smoothing {
            let channels = series.into_iter().map(|values| alone(values, 1)).collect();
            Smoothing::choose(&[channels], 3, &[], 0, &[0.1, 0.5, 0.9]).remove(0)
        };
        let found = all((1..9).map(|n| [100, 110, 105, 115].map(|value| f64::from(n * value)).to_vec()).collect());
        for values in [&[100.0][..], &[100.0; 9], &[100.0, 110.0, 105.0, 115.0, 112.0]] {
            let end = found.ends(values, &[], &[1])[0];
            let unit = if end.log { 100.0 * end.unit } else { end.unit };
            assert!((1.0..40.0).contains(&unit), "{end:?} {found:?}");
        }
        let mut normal = normal(5);
        let mut late = |n: usize| (0..40).map(|m| if m < 10 + n { 0.0 } else { 1.0 + 0.1 * normal() }).collect();
        let found = all((0..20).map(&mut late).collect());
        let unit = |values: &[f64]| found.ends(values, &[], &[1])[0].unit;
        let [before, after] = [unit(&[0.0; 9]), unit(&[0.0, 0.0, 1.1, 0.9, 1.0, 0.9, 1.1])];
        assert!((0.01..3.0).contains(&before) && (0.02..3.0).contains(&after), "{before} {after} {found:?}");
    }
}
