//! Feature maps `φ`, elementwise, and their vector-Jacobian products.
//!
//! The attention weight of a pair is `φ(q)·φ(k)`; a map that is never negative keeps every denominator positive.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;
use crate::real::Real;

/// An elementwise feature map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
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
}

impl FeatureMap {
    /// Every map, in the order of this page.
    pub const ALL: [Self; 5] = [Self::EluPlusOne, Self::Relu, Self::Softplus, Self::Exp, Self::Identity];

    /// The name in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::EluPlusOne => "elu+1",
            Self::Relu => "relu",
            Self::Softplus => "softplus",
            Self::Exp => "exp",
            Self::Identity => "identity",
        }
    }

    /// `φ(x)`, by the standard library: the definition that the vectorised forms are tested against.
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
            Self::Identity => x,
        }
    }

    /// `φ′(x)`.
    pub fn derivative<T: Real>(self, x: T) -> T {
        match self {
            Self::EluPlusOne => {
                if x > T::ZERO {
                    T::ONE
                } else {
                    x.exp()
                }
            }
            Self::Relu => {
                if x > T::ZERO {
                    T::ONE
                } else {
                    T::ZERO
                }
            }
            Self::Softplus => T::ONE / (T::ONE + (-x).exp()),
            Self::Exp => x.exp(),
            Self::Identity => T::ONE,
        }
    }
}

impl fmt::Display for FeatureMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FeatureMap {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|map| map.name() == name).ok_or_else(|| Error::UnknownName {
            kind: "feature map",
            got: name.into(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}
