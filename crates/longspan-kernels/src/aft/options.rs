//! The options of the mechanism, and what follows from them alone.

use crate::call::{Dims, Mechanism, optional_id};
use crate::error::{Error, expect};

/// Where the bias `w_ij` of a pair comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// AFT-full: learned for every pair of positions. A query stands at position `i + offset` and a key at `j`, both
    /// counted from the first token of the initial state; positions outside the table are an error.
    ///
    /// The parameter is `w`, `[length, length]`, or with a rank `u` and `z`, `[length, rank]` each, with `w = u·zᵀ`; shared
    /// by all heads and batch entries.
    Full {
        /// Positions that the table has, at least 1.
        length: usize,
        /// Of the factors; `None` for a dense table.
        rank: Option<usize>,
    },
    /// AFT-local: learned where `|j − t| < window`, 0 (not −∞) elsewhere, so that every key still counts. `t` is the
    /// query's place among the keys, `i + offset`.
    ///
    /// The parameter `w` is `[rows, 2·window − 1]`, column `j − t + window − 1`, shared by all heads and batch entries.
    Local {
        /// How far biases reach; at least 1, which is a bias for the key at the query's own place.
        window: usize,
        /// `None`: the table belongs to calls of one length and has a row for each query, counted from the start of its
        /// sequence; there is no state. A number: the table has so many rows, and a query reads that of its position
        /// `i + offset` (and the tokens of the initial state); positions outside the table are an error.
        length: Option<usize>,
    },
    /// AFT-simple: no bias.
    Simple,
    /// AFT-conv: a kernel for each head over the last `taps` keys under a causal mask, or centred on the query, `(taps −
    /// 1)/2` keys before it; 0 elsewhere. Keys are `[batch, kv_heads, keys, 1]`.
    Conv {
        /// Taps of the kernel, at least 1.
        taps: usize,
        /// Whether the kernel is `γ·(w − mean w)/std w + β`, with the parameters `w` `[heads, taps]`, `gamma` and `beta`
        /// `[heads]`, the last two to be initialised with 0, as published; where all taps are equal it is `β`. Otherwise
        /// it is `w`, the one parameter.
        normalized: bool,
    },
    /// AFT-conv over images, whose tokens are the rows of the image one after the other: a kernel for each head, centred on
    /// the query, with the taps of keys beyond the image left out; 0 elsewhere, so that every key still counts. Keys are
    /// `[batch, kv_heads, keys, 1]`. There are as many queries and keys as the image has places, and ignored keys must be
    /// told by a padding mask. It looks both ways: causal masks, offsets, lengths, packed sequences and states are refused.
    Conv2d {
        /// Height and width in tokens, each at least 1.
        image: [usize; 2],
        /// Taps in height and width, each at least 1; the first `(taps − 1)/2` of either stand before the query.
        taps: [usize; 2],
        /// As for [`Variant::Conv`], over all taps of a head; `w` is `[heads, taps in height, taps in width]`.
        normalized: bool,
    },
}

impl Variant {
    /// The numbers by which the variant goes into the fingerprint of a state.
    pub(super) fn state_id(self) -> [u64; 6] {
        match self {
            Self::Full { length, rank } => [1, length as u64, optional_id(rank), 0, 0, 0],
            Self::Local { window, length } => [2, window as u64, optional_id(length), 0, 0, 0],
            Self::Simple => [3, 0, 0, 0, 0, 0],
            Self::Conv { taps, normalized } => [4, taps as u64, u64::from(normalized), 0, 0, 0],
            Self::Conv2d { image: [height, width], taps: [rows, columns], normalized } => {
                [5, height as u64, width as u64, rows as u64, columns as u64, u64::from(normalized)]
            }
        }
    }
}

/// The attention-free transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Aft {
    /// Where biases come from.
    pub variant: Variant,
    /// Multiply by `σ(q)`. Without it queries have no influence.
    pub gate: bool,
}

impl Aft {
    /// With the gate, as published.
    pub fn new(variant: Variant) -> Self {
        Self { variant, gate: true }
    }

    /// How far to both sides biases reach: the keys `t − back ..= t + ahead` of the query at `t`.
    pub(super) fn reach(&self, causal: bool) -> (usize, usize) {
        match self.variant {
            Variant::Simple => (0, 0),
            Variant::Local { window, .. } => (window - 1, if causal { 0 } else { window - 1 }),
            // A table has no pair that is farther apart.
            Variant::Full { length, .. } => (length - 1, if causal { 0 } else { length - 1 }),
            Variant::Conv { taps, .. } => {
                let back = if causal { taps - 1 } else { (taps - 1) / 2 };
                (back, taps - 1 - back)
            }
            // A kernel's rows, with all that stands between them.
            Variant::Conv2d { image: [_, width], taps, .. } => {
                let reach = |taps: [usize; 2]| (taps[0] * width).saturating_add(taps[1]);
                let back = taps.map(|taps| (taps - 1) / 2);
                (reach(back), reach([0, 1].map(|axis| taps[axis] - 1 - back[axis])))
            }
        }
    }

    /// Whether tiles of pairs are faster than walking from pair to pair; on a causal mask's diagonal they are cut down to single pairs.
    pub(super) fn tiled(&self, causal: bool) -> bool {
        let (back, ahead) = self.reach(causal);
        matches!(self.variant, Variant::Full { .. }) || back.saturating_add(ahead) >= if causal { 12 } else { 4 }
    }

    /// How many keys a state keeps, since later windows reach them.
    pub(super) fn ring(&self) -> usize {
        self.reach(true).0
    }

    /// How many positions the table of biases has, if they are positions.
    pub(super) fn table_length(&self) -> Option<usize> {
        match self.variant {
            Variant::Full { length, .. } | Variant::Local { length: Some(length), .. } => Some(length),
            _ => None,
        }
    }

    /// Checks the options that every call and state shares.
    pub(super) fn check_options(&self, dims: &Dims) -> Result<(), Error> {
        let operation = self.name();
        let expected = || format!("head_dim, {}: gate, keys and values share their channels", dims.head_dim);
        let fits = dims.value_dim == dims.head_dim;
        expect(fits, operation, "value_dim", expected, || dims.value_dim.to_string())?;
        let (name, size, length) = match self.variant {
            Variant::Simple => return Ok(()),
            Variant::Full { length, rank } => ("rank", rank.unwrap_or(1), Some(length)),
            Variant::Local { window, length } => ("window", window, length),
            Variant::Conv { taps, .. } => ("taps", taps, None),
            Variant::Conv2d { image, taps, .. } => {
                // Sides whose product is as small as a sequence's length, and kernels no larger.
                return [("image", image), ("taps", taps)].into_iter().try_for_each(|(name, [a, b])| {
                    let expected = || "sides of at least 1 whose product is below 2²⁴".into();
                    let fits = (1..1 << 24).contains(&a.saturating_mul(b));
                    expect(fits, operation, name, expected, || format!("{:?}", [a, b]))
                });
            }
        };
        // Marks of a state are numbers of its type: whole ones up to 2²⁴.
        let fits = |size: usize| (1..1 << 24).contains(&size);
        let expected = || "between 1 and 2²⁴ (aft-simple is the mechanism without biases)".into();
        expect(fits(size), operation, name, expected, || size.to_string())?;
        let expected = || "between 1 and 2²⁴".into();
        expect(length.is_none_or(fits), operation, "length", expected, || format!("{length:?}"))
    }
}
