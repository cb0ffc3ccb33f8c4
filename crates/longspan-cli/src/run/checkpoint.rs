//! Checkpoints: folders that appear whole or not at all, with sums that find what was damaged since.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::folder::{RunFolder, sync_folder, write_atomic, write_error, write_synced};

/// The weights, in a checkpoint and beside it.
const MODEL: &str = "model.safetensors";
/// The optimiser's moments.
const OPTIMIZER: &str = "optimizer.bpk";
const MANIFEST: &str = "manifest.json";
const PREFIX: &str = "checkpoint-";

/// Size and SHA-256 of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSum {
    pub bytes: u64,
    pub sha256: String,
}

impl FileSum {
    fn of(contents: &[u8]) -> Self {
        let digest = Sha256::digest(contents);
        let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Self { bytes: contents.len() as u64, sha256 }
    }
}

/// What a checkpoint says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Steps that have been taken.
    pub step: usize,
    /// Seconds spent training so far.
    pub seconds: f64,
    /// Of the training pairs, so that a run goes on only with the pairs it began with.
    pub data_sha256: String,
    /// The files of the checkpoint.
    pub files: BTreeMap<String, FileSum>,
    /// The weights of the checkpoint before. A process that is killed just after a checkpoint has appeared leaves these at
    /// the top of the run folder; that is no damage.
    pub previous_model: Option<FileSum>,
}

/// The last checkpoint of a run.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub manifest: Manifest,
}

impl Checkpoint {
    /// Writes weights and optimiser as the run's last checkpoint, and the weights to the top of the run folder.
    pub fn save(
        folder: &RunFolder,
        step: usize,
        seconds: f64,
        data_sha256: &str,
        model: &[u8],
        optimizer: &[u8],
        previous: Option<&Self>,
    ) -> Result<Self> {
        let path = folder.path().join(format!("{PREFIX}{step:06}"));
        let files = BTreeMap::from([(MODEL.to_string(), FileSum::of(model)), (OPTIMIZER.into(), FileSum::of(optimizer))]);
        let previous_model = previous.and_then(|checkpoint| checkpoint.manifest.files.get(MODEL).cloned());
        let data_sha256 = data_sha256.to_string();
        let manifest = Manifest { step, seconds, data_sha256, files, previous_model };
        let draft = folder.path().join(format!(".{PREFIX}{step:06}.draft-{}", std::process::id()));
        let text = serde_json::to_string_pretty(&manifest)?;
        let failed = |error| write_error(&path, &error);
        let written = fs::create_dir(&draft)
            .and_then(|()| write_synced(&draft.join(MODEL), model))
            .and_then(|()| write_synced(&draft.join(OPTIMIZER), optimizer))
            .and_then(|()| write_synced(&draft.join(MANIFEST), text.as_bytes()))
            .and_then(|()| sync_folder(&draft))
            .and_then(|()| fs::rename(&draft, &path))
            .and_then(|()| sync_folder(folder.path()));
        if let Err(error) = written {
            let _ = fs::remove_dir_all(&draft);
            return Err(failed(error));
        }
        write_atomic(&folder.model(), model)?;
        Self::remove_older(folder, step).map_err(failed)?;
        Ok(Self { path, manifest })
    }

    /// The checkpoint with the highest number.
    pub fn last(folder: &RunFolder) -> Result<Self> {
        let name = folder.path().display();
        let entries = numbered(folder).map_err(|error| anyhow!("cannot read {name}: {error}; check its permissions"))?;
        let Some((_, path)) = entries.into_iter().max_by_key(|(step, _)| *step) else {
            bail!("{name} has no checkpoint: the run folder was cut short; remove it and train again");
        };
        let file = path.join(MANIFEST);
        let damaged = |problem: String| anyhow!("{}: {problem}; restore the file or train again", file.display());
        let text = fs::read_to_string(&file).map_err(|error| damaged(error.to_string()))?;
        let manifest = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        Ok(Self { path, manifest })
    }

    /// The weights, verified: those at the top of the run folder must be this checkpoint's.
    pub fn model(&self, folder: &RunFolder) -> Result<Vec<u8>> {
        let own = self.path.join(MODEL);
        let restore = format!("restore it with `cp {} {}`", own.display(), folder.model().display());
        let expected = self.sum(MODEL)?;
        let contents = read(&folder.model(), &restore)?;
        let found = FileSum::of(&contents);
        if found == *expected {
            return Ok(contents);
        }
        if self.manifest.previous_model.as_ref() == Some(&found) {
            return self.read(MODEL);
        }
        Err(mismatch(&folder.model(), expected, &found, &restore))
    }

    /// The optimiser's state, verified.
    pub fn optimizer(&self) -> Result<Vec<u8>> {
        self.read(OPTIMIZER)
    }

