//! Working memory that the caller keeps between calls.

use crate::real::Real;

/// Numbers from one cache line to the next; scratch rows start on cache lines.
const LINE_BYTES: usize = 64;

/// Working memory. It grows to what the largest call so far needed and is reused by the next one; what stands in it
/// between calls has no meaning.
#[derive(Debug, Default)]
pub struct Scratch<T> {
    buffer: Vec<T>,
}

impl<T: Real> Scratch<T> {
    /// No memory yet.
    pub fn new() -> Self {
        Self { buffer: Vec::new() }
    }

    /// Memory for `len` numbers, all of them `fill`: NaN shows a kernel that reads what it never wrote.
    pub fn filled(len: usize, fill: T) -> Self {
        Self { buffer: vec![fill; len] }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        std::mem::size_of_val(self.buffer.as_slice())
    }

    /// `len` numbers that start on a cache line, with any contents.
    pub(crate) fn take(&mut self, len: usize) -> &mut [T] {
        let line = LINE_BYTES / size_of::<T>();
        let wanted = len + line;
        if self.buffer.len() < wanted {
            // Not `resize`: nothing of the old contents is worth a copy.
            self.buffer = vec![T::ZERO; wanted];
        }
        let start = self.buffer.as_ptr().align_offset(LINE_BYTES).min(line);
        &mut self.buffer[start..start + len]
    }
}
