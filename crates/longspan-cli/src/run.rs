//! A run as a folder.
//!
//! ```text
//! RUN/config.json              all settings, as resolved
//! RUN/source_tokenizer.json    and target_tokenizer.json
//! RUN/model.safetensors        the weights
//! RUN/checkpoint.safetensors   weights, optimiser and progress: what --resume goes on from
//! RUN/metrics.jsonl            one JSON object a line
//! RUN/loss.svg, loss.png       the loss curve
//! ```
//!
//! Nothing is ever visible half-written, so a process may be killed at any instant. The folder itself appears under its
//! name when all of it is there. A file gets its contents under a temporary name, is synced, and renamed. All that must
//! agree is in one file, `checkpoint.safetensors`; `model.safetensors` repeats its weights and is whole by itself.
//! `metrics.jsonl` only grows; what lies beyond the checkpoint is dropped when a run goes on.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use burn::optim::ModuleOptimizer;
use longspan::checkpoint;
use longspan::models::Seq2Seq;
use serde::{Deserialize, Serialize};

/// A folder that holds a run, or is about to.
#[derive(Debug, Clone)]
pub struct RunFolder {
    path: PathBuf,
}

/// How far a run has come: stored with its weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Steps that have been taken.
    pub step: usize,
    /// Seconds spent on them.
    pub seconds: f64,
    /// Of the training pairs, so that a run goes on only with the pairs it began with.
    pub data_sha256: String,
}

/// The file that is locked, within a run folder.
const LOCK: &str = ".lock";

/// Keeps other processes from training in the same folder; ends with the process, however it ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl RunFolder {
    /// An existing run.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        match fs::metadata(path) {
            Err(error) => bail!("cannot open the run folder {name}: {error}; check the name, or train one with --out"),
            Ok(data) if !data.is_dir() => bail!("{name} is not a folder; give the folder that `longspan train` made"),
            Ok(_) => {}
        }
        let folder = Self { path: path.to_path_buf() };
        if !folder.config().exists() {
            bail!("{name} is not a run folder: it has no config.json; give the folder that `longspan train` made");
        }
        Ok(folder)
    }

    /// Makes a run folder: `fill` writes into a hidden one beside it, which takes its name when all is there.
    pub fn create(path: &Path, fill: impl FnOnce(&Self) -> Result<()>) -> Result<(Self, Lock)> {
        let name = path.display();
        if path.symlink_metadata().is_ok() && !is_empty_folder(path) {
            bail!("{name} exists already; go on with --resume {name}, or choose another folder with --out");
        }
        let Some(last) = path.file_name() else {
            bail!("{name} names no folder that could be made; give one such as --out runs/mine");
        };
        let parent = parent_of(path);
        let failed = |error: io::Error| anyhow!("cannot make the run folder {name}: {error}; {}", mend(&error));
        let draft = Self { path: parent.join(format!(".{}.draft", last.display())) };
        fs::create_dir_all(&draft.path).map_err(failed)?;
        // The lock is in the folder and keeps its hold when that is renamed.
        let lock = draft.lock()?;
        let filled = draft
            .clear()
            .map_err(failed)
            .and_then(|()| fill(&draft))
            .and_then(|()| sync_folder(&draft.path).map_err(failed))
            .and_then(|()| fs::rename(&draft.path, path).map_err(failed))
            .and_then(|()| sync_folder(parent).map_err(failed));
        if let Err(error) = filled {
            // The draft is of no use to anyone; that it could not be removed matters less than why it failed.
            let _ = fs::remove_dir_all(&draft.path);
            let of_draft = draft.path.display().to_string();
            bail!("{}", format!("{error:#}").replace(&of_draft, &name.to_string()));
        }
        Ok((Self { path: path.to_path_buf() }, lock))
    }

    /// Removes what a killed process left in a draft.
    fn clear(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name != LOCK) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All settings.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.json")
    }

    /// The tokenizer of sources.
    pub fn source_tokenizer(&self) -> PathBuf {
        self.path.join("source_tokenizer.json")
    }

    /// The tokenizer of targets.
    pub fn target_tokenizer(&self) -> PathBuf {
        self.path.join("target_tokenizer.json")
    }

    /// What was measured, one JSON object a line.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// The loss curve; `extension` is `svg` or `png`.
    pub fn loss_curve(&self, extension: &str) -> PathBuf {
        self.path.join("loss").with_extension(extension)
    }

    fn model(&self) -> PathBuf {
        self.path.join("model.safetensors")
    }

    fn checkpoint(&self) -> PathBuf {
        self.path.join("checkpoint.safetensors")
    }

    /// Writes a checkpoint, then the weights alone. Each is replaced in one piece; a process that is killed between the two
    /// leaves weights that are one checkpoint older.
    pub fn save(&self, model: &Seq2Seq, optimizer: &ModuleOptimizer, saved: &Saved) -> Result<()> {
        let training = checkpoint::save_training(self.checkpoint(), model, optimizer, saved);
        training.and_then(|()| checkpoint::save_weights(self.model(), model)).map_err(write_error)
    }

    /// Reads the weights into a model made from the same settings.
    pub fn load_weights(&self, model: Seq2Seq) -> Result<Seq2Seq> {
        checkpoint::load_weights(self.model(), model).map_err(|error| {
            let name = self.path.display();
            anyhow!("{error}; `longspan train --resume {name}` writes it anew from the checkpoint")
        })
    }

    /// Reads weights, optimiser and progress into ones made from the same settings.
    pub fn load_checkpoint(
        &self,
        model: Seq2Seq,
        optimizer: ModuleOptimizer,
    ) -> Result<(Seq2Seq, ModuleOptimizer, Saved)> {
        Ok(checkpoint::load_training(self.checkpoint(), model, optimizer)?)
    }

    /// Brings the weights in line with the checkpoint that was just read, and removes what a killed process left.
    pub fn repair(&self, model: &Seq2Seq) -> Result<()> {
        checkpoint::save_weights(self.model(), model).map_err(write_error)?;
        let failed =
            |error| write_error(longspan::Error::Io { path: self.path.clone(), action: "write", source: error });
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".tmp")) {
                fs::remove_file(&path).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Takes the folder for this process.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.path.join(LOCK);
        let name = self.path.display();
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|error| anyhow!("cannot write to the run folder {name}: {error}; {}", mend(&error)))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => {
                bail!("another process is training in {name}; wait for it, or choose another folder with --out")
            }
            // Some network file systems have no locks; training alone there is safe.
            Err(TryLockError::Error(_)) => Ok(Lock { _file: file }),
        }
    }
}

