//! Ctrl-C in a long call.
//!
//! Python runs signal handlers on its main thread, between two of its instructions, and a call of a kernel is one. So the main
//! thread looks after them itself while it computes, or while it waits for those that do. What a handler raises ends the call;
//! arrays that it would have returned are gone, and nothing that existed before has changed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

use longspan_kernels::threads::{Stop, until};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::threads::{self, LOOKING};

/// Seconds on one thread of calls that nobody waits for: no signal is looked for.
const SHORT: f64 = 0.05;

/// What the threads of a call know of signals.
struct Watch {
    main: ThreadId,
    start: Instant,
    /// Milliseconds since the start at which the main thread looks next.
    next: AtomicU64,
    raised: AtomicBool,
    error: Mutex<Option<PyErr>>,
}

impl Watch {
    /// Whether a handler has raised an error; the main thread lets those run that are due.
    fn look(&self) -> bool {
        if self.raised.load(Ordering::Relaxed) || thread::current().id() != self.main {
            return self.raised.load(Ordering::Relaxed);
        }
        let (now, pause) = (self.start.elapsed().as_millis() as u64, LOOKING.as_millis() as u64);
        if now < self.next.load(Ordering::Relaxed) {
            return false;
        }
        let handled = Python::attach(|py| py.check_signals());
        self.next.store(self.start.elapsed().as_millis() as u64 + pause, Ordering::Relaxed);
        if let Err(error) = handled {
            *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            self.raised.store(true, Ordering::Relaxed);
        }
        self.raised.load(Ordering::Relaxed)
    }
}

/// Runs `work`, which takes about `seconds` on one thread, by [`threads::run`]; without Python's lock.
pub fn run<R: Send>(seconds: f64, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    if seconds < SHORT || !Python::attach(is_main)? {
        return Ok(threads::run(seconds, work, None));
    }
    let watch = Arc::new(Watch {
        main: thread::current().id(),
        start: Instant::now(),
        next: AtomicU64::new(LOOKING.as_millis() as u64),
        raised: AtomicBool::new(false),
        error: Mutex::new(None),
    });
    let looks = Arc::clone(&watch);
    let stop: Stop = Arc::new(move || looks.look());
    let meanwhile = || {
        watch.look();
    };
    threads::run(seconds, || until(stop, work), Some(&meanwhile)).ok_or_else(|| {
        let error = watch.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.unwrap_or_else(|| PyKeyboardInterrupt::new_err(()))
    })
}

/// Whether Python runs signal handlers on this thread.
fn is_main(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    threading.call_method0("get_ident")?.eq(threading.call_method0("main_thread")?.getattr("ident")?)
}
