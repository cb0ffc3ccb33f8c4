//! Which algorithm serves a call: the cost model, its answer, and the reasons for it.

use std::fmt;
use std::str::FromStr;

use super::Work;
use crate::error::{Error, expect};

/// How a mechanism is computed. All are exact; they differ in time and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// The cheapest by the cost model.
    #[default]
    Auto,
    /// Every pair of query and key, in dense tiles. A call with an initial state runs [`Chunked`](Self::Chunked)
    /// all the same: only that can go on from one.
    Naive,
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
    pub const ALL: [Self; 6] = [Self::Auto, Self::Naive, Self::Chunked, Self::Tiled, Self::Fft, Self::Piecewise];

    /// The name in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Naive => "naive",
            Self::Chunked => "chunked",
            Self::Tiled => "tiled",
            Self::Fft => "fft",
            Self::Piecewise => "piecewise",
        }
    }

    /// Checks that a mechanism which has the algorithms `known` can run this one.
    pub(crate) fn check(self, operation: &'static str, known: &[Self]) -> Result<(), Error> {
        let expected = || {
            let known: Vec<_> = [Self::Auto].iter().chain(known).map(|algorithm| algorithm.name()).collect();
            format!("one of {}", known.join(", "))
        };
        let got = || self.name().into();
        expect(self == Self::Auto || known.contains(&self), operation, "algorithm", expected, got)
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

/// What a call is made for. [`Algorithm::Auto`] looks at the time of all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The output alone.
    Inference,
    /// The output and then the gradients. Both run one algorithm, as the denominators that forward gives to backward are its
    /// own.
    Training,
}

impl Purpose {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Inference, Self::Training];
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
    /// What it does, by the rates that it depends on.
    pub work: Work,
    /// Whether [`Algorithm::Auto`] may take it.
    pub automatic: bool,
}

impl Estimate {
    /// Predicted time on one thread, in seconds.
    pub fn seconds(&self, purpose: Purpose) -> f64 {
        self.work.seconds(purpose)
    }
}

/// The cost model's answer for one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Every algorithm that could run.
    pub estimates: Vec<Estimate>,
    /// The one that the caller forces.
    wanted: Algorithm,
}

impl Plan {
    /// The algorithm that the caller forces, or the cheapest of those that `auto` may take.
    pub(crate) fn new(wanted: Algorithm, estimates: Vec<Estimate>) -> Self {
        Self { estimates, wanted }
    }

    /// The algorithm that will run: never [`Algorithm::Auto`].
    pub fn algorithm(&self, purpose: Purpose) -> Algorithm {
        match self.wanted {
            Algorithm::Auto => self.cheapest(purpose),
            forced => forced,
        }
    }

    /// The estimate of the algorithm that will run.
    pub fn chosen(&self, purpose: Purpose) -> Option<&Estimate> {
        self.of(self.algorithm(purpose))
    }

    /// The estimate of one algorithm, if it could run.
    pub fn of(&self, algorithm: Algorithm) -> Option<&Estimate> {
        self.estimates.iter().find(|estimate| estimate.algorithm == algorithm)
    }

    /// One sentence on the choice.
    pub fn reason(&self, purpose: Purpose) -> String {
        if self.wanted != Algorithm::Auto {
            return "forced by the caller".to_owned();
        }
        let Some(best) = self.chosen(purpose) else { return "there is no other".to_owned() };
        let others = self.automatic().filter(|estimate| estimate.algorithm != best.algorithm);
        others.min_by(|a, b| a.seconds(purpose).total_cmp(&b.seconds(purpose))).map_or(
            "there is no other".to_owned(),
            |next| {
                let seconds = best.seconds(purpose);
                let ratio = if seconds > 0.0 { next.seconds(purpose) / seconds } else { 1.0 };
                format!("predicted to be the fastest, {ratio:.2} × before {}", next.algorithm)
            },
        )
    }

    /// The fastest by prediction; [`Algorithm::Auto`] if there is nothing to choose from.
    fn cheapest(&self, purpose: Purpose) -> Algorithm {
        let seconds = |estimate: &&Estimate| estimate.seconds(purpose);
        let fastest = self.automatic().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        fastest.map_or(Algorithm::Auto, |estimate| estimate.algorithm)
    }

    /// Those that `auto` may take.
    fn automatic(&self) -> impl Iterator<Item = &Estimate> {
        self.estimates.iter().filter(|estimate| estimate.automatic)
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
        let error = Algorithm::Fft.check("attention", &known).expect_err("an algorithm that is not there");
        assert_eq!(error.to_string(), "attention: algorithm: expected one of auto, chunked, naive, got fft");
    }
}
