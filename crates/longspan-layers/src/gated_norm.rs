//! The gated RMS norm of heads' outputs, between attention and the layer after it.
//!
//! `y = (x s) ⊙ γ ⊙ SiLU(z)` with `s = 1/√(mean(x²) + ε)` for the output `x` of each head and a gate `z` of the same size: RetNet's group
//! norm and swish gate (Sun et al. 2023, §2.2) without mean and shift, as in code of gated linear attention (Yang et al. 2024).
//! Mamba-2 (Dao and Gu 2024) gates first and then norms. Outputs of linear attention may be of any size, in each head of another: the
//! norm makes heads alike, and the gate lets a token choose among them. `γ` has a number for each column of every head, as group norms
//! have and Mamba-2's; one that heads share is the case of equal ones.
//!
//! With `n = x s` and `h = dy ⊙ γ ⊙ SiLU(z)`: `dx = s (h − n mean(h ⊙ n))`, `dz = dy ⊙ n ⊙ γ ⊙ SiLU′(z)`,
//! `dγ = Σ dy ⊙ n ⊙ SiLU(z)`. A backward forms `s` anew from `x`.

use super::activation::{Activation, value_and_slope};
use super::norm::{check_as_x, statistics};
use super::products::{Fresh, try_zeros};
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::simd::rows::{load_part, store_part};
use longspan_core::simd::{dispatch, operation};
use longspan_core::threads::share;

/// Rows of a task, and of one sum of `dγ`.
const ROWS: usize = 64;

/// What a gated norm has learned.
#[derive(Debug, Clone, Copy)]
pub struct GatedNormWeights<'a> {
    /// `γ`, `[heads · head_dim]`.
    pub gamma: &'a [f32],
    /// `ε`, which keeps the division finite.
    pub epsilon: f32,
}

/// One call of a gated norm.
#[derive(Debug, Clone, Copy)]
pub struct GatedNorm<'a> {
    /// `[rows, heads · head_dim]`.
    pub x: &'a [f32],
    /// `z`, as `x`.
    pub gate: &'a [f32],
    /// Numbers of a head.
    pub head_dim: usize,
    /// All else.
    pub weights: GatedNormWeights<'a>,
}

/// The gradients of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedNormGradients {
    /// `[rows, heads · head_dim]`.
    pub dx: Vec<f32>,
    /// `[rows, heads · head_dim]`.
    pub d_gate: Vec<f32>,
    /// `[heads · head_dim]`.
    pub d_gamma: Vec<f32>,
}

const OPERATION: &str = "gated norm";

impl GatedNorm<'_> {
    fn check(&self) -> Result<(), Error> {
        let width = self.weights.gamma.len();
        let heads = self.head_dim > 0 && width.is_multiple_of(self.head_dim);
        let expected = || format!("heads of {} numbers, at least 1", self.head_dim);
        expect(heads, OPERATION, "gamma", expected, || format!("{width} numbers"))?;
        let rows = self.x.len().is_multiple_of(width);
        expect(rows, OPERATION, "x", || format!("rows of {width} numbers"), || format!("{} numbers", self.x.len()))?;
        check_as_x(OPERATION, "gate", self.x, self.gate)
    }

    /// The result, `[rows, heads · head_dim]`.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn forward(&self) -> Result<Vec<f32>, Error> {
        self.check()?;
        self.weights.of(self.x, Gates { numbers: self.gate, stride: self.weights.gamma.len() }, self.head_dim)
    }

    /// The gradients from that of the result.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn backward(&self, d_out: &[f32]) -> Result<GatedNormGradients, Error> {
        self.check()?;
        check_as_x(OPERATION, "d_out", self.x, d_out)?;
        let (mut dx, mut d_gate) = (try_zeros(d_out.len())?, try_zeros(d_out.len())?);
        dx.copy_from_slice(d_out);
        let gate = Gates { numbers: self.gate, stride: self.weights.gamma.len() };
        let d_gamma = self.weights.pull_back(self.x, gate, self.head_dim, &mut dx, &mut d_gate);
        Ok(GatedNormGradients { dx, d_gate, d_gamma })
    }
}

/// Gates, in rows that begin `stride` numbers apart.
#[derive(Clone, Copy)]
pub(super) struct Gates<'a> {
    /// From the first gate on.
    pub numbers: &'a [f32],
    pub stride: usize,
}

impl Gates<'_> {
    fn are_for(&self, rows: &[f32], width: usize) -> bool {
        rows.is_empty() || (rows.len() / width - 1) * self.stride + width <= self.numbers.len()
    }
}

