//! Kernelized attention, with Shaw's relative positions if wanted, in linear time.
//!
//! `out_i = N_i / D_i` with `N_i = Σ_j w_ij v_j`, `D_i = Σ_j w_ij` over the keys that row `i` sees, and
//! `w_ij = γ^{(i+o)−j} (φ(q_i)·φ(k_j) + φ(q_i)·ρ(r_{clip(j−(i+o), −R, R)+R}))`: the content term (Katharopoulos et al.
//! 2020), the relative term ([`Shaw`]), or their sum (the Linear Scalable Transformer), under one normaliser. `γ` is 1
//! unless a [`decay`](KernelizedAttention::decay) is given.
//!
//! One head's [`State`] has five parts: `S = Σ φ(k_j) v_jᵀ` (`features × value_dim`), `z = Σ φ(k_j)` (`features`), the
//! marks (4, and what fills cache lines), the sum of the `v⁺ = [v, 1]` that fell out of the ring (`value_dim + 1`), and the ring of the last `R` rows
//! `v⁺`. The last two are there with relative positions only. The marks are the exponent that an exponential
//! map subtracted from the keys, the index of the ring's oldest row, and the number of tokens in two digits to base 2²⁰. With
//! Fourier positions `S` and `z` hold the turned features, up to three times as many as the map has, at the positions of
//! their tokens.
//!
//! The gradient of a state has the same parts. Those of `S`, `z`, the far sum and the ring's rows belong to the numbers as
//! they are stored, row for row, the exponent held: what a number stands for is `e^exponent` times as large, and where
//! the exponent is −∞ (no key yet) the gradient is 0. The marks have none: 0.
//!
//! Time is O((Lq + Lk)·d·dv), memory beside inputs and outputs O(d·dv) for each thread. The derivation, and that of the
//! gradient, stands in this folder's `README.md`.

mod backward;
mod cost;
mod decays;
mod features;
mod forward;
mod layout;
mod naive;
mod pairs;
mod pass;
mod problem;
mod row_pass;
pub(crate) mod running_sum;
mod state;
mod step;
mod summary;
mod tile;

mod reference;

use problem::Problem;
use smallvec::smallvec;

use crate::call::{
    Call, Compute, Cotangent, Dims, Gradients, Mask, Mechanism, Output, Parameter, Parameters, Reference, Scratch,
    Sink, State, Token, check_gradients, check_output, check_sizes, clear_absent, downscaled, fingerprint, kernels,
    optional_id,
};
use crate::error::{Error, expect, refuse};
use crate::feature_map::FeatureMap;
use crate::fourier::{Fourier, FourierNormalizer};
use crate::plan::{Algorithm, Plan, Purpose};
use crate::shaw::Shaw;
use crate::simd::Real;

/// Which terms make up the weight of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// `φ(q_i)·φ(k_j)`.
    Content,
    /// `φ(q_i)·ρ(r_δ)`: Shaw's relative positions alone.
    Relative(Shaw),
    /// The sum of both.
    Combined(Shaw),
    /// `Σ_k φ(q_i)_k φ(k_j)_k (β_k + c_k cos(b_k + a_k·(p_i − p_j)))`: Fourier or rotary positions.
    Fourier(Fourier),
}

impl Score {
    /// The relative positions, if there are any.
    pub fn shaw(&self) -> Option<Shaw> {
        match *self {
            Self::Content | Self::Fourier(_) => None,
            Self::Relative(shaw) | Self::Combined(shaw) => Some(shaw),
        }
    }

    /// The Fourier positions, if there are any.
    pub fn fourier(&self) -> Option<Fourier> {
        if let Self::Fourier(fourier) = *self { Some(fourier) } else { None }
    }

    /// Whether keys take part.
    pub fn content(&self) -> bool {
        !matches!(self, Self::Relative(_))
    }
}

