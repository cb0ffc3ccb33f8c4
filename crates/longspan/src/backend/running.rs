//! The state of kernelized attention in plain tensor operations.

use burn::tensor::{Int, Tensor};
use longspan_kernels::{FourierNormalizer, KernelizedAttention, RelativeMap};

use super::feature_map::Learned;
use super::tensor::{Inputs, LOWEST, decays, divide, narrow_float, place, powers, spread, widen_type};
use crate::attention::AttentionMask;

/// The state of a prefix in tensors, of constant size, one for each query head.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    /// Batch, heads and width of a value.
    pub shape: [usize; 3],
    /// Tokens so far, where the mechanism counts them; else 0.
    pub tokens: usize,
    /// What the mechanism keeps, `[batch, heads, ·, ·]` each, in an order of its own.
    pub tensors: Vec<Tensor<4>>,
}

impl Running {
    /// For queries such as `like`, `[batch, heads, ·, ·]`, and values of `value_dim`.
    pub(crate) fn new(like: &Tensor<4>, value_dim: usize, tensors: Vec<Tensor<4>>) -> Self {
        let [batch, heads, ..] = like.dims();
        Self { shape: [batch, heads, value_dim], tokens: 0, tensors }
    }

    /// Before the first token of kernelized attention; `like` is a query `[batch, heads, 1, head_dim]`, which has `rotated` features
    /// by a rotation.
    pub(crate) fn empty(
        options: &KernelizedAttention,
        like: &Tensor<4>,
        value_dim: usize,
        rotated: Option<usize>,
    ) -> Self {
        let features = options.feature_map.features(like.dims()[3]);
        let width = value_dim + usize::from(options.normalize);
        let keeps = Keeps::of(options);
        let zeros = |wanted: bool, rows, width| wanted.then(|| zeros_like(like, rows, width));
        let radius = options.score.shaw().map_or(0, |shaw| shaw.radius);
        let sums = Sums {
            content: zeros(keeps.content, rotated.unwrap_or(features), width),
            shift: zeros(keeps.shift, 1, 1).map(|x| x.add_scalar(LOWEST)),
            recent: zeros(keeps.recent, 1, width).zip(zeros(keeps.recent, radius, width)),
            plain: zeros(keeps.plain, features, 1),
        };
        Self::new(like, value_dim, sums.into_tensors())
    }

    /// Before the first token of a mechanism whose state is one sum, `[batch, heads, head_dim, value_dim]` for queries such as `like`.
    pub(crate) fn of_sum(like: &Tensor<4>, value_dim: usize) -> Self {
        Self::new(like, value_dim, vec![zeros_like(like, like.dims()[3], value_dim)])
    }

