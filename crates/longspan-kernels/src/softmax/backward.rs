//! The gradient: weights formed anew from the largest scores and the sums of the forward, tile by tile.
//!
//! A task takes one key/value head of one sequence with all its query heads, so that the gradients of keys and values
//! have one writer and sums run in one order, whatever the number of threads. Heads that would leave threads idle are cut into parts,
//! rows of queries or keys, which form seven products for five.

use std::ops::Range;

use super::KEPT;
use super::problem::{Block, KEYS, Problem, ROWS, Segment, against, clear_unseen, right_side};
use super::tile::{ExpColumns, SoftmaxPullBack};
use crate::call::{Arena, Cotangent, GradientSink, Scratch, State, StateSink};
use crate::simd::block::{add_scaled, all_finite, dot, store};
use crate::simd::product::Product;
use crate::simd::rows::{padded, pieces};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Queries or keys of a part.
const PART: usize = 512;

/// What a task writes the gradients of.
#[derive(Clone)]
enum Part {
    /// All of a unit, a key/value head of a sequence.
    Unit,
    /// Some rows of a query head.
    Queries(usize, Range<usize>),
    /// Some keys, counted from the first of the initial state.
    Keys(Range<usize>),
}

/// The tasks of a call on so many threads: units as whole rounds of threads, and the others in parts where these are several and end
/// sooner.
fn parts<T: Real>(problem: &Problem<'_, T>, threads: usize) -> Vec<(usize, Part)> {
    let dims = &problem.dims;
    let units = problem.sequences.len() * dims.kv_heads;
    let rest = units % threads;
    let long = problem.sequences.iter().any(|sequence| sequence.queries.max(sequence.keys) > PART);
    let whole = if long && 7 * rest < 5 * threads { units - rest } else { units };
    let cut = |len: usize| pieces(0..len, PART).map(|(first, count)| first..first + count);
    let mut all: Vec<_> = (0..whole).map(|unit| (unit, Part::Unit)).collect();
    for unit in whole..units {
        let (sequence, kv_head) = (&problem.sequences[unit / dims.kv_heads], unit % dims.kv_heads);
        let keys: usize = problem.segments(sequence, kv_head).iter().map(|segment| segment.keys).sum();
        // There is a task for the keys where there are none too.
        all.extend(cut(keys).chain((keys == 0).then_some(0..0)).map(|keys| (unit, Part::Keys(keys))));
        let queries = |head: usize| cut(sequence.queries).map(move |rows| (unit, Part::Queries(head, rows)));
        all.extend(dims.heads_of(kv_head).flat_map(queries));
    }
    all
}

