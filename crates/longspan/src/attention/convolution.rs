//! Gated short convolution, `q_i ⊙ SiLU(Σ_t c_t ⊙ k_{i−t} ⊙ v_{i−t})`: a few learned taps over the latest tokens. Between layers of linear
//! attention it is what looks at neighbours.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels as kernels;
use serde::{Deserialize, Serialize};

use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads};
use crate::backend::pairs::Pairs;
use crate::backend::tensor::{flattened, narrow_float, repeat_heads, silu, widen};
use crate::backend::{AnyKernel, Layer};
use crate::error::{Result, config};

/// The options of a gated short convolution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShortConvolutionOptions {
    /// Taps: how many tokens a query sees, its own place among them, and under any mask no later one. 4 by default.
    pub width: usize,
    /// Whether the sum of the taps goes through SiLU before the query gates it; yes by default.
    pub silu: bool,
}

impl Default for ShortConvolutionOptions {
    fn default() -> Self {
        Self { width: 4, silu: true }
    }
}

/// A gated short convolution over heads. Nothing in it mixes channels: the projections around it do.
#[derive(Module, Debug)]
pub struct ShortConvolution {
    /// `[kv_heads, width, head_dim]`: tap `t` weighs the token `t` places back.
    pub taps: Param<Tensor<3>>,
    /// Said twice, because whoever asks the taps for it draws them.
    #[module(skip)]
    width: usize,
    #[module(skip)]
    silu: bool,
    #[module(skip)]
    heads: Heads,
}

impl Options for ShortConvolutionOptions {
    type Module = ShortConvolution;

    fn init(&self, heads: Heads, device: &Device) -> Result<ShortConvolution> {
        let Self { width, silu } = *self;
        let most = kernels::ShortConvolution::LARGEST_WIDTH;
        config((1..=most).contains(&width), "ShortConvolutionOptions", "width", format_args!("1 to {most}"), width)?;
        let taps = fresh(heads.kv_heads, width, heads.head_dim, device);
        Ok(ShortConvolution { taps, width, silu, heads })
    }
}

attention_module!(ShortConvolution);

impl Layer for ShortConvolution {
    fn name(&self) -> &'static str {
        "short-convolution"
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        Arc::new(kernels::ShortConvolution { width: self.width, silu: self.silu, ..Default::default() })
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        vec![flattened(self.taps.val())]
    }

    fn sees(&self) -> Option<usize> {
        Some(self.width)
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let (dtype, [batch, heads, queries, dim]) = (q.dtype(), q.dims());
        let (keys, kv_heads, before) = (k.dims()[2], k.dims()[1], self.width - 1);
        let q = widen(q);
        let products = Pairs::new(&q, keys, mask, None).without_ignored(widen(k) * widen(v));
        // The first position that a query sees. Further away from the keys than this makes no difference.
        let first = mask.offset.clamp(-(queries as isize), (keys + before) as isize) - before as isize;
        let end = first + (before + queries) as isize;
        let zeros = |count: isize| {
            let shape = [batch, kv_heads, count.max(0) as usize, dim];
            Tensor::zeros(shape, (&products.device(), products.dtype()))
        };
        let parts = [zeros(-first), products.clone(), zeros(end - keys as isize)];
        let products = Tensor::cat(parts.into_iter().filter(|part| part.dims()[2] > 0).collect(), 2);
        let seen = products.narrow(2, first.max(0) as usize, before + queries);
        let sum = convolve(&seen, &widen(self.taps.val()));
        let sum = if self.silu { silu(sum) } else { sum };
        narrow_float(q * repeat_heads(sum, heads), dtype)
    }
}

/// `Σ_t taps[t] ⊙ x_{i−t}` of the rows that have as many before them as there are earlier taps: `x` is `[batch, heads, rows, width]`.
pub(super) fn convolve(x: &Tensor<4>, taps: &Tensor<3>) -> Tensor<4> {
    let before = taps.dims()[1] - 1;
    let rows = x.dims()[2] - before;
    let tap = |t: usize| taps.clone().narrow(1, t, 1).unsqueeze::<4>() * x.clone().narrow(2, before - t, rows);
    (1..=before).fold(tap(0), |sum, t| sum + tap(t))
}

/// Taps `[heads, width, head_dim]` as convolutions are initialised everywhere: by the number of terms.
pub(super) fn fresh(heads: usize, width: usize, head_dim: usize, device: &Device) -> Param<Tensor<3>> {
    let most = (width as f64).powf(-0.5);
    Initializer::Uniform { min: -most, max: most }.init([heads, width, head_dim], device)
}
