//! Nothing is lost and nothing is ignored: signals, files that change or are someone else's, going on in other ways, settings that do
//! not apply.

mod support;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use support::{Place, failed, set, signal, text, train};

#[test]
fn signals_that_are_ignored_stay_ignored() {
    let place = Place::new();
    let mut child = Command::new("sh")
        .args(["-c", "trap '' HUP INT; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_longspan")])
        .args(place.train("run", "100000", &[]))
        .current_dir(place.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    place.wait_for_lines("run/metrics.jsonl", 3);
    signal("HUP", child.id());
    signal("INT", child.id());
    let lines = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap().lines().count();
    place.wait_for_lines("run/metrics.jsonl", lines + 50);
    assert!(child.try_wait().unwrap().is_none(), "it goes on");
    signal("TERM", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(place.info("run")["step"].as_u64().unwrap() > 0);
}

#[test]
fn a_text_that_is_touched_goes_on_and_one_that_changes_stops_saved() {
    let place = Place::new();
    let lines: String = (0..4000).map(|n| format!("line {n} of {} came and went\n", n * n % 17)).collect();
    place.write("text.txt", lines.as_bytes());
    let data = ["--text", "text.txt", "--set", "segment=64", "--set", "checkpoint_steps=100000", "--set", "layers=1"];
    let mut child = place
        .command(&train(&data, "run", "100000", &[]))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    place.wait_for_lines("run/metrics.jsonl", 3);
    let touch = |ago| {
        let file = fs::File::options().write(true).open(place.path("text.txt")).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(ago)).unwrap();
    };
    touch(1000);
    let before = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap().lines().count();
    place.wait_for_lines("run/metrics.jsonl", before + 300);
    assert!(child.try_wait().unwrap().is_none(), "it goes on");
    place.write("text.txt", lines.replace("came", "come").as_bytes());
    let status = child.wait().unwrap();
    let stderr = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    let steps = place.info("run")["step"].as_u64().unwrap();
    assert!(steps > before as u64 && status.code() == Some(1), "{steps}, {stderr}");
    let error = stderr.lines().last().unwrap();
    assert!(error.contains("text.txt: changed since it was first read"), "{stderr}");
    assert!(error.contains(&format!("{steps} steps are saved")) && error.contains("train --resume run"), "{stderr}");
    place.write("text.txt", lines.as_bytes());
    place.ok(&["train", "--resume", "run", "--steps", &(steps + 2).to_string()]);
    assert_eq!(place.losses("run").len() as u64, steps + 2);
}

#[test]
fn files_of_other_people_stay_in_a_run_folder() {
    let place = Place::new();
    place.trained("run");
    let ours = [".model.safetensors.tmp", ".loss.svg.tmp", ".forecast.png.tmp", ".source_tokenizer.json.tmp"];
    for name in ["notes.tmp", ".notes.tmp"].into_iter().chain(ours) {
        place.write(&format!("run/{name}"), b"mine");
    }
    fs::create_dir(place.path("run/d.tmp")).unwrap();
    fs::create_dir(place.path("run/.seal.json.tmp")).unwrap();
    fs::remove_dir(place.path("run/.seal.json.tmp")).unwrap();
    place.ok(&["train", "--resume", "run", "--steps", "14"]);
    let left: Vec<String> = place.names("run").into_iter().filter(|name| name.ends_with(".tmp")).collect();
    assert_eq!(left, [".notes.tmp", "d.tmp", "notes.tmp"]);
    assert_eq!(place.read("run/notes.tmp"), b"mine");
}

#[test]
fn going_on_with_fewer_or_more_steps_is_said() {
    let place = Place::new();
    place.trained("run");
    place.fails(&["train", "--resume", "run", "--steps", "5"], &["the run has taken 12 steps, more than 5", "--steps"]);
    assert_eq!(place.info("run")["config"]["steps"], 12);
    place.ok(&place.train("long", "60", &[]));
    let (_, said) = place.said(&["train", "--resume", "long", "--steps", "120"]);
    assert!(said.contains("with 120 steps instead of 60 the learning rate goes up from "), "{said}");
    assert!(!place.said(&["train", "--resume", "long"]).1.contains("learning rate"));
}

