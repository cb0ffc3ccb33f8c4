//! Outputs: the mean of every query's keys, times its gate.

use super::chunks::Workers;
use super::log_sum::PARTS;
use super::means::{HeadGroups, KeySide, bias_tiles_len, work_len};
use super::outputs::GatedMean;
use super::problem::{Block, Problem};
use super::tiles;
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::rows::Columns;
use crate::simd::{Real, dispatch};

/// Parts of a row's mean that the backward of a table of biases is given, each a number a channel: the exponent, its positional
/// part and the denominator. A logarithm of the sum would be one number, but near 10⁴ it has no digits left behind the point
/// in `f32`.
pub(super) const KEPT: usize = 3;

/// Where these parts are within a mean.
const KEPT_PARTS: [usize; KEPT] = [0, 1, 3];

/// Keeps a row's mean.
fn keep<T: Real>(mean: &[T], head_dim: usize, kept: &mut [T]) {
    for (part, kept) in KEPT_PARTS.into_iter().zip(kept.chunks_exact_mut(head_dim)) {
        kept.copy_from_slice(&mean[part * (mean.len() / PARTS)..][..head_dim]);
    }
}

/// Reads what [`keep`] wrote; other numbers of `mean` stay as they are.
pub(super) fn read_kept<T: Real>(kept: &[T], head_dim: usize, mean: &mut [T]) {
    let width = mean.len() / PARTS;
    for (part, kept) in KEPT_PARTS.into_iter().zip(kept.chunks_exact(head_dim)) {
        mean[part * width..][..head_dim].copy_from_slice(kept);
    }
}

/// Writes every output, and what is kept of the means if that is wanted.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    out: SharedRows<'_, T>,
    kept: Option<SharedRows<'_, T>>,
    scratch: &mut Scratch<T>,
) {
    let dims = &problem.dims;
    let block = Block::whole(problem);
    let chunks = KeySide::chunks(problem, &block, dims.kv_heads);
    let groups = HeadGroups::new(problem, &chunks.windows, dims.heads);
    let bias_tiles_len = bias_tiles_len(problem, &chunks);
    let each = work_len(problem, &chunks) + bias_tiles_len;
    let memory = Arena::measure(|arena| {
        KeySide::memory(problem, &chunks, arena);
        Workers::new(groups.tasks(), each, arena)
    });
    let mut arena = Arena::new(scratch.take(memory));
    let mut workers = Workers::new(groups.tasks(), each, &mut arena);
    let keys = KeySide::new(problem, &block, &chunks, false, &mut arena, &mut workers);
    groups.run(bias_tiles_len, &mut workers, |index, head, chunk, bias_tiles, work| {
        let (sequence, kv_head) = (&problem.sequences[index], head / dims.group());
        let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
        let items = keys.items(index, kv_head);
        tiles::means(&keys.outputs(&items, index, kv_head, chunk), true, bias_tiles, work, |i, mean, _, _| {
            let queries = problem.aft.gate.then(|| queries.skip(i));
            let token = sequence.query_start + i;
            if let Some(kept) = &kept {
                // SAFETY: every row belongs to one chunk of one head, and the slice ends here.
                let to = unsafe { kept.row(sequence.batch, head, token, KEPT * dims.head_dim) };
                keep(mean, dims.head_dim, to);
            }
            // SAFETY: as above.
            let to = unsafe { out.row(sequence.batch, head, token, dims.head_dim) };
            dispatch(GatedMean { mean, queries, to: Columns::single(to) });
        });
    });
}
