//! All settings of a run, and what they may be.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::columns::Columns;
use super::words::plain;

/// The settings of a training run: the keys of `--config`, `--set` and `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Pairs to learn from; without them, the CMU dictionary.
    pub pairs: Option<PathBuf>,
    /// Files and folders of text to learn to go on with, instead of pairs.
    #[serde(default)]
    pub text: Vec<PathBuf>,
    /// Texts and their labels to learn from, instead of pairs.
    #[serde(default)]
    pub labelled: Option<PathBuf>,
    /// Numeric series and their labels to learn from, instead of pairs.
    #[serde(default)]
    pub series: Option<PathBuf>,
    /// Sequences to draw and learn from, instead of pairs: a task and its sizes.
    #[serde(default)]
    pub synthetic: Option<String>,
    /// Which columns of a table are what; by default as the header says.
    #[serde(default)]
    pub columns: Columns,
    /// What a label is: `label` or `number`; by default numbers where all labels are, not all of them whole, and more than 20 differ.
    #[serde(default)]
    pub target: Option<String>,
    /// How many next points of a series are told, instead of its label.
    #[serde(default)]
    pub forecast: Option<usize>,
    /// Points before them that are seen; by default four times as many, at least 64, as far as series are so long.
    #[serde(default)]
    pub context: Option<usize>,
    /// Whether the model is told times since the start that series share; by default where they share one near 0.
    #[serde(default)]
    pub clock: Option<bool>,
    /// What becomes of missing values of a series: `mask` or `refuse`.
    #[serde(default = "missing")]
    pub missing: String,
    /// Whether a model of labels or forecasts learns what a simple method leaves over, instead of all.
    #[serde(default)]
    pub base: bool,
    /// What a text is cut into: `characters`, `bytes`, `bpe`, or the path of a `tokenizer.json`.
    #[serde(default)]
    pub tokens: Option<String>,
    /// Entries of a byte-pair encoding that is learned from the text.
    #[serde(default)]
    pub vocabulary: Option<usize>,
    /// Tokens of a text that are computed at a time.
    #[serde(default = "segment")]
    pub segment: usize,
    /// Segments after which states begin anew in training.
    #[serde(default = "carry")]
    pub carry: usize,
    /// Segments of a text that a step learns from at once. Gradients reach back so far.
    #[serde(default = "one")]
    pub backpropagate: usize,
    /// Whether several processes take a stretch of every sequence of a text each, rather than some of the sequences.
    #[serde(default)]
    pub split_sequence: bool,
    /// Blocks of a model of texts, labelled texts or series.
    #[serde(default = "layers")]
    pub layers: usize,
    /// How the rows of a text or series become one: `mean`, `last` or `attention`.
    #[serde(default = "pooling")]
    pub pooling: String,
    /// Whether a token of a labelled text, or a point of a series, sees only those before it.
    #[serde(default)]
    pub causal: bool,
    /// Pairs for the development loss, instead of a twentieth of `pairs`.
    #[serde(default)]
    pub development: Option<PathBuf>,
    /// Pairs for the scores at the end, instead of a twentieth of `pairs`.
    #[serde(default)]
    pub held_out: Option<PathBuf>,
    /// How sources are held out: 2; 1, which follows the parity of their bytes, in runs of earlier versions.
    #[serde(default = "split_version")]
    pub split_version: u32,
    /// `characters`, `words`, `bytes`, or the path of a `tokenizer.json`.
    pub source_tokens: Option<String>,
    /// As `source_tokens`.
    pub target_tokens: Option<String>,
    /// Training pairs with more tokens than this on a side are left out.
    pub max_tokens: usize,
    /// Answers end after so many tokens; by default a quarter more than the longest training target has.
    pub answer_tokens: Option<usize>,

    /// The mechanism of self-attention, by its name.
    pub attention: String,
    /// Its options; see `longspan explain --attention NAME`.
    #[serde(default)]
    pub attention_options: Map<String, Value>,
    /// The feature map `φ`, for mechanisms that have one.
    pub feature_map: String,
    /// How far Shaw's relative positions reach.
    pub radius: usize,
    /// Width of the model.
    pub d_model: usize,
    /// Attention heads, each `d_model / heads` wide.
    pub heads: usize,
    /// Blocks of the encoder.
    pub encoder_layers: usize,
    /// Blocks of the decoder.
    pub decoder_layers: usize,
    /// Width inside the feed-forward layers.
    pub d_ff: usize,
    /// Share of activations dropped while training.
    pub dropout: f64,
    /// Normalise before (`pre`) or after (`post`) each sublayer.
    pub norm: String,
    /// Which norm: `layer` or `rms`.
    #[serde(default = "norm_kind")]
    pub norm_kind: String,
    /// Between the two layers of feed-forward parts: `relu`, `gelu`, `gelu-tanh` or `silu`.
    #[serde(default = "activation")]
    pub activation: String,
    /// Whether a second product multiplies the activations.
    #[serde(default)]
    pub gated: bool,
    /// Whether heads' outputs go through a gated RMS norm.
    #[serde(default)]
    pub gated_attention: bool,
    /// Whether a backward forms again what it can, for less memory.
    #[serde(default)]
    pub recompute: bool,

    /// Seed of initial weights, the order of examples, and dropout.
    pub seed: u64,
    /// Optimiser steps; by default 8000, or 60 passes over the pairs (at least 1000 steps) where that is less; 4000 on the dictionary.
    pub steps: Option<usize>,
    /// Train about this long instead: the first steps are timed, then `steps` is fixed.
    pub minutes: Option<f64>,
    /// Pairs in a batch.
    pub batch_size: usize,
    /// The largest rate of the schedule.
    pub learning_rate: f64,
    /// Steps in which the rate rises from 0; after them it falls along a cosine.
    pub warmup_steps: usize,
    /// AdamW's decay of weights.
    pub weight_decay: f64,
    /// Probability mass that the training targets spread over all tokens.
    pub label_smoothing: f64,
    /// Gradients with a larger norm are scaled down to it.
    pub clip_norm: f64,
    /// Threads that share each batch; by default one a core, at most 8. Part of what makes a run repeatable to the bit.
    pub workers: Option<usize>,
    /// A checkpoint is written every so many steps, and at the end.
    pub checkpoint_steps: usize,
    /// Held-out sources that are scored at the end; 0 for all.
    pub evaluate: usize,

    /// What Hugging Face's transformers calls the model; written with a run and not looked at.
    #[serde(default, skip_serializing)]
    pub model_type: IgnoredAny,
    /// As `model_type`.
    #[serde(default, skip_serializing)]
    pub architectures: IgnoredAny,
}

