//! Models: stacks of blocks around attention.

mod block;
mod language_model;
mod seq2seq;

pub use block::{DecoderBlock, DecoderBlockConfig, EncoderBlock, EncoderBlockConfig, Norm};
pub use language_model::{LanguageModel, LanguageModelConfig, LanguageState};
pub use seq2seq::{DecoderState, Memory, Positions, Seq2Seq, Seq2SeqConfig};