/// Writes a file in one piece. Readers see the old contents or the new ones.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    checkpoint::write_atomically(path, bytes).map_err(write_error)
}

/// Waits until the names in a folder are on the disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { fs::File::open(path)?.sync_all() } else { Ok(()) }
}

/// The one line for a file that could not be written: the library's, and the mend.
pub fn write_error(error: longspan::Error) -> anyhow::Error {
    match &error {
        longspan::Error::Io { source, .. } => anyhow!("{error}; {}", mend(source)),
        _ => error.into(),
    }
}

/// What to do about a failed write.
fn mend(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "make room (a run that has begun goes on with --resume), or choose another folder with --out"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "choose a folder that can be written with --out"
        }
        _ => "choose another folder with --out",
    }
}

/// The folder a path lies in.
fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_fill_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run");
        let result = RunFolder::create(&path, |folder| {
            write_atomic(&folder.config(), b"{}")?;
            bail!("cannot write {}", folder.config().display())
        });
        assert_eq!(result.unwrap_err().to_string(), format!("cannot write {}", path.join("config.json").display()));
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_in_use_is_refused_and_an_empty_one_taken() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run");
        fs::create_dir(&path).unwrap();
        // As a process that was killed leaves it.
        fs::create_dir(place.path().join(".run.draft")).unwrap();
        fs::write(place.path().join(".run.draft/half"), b"").unwrap();
        let (folder, lock) = RunFolder::create(&path, |folder| write_atomic(&folder.config(), b"{}")).unwrap();
        assert!(!path.join("half").exists());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
        assert!(RunFolder::create(&path, |_| Ok(())).unwrap_err().to_string().contains("--resume"));
        assert!(folder.lock().unwrap_err().to_string().contains("another process"));
        drop(lock);
        folder.lock().unwrap();
    }

    #[test]
    fn writing_replaces_in_one_piece_and_leaves_no_draft() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
        let below_a_file = path.join("x");
        assert!(write_atomic(&below_a_file, b"").unwrap_err().to_string().starts_with("cannot write"));
    }
}