/// Defaults that runs of earlier versions lack.
fn segment() -> usize {
    256
}
fn carry() -> usize {
    16
}
fn layers() -> usize {
    4
}
fn pooling() -> String {
    "mean".into()
}
fn missing() -> String {
    "mask".into()
}
fn one() -> usize {
    1
}
fn split_version() -> u32 {
    1
}
fn norm_kind() -> String {
    "layer".into()
}
fn activation() -> String {
    "relu".into()
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            pairs: None,
            text: Vec::new(),
            labelled: None,
            series: None,
            synthetic: None,
            columns: Columns::default(),
            target: None,
            forecast: None,
            context: None,
            clock: None,
            missing: missing(),
            base: false,
            tokens: None,
            vocabulary: None,
            segment: segment(),
            carry: carry(),
            backpropagate: one(),
            split_sequence: false,
            layers: layers(),
            pooling: pooling(),
            causal: false,
            development: None,
            held_out: None,
            split_version: 2,
            source_tokens: None,
            target_tokens: None,
            max_tokens: 512,
            answer_tokens: None,
            attention: "shaw".into(),
            attention_options: Map::new(),
            feature_map: "elu+1".into(),
            radius: 8,
            d_model: 128,
            heads: 4,
            encoder_layers: 2,
            decoder_layers: 2,
            d_ff: 256,
            dropout: 0.0,
            norm: "pre".into(),
            norm_kind: norm_kind(),
            activation: activation(),
            gated: false,
            gated_attention: false,
            recompute: false,
            seed: 1,
            steps: None,
            minutes: None,
            batch_size: 64,
            learning_rate: 4e-3,
            warmup_steps: 100,
            weight_decay: 0.01,
            label_smoothing: 0.05,
            clip_norm: 1.0,
            workers: None,
            checkpoint_steps: 500,
            evaluate: 0,
            model_type: IgnoredAny,
            architectures: IgnoredAny,
        }
    }
}

/// What a run learns, by its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    Pairs,
    Text,
    Labelled,
    Series,
    Forecast,
    Synthetic,
}

impl TaskKind {
    /// The flags that name its data.
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
}

/// The synthetic task that has a model of its own.
pub const COMPRESSION: &str = "compression";

