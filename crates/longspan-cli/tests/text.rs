//! Texts: training on them, going on with them, scoring them, and what is no text.

mod support;

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::{Place, failed, set, signal, text};

/// Lines whose words follow each other by rule, some thousand bytes of them.
fn verses(lines: usize) -> String {
    let words = ["and", "the", "sea", "was", "still", "as", "ä", "glass"];
    (0..lines)
        .map(|line| {
            let line: Vec<&str> = (0..5).map(|word| words[(line * word + line / 3) % words.len()]).collect();
            format!("{}.\n", line.join(" "))
        })
        .collect()
}

fn place() -> Place {
    let place = Place::new();
    place.write("verses.txt", verses(300).as_bytes());
    place
}

/// Arguments of a tiny training run on `verses.txt`, then `more`.
fn train<'a>(out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    train_on(&["verses.txt"], out, steps, more)
}

fn train_on<'a>(texts: &[&'a str], out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let settings = set(&["layers=2", "batch_size=4", "segment=16", "carry=3"]);
    support::train(&[&settings[..], &["--text"], texts].concat(), out, steps, more)
}

/// Runs the command with something on its standard input.
fn with_input(place: &Place, arguments: &[&str], input: &[u8]) -> std::process::Output {
    let mut command = place.command(arguments);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // A command that ends early closes it.
    let _ = child.stdin.take().expect("a pipe").write_all(input);
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_run_learns_says_how_well_and_goes_on() {
    let place = place();
    let (stdout, stderr) = place.said(&train("run", "300", &["--learning-rate", "0.02"]));
    for part in ["bits per byte", "bytes in", "Samples:", "generate run --prompt"] {
        assert!(stdout.contains(part), "{part:?}: {stdout}");
    }
    assert!(stderr.contains("verses.txt: ") && stderr.contains("held out; characters ("), "{stderr}");
    let names = place.names("run");
    assert!(names.contains(&"text_tokenizer.json".into()) && !names.contains(&"source_tokenizer.json".into()));
    let info = place.info("run");
    assert_eq!((info["step"].as_u64(), info["finished"].as_bool()), (Some(300), Some(true)));
    let rate = info["held_out"]["bits_per_byte"]["rate"].as_f64().unwrap();
    // A letter drawn evenly from those that occur has almost 4 bits.
    assert!(rate < 1.5, "{rate}");
    place.finds_its_scores_again("run");
    let described = place.ok(&["info", "run"]);
    assert!(described.contains("kernelized attention, 2 blocks") && described.contains("bits per byte"), "{described}");
    let scores = place.json(&["eval", "run", "verses.txt", "--json"]);
    assert_eq!(scores["bytes"].as_u64(), Some(verses(300).len() as u64));
    assert!(scores["bits_per_byte"]["rate"].as_f64().unwrap() < 1.5, "{scores}");
    place.write("long.txt", verses(3000).as_bytes());
    assert!(place.ok(&["eval", "run", "long.txt"]).contains("95 % confidence"));
    let said = place.ok(&["generate", "run", "--prompt", "and the", "--tokens", "400", "--no-end"]);
    let known = said.split_whitespace().filter(|word| verses(300).contains(*word)).count();
    assert!(known * 2 > said.split_whitespace().count(), "most words are words of the text: {said}");
}

#[test]
fn every_mechanism_trains_goes_on_generates_and_scores() {
    let place = place();
    let names = place.mechanisms();
    for name in names.iter().map(String::as_str).chain(["shaw,softmax"]) {
        place.ok(&train(name, "7", &["--attention", name]));
        place.ok(&["train", "--resume", name, "--steps", "9"]);
        assert_eq!(place.losses(name).len(), 9, "{name}");
        // Twice what the run was trained with, where a table has an end.
        let said = place.json(&["generate", name, "--tokens", "100", "--no-end", "--json"]);
        assert_eq!(said["tokens"].as_u64(), Some(100), "{name}");
        let scores = place.json(&["eval", name, "verses.txt", "--json"]);
        assert!(scores["bits_per_byte"]["rate"].as_f64().unwrap() < 8.0, "{name}: {scores}");
    }
}

#[test]
fn gradients_reach_back_over_segments_and_blocks_have_forms() {
    let place = place();
    // Two segments of 16 at once are one of 32, to the bit.
    place.ok(&train("two", "6", &["--backpropagate", "2", "--set", "carry=4"]));
    place.ok(&train("one", "6", &["--set", "segment=32", "--set", "carry=2"]));
    assert_eq!(place.losses("two"), place.losses("one"));
    place.ok(&train("cut", "6", &["--set", "carry=4"]));
    assert_ne!(place.losses("two")[1], place.losses("cut")[1]);
    place.ok(&["train", "--resume", "two", "--steps", "9"]);
    place.fails(&train("run", "3", &["--backpropagate", "4"]), &["backpropagate = 4 is more than carry = 3"]);
    // Tables by position have room for the last step, which goes over the end of `carry`.
    place.ok(&train("table", "5", &["--backpropagate", "2", "--attention", "aft-full"]));

    let forms = ["norm_kind=rms", "activation=silu", "gated=true", "gated_attention=true", "attention=shaw,kernelized"];
    let forms = set(&forms);
    place.ok(&train("forms", "20", &forms));
    place.ok(&train("again", "20", &[&forms[..], &["--set", "recompute=true"]].concat()));
    assert_eq!(place.losses("forms"), place.losses("again"));
    assert!(!place.ok(&["generate", "forms", "--tokens", "50", "--no-end"]).is_empty());
    place.ok(&["eval", "forms", "verses.txt"]);
}

#[test]
fn an_interrupted_run_goes_on_to_the_same_bits() {
    let place = place();
    place.ok(&train("whole", "200", &[]));
    let mut child = place.start(&train("parts", "200", &[]));
    place.wait_for_lines("parts/metrics.jsonl", 5);
    signal("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!((1..200).contains(&place.info("parts")["step"].as_u64().unwrap()));
    place.ok(&["train", "--resume", "parts"]);
    assert_eq!(place.losses("parts"), place.losses("whole"));
}

#[test]
fn memory_does_not_grow_with_what_is_generated_or_scored() {
    let place = place();
    place.ok(&train("run", "5", &[]));
    let generate = |tokens| place.peak(&["generate", "run", "--no-end", "--tokens", tokens]);
    if !support::tells_memory() {
        return;
    }
    let (short, long) = (generate("2000"), generate("100000"));
    assert!(long < short * 1.05, "{short} kB for 2,000 tokens, {long} kB for 100,000");
    place.write("long.txt", verses(40_000).as_bytes());
    let (short, long) = (place.peak(&["eval", "run", "verses.txt"]), place.peak(&["eval", "run", "long.txt"]));
    assert!(long < short * 1.1, "{short} kB for a short text, {long} kB for a long one");
}

#[test]
fn what_is_generated_follows_seed_options_and_stops() {
    let place = place();
    place.ok(&train("run", "60", &["--learning-rate", "0.02"]));
    let say = |more: &[&str]| place.ok(&[&["generate", "run", "--tokens", "60", "--no-end"], more].concat());
    assert_eq!(say(&[]), say(&["--seed", "1"]));
    assert_ne!(say(&[]), say(&["--seed", "2"]));
    assert_eq!(say(&["--temperature", "0"]), say(&["--top-k", "1", "--seed", "7"]));
    assert_eq!(say(&["--temperature", "0"]), say(&["--top-p", "0.000001"]));
    let whole = say(&["--temperature", "0"]);
    let stop: String = whole.chars().skip(20).take(3).collect();
    let cut = say(&["--temperature", "0", "--stop", &stop]);
    assert_eq!(cut.trim_end_matches('\n'), whole[..whole.find(&stop).unwrap()].trim_end_matches('\n'));
    // The prompt may come from standard input, of any length.
    let prompt = verses(60);
    let output = with_input(&place, &["generate", "run", "--prompt", "-", "--json"], prompt.as_bytes());
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["prompt_tokens"].as_u64(), Some(prompt.chars().count() as u64));
    assert_eq!(said["prompt"].as_str(), Some(prompt.as_str()));
    // Where the state has to begin anew, a prompt may be longer than what the state can hold.
    place.ok(&train("softmax", "5", &["--attention", "softmax"]));
    let output = with_input(&place, &["generate", "softmax", "--prompt", "-", "--json"], prompt.as_bytes());
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["prompt_tokens"].as_u64(), Some(prompt.chars().count() as u64));
    // A reader that has seen enough ends it.
    let endless = format!("{} generate run --no-end --tokens 0 | head -c 300", env!("CARGO_BIN_EXE_longspan"));
    let output = Command::new("sh").args(["-c", &endless]).current_dir(place.path("")).output().unwrap();
    assert_eq!(output.stdout.len(), 300);
    assert!(!text(&output.stderr).contains("error"), "{}", text(&output.stderr));
}

