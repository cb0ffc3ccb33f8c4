//! The forward pass: chunks of queries against tiles of keys, with running maxima, so that no score is kept.

use super::problem::{Block, Chunks, KEYS, Problem, ROWS, Segment, against, clear_unseen, right_side};
use super::tile::SoftmaxTile;
use crate::call::{Arena, Scratch, Sequence, Sink, State};
use crate::simd::block::{scale_by, store};
use crate::simd::product::Product;
use crate::simd::rows::{padded, pieces};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

#[derive(Clone, Copy)]
struct RowRange {
    head: usize,
    row: usize,
    rows: usize,
}

pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let chunks = Chunks::new(problem);
    let per_worker = Arena::measure(|arena| Block::new(problem, arena));
    let workers = threads::count().min(chunks.len());
    parallel(chunks.len(), scratch.take(workers * per_worker), per_worker, |task, scratch| {
        let mut memory = Block::new(problem, &mut Arena::new(scratch));
        let (sequence, head, chunk) = chunks.task(task);
        let sequence = &problem.sequences[sequence];
        let segments = problem.segments(sequence, head / problem.dims.group());
        let (mut row, end) = (chunk * ROWS, (chunk * ROWS + ROWS).min(sequence.queries));
        while row < end {
            let whole = !segments.iter().any(|segment| problem.carries(segment, row, end - row));
            let range = RowRange { head, row, rows: if whole { end - row } else { 1 } };
            attend(problem, sequence, &segments, range, &mut memory);
            write(problem, sequence, range, &mut memory, sink);
            row += range.rows;
        }
    });
}

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
        let seen = problem.seen_by_any(segment, row, rows);
        for (key, keys) in pieces(seen, KEYS) {
            threads::check();
            let band = problem.band(segment, row, key);
            let k = (segment.k.skip(key), dims.head_dim);
            against(k, keys, (memory.q_columns, columns), memory.tile, band);
            let ignored = segment.padding.map(|padding| &padding[key..key + keys]);
            clear_unseen((memory.tile, columns), keys, (band, ignored), T::NEG_INFINITY);
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
            let sizes = [rows, dims.value_dim, keys];
            Product::of_transposed((memory.tile, columns), (v, v_row), (memory.o, value_width), sizes)
                .accumulate(true)
                .a_band(band.transposed())
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
        // SAFETY: each (batch, head, token) belongs to one chunk, so to one task.
        let out = unsafe { sink.out.row(sequence.batch, range.head, token, problem.dims.value_dim) };
        if sum == T::ZERO {
            out.fill(T::ZERO);
        } else {
            store(&memory.o[at * problem.value_width..], T::ONE / sum, out);
        }
        // SAFETY: as above.
        unsafe { sink.set_denominator([sequence.batch, range.head, token], &[highest, sum]) };
    }
}

/// Writes the cache after the last key of a call that was checked for it.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, to: &mut State<T>) {
    to.numbers_mut().fill(T::ZERO);
    let (head_dim, value_dim, kv_heads) = (problem.dims.head_dim, problem.dims.value_dim, problem.dims.kv_heads);
    for (unit, [keys, values, held, present, ..]) in to.heads_mut().enumerate() {
        let (sequence, kv_head) = (&problem.sequences[unit / kv_heads], unit % kv_heads);
        for segment in problem.segments(sequence, kv_head) {
            for (key, row) in problem.kept(&segment, sequence, kv_head) {
                keys[row * head_dim..][..head_dim].copy_from_slice(segment.k.row(key, head_dim));
                values[row * value_dim..][..value_dim].copy_from_slice(segment.v.row(key, value_dim));
                if let Some(present) = present.get_mut(row) {
                    *present = T::ONE;
                }
            }
        }
        held[0] = problem.cache(sequence, kv_head).after(sequence).mark();
    }
}
