//! Values and times as the model gets them.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::file::Series;
use crate::run::folder::RunFolder;
use crate::tasks::labels::moments;
use crate::tasks::simple::kernels::Grid;
use crate::tasks::simple::smoothing::Smoothing;
use crate::tasks::table::dates::Dates;
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;

const FILE: &str = "series.json";

/// What the series to learn from are like: others are given to the model in the same measure.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaling {
    /// Names of the channels, where the data have them.
    pub names: Vec<String>,
    /// Of each channel the mean, which is subtracted, and the standard deviation, by which the rest is divided.
    pub means: Vec<f64>,
    pub deviations: Vec<f64>,
    /// The median distance of neighbouring times, which counts as 1.
    pub step: f64,
    /// Whether the model gets a channel beside each that says which values are missing: where any is missing in training.
    pub masked: bool,
    /// When the first series begins and how long they last in all, where times count from a start that they share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<Clock>,
    /// How times are written, where they are dates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dates: Option<Dates>,
    /// How each channel is forecast by a simple method, where the model learns what that leaves over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub base: Vec<Smoothing>,
    /// Whether times lie on a grid, but for some that are missing. Else points are counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub grid: bool,
    /// Points of the shortest and of the longest series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<[usize; 2]>,
    /// Which channels are known at the times to predict; none where none is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known: Vec<bool>,
    /// Which channels end at 0, as counts do: forecasts of them go no lower.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub floors: Vec<bool>,
}

/// Distances of times, in usual ones, up to which they count as they are.
const NEAR: f64 = 1000.0;

/// Points of a series that simple methods get at most.
const EVEN: usize = 2048;

/// Times that count from a start: when they begin, and how long they last.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    pub begin: f64,
    pub span: f64,
}

/// Waves that tell the time on a clock: half of one, one, two and four fill its span.
const WAVES: [f64; 4] = [0.5, 1.0, 2.0, 4.0];

impl Clock {
    /// That of series whose times all fall into a span near 0 that is at most twice as long as the longest of them. Of others, such as
    /// those that stand years apart, only differences of times mean something.
    pub fn of(all: &[Series]) -> Option<Self> {
        let ends = all.iter().filter_map(|one| Some([*one.times.first()?, *one.times.last()?]));
        let (mut begin, mut end, mut longest) = (f64::INFINITY, f64::NEG_INFINITY, 0f64);
        for [first, last] in ends {
            (begin, end, longest) = (begin.min(first), end.max(last), longest.max(last - first));
        }
        let span = end - begin;
        (span > 0.0 && span <= 2.0 * longest && begin.abs() <= span).then_some(Self { begin, span })
    }

    fn waves(self, time: f64) -> impl Iterator<Item = f32> {
        let part = (time - self.begin) / self.span;
        WAVES.into_iter().flat_map(move |waves| {
            let (sin, cos) = (std::f64::consts::TAU * waves * part).sin_cos();
            [sin as f32, cos as f32]
        })
    }
}

impl Scaling {
    /// That of the series to learn from, beside a clock.
    pub fn of(train: &[Series], clock: Option<Clock>) -> Self {
        let Some(first) = train.first() else { return Self { step: 1.0, ..Self::default() } };
        let moments = (0..first.width).map(|channel| {
            let values = train.iter().flat_map(|one| one.channel(channel));
            moments(&values.filter(|value| !value.is_nan()).collect::<Vec<_>>())
        });
        let (means, deviations) = moments.unzip();
        let step = usual_gap(train.iter().map(|one| one.times.as_slice())).unwrap_or(1.0);
        let masked = train.iter().any(|one| one.values.iter().any(|value| value.is_nan()));
        let dates = first.dates.as_deref().cloned();
        let gaps = train.iter().flat_map(|one| one.times.windows(2).map(|pair| (pair[1] - pair[0]) / step));
        let (even, count) =
            gaps.fold((0, 0), |(even, count), gap| (even + usize::from((gap - 1.0).abs() < 0.01), count + 1));
        let grid = even * 50 >= count * 49;
        let names = first.names.to_vec();
        let points = || train.iter().map(|one| one.times.len());
        let lengths = points().min().zip(points().max()).map(|(least, most)| [least, most]);
        Self { names, means, deviations, step, masked, clock, dates, grid, lengths, ..Self::default() }
    }

    pub fn load(folder: &RunFolder) -> Result<Self> {
        let damaged = || folder.damaged(FILE, "not what a run writes");
        let found: Self = serde_json::from_slice(&folder.read(FILE)?).map_err(|_| damaged())?;
        let lasts = found.clock.is_none_or(|clock| clock.begin.is_finite() && clock.span > 0.0);
        if found.means.is_empty() || found.means.len() != found.deviations.len() || !lasts {
            return Err(damaged());
        }
        Ok(found)
    }

