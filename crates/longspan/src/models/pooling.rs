//! How the rows of a sequence become one.

use burn::config::Config;
use burn::module::Param;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor, TensorData};

use crate::attention::AttentionMask;
use crate::backend::tensor::{narrow_float, widen};
use crate::error::{Result, argument};
use crate::layers::check_rows;

/// How the rows of a sequence become one.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The last one. Under a causal mask it has seen all others.
    Last,
    /// Their mean under learned weights, `Σ_t softmax_t(w·x_t / √d_model) x_t`. `w` starts at 0, which is the mean.
    Attention,
}

impl Pooling {
    /// `w` of [`Pooling::Attention`], `[d_model]`.
    pub(super) fn query(self, d_model: usize, device: &Device) -> Option<Param<Tensor<1>>> {
        (self == Self::Attention).then(|| Param::from_tensor(Tensor::zeros([d_model], device)))
    }

    /// One row for each sequence, `[batch, 1, d_model]`, of rows `[batch, tokens, d_model]`, of which the first `lengths[b]` count.
    pub(super) fn pool(self, x: Tensor<3>, lengths: &[usize], query: Option<&Param<Tensor<1>>>) -> Result<Tensor<3>> {
        let [batch, count, d_model] = x.dims();
        if batch == 0 {
            return Ok(Tensor::zeros([0, 1, d_model], (&x.device(), x.dtype())));
        }
        query.map_or(Ok(()), |query| check_rows("pooling", "x", &x, &query.val()))?;
        let (dtype, x) = (x.dtype(), widen(x));
        let place = (x.device(), x.dtype());
        let by_row = |number: fn(Self, usize, usize) -> f32| {
            let numbers = lengths.iter().flat_map(|&n| (0..count).map(move |t| number(self, n, t))).collect::<Vec<_>>();
            Tensor::<3>::from_data(TensorData::new(numbers, [batch, count, 1]), (&place.0, place.1))
        };
        let weights = match query {
            Some(query) => {
                let query = widen(query.val()).mul_scalar((d_model as f64).powf(-0.5)).reshape([1, 1, d_model]);
                // Far below every other number, and still one: a softmax of infinities alone would be NaN.
                let ignored = by_row(|_, length, t| if t < length { 0.0 } else { -1e30 });
                softmax((x.clone() * query).sum_dim(2) + ignored, 1)
            }
            None => by_row(|pooling, length, t| match pooling {
                Self::Last if t + 1 == length => 1.0,
                Self::Mean if t < length => 1.0 / length as f32,
                _ => 0.0,
            }),
        };
        Ok(narrow_float((x * weights).sum_dim(1), dtype))
    }
}

/// The mask of sequences of these lengths in rows of `count` tokens.
pub(super) fn mask(
    lengths: &[usize],
    [batch, count]: [usize; 2],
    causal: bool,
    device: &Device,
) -> Result<AttentionMask> {
    let holds = lengths.len() == batch && lengths.iter().all(|n| (1..=count).contains(n));
    let expected = || format!("{batch} lengths from 1 to {count}");
    argument(holds, "pooling", "lengths", expected, || format!("{lengths:?}"))?;
    let mask = if causal { AttentionMask::causal() } else { AttentionMask::bidirectional() };
    Ok(if lengths.iter().any(|&n| n < count) { mask.with_lengths(lengths).on([batch, count], device) } else { mask })
}