#[test]
fn texts_come_as_bytes_pairs_of_bytes_folders_gzip_and_standard_input() {
    let place = place();
    fs::create_dir_all(place.path("books/b")).unwrap();
    for (name, part) in [("books/1.txt", 0..100), ("books/b/2.txt", 100..300)] {
        let lines: String = verses(300).lines().skip(part.start).take(part.len()).map(|l| format!("{l}\n")).collect();
        place.write(name, lines.as_bytes());
    }
    place.write("books/picture", b"\x89PNG\0\0");
    let (_, stderr) = place.said(&train_on(&["books"], "folder", "6", &[]));
    assert!(stderr.contains("in 2 texts"), "{stderr}");
    assert!(stderr.contains("books: left out 1 binary file, such as books/picture"), "{stderr}");
    place.ok(&train("bytes", "6", &["--tokens", "bytes"]));
    assert_eq!(place.info("bytes")["text_vocabulary"].as_u64(), Some(260));
    // Every byte has its text.
    place.ok(&["generate", "bytes", "--tokens", "300", "--temperature", "3", "--no-end"]);
    place.write("binary", &(0..=255u8).cycle().take(5000).collect::<Vec<_>>());
    place.ok(&train_on(&["binary"], "binary-run", "6", &["--tokens", "bytes"]));
    place.ok(&["eval", "binary-run", "binary"]);

    place.ok(&train("pairs", "6", &["--vocabulary", "300"]));
    let info = place.info("pairs");
    assert!((257..=304).contains(&info["text_vocabulary"].as_u64().unwrap()), "{info}");
    assert!(place.ok(&["generate", "pairs", "--prompt", "and the", "--tokens", "30", "--no-end"]).len() > 30);
    place.ok(&["train", "--resume", "pairs", "--steps", "8"]);
    place.write("other.txt", "Ωμέγα 猫\n".repeat(20).as_bytes());
    let unknown = place.json(&["eval", "pairs", "other.txt", "--json"]);
    assert_eq!(unknown["unknown"].as_u64(), Some(0), "bytes make up every text");

    let whole = with_input(&place, &train_on(&["-"], "piped", "6", &[]), verses(300).as_bytes());
    assert!(whole.status.success(), "{}", text(&whole.stderr));
    place.ok(&train("file", "6", &[]));
    assert_eq!(place.losses("piped"), place.losses("file"));
    let status = Command::new("gzip").arg("-k").arg(place.path("verses.txt")).status();
    if status.is_ok_and(|status| status.success()) {
        place.ok(&train_on(&["verses.txt.gz"], "packed", "6", &[]));
        assert_eq!(place.losses("packed"), place.losses("file"));
    }
}

