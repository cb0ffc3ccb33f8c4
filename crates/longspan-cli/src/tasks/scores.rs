//! Error rates and how certain they are.
//!
//! *Token error rate*: edits (insertions, deletions, substitutions; Levenshtein 1966) from the answer to the closest
//! listed target, summed over all sequences, divided by the tokens of those targets. For phonemes this is the phoneme
//! error rate. *Sequence error rate*: the share of sequences that equal none of their targets; for pronunciations, the
//! word error rate.

use std::fmt::{self, Display};

use serde::Serialize;
use strsim::generic_levenshtein;

use super::task;

/// The 97.5 % quantile of the normal distribution: two-sided 95 %.
const Z: f64 = 1.959_963_984_540_054;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Score {
    pub edits: usize,
    pub tokens: usize,
}

/// Scores an answer against the target with the fewest edits; of several such, the longest. `None` without targets.
pub fn score<T: PartialEq>(answer: &Vec<T>, targets: &[Vec<T>]) -> Option<Score> {
    targets
        .iter()
        .map(|target| Score { edits: generic_levenshtein(answer, target), tokens: target.len() })
        .min_by_key(|score| (score.edits, std::cmp::Reverse(score.tokens)))
}

/// Decimals that show a number near 0 with four digits, and any other with four decimals.
pub fn decimals(number: f64) -> usize {
    if number == 0.0 { 4 } else { (3.0 - number.abs().log10().floor()).clamp(4.0, 330.0) as usize }
}

/// The place of the largest number, of equal ones the first.
pub fn likeliest(row: &[f32]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap_or(0)
}

/// A number with its 95 % confidence interval, where there is enough to tell.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    pub rate: f64,
    pub low: Option<f64>,
    pub high: Option<f64>,
}

impl Interval {
    /// `R = Σ a / Σ b` over pairs that were sampled one by one, with the normal interval of the ratio estimator (Cochran 1977, §6.4),
    /// `R ± z·√(n/(n−1)·Σ(a − R·b)²)/Σ b`.
    pub fn ratio(pairs: &[(f64, f64)]) -> Self {
        let n = pairs.len() as f64;
        let [above, below] = pairs.iter().fold([0.0; 2], |[above, below], (a, b)| [above + a, below + b]);
        let rate = above / below;
        let squares: f64 = pairs.iter().map(|(a, b)| (a - rate * b).powi(2)).sum();
        let half = Z * (n / (n - 1.0) * squares).sqrt() / below;
        let known = n >= 2.0;
        Self { rate, low: known.then_some(rate - half), high: known.then_some(rate + half) }
    }

    /// [`ratio`](Self::ratio) of a part to its whole. Where all pairs have the same, as where all have all, their spread says nothing, and
    /// each counts as a trial.
    pub fn share(pairs: &[(f64, f64)]) -> Self {
        let found = Self::ratio(pairs);
        let alike = found.rate <= 1.0 && found.low.is_some_and(|low| found.rate - low < 1e-9);
        if alike { Self::around(found.rate, pairs.len() as f64) } else { found }
    }

    /// `successes` of `trials` with the interval of Wilson (1927), which stays sensible near 0 and 1 and for few trials. Without trials, a
    /// rate of 0 that may be anything.
    pub fn wilson(successes: usize, trials: usize) -> Self {
        if trials == 0 {
            return Self { rate: 0.0, low: Some(0.0), high: Some(1.0) };
        }
        Self::around(successes as f64 / trials as f64, trials as f64)
    }

    fn around(rate: f64, n: f64) -> Self {
        let spread = 1.0 + Z * Z / n;
        let centre = (rate + Z * Z / (2.0 * n)) / spread;
        let half = Z / spread * (rate * (1.0 - rate) / n + Z * Z / (4.0 * n * n)).sqrt();
        Self { rate, low: Some((centre - half).max(0.0)), high: Some((centre + half).min(1.0)) }
    }

    /// Edits per token over whole sequences: [`share`](Self::share) of two sums, since the sequence, not the token, is what was sampled:
    /// errors come in clusters. May exceed 1, since insertions count.
    pub fn of_edits(scores: &[Score]) -> Self {
        if scores.iter().all(|score| score.tokens == 0) {
            return Self::wilson(0, 0);
        }
        let pairs: Vec<(f64, f64)> = scores.iter().map(|score| (score.edits as f64, score.tokens as f64)).collect();
        let Self { rate, low, high } = Self::share(&pairs);
        Self { rate, low: low.map(|low| low.max(0.0)).or(Some(0.0)), high: high.or(Some(rate.max(1.0))) }
    }

    /// Without the part of the interval where the number cannot be.
    pub fn within(self, least: f64, most: f64) -> Self {
        Self { low: self.low.map(|low| low.max(least)), high: self.high.map(|high| high.min(most)), ..self }
    }

    pub fn in_percent(&self) -> String {
        let percent = |x: f64| 100.0 * x;
        let whole = Self { rate: percent(self.rate), low: self.low.map(percent), high: self.high.map(percent) };
        format!("{:.1} %{}", whole.rate, whole.confidence(1, " %"))
    }

    /// A number and its interval, in the unit of the data.
    pub fn in_digits(&self) -> String {
        let decimals = decimals(self.rate);
        format!("{:.decimals$}{}", self.rate, self.confidence(decimals, ""))
    }

