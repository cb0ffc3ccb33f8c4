//! Fourier relative positions: kernelized attention with the weights
//! `Σ_k φ(q_i)_k φ(k_j)_k (β_k + c_k cos(b_k + a_k·(i − j)))`, at learned frequencies. Linear in the number of tokens.
//!
//! By the addition theorem a weight is a product of turned features, `[c φ(q) cos p, c φ(q) sin p, β φ(q)]` with
//! `p = b + a·i` and `[φ(k) cos p, φ(k) sin p, φ(k)]` with `p = a·j`: in tensor operations, kernelized attention over these.

use std::f64::consts::FRAC_PI_2;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::activation::softplus;
use burn::tensor::{Device, Tensor, TensorData};
use longspan_kernels as kernels;
use longspan_kernels::{Fourier, FourierNormalizer, Mechanism, Positions, Score, Wave};
use serde::{Deserialize, Serialize};

use super::feature_map::{LearnedMap, sizes};
use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, KernelConfig};
use crate::backend::tensor::{attend_turned, repeat_heads, widen};
use crate::backend::{Kernel, Layer};
use crate::error::{Result, config};

/// What a row is divided by, and so which of `c` and `β` are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FourierNormalizerConfig {
    /// `β = c = 1`: no weight is negative.
    #[default]
    OnePlus,
    /// `β = |c| + softplus(beta)`: every weight is positive.
    Dominant,
    /// `β = 0`, divided by `Σ φ(q)·φ(k)`, which positions have no part in.
    Unrotated,
    /// Both free, undivided.
    None,
}

/// Kernelized attention with Fourier positions, counted from the start of the sequence.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FourierOptions {
    /// What a row is divided by; `one-plus` by default.
    pub normalizer: FourierNormalizerConfig,
    /// Turn features in pairs, as rotary positions do, instead of each by itself; no by default. Takes the normaliser
    /// `unrotated` or `none`, and an even width of heads.
    pub rotary: bool,
    /// The weight of a pair by its contents.
    pub kernel: KernelConfig,
}

/// Fourier attention over heads, with its learned waves.
#[derive(Module, Debug)]
pub struct FourierAttention {
    /// Angle for a step, in radians, `[kv_heads, features, 1]`, or `[kv_heads, features/2, 1]` for rotary positions. Starts
    /// at geometric wavelengths from 2π to 2000π tokens.
    pub a: Param<Tensor<3>>,
    /// Phase, `[heads, features]`; rotary positions have none. Starts at random in ±π/2, so that before and after differ.
    pub b: Option<Param<Tensor<2>>>,
    /// Amplitude, `[heads, features]`, where the normaliser leaves it free; starts at 1.
    pub c: Option<Param<Tensor<2>>>,
    /// The part that does not depend on distance, `[heads, features]`, where the normaliser leaves it free; starts at 1
    /// without a normaliser and at 0 under `dominant`.
    pub beta: Option<Param<Tensor<2>>>,
    /// What the feature map learns, if anything.
    pub map: Option<LearnedMap>,
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
        config(
            !self.rotary || features.is_multiple_of(2),
            NAME,
            "rotary",
            "an even number of features, which turn in pairs",
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
            normalize: self.kernel.normalize && normalizer != FourierNormalizer::None,
            algorithm: self.kernel.algorithm,
        };
        options.check_feature_map(&sizes(heads))?;
        let angles = if self.rotary { features / 2 } else { features };
        let rates: Vec<f32> =
            (0..kv_heads * angles).map(|at| 1000_f32.powf(-((at % angles) as f32) / angles as f32)).collect();
        let rates = Tensor::from_data(TensorData::new(rates, [kv_heads, angles, 1]), device);
        let each = |wanted: bool, initializer: Initializer| {
            (wanted && !self.rotary).then(|| initializer.init([query_heads, features], device))
        };
        let free = matches!(self.normalizer, Config::Dominant | Config::None);
        let level = if self.normalizer == Config::None { 1.0 } else { 0.0 };
        Ok(FourierAttention {
            a: Param::from_tensor(rates),
            b: each(true, Initializer::Uniform { min: -FRAC_PI_2, max: FRAC_PI_2 }),
            c: each(self.normalizer != Config::OnePlus, Initializer::Ones),
            beta: each(free, Initializer::Constant { value: level }),
            map: LearnedMap::new(options.feature_map, heads, device),
            options: Arc::new(options),
            heads,
        })
    }

    fn sees_order(&self) -> bool {
        true
    }
}

attention_module!(FourierAttention);

impl FourierAttention {
    /// The options of the kernel behind it.
    pub fn options(&self) -> &kernels::KernelizedAttention {
        &self.options
    }

    /// `a·p` for `count` places from `first` on, `[1, heads, count, angles]`.
    fn angles(&self, first: isize, count: usize) -> Tensor<4> {
        let a = widen(self.a.val());
        let [kv_heads, angles, _] = a.dims();
        let a = repeat_heads(a.reshape([1, kv_heads, 1, angles]), self.heads.heads);
        let places: Vec<f64> = (0..count).map(|i| (first + i as isize) as f64).collect();
        Tensor::<4>::from_data(TensorData::new(places, [1, 1, count, 1]), (&a.device(), a.dtype())) * a
    }

    /// `φ(q)` and `φ(k)` turned by their places.
    fn turn(&self, q: Tensor<4>, k: Tensor<4>, offset: isize) -> (Tensor<4>, Tensor<4>) {
        let of_queries = self.angles(offset, q.dims()[2]);
        let of_keys = self.angles(0, k.dims()[2]);
        let Some(b) = &self.b else {
            let half = q.dims()[3] / 2;
            let turned = |x: Tensor<4>, angle: Tensor<4>| {
                let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
                let (sin, cos) = (angle.clone().sin(), angle.cos());
                let left = first.clone() * cos.clone() - second.clone() * sin.clone();
                Tensor::cat(vec![left, first * sin + second * cos], 3)
            };
            return (turned(q, of_queries), turned(k, of_keys));
        };
        let of_head = |x: Tensor<2>| {
            let [heads, width] = x.dims();
            widen(x).reshape([1, heads, 1, width])
        };
        let angle = of_queries + of_head(b.val());
        let c = self.c.as_ref().map(|c| of_head(c.val()));
        let scaled = match &c {
            Some(c) => q.clone() * c.clone(),
            None => q.clone(),
        };
        let mut queries = vec![scaled.clone() * angle.clone().cos(), scaled * angle.sin()];
        let mut keys = vec![k.clone() * of_keys.clone().cos(), k.clone() * of_keys.sin()];
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

impl Layer for FourierAttention {
    fn name(&self) -> &'static str {
        Mechanism::<f32>::name(&*self.options)
    }

    fn kernel(&self) -> Arc<dyn Kernel> {
        self.options.clone()
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let waves = [&self.b, &self.c, &self.beta].into_iter().flatten().map(|x| x.val().reshape([-1]));
        let waves = std::iter::once(self.a.val().reshape([-1])).chain(waves);
        waves.chain(self.map.iter().flat_map(LearnedMap::parameters)).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let apart = self.options.score.fourier().is_some_and(|f| f.normalizer == FourierNormalizer::Unrotated);
        let learned = self.map.as_ref().map(LearnedMap::tensors);
        attend_turned((&self.options, &learned), q, k, v, mask, apart, |q, k| self.turn(q, k, mask.offset))
    }
}
