//! Gates that come with the keys, a short convolution, and sequences read in both directions: gated attention as a layer of a model has it.

use super::convolved::{Convolved, States};
use super::reversed::Reversed;
use super::{Gate, GatedAttention, cost, state, step};
use crate::call::{
    Call, CombineGradients, Compute, Cotangent, Dims, Gradients, Lines, Mask, Mechanism, Order, Output, Parameter,
    Parameters, Reference, Scratch, State, StateShape, Stateful, Step, Token, View, ViewMut, check_call,
    check_gradients, check_initial_state, check_output, check_reference, check_sizes, kernels, step_rows,
};
use crate::convolution::ShortConvolution;
use crate::error::{Error, expect, refuse};
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::{PullBackFeatures, load_features};
use crate::plan::{Algorithm, Plan};
use crate::simd::rows::{Rows, padded};
use crate::simd::{Real, dispatch};
use crate::threads;

/// [`GatedAttention`] whose gates are made of more numbers in each key: `[k | x | y]`, where `x` has as many numbers as a gate, and
/// `y` is one under the delta rule.
///
/// `log_decay = −e^rate · softplus(x + bias)` and `β = beta_max · σ(y)`, with the learned `rate`, `[kv_heads]`, and `bias`, `[kv_heads]`
/// or `[kv_heads, head_dim]`: the gates of Mamba-2, gated DeltaNet and KDA. Without a gate there is neither.
///
/// With a convolution queries, keys and values (but not `x` and `y`) are first `SiLU(Σ_s c_s ⊙ x_{t−s})` of the latest tokens, channel by
/// channel, with the learned taps `c`: `query_taps`, `[heads, width, head_dim]`, `key_taps` and `value_taps`, `[kv_heads, width, ·]`.
///
/// Under a bidirectional mask a row is the sum of two: that of its sequence read from the start, and that of the same read from the end.
/// States are those of [`GatedAttention`]; with a convolution, its parts 3 to 5 are the latest `width − 1` rows of queries, keys and values
/// before it, oldest first, and states have no sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearnedGates {
    /// The recurrence.
    pub attention: GatedAttention,
    /// What `β` is less than, from 0 to 2. Above 1 a token can turn what the state holds for its key into the opposite.
    pub beta_max: f64,
    /// How many tokens the convolution sees, a token's own among them; none stands for no convolution. The models named have 4.
    pub convolution: Option<usize>,
}

impl Default for LearnedGates {
    fn default() -> Self {
        Self { attention: GatedAttention::default(), beta_max: 1.0, convolution: None }
    }
}

/// Gates as parameters of a call.
fn slices<T: Real>(gates: &[Lines<T>]) -> Vec<&[T]> {
    gates.iter().map(|numbers| &**numbers).collect()
}

struct Head<'a, T> {
    rate: T,
    bias: &'a [T],
}

/// Memory for the gate of one token.
struct Row<T> {
    /// What the softplus is taken of.
    x: Vec<T>,
    /// The softplus, or the gradient of its argument; whole cache lines.
    y: Vec<T>,
    /// The softplus beside its gradient.
    phi: Vec<T>,
}

impl<T: Real> Row<T> {
    fn new(len: usize) -> Self {
        let wide = || vec![T::ZERO; padded::<T>(len)];
        Self { x: vec![T::ZERO; len], y: wide(), phi: wide() }
    }
}

impl<T: Real> Head<'_, T> {
    /// `−e^rate · softplus(x + bias)`.
    fn log_decays(&self, x: &[T], row: &mut Row<T>, to: &mut [T]) {
        let Row { x: shifted, y, .. } = row;
        self.softplus(x, shifted, y);
        to.iter_mut().zip(&*y).for_each(|(to, &y)| *to = -self.rate * y);
    }

    fn softplus(&self, x: &[T], shifted: &mut [T], to: &mut [T]) {
        shifted.iter_mut().zip(x).zip(self.bias).for_each(|((to, &x), &bias)| *to = x + bias);
        let (stride, to_row) = (shifted.len(), to.len());
        load_features((FeatureMap::Softplus, T::ZERO), Rows { data: shifted, stride }, (1, stride), None, (to, to_row));
    }

    /// The gradient of `x` from that of its log decays, where that is not 0: an ignored token may hold anything.
    fn pull_back(&self, x: &[T], d: &[T], row: &mut Row<T>, to: &mut [T]) {
        let Row { x: shifted, y, phi } = row;
        self.softplus(x, shifted, phi);
        y[..d.len()].copy_from_slice(d);
        let (stride, row_length) = (shifted.len(), y.len());
        let x = Rows { data: shifted, stride };
        dispatch(PullBackFeatures { map: FeatureMap::Softplus, x, phi, d: y, count: 1, width: stride, row_length });
        for ((to, &y), &d) in to.iter_mut().zip(&*y).zip(d) {
            *to = if d == T::ZERO { T::ZERO } else { -self.rate * y };
        }
    }
}

fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

impl LearnedGates {
    /// What no call and no state can have.
    fn check_learned(&self) -> Result<(), Error> {
        let expected = || "a number above 0, at most 2".into();
        let holds = self.beta_max > 0.0 && self.beta_max <= 2.0;
        expect(holds, self.name(), "beta_max", expected, || self.beta_max.to_string())?;
        let (widths, width) = (1..=ShortConvolution::LARGEST_WIDTH, self.convolution.unwrap_or(1));
        let expected = || format!("between 1 and {}", widths.end());
        expect(widths.contains(&width), self.name(), "convolution", expected, || width.to_string())
    }

    fn check_options(&self, dims: &Dims, mask: &Mask<'_>) -> Result<(), Error> {
        self.check_learned()?;
        self.attention.check_options(dims, &Mask { order: Order::Causal, ..*mask })?;
        let expected = || format!("as many as keys, {}, in both directions and behind a convolution", dims.keys);
        let holds = dims.queries == dims.keys || mask.order == Order::Causal && self.convolution.is_none();
        expect(holds, self.name(), "queries", expected, || dims.queries.to_string())
    }

    fn check_sum(&self) -> Result<(), Error> {
        let combination = "the sum of two states behind a convolution";
        let help = "what the later tokens add depends on those right before them: give the earlier state to their call";
        refuse(self.convolution.is_some(), self.name(), combination, help)
    }

