//! Scaled dot-product attention, `softmax(q·kᵀ/√d)·v`: the baseline, quadratic in the number of tokens; with a window, linear.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Tensor};
use longspan_kernels as kernels;
use serde::{Deserialize, Serialize};

use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, KeyMask};
use crate::backend::pairs::{Pairs, hide};
use crate::backend::tensor::{narrow_float, repeat_heads, widen};
use crate::backend::{self, AnyKernel, Layer};
use crate::error::{Result, argument};

/// Softmax attention has no options.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoftmaxOptions {}

impl Options for SoftmaxOptions {
    type Module = SoftmaxAttention;

    fn init(&self, heads: Heads, _: &Device) -> Result<SoftmaxAttention> {
        Ok(SoftmaxAttention { heads, window: None })
    }
}

/// The options of sliding-window attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoftmaxWindowOptions {
    /// A query sees the keys at distances below this: under a causal mask that many, its own place among them. 256 by default.
    pub window: usize,
}

impl Default for SoftmaxWindowOptions {
    fn default() -> Self {
        Self { window: 256 }
    }
}

impl Options for SoftmaxWindowOptions {
    type Module = SoftmaxAttention;

    fn init(&self, heads: Heads, _: &Device) -> Result<SoftmaxAttention> {
        let range = 1..=kernels::SoftmaxAttention::LARGEST_WINDOW;
        let expected = || format!("between 1 and {}", range.end());
        let got = || self.window.to_string();
        argument(range.contains(&self.window), "SoftmaxWindowOptions", "window", expected, got)?;
        Ok(SoftmaxAttention { heads, window: Some(self.window) })
    }
}

/// Scaled dot-product attention over heads: `softmax(q·kᵀ/√head_dim)·v`. It learns nothing itself.
#[derive(Module, Debug)]
pub struct SoftmaxAttention {
    #[module(skip)]
    heads: Heads,
    #[module(skip)]
    window: Option<usize>,
}

attention_module!(SoftmaxAttention);

impl SoftmaxAttention {
    /// [`forward`](Self::forward) without some pairs of a query and a key, in tensor operations on every device.
    ///
    /// # Shapes
    /// `hidden`: `[1 or batch, 1 or heads, queries, keys]`, `true` where a query does not see a key, as in Burn's
    /// `generate_autoregressive_mask`; all else as in [`forward`](Self::forward).
    ///
    /// # Errors
    /// As [`forward`](Self::forward), pairs of another shape or on another device, and packed sequences.
    pub fn forward_hiding(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        hidden: Tensor<4, Bool>,
        mask: &AttentionMask,
    ) -> Result<Tensor<4>> {
        backend::check(self, &q, &k, &v)?;
        backend::check_by_kernel(self, backend::dims_of(&q, &v), mask)?;
        let ([batch, heads, queries, _], keys, found) = (q.dims(), k.dims()[2], hidden.dims());
        let fits = [1, batch].contains(&found[0]) && [1, heads].contains(&found[1]) && found[2..] == [queries, keys];
        let fits =
            fits && hidden.device().inner() == q.device().inner() && !matches!(mask.keys, KeyMask::Packed { .. });
        let expected = || format!("[1 or {batch}, 1 or {heads}, {queries}, {keys}] like q, and no packed sequences");
        argument(fits, Layer::name(self), "hidden", expected, || format!("{found:?}"))?;
        if q.dims().contains(&0) || v.dims().contains(&0) {
            return backend::attend(self, q, k, v, mask);
        }
        Ok(self.rows(q, k, v, mask, Some(hidden)))
    }

    fn rows(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        mask: &AttentionMask,
        without: Option<Tensor<4, Bool>>,
    ) -> Tensor<4> {
        let ([batch, heads, queries, dim], keys) = (q.dims(), k.dims()[2]);
        let (dtype, q, k, v) = (q.dtype(), widen(q), widen(k), widen(v));
        let pairs = Pairs::new(&q, keys, mask, self.window);
        let k = pairs.without_ignored(repeat_heads(k, heads)).swap_dims(2, 3);
        let v = pairs.without_ignored(repeat_heads(v, heads));
        // Under a window as many rows as each sees keys, else as many as keep the scores of a head in a few megabytes.
        let at_once = self.window.unwrap_or(SCORES / keys).max(Pairs::ROWS);
        let rows = (0..queries).step_by(at_once).map(|first| {
            let rows = first..queries.min(first.saturating_add(at_once));
            let seen = pairs.seen(&rows);
            let (k, v) = (k.clone().narrow(3, seen.start, seen.len()), v.clone().narrow(2, seen.start, seen.len()));
            let mut hidden = pairs.hidden(&rows, &seen);
            if let Some(without) = &without {
                let shape = [batch, heads, rows.len(), seen.len()];
                let own = without.clone().narrow(2, first, rows.len()).narrow(3, seen.start, seen.len()).expand(shape);
                hidden = Some(hidden.map_or(own.clone(), |hidden| own.bool_or(hidden.expand(shape))));
            }
            let scores = q.clone().narrow(2, first, rows.len()).matmul(k) * (1.0 / (dim as f64).sqrt());
            // −1e30, not −∞: the softmax of a row that sees nothing would be NaN. Its weights are set to 0 afterwards.
            hide(softmax(hide(scores, &hidden, -1e30), 3), &hidden, 0.0).matmul(v)
        });
        narrow_float(Tensor::cat(rows.collect(), 2), dtype)
    }
}

impl Layer for SoftmaxAttention {
    fn name(&self) -> &'static str {
        if self.window.is_some() { "softmax-window" } else { "softmax" }
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        Arc::new(kernels::SoftmaxAttention { window: self.window, ..Default::default() })
    }

    fn keeps_past(&self) -> bool {
        self.window.is_none()
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        Vec::new()
    }

    fn sees(&self) -> Option<usize> {
        self.window
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        self.rows(q, k, v, mask, None)
    }
}

/// Scores of a head that are formed at once.
const SCORES: usize = 1 << 22;
