//! How the rows of a unit are cut into segments.

use super::super::problem::{Problem, Unit};
use crate::simd::Real;
use crate::threads;

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
/// the keys and then those of the rows.
pub(in crate::kernelized) fn segments<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> Vec<Segment> {
    let keys = unit.sequence.keys;
    if !problem.causal {
        let rows = cut(problem, 0, unit.sequence.queries, problem.offset, true);
        return cut(problem, 0, keys, 0, false).into_iter().chain(rows).collect();
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

/// At least how many segments there are of rows and of keys, in a pass over keys alone too.
pub(super) fn segment_count<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    let (queries, keys) = (unit.sequence.queries, unit.sequence.keys);
    let of = |before, rows| cut_count(problem, before) + cut_count(problem, rows);
    if !problem.causal {
        return of(keys, queries);
    }
    lead(problem, unit).map_or(0, |(first, before, _)| of(before, queries - first)).max(cut_count(problem, keys))
}

/// How many units, the first ones, are walked from end to end, one thread each: whole rounds of threads. The segments of the others
/// run side by side where that ends sooner.
pub(in crate::kernelized) fn whole_units<T: Real>(problem: &Problem<'_, T>) -> usize {
    let tokens = problem.sequences.iter().map(|sequence| sequence.queries.max(sequence.keys)).max();
    whole_of(problem.units(), tokens.map_or(0, |tokens| cut_count(problem, tokens)), threads::count())
}

/// The same of units of so many segments: to form their states first costs the products `φ(k) vᵀ`, a third of the work, a second time.
fn whole_of(units: usize, segments: usize, threads: usize) -> usize {
    let rest = units % threads;
    let rounds = (rest * segments).div_ceil(threads);
    if 4 * rounds < 3 * segments { units - rest } else { units }
}

/// How many segments [`cut`] makes of so many rows.
pub(in crate::kernelized) fn cut_count<T: Real>(problem: &Problem<'_, T>, rows: usize) -> usize {
    rows.div_ceil(problem.segment(rows))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// The work of a call on one thread over `threads` times how long it takes on them, with units of equal length. A unit is one in
    /// time, the state of all of its segments a third.
    fn efficiency(units: usize, segments: usize, threads: usize) -> f64 {
        let rounds = |tasks: usize| tasks.div_ceil(threads) as f64;
        let whole = whole_of(units, segments, threads);
        let cut = rounds((units - whole) * segments) / segments as f64;
        units as f64 / threads as f64 / (rounds(whole) + cut * 4.0 / 3.0)
    }

    #[test]
    fn heads_beyond_whole_rounds_are_shared_out() {
        // Heads, thousands of tokens, threads; what whole heads alone gave.
        for (units, segments, threads, before, least) in [
            (8usize, 4, 6, 0.67, 0.80),
            (9, 4, 8, 0.56, 0.84),
            (12, 4, 8, 0.75, 0.90),
            (32, 4, 6, 0.89, 0.94),
            (9, 16, 8, 0.56, 0.96),
            (1, 4, 2, 0.50, 0.75),
            (1, 64, 64, 0.02, 0.75),
            (8, 64, 64, 0.125, 0.75),
        ] {
            let alone = units as f64 / (threads * units.div_ceil(threads)) as f64;
            assert!((alone - before).abs() < 0.005, "{units} on {threads}: {alone}");
            let now = efficiency(units, segments, threads);
            assert!(now > least - 0.005, "{units} on {threads}: {now}");
        }
    }

    #[test]
    fn no_number_of_threads_is_worse_than_whole_heads() {
        for units in [1usize, 2, 4, 8, 9, 12, 32] {
            for (segments, threads) in (1..=64).flat_map(|segments| (1..=64).map(move |threads| (segments, threads))) {
                let alone = units as f64 / (threads * units.div_ceil(threads)) as f64;
                let now = efficiency(units, segments, threads);
                assert!(now > alone - 1e-9, "{units} of {segments} segments on {threads}: {now} for {alone}");
            }
        }
    }
}
