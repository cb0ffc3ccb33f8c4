//! Kernelized attention in plain tensor operations: every backend runs it, and autodiff differentiates it.
//!
//! The token axis is cut into chunks of `C` tokens, and all chunks are computed at once. A query sees the keys near it
//! through a dense tile of scores, one chunk (content) or three chunks wide (relative positions need the window of `R`
//! tokens to each side), and all others through sums over whole chunks:
//!
//! `N⁺_i = Σ_{j near i} s_ij v⁺_j + φ(q_i)ᵀ·Σ_{j before} φ(k_j) v⁺_jᵀ + w_{i,0}·Σ_{j far before} v⁺_j + w_{i,2R}·Σ_{j
//! far after} v⁺_j`
//!
//! with `v⁺ = [v, 1]` and `w = φ(q)·ρ(r)ᵀ`. Memory and time grow with `L·(C + m·dv/C)` for each head. Sums after a
//! query are suffix sums, never a total less a prefix.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::activation::{relu, sigmoid as burn_sigmoid, softplus};
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData};
use longspan_kernels::{FeatureMap, KernelizedAttention, Order, RelativeMap, Score};

use super::feature_map::{Learned, Side, elementwise, lift};
use crate::attention::AttentionMask;

/// Tokens in a chunk. Tiles of 64² keep matrix products efficient on CPUs and GPUs alike, and the sums over chunks,
/// `m·dv` for each, no larger than the inputs at the usual head width of 64.
pub(crate) const CHUNK: usize = 64;

/// Attention over whole sequences in chunks of at least `chunk` tokens; `table`: `[heads, 2R+1, head_dim]`, or
/// `[1, 2R+1, head_dim]` if shared (or as many numbers a row as features); other shapes as in
/// [`attend`](super::attend), which checks them.
pub(crate) fn attend(
    options: &KernelizedAttention,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    (table, learned): (Option<Tensor<3>>, &Learned),
    mask: &AttentionMask,
    chunk: usize,
) -> Tensor<4> {
    let dtype = q.dtype();
    let [batch, heads, queries, _] = q.dims();
    let [_, _, keys, value_dim] = v.dims();
    if batch * heads * queries * keys * value_dim == 0 {
        return Tensor::zeros([batch, heads, queries, value_dim], (&q.device(), dtype));
    }
    let sums = Inputs::new(options, learned, q, k, v, table, mask, None).sums(mask, chunk);
    narrow_float(divide(sums, value_dim, options.normalize), dtype)
}

/// [`attend`] without a table, on features that `rotate` changes first: `(φ(q), φ(k))` → the features of the weights.
/// With `content_denominators` rows are divided by the sums of `φ(q)·φ(k)` instead, as they are without the rotation.
pub(crate) fn attend_rotated(
    (options, learned): (&KernelizedAttention, &Learned),
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: &AttentionMask,
    content_denominators: bool,
    rotate: impl FnOnce(Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
) -> Tensor<4> {
    let dtype = q.dtype();
    let value_dim = v.dims()[3];
    let plain = Inputs::new(options, learned, q, k, v, None, mask, None);
    let (q, k) = rotate(plain.q.clone(), plain.k.clone());
    let mut sums = Inputs { q, k, ..plain.clone() }.sums(mask, CHUNK);
    if content_denominators && options.normalize {
        let ones = plain.values.clone().narrow(3, value_dim, 1);
        let denominators = Inputs { values: ones, ..plain }.sums(mask, CHUNK);
        sums = Tensor::cat(vec![sums.narrow(3, 0, value_dim), denominators], 3);
    }
    narrow_float(divide(sums, value_dim, options.normalize), dtype)
}

/// Numerators over denominators: `[.., dv + 1]` → `[.., dv]`. A row without weight gives 0, with gradient 0.
pub(crate) fn divide(sums: Tensor<4>, value_dim: usize, normalize: bool) -> Tensor<4> {
    if !normalize {
        return sums;
    }
    let numerators = sums.clone().narrow(3, 0, value_dim);
    let denominators = sums.narrow(3, value_dim, 1);
    // What decays have all but erased has no digits left; the kernels draw the same line.
    let least = if denominators.dtype() == DType::F64 { f64::MIN_POSITIVE } else { f32::MIN_POSITIVE.into() };
    let empty = denominators.clone().abs().lower_elem(least);
    let shape = numerators.shape();
    let denominators = denominators.mask_fill(empty.clone(), 1.0);
    // Relative to their size, whose square may have no place in the number type: the gradient of a quotient asks for it.
    let size = denominators.clone().detach().abs();
    (numerators / size.clone() / (denominators / size)).mask_fill(empty.expand(shape), 0.0)
}

/// `1 / (1 + e⁻ˣ)`. Burn's own rounds doubles to single precision.
pub(crate) fn sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        // Further down it is 0, and its slope would be infinity by infinity.
        DType::F64 => x.clamp_min(-700.0).neg().exp().add_scalar(1.0).recip(),
        _ => burn_sigmoid(x),
    }
}

