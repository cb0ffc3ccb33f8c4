//! Where the tasks of a call write, each its own rows.

use super::{Dims, SharedRows, ViewMut};
use crate::simd::Real;

#[derive(Clone, Copy)]
pub(crate) struct Sink<'a, T> {
    pub out: SharedRows<'a, T>,
    /// In the shape of [`Mechanism::denominators`](super::Mechanism::denominators).
    pub denominators: Option<SharedRows<'a, T>>,
}

impl<'a, T: Real> Sink<'a, T> {
    /// For the checked places of an output, with denominators of this shape.
    pub fn new(
        out: &'a mut ViewMut<'_, T>,
        denominators: Option<&'a mut [T]>,
        [_, heads, queries, each]: [usize; 4],
    ) -> Self {
        let strides = [heads * queries * each, queries * each, each];
        Self { out: out.shared(), denominators: denominators.map(|numbers| SharedRows::new(numbers, strides)) }
    }

    /// Writes the denominator of one row, or all that stands for it, if they are wanted.
    ///
    /// # Safety
    /// No other thread writes it.
    pub unsafe fn set_denominator(&self, [batch, head, token]: [usize; 3], denominator: &[T]) {
        if let Some(denominators) = self.denominators {
            // SAFETY: forwarded to the caller.
            unsafe { denominators.row(batch, head, token, denominator.len()) }.copy_from_slice(denominator);
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct GradientSink<'a, T> {
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
}

impl<T: Real> GradientSink<'_, T> {
    /// The places of the gradients of a key, as wide as a query, and of its value.
    ///
    /// # Safety
    /// While they live no other slices of that key's may exist, in this thread or another.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn key(&self, [batch, kv_head, token]: [usize; 3], dims: &Dims) -> (&mut [T], &mut [T]) {
        // SAFETY: forwarded to the caller.
        unsafe {
            (self.dk.row(batch, kv_head, token, dims.head_dim), self.dv.row(batch, kv_head, token, dims.value_dim))
        }
    }
}
