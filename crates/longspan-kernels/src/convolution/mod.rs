//! Short convolution: `out_i = q_i ⊙ a(b + Σ_t c_t ⊙ k_{i−t} ⊙ v_{i−t})` over the last `w` tokens, channel by channel; without gates
//! `out_i = a(b + Σ_t c_t ⊙ v_{i−t})`.
//!
//! One head's [`State`] holds the last `w − 1` products `k ⊙ v`, oldest first, as its first part (`(w − 1) × value_dim`), and how
//! many tokens there were, up to `w − 1`, as its third (1). The derivation stands in this folder's `README.md`.

mod backward;
mod cost;
mod forward;
mod problem;
mod reference;
mod state;
mod step;
mod taps;

use problem::Problem;
pub(crate) use step::take_row;

use crate::call::{
    Call, Compute, Cotangent, Dims, GradientSink, Gradients, Mask, Mechanism, Output, Parameter, Parameters, Reference,
    Scratch, Sink, State, Token, check_gradients, check_output, check_sizes, kernels,
};
use crate::error::{Error, expect};
use crate::plan::{Algorithm, Plan};
use crate::simd::Real;

/// A causal convolution of a few taps over channels.
///
/// Its parameters are the taps `c`, `[kv_heads, width, value_dim]`, of which tap `t` weighs the token `t` places back, and with `bias`
/// a number for each channel, `[kv_heads, value_dim]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ShortConvolution {
    /// `w`: how many tokens a query sees, its own place among them; under any mask, no later one.
    pub width: usize,
    /// Whether `a` is SiLU, `x·σ(x)`; else it is the identity.
    pub silu: bool,
    /// Whether queries and keys, as wide as values, are gates around it; else there are none: both have a width of 0.
    pub gated: bool,
    /// Whether each channel has a number that is added before `a`.
    pub bias: bool,
}

impl Default for ShortConvolution {
    fn default() -> Self {
        Self { width: 4, silu: true, gated: true, bias: false }
    }
}

impl ShortConvolution {
    /// The largest width. What is longer is no longer short: its transforms would be faster.
    pub const LARGEST_WIDTH: usize = 64;

    fn before(&self) -> usize {
        self.width - 1
    }
}

fn check_options(convolution: &ShortConvolution, dims: &Dims) -> Result<(), Error> {
    let (operation, range) = (convolution.name(), 1..=ShortConvolution::LARGEST_WIDTH);
    let expected = || format!("between 1 and {}", range.end());
    expect(range.contains(&convolution.width), operation, "width", expected, || convolution.width.to_string())?;
    if !convolution.gated {
        let expected = || "0: without gates it is of values alone".into();
        return expect(dims.head_dim == 0, operation, "head_dim", expected, || dims.head_dim.to_string());
    }
    let expected = || format!("head_dim = {}: keys gate values", dims.head_dim);
    expect(dims.value_dim == dims.head_dim, operation, "value_dim", expected, || dims.value_dim.to_string())
}

impl Mechanism for ShortConvolution {
    fn name(&self) -> &'static str {
        if self.gated { "short-convolution" } else { "depthwise-convolution" }
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        &[Algorithm::Chunked]
    }

    fn compares(&self) -> bool {
        self.gated
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let taps = Parameter::new("taps", [dims.kv_heads, self.width, dims.value_dim]);
        let bias = self.bias.then(|| Parameter::new("bias", [dims.kv_heads, dims.value_dim]));
        [taps].into_iter().chain(bias).collect()
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        check_sizes(self, dims, mask)?;
        check_options(self, dims)?;
        Ok(cost::plan(self, dims))
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}

kernels!(ShortConvolution);

impl Compute for ShortConvolution {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        Problem::new(self, call).map(drop)
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        check_output(self, call, &to)?;
        let Output { mut out, denominators, final_state } = to;
        let sink = Sink::new(&mut out, denominators, self.denominators(&problem.dims));
        forward::forward(&problem, sink, scratch);
        if let Some(to) = final_state {
            forward::final_state(&problem, to);
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
        let problem = Problem::new(self, call)?;
        check_gradients(self, call, cotangent, &gradients)?;
        let Gradients { mut dq, mut dk, mut dv, parameters, initial_state } = gradients;
        let sink = GradientSink { dq: dq.shared(), dk: dk.shared(), dv: dv.shared() };
        backward::backward(&problem, cotangent, sink, (parameters, initial_state), scratch);
        Ok(())
    }
}
