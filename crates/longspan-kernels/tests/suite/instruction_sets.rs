//! The choice of an instruction set is made once a process, so each gets a process of its own.

use std::process::{Command, Output};

/// The instruction sets that this processor has, the one that is chosen without being asked last.
fn available() -> Vec<&'static str> {
    let mut names = vec!["portable"];
    if cfg!(target_arch = "aarch64") {
        names.push("neon");
    }
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            names.push("avx2");
        }
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
        {
            names.push("avx512");
        }
    }
    names
}

/// Of its cases, the share that another instruction set checks where `LONGSPAN_EVERY` says nothing else: a third.
const EVERY: &str = "3";

/// Runs tests of this suite in a process with `LONGSPAN_SIMD` set.
fn run_with(instruction_set: &str, arguments: &[&str]) -> Output {
    let test = std::env::current_exe().expect("this test is a file");
    let mut command = Command::new(test);
    let every = std::env::var_os("LONGSPAN_EVERY").unwrap_or_else(|| EVERY.into());
    command.args(arguments).env("LONGSPAN_SIMD", instruction_set).env("LONGSPAN_EVERY", every);
    command.output().expect("this test can be started again")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Tests whose answer does not depend on registers, or that take long and say little more about them.
const SKIPPED: [&str; 8] = [
    "instruction_sets",
    "properties",
    "choice",
    "threads",
    "long",
    "refused",
    "published",
    "state_gradients_are_difference_quotients",
];

/// The rest of the suite, which this process runs with the widest registers, with all the others.
#[test]
fn every_other_instruction_set_passes() {
    if std::env::var_os("LONGSPAN_SIMD").is_some() {
        return;
    }
    let names = available();
    for name in &names[..names.len() - 1] {
        let output = run_with(name, &SKIPPED.map(|test| ["--skip", test]).concat());
        let text = text(&output);
        assert!(output.status.success() && text.contains(" passed"), "LONGSPAN_SIMD={name}:\n{text}");
    }
}

#[test]
fn an_unknown_instruction_set_is_an_error_that_names_it() {
    let output = run_with("mmx", &["--exact", "softmax::forward_is_the_definition"]);
    let text = text(&output);
    assert!(!output.status.success(), "LONGSPAN_SIMD=mmx was taken");
    assert!(text.contains("instruction set") && text.contains("mmx") && text.contains("portable"), "{text}");
}
