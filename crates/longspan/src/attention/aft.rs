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
use burn::tensor::activation::sigmoid;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use longspan_kernels as kernels;
use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Mechanism, Order};
use serde::{Deserialize, Serialize};

use super::registry::{Options, attention_module};
use super::{AttentionMask, Heads};
use crate::backend::tensor::{flattened, narrow_float, repeat_heads, widen};
use crate::backend::{AnyKernel, Layer};
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
    /// The options of the kernel behind it.
    pub fn options(&self) -> &kernels::Aft {
        &self.aft
    }

    /// AFT-conv's kernels, `[heads, taps]`.
    fn kernels(&self, w: Tensor<2>) -> Tensor<2> {
        let (Some(gamma), Some(beta)) = (&self.gamma, &self.beta) else { return w };
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
        let dtype = q.dtype();
        let ([batch, heads, queries, width], keys) = (q.dims(), k.dims()[2]);
        let causal = mask.order == Order::Causal;
        let k = widen(repeat_heads(k, heads)).expand([batch, heads, keys, width]);
        let items = Means::of_keys(k, widen(repeat_heads(v, heads)), mask.ignored(batch, keys));
        let place = |i: usize| i as isize + mask.offset;
        let (back, ahead, biases) = match self.aft.variant {
            Variant::Simple => {
                // Query i reads the prefix that ends at its own position.
                let ends: Vec<isize> = (0..queries)
                    .map(|i| if causal { place(i).min(keys as isize - 1) } else { keys as isize - 1 })
                    .collect();
                return narrow_float(items.prefixes().take(&ends).gated(q, self.aft.gate), dtype);
            }
            Variant::Full { length, .. } => {
                let rows: Vec<i64> = (0..queries).map(|i| place(i).clamp(0, length as isize - 1) as i64).collect();
                let factors = self.w.as_ref().map(|w| (widen(w.val()), self.z.as_ref().map(|z| widen(z.val()))));
                let biases = |own: Range<usize>| {
                    factors.clone().map(|(w, z)| {
                        let count = own.len();
                        let rows = TensorData::new(rows[own].to_vec(), [count]);
                        let rows = w.select(0, Tensor::<1, Int>::from_data(rows, &q.device()));
                        let table = match z {
                            None => rows.narrow(1, 0, keys),
                            Some(z) => rows.matmul(z.narrow(0, 0, keys).transpose()),
                        };
                        table.reshape([1, 1, count, keys, 1])
                    })
                };
                let seen = |i: usize, key: isize| if !causal || key <= place(i) { key } else { -1 };
                let means = items.by_rows(queries, keys, seen, biases);
                return narrow_float(means.gated(q, self.aft.gate), dtype);
            }
            Variant::Conv2d { image: [_, image_width], taps: [tap_rows, taps], .. } => {
                // The tap of each pair, or the extra last column for pairs without a tap.
                let column = |i: usize, key: usize| -> i64 {
                    let tap = |key: usize, own: usize, taps: usize| {
                        (key + (taps - 1) / 2).checked_sub(own).filter(|&tap| tap < taps)
                    };
                    let y = tap(key / image_width, i / image_width, tap_rows);
                    let x = tap(key % image_width, i % image_width, taps);
                    y.zip(x).map_or(tap_rows * taps, |(y, x)| y * taps + x) as i64
                };
                let kernels = self.w.as_ref().map(|w| {
                    let kernels = self.kernels(widen(w.val()));
                    let none = Tensor::zeros([heads, 1], (&kernels.device(), kernels.dtype()));
                    Tensor::cat(vec![kernels, none], 1)
                });
                let biases = |own: Range<usize>| {
                    kernels.clone().map(|kernels| {
                        let count = own.len();
                        let columns: Vec<i64> = own.flat_map(|i| (0..keys).map(move |key| column(i, key))).collect();
                        let columns = TensorData::new(columns, [count * keys]);
                        let columns = Tensor::<1, Int>::from_data(columns, &kernels.device());
                        kernels.select(1, columns).reshape([1, heads, count, keys, 1])
                    })
                };
                let means = items.by_rows(queries, keys, |_, key| key, biases);
                return narrow_float(means.gated(q, self.aft.gate), dtype);
            }
            Variant::Local { window, length } => {
                let table = self.w.as_ref().map(|w| widen(w.val()));
                let rows: Vec<i64> =
                    (0..queries).map(|i| place(i).clamp(0, length.unwrap_or(queries) as isize - 1) as i64).collect();
                let ahead = if causal { 0 } else { window - 1 };
                let biases = table.map(|table| {
                    let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [queries]), &table.device());
                    table.select(0, rows).narrow(1, 0, window + ahead).reshape([1, 1, queries, window + ahead, 1])
                });
                (window - 1, ahead, biases)
            }
            Variant::Conv { taps, .. } => {
                let back = if causal { taps - 1 } else { (taps - 1) / 2 };
                let biases = self.w.as_ref().map(|w| self.kernels(widen(w.val())).reshape([1, heads, 1, taps, 1]));
                (back, taps - 1 - back, biases)
            }
        };
        let (back, ahead) = (back as isize, ahead as isize);
        let inside = |key: isize| if (0..keys as isize).contains(&key) { key } else { -1 };
        let near: Vec<isize> = (0..queries).flat_map(|i| (place(i) - back..=place(i) + ahead).map(inside)).collect();
        let mut means = items.clone().take(&near).biased(biases, queries);
        let before: Vec<isize> = (0..queries).map(|i| (place(i) - back - 1).min(keys as isize - 1)).collect();
        means = items.clone().prefixes().take(&before).join(means);
        if !causal {
            // The keys after the window are a prefix of the flipped sequence.
            let last = keys as isize - 1;
            let after: Vec<isize> = (0..queries).map(|i| (last - (place(i) + ahead + 1)).min(last)).collect();
            means = means.join(items.flipped().prefixes().take(&after));
        }
        narrow_float(means.gated(q, self.aft.gate), dtype)
    }
}

