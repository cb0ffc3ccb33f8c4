//! Kernelized attention, with Shaw's relative positions if wanted, in linear time.
//!
//! `out_i = N_i / D_i` with `N_i = Σ_j w_ij v_j`, `D_i = Σ_j w_ij` over the keys that row `i` sees, and
//! `w_ij = γ^{(i+o)−j} (φ(q_i)·φ(k_j) + φ(q_i)·ρ(r_{clip(j−(i+o), −R, R)+R}))`: the content term (Katharopoulos et al.
//! 2020), the relative term ([`Shaw`]), or their sum (the Linear Scalable Transformer), under one normaliser. `γ` is 1
//! unless a [`decay`](KernelizedAttention::decay) is given.
//!
//! One head's [`State`] has five parts: `S = Σ φ(k_j) v_jᵀ` (`features × value_dim`), `z = Σ φ(k_j)` (`features`), the
//! exponent that [`FeatureMap::Exp`] subtracted from the keys and the index of the ring's oldest row (2), the sum of the
//! `v⁺ = [v, 1]` that fell out of the ring (`value_dim + 1`), and the ring of the last `R` rows `v⁺`. The last two are
//! there with relative positions only.
//!
//! Time is O((Lq + Lk)·d·dv), memory beside inputs and outputs O(d·dv) for each thread. The derivation, and that of the
//! gradient, stands in this folder's `README.md`.

mod backward;
mod cost;
mod forward;
mod naive;
mod problem;
mod state;
mod step;
mod summary;
mod tile;

mod reference;

use crate::algorithm::{Algorithm, Plan};
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::mask::{Keys, Mask};
use crate::mechanism::{
    Call, Cotangent, Gradients, Mechanism, Output, Parameter, Reference, Token, check_gradients, check_output,
};
use crate::real::Real;
use crate::scratch::Scratch;
use crate::shape::{Dims, ViewMut};
use crate::shaw::Shaw;
use crate::state::State;
use problem::Problem;

/// Which terms make up the weight of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// `φ(q_i)·φ(k_j)`.
    Content,
    /// `φ(q_i)·ρ(r_δ)`: Shaw's relative positions alone.
    Relative(Shaw),
    /// The sum of both.
    Combined(Shaw),
}

impl Score {
    /// The relative positions, if there are any.
    pub fn shaw(&self) -> Option<Shaw> {
        match *self {
            Self::Content => None,
            Self::Relative(shaw) | Self::Combined(shaw) => Some(shaw),
        }
    }

    /// Whether keys take part.
    pub fn content(&self) -> bool {
        !matches!(self, Self::Relative(_))
    }
}

/// Kernelized attention with optional relative positions and decay.
///
/// The one parameter is Shaw's table `relative`, `[heads, 2R+1, head_dim]`, or `[2R+1, head_dim]` if shared; without
/// relative positions there is none.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelizedAttention {
    /// `φ`.
    pub feature_map: FeatureMap,
    /// The terms of the weight.
    pub score: Score,
    /// `γ` in (0, 1] for each key/value head: the weight of a key falls by `γ` with every token (retention). Causal
    /// masks only. Not learned.
    pub decay: Option<Vec<f64>>,
    /// Divide by the sum of the weights. Without it the output is `N`.
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
            normalize: true,
            algorithm: Algorithm::Auto,
        }
    }
}

impl KernelizedAttention {
    /// The algorithm that a call runs; the same for its backward.
    fn chosen<T: Real>(&self, call: &Call<'_, T>) -> Algorithm {
        if call.initial_state.is_some() {
            Algorithm::Chunked
        } else {
            cost::plan(self, &call.dims, &call.mask).algorithm
        }
    }
}

impl<T: Real> Mechanism<T> for KernelizedAttention {
    fn name(&self) -> &'static str {
        match self.score {
            Score::Content => "kernelized",
            Score::Relative(_) => "shaw-relative",
            Score::Combined(_) => "shaw",
        }
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        &[Algorithm::Chunked, Algorithm::Naive]
    }

    fn parameters(&self, dims: &Dims) -> Vec<Parameter> {
        let Some(shaw) = self.score.shaw() else { return Vec::new() };
        let rows = shaw.rows();
        let shape = if shaw.shared { vec![rows, dims.head_dim] } else { vec![dims.heads, rows, dims.head_dim] };
        vec![Parameter { name: "relative", shape }]
    }

    fn check(&self, call: &Call<'_, T>) -> Result<(), Error> {
        Problem::new(self, call).map(drop)
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Plan {
        cost::plan(self, dims, mask)
    }

    fn forward(&self, call: &Call<'_, T>, output: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        let operation = Mechanism::<T>::name(self);
        let dims = &problem.dims;
        check_output(self, dims, &output)?;
        let Output { mut out, denominators, final_state } = output;
        if let Some(to) = &final_state {
            to.check(operation, "final_state", state::shape::<T>(self, dims))?;
            if !problem.causal || matches!(call.mask.keys, Keys::Packed { .. }) {
                return Err(Error::Unsupported {
                    operation,
                    combination: "a final state with a bidirectional mask or packed sequences",
                    mend: "use a causal mask and give each sequence its own batch entry",
                });
            }
        }
        let mut denominators =
            denominators.map(|numbers| ViewMut::strided(numbers, [dims.heads * dims.queries, dims.queries, 1]));
        let sink = forward::Sink { out: out.shared(), denominators: denominators.as_mut().map(ViewMut::shared) };
        match self.chosen(call) {
            // Only the chunked algorithm can start from a state. A final state is formed on its own below and leaves
            // the choice free: backward, which does not know of it, must find the denominators of its own algorithm.
            Algorithm::Naive => naive::forward(&problem, sink, scratch),
            _ => forward::forward(&problem, sink, scratch),
        }
        if let Some(state) = final_state {
            forward::final_state(&problem, state, scratch);
        }
        Ok(())
    }

    fn backward(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        let operation = Mechanism::<T>::name(self);
        check_gradients(self, &problem.dims, cotangent, &gradients)?;
        let Gradients { mut dq, mut dk, mut dv, parameters } = gradients;
        if call.initial_state.is_some() {
            return Err(Error::Unsupported {
                operation,
                combination: "the gradient of a call with an initial state",
                mend: "run forward and backward over the whole sequence",
            });
        }
        let sink = backward::GradientSink { dq: dq.shared(), dk: dk.shared(), dv: dv.shared() };
        let d_table = parameters.first_mut().map(|table| &mut **table);
        match self.chosen(call) {
            Algorithm::Naive => naive::backward(&problem, cotangent, sink, d_table, scratch),
            _ => {
                backward::backward(&problem, cotangent, sink, d_table, scratch);
            }
        }
        Ok(())
    }

    fn empty_state(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(Mechanism::<T>::name(self))?;
        Ok(state::empty(self, dims))
    }

    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        step::step(self, token, state, out)
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}
