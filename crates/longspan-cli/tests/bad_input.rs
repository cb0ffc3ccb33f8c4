//! Files, folders and settings that are not what they should be: one line each, and nothing is made or lost.

mod support;

use std::fs;

use support::Place;

#[test]
fn bad_pairs_are_named_with_their_line() {
    let place = Place::new();
    let good = "ab\tba\n".repeat(6);
    for (file, contents, parts) in [
        ("a.tsv", [good.as_bytes(), b"no tab here\n"].concat(), ["a.tsv, line 7: 1 column, expected two", "tab"]),
        ("b.tsv", [good.as_bytes(), b"a\tb\tc\n"].concat(), ["b.tsv, line 7: 3 columns, expected two", "cut -f 1,2"]),
        ("c.tsv", [good.as_bytes(), b"a\xffb\tc\n"].concat(), ["c.tsv, line 7, byte 2: invalid UTF-8 (0xff)", "iconv"]),
        ("d.tsv", Vec::new(), ["d.tsv: no pairs", "one pair a line"]),
        ("e.tsv", b"\n\n".to_vec(), ["e.tsv: no pairs", "one pair a line"]),
        ("none.tsv", b"a\t\nb\t\n".to_vec(), ["none.tsv: every target is empty", "--target"]),
        ("from.tsv", b"\tb\n\tc\n".to_vec(), ["from.tsv: every source is empty", "--source"]),
        (
            "f.jsonl",
            b"{\"source\": \"a\", \"target\": \"b\"}\n{\"source\": 3}".to_vec(),
            ["f.jsonl, line 2: ", "expected"],
        ),
    ] {
        place.write(file, &contents);
        let out = format!("{file}-run");
        place.fails(&place.train_on(file, &out, "3", &[]), &parts);
        assert!(!place.path(&out).exists(), "{file}: a run folder was made");
    }
    let missing = place.train_on("missing.tsv", "run", "3", &[]);
    place.fails(&missing, &["cannot read missing.tsv", "No such file"]);
}

#[test]
fn eval_and_predict_refuse_bad_files() {
    let place = Place::new();
    place.trained("run");
    place.write("bad.tsv", b"a\tb\na\n");
    place.fails(&["eval", "run", "bad.tsv"], &["bad.tsv, line 2: 1 column"]);
    place.write("empty.tsv", b"");
    place.fails(&["eval", "run", "empty.tsv"], &["empty.tsv: no pairs"]);
    place.fails(&["predict", "run", "missing"], &["cannot read missing"]);
    place.fails(&["predict", "run", "."], &["cannot read ."]);
    place.fails(&["predict", "run", "--beam", "0"], &["--beam 0"]);
    place.fails(&["info", "run", "--time", "when"], &["--time, --id and their like are used by a file of data alone"]);
    place.fails(&["info", "bad.tsv", "--accept-changes"], &["--accept-changes is not used by a file of data"]);
    place.write("bad.txt", b"abc\nab\xff\nabc\n");
    let output = place.run(&["predict", "run", "bad.txt"]);
    support::failed(&output, &["bad.txt, line 2, byte 3: invalid UTF-8"]);
    assert_eq!(support::text(&output.stdout).lines().count(), 1, "the line before is answered");
    assert_eq!(place.ok(&["predict", "run", "empty.tsv"]), "", "no lines, no answers");
}

