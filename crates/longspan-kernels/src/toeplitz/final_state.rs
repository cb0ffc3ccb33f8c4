//! The state after the last key of a call: the sum of all keys that are far by then, by blocks, and a ring of the last.

use super::far::FarSum;
use super::piecewise;
use super::problem::{Problem, TILE};
use super::state::{EXPONENT, Head, Writer};
use super::tile::KeyBlock;
use crate::call::{Arena, Scratch, State, Stateful};
use crate::feature_map::elementwise::Shift;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::rows::pieces;
use crate::threads;

pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>, scratch: &mut Scratch<T>) {
    let near = problem.toeplitz.bias.near();
    if let Some(initial) = problem.call.initial_state {
        *state = initial.clone();
    } else if let Ok(empty) = problem.toeplitz.empty_state(&problem.dims) {
        *state = empty;
    }
    let (width, features, value_dim) = (problem.head_width, problem.features, problem.dims.value_dim);
    let per_head = Arena::measure(|arena| {
        let block = (arena.take(TILE * width), arena.take(value_dim), MapBuffers::new(&problem.mapping, TILE, arena));
        (block, arena.take(FarSum::len(problem)), KeyBlock::new(problem, false, arena))
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
        let mut start = 0;
        if problem.toeplitz.bias.far().is_some() && unit.sequence.keys > near {
            start = unit.sequence.keys - near;
            let mut sum = FarSum::empty(problem, arena.take(FarSum::len(problem)));
            let mut keys = KeyBlock::new(problem, false, &mut arena);
            piecewise::add_past(problem, &unit, &mut sum);
            piecewise::add_keys(problem, &unit, (unit.begin(), start as isize), (&mut keys, &mut map), &mut sum);
            let there = |key: isize| match usize::try_from(key) {
                Ok(key) => !unit.sequence.ignores(key),
                Err(_) => unit.past.is_some_and(|past| !past.ignores(key)),
            };
            let any = writer.head.marks[EXPONENT] > T::NEG_INFINITY || (unit.begin()..start as isize).any(there);
            writer.restart(start, if any { sum.exponent() } else { T::NEG_INFINITY });
            for (feature, to) in writer.head.sum.chunks_exact_mut(value_dim.max(1)).enumerate() {
                to.copy_from_slice(&sum.outer[feature * problem.value_width..][..value_dim]);
            }
            writer.head.keys.copy_from_slice(&sum.features[..features]);
        }
        for (first, count) in pieces(start..unit.sequence.keys, TILE) {
            let mut exponents = [T::ZERO; TILE];
            if problem.mapping.exponential {
                for (key, exponent) in exponents[..count].iter_mut().enumerate() {
                    *exponent = problem.key_max(&unit, (first + key) as isize).unwrap_or(T::ZERO);
                }
            }
            problem.load_keys(&unit, (first, count), Shift::Each(&exponents), block, &mut map);
            for (key, row) in (first..first + count).zip(block.chunks_exact(width.max(1))) {
                let (v, present) = match unit.sequence.ignores(key) {
                    true => (&*none, T::ZERO),
                    false => (unit.v.row(key, value_dim), T::ONE),
                };
                writer.push(&row[..features], exponents[key - first], v, present);
            }
        }
    });
}
