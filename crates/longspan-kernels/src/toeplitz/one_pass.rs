//! All gradients in one pass over tiles: five products a pair, where a pass of queries and one of keys take six.
//!
//! Chunks of keys meet chunks of queries in phases: in phase `p` chunk `s` of keys meets chunk `s + p` of queries, round the
//! end. Within a phase every chunk belongs to one task, and a chunk's phases come in their order, so sums do not depend on
//! threads. Between phases the gradients of features stand where those of queries, keys and values are to be written: maps
//! of whole rows, whose features have no room there, take two passes.

use std::ops::Range;

use super::backward::{Backward, Memory, Pass, Sizes};
use super::bias_gradient::{line_len, unit_lines_len};
use super::key_tiles::{KeyGradients, TileBuffers, key_gradients};
use super::problem::{CHUNK, Problem, TILE, Unit};
use crate::call::{Arena, Scratch, SharedRows};
use crate::feature_map::elementwise::Shift;
use crate::simd::Real;
use crate::simd::block::add_scaled;
use crate::simd::rows::pieces;
use crate::threads::{self, parallel};

/// Distances between two chunks, one more to be even.
const DISTANCES: usize = 2 * CHUNK;

/// Tasks of a phase for each thread: as many units go through their phases together as make them, and no more, so that what
/// their phases read and write again stays in the cache.
const TASKS: usize = 8;

/// Whether all that a call wants comes from tiles, with gradients of features as wide as rows. Exponents of keys, which each
/// block has its own, and images, whose distances are scattered, are left to two passes.
pub(super) fn takes<T: Real>(call: &Backward<'_, '_, T>) -> bool {
    let (problem, states) = (call.problem, &call.states);
    let stateless = problem.call.initial_state.is_none() && states.last.is_none() && states.first.is_none();
    stateless && problem.mapping.rows.is_none() && !problem.mapping.exponential && !problem.is_grid()
}

/// Computes every gradient of a call that it [`takes`].
pub(super) fn backward<T: Real>(call: Backward<'_, '_, T>, parameters: &mut [&mut [T]], scratch: &mut Scratch<T>) {
    let problem = call.problem;
    let longest = problem.sequences.iter().map(|sequence| sequence.keys.max(sequence.queries)).max().unwrap_or(0);
    let (units, chunks) = (problem.units(), longest.div_ceil(CHUNK).max(1));
    let window_len = problem.dims.group() * DISTANCES;
    let together = (TASKS * threads::count()).div_ceil(chunks).min(units);
    let per_worker = Arena::measure(|arena| (key_gradients(problem, arena), TileBuffers::new(problem, true, arena)));
    let sizes = Sizes { per_worker, own: together * chunks * window_len, own_f64: 0 };
    call.run(parameters, sizes, scratch, |pass, memory| {
        let Memory { lines, workers, own: windows, .. } = memory;
        for first in (0..units).step_by(together.max(1)) {
            let count = together.min(units - first);
            for phase in 0..chunks {
                let places = SharedRows::new(&mut *windows, [window_len, 0, 1]);
                parallel(count * chunks, &mut *workers, per_worker, |task, memory| {
                    // SAFETY: each window is one task's own.
                    let window = unsafe { places.row(task, 0, 0, window_len) };
                    let (unit, chunk) = (problem.unit(first + task / chunks), task % chunks);
                    let meeting = Meeting::new(unit, chunk, (chunk + phase) % chunks);
                    meeting.compute(pass, phase == 0, window, &mut Arena::new(memory));
                });
                add_windows(problem, first..first + count, (chunks, phase), windows, lines);
            }
        }
        parallel(units * chunks, workers, per_worker, |task, memory| {
            let (unit, chunk) = (problem.unit(task / chunks), task % chunks);
            Meeting::new(unit, chunk, chunk).finish(pass, &mut Arena::new(memory));
        });
    });
}

/// A chunk of keys and one of queries of a unit.
struct Meeting<'a, T> {
    unit: Unit<'a, T>,
    keys: Range<usize>,
    queries: Range<usize>,
}

impl<'a, T: Real> Meeting<'a, T> {
    fn new(unit: Unit<'a, T>, key_chunk: usize, query_chunk: usize) -> Self {
        let chunk = |chunk: usize, count: usize| (chunk * CHUNK).min(count)..((chunk + 1) * CHUNK).min(count);
        let sequence = &unit.sequence;
        Self { keys: chunk(key_chunk, sequence.keys), queries: chunk(query_chunk, sequence.queries), unit }
    }

    /// Whether any of the queries sees any of the keys.
    fn is_seen(&self, problem: &Problem<'_, T>) -> bool {
        let some = !self.keys.is_empty() && !self.queries.is_empty();
        some && problem.end(&self.unit, self.queries.end - 1) > self.keys.start as isize
    }

    /// The index in the line of biases of the farthest key before a query, and how many follow.
    fn distances(&self, problem: &Problem<'_, T>) -> (usize, usize) {
        let first = problem.line_index(self.keys.start as isize - problem.stands(self.queries.end - 1));
        (first as usize, self.keys.len() + self.queries.len() - 1)
    }

