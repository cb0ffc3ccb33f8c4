//! Runs one check over many cases and reports all that failed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::case::Case;
use crate::compare::Failure;
use crate::subject::Subject;

/// One check.
pub type Check = fn(&Subject, &Case) -> Result<(), Failure>;

/// Failures that are printed in full.
const SHOWN: usize = 6;

/// Which cases are checked. With `LONGSPAN_EVERY=N` about one in N, the first always: for processors that are emulated, and for
/// instruction sets beside the widest. Spread by a hash, since subjects often take turns with a period.
#[derive(Default)]
pub struct Sample(u64);

impl Sample {
    /// Whether the next case is checked.
    pub fn takes_next(&mut self) -> bool {
        let every = std::env::var("LONGSPAN_EVERY").ok().and_then(|n| n.parse().ok()).filter(|&n| n > 0).unwrap_or(1);
        let case = self.0;
        self.0 += 1;
        let hash = case.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        case == 0 || hash.is_multiple_of(every)
    }
}

/// The number of cases and the failures among them. A panic is a failure too.
pub fn failures<'a>(check: Check, trials: impl IntoIterator<Item = (&'a Subject, &'a Case)>) -> (usize, Vec<String>) {
    let mut total = 0;
    let mut failures = Vec::new();
    let mut sample = Sample::default();
    for (subject, case) in trials.into_iter().filter(|_| sample.takes_next()) {
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

/// Panics with the number of failures and the first few in full. A check over no cases fails too.
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

/// The tests that are the same for every mechanism, each in `f32` and in `f64`: isolation, layouts of memory, and
/// states. `$over` runs a check over the cases that `$cases(seed, count, lengths)` and `$streams(seed, count)` draw.
#[macro_export]
macro_rules! shared_tests {
    ($over:path, $cases:path, $streams:path) => {
        $crate::shared_tests! { $over, |seed, count| $cases(seed, count, &$crate::grid::LENGTHS);
            unseen_keys_do_not_matter: isolation, 17 150, 18 100;
            rows_are_independent: isolation, 19 150, 20 100;
            padding_does_not_matter: isolation, 21 200, 22 100;
            poison_does_not_matter: memory, 27 200, 28 200;
            strides_do_not_matter: memory, 29 200, 30 200;
        }
        $crate::shared_tests! { $over, $streams;
            pieces_make_the_whole: streaming, 31 200, 32 200;
            states_are_values: streaming, 33 100, 34 100;
            lengths_end_the_sequence: streaming, 35 100, 36 100;
            ignored_keys_keep_their_place: streaming, 37 100, 38 100;
            states_add_up: streaming, 41 200, 42 200;
            gradients_pass_through_states: state_gradients, 43 200, 44 200;
        }
    };
    ($over:path, $drawn:expr;
        $($name:ident: $module:ident, $seed:literal $count:literal, $seed64:literal $count64:literal;)*) => {
        $(
            #[test]
            fn $name() {
                $over(&($drawn)($seed, $count), $crate::$module::$name::<f32>);
                $over(&($drawn)($seed64, $count64), $crate::$module::$name::<f64>);
            }
        )*
    };
}
