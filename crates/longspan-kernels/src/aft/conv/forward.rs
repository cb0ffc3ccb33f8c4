//! Outputs of AFT-conv.

use super::field::{Work, clear, header, join};
use super::geometry::{Edges, Geometry, block};
use super::sources::{KeySource, kernel};
use super::walk::walk;
use crate::aft::chunks::{Chunks, Window, Workers};
use crate::aft::outputs::GatedRows;
use crate::aft::problem::{Block, Problem};
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::{Real, dispatch};
use crate::threads;

pub(in crate::aft) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    geometry: Geometry,
    out: SharedRows<'_, T>,
    scratch: &mut Scratch<T>,
) {
    let (dims, width) = (&problem.dims, problem.width);
    let windows = geometry.windows(problem, &Block::whole(problem), false);
    let chunks = Chunks::new(windows.clone(), dims.heads);
    let work_len = Work::<T>::len(geometry.most(), width);
    let source = |sequence: usize, head: usize| KeySource::new(problem, &geometry, sequence, head);
    let initial = |sequence: usize, head: usize, sum: &mut [T]| {
        if let Some(far) = problem.initial(&problem.sequences[sequence], head) {
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
        let first = sequence.query_start + start + from;
        walk(&source(index, kv_head), &field, chunk, edges, &mut work);
        let factors = &mut work.d[..rows];
        // A row that sees nothing gives 0; a weight that is NaN shows.
        factors.iter_mut().filter(|d| **d != T::ZERO).for_each(|d| *d = T::ONE / *d);
        // SAFETY: every row belongs to one chunk of one head, and the columns end here.
        let to = unsafe { out.columns([sequence.batch, head, first], rows, 0..dims.head_dim) };
        let queries = problem.aft.gate.then(|| problem.call.q.rows(sequence.batch, head).skip(first));
        dispatch(GatedRows { sums: &work.sums[..rows * width], factors, queries, to });
    };

    // Whole heads, if all threads have as many: the sum before a window then goes along with it, and where there are others, what
    // edges have read of a head is near when its windows read it again. The numbers are the same.
    let (threads, heads) = (threads::count(), problem.sequences.len() * dims.heads);
    if dims.group() == 1 && (heads.is_multiple_of(threads) || heads >= 16 * threads) {
        let len = header::<T>() + width;
        let of = |sequence: usize| &windows[sequence * geometry.lines..][..geometry.lines];
        let alone = |own: &[Window]| matches!(own, [window] if !window.after);
        let sums = |own| if alone(own) { 2 * len } else { Edges::<T>::memory(&geometry, own, 1, width) };
        let longest = (0..problem.sequences.len()).map(|index| sums(of(index))).max().unwrap_or(0);
        let each = work_len + longest;
        Workers::in_scratch(heads, each, scratch).run(heads, |task, memory| {
            let (index, head) = (task / dims.heads, task % dims.heads);
            let (work, memory) = memory.split_at_mut(work_len);
            let (own, source) = (of(index), |_, _| source(index, head));
            if alone(own) {
                let (sum, item) = memory.split_at_mut(len);
                clear(sum);
                initial(index, head, sum);
                let field = geometry.field(own[0], 0, &[]);
                for chunk in 0..own[0].chunks() {
                    let mut own_work = Work::new(work, geometry.most(), width);
                    field.sum(&source(0, 0), block(&own[0], chunk), &mut own_work, &mut item[..len]);
                    join(sum, &item[..len]);
                    one(index, head, chunk, [&*sum, &[]], work);
                }
                return;
            }
            let initial = |_, _, sum: &mut [T]| initial(index, head, sum);
            let edges = Edges::new(&geometry, (own, 1, width), source, initial, memory, &mut Workers::alone(work));
            for (line, window) in own.iter().enumerate() {
                for chunk in 0..window.chunks() {
                    let edges = edges.of(window, line, 0, chunk);
                    one(index * geometry.lines + line, head, chunk, edges, work);
                }
            }
        });
        return;
    }
    let edges_len = Edges::<T>::memory(&geometry, &windows, dims.kv_heads, width);
    let memory = Arena::measure(|arena| Workers::<T>::new(chunks.tasks(), work_len, arena));
    let mut arena = Arena::new(scratch.take(memory + edges_len));
    let (mut workers, memory) = (Workers::new(chunks.tasks(), work_len, &mut arena), arena.rest());
    let sides = (&windows[..], dims.kv_heads, width);
    let edges = Edges::new(&geometry, sides, source, initial, memory, &mut workers);
    workers.run_chunks(chunks.tasks(), |task, work| {
        let (line, head, chunk) = chunks.task(task);
        one(line, head, chunk, edges.of(&windows[line], line, head / dims.group(), chunk), work);
    });
}
