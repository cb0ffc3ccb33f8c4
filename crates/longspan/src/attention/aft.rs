//! The attention-free transformer (Zhai et al. 2021): `σ(q_i) ⊙ Σ_j e^{k_j+w_ij} ⊙ v_j / Σ_j e^{k_j+w_ij}`, one mean of
//! the values for each channel, which a query only gates. The mechanisms differ in the bias `w` of positions.
//!
//! In tensor operations a set of keys is represented by three tensors: an exponent, and numerator and denominator
//! relative to it. Joining two sets keeps the larger exponent, so that nothing overflows. The means of all prefixes
//! take ⌈log₂ keys⌉ passes of joins; a query joins the keys before its window, those in it with their biases, and those
//! after.

use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Bool, Device, Int, Tensor};
use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Mechanism, Order};
use serde::{Deserialize, Serialize};

use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads, KeyMask};
use crate::backend::pairs::Pairs;
use crate::backend::tensor::{clamped, flattened, narrow_float, repeat_heads, sigmoid, widen};
use crate::backend::{AnyKernel, Layer, Running, Sums, zeros_like};
use crate::error::{Result, config};

/// AFT-full: a learned bias for each query and each key. Quadratic in time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AftFullOptions {
    /// The longest sequence: the table has a row and a column for each position. 1024 by default.
    pub length: usize,
    /// The rank `r` of a table that is learned as `u·zᵀ`, two factors `[length, r]`; `None` for a full table of
    /// `length²` numbers. 64 by default.
    pub rank: Option<usize>,
}

impl Default for AftFullOptions {
    fn default() -> Self {
        Self { length: 1024, rank: Some(64) }
    }
}

/// AFT-local: a learned bias for each query and each key near it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AftLocalOptions {
    /// Keys up to `window − 1` away have a learned bias; the others have bias 0. 8 by default.
    pub window: usize,
    /// The longest sequence: the table has a row for each position. 1024 by default.
    pub length: usize,
}

impl Default for AftLocalOptions {
    fn default() -> Self {
        Self { window: 8, length: 1024 }
    }
}

/// AFT-simple: no bias, and so blind to positions.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AftSimpleOptions {}

/// The image whose pixels are the tokens, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageOptions {
    /// Rows of the image.
    pub height: usize,
    /// Pixels in a row.
    pub width: usize,
    /// Rows of the kernel.
    pub tap_rows: usize,
}

/// AFT-conv: one key a head, and biases by distance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AftConvOptions {
    /// The width of each head's kernel: a causal query has biases for its last `taps` keys, a bidirectional one for the
    /// `taps` keys around it. 15 by default.
    pub taps: usize,
    /// Whether the kernel is `γ·(w − mean w)/std w + β`, as published, rather than `w`; yes by default.
    pub normalized: bool,
    /// A kernel in two dimensions, `[tap_rows, taps]`, centred on the query. Each batch entry is then one image, and
    /// masks are bidirectional. `None`, the default, for sequences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageOptions>,
}

impl Default for AftConvOptions {
    fn default() -> Self {
        Self { taps: 15, normalized: true, image: None }
    }
}

/// An attention-free layer over heads: `out_i = σ(q_i) ⊙ Σ_j e^{k_j + w_ij} ⊙ v_j / Σ_j e^{k_j + w_ij}`, channel by
/// channel, with learned biases `w`. AFT-simple has `w = 0`; AFT-conv has one number a key.
#[derive(Module, Debug)]
pub struct AftAttention {
    /// AFT-full: `[length, length]`, or the factor `u`, `[length, rank]`. AFT-local: `[length, 2·window − 1]`, in row
    /// `i` and column `c` the bias of the key at distance `c − window + 1` for the query at position `i`. Both are the
    /// same for all heads. AFT-conv: `[heads, taps]`, of an image `[heads, tap_rows·taps]`. AFT-simple has none.
    pub w: Option<Param<Tensor<2>>>,
    /// The other factor of an AFT-full table, `[length, rank]`.
    pub z: Option<Param<Tensor<2>>>,
    /// The scale of a normalised AFT-conv kernel, `[heads]`; starts at 0.
    pub gamma: Option<Param<Tensor<1>>>,
    /// The mean of a normalised AFT-conv kernel, `[heads]`; starts at 0.
    pub beta: Option<Param<Tensor<1>>>,
    #[module(skip)]
    aft: Arc<Aft>,
    #[module(skip)]
    heads: Heads,
}

