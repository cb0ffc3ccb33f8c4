//! Fourier relative positions: kernelized attention with the weights
//! `Σ_k φ(q_i)_k φ(k_j)_k (β_k + c_k cos(b_k + a_k·(i − j)))`, at learned frequencies. Linear in the number of tokens.
//!
//! By the addition theorem a weight is a product of rotated features, `[c φ(q) cos p, c φ(q) sin p, β φ(q)]` with
//! `p = b + a·i` and `[φ(k) cos p, φ(k) sin p, φ(k)]` with `p = a·j`: in tensor operations, kernelized attention over
//! these.

use std::f64::consts::FRAC_PI_2;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::activation::softplus;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use longspan_kernels as kernels;
use longspan_kernels::{Fourier, FourierNormalizer, Mechanism, Positions, Score, Wave};
use serde::{Deserialize, Serialize};

use super::feature_map::LearnedMap;
use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, KernelConfig, KeyMask, gates};
use crate::backend::tensor::{CHUNK, attend_rotated, flattened, narrow_float, repeat_heads, widen};
use crate::backend::{self, AnyKernel, AttentionState, Layer, Running, Sums};
use crate::error::{Result, argument, config};

/// What a row is divided by, and so which of `c` and `β` are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FourierNormalizerConfig {
    /// `β = c = 1`: no weight is negative.
    #[default]
    OnePlus,
    /// `β = |c| + softplus(beta)`: every weight is positive.
    Dominant,
    /// `β = 0`, divided by `Σ φ(q)·φ(k)`, which does not depend on positions.
    Unrotated,
    /// `c` and `β` are both learned, and rows are not divided.
    None,
}

/// Kernelized attention with Fourier positions: counted from the start of the sequence, or given with each call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FourierOptions {
    /// Numbers in one position; 1 by default. Positions on more than one axis have to be given with each call:
    /// [`FourierAttention::forward_at`].
    #[serde(skip_serializing_if = "is_one")]
    pub axes: usize,
    /// What a row is divided by; `one-plus` by default.
    pub normalizer: FourierNormalizerConfig,
    /// Rotate features in pairs, as rotary positions do, instead of each by itself; no by default. Needs the normaliser
    /// `unrotated` or `none`, and an even number of features.
    pub rotary: bool,
    /// The weight of a pair by its contents.
    pub kernel: KernelConfig,
}

fn is_one(axes: &usize) -> bool {
    *axes == 1
}

impl Default for FourierOptions {
    fn default() -> Self {
        Self { axes: 1, normalizer: Default::default(), rotary: false, kernel: KernelConfig::default() }
    }
}

/// Fourier attention over heads: kernelized attention with the weights
/// `Σ_n φ(q_i)_n φ(k_j)_n (β_n + c_n cos(b_n + a_n·(p_i − p_j)))` at positions `p`, and its learned waves `a`, `b`,
/// `c`, `β`.
#[derive(Module, Debug)]
pub struct FourierAttention {
    /// Angle for a step along each axis, in radians, `[kv_heads, features, axes]`, or `[kv_heads, features/2, axes]`
    /// for rotary positions. Starts at geometric wavelengths from 2π to 2000π tokens; with several axes, features are
    /// assigned to the axes in turn.
    pub a: Param<Tensor<3>>,
    /// Phase, `[heads, features]`; rotary positions have none. Starts at random in ±π/2, so that keys before and
    /// after a query weigh differently.
    pub b: Option<Param<Tensor<2>>>,
    /// Amplitude, `[heads, features]`, where the normaliser leaves it free; starts at 1.
    pub c: Option<Param<Tensor<2>>>,
    /// The part that does not depend on distance, `[heads, features]`, where the normaliser leaves it free; starts at 1
    /// without a normaliser and at 0 under `dominant`.
    pub beta: Option<Param<Tensor<2>>>,
    /// What the feature map learns, if anything.
    pub map: Option<LearnedMap>,
    /// Of the gates, if there are any, as in [`KernelizedAttention`](super::KernelizedAttention): `[kv_heads]`.
    pub rate: Option<Param<Tensor<1>>>,
    /// Of the gates, `[kv_heads, 1]`.
    pub bias: Option<Param<Tensor<2>>>,
    #[module(skip)]
    options: Arc<kernels::KernelizedAttention>,
    #[module(skip)]
    heads: Heads,
}

