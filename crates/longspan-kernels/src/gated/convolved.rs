//! The short convolution before gated attention: queries, keys and values go through one each, `x_t ← SiLU(Σ_s c_s ⊙ x_{t−s})`, before
//! anything else looks at them. What gates are made of does not.

use super::LearnedGates;
use crate::call::{
    Call, Compute, Cotangent, Dims, Gradients, Lines, Mask, Mechanism, Order, Output, Reference, Scratch, State,
    Stateful, View, ViewMut,
};
use crate::convolution::ShortConvolution;
use crate::error::Error;
use crate::simd::Real;

/// Queries, keys and values.
const INPUTS: usize = 3;

/// The part of a state that holds earlier queries; those of keys and values follow.
const PAST: usize = 3;

/// The inputs of a checked call after their convolutions, row-major, and its initial state in parts.
pub(super) struct Convolved<'c, T: 'static> {
    learned: &'c LearnedGates,
    call: &'c Call<'c, T>,
    convolution: ShortConvolution,
    inputs: [Lines<T>; INPUTS],
    initial: Option<States<T>>,
}

/// The state of the attention, and those of the convolutions.
pub(super) struct States<T> {
    pub attention: State<T>,
    parts: [State<T>; INPUTS],
}

impl LearnedGates {
    /// The same on what is convolved already.
    pub(super) fn without_convolution(&self) -> Self {
        Self { convolution: None, ..*self }
    }

    fn short_convolution(&self) -> ShortConvolution {
        let width = self.convolution.unwrap_or(1);
        ShortConvolution { width, silu: true, gated: false, bias: false }
    }

    /// Numbers that a state holds of earlier queries, keys and values of a key/value head.
    pub(super) fn past(&self, dims: &Dims) -> [usize; INPUTS] {
        let before = self.convolution.map_or(0, |width| width.saturating_sub(1));
        let heads = dims.heads.checked_div(dims.kv_heads).unwrap_or(0);
        [heads.saturating_mul(dims.head_dim), dims.head_dim, dims.value_dim].map(|width| width.saturating_mul(before))
    }

    /// Sizes of the convolution of queries, keys or values, each its values.
    fn part(dims: &Dims, n: usize) -> Dims {
        let heads = if n == 0 { dims.heads } else { dims.kv_heads };
        let value_dim = if n == 2 { dims.value_dim } else { dims.head_dim };
        Dims { heads, kv_heads: heads, head_dim: 0, value_dim, ..*dims }
    }
}

impl<T: Real> States<T> {
    pub fn empty(learned: &LearnedGates, dims: &Dims) -> Result<Self, Error> {
        let convolution = learned.short_convolution();
        let part = |n| Stateful::empty_state(&convolution, &LearnedGates::part(dims, n));
        let attention = Stateful::empty_state(&learned.without_convolution(), dims)?;
        Ok(Self { attention, parts: [part(0)?, part(1)?, part(2)?] })
    }

    /// Out of the one that holds them all.
    fn of(learned: &LearnedGates, dims: &Dims, all: &State<T>) -> Result<Self, Error> {
        let mut own = Self::empty(learned, dims)?;
        let heads = own.attention.heads_mut().zip(all.heads());
        heads.for_each(|([sum, gates, ..], [from, from_gates, ..])| {
            sum.copy_from_slice(from);
            gates.copy_from_slice(from_gates);
        });
        for (n, part) in own.parts.iter_mut().enumerate() {
            let len = part.shape().parts[0].max(1);
            let rows = all.each(PAST + n).flat_map(|rows| rows.chunks(len));
            for ([to, _, tokens, ..], from) in part.heads_mut().zip(rows) {
                to.copy_from_slice(from);
                // Rows that are not there are 0.
                tokens[0] = T::from_f64(learned.short_convolution().width as f64 - 1.0);
            }
        }
        Ok(own)
    }

