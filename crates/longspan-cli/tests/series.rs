//! Series: training on them, telling labels and numbers, scores, and what is no such file.

mod support;

use std::fmt::Write as _;

use serde_json::Value;
use support::{Place, able, random, set, text};

/// Waves of two frequencies seen at random times, as JSON lines; the label is the kind, or the frequency itself.
fn waves(count: usize, seed: u64, number: bool) -> String {
    let mut random = random(seed);
    let mut all = String::new();
    for n in 0..count {
        let frequency = if number { 0.2 + 0.8 * random() } else { [0.4, 0.9][n % 2] };
        let phase = std::f64::consts::TAU * random();
        let mut times: Vec<f64> = (0..20 + n % 5).map(|_| 30.0 * random()).collect();
        times.sort_by(f64::total_cmp);
        let values: Vec<[f64; 2]> = times
            .iter()
            .map(|t| [3.0 + (frequency * t + phase).sin(), 100.0 * (frequency * t + phase).cos()])
            .collect();
        let label = if number { format!("{frequency}") } else { format!("\"{}\"", ["slow", "fast"][n % 2]) };
        writeln!(all, "{{\"times\": {times:?}, \"values\": {values:?}, \"label\": {label}}}").unwrap();
    }
    all
}

fn place() -> Place {
    let place = Place::new();
    place.write("waves.jsonl", waves(600, 1, false).as_bytes());
    place
}

/// Arguments of a tiny training run on a file, then `more`.
fn train<'a>(file: &'a str, out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    support::train(&["--series", file], out, steps, more)
}

/// As a model that can learn: wider, in larger batches.
const WIDER: [&str; 4] = ["d_model=32", "d_ff=64", "layers=2", "batch_size=24"];

#[test]
fn a_run_tells_kinds_of_waves_by_their_times_and_is_scored() {
    let place = place();
    let (stdout, stderr) = place.said(&train("waves.jsonl", "run", "400", &able(&WIDER)));
    for part in ["2 channels", "the usual distance of times is", "2 labels: "] {
        assert!(stderr.contains(part), "{part:?}: {stderr}");
    }
    for part in ["accuracy", "true \\ predicted", "Samples:", "predict run"] {
        assert!(stdout.contains(part), "{part:?}: {stdout}");
    }
    for name in ["labels.json", "series.json", "confusion.svg", "confusion.png"] {
        assert!(place.names("run").contains(&name.into()), "{name}");
    }
    assert!(text(&place.read("run/series.json")).contains("\"clock\""), "the waves share a start");
    let info = place.info("run");
    assert_eq!((info["label_vocabulary"].as_u64(), info["series_vocabulary"].as_u64()), (Some(2), Some(2)));
    assert!(info["held_out"]["accuracy"]["rate"].as_f64().unwrap() > 0.9, "{info}");
    assert!(place.ok(&["info", "run"]).contains("2 channels → 2 labels"));
    place.finds_its_scores_again("run");

    place.write("new.jsonl", waves(60, 9, false).as_bytes());
    let scores = place.json(&["eval", "run", "new.jsonl", "--json", "--picture", "c.png"]);
    assert!(scores["accuracy"]["rate"].as_f64().unwrap() > 0.85, "{scores}");
    assert_eq!(scores["examples"].as_u64(), Some(60));
    assert!(place.read("c.png").starts_with(b"\x89PNG"));
    place.fails(&["eval", "run", "new.jsonl", "--picture", "c.pdf"], &["c.pdf", ".svg or .png"]);

    // The same series as CSV, in any order of lines, and from standard input.
    let answers = place.ok(&["predict", "run", "new.jsonl"]);
    assert_eq!(answers.lines().count(), 60);
    let mut table = String::from("id,time,a,b\n");
    let all: Vec<Value> = text(&place.read("new.jsonl")).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for (id, one) in all.iter().enumerate() {
        let points = one["times"].as_array().unwrap().iter().zip(one["values"].as_array().unwrap());
        for (time, values) in points.rev() {
            writeln!(table, "{id},{time},{},{}", values[0], values[1]).unwrap();
        }
    }
    place.write("new.csv", table.as_bytes());
    let output = place.run(&["predict", "run", "new.csv"]);
    assert_eq!(text(&output.stdout), answers);
    assert!(text(&output.stderr).contains("times that run backwards in 60 series"), "{}", text(&output.stderr));
    for file in ["new.csv", "new.jsonl"] {
        let input = std::fs::File::open(place.path(file)).unwrap();
        let output = place.command(&["predict", "run"]).stdin(input).output().unwrap();
        assert_eq!(text(&output.stdout), answers, "{file}");
    }

    // Counted points do not tell them: the times do, which convolutions at even times follow too.
    let blind = ["--attention", "shaw", "--set", "clock=false", "--set", "base=false"];
    place.ok(&train("waves.jsonl", "counted", "400", &[&able(&WIDER)[..], &blind].concat()));
    let counted = place.info("counted")["held_out"]["accuracy"]["rate"].as_f64().unwrap();
    assert!(counted < info["held_out"]["accuracy"]["rate"].as_f64().unwrap(), "{counted}");
}

