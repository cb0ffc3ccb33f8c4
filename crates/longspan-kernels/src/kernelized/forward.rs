//! The chunked forward pass.
//!
//! A unit (one key/value head of one sequence) is walked in segments of rows, a segment in chunks. Each chunk reads the
//! state of all earlier keys, adds its own keys' scores as one dense tile, writes its rows and lets its keys enter the
//! state. The state of a segment starts from zero (`local`) beside that of all earlier segments (`start`), so segments
//! may run one after the other or at the same time: the sums are the same to the bit.

use std::sync::{Mutex, PoisonError};

use super::problem::{Problem, Table, Unit};
use super::state::{Head, OLDEST};
use super::summary::{Carry, Layout, Summary, SummaryRef};
use super::tile::{Buffers, Piece, Sizes, combine_states};
use crate::real::Real;
use crate::scratch::{Arena, Scratch, padded, parallel};
use crate::shape::{SharedRows, ViewMut};
use crate::simd::block::{Band, Product, Run};
use crate::state::State;

/// A stretch of rows of one unit that forms its state from zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
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

/// What the rows of a piece see beside its tile.
pub(super) struct Scene<'x, T> {
    /// The state before the segment, and the decay since.
    pub start: SummaryRef<'x, T>,
    pub start_decay: T,
    /// The state since the segment's start; none under a bidirectional mask.
    pub local: Option<SummaryRef<'x, T>>,
    /// The far sum before the piece's first row has taken in its key.
    pub far: (&'x [T], T),
    /// The far sum of the keys beyond the last row's reach, under a bidirectional mask.
    pub after: Option<(&'x [T], T)>,
}

/// What is done with the rows of a call: their outputs, or the gradients of their queries.
pub(super) trait Visitor<T: Real> {
    /// Handles the rows of one piece for every query head of the unit.
    fn attend(&mut self, walk: &Walk<'_, '_, T>, piece: &Piece, scene: &Scene<'_, T>, buffers: &mut Buffers<'_, T>);

    /// Handles a row that sees nothing.
    fn unseen(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize, row: usize);
}

/// Where outputs go.
#[derive(Clone, Copy)]
pub(super) struct Sink<'a, T> {
    pub out: SharedRows<'a, T>,
    /// `[batch, heads, queries]` as rows of one number.
    pub denominators: Option<SharedRows<'a, T>>,
}

/// The segments that lead from the first key to the last row under a causal mask; under a bidirectional one, those of
/// the keys.
pub(super) fn segments<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> Vec<Segment> {
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
fn segment_count<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    if !problem.causal {
        return cut_count(problem, unit.sequence.keys);
    }
    lead(problem, unit)
        .map_or(0, |(first, before, _)| cut_count(problem, before) + cut_count(problem, unit.sequence.queries - first))
}

/// How many segments [`cut`] makes of so many rows.
pub(super) fn cut_count<T: Real>(problem: &Problem<'_, T>, rows: usize) -> usize {
    rows.div_ceil(problem.segment(rows))
}

/// Rows `from..to` in segments.
pub(super) fn cut<T: Real>(
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
pub(super) fn first_row<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    if problem.causal { (-problem.offset).max(0).min(unit.sequence.queries as isize) as usize } else { 0 }
}

/// What a walk over a segment does beside forming its state.
pub(super) struct Walk<'w, 'a, T: 'static> {
    pub problem: &'w Problem<'a, T>,
    pub unit: Unit<'a, T>,
    pub table: Option<Table<'w, T>>,
    /// The ring of an initial state.
    pub ring: Option<Head<&'w [T]>>,
}

impl<T: Real> Walk<'_, '_, T> {
    /// Walks a causal segment: `local` becomes the summary of its keys; rows are written to `sink`, if given, from the
    /// state `start` of everything before the segment.
    pub fn causal(
        &self,
        segment: Segment,
        start: SummaryRef<'_, T>,
        local: &mut Summary<'_, T>,
        running_far: &mut [T],
        mut visitor: Option<&mut dyn Visitor<T>>,
        buffers: &mut Buffers<'_, T>,
    ) {
        let problem = self.problem;
        local.clear();
        // The far sum that rows read runs from `start` on; `local` keeps that of the segment alone.
        let (far, far_count) = running_far.split_at_mut(problem.value_width);
        far.copy_from_slice(start.far());
        far_count[0] = start.count();
        let mut row = segment.from;
        while row < segment.to {
            let (piece, shift) =
                buffers.piece(problem, &self.unit, segment.offset, row, segment.to, local.view().shift(), self.ring);
            if problem.content && problem.exponential {
                local.raise(problem, shift);
            }
            if let Some(visitor) = &mut visitor {
                let scene = Scene {
                    start,
                    start_decay: self.unit.decay(row - segment.from),
                    local: Some(local.view()),
                    far: (far, far_count[0]),
                    after: None,
                };
                visitor.attend(self, &piece, &scene, buffers);
            }
            if problem.radius.is_some() {
                self.advance_far(&piece, local, far, &mut far_count[0], buffers);
            }
            if problem.content {
                self.absorb(&piece, local, buffers);
            }
            row += piece.rows;
        }
    }

