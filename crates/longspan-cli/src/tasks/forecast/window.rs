//! Windows of series: points that are known, and the points after them that are to be told.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use rayon::prelude::*;

use crate::tasks::batches::Random;
use crate::tasks::feed::Feed;
use crate::tasks::labels::moments;
use crate::tasks::series::Points;
use crate::tasks::series::file::{Point, Series};
use crate::tasks::series::scaling::{Scaling, finite};
use crate::tasks::simple::smoothing::{Effect, End};

/// Points of a series that may be told.
#[derive(Debug, Clone)]
pub struct Stretch {
    pub series: Arc<Series>,
    pub points: Range<usize>,
}

/// Some points of a series, and those right after them, which are to be told from them.
#[derive(Debug, Clone)]
pub struct Window {
    pub series: Arc<Series>,
    pub known: Range<usize>,
    pub until: usize,
}

#[derive(Debug, Clone)]
pub struct Seen {
    pub points: Points,
    /// How many of the points, the last ones, are to be told.
    pub told: usize,
    /// The centre and the unit in which each channel is measured.
    pub measures: Vec<(f64, f64)>,
    /// Of each value to be told, point after point, what the model's numbers are measured from.
    pub ends: Arc<Vec<End>>,
}

/// A window to learn from: what is seen, and all values that are to be told, NaN where one is missing.
#[derive(Debug, Clone)]
pub struct Example {
    pub seen: Seen,
    pub targets: Vec<f32>,
}

impl Stretch {
    /// The windows that tell some of the points, `stride` points from one to the next.
    pub fn windows(&self, sizes: Sizes, stride: usize) -> Vec<Window> {
        let window = |cut: usize| Window {
            series: Arc::clone(&self.series),
            known: cut.saturating_sub(sizes.context)..cut,
            until: (cut + sizes.told).min(self.points.end),
        };
        self.points.clone().step_by(stride).map(window).collect()
    }
}

impl Window {
    /// As the model learns from it; what simple methods tell may be known already, of more points too.
    pub fn example(&self, scaling: &Scaling, ends: Option<&Arc<Vec<End>>>) -> Result<Example> {
        let Self { series, known, until } = self;
        let seen = Seen::of(scaling, series, known.clone(), &series.points(known.end..*until), ends)?;
        // Beyond any forecast the slope of the loss does not change.
        let scaled = |(value, end): (&f64, &End)| end.measured(*value).clamp(-1e6, 1e6) as f32;
        let targets: Vec<f32> = self.truth(scaling).iter().zip(seen.ends.iter()).map(scaled).collect();
        Ok(Example { seen, targets })
    }

    /// A hash of what is to be told, and of the point before it.
    pub fn hash(&self) -> u64 {
        let (from, width) = (self.known.end.saturating_sub(1), self.series.width);
        let mut hasher = DefaultHasher::new();
        let numbers =
            self.series.times[from..self.until].iter().chain(&self.series.values[from * width..self.until * width]);
        numbers.for_each(|number| number.to_bits().hash(&mut hasher));
        hasher.finish()
    }

    pub fn last(&self, channel: usize) -> Option<f64> {
        let values = self.known.clone().rev().map(|n| self.series.values[n * self.series.width + channel]);
        values.into_iter().find(|value| !value.is_nan())
    }

    /// The values that are to be predicted, point after point; NaN where one is missing or known.
    pub fn truth(&self, scaling: &Scaling) -> Vec<f64> {
        let width = self.series.width;
        let values = self.series.values[self.known.end * width..self.until * width].iter().enumerate();
        values.map(|(n, value)| if scaling.is_known(n % width) { f64::NAN } else { *value }).collect()
    }
}