#[test]
fn numbers_are_foretold_with_their_errors() {
    let place = place();
    place.write("numbers.jsonl", waves(800, 2, true).as_bytes());
    let (stdout, stderr) = place.said(&train("numbers.jsonl", "run", "500", &able(&WIDER)));
    assert!(stderr.contains("numbers of mean 0."), "{stderr}");
    assert!(stdout.contains("R²  ") && stdout.contains("mean absolute error  0."), "{stdout}");
    let info = place.info("run");
    assert!(info["held_out"]["r_squared"]["rate"].as_f64().unwrap() > 0.5, "{info}");
    assert!(place.ok(&["info", "run"]).contains("held out    R² 0."));
    assert!(place.ok(&["info", "run"]).contains("mean squared error"));
    place.write("new.jsonl", waves(20, 9, true).as_bytes());
    for line in place.ok(&["predict", "run", "new.jsonl"]).lines() {
        assert!((-0.5..1.7).contains(&line.parse::<f64>().unwrap()), "{line}");
    }
    let scores = place.json(&["eval", "run", "new.jsonl", "--json"]);
    let error = &scores["mean_absolute_error"];
    assert!(
        error["low"].as_f64() < error["rate"].as_f64() && error["rate"].as_f64() < error["high"].as_f64(),
        "{scores}"
    );
    place.fails(&["eval", "run", "waves.jsonl"], &["the label \"slow\" is no number"]);
    place.fails(&["eval", "run", "new.jsonl", "--picture", "c.svg"], &["a run that predicts labels has a picture"]);
    let spaced = text(&place.read("new.jsonl")).replace('\n', "\n\n");
    place.write("spaced.jsonl", spaced.as_bytes());
    assert_eq!(place.ok(&["predict", "run", "spaced.jsonl"]).lines().count(), 20, "empty lines are passed over");
    place.fails(&["predict", "run", "new.jsonl", "--beam", "2"], &["--beam is not used by --series: leave it out"]);
}

