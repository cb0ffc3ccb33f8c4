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

mod backward;
mod conv;
mod cost;
mod forward;
mod kernel;
mod keys;
pub(crate) mod log_sum;
mod problem;
mod reference;
pub(crate) mod running;
mod simple;
mod state;
mod state_gradient;
mod step;
mod tiles;
mod walk;

use problem::Problem;
use smallvec::smallvec;
use state_gradient::Links;

use crate::call::{
    Call, Compute, Cotangent, Dims, Gradients, Mask, Mechanism, Output, Parameter, Parameters, Reference, Scratch,
    State, Token, ViewMut, check_final_mask, check_gradients, check_initial_gradient, check_output, kernels,
};
use crate::error::Error;
use crate::plan::{Algorithm, Plan};
use crate::simd::Real;

/// Where the bias `w_ij` of a pair comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// AFT-full: learned for every pair of positions. A query stands at position `i + offset` and a key at `j`, both
    /// counted from the first token of the initial state; positions outside the table are an error.
    ///
    /// The parameter is `w`, `[length, length]`, or with a rank `u` and `z`, `[length, rank]` each, with `w = u·zᵀ`; shared
    /// by all heads and batch entries.
    Full {
        /// Positions that the table has, at least 1.
        length: usize,
        /// Of the factors; `None` for a dense table.
        rank: Option<usize>,
    },
    /// AFT-local: learned where `|j − t| < window`, 0 (not −∞) elsewhere, so that every key still counts. `t` is the
    /// query's place among the keys, `i + offset`.
    ///
    /// The parameter `w` is `[rows, 2·window − 1]`, column `j − t + window − 1`, shared by all heads and batch entries.
    Local {
        /// How far biases reach; at least 1, which is a bias for the key at the query's own place.
        window: usize,
        /// `None`: the table belongs to calls of one length and has a row for each query, counted from the start of its
        /// sequence; there is no state. A number: the table has so many rows, and a query reads that of its position
        /// `i + offset` (and the tokens of the initial state); positions outside the table are an error.
        length: Option<usize>,
    },
    /// AFT-simple: no bias.
    Simple,
    /// AFT-conv: a kernel for each head over the last `taps` keys under a causal mask, or centred on the query, `(taps −
    /// 1)/2` keys before it; 0 elsewhere. Keys are `[batch, kv_heads, keys, 1]`.
    Conv {
        /// Taps of the kernel, at least 1.
        taps: usize,
        /// Whether the kernel is `γ·(w − mean w)/std w + β`, with the parameters `w` `[heads, taps]`, `gamma` and `beta`
        /// `[heads]`, the last two to be initialised with 0, as published; where all taps are equal it is `β`. Otherwise
        /// it is `w`, the one parameter.
        normalized: bool,
    },
    /// AFT-conv over images, whose tokens are the rows of the image one after the other: a kernel for each head, centred on
    /// the query, with the taps of keys beyond the image left out; 0 elsewhere, so that every key still counts. Keys are
    /// `[batch, kv_heads, keys, 1]`. There are as many queries and keys as the image has places, and ignored keys must be
    /// told by a padding mask. It looks both ways: causal masks, offsets, lengths, packed sequences and states are refused.
    Conv2d {
        /// Height and width in tokens, each at least 1.
        image: [usize; 2],
        /// Taps in height and width, each at least 1; the first `(taps − 1)/2` of either stand before the query.
        taps: [usize; 2],
        /// As for [`Variant::Conv`], over all taps of a head; `w` is `[heads, taps in height, taps in width]`.
        normalized: bool,
    },
}

/// The attention-free transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Aft {
    /// Where biases come from.
    pub variant: Variant,
    /// Multiply by `σ(q)`. Without it queries have no influence.
    pub gate: bool,
}

impl Aft {
    /// With the gate, as published.
    pub fn new(variant: Variant) -> Self {
        Self { variant, gate: true }
    }
}

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
            Variant::Conv { normalized, .. } | Variant::Conv2d { normalized, .. } => {
                let taps: &[usize] = match &self.variant {
                    Variant::Conv2d { taps, .. } => taps,
                    Variant::Conv { taps, .. } => std::slice::from_ref(taps),
                    _ => &[],
                };
                let shape = std::iter::once(dims.heads).chain(taps.iter().copied());
                let mut parameters = smallvec![Parameter::new("w", shape)];
                if normalized {
                    parameters.extend(["gamma", "beta"].map(|name| Parameter::new(name, [dims.heads])));
                }
                parameters
            }
        }
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Plan {
        cost::plan(self, dims, mask)
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

    fn forward<T: Real>(
        &self,
        call: &Call<'_, T>,
        output: Output<'_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let problem = Problem::new(self, call)?;
        check_output(self, &problem.dims, &output)?;
        let Output { mut out, denominators, mut final_state } = output;
        if let Some(to) = &final_state {
            check_final_mask(self.name(), &call.mask)?;
            state::check(self, &problem.dims, to, "final_state")?;
        }
        if let Some(denominators) = denominators {
            // One for each channel has no room here, and the backward forms them anew.
            denominators.fill(T::ONE);
        }
        match conv::Geometry::new(self, problem.causal) {
            Some(geometry) => conv::forward(&problem, geometry, out.shared(), scratch),
            None if matches!(self.variant, Variant::Simple) => {
                simple::forward(&problem, out.shared(), final_state.take(), scratch);
            }
            None => forward::forward(&problem, out.shared(), scratch),
        }
        if let Some(state) = final_state {
            state::final_state(&problem, state, scratch);
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
        check_gradients(self, &problem.dims, cotangent, &gradients)?;
        let operation = self.name();
        if let Some(state) = cotangent.final_state {
            check_final_mask(operation, &call.mask)?;
            state::check_sizes(self, &problem.dims, state, "gradient of the final state")?;
        }
        if let Some(to) = &gradients.initial_state {
            check_initial_gradient(operation, call)?;
            state::check_sizes(self, &problem.dims, to, "gradient of the initial state")?;
        }
        problem.lend = gradients.initial_state.is_some();
        let Gradients { mut dq, mut dk, mut dv, parameters, initial_state } = gradients;
        let sink = backward::GradientSink { dq: dq.shared(), dk: dk.shared(), dv: dv.shared() };
        let mut first = initial_state.map(|state| {
            let numbers = state.numbers_mut();
            numbers.fill(T::ZERO);
            ViewMut::strided(numbers, [0, 0, 1])
        });
        let links = Links::new(&problem, cotangent, first.as_mut());
        backward::clear_absent(&problem, &sink);
        if problem.dims.head_dim == 0 || problem.dims.heads == 0 {
            parameters.iter_mut().for_each(|d| d.fill(T::ZERO));
            return Ok(());
        }
        match conv::Geometry::new(self, problem.causal) {
            Some(geometry) => conv::backward(&problem, geometry, cotangent, &sink, &links, parameters, scratch),
            None if matches!(self.variant, Variant::Simple) => {
                simple::backward(&problem, cotangent, &sink, &links, scratch);
            }
            None => backward::backward(&problem, cotangent, &sink, &links, parameters, scratch),
        }
        Ok(())
    }

    fn empty_state<T: Real>(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(self.name())?;
        state::empty(self, dims)
    }

    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        step::step(self, token, state, out)
    }

    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, _parameters: &[&[T]]) -> Result<State<T>, Error> {
        state::combine(self, earlier, later)
    }
}