/// `x / (1 + e⁻ˣ)`.
pub(crate) fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.clone() * sigmoid(x)
}

/// A learned tensor as one row of numbers, which may have been quantized.
pub(crate) fn flattened<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    plain(x).reshape([-1])
}

/// A learned tensor as numbers, which may have been quantized.
fn plain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if matches!(x.dtype(), DType::QFloat(_)) { x.dequantize() } else { x }
}

/// `f16` and `bf16` are too coarse for sums: they are converted to `f32`.
pub(crate) fn widen<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = plain(x);
    let wide = widen_type(x.dtype());
    if x.dtype() == wide { x } else { x.cast(wide) }
}

/// The type of what is [widened](widen).
pub(crate) fn widen_type(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

pub(crate) fn narrow_float<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

/// `φ`, of what [`lift`] gives.
pub(crate) fn features<const D: usize>(map: FeatureMap, x: Tensor<D>) -> Tensor<D> {
    match elementwise(map) {
        // Not `elu(x) + 1`, which rounds the small features of very negative entries to 0.
        FeatureMap::EluPlusOne => relu(x.clone()) + x.clamp_max(0.0).exp(),
        FeatureMap::Relu => relu(x),
        FeatureMap::Softplus => softplus(x, 1.0),
        FeatureMap::Exp => x.exp(),
        _ => x,
    }
}

/// The rows of Shaw's table for each head, `[1, heads, 2R+1, m]`, [lifted](lift) where they go through the map of keys.
pub(super) fn relative_rows(
    options: &KernelizedAttention,
    learned: &Learned,
    table: Tensor<3>,
    heads: usize,
) -> Tensor<4> {
    let [_, rows, dim] = table.dims();
    let table = widen(table).expand([heads, rows, dim]).unsqueeze_dim::<4>(0);
    match options.score.shaw() {
        Some(shaw) if shaw.map == RelativeMap::Same => lift(options.feature_map, learned, Side::Keys, table),
        _ => table,
    }
}

/// An exponent below all others, and finite, so that no difference is NaN.
pub(crate) const LOWEST: f64 = -1e30;

/// What an exponential map subtracts from the exponents of keys and rows of a table, of rows that are divided by the sum of their weights.
#[derive(Clone)]
pub(crate) struct Exponents {
    /// From those of each key, `[batch, heads, keys, 1]`; [`LOWEST`] where one is ignored.
    pub keys: Tensor<4>,
    /// What the weights of each query count from, `[batch, heads, queries, 1]`: the largest that it sees.
    pub rows: Tensor<4>,
    /// The largest of all, `[batch, heads, 1, 1]`.
    pub all: Tensor<4>,
}

impl Exponents {
    /// What brings sums of weights that count from `before`, `[batch, heads, 1, 1]`, to each query's exponent.
    pub fn to_rows(&self, before: Tensor<4>) -> Tensor<4> {
        (before - self.rows.clone()).exp()
    }
}

/// One key/value head for each query head.
pub(crate) fn repeat_heads(x: Tensor<4>, heads: usize) -> Tensor<4> {
    let [batch, kv_heads, tokens, dim] = x.dims();
    if kv_heads == heads {
        return x;
    }
    let group = heads / kv_heads;
    x.unsqueeze_dim::<5>(2).expand([batch, kv_heads, group, tokens, dim]).reshape([batch, heads, tokens, dim])
}

/// The decay of each query head.
pub(super) fn decays(options: &KernelizedAttention, heads: usize) -> Option<Vec<f64>> {
    let decay = options.decay.as_ref()?;
    let group = heads / decay.len();
    Some((0..heads).map(|head| decay[head / group]).collect())
}

/// `[v, 1]`, or `v` where nothing is divided by; rows of ignored keys are 0.
pub(crate) fn with_ones(v: Tensor<4>, ignored: Option<&Tensor<4, Bool>>, normalize: bool) -> Tensor<4> {
    let [batch, heads, keys, _] = v.dims();
    if !normalize {
        return v;
    }
    let mut ones = Tensor::ones([batch, heads, keys, 1], (&v.device(), v.dtype()));
    if let Some(ignored) = ignored {
        ones = ones.mask_fill(ignored.clone().expand([batch, heads, keys, 1]), 0.0);
    }
    Tensor::cat(vec![v, ones], 3)
}

/// Features and values, ready for products.
#[derive(Clone)]
pub(crate) struct Inputs<'a> {
    pub options: &'a KernelizedAttention,
    /// `φ(q)`, `[batch, heads, queries, m]`.
    pub q: Tensor<4>,
    /// `φ(k)`, `[batch, heads, keys, m]`.
    pub k: Tensor<4>,
    /// `v⁺`, `[batch, heads, keys, dv + 1]`.
    pub values: Tensor<4>,
    /// `w = φ(q)·ρ(r)ᵀ`, `[batch, heads, queries, 2R+1]`.
    pub weights: Option<Tensor<4>>,
    /// Of `φ(k)`, under an exponential map; `w` counts from those of rows.
    pub exponents: Option<Exponents>,
    /// Whether each key is ignored, `[batch, 1, keys, 1]`; none where none is.
    pub ignored: Option<Tensor<4, Bool>>,
    /// The log decay that each token brings, `[batch, heads, tokens, 1]`, of at most a chunk of them.
    pub gates: Option<Tensor<4>>,
}

