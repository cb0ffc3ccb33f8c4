//! Chunks of rows: the tasks of the passes over rows, and the keys that each meets.

use std::ops::Range;

use super::far::{Far, FarSums, near_keys};
use super::problem::{Problem, Unit};
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