#[test]
fn missing_values_are_said_and_seen_and_every_mechanism_and_pooling_trains() {
    let place = place();
    let holes: String = waves(120, 4, false)
        .lines()
        .map(|line| {
            let mut one: Value = serde_json::from_str(line).unwrap();
            for (n, point) in one["values"].as_array_mut().unwrap().iter_mut().enumerate() {
                if n % 3 == 1 {
                    *point = serde_json::json!([null, 1.5]);
                }
            }
            // Padding.
            one["times"].as_array_mut().unwrap().push(99.into());
            one["values"].as_array_mut().unwrap().push(serde_json::json!([null, null]));
            format!("{one}\n")
        })
        .collect();
    place.write("holes.jsonl", holes.as_bytes());
    for (n, name) in place.mechanisms().iter().enumerate() {
        let pooling = ["pooling=mean", "pooling=last", "pooling=attention"][n % 3];
        let causal = if n % 2 == 0 { "causal=true" } else { "causal=false" };
        let forms = ["gated=true", "gated_attention=true", "activation=silu", "norm_kind=rms", "recompute=true"];
        let mut more = set(&[&[pooling, causal, "max_tokens=64"], &forms[..]].concat());
        more.extend(["--attention", name]);
        let (_, stderr) = place.said(&train("holes.jsonl", name, "4", &more));
        assert!(stderr.contains("values missing (") && stderr.contains("as many more say what is missing"), "{stderr}");
        place.ok(&["train", "--resume", name, "--steps", "6"]);
        assert_eq!(place.losses(name).len(), 6, "{name}");
        assert_eq!(place.ok(&["predict", name, "holes.jsonl"]).lines().count(), 120, "{name}");
    }
    place.fails(
        &train("holes.jsonl", "refused", "4", &["--set", "missing=refuse"]),
        &["holes.jsonl, line 1: the series that begins here has no value at the time"],
    );
    place
        .fails(&train("holes.jsonl", "refused", "4", &["--id", "who"]), &["holes.jsonl: it is no table", "--channels"]);
    place.fails(
        &train("holes.jsonl", "refused", "4", &["--set", "missing=zero"]),
        &["`missing` = \"zero\": unknown value `zero`", "`mask` or `refuse`"],
    );
    // A run that knows no holes takes them too.
    place.ok(&train("waves.jsonl", "whole", "4", &[]));
    assert_eq!(place.ok(&["predict", "whole", "holes.jsonl"]).lines().count(), 120);
}

#[test]
fn archives_with_a_file_of_their_own_to_be_scored_on() {
    let place = place();
    let mut random = random(3);
    let mut archive = |count: usize| -> String {
        (0..count)
            .map(|n| {
                let class = n % 3;
                let phase = std::f64::consts::TAU * random();
                let values: Vec<String> =
                    (0..24).map(|t| format!("{:.4}", ((0.3 + 0.4 * class as f64) * t as f64 + phase).sin())).collect();
                format!("{class}\t{}\n", values.join("\t"))
            })
            .collect()
    };
    place.write("Waves_TRAIN.tsv", archive(240).as_bytes());
    place.write("Waves_TEST.tsv", archive(60).as_bytes());
    let more = [&able(&WIDER)[..], &["--held-out", "Waves_TEST.tsv"]].concat();
    let stdout = place.ok(&train("Waves_TRAIN.tsv", "run", "250", &more));
    assert!(stdout.contains("60 series, 3 labels") && stdout.contains("Waves_TEST.tsv"), "{stdout}");
    assert!(place.info("run")["held_out"]["accuracy"]["rate"].as_f64().unwrap() > 0.8, "{stdout}");
    assert_eq!(place.ok(&["predict", "run", "Waves_TEST.tsv"]).lines().count(), 60);
}

