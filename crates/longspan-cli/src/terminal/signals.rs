//! Ctrl-C, SIGTERM and SIGHUP: the first asks the command to save and stop, the second ends it at once. Those that are ignored stay so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, anyhow};
#[cfg(unix)]
use signal_hook::consts::SIGHUP;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

#[cfg(unix)]
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Whether whoever started the command has it ignore a signal, as `nohup` and scripts with background jobs do.
fn is_ignored(signal: i32) -> bool {
    #[cfg(unix)]
    {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: with no new action `sigaction` only writes the present one into `action`, which has room for it; zeros are a valid
        // `sigaction` where it fails.
        let action = unsafe {
            libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        action.sa_sigaction == libc::SIG_IGN
    }
    #[cfg(not(unix))]
    {
        let _ = signal;
        false
    }
}

#[derive(Debug, Default)]
pub struct Stop {
    signalled: Arc<AtomicBool>,
    /// By another process, whose signal is not the first one of this one.
    asked: AtomicBool,
}

impl Stop {
    /// Listens for interrupt, termination and hang-up.
    pub fn listen() -> Result<Self> {
        let stop = Self::default();
        for signal in SIGNALS.into_iter().filter(|&signal| !is_ignored(signal)) {
            // The first sets the flag; one that finds it set exits. Files are replaced in one piece, so nothing is left half-written.
            register_conditional_shutdown(signal, 130, Arc::clone(&stop.signalled))
                .and_then(|_| register(signal, Arc::clone(&stop.signalled)))
                .map_err(|error| anyhow!("cannot listen for Ctrl-C: {error}"))?;
        }
        Ok(stop)
    }

    #[cfg(feature = "mpi")]
    pub fn ask(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }

    /// Everything is saved: the next signal ends the process at once.
    pub fn nothing_to_save(&self) {
        self.signalled.store(true, Ordering::SeqCst);
    }

    pub fn asked(&self) -> bool {
        self.signalled.load(Ordering::SeqCst) || self.asked.load(Ordering::SeqCst)
    }
}

/// Makes a write beyond the limit of file sizes (`ulimit -f`) an error that can be reported, instead of the end of the
/// process.
pub fn report_large_files() {
    // With any handler the write fails. Without one, where it cannot be set, the system ends the process as usual.
    #[cfg(unix)]
    let _ = register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)));
}
