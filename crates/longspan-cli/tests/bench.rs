//! `longspan bench` at sizes that take a second or two.

mod support;

use serde_json::Value;
use support::{Place, text};

/// A short sweep over few and small heads.
const SHORT: [&str; 10] =
    ["bench", "--quick", "--max-length", "128", "--heads", "2", "--dim", "16", "--seconds", "0.001"];

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
    let names = place.names("new/bench");
    for name in ["bench.html", "bench.csv", "bench.json", "figure-1.svg", "figure-1.png", "sweep-causal-forward.png"] {
        assert!(names.iter().any(|found| found == name), "{name} is not in {names:?}");
    }
    let csv = text(&place.read("new/bench/bench.csv"));
    assert_eq!(csv.lines().count(), rows.len() + 1);
    place.ok(&["bench", "--draw", "new/bench/bench.json", "--out", "again"]);
    assert_eq!(place.read("again/bench.html"), place.read("new/bench/bench.html"));
    assert_eq!(place.read("again/figure-2.svg"), place.read("new/bench/figure-2.svg"));
}

#[test]
fn mistakes_are_one_line_and_measure_nothing() {
    let place = Place::new();
    place.fails(&short(&["--mechanisms", "kernelised"]), &["unknown mechanism", "kernelised", "known are kernelized"]);
    place.fails(&["bench", "--quick", "--heads", "0"], &["--heads 0", "at least 1"]);
    place.fails(&["bench", "--threads", "0"], &["--threads 0", "at least 1"]);
    place.fails(&["bench", "--min-length", "64", "--max-length", "32"], &["--max-length 32"]);
    place.fails(&["bench", "--draw", "none.json"], &["none.json"]);
    place.write("broken.json", b"{\"rows\": []");
    place.fails(&["bench", "--draw", "broken.json"], &["broken.json", "not a report of longspan bench"]);
    place.write("file", b"");
    place.fails(&short(&["--out", "file/bench"]), &["file/bench"]);
}

#[test]
fn mechanisms_are_listed() {
    let listed = Place::new().ok(&["bench", "--mechanisms", "list"]);
    assert!(listed.lines().count() >= 5 && listed.contains("shaw-64") && listed.contains("on request"), "{listed}");
}

#[test]
fn a_whole_model_is_measured() {
    let place = Place::new();
    let small =
        ["bench", "--model", "--min-length", "16", "--max-length", "64", "--mechanisms", "shaw", "--seconds", "0.01"];
    let printed = place.ok(&small);
    for part in ["own products", "× read", "Shares of a step:", "shaw, 16: ", "feed-forward "] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    let json = place.json(&[&small[..], &["--json", "--recompute"]].concat());
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(2));
    assert!(json["rows"][1]["token"].as_f64().is_some_and(|seconds| seconds > 0.0));
    place.fails(&["bench", "--model", "--mechanisms", "nothing"], &["--mechanisms nothing: no attention of models"]);
}