/// Biases start close to 0, as published.
const BIASES: Initializer = Initializer::Normal { mean: 0.0, std: 0.01 };

/// The standard deviation of a table's factors, so that their product starts close to 0 as well.
const FACTOR: f64 = 0.1;

fn module(variant: Variant, w: Option<Param<Tensor<2>>>, heads: Heads) -> AftAttention {
    AftAttention { w, z: None, gamma: None, beta: None, aft: Arc::new(Aft::new(variant)), heads }
}

/// Checks the sizes of a table.
fn check(options: &'static str, sizes: &[(&'static str, usize)]) -> Result<()> {
    let fits = |size: usize| (1..1 << 24).contains(&size);
    sizes.iter().try_for_each(|&(name, size)| config(fits(size), options, name, "1 or more, less than 2²⁴", size))
}

impl Options for AftFullOptions {
    type Module = AftAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<AftAttention> {
        let Self { length, rank } = *self;
        check("AftFullOptions", &[("length", length), ("rank", rank.unwrap_or(1))])?;
        let table = |std| Initializer::Normal { mean: 0.0, std }.init([length, rank.unwrap_or(length)], device);
        let variant = Variant::Full { length, rank };
        Ok(match rank {
            None => module(variant, Some(BIASES.init([length, length], device)), heads),
            Some(_) => AftAttention { z: Some(table(FACTOR)), ..module(variant, Some(table(FACTOR)), heads) },
        })
    }
}

impl Options for AftLocalOptions {
    type Module = AftAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<AftAttention> {
        let Self { window, length } = *self;
        check("AftLocalOptions", &[("window", window), ("length", length)])?;
        let w = BIASES.init([length, 2 * window - 1], device);
        Ok(module(Variant::Local { window, length: Some(length) }, Some(w), heads))
    }
}

impl Options for AftSimpleOptions {
    type Module = AftAttention;

    fn init(&self, heads: Heads, _: &Device) -> Result<AftAttention> {
        Ok(module(Variant::Simple, None, heads))
    }
}

impl Options for AftConvOptions {
    type Module = AftAttention;

    fn init(&self, heads: Heads, device: &Device) -> Result<AftAttention> {
        let Self { taps, normalized, image } = *self;
        let ImageOptions { height, width, tap_rows } =
            image.unwrap_or(ImageOptions { height: 1, width: 1, tap_rows: 1 });
        let range = 1..1 << 24;
        for (name, number, area) in [
            ("taps", taps, taps.saturating_mul(tap_rows)),
            ("image.height", height, height.saturating_mul(width)),
            ("image.width", width, height.saturating_mul(width)),
            ("image.tap_rows", tap_rows, taps.saturating_mul(tap_rows)),
        ] {
            let fits = number > 0 && range.contains(&area.max(1));
            config(fits, "AftConvOptions", name, "1 or more, and less than 2²⁴ in all", number)?;
        }
        let zeros = || normalized.then(|| Initializer::Zeros.init([heads.heads], device));
        let initializer = if normalized { Initializer::Normal { mean: 0.0, std: 1.0 } } else { BIASES };
        let w = initializer.init([heads.heads, tap_rows * taps], device);
        let variant = match image {
            None => Variant::Conv { taps, normalized },
            Some(_) => Variant::Conv2d { image: [height, width], taps: [tap_rows, taps], normalized },
        };
        let module = module(variant, Some(w), heads);
        Ok(AftAttention { gamma: zeros(), beta: zeros(), ..module })
    }
}

attention_module!(AftAttention);

impl AftAttention {
    /// AFT-conv's kernels, `[heads, taps]`.
    fn kernels(&self, w: Tensor<2>) -> Tensor<2> {
        let (Some(gamma), Some(beta)) = (&self.gamma, &self.beta) else { return w };
        // Relative to one of them, so that equal taps are 0, and not what rounding leaves of their mean.
        let w = w.clone() - w.narrow(1, 0, 1);
        let centred = w.clone() - w.mean_dim(1);
        let variance = centred.clone().powi_scalar(2).mean_dim(1);
        // If all taps are equal their deviation is 0, and the kernel is β.
        let flat = variance.clone().equal_elem(0.0);
        let unit = centred / variance.mask_fill(flat, 1.0).sqrt();
        widen(gamma.val()).unsqueeze_dim::<2>(1) * unit + widen(beta.val()).unsqueeze_dim::<2>(1)
    }
}

