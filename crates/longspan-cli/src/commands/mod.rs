//! One file a verb. A command reads its arguments, asks the task of its run, and prints.

pub mod completions;
pub mod eval;
pub mod generate;
pub mod info;
pub mod man;
pub mod predict;
mod search;
pub mod train;

use std::path::Path;

use anyhow::{Result, bail};

use crate::run::write::write_atomic;
use crate::terminal::plot::Picture;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// A signal asked to stop; the work until then is saved.
    Interrupted,
}

/// Draws a picture into the file of `--picture`, whose name says how.
fn draw(picture: &impl Picture, path: &Path) -> Result<()> {
    match path.extension().map(|end| end.to_string_lossy().to_lowercase()).as_deref() {
        Some("svg") => write_atomic(path, picture.svg()?.as_bytes()),
        Some("png") => write_atomic(path, &picture.png()?),
        _ => bail!("--picture {}: expected a name that ends in .svg or .png", path.display()),
    }
}
