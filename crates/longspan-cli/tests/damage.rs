//! Files changed at random, and processes killed at random moments: refused or unharmed, and nothing lost.
//!
//! Short by default. `LONGSPAN_CHANGES=1000` and `LONGSPAN_KILLS=200` are the long forms, `LONGSPAN_SEED` draws others.

mod support;

use std::fs;
use std::process::Output;
use std::time::Duration;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use support::{Place, failed, signal, text};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number")))
}

struct Random(SplitMix64);

impl Random {
    fn new() -> Self {
        Self(SplitMix64::seed_from_u64(number("LONGSPAN_SEED", 1)))
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() % limit.max(1) as u64) as usize
    }

    /// Other contents: a few bytes changed, put in, taken out, doubled, or all after one.
    fn changed(&mut self, old: &[u8]) -> Vec<u8> {
        let mut new = old.to_vec();
        while new == old {
            let at = self.below(new.len());
            let end = (at + 1 + self.below(8)).min(new.len());
            match self.below(7) {
                0 | 1 if !new.is_empty() => new[at] ^= 1 << self.below(8),
                2 if !new.is_empty() => new[at] = self.below(256) as u8,
                // A digit, which keeps a number a number.
                3 => {
                    let digits: Vec<usize> = (0..new.len()).filter(|&at| new[at].is_ascii_digit()).collect();
                    if let Some(&at) = digits.get(self.below(digits.len())) {
                        new[at] = b'0' + self.below(10) as u8;
                    }
                }
                4 => new.insert(at, self.below(256) as u8),
                5 => drop(new.drain(at.min(end)..end)),
                6 if self.below(4) == 0 => new.truncate(at),
                _ => {
                    let part = new[at.min(end)..end].to_vec();
                    new.splice(at..at, part);
                }
            }
        }
        new
    }
}

/// All files of a folder, by name.
fn files(place: &Place, folder: &str) -> Vec<(String, Vec<u8>)> {
    let names = place.names(folder).into_iter();
    names.map(|name| (format!("{folder}/{name}"), place.read(&format!("{folder}/{name}")))).collect()
}

/// A command must fail with one line, or say what it says of the undamaged run. `true` if it failed.
fn refused(output: &Output, expected: &str, what: &str) -> bool {
    if output.status.success() {
        assert_eq!(text(&output.stdout), expected, "{what}: another answer, silently");
        return false;
    }
    assert_eq!(output.status.code(), Some(1), "{what}: {:?} {}", output.status, text(&output.stderr));
    failed(output, &[]);
    true
}

#[test]
fn changed_bytes_in_any_file_of_a_run_are_refused_or_harmless() {
    let place = Place::new();
    place.trained("run");
    place.write("lines", "abc\ngfe\nüx\n\n".as_bytes());
    let whole = files(&place, "run");
    let commands = [
        vec!["info", "run", "--json"],
        vec!["predict", "run", "lines", "--json", "--beam", "2"],
        vec!["eval", "run", "pairs.tsv", "--json"],
    ];
    let expected = commands.clone().map(|arguments| place.ok(&arguments));
    let resume = ["train", "--resume", "run", "--steps", "14"];
    place.ok(&resume);
    let (losses, answers) = (place.losses("run"), place.ok(&commands[1]));
    let restore = |place: &Place| {
        for name in place.names("run") {
            fs::remove_file(place.path(&format!("run/{name}"))).expect("a file");
        }
        whole.iter().for_each(|(name, contents)| place.write(name, contents));
    };
    let mut random = Random::new();
    let (mut refusals, mut tried) = (0, 0);
    for round in 0..number("LONGSPAN_CHANGES", 20) {
        restore(&place);
        let (name, contents) = &whole[random.below(whole.len())];
        let changed = random.changed(contents);
        place.write(name, &changed);
        for (arguments, expected) in commands.iter().zip(&expected) {
            let what = format!("round {round}, {name}, {arguments:?}");
            refusals += u32::from(refused(&place.run(arguments), expected, &what));
        }
        let resumed = place.run(&resume);
        let what = format!("round {round}, {name}, --resume");
        if resumed.status.success() {
            assert_eq!(place.losses("run"), losses, "{what}: other losses, silently");
            assert_eq!(place.ok(&commands[1]), answers, "{what}: other answers, silently");
        } else {
            failed(&resumed, &[]);
            assert_eq!(place.read(name), changed, "{what}: a refused run was written to");
            refusals += 1;
        }
        tried += 4;
    }
    println!("{tried} commands on changed runs: {refusals} refused, {} unharmed", tried - refusals);
    assert!(tried == 0 || (refusals > 0 && refusals < tried));
}