impl Options for FourierOptions {
    type Module = FourierAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<FourierAttention> {
        const NAME: &str = "FourierOptions";
        use FourierNormalizerConfig as Config;
        let Heads { heads: query_heads, kv_heads, head_dim } = heads;
        let features = self.kernel.feature_map.features(head_dim);
        self.kernel.check_decay(heads)?;
        config(self.axes > 0, NAME, "axes", "at least one number in a position", self.axes)?;
        config(
            !self.rotary || features.is_multiple_of(2),
            NAME,
            "rotary",
            "an even number of features, which rotate in pairs",
            features,
        )?;
        config(
            !self.rotary || matches!(self.normalizer, Config::Unrotated | Config::None),
            NAME,
            "normalizer",
            "unrotated or none with rotary positions",
            format_args!("{:?}", self.normalizer),
        )?;
        let normalizer = match self.normalizer {
            Config::OnePlus => FourierNormalizer::OnePlus,
            Config::Dominant => FourierNormalizer::Dominant,
            Config::Unrotated => FourierNormalizer::Unrotated,
            Config::None => FourierNormalizer::None,
        };
        let wave = if self.rotary { Wave::Pairs } else { Wave::Each };
        let fourier = Fourier { wave, normalizer, positions: Positions::Counted };
        let options = kernels::KernelizedAttention {
            feature_map: self.kernel.feature_map,
            score: Score::Fourier(fourier),
            decay: self.kernel.decay.clone(),
            gate: self.kernel.gates,
            normalize: self.kernel.normalize && normalizer != FourierNormalizer::None,
            algorithm: self.kernel.algorithm,
        };
        options.check_feature_map(&heads.dims(1, 1, 1))?;
        let angles = if self.rotary { features / 2 } else { features };
        let axes = self.axes;
        let frequencies = kv_heads.checked_mul(angles).and_then(|n| n.checked_mul(axes));
        config(frequencies.is_some_and(|n| n < 1 << 32), NAME, "axes", "fewer than 2³² frequencies in all", axes)?;
        let rate = |at: usize| match (at / axes % angles, at % axes) {
            (angle, axis) if angle % axes == axis => 1000_f32.powf(-(angle as f32) / angles as f32),
            _ => 0.0,
        };
        let rates: Vec<f32> = (0..kv_heads * angles * axes).map(rate).collect();
        let rates = Tensor::from_data(TensorData::new(rates, [kv_heads, angles, axes]), device);
        let each = |wanted: bool, initializer: Initializer| {
            (wanted && !self.rotary).then(|| initializer.init([query_heads, features], device))
        };
        let free = matches!(self.normalizer, Config::Dominant | Config::None);
        let (rate, bias) = self.kernel.gates.then(|| gates::fresh(kv_heads, 1, device)).unzip();
        let level = if self.normalizer == Config::None { 1.0 } else { 0.0 };
        Ok(FourierAttention {
            a: Param::from_tensor(rates),
            b: each(true, Initializer::Uniform { min: -FRAC_PI_2, max: FRAC_PI_2 }),
            c: each(self.normalizer != Config::OnePlus, Initializer::Ones),
            beta: each(free, Initializer::Constant { value: level }),
            map: LearnedMap::new(options.feature_map, heads, device),
            rate,
            bias,
            options: Arc::new(options),
            heads,
        })
    }
}

attention_module!(FourierAttention);

