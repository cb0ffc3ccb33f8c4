//! A pool of buffers for results. A buffer returns to it when its array is gone, because pages fresh from the system can take
//! as long as the kernel that writes to them.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::Mutex;

use longspan_core::memory::{HUGE_PAGE, use_huge_pages};
use numpy::npyffi::{NPY_ARRAY_CARRAY, NpyTypes, PY_ARRAY_API, PyArrayObject, get_type_object, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Most bytes in the pool.
const CAPACITY: usize = 256 << 20;

/// Smallest result that is pooled; smaller ones an allocator has at hand.
const LEAST: usize = 64 << 10;

/// Blocks start on a cache line, those of several huge pages on a huge page.
const LINE: usize = 64;

/// Free blocks, the one freed last at the end.
static POOL: Mutex<Vec<Block>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block has one owner, and any thread may free it.
unsafe impl Send for Block {}
// SAFETY: what a block points to is reached through its owner alone.
unsafe impl Sync for Block {}

impl Block {
    fn new(bytes: usize) -> Option<Self> {
        let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { LINE };
        let layout = Layout::from_size_align(bytes, align).ok()?;
        // SAFETY: the caller's size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        use_huge_pages(start.as_ptr(), bytes);
        Some(Self { start, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and by nobody else freed.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// So many bytes, of any value, that start on a cache line.
#[derive(Debug)]
pub struct Buffer(Option<Block>);

impl Buffer {
    pub fn new(bytes: usize) -> PyResult<Self> {
        let bytes = bytes.max(1);
        let block = pooled(bytes).or_else(|| Block::new(bytes));
        let failed = || PyMemoryError::new_err(format!("{bytes} bytes for a result could not be allocated"));
        block.map(|block| Self(Some(block))).ok_or_else(failed)
    }

    pub fn start(&self) -> *mut u8 {
        self.0.as_ref().map_or(NonNull::dangling(), |block| block.start).as_ptr()
    }
}

/// A block of the pool, if one is large enough and not much larger.
fn pooled(bytes: usize) -> Option<Block> {
    // A process that was forked while another thread held the lock never gets it, and has no pool.
    let mut pool = POOL.try_lock().ok()?;
    let fits = |block: &Block| (bytes..=bytes.saturating_add(bytes / 4)).contains(&block.layout.size());
    let at = pool.iter().rposition(fits)?;
    Some(pool.remove(at))
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Ok(mut pool) = POOL.try_lock() else { return };
        pool.extend(self.0.take());
        let mut bytes: usize = pool.iter().map(|block| block.layout.size()).sum();
        while bytes > CAPACITY {
            bytes -= pool.remove(0).layout.size();
        }
    }
}

/// Gives the memory of all free buffers back to the system.
pub fn empty() {
    // Freed after the lock is.
    let blocks = POOL.try_lock().map(|mut pool| std::mem::take(&mut *pool));
    drop(blocks);
}

/// What an array keeps alive.
#[pyclass(frozen)]
struct Owner {
    _buffer: Buffer,
}

/// A row-major array of any contents on a buffer of the pool; none where the array is too small for that, or its size overflows.
pub fn array<'py>(
    py: Python<'py>,
    shape: &[usize],
    descriptor: &Bound<'py, PyArrayDescr>,
) -> Option<PyResult<Bound<'py, PyUntypedArray>>> {
    let bytes = shape.iter().try_fold(descriptor.itemsize(), |bytes, &n| bytes.checked_mul(n))?;
    (bytes >= LEAST && bytes <= isize::MAX as usize).then(|| {
        let buffer = Buffer::new(bytes)?;
        let start = buffer.start();
        let owner = Bound::new(py, Owner { _buffer: buffer })?;
        // All below the number of bytes, which an `isize` holds.
        let mut axes: Vec<npy_intp> = shape.iter().map(|&n| n as npy_intp).collect();
        let descriptor = descriptor.clone().into_dtype_ptr();
        // SAFETY: the memory has room for these axes and starts on a cache line, and lives as long as its owner, which becomes
        // the array's base; references that the functions take over are given away by `into_…ptr`.
        unsafe {
            let array = PY_ARRAY_API.PyArray_NewFromDescr(
                py,
                get_type_object(py, NpyTypes::PyArray_Type),
                descriptor,
                axes.len() as _,
                axes.as_mut_ptr(),
                std::ptr::null_mut(),
                start.cast(),
                NPY_ARRAY_CARRAY,
                std::ptr::null_mut(),
            );
            let array = Bound::from_owned_ptr_or_err(py, array)?;
            if PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast::<PyArrayObject>(), owner.into_ptr()) < 0 {
                return Err(PyErr::fetch(py));
            }
            Ok(array.cast_into_unchecked())
        }
    })
}
