//! On which threads a kernel runs.
//!
//! A call that is over before another thread would be awake runs on the caller's thread alone; a longer one on the threads
//! that PyTorch has, or on a pool. Results do not depend on it. Threads do not survive a fork: a child process finds out by
//! its process id and starts pools of its own; it takes no lock that a thread of its parent may have held.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use longspan_kernels::threads::{alone, on_team};
use pyo3::PyResult;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{error, openmp};

/// Seconds to wake a sleeping pool for a call and to wait for its answer; measured on two cores.
const HANDING_OVER: f64 = 13e-6;

/// How often a thread looks for signals: often enough for a person, seldom enough to wait for Python's lock each time.
pub const LOOKING: Duration = Duration::from_millis(100);

/// Largest number of threads that [`set`] accepts.
const MOST: usize = 4096;

/// Pools that were started, newest first. They are kept for good: another thread may still be running on one.
static POOLS: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// The number given to [`set`]; 0 is the default: the environment's, else PyTorch's, else the machine's.
static WANTED: AtomicUsize = AtomicUsize::new(0);

struct Pool {
    process: u32,
    threads: usize,
    pool: ThreadPool,
    next: *const Pool,
}

/// Threads that [`run`] may use.
pub fn count() -> usize {
    match WANTED.load(Ordering::Relaxed) {
        0 => by_default(),
        n => n,
    }
}

fn by_default() -> usize {
    // Once, because asking the system costs more than a small call.
    static ENVIRONMENT: OnceLock<Option<usize>> = OnceLock::new();
    static MACHINE: OnceLock<usize> = OnceLock::new();
    let environment = || {
        let number = |name| std::env::var(name).ok()?.parse().ok().filter(|n| (1..=MOST).contains(n));
        number("LONGSPAN_NUM_THREADS").or_else(|| number("RAYON_NUM_THREADS"))
    };
    let machine = || std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = ENVIRONMENT.get_or_init(environment).or_else(openmp::threads);
    wanted.unwrap_or_else(|| *MACHINE.get_or_init(machine))
}

/// See the Python function of this name.
pub fn set(threads: usize) -> PyResult<()> {
    if threads > MOST {
        return Err(error::value("set_num_threads", "threads", format_args!("0 to {MOST}"), threads));
    }
    WANTED.store(threads, Ordering::Relaxed);
    Ok(())
}

/// Runs `work`, which takes about `seconds` on one thread. Where other threads do all of it the caller's calls `meanwhile`, again
/// and again, if it is given.
pub fn run<R: Send>(seconds: f64, work: impl FnOnce() -> R + Send, meanwhile: Option<&dyn Fn()>) -> R {
    let threads = count();
    // A pool wins where `seconds · (1 − 1/threads)` is more than handing over takes; twice that, because on a machine with
    // other work the others wake late.
    let saved = seconds * (1.0 - 1.0 / threads.max(1) as f64);
    if saved < 2.0 * HANDING_OVER {
        return alone(work);
    }
    // Only with its own number of threads: for another one the runtime would stop or start some, and again for PyTorch's next call.
    if let Some(team) = openmp::team().filter(|team| team.size() == threads) {
        return on_team(team, work);
    }
    match (pool(threads), meanwhile) {
        (Some(pool), None) => pool.install(work),
        (Some(pool), Some(meanwhile)) => install(pool, work, meanwhile),
        // The system has no thread to give.
        (None, _) => alone(work),
    }
}

/// `pool.install(work)` with something to do for the thread that waits.
fn install<R: Send>(pool: &ThreadPool, work: impl FnOnce() -> R + Send, meanwhile: &dyn Fn()) -> R {
    let (sender, receiver) = mpsc::sync_channel(1);
    let result = pool.in_place_scope(|scope| {
        scope.spawn(move |_| sender.send(catch_unwind(AssertUnwindSafe(work))).unwrap_or_default());
        loop {
            match receiver.recv_timeout(LOOKING) {
                Err(RecvTimeoutError::Timeout) => meanwhile(),
                done => break done,
            }
        }
    });
    match result {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => resume_unwind(panic),
        // The sender sends whatever happens.
        Err(_) => unreachable!("a task that never ran"),
    }
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
