//! Predicting, scoring and describing.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::Value;
use support::{Place, failed, text};

#[test]
fn lines_are_answered_as_they_come() {
    let place = Place::new();
    place.trained("run");
    let mut child = place
        .command(&["predict", "run"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut answers = Vec::new();
    for line in ["abc", "", "gfe"] {
        writeln!(input, "{line}").unwrap();
        let mut answer = String::new();
        // The input is still open: an answer that waited for more would never come.
        output.read_line(&mut answer).unwrap();
        answers.push(answer);
    }
    drop(input);
    assert!(child.wait().unwrap().success());
    assert_eq!(answers[1], "\n");
    place.write("lines", b"abc\r\n\ngfe");
    assert_eq!(place.ok(&["predict", "run", "lines"]), answers.concat(), "a file is answered alike");
}

#[test]
fn answers_do_not_depend_on_their_neighbours() {
    let place = Place::new();
    place.trained("run");
    let words = ["abc", "a", "gfedcba", "bb", "c"];
    place.write("all", words.join("\n").as_bytes());
    let together: Vec<String> = place.ok(&["predict", "run", "all", "--beam", "3"]).lines().map(Into::into).collect();
    for (word, answer) in words.iter().zip(&together) {
        place.write("one", word.as_bytes());
        assert_eq!(place.ok(&["predict", "run", "one", "--beam", "3"]).trim_end(), answer, "{word}");
    }
    // More than are taken at a time, whichever thread answers them.
    let many = |lines: &[String]| lines.iter().cycle().take(3000).cloned().collect::<Vec<String>>().join("\n");
    place.write("many", many(&words.map(String::from)).as_bytes());
    assert_eq!(place.ok(&["predict", "run", "many", "--beam", "3"]).trim_end(), many(&together));
}

#[test]
fn a_long_line_takes_little_more_than_the_rows_of_its_encoder() {
    if !support::tells_memory() {
        return;
    }
    const TOKENS: usize = 300_000;
    const WIDTH: usize = 64;
    let place = Place::new();
    place.ok(&place.train("run", "3", &["--set", &format!("d_model={WIDTH}")]));
    place.write("short", b"abc");
    place.write("long", "abcdefg".repeat(TOKENS / 7).as_bytes());
    let grown = place.peak(&["predict", "run", "long"]) - place.peak(&["predict", "run", "short"]);
    let rows = (TOKENS * WIDTH * 4) as f64 / 1e3;
    // And a segment's work. Projections and heads of all rows would take five times as much as the rows.
    assert!((rows..2.5 * rows).contains(&grown), "{grown} kB for {rows} kB of rows");
}

#[test]
fn json_has_the_beam_with_scores() {
    let place = Place::new();
    place.trained("run");
    place.write("lines", b"abc\n\n");
    let lines = place.ok(&["predict", "run", "lines", "--json", "--beam", "3"]);
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    let answers = lines[0]["answers"].as_array().unwrap();
    assert_eq!((lines[0]["source"].as_str(), answers.len()), (Some("abc"), 3));
    assert_eq!(lines[0]["target"], answers[0]["target"]);
    let scores: Vec<f64> = answers.iter().map(|answer| answer["score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b) && scores[0] < 0.0, "{scores:?}");
    assert_eq!(lines[1]["target"], "");
}

#[test]
fn unknown_characters_are_said_once_and_answered() {
    let place = Place::new();
    place.trained("run");
    place.write("lines", "aüb\nüü\n".as_bytes());
    let output = place.run(&["predict", "run", "lines"]);
    assert!(output.status.success());
    assert_eq!(text(&output.stdout).lines().count(), 2);
    assert_eq!(text(&output.stderr).matches("\"ü\" did not occur in training").count(), 1);
    place.write("holes.csv", b"source,target\na,b\nb,\n,c\nc,\n");
    let notes = place.said(&["info", "holes.csv"]).1;
    for part in ["nothing in the column `source` of 1 row", "nothing in the column `target` of 2 rows"] {
        assert!(notes.contains(part), "{notes}");
    }
}

#[test]
fn many_unknown_characters_are_one_note() {
    let place = Place::new();
    place.trained("run");
    let lines: String = (0..300u32).filter_map(|i| char::from_u32(0x4e00 + i)).map(|c| format!("{c}\n")).collect();
    place.write("lines", lines.as_bytes());
    let output = place.run(&["predict", "run", "lines"]);
    let notes = text(&output.stderr);
    assert_eq!(notes.matches("did not occur").count(), 1, "{notes}");
    assert!(notes.contains("and 295 more did not occur in training"), "{notes}");
}

#[test]
fn answers_with_line_ends_are_one_line_and_cut_ones_are_counted() {
    let place = Place::new();
    let pairs: String = (0..60).map(|i| format!("{{\"source\":\"{i}\",\"target\":\"a\\na\\na\\na\"}}\n")).collect();
    place.write("pairs.jsonl", pairs.as_bytes());
    let more = ["--learning-rate", "0.01", "--set", "answer_tokens=3"];
    place.ok(&place.train_on("pairs.jsonl", "run", "150", &more));
    for (lines, note) in
        [("1\n2\n3\n", "3 answers did not end within 3 tokens"), ("2\n", "1 answer did not end within")]
    {
        place.write("lines", lines.as_bytes());
        let output = place.run(&["predict", "run", "lines"]);
        assert_eq!(text(&output.stdout), "a\\na …\n".repeat(lines.lines().count()));
        assert!(text(&output.stderr).contains(note), "{}", text(&output.stderr));
    }
    assert!(
        place.said(&["eval", "run", "pairs.jsonl"]).1.contains("60 answers did not end within 3 tokens, cut there")
    );
    let (table, notes) = place.said(&["predict", "run", "lines", "--csv"]);
    assert_eq!(table, "source,target\n2,\"a\na\"\n");
    assert!(notes.contains("cut there") && !notes.contains("marked"), "a table has no mark: {notes}");
    place.write("none.csv", b"source\n");
    assert_eq!(place.ok(&["predict", "run", "none.csv", "--csv"]), "source,target\n", "a table without rows");
}

#[test]
fn a_reader_that_has_had_enough_is_no_error() {
    let place = Place::new();
    place.trained("run");
    place.write("many", "abc\n".repeat(20_000).as_bytes());
    let mut child =
        place.command(&["predict", "run", "many"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let place = Place::new();
    place.trained("run");
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = place.command(&["predict", "run", "pairs.tsv"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    failed(&output, &["cannot write to standard output", "No space left on device"]);
}

#[test]
fn scores_come_with_intervals() {
    let place = Place::new();
    place.trained("run");
    let table = place.ok(&["eval", "run", "pairs.tsv"]);
    assert!(table.contains("token error rate") && table.contains("95 % confidence"), "{table}");
    let value = place.json(&["eval", "run", "pairs.tsv", "--json"]);
    for key in ["token_error_rate", "sequence_error_rate"] {
        let part = |name: &str| value[key][name].as_f64().unwrap();
        assert!(part("low") <= part("rate") && part("rate") <= part("high"), "{value}");
    }
    assert_eq!(value["sequences"], 200);
    place.finds_its_scores_again("run");
    place.write("own.jsonl", br#"{"source":"abc","target":["x","y"]}"#);
    let value = place.json(&["eval", "run", "own.jsonl", "--json"]);
    assert_eq!((value["sequences"].as_u64(), value["tokens"].as_u64()), (Some(1), Some(1)));
}

#[test]
fn what_was_held_out_is_scored_while_the_data_are_there() {
    let place = Place::new();
    place.trained("run");
    let pairs = place.read("pairs.tsv");
    // The first would be learned from, the second for development, the third held out.
    for more in ["one more", "longer", "newest"] {
        place.write("pairs.tsv", &[&pairs[..], more.as_bytes(), b"\tpair\n"].concat());
        place.fails(&["eval", "run"], &["pairs.tsv is not what this run learned from", "name a file to score"]);
    }
    std::fs::remove_file(place.path("pairs.tsv")).unwrap();
    place.fails(&["eval", "run"], &["pairs.tsv", "No such file", "name a file to score"]);
    place.write("pairs.tsv", &pairs);
    let scores = |beam| place.json(&["eval", "run", "--beam", beam, "--json"]);
    let (one, four) = (scores("1"), scores("4"));
    assert_eq!((&one["sequences"], &four["beam"]), (&four["sequences"], &Value::from(4)));
    std::fs::remove_file(place.path("run/checkpoint.safetensors")).unwrap();
    place.fails(&["eval", "run"], &["checkpoint"]);
}

#[test]
fn a_run_that_learnt_its_pairs_answers_them() {
    let place = Place::new();
    // Enough steps to copy two letters: scoring must see it.
    let pairs: String =
        (0..49).map(|i| format!("{0}{1}\t{0}{1}\n", char::from(b'a' + i / 7), char::from(b'a' + i % 7))).collect();
    place.write("pairs.tsv", pairs.as_bytes());
    place.ok(&place.train("run", "400", &["--learning-rate", "0.01", "--set", "d_model=32"]));
    let value = place.json(&["eval", "run", "pairs.tsv", "--json"]);
    assert!(value["sequence_error_rate"]["rate"].as_f64().unwrap() < 0.2, "{value}");
}

#[test]
fn words_bytes_and_a_tokenizer_file_serve_as_tokens() {
    let place = Place::new();
    place.write(
        "tokenizer.json",
        br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":{"type":"Lowercase"},
        "pre_tokenizer":{"type":"Split","pattern":{"Regex":"."},"behavior":"Isolated","invert":false},"post_processor":null,
        "decoder":{"type":"Fuse"},"model":{"type":"WordLevel","vocab":{"[UNK]":0,"a":1,"b":2,"c":3,"d":4,"e":5,"f":6,"g":7},
        "unk_token":"[UNK]"}}"#,
    );
    for (run, source, target) in [("one", "tokenizer.json", "bytes"), ("two", "words", "tokenizer.json")] {
        place.ok(&place.train(run, "3", &["--source-tokens", source, "--target-tokens", target]));
        // The run holds all it needs.
        assert!(place.ok(&["info", run]).contains(&source.replace("words", "words (")));
        assert_eq!(place.ok(&["predict", run, "pairs.tsv"]).lines().count(), 200);
    }
    std::fs::remove_file(place.path("tokenizer.json")).unwrap();
    place.ok(&["predict", "one", "pairs.tsv"]);
    place.ok(&["train", "--resume", "one", "--steps", "5"]);
}

#[test]
fn an_unknown_token_is_never_right() {
    let place = Place::new();
    place.write(
        "tokenizer.json",
        br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"cat":0,"dog":1,"[UNK]":2},"unk_token":"[UNK]"}}"#,
    );
    let pairs: String = (0..60).map(|i| format!("a{i}\tzebra{i}\n")).collect();
    place.write("pairs.tsv", pairs.as_bytes());
    place.ok(&place.train("run", "40", &["--target-tokens", "tokenizer.json", "--learning-rate", "0.01"]));
    let value = place.json(&["eval", "run", "pairs.tsv", "--json"]);
    assert_eq!(value["sequence_error_rate"]["rate"], 1.0, "{value}");
}

#[test]
fn mechanisms_are_compared() {
    let place = Place::new();
    let table = place.ok(&["info", "--mechanisms"]);
    let value = place.json(&["info", "--mechanisms", "--json"]);
    let listed = place.ok(&["train", "--help"]);
    for facts in value.as_array().unwrap() {
        let name = facts["name"].as_str().unwrap();
        assert!(listed.contains(name), "{name} is not in the help");
        assert!(table.lines().any(|line| line.starts_with(name)), "{name}: {table}");
        assert!(facts["bidirectional"].as_bool().unwrap() || facts["causal"].as_bool().unwrap(), "{facts}");
    }
    let of = |name: &str| value.as_array().unwrap().iter().find(|facts| facts["name"] == name).unwrap();
    assert_eq!((&of("kernelized")["causal_time"], &of("kernelized")["state_grows"]), (&"L".into(), &false.into()));
    assert_eq!(of("shaw")["learned"][0]["name"], "relative");
    assert_eq!(of("shaw")["options"]["relative"]["shared"], false);
    place.fails(&["info"], &["<RUN>"]);
    place.fails(&["info", "run", "--mechanisms"], &["cannot be used with"]);
}

#[test]
fn completions_know_every_verb() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(place.ok(&["completions", shell]).contains("predict"), "{shell}");
    }
}

#[test]
fn pairs_may_be_csv_with_a_header() {
    let place = Place::new();
    let pairs = text(&place.read("pairs.tsv"));
    let rows: String = pairs
        .lines()
        .map(|line| line.split_once('\t').expect("two columns"))
        .fold("\u{feff}\"note, of mine\",Target,SOURCE\r\n".into(), |csv, (source, target)| {
            csv + &format!("\"x,\n\"\"y\"\"\",{target},\"{source}\"\r\n")
        });
    place.write("PAIRS.CSV", rows.as_bytes());
    place.trained("run");
    place.ok(&place.train_on("PAIRS.CSV", "csv", "12", &[]));
    assert_eq!(place.losses("csv"), place.losses("run"));
    // Answers have the names of the file, and other files may have other usual ones.
    place.write("question.csv", b"note,question\nx,ab\n");
    place.write("asked.tsv", b"Source\tx\nab\t1\n");
    assert!(place.ok(&["predict", "csv", "asked.tsv", "--csv"]).starts_with("SOURCE,Target\nab,"));
    let (table, notes) = place.said(&["predict", "csv", "question.csv", "--csv"]);
    assert!(
        table.starts_with("SOURCE,Target\nab,") && notes.contains("no column `SOURCE`, so `question` is read"),
        "{notes}"
    );
    let scores = place.ok(&["eval", "run", "pairs.tsv"]);
    assert_eq!(place.ok(&["eval", "run", "PAIRS.CSV"]), scores);
    let status =
        std::process::Command::new("gzip").args(["-S", ".GZ", "PAIRS.CSV"]).current_dir(place.path("")).status();
    assert!(status.unwrap().success());
    assert_eq!(place.ok(&["eval", "run", "PAIRS.CSV.GZ"]), scores);
    place.write("bare.csv", b"abc,cba\n");
    place.fails(&["eval", "run", "bare.csv"], &["bare.csv, line 1: no column `source` among `abc`, `cba`", "--source"]);
}

#[test]
fn a_text_that_a_tokenizer_cannot_encode_is_named_with_its_line() {
    let place = Place::new();
    place.write(
        "tokenizer.json",
        br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"cat":0,"dog":1},"unk_token":"[UNK]"}}"#,
    );
    place.write("pairs.tsv", ["cat\tdog\n".repeat(9), "dog\tcat\ncat\tdog dog\n".into()].concat().as_bytes());
    let tokens = ["--source-tokens", "tokenizer.json", "--target-tokens", "tokenizer.json"];
    place.ok(&place.train("run", "3", &tokens));
    place.write("other.tsv", b"cat\tdog\n\ncat\tzebra\ncat\tcat\n");
    place.fails(&["eval", "run", "other.tsv"], &["other.tsv, line 3: the tokenizer.json cannot encode \"zebra\""]);
    place.write("lines", b"cat\ndog\nzebra\n");
    let output = place.run(&["predict", "run", "lines"]);
    failed(&output, &["lines, line 3: the tokenizer.json cannot encode \"zebra\"", "give it one"]);
    place.write("pairs.tsv", b"cat\tdog\ndog\tcat\nzebra\tcat\n");
    place.fails(&place.train("other", "3", &tokens), &["pairs.tsv, line 3: ", "\"zebra\""]);
}

