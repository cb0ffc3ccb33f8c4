//! What the system is told of large blocks of memory.

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
