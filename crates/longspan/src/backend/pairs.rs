//! Which keys a query sees, for attention in tensor operations that forms all scores.

use burn::tensor::{Bool, Device, Tensor, TensorData};
use longspan_kernels::Order;

use crate::attention::AttentionMask;

/// The pairs of a query and a key in one call; sequences are not packed.
pub(crate) struct Pairs {
    batch: usize,
    keys: usize,
    causal: bool,
    offset: isize,
    /// Keys at this distance or beyond are not seen.
    window: Option<usize>,
    /// Whether each key is ignored, `batch × keys`; `None` where none is.
    ignored: Option<Vec<bool>>,
    device: Device,
}

impl Pairs {
    /// Rows of scores that are formed together: few beside a long sequence, enough for an efficient product.
    pub(crate) const ROWS: usize = 64;

    /// Of queries such as `q` and so many keys.
    pub(crate) fn new(q: &Tensor<4>, keys: usize, mask: &AttentionMask) -> Self {
        let batch = q.dims()[0];
        Self {
            batch,
            keys,
            causal: mask.order == Order::Causal,
            offset: mask.offset,
            window: None,
            ignored: mask.ignored(batch, keys),
            device: q.device(),
        }
    }

    /// Those at distances below a window alone.
    pub(crate) fn within(self, window: Option<usize>) -> Self {
        Self { window, ..self }
    }

    /// Number of keys.
    pub(crate) fn keys(&self) -> usize {
        self.keys
    }

    /// `x`, `[batch, heads, keys, width]`, with `value` in the rows of ignored keys.
    pub(crate) fn ignored_as(&self, x: Tensor<4>, value: f32) -> Tensor<4> {
        let Some(ignored) = &self.ignored else { return x };
        let ignored = TensorData::new(ignored.clone(), [self.batch, 1, self.keys, 1]);
        let ignored = Tensor::<4, Bool>::from_data(ignored, &self.device).expand(x.dims());
        x.mask_fill(ignored, value)
    }

    /// `x` with 0 for ignored keys. Filled, not multiplied by 0: NaN in padding would stay NaN.
    pub(crate) fn without_ignored(&self, x: Tensor<4>) -> Tensor<4> {
        self.ignored_as(x, 0.0)
    }

    /// Scores `[batch or 1, heads, rows, keys]` of the queries from `first` on, with `value` where a query does not see
    /// the key.
    pub(crate) fn hidden_as(&self, scores: Tensor<4>, first: usize, value: f32) -> Tensor<4> {
        if !self.causal && self.ignored.is_none() && self.window.is_none() {
            return scores;
        }
        let [_, heads, rows, keys] = scores.dims();
        let batch = if self.ignored.is_some() { self.batch } else { 1 };
        let mut hidden = Vec::with_capacity(batch * rows * keys);
        for b in 0..batch {
            for row in first..first + rows {
                let position = row as isize + self.offset;
                hidden.extend((0..keys).map(|key| {
                    (self.causal && key as isize > position)
                        || self.window.is_some_and(|window| position.abs_diff(key as isize) >= window)
                        || self.ignored.as_ref().is_some_and(|ignored| ignored[b * keys + key])
                }));
            }
        }
        let hidden = Tensor::<4, Bool>::from_data(TensorData::new(hidden, [batch, 1, rows, keys]), &self.device);
        let shape = [batch.max(scores.dims()[0]), heads, rows, keys];
        scores.expand(shape).mask_fill(hidden.expand(shape), value)
    }
}