#[test]
fn standard_input_and_gzip_are_read() {
    let place = Place::new();
    place.trained("run");
    let answers = place.ok(&["predict", "run", "pairs.tsv"]);
    let status = std::process::Command::new("gzip").args(["-k", "pairs.tsv"]).current_dir(place.path("")).status();
    assert!(status.unwrap().success());
    assert_eq!(place.ok(&["predict", "run", "pairs.tsv.gz"]), answers);
    let input = || Stdio::from(std::fs::File::open(place.path("pairs.tsv.gz")).unwrap());
    // Of a table the column of sources is answered; standard input has lines, unless the first one is a header or an object, or has tabs.
    let sources: String =
        text(&place.read("pairs.tsv")).lines().map(|line| format!("{}\n", line.split('\t').next().unwrap())).collect();
    place.write("sources", sources.as_bytes());
    let lines = Stdio::from(std::fs::File::open(place.path("sources")).unwrap());
    let output = place.command(&["predict", "run", "-"]).stdin(lines).output().unwrap();
    assert_eq!(text(&output.stdout), answers);
    place.write("marked", format!("\u{feff}{sources}").as_bytes());
    let (told, notes) = place.said(&["predict", "run", "marked"]);
    assert_eq!(told, answers);
    assert!(!notes.contains("did not occur"), "a mark is no character: {notes}");
    let rows: String = sources.lines().map(|line| format!("x,{line}\n")).collect();
    place.write("sources.csv", format!("note,word\n{rows}").as_bytes());
    assert_eq!(place.ok(&["predict", "run", "sources.csv"]), answers);
    place.write("named.csv", format!("note,Wort\n{rows}").as_bytes());
    place.fails(
        &["predict", "run", "named.csv"],
        &["named.csv, line 1: no column `source` among `note`, `Wort`", "--source NAME"],
    );
    assert_eq!(place.ok(&["predict", "run", "named.csv", "--source", "Wort"]), answers);
    let objects: String = sources.lines().map(|line| format!("{{\"source\": \"{line}\"}}\n")).collect();
    place.write("sources.jsonl", objects.as_bytes());
    let on_input = |file: &str, more: &[&str]| {
        let input = Stdio::from(std::fs::File::open(place.path(file)).unwrap());
        let output = place.command(&[&["predict", "run"], more].concat()).stdin(input).output().unwrap();
        (text(&output.stdout), text(&output.stderr))
    };
    place.write("header.csv", format!("note,source\n{rows}").as_bytes());
    let pretty: Vec<String> = sources.lines().map(|line| format!("  {{\n    \"source\": \"{line}\"\n  }}")).collect();
    place.write("pretty.json", format!("[\n{}\n]\n", pretty.join(",\n")).as_bytes());
    for (file, more, column) in [
        ("pretty.json", &[][..], "source"),
        ("header.csv", &[], "source"),
        ("named.csv", &["--source", "Wort"], "Wort"),
        ("sources.jsonl", &[], "source"),
    ] {
        place.write("table.txt", &place.read(file));
        let as_text = place.said(&[&["predict", "run", "table.txt"], more].concat());
        for (found, notes) in [on_input(file, more), as_text] {
            assert!(
                found == answers && notes.contains(&format!("the column `{column}` is predicted for")),
                "{file}: {notes}"
            );
        }
    }
    // The one file of a zip archive.
    let mut archive = zip::ZipWriter::new(std::fs::File::create(place.path("table.zip")).unwrap());
    archive.start_file("header.csv", zip::write::SimpleFileOptions::default()).unwrap();
    archive.write_all(&place.read("header.csv")).unwrap();
    archive.finish().unwrap();
    assert_eq!(on_input("table.zip", &[]).0, answers);
    // Lines that end as on old Macs are lines.
    place.write("mac", sources.replace('\n', "\r").as_bytes());
    assert_eq!(place.ok(&["predict", "run", "mac"]), answers);
    // Of tabs without a header the first column.
    place.write("pairs.txt", &place.read("pairs.tsv"));
    for (found, notes) in [on_input("pairs.tsv", &[]), place.said(&["predict", "run", "pairs.txt"])] {
        assert!(
            found == answers && notes.contains("tabs between them, of which the first is predicted for"),
            "{notes}"
        );
    }
    place.fails(
        &["predict", "run", "sources", "--source", "Wort"],
        &["sources: read as lines of text", "no column `Wort`"],
    );
    // Of tabs the column by a name that it often has, in letters of any case.
    let rows = rows.replace(',', "\t");
    for (title, more, said) in [
        ("word", &[][..], "the first line names the columns, and `word` is predicted for"),
        ("Source", &[], ""),
        ("wort", &["--source", "Wort"], ""),
    ] {
        place.write("titled.tsv", format!("note\t{title}\n{rows}").as_bytes());
        let (found, notes) = place.said(&[&["predict", "run", "titled.tsv"], more].concat());
        assert!(found == answers && notes.contains(said), "{title}: {notes}");
    }
    // Without a known name commas are letters.
    assert_eq!(on_input("named.csv", &[]).0.lines().count(), 201);
    let table = place.ok(&["predict", "run", "sources.csv", "--csv"]);
    let first = (sources.lines().next().unwrap(), answers.lines().next().unwrap());
    assert!(table.starts_with(&format!("source,target\n{},{}\n", first.0, first.1)), "{table}");
    assert_eq!(table.lines().count(), 201);
    place.write("empty.csv", b"source,x\n,1\n");
    assert_eq!(place.ok(&["predict", "run", "empty.csv", "--csv"]), "source,target\n,\n");
    let output = place.command(&place.train_on("-", "piped", "3", &[])).stdin(input()).output().unwrap();
    assert!(text(&output.stderr).starts_with("standard input: "), "{}", text(&output.stderr));
    let scores = place.ok(&["eval", "run", "pairs.tsv"]);
    assert_eq!(place.ok(&["eval", "run", "pairs.tsv.gz"]), scores);
    assert_eq!(text(&place.command(&["eval", "run", "-"]).stdin(input()).output().unwrap().stdout), scores);
    // A first line of names that are not known is a pair, which is said.
    let rows: String = (0..20).map(|n| format!("a {n} b\tc {n}\n")).collect();
    place.write("named.tsv", format!("english\tfrench\n{rows}").as_bytes());
    let flags = "if the line names the columns, give --source english --target french";
    assert!(place.said(&["eval", "run", "named.tsv"]).1.contains(flags));
    assert!(!place.said(&["eval", "run", "named.tsv", "--source", "English", "--target", "french"]).1.contains(flags));
    let cut = place.read("pairs.tsv.gz");
    place.write("cut.tsv.gz", &cut[..cut.len() / 2]);
    place.fails(&["eval", "run", "cut.tsv.gz"], &["cannot read cut.tsv.gz", "whole"]);
}
