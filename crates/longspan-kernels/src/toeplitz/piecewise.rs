//! Keys by tiles of scores, weighed by distance: all of them, in O(queries · keys) work at the rate of the matrix product and
//! O(tile²) memory for each thread; or, where tables end in one weight for all farther keys, the nearer ones, in linear time.
//!
//! The farther ones then enter as one sum `Σ k̄_j v⁺_jᵀ` a chunk of rows, and rows leave one sum `Σ q̄_i dN⁺_iᵀ` for each chunk of keys
//! that they lie so far from. Sums run forward over what lies before and backward over what lies after; nothing is ever taken away from
//! a sum.

use std::ops::Range;

use super::backward::{Backward, Pass, Sizes};
use super::chunks::{RowBlock, all_chunks};
use super::far::{FarSum, FarSums, ROWS, near_keys, near_rows};
use super::key_pass::{self, KeyPass};
use super::left::all_units;
use super::problem::{CHUNK, Problem, TILE, Unit};
use super::state::EXPONENT;
use super::tile::KeyBlock;
use super::{forward, one_pass, query_pass};
use crate::call::{Arena, Scratch, Sink};
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::block::{add_column_sums, add_scaled, scale_by};
use crate::threads;

fn keys_of<T: Real>(unit: &Unit<'_, T>, chunk: usize) -> Range<isize> {
    let (first, end) = (unit.begin() + (chunk * ROWS) as isize, unit.sequence.keys as isize);
    first.min(end)..(first + ROWS as isize).min(end)
}

/// Adds `k̄_j v⁺_jᵀ` of the keys `from..to`.
pub(super) fn add_keys<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    (from, to): (isize, isize),
    (keys, map): (&mut KeyBlock<'_, T>, &mut MapBuffers<'_, T>),
    sum: &mut FarSum<'_, T>,
) {
    let head_width = problem.head_width;
    let mut next = from;
    while next < to {
        keys.load(problem, unit, (next, to), map);
        let exponent = sum.raise(keys.exponent);
        if keys.exponent < exponent {
            scale_by(&mut keys.k[..keys.count * head_width], (keys.exponent - exponent).exp());
        }
        sum.add_outer(problem, keys.k, keys.v, keys.count);
        add_column_sums(keys.k, head_width, keys.count, sum.features);
        next += keys.count as isize;
    }
}

/// Adds the tokens beyond the ring of an initial state.
pub(super) fn add_past<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, sum: &mut FarSum<'_, T>) {
    let Some(past) = unit.past.filter(|past| past.head.marks[EXPONENT] > T::NEG_INFINITY) else { return };
    sum.add_state(problem, &past.head, past.head.marks[EXPONENT]);
}

/// Chunks of rows of the longest sequence, each with its sums of keys.
fn chunks_of_rows<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.most_queries().div_ceil(ROWS)
}

fn key_sums_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    FarSums::len(problem, problem.units(), chunks_of_rows(problem))
}

/// Sums the keys before and after each chunk of rows.
fn key_sums<'s, T: Real>(problem: &Problem<'_, T>, numbers: &'s mut [T], workers: (&mut [T], usize)) -> FarSums<'s, T> {
    let sizes = (problem.units(), chunks_of_rows(problem));
    // What lies before a chunk is all that lies before the one above it, and more.
    FarSums::new(problem, numbers, sizes, true, workers, |[unit, side, chunk], sum, scratch| {
        let unit = problem.unit(unit);
        let queries = unit.sequence.queries;
        if chunk * ROWS >= queries {
            return;
        }
        let near = |chunk: usize| near_keys(problem, &unit, &(chunk * ROWS..((chunk + 1) * ROWS).min(queries)));
        let own = match side {
            0 if chunk == 0 => (unit.begin(), near(0).0),
            0 => (near(chunk - 1).0, near(chunk).0),
            _ if (chunk + 1) * ROWS < queries => (near(chunk).1, near(chunk + 1).1),
            _ => (near(chunk).1, unit.sequence.keys as isize),
        };
        if side == 0 && chunk == 0 {
            add_past(problem, &unit, sum);
        }
        let mut arena = Arena::new(scratch);
        let mut keys = KeyBlock::new(problem, false, &mut arena);
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        add_keys(problem, &unit, own, (&mut keys, &mut map), sum);
    })
}

/// Computes outputs, from sums of far keys if `by_sums`.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, by_sums: bool, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = forward::worker_len(problem);
    let (sums_len, rows) = if by_sums { (key_sums_len(problem), ROWS) } else { (0, CHUNK) };
    let mut arena = Arena::new(scratch.take(problem.shared_len() + sums_len + threads::count() * per_worker));
    let shared = problem.shared(&mut arena);
    let (sums, rest) = (arena.take(sums_len), arena.rest());
    let sums = by_sums.then(|| key_sums(problem, sums, (&mut *rest, per_worker)));
    forward::run(problem, &shared, &all_chunks(problem, rows), sums.as_ref(), sink, (rest, per_worker));
}