    /// Adds what the pairs give, to nothing yet in the `first` phase, in which chunks of the same number meet; the gradients
    /// of biases are written by distance, one range of [`DISTANCES`] a head.
    fn compute(&self, pass: &Pass<'_, 'a, T>, first: bool, window: &mut [T], arena: &mut Arena<'_, T>) {
        let (problem, sink, unit) = (pass.call.problem, &pass.call.sink, &self.unit);
        window.fill(T::ZERO);
        let seen = self.is_seen(problem);
        if !seen && !first {
            return;
        }
        let mut blocks = key_gradients(problem, arena);
        let mut buffers = TileBuffers::new(problem, true, arena);
        let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let blocks = &mut blocks[..self.keys.len().div_ceil(TILE)];
        for (KeyGradients { keys, dk, dv }, key) in blocks.iter_mut().zip(self.keys.clone().step_by(TILE)) {
            keys.load(problem, unit, (key as isize, self.keys.end as isize), &mut buffers.map);
            take(sink.dk, (unit.key_place(key), keys.count, head_dim), first, (dk, head_width));
            take(sink.dv, (unit.key_place(key), keys.count, value_dim), first, (dv, value_width));
        }
        for (n, head) in problem.heads(unit).enumerate() {
            let token = unit.sequence.query_start + self.queries.start;
            let rows = ([unit.sequence.batch, head, token], self.queries.len(), head_dim);
            take(sink.dq, rows, first, (&mut *buffers.dq, head_width));
            if seen {
                let line = (&mut window[n * DISTANCES..][..DISTANCES], self.distances(problem).0);
                pass.tiles(unit, (n, head), None, self.queries.clone(), blocks, line, &mut buffers);
            }
            put(sink.dq, rows, (&*buffers.dq, head_width));
        }
        for (KeyGradients { keys, dk, dv }, key) in blocks.iter().zip(self.keys.clone().step_by(TILE)) {
            put(sink.dk, (unit.key_place(key), keys.count, head_dim), (dk, head_width));
            put(sink.dv, (unit.key_place(key), keys.count, value_dim), (dv, value_width));
        }
    }

    /// Takes the gradients of the features of both chunks back to rows.
    fn finish(&self, pass: &Pass<'_, 'a, T>, arena: &mut Arena<'_, T>) {
        let (problem, unit, sink) = (pass.call.problem, &self.unit, pass.call.sink);
        let (head_dim, head_width) = (problem.dims.head_dim, problem.head_width);
        let TileBuffers { rows, dq: d, map, .. } = &mut TileBuffers::new(problem, true, arena);
        let (phi, shifts) = (&mut *rows.q, &mut *rows.q_shifts);
        for head in problem.heads(unit) {
            for (row, count) in pieces(self.queries.clone(), TILE) {
                problem.load_queries((unit, head), (row, count), (phi, shifts), map);
                let place = [unit.sequence.batch, head, unit.sequence.query_start + row];
                take(sink.dq, (place, count, head_dim), false, (&mut **d, head_width));
                problem.write_queries((unit, head), (row, count), (phi, d), &mut [], map, sink);
            }
        }
        for (key, count) in pieces(self.keys.clone(), TILE) {
            problem.load_keys(unit, (key, count), Shift::One(T::ZERO), phi, map);
            take(sink.dk, (unit.key_place(key), count, head_dim), false, (&mut **d, head_width));
            let counts = |key: usize| problem.is_seen(unit, key);
            problem.write_keys(unit, (key, count), counts, (phi, d), None, &mut [], map, sink);
        }
    }
}

/// Reads `count` rows of `width` numbers from a token of a head on into a block, or makes it 0.
fn take<T: Real>(
    from: SharedRows<'_, T>,
    ([batch, head, token], count, width): ([usize; 3], usize, usize),
    none: bool,
    (block, row_length): (&mut [T], usize),
) {
    for (row, to) in block.chunks_exact_mut(row_length.max(1)).take(count).enumerate() {
        to[width..].fill(T::ZERO);
        match none {
            true => to[..width].fill(T::ZERO),
            // SAFETY: within a phase each row belongs to one task.
            false => to[..width].copy_from_slice(unsafe { from.row(batch, head, token + row, width) }),
        }
    }
}

/// Writes them back.
fn put<T: Real>(
    to: SharedRows<'_, T>,
    ([batch, head, token], count, width): ([usize; 3], usize, usize),
    (block, row_length): (&[T], usize),
) {
    for (row, from) in block.chunks_exact(row_length.max(1)).take(count).enumerate() {
        // SAFETY: within a phase each row belongs to one task.
        unsafe { to.row(batch, head, token + row, width) }.copy_from_slice(&from[..width]);
    }
}

/// Adds the gradients of biases of all tasks of a phase of some units to the lines of their heads.
fn add_windows<T: Real>(
    problem: &Problem<'_, T>,
    units: Range<usize>,
    (chunks, phase): (usize, usize),
    windows: &[T],
    lines: &mut [T],
) {
    let (group, len, unit_len) = (problem.dims.group(), line_len(problem), unit_lines_len(problem));
    let lines = lines[units.start * unit_len..units.end * unit_len].chunks_exact_mut(unit_len).enumerate();
    threads::share(lines, |(n, lines)| {
        for chunk in 0..chunks {
            let meeting = Meeting::new(problem.unit(units.start + n), chunk, (chunk + phase) % chunks);
            if !meeting.is_seen(problem) {
                continue;
            }
            let (first, count) = meeting.distances(problem);
            // Beyond the line there are only pairs that no row sees.
            let count = count.min(problem.line_width() - first);
            for (head, line) in lines.chunks_exact_mut(len).take(group).enumerate() {
                let from = &windows[((n * chunks + chunk) * group + head) * DISTANCES..][..count];
                add_scaled(&mut line[first..][..count], T::ONE, from);
            }
        }
    });
}