/// The exponent of the empty set: below all others, and finite, so that no difference is NaN.
const NONE: f32 = -1e30;

/// Queries whose biases are formed at a time.
const ROWS: usize = 64;

/// Sets of keys, `[batch, heads, sets, width]` each.
#[derive(Clone)]
struct Means {
    /// The exponent `m` that the sums are relative to. It cancels in the division, and so carries no gradient.
    exponent: Tensor<4>,
    /// `Σ e^{k_j − m} v_j`.
    numerator: Tensor<4>,
    /// `Σ e^{k_j − m}`.
    denominator: Tensor<4>,
}

impl Means {
    /// One set for each key, empty where it is `ignored`.
    fn of_keys(k: Tensor<4>, v: Tensor<4>, ignored: Option<Vec<bool>>) -> Self {
        let [batch, _, keys, _] = k.dims();
        let shape = k.dims();
        let Some(ignored) = ignored else {
            let exponent = k.clone().detach();
            let weight = (k - exponent.clone()).exp();
            return Self { exponent, numerator: weight.clone() * v, denominator: weight };
        };
        let ignored = Tensor::<4, Bool>::from_data(TensorData::new(ignored, [batch, 1, keys, 1]), &k.device());
        let ignored = ignored.expand(shape);
        // Filled, not multiplied by 0: NaN in padding would stay NaN.
        let k = k.mask_fill(ignored.clone(), NONE);
        let exponent = k.clone().detach();
        let weight = (k - exponent.clone()).exp().mask_fill(ignored.clone(), 0.0);
        Self { exponent, numerator: weight.clone() * v.mask_fill(ignored, 0.0), denominator: weight }
    }