    /// Lets the far sums pass the rows of a piece.
    fn advance_far(
        &self,
        piece: &Piece,
        local: &mut Summary<'_, T>,
        far: &mut [T],
        far_count: &mut T,
        buffers: &Buffers<'_, T>,
    ) {
        let run = piece.entering(self.problem, &self.unit, buffers.v);
        self.problem.ops.add_running(far, run, &mut [], 0);
        self.problem.ops.add_running(local.far(), run, &mut [], 0);
        for row in 0..piece.rows {
            let here = run.gain * buffers.present[row];
            *far_count = (*far_count + here) * run.decay;
            *local.count() = (*local.count() + here) * run.decay;
        }
    }

    /// Lets the piece's keys enter the summary and its rows pass.
    pub fn absorb(&self, piece: &Piece, local: &mut Summary<'_, T>, buffers: &mut Buffers<'_, T>) {
        let problem = self.problem;
        let width = problem.head_width;
        if self.unit.gamma != 1.0 {
            local.scale_content(problem, self.unit.decay(piece.rows));
            for key in 0..piece.keys {
                // Key `key` is `rows − key` tokens before the next piece's first row.
                let weight = self.unit.decay(piece.rows - key);
                problem.ops.scale(&mut buffers.k[key * width..][..width], weight);
            }
            let rows = padded::<T>(piece.keys);
            problem.ops.transpose(buffers.k, width, rows, width, buffers.k_columns, buffers.sizes.chunk);
        }
        if piece.keys == 0 {
            return;
        }
        let first = (piece.key as isize - piece.window) as usize * problem.value_width;
        let chunk = buffers.sizes.chunk;
        problem.ops.product(&mut Product {
            a: buffers.k_columns,
            a_row: chunk,
            a_column: 1,
            b: &buffers.v[first..],
            b_row: problem.value_width,
            c: local.sum(),
            c_row: problem.value_width,
            rows: problem.depth,
            columns: problem.value_width,
            depth: piece.keys,
            accumulate: true,
            a_band: Band::ALL,
            c_band: Band::ALL,
        });
        let from = problem.layout.denominator();
        problem.ops.add_column_sums(&buffers.k[from..], width, piece.keys, &mut local.keys()[from..]);
        local.set_content();
    }

    /// Sums up the keys `from..to` for a bidirectional mask: content, and all values as the far sum.
    pub fn bidirectional_keys(&self, from: usize, to: usize, local: &mut Summary<'_, T>, buffers: &mut Buffers<'_, T>) {
        let problem = self.problem;
        local.clear();
        let mut key = from;
        while key < to {
            let keys = (to - key).min(buffers.sizes.chunk);
            let piece =
                Piece { row: key, rows: keys, window: key as isize, window_len: keys, key, keys, skip: 0, lead: 0 };
            buffers.load_window(problem, &self.unit, &piece, None);
            if problem.content {
                let mut shift = local.view().shift();
                if problem.exponential {
                    shift = self.unit.highest(problem, key, key + keys, shift);
                    local.raise(problem, shift);
                }
                buffers.load_keys(problem, &self.unit, &piece, shift);
                self.absorb(&piece, local, buffers);
            }
            if problem.radius.is_some() {
                problem.ops.add_column_sums(buffers.v, problem.value_width, keys, local.far());
                *local.count() += buffers.present[..keys].iter().copied().sum();
            }
            key += keys;
        }
    }

    /// Sums `v⁺` over the keys `from..to`, clamped to the sequence, into a far sum.
    fn sum_values(&self, from: isize, to: isize, far: &mut [T], count: &mut T, buffers: &mut Buffers<'_, T>) {
        let (mut key, to) = (self.unit.clamp(from), self.unit.clamp(to));
        while key < to {
            let keys = (to - key).min(buffers.sizes.chunk);
            let piece =
                Piece { row: key, rows: keys, window: key as isize, window_len: keys, key, keys, skip: 0, lead: 0 };
            buffers.load_window(self.problem, &self.unit, &piece, None);
            self.problem.ops.add_column_sums(buffers.v, self.problem.value_width, keys, far);
            *count += buffers.present[..keys].iter().copied().sum();
            key += keys;
        }
    }

