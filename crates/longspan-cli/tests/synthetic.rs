//! Synthetic tasks: training on drawn sequences, answering, scores, and what is no such task.

mod support;

use serde_json::Value;
use support::{Place, able};

const SPEC: &str = "mqar:pairs=2,length=16,vocabulary=12";

/// Arguments of a tiny training run, then `more`.
fn train<'a>(spec: &'a str, out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    support::train(&["--synthetic", spec, "--set", "layers=2"], out, steps, more)
}

#[test]
fn a_run_learns_to_copy_what_was_said_and_is_scored() {
    let place = Place::new();
    let more = able(&["d_model=32", "d_ff=64", "batch_size=32"]);
    let (stdout, stderr) = place.said(&train("recall:pairs=2,length=12,vocabulary=4", "run", "600", &more));
    assert!(stderr.contains("recall:pairs=2,length=12,vocabulary=4,noise=0: sequences of up to 12 tokens"), "{stderr}");
    assert!(stdout.contains("1000 sequences, ") && stdout.contains("recalled  "), "{stdout}");
    let info = place.info("run");
    assert!(info["held_out"]["recalled"]["rate"].as_f64().unwrap() > 0.9, "{info}");
    assert!(place.ok(&["info", "run"]).contains("held out    recalled "));
    place.finds_its_scores_again("run");
    place.write("questions", b"0 3 1 2 0\n1 3 0 2 1 3 0\n");
    let answers = place.ok(&["predict", "run", "questions"]);
    assert_eq!(answers, "3\n2\n");
    let json = place.ok(&["predict", "run", "questions", "--json", "--beam", "4"]);
    let first: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    let total: f64 =
        first["answers"].as_array().unwrap().iter().map(|one| one["log_probability"].as_f64().unwrap().exp()).sum();
    assert!((total - 1.0).abs() < 1e-5, "{json}");
    place.write("right.tsv", b"0 3 1 2 0\t3\n1 3 0 2 1 3 0\t2\n");
    let scores = place.json(&["eval", "run", "right.tsv", "--json"]);
    assert_eq!((scores["questions"].as_u64(), scores["recalled"]["rate"].as_f64()), (Some(2), Some(1.0)));
    for (line, part) in
        [("0 9\t1", "the token 9 is unknown; those of this run are 0 to 3"), ("0 x\t1", "\"x\" is no token")]
    {
        place.write("wrong.tsv", format!("0 3 0\t3\n{line}\n").as_bytes());
        place.fails(&["eval", "run", "wrong.tsv"], &["wrong.tsv, line 2", part]);
    }
    place.write("wrong", b"0 3 0\n0 4\n");
    place.fails(&["predict", "run", "wrong"], &["wrong, line 2: the token 4 is unknown"]);
}

#[test]
fn a_run_learns_to_compress_and_tells_what_it_was() {
    let place = Place::new();
    let more = able(&["d_model=32", "d_ff=64", "batch_size=32"]);
    place.ok(&train("compression:length=4,vocabulary=3", "run", "400", &more));
    assert!(place.info("run")["held_out"]["recalled"]["rate"].as_f64().unwrap() > 0.9);
    place.write("questions", b"0 2 1 3\n1 1 0 3\n");
    assert_eq!(place.ok(&["predict", "run", "questions"]), "0 2 1\n1 1 0\n");
    let json = place.ok(&["predict", "run", "questions", "--json", "--beam", "27"]);
    let first: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    let all = first["answers"].as_array().unwrap();
    let total: f64 = all.iter().map(|one| one["log_probability"].as_f64().unwrap().exp()).sum();
    assert!(total > 0.9 && total <= 1.0 + 1e-5, "all answers without the marker: {json}");
    place.write("right.tsv", b"0 2 1 3\t0 2 1\n");
    let scores = place.json(&["eval", "run", "right.tsv", "--json"]);
    assert_eq!((scores["questions"].as_u64(), scores["recalled"]["rate"].as_f64()), (Some(3), Some(1.0)));
    place.write("wrong.tsv", b"0 2 1 3\t0 2\n");
    place.fails(&["eval", "run", "wrong.tsv"], &["line 1: 2 tokens after the tab, expected 3"]);
    place.write("long", b"0 2 1 0 3\n");
    place.fails(&["predict", "run", "long"], &["line 1: 5 tokens; this run takes 4, the last of them 3"]);
}

#[test]
fn every_mechanism_and_task_trains_and_goes_on() {
    let place = Place::new();
    for (n, name) in place.mechanisms().iter().enumerate() {
        let spec = [
            SPEC,
            "recall:pairs=3,length=20,vocabulary=8,noise=30",
            "copying:pairs=4,length=20",
            "fuzzy:motif=2,length=24,vocabulary=8",
            "memorization:length=8,vocabulary=12",
            "listops:shortest=8,length=24,depth=3",
            "compression:length=8,vocabulary=4",
        ][n % 7];
        place.ok(&train(spec, name, "4", &["--attention", name]));
        place.ok(&["train", "--resume", name, "--steps", "6"]);
        assert_eq!(place.losses(name).len(), 6, "{name}");
    }
}

#[test]
fn tasks_that_there_are_not_are_named_and_no_run_is_made() {
    let place = Place::new();
    place.fails(&train("mqr", "run", "3", &[]), &["unknown synthetic task \"mqr\"", "mqar, recall, fuzzy"]);
    place.fails(&train("mqar:pairs=9,length=16", "run", "3", &[]), &["9 pairs need length=36 or more"]);
    place.fails(&train(SPEC, "run", "3", &["--held-out", "x"]), &["`held_out` is not used by --synthetic"]);
    place.fails(&train(SPEC, "run", "3", &["--set", "series=x"]), &["series is given along with synthetic"]);
    assert!(!place.path("run").exists());
    place.ok(&train(SPEC, "run", "3", &[]));
    place.fails(&["train", "--resume", "run", "--set", "synthetic=mqar"], &["`synthetic` is fixed by the run"]);
    place.fails(&["generate", "run"], &["predicts for lines"]);
}
