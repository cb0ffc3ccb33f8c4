//! Every mechanism by name, made from options in JSON.
//!
//! A mechanism is one [`Entry`] of [`TABLE`] and one function that takes its options.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, AnyKernel, Beyond, Bias, FeatureMap, Fourier, FourierNormalizer, Gate, GatedAttention, KernelizedAttention,
    LearnedGates, Positions, RelativeMap, Score, Shaw, ShortConvolution, SoftmaxAttention, Toeplitz, Update, Wave,
};
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::in_words;

/// One mechanism.
pub struct Entry {
    /// Its name in `Mechanism(name, options)`.
    pub name: &'static str,
    /// One line on it.
    pub summary: &'static str,
    /// Options with which it can be asked what algorithms it has.
    example: &'static str,
    build: fn(&mut Options) -> Built,
}

/// All of them.
pub const TABLE: &[Entry] = &[
    Entry {
        name: "kernelized",
        summary: "out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)",
        example: "{}",
        build: kernelized,
    },
    Entry {
        name: "shaw",
        summary: "Shaw's relative positions, φ(q_i)·(φ(k_j) + ρ(rel[clip(j−i, −R, R) + R])), content term optional",
        example: r#"{"radius": 1}"#,
        build: shaw,
    },
    Entry {
        name: "fourier",
        summary: "Fourier or rotary positions, Σ_k φ(q_i)_k φ(k_j)_k (β_k + c_k cos(b_k + a_k·(p_i − p_j)))",
        example: "{}",
        build: fourier,
    },
    Entry {
        name: "toeplitz",
        summary: "a learned weight for every distance, φ(q_i)·φ(k_j) e^{bias[j − i]}",
        example: r#"{"shape": [1]}"#,
        build: toeplitz,
    },
    Entry {
        name: "gated",
        summary: "gated linear attention, S_t = e^{g_t} S_{t-1} + k_t v_tᵀ, out_t = scale S_tᵀ q_t",
        example: "{}",
        build: |options| gated_attention(options, Update::Sum),
    },
    Entry {
        name: "delta",
        summary: "the (gated) delta rule, S_t = e^{g_t} S_{t-1} + β_t k_t (v_t − (e^{g_t} S_{t-1})ᵀ k_t)ᵀ, out_t = scale S_tᵀ q_t",
        example: "{}",
        build: |options| gated_attention(options, Update::Delta),
    },
    Entry {
        name: "aft-full",
        summary: "σ(q_i) ⊙ Σ_j e^{k_j + w_ij} ⊙ v_j / Σ_j e^{k_j + w_ij}, w learned for every pair, dense or u·zᵀ",
        example: r#"{"length": 1}"#,
        build: aft_full,
    },
    Entry {
        name: "aft-local",
        summary: "as aft-full with w learned inside a window and 0 beyond",
        example: r#"{"window": 1}"#,
        build: aft_local,
    },
    Entry {
        name: "aft-simple",
        summary: "σ(q_i) ⊙ Σ_j e^{k_j} ⊙ v_j / Σ_j e^{k_j}",
        example: "{}",
        build: |_| Ok(Arc::new(Aft::new(Variant::Simple))),
    },
    Entry {
        name: "aft-conv",
        summary: "as aft-local with one key and one kernel of taps for each head, over sequences or images",
        example: r#"{"taps": 1}"#,
        build: aft_conv,
    },
    Entry {
        name: "short-convolution",
        summary: "q_i ⊙ SiLU(Σ_t c_t ⊙ k_{i−t} ⊙ v_{i−t}), a few learned taps over the latest tokens; without gates q = k = 1",
        example: r#"{"width": 1}"#,
        build: short_convolution,
    },
    Entry {
        name: "softmax",
        summary: "softmax attention, the baseline: quadratic in the number of tokens; with a window, linear",
        example: "{}",
        build: softmax,
    },
];

impl Entry {
    /// Names of the algorithms that can be forced.
    pub fn algorithms(&self) -> Vec<&'static str> {
        let kernel = Options::read(self.example).and_then(|mut options| (self.build)(&mut options)).ok();
        kernel.map_or(Vec::new(), |k| k.algorithms().iter().map(|a| a.name()).collect())
    }
}