/// Computes every gradient of a call: with `p_ij = e^{s·q_i·k_j − m_i} / Σ_i`, `dv_j = Σ_i p_ij G_i`,
/// `dS_ij = p_ij (G_i·v_j − G_i·A_i)`, `dq_i = s Σ_j dS_ij k_j` and `dk_j = s Σ_i dS_ij q_i`.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    d_initial: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let dims = &problem.dims;
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let most_keys = problem.sequences.iter().map(|sequence| sequence.keys).max().unwrap_or(0);
    let past = problem.call.initial_state.map_or(0, |_| problem.attention.rows());
    let parts = parts(problem, threads::count());
    let whole = parts.iter().any(|(_, part)| matches!(part, Part::Unit));
    let held = if whole { past + most_keys } else { PART };
    let per_worker = Arena::measure(|arena| Block::new(problem, arena))
        + held * (head_width + value_width)
        + ROWS * (KEYS + value_width + head_width)
        + KEYS * head_width
        + ROWS;
    let workers = threads::count().min(parts.len());
    let d_initial = d_initial.map(StateSink::new);
    parallel(parts.len(), scratch.take(workers * per_worker), per_worker, |task, scratch| {
        let (unit, part) = parts[task].clone();
        let mut arena = Arena::new(scratch);
        let block = Block::new(problem, &mut arena);
        let (sequence, kv_head) = (&problem.sequences[unit / dims.kv_heads], unit % dims.kv_heads);
        let segments = problem.segments(sequence, kv_head);
        let past = segments[0].keys + segments[1].keys;
        let firsts = [0, segments[0].keys, past];
        let all = past + sequence.keys;
        let (heads, rows_of_part, held) = match &part {
            Part::Unit => (dims.heads_of(kv_head), 0..sequence.queries, 0..all),
            Part::Queries(head, rows) => (*head..head + 1, rows.clone(), 0..0),
            Part::Keys(keys) => (dims.heads_of(kv_head), 0..sequence.queries, keys.clone()),
        };
        let (of_queries, of_keys) = (!matches!(part, Part::Keys(_)), !matches!(part, Part::Queries(..)));
        let (dk, dv) = (arena.take(held.len() * head_width), arena.take(held.len() * value_width));
        let (d_tile, o_columns) = (arena.take(ROWS * KEYS), arena.take(ROWS * value_width));
        let (dq, k_block, dots) = (arena.take(ROWS * head_width), arena.take(KEYS * head_width), arena.take(ROWS));
        dk.fill(T::ZERO);
        dv.fill(T::ZERO);
        for head in heads {
            let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
            let [out, d_out] =
                [cotangent.out, cotangent.d_out].map(|view| view.rows(sequence.batch, head).skip(sequence.query_start));
            let mut row = rows_of_part.start;
            while row < rows_of_part.end {
                let rows = (rows_of_part.end - row).min(ROWS);
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
                let seen = |segment: &Segment<'_, T>, first: usize| {
                    let seen = problem.seen_by_any(segment, row, rows);
                    let within =
                        |key: usize| key.clamp(held.start.saturating_sub(first), held.end.saturating_sub(first));
                    if of_queries { seen } else { within(seen.start)..within(seen.end) }
                };
                if segments.iter().zip(firsts).all(|(segment, first)| seen(segment, first).is_empty()) && !of_queries {
                    row += rows;
                    continue;
                }

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
                    for (key, keys) in pieces(seen(segment, first), KEYS) {
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
                            let to = &mut to[(first + key - held.start) * width..];
                            Product::of((a, columns), (b, width), (to, width), sizes)
                                .accumulate(true)
                                .a_band(band)
                                .compute();
                        };
                        if of_keys {
                            into(block.tile, (block.o, value_width), dv);
                            into(d_tile, (block.q, head_width), dk);
                        }
                        if !of_queries {
                            continue;
                        }
                        let (k, k_row) = right_side(k, keys, ignored, k_block);
                        let sizes = [rows, dims.head_dim, keys];
                        Product::of_transposed((d_tile, columns), (k, k_row), (dq, head_width), sizes)
                            .accumulate(true)
                            .a_band(band.transposed())
                            .compute();
                    }
                }
                for at in 0..if of_queries { rows } else { 0 } {
                    let token = sequence.query_start + row + at;
                    // SAFETY: each (batch, head, token) belongs to one task.
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
        if !of_keys {
            return;
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
        let is_held = |key: usize| held.contains(&key);
        for key in (0..own.keys).filter(|key| is_held(past + key)) {
            // SAFETY: each key belongs to one task.
            let (to_k, to_v) = unsafe { sink.key([sequence.batch, kv_head, sequence.key_start + key], dims) };
            if !own.ignores(key) {
                store(&dk[(past + key - held.start) * head_width..], T::ONE, to_k);
                store(&dv[(past + key - held.start) * value_width..], T::ONE, to_v);
            } else {
                to_k.fill(T::ZERO);
                to_v.fill(T::ZERO);
            }
        }
        for (key, row) in problem.kept(own, sequence, kv_head).filter(|(key, _)| is_held(past + key)) {
            // SAFETY: as above.
            let (to_k, to_v) = unsafe { sink.key([sequence.batch, kv_head, sequence.key_start + key], dims) };
            add_final([to_k, to_v], row);
        }
        let Some(d_initial) = &d_initial else { return };
        // SAFETY: each row of the cache belongs to one key, which belongs to one task.
        let rows_at = |row: usize| unsafe {
            let part = |n: usize, width: usize| d_initial.part(unit, n, row * width, width);
            [part(0, dims.head_dim), part(1, dims.value_dim)]
        };
        for (segment, first) in [older, newer].into_iter().zip(firsts) {
            for key in (0..segment.keys).filter(|&key| is_held(first + key) && !segment.ignores(key)) {
                let [to_k, to_v] = rows_at(segment.row.unwrap_or(0) + key);
                store(&dk[(first + key - held.start) * head_width..], T::ONE, to_k);
                store(&dv[(first + key - held.start) * value_width..], T::ONE, to_v);
            }
            for (_, row) in problem.kept(segment, sequence, kv_head).filter(|(key, _)| is_held(first + key)) {
                add_final(rows_at(row), row);
            }
        }
    });
}
