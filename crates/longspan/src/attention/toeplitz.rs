//! Toeplitz relative positions (Luo et al. 2021): kernelized attention whose weights are multiplied by `e^{b_δ}`, a
//! learned bias for every distance `δ = j − i`.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use longspan_kernels as kernels;
use longspan_kernels::{Algorithm, Beyond, Bias, FeatureMap, KernelizedAttention, Mechanism, Order, Toeplitz};
use serde::{Deserialize, Serialize};

use super::feature_map::LearnedMap;
use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, by_name, index_tensor};
use crate::backend::pairs::{Pairs, hide};
use crate::backend::tensor::{
    CHUNK, Exponents, Inputs, LOWEST, distances, divide, falling_cumsum, flattened, narrow_float, place, shift, spread,
    widen,
};
use crate::backend::{AnyKernel, Layer, Running, Sums, zeros_like};
use crate::error::{Result, config};

/// Which distances have a bias of their own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum BiasConfig {
    /// Those up to `radius` tokens to either side; farther ones share the bias at that end.
    Clipped {
        /// The farthest distance with a bias of its own.
        radius: usize,
    },
    /// Those below `reach` to either side; a call with farther ones is refused.
    Table {
        /// One more than the farthest distance.
        reach: usize,
    },
    /// The buckets of T5: exact for small distances, logarithmic up to `max_distance`.
    Buckets {
        /// Biases of each head.
        buckets: usize,
        /// All distances from here on share the last bucket.
        max_distance: usize,
        /// Whether keys after the query have buckets of their own (the second half); for decoders `false`.
        bidirectional: bool,
    },
    /// Displacements between the pixels of an image whose tokens come row after row.
    Grid {
        /// Rows of the image.
        height: usize,
        /// Columns of the image.
        width: usize,
    },
}

impl BiasConfig {
    /// The kernels' form of it, and the number of entries in one head's table.
    fn kernel(self) -> (Bias, usize) {
        match self {
            Self::Clipped { radius } => (Bias::clipped(radius), radius.saturating_mul(2).saturating_add(1)),
            Self::Table { reach } => (Bias::symmetric(reach), reach.saturating_mul(2).saturating_sub(1)),
            Self::Buckets { buckets, max_distance, bidirectional } => {
                (Bias::Buckets { buckets, max_distance, bidirectional }, buckets)
            }
            Self::Grid { height, width } => {
                let side = |n: usize| n.saturating_mul(2).saturating_sub(1);
                (Bias::Grid { height, width }, side(height).saturating_mul(side(width)))
            }
        }
    }
}

/// Kernelized attention with a learned bias for each distance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToeplitzOptions {
    /// Which distances have a bias of their own; those up to 64 by default.
    pub bias: BiasConfig,
    /// `φ`, by its name; `elu+1` by default.
    #[serde(with = "by_name")]
    pub feature_map: FeatureMap,
    /// Whether to divide by the sum of the weights; yes by default.
    pub normalize: bool,
    /// How the CPU kernels compute it: `auto` by default.
    #[serde(with = "by_name")]
    pub algorithm: Algorithm,
}

impl Default for ToeplitzOptions {
    fn default() -> Self {
        Self {
            bias: BiasConfig::Clipped { radius: 64 },
            feature_map: FeatureMap::default(),
            normalize: true,
            algorithm: Algorithm::Auto,
        }
    }
}

/// Toeplitz attention over heads: kernelized attention with the weights `e^{b_{j−i}} φ(q_i)·φ(k_j)`, and its learned
/// biases `b`.
#[derive(Module, Debug)]
pub struct ToeplitzAttention {
    /// The biases `[heads, entries]`, by distance from the farthest key before the query to the farthest after it, or
    /// by bucket, or by row and column of the displacement. They start close to 0: every distance alike.
    pub bias: Param<Tensor<2>>,
    /// What the feature map learns, if anything.
    pub map: Option<LearnedMap>,
    #[module(skip)]
    toeplitz: Arc<Toeplitz>,
    #[module(skip)]
    heads: Heads,
}

impl Options for ToeplitzOptions {
    type Module = ToeplitzAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<ToeplitzAttention> {
        let (bias, entries) = self.bias.kernel();
        config(
            (1..1 << 24).contains(&entries),
            "ToeplitzOptions",
            "bias",
            "between 1 and 2²⁴ entries a head",
            format_args!("{:?}", self.bias),
        )?;
        let toeplitz = Arc::new(Toeplitz {
            feature_map: self.feature_map,
            normalize: self.normalize,
            algorithm: self.algorithm,
            ..Toeplitz::new(bias)
        });
        toeplitz.check_feature_map(&heads.dims(1, 1, 1))?;
        // Buckets that nothing falls into.
        toeplitz.plan(&heads.dims(1, 1, 1), &kernels::Mask::causal())?;
        let bias = Initializer::Normal { mean: 0.0, std: 0.02 }.init([heads.heads, entries], device);
        let map = LearnedMap::new(self.feature_map, heads, device);
        Ok(ToeplitzAttention { bias, map, toeplitz, heads })
    }
}

