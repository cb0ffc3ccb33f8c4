//! Shaw's relative positions on the score side (Shaw et al. 2018), in linear time.
//!
//! `S_ij = φ(q_i)·ρ(r_{clip(j−(i+o), −R, R)+R})`: row 0 of the table means "R or more *before*", row R "here", row 2R
//! "R or more *after*".

pub(crate) mod reference;

use crate::error::{Error, expect};
use crate::feature_map::FeatureMap;

/// A table of relative positions: how far it reaches and how its rows become features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shaw {
    /// `R`: distances beyond it share the table's first or last row. 0 is legal and leaves one row.
    pub radius: usize,
    /// How table rows become features.
    pub map: RelativeMap,
    /// One table for all heads, `[2R+1, row length]`, instead of one each.
    pub shared: bool,
}

/// `ρ`: how a row of the table becomes features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RelativeMap {
    /// The feature map of the keys, which keeps the weights positive where it does.
    #[default]
    Same,
    /// The row as it is: as many numbers as the map has features. Denominators may have any sign.
    Identity,
}

impl Shaw {
    /// A table for each head that reaches `radius` tokens to both sides, mapped like the keys.
    pub fn new(radius: usize) -> Self {
        Self { radius, map: RelativeMap::Same, shared: false }
    }

    /// Numbers in one row of the table, under a feature map of rows of `head_dim`.
    pub fn row_len(&self, map: FeatureMap, head_dim: usize) -> usize {
        match self.map {
            RelativeMap::Same => head_dim,
            RelativeMap::Identity => map.features(head_dim),
        }
    }

    /// Rows of the table, `2R + 1`.
    pub fn rows(&self) -> usize {
        self.radius.saturating_mul(2).saturating_add(1)
    }

    /// Checks the radius by itself.
    pub(crate) fn check(&self, operation: &'static str) -> Result<(), Error> {
        let expected = || "a radius whose table fits memory".into();
        expect(self.radius < isize::MAX as usize / 64, operation, "radius", expected, || self.radius.to_string())
    }
}