#[test]
fn unknown_names_and_keys_are_answered_with_the_known_ones() {
    let place = Place::new();
    let train = |more: &[&str], parts: &[&str]| {
        let error = place.fails(&place.train("run", "3", more), parts);
        assert!(!place.path("run").exists());
        error
    };
    train(&["--attention", "shw"], &["unknown attention \"shw\"", "did you mean `shaw`", "kernelized, shaw, "]);
    train(
        &["--set", "attention_options={relative = {width = 3}}"],
        &["attention_options", "unknown field `width`", "the options of shaw are"],
    );
    train(&["--set", "attention_options=3"], &["`attention_options` = 3", "expected a table"]);
    train(&["--set", "feature_map=gelu"], &["unknown feature map \"gelu\"", "known are elu+1"]);
    train(
        &["--set", "learning-rat=1"],
        &["--set: unknown key `learning-rat`; did you mean `learning_rate`? known are"],
    );
    train(&["--set", "qqqqqqqq=1"], &["--set: unknown key `qqqqqqqq`; known are"]);
    let error = train(&["--set", "steps=many"], &["--set: `steps` = \"many\"", "expected a whole number"]);
    assert!(!error.contains("usize"), "{error}");
    train(&["--set", "steps"], &["no `=`"]);
    train(&["--minutes", "nan"], &["cannot be used with"]);
    train(&["--learning-rate", "inf"], &["--learning-rate inf: expected a finite number"]);
    train(&["--set", "norm=both"], &["`norm` = \"both\": unknown value `both`, expected `pre` or `post`"]);
    train(&["--set", "heads=3"], &["not a multiple of heads = 3"]);
    train(&["--set", "dropout=1.5"], &["dropout = 1.5"]);
    train(&["--time", "when"], &["--time is not used by --pairs: leave it out"]);
    train(&["--text-column", "review"], &["--text-column is not used by --pairs"]);
    train(&["--source-tokens", "syllables"], &["unknown tokens \"syllables\"", "characters, words, bytes"]);
    train(&["--source-tokens", "missing.json"], &["missing.json"]);
    place.write("bad.json", b"{\"model\": 1}");
    train(&["--source-tokens", "bad.json"], &["bad.json: not a tokenizer.json"]);
    for contents in [
        "{\"version\":\"1.0\",\"model\":1}",
        "[]",
        "no",
        "{\"version\":\"1.0\",\"normalizer\":{\"type\":\"x\"},\"model\":1}",
    ] {
        place.write("bad.json", contents.as_bytes());
        let error = train(&["--target-tokens", "bad.json"], &["bad.json: not a tokenizer.json", "save it"]);
        assert!(!["untagged", "struct", "enum", "u32"].iter().any(|word| error.contains(word)), "{error}");
    }
    train(&["--config", "missing.toml"], &["cannot read missing.toml"]);
    place.write("bad.toml", b"steps = 3\nseed = = 4\n");
    train(&["--config", "bad.toml"], &["bad.toml, line 2: "]);
    place.write("key.toml", b"stesp = 3\n");
    train(&["--config", "key.toml"], &["key.toml: unknown key `stesp`", "did you mean `steps`"]);
    place.fails(&["train", "--frobnicate"], &["unexpected argument '--frobnicate'", "longspan --help"]);
    place.fails(&["train", "--steps", "x"], &["invalid value 'x' for '--steps <N>'"]);
    place.fails(&["fly"], &["unrecognized subcommand 'fly'"]);
    place.fails(&[], &["no subcommand"]);
    place.fails(&["predict"], &["<RUN>"]);
}

#[test]
fn no_pairs_left_for_training_is_said() {
    let place = Place::new();
    place.write("pairs.tsv", b"one more\tb\n");
    place.fails(&place.train("run", "3", &["--set", "max_tokens=2"]), &["more than 2 tokens", "max_tokens"]);
}

#[test]
fn a_damaged_model_is_named_and_going_on_mends_it() {
    let place = Place::new();
    place.trained("run");
    place.write("lines", b"abc\n");
    let answer = place.ok(&["predict", "run", "lines"]);
    let whole = place.read("run/model.safetensors");
    let mut tampered = whole.clone();
    *tampered.last_mut().unwrap() ^= 1;
    let mut other_header = whole.clone();
    other_header[20] ^= 1;
    for (contents, what) in [
        (whole[..whole.len() / 2].to_vec(), "cut short"),
        (whole[..4].to_vec(), "cut short"),
        (Vec::new(), "empty"),
        (tampered, "changed"),
        (other_header, "changed header"),
    ] {
        place.write("run/model.safetensors", &contents);
        for arguments in [vec!["predict", "run", "lines"], vec!["info", "run"], vec!["eval", "run", "pairs.tsv"]] {
            let error = place.fails(&arguments, &["run/model.safetensors: ", "train --resume run"]);
            assert!(error.contains("damaged"), "{what}: {error}");
        }
    }
    fs::remove_file(place.path("run/model.safetensors")).unwrap();
    place.fails(&["predict", "run", "lines"], &["run/model.safetensors", "No such file"]);
    place.ok(&["train", "--resume", "run"]);
    assert_eq!(place.read("run/model.safetensors"), whole);
    assert_eq!(place.ok(&["predict", "run", "lines"]), answer);
}

