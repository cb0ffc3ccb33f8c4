//! Triangular systems of a chunk, by substitution: as exact as the recurrence itself, however ill-conditioned they are.

use super::loops::SolveBlock;
use super::problem::{BLOCK, CHUNK};
use crate::simd::product::Product;
use crate::simd::rows::pieces;
use crate::simd::{Real, dispatch};

/// `U ← (I − A)⁻¹ U` for a tile `A` that is 0 from the diagonal on; `U` has rows of `wide` numbers, `columns` of which count.
pub(super) fn solve<T: Real>(a: &[T], rows: usize, u: &mut [T], [wide, columns]: [usize; 2]) {
    for (first, count) in pieces(0..rows, BLOCK) {
        let (before, own) = u.split_at_mut(first * wide);
        if first > 0 {
            let a = (&a[first * CHUNK..], CHUNK);
            Product::of(a, (before, wide), (&mut *own, wide), [count, columns, first]).accumulate(true).compute();
        }
        let a = &a[first * CHUNK + first..];
        dispatch(SolveBlock { a, a_row: CHUNK, rows: count, transposed: false, u: own, row: wide });
    }
}

/// `U ← (I − Aᵀ)⁻¹ U`.
pub(super) fn solve_transposed<T: Real>(a: &[T], rows: usize, u: &mut [T], [wide, columns]: [usize; 2]) {
    for (first, count) in pieces(0..rows, BLOCK).rev() {
        let end = first + count;
        let (own, after) = u.split_at_mut(end * wide);
        let own = &mut own[first * wide..];
        if end < rows {
            let a = (&a[end * CHUNK + first..], CHUNK);
            let sizes = [count, columns, rows - end];
            Product::of_transposed(a, (after, wide), (&mut *own, wide), sizes).accumulate(true).compute();
        }
        let a = &a[first * CHUNK + first..];
        dispatch(SolveBlock { a, a_row: CHUNK, rows: count, transposed: true, u: own, row: wide });
    }
}
