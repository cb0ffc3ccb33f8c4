//! Which keys a query sees: the order of time, and which keys are there at all.

use std::ops::Range;

use super::Dims;
use crate::error::{Error, expect};

/// The order of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// Every query sees every key.
    #[default]
    Bidirectional,
    /// Query `i` sees the keys `j ≤ i + offset`.
    Causal,
}

/// Which keys are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Keys<'a> {
    /// All of them.
    #[default]
    All,
    /// The first `lengths[b]` of each batch entry; `[batch]`.
    Lengths(&'a [usize]),
    /// Those whose entry is `false`; `[batch, keys]`, row-major. `true` means *ignored*, as in PyTorch.
    Padding(&'a [bool]),
    /// Several sequences end to end on the token axis, each on its own; the batch must be 1.
    ///
    /// Both slices are cumulative: `[0, end of the first, …, number of tokens]`, and equally long.
    Packed {
        /// Boundaries on the query axis.
        queries: &'a [usize],
        /// Boundaries on the key axis.
        keys: &'a [usize],
    },
}

/// What a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mask<'a> {
    /// The order of time.
    pub order: Order,
    /// Query `i` stands at key `i + offset`: relative distances are `δ = j − (i + offset)`, and a causal query sees
    /// `δ ≤ 0`. 0 is the rule of the papers (aligned at the start); `keys − queries` aligns the ends; may be negative.
    pub offset: isize,
    /// Which keys are there.
    pub keys: Keys<'a>,
}

impl<'a> Mask<'a> {
    /// Every query sees every key.
    pub fn bidirectional() -> Self {
        Self::default()
    }

    /// Query `i` sees the keys `j ≤ i`.
    pub fn causal() -> Self {
        Self { order: Order::Causal, ..Self::default() }
    }

    /// The same with query `i` standing at key `i + offset`.
    pub fn with_offset(self, offset: isize) -> Self {
        Self { offset, ..self }
    }

    /// The same order of time over some of the keys.
    pub fn with_keys(self, keys: Keys<'a>) -> Self {
        Self { keys, ..self }
    }

