//! Runs one check over many cases and tells of all that failed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::case::Case;
use crate::compare::Failure;
use crate::subject::Subject;

/// One check.
pub type Check = fn(&Subject, &Case) -> Result<(), Failure>;

/// Failures that are printed in full.
const SHOWN: usize = 6;

/// What went wrong, or nothing.
pub fn failures<'a>(check: Check, trials: impl IntoIterator<Item = (&'a Subject, &'a Case)>) -> (usize, Vec<String>) {
    let mut total = 0;
    let mut failures = Vec::new();
    for (subject, case) in trials {
        total += 1;
        let verdict = catch_unwind(AssertUnwindSafe(|| check(subject, case))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(Failure(format!("panicked: {}", text.unwrap_or_default())))
        });
        if let Err(failure) = verdict {
            failures.push(format!("{failure}\n    {}\n    {case:?}", subject.label));
        }
    }
    (total, failures)
}

/// Panics with every failure's count and the first few in full; a check over no case fails too.
pub fn assert_all<'a>(check: Check, trials: impl IntoIterator<Item = (&'a Subject, &'a Case)>) {
    let (total, failures) = failures(check, trials);
    assert!(total > 0, "no case to check");
    assert!(
        failures.is_empty(),
        "{} of {total} cases failed:\n\n{}",
        failures.len(),
        failures.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("\n\n")
    );
}