fn row_buffers<'s, T: Real>(
    problem: &Problem<'_, T>,
    arena: &mut Arena<'s, T>,
) -> (RowBlock<'s, T>, MapBuffers<'s, T>) {
    (RowBlock::new(problem, TILE, arena), MapBuffers::new(&problem.mapping, TILE, arena))
}

/// Adds `q̄_i dN⁺_iᵀ e^{−s_i}` of some rows of a head.
fn add_rows<T: Real>(
    pass: &Pass<'_, '_, T>,
    (unit, head): (&Unit<'_, T>, usize),
    rows: Range<usize>,
    (block, map): &mut (RowBlock<'_, T>, MapBuffers<'_, T>),
    sum: &mut FarSum<'_, T>,
) {
    let (problem, shared) = (pass.call.problem, &pass.shared);
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let exponents = rows.clone().filter(|&row| problem.sees(unit, row)).map(|row| -shared.level(unit, head, row));
    let highest = exponents.fold(T::NEG_INFINITY, T::max);
    if highest == T::NEG_INFINITY {
        return;
    }
    let exponent = sum.raise(highest);
    for first in rows.clone().step_by(TILE) {
        let range = first..(first + TILE).min(rows.end);
        pass.load_rows((unit, head), range.clone(), block, map);
        let RowBlock { q, d, c, .. } = block;
        for (at, row) in range.clone().enumerate() {
            // A row that sees nothing has gradients of 0, whatever it counts from.
            let factor =
                if problem.sees(unit, row) { (-shared.level(unit, head, row) - exponent).exp() } else { T::ZERO };
            if factor != T::ONE {
                scale_by(&mut d[at * value_width..][..value_width], factor);
                c[at] *= factor;
            }
            add_scaled(sum.features, c[at], &q[at * head_width..][..head_width]);
        }
        sum.add_outer(problem, q, d, range.len());
    }
}

/// Chunks of sums over rows: one for each chunk of keys, and before them one of all rows, for the tokens beyond the ring
/// of an initial state.
fn row_chunks<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.most_keys().div_ceil(ROWS) + 1
}

fn row_sums_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    FarSums::len(problem, problem.units() * problem.dims.group(), row_chunks(problem))
}

/// Sums the rows that each chunk of keys is far from: chunk `n` of keys finds them in chunk `n + 1`.
fn row_sums<'s, T: Real>(pass: &Pass<'_, '_, T>, numbers: &'s mut [T], workers: (&mut [T], usize)) -> FarSums<'s, T> {
    let problem = pass.call.problem;
    let group = problem.dims.group();
    let sizes = (problem.units() * group, row_chunks(problem));
    FarSums::new(problem, numbers, sizes, false, workers, |[owner, side, chunk], sum, scratch| {
        let unit = problem.unit(owner / group);
        let near = |chunk: usize| match chunk {
            0 => 0..0,
            _ => near_rows(problem, &unit, &keys_of(&unit, chunk - 1)),
        };
        // Chunks beyond the last key are no one's.
        let used = (unit.sequence.keys as isize - unit.begin()) as usize;
        let used = used.div_ceil(ROWS) + 1;
        let own = match side {
            _ if chunk >= used || (chunk == 0 && !unit.has_far()) => 0..0,
            0 if chunk + 1 < used => near(chunk).end..near(chunk + 1).end,
            0 => near(chunk).end..unit.sequence.queries,
            _ if chunk == 0 => 0..0,
            _ => near(chunk - 1).start..near(chunk).start,
        };
        let head = unit.kv_head * group + owner % group;
        let mut buffers = row_buffers(problem, &mut Arena::new(scratch));
        add_rows(pass, (&unit, head), own, &mut buffers, sum);
    })
}

/// Computes every gradient, from sums of far keys and rows if `by_sums`. Passes over rows and over keys both form the weights anew.
pub(super) fn backward<T: Real>(
    call: Backward<'_, '_, T>,
    by_sums: bool,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let problem = call.problem;
    if !by_sums && one_pass::takes(&call) {
        return one_pass::backward(call, parameters, scratch);
    }
    let mut per_worker = query_pass::worker_len(problem, by_sums).max(key_pass::worker_len(problem, by_sums));
    let (mut own, mut rows) = (0, CHUNK);
    if by_sums {
        per_worker = per_worker.max(Arena::measure(|arena| row_buffers(problem, arena)));
        // Sums over keys are done with before those over rows begin.
        (own, rows) = (key_sums_len(problem).max(row_sums_len(problem)), ROWS);
    }
    call.run(parameters, Sizes { per_worker, own, own_f64: 0 }, scratch, |pass, mut memory| {
        let numbers = std::mem::take(&mut memory.own);
        let sums = by_sums.then(|| key_sums(problem, &mut *numbers, (&mut *memory.workers, per_worker)));
        query_pass::run(pass, all_chunks(problem, rows), sums.as_ref(), (&mut *memory.workers, per_worker));
        let sums = by_sums.then(|| row_sums(pass, numbers, (&mut *memory.workers, per_worker)));
        KeyPass { pass, rows: sums.as_ref() }.run(&all_units(problem), memory);
    });
}
