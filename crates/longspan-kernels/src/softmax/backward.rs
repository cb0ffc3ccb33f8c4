//! The gradient: weights formed anew from the largest scores and the sums of the forward, tile by tile.
//!
//! A task takes one key/value head of one sequence with all its query heads, so that the gradients of keys and values
//! have one writer and sums run in one order, whatever the number of threads.

use super::KEPT;
use super::problem::{Block, KEYS, Problem, ROWS, against, clear_unseen, right_side};
use super::tile::{ExpColumns, SoftmaxPullBack};
use crate::call::{Arena, Cotangent, Dims, GradientSink, Scratch, SharedRows, State};
use crate::simd::block::{add_scaled, all_finite, dot, store};
use crate::simd::product::Product;
use crate::simd::rows::{padded, pieces};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Computes every gradient of a call: with `p_ij = e^{s·q_i·k_j − m_i} / Σ_i`, `dv_j = Σ_i p_ij G_i`,
/// `dS_ij = p_ij (G_i·v_j − G_i·A_i)`, `dq_i = s Σ_j dS_ij k_j` and `dk_j = s Σ_i dS_ij q_i`.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    mut d_initial: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let dims = &problem.dims;
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let most_keys = problem.sequences.iter().map(|sequence| sequence.keys).max().unwrap_or(0);
    let past = problem.call.initial_state.map_or(0, |_| problem.attention.rows());
    let per_worker = Arena::measure(|arena| Block::new(problem, arena))
        + (past + most_keys) * (head_width + value_width)
        + ROWS * (KEYS + value_width + head_width)
        + KEYS * head_width
        + ROWS;
    let units = problem.sequences.len() * dims.kv_heads;
    let workers = threads::count().min(units);
    let entry = d_initial.as_ref().map_or(0, |state| state.shape().head_len());
    if let Some(state) = &mut d_initial {
        state.numbers_mut().fill(T::ZERO);
    }
    // A state's numbers belong to batch entries and key/value heads one after the other, as units do.
    let d_initial = d_initial.map(|state| SharedRows::new(state.numbers_mut(), [entry, 0, 0]));
    parallel(units, scratch.take(workers * per_worker), per_worker, |unit, scratch| {
        let mut arena = Arena::new(scratch);
        let block = Block::new(problem, &mut arena);
        let (sequence, kv_head) = (&problem.sequences[unit / dims.kv_heads], unit % dims.kv_heads);
        let segments = problem.segments(sequence, kv_head);
        let past = segments[0].keys + segments[1].keys;
        let firsts = [0, segments[0].keys, past];
        let all = past + sequence.keys;
        let (dk, dv) = (arena.take(all * head_width), arena.take(all * value_width));
        let (d_tile, o_columns) = (arena.take(ROWS * KEYS), arena.take(ROWS * value_width));
        let (dq, k_block, dots) = (arena.take(ROWS * head_width), arena.take(KEYS * head_width), arena.take(ROWS));
        dk.fill(T::ZERO);
        dv.fill(T::ZERO);
        for head in dims.heads_of(kv_head) {
            let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
            let [out, d_out] =
                [cotangent.out, cotangent.d_out].map(|view| view.rows(sequence.batch, head).skip(sequence.query_start));
            let mut row = 0;
            while row < sequence.queries {
                let rows = (sequence.queries - row).min(ROWS);
                let finite = |row: usize, rows: usize| {
                    all_finite(queries.skip(row), rows, dims.head_dim)
                        && all_finite(d_out.skip(row), rows, dims.value_dim)
                };
                let whole = segments.iter().all(|segment| {
                    let alike = problem.seen(segment, row) == problem.seen(segment, row + rows - 1);
                    alike || (!problem.carries(segment, row, rows) && finite(row, rows))
                });
                let rows = if whole { rows } else { 1 };
                let columns = padded::<T>(rows);

                let transposed = (&mut *block.q_columns, columns);
                problem.load_block(queries.skip(row), (rows, dims.head_dim), problem.scale, block.q, transposed);
                let transposed = (&mut *o_columns, columns);
                problem.load_block(d_out.skip(row), (rows, dims.value_dim), T::ONE, block.o, transposed);
                // A row that sees nothing has a sum of 0, and no weights.
                block.highest.fill(T::ZERO);
                block.sums.fill(T::ZERO);
                dots.fill(T::ZERO);
                for (at, to) in dots.iter_mut().enumerate().take(rows) {
                    let place = (sequence.batch * dims.heads + head) * dims.queries + sequence.query_start + row + at;
                    let [highest, sum] = [0, 1].map(|n| cotangent.denominators[KEPT * place + n]);
                    if sum != T::ZERO {
                        (block.highest[at], block.sums[at]) = (highest, T::ONE / sum);
                        *to = dot(out.row(row + at, dims.value_dim), &block.o[at * value_width..]);
                    }
                }
                dq[..rows * head_width].fill(T::ZERO);

                for (segment, first) in segments.iter().zip(firsts) {
                    let seen = problem.seen_by_any(segment, row, rows);
                    for (key, keys) in pieces(seen, KEYS) {
                        threads::check();
                        let band = problem.band(segment, row, key);
                        let k = (segment.k.skip(key), dims.head_dim);
                        let v = (segment.v.skip(key), dims.value_dim);
                        let ignored = segment.padding.map(|padding| &padding[key..key + keys]);
                        against(k, keys, (block.q_columns, columns), block.tile, band);
                        against(v, keys, (o_columns, columns), d_tile, band);
                        dispatch(ExpColumns {
                            scores: block.tile,
                            row_length: columns,
                            keys,
                            shifts: &block.highest[..columns],
                            gains: block.sums,
                        });
                        dispatch(SoftmaxPullBack {
                            weights: block.tile,
                            d: d_tile,
                            row_length: columns,
                            keys,
                            dots: &dots[..columns],
                        });
                        for tile in [&mut *block.tile, &mut *d_tile] {
                            clear_unseen((tile, columns), keys, (band, ignored), T::ZERO);
                        }
                        let into = |a: &[T], (b, width): (&[T], usize), to: &mut [T]| {
                            let sizes = [keys, width, rows];
                            Product::of((a, columns), (b, width), (&mut to[(first + key) * width..], width), sizes)
                                .accumulate(true)
                                .a_band(band)
                                .compute();
                        };
                        into(block.tile, (block.o, value_width), dv);
                        into(d_tile, (block.q, head_width), dk);
                        let (k, k_row) = right_side(k, keys, ignored, k_block);
                        let sizes = [rows, dims.head_dim, keys];
                        Product::of_transposed((d_tile, columns), (k, k_row), (dq, head_width), sizes)
                            .accumulate(true)
                            .a_band(band.transposed())
                            .compute();
                    }
                }
                for at in 0..rows {
                    let token = sequence.query_start + row + at;
                    // SAFETY: each (batch, head, token) belongs to one unit, so to one task.
                    let to = unsafe { sink.dq.row(sequence.batch, head, token, dims.head_dim) };
                    if block.sums[at] == T::ZERO {
                        to.fill(T::ZERO);
                    } else {
                        store(&dq[at * head_width..], problem.scale, to);
                    }
                }
                row += rows;
            }
        }

        let d_final = cotangent.final_state.map(|state| state.head(sequence.batch, kv_head));
        // What later calls want of the cache's rows is added to the gradients of the keys that stand there.
        let add_final = |[to_k, to_v]: [&mut [T]; 2], row: usize| {
            if let Some([d_keys, d_values, ..]) = d_final {
                add_scaled(to_k, T::ONE, &d_keys[row * dims.head_dim..]);
                add_scaled(to_v, T::ONE, &d_values[row * dims.value_dim..]);
            }
        };
        let [older, newer, own] = &segments;
        for key in 0..own.keys + sequence.absent {
            // SAFETY: all of a unit's keys belong to its task.
            let (to_k, to_v) = unsafe { sink.key([sequence.batch, kv_head, sequence.key_start + key], dims) };
            if key < own.keys && !own.ignores(key) {
                store(&dk[(past + key) * head_width..], T::ONE, to_k);
                store(&dv[(past + key) * value_width..], T::ONE, to_v);
            } else {
                to_k.fill(T::ZERO);
                to_v.fill(T::ZERO);
            }
        }
        for (key, row) in problem.kept(own, sequence, kv_head) {
            // SAFETY: as above.
            let (to_k, to_v) = unsafe { sink.key([sequence.batch, kv_head, sequence.key_start + key], dims) };
            add_final([to_k, to_v], row);
        }
        let Some(d_initial) = &d_initial else { return };
        // SAFETY: each unit's part of the state is one task's own.
        let to = unsafe { d_initial.row(unit, 0, 0, entry) };
        let (to_k, to_v) = to.split_at_mut(problem.attention.rows() * dims.head_dim);
        for (segment, first) in [older, newer].into_iter().zip(firsts) {
            let rows = (0..segment.keys).filter(|&key| !segment.ignores(key));
            for key in rows {
                let row = segment.row.unwrap_or(0) + key;
                let [to_k, to_v] = rows_at([to_k, to_v], row, dims);
                store(&dk[(first + key) * head_width..], T::ONE, to_k);
                store(&dv[(first + key) * value_width..], T::ONE, to_v);
            }
            for (_, row) in problem.kept(segment, sequence, kv_head) {
                add_final(rows_at([to_k, to_v], row, dims), row);
            }
        }
    });
}

/// One row of a cache's keys and one of its values.
fn rows_at<'t, T>([keys, values]: [&'t mut [T]; 2], row: usize, dims: &Dims) -> [&'t mut [T]; 2] {
    [&mut keys[row * dims.head_dim..][..dims.head_dim], &mut values[row * dims.value_dim..][..dims.value_dim]]
}