    /// Takes tokens in, all `[batch, heads or kv_heads, tokens, ·]`, and gives their outputs, in chunks of at least `chunk` tokens.
    /// `rotate` changes the features of queries and keys from a token on. At most a chunk of tokens bring log decays,
    /// `[batch, heads, tokens, 1]`.
    pub(crate) fn advance(
        &mut self,
        options: &KernelizedAttention,
        [q, k, v]: [Tensor<4>; 3],
        (mask, gates): (&AttentionMask, Option<Tensor<4>>),
        (table, learned): (Option<Tensor<3>>, &Learned),
        chunk: usize,
        rotate: impl FnOnce(usize, Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
    ) -> Tensor<4> {
        let (dtype, [_, heads, tokens, _], value_dim) = (q.dtype(), q.dims(), v.dims()[3]);
        let mut kept = Sums::of(options, std::mem::take(&mut self.tensors));
        let mut plain = Inputs::new(options, learned, q, k, v, table, mask, kept.shift.clone());
        // An ignored token brings none.
        plain.gates = gates.map(|logs| match &plain.ignored {
            Some(ignored) => logs.clone().mask_fill(ignored.clone().expand(logs.dims()), 0.0),
            None => logs,
        });
        let (q, k) = rotate(self.tokens, plain.q.clone(), plain.k.clone());
        self.tokens += if options.score.fourier().is_some() { tokens } else { 0 };
        let inputs = Inputs { q, k, ..plain.clone() };
        let mut sums = inputs.sums(mask, chunk);
        // What brings the state to its exponent after the tokens, and to those of their rows.
        let (mut fall, mut to_rows) = (None, None);
        if let (Some(shift), Some(exponents)) = (&mut kept.shift, &inputs.exponents) {
            let before = std::mem::replace(shift, exponents.all.clone());
            (fall, to_rows) = (Some((before.clone() - shift.clone()).exp()), Some(exponents.to_rows(before)));
        }
        let (k, plain_k) = (inputs.keys(), plain.keys());
        let Inputs { q, values, weights, gates, .. } = inputs;
        // What has decayed: of the state at each token, of it after the last, and of each token after the last.
        let places = || Tensor::<1, Int>::arange(0..tokens as i64, &q.device()).reshape([1, 1, tokens, 1]);
        let constant = decays(options, heads).map(|decay| {
            let until = powers(&decay, places().neg().add_scalar(tokens as i64 - 1), q.dtype());
            (powers(&decay, places().add_scalar(1), q.dtype()), until)
        });
        let brought = gates.map(|logs| {
            // Sums of what stands after each token, not differences of sums from the start.
            let later =
                if tokens > 1 { place(logs.clone().narrow(2, 1, tokens - 1), 0, 1, 0.0) } else { logs.zeros_like() };
            (logs.cumsum(2).exp(), later.flip([2]).cumsum(2).flip([2]).exp())
        });
        let (since, until) = constant.or(brought).unzip();
        let whole = since.clone().map(|since| since.narrow(2, tokens - 1, 1));
        let times = |x: Tensor<4>, by: &Option<Tensor<4>>| by.clone().map_or(x.clone(), |by| x * by);
        if let Some(content) = kept.content.take() {
            sums = sums + times(times(q.matmul(content.clone()), &to_rows), &since);
            let own = times(k, &until).swap_dims(2, 3).matmul(values.clone());
            kept.content = Some(times(times(content, &fall), &whole) + own);
        }
        if let Some(sum) = kept.plain.take() {
            let ones = plain.values.clone().narrow(3, value_dim, 1);
            let own = times(plain_k, &until).swap_dims(2, 3).matmul(ones.clone());
            let before = times(times(plain.q.clone().matmul(sum.clone()), &to_rows), &since);
            let denominators = Inputs { values: ones, ..plain }.sums(mask, chunk) + before;
            sums = Tensor::cat(vec![sums.narrow(3, 0, value_dim), denominators], 3);
            kept.plain = Some(times(times(sum, &fall), &whole) + own);
        }
        if let (Some((far, ring)), Some(weights)) = (kept.recent.take(), weights) {
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
            kept.recent = Some((far + fallen.sum_dim(2), ring));
        }
        self.tensors = kept.into_tensors();
        narrow_float(divide(sums, value_dim, options.normalize), dtype)
    }

    /// The states of the batch entries `indices`.
    pub(crate) fn select(&self, indices: &Tensor<1, Int>) -> Self {
        let [_, heads, value_dim] = self.shape;
        let tensors = self.tensors.iter().map(|x| x.clone().select(0, indices.clone())).collect();
        Self { shape: [indices.dims()[0], heads, value_dim], tensors, ..*self }
    }
}

/// `[batch, heads, rows, width]` zeros beside queries such as `like`.
pub(crate) fn zeros_like(like: &Tensor<4>, rows: usize, width: usize) -> Tensor<4> {
    let [batch, heads, ..] = like.dims();
    Tensor::zeros([batch, heads, rows, width], (&like.device(), widen_type(like.dtype())))
}

/// What kernelized attention keeps, by its options.
struct Keeps {
    content: bool,
    shift: bool,
    recent: bool,
    plain: bool,
}

impl Keeps {
    fn of(options: &KernelizedAttention) -> Self {
        let (content, shaw) = (options.score.content(), options.score.shaw());
        let lifted = shaw.is_some_and(|shaw| shaw.map == RelativeMap::Same);
        let unrotated = options.score.fourier().is_some_and(|f| f.normalizer == FourierNormalizer::Unrotated);
        Self {
            content,
            shift: options.feature_map.is_exponential() && options.normalize && (content || lifted),
            recent: shaw.is_some(),
            plain: unrotated && options.normalize,
        }
    }
}

/// The sums of kernelized attention, `[batch, heads, ·, ·]` each.
struct Sums {
    /// `Σ φ(k_j) v⁺_jᵀ`, `m × (dv + 1)`; without content none.
    content: Option<Tensor<4>>,
    /// The exponent that an exponential map subtracted from the keys, one number.
    shift: Option<Tensor<4>>,
    /// `Σ v⁺_j` of the tokens that fell out of the ring, one row, and the last `R` rows of `v⁺`, oldest first; without relative
    /// positions none.
    recent: Option<(Tensor<4>, Tensor<4>)>,
    /// `Σ φ(k_j)`, a column, where rows of rotated features are divided by what they would be without the rotation.
    plain: Option<Tensor<4>>,
}

impl Sums {
    fn of(options: &KernelizedAttention, tensors: Vec<Tensor<4>>) -> Self {
        let keeps = Keeps::of(options);
        let mut tensors = tensors.into_iter();
        let mut next = |wanted: bool| wanted.then(|| tensors.next()).flatten();
        Self {
            content: next(keeps.content),
            shift: next(keeps.shift),
            recent: next(keeps.recent).zip(next(keeps.recent)),
            plain: next(keeps.plain),
        }
    }

    fn into_tensors(self) -> Vec<Tensor<4>> {
        let recent = self.recent.into_iter().flat_map(|(far, ring)| [far, ring]);
        self.content.into_iter().chain(self.shift).chain(recent).chain(self.plain).collect()
    }
}
