//! How near told values come, beside two simple forecasts, and how often an interval holds the truth.

use std::fmt::{self, Display};

use serde::Serialize;

use crate::tasks::scores::Interval;
use crate::tasks::task;
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

/// Sums over the values of a window.
#[derive(Debug, Default)]
pub struct Sums {
    pub values: f64,
    /// Of the absolute errors of the median, of the last known value, and of the mean of the known ones.
    pub errors: f64,
    pub of_last: f64,
    pub of_mean: f64,
    pub pinball: f64,
    pub inside: f64,
}

impl Scores {
    /// Of the windows of each series. Errors within a series are alike, so that series are what was sampled, or the windows of a single one.
    pub fn of(series: &[Vec<Sums>], several: bool) -> Self {
        let units: Vec<&[Sums]> = match series {
            [one] => one.chunks(1).collect(),
            all => all.iter().map(Vec::as_slice).collect(),
        };
        let total = |of: fn(&Sums) -> f64, unit: &[Sums]| unit.iter().map(of).sum::<f64>();
        let pairs = |above: fn(&Sums) -> f64, below: fn(&Sums) -> f64| -> Vec<(f64, f64)> {
            units.iter().map(|unit| (total(above, unit), total(below, unit))).collect()
        };
        let ratio = |above, below| Interval::ratio(&pairs(above, below)).within(0.0, f64::INFINITY);
        let all = || units.iter().copied().flatten();
        let over =
            |below: fn(&Sums) -> f64| all().any(|sums| below(sums) > 0.0).then(|| ratio(|sums| sums.errors, below));
        Self {
            series: series.len(),
            windows: all().count(),
            values: all().map(|sums| sums.values).sum::<f64>() as usize,
            mean_absolute_error: ratio(|sums| sums.errors, |sums| sums.values),
            error_over_last: over(|sums| sums.of_last),
            error_over_mean: over(|sums| sums.of_mean),
            pinball_loss: ratio(|sums| sums.pinball, |sums| sums.values),
            coverage: Interval::share(&pairs(|sums| sums.inside, |sums| sums.values)).within(0.0, 1.0),
            several,
        }
    }
}

impl task::Scores for Scores {
    fn is_behind(&self, simple: f64) -> bool {
        // A method that answers alone is one of them, but for rounding.
        simple < (1.0 - 1e-6) * self.mean_absolute_error.rate
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
            writeln!(f, "{name:<27} {}{end}", found.in_digits())
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
