//! Sizes of a call and strided views of its tensors: the only code that turns `(batch, head, token)` into an offset.

use std::ops::Range;

use crate::error::{Error, expect};
use crate::simd::rows::{Ahead, Columns, Rows};

/// The sizes of one attention call.
///
/// `q` is `[batch, heads, queries, head_dim]`, `k` is `[batch, kv_heads, keys, head_dim]`, `v` is
/// `[batch, kv_heads, keys, value_dim]` and the output `[batch, heads, queries, value_dim]`. Query head `h` reads
/// key/value head `h / (heads / kv_heads)` (grouped queries); `heads` is a multiple of `kv_heads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Query tokens, `Lq`.
    pub queries: usize,
    /// Key and value tokens, `Lk`.
    pub keys: usize,
    /// Numbers in one query or key of one head, `d`.
    pub head_dim: usize,
    /// Numbers in one value of one head, `dv`.
    pub value_dim: usize,
}

impl Dims {
    /// Self-attention: as many queries as keys, as many key heads as query heads, values as wide as keys.
    pub fn square(batch: usize, heads: usize, length: usize, head_dim: usize) -> Self {
        Self { batch, heads, kv_heads: heads, queries: length, keys: length, head_dim, value_dim: head_dim }
    }

    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// The query heads that share one key/value head.
    pub(crate) fn heads_of(&self, kv_head: usize) -> Range<usize> {
        kv_head * self.group()..(kv_head + 1) * self.group()
    }

    /// Shape of `q`.
    pub fn q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.head_dim]
    }

    /// Shape of `k`.
    pub fn k(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.head_dim]
    }

    /// Shape of `v`.
    pub fn v(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.value_dim]
    }

    /// Shape of the output.
    pub fn out(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.value_dim]
    }

    /// Whether sizes make sense.
    ///
    /// # Errors
    /// If the heads are no multiple of the key/value heads, or tensors of these sizes would not fit the address space.
    pub fn check(&self, operation: &'static str) -> Result<(), Error> {
        let holds =
            (self.heads == 0 && self.kv_heads == 0) || (self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads));
        let expected = || format!("a multiple of the {} key/value heads", self.kv_heads);
        expect(holds, operation, "heads", expected, || self.heads.to_string())?;
        let fits = [self.q(), self.k(), self.v(), self.out()].iter().all(|shape| {
            // A tensor with a size of 0 holds no numbers, but rows and heads are still counted.
            let most = if shape.contains(&0) { MOST_OF_NOTHING } else { isize::MAX as usize / 16 };
            shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x.max(1))).is_some_and(|n| n < most)
        });
        expect(fits, operation, "dims", || "tensors that fit the address space".into(), || format!("{self:?}"))
    }
}

/// What the sizes of an empty tensor may multiply to, zeros as ones.
const MOST_OF_NOTHING: usize = u32::MAX as usize;

/// A read-only tensor `[batch, head, token, feature]` whose features are adjacent and whose other axes have any stride.
///
/// A stride of 0 repeats an axis. Strides are in elements.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
    /// How many heads that follow each other read the same numbers.
    sharing: usize,
}

/// A tensor to write, laid out as a [`View`], no two elements at one place.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    rows: SharedRows<'a, T>,
    /// Numbers that the heads of one token may reach over: what follows may be another tensor's.
    reach: usize,
}

/// Strides of axes 0 to 2 of a row-major tensor.
fn row_major(shape: [usize; 4]) -> [usize; 3] {
    [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]]
}

/// How many numbers a tensor has, if one follows another.
fn adjacent(strides: [usize; 3], shape: [usize; 4]) -> Option<usize> {
    let expected = row_major(shape);
    let len = shape.iter().product();
    (len == 0 || (0..3).all(|axis| shape[axis] == 1 || strides[axis] == expected[axis])).then_some(len)
}

