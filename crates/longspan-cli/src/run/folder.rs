//! The folder of a run: its files, how it appears, and the lock that keeps a second process out.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};

use super::config::RunConfig;
use super::seal;
use super::write::{mend, write_atomic};

/// A folder that holds a run, or is about to.
#[derive(Debug, Clone)]
pub struct RunFolder {
    path: PathBuf,
    /// Whether its files are compared with its seal.
    sealed: bool,
}

/// The weights, and weights with optimiser and progress.
pub const MODEL: &str = "model.safetensors";
pub const CHECKPOINT: &str = "checkpoint.safetensors";
const CONFIG: &str = "config.json";

/// The file that is locked, within a run folder.
const LOCK: &str = ".lock";

/// Keeps other processes from training in the same folder. The system releases it when the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Writes the contents of a file to a path.
pub type Write<'a> = &'a dyn Fn(&Path) -> Result<()>;

impl RunFolder {
    /// An existing run. Its files are compared with its seal as they are read.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { sealed: true, ..Self::open_changed(path)? })
    }

    /// An existing run, some files of which a person may have changed.
    pub fn open_changed(path: &Path) -> Result<Self> {
        let name = path.display();
        match fs::metadata(path) {
            Err(error) => bail!("cannot open the run folder {name}: {error}; check the name, or train one with --out"),
            Ok(data) if !data.is_dir() => bail!("{name} is not a folder; give the folder that `longspan train` made"),
            Ok(_) => {}
        }
        let folder = Self { path: path.to_path_buf(), sealed: false };
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
        let draft = Self { path: parent.join(format!(".{}.draft", last.display())), sealed: false };
        fs::create_dir_all(&draft.path).map_err(failed)?;
        // The lock is on an open file inside the folder, so it outlasts the renaming.
        let lock = draft.lock()?;
        let filled = draft
            .clear()
            .map_err(failed)
            .and_then(|()| fill(&draft))
            .and_then(|()| draft.seal())
            .and_then(|()| sync_folder(&draft.path).map_err(failed))
            .and_then(|()| fs::rename(&draft.path, path).map_err(failed))
            .and_then(|()| sync_folder(parent).map_err(failed));
        if let Err(error) = filled {
            // Best effort: the error that matters is the first.
            let _ = fs::remove_dir_all(&draft.path);
            let of_draft = draft.path.display().to_string();
            bail!("{}", format!("{error:#}").replace(&of_draft, &name.to_string()));
        }
        Ok((Self { path: path.to_path_buf(), sealed: true }, lock))
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
        self.path.join(CONFIG)
    }

    /// Reads all settings, once they and the tokenizers are what the seal says.
    pub fn load_config(&self) -> Result<RunConfig> {
        self.verify(|name| name != MODEL && name != CHECKPOINT)?;
        RunConfig::load(&self.config())
    }

    /// Writes all settings.
    pub fn save_config(&self, config: &RunConfig) -> Result<()> {
        let text = format!("{}\n", serde_json::to_string_pretty(config)?);
        self.replace(&[(CONFIG, &|path| write_atomic(path, text.as_bytes()))])
    }

    /// Compares files with the seal.
    pub fn verify(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        if self.sealed { seal::verify(&self.path, wanted) } else { Ok(()) }
    }

    /// Seals the files as they are.
    pub fn seal(&self) -> Result<()> {
        seal::seal(&self.path)
    }

    /// Replaces files: each is a name, and what writes its contents to a path.
    pub fn replace(&self, files: &[(&str, Write<'_>)]) -> Result<()> {
        let drafts: Vec<(&str, PathBuf)> =
            files.iter().map(|(name, _)| (*name, self.path.join(format!(".{name}.next.tmp")))).collect();
        let written = files.iter().zip(&drafts).try_for_each(|((name, write), (_, draft))| {
            // Errors name the file that was meant.
            let named = |error: anyhow::Error| {
                let text = format!("{error:#}")
                    .replace(&draft.display().to_string(), &self.path.join(name).display().to_string());
                anyhow!("{text}")
            };
            write(draft).map_err(named)
        });
        let drafted: Vec<(&str, &Path)> = drafts.iter().map(|(name, draft)| (*name, draft.as_path())).collect();
        written.and_then(|()| seal::replace(&self.path, &drafted)).inspect_err(|_| {
            for (_, draft) in &drafts {
                // Best effort: the error that matters is the first.
                let _ = fs::remove_file(draft);
            }
        })
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
        self.path.join(MODEL)
    }

    /// Weights, optimiser and progress.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join(CHECKPOINT)
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
        assert!(path.join("seal.json").exists());
        assert!(!path.join("half").exists());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
        assert!(RunFolder::create(&path, |_| Ok(())).unwrap_err().to_string().contains("--resume"));
        assert!(folder.lock().unwrap_err().to_string().contains("another process"));
        drop(lock);
        folder.lock().unwrap();
    }
}