/// The largest size: a product of two fits a 64-bit integer. What the memory has room for is checked with the model.
const LARGEST: usize = i32::MAX as usize;

/// The most threads that share a batch.
const MOST_WORKERS: usize = 1024;

impl RunConfig {
    /// Whether all values make sense, alone and together. The model checks the rest when it is made.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("max_tokens", self.max_tokens),
            ("answer_tokens", self.answer_tokens.unwrap_or(1)),
            ("d_model", self.d_model),
            ("heads", self.heads),
            ("encoder_layers", self.encoder_layers),
            ("decoder_layers", self.decoder_layers),
            ("d_ff", self.d_ff),
            ("segment", self.segment),
            ("carry", self.carry),
            ("backpropagate", self.backpropagate),
            ("layers", self.layers),
            ("vocabulary", self.vocabulary.unwrap_or(1)),
            ("forecast", self.forecast.unwrap_or(1)),
            ("context", self.context.unwrap_or(1)),
            ("batch_size", self.batch_size),
            ("checkpoint_steps", self.checkpoint_steps),
            ("steps", self.steps.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, value)| *value == 0) {
            bail!("{key} = 0: expected at least 1; change it with --set {key}=…");
        }
        if let Some((key, value)) = sizes.iter().chain(&[("radius", self.radius)]).find(|(_, value)| *value > LARGEST) {
            bail!("{key} = {value}: expected at most {LARGEST}; change it with --set {key}=…");
        }
        if let Some(workers) = self.workers
            && !(1..=MOST_WORKERS).contains(&workers)
        {
            bail!(
                "workers = {workers}: expected 1 to {MOST_WORKERS}, at best one a core; change it with --set workers=…"
            );
        }
        if !(1..=2).contains(&self.split_version) {
            bail!("split_version = {}: expected 1 or 2; change it with --set split_version=…", self.split_version);
        }
        let data = [
            ("text", !self.text.is_empty()),
            ("labelled", self.labelled.is_some()),
            ("series", self.series.is_some()),
            ("synthetic", self.synthetic.is_some()),
            ("pairs", self.pairs.is_some()),
        ];
        let given: Vec<&str> = data.iter().filter(|(_, given)| *given).map(|(key, _)| *key).collect();
        if let [first, second, ..] = given[..] {
            bail!("{first} is given along with {second}; a run learns from the one or the other");
        }
        let files = self.development.is_some() || self.held_out.is_some();
        if !self.text.is_empty() && files {
            bail!("text is given along with development or held_out; of a text the end is held out");
        }
        if self.synthetic.is_some() && files {
            bail!("synthetic is given along with development or held_out; sequences for both are drawn");
        }
        if self.forecast.is_some() && self.series.is_none() {
            bail!("forecast is given without series; name the file of series with --series");
        }
        if self.context.is_some() && self.forecast.is_none() {
            bail!("context is given without forecast; say how many next points to predict with --forecast");
        }
        if !self.columns.known.is_empty() && self.forecast.is_none() {
            bail!("--known is given without --forecast; labels are predicted from all that a series has");
        }
        if self.target.is_some() && self.forecast.is_some() {
            bail!("target is given along with forecast; a run predicts labels or next values");
        }
        if self.split_sequence && self.text.is_empty() {
            bail!("split_sequence is given without text; only the sequences of a text are split");
        }
        if self.backpropagate > self.carry {
            bail!(
                "backpropagate = {} is more than carry = {}, the segments after which states are reset; change one with --set",
                self.backpropagate,
                self.carry
            );
        }
        if !self.d_model.is_multiple_of(self.heads) {
            bail!("d_model = {} is not a multiple of heads = {}; change one with --set", self.d_model, self.heads);
        }
        let fractions = [("dropout", self.dropout), ("label_smoothing", self.label_smoothing)];
        if let Some((key, value)) = fractions.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            bail!("{key} = {value}: expected a number from 0 to below 1; change it with --set {key}=…");
        }
        let above = [("learning_rate", self.learning_rate), ("clip_norm", self.clip_norm)];
        if let Some((key, value)) = above.iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            bail!("{key} = {value}: expected a number above 0; change it with --set {key}=…");
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            bail!("weight_decay = {}: expected 0 or more; change it with --set weight_decay=…", self.weight_decay);
        }
        if let Some(minutes) = self.minutes
            && !(minutes > 0.0 && minutes.is_finite())
        {
            bail!("minutes = {minutes}: expected a number above 0; change it with --minutes");
        }
        Ok(())
    }

    /// Whether sequences are drawn that a model is to compress.
    pub fn compresses(&self) -> bool {
        let name = self.synthetic.as_ref().and_then(|spec| spec.split(':').next());
        name.is_some_and(|name| name.trim() == COMPRESSION)
    }

    /// How many held-out examples are scored, at most.
    pub fn scored(&self) -> usize {
        if self.evaluate == 0 { usize::MAX } else { self.evaluate }
    }

    /// How many steps the run takes; `None` while a run in minutes is being timed.
    pub fn known_steps(&self) -> Option<usize> {
        if self.minutes.is_some() { None } else { self.steps }
    }

    /// The defaults of a run on the dictionary: as few errors as with those of other pairs, in half the time (docs/tried.md).
    pub fn of_dictionary() -> Self {
        Self {
            feature_map: "exp".into(),
            d_model: 96,
            heads: 2,
            d_ff: 128,
            activation: "silu".into(),
            gated: true,
            batch_size: 128,
            learning_rate: 6e-3,
            steps: Some(4000),
            ..Self::default()
        }
    }

    /// The defaults of a run that learns to go on with texts.
    pub fn of_text() -> Self {
        Self {
            d_ff: 512,
            batch_size: 8,
            learning_rate: 3e-3,
            label_smoothing: 0.0,
            checkpoint_steps: 200,
            evaluate: 32,
            ..Self::default()
        }
    }

    /// The defaults of a run that learns labels.
    pub fn of_labelled() -> Self {
        Self {
            base: true,
            max_tokens: 8192,
            layers: 2,
            batch_size: 32,
            learning_rate: 2e-3,
            label_smoothing: 0.0,
            checkpoint_steps: 200,
            ..Self::default()
        }
    }

    /// The defaults of a run on series.
    pub fn of_series() -> Self {
        Self { attention: "fourier".into(), learning_rate: 4e-3, ..Self::of_labelled() }
    }

    /// The defaults of a run that tells the next values of series.
    pub fn of_forecast() -> Self {
        Self { heads: 8, learning_rate: 2e-3, evaluate: 2000, ..Self::of_series() }
    }

    /// The defaults of a run on drawn sequences.
    pub fn of_synthetic() -> Self {
        Self { layers: 2, d_ff: 512, learning_rate: 2e-3, weight_decay: 0.1, label_smoothing: 0.0, ..Self::default() }
    }

    /// The file that the run learns from, the first of several; without one, the CMU dictionary.
    pub fn data(&self) -> Option<&Path> {
        let one = [&self.pairs, &self.labelled, &self.series].into_iter().find_map(Option::as_deref);
        one.or(self.text.first().map(PathBuf::as_path))
    }

    /// What the run learns.
    pub fn kind(&self) -> TaskKind {
        match self {
            Self { text, .. } if !text.is_empty() => TaskKind::Text,
            Self { synthetic: Some(_), .. } => TaskKind::Synthetic,
            Self { series: Some(_), forecast: Some(_), .. } => TaskKind::Forecast,
            Self { series: Some(_), .. } => TaskKind::Series,
            Self { labelled: Some(_), .. } => TaskKind::Labelled,
            _ => TaskKind::Pairs,
        }
    }

    /// The flag that names the file that the run learns from.
    pub fn data_flag(&self) -> &'static str {
        self.kind().flag().split(' ').next().unwrap_or_default()
    }

    /// What the run learns from, for people.
    pub fn data_name(&self) -> String {
        if let [first, _, ..] = self.text.as_slice() {
            return format!("{} and {} more", first.display(), self.text.len() - 1);
        }
        match self.data() {
            None if self.synthetic.is_some() => self.synthetic.clone().unwrap_or_default(),
            None => "the CMU pronouncing dictionary".into(),
            Some(path) if path.as_os_str() == "-" => "standard input".into(),
            Some(path) => path.display().to_string(),
        }
    }

    /// Reads `config.json` of a run folder.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let name = path.display();
        let config: Self = serde_json::from_slice(bytes)
            .map_err(|error| anyhow!("{name}: {}; the file is damaged: restore it or train again", plain(&error)))?;
        config.check().map_err(|error| anyhow!("{name}: {error:#}"))?;
        if config.steps.is_none() && config.minutes.is_none() {
            bail!("{name}: neither steps nor minutes are given; the file is damaged: restore it or train again");
        }
        Ok(config)
    }
}
