//! Ridge regression on more numbers than examples, with what is told of each example by a regression without it.

use rayon::prelude::*;

use super::scaled;
use crate::tasks::labels::Goal;

/// Penalties that are tried, by the mean square of an example.
const PENALTIES: [f64; 6] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1];

/// The square of the constant among an example's numbers, by the mean square of them: so large that it is hardly penalised.
const CONSTANT: f64 = 10.0;

/// Weights of each number for each output, then the constants; and for each of the examples to learn from what those without it give.
/// Outputs are logits of labels or the number that is wanted.
pub fn ridge(rows: &[Vec<f32>], learned: &[usize], goals: &[Goal], outputs: usize) -> (Vec<f32>, Vec<Vec<f32>>) {
    let (count, width) = (learned.len(), rows.first().map_or(0, Vec::len));
    let mut means = vec![0f64; width];
    let mut squares = vec![0f64; width];
    for &n in learned {
        for (k, x) in rows[n].iter().enumerate() {
            means[k] += f64::from(*x) / count as f64;
            squares[k] += f64::from(*x).powi(2) / count as f64;
        }
    }
    // What hardly varies, but for rounding, tells nothing.
    let scales: Vec<f64> = means
        .iter()
        .zip(&squares)
        .map(|(mean, square)| square - mean * mean)
        .map(|v| if v > 1e-9 { v.sqrt().recip() } else { 0.0 })
        .collect();
    let standard: Vec<Vec<f32>> = learned
        .par_iter()
        .map(|&n| (0..width).map(|k| ((f64::from(rows[n][k]) - means[k]) * scales[k]) as f32).collect())
        .collect();
    let products: Vec<Vec<f64>> =
        (0..count).into_par_iter().map(|a| (0..=a).map(|b| dot(&standard[a], &standard[b])).collect()).collect();
    let mean = ((0..count).map(|n| products[n][n]).sum::<f64>() / count.max(1) as f64).max(1e-9);
    let constant = CONSTANT * mean;
    let goals: Vec<Goal> = learned.iter().map(|n| goals[*n]).collect();
    let wanted = |n: usize, output: usize| match goals[n] {
        Goal::Label(label) if label as usize == output => 1.0,
        Goal::Label(_) => -1.0,
        Goal::Number(number) => f64::from(number),
    };
    let tried: Vec<_> = PENALTIES
        .par_iter()
        .map(|penalty| {
            let matrix = products.iter().enumerate().map(|(n, row)| {
                let mut row: Vec<f64> = row.iter().map(|x| x + constant).collect();
                row[n] += penalty * mean;
                row
            });
            let inverse = inverted(matrix.collect());
            // The solution, and the errors of regressions without each example: the solution by the diagonal of the inverse.
            let duals: Vec<Vec<f64>> = (0..count)
                .map(|n| {
                    (0..outputs)
                        .map(|output| (0..count).map(|m| inverse[n.max(m)][n.min(m)] * wanted(m, output)).sum())
                        .collect()
                })
                .collect();
            let unseen: Vec<Vec<f32>> = (0..count)
                .map(|n| {
                    (0..outputs).map(|output| (wanted(n, output) - duals[n][output] / inverse[n][n]) as f32).collect()
                })
                .collect();
            let (scale, loss) = scaled(&unseen, &goals);
            // A small penalty where examples are alike leaves a matrix that rounding makes singular.
            (if loss.is_nan() { f64::INFINITY } else { loss }, scale, duals, unseen)
        })
        .collect();
    let Some((_, scale, duals, mut unseen)) = tried.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)) else {
        return (Vec::new(), Vec::new());
    };
    unseen.iter_mut().flatten().for_each(|x| *x *= scale as f32);
    let mut weights = vec![0f64; (width + 1) * outputs];
    for (row, duals) in standard.iter().zip(&duals) {
        for (k, x) in row.iter().enumerate() {
            duals
                .iter()
                .enumerate()
                .for_each(|(output, dual)| weights[k * outputs + output] += scale * dual * f64::from(*x) * scales[k]);
        }
        duals
            .iter()
            .enumerate()
            .for_each(|(output, dual)| weights[width * outputs + output] += scale * constant * dual);
    }
    for k in 0..width {
        for output in 0..outputs {
            weights[width * outputs + output] -= weights[k * outputs + output] * means[k];
        }
    }
    (weights.into_iter().map(|weight| weight as f32).collect(), unseen)
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    // Sixteen sums at a time, which the compiler keeps in registers.
    let (mut sums, a, b) = ([0f32; 16], a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    for (a, b) in a.zip(b) {
        for k in 0..16 {
            sums[k] += a[k] * b[k];
        }
    }
    sums.iter().map(|sum| f64::from(*sum)).sum::<f64>() + f64::from(rest)
}

