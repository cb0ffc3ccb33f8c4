//! How near foretold numbers come.

use std::fmt::{self, Display};

use serde::Serialize;

use crate::tasks::scores::Interval;
use crate::terminal::samples::counted;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Errors {
    #[serde(skip)]
    unit: &'static str,
    pub examples: usize,
    /// `1 − Σ(y − ŷ)² / Σ(y − ȳ)²`; none where all `y` are alike.
    pub r_squared: Option<Interval>,
    pub mean_absolute_error: Interval,
}

impl Errors {
    /// Of pairs of what is right and what was foretold.
    ///
    /// Both are ratios of sums over examples, so that the interval of the ratio estimator serves. That `ȳ` is a mean of the sample
    /// changes it in the second order alone: `Σ(y − c)²` is stationary there.
    pub fn of(pairs: &[(f64, f64)], unit: &'static str) -> Self {
        let mean = pairs.iter().map(|(right, _)| right).sum::<f64>() / pairs.len().max(1) as f64;
        let squares: Vec<_> = pairs.iter().map(|(y, found)| ((y - found).powi(2), (y - mean).powi(2))).collect();
        let absolute: Vec<_> = pairs.iter().map(|(y, found)| ((y - found).abs(), 1.0)).collect();
        let varies = squares.iter().any(|(_, spread)| *spread > 0.0);
        let r_squared = varies.then(|| {
            let Interval { rate, low, high } = Interval::ratio(&squares);
            Interval { rate: 1.0 - rate, low: high.map(|high| 1.0 - high), high: low.map(|low| (1.0 - low).min(1.0)) }
        });
        let mean_absolute_error = Interval::ratio(&absolute).within(0.0, f64::INFINITY);
        Self { unit, examples: pairs.len(), r_squared, mean_absolute_error }
    }
}

impl Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", counted(self.examples, self.unit))?;
        match &self.r_squared {
            Some(r) => writeln!(f, "R²                   {:.3}{}", r.rate, r.confidence(3, ""))?,
            None => writeln!(f, "R²                   none, since all numbers are alike")?,
        }
        writeln!(f, "mean absolute error  {}", self.mean_absolute_error.in_digits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::batches::Random;

    #[test]
    fn errors_are_those_of_their_definitions() {
        let found = Errors::of(&[(1.0, 1.5), (2.0, 2.0), (6.0, 4.0)], "texts");
        // Mean 3; squares of errors 4.25, about the mean 14; absolute errors 2.5.
        assert!((found.r_squared.unwrap().rate - (1.0 - 4.25 / 14.0)).abs() < 1e-12);
        assert!((found.mean_absolute_error.rate - 2.5 / 3.0).abs() < 1e-12);
        assert_eq!(found.examples, 3);
        let alike = Errors::of(&[(1.0, 2.0), (1.0, 0.0)], "texts");
        assert!(alike.r_squared.is_none() && alike.to_string().contains("all numbers are alike"));
        let one = Errors::of(&[(1.0, 2.0)], "texts");
        assert_eq!(one.mean_absolute_error.low, None);
        assert!(one.to_string().ends_with("mean absolute error  1.0000\n"), "{one}");
        let small = Errors::of(&[(1e-6, 1.5e-6), (2e-6, 2e-6)], "texts").to_string();
        assert!(small.contains("mean absolute error  0.0000002500  (95 % confidence 0.0000000000 … "), "{small}");
    }

    #[test]
    fn the_intervals_cover_at_their_level() {
        // y and its error are independent and uniform: R² = 1 − 0.25 for errors of half the spread, mean error 1/4 of a half.
        let mut random = Random::new(5, 1);
        let mut uniform = || (random.next() >> 11) as f64 / (1u64 << 53) as f64;
        let mut covered = [0; 2];
        for _ in 0..1000 {
            let pairs: Vec<(f64, f64)> = (0..200)
                .map(|_| {
                    let y = uniform();
                    (y, y + 0.5 * (uniform() - 0.5))
                })
                .collect();
            let found = Errors::of(&pairs, "texts");
            let holds =
                |interval: Interval, truth: f64| interval.low.unwrap() <= truth && truth <= interval.high.unwrap();
            covered[0] += usize::from(holds(found.r_squared.unwrap(), 0.75));
            covered[1] += usize::from(holds(found.mean_absolute_error, 0.125));
        }
        // 95 % of 1000 with a standard deviation of 7.
        assert!(covered.iter().all(|covered| (920..=975).contains(covered)), "covered {covered:?} of 1000");
    }
}
