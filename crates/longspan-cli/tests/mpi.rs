//! Training over the processes of `mpirun`: the same run as one process's, to rounding, and the same bits every time.
#![cfg(feature = "mpi")]

mod support;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::{Place, text};

/// `mpirun` with so many processes of the command, on a machine that may have fewer cores and in a container; each after a line
/// of shell.
fn mpirun(place: &Place, count: usize, line: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let line = format!("{line}\nexec \"$0\" \"$@\"");
    command.args(["--oversubscribe", "-n", &count.to_string(), "sh", "-c", &line, env!("CARGO_BIN_EXE_longspan")]);
    command.args(arguments).current_dir(place.path("")).stdin(Stdio::null());
    command
}

fn run(place: &Place, count: usize, arguments: &[&str]) -> Output {
    mpirun(place, count, "", arguments).output().expect("mpirun starts; Debian has it in openmpi-bin")
}

fn ok(place: &Place, count: usize, arguments: &[&str]) -> String {
    let output = run(place, count, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stderr)
}

/// The lines that start with `error:`, of which a failure has one.
fn error(output: &Output) -> String {
    let stderr = text(&output.stderr);
    assert!(!output.status.success(), "succeeded: {}", text(&output.stdout));
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    errors[0].to_string()
}

#[test]
fn processes_learn_what_one_learns() {
    let place = Place::new();
    let more = ["--set", "dropout=0"];
    place.ok(&place.train("alone", "12", &more));
    let alone = place.losses("alone");
    for count in [2, 3] {
        let (first, second) = (format!("first-{count}"), format!("second-{count}"));
        let notes = ok(&place, count, &place.train(&first, "12", &more));
        assert!(notes.contains(&format!("{count} processes")), "{notes}");
        ok(&place, count, &place.train(&second, "12", &more));
        assert_eq!(place.losses(&first), place.losses(&second));
        assert_eq!(
            place.read(&format!("{first}/model.safetensors")),
            place.read(&format!("{second}/model.safetensors"))
        );
        for ((step, loss), (_, expected)) in place.losses(&first).into_iter().zip(&alone) {
            let (loss, expected) = (f64::from_bits(loss), f64::from_bits(*expected));
            assert!((loss - expected).abs() < 2e-5 * expected, "step {step}: {loss} {expected}");
        }
        assert_eq!(place.losses(&first).len(), alone.len());
    }
    // Gone on with by another number of processes, and by one.
    ok(&place, 3, &["train", "--resume", "first-2", "--steps", "15"]);
    place.ok(&["train", "--resume", "first-2", "--steps", "18"]);
    assert_eq!(place.losses("first-2").len(), 18);
}

#[test]
fn wrong_starts_are_one_line() {
    let place = Place::new();
    place.write("novel.txt", "It was a dark and stormy night. ".repeat(200).as_bytes());
    for (arguments, parts) in [
        (vec!["train", "--pairs", "nowhere.tsv", "--out", "run"], "nowhere.tsv"),
        (vec!["train", "--text", "novel.txt", "--out", "run"], "start it without mpirun"),
        (vec!["train", "--pairs", "-", "--out", "run"], "standard input has one reader"),
    ] {
        let said = error(&run(&place, 2, &arguments));
        assert!(said.contains(parts), "{said}");
        assert!(!place.path("run").exists());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_with_other_data_is_named() {
    let place = Place::new();
    std::fs::create_dir(place.path("elsewhere")).expect("a folder");
    // A name that means another file in each process's folder.
    let train = ["train", "--pairs", "/proc/self/cwd/pairs.tsv", "--steps", "3", "--set", "workers=1"];
    let line = "[ $OMPI_COMM_WORLD_RANK = 0 ] || cd elsewhere";
    for (written, expected) in [(None, "rank 1: cannot"), (Some(b"a\tb\nb\tc\nc\td\n"), "is not what rank 0 has")] {
        if let Some(written) = written {
            place.write("elsewhere/pairs.tsv", written);
        }
        let out = if written.is_some() { "other" } else { "none" };
        let output = mpirun(&place, 2, line, &[&train[..], &["--out", out]].concat()).output().expect("mpirun starts");
        let said = error(&output);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_rank_that_is_killed_ends_all_and_the_run_goes_on() {
    let place = Place::new();
    let train = place.train("run", "100000", &["--set", "checkpoint_steps=20"]);
    let running =
        mpirun(&place, 3, "", &train).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun starts");
    place.wait_for_lines("run/metrics.jsonl", 45);
    let processes =
        text(&Command::new("pgrep").args(["-P", &running.id().to_string()]).output().expect("pgrep").stdout);
    let last = processes.lines().last().expect("a process of mpirun");
    let started = Instant::now();
    assert!(Command::new("kill").args(["-9", last]).status().expect("kill").success());
    let output = running.wait_with_output().expect("an end");
    assert!(started.elapsed() < Duration::from_secs(30) && !output.status.success());
    assert!(text(&output.stderr).contains("rank"), "{}", text(&output.stderr));
    let step = place.info("run")["step"].as_u64().expect("a step");
    assert!(step >= 40, "{step}");
    ok(&place, 2, &["train", "--resume", "run", "--steps", &(step + 3).to_string()]);
}