impl Seen {
    /// Some points of a series, and those at which values are to be predicted, of which the model gets the channels that are known.
    ///
    /// Each channel is measured by the mean and the standard deviation of what is known of it (reversible instance normalisation, Kim et
    /// al. 2022): what is learned at one level serves at another. Of what is missing or to be told the model gets the last known value.
    pub fn of(
        scaling: &Scaling,
        one: &Series,
        known: Range<usize>,
        ahead: &[Point],
        ends: Option<&Arc<Vec<End>>>,
    ) -> Result<Self> {
        let width = scaling.channels();
        let values = &one.values[known.start * width..known.end * width];
        let measures: Vec<(f64, f64)> = (0..width)
            .map(|channel| {
                let own: Vec<f64> =
                    values.iter().skip(channel).step_by(width).copied().filter(|value| !value.is_nan()).collect();
                let usual = scaling.deviations[channel];
                if own.is_empty() {
                    return (scaling.means[channel], usual);
                }
                let (centre, unit) = moments(&own);
                // Values that are all alike, but for the rounding of their sum, have no unit of their own.
                let varies = own.iter().any(|value| (value - centre).abs() > 1e-12 * centre.abs().max(usual));
                (centre, if varies { unit } else { usual })
            })
            .collect();
        let ends = match ends {
            Some(ends) => Arc::clone(ends),
            None => Arc::new(self::ends(scaling, one, known.end, ahead, &measures)),
        };
        let count = known.len();
        let mut times = scaling.measured(one.times[known].iter().chain(ahead.iter().map(|(time, _)| time)).copied());
        let last = count.checked_sub(1).map_or(0.0, |last| times[last]);
        times.iter_mut().for_each(|time| *time -= last);
        let known_ahead = |(n, value): (usize, &f64)| if scaling.is_known(n) { *value } else { f64::NAN };
        let to_predict: Vec<f64> =
            ahead.iter().flat_map(|(_, values)| values.iter().enumerate().map(known_ahead)).collect();
        let points = values.chunks(width).chain(to_predict.chunks(width));
        let (mut numbers, mut carried) = (Vec::with_capacity(times.len() * inputs(scaling)), vec![0.0; width]);
        for (n, (point, time)) in points.zip(&times).enumerate() {
            for (channel, ((value, (centre, unit)), carried)) in
                point.iter().zip(&measures).zip(&mut carried).enumerate()
            {
                // The one before stands for what is missing, and what a simple method tells for what is to be told.
                if !value.is_nan() {
                    *carried = ((value - centre) / unit) as f32;
                } else if n >= count && !scaling.base.is_empty() {
                    *carried =
                        ((ends[(n - count) * width + channel].value(0.0) - centre) / unit).clamp(-1e6, 1e6) as f32;
                }
            }
            numbers.extend(&carried);
            numbers.extend(point.iter().map(|value| f32::from(u8::from(value.is_nan()))));
            numbers.push(time.signum() * time.abs().ln_1p());
        }
        Ok(Self { points: finite((numbers, times))?, told: ahead.len(), measures, ends })
    }

    /// A number that the model gave for one of the values to be told, in the unit of the series.
    pub fn value(&self, place: usize, number: f32) -> f64 {
        self.ends[place].value(f64::from(number))
    }
}

/// What the model's numbers for values at some times after a point are measured from: what a simple method tells, or the measures of
/// what is known.
fn ends(scaling: &Scaling, one: &Series, cut: usize, ahead: &[Point], measures: &[(f64, f64)]) -> Vec<End> {
    let far = scaling.distances(cut.checked_sub(1).map(|last| one.times[last]), ahead.iter().map(|(time, _)| *time));
    let values = |channel: usize| scaling.channel(one, channel, cut);
    let column = |channel: usize| {
        let next = ahead.iter().map(|(_, values)| values[channel]);
        values(channel).into_iter().chain(next).collect()
    };
    let known: Vec<Vec<f64>> = if scaling.base.iter().any(|base| base.way.known != Effect::None) {
        (0..scaling.channels()).filter(|channel| scaling.is_known(*channel)).map(column).collect()
    } else {
        Vec::new()
    };
    let known: Vec<&[f64]> = known.iter().map(|column| &column[..]).collect();
    let of = |channel: usize| {
        let mut ends = match scaling.base.get(channel) {
            Some(base) if !scaling.is_known(channel) => base.ends(&values(channel), &known, &far),
            _ => {
                let (centre, unit) = measures[channel];
                vec![End { centre, unit, log: false, floor: false }; far.len()]
            }
        };
        // A series that goes lower than any to learn from may go on so.
        let mut own = one.values[..cut * one.width].iter().skip(channel).step_by(one.width);
        let floor = scaling.floors.get(channel) == Some(&true) && !own.any(|value| *value < 0.0);
        ends.iter_mut().for_each(|end| end.floor = floor);
        ends
    };
    let all: Vec<Vec<End>> = (0..scaling.channels()).map(of).collect();
    (0..far.len()).flat_map(|n| all.iter().map(move |ends| ends[n])).collect()
}