/// The mechanism `name` with `options`, a JSON object, for `operation`.
pub fn build(name: &str, options: &str, operation: &str) -> PyResult<Arc<dyn AnyKernel>> {
    let wrong = |message: String| PyValueError::new_err(format!("{operation}: {message}"));
    let Some(entry) = TABLE.iter().find(|entry| entry.name == name) else {
        let known: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
        return Err(wrong(format!("unknown mechanism {name:?}; known are {}", known.join(", "))));
    };
    let mut options = Options::read(options).map_err(wrong)?;
    let kernel = (entry.build)(&mut options).map_err(wrong)?;
    let Some(name) = options.given.keys().next() else { return Ok(kernel) };
    let known = options.known.join(", ");
    Err(wrong(format!("{name}: expected an option of {} ({known}), got an unknown field", entry.name)))
}

/// The feature map of this name.
pub fn feature_map(name: &str) -> PyResult<FeatureMap> {
    name.parse().map_err(|error: longspan_kernels::Error| PyValueError::new_err(error.to_string()))
}

/// `name` as a static string, if a mechanism's states have it.
pub fn state_name(name: &str) -> Option<&'static str> {
    let others = ["shaw-relative", "depthwise-convolution", "softmax-window"];
    TABLE.iter().map(|entry| entry.name).chain(others).find(|known| *known == name)
}

/// A mechanism, or which option is wrong and why.
type Built = Result<Arc<dyn AnyKernel>, String>;