impl<'a> Inputs<'a> {
    /// `least`: what is subtracted from the exponents of keys at least.
    #[allow(clippy::too_many_arguments, reason = "a call and what it is after")]
    pub fn new(
        options: &'a KernelizedAttention,
        learned: &Learned,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        table: Option<Tensor<3>>,
        mask: &AttentionMask,
        least: Option<Tensor<4>>,
    ) -> Self {
        let [batch, heads, queries, dim] = q.dims();
        let [_, _, keys, value_dim] = v.dims();
        let (mut q, mut k, mut v) = (widen(q), widen(repeat_heads(k, heads)), widen(repeat_heads(v, heads)));
        let ignored = mask.keys.ignored([batch, keys], &q.device());
        if let Some(ignored) = &ignored {
            // Filled, not multiplied by 0: NaN in padding would stay NaN.
            k = k.mask_fill(ignored.clone().expand([batch, heads, keys, dim]), 0.0);
            v = v.mask_fill(ignored.clone().expand([batch, heads, keys, value_dim]), 0.0);
        }
        q = lift(options.feature_map, learned, Side::Queries, q);
        k = lift(options.feature_map, learned, Side::Keys, k);
        let table = table.map(|table| relative_rows(options, learned, table, heads));
        // A raw table counts as it is.
        let raw = options.score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Identity);
        let (mut exponents, mut of_table) = (None, None);
        if options.feature_map.is_exponential() && options.normalize {
            // Any factor common to a row's weights cancels in the division.
            q = q.clone() - q.detach().max_dim(3);
            let causal = mask.order == Order::Causal;
            of_table = table.as_ref().map(|table| {
                // Of the rows that are seen: under a causal mask none for later tokens.
                let rows = if causal { table.dims()[2] / 2 + 1 } else { table.dims()[2] };
                let top = table.clone().detach().narrow(2, 0, rows).max_dim(3).max_dim(2);
                if raw { top.zeros_like() } else { top }
            });
            let mut own = k.clone().detach().max_dim(3);
            if let Some(ignored) = ignored.clone().filter(|_| options.score.content()) {
                own = own.mask_fill(ignored.expand([batch, heads, keys, 1]), f32::NEG_INFINITY);
            }
            let none = own.clone().equal_elem(f32::NEG_INFINITY);
            k = k - own.clone().mask_fill(none.clone(), 0.0);
            own = if options.score.content() { own.mask_fill(none, LOWEST) } else { own.full_like(LOWEST) };
            let at_least = |x: Tensor<4>| {
                let larger = |x: Tensor<4>, least: Tensor<4>| x.clone().max_pair(least.expand(x.dims()));
                of_table.clone().into_iter().chain(least.clone()).fold(x, larger)
            };
            let all = at_least(own.clone().max_dim(2));
            // Beyond these offsets rows see no key, or all of them.
            let offset = mask.offset.clamp(-(queries as isize), keys as isize);
            let so_far = || at_least(clamped(own.clone().cummax(2), 2, offset, queries));
            let rows = if causal { so_far() } else { all.clone().expand([batch, heads, queries, 1]) };
            exponents = Some(Exponents { keys: own, rows, all });
        }
        let q = features(options.feature_map, q);
        let k = features(options.feature_map, k);
        let values = with_ones(v, ignored.as_ref(), options.normalize);
        let weights = table.map(|table| {
            let rows = match &of_table {
                _ if raw => table,
                // Rows that are not seen may be larger.
                Some(top) => features(options.feature_map, (table - top.clone()).clamp_max(0.0)),
                None => features(options.feature_map, table),
            };
            let weights = q.clone().matmul(rows.swap_dims(2, 3));
            let to_rows = exponents.as_ref().zip(of_table).map(|(exponents, of_table)| exponents.to_rows(of_table));
            to_rows.map_or(weights.clone(), |to_rows| weights * to_rows)
        });
        Self { options, q, k, values, weights, exponents, ignored, gates: None }
    }

    /// `φ(k)`, all keys at one exponent.
    pub fn keys(&self) -> Tensor<4> {
        let factors = self.exponents.as_ref().map(|of| (of.keys.clone() - of.all.clone()).exp());
        factors.map_or_else(|| self.k.clone(), |factors| self.k.clone() * factors)
    }

    /// Sums of the weighted `v⁺` over the keys that each query sees.
    pub fn sums(&self, mask: &AttentionMask, chunk: usize) -> Tensor<4> {
        match (mask.order, self.options.score) {
            (Order::Bidirectional, Score::Content | Score::Fourier(_)) => self.content_total(),
            (Order::Bidirectional, Score::Relative(_)) => Grid::bidirectional(self, mask.offset, chunk).sums(),
            (Order::Bidirectional, Score::Combined(_)) => {
                self.content_total() + Grid::bidirectional(self, mask.offset, chunk).sums()
            }
            (Order::Causal, _) => Grid::causal(self, mask.offset, chunk).sums(),
        }
    }

    /// The content term where every query sees every key: `φ(q)·(φ(k)ᵀ v⁺)`.
    fn content_total(&self) -> Tensor<4> {
        self.q.clone().matmul(self.keys().swap_dims(2, 3).matmul(self.values.clone()))
    }

    fn radius(&self) -> usize {
        self.options.score.shaw().map_or(0, |shaw| shaw.radius)
    }
}

