//! All gradients in one pass over tiles: five products a pair, where a pass of queries and one of keys take six.
//!
//! Chunks of keys meet chunks of queries in phases: in phase `p` chunk `s` of keys meets chunk `s + p` of queries, round the
//! end. Within a phase every chunk belongs to one task, and a chunk's phases come in their order, so sums do not depend on
//! threads. Between phases the gradients of features stand where those of queries, keys and values are to be written: maps
//! of whole rows, whose features have no room there, take two passes.

use std::ops::Range;

use super::gradient::{self, Beside, Buffers, Chunk, KeyPass, places};
use super::map_sums::MapSums;
use super::problem::{CHUNK, Problem, TILE, Unit};
use super::state::StateGradients;
use super::tiled::GradientSink;
use crate::call::{Arena, Cotangent, Scratch, SharedRows, ViewMut};
use crate::feature_map::rows::Side;
use crate::simd::Real;
use crate::simd::block::{add_scaled, store};
use crate::simd::rows::padded;
use crate::threads::{self, parallel};

/// Distances between two chunks, one more to be even.
const DISTANCES: usize = 2 * CHUNK;

/// Tasks of a phase for each thread: as many units go through their phases together as make them, and no more, so that what
/// their phases read and write again stays in the cache.
const TASKS: usize = 8;

/// Whether all that a call wants comes from tiles, with gradients of features as wide as rows. Exponents of keys, which each
/// block has its own, and images, whose distances are scattered, are left to two passes.
pub(super) fn takes<T: Real>(problem: &Problem<'_, T>, states: &StateGradients<'_, T>) -> bool {
    let stateless = problem.call.initial_state.is_none() && states.last.is_none() && states.first.is_none();
    stateless && problem.mapping.rows.is_none() && !problem.mapping.exponential && !problem.is_grid()
}