    fn each(self, change: impl Fn(Tensor<4>, f32) -> Tensor<4>) -> Self {
        Self {
            exponent: change(self.exponent, NONE),
            numerator: change(self.numerator, 0.0),
            denominator: change(self.denominator, 0.0),
        }
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
        let keys = self.exponent.dims()[2];
        let mut sums = self;
        let mut by = 1;
        while by < keys {
            let earlier = sums.clone().each(|x, empty| {
                let [batch, heads, _, width] = x.dims();
                let front = Tensor::full([batch, heads, by, width], empty, (&x.device(), x.dtype()));
                Tensor::cat(vec![front, x.narrow(2, 0, keys - by)], 2)
            });
            sums = earlier.join(sums);
            by *= 2;
        }
        sums
    }

    fn flipped(self) -> Self {
        self.each(|x, _| x.flip([2]))
    }

    /// The sets at these positions; the empty set for negative ones.
    fn take(self, places: &[isize]) -> Self {
        let sets = self.exponent.dims()[2];
        let places: Vec<i64> = places.iter().map(|&at| if at < 0 { sets as i64 } else { at as i64 }).collect();
        let device = self.exponent.device();
        let places = Tensor::<1, Int>::from_data(TensorData::new(places.clone(), [places.len()]), &device);
        self.each(|x, empty| {
            let [batch, heads, _, width] = x.dims();
            let none = Tensor::full([batch, heads, 1, width], empty, (&x.device(), x.dtype()));
            Tensor::cat(vec![x, none], 2).select(2, places.clone())
        })
    }

    /// The sets of each of `rows` rows joined, each with its bias `[1, 1 or heads, 1 or rows, sets, 1]`.
    fn biased(self, biases: Option<Tensor<5>>, rows: usize) -> Self {
        let [batch, heads, sets, width] = self.exponent.dims();
        let apart = |x: Tensor<4>| x.reshape([batch, heads, rows, sets / rows, width]);
        let (mut exponent, mut numerator, mut denominator) =
            (apart(self.exponent), apart(self.numerator), apart(self.denominator));
        if let Some(biases) = biases {
            let level = biases.clone().detach();
            let weight = (biases - level.clone()).exp();
            exponent = exponent + level;
            numerator = numerator * weight.clone();
            denominator = denominator * weight;
        }
        let highest = exponent.clone().max_dim(3);
        let weight = (exponent - highest.clone()).exp();
        let sum = |x: Tensor<5>| (x * weight.clone()).sum_dim(3).squeeze_dim::<4>(3);
        Self { numerator: sum(numerator), denominator: sum(denominator), exponent: highest.squeeze_dim::<4>(3) }
    }

    /// For each of `rows` queries the union, with biases, of the sets that `seen(row, key)` names (−1 for none).
    /// Computed [`ROWS`] queries at a time: all at once would take `rows` times the memory of the keys.
    fn by_rows(
        self,
        rows: usize,
        keys: usize,
        seen: impl Fn(usize, isize) -> isize,
        biases: impl Fn(Range<usize>) -> Option<Tensor<5>>,
    ) -> Self {
        let parts: Vec<Self> = (0..rows.max(1))
            .step_by(ROWS)
            .map(|from| {
                let own = from..(from + ROWS).min(rows);
                let seen = &seen;
                let all: Vec<isize> =
                    own.clone().flat_map(|i| (0..keys as isize).map(move |key| seen(i, key))).collect();
                self.clone().take(&all).biased(biases(own.clone()), own.len())
            })
            .collect();
        let cat = |part: fn(&Self) -> &Tensor<4>| Tensor::cat(parts.iter().map(|own| part(own).clone()).collect(), 2);
        Self { exponent: cat(|m| &m.exponent), numerator: cat(|m| &m.numerator), denominator: cat(|m| &m.denominator) }
    }

    /// The means `numerator / denominator`, times `σ(q)` if `gate`; the empty set gives 0.
    fn gated(self, q: Tensor<4>, gate: bool) -> Tensor<4> {
        let empty = self.denominator.clone().equal_elem(0.0);
        let means = (self.numerator / self.denominator.mask_fill(empty.clone(), 1.0)).mask_fill(empty, 0.0);
        if gate { means * sigmoid(widen(q)) } else { means }
    }
}
