//! Kernels against the machine's own matrix product and copy, measured by turns in one process; growth with length.
//!
//! `cargo bench -p longspan-bench --bench attention` prints tables, `-- --json` one JSON object, `-- --quick` stops at 16,384 tokens.
//! `longspan-bench` measures more and draws it. Nothing is reported for a kernel that fails its check first.

use std::alloc::System;
use std::process::ExitCode;

use longspan_bench::goals::{self, GoalSettings};
use longspan_bench::memory::Counting;
use longspan_bench::registry::registry;
use longspan_bench::report::Report;
use longspan_bench::{Error, on_threads};

#[global_allocator]
static ALLOCATOR: Counting<System> = Counting(System);

/// As the project's targets say.
const THREADS: usize = 2;

fn run(json: bool, quick: bool) -> Result<String, Error> {
    let settings = GoalSettings::default();
    let settings = if quick { settings.up_to(1 << 14) } else { GoalSettings { rounds: 61, ..settings } };
    let goals = on_threads(THREADS, || goals::measure(&registry(), &settings, &mut goals::go_on))??;
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let report =
        Report::new(format!("cargo bench -p longspan-bench --bench attention -- {command}"), goals, Vec::new());
    if json { report.to_json() } else { Ok(report.to_text()) }
}

fn main() -> ExitCode {
    let flag = |name: &str| std::env::args().any(|argument| argument == name);
    match run(flag("--json"), flag("--quick")) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