    /// Writes the rows `from..to` under a bidirectional mask, from the summary of all keys and the far sums of each key
    /// segment before (`prefix`) and after (`suffix`) it.
    pub fn bidirectional_rows(
        &self,
        (from, to): (usize, usize),
        total: SummaryRef<'_, T>,
        far: &FarSums<'_, T>,
        visitor: &mut dyn Visitor<T>,
        buffers: &mut Buffers<'_, T>,
        checkpoints: &mut [T],
    ) {
        let problem = self.problem;
        let width = problem.value_width;
        let entry = width + padded::<T>(1);
        let chunk = buffers.sizes.chunk;
        let Some(radius) = problem.radius else {
            let mut row = from;
            while row < to {
                let (piece, _) = buffers.piece(problem, &self.unit, problem.offset, row, to, total.shift(), None);
                let scene = Scene { start: total, start_decay: T::ONE, local: None, far: (&[], T::ZERO), after: None };
                visitor.attend(self, &piece, &scene, buffers);
                row += piece.rows;
            }
            return;
        };
        let stands = |row: usize| row as isize + problem.offset;
        let reach = radius as isize;
        // Far sums before the first row and after each chunk.
        let (before, rest) = checkpoints.split_at_mut(entry);
        before.fill(T::ZERO);
        let chunks = (to - from).div_ceil(chunk);
        let after = &mut rest[..chunks * entry];
        after.fill(T::ZERO);
        if radius > 0 {
            let start = stands(from) - reach;
            let (sums, count) = before.split_at_mut(width);
            let boundary = far.prefix(self.unit.clamp(start), sums, &mut count[0]);
            self.sum_values(boundary as isize, start, sums, &mut count[0], buffers);
            let end = stands(to) + reach;
            let (sums, count) = after[(chunks - 1) * entry..].split_at_mut(width);
            let boundary = far.suffix(self.unit.clamp(end), sums, &mut count[0]);
            self.sum_values(end, boundary as isize, sums, &mut count[0], buffers);
            for index in (0..chunks - 1).rev() {
                let first = from + (index + 1) * chunk;
                let next = (first + chunk).min(to);
                let (this, later) = after[index * entry..].split_at_mut(entry);
                this.copy_from_slice(&later[..entry]);
                let (sums, count) = this.split_at_mut(width);
                self.sum_values(stands(first) + reach, stands(next) + reach, sums, &mut count[0], buffers);
            }
        } else {
            // R = 0 has one weight for all keys.
            before[..width].copy_from_slice(total.far());
            before[width] = total.count();
        }
        let mut row = from;
        for index in 0..chunks {
            let (piece, _) = buffers.piece(problem, &self.unit, problem.offset, row, to, total.shift(), None);
            let (sums, count) = before.split_at_mut(width);
            let later = &after[index * entry..][..entry];
            let scene = Scene {
                start: total,
                start_decay: T::ONE,
                local: None,
                far: (sums, count[0]),
                after: (radius > 0).then_some((&later[..width], later[width])),
            };
            visitor.attend(self, &piece, &scene, buffers);
            if radius > 0 {
                let run = piece.entering(problem, &self.unit, buffers.v);
                problem.ops.add_running(sums, run, &mut [], 0);
                count[0] += buffers.present[..piece.rows].iter().copied().sum();
            }
            row += piece.rows;
        }
    }
}

