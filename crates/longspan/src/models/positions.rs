//! Absolute positions.

use burn::config::Config;
use burn::tensor::{Tensor, TensorData};

/// Absolute positions, added to the embeddings.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Positions {
    /// None: the mechanism has relative positions, or the order of tokens does not matter.
    None,
    /// Sines and cosines of geometric wavelengths (Vaswani et al. 2017).
    Sinusoidal,
}

impl Positions {
    /// Adds them to embeddings, `[batch, tokens, d_model]`, of tokens from position `first` on.
    pub(super) fn add(self, x: Tensor<3>, first: usize) -> Tensor<3> {
        match self {
            Self::None => x,
            Self::Sinusoidal => {
                let [_, count, width] = x.dims();
                let table = TensorData::new(sinusoids(first, count, width), [1, count, width]);
                let place = (&x.device(), x.dtype());
                x + Tensor::from_data(table, place)
            }
        }
    }
}

/// `sin(p/10000^{2i/d})` in column `2i`, `cos` of the same in column `2i+1`, for `count` positions from `first` on.
pub(super) fn sinusoids(first: usize, count: usize, width: usize) -> Vec<f32> {
    let entry = |position: usize, column: usize| {
        let angle = position as f64 / 1e4_f64.powf((column / 2 * 2) as f64 / width as f64);
        (if column.is_multiple_of(2) { angle.sin() } else { angle.cos() }) as f32
    };
    (first..first + count).flat_map(|p| (0..width).map(move |c| entry(p, c))).collect()
}
