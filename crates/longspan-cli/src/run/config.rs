//! All settings of a run, by task, and what they may be.
//!
//! A setting has a row in [`KEYS`](super::keys::KEYS) and a field here, of a type that the tasks with this setting have.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use longspan::layers::{Activation, NormKind};
use longspan::models::{Norm, Pooling};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::columns::Columns;
use super::keys::{self, Flag};
use super::words::{ActivationWord, NormKindWord, NormWord, PoolingWord, name, plain};

#[derive(Debug, Clone, PartialEq)]
pub struct Config<S> {
    /// The files to learn from; none where sequences are drawn, and for the CMU dictionary.
    pub data: Vec<PathBuf>,
    pub task: S,
    pub model: ModelSettings,
    pub training: TrainingSettings,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Files {
    pub columns: Columns,
    pub development: Option<PathBuf>,
    pub held_out: Option<PathBuf>,
    pub split_version: u32,
    pub max_tokens: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stack {
    pub base: bool,
    pub layers: usize,
    pub causal: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabelSettings {
    pub target: Option<LabelKind>,
    #[serde(with = "PoolingWord")]
    pub pooling: Pooling,
    pub label_smoothing: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LabelKind {
    Label,
    Number,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Missing {
    Mask,
    Refuse,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairsSettings {
    #[serde(flatten)]
    pub files: Files,
    pub source_tokens: Option<String>,
    pub target_tokens: Option<String>,
    pub answer_tokens: Option<usize>,
    pub encoder_layers: usize,
    pub decoder_layers: usize,
    pub label_smoothing: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextSettings {
    pub tokens: Option<String>,
    pub vocabulary: Option<usize>,
    pub segment: usize,
    pub carry: usize,
    pub backpropagate: usize,
    pub split_sequence: bool,
    pub layers: usize,
    pub label_smoothing: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabelledSettings {
    #[serde(flatten)]
    pub files: Files,
    #[serde(flatten)]
    pub labels: LabelSettings,
    #[serde(flatten)]
    pub stack: Stack,
    pub tokens: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SeriesSettings {
    #[serde(flatten)]
    pub files: Files,
    #[serde(flatten)]
    pub labels: LabelSettings,
    #[serde(flatten)]
    pub stack: Stack,
    pub clock: Option<bool>,
    pub missing: Missing,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForecastSettings {
    #[serde(flatten)]
    pub files: Files,
    #[serde(flatten)]
    pub stack: Stack,
    pub forecast: usize,
    pub context: Option<usize>,
    pub missing: Missing,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SyntheticSettings {
    pub synthetic: String,
    pub layers: usize,
    pub label_smoothing: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSettings {
    pub attention: String,
    pub attention_options: Map<String, Value>,
    pub feature_map: String,
    pub radius: usize,
    pub d_model: usize,
    pub heads: usize,
    pub d_ff: usize,
    pub dropout: f64,
    #[serde(with = "NormWord")]
    pub norm: Norm,
    #[serde(with = "NormKindWord")]
    pub norm_kind: NormKind,
    #[serde(with = "ActivationWord")]
    pub activation: Activation,
    pub gated: bool,
    pub gated_attention: bool,
    pub recompute: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingSettings {
    pub seed: u64,
    pub steps: Option<usize>,
    pub minutes: Option<f64>,
    pub optimizer: Optimizer,
    pub batch_size: usize,
    pub learning_rate: f64,
    pub warmup_steps: usize,
    pub weight_decay: f64,
    pub clip_norm: f64,
    pub workers: Option<usize>,
    pub checkpoint_steps: usize,
    pub evaluate: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    AdamW,
    Muon,
}

impl TrainingSettings {
    /// How many held-out examples are scored, at most.
    pub fn scored(&self) -> usize {
        if self.evaluate == 0 { usize::MAX } else { self.evaluate }
    }

    /// How many steps the run takes; `None` while a run in minutes is being timed.
    pub fn known_steps(&self) -> Option<usize> {
        if self.minutes.is_some() { None } else { self.steps }
    }
}

pub trait TaskSettings: Debug + Clone + PartialEq + Serialize + DeserializeOwned + Sync {
    const KIND: TaskKind;

    /// What training and commands ask of any task.
    fn common(&self) -> Common<'_>;

    /// Checks values that must fit each other.
    fn check(&self) -> Result<()> {
        self.common().files.map_or(Ok(()), |files| files.columns.check(Self::KIND))
    }
}

/// Settings that several tasks have, as far as this one has them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Common<'a> {
    pub files: Option<&'a Files>,
    pub drawn: Option<&'a str>,
    /// Blocks, and those of them with cross-attention.
    pub blocks: usize,
    pub crossing: usize,
    pub label_smoothing: f64,
    pub base: bool,
    /// Tokens of sequences of which each process takes a stretch.
    pub split_sequence: Option<usize>,
    pub longest_answer: Option<usize>,
}

impl TaskSettings for PairsSettings {
    const KIND: TaskKind = TaskKind::Pairs;

    fn common(&self) -> Common<'_> {
        Common {
            files: Some(&self.files),
            blocks: self.encoder_layers + self.decoder_layers,
            crossing: self.decoder_layers,
            label_smoothing: self.label_smoothing,
            longest_answer: Some(self.answer_tokens.unwrap_or(self.files.max_tokens)),
            ..Common::default()
        }
    }
}

impl TaskSettings for TextSettings {
    const KIND: TaskKind = TaskKind::Text;

    fn common(&self) -> Common<'_> {
        Common {
            blocks: self.layers,
            label_smoothing: self.label_smoothing,
            split_sequence: self.split_sequence.then_some(self.segment * self.backpropagate),
            ..Common::default()
        }
    }

    fn check(&self) -> Result<()> {
        if self.backpropagate > self.carry {
            bail!(
                "backpropagate = {} is more than carry = {}, the segments after which states are reset; change one with --set",
                self.backpropagate,
                self.carry
            );
        }
        Ok(())
    }
}

/// Of files, by a stack that may correct a simple method.
fn stacked<'a>(files: &'a Files, stack: &Stack, label_smoothing: f64) -> Common<'a> {
    Common { files: Some(files), blocks: stack.layers, base: stack.base, label_smoothing, ..Common::default() }
}

impl TaskSettings for LabelledSettings {
    const KIND: TaskKind = TaskKind::Labelled;

    fn common(&self) -> Common<'_> {
        stacked(&self.files, &self.stack, self.labels.label_smoothing)
    }
}

impl TaskSettings for SeriesSettings {
    const KIND: TaskKind = TaskKind::Series;

    fn common(&self) -> Common<'_> {
        stacked(&self.files, &self.stack, self.labels.label_smoothing)
    }
}

impl TaskSettings for ForecastSettings {
    const KIND: TaskKind = TaskKind::Forecast;

    fn common(&self) -> Common<'_> {
        stacked(&self.files, &self.stack, 0.0)
    }
}

impl TaskSettings for SyntheticSettings {
    const KIND: TaskKind = TaskKind::Synthetic;

    fn common(&self) -> Common<'_> {
        let drawn = Some(self.synthetic.as_str());
        Common { drawn, blocks: self.layers, label_smoothing: self.label_smoothing, ..Common::default() }
    }
}

pub const COMPRESSION: &str = "compression";

/// Whether a model is to compress what is drawn.
pub fn compresses(drawn: &str) -> bool {
    drawn.split(':').next().is_some_and(|name| name.trim() == COMPRESSION)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskKind {
    Pairs,
    Text,
    Labelled,
    Series,
    Forecast,
    Synthetic,
}

impl TaskKind {
    pub const ALL: [Self; 6] = [Self::Pairs, Self::Text, Self::Labelled, Self::Series, Self::Forecast, Self::Synthetic];

    pub fn flag(self) -> &'static str {
        match self {
            Self::Pairs => "--pairs",
            Self::Text => "--text",
            Self::Labelled => "--labelled",
            Self::Series => "--series",
            Self::Forecast => "--series with --forecast",
            Self::Synthetic => "--synthetic",
        }
    }

    pub fn data_flag(self) -> &'static str {
        self.flag().split(' ').next().unwrap_or_default()
    }

    pub fn data_key(self) -> &'static str {
        self.data_flag().trim_start_matches('-')
    }

    /// The task whose data these settings name.
    pub fn of(values: &Map<String, Value>) -> Result<Self> {
        let is_given = |key: &str| !values[key].is_null() && values[key] != json!([]);
        let kinds = [Self::Text, Self::Labelled, Self::Series, Self::Synthetic, Self::Pairs];
        let given: Vec<Self> = kinds.into_iter().filter(|kind| is_given(kind.data_key())).collect();
        if let [first, second, ..] = given[..] {
            let [first, second] = [first, second].map(Self::data_key);
            bail!("{first} is given along with {second}; a run learns from the one or the other");
        }
        match given.first().copied().unwrap_or(Self::Pairs) {
            Self::Series if is_given("forecast") => Ok(Self::Forecast),
            kind if kind != Self::Series && is_given("forecast") => {
                bail!("forecast is given without series; name the file of series with --series")
            }
            kind => Ok(kind),
        }
    }

    /// The defaults of a task on the data that `values` name.
    pub fn defaults(self, values: &Map<String, Value>) -> Map<String, Value> {
        let own = match self {
            // As few errors as with those of other pairs, in half the time (docs/tried.md).
            Self::Pairs if values["pairs"].is_null() => json!({
                "feature_map": "exp", "d_model": 96, "heads": 2, "d_ff": 128, "activation": "silu", "gated": true, "batch_size": 128,
                "optimizer": "muon", "learning_rate": 6e-3, "steps": 3500,
            }),
            Self::Pairs => json!({ "optimizer": "muon" }),
            // The fewest bits after as many minutes (docs/tried.md).
            Self::Text => json!({
                "attention": "short-convolution,kernelized", "feature_map": "taylor2", "heads": 8, "activation": "silu", "gated": true,
                "batch_size": 8, "optimizer": "muon", "learning_rate": 0.012, "weight_decay": 0.3, "label_smoothing": 0.0,
                "checkpoint_steps": 200, "evaluate": 32,
            }),
            Self::Labelled | Self::Series | Self::Forecast => json!({
                "base": true, "max_tokens": 8192, "layers": 2, "batch_size": 32, "learning_rate": 2e-3, "label_smoothing": 0.0,
                "checkpoint_steps": 200,
            }),
            Self::Synthetic => json!({
                "layers": 2, "d_ff": 512, "learning_rate": 2e-3, "weight_decay": 0.1, "label_smoothing": 0.0,
            }),
        };
        let more = match self {
            Self::Series => json!({ "attention": "fourier", "learning_rate": 4e-3 }),
            Self::Forecast => json!({ "attention": "fourier", "heads": 8, "evaluate": 2000 }),
            _ => json!({}),
        };
        let mut all = keys::defaults();
        all.extend([own, more].into_iter().filter_map(|own| own.as_object().cloned()).flatten());
        all
    }

    pub fn keys(self) -> Result<Vec<String>> {
        let mut all = keys::defaults();
        // What has no default.
        all.extend([("forecast".into(), json!(1)), ("synthetic".into(), json!(""))]);
        Ok(RunConfig::of(self, &all)?.to_map()?.into_iter().map(|(key, _)| key).collect())
    }
}

impl<S: TaskSettings> Config<S> {
    pub fn of(values: &Map<String, Value>) -> serde_json::Result<Self> {
        let all = Value::Object(values.clone());
        let data = &all[S::KIND.data_key()];
        Ok(Self {
            data: match S::KIND {
                TaskKind::Synthetic => Vec::new(),
                TaskKind::Text => Vec::deserialize(data)?,
                _ => Option::<PathBuf>::deserialize(data)?.into_iter().collect(),
            },
            task: S::deserialize(&all)?,
            model: ModelSettings::deserialize(&all)?,
            training: TrainingSettings::deserialize(&all)?,
        })
    }

    pub fn to_map(&self) -> serde_json::Result<Map<String, Value>> {
        let parts = [
            serde_json::to_value(&self.task)?,
            serde_json::to_value(&self.model)?,
            serde_json::to_value(&self.training)?,
        ];
        let tables =
            parts.into_iter().filter_map(|part| if let Value::Object(part) = part { Some(part) } else { None });
        let mut all: Map<String, Value> = tables.flatten().collect();
        let data = match S::KIND {
            TaskKind::Synthetic => return Ok(all),
            TaskKind::Text => serde_json::to_value(&self.data)?,
            _ => serde_json::to_value(self.data.first())?,
        };
        all.insert(S::KIND.data_key().into(), data);
        Ok(all)
    }

    /// Whether all values make sense, alone and together. The model checks the rest when it is made.
    pub fn check(&self) -> Result<()> {
        let all = self.to_map()?;
        for key in &keys::KEYS {
            all.get(key.name).map_or(Ok(()), |value| key.check(value))?;
        }
        let ModelSettings { d_model, heads, .. } = self.model;
        if !d_model.is_multiple_of(heads) {
            bail!("d_model = {d_model} is not a multiple of heads = {heads}; change one with --set");
        }
        self.task.check()
    }

    pub fn kind(&self) -> TaskKind {
        S::KIND
    }

    pub fn common(&self) -> Common<'_> {
        self.task.common()
    }

    pub fn edited(&self, edit: impl FnOnce(&mut Map<String, Value>) -> Result<()>) -> Result<Self> {
        let mut all = self.to_map()?;
        edit(&mut all)?;
        Ok(Self::of(&all)?)
    }

    /// The file that the run learns from, the first of several.
    pub fn first(&self) -> Option<&Path> {
        self.data.first().map(PathBuf::as_path)
    }

    pub fn held_out(&self) -> Option<&Path> {
        self.common().files?.held_out.as_deref()
    }

    pub fn data_name(&self) -> String {
        match self.data.as_slice() {
            [] => self.common().drawn.unwrap_or("the CMU pronouncing dictionary").into(),
            [path] => name(path),
            [first, others @ ..] => format!("{} and {} more", first.display(), others.len()),
        }
    }

    /// What the files of the examples for development and of those for scores are called: the first one where they have none of their own.
    pub fn scored_names(&self) -> [String; 2] {
        let own = self.common().files.map_or([&None; 2], |files| [&files.development, &files.held_out]);
        own.map(|own| own.as_deref().map_or_else(|| self.data_name(), name))
    }

    /// The files for development and scores.
    pub fn own_files(&self) -> impl Iterator<Item = &Path> {
        let own = self.common().files.map(|files| [&files.development, &files.held_out]);
        own.into_iter().flatten().flatten().map(PathBuf::as_path)
    }

    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.data.iter().map(PathBuf::as_path).chain(self.own_files())
    }

