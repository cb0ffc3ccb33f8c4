//! Labelled texts: training on them, telling labels, scores, and what is no such file.

mod support;

use std::process::Command;
use std::thread;

use serde_json::Value;
use support::{Place, able, set};

/// Reports on the weather, labelled by whether they say "not" before "cold": counts of words do not tell.
fn reports() -> String {
    let names = ["today", "here", "there", "now", "still", "again", "always"];
    (0..420)
        .map(|n| {
            let (a, b) = (names[n % 7], names[n / 7 % 7]);
            let place = n / 49;
            let extra = "so ".repeat(place % 3);
            if (n * 7 + n / 5) % 3 == 0 {
                format!("{a} {extra}not cold but warm {b} {place}\tpleasant\n")
            } else {
                format!("{a} {extra}cold but not warm {b} {place}\tunpleasant\n")
            }
        })
        .collect()
}

fn place() -> Place {
    let place = Place::new();
    place.write("reports.tsv", reports().as_bytes());
    place
}

/// Arguments of a tiny training run on a file, then `more`.
fn train<'a>(file: &'a str, out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    support::train(&["--labelled", file], out, steps, more)
}

/// As a model that can learn: wider, in larger batches.
const WIDER: [&str; 4] = ["d_model=32", "d_ff=64", "layers=2", "batch_size=24"];

#[test]
fn a_run_tells_labels_with_their_probabilities_and_is_scored() {
    let place = place();
    let more = [&able(&WIDER)[..], &["--tokens", "words"]].concat();
    let (stdout, stderr) = place.said(&train("reports.tsv", "run", "400", &more));
    assert!(stderr.contains("2 labels: unpleasant ") && stderr.contains("the commonest has 59 %"), "{stderr}");
    for part in ["accuracy", "macro F1", "true \\ predicted", "Samples:", "predict run"] {
        assert!(stdout.contains(part), "{part:?}: {stdout}");
    }
    for name in ["labels.json", "confusion.svg", "confusion.png"] {
        assert!(place.names("run").contains(&name.into()), "{name}");
    }
    let info = place.info("run");
    assert_eq!(info["label_vocabulary"].as_u64(), Some(2));
    assert!(info["held_out"]["accuracy"]["rate"].as_f64().unwrap() > 0.95, "{info}");
    assert!(place.ok(&["info", "run"]).contains("held out    accuracy"));
    place.finds_its_scores_again("run");

    place.write("questions", "now not cold but warm here 3\nhere cold but not warm now 2\n\n".as_bytes());
    let answers = place.ok(&["predict", "run", "questions"]);
    let lines: Vec<Vec<&str>> = answers.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!((lines.len(), lines[0][0], lines[1][0]), (3, "pleasant", "unpleasant"), "{answers}");
    assert_eq!(lines[2], [""], "an empty line has an empty answer");
    let sure: f64 = lines[0][1].parse().unwrap();
    assert!((0.5..=1.0).contains(&sure), "{answers}");
    let json = place.ok(&["predict", "run", "questions", "--json"]);
    let first: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    let all = first["answers"].as_array().unwrap();
    let total: f64 = all.iter().map(|answer| answer["log_probability"].as_f64().unwrap().exp()).sum();
    assert_eq!((all.len(), first["target"].as_str()), (2, Some("pleasant")));
    assert!((total - 1.0).abs() < 1e-5, "{json}");

    let scores = place.json(&["eval", "run", "reports.tsv", "--json"]);
    assert!(scores["accuracy"]["rate"].as_f64().unwrap() > 0.95 && scores["macro_f1"].as_f64().unwrap() > 0.95);
    let matrix: u64 = scores["confusion"].as_array().unwrap().iter().map(|cell| cell["count"].as_u64().unwrap()).sum();
    assert_eq!(Some(matrix), scores["examples"].as_u64());
    place.write("new.tsv", b"now not cold but warm here 3\tfoggy\nhere cold but not warm now 2\tunpleasant\n");
    let scored = place.ok(&["eval", "run", "new.tsv"]);
    assert!(scored.contains("1 of 2 texts with a label that did not occur in training"), "{scored}");
    assert!(scored.contains("accuracy             50.0 %"), "{scored}");
}

