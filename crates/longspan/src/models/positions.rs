//! Absolute positions.

use burn::config::Config;
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Absolute positions, added to the embeddings.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Positions {
    /// None: the mechanism has relative positions, or the order of tokens does not matter.
    None,
    /// Sines and cosines of geometric wavelengths (Vaswani et al. 2017).
    Sinusoidal,
}

impl Positions {
    /// Adds them to rows, `[batch, tokens, d_model]`, of tokens from position `first` on.
    pub(super) fn add(self, x: Tensor<3>, first: usize) -> Tensor<3> {
        let [_, count, width] = x.dims();
        match self.rows(first, [count, width], (&x.device(), x.dtype())) {
            None => x,
            Some(rows) => x + rows.unsqueeze(),
        }
    }

    /// What is added to tokens from position `first` on, `[count, width]`.
    pub(super) fn rows(self, first: usize, shape: [usize; 2], place: (&Device, DType)) -> Option<Tensor<2>> {
        let [count, width] = shape;
        let table = || TensorData::new(sinusoids(first, count, width), shape);
        (self == Self::Sinusoidal).then(|| Tensor::from_data(table(), place))
    }
}

/// `sin(p/10000^{2i/d})` in column `2i`, `cos` of the same in column `2i+1`, for `count` positions from `first` on.
///
/// A position is a multiple of 64 and a rest; the angles of both are added, so that sines are called for few.
pub(super) fn sinusoids(first: usize, count: usize, width: usize) -> Vec<f32> {
    const NEAR: usize = 64;
    let frequencies: Vec<f64> = (0..width).step_by(2).map(|c| 1e4_f64.powf(-(c as f64) / width as f64)).collect();
    let turned = |p: usize| -> Vec<(f64, f64)> { frequencies.iter().map(|f| (p as f64 * f).sin_cos()).collect() };
    let mut near = vec![Vec::new(); NEAR];
    let mut far = (usize::MAX, Vec::new());
    let mut out = Vec::with_capacity(count * width);
    for p in first..first + count {
        let (begin, rest) = (p / NEAR * NEAR, p % NEAR);
        if far.0 != begin {
            far = (begin, turned(begin));
        }
        if near[rest].is_empty() {
            near[rest] = turned(rest);
        }
        for (&(s, c), &(sin, cos)) in far.1.iter().zip(&near[rest]) {
            out.push((s * cos + c * sin) as f32);
            out.push((c * cos - s * sin) as f32);
        }
        // Of an odd width the last column has no cosine.
        out.truncate((p + 1 - first) * width);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinusoids_are_those_of_their_formula_and_of_no_other_call() {
        for (first, count, width) in [(0, 200, 6), (63, 3, 7), (1_000_000, 70, 128), (5, 1, 1), (0, 0, 4)] {
            let rows = sinusoids(first, count, width);
            assert_eq!(rows.len(), count * width);
            for (n, &got) in rows.iter().enumerate() {
                let (p, column) = (first + n / width, n % width);
                let angle = p as f64 / 1e4_f64.powf((column / 2 * 2) as f64 / width as f64);
                let expected = if column % 2 == 0 { angle.sin() } else { angle.cos() };
                assert!((f64::from(got) - expected).abs() <= 6e-8, "{p}, {column}: {got}, not {expected}");
            }
            for n in (0..count).step_by(13) {
                assert_eq!(sinusoids(first + n, 1, width), rows[n * width..][..width]);
            }
        }
    }
}
