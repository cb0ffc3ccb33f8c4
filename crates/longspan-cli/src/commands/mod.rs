//! One file a verb. A command reads its arguments, asks the task of its run, and prints.

pub mod completions;
pub mod eval;
pub mod generate;
pub mod info;
pub mod predict;
mod search;
pub mod train;

use std::path::Path;

use anyhow::{Result, bail};

use crate::run::draft::parent_of;
use crate::run::write::write_atomic;
use crate::terminal::plot::Picture;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// A signal asked to stop; the work until then is saved.
    Interrupted,
}

/// Refuses a picture before any work is done, where the run has none, as `what` says, or its file cannot be written.
fn check_picture(picture: Option<&Path>, has_one: bool, what: &str) -> Result<()> {
    let Some(path) = picture else { return Ok(()) };
    if !has_one {
        bail!("--picture: {what}; leave it out");
    }
    if !["svg", "png"].into_iter().any(|end| ends_in(path, end)) {
        bail!("--picture {}: expected a name that ends in .svg or .png", path.display());
    }
    let folder = parent_of(path);
    if !folder.is_dir() {
        bail!("--picture {}: {} is no folder; make it first", path.display(), folder.display());
    }
    Ok(())
}

fn ends_in(path: &Path, end: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(end))
}

fn draw(picture: &impl Picture, path: &Path) -> Result<()> {
    let bytes = if ends_in(path, "svg") { picture.svg()?.into_bytes() } else { picture.png()? };
    write_atomic(path, &bytes)
}
