//! The one way in which the conformance suite, the benchmarks, the Burn layer and the bindings see a mechanism.

use std::fmt::Debug;

use crate::algorithm::Plan;
use crate::error::Error;
use crate::mask::Mask;
use crate::real::Real;
use crate::scratch::Scratch;
use crate::shape::{Dims, View, ViewMut};
use crate::state::State;

/// A learned tensor that a mechanism takes beside q, k and v, such as a table of relative positions. Row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in errors, checkpoints and bindings.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What goes into a forward call, and into its backward.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a, T> {
    /// All sizes.
    pub dims: Dims,
    /// Queries, `[batch, heads, queries, head_dim]`, before the feature map.
    pub q: View<'a, T>,
    /// Keys, `[batch, kv_heads, keys, head_dim]`, before the feature map.
    pub k: View<'a, T>,
    /// Values, `[batch, kv_heads, keys, value_dim]`.
    pub v: View<'a, T>,
    /// What [`Mechanism::parameters`] lists, in that order.
    pub parameters: &'a [&'a [T]],
    /// What a query sees.
    pub mask: Mask<'a>,
    /// The state of the tokens before key 0; causal masks only.
    pub initial_state: Option<&'a State<T>>,
}

/// Where a forward call writes.
#[derive(Debug)]
pub struct Output<'a, T> {
    /// `[batch, heads, queries, value_dim]`. A row that sees no key gets 0.
    pub out: ViewMut<'a, T>,
    /// The denominators `[batch, heads, queries]`, row-major: what the backward wants to be given. With
    /// [`FeatureMap::Exp`](crate::FeatureMap::Exp) they are relative to the running maxima. All 1 where the mechanism
    /// does not normalise.
    pub denominators: Option<&'a mut [T]>,
    /// The state after the last key (trailing padding is not part of a sequence); causal masks only.
    pub final_state: Option<&'a mut State<T>>,
}

/// What a backward call starts from.
#[derive(Debug, Clone, Copy)]
pub struct Cotangent<'a, T> {
    /// The output of the forward call.
    pub out: View<'a, T>,
    /// Its denominators.
    pub denominators: &'a [T],
    /// The gradient of the loss with respect to `out`.
    pub d_out: View<'a, T>,
}

/// Where a backward call writes; every element is overwritten.
#[derive(Debug)]
pub struct Gradients<'a, 'b, T> {
    /// As `q`.
    pub dq: ViewMut<'a, T>,
    /// As `k`; 0 where a key is ignored.
    pub dk: ViewMut<'a, T>,
    /// As `v`; 0 where a key is ignored.
    pub dv: ViewMut<'a, T>,
    /// As [`Call::parameters`].
    pub parameters: &'b mut [&'a mut [T]],
}

/// One token for [`Mechanism::step`]; all row-major.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a, T> {
    /// `[batch, heads, head_dim]`.
    pub q: &'a [T],
    /// `[batch, kv_heads, head_dim]`.
    pub k: &'a [T],
    /// `[batch, kv_heads, value_dim]`.
    pub v: &'a [T],
    /// As in [`Call`].
    pub parameters: &'a [&'a [T]],
}

/// The definition's answer, in doubles.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// `[batch, heads, queries, value_dim]`, row-major.
    pub out: Vec<f64>,
    /// `[batch, heads, queries]`, row-major; the true ones, without any shift.
    pub denominators: Vec<f64>,
}

/// An attention mechanism over one number type.
pub trait Mechanism<T: Real>: Debug + Send + Sync {
    /// Its name in errors, benchmarks and on the command line.
    fn name(&self) -> &'static str;

    /// The learned tensors it takes for calls of these sizes.
    fn parameters(&self, dims: &Dims) -> Vec<Parameter>;

    /// Whether a call makes sense; `forward` and `backward` check the same before they write anything.
    fn check(&self, call: &Call<'_, T>) -> Result<(), Error>;

    /// Which algorithm a call will run, and why.
    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Plan;

    /// Computes outputs, on the threads of the current rayon pool; the bits do not depend on their number.
    fn forward(&self, call: &Call<'_, T>, output: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error>;

    /// Computes the gradients of every input from the gradient of the output.
    fn backward(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error>;

    /// The state before the first token.
    fn empty_state(&self, dims: &Dims) -> Result<State<T>, Error>;

    /// Takes one token into `state` and writes its output, `[batch, heads, value_dim]` row-major: the row that
    /// [`Mechanism::forward`] gives under [`Mask::causal`].
    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error>;

    /// The definition, straight from the formula, O(queries · keys), in doubles. Takes no initial state.
    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error>;
}
