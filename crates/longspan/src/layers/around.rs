//! What stands around a part of a block.

use burn::tensor::Tensor;

use super::{After, TokenNorm};
use crate::error::Result;

/// `x + dropout(part(norm(x)))`, with or without each of them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Around<'a> {
    /// The norm before the part.
    pub norm: Option<&'a TokenNorm>,
    /// With which probability a number of the part's result is dropped, on a device that trains.
    pub dropout: f64,
    /// Whether `x` is added.
    pub residual: bool,
    /// Whether a backward forms again what it needs beside `x`: a third more time for the memory of most of a model.
    pub recompute: bool,
}

impl Around<'_> {
    /// In tensor operations: what the part takes, and what follows its last layer.
    pub fn split(&self, x: Tensor<3>) -> Result<(Tensor<3>, After)> {
        let after = After { dropout: self.dropout, residual: self.residual.then(|| x.clone()) };
        Ok((self.norm.map_or(Ok(x.clone()), |norm| norm.forward(x))?, after))
    }
}
