//! The forward pass: blocks of queries against tiles of keys, with running maxima, so that no score is kept.

use super::problem::{Block, Blocks, KEYS, Problem, ROWS, Segment, against, right_side};
use crate::call::{Arena, Scratch, Sequence, SharedRows};
use crate::simd::block::{scale_by, store};
use crate::simd::product::{Band, Product};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};
use crate::softmax::tile::SoftmaxTile;
use crate::threads::{self, parallel};

/// Where outputs go.
#[derive(Clone, Copy)]
pub(super) struct Sink<'a, T> {
    pub out: SharedRows<'a, T>,
    /// `[batch, heads, queries]` as rows of one number.
    pub denominators: Option<SharedRows<'a, T>>,
}

/// Rows of one head.
#[derive(Clone, Copy)]
struct RowRange {
    head: usize,
    row: usize,
    rows: usize,
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let blocks = Blocks::new(problem);
    let per_worker = Arena::measure(|arena| Block::new(problem, arena));
    let workers = threads::count().min(blocks.len());
    parallel(blocks.len(), scratch.take(workers * per_worker), per_worker, |task, scratch| {
        let mut memory = Block::new(problem, &mut Arena::new(scratch));
        let (sequence, head, block) = blocks.task(task);
        let sequence = &problem.sequences[sequence];
        let segments = problem.segments(sequence, head / problem.dims.group());
        let (mut row, end) = (block * ROWS, (block * ROWS + ROWS).min(sequence.queries));
        while row < end {
            let whole = !segments.iter().any(|segment| problem.carries(segment, row, end - row));
            let range = RowRange { head, row, rows: if whole { end - row } else { 1 } };
            attend(problem, sequence, &segments, range, &mut memory);
            write(problem, sequence, range, &mut memory, sink);
            row += range.rows;
        }
    });
}

/// Fills `memory` with the sums of a few rows.
fn attend<T: Real>(
    problem: &Problem<'_, T>,
    sequence: &Sequence<'_>,
    segments: &[Segment<'_, T>],
    range: RowRange,
    memory: &mut Block<'_, T>,
) {
    let dims = &problem.dims;
    let RowRange { head, row, rows } = range;
    let (columns, value_width) = (padded::<T>(rows), problem.value_width);
    let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start + row);
    let transposed = (&mut *memory.q_columns, columns);
    problem.load_block(queries, (rows, dims.head_dim), problem.scale, memory.q, transposed);
    memory.o[..rows * value_width].fill(T::ZERO);
    memory.sums.fill(T::ZERO);
    // The lowest finite number would do: what is subtracted from it stays a number.
    memory.highest.fill(-(T::ONE / T::MIN_POSITIVE));
    for segment in segments {
        let end = problem.end(segment, row + rows - 1);
        for key in (0..end).step_by(KEYS) {
            let keys = (end - key).min(KEYS);
            // Column `i` sees the lines up to `i + ahead`.
            let ahead = if segment.past || !problem.causal {
                isize::MAX / 2
            } else {
                row as isize + problem.offset - key as isize
            };
            let k = (segment.k.skip(key), dims.head_dim);
            against(k, keys, (memory.q_columns, columns), memory.tile, Band::starting_at(-ahead));
            let ignored = segment.padding.map(|padding| &padding[key..key + keys]);
            for (line, scores) in memory.tile.chunks_exact_mut(columns).take(keys).enumerate() {
                let unseen = (line as isize - ahead).clamp(0, columns as isize) as usize;
                let unseen = if ignored.is_some_and(|ignored| ignored[line]) { columns } else { unseen };
                scores[..unseen].fill(T::NEG_INFINITY);
            }
            let (highest, factors) = (&mut memory.highest[..columns], &mut memory.factors[..columns]);
            dispatch(SoftmaxTile {
                scores: memory.tile,
                row_length: columns,
                keys,
                highest,
                sums: memory.sums,
                factors,
            });
            for (sum, &factor) in memory.o.chunks_exact_mut(value_width.max(1)).zip(&*factors).take(rows) {
                if factor != T::ONE {
                    scale_by(sum, factor);
                }
            }
            let (v, v_row) = right_side((segment.v.skip(key), dims.value_dim), keys, ignored, memory.v);
            Product::of_transposed(
                (memory.tile, columns),
                (v, v_row),
                (memory.o, value_width),
                [rows, dims.value_dim, keys],
            )
            .accumulate(true)
            .a_band(Band::up_to(ahead))
            .compute();
        }
    }
}

fn write<T: Real>(
    problem: &Problem<'_, T>,
    sequence: &Sequence<'_>,
    range: RowRange,
    memory: &mut Block<'_, T>,
    sink: Sink<'_, T>,
) {
    for at in 0..range.rows {
        let token = sequence.query_start + range.row + at;
        let (sum, highest) = (memory.sums[at], memory.highest[at]);
        // SAFETY: each (batch, head, token) belongs to one block of rows, so to one task.
        let out = unsafe { sink.out.row(sequence.batch, range.head, token, problem.dims.value_dim) };
        if sum == T::ZERO {
            out.fill(T::ZERO);
        } else {
            store(&memory.o[at * problem.value_width..], T::ONE / sum, out);
        }
        if let Some(denominators) = sink.denominators {
            // SAFETY: as above.
            let place = unsafe { denominators.row(sequence.batch, range.head, token, 1) };
            // The largest weight is 1, so the sum is 1 or more.
            place[0] = if sum == T::ZERO { T::NEG_INFINITY } else { highest + (sum - T::ONE).ln_1p() };
        }
    }
}