#[test]
fn texts_that_are_none_are_named_and_no_run_is_made() {
    let place = place();
    let long = verses(2000);
    for (name, contents, parts) in [
        ("empty.txt", vec![], ["empty.txt: no text in it", "give"]),
        ("short.txt", b"a few words\n".to_vec(), ["12 bytes are too little", "at least 100"]),
        ("binary", [b"\x7fELF\0\0".to_vec(), vec![7; 500]].concat(), ["binary: a binary file", "--tokens bytes"]),
        ("late", [long.as_bytes(), b"\0"].concat(), ["late: a binary file", "--tokens bytes"]),
        ("latin", [long.as_bytes(), b"\xe9t\xe9"].concat(), ["invalid UTF-8 (0xe9)", "iconv"]),
        ("wide", [b"\xff\xfe".to_vec(), b"a\0b\0".repeat(99)].concat(), ["wide: UTF-16 text", "iconv"]),
        ("two.tsv", b"ab\tba\n".repeat(99), ["two.tsv: it looks like pairs", "--pairs"]),
    ] {
        place.write(name, &contents);
        place.fails(&train_on(&[name], "run", "3", &[]), &parts);
        assert!(!place.path("run").exists(), "{name}: a run folder was made");
    }
    place.fails(&train_on(&["missing"], "run", "3", &[]), &["cannot read missing", "No such file"]);
    place.fails(&train("run", "3", &["--tokens", "words"]), &["words do not keep the space", "characters"]);
    place.fails(&train("run", "3", &["--tokens", "syllables"]), &["unknown tokens \"syllables\"", "bpe"]);
    place.fails(&train("run", "3", &["--vocabulary", "20"]), &["vocabulary = 20", "257"]);
    place.fails(&train("run", "3", &["--vocabulary", "300", "--tokens", "bytes"]), &["--vocabulary goes with"]);
    place.fails(&train("run", "3", &["--set", "pairs=pairs.tsv"]), &["text is given along with pairs"]);
    place.fails(&train("run", "3", &["--set", "segment=0"]), &["segment = 0"]);
    let pairs = place.train_on("verses.txt", "run", "3", &[]);
    place.fails(&pairs, &["verses.txt, line 1: 1 column", "--text"]);
    assert!(!place.path("run").exists());
}

