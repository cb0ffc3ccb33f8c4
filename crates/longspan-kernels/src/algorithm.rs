//! Which algorithm serves a call: the cost model, its answer, and the reasons for it.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, expect};
use crate::rates::{Rates, Work};

/// How a mechanism is computed. All are exact; they differ in time and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// The cheapest by the cost model.
    #[default]
    Auto,
    /// Every pair of query and key, in dense tiles. A call with an initial state runs [`Chunked`](Self::Chunked)
    /// all the same: only that can go on from one.
    Naive,
    /// The published form: outer products of keys and values, cumulated over the keys and all of them kept, so memory
    /// grows with keys · features · values. Small calls only; a call that it has no room for is refused.
    Cumsum,
    /// Scores inside a chunk, a running sum for all before it.
    Chunked,
    /// Every pair of query and key, in tiles of which nothing is kept.
    Tiled,
    /// Fast Fourier transforms of features times values.
    Fft,
    /// Tiles for near keys, running sums for those beyond a distance from which on all weigh the same. Where a table has
    /// no such distance, all keys are near.
    Piecewise,
}

impl Algorithm {
    /// Every name, in the order of this page. Which of them a mechanism has is said by
    /// [`Mechanism::algorithms`](crate::Mechanism::algorithms).
    pub const ALL: [Self; 7] =
        [Self::Auto, Self::Naive, Self::Cumsum, Self::Chunked, Self::Tiled, Self::Fft, Self::Piecewise];

    /// The name in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Naive => "naive",
            Self::Cumsum => "cumsum",
            Self::Chunked => "chunked",
            Self::Tiled => "tiled",
            Self::Fft => "fft",
            Self::Piecewise => "piecewise",
        }
    }

    /// Checks that a mechanism which has the algorithms `known` can run this one.
    pub(crate) fn check(self, operation: &'static str, known: &[Self]) -> Result<(), Error> {
        expect(
            self == Self::Auto || known.contains(&self),
            operation,
            "algorithm",
            || {
                let known: Vec<_> = [Self::Auto].iter().chain(known).map(|algorithm| algorithm.name()).collect();
                format!("one of {}", known.join(", "))
            },
            || self.name().into(),
        )
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
    /// Predicted time on one thread, in seconds: `work` by the [current](Rates::current) rates.
    pub seconds: f64,
    /// What it does, by the rates that it depends on.
    pub work: Work,
    /// Whether [`Algorithm::Auto`] may take it.
    pub automatic: bool,
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

impl Plan {
    /// The algorithm that the caller forces, or the cheapest of those that `auto` may take.
    pub(crate) fn new(wanted: Algorithm, estimates: Vec<Estimate>) -> Self {
        let candidates = || estimates.iter().filter(|estimate| estimate.automatic);
        let cheapest = candidates().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let (algorithm, reason) = match (wanted, cheapest) {
            (Algorithm::Auto, Some(best)) => {
                let next = candidates()
                    .filter(|estimate| estimate.algorithm != best.algorithm)
                    .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
                let reason = next.map_or("there is no other".to_owned(), |next| {
                    let ratio = if best.seconds > 0.0 { next.seconds / best.seconds } else { 1.0 };
                    format!("predicted to be the fastest, {ratio:.2} × before {}", next.algorithm)
                });
                (best.algorithm, reason)
            }
            (forced, _) => (forced, "forced by the caller".to_owned()),
        };
        Self { algorithm, estimates, reason }
    }

    /// What [`Algorithm::Auto`] would take by other rates than the current ones; `None` if there is nothing to choose
    /// from.
    pub fn cheapest(&self, rates: &Rates) -> Option<Algorithm> {
        let candidates = self.estimates.iter().filter(|estimate| estimate.automatic);
        candidates
            .min_by(|a, b| a.work.seconds(rates).total_cmp(&b.work.seconds(rates)))
            .map(|estimate| estimate.algorithm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_that_a_mechanism_lacks_is_refused_with_those_it_has() {
        let known = [Algorithm::Chunked, Algorithm::Naive];
        for algorithm in [Algorithm::Auto, Algorithm::Chunked, Algorithm::Naive] {
            assert_eq!(algorithm.check("attention", &known), Ok(()));
        }
        let error = Algorithm::Cumsum.check("attention", &known).expect_err("an algorithm that is not there");
        assert_eq!(error.to_string(), "attention: algorithm: expected one of auto, chunked, naive, got cumsum");
    }
}
