//! Fourier relative positions on the score side, in linear time.
//!
//! `S_ij = Σ_k q̄_ik k̄_jk (β_k + c_k cos(b_k + a_k·(p_i − p_j)))` with features `q̄ = φ(q)`, `k̄ = φ(k)` and positions `p` of
//! any number of axes. By the addition theorem that is a product of `[c q̄ cos p̂_i, c q̄ sin p̂_i, β q̄]` and
//! `[k̄ cos p̂_j, k̄ sin p̂_j, k̄]` with `p̂_i = b + a·p_i`, `p̂_j = a·p_j`: kernelized attention over up to three times the
//! features, which are formed chunk by chunk and never stand in memory for a whole sequence. Rotary positions (RoPE) on
//! the features are the case without an unturned part and without phases; they keep the number of features.
//!
//! [`Fourier`] is a [`Score`](crate::Score) of [`KernelizedAttention`](crate::KernelizedAttention).

pub(crate) mod reference;
pub(crate) mod rotate;
pub(crate) mod rotation;
mod turns;

use smallvec::{SmallVec, smallvec};

use crate::call::{Dims, Parameter, Parameters, optional_id};
use crate::error::{Error, expect, refuse};

/// Fourier relative positions: the shape of the weights, their normaliser, and what positions are.
///
/// The parameters, in this order, `m` being the features of the map and `n` the axes of positions:
///
/// - `a`, `[kv_heads, m, n]`: angle for a step along each axis, in radians; `[kv_heads, m/2, n]` for [`Wave::Pairs`].
/// - `b`, `[heads, m]`: phase; not for pairs.
/// - `c`, `[heads, m]`: amplitude; where the normaliser leaves it free, not for pairs.
/// - `beta`, `[heads, m]`: the part that does not depend on distance; where the normaliser leaves it free, not for pairs.
/// - `query_positions`, `[batch, queries, n]`, and `key_positions`, `[batch, keys, n]`: for [`Positions::Given`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Fourier {
    /// Whether each feature has an angle of its own, or features turn in pairs.
    pub wave: Wave,
    /// What a row is divided by, and so which of `c` and `β` are free.
    pub normalizer: FourierNormalizer,
    /// Counted or given.
    pub positions: Positions,
}

/// How features depend on distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Wave {
    /// `q̄_k k̄_k (β_k + c_k cos(b_k + a_k·(p_i − p_j)))` for every feature.
    #[default]
    Each,
    /// Rotary positions: features `k` and `k + m/2` of `q̄` and of `k̄` are turned as a pair, by `a_k·p`.
    Pairs,
}

/// What a row is divided by, and which of `c` and `β` are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FourierNormalizer {
    /// As published: β = 0, `c` free, divided by the sum of the weights. That sum has any sign (at random initialisation
    /// it is not positive in more than a third of the rows): rows where it is negative give 0, as do their gradients,
    /// and a forward call ends with [`Error::NegativeDenominators`].
    Literal,
    /// β = c = 1: no weight is negative if no feature is. Not for pairs.
    #[default]
    OnePlus,
    /// β = |c| + softplus(`beta`), `c` and `beta` free: every weight is positive if the features are. Not for pairs.
    Dominant,
    /// β = 0, `c` free, divided by `Σ_j q̄_i·k̄_j`, which positions have no part in (Su et al. 2021).
    Unrotated,
    /// β and `c` free, undivided. Follow it with a normalisation layer.
    None,
}

/// What positions are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Positions {
    /// Key `j` is at `j`, query `i` at `i + offset`, on one axis, counted in each packed sequence on its own. A state
    /// holds the count.
    #[default]
    Counted,
    /// Real numbers on `axes` axes for each query and key; parameters, with gradients. The offset plays no part.
    Given {
        /// Numbers in one position.
        axes: usize,
    },
}

impl Positions {
    /// Numbers in one position.
    pub fn axes(self) -> usize {
        match self {
            Self::Counted => 1,
            Self::Given { axes } => axes,
        }
    }
}

impl Fourier {
    /// The numbers by which the positions go into the fingerprint of a state.
    pub(crate) fn state_id(&self) -> [u64; 3] {
        let normalizer = match self.normalizer {
            FourierNormalizer::Literal => 1,
            FourierNormalizer::OnePlus => 2,
            FourierNormalizer::Dominant => 3,
            FourierNormalizer::Unrotated => 4,
            FourierNormalizer::None => 5,
        };
        let axes = match self.positions {
            Positions::Counted => None,
            Positions::Given { axes } => Some(axes),
        };
        [1 + u64::from(self.wave == Wave::Pairs), normalizer, optional_id(axes)]
    }

