//! Kernelized attention with Toeplitz relative positions (Luo et al. 2021): a learned weight for every distance.
//!
//! `out_i = N_i / D_i`, `[N_i, D_i] = φ(q_i)ᵀ Σ_j e^{b_δ} φ(k_j) [v_j, 1]ᵀ` over the keys that row `i` sees, with the
//! distance `δ = j − (i + o)` and one table of biases `b` a head. [`Bias`] says which distances a table holds: all of
//! them, those up to a radius, the buckets of T5, or the displacements in an image. A constant added to a table cancels
//! in the division, so weights are counted from the largest one that a row may meet.
//!
//! The denominators of a call are relative to that exponent (one for each row and head, the same in forward and
//! backward).
//!
//! One head's [`State`] keeps the tokens whose weights still change: a ring of φ(k) and v, and for tables that
//! [extend](Beyond::Extend) or end in a last bucket the sum of all earlier ones. Parts: `Σ φ(k) vᵀ` and `Σ φ(k)` of the
//! earlier ones, three marks (where the next token goes in the ring, the tokens in it, the exponent of the sums), then
//! the ring's φ(k), their exponents (under an exponential map only) and `[v, 1]`. In the gradient of a state marks,
//! exponents, the ones of `[v, 1]` and rows of no token are 0.
//!
//! The derivations stand in this folder's `README.md`.

mod backward;
mod bias;
mod bias_gradient;
mod chunks;
mod cost;
mod exponents;
mod far;
mod fft;
mod final_state;
mod forward;
mod key_pass;
mod key_tiles;
mod left;
mod map_sums;
mod one_pass;
mod piecewise;
mod problem;
mod query_pass;
mod reference;
mod rows;
mod state;
mod state_gradient;
mod step;
mod tile;
mod weigh;

pub use bias::{Beyond, Bias};

use backward::Backward;
use problem::Problem;
use smallvec::smallvec;
use state_gradient::StateGradients;

use crate::call::{
    Call, Compute, Cotangent, Dims, Gradients, Mask, Mechanism, Output, Parameter, Parameters, Reference, Scratch,
    Sink, State, StateSink, Token, check_gradients, check_output, check_sizes, clear_absent, downscaled, kernels,
};
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::plan::{Algorithm, Plan, Purpose};
use crate::simd::Real;

/// The mechanism's name, in errors too.
const OPERATION: &str = "toeplitz";

/// Kernelized attention whose weights are multiplied by `e^{b_δ}`.
///
/// Parameters are the table `bias`, of the shape that [`Bias`] gives, and then those of the
/// [feature map](FeatureMap::parameters).
#[derive(Debug, Clone, PartialEq)]
pub struct Toeplitz {
    /// `φ`.
    pub feature_map: FeatureMap,
    /// The table.
    pub bias: Bias,
    /// Divide by the sum of the weights. Without it the output is `N`.
    pub normalize: bool,
    /// How it is computed. Calls with an initial state, and the gradient through a final one, run piecewise where the
    /// bias extends and tiled where it does not, whatever stands here.
    pub algorithm: Algorithm,
}

impl Toeplitz {
    /// With the default feature map, normalised, the algorithm chosen by cost.
    pub fn new(bias: Bias) -> Self {
        Self { feature_map: FeatureMap::default(), bias, normalize: true, algorithm: Algorithm::Auto }
    }

    /// Whether the feature map is one that this mechanism takes, with options that make sense for rows of
    /// `dims.head_dim`; calls check the same.
    ///
    /// # Errors
    /// No features or absurdly many.
    pub fn check_feature_map(&self, dims: &Dims) -> Result<(), Error> {
        self.feature_map.check(OPERATION, dims.head_dim)
    }

    /// The algorithms that can be forced; the first always can.
    const ALGORITHMS: [Algorithm; 3] = [Algorithm::Tiled, Algorithm::Fft, Algorithm::Piecewise];

    /// The algorithm that a call runs; a backward that comes `through` a final state has no choice.
    fn chosen<T: Real>(&self, call: &Call<'_, T>, purpose: Purpose, through: bool) -> Algorithm {
        match self.bias.far() {
            _ if call.initial_state.is_none() && !through => {
                cost::plan(self, &call.dims, &call.mask).algorithm(purpose)
            }
            // A state's sum of earlier tokens is one of those that pieces are met by.
            Some(_) => Algorithm::Piecewise,
            None => Algorithm::Tiled,
        }
    }
}

impl Mechanism for Toeplitz {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        &Self::ALGORITHMS
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let mut parameters: Parameters = smallvec![Parameter::new("bias", self.bias.shape(dims.heads))];
        parameters.extend(self.feature_map.parameters(dims));
        parameters
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        check_sizes(self, dims, mask)?;
        self.bias.check()?;
        self.check_feature_map(dims)?;
        Ok(cost::plan(self, dims, mask))
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}

kernels!(Toeplitz);

impl Compute for Toeplitz {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        Problem::new(self, call).map(drop)
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let mut problem = Problem::new(self, call)?;
        let dims = problem.dims;
        check_output(self, call, &to)?;
        let purpose = to.purpose();
        let Output { mut out, denominators, final_state } = to;
        if final_state.is_some() {
            problem.check_reach("final_state")?;
        }
        problem.prepare(scratch);
        let sink = Sink::new(&mut out, denominators, self.denominators(&dims));
        match self.chosen(call, purpose, false) {
            Algorithm::Fft => fft::forward(&problem, sink, scratch),
            other => piecewise::forward(&problem, other == Algorithm::Piecewise, sink, scratch),
        }
        if let Some(state) = final_state {
            final_state::final_state(&problem, state, scratch);
        }
        Ok(())
    }

    fn backward<T: Real>(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let mut problem = Problem::new(self, call)?;
        check_gradients(self, call, cotangent, &gradients)?;
        if cotangent.final_state.is_some() {
            problem.check_reach("gradient of the final state")?;
        }
        problem.prepare(scratch);
        let algorithm = self.chosen(call, Purpose::Training, cotangent.final_state.is_some());
        downscaled(&call.dims, self.normalize, cotangent, gradients, |cotangent, sink, parameters, initial_state| {
            let states = StateGradients { last: cotangent.final_state, first: initial_state.map(StateSink::new) };
            clear_absent(self, &problem.dims, &problem.sequences, [sink.dk, sink.dv]);
            let backward = Backward { problem: &problem, cotangent, sink, states };
            match algorithm {
                Algorithm::Fft => fft::backward(backward, parameters, scratch),
                other => piecewise::backward(backward, other == Algorithm::Piecewise, parameters, scratch),
            }
        })
    }
}
