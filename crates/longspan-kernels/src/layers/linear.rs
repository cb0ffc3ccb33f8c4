//! A linear layer with what follows it: `y = residual + dropout(f(x·W + b))`.
//!
//! Rows are taken a block at a time, so that bias, activation, dropout and residual find the product in a cache. Backward, with
//! `z = x·W + b` and `dz = dropout(dy) ⊙ f′(z)`: `dx = dz·Wᵀ`, `dW = xᵀ·dz`, `db = Σ dz`, and the residual's gradient is `dy`. `dz`
//! is never held whole.

use std::mem::MaybeUninit;

use super::activation::{Activate, Activation, PullBack};
use super::dropout::Dropout;
use super::products::{Fresh, Matrix, add_product, add_rows, product, sum_parts};
use crate::error::{Error, expect};
use crate::simd::block::add_scaled;
use crate::simd::dispatch;
use crate::threads::share;

/// Rows of a block: 512 × 1,024 numbers are 2 MiB, about a second-level cache; fewer would bring `W` into the product's own
/// order more often.
const ROWS: usize = 512;

/// Parts of the rows that each have a sum of `dW` of their own.
const PARTS: usize = 8;

/// One call of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `[rows, inputs]`.
    pub x: &'a [f32],
    /// `[inputs, outputs]`.
    pub weight: &'a [f32],
    /// `[outputs]`.
    pub bias: Option<&'a [f32]>,
    /// How many.
    pub rows: usize,
    /// Numbers of a row of `x`.
    pub inputs: usize,
    /// Numbers of a row of the result.
    pub outputs: usize,
    /// `f`.
    pub activation: Activation,
    /// What it drops of the activation's results.
    pub dropout: Option<Dropout>,
    /// `[rows, outputs]`: added last.
    pub residual: Option<&'a [f32]>,
}

/// What a backward needs of its forward beside the arguments.
#[derive(Debug, Clone, PartialEq)]
pub enum Kept {
    /// Nothing, or the result alone.
    Result,
    /// `z`, `[rows, outputs]`.
    Sums(Vec<f32>),
}

/// The gradients of a call. That of the residual is the result's own.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearGradients {
    /// `[rows, inputs]`.
    pub dx: Vec<f32>,
    /// `[inputs, outputs]`.
    pub d_weight: Vec<f32>,
    /// `[outputs]`.
    pub d_bias: Vec<f32>,
}

const OPERATION: &str = "linear";

impl<'a> Linear<'a> {
    /// `x·W`.
    pub fn new(x: &'a [f32], weight: &'a [f32], [rows, inputs, outputs]: [usize; 3]) -> Self {
        let activation = Activation::Identity;
        Self { x, weight, bias: None, rows, inputs, outputs, activation, dropout: None, residual: None }
    }

    /// With `b`.
    pub fn with_bias(self, bias: Option<&'a [f32]>) -> Self {
        Self { bias, ..self }
    }

    /// With `f`.
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// With numbers dropped of what `f` gives.
    pub fn with_dropout(self, dropout: Option<Dropout>) -> Self {
        Self { dropout, ..self }
    }

    /// With a residual, which is added last.
    pub fn with_residual(self, residual: Option<&'a [f32]>) -> Self {
        Self { residual, ..self }
    }

    fn check(&self) -> Result<(), Error> {
        let Self { rows, inputs, outputs, .. } = *self;
        let length = |name, numbers: Option<&[f32]>, [a, b]: [usize; 2]| {
            let wanted = a.checked_mul(b);
            let fits = numbers.is_none_or(|numbers| Some(numbers.len()) == wanted);
            let got = || numbers.map_or(0, <[f32]>::len).to_string();
            expect(fits, OPERATION, name, || format!("{a} × {b} numbers"), got)
        };
        length("x", Some(self.x), [rows, inputs])?;
        length("weight", Some(self.weight), [inputs, outputs])?;
        length("bias", self.bias, [1, outputs])?;
        length("residual", self.residual, [rows, outputs])
    }

