//! Drawing the next token from its logits.

use crate::error::{Result, argument};

/// How a token is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleOptions {
    /// `T`: tokens are drawn with probabilities `∝ exp(logit / T)`. Below 1 the likely ones come more often; 0 always takes
    /// the likeliest.
    pub temperature: f64,
    /// At most this many of the likeliest tokens are drawn from; 0 for all.
    pub top_k: usize,
    /// Only the fewest of the likeliest tokens whose probabilities reach this sum are drawn from; 1 for all (Holtzman et
    /// al. 2020).
    pub top_p: f64,
}

impl Default for SampleOptions {
    /// From all tokens, by the probabilities of the model.
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0 }
    }
}

impl SampleOptions {
    /// Draws a token: the one in whose share of [0, 1) `uniform` falls, likely tokens first, of equal ones the lower. A logit
    /// of −∞ stands for a token that is never drawn.
    ///
    /// ```
    /// use longspan::sample::SampleOptions;
    ///
    /// # fn main() -> longspan::Result<()> {
    /// let logits = [0.0, 2.0, 1.0, f32::NEG_INFINITY];
    /// assert_eq!(SampleOptions::default().draw(&logits, 0.99)?, 0);
    /// assert_eq!(SampleOptions { top_k: 2, ..SampleOptions::default() }.draw(&logits, 0.99)?, 2);
    /// assert_eq!(SampleOptions { temperature: 0.0, ..SampleOptions::default() }.draw(&logits, 0.99)?, 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// A temperature below 0, a `top_p` outside (0, 1], a `uniform` outside [0, 1), and logits that are NaN or all −∞.
    pub fn draw(&self, logits: &[f32], uniform: f64) -> Result<usize> {
        const NAME: &str = "sample";
        let Self { temperature, top_k, top_p } = *self;
        let got = || temperature.to_string();
        argument(temperature >= 0.0 && temperature.is_finite(), NAME, "temperature", || "a number from 0".into(), got)?;
        let expected = || "a number above 0, at most 1".into();
        argument(top_p > 0.0 && top_p <= 1.0, NAME, "top_p", expected, || top_p.to_string())?;
        let expected = || "a number in [0, 1)".into();
        argument((0.0..1.0).contains(&uniform), NAME, "uniform", expected, || uniform.to_string())?;
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let expected = || "finite numbers".into();
        let got = || "NaN or infinity; the model's weights are broken".into();
        argument(largest.is_finite() && !logits.iter().any(|x| x.is_nan()), NAME, "logits", expected, got)?;
        let mut order: Vec<usize> = (0..logits.len()).filter(|&token| logits[token] > f32::NEG_INFINITY).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if temperature == 0.0 {
            return Ok(order[0]);
        }
        if top_k > 0 {
            order.truncate(top_k);
        }
        let weight = |token: usize| (f64::from(logits[token] - largest) / temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(|&token| weight(token)).collect();
        if top_p < 1.0 {
            let wanted = top_p * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let before = weights.iter().take_while(|&&weight| {
                sum += weight;
                sum < wanted
            });
            let kept = before.count() + 1;
            weights.truncate(kept);
        }
        let mut rest = uniform * weights.iter().sum::<f64>();
        for (&token, weight) in order.iter().zip(&weights) {
            rest -= weight;
            if rest < 0.0 {
                return Ok(token);
            }
        }
        // Rounding may leave a rest.
        Ok(order[weights.len() - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_the_probabilities() {
        let logits = [0.3f32, -1.0, 2.0, f32::NEG_INFINITY, 0.3];
        let draws = 100_000;
        for (options, allowed) in [
            (SampleOptions::default(), vec![0, 1, 2, 4]),
            (SampleOptions { temperature: 0.5, ..SampleOptions::default() }, vec![0, 1, 2, 4]),
            (SampleOptions { top_k: 2, ..SampleOptions::default() }, vec![2, 0]),
            (SampleOptions { top_p: 0.8, ..SampleOptions::default() }, vec![2, 0]),
            (SampleOptions { top_p: 1e-9, ..SampleOptions::default() }, vec![2]),
        ] {
            let mut counts = [0.0; 5];
            for i in 0..draws {
                let uniform = (f64::from(i) + 0.5) / f64::from(draws);
                counts[options.draw(&logits, uniform).unwrap()] += 1.0 / f64::from(draws);
            }
            let weight = |token: usize| (f64::from(logits[token]) / options.temperature).exp();
            let total: f64 = allowed.iter().map(|&token| weight(token)).sum();
            for (token, count) in counts.iter().enumerate() {
                let expected = if allowed.contains(&token) { weight(token) / total } else { 0.0 };
                assert!((count - expected).abs() < 1e-4, "{options:?}: token {token} {count} {expected}");
            }
        }
    }

    #[test]
    fn mistakes_are_errors() {
        let error = |options: SampleOptions, logits: &[f32], uniform: f64| {
            options.draw(logits, uniform).unwrap_err().to_string()
        };
        let all = SampleOptions::default();
        assert!(error(SampleOptions { temperature: -1.0, ..all }, &[0.0], 0.0).contains("temperature"));
        assert!(error(SampleOptions { top_p: 0.0, ..all }, &[0.0], 0.0).contains("top_p"));
        assert!(error(all, &[0.0], 1.0).contains("uniform"));
        for logits in [vec![], vec![f32::NAN, 0.0], vec![f32::NEG_INFINITY; 2], vec![f32::INFINITY, 0.0]] {
            assert!(error(all, &logits, 0.0).contains("logits"));
        }
    }
}
