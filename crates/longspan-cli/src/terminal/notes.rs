//! Lines on standard error.

use std::fmt::Display;
use std::io::Write;

/// Writes a line to standard error. A closed standard error is not an error.
pub fn note(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Says it where there are some.
pub fn note_some(count: usize, line: impl FnOnce(usize) -> String) {
    if count > 0 {
        note(line(count));
    }
}
