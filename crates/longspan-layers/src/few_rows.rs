//! Products of one row or a few with a weight, as fast as the weight can be read: what a token costs.

use std::mem::MaybeUninit;

use super::activation::{Activate, Activation, Gate};
use super::feed_forward::{FeedForward, Weights, add_bias};
use super::gated_norm::Gates;
use super::multi_head::MultiHead;
use super::norm::{NormWeights, check_as_x};
use super::products::{Matrix, cut, product};
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::simd::rows::{load_part, store_part};
use longspan_core::simd::{dispatch, operation};
use longspan_core::threads::share_many;
use longspan_kernels::{Call, Dims, Output, Scratch, State, Token, View};

/// Rows up to which a weight is read row by row; of more, blocks of it serve several.
const FEW: usize = 4;

/// Columns of a task.
const COLUMNS: usize = 256;

/// `out = x·W + b` for `x` `[rows, inputs]`, with weights in rows of `stride` numbers that begin at the first column. Of up to `few` rows
/// each is multiplied alone, which rounds otherwise than a block.
fn multiply(x: &[f32], inputs: usize, weights: Weights<'_>, stride: usize, few: usize, out: &mut [f32]) {
    let rows = x.len() / inputs;
    let outputs = out.len() / rows.max(1);
    if rows <= few {
        by_parts(x, inputs, weights.bias, out, |x, first, bias, out| {
            dispatch(RowProduct { x, weight: &weights.weight[first..], stride, bias, out });
        });
        return;
    }
    // SAFETY: numbers are as good as numbers that are not there yet, and the product writes no others.
    let fresh = unsafe { &mut *(std::ptr::from_mut(out) as *mut [MaybeUninit<f32>]) };
    let out = product([rows, inputs, outputs], Matrix::rows(x, inputs), Matrix::rows(weights.weight, stride), fresh);
    add_bias(weights.bias, outputs, out);
}

/// Calls `part(x, first, bias, out)` for parts of the results of each row `x` of `inputs` numbers, with the first column of the part
/// and its biases.
fn by_parts(
    x: &[f32],
    inputs: usize,
    bias: Option<&[f32]>,
    out: &mut [f32],
    part: impl Fn(&[f32], usize, Option<&[f32]>, &mut [f32]) + Sync,
) {
    let outputs = out.len() / (x.len() / inputs).max(1);
    for (x, out) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs.max(1))) {
        share_many(inputs * outputs, out.chunks_mut(COLUMNS).enumerate(), |(n, out)| {
            let first = n * COLUMNS;
            part(x, first, bias.map(|bias| &bias[first..][..out.len()]), out);
        });
    }
}

/// Rows of the weight that are read at a time: as many as there are fused products for one pass over the sums.
const DEPTH: usize = 8;

// `out = x·W + b` of one row.
operation!(RowProduct, f32, |x: &'a [f32],
                             weight: &'a [f32],
                             stride: usize,
                             bias: Option<&'a [f32]>,
                             out: &'a mut [f32]| {
    match bias {
        Some(bias) => out.copy_from_slice(bias),
        None => out.fill(0.0),
    }
    let width = out.len();
    let mut rows = x.chunks_exact(DEPTH);
    let mut first = 0;
    for x in &mut rows {
        let weight: [&[f32]; DEPTH] = std::array::from_fn(|n| &weight[(first + n) * stride..][..width]);
        first += DEPTH;
        // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
        unsafe {
            let x: [V; DEPTH] = std::array::from_fn(|n| V::splat(x[n]));
            for column in (0..width).step_by(V::LANES) {
                // Two sums hide a part of the latency.
                let (mut even, mut odd) = (load_part::<V>(out, column), V::splat(0.0));
                for n in (0..DEPTH).step_by(2) {
                    even = load_part::<V>(weight[n], column).mul_add(x[n], even);
                    odd = load_part::<V>(weight[n + 1], column).mul_add(x[n + 1], odd);
                }
                store_part(even.add(odd), out, column);
            }
        }
    }
    for &x in rows.remainder() {
        add_scaled(out, x, &weight[first * stride..][..width]);
        first += 1;
    }
});

