//! PyTorch's OpenMP threads, found by the symbols of its loaded library.
//!
//! They wait for work by spinning, so that kernels on threads of their own beside them get half of each core; and they are
//! awake where a sleeping pool has to be woken. But the runtime waits for each of them, with work or not: where others in the
//! process spin as well, a call waits for one that got no core.

use std::cell::Cell;
use std::ffi::c_void;
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longspan_kernels::threads::Team;
use pyo3::prelude::*;

/// `GOMP_parallel` of GCC's runtime, which LLVM's and Intel's have as well: calls `body(data)` on up to so many threads, the
/// caller's with them, and returns when all have returned.
type Parallel =
    unsafe extern "C" fn(body: unsafe extern "C" fn(*mut c_void), data: *mut c_void, threads: u32, flags: u32);

/// `omp_get_max_threads`.
type MaxThreads = unsafe extern "C" fn() -> i32;

/// A thread that begins so late got no core. One that sleeps is awake in a tenth of it.
const LATE: Duration = Duration::from_micros(500);

/// Calls that then go elsewhere before the threads are tried again.
const ELSEWHERE: usize = 32;

/// How many of them are left.
static LEFT: AtomicUsize = AtomicUsize::new(0);

struct OpenMp {
    /// Threads do not survive a fork, and the runtime would wait for them in vain.
    process: u32,
    parallel: Parallel,
    max_threads: MaxThreads,
    /// PyTorch's own question for its threads. The runtime keeps their number for each thread of a program apart, and PyTorch sets
    /// that of a new one when it is first asked.
    of_torch: Py<PyAny>,
}

thread_local! {
    /// Whether this thread has asked PyTorch.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

static FOUND: OnceLock<OpenMp> = OnceLock::new();

/// How many threads PyTorch's operations use when called from this thread, if its runtime was found.
pub fn threads() -> Option<usize> {
    FOUND.get().map(Team::size)
}

/// The threads, if the runtime was found, this is not a fork of the process that found it, and none of them was late for one of
/// the last calls.
pub fn team() -> Option<&'static dyn Team> {
    let found = FOUND.get().filter(|found| found.process == process::id())?;
    let elsewhere = LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
    (!elsewhere).then_some(found as &dyn Team)
}

/// Looks for the runtime that a loaded library uses; returns whether there is one.
pub fn use_of(library: &str, of_torch: Py<PyAny>) -> bool {
    FOUND.get().is_some() || find(library, of_torch).is_some_and(|found| FOUND.set(found).is_ok())
}

#[cfg(unix)]
fn find(library: &str, of_torch: Py<PyAny>) -> Option<OpenMp> {
    use std::ffi::{CStr, CString};
    let path = CString::new(library).ok()?;
    // SAFETY: the path ends with a zero; nothing is loaded that was not before, and so no code of it runs.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // The library itself or what it was linked with, so that of several runtimes in a process it is the right one.
    let symbol = |name: &CStr| {
        // SAFETY: the handle is never closed.
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    };
    let (parallel, max_threads) = (symbol(c"GOMP_parallel")?, symbol(c"omp_get_max_threads")?);
    // SAFETY: the OpenMP standard and GCC's binary interface give these names to functions of these types.
    let (parallel, max_threads) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Parallel>(parallel),
            std::mem::transmute::<*mut c_void, MaxThreads>(max_threads),
        )
    };
    Some(OpenMp { process: process::id(), parallel, max_threads, of_torch })
}

#[cfg(not(unix))]
fn find(_: &str, _: Py<PyAny>) -> Option<OpenMp> {
    None
}

impl Team for OpenMp {
    fn size(&self) -> usize {
        if !ASKED.replace(true) {
            // Should it fail, the runtime's own number stands.
            Python::attach(|py| self.of_torch.call0(py).map(drop).unwrap_or_default());
        }
        // SAFETY: may be called from any thread.
        usize::try_from(unsafe { (self.max_threads)() }).unwrap_or(1).max(1)
    }

    fn run(&self, members: usize, work: &(dyn Fn() + Sync)) {
        unsafe extern "C" fn body(work: *mut c_void) {
            // SAFETY: `run` passes the address of a reference that lives until all threads have returned.
            let work = unsafe { *work.cast::<&(dyn Fn() + Sync)>() };
            work();
        }
        let threads = u32::try_from(members).unwrap_or(u32::MAX);
        let (start, latest) = (Instant::now(), AtomicU64::new(0));
        let timed = || {
            latest.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
            work();
        };
        let mut work: &(dyn Fn() + Sync) = &timed;
        // SAFETY: `body` takes what it is given here, may run on several threads at once, and does not unwind.
        unsafe { (self.parallel)(body, (&raw mut work).cast(), threads, 0) };
        if Duration::from_micros(latest.into_inner()) > LATE {
            LEFT.store(ELSEWHERE, Ordering::Relaxed);
        }
    }
}
