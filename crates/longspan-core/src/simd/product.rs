//! The matrix product of blocks, whole or within a band.

use super::rows::Ahead;
use super::{Real, Vector, dispatch, operation};

/// Rows of one block of the matrix product, at the least. With four columns of AVX-512 registers that is 16 accumulators, which
/// hide the latency of two fused products a cycle, and needs two loads for every four of them.
pub const BLOCK_ROWS: usize = 4;

/// Rows of a block while there are so many: 24 accumulators of 32 registers, or 12 of 16, and five loads for every twelve.
pub const TALL_ROWS: usize = 6;

/// `C = A·B` or `C += A·B` over blocks.
pub struct Product<'a, T> {
    /// Element `(i, p)` is `a[i·a_row + p·a_column]`: either stride may be 1, so a transposed block needs no copy.
    pub a: &'a [T],
    pub a_row: usize,
    pub a_column: usize,
    pub b: &'a [T],
    pub b_row: usize,
    pub c: &'a mut [T],
    pub c_row: usize,
    pub rows: usize,
    /// Columns of B and C; rounded up to whole registers.
    pub columns: usize,
    /// Columns of A, rows of B.
    pub depth: usize,
    pub accumulate: bool,
    /// Whether B of the next product stands behind this one: it is asked for meanwhile.
    pub b_goes_on: bool,
    /// Which elements of A can be other than 0.
    pub a_band: Band,
    /// Which elements of C are wanted. Others may be written or left.
    pub c_band: Band,
}

