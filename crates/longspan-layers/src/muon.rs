//! Muon (Jordan et al. 2024): steps along a momentum whose singular values are all made about 1.
//!
//! With the gradient `G` of a matrix `X`: `V ← μ V + G`, `O ≈ (U Uᵀ)^{-1/2} U` for `U = G + μ V`,
//! `X ← (1 − r λ) X − 0.2 r √max(rows, columns) O` for a rate `r` and a decay `λ`. The factor 0.2 √max makes steps as large as AdamW's
//! (Liu et al. 2025), so both take the same rates.
//!
//! `O` is found by Newton and Schulz's iteration, `O ← a O + b (O Oᵀ) O + c (O Oᵀ)² O` from `U / ‖U‖` on, whose `a`, `b` and `c`
//! are those of the authors: they bring singular values into 0.7 to 1.2, soon rather than exactly.

use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;

use crate::gradients::{add, scale, sum_of_squares};
use crate::products::{Matrix, add_product, try_zeros};

const ITERATIONS: usize = 5;
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];

/// The constants of all steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// `μ`.
    pub momentum: f32,
    /// `λ`.
    pub weight_decay: f32,
}

impl Muon {
    /// Takes a step with `rate`: `values`, rows by columns, and `velocity` become those after it.
    ///
    /// # Errors
    /// Lengths that differ, a rate that is not finite, no memory for three copies.
    pub fn step(
        &self,
        rate: f64,
        [rows, columns]: [usize; 2],
        values: &mut [f32],
        gradient: &[f32],
        velocity: &mut [f32],
    ) -> Result<(), Error> {
        const OPERATION: &str = "muon";
        let len = rows.saturating_mul(columns);
        for (name, got) in [("values", values.len()), ("gradient", gradient.len()), ("velocity", velocity.len())] {
            expect(got == len, OPERATION, name, || format!("{rows} × {columns} numbers"), || got.to_string())?;
        }
        expect(rate.is_finite(), OPERATION, "rate", || "a finite number".into(), || rate.to_string())?;
        scale(velocity, self.momentum);
        add(velocity, gradient)?;
        let mut direction = try_zeros(len)?;
        direction.copy_from_slice(gradient);
        add_scaled(&mut direction, self.momentum, velocity);
        orthogonalize(&mut direction, [rows, columns])?;
        scale(values, (1.0 - rate * f64::from(self.weight_decay)) as f32);
        let size = 0.2 * (rows.max(columns) as f64).sqrt();
        add_scaled(values, (-rate * size) as f32, &direction);
        Ok(())
    }
}

/// Makes singular values of a matrix about 1, but for those that are 0.
fn orthogonalize(matrix: &mut Vec<f32>, [rows, columns]: [usize; 2]) -> Result<(), Error> {
    let [a, b, c] = COEFFICIENTS;
    let norm = sum_of_squares(matrix).sqrt();
    scale(matrix, 1.0 / norm.max(1e-7) as f32);
    // The products of the shorter side: rows with rows, or columns with columns.
    let (short, long, is_wide) = (rows.min(columns), rows.max(columns), rows <= columns);
    let (mut gram, mut polynomial) = (try_zeros(short * short)?, try_zeros(short * short)?);
    let mut next = try_zeros(matrix.len())?;
    for _ in 0..ITERATIONS {
        let upright = Matrix::rows(matrix, columns);
        let side = if is_wide { upright } else { upright.transposed() };
        add_product([short, long, short], side, side.transposed(), &mut gram, [0.0, 1.0]);
        polynomial.copy_from_slice(&gram);
        let square = Matrix::rows(&gram, short);
        add_product([short, short, short], square, square, &mut polynomial, [b, c]);
        next.copy_from_slice(matrix);
        let square = Matrix::rows(&polynomial, short);
        let [left, right] = if is_wide { [square, upright] } else { [upright, square] };
        add_product([rows, short, columns], left, right, &mut next, [a, 1.0]);
        std::mem::swap(matrix, &mut next);
    }
    Ok(())
}
