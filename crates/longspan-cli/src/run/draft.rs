//! A run folder that is being made.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};

use super::folder::{LOCK, Lock, RunFolder};
use super::seal::seal;
use super::write::{help, sync};
use crate::terminal::shell;

/// A hidden folder beside the one that is wanted. It takes its name when all of it is there, and is removed if that never
/// happens.
pub struct Draft {
    folder: RunFolder,
    path: PathBuf,
    /// `None` once the folder has its name.
    lock: Option<Lock>,
}

impl Draft {
    /// Claims the name of a folder that does not exist; `None` if another process is making it.
    pub fn claim(path: &Path) -> Result<Option<Self>> {
        let Some(last) = path.file_name() else {
            bail!("{} names no folder that could be made; give one such as --out runs/mine", path.display());
        };
        let folder = RunFolder::at(&parent_of(path).join(format!(".{}.draft", last.display())), false);
        loop {
            free(path)?;
            fs::create_dir_all(folder.path()).map_err(|error| failed(path, error))?;
            match folder.try_lock() {
                Ok(None) => return Ok(None),
                // The lock is on an open file inside the folder, so it outlasts the renaming. It counts only if the folder
                // is still there: another process may just have given it its name.
                Ok(Some(lock)) if folder.file(LOCK).exists() => {
                    return Ok(Some(Self { folder, path: path.to_path_buf(), lock: Some(lock) }));
                }
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(path, error)),
            }
        }
    }

    /// Writes the folder's files, seals them, and gives the folder its name.
    pub fn finish(mut self, fill: impl FnOnce(&RunFolder) -> Result<()>) -> Result<(RunFolder, Lock)> {
        let (draft, path) = (self.folder.path(), self.path.as_path());
        let failed = |error| failed(path, error);
        clear(draft)
            .map_err(failed)
            .and_then(|()| fill(&self.folder))
            .and_then(|()| seal(draft))
            .and_then(|()| sync(draft).map_err(failed))
            .and_then(|()| free(path))
            .and_then(|()| fs::rename(draft, path).map_err(failed))
            .and_then(|()| sync(parent_of(path)).map_err(failed))
            .map_err(|error| {
                let of_draft = draft.display().to_string();
                anyhow!("{}", format!("{error:#}").replace(&of_draft, &path.display().to_string()))
            })?;
        let lock = self.lock.take().ok_or_else(|| anyhow!("a draft without its lock; this is a bug: report it"))?;
        Ok((RunFolder::at(path, true), lock))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // Best effort: why the folder was not finished matters more.
            let _ = fs::remove_dir_all(self.folder.path());
        }
    }
}

fn free(path: &Path) -> Result<()> {
    let name = path.display();
    let empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    if path.join("config.json").exists() {
        bail!(
            "{name} holds a run already; resume it with --resume {}, or choose another folder with --out",
            shell::path(path)
        );
    }
    if path.symlink_metadata().is_ok() && !empty() {
        bail!("{name} exists already and is no run folder; choose another one with --out");
    }
    Ok(())
}

fn failed(path: &Path, error: io::Error) -> anyhow::Error {
    anyhow!("cannot make the run folder {}: {error}; {}", path.display(), help(&error))
}

fn clear(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name != LOCK) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