impl<'a, T> Product<'a, T> {
    /// `C = A·B`, of each matrix its numbers and the distance from one row to the next; `[rows, columns, depth]` as the
    /// fields of these names.
    #[inline]
    pub fn of(
        (a, a_row): (&'a [T], usize),
        (b, b_row): (&'a [T], usize),
        (c, c_row): (&'a mut [T], usize),
        [rows, columns, depth]: [usize; 3],
    ) -> Self {
        let (a_band, c_band) = (Band::ALL, Band::ALL);
        let (accumulate, b_goes_on) = (false, false);
        Self { a, a_row, a_column: 1, b, b_row, c, c_row, rows, columns, depth, accumulate, b_goes_on, a_band, c_band }
    }

    /// `C = AᵀB`, where `A` is given as it stands.
    #[inline]
    pub fn of_transposed(
        (a, a_column): (&'a [T], usize),
        b: (&'a [T], usize),
        c: (&'a mut [T], usize),
        sizes: [usize; 3],
    ) -> Self {
        Self { a_row: 1, a_column, ..Self::of((a, a_column), b, c, sizes) }
    }

    /// Adds to what stands in C, or not.
    #[inline]
    pub fn accumulate(self, accumulate: bool) -> Self {
        Self { accumulate, ..self }
    }

    /// With B of the next product behind this one.
    #[inline]
    pub fn b_goes_on(self) -> Self {
        Self { b_goes_on: true, ..self }
    }

    /// With zeros in A outside a band.
    #[inline]
    pub fn a_band(self, a_band: Band) -> Self {
        Self { a_band, ..self }
    }

    /// For the elements of C inside a band alone.
    #[inline]
    pub fn c_band(self, c_band: Band) -> Self {
        Self { c_band, ..self }
    }
}

impl<T: Real> Product<'_, T> {
    #[inline]
    pub fn compute(self) {
        self.compute_with(None, &[]);
    }

    /// Computes it with what else is done on the way, as [`ProductWith`].
    #[inline]
    pub fn compute_with(self, outer: Outer<'_, T>, ahead: &[Ahead<T>]) {
        dispatch(ProductWith { product: self, outer, ahead })
    }
}

/// The elements `(i, j)` with `i + from ≤ j < i + to`.
#[derive(Clone, Copy)]
pub struct Band {
    pub from: isize,
    pub to: isize,
}

impl Band {
    /// Every element.
    pub const ALL: Self = Self { from: isize::MIN / 2, to: isize::MAX / 2 };

    /// The elements up to `diagonal` beyond the main one.
    pub fn up_to(diagonal: isize) -> Self {
        Self { to: diagonal + 1, ..Self::ALL }
    }

    /// The elements from `diagonal` beyond the main one.
    pub fn starting_at(diagonal: isize) -> Self {
        Self { from: diagonal, ..Self::ALL }
    }

    /// Where these elements are in the transpose.
    pub fn transposed(self) -> Self {
        Self { from: 1 - self.to, to: 1 - self.from }
    }

    /// The columns below `end` that any of the rows `first..=last` has.
    #[inline]
    pub fn columns(self, first: usize, last: usize, end: usize) -> (usize, usize) {
        let clamp = |x: isize| x.clamp(0, end as isize) as usize;
        let from = clamp((first as isize).saturating_add(self.from));
        (from, clamp((last as isize).saturating_add(self.to)).max(from))
    }
}

/// Calls `$body::<V, N>(arguments, column)` for the columns from `$from` on up to `$to`, in registers of which the last may reach
/// beyond, at most `$most` and 4 at a time: as many sums in flight hide the latency of the fused products. Arrays come one at a time.
/// A body may stand there itself, in which `$n` is a constant; it is compiled for the numbers of registers that there can be.
#[macro_export]
macro_rules! by_whole_registers {
    ($from:expr, $to:expr, $most:expr, $n:ident, |$column:ident| $body:block) => {{
        let (mut column, to) = ($from, $to);
        while column < to {
            let most = const { if V::BLOCK_COLUMNS == 1 { 1 } else { $most } };
            let registers = (to - column).div_ceil(V::LANES).min(most);
            match registers {
                4 if const { V::BLOCK_COLUMNS > 1 && $most >= 4 } => $crate::by_whole_registers!(@body 4, $n, $column, column, $body),
                3 if const { V::BLOCK_COLUMNS > 1 && $most >= 3 } => $crate::by_whole_registers!(@body 3, $n, $column, column, $body),
                2 if const { V::BLOCK_COLUMNS > 1 && $most >= 2 } => $crate::by_whole_registers!(@body 2, $n, $column, column, $body),
                _ => $crate::by_whole_registers!(@body 1, $n, $column, column, $body),
            }
            column += registers * V::LANES;
        }
    }};
    (@body $count:literal, $n:ident, $column:ident, $at:ident, $body:block) => {{
        const $n: usize = $count;
        let $column = $at;
        $body
    }};
    ($from:expr, $to:expr, $most:expr, $body:ident($($argument:expr),*)) => {
        $crate::by_whole_registers!($from, $to, $most, N, |column| { $body::<V, N>($($argument,)* column) })
    };
}

pub use crate::by_whole_registers;

/// A number for each row and a line of numbers for the columns, whose products are added to a matrix product, if any.
pub type Outer<'a, T> = Option<(&'a [T], &'a [T])>;

// A matrix product with what else is done on the way: `outer` is added, and rows `ahead` are fetched.
operation!(ProductWith, |product: Product<'a, T>, outer: Outer<'a, T>, ahead: &'a [Ahead<T>]| {
    let mut product = product;
    let p = &mut product;
    let columns = p.columns.next_multiple_of(V::LANES);
    if p.rows == 0 || columns == 0 {
        return;
    }
    assert!(p.depth == 0 || (p.rows - 1) * p.a_row + (p.depth - 1) * p.a_column < p.a.len());
    assert!(p.depth == 0 || (p.depth - 1) * p.b_row + columns <= p.b.len());
    assert!((p.rows - 1) * p.c_row + columns <= p.c.len());
    assert!(outer.is_none_or(|(factors, line)| p.rows <= factors.len() && columns <= line.len()));
    // Narrow products take twice as many rows, for as many accumulators.
    // SAFETY: forwarded to the caller.
    unsafe {
        if const { V::BLOCK_COLUMNS > 1 } && 2 * columns <= V::BLOCK_COLUMNS * V::LANES {
            blocks::<V, { 2 * BLOCK_ROWS }>(p, columns, outer, ahead);
        } else {
            blocks::<V, BLOCK_ROWS>(p, columns, outer, ahead);
        }
    }
});

/// Bytes of B in a block of the depth, which stay in the first cache while rows of A and C pass by. With 64 kB in one piece, from the
/// second cache, products were a fifth to a third slower; with all of a small first cache those of depth 256 are 4 to 7 % slower.
const fn b_bytes<V: Vector>() -> usize {
    if V::SMALL_CACHES { 16 << 10 } else { 32 << 10 }
}

/// All of a product, in blocks of so many rows and of a depth whose rows of B stay in the first cache while all rows pass by.
#[inline(always)]
unsafe fn blocks<V: Vector, const ROWS: usize>(
    p: &mut Product<'_, V::Element>,
    columns: usize,
    outer: Outer<'_, V::Element>,
    ahead: &[Ahead<V::Element>],
) {
    let deep = (b_bytes::<V>() / size_of::<V::Element>() / columns).max(16);
    for deep_from in (0..p.depth.max(1)).step_by(deep) {
        let deep_to = (deep_from + deep).min(p.depth);
        let begun = p.accumulate || deep_from > 0;
        // What is done on the way is done once.
        let (outer, ahead) = if deep_from == 0 { (outer, ahead) } else { (None, &[][..]) };
        let b_ahead = Ahead::starting_at(p.b.as_ptr().wrapping_add(deep_to * p.b_row), p.b_row, deep, columns);
        let mut next = 0;
        while next < p.rows {
            let row = next;
            let tall = const { ROWS == BLOCK_ROWS && V::BLOCK_COLUMNS > 1 } && p.rows - row >= TALL_ROWS;
            next = p.rows.min(row + if tall { TALL_ROWS } else { ROWS });
            for ahead in ahead {
                // SAFETY: forwarded to the caller.
                unsafe { ahead.fetch::<V>(row..next, p.rows) };
            }
            // A large second cache is quicker without.
            if V::SMALL_CACHES && p.b_goes_on {
                // SAFETY: as above.
                unsafe { b_ahead.fetch::<V>(row..next, p.rows) };
            }
            let last = next - 1;
            let (depth_from, depth_to) = p.a_band.columns(row, last, p.depth);
            let depth = (depth_from.max(deep_from), depth_to.min(deep_to));
            if deep_from > 0 && depth.0 >= depth.1 {
                continue;
            }
            let (from, to) = p.c_band.columns(row, last, columns);
            let from = from / V::LANES * V::LANES;
            // SAFETY: rows, columns and depth lie in the slices by the caller's assertions.
            unsafe {
                by_whole_registers!(from, to, V::BLOCK_COLUMNS, N, |column| {
                    if const { ROWS == BLOCK_ROWS && V::BLOCK_COLUMNS > 1 } && tall {
                        tile::<V, N, TALL_ROWS>(p, outer, (row, last), depth, begun, column);
                    } else {
                        tile::<V, N, ROWS>(p, outer, (row, last), depth, begun, column);
                    }
                });
            };
        }
    }
}

/// `ROWS` rows and `N` registers of C, which are added to if they are `begun`. Rows beyond `last` repeat it, which writes the same
/// numbers again.
// Counted loops over registers unroll; iterators over two arrays at once are not sure to.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tile<V: Vector, const N: usize, const ROWS: usize>(
    p: &mut Product<'_, V::Element>,
    outer: Outer<'_, V::Element>,
    (row, last): (usize, usize),
    (from, to): (usize, usize),
    begun: bool,
    column: usize,
) {
    // SAFETY: the caller checked that rows `row..=last`, `N` registers from `column` and `from..to` lie in the slices.
    unsafe {
        let rows: [usize; ROWS] = std::array::from_fn(|r| (row + r).min(last));
        let c = p.c.as_mut_ptr().add(column);
        let mut sums = [[V::splat(V::Element::ZERO); N]; ROWS];
        if begun {
            for r in 0..ROWS {
                for n in 0..N {
                    sums[r][n] = V::load(c.add(rows[r] * p.c_row + n * V::LANES));
                }
            }
        }
        if let Some((factors, line)) = outer {
            for n in 0..N {
                let line = V::load(line.as_ptr().add(column + n * V::LANES));
                for r in 0..ROWS {
                    sums[r][n] = V::splat(*factors.as_ptr().add(rows[r])).mul_add(line, sums[r][n]);
                }
            }
        }
        let a: [*const V::Element; ROWS] = std::array::from_fn(|r| p.a.as_ptr().wrapping_add(rows[r] * p.a_row));
        let b = p.b.as_ptr().wrapping_add(column);
        for k in from..to {
            let mut b_row = [V::splat(V::Element::ZERO); N];
            for n in 0..N {
                b_row[n] = V::load(b.add(k * p.b_row + n * V::LANES));
            }
            for r in 0..ROWS {
                let factor = V::splat(*a[r].add(k * p.a_column));
                for n in 0..N {
                    sums[r][n] = factor.mul_add(b_row[n], sums[r][n]);
                }
            }
        }
        for r in 0..ROWS {
            for n in 0..N {
                sums[r][n].store(c.add(rows[r] * p.c_row + n * V::LANES));
            }
        }
    }
}

// Makes the elements of a block outside `band` 0 and adds each row's sum to `sums`.
operation!(MaskAndSum, |block: &'a mut [T], row_length: usize, columns: usize, band: Band, sums: &'a mut [T]| {
    let columns = columns.next_multiple_of(V::LANES);
    for (row, total) in sums.iter_mut().enumerate() {
        let line = &mut block[row * row_length..][..columns];
        // SAFETY: forwarded to the caller.
        *total += unsafe { mask_and_sum_row::<V>(line, band.columns(row, row, columns)) };
    }
});

/// Makes the numbers of a row, whole registers of them, outside of `from..to` 0, and gives the sum of the others.
#[inline(always)]
pub unsafe fn mask_and_sum_row<V: Vector>(line: &mut [V::Element], (from, to): (usize, usize)) -> V::Element {
    assert!(line.len().is_multiple_of(V::LANES));
    line[..from].fill(V::Element::ZERO);
    line[to..].fill(V::Element::ZERO);
    // SAFETY: forwarded to the caller; the row is a whole number of registers.
    unsafe {
        let mut sum = V::splat(V::Element::ZERO);
        let mut column = from / V::LANES * V::LANES;
        while column < to {
            sum = sum.add(V::load(line.as_ptr().add(column)));
            column += V::LANES;
        }
        sum.sum()
    }
}

/// Makes the elements of a block of rows `row_length` apart outside `band` 0 and adds each row's sum to `sums`.
pub fn mask_and_sum<T: Real>((block, row_length): (&mut [T], usize), columns: usize, band: Band, sums: &mut [T]) {
    dispatch(MaskAndSum { block, row_length, columns, band, sums })
}

// Makes the elements of a block outside `band` 0.
operation!(ZeroOutside, |block: &'a mut [T], row_length: usize, rows: usize, columns: usize, band: Band| {
    let columns = columns.next_multiple_of(V::LANES);
    for row in 0..rows {
        let line = &mut block[row * row_length..][..columns];
        let (from, to) = band.columns(row, row, columns);
        line[..from].fill(V::Element::ZERO);
        line[to..].fill(V::Element::ZERO);
    }
});

/// Makes the elements of a block of rows `row_length` apart outside `band` 0.
pub fn zero_outside<T: Real>((block, row_length): (&mut [T], usize), (rows, columns): (usize, usize), band: Band) {
    dispatch(ZeroOutside { block, row_length, rows, columns, band })
}