impl Layer for AftAttention {
    fn name(&self) -> &'static str {
        self.aft.name()
    }

    fn kernel(&self) -> Arc<dyn AnyKernel> {
        self.aft.clone()
    }

    fn heads(&self) -> Heads {
        self.heads
    }

    fn parameters(&self) -> Vec<Tensor<1>> {
        let tables = self.w.iter().chain(&self.z).map(|table| flattened(table.val()));
        tables.chain(self.gamma.iter().chain(&self.beta).map(|x| flattened(x.val()))).collect()
    }

    fn in_tensors(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Tensor<4> {
        let (dtype, [_, heads, queries, _], keys) = (q.dtype(), q.dims(), k.dims()[2]);
        let causal = mask.order == Order::Causal;
        let items = self.items(k, v, mask.keys.ignored([q.dims()[0], keys], &q.device()).as_ref());
        // Further away than any bias reaches nothing changes.
        let most = (queries + keys + (1 << 25)) as isize;
        let offset = mask.offset.clamp(-most, most);
        let means = match self.aft.variant {
            Variant::Full { length, .. } => {
                let [w, z] = [&self.w, &self.z].map(|x| x.as_ref().map(|x| widen(x.val())));
                let rows = w.map(|w| clamped(w, 0, offset.clamp(-(length as isize), length as isize), queries));
                let biases = |own: &Range<usize>| {
                    let rows = rows.clone()?.narrow(0, own.start, own.len());
                    let table = match &z {
                        None => rows.narrow(1, 0, keys),
                        Some(z) => rows.matmul(z.clone().narrow(0, 0, keys).transpose()),
                    };
                    Some(table.reshape([1, 1, own.len(), keys, 1]))
                };
                let pairs = Pairs::new(&q, keys, &AttentionMask { keys: KeyMask::All, ..mask.clone() }, None);
                items.by_rows(queries, biases, |own| Some(pairs.hidden(own, &(0..keys))?.unsqueeze_dim::<5>(4)))
            }
            Variant::Conv2d { image: [_, image_width], taps: [tap_rows, taps], .. } => {
                let kernels = self.w.as_ref().map(|w| {
                    let kernels = self.kernels(widen(w.val()));
                    let none = Tensor::zeros([heads, 1], (&kernels.device(), kernels.dtype()));
                    Tensor::cat(vec![kernels, none], 1)
                });
                let places = |own: &Range<usize>| {
                    let places = Tensor::<1, Int>::arange(own.start as i64..own.end as i64, &q.device());
                    [places.clone().div_scalar(image_width as i64), places.remainder_scalar(image_width as i64)]
                };
                // The tap of each pair, or the extra last column for pairs without a tap.
                let biases = |own: &Range<usize>| {
                    let kernels = kernels.clone()?;
                    let [tap_y, tap_x] = [0, 1].map(|axis| {
                        let [of_query, of_key] = [places(own), places(&(0..keys))].map(|both| both[axis].clone());
                        let distance = of_key.unsqueeze::<2>() - of_query.unsqueeze_dim::<2>(1);
                        let taps = [tap_rows, taps][axis] as i64;
                        let tap = distance.add_scalar((taps - 1) / 2);
                        let none = tap.clone().lower_elem(0).bool_or(tap.clone().greater_equal_elem(taps));
                        (tap, none)
                    });
                    let columns = tap_y.0.mul_scalar(taps as i64) + tap_x.0;
                    let columns = columns.mask_fill(tap_y.1.bool_or(tap_x.1), (tap_rows * taps) as i64);
                    let biases = kernels.select(1, columns.reshape([own.len() * keys]));
                    Some(biases.reshape([1, heads, own.len(), keys, 1]))
                };
                items.by_rows(queries, biases, |_| None)
            }
            Variant::Simple if !causal => items.prefixes().at(keys as isize - 1, queries, true),
            _ => self.near_and_far(items, None, offset, queries, (causal, offset)),
        };
        narrow_float(means.gated(q, self.aft.gate), dtype)
    }

    fn sums(&self) -> Option<&dyn Sums> {
        let counts = matches!(self.aft.variant, Variant::Simple | Variant::Conv { .. } | Variant::Local { .. });
        counts.then_some(self as &dyn Sums)
    }
}

