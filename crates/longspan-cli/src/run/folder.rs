//! The folder of a run: names, making, locking, and writing a file in one piece.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};

/// A folder that holds a run, or is about to.
#[derive(Debug, Clone)]
pub struct RunFolder {
    path: PathBuf,
}

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
    pub fn create(path: &Path, fill: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        let name = path.display();
        if path.symlink_metadata().is_ok() && !is_empty_folder(path) {
            bail!("{name} exists already; go on with --resume {name}, or choose another folder with --out");
        }
        let Some(last) = path.file_name() else {
            bail!("{name} names no folder that could be made; give one such as --out runs/mine");
        };
        let parent = parent_of(path);
        let failed = |error: io::Error| anyhow!("cannot make the run folder {name}: {error}; {}", mend(&error));
        fs::create_dir_all(parent).map_err(failed)?;
        let draft = parent.join(format!(".{}.draft-{}", last.display(), std::process::id()));
        if draft.exists() {
            fs::remove_dir_all(&draft).map_err(failed)?;
        }
        fs::create_dir(&draft).map_err(failed)?;
        let filled = fill(&Self { path: draft.clone() })
            .and_then(|()| sync_folder(&draft).map_err(failed))
            .and_then(|()| fs::rename(&draft, path).map_err(failed))
            .and_then(|()| sync_folder(parent).map_err(failed));
        if let Err(error) = filled {
            // The draft is of no use to anyone; that it could not be removed matters less than why it failed.
            let _ = fs::remove_dir_all(&draft);
            return Err(error);
        }
        Ok(Self { path: path.to_path_buf() })
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

    /// The loss curve.
    pub fn loss_curve(&self) -> PathBuf {
        self.path.join("loss.svg")
    }

    /// The weights of the last checkpoint.
    pub fn model(&self) -> PathBuf {
        self.path.join("model.safetensors")
    }

    /// Takes the folder for this process.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.path.join(".lock");
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

/// Writes a file in one piece: under a temporary name beside it, synced, then renamed. Readers see the old contents or the
/// new ones.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let draft = match path.file_name() {
        Some(name) => path.with_file_name(format!(".{}.draft-{}", name.display(), std::process::id())),
        None => bail!("{} names no file", path.display()),
    };
    let written = write_synced(&draft, bytes).and_then(|()| fs::rename(&draft, path));
    let written = written.and_then(|()| sync_folder(parent_of(path)));
    written.map_err(|error| {
        // Gone already if the rename came through.
        let _ = fs::remove_file(&draft);
        write_error(path, &error)
    })
}

/// Writes a file and waits until it is on the disk.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Waits until the names in a folder are on the disk.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// The one line for a file that could not be written.
pub fn write_error(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("cannot write {}: {error}; {}", path.display(), mend(error))
}

/// What to do about a failed write.
fn mend(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "make room, then go on with --resume, or choose another folder with --out"
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
            bail!("no")
        });
        assert_eq!(result.unwrap_err().to_string(), "no");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_in_use_is_refused_and_an_empty_one_taken() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run");
        fs::create_dir(&path).unwrap();
        let folder = RunFolder::create(&path, |folder| write_atomic(&folder.config(), b"{}")).unwrap();
        assert!(RunFolder::create(&path, |_| Ok(())).unwrap_err().to_string().contains("--resume"));
        let lock = folder.lock().unwrap();
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
