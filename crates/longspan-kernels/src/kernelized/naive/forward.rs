//! Outputs from every pair of query and key.

use super::super::features::Lift;
use super::super::forward::write_row;
use super::super::problem::Problem;
use super::keys::{Block, Keys, TILE, rows_len};
use crate::call::{Arena, Scratch, Sink};
use crate::simd::Real;
use crate::simd::block::scale_by;
use crate::simd::product::{Product, mask_and_sum, zero_outside};
use crate::simd::rows::pieces;
use crate::threads::{self, parallel};

pub(in super::super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let value_width = problem.value_width;
    let separate = problem.layout.separate().is_some();
    let per_worker = Keys::len(problem, false) + rows_len(problem);
    let workers = threads::count().min(problem.units());
    let mut arena = Arena::new(scratch.take(problem.table_len() + workers * per_worker));
    let table = problem.table(&mut arena);
    parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
        let mut arena = Arena::new(scratch);
        let mut lift = Lift::new(problem, TILE, [false; 2], &mut arena);
        lift.start(problem, &problem.unit(index));
        let keys = Keys::new(problem, index, table, false, &mut lift, &mut arena);
        let mut block = Block::new(problem, false, &mut arena);
        for head in problem.heads(&keys.unit) {
            let mut row = 0;
            while row < keys.unit.sequence.queries {
                let range = keys.range(head, row, |_, _| false);
                keys.load_rows(range, &mut block, &mut lift);
                block.sums[..range.rows].fill(T::ZERO);
                block.o[..range.rows * value_width].fill(T::ZERO);
                threads::check();
                for (key, count) in pieces(0..range.end, keys.tile_width.max(1)) {
                    let band = keys.band(range, key);
                    keys.weigh(range, key, count, separate, &mut block);
                    mask_and_sum((block.tile, keys.tile_width), count, band, &mut block.sums[..range.rows]);
                    if separate {
                        keys.weigh(range, key, count, false, &mut block);
                        zero_outside((block.tile, keys.tile_width), (range.rows, count), band);
                    }
                    Product::of(
                        (block.tile, keys.tile_width),
                        (&keys.v[key * value_width..], value_width),
                        (block.o, value_width),
                        [range.rows, value_width, count],
                    )
                    .accumulate(true)
                    .a_band(band)
                    .compute();
                }
                for at in 0..range.rows {
                    let sum = &mut block.o[at * value_width..][..value_width];
                    let (mut denominator, mut exponent) = (T::ZERO, T::ZERO);
                    if let Some(sight) = keys.sight(head, row + at) {
                        exponent = if problem.exponential { sight.shift + block.exponents[at] } else { T::ZERO };
                        denominator = block.sums[at] * sight.decay;
                        // What a long decay leaves is no normal number: the row gives 0 and says so, so that its gradient
                        // is 0 too instead of infinite.
                        if denominator.vanishes() {
                            denominator = T::ZERO;
                        }
                        if sight.decay != T::ONE {
                            scale_by(sum, sight.decay);
                        }
                    } else {
                        // A query that is not finite has left its trace in weights of 0.
                        sum.fill(T::ZERO);
                    }
                    write_row(problem, &keys.unit, &sink, (head, row + at), (sum, denominator, exponent));
                }
                row += range.rows;
            }
        }
    });
}
