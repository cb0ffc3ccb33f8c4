//! What settings mean, in words, and which tasks use them.

use super::config::TaskKind::{self, Forecast, Labelled, Pairs, Series, Synthetic, Text};

const ALL: &[TaskKind] = &[Pairs, Text, Labelled, Series, Forecast, Synthetic];
const PAIRS: &[TaskKind] = &[Pairs];
const TEXT: &[TaskKind] = &[Text];
const SERIES: &[TaskKind] = &[Series];
const FORECAST: &[TaskKind] = &[Forecast];
const TOKENS: &[TaskKind] = &[Text, Labelled];
const LABELS: &[TaskKind] = &[Labelled, Series];
const CAUSAL: &[TaskKind] = &[Labelled, Series, Forecast];
const ANY_SERIES: &[TaskKind] = &[Series, Forecast];
const FILES: &[TaskKind] = &[Pairs, Labelled, Series, Forecast];
const TABLES: &[TaskKind] = FILES;
const STACK: &[TaskKind] = &[Text, Labelled, Series, Forecast, Synthetic];
const CLASSES: &[TaskKind] = &[Pairs, Text, Labelled, Series, Synthetic];

/// What each key means and the tasks that use it, in the order of [`RunConfig`](super::config::RunConfig); for
/// `longspan train --help`, which says the meaning, and to refuse what a task does not use.
pub const KEYS: [(&str, &[TaskKind], &str); 56] = [
    ("pairs", ALL, "a .tsv, .csv or .jsonl of pairs, also in gzip; the CMU dictionary without it"),
    ("text", ALL, "files and folders of text for a language model, instead of pairs, as a list: [\"novel.txt\"]"),
    ("labelled", ALL, "a .tsv, .csv or .jsonl of texts and labels, instead of pairs"),
    ("series", ALL, "a .jsonl, .csv, .ts or .tsv of numeric series and labels, instead of pairs"),
    (
        "synthetic",
        ALL,
        "mqar, recall, fuzzy, copying, memorization, compression or listops, with sizes: mqar:pairs=16,length=256,vocabulary=8192",
    ),
    (
        "columns",
        TABLES,
        "which columns of a table are what, as the flags: {time = \"Month\", id = \"shop\", channels = [\"sales\"]}",
    ),
    (
        "target",
        LABELS,
        "label or number: what labels are; numbers where all are, not all of them whole, and more than 20 differ",
    ),
    ("forecast", ALL, "how many next points of a series are predicted, instead of its label"),
    (
        "context",
        FORECAST,
        "points before them that are seen; four times as many, at least 64, as far as series are so long",
    ),
    (
        "clock",
        SERIES,
        "whether the model sees the time since the start that series share; yes where they share one near 0",
    ),
    ("missing", ANY_SERIES, "mask or refuse: what becomes of missing values of a series"),
    (
        "base",
        CAUSAL,
        "whether the model corrects a simple method: of words, of random convolutions, or of season and trend",
    ),
    (
        "tokens",
        TOKENS,
        "of a text: characters, bytes, bpe (learned from it), or a tokenizer.json; of labelled texts also words",
    ),
    ("vocabulary", TEXT, "entries of a byte-pair encoding that is learned from the text"),
    ("segment", TEXT, "tokens of a text computed at a time"),
    ("carry", TEXT, "segments after which states are reset in training"),
    ("backpropagate", TEXT, "segments of a text that a step learns from (truncated backpropagation through time)"),
    (
        "split_sequence",
        TEXT,
        "whether processes take a stretch of every sequence of a text, rather than some of the sequences",
    ),
    ("layers", STACK, "blocks of a model of texts, labelled texts or series"),
    ("pooling", LABELS, "mean, last or attention: how the outputs for a labelled text or a series are pooled"),
    ("causal", CAUSAL, "whether a token of a labelled text, or a point of a series, sees only those before it"),
    ("development", FILES, "pairs for the development loss; a twentieth without it"),
    ("held_out", FILES, "pairs for the scores at the end; a twentieth without it"),
    (
        "split_version",
        FILES,
        "how sources are spread: 2, or 1 (follows the parity of their bytes) in runs older than this key",
    ),
    ("source_tokens", PAIRS, "characters, words, bytes, or a tokenizer.json"),
    ("target_tokens", PAIRS, "the same; words (phonemes) for the dictionary, else characters"),
    ("max_tokens", FILES, "longer training pairs are left out"),
    ("answer_tokens", PAIRS, "longest answer; a quarter more than the longest training target"),
    ("attention", ALL, "the mechanism; `longspan info --mechanisms` lists them"),
    ("attention_options", ALL, "its options, such as {relative = {shared = true}}"),
    (
        "feature_map",
        ALL,
        "elu+1, relu, softplus, exp, prf, nprf, dpfp, taylor2 or hedgehog, where the mechanism has one; some with options, such as prf:128:seed=7",
    ),
    ("radius", ALL, "how far Shaw's relative positions reach"),
    ("d_model", ALL, "width of the model"),
    ("heads", ALL, "attention heads; they divide d_model"),
    ("encoder_layers", PAIRS, "blocks of the encoder"),
    ("decoder_layers", PAIRS, "blocks of the decoder"),
    ("d_ff", ALL, "width inside the feed-forward layers"),
    ("dropout", ALL, "share of activations dropped in training"),
    ("norm", ALL, "pre or post: where norms stand"),
    ("norm_kind", ALL, "layer or rms"),
    ("activation", ALL, "relu, gelu, gelu-tanh or silu, in feed-forward parts"),
    ("gated", ALL, "whether a second product multiplies the activations; with silu this is SwiGLU"),
    (
        "gated_attention",
        ALL,
        "whether heads' outputs go through an RMS norm and a gate, as in RetNet, before they are projected",
    ),
    ("recompute", ALL, "whether activations are recomputed in the backward pass: less memory, a third more time"),
    ("seed", ALL, "of initial weights, the order of pairs, and dropout"),
    ("steps", ALL, "optimiser steps; 8000, or 60 passes (at least 1000 steps) if that is less; 4000 on the dictionary"),
    ("minutes", ALL, "train about this long instead"),
    ("batch_size", ALL, "pairs in a batch"),
    ("learning_rate", ALL, "the largest rate of the schedule"),
    ("warmup_steps", ALL, "steps in which the rate rises"),
    ("weight_decay", ALL, "AdamW's decay of weights, but not of biases and gains of norms"),
    ("label_smoothing", CLASSES, "probability mass spread over all tokens"),
    ("clip_norm", ALL, "gradients with a larger norm are scaled down"),
    ("workers", ALL, "threads that share each batch; one a core, at most 8"),
    ("checkpoint_steps", ALL, "steps between checkpoints"),
    ("evaluate", ALL, "held-out sources scored at the end; 0 for all"),
];
