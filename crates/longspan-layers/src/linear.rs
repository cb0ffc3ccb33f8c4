//! A linear layer with the norm before it and what follows it: `y = residual + dropout(f(norm(x)·W + b))`.
//!
//! Rows are taken a block at a time, so that norm, bias, activation, dropout and residual find their numbers in a cache. Backward,
//! with `n = norm(x)`, `z = n·W + b` and `dz = dropout(dy) ⊙ f′(z)`: `dn = dz·Wᵀ`, `dW = nᵀ·dz`, `db = Σ dz`, and the residual's
//! gradient is `dy`. `n` is formed anew from `x`, and neither `n` nor `dz` is ever held whole.

use std::mem::MaybeUninit;

use super::activation::{Activate, Activation, PullBack};
use super::dropout::Dropout;
use super::norm::NormWeights;
use super::products::{Fresh, Matrix, WeightGradient, add_rows, product, sum_parts, transposed, upright};
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::simd::dispatch;
use longspan_core::threads::{count, share_memory};

/// Rows of a block: 512 × 1,024 numbers are 2 MiB, about a second-level cache; fewer would bring `W` into the product's own
/// order more often.
pub(super) const ROWS: usize = 512;

/// Parts of the rows that each have a sum of `dW` of their own.
const PARTS: usize = 8;

/// Rows that a forward takes at a time.
pub(super) fn block_of(rows: usize) -> usize {
    rows.div_ceil(PARTS).next_multiple_of(32).min(ROWS)
}

/// Rows of a part of a backward: cut by sizes alone, so that sums have the same order on any number of threads.
pub(super) fn part_of(rows: usize) -> usize {
    rows.div_ceil((rows / ROWS).clamp(1, PARTS))
}

/// Memory of which each thread takes a piece, so long, for up to so many tasks.
pub(super) fn memory(tasks: usize, piece: usize) -> Result<Fresh, Error> {
    Fresh::new(piece * tasks.min(count()))
}

/// One call of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `[rows, inputs]`.
    pub x: &'a [f32],
    /// The norm of `x` that is multiplied, if not `x` itself.
    pub norm: Option<NormWeights<'a>>,
    /// `[inputs, outputs]`, in rows that begin `stride` numbers apart.
    pub weight: &'a [f32],
    /// `outputs`, or more if these are some columns of a larger weight.
    pub stride: usize,
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
    /// Those of the norm's `γ` and `β`, `[inputs]` each; empty without a norm.
    pub d_norm: [Vec<f32>; 2],
}

const OPERATION: &str = "linear";

impl<'a> Linear<'a> {
    /// `x·W`.
    pub fn new(x: &'a [f32], weight: &'a [f32], [rows, inputs, outputs]: [usize; 3]) -> Self {
        let activation = Activation::Identity;
        let (norm, bias, dropout, residual) = (None, None, None, None);
        Self { x, norm, weight, stride: outputs, bias, rows, inputs, outputs, activation, dropout, residual }
    }

    /// Of the norm of `x`.
    pub fn with_norm(self, norm: Option<NormWeights<'a>>) -> Self {
        Self { norm, ..self }
    }

    /// By some columns of a larger weight, in whose rows so many numbers stand; the weight begins at the first of the columns.
    pub fn with_stride(self, stride: usize) -> Self {
        Self { stride, ..self }
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
        let last = inputs.checked_sub(1).map_or(Some(0), |rows| rows.checked_mul(self.stride)?.checked_add(outputs));
        let (stride, got) = (self.stride, self.weight.len());
        let fits = stride >= outputs && last.is_some_and(|last| last <= got) && (stride > outputs || last == Some(got));
        let expected = || format!("{inputs} × {outputs} numbers, rows {stride} apart");
        expect(fits, OPERATION, "weight", expected, || got.to_string())?;
        self.norm.map_or(Ok(()), |norm| norm.check(OPERATION, inputs))?;
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

    fn run(&self, keep: bool) -> Result<(Vec<f32>, Kept), Error> {
        self.check()?;
        let len = self.rows * self.outputs;
        let mut out = Fresh::new(len)?;
        let mut sums = Fresh::new(if keep { len } else { 0 })?;
        if len > 0 {
            let block = block_of(self.rows);
            let mut kept = sums.room().chunks_mut(block * self.outputs);
            let tasks: Vec<_> = out.room().chunks_mut(block * self.outputs).map(|out| (out, kept.next())).collect();
            let piece = if self.norm.is_some() { block * self.inputs } else { 0 };
            let mut memory = memory(tasks.len(), piece)?;
            share_memory(tasks.into_iter().enumerate(), memory.room(), piece, |(n, (out, sums)), memory| {
                self.rows_of(n * block, out, sums, memory);
            });
        }
        // SAFETY: every block wrote all of its numbers.
        unsafe { Ok((out.written(), if keep { Kept::Sums(sums.written()) } else { Kept::Result })) }
    }

    /// What rows from `first` on are multiplied: their norms, in `memory`, or themselves.
    fn factors<'m>(&self, first: usize, rows: usize, memory: &'m mut [MaybeUninit<f32>]) -> &'m [f32]
    where
        'a: 'm,
    {
        normed(self.norm, &self.x[first * self.inputs..][..rows * self.inputs], memory)
    }

