//! The loss of numbers.

use burn::tensor::{Tensor, TensorData};

use crate::backend::tensor::widen;
use crate::error::{Result, argument};

/// The squared error `Σ (y − t)²`, `[1]`, over all numbers `y` and what they should have been, `t`. Divided by their count it is the
/// mean squared error, the loss of regression. That of `f16` and `bf16` is in `f32`.
///
/// # Shapes
/// `y`: `[batch, outputs]`; `targets`: `batch·outputs`, row after row.
///
/// # Errors
/// Not as many targets as numbers.
pub fn squared_error(y: Tensor<2>, targets: &[f32]) -> Result<Tensor<1>> {
    let [batch, outputs] = y.dims();
    let (numbers, got) = (batch * outputs, targets.len());
    argument(got == numbers, "squared_error", "targets", || format!("{numbers}, one a number"), || got.to_string())?;
    let y = widen(y);
    let place = (y.device(), y.dtype());
    let targets = Tensor::from_data(TensorData::new(targets.to_vec(), [batch, outputs]), (&place.0, place.1));
    let difference = y - targets;
    Ok((difference.clone() * difference).sum())
}