/// Queries and keys on one axis of positions, cut into chunks. Key `j` is at position `j − offset`, so that a query and
/// the last key that it sees under a causal mask share a position.
struct Grid<'a> {
    inputs: &'a Inputs<'a>,
    causal: bool,
    /// Positions before query 0.
    front: usize,
    /// The position after the last key, from where on decays take no more of rows that are divided by the sum of their weights.
    end: i64,
    chunks: usize,
    chunk: usize,
    /// `[batch, heads, chunks, chunk, ·]`, all of them; positions without a token are 0.
    q: Tensor<5>,
    k: Tensor<5>,
    values: Tensor<5>,
    weights: Option<Tensor<5>>,
    /// The exponents of keys and of rows.
    exponents: Option<[Tensor<5>; 2]>,
    /// The power of the decay that [`Grid::causal`] left out.
    scale: Option<Tensor<4>>,
}

impl<'a> Grid<'a> {
    fn bidirectional(inputs: &'a Inputs<'a>, offset: isize, chunk: usize) -> Self {
        // Beyond these offsets every key is far away on the same side.
        let reach = |tokens: usize| (tokens + inputs.radius()) as isize;
        let (queries, keys) = (inputs.q.dims()[2], inputs.k.dims()[2]);
        Self::new(inputs, false, offset.clamp(-reach(queries), reach(keys)), chunk)
    }

    fn causal(inputs: &'a Inputs<'a>, offset: isize, chunk: usize) -> Self {
        let [_, heads, queries, _] = inputs.q.dims();
        let [_, _, keys, _] = inputs.k.dims();
        // Beyond these offsets nothing changes but the power of the decay, which the division cancels.
        let nearest = offset.clamp(-(queries as isize), (keys + inputs.radius()) as isize);
        let mut grid = Self::new(inputs, true, nearest, chunk);
        if let Some(decay) = grid.decay()
            && !inputs.options.normalize
            && offset > nearest
        {
            let powers = decay.iter().map(|gamma| gamma.powf((offset - nearest) as f64)).collect();
            grid.scale = Some(grid.constant(powers, [1, heads, 1, 1]));
        }
        grid
    }

