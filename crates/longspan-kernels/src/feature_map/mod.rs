//! Feature maps `φ`, and their vector-Jacobian products.
//!
//! The attention weight of a pair is `φ(q)·φ(k)`; a map that is never negative keeps every denominator positive. The
//! *elementwise* maps take each number by itself and are made while rows are read. The others take a row of `d` numbers to
//! `m` features (`rows.rs`), a chunk at a time: what the kernels' sums then see is `m` wide. Formulas, gradients and what
//! keeps exponentials in range stand in this folder's `README.md`.

mod draw;
pub(crate) mod elementwise;
#[cfg(test)]
mod exhaustive;
pub(crate) mod mapping;
pub(crate) mod reference;
pub(crate) mod rows;
mod squares;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use smallvec::smallvec;

use crate::call::{Dims, Parameter, Parameters, optional_id};
use crate::error::{Error, expect};
use crate::simd::Real;

/// A feature map.
///
/// A map is named by its kind and options: `elu+1`, `prf`, `prf:128`, `prf:128:seed=7`, `nprf:64`, `dpfp:2`, `taylor2`,
/// `hedgehog`, `hedgehog:32:exp`. [`FromStr`] reads such a name and [`Display`](fmt::Display) writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum FeatureMap {
    /// `elu(x) + 1`, that is `x + 1` for `x > 0` and `eˣ` elsewhere (Katharopoulos et al. 2020). Always positive.
    #[default]
    EluPlusOne,
    /// `max(x, 0)`. A row whose features are all 0 has no denominator and gives 0.
    Relu,
    /// `log(1 + eˣ)`. Always positive.
    Softplus,
    /// `eˣ`, computed relative to the largest entry seen so far, which cancels in the division.
    Exp,
    /// `x` itself. Denominators may have any sign: use it with `normalize = false`.
    Identity,
    /// Positive random features, FAVOR+ (Choromanski et al. 2021): `m^{-½} e^{w·x′ − |x′|²/2}`, `x′ = d^{-¼} x`, for `m`
    /// random rows `w`, orthogonal in blocks of `d`. The mean of `φ(q)·φ(k)` over draws is softmax's `e^{q·k/√d}`.
    /// Computed relative to the largest exponent seen so far, as [`Exp`](Self::Exp) is.
    Prf(RandomFeatures),
    /// The same of rows of length 1 (Luo et al. 2021): `m^{-½} e^{w·x̂ − ½}`, `x̂ = x/|x|`, so that features are bounded
    /// whatever the scale of the inputs. A row of zeros has no direction: `x̂ = 0`, with gradient 0.
    Nprf(RandomFeatures),
    /// Deterministic parameter-free projection (Schlag et al. 2021): with `r = [max(x, 0), max(−x, 0)]` the products
    /// `r_i r_{i+n}`, round the end, for n = 1 to `order`: `2·d·order` features, none negative. A row may have no feature
    /// other than 0 and then gives 0.
    Dpfp {
        /// `ν`, at least 1.
        order: usize,
    },
    /// `[1, x′, x′⊗x′/√2]`, `x′ = d^{-¼} x`, so that `φ(q)·φ(k) = 1 + s + s²/2`, `s = q·k/√d`: the beginning of the series
    /// of softmax's weights, always positive. `1 + d + d(d+1)/2` features, equal products taken together.
    Taylor2,
    /// Learned (Zhang et al. 2024): the exponentials of `[W x, −W x]`, with a `W` of its own for each query head and each
    /// key/value head: the parameters `map_queries`, `[heads, width, head_dim]`, and `map_keys`,
    /// `[kv_heads, width, head_dim]`, after those of positions.
    Hedgehog {
        /// Rows of `W`; [`None`] stands for `head_dim`. There are twice as many features.
        width: Option<usize>,
        /// What is done with the exponents.
        norm: HedgehogNorm,
    },
}

/// The options of random features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RandomFeatures {
    /// `m`; [`None`] stands for `head_dim`.
    pub features: Option<usize>,
    /// What the rows `w` are drawn from. The same seed gives the same rows on every machine, another seed draws them anew.
    pub seed: u64,
}

/// What [`FeatureMap::Hedgehog`] does with its exponents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HedgehogNorm {
    /// Softmax over all of a row's exponents: features are in (0, 1] and sum to 1.
    #[default]
    Softmax,
    /// `eˣ` alone, relative to the largest exponent seen so far, as [`FeatureMap::Exp`] is.
    Exp,
}

impl FeatureMap {
    /// Every map, in the order of this page, with the options that its name alone stands for.
    pub const ALL: [Self; 10] = [
        Self::EluPlusOne,
        Self::Relu,
        Self::Softplus,
        Self::Exp,
        Self::Identity,
        Self::Prf(RandomFeatures { features: None, seed: 0 }),
        Self::Nprf(RandomFeatures { features: None, seed: 0 }),
        Self::Dpfp { order: 1 },
        Self::Taylor2,
        Self::Hedgehog { width: None, norm: HedgehogNorm::Softmax },
    ];

