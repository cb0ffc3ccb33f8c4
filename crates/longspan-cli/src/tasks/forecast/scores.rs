//! How near told values come, beside two simple forecasts, and how often an interval holds the truth.

use std::fmt::{self, Display};

use serde::Serialize;

use crate::tasks::scores::Interval;
use crate::terminal::samples::counted;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scores {
    pub series: usize,
    pub windows: usize,
    /// Values that were told and are known.
    pub values: usize,
    /// The mean of `|y − median|`, in the unit of the data; of several channels each is first divided by its deviation in training.
    pub mean_absolute_error: Interval,
    /// The same by that of the last known value, and by that of the mean of the known ones; none where these make no error.
    pub error_over_last: Option<Interval>,
    pub error_over_mean: Option<Interval>,
    /// The mean over quantiles, in the unit of the error.
    pub pinball_loss: Interval,
    /// The share of values from the quantile 0.1 to 0.9.
    pub coverage: Interval,
    #[serde(skip)]
    several: bool,
}

/// Sums over the values of a window, or of several.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    pub windows: usize,
    pub values: f64,
    /// Of the absolute errors of the median, of the last known value, and of the mean of the known ones.
    pub errors: f64,
    pub of_last: f64,
    pub of_mean: f64,
    pub pinball: f64,
    pub inside: f64,
}

impl Sums {
    pub fn plus(self, other: &Self) -> Self {
        Self {
            windows: self.windows + other.windows,
            values: self.values + other.values,
            errors: self.errors + other.errors,
            of_last: self.of_last + other.of_last,
            of_mean: self.of_mean + other.of_mean,
            pinball: self.pinball + other.pinball,
            inside: self.inside + other.inside,
        }
    }
}

impl Scores {
    /// Of the windows of each series. Errors within a series are alike, so that series are what was sampled, or the windows of a single one.
    pub fn of(series: &[Vec<Sums>], several: bool) -> Self {
        let units: Vec<Sums> = match series {
            [one] => one.clone(),
            all => all.iter().map(|one| one.iter().fold(Sums::default(), Sums::plus)).collect(),
        };
        let ratio = |above: fn(&Sums) -> f64, below: fn(&Sums) -> f64| {
            let pairs: Vec<(f64, f64)> = units.iter().map(|sums| (above(sums), below(sums))).collect();
            Interval::ratio(&pairs).within(0.0, f64::INFINITY)
        };
        let over = |below: fn(&Sums) -> f64| {
            units.iter().any(|sums| below(sums) > 0.0).then(|| ratio(|sums| sums.errors, below))
        };
        Self {
            series: series.len(),
            windows: units.iter().map(|sums| sums.windows).sum(),
            values: units.iter().map(|sums| sums.values).sum::<f64>() as usize,
            mean_absolute_error: ratio(|sums| sums.errors, |sums| sums.values),
            error_over_last: over(|sums| sums.of_last),
            error_over_mean: over(|sums| sums.of_mean),
            pinball_loss: ratio(|sums| sums.pinball, |sums| sums.values),
            coverage: ratio(|sums| sums.inside, |sums| sums.values).within(0.0, 1.0),
            several,
        }
    }
}

impl Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} series, {}, {}",
            self.series,
            counted(self.windows, "windows"),
            counted(self.values, "values")
        )?;
        let unit = if self.several { ", in deviations of the channels" } else { "" };
        let line = |f: &mut fmt::Formatter<'_>, name: &str, found: &Interval, end: &str| {
            writeln!(f, "{name:<27} {:.4}{}{end}", found.rate, found.confidence(4))
        };
        line(f, "mean absolute error", &self.mean_absolute_error, unit)?;
        for (name, found) in [("last value", &self.error_over_last), ("mean", &self.error_over_mean)] {
            match found {
                Some(found) => line(f, &format!("over that of the {name}"), found, "")?,
                None => writeln!(f, "the {name} makes no error")?,
            }
        }
        line(f, "pinball loss", &self.pinball_loss, unit)?;
        writeln!(f, "{:<27} {}", "80 % interval holds", self.coverage.in_percent())
    }
}