#[test]
fn a_model_begins_as_the_regression_on_words_beside_which_it_is_scored() {
    let place = place();
    let (stdout, _) = place.said(&train("reports.tsv", "run", "1", &["--learning-rate", "1e-9"]));
    let of = |start: &str| -> String {
        let line =
            stdout.lines().find(|line| line.trim_start().starts_with(start)).unwrap_or_else(|| panic!("{stdout}"));
        line.split('%').next().unwrap().split_whitespace().last().unwrap().into()
    };
    let words = of("logistic regression on words and pairs of words: accuracy");
    assert_eq!(of("accuracy"), words, "{stdout}");
    assert!(words.parse::<f64>().unwrap() > of("the commonest label: accuracy").parse::<f64>().unwrap(), "{stdout}");
    // Pairs of words tell these labels, so that of unseen texts nearly all are told.
    assert!(words.parse::<f64>().unwrap() > 90.0, "{stdout}");
    place.finds_its_scores_again("run");
    place.ok(&["train", "--resume", "run", "--steps", "3"]);
    place.ok(&train("reports.tsv", "whole", "3", &["--learning-rate", "1e-9"]));
    assert_eq!(place.losses("run").len(), 3);
    assert_eq!(place.losses("run")[0], place.losses("whole")[0]);
}

#[test]
fn every_mechanism_direction_and_pooling_trains_goes_on_and_answers() {
    let place = place();
    for (n, name) in place.mechanisms().iter().enumerate() {
        let causal = if n % 2 == 0 { "causal=true" } else { "causal=false" };
        let pooling = ["pooling=last", "pooling=mean", "pooling=attention"][n % 3];
        // Tables by position have a row for every position of the longest text.
        let more = ["--attention", name, "--set", causal, "--set", pooling, "--set", "max_tokens=64"];
        place.ok(&train("reports.tsv", name, "4", &more));
        place.ok(&["train", "--resume", name, "--steps", "6"]);
        assert_eq!(place.losses(name).len(), 6, "{name}");
        place.write("questions", b"now cold\n");
        assert_eq!(place.ok(&["predict", name, "questions"]).lines().count(), 1, "{name}");
    }
}

