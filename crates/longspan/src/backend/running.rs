//! The state of kernelized attention in plain tensor operations, token by token.

use burn::tensor::{Int, Tensor, TensorData};
use longspan_kernels::{KernelizedAttention, RelativeMap};

use super::feature_map::{Learned, Side, lift};
use super::tensor::{
    decays, divide, features, largest, narrow_float, relative_features, relative_rows, repeat_heads, widen, with_ones,
};

/// The state of a prefix in tensors, one for each query head.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    batch: usize,
    heads: usize,
    value_dim: usize,
    /// `Σ φ(k_j) v⁺_jᵀ`, `[batch, heads, m, dv + 1]`; without content none.
    content: Option<Tensor<4>>,
    /// The exponent that an exponential map subtracted from the keys, `[batch, heads, 1, 1]`.
    shift: Option<Tensor<4>>,
    /// `Σ v⁺_j` of the tokens that fell out of the ring, `[batch, heads, 1, dv + 1]`, and the last `R` rows of `v⁺`,
    /// oldest first, `[batch, heads, R, dv + 1]`; without relative positions none.
    recent: Option<(Tensor<4>, Tensor<4>)>,
}

impl Running {
    /// Before the first token; `like` is a query `[batch, heads, 1, head_dim]`.
    pub(crate) fn empty(options: &KernelizedAttention, like: &Tensor<4>, value_dim: usize) -> Self {
        let [batch, heads, _, dim] = like.dims();
        let dim = options.feature_map.features(dim);
        let dtype = widen(like.clone()).dtype();
        let zeros = |rows, width| Tensor::<4>::zeros([batch, heads, rows, width], (&like.device(), dtype));
        let width = value_dim + usize::from(options.normalize);
        let shifted = options.feature_map.is_exponential() && options.normalize;
        Self {
            batch,
            heads,
            value_dim,
            content: options.score.content().then(|| zeros(dim, width)),
            // Below every exponent, and finite, so that no difference is NaN.
            shift: shifted.then(|| zeros(1, 1).add_scalar(-1e30)),
            recent: options.score.shaw().map(|shaw| (zeros(1, width), zeros(shaw.radius, width))),
        }
    }

    /// Batch, heads and width of a value.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.batch, self.heads, self.value_dim]
    }

    /// All its tensors, in one order.
    pub(crate) fn tensors(&mut self) -> Vec<&mut Tensor<4>> {
        let recent = self.recent.iter_mut().flat_map(|(far, ring)| [far, ring]);
        self.content.iter_mut().chain(&mut self.shift).chain(recent).collect()
    }

    /// Takes one token in, all `[batch, heads or kv_heads, 1, ·]`, and gives its output.
    pub(crate) fn step(
        &mut self,
        options: &KernelizedAttention,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        (table, learned): (Option<Tensor<3>>, &Learned),
    ) -> Tensor<4> {
        let dtype = q.dtype();
        let [batch, heads, _, _] = q.dims();
        let value_dim = v.dims()[3];
        let mut q = lift(options.feature_map, learned, Side::Queries, widen(q));
        let mut k = lift(options.feature_map, learned, Side::Keys, widen(repeat_heads(k, heads)));
        let table = table.map(|table| relative_rows(options, learned, table, heads));
        let values = with_ones(widen(repeat_heads(v, heads)), None, options.normalize);
        let decay = decays(options, heads).map(|factors| {
            Tensor::<4>::from_data(TensorData::new(factors, [1, heads, 1, 1]), (&q.device(), q.dtype()))
        });
        let mut rescale = decay.clone();
        if let Some(shift) = &self.shift {
            q = q.clone() - q.max_dim(3);
            let mut top = shift.clone();
            if options.score.content() {
                top = top.max_pair(largest(k.clone()));
            }
            if let (Some(table), Some(shaw)) = (&table, options.score.shaw())
                && shaw.map == RelativeMap::Same
            {
                top = top.max_pair(largest(table.clone()).expand([batch, heads, 1, 1]));
            }
            k = k - top.clone();
            let fall = (shift.clone() - top.clone()).exp();
            rescale = Some(rescale.map_or(fall.clone(), |decay| decay * fall));
            self.shift = Some(top);
        }
        let q = features(options.feature_map, q);
        let mut sums = None;
        if let Some(content) = self.content.take() {
            let old = match rescale {
                Some(factor) => content * factor,
                None => content,
            };
            let content = old + features(options.feature_map, k).swap_dims(2, 3) * values.clone();
            sums = Some(q.clone().matmul(content.clone()));
            self.content = Some(content);
        }
        if let (Some((far, ring)), Some(table)) = (self.recent.take(), table) {
            let (far, ring) = match decay {
                Some(decay) => (far * decay.clone(), ring * decay),
                None => (far, ring),
            };
            let radius = ring.dims()[2];
            // Burn has no empty slices, so rings of 0 and 1 tokens are special cases.
            let (far, ring) = match radius {
                0 => (far + values, ring),
                1 => (far + ring, values),
                _ => {
                    let fallen = ring.clone().narrow(2, 0, 1);
                    (far + fallen, Tensor::cat(vec![ring.narrow(2, 1, radius - 1), values], 2))
                }
            };
            let rows = relative_features(options, table, self.shift.clone());
            let weights = q.matmul(rows.swap_dims(2, 3));
            let mut relative = weights.clone().narrow(3, 0, 1) * far.clone();
            if radius > 0 {
                // The newest token of the ring is at distance 0, which is row R of the table.
                relative = relative + weights.narrow(3, 1, radius).matmul(ring.clone());
            }
            sums = Some(match sums {
                Some(content) => content + relative,
                None => relative,
            });
            self.recent = Some((far, ring));
        }
        let sums = sums.expect("a score has content, relative positions or both");
        narrow_float(divide(sums, value_dim, options.normalize), dtype)
    }

    /// The states of the batch entries `indices`.
    pub(crate) fn select(&self, indices: &Tensor<1, Int>) -> Self {
        let take = |x: &Tensor<4>| x.clone().select(0, indices.clone());
        Self {
            batch: indices.dims()[0],
            heads: self.heads,
            value_dim: self.value_dim,
            content: self.content.as_ref().map(take),
            shift: self.shift.as_ref().map(take),
            recent: self.recent.as_ref().map(|(far, ring)| (take(far), take(ring))),
        }
    }
}
