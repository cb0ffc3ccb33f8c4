//! The allocator of Longspan's programs: the system's, which keeps what is freed for the next step.
//!
//! A step takes the same blocks as the one before. A system that got them back clears every page anew, a tenth of a training step.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::{Mutex, MutexGuard, PoisonError};

use longspan_core::memory::use_huge_pages;

/// Blocks from this size on are kept here: glibc's allocator takes each from the system and gives it back, and no setting changes that.
const LARGE: usize = 32 << 20;

/// Blocks that are kept at most.
const SLOTS: usize = 64;

static LARGE_BLOCKS: Mutex<Blocks> = Mutex::new(Blocks { in_use: 0, most: 0, slots: [None; SLOTS] });

/// Has glibc's allocator keep smaller blocks.
pub fn keep_small_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: these change how the allocator grows and shrinks, and nothing that it has given out. No other thread runs yet. A value
    // that this version does not take changes nothing.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE as libc::c_int);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}

/// The system's allocator, which keeps large blocks that are freed for the next request of their size.
#[derive(Debug, Clone, Copy)]
pub struct Keeping;

/// Large blocks in bytes: what is kept and in use together was once in use at a time.
struct Blocks {
    in_use: usize,
    most: usize,
    /// Those that are kept, the latest at the end of the used slots.
    slots: [Option<Block>; SLOTS],
}

/// A free block of the system's allocator.
#[derive(Clone, Copy)]
struct Block {
    address: usize,
    layout: Layout,
}

impl Blocks {
    fn lock() -> MutexGuard<'static, Self> {
        LARGE_BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many bytes are kept.
    fn kept(&self) -> usize {
        self.slots.iter().flatten().map(|block| block.layout.size()).sum()
    }

    /// A block that is kept, for one more in use.
    fn take(&mut self, layout: Layout) -> Option<*mut u8> {
        let at = self.slots.iter().rposition(|slot| slot.is_some_and(|block| block.layout == layout))?;
        let block = self.remove(at)?;
        self.in_use += layout.size();
        Some(block.address as *mut u8)
    }

    /// Gives blocks back, the oldest first, as long as they and what will be in use are more than ever was.
    fn make_room(&mut self, bytes: usize) {
        let in_use = self.in_use + bytes;
        while in_use + self.kept() > self.most.max(in_use) && self.give_back_one() {}
    }

    /// So many bytes more are in use.
    fn grow(&mut self, bytes: usize) {
        self.in_use += bytes;
        self.most = self.most.max(self.in_use);
    }

    /// So many fewer.
    fn shrink(&mut self, bytes: usize) {
        self.in_use = self.in_use.saturating_sub(bytes);
    }

    /// Gives all back that is kept.
    fn give_back(&mut self) {
        while self.give_back_one() {}
    }

    /// The oldest, if there is one.
    fn give_back_one(&mut self) -> bool {
        let block = self.remove(0);
        if let Some(Block { address, layout }) = block {
            // SAFETY: this block came from the system with this layout, and nobody uses it.
            unsafe { System.dealloc(address as *mut u8, layout) };
        }
        block.is_some()
    }

    /// Keeps a block that was in use, if there is a slot.
    fn keep(&mut self, block: Block) -> bool {
        self.shrink(block.layout.size());
        let free = self.slots.iter_mut().find(|slot| slot.is_none());
        let Some(free) = free else { return false };
        *free = Some(block);
        true
    }

    fn remove(&mut self, at: usize) -> Option<Block> {
        let block = self.slots[at].take()?;
        self.slots[at..].rotate_left(1);
        Some(block)
    }
}

/// A large block: one that is kept, `reuse`d, or one of the system's, which gets back what is kept before it has none.
fn large(layout: Layout, reuse: impl Fn(*mut u8), request: impl Fn() -> *mut u8) -> *mut u8 {
    let mut blocks = Blocks::lock();
    if let Some(block) = blocks.take(layout) {
        drop(blocks);
        reuse(block);
        return block;
    }
    blocks.make_room(layout.size());
    drop(blocks);
    let mut block = request();
    if block.is_null() {
        Blocks::lock().give_back();
        block = request();
    }
    if !block.is_null() {
        use_huge_pages(block, layout.size());
        Blocks::lock().grow(layout.size());
    }
    block
}