    fn new(inputs: &'a Inputs<'a>, causal: bool, offset: isize, chunk: usize) -> Self {
        let [_, _, queries, _] = inputs.q.dims();
        let [_, _, keys, _] = inputs.k.dims();
        let first = 0.min(-offset);
        let span = (queries as isize).max(keys as isize - offset) - first;
        let span = span as usize;
        let front = -first as usize;
        // A window of the radius must not reach beyond the next chunk.
        let chunk = chunk.max(inputs.radius()).min(span);
        let chunks = span.div_ceil(chunk);
        let key_front = (-offset - first) as usize;
        let cut = |x: &Tensor<4>, front: usize, around: f64| {
            let [batch, heads, tokens, width] = x.dims();
            place(x.clone(), front, chunks * chunk - front - tokens, around)
                .reshape([batch, heads, chunks, chunk, width])
        };
        let exponents = inputs.exponents.as_ref().filter(|_| causal && inputs.options.score.content());
        Self {
            inputs,
            causal,
            front,
            end: if inputs.options.normalize { key_front + keys } else { (chunks + 2) * chunk } as i64,
            chunks,
            chunk,
            q: cut(&inputs.q, front, 0.0),
            k: cut(&inputs.k, key_front, 0.0),
            values: cut(&inputs.values, key_front, 0.0),
            weights: inputs.weights.as_ref().map(|w| cut(w, front, 0.0)),
            exponents: exponents.map(|of| [cut(&of.keys, key_front, LOWEST), cut(&of.rows, front, 0.0)]),
            scale: None,
        }
    }

    fn constant<const D: usize>(&self, numbers: Vec<f64>, shape: [usize; D]) -> Tensor<D> {
        Tensor::from_data(TensorData::new(numbers, shape), (&self.q.device(), self.q.dtype()))
    }

