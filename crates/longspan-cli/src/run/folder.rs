//! The folder of a run: its files, how it appears, and the lock that keeps a second process out.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};

use super::config::RunConfig;
use super::write::{mend, write_atomic};

/// A folder that holds a run, or is about to.
#[derive(Debug, Clone)]
pub struct RunFolder {
    path: PathBuf,
}

/// The file that is locked, within a run folder.
const LOCK: &str = ".lock";

/// Keeps other processes from training in the same folder. The system releases it when the process ends.
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

    /// Makes a run folder: `fill` writes into a hidden folder beside it, which is renamed when all of it is there.
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
        // The lock is on an open file inside the folder, so it outlasts the renaming.
        let lock = draft.lock()?;
        let filled = draft
            .clear()
            .map_err(failed)
            .and_then(|()| fill(&draft))
            .and_then(|()| sync_folder(&draft.path).map_err(failed))
            .and_then(|()| fs::rename(&draft.path, path).map_err(failed))
            .and_then(|()| sync_folder(parent).map_err(failed));
        if let Err(error) = filled {
            // Best effort: the error that matters is the first.
            let _ = fs::remove_dir_all(&draft.path);
            let of_draft = draft.path.display().to_string();
            bail!("{}", format!("{error:#}").replace(&of_draft, &name.to_string()));
        }
        Ok((Self { path: path.to_path_buf() }, lock))
    }

    /// Removes what a killed process left behind.
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

    /// The file of all settings.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.json")
    }

    /// Reads all settings.
    pub fn load_config(&self) -> Result<RunConfig> {
        RunConfig::load(&self.config())
    }

    /// Writes all settings.
    pub fn save_config(&self, config: &RunConfig) -> Result<()> {
        write_atomic(&self.config(), format!("{}\n", serde_json::to_string_pretty(config)?).as_bytes())
    }

    /// A tokenizer; `side` is what it reads, such as `source`.
    pub fn tokenizer(&self, side: &str) -> PathBuf {
        self.path.join(format!("{side}_tokenizer.json"))
    }

    /// What was measured, one JSON object a line.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// The loss curve; `extension` is `svg` or `png`.
    pub fn loss_curve(&self, extension: &str) -> PathBuf {
        self.path.join("loss").with_extension(extension)
    }

    /// The weights.
    pub fn model(&self) -> PathBuf {
        self.path.join("model.safetensors")
    }

    /// Weights, optimiser and progress.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join("checkpoint.safetensors")
    }

    /// Locks the folder for this process.
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

/// Waits until the names in a folder are on the disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { fs::File::open(path)?.sync_all() } else { Ok(()) }
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
}