attention_module!(ToeplitzAttention);

impl ToeplitzAttention {
    /// What of the mechanism is kernelized attention without positions.
    fn content(&self) -> KernelizedAttention {
        let Toeplitz { feature_map, normalize, .. } = *self.toeplitz;
        KernelizedAttention { feature_map, normalize, ..KernelizedAttention::default() }
    }

    /// The farthest distance with a bias of its own, where all beyond share those of the ends.
    fn radius(&self) -> Option<usize> {
        /// Farther than this no state keeps all keys, in the kernels neither.
        const FARTHEST: usize = 1 << 24;
        let radius = match self.toeplitz.bias {
            Bias::Table { count, beyond: Beyond::Extend, .. } => Some(count / 2),
            Bias::Buckets { max_distance, .. } => Some(max_distance),
            _ => None,
        };
        radius.filter(|&radius| radius <= FARTHEST)
    }

    /// The biases of the distances up to `radius` to either side, `[heads, 2·radius + 1]`.
    fn by_distance(&self, radius: usize) -> Tensor<2> {
        let (table, bias) = (widen(self.bias.val()), self.toeplitz.bias);
        if !matches!(bias, Bias::Buckets { .. }) {
            return table;
        }
        let radius = radius as isize;
        let entries: Vec<usize> = (-radius..=radius).map(|distance| bias.between(0, distance).unwrap_or(0)).collect();
        table.clone().select(1, index_tensor(&entries, &table.device()))
    }

    /// The sums over the keys that each query sees, by rows of all their weights.
    fn by_rows(&self, inputs: &Inputs<'_>, mask: &AttentionMask) -> Tensor<4> {
        let Toeplitz { bias, normalize, .. } = *self.toeplitz;
        let Inputs { q, k, values, .. } = inputs;
        let ([_, heads, queries, _], keys) = (q.dims(), k.dims()[2]);
        let pairs = Pairs::new(q, keys, mask, None);
        let k = k.clone().swap_dims(2, 3);
        // The bias is a function of the difference of two places. The kernel's check has passed, so a difference without an entry is one
        // that the mask hides: it gets any.
        let entry = |query: isize, key: isize| bias.between(query, key).unwrap_or(0);
        let query = |i: usize| (i as isize).saturating_add(mask.offset);
        let ints = |of: Vec<usize>| index_tensor(&of, &q.device());
        let table = widen(self.bias.val());
        let (by_difference, of_query, of_key): (_, Vec<usize>, Vec<usize>) = if let Bias::Grid { .. } = bias {
            let of_key = (0..keys).map(|j| entry(0, j as isize).saturating_sub(entry(0, 0)));
            (table, (0..queries).map(|i| entry(query(i), 0)).collect(), of_key.collect())
        } else {
            let differences = (0..queries + keys - 1).map(|n| entry(query(queries - 1), n as isize)).collect();
            (table.select(1, ints(differences)), (0..queries).rev().collect(), (0..keys).collect())
        };
        let (of_query, of_key) = (ints(of_query), ints(of_key));
        let pieces = (0..queries).step_by(Pairs::ROWS).map(|first| {
            let rows = first..queries.min(first + Pairs::ROWS);
            let seen = pairs.seen(&rows);
            let [count, seen_count] = [rows.len(), seen.len()];
            let steps = of_query.clone().narrow(0, first, count).unsqueeze_dim::<2>(1)
                + of_key.clone().narrow(0, seen.start, seen_count).unsqueeze::<2>();
            let steps = steps.clamp(0, by_difference.dims()[1] as i64 - 1);
            let exponents = by_difference.clone().select(1, steps.reshape([count * seen_count]));
            let mut exponents = exponents.reshape([1, heads, count, seen_count]);
            if let Some(Exponents { keys, rows, .. }) = &inputs.exponents {
                let keys = keys.clone().narrow(2, seen.start, seen_count).swap_dims(2, 3);
                exponents = exponents + (keys - rows.clone().narrow(2, first, count));
            }
            let hidden = pairs.hidden(&rows, &seen);
            if normalize {
                // Relative to the largest exponent among the keys that the row sees.
                exponents = exponents.clone() - largest_of_row(hide(exponents.detach(), &hidden, f32::NEG_INFINITY));
            }
            // Hidden pairs get exponent 0: an infinite `exp` times a weight of 0 would make the gradient NaN.
            let exponents = hide(exponents, &hidden, 0.0);
            let k = k.clone().narrow(3, seen.start, seen_count);
            let scores = q.clone().narrow(2, first, count).matmul(k);
            let weights = hide(scores * exponents.exp(), &hidden, 0.0);
            weights.matmul(values.clone().narrow(2, seen.start, seen_count))
        });
        Tensor::cat(pieces.collect(), 2)
    }
}