    /// The tile's chunks, relative to that of the query.
    fn near(&self) -> &'static [isize] {
        match (self.chunks, self.weights.is_some(), self.causal) {
            (1, _, _) | (_, false, _) => &[0],
            (_, true, true) => &[-1, 0],
            (_, true, false) => &[-1, 0, 1],
        }
    }

    /// Sums of the weighted values, `[batch, heads, queries, dv + 1]`; without the content term if bidirectional.
    fn sums(&self) -> Tensor<4> {
        let mut sums = self.tile();
        if self.chunks > 1 {
            if let Some(before) = self.before() {
                sums = sums + before;
            }
            if let (false, Some(weights)) = (self.causal, &self.weights) {
                let [.., columns] = weights.dims();
                let far = weights.clone().narrow(4, columns - 1, 1);
                let totals = self.values.clone().sum_dim(3);
                let after = shift(totals.flip([2]).cumsum(2).flip([2]), 2);
                sums = sums + far * after;
            }
        }
        let [batch, heads, _, _, width] = sums.dims();
        let queries = self.inputs.q.dims()[2];
        let mut sums = sums.reshape([batch, heads, self.chunks * self.chunk, width]).narrow(2, self.front, queries);
        if let Some(scale) = &self.scale {
            sums = sums * scale.clone();
        }
        sums
    }

    /// The sums over the near keys, by a dense tile of scores.
    fn tile(&self) -> Tensor<5> {
        let near = self.near();
        let gather = |x: &Tensor<5>| {
            let parts: Vec<_> = near.iter().map(|&by| shift(x.clone(), by)).collect();
            if parts.len() == 1 { x.clone() } else { Tensor::cat(parts, 3) }
        };
        let width = near.len() * self.chunk;
        let first = near[0] * self.chunk as isize;
        let mut scores = None;
        if self.causal && self.inputs.options.score.content() {
            let mut content = self.q.clone().matmul(gather(&self.k).swap_dims(3, 4));
            if let Some([keys, rows]) = &self.exponents {
                // Keys that a row does not see may be larger.
                content = content * (gather(keys).swap_dims(3, 4) - rows.clone()).clamp_max(0.0).exp();
            }
            scores = Some(content);
        }
        if let Some(weights) = &self.weights {
            let relative = spread(weights.clone(), first, width);
            scores = Some(match scores {
                Some(content) => content + relative,
                None => relative,
            });
        }
        let mut scores = scores.expect("a bidirectional grid has relative positions");
        // A single position sees itself.
        if self.causal && width > 1 {
            let distance = distances(first, self.chunk, width, &scores.device());
            let shape = scores.shape();
            scores = scores.mask_fill(distance.clone().greater_elem(0).unsqueeze::<5>().expand(shape), 0.0);
            if let Some(decay) = self.decay() {
                let mut back = distance.neg().unsqueeze::<5>();
                if self.end < (self.chunks * self.chunk) as i64 {
                    back = back + self.places().clamp_max(self.end) - self.places();
                }
                let fall = powers(&decay, back.clamp_min(0), scores.dtype());
                scores = scores * fall;
            }
            if let Some(gates) = &self.inputs.gates {
                scores = scores * decays_between(gates.clone()).unsqueeze_dim::<5>(2);
            }
        }
        scores.matmul(gather(&self.values))
    }

    /// The sums over the chunks before the tile, as one running sum: the content and the table's first row are its
    /// features.
    fn before(&self) -> Option<Tensor<5>> {
        let lag: isize = if self.weights.is_some() { 2 } else { 1 };
        if self.chunks as isize <= lag {
            return None;
        }
        let mut query_features = Vec::new();
        let mut key_features = Vec::new();
        // What the sums of each chunk and all before it count from: the largest exponent so far.
        let mut levels = None;
        if self.causal && self.inputs.options.score.content() {
            let (mut q, mut k) = (self.q.clone(), self.k.clone());
            if let Some([keys, rows]) = &self.exponents {
                let tops = keys.clone().max_dim(3).cummax(2);
                let before = shift(tops.clone(), -lag) - rows.clone();
                q = q * before.clamp_max(0.0).exp();
                k = k * (keys.clone() - tops.clone()).exp();
                let [batch, heads, chunks, ..] = tops.dims();
                levels = Some(tops.expand([batch, heads, chunks, k.dims()[4], 1]));
            }
            query_features.push(q);
            key_features.push(k);
        }
        if let Some(weights) = &self.weights {
            let [batch, heads, chunks, chunk, _] = weights.dims();
            query_features.push(weights.clone().narrow(4, 0, 1));
            let place = (&weights.device(), weights.dtype());
            key_features.push(Tensor::ones([batch, heads, chunks, chunk, 1], place));
            levels = levels.map(|of| Tensor::cat(vec![of, Tensor::zeros([batch, heads, chunks, 1, 1], place)], 3));
        }
        let mut query_features = join(query_features);
        let mut key_features = join(key_features);
        let decay = self.decay();
        if let Some(decay) = &decay {
            // Sums of a chunk count from the first position of the chunk that reads them.
            let until = (self.starts(lag) - self.places()).clamp_min(0);
            let since = self.places().clamp_max(self.end) - self.starts(0);
            query_features = query_features * powers(decay, since, self.q.dtype());
            key_features = key_features * powers(decay, until, self.q.dtype());
        }
        let chunk_sums = key_features.swap_dims(3, 4).matmul(self.values.clone());
        let mut running = match (&decay, &levels) {
            (None, None) => chunk_sums.cumsum(2),
            // Sums of chunks count from where the chunk that reads them begins.
            _ => falling_cumsum(chunk_sums, levels.as_ref(), |by| {
                let decay = decay.as_ref()?;
                Some(powers(decay, self.starts(lag) - self.starts(lag - by), self.q.dtype()))
            }),
        };
        running = shift(running, -lag);
        Some(query_features.matmul(running))
    }

    /// The positions where the chunks begin that stand `by` after each one, as decays count them, `[1, 1, chunks, 1, 1]`.
    fn starts(&self, by: isize) -> Tensor<5, Int> {
        let chunks = Tensor::<1, Int>::arange(by as i64..(by + self.chunks as isize) as i64, &self.q.device());
        chunks.mul_scalar(self.chunk as i64).clamp_max(self.end).reshape([1, 1, self.chunks, 1, 1])
    }

    /// All positions, `[1, 1, chunks, chunk, 1]`.
    fn places(&self) -> Tensor<5, Int> {
        let places = Tensor::<1, Int>::arange(0..(self.chunks * self.chunk) as i64, &self.q.device());
        places.reshape([1, 1, self.chunks, self.chunk, 1])
    }

    /// The decay of each query head.
    fn decay(&self) -> Option<Vec<f64>> {
        decays(self.inputs.options, self.q.dims()[1])
    }
}

