//! Scores that can be trusted: what is held out, what was learned from, and what counts as right.

mod support;

use std::collections::BTreeSet;

use serde_json::Value;
use support::{Place, set, train};

/// What a tokenizer.json says around its vocabulary of letters.
fn tokenizer(added: &str, pre: &str, decoder: &str) -> String {
    let letters: Vec<String> = ('a'..='z').zip(2..).map(|(letter, id)| format!("\"{letter}\":{id}")).collect();
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{added}],"normalizer":null,"pre_tokenizer":{pre},
        "post_processor":null,"decoder":{decoder},"model":{{"type":"BPE","vocab":{{"[UNK]":0,"▁":1,{}}},"merges":[],
        "unk_token":"[UNK]"}}}}"#,
        letters.join(",")
    )
}

#[test]
fn the_split_does_not_follow_the_text_and_keeps_forms_of_a_source_together() {
    let place = Place::new();
    let parity: String = (0..1u32 << 11)
        .map(|bits| format!("{bits:011b}\t{}\n", ["even", "odd"][bits.count_ones() as usize % 2]))
        .collect();
    place.write("parity.tsv", parity.as_bytes());
    place.ok(&train(&["--labelled", "parity.tsv", "--set", "layers=1"], "run", "2", &[]));
    let scores = place.json(&["eval", "run", "--json"]);
    let odd: u64 = scores["confusion"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|cell| cell["label"] == "odd")
        .map(|cell| cell["count"].as_u64().unwrap())
        .sum();
    let all = scores["examples"].as_u64().unwrap();
    assert!((70..140).contains(&all) && odd * 4 > all && odd * 4 < 3 * all, "{odd} of {all} are odd");

    // Runs of earlier versions keep the split that they began with.
    place.ok(&train(&["--labelled", "parity.tsv", "--set", "layers=1"], "old", "2", &["--set", "split_version=1"]));
    let parities: BTreeSet<String> = place.json(&["eval", "old", "--json"])["confusion"]
        .as_array()
        .unwrap()
        .iter()
        .map(|cell| cell["label"].to_string())
        .collect();
    assert_eq!(parities.len(), 1, "FNV-1a alone keeps the parity");
    let config = String::from_utf8(place.read("old/config.json")).unwrap();
    place.write("old/config.json", config.replace("\"split_version\": 1,", "").as_bytes());
    place.ok(&["info", "old", "--accept-changes"]);
    place.ok(&["train", "--resume", "old", "--steps", "3"]);
    assert_eq!(place.info("old")["config"]["split_version"], 1);
}

