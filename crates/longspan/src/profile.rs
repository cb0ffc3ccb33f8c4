//! Where the time of a model goes: seconds by operation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static ON: AtomicBool = AtomicBool::new(false);
static SECONDS: Mutex<BTreeMap<&'static str, f64>> = Mutex::new(BTreeMap::new());

/// Runs `work` and gives the seconds that it spent in each of this crate's operations on the CPU backend, forward and backward, by
/// their names. What remains of the whole is Burn's own. Calls at the same time are counted together.
pub fn profile<R>(work: impl FnOnce() -> R) -> (R, BTreeMap<&'static str, f64>) {
    let taken = || std::mem::take(&mut *SECONDS.lock().unwrap_or_else(PoisonError::into_inner));
    taken();
    ON.store(true, Ordering::Relaxed);
    let result = work();
    ON.store(false, Ordering::Relaxed);
    (result, taken())
}

/// Runs `work`, and counts its time while [`profile`] listens.
pub(crate) fn timed<R>(name: &'static str, work: impl FnOnce() -> R) -> R {
    if !ON.load(Ordering::Relaxed) {
        return work();
    }
    let start = Instant::now();
    let result = work();
    let seconds = start.elapsed().as_secs_f64();
    *SECONDS.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += seconds;
    result
}