impl<T: Real> Visitor<T> for Sink<'_, T> {
    fn attend(&mut self, walk: &Walk<'_, '_, T>, piece: &Piece, scene: &Scene<'_, T>, buffers: &mut Buffers<'_, T>) {
        let (problem, unit) = (walk.problem, &walk.unit);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let sequence = &unit.sequence;
        let scales = Scales::new(problem, walk.table.as_ref(), scene);
        let decays = unit.gamma != 1.0;
        let run_sum = std::mem::take(&mut buffers.far);
        for head in problem.heads(unit) {
            let (first, count) = (piece.row, piece.rows);
            problem.load_queries(unit, head, first, count, buffers.q_shift, buffers.q, &mut buffers.lift);
            buffers.sums[..piece.rows].fill(T::ZERO);
            let mut written = false;

            let state = if problem.content {
                let local = scene.local.map(|local| (local, scales.local));
                combine_states(problem, buffers.state, (scene.start, scales.start), local)
            } else {
                None
            };
            if let Some((sum, keys)) = state {
                problem.ops.product(&mut Product {
                    a: buffers.q,
                    a_row: head_width,
                    a_column: 1,
                    b: sum,
                    b_row: value_width,
                    c: buffers.o,
                    c_row: value_width,
                    rows: piece.rows,
                    columns: value_width,
                    depth: problem.depth,
                    accumulate: false,
                    a_band: Band::ALL,
                    c_band: Band::ALL,
                });
                let from = problem.layout.denominator();
                let (q, keys) = (&buffers.q[from..], &keys[from..]);
                problem.ops.add_row_dots(q, head_width, keys, &mut buffers.sums[..piece.rows]);
                if decays {
                    for row in 1..piece.rows {
                        let factor = unit.decay(row);
                        problem.ops.scale(&mut buffers.o[row * value_width..][..value_width], factor);
                        buffers.sums[row] *= factor;
                    }
                }
                written = true;
            }

            if let Some(table) = &walk.table {
                buffers.load_relative(problem, table, head, piece.rows, scales.relative);
            }
            let band = Buffers::tile_band(problem, piece);
            let row_length = buffers.sizes.tile_row;
            let separate = problem.layout.separate().filter(|_| piece.keys > 0);
            if let Some(from) = separate {
                buffers.fill_denominators(problem, piece, from, scales.local, decays);
                let sums = &mut buffers.sums[..piece.rows];
                problem.ops.mask_and_sum(buffers.tile, row_length, piece.columns(), band, sums);
            }
            if buffers.fill_tile(problem, piece, walk.table.as_ref(), scales.local, decays) {
                if separate.is_some() {
                    problem.ops.mask(buffers.tile, row_length, piece.rows, piece.columns(), band);
                } else {
                    let sums = &mut buffers.sums[..piece.rows];
                    problem.ops.mask_and_sum(buffers.tile, row_length, piece.columns(), band, sums);
                }
                problem.ops.product(&mut Product {
                    a: buffers.tile,
                    a_row: row_length,
                    a_column: 1,
                    b: &buffers.v[piece.skip * value_width..],
                    b_row: value_width,
                    c: buffers.o,
                    c_row: value_width,
                    rows: piece.rows,
                    columns: value_width,
                    depth: piece.columns(),
                    accumulate: written,
                    a_band: band,
                    c_band: Band::ALL,
                });
                written = true;
            }
            if !written {
                buffers.o[..piece.rows * value_width].fill(T::ZERO);
            }

            if let (Some(table), Some(radius)) = (&walk.table, problem.radius) {
                let (weights, weight_step) = (&*buffers.relative, table.width);
                let run = Run { weights, weight_step, ..piece.entering(problem, unit, buffers.v) };
                run_sum.copy_from_slice(scene.far.0);
                problem.ops.add_running(run_sum, run, buffers.o, value_width);
                let mut count = scene.far.1;
                for row in 0..piece.rows {
                    count += run.gain * buffers.present[row];
                    buffers.sums[row] += buffers.relative[row * table.width] * count;
                    count *= run.decay;
                }
                if let Some((sums, mut count)) = scene.after {
                    let weights = &buffers.relative[2 * radius..];
                    let run = Run { weights, weight_step, ..piece.leaving(problem, unit, buffers.v) };
                    run_sum.copy_from_slice(sums);
                    problem.ops.add_running(run_sum, run, buffers.o, value_width);
                    for row in (0..piece.rows).rev() {
                        count += buffers.present[row + 2 * radius];
                        buffers.sums[row] += buffers.relative[row * table.width + 2 * radius] * count;
                    }
                }
            }

            for row in 0..piece.rows {
                let token = sequence.query_start + piece.row + row;
                let sum = buffers.sums[row];
                // SAFETY: each (batch, head, token) belongs to one sequence, segment and piece, so to one task.
                let out = unsafe { self.out.row(sequence.batch, head, token, problem.dims.value_dim) };
                if !problem.attention.normalizes() {
                    let factor = if problem.exponential { (scales.shift + buffers.q_shift[row]).exp() } else { T::ONE };
                    problem.ops.store(&buffers.o[row * value_width..], factor, out);
                } else if problem.gives_nothing(sum) {
                    let place = (sequence.batch * problem.dims.heads + head) * problem.dims.queries + token;
                    problem.negative.see(sum, place);
                    out.fill(T::ZERO);
                } else {
                    problem.ops.store(&buffers.o[row * value_width..], T::ONE / sum, out);
                }
                if let Some(denominators) = self.denominators {
                    // SAFETY: as above.
                    let place = unsafe { denominators.row(sequence.batch, head, token, 1) };
                    place[0] = if problem.attention.normalizes() { sum } else { T::ONE };
                }
            }
        }
        buffers.far = run_sum;
    }
    fn unseen(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize, row: usize) {
        let token = unit.sequence.query_start + row;
        // SAFETY: these rows belong to no segment, and each unit's are written by one task.
        let out = unsafe { self.out.row(unit.sequence.batch, head, token, problem.dims.value_dim) };
        out.fill(T::ZERO);
        if let Some(denominators) = self.denominators {
            // SAFETY: as above.
            let place = unsafe { denominators.row(unit.sequence.batch, head, token, 1) };
            place[0] = if problem.attention.normalizes() { T::ZERO } else { T::ONE };
        }
    }
}

/// How the parts of a piece's weights are brought to one exponent under an exponential map; all 1 otherwise, but for
/// the decay of the start state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales<T> {
    pub start: T,
    pub local: T,
    pub relative: T,
    /// The common exponent.
    pub shift: T,
}

impl<T: Real> Scales<T> {
    pub fn new(problem: &Problem<'_, T>, table: Option<&Table<'_, T>>, scene: &Scene<'_, T>) -> Self {
        let &Scene { start, start_decay, local, .. } = scene;
        let none = Self { start: start_decay, local: T::ONE, relative: T::ONE, shift: T::ZERO };
        if !problem.exponential {
            return none;
        }
        let mut shift = T::NEG_INFINITY;
        if problem.content {
            if start.has_content() {
                shift = shift.max(start.shift());
            }
            // The local exponent counts the piece's own keys too.
            if let Some(local) = local {
                shift = shift.max(local.shift());
            }
        }
        if let Some(table) = table {
            shift = shift.max(table.shift);
        }
        if !shift.is_finite() {
            return none;
        }
        let factor = |x: T| if x.is_finite() { (x - shift).exp() } else { T::ZERO };
        Self {
            start: start_decay * factor(start.shift()),
            local: local.map_or(T::ZERO, |local| factor(local.shift())),
            relative: table.map_or(T::ZERO, |table| factor(table.shift)),
            shift,
        }
    }
}