/// The inverse of a positive definite matrix, both by their lower halves, by way of Cholesky's factor.
pub(super) fn inverted(mut lower: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let count = lower.len();
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    for i in 0..count {
        let (above, rest) = lower.split_at_mut(i);
        let row = &mut rest[0];
        for j in 0..i {
            row[j] = (row[j] - product(&row[..j], &above[j][..j])) / above[j][j];
        }
        row[i] = (row[i] - product(&row[..i], &row[..i])).max(1e-300).sqrt();
    }
    // Columns of the factor's inverse, each from its place on the diagonal.
    let columns: Vec<Vec<f64>> = (0..count)
        .map(|column| {
            let mut found: Vec<f64> = Vec::with_capacity(count - column);
            for i in column..count {
                let sum = if i == column { 1.0 } else { -product(&lower[i][column..i], &found) };
                found.push(sum / lower[i][i]);
            }
            found
        })
        .collect();
    (0..count).map(|i| (0..=i).map(|j| product(&columns[i], &columns[j][i - j..])).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inverse_times_its_matrix_is_one() {
        let at = |i: usize, j: usize| 1.0 / (i + j + 1) as f64 + if i == j { 1.0 } else { 0.0 };
        let inverse = inverted((0..6).map(|i| (0..=i).map(|j| at(i, j)).collect()).collect());
        for i in 0..6 {
            for j in 0..6 {
                let sum: f64 = (0..6).map(|k| at(i, k) * inverse[k.max(j)][k.min(j)]).sum();
                assert!((sum - f64::from(u8::from(i == j))).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn examples_that_are_alike_give_numbers() {
        let mut random = crate::tasks::batches::Random::new(1, 0);
        let some: Vec<Vec<f32>> =
            (0..5).map(|_| (0..3000).map(|_| (random.next() % 4) as f32 / 3.0).collect()).collect();
        let rows: Vec<Vec<f32>> = (0..130).map(|n| some[n % 5].clone()).collect();
        let goals: Vec<Goal> = (0..130).map(|n| Goal::Number((n % 5) as f32 - 2.0)).collect();
        let (weights, unseen) = ridge(&rows, &(0..130).collect::<Vec<_>>(), &goals, 1);
        assert!(weights.iter().all(|weight| weight.is_finite()));
        for (n, row) in unseen.iter().enumerate() {
            assert!((row[0] - ((n % 5) as f32 - 2.0)).abs() < 0.1, "{n}: {row:?}");
        }
    }

    #[test]
    fn each_example_is_told_by_a_regression_without_it() {
        let rows: Vec<Vec<f32>> =
            (0..12u32).map(|n| (0..20).map(|k| ((n * n * 3 + n * k * k + k) % 17) as f32).collect()).collect();
        let goals: Vec<Goal> = (0..12).map(|n| Goal::Number((n * 5 % 7) as f32)).collect();
        let all: Vec<usize> = (0..12).collect();
        let (weights, unseen) = ridge(&rows, &all, &goals, 1);
        let told = |weights: &[f32], row: &[f32]| {
            weights.iter().zip(row.iter().chain(&[1.0])).map(|(w, x)| f64::from(w * x)).sum::<f64>()
        };
        for (row, goal) in rows.iter().zip(&goals) {
            let Goal::Number(goal) = goal else { panic!() };
            assert!((told(&weights, row) - f64::from(*goal)).abs() < 1.5, "{} {goal}", told(&weights, row));
        }
        // Means and penalties of eleven differ a little from those of twelve.
        for left_out in [0, 5, 11] {
            let others: Vec<usize> = all.iter().copied().filter(|n| *n != left_out).collect();
            let without = told(&ridge(&rows, &others, &goals, 1).0, &rows[left_out]);
            assert!((without - f64::from(unseen[left_out][0])).abs() < 1.0, "{without} {}", unseen[left_out][0]);
        }
    }
}
