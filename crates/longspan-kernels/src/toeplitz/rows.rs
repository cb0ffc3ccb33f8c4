//! Rows of a call as blocks of features and values, and the gradients of such blocks taken back to rows.

use super::problem::{Problem, TILE, Unit};
use crate::call::GradientSink;
use crate::feature_map::elementwise::{Shift, copy_rows};
use crate::feature_map::mapping::MapBuffers;
use crate::feature_map::rows::{RawRows, Side};
use crate::simd::Real;
use crate::simd::block::store;
use crate::simd::rows::{Rows, pieces};

impl<T: Real> Problem<'_, T> {
    /// Loads the features of `rows` queries of a head, and the exponents subtracted from them.
    pub fn load_queries(
        &self,
        (unit, head): (&Unit<'_, T>, usize),
        (row, rows): (usize, usize),
        (to, shifts): (&mut [T], &mut [T]),
        map: &mut MapBuffers<'_, T>,
    ) {
        let queries = self.queries(unit, head).skip(row);
        for (first, count) in pieces(0..rows, TILE) {
            let to = &mut to[first * self.head_width..];
            let shift = self.mapping.query_shift(&mut shifts[first..][..count]);
            let rows = RawRows::new(Side::Query(head), queries.skip(first), count);
            self.mapping.write(rows, shift, to, self.head_width, map.work);
        }
    }

    /// Loads the features of at most [`TILE`] keys from `first` on, relative to the exponents of `shift`; 0 for those
    /// ignored.
    pub fn load_keys(
        &self,
        unit: &Unit<'_, T>,
        (first, count): (usize, usize),
        shift: Shift<'_, T>,
        to: &mut [T],
        map: &mut MapBuffers<'_, T>,
    ) {
        let (side, from, ignored) =
            (Side::Key(unit.kv_head), unit.k.skip(first), unit.sequence.padding(first..first + count));
        self.mapping.write(RawRows { side, from, count, ignored }, shift, to, self.head_width, map.work);
    }

    /// Loads the values of keys from `first` on; 0 for those ignored.
    pub fn load_values(&self, unit: &Unit<'_, T>, (first, count): (usize, usize), to: &mut [T]) {
        let sizes = (count, self.dims.value_dim);
        copy_rows(unit.v.skip(first), sizes, unit.sequence.padding(first..first + count), (to, self.value_width));
    }

    /// The gradients of at most [`TILE`] raw rows, and the length of a row in them, from their features and the gradients
    /// of those. Rows that do not `count` get anything, and what stands in them reaches no sum; those of the map's own
    /// matrix are added to `sums`.
    pub fn pull_back<'x>(
        &self,
        (side, from): (Side, Rows<'_, T>),
        (rows, counts): (usize, impl Fn(usize) -> bool),
        (features, d): (&mut [T], &'x mut [T]),
        sums: &mut [T],
        map: &'x mut MapBuffers<'_, T>,
    ) -> (&'x [T], usize) {
        let width = self.head_width;
        let mut ignored = [false; TILE];
        for row in (0..rows).filter(|&row| !counts(row)) {
            ignored[row] = true;
            features[row * width..][..width].fill(T::ZERO);
            d[row * width..][..width].fill(T::ZERO);
        }
        let rows = RawRows { side, from, count: rows, ignored: Some(&ignored[..rows]) };
        self.mapping.pull_back(rows, features, d, width, sums, map)
    }

    /// Writes the gradients of at most [`TILE`] queries, as [`pull_back`](Self::pull_back) gives them.
    pub fn write_queries(
        &self,
        (unit, head): (&Unit<'_, T>, usize),
        (first, count): (usize, usize),
        features: (&mut [T], &mut [T]),
        sums: &mut [T],
        map: &mut MapBuffers<'_, T>,
        sink: GradientSink<'_, T>,
    ) {
        let from = (Side::Query(head), self.queries(unit, head).skip(first));
        let sees = |row: usize| self.sees(unit, first + row);
        let (raw, width) = self.pull_back(from, (count, sees), features, sums, map);
        for row in 0..count {
            let token = unit.sequence.query_start + first + row;
            // SAFETY: each (batch, head, token) belongs to one task.
            let to = unsafe { sink.dq.row(unit.sequence.batch, head, token, self.dims.head_dim) };
            if sees(row) {
                store(&raw[row * width..], T::ONE, to);
            } else {
                to.fill(T::ZERO);
            }
        }
    }

    /// Writes the gradients of at most [`TILE`] keys, as [`pull_back`](Self::pull_back) gives them, and those of their values,
    /// which without `dv` stand at their places already; 0 for keys that do not count.
    #[allow(clippy::too_many_arguments)]
    pub fn write_keys(
        &self,
        unit: &Unit<'_, T>,
        (first, count): (usize, usize),
        counts: impl Fn(usize) -> bool,
        features: (&mut [T], &mut [T]),
        dv: Option<&[T]>,
        sums: &mut [T],
        map: &mut MapBuffers<'_, T>,
        sink: GradientSink<'_, T>,
    ) {
        let from = (Side::Key(unit.kv_head), unit.k.skip(first));
        let (dk, width) = self.pull_back(from, (count, |row| counts(first + row)), features, sums, map);
        for row in 0..count {
            // SAFETY: each key belongs to one task.
            let (to_k, to_v) = unsafe { sink.key(unit.key_place(first + row), &self.dims) };
            if !counts(first + row) {
                to_k.fill(T::ZERO);
                to_v.fill(T::ZERO);
                continue;
            }
            store(&dk[row * width..], T::ONE, to_k);
            if let Some(dv) = dv {
                store(&dv[row * self.value_width..], T::ONE, to_v);
            }
        }
    }
}