    /// Brings the top of the run folder in line with this checkpoint and removes what an interrupted process left.
    pub fn repair(&self, folder: &RunFolder) -> Result<()> {
        let model = self.model(folder)?;
        let at_top = read(&folder.model(), "")?;
        if FileSum::of(&at_top) != *self.sum(MODEL)? {
            write_atomic(&folder.model(), &model)?;
        }
        let failed = |error| write_error(folder.path(), &error);
        Self::remove_older(folder, self.manifest.step).map_err(failed)?;
        for entry in fs::read_dir(folder.path()).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let draft = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".draft-"));
            if draft && path.is_dir() {
                fs::remove_dir_all(&path).map_err(failed)?;
            } else if draft {
                fs::remove_file(&path).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn sum(&self, file: &str) -> Result<&FileSum> {
        self.manifest.files.get(file).ok_or_else(|| {
            anyhow!("{}: does not list {file}; restore the file or train again", self.path.join(MANIFEST).display())
        })
    }

    fn read(&self, file: &str) -> Result<Vec<u8>> {
        let path = self.path.join(file);
        let expected = self.sum(file)?;
        let mend = "restore it from a copy or train again";
        let contents = read(&path, mend)?;
        let found = FileSum::of(&contents);
        if found == *expected { Ok(contents) } else { Err(mismatch(&path, expected, &found, mend)) }
    }

    fn remove_older(folder: &RunFolder, step: usize) -> std::io::Result<()> {
        for (_, path) in numbered(folder)?.into_iter().filter(|(other, _)| *other < step) {
            fs::remove_dir_all(path)?;
        }
        Ok(())
    }
}

/// All checkpoints with their steps.
fn numbered(folder: &RunFolder) -> std::io::Result<Vec<(usize, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder.path())? {
        let path = entry?.path();
        let step = path.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.parse().ok());
        if let Some(step) = step {
            found.push((step, path));
        }
    }
    Ok(found)
}

fn read(path: &Path, mend: &str) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| anyhow!("cannot read {}: {error}; {mend}", path.display()))
}

fn mismatch(path: &Path, expected: &FileSum, found: &FileSum, mend: &str) -> anyhow::Error {
    let name = path.display();
    if found.bytes < expected.bytes {
        anyhow!("{name} is cut short: {} of {} bytes; {mend}", found.bytes, expected.bytes)
    } else {
        let [found, expected] = [found, expected].map(|sum| sum.sha256.get(..12).unwrap_or(&sum.sha256));
        anyhow!("{name} was changed after it was saved: its SHA-256 is {found}…, expected {expected}…; {mend}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> (tempfile::TempDir, RunFolder) {
        let place = tempfile::tempdir().unwrap();
        let folder =
            RunFolder::create(&place.path().join("run"), |folder| write_atomic(&folder.config(), b"{}")).unwrap();
        (place, folder)
    }

    #[test]
    fn the_last_checkpoint_counts_and_older_ones_go() {
        let (_place, folder) = run();
        let first = Checkpoint::save(&folder, 5, 1.0, "data", b"five", b"o5", None).unwrap();
        Checkpoint::save(&folder, 10, 2.0, "data", b"ten", b"o10", Some(&first)).unwrap();
        let last = Checkpoint::last(&folder).unwrap();
        assert_eq!((last.manifest.step, last.model(&folder).unwrap()), (10, b"ten".to_vec()));
        assert_eq!(last.optimizer().unwrap(), b"o10");
        assert!(!first.path.exists());
    }

    #[test]
    fn a_kill_between_checkpoint_and_model_is_no_damage() {
        let (_place, folder) = run();
        let first = Checkpoint::save(&folder, 5, 1.0, "data", b"five", b"o5", None).unwrap();
        Checkpoint::save(&folder, 10, 2.0, "data", b"ten", b"o10", Some(&first)).unwrap();
        fs::write(folder.model(), b"five").unwrap();
        fs::create_dir(folder.path().join(".checkpoint-000015.draft-1")).unwrap();
        let last = Checkpoint::last(&folder).unwrap();
        assert_eq!(last.model(&folder).unwrap(), b"ten");
        last.repair(&folder).unwrap();
        assert_eq!(fs::read(folder.model()).unwrap(), b"ten");
        assert!(!folder.path().join(".checkpoint-000015.draft-1").exists());
    }

    #[test]
    fn damage_is_named() {
        let (_place, folder) = run();
        assert!(Checkpoint::last(&folder).unwrap_err().to_string().contains("no checkpoint"));
        let checkpoint = Checkpoint::save(&folder, 5, 1.0, "data", b"weights", b"moments", None).unwrap();
        fs::write(folder.model(), b"weig").unwrap();
        let error = checkpoint.model(&folder).unwrap_err().to_string();
        assert!(error.contains("cut short: 4 of 7 bytes") && error.contains("cp "), "{error}");
        fs::write(folder.model(), b"weightz").unwrap();
        assert!(checkpoint.model(&folder).unwrap_err().to_string().contains("was changed"));
        fs::write(checkpoint.path.join(OPTIMIZER), b"").unwrap();
        assert!(checkpoint.optimizer().unwrap_err().to_string().contains("cut short"));
        fs::remove_file(checkpoint.path.join(MANIFEST)).unwrap();
        assert!(Checkpoint::last(&folder).unwrap_err().to_string().contains("manifest.json"));
    }
}