/// Computes every gradient of a call that it [`takes`].
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    d_bias: &mut [T],
    states: StateGradients<'_, T>,
    scratch: &mut Scratch<T>,
) {
    let longest = problem.sequences.iter().map(|sequence| sequence.keys.max(sequence.queries)).max().unwrap_or(0);
    // Without a chunk there may be keys that no sequence has, and their gradients.
    let (units, chunks) = (problem.units(), longest.div_ceil(CHUNK).max(1));
    let window_len = problem.dims.group() * DISTANCES;
    let together = (TASKS * threads::count()).div_ceil(chunks).min(units);
    let (windows_len, lines_len) = (padded::<T>(together * chunks * window_len), gradient::lines_len(problem));
    let per_worker = gradient::buffers_len(problem, Beside::Queries);
    let len = problem.shared_len() + lines_len + windows_len + threads::count() * per_worker;
    let mut arena = Arena::new(scratch.take(len));
    let shared = problem.shared(&mut arena);
    let (lines, windows) = (arena.take(lines_len), arena.take(together * chunks * window_len));
    lines.fill(T::ZERO);
    let memory = arena.rest();
    // There is no learned map.
    let mut nothing = MapSums::view(problem, &mut []);
    let sums = MapSums::new(problem, nothing.shared());
    let pass = KeyPass { problem, shared: &shared, cotangent, sink, rows: None, states, sums };
    for first in (0..units).step_by(together.max(1)) {
        let count = together.min(units - first);
        for phase in 0..chunks {
            let mut view = ViewMut::strided(&mut *windows, [window_len, 0, 1]);
            let view = view.shared();
            parallel(count * chunks, &mut *memory, per_worker, |task, memory| {
                // SAFETY: each window is one task's own.
                let window = unsafe { view.row(task, 0, 0, window_len) };
                let (unit, chunk) = (problem.unit(first + task / chunks), task % chunks);
                let meeting = Meeting::new(unit, chunk, (chunk + phase) % chunks);
                meeting.compute(&pass, phase == 0, window, &mut Arena::new(memory));
            });
            add_windows(problem, first..first + count, (chunks, phase), windows, lines);
        }
    }
    parallel(units * chunks, memory, per_worker, |task, memory| {
        let (unit, chunk) = (problem.unit(task / chunks), task % chunks);
        Meeting::new(unit, chunk, chunk).finish(&pass, chunk == 0, &mut Arena::new(memory));
    });
    gradient::reduce(problem, lines, d_bias);
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
    fn compute(&self, pass: &KeyPass<'_, 'a, T>, first: bool, window: &mut [T], arena: &mut Arena<'_, T>) {
        let (problem, sink) = (pass.problem, &pass.sink);
        window.fill(T::ZERO);
        let seen = self.is_seen(problem);
        if !seen && !first {
            return;
        }
        let mut buffers = Buffers::new(problem, Beside::Queries, &mut [], arena);
        let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let from = self.keys.start as isize;
        let chunk = Chunk { unit: self.unit, left: None, index: 0, keys: from..self.keys.end as isize, last: None };
        let batch = self.unit.sequence.batch;
        let key_rows = |first: usize| (batch, self.unit.kv_head, self.unit.sequence.key_start + first);
        let blocks = || self.keys.clone().step_by(TILE).enumerate();
        for (which, key) in blocks() {
            let end = self.keys.end as isize;
            buffers.keys[which].load(problem, &self.unit, (key as isize, end), &mut buffers.map);
            let count = buffers.keys[which].count;
            take(sink.dk, key_rows(key), count, head_dim, first, (&mut *buffers.dk[which], head_width));
            take(sink.dv, key_rows(key), count, value_dim, first, (&mut *buffers.dv[which], value_width));
        }
        for (n, head) in problem.heads(&self.unit).enumerate() {
            let rows = (batch, head, self.unit.sequence.query_start + self.queries.start);
            take(sink.dq, rows, self.queries.len(), head_dim, first, (&mut *buffers.dq, head_width));
            if seen {
                let line = (&mut window[n * DISTANCES..][..DISTANCES], self.distances(problem).0);
                pass.tiles(&chunk, (n, head), self.queries.clone(), blocks().count(), line, &mut buffers);
            }
            put(sink.dq, rows, self.queries.len(), head_dim, (&*buffers.dq, head_width));
        }
        for (which, key) in blocks() {
            let count = buffers.keys[which].count;
            put(sink.dk, key_rows(key), count, head_dim, (&*buffers.dk[which], head_width));
            put(sink.dv, key_rows(key), count, value_dim, (&*buffers.dv[which], value_width));
        }
    }

    /// Takes the gradients of the features of both chunks back to rows; with `absent` those of keys beyond a sequence's
    /// last, too.
    fn finish(&self, pass: &KeyPass<'_, 'a, T>, absent: bool, arena: &mut Arena<'_, T>) {
        let (problem, unit, sink) = (pass.problem, &self.unit, &pass.sink);
        let (head_dim, head_width) = (problem.dims.head_dim, problem.head_width);
        let Buffers { q: phi, q_shifts, dq: d, map, .. } = &mut Buffers::new(problem, Beside::Queries, &mut [], arena);
        for head in problem.heads(unit) {
            for row in self.queries.clone().step_by(TILE) {
                let count = (self.queries.end - row).min(TILE);
                let rows = (unit.sequence.batch, head, unit.sequence.query_start + row);
                problem.load_queries(unit, head, row, count, phi, q_shifts, map);
                take(sink.dq, rows, count, head_dim, false, (&mut **d, head_width));
                let sees = |n: usize| problem.sees(unit, row + n);
                let (side, from) = (Side::Query(head), problem.queries(unit, head).skip(row));
                let (raw, width) = problem.pull_back(side, from, count, sees, phi, d, &mut [], map);
                for n in 0..count {
                    // SAFETY: each query belongs to one task.
                    let to = unsafe { sink.dq.row(rows.0, rows.1, rows.2 + n, head_dim) };
                    match sees(n) {
                        true => store(&raw[n * width..], T::ONE, to),
                        false => to.fill(T::ZERO),
                    }
                }
            }
        }
        let seen = unit.sequence.queries.checked_sub(1).map_or(0, |last| problem.end(unit, last));
        for key in self.keys.clone().step_by(TILE) {
            let count = (self.keys.end - key).min(TILE);
            let rows = (unit.sequence.batch, unit.kv_head, unit.sequence.key_start + key);
            problem.load_keys(unit, (key, count), T::ZERO, phi, map);
            take(sink.dk, rows, count, head_dim, false, (&mut **d, head_width));
            let counts = |n: usize| ((key + n) as isize) < seen && !unit.ignores(key + n);
            let (side, from) = (Side::Key(unit.kv_head), unit.k.skip(key));
            let (raw, width) = problem.pull_back(side, from, count, counts, phi, d, &mut [], map);
            for n in 0..count {
                if !counts(n) {
                    gradient::write(problem, unit, key + n, *sink, None);
                    continue;
                }
                // SAFETY: each key belongs to one task.
                let (to, _) = unsafe { places(problem, unit, key + n, sink) };
                store(&raw[n * width..], T::ONE, to);
            }
        }
        if absent {
            for key in unit.sequence.keys..unit.sequence.keys + unit.sequence.absent {
                gradient::write(problem, unit, key, *sink, None);
            }
        }
    }
}

/// Reads rows from the `token`-th of a head on into a block, or makes it 0.
fn take<T: Real>(
    from: SharedRows<'_, T>,
    (batch, head, token): (usize, usize, usize),
    count: usize,
    width: usize,
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
    (batch, head, token): (usize, usize, usize),
    count: usize,
    width: usize,
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
    let (group, len, unit_len) = (problem.dims.group(), gradient::line_len(problem), gradient::unit_lines_len(problem));
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
