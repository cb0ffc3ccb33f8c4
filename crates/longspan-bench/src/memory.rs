//! Memory that a call takes beyond its inputs and outputs, counted where the program's allocator is a [`Counting`] one.

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

static WATCHING: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// An allocator that counts what goes through it while [`peak`] watches; at other times it costs one look at a flag.
///
/// ```
/// use longspan_bench::memory::{self, Counting};
/// use std::alloc::System;
///
/// #[global_allocator]
/// static ALLOCATOR: Counting<System> = Counting(System);
///
/// let (_, peak) = memory::peak(|| vec![1u8; 1000].len());
/// assert!((1000..2000).contains(&peak.unwrap()));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Counting<A>(pub A);

/// Notes that `bytes` more are alive, or fewer.
fn count(bytes: isize) {
    if WATCHING.load(Ordering::Relaxed) {
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

// SAFETY: every request goes to the wrapped allocator as it came; the counters touch no memory of the caller.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { self.0.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { self.0.dealloc(pointer, layout) }
    }
}

/// Runs `body`; gives its result and the most bytes that were alive at once beyond those alive before, all threads
/// together, or `None` where the program's allocator does not count. One call at a time.
pub fn peak<R>(body: impl FnOnce() -> R) -> (R, Option<usize>) {
    LIVE.store(0, Ordering::Relaxed);
    PEAK.store(0, Ordering::Relaxed);
    WATCHING.store(true, Ordering::Relaxed);
    // A counting allocator must see this box; so a peak of 0 can be told from an allocator that does not count.
    let before = PEAK.load(Ordering::Relaxed);
    drop(black_box(Box::new(0u64)));
    let counts = PEAK.load(Ordering::Relaxed) > before;
    LIVE.store(0, Ordering::Relaxed);
    PEAK.store(0, Ordering::Relaxed);
    let result = body();
    WATCHING.store(false, Ordering::Relaxed);
    (result, counts.then(|| PEAK.load(Ordering::Relaxed).max(0) as usize))
}
