//! Models: stacks of blocks around attention.

mod block;
mod classifier;
#[cfg(feature = "flex")]
mod decoder;
mod language_model;
mod positions;
mod seq2seq;
#[cfg(feature = "flex")]
mod stored;

pub use block::{DecoderBlock, DecoderBlockConfig, EncoderBlock, EncoderBlockConfig, Norm};
pub use classifier::{Classifier, ClassifierConfig, Pooling};
#[cfg(feature = "flex")]
pub use decoder::LanguageDecoder;
pub use language_model::{LanguageModel, LanguageModelConfig, LanguageState};
pub use positions::Positions;
pub use seq2seq::{DecoderState, Memory, Seq2Seq, Seq2SeqConfig};
