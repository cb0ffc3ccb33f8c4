//! Every mechanism by name, made from options in JSON.
//!
//! A mechanism is one [`Entry`] of [`TABLE`] and one function that reads its options.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use longspan_kernels::{Algorithm, FeatureMap, KernelizedAttention, Mechanism, RelativeMap, Score, Shaw};
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

/// A mechanism in both number types.
pub trait Kernel: Mechanism<f32> + Mechanism<f64> {}

impl<M: Mechanism<f32> + Mechanism<f64>> Kernel for M {}

/// One mechanism.
pub struct Entry {
    /// Its name in `Mechanism(name, options)`.
    pub name: &'static str,
    /// One line on it.
    pub summary: &'static str,
    /// Names under which its kernels know their states.
    states: &'static [&'static str],
    /// Options with which it can be asked what algorithms it has.
    example: &'static str,
    build: fn(&str) -> Result<Arc<dyn Kernel>, serde_json::Error>,
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
];

impl Entry {
    /// Names of the algorithms that can be forced.
    pub fn algorithms(&self) -> Vec<&'static str> {
        let kernel = (self.build)(self.example).ok();
        kernel.map_or(Vec::new(), |k| Mechanism::<f32>::algorithms(&*k).iter().map(|a| a.name()).collect())
    }
}

/// The mechanism `name` with `options`, a JSON object.
pub fn build(name: &str, options: &str) -> PyResult<Arc<dyn Kernel>> {
    let Some(entry) = TABLE.iter().find(|entry| entry.name == name) else {
        let known: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
        return Err(PyValueError::new_err(format!("unknown mechanism {name:?}; known are {}", known.join(", "))));
    };
    (entry.build)(options).map_err(|e| {
        // The user never saw the text that serde counts lines and columns in.
        let message = e.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        PyValueError::new_err(format!("{name}: options: {message}"))
    })
}

/// The kernels' own copy of the name of a state's mechanism.
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
    #[serde(default)]
    decay: Option<Vec<f64>>,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default, deserialize_with = "by_name")]
    algorithm: Algorithm,
}

fn kernelized(options: &str) -> Result<Arc<dyn Kernel>, serde_json::Error> {
    let KernelizedOptions { feature_map, decay, normalize, algorithm } = read(options)?;
    Ok(Arc::new(KernelizedAttention { feature_map, score: Score::Content, decay, normalize, algorithm }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShawOptions {
    radius: usize,
    #[serde(default)]
    shared: bool,
    #[serde(default = "yes")]
    kernelized: bool,
    #[serde(default)]
    rel_feature_map: RelativeName,
    #[serde(default, deserialize_with = "by_name")]
    feature_map: FeatureMap,
    #[serde(default)]
    decay: Option<Vec<f64>>,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default, deserialize_with = "by_name")]
    algorithm: Algorithm,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum RelativeName {
    #[default]
    Same,
    Identity,
}

fn shaw(options: &str) -> Result<Arc<dyn Kernel>, serde_json::Error> {
    let options: ShawOptions = read(options)?;
    // `2R + 1` rows must be a number; no table of an eighth of the address space exists.
    if options.radius > usize::MAX / 8 {
        return Err(serde_json::Error::custom(format!(
            "radius: expected a table that fits memory, got {}",
            options.radius
        )));
    }
    let map = match options.rel_feature_map {
        RelativeName::Same => RelativeMap::Same,
        RelativeName::Identity => RelativeMap::Identity,
    };
    let shaw = Shaw { radius: options.radius, map, shared: options.shared };
    Ok(Arc::new(KernelizedAttention {
        feature_map: options.feature_map,
        score: if options.kernelized { Score::Combined(shaw) } else { Score::Relative(shaw) },
        decay: options.decay,
        normalize: options.normalize,
        algorithm: options.algorithm,
    }))
}
