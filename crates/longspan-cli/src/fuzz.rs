//! Every reader on inputs that were changed at random: it may refuse them, and must not panic, abort or hang.
//!
//! An ordinary test rather than `cargo fuzz`, which wants a nightly compiler: the same corpus is changed in the same way each time,
//! for `LONGSPAN_FUZZ_SECONDS` a reader (by default half a second), with `LONGSPAN_SEED` for other changes. `tests/corpus` holds a
//! folder of inputs for each reader that reads text, and gets those that once did harm. What is binary is made here, so that it is
//! always of today's format.

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use longspan::attention::{AttentionConfig, AttentionState, StoredState};
use longspan::checkpoint;
use longspan::models::{BlockConfig, Seq2Seq, Seq2SeqConfig};

use crate::run::checkpoint::{Best, Saved, optimizer};
use crate::run::columns::Columns;
use crate::run::config::{PairsSettings, RunConfig, with};
use crate::run::keys;
use crate::run::seal;
use crate::run::settings::Settings;
use crate::tasks::batches::Random;
use crate::tasks::pairs::file::parse;
use crate::tasks::series::file::{self, Reading};
use crate::tasks::tokens::{Kind, Tokenizer};
use crate::tasks::{attention, lines};

/// What is put in: things that readers treat in a way of their own. These stand between spaces,
const WORDS: &str = "\" \\ , : { } [ ] {} [] null true -1 0 1e308 -0.0 NaN 4294967295 4294967296 9223372036854775807 \
                     18446744073709551616 1e999 \\u0000 \\ud800 \u{feff} \u{2581} (a|a)* .* =";

/// and these are no words.
const BYTES: [&[u8]; 7] = [b"\n", b"\r\n", b"\t", b"\xff", b"\xff\xfe", b"\x1f\x8b", b"\0"];

/// A number below `limit`, or 0 where there is none.
fn below(random: &mut Random, limit: usize) -> usize {
    (random.next() % limit.max(1) as u64) as usize
}

fn piece(random: &mut Random) -> &'static [u8] {
    let pieces: Vec<&[u8]> = WORDS.split(' ').map(str::as_bytes).chain(BYTES).collect();
    pieces[below(random, pieces.len())]
}

/// Changes an input, in up to 6 places.
fn change(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut input = corpus[below(random, corpus.len())].clone();
    for _ in 0..1 + below(random, 6) {
        let at = below(random, input.len() + 1);
        let end = (at + 1 + below(random, 40)).min(input.len()).max(at);
        match below(random, 9) {
            0 if at < input.len() => input[at] ^= 1 << below(random, 8),
            1 if at < input.len() => input[at] = random.next() as u8,
            2 => drop(input.drain(at..end)),
            3 => {
                let part = input[at..end].to_vec();
                input.splice(at..at, part);
            }
            4 | 5 => {
                let piece = piece(random);
                input.splice(at..at, piece.iter().copied());
            }
            // A value for a value, where there is one.
            6 => {
                let end =
                    input[at..].iter().position(|byte| b",}]\n \"".contains(byte)).map_or(input.len(), |n| at + n);
                let piece = piece(random);
                input.splice(at..end, piece.iter().copied());
            }
            // The end of another input.
            7 => {
                let other = &corpus[below(random, corpus.len())];
                let from = below(random, other.len() + 1);
                input.splice(at.., other[from..].iter().copied());
            }
            _ if below(random, 4) == 0 => input.truncate(at),
            _ => {}
        }
    }
    input
}

fn number(name: &str, default: f64) -> f64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number")))
}

