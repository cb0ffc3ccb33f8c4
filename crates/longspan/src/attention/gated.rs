//! Gated linear attention and the delta rule: a state that forgets by what each token says, `S_t = D_t S_{t−1} + k_t u_tᵀ` and
//! `o_t = S_tᵀ q_t`, over `√head_dim` unless queries and keys have length 1. Linear in the number of tokens.
//!
//! In tensor operations tokens are taken in chunks: the decays between all pairs of a chunk are exponentials of sums that are at most 0,
//! and what the delta rule adds is found row after row.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Bool, Device, Tensor};
use longspan_kernels::{self as kernels, Gate, LearnedGates, Mechanism, Order, Update};
use serde::{Deserialize, Serialize};

use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, convolution, gates};
use crate::backend::pairs::Pairs;
use crate::backend::tensor::{flattened, narrow_float, repeat_heads, sigmoid, widen, widen_type};
use crate::backend::{AnyKernel, Layer, Running, Sums};
use crate::error::{Result, config};

/// By what a state decays with each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateConfig {
    /// Nothing.
    None,
    /// One number a head.
    #[default]
    Head,
    /// One number a channel of the key.
    Channel,
}

/// Gated linear attention: a state decays, and a token adds its value. Mamba-2's SSD and simple GLA have a gate a head, GLA one a channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedOptions {
    /// `head` (default), `channel` or `none`.
    pub gate: GateConfig,
    /// Whether queries and keys are divided by their length; yes by default.
    pub l2_norm: bool,
    /// How many tokens a short convolution of queries, keys and values sees, before anything else; none by default.
    pub convolution: Option<usize>,
}

impl Default for GatedOptions {
    fn default() -> Self {
        Self { gate: GateConfig::Head, l2_norm: true, convolution: None }
    }
}

/// The delta rule (DeltaNet): a token adds `β` times what its value has over what the state already gives for its key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeltaOptions {
    /// What `β` is less than, at most 2; 1 by default. Above 1 a token can turn what the state holds for its key into the opposite.
    pub beta_max: f64,
    /// How many tokens a short convolution of queries, keys and values sees, before anything else; none by default. DeltaNet has 4.
    pub convolution: Option<usize>,
}

impl Default for DeltaOptions {
    fn default() -> Self {
        Self { beta_max: 1.0, convolution: None }
    }
}

/// The delta rule on a state that decays: gated DeltaNet with a gate a head, KDA with one a channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedDeltaOptions {
    /// `head` (default) or `channel`.
    pub gate: GateConfig,
    /// What `β` is less than, at most 2; 1 by default.
    pub beta_max: f64,
    /// How many tokens a short convolution of queries, keys and values sees, before anything else; none by default. Gated DeltaNet and KDA
    /// have 4.
    pub convolution: Option<usize>,
}

impl Default for GatedDeltaOptions {
    fn default() -> Self {
        Self { gate: GateConfig::Head, beta_max: 1.0, convolution: None }
    }
}

/// Attention by a state that decays, over heads. Its keys are wider than its queries, by the numbers that gates are made of:
/// `[k | x | y]` with `log_decay = −e^rate · softplus(x + bias)` and, under the delta rule, `β = beta_max · σ(y)`.
///
/// Under a bidirectional mask each row is the sum of two: its sequence read from the start, and read from the end.
#[derive(Module, Debug)]
pub struct GatedAttention {
    /// `[kv_heads]`; starts at random from 0 to log 16.
    pub rate: Option<Param<Tensor<1>>>,
    /// `[kv_heads, 1]`, or `[kv_heads, head_dim]` with a gate a channel; starts at random so that a token decays the state by a factor of
    /// 0.2 to 0.999, as in Mamba-2.
    pub bias: Option<Param<Tensor<2>>>,
    /// Of the convolutions, `[heads, width, head_dim]`, for keys and values `[kv_heads, width, head_dim]`.
    pub query_taps: Option<Param<Tensor<3>>>,
    /// Of keys.
    pub key_taps: Option<Param<Tensor<3>>>,
    /// Of values.
    pub value_taps: Option<Param<Tensor<3>>>,
    #[module(skip)]
    gates: Arc<LearnedGates>,
    #[module(skip)]
    heads: Heads,
}

