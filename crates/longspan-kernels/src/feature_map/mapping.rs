//! A feature map ready for the rows of one call, of either kind.

use super::FeatureMap;
use super::rows::{RawRows, RowMap, Side};
use crate::call::{Arena, Dims, Scratch, View};
use crate::feature_map::elementwise::{Features, LoadFeatures, PullBackFeatures, Shift};
use crate::simd::block::{all_finite, dot, largest, largest_of_rows};
use crate::simd::rows::Rows;
use crate::simd::{Real, dispatch};

/// A feature map ready for the rows of one call.
pub(crate) struct Mapping<'a, T: 'static> {
    pub map: FeatureMap,
    /// Whether features are relative to an exponent.
    pub exponential: bool,
    /// The map, if it takes whole rows.
    pub rows: Option<RowMap<'a, T>>,
    /// How many parameters the map has of its own.
    pub parameters: usize,
    pub features: usize,
    head_dim: usize,
    kv_heads: usize,
    keys: usize,
    /// Of an exponential map of whole rows the largest exponent of each key, `[batch, kv_heads, keys]`.
    row_max: Vec<T>,
}

/// What maps of whole rows work with; empty for others.
pub(crate) struct MapBuffers<'s, T> {
    /// Gradients of raw rows.
    raw: &'s mut [T],
    pub work: &'s mut [T],
}

impl<'s, T: Real> MapBuffers<'s, T> {
    pub fn new(mapping: &Mapping<'_, T>, rows: usize, arena: &mut Arena<'s, T>) -> Self {
        let map = mapping.rows.as_ref();
        Self {
            raw: arena.take(map.map_or(0, |map| rows * map.raw_width())),
            work: arena.take(map.map_or(0, |map| map.work_len(rows))),
        }
    }
}

impl<'a, T: Real> Mapping<'a, T> {
    /// For a call whose parameters, of checked lengths, end with the map's own.
    pub fn new(map: FeatureMap, dims: &Dims, parameters: &[&'a [T]]) -> Self {
        let own = map.parameters(dims).len();
        Self {
            map,
            exponential: map.is_exponential(),
            rows: RowMap::new(map, dims, &parameters[parameters.len() - own..]),
            parameters: own,
            features: map.features(dims.head_dim),
            head_dim: dims.head_dim,
            kv_heads: dims.kv_heads,
            keys: dims.keys,
            row_max: Vec::new(),
        }
    }

    /// Numbers in the sums that the gradient of one head's own matrix is formed in.
    pub fn sums_len(&self) -> usize {
        self.rows.as_ref().map_or(0, RowMap::sums_len)
    }

    /// Does what a map of whole rows needs before any row is looked at; `k` are the keys, if they are mapped.
    pub fn prepare(&mut self, k: Option<&View<'_, T>>, dims: &Dims, scratch: &mut Scratch<T>) {
        if let Some(map) = &mut self.rows {
            map.prepare();
            self.row_max = k.map_or_else(Vec::new, |k| map.all_max(k, dims, scratch));
        }
    }

    /// The largest exponent of a key under an exponential map, given its place in the call and its row; not finite where
    /// there is none.
    pub fn key_max(&self, (batch, kv_head, key): (usize, usize, usize), row: &[T]) -> T {
        match self.rows {
            Some(_) => self.row_max[(batch * self.kv_heads + kv_head) * self.keys + key],
            None => largest(row),
        }
    }

    /// The same of all keys from one on.
    pub fn all_key_max(&self, [batch, kv_head, first]: [usize; 3], rows: Rows<'_, T>, to: &mut [T]) {
        let place = (batch * self.kv_heads + kv_head) * self.keys + first;
        match self.rows {
            Some(_) => to.copy_from_slice(&self.row_max[place..][..to.len()]),
            None => largest_of_rows(rows, self.head_dim, to),
        }
    }

    /// Whether rows, and what becomes of them, are finite.
    pub fn all_finite(&self, rows: Rows<'_, T>, count: usize) -> bool {
        if self.rows.is_none() {
            return all_finite(rows, count, self.head_dim);
        }
        // Products of a row's numbers are part of its features.
        let row = |n: usize| rows.row(n, self.head_dim);
        (0..count).map(row).all(|row| dot(row, row).is_finite())
    }

    /// Writes features into a block whose rows are `stride` apart; 0 for rows ignored.
    pub fn write(&self, rows: RawRows<'_, T>, shift: Shift<'_, T>, to: &mut [T], stride: usize, work: &mut [T]) {
        if let Some(map) = &self.rows {
            map.write(rows, shift, to, stride, work);
            return;
        }
        let RawRows { from, count, ignored, .. } = rows;
        let (map, width) = (self.map, self.head_dim);
        dispatch(LoadFeatures { map, shift, from, count, width, ignored, to, to_row: stride });
    }

    /// The same features for who turns them: written to `to`, or, where the map is made of single numbers, to be made on the way and left
    /// there if they are to be kept.
    pub fn features<'x>(
        &self,
        rows: RawRows<'x, T>,
        shift: Shift<'_, T>,
        (to, keep): (&'x mut [T], bool),
        stride: usize,
        work: &mut [T],
    ) -> Features<'x, T> {
        match shift {
            Shift::One(shift) if self.rows.is_none() => {
                Features::Mapped { map: self.map, shift, from: rows.from, ignored: rows.ignored, to, keep }
            }
            shift => {
                self.write(rows, shift, to, stride, work);
                Features::Formed(to)
            }
        }
    }

    /// What is subtracted from the exponents of queries, whose own are written to `row_max`: any number cancels in the division, and
    /// the largest exponent of a row keeps its features in (0, 1].
    pub fn query_shift<'s>(&self, row_max: &'s mut [T]) -> Shift<'s, T> {
        row_max.fill(T::ZERO);
        if self.exponential { Shift::Own(row_max) } else { Shift::One(T::ZERO) }
    }

    /// The exponents that [`query_shift`](Self::query_shift) subtracts from `count` queries.
    pub fn query_shifts(&self, head: usize, from: Rows<'_, T>, count: usize, shifts: &mut [T], work: &mut [T]) {
        let shifts = &mut shifts[..count];
        match &self.rows {
            _ if !self.exponential => shifts.fill(T::ZERO),
            Some(map) => map.row_max(RawRows::new(Side::Query(head), from, count), shifts, work),
            None => largest_of_rows(from, self.head_dim, shifts),
        }
        shifts.iter_mut().filter(|top| !top.is_finite()).for_each(|top| *top = T::ZERO);
    }

    /// The gradient of raw rows and the length of a row in it, from their features `phi` and the gradient `d` of those,
    /// blocks whose rows are `stride` apart; that of the map's parameters is added to `sums`.
    pub fn pull_back<'x>(
        &self,
        rows: RawRows<'_, T>,
        phi: &[T],
        d: &'x mut [T],
        stride: usize,
        sums: &mut [T],
        buffers: &'x mut MapBuffers<'_, T>,
    ) -> (&'x [T], usize) {
        let Some(map) = &self.rows else {
            let (x, count, width) = (rows.from, rows.count, self.head_dim);
            dispatch(PullBackFeatures { map: self.map, x, phi, d, count, width, row_length: stride });
            return (d, stride);
        };
        map.pull_back(rows, phi, (d, stride), buffers.raw, sums, buffers.work);
        (buffers.raw, map.raw_width())
    }
}