    /// The elementwise ones.
    pub const ELEMENTWISE: [Self; 5] = [Self::EluPlusOne, Self::Relu, Self::Softplus, Self::Exp, Self::Identity];

    /// The name of its kind; with options it is what [`Display`](fmt::Display) writes.
    pub fn name(self) -> &'static str {
        match self {
            Self::EluPlusOne => "elu+1",
            Self::Relu => "relu",
            Self::Softplus => "softplus",
            Self::Exp => "exp",
            Self::Identity => "identity",
            Self::Prf(_) => "prf",
            Self::Nprf(_) => "nprf",
            Self::Dpfp { .. } => "dpfp",
            Self::Taylor2 => "taylor2",
            Self::Hedgehog { .. } => "hedgehog",
        }
    }

    /// The numbers by which the map goes into the fingerprint of a state: an id that never changes, and the options.
    pub(crate) fn state_id(self) -> [u64; 3] {
        match self {
            Self::EluPlusOne => [1, 0, 0],
            Self::Relu => [2, 0, 0],
            Self::Softplus => [3, 0, 0],
            Self::Exp => [4, 0, 0],
            Self::Identity => [5, 0, 0],
            Self::Prf(random) => [6, optional_id(random.features), random.seed],
            Self::Nprf(random) => [7, optional_id(random.features), random.seed],
            Self::Dpfp { order } => [8, order as u64, 0],
            Self::Taylor2 => [9, 0, 0],
            Self::Hedgehog { width, norm } => [10, optional_id(width), u64::from(norm == HedgehogNorm::Exp)],
        }
    }

    /// Whether each feature is a function of one number.
    pub fn is_elementwise(self) -> bool {
        Self::ELEMENTWISE.contains(&self)
    }

    /// Whether features are exponentials that are computed relative to the largest exponent seen so far.
    pub fn is_exponential(self) -> bool {
        matches!(self, Self::Exp | Self::Prf(_) | Self::Hedgehog { norm: HedgehogNorm::Exp, .. })
    }

    /// Features of a row of `head_dim` numbers. An absurd number of them is `usize::MAX`.
    pub fn features(self, head_dim: usize) -> usize {
        match self {
            Self::Prf(random) | Self::Nprf(random) => random.features.unwrap_or(head_dim),
            Self::Dpfp { order } => head_dim.saturating_mul(2).saturating_mul(order),
            Self::Taylor2 => {
                let squares = head_dim.saturating_add(1).saturating_mul(head_dim) / 2;
                squares.saturating_add(head_dim).saturating_add(1)
            }
            Self::Hedgehog { width, .. } => width.unwrap_or(head_dim).saturating_mul(2),
            _ => head_dim,
        }
    }

    /// The learned tensors of the map itself.
    pub fn parameters(self, dims: &Dims) -> Parameters {
        let Self::Hedgehog { width, .. } = self else { return Parameters::new() };
        let shape = |heads: usize| [heads, width.unwrap_or(dims.head_dim), dims.head_dim];
        smallvec![Parameter::new("map_queries", shape(dims.heads)), Parameter::new("map_keys", shape(dims.kv_heads)),]
    }

    /// The rows `w` of random features for rows of `head_dim` numbers, `[features, head_dim]`, as they multiply `x` in
    /// [`Prf`](Self::Prf) (so `d^{-¼}` of those drawn) and `x̂` in [`Nprf`](Self::Nprf); none for other maps.
    pub fn projection(self, head_dim: usize) -> Option<Arc<Vec<f64>>> {
        let (random, scale) = match self {
            Self::Prf(random) => (random, scale(head_dim)),
            Self::Nprf(random) => (random, 1.0),
            _ => return None,
        };
        static DRAWN: draw::Store<(FeatureMap, usize)> = draw::Store::new(Vec::new());
        Some(draw::kept(&DRAWN, (self, head_dim), || {
            let mut rows = draw::orthogonal(self.features(head_dim), head_dim, random.seed);
            rows.iter_mut().for_each(|w| *w *= scale);
            rows
        }))
    }

    /// Checks the options, and that rows of `head_dim` numbers have no more features than the kernels take.
    pub(crate) fn check(self, operation: &'static str, head_dim: usize) -> Result<(), Error> {
        let least_one = |number: Option<usize>, what: &str| {
            let expected = || format!("{} with at least one {what}", self.name());
            expect(number != Some(0), operation, "feature_map", expected, || self.to_string())
        };
        match self {
            Self::Prf(random) | Self::Nprf(random) => least_one(random.features, "feature")?,
            Self::Dpfp { order } => least_one(Some(order), "product of each number")?,
            Self::Hedgehog { width, .. } => least_one(width, "row of W")?,
            Self::Taylor2 => {}
            _ => return Ok(()),
        }
        let expected = || format!("at least 1, since {} maps whole rows", self.name());
        expect(head_dim > 0, operation, "head_dim", expected, || head_dim.to_string())?;
        let features = self.features(head_dim);
        let expected = || format!("at most {MOST_FEATURES} features of {head_dim} numbers");
        expect(features <= MOST_FEATURES, operation, "feature_map", expected, || format!("{self}, with {features}"))
    }

    /// `φ(x)` of an elementwise map, by the standard library: the definition that the vectorised forms are tested
    /// against. `x` itself for others.
    pub fn apply<T: Real>(self, x: T) -> T {
        match self {
            Self::EluPlusOne => {
                if x > T::ZERO {
                    x + T::ONE
                } else {
                    x.exp()
                }
            }
            // Written so that NaN stays NaN.
            Self::Relu => {
                if x < T::ZERO {
                    T::ZERO
                } else {
                    x
                }
            }
            Self::Softplus => {
                let positive = if x < T::ZERO { T::ZERO } else { x };
                positive + (-x.abs()).exp().ln_1p()
            }
            Self::Exp => x.exp(),
            _ => x,
        }
    }
}

