//! The two things that AFT-conv sums: keys with their values, and rows of outputs as keys see them.

use super::field::{REACH, Source};
use super::geometry::Geometry;
use crate::aft::keys::KeyItems;
use crate::aft::problem::{Bias, Problem};
use crate::feature_map::elementwise::copy_rows;
use crate::simd::Real;

pub(super) struct KeySource<'a, T> {
    pub items: KeyItems<'a, T>,
    places: usize,
}

impl<'a, T: Real> KeySource<'a, T> {
    pub fn new(problem: &Problem<'a, T>, geometry: &Geometry, sequence: usize, kv_head: usize) -> Self {
        let items = KeyItems::new(problem, &problem.sequences[sequence], kv_head);
        Self { items, places: geometry.places }
    }

    fn token(&self, line: usize, at: isize) -> isize {
        (line * self.places) as isize + at
    }
}

impl<T: Real> Source<T> for KeySource<'_, T> {
    fn exponents(&self, line: usize, from: isize, x: &mut [T], b: &mut [T], d: &mut [T]) {
        b.fill(T::ZERO);
        d.fill(T::ONE);
        let from = self.token(line, from);
        if let Some(tokens) = self.items.tokens(from, x.len()) {
            if tokens.keys.stride == 1 {
                x.copy_from_slice(&tokens.keys.data[..x.len()]);
            } else {
                x.iter_mut().enumerate().for_each(|(n, x)| *x = tokens.keys.row(n, 1)[0]);
            }
            return;
        }
        for (x, key) in x.iter_mut().zip(from..) {
            *x = self.items.token(key).map_or(T::NEG_INFINITY, |(key, _)| key[0]);
        }
    }

    fn rows_in_place(&self, line: usize, from: isize, count: usize, width: usize) -> Option<&[T]> {
        let tokens = self.items.tokens(self.token(line, from), count)?;
        let adjacent = tokens.values.stride == width && tokens.head_dim == width;
        tokens.values.data.get(..REACH * width).filter(|_| adjacent)
    }

    fn rows(&self, line: usize, from: isize, count: usize, width: usize, to: &mut [T]) {
        let from = self.token(line, from);
        if let Some(tokens) = self.items.tokens(from, count) {
            copy_rows(tokens.values, (count, tokens.head_dim), None, (to, width));
            return;
        }
        for (to, key) in to.chunks_exact_mut(width).zip(from..) {
            to.fill(T::ZERO);
            // Whatever stands beside a key of −∞ counts for nothing.
            if let Some((_, value)) = self.items.token(key).filter(|(key, _)| key[0] > T::NEG_INFINITY) {
                to[..value.len()].copy_from_slice(value);
            }
        }
    }
}

/// Rows of outputs as keys see them: exponents `−x − b` in two parts, weights `G·Y/d` and rows `g/d`.
#[derive(Clone, Copy)]
pub(super) struct RowSource<'a, T> {
    pub x: &'a [T],
    pub b: &'a [T],
    pub d: &'a [T],
    pub rows: &'a [T],
    pub places: usize,
}

impl<T: Real> Source<T> for RowSource<'_, T> {
    fn exponents(&self, line: usize, from: isize, x: &mut [T], b: &mut [T], d: &mut [T]) {
        let from = line * self.places + from as usize;
        for (to, own) in [(x, self.x), (b, self.b), (d, self.d)] {
            to.copy_from_slice(&own[from..from + to.len()]);
        }
    }

    fn rows_in_place(&self, line: usize, from: isize, _: usize, width: usize) -> Option<&[T]> {
        self.rows[(line * self.places + from as usize) * width..].get(..REACH * width)
    }

    fn rows(&self, line: usize, from: isize, count: usize, width: usize, to: &mut [T]) {
        let from = line * self.places + from as usize;
        to.copy_from_slice(&self.rows[from * width..(from + count) * width]);
    }
}

pub(super) fn kernel<'p, T: Real>(problem: &'p Problem<'_, T>, head: usize) -> &'p [T] {
    match &problem.bias {
        Bias::Kernel { kernels, taps } => &kernels[head * taps..][..*taps],
        _ => &[],
    }
}
