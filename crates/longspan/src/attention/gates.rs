//! Gates that come with the keys of kernelized attention, as those of [`GatedAttention`](super::GatedAttention) do: one more number in each
//! key says how far all weights of earlier keys fall.

use std::sync::Arc;

use burn::module::Param;
use burn::nn::Initializer;
use burn::tensor::activation::softplus;
use burn::tensor::{Device, Tensor};
use longspan_kernels::{
    Algorithm, Call, Cotangent, Dims, Error, FeatureMap, Gate, GatedAttention, Gradients, Kernel, KernelizedAttention,
    LearnedGates, Mask, Mechanism, Output, Parameter, Parameters, Plan, Real, Reference, Scratch, State, Token, Update,
    ViewMut,
};

use super::AttentionMask;
use crate::backend::tensor::{CHUNK, flattened, repeat_heads, widen};
use crate::backend::{AnyKernel, Running};

/// What gates learn: `rate`, `[kv_heads]`, and `bias`, `[kv_heads, channels]`. They begin as Mamba-2's: a token lets the state fall by a
/// factor of 0.2 to 0.999.
pub(super) fn fresh(kv_heads: usize, channels: usize, device: &Device) -> (Param<Tensor<1>>, Param<Tensor<2>>) {
    let uniform = |min: f64, max: f64| Initializer::Uniform { min: min.ln(), max: max.ln() };
    // So small, a number is nearly the softplus of its logarithm.
    (uniform(1.0, 16.0).init([kv_heads], device), uniform(1e-3, 1e-1).init([kv_heads, channels], device))
}

/// `−e^rate · softplus(x + bias)` of numbers that came with keys, `[batch, kv_heads, tokens, channels]`.
pub(super) fn log_decays(rate: &Param<Tensor<1>>, bias: &Param<Tensor<2>>, x: Tensor<4>) -> Tensor<4> {
    let rate = widen(rate.val()).exp().reshape([1, x.dims()[1], 1, 1]);
    let bias = widen(bias.val()).unsqueeze_dim::<3>(1).unsqueeze::<4>();
    -softplus(x + bias, 1.0) * rate
}

/// What gates have learned, flat, in the kernel's order.
pub(super) fn parameters<'m>(
    rate: &'m Option<Param<Tensor<1>>>,
    bias: &'m Option<Param<Tensor<2>>>,
) -> impl Iterator<Item = Tensor<1>> + 'm {
    rate.iter().map(|x| flattened(x.val())).chain(bias.iter().map(|x| flattened(x.val())))
}

/// The kernel of kernelized attention with these options, and with gates if they say so.
pub(super) fn kernel(options: &Arc<KernelizedAttention>) -> Arc<dyn AnyKernel> {
    if options.gate { Arc::new(GatesWithKeys(options.clone())) } else { options.clone() }
}

/// Queries, keys and values, `[batch, ·, tokens, ·]`, after those of a state by `advance`: where there are `rate` and `bias` chunk after chunk,
/// keys without their last number, with the log decays that it gives, `[batch, heads, tokens, 1]`.
pub(super) fn advance(
    (rate, bias): (&Option<Param<Tensor<1>>>, &Option<Param<Tensor<2>>>),
    qkv: [Tensor<4>; 3],
    mask: &AttentionMask,
    state: &mut Running,
    advance: impl Fn([Tensor<4>; 3], (&AttentionMask, Option<Tensor<4>>), &mut Running) -> Tensor<4>,
) -> Tensor<4> {
    let (Some(rate), Some(bias)) = (rate, bias) else { return advance(qkv, (mask, None), state) };
    let [q, k, v] = qkv;
    let ([batch, _, tokens, width], heads) = (k.dims(), q.dims()[1]);
    let ignored = mask.keys.ignored([batch, tokens], &k.device());
    // Their gates, too, may be anything.
    let k = match &ignored {
        Some(ignored) => k.clone().mask_fill(ignored.clone().expand(k.dims()), 0.0),
        None => k,
    };
    let (qkv, own) = ([q, k.clone().narrow(3, 0, width - 1), v], k.narrow(3, width - 1, 1));
    let chunks = (0..tokens).step_by(CHUNK).map(|first| {
        let count = CHUNK.min(tokens - first);
        let mask = ignored.clone().map(|x| x.narrow(2, first, count).reshape([batch, count]));
        let mask =
            mask.map_or_else(AttentionMask::causal, |ignored| AttentionMask::causal().with_padding_mask(ignored));
        let logs = repeat_heads(log_decays(rate, bias, widen(own.clone().narrow(2, first, count))), heads);
        advance(qkv.each_ref().map(|x| x.clone().narrow(2, first, count)), (&mask, Some(logs)), state)
    });
    Tensor::cat(chunks.collect(), 2)
}