/// Tokens that are taken at a time in tensor operations.
const CHUNK: usize = 16;

fn module(
    update: Update,
    options: GatedOptions,
    beta_max: f64,
    heads: Heads,
    device: &Device,
) -> Result<GatedAttention> {
    let GatedOptions { gate, l2_norm, convolution } = options;
    let gate = match gate {
        GateConfig::None => Gate::None,
        GateConfig::Head => Gate::Head,
        GateConfig::Channel => Gate::Channel,
    };
    let (width, most) = (convolution.unwrap_or(1), kernels::ShortConvolution::LARGEST_WIDTH);
    config((1..=most).contains(&width), "AttentionConfig", "convolution", format_args!("1 to {most}"), width)?;
    config(beta_max > 0.0 && beta_max <= 2.0, "AttentionConfig", "beta_max", "above 0 and at most 2", beta_max)?;
    // Rows of length 1 have products of at most 1 however wide they are.
    let scale = l2_norm.then_some(1.0);
    let attention = kernels::GatedAttention { update, gate, l2_norm, scale };
    let kernel = LearnedGates { attention, beta_max, convolution };
    let channels = if gate == Gate::Channel { heads.head_dim } else { 1 };
    let gated = gate != Gate::None;
    let (rate, bias) = gated.then(|| gates::fresh(heads.kv_heads, channels, device)).unzip();
    let taps = |heads_of| convolution.map(|width| convolution::fresh(heads_of, width, heads.head_dim, device));
    let [query_taps, key_taps, value_taps] = [heads.heads, heads.kv_heads, heads.kv_heads].map(taps);
    Ok(GatedAttention { rate, bias, query_taps, key_taps, value_taps, gates: Arc::new(kernel), heads })
}

impl Options for GatedOptions {
    type Module = GatedAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<GatedAttention> {
        module(Update::Sum, self.clone(), 1.0, heads, device)
    }
}

impl Options for DeltaOptions {
    type Module = GatedAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<GatedAttention> {
        let options = GatedOptions { gate: GateConfig::None, l2_norm: true, convolution: self.convolution };
        module(Update::Delta, options, self.beta_max, heads, device)
    }
}

impl Options for GatedDeltaOptions {
    type Module = GatedAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<GatedAttention> {
        let expected = "head or channel; without a gate it is the mechanism delta";
        config(self.gate != GateConfig::None, "GatedDeltaOptions", "gate", expected, "none")?;
        let options = GatedOptions { gate: self.gate, l2_norm: true, convolution: self.convolution };
        module(Update::Delta, options, self.beta_max, heads, device)
    }
}

attention_module!(GatedAttention);

/// What a sequence brings, `[batch, heads, tokens, ·]` each, ignored tokens nothing.
struct Tokens {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    /// One number a token, or one a channel.
    logs: Option<Tensor<4>>,
    beta: Option<Tensor<4>>,
}

