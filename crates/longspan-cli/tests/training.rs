//! Training: what a run folder holds, going on, and being stopped in every way.

mod support;

use std::process::Stdio;
use std::time::Duration;

use support::{Place, failed, set, signal, text, with_file_limit};

#[test]
fn a_run_ends_with_error_rates_samples_and_the_next_command() {
    let place = Place::new();
    let (stdout, stderr) = place.said(&place.train("run", "12", &["--seed", "3", "--set", "checkpoint_steps=5"]));
    for part in ["held-out examples:", "token error rate", "sequence error rate", "95 % confidence", "predict run"] {
        assert!(stdout.contains(part), "{part:?}: {stdout}");
    }
    assert!(stderr.contains("step 12/12"), "{stderr}");
    assert!(!stderr.contains("repeated"), "{stderr}");
    assert_eq!(
        place.names("run"),
        [
            ".lock",
            "checkpoint.safetensors",
            "config.json",
            "loss.png",
            "loss.svg",
            "metrics.jsonl",
            "model.safetensors",
            "seal.json",
            "source_tokenizer.json",
            "target_tokenizer.json"
        ]
    );
    assert_eq!(place.losses("run").len(), 12);
    let info = place.info("run");
    assert_eq!((info["step"].as_u64(), info["finished"].as_bool()), (Some(12), Some(true)));
    assert_eq!(info["config"]["seed"].as_u64(), Some(3));
    assert!(info["held_out"]["token_error_rate"]["low"].is_f64(), "{info}");
    let described = place.ok(&["info", "run"]);
    assert!(described.contains("step 12 of 12") && described.contains("shaw attention"), "{described}");
}

#[test]
fn every_mechanism_trains_goes_on_and_answers() {
    let place = Place::new();
    let facts = place.json(&["info", "--mechanisms", "--json"]);
    for facts in facts.as_array().unwrap() {
        let name = facts["name"].as_str().unwrap();
        place.ok(&place.train(name, "6", &["--attention", name]));
        assert!(place.ok(&["info", name]).contains(&format!("{name} attention")));
        place.ok(&["train", "--resume", name, "--steps", "8"]);
        assert_eq!(place.losses(name).len(), 8, "{name}");
        assert_eq!(place.ok(&["predict", name, "pairs.tsv", "--beam", "2"]).lines().count(), 200, "{name}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let place = Place::new();
    for (out, seed) in [("one", "1"), ("same", "1"), ("other", "2")] {
        place.ok(&place.train(out, "6", &["--seed", seed]));
    }
    assert_eq!(place.losses("one"), place.losses("same"));
    assert_ne!(place.losses("one"), place.losses("other"));
}

#[test]
fn blocks_of_other_forms_train_go_on_and_answer() {
    let place = Place::new();
    let forms = ["norm_kind=rms", "activation=silu", "gated=true", "gated_attention=true", "recompute=true"];
    let forms = set(&forms);
    place.ok(&place.train("run", "6", &forms));
    place.ok(&["train", "--resume", "run", "--steps", "9"]);
    assert_eq!(place.losses("run").len(), 9);
    place.write("lines", b"abc\nba\n");
    assert_eq!(place.ok(&["predict", "run", "lines"]).lines().count(), 2);
    assert_eq!(place.info("run")["config"]["gated"], true);
    assert_eq!(place.info("run")["config"]["gated_attention"], true);
}

#[test]
fn flags_win_over_set_and_set_over_the_file() {
    let place = Place::new();
    place.write("run.toml", b"steps = 9\nseed = 7\nlearning_rate = 0.001\nbatch_size = 4\n");
    let more = ["--config", "run.toml", "--set", "seed=8", "--set", "learning_rate=0.002", "--learning-rate", "0.003"];
    place.ok(&place.train("run", "3", &more));
    let config = &place.info("run")["config"];
    assert_eq!(config["steps"], 3);
    assert_eq!(config["seed"], 8);
    assert_eq!(config["learning_rate"], 0.003);
    assert_eq!(config["batch_size"], 8, "a file stands below --set");
}

/// Arguments without a flag and its value.
fn without<'a>(mut arguments: Vec<&'a str>, flag: &str) -> Vec<&'a str> {
    let at = arguments.iter().position(|part| *part == flag).expect("the flag is there");
    arguments.drain(at..at + 2);
    arguments
}