/// [`KernelizedAttention`] with a [gate](KernelizedAttention::gate) for each token that is made of one more number in its key: `[k | x]`,
/// `log_decay = −e^rate · softplus(x + bias)`, with the learned `rate` and `bias`, `[kv_heads]` each.
#[derive(Debug, Clone)]
struct GatesWithKeys(Arc<KernelizedAttention>);

impl GatesWithKeys {
    /// `e^rate` and the bias of a head.
    fn learned<T: Real>(parameters: &[&[T]], head: usize) -> [f64; 2] {
        let [.., rate, bias] = parameters else { unreachable!("checked") };
        [rate[head].to_f64().exp(), bias[head].to_f64()]
    }

    /// The log decay that the last number of a key gives.
    fn log_decay<T: Real>([rate, bias]: [f64; 2], x: T) -> T {
        T::from_f64(-rate * FeatureMap::Softplus.apply(x.to_f64() + bias))
    }

    /// The parameters of positions and of the map, and gates as the kernel takes them.
    fn given<'p, T>(parameters: &[&'p [T]], logs: &'p [T]) -> Vec<&'p [T]> {
        let others = &parameters[..parameters.len().saturating_sub(2)];
        others.iter().copied().chain([logs]).collect()
    }

    fn check_learned<T>(&self, parameters: &[&[T]], kv_heads: usize) -> Result<(), Error> {
        let holds = matches!(parameters, [.., rate, bias] if rate.len() == kv_heads && bias.len() == kv_heads);
        let (expected, got) = (format!("{kv_heads} numbers of each"), "others".into());
        let refused = || Error::Argument { operation: self.name(), argument: "rate and bias", expected, got };
        if holds { Ok(()) } else { Err(refused()) }
    }

    /// The log decays of a checked call's tokens, `[batch, kv_heads, keys]`.
    fn log_decays<T: Real>(call: &Call<'_, T>) -> Vec<T> {
        let Dims { batch, kv_heads, keys, head_dim, .. } = call.dims;
        let units = (0..batch).flat_map(|batch| (0..kv_heads).map(move |head| (batch, head)));
        let of_unit = |(batch, head)| {
            let learned = Self::learned(call.parameters, head);
            let last = move |token| call.k.token(batch, head, token, head_dim + 1)[head_dim];
            (0..keys).map(move |token| Self::log_decay(learned, last(token)))
        };
        units.flat_map(of_unit).collect()
    }
}

impl Mechanism for GatesWithKeys {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        self.0.algorithms()
    }

    fn key_dim(&self, dims: &Dims) -> usize {
        dims.head_dim + 1
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        let mut list = self.0.parameters(dims);
        list.pop();
        list.extend(["rate", "bias"].map(|name| Parameter::new(name, [dims.kv_heads])));
        list
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        self.0.plan(dims, mask)
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        Kernel::check(self, call)?;
        let logs = Self::log_decays(call);
        self.0.reference(&call.with_parameters(&Self::given(call.parameters, &logs)))
    }
}

