//! How far a long command has come, on standard error: a bar in a terminal, a plain line now and then elsewhere.

use std::fmt::Display;
use std::time::{Duration, Instant};

use console::{Term, measure_text_width, style, truncate_str};

use super::notes::note;

/// Time between plain lines, and between drawings of the bar.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);
const BAR_INTERVAL: Duration = Duration::from_millis(125);

/// Columns of the bar, and those that a window must have for it: narrower ones get the text alone.
const BAR: usize = 32;
const ROOM_FOR_BAR: usize = 100;

/// The display. Dropping it removes the bar.
pub struct Progress {
    /// Where the bar is drawn; elsewhere plain lines are written.
    terminal: Option<Term>,
    shown: Option<Instant>,
    drawn: usize,
}

impl Progress {
    pub fn new() -> Self {
        let terminal = Term::buffered_stderr();
        // A terminal that calls itself dumb, or nothing, cannot move its cursor.
        let dumb = std::env::var_os("TERM").is_some_and(|term| term.is_empty() || term == "dumb");
        let terminal = (terminal.is_term() && !dumb).then_some(terminal);
        Self { terminal, shown: None, drawn: 0 }
    }

    /// Shows that `done` of `total` are done, where the total is known. The last one always gets a plain line.
    pub fn update(&mut self, done: usize, total: Option<usize>, message: impl Display) {
        let interval = if self.terminal.is_some() { BAR_INTERVAL } else { PLAIN_INTERVAL };
        if total != Some(done) && self.shown.is_some_and(|at| at.elapsed() < interval) {
            return;
        }
        self.shown = Some(Instant::now());
        if self.terminal.is_none() {
            return note(message);
        }
        self.clear();
        if let Some(terminal) = &self.terminal {
            let columns = columns(terminal);
            let share = total.map_or(0.0, |total| done as f64 / total.max(1) as f64);
            let line = line(share, &message.to_string(), columns);
            self.drawn = measure_text_width(&line);
            // The display is a help, and no reason to fail.
            let _ = terminal.write_str(&line).and_then(|()| terminal.flush());
        }
    }

    pub fn note(&mut self, line: impl Display) {
        self.clear();
        note(line);
    }

    fn clear(&mut self) {
        let Some(terminal) = self.terminal.as_ref().filter(|_| self.drawn > 0) else { return };
        // A window that became narrower has broken the line into several rows.
        let rows_above = (self.drawn - 1) / columns(terminal);
        let above =
            || (0..rows_above).try_for_each(|_| terminal.move_cursor_up(1).and_then(|()| terminal.clear_line()));
        let _ = terminal.clear_line().and_then(|()| above()).and_then(|()| terminal.flush());
        self.drawn = 0;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn columns(terminal: &Term) -> usize {
    usize::from(terminal.size().1).max(1)
}

/// Bar and text, shorter than the window: the terminal adds `^C`, and a line that fills the window would move the cursor on.
fn line(share: f64, message: &str, columns: usize) -> String {
    let room = columns.saturating_sub(3);
    if room == 0 {
        return String::new();
    }
    let message = truncate_str(message, room, "…");
    if columns < ROOM_FOR_BAR {
        return message.into_owned();
    }
    let filled = (share.clamp(0.0, 1.0) * BAR as f64) as usize;
    let (filled, empty) = ("━".repeat(filled), "─".repeat(BAR - filled));
    let bar = format!("{}{} {message}", style(filled).cyan().for_stderr(), style(empty).dim().for_stderr());
    truncate_str(&bar, room, "…").into_owned()
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
    use super::*;

    #[test]
    fn a_line_is_shorter_than_the_window() {
        let message = "step 12345/100000  loss 0.123  12345 examples/s  10 min 14 s left";
        for columns in 1..200 {
            let line = line(0.5, message, columns);
            assert!(measure_text_width(&line) <= columns.saturating_sub(3), "{columns}: {line}");
            assert_eq!(line.contains('━'), columns >= ROOM_FOR_BAR);
            assert!(columns < 70 || line.contains("14 s left") || columns >= ROOM_FOR_BAR, "{columns}: {line}");
        }
        assert!(line(2.0, message, 120).ends_with("14 s left"));
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(duration(4.6), "5 s");
        assert_eq!(duration(185.0), "3 min 05 s");
        assert_eq!(duration(7260.0), "2 h 01 min");
    }
}
