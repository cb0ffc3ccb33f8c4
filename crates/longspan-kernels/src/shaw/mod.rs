//! Shaw's relative positions on the score side (Shaw et al. 2018), in linear time.
//!
//! `S_ij = φ(q_i)·ρ(r_{clip(j−(i+o), −R, R)+R})`: row 0 of the table means "R or more *before*", row R "here", row 2R
//! "R or more *after*".

pub(crate) mod reference;

/// A table of relative positions: how far it reaches and how its rows become features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shaw {
    /// `R`: distances beyond it share the table's first or last row. 0 is legal and leaves one row.
    pub radius: usize,
    /// How table rows become features.
    pub map: RelativeMap,
    /// One table for all heads, `[2R+1, head_dim]`, instead of one each.
    pub shared: bool,
}

/// `ρ`: how a row of the table becomes features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RelativeMap {
    /// The feature map of the keys, which keeps the weights positive where it does.
    #[default]
    Same,
    /// The row as it is. Denominators may have any sign.
    Identity,
}

impl Shaw {
    /// A table for each head that reaches `radius` tokens to both sides, mapped like the keys.
    pub fn new(radius: usize) -> Self {
        Self { radius, map: RelativeMap::Same, shared: false }
    }

    /// Rows of the table, `2R + 1`.
    pub fn rows(&self) -> usize {
        2 * self.radius + 1
    }
}
