//! Rows of numbers, as a caller's tensors have them and as blocks of scratch do.
//!
//! A *block* is a slice of rows whose length (the distance from one row to the next) is a whole number of cache lines;
//! what stands between a row's last number and the end of its last line is 0. So no loop over a block's columns has a
//! remainder, and only reading from and writing to a caller's tensors looks at odd widths.

use std::ops::Range;

use super::Vector;

/// The pieces of a range, of `most` each but for the last: where each begins, and how long it is.
#[inline]
pub fn pieces(range: Range<usize>, most: usize) -> impl DoubleEndedIterator<Item = (usize, usize)> {
    let end = range.end;
    range.step_by(most).map(move |first| (first, most.min(end - first)))
}

/// Bytes from one cache line to the next; scratch rows start on cache lines.
pub const LINE_BYTES: usize = 64;

/// Numbers of a cache line.
pub const fn line<T>() -> usize {
    LINE_BYTES / size_of::<T>()
}

/// Whole cache lines for `len` numbers.
pub fn padded<T>(len: usize) -> usize {
    len.next_multiple_of(line::<T>())
}

/// Rows that are read or written soon. A product asks for them a few lines at a time, so that memory
/// answers while the processor multiplies; taken in one go they would make it wait for as long as a chunk's product takes.
#[derive(Clone, Copy)]
pub struct Ahead<T> {
    /// Nothing is read through it, and an address that is not there is passed over.
    start: *const T,
    stride: usize,
    count: usize,
    width: usize,
}

impl<T> Ahead<T> {
    /// The rows `from..to` of `len`, as far as they are there.
    pub fn new(rows: Rows<'_, T>, from: isize, to: isize, len: usize, width: usize) -> Self {
        let there = |row: isize| row.clamp(0, len as isize) as usize;
        let start = rows.data.as_ptr().wrapping_add(there(from) * rows.stride);
        Self { start, stride: rows.stride, count: there(to) - there(from), width }
    }

    /// `count` rows from an address on, at which nothing need be.
    pub fn starting_at(start: *const T, stride: usize, count: usize, width: usize) -> Self {
        Self { start, stride, count, width }
    }

    /// Asks for a part of the rows, as large as `part` is of `0..whole`.
    #[inline(always)]
    pub unsafe fn fetch<V: Vector<Element = T>>(&self, part: Range<usize>, whole: usize) {
        for row in part.start * self.count / whole..part.end * self.count / whole {
            let start = self.start.wrapping_add(row * self.stride);
            for column in (0..self.width).step_by(line::<T>()) {
                // SAFETY: the caller has the instructions.
                unsafe { V::fetch(start.wrapping_add(column)) };
            }
        }
    }
}

/// A register from a row of any width; missing numbers are 0.
#[inline(always)]
pub unsafe fn load_part<V: Vector>(row: &[V::Element], column: usize) -> V {
    let row = &row[column..];
    // SAFETY: no more is read than there is.
    unsafe { if row.len() >= V::LANES { V::load(row.as_ptr()) } else { V::load_first(row.as_ptr(), row.len()) } }
}

/// Writes a register to a row of any width, as much as fits.
#[inline(always)]
pub unsafe fn store_part<V: Vector>(register: V, row: &mut [V::Element], column: usize) {
    let row = &mut row[column..];
    // SAFETY: no more is written than there is room for.
    unsafe {
        if row.len() >= V::LANES {
            register.store(row.as_mut_ptr())
        } else {
            register.store_first(row.as_mut_ptr(), row.len())
        }
    }
}

pub fn covers<T>(rows: &Rows<'_, T>, count: usize, width: usize) -> bool {
    count == 0 || rows.data.len() >= (count - 1) * rows.stride + width
}

/// A register, or the first `left` numbers of one and zeros.
#[inline(always)]
pub unsafe fn get<V: Vector, const WHOLE: bool>(from: *const V::Element, left: usize) -> V {
    // SAFETY: the caller has so many numbers there.
    unsafe { if WHOLE { V::load(from) } else { V::load_first(from, left) } }
}

/// Writes a register, or its first `left` numbers.
#[inline(always)]
pub unsafe fn put<V: Vector, const WHOLE: bool>(register: V, to: *mut V::Element, left: usize) {
    // SAFETY: the caller has room for so many numbers there.
    unsafe { if WHOLE { register.store(to) } else { register.store_first(to, left) } }
}

/// The rows of one batch entry and head.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
}

impl<'a, T> Rows<'a, T> {
    /// The same rows without the first `n`.
    pub fn skip(self, n: usize) -> Self {
        Self { data: &self.data[n.saturating_mul(self.stride).min(self.data.len())..], stride: self.stride }
    }

    /// `width` numbers of row `i`.
    pub fn row(&self, i: usize, width: usize) -> &'a [T] {
        if width == 0 { &[] } else { &self.data[i * self.stride..][..width] }
    }

    /// The same rows without the first `column` columns.
    pub fn skip_columns(self, column: usize) -> Self {
        Self { data: &self.data[column.min(self.data.len())..], ..self }
    }

    /// A register of row `i` from a column on, or the `left` numbers that are there.
    ///
    /// # Safety
    /// The row has so many numbers there, and the processor the instructions of `V`.
    #[inline(always)]
    pub unsafe fn register<V: Vector<Element = T>, const WHOLE: bool>(
        &self,
        i: usize,
        column: usize,
        left: usize,
    ) -> V {
        // SAFETY: forwarded to the caller.
        unsafe { get::<V, WHOLE>(self.data.as_ptr().add(i * self.stride + column), left) }
    }
}

/// Some columns of consecutive rows, borrowed exclusively.
pub struct Columns<'a, T> {
    data: *mut T,
    rows: usize,
    width: usize,
    stride: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

impl<'a, T> Columns<'a, T> {
    /// `rows` rows of `width` numbers, `stride` apart.
    ///
    /// # Safety
    /// They are valid to write and borrowed by nothing else as long as the columns live.
    pub unsafe fn new(data: *mut T, rows: usize, width: usize, stride: usize) -> Self {
        Self { data, rows, width, stride, lifetime: std::marker::PhantomData }
    }

    /// All of one row.
    pub fn single(row: &'a mut [T]) -> Self {
        Self { data: row.as_mut_ptr(), rows: 1, width: row.len(), stride: 0, lifetime: std::marker::PhantomData }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "a row beyond the last");
        // SAFETY: the caller of `new` promised that the row is there and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.width) }
    }

    /// A place in a row; it may be written as long as these columns live.
    ///
    /// # Safety
    /// There is such a row, and such a column of it.
    pub unsafe fn at(&self, row: usize, column: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.data.add(row * self.stride + column) }
    }
}