#[test]
fn minutes_become_steps_that_can_be_given() {
    let place = Place::new();
    // How many passes a run will take, and so its dropout, is only estimated of minutes.
    let given = ["--set", "dropout=0", "--minutes", "0.01"];
    place.ok(&without(place.train("timed", "1", &given), "--steps"));
    let steps = place.info("timed")["config"]["steps"].as_u64().expect("a number").to_string();
    place.ok(&place.train("counted", &steps, &given[..2]));
    assert_eq!(place.losses("timed"), place.losses("counted"));
}

#[test]
fn an_interrupted_run_goes_on_to_the_losses_of_one_that_was_not() {
    let place = Place::new();
    for (name, more) in [("plain", vec![]), ("dropout", vec!["--set", "dropout=0.2"])] {
        let (whole, parts) = (format!("{name}-whole"), format!("{name}-parts"));
        place.ok(&place.train(&whole, "60", &more));
        let mut child = place
            .command(&place.train(&parts, "60", &more))
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        place.wait_for_lines(&format!("{parts}/metrics.jsonl"), 3);
        signal("INT", child.id());
        let status = child.wait().unwrap();
        let stderr = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!(status.code(), Some(130), "{stderr}");
        assert!(stderr.contains(&format!(" train --resume {parts}")), "{stderr}");
        let step = place.info(&parts)["step"].as_u64().unwrap();
        assert!((1..60).contains(&step), "stopped at step {step}");
        let stdout = place.ok(&["train", "--resume", &parts]);
        assert!(stdout.contains("token error rate"), "{stdout}");
        assert_eq!(place.losses(&parts), place.losses(&whole), "{name}");
        let answers = |run: &str| place.ok(&["predict", run, "pairs.tsv", "--json"]);
        assert_eq!(answers(&parts), answers(&whole));
    }
}

#[test]
fn a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint() {
    let place = Place::new();
    let more = ["--learning-rate", "1e30", "--set", "checkpoint_steps=1"];
    let error =
        place.fails(&place.train("run", "50", &more), &["at step ", "became NaN", "in run is kept", "--learning-rate"]);
    let info = place.info("run");
    let kept = info["step"].as_u64().unwrap();
    assert!(error.contains(&format!("the checkpoint of step {kept} ")), "{error}");
    place.ok(&["predict", "run", "pairs.tsv"]);
}

#[test]
fn a_full_disk_keeps_the_last_checkpoint_and_says_so() {
    let place = Place::new();
    place.trained("sizes");
    let whole = place.read("sizes/checkpoint.safetensors").len();
    // The first checkpoint has no moments yet and fits; the next ones do not.
    let blocks = whole * 2 / 3 / 512;
    let output = with_file_limit(&place.path(""), blocks, &place.train("run", "12", &["--set", "checkpoint_steps=4"]));
    failed(&output, &["cannot write run/checkpoint.safetensors", "File too large", "free some space", "--resume"]);
    assert!(!place.names("run").iter().any(|name| name.ends_with(".tmp")), "{:?}", place.names("run"));
    assert_eq!(place.info("run")["step"], 0);
    place.ok(&["train", "--resume", "run"]);
    assert_eq!(place.losses("run"), place.losses("sizes"), "nothing of the run is lost");

    let output = with_file_limit(&place.path(""), 4, &place.train("none", "12", &[]));
    failed(&output, &["cannot write", "File too large"]);
    assert!(!text(&output.stderr).contains("draft"), "{}", text(&output.stderr));
    assert!(!place.names("").iter().any(|name| name.contains("none")), "{:?}", place.names(""));
}

#[test]
fn a_folder_that_cannot_be_made_or_is_taken_is_refused() {
    let place = Place::new();
    place.trained("run");
    let before = place.read("run/model.safetensors");
    place.fails(&place.train("run", "3", &[]), &["run holds a run already", "--resume run", "--out"]);
    assert_eq!(place.read("run/model.safetensors"), before);
    place.fails(&place.train("pairs.tsv/run", "3", &[]), &["cannot make the run folder pairs.tsv/run", "--out"]);
    place.fails(
        &place.train("/proc/longspan/run", "3", &[]),
        &["cannot make the run folder /proc/longspan/run", "--out"],
    );
    place.fails(&place.train("/", "3", &[]), &["/"]);
    std::fs::create_dir_all(place.path("full/of")).unwrap();
    place.fails(&place.train("full", "3", &[]), &["full exists already"]);
}

