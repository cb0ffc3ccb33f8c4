//! One segment, chunk by chunk, and what the rows of a chunk see beside its tile.

use super::super::problem::{Problem, Table, Unit};
use super::super::state::Head;
use super::super::summary::{Summary, SummaryRef};
use super::super::tile::{Buffers, Piece};
use super::far_sums::FarSums;
use super::segments::Segment;
use crate::kernelized::running_sum::AddRunning;
use crate::simd::block::{add_column_sums, add_scaled, scale_rows};
use crate::simd::product::Product;
use crate::simd::rows::{padded, pieces};
use crate::simd::{Real, dispatch};
use crate::threads;

/// What the rows of a piece see beside its tile.
pub(in crate::kernelized) struct Scene<'x, T> {
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

/// How the parts of a piece's weights are brought to one exponent under an exponential map; all 1 otherwise, but for
/// the decay of the start state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::kernelized) struct Scales<T> {
    pub start: T,
    pub local: T,
    pub relative: T,
    pub shift: T,
}

impl<T: Real> Scales<T> {
    /// For a head whose table has the exponent `table`.
    pub fn new(problem: &Problem<'_, T>, table: Option<T>, scene: &Scene<'_, T>) -> Self {
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
            shift = shift.max(table);
        }
        if !shift.is_finite() {
            return none;
        }
        let factor = |x: T| if x.is_finite() { (x - shift).exp() } else { T::ZERO };
        Self {
            start: start_decay * factor(start.shift()),
            local: local.map_or(T::ZERO, |local| factor(local.shift())),
            relative: table.map_or(T::ZERO, factor),
            shift,
        }
    }
}

/// What is done with the rows of a call: their outputs, or the gradients of their queries.
pub(in crate::kernelized) trait Visitor<T: Real> {
    /// Handles the rows of one piece for every query head of the unit.
    fn attend(&mut self, walk: &Walk<'_, '_, T>, piece: &Piece, scene: &Scene<'_, T>, buffers: &mut Buffers<'_, T>);

    /// Handles a row that sees nothing.
    fn unseen(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize, row: usize);

    /// Called when every row of a segment has been handled.
    fn end(&mut self, _problem: &Problem<'_, T>) {}
}

/// What a walk over a segment does beside forming its state.
pub(in crate::kernelized) struct Walk<'w, 'a, T: 'static> {
    pub problem: &'w Problem<'a, T>,
    pub unit: Unit<'a, T>,
    pub table: Option<Table<'w, T>>,
    /// The ring of an initial state.
    pub ring: Option<Head<&'w [T]>>,
}

