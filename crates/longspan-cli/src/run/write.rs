//! Writing files in one piece, and what to say when that fails.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use longspan::checkpoint;

use crate::terminal::plot::Picture;

/// Replaces a file in one piece: readers see the old contents or the new ones.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    checkpoint::write_atomically(path, bytes).map_err(write_error)
}

/// As [`write_atomic`], and nobody waits for the disk.
fn write_quickly(path: &Path, bytes: &[u8]) -> Result<()> {
    let draft = draft_of(path);
    let written = fs::write(&draft, bytes).and_then(|()| fs::rename(&draft, path));
    written.map_err(|error| {
        // Best effort: the error that matters is the first.
        let _ = fs::remove_file(&draft);
        cannot_write(path, error)
    })
}

/// A picture as `.svg` and `.png`, of what is drawn again if a power cut should spoil it.
pub fn write_pictures(path: &Path, picture: &impl Picture) -> Result<()> {
    write_quickly(&path.with_extension("svg"), picture.svg()?.as_bytes())?;
    write_quickly(&path.with_extension("png"), &picture.png()?)
}

/// The name under which a file is written, as the library has it too.
pub fn draft_of(path: &Path) -> PathBuf {
    path.with_file_name(format!(".{}.tmp", path.file_name().unwrap_or_default().display()))
}

/// Waits until the names in a folder are on the disk. Elsewhere than on Unix folders cannot be opened.
pub fn sync(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// A file that could not be written, and the help.
pub fn write_error(error: longspan::Error) -> anyhow::Error {
    match &error {
        longspan::Error::Io { source, .. } => anyhow!("{error}; {}", help(source)),
        _ => error.into(),
    }
}

/// As [`write_error`], of a file that is not written through the library.
pub fn cannot_write(path: &Path, source: io::Error) -> anyhow::Error {
    write_error(longspan::Error::Io { path: path.to_path_buf(), action: "write", source })
}

pub fn help(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free some space (a run that has begun is resumed with --resume), or choose another folder with --out or --picture"
        }
        _ => "choose another folder, that can be written, with --out or --picture",
    }
}
