//! Matrix products by `gemm`, and memory that is not cleared first.

use std::mem::MaybeUninit;

use gemm::{Parallelism, gemm};

use crate::call::zeros;
use crate::error::Error;
use crate::simd::block::add_scaled;
use crate::threads::share;

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
    multiply([m, k, n], a, b, c.as_mut_ptr().cast(), false);
    // SAFETY: the product wrote every number.
    unsafe { c.assume_init_mut() }
}

/// A sum of products in memory that is not cleared first.
pub(super) enum Sum<'a> {
    Empty(&'a mut [MaybeUninit<f32>]),
    Some(&'a mut [f32]),
}

impl Sum<'_> {
    /// With `A·B` added.
    pub fn add(self, sizes: [usize; 3], a: Matrix<'_>, b: Matrix<'_>) -> Self {
        Self::Some(match self {
            Self::Empty(to) => product(sizes, a, b, to),
            Self::Some(to) => {
                add_product(sizes, a, b, to);
                to
            }
        })
    }
}

/// `C += A·B`.
pub(super) fn add_product([m, k, n]: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32]) {
    assert_eq!(c.len(), m * n, "a result of other sizes");
    multiply([m, k, n], a, b, c.as_mut_ptr(), true);
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

/// `c` has room for `m · n` numbers, which are there if they are to be added to.
fn multiply([m, k, n]: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, c: *mut f32, add: bool) {
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
            add,
            a.numbers.as_ptr(),
            a_column,
            a_row,
            b.numbers.as_ptr(),
            b_column,
            b_row,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
