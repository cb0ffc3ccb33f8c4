//! Kernelized attention, with Shaw's relative positions if wanted, in linear time.
//!
//! `out_i = N_i / D_i` with `N_i = Σ_j w_ij v_j`, `D_i = Σ_j w_ij` over the keys that row `i` sees, and
//! `w_ij = γ^{(i+o)−j} (φ(q_i)·φ(k_j) + φ(q_i)·ρ(r_{clip(j−(i+o), −R, R)+R}))`: the content term (Katharopoulos et al.
//! 2020), the relative term ([`Shaw`]), or their sum (the Linear Scalable Transformer), under one normaliser. `γ` is 1
//! unless a [`decay`](KernelizedAttention::decay) is given.
//!
//! Time is O((Lq + Lk)·d·dv), memory beside inputs and outputs O(d·dv) for each thread. The derivation, and that of the
//! gradient, stands in this folder's `README.md`.

mod backward;
mod cost;
mod forward;
mod naive;
mod problem;
mod step;
mod summary;
mod tile;

mod reference;

use crate::algorithm::{Algorithm, Plan};
use crate::error::{Error, expect};
use crate::feature_map::FeatureMap;
use crate::mask::{Keys, Mask};
use crate::mechanism::{Call, Cotangent, Gradients, Mechanism, Output, Parameter, Reference, Token};
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
        let Output { mut out, denominators, final_state } = output;
        let dims = &problem.dims;
        out.check(operation, "out", dims.out())?;
        let rows = dims.batch * dims.heads * dims.queries;
        if let Some(denominators) = &denominators {
            expect(
                denominators.len() == rows,
                operation,
                "denominators",
                || format!("batch × heads × queries = {rows} numbers"),
                || denominators.len().to_string(),
            )?;
        }
        if let Some(state) = &final_state {
            let expected = problem::state_shape(self, dims);
            expect(
                state.shape() == expected,
                operation,
                "final_state",
                || format!("{expected:?}"),
                || format!("{:?}", state.shape()),
            )?;
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
            Algorithm::Auto | Algorithm::Chunked => forward::forward(&problem, sink, scratch),
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
        let dims = &problem.dims;
        let Gradients { mut dq, mut dk, mut dv, parameters } = gradients;
        cotangent.out.check(operation, "out", dims.out())?;
        cotangent.d_out.check(operation, "d_out", dims.out())?;
        let rows = dims.batch * dims.heads * dims.queries;
        expect(
            cotangent.denominators.len() == rows,
            operation,
            "denominators",
            || format!("batch × heads × queries = {rows} numbers"),
            || cotangent.denominators.len().to_string(),
        )?;
        dq.check(operation, "dq", dims.q())?;
        dk.check(operation, "dk", dims.k())?;
        dv.check(operation, "dv", dims.v())?;
        let expected: Vec<usize> = Mechanism::<T>::parameters(self, dims).iter().map(Parameter::len).collect();
        expect(
            parameters.iter().map(|p| p.len()).eq(expected.iter().copied()),
            operation,
            "gradients of parameters",
            || format!("tensors of {expected:?} elements"),
            || format!("{:?}", parameters.iter().map(|p| p.len()).collect::<Vec<_>>()),
        )?;
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
            Algorithm::Auto | Algorithm::Chunked => {
                backward::backward(&problem, cotangent, sink, d_table, scratch);
            }
        }
        Ok(())
    }

    fn empty_state(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(Mechanism::<T>::name(self))?;
        let shift = if self.feature_map == FeatureMap::Exp { T::NEG_INFINITY } else { T::ZERO };
        Ok(State::empty(problem::state_shape(self, dims), shift))
    }

    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        step::step(self, token, state, out)
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}