/// Rows of the weight that a register of `x` meets.
const DOTS: usize = 4;

// `out = x·Wᵀ + b` of one row.
operation!(RowDots, f32, |x: &'a [f32], weight: &'a [f32], bias: Option<&'a [f32]>, out: &'a mut [f32]| {
    let width = x.len();
    for (part, out) in out.chunks_mut(DOTS).enumerate() {
        let first = part * DOTS;
        // Of the last few rows one stands in for those that are not there.
        let weight: [&[f32]; DOTS] =
            std::array::from_fn(|n| &weight[(first + n.min(out.len() - 1)) * width..][..width]);
        // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
        let sums = unsafe {
            let mut sums = [V::splat(0.0); DOTS];
            for column in (0..width).step_by(V::LANES) {
                let x = load_part::<V>(x, column);
                for (sum, weight) in sums.iter_mut().zip(weight) {
                    *sum = load_part::<V>(weight, column).mul_add(x, *sum);
                }
            }
            sums.map(|sum| sum.sum())
        };
        for (n, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
            *out = sum + bias.map_or(0.0, |bias| bias[first + n]);
        }
    }
});

fn normed<'m>(norm: Option<NormWeights<'_>>, x: &'m [f32], memory: &'m mut [f32]) -> &'m [f32] {
    match norm {
        None => x,
        Some(norm) => {
            norm.normalize_to(x, memory);
            memory
        }
    }
}

/// Working memory of steps, which grows to what the largest so far needed: tokens after the first allocate nothing.
#[derive(Debug)]
pub struct StepBuffers {
    numbers: Vec<f32>,
    few: usize,
}

impl Default for StepBuffers {
    /// For the fastest steps, whose last bits depend on how many rows there are.
    fn default() -> Self {
        Self { numbers: Vec::new(), few: FEW }
    }
}

impl StepBuffers {
    /// For steps that give each row the same bits, whatever rows are beside it.
    pub fn independent() -> Self {
        Self { few: 0, ..Self::default() }
    }

    fn take<const N: usize>(&mut self, pieces: [usize; N]) -> [&mut [f32]; N] {
        let all = pieces.iter().sum();
        if self.numbers.len() < all {
            self.numbers.resize(all, 0.0);
        }
        cut(&mut self.numbers, pieces)
    }
}

impl MultiHead<'_> {
    /// One token of each sequence: takes it into `state` and writes its row of [`forward`](Self::forward) under a causal mask.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); more than one query, a memory, dropout.
    pub fn step(&self, state: &mut State<f32>, buffers: &mut StepBuffers, out: &mut [f32]) -> Result<(), Error> {
        const OPERATION: &str = "multi_head step";
        self.check()?;
        check_as_x(OPERATION, "out", self.x, out)?;
        let one = self.queries == 1 && self.memory.is_none() && self.dropout.is_none();
        let expected = || "one token, no memory, no dropout".into();
        expect(one, OPERATION, "x", expected, || format!("{} tokens", self.queries))?;
        let width = self.width();
        let columns = self.columns();
        let [q, z, k, v] = self.parts().map(|[heads, width]| heads * width);
        let batch = self.batch;
        let few = buffers.few;
        let [norms, own_q, own_z, own_k, own_v, heads] =
            buffers.take([batch * width, batch * q, batch * z, batch * k, batch * v, batch * width]);
        let n = normed(self.norm, self.x, norms);
        let Weights { weight, bias } = self.projection;
        let mut first = 0;
        let parts = [(&mut *own_q, q), (&mut *own_z, z), (&mut *own_k, k), (&mut *own_v, v)];
        for (to, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
            let part =
                Weights { weight: &weight[first.min(weight.len())..], bias: bias.map(|bias| &bias[first..][..len]) };
            multiply(n, width, part, columns, few, to);
            first += len;
        }
        let token = Token { q: own_q, k: own_k, v: own_v, parameters: self.parameters };
        self.kernel.step(&token, state, heads)?;
        self.write_results(heads, Gates { numbers: own_z, stride: width }, few, out);
        Ok(())
    }

    fn write_results(&self, heads: &mut [f32], gate: Gates<'_>, few: usize, out: &mut [f32]) {
        let width = self.width();
        if let Some(norm) = self.gated_norm {
            norm.apply(heads, gate, self.head_dim);
        }
        multiply(heads, width, self.output, width, few, out);
        if self.residual {
            add_scaled(out, 1.0, self.x);
        }
    }
}