/// One past the largest offset that `shape` reaches under `strides`; `None` if it does not fit.
fn span(shape: [usize; 4], strides: [usize; 3]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    (0..3).try_fold(shape[3], |n, axis| n.checked_add(strides[axis].checked_mul(shape[axis] - 1)?))
}

/// Whether so many numbers hold a tensor.
fn check_span(
    operation: &'static str,
    argument: &'static str,
    shape: [usize; 4],
    strides: [usize; 3],
    len: usize,
) -> Result<(), Error> {
    let span = span(shape, strides);
    let expected =
        || format!("shape {shape:?}, so at least {} elements under strides {strides:?}", span.unwrap_or(usize::MAX));
    expect(span.is_some_and(|n| n <= len), operation, argument, expected, || format!("{len} elements"))
}

impl<'a, T> View<'a, T> {
    /// A row-major tensor of `shape`.
    pub fn contiguous(data: &'a [T], shape: [usize; 4]) -> Self {
        Self::strided(data, row_major(shape))
    }

    /// A tensor with strides for batch, head and token, in elements. `data` starts at element `[0, 0, 0, 0]`.
    pub fn strided(data: &'a [T], strides: [usize; 3]) -> Self {
        Self { data, strides, sharing: 1 }
    }

    /// The same tensor for `sharing` times as many heads, of which so many that follow each other read the same numbers: queries and
    /// keys of models that have fewer of their heads than of those of values. 0 counts as 1.
    #[must_use]
    pub fn with_shared_heads(self, sharing: usize) -> Self {
        Self { sharing: sharing.max(1), ..self }
    }

