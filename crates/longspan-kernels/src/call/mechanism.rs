//! The one way in which the conformance suite, the benchmarks, the Burn layer and the bindings see a mechanism.

use std::fmt::Debug;
use std::ops::Range;

use smallvec::SmallVec;

use super::{Dims, Mask, Order, Scratch, Sequence, State, StateShape, View, ViewMut};
use crate::error::{Error, expect, refuse};
use crate::plan::{Algorithm, Plan, Purpose};
use crate::simd::block::{dot, scale_by};
use crate::simd::{InstructionSet, Real};

/// A learned tensor that a mechanism takes beside q, k and v, such as a table of relative positions. Row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in errors, checkpoints and bindings.
    pub name: &'static str,
    /// Its shape.
    pub shape: SmallVec<[usize; 4]>,
}

/// What [`Mechanism::parameters`] lists. Every step asks for it, so a usual list stands on the stack.
pub type Parameters = SmallVec<[Parameter; 6]>;

impl Parameter {
    /// A tensor of this name and shape.
    pub fn new(name: &'static str, shape: impl IntoIterator<Item = usize>) -> Self {
        Self { name, shape: shape.into_iter().collect() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        // An absurd size is refused for its length and must not overflow before.
        self.shape.iter().fold(1, |len: usize, &n| len.saturating_mul(n))
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What goes into a forward call, and into its backward.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
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
    /// The states of the keys before key 0 and after the last, which queries see too; bidirectional masks only. No query may
    /// stand closer to such keys than [`Mechanism::reach`].
    pub outside: Option<[&'a State<T>; 2]>,
}

impl<'a, T> Call<'a, T> {
    /// Every query sees every key; no learned parameters, no states.
    pub fn new(dims: Dims, q: View<'a, T>, k: View<'a, T>, v: View<'a, T>) -> Self {
        Self { dims, q, k, v, parameters: &[], mask: Mask::bidirectional(), initial_state: None, outside: None }
    }

    /// The same of row-major tensors, of the shapes that [`Dims`] gives; keys are as wide as there are numbers for, since those of
    /// some mechanisms are narrower.
    pub fn row_major(dims: Dims, [q, k, v]: [&'a [T]; 3]) -> Self {
        let [batch, heads, keys, head_dim] = dims.k();
        let rows = batch.saturating_mul(heads).saturating_mul(keys);
        let width = k.len().checked_div(rows).unwrap_or(head_dim);
        let k = View::contiguous(k, [batch, heads, keys, width]);
        Self::new(dims, View::contiguous(q, dims.q()), k, View::contiguous(v, dims.v()))
    }

    /// Under another mask.
    pub fn with_mask(self, mask: Mask<'a>) -> Self {
        Self { mask, ..self }
    }

    /// With the tensors that [`Mechanism::parameters`] lists, in that order.
    pub fn with_parameters(self, parameters: &'a [&'a [T]]) -> Self {
        Self { parameters, ..self }
    }

    /// After the tokens of a state, if any.
    pub fn with_initial_state(self, initial_state: impl Into<Option<&'a State<T>>>) -> Self {
        Self { initial_state: initial_state.into(), ..self }
    }

    /// Between the keys of two states, so that a long sequence can be taken piece by piece in both directions.
    pub fn with_outside(self, outside: [&'a State<T>; 2]) -> Self {
        Self { outside: Some(outside), ..self }
    }
}

/// Where a forward call writes. [`Output::new`] is for inference, [`Output::training`] for a call with a backward to come.
#[derive(Debug)]
#[non_exhaustive]
pub struct Output<'a, T> {
    /// `[batch, heads, queries, value_dim]`. A row that sees no key gets 0, and so does one whose
    /// denominator is below the least normal number.
    pub out: ViewMut<'a, T>,
    /// In training, the denominators, row-major and in the shape of [`Mechanism::denominators`]: what the backward wants to be
    /// given. With [`FeatureMap::Exp`](crate::FeatureMap::Exp) they are relative to the running maxima, and beyond the last key a constant
    /// decay takes no more from them. All 1 where the mechanism does not normalise.
    pub denominators: Option<&'a mut [T]>,
    /// The state after the last key (trailing padding is not part of a sequence); causal masks only.
    pub final_state: Option<&'a mut State<T>>,
}

impl<'a, T> Output<'a, T> {
    /// Outputs alone: the algorithm is the one whose forward is the fastest.
    pub fn new(out: ViewMut<'a, T>) -> Self {
        Self { out, denominators: None, final_state: None }
    }

    /// Outputs and the denominators that the backward is given: the algorithm is the one whose forward and backward together
    /// are the fastest.
    pub fn training(out: ViewMut<'a, T>, denominators: &'a mut [T]) -> Self {
        Self { out, denominators: Some(denominators), final_state: None }
    }

    /// And the state after the last key, if wanted.
    pub fn with_final_state(self, final_state: impl Into<Option<&'a mut State<T>>>) -> Self {
        Self { final_state: final_state.into(), ..self }
    }

    pub(crate) fn purpose(&self) -> Purpose {
        if self.denominators.is_some() { Purpose::Training } else { Purpose::Inference }
    }
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
    /// The gradient of the loss with respect to [`Output::final_state`], as [`Gradients::initial_state`] gives it; none
    /// stands for 0.
    pub final_state: Option<&'a State<T>>,
}

impl<T: Real> Cotangent<'_, T> {
    /// Makes of `G` of some rows of a head, which stand in a block, `G/D`, and writes `−G·A/D` beside it; without a division `G` times
    /// a factor, and 0. `gain(row, D)` is that factor, or `1/D`; none for a row that gave 0 whatever the inputs were.
    pub(crate) fn weigh_rows(
        &self,
        dims: &Dims,
        (sequence, head, rows): (&Sequence<'_>, usize, Range<usize>),
        divides: bool,
        gain: impl Fn(usize, T) -> Option<T>,
        (d, width): (&mut [T], usize),
        c: &mut [T],
    ) {
        let out = self.out.rows(sequence.batch, head).skip(sequence.query_start);
        let place = (sequence.batch * dims.heads + head) * dims.queries + sequence.query_start;
        for (at, row) in rows.enumerate() {
            let d = &mut d[at * width..][..width];
            c[at] = T::ZERO;
            let Some(gain) = gain(row, self.denominators[place + row]) else {
                d.fill(T::ZERO);
                continue;
            };
            scale_by(d, gain);
            if divides {
                c[at] = -dot(out.row(row, dims.value_dim), d);
            }
        }
    }
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
    /// As [`Call::initial_state`], number for number: the gradient with respect to each number as it is stored. What no
    /// gradient has a meaning for, such as a count of tokens, gets 0; the mechanism's page says what that is. Given as
    /// [`Cotangent::final_state`] to the backward of the call that left the state, it carries the gradient on to the
    /// tokens before.
    pub initial_state: Option<&'a mut State<T>>,
}

/// What [`Kernel::combine_backward`] gives.
#[derive(Debug)]
pub struct CombineGradients<T> {
    /// Of the earlier state.
    pub earlier: State<T>,
    /// Of the later state.
    pub later: State<T>,
    /// Of the parameters.
    pub parameters: Vec<Vec<T>>,
}

/// One token for [`Kernel::step`]; all row-major.
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

/// The definition's answer, in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// `[batch, heads, queries, value_dim]`, row-major.
    pub out: Vec<f64>,
    /// `[batch, heads, queries]`, row-major; the true ones, without any shift.
    pub denominators: Vec<f64>,
}

/// An attention mechanism: its options, and what does not depend on the number type.
pub trait Mechanism: Debug + Send + Sync {
    /// Its name in errors, benchmarks and on the command line.
    fn name(&self) -> &'static str;

    /// The algorithms that can be forced; the first is the one that always can.
    fn algorithms(&self) -> &'static [Algorithm];

    /// Numbers in one key of one head: [`Dims::head_dim`], but for mechanisms whose keys are narrower than queries.
    fn key_dim(&self, dims: &Dims) -> usize {
        dims.head_dim
    }

    /// Whether queries and keys may have fewer heads than values, each for as many of them ([`View::with_shared_heads`]).
    fn shares_keys(&self) -> bool {
        false
    }

    /// Whether outputs depend on queries and keys, which must have features then.
    fn compares(&self) -> bool {
        true
    }

    /// The learned tensors it takes for calls of these sizes.
    fn parameters(&self, dims: &Dims) -> Parameters;

    /// The shape of [`Output::denominators`], `[batch, heads, queries, n]`: one number a row, but for a mechanism that divides
    /// each channel by its own.
    fn denominators(&self, dims: &Dims) -> [usize; 4] {
        [dims.batch, dims.heads, dims.queries, 1]
    }

    /// How many keys on each side of a query its call must hold if the others are given as states ([`Call::outside`]); none
    /// where keys can't be given as states.
    fn reach(&self) -> Option<usize> {
        None
    }

    /// Which algorithm a call will run, and why.
    ///
    /// # Errors
    /// Sizes, a mask or options that make no sense.
    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error>;

    /// The definition, straight from the formula, O(queries · keys), in f64. Takes no initial state.
    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error>;
}

/// The calls of a mechanism over one number type.
pub trait Kernel<T: Real>: Mechanism {
    /// Whether a call makes sense; `forward` and `backward` check the same before they write anything.
    fn check(&self, call: &Call<'_, T>) -> Result<(), Error>;

    /// Computes outputs, on the threads of the current rayon pool or of a [team](crate::threads); the bits do not depend on their number.
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
    /// [`forward`](Kernel::forward) gives under [`Mask::causal`].
    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error>;

    /// The state after two runs of tokens, `earlier` before `later`, from the state of each computed apart: `later`
    /// from [`empty_state`](Kernel::empty_state) on. Associative, to rounding, with the empty state as its unit, so
    /// the parts of a long sequence may be taken in any order, by any number of machines. A mechanism whose states
    /// have no sum refuses.
    ///
    /// `parameters` are those of the calls. Only counted Fourier positions look at them, and there at `a` alone: the
    /// later tokens turn by the count of the earlier ones.
    fn combine(&self, earlier: &State<T>, later: &State<T>, parameters: &[&[T]]) -> Result<State<T>, Error> {
        let _ = (earlier, later, parameters);
        Err(Error::Unsupported {
            operation: self.name(),
            combination: "the sum of two states",
            help: "give the earlier state to the call of the later tokens",
        })
    }

    /// The gradients of both states and of the parameters, from that of the state which [`combine`](Kernel::combine) gives; each as
    /// [`Gradients::initial_state`] says, number for number. A mechanism whose sums have none refuses.
    fn combine_backward(
        &self,
        earlier: &State<T>,
        later: &State<T>,
        parameters: &[&[T]],
        d_combined: &State<T>,
    ) -> Result<CombineGradients<T>, Error> {
        let _ = (earlier, later, parameters, d_combined);
        no_combine_backward(self.name())
    }
}

fn no_combine_backward<T>(operation: &'static str) -> Result<CombineGradients<T>, Error> {
    Err(Error::Unsupported {
        operation,
        combination: "gradients of the sum of two states",
        help: "give the earlier state to the call of the later tokens",
    })
}

/// A mechanism over both number types: what layers and bindings hold.
pub trait AnyKernel: Kernel<f32> + Kernel<f64> {}

impl<M: Kernel<f32> + Kernel<f64>> AnyKernel for M {}

/// [`Kernel`] as the mechanisms of this crate write it, once for any number type. [`kernels!`] makes the two of it: not generic,
/// they are compiled here and not once more in every crate that calls them.
pub(crate) trait Compute: Step {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error>;
    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error>;
    fn backward<T: Real>(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error>;
}

/// How a mechanism takes a token, the same way; each says so in its `step.rs`.
pub(crate) trait Step: Stateful {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error>;
}

/// What a mechanism's states are, the same way; each says so in its `state.rs`.
pub(crate) trait Stateful: Mechanism {
    /// The sizes of a state for calls of these sizes.
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error>;
    /// Refuses marks that make no sense in a state of the right sizes: its numbers may come from anywhere.
    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error>;
    fn empty_state<T: Real>(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(self.name())?;
        State::zeros(self.state_shape::<T>(dims)?)
    }
    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, parameters: &[&[T]]) -> Result<State<T>, Error>;
    fn combine_backward<T: Real>(
        &self,
        _earlier: &State<T>,
        _later: &State<T>,
        _parameters: &[&[T]],
        _d_combined: &State<T>,
    ) -> Result<CombineGradients<T>, Error> {
        no_combine_backward(self.name())
    }
}

/// Runs a call.
pub(crate) fn built<R>(call: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
    call()
}

/// What calls in `f64` end with in a build without them: two fifths of the machine code less. Definitions and checks of options stay.
#[cfg(not(feature = "f64"))]
pub(crate) fn left_out<R>(_: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
    let known = "f32; f64 with the feature `f64` of longspan-kernels".to_owned();
    Err(Error::UnknownName { kind: "number type", got: "f64".to_owned(), known })
}

/// Implements [`Kernel`] of both number types for a mechanism that is [`Compute`].
macro_rules! kernels {
    ($mechanism:ty) => {
        $crate::call::kernels!($mechanism, f32, $crate::call::built);
        #[cfg(feature = "f64")]
        $crate::call::kernels!($mechanism, f64, $crate::call::built);
        #[cfg(not(feature = "f64"))]
        $crate::call::kernels!($mechanism, f64, $crate::call::left_out);
    };
    ($mechanism:ty, $t:ty, $run:path) => {
        impl $crate::Kernel<$t> for $mechanism {
            fn check(&self, call: &Call<'_, $t>) -> Result<(), Error> {
                $run(|| Compute::check(self, call))
            }

            fn forward(
                &self,
                call: &Call<'_, $t>,
                output: Output<'_, $t>,
                scratch: &mut Scratch<$t>,
            ) -> Result<(), Error> {
                $run(|| Compute::forward(self, call, output, scratch))
            }

            fn backward(
                &self,
                call: &Call<'_, $t>,
                cotangent: &Cotangent<'_, $t>,
                gradients: Gradients<'_, '_, $t>,
                scratch: &mut Scratch<$t>,
            ) -> Result<(), Error> {
                $run(|| Compute::backward(self, call, cotangent, gradients, scratch))
            }

            fn empty_state(&self, dims: &Dims) -> Result<State<$t>, Error> {
                $run(|| $crate::call::Stateful::empty_state(self, dims))
            }

            fn step(&self, token: &Token<'_, $t>, state: &mut State<$t>, out: &mut [$t]) -> Result<(), Error> {
                $run(|| $crate::call::Step::step(self, token, state, out))
            }

            fn combine(
                &self,
                earlier: &State<$t>,
                later: &State<$t>,
                parameters: &[&[$t]],
            ) -> Result<State<$t>, Error> {
                $run(|| $crate::call::Stateful::combine(self, earlier, later, parameters))
            }

            fn combine_backward(
                &self,
                earlier: &State<$t>,
                later: &State<$t>,
                parameters: &[&[$t]],
                d_combined: &State<$t>,
            ) -> Result<$crate::call::CombineGradients<$t>, Error> {
                $run(|| $crate::call::Stateful::combine_backward(self, earlier, later, parameters, d_combined))
            }
        }
    };
}
pub(crate) use kernels;

/// Checks what every mechanism asks of a call: sizes, layouts, mask and parameters.
pub(crate) fn check_call<T: Real>(mechanism: &dyn Mechanism, call: &Call<'_, T>) -> Result<(), Error> {
    let operation = mechanism.name();
    let dims = &call.dims;
    InstructionSet::selected().map_err(Error::clone)?;
    dims.check(operation)?;
    call.q.check(operation, "q", dims.q())?;
    call.k.check(operation, "k", key_shape(mechanism, dims))?;
    call.v.check(operation, "v", dims.v())?;
    call.mask.check(operation, dims)?;
    check_outside(mechanism, call)?;
    check_parameters(mechanism, dims, call.parameters)
}

fn check_parameters<T>(mechanism: &dyn Mechanism, dims: &Dims, given: &[&[T]]) -> Result<(), Error> {
    let (operation, parameters) = (mechanism.name(), mechanism.parameters(dims));
    let names = || parameters.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
    let expected = || format!("{} ({})", parameters.len(), names());
    expect(parameters.len() == given.len(), operation, "parameters", expected, || given.len().to_string())?;
    parameters.iter().zip(given).try_for_each(|(parameter, given)| {
        let expected = || format!("shape {:?}, so {} elements", parameter.shape, parameter.len());
        let holds = parameter.len() == given.len();
        expect(holds, operation, parameter.name, expected, || format!("{} elements", given.len()))
    })
}

/// Checks what every plan asks of sizes and mask.
pub(crate) fn check_sizes(mechanism: &dyn Mechanism, dims: &Dims, mask: &Mask<'_>) -> Result<(), Error> {
    dims.check(mechanism.name())?;
    mask.check(mechanism.name(), dims)
}

/// Refuses states of keys outside a call where they have no use. The states themselves are the mechanism's.
fn check_outside<T: Real>(mechanism: &dyn Mechanism, call: &Call<'_, T>) -> Result<(), Error> {
    let usable = mechanism.reach().is_some() && call.mask.order == Order::Bidirectional && !call.mask.is_packed();
    let refused = call.outside.is_some() && !usable;
    let combination =
        "states of keys outside the call with a causal mask, packed sequences, or a mechanism without a reach";
    let help = "give the call all keys, or under a causal mask an initial state";
    refuse(refused, mechanism.name(), combination, help)
}

/// Checks sizes and marks of a state that a caller gives.
pub(crate) fn check_state<T: Real>(
    mechanism: &impl Stateful,
    dims: &Dims,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    state.check(mechanism.name(), argument, mechanism.state_shape::<T>(dims)?)?;
    mechanism.check_marks(state, argument)
}

/// Checks the state that a call goes on from, if there is one, and that its tokens stand right before key 0.
pub(crate) fn check_initial_state<T: Real>(mechanism: &impl Stateful, call: &Call<'_, T>) -> Result<(), Error> {
    let Some(initial) = call.initial_state else { return Ok(()) };
    check_state(mechanism, &call.dims, initial, "initial_state")?;
    let refused = call.mask.order != Order::Causal || call.mask.offset < 0;
    let combination = "an initial state with a bidirectional mask or a negative offset";
    let help = "use a causal mask with offset 0";
    refuse(refused, mechanism.name(), combination, help)
}

/// Checks the sizes of a final state or of the gradient of one, and refuses it where no single sequence has an end to go on from.
fn check_final_state<T: Real>(
    mechanism: &impl Stateful,
    call: &Call<'_, T>,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    state.check(mechanism.name(), argument, mechanism.state_shape::<T>(&call.dims)?)?;
    let refused = call.mask.order != Order::Causal || call.mask.is_packed();
    let combination = "a final state with a bidirectional mask or packed sequences";
    let help = "use a causal mask and give each sequence its own batch entry";
    refuse(refused, mechanism.name(), combination, help)
}

/// Checks the sizes of the gradient of an initial state, and refuses that of one that the call has not, or that several sequences
/// share.
fn check_initial_gradient<T: Real>(mechanism: &impl Stateful, call: &Call<'_, T>, to: &State<T>) -> Result<(), Error> {
    to.check(mechanism.name(), "gradient of the initial state", mechanism.state_shape::<T>(&call.dims)?)?;
    let refused = call.initial_state.is_none() || call.mask.is_packed();
    let combination = "the gradient of the initial state without such a state, or with packed sequences";
    let help = "give the call the state that the gradient is wanted of, and each sequence its own batch entry";
    refuse(refused, mechanism.name(), combination, help)
}

/// Checks the places that a forward call writes to.
pub(crate) fn check_output<T: Real>(
    mechanism: &impl Stateful,
    call: &Call<'_, T>,
    output: &Output<'_, T>,
) -> Result<(), Error> {
    output.out.check(mechanism.name(), "out", call.dims.out())?;
    if let Some(numbers) = &output.denominators {
        check_denominators(mechanism, &call.dims, numbers)?;
    }
    output.final_state.as_ref().map_or(Ok(()), |to| check_final_state(mechanism, call, to, "final_state"))
}

/// Checks what a backward call starts from and where it writes to.
pub(crate) fn check_gradients<T: Real>(
    mechanism: &impl Stateful,
    call: &Call<'_, T>,
    cotangent: &Cotangent<'_, T>,
    gradients: &Gradients<'_, '_, T>,
) -> Result<(), Error> {
    let (operation, dims) = (mechanism.name(), &call.dims);
    cotangent.out.check(operation, "out", dims.out())?;
    cotangent.d_out.check(operation, "d_out", dims.out())?;
    check_denominators(mechanism, dims, cotangent.denominators)?;
    gradients.dq.check(operation, "dq", dims.q())?;
    gradients.dk.check(operation, "dk", key_shape(mechanism, dims))?;
    gradients.dv.check(operation, "dv", dims.v())?;
    let expected: Vec<usize> = mechanism.parameters(dims).iter().map(Parameter::len).collect();
    expect(
        gradients.parameters.iter().map(|p| p.len()).eq(expected.iter().copied()),
        operation,
        "gradients of parameters",
        || format!("tensors of {expected:?} elements"),
        || format!("{:?}", gradients.parameters.iter().map(|p| p.len()).collect::<Vec<_>>()),
    )?;
    if let Some(state) = cotangent.final_state {
        check_final_state(mechanism, call, state, "gradient of the final state")?;
    }
    gradients.initial_state.as_ref().map_or(Ok(()), |to| check_initial_gradient(mechanism, call, to))
}

/// The sizes of a step, which only the state and the token's own lengths tell; `wide` is the token's part whose rows are
/// as wide as a query.
pub(crate) fn token_dims<T: Real>(
    mechanism: &dyn Mechanism,
    token: &Token<'_, T>,
    wide: &[T],
    state: &State<T>,
) -> Result<Dims, Error> {
    InstructionSet::selected().map_err(Error::clone)?;
    let StateShape { batch, kv_heads, .. } = state.shape();
    let width = |numbers: &[T]| numbers.len() / (batch * kv_heads).max(1);
    let (head_dim, value_dim) = (width(wide), width(token.v));
    let heads = token.q.len() / (batch * head_dim).max(1);
    let dims = Dims { batch, heads, kv_heads, queries: 1, keys: 1, head_dim, value_dim };
    dims.check(mechanism.name())?;
    Ok(dims)
}

/// Rows of `width` numbers, without end: where `width` is 0 there are as many as one asks for, which slices do not count.
pub(crate) fn step_rows<T>(numbers: &mut [T], width: usize) -> impl Iterator<Item = &mut [T]> {
    let mut rows = numbers.chunks_exact_mut(width.max(1));
    std::iter::repeat_with(move || rows.next().unwrap_or_default())
}

/// Checks what every mechanism asks of a step of these sizes.
pub(crate) fn check_token<T: Real>(
    mechanism: &impl Stateful,
    dims: &Dims,
    token: &Token<'_, T>,
    state: &State<T>,
    out: &[T],
) -> Result<(), Error> {
    check_state(mechanism, dims, state, "state")?;
    let operation = mechanism.name();
    let Dims { batch, heads, kv_heads, head_dim, value_dim, .. } = *dims;
    for (name, len, shape) in [
        ("q", token.q.len(), [batch, heads, head_dim]),
        ("k", token.k.len(), [batch, kv_heads, mechanism.key_dim(dims)]),
        ("v", token.v.len(), [batch, kv_heads, value_dim]),
        ("out", out.len(), [batch, heads, value_dim]),
    ] {
        let wanted: usize = shape.iter().product();
        let expected = || format!("{wanted} numbers, shape {shape:?}");
        expect(len == wanted, operation, name, expected, || format!("{len} numbers"))?;
    }
    check_parameters(mechanism, dims, token.parameters)
}

fn check_denominators<T: Real>(mechanism: &dyn Mechanism, dims: &Dims, denominators: &[T]) -> Result<(), Error> {
    let shape = mechanism.denominators(dims);
    let expected = || format!("{} numbers, shape {shape:?}", shape.iter().product::<usize>());
    let holds = denominators.len() == shape.iter().product();
    expect(holds, mechanism.name(), "denominators", expected, || denominators.len().to_string())
}

fn key_shape(mechanism: &dyn Mechanism, dims: &Dims) -> [usize; 4] {
    let [batch, heads, keys, _] = dims.k();
    [batch, heads, keys, mechanism.key_dim(dims)]
}
