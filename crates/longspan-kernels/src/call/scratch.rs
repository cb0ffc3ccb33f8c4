//! Working memory that the caller keeps between calls.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use crate::error::Error;
use crate::memory::{use_huge_pages, zeros};
use crate::simd::Real;
use crate::simd::rows::{LINE_BYTES, line, padded};

/// Working memory of a step, which starts on a cache line if it is on the stack. What usual sizes need stands there, so that
/// a token allocates nothing.
#[repr(align(64))]
pub(crate) struct StepMemory<T> {
    stack: [MaybeUninit<T>; STEP_NUMBERS],
    /// How much of the stack has been written to: to write to all of it takes a twentieth of a short step.
    written: usize,
    heap: Vec<T>,
}

/// Numbers of working memory that steps keep on the stack: three means of AFT with 64 channels take 768, the features of
/// Fourier positions with 64 take as many.
const STEP_NUMBERS: usize = 2048;

impl<T: Real> StepMemory<T> {
    pub fn new() -> Self {
        Self { stack: [MaybeUninit::uninit(); STEP_NUMBERS], written: 0, heap: Vec::new() }
    }

    /// `len` numbers, of any value.
    pub fn take(&mut self, len: usize) -> &mut [T] {
        if len <= STEP_NUMBERS {
            if self.written < len {
                self.stack[self.written..len].fill(MaybeUninit::new(T::ZERO));
                self.written = len;
            }
            // SAFETY: these have been written to.
            return unsafe { self.stack[..len].assume_init_mut() };
        }
        if self.heap.len() < len {
            self.heap.resize(len, T::ZERO);
        }
        &mut self.heap[..len]
    }
}

/// Working memory. It grows to what the largest call so far needed and is reused by the next one; what stands in it
/// between calls has no meaning.
#[derive(Debug, Default)]
pub struct Scratch<T> {
    buffer: Vec<T>,
    /// For the few algorithms that count in `f64` whatever `T` is.
    buffer_f64: Vec<f64>,
    /// What [`lend`](Self::lend) gives.
    lent: Vec<T>,
}

impl<T: Real> Scratch<T> {
    /// No memory yet.
    pub fn new() -> Self {
        Self { buffer: Vec::new(), buffer_f64: Vec::new(), lent: Vec::new() }
    }

    /// Memory for `len` numbers, and as many of `f64`, all of them `fill`: NaN shows a kernel that reads what it never wrote.
    pub fn filled(len: usize, fill: T) -> Self {
        Self { buffer: vec![fill; len], buffer_f64: vec![fill.to_f64(); len], lent: Vec::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        size_of_val(self.buffer.as_slice())
            + size_of_val(self.buffer_f64.as_slice())
            + size_of_val(self.lent.as_slice())
    }

    /// `len` numbers or more with any contents for the caller's own use, beside those of a call that runs meanwhile;
    /// [`give_back`](Self::give_back) keeps them for the next time.
    ///
    /// # Errors
    /// If the machine has not the memory.
    pub fn lend(&mut self, len: usize) -> Result<Vec<T>, Error> {
        let numbers = std::mem::take(&mut self.lent);
        if numbers.len() >= len {
            return Ok(numbers);
        }
        drop(numbers);
        zeros(len)
    }

    /// Keeps what [`lend`](Self::lend) gave.
    pub fn give_back(&mut self, numbers: Vec<T>) {
        self.lent = numbers;
    }

    /// `len` numbers that start on a cache line, with any contents.
    pub(crate) fn take(&mut self, len: usize) -> &mut [T] {
        aligned(&mut self.buffer, len)
    }

    /// The same, and beside it `len_f64` of `f64`.
    pub(crate) fn take_with_f64(&mut self, len: usize, len_f64: usize) -> (&mut [T], &mut [f64]) {
        (aligned(&mut self.buffer, len), aligned(&mut self.buffer_f64, len_f64))
    }
}

/// Where the first cache line begins in a buffer that is longer than one.
fn line_start<T>(buffer: *const T) -> usize {
    buffer.align_offset(LINE_BYTES).min(line::<T>())
}

/// `len` numbers of a buffer that grows to hold them, the first on a cache line.
fn aligned<T: Real>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    let line = line::<T>();
    let wanted = len + line;
    if buffer.len() < wanted {
        // Not `resize`: nothing of the old contents is worth a copy.
        *buffer = vec![T::ZERO; wanted];
        use_huge_pages(buffer.as_ptr().cast(), size_of_val(buffer.as_slice()));
    }
    let start = line_start(buffer.as_ptr());
    &mut buffer[start..start + len]
}

