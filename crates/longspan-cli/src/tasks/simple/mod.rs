//! Simple methods that take seconds: scores stand beside theirs, and a model may learn what the best of them leaves over.

pub mod bag;
pub mod kernels;
pub mod linear;
mod ridge;
pub mod smoothing;

use anyhow::Result;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::run::folder::RunFolder;
use crate::tasks::labels::Goal;

pub struct Simple {
    pub name: String,
    /// As a person reads it, such as `93.1 %`.
    pub shown: String,
    pub score: f64,
}

/// Parts into which examples are cut so that each gets the prediction of a model that has not seen it.
const FOLDS: usize = 5;

/// What rows of logits give, on average: the mean `−log p` of the right classes, after all logits are multiplied by `scale`. As if one more
/// example had any class, so that a few that are all right make nothing certain.
fn mean_loss(rows: &[Vec<f32>], right: &[usize], scale: f64) -> f64 {
    let more = 1.0 / (rows.len() + 1) as f64;
    let one = |(row, &right): (&Vec<f32>, &usize)| {
        let scaled = |x: f32| scale * f64::from(x);
        let largest = row.iter().map(|&x| scaled(x)).fold(f64::NEG_INFINITY, f64::max);
        row.iter().map(|&x| (scaled(x) - largest).exp()).sum::<f64>().ln() + largest
            - (1.0 - more) * scaled(row[right])
            - more * row.iter().map(|&x| scaled(x)).sum::<f64>() / row.len() as f64
    };
    rows.iter().zip(right).map(one).sum::<f64>() / rows.len().max(1) as f64
}

/// The factor of what is predicted with the least loss, and that loss: of numbers, which have no factor, the sum of squares.
fn scaled(rows: &[Vec<f32>], goals: &[Goal]) -> (f64, f64) {
    let class = |goal: &Goal| if let Goal::Label(label) = goal { Some(*label as usize) } else { None };
    if let Some(classes) = goals.iter().map(class).collect::<Option<Vec<usize>>>() {
        return calibrated(rows, &classes);
    }
    let square = |(row, goal): (&Vec<f32>, &Goal)| match goal {
        Goal::Number(number) => (f64::from(row[0]) - f64::from(*number)).powi(2),
        Goal::Label(_) => 0.0,
    };
    (1.0, rows.iter().zip(goals).map(square).sum())
}

/// The factor of all logits with the least loss on examples that they were not learned from, and that loss.
fn calibrated(rows: &[Vec<f32>], right: &[usize]) -> (f64, f64) {
    // The loss is convex in the scale, so that its logarithm is searched by thirds.
    let (mut low, mut high) = (1e-3f64.ln(), 1e3f64.ln());
    let loss = |at: f64| mean_loss(rows, right, at.exp());
    while high - low > 1e-3 {
        let (a, b) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
        if loss(a) < loss(b) { high = b } else { low = a }
    }
    let scale = ((low + high) / 2.0).exp();
    (scale, mean_loss(rows, right, scale))
}

/// Writes arrays of four-byte numbers into a file of a run folder.
pub fn store(folder: &RunFolder, file: &str, arrays: &[(&str, Dtype, Vec<u8>)]) -> Result<()> {
    let views =
        arrays.iter().map(|(name, dtype, bytes)| Ok((*name, TensorView::new(*dtype, vec![bytes.len() / 4], bytes)?)));
    folder.write(file, &serialize(views.collect::<Result<Vec<_>>>()?, None)?)
}

pub fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Reads what [`store`] wrote: the words of four bytes of each of these arrays.
pub fn load<const N: usize>(folder: &RunFolder, file: &str, names: [&str; N]) -> Result<[Vec<[u8; 4]>; N]> {
    let bytes = folder.read(file)?;
    let read = || -> Option<[Vec<[u8; 4]>; N]> {
        let all = SafeTensors::deserialize(&bytes).ok()?;
        let one = |name| Some(all.tensor(name).ok()?.data().as_chunks().0.to_vec());
        let found: Vec<Vec<[u8; 4]>> = names.into_iter().map(one).collect::<Option<_>>()?;
        found.try_into().ok()
    };
    read().ok_or_else(|| folder.damaged(file, "not what a run writes"))
}

pub fn numbers(words: &[[u8; 4]]) -> Vec<f32> {
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_are_scaled_to_the_least_loss() {
        // Three of four are right by 2, and one more is half right: the probability that fits is (4/5)(3/4) + 1/10 = 7/10.
        let rows = vec![vec![2.0, 0.0]; 4];
        let (scale, loss) = calibrated(&rows, &[0, 0, 1, 0]);
        assert!((scale - (7.0f64 / 3.0).ln() / 2.0).abs() < 1e-3, "{scale}");
        let expected = -0.7 * 0.7f64.ln() - 0.3 * 0.3f64.ln();
        assert!((loss - expected).abs() < 1e-6, "{loss} {expected}");
        // All are right: 9/10.
        let (scale, _) = calibrated(&rows, &[0; 4]);
        assert!((scale - 9f64.ln() / 2.0).abs() < 1e-3, "{scale}");
    }
}
