//! From times to statements: medians, how something grows, and where one curve passes below another.

use serde::{Deserialize, Serialize};

/// The middle of some times, and the quarters beside it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Half of the runs were faster.
    pub median: f64,
    /// A quarter of the runs were faster.
    pub lower: f64,
    /// A quarter of the runs were slower.
    pub upper: f64,
    /// Number of runs.
    pub runs: usize,
}

impl Spread {
    /// Of at least one time; `None` without.
    pub fn of(times: &[f64]) -> Option<Self> {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 0.5)?,
            lower: quantile(&sorted, 0.25)?,
            upper: quantile(&sorted, 0.75)?,
            runs: sorted.len(),
        })
    }
}

/// Between the two nearest of sorted numbers.
fn quantile(sorted: &[f64], at: f64) -> Option<f64> {
    let place = at * (sorted.len().checked_sub(1)?) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64))
}

/// How a quantity grows with length, in two ways: as a power and as a straight line.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// `p` of `c·Lᵖ`, by least squares over the logarithms: 1 is linear.
    pub power: f64,
    /// The largest distance of a point from that power, as a factor.
    pub power_worst: f64,
    /// `b` of `a + b·L`, by least squares of relative errors: what a token costs.
    pub per_token: f64,
    /// `a` of `a + b·L`: what a call costs whatever its length.
    pub fixed: f64,
    /// The largest distance of a point from the line, relative to the point.
    pub line_worst: f64,
    /// The share of the variance that the line explains, of the points divided by their own size's weight.
    pub r_squared: f64,
}

impl Fit {
    /// Of points `(length, quantity)`, all positive; `None` for fewer than three lengths.
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        let positive = points.iter().all(|&(x, y)| x > 0.0 && y > 0.0);
        if points.len() < 3 || !positive {
            return None;
        }
        let logs: Vec<(f64, f64, f64)> = points.iter().map(|&(x, y)| (x.ln(), y.ln(), 1.0)).collect();
        let (height, power) = line(&logs)?;
        let power_worst = logs.iter().map(|(x, y, _)| (y - height - power * x).abs()).fold(0.0, f64::max).exp();
        // A point's weight is 1/y²: without it the longest length alone would decide.
        let weighted: Vec<(f64, f64, f64)> = points.iter().map(|&(x, y)| (x, y, 1.0 / (y * y))).collect();
        let (fixed, per_token) = line(&weighted)?;
        let off = |x: f64, y: f64| fixed + per_token * x - y;
        let line_worst = points.iter().map(|&(x, y)| off(x, y).abs() / y).fold(0.0, f64::max);
        let weight: f64 = weighted.iter().map(|p| p.2).sum();
        let mean = weighted.iter().map(|p| p.1 * p.2).sum::<f64>() / weight;
        let left: f64 = weighted.iter().map(|&(x, y, w)| w * off(x, y).powi(2)).sum();
        let all: f64 = weighted.iter().map(|&(_, y, w)| w * (y - mean).powi(2)).sum();
        let r_squared = if all > 0.0 { 1.0 - left / all } else { 1.0 };
        Some(Self { power, power_worst, per_token, fixed, line_worst, r_squared })
    }
}

/// Weighted least squares: `(a, b)` of `a + b·x` for points `(x, y, weight)`.
fn line(points: &[(f64, f64, f64)]) -> Option<(f64, f64)> {
    let weight: f64 = points.iter().map(|p| p.2).sum();
    let mean = |f: fn(&(f64, f64, f64)) -> f64| points.iter().map(|p| f(p) * p.2).sum::<f64>() / weight;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| p.2 * (p.0 - x).powi(2)).sum();
    if spread <= 0.0 {
        return None;
    }
    let slope = points.iter().map(|p| p.2 * (p.0 - x) * (p.1 - y)).sum::<f64>() / spread;
    Some((y - slope * x, slope))
}

/// From which length on one curve stays below another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Crossover {
    /// At every length that both have.
    Always,
    /// From this length on, and at this height; read off the straight piece between two measured lengths on
    /// logarithmic axes.
    At {
        /// Tokens.
        length: f64,
        /// The quantity that both have there.
        height: f64,
    },
    /// Not at the longest length that both have.
    Never,
}