/// The state: the set of all keys before the latest, and these, each a set of its own.
impl Sums for AftAttention {
    fn empty(&self, like: &Tensor<4>, value_dim: usize) -> Running {
        let none = |sets| {
            let zeros = || zeros_like(like, sets, value_dim);
            Means { exponent: zeros().add_scalar(NONE), numerator: zeros(), denominator: zeros() }
        };
        let (before, latest) = (none(1), none(self.ring()));
        Running::new(like, value_dim, before.into_tensors().into_iter().chain(latest.into_tensors()).collect())
    }

    fn advance(&self, [q, k, v]: [Tensor<4>; 3], state: &mut Running) -> Tensor<4> {
        let (dtype, [_, _, tokens, _], ring) = (q.dtype(), q.dims(), self.ring());
        let mut kept = std::mem::take(&mut state.tensors).into_iter();
        let mut next = || {
            let mut part = || kept.next().expect("the tensors that empty makes");
            Means { exponent: part(), numerator: part(), denominator: part() }
        };
        let (before, latest) = (next(), next());
        let items = latest.followed_by(self.items(k, v, None));
        // Tables begin at the first token.
        let position = state.tokens;
        if let Variant::Local { .. } = self.aft.variant {
            state.tokens += tokens;
        }
        let fallen = before.clone().followed_by(items.clone().narrow(0, tokens)).prefixes().narrow(tokens, 1);
        let latest = items.clone().narrow(tokens, ring);
        let means = self.near_and_far(items, Some(before), ring as isize, tokens, (true, position as isize));
        state.tensors = fallen.into_tensors().into_iter().chain(latest.into_tensors()).collect();
        narrow_float(means.gated(q, self.aft.gate), dtype)
    }

    fn taken(&self, state: &Running) -> usize {
        state.tokens
    }
}

impl AftAttention {
    /// Keys that a state keeps apart: those of a causal query's window before its own, at least one.
    fn ring(&self) -> usize {
        self.back(true).max(1)
    }

    /// Keys before a query's own that have biases.
    fn back(&self, causal: bool) -> usize {
        match self.aft.variant {
            Variant::Local { window, .. } => window - 1,
            Variant::Conv { taps, .. } => {
                if causal {
                    taps - 1
                } else {
                    (taps - 1) / 2
                }
            }
            _ => 0,
        }
    }

    /// One set for each key, for each query head.
    fn items(&self, k: Tensor<4>, v: Tensor<4>, ignored: Option<&Tensor<4, Bool>>) -> Means {
        let heads = self.heads.heads;
        let v = widen(repeat_heads(v, heads));
        Means::of_keys(widen(repeat_heads(k, heads)).expand(v.dims()), v, ignored)
    }

    /// The sets that queries see whose biases are those of near keys. Query `i` stands at item `first + i` and, in a table of positions,
    /// at `position + i`; `before` is the set of all keys before the items.
    fn near_and_far(
        &self,
        items: Means,
        before: Option<Means>,
        first: isize,
        queries: usize,
        (causal, position): (bool, isize),
    ) -> Means {
        let w = self.w.as_ref().map(|w| widen(w.val()));
        let back = self.back(causal);
        let (ahead, biases) = match self.aft.variant {
            Variant::Local { window, .. } => {
                let ahead = if causal { 0 } else { window - 1 };
                let biases = w.map(|w| {
                    let length = w.dims()[0] as isize;
                    let rows = clamped(w, 0, position.clamp(-length, length), queries);
                    rows.narrow(1, 0, window + ahead).reshape([1, 1, queries, window + ahead, 1])
                });
                (ahead, biases)
            }
            Variant::Conv { taps, .. } => {
                let biases = w.map(|w| self.kernels(w).reshape([1, self.heads.heads, 1, taps, 1]));
                (taps - 1 - back, biases)
            }
            _ => (0, None),
        };
        let window = (0..=back + ahead).map(|at| items.clone().at(first - back as isize + at as isize, queries, false));
        // Side by side: a row holds one set of each.
        let near = Means::merged(&window.collect::<Vec<_>>(), |sets| Tensor::stack::<5>(sets, 3)).joined(biases, None);
        // Before the window of query i stand the items before `first − back + i`.
        let (all, skipped) = match before {
            Some(before) => (before.followed_by(items.clone()), 1),
            None => (items.clone(), 0),
        };
        let means = all.prefixes().at(first - back as isize - 1 + skipped, queries, true).join(near);
        if causal {
            return means;
        }
        // The keys after the window are a prefix of the flipped sequence.
        let last = items.exponent.dims()[2] as isize - 1;
        let ends = last - (first + ahead as isize + queries as isize);
        means.join(items.flipped().prefixes().at(ends, queries, true).flipped())
    }
}

