//! Outputs: the mean of every query's keys, times its gate.

use super::chunks::Workers;
use super::means::{HeadGroups, KeySide, bias_tiles_len, work_len};
use super::outputs::GatedMean;
use super::problem::{Block, Problem};
use super::tiles;
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::rows::Columns;
use crate::simd::{Real, dispatch};

/// Writes every output.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, out: SharedRows<'_, T>, scratch: &mut Scratch<T>) {
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
    let keys = KeySide::new(problem, &block, &chunks, &mut arena, &mut workers);
    groups.run(bias_tiles_len, &mut workers, |index, head, chunk, bias_tiles, work| {
        let (sequence, kv_head) = (&problem.sequences[index], head / dims.group());
        let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
        let items = keys.items(index, kv_head);
        tiles::means(&keys.outputs(&items, index, kv_head, chunk), true, bias_tiles, work, |i, mean, _, _| {
            let queries = problem.aft.gate.then(|| queries.skip(i));
            // SAFETY: every row belongs to one chunk of one head, and the slice ends here.
            let to = unsafe { out.row(sequence.batch, head, sequence.query_start + i, dims.head_dim) };
            dispatch(GatedMean { mean, queries, to: Columns::single(to) });
        });
    });
}
