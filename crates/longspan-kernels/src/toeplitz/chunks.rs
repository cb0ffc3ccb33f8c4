//! Chunks of rows: the tasks of the passes over rows, and the keys that each meets.

use std::ops::Range;

use super::far::{Far, FarSums, near_keys};
use super::problem::{CHUNK, Problem, TILE, Unit};
use super::tile::{KeyBlock, Weights};
use crate::call::Arena;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;

/// Rows of one head that one task computes, at most a chunk.
pub(super) struct RowChunk {
    pub unit: usize,
    pub head: usize,
    pub rows: Range<usize>,
    /// Its number among those of the head.
    pub index: usize,
}

/// Adds the chunks of `step` rows of some rows of one head.
pub(super) fn push_chunks(chunks: &mut Vec<RowChunk>, (unit, head): (usize, usize), rows: Range<usize>, step: usize) {
    let end = rows.end;
    chunks.extend(rows.step_by(step).map(|row| RowChunk {
        unit,
        head,
        rows: row..(row + step).min(end),
        index: row / step,
    }));
}

pub(super) fn push_unit<T: Real>(
    problem: &Problem<'_, T>,
    chunks: &mut Vec<RowChunk>,
    unit: &Unit<'_, T>,
    step: usize,
) {
    for head in problem.heads(unit) {
        push_chunks(chunks, (unit.index, head), 0..unit.sequence.queries, step);
    }
}

/// Those of all rows of a call.
pub(super) fn all_chunks<T: Real>(problem: &Problem<'_, T>, step: usize) -> Vec<RowChunk> {
    let mut chunks = Vec::new();
    (0..problem.units()).for_each(|index| push_unit(problem, &mut chunks, &problem.unit(index), step));
    chunks
}

/// A block of rows, with what they collect of values or what their gradients start from.
pub(super) struct RowBlock<'s, T> {
    /// `φ(q)`, and the exponent subtracted from each row.
    pub q: &'s mut [T],
    pub q_shifts: &'s mut [T],
    /// `N` and `D`; in the backward `d = G/D` (or `G` times the row's scale) and `c = −G·A/D`.
    pub d: &'s mut [T],
    pub c: &'s mut [T],
}

impl<'s, T: Real> RowBlock<'s, T> {
    pub fn new(problem: &Problem<'_, T>, rows: usize, arena: &mut Arena<'s, T>) -> Self {
        Self {
            q: arena.take(rows * problem.head_width),
            q_shifts: arena.take(rows),
            d: arena.take(rows * problem.value_width),
            c: arena.take(rows),
        }
    }
}

/// Memory for a chunk of rows and the blocks of keys that it meets.
pub(super) struct Buffers<'s, T> {
    pub rows: RowBlock<'s, T>,
    /// Gradients of features, if there is a backward.
    pub dq: &'s mut [T],
    pub tile: &'s mut [T],
    pub keys: KeyBlock<'s, T>,
    pub weights: Weights<'s, T>,
    /// A transposed sum of far keys.
    pub turned: &'s mut [T],
    pub map: MapBuffers<'s, T>,
}

impl<'s, T: Real> Buffers<'s, T> {
    /// For outputs, or for `gradients`, which may meet sums of `far` keys.
    pub fn new(problem: &Problem<'_, T>, gradients: bool, far: bool, arena: &mut Arena<'s, T>) -> Self {
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        Self {
            rows: RowBlock::new(problem, CHUNK, arena),
            dq: arena.take(if gradients { CHUNK * head_width } else { 0 }),
            tile: arena.take(TILE * TILE.max(if gradients { head_width } else { value_width })),
            keys: KeyBlock::new(problem, gradients, arena),
            weights: Weights::new(problem, arena),
            turned: arena.take(if gradients && far { head_width * value_width } else { 0 }),
            map: MapBuffers::new(&problem.mapping, TILE, arena),
        }
    }
}

/// What the rows of a chunk meet: the keys of a range by tiles, and sums of others.
pub(super) struct Reach<'s, T> {
    pub keys: (isize, isize),
    pub fars: [Option<Far<'s, T>>; 2],
}

impl<'s, T: Real> Reach<'s, T> {
    /// Given the sums of far keys; without them all keys are met by tiles.
    pub fn new(problem: &Problem<'_, T>, unit: &Unit<'_, T>, chunk: &RowChunk, sums: Option<&FarSums<'s, T>>) -> Self {
        let Some(sums) = sums else {
            return Self { keys: (unit.begin(), problem.end(unit, chunk.rows.end - 1)), fars: [None, None] };
        };
        let far = |side: usize| sums.get(problem, (unit.index, chunk.head), side, chunk.index);
        Self { keys: near_keys(problem, unit, &chunk.rows), fars: [far(0), far(1)] }
    }
}
