//! The pass over rows that writes outputs.

use super::chunks::{Buffers, Reach, RowBlock, RowChunk};
use super::exponents::Shared;
use super::far::FarSums;
use super::problem::Problem;
use super::tile::each_tile;
use crate::call::{Arena, Sink};
use crate::simd::Real;
use crate::simd::block::{dot, store};
use crate::threads::parallel;

pub(super) fn worker_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    Arena::measure(|arena| Buffers::new(problem, false, false, arena))
}

/// Computes the outputs of some chunks, which meet far keys as `far` if these sums are given.
pub(super) fn run<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    chunks: &[RowChunk],
    far: Option<&FarSums<'_, T>>,
    sink: Sink<'_, T>,
    (scratch, per_worker): (&mut [T], usize),
) {
    parallel(chunks.len(), scratch, per_worker, |task, scratch| {
        let chunk = &chunks[task];
        let unit = problem.unit(chunk.unit);
        let mut buffers = Buffers::new(problem, false, false, &mut Arena::new(scratch));
        let reach = Reach::new(problem, &unit, chunk, far);
        let Buffers { rows: RowBlock { q, q_shifts, d: o, c: sums }, tile, keys, weights, map, .. } = &mut buffers;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let (head, rows, line) = (chunk.head, &chunk.rows, shared.line(chunk.head));
        problem.load_queries((&unit, head), (rows.start, rows.len()), (q, q_shifts), map);
        o[..rows.len() * value_width].fill(T::ZERO);
        sums[..rows.len()].fill(T::ZERO);
        each_tile(problem, shared, (&unit, head), rows, reach.keys, keys, map, |at, piece, keys, seen| {
            keys.scores(problem, &q[at * head_width..], seen, tile);
            let factors = weights.form(problem, &unit, line, piece, (keys, seen));
            seen.weigh(tile, factors, &mut sums[at..]);
            seen.add_keys(tile, (keys.v, value_width), &mut o[at * value_width..]);
        });
        for far in reach.fars.iter().flatten() {
            shared.pieces(problem, &unit, head, rows.clone(), |piece| {
                // The large numbers first: their difference is exact where it matters.
                let weight = ((far.exponent - piece.level) + far.bias).exp();
                let at = piece.row - rows.start;
                let q = &q[at * head_width..];
                far.add_values(problem, weight, (q, piece.rows), &mut o[at * value_width..], tile);
                for row in 0..piece.rows {
                    sums[at + row] += weight * dot(far.features, &q[row * head_width..][..head_width]);
                }
            });
        }
        for (at, row) in rows.clone().enumerate() {
            let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
            // SAFETY: each (batch, head, token) belongs to one task.
            let out = unsafe { sink.out.row(batch, head, token, problem.dims.value_dim) };
            let sees = problem.sees(&unit, row);
            let mut denominator = if sees { sums[at] } else { T::ZERO };
            if !problem.toeplitz.normalize {
                let scale = (shared.level(&unit, head, row) + q_shifts[at]).exp();
                store(&o[at * value_width..], if sees { scale } else { T::ZERO }, out);
                denominator = T::ONE;
            } else if denominator.vanishes() {
                denominator = T::ZERO;
                out.fill(T::ZERO);
            } else {
                store(&o[at * value_width..], T::ONE / denominator, out);
            }
            // SAFETY: as above.
            unsafe { sink.set_denominator([batch, head, token], &[denominator]) };
        }
    });
}