/// Kernelized attention with optional relative positions and decay.
///
/// With Shaw's relative positions a parameter is the table `relative`, `[heads, 2R+1, head_dim]`, or `[2R+1, head_dim]` if
/// shared (as many numbers a row as features where it does not go through the map); with Fourier positions they are those
/// that [`Fourier`] lists. Those of a learned [`FeatureMap`] come after them.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelizedAttention {
    /// `φ`.
    pub feature_map: FeatureMap,
    /// The terms of the weight.
    pub score: Score,
    /// `γ` in (0, 1] for each key/value head: the weight of a key falls by `γ` with every token (retention). Causal
    /// masks only. Not learned.
    pub decay: Option<Vec<f64>>,
    /// Each token brings a decay of its own: one more parameter, `log_decay`, `[batch, kv_heads, keys]`, all at most 0, the last of the
    /// list. The weight of key `j` for row `i` is multiplied by `e^{g_{j+1} + … + g_i}`; an ignored key brings none. Causal masks without
    /// offset, as many queries as keys, [`Algorithm::Chunked`], and no [`decay`](Self::decay) beside it.
    pub gate: bool,
    /// Divide by the sum of the weights. Without it the output is `N`. [`FourierNormalizer::None`] is the same as
    /// `false` here.
    pub normalize: bool,
    /// How it is computed. Calls with an initial state run chunked whatever stands here.
    pub algorithm: Algorithm,
}

impl Default for KernelizedAttention {
    fn default() -> Self {
        Self {
            feature_map: FeatureMap::default(),
            score: Score::Content,
            decay: None,
            gate: false,
            normalize: true,
            algorithm: Algorithm::Auto,
        }
    }
}

impl KernelizedAttention {
    fn normalizes(&self) -> bool {
        self.normalize && self.score.fourier().is_none_or(|fourier| fourier.normalizer != FourierNormalizer::None)
    }

    /// Of the options that the meaning of a state depends on.
    fn fingerprint(&self) -> u64 {
        let fourier = self.score.fourier().map_or([0; 3], |fourier| fourier.state_id());
        let radius = optional_id(self.score.shaw().map(|shaw| shaw.radius));
        let decay = self.decay.iter().flatten().map(|gamma| gamma.to_bits()).chain(self.gate.then_some(u64::MAX));
        fingerprint(self.feature_map.state_id().into_iter().chain(fourier).chain([radius]).chain(decay))
    }

    fn decays(&self) -> bool {
        self.gate || self.decay.is_some()
    }

    /// The parameters of positions and of the map, and that of gates.
    fn split_gate<'x, P: Copy>(&self, parameters: &'x [P]) -> (&'x [P], Option<P>) {
        match parameters {
            [others @ .., gate] if self.gate => (others, Some(*gate)),
            all => (all, None),
        }
    }

    /// Whether the weight of a pair is a polynomial of `q·k`.
    fn is_polynomial(&self) -> bool {
        self.feature_map == FeatureMap::Taylor2 && self.score == Score::Content
    }

    fn wants_positive(&self) -> bool {
        self.normalizes()
            && self.score.fourier().is_some_and(|fourier| fourier.normalizer == FourierNormalizer::Literal)
    }

    const ALGORITHMS: [Algorithm; 2] = [Algorithm::Chunked, Algorithm::Naive];

    /// Whether the feature map's options make sense for rows of `dims.head_dim`; calls check the same.
    ///
    /// # Errors
    /// No features or absurdly many.
    pub fn check_feature_map(&self, dims: &Dims) -> Result<(), Error> {
        self.feature_map.check(self.name(), dims.head_dim)
    }

    fn problem<'a, T: Real>(&'a self, call: &'a Call<'a, T>) -> Result<Problem<'a, T>, Error> {
        self.algorithm.check(self.name(), &Self::ALGORITHMS)?;
        Problem::new(self, call)
    }

    fn check_options(&self, dims: &Dims) -> Result<(), Error> {
        let operation = self.name();
        self.check_feature_map(dims)?;
        match self.score {
            Score::Content => {}
            Score::Relative(shaw) | Score::Combined(shaw) => shaw.check(operation)?,
            Score::Fourier(fourier) => fourier.check(operation, self.feature_map.features(dims.head_dim))?,
        }
        let combination = "gates with a constant decay or the naive algorithm";
        let help = "add the logarithm of the constant to those of the gates; let the algorithm be chosen";
        let refused = self.gate && (self.decay.is_some() || self.algorithm == Algorithm::Naive);
        refuse(refused, operation, combination, help)?;
        self.check_decay(dims.kv_heads)
    }

    fn check_decay(&self, kv_heads: usize) -> Result<(), Error> {
        let Some(decay) = &self.decay else { return Ok(()) };
        let operation = self.name();
        let expected = || format!("one for each of the {kv_heads} key/value heads");
        expect(decay.len() == kv_heads, operation, "decay", expected, || decay.len().to_string())?;
        let wrong = decay.iter().find(|&&gamma| !(gamma > 0.0 && gamma <= 1.0));
        expect(wrong.is_none(), operation, "decay", || "numbers in (0, 1]".into(), || format!("{wrong:?}"))
    }

    fn chosen<T: Real>(&self, call: &Call<'_, T>, purpose: Purpose) -> Algorithm {
        if call.initial_state.is_some() || call.outside.is_some() {
            Algorithm::Chunked
        } else {
            cost::plan(self, &call.dims, &call.mask).algorithm(purpose)
        }
    }
}