#[test]
fn going_on_keeps_what_the_run_fixed() {
    let place = Place::new();
    place.trained("run");
    place.fails(&["train", "--resume", "run", "--set", "d_model=32"], &["`d_model` is fixed by the run", "--out"]);
    place.ok(&["train", "--resume", "run", "--set", "workers=3"]);
    assert_eq!(place.info("run")["config"]["workers"], 3, "another machine has other cores");
    place.fails(&["train", "--resume", "run", "--attention", "softmax"], &["`attention` is fixed by the run"]);
    place.fails(&["train", "--resume", "nowhere"], &["cannot open the run folder nowhere"]);
    place.ok(&["train", "--resume", "run", "--steps", "15"]);
    assert_eq!(place.info("run")["step"], 15);
    place.write("pairs.tsv", b"abc\tcba\nabd\tdba\nbcd\tdcb\n");
    place.fails(&["train", "--resume", "run", "--steps", "20"], &["pairs.tsv is not what this run began with"]);
}

#[test]
fn two_processes_cannot_train_in_one_folder() {
    let place = Place::new();
    let mut child = place.start(&place.train("run", "100000", &[]));
    place.wait_for_lines("run/metrics.jsonl", 2);
    place.fails(&["train", "--resume", "run"], &["another process is training in run"]);
    signal("TERM", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_closed_standard_error_does_not_end_training() {
    let place = Place::new();
    let mut child =
        place.command(&place.train("run", "30", &[])).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(place.info("run")["step"], 30);
}

#[test]
fn empty_texts_are_legal() {
    let place = Place::new();
    place.write("pairs.tsv", "ab\t\n\tba\nabc\tcba\nb\tb\na\ta\n\t\nca\tac\nd\td\n".repeat(2).as_bytes());
    let output = place.run(&place.train("run", "4", &[]));
    assert!(output.status.success() && text(&output.stderr).contains("pairs.tsv: 8 repeated pairs; each counts once"));
    place.write("lines", b"\nab\n\n");
    let answers = place.ok(&["predict", "run", "lines"]);
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[2]), (3, "", ""));
    place.ok(&["eval", "run", "pairs.tsv"]);
}

#[test]
fn long_examples_take_little_memory_and_a_signal_is_soon_seen() {
    let place = Place::new();
    let letters: Vec<String> =
        (0..80usize).map(|i| (0..3000).map(|j| char::from(b'a' + (i * j % 7) as u8)).collect()).collect();
    let pairs: String = letters.iter().enumerate().map(|(i, text)| format!("{i}{text}\t{text}\n")).collect();
    place.write("pairs.tsv", pairs.as_bytes());
    place.fails(&place.train("run", "3", &[]), &["all training examples have more than 512 tokens", "max_tokens=3002"]);
    let more = ["--set", "max_tokens=3002", "--set", "batch_size=64", "--set", "d_model=64", "--set", "d_ff=128"];
    let mut child = place.start(&place.train("run", "1000", &more));
    place.wait_for_lines("run/metrics.jsonl", 1);
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    signal("INT", child.id());
    let asked = std::time::Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // A whole batch takes several times as long, and 2 GB.
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    assert!(peak.is_none_or(|kilobytes: usize| kilobytes < 1_000_000), "{peak:?}");
}

#[test]
fn the_best_weights_are_kept_and_overfitting_is_said() {
    let place = Place::new();
    // Targets that only remembering gives: training makes the development loss worse.
    let pairs: String = (0..60u64).map(|i| format!("{i}\t{}\n", i.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    place.write("pairs.tsv", pairs.as_bytes());
    let more = ["--set", "checkpoint_steps=20", "--set", "d_model=32", "--learning-rate", "0.02"];
    let (_, stderr) = place.said(&place.train("run", "400", &more));
    let metrics = text(&place.read("run/metrics.jsonl"));
    let losses = metrics.lines().filter_map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        Some((value["development_loss"].as_f64()?, value["step"].as_u64()?))
    });
    let (loss, step) = losses.min_by(|a, b| a.0.total_cmp(&b.0)).expect("checkpoints");
    assert!(step < 400, "{metrics}");
    let said = format!("the weights of step {step} are kept: their development loss was {loss:.3}");
    assert!(stderr.contains(&said) && stderr.contains("the steps since overfit"), "{said}: {stderr}");
    assert_eq!(place.info("run")["best_step"], step);
    assert!(place.ok(&["info", "run"]).contains(&format!("weights     of step {step}, the best")));
    let kept = place.read("run/model.safetensors");
    place.ok(&["train", "--resume", "run"]);
    assert_eq!(place.read("run/model.safetensors"), kept, "resuming keeps them");
}

