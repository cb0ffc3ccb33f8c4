//! Lines on standard error.

use std::collections::HashSet;
use std::fmt::Display;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

static SAID: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// Writes a line to standard error, once: a file may be read more than once. A closed standard error is not an error.
pub fn note(line: impl Display) {
    let line = line.to_string();
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.get_or_insert_default().insert(line.clone()) {
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

/// Says it where there are some.
pub fn note_some(count: usize, line: impl FnOnce(usize) -> String) {
    if count > 0 {
        note(line(count));
    }
}