#[test]
fn held_out_data_that_was_learned_from_is_counted() {
    let place = Place::new();
    let pairs = String::from_utf8(place.read("pairs.tsv")).unwrap();
    let new: String = (0..20).map(|n| format!("new{n}\tx\n")).collect();
    // Five of them are in the training data, in another form or as a variant too.
    let some: Vec<&str> = pairs.lines().take(7).collect();
    let own = format!("{}\n{}\n {}\n", some[0], some[1].replace('\t', "(2)\t"), some[2]);
    place.write("own.tsv", format!("{new}{own}").as_bytes());
    let (_, said) = place.said(&place.train("run", "2", &["--held-out", "own.tsv", "--development", "own.tsv"]));
    for part in ["own.tsv: also in the training data: 3 of 23 held-out pairs", "3 of 23 development pairs"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let (_, said) = place.said(&["eval", "run", "pairs.tsv"]);
    assert!(said.contains("pairs.tsv is what the run learned from"), "{said}");
    assert!(!place.said(&["eval", "run", "own.tsv"]).1.contains("learned from"));

    let labelled: String = (0..60).map(|n| format!("text {n}\t{}\n", n % 2)).collect();
    place.write("labelled.tsv", labelled.as_bytes());
    let data = ["--labelled", "labelled.tsv", "--held-out", "labelled.tsv", "--set", "layers=1"];
    let (_, said) = place.said(&train(&data, "labelled", "2", &[]));
    assert!(said.contains(" of 60 held-out texts, so"), "{said}");

    let series = |count: usize, phase: f64| -> String {
        let line = |n: usize| {
            let values: Vec<f64> = (0..30).map(|t| (f64::from(t) * 0.3 + n as f64 + phase).sin()).collect();
            format!("{{\"values\": {values:?}, \"label\": \"{}\"}}\n", n % 2)
        };
        (0..count).map(line).collect()
    };
    place.write("series.jsonl", series(30, 0.0).as_bytes());
    place.write("other.jsonl", series(4, 0.5).as_bytes());
    for (out, more, own, said_so) in [
        ("s1", ["--set", "missing=mask"], "series.jsonl", " of 30 held-out series, so"),
        ("s2", ["--set", "missing=mask"], "other.jsonl", ""),
        ("s3", ["--forecast", "3"], "series.jsonl", " held-out windows, so"),
        ("s4", ["--forecast", "3"], "other.jsonl", ""),
    ] {
        let data = [&["--series", "series.jsonl", "--held-out", own, "--set", "layers=1"][..], &more].concat();
        let (_, said) = place.said(&train(&data, out, "2", &[]));
        assert_eq!(said.contains("also in the training data"), !said_so.is_empty(), "{out}: {said}");
        assert!(said.contains(said_so), "{out}: {said}");
    }

    let lines: String =
        (0..900).map(|n| format!("line {n} says that {} is not {} in the long run\n", n * n % 977, n % 13)).collect();
    place.write("one.txt", lines.as_bytes());
    place.write("twice.txt", lines.repeat(2).as_bytes());
    for (out, file, seen) in [("t1", "one.txt", false), ("t2", "twice.txt", true)] {
        let (_, said) = place.said(&train(&["--text", file, "--set", "layers=1"], out, "2", &[]));
        assert_eq!(
            said.contains("% of the held-out text is in lines that are also in the training data"),
            seen,
            "{said}"
        );
        assert_eq!(place.said(&["eval", out]).1.contains("also in the training data"), seen);
    }
}

#[test]
fn a_vocabulary_is_of_what_is_learned_from() {
    let place = Place::new();
    let text = format!("{}ß{}", "abcdef ".repeat(2850), "abcdef ".repeat(9));
    place.write("text.txt", text.as_bytes());
    place.ok(&train(&["--text", "text.txt", "--set", "layers=1"], "run", "2", &[]));
    assert!(!String::from_utf8(place.read("run/text_tokenizer.json")).unwrap().contains('ß'));
    let scores = place.json(&["eval", "run", "--json"]);
    assert_eq!(scores["unknown"], 1, "{scores}");
}

#[test]
fn bits_per_byte_do_not_depend_on_the_number_of_threads() {
    let place = Place::new();
    let mut draw = support::random(3);
    let text: String = (0..1_700_000).map(|_| char::from(b'a' + (draw() * 9.0) as u8)).collect();
    place.write("text.txt", text.as_bytes());
    let scores: Vec<Value> = ["1", "2", "5"]
        .iter()
        .map(|workers| {
            let workers_key = format!("workers={workers}");
            let more = set(&["evaluate=0", "segment=512", "layers=1", &workers_key]);
            // No step: the same weights, whatever the order of sums in training.
            place.ok(&train(
                &[&["--text", "text.txt"][..], &more].concat(),
                workers,
                "1",
                &["--learning-rate", "1e-30"],
            ));
            place.finds_its_scores_again(workers);
            place.info(workers)["held_out"].clone()
        })
        .collect();
    assert!(scores[0]["bits_per_byte"]["low"].is_f64(), "several passages: {}", scores[0]);
    assert!(scores.iter().all(|one| *one == scores[0]), "{scores:?}");
}

#[test]
fn a_space_that_a_tokenizer_puts_before_a_text_is_put_there_once() {
    let place = Place::new();
    let space = r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":false}"#;
    place.write("space.json", tokenizer("", space, space).as_bytes());
    place.write("text.txt", "abc de".repeat(20_000).as_bytes());
    let data = ["--text", "text.txt", "--tokens", "space.json", "--set", "layers=1"];
    place.ok(&train(&data, "run", "1", &[]));
    // Seven pieces and more, and one token for each byte and the space before the first.
    assert_eq!(place.json(&["eval", "run", "text.txt", "--json"])["tokens"], 120_001);
}

#[test]
fn special_tokens_never_count_as_right() {
    let place = Place::new();
    let end = r#"{"id":28,"content":"<end>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}"#;
    place.write("special.json", tokenizer(end, "null", r#"{"type":"Fuse"}"#).as_bytes());
    let pairs: String = (0..120).map(|n| format!("q{n}\t{}\n", ["<end>", "ab"][n % 2])).collect();
    place.write("special.tsv", pairs.as_bytes());
    let more = ["--target-tokens", "special.json", "--learning-rate", "0.01"];
    let (_, said) = place.said(&place.train_on("special.tsv", "run", "200", &more));
    assert!(said.contains("\"<end>\" is printed as \"\"; special tokens are never printed"), "{said}");
    place.write("text.txt", "ab<end>cd".repeat(40).as_bytes());
    let (_, said) = place.said(&train(&["--text", "text.txt", "--tokens", "special.json"], "text", "1", &[]));
    assert!(said.contains("special tokens of the tokenizer, which generated text does not show"), "{said}");
    let scores = place.json(&["eval", "run", "special.tsv", "--json"]);
    let wrong = scores["sequence_error_rate"]["rate"].as_f64().unwrap();
    assert!(wrong >= 0.5, "the sixty with the special token: {scores}");
}

#[test]
fn the_answers_of_a_beam_differ_in_print() {
    let place = Place::new();
    let pairs: String = (0..100).map(|n| format!("abc{n}\txyz\nbca{n}\tyzx\n")).collect();
    place.write("two.tsv", pairs.as_bytes());
    place.ok(&place.train_on("two.tsv", "run", "60", &["--set", "label_smoothing=0.2", "--learning-rate", "0.01"]));
    place.write("lines", b"abc1\n");
    let answers = place.json(&["predict", "run", "lines", "--beam", "30", "--json"])["answers"].clone();
    let texts: BTreeSet<&str> =
        answers.as_array().unwrap().iter().map(|answer| answer["target"].as_str().unwrap()).collect();
    assert_eq!((answers.as_array().unwrap().len(), texts.len()), (30, 30), "{answers}");
}

#[test]
fn an_answer_is_one_line_whatever_ends_lines() {
    let place = Place::new();
    let pairs: String = (0..60).map(|n| format!("q{n}\ta\u{2028}b\u{85}c\u{b}d\u{c}\n")).collect();
    place.write("lines.tsv", pairs.as_bytes());
    place.ok(&place.train_on("lines.tsv", "run", "150", &["--learning-rate", "0.01"]));
    place.write("question", b"q1\n");
    assert_eq!(place.ok(&["predict", "run", "question"]), "a\\u{2028}b\\u{85}c\\u{b}d\\u{c}\n");
}
