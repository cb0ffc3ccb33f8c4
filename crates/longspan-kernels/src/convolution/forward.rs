//! The forward pass: 256 queries of a key/value head at a time.

use super::problem::{Problem, ROWS};
use super::state;
use super::taps::{convolve, silu, through_gate};
use crate::call::{Arena, Scratch, Sink, State};
use crate::simd::Real;
use crate::threads::{self, parallel};

/// What a task works on: products, sums, taps.
struct Block<'s, T> {
    products: &'s mut [T],
    sums: &'s mut [T],
    taps: &'s mut [T],
}

impl<'s, T: Real> Block<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        let (row, before) = (problem.row, problem.convolution.before());
        Self {
            products: arena.take((ROWS + before) * row),
            sums: arena.take(ROWS * row),
            taps: arena.take(problem.learned() * row),
        }
    }
}

pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let (dims, row) = (&problem.dims, problem.row);
    let before = problem.convolution.before();
    let of = |n: usize| (0..problem.sequences[n].queries).step_by(ROWS).map(move |first| (n, first));
    let pieces: Vec<(usize, usize)> = (0..problem.sequences.len()).flat_map(of).collect();
    let per_worker = Arena::measure(|arena| Block::new(problem, arena));
    let tasks = pieces.len() * dims.kv_heads;
    let workers = threads::count().min(tasks);
    parallel(tasks, scratch.take(workers * per_worker), per_worker, |task, scratch| {
        threads::check();
        let Block { products, sums, taps } = Block::new(problem, &mut Arena::new(scratch));
        let ((sequence, first), kv_head) = (pieces[task / dims.kv_heads], task % dims.kv_heads);
        let sequence = &problem.sequences[sequence];
        let rows = (sequence.queries - first).min(ROWS);
        let position = first as isize + problem.call.mask.offset;
        problem.load_taps(kv_head, taps);
        let positions = position - before as isize..position + rows as isize;
        problem.load_products(sequence, kv_head, positions, (products, row));
        let sums = &mut sums[..rows * row];
        if row > 0 {
            convolve(products, taps, row, sums);
        }
        if problem.convolution.silu {
            silu(sums, None);
        }
        for head in dims.heads_of(kv_head) {
            let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start + first);
            for at in 0..rows {
                let token = sequence.query_start + first + at;
                // SAFETY: each (batch, head, token) belongs to one task.
                let out = unsafe { sink.out.row(sequence.batch, head, token, dims.value_dim) };
                through_gate(queries.row(at, dims.head_dim), &sums[at * row..], out);
                // SAFETY: as above.
                unsafe { sink.set_denominator([sequence.batch, head, token], &[T::ONE]) };
            }
        }
    });
}

/// Writes the state after the last key of a call that was checked for it.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, to: &mut State<T>) {
    let before = problem.convolution.before();
    for (unit, [products, _, tokens, ..]) in to.heads_mut().enumerate() {
        let (sequence, kv_head) = (&problem.sequences[unit / problem.dims.kv_heads], unit % problem.dims.kv_heads);
        let end = sequence.keys as isize;
        problem.load_products(sequence, kv_head, end - before as isize..end, (products, problem.dims.value_dim));
        let earlier = problem.call.initial_state.map_or(0, |state| state::tokens(state, sequence.batch, kv_head));
        tokens[0] = T::from_f64((earlier + sequence.keys).min(before) as f64);
    }
}
