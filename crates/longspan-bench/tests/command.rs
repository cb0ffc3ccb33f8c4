//! `longspan-bench` at sizes that take a second or two.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A folder that the command runs in.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longspan-bench"));
        command.args(arguments).current_dir(self.0.path()).stdin(Stdio::null()).output().expect("the command starts")
    }

    /// Runs the command, which must succeed; its standard output.
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Runs the command, which must fail with one line that has all of `parts`, and no numbers.
    fn fails(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.run(arguments);
        let error = String::from_utf8(output.stderr.clone()).expect("UTF-8");
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{arguments:?}: {output:?}");
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    }
}

/// A short sweep over few and small heads.
const SHORT: [&str; 9] = ["--quick", "--max-length", "128", "--heads", "2", "--dim", "16", "--seconds", "0.001"];

fn short<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SHORT.iter().chain(more).copied().collect()
}

#[test]
fn quick_prints_goals_growth_and_tables() {
    let place = Place::new();
    let printed = place.ok(&short(&[]));
    for part in ["goals: causal forward", "goal 1.5", "goal 2.5", "growth of kernelized", "R²", "causal decode"] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    assert!(!place.path("runs").exists(), "--quick alone writes nothing");
    // The line of the machine has the processor's name in it.
    for line in printed.lines().filter(|line| !line.contains(" cores, ")) {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn results_are_files_and_can_be_drawn_again() {
    let place = Place::new();
    let printed =
        place.ok(&short(&["--json", "--figures", "--mechanisms", "kernelized,shaw-16", "--out", "new/bench"]));
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    for row in rows {
        assert!(row["seconds"]["median"].as_f64().is_some_and(|seconds| seconds > 0.0), "{row}");
        assert!(row["extra_bytes"].as_u64().is_some(), "{row}");
    }
    let lengths = |set: &str| rows.iter().filter(|row| row["set"] == set).count();
    assert!(lengths("sweep") > 0 && lengths("figure-1") > 0 && lengths("figure-2") > 0 && lengths("figure-3") > 0);
    let forward = rows.iter().find(|row| row["pass"] == "forward" && row["length"] == 128).expect("a long row");
    assert!(forward["extra_bytes"].as_u64() > Some(0), "the command counts memory: {forward}");
    for name in ["bench.html", "bench.csv", "bench.json", "figure-1.svg", "figure-1.png", "sweep-causal-forward.png"] {
        assert!(place.path("new/bench").join(name).is_file(), "{name}");
    }
    let csv = place.read("new/bench/bench.csv");
    assert_eq!(csv.lines().count(), rows.len() + 1);
    place.ok(&["--draw", "new/bench/bench.json", "--out", "again"]);
    assert_eq!(place.read("again/bench.html"), place.read("new/bench/bench.html"));
    assert_eq!(place.read("again/figure-2.svg"), place.read("new/bench/figure-2.svg"));
}

#[test]
fn mistakes_are_one_line_and_measure_nothing() {
    let place = Place::new();
    place.fails(&short(&["--mechanisms", "kernelised"]), &["unknown mechanism", "kernelised", "known are kernelized"]);
    place.fails(&["--quick", "--heads", "0"], &["--heads 0", "at least 1"]);
    place.fails(&["--threads", "0"], &["--threads 0", "at least 1"]);
    place.fails(&["--min-length", "64", "--max-length", "32"], &["--max-length 32"]);
    place.fails(&["--draw", "none.json"], &["none.json"]);
    fs::write(place.path("broken.json"), "{\"rows\": []").unwrap();
    place.fails(&["--draw", "broken.json"], &["broken.json", "not a report of longspan-bench"]);
    fs::write(place.path("file"), "").unwrap();
    place.fails(&short(&["--out", "file/bench"]), &["file/bench"]);
}

#[test]
fn mechanisms_are_listed() {
    let listed = Place::new().ok(&["--mechanisms", "list"]);
    assert!(listed.lines().count() >= 5 && listed.contains("shaw-64") && listed.contains("on request"), "{listed}");
}

#[test]
fn a_whole_model_is_measured() {
    let place = Place::new();
    let small = ["--model", "--min-length", "16", "--max-length", "64", "--mechanisms", "shaw", "--seconds", "0.01"];
    let printed = place.ok(&small);
    for part in ["own products", "× read", "Shares of a step:", "shaw, 16: ", "feed-forward "] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    let json = place.ok(&[&small[..], &["--json", "--recompute"]].concat());
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(2));
    assert!(json["rows"][1]["token"].as_f64().is_some_and(|seconds| seconds > 0.0));
    place.fails(&["--model", "--mechanisms", "nothing"], &["--mechanisms nothing: no attention of models"]);
}
