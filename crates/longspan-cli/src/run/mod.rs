//! A run as a folder.
//!
//! ```text
//! RUN/config.json              all settings, as resolved
//! RUN/source_tokenizer.json    and target_tokenizer.json: what the task stores
//! RUN/model.safetensors        the weights
//! RUN/checkpoint.safetensors   weights, optimiser and progress: what --resume reads
//! RUN/metrics.jsonl            one JSON object a line
//! RUN/seal.json                SHA-256 of the files above
//! RUN/loss.svg, loss.png       the loss curve
//! ```
//!
//! Nothing is ever visible half-written, so a process may be killed at any instant. The folder appears under its name when
//! all of it is there. A file is written under a temporary name, synced, and renamed. All that must agree is in one file,
//! `checkpoint.safetensors`; `model.safetensors` holds the best weights so far. `metrics.jsonl` only grows; when a run is resumed,
//! lines beyond the checkpoint are dropped.
//!
//! Reading order: [`columns`], [`config`], [`keys`], [`words`], [`settings`], [`write`], [`seal`], [`folder`], [`draft`], [`checkpoint`], [`log`].

pub mod checkpoint;
pub mod columns;
pub mod config;
pub mod draft;
pub mod folder;
pub mod keys;
pub mod log;
pub mod seal;
pub mod settings;
pub mod words;
pub mod write;
