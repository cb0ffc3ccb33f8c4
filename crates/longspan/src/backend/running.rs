//! The state of kernelized attention in plain tensor operations.

use burn::tensor::{DType, Int, Tensor, TensorData};
use longspan_kernels::{FourierNormalizer, KernelizedAttention, RelativeMap};

use super::feature_map::Learned;
use super::tensor::{Inputs, decays, divide, narrow_float, spread, widen};
use crate::attention::AttentionMask;

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
    /// `Σ φ(k_j)`, `[batch, heads, m, 1]`, where rows of rotated features are divided by what they would be without the rotation.
    plain: Option<Tensor<4>>,
    /// Tokens so far, where they rotate features.
    tokens: usize,
}

impl Running {
    /// Before the first token; `like` is a query `[batch, heads, 1, head_dim]`, whose features become so many by a rotation.
    pub(crate) fn empty(
        options: &KernelizedAttention,
        like: &Tensor<4>,
        value_dim: usize,
        rotated: Option<usize>,
    ) -> Self {
        let [batch, heads, _, dim] = like.dims();
        let features = options.feature_map.features(dim);
        let unrotated = options.score.fourier().is_some_and(|f| f.normalizer == FourierNormalizer::Unrotated);
        let dtype = widen(like.clone()).dtype();
        let zeros = |rows, width| Tensor::<4>::zeros([batch, heads, rows, width], (&like.device(), dtype));
        let width = value_dim + usize::from(options.normalize);
        let lifted = options.score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Same);
        let shifted = options.feature_map.is_exponential() && options.normalize && (options.score.content() || lifted);
        Self {
            batch,
            heads,
            value_dim,
            content: options.score.content().then(|| zeros(rotated.unwrap_or(features), width)),
            // Below every exponent, and finite, so that no difference is NaN.
            shift: shifted.then(|| zeros(1, 1).add_scalar(-1e30)),
            recent: options.score.shaw().map(|shaw| (zeros(1, width), zeros(shaw.radius, width))),
            plain: (unrotated && options.normalize).then(|| zeros(features, 1)),
            tokens: 0,
        }
    }

    /// Before the first token of a mechanism whose state is one sum, `[batch, heads, head_dim, value_dim]` for queries such as `like`.
    pub(crate) fn of_sum(like: &Tensor<4>, value_dim: usize) -> Self {
        let [batch, heads, _, dim] = like.dims();
        let sum = Tensor::zeros([batch, heads, dim, value_dim], (&like.device(), widen(like.clone()).dtype()));
        Self { batch, heads, value_dim, content: Some(sum), shift: None, recent: None, plain: None, tokens: 0 }
    }

    /// Changes such a sum.
    pub(crate) fn after<R>(&mut self, change: impl FnOnce(&mut Tensor<4>) -> R) -> R {
        change(self.content.as_mut().expect("a state of one sum"))
    }

    /// Batch, heads and width of a value.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.batch, self.heads, self.value_dim]
    }

    /// The type of its numbers.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.content.as_ref().or(self.recent.as_ref().map(|(far, _)| far)).map(|x| x.dtype())
    }

    /// Tokens so far, where they rotate features; else 0.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// After so many tokens.
    pub(crate) fn set_tokens(&mut self, tokens: usize) {
        self.tokens = tokens;
    }

    /// With tensors of so many sequences.
    pub(crate) fn set_batch(&mut self, batch: usize) {
        self.batch = batch;
    }

    /// All its tensors, in one order.
    pub(crate) fn tensors(&mut self) -> Vec<&mut Tensor<4>> {
        let recent = self.recent.iter_mut().flat_map(|(far, ring)| [far, ring]);
        self.content.iter_mut().chain(&mut self.shift).chain(recent).chain(&mut self.plain).collect()
    }

    /// Takes tokens in, all `[batch, heads or kv_heads, tokens, ·]`, and gives their outputs, in chunks of at least `chunk` tokens.
    /// `rotate` changes the features of queries and keys from a token on.
    pub(crate) fn advance(
        &mut self,
        options: &KernelizedAttention,
        [q, k, v]: [Tensor<4>; 3],
        (table, learned): (Option<Tensor<3>>, &Learned),
        chunk: usize,
        rotate: impl FnOnce(usize, Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
    ) -> Tensor<4> {
        let (dtype, [_, heads, tokens, _], value_dim) = (q.dtype(), q.dims(), v.dims()[3]);
        let mask = AttentionMask::causal();
        let plain = Inputs::new(options, learned, q, k, v, table, &mask, self.shift.clone());
        let (q, k) = rotate(self.tokens, plain.q.clone(), plain.k.clone());
        self.tokens += if options.score.fourier().is_some() { tokens } else { 0 };
        let inputs = Inputs { q, k, ..plain.clone() };
        let mut sums = inputs.sums(&mask, chunk);
        let fall = self.shift.take().zip(inputs.shift.clone()).map(|(before, after)| (before - after).exp());
        let Inputs { q, k, values, weights, shift, .. } = inputs;
        self.shift = shift;
        let powers = |of: &dyn Fn(usize) -> usize| {
            let decay = decays(options, heads)?;
            let power = |g: f64| (0..tokens).map(move |i| g.powf(of(i) as f64));
            let powers = decay.into_iter().flat_map(power).collect::<Vec<_>>();
            Some(Tensor::<4>::from_data(TensorData::new(powers, [1, heads, tokens, 1]), (&q.device(), q.dtype())))
        };
        // What has decayed: of the state at each token, of it after the last, and of each token after the last.
        let since = powers(&|i| i + 1);
        let whole = since.clone().map(|since| since.narrow(2, tokens - 1, 1));
        let until = powers(&|i| tokens - 1 - i);
        let times = |x: Tensor<4>, by: &Option<Tensor<4>>| by.clone().map_or(x.clone(), |by| x * by);
        if let Some(content) = self.content.take() {
            let content = times(content, &fall);
            sums = sums + times(q.matmul(content.clone()), &since);
            let own = times(k, &until).swap_dims(2, 3).matmul(values.clone());
            self.content = Some(times(content, &whole) + own);
        }
        if let Some(sum) = self.plain.take() {
            let sum = times(sum, &fall);
            let ones = plain.values.clone().narrow(3, value_dim, 1);
            let own = times(plain.k.clone(), &until).swap_dims(2, 3).matmul(ones.clone());
            let before = times(plain.q.clone().matmul(sum.clone()), &since);
            let denominators = Inputs { values: ones, ..plain }.sums(&mask, chunk) + before;
            sums = Tensor::cat(vec![sums.narrow(3, 0, value_dim), denominators], 3);
            self.plain = Some(times(sum, &whole) + own);
        }
        if let (Some((far, ring)), Some(weights)) = (self.recent.take(), weights) {
            let radius = ring.dims()[2];
            let farthest = weights.clone().narrow(3, 0, 1);
            // Burn has no empty slices, so a ring of no tokens is a special case, as are the queries that see the ring near them.
            let near = radius.min(tokens);
            let mut parts = Vec::new();
            if near > 0 {
                let near_weights = weights.narrow(2, 0, near).unsqueeze_dim::<5>(2);
                let near_weights = spread(near_weights, -(radius as isize), radius).squeeze_dim::<4>(2);
                parts.push(farthest.clone().narrow(2, 0, near) * far.clone() + near_weights.matmul(ring.clone()));
            }
            if tokens > near {
                let all = if radius > 0 { far.clone() + ring.clone().sum_dim(2) } else { far.clone() };
                parts.push(farthest.narrow(2, near, tokens - near) * all);
            }
            sums = sums + times(Tensor::cat(parts, 2), &since);
            let (far, ring, values) = (times(far, &whole), times(ring, &whole), times(values, &until));
            let (fallen, ring) = if radius > 0 {
                let all = Tensor::cat(vec![ring, values], 2);
                (all.clone().narrow(2, 0, tokens), all.narrow(2, tokens, radius))
            } else {
                (values, ring)
            };
            self.recent = Some((far + fallen.sum_dim(2), ring));
        }
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
            plain: self.plain.as_ref().map(take),
            tokens: self.tokens,
        }
    }
}