/// Numbers that the model gets at a point: of each channel the value and whether it is missing, and how far it is from
/// the last known point.
pub fn inputs(scaling: &Scaling) -> usize {
    2 * scaling.channels() + 1
}

/// Windows drawn anew for every step, from the seed and the step alone.
pub struct Drawn {
    scaling: Scaling,
    pub stretches: Vec<Stretch>,
    /// How many windows there are in each of the stretches and in those before it.
    counts: Vec<u64>,
    sizes: Sizes,
    batch_size: usize,
    seed: u64,
    batch: Vec<Example>,
    /// Windows that there were for development.
    pub development: usize,
    /// What simple methods tell after a point of a stretch, which takes longer than to draw the window.
    told: HashMap<(usize, usize), Arc<Vec<End>>>,
}

const KEPT: usize = 100_000;

#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub told: usize,
    /// Points before them that are seen, where there are so many.
    pub context: usize,
}

impl Sizes {
    /// The fewest points from which others are told in training.
    pub fn least(self) -> usize {
        self.context.div_ceil(4)
    }

    /// All points of a series that may be told.
    pub fn whole(self, one: Series) -> Stretch {
        let count = one.times.len();
        Stretch { series: Arc::new(one), points: self.least().min(count)..count }
    }
}

impl Drawn {
    pub fn new(scaling: Scaling, stretches: Vec<Stretch>, sizes: Sizes, batch_size: usize, seed: u64) -> Self {
        let counted = |sum: &mut u64, stretch: &Stretch| {
            *sum += (stretch.points.len() + 1).saturating_sub(sizes.told) as u64;
            Some(*sum)
        };
        let counts = stretches.iter().scan(0, counted).collect();
        let (batch, told) = (Vec::new(), HashMap::new());
        Self { scaling, stretches, counts, sizes, batch_size, seed, batch, development: 0, told }
    }

    pub fn count(&self) -> u64 {
        self.counts.last().copied().unwrap_or(0)
    }

    /// How many windows share a point, of so many for development that are spread over about as long stretches.
    pub fn overlap(&self, development: usize) -> f64 {
        let told = self.sizes.told;
        (told as f64).min((development * told) as f64 / self.development.max(1) as f64).max(1.0)
    }

    /// The window of a number, and its stretch.
    fn draw(&self, n: u64) -> (usize, Window) {
        let mut random = Random::new(self.seed, n);
        // The bias of the remainder is below count / 2⁶⁴.
        let mut below = |count: usize| (random.next() % count as u64) as usize;
        let Sizes { told, context } = self.sizes;
        let place = below(self.count() as usize) as u64;
        let stretch = self.counts.partition_point(|count| *count <= place);
        let Stretch { series, points } = &self.stretches[stretch];
        let before = if stretch == 0 { 0 } else { self.counts[stretch - 1] };
        let cut = points.start + (place - before) as usize;
        let (reach, least) = (cut.min(context), self.sizes.least());
        // A person may know less, and may ask for fewer points.
        let varied = below(4) == 0;
        let known = if varied { least + below(reach - least + 1) } else { reach };
        let told = if varied { 1 + below(told) } else { told };
        (stretch, Window { series: Arc::clone(series), known: cut - known..cut, until: cut + told })
    }

    /// As the model learns from it, with what was told before after the same point.
    fn example(&self, stretch: usize, window: &Window) -> Result<Example> {
        let known = self.told.get(&(stretch, window.known.end));
        let ends =
            known.map(|ends| Arc::new(ends[..(window.until - window.known.end) * self.scaling.channels()].to_vec()));
        window.example(&self.scaling, ends.as_ref())
    }
}

impl Feed for Drawn {
    type Example = Example;

    fn per_epoch(&self) -> usize {
        (self.count() as usize).div_ceil(self.batch_size)
    }

    fn tokens(&self) -> f64 {
        self.stretches.iter().map(|stretch| stretch.points.len() as f64).sum()
    }