#[test]
fn a_damaged_checkpoint_is_named() {
    let place = Place::new();
    place.trained("run");
    let whole = place.read("run/checkpoint.safetensors");
    let mut tampered = whole.clone();
    *tampered.last_mut().unwrap() ^= 1;
    for contents in [whole[..whole.len() - 1].to_vec(), tampered] {
        place.write("run/checkpoint.safetensors", &contents);
        place.fails(&["train", "--resume", "run"], &["run/checkpoint.safetensors: ", "damaged"]);
        place.fails(&["info", "run"], &["run/checkpoint.safetensors: ", "damaged"]);
        place.ok(&["predict", "run", "pairs.tsv"]);
    }
}

#[test]
fn a_run_folder_cut_short_is_named() {
    let place = Place::new();
    for file in ["config.json", "source_tokenizer.json", "target_tokenizer.json"] {
        let run = format!("without-{file}");
        place.trained(&run);
        let contents = place.read(&format!("{run}/{file}"));
        place.write(&format!("{run}/{file}"), &contents[..contents.len() / 2]);
        place.fails(&["predict", &run, "pairs.tsv"], &[file, "damaged"]);
        fs::remove_file(place.path(&format!("{run}/{file}"))).unwrap();
        place.fails(&["predict", &run, "pairs.tsv"], &[file]);
        place.fails(&["train", "--resume", &run], &[file]);
    }
    fs::create_dir(place.path("empty")).unwrap();
    place.fails(&["info", "empty"], &["empty is not a run folder", "config.json"]);
    place.fails(&["predict", "pairs.tsv"], &["pairs.tsv is not a folder"]);
    assert!(place.ok(&["info", "pairs.tsv"]).contains("--pairs     200 pairs"), "of a file `info` says how it is read");
    place.fails(&["info", "nowhere"], &["cannot open the run folder nowhere"]);
}

#[test]
fn settings_and_weights_of_different_runs_do_not_mix() {
    let place = Place::new();
    place.trained("run");
    place.ok(&place.train("wide", "3", &["--set", "d_ff=32"]));
    fs::copy(place.path("wide/model.safetensors"), place.path("run/model.safetensors")).unwrap();
    place.fails(&["predict", "run", "pairs.tsv"], &["run/model.safetensors: ", "the model wants"]);
}

#[test]
fn sizes_are_checked_before_memory_is_asked_for() {
    let place = Place::new();
    for (setting, parts) in [
        ("d_model=1000000000", ["d_model: expected a table that fits memory", "1000000000"]),
        ("d_ff=2000000000", ["a model of ", "GB are free; lower d_model"]),
        ("d_ff=1000000000000", ["d_ff = 1000000000000", "at most"]),
        ("radius=2000000000", ["a model of ", "radius"]),
        ("encoder_layers=1000000000", ["a model of ", "encoder_layers"]),
        ("workers=100000", ["workers = 100000", "1 to 1024"]),
    ] {
        place.fails(&place.train("run", "3", &["--set", setting]), &parts);
        assert!(!place.path("run").exists(), "{setting}");
    }
    place.fails(&place.train("run", "0", &[]), &["steps = 0: expected at least 1"]);
    place.write(
        "huge.json",
        br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,
        "post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"cat":0,"[UNK]":1900000000},"unk_token":"[UNK]"}}"#,
    );
    place.fails(&place.train("run", "3", &["--source-tokens", "huge.json"]), &["a model of ", "vocabularies"]);
    place.ok(&place.train("run", "3", &["--set", "answer_tokens=100"]));
    place.fails(&["predict", "run", "pairs.tsv", "--beam", "1000000000"], &["--beam 1000000000 would take about"]);
}

#[test]
fn options_of_other_mechanisms_are_refused() {
    let place = Place::new();
    for (more, parts) in [
        (
            &["--attention", "kernelized", "--set", "radius=4"][..],
            ["`radius` is not used by kernelized", "--attention"],
        ),
        (&["--attention", "toeplitz", "--set", "radius=4"], ["`radius` is not used by toeplitz", "--attention"]),
        (
            &["--attention", "softmax", "--set", "feature_map=exp"],
            ["`feature_map` is not used by softmax", "--attention"],
        ),
    ] {
        place.fails(&place.train("run", "3", more), &parts);
        assert!(!place.path("run").exists(), "{more:?}");
    }
    place.ok(&place.train("run", "3", &["--set", "radius=4", "--set", "feature_map=exp"]));
}