/// `S_c = Σ_{c' ≤ c} f e^{λ_c' − λ_c} X_c'` along axis 2, by doubling: ⌈log₂ chunks⌉ passes. The levels `λ` do not fall; `fall` gives the
/// factor `f` between chunks that stand so many apart, if there is one.
pub(crate) fn falling_cumsum(
    x: Tensor<5>,
    levels: Option<&Tensor<5>>,
    fall: impl Fn(isize) -> Option<Tensor<5>>,
) -> Tensor<5> {
    let chunks = x.dims()[2] as isize;
    let (mut sums, mut by) = (x, 1);
    while by < chunks {
        let mut before = shift(sums.clone(), -by);
        if let Some(fall) = fall(by) {
            before = before * fall;
        }
        if let Some(levels) = levels {
            before = before * (shift(levels.clone(), -by) - levels.clone()).clamp_max(0.0).exp();
        }
        sums = sums + before;
        by *= 2;
    }
    sums
}

/// What weights fall by from the token of a column to that of a row, `[batch, heads, tokens, tokens]`, of log decays
/// `[batch, heads, tokens, 1]`: sums of what stands between them, not differences of sums from the start.
fn decays_between(logs: Tensor<4>) -> Tensor<4> {
    let [batch, heads, tokens, _] = logs.dims();
    let shape = [batch, heads, tokens, tokens];
    let later = Tensor::<2, Bool>::tril_mask([tokens; 2], -1, &logs.device()).unsqueeze::<4>();
    logs.expand(shape).mask_fill(later.expand(shape), 0.0).cumsum(2).exp()
}

/// `w`, `[.., rows, 2R+1]`, by distance into a tile of `width` keys: entry `(x, j)` is `w[x, clip(first + j − x)]`.
pub(crate) fn spread(weights: Tensor<5>, first: isize, width: usize) -> Tensor<5> {
    let [batch, heads, chunks, chunk, columns] = weights.dims();
    let radius = columns as isize / 2;
    if chunk == 1 && first >= -radius && first + width as isize <= radius + 1 {
        return weights.narrow(4, (first + radius) as usize, width);
    }
    let columns = width + chunk - 1;
    // Column u of every row holds the weight at distance first + u − (chunk − 1). Row x wants its columns
    // chunk − 1 − x onwards; read row-major with one column less, each row starts one place further left.
    let weights = clamped(weights, 4, first - (chunk as isize - 1) + radius, columns);
    if chunk == 1 {
        return weights;
    }
    weights
        .reshape([batch, heads, chunks, chunk * columns])
        .narrow(3, chunk - 1, chunk * (columns - 1))
        .reshape([batch, heads, chunks, chunk, columns - 1])
        .narrow(4, 0, width)
}

/// How far key `j` of a tile, of `width`, stands behind the query of row `x`, of `rows`, where `first` is that of `x = j = 0`.
pub(crate) fn distances(first: isize, rows: usize, width: usize, device: &Device) -> Tensor<2, Int> {
    let places = |range: Range<i64>| Tensor::<1, Int>::arange(range, device);
    let first = first as i64;
    places(first..first + width as i64).unsqueeze::<2>() - places(0..rows as i64).unsqueeze_dim::<2>(1)
}

/// The powers of each head's decay, `[1, heads, ·]`, by these numbers, `[1, 1, ·]`.
pub(crate) fn powers<const D: usize>(decay: &[f64], numbers: Tensor<D, Int>, dtype: DType) -> Tensor<D> {
    let mut shape = [1; D];
    shape[1] = decay.len();
    let logarithms = TensorData::new(decay.iter().map(|gamma| gamma.ln()).collect::<Vec<_>>(), shape);
    let logarithms = Tensor::<D>::from_data(logarithms, (&numbers.device(), dtype));
    (numbers.cast(FloatDType::from(dtype)) * logarithms).exp()
}