/// Far sums of the key segments of one unit: `[sum of v⁺ (value_width), count (a line)]` for each, and their totals
/// before and after.
pub(super) struct FarSums<'s, T> {
    pub segment: usize,
    pub width: usize,
    /// Sums of segments `0..n`, for n from 0 to the number of segments.
    pub prefix: &'s [T],
    /// Sums of segments `n..`, for n from 0 to the number of segments.
    pub suffix: &'s [T],
    pub segments: usize,
}

impl<T: Real> FarSums<'_, T> {
    fn entry(&self) -> usize {
        self.width + padded::<T>(1)
    }

    /// Writes the sum of the whole segments before `key`; returns the key that they end at.
    fn prefix(&self, key: usize, sums: &mut [T], count: &mut T) -> usize {
        let segment = key / self.segment;
        let from = &self.prefix[segment * self.entry()..];
        sums.copy_from_slice(&from[..self.width]);
        *count = from[self.width];
        segment * self.segment
    }

    /// Writes the sum of the whole segments from `key` on; returns the key that they start at.
    fn suffix(&self, key: usize, sums: &mut [T], count: &mut T) -> usize {
        let segment = key.div_ceil(self.segment).min(self.segments);
        let from = &self.suffix[segment * self.entry()..];
        sums.copy_from_slice(&from[..self.width]);
        *count = from[self.width];
        segment * self.segment
    }
}

/// Fills the prefix and suffix totals of `sums`, one entry a segment; each has one entry more.
pub(super) fn accumulate<T: Real>(sums: &[T], entry: usize, prefix: &mut [T], suffix: &mut [T]) {
    let segments = sums.len() / entry;
    prefix[..entry].fill(T::ZERO);
    suffix[segments * entry..].fill(T::ZERO);
    for index in 0..segments {
        for at in 0..entry {
            prefix[(index + 1) * entry + at] = prefix[index * entry + at] + sums[index * entry + at];
            let back = segments - 1 - index;
            suffix[back * entry + at] = suffix[(back + 1) * entry + at] + sums[back * entry + at];
        }
    }
}

/// Working memory of one worker.
struct Worker<'s, T> {
    buffers: Buffers<'s, T>,
    running: &'s mut [T],
    carry: [&'s mut [T]; 2],
    local: &'s mut [T],
    far: FarMemory<'s, T>,
    checkpoints: &'s mut [T],
}

/// Far sums of one unit: for each key segment, and their prefixes and suffixes.
struct FarMemory<'s, T> {
    sums: &'s mut [T],
    prefix: &'s mut [T],
    suffix: &'s mut [T],
}

/// The sizes of all working memory of a forward call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    sizes: Sizes,
    layout: Layout,
    summary: usize,
    /// `v⁺` of one row.
    entry: usize,
    /// Most segments of a unit.
    segments: usize,
    /// Most key segments of a unit whose far sums are kept.
    far_segments: usize,
    checkpoints: usize,
}

impl Memory {
    pub fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let layout = Layout::new(problem);
        let sizes = Sizes::new(problem);
        let units = 0..problem.units();
        let segments = units.map(|index| segment_count(problem, &problem.unit(index))).max().unwrap_or(0);
        let rows = problem.sequences.iter().map(|s| s.queries.min(problem.segment(s.queries))).max().unwrap_or(0);
        let keeps_far = !problem.causal && problem.radius.is_some();
        let entry = problem.value_width + padded::<T>(1);
        Self {
            sizes,
            layout,
            summary: layout.len::<T>(),
            entry,
            segments,
            far_segments: if keeps_far { segments.max(1) } else { 0 },
            checkpoints: if keeps_far { (rows.div_ceil(sizes.chunk) + 1) * entry } else { 0 },
        }
    }

    /// Whether segments of a unit run side by side: only where the units alone would leave threads idle, since forming
    /// the states first costs the products `φ(k) vᵀ` a second time.
    fn split<T: Real>(&self, problem: &Problem<'_, T>) -> bool {
        problem.units() < rayon::current_num_threads() && self.segments > 1
    }

    fn states_len(&self) -> usize {
        (self.segments + 1) * self.summary
    }

    /// Numbers shared between the tasks of a unit.
    fn unit_len(&self, split: bool) -> usize {
        if split { self.states_len() + self.far_len() } else { 0 }
    }

    fn far_len(&self) -> usize {
        if self.far_segments == 0 { 0 } else { (3 * self.far_segments + 2) * self.entry }
    }

    fn worker_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        Buffers::len(problem, self.sizes) + self.entry + 3 * self.summary + self.far_len() + self.checkpoints
    }

    /// Numbers of scratch that [`visit_rows`] takes beside the table's.
    pub fn visit_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let workers = rayon::current_num_threads();
        problem.units() * self.unit_len(self.split(problem)) + workers * self.worker_len(problem)
    }

    fn far<'s, T: Real>(&self, arena: &mut Arena<'s, T>) -> FarMemory<'s, T> {
        let entry = self.entry;
        let n = if self.far_len() == 0 { 0 } else { self.far_segments + 1 };
        FarMemory {
            sums: arena.take(self.far_segments * entry),
            prefix: arena.take(n * entry),
            suffix: arena.take(n * entry),
        }
    }

    /// The prefixes and suffixes in memory laid out by [`far`](Self::far).
    fn far_totals<'s, T>(&self, memory: &'s [T]) -> (&'s [T], &'s [T]) {
        if memory.is_empty() {
            return (&[], &[]);
        }
        memory[self.far_segments * self.entry..].split_at((self.far_segments + 1) * self.entry)
    }

    fn worker<'s, T: Real>(&self, problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Worker<'s, T> {
        Worker {
            buffers: Buffers::new(problem, self.sizes, arena),
            running: arena.take(self.entry),
            carry: [arena.take(self.summary), arena.take(self.summary)],
            local: arena.take(self.summary),
            far: self.far(arena),
            checkpoints: arena.take(self.checkpoints),
        }
    }
}