impl Tokens {
    fn map(&self, f: impl Fn(Tensor<4>) -> Tensor<4>) -> Self {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| f(x.clone()));
        Self { q, k, v, logs: self.logs.clone().map(&f), beta: self.beta.clone().map(&f) }
    }

    /// The outputs of all tokens after a state, `[batch, heads, head_dim, value_dim]`, which becomes that after the last.
    fn advance(&self, state: &mut Tensor<4>) -> Tensor<4> {
        let tokens = self.q.dims()[2];
        let chunks = (0..tokens).step_by(CHUNK).map(|first| {
            let count = CHUNK.min(tokens - first);
            self.map(|x| x.narrow(2, first, count)).advance_chunk(state)
        });
        Tensor::cat(chunks.collect(), 2)
    }

    fn advance_chunk(self, state: &mut Tensor<4>) -> Tensor<4> {
        let Self { q, k, v, logs, beta } = self;
        let [.., count, width] = q.dims();
        let Some(logs) = logs else {
            let pairs = |rows: &Tensor<4>, diagonal| rows.clone().matmul(k.clone().swap_dims(2, 3)).tril(diagonal);
            let u = updates(&v, beta, || (pairs(&k, -1), k.clone().matmul(state.clone())));
            let out = q.clone().matmul(state.clone()) + pairs(&q, 0).matmul(u.clone());
            *state = state.clone() + k.swap_dims(2, 3).matmul(u);
            return out;
        };
        // The decay from the token of a column to that of a row, `[batch, heads, rows, columns, 1 or head_dim]`: sums of what stands
        // between them, not differences of sums from the start.
        let [batch, heads, _, channels] = logs.dims();
        let shape = [batch, heads, count, count, channels];
        let later = Tensor::<2, Bool>::tril_mask([count, count], -1, &q.device()).reshape([1, 1, count, count, 1]);
        let between = logs.clone().unsqueeze_dim::<5>(3).expand(shape).mask_fill(later.expand(shape), 0.0).cumsum(2);
        let decays = between.exp();
        let pairs = |rows: &Tensor<4>, diagonal| {
            let weights = if channels == 1 {
                rows.clone().matmul(k.clone().swap_dims(2, 3)) * decays.clone().squeeze_dim::<4>(4)
            } else {
                let both = rows.clone().unsqueeze_dim::<5>(3) * k.clone().unsqueeze_dim::<5>(2);
                (both * decays.clone()).sum_dim(4).squeeze_dim::<4>(4)
            };
            weights.tril(diagonal)
        };
        let from_start = logs.cumsum(2).exp();
        let u = updates(&v, beta, || (pairs(&k, -1), (k.clone() * from_start.clone()).matmul(state.clone())));
        let out = (q.clone() * from_start.clone()).matmul(state.clone()) + pairs(&q, 0).matmul(u.clone());
        let to_end = decays.narrow(2, count - 1, 1).squeeze_dim::<4>(2);
        let whole = from_start.narrow(2, count - 1, 1).swap_dims(2, 3).expand([batch, heads, width, 1]);
        *state = state.clone() * whole + (k * to_end).swap_dims(2, 3).matmul(u);
        out
    }
}

/// What tokens add to the state beside their keys: their values, or `U` of `(I + diag(β) M) U = diag(β) (V − K̂ S)`, row after row;
/// `known` gives `M` and `K̂ S`.
fn updates(v: &Tensor<4>, beta: Option<Tensor<4>>, known: impl FnOnce() -> (Tensor<4>, Tensor<4>)) -> Tensor<4> {
    let Some(beta) = beta else { return v.clone() };
    let (pairs, known) = known();
    let given = beta.clone() * (v.clone() - known);
    let mut rows = given.clone().narrow(2, 0, 1);
    for i in 1..v.dims()[2] {
        let weights = pairs.clone().narrow(2, i, 1).narrow(3, 0, i) * beta.clone().narrow(2, i, 1);
        let row = given.clone().narrow(2, i, 1) - weights.matmul(rows.clone());
        rows = Tensor::cat(vec![rows, row], 2);
    }
    rows
}

impl GatedAttention {
    /// Taps of queries, keys and values; none without a convolution.
    fn taps(&self) -> impl Iterator<Item = &Param<Tensor<3>>> {
        [&self.query_taps, &self.key_taps, &self.value_taps].into_iter().flatten()
    }

    /// Rows of queries, keys and values before those of a call that its convolution sees, `[batch, heads, width − 1, head_dim]` each; none
    /// without one.
    fn empty_past(&self, like: &Tensor<4>) -> Vec<Tensor<4>> {
        let place = (&like.device(), widen_type(like.dtype()));
        let rows = |taps: &Param<Tensor<3>>| {
            let [heads, width, head_dim] = taps.dims();
            (width > 1).then(|| Tensor::zeros([like.dims()[0], heads, width - 1, head_dim], place))
        };
        self.taps().filter_map(rows).collect()
    }