    /// Into the one that holds them all.
    pub fn leave(&self, all: &mut State<T>) {
        all.numbers_mut().fill(T::ZERO);
        for ([sum, gates, ..], [from, from_gates, ..]) in all.heads_mut().zip(self.attention.heads()) {
            sum.copy_from_slice(from);
            gates.copy_from_slice(from_gates);
        }
        for (n, part) in self.parts.iter().enumerate() {
            let mut rows = part.each(0);
            for to in all.heads_mut() {
                let to = to[PAST + n].chunks_mut(part.shape().parts[0].max(1));
                to.zip(&mut rows).for_each(|(to, from)| to.copy_from_slice(from));
            }
        }
    }
}

/// The convolution of queries, keys or values as a call.
fn part<'a, T: Real>(call: &Call<'a, T>, n: usize, initial: Option<&'a States<T>>) -> Call<'a, T> {
    let dims = LearnedGates::part(&call.dims, n);
    let none = |shape| View::contiguous(&[], shape);
    let taps = call.parameters.len() - INPUTS + n;
    Call::new(dims, none(dims.q()), none(dims.k()), [call.q, call.k, call.v][n])
        .with_parameters(&call.parameters[taps..=taps])
        .with_mask(Mask { order: Order::Causal, ..call.mask })
        .with_initial_state(initial.map(|states| &states.parts[n]))
}

impl<'c, T: Real> Convolved<'c, T> {
    /// `last` becomes what the convolutions leave.
    pub fn new(
        learned: &'c LearnedGates,
        call: &'c Call<'c, T>,
        mut last: Option<&mut States<T>>,
        scratch: &mut Scratch<T>,
    ) -> Result<Self, Error> {
        let own = |initial: Option<&States<T>>, n, convolution: &ShortConvolution, out: ViewMut<'_, T>| {
            let last = last.as_mut().map(|last| &mut last.parts[n]);
            Compute::forward(convolution, &part(call, n, initial), Output::new(out).with_final_state(last), scratch)
        };
        Self::by(learned, call, own)
    }

    fn by(
        learned: &'c LearnedGates,
        call: &'c Call<'c, T>,
        mut convolve: impl FnMut(Option<&States<T>>, usize, &ShortConvolution, ViewMut<'_, T>) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let (dims, convolution) = (&call.dims, learned.short_convolution());
        let initial = call.initial_state.map(|all| States::of(learned, dims, all)).transpose()?;
        let shapes = shapes(learned, dims);
        let zeros = |n: usize| Lines::zeros(shapes[n].iter().product());
        let mut inputs = [zeros(0)?, zeros(1)?, zeros(2)?];
        for (n, (to, shape)) in inputs.iter_mut().zip(shapes).enumerate() {
            convolve(initial.as_ref(), n, &convolution, ViewMut::contiguous(to, shape))?;
        }
        copy_gates(call, &call.k, &mut ViewMut::contiguous(&mut inputs[1], shapes[1]), learned);
        Ok(Self { learned, call, convolution, inputs, initial })
    }

    /// The call on what was convolved.
    pub fn call(&self) -> Call<'_, T> {
        let shapes = shapes(self.learned, &self.call.dims);
        let view = |n: usize| View::contiguous(&self.inputs[n], shapes[n]);
        Call::new(self.call.dims, view(0), view(1), view(2))
            .with_parameters(&self.call.parameters[..self.call.parameters.len() - INPUTS])
            .with_mask(self.call.mask)
            .with_initial_state(self.initial.as_ref().map(|states| &states.attention))
    }

    /// The gradients of a call.
    pub fn backward(
        &self,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let Gradients { dq, mut dk, dv, parameters, initial_state } = gradients;
        let (dims, learned) = (&self.call.dims, self.learned);
        let states = |all: &State<T>| States::of(learned, dims, all);
        let last = cotangent.final_state.map(states).transpose()?;
        let mut first = initial_state.is_some().then(|| States::empty(learned, dims)).transpose()?;
        let shapes = shapes(learned, dims);
        let zeros = |n: usize| Lines::zeros(shapes[n].iter().product());
        let [mut by_q, mut by_k, mut by_v] = [zeros(0)?, zeros(1)?, zeros(2)?];
        let (given, taps) = parameters.split_at_mut(parameters.len() - INPUTS);
        let mut given: Vec<&mut [T]> = given.iter_mut().map(|x| &mut **x).collect();
        let own = Gradients {
            dq: ViewMut::contiguous(&mut by_q, shapes[0]),
            dk: ViewMut::contiguous(&mut by_k, shapes[1]),
            dv: ViewMut::contiguous(&mut by_v, shapes[2]),
            parameters: &mut given,
            initial_state: first.as_mut().map(|states| &mut states.attention),
        };
        let from = Cotangent { final_state: last.as_ref().map(|states| &states.attention), ..*cotangent };
        Compute::backward(&learned.without_convolution(), &self.call(), &from, own, scratch)?;
        copy_gates(self.call, &View::contiguous(&by_k, shapes[1]), &mut dk, learned);
        for (n, (to, d)) in [dq, dk, dv].into_iter().zip([&by_q, &by_k, &by_v]).enumerate() {
            let part = part(self.call, n, self.initial.as_ref());
            let ones = vec![T::ONE; self.convolution.denominators(&part.dims).iter().product()];
            let view = |numbers| View::contiguous(numbers, shapes[n]);
            let from = Cotangent {
                out: view(&self.inputs[n]),
                denominators: &ones,
                d_out: view(d),
                final_state: last.as_ref().map(|states| &states.parts[n]),
            };
            let own = Gradients {
                dq: ViewMut::contiguous(&mut [], part.dims.q()),
                dk: ViewMut::contiguous(&mut [], part.dims.k()),
                dv: to,
                parameters: &mut [&mut *taps[n]],
                initial_state: first.as_mut().map(|states| &mut states.parts[n]),
            };
            Compute::backward(&self.convolution, &part, &from, own, scratch)?;
        }
        if let (Some(to), Some(first)) = (initial_state, first) {
            first.leave(to);
        }
        Ok(())
    }
}