/// One head's place for its state. One task at a time writes to it.
pub(super) type Place<'a, T> = Mutex<Head<&'a mut [T]>>;

/// Runs the chunked forward pass; the final state is left on the way where the rows end with the keys.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    sink: Sink<'_, T>,
    state: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let ends_with_keys = problem.offset == 0 && problem.sequences.iter().all(|s| s.queries == s.keys);
    let (on_the_way, afterwards) = if ends_with_keys { (state, None) } else { (None, state) };
    let places: Option<Vec<Place<'_, T>>> =
        on_the_way.map(|state| state.heads_mut().map(|head| Mutex::new(head.into())).collect());
    let memory = Memory::new(problem);
    let mut arena = Arena::new(scratch.take(problem.table_len() + memory.visit_len(problem)));
    let table = problem.table(&mut arena);
    visit_rows(problem, memory, table, &|_, _| sink, places.as_deref(), arena.rest());
    if let Some(state) = afterwards {
        final_state(problem, state, scratch);
    }
}

/// Shows every row of a call to the visitor that `make` gives for its unit and segment, and leaves the state after the
/// last row in `last`, one place a unit.
pub(super) fn visit_rows<T: Real, V: Visitor<T>>(
    problem: &Problem<'_, T>,
    memory: Memory,
    table: Option<Table<'_, T>>,
    make: &(impl Fn(usize, usize) -> V + Sync),
    last: Option<&[Place<'_, T>]>,
    scratch: &mut [T],
) {
    let units = problem.units();
    let split = memory.split(problem);
    let states_len = memory.states_len();
    let (per_unit, per_worker) = (memory.unit_len(split), memory.worker_len(problem));
    let (shared, scratch) = scratch.split_at_mut(units * per_unit);
    let call = Forward { problem, memory, table, make, last };

    if !split {
        parallel(units, scratch, per_worker, |index, scratch| {
            let mut worker = memory.worker(problem, &mut Arena::new(scratch));
            call.unit(index, &mut worker);
        });
        return;
    }
    let plans: Vec<Vec<Segment>> = (0..units).map(|index| segments(problem, &problem.unit(index))).collect();
    let tasks: Vec<(usize, usize)> =
        plans.iter().enumerate().flat_map(|(unit, plan)| (0..plan.len()).map(move |s| (unit, s))).collect();
    {
        let mut states = ViewMut::strided(&mut *shared, [per_unit, 0, memory.summary]);
        let states = states.shared();
        parallel(tasks.len(), scratch, per_worker, |task, scratch| {
            let mut worker = memory.worker(problem, &mut Arena::new(scratch));
            let (index, segment) = tasks[task];
            // SAFETY: each (unit, segment) is one task's own.
            let numbers = unsafe { states.row(index, 0, segment, memory.summary) };
            call.summarize(index, plans[index][segment], numbers, &mut worker);
        });
    }
    for (index, shared) in shared.chunks_exact_mut(per_unit).enumerate() {
        let mut worker = memory.worker(problem, &mut Arena::new(scratch));
        call.chain(index, &plans[index], shared, &mut worker);
    }
    let shared = &*shared;
    let tasks: Vec<(usize, usize, Segment)> = (0..units)
        .flat_map(|index| {
            let rows = if problem.causal {
                plans[index].clone()
            } else {
                cut(problem, 0, problem.unit(index).sequence.queries, problem.offset, true)
            };
            rows.into_iter().enumerate().map(move |(n, segment)| (index, n, segment))
        })
        .filter(|(_, _, segment)| segment.writes)
        .collect();
    (0..units).for_each(|index| call.visit_unseen_rows(index));
    parallel(tasks.len(), scratch, per_worker, |task, scratch| {
        let mut worker = memory.worker(problem, &mut Arena::new(scratch));
        let (index, n, segment) = tasks[task];
        let states = &shared[index * per_unit..][..per_unit];
        let state = |n: usize| SummaryRef::new(memory.layout, &states[n * memory.summary..][..memory.summary]);
        let walk = call.walk(index);
        worker.buffers.start(problem, &walk.unit);
        let Worker { buffers, running, local, checkpoints, .. } = &mut worker;
        let mut visitor = make(index, segment.number);
        if problem.causal {
            let mut local = Summary::new(memory.layout, local);
            walk.causal(segment, state(n), &mut local, running, Some(&mut visitor), buffers);
        } else {
            let segments = plans[index].len();
            let (prefix, suffix) = memory.far_totals(&states[states_len..]);
            let far =
                FarSums { segment: segment_step(&plans[index]), width: problem.value_width, prefix, suffix, segments };
            let rows = (segment.from, segment.to);
            walk.bidirectional_rows(rows, state(segments), &far, &mut visitor, buffers, checkpoints);
        }
    });
}

/// Rows of each of a unit's segments but the last.
fn segment_step(segments: &[Segment]) -> usize {
    segments.first().map_or(1, |first| first.to - first.from)
}

/// A visit under way.
struct Forward<'w, 'p, 'a, T: 'static, F> {
    problem: &'w Problem<'a, T>,
    memory: Memory,
    table: Option<Table<'w, T>>,
    make: &'w F,
    last: Option<&'w [Place<'p, T>]>,
}