    /// What key/value head `kv_head` has learned, for `len` numbers of a gate.
    fn head<'a, T: Real>(&self, parameters: &[&'a [T]], kv_head: usize, len: usize) -> Head<'a, T> {
        match parameters {
            [rate, bias, ..] if len > 0 => Head { rate: rate[kv_head].exp(), bias: &bias[kv_head * len..][..len] },
            _ => Head { rate: T::ZERO, bias: &[] },
        }
    }

    fn beta<T: Real>(&self, y: T) -> T {
        T::from_f64(self.beta_max) * sigmoid(y)
    }

    /// The gates of a checked call, as [`GatedAttention`] takes them.
    fn gates<T: Real>(&self, call: &Call<'_, T>) -> Result<Vec<Lines<T>>, Error> {
        let Dims { batch, kv_heads, keys, head_dim, .. } = call.dims;
        let (len, delta) = (self.attention.gate_len(head_dim), usize::from(self.attention.is_delta()));
        let mut logs = Lines::zeros(batch * kv_heads * keys * len)?;
        let mut betas = Lines::zeros(batch * kv_heads * keys * delta)?;
        let units =
            (0..batch * kv_heads).zip(step_rows(&mut logs, keys * len)).zip(step_rows(&mut betas, keys * delta));
        threads::share_many(batch * kv_heads * keys * (len + delta), units, |((unit, logs), betas)| {
            let (batch, kv_head) = (unit / kv_heads, unit % kv_heads);
            let (head, rows) = (self.head(call.parameters, kv_head, len), call.k.rows(batch, kv_head));
            let mut row = Row::new(len);
            for token in 0..keys {
                let (x, y) = rows.row(token, head_dim + len + delta)[head_dim..].split_at(len);
                head.log_decays(x, &mut row, &mut logs[token * len..][..len]);
                y.iter().for_each(|&y| betas[token] = self.beta(y));
            }
        });
        let gate = (self.attention.gate != Gate::None).then_some(logs);
        Ok(gate.into_iter().chain(self.attention.is_delta().then_some(betas)).collect())
    }

    /// A causal call, from the first token on.
    fn forward_causal<T: Real>(
        &self,
        call: &Call<'_, T>,
        to: Output<'_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let gates = self.gates(call)?;
        Compute::forward(&self.attention, &call.with_parameters(&slices(&gates)), to, scratch)
    }

    fn backward_causal<T: Real>(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let Gradients { dq, mut dk, dv, parameters, initial_state } = gradients;
        let gates = self.gates(call)?;
        let given = slices(&gates);
        let mut found = gates.iter().map(|x| Lines::zeros(x.len())).collect::<Result<Vec<_>, _>>()?;
        let mut d_gates: Vec<&mut [T]> = found.iter_mut().map(|x| &mut **x).collect();
        let own = Gradients { dq, dk: dk.reborrow(), dv, parameters: &mut d_gates, initial_state };
        Compute::backward(&self.attention, &call.with_parameters(&given), cotangent, own, scratch)?;
        self.pull_back(call, &gates, &found, &mut dk, parameters);
        Ok(())
    }

    /// From gradients of gates to those of the keys' later columns, and of what is learned.
    fn pull_back<T: Real>(
        &self,
        call: &Call<'_, T>,
        gates: &[Lines<T>],
        d_gates: &[Lines<T>],
        dk: &mut ViewMut<'_, T>,
        parameters: &mut [&mut [T]],
    ) {
        let Dims { batch, kv_heads, keys, head_dim, .. } = call.dims;
        let (len, delta) = (self.attention.gate_len(head_dim), usize::from(self.attention.is_delta()));
        let (dk, width) = (dk.shared(), head_dim + len + delta);
        let (rates, biases) = match parameters {
            [rates, biases] => (&mut **rates, &mut **biases),
            _ => Default::default(),
        };
        let heads = (0..kv_heads).zip(step_rows(rates, len.min(1))).zip(step_rows(biases, len));
        threads::share_many(batch * kv_heads * keys * (len + delta), heads, |((kv_head, d_rate), d_bias)| {
            let head = self.head(call.parameters, kv_head, len);
            // Sums over all tokens, which single precision would round.
            let (mut by_rate, mut by_bias) = (0.0, vec![0.0; len]);
            let mut row = Row::new(len);
            for (batch, token) in (0..batch).flat_map(|batch| (0..keys).map(move |token| (batch, token))) {
                let at = (batch * kv_heads + kv_head) * keys + token;
                let given = call.k.rows(batch, kv_head).row(token, width);
                // SAFETY: each (batch, head, token) belongs to one task.
                let to = unsafe { dk.row(batch, kv_head, token, width) };
                let (x, own) = (&given[head_dim..][..len], &mut to[head_dim..][..len]);
                if len > 0 {
                    let at = at * len..(at + 1) * len;
                    head.pull_back(x, &d_gates[0][at.clone()], &mut row, own);
                    by_bias.iter_mut().zip(&*own).for_each(|(sum, x)| *sum += x.to_f64());
                    let both = d_gates[0][at.clone()].iter().zip(&gates[0][at]).filter(|(d, _)| **d != T::ZERO);
                    both.for_each(|(&d, &g)| by_rate += (d * g).to_f64());
                }
                if delta == 1 {
                    let (beta, d) = (gates[gates.len() - 1][at], d_gates[gates.len() - 1][at]);
                    let share = T::ONE - beta * T::from_f64(1.0 / self.beta_max);
                    to[width - 1] = if d == T::ZERO { T::ZERO } else { d * beta * share };
                }
            }
            d_rate.iter_mut().for_each(|to| *to = T::from_f64(by_rate));
            d_bias.iter_mut().zip(&by_bias).for_each(|(to, sum)| *to = T::from_f64(*sum));
        });
    }
}