#[test]
fn texts_that_the_memory_has_no_room_for_are_refused() {
    let place = Place::new();
    // A width that each token has, and few weights, which Muon would orthogonalise for most of a minute.
    let wide = support::set(&["d_model=2048", "d_ff=1", "heads=1024", "workers=1", "optimizer=adamw"]);
    place.write("pairs.tsv", "ab\tba\nabc\tcba\nb\tb\nca\tac\n".repeat(2).as_bytes());
    place.ok(&place.train("run", "1", &wide));
    place.write("long", &[b"ab\n".as_slice(), &vec![b'a'; 2_000_000_000 / 100]].concat());
    let gigabytes = |text: &str| std::fs::read_to_string("/proc/meminfo").is_ok_and(|all| all.contains(text));
    if gigabytes("MemAvailable") {
        place.fails(
            &["predict", "run", "long"],
            &["long, line 2: a text of 20000001 tokens would take about 197 GB", "shorten it"],
        );
    }
    let line = "a".repeat(20_000_000);
    place.write("pairs.tsv", format!("{line}\tb\nab\tba\nb\tc\n").as_bytes());
    let more = [wide.as_slice(), &["--set", "max_tokens=30000000"]].concat();
    place.fails(&place.train("more", "1", &more), &["training on pairs of 20000000 and 1 tokens", "--set max_tokens="]);
}

/// Puts `new` in the place of `old`, of the same length, in a file.
fn change(place: &Place, file: &str, old: &str, new: &str) {
    let mut contents = place.read(file);
    let at = contents.windows(old.len()).position(|window| window == old.as_bytes());
    let at = at.unwrap_or_else(|| panic!("{old} is not in {file}"));
    contents.splice(at..at + old.len(), new.bytes());
    place.write(file, &contents);
}

#[test]
fn a_changed_letter_in_any_file_is_refused_until_it_is_accepted() {
    let place = Place::new();
    place.trained("run");
    let changes = [
        ("target_tokenizer.json", "\"a\"", "\"z\""),
        ("config.json", "\"feature_map\": \"elu+1\"", "\"feature_map\": \"relu\""),
        ("config.json", "\"answer_tokens\": 4", "\"answer_tokens\": 1"),
        ("config.json", "\"steps\": 12", "\"steps\": null"),
        // The step, and the identities that the optimiser's moments are known by.
        ("checkpoint.safetensors", "\\\"step\\\":12", "\\\"step\\\":11"),
        ("checkpoint.safetensors", "output.weight\\\":", "output.weigth\\\":"),
        ("seal.json", "\"config.json\": [\n      \"", "\"config.json\": [\n      \"0"),
    ];
    for (file, old, new) in changes {
        let file = format!("run/{file}");
        let whole = place.read(&file);
        change(&place, &file, old, new);
        place.fails(&["info", "run"], &[&file]);
        place.fails(&["train", "--resume", "run", "--steps", "14"], &[&file]);
        if !file.contains("checkpoint") {
            place.fails(&["predict", "run", "pairs.tsv"], &[&file, "longspan info run --accept-changes"]);
            place.fails(&["eval", "run", "pairs.tsv"], &[&file]);
        }
        place.write(&file, &whole);
        place.ok(&["info", "run"]);
    }
    // Weights without the library's checksum, one bit of which has changed.
    let whole = place.read("run/model.safetensors");
    change(&place, "run/model.safetensors", "__metadata__\":{\"longspan\"", "__metadata__\":{\"someone!\"");
    let mut contents = place.read("run/model.safetensors");
    *contents.last_mut().unwrap() ^= 1;
    place.write("run/model.safetensors", &contents);
    place.fails(&["predict", "run", "pairs.tsv"], &["run/model.safetensors: damaged, or changed"]);
    place.write("run/model.safetensors", &whole);
    // A change that was meant.
    change(&place, "run/config.json", "\"answer_tokens\": 4", "\"answer_tokens\": 1");
    place.ok(&["info", "run", "--accept-changes"]);
    let answers = place.ok(&["predict", "run", "pairs.tsv"]);
    assert!(answers.lines().all(|answer| answer.trim_end_matches(" …").chars().count() <= 1));
    fs::remove_file(place.path("run/seal.json")).unwrap();
    place.fails(&["predict", "run", "pairs.tsv"], &["run/seal.json", "--accept-changes"]);
    place.fails(&["train", "--resume", "run", "--steps", "14"], &["run/seal.json"]);
    place.ok(&["info", "run", "--accept-changes"]);
    place.ok(&["train", "--resume", "run", "--steps", "14"]);
    change(&place, "run/config.json", "\"steps\": 14", "\"steps\": null");
    place.fails(&["info", "run", "--accept-changes"], &["neither steps nor minutes"]);
}

