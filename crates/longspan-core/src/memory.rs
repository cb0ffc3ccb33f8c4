//! Large blocks of memory: from the system as zeros, and on huge pages.

use std::alloc::{Layout, alloc_zeroed};

use crate::error::Error;
use crate::simd::Real;

/// Bytes of a huge page, as most systems have them.
pub const HUGE_PAGE: usize = 2 << 20;

/// Asks Linux to back a fresh block of several huge pages by such. A table that every chunk reads anew lies on more small pages than a
/// processor remembers the addresses of: AFT-full over 4,096 tokens takes a tenth less time. Contents do not change, and a system that
/// says no goes on as before.
pub fn use_huge_pages(start: *const u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= 2 * HUGE_PAGE {
        // The advice is for whole small pages.
        let before = start.align_offset(4096);
        // SAFETY: it changes no contents, and where it cannot be followed it is an error, on which nothing depends.
        unsafe { libc::madvise(start.wrapping_add(before) as *mut _, bytes - before, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Zeros from the system, whose pages cost nothing until they are used: a state with room for many tokens is mostly that.
///
/// # Errors
/// If the machine has not the memory.
pub fn zeros<T: Real>(len: usize) -> Result<Vec<T>, Error> {
    let refused = || Error::Memory { bytes: len.saturating_mul(size_of::<T>()) };
    let layout = Layout::array::<T>(len).map_err(|_| refused())?;
    assert!(len > 0, "memory for nothing");
    // SAFETY: the layout is not empty by the assertion above.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        return Err(refused());
    }
    // SAFETY: the memory was allocated by the global allocator with the layout of so many numbers; zero bits are the number 0.
    Ok(unsafe { Vec::from_raw_parts(start.cast(), len, len) })
}