    /// The features of one token: what a mechanism of another crate reads through.
    ///
    /// # Panics
    /// If the token lies outside the data.
    pub fn token(&self, batch: usize, head: usize, token: usize, width: usize) -> &'a [T] {
        self.rows(batch, head).row(token, width)
    }

    pub(crate) fn check(
        &self,
        operation: &'static str,
        argument: &'static str,
        shape: [usize; 4],
    ) -> Result<(), Error> {
        let [batch, heads, tokens, width] = shape;
        let expected = || format!("a multiple of the {} that share one", self.sharing);
        let whole = heads.is_multiple_of(self.sharing);
        expect(whole, operation, argument, expected, || format!("{heads} heads"))?;
        let own = [batch, heads / self.sharing, tokens, width];
        check_span(operation, argument, own, self.strides, self.data.len())
    }

    /// All numbers of a checked tensor, if they are adjacent.
    pub(crate) fn row_major(&self, shape: [usize; 4]) -> Option<&'a [T]> {
        if self.sharing > 1 {
            return None;
        }
        adjacent(self.strides, shape).map(|len| &self.data[..len])
    }

    /// The token rows of one batch entry and head.
    pub(crate) fn rows(&self, batch: usize, head: usize) -> Rows<'a, T> {
        // Strides of an empty tensor may be anything.
        let head = head / self.sharing;
        let start = batch.saturating_mul(self.strides[0]).saturating_add(head.saturating_mul(self.strides[1]));
        let start = start.min(self.data.len());
        Rows { data: &self.data[start..], stride: self.strides[2] }
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// A row-major tensor of `shape`.
    pub fn contiguous(data: &'a mut [T], shape: [usize; 4]) -> Self {
        Self::strided(data, row_major(shape))
    }

    /// A tensor with strides for batch, head and token, in elements. `data` starts at element `[0, 0, 0, 0]`.
    pub fn strided(data: &'a mut [T], strides: [usize; 3]) -> Self {
        Self { rows: SharedRows::new(data, strides), reach: usize::MAX }
    }

    /// Tensors side by side in `data`, `[batch, tokens, columns]`: each of so many heads, so wide, one head after the other, and
    /// all of them together fill the columns. So the gradients of queries, keys and values become that of one projection.
    ///
    /// # Panics
    /// If `data` is not as long as its shape says.
    pub fn side_by_side<const N: usize>(
        data: &'a mut [T],
        [batch, tokens]: [usize; 2],
        parts: [[usize; 2]; N],
    ) -> [Self; N] {
        let columns: usize = parts.iter().map(|[heads, width]| heads * width).sum();
        assert_eq!(data.len(), batch * tokens * columns, "numbers of {batch} × {tokens} × {columns}");
        let (start, len) = (data.as_mut_ptr(), data.len());
        let mut first = 0;
        parts.map(|[heads, width]| {
            let at = first.min(len);
            first += heads * width;
            let rows = SharedRows {
                data: start.wrapping_add(at),
                len: len - at,
                strides: [tokens * columns, width, columns],
                lifetime: std::marker::PhantomData,
            };
            Self { rows, reach: heads * width }
        })
    }

    /// The features of one token: what a mechanism of another crate writes through.
    ///
    /// # Panics
    /// If the token lies outside the data.
    pub fn token(&mut self, batch: usize, head: usize, token: usize, width: usize) -> &mut [T] {
        let [a, b, c] = self.rows.strides;
        let place = [(batch, a), (head, b), (token, c)]
            .iter()
            .try_fold(width, |sum, (index, stride)| sum.checked_add(index.checked_mul(*stride)?));
        assert!(place.is_some() && head * b + width <= self.reach, "a row outside the data");
        // SAFETY: the numbers of this view are its own, and it is borrowed while the row lives.
        unsafe { self.rows.row(batch, head, token, width) }
    }

    pub(crate) fn check(
        &self,
        operation: &'static str,
        argument: &'static str,
        shape: [usize; 4],
    ) -> Result<(), Error> {
        let SharedRows { len, strides, .. } = self.rows;
        check_span(operation, argument, shape, strides, len)?;
        let reach = shape[1].saturating_sub(1).saturating_mul(strides[1]).saturating_add(shape[3]);
        let expected = || format!("heads within {} numbers of a token", self.reach);
        let got = || format!("{} heads of {}", shape[1], shape[3]);
        expect(reach <= self.reach || shape.contains(&0), operation, argument, expected, got)?;
        // Sorted by stride, each axis must step over all that the smaller ones reach.
        let mut axes = [(strides[0], shape[0]), (strides[1], shape[1]), (strides[2], shape[2])];
        axes.sort_unstable();
        let mut reach = shape[3];
        let mut apart = true;
        for (stride, length) in axes {
            if length > 1 {
                apart &= stride >= reach;
                reach += stride * (length - 1);
            }
        }
        let expected = || format!("strides under which no two elements of {shape:?} overlap");
        expect(apart || shape.contains(&0), operation, argument, expected, || format!("{strides:?}"))
    }

    /// All numbers of a checked tensor, if they are adjacent.
    pub(crate) fn row_major(&mut self, shape: [usize; 4]) -> Option<&mut [T]> {
        let len = adjacent(self.rows.strides, shape)?;
        assert!(len <= self.rows.len, "a tensor outside its data");
        // SAFETY: within the data, and all of them numbers of this view, which is borrowed while the slice lives.
        Some(unsafe { std::slice::from_raw_parts_mut(self.rows.data, len) })
    }

    /// The same tensor, to be written by a part of the work that this view outlives.
    pub(crate) fn reborrow(&mut self) -> ViewMut<'_, T> {
        let reach = self.reach;
        ViewMut { rows: self.shared(), reach }
    }

    /// A handle from which tasks write disjoint rows at the same time.
    pub(crate) fn shared(&mut self) -> SharedRows<'_, T> {
        SharedRows { lifetime: std::marker::PhantomData, ..self.rows }
    }
}

/// Rows that several tasks write at once, each its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedRows<'a, T> {
    data: *mut T,
    len: usize,
    strides: [usize; 3],
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer stems from a `&mut [T]` that outlives the handle; `row` asks its caller for rows that no other
// task holds, which is what makes the writes of several threads disjoint.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}
// SAFETY: as above; a shared reference gives no more than `row` does.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// Rows of numbers, with strides as those of [`ViewMut::strided`].
    pub fn new(data: &'a mut [T], strides: [usize; 3]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), strides, lifetime: std::marker::PhantomData }
    }
}

