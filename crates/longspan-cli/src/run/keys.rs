//! What settings mean: their defaults, what they may be, and their flags.

use anyhow::{Result, bail};
use serde_json::{Map, Value};

/// A setting: a key of `--config`, `--set` and `config.json`, and where it has one a flag.
pub struct Key {
    pub name: &'static str,
    /// As JSON. A task may have its own.
    pub default: &'static str,
    pub range: Range,
    pub flag: Flag,
    pub help: &'static str,
}

#[derive(Clone, Copy)]
pub enum Range {
    Any,
    Size,
    /// 0 or more, whole.
    Count,
    Threads,
    /// From 0 to below 1.
    Share,
    Above,
    /// 0 or more.
    From,
    Version,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Flag {
    No,
    Switch,
    /// A whole number, a number, a word, a file, or several: by the name that the value has in help.
    Whole(&'static str),
    Number(&'static str),
    Word(&'static str),
    File,
    Paths,
}

/// The largest size: a product of two fits a 64-bit integer. What the memory has room for is checked with the model.
const LARGEST: u64 = i32::MAX as u64;

const MOST_WORKERS: u64 = 1024;

impl Key {
    pub fn check(&self, value: &Value) -> Result<()> {
        let key = self.name;
        let Some(number) = value.as_f64() else { return Ok(()) };
        let whole = value.as_u64().unwrap_or(0);
        let (is_good, expected) = match self.range {
            Range::Any => return Ok(()),
            Range::Size if whole == 0 => (false, "at least 1".into()),
            Range::Size | Range::Count => (whole <= LARGEST, format!("at most {LARGEST}")),
            Range::Threads => ((1..=MOST_WORKERS).contains(&whole), format!("1 to {MOST_WORKERS}, at best one a core")),
            Range::Share => ((0.0..1.0).contains(&number), "a number from 0 to below 1".into()),
            Range::Above => (number > 0.0, "a number above 0".into()),
            Range::From => (number >= 0.0, "0 or more".into()),
            Range::Version => ((1..=3).contains(&whole), "1, 2 or 3".into()),
        };
        if !is_good {
            bail!("{key} = {value}: expected {expected}; change it with --set {key}=…");
        }
        Ok(())
    }

    /// The flag's name, without its dashes,
    pub fn long(&self) -> String {
        self.name.replace('_', "-")
    }

    /// and with them.
    pub fn option(&self) -> String {
        format!("--{}", self.long())
    }
}

pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

pub fn defaults() -> Map<String, Value> {
    let value = |key: &Key| serde_json::from_str(key.default).unwrap_or(Value::String(key.default.into()));
    KEYS.iter().map(|key| (key.name.into(), value(key))).collect()
}

const fn key(name: &'static str, default: &'static str, range: Range, flag: Flag, help: &'static str) -> Key {
    Key { name, default, range, flag, help }
}

use Flag::{File, No, Number, Paths, Switch, Whole, Word};
use Range::{Above, Any, Count, From, Share, Size, Threads, Version};

/// All settings, in the order of `config.json`.
#[rustfmt::skip]
pub const KEYS: [Key; 57] = [
    key("pairs", "null", Any, File,
        "Pairs to learn from: a .tsv (source, tab, target), a .csv or a .jsonl with \"source\" and \"target\", also in gzip, or - for \
         standard input; without it, the CMU pronouncing dictionary"),
    key("text", "[]", Any, Paths, "Plain text for a language model: files, folders, or - for standard input; also in gzip"),
    key("labelled", "null", Any, File,
        "Labelled texts to learn from: a .tsv (text, tab, label), a .csv or a .jsonl with \"text\" and \"label\", also in gzip, or -"),
    key("series", "null", Any, File,
        "Numeric series to learn from, at any times: a .jsonl (\"times\", \"values\", \"label\"), a .csv (id, time, channels, label), a .ts \
         or .tsv of the UEA and UCR archives, also in gzip, or -"),
    key("synthetic", "null", Any, Word("NAME"),
        "Sequences to draw and learn from: mqar, recall, fuzzy, copying, memorization, compression or listops, with sizes such as \
         mqar:pairs=16,length=256,vocabulary=8192"),
    key("columns", "{}", Any, No,
        "which columns of a table are what, as the flags: {time = \"Month\", id = \"shop\", channels = [\"sales\"]}"),
    key("target", "null", Any, No, "label or number: what labels are; numbers where all are, not all of them whole, and more than 20 differ"),
    key("forecast", "null", Size, Whole("N"), "Forecast the next N points of a series, with quantiles, instead of predicting its label"),
    key("context", "null", Size, No, "points before them that are seen; four times as many, at least 64, as far as series are so long"),
    key("clock", "null", Any, No, "whether the model sees the time since the start that series share; yes where they share one near 0"),
    key("missing", "mask", Any, No, "mask or refuse: what becomes of missing values of a series"),
    key("base", "false", Any, No, "whether the model corrects a simple method: of words, of random convolutions, or of season and trend"),
    key("tokens", "null", Any, Word("TOKENS"),
        "What a text is cut into: characters, bytes or a tokenizer.json; with --text also bpe, which is learned from the text, with \
         --labelled also words"),
    key("vocabulary", "null", Size, Whole("N"), "Entries of a byte-pair encoding that is learned from the text; as many as a text of its length carries"),
    key("segment", "256", Size, No, "tokens of a text computed at a time"),
    key("carry", "16", Size, No, "segments after which states are reset in training"),
    key("backpropagate", "1", Size, Whole("N"), "Segments of a text that a step learns from (truncated backpropagation through time)"),
    key("split_sequence", "false", Any, Switch,
        "Over several processes, give each a stretch of every sequence of a text rather than some of the sequences"),
    key("layers", "4", Size, No, "blocks of a model of texts, labelled texts or series"),
    key("pooling", "mean", Any, No, "mean, last or attention: how the outputs for a labelled text or a series are pooled"),
    key("causal", "false", Any, No, "whether a token of a labelled text, or a point of a series, sees only those before it"),
    key("development", "null", Any, File, "Pairs, labelled texts or series for the development loss, instead of some of the data"),
    key("held_out", "null", Any, File, "The same for the scores at the end"),
    key("split_version", "3", Version, No,
        "how sources are spread: 3; 2 holds out a twentieth of few sources, too; 1 follows the parity of their bytes, in runs older than this key"),
    key("source_tokens", "null", Any, Word("TOKENS"), "Of the sources of pairs: characters, words, bytes, or a tokenizer.json"),
    key("target_tokens", "null", Any, Word("TOKENS"), "Of the targets; words (phonemes) for the dictionary, else characters"),
    key("max_tokens", "512", Size, No, "longer training examples are left out"),
    key("answer_tokens", "null", Size, No, "longest answer; a quarter more than the longest training target"),
    key("attention", "shaw", Any, Word("NAME"), "The mechanism; `longspan info --mechanisms` lists them"),
    key("attention_options", "{}", Any, No, "its options, such as {relative = {shared = true}}"),
    key("feature_map", "elu+1", Any, No,
        "elu+1, relu, softplus, exp, prf, nprf, dpfp, taylor2 or hedgehog, where the mechanism has one; some with options, such as \
         prf:128:seed=7"),
    key("radius", "8", Count, No, "how far Shaw's relative positions reach"),
    key("d_model", "128", Size, No, "width of the model"),
    key("heads", "4", Size, No, "attention heads; they divide d_model"),
    key("encoder_layers", "2", Size, No, "blocks of the encoder"),
    key("decoder_layers", "2", Size, No, "blocks of the decoder"),
    key("d_ff", "256", Size, No, "width inside the feed-forward layers"),
    key("dropout", "0.0", Share, No, "share of activations dropped in training; by default more with more passes over texts and pairs, up to 0.2"),
    key("norm", "pre", Any, No, "pre or post: where norms stand"),
    key("norm_kind", "layer", Any, No, "layer or rms"),
    key("activation", "relu", Any, No, "relu, gelu, gelu-tanh or silu, in feed-forward parts"),
    key("gated", "false", Any, No, "whether a second product multiplies the activations; with silu this is SwiGLU"),
    key("gated_attention", "false", Any, No,
        "whether heads' outputs go through an RMS norm and a gate, as in RetNet, before they are projected"),
    key("recompute", "false", Any, No, "whether activations are recomputed in the backward pass: less memory, a third more time"),
    key("seed", "1", Any, Whole("N"), "Of initial weights, the order of examples, and dropout"),
    key("steps", "null", Size, Whole("N"),
        "Optimizer steps; of pairs 6000, or 45 passes (at least 750 steps) if that is less; 3500 on the dictionary"),
    key("minutes", "null", Above, Number("M"), "Train about this long: the first steps are timed, then the number of steps is fixed"),
    key("optimizer", "adamw", Any, No,
        "adamw; or muon: Muon for the matrices of blocks, AdamW for the rest, the default for pairs and texts"),
    key("batch_size", "64", Size, Whole("N"), "Examples in a batch"),
    key("learning_rate", "0.004", Above, Number("RATE"), "The largest rate of the schedule"),
    key("warmup_steps", "100", Any, No, "steps in which the rate rises"),
    key("weight_decay", "0.01", From, No, "decay of weights, but not of biases and gains of norms"),
    key("label_smoothing", "0.05", Share, No, "probability mass spread over all tokens"),
    key("clip_norm", "1.0", Above, No, "gradients with a larger norm are scaled down"),
    key("workers", "null", Threads, No, "threads that share each batch; one a core, at most 8"),
    key("checkpoint_steps", "500", Size, No, "steps between checkpoints"),
    key("evaluate", "0", Any, No, "held-out sources scored at the end; 0 for all"),
];