    pub fn store(&self, folder: &RunFolder) -> Result<()> {
        folder.write(FILE, serde_json::to_string_pretty(self)?.as_bytes())
    }

    pub fn names(&self) -> Vec<String> {
        let count = self.channels();
        match &self.names[..] {
            [] if count == 1 => vec!["value".into()],
            [] => (1..=count).map(|n| format!("channel {n}")).collect(),
            names => names.to_vec(),
        }
    }

    /// Which channels were never below 0 in series to learn from, and 0 at one point in a hundred or more.
    pub fn floors(&self, train: &[Series]) -> Vec<bool> {
        let ends = |channel: usize| {
            let values = || train.iter().flat_map(|one| one.channel(channel));
            let zeros = values().filter(|value| *value == 0.0).count();
            zeros > 0 && 100 * zeros >= values().count() && !values().any(|value| value < 0.0)
        };
        (0..self.channels()).map(ends).collect()
    }

    pub fn is_known(&self, channel: usize) -> bool {
        self.known.get(channel).copied().unwrap_or(false)
    }

    /// Times as the model gets them: from the first one on, the usual distance as 1. Differences are taken before digits are lost, and
    /// of distances beyond [`NEAR`] the logarithm grows: no wave of attention tells such apart, and `f32` keeps the short ones.
    pub fn measured(&self, times: impl Iterator<Item = f64>) -> Vec<f32> {
        let mut before = None;
        let mut sum = 0.0;
        let measured = times.map(|time| {
            let gap = (time - before.replace(time).unwrap_or(time)) / self.step;
            sum += if gap > NEAR { NEAR * (1.0 + (gap / NEAR).ln()) } else { gap };
            sum as f32
        });
        measured.collect()
    }

    /// A channel of a series up to a point, as simple methods get it: on the grid of times where there is one, NaN where a value is missing.
    pub fn channel(&self, one: &Series, channel: usize, until: usize) -> Vec<f64> {
        let values = one.values[..until * one.width].iter().skip(channel).step_by(one.width);
        let (Some(first), Some(last)) = (one.times[..until].first(), one.times[..until].last()) else {
            return Vec::new();
        };
        let place = |time: f64| ((time - first) / self.step).round() as usize;
        // A series that has few of its points is counted like one without a grid.
        if !self.grid || place(*last) >= 2 * until {
            return values.copied().collect();
        }
        let mut all = vec![f64::NAN; place(*last) + 1];
        one.times.iter().zip(values).for_each(|(time, value)| all[place(*time)] = *value);
        all
    }

    /// A series at even times, the usual distance apart or as far as it takes for [`EVEN`] points, on the clock where there is one: on lines
    /// between its values, as they are beyond their ends, and measured as the model gets them.
    pub fn even(&self, one: &Series) -> Grid {
        let (first, last) = match (self.clock, &one.times[..]) {
            (Some(clock), _) => (clock.begin, clock.begin + clock.span),
            (None, [first, .., last]) => (*first, *last),
            _ => (0.0, 0.0),
        };
        // Longer than usual only by what is missing.
        let count = (((last - first) / self.step).round() as usize + 1).clamp(2, EVEN.min(16 * one.times.len()).max(2));
        let at = |n: usize| first + (last - first) * n as f64 / (count - 1) as f64;
        let mut values = Vec::with_capacity(count * self.channels());
        for channel in 0..self.channels() {
            let all = one.times.iter().copied().zip(one.channel(channel));
            let known: Vec<(f64, f64)> = all.filter(|(_, value)| !value.is_nan()).collect();
            values.extend((0..count).map(|n| {
                let next = known.partition_point(|(time, _)| *time < at(n));
                let value = match (next.checked_sub(1).map(|before| known[before]), known.get(next)) {
                    (Some((t, x)), Some((u, y))) => x + (y - x) * (at(n) - t) / (u - t),
                    (Some((_, x)), None) => x,
                    (None, Some((_, y))) => *y,
                    (None, None) => self.means[channel],
                };
                ((value - self.means[channel]) / self.deviations[channel]) as f32
            }));
        }
        Grid { width: self.channels(), values }
    }

    /// How many points ahead of the last known one of a series times are, for simple methods.
    pub fn distances(&self, last: Option<f64>, times: impl Iterator<Item = f64>) -> Vec<usize> {
        let far = |(n, time): (usize, f64)| match last {
            Some(last) if self.grid => ((time - last) / self.step).round().clamp(1.0, 1e6) as usize,
            _ => n + 1,
        };
        times.enumerate().map(far).collect()
    }

