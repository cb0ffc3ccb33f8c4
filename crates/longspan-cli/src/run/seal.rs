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
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::write::{cannot_write, draft_of, sync, write_atomic};
use crate::terminal::shell;

const NAME: &str = "seal.json";

/// The file that grows, of which the first bytes are sealed.
pub const LOG: &str = "metrics.jsonl";

#[derive(Serialize, Deserialize)]
pub struct Seal {
    /// Of `files` as JSON: the seal itself may be damaged.
    sha256: String,
    /// The SHA-256 that each file may have; of the log the number of its sealed bytes, a colon, and theirs.
    files: BTreeMap<String, Vec<String>>,
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| anyhow!("cannot read {}: {error}; the run folder is incomplete", path.display()))
}

/// What the seal says of a file with these contents.
fn of_bytes(path: &Path, bytes: &[u8]) -> String {
    if path.ends_with(LOG) { format!("{}:{}", bytes.len(), sha256(bytes)) } else { sha256(bytes) }
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

pub fn seal(folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(|error| cannot_write(folder, error))? {
        let path = entry.map_err(|error| cannot_write(folder, error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sealed = path.extension().is_some_and(|extension| extension == "json" || extension == "safetensors");
        if (sealed || name == LOG) && name != NAME && !name.starts_with('.') {
            files.insert(name, vec![of_bytes(&path, &read(&path)?)]);
        }
    }
    store(folder, files)
}

/// Compares those files of a folder that `wanted` names with its seal; the sealed bytes of the last one, if there is one.
pub fn verify(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Option<Vec<u8>>> {
    // Another process may be training here, and replace a file between the two readings.
    for attempt in 0.. {
        let seal = load(folder)?;
        let (mut contents, mut changed) = (None, None);
        for (name, allowed) in seal.files.iter().filter(|(name, _)| wanted(name)) {
            let path = folder.join(name);
            match sealed(&path, allowed)? {
                Some(bytes) => contents = Some(bytes),
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
    Ok(None)
}

/// Replaces files of a sealed folder, or of one that has no seal yet: each is a name and its new contents. The log is sealed as far as
/// it has come.
pub fn replace(folder: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    let sealed = folder.join(NAME).exists();
    let mut allowed = if sealed { load(folder)?.files } else { BTreeMap::new() };
    for (name, new) in files {
        allowed.entry((*name).into()).or_default().push(of_bytes(Path::new(name), new));
    }
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| folder.join(name)).collect();
    let written = paths.iter().zip(files).try_for_each(|(path, (_, new))| {
        let written = fs::File::create(draft_of(path)).and_then(|mut file| {
            file.write_all(new)?;
            file.sync_all()
        });
        written.map_err(|error| cannot_write(path, error))
    });
    if written.is_err() {
        // Best effort: the error that matters is the first.
        paths.iter().for_each(|path| drop(fs::remove_file(draft_of(path))));
        return written;
    }
    let log = folder.join(LOG);
    let grown = log.exists() && !files.iter().any(|(name, _)| *name == LOG);
    if grown {
        fs::File::open(&log).and_then(|file| file.sync_all()).map_err(|error| cannot_write(&log, error))?;
        allowed.insert(LOG.into(), vec![of_bytes(&log, &read(&log)?)]);
    }
    if sealed {
        store(folder, allowed.clone())?;
    }
    for (path, (name, _)) in paths.iter().zip(files) {
        fs::rename(draft_of(path), path).map_err(|error| cannot_write(path, error))?;
        let list = allowed.entry((*name).into()).or_default();
        list.drain(..list.len() - 1);
    }
    sync(folder).map_err(|error| cannot_write(folder, error))?;
    if sealed { store(folder, allowed) } else { Ok(()) }
}

/// Removes what a killed process left behind of a run's files, and nothing of anyone else's.
pub fn remove_drafts(folder: &Path) -> Result<()> {
    let failed = |error| cannot_write(folder, error);
    let sealed = load(folder)?.files;
    let is_picture = |name: &str| {
        let (stem, end) = name.split_once('.').unwrap_or_default();
        ["loss", "confusion", "forecast"].contains(&stem) && ["svg", "png"].contains(&end)
    };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let of = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")).unwrap_or_default();
        if path.is_file() && (of == NAME || sealed.contains_key(of) || is_picture(of)) {
            fs::remove_file(&path).map_err(failed)?;
        }
    }
    Ok(())
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
        assert_eq!(verify(folder, |name| name == LOG).unwrap().unwrap(), b"one\n");
        replace(folder, &[]).unwrap();
        assert_eq!(verify(folder, |name| name == LOG).unwrap().unwrap(), b"one\ntwo\nthr");
        for changed in ["one\ntwo\nthx", "one\n", ""] {
            fs::write(&log, changed).unwrap();
            assert!(verify(folder, |name| name == LOG).unwrap_err().to_string().contains("metrics.jsonl: damaged"));
        }
        replace(folder, &[(LOG, b"one\n")]).unwrap();
        assert_eq!(verify(folder, |name| name == LOG).unwrap().unwrap(), b"one\n");
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
        replace(folder, &[("a.json", b"newer")]).unwrap();
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
