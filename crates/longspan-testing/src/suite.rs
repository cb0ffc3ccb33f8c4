//! Runs one check over many cases and reports all that failed.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use longspan_kernels::{Dims, KernelizedAttention};

use crate::case::{Case, Inputs};
use crate::compare::Failure;
use crate::execute;
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

/// The number of trials and the failures among them, each with the trial's name. A panic is a failure too.
pub fn failures<T>(
    trials: impl IntoIterator<Item = T>,
    name: impl Fn(&T) -> String,
    check: impl Fn(&T) -> Result<(), Failure>,
) -> (usize, Vec<String>) {
    let mut total = 0;
    let mut failures = Vec::new();
    let mut sample = Sample::default();
    for trial in trials.into_iter().filter(|_| sample.takes_next()) {
        total += 1;
        let verdict = catch_unwind(AssertUnwindSafe(|| check(&trial))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(Failure(format!("panicked: {}", text.unwrap_or_default())))
        });
        if let Err(failure) = verdict {
            failures.push(format!("{failure}\n    {}", name(&trial)));
        }
    }
    (total, failures)
}

/// Panics with the number of failures and the first few in full. A check over nothing fails too.
pub fn assert_each<T>(
    trials: impl IntoIterator<Item = T>,
    name: impl Fn(&T) -> String,
    check: impl Fn(&T) -> Result<(), Failure>,
) {
    let (total, failures) = failures(trials, name, check);
    assert!(total > 0, "no case to check");
    assert!(
        failures.is_empty(),
        "{} of {total} cases failed:\n\n{}",
        failures.len(),
        failures.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("\n\n")
    );
}

/// Runs a check over cases with a subject each.
pub fn assert_all<'a>(check: Check, trials: impl IntoIterator<Item = (&'a Subject, &'a Case)>) {
    let name = |(subject, case): &(&Subject, &Case)| format!("{}\n    {case:?}", subject.label);
    assert_each(trials, name, |(subject, case)| check(subject, case));
}

/// The same over kernelized attention.
pub fn over_kernelized(cases: &[(KernelizedAttention, Case)], check: Check) {
    let subjects: Vec<Subject> = cases.iter().map(|(attention, _)| Subject::kernelized(attention)).collect();
    assert_all(check, subjects.iter().zip(cases.iter().map(|(_, case)| case)));
}

/// The same for a check that makes its own subjects of a mechanism.
pub fn over_mechanisms<M: Debug>(cases: &[(M, Case)], check: fn(&M, &Case) -> Result<(), Failure>) {
    let name = |(mechanism, case): &&(M, Case)| format!("{mechanism:?}\n    {case:?}");
    assert_each(cases, name, |(mechanism, case)| check(mechanism, case));
}

/// What is added to each number of a key, by its token.
pub type Level = fn(usize) -> f64;

/// Keys far beyond what a float can hold the exponential of: the level of each of [`EXTREME_LENGTH`].
const EXTREME: [(&str, Level); 7] = [
    ("all at 10,000", |_| 1e4),
    ("all at −10,000", |_| -1e4),
    ("at 10,000 and −10,000 by turns", |j| if j % 3 == 0 { 1e4 } else { -1e4 }),
    ("rising", |j| j as f64 * 4.0),
    ("falling", |j| -(j as f64) * 4.0),
    ("at 120 for key 70", |j| if j == 70 { 120.0 } else { 0.0 }),
    ("at 10,000 for the last", |j| if j == EXTREME_LENGTH - 1 { 1e4 } else { 0.0 }),
];

/// Tokens of calls with extreme keys.
pub const EXTREME_LENGTH: usize = 150;

/// Runs a check over calls of [`EXTREME_LENGTH`] tokens with extreme keys, causal and bidirectional.
pub fn over_extreme_keys(
    subjects: &[Subject],
    [head_dim, value_dim]: [usize; 2],
    check: impl Fn(&Subject, &Case, &Inputs<f64>) -> Result<(), Failure>,
) {
    let dims = Dims { batch: 2, heads: 2, kv_heads: 1, head_dim, value_dim, ..Dims::square(1, 1, EXTREME_LENGTH, 1) };
    let mut trials = Vec::new();
    for subject in subjects {
        for (keys, level) in EXTREME {
            trials.extend([true, false].map(|causal| (subject, keys, level, causal)));
        }
    }
    let name = |&(subject, keys, _, causal): &(&Subject, &str, Level, bool)| {
        format!("keys {keys}, causal {causal}\n    {}", subject.label)
    };
    assert_each(trials, name, |&(subject, _, level, causal)| {
        let case = Case { seed: 77, ..Case::new(dims, causal) };
        let mut inputs = execute::random(subject, &case);
        inputs.raise_keys(&dims, level);
        check(subject, &case, &inputs)
    });
}

/// Tests, a line or two each: a name, and which cases go through which check by `$over`.
#[macro_export]
macro_rules! tests {
    ($over:path; $($(#[$doc:meta])* $name:ident: $($cases:expr => $check:expr),+;)+) => {
        $(
            $(#[$doc])*
            #[test]
            fn $name() {
                $($over(&$cases, $check);)+
            }
        )+
    };
}

/// The tests that are the same for every mechanism, each in `f32` and in `f64`: isolation, layouts of memory, and
/// states. `$over` runs a check over the cases that `$cases(seed, count, lengths)` and `$streams(seed, count)` draw; `$sums` over those of
/// mechanisms whose states add up, if not all do.
#[macro_export]
macro_rules! shared_tests {
    ($over:path, $cases:path, $streams:path) => {
        $crate::shared_tests! { $over, $over, $cases, $streams }
    };
    ($over:path, $sums:path, $cases:path, $streams:path) => {
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
            gradients_pass_through_states: state_gradients, 43 200, 44 200;
        }
        $crate::shared_tests! { $sums, $streams;
            states_add_up: streaming, 41 200, 42 200;
        }
    };
    ($over:path, $drawn:expr;
        $($name:ident: $module:ident, $seed:literal $count:literal, $seed64:literal $count64:literal;)*) => {
        $crate::tests! { $over; $(
            $name:
                ($drawn)($seed, $count) => $crate::$module::$name::<f32>,
                ($drawn)($seed64, $count64) => $crate::$module::$name::<f64>;
        )* }
    };
}
