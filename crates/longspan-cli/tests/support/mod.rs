//! Runs the built command in a folder of its own.
#![allow(dead_code, reason = "each test file uses its part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Whether [`Place::peak`] can be asked here.
pub fn tells_memory() -> bool {
    Path::new("/proc/self/status").exists()
}

/// A folder that the command runs in, with `pairs.tsv` in it.
pub struct Place(TempDir);

/// Settings of a model that takes a step in a few milliseconds.
const TINY: [&str; 6] = ["d_model=16", "heads=2", "d_ff=16", "workers=2", "batch_size=8", "warmup_steps=5"];

/// `--set` before each of these settings.
pub fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

/// These settings, and the rate at which a wider model learns.
pub fn able<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    [&set(settings)[..], &["--learning-rate", "0.005"]].concat()
}

/// Arguments of a tiny training run on `source`, whose settings win over the tiny ones, then `more`.
pub fn train<'a>(source: &[&'a str], out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    // The blocks of pairs are those of an encoder and a decoder.
    let layers = if source.contains(&"--pairs") { vec![] } else { set(&["layers=1"]) };
    [&["train", "--out", out, "--steps", steps], &set(&TINY)[..], &layers, source, more].concat()
}

impl Place {
    pub fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a temporary folder"));
        place.write("pairs.tsv", pairs(200).as_bytes());
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, contents: &[u8]) {
        fs::write(self.path(name), contents).expect("a file in the temporary folder");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longspan"));
        command.args(arguments).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the command starts")
    }

    /// Runs the command, which must succeed; its standard output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        self.said(arguments).0
    }

    /// Runs the command, which must succeed; its standard output and its notes.
    pub fn said(&self, arguments: &[&str]) -> (String, String) {
        let output = self.run(arguments);
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        (stdout, stderr)
    }

    /// Runs the command, which must succeed; its standard output as JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).expect("JSON")
    }

    /// Starts the command, whose output nobody reads.
    pub fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command starts")
    }

    /// Runs the command, which must succeed; what the system says that it took of memory at most, in kB.
    pub fn peak(&self, arguments: &[&str]) -> f64 {
        let mut child = self.start(arguments);
        let mut peak = 0.0;
        loop {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
            let found = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
            peak = found.and_then(|kilobytes| kilobytes.trim().parse().ok()).unwrap_or(peak);
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success(), "{arguments:?}");
                return peak;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Runs the command, which must fail with one line on standard error that has all of `parts`.
    pub fn fails(&self, arguments: &[&str], parts: &[&str]) -> String {
        failed(&self.run(arguments), parts)
    }

    /// Arguments of a tiny training run on `pairs.tsv`, then `more`.
    pub fn train<'a>(&self, out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        self.train_on("pairs.tsv", out, steps, more)
    }

    /// The same on another file of pairs.
    pub fn train_on<'a>(&self, pairs: &'a str, out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        train(&["--pairs", pairs, "--set", "encoder_layers=1", "--set", "decoder_layers=1"], out, steps, more)
    }

    /// A trained tiny run.
    pub fn trained(&self, out: &str) {
        self.ok(&self.train(out, "12", &[]));
    }

    /// The loss of every step that `metrics.jsonl` lists, as its bits.
    pub fn losses(&self, run: &str) -> Vec<(u64, u64)> {
        text(&self.read(&format!("{run}/metrics.jsonl")))
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{line}: {error}")))
            .filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?.to_bits())))
            .collect()
    }

    pub fn info(&self, run: &str) -> Value {
        self.json(&["info", run, "--json"])
    }

    /// The names of all mechanisms.
    pub fn mechanisms(&self) -> Vec<String> {
        let facts = self.json(&["info", "--mechanisms", "--json"]);
        facts.as_array().expect("a list").iter().map(|facts| facts["name"].as_str().expect("a name").into()).collect()
    }

    /// Checks that `eval` without a file finds again what training said of the held-out examples.
    pub fn finds_its_scores_again(&self, run: &str) {
        let again = self.json(&["eval", run, "--json"]);
        for (name, score) in self.info(run)["held_out"].as_object().expect("scores") {
            assert_eq!(&again[name], score, "{name} of {again}");
        }
        assert!(again["file"].is_null(), "{again}");
    }

    /// Names in a folder, hidden ones too.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path(folder))
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Waits until a file has so many lines.
    pub fn wait_for_lines(&self, name: &str, lines: usize) {
        let started = Instant::now();
        while fs::read_to_string(self.path(name)).map_or(0, |text| text.lines().count()) < lines {
            assert!(started.elapsed() < Duration::from_secs(60), "{name} does not get {lines} lines");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A failure must be one line on standard error, the last one, with all of `parts`.
pub fn failed(output: &Output, parts: &[&str]) -> String {
    let stderr = text(&output.stderr);
    assert!(!output.status.success(), "succeeded: {}", text(&output.stdout));
    assert!(output.status.code().is_some(), "ended by a signal: {:?} {stderr}", output.status);
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    assert_eq!(stderr.lines().last(), Some(errors[0]), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    for part in parts {
        assert!(errors[0].contains(part), "{part:?} is not in: {}", errors[0]);
    }
    errors[0].to_string()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Words of three letters and what they are backwards, one pair a line.
fn pairs(count: usize) -> String {
    (0..count)
        .map(|i| {
            let letter = |at: usize| char::from(b'a' + (at % 7) as u8);
            let (a, b, c) = (letter(i), letter(i / 7), letter(i / 49));
            format!("{a}{b}{c}\t{c}{b}{a}\n")
        })
        .collect()
}

/// Numbers from 0 to 1.
pub fn random(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    }
}

/// Sends a signal, such as `INT`.
pub fn signal(name: &str, process: u32) {
    let status = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
    assert!(status.expect("kill starts").success());
}

/// Runs the command under a limit of file sizes in blocks of 512 bytes.
pub fn with_file_limit(folder: &Path, blocks: usize, arguments: &[&str]) -> Output {
    Command::new("sh")
        .args(["-c", &format!("ulimit -f {blocks}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_longspan")])
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("sh starts")
}