impl<T: Real> Kernel<T> for GatesWithKeys
where
    KernelizedAttention: Kernel<T>,
    LearnedGates: Kernel<T>,
{
    fn check(&self, call: &Call<'_, T>) -> Result<(), Error> {
        let Dims { batch, kv_heads, keys, .. } = call.dims;
        self.check_learned(call.parameters, kv_heads)?;
        // Any gates do.
        let logs = vec![T::ZERO; batch.saturating_mul(kv_heads).saturating_mul(keys)];
        self.0.check(&call.with_parameters(&Self::given(call.parameters, &logs)))?;
        // Keys are one number wider than the attention within knows.
        let attention = GatedAttention { update: Update::Sum, gate: Gate::Head, ..GatedAttention::default() };
        let gates = &call.parameters[call.parameters.len() - 2..];
        let call = call.with_parameters(gates).with_mask(Mask::causal()).with_initial_state(None);
        LearnedGates { attention, ..LearnedGates::default() }.check(&call)
    }

    fn forward(&self, call: &Call<'_, T>, output: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        self.check(call)?;
        let logs = Self::log_decays(call);
        self.0.forward(&call.with_parameters(&Self::given(call.parameters, &logs)), output, scratch)
    }

    fn backward(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        self.check(call)?;
        let Dims { batch, kv_heads, keys, head_dim, .. } = call.dims;
        let Gradients { dq, mut dk, dv, parameters, initial_state } = gradients;
        let given: Vec<&[T]> = parameters.iter().map(|x| &**x).collect();
        self.check_learned(&given, kv_heads)?;
        let (others, learned) = parameters.split_at_mut(parameters.len().saturating_sub(2));
        let logs = Self::log_decays(call);
        let (mut d_logs, mut d_keys) = (vec![T::ZERO; logs.len()], vec![T::ZERO; call.dims.k().iter().product()]);
        let mut own: Vec<&mut [T]> = others.iter_mut().map(|x| &mut **x).collect();
        own.push(&mut d_logs);
        let dk_own = ViewMut::contiguous(&mut d_keys, call.dims.k());
        let own = Gradients { dq, dk: dk_own, dv, parameters: &mut own, initial_state };
        let given = Self::given(call.parameters, &logs);
        self.0.backward(&call.with_parameters(&given), cotangent, own, scratch)?;
        for head in 0..kv_heads {
            let [rate, bias] = Self::learned(call.parameters, head);
            // Sums over all tokens, which single precision would round.
            let (mut by_rate, mut by_bias) = (0.0, 0.0);
            for (batch, token) in (0..batch).flat_map(|batch| (0..keys).map(move |token| (batch, token))) {
                let at = (batch * kv_heads + head) * keys + token;
                let to = dk.token(batch, head, token, head_dim + 1);
                to[..head_dim].copy_from_slice(&d_keys[at * head_dim..][..head_dim]);
                let d = d_logs[at].to_f64();
                // An ignored token may hold anything.
                let mut own = 0.0;
                if d != 0.0 {
                    let x = call.k.token(batch, head, token, head_dim + 1)[head_dim].to_f64() + bias;
                    own = -rate * d / (1.0 + (-x).exp());
                    by_rate += d * logs[at].to_f64();
                }
                by_bias += own;
                to[head_dim] = T::from_f64(own);
            }
            for (to, by) in learned.iter_mut().zip([by_rate, by_bias]) {
                to[head] = T::from_f64(by);
            }
        }
        Ok(())
    }

    fn empty_state(&self, dims: &Dims) -> Result<State<T>, Error> {
        self.0.empty_state(dims)
    }

    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let kv_heads = state.shape().kv_heads;
        self.check_learned(token.parameters, kv_heads)?;
        let width = (token.k.len() / (state.shape().batch * kv_heads).max(1)).max(1);
        let rows = || token.k.chunks(width);
        let k: Vec<T> = rows().flat_map(|row| &row[..row.len() - 1]).copied().collect();
        let learned = |unit: usize| Self::learned(token.parameters, unit % kv_heads);
        let logs = rows().enumerate().map(|(unit, row)| Self::log_decay(learned(unit), row[row.len() - 1]));
        let logs: Vec<T> = logs.collect();
        let parameters = Self::given(token.parameters, &logs);
        self.0.step(&Token { k: &k, parameters: &parameters, ..*token }, state, out)
    }
}