impl Crossover {
    /// Where `ours` passes below `theirs` for good, over the lengths that both have; `None` if they share none. Points
    /// are `(length, quantity)`, ascending and positive.
    pub fn of(ours: &[(f64, f64)], theirs: &[(f64, f64)]) -> Option<Self> {
        let shared: Vec<(f64, f64, f64)> = ours
            .iter()
            .filter_map(|&(x, mine)| theirs.iter().find(|other| other.0 == x).map(|other| (x, mine, other.1)))
            .collect();
        let last = shared.last()?;
        if last.1 >= last.2 {
            return Some(Self::Never);
        }
        let Some(before) = shared.iter().rposition(|p| p.1 >= p.2) else { return Some(Self::Always) };
        let [(x0, a0, b0), (x1, a1, b1)] = [shared[before], shared[before + 1]];
        // The logarithm of the ratio falls from at least 0 to below 0.
        let (start, end) = ((a0 / b0).ln(), (a1 / b1).ln());
        let share = start / (start - end);
        let between = |from: f64, to: f64| (from.ln() + share * (to / from).ln()).exp();
        Some(Self::At { length: between(x0, x1), height: between(a0, a1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_the_middle() {
        assert_eq!(Spread::of(&[]), None);
        let one = Spread::of(&[3.0]).unwrap();
        assert_eq!((one.median, one.lower, one.upper, one.runs), (3.0, 3.0, 3.0, 1));
        let five = Spread::of(&[5.0, 1.0, 4.0, 2.0, 1e9]).unwrap();
        assert_eq!((five.lower, five.median, five.upper), (2.0, 4.0, 5.0));
        assert_eq!(Spread::of(&[1.0, 2.0]).unwrap().median, 1.5);
    }

    #[test]
    fn a_line_is_found_exactly() {
        let points: Vec<(f64, f64)> = (0..8).map(|n| f64::from(1 << n)).map(|x| (x, 5.0 + 3.0 * x)).collect();
        let fit = Fit::of(&points).unwrap();
        assert!((fit.fixed - 5.0).abs() < 1e-9 && (fit.per_token - 3.0).abs() < 1e-9, "{fit:?}");
        assert!(fit.line_worst < 1e-9 && fit.r_squared > 1.0 - 1e-12, "{fit:?}");
        assert!(fit.power < 1.0 && fit.power_worst > 1.0, "a line with a start is no pure power: {fit:?}");
    }

    #[test]
    fn a_power_is_found_exactly() {
        for power in [0.0, 1.0, 2.0] {
            let points: Vec<(f64, f64)> = (3..9).map(|n| f64::from(1 << n)).map(|x| (x, 7.0 * x.powf(power))).collect();
            let fit = Fit::of(&points).unwrap();
            assert!((fit.power - power).abs() < 1e-9 && (fit.power_worst - 1.0).abs() < 1e-9, "{fit:?}");
        }
        let square: Vec<(f64, f64)> = (3..9).map(|n| f64::from(1 << n)).map(|x| (x, x * x)).collect();
        assert!(Fit::of(&square).unwrap().line_worst > 0.3, "a parabola is no line");
    }

    #[test]
    fn too_little_is_no_fit() {
        assert_eq!(Fit::of(&[(1.0, 1.0), (2.0, 2.0)]), None);
        assert_eq!(Fit::of(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        assert_eq!(Fit::of(&[(1.0, 1.0), (2.0, 0.0), (3.0, 3.0)]), None);
    }

    #[test]
    fn a_line_crosses_a_parabola_where_they_meet() {
        let lengths = || (5..15).map(|n| f64::from(1 << n));
        let linear: Vec<(f64, f64)> = lengths().map(|x| (x, 300.0 * x)).collect();
        let square: Vec<(f64, f64)> = lengths().map(|x| (x, x * x)).collect();
        let Some(Crossover::At { length, height }) = Crossover::of(&linear, &square) else { panic!("no crossing") };
        assert!((length - 300.0).abs() < 1e-6 && (height / 90_000.0 - 1.0).abs() < 1e-9, "{length} {height}");
        assert_eq!(Crossover::of(&square, &linear), Some(Crossover::Never));
    }

    #[test]
    fn only_the_last_crossing_counts_and_only_shared_lengths() {
        let ours = [(1.0, 1.0), (2.0, 3.0), (4.0, 1.0), (8.0, 1.0)];
        let theirs = [(1.0, 2.0), (2.0, 2.0), (4.0, 2.0)];
        let Some(Crossover::At { length, .. }) = Crossover::of(&ours, &theirs) else { panic!("no crossing") };
        assert!(length > 2.0 && length < 4.0);
        assert_eq!(Crossover::of(&ours[2..], &theirs), Some(Crossover::Always));
        assert_eq!(Crossover::of(&ours[3..], &theirs), None);
        assert_eq!(Crossover::of(&[(2.0, 2.0)], &theirs), Some(Crossover::Never), "as fast is not faster");
    }
}
