//! A run as a folder.
//!
//! ```text
//! RUN/config.json              all settings, as resolved
//! RUN/source_tokenizer.json    and target_tokenizer.json
//! RUN/metrics.jsonl            one JSON object a line
//! RUN/loss.svg                 the loss curve
//! RUN/model.safetensors        the weights of the last checkpoint
//! RUN/checkpoint-000500/       the last checkpoint, whole: weights, optimiser, manifest
//! ```
//!
//! Nothing is ever visible half-written. A file gets its contents under a temporary name, is synced, and renamed. A
//! checkpoint is a folder that is renamed to its name when it is complete; the one with the highest number counts, and
//! older ones are removed after that. So a process may be killed at any instant.

mod checkpoint;
mod folder;

pub use checkpoint::{Checkpoint, FileSum, Manifest};
pub use folder::{Lock, RunFolder, write_atomic};