/// Numbers of which the first stands on a cache line.
pub(crate) struct Lines<T> {
    buffer: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Real> Lines<T> {
    /// Zeros, or an error where the machine has not the memory.
    pub fn zeros(len: usize) -> Result<Self, Error> {
        let buffer = if len == 0 { Vec::new() } else { zeros(len.saturating_add(line::<T>()))? };
        let start = if len == 0 { 0 } else { line_start(buffer.as_ptr()) };
        Ok(Self { buffer, start, len })
    }

    /// A copy, as [`zeros`](Self::zeros).
    pub fn copy(numbers: &[T]) -> Result<Self, Error> {
        Self::gather(numbers.len(), [numbers])
    }

    /// Copies of parts, `len` numbers in all, one after the other.
    pub fn gather<'a>(len: usize, parts: impl IntoIterator<Item = &'a [T]>) -> Result<Self, Error> {
        let mut buffer: Vec<T> = Vec::new();
        let room = len.saturating_add(line::<T>());
        let refused = |_| Error::Memory { bytes: room.saturating_mul(size_of::<T>()) };
        buffer.try_reserve_exact(room).map_err(refused)?;
        let start = line_start(buffer.as_ptr());
        buffer.resize(start, T::ZERO);
        parts.into_iter().for_each(|part| buffer.extend_from_slice(part));
        assert_eq!(buffer.len(), start + len, "as many numbers as were said");
        Ok(Self { buffer, start, len })
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.buffer[self.start..][..self.len]
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[self.start..][..self.len]
    }
}

// A clone's memory begins elsewhere on its cache line.
impl<T: Real> Clone for Lines<T> {
    fn clone(&self) -> Self {
        match Self::copy(self) {
            Ok(copy) => copy,
            // As every clone does: `State::try_clone` returns the error.
            Err(_) => handle_alloc_error(Layout::for_value(&**self)),
        }
    }
}

impl<T: PartialEq> PartialEq for Lines<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: fmt::Debug> fmt::Debug for Lines<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Hands out parts of a scratch buffer, each starting on a cache line.
pub(crate) struct Arena<'s, T> {
    rest: &'s mut [T],
    /// Numbers asked for so far, if the arena only measures.
    counted: Option<usize>,
}

impl<'s, T: Real> Arena<'s, T> {
    /// All of `buffer`, which starts on a cache line.
    pub fn new(buffer: &'s mut [T]) -> Self {
        Self { rest: buffer, counted: None }
    }

    /// Numbers that a layout takes: it runs on an arena that only counts and hands out nothing.
    pub fn measure<R>(layout: impl FnOnce(&mut Self) -> R) -> usize {
        let mut arena = Self { rest: &mut [], counted: Some(0) };
        layout(&mut arena);
        arena.counted.unwrap_or(0)
    }

    /// The next `len` numbers, with any contents.
    pub fn take(&mut self, len: usize) -> &'s mut [T] {
        if let Some(counted) = &mut self.counted {
            *counted += padded::<T>(len);
            return &mut [];
        }
        let rest = std::mem::take(&mut self.rest);
        let (part, rest) = rest.split_at_mut(padded::<T>(len));
        self.rest = rest;
        &mut part[..len]
    }

    /// Everything that is left.
    pub fn rest(self) -> &'s mut [T] {
        self.rest
    }
}
