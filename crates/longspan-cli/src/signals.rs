//! Ctrl-C and its relatives: the first asks to stop, the second stops.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, anyhow};

/// Whether someone asked to stop.
#[derive(Debug, Clone)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens for interrupt, termination and hang-up.
    pub fn listen() -> Result<Self> {
        let stop = Self(Arc::new(AtomicBool::new(false)));
        let asked = Arc::clone(&stop.0);
        ctrlc::set_handler(move || {
            if asked.swap(true, Ordering::SeqCst) {
                // Checkpoints appear whole or not at all, so there is nothing to tidy.
                std::process::exit(130);
            }
        })
        .map_err(|error| anyhow!("cannot listen for Ctrl-C: {error}"))?;
        Ok(stop)
    }

    /// From now on there is nothing left to save: the next signal stops at once.
    pub fn nothing_to_save(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether to stop at the next good moment.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
