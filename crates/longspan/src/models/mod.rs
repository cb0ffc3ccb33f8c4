//! Models: stacks of blocks around attention.

mod block;
mod classifier;
mod decoder;
mod language_model;
mod pooling;
mod positions;
mod seq2seq;
mod series;
mod stack;
mod stored;

pub use block::{BlockConfig, DecoderBlock, EncoderBlock, Norm};
pub use classifier::{Classifier, ClassifierConfig};
pub use decoder::LanguageDecoder;
pub use language_model::{LanguageModel, LanguageModelConfig, LanguageState};
pub use pooling::Pooling;
pub use positions::Positions;
pub use seq2seq::{DecoderState, Memory, Seq2Seq, Seq2SeqConfig};
pub use series::{SeriesModel, SeriesModelConfig};
