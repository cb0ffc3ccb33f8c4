//! The learned bias: which entry of the table belongs to which distance.

use smallvec::{SmallVec, smallvec};

use super::OPERATION;
use crate::call::{Order, Sequence};
use crate::error::{Error, expect};

/// What becomes of a distance that the table does not reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Beyond {
    /// The call is refused.
    Error,
    /// It takes the value at the table's nearer end.
    Extend,
}

/// The learned exponents `b_δ`, one table a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bias {
    /// `[heads, count]`: entry `n` belongs to the distance `first + n`.
    Table {
        /// The distance of the first entry.
        first: isize,
        /// Entries, at least 1.
        count: usize,
        /// What becomes of other distances.
        beyond: Beyond,
    },
    /// `[heads, buckets]`: the buckets of T5 (Raffel et al. 2020), exact for small distances and logarithmic up to
    /// `max_distance`, from which on all share the last one.
    Buckets {
        /// Entries for each head: at least 2, and even and at least 4 if bidirectional.
        buckets: usize,
        /// Must exceed the number of exact buckets, which is half of those of one side.
        max_distance: usize,
        /// The second half of the buckets belongs to `δ > 0`. Otherwise all `δ ≥ 0` share bucket 0.
        bidirectional: bool,
    },
    /// `[heads, 2·height − 1, 2·width − 1]`: tokens are the pixels of an image, row after row; entry
    /// `[dy + height − 1, dx + width − 1]` belongs to a key `dy` rows below and `dx` columns right of the query.
    Grid {
        /// Rows of the image.
        height: usize,
        /// Columns of the image.
        width: usize,
    },
}

impl Bias {
    /// Distances from `−(reach − 1)` to `reach − 1`; others are refused.
    pub fn symmetric(reach: usize) -> Self {
        let back = isize::try_from(reach).unwrap_or(isize::MAX).saturating_sub(1);
        Self::Table { first: -back, count: reach.saturating_mul(2).saturating_sub(1), beyond: Beyond::Error }
    }

    /// Distances from `−radius` to `radius`; those beyond share the first or last entry.
    pub fn clipped(radius: usize) -> Self {
        let back = isize::try_from(radius).unwrap_or(isize::MAX);
        Self::Table { first: -back, count: radius.saturating_mul(2).saturating_add(1), beyond: Beyond::Extend }
    }

    /// The entry of one head's table for a query and a key that stand at these places of one sequence; `None` where the
    /// table has none.
    pub fn between(&self, query: isize, key: isize) -> Option<usize> {
        self.entry(self.place(key) - self.place(query))
    }

    pub(crate) fn shape(&self, heads: usize) -> SmallVec<[usize; 4]> {
        match *self {
            Self::Table { count, .. } => smallvec![heads, count],
            Self::Buckets { buckets, .. } => smallvec![heads, buckets],
            Self::Grid { height, width } => smallvec![heads, side(height), side(width)],
        }
    }

    /// The numbers by which the bias goes into the fingerprint of a state.
    pub(crate) fn state_id(&self) -> [u64; 4] {
        match *self {
            Self::Table { first, count, beyond } => {
                [1, first as u64, count as u64, u64::from(beyond == Beyond::Extend)]
            }
            Self::Buckets { buckets, max_distance, bidirectional } => {
                [2, buckets as u64, max_distance as u64, u64::from(bidirectional)]
            }
            Self::Grid { height, width } => [3, height as u64, width as u64, 0],
        }
    }

