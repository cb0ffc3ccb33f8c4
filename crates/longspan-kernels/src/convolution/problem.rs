//! A checked call, with what its tasks share.

use std::ops::Range;

use super::taps::through_gate;
use super::{ShortConvolution, check_options};
use crate::call::{Call, Dims, Sequence, check_call, check_initial_state};
use crate::error::Error;
use crate::simd::Real;
use crate::simd::rows::padded;

/// Tokens of a task: many beside the taps, few enough for the second-level cache.
pub(super) const ROWS: usize = 256;

pub(super) struct Problem<'a, T: 'static> {
    pub convolution: &'a ShortConvolution,
    pub call: &'a Call<'a, T>,
    pub dims: Dims,
    pub sequences: Vec<Sequence<'a>>,
    /// Length of a row in blocks: whole cache lines.
    pub row: usize,
}

impl<'a, T: Real> Problem<'a, T> {
    /// Checks everything but the outputs.
    pub fn new(convolution: &'a ShortConvolution, call: &'a Call<'a, T>) -> Result<Self, Error> {
        let dims = call.dims;
        // Before what asks for the sizes of parameters.
        check_options(convolution, &dims)?;
        check_call(convolution, call)?;
        check_initial_state(convolution, call)?;
        Ok(Self { convolution, call, dims, sequences: call.mask.sequences(&dims), row: padded::<T>(dims.value_dim) })
    }

    /// Rows of a head's taps and its bias in a block.
    pub fn learned(&self) -> usize {
        self.convolution.width + 1
    }

    /// A head's taps as rows of a block, then its bias, 0 where there is none.
    pub fn load_taps(&self, kv_head: usize, block: &mut [T]) {
        let (width, taps) = (self.dims.value_dim, self.convolution.width);
        let of_head =
            |n: usize, rows: usize| self.call.parameters[n][kv_head * rows * width..].chunks_exact(width.max(1));
        let bias = self.convolution.bias.then(|| of_head(1, 1));
        let rows = of_head(0, taps).take(taps).chain(bias.into_iter().flatten().take(1));
        block[taps * self.row..].fill(T::ZERO);
        for (from, to) in rows.zip(block.chunks_exact_mut(self.row.max(1))) {
            to[..width].copy_from_slice(from);
        }
    }

    /// The products `k ⊙ v`, or values, at positions, where a call's own first key is at 0, as rows of a block of so many numbers.
    pub fn load_products(
        &self,
        sequence: &Sequence<'_>,
        kv_head: usize,
        positions: Range<isize>,
        (block, row): (&mut [T], usize),
    ) {
        let (width, before) = (self.dims.value_dim, self.convolution.before() as isize);
        let keys = self.call.k.rows(sequence.batch, kv_head).skip(sequence.key_start);
        let values = self.call.v.rows(sequence.batch, kv_head).skip(sequence.key_start);
        let past = self.call.initial_state.map(|state| state.head(sequence.batch, kv_head)[0]);
        for (position, to) in positions.zip(block.chunks_exact_mut(row.max(1))) {
            let to = &mut to[..width];
            match (usize::try_from(position), past) {
                (Ok(key), _) if sequence.has(key) => {
                    through_gate(keys.row(key, self.dims.head_dim), values.row(key, width), to);
                }
                (Err(_), Some(past)) if position >= -before => {
                    to.copy_from_slice(&past[(position + before) as usize * width..][..width]);
                }
                _ => to.fill(T::ZERO),
            }
        }
    }

    pub fn query(&self, sequence: &Sequence<'_>, position: isize) -> Option<usize> {
        usize::try_from(position - self.call.mask.offset).ok().filter(|&row| row < sequence.queries)
    }
}
