//! What transforms leave to tiles of the gradients of keys, values and biases.

use super::problem::Problem;
use super::tile::KeyBlock;
use crate::simd::Real;

/// The number of a unit, and what of it is wanted if not all.
pub(super) type KeyUnit = (usize, Option<Left>);

/// All of the units of a call.
pub(super) fn all_units<T: Real>(problem: &Problem<'_, T>) -> Vec<KeyUnit> {
    (0..problem.units()).map(|index| (index, None)).collect()
}

/// The keys and distances of a unit whose gradients transforms leave to tiles. Not for images.
pub(super) struct Left {
    keys: Counts,
    /// By head, indices of its line.
    distances: Vec<Counts>,
}

/// How many of the first `n` are marked, for each `n`.
struct Counts(Vec<u32>);

impl Counts {
    fn new(marks: impl Iterator<Item = bool>) -> Self {
        let mut count = 0;
        Self(
            std::iter::once(0)
                .chain(marks.map(|mark| {
                    count += u32::from(mark);
                    count
                }))
                .collect(),
        )
    }

    fn any(&self, from: usize, len: usize) -> bool {
        let last = self.0.len() - 1;
        self.0[(from + len).min(last)] > self.0[from.min(last)]
    }
}

impl Left {
    /// From marks for each key, and for each index of the line of each head.
    pub fn new(keys: &[bool], distances: &[Vec<bool>]) -> Self {
        let distances = distances.iter().map(|marks| Counts::new(marks.iter().copied())).collect();
        Self { keys: Counts::new(keys.iter().copied()), distances }
    }

    /// Whether there is anything to do.
    pub fn any(&self) -> bool {
        std::iter::once(&self.keys).chain(&self.distances).any(|counts| counts.any(0, counts.0.len()))
    }

    /// Whether an index of the `n`-th head's line is left.
    pub fn distance(&self, n: usize, index: usize) -> bool {
        self.distances[n].any(index, 1)
    }

    /// Whether any of `count` keys from `first` on is left: tiles then take the whole block.
    pub fn keys(&self, first: usize, count: usize) -> bool {
        self.keys.any(first, count)
    }

    pub fn keys_of<T>(&self, block: &KeyBlock<'_, T>) -> bool {
        self.keys(block.from as usize, block.count)
    }

    /// Whether any distance between a block of keys and of rows is left.
    pub fn distances_of<T: Real>(
        &self,
        problem: &Problem<'_, T>,
        n: usize,
        keys: &KeyBlock<'_, T>,
        (stands, rows): (isize, usize),
    ) -> bool {
        let first = problem.line_index(keys.from - (stands + rows as isize - 1)).max(0);
        self.distances[n].any(first as usize, keys.count + rows - 1)
    }
}
