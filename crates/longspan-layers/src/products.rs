//! Matrix products by `gemm`, and memory that is not cleared first.

use std::mem::MaybeUninit;

use gemm::{Parallelism, gemm};

use longspan_core::error::Error;
use longspan_core::memory::zeros;
use longspan_core::simd::block::{add_scaled, transpose};
use longspan_core::threads::{share, share_many};

/// Numbers that are written before they are read.
pub(super) struct Fresh {
    numbers: Vec<f32>,
    len: usize,
}

impl Fresh {
    /// Room for `len` numbers.
    pub fn new(len: usize) -> Result<Self, Error> {
        let mut numbers = Vec::new();
        numbers.try_reserve_exact(len).map_err(|_| Error::Memory { bytes: len.saturating_mul(size_of::<f32>()) })?;
        Ok(Self { numbers, len })
    }

    /// All of it.
    pub fn room(&mut self) -> &mut [MaybeUninit<f32>] {
        &mut self.numbers.spare_capacity_mut()[..self.len]
    }

    /// The numbers.
    ///
    /// # Safety
    /// All of the room has been written.
    pub unsafe fn written(mut self) -> Vec<f32> {
        // SAFETY: the room was reserved, and the caller wrote all of it.
        unsafe { self.numbers.set_len(self.len) };
        self.numbers
    }
}

/// `len` zeros, whose pages cost nothing until they are used.
pub(super) fn try_zeros(len: usize) -> Result<Vec<f32>, Error> {
    if len == 0 { Ok(Vec::new()) } else { zeros(len) }
}

/// Memory in pieces of these lengths.
pub(super) fn cut<T, const N: usize>(mut memory: &mut [T], pieces: [usize; N]) -> [&mut [T]; N] {
    pieces.map(|len| {
        let (piece, rest) = std::mem::take(&mut memory).split_at_mut(len);
        memory = rest;
        piece
    })
}

/// A matrix in a slice; either stride may be 1.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub numbers: &'a [f32],
    pub row: usize,
    pub column: usize,
}

impl<'a> Matrix<'a> {
    /// Row after row.
    pub fn rows(numbers: &'a [f32], columns: usize) -> Self {
        Self { numbers, row: columns, column: 1 }
    }

    /// The transpose.
    pub fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        rows == 0 || columns == 0 || (rows - 1) * self.row + (columns - 1) * self.column < self.numbers.len()
    }
}

/// `C = A·B` for `m × k` and `k × n` on this thread, and gives `C` as it is then.
pub(super) fn product<'c>(
    [m, k, n]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &'c mut [MaybeUninit<f32>],
) -> &'c mut [f32] {
    assert_eq!(c.len(), m * n, "a result of other sizes");
    multiply([m, k, n], a, b, c.as_mut_ptr().cast(), [0.0, 1.0]);
    // SAFETY: the product wrote every number.
    unsafe { c.assume_init_mut() }
}

/// Sums of `xᵀ·dz` over rows, the gradient of a weight `[inputs, outputs]`, in memory that is not cleared first.
///
/// If there are fewer outputs than inputs it holds the transpose, which [`upright`] turns back: `gemm` is faster where the result is
/// wide (260 instead of 226 GFLOP/s for 1,024 × 256).
pub(super) struct WeightGradient<'a> {
    to: &'a mut [MaybeUninit<f32>],
    sizes: [usize; 2],
    begun: bool,
}

impl<'a> WeightGradient<'a> {
    /// Of nothing yet.
    pub fn new(to: &'a mut [MaybeUninit<f32>], sizes: [usize; 2]) -> Self {
        assert_eq!(to.len(), sizes[0] * sizes[1], "a gradient of other sizes");
        Self { to, sizes, begun: false }
    }

    /// Adds what so many rows give. The first call writes every number.
    pub fn add(&mut self, rows: usize, x: &[f32], dz: &[f32]) {
        let [inputs, outputs] = self.sizes;
        let (x, dz) = (Matrix::rows(x, inputs), Matrix::rows(dz, outputs));
        let (sizes, a, b) = match is_turned(self.sizes) {
            true => ([outputs, rows, inputs], dz, x),
            false => ([inputs, rows, outputs], x, dz),
        };
        multiply(sizes, a.transposed(), b, self.to.as_mut_ptr().cast(), [f32::from(self.begun), 1.0]);
        self.begun = true;
    }
}

fn is_turned([inputs, outputs]: [usize; 2]) -> bool {
    outputs < inputs
}

/// The gradient of a weight from what a [`WeightGradient`] holds, or the sum of several.
pub(super) fn upright(sum: Vec<f32>, [inputs, outputs]: [usize; 2]) -> Result<Vec<f32>, Error> {
    if is_turned([inputs, outputs]) { transposed(&sum, inputs, [outputs, inputs]) } else { Ok(sum) }
}

