//! The suite in small over every instruction set: the choice is made once a process, so each gets a process of its own.

use std::process::Command;

use longspan_kernels::KernelizedAttention;
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{Case, Subject, accuracy, grid, isolation, memory};

#[test]
fn small_suite() {
    let over = |cases: Vec<(KernelizedAttention, Case)>, check: Check| {
        let subjects: Vec<Subject> = cases.iter().map(|(attention, _)| Subject::kernelized(attention)).collect();
        assert_all(check, subjects.iter().zip(cases.iter().map(|(_, case)| case)));
    };
    over(grid::kernelized(51, 100, &grid::LENGTHS), accuracy::forward::<f32>);
    over(grid::kernelized(52, 100, &grid::LENGTHS), accuracy::forward::<f64>);
    over(grid::kernelized(53, 30, &grid::SHORT_LENGTHS), accuracy::gradient);
    over(grid::kernelized(54, 100, &grid::LENGTHS), accuracy::gradient_in_singles);
    over(grid::kernelized(55, 40, &grid::LENGTHS), memory::poison_does_not_matter::<f32>);
    over(grid::kernelized(56, 40, &grid::LENGTHS), isolation::rows_are_independent::<f32>);
}

/// Runs [`small_suite`] in a process with `LONGSPAN_SIMD` set; its output and whether it passed.
fn with_instruction_set(name: &str) -> (bool, String) {
    let test = std::env::current_exe().expect("this test is a file");
    let output = Command::new(test)
        .args(["--exact", "small_suite", "--nocapture"])
        .env("LONGSPAN_SIMD", name)
        .output()
        .expect("this test can be started again");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

#[test]
fn every_instruction_set_passes() {
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
    for name in names {
        let (passed, text) = with_instruction_set(name);
        assert!(passed && text.contains("1 passed"), "LONGSPAN_SIMD={name}:\n{text}");
    }
}

#[test]
fn an_unknown_instruction_set_is_an_error_that_names_it() {
    let (passed, text) = with_instruction_set("mmx");
    assert!(!passed, "LONGSPAN_SIMD=mmx was taken");
    assert!(text.contains("instruction set") && text.contains("mmx") && text.contains("portable"), "{text}");
}
