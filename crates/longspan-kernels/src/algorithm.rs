//! Which algorithm serves a call: the cost model, its answer, and the reasons for it.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// How a mechanism is computed. All are exact; they differ in time and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// The cheapest by the cost model.
    #[default]
    Auto,
    /// Every pair of query and key, one after the other. A call with an initial state runs [`Chunked`](Self::Chunked)
    /// all the same: only that can go on from one.
    Naive,
    /// Scores inside a chunk, a running sum for all before it.
    Chunked,
    /// Scores in tiles, weighed by distance.
    Tiled,
}

impl Algorithm {
    /// Every choice, in the order of this page.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Naive, Self::Chunked, Self::Tiled];

    /// The name in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Naive => "naive",
            Self::Chunked => "chunked",
            Self::Tiled => "tiled",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| Error::UnknownName {
            kind: "algorithm",
            got: name.into(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// What one algorithm would cost for one call, forward.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Floating-point operations, all heads.
    pub flops: f64,
    /// Numbers that the *published* form of the algorithm keeps for one head beside inputs and outputs: the counts
    /// by which the Linear Scalable Transformer chooses.
    pub published_elements: f64,
    /// Bytes of working memory that this implementation takes for one head in `f32`.
    pub scratch_bytes: f64,
    /// Predicted time on one thread, in seconds.
    pub seconds: f64,
}

/// The cost model's answer for one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The algorithm that will run: never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// Every algorithm that could.
    pub estimates: Vec<Estimate>,
    /// One sentence on the choice.
    pub reason: String,
}
