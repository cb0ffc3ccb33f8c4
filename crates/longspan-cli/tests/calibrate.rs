//! `longspan calibrate` on two lengths, and what becomes of its file.

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;
use support::{Place, failed, signal, text};

/// The file's usual place, below the folder that [`Place`] names as that of settings.
const USUAL: &str = "settings/longspan/calibration.toml";

/// A calibration that takes a moment.
const SHORT: [&str; 7] = ["calibrate", "--lengths", "4,40", "--widths", "8", "--seconds", "0.1"];

fn short<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SHORT.iter().chain(more).copied().collect()
}

/// A file as the command writes it.
fn calibration(place: &Place) -> String {
    let explained: Value = serde_json::from_str(&place.ok(&["explain", "--json"])).expect("JSON");
    assert_eq!(explained["rates"]["source"], "built-in");
    place.ok(&short(&["--out", "made.toml"]));
    text(&place.read("made.toml"))
}

fn rates(place: &Place, variable: Option<&str>) -> Value {
    let mut command = place.command(&["explain", "--json"]);
    if let Some(path) = variable {
        command.env("LONGSPAN_CALIBRATION", path);
    }
    let output = command.output().expect("the command starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["rates"].clone()
}

#[test]
fn rates_are_measured_written_and_used() {
    let place = Place::new();
    let printed = place.ok(&short(&[]));
    for part in ["predicted / measured", "choice, forward", "before", "after", "kernelized", "toeplitz-clip-16", "all"]
    {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    assert_eq!(place.names("settings/longspan"), ["calibration.toml"], "and no draft beside it");
    let used = rates(&place, None);
    assert_eq!(used["source"], "calibrated");
    assert!(used["file"].as_str().is_some_and(|path| path.ends_with(USUAL)), "{used}");
    assert_eq!(rates(&place, Some(""))["source"], "built-in");
    let explained = place.ok(&["explain", "--length", "64"]);
    for part in ["forward alone, ", "with a backward, ", "rates: calibrated 2"] {
        assert!(explained.contains(part), "{part} is not in\n{explained}");
    }
    // A second calibration begins from the first and says so.
    let printed: Value = serde_json::from_str(&place.ok(&short(&["--json", "--out", "again.toml"]))).expect("JSON");
    assert!(printed["before"].as_array().is_some_and(|all| all.len() > 8), "{printed}");
    assert!(printed["calibration"]["picoseconds"]["kernelized.naive.call"][1].as_f64().is_some(), "{printed}");
}

#[test]
fn a_file_that_is_named_must_be_right_and_the_usual_one_is_passed_over() {
    let place = Place::new();
    let good = calibration(&place);
    assert_eq!(rates(&place, Some("made.toml"))["source"], "calibrated");
    let flop = "\"kernelized.naive.flop\"";
    let broken = [
        ("garbage", "rates of the month".to_owned(), "not a calibration"),
        ("outdated", good.replace("format = 2", "format = 1"), "outdated"),
        ("foreign", good.replace(flop, "\"kernelized.naive.coffee\""), "coffee"),
        ("negative", good.replace(&format!("{flop} = ["), &format!("{flop} = [-")), "negative"),
        ("half", good[..good.len() / 2].to_owned(), "calibration.toml"),
    ];
    fs::create_dir_all(place.path("settings/longspan")).expect("a folder");
    for (name, contents, part) in &broken {
        let file = format!("{name}-calibration.toml");
        place.write(&file, contents.as_bytes());
        let named = place.command(&["explain"]).env("LONGSPAN_CALIBRATION", &file).output().expect("it starts");
        failed(&named, &[&file, part, "longspan calibrate", "LONGSPAN_CALIBRATION"]);
        place.write(USUAL, contents.as_bytes());
        let usual = place.run(&["explain", "--json"]);
        assert!(usual.status.success(), "{name}: {}", text(&usual.stderr));
        let warning = text(&usual.stderr);
        assert_eq!(warning.lines().count(), 1, "{warning}");
        for part in ["warning", USUAL, part, "longspan calibrate"] {
            assert!(warning.contains(part), "{part:?} is not in: {warning}");
        }
        assert_eq!(serde_json::from_slice::<Value>(&usual.stdout).expect("JSON")["rates"]["source"], "built-in");
    }
    let missing = place.command(&["explain"]).env("LONGSPAN_CALIBRATION", "none.toml").output().expect("it starts");
    failed(&missing, &["none.toml", "longspan calibrate", "LONGSPAN_CALIBRATION"]);
    let line = good.lines().find(|line| line.starts_with("processor")).expect("a processor");
    place.write(USUAL, good.replace(line, "processor = \"an abacus\"").as_bytes());
    let other = place.run(&["explain"]);
    assert!(other.status.success() && text(&other.stderr).contains("an abacus"), "{}", text(&other.stderr));
}

#[test]
fn an_interrupted_calibration_leaves_the_old_file() {
    let place = Place::new();
    fs::create_dir_all(place.path("settings/longspan")).expect("a folder");
    place.write(USUAL, b"what was there");
    let mut command = place.command(&["calibrate", "--seconds", "600"]);
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut lines = BufReader::new(process.stderr.take().expect("standard error")).lines().map_while(Result::ok);
    // From then on it listens.
    assert!(lines.by_ref().any(|line| line.contains("checking")), "it says what it does");
    signal("INT", process.id());
    let rest: Vec<String> = lines.collect();
    assert_eq!(process.wait().expect("it ends").code(), Some(130), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("interrupted")), "{rest:?}");
    assert_eq!(place.read(USUAL), b"what was there");
    assert_eq!(place.names("settings/longspan"), ["calibration.toml"]);
}

#[test]
fn mistakes_are_one_line_and_measure_nothing() {
    let place = Place::new();
    place.fails(&["calibrate", "--seconds", "0"], &["--seconds 0", "positive"]);
    place.fails(&["calibrate", "--lengths", "4,0"], &["--lengths 0", "at least 1"]);
    place.write("file", b"");
    place.fails(&["calibrate", "--out", "file/rates.toml"], &["file"]);
    place.fails(&["calibrate", "--out", "."], &["--out .", "folder"]);
}