    pub(crate) fn angles(&self, features: usize) -> usize {
        match self.wave {
            Wave::Each => features,
            Wave::Pairs => features / 2,
        }
    }

    fn has_gain(&self) -> bool {
        self.wave == Wave::Each && self.normalizer != FourierNormalizer::OnePlus
    }

    fn has_rest(&self) -> bool {
        self.wave == Wave::Each && matches!(self.normalizer, FourierNormalizer::Dominant | FourierNormalizer::None)
    }

    /// Whether a feature stands unturned beside the turned ones: as part of the weights, or for the denominators.
    pub(crate) fn has_unturned(&self) -> bool {
        match self.normalizer {
            FourierNormalizer::Literal => false,
            FourierNormalizer::Unrotated => true,
            _ => self.wave == Wave::Each,
        }
    }

    /// Multiples of a map's features: in all, and those that make up the weights.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        let turned = match self.wave {
            Wave::Each => 2,
            Wave::Pairs => 1,
        };
        let blocks = turned + usize::from(self.has_unturned());
        (blocks, if self.normalizer == FourierNormalizer::Unrotated { turned } else { blocks })
    }

    /// The parameters for a map of `features`.
    pub(crate) fn parameters(&self, dims: &Dims, features: usize) -> Parameters {
        let axes = self.positions.axes();
        let each = |name| Parameter::new(name, [dims.heads, features]);
        let mut list = smallvec![Parameter::new("a", [dims.kv_heads, self.angles(features), axes])];
        if self.wave == Wave::Each {
            list.push(each("b"));
        }
        if self.has_gain() {
            list.push(each("c"));
        }
        if self.has_rest() {
            list.push(each("beta"));
        }
        if let Positions::Given { axes } = self.positions {
            list.push(Parameter::new("query_positions", [dims.batch, dims.queries, axes]));
            list.push(Parameter::new("key_positions", [dims.batch, dims.keys, axes]));
        }
        list
    }

    /// The parameters of one key/value head and its query heads; given positions belong to every head.
    pub(crate) fn of_head<'a, T>(&self, all: &[&'a [T]], kv_heads: usize, kv_head: usize) -> SmallVec<[&'a [T]; 6]> {
        let positions = if self.positions == Positions::Counted { 0 } else { 2 };
        let own = all.len() - positions;
        let part = |(n, tensor): (usize, &&'a [T])| {
            let len = tensor.len() / kv_heads;
            if n < own { &tensor[kv_head * len..][..len] } else { *tensor }
        };
        all.iter().enumerate().map(part).collect()
    }

    pub(crate) fn tensors<'a, T>(&self, parameters: &[&'a [T]]) -> Tensors<&'a [T]> {
        let mut rest = parameters.iter().copied();
        self.split(&mut rest)
    }

    /// The same for any list of things that stand for the parameters.
    pub(crate) fn split<P>(&self, rest: &mut impl Iterator<Item = P>) -> Tensors<P> {
        Tensors {
            a: rest.next(),
            b: if self.wave == Wave::Each { rest.next() } else { None },
            c: if self.has_gain() { rest.next() } else { None },
            beta: if self.has_rest() { rest.next() } else { None },
            positions: if self.positions == Positions::Counted { None } else { rest.next().zip(rest.next()) },
        }
    }

    pub(crate) fn check(&self, operation: &'static str, features: usize) -> Result<(), Error> {
        let axes = self.positions.axes();
        let fits = (1..isize::MAX as usize / 64).contains(&axes.saturating_mul(features.max(1)));
        expect(fits, operation, "axes", || "at least one, and as many as fit memory".into(), || axes.to_string())?;
        if self.wave == Wave::Each {
            return Ok(());
        }
        let combination = "rotary pairs with the normaliser OnePlus or Dominant";
        let help = "use Unrotated, Literal or None";
        let refused = matches!(self.normalizer, FourierNormalizer::OnePlus | FourierNormalizer::Dominant);
        refuse(refused, operation, combination, help)?;
        let expected = || "an even number of features to turn in pairs".into();
        expect(features.is_multiple_of(2), operation, "head_dim", expected, || features.to_string())
    }
}

/// The parameters by name, those that there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensors<P> {
    pub a: Option<P>,
    pub b: Option<P>,
    pub c: Option<P>,
    pub beta: Option<P>,
    /// Of queries and of keys.
    pub positions: Option<(P, P)>,
}