/// Features beyond which a state of 64 values would be more than 256 MiB a head.
const MOST_FEATURES: usize = 1 << 20;

/// What q and k are multiplied by each, so that their product is `q·k/√d`.
pub(crate) fn scale(head_dim: usize) -> f64 {
    (head_dim.max(1) as f64).sqrt().sqrt().recip()
}

impl fmt::Display for FeatureMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match *self {
            Self::Prf(RandomFeatures { features, seed }) | Self::Nprf(RandomFeatures { features, seed }) => {
                features.map_or(Ok(()), |features| write!(f, ":{features}"))?;
                if seed == 0 { Ok(()) } else { write!(f, ":seed={seed}") }
            }
            Self::Dpfp { order } if order != 1 => write!(f, ":{order}"),
            Self::Hedgehog { width, norm } => {
                width.map_or(Ok(()), |width| write!(f, ":{width}"))?;
                if norm == HedgehogNorm::Exp { f.write_str(":exp") } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for FeatureMap {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let unknown = || {
            Error::UnknownName {
            kind: "feature map",
            got: name.into(),
            known: "elu+1, relu, softplus, exp, identity, prf[:FEATURES][:seed=N], nprf[:FEATURES][:seed=N], dpfp[:ORDER], \
                    taylor2, hedgehog[:WIDTH][:exp]"
                .into(),
        }
        };
        let mut parts = name.split(':');
        let kind = parts.next().unwrap_or_default();
        let mut map = Self::ALL.into_iter().find(|map| map.name() == kind).ok_or_else(unknown)?;
        for (place, option) in parts.enumerate() {
            let number = || option.parse::<usize>().ok().filter(|&n| n > 0 && place == 0);
            match &mut map {
                Self::Prf(random) | Self::Nprf(random) => {
                    if let Some(seed) = option.strip_prefix("seed=") {
                        random.seed = seed.parse().map_err(|_| unknown())?;
                    } else {
                        random.features = Some(number().ok_or_else(unknown)?);
                    }
                }
                Self::Dpfp { order } => *order = number().ok_or_else(unknown)?,
                Self::Hedgehog { norm, .. } if option == "exp" => *norm = HedgehogNorm::Exp,
                Self::Hedgehog { width, .. } => *width = Some(number().ok_or_else(unknown)?),
                _ => return Err(unknown()),
            }
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let random = |features, seed| RandomFeatures { features, seed };
        for (name, map) in [
            ("elu+1", FeatureMap::EluPlusOne),
            ("prf", FeatureMap::Prf(random(None, 0))),
            ("prf:128", FeatureMap::Prf(random(Some(128), 0))),
            ("nprf:seed=9", FeatureMap::Nprf(random(None, 9))),
            ("prf:12:seed=7", FeatureMap::Prf(random(Some(12), 7))),
            ("dpfp", FeatureMap::Dpfp { order: 1 }),
            ("dpfp:3", FeatureMap::Dpfp { order: 3 }),
            ("taylor2", FeatureMap::Taylor2),
            ("hedgehog", FeatureMap::Hedgehog { width: None, norm: HedgehogNorm::Softmax }),
            ("hedgehog:8:exp", FeatureMap::Hedgehog { width: Some(8), norm: HedgehogNorm::Exp }),
        ] {
            assert_eq!(name.parse(), Ok(map));
            assert_eq!(map.to_string(), name);
        }
        for map in FeatureMap::ALL {
            assert_eq!(map.to_string().parse(), Ok(map));
        }
        for name in
            ["", "elu", "elu+1:3", "prf:0", "prf:-1", "prf:seed=", "dpfp:x", "taylor2:2", "hedgehog:max", "prf:1:2"]
        {
            assert!(name.parse::<FeatureMap>().is_err(), "{name}");
        }
    }
}
