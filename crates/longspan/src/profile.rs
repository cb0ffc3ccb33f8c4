//! Where the time of a model goes: seconds by operation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static LISTENERS: AtomicUsize = AtomicUsize::new(0);
static SECONDS: Mutex<BTreeMap<&'static str, f64>> = Mutex::new(BTreeMap::new());

/// Runs `work` and gives the seconds that it spent in each of this crate's operations on the CPU backend, forward and backward, by
/// their names. What remains of the whole is Burn's own. Calls at the same time are counted together.
pub fn profile<R>(work: impl FnOnce() -> R) -> (R, BTreeMap<&'static str, f64>) {
    // Sums of the whole process, so that one may listen within another.
    let so_far = || SECONDS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    LISTENERS.fetch_add(1, Ordering::Relaxed);
    let before = so_far();
    let result = work();
    LISTENERS.fetch_sub(1, Ordering::Relaxed);
    let mut spent = so_far();
    before.iter().for_each(|(name, seconds)| *spent.entry(name).or_default() -= seconds);
    spent.retain(|_, seconds| *seconds > 0.0);
    (result, spent)
}

/// Runs `work`, and counts its time while [`profile`] listens.
pub(crate) fn timed<R>(name: &'static str, work: impl FnOnce() -> R) -> R {
    if LISTENERS.load(Ordering::Relaxed) == 0 {
        return work();
    }
    let start = Instant::now();
    let result = work();
    let seconds = start.elapsed().as_secs_f64();
    *SECONDS.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += seconds;
    result
}