impl GatedNormWeights<'_> {
    /// The gated norms of rows.
    pub(super) fn of(&self, x: &[f32], gate: Gates<'_>, head_dim: usize) -> Result<Vec<f32>, Error> {
        assert!(gate.are_for(x, self.gamma.len()));
        let mut out = Fresh::new(x.len())?;
        if !x.is_empty() {
            let block = ROWS * self.gamma.len();
            let rows = x.chunks(block).zip(out.room().chunks_mut(block));
            share(rows.zip(gate.numbers.chunks(ROWS * gate.stride)), |((x, out), numbers)| {
                let rows = out.write_copy_of_slice(x);
                dispatch(Normalize { weights: *self, head_dim, gate: Gates { numbers, ..gate }, rows });
            });
        }
        // SAFETY: every row has been written.
        Ok(unsafe { out.written() })
    }

    pub(super) fn apply(&self, rows: &mut [f32], gate: Gates<'_>, head_dim: usize) {
        assert!(gate.are_for(rows, self.gamma.len()));
        if !rows.is_empty() {
            let blocks = rows.chunks_mut(ROWS * self.gamma.len()).zip(gate.numbers.chunks(ROWS * gate.stride));
            share(blocks, |(rows, numbers)| {
                dispatch(Normalize { weights: *self, head_dim, gate: Gates { numbers, ..gate }, rows });
            });
        }
    }

    /// Turns the gradients of gated norms into those of the rows `x`, writes those of the gates, as far apart as these, and gives that of
    /// `γ`.
    pub(super) fn pull_back(
        &self,
        x: &[f32],
        gate: Gates<'_>,
        head_dim: usize,
        d: &mut [f32],
        d_gate: &mut [f32],
    ) -> Vec<f32> {
        let width = self.gamma.len();
        assert!(gate.are_for(x, width) && d.len() == x.len() && d_gate.len() == gate.numbers.len());
        let mut d_gamma = vec![0.0; width];
        if !x.is_empty() {
            let (block, gates) = (ROWS * width, ROWS * gate.stride);
            let mut sums = vec![0.0; x.len().div_ceil(block) * width];
            let rows = x.chunks(block).zip(gate.numbers.chunks(gates));
            let out = d.chunks_mut(block).zip(d_gate.chunks_mut(gates)).zip(sums.chunks_mut(width));
            share(rows.zip(out), |((x, numbers), ((dx, d_gate), d_gamma))| {
                let gate = Gates { numbers, ..gate };
                dispatch(NormalizeBackward { weights: *self, head_dim, x, gate, dx, d_gate, d_gamma });
            });
            sums.chunks_exact(width).for_each(|sums| add_scaled(&mut d_gamma, 1.0, sums));
        }
        d_gamma
    }

    /// Refuses weights of other heads than of `width` numbers in all.
    pub(super) fn check(&self, operation: &'static str, width: usize) -> Result<(), Error> {
        let got = self.gamma.len();
        expect(got == width, operation, "gated norm", || format!("γ of {width} numbers"), || got.to_string())
    }
}

// Replaces rows by their gated norms.
operation!(Normalize, f32, |weights: GatedNormWeights<'a>, head_dim: usize, gate: Gates<'a>, rows: &'a mut [f32]| {
    let GatedNormWeights { gamma, epsilon } = weights;
    for (row, gate) in rows.chunks_exact_mut(gamma.len()).zip(gate.numbers.chunks(gate.stride)) {
        let heads = row.chunks_exact_mut(head_dim).zip(gamma.chunks_exact(head_dim));
        for ((x, gamma), gate) in heads.zip(gate.chunks(head_dim)) {
            // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
            unsafe {
                let (_, scale) = statistics::<V>(x, false, epsilon);
                for column in (0..head_dim).step_by(V::LANES) {
                    let (open, _) = value_and_slope(Activation::Silu, load_part::<V>(gate, column));
                    let normal = load_part::<V>(x, column).mul(V::splat(scale));
                    store_part(normal.mul(load_part(gamma, column)).mul(open), x, column);
                }
            }
        }
    }
});

// Turns the gradients of gated norms into those of rows and gates, and adds up that of `γ`. `dx` holds `dy` before.
operation!(NormalizeBackward, f32, |weights: GatedNormWeights<'a>,
                                    head_dim: usize,
                                    x: &'a [f32],
                                    gate: Gates<'a>,
                                    dx: &'a mut [f32],
                                    d_gate: &'a mut [f32],
                                    d_gamma: &'a mut [f32]| {
    let GatedNormWeights { gamma, epsilon } = weights;
    let (width, stride) = (gamma.len(), gate.stride);
    let rows = x.chunks_exact(width).zip(gate.numbers.chunks(stride));
    for ((x, gate), (dx, d_gate)) in rows.zip(dx.chunks_exact_mut(width).zip(d_gate.chunks_mut(stride))) {
        for first in (0..width).step_by(head_dim) {
            let head = first..first + head_dim;
            let (x, gate, gamma) = (&x[head.clone()], &gate[head.clone()], &gamma[head.clone()]);
            let (dx, d_gate) = (&mut dx[head.clone()], &mut d_gate[head.clone()]);
            let d_gamma = &mut d_gamma[head];
            // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
            unsafe {
                let (_, scale) = statistics::<V>(x, false, epsilon);
                let mut slope = V::splat(0.0);
                for column in (0..head_dim).step_by(V::LANES) {
                    let (open, opening) = value_and_slope(Activation::Silu, load_part::<V>(gate, column));
                    let normal = load_part::<V>(x, column).mul(V::splat(scale));
                    let (d, gamma) = (load_part::<V>(dx, column), load_part::<V>(gamma, column));
                    let through = d.mul(normal);
                    store_part(through.mul_add(open, load_part(d_gamma, column)), d_gamma, column);
                    store_part(through.mul(gamma).mul(opening), d_gate, column);
                    let h = d.mul(gamma).mul(open);
                    slope = h.mul_add(normal, slope);
                    store_part(h, dx, column);
                }
                let slope = V::splat(-slope.sum() / head_dim as f32);
                for column in (0..head_dim).step_by(V::LANES) {
                    let normal = load_part::<V>(x, column).mul(V::splat(scale));
                    let d = normal.mul_add(slope, load_part(dx, column)).mul(V::splat(scale));
                    store_part(d, dx, column);
                }
            }
        }
    }
});
