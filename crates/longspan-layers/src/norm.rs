//! Layer norm and RMS norm of rows.
//!
//! `y = x̂ ⊙ γ + β` with `x̂ = (x − m) s`, `s = 1/√(mean((x − m)²) + ε)`, and `m = mean(x)` in a layer norm (Ba et al. 2016), 0 in an
//! RMS norm (Zhang and Sennrich 2019). With `h = dy ⊙ γ`: `dx = s (h − mean(h) − x̂ mean(h ⊙ x̂))`, without `mean(h)` in an RMS
//! norm; `dγ = Σ dy ⊙ x̂`, `dβ = Σ dy`. A backward forms `m` and `s` anew from `x`.

use std::mem::MaybeUninit;

use super::products::Fresh;
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::simd::{Vector, dispatch, operation};
use longspan_core::threads::share;

/// Rows of a task, and of one sum of `dγ` and `dβ`.
const ROWS: usize = 64;

/// What a norm has learned, and which norm it is.
#[derive(Debug, Clone, Copy)]
pub struct NormWeights<'a> {
    /// `γ`, `[width]`.
    pub gamma: &'a [f32],
    /// `β`, `[width]`.
    pub beta: Option<&'a [f32]>,
    /// Whether the mean is subtracted: a layer norm's, and not an RMS norm's.
    pub centred: bool,
    /// `ε`, which keeps the division finite.
    pub epsilon: f32,
}

/// One call of a norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// `[rows, width]`.
    pub x: &'a [f32],
    /// All else.
    pub weights: NormWeights<'a>,
}

/// The gradients of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct NormGradients {
    /// `[rows, width]`.
    pub dx: Vec<f32>,
    /// `[width]`.
    pub d_gamma: Vec<f32>,
    /// `[width]`.
    pub d_beta: Vec<f32>,
}

impl NormWeights<'_> {
    /// The norm of rows, in `out`.
    pub(super) fn normalize<'o>(&self, x: &[f32], out: &'o mut [MaybeUninit<f32>]) -> &'o [f32] {
        let out = out.write_copy_of_slice(x);
        self.normalize_to(x, out);
        out
    }

    /// [`normalize`](Self::normalize) to numbers that are there.
    pub(super) fn normalize_to(&self, x: &[f32], out: &mut [f32]) {
        dispatch(Normalize { norm: Norm { x, weights: *self }, out });
    }

    /// Turns the gradients of the norms of rows into those of the rows `x`, and adds those of `γ` and `β` to sums.
    pub(super) fn pull_back(&self, x: &[f32], d: &mut [f32], [d_gamma, d_beta]: [&mut [f32]; 2]) {
        dispatch(NormalizeBackward { norm: Norm { x, weights: *self }, dx: d, d_gamma, d_beta });
    }

    /// Refuses weights of other rows than of `width` numbers.
    pub(super) fn check(&self, operation: &'static str, width: usize) -> Result<(), Error> {
        for (name, got) in [("gamma", self.gamma.len()), ("beta", self.beta.map_or(width, <[f32]>::len))] {
            expect(got == width, operation, name, || format!("{width} numbers, as a row of x"), || got.to_string())?;
        }
        Ok(())
    }
}

/// Refuses other numbers than as many as those of `x`.
pub(super) fn check_as_x(operation: &'static str, name: &'static str, x: &[f32], numbers: &[f32]) -> Result<(), Error> {
    let (got, len) = (numbers.len(), x.len());
    expect(got == len, operation, name, || format!("{len} numbers, as x"), || got.to_string())
}

impl Norm<'_> {
    fn check(&self) -> Result<(), Error> {
        let width = self.weights.gamma.len();
        let rows = self.x.len().is_multiple_of(width);
        expect(rows, "norm", "x", || format!("rows of {width} numbers"), || format!("{} numbers", self.x.len()))?;
        self.weights.check("norm", width)
    }

    /// The result, `[rows, width]`.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn forward(&self) -> Result<Vec<f32>, Error> {
        self.check()?;
        let mut out = Fresh::new(self.x.len())?;
        if !self.x.is_empty() {
            let block = ROWS * self.weights.gamma.len();
            share(self.x.chunks(block).zip(out.room().chunks_mut(block)), |(x, out)| {
                self.weights.normalize(x, out);
            });
        }
        // SAFETY: every row has been written.
        Ok(unsafe { out.written() })
    }

    /// The gradients from that of the result.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn backward(&self, d_out: &[f32]) -> Result<NormGradients, Error> {
        self.check()?;
        check_as_x("norm", "d_out", self.x, d_out)?;
        let len = self.x.len();
        let width = self.weights.gamma.len();
        let mut dx = Fresh::new(len)?;
        let (mut d_gamma, mut d_beta) = (vec![0.0; width], vec![0.0; width]);
        if len > 0 {
            let block = ROWS * width;
            let mut sums = vec![0.0; len.div_ceil(block) * 2 * width];
            let rows = self.x.chunks(block).zip(d_out.chunks(block));
            share(rows.zip(dx.room().chunks_mut(block)).zip(sums.chunks_mut(2 * width)), |(((x, d), dx), sums)| {
                self.weights.pull_back(x, dx.write_copy_of_slice(d), sums.split_at_mut(width).into());
            });
            for sums in sums.chunks_exact(2 * width) {
                add_scaled(&mut d_gamma, 1.0, &sums[..width]);
                add_scaled(&mut d_beta, 1.0, &sums[width..]);
            }
        }
        // SAFETY: every row has been written.
        Ok(NormGradients { dx: unsafe { dx.written() }, d_gamma, d_beta })
    }
}