#[test]
fn a_run_in_minutes_that_was_stopped_early_takes_a_number_of_steps() {
    let place = Place::new();
    let mut arguments = place.train(
        "run",
        "1",
        &["--minutes", "5", "--set", "d_model=256", "--set", "d_ff=512", "--set", "batch_size=150"],
    );
    let at = arguments.iter().position(|part| *part == "--steps").unwrap();
    arguments.drain(at..at + 2);
    let mut child = place.start(&arguments);
    place.wait_for_lines("run/metrics.jsonl", 1);
    signal("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let steps = place.info("run")["step"].as_u64().unwrap();
    assert!(steps < 20 && place.info("run")["config"]["minutes"] == 5.0, "stopped at {steps}");
    let more = (steps + 1).to_string();
    place.ok(&["train", "--resume", "run", "--steps", &more]);
    assert_eq!(place.info("run")["step"], steps + 1);
    place.fails(&["train", "--resume", "run", "--minutes", "3"], &["`minutes` is fixed by the run"]);
}

#[test]
fn a_file_that_moved_is_found_from_every_folder() {
    let place = Place::new();
    place.trained("run");
    fs::create_dir(place.path("b")).unwrap();
    fs::rename(place.path("pairs.tsv"), place.path("b/moved.tsv")).unwrap();
    let resumed = place
        .command(&["train", "--resume", "../run", "--pairs", "moved.tsv", "--steps", "14"])
        .current_dir(place.path("b"))
        .output()
        .unwrap();
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    place.ok(&["train", "--resume", "run", "--steps", "16"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_folder_whose_name_is_not_utf_8_is_named() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let place = Place::new();
    let folder = place.path("").join(OsStr::from_bytes(b"a\xff"));
    fs::create_dir(&folder).unwrap();
    fs::copy(place.path("pairs.tsv"), folder.join("pairs.tsv")).unwrap();
    let output = place.command(&place.train("run", "2", &[])).current_dir(&folder).output().unwrap();
    failed(&output, &["pairs.tsv: the name of a folder in it is not UTF-8; rename it"]);
}

#[test]
fn settings_that_a_task_does_not_use_are_refused() {
    let place = Place::new();
    place.write("text.txt", "and the sea was still\n".repeat(40).as_bytes());
    let labelled: String = (0..60).map(|n| format!("text {n}\t{}\n", n % 2)).collect();
    place.write("labelled.tsv", labelled.as_bytes());
    place.write("settings.toml", b"seed = 3\npooling = 'last'\n");
    let pairs = ["--pairs", "pairs.tsv"];
    for (data, more, parts) in [
        (pairs, ["--tokens", "bpe"], ["--tokens: `tokens` is not used by --pairs", "it belongs to --text, --labelled"]),
        (pairs, ["--backpropagate", "2"], ["--backpropagate: ", "belongs to --text"]),
        (pairs, ["--set", "pooling=nonsense"], ["--set: `pooling` is not used by --pairs", "--labelled, --series"]),
        (pairs, ["--config", "settings.toml"], ["settings.toml: `pooling` is not used by --pairs", "--labelled"]),
        (["--text", "text.txt"], ["--source-tokens", "bytes"], ["--source-tokens: ", "belongs to --pairs"]),
        (["--labelled", "labelled.tsv"], ["--vocabulary", "300"], ["--vocabulary: ", "belongs to --text"]),
        (
            ["--labelled", "labelled.tsv"],
            ["--set", "pooling=nonsense"],
            ["`pooling` = \"nonsense\": unknown value `nonsense`", "`mean`"],
        ),
    ] {
        place.fails(&train(&data, "run", "2", &more), &parts);
        assert!(!place.path("run").exists());
    }
    place.ok(&train(
        &["--labelled", "labelled.tsv"],
        "run",
        "2",
        &[&set(&["weight_decay=0"])[..], &["--config", "settings.toml"]].concat(),
    ));
    assert_eq!(place.info("run")["config"]["pooling"], "last");
}