#[test]
fn info_says_how_a_file_is_read_or_what_mends_it() {
    let place = Place::new();
    let trees = |index: bool| -> String {
        let row = |n: usize| {
            let row = format!("{},{},{}\n", n / 3 + 1, [118, 484, 664][n % 3], 30 + 20 * (n % 3) + n / 3);
            if index { format!("{n},{row}") } else { row }
        };
        let title = if index { ",Tree,age,circumference" } else { "Tree,age,circumference" };
        format!("{title}\n{}", (0..12).map(row).collect::<String>())
    };
    let anew = "`age` runs up anew for each `Tree`: if each is a series, give --id Tree --time age";
    let objects = "[\n{\"date\": \"2024-01-01\", \"x\": 1},\n{\"date\": \"2024-01-02\", \"x\": 2}]";
    let check = |arguments: &[&str], contents: &str, part: &str| {
        place.write(arguments[0], contents.as_bytes());
        let said = place.ok(&[&["info"], arguments].concat());
        assert!(said.contains(part), "{arguments:?}: {said}");
    };
    for (name, contents, more, part) in [
        ("trees.csv", trees(false), &[][..], anew),
        ("rows.csv", trees(false), &["--time", "row"], anew),
        ("index.csv", trees(true), &[], anew),
        ("half.csv", trees(true), &["--id", "Tree"], anew),
        ("subject.csv", trees(true).replace("Tree", "Subject"), &[], &anew.replace("Tree", "Subject")),
        ("named.csv", trees(true), &["--id", "Tree", "--time", "age"], "4 series of 3 points and 1 channel"),
        (
            "data.json",
            format!("{{\"meta\": {{\"data\": \"data\"}}, \"data\": {objects}}}"),
            &[],
            "1 series of 2 points and 1 channel",
        ),
        (
            "deep.json",
            format!("{{\"response\": {{\"rows\": {objects}}}}}").replace("2}", "\"soon\"}"),
            &[],
            "no: line 3: \"soon\"",
        ),
        (
            "times.tsv",
            (0..11).map(|n| format!("{n}.5\t{n}\n")).collect(),
            &["--time", "column 1"],
            "1 series of 11 points",
        ),
    ] {
        check(&[&[name], more].concat(), &contents, part);
    }
    for case in [
        "visits.csv | patient,date,x\n1,2024-01-01,5\n1,2024-01-02,6\n2,2024-01-01,5\n2,2024-01-02,6\n => 2 series of 2 points",
        "lists.json | {\"date\": [\"2024-01-01\"], \"x\": [1]} => a table is a list of objects, one for each row",
        // One that is a row itself, with a list in it.
        "row.json | {\"text\": \"a b\", \"label\": \"c\", \"parts\": [{\"text\": \"a\", \"label\": \"x\"}]} => 1 text with 1 label",
        "keys.jsonl | {\"0\": 5, \"1\": 7}\n{\"0\": 6, \"1\": 8}\n => no column of times is known among `0`, `1`",
        "savetxt.csv | # date,x\n2024-01-01,5\n2024-01-02,6\n => 1 series of 2 points and 1 channel",
        "long.jsonl | {\"text\": \"a\", \"label\": \"b\"}\n{\"text\": \"c\", \"label\": 900719925474099200001}\n => line 2: a number such as 900719925474099200001 would be rounded; write so many digits in quotes",
        "statement.csv | Bank of A,statement\n\ndate,x,y\n2024-01-01,5,6\n => line 3: 3 columns, the header has 2; the first line names",
        "bank.csv --wide | Country,Code,2000 [YR2000],2001 [YR2001],2003 [YR2003]\nA,AA,1,..,3\nB,BB,4,5,6\n => 2 series of 3 points and 1 channel, 1 value missing, 0 with a label; columns: a series a row, 3 times `2000` … `2003`",
        "thousands.csv | date;x\n2024-01-01;1.050\n2024-01-02;2.150\n => \"1.050\" in the column `x` may be 1.05 or 1050",
        "label.csv | text;label\na b;1.050\nc d;950\n => \"1.050\" in the column `label` may be 1.05",
        "shares.csv --wide | name,2000,2001,2002\na,1,2%,3\n => \"2%\" in the column `2001` is no number",
        "days.tsv | 2024-01-01\t5\t6\n2024-01-02\t7\t8\n => 1 series of 2 points and 2 channels",
        "wide.tsv --wide | name\t2000\t2001\na\t1\t2\nb\t3\t4\n => 2 series of 2 points and 1 channel",
        "pairs.jsonl | {\"instruction\": \"do\", \"input\": \"\", \"output\": \"b\"}\n => no column `source` among `input`, `instruction`, `output`",
        "clock.csv | time,x\n09:00,1\n09:10,2\n => put the day before a time of the day",
        "units.csv | time,x\n0,60 kg\n1,61\n => line 3: \"61\" in the column `x` is no number; others of it are written otherwise",
        "nested.jsonl | {\"time\": 0, \"main\": {\"t\": 1}}\n => as pandas' json_normalize does",
        "fixed.txt | date       x\n2024-01-01 5\n => columns have commas, semicolons, tabs or bars between them",
    ] {
        let ((arguments, contents), part) =
            case.split_once(" => ").map(|(a, b)| (a.split_once(" | ").unwrap(), b)).unwrap();
        check(&arguments.split(' ').collect::<Vec<_>>(), contents, part);
    }
    place.write("two.json", format!("{{\"a\": {objects}, \"b\": {objects}}}").as_bytes());
    place.fails(&["info", "two.json"], &["two.json: an object with several tables, such as `a` and `b`"]);
    let swapped: String = (0..40).map(|n| format!("{}\twords of message {n}\n", ["ham", "spam"][n % 2])).collect();
    place.write("swapped.tsv", swapped.as_bytes());
    place.fails(
        &support::train(&["--labelled", "swapped.tsv"], "run", "1", &[]),
        &["swapped.tsv: 2 texts and 40 labels, as if each label stood before its text; put the text first"],
    );
    place.write("table.parquet", b"PAR1\x15\0\0");
    place.fails(&["info", "table.parquet"], &["table.parquet: no text", "write Parquet, Feather"]);
}

