//! Logistic and ridge regression on sparse rows, by coordinate descent on the dual (Yu, Huang and Lin 2011; Hsieh et al. 2008).

use crate::tasks::batches::Random;

/// Rows of a sparse matrix.
#[derive(Default)]
pub struct Rows {
    ends: Vec<usize>,
    columns: Vec<u32>,
    values: Vec<f32>,
    width: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Of goals −1 and 1.
    Logistic,
    Squared,
}

/// The most passes over all rows, or as many as multiply so many numbers, and the error of the dual's slope at which they end.
const PASSES: usize = 60;
const PRODUCTS: usize = 2_000_000;
const CLOSE: f64 = 0.02;

impl Rows {
    pub fn new(width: usize) -> Self {
        Self { width, ..Self::default() }
    }

    pub fn push(&mut self, row: impl Iterator<Item = (u32, f32)>) {
        for (column, value) in row {
            self.columns.push(column);
            self.values.push(value);
        }
        self.ends.push(self.columns.len());
    }

    pub fn count(&self) -> usize {
        self.columns.len()
    }

    fn row(&self, at: usize) -> impl Iterator<Item = (usize, f64)> {
        let range = at.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[at];
        let columns = self.columns[range.clone()].iter().map(|column| *column as usize);
        columns.zip(self.values[range].iter().map(|value| f64::from(*value)))
    }

    /// The product of a row and weights, the last of which is the constant.
    pub fn times(&self, at: usize, weights: &[f64]) -> f64 {
        self.row(at).map(|(column, value)| weights[column] * value).sum::<f64>() + weights[self.width]
    }

    /// The weights `w`, the last of them a constant, with the least `½‖w‖² + penalty·Σ loss(wᵀx, goal)` over some rows.
    pub fn fit(&self, which: &[usize], goals: &[f64], penalty: f64, loss: Loss) -> Vec<f64> {
        let mut weights = vec![0.0; self.width + 1];
        let squares: Vec<f64> =
            which.iter().map(|&at| 1.0 + self.row(at).map(|(_, value)| value * value).sum::<f64>()).collect();
        let mut duals = vec![if loss == Loss::Logistic { penalty * 1e-3 } else { 0.0 }; which.len()];
        let add = |weights: &mut Vec<f64>, at: usize, by: f64| {
            self.row(at).for_each(|(column, value)| weights[column] += by * value);
            weights[self.width] += by;
        };
        for (&at, dual) in which.iter().zip(&duals) {
            add(&mut weights, at, dual * goals[at]);
        }
        let mut order: Vec<usize> = (0..which.len()).collect();
        for pass in 0..PASSES.max(PRODUCTS / self.count().max(1)) {
            Random::new(1, pass as u64).shuffle(&mut order);
            let mut worst = 0f64;
            for &n in &order {
                let (at, square, dual) = (which[n], squares[n], duals[n]);
                let (goal, product) = (goals[at], self.times(at, &weights));
                let (next, slope) = match loss {
                    Loss::Logistic => logistic(square, goal * product, penalty, dual),
                    Loss::Squared => {
                        let slope = product - goal + dual / penalty;
                        (dual - slope / (square + 1.0 / penalty), slope)
                    }
                };
                worst = worst.max(slope.abs());
                add(&mut weights, at, (next - dual) * if loss == Loss::Logistic { goal } else { 1.0 });
                duals[n] = next;
            }
            if worst < CLOSE {
                break;
            }
        }
        weights
    }
}

/// The `z` between 0 and `penalty` with the least `z ln z + (penalty − z) ln(penalty − z) + ½·square·(z − before)² + product·(z − before)`,
/// and the slope at `before`. With `z = penalty·σ(t)` the slope is `t + square·(z − before) + product`, which rises with `t` by 1 at least.
fn logistic(square: f64, product: f64, penalty: f64, before: f64) -> (f64, f64) {
    let (mut low, mut high) = (-product - square * (penalty - before), -product + square * before);
    let start = (before / (penalty - before)).ln();
    let mut t = start.clamp(low, high);
    let mut z = before;
    for _ in 0..50 {
        z = penalty / (1.0 + (-t).exp());
        let slope = t + square * (z - before) + product;
        if slope.abs() < 1e-9 {
            break;
        }
        if slope > 0.0 {
            high = t
        } else {
            low = t
        }
        let next = t - slope / (1.0 + square * z * (1.0 - z / penalty));
        t = if next > low && next < high { next } else { (low + high) / 2.0 };
    }
    // Never at an end, where the logarithm has no value.
    (z.clamp(penalty * 1e-12, penalty * (1.0 - 1e-12)), start + product)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twelve rows of three columns, one of which is empty in every third row.
    fn rows() -> Rows {
        let mut rows = Rows::new(3);
        for n in 0..12u32 {
            let x = |k: u32| ((n * n + 3 * k * n + k) % 7) as f32 / 3.0 - 1.0;
            rows.push((0..3).filter(|k| n % 3 != 0 || *k != 1).map(|k| (k, x(k))));
        }
        rows
    }

    /// The derivative of what is minimised by each weight, which is 0 at the least.
    fn gradient(rows: &Rows, goals: &[f64], weights: &[f64], penalty: f64, loss: Loss) -> Vec<f64> {
        let mut slope = weights.to_vec();
        for (at, goal) in goals.iter().enumerate() {
            let product = rows.times(at, weights);
            let by = match loss {
                Loss::Logistic => -goal / (1.0 + (goal * product).exp()),
                Loss::Squared => product - goal,
            };
            rows.row(at).for_each(|(column, value)| slope[column] += penalty * by * value);
            slope[rows.width] += penalty * by;
        }
        slope
    }

    #[test]
    fn fitted_weights_have_no_slope() {
        let rows = rows();
        let all: Vec<usize> = (0..12).collect();
        for penalty in [0.1, 1.0, 10.0] {
            let signs: Vec<f64> = (0..12).map(|n| if n * 5 % 12 < 6 { 1.0 } else { -1.0 }).collect();
            let numbers: Vec<f64> = (0..12).map(|n| f64::from(n) * 0.7 - 3.0).collect();
            for (goals, loss) in [(&signs, Loss::Logistic), (&numbers, Loss::Squared)] {
                let weights = rows.fit(&all, goals, penalty, loss);
                let slope = gradient(&rows, goals, &weights, penalty, loss);
                let size = slope.iter().map(|x| x.abs()).fold(0.0, f64::max);
                // Each of twelve rows may be off by as much.
                assert!(size < 12.0 * CLOSE * penalty, "{slope:?} at {weights:?}");
                assert!(weights.iter().any(|weight| weight.abs() > 0.05), "{weights:?}");
            }
        }
    }
}