impl Layer for ToeplitzAttention {
    fn name(&self) -> &'static str {
        self.toeplitz.name()
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        self.toeplitz.clone()
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let map = self.map.iter().flat_map(LearnedMap::parameters);
        std::iter::once(flattened(self.bias.val())).chain(map).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let (dtype, [batch, _, queries, _], [_, _, keys, value_dim]) = (q.dtype(), q.dims(), v.dims());
        let (content, learned) = (self.content(), self.map.as_ref().map(LearnedMap::tensors));
        let inputs = Inputs::new(&content, &learned, q, k, v, None, mask, None);
        let sums = match self.radius() {
            // Two chunks as long as the radius are the whole sequence.
            Some(radius) if 2 * radius < queries.max(keys) => {
                let place = (&inputs.q.device(), inputs.q.dtype());
                let seen = match &inputs.ignored {
                    None => Tensor::ones([1, 1, keys, 1], place),
                    Some(ignored) => Tensor::ones([batch, 1, keys, 1], place).mask_fill(ignored.clone(), 0.0),
                };
                near_and_far(&inputs, self.by_distance(radius), mask, seen, None)
            }
            _ => self.by_rows(&inputs, mask),
        };
        narrow_float(divide(sums, value_dim, content.normalize), dtype)
    }

    fn sums(&self) -> Option<&dyn Sums> {
        self.radius().is_some().then_some(self as &dyn Sums)
    }
}

/// The state: `φ(k)` and `v⁺` of the latest tokens, which of them there are, the sum of those before, how many these are, and, under an
/// exponential map, what was subtracted from the exponents of keys.
impl Sums for ToeplitzAttention {
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running {
        let content = self.content();
        let ring = self.radius().unwrap_or(0).max(1);
        let features = content.feature_map.features(like.dims()[3]);
        let width = value_dim + usize::from(content.normalize);
        let sizes = [(ring, features), (ring, width), (ring, 1), (features, width), (1, 1)];
        let mut tensors: Vec<_> = sizes.into_iter().map(|(rows, width)| zeros_like(like, rows, width)).collect();
        if content.feature_map.is_exponential() && content.normalize {
            tensors.push(zeros_like(like, 1, 1).add_scalar(LOWEST));
        }
        Running::new(like, value_dim, tensors)
    }

    fn advance(&self, [q, k, v]: [Tensor<4>; 3], state: &mut Running) -> Tensor<4> {
        let (dtype, [_, _, tokens, _], value_dim) = (q.dtype(), q.dims(), v.dims()[3]);
        let (content, learned) = (self.content(), self.map.as_ref().map(LearnedMap::tensors));
        let mut kept = std::mem::take(&mut state.tensors).into_iter();
        let mut next = || kept.next().expect("the tensors that empty makes");
        let [ring_k, ring_v, ring_seen, far, count] = [(); 5].map(|()| next());
        let before = kept.next();
        let mut inputs = Inputs::new(&content, &learned, q, k, v, None, &AttentionMask::causal(), before.clone());
        let ([batch, heads, ..], ring) = (inputs.q.dims(), ring_k.dims()[2]);
        let ones = Tensor::ones([batch, heads, tokens, 1], (&inputs.q.device(), inputs.q.dtype()));
        inputs.k = Tensor::cat(vec![ring_k, inputs.k], 2);
        inputs.values = Tensor::cat(vec![ring_v, inputs.values], 2);
        let mut fallen = far.clone();
        let mut after = None;
        if let (Some(before), Some(Exponents { keys, all, .. })) = (&before, &mut inputs.exponents) {
            *keys = Tensor::cat(vec![before.clone().expand([batch, heads, ring, 1]), keys.clone()], 2);
            fallen = fallen * (before.clone() - all.clone()).exp();
            after = Some(all.clone());
        }
        let seen = Tensor::cat(vec![ring_seen, ones], 2);
        let mask = AttentionMask::causal().with_offset(ring as isize);
        let table = self.by_distance(self.radius().unwrap_or(0));
        let far = Far {
            sums: far.unsqueeze_dim(2),
            count: count.clone().narrow(1, 0, 1).unsqueeze_dim(2),
            level: before.map(|before| before.unsqueeze_dim(2)),
        };
        let sums = near_and_far(&inputs, table, &mask, seen.clone().narrow(1, 0, 1), Some(far));
        // What falls out of the ring.
        let first = |x: &Tensor<4>| x.clone().narrow(2, 0, tokens);
        let k = inputs.keys();
        let far = fallen + first(&k).swap_dims(2, 3).matmul(first(&inputs.values));
        let count = count + first(&seen).sum_dim(2);
        let latest = [k, inputs.values, seen].map(|x| x.narrow(2, tokens, ring));
        state.tensors = latest.into_iter().chain([far, count]).chain(after).collect();
        narrow_float(divide(sums, value_dim, content.normalize), dtype)
    }
}