    pub fn channels(&self) -> usize {
        self.means.len()
    }

    pub fn inputs(&self) -> usize {
        let waves = if self.clock.is_some() { 2 * WAVES.len() } else { 0 };
        self.channels() * if self.masked { 2 } else { 1 } + waves
    }

    /// A distance of times in words.
    pub fn distance(&self, gap: f64) -> String {
        let unit = self.dates.as_ref().map_or(String::new(), |dates| format!(" {}", dates.counted()));
        format!("{}{}", gap as f32, if gap == 1.0 { unit.trim_end_matches('s') } else { &unit })
    }

    /// Says where times lie as far apart as if they were counted in another unit than those of training, and whether they do,
    pub fn say_other_times<'a>(&self, name: &str, times: impl Iterator<Item = &'a [f64]> + Clone) -> bool {
        // Points that are only counted are in no unit.
        let is_counted = |times: &'a [f64]| times.iter().zip(0..).all(|(time, n)| *time == f64::from(n));
        let alike = if times.clone().all(is_counted) { 1.0..=1.0 } else { 0.55..=1.8 };
        let other = usual_gap(times).filter(|gap| !alike.contains(&(gap / self.step)));
        if let Some(gap) = other {
            let [gap, step] = [gap, self.step].map(|gap| self.distance(gap));
            note(format_args!(
                "{name}: the usual distance of times is {gap}, and {step} in training, which answers are for"
            ));
        }
        other.is_some()
    }

    /// and where values do, too, or series are much shorter or longer.
    pub fn say_other(&self, name: &str, all: &[Series]) {
        self.say_other_times(name, all.iter().map(|one| one.times.as_slice()));
        if let Some([least, most]) = self.lengths {
            let is_other = |one: &&Series| one.times.len() * 2 < least || one.times.len() > 2 * most;
            note_some(all.iter().filter(is_other).count(), |other| {
                let of = all.len();
                format!(
                    "{name}: {other} of {of} series have less than half or more than twice the points of those in training ({least} to {most})"
                )
            });
        }
        for (n, (mean, deviation)) in self.means.iter().zip(&self.deviations).enumerate() {
            let values = all.iter().flat_map(|one| one.channel(n));
            let values = values.filter(|value| !value.is_nan()).map(|value| (value - mean) / deviation);
            let (away, spread) = moments(&values.collect::<Vec<f64>>());
            // A few series may well be alike.
            if away.abs().max(spread) > 4.0 || all.len() >= 8 && spread < 0.05 {
                note(format_args!(
                    "{name}: `{}` is {away:.1} deviations of training from its mean there, and varies {spread:.3} times as much; give it in \
                     the same unit",
                    self.names()[n]
                ));
            }
        }
    }

    pub fn check(&self, one: &Series) -> Result<()> {
        let (width, names) = (self.channels(), self.names.join(", "));
        if one.width != width {
            let found = counted(one.width, "channels");
            bail!("{found}, and this run was trained on {width} ({}); give as many", self.names().join(", "));
        }
        // Names of columns are found in letters of any case.
        let lower = |names: &[String]| names.iter().map(|name| name.to_lowercase()).collect::<Vec<_>>();
        if !one.names.is_empty() && !self.names.is_empty() && lower(&one.names) != lower(&self.names) {
            bail!(
                "the channels are {}, and those of this run {names}; name the columns so, in this order",
                one.names.join(", ")
            );
        }
        Ok(())
    }

    /// A series as the model gets it: the numbers of its points, with the time on the clock, and their times from the first one on.
    pub fn apply(&self, one: &Series) -> Result<(Vec<f32>, Vec<f32>)> {
        self.check(one)?;
        let width = self.channels();
        let mut values = Vec::with_capacity(one.times.len() * self.inputs());
        for (point, time) in one.values.chunks(width).zip(&one.times) {
            let scaled = point.iter().zip(&self.means).zip(&self.deviations).map(|((value, mean), deviation)| {
                // The mean stands for what is missing.
                if value.is_nan() { 0.0 } else { ((value - mean) / deviation) as f32 }
            });
            values.extend(scaled);
            if self.masked {
                values.extend(point.iter().map(|value| f32::from(u8::from(value.is_nan()))));
            }
            if let Some(clock) = self.clock {
                values.extend(clock.waves(*time));
            }
        }
        finite((values, self.measured(one.times.iter().copied())))
    }
}

/// Numbers and times that a model can take.
pub fn finite((values, times): (Vec<f32>, Vec<f32>)) -> Result<(Vec<f32>, Vec<f32>)> {
    if values.iter().chain(&times).any(|number| !number.is_finite()) {
        bail!("a value or a time is too large beside those of training; take the series out");
    }
    Ok((values, times))
}

