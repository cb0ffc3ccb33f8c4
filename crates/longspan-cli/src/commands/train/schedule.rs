//! The learning rate of every step: up along a line, then down along half a cosine.

/// Steps that are timed where a run is given in minutes. Until then its end is not known, so the rate does not fall yet. The
/// same holds for a run given in steps, so that both can be the same run.
pub const TIMED_STEPS: usize = 20;

/// The rate of step `step` (from 0), relative to the largest: `(step+1)/warmup` while warming up, 1 until
/// [`TIMED_STEPS`] at least, then `(1 + cos(π·x))/2` with `x` from 0 to 1 at the end of the run.
pub fn relative_rate(step: usize, warmup: usize, steps: usize) -> f64 {
    let flat = warmup.max(TIMED_STEPS);
    if step < warmup {
        (step + 1) as f64 / warmup as f64
    } else if step < flat || steps <= flat {
        1.0
    } else {
        let x = (step - flat) as f64 / (steps - flat) as f64;
        0.5 * (1.0 + (std::f64::consts::PI * x.min(1.0)).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_stays_and_falls() {
        let rate = |step| relative_rate(step, 100, 1100);
        assert_eq!(rate(0), 0.01);
        assert_eq!(rate(99), 1.0);
        assert_eq!(rate(100), 1.0);
        assert!((rate(600) - 0.5).abs() < 1e-12);
        assert!(rate(1099) > 0.0 && rate(1099) < 1e-4);
        assert!((0..1099).all(|step| rate(step) > 0.0));
    }

    #[test]
    fn timed_steps_do_not_depend_on_the_length_of_the_run() {
        for warmup in [0, 5, 20, 300] {
            for step in 0..TIMED_STEPS {
                assert_eq!(relative_rate(step, warmup, 50), relative_rate(step, warmup, 5_000_000));
            }
        }
        assert_eq!(relative_rate(3, 0, 2), 1.0);
    }
}