    pub(super) fn entries(&self) -> usize {
        self.shape(1).into_iter().fold(1, usize::saturating_mul)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let limit = isize::MAX as usize / 64;
        match *self {
            Self::Table { first, count, .. } => {
                let holds = (1..limit).contains(&count) && first.unsigned_abs() < limit;
                let expected = || "at least one entry, at distances that fit memory".into();
                expect(holds, OPERATION, "bias table", expected, || format!("{count} entries from distance {first}"))
            }
            Self::Buckets { buckets, max_distance, bidirectional } => {
                let least = if bidirectional { 4 } else { 2 };
                let exact = if bidirectional { buckets / 4 } else { buckets / 2 };
                let holds = buckets >= least
                    && (!bidirectional || buckets.is_multiple_of(2))
                    && max_distance > exact
                    && max_distance < limit;
                let expected = || {
                    format!(
                        "at least {least} buckets, even in number if bidirectional, and a larger max_distance than the {exact} exact ones"
                    )
                };
                let got = || format!("{buckets} buckets up to distance {max_distance}");
                expect(holds, OPERATION, "bias buckets", expected, got)
            }
            Self::Grid { height, width } => {
                let holds = height > 0 && width > 0 && side(height).checked_mul(side(width)).is_some_and(|n| n < limit);
                let expected = || "an image that fits memory".into();
                expect(holds, OPERATION, "bias grid", expected, || format!("{height} × {width}"))
            }
        }
    }

    /// The entry of a token distance; `None` where the table has none. Not for [`Bias::Grid`], whose entries follow
    /// from the [places](Self::place).
    pub(super) fn entry(&self, delta: isize) -> Option<usize> {
        match *self {
            Self::Table { first, count, beyond } => {
                let index = delta - first;
                match beyond {
                    Beyond::Error => usize::try_from(index).ok().filter(|&index| index < count),
                    Beyond::Extend => Some(index.clamp(0, count as isize - 1) as usize),
                }
            }
            Self::Buckets { buckets, max_distance, bidirectional } => {
                let (side, start) = match bidirectional {
                    true if delta > 0 => (buckets / 2, buckets / 2),
                    true => (buckets / 2, 0),
                    false => (buckets, 0),
                };
                let back = if bidirectional { delta.unsigned_abs() } else { (-delta.min(0)) as usize };
                let exact = side / 2;
                if back < exact {
                    return Some(start + back);
                }
                let (back, exact_f) = (back as f64, exact.max(1) as f64);
                let octaves = (back / exact_f).ln() / (max_distance as f64 / exact_f).ln();
                Some(start + (exact + (octaves * (side - exact) as f64) as usize).min(side - 1))
            }
            Self::Grid { .. } => usize::try_from(delta + self.centre()).ok().filter(|&n| n < self.entries()),
        }
    }

    /// Where a token stands on the line on which the bias is a function of the difference alone: the pixels of an
    /// image stand `2·width − 1` apart from row to row, so that no two displacements share a difference.
    pub(super) fn place(&self, token: isize) -> isize {
        match *self {
            Self::Grid { width, .. } => {
                let width = width as isize;
                token.div_euclid(width) * (2 * width - 1) + token.rem_euclid(width)
            }
            _ => token,
        }
    }

    /// The entry of distance 0 in a grid: the differences of places reach as far to either side.
    pub(super) fn centre(&self) -> isize {
        match *self {
            Self::Grid { height, width } => ((height - 1) * side(width) + width - 1) as isize,
            _ => 0,
        }
    }

    /// How many of the last tokens have weights of their own: earlier ones share that of [`far`](Self::far), or there
    /// are none.
    pub(super) fn near(&self) -> usize {
        match *self {
            Self::Table { first, beyond: Beyond::Error, .. } => usize::try_from(1 - first).unwrap_or(0),
            Self::Table { first, beyond: Beyond::Extend, .. } => usize::try_from(-first).unwrap_or(0),
            Self::Buckets { max_distance, .. } => max_distance,
            Self::Grid { height, width } => height * width,
        }
    }

    /// The entry of all tokens before the [near](Self::near) ones, if there may be such.
    pub(super) fn far(&self) -> Option<usize> {
        match self {
            Self::Table { beyond: Beyond::Error, .. } | Self::Grid { .. } => None,
            _ => self.entry(-(self.near() as isize)),
        }
    }