    /// The rows from `first` on.
    fn rows_of(
        &self,
        first: usize,
        out: &mut [MaybeUninit<f32>],
        sums: Option<&mut [MaybeUninit<f32>]>,
        memory: &mut [MaybeUninit<f32>],
    ) {
        let Self { inputs, outputs, activation, bias, .. } = *self;
        let rows = out.len() / outputs;
        let x = Matrix::rows(self.factors(first, rows, memory), inputs);
        let sizes = [rows, inputs, outputs];
        let weight = Matrix::rows(self.weight, self.stride);
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
        let residual = self.residual.map(|residual| &residual[first * outputs..][..rows * outputs]);
        drop_and_add(first * outputs, self.dropout, residual, out);
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
            let (mut d_bias, mut dz) = (zeros(outputs), d_out.to_vec());
            self.pull_back_slopes(0, at, &mut dz);
            add_rows(&dz, &mut d_bias);
            let d_norm = [(); 2].map(|()| zeros(if self.norm.is_some() { inputs } else { 0 }));
            return Ok(LinearGradients { dx: zeros(rows * inputs), d_weight: zeros(inputs * outputs), d_bias, d_norm });
        }
        let part = part_of(rows);
        let parts = rows.div_ceil(part);
        let mut dx = Fresh::new(rows * inputs)?;
        let plain = self.activation == Activation::Identity && self.dropout.is_none();
        let block = ROWS.min(part);
        let pieces = [if self.norm.is_some() { block * inputs } else { 0 }, if plain { 0 } else { block * outputs }];
        let normed = if self.norm.is_some() { inputs } else { 0 };
        let mut sums = Vec::new();
        for _ in 0..parts {
            sums.push((Fresh::new(inputs * outputs)?, vec![0.0; outputs + 2 * normed]));
        }
        let turned = transposed(self.weight, self.stride, [inputs, outputs])?;
        let tasks: Vec<_> = dx.room().chunks_mut(part * inputs).zip(&mut sums).enumerate().collect();
        let piece = pieces[0] + pieces[1];
        let mut memory = memory(parts, piece)?;
        share_memory(tasks.into_iter(), memory.room(), piece, |(n, (dx, (d_weight, row))), memory| {
            let memory = memory.split_at_mut(pieces[0]).into();
            self.pull_back(n * part, (at, d_out, &turned), dx, (d_weight.room(), row), memory);
        });
        // SAFETY: every part wrote all of its numbers.
        let sums = sum_parts(sums.into_iter().map(|(weight, row)| (unsafe { weight.written() }, row)));
        let (d_weight, mut d_bias) = sums.unwrap_or_default();
        let d_weight = upright(d_weight, [inputs, outputs])?;
        let d_beta = d_bias.split_off(outputs + normed);
        let d_norm = [d_bias.split_off(outputs), d_beta];
        // SAFETY: as above.
        Ok(LinearGradients { dx: unsafe { dx.written() }, d_weight, d_bias, d_norm })
    }

    /// From gradients of results, the first at the place `first`, to those of their sums.
    fn pull_back_slopes(&self, first: usize, at: &[f32], d: &mut [f32]) {
        if let Some(dropout) = self.dropout {
            dropout.apply(first, d);
        }
        dispatch(PullBack { activation: self.activation, at, d });
    }

    /// The rows of `dx` from `first` on, and what they give to the gradients of the weight and, one after the other, of bias, `γ`
    /// and `β`. `turned` is `Wᵀ`.
    fn pull_back(
        &self,
        first: usize,
        (at, d_out, turned): (&[f32], &[f32], &[f32]),
        dx: &mut [MaybeUninit<f32>],
        (d_weight, row): (&mut [MaybeUninit<f32>], &mut [f32]),
        [normed, slopes]: [&mut [MaybeUninit<f32>]; 2],
    ) {
        let Self { inputs, outputs, .. } = *self;
        let (d_bias, d_norm) = row.split_at_mut(outputs);
        let mut d_weight = WeightGradient::new(d_weight, [inputs, outputs]);
        for (n, dx) in dx.chunks_mut(ROWS * inputs).enumerate() {
            let rows = dx.len() / inputs;
            let first = first + n * ROWS;
            let range = first * outputs..(first + rows) * outputs;
            let mut dz = &d_out[range.clone()];
            if !slopes.is_empty() {
                let own = slopes[..dz.len()].write_copy_of_slice(dz);
                self.pull_back_slopes(range.start, &at[range], own);
                dz = own;
            }
            add_rows(dz, d_bias);
            d_weight.add(rows, self.factors(first, rows, normed), dz);
            let sizes = [rows, outputs, inputs];
            let dx = product(sizes, Matrix::rows(dz, outputs), Matrix::rows(turned, inputs), dx);
            if let Some(norm) = self.norm {
                norm.pull_back(&self.x[first * inputs..][..rows * inputs], dx, d_norm.split_at_mut(inputs).into());
            }
        }
    }
}

/// What rows are multiplied: their norms, in `memory`, or themselves.
pub(super) fn normed<'m>(norm: Option<NormWeights<'_>>, x: &'m [f32], memory: &'m mut [MaybeUninit<f32>]) -> &'m [f32] {
    match norm {
        None => x,
        Some(norm) => norm.normalize(x, &mut memory[..x.len()]),
    }
}

/// Drops from a result, of which the first number has the place `first`, and adds the residual.
pub(super) fn drop_and_add(first: usize, dropout: Option<Dropout>, residual: Option<&[f32]>, out: &mut [f32]) {
    if let Some(dropout) = dropout {
        dropout.apply(first, out);
    }
    if let Some(residual) = residual {
        add_scaled(out, 1.0, residual);
    }
}