// SAFETY: every block comes from the system's allocator with the layout that it goes back with, and has one owner: the caller, or a slot.
unsafe impl GlobalAlloc for Keeping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`.
        let request = || unsafe { System.alloc(layout) };
        if layout.size() < LARGE { request() } else { large(layout, |_| (), request) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        let request = || unsafe { System.alloc_zeroed(layout) };
        // SAFETY: the block has this size.
        let clear = |block: *mut u8| unsafe { block.write_bytes(0, layout.size()) };
        if layout.size() < LARGE { request() } else { large(layout, clear, request) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `realloc`.
        let request = || unsafe { System.realloc(pointer, layout, size) };
        let mut moved = request();
        if moved.is_null() {
            Blocks::lock().give_back();
            moved = request();
        }
        if !moved.is_null() && layout.size().max(size) >= LARGE {
            let large = |bytes: usize| if bytes < LARGE { 0 } else { bytes };
            let mut blocks = Blocks::lock();
            blocks.shrink(large(layout.size()));
            blocks.make_room(large(size));
            blocks.grow(large(size));
        }
        moved
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let block = Block { address: pointer as usize, layout };
        if layout.size() < LARGE || !Blocks::lock().keep(block) {
            // SAFETY: the caller keeps the contract of `dealloc`, and no slot holds the block.
            unsafe { System.dealloc(pointer, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Keeping = Keeping;

    const NOTHING: Blocks = Blocks { in_use: 0, most: 0, slots: [None; SLOTS] };

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 16).unwrap()
    }

    /// A block of the system's that has been in use.
    fn used(blocks: &mut Blocks, bytes: usize) -> Block {
        let layout = layout(bytes);
        assert!(blocks.take(layout).is_none());
        blocks.make_room(bytes);
        blocks.grow(bytes);
        // SAFETY: the size is not 0.
        Block { address: unsafe { System.alloc(layout) } as usize, layout }
    }

    #[test]
    fn a_block_is_used_again_and_no_more_is_kept_than_was_in_use() {
        let mut blocks = NOTHING;
        let (one, other) = (used(&mut blocks, 300), used(&mut blocks, 500));
        assert!(blocks.keep(one) && blocks.keep(other));
        assert_eq!((blocks.in_use, blocks.kept(), blocks.most), (0, 800, 800));
        assert_eq!(blocks.take(layout(300)), Some(one.address as *mut u8));
        assert_eq!((blocks.in_use, blocks.kept()), (300, 500));
        // Of another size, beside which the block of 500 would be too many.
        let third = used(&mut blocks, 400);
        assert_eq!((blocks.in_use, blocks.kept(), blocks.most), (700, 0, 800));
        assert!(blocks.keep(one) && blocks.keep(third));
        blocks.give_back();
        assert_eq!((blocks.in_use, blocks.kept()), (0, 0));
    }

    #[test]
    fn what_the_system_refuses_leaves_no_trace() {
        let layout = layout(isize::MAX as usize - 15);
        assert!(large(layout, |_| (), std::ptr::null_mut).is_null());
        assert!(Blocks::lock().most < layout.size());
    }

    #[test]
    fn without_a_slot_blocks_go_back() {
        let mut blocks = Blocks { in_use: 2 * SLOTS, most: 2 * SLOTS, ..NOTHING };
        let layout = layout(1);
        for address in 0..SLOTS {
            assert!(blocks.keep(Block { address, layout }));
        }
        assert!(!blocks.keep(Block { address: SLOTS, layout }));
        assert_eq!(blocks.take(layout), Some((SLOTS - 1) as *mut u8));
    }

    #[test]
    fn large_vectors_hold_what_they_should() {
        for _ in 0..2 {
            let mut bytes = vec![7u8; 10];
            while bytes.len() < 3 * LARGE {
                bytes.extend_from_within(..);
            }
            bytes.truncate(LARGE + 1);
            bytes.shrink_to_fit();
            assert!(bytes.iter().all(|&byte| byte == 7));
            drop(bytes);
            assert!(vec![0u8; LARGE + 1].iter().all(|&byte| byte == 0));
        }
    }
}
