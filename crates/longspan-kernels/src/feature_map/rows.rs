//! Maps of whole rows on blocks: features of a chunk of raw rows, and gradients back.

use std::sync::Arc;

use super::squares::{self, Squares, SquaresBack};
use super::{FeatureMap, HedgehogNorm, draw, scale};
use crate::call::{Dims, Scratch, SharedRows, View};
use crate::feature_map::elementwise::{LoadFeatures, Shift, copy_rows};
use crate::simd::block::{add_row_dots, add_scaled, dot, exponentials, floor, multiply, scale_by, transpose};
use crate::simd::product::Product;
use crate::simd::rows::{Rows, padded};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Rows that are mapped at a time where nothing else sets their number.
const CHUNK: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Those of a query head.
    Query(usize),
    /// Those of a key/value head.
    Key(usize),
}

/// Rows of one head before they are mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawRows<'a, T> {
    pub side: Side,
    pub from: Rows<'a, T>,
    pub count: usize,
    /// `true` for rows whose features become 0, whatever stands in them.
    pub ignored: Option<&'a [bool]>,
}

impl<'a, T> RawRows<'a, T> {
    /// The first `count` of some rows, none of them ignored.
    pub fn new(side: Side, from: Rows<'a, T>, count: usize) -> Self {
        Self { side, from, count, ignored: None }
    }

    pub fn one(side: Side, x: &'a [T]) -> Self {
        Self::new(side, Rows { data: x, stride: x.len() }, 1)
    }
}

/// A matrix `W` as products want it.
struct Matrix<T> {
    /// Its rows, `raw_width` apart.
    rows: Vec<T>,
    /// Its columns, whole cache lines apart.
    columns: Vec<T>,
}

