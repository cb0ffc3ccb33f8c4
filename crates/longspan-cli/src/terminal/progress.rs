//! How far a long command has come, on standard error: a bar in a terminal, a plain line now and then elsewhere.

use std::fmt::Display;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::notes::note;

/// Time between plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// The display. Dropping it removes the bar.
pub struct Progress {
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
}

impl Progress {
    /// Nothing is shown yet.
    pub fn new() -> Self {
        // A terminal that calls itself dumb cannot move its cursor.
        let interactive = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let bar = interactive.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(8));
            if let Ok(style) = ProgressStyle::with_template("{bar:32.cyan/dim} {msg}") {
                bar.set_style(style.progress_chars("━━─"));
            }
            bar
        });
        Self { bar, last_line: None }
    }

    /// Shows that `done` of `total` are done, where the total is known. The last one always gets a plain line.
    pub fn update(&mut self, done: usize, total: Option<usize>, message: impl Display) {
        if let Some(bar) = &self.bar {
            if let Some(total) = total {
                bar.set_length(total as u64);
            }
            bar.set_position(done as u64);
            bar.set_message(message.to_string());
        } else if total == Some(done) || self.last_line.is_none_or(|at| at.elapsed() >= PLAIN_INTERVAL) {
            self.last_line = Some(Instant::now());
            note(message);
        }
    }

    /// Prints a line above the bar.
    pub fn note(&self, line: impl Display) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(line)),
            None => note(line),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
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