impl FourierAttention {
    /// [`forward`](Self::forward) at positions that are given, real numbers on any number of axes, instead of counted
    /// ones. The offset of the mask then only says what a causal query sees.
    ///
    /// # Shapes
    /// - `query_positions`: `[batch, queries, axes]`; `key_positions`: `[batch, keys, axes]`; gradients reach both
    /// - all else as in [`forward`](Self::forward)
    ///
    /// # Errors
    /// Positions of other shapes or number types, packed sequences (give each its own batch entry), and the errors of
    /// [`forward`](Self::forward).
    pub fn forward_at(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        [query_positions, key_positions]: [Tensor<3>; 2],
        mask: &AttentionMask,
    ) -> Result<Tensor<4>> {
        let positions = [query_positions, key_positions];
        self.check_positions(&positions, [&q, &k].map(|x| (x.dims()[0], x.dims()[2])), backend::place(&q), mask)?;
        backend::attend(&self.placed(positions), q, k, v, mask)
    }

    /// [`step`](Self::step) at positions that are given: the row that [`forward_at`](Self::forward_at) gives under a
    /// causal mask.
    ///
    /// # Shapes
    /// - `positions`, of query and key: `[batch, 1, axes]` each
    /// - all else as in [`step`](Self::step)
    ///
    /// # Errors
    /// Positions of other shapes or number types, tensors that are not on the CPU backend or have autodiff (elsewhere
    /// [`forward_at`](Self::forward_at) over the whole sequence), and the errors of [`step`](Self::step).
    pub fn step_at(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        positions: [Tensor<3>; 2],
        state: &mut AttentionState,
    ) -> Result<Tensor<4>> {
        let tokens = [&q, &k].map(|x| (x.dims()[0], x.dims()[2]));
        self.check_positions(&positions, tokens, backend::place(&q), &AttentionMask::causal())?;
        let expected =
            || "a tensor on the CPU backend without autodiff; elsewhere, forward_at over the whole sequence".into();
        let got = || format!("one on {:?}", q.device());
        let holds = !q.device().is_autodiff() && backend::kernels_take(self, &q, state, true);
        argument(holds, Layer::name(self), "q", expected, got)?;
        backend::step(&self.placed(positions), q, k, v, state)
    }

    /// Checks positions of queries and keys: `(batch, tokens)` of each.
    pub(super) fn check_positions(
        &self,
        positions: &[Tensor<3>; 2],
        tokens: [(usize, usize); 2],
        place: (Device, DType),
        mask: &AttentionMask,
    ) -> Result<()> {
        let axes = self.a.val().dims()[2];
        for ((name, positions), (batch, tokens)) in
            ["query positions", "key positions"].into_iter().zip(positions).zip(tokens)
        {
            let holds = positions.dims() == [batch, tokens, axes] && backend::place(positions) == place;
            let expected = || format!("[{batch}, {tokens}, {axes}] on {place:?}");
            let got = || format!("{:?} on {:?}", positions.dims(), backend::place(positions));
            argument(holds, Layer::name(self), name, expected, got)?;
        }
        let expected = || "no packed sequences where positions are given; each sequence in its own batch entry".into();
        let got = || "packed sequences".into();
        argument(!matches!(mask.keys, KeyMask::Packed { .. }), Layer::name(self), "mask", expected, got)
    }

