//! Tiles of scores, weighed by distance: O(queries · keys) work at the rate of the matrix product, O(tile²) memory for
//! each thread.

use super::backward::{Backward, Memory, Pass, Sizes};
use super::chunks::{RowChunk, all_chunks};
use super::key_pass::{self, KeyPass};
use super::left::{KeyUnit, all_units};
use super::problem::{CHUNK, Problem};
use super::{forward, one_pass, query_pass};
use crate::call::{Arena, Scratch, Sink};
use crate::simd::Real;
use crate::threads;

pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = forward::worker_len(problem);
    let mut arena = Arena::new(scratch.take(problem.shared_len() + threads::count() * per_worker));
    let shared = problem.shared(&mut arena);
    forward::run(problem, &shared, &all_chunks(problem, CHUNK), None, sink, (arena.rest(), per_worker));
}

pub(super) fn backward<T: Real>(call: Backward<'_, '_, T>, parameters: &mut [&mut [T]], scratch: &mut Scratch<T>) {
    if one_pass::takes(&call) {
        return one_pass::backward(call, parameters, scratch);
    }
    let sizes = Sizes { per_worker: worker_len(call.problem), ..Sizes::default() };
    call.run(parameters, sizes, scratch, |pass, memory| {
        two_passes(pass, all_chunks(call.problem, CHUNK), &all_units(call.problem), memory);
    });
}

/// Numbers of working memory of a worker of [`two_passes`].
pub(super) fn worker_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    query_pass::worker_len(problem, false).max(key_pass::worker_len(problem, false))
}

/// Computes the gradients of the queries of some chunks, then those of the keys, values and biases of some units. Both
/// passes form the weights anew.
pub(super) fn two_passes<T: Real>(
    pass: &Pass<'_, '_, T>,
    chunks: Vec<RowChunk>,
    units: &[KeyUnit],
    memory: Memory<'_, T>,
) {
    query_pass::run(pass, chunks, None, (&mut *memory.workers, memory.per_worker));
    KeyPass { pass, rows: None }.run(units, memory);
}
