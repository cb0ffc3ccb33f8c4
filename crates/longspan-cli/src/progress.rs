//! How far training has come: a bar in a terminal, a plain line now and then elsewhere. All on standard error.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Seconds between plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Writes a line to standard error. Where nobody reads it any more, that is no reason to stop, let alone to panic.
pub fn note(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The display of a training run.
pub struct Progress {
    bar: Option<ProgressBar>,
    started: Instant,
    first_step: usize,
    last_line: Option<Instant>,
}

/// What there is to show after a step.
#[derive(Debug, Clone, Copy)]
pub struct Status {
    /// Steps taken.
    pub step: usize,
    /// Steps to take, once that is known.
    pub steps: Option<usize>,
    /// The mean loss of the last steps.
    pub loss: f64,
    /// Pairs per second, of late.
    pub pairs_per_second: f64,
}

impl Progress {
    /// Starts the display at `step`.
    pub fn new(step: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(8));
            let template = "{bar:32.cyan/dim} {msg}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("━━─"));
            }
            bar
        });
        Self { bar, started: Instant::now(), first_step: step, last_line: None }
    }

    /// Shows a step.
    pub fn update(&mut self, status: &Status) {
        if let Some(bar) = &self.bar {
            if let Some(steps) = status.steps {
                bar.set_length(steps as u64);
            }
            bar.set_position(status.step as u64);
            bar.set_message(self.describe(status));
            return;
        }
        let last = status.steps == Some(status.step);
        if last || self.last_line.is_none_or(|at| at.elapsed() >= PLAIN_INTERVAL) {
            self.last_line = Some(Instant::now());
            note(self.describe(status));
        }
    }

    fn describe(&self, status: &Status) -> String {
        let taken = status.step - self.first_step;
        let left = match status.steps {
            Some(steps) if taken > 0 => {
                let seconds = self.started.elapsed().as_secs_f64() / taken as f64 * (steps - status.step) as f64;
                format!("{} left", duration(seconds))
            }
            _ => "timing the first steps".into(),
        };
        let steps = status.steps.map_or("?".into(), |steps| steps.to_string());
        format!("step {}/{steps}  loss {:.3}  {:.0} pairs/s  {left}", status.step, status.loss, status.pairs_per_second)
    }

    /// Prints a line above the bar.
    pub fn note(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(line)),
            None => note(line),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Seconds as `42 s` or `3 min 05 s`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    if whole < 60 {
        format!("{whole} s")
    } else if whole < 3600 {
        format!("{} min {:02} s", whole / 60, whole % 60)
    } else {
        format!("{} h {:02} min", whole / 3600, whole % 3600 / 60)
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_read_well() {
        assert_eq!(duration(4.6), "5 s");
        assert_eq!(duration(185.0), "3 min 05 s");
        assert_eq!(duration(7260.0), "2 h 01 min");
    }
}