impl<T> SharedRows<'_, T> {
    /// `count` rows from a token on that are written soon.
    pub fn ahead(&self, batch: usize, head: usize, token: usize, count: usize, width: usize) -> Ahead<T> {
        let start = batch * self.strides[0] + head * self.strides[1] + token * self.strides[2];
        Ahead::starting_at(self.data.wrapping_add(start), self.strides[2], count, width)
    }

    /// `width` numbers of one row.
    ///
    /// # Safety
    /// While the returned slice lives no other slice of this row may exist, in this thread or another.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row(&self, batch: usize, head: usize, token: usize, width: usize) -> &mut [T] {
        let start = self.place([batch, head, token], width);
        // SAFETY: `place` checked the bounds, the exclusiveness is the caller's promise.
        let row = unsafe { std::slice::from_raw_parts_mut(start, width) };
        #[cfg(longspan_races)]
        races::writes(row);
        row
    }

    /// `width` numbers of one row, which several tasks may read.
    ///
    /// # Safety
    /// While the returned slice lives nothing may write this row, in this thread or another.
    pub unsafe fn read(&self, batch: usize, head: usize, token: usize, width: usize) -> &[T] {
        let start = self.place([batch, head, token], width);
        // SAFETY: `place` checked the bounds, that nothing writes is the caller's promise.
        let row = unsafe { std::slice::from_raw_parts(start, width) };
        #[cfg(longspan_races)]
        races::reads(row);
        row
    }

    /// Where so many numbers of a row stand; those of an empty row nowhere.
    fn place(&self, [batch, head, token]: [usize; 3], width: usize) -> *mut T {
        if width == 0 {
            return std::ptr::NonNull::dangling().as_ptr();
        }
        let start = batch * self.strides[0] + head * self.strides[1] + token * self.strides[2];
        assert!(start + width <= self.len, "a row outside a checked view");
        self.data.wrapping_add(start)
    }

    /// The columns `columns` of `rows` rows from `token` on.
    ///
    /// # Safety
    /// While the returned columns live no other slice of their numbers may exist, in this thread or another.
    pub unsafe fn columns(
        &self,
        [batch, head, token]: [usize; 3],
        rows: usize,
        columns: Range<usize>,
    ) -> Columns<'_, T> {
        let start = batch * self.strides[0] + head * self.strides[1] + token * self.strides[2] + columns.start;
        let end = start + rows.saturating_sub(1) * self.strides[2] + columns.len();
        assert!(columns.start <= columns.end && (rows == 0 || end <= self.len), "columns outside a checked view");
        // SAFETY: the bounds are checked above, for no rows too.
        let all = unsafe { Columns::new(self.data.add(start.min(self.len)), rows, columns.len(), self.strides[2]) };
        #[cfg(longspan_races)]
        let all = races::writes_columns(all, rows);
        all
    }
}

/// For `.ci/sanitize`: the detector of data races sees no access wider than 16 bytes, so it is told of the rows that a task takes.
#[cfg(longspan_races)]
mod races {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn __tsan_read_range(start: *const c_void, bytes: usize);
        fn __tsan_write_range(start: *mut c_void, bytes: usize);
    }

    /// As if every number were read now.
    pub fn reads<T>(row: &[T]) {
        // SAFETY: part of the detector, which only takes note.
        unsafe { __tsan_read_range(row.as_ptr().cast(), size_of_val(row)) };
    }

    /// As if every number were written now.
    pub fn writes<T>(row: &mut [T]) {
        // SAFETY: as above.
        unsafe { __tsan_write_range(row.as_mut_ptr().cast(), size_of_val(row)) };
    }

    /// The same of columns.
    pub fn writes_columns<T>(mut columns: super::Columns<'_, T>, rows: usize) -> super::Columns<'_, T> {
        (0..rows).for_each(|row| writes(columns.row(row)));
        columns
    }
}
