//! Outputs of AFT-conv.

use super::walk::{Before, Work, header, walk};
use super::{Geometry, KeySource, kernel, parallel_chunks};
use crate::aft::conv::window::GatedRows;
use crate::aft::problem::{Block, CHUNK, Chunks, Problem, Window};
use crate::aft::state::Head;
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::rows::Ahead;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Writes every output.
pub(in crate::aft) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    geometry: Geometry,
    out: SharedRows<'_, T>,
    scratch: &mut Scratch<T>,
) {
    let (dims, width) = (&problem.dims, problem.width);
    if dims.head_dim == 0 || dims.heads == 0 {
        return;
    }
    let all = Block { sequences: 0..problem.sequences.len(), heads: 0..dims.kv_heads };
    let windows = geometry.windows(problem, &all, false);
    let chunks = Chunks::new(windows.clone(), dims.heads);
    let work_len = Work::<T>::len(geometry.most(), width).next_multiple_of(64);
    let source = |sequence: usize, head: usize| KeySource::new(problem, &geometry, sequence, head);
    let initial = |sequence: usize, head: usize, sum: &mut [T]| {
        if let Some(state) = problem.call.initial_state {
            let far = Head::from(state.head(problem.sequences[sequence].batch, head));
            (sum[0], sum[2]) = (far.exponent[0], far.denominator[0]);
            sum[header::<T>()..][..dims.head_dim].copy_from_slice(far.numerator);
        }
    };
    // Writes the outputs of one chunk.
    let one = |line: usize, head: usize, chunk: usize, edges: [&[T]; 2], work: &mut [T]| {
        let (index, kv_head) = (line / geometry.lines, head / dims.group());
        let (sequence, window) = (&problem.sequences[index], &windows[line]);
        let field = geometry.field(*window, line % geometry.lines, kernel(problem, head));
        let mut work = Work::new(work, geometry.most(), width);
        let (from, to) = window.chunk(chunk);
        let (start, rows) = (geometry.start(line), to - from);
        let (first, end) = (sequence.query_start + start, window.outputs.min(to + CHUNK));
        let queries = problem.call.q.rows(sequence.batch, head).skip(first);
        let source = source(index, kv_head);
        // What the next chunk reads and writes, if it is one of this line.
        let ahead = [
            Ahead::new(queries, to as isize, end as isize, window.outputs, dims.head_dim),
            out.ahead(sequence.batch, head, first + to, end - to, dims.head_dim),
            source.ahead(&field, chunk + 1),
        ];
        walk(&source, &field, chunk, edges, &mut work, &ahead);
        let factors = &mut work.d[..rows];
        // A row that sees nothing gives 0; a weight that is NaN shows.
        factors.iter_mut().filter(|d| **d != T::ZERO).for_each(|d| *d = T::ONE / *d);
        // SAFETY: every row belongs to one chunk of one head, and the columns end here.
        let mut to = unsafe { out.columns([sequence.batch, head, first + from], rows, 0..dims.head_dim) };
        let queries = problem.aft.gate.then(|| queries.skip(from));
        dispatch(GatedRows { sums: &work.sums[..rows * width], factors, queries, to: &mut to });
    };

    // Whole heads, if all threads have as many: the sum before a window then goes along with it, and where there are others, what
    // edges have read of a head is near when its windows read it again. The numbers are the same.
    let (threads, heads) = (threads::count(), problem.sequences.len() * dims.heads);
    if dims.group() == 1 && (heads.is_multiple_of(threads) || heads >= 16 * threads) {
        let of = |sequence: usize| &windows[sequence * geometry.lines..][..geometry.lines];
        let alone = |own: &[Window]| matches!(own, [window] if !window.after);
        let sums = |own| if alone(own) { Before::<T>::len(width) } else { geometry.edges_len::<T>(own, 1, width) };
        let longest = (0..problem.sequences.len()).map(|index| sums(of(index))).max().unwrap_or(0);
        let per_worker = (work_len + longest + 128).next_multiple_of(64);
        let memory = scratch.take(threads.min(heads).max(1) * per_worker);
        parallel(heads, memory, per_worker, |task, memory| {
            let (index, head) = (task / dims.heads, task % dims.heads);
            let (work, memory) = memory.split_at_mut(work_len);
            let (own, source) = (of(index), |_, _| source(index, head));
            if alone(own) {
                let mut before = Before::new(width, |sum| initial(index, head, sum), memory);
                let field = geometry.field(own[0], 0, &[]);
                for chunk in 0..own[0].chunks() {
                    let mut own_work = Work::new(work, geometry.most(), width);
                    let before = before.next(&source(0, 0), &field, chunk, &mut own_work);
                    one(index, head, chunk, [before, &[]], work);
                }
                return;
            }
            let initial = |_, _, sum: &mut [T]| initial(index, head, sum);
            let edges = geometry.edges(own, 1, width, source, initial, memory, work, work_len);
            for (line, window) in own.iter().enumerate() {
                for chunk in 0..window.chunks() {
                    let edges = edges.of(window, line, 0, chunk);
                    one(index * geometry.lines + line, head, chunk, edges, work);
                }
            }
        });
        return;
    }
    let workers = threads.min(chunks.tasks()).max(1);
    let edges_len = geometry.edges_len::<T>(&windows, dims.kv_heads, width);
    let mut arena = Arena::new(scratch.take(workers * work_len + edges_len + 128));
    let (work, memory) = (arena.take(workers * work_len), arena.rest());
    let edges = geometry.edges(&windows, dims.kv_heads, width, source, initial, memory, work, work_len);
    parallel_chunks(chunks.tasks(), work, work_len, |task, work| {
        let (line, head, chunk) = chunks.task(task);
        one(line, head, chunk, edges.of(&windows[line], line, head / dims.group(), chunk), work);
    });
}