/// Keys and values that have been projected, for queries that come later.
#[derive(Debug, Clone, Copy)]
pub struct Projected<'a> {
    /// `[batch, kv_heads, keys, key_dim]`.
    pub k: View<'a, f32>,
    /// `[batch, kv_heads, keys, head_dim]`.
    pub v: View<'a, f32>,
    /// Keys of each batch entry.
    pub keys: usize,
    /// As [`Call::outside`].
    pub outside: Option<[&'a State<f32>; 2]>,
}

impl MultiHead<'_> {
    /// The results of a few rows of queries that see keys and values which have been projected. The call's own memory and initial state
    /// are not looked at.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); dropout.
    pub fn recall(
        &self,
        memory: &Projected<'_>,
        scratch: &mut Scratch<f32>,
        buffers: &mut StepBuffers,
        out: &mut [f32],
    ) -> Result<(), Error> {
        const OPERATION: &str = "multi_head recall";
        Self { memory: None, ..*self }.check()?;
        check_as_x(OPERATION, "out", self.x, out)?;
        expect(self.dropout.is_none(), OPERATION, "dropout", || "none".into(), || "some".into())?;
        let width = self.width();
        let few = buffers.few;
        let columns = self.query_columns();
        let rows = self.x.len() / width;
        let [norms, own, heads] = buffers.take([self.x.len(), rows * columns, self.x.len()]);
        let n = normed(self.norm, self.x, norms);
        let Weights { weight, bias } = self.projection;
        multiply(n, width, Weights { weight, bias: bias.map(|bias| &bias[..columns]) }, self.columns(), few, own);
        let dims = Dims { keys: memory.keys, ..self.dims() };
        let call =
            Call::new(dims, View::strided(own, [self.queries * columns, self.head_dim, columns]), memory.k, memory.v)
                .with_mask(self.mask)
                .with_parameters(self.parameters);
        let call = memory.outside.map_or(call, |outside| call.with_outside(outside));
        self.kernel.forward(&call, Output::new(self.token_major(heads)), scratch)?;
        self.write_results(heads, Gates { numbers: &own[width.min(own.len())..], stride: columns }, few, out);
        Ok(())
    }
}

impl FeedForward<'_> {
    /// [`forward`](Self::forward) of a few rows, in memory that is there.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); dropout.
    pub fn step(&self, buffers: &mut StepBuffers, out: &mut [f32]) -> Result<(), Error> {
        const OPERATION: &str = "feed_forward step";
        self.check()?;
        check_as_x(OPERATION, "out", self.x, out)?;
        expect(self.dropout.is_none(), OPERATION, "dropout", || "none".into(), || "some".into())?;
        let (rows, columns) = (self.x.len() / self.width, self.columns());
        let few = buffers.few;
        let [norms, sums, gated] =
            buffers.take([self.x.len(), rows * columns, if self.gated { rows * self.hidden } else { 0 }]);
        let n = normed(self.norm, self.x, norms);
        multiply(n, self.width, self.inner, columns, few, sums);
        let (activation, width) = (self.activation, self.hidden);
        let activations: &[f32] = if self.gated {
            // SAFETY: numbers are as good as numbers that are not there yet, and the operation writes no others.
            let to = unsafe { &mut *(std::ptr::from_mut(&mut *gated) as *mut [MaybeUninit<f32>]) };
            dispatch(Gate { activation, sums, bias: None, width, to });
            gated
        } else {
            dispatch(Activate { activation, sums, bias: None, width, to: None });
            sums
        };
        multiply(activations, self.hidden, self.outer, self.width, few, out);
        if self.residual {
            add_scaled(out, 1.0, self.x);
        }
        Ok(())
    }
}

