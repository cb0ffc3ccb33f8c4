//! Scaled dot-product attention, `softmax(q·kᵀ/√d)·v`: the baseline. Quadratic in the number of tokens.

use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use longspan_kernels::Order;
use serde::{Deserialize, Serialize};

use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads};
use crate::backend::tensor::repeat_heads;
use crate::backend::{Kernel, Layer};
use crate::error::Result;

/// Softmax attention has no options.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoftmaxOptions {}

impl Options for SoftmaxOptions {
    type Module = SoftmaxAttention;

    fn init(&self, heads: Heads, _: &Device) -> Result<SoftmaxAttention> {
        Ok(SoftmaxAttention { heads })
    }
}

/// Makes a [`SoftmaxAttention`].
#[derive(Config, Debug)]
pub struct SoftmaxAttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Numbers in a query or key of one head.
    pub head_dim: usize,
    /// Key/value heads if fewer than query heads; `heads` is a multiple of them.
    pub kv_heads: Option<usize>,
}

/// Scaled dot-product attention over heads. It learns nothing itself.
#[derive(Module, Debug)]
pub struct SoftmaxAttention {
    #[module(skip)]
    heads: Heads,
}

impl SoftmaxAttentionConfig {
    /// Makes the module.
    ///
    /// # Errors
    /// Heads that do not divide.
    pub fn init(&self) -> Result<SoftmaxAttention> {
        let heads = Heads::new("SoftmaxAttentionConfig", self.heads, self.kv_heads, self.head_dim)?;
        Ok(SoftmaxAttention { heads })
    }
}

attention_module!(SoftmaxAttention);

impl Layer for SoftmaxAttention {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn kernel(&self) -> Option<Arc<dyn Kernel>> {
        None
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        Vec::new()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let [batch, heads, queries, dim] = q.dims();
        let [_, _, keys, value_dim] = v.dims();
        let device = q.device();
        let (mut k, mut v) = (repeat_heads(k, heads), repeat_heads(v, heads));
        let ignored = mask.ignored(batch, keys);
        if let Some(ignored) = &ignored {
            let ignored = Tensor::<4, Bool>::from_data(TensorData::new(ignored.clone(), [batch, 1, keys, 1]), &device);
            k = k.mask_fill(ignored.clone().expand([batch, heads, keys, dim]), 0.0);
            v = v.mask_fill(ignored.expand([batch, heads, keys, value_dim]), 0.0);
        }
        let mut scores = q.matmul(k.swap_dims(2, 3)) * (1.0 / (dim as f64).sqrt());
        let hidden = hidden(mask, ignored, queries, keys).map(|(rows, hidden)| {
            let hidden =
                Tensor::<4, Bool>::from_data(TensorData::new(hidden, [rows / queries, 1, queries, keys]), &device);
            hidden.expand([batch, heads, queries, keys])
        });
        if let Some(hidden) = &hidden {
            // Finite, so that a row that sees nothing has a softmax at all; it is emptied below.
            scores = scores.mask_fill(hidden.clone(), -1e30);
        }
        let mut weights = softmax(scores, 3);
        if let Some(hidden) = hidden {
            weights = weights.mask_fill(hidden, 0.0);
        }
        weights.matmul(v)
    }
}

/// Which pairs are hidden, row-major over `rows × keys`, and `rows`: `queries` where all batch entries are alike,
/// otherwise `batch × queries`. `None` where every query sees every key.
fn hidden(mask: &AttentionMask, ignored: Option<Vec<bool>>, queries: usize, keys: usize) -> Option<(usize, Vec<bool>)> {
    let future = |row: usize, key: usize| match mask.order {
        Order::Bidirectional => false,
        Order::Causal => key as isize > (row % queries) as isize + mask.offset,
    };
    if ignored.is_none() && mask.order == Order::Bidirectional {
        return None;
    }
    let batch = ignored.as_ref().map_or(1, |ignored| ignored.len() / keys.max(1));
    let rows = batch * queries;
    let entries = (0..rows).flat_map(|row| (0..keys).map(move |key| (row, key)));
    let hidden = entries
        .map(|(row, key)| future(row, key) || ignored.as_ref().is_some_and(|all| all[row / queries * keys + key]))
        .collect();
    Some((rows, hidden))
}