    /// Which of a run's files is not what it was, by their [`hashes`](crate::tasks::feed::hashes).
    pub fn changed(&self, then: &str, now: &str) -> Option<String> {
        let own = self.own_files().map(|path| path.display().to_string());
        let hashes = then.split(' ').zip(now.split(' ')).zip(std::iter::once(self.data_name()).chain(own));
        // Of a pipe nothing is known. Of forecasts the first hash is of all files.
        hashes.filter(|((then, now), _)| then != now && ![*then, *now].contains(&"-")).map(|(_, name)| name).last()
    }

    /// With absolute paths: the run may be resumed from another folder.
    pub fn absolute(&self) -> Result<Self> {
        let absolute = |path: &mut Value| {
            let Some(name) = path.as_str().filter(|name| *name != "-") else { return Ok(()) };
            let found = std::path::absolute(name)?;
            let Some(text) = found.to_str() else {
                bail!(
                    "{}: the name of a folder in it is not UTF-8; rename it, or work in another folder",
                    found.display()
                );
            };
            *path = json!(text);
            Ok(())
        };
        self.edited(|all| {
            let is_file = |name: &str| keys::find(name).is_some_and(|key| matches!(key.flag, Flag::File | Flag::Paths));
            all.iter_mut().filter(|(name, _)| is_file(name)).try_for_each(|(_, value)| match value {
                Value::Array(paths) => paths.iter_mut().try_for_each(absolute),
                path => absolute(path),
            })
        })
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum RunConfig {
    Pairs(Config<PairsSettings>),
    Text(Config<TextSettings>),
    Labelled(Config<LabelledSettings>),
    Series(Config<SeriesSettings>),
    Forecast(Config<ForecastSettings>),
    Synthetic(Config<SyntheticSettings>),
}

macro_rules! of_any {
    ($run:expr, $config:ident => $body:expr) => {
        match $run {
            RunConfig::Pairs($config) => $body,
            RunConfig::Text($config) => $body,
            RunConfig::Labelled($config) => $body,
            RunConfig::Series($config) => $body,
            RunConfig::Forecast($config) => $body,
            RunConfig::Synthetic($config) => $body,
        }
    };
}

impl RunConfig {
    pub fn of(kind: TaskKind, values: &Map<String, Value>) -> serde_json::Result<Self> {
        Ok(match kind {
            TaskKind::Pairs => Self::Pairs(Config::of(values)?),
            TaskKind::Text => Self::Text(Config::of(values)?),
            TaskKind::Labelled => Self::Labelled(Config::of(values)?),
            TaskKind::Series => Self::Series(Config::of(values)?),
            TaskKind::Forecast => Self::Forecast(Config::of(values)?),
            TaskKind::Synthetic => Self::Synthetic(Config::of(values)?),
        })
    }

    pub fn to_map(&self) -> serde_json::Result<Map<String, Value>> {
        of_any!(self, config => config.to_map())
    }

    pub fn kind(&self) -> TaskKind {
        of_any!(self, config => config.kind())
    }

    pub fn check(&self) -> Result<()> {
        of_any!(self, config => config.check())
    }

    pub fn training(&self) -> &TrainingSettings {
        of_any!(self, config => &config.training)
    }

    /// Reads `config.json` of a run folder. A run of an earlier version lacks keys, and may have those of other tasks.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let name = path.display();
        let damaged = |error: &serde_json::Error| {
            anyhow!("{name}: {}; the file is damaged: restore it or train again", plain(error))
        };
        let mut stored: Map<String, Value> = serde_json::from_slice(bytes).map_err(|error| damaged(&error))?;
        // What Hugging Face's transformers calls the model.
        stored.retain(|key, _| !["model_type", "architectures"].contains(&key.as_str()));
        if let Some(key) = stored.keys().find(|key| keys::find(key).is_none()) {
            bail!("{name}: unknown field `{key}`; the file is damaged: restore it or train again");
        }
        stored.entry("split_version").or_insert(json!(1));
        let mut values = keys::defaults();
        values.extend(stored);
        let kind = TaskKind::of(&values).map_err(|error| anyhow!("{name}: {error}"))?;
        let config = Self::of(kind, &values).map_err(|error| damaged(&error))?;
        config.check().map_err(|error| anyhow!("{name}: {error:#}"))?;
        if config.training().steps.is_none() && config.training().minutes.is_none() {
            bail!("{name}: neither steps nor minutes are given; the file is damaged: restore it or train again");
        }
        Ok(config)
    }
}

/// The settings of a task with these values, and defaults for the others.
#[cfg(test)]
pub fn with<S: TaskSettings>(values: Value) -> Config<S> {
    let mut all = keys::defaults();
    all.extend(values.as_object().cloned().unwrap_or_default());
    let mut all = S::KIND.defaults(&all);
    all.extend(values.as_object().cloned().unwrap_or_default());
    Config::of(&all).unwrap()
}
