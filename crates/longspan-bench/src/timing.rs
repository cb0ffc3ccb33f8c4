//! The clocks.

use std::time::Instant;

/// Seconds of one run.
pub fn seconds(body: impl FnOnce()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}

/// The same of a run that may fail.
pub fn try_seconds<E>(body: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
    let start = Instant::now();
    body()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds that this thread was at work during one run, whatever else the machine did meanwhile; where the system does
/// not say, the same as [`seconds`].
pub fn processor_seconds(body: impl FnOnce()) -> f64 {
    #[cfg(unix)]
    {
        let now = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
        };
        let start = now();
        body();
        now() - start
    }
    #[cfg(not(unix))]
    seconds(body)
}
