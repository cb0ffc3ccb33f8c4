//! The seal of a run folder: SHA-256 of every file that must stay as it was written.
//!
//! Settings, tokenizers, weights and progress only mean something together. A changed letter in one of them would change
//! answers, or what `--resume` computes, without a word; so every command compares them with `seal.json` first.
//!
//! A file is replaced in three steps, so that a process may be killed at any instant: the seal allows the old contents and
//! the new ones; the file takes its new contents; the seal allows the new ones alone.
//!
//! `metrics.jsonl` grows at every step: sealed is what it held at the last checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::write::{cannot_write, sync, write_atomic};
use crate::terminal::shell;

/// The file of the seal, within a run folder.
const NAME: &str = "seal.json";

/// The file that grows, of which the first bytes are sealed.
pub const LOG: &str = "metrics.jsonl";

/// What a run folder allows.
#[derive(Serialize, Deserialize)]
pub struct Seal {
    /// Of `files` as JSON: the seal itself may be damaged.
    sha256: String,
    /// The SHA-256 that each file may have; of the log the number of its sealed bytes, a colon, and theirs.
    files: BTreeMap<String, Vec<String>>,
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| anyhow!("cannot read {}: {error}; the run folder is incomplete", path.display()))
}

/// What the seal says of a file as it is.
fn of_file(path: &Path) -> Result<String> {
    let bytes = read(path)?;
    let log = path.ends_with(LOG);
    Ok(if log { format!("{}:{}", bytes.len(), sha256(&bytes)) } else { sha256(&bytes) })
}

/// The sealed bytes of a file, if they are one of those that the seal allows.
fn sealed(path: &Path, allowed: &[String]) -> Result<Option<Vec<u8>>> {
    let mut bytes = read(path)?;
    let found = allowed.iter().find_map(|allowed| {
        let (length, expected) = match allowed.split_once(':') {
            Some((length, expected)) => (length.parse().ok()?, expected),
            None => (bytes.len(), allowed.as_str()),
        };
        (sha256(bytes.get(..length)?) == expected).then_some(length)
    });
    Ok(found.map(|length| {
        bytes.truncate(length);
        bytes
    }))
}

/// How a person says that a change was meant.
fn accept(folder: &Path) -> String {
    format!(
        "if the files are as they should be, accept them with: longspan info {} --accept-changes",
        shell::path(folder)
    )
}

/// The seal of a folder, if it is whole.
pub fn load(folder: &Path) -> Result<Seal> {
    let path = folder.join(NAME);
    let name = path.display();
    let text = fs::read(&path).map_err(|error| {
        anyhow!("cannot read {name}: {error}; it was removed, or an earlier version made the run; {}", accept(folder))
    })?;
    let broken = || anyhow!("{name}: the seal is damaged; restore it; {}", accept(folder));
    let seal: Seal = serde_json::from_slice(&text).map_err(|_| broken())?;
    if sha256(serde_json::to_string(&seal.files)?.as_bytes()) == seal.sha256 { Ok(seal) } else { Err(broken()) }
}

fn store(folder: &Path, files: BTreeMap<String, Vec<String>>) -> Result<()> {
    let seal = Seal { sha256: sha256(serde_json::to_string(&files)?.as_bytes()), files };
    write_atomic(&folder.join(NAME), format!("{}\n", serde_json::to_string_pretty(&seal)?).as_bytes())
}