#[test]
fn csv_and_forms_of_blocks_and_numbers() {
    let place = place();
    let table: String = reports()
        .lines()
        .map(|line| {
            let (text, label) = line.split_once('\t').unwrap();
            format!("{label},\"{text}\"\n")
        })
        .collect();
    place.write("reports.csv", format!("label,text\n{table}").as_bytes());
    let forms = ["norm_kind=rms", "activation=silu", "gated=true", "gated_attention=true", "layers=2"];
    let forms = set(&forms);
    let more = [&forms[..], &["--attention", "shaw,softmax"]].concat();
    place.ok(&train("reports.csv", "kept", "6", &more));
    place.ok(&train("reports.tsv", "again", "6", &[&more[..], &["--set", "recompute=true"]].concat()));
    assert_eq!(
        place.losses("kept"),
        place.losses("again"),
        "neither the format nor forming numbers again changes a loss"
    );
    place.ok(&train("reports.csv", "plain", "6", &["--set", "layers=2"]));
    // Both begin with no corrections to the words' regression.
    assert_ne!(place.losses("kept")[1..], place.losses("plain")[1..]);
    for (setting, parts) in [
        ("norm_kind=batch", ["unknown value `batch`", "`layer` or `rms`"]),
        ("activation=tanh", ["unknown value `tanh`", "`relu`, `gelu`, `gelu-tanh`, `silu`"]),
        ("target=text", ["`target` = \"text\": unknown value `text`", "`label` or `number`"]),
    ] {
        place.fails(&train("reports.tsv", "run", "3", &["--set", setting]), &parts);
    }
    place.write("own.tsv", b"now not cold but warm here 3\tfoggy\nhere\tPleasant\n");
    let said = place.said(&train("reports.tsv", "own", "1", &["--held-out", "own.tsv"])).1;
    for part in [
        "own.tsv: the label \"Pleasant\" and 1 more is held out or for development alone",
        "or write it as in training, such as \"pleasant\"",
        "own.tsv: nothing with the label \"pleasant\" and 1 more is held out, so scores say nothing of it",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    place.write("alike.tsv", reports().replacen("\tpleasant", "\tPleasant\u{200b}", 99).as_bytes());
    let said = place.said(&train("alike.tsv", "alike", "1", &[])).1;
    let part = "the labels \"Pleasant\\u{200b}\" and \"pleasant\" look alike, and are two classes";
    assert!(said.contains(part), "{said}");
    place.write("head.csv", b"text,a,b\na,b,c\n");
    place.fails(
        &train("head.csv", "run", "3", &[]),
        &["head.csv, line 1", "no column `label` among `text`, `a`, `b`", "--label NAME"],
    );

    // The number of a's in a text.
    let counts: String = (0..900usize)
        .map(|n| {
            let letters: String =
                (0..40).map(|t| if (n * 31 + t * t * 7 + n / 40 * t) % 40 < n % 37 { 'a' } else { 'b' }).collect();
            format!("{letters}{n}\t{}\n", letters.matches('a').count())
        })
        .collect();
    place.write("counts.tsv", counts.as_bytes());
    let more = [&able(&WIDER)[..], &["--set", "target=number"]].concat();
    let stdout = place.ok(&train("counts.tsv", "counts", "300", &more));
    assert!(stdout.contains("R²  ") && stdout.contains("mean absolute error"), "{stdout}");
    assert!(place.info("counts")["held_out"]["r_squared"]["rate"].as_f64().unwrap() > 0.9, "{stdout}");
    place.write("questions", format!("{}1\n{}1\n", "ab".repeat(20), "b".repeat(40)).as_bytes());
    let answers = place.ok(&["predict", "counts", "questions"]);
    let answers: Vec<f64> = answers.lines().map(|line| line.parse().unwrap()).collect();
    assert!((answers[0] - 20.0).abs() < 6.0 && answers[1].abs() < 6.0, "{answers:?}");
    let json: Value =
        serde_json::from_str(place.ok(&["predict", "counts", "questions", "--json"]).lines().next().unwrap()).unwrap();
    assert!(json["score"].is_null() && json["target"].as_str().unwrap().parse::<f64>().is_ok(), "{json}");
    let holed: String =
        (0..).zip(counts.lines()).map(|(n, row)| format!("{}\n", if n == 7 { "ab\t-999" } else { row })).collect();
    place.write("holed.tsv", holed.as_bytes());
    let said = place.said(&train("holed.tsv", "holed", "1", &more)).1;
    assert!(said.contains("holed.tsv: -999 is the label of 1 text, and others go from 0 to "), "{said}");
}

#[test]
fn files_that_cannot_be_learned_from_are_named_and_no_run_is_made() {
    let place = place();
    let good = reports();
    for (name, contents, parts) in [
        (
            "one.tsv",
            "a\tb\nc\tb\nd\tb\ne\tb\n".to_string(),
            ["one.tsv: all texts to train on have the label \"b\"", "two"],
        ),
        ("columns.tsv", format!("{good}no tab\n"), ["columns.tsv, line 421: 1 column", "--text"]),
        ("label.tsv", format!("{good}no label\t\n"), ["label.tsv, line 421: the label is empty", "give one"]),
        ("empty.tsv", String::new(), ["empty.tsv: no labelled texts", "a line"]),
        ("pairs.jsonl", "{\"source\": \"a\", \"target\": \"b\"}\n".into(), ["pairs.jsonl, line 1", "--pairs"]),
        ("key.jsonl", "{\"text\": \"a\"}\n".into(), ["key.jsonl, line 1: no column `label` among `text`", "--label"]),
    ] {
        place.write(name, contents.as_bytes());
        place.fails(&train(name, "run", "3", &[]), &parts);
        assert!(!place.path("run").exists(), "{name}: a run folder was made");
    }
    let pairs: String = (0..60).map(|n| format!("word{n}\tanswer{n}\n")).collect();
    place.write("many.tsv", pairs.as_bytes());
    place.fails(&train("many.tsv", "run", "3", &[]), &["a label should come often", "--pairs"]);
    place.write("bad.tsv", b"a\xff\tb\n");
    place.fails(&train("bad.tsv", "run", "3", &[]), &["bad.tsv, line 1, byte 2: invalid UTF-8"]);
    place.fails(
        &train("reports.tsv", "run", "3", &["--set", "pooling=max"]),
        &["`pooling` = \"max\": unknown value `max`", "`mean`, `last`"],
    );
    place.fails(
        &train("reports.tsv", "run", "3", &["--set", "max_tokens=2"]),
        &["all training texts have more than 2 tokens"],
    );
    place.fails(&train("reports.tsv", "run", "3", &["--set", "pairs=pairs.tsv"]), &["labelled is given along with"]);
    place.fails(&["train", "--text", "reports.tsv", "--out", "run"], &["--labelled"]);
    place.write("labels.jsonl", b"{\"text\": \"a\", \"label\": \"b\"}\n");
    place.fails(&["train", "--pairs", "labels.jsonl", "--out", "run"], &["labels.jsonl, line 1", "--labelled"]);
    place.ok(&train("reports.tsv", "good", "3", &[]));
    place.fails(&["generate", "good"], &["predicts for lines", "predict good"]);
    place.fails(&["eval", "good", "columns.tsv"], &["columns.tsv, line 421"]);
    place.write(
        "reports.tsv",
        format!("{good}another\tpleasant\nand another one\tpleasant\nyet another\tpleasant\n").as_bytes(),
    );
    place.fails(&["train", "--resume", "good", "--steps", "9"], &["is not what this run began with", "--labelled"]);
    // So are the files for development, by which weights were chosen, and for scores.
    place.write("reports.tsv", good.as_bytes());
    for (flag, verb) in
        [("--development", &["train", "--resume", "own", "--steps", "9"][..]), ("--held-out", &["eval", "own"])]
    {
        place.write("own.tsv", b"not cold but warm\tpleasant\ncold but not warm\tunpleasant\n");
        place.ok(&train("reports.tsv", "own", "3", &[flag, "own.tsv"]));
        place.ok(&["eval", "own"]);
        place.write("own.tsv", b"not cold but warm\tunpleasant\ncold but not warm\tunpleasant\n");
        let error = place.fails(verb, &["own.tsv is not what this run "]);
        assert_eq!(error.contains("with --development or --held-out"), verb[0] == "train", "{error}");
        std::fs::remove_dir_all(place.path("own")).unwrap();
    }
    // A pipe is read once: a second reader would wait for ever.
    let pipe = place.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let writer = thread::spawn(move || std::fs::write(pipe, "not cold but warm\tpleasant\n"));
    place.ok(&train("reports.tsv", "piped", "3", &["--held-out", "pipe"]));
    writer.join().unwrap().unwrap();
}

#[test]
fn letters_with_marks_may_be_composed_or_decomposed() {
    let place = Place::new();
    let composed = |n: usize| format!("{} day {n} {}\n", ["schön", "trübe"][n % 2], ["café", "naïf"][n / 2 % 2]);
    let decomposed = |text: String| {
        [("ö", "o\u{308}"), ("ü", "u\u{308}"), ("é", "e\u{301}"), ("ï", "i\u{308}")]
            .iter()
            .fold(text, |text, (one, two)| text.replace(one, two))
    };
    let lines = |from: usize, to: usize| -> String { (from..to).map(composed).collect() };
    let labelled = |text: String| -> String {
        text.lines().enumerate().map(|(n, line)| format!("{line}\t{}\n", ["good", "bad"][n % 2])).collect()
    };
    place.write("composed", lines(200, 220).as_bytes());
    place.write("decomposed", decomposed(lines(200, 220)).as_bytes());
    for (name, text) in [("a.tsv", labelled(lines(0, 200))), ("b.tsv", labelled(decomposed(lines(0, 200))))] {
        place.write(name, text.as_bytes());
        for (n, more) in
            [&[][..], &["--set", "base=false"], &["--set", "base=false", "--tokens", "words"]].iter().enumerate()
        {
            let run = format!("{name}-{n}");
            place.ok(&train(name, &run, "3", more));
            let answers = ["composed", "decomposed"].map(|file| place.said(&["predict", &run, file]));
            assert_eq!(answers[0], answers[1], "{name} {more:?}");
        }
    }
    place.write("empty.csv", b"text,label\na b,x\n ,y\n");
    assert!(place.said(&["info", "empty.csv"]).1.contains("empty.csv: nothing in the column `text` of 1 row"));
}