/// The median distance of neighbouring times, if there is one.
pub fn usual_gap<'a>(times: impl Iterator<Item = &'a [f64]>) -> Option<f64> {
    let gaps = times.flat_map(|times| times.windows(2).map(|pair| pair[1] - pair[0]));
    let mut gaps: Vec<f64> = gaps.filter(|gap| *gap > 0.0 && gap.is_finite()).collect();
    let middle = gaps.len() / 2;
    (!gaps.is_empty()).then(|| *gaps.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::series::file::{Reading, parse, series};

    #[test]
    fn a_clock_is_shared_by_series_that_begin_together_near_0() {
        let all = |spans: &[(f64, f64)]| -> Vec<Series> {
            let one =
                |&(from, to): &(f64, f64)| series(vec![(from, vec![1.0]), (to, vec![2.0])], &[], None, 1).unwrap();
            spans.iter().map(one).collect()
        };
        let of = |spans: &[(f64, f64)]| Clock::of(&all(spans)).map(|clock| (clock.begin, clock.span));
        assert_eq!(of(&[(0.0, 23.0), (2.0, 20.0), (1.0, 5.0)]), Some((0.0, 23.0)));
        assert_eq!(of(&[(1.7e9, 1.7e9 + 60.0), (1.7e9, 1.7e9 + 50.0)]), None, "a date");
        assert_eq!(of(&[(0.0, 10.0), (10.0, 20.0), (20.0, 30.0)]), None, "one after the other");
        assert_eq!((of(&[(3.0, 3.0)]), of(&[])), (None, None));
    }

    #[test]
    fn values_and_times_are_measured_by_those_of_training() {
        let text = "id,time,x,y\na,10,1,5\na,12,3,5\na,14,,5\nb,0,5,5\nb,50,3,5\n";
        let all = parse(text.as_bytes(), "csv", "f", &Reading::default()).unwrap().series;
        let scaling = Scaling::of(&all, None);
        // x: 1, 3, 5, 3 with mean 3 and variance 2; y does not vary; gaps 2, 2, 50.
        assert_eq!((scaling.step, scaling.masked, scaling.inputs()), (2.0, true, 4));
        let (values, times) = scaling.apply(&all[0]).unwrap();
        let low = -2.0f32.sqrt();
        assert!((values[0] - low).abs() < 1e-6, "{values:?}");
        assert_eq!(values[1..], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        assert_eq!(times, [0.0, 1.0, 2.0]);
        // A point far from 0 in time keeps its digits.
        let late = series(vec![(1.7e9, vec![3.0, 5.0]), (1.7e9 + 1.0, vec![3.0, 5.0])], &[], None, 1).unwrap();
        assert_eq!(scaling.apply(&late).unwrap().1, [0.0, 0.5]);

        // At 55 of a clock from 10 to 50: a whole and an eighth.
        let told = Scaling { clock: Some(Clock { begin: 10.0, span: 40.0 }), ..scaling.clone() };
        let (values, _) = told.apply(&series(vec![(55.0, vec![3.0, 5.0])], &[], None, 1).unwrap()).unwrap();
        let half = 0.5f32.sqrt();
        let expected = [-0.3826834, -0.9238795, half, half, 1.0, 0.0, 0.0, -1.0];
        assert_eq!((values.len(), told.inputs()), (12, 12));
        assert!(values[4..].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{values:?}");

        let refused = |one: &Series| scaling.apply(one).unwrap_err().to_string();
        assert!(
            refused(&series(vec![(0.0, vec![1.0])], &[], None, 1).unwrap())
                .contains("1 channel, and this run was trained on 2 (x, y)")
        );
        let other = parse(b"id,time,y,x\na,1,2,3\n", "csv", "f", &Reading::default()).unwrap().series;
        assert!(refused(&other[0]).contains("the channels are y, x, and those of this run x, y"));
        // Beyond a thousand usual distances the logarithm counts, so that short ones keep their digits.
        let far = |gap: f64| scaling.measured([0.0, 2.0, 5.0, 5.0 + gap, 7.0 + gap].into_iter());
        assert_eq!(far(100.0), [0.0, 1.0, 2.5, 52.5, 53.5]);
        assert_eq!(far(2000.0)[3..], [1002.5, 1003.5]);
        let times = far(1e12);
        assert!((times[4] - times[3] - 1.0).abs() < 2e-3 && times[3] < 30_000.0, "{times:?}");
        let huge = series(vec![(0.0, vec![1e300, 5.0])], &[], None, 1).unwrap();
        assert!(refused(&huge).contains("too large"));
    }
}