/// Seals all files of a folder as they are.
pub fn seal(folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(|error| cannot_write(folder, error))? {
        let path = entry.map_err(|error| cannot_write(folder, error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sealed = path.extension().is_some_and(|extension| extension == "json" || extension == "safetensors");
        if (sealed || name == LOG) && name != NAME && !name.starts_with('.') {
            files.insert(name, vec![of_file(&path)?]);
        }
    }
    store(folder, files)
}

/// Compares those files of a folder that `wanted` names with its seal; the sealed bytes of the last one.
pub fn verify(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<u8>> {
    // Another process may be training here, and replace a file between the two readings.
    for attempt in 0.. {
        let seal = load(folder)?;
        let (mut contents, mut changed) = (Vec::new(), None);
        for (name, allowed) in seal.files.iter().filter(|(name, _)| wanted(name)) {
            let path = folder.join(name);
            match sealed(&path, allowed)? {
                Some(bytes) => contents = bytes,
                None => changed = Some(path),
            }
        }
        match changed {
            None => return Ok(contents),
            Some(path) if attempt == 3 => bail!(
                "{}: damaged, or changed since `longspan train` wrote it; restore it or train again; {}",
                path.display(),
                accept(folder)
            ),
            Some(_) => sleep(Duration::from_millis(30)),
        }
    }
    Ok(Vec::new())
}

/// Replaces files of a sealed folder, or of one that has no seal yet: each is a name and the file with its new contents. The
/// log is sealed as far as it has come.
pub fn replace(folder: &Path, files: &[(&str, &Path)]) -> Result<()> {
    let sealed = folder.join(NAME).exists();
    let mut allowed = if sealed { load(folder)?.files } else { BTreeMap::new() };
    for (name, new) in files {
        let now = of_file(new)?;
        // Its temporary file has another name.
        let now = if *name == LOG { format!("{}:{now}", read(new)?.len()) } else { now };
        allowed.entry((*name).into()).or_default().push(now);
    }
    let log = folder.join(LOG);
    let grown = log.exists() && !files.iter().any(|(name, _)| *name == LOG);
    if grown {
        fs::File::open(&log).and_then(|file| file.sync_all()).map_err(|error| cannot_write(&log, error))?;
        allowed.insert(LOG.into(), vec![of_file(&log)?]);
    }
    if sealed {
        store(folder, allowed.clone())?;
    }
    for (name, new) in files {
        let path = folder.join(name);
        fs::rename(new, &path).map_err(|error| cannot_write(&path, error))?;
        let list = allowed.entry((*name).into()).or_default();
        list.drain(..list.len() - 1);
    }
    sync(folder).map_err(|error| cannot_write(folder, error))?;
    if sealed { store(folder, allowed) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_may_grow_beyond_what_is_sealed_but_not_change() {
        let place = tempfile::tempdir().unwrap();
        let (folder, log) = (place.path(), place.path().join(LOG));
        fs::write(&log, "one\n").unwrap();
        seal(folder).unwrap();
        fs::write(&log, "one\ntwo\nthr").unwrap();
        assert_eq!(verify(folder, |name| name == LOG).unwrap(), b"one\n");
        replace(folder, &[]).unwrap();
        assert_eq!(verify(folder, |name| name == LOG).unwrap(), b"one\ntwo\nthr");
        for changed in ["one\ntwo\nthx", "one\n", ""] {
            fs::write(&log, changed).unwrap();
            assert!(verify(folder, |name| name == LOG).unwrap_err().to_string().contains("metrics.jsonl: damaged"));
        }
        let shorter = folder.join("next");
        fs::write(&shorter, "one\n").unwrap();
        replace(folder, &[(LOG, &shorter)]).unwrap();
        assert_eq!(verify(folder, |name| name == LOG).unwrap(), b"one\n");
    }

    #[test]
    fn a_folder_killed_while_a_file_is_replaced_is_still_whole() {
        let place = tempfile::tempdir().unwrap();
        let (folder, file) = (place.path(), place.path().join("a.json"));
        let all = |_: &str| true;
        fs::write(&file, "old").unwrap();
        assert!(verify(folder, all).unwrap_err().to_string().contains("--accept-changes"));
        seal(folder).unwrap();
        verify(folder, all).unwrap();
        // As after the first of the three steps.
        store(folder, BTreeMap::from([("a.json".into(), vec![sha256(b"old"), sha256(b"new")])])).unwrap();
        verify(folder, all).unwrap();
        fs::write(&file, "new").unwrap();
        verify(folder, all).unwrap();
        let next = folder.join("next");
        fs::write(&next, "newer").unwrap();
        replace(folder, &[("a.json", &next)]).unwrap();
        verify(folder, all).unwrap();
        for past in ["old", "new"] {
            fs::write(&file, past).unwrap();
            assert!(verify(folder, all).unwrap_err().to_string().contains("a.json: damaged, or changed"));
        }
        verify(folder, |name| name != "a.json").unwrap();
        fs::remove_file(&file).unwrap();
        assert!(verify(folder, all).unwrap_err().to_string().contains("cannot read"));
    }
}
