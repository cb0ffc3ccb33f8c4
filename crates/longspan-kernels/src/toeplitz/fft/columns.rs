//! Keys, values and queries by columns, as transforms take them.

use super::super::problem::{Problem, TILE, Unit};
use super::clear;
use super::line::Line;
use crate::call::Arena;
use crate::feature_map::elementwise::Shift;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::block::{add_products, multiply};
use crate::simd::rows::pieces;

/// A block of columns, each with one number a token.
pub(super) struct Columns<'s> {
    /// `columns × count`.
    pub numbers: &'s mut [f64],
    pub count: usize,
}

impl<'s> Columns<'s> {
    pub fn new(columns: usize, count: usize, arena: &mut Arena<'s, f64>) -> Self {
        Self { numbers: arena.take(columns * count), count }
    }

    pub fn column(&self, column: usize) -> &[f64] {
        &self.numbers[column * self.count..][..self.count]
    }

    /// Puts rows of a block at the rows from `first` on.
    pub fn put<T: Real>(&mut self, (first, rows): (usize, usize), (block, row_length): (&[T], usize), width: usize) {
        for column in 0..width {
            let to = &mut self.numbers[column * self.count + first..][..rows];
            for (row, to) in to.iter_mut().enumerate() {
                *to = block[row * row_length + column].to_f64();
            }
        }
    }

    /// Takes the rows from `first` on into a block whose rows are filled up with 0.
    pub fn take<T: Real>(&self, (first, rows): (usize, usize), (block, row_length): (&mut [T], usize)) {
        block[..rows * row_length].fill(T::ZERO);
        for (column, from) in self.numbers.chunks_exact(self.count.max(1)).enumerate() {
            for row in 0..rows {
                block[row * row_length + column] = T::from_f64(from[first + row]);
            }
        }
    }

    /// Makes sums 0 that are no more than what transforms lose of them: `bound(column)` times the norm of the row.
    pub fn clear(&mut self, bound: impl Fn(usize) -> f64, norms: &[f64]) {
        for (column, numbers) in self.numbers.chunks_exact_mut(self.count.max(1)).enumerate() {
            let bound = bound(column);
            numbers.iter_mut().zip(norms).for_each(|(x, norm)| clear(x, bound * norm));
        }
    }

    pub fn norms(&self, to: &mut [f64]) {
        to.fill(0.0);
        for column in self.numbers.chunks_exact(self.count.max(1)) {
            add_products(column, column, to);
        }
        to.iter_mut().for_each(|s| *s = s.sqrt());
    }
}

/// The norms of the rows of two lists of columns, and their products.
pub(super) struct Norms<'s> {
    pub first: &'s mut [f64],
    pub second: &'s mut [f64],
    pub products: &'s mut [f64],
}

impl<'s> Norms<'s> {
    pub fn new(count: usize, arena: &mut Arena<'s, f64>) -> Self {
        Self { first: arena.take(count), second: arena.take(count), products: arena.take(count) }
    }

    pub fn load(&mut self, first: &Columns<'_>, second: &Columns<'_>) {
        first.norms(self.first);
        second.norms(self.second);
        self.products.copy_from_slice(self.first);
        multiply(self.products, self.second);
    }
}

/// What the transforms of one key/value head start from.
pub(super) struct Keys<'s> {
    /// `φ(k)`, features × keys, 0 where ignored.
    pub k: Columns<'s>,
    /// `v⁺ = [v, 1]`, (values + 1) × keys, 0 where ignored.
    pub v: Columns<'s>,
    /// `‖k̄_j‖` and `‖v⁺_j‖`.
    pub norms: Norms<'s>,
    /// The exponent subtracted from the keys.
    pub exponent: f64,
}

impl<'s> Keys<'s> {
    pub fn new<T: Real>(problem: &Problem<'_, T>, line: &Line, arena: &mut Arena<'s, f64>) -> Self {
        let keys = line.keys.count;
        Self {
            k: Columns::new(problem.features, keys, arena),
            v: Columns::new(problem.dims.value_dim + 1, keys, arena),
            norms: Norms::new(keys, arena),
            exponent: 0.0,
        }
    }

    /// Takes those of a unit. `memory` holds a block of keys or values.
    pub fn load<T: Real>(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, memory: &mut [T]) {
        let (keys, value_dim) = (unit.sequence.keys, problem.dims.value_dim);
        let (block, mut map) = block(problem, memory);
        let mut exponent = T::ZERO;
        if problem.mapping.exponential {
            let row_max = (0..keys as isize).filter_map(|key| problem.key_max(unit, key));
            let highest = row_max.fold(T::NEG_INFINITY, |a, b| a.max(b));
            exponent = if highest.is_finite() { highest } else { T::ZERO };
        }
        for rows in pieces(0..keys, TILE) {
            problem.load_keys(unit, rows, Shift::One(exponent), block, &mut map);
            self.k.put(rows, (block, problem.head_width), problem.features);
            problem.load_values(unit, rows, block);
            self.v.put(rows, (block, problem.value_width), value_dim);
        }
        for key in 0..keys {
            self.v.numbers[value_dim * keys + key] = if unit.sequence.ignores(key) { 0.0 } else { 1.0 };
        }
        self.norms.load(&self.k, &self.v);
        self.exponent = exponent.to_f64();
    }
}

/// A block of features or values of either side, and what maps work with, in a worker's memory.
pub(super) fn block<'s, T: Real>(problem: &Problem<'_, T>, memory: &'s mut [T]) -> (&'s mut [T], MapBuffers<'s, T>) {
    let mut arena = Arena::new(memory);
    let block = arena.take(TILE * problem.head_width.max(problem.value_width));
    (block, MapBuffers::new(&problem.mapping, TILE, &mut arena))
}

/// Takes the mapped queries of a head. `memory` holds a block of them.
pub(super) fn load_queries<T: Real>(
    problem: &Problem<'_, T>,
    (unit, head): (&Unit<'_, T>, usize),
    memory: &mut [T],
    columns: &mut Columns<'_>,
) {
    let (block, mut map) = block(problem, memory);
    let mut shifts = [T::ZERO; TILE];
    for rows in pieces(0..columns.count, TILE) {
        problem.load_queries((unit, head), rows, (block, &mut shifts), &mut map);
        columns.put(rows, (block, problem.head_width), problem.features);
    }
}
