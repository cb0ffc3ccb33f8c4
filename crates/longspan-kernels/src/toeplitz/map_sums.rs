//! Sums for the gradients of a learned feature map. Queries of a head add to one of a few lanes, keys to the lane of their segment, so that
//! neither memory nor the order of sums depends on threads.

use super::problem::Problem;
use crate::call::SharedRows;
use crate::simd::Real;

/// Lanes that the chunks of one head's queries are dealt to: as many tasks as a head can keep busy under a learned map.
const LANES: usize = 8;

/// Where tasks add to; nothing but for learned maps.
#[derive(Clone, Copy)]
pub(super) struct MapSums<'s, T> {
    rows: SharedRows<'s, T>,
    len: usize,
    group: usize,
    segments: usize,
    /// Sums of queries, which come first.
    queries: usize,
}

impl<'s, T: Real> MapSums<'s, T> {
    pub fn len(problem: &Problem<'_, T>) -> usize {
        let owners = problem.units() * problem.dims.group();
        (owners * LANES + problem.units() * problem.segments()) * problem.mapping.sums_len()
    }

    /// In memory of [`len`](Self::len) numbers, which are made 0.
    pub fn new(problem: &Problem<'_, T>, numbers: &'s mut [T]) -> Self {
        numbers.fill(T::ZERO);
        let (group, len) = (problem.dims.group(), problem.mapping.sums_len());
        Self {
            rows: SharedRows::new(numbers, [len, 0, 1]),
            len,
            group,
            segments: problem.segments(),
            queries: problem.units() * group * LANES,
        }
    }

    /// The lane of one of a head's chunks: each its own but for learned maps.
    pub fn lane(&self, chunk: usize) -> usize {
        if self.len == 0 { chunk } else { chunk % LANES }
    }

    /// The sum of a lane of the queries of one of a unit's heads.
    ///
    /// # Safety
    /// While it lives no other slice of it may exist, in this thread or another.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn of_queries(&self, unit: usize, head: usize, lane: usize) -> &mut [T] {
        let place = (unit * self.group + head % self.group) * LANES + lane % LANES;
        // SAFETY: forwarded to the caller.
        unsafe { self.rows.row(place, 0, 0, self.len) }
    }

    /// The sum of a segment of a unit's keys.
    ///
    /// # Safety
    /// As for [`of_queries`](Self::of_queries).
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn of_keys(&self, unit: usize, segment: usize) -> &mut [T] {
        // SAFETY: forwarded to the caller.
        unsafe { self.rows.row(self.queries + unit * self.segments + segment, 0, 0, self.len) }
    }
}

/// Writes the gradients of a learned map's parameters from the sums of all tasks; there are none of other maps.
pub(super) fn write<T: Real>(problem: &Problem<'_, T>, numbers: &[T], gradients: &mut [&mut [T]]) {
    let (Some(map), [queries, keys]) = (&problem.mapping.rows, gradients) else { return };
    let (group, len, segments) = (problem.dims.group(), problem.mapping.sums_len(), problem.segments());
    let (of_queries, of_keys) = numbers.split_at(problem.units() * group * LANES * len);
    let units = |kv_head: usize| (0..problem.sequences.len()).map(move |n| n * problem.dims.kv_heads + kv_head);
    let sums = |all, owner: usize, count: usize| <[T]>::chunks_exact(all, len).skip(owner * count).take(count);
    for head in 0..problem.dims.heads {
        let owners = units(head / group).map(|unit| unit * group + head % group);
        map.write_gradient(owners.flat_map(|owner| sums(of_queries, owner, LANES)), head, false, queries);
    }
    for kv_head in 0..problem.dims.kv_heads {
        map.write_gradient(units(kv_head).flat_map(|unit| sums(of_keys, unit, segments)), kv_head, false, keys);
    }
}
