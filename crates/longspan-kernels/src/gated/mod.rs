//! Gated linear attention and the (gated) delta rule: a state that decays by what the token says, and that may correct itself.
//!
//! `S_t = D_t S_{t−1} + k_t u_tᵀ`, `o_t = scale · S_tᵀ q_t`, where `D_t` is 1, `e^{g_t}` or `Diag(e^{g_t})` ([`Gate`]), and `u_t = v_t`
//! ([`Update::Sum`]) or `u_t = β_t (v_t − (D_t S_{t−1})ᵀ k_t)` ([`Update::Delta`]). Causal masks only; nothing is normalised.
//!
//! One head's [`State`] has two parts: `S` (`head_dim × value_dim`), and the sum of all `g` so far (as many numbers as a token's
//! gate has). Both have gradients. The derivation stands in this folder's `README.md`.

mod backward;
mod chunk;
mod convolved;
mod cost;
mod forward;
mod learned;
mod loops;
mod pairs;
mod problem;
mod reference;
mod reversed;
mod solve;
mod state;
mod step;

pub use learned::LearnedGates;
use problem::{Problem, check_gates};

use crate::call::{
    Call, Compute, Cotangent, Dims, Gradients, Mask, Mechanism, Order, Output, Parameter, Parameters, Reference,
    Scratch, Sequence, Sink, State, StateShape, Step, Token, check_gradients, check_output, check_sizes, fingerprint,
    kernels,
};
use crate::error::{Error, expect, refuse};
use crate::plan::{Algorithm, Plan};
use crate::simd::Real;

/// What a token adds to the state beside its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// Its value: gated linear attention, retention, SSD.
    Sum,
    /// `β` times what its value has over what the state already gives for its key: the delta rule.
    Delta,
}

/// By what the state decays with each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Nothing.
    None,
    /// `e^g`, one number a head: gated DeltaNet, Mamba-2, simple GLA.
    Head,
    /// `e^g`, one number a channel of the key: GLA, KDA.
    Channel,
}

/// Linear attention whose state decays by numbers that each token brings, with or without the delta rule.
///
/// Its parameters are not learned tensors but inputs, a token each, with gradients: `log_decay`, `[batch, kv_heads, keys]` or
/// `[batch, kv_heads, keys, head_dim]`, all at most 0, unless there is no gate; then `beta`, `[batch, kv_heads, keys]`, from 0 to 2,
/// under the delta rule.
///
/// An ignored key leaves the state as it was, and its gates are not looked at but must be in range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedAttention {
    /// What a token adds.
    pub update: Update,
    /// By what the state decays.
    pub gate: Gate,
    /// Queries and keys are divided by their length, `x / √(|x|² + 10⁻⁶)`.
    pub l2_norm: bool,
    /// What outputs are multiplied by; none stands for `1/√head_dim`.
    pub scale: Option<f64>,
}

impl Default for GatedAttention {
    fn default() -> Self {
        Self { update: Update::Delta, gate: Gate::Head, l2_norm: true, scale: None }
    }
}

impl GatedAttention {
    /// Numbers of a token's gate.
    fn gate_len(&self, head_dim: usize) -> usize {
        match self.gate {
            Gate::None => 0,
            Gate::Head => 1,
            Gate::Channel => head_dim,
        }
    }

    fn is_delta(&self) -> bool {
        self.update == Update::Delta
    }

    fn scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (head_dim.max(1) as f64).sqrt())
    }

    /// Of the options that the meaning of a state depends on.
    fn fingerprint(&self) -> u64 {
        let gate = match self.gate {
            Gate::None => 0,
            Gate::Head => 1,
            Gate::Channel => 2,
        };
        fingerprint([self.is_delta().into(), gate, self.l2_norm.into()])
    }

    /// Refuses sequences that have not as many queries as keys, in a call that has queries at all.
    fn check_sequences(&self, dims: &Dims, sequences: &[Sequence<'_>]) -> Result<(), Error> {
        let uneven = sequences.iter().find(|s| dims.queries > 0 && s.queries != s.keys + s.absent);
        let expected = || "sequences of as many queries as keys".into();
        let got = || uneven.map_or(String::new(), |s| format!("{} and {}", s.queries, s.keys));
        expect(uneven.is_none(), self.name(), "packed boundaries", expected, got)
    }

    fn check_options(&self, dims: &Dims, mask: &Mask<'_>) -> Result<(), Error> {
        let operation = self.name();
        let expected = || "a finite number".into();
        let scale = self.scale(dims.head_dim);
        expect(scale.is_finite(), operation, "scale", expected, || scale.to_string())?;
        let help = "use a causal mask with offset 0";
        refuse(mask.order != Order::Causal || mask.offset != 0, operation, "a bidirectional mask or an offset", help)?;
        let expected = || format!("as many as keys, {}, since each token brings both; or none, for a state", dims.keys);
        let holds = dims.queries == dims.keys || dims.queries == 0;
        expect(holds, operation, "queries", expected, || dims.queries.to_string())
    }
}

impl Mechanism for GatedAttention {
    fn name(&self) -> &'static str {
        match self.update {
            Update::Sum => "gated",
            Update::Delta => "delta",
        }
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        &[Algorithm::Chunked]
    }

    fn shares_keys(&self) -> bool {
        true
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let Dims { batch, kv_heads, keys, head_dim, .. } = *dims;
        let token = [batch, kv_heads, keys];
        let gate = match self.gate {
            Gate::None => None,
            Gate::Head => Some(Parameter::new("log_decay", token)),
            Gate::Channel => Some(Parameter::new("log_decay", [batch, kv_heads, keys, head_dim])),
        };
        gate.into_iter().chain(self.is_delta().then(|| Parameter::new("beta", token))).collect()
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        check_sizes(self, dims, mask)?;
        self.check_options(dims, mask)?;
        Ok(cost::plan(self, dims, 1.0))
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        reference::reference(self, call)
    }
}

kernels!(GatedAttention);

impl Compute for GatedAttention {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        Problem::new(self, call).map(drop)
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        check_output(self, call, &to)?;
        let Output { mut out, denominators, final_state } = to;
        let sink = Sink::new(&mut out, denominators, self.denominators(&problem.dims));
        forward::forward(&problem, sink, final_state, scratch);
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
        backward::backward(&problem, cotangent, gradients, scratch);
        Ok(())
    }
}

impl Step for GatedAttention {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let StateShape { batch, kv_heads, .. } = state.shape();
        let head_dim = token.k.len() / (batch * kv_heads).max(1);
        let mut given = token.parameters.iter().copied();
        let log_decay = if self.gate == Gate::None { None } else { given.next() };
        let beta = if self.is_delta() { given.next() } else { None };
        check_gates(self.name(), log_decay, beta)?;
        let gates = |unit: usize, logs: &mut [T]| {
            if let Some(given) = log_decay {
                logs.copy_from_slice(&given[unit * logs.len()..][..logs.len()]);
            }
            beta.map(|beta| beta[unit])
        };
        step::step(self, self, head_dim, token, (gates, None), state, out)
    }
}