/// Trains `run` to its end in spite of so many kills at random moments, from the first file to the last score; `arguments` begin it
/// anew. Its steps must be those of `whole`, which nobody kills.
fn train_in_spite_of(place: &Place, arguments: &dyn Fn(&str) -> Vec<String>, kills: u64, random: &mut Random) {
    let run = |arguments: &[String]| place.start(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let resume = ["train", "--resume", "run"].map(String::from);
    assert!(run(&arguments("whole")).wait().expect("its end").success(), "{:?}", arguments("whole"));
    let (mut killed, mut ended) = (0, 0);
    while killed < kills {
        let mut child = if place.path("run").exists() { run(&resume) } else { run(&arguments("run")) };
        // Most of them while it starts and writes its first files, some later.
        let most = if random.below(3) == 0 { 400 } else { 60 };
        std::thread::sleep(Duration::from_millis(random.below(most) as u64));
        if child.try_wait().expect("its state").is_some_and(|status| status.success()) {
            ended += 1;
            assert_eq!(place.losses("run"), place.losses("whole"));
            fs::remove_dir_all(place.path("run")).expect("the run");
            continue;
        }
        signal("KILL", child.id());
        child.wait().expect("its end");
        killed += 1;
        if place.path("run").exists() {
            let info = place.info("run");
            assert!(info["step"].is_u64());
            if info["config"]["pairs"].is_string() {
                place.ok(&["predict", "run", "pairs.tsv"]);
            }
        }
    }
    println!("{killed} kills while training, {ended} runs came to their end between them");
    if !place.path("run").exists() {
        assert!(run(&arguments("run")).wait().expect("its end").success());
    }
    place.ok(&["train", "--resume", "run"]);
    assert_eq!(place.losses("run"), place.losses("whole"));
    assert_eq!(place.read("run/model.safetensors"), place.read("whole/model.safetensors"));
    assert!(!place.names("run").iter().any(|name| name.ends_with(".tmp")), "{:?}", place.names("run"));
}

/// Steps of a run that so many kills are aimed at.
fn steps(kills: u64) -> String {
    (60 * kills).min(2000).to_string()
}

#[test]
fn kills_at_random_moments_lose_nothing() {
    let place = Place::new();
    let kills = number("LONGSPAN_KILLS", 5);
    let mut random = Random::new();
    place.write("lines", "abc\n".repeat(3000).as_bytes());
    let steps = steps(kills);
    let more = ["--set", "checkpoint_steps=3", "--set", "dropout=0.1"];
    let arguments = |out: &str| place.train(out, &steps, &more).into_iter().map(String::from).collect();
    train_in_spite_of(&place, &arguments, kills, &mut random);
    let answers = |run: &str| place.ok(&["predict", run, "pairs.tsv", "--json"]);
    assert_eq!(answers("run"), answers("whole"));

    // While the others read, or seal anew: the run stays as it is.
    let whole = files(&place, "run");
    let commands = [
        vec!["predict", "run", "lines"],
        vec!["eval", "run", "pairs.tsv", "--beam", "4"],
        vec!["info", "run"],
        vec!["info", "run", "--accept-changes"],
    ];
    for arguments in &commands {
        for _ in 0..kills {
            let mut child = place.start(arguments);
            std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
            signal("KILL", child.id());
            child.wait().expect("its end");
            place.ok(&["info", "run"]);
        }
        for (name, contents) in whole.iter().filter(|(name, _)| !name.ends_with("seal.json")) {
            assert!(place.read(name) == *contents, "{arguments:?}: {name} has changed");
        }
    }
    println!("{} kills of predict, eval, info and info --accept-changes", kills * commands.len() as u64);
}

#[test]
fn every_task_survives_kills_at_random_moments() {
    let kills = number("LONGSPAN_KILLS", 3);
    let mut random = Random::new();
    let verses: String = (0..200).map(|n| format!("and line {n} of {} came\n", n * n % 17)).collect();
    let reports: String = (0..200).map(|n| format!("report {n} says {}\t{}\n", n % 7, ["a", "b"][n % 2])).collect();
    let series: String = (0..120)
        .map(|n| {
            let [times, values] = [0.7, 0.1].map(|step| [1.0, 2.5, 4.0, 4.5].map(|at| at * step * (n % 9 + 1) as f64));
            format!("{{\"times\": {times:?}, \"values\": {values:?}, \"label\": \"{}\"}}\n", n % 2)
        })
        .collect();
    for task in [
        ["--text", "verses.txt", "--set", "segment=16", "--set", "carry=3", "--set", "backpropagate=2"].as_slice(),
        &["--text", "verses.txt", "--set", "segment=16", "--set", "carry=3", "--attention", "softmax"],
        &["--text", "verses.txt", "--set", "segment=16", "--set", "carry=3", "--tokens", "bytes"],
        &["--labelled", "reports.tsv"],
        &["--series", "series.jsonl"],
        &["--series", "series.jsonl", "--forecast", "1", "--set", "context=2"],
        &["--synthetic", "mqar:pairs=2,length=16,vocabulary=12"],
    ] {
        let place = Place::new();
        for (name, contents) in [("verses.txt", &verses), ("reports.tsv", &reports), ("series.jsonl", &series)] {
            place.write(name, contents.as_bytes());
        }
        let steps = steps(kills);
        let arguments = |out: &str| {
            let more = ["--set", "checkpoint_steps=3", "--set", "dropout=0.1"];
            support::train(task, out, &steps, &more).into_iter().map(String::from).collect()
        };
        train_in_spite_of(&place, &arguments, kills, &mut random);
    }
}
