//! Every mechanism by name, made from options in JSON.
//!
//! A mechanism is one [`Entry`] of [`TABLE`] and one function that reads its options.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Algorithm, AnyKernel, Beyond, Bias, FeatureMap, Fourier, FourierNormalizer, Gate, GatedAttention,
    KernelizedAttention, LearnedGates, Positions, RelativeMap, Score, Shaw, ShortConvolution, SoftmaxAttention,
    Toeplitz, Update, Wave,
};
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

use crate::error::in_words;

/// One mechanism.
pub struct Entry {
    /// Its name in `Mechanism(name, options)`.
    pub name: &'static str,
    /// One line on it.
    pub summary: &'static str,
    /// Names of its kernels' states.
    states: &'static [&'static str],
    /// Options with which it can be asked what algorithms it has.
    example: &'static str,
    build: fn(&str) -> Result<Arc<dyn AnyKernel>, serde_json::Error>,
}

/// All of them.
pub const TABLE: &[Entry] = &[
    Entry {
        name: "kernelized",
        summary: "out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)",
        states: &["kernelized"],
        example: "{}",
        build: kernelized,
    },
    Entry {
        name: "shaw",
        summary: "Shaw's relative positions, φ(q_i)·(φ(k_j) + ρ(rel[clip(j−i, −R, R) + R])), content term optional",
        states: &["shaw", "shaw-relative"],
        example: r#"{"radius": 1}"#,
        build: shaw,
    },
    Entry {
        name: "fourier",
        summary: "Fourier or rotary positions, Σ_k φ(q_i)_k φ(k_j)_k (β_k + c_k cos(b_k + a_k·(p_i − p_j)))",
        states: &["fourier"],
        example: "{}",
        build: fourier,
    },
    Entry {
        name: "toeplitz",
        summary: "a learned weight for every distance, φ(q_i)·φ(k_j) e^{bias[j − i]}",
        states: &["toeplitz"],
        example: r#"{"shape": [1]}"#,
        build: toeplitz,
    },
    Entry {
        name: "gated",
        summary: "gated linear attention, S_t = e^{g_t} S_{t-1} + k_t v_tᵀ, out_t = scale S_tᵀ q_t",
        states: &["gated"],
        example: "{}",
        build: |options| gated_attention(Update::Sum, options),
    },
    Entry {
        name: "delta",
        summary: "the (gated) delta rule, S_t = e^{g_t} S_{t-1} + β_t k_t (v_t − (e^{g_t} S_{t-1})ᵀ k_t)ᵀ, out_t = scale S_tᵀ q_t",
        states: &["delta"],
        example: "{}",
        build: |options| gated_attention(Update::Delta, options),
    },
    Entry {
        name: "aft-full",
        summary: "σ(q_i) ⊙ Σ_j e^{k_j + w_ij} ⊙ v_j / Σ_j e^{k_j + w_ij}, w learned for every pair, dense or u·zᵀ",
        states: &["aft-full"],
        example: r#"{"length": 1}"#,
        build: aft_full,
    },
    Entry {
        name: "aft-local",
        summary: "as aft-full with w learned inside a window and 0 beyond",
        states: &["aft-local"],
        example: r#"{"window": 1}"#,
        build: aft_local,
    },
    Entry {
        name: "aft-simple",
        summary: "σ(q_i) ⊙ Σ_j e^{k_j} ⊙ v_j / Σ_j e^{k_j}",
        states: &["aft-simple"],
        example: "{}",
        build: aft_simple,
    },
    Entry {
        name: "aft-conv",
        summary: "as aft-local with one key and one kernel of taps for each head, over sequences or images",
        states: &["aft-conv"],
        example: r#"{"taps": 1}"#,
        build: aft_conv,
    },
    Entry {
        name: "short-convolution",
        summary: "q_i ⊙ SiLU(Σ_t c_t ⊙ k_{i−t} ⊙ v_{i−t}), a few learned taps over the latest tokens; without gates q = k = 1",
        states: &["short-convolution", "depthwise-convolution"],
        example: r#"{"width": 1}"#,
        build: short_convolution,
    },
    Entry {
        name: "softmax",
        summary: "softmax attention, the baseline: quadratic in the number of tokens; with a window, linear",
        states: &["softmax", "softmax-window"],
        example: "{}",
        build: softmax,
    },
];

impl Entry {
    /// Names of the algorithms that can be forced.
    pub fn algorithms(&self) -> Vec<&'static str> {
        let kernel = (self.build)(self.example).ok();
        kernel.map_or(Vec::new(), |k| k.algorithms().iter().map(|a| a.name()).collect())
    }
}

/// The mechanism `name` with `options`, a JSON object, for `operation`.
pub fn build(name: &str, options: &str, operation: &str) -> PyResult<Arc<dyn AnyKernel>> {
    let Some(entry) = TABLE.iter().find(|entry| entry.name == name) else {
        let known: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
        let message = format!("{operation}: unknown mechanism {name:?}; known are {}", known.join(", "));
        return Err(PyValueError::new_err(message));
    };
    (entry.build)(options).map_err(|e| {
        // Without serde's line and column, which refer to a text that the user never saw.
        let message = e.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        if let Some(option) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
            return PyValueError::new_err(format!("{operation}: {option}: expected a value, got none"));
        }
        PyValueError::new_err(format!("{operation}: options: {}", in_words(message)))
    })
}