    /// The same attention at these positions.
    pub(super) fn placed(&self, positions: [Tensor<3>; 2]) -> Placed<'_> {
        Placed { attention: self, options: self.options_at_positions(), positions }
    }

    fn options_at_positions(&self) -> Arc<kernels::KernelizedAttention> {
        let mut options = (*self.options).clone();
        if let Score::Fourier(fourier) = &mut options.score {
            fourier.positions = Positions::Given { axes: self.a.val().dims()[2] };
        }
        Arc::new(options)
    }

    /// The learned waves, flat, in the kernel's order.
    fn waves(&self) -> impl Iterator<Item = Tensor<1>> {
        let rest = [&self.b, &self.c, &self.beta].into_iter().flatten().map(|x| flattened(x.val()));
        std::iter::once(flattened(self.a.val())).chain(rest)
    }

    /// Kernelized attention over features rotated by their positions, `[batch or 1, tokens, axes]`.
    fn rotated(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        positions: [Tensor<3>; 2],
        mask: &AttentionMask,
    ) -> Tensor<4> {
        let content_denominators =
            self.options.score.fourier().is_some_and(|f| f.normalizer == FourierNormalizer::Unrotated);
        if self.options.gate {
            let mut state = self.empty(&q, v.dims()[3]);
            // As many queries as keys.
            return self.advance_under([q, k, v], mask, &mut state, |first, count| {
                positions.each_ref().map(|all| self.angles(all.clone().narrow(1, first, count)))
            });
        }
        let learned = self.map.as_ref().map(LearnedMap::tensors);
        let angles = positions.map(|positions| self.angles(positions));
        attend_rotated((&self.options, &learned), q, k, v, mask, content_denominators, |q, k| self.rotate(q, k, angles))
    }

    /// Tokens after those of a state, in chunks where they bring gates; `angles` takes the first token and their number.
    fn advance_under(
        &self,
        qkv: [Tensor<4>; 3],
        mask: &AttentionMask,
        state: &mut Running,
        angles: impl Fn(usize, usize) -> [Tensor<4>; 2],
    ) -> Tensor<4> {
        let learned = self.map.as_ref().map(LearnedMap::tensors);
        gates::advance((&self.rate, &self.bias), qkv, mask, state, |qkv, mask, state| {
            state.advance(&self.options, qkv, mask, (None, &learned), CHUNK, |first, q: Tensor<4>, k| {
                let angles = angles(first, q.dims()[2]);
                self.rotate(q, k, angles)
            })
        })
    }

    /// `a·p`, `[batch or 1, heads, tokens, angles]`.
    fn angles(&self, positions: Tensor<3>) -> Tensor<4> {
        let fine = fine(&positions.device());
        let [a, positions] = [self.a.val(), positions].map(|x| widen(x).cast(fine));
        let ([kv_heads, angles, axes], [batch, tokens, _]) = (a.dims(), positions.dims());
        let heads = self.heads.heads;
        let a = repeat_heads(a.reshape([1, kv_heads, angles, axes]), heads).expand([batch, heads, angles, axes]);
        let positions = positions.unsqueeze_dim::<4>(1).expand([batch, heads, tokens, axes]);
        positions.matmul(a.swap_dims(2, 3))
    }

    /// The positions of `count` tokens from `first` on, `[1, count, 1]`.
    fn counted(&self, first: isize, count: usize) -> Tensor<3> {
        let device = self.a.device();
        let places = Tensor::<1, Int>::arange(0..count as i64, &device).cast(fine(&device));
        places.add_scalar(first as f64).reshape([1, count, 1])
    }

    /// `φ(q)` and `φ(k)` rotated by their angles.
    fn rotate(&self, q: Tensor<4>, k: Tensor<4>, [of_queries, of_keys]: [Tensor<4>; 2]) -> (Tensor<4>, Tensor<4>) {
        let Some(b) = &self.b else {
            let half = q.dims()[3] / 2;
            let rotated = |x: Tensor<4>, angle: Tensor<4>| {
                let [sin, cos] = sin_cos(angle, x.dtype());
                let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
                let left = first.clone() * cos.clone() - second.clone() * sin.clone();
                Tensor::cat(vec![left, first * sin + second * cos], 3)
            };
            return (rotated(q, of_queries), rotated(k, of_keys));
        };
        let of_head = |x: Tensor<2>| {
            let [heads, width] = x.dims();
            widen(x).reshape([1, heads, 1, width])
        };
        let angle = of_queries.clone() + of_head(b.val()).cast(of_queries.dtype());
        let ([sin, cos], [key_sin, key_cos]) = (sin_cos(angle, q.dtype()), sin_cos(of_keys, k.dtype()));
        let c = self.c.as_ref().map(|c| of_head(c.val()));
        let scaled = match &c {
            Some(c) => q.clone() * c.clone(),
            None => q.clone(),
        };
        let mut queries = vec![scaled.clone() * cos, scaled * sin];
        let mut keys = vec![k.clone() * key_cos, k.clone() * key_sin];
        let normalizer = self.options.score.fourier().map(|fourier| fourier.normalizer);
        if normalizer != Some(FourierNormalizer::Unrotated) {
            queries.push(match (&self.beta, c) {
                (None, _) => q,
                (Some(beta), Some(c)) if normalizer == Some(FourierNormalizer::Dominant) => {
                    q * (c.abs() + softplus(of_head(beta.val()), 1.0))
                }
                (Some(beta), _) => q * of_head(beta.val()),
            });
            keys.push(k);
        }
        (Tensor::cat(queries, 3), Tensor::cat(keys, 3))
    }
}

