//! Which keys a query sees, for attention in tensor operations that forms scores.

use std::ops::Range;

use burn::tensor::{Bool, Device, Tensor};
use longspan_kernels::Order;

use super::tensor::distances;
use crate::attention::AttentionMask;

/// The pairs of a query and a key in one call; sequences are not packed.
pub(crate) struct Pairs {
    keys: usize,
    causal: bool,
    offset: isize,
    /// Keys at this distance or beyond are not seen.
    window: Option<usize>,
    /// Whether each key is ignored, `[batch, 1, keys, 1]`; `None` where none is.
    ignored: Option<Tensor<4, Bool>>,
    device: Device,
}

impl Pairs {
    /// Rows of scores that are formed together: few beside a long sequence, enough for an efficient product.
    pub(crate) const ROWS: usize = 64;

    /// Of queries such as `q` and `keys` keys, of which those at distances below a window alone count.
    pub(crate) fn new(q: &Tensor<4>, keys: usize, mask: &AttentionMask, window: Option<usize>) -> Self {
        let [batch, _, queries, _] = q.dims();
        // Further away nothing changes, and any type of integers holds it.
        let most = (queries + keys).saturating_add(window.unwrap_or(0)) as isize;
        Self {
            keys,
            causal: mask.order == Order::Causal,
            offset: mask.offset.clamp(-most, most),
            window,
            ignored: mask.keys.ignored([batch, keys], &q.device()),
            device: q.device(),
        }
    }

    /// The keys among which are all that these queries see: one at least, of one or more.
    pub(crate) fn seen(&self, queries: &Range<usize>) -> Range<usize> {
        let inside = |key: isize| key.clamp(0, self.keys as isize) as usize;
        let (first, end) = (queries.start as isize + self.offset, queries.end as isize + self.offset);
        let reach = self.window.map(|window| window as isize - 1);
        let start = inside(reach.map_or(0, |reach| first - reach)).min(self.keys - 1);
        let end = if self.causal { inside(end) } else { inside(reach.map_or(isize::MAX, |reach| end + reach)) };
        start..end.max(start + 1)
    }

    /// `x`, `[batch, heads, keys, width]`, with 0 for ignored keys. Filled, not multiplied by 0: NaN in padding would stay NaN.
    pub(crate) fn without_ignored(&self, x: Tensor<4>) -> Tensor<4> {
        let Some(ignored) = &self.ignored else { return x };
        let shape = x.dims();
        x.mask_fill(ignored.clone().expand(shape), 0.0)
    }

    /// Which of these pairs are not seen, `[batch or 1, 1, queries, keys]`; `None` where all are.
    pub(crate) fn hidden(&self, queries: &Range<usize>, keys: &Range<usize>) -> Option<Tensor<4, Bool>> {
        let first = keys.start as isize - queries.start as isize - self.offset;
        let distance = || distances(first, queries.len(), keys.len(), &self.device);
        let last = first + keys.len() as isize - 1;
        let future = (self.causal && last > 0).then(|| distance().greater_elem(0));
        let beyond = self.window.map(|window| distance().abs().greater_equal_elem(window as i64));
        let by_distance = future.into_iter().chain(beyond).reduce(Tensor::bool_or).map(Tensor::unsqueeze::<4>);
        let ignored = self.ignored.clone().map(|ignored| ignored.narrow(2, keys.start, keys.len()).swap_dims(2, 3));
        match (by_distance, ignored) {
            (Some(hidden), Some(ignored)) => {
                let shape = [ignored.dims()[0], 1, queries.len(), keys.len()];
                Some(hidden.expand(shape).bool_or(ignored.expand(shape)))
            }
            (by_distance, ignored) => by_distance.or(ignored),
        }
    }
}

/// Scores, `[batch or 1, heads, queries, keys]`, with `value` where a pair is [hidden](Pairs::hidden).
pub(crate) fn hide(scores: Tensor<4>, hidden: &Option<Tensor<4, Bool>>, value: f32) -> Tensor<4> {
    let Some(hidden) = hidden else { return scores };
    let [batch, heads, queries, keys] = scores.dims();
    let shape = [batch.max(hidden.dims()[0]), heads, queries, keys];
    scores.expand(shape).mask_fill(hidden.clone().expand(shape), value)
}