impl NormWeights<'_> {
    /// The norm of a few rows, in memory that is there.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn step(&self, x: &[f32], out: &mut [f32]) -> Result<(), Error> {
        let width = self.gamma.len();
        self.check("norm", width)?;
        let rows = width > 0 && x.len().is_multiple_of(width);
        expect(rows, "norm", "x", || format!("rows of {width} numbers"), || format!("{} numbers", x.len()))?;
        check_as_x("norm", "out", x, out)?;
        self.normalize_to(x, out);
        Ok(())
    }
}

impl Weights<'_> {
    /// Checks the sizes of a step, and gives the numbers of a row of its results.
    fn check_step(&self, x: &[f32], inputs: usize, out: &[f32]) -> Result<usize, Error> {
        const OPERATION: &str = "linear";
        let rows = inputs > 0 && x.len().is_multiple_of(inputs);
        expect(rows, OPERATION, "x", || format!("rows of {inputs} numbers"), || format!("{} numbers", x.len()))?;
        let outputs = self.weight.len() / inputs;
        self.check(OPERATION, "weight", [inputs, outputs])?;
        let len = x.len() / inputs * outputs;
        expect(out.len() == len, OPERATION, "out", || format!("{len} numbers"), || out.len().to_string())?;
        Ok(outputs)
    }

    /// `out = x·W + b` for a few rows of `inputs` numbers.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn step(&self, x: &[f32], inputs: usize, out: &mut [f32]) -> Result<(), Error> {
        let outputs = self.check_step(x, inputs, out)?;
        if outputs > 0 {
            multiply(x, inputs, *self, outputs, FEW, out);
        }
        Ok(())
    }

    /// The same with the weight transposed, `[outputs, inputs]`, as PyTorch stores it.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn step_transposed(&self, x: &[f32], inputs: usize, out: &mut [f32]) -> Result<(), Error> {
        self.check_step(x, inputs, out)?;
        by_parts(x, inputs, self.bias, out, |x, first, bias, out| {
            dispatch(RowDots { x, weight: &self.weight[first * inputs..], bias, out });
        });
        Ok(())
    }
}

impl Activation {
    /// Replaces each number by its activation.
    pub fn step(self, x: &mut [f32]) {
        let width = x.len();
        if width > 0 {
            dispatch(Activate { activation: self, sums: x, bias: None, width, to: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_number_and_width_are_multiplied() {
        for [rows, inputs, outputs] in [[1, 1, 1], [1, 17, 300], [3, 24, 70], [5, 9, 600], [1, 600, 700]] {
            let number = |n: usize| ((n * 7919) % 23) as f32 / 8.0 - 1.0;
            let x: Vec<f32> = (0..rows * inputs).map(number).collect();
            let weight: Vec<f32> = (0..inputs * outputs).map(|n| number(n + 5)).collect();
            let bias: Vec<f32> = (0..outputs).map(|n| number(n + 3)).collect();
            for bias in [None, Some(bias.as_slice())] {
                let mut out = vec![f32::NAN; rows * outputs];
                Weights { weight: &weight, bias }.step(&x, inputs, &mut out).unwrap();
                let mut out_transposed = vec![f32::NAN; rows * outputs];
                let transposed: Vec<f32> =
                    (0..inputs * outputs).map(|n| weight[n % inputs * outputs + n / inputs]).collect();
                Weights { weight: &transposed, bias }.step_transposed(&x, inputs, &mut out_transposed).unwrap();
                for (at, &got) in out.iter().enumerate() {
                    let (row, column) = (at / outputs, at % outputs);
                    let sum: f32 = (0..inputs).map(|k| x[row * inputs + k] * weight[k * outputs + column]).sum();
                    // Exact: all products are multiples of 1/64, and small.
                    assert_eq!(got, sum + bias.map_or(0.0, |bias| bias[column]), "{rows} × {inputs} × {outputs}");
                }
                assert_eq!(out_transposed, out, "{rows} × {inputs} × {outputs}");
            }
        }
    }
}