#[test]
fn questions_that_cannot_be_answered_are_named() {
    let place = place();
    place.ok(&train("run", "3", &[]));
    place.trained("pairs-run");
    place.fails(&["predict", "run", "verses.txt"], &["this run generates text", "generate run"]);
    place.fails(&["generate", "pairs-run"], &["predicts for lines", "predict pairs-run"]);
    place.fails(&["generate", "run", "--temperature", "-1"], &["--temperature -1"]);
    place.fails(&["generate", "run", "--top-p", "0"], &["--top-p 0"]);
    place.fails(&["generate", "run", "--stop", ""], &["--stop is empty"]);
    place.fails(&["generate", "run", "--json", "--tokens", "0"], &["--tokens 0"]);
    place.fails(&["generate", "nowhere"], &["cannot open the run folder nowhere"]);
    place.fails(&["generate", "run", "--prompt", "猫犬"], &["nothing in the prompt occurred in training"]);
    let output = with_input(&place, &["generate", "run", "--prompt", "-"], b"and \xff");
    failed(&output, &["standard input, byte 5: invalid UTF-8"]);
    let noted = |prompt: &str| text(&place.run(&["generate", "run", "--prompt", prompt, "--tokens", "3"]).stderr);
    assert!(noted("").contains("the prompt is empty"));
    assert!(noted("and 猫").contains("\"猫\" did not occur in training"));
    place.write("empty.txt", b"");
    place.fails(&["eval", "run", "empty.txt"], &["empty.txt: no text in it"]);
    place.write("latin", b"caf\xe9");
    place.fails(&["eval", "run", "latin"], &["latin, byte 4: invalid UTF-8 (0xe9)"]);
    place.write("other.txt", "猫 and the sea\n".repeat(30).as_bytes());
    let scored = place.ok(&["eval", "run", "other.txt"]);
    assert!(scored.contains("30 tokens did not occur in training"), "{scored}");
}

#[test]
fn going_on_needs_the_same_text_wherever_it_is() {
    let place = place();
    place.ok(&train("run", "6", &[]));
    fs::rename(place.path("verses.txt"), place.path("moved.txt")).unwrap();
    place.fails(&["train", "--resume", "run", "--steps", "8"], &["verses.txt"]);
    place.ok(&["train", "--resume", "run", "--steps", "8", "--text", "moved.txt"]);
    place.write("moved.txt", verses(301).as_bytes());
    place.fails(&["train", "--resume", "run", "--steps", "9"], &["is not what this run began with", "--text"]);
    place.fails(&["train", "--resume", "run", "--set", "carry=2"], &["`carry` is fixed by the run"]);
}
