//! A call read from its last token to its first.

use crate::call::{Call, Dims, Keys, Lines, Mask, SharedRows, View, ViewMut};
use crate::error::Error;
use crate::simd::Real;
use crate::simd::block::add_scaled;
use crate::threads;

/// The inputs of a call of as many queries as keys, tokens in the opposite order.
pub(super) struct Reversed<T> {
    q: Lines<T>,
    k: Lines<T>,
    v: Lines<T>,
    key_dim: usize,
    /// Ignored keys, where there are any.
    padding: Option<Vec<bool>>,
    /// Boundaries of packed sequences.
    bounds: Vec<usize>,
}

impl<T: Real> Reversed<T> {
    /// Of a checked call whose keys are so wide.
    pub fn new(call: &Call<'_, T>, key_dim: usize) -> Result<Self, Error> {
        let dims = &call.dims;
        let keys = dims.keys;
        let [batch, kv_heads, ..] = dims.k();
        let padding = match call.mask.keys {
            Keys::All | Keys::Packed { .. } => None,
            Keys::Lengths(lengths) => {
                Some(lengths.iter().flat_map(|&len| (0..keys).rev().map(move |key| key >= len)).collect())
            }
            Keys::Padding(ignored) => {
                Some(ignored.chunks(keys.max(1)).flat_map(|row| row.iter().rev().copied()).collect())
            }
        };
        let bounds = match call.mask.keys {
            Keys::Packed { keys: bounds, .. } => bounds.iter().rev().map(|bound| keys - bound).collect(),
            _ => Vec::new(),
        };
        Ok(Self {
            q: rows(&call.q, dims.q())?,
            k: rows(&call.k, [batch, kv_heads, keys, key_dim])?,
            v: rows(&call.v, dims.v())?,
            key_dim,
            padding,
            bounds,
        })
    }

    pub fn key_shape(&self, dims: &Dims) -> [usize; 4] {
        [dims.batch, dims.kv_heads, dims.keys, self.key_dim]
    }

    pub fn call<'a>(&'a self, call: &Call<'a, T>) -> Call<'a, T> {
        let dims = call.dims;
        let keys = match (&self.padding, call.mask.keys) {
            (Some(padding), _) => Keys::Padding(padding),
            (None, Keys::Packed { .. }) => Keys::Packed { queries: &self.bounds, keys: &self.bounds },
            (None, _) => Keys::All,
        };
        let k = View::contiguous(&self.k, self.key_shape(&dims));
        Call::new(dims, View::contiguous(&self.q, dims.q()), k, View::contiguous(&self.v, dims.v()))
            .with_parameters(call.parameters)
            .with_mask(Mask::causal().with_keys(keys))
    }
}

/// A row-major copy of a tensor, tokens in the opposite order.
pub(super) fn rows<T: Real>(from: &View<'_, T>, shape: [usize; 4]) -> Result<Lines<T>, Error> {
    let mut to = Lines::zeros(shape.iter().product())?;
    let [_, heads, tokens, width] = shape;
    let units = to.chunks_mut((tokens * width).max(1)).enumerate();
    threads::share_many(shape.iter().product(), units, |(unit, to)| {
        let rows = from.rows(unit / heads, unit % heads);
        for (n, to) in to.chunks_mut(width).enumerate() {
            to.copy_from_slice(rows.row(tokens - 1 - n, width));
        }
    });
    Ok(to)
}

/// Adds what [`rows`] would give, put in order again.
pub(super) fn add<T: Real>(from: &[T], shape: [usize; 4], to: &mut ViewMut<'_, T>) {
    let [_, heads, tokens, width] = shape;
    let to: SharedRows<'_, T> = to.shared();
    let units = from.chunks((tokens * width).max(1)).enumerate();
    threads::share_many(shape.iter().product(), units, |(unit, from)| {
        for (n, from) in from.chunks(width).enumerate() {
            // SAFETY: each (batch, head, token) belongs to one task.
            add_scaled(unsafe { to.row(unit / heads, unit % heads, tokens - 1 - n, width) }, T::ONE, from);
        }
    });
}
