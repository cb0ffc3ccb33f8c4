//! The stages of the walk over the keys.

use super::super::pass::PassMemory;
use super::super::problem::Problem;
use super::super::row_pass::{cut, cut_count};
use super::key_buffers::KeyBuffers;
use super::key_pass::{Stage, Work};
use super::key_walk::KeyWalk;
use crate::call::Arena;
use crate::simd::Real;

/// The stages of a unit in the order of the walk: rows that every key must know of first, then the keys, last to first.
pub(super) fn stages<T: Real>(walk: &KeyWalk<'_, '_, T>) -> Vec<Stage> {
    let problem = walk.problem;
    let keys = walk.unit.sequence.keys as isize;
    let positions = walk.positions();
    let mut list = Vec::new();
    let mut add = |from: isize, to: isize, work: Work| {
        let (from, to) = (from, to.max(from));
        let mut parts = cut(problem, 0, (to - from) as usize, 0, false);
        parts.reverse();
        let place = |at: usize| from + at as isize;
        list.extend(parts.into_iter().map(|part| Stage {
            from: place(part.from),
            to: place(part.to),
            work,
            idle: 0,
            number: 0,
        }));
    };
    let mut idle = 0;
    if !positions.is_empty() {
        let reach = problem.radius.unwrap_or(0) as isize;
        let mut rows = |from, to, content, far| add(from, to, Work::Rows { content, far });
        if problem.causal {
            let from = keys.max(positions.start - reach);
            rows(from, positions.end, problem.content, problem.radius);
            if positions.end > from {
                idle = (from - keys) as usize;
            }
        } else {
            match problem.radius {
                Some(0) => rows(positions.start, positions.end, false, Some(0)),
                Some(radius) => rows(keys.max(positions.start - reach), positions.end - reach, false, Some(radius)),
                None => {}
            }
        }
    }
    let end = |from: isize, to: isize, work: Work| Stage { from, to, work, idle: 0, number: 0 };
    let rows = list.len();
    if walk.row_sums.is_some() {
        list.push(end(0, 0, Work::RowSums));
    }
    if walk.d_final.is_some() {
        list.push(end(keys, keys, Work::FinalState));
    }
    let mut parts = cut(problem, 0, keys as usize, 0, true);
    parts.reverse();
    list.extend(parts.into_iter().map(|part| end(part.from as isize, part.to as isize, Work::Keys)));
    if walk.d_initial.is_some() {
        list.push(end(-(problem.radius.unwrap_or(0) as isize), 0, Work::InitialState));
    }
    if let Some(stage) = list.get_mut(rows) {
        stage.idle = idle;
    }
    list.iter_mut().enumerate().for_each(|(number, stage)| stage.number = number);
    list
}

/// Most stages that a unit can have: segments of rows and of keys, and two states.
pub(super) fn most_stages<T: Real>(problem: &Problem<'_, T>) -> usize {
    let count = |tokens: usize| cut_count(problem, tokens);
    problem.sequences.iter().map(|s| count(s.queries) + 4 + count(s.keys)).max().unwrap_or(0)
}

/// Sizes of the memory of walks with chunks of so many keys.
pub(super) fn memory<T: Real>(problem: &Problem<'_, T>, chunk: usize) -> PassMemory {
    let worker = Arena::measure(|arena| KeyBuffers::new(problem, chunk, arena));
    PassMemory::new(problem, most_stages(problem), 0, worker)
}