/// Inputs of a reader in `tests/corpus`.
fn kept(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let Ok(entries) = fs::read_dir(&folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Runs a reader on changed inputs; it says whether it took the input. Every input of the corpus is tried as it is first.
fn fuzz(name: &str, made: Vec<Vec<u8>>, reader: impl Fn(&Path, &[u8]) -> bool + std::panic::RefUnwindSafe) {
    let corpus = [made, kept(name)].concat();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("input");
    let mut random = Random::new(number("LONGSPAN_SEED", 1.0) as u64, 0);
    let started = Instant::now();
    let seconds = Duration::from_secs_f64(number("LONGSPAN_FUZZ_SECONDS", 0.5));
    let (mut tried, mut taken) = (0, 0);
    let mut slowest = Duration::ZERO;
    while tried < corpus.len() || started.elapsed() < seconds {
        let input = if tried < corpus.len() { corpus[tried].clone() } else { change(&mut random, &corpus) };
        // Before the call: an abort leaves it there.
        fs::write(&path, &input).unwrap();
        let called = Instant::now();
        let result = catch_unwind(|| reader(&path, &input));
        slowest = slowest.max(called.elapsed());
        if result.is_err() || called.elapsed() > Duration::from_secs(10) {
            let found = place.keep().join("input");
            let did = if result.is_err() { "panics" } else { "takes more than 10 s" };
            panic!("the reader of {name} {did} on {}: put it into tests/corpus/{name}", found.display());
        }
        taken += u32::from(result.is_ok_and(|taken| taken));
        tried += 1;
    }
    println!("{name}: {tried} inputs, {taken} of them taken, the slowest in {slowest:?}");
    assert!(taken > 0, "{name}: the corpus itself is refused");
}

#[test]
fn pairs() {
    for (name, ending) in [("tabs", "tsv"), ("csv", "csv"), ("json-lines", "jsonl")] {
        fuzz(name, Vec::new(), move |_, input| parse(input, ending, "x", &Columns::default()).is_ok());
    }
    let compressed = |text: &[u8]| {
        use std::io::Write as _;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    };
    let made = vec![compressed(b"abc\tcba\n"), [compressed(&[b'a'; 300]), compressed(b"")].concat()];
    fuzz("gzip", made, |path, _| lines::read(path).is_ok());
}

#[test]
fn series() {
    let made = |text: &str| vec![text.as_bytes().to_vec()];
    for (ending, text) in [
        (
            "jsonl",
            "{\"times\": [0, 0.5], \"values\": [[1, null], [2, 3]], \"label\": \"a\"}\n{\"values\": [[1, 2]], \"label\": 3}\n",
        ),
        ("csv", "id,time,x,y,label\na,0,1,2.5,u\nb,0,1,,v\na,1,NaN,\"3\",u\n"),
        ("ts", "# x\n@timestamps true\n@classlabel true a b\n@data\n(0,1),(1.5,?):(1,2),(2,3):a\n(0,1):(0,2):b\n"),
        ("ts", "@missing true\n@data\n1,?,3:2,3,4:a\n2,3:1,2:b\n"),
        ("tsv", "1\t0.5\t-2e3\tNaN\n2\t1\t\t3\n"),
        ("csv", "id;Month;x;y\na;2024-01-31;1,5;?\na;2024-02-29;2;\nb;2024-01-31;1.234,5;3\n"),
        (
            "json",
            "[{\"date\": \"Jan 1 2000\", \"x\": 1}, {\"date\": \"Feb 1 2000\", \"x\": null}, {\"date\": \"Mar 1 2000\", \"x\": 2}]",
        ),
        (
            "tsf",
            "@attribute series_name string\n@attribute start_timestamp date\n@frequency monthly\n@data\nT1:1979-01-01 00-00-00:1,?,3\n",
        ),
        ("arff", "% x\n@relation x\n@attribute a numeric\n@attribute c {1,2}\n@data\n'1,2\\n5,6',1\n'1,2\\n3,4',2\n"),
    ] {
        fuzz("series", made(text), move |_, input| file::parse(input, ending, "x", &Reading::default()).is_ok());
    }
}

fn try_tokenizer(tokenizer: &Tokenizer) {
    let _ = (tokenizer.len(), tokenizer.to_json());
    for text in ["", "a b", "cat ab üñ猫\u{0}", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"] {
        tokenizer.unknown_pieces(text);
        if let Ok(ids) = tokenizer.encode(text) {
            let _ = tokenizer.decode(&ids);
        }
    }
    let _ = tokenizer.decode(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 300, u32::MAX]);
}

#[test]
fn tokenizers() {
    fuzz("tokenizer", Vec::new(), |path, _| {
        let tokenizer = Tokenizer::build(&Kind::File(path.into()), std::iter::empty());
        tokenizer.as_ref().is_ok_and(|tokenizer| {
            try_tokenizer(tokenizer);
            true
        })
    });
    fuzz("stored-tokenizer", Vec::new(), |path, input| {
        Tokenizer::stored(path, input).is_ok_and(|tokenizer| {
            try_tokenizer(&tokenizer);
            true
        })
    });
}

#[test]
fn settings() {
    let mut config = keys::defaults();
    config.extend([("steps".into(), 3.into()), ("workers".into(), 2.into())]);
    let made = vec![serde_json::to_vec_pretty(&config).unwrap(), serde_json::to_vec(&config).unwrap()];
    fuzz("config", made, |path, input| {
        RunConfig::parse(path, input).is_ok_and(|config| {
            // The model's sizes are checked before its memory is asked for.
            let RunConfig::Pairs(config) = config else { return true };
            let _ = attention::of_run(&config.model, config.task.files.max_tokens);
            true
        })
    });
    fuzz("settings", Vec::new(), |path, _| {
        let mut settings = Settings::default();
        // Some keys are unknown; those before them were taken.
        let _ = settings.read_file(path);
        settings.resolve().is_ok()
    });
    fuzz("assignment", Vec::new(), |_, input| {
        let mut settings = Settings::default();
        let taken = settings.set_text(&String::from_utf8_lossy(input)).is_ok();
        taken && settings.resolve().is_ok()
    });
}

#[test]
fn seals() {
    let place = tempfile::tempdir().unwrap();
    for (name, contents) in [("config.json", "{}"), (seal::LOG, "one\n")] {
        fs::write(place.path().join(name), contents).unwrap();
    }
    seal::seal(place.path()).unwrap();
    let made = vec![fs::read(place.path().join("seal.json")).unwrap()];
    fuzz("seal", made, |_, input| {
        fs::write(place.path().join("seal.json"), input).unwrap();
        // Not `verify`, which waits for another process to finish.
        seal::load(place.path()).is_ok()
    });
}

fn tiny() -> Seq2Seq {
    let block = BlockConfig::new().with_d_model(4).with_heads(2).with_d_ff(4).with_dropout(0.0);
    let sizes = Seq2SeqConfig::new(5, 6).with_block(block).with_encoder_layers(1).with_decoder_layers(1);
    sizes.init(&Device::flex()).unwrap()
}

/// A file, and the same without the library's checksum, so that changes reach beyond it.
fn with_and_without_checksum(bytes: Vec<u8>) -> Vec<Vec<u8>> {
    let name = b"\"longspan\"";
    let at = bytes.windows(name.len()).position(|window| window == name).expect("metadata of the library");
    let mut other = bytes.clone();
    other[at + 1..at + 9].copy_from_slice(b"someone!");
    vec![bytes, other]
}

#[test]
fn weights_and_checkpoints() {
    let file = tempfile::NamedTempFile::new().unwrap();
    checkpoint::save_weights(file.path(), &tiny()).unwrap();
    let made = with_and_without_checksum(fs::read(file.path()).unwrap());
    fuzz("weights", made, |path, _| checkpoint::load_weights(path, tiny()).is_ok());

    let optimizer = || optimizer(&with::<PairsSettings>(serde_json::json!({})).training);
    let best = Some(Best { step: 2, loss: 1.5 });
    let saved = Saved { step: 3, seconds: 0.5, best, data_sha256: "0".repeat(64), ..Saved::default() };
    checkpoint::save_training(file.path(), &tiny(), &optimizer(), &saved, Vec::new()).unwrap();
    let made = with_and_without_checksum(fs::read(file.path()).unwrap());
    fuzz("checkpoint", made, |path, _| checkpoint::load_training::<_, Saved>(path, tiny(), optimizer()).is_ok());
}

#[test]
fn states() {
    for name in ["shaw", "kernelized", "fourier", "toeplitz", "aft-conv", "softmax"] {
        let device = Device::flex();
        let module = AttentionConfig::by_name(name).unwrap().init(2, 2, 4, &device).unwrap();
        let key_dim = module.key_dim();
        let row = |width| Tensor::<4>::ones([1, 2, 1, width], &device);
        let mut state = AttentionState::default();
        for _ in 0..3 {
            module.step(row(4), row(key_dim), row(4), &mut state).unwrap();
        }
        let made = vec![serde_json::to_vec(&module.store(&state).unwrap()).unwrap()];
        let module = std::panic::AssertUnwindSafe(module);
        fuzz(&format!("state-{name}"), made, move |_, input| {
            let Ok(stored) = serde_json::from_slice::<StoredState>(input) else { return false };
            let device = Device::flex();
            let Ok(mut state) = module.restore(&stored, &device) else { return false };
            let row = |width| Tensor::<4>::ones([1, 2, 1, width], &device);
            let _ = module.step(row(4), row(key_dim), row(4), &mut state);
            let _ = state.select(&[0, 0]);
            true
        });
    }
}
