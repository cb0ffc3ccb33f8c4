//! On which threads a kernel runs.
//!
//! A call that is over before another thread would be awake runs on the caller's thread alone; a longer one on a pool.
//! Results do not depend on it. Threads do not survive a fork: a child process finds out by its process id and starts
//! pools of its own, without ever touching what its parent's threads may have held.

use std::cell::OnceCell;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pyo3::PyResult;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error;

/// Seconds that it takes to hand a call to a sleeping pool and to wait for its answer; measured on two cores.
const HANDING_OVER: f64 = 13e-6;

/// More threads than any machine has; a mistake rather than a wish.
const MOST: usize = 4096;

/// Threads that may have a pool of their own: rayon never gives such a pool's memory (some kilobytes) back, so a program
/// that starts threads without end must not get one for each.
const MOST_LOCAL: usize = 256;

/// Pools that were started, newest first. They are kept for good: another thread may still be running on one.
static POOLS: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// What [`set`] was told; 0 stands for as many threads as the machine has.
static WANTED: AtomicUsize = AtomicUsize::new(0);

static LOCAL: AtomicUsize = AtomicUsize::new(0);

struct Pool {
    process: u32,
    threads: usize,
    pool: ThreadPool,
    next: *const Pool,
}

thread_local! {
    /// A pool whose only thread is this one: inside it a kernel sees one thread, and nothing is handed over.
    static ALONE: OnceCell<Option<ThreadPool>> = const { OnceCell::new() };
}

/// Threads that [`run`] may use.
pub fn count() -> usize {
    match WANTED.load(Ordering::Relaxed) {
        0 => std::env::var("RAYON_NUM_THREADS")
            .ok()
            .and_then(|n| n.parse().ok())
            .filter(|n| (1..=MOST).contains(n))
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        n => n,
    }
}

/// See the Python function of this name.
pub fn set(threads: i64) -> PyResult<()> {
    let Some(threads) = usize::try_from(threads).ok().filter(|&n| n <= MOST) else {
        return Err(error::value("set_num_threads", "threads", format_args!("0 to {MOST}"), threads));
    };
    // Once, because asking the system costs more than a small call.
    WANTED.store(threads, Ordering::Relaxed);
    WANTED.store(count(), Ordering::Relaxed);
    Ok(())
}

/// Runs `work`, of which one thread would have about `seconds` to do.
pub fn run<R: Send>(seconds: f64, work: impl FnOnce() -> R + Send) -> R {
    if WANTED.load(Ordering::Relaxed) == 0 {
        WANTED.store(count(), Ordering::Relaxed);
    }
    let threads = WANTED.load(Ordering::Relaxed);
    // A pool wins where `seconds · (1 − 1/threads)` is more than handing over takes; twice that, because on a machine with
    // other work the others wake late.
    let saved = seconds * (1.0 - 1.0 / threads.max(1) as f64);
    if saved < 2.0 * HANDING_OVER && alone() {
        return work();
    }
    match pool(threads) {
        Some(pool) => pool.install(work),
        // The system has no thread to give.
        None => work(),
    }
}

/// Whether this thread is now a pool of one.
fn alone() -> bool {
    ALONE.with(|pool| {
        pool.get_or_init(|| {
            if LOCAL.fetch_add(1, Ordering::Relaxed) >= MOST_LOCAL {
                return None;
            }
            ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().ok()
        })
        .is_some()
    })
}

/// The pool of so many threads of this process.
fn pool(threads: usize) -> Option<&'static ThreadPool> {
    let process = process::id();
    let newest = POOLS.load(Ordering::Acquire);
    let mut next = newest.cast_const();
    // SAFETY: what `POOLS` and `next` point to was leaked by `Box::into_raw` below and is never freed or written to.
    while let Some(known) = unsafe { next.as_ref() } {
        if known.process == process && known.threads == threads {
            return Some(&known.pool);
        }
        next = known.next;
    }
    let name = |index| format!("longspan-{index}");
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build().ok()?;
    let mut started = Box::new(Pool { process, threads, pool, next: newest });
    loop {
        let before = started.next.cast_mut();
        let raw = Box::into_raw(started);
        match POOLS.compare_exchange(before, raw, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just leaked, and from now on only read.
            Ok(_) => return Some(unsafe { &(*raw).pool }),
            Err(newest) => {
                // SAFETY: `raw` was not published, so this is its only owner.
                started = unsafe { Box::from_raw(raw) };
                started.next = newest;
            }
        }
    }
}
