//! The state after the last key of a call.

use super::problem::{Problem, TILE};
use super::state::{self, Head, Writer};
use crate::call::{Arena, Scratch, State};
use crate::feature_map::elementwise::Shift;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::rows::pieces;
use crate::threads;

/// Writes it.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>, scratch: &mut Scratch<T>) {
    let near = problem.toeplitz.bias.near();
    if let Some(initial) = problem.call.initial_state {
        *state = initial.clone();
    } else if let Ok(empty) = state::empty(problem.toeplitz, &problem.dims) {
        *state = empty;
    }
    let (width, features, value_dim) = (problem.head_width, problem.features, problem.dims.value_dim);
    let per_head = Arena::measure(|arena| {
        (arena.take(TILE * width), arena.take(value_dim), MapBuffers::new(&problem.mapping, TILE, arena))
    });
    let heads: Vec<_> = state.heads_mut().map(Head::from).enumerate().collect();
    let memory = scratch.take(heads.len() * per_head).chunks_exact_mut(per_head);
    threads::share(heads.into_iter().zip(memory), |((index, head), memory)| {
        // Packed sequences are refused, so units are batch entries and heads in order.
        let unit = problem.unit(index);
        let mut writer = Writer::new(near, head);
        let mut arena = Arena::new(memory);
        let (block, none) = (arena.take(TILE * width), arena.take(value_dim));
        none.fill(T::ZERO);
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        for (first, count) in pieces(0..unit.sequence.keys, TILE) {
            let mut exponents = [T::ZERO; TILE];
            if problem.mapping.exponential {
                for (key, exponent) in exponents[..count].iter_mut().enumerate() {
                    *exponent = problem.key_max(&unit, (first + key) as isize).unwrap_or(T::ZERO);
                }
            }
            problem.load_keys(&unit, (first, count), Shift::Each(&exponents), block, &mut map);
            for (key, row) in (first..first + count).zip(block.chunks_exact(width.max(1))) {
                let (v, present) = match unit.ignores(key) {
                    true => (&*none, T::ZERO),
                    false => (unit.v.row(key, value_dim), T::ONE),
                };
                writer.push(&row[..features], exponents[key - first], v, present);
            }
        }
    });
}