/// Where the exponents of a map come from.
enum Weights<'a, T> {
    /// There are none.
    None,
    /// `W` is random, and the same for all heads.
    Drawn(Arc<Matrix<T>>),
    /// `W` is learned, one for each query head and each key/value head: as given, and, once
    /// [prepared](RowMap::prepare), as products want it.
    Learned { given: [&'a [T]; 2], ready: [Vec<Matrix<T>>; 2] },
}

/// A map of rows of one width.
pub(crate) struct RowMap<'a, T: 'static> {
    map: FeatureMap,
    head_dim: usize,
    features: usize,
    /// Rows of `W`.
    exponents: usize,
    /// Numbers from one row of [`exponents`](Self::exponents) to the next, and the same for raw rows: whole cache lines.
    width: usize,
    raw_width: usize,
    weights: Weights<'a, T>,
}

impl<'a, T: Real> RowMap<'a, T> {
    /// None for elementwise maps. `parameters` are the map's own, of checked lengths.
    pub fn new(map: FeatureMap, dims: &Dims, parameters: &[&'a [T]]) -> Option<Self> {
        if map.is_elementwise() {
            return None;
        }
        let (head_dim, features) = (dims.head_dim, map.features(dims.head_dim));
        let (weights, exponents) = match map {
            FeatureMap::Prf(_) | FeatureMap::Nprf(_) => (Weights::Drawn(drawn(map, head_dim)), features),
            FeatureMap::Hedgehog { .. } => {
                let given = [parameters[0], parameters[1]];
                (Weights::Learned { given, ready: [Vec::new(), Vec::new()] }, features / 2)
            }
            _ => (Weights::None, 0),
        };
        Some(Self {
            map,
            head_dim,
            features,
            exponents,
            width: padded::<T>(exponents),
            raw_width: padded::<T>(head_dim),
            weights,
        })
    }

    /// Brings learned matrices to the form that many rows want.
    pub fn prepare(&mut self) {
        let (exponents, head_dim) = (self.exponents, self.head_dim);
        if let Weights::Learned { given, ready } = &mut self.weights {
            for (given, ready) in given.iter().zip(ready) {
                let each = given.chunks_exact((exponents * head_dim).max(1));
                *ready = each.map(|rows| Matrix::new(rows, exponents, head_dim)).collect();
            }
        }
    }

    /// Whole cache lines of a raw row.
    pub fn raw_width(&self) -> usize {
        self.raw_width
    }

    pub fn work_len(&self, rows: usize) -> usize {
        match self.map {
            FeatureMap::Dpfp { order } => 2 * padded::<T>(2 * self.head_dim + order),
            FeatureMap::Taylor2 => squares::work_len::<T>(self.head_dim),
            FeatureMap::Hedgehog { .. } => rows * (padded::<T>(self.features) + self.width + self.raw_width),
            _ => rows * padded::<T>(self.features),
        }
    }

    /// Numbers in the sums that the gradient of one head's `W` is formed in.
    pub fn sums_len(&self) -> usize {
        if let Weights::Learned { .. } = self.weights { self.exponents * self.raw_width } else { 0 }
    }

    /// Writes features into a block whose rows are `row` apart; 0 for rows ignored, and beyond a row's last feature.
    pub fn write(&self, rows: RawRows<'_, T>, shift: Shift<'_, T>, to: &mut [T], row: usize, work: &mut [T]) {
        let RawRows { from, count, ignored, .. } = rows;
        let features = self.features;
        if self.map.is_exponential() && !matches!(shift, Shift::Own(_)) {
            let width = padded::<T>(features);
            self.exponents(rows, work, width);
            let exponents = Rows { data: &*work, stride: width };
            let (map, from, width) = (FeatureMap::Exp, exponents, features);
            dispatch(LoadFeatures { map, shift, from, count, width, ignored, to, to_row: row });
            return;
        }
        match self.map {
            FeatureMap::Dpfp { order } => {
                let (parts, _) = work.split_at_mut(padded::<T>(2 * self.head_dim + order));
                for n in 0..count {
                    self.products(from.row(n, self.head_dim), order, parts, &mut to[n * row..][..row]);
                }
            }
            FeatureMap::Taylor2 => {
                dispatch(Squares { from, count, head_dim: self.head_dim, to, row, work });
            }
            _ => {
                self.exponents(rows, to, row);
                let mut one = [T::ZERO];
                let row_max = match shift {
                    Shift::Own(row_max) if self.map.is_exponential() => row_max,
                    _ => &mut one,
                };
                for n in 0..count {
                    let line = &mut to[n * row..][..row];
                    // One row at a time, as tops may have room for one.
                    let at = n.min(row_max.len() - 1);
                    row_max[at] = floor();
                    exponentials(line, row, features, &mut row_max[at..=at]);
                    let top = row_max[at];
                    if !top.is_finite() {
                        row_max[at] = T::ZERO;
                    }
                    line[features..].fill(T::ZERO);
                    let factor = match self.map {
                        FeatureMap::Nprf(_) => {
                            (top - T::from_f64(0.5)).exp() * T::from_f64((features as f64).sqrt().recip())
                        }
                        FeatureMap::Hedgehog { norm: HedgehogNorm::Softmax, .. } => T::ONE / sum(&line[..features]),
                        _ => continue,
                    };
                    scale_by(line, factor);
                }
            }
        }
        for n in 0..count {
            if ignored.is_some_and(|ignored| ignored[n]) {
                to[n * row..][..row].fill(T::ZERO);
            }
        }
    }

    /// The largest exponent of each row of an exponential map: −∞ or NaN where none is finite.
    pub fn row_max(&self, rows: RawRows<'_, T>, row_max: &mut [T], work: &mut [T]) {
        let width = padded::<T>(self.features);
        self.exponents(rows, work, width);
        for (row, top) in work.chunks_exact(width).zip(row_max).take(rows.count) {
            *top = row[..self.features].iter().copied().fold(T::NEG_INFINITY, T::max);
        }
    }

    /// The largest exponents of all keys of a call, `[batch, kv_heads, keys]`; none but for an exponential map.
    pub fn all_max(&self, k: &View<'_, T>, dims: &Dims, scratch: &mut Scratch<T>) -> Vec<T> {
        let (heads, keys) = (dims.batch * dims.kv_heads, dims.keys);
        if !self.map.is_exponential() || heads * keys == 0 {
            return Vec::new();
        }
        let mut all = vec![T::ZERO; heads * keys];
        let view = SharedRows::new(&mut all, [keys, 0, 1]);
        let (chunks, per_worker) = (keys.div_ceil(CHUNK), self.work_len(CHUNK.min(keys)));
        let tasks = heads * chunks;
        let scratch = scratch.take(per_worker * threads::count().min(tasks));
        parallel(tasks, scratch, per_worker, |task, work| {
            let (head, first) = (task / chunks, task % chunks * CHUNK);
            let (batch, kv_head) = (head / dims.kv_heads, head % dims.kv_heads);
            let count = CHUNK.min(keys - first);
            // SAFETY: each chunk of a head's keys is one task's own.
            let row_max = unsafe { view.row(head, 0, first, count) };
            let rows = RawRows::new(Side::Key(kv_head), k.rows(batch, kv_head).skip(first), count);
            self.row_max(rows, row_max, work);
        });
        all
    }

    /// Writes the gradient of raw rows into a block whose rows are [`raw_width`](Self::raw_width) apart, from their features
    /// and the gradient `d` of those, which is used up; both are blocks whose rows are `row` apart. That of `W` is added to
    /// `sums`. Rows that are ignored have features 0 and get any gradient.
    pub fn pull_back(
        &self,
        rows: RawRows<'_, T>,
        phi: &[T],
        (d, row): (&mut [T], usize),
        dx: &mut [T],
        sums: &mut [T],
        work: &mut [T],
    ) {
        let RawRows { side, from, count, ignored } = rows;
        let (head_dim, features, raw_width) = (self.head_dim, self.features, self.raw_width);
        let raw = |n: usize| from.row(n, head_dim);
        match self.map {
            FeatureMap::Dpfp { order } => {
                for n in 0..count {
                    self.products_back(raw(n), order, &d[n * row..], work, &mut dx[n * raw_width..][..raw_width]);
                }
            }
            FeatureMap::Taylor2 => {
                dispatch(SquaresBack { from, count, head_dim, d, row, dx, work });
            }
            FeatureMap::Hedgehog { norm, .. } => {
                let (difference, work) = work.split_at_mut(count * self.width);
                for n in 0..count {
                    let (phi, d) = (&phi[n * row..][..features], &mut d[n * row..][..features]);
                    if norm == HedgehogNorm::Softmax {
                        let mean = dot(phi, d);
                        d.iter_mut().for_each(|d| *d -= mean);
                    }
                    multiply(d, phi);
                    let (up, down) = d.split_at(features / 2);
                    let to = difference[n * self.width..].iter_mut();
                    to.zip(up.iter().zip(down)).for_each(|(to, (&up, &down))| *to = up - down);
                }
                self.times_rows(side, count, difference, self.width, dx);
                let block = &mut work[..count * raw_width];
                copy_rows(from, (count, head_dim), ignored, (block, raw_width));
                let sizes = [self.exponents, raw_width, count];
                Product::of_transposed((difference, self.width), (block, raw_width), (sums, raw_width), sizes)
                    .accumulate(true)
                    .compute();
            }
            _ => {
                // What all exponents of a row share.
                let mut shared = [T::ZERO; CHUNK];
                let shared: &mut [T] = if count <= CHUNK { &mut shared } else { &mut work[..count] };
                for n in 0..count {
                    let d = &mut d[n * row..][..features];
                    shared[n] = dot(d, &phi[n * row..]);
                    multiply(d, &phi[n * row..]);
                }
                self.times_rows(side, count, d, row, dx);
                for n in 0..count {
                    let (x, dx) = (raw(n), &mut dx[n * raw_width..][..head_dim]);
                    if let FeatureMap::Prf(_) = self.map {
                        // From −|x′|²/2, which all exponents share.
                        add_scaled(dx, -shared[n] * T::from_f64(scale(head_dim).powi(2)), x);
                    } else {
                        // With x̂ = x/|x|: dx = (g − x̂ (x̂·g)) / |x|.
                        let inverse = inverse_length(x);
                        let along = dot(dx, x) * inverse;
                        add_scaled(dx, -along * inverse, x);
                        scale_by(dx, inverse);
                    }
                }
            }
        }
    }

    /// Writes the gradient of one head's `W` from the sums that [`pull_back`](Self::pull_back) has added to; with
    /// `accumulate` it is added.
    pub fn write_gradient<'x>(
        &self,
        sums: impl Iterator<Item = &'x [T]>,
        head: usize,
        accumulate: bool,
        gradient: &mut [T],
    ) {
        let to = &mut gradient[head * self.exponents * self.head_dim..][..self.exponents * self.head_dim];
        if !accumulate {
            to.fill(T::ZERO);
        }
        for sums in sums {
            for (to, from) in to.chunks_exact_mut(self.head_dim.max(1)).zip(sums.chunks_exact(self.raw_width)) {
                add_scaled(to, T::ONE, from);
            }
        }
    }

    /// Writes the exponents of rows into a block whose rows are `row` apart: `W x` of the map that they are for.
    fn exponents(&self, rows: RawRows<'_, T>, to: &mut [T], row: usize) {
        let RawRows { side, from, count, .. } = rows;
        let (head_dim, exponents) = (self.head_dim, self.exponents);
        let raw = |n: usize| from.row(n, head_dim);
        for n in 0..count {
            let start = match self.map {
                FeatureMap::Prf(_) => {
                    let half = scale(head_dim).powi(2) / 2.0;
                    let square = dot(raw(n), raw(n)) * T::from_f64(half);
                    -(square + T::from_f64((self.features as f64).ln() / 2.0))
                }
                _ => T::ZERO,
            };
            to[n * row..][..row].fill(start);
        }
        if let Weights::None = self.weights {
            return;
        }
        if let Some(matrix) = self.matrix(side) {
            let sizes = [count, exponents, head_dim];
            Product::of((from.data, from.stride), (&matrix.columns, self.width), (to, row), sizes)
                .accumulate(true)
                .compute();
        } else {
            let given = self.given(side);
            for n in 0..count {
                add_row_dots(given, head_dim, raw(n), &mut to[n * row..][..exponents]);
            }
        }
        for n in 0..count {
            let line = &mut to[n * row..][..row];
            match self.map {
                FeatureMap::Nprf(_) => scale_by(line, inverse_length(raw(n))),
                FeatureMap::Hedgehog { .. } => {
                    let (up, down) = line.split_at_mut(exponents);
                    down.iter_mut().zip(up).for_each(|(down, up)| *down = -*up);
                }
                _ => {}
            }
        }
    }

    fn matrix(&self, side: Side) -> Option<&Matrix<T>> {
        match (&self.weights, side) {
            (Weights::None, _) => None,
            (Weights::Drawn(matrix), _) => Some(matrix),
            (Weights::Learned { ready: [matrices, _], .. }, Side::Query(head)) => matrices.get(head),
            (Weights::Learned { ready: [_, matrices], .. }, Side::Key(head)) => matrices.get(head),
        }
    }

    /// A learned `W` as the caller gave it.
    fn given(&self, side: Side) -> &'a [T] {
        let Weights::Learned { given, .. } = &self.weights else { return &[] };
        let (given, head) = match side {
            Side::Query(head) => (given[0], head),
            Side::Key(head) => (given[1], head),
        };
        let len = self.exponents * self.head_dim;
        &given[head * len..][..len]
    }

    /// Writes `g W` for `count` rows `g`.
    fn times_rows(&self, side: Side, count: usize, g: &[T], row: usize, to: &mut [T]) {
        let Some(matrix) = self.matrix(side) else { return };
        let sizes = [count, self.raw_width, self.exponents];
        Product::of((g, row), (&matrix.rows, self.raw_width), (to, self.raw_width), sizes).compute();
    }

    /// `r_i r_{i+n}`.
    fn products(&self, x: &[T], order: usize, parts: &mut [T], to: &mut [T]) {
        let width = 2 * self.head_dim;
        let (to, rest) = to.split_at_mut(width * order);
        rest.fill(T::ZERO);
        if width == 0 {
            return;
        }
        signed_parts(x, &mut parts[..width + order]);
        for (to, n) in to.chunks_exact_mut(width).zip(1..) {
            to.copy_from_slice(&parts[..width]);
            multiply(to, &parts[n..]);
        }
    }

    fn products_back(&self, x: &[T], order: usize, d: &[T], work: &mut [T], dx: &mut [T]) {
        let (head_dim, width) = (self.head_dim, 2 * self.head_dim);
        dx.fill(T::ZERO);
        if width == 0 {
            return;
        }
        let (parts, d_parts) = work.split_at_mut(padded::<T>(width + order));
        let d_parts = &mut d_parts[..width + order];
        signed_parts(x, &mut parts[..width + order]);
        d_parts.fill(T::ZERO);
        for n in 1..=order {
            let d = &d[(n - 1) * width..][..width];
            for (i, &d) in d.iter().enumerate() {
                d_parts[i] += d * parts[i + n];
            }
            for (i, &d) in d.iter().enumerate() {
                d_parts[i + n] += d * parts[i];
            }
        }
        // What lies round the end belongs to the beginning.
        for i in width..width + order {
            let beyond = d_parts[i];
            d_parts[i % width] += beyond;
        }
        for (i, (dx, &x)) in dx.iter_mut().zip(x).enumerate() {
            // Where a part is 0 for a number of the other sign, so is its slope.
            if x > T::ZERO {
                *dx = d_parts[i];
            } else if x < T::ZERO {
                *dx = -d_parts[head_dim + i];
            } else if x != T::ZERO {
                *dx = x;
            }
        }
    }
}