    /// Entries among which are all that a token and the `tokens - 1` before it meet when it comes last.
    pub(super) fn entries_before(&self, tokens: usize) -> std::ops::Range<usize> {
        match *self {
            Self::Table { first, count, .. } => {
                let entry = |delta: isize| delta.saturating_sub(first).clamp(0, count as isize - 1) as usize;
                entry(-(tokens as isize))..entry(0) + 1
            }
            Self::Buckets { buckets, .. } => 0..buckets,
            Self::Grid { .. } => 0..self.centre() as usize + 1,
        }
    }

    /// The least distance, known to be so, from which on all share one entry, and that entry.
    pub(super) fn after(&self) -> Option<(isize, usize)> {
        let distance = match *self {
            Self::Table { first, count, beyond: Beyond::Extend } => first + count as isize - 1,
            Self::Buckets { max_distance, bidirectional: true, .. } => max_distance as isize,
            Self::Buckets { .. } => 0,
            Self::Table { .. } | Self::Grid { .. } => return None,
        };
        self.entry(distance).map(|entry| (distance, entry))
    }

    /// The distances that the rows of a sequence meet, with `past` tokens before its first key: `None` where it has no
    /// pair.
    pub(super) fn distances(
        sequence: &Sequence<'_>,
        order: Order,
        offset: isize,
        past: usize,
    ) -> Option<(isize, isize)> {
        if sequence.queries == 0 || sequence.keys + past == 0 {
            return None;
        }
        let last = sequence.queries as isize - 1 + offset;
        let high = sequence.keys as isize - 1 - offset;
        let high = if order == Order::Causal { high.min(0) } else { high };
        let low = -(past as isize) - last;
        (low <= high).then_some((low, high))
    }

    /// Checks that the table has an entry for every distance of a sequence.
    pub(super) fn check_sequence(
        &self,
        sequence: &Sequence<'_>,
        order: Order,
        offset: isize,
        past: usize,
    ) -> Result<(), Error> {
        let Some((low, high)) = Self::distances(sequence, order, offset, past) else { return Ok(()) };
        match *self {
            Self::Table { first, count, beyond: Beyond::Error } => {
                let expected = || format!("entries for the distances {low} to {high}, or a clipped bias");
                let got = || format!("a table from {first} to {}", first + count as isize - 1);
                expect(low >= first && high < first + count as isize, OPERATION, "bias", expected, got)
            }
            Self::Grid { height, width } => {
                let pixels = (height * width) as isize;
                let ends = sequence.queries as isize + offset + past as isize;
                let tokens = (past + sequence.keys) as isize;
                let expected = || format!("queries and keys that stand on an image of {height} × {width} pixels");
                let got = || format!("{} queries from pixel {offset} and {tokens} keys", sequence.queries);
                expect(offset >= 0 && ends <= pixels && tokens <= pixels, OPERATION, "bias", expected, got)
            }
            _ => Ok(()),
        }
    }
}

fn side(n: usize) -> usize {
    n.saturating_mul(2).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_those_of_t5() {
        // From the published relative_position_bucket with 32 buckets and max_distance 128.
        let both = Bias::Buckets { buckets: 32, max_distance: 128, bidirectional: true };
        for (delta, bucket) in
            [(0, 0), (-1, 1), (-7, 7), (-8, 8), (-12, 9), (-127, 15), (-500, 15), (1, 17), (8, 24), (300, 31)]
        {
            assert_eq!(both.entry(delta), Some(bucket), "distance {delta}");
        }
        let causal = Bias::Buckets { buckets: 32, max_distance: 128, bidirectional: false };
        for (delta, bucket) in [(5, 0), (0, 0), (-15, 15), (-16, 16), (-128, 31), (-9999, 31)] {
            assert_eq!(causal.entry(delta), Some(bucket), "distance {delta}");
        }
    }

    #[test]
    fn no_two_displacements_share_a_place() {
        let (height, width) = (3, 4);
        let grid = Bias::Grid { height, width };
        for query in 0..12isize {
            for key in 0..12isize {
                let (dy, dx) = (key / 4 - query / 4, key % 4 - query % 4);
                let entry = (dy + 2) * 7 + dx + 3;
                assert_eq!(grid.entry(grid.place(key) - grid.place(query)), Some(entry as usize));
            }
        }
    }
}