    fn batch(&mut self, step: usize) -> Result<Vec<&Example>> {
        let first = step as u64 * self.batch_size as u64;
        let drawn: Vec<(usize, Window)> = (first..first + self.batch_size as u64).map(|n| self.draw(n)).collect();
        if !self.scaling.base.is_empty() {
            let mut new: Vec<(usize, usize)> =
                drawn.iter().map(|(stretch, window)| (*stretch, window.known.end)).collect();
            new.sort_unstable();
            new.dedup();
            new.retain(|key| !self.told.contains_key(key));
            if self.told.len() + new.len() > KEPT {
                self.told.clear();
            }
            let found = new.into_par_iter().map(|(stretch, cut)| {
                let series = &self.stretches[stretch].series;
                // Of all points to be told, though this window may want fewer.
                let ahead = series.points(cut..cut + self.sizes.told);
                let none = vec![(0.0, 1.0); self.scaling.channels()];
                ((stretch, cut), Arc::new(ends(&self.scaling, series, cut, &ahead, &none)))
            });
            let found: Vec<_> = found.collect();
            self.told.extend(found);
        }
        self.batch = drawn.iter().map(|(stretch, window)| self.example(*stretch, window)).collect::<Result<_>>()?;
        Ok(self.batch.iter().collect())
    }

    fn probe(&self) -> &[Example] {
        &self.batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::series::file::series;

    /// A series whose values are its times, the first of which is missing in the second channel.
    fn line(count: usize) -> Series {
        let points = (0..count).map(|n| (n as f64, vec![n as f64, if n == 0 { f64::NAN } else { 7.0 }]));
        series(points.collect(), &[], None, 1).unwrap()
    }

    #[test]
    fn a_window_is_measured_by_what_is_known_of_it() {
        let one = line(6);
        let scaling = Scaling::of(std::slice::from_ref(&one), None);
        let seen = Seen::of(&scaling, &one, 0..3, &[(4.5, vec![1.0, 2.0])], None).unwrap();
        // Of 0, 1, 2 the mean is 1 and the variance 2/3; 7 and 7 do not vary, and the channel's unit is 1 for that.
        let unit = (2f64 / 3.0).sqrt();
        assert_eq!(seen.measures, [(1.0, unit), (7.0, 1.0)]);
        let (one, past) = ((1.0 / unit) as f32, |steps: f32| -steps.ln_1p());
        let expected = [
            [-one, 0.0, 0.0, 1.0, past(2.0)],
            [0.0, 0.0, 0.0, 0.0, past(1.0)],
            [one, 0.0, 0.0, 0.0, 0.0],
            // The last value, marked as missing.
            [one, 0.0, 1.0, 1.0, 2.5f32.ln_1p()],
        ];
        assert_eq!(seen.points.0.len(), 20);
        for (got, expected) in seen.points.0.iter().zip(expected.as_flattened()) {
            assert!((got - expected).abs() < 1e-6, "{:?}", seen.points.0);
        }
        assert_eq!((seen.points.1.as_slice(), seen.told), (&[-2.0, -1.0, 0.0, 2.5][..], 1));
        assert!((seen.value(0, one) - 2.0).abs() < 1e-6);
    }

    #[test]
    fn windows_are_drawn_from_seed_and_step_and_tell_nothing_beyond_their_stretch() {
        let sizes = Sizes { told: 3, context: 8 };
        let scaling = Scaling::of(&[line(40)], None);
        let drawn = |seed| {
            let stretch = |points| Stretch { series: Arc::new(line(40)), points };
            let stretches = vec![stretch(2..4), stretch(2..20), stretch(30..34)];
            Drawn::new(scaling.clone(), stretches, sizes, 50, seed)
        };
        let numbers = |drawn: &mut Drawn, step| -> Vec<Vec<f32>> {
            drawn
                .batch(step)
                .unwrap()
                .iter()
                .map(|one| [one.seen.points.0.clone(), one.targets.clone()].concat())
                .collect()
        };
        let (mut walked, mut jumped) = (drawn(5), drawn(5));
        assert_eq!(walked.count(), 16 + 2, "the first stretch has no room for a window");
        let all: Vec<_> = (0..9).map(|step| numbers(&mut walked, step)).collect();
        assert_eq!(numbers(&mut jumped, 7), all[7]);
        assert_ne!(numbers(&mut drawn(6), 7), all[7]);
        let mut told = [false; 40];
        for step in 0..20 {
            for Example { seen, targets } in walked.batch(step).unwrap() {
                assert!((2..=8).contains(&(seen.points.1.len() - seen.told)) && targets.len() == 2 * seen.told);
                let times = targets.iter().step_by(2).map(|target| seen.value(0, *target).round() as usize);
                times.for_each(|time| told[time] = true);
            }
        }
        let expected: Vec<bool> = (0..40).map(|n| (2..20).contains(&n) || (30..34).contains(&n)).collect();
        assert_eq!(told.to_vec(), expected);
    }
}
