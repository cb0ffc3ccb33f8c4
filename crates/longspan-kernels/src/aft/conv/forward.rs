//! Outputs of AFT-conv.

use super::walk::{Work, header, walk};
use super::{Geometry, KeySource, kernel};
use crate::aft::problem::{Block, Chunks, Problem};
use crate::aft::state::Head;
use crate::real::Real;
use crate::scratch::{Arena, Scratch};
use crate::shape::SharedRows;
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
    let per_worker = Work::<T>::len(geometry.most(), width).next_multiple_of(64);
    let workers = threads::count().min(chunks.tasks()).max(1);
    let edges_len = geometry.edges_len::<T>(&windows, dims.kv_heads, width);
    let mut arena = Arena::new(scratch.take(workers * per_worker + edges_len + 128));
    let work = arena.take(workers * per_worker);
    let source = |sequence: usize, head: usize| KeySource::new(problem, &geometry, sequence, head);
    let initial = |sequence: usize, head: usize, sum: &mut [T]| {
        if let Some(state) = problem.call.initial_state {
            let far = Head::from(state.head(problem.sequences[sequence].batch, head));
            (sum[0], sum[2]) = (far.exponent[0], far.denominator[0]);
            sum[header::<T>()..][..dims.head_dim].copy_from_slice(far.numerator);
        }
    };
    let memory = arena.rest();
    let edges = geometry.edges(problem, &windows, dims.kv_heads, width, source, initial, memory, work, per_worker);
    parallel(chunks.tasks(), work, per_worker, |task, work| {
        let (line, head, chunk) = chunks.task(task);
        let (index, kv_head) = (line / geometry.lines, head / dims.group());
        let (sequence, window) = (&problem.sequences[index], &windows[line]);
        let field = geometry.field(*window, line % geometry.lines, kernel(problem, head));
        let edges = edges.of(window, line, kv_head, chunk);
        let mut work = Work::new(work, geometry.most(), width);
        walk(problem.ops, &source(index, kv_head), &field, chunk, edges, &mut work);
        let (from, to) = window.chunk(chunk);
        let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start + geometry.start(line));
        let factors = &mut work.d[..to - from];
        // A row that sees nothing gives 0; a weight that is NaN shows.
        factors.iter_mut().filter(|d| **d != T::ZERO).for_each(|d| *d = T::ONE / *d);
        let token = sequence.query_start + geometry.start(line) + from;
        // SAFETY: every row belongs to one chunk of one head, and the columns end here.
        let mut rows = unsafe { out.columns([sequence.batch, head, token], to - from, 0..dims.head_dim) };
        let queries = problem.aft.gate.then(|| queries.skip(from));
        problem.ops.gated_rows(&work.sums[..(to - from) * width], factors, queries, &mut rows);
    });
}
