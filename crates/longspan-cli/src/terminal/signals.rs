//! Ctrl-C, SIGTERM and SIGHUP: the first asks the command to save and stop, the second ends it at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, anyhow};

/// Whether a signal asked to stop.
#[derive(Debug, Clone)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens for interrupt, termination and hang-up.
    pub fn listen() -> Result<Self> {
        let stop = Self(Arc::new(AtomicBool::new(false)));
        let asked = Arc::clone(&stop.0);
        ctrlc::set_handler(move || {
            if asked.swap(true, Ordering::SeqCst) {
                // Files are replaced in one piece, so nothing is left half-written.
                std::process::exit(130);
            }
        })
        .map_err(|error| anyhow!("cannot listen for Ctrl-C: {error}"))?;
        Ok(stop)
    }

    /// Never asked to stop.
    #[cfg(test)]
    pub fn never() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Everything is saved: the next signal ends the process at once.
    pub fn nothing_to_save(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether to save and stop.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Makes a write beyond the limit of file sizes (`ulimit -f`) an error that can be reported, instead of the end of the
/// process.
pub fn report_large_files() {
    // With any handler the write fails. Without one, where it cannot be set, the system ends the process as usual.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)));
}