impl<'c> Convolved<'c, f64> {
    /// By the definition of convolutions.
    pub fn by_definition(learned: &'c LearnedGates, call: &'c Call<'c, f64>) -> Result<Self, Error> {
        Self::by(learned, call, |initial, n, convolution, mut to| {
            let Reference { out, .. } = convolution.reference(&part(call, n, initial))?;
            let [_, heads, tokens, width] = LearnedGates::part(&call.dims, n).out();
            for (row, from) in out.chunks(width.max(1)).enumerate() {
                let (unit, token) = (row / tokens, row % tokens);
                to.token(unit / heads, unit % heads, token, width).copy_from_slice(from);
            }
            Ok(())
        })
    }
}

/// Of queries, keys with what gates are made of, and values.
fn shapes(learned: &LearnedGates, dims: &Dims) -> [[usize; 4]; INPUTS] {
    let [batch, heads, keys, _] = dims.k();
    [dims.q(), [batch, heads, keys, learned.key_dim(dims)], dims.v()]
}

/// Copies what gates are made of, the later columns of keys.
fn copy_gates<T: Real>(call: &Call<'_, T>, from: &View<'_, T>, to: &mut ViewMut<'_, T>, learned: &LearnedGates) {
    let Dims { batch, kv_heads, keys, head_dim, .. } = call.dims;
    let width = learned.key_dim(&call.dims);
    for (unit, key) in (0..batch * kv_heads).flat_map(|unit| (0..keys).map(move |key| (unit, key))) {
        let (batch, head) = (unit / kv_heads, unit % kv_heads);
        to.token(batch, head, key, width)[head_dim..].copy_from_slice(&from.token(batch, head, key, width)[head_dim..]);
    }
}