/// Keys that are all far from a query on one side: their sums, how many they are, and, under an exponential map, the exponent that the sums
/// count from.
struct Far {
    sums: Tensor<5>,
    count: Tensor<5>,
    level: Option<Tensor<5>>,
}

impl Far {
    /// For each chunk those of the chunks before the one before it; `first` stands before all.
    fn before([k, values, seen]: [Tensor<5>; 3], exponents: Option<Tensor<5>>, first: Option<Self>) -> Self {
        let chunks = k.dims()[2];
        let level = exponents.as_ref().map(|of| of.clone().max_dim(3));
        let k = exponents.zip(level.clone()).map_or(k.clone(), |(of, level)| k * (of - level).exp());
        let first = first.map(|Self { sums, count, level }| (Some(sums), Some(count), level)).unwrap_or_default();
        let behind = |first: Option<Tensor<5>>, x: Tensor<5>, nothing: f64| {
            let none = x.clone().narrow(2, 0, 1).full_like(nothing);
            Tensor::cat(vec![first.unwrap_or_else(|| none.clone()), none, x.narrow(2, 0, chunks - 2)], 2)
        };
        let sums = behind(first.0, k.swap_dims(3, 4).matmul(values), 0.0);
        let count = behind(first.1, seen.sum_dim(3), 0.0).cumsum(2);
        let Some(level) = level else { return Self { sums: sums.cumsum(2), count, level: None } };
        let own = behind(first.2, level, LOWEST);
        let level = own.clone().cummax(2);
        let sums = falling_cumsum(sums * (own - level.clone()).exp(), Some(&level), |_| None);
        Self { sums, count, level: Some(level) }
    }

    /// The chunks the other way round.
    fn flip(self) -> Self {
        let Self { sums, count, level } = self;
        Self { sums: sums.flip([2]), count: count.flip([2]), level: level.map(|level| level.flip([2])) }
    }
}