/// The type of angles: doubles where a device has them, since `a·p` of a far position keeps few digits behind the point.
fn fine(device: &Device) -> FloatDType {
    if device.supports_dtype(DType::F64) { FloatDType::F64 } else { FloatDType::F32 }
}

/// Sines and cosines, as numbers of another type.
fn sin_cos(angle: Tensor<4>, dtype: DType) -> [Tensor<4>; 2] {
    [angle.clone().sin(), angle.cos()].map(|x| narrow_float(x, dtype))
}

impl Layer for FourierAttention {
    fn name(&self) -> &'static str {
        self.options.name()
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        gates::kernel(&self.options)
    }

    fn kernel_at_positions(&self) -> Option<Arc<dyn AnyKernel>> {
        Some(gates::kernel(&self.options_at_positions()))
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn ready(&self) -> Result<()> {
        let axes = self.a.val().dims()[2];
        let expected = || format!("{axes} numbers for each token, given to forward_at or step_at");
        argument(axes == 1, Layer::name(self), "positions", expected, || "none".into())
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let others = self.waves().chain(self.map.iter().flat_map(LearnedMap::parameters));
        others.chain(gates::parameters(&self.rate, &self.bias)).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let positions = [self.counted(mask.offset, q.dims()[2]), self.counted(0, k.dims()[2])];
        self.rotated(q, k, v, positions, mask)
    }

    fn sums(&self) -> Option<&dyn Sums> {
        Some(self)
    }
}

impl Sums for FourierAttention {
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running {
        let features = self.options.feature_map.features(self.heads.head_dim);
        // As `rotate` makes them.
        let unrotated = self.options.score.fourier().is_some_and(|f| f.normalizer == FourierNormalizer::Unrotated);
        let parts = if self.b.is_none() { 1 } else { 2 + usize::from(!unrotated) };
        Running::empty(&self.options, like, value_dim, Some(parts * features))
    }

    fn advance(&self, qkv: [Tensor<4>; 3], state: &mut Running) -> Tensor<4> {
        self.advance_under(qkv, &AttentionMask::causal(), state, |first, count| {
            let angles = self.angles(self.counted(first as isize, count));
            [angles.clone(), angles]
        })
    }
}

/// Fourier attention at given positions.
#[derive(Debug)]
pub(super) struct Placed<'a> {
    attention: &'a FourierAttention,
    options: Arc<kernels::KernelizedAttention>,
    /// Of queries and of keys.
    positions: [Tensor<3>; 2],
}

impl Layer for Placed<'_> {
    fn name(&self) -> &'static str {
        Layer::name(self.attention)
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        gates::kernel(&self.options)
    }

    fn heads(&self) -> Heads {
        self.attention.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let positions = self.positions.iter().map(|positions| positions.clone().reshape([-1]));
        let map = self.attention.map.iter().flat_map(LearnedMap::parameters);
        let gates = gates::parameters(&self.attention.rate, &self.attention.bias);
        self.attention.waves().chain(positions).chain(map).chain(gates).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        self.attention.rotated(q, k, v, self.positions.clone(), mask)
    }
}
