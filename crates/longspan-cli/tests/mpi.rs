//! Training over the processes of `mpirun`: the same run as one process's, to rounding, and the same bits every time.
#![cfg(feature = "mpi")]

mod support;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::{Place, set, signal, text};

/// `mpirun` with so many processes of the command, on a machine that may have fewer cores and in a container; each after a line
/// of shell.
fn mpirun(place: &Place, count: usize, line: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let line = format!("{line}\nexec \"$0\" \"$@\"");
    command.args(["--oversubscribe", "-n", &count.to_string(), "sh", "-c", &line, env!("CARGO_BIN_EXE_longspan")]);
    command.args(arguments).current_dir(place.path("")).stdin(Stdio::null());
    command
}

fn run(place: &Place, count: usize, arguments: &[&str]) -> Output {
    mpirun(place, count, "", arguments).output().expect("mpirun starts; Debian has it in openmpi-bin")
}

fn ok(place: &Place, count: usize, arguments: &[&str]) -> String {
    let output = run(place, count, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stderr)
}

/// The lines that start with `error:`, of which a failure has one.
fn error(output: &Output) -> String {
    let stderr = text(&output.stderr);
    assert!(!output.status.success(), "succeeded: {}", text(&output.stdout));
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    errors[0].to_string()
}

/// The last process that an `mpirun` started.
fn last_of(mpirun: u32) -> u32 {
    let found = Command::new("pgrep").args(["-P", &mpirun.to_string()]).output().expect("pgrep").stdout;
    text(&found).lines().last().expect("a process of mpirun").parse().expect("its number")
}

/// Arguments of a run on any data. Three processes take 2, 2 and 1 of a text's lanes, whose states begin anew after seven
/// segments: amid the steps at which runs are resumed.
fn train_on<'a>(data: &[&'a str], out: &'a str, steps: &'a str) -> Vec<&'a str> {
    let own: &[&str] = match data[0] {
        "--pairs" => &[],
        "--text" => &["layers=2", "segment=16", "carry=7"],
        _ => &["layers=2"],
    };
    let settings = [own, &["batch_size=5", "dropout=0"]].concat();
    support::train(&[data, &set(&settings)].concat(), out, steps, &[])
}

