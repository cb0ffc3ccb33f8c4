//! Scaled dot-product attention, `softmax(q·kᵀ/√d)·v`: the baseline. Quadratic in the number of tokens.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Int, Tensor, TensorData};
use longspan_kernels::Order;

use super::AttentionMask;
use crate::backend;
use crate::error::{Result, argument, config};

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
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl SoftmaxAttentionConfig {
    /// Makes the module.
    ///
    /// # Errors
    /// Heads that do not divide.
    pub fn init(&self) -> Result<SoftmaxAttention> {
        const NAME: &str = "SoftmaxAttentionConfig";
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        config(self.head_dim > 0, NAME, "head_dim", "at least 1", self.head_dim)?;
        config(
            kv_heads > 0 && self.heads > 0 && self.heads.is_multiple_of(kv_heads),
            NAME,
            "kv_heads",
            format_args!("a divisor of the {} heads", self.heads),
            kv_heads,
        )?;
        Ok(SoftmaxAttention { heads: self.heads, kv_heads, head_dim: self.head_dim })
    }
}

impl SoftmaxAttention {
    /// Attention over whole sequences.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, queries, head_dim]`
    /// - `k`: `[batch, kv_heads, keys, head_dim]`
    /// - `v`: `[batch, kv_heads, keys, value_dim]`
    /// - output: `[batch, heads, queries, value_dim]`; a row that sees no key gives 0
    ///
    /// # Errors
    /// Shapes that do not fit each other or the mask.
    pub fn forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Result<Tensor<4>> {
        self.check(&q, &k, &v)?;
        backend::check_mask(mask, &k)?;
        let [batch, heads, queries, dim] = q.dims();
        let [_, _, keys, value_dim] = v.dims();
        if batch * queries * keys * value_dim == 0 {
            return Ok(Tensor::zeros([batch, heads, queries, value_dim], (&q.device(), q.dtype())));
        }
        let device = q.device();
        let (mut k, mut v) = (backend::repeat_heads(k, heads), backend::repeat_heads(v, heads));
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
        Ok(weights.matmul(v))
    }

    fn check(&self, q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
        let ([batch, heads, _, dim], [_, _, keys, _]) = (q.dims(), k.dims());
        argument(
            heads == self.heads && dim == self.head_dim,
            "softmax_attention",
            "q",
            || format!("[batch, {}, queries, {}]", self.heads, self.head_dim),
            || format!("{:?}", q.dims()),
        )?;
        argument(
            k.dims() == [batch, self.kv_heads, keys, dim],
            "softmax_attention",
            "k",
            || format!("[{batch}, {}, keys, {dim}]", self.kv_heads),
            || format!("{:?}", k.dims()),
        )?;
        argument(
            v.dims()[..3] == [batch, self.kv_heads, keys],
            "softmax_attention",
            "v",
            || format!("[{batch}, {}, {keys}, value_dim]", self.kv_heads),
            || format!("{:?}", v.dims()),
        )
    }
}

impl SoftmaxAttention {
    /// Takes one token into `state` and gives its output: the row that [`SoftmaxAttention::forward`] gives under a causal
    /// mask. The state grows with every token.
    ///
    /// # Shapes
    /// As in [`SoftmaxAttention::forward`], with one query and one key.
    ///
    /// # Errors
    /// Shapes that do not fit each other or the state.
    pub fn step(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, state: &mut SoftmaxState) -> Result<Tensor<4>> {
        let (keys, values) = match state.past.take() {
            None => (k, v),
            Some((keys, values)) => (Tensor::cat(vec![keys, k], 2), Tensor::cat(vec![values, v], 2)),
        };
        state.past = Some((keys.clone(), values.clone()));
        self.forward(q, keys, values, &AttentionMask::bidirectional())
    }
}

/// The keys and values of the tokens so far, `[batch, kv_heads, tokens, ·]` each.
#[derive(Debug, Clone, Default)]
pub struct SoftmaxState {
    past: Option<(Tensor<4>, Tensor<4>)>,
}

impl SoftmaxState {
    /// The states of the batch entries `indices`.
    pub(super) fn select(&self, indices: &Tensor<1, Int>) -> Self {
        let take = |x: &Tensor<4>| x.clone().select(0, indices.clone());
        Self { past: self.past.as_ref().map(|(keys, values)| (take(keys), take(values))) }
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
