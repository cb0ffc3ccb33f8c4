//! The feed-forward part of a block: `y = x + dropout(f(norm(x)·W₁ + b₁)·W₂ + b₂)`, with or without norm and residual `x`.
//!
//! Gated (Shazeer 2020; with SiLU known as SwiGLU), `W₁` has two columns for each row of `W₂`: `f(a) ⊙ b` for `[a, b] = n·W₁ + b₁`.
//!
//! Rows are taken a block at a time: all between `x` and `y` stands in a cache, and only the sums `n·W₁ + b₁` are kept for the
//! backward, or nothing. What a backward is not given it forms again.

use std::mem::MaybeUninit;

use super::activation::{Activate, Activation, Gate, Revisit, RevisitGate};
use super::dropout::Dropout;
use super::linear::{ROWS, block_of, drop_and_add, memory, normed, part_of};
use super::norm::NormWeights;
use super::products::{Fresh, Matrix, WeightGradient, add_rows, cut, product, sum_parts, transposed, upright};
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::simd::dispatch;
use longspan_core::threads::share_memory;

/// What a linear layer has learned.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// `[inputs, outputs]`.
    pub weight: &'a [f32],
    /// `[outputs]`.
    pub bias: Option<&'a [f32]>,
}

impl Weights<'_> {
    pub(super) fn check(&self, operation: &'static str, name: &'static str, sizes: [usize; 2]) -> Result<(), Error> {
        let [inputs, outputs] = sizes;
        let got = self.weight.len();
        let fits = inputs.checked_mul(outputs) == Some(got);
        expect(fits, operation, name, || format!("{inputs} × {outputs} numbers"), || got.to_string())?;
        let got = self.bias.map_or(outputs, <[f32]>::len);
        expect(got == outputs, operation, name, || format!("a bias of {outputs} numbers"), || got.to_string())
    }
}

/// One call of a feed-forward part.
#[derive(Debug, Clone, Copy)]
pub struct FeedForward<'a> {
    /// `[rows, width]`.
    pub x: &'a [f32],
    /// Numbers of a row.
    pub width: usize,
    /// Numbers of a row between the two layers.
    pub hidden: usize,
    /// The norm of `x` that is multiplied, if not `x` itself.
    pub norm: Option<NormWeights<'a>>,
    /// `W₁` and `b₁`: to `hidden` columns, or twice as many if gated.
    pub inner: Weights<'a>,
    /// `f`.
    pub activation: Activation,
    /// Whether the second half of the sums multiplies the activations of the first.
    pub gated: bool,
    /// `W₂` and `b₂`: from `hidden` to `width`.
    pub outer: Weights<'a>,
    /// What it drops of the second layer's results.
    pub dropout: Option<Dropout>,
    /// Whether `x` is added.
    pub residual: bool,
}

/// The gradients of a call. Without a norm those of `γ` and `β` are empty.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForwardGradients {
    /// `[rows, width]`, that by the residual included.
    pub dx: Vec<f32>,
    /// Of `γ` and `β`, `[width]` each.
    pub d_norm: [Vec<f32>; 2],
    /// Of `W₁` and `b₁`.
    pub d_inner: [Vec<f32>; 2],
    /// Of `W₂` and `b₂`.
    pub d_outer: [Vec<f32>; 2],
}

const OPERATION: &str = "feed_forward";

