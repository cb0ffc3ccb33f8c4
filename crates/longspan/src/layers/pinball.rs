//! The loss of quantiles.

use burn::tensor::activation::relu;
use burn::tensor::{Tensor, TensorData};

use crate::backend::tensor::widen;
use crate::error::{Result, argument};

/// The pinball loss `Σ max(q·(t − y), (q − 1)·(t − y))`, `[1]`, over all numbers `t` and what is predicted of each, `y`: its quantiles `q`
/// (Koenker and Bassett 1978). It is least where a share `q` of the numbers lies below `y`. A target that is NaN is missing and does
/// not count.
///
/// # Shapes
/// `y`: `[numbers, quantiles]`; `targets`: `numbers`; `quantiles`: what the columns of `y` stand for, each between 0 and 1.
///
/// # Errors
/// Not as many targets as rows, not as many quantiles as columns, and a quantile that is not between 0 and 1.
pub fn pinball(y: Tensor<2>, targets: &[f32], quantiles: &[f32]) -> Result<Tensor<1>> {
    let [numbers, columns] = y.dims();
    let got = targets.len();
    argument(got == numbers, "pinball", "targets", || format!("{numbers}, one a row"), || got.to_string())?;
    let holds = quantiles.len() == columns && quantiles.iter().all(|q| 0.0 < *q && *q < 1.0);
    let expected = || format!("{columns} between 0 and 1, one a column");
    argument(holds, "pinball", "quantiles", expected, || format!("{quantiles:?}"))?;
    let y = widen(y);
    if numbers * columns == 0 {
        // On the graph, so that a backward finds gradients of 0.
        return Ok(y.sum());
    }
    let place = (y.device(), y.dtype());
    let tensor = |numbers: Vec<f32>, dims: [usize; 2]| {
        Tensor::<2>::from_data(TensorData::new(numbers, dims), (&place.0, place.1))
    };
    // Filled, not multiplied by 0: a prediction that is NaN would stay NaN.
    let targets = tensor(targets.to_vec(), [numbers, 1]);
    let missing = targets.clone().is_nan().expand([numbers, columns]);
    let above = (targets - y).mask_fill(missing, 0.0);
    // max(q·d, (q − 1)·d) = q·d + max(−d, 0).
    Ok((above.clone() * tensor(quantiles.to_vec(), [1, columns]) + relu(above.neg())).sum())
}