/// `m` and `s` of a row.
#[inline(always)]
pub(super) unsafe fn statistics<V: Vector<Element = f32>>(x: &[f32], centred: bool, epsilon: f32) -> (f32, f32) {
    let width = x.len() as f32;
    let mean = if centred {
        // SAFETY: forwarded to the caller.
        unsafe { sum::<V>(x, |x| x, |x| x) / width }
    } else {
        0.0
    };
    // SAFETY: forwarded to the caller.
    let square = unsafe {
        let centre = V::splat(mean);
        sum::<V>(x, |x| x.sub(centre).mul(x.sub(centre)), |x| (x - mean) * (x - mean))
    };
    (mean, 1.0 / (square / width + epsilon).sqrt())
}

/// `Σ f(x)`; `f` twice, for registers and for what does not fill one.
#[inline(always)]
unsafe fn sum<V: Vector<Element = f32>>(x: &[f32], f: impl Fn(V) -> V, of_one: impl Fn(f32) -> f32) -> f32 {
    let whole = x.len() / V::LANES * V::LANES;
    // SAFETY: whole registers lie in the row.
    let sums = unsafe {
        let mut sums = V::splat(0.0);
        for column in (0..whole).step_by(V::LANES) {
            sums = sums.add(f(V::load(x.as_ptr().add(column))));
        }
        sums.sum()
    };
    x[whole..].iter().fold(sums, |sum, &x| sum + of_one(x))
}

// Writes the norm of rows.
operation!(Normalize, f32, |norm: Norm<'a>, out: &'a mut [f32]| {
    let Norm { x, weights: NormWeights { gamma, beta, centred, epsilon } } = norm;
    let width = gamma.len();
    let whole = width / V::LANES * V::LANES;
    assert!(out.len() == x.len() && beta.is_none_or(|beta| beta.len() == width));
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        // SAFETY: whole registers lie in every row, in `gamma` and `beta`.
        unsafe {
            let (mean, scale) = statistics::<V>(x, centred, epsilon);
            for column in (0..whole).step_by(V::LANES) {
                let at = |row: &[f32]| V::load(row.as_ptr().add(column));
                let y = at(x).sub(V::splat(mean)).mul(V::splat(scale));
                let zero = V::splat(0.0);
                let y = y.mul_add(at(gamma), beta.map_or(zero, at));
                y.store(out.as_mut_ptr().add(column));
            }
            for column in whole..width {
                let beta = beta.map_or(0.0, |beta| beta[column]);
                out[column] = (x[column] - mean) * scale * gamma[column] + beta;
            }
        }
    }
});

// Turns the gradients `dx` of rows into those of what they were made from, and adds up those of `γ` and `β`.
operation!(NormalizeBackward, f32, |norm: Norm<'a>,
                                    dx: &'a mut [f32],
                                    d_gamma: &'a mut [f32],
                                    d_beta: &'a mut [f32]| {
    let Norm { x, weights: NormWeights { gamma, centred, epsilon, .. } } = norm;
    let width = gamma.len();
    let whole = width / V::LANES * V::LANES;
    assert!(dx.len() == x.len() && d_gamma.len() == width && d_beta.len() == width);
    for (x, dx) in x.chunks_exact(width).zip(dx.chunks_exact_mut(width)) {
        // SAFETY: whole registers lie in every row of numbers.
        unsafe {
            let (mean, scale) = statistics::<V>(x, centred, epsilon);
            let (mut level, mut slope) = (V::splat(0.0), V::splat(0.0));
            for column in (0..whole).step_by(V::LANES) {
                let at = |row: &[f32]| V::load(row.as_ptr().add(column));
                let normal = at(x).sub(V::splat(mean)).mul(V::splat(scale));
                let d = at(dx);
                d.mul_add(normal, at(d_gamma)).store(d_gamma.as_mut_ptr().add(column));
                at(d_beta).add(d).store(d_beta.as_mut_ptr().add(column));
                let h = d.mul(at(gamma));
                level = level.add(h);
                slope = h.mul_add(normal, slope);
            }
            let (mut level, mut slope) = (level.sum(), slope.sum());
            for column in whole..width {
                let (normal, d) = ((x[column] - mean) * scale, dx[column]);
                d_gamma[column] += d * normal;
                d_beta[column] += d;
                level += d * gamma[column];
                slope += d * gamma[column] * normal;
            }
            let level = if centred { level / width as f32 } else { 0.0 };
            slope /= width as f32;
            for column in (0..whole).step_by(V::LANES) {
                let at = |row: &[f32]| V::load(row.as_ptr().add(column));
                let normal = at(x).sub(V::splat(mean)).mul(V::splat(scale));
                let h = at(dx).mul_add(at(gamma), V::splat(-level));
                let d = normal.mul_add(V::splat(-slope), h).mul(V::splat(scale));
                d.store(dx.as_mut_ptr().add(column));
            }
            for column in whole..width {
                let normal = (x[column] - mean) * scale;
                dx[column] = scale * (dx[column] * gamma[column] - level - normal * slope);
            }
        }
    }
});
