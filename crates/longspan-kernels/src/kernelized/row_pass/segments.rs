//! How the rows of a unit are cut into segments.

use super::super::problem::{Problem, Unit};
use crate::simd::Real;

/// A range of rows of one unit that forms its state from zero.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernelized) struct Segment {
    /// Rows `from..to`, where row `i` stands at key `i + offset`.
    pub from: usize,
    pub to: usize,
    pub offset: isize,
    /// Its place among the segments of its kind.
    pub number: usize,
    /// Tokens that pass between the segment before and this one.
    pub idle: usize,
    /// Rows of the call, or keys before the first row that only enter the state.
    pub writes: bool,
}

/// The segments that lead from the first key to the last row under a causal mask; under a bidirectional one, those of
/// the keys.
pub(in crate::kernelized) fn segments<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> Vec<Segment> {
    let keys = unit.sequence.keys;
    if !problem.causal {
        return cut(problem, 0, keys, 0, false);
    }
    let Some((first, before, idle)) = lead(problem, unit) else { return Vec::new() };
    let mut list = cut(problem, 0, before, 0, false);
    let reads = list.len();
    list.extend(cut(problem, first, unit.sequence.queries, problem.offset, true));
    list[reads].idle = idle;
    list
}

/// Under a causal mask the first row that stands at a key, the keys that are summed up before it, and how many tokens
/// pass in between; none without such a row.
fn lead<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> Option<(usize, usize, usize)> {
    let first = first_row(problem, unit);
    if first >= unit.sequence.queries {
        return None;
    }
    let stands = (first as isize + problem.offset) as usize;
    // Beyond the last key plus the radius nothing enters any more.
    let before = stands.min(unit.sequence.keys + problem.radius.unwrap_or(0));
    Some((first, before, stands - before))
}

/// How many [`segments`] a unit has.
pub(super) fn segment_count<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    if !problem.causal {
        return cut_count(problem, unit.sequence.keys);
    }
    lead(problem, unit)
        .map_or(0, |(first, before, _)| cut_count(problem, before) + cut_count(problem, unit.sequence.queries - first))
}

/// How many segments [`cut`] makes of so many rows.
pub(in crate::kernelized) fn cut_count<T: Real>(problem: &Problem<'_, T>, rows: usize) -> usize {
    rows.div_ceil(problem.segment(rows))
}

/// Rows `from..to` in segments.
pub(in crate::kernelized) fn cut<T: Real>(
    problem: &Problem<'_, T>,
    from: usize,
    to: usize,
    offset: isize,
    writes: bool,
) -> Vec<Segment> {
    let step = problem.segment(to - from);
    (from..to)
        .step_by(step)
        .enumerate()
        .map(|(number, at)| Segment { from: at, to: (at + step).min(to), offset, number, idle: 0, writes })
        .collect()
}

/// The first row that stands at a key, or the number of rows.
pub(in crate::kernelized) fn first_row<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    if problem.causal { (-problem.offset).max(0).min(unit.sequence.queries as isize) as usize } else { 0 }
}