/// Options that are taken by their names; what is left is none.
struct Options {
    given: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Options {
    fn read(text: &str) -> Result<Self, String> {
        let given = serde_json::from_str(text).map_err(|e| format!("options: {e}"))?;
        Ok(Self { given, known: Vec::new() })
    }

    /// An option, or what stands for it where it is not given.
    fn or<T: DeserializeOwned>(&mut self, name: &'static str, default: T) -> Result<T, String> {
        self.known.push(name);
        let Some(value) = self.given.remove(name) else { return Ok(default) };
        serde_json::from_value(value).map_err(|e| format!("{name}: {}", in_words(&e.to_string())))
    }

    fn maybe<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, String> {
        self.or(name, None)
    }

    fn need<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<T, String> {
        self.maybe(name)?.ok_or_else(|| format!("{name}: expected a value, got none"))
    }

    /// What the kernels have by a name, or their default.
    fn named<T: FromStr<Err: Display> + Default>(&mut self, name: &'static str) -> Result<T, String> {
        let Some(text) = self.maybe::<String>(name)? else { return Ok(T::default()) };
        text.parse().map_err(|e: T::Err| format!("{name}: {e}"))
    }

    /// One of these, by default the first.
    fn one_of<T: Copy>(&mut self, name: &'static str, all: &[(&str, T)]) -> Result<T, String> {
        let text = self.or(name, all[0].0.to_owned())?;
        let known = || all.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        let found = all.iter().find(|(known, _)| *known == text);
        found.map(|(_, one)| *one).ok_or_else(|| format!("{name}: expected one of {}, got {text:?}", known()))
    }
}

/// Attention with a feature map, by this score.
fn with_score(options: &mut Options, score: Score, normalize: bool) -> Built {
    Ok(Arc::new(KernelizedAttention {
        feature_map: options.named("feature_map")?,
        score,
        decay: options.maybe("decay")?,
        gate: options.or("gate", false)?,
        normalize,
        algorithm: options.named("algorithm")?,
    }))
}

fn kernelized(options: &mut Options) -> Built {
    let normalize = options.or("normalize", true)?;
    with_score(options, Score::Content, normalize)
}

fn shaw(options: &mut Options) -> Built {
    let shaw = Shaw {
        radius: options.need("radius")?,
        map: options.one_of("rel_feature_map", &[("same", RelativeMap::Same), ("identity", RelativeMap::Identity)])?,
        shared: options.or("shared", false)?,
    };
    // `2R + 1` rows must be a number; no table of an eighth of the address space exists.
    if shaw.radius > usize::MAX / 8 {
        return Err(format!("radius: expected a table that fits memory, got {}", shaw.radius));
    }
    let score = if options.or("kernelized", true)? { Score::Combined(shaw) } else { Score::Relative(shaw) };
    let normalize = options.or("normalize", true)?;
    with_score(options, score, normalize)
}

fn fourier(options: &mut Options) -> Built {
    let normalizers = [
        ("one_plus", FourierNormalizer::OnePlus),
        ("dominant", FourierNormalizer::Dominant),
        ("unrotated", FourierNormalizer::Unrotated),
        ("none", FourierNormalizer::None),
        ("literal", FourierNormalizer::Literal),
    ];
    let fourier = Fourier {
        wave: options.one_of("wave", &[("each", Wave::Each), ("pairs", Wave::Pairs)])?,
        normalizer: options.one_of("normalizer", &normalizers)?,
        // Of given positions.
        positions: options.maybe("axes")?.map_or(Positions::Counted, |axes| Positions::Given { axes }),
    };
    with_score(options, Score::Fourier(fourier), true)
}

fn toeplitz(options: &mut Options) -> Built {
    let kind: String = options.or("kind", "table".to_owned())?;
    // A head's table.
    let shape: Vec<usize> = options.need("shape")?;
    // The distance of the first entry of a table; by default, and if it is centred, that of the middle one is 0.
    let (first, centred) = (options.maybe("first")?, options.or("centred", false)?);
    // As in T5.
    let (max_distance, bidirectional) = (options.or("max_distance", 128)?, options.or("bidirectional", true)?);
    let odd = |n: usize| n % 2 == 1;
    let bias = match (&*kind, &*shape) {
        ("table", &[count]) => {
            let middle = isize::try_from(count / 2).unwrap_or(isize::MAX);
            let first = first.filter(|_| !centred).unwrap_or(-middle);
            Bias::Table { first, count, beyond: Beyond::Error }
        }
        ("clipped", &[rows]) if odd(rows) => Bias::clipped(rows / 2),
        ("buckets", &[buckets]) => Bias::Buckets { buckets, max_distance, bidirectional },
        ("grid", &[rows, columns]) if odd(rows) && odd(columns) => {
            Bias::Grid { height: rows / 2 + 1, width: columns / 2 + 1 }
        }
        ("table" | "clipped" | "buckets" | "grid", shape) => {
            return Err(format!(
                "bias: expected [distances] for a head, 2R + 1 of them if clipped, or [2·height − 1, 2·width − 1] for a \
                 grid, got {shape:?}"
            ));
        }
        _ => return Err(format!("kind: expected one of table, clipped, buckets, grid, got {kind:?}")),
    };
    Ok(Arc::new(Toeplitz {
        feature_map: options.named("feature_map")?,
        bias,
        normalize: options.or("normalize", true)?,
        algorithm: options.named("algorithm")?,
    }))
}

fn aft_full(options: &mut Options) -> Built {
    let (length, rank) = (options.need("length")?, options.maybe("rank")?);
    Ok(Arc::new(Aft::new(Variant::Full { length, rank })))
}

fn aft_local(options: &mut Options) -> Built {
    // Rows of a table that is read by position rather than by query.
    let (length, by_position) = (options.maybe("length")?, options.or("by_position", false)?);
    let window = options.need("window")?;
    Ok(Arc::new(Aft::new(Variant::Local { window, length: length.filter(|_| by_position) })))
}

fn aft_conv(options: &mut Options) -> Built {
    let (taps, normalized) = (options.need("taps")?, options.or("normalized", false)?);
    // Height and width, and rows of taps of a kernel over it.
    let variant = match (options.maybe("image")?, options.maybe("tap_rows")?) {
        (Some(image), Some(rows)) => Variant::Conv2d { image, taps: [rows, taps], normalized },
        (None, None) => Variant::Conv { taps, normalized },
        _ => return Err("image: expected both an image and rows of taps, or neither, got one".to_owned()),
    };
    Ok(Arc::new(Aft::new(variant)))
}

fn gated_attention(options: &mut Options, update: Update) -> Built {
    let gates = [("head", Gate::Head), ("channel", Gate::Channel), ("none", Gate::None)];
    let attention = GatedAttention {
        update,
        gate: options.one_of("gate", &gates)?,
        l2_norm: options.or("l2_norm", false)?,
        scale: options.maybe("scale")?,
    };
    // Of modules, where gates come with the keys.
    let (beta_max, convolution) = (options.maybe("beta_max")?.unwrap_or(1.0), options.maybe("convolution")?);
    if options.or("learned", false)? {
        return Ok(Arc::new(LearnedGates { attention, beta_max, convolution }));
    }
    Ok(Arc::new(attention))
}

fn short_convolution(options: &mut Options) -> Built {
    Ok(Arc::new(ShortConvolution {
        width: options.need("width")?,
        silu: options.or("silu", true)?,
        gated: options.or("gated", true)?,
        bias: options.or("bias", false)?,
    }))
}

fn softmax(options: &mut Options) -> Built {
    let default = SoftmaxAttention::default();
    Ok(Arc::new(SoftmaxAttention {
        scale: options.maybe("scale")?,
        capacity: options.maybe("capacity")?.unwrap_or(default.capacity),
        window: options.maybe("window")?,
    }))
}