#[test]
fn runs_that_start_at_the_same_time_take_different_folders() {
    let place = Place::new();
    let arguments = without(place.train("", "3", &[]), "--out");
    let start = || place.command(&arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    for child in [start(), start(), start()] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert_eq!(place.names("runs"), ["pairs", "pairs-2", "pairs-3"]);
    // Of several that want one folder one gets it, and the others say so.
    let start =
        || place.command(&place.train("one", "3", &[])).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let outputs = [start(), start(), start()].map(|child| child.wait_with_output().unwrap());
    assert_eq!(outputs.iter().filter(|output| output.status.success()).count(), 1);
    for output in outputs.iter().filter(|output| !output.status.success()) {
        let error = failed(output, &["one", "--out"]);
        assert!(error.contains("another process is making one") || error.contains("one holds a run"), "{error}");
    }
    place.info("one");
}

#[test]
fn the_next_command_can_be_pasted() {
    let place = Place::new();
    let pairs: String = (0..60).map(|i| format!("-n it's \\\"{i}\t{i}\n")).collect();
    place.write("pairs.tsv", pairs.as_bytes());
    for run in ["my run's", "-run"] {
        let out = format!("--out={run}");
        let printed = place.ok(&without(place.train("x", "3", &[&out]), "--out"));
        assert!(printed.contains("(expected "), "{printed}");
        let next = printed.lines().last().expect("a command");
        // As a shell finds `longspan` on its path.
        let folder = std::path::Path::new(env!("CARGO_BIN_EXE_longspan")).parent().expect("a folder");
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
        let next = next.replace("cargo run --release --", "longspan");
        let output = std::process::Command::new("sh")
            .args(["-c", &next])
            .current_dir(place.path(""))
            .env("PATH", path)
            .output()
            .unwrap();
        assert!(output.status.success(), "{next}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout).lines().count(), 1, "{next}");
    }
}

#[test]
fn own_development_and_held_out_pairs_are_used_and_data_may_move() {
    let place = Place::new();
    place.write("development.tsv", b"abc\tcba\n");
    place.write("held-out.tsv", b"abd\tdba\nabe\teba\n");
    let more = ["--development", "development.tsv", "--held-out", "held-out.tsv"];
    let (_, stderr) = place.said(&place.train("run", "4", &more));
    assert!(stderr.contains("200 training examples, 2 held out"), "{stderr}");
    std::fs::rename(place.path("pairs.tsv"), place.path("moved.tsv")).unwrap();
    place.fails(&["train", "--resume", "run", "--steps", "6"], &["pairs.tsv", "name where it is now with --pairs"]);
    place.ok(&["train", "--resume", "run", "--steps", "6", "--pairs", "moved.tsv"]);
    assert_eq!(place.info("run")["step"], 6);
    place.write("other.tsv", b"abc\tcba\nabd\tdba\nbcd\tdcb\n");
    let other = ["train", "--resume", "run", "--steps", "8", "--pairs", "other.tsv"];
    place.fails(&other, &["other.tsv is not what this run began with", "--pairs"]);
    place.ok(&["train", "--resume", "run", "--steps", "8"]);
}

#[test]
fn few_pairs_get_fewer_steps() {
    let place = Place::new();
    let mut child = place.start(&without(place.train("run", "1", &[]), "--steps"));
    place.wait_for_lines("run/metrics.jsonl", 2);
    signal("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // About 160 of the 200 pairs are trained on, 8 at a time, 45 times.
    let steps = place.info("run")["config"]["steps"].as_u64().unwrap();
    assert!((700..1200).contains(&steps), "{steps}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_terminal_gets_a_bar_that_is_cleared_and_a_dumb_one_plain_lines() {
    let place = Place::new();
    let shown = |term: &str, out: &str| {
        let program = [env!("CARGO_BIN_EXE_longspan")];
        let line = [&program, place.train(out, "40", &[]).as_slice()].concat().join(" ");
        // Of util-linux; it runs a command in a terminal of its own.
        let output = std::process::Command::new("script")
            .args(["-qec", &format!("stty rows 30 cols 120 && {line}"), "/dev/null"])
            .env("TERM", term)
            .current_dir(place.path(""))
            .stdin(Stdio::null())
            .output()
            .expect("`script` starts");
        let shown = text(&output.stdout);
        assert!(output.status.success() && shown.contains("40 steps in"), "{shown}");
        shown
    };
    let bar = shown("xterm", "one");
    let (drawn, rest) = bar.rsplit_once("\u{1b}[2K").expect("the bar is cleared");
    assert!(drawn.contains('━') && drawn.contains("step 40/40"), "{bar:?}");
    assert!(!rest.contains("examples/s") && rest.contains("40 steps in"), "{bar:?}");
    for (term, out) in [("dumb", "two"), ("", "three")] {
        let plain = shown(term, out);
        assert!(!plain.contains('\u{1b}') && plain.contains("step 40/40"), "{plain:?}");
    }
}