#[test]
fn what_a_file_may_mean_otherwise_is_said() {
    let place = Place::new();
    let dates: String = (10..22).map(|n| format!("2024-01-{n},{n}\n")).collect();
    for case in [
        "thousands.tsv | date\tx\n2024-01-01\t1.050\n2024-01-02\t2.150\n => \"1.050\" of `x` is 1.05",
        "code.csv | time,x\n0,5\n1,-999\n2,7\n => 1 value of `x`: -999, the others from 5 to 7",
        "again.csv | time,x\n1,5\n0,6\n0,7\n2,8\n => several points at one time in 1 series",
        "names.tsv | name\t2000\t2001\na\t1\t2\n => the first line is read as a series with the label \"name\"",
        "nanoseconds.csv | time,x\n1704067200000000010,1\n1704067200000000020,2\n => several points at one time in 1 series; those beyond 9007199254740992 are rounded",
        &format!(
            "unknown.csv | date,x\n1900-01-01,1\n{dates} => 1900-01-01 is further from all other dates than those are from one another"
        ),
        "rest.json | {\"count\": 1, \"results\": [\n{\"date\": \"2024-01-01\", \"x\": 1}]} => rest.json: read `results`, and nothing beside it, as a table of 1 row",
        "quoted.tsv | \"text\"\t\"label\"\n\"a b\"\t\"x\"\n => fields in double quotes are read without them",
        "some.tsv | \"a \"\"b\"\"\"\tx\nc d\ty\n => double quotes are read as they stand",
        "wide.csv | id,text,label,target\n1,a b,x,y\n => columns: text `text`, label `label`; not read: `id`, `target`; --text-column and --label decide otherwise",
    ] {
        let ((name, contents), part) = case.split_once(" => ").map(|(a, b)| (a.split_once(" | ").unwrap(), b)).unwrap();
        place.write(name, contents.as_bytes());
        let said = place.said(&["info", name]).1;
        assert!(said.contains(part), "{name}: {said}");
    }
    let rows: String = (0..60).map(|n| format!("text {n}\t{}\n", ["yes", "no", "No", "NA"][n % 4])).collect();
    place.write("labels.tsv", format!("{rows}text 0\tno\ntext 1\tyes\n").as_bytes());
    let said = place.said(&support::train(&["--labelled", "labels.tsv"], "run", "1", &[])).1;
    for part in [
        "the labels \"No\" and \"no\" look alike",
        "2 texts with another label than before",
        "texts have the label \"NA\", which is a class",
    ] {
        assert!(said.contains(part), "{said}");
    }
}