    /// The result, `[rows, outputs]`.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn forward(&self) -> Result<Vec<f32>, Error> {
        self.run(false).map(|(out, _)| out)
    }

    /// The result and what [`backward`](Self::backward) needs.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn training(&self) -> Result<(Vec<f32>, Kept), Error> {
        self.run(!self.slope_is_in_result())
    }

    fn slope_is_in_result(&self) -> bool {
        let alone = self.dropout.is_none() && self.residual.is_none();
        self.activation == Activation::Identity || (self.activation.slope_is_in_result() && alone)
    }

    /// Rows that are taken at a time.
    fn block(&self) -> usize {
        self.rows.div_ceil(PARTS).next_multiple_of(32).min(ROWS)
    }

    fn run(&self, keep: bool) -> Result<(Vec<f32>, Kept), Error> {
        self.check()?;
        let len = self.rows * self.outputs;
        let mut out = Fresh::new(len)?;
        let mut sums = Fresh::new(if keep { len } else { 0 })?;
        if len > 0 {
            let block = self.block();
            let mut kept = sums.room().chunks_mut(block * self.outputs);
            let tasks: Vec<_> = out.room().chunks_mut(block * self.outputs).map(|out| (out, kept.next())).collect();
            share(tasks.into_iter().enumerate(), |(n, (out, sums))| self.rows_of(n * block, out, sums));
        }
        // SAFETY: every block wrote all of its numbers.
        unsafe { Ok((out.written(), if keep { Kept::Sums(sums.written()) } else { Kept::Result })) }
    }

    /// The rows from `first` on.
    fn rows_of(&self, first: usize, out: &mut [MaybeUninit<f32>], sums: Option<&mut [MaybeUninit<f32>]>) {
        let Self { inputs, outputs, activation, bias, .. } = *self;
        let rows = out.len() / outputs;
        let x = Matrix::rows(&self.x[first * inputs..][..rows * inputs], inputs);
        let sizes = [rows, inputs, outputs];
        let weight = Matrix::rows(self.weight, outputs);
        let out = match sums {
            None => {
                let out = product(sizes, x, weight, out);
                if activation != Activation::Identity || bias.is_some() {
                    dispatch(Activate { activation, sums: out, bias, width: outputs, to: None });
                }
                out
            }
            Some(sums) => {
                let sums = product(sizes, x, weight, sums);
                dispatch(Activate { activation, sums, bias, width: outputs, to: Some(&mut *out) });
                // SAFETY: every number has been written.
                unsafe { out.assume_init_mut() }
            }
        };
        if let Some(dropout) = self.dropout {
            dropout.apply(first * outputs, out);
        }
        if let Some(residual) = self.residual {
            add_scaled(out, 1.0, &residual[first * outputs..][..rows * outputs]);
        }
    }

    /// The gradients, from that of the result, `out` and what the forward kept.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn backward(&self, out: &[f32], kept: &Kept, d_out: &[f32]) -> Result<LinearGradients, Error> {
        self.check()?;
        let Self { rows, inputs, outputs, .. } = *self;
        let at = match kept {
            Kept::Result => out,
            Kept::Sums(sums) => sums,
        };
        for (name, numbers) in [("out", at), ("d_out", d_out)] {
            let got = || numbers.len().to_string();
            expect(numbers.len() == rows * outputs, OPERATION, name, || format!("{rows} × {outputs} numbers"), got)?;
        }
        let kind = matches!(kept, Kept::Result) == self.slope_is_in_result();
        expect(kind, OPERATION, "kept", || "what this call's forward kept".into(), || "another call's".into())?;
        if rows * outputs * inputs == 0 {
            let zeros = |len| vec![0.0; len];
            let mut d_bias = zeros(outputs);
            add_rows(d_out, &mut d_bias);
            return Ok(LinearGradients { dx: zeros(rows * inputs), d_weight: zeros(inputs * outputs), d_bias });
        }
        // Cut by sizes alone: sums have the same order on any number of threads.
        let parts = (rows / ROWS).clamp(1, PARTS);
        let part = rows.div_ceil(parts);
        let parts = rows.div_ceil(part);
        let mut dx = Fresh::new(rows * inputs)?;
        let plain = self.activation == Activation::Identity && self.dropout.is_none();
        let block = if plain { 0 } else { ROWS.min(part) * outputs };
        let mut sums = Vec::new();
        for _ in 0..parts {
            sums.push(Sums { weight: Fresh::new(inputs * outputs)?, bias: vec![0.0; outputs], dz: Fresh::new(block)? });
        }
        let tasks: Vec<_> = dx.room().chunks_mut(part * inputs).zip(&mut sums).collect();
        share(tasks.into_iter().enumerate(), |(n, (dx, sums))| self.pull_back(n * part, at, d_out, dx, sums));
        // SAFETY: every part wrote all of its numbers.
        let sums = sum_parts(sums.into_iter().map(|sums| (unsafe { sums.weight.written() }, sums.bias)));
        let (d_weight, d_bias) = sums.unwrap_or_default();
        // SAFETY: as above.
        Ok(LinearGradients { dx: unsafe { dx.written() }, d_weight, d_bias })
    }

    /// The rows of `dx` from `first` on, and their share of the gradients of weight and bias.
    fn pull_back(&self, first: usize, at: &[f32], d_out: &[f32], dx: &mut [MaybeUninit<f32>], sums: &mut Sums) {
        let Self { inputs, outputs, activation, .. } = *self;
        let weight = Matrix::rows(self.weight, outputs);
        let memory = sums.dz.room();
        let mut d_weight = Sum::Empty(sums.weight.room());
        for (n, dx) in dx.chunks_mut(ROWS * inputs).enumerate() {
            let rows = dx.len() / inputs;
            let first = first + n * ROWS;
            let range = first * outputs..(first + rows) * outputs;
            let mut dz = &d_out[range.clone()];
            if !memory.is_empty() {
                let own = memory[..dz.len()].write_copy_of_slice(dz);
                if let Some(dropout) = self.dropout {
                    dropout.apply(range.start, own);
                }
                dispatch(PullBack { activation, at: &at[range], d: own });
                dz = own;
            }
            add_rows(dz, &mut sums.bias);
            let dz = Matrix::rows(dz, outputs);
            product([rows, outputs, inputs], dz, weight.transposed(), dx);
            let x = Matrix::rows(&self.x[first * inputs..][..rows * inputs], inputs);
            d_weight = d_weight.add([inputs, rows, outputs], x.transposed(), dz);
        }
    }
}

/// What one part of the rows gives to the gradients of weight and bias, and memory for a block of `dz` where that is not `dy`.
struct Sums {
    weight: Fresh,
    bias: Vec<f32>,
    dz: Fresh,
}

/// A sum of products.
enum Sum<'a> {
    Empty(&'a mut [MaybeUninit<f32>]),
    Some(&'a mut [f32]),
}

impl Sum<'_> {
    fn add(self, sizes: [usize; 3], a: Matrix<'_>, b: Matrix<'_>) -> Self {
        Self::Some(match self {
            Self::Empty(to) => product(sizes, a, b, to),
            Self::Some(to) => {
                add_product(sizes, a, b, to);
                to
            }
        })
    }
}
