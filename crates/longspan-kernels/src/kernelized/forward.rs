//! The chunked forward pass: each chunk of rows reads the state of all earlier keys, adds its own keys' scores as one dense
//! tile, and is divided and written.

use super::problem::{Problem, Unit};
use super::row_pass::{Memory, RowPass, Scales, Scene, Visitor, Walk};
use super::summary::places;
use super::tile::{Buffers, Piece, combine_states};
use crate::call::{Arena, Scratch, Sink, State};
use crate::kernelized::running_sum::{AddRunning, Run};
use crate::simd::block::{add_row_dots, scale_rows, store};
use crate::simd::product::{Product, mask_and_sum, zero_outside};
use crate::simd::{Real, dispatch};

/// Writes one row of a unit from its weighed sum of values and of ones, and the exponent that both are relative to.
#[inline]
pub(super) fn write_row<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    sink: &Sink<'_, T>,
    (head, row): (usize, usize),
    (sum, denominator, exponent): (&[T], T, T),
) {
    let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
    // SAFETY: each (batch, head, token) belongs to one sequence, segment and piece, so to one task, which holds no other slice of it.
    let out = unsafe { sink.out.row(batch, head, token, problem.dims.value_dim) };
    let normalizes = problem.attention.normalizes();
    if !normalizes {
        let factor = if problem.exponential { exponent.exp() } else { T::ONE };
        store(sum, factor, out);
    } else if problem.gives_nothing(denominator) {
        let place = (batch * problem.dims.heads + head) * problem.dims.queries + token;
        problem.lost.see(denominator, place, || problem.sees_itself(unit, row));
        out.fill(T::ZERO);
    } else {
        store(sum, T::ONE / denominator, out);
    }
    // SAFETY: as above.
    unsafe { sink.set_denominator([batch, head, token], &[if normalizes { denominator } else { T::ONE }]) };
}