impl Mechanism for KernelizedAttention {
    fn name(&self) -> &'static str {
        match self.score {
            Score::Content => "kernelized",
            Score::Relative(_) => "shaw-relative",
            Score::Combined(_) => "shaw",
            Score::Fourier(_) => "fourier",
        }
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        if self.gate { &Self::ALGORITHMS[..1] } else { &Self::ALGORITHMS }
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let mut list = match self.score {
            Score::Content => Parameters::new(),
            Score::Fourier(fourier) => fourier.parameters(dims, self.feature_map.features(dims.head_dim)),
            Score::Relative(shaw) | Score::Combined(shaw) => {
                let shape = [dims.heads, shaw.rows(), shaw.row_len(self.feature_map, dims.head_dim)];
                smallvec![Parameter::new("relative", shape.into_iter().skip(usize::from(shaw.shared)))]
            }
        };
        list.extend(self.feature_map.parameters(dims));
        list.extend(self.gate.then(|| Parameter::new("log_decay", [dims.batch, dims.kv_heads, dims.keys])));
        list
    }

    fn reach(&self) -> Option<usize> {
        match self.score {
            Score::Content => Some(0),
            Score::Relative(shaw) | Score::Combined(shaw) => Some(shaw.radius),
            // Positions of keys in states are counted from the state's own start.
            Score::Fourier(_) => None,
        }
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        check_sizes(self, dims, mask)?;
        self.check_options(dims)?;
        Ok(cost::plan(self, dims, mask))
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}

kernels!(KernelizedAttention);

impl Compute for KernelizedAttention {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        self.problem(call).map(drop)
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let problem = self.problem(call)?;
        let factors = problem.gates()?;
        let mut problem = Problem { factors: &factors, ..problem };
        let dims = &call.dims;
        check_output(self, call, &to)?;
        let purpose = to.purpose();
        let Output { mut out, denominators, final_state } = to;
        problem.prepare(scratch);
        let sink = Sink::new(&mut out, denominators, self.denominators(dims));
        // Only the chunked algorithm can start from a state. A final state can be formed on its own and leaves the choice
        // free: backward, which does not know of it, must find the denominators of its own algorithm.
        let final_state = match self.chosen(call, purpose) {
            Algorithm::Naive => {
                if problem.dims.queries > 0 {
                    naive::forward(problem.by_pairs().as_ref().unwrap_or(&problem), sink, scratch);
                }
                final_state
            }
            _ => {
                forward::forward(&problem, sink, final_state, scratch);
                None
            }
        };
        if let Some(state) = final_state {
            forward::final_state(&problem, state, scratch);
        }
        problem.lost.report(self.name(), dims)
    }

    fn backward<T: Real>(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let problem = self.problem(call)?;
        let factors = problem.gates()?;
        let mut problem = Problem { factors: &factors, ..problem };
        check_gradients(self, call, cotangent, &gradients)?;
        let help = "give the call all keys";
        refuse(call.outside.is_some(), self.name(), "gradients with states of keys outside the call", help)?;
        problem.prepare(scratch);
        let algorithm = self.chosen(call, Purpose::Training);
        // The gradient of gates takes that of the initial state where a later call goes on from the final one.
        let mut d_initial = match call.initial_state {
            Some(state) if self.gate && cotangent.final_state.is_some() => Some(State::zeros(state.shape())?),
            _ => None,
        };
        downscaled(&call.dims, self.normalizes(), cotangent, gradients, |cotangent, sink, parameters, initial_state| {
            clear_absent(self, &problem.dims, &problem.sequences, [sink.dk, sink.dv]);
            match algorithm {
                // Without queries there is no pair, and all comes by the final state.
                Algorithm::Naive if problem.dims.queries > 0 => {
                    let pairs = problem.by_pairs();
                    naive::backward(pairs.as_ref().unwrap_or(&problem), cotangent, sink, parameters, scratch);
                    if cotangent.final_state.is_some() {
                        backward::add_final_state(&problem, cotangent, sink, parameters, scratch);
                    }
                }
                _ => {
                    let initial_state = initial_state.or(d_initial.as_mut());
                    backward::backward(&problem, cotangent, sink, parameters, initial_state, scratch);
                }
            }
        })
    }
}
