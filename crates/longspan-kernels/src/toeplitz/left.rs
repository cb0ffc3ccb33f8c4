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

/// Marks of the keys and distances of a unit whose gradients transforms leave to tiles. Not for images.
pub(super) struct Left {
    pub keys: Vec<bool>,
    /// By head, for each index of its line.
    pub distances: Vec<Vec<bool>>,
}

/// Whether any of some marks is set, as far as they are there.
fn any(marks: &[bool], first: usize, count: usize) -> bool {
    marks.iter().skip(first).take(count).any(|&mark| mark)
}

impl Left {
    /// Whether there is anything to do.
    pub fn any(&self) -> bool {
        std::iter::once(&self.keys).chain(&self.distances).any(|marks| marks.contains(&true))
    }

    /// Whether an index of the `n`-th head's line is left.
    pub fn distance(&self, n: usize, index: usize) -> bool {
        any(&self.distances[n], index, 1)
    }

    /// Whether any of `count` keys from `first` on is left: tiles then take the whole block.
    pub fn keys(&self, first: usize, count: usize) -> bool {
        any(&self.keys, first, count)
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
        any(&self.distances[n], first as usize, keys.count + rows - 1)
    }
}