/// The transpose of rows that begin `stride` numbers apart.
///
/// A product by a transposed weight reads it across its rows, once for every block of rows that it multiplies; where they are a power
/// of two apart, all fall on a few sets of the cache. Turned once before, 512 rows of 1,024 numbers are multiplied at 277 instead of
/// 202 GFLOP/s, 128 rows at 261 instead of 108.
pub(super) fn transposed(matrix: &[f32], stride: usize, [rows, columns]: [usize; 2]) -> Result<Vec<f32>, Error> {
    /// Columns that a thread takes at a time.
    const STRIP: usize = 64;
    /// A whole number of registers of every instruction set.
    const SIDE: usize = 16;
    let mut turned = try_zeros(rows * columns)?;
    if turned.is_empty() {
        return Ok(turned);
    }
    let strips = turned.chunks_mut(STRIP * rows).enumerate();
    share_many(rows * columns, strips, |(strip, to)| {
        let (first, count) = (strip * STRIP, to.len() / rows);
        let (whole_rows, whole_columns) = (rows / SIDE * SIDE, count / SIDE * SIDE);
        transpose((&matrix[first..], stride), (whole_rows, whole_columns), (to, rows));
        for (column, to) in to.chunks_exact_mut(rows).enumerate() {
            let from = if column < whole_columns { whole_rows } else { 0 };
            for (row, to) in to.iter_mut().enumerate().skip(from) {
                *to = matrix[row * stride + first + column];
            }
        }
    });
    Ok(turned)
}

/// `to += Σ` of rows as long as it.
pub(super) fn add_rows(rows: &[f32], to: &mut [f32]) {
    if !to.is_empty() {
        rows.chunks_exact(to.len()).for_each(|row| add_scaled(to, 1.0, row));
    }
}

/// The sums of matrices and of rows that parts of the work have formed, in their order; `None` of none.
pub(super) fn sum_parts(mut parts: impl Iterator<Item = (Vec<f32>, Vec<f32>)>) -> Option<(Vec<f32>, Vec<f32>)> {
    /// Pieces that threads take.
    const PIECES: usize = 8;
    let (mut matrix, mut row) = parts.next()?;
    for (other_matrix, other_row) in parts {
        let piece = matrix.len().div_ceil(PIECES).next_multiple_of(16);
        share(matrix.chunks_mut(piece).zip(other_matrix.chunks(piece)), |(to, part)| add_scaled(to, 1.0, part));
        add_scaled(&mut row, 1.0, &other_row);
    }
    Some((matrix, row))
}

/// `C ← f C + g A·B` for the factors `f` and `g`, on all threads where it is long.
pub(super) fn add_product([m, k, n]: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], factors: [f32; 2]) {
    /// Rows that a thread takes at a time, and multiplications that take about as long as a hand-over from outside the pool.
    const ROWS: usize = 48;
    const FEW: usize = 1 << 22;
    assert_eq!(c.len(), m * n, "a result of other sizes");
    let rows = if m * k * n < FEW { m } else { ROWS };
    share(c.chunks_mut((rows * n).max(1)).enumerate(), |(piece, c)| {
        let a = Matrix { numbers: &a.numbers[piece * rows * a.row..], ..a };
        multiply([c.len() / n, k, n], a, b, c.as_mut_ptr(), factors);
    });
}

/// `C ← f C + g A·B`. `c` has room for `m · n` numbers, which are there unless `f` is 0.
fn multiply([m, k, n]: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, c: *mut f32, [of_c, of_product]: [f32; 2]) {
    assert!(a.holds(m, k) && b.holds(k, n), "factors of other sizes");
    let strides = |matrix: Matrix<'_>| (matrix.column as isize, matrix.row as isize);
    let ((a_column, a_row), (b_column, b_row)) = (strides(a), strides(b));
    // SAFETY: the factors hold what is read by the assertion above, and the callers checked the result.
    unsafe {
        gemm(
            m,
            n,
            k,
            c,
            1,
            n as isize,
            of_c != 0.0,
            a.numbers.as_ptr(),
            a_column,
            a_row,
            b.numbers.as_ptr(),
            b_column,
            b_row,
            of_c,
            of_product,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_is_right_at_every_edge_of_strips_and_registers() {
        for [rows, columns] in [[0, 3], [3, 0], [1, 1], [16, 64], [20, 150], [150, 20], [33, 129], [400, 400]] {
            let stride = columns + 5;
            let matrix: Vec<f32> = (0..rows * stride).map(|n| n as f32).collect();
            let turned = transposed(&matrix, stride, [rows, columns]).unwrap();
            assert_eq!(turned.len(), rows * columns);
            for (n, &number) in turned.iter().enumerate() {
                assert_eq!(number, matrix[n % rows * stride + n / rows], "{rows} × {columns}, {n}");
            }
        }
    }
}