/// The sums over the keys that each query sees, of which there are those that are `seen`, `[batch or 1, 1, keys, 1]`, not 0, and those of `far`
/// before all of these, beyond the radius. All keys of few queries, and else those of a query's chunk and of the chunks beside it weigh by
/// their distances, in a dense tile; all others by the first bias or the last one of the `table`, `[heads, 2·radius + 1]`, in sums.
fn near_and_far(
    inputs: &Inputs<'_>,
    table: Tensor<2>,
    mask: &AttentionMask,
    seen: Tensor<4>,
    far: Option<Far>,
) -> Tensor<4> {
    let Inputs { q, k, values, .. } = inputs;
    let (causal, normalize) = (mask.order == Order::Causal, inputs.options.normalize);
    let ([_, heads, queries, _], keys, columns) = (q.dims(), k.dims()[2], table.dims()[1]);
    let radius = columns / 2;
    // Beyond these offsets every key is far away on the same side.
    let offset = mask.offset.clamp(-((queries + radius) as isize), (keys + radius) as isize);
    // Queries and keys on one axis of places, from the first of them on, in chunks; key `j` at `j − offset`.
    let first = 0.min(-offset);
    let span = ((queries as isize).max(keys as isize - offset) - first) as usize;
    let few = queries <= CHUNK;
    let chunk = if few { queries } else { CHUNK.max(radius).min(span) };
    let chunks = if few { 1 } else { span.div_ceil(chunk) };
    let (front, key_front) = if few { (0, 0) } else { (-first as usize, (-offset - first) as usize) };
    let cut = |x: &Tensor<4>, front: usize, around: f64| {
        let [batch, heads, tokens, width] = x.dims();
        if few {
            return x.clone().unsqueeze_dim::<5>(2);
        }
        place(x.clone(), front, chunks * chunk - front - tokens, around).reshape([batch, heads, chunks, chunk, width])
    };
    let [k, values, seen] = [k, values, &seen].map(|x| cut(x, key_front, 0.0));
    let q = cut(q, front, 0.0);
    let levels = inputs.exponents.as_ref().map(|of| [cut(&of.keys, key_front, LOWEST), cut(&of.rows, front, 0.0)]);
    let near: &[isize] = match (chunks, causal) {
        (1, _) => &[0],
        (_, true) => &[-1, 0],
        (_, false) => &[-1, 0, 1],
    };
    let gather = |x: &Tensor<5>| Tensor::cat(near.iter().map(|&by| shift(x.clone(), by)).collect(), 3);
    // The distance of the tile's first key from its first query, and its keys.
    let (begin, width) = if few { (-offset, keys) } else { (near[0] * chunk as isize, near.len() * chunk) };
    let rows = table.clone().reshape([1, heads, 1, 1, columns]).expand([1, heads, 1, chunk, columns]);
    let mut exponents = spread(rows, begin, width);
    if let Some([keys, rows]) = &levels {
        exponents = exponents + (gather(keys).swap_dims(3, 4) - rows.clone());
    }
    let batch = seen.dims()[0].max(exponents.dims()[0]);
    let shape = [seen.dims()[0], 1, chunks, chunk, width];
    let mut hidden = gather(&seen).swap_dims(3, 4).equal_elem(0.0).expand(shape);
    if causal {
        let future = distances(begin, chunk, width, &q.device()).greater_elem(0);
        hidden = hidden.bool_or(future.unsqueeze::<5>().expand(shape));
    }
    // The keys far before; then those far after. Of each side whether there are none, and the exponent of their weights.
    let mut sides = Vec::new();
    let mut add = |Far { sums, count, level }: Far, column: usize| {
        let bias = table.clone().narrow(1, column, 1).reshape([1, heads, 1, 1, 1]);
        let level = level.zip(levels.as_ref()).map(|(level, [_, rows])| level - rows.clone());
        sides.push((sums, count.equal_elem(0.0), level.map_or(bias.clone(), |level| level + bias)));
    };
    if chunks > 2 {
        let of_keys = || ([k.clone(), values.clone(), seen.clone()], levels.clone().map(|[keys, _]| keys));
        let (own, exponents) = of_keys();
        add(Far::before(own, exponents, far), 0);
        if !causal {
            let (own, exponents) = of_keys();
            let turn = |x: Tensor<5>| x.flip([2]);
            add(Far::before(own.map(turn), exponents.map(turn), None).flip(), columns - 1);
        }
    } else if let Some(far) = far {
        add(far, 0);
    }
    let (shape, row) = ([batch, heads, chunks, chunk, width], [batch, heads, chunks, chunk, 1]);
    let (exponents, hidden) = (exponents.expand(shape), hidden.expand(shape));
    // A row's exponents count from the largest one that it sees.
    let top = normalize.then(|| {
        let tile = exponents.clone().detach().mask_fill(hidden.clone(), f32::NEG_INFINITY).max_dim(4);
        let top = sides.iter().fold(tile, |top, (_, none, exponent)| {
            let own = exponent.clone().detach().expand(row);
            top.max_pair(own.mask_fill(none.clone().expand(row), f32::NEG_INFINITY))
        });
        let none = top.clone().equal_elem(f32::NEG_INFINITY);
        top.mask_fill(none, 0.0)
    });
    let from_top = |x: Tensor<5>| top.clone().map_or(x.clone(), |top| x - top);
    // Hidden pairs get exponent 0: an infinite `exp` times a weight of 0 would make the gradient NaN.
    let weights = from_top(exponents).mask_fill(hidden.clone(), 0.0).exp().mask_fill(hidden, 0.0);
    let mut out = (q.clone().matmul(gather(&k).swap_dims(3, 4)) * weights).matmul(gather(&values));
    for (sums, none, exponent) in sides {
        let weight = from_top(exponent).expand(row).mask_fill(none.expand(row), 0.0).exp();
        out = out + q.clone().matmul(sums) * weight;
    }
    let [batch, _, _, _, width] = out.dims();
    out.reshape([batch, heads, chunks * chunk, width]).narrow(2, front, queries)
}

/// The largest entry of each row; 0 where there is none.
fn largest_of_row(x: Tensor<4>) -> Tensor<4> {
    let top = x.max_dim(3);
    let none = top.clone().equal_elem(f32::NEG_INFINITY);
    top.mask_fill(none, 0.0)
}
