//! Softmax attention: the baseline that the linear mechanisms are measured against.
//!
//! `out_i = Σ_j p_ij v_j`, `p_ij = e^{s·q_i·k_j} / Σ_l e^{s·q_i·k_l}` over the keys that row `i` sees, `s = 1/√d` unless a
//! [`scale`](SoftmaxAttention::scale) is given. With a [`window`](SoftmaxAttention::window) of `w`, rows see the keys at distances
//! below `w` alone: sliding-window attention.
//!
//! One head's [`State`] is a cache of all keys so far, with a fixed capacity. It has three parts: keys (`capacity ×
//! head_dim`), values (`capacity × value_dim`) and their number (1). Ignored keys are left out: without positions nothing
//! tells where they stood. With a window it is a ring of `w` rows for keys and values, which never is too full; the third part is
//! the number of tokens `n` up to `w`, then `w + n mod w`; a fourth (`w`) says of each row whether its token is there (1) or
//! ignored (0). The token at position `p` stands in row `p mod w`.
//!
//! Time is O(Lq·Lk·(d + dv)), with a window O(Lq·w·(d + dv)), memory beside inputs and outputs O(d + dv) for each thread; a
//! gradient takes O(Lk·(d + dv)) for each thread. The derivation stands in this folder's `README.md`.

mod backward;
mod cost;
mod forward;
mod problem;
mod state;
mod step;
pub(crate) mod tile;

mod reference;

use problem::Problem;

use crate::call::{
    Call, Compute, Cotangent, Dims, GradientSink, Gradients, Mask, Mechanism, Output, Parameters, Reference, Scratch,
    Sink, State, Token, check_gradients, check_output, check_sizes, clear_absent, kernels,
};
use crate::error::{Error, expect};
use crate::plan::{Algorithm, Plan};
use crate::simd::Real;

/// Scaled dot-product attention (Vaswani et al. 2017). It learns nothing itself.
///
/// [`Output::denominators`] are two numbers a row, the largest score `m_i` and `Σ_j e^{s·q_i·k_j − m_i}`, which is 0 for a row that
/// sees nothing: with them the backward forms the weights anew. Their logarithm would be one number, but at scores of thousands it has
/// few digits behind the point.
#[derive(Debug, Clone, PartialEq)]
pub struct SoftmaxAttention {
    /// `s`, what scores are multiplied by; `1/√head_dim` by default.
    pub scale: Option<f64>,
    /// Tokens that a [`State`] has room for; a call or step that needs more is refused. A state takes `capacity · (head_dim +
    /// value_dim) + 1` numbers for each batch entry and key/value head, from the first token on.
    pub capacity: usize,
    /// `w`: a query sees the keys at distances below it, its own place among them: `w` of them under a causal mask, `2w − 1` in
    /// both directions. Without one it sees keys at any distance. A state then is a ring of `w` rows, whatever the capacity.
    pub window: Option<usize>,
}

impl Default for SoftmaxAttention {
    fn default() -> Self {
        Self { scale: None, capacity: 4096, window: None }
    }
}

/// Numbers of a row in [`Output::denominators`].
const KEPT: usize = 2;

impl SoftmaxAttention {
    /// The largest window: what a state counts up to, twice that, is exact in `f32`.
    pub const LARGEST_WINDOW: usize = 1 << 22;

    fn rows(&self) -> usize {
        self.window.unwrap_or(self.capacity)
    }
}

fn check_options(attention: &SoftmaxAttention) -> Result<(), Error> {
    if let Some(scale) = attention.scale {
        expect(scale.is_finite(), attention.name(), "scale", || "a finite number".into(), || scale.to_string())?;
    }
    let window = attention.window.unwrap_or(1);
    let range = 1..=SoftmaxAttention::LARGEST_WINDOW;
    let expected = || format!("between 1 and {}", range.end());
    expect(range.contains(&window), attention.name(), "window", expected, || window.to_string())
}

impl Mechanism for SoftmaxAttention {
    fn name(&self) -> &'static str {
        if self.window.is_some() { "softmax-window" } else { "softmax" }
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        &[Algorithm::Tiled]
    }

    fn parameters(&self, _: &Dims) -> Parameters {
        Parameters::new()
    }

    fn denominators(&self, dims: &Dims) -> [usize; 4] {
        [dims.batch, dims.heads, dims.queries, KEPT]
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        check_sizes(self, dims, mask)?;
        check_options(self)?;
        Ok(cost::plan(self, dims, mask))
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}

kernels!(SoftmaxAttention);

impl Compute for SoftmaxAttention {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        Problem::new(self, call).map(drop)
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        let dims = &problem.dims;
        check_output(self, call, &to)?;
        let Output { mut out, denominators, final_state } = to;
        if final_state.is_some() {
            problem.check_room("final_state")?;
        }
        let sink = Sink::new(&mut out, denominators, self.denominators(dims));
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
        if cotangent.final_state.is_some() {
            problem.check_room("gradient of the final state")?;
        }
        let Gradients { mut dq, mut dk, mut dv, initial_state, .. } = gradients;
        let sink = GradientSink { dq: dq.shared(), dk: dk.shared(), dv: dv.shared() };
        clear_absent(self, &problem.dims, &problem.sequences, [sink.dk, sink.dv]);
        backward::backward(&problem, cotangent, sink, initial_state, scratch);
        Ok(())
    }
}
