//! The pass over rows that writes the gradients of queries.

use super::backward::{Backward, Pass};
use super::chunks::{Buffers, Reach, RowBlock, RowChunk};
use super::far::FarSums;
use super::problem::{Problem, TILE};
use super::tile::each_tile;
use crate::call::Arena;
use crate::simd::Real;
use crate::simd::rows::pieces;
use crate::threads::parallel;

/// Numbers of working memory of a worker; `far` says whether chunks meet sums.
pub(super) fn worker_len<T: Real>(problem: &Problem<'_, T>, far: bool) -> usize {
    Arena::measure(|arena| Buffers::new(problem, true, far, arena))
}

/// Computes the gradients of the queries of some chunks, which meet far keys as `far` if these sums are given.
pub(super) fn run<T: Real>(
    pass: &Pass<'_, '_, T>,
    mut chunks: Vec<RowChunk>,
    far: Option<&FarSums<'_, T>>,
    (scratch, per_worker): (&mut [T], usize),
) {
    let (Backward { problem, sink, .. }, shared) = (pass.call, &pass.shared);
    // Chunks of one lane add to one sum, one after the other.
    let lane = |chunk: &RowChunk| (chunk.unit, chunk.head, pass.map_sums.lane(chunk.index));
    chunks.sort_by_key(lane);
    let runs: Vec<&[RowChunk]> = chunks.chunk_by(|a, b| lane(a) == lane(b)).collect();
    parallel(runs.len(), scratch, per_worker, |run, scratch| {
        let mut buffers = Buffers::new(problem, true, far.is_some(), &mut Arena::new(scratch));
        for chunk in runs[run] {
            let unit = problem.unit(chunk.unit);
            // SAFETY: each lane of a head's rows is one run's own.
            let sums = unsafe { pass.map_sums.of_queries(chunk.unit, chunk.head, chunk.index) };
            let reach = Reach::new(problem, &unit, chunk, far);
            let Buffers { rows: block_rows, dq, tile, keys, weights, turned, map } = &mut buffers;
            let (head, rows, line) = (chunk.head, &chunk.rows, shared.line(chunk.head));
            let (head_width, value_width) = (problem.head_width, problem.value_width);
            pass.load_rows((&unit, head), rows.clone(), block_rows, map);
            let RowBlock { q, d, c, .. } = block_rows;
            dq[..rows.len() * head_width].fill(T::ZERO);
            each_tile(problem, shared, (&unit, head), rows, reach.keys, keys, map, |at, piece, keys, seen| {
                keys.value_products(problem, &d[at * value_width..], &c[at..], seen, tile);
                let factors = weights.form(problem, &unit, line, piece, (keys, seen));
                seen.weigh(tile, factors, &mut [T::ZERO; TILE]);
                seen.add_keys(tile, (keys.k, head_width), &mut dq[at * head_width..]);
            });
            for far in reach.fars.iter().flatten() {
                shared.pieces(problem, &unit, head, rows.clone(), |piece| {
                    let weight = ((far.exponent - piece.level) + far.bias).exp();
                    let at = piece.row - rows.start;
                    let features = (&q[at * head_width..], &mut dq[at * head_width..]);
                    let d = (&d[at * value_width..], Some(&c[at..]), piece.rows);
                    far.add_features(problem, weight, d, features, (&mut *turned, &mut *tile));
                });
            }
            for (first, count) in pieces(rows.clone(), TILE) {
                let at = (first - rows.start) * head_width;
                let features = (&mut q[at..], &mut dq[at..]);
                problem.write_queries((&unit, head), (first, count), features, sums, map, sink);
            }
        }
    });
}