impl<T: Real> Walk<'_, '_, T> {
    /// Walks a causal segment: rows are shown to the visitor, if there is one, with the state `start` of everything before the segment.
    /// `local` becomes the summary of the segment's keys if that is `kept`, else of all but the last piece's, which no row reads.
    pub fn causal(
        &self,
        segment: Segment,
        start: SummaryRef<'_, T>,
        (local, kept): (&mut Summary<'_, T>, bool),
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
        let mut start_decay = T::ONE;
        while row < segment.to {
            threads::check();
            let (piece, shift) =
                buffers.piece(problem, &self.unit, segment.offset, row, segment.to, local.view().shift(), self.ring);
            if problem.content && problem.exponential {
                local.raise(shift);
            }
            if let Some(visitor) = &mut visitor {
                let scene =
                    Scene { start, start_decay, local: Some(local.view()), far: (far, far_count[0]), after: None };
                visitor.attend(self, &piece, &scene, buffers);
            }
            let place = |row: usize| row as isize + segment.offset;
            let passed = (place(segment.from), place(row + piece.rows));
            start_decay = self.unit.decay.over_both([start_decay, buffers.decays.total()], passed);
            row += piece.rows;
            if row == segment.to && !kept {
                break;
            }
            if problem.radius.is_some() {
                self.advance_far(&piece, local, far, &mut far_count[0], buffers);
            }
            if problem.content {
                self.absorb(&piece, local, buffers);
            }
        }
    }

    fn advance_far(
        &self,
        piece: &Piece,
        local: &mut Summary<'_, T>,
        far: &mut [T],
        far_count: &mut T,
        buffers: &Buffers<'_, T>,
    ) {
        let run = piece.entering(self.problem, (buffers.v, &buffers.far_decays));
        dispatch(AddRunning { sum: far, run, to: &mut [], to_row: 0 });
        dispatch(AddRunning { sum: local.far(), run, to: &mut [], to_row: 0 });
        for row in 0..piece.rows {
            let (here, step) = (run.gains[row], run.decays[row]);
            *far_count = (*far_count + here) * step;
            *local.count() = (*local.count() + here) * step;
        }
    }

    /// Lets the piece's keys enter the summary and its rows pass.
    pub fn absorb(&self, piece: &Piece, local: &mut Summary<'_, T>, buffers: &mut Buffers<'_, T>) {
        let problem = self.problem;
        let width = problem.head_width;
        let decays = !self.unit.decay.is_none();
        if decays {
            local.scale_content(buffers.decays.total());
            // The next piece's first row reads them.
            scale_rows((buffers.k, width), width, &buffers.decays.to_end[..piece.keys]);
        }
        if piece.keys == 0 {
            return;
        }
        let from = problem.layout.denominator();
        let keys = &mut local.keys()[from..];
        // Keys that turn leave their sums on the way.
        if !decays && problem.rotations.is_some() {
            add_scaled(keys, T::ONE, &buffers.lift.key_sums[from..]);
        } else {
            add_column_sums(&buffers.k[from..], width, piece.keys, keys);
        }
        let first = (piece.key as isize - piece.window) as usize * problem.value_width;
        let chunk = buffers.sizes.chunk;
        let next = (piece.key + piece.keys) as isize;
        let ahead = problem.keys_ahead(&self.unit, next, next + chunk as isize);
        Product::of_transposed(
            (buffers.k, width),
            (&buffers.v[first..], problem.value_width),
            (local.sum(), problem.value_width),
            [problem.depth, problem.value_width, piece.keys],
        )
        .accumulate(true)
        .compute_with(None, &ahead);
        local.set_content();
    }

    /// Sums up the keys `from..to` for a bidirectional mask: content, and all values as the far sum.
    pub fn bidirectional_keys(&self, from: usize, to: usize, local: &mut Summary<'_, T>, buffers: &mut Buffers<'_, T>) {
        let problem = self.problem;
        local.clear();
        for (key, keys) in pieces(from..to, buffers.sizes.chunk) {
            threads::check();
            let piece = Piece::of_keys(key, keys);
            buffers.load_window(problem, &self.unit, &piece, None);
            if problem.content {
                let mut shift = local.view().shift();
                if problem.exponential {
                    shift = self.unit.highest(problem, key, key + keys, shift);
                    local.raise(shift);
                }
                buffers.load_keys(problem, &self.unit, &piece, shift);
                self.absorb(&piece, local, buffers);
            }
            if problem.radius.is_some() {
                add_column_sums(buffers.v, problem.value_width, keys, local.far());
                *local.count() += buffers.present[..keys].iter().copied().sum();
            }
        }
    }

    /// Sums `v⁺` over the keys `from..to`, clamped to the sequence, into a far sum.
    fn sum_values(&self, from: isize, to: isize, far: &mut [T], count: &mut T, buffers: &mut Buffers<'_, T>) {
        for (key, keys) in pieces(self.unit.clamp(from)..self.unit.clamp(to), buffers.sizes.chunk) {
            threads::check();
            buffers.load_window(self.problem, &self.unit, &Piece::of_keys(key, keys), None);
            add_column_sums(buffers.v, self.problem.value_width, keys, far);
            *count += buffers.present[..keys].iter().copied().sum();
        }
    }

    /// Writes the rows `from..to` under a bidirectional mask, from the summary of all keys and the far sums before and after
    /// each key segment.
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
                threads::check();
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
            let boundary = far.before(self.unit.clamp(start), before);
            let (sums, count) = before.split_at_mut(width);
            self.sum_values(boundary as isize, start, sums, &mut count[0], buffers);
            let end = stands(to) + reach;
            let last = &mut after[(chunks - 1) * entry..];
            let boundary = far.after(self.unit.clamp(end), last);
            let (sums, count) = last.split_at_mut(width);
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
            threads::check();
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
                let run = piece.entering(problem, (buffers.v, &buffers.far_decays));
                dispatch(AddRunning { sum: sums, run, to: &mut [], to_row: 0 });
                count[0] += buffers.present[..piece.rows].iter().copied().sum();
            }
            row += piece.rows;
        }
    }
}