/// The entries of `x` at `count` places of an axis, from `first` on; beyond its ends the entry there.
pub(crate) fn clamped<const D: usize>(x: Tensor<D>, axis: usize, first: isize, count: usize) -> Tensor<D> {
    let (len, end) = (x.dims()[axis] as isize, first + count as isize);
    let (front, back) = ((-first).clamp(0, count as isize), (end - len).clamp(0, count as isize));
    let repeated = |at: isize, many: isize| {
        let mut shape = x.dims();
        shape[axis] = many as usize;
        (many > 0).then(|| x.clone().narrow(axis, at as usize, 1).expand(shape))
    };
    let own = count as isize - front - back;
    let middle = (own > 0).then(|| x.clone().narrow(axis, first.max(0) as usize, own as usize));
    let mut parts: Vec<_> = [repeated(0, front), middle, repeated(len - 1, back)].into_iter().flatten().collect();
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, axis) }
}

/// `x` with a number before and after on the token axis.
pub(crate) fn place(x: Tensor<4>, front: usize, back: usize, around: f64) -> Tensor<4> {
    if front + back == 0 {
        return x;
    }
    let [batch, heads, _, width] = x.dims();
    let all = |tokens| Tensor::full([batch, heads, tokens, width], around, (&x.device(), x.dtype()));
    let parts = [(front > 0).then(|| all(front)), Some(x.clone()), (back > 0).then(|| all(back))];
    Tensor::cat(parts.into_iter().flatten().collect(), 2)
}

/// Chunk `c` of the result is chunk `c + by` of `x`, or 0 where there is none.
pub(crate) fn shift(x: Tensor<5>, by: isize) -> Tensor<5> {
    let [batch, heads, chunks, rows, width] = x.dims();
    let gap = by.unsigned_abs().min(chunks);
    if gap == 0 {
        return x;
    }
    let zeros = Tensor::zeros([batch, heads, gap, rows, width], (&x.device(), x.dtype()));
    if gap == chunks {
        return zeros;
    }
    let kept = x.narrow(2, if by < 0 { 0 } else { gap }, chunks - gap);
    Tensor::cat(if by < 0 { vec![zeros, kept] } else { vec![kept, zeros] }, 2)
}

fn join(mut parts: Vec<Tensor<5>>) -> Tensor<5> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 4) }
}

/// The summary of a memory under kernelized attention without positions: `φ(k)ᵀ v⁺`, `[batch, heads, m, dv + 1]`.
#[derive(Debug, Clone)]
pub(crate) struct Total {
    options: Arc<KernelizedAttention>,
    sum: Tensor<4>,
    /// Numbers in a query and in a value.
    head_dim: usize,
    value_dim: usize,
}

impl Total {
    /// Of `k` and `v`, `[batch, kv_heads, keys, ·]`, for `heads` query heads.
    pub(crate) fn new(
        options: Arc<KernelizedAttention>,
        learned: &Learned,
        heads: usize,
        k: Tensor<4>,
        v: Tensor<4>,
        mask: &AttentionMask,
    ) -> Self {
        let value_dim = v.dims()[3];
        let [batch, _, _, dim] = k.dims();
        // The sums do not depend on queries.
        let no_query = Tensor::zeros([batch, heads, 1, dim], (&k.device(), k.dtype()));
        let inputs = Inputs::new(&options, learned, no_query, k, v, None, mask, None);
        let sum = inputs.keys().swap_dims(2, 3).matmul(inputs.values);
        Self { options, sum, head_dim: dim, value_dim }
    }

    /// The outputs of `q`, `[batch, heads, queries, head_dim]`.
    pub(crate) fn recall(&self, q: Tensor<4>, learned: &Learned) -> Tensor<4> {
        let options = &*self.options;
        let dtype = q.dtype();
        let mut q = lift(options.feature_map, learned, Side::Queries, widen(q));
        if options.feature_map.is_exponential() && options.normalize {
            q = q.clone() - q.max_dim(3);
        }
        let sums = features(options.feature_map, q).matmul(self.sum.clone());
        narrow_float(divide(sums, self.value_dim, options.normalize), dtype)
    }

    /// Whether it answers queries on this device, of this type.
    pub(crate) fn takes(&self, (device, dtype): &(Device, DType)) -> bool {
        super::place(&self.sum) == (device.clone(), widen_type(*dtype))
    }

    /// The shape of one query that it answers.
    pub(crate) fn query(&self) -> [usize; 4] {
        let [batch, heads, _, _] = self.sum.dims();
        [batch, heads, 1, self.head_dim]
    }

    /// The memories of the batch entries `indices`.
    pub(crate) fn select(&self, indices: &Tensor<1, Int>) -> Self {
        let sum = self.sum.clone().select(0, indices.clone());
        Self { options: self.options.clone(), sum, ..*self }
    }
}