/// The exponent of the empty set: below all others, and finite, so that no difference is NaN.
const NONE: f32 = -1e30;

/// Queries whose biases are formed at a time.
const ROWS: usize = 64;

/// Sets of keys, `[batch, heads, sets, width]` each; of rows of sets `[batch, heads, rows, sets, width]`.
#[derive(Clone)]
struct Means<const D: usize = 4> {
    /// The exponent `m` that the sums are relative to. It cancels in the division, and so carries no gradient.
    exponent: Tensor<D>,
    /// `Σ e^{k_j − m} v_j`.
    numerator: Tensor<D>,
    /// `Σ e^{k_j − m}`.
    denominator: Tensor<D>,
}

impl Means {
    /// One set for each key, empty where it is ignored, `[batch, 1, keys, 1]`.
    fn of_keys(k: Tensor<4>, v: Tensor<4>, ignored: Option<&Tensor<4, Bool>>) -> Self {
        let ignored = ignored.map(|ignored| ignored.clone().expand(k.dims()));
        // Filled, not multiplied by 0: NaN in padding would stay NaN.
        let filled = |x: Tensor<4>, by: f32| match &ignored {
            Some(ignored) => x.mask_fill(ignored.clone(), by),
            None => x,
        };
        let k = filled(k, NONE);
        // A key of −∞ has no weight, like the empty set.
        let exponent = k.clone().detach().clamp_min(NONE);
        let weight = filled((k - exponent.clone()).exp(), 0.0);
        Self { exponent, numerator: weight.clone() * filled(v, 0.0), denominator: weight }
    }

    fn into_tensors(self) -> [Tensor<4>; 3] {
        [self.exponent, self.numerator, self.denominator]
    }

    /// The union of the sets at each position.
    fn join(self, other: Self) -> Self {
        let exponent = self.exponent.clone().max_pair(other.exponent.clone());
        let (own, its) = ((self.exponent - exponent.clone()).exp(), (other.exponent - exponent.clone()).exp());
        Self {
            exponent,
            numerator: self.numerator * own.clone() + other.numerator * its.clone(),
            denominator: self.denominator * own + other.denominator * its,
        }
    }

    /// Every set joined with all before it.
    fn prefixes(self) -> Self {
        let sets = self.exponent.dims()[2];
        let mut sums = self;
        let mut by = 1;
        while by < sets {
            sums = sums.clone().at(-(by as isize), sets, false).join(sums);
            by *= 2;
        }
        sums
    }

    fn flipped(self) -> Self {
        self.each(|x, _| x.flip([2]))
    }

    fn narrow(self, first: usize, count: usize) -> Self {
        self.each(|x, _| x.narrow(2, first, count))
    }

    /// These sets, then others.
    fn followed_by(self, other: Self) -> Self {
        Self::merged(&[self, other], |parts| Tensor::cat(parts, 2))
    }

