//! The clock.

use std::time::Instant;

/// Seconds of one run.
pub(crate) fn seconds(body: impl FnOnce()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}