impl Mechanism for LearnedGates {
    fn name(&self) -> &'static str {
        self.attention.name()
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        self.attention.algorithms()
    }

    fn key_dim(&self, dims: &Dims) -> usize {
        dims.head_dim + self.attention.gate_len(dims.head_dim) + usize::from(self.attention.is_delta())
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let bias = match self.attention.gate {
            Gate::None => None,
            Gate::Head => Some(Parameter::new("bias", [dims.kv_heads])),
            Gate::Channel => Some(Parameter::new("bias", [dims.kv_heads, dims.head_dim])),
        };
        let gates = bias.map(|bias| [Parameter::new("rate", [dims.kv_heads]), bias]);
        let taps = self.convolution.map(|width| {
            [
                Parameter::new("query_taps", [dims.heads, width, dims.head_dim]),
                Parameter::new("key_taps", [dims.kv_heads, width, dims.head_dim]),
                Parameter::new("value_taps", [dims.kv_heads, width, dims.value_dim]),
            ]
        });
        gates.into_iter().flatten().chain(taps.into_iter().flatten()).collect()
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        check_sizes(self, dims, mask)?;
        self.check_options(dims, mask)?;
        let passes = if mask.order == Order::Causal { 1.0 } else { 2.0 };
        Ok(cost::plan(&self.attention, dims, passes))
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        check_reference(self, call)?;
        if self.convolution.is_some() {
            self.check_options(&call.dims, &call.mask)?;
            let convolved = Convolved::by_definition(self, call)?;
            return self.without_convolution().reference(&convolved.call());
        }
        let directed = |call: &Call<'_, f64>| {
            let gates = self.gates(call)?;
            self.attention.reference(&call.with_parameters(&slices(&gates)))
        };
        let mut forwards = directed(&causal(call))?;
        if call.mask.order == Order::Bidirectional {
            let reversed = Reversed::new(call, self.key_dim(&call.dims))?;
            let backwards = directed(&reversed.call(call))?;
            let [_, _, queries, width] = call.dims.out();
            let rows =
                forwards.out.chunks_mut((queries * width).max(1)).zip(backwards.out.chunks((queries * width).max(1)));
            for (to, from) in rows {
                let rows = to.chunks_mut(width).zip(from.chunks(width).rev());
                rows.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, x)| *to += x));
            }
        }
        Ok(forwards)
    }
}

/// The call from the first token to the last.
fn causal<'a, T: Copy>(call: &Call<'a, T>) -> Call<'a, T> {
    call.with_mask(Mask { order: Order::Causal, ..call.mask })
}

kernels!(LearnedGates);

impl Compute for LearnedGates {
    fn check<T: Real>(&self, call: &Call<'_, T>) -> Result<(), Error> {
        check_call(self, call)?;
        self.check_options(&call.dims, &call.mask)?;
        check_initial_state(self, call)?;
        self.attention.check_sequences(&call.dims, &call.mask.sequences(&call.dims))
    }

    fn forward<T: Real>(&self, call: &Call<'_, T>, to: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        Compute::check(self, call)?;
        check_output(self, call, &to)?;
        if self.convolution.is_some() {
            let Output { out, denominators, final_state } = to;
            let mut last = final_state.is_some().then(|| States::empty(self, &call.dims)).transpose()?;
            let convolved = Convolved::new(self, call, last.as_mut(), scratch)?;
            let own = last.as_mut().map(|states| &mut states.attention);
            let own = Output { out, denominators, final_state: own };
            Compute::forward(&self.without_convolution(), &convolved.call(), own, scratch)?;
            if let (Some(to), Some(last)) = (final_state, last) {
                last.leave(to);
            }
            return Ok(());
        }
        if call.mask.order == Order::Causal {
            return self.forward_causal(call, to, scratch);
        }
        let Output { mut out, denominators, .. } = to;
        let reversed = Reversed::new(call, self.key_dim(&call.dims))?;
        let mut backwards = Lines::zeros(call.dims.out().iter().product())?;
        let own = Output::new(ViewMut::contiguous(&mut backwards, call.dims.out()));
        self.forward_causal(&reversed.call(call), own, scratch)?;
        let own = Output { denominators, ..Output::new(out.reborrow()) };
        self.forward_causal(&causal(call), own, scratch)?;
        super::reversed::add(&backwards, call.dims.out(), &mut out);
        Ok(())
    }