#[test]
fn files_that_cannot_be_learned_from_are_named_and_no_run_is_made() {
    let place = place();
    let good = waves(60, 5, false);
    for (name, contents, parts) in [
        (
            "label.jsonl",
            format!("{good}{{\"values\": [[1, 2]]}}\n"),
            ["label.jsonl, line 61: the series has no label", "give one"],
        ),
        ("one.jsonl", good.replace("slow", "fast"), ["all series to train on have the label \"fast\"", "two"]),
        (
            "width.jsonl",
            format!("{good}{{\"values\": [1], \"label\": \"a\"}}\n"),
            ["width.jsonl, line 61: 1 channel", "2"],
        ),
        (
            "text.tsv",
            "how nice\tgood\n".into(),
            ["text.tsv, line 1: no column of times is known among `how nice`, `good`", "--labelled"],
        ),
        ("empty.csv", String::new(), ["empty.csv: no series in it", "give"]),
        ("few.jsonl", good.lines().take(1).collect(), ["few.jsonl", "series"]),
    ] {
        place.write(name, contents.as_bytes());
        place.fails(&train(name, "run", "3", &[]), &parts);
        assert!(!place.path("run").exists(), "{name}: a run folder was made");
    }
    place.fails(
        &train("waves.jsonl", "run", "3", &["--set", "max_tokens=2"]),
        &["all training series have more than 2 points"],
    );
    place.fails(&train("waves.jsonl", "run", "3", &["--set", "pooling=max"]), &["unknown value `max`", "`attention`"]);
    place.write("own.jsonl", b"{\"values\": [1, 2], \"label\": \"slow\"}\n");
    for flag in ["--development", "--held-out"] {
        let parts = ["own.jsonl, line 1: 1 channel, and this run was trained on 2"];
        place.fails(&train("waves.jsonl", "run", "3", &[flag, "own.jsonl"]), &parts);
        assert!(!place.path("run").exists(), "{flag}: a run folder was made");
    }
    place.fails(&["train", "--labelled", "waves.jsonl", "--out", "run"], &["waves.jsonl, line 1", "--series"]);
    place.ok(&train("waves.jsonl", "good", "3", &[]));
    place.fails(&["generate", "good"], &["predicts for lines", "predict good"]);
    place.write("bad.jsonl", b"{\"values\": [[1, 2]]}\n{\"values\": [1]}\n");
    place.fails(&["predict", "good", "bad.jsonl"], &["bad.jsonl, line 2: 1 channel, and this run was trained on 2"]);
    place.write("bad.csv", b"id,time,a\n1,2,3\n");
    place.fails(&["predict", "good", "bad.csv"], &["bad.csv, line 2: 1 channel"]);

    // Damage is found, and other data are not gone on with.
    let whole = place.read("good/series.json");
    place.write("good/series.json", &whole[..whole.len() - 5]);
    place.fails(&["predict", "good", "bad.jsonl"], &["series.json: damaged"]);
    place.write("good/series.json", &whole);
    place.write("waves.jsonl", waves(599, 1, false).as_bytes());
    place.fails(&["train", "--resume", "good", "--steps", "9"], &["is not what this run began with", "--series"]);
}

#[test]
fn times_and_values_in_other_units_are_said() {
    let place = place();
    place.ok(&train("waves.jsonl", "run", "3", &[]));
    let scaled = |time: f64, value: f64| -> String {
        let one = |line: &str| {
            let mut one: Value = serde_json::from_str(line).unwrap();
            for number in one["times"].as_array_mut().unwrap() {
                *number = (number.as_f64().unwrap() * time).into();
            }
            for point in one["values"].as_array_mut().unwrap() {
                point[1] = (point[1].as_f64().unwrap() * value).into();
            }
            format!("{one}\n")
        };
        waves(20, 9, false).lines().map(one).collect()
    };
    let times = "the usual distance of times is ";
    let values = "`channel 2` is ";
    for (time, value, parts) in [
        (1.0, 1.0, &[][..]),
        (24.0, 1.0, &[times]),
        (1.0 / 60.0, 1.0, &[times]),
        (1.0, 10.0, &[values, " times as much; give it in the same unit"]),
        (1.0, 1e-3, &[values, "varies 0.001 times as much"]),
    ] {
        place.write("new.jsonl", scaled(time, value).as_bytes());
        for verb in ["predict", "eval"] {
            let notes = place.said(&[verb, "run", "new.jsonl"]).1;
            assert_eq!(notes.is_empty(), parts.is_empty(), "{verb} {time} {value}: {notes}");
            assert!(parts.iter().all(|part| notes.contains(part)), "{verb} {time} {value}: {notes}");
        }
    }
    // Without times points are counted, in no unit at all; of 20 to 24 points as few as 9 are far from what was learned.
    let changed = |change: &dyn Fn(&mut Value)| -> String {
        let one = |line: &str| {
            let mut one: Value = serde_json::from_str(line).unwrap();
            change(&mut one);
            format!("{one}\n")
        };
        waves(20, 9, false).lines().map(one).collect()
    };
    let untimed = changed(&|one| drop(one.as_object_mut().unwrap().remove("times")));
    let short =
        changed(&|one| ["times", "values"].iter().for_each(|key| one[*key].as_array_mut().unwrap().truncate(9)));
    let lengths = " series have less than half or more than twice the points of those in training (20 to 24)";
    for (text, part) in [(untimed, "the usual distance of times is 1, and "), (short, lengths)] {
        place.write("new.jsonl", text.as_bytes());
        let notes = place.said(&["predict", "run", "new.jsonl"]).1;
        assert!(notes.contains(part), "{notes}");
    }
}