/// The feature map of this name.
pub fn feature_map(name: &str) -> PyResult<FeatureMap> {
    name.parse().map_err(|error: longspan_kernels::Error| PyValueError::new_err(error.to_string()))
}

/// `name` as a static string, if a mechanism's states have it.
pub fn state_name(name: &str) -> Option<&'static str> {
    TABLE.iter().flat_map(|entry| entry.states).copied().find(|known| *known == name)
}

fn read<T: DeserializeOwned>(options: &str) -> Result<T, serde_json::Error> {
    serde_json::from_str(options)
}

/// A kernel's enum, by its name.
fn by_name<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

fn yes() -> bool {
    true
}

/// Options that all mechanisms with a kernel share.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KernelizedOptions {
    #[serde(default, deserialize_with = "by_name")]
    feature_map: FeatureMap,
    decay: Option<Vec<f64>>,
    #[serde(default)]
    gate: bool,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default, deserialize_with = "by_name")]
    algorithm: Algorithm,
}

fn kernelized(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let KernelizedOptions { feature_map, decay, gate, normalize, algorithm } = read(options)?;
    Ok(Arc::new(KernelizedAttention { feature_map, score: Score::Content, decay, gate, normalize, algorithm }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShawOptions {
    radius: usize,
    #[serde(default)]
    shared: bool,
    #[serde(default = "yes")]
    kernelized: bool,
    #[serde(default, deserialize_with = "RelativeName::deserialize")]
    rel_feature_map: RelativeMap,
    #[serde(default, deserialize_with = "by_name")]
    feature_map: FeatureMap,
    decay: Option<Vec<f64>>,
    #[serde(default)]
    gate: bool,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default, deserialize_with = "by_name")]
    algorithm: Algorithm,
}

#[derive(Deserialize)]
#[serde(remote = "RelativeMap", rename_all = "lowercase")]
enum RelativeName {
    Same,
    Identity,
}

fn shaw(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let options: ShawOptions = read(options)?;
    // `2R + 1` rows must be a number; no table of an eighth of the address space exists.
    if options.radius > usize::MAX / 8 {
        return Err(serde_json::Error::custom(format!(
            "radius: expected a table that fits memory, got {}",
            options.radius
        )));
    }
    let shaw = Shaw { radius: options.radius, map: options.rel_feature_map, shared: options.shared };
    Ok(Arc::new(KernelizedAttention {
        feature_map: options.feature_map,
        score: if options.kernelized { Score::Combined(shaw) } else { Score::Relative(shaw) },
        decay: options.decay,
        gate: options.gate,
        normalize: options.normalize,
        algorithm: options.algorithm,
    }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FourierOptions {
    #[serde(default, deserialize_with = "WaveName::deserialize")]
    wave: Wave,
    #[serde(default, deserialize_with = "NormalizerName::deserialize")]
    normalizer: FourierNormalizer,
    /// Axes of given positions; counted ones if there are none.
    axes: Option<usize>,
    #[serde(default, deserialize_with = "by_name")]
    feature_map: FeatureMap,
    decay: Option<Vec<f64>>,
    #[serde(default)]
    gate: bool,
    #[serde(default, deserialize_with = "by_name")]
    algorithm: Algorithm,
}

#[derive(Deserialize)]
#[serde(remote = "Wave", rename_all = "snake_case")]
enum WaveName {
    Each,
    Pairs,
}

#[derive(Deserialize)]
#[serde(remote = "FourierNormalizer", rename_all = "snake_case")]
enum NormalizerName {
    Literal,
    OnePlus,
    Dominant,
    Unrotated,
    None,
}

fn fourier(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let options: FourierOptions = read(options)?;
    let fourier = Fourier {
        wave: options.wave,
        normalizer: options.normalizer,
        positions: options.axes.map_or(Positions::Counted, |axes| Positions::Given { axes }),
    };
    Ok(Arc::new(KernelizedAttention {
        feature_map: options.feature_map,
        score: Score::Fourier(fourier),
        decay: options.decay,
        gate: options.gate,
        normalize: true,
        algorithm: options.algorithm,
    }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToeplitzOptions {
    /// Which distances a table has entries for.
    #[serde(default)]
    kind: BiasKind,
    /// A head's table.
    shape: Vec<usize>,
    /// The distance of the first entry of a table of all distances; by default that of the middle one is 0.
    first: Option<isize>,
    /// Have distance 0 in the middle whatever `first` says: one table for calls of any length.
    #[serde(default)]
    centred: bool,
    /// Of buckets.
    #[serde(default = "far")]
    max_distance: usize,
    #[serde(default = "yes")]
    bidirectional: bool,
    #[serde(default, deserialize_with = "by_name")]
    feature_map: FeatureMap,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default, deserialize_with = "by_name")]
    algorithm: Algorithm,
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum BiasKind {
    #[default]
    Table,
    Clipped,
    Buckets,
    Grid,
}

/// As in T5.
fn far() -> usize {
    128
}

fn toeplitz(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let options: ToeplitzOptions = read(options)?;
    let odd = |n: usize| n % 2 == 1;
    let bias = match (options.kind, &*options.shape) {
        (BiasKind::Table, &[count]) => {
            let middle = isize::try_from(count / 2).unwrap_or(isize::MAX);
            let first = options.first.filter(|_| !options.centred).unwrap_or(-middle);
            Bias::Table { first, count, beyond: Beyond::Error }
        }
        (BiasKind::Clipped, &[rows]) if odd(rows) => Bias::clipped(rows / 2),
        (BiasKind::Buckets, &[buckets]) => {
            Bias::Buckets { buckets, max_distance: options.max_distance, bidirectional: options.bidirectional }
        }
        (BiasKind::Grid, &[rows, columns]) if odd(rows) && odd(columns) => {
            Bias::Grid { height: rows / 2 + 1, width: columns / 2 + 1 }
        }
        (_, shape) => {
            return Err(serde_json::Error::custom(format!(
                "bias: expected [distances] for a head, 2R + 1 of them if clipped, or [2·height − 1, 2·width − 1] for a \
                 grid, got {shape:?}"
            )));
        }
    };
    let (feature_map, normalize, algorithm) = (options.feature_map, options.normalize, options.algorithm);
    Ok(Arc::new(Toeplitz { feature_map, bias, normalize, algorithm }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AftFullOptions {
    length: usize,
    rank: Option<usize>,
}

fn aft_full(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let AftFullOptions { length, rank } = read(options)?;
    Ok(Arc::new(Aft::new(Variant::Full { length, rank })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AftLocalOptions {
    window: usize,
    /// Rows of a table that is read by position rather than by query.
    length: Option<usize>,
    #[serde(default)]
    by_position: bool,
}

fn aft_local(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let AftLocalOptions { window, length, by_position } = read(options)?;
    Ok(Arc::new(Aft::new(Variant::Local { window, length: length.filter(|_| by_position) })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoOptions {}

fn aft_simple(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let NoOptions {} = read(options)?;
    Ok(Arc::new(Aft::new(Variant::Simple)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AftConvOptions {
    taps: usize,
    /// Rows of taps of a kernel over an image.
    tap_rows: Option<usize>,
    /// Its height and width.
    image: Option<[usize; 2]>,
    #[serde(default)]
    normalized: bool,
}

fn aft_conv(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let AftConvOptions { taps, tap_rows, image, normalized } = read(options)?;
    let variant = match (image, tap_rows) {
        (Some(image), Some(rows)) => Variant::Conv2d { image, taps: [rows, taps], normalized },
        (None, None) => Variant::Conv { taps, normalized },
        _ => {
            return Err(serde_json::Error::custom(
                "image: expected both an image and rows of taps, or neither, got one",
            ));
        }
    };
    Ok(Arc::new(Aft::new(variant)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GatedOptions {
    #[serde(default)]
    gate: GateName,
    #[serde(default)]
    l2_norm: bool,
    scale: Option<f64>,
    /// Whether gates come with the keys, as in modules; the other options are theirs.
    #[serde(default)]
    learned: bool,
    beta_max: Option<f64>,
    convolution: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum GateName {
    None,
    #[default]
    Head,
    Channel,
}

fn gated_attention(update: Update, options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let GatedOptions { gate, l2_norm, scale, learned, beta_max, convolution } = read(options)?;
    let gate = match gate {
        GateName::None => Gate::None,
        GateName::Head => Gate::Head,
        GateName::Channel => Gate::Channel,
    };
    let attention = GatedAttention { update, gate, l2_norm, scale };
    if learned {
        return Ok(Arc::new(LearnedGates { attention, beta_max: beta_max.unwrap_or(1.0), convolution }));
    }
    Ok(Arc::new(attention))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShortConvolutionOptions {
    width: usize,
    #[serde(default = "yes")]
    silu: bool,
    #[serde(default = "yes")]
    gated: bool,
    #[serde(default)]
    bias: bool,
}

fn short_convolution(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let ShortConvolutionOptions { width, silu, gated, bias } = read(options)?;
    Ok(Arc::new(ShortConvolution { width, silu, gated, bias }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SoftmaxOptions {
    scale: Option<f64>,
    capacity: Option<usize>,
    window: Option<usize>,
}

fn softmax(options: &str) -> Result<Arc<dyn AnyKernel>, serde_json::Error> {
    let SoftmaxOptions { scale, capacity, window } = read(options)?;
    let default = SoftmaxAttention::default();
    Ok(Arc::new(SoftmaxAttention { scale, capacity: capacity.unwrap_or(default.capacity), window }))
}
