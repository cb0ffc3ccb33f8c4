//! The words of a call: sizes and views of tensors, masks, what goes in and comes out, states, working memory. Knows no mechanism.

mod downscaled;
mod gates;
mod mask;
mod mechanism;
mod reference;
mod scratch;
mod shape;
mod sink;
mod state;

pub(crate) use downscaled::downscaled;
pub(crate) use gates::{check_log_decay, check_log_decays_of};
pub(crate) use mask::Sequence;
pub use mask::{Keys, Mask, Order};
pub(crate) use mechanism::*;
pub use mechanism::{
    AnyKernel, Call, CombineGradients, Cotangent, Gradients, Kernel, Mechanism, Output, Parameter, Parameters,
    Reference, Token,
};
pub(crate) use reference::{check_reference, distance, places};
pub use scratch::Scratch;
pub(crate) use scratch::{Arena, Lines, StepMemory};
pub(crate) use shape::SharedRows;
pub use shape::{Dims, View, ViewMut};
pub(crate) use sink::{GradientSink, Sink, StateSink, clear_absent};
pub(crate) use state::{PARTS, check_count, fingerprint, is_count, optional_id};
pub use state::{State, StateShape};