    /// Whether several sequences stand end to end.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self.keys, Keys::Packed { .. })
    }

    /// Pairs of query and key that see each other, one head, if no key is ignored.
    pub(crate) fn visible_pairs(&self, dims: &Dims) -> f64 {
        match self.order {
            Order::Bidirectional => dims.queries as f64 * dims.keys as f64,
            Order::Causal => self.pairs_up_to(dims, 0.0),
        }
    }

    /// The same of the pairs at distances below a window.
    pub(crate) fn visible_pairs_within(&self, dims: &Dims, window: Option<usize>) -> f64 {
        let Some(window) = window else { return self.visible_pairs(dims) };
        let ahead = if self.order == Order::Causal { 0.0 } else { window as f64 - 1.0 };
        self.pairs_up_to(dims, ahead) - self.pairs_up_to(dims, -(window as f64))
    }

    /// Pairs whose key is at most `ahead` after the query's own place.
    fn pairs_up_to(&self, dims: &Dims, ahead: f64) -> f64 {
        let (queries, keys) = (dims.queries as f64, dims.keys as f64);
        // Row i has clamp(i + offset + ahead + 1, 0, keys): a ramp between two flat parts.
        let first = self.offset as f64 + ahead + 1.0;
        let top = (first + queries - 1.0).min(keys);
        let begin = first.max(1.0);
        let ramp = (top - begin + 1.0).max(0.0);
        let flat = (queries - (keys - first + 1.0).max(0.0)).clamp(0.0, queries);
        ramp * (begin + top) / 2.0 + flat * keys
    }

    pub(crate) fn check(&self, operation: &'static str, dims: &Dims) -> Result<(), Error> {
        let limit = isize::MAX / 4;
        let expected = || format!("between -{limit} and {limit}");
        expect((-limit..=limit).contains(&self.offset), operation, "offset", expected, || self.offset.to_string())?;
        match self.keys {
            Keys::All => Ok(()),
            Keys::Lengths(lengths) => {
                let expected = || format!("one for each of the {} batch entries", dims.batch);
                expect(lengths.len() == dims.batch, operation, "key lengths", expected, || lengths.len().to_string())?;
                let too_long = lengths.iter().find(|&&n| n > dims.keys);
                let got = || too_long.copied().unwrap_or(0).to_string();
                expect(too_long.is_none(), operation, "key lengths", || format!("at most {} keys", dims.keys), got)
            }
            Keys::Padding(padding) => {
                let expected = || format!("batch × keys = {} × {} entries", dims.batch, dims.keys);
                let got = || padding.len().to_string();
                expect(padding.len() == dims.batch * dims.keys, operation, "key padding", expected, got)
            }
            Keys::Packed { queries, keys } => {
                let expected = || "1 for packed sequences".into();
                expect(dims.batch == 1, operation, "batch", expected, || dims.batch.to_string())?;
                let expected = || "as many on the key axis as on the query axis".into();
                let got = || format!("{} and {}", keys.len(), queries.len());
                expect(queries.len() == keys.len(), operation, "packed boundaries", expected, got)?;
                for (name, bounds, tokens) in
                    [("packed query boundaries", queries, dims.queries), ("packed key boundaries", keys, dims.keys)]
                {
                    let holds = bounds.first() == Some(&0) && bounds.last() == Some(&tokens) && bounds.is_sorted();
                    let expected = || format!("ascending from 0 to {tokens}");
                    expect(holds, operation, name, expected, || format!("{bounds:?}"))?;
                }
                Ok(())
            }
        }
    }

    pub(crate) fn sequences(&self, dims: &Dims) -> Vec<Sequence<'a>> {
        let whole = |batch| Sequence {
            batch,
            query_start: 0,
            queries: dims.queries,
            key_start: 0,
            keys: dims.keys,
            absent: 0,
            padding: None,
        };
        match self.keys {
            Keys::All => (0..dims.batch).map(whole).collect(),
            Keys::Lengths(lengths) => (0..dims.batch)
                .map(|b| Sequence { keys: lengths[b], absent: dims.keys - lengths[b], ..whole(b) })
                .collect(),
            Keys::Padding(padding) => (0..dims.batch)
                .map(|b| {
                    let row = &padding[b * dims.keys..][..dims.keys];
                    // A row without padding takes the path without a mask; trailing padding is a shorter sequence.
                    let keys = row.iter().rposition(|&ignored| !ignored).map_or(0, |last| last + 1);
                    let row = &row[..keys];
                    Sequence { keys, absent: dims.keys - keys, padding: row.contains(&true).then_some(row), ..whole(b) }
                })
                .collect(),
            Keys::Packed { queries, keys } => queries
                .windows(2)
                .zip(keys.windows(2))
                .map(|(q, k)| Sequence {
                    batch: 0,
                    query_start: q[0],
                    queries: q[1] - q[0],
                    key_start: k[0],
                    keys: k[1] - k[0],
                    absent: 0,
                    padding: None,
                })
                .collect(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence<'a> {
    pub batch: usize,
    pub query_start: usize,
    pub queries: usize,
    pub key_start: usize,
    pub keys: usize,
    /// Ignored keys after the last.
    pub absent: usize,
    /// `true` means ignored; one entry a key. `None` where no key is ignored.
    pub padding: Option<&'a [bool]>,
}

impl<'a> Sequence<'a> {
    /// Where its first key stands among those of all heads, `[batch, kv_heads, keys]`.
    pub fn place(&self, dims: &Dims, kv_head: usize) -> usize {
        (self.batch * dims.kv_heads + kv_head) * dims.keys + self.key_start
    }

    /// Whether key `j` is ignored.
    pub fn ignores(&self, key: usize) -> bool {
        self.padding.is_some_and(|padding| padding[key])
    }

    /// Whether there is a key `j` that is not ignored.
    pub fn has(&self, key: usize) -> bool {
        key < self.keys && !self.ignores(key)
    }

    /// The entries of the padding mask for some keys.
    pub fn padding(&self, keys: Range<usize>) -> Option<&'a [bool]> {
        self.padding.map(|padding| &padding[keys])
    }

    /// Whether something holds for all of some keys that are not ignored; `holds` is asked of a first key and how many follow.
    pub fn all(&self, keys: Range<usize>, holds: impl Fn(usize, usize) -> bool) -> bool {
        match self.padding {
            _ if keys.is_empty() => true,
            None => holds(keys.start, keys.len()),
            Some(padding) => keys.filter(|&key| !padding[key]).all(|key| holds(key, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_as_they_are_seen() {
        for (queries, keys) in [(0, 0), (1, 1), (5, 3), (3, 8), (8, 3), (7, 7)] {
            for offset in -4..6 {
                let dims = Dims { queries, keys, ..Dims::square(1, 1, 1, 4) };
                let mask = Mask::causal().with_offset(offset);
                let counted: isize = (0..queries as isize).map(|i| (i + offset + 1).clamp(0, keys as isize)).sum();
                assert_eq!(mask.visible_pairs(&dims), counted as f64, "{queries} {keys} {offset}");
                for (window, order) in (1..7).flat_map(|w| [(w, Order::Causal), (w, Order::Bidirectional)]) {
                    let ahead = if order == Order::Causal { 0 } else { window - 1 };
                    let seen = |(i, j): (isize, isize)| (1 - window..=ahead).contains(&(j - i - offset));
                    let pairs = (0..queries as isize).flat_map(|i| (0..keys as isize).map(move |j| (i, j)));
                    let counted = pairs.filter(|&pair| seen(pair)).count() as f64;
                    let got = Mask { order, ..mask }.visible_pairs_within(&dims, Some(window as usize));
                    assert_eq!(got, counted, "{queries} {keys} {offset} {window} {order:?}");
                }
            }
        }
    }
}