impl<T: Real> Matrix<T> {
    fn new(rows: &[T], count: usize, width: usize) -> Self {
        let (row, column) = (padded::<T>(width), padded::<T>(count));
        let mut all = Self { rows: vec![T::ZERO; column * row], columns: vec![T::ZERO; row * column] };
        let from = Rows { data: rows, stride: width };
        copy_rows(from, (count, width), None, (&mut all.rows, row));
        transpose((&all.rows, row), (column, row), (&mut all.columns, column));
        all
    }
}

/// The random matrix of a map for rows of one width, in a number type.
fn drawn<T: Real>(map: FeatureMap, head_dim: usize) -> Arc<Matrix<T>> {
    static DRAWN: draw::Store<(FeatureMap, usize)> = draw::Store::new(Vec::new());
    draw::kept(&DRAWN, (map, head_dim), || {
        let rows: Vec<T> = map.projection(head_dim).unwrap_or_default().iter().map(|&w| T::from_f64(w)).collect();
        Matrix::new(&rows, map.features(head_dim), head_dim)
    })
}

/// `1/|x|`, or 0 for a row that has no direction.
fn inverse_length<T: Real>(x: &[T]) -> T {
    // In doubles the squares of f32 neither overflow nor vanish.
    let square: f64 = x.iter().map(|x| x.to_f64() * x.to_f64()).sum();
    if square == 0.0 { T::ZERO } else { T::from_f64(square.sqrt().recip()) }
}

/// The sum of a row, in as many parts as a register is sure to have room for.
fn sum<T: Real>(row: &[T]) -> T {
    let mut parts = [T::ZERO; 8];
    let (eights, rest) = row.as_chunks::<8>();
    for eight in eights {
        parts.iter_mut().zip(eight).for_each(|(part, &x)| *part += x);
    }
    parts.into_iter().chain(rest.iter().copied()).sum()
}

/// `[max(x, 0), max(−x, 0)]`, and again from the beginning as far as there is room.
fn signed_parts<T: Real>(x: &[T], to: &mut [T]) {
    // Written so that NaN stays NaN.
    let part = |x: T| if x < T::ZERO { T::ZERO } else { x };
    let width = 2 * x.len();
    for (i, &x) in x.iter().enumerate() {
        to[i] = part(x);
        to[width / 2 + i] = part(-x);
    }
    for i in width..to.len() {
        to[i] = to[i - width];
    }
}