    /// The interval in words, with so many decimals and a unit; nothing where it is not known.
    pub fn confidence(&self, decimals: usize, unit: &str) -> String {
        match (self.low, self.high) {
            (Some(low), Some(high)) => format!("  (95 % confidence {low:.decimals$} … {high:.decimals$}{unit})"),
            _ => String::new(),
        }
    }
}

/// The error rates of a set of answers, with what its sequences and tokens are called: `["word", "phoneme"]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErrorRates {
    #[serde(skip)]
    units: [&'static str; 2],
    pub sequences: usize,
    pub tokens: usize,
    pub token_error_rate: Interval,
    pub sequence_error_rate: Interval,
}

impl ErrorRates {
    pub fn of(scores: &[Score], units: [&'static str; 2]) -> Self {
        // An answer is right exactly when no edit is needed to reach a target.
        let wrong = scores.iter().filter(|score| score.edits > 0).count();
        Self {
            units,
            sequences: scores.len(),
            tokens: scores.iter().map(|score| score.tokens).sum(),
            token_error_rate: Interval::of_edits(scores),
            sequence_error_rate: Interval::wilson(wrong, scores.len()),
        }
    }
}

impl task::Scores for ErrorRates {}

impl Display for ErrorRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [sequence, token] = self.units;
        let count = |count, unit| format!("{count} {unit}{}", if count == 1 { "" } else { "s" });
        writeln!(f, "{}, {} in their targets", count(self.sequences, sequence), count(self.tokens, token))?;
        for (unit, rate) in [(token, self.token_error_rate), (sequence, self.sequence_error_rate)] {
            writeln!(f, "{:<20} {}", format!("{unit} error rate"), rate.in_percent())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: [&str; 2] = ["source", "token"];

    #[test]
    fn the_closest_target_counts() {
        let targets = [vec![1, 2, 3], vec![1, 2], vec![9, 9, 9, 9]];
        assert_eq!(score(&vec![1, 2], &targets), Some(Score { edits: 0, tokens: 2 }));
        assert_eq!(score(&vec![1, 2, 4], &targets), Some(Score { edits: 1, tokens: 3 }));
        assert_eq!(score::<u32>(&vec![], &[]), None);
        assert_eq!(score::<u32>(&vec![], &[vec![]]), Some(Score { edits: 0, tokens: 0 }));
    }

    #[test]
    fn wilson_matches_published_values() {
        // Newcombe 1998, table I, method 3: 81/263, 15/148, 0/20, 1/29.
        for (k, n, low, high) in
            [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
        {
            let rate = Interval::wilson(k, n);
            let [found_low, found_high] = [rate.low, rate.high].map(Option::unwrap);
            assert!((found_low - low).abs() < 5e-5 && (found_high - high).abs() < 5e-5, "{k}/{n}: {rate:?}");
        }
        assert_eq!(Interval::wilson(0, 0).high, Some(1.0));
    }

    #[test]
    fn the_ratio_interval_covers_at_its_level() {
        // Sequences with random lengths and clustered errors; the true rate is known by construction: a sequence of l
        // tokens is, with probability 1/4, wrong in half of them.
        let mut random = crate::tasks::batches::Random::new(3, 1);
        let (mut covered, repetitions) = (0, 1000);
        for _ in 0..repetitions {
            let scores: Vec<Score> = (0..300)
                .map(|_| {
                    let tokens = 2 * (1 + random.next() % 6) as usize;
                    let edits = if random.next().is_multiple_of(4) { tokens / 2 } else { 0 };
                    Score { edits, tokens }
                })
                .collect();
            let rate = Interval::of_edits(&scores);
            covered += usize::from(rate.low.unwrap() <= 0.125 && 0.125 <= rate.high.unwrap());
        }
        // 95 % of 1000 with a standard deviation of 7; a binomial interval over tokens would cover about 64 %.
        assert!((925..=975).contains(&covered), "covered {covered} of {repetitions}");
    }

    #[test]
    fn rates_of_nothing_and_of_one() {
        let none = ErrorRates::of(&[], UNITS);
        assert_eq!((none.sequences, none.token_error_rate.rate), (0, 0.0));
        let one = ErrorRates::of(&[Score { edits: 3, tokens: 2 }], UNITS);
        assert_eq!(one.token_error_rate.rate, 1.5);
        assert_eq!(one.sequence_error_rate.rate, 1.0);
        // Those that are all alike do not make a share certain: 0 of 20 as above.
        let right = Interval::of_edits(&[Score { edits: 0, tokens: 3 }; 20]);
        let wrong = Interval::of_edits(&[Score { edits: 3, tokens: 6 }; 20]);
        let [all, half] = [3.0, 1.5].map(|part| Interval::share(&[(part, 3.0); 20]));
        assert_eq!((right.low, all.high, half.rate, wrong), (Some(0.0), Some(1.0), 0.5, half));
        for (found, expected) in
            [(right.high, 0.1611), (all.low, 1.0 - 0.1611), (half.low, 0.2993), (half.high, 0.7007)]
        {
            assert!((found.unwrap() - expected).abs() < 5e-5, "{found:?}, {expected}");
        }
    }
}