impl<'w, 'a, T: Real, V: Visitor<T>, F: Fn(usize, usize) -> V> Forward<'w, '_, 'a, T, F> {
    fn walk(&self, index: usize) -> Walk<'w, 'a, T> {
        let unit = self.problem.unit(index);
        let ring = self.problem.call.initial_state.map(|state| unit.head(state));
        Walk { problem: self.problem, unit, table: self.table, ring }
    }

    /// What was before key 0.
    fn carry<'s>(&self, unit: &Unit<'_, T>, [high, low]: [&'s mut [T]; 2]) -> Carry<'s, T> {
        let mut carry = Carry::new(self.memory.layout, high, low);
        if let Some(state) = self.problem.call.initial_state {
            carry.load(unit.head(state), self.problem.dims.value_dim);
        }
        carry
    }

    /// Forms the summary of one segment alone.
    fn summarize(&self, index: usize, segment: Segment, numbers: &mut [T], worker: &mut Worker<'_, T>) {
        let walk = self.walk(index);
        worker.buffers.start(self.problem, &walk.unit);
        let mut local = Summary::new(self.memory.layout, numbers);
        if self.problem.causal {
            let mut nothing = Summary::new(self.memory.layout, worker.local);
            nothing.clear();
            walk.causal(segment, nothing.view(), &mut local, worker.running, None, &mut worker.buffers);
        } else {
            walk.bidirectional_keys(segment.from, segment.to, &mut local, &mut worker.buffers);
        }
    }

    /// Turns the summaries of a unit's segments into what each segment starts from; the total comes after the last.
    fn chain(&self, index: usize, plan: &[Segment], shared: &mut [T], worker: &mut Worker<'_, T>) {
        let Memory { layout, summary, .. } = self.memory;
        let unit = self.problem.unit(index);
        let (states, far) = shared.split_at_mut((self.memory.segments + 1) * summary);
        let mut far = self.memory.far(&mut Arena::new(far));
        let [high, low] = &mut worker.carry;
        let mut carry = self.carry(&unit, [high, low]);
        for (n, segment) in plan.iter().enumerate() {
            carry.pass(self.problem, &unit, segment.idle);
            worker.local.copy_from_slice(&states[n * summary..][..summary]);
            states[n * summary..][..summary].copy_from_slice(carry.high.numbers);
            let local = SummaryRef::new(layout, worker.local);
            self.keep_far(n, local, &mut far);
            carry.add(self.problem, &unit, segment.to - segment.from, local);
        }
        states[plan.len() * summary..][..summary].copy_from_slice(carry.high.numbers);
        self.leave(index, &carry.high);
        self.accumulate_far(plan.len(), &mut far);
    }

    fn keep_far(&self, n: usize, local: SummaryRef<'_, T>, far: &mut FarMemory<'_, T>) {
        if !far.sums.is_empty() {
            let to = &mut far.sums[n * self.memory.entry..][..self.memory.entry];
            to.fill(T::ZERO);
            to[..self.problem.value_width].copy_from_slice(local.far());
            to[self.problem.value_width] = local.count();
        }
    }

    fn accumulate_far(&self, segments: usize, far: &mut FarMemory<'_, T>) {
        if !far.sums.is_empty() {
            accumulate(&far.sums[..segments * self.memory.entry], self.memory.entry, far.prefix, far.suffix);
        }
    }

    /// One unit from its first segment to its last.
    fn unit(&self, index: usize, worker: &mut Worker<'_, T>) {
        let problem = self.problem;
        let walk = self.walk(index);
        let unit = &walk.unit;
        self.visit_unseen_rows(index);
        let Worker { buffers, running, carry: [high, low], local, far, checkpoints } = worker;
        buffers.start(problem, unit);
        let mut carry = self.carry(unit, [high, low]);
        let mut local = Summary::new(self.memory.layout, local);
        let plan = segments(problem, unit);
        for (n, &segment) in plan.iter().enumerate() {
            carry.pass(problem, unit, segment.idle);
            if problem.causal {
                let mut visitor = segment.writes.then(|| (self.make)(index, segment.number));
                let visitor = visitor.as_mut().map(|visitor| visitor as &mut dyn Visitor<T>);
                walk.causal(segment, carry.high.view(), &mut local, running, visitor, buffers);
            } else {
                walk.bidirectional_keys(segment.from, segment.to, &mut local, buffers);
                self.keep_far(n, local.view(), far);
            }
            // If nothing reads what would be carried beyond the last rows, that is worth its time for short sequences.
            if problem.causal && n + 1 == plan.len() && self.last.is_none() {
                return;
            }
            carry.add(problem, unit, segment.to - segment.from, local.view());
        }
        if problem.causal {
            self.leave(index, &carry.high);
            return;
        }
        self.accumulate_far(plan.len(), far);
        let far = FarSums {
            segment: segment_step(&plan),
            width: problem.value_width,
            prefix: far.prefix,
            suffix: far.suffix,
            segments: plan.len(),
        };
        for rows in cut(problem, 0, unit.sequence.queries, problem.offset, true) {
            let total = carry.high.view();
            let mut visitor = (self.make)(index, rows.number);
            walk.bidirectional_rows((rows.from, rows.to), total, &far, &mut visitor, buffers, checkpoints);
        }
    }

    /// Leaves the state after a unit's last row, if it is wanted.
    fn leave(&self, index: usize, sums: &Summary<'_, T>) {
        if let Some(places) = self.last {
            let walk = self.walk(index);
            store_state(self.problem, &walk.unit, walk.ring, sums, &places[index]);
        }
    }

    /// Rows that stand before the first key see nothing.
    fn visit_unseen_rows(&self, index: usize) {
        let unit = self.problem.unit(index);
        let rows = first_row(self.problem, &unit);
        if rows > 0 {
            let mut visitor = (self.make)(index, 0);
            for head in self.problem.heads(&unit) {
                (0..rows).for_each(|row| visitor.unseen(self.problem, &unit, head, row));
            }
        }
    }
}

