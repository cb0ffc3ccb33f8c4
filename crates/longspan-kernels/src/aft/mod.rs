//! The attention-free transformer (Zhai et al. 2021): a mean of values under one softmax for each channel, which knows no
//! queries, and a gate that does.
//!
//! `Y_i = σ(q_i) ⊙ Σ_j e^{k_j+w_ij} ⊙ v_j / Σ_j e^{k_j+w_ij}` over the keys that row `i` sees; `w` is a learned bias of
//! positions, by [`Variant`]. Values are as wide as queries, and so are keys, but for [`Variant::Conv`], whose keys are
//! one number a head.
//!
//! One head's [`State`] has six parts: numerator `Σ e^{k_j − x} v_j`, denominator `Σ e^{k_j − x}` and exponent `x`
//! (`head_dim` each; of [`Variant::Conv`] the latter two are one number) of the keys that no window reaches any more; the ring of the keys that windows still reach
//! (`window − 1`, `taps − 1` or, for [`Variant::Full`], `length − 1` rows) and that of their values; and three marks, the index of the ring's oldest row, how
//! many of its rows hold a token, and the position of the next token in the table of biases.
//!
//! Time and memory are linear, but for the time of [`Variant::Full`]. The derivation, and that of the gradient, stands in this folder's `README.md`.

// Each uses only those above it, but for the definition and the cost.
mod chunks;
mod kernel;
mod log_sum;
mod options;
mod tokens;

mod outputs;
mod running;
mod state;

mod problem;

mod items;
mod keys;

mod final_state;
mod walk;

mod gradients;
mod tiles;

mod means;

mod backward;
mod conv;
mod forward;
mod simple;
mod step;

mod cost;
mod reference;

use forward::KEPT;
use gradients::{Backward, last_items};
pub use options::{Aft, Variant};
use problem::Problem;
use smallvec::smallvec;

use crate::call::{
    Call, Compute, Cotangent, Dims, Gradients, Mask, Mechanism, Output, Parameter, Parameters, Reference, Scratch,
    State, StateSink, Token, ViewMut, check_gradients, check_output, check_sizes, clear_absent, kernels,
};
use crate::error::Error;
use crate::plan::{Algorithm, Plan};
use crate::simd::Real;

impl Mechanism for Aft {
    fn name(&self) -> &'static str {
        match self.variant {
            Variant::Full { .. } => "aft-full",
            Variant::Local { .. } => "aft-local",
            Variant::Simple => "aft-simple",
            Variant::Conv { .. } => "aft-conv",
            Variant::Conv2d { .. } => "aft-conv-2d",
        }
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        &[Algorithm::Chunked]
    }

    fn key_dim(&self, dims: &Dims) -> usize {
        match self.variant {
            Variant::Conv { .. } | Variant::Conv2d { .. } => 1,
            _ => dims.head_dim,
        }
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let kernels = |taps: &[usize], normalized: bool| {
            let shape = std::iter::once(dims.heads).chain(taps.iter().copied());
            let mut parameters: Parameters = smallvec![Parameter::new("w", shape)];
            if normalized {
                parameters.extend(["gamma", "beta"].map(|name| Parameter::new(name, [dims.heads])));
            }
            parameters
        };
        match self.variant {
            Variant::Simple => Parameters::new(),
            Variant::Full { length, rank: None } => smallvec![Parameter::new("w", [length, length])],
            Variant::Full { length, rank: Some(rank) } => {
                smallvec![Parameter::new("u", [length, rank]), Parameter::new("z", [length, rank])]
            }
            Variant::Local { window, length } => {
                let columns = window.saturating_mul(2).saturating_sub(1);
                smallvec![Parameter::new("w", [length.unwrap_or(dims.queries), columns])]
            }
            Variant::Conv { taps, normalized } => kernels(&[taps], normalized),
            Variant::Conv2d { taps, normalized, .. } => kernels(&taps, normalized),
        }
    }

    fn denominators(&self, dims: &Dims) -> [usize; 4] {
        let each = if matches!(self.variant, Variant::Full { .. }) { dims.head_dim.saturating_mul(KEPT) } else { 1 };
        [dims.batch, dims.heads, dims.queries, each]
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

kernels!(Aft);

impl Compute for Aft {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        Problem::new(self, call).map(drop)
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        check_output(self, call, &to)?;
        let Output { mut out, denominators, mut final_state } = to;
        let mut kept = None;
        match denominators {
            Some(numbers) if problem.full() => {
                kept = Some(ViewMut::contiguous(numbers, self.denominators(&problem.dims)));
            }
            // The backward of the other variants forms the means anew.
            Some(numbers) => numbers.fill(T::ONE),
            None => {}
        }
        let simple = matches!(self.variant, Variant::Simple);
        if !problem.is_empty() {
            match conv::Geometry::new(self, problem.causal) {
                Some(geometry) => conv::forward(&problem, geometry, out.shared(), scratch),
                None if simple => simple::forward(&problem, out.shared(), final_state.as_deref_mut(), scratch),
                None => forward::forward(&problem, out.shared(), kept.as_mut().map(ViewMut::shared), scratch),
            }
        }
        if let Some(state) = final_state {
            final_state::final_state(&problem, state, !simple, scratch);
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
        problem.lend = gradients.initial_state.is_some();
        let Gradients { mut dq, mut dk, mut dv, parameters, initial_state } = gradients;
        let first = initial_state.map(StateSink::new);
        let (dq, dk, dv) = (dq.shared(), dk.shared(), dv.shared());
        clear_absent(self, &problem.dims, &problem.sequences, [dk, dv]);
        if problem.is_empty() {
            parameters.iter_mut().for_each(|d| d.fill(T::ZERO));
            return Ok(());
        }
        let last = cotangent.final_state.map(|state| (state, last_items(&problem, state)));
        let call = Backward { problem: &problem, cotangent, dq, dk, dv, last, first };
        match conv::Geometry::new(self, problem.causal) {
            Some(geometry) => conv::backward(&call, geometry, parameters, scratch),
            None if matches!(self.variant, Variant::Simple) => simple::backward(&call, scratch),
            None => backward::backward(&call, parameters, scratch),
        }
        Ok(())
    }
}