impl FeedForward<'_> {
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { width, hidden, .. } = *self;
        let got = self.x.len();
        let rows = width > 0 && hidden > 0 && got.is_multiple_of(width);
        expect(rows, OPERATION, "x", || format!("rows of {width} numbers, at least 1"), || got.to_string())?;
        self.norm.map_or(Ok(()), |norm| norm.check(OPERATION, width))?;
        let columns = hidden.saturating_mul(1 + usize::from(self.gated));
        self.inner.check(OPERATION, "inner", [width, columns])?;
        self.outer.check(OPERATION, "outer", [hidden, width])
    }

    /// Numbers of a row of sums.
    pub(super) fn columns(&self) -> usize {
        self.hidden * (1 + usize::from(self.gated))
    }

    /// The result, `[rows, width]`.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn forward(&self) -> Result<Vec<f32>, Error> {
        self.run(false).map(|(out, _)| out)
    }

    /// The result and the sums of the first layer, which [`backward`](Self::backward) takes if it is given them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn training(&self) -> Result<(Vec<f32>, Vec<f32>), Error> {
        self.run(true)
    }

    fn run(&self, keep: bool) -> Result<(Vec<f32>, Vec<f32>), Error> {
        self.check()?;
        let rows = self.x.len() / self.width;
        let mut out = Fresh::new(self.x.len())?;
        let mut sums = Fresh::new(if keep { rows * self.columns() } else { 0 })?;
        if rows > 0 {
            let block = block_of(rows);
            let pieces = self.pieces(block, keep);
            let piece = pieces.iter().sum();
            let mut kept = sums.room().chunks_mut(block * self.columns());
            let tasks: Vec<_> = out.room().chunks_mut(block * self.width).map(|out| (out, kept.next())).collect();
            let mut memory = memory(tasks.len(), piece)?;
            share_memory(tasks.into_iter().enumerate(), memory.room(), piece, |(n, (out, sums)), memory| {
                self.rows_of(n * block, out, sums, cut(memory, pieces));
            });
        }
        // SAFETY: every block wrote all of its numbers.
        unsafe { Ok((out.written(), sums.written())) }
    }

    /// Memory of a forward's block: the norms, the sums where they are not kept, and the activations where they do not take the
    /// place of the sums.
    fn pieces(&self, rows: usize, keep: bool) -> [usize; 3] {
        let Self { width, hidden, .. } = *self;
        [
            if self.norm.is_some() { rows * width } else { 0 },
            if keep { 0 } else { rows * self.columns() },
            if keep || self.gated { rows * hidden } else { 0 },
        ]
    }

    /// The rows from `first` on.
    fn rows_of(
        &self,
        first: usize,
        out: &mut [MaybeUninit<f32>],
        kept: Option<&mut [MaybeUninit<f32>]>,
        [norms, sums, activations]: [&mut [MaybeUninit<f32>]; 3],
    ) {
        let Self { width, hidden, activation, .. } = *self;
        let (rows, columns) = (out.len() / width, self.columns());
        let x = &self.x[first * width..][..rows * width];
        let keeps = kept.is_some();
        let sums = kept.unwrap_or(sums);
        let sums = self.sums(normed(self.norm, x, norms), &mut sums[..rows * columns]);
        let bias = self.inner.bias;
        let activations: &[f32] = if self.gated || keeps {
            let to = &mut activations[..rows * hidden];
            if self.gated {
                dispatch(Gate { activation, sums, bias, width: hidden, to });
            } else {
                dispatch(Activate { activation, sums, bias, width: hidden, to: Some(&mut *to) });
            }
            // SAFETY: every number has been written.
            unsafe { to.assume_init_mut() }
        } else {
            dispatch(Activate { activation, sums, bias, width: hidden, to: None });
            sums
        };
        let (a, weight) = (Matrix::rows(activations, hidden), Matrix::rows(self.outer.weight, width));
        let out = product([rows, hidden, width], a, weight, out);
        add_bias(self.outer.bias, width, out);
        drop_and_add(first * width, self.dropout, self.residual.then_some(x), out);
    }

    /// `n·W₁`.
    fn sums<'s>(&self, n: &[f32], to: &'s mut [MaybeUninit<f32>]) -> &'s mut [f32] {
        let columns = self.columns();
        let sizes = [n.len() / self.width, self.width, columns];
        product(sizes, Matrix::rows(n, self.width), Matrix::rows(self.inner.weight, columns), to)
    }

    /// The gradients, from that of the result and the sums that [`training`](Self::training) gave, or none to form them again.
    ///
    /// # Errors
    /// Lengths that do not fit, and memory that is not there.
    pub fn backward(&self, sums: Option<&[f32]>, d_out: &[f32]) -> Result<FeedForwardGradients, Error> {
        self.check()?;
        let Self { width, hidden, .. } = *self;
        let (rows, columns) = (self.x.len() / width, self.columns());
        for (name, got, of) in
            [("sums", sums.map_or(rows * columns, <[f32]>::len), columns), ("d_out", d_out.len(), width)]
        {
            expect(got == rows * of, OPERATION, name, || format!("{rows} × {of} numbers"), || got.to_string())?;
        }
        // What one part of the rows sums up: gradients of both weights, and of all rows of learned numbers.
        let [inner, outer] = [width * columns, hidden * width];
        let row = columns + if self.norm.is_some() { 3 * width } else { width };
        let part = part_of(rows).max(1);
        let parts = rows.div_ceil(part);
        let block = ROWS.min(part);
        let mut dx = Fresh::new(self.x.len())?;
        let mut totals = Vec::new();
        for _ in 0..parts {
            totals.push((Fresh::new(inner + outer)?, vec![0.0; row]));
        }
        let pieces = [
            if self.norm.is_some() { block * width } else { 0 },
            if sums.is_some() { 0 } else { block * columns },
            block * hidden,
            block * hidden,
            if self.gated { block * columns } else { 0 },
            if self.dropout.is_some() { block * width } else { 0 },
        ];
        let piece = pieces.iter().sum();
        // Of no rows there are no parts, but sums of zeros.
        let mut memory = memory(parts.max(1), piece)?;
        let turned_inner = transposed(self.inner.weight, columns, [width, columns])?;
        let turned_outer = transposed(self.outer.weight, width, [hidden, width])?;
        let turned = [&*turned_inner, &*turned_outer];
        let tasks: Vec<_> = dx.room().chunks_mut(part * width).zip(&mut totals).enumerate().collect();
        share_memory(tasks.into_iter(), memory.room(), piece, |(n, (dx, (weights, row))), memory| {
            self.pull_back(n * part, (sums, d_out, turned), dx, (weights.room(), row), cut(memory, pieces));
        });
        // SAFETY: every part wrote all of its numbers.
        let totals = sum_parts(totals.into_iter().map(|(weights, row)| (unsafe { weights.written() }, row)));
        let (mut d_inner, mut rest) = totals.unwrap_or_else(|| (vec![0.0; inner + outer], vec![0.0; row]));
        let d_outer = upright(d_inner.split_off(inner), [hidden, width])?;
        let d_inner = upright(d_inner, [width, columns])?;
        let mut tail = |len: usize| rest.split_off(rest.len() - len);
        let normed = if self.norm.is_some() { width } else { 0 };
        let (d_beta, d_gamma, d_outer_bias) = (tail(normed), tail(normed), tail(width));
        Ok(FeedForwardGradients {
            // SAFETY: as above.
            dx: unsafe { dx.written() },
            d_norm: [d_gamma, d_beta],
            d_inner: [d_inner, rest],
            d_outer: [d_outer, d_outer_bias],
        })
    }

    /// The rows of `dx` from `first` on, and what they give to the gradients of the weights and, one after the other, of `b₁`, `b₂`,
    /// `γ` and `β`. The last of what it is given are `W₁ᵀ` and `W₂ᵀ`.
    fn pull_back(
        &self,
        first: usize,
        (kept, d_out, [inner, outer]): (Option<&[f32]>, &[f32], [&[f32]; 2]),
        dx: &mut [MaybeUninit<f32>],
        (weights, row): (&mut [MaybeUninit<f32>], &mut [f32]),
        [norms, sums, activations, slopes, gated, dropped]: [&mut [MaybeUninit<f32>]; 6],
    ) {
        let Self { width, hidden, activation, .. } = *self;
        let columns = self.columns();
        let (d_inner, d_outer) = weights.split_at_mut(width * columns);
        let mut d_inner = WeightGradient::new(d_inner, [width, columns]);
        let mut d_outer = WeightGradient::new(d_outer, [hidden, width]);
        let (inner, outer) = (Matrix::rows(inner, width), Matrix::rows(outer, hidden));
        let (d_inner_bias, row) = row.split_at_mut(columns);
        let (d_outer_bias, d_norm) = row.split_at_mut(width);
        for (n, dx) in dx.chunks_mut(ROWS * width).enumerate() {
            let rows = dx.len() / width;
            let first = first + n * ROWS;
            let range = first * width..(first + rows) * width;
            let (x, d_out) = (&self.x[range.clone()], &d_out[range.clone()]);
            let d = match self.dropout {
                None => d_out,
                Some(dropout) => {
                    let own = dropped[..d_out.len()].write_copy_of_slice(d_out);
                    dropout.apply(range.start, own);
                    own
                }
            };
            let n = normed(self.norm, x, norms);
            let sums = match kept {
                Some(sums) => &sums[first * columns..][..rows * columns],
                None => {
                    let sums = self.sums(n, &mut sums[..rows * columns]);
                    add_bias(self.inner.bias, columns, sums);
                    sums
                }
            };
            let to = &mut slopes[..rows * hidden];
            let slopes = product([rows, width, hidden], Matrix::rows(d, width), outer, to);
            let to = &mut activations[..rows * hidden];
            let d_sums: &[f32] = if self.gated {
                let d_sums = &mut gated[..rows * columns];
                dispatch(RevisitGate {
                    activation,
                    sums,
                    width: hidden,
                    d: slopes,
                    d_sums: &mut *d_sums,
                    to: &mut *to,
                });
                // SAFETY: every number has been written.
                unsafe { d_sums.assume_init_mut() }
            } else {
                dispatch(Revisit { activation, sums, d: &mut *slopes, to: &mut *to });
                slopes
            };
            // SAFETY: every number has been written.
            d_outer.add(rows, unsafe { to.assume_init_ref() }, d);
            add_rows(d, d_outer_bias);
            d_inner.add(rows, n, d_sums);
            add_rows(d_sums, d_inner_bias);
            let dx = product([rows, columns, width], Matrix::rows(d_sums, columns), inner, dx);
            if let Some(norm) = self.norm {
                norm.pull_back(x, dx, d_norm.split_at_mut(width).into());
            }
            if self.residual {
                add_scaled(dx, 1.0, d_out);
            }
        }
    }
}

/// Adds a bias to rows of `width` numbers.
pub(super) fn add_bias(bias: Option<&[f32]>, width: usize, rows: &mut [f32]) {
    if bias.is_some() {
        dispatch(Activate { activation: Activation::Identity, sums: rows, bias, width, to: None });
    }
}
