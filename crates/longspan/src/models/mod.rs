//! Models: stacks of blocks around attention.

mod block;
mod classifier;
mod language_model;
mod seq2seq;

pub use block::{DecoderBlock, DecoderBlockConfig, EncoderBlock, EncoderBlockConfig, FeedForward, Norm};
pub use classifier::{Classifier, ClassifierConfig, Pooling};
pub use language_model::{LanguageModel, LanguageModelConfig, LanguageState};
pub use seq2seq::{DecoderState, Memory, Positions, Seq2Seq, Seq2SeqConfig};
