//! Gradients from every pair of query and key.

use std::ops::Range;

use super::super::backward::{GradientSink, reduce_table};
use super::super::features::{Lift, PositionSink};
use super::super::problem::Problem;
use super::keys::{Block, ContentFactors, Keys, TILE, most_keys, most_rows, rows_len, tile_width};
use crate::call::{self, Arena, Cotangent, Scratch, SharedRows};
use crate::feature_map::elementwise::copy_rows;
use crate::simd::Real;
use crate::simd::block::{add_scaled, all_finite, dot, multiply, scale_by, store};
use crate::simd::product::{Product, zero_outside};
use crate::simd::rows::{padded, pieces};
use crate::threads::{self, parallel};

/// Computes every gradient of a call. With the weights `p_ij = w_ij / D_i` of the normalised row and `c_i = −G_i·A_i`,
/// `dv_j = Σ_i p_ij G_i`, and what multiplies `φ(q_i)·φ(k_j)` in `p_ij` also multiplies `G_i·v_j + c_i` in the gradients
/// of both vectors. Dividing the weights rather than `G` keeps a small denominator from overflowing on its own.
pub(in super::super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: call::GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
    let table_width = problem.table_width();
    let (sums_len, units) = (problem.sums_len(), problem.units());
    let entry = table_width * head_width + sums_len;
    let per_unit = problem.dims.group() * entry;
    let (most_keys, most_rows) = (most_keys(problem), most_rows(problem));
    let per_worker = Keys::len(problem, true)
        + most_keys * (head_width + value_width)
        + most_rows * (tile_width::<T>(most_keys) + table_width + head_width)
        + rows_len(problem)
        + 2 * padded::<T>(most_rows);
    let workers = threads::count().min(problem.units());
    let [query_positions, key_positions] = problem.position_lens();
    let positions_len = query_positions + key_positions + 4 * padded::<T>(1);
    let shared = problem.table_len() + units * (per_unit + sums_len) + positions_len;
    let mut arena = Arena::new(scratch.take(shared + workers * per_worker));
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(units * per_unit);
    let key_sums = arena.take(units * sums_len);
    let (query_positions, key_positions) = (arena.take(query_positions), arena.take(key_positions));
    let separate = problem.layout.separate();
    {
        let mut positions = problem.position_views(query_positions, key_positions);
        let sink = GradientSink { rows: sink, positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)) };
        let key_sums = SharedRows::new(&mut *key_sums, [sums_len, 0, 0]);
        let gradients = SharedRows::new(&mut *table_gradients, [per_unit, 0, 0]);
        parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
            let mut arena = Arena::new(scratch);
            let mut lift = Lift::new(problem, TILE, [true; 2], &mut arena);
            lift.start(problem, &problem.unit(index));
            let keys = Keys::new(problem, index, table, true, &mut lift, &mut arena);
            let mut block = Block::new(problem, true, &mut arena);
            let (unit, sequence, tile_width) = (&keys.unit, keys.unit.sequence, keys.tile_width);
            let (dk, dv) = (arena.take(sequence.keys * head_width), arena.take(sequence.keys * value_width));
            let d_tile = arena.take(most_rows * tile_width);
            let (dw, dq) = (arena.take(most_rows * table_width), arena.take(most_rows * head_width));
            // What a row's weights are multiplied by, 0 for one that gives 0 whatever the inputs are; and `c`.
            let (gains, c) = (arena.take(most_rows), arena.take(most_rows));
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
            // SAFETY: each unit is one task's own.
            let (d_table, key_sums) =
                unsafe { (gradients.row(index, 0, 0, per_unit), key_sums.row(index, 0, 0, sums_len)) };
            d_table.fill(T::ZERO);
            key_sums.fill(T::ZERO);
            // Keys from here on are seen by no row.
            let mut end = 0;
            for (n, head) in problem.heads(unit).enumerate() {
                let queries = problem.queries(unit, head);
                let [out, d_out] = [cotangent.out, cotangent.d_out]
                    .map(|view| view.rows(sequence.batch, head).skip(sequence.query_start));
                let mut row = 0;
                while row < sequence.queries {
                    let range = keys.range(head, row, |row, rows| {
                        !problem.mapping.all_finite(queries.skip(row), rows)
                            || !all_finite(d_out.skip(row), rows, value_dim)
                    });
                    keys.load_rows(range, &mut block, &mut lift);
                    let from = d_out.skip(row);
                    copy_rows(from, (range.rows, value_dim), None, (block.o, value_width));
                    for at in 0..range.rows {
                        let d = &mut block.o[at * value_width..][..value_width];
                        (gains[at], c[at]) = (T::ZERO, T::ZERO);
                        if let Some(sight) = keys.sight(head, row + at) {
                            end = end.max(sight.end);
                            if problem.attention.normalizes() {
                                let rows = sequence.batch * problem.dims.heads + head;
                                let place = rows * problem.dims.queries + sequence.query_start + row + at;
                                let denominator = cotangent.denominators[place];
                                if !problem.gives_nothing(denominator) {
                                    gains[at] = sight.decay / denominator;
                                    c[at] = -dot(out.row(row + at, value_dim), d);
                                }
                            } else {
                                gains[at] = sight.decay;
                                if problem.exponential {
                                    scale_by(d, (sight.shift + block.exponents[at]).exp());
                                }
                            }
                        }
                        if gains[at] == T::ZERO {
                            // Nothing of the row counts, not even what is not finite.
                            d.fill(T::ZERO);
                            block.q[at * head_width..][..head_width].fill(T::ZERO);
                        }
                    }
                    dw[..range.rows * table_width].fill(T::ZERO);
                    dq[..range.rows * head_width].fill(T::ZERO);
                    threads::check();
                    for (key, count) in pieces(0..range.end, tile_width.max(1)) {
                        let band = keys.band(range, key);
                        keys.weigh(range, key, count, false, &mut block);
                        zero_outside((block.tile, tile_width), (range.rows, count), band);
                        Product::of(
                            (block.o, value_width),
                            (&keys.v_columns[key * value_width..], tile_width),
                            (d_tile, tile_width),
                            [range.rows, count, value_dim],
                        )
                        .c_band(band)
                        .compute();
                        let mut factors = ContentFactors::new(key);
                        for at in 0..range.rows {
                            let (line, d_line) =
                                (&mut block.tile[at * tile_width..], &mut d_tile[at * tile_width..][..tile_width]);
                            let Some(sight) =
                                keys.sight(head, row + at).filter(|s| s.end > key && gains[at] != T::ZERO)
                            else {
                                line[..tile_width].fill(T::ZERO);
                                d_line.fill(T::ZERO);
                                continue;
                            };
                            let seen = count.min(sight.end - key);
                            scale_by(&mut line[..seen], gains[at]);
                            let (d_seen, unseen) = d_line.split_at_mut(seen);
                            unseen.fill(T::ZERO);
                            let c = if separate.is_some() { T::ZERO } else { c[at] };
                            d_seen.iter_mut().for_each(|d| *d = (*d + c) * gains[at]);
                            keys.decay(&sight, key, d_seen);
                            if let Some(slopes) = block.slopes.get(at * tile_width..).filter(|line| !line.is_empty()) {
                                multiply(d_seen, slopes);
                            }
                            if let Some((from, to, first)) = keys.near(sight.stands, key, seen) {
                                if !keys.present.is_empty() {
                                    multiply(d_seen, &keys.present[key..]);
                                }
                                let dw = &mut dw[at * table_width..][..table_width];
                                let last = table.map_or(0, |table| table.count - 1);
                                dw[0] += sight.position * d_seen[..from].iter().copied().sum();
                                add_scaled(&mut dw[first..][..to - from], sight.position, &d_seen[from..]);
                                dw[last] += sight.position * d_seen[to..].iter().copied().sum();
                            }
                            factors.multiply(&keys, &sight, block.factors, d_seen);
                        }
                        // `to += aᵀ b` and `dq += a k`, both over some columns.
                        let back = |a: &[T], b: &[T], to: &mut [T], width: usize, columns: Range<usize>| {
                            Product::of_transposed(
                                (a, tile_width),
                                (&b[columns.start..], width),
                                (&mut to[key * width + columns.start..], width),
                                [count, columns.len(), range.rows],
                            )
                            .accumulate(true)
                            .compute();
                        };
                        let mut forth = |a: &[T], columns: Range<usize>| {
                            Product::of(
                                (a, tile_width),
                                (&keys.k[key * head_width + columns.start..], head_width),
                                (&mut dq[columns.start..], head_width),
                                [range.rows, columns.len(), count],
                            )
                            .accumulate(true)
                            .a_band(band)
                            .compute();
                        };
                        back(block.tile, block.o, dv, value_width, 0..value_width);
                        if problem.content {
                            let columns = 0..separate.unwrap_or(head_width);
                            back(d_tile, block.q, dk, head_width, columns.clone());
                            forth(d_tile, columns);
                        }
                        let Some(from) = separate else { continue };
                        // What a key adds to the denominator has its own features, and `c` for its gradient.
                        for at in 0..range.rows {
                            let d_line = &mut d_tile[at * tile_width..][..tile_width];
                            d_line.fill(T::ZERO);
                            let sight = keys.sight(head, row + at).filter(|s| s.end > key && gains[at] != T::ZERO);
                            let Some(sight) = sight else { continue };
                            let d_seen = &mut d_line[..count.min(sight.end - key)];
                            d_seen.fill(c[at] * gains[at]);
                            keys.decay(&sight, key, d_seen);
                            factors.multiply(&keys, &sight, block.factors, d_seen);
                        }
                        back(d_tile, block.q, dk, head_width, from..head_width);
                        forth(d_tile, from..head_width);
                    }
                    if let Some(table) = &table {
                        let d_table = &mut d_table[n * entry..][..entry - sums_len];
                        let sizes = [range.rows, head_width, table.count];
                        Product::of((dw, table_width), (table.rows(head), head_width), (dq, head_width), sizes)
                            .accumulate(true)
                            .compute();
                        let sizes = [table.count, head_width, range.rows];
                        Product::of_transposed((dw, table_width), (block.q, head_width), (d_table, head_width), sizes)
                            .accumulate(true)
                            .compute();
                    }
                    let (sums, positions) = (&mut d_table[(n + 1) * entry - sums_len..][..sums_len], sink.positions);
                    let (raw, raw_row) =
                        problem.pull_back_queries(unit, head, row, range.rows, block.q, dq, sums, positions, &mut lift);
                    for at in 0..range.rows {
                        let token = sequence.query_start + row + at;
                        // SAFETY: each (batch, head, token) belongs to one unit, so to one task.
                        let to = unsafe { sink.rows.dq.row(sequence.batch, head, token, head_dim) };
                        if gains[at] == T::ZERO {
                            to.fill(T::ZERO);
                        } else {
                            store(&raw[at * raw_row..], T::ONE, to);
                        }
                    }
                    row += range.rows;
                }
            }
            let place = |key| [sequence.batch, unit.kv_head, sequence.key_start + key];
            let counts = |key: &usize| *key < end && !unit.sequence.ignores(*key);
            let mut key = 0;
            while key < sequence.keys {
                let run = (key..sequence.keys).take(most_rows).take_while(counts).count();
                if run == 0 {
                    // What stands in such a key may be NaN, which no slope of 0 would hold back.
                    // SAFETY: all of a unit's keys belong to its task.
                    let (to_k, to_v) = unsafe { sink.rows.key(place(key), &problem.dims) };
                    to_k.fill(T::ZERO);
                    to_v.fill(T::ZERO);
                    key += 1;
                    continue;
                }
                // With positions, what stands between raw keys and features has been overwritten by later ones.
                if problem.content && problem.rotations.is_some() {
                    keys.load_range(key, run, block.q, &mut lift);
                }
                let raw = problem.content.then(|| {
                    let rows = key * head_width..(key + run) * head_width;
                    let (features, d, positions) = (&keys.k[rows.clone()], &mut dk[rows], sink.positions);
                    problem.pull_back_keys(unit, key, run, features, d, key_sums, positions, &mut lift)
                });
                for n in 0..run {
                    // SAFETY: as above.
                    let (to_k, to_v) = unsafe { sink.rows.key(place(key + n), &problem.dims) };
                    store(&dv[(key + n) * value_width..], T::ONE, to_v);
                    match raw {
                        Some((raw, row)) => store(&raw[n * row..], T::ONE, to_k),
                        None => to_k.fill(T::ZERO),
                    }
                }
                key += run;
            }
        });
    }
    let query_sums =
        |index: usize, n: usize| vec![&table_gradients[index * per_unit + (n + 1) * entry - sums_len..][..sums_len]];
    let unit_sums = |index: usize| vec![&key_sums[index * sums_len..][..sums_len]];
    let positions: [&[T]; 2] = [query_positions, key_positions];
    problem.write_feature_gradients(&query_sums, &unit_sums, positions, false, parameters);
    if let Some(table) = &table {
        reduce_table(problem, table, table_gradients, per_unit, &|_| 1, parameters);
    }
}