    fn backward<T: Real>(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        Compute::check(self, call)?;
        check_gradients(self, call, cotangent, &gradients)?;
        if self.convolution.is_some() {
            return Convolved::new(self, call, None, scratch)?.backward(cotangent, gradients, scratch);
        }
        if call.mask.order == Order::Causal {
            return self.backward_causal(call, cotangent, gradients, scratch);
        }
        let Gradients { mut dq, mut dk, mut dv, parameters, initial_state } = gradients;
        let mut slices: Vec<&mut [T]> = parameters.iter_mut().map(|x| &mut **x).collect();
        let own = Gradients {
            dq: dq.reborrow(),
            dk: dk.reborrow(),
            dv: dv.reborrow(),
            parameters: &mut slices,
            initial_state,
        };
        self.backward_causal(&causal(call), cotangent, own, scratch)?;
        let dims = &call.dims;
        let reversed = Reversed::new(call, self.key_dim(dims))?;
        let d_out = super::reversed::rows(&cotangent.d_out, dims.out())?;
        let d_out = View::contiguous(&d_out, dims.out());
        let shapes = [dims.q(), reversed.key_shape(dims), dims.v()];
        let zeros = |shape: [usize; 4]| Lines::zeros(shape.iter().product());
        let [mut back_q, mut back_k, mut back_v] = [zeros(shapes[0])?, zeros(shapes[1])?, zeros(shapes[2])?];
        let mut learned = parameters.iter().map(|x| Lines::zeros(x.len())).collect::<Result<Vec<_>, _>>()?;
        let mut slices: Vec<&mut [T]> = learned.iter_mut().map(|x| &mut **x).collect();
        let own = Gradients {
            dq: ViewMut::contiguous(&mut back_q, shapes[0]),
            dk: ViewMut::contiguous(&mut back_k, shapes[1]),
            dv: ViewMut::contiguous(&mut back_v, shapes[2]),
            parameters: &mut slices,
            initial_state: None,
        };
        // The recurrence's gradient does not look at outputs.
        let cotangent = Cotangent { out: d_out, d_out, ..*cotangent };
        self.backward_causal(&reversed.call(call), &cotangent, own, scratch)?;
        for (from, shape, to) in
            [(&back_q, shapes[0], &mut dq), (&back_k, shapes[1], &mut dk), (&back_v, shapes[2], &mut dv)]
        {
            super::reversed::add(from, shape, to);
        }
        for (to, from) in parameters.iter_mut().zip(&learned) {
            to.iter_mut().zip(from.iter()).for_each(|(to, &x)| *to += x);
        }
        Ok(())
    }
}

impl Step for LearnedGates {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let StateShape { batch, kv_heads, .. } = state.shape();
        let delta = usize::from(self.attention.is_delta());
        let width = (token.k.len() / (batch * kv_heads).max(1)).saturating_sub(delta);
        let head_dim = match self.attention.gate {
            Gate::None => width,
            Gate::Head => width.saturating_sub(1),
            Gate::Channel => width / 2,
        };
        let len = self.attention.gate_len(head_dim);
        let gates = |unit: usize, logs: &mut [T]| {
            let given = &token.k[unit * (head_dim + len + delta)..][head_dim..][..len + delta];
            let (x, y) = given.split_at(len);
            let head = self.head(token.parameters, unit % kv_heads, len);
            let softplus = |x| FeatureMap::Softplus.apply(x);
            logs.iter_mut().zip(x).zip(head.bias).for_each(|((to, &x), &bias)| *to = -head.rate * softplus(x + bias));
            y.first().map(|&y| self.beta(y))
        };
        let taps = self.convolution.map(|_| {
            let [.., q, k, v] = token.parameters else { return [&[][..]; 3] };
            [*q, *k, *v]
        });
        step::step(self, &self.attention, head_dim, token, (gates, taps), state, out)
    }
}

impl Stateful for LearnedGates {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        self.check_learned()?;
        Ok(state::shape(&self.attention, dims, self.convolution.map(|width| (width, self.past(dims)))))
    }

    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        self.attention.check_marks(state, argument)
    }

    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, parameters: &[&[T]]) -> Result<State<T>, Error> {
        self.check_sum()?;
        Stateful::combine(&self.attention, earlier, later, parameters)
    }

    fn combine_backward<T: Real>(
        &self,
        earlier: &State<T>,
        later: &State<T>,
        parameters: &[&[T]],
        d_combined: &State<T>,
    ) -> Result<CombineGradients<T>, Error> {
        self.check_sum()?;
        Stateful::combine_backward(&self.attention, earlier, later, parameters, d_combined)
    }
}