/// Writes the state after the last key of every sequence.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>, scratch: &mut Scratch<T>) {
    let memory = Memory::new(problem);
    let per_worker = memory.worker_len(problem);
    let workers = rayon::current_num_threads();
    let mut arena = Arena::new(scratch.take(problem.table_len() + workers * per_worker));
    // The table is not read, but it sets the least exponent of the keys.
    let table = problem.table(&mut arena);
    let heads: Vec<Place<'_, T>> = state.heads_mut().map(|head| Mutex::new(head.into())).collect();
    parallel(heads.len(), arena.rest(), per_worker, |index, scratch| {
        let unit = problem.unit(index);
        let ring = problem.call.initial_state.map(|state| unit.head(state));
        let walk = Walk { problem, unit, table, ring };
        let Worker { mut buffers, running, carry: [high, low], local, .. } =
            memory.worker(problem, &mut Arena::new(scratch));
        buffers.start(problem, &unit);
        let mut carry = Carry::new(memory.layout, high, low);
        if let Some(before) = ring {
            carry.load(before, problem.dims.value_dim);
        }
        let mut local = Summary::new(memory.layout, local);
        let keys = unit.sequence.keys;
        for segment in cut(problem, 0, keys, 0, false) {
            walk.causal(segment, carry.high.view(), &mut local, running, None, &mut buffers);
            carry.add(problem, &unit, segment.to - segment.from, local.view());
        }
        store_state(problem, &unit, ring, &carry.high, &heads[index]);
    });
}

/// Writes the state after the last key of a unit: its sums, and the ring of its last values, or of those of the initial
/// state.
fn store_state<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    ring: Option<Head<&[T]>>,
    sums: &Summary<'_, T>,
    place: &Place<'_, T>,
) {
    // One task holds each head; a poisoned lock would mean that another panicked, which ends the call anyway.
    let mut head = place.lock().unwrap_or_else(PoisonError::into_inner);
    sums.store(&mut head, problem.dims.value_dim, problem.exponential);
    let keys = unit.sequence.keys;
    let entry = problem.dims.value_dim + 1;
    let radius = head.ring.len() / entry;
    head.marks[OLDEST] = T::ZERO;
    head.set_tokens(ring.map_or(0, |before| before.tokens()) + keys as u64);
    for (slot, to) in head.ring.chunks_exact_mut(entry).enumerate() {
        to.fill(T::ZERO);
        let key = (keys + slot) as isize - radius as isize;
        if key >= 0 && !unit.ignores(key as usize) {
            to[..entry - 1].copy_from_slice(unit.v.row(key as usize, entry - 1));
            to[entry - 1] = T::ONE;
        } else if let Some(row) = ring.and_then(|before| before.ring_row(-key as usize, entry))
            && key < 0
        {
            to.copy_from_slice(row);
        }
    }
}