    /// Queries, keys and values behind their convolutions, after those of `past`, which moves on.
    fn convolved(&self, qkv: [Tensor<4>; 3], past: &mut [Tensor<4>]) -> [Tensor<4>; 3] {
        let mut past = past.iter_mut();
        let mut taps = self.taps();
        qkv.map(|x| {
            let Some(taps) = taps.next() else { return x };
            let ([_, seen, head_dim], [.., rows, width]) = (taps.dims(), x.dims());
            let own = widen(x.clone().narrow(3, 0, head_dim));
            let own = match past.next() {
                None => own,
                Some(past) => {
                    let all = Tensor::cat(vec![past.clone(), own], 2);
                    *past = all.clone().narrow(2, rows, seen - 1);
                    all
                }
            };
            let own = silu(convolution::convolve(&own, &widen(taps.val())));
            if width == head_dim {
                return own;
            }
            // What gates are made of.
            Tensor::cat(vec![own, widen(x.narrow(3, head_dim, width - head_dim))], 3)
        })
    }

    /// What keys, values and queries bring.
    fn tokens(&self, [q, k, v]: [Tensor<4>; 3], ignored: impl Fn(Tensor<4>) -> Tensor<4>) -> Tokens {
        let Heads { heads, head_dim, .. } = self.heads;
        let attention = self.gates.attention;
        let [_, _, _, width] = k.dims();
        let wide = ignored(widen(k));
        let delta = usize::from(attention.update == Update::Delta);
        let repeated = |x: Tensor<4>| repeat_heads(x, heads);
        let unit = |x: Tensor<4>| {
            if !attention.l2_norm {
                return x;
            }
            let length = (x.clone().powi_scalar(2).sum_dim(3) + 1e-6).sqrt();
            x / length
        };
        let scale = attention.scale.unwrap_or((head_dim as f64).powf(-0.5));
        let logs = self.rate.as_ref().zip(self.bias.as_ref()).map(|(rate, bias)| {
            let x = wide.clone().narrow(3, head_dim, width - head_dim - delta);
            repeated(ignored(gates::log_decays(rate, bias, x)))
        });
        let beta = (delta == 1).then(|| {
            let y = wide.clone().narrow(3, width - 1, 1);
            repeated(ignored(sigmoid(y) * self.gates.beta_max))
        });
        Tokens {
            q: unit(widen(q)) * scale,
            k: repeated(unit(wide.narrow(3, 0, head_dim))),
            v: repeated(ignored(widen(v))),
            logs,
            beta,
        }
    }
}

impl Layer for GatedAttention {
    fn name(&self) -> &'static str {
        self.gates.name()
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        self.gates.clone()
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn value_dim(&self) -> Option<usize> {
        self.value_taps.as_ref().map(|_| self.heads.head_dim)
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        gates::parameters(&self.rate, &self.bias).chain(self.taps().map(|taps| flattened(taps.val()))).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let dtype = q.dtype();
        let pairs = Pairs::new(&q, k.dims()[2], mask, None);
        let mut qkv = [q, k, v];
        if self.query_taps.is_some() {
            let mut past = self.empty_past(&qkv[0]);
            qkv = self.convolved(qkv.map(|x| pairs.without_ignored(x)), &mut past);
        }
        let tokens = self.tokens(qkv, |x| pairs.without_ignored(x));
        let ([batch, heads, _, width], value_dim) = (tokens.q.dims(), tokens.v.dims()[3]);
        let empty = || Tensor::zeros([batch, heads, width, value_dim], (&tokens.q.device(), tokens.q.dtype()));
        let mut out = tokens.advance(&mut empty());
        if mask.order == Order::Bidirectional {
            out = out + tokens.map(|x| x.flip([2])).advance(&mut empty()).flip([2]);
        }
        narrow_float(out, dtype)
    }

    fn sums(&self) -> Option<&dyn Sums> {
        Some(self)
    }
}

impl Sums for GatedAttention {
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running {
        let mut state = Running::of_sum(like, value_dim);
        state.tensors.extend(self.empty_past(like));
        state
    }

    fn advance(&self, qkv: [Tensor<4>; 3], state: &mut Running) -> Tensor<4> {
        let dtype = qkv[0].dtype();
        let qkv = self.convolved(qkv, &mut state.tensors[1..]);
        let tokens = self.tokens(qkv, |x| x);
        narrow_float(tokens.advance(&mut state.tensors[0]), dtype)
    }
}