    /// The sets at `count` places from `first` on: the empty set before the first one, and behind the last one that one or the empty set.
    fn at(self, first: isize, count: usize, last: bool) -> Self {
        let sets = self.exponent.dims()[2];
        let front = first.min(0).unsigned_abs().min(count);
        let back = (first + count as isize - sets as isize).clamp(0, count as isize) as usize;
        self.each(|x, empty| {
            let [batch, heads, _, width] = x.dims();
            let none = |many| Tensor::full([batch, heads, many, width], empty, (&x.device(), x.dtype()));
            let behind = |many| match last {
                true => x.clone().narrow(2, sets - 1, 1).expand([batch, heads, many, width]),
                false => none(many),
            };
            let own = count.saturating_sub(front + back);
            let parts = [
                (front > 0).then(|| none(front)),
                (own > 0).then(|| x.clone().narrow(2, first.max(0) as usize, own)),
                (back > 0).then(|| behind(back)),
            ];
            Tensor::cat(parts.into_iter().flatten().collect(), 2)
        })
    }

    /// For each of `rows` queries the union of all sets, with biases `[1, 1 or heads, rows, sets, 1]`, without those that are hidden,
    /// `[1, 1, rows, sets, 1]`. Computed [`ROWS`] queries at a time: all at once would take `rows` times the memory of the keys.
    fn by_rows(
        self,
        rows: usize,
        biases: impl Fn(&Range<usize>) -> Option<Tensor<5>>,
        hidden: impl Fn(&Range<usize>) -> Option<Tensor<5, Bool>>,
    ) -> Self {
        let parts: Vec<Self> = (0..rows)
            .step_by(ROWS)
            .map(|from| {
                let own = from..(from + ROWS).min(rows);
                let [batch, heads, sets, width] = self.exponent.dims();
                let shape = [batch, heads, own.len(), sets, width];
                let all = std::slice::from_ref(&self);
                Self::merged(all, |x| Tensor::stack::<5>(x, 2).expand(shape)).joined(biases(&own), hidden(&own))
            })
            .collect();
        Self::merged(&parts, |parts| Tensor::cat(parts, 2))
    }

    /// The means `numerator / denominator`, times `σ(q)` if `gate`; the empty set gives 0.
    fn gated(self, q: Tensor<4>, gate: bool) -> Tensor<4> {
        let empty = self.denominator.clone().equal_elem(0.0);
        let means = (self.numerator / self.denominator.mask_fill(empty.clone(), 1.0)).mask_fill(empty, 0.0);
        if gate { means * sigmoid(widen(q)) } else { means }
    }
}

impl<const D: usize> Means<D> {
    /// Several, tensor by tensor, as one.
    fn merged<const E: usize>(all: &[Self], merge: impl Fn(Vec<Tensor<D>>) -> Tensor<E>) -> Means<E> {
        let of = |part: fn(&Self) -> &Tensor<D>| merge(all.iter().map(|own| part(own).clone()).collect());
        Means { exponent: of(|m| &m.exponent), numerator: of(|m| &m.numerator), denominator: of(|m| &m.denominator) }
    }

    fn each(self, change: impl Fn(Tensor<D>, f32) -> Tensor<D>) -> Self {
        Self {
            exponent: change(self.exponent, NONE),
            numerator: change(self.numerator, 0.0),
            denominator: change(self.denominator, 0.0),
        }
    }
}

impl Means<5> {
    /// The union of the sets of each row, each with its bias, `[1, 1 or heads, 1 or rows, sets, 1]`, and without those that are hidden.
    fn joined(self, biases: Option<Tensor<5>>, hidden: Option<Tensor<5, Bool>>) -> Means {
        let Self { mut exponent, mut numerator, mut denominator } = self;
        if let Some(biases) = biases {
            let level = biases.clone().detach();
            let weight = (biases - level.clone()).exp();
            exponent = exponent + level;
            numerator = numerator * weight.clone();
            denominator = denominator * weight;
        }
        let mut sets = Means { exponent, numerator, denominator };
        if let Some(hidden) = hidden {
            let hidden = hidden.expand(sets.exponent.dims());
            sets = sets.each(|x, empty| x.mask_fill(hidden.clone(), empty));
        }
        let highest = sets.exponent.clone().max_dim(3);
        let weight = (sets.exponent - highest.clone()).exp();
        let sum = |x: Tensor<5>| (x * weight.clone()).sum_dim(3).squeeze_dim::<4>(3);
        Means {
            numerator: sum(sets.numerator),
            denominator: sum(sets.denominator),
            exponent: highest.squeeze_dim::<4>(3),
        }
    }
}
