//! The pass over the rows: gradients of queries and of the relative table.

use super::super::problem::{Problem, Unit};
use super::super::row_pass::{Scales, Scene, Visitor, Walk};
use super::super::tile::{Buffers, Piece, combine_states, near_columns};
use super::row_sums;
use super::source::{GradientSink, Source};
use crate::call::SharedRows;
use crate::kernelized::running_sum::RunningDots;
use crate::simd::block::{add_scaled, multiply, scale_by, scale_rows, store, transpose};
use crate::simd::product::{Product, zero_outside};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};

pub(super) struct QueryGradients<'a, 's, T> {
    pub source: Source<'a, T>,
    pub sink: GradientSink<'a, T>,
    /// For each head of the unit, over this segment: the gradient of the relative table, `[table width, head_width]`, and the sums for
    /// the parameters of Fourier positions and of the map.
    pub table: &'s mut [T],
    /// The exponent of each row's piece and head, for the walk over the keys, and which unit's; under an exponential map only.
    pub shifts: (SharedRows<'a, T>, usize),
    /// How the state was formed whose transpose is in the buffers, if the last piece had one.
    pub state: Option<Scales<T>>,
    /// The sums that keys read, where every key reads those of all rows.
    pub sums: Option<row_sums::Place<'s, T>>,
}

impl<T: Real> Visitor<T> for QueryGradients<'_, '_, T> {
    fn attend(&mut self, walk: &Walk<'_, '_, T>, piece: &Piece, scene: &Scene<'_, T>, buffers: &mut Buffers<'_, T>) {
        let (problem, unit) = (walk.problem, &walk.unit);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let decays = !unit.decay.is_none();
        let row_length = buffers.sizes.tile_row;
        let near = near_columns(problem);
        let sequence = &unit.sequence;
        // Sᵀ and Vᵀ are wanted by every head; without a mask every piece has the same Sᵀ.
        self.state = self.state.filter(|_| !problem.causal);
        let separate = problem.layout.separate();
        let tiled = near > 0 || (problem.content && piece.keys > 0);
        if tiled {
            let rows = padded::<T>(piece.window_len);
            transpose((buffers.v, value_width), (rows, value_width), (buffers.v_columns, buffers.sizes.window));
        }
        let polynomial = problem.taylor.filter(|_| piece.keys > 0);
        if polynomial.is_some() {
            buffers.transpose_keys(problem, piece);
        }
        let run_sum = std::mem::take(&mut buffers.far);
        for (n, head) in problem.heads(unit).enumerate() {
            let scales = Scales::new(problem, walk.table.map(|table| table.shift(head)), scene);
            if problem.exponential {
                let (shifts, unit) = self.shifts;
                // SAFETY: each row belongs to one segment and piece, so to one task.
                unsafe { shifts.row(unit, n, piece.row, piece.rows) }.fill(scales.shift);
            }
            if problem.content && self.state != Some(scales) {
                let local = scene.local.map(|local| (local, scales.local));
                let state = combine_states(buffers.state, (scene.start, scales.start), local);
                self.state = state.map(|(sum, keys)| {
                    transpose((sum, value_width), (head_width, value_width), (buffers.state_columns, head_width));
                    buffers.keys_sum.copy_from_slice(keys);
                    scales
                });
            }
            let (first, count) = (piece.row, piece.rows);
            problem.load_queries(unit, head, first, count, buffers.q_shift, buffers.q, &mut buffers.lift);
            let q_shift = &*buffers.q_shift;
            let scale = |row: usize| if problem.exponential { (scales.shift + q_shift[row]).exp() } else { T::ONE };
            self.source.load(problem, unit, head, piece.row, piece.rows, scale, buffers.o, buffers.sums);
            let mut written = false;
            if self.state.is_some() {
                let (next, end) = piece.next_rows();
                let [out, d_out] = self.source.ahead(problem, unit, head, next, end);
                let ahead = [problem.queries_ahead(unit, head, next, end), out, d_out];
                Product::of(
                    (buffers.o, value_width),
                    (buffers.state_columns, head_width),
                    (buffers.dq, head_width),
                    [piece.rows, head_width, problem.dims.value_dim],
                )
                .compute_with(Some((buffers.sums, buffers.keys_sum)), &ahead);
                if decays {
                    scale_rows((buffers.dq, head_width), head_width, &buffers.decays.from_start[..piece.rows]);
                }
                written = true;
            }
            if tiled {
                let band = Buffers::tile_band(problem, piece);
                if polynomial.is_some() {
                    // For the slopes.
                    buffers.weigh_pairs(problem, piece);
                }
                buffers.tile[..piece.rows * row_length].fill(T::ZERO);
                let token = sequence.query_start + first;
                let ahead = self.sink.rows.dq.ahead(sequence.batch, head, token, count, problem.dims.head_dim);
                Product::of(
                    (buffers.o, value_width),
                    // Values of no columns have no rows to skip.
                    (&buffers.v_columns[piece.skip.min(buffers.v_columns.len())..], buffers.sizes.window),
                    (buffers.tile, row_length),
                    [piece.rows, piece.columns(), problem.dims.value_dim],
                )
                .c_band(band)
                .compute_with(None, &[ahead]);
                for row in 0..if separate.is_some() { 0 } else { piece.rows } {
                    let line = &mut buffers.tile[row * row_length..][..piece.columns()];
                    if !buffers.all_present {
                        multiply(line, &buffers.present[piece.skip..]);
                    }
                    add_scaled(line, buffers.sums[row], &buffers.present[piece.skip..]);
                    if polynomial.is_some() {
                        multiply(line, &buffers.slopes[row * row_length..]);
                    }
                }
                zero_outside((buffers.tile, row_length), (piece.rows, piece.columns()), band);
                if decays {
                    buffers.decay_tile(piece);
                }
            }
            if let (Some(table), Some(radius)) = (&walk.table, problem.radius) {
                let d_relative = &mut buffers.relative[..piece.rows * table.width];
                d_relative.fill(T::ZERO);
                for row in 0..piece.rows {
                    d_relative[row * table.width + 1..][..near]
                        .copy_from_slice(&buffers.tile[row * row_length + row..][..near]);
                }
                let far = (&*buffers.v, &buffers.far_decays);
                let run = piece.entering(problem, far);
                run_sum.copy_from_slice(scene.far.0);
                let dots = &mut buffers.dots[..piece.rows];
                dots.fill(T::ZERO);
                dispatch(RunningDots { sum: run_sum, run, with: buffers.o, with_row: value_width, dots });
                let mut count = scene.far.1;
                for row in 0..piece.rows {
                    count += run.gains[row];
                    d_relative[row * table.width] = dots[row] + buffers.sums[row] * count;
                    count *= run.decays[row];
                }
                if let Some((sums, mut count)) = scene.after {
                    let run = piece.leaving(problem, far);
                    run_sum.copy_from_slice(sums);
                    dots.fill(T::ZERO);
                    dispatch(RunningDots { sum: run_sum, run, with: buffers.o, with_row: value_width, dots });
                    for row in (0..piece.rows).rev() {
                        count += buffers.present[row + 2 * radius];
                        d_relative[row * table.width + 2 * radius] = dots[row] + buffers.sums[row] * count;
                    }
                }
                if scales.relative != T::ONE {
                    scale_by(d_relative, scales.relative);
                }
                let sizes = [piece.rows, head_width, table.count];
                Product::of((d_relative, table.width), (table.rows(head), head_width), (buffers.dq, head_width), sizes)
                    .accumulate(written)
                    .compute();
                written = true;
                let len = table.width * head_width;
                Product::of_transposed(
                    (d_relative, table.width),
                    (buffers.q, head_width),
                    (&mut self.table[n * (len + problem.sums_len())..][..len], head_width),
                    [table.count, head_width, piece.rows],
                )
                .accumulate(true)
                .compute();
            }
            if problem.content && piece.keys > 0 {
                if scales.local != T::ONE {
                    scale_by(&mut buffers.tile[..piece.rows * row_length], scales.local);
                }
                let sizes = [piece.rows, piece.keys];
                let pull_back = |buffers: &mut Buffers<'_, T>, columns| {
                    let (tile, to) =
                        ((&buffers.tile[piece.lead..], row_length), (&mut *buffers.dq, &mut *buffers.linear));
                    problem.pull_back_pairs(false, tile, buffers.k, to, sizes, columns, written);
                };
                pull_back(buffers, 0..separate.unwrap_or(head_width));
                if let Some(from) = separate {
                    for row in 0..piece.rows {
                        let c = buffers.sums[row] * scales.local;
                        buffers.tile[row * row_length..][..=row].fill(c);
                    }
                    if decays {
                        buffers.decay_tile(piece);
                    }
                    pull_back(buffers, from..head_width);
                }
                written = true;
            }
            if !written {
                buffers.dq[..piece.rows * head_width].fill(T::ZERO);
            }
            if let Some(place) = &mut self.sums {
                // Without a mask the exponent is that of the head, in all pieces.
                place.sums.raise(-scales.shift);
                let factor = (-scales.shift - *place.sums.shift()).exp();
                if factor != T::ONE {
                    scale_by(&mut buffers.o[..count * value_width], factor);
                    scale_by(&mut buffers.sums[..count], factor);
                }
                let token = sequence.query_start + first;
                let ahead = self.sink.rows.dq.ahead(sequence.batch, head, token, count, problem.dims.head_dim);
                let rows = (&*buffers.q, &*buffers.o, &*buffers.sums);
                row_sums::absorb(problem, count, rows, &[ahead], &mut place.sums);
            }
            let head_dim = problem.dims.head_dim;
            let (len, table) = (problem.sums_len(), problem.table_width() * head_width);
            let sums = &mut self.table[n * (table + len) + table..][..len];
            let positions = self.sink.positions;
            let Buffers { q, dq, lift, .. } = &mut *buffers;
            let (rows, row_length) = problem.pull_back_queries(unit, head, first, count, q, dq, sums, positions, lift);
            for row in 0..piece.rows {
                let token = sequence.query_start + piece.row + row;
                // SAFETY: each (batch, head, token) belongs to one sequence, segment and piece, so to one task.
                let to = unsafe { self.sink.rows.dq.row(sequence.batch, head, token, head_dim) };
                store(&rows[row * row_length..], T::ONE, to);
            }
        }
        buffers.far = run_sum;
    }

    fn unseen(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize, row: usize) {
        let token = unit.sequence.query_start + row;
        // SAFETY: these rows belong to no segment, and each unit's are written by one task.
        let to = unsafe { self.sink.rows.dq.row(unit.sequence.batch, head, token, problem.dims.head_dim) };
        to.fill(T::ZERO);
    }

    fn end(&mut self, problem: &Problem<'_, T>) {
        if let Some(place) = &mut self.sums {
            place.end(problem);
        }
    }
}