impl<T: Real> Visitor<T> for Sink<'_, T> {
    fn attend(&mut self, walk: &Walk<'_, '_, T>, piece: &Piece, scene: &Scene<'_, T>, buffers: &mut Buffers<'_, T>) {
        let (problem, unit) = (walk.problem, &walk.unit);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let sequence = &unit.sequence;
        let decays = !unit.decay.is_none();
        if problem.content && piece.keys > 0 {
            buffers.transpose_keys(problem, piece);
        }
        let run_sum = std::mem::take(&mut buffers.far);
        for head in problem.heads(unit) {
            let scales = Scales::new(problem, walk.table.map(|table| table.shift(head)), scene);
            let (first, count) = (piece.row, piece.rows);
            problem.load_queries(unit, head, first, count, buffers.q_shift, buffers.q, &mut buffers.lift);
            buffers.sums[..piece.rows].fill(T::ZERO);
            let mut written = false;

            let state = if problem.content {
                let local = scene.local.map(|local| (local, scales.local));
                combine_states(buffers.state, (scene.start, scales.start), local)
            } else {
                None
            };
            if let Some((sum, keys)) = state {
                let (next, end) = piece.next_rows();
                let ahead = [
                    problem.queries_ahead(unit, head, next, end),
                    self.out.ahead(sequence.batch, head, sequence.query_start + first, count, problem.dims.value_dim),
                ];
                let sizes = [piece.rows, value_width, problem.depth];
                Product::of((buffers.q, head_width), (sum, value_width), (buffers.o, value_width), sizes)
                    .compute_with(None, &ahead);
                let from = problem.layout.denominator();
                let (q, keys) = (&buffers.q[from..], &keys[from..]);
                add_row_dots(q, head_width, keys, &mut buffers.sums[..piece.rows]);
                if decays {
                    let decays = &buffers.decays.from_start[..piece.rows];
                    scale_rows((buffers.o, value_width), value_width, decays);
                    buffers.sums.iter_mut().zip(decays).for_each(|(sum, &decay)| *sum *= decay);
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
                mask_and_sum((buffers.tile, row_length), piece.columns(), band, sums);
            }
            if buffers.fill_tile(problem, piece, walk.table.as_ref(), scales.local, decays) {
                if separate.is_some() {
                    zero_outside((buffers.tile, row_length), (piece.rows, piece.columns()), band);
                } else {
                    let sums = &mut buffers.sums[..piece.rows];
                    mask_and_sum((buffers.tile, row_length), piece.columns(), band, sums);
                }
                Product::of(
                    (buffers.tile, row_length),
                    (&buffers.v[piece.skip * value_width..], value_width),
                    (buffers.o, value_width),
                    [piece.rows, value_width, piece.columns()],
                )
                .accumulate(written)
                .a_band(band)
                .compute();
                written = true;
            }
            if !written {
                buffers.o[..piece.rows * value_width].fill(T::ZERO);
            }

            if let (Some(table), Some(radius)) = (&walk.table, problem.radius) {
                let (weights, weight_step) = (&*buffers.relative, table.width);
                let far = (&*buffers.v, &buffers.far_decays);
                let run = Run { weights, weight_step, ..piece.entering(problem, far) };
                run_sum.copy_from_slice(scene.far.0);
                dispatch(AddRunning { sum: run_sum, run, to: buffers.o, to_row: value_width });
                let mut count = scene.far.1;
                for row in 0..piece.rows {
                    count += run.gains[row];
                    buffers.sums[row] += buffers.relative[row * table.width] * count;
                    count *= run.decays[row];
                }
                if let Some((sums, mut count)) = scene.after {
                    let weights = &buffers.relative[2 * radius..];
                    let run = Run { weights, weight_step, ..piece.leaving(problem, far) };
                    run_sum.copy_from_slice(sums);
                    dispatch(AddRunning { sum: run_sum, run, to: buffers.o, to_row: value_width });
                    for row in (0..piece.rows).rev() {
                        count += buffers.present[row + 2 * radius];
                        buffers.sums[row] += buffers.relative[row * table.width + 2 * radius] * count;
                    }
                }
            }

            for row in 0..piece.rows {
                let exponent = scales.shift + buffers.q_shift[row];
                let sums = (&buffers.o[row * value_width..], buffers.sums[row], exponent);
                write_row(problem, unit, self, (head, piece.row + row), sums);
            }
        }
        buffers.far = run_sum;
    }
    fn unseen(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize, row: usize) {
        let token = unit.sequence.query_start + row;
        // SAFETY: these rows belong to no segment, and each unit's are written by one task.
        let out = unsafe { self.out.row(unit.sequence.batch, head, token, problem.dims.value_dim) };
        out.fill(T::ZERO);
        let denominator = if problem.attention.normalizes() { T::ZERO } else { T::ONE };
        // SAFETY: as above.
        unsafe { self.set_denominator([unit.sequence.batch, head, token], &[denominator]) };
    }
}

/// Runs the chunked forward pass; the final state is left on the way where the rows end with the keys.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    sink: Sink<'_, T>,
    state: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let ends_with_keys = problem.offset == 0 && problem.sequences.iter().all(|s| s.queries == s.keys);
    let (on_the_way, afterwards) = if ends_with_keys { (state, None) } else { (None, state) };
    run(problem, Some(sink), on_the_way, scratch);
    if let Some(state) = afterwards {
        final_state(problem, state, scratch);
    }
}

/// Writes the state after the last key of every sequence.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>, scratch: &mut Scratch<T>) {
    run(problem, None, Some(state), scratch);
}

/// Passes over all rows, or over the keys alone if there is no place for outputs.
fn run<T: Real>(
    problem: &Problem<'_, T>,
    sink: Option<Sink<'_, T>>,
    state: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let (make, places) = (sink.map(|sink| move |_, _| sink), state.map(places));
    let memory = Memory::new(problem, false);
    let stages = memory.pass(problem);
    let mut arena = Arena::new(scratch.take(problem.table_len() + stages.len(problem)));
    // Without rows the table is not read, but it sets the least exponent of the keys.
    let table = problem.table(&mut arena);
    let pass = RowPass { problem, memory, table, make: make.as_ref(), last: places.as_deref() };
    stages.run(problem, &|index| pass.unit(index), 0, arena.rest());
}
