//! The state after the last key.

use super::chunks::CHUNK;
use super::items::{Items, join_all};
use super::keys::KeyItems;
use super::problem::Problem;
use super::state::{Head, MARKS, OLDEST, advance, ring_place};
use crate::call::{Scratch, Sequence, State};
use crate::simd::Real;

/// The mean of the keys that no window reaches any more after the last one; `work` has room for a chunk and one more.
pub(super) fn far<T: Real>(
    problem: &Problem<'_, T>,
    sequence: &Sequence<'_>,
    kv_head: usize,
    sum: &mut [T],
    work: &mut [T],
) {
    let items = KeyItems::new(problem, sequence, kv_head);
    let first = -(problem.ring as isize);
    items.start(sum);
    join_all(&items, first, (sequence.keys as isize - problem.aft.ring() as isize).max(first), sum, work);
}

pub(super) fn marks<T: Real>(problem: &Problem<'_, T>, sequence: &Sequence<'_>, kv_head: usize) -> [T; MARKS] {
    let none = [T::ZERO; MARKS];
    let before = problem.initial(sequence, kv_head).map_or(&none[..], |head| head.marks);
    advance(problem.aft, before, sequence.keys)
}

/// Writes the state but for the mean of variants without windows, whose walk through the keys has it at its end.
pub(super) fn final_state<T: Real>(
    problem: &Problem<'_, T>,
    state: &mut State<T>,
    with_mean: bool,
    scratch: &mut Scratch<T>,
) {
    let (mean, width) = (problem.mean(), problem.dims.head_dim);
    let (key_dim, kv_heads) = (problem.key_dim, problem.dims.kv_heads);
    let ring = problem.aft.ring();
    for (index, mut head) in state.heads_mut().map(Head::from).enumerate() {
        let (sequence, kv_head) = (&problem.sequences[index / kv_heads], index % kv_heads);
        if with_mean && width > 0 {
            let (sum, block) = scratch.take((CHUNK + 2) * mean).split_at_mut(mean);
            far(problem, sequence, kv_head, sum, block);
            head.write(sum);
        }
        let marks = marks(problem, sequence, kv_head);
        head.marks[..MARKS].copy_from_slice(&marks);
        let items = KeyItems::new(problem, sequence, kv_head);
        for back in 1..=ring {
            let key = sequence.keys as isize - back as isize;
            let row = ring_place(marks[OLDEST], ring, back);
            let to_key = &mut head.ring_keys[row * key_dim..][..key_dim];
            let to_value = &mut head.ring_values[row * width..][..width];
            match items.token(key).filter(|_| key >= -(problem.ring as isize)) {
                Some((key, value)) => {
                    to_key.copy_from_slice(key);
                    to_value.copy_from_slice(value);
                }
                None => {
                    to_key.fill(T::NEG_INFINITY);
                    to_value.fill(T::ZERO);
                }
            }
        }
    }
}