/// Arguments of a run of 10 steps; on pairs if nothing else is given.
fn train<'a>(place: &Place, out: &'a str, data: &[&'a str]) -> Vec<&'a str> {
    if data.is_empty() {
        return place.train(out, "10", &["--set", "dropout=0"]);
    }
    train_on(data, out, "10")
}

/// A text, series and, as ever, pairs.
fn place() -> Place {
    let place = Place::new();
    place.write("novel.txt", "It was a dark and stormy night; the sea was still. ".repeat(90).as_bytes());
    let point = |n: usize| format!("{},{},{}.5,{}\n", n / 5, n % 5, (n * 7) % 11, ["a", "b"][n / 5 % 2]);
    let wave = |n: usize| format!("{n},{:.3}\n", (n as f64 / 3.0).sin());
    place.write("wave.csv", ("time,x\n".to_owned() + &(0..200).map(wave).collect::<String>()).as_bytes());
    place.write("series.csv", ("id,time,x,label\n".to_owned() + &(0..600).map(point).collect::<String>()).as_bytes());
    place
}

/// That two runs lost the same, to rounding.
fn alike(place: &Place, run: &str, alone: &str) {
    let (run, alone) = (place.losses(run), place.losses(alone));
    assert_eq!(run.len(), alone.len());
    for ((step, loss), (_, expected)) in run.into_iter().zip(alone) {
        let (loss, expected) = (f64::from_bits(loss), f64::from_bits(expected));
        assert!((loss - expected).abs() < 2e-5 * expected, "step {step}: {loss} {expected}");
    }
}

/// That so many processes, which are told `more` and say `how` they share the work, learn what one learns, and the same bits each time.
fn learn_alike(place: &Place, task: &str, data: &[&str], counts: [usize; 2], more: &[&str], how: &str) {
    let alone = format!("{task}-alone");
    place.ok(&train(place, &alone, data));
    let data = [data, more].concat();
    for count in counts {
        let (first, second) = (format!("{task}-{count}"), format!("{task}-{count}-again"));
        let notes = ok(place, count, &train(place, &first, &data));
        assert!(notes.contains(&format!("{count} processes{how}")), "{notes}");
        ok(place, count, &train(place, &second, &data));
        let weights = |run| place.read(&format!("{run}/model.safetensors"));
        assert_eq!((place.losses(&first), weights(&first)), (place.losses(&second), weights(&second)));
        alike(place, &first, &alone);
    }
    // Gone on with by another number of processes, and by one.
    let two = format!("{task}-2");
    ok(place, 3, &["train", "--resume", &two, "--steps", "13"]);
    place.ok(&["train", "--resume", &two, "--steps", "16"]);
    for steps in ["13", "16"] {
        place.ok(&["train", "--resume", &alone, "--steps", steps]);
    }
    alike(place, &two, &alone);
}

#[test]
fn processes_learn_what_one_learns() {
    let place = place();
    let text = ["--text", "novel.txt", "--set", "evaluate=1"];
    let tasks: [(&str, Vec<&str>); 6] = [
        ("pairs", Vec::new()),
        ("text", text.to_vec()),
        ("softmax", [&text[..], &["--attention", "softmax"]].concat()),
        ("series", vec!["--series", "series.csv"]),
        ("forecast", vec!["--series", "wave.csv", "--forecast", "3"]),
        ("synthetic", vec!["--synthetic", "copying:pairs=3,length=16,vocabulary=8"]),
    ];
    for (task, data) in tasks {
        learn_alike(&place, task, &data, [2, 3], &[], "");
    }
}

/// Each process takes a stretch of every sequence: of 31 tokens, unevenly. States are carried over steps, and gradients reach through
/// the stretches.
#[test]
fn split_sequences_learn_what_whole_ones_do() {
    let place = place();
    let options: [&[&str]; 4] = [
        &["--attention", "kernelized,short-convolution,shaw"],
        &["--attention", "fourier", "--set", "recompute=true"],
        &["--attention", "shaw", "--set", "radius=12", "--set", "feature_map=exp"],
        &["--attention", "kernelized", "--set", "feature_map=hedgehog", "--backpropagate", "3"],
    ];
    for (n, more) in options.into_iter().enumerate() {
        let text = ["--text", "novel.txt", "--set", "evaluate=1", "--set", "segment=31", "--set", "batch_size=2"];
        let data = [&text[..], more].concat();
        learn_alike(&place, &n.to_string(), &data, [2, 4], &["--split-sequence"], " take their stretch");
    }
}

#[test]
fn a_run_that_diverges_is_named_as_one_process_names_it() {
    let place = place();
    for more in [&["--text", "novel.txt", "--split-sequence"][..], &["--text", "novel.txt"]] {
        let far = ["--set", "learning_rate=1e30", "--set", "warmup_steps=1"];
        let said = error(&run(&place, 2, &[&train_on(more, "run", "50")[..], &far].concat()));
        assert!(said.contains(" became ") && said.contains("train again with a lower --learning-rate"), "{said}");
        std::fs::remove_dir_all(place.path("run")).expect("a run");
    }
}

#[test]
fn wrong_starts_are_one_line() {
    let place = place();
    for (arguments, parts) in [
        (vec!["train", "--pairs", "nowhere.tsv", "--out", "run"], "nowhere.tsv"),
        (vec!["train", "--pairs", "-", "--out", "run"], "standard input has one reader"),
        (
            vec!["train", "--split-sequence", "--out", "run"],
            "`split_sequence` is not used by --pairs; it belongs to --text",
        ),
        (
            vec!["train", "--text", "novel.txt", "--split-sequence", "--attention", "shaw,softmax", "--out", "run"],
            "not with softmax attention",
        ),
        (
            vec!["train", "--text", "novel.txt", "--split-sequence", "--set", "segment=1", "--out", "run"],
            "no stretch for each of 2 processes",
        ),
        (vec!["train", "--text", "novel.txt", "-", "--out", "run"], "standard input has one reader"),
        (vec!["predict", "run"], "each would do the same"),
        (vec!["info", "--mechanisms"], "start one without mpirun"),
    ] {
        let said = error(&run(&place, 2, &arguments));
        assert!(said.contains(parts), "{said}");
        assert!(!place.path("run").exists());
    }
}

/// As `torchrun` and `srun` start processes: the first one says that each would train the same, the others nothing.
#[test]
fn processes_without_mpi_are_refused() {
    let place = Place::new();
    let launchers = [
        (["WORLD_SIZE", "RANK"], "torchrun started 2 processes", "mpirun -n 2"),
        (["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"], "srun started 2 processes", "srun --mpi=pmix -n 2"),
    ];
    for ([count, rank], what, mend) in launchers {
        let start = |own| place.command(&place.train("run", "3", &[])).env(count, "2").env(rank, own).output().unwrap();
        let said = error(&start("0"));
        assert!(said.contains(what) && said.contains(mend), "{said}");
        let other = start("1");
        assert!(!other.status.success() && other.stderr.is_empty(), "{}", text(&other.stderr));
        assert!(!place.path("run").exists());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_with_other_data_is_named() {
    let place = Place::new();
    std::fs::create_dir(place.path("elsewhere")).expect("a folder");
    // A name that means another file in each process's folder.
    let train = ["train", "--pairs", "/proc/self/cwd/pairs.tsv", "--steps", "3", "--set", "workers=1"];
    let line = "[ $OMPI_COMM_WORLD_RANK = 0 ] || cd elsewhere";
    for (written, expected) in [(None, "rank 1: cannot"), (Some(b"a\tb\nb\tc\nc\td\n"), "is not what rank 0 has")] {
        if let Some(written) = written {
            place.write("elsewhere/pairs.tsv", written);
        }
        let out = if written.is_some() { "other" } else { "none" };
        let output = mpirun(&place, 2, line, &[&train[..], &["--out", out]].concat()).output().expect("mpirun starts");
        let said = error(&output);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_rank_that_is_killed_ends_all_and_the_run_goes_on() {
    let place = Place::new();
    let train = place.train("run", "100000", &["--set", "checkpoint_steps=20"]);
    let running =
        mpirun(&place, 3, "", &train).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun starts");
    place.wait_for_lines("run/metrics.jsonl", 45);
    let started = Instant::now();
    signal("KILL", last_of(running.id()));
    let output = running.wait_with_output().expect("an end");
    assert!(started.elapsed() < Duration::from_secs(30) && !output.status.success());
    assert!(text(&output.stderr).contains("rank"), "{}", text(&output.stderr));
    let step = place.info("run")["step"].as_u64().expect("a step");
    assert!(step >= 40, "{step}");
    ok(&place, 2, &["train", "--resume", "run", "--steps", &(step + 3).to_string()]);
}

/// MPI itself waits for ever. Rank 0, which the others wait for between steps, too, and another one.
#[test]
fn a_rank_that_is_stopped_ends_all() {
    for stopped in [0, 1] {
        let place = place();
        let mut mpirun = mpirun(&place, 2, "echo $$ > rank$OMPI_COMM_WORLD_RANK", &place.train("run", "100000", &[]));
        let running = mpirun.env("LONGSPAN_RANK_TIMEOUT", "3").stderr(Stdio::piped()).spawn().expect("mpirun starts");
        place.wait_for_lines("run/metrics.jsonl", 5);
        let process = String::from_utf8(place.read(&format!("rank{stopped}"))).expect("text");
        let started = Instant::now();
        signal("STOP", process.trim().parse().expect("its number"));
        let said = error(&running.wait_with_output().expect("an end"));
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
        assert!(said.contains("gave no answer for 3 seconds"), "{said}");
    }
    let place = Place::new();
    let wrong = mpirun(&place, 2, "", &place.train("run", "3", &[])).env("LONGSPAN_RANK_TIMEOUT", "0").output();
    assert!(error(&wrong.expect("mpirun starts")).contains("whole number of seconds, at least 1, got \"0\""));
}

/// A large model, whose checkpoint the limit has no room for; what MPI itself writes is smaller.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_on_rank_0_ends_all_and_the_run_goes_on() {
    let place = Place::new();
    ok(&place, 2, &place.train("run", "3", &["--set", "d_model=256", "--set", "d_ff=512"]));
    let limited = "[ $OMPI_COMM_WORLD_RANK = 1 ] || ulimit -f 16384";
    let resume = ["train", "--resume", "run", "--steps", "6"];
    let started = Instant::now();
    let said = error(&mpirun(&place, 2, limited, &resume).output().expect("mpirun starts"));
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert!(said.contains("run/checkpoint.safetensors") && said.contains("File too large"), "{said}");
    assert_eq!(place.info("run")["step"], 3);
    ok(&place, 2, &resume);
    assert_eq!(place.info("run")["step"], 6);
}

/// To all, or to one of them alone.
#[test]
fn an_interrupt_saves_and_ends_all() {
    let split: &[&str] = &["--text", "novel.txt", "--split-sequence", "--set", "segment=64"];
    for (more, one) in [(&["--pairs", "pairs.tsv"][..], false), (split, false), (split, true)] {
        let place = place();
        let train = train_on(more, "run", "100000");
        let running =
            mpirun(&place, 3, "", &train).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun starts");
        place.wait_for_lines("run/metrics.jsonl", 25);
        let started = Instant::now();
        signal("INT", if one { last_of(running.id()) } else { running.id() });
        let output = running.wait_with_output().expect("an end");
        assert!(started.elapsed() < Duration::from_secs(30) && !output.status.success());
        let said = text(&output.stderr);
        assert!(said.contains("and saved; resume with:"), "{said}");
        let step = place.info("run")["step"].as_u64().expect("a step");
        assert!(step >= 20, "{step}");
        ok(&place, 2, &["train", "--resume", "run", "--steps", &(step + 3).to_string()]);
    }
}

/// Rank 1 is a program that was told to be of another version, or to use other instructions. Arguments of all but rank 0 mean nothing.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_rank_of_another_version_is_named_and_other_arguments_are_those_of_rank_0() {
    let place = Place::new();
    let own = env!("CARGO_BIN_EXE_longspan");
    let mut program = std::fs::read(own).expect("the program");
    // As text, and as the four bytes that a comparison with a short text begins with.
    let version = &env!("CARGO_PKG_VERSION").as_bytes()[..4];
    let places: Vec<usize> = (0..program.len() - 4).filter(|&at| program[at..].starts_with(version)).collect();
    places.into_iter().for_each(|at| program[at] = b'9');
    place.write("other", &program);
    std::fs::set_permissions(place.path("other"), std::fs::metadata(own).expect("the program").permissions())
        .expect("a program");
    for (out, second, expected) in [
        ("other-version", vec!["./other"], Some("rank 1: longspan 9")),
        ("other-instructions", vec!["env", "LONGSPAN_SIMD=portable", own], Some("with portable instructions beside")),
        ("same", vec![own], None),
    ] {
        let mut command = mpirun(&place, 1, "", &place.train(out, "3", &[]));
        command.args([":", "-n", "1"]).args(second).args(["train", "--pairs", "nowhere.tsv"]);
        let output = command.output().expect("mpirun starts");
        match expected {
            Some(expected) => {
                let said = error(&output);
                assert!(said.contains(expected) && said.contains("start the same version everywhere"), "{said}");
            }
            None => assert!(output.status.success(), "{}", text(&output.stderr)),
        }
    }
}
