//! Where the tasks of a call write, each its own rows.

use super::{Dims, Mechanism, PARTS, Sequence, SharedRows, State, ViewMut};
use crate::simd::Real;
use crate::threads;

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

/// Makes the gradients of the keys behind the last of each sequence 0, before any task writes others.
pub(crate) fn clear_absent<T: Real>(
    mechanism: &impl Mechanism,
    dims: &Dims,
    sequences: &[Sequence<'_>],
    [dk, dv]: [SharedRows<'_, T>; 2],
) {
    let (kv_heads, key_dim, value_dim) = (dims.kv_heads, mechanism.key_dim(dims), dims.value_dim);
    let numbers = sequences.iter().map(|sequence| sequence.absent).sum::<usize>() * kv_heads * (key_dim + value_dim);
    let units = sequences.iter().flat_map(|sequence| (0..kv_heads).map(move |kv_head| (sequence, kv_head)));
    threads::share_many(numbers, units, |(sequence, kv_head)| {
        let end = sequence.key_start + sequence.keys;
        for token in end..end + sequence.absent {
            // SAFETY: each (batch, head, token) belongs to one task.
            unsafe {
                dk.row(sequence.batch, kv_head, token, key_dim).fill(T::ZERO);
                dv.row(sequence.batch, kv_head, token, value_dim).fill(T::ZERO);
            }
        }
    });
}

/// The gradient of an initial state: parts that several tasks write at once, each its own.
#[derive(Clone, Copy)]
pub(crate) struct StateSink<'s, T> {
    numbers: SharedRows<'s, T>,
    parts: [usize; PARTS],
}

impl<'s, T: Real> StateSink<'s, T> {
    /// Clears a state for the gradient to go into.
    pub fn new(state: &'s mut State<T>) -> Self {
        let shape = state.shape();
        state.numbers_mut().fill(T::ZERO);
        // A state's numbers belong to batch entries and key/value heads one after the other, as units do.
        Self { numbers: SharedRows::new(state.numbers_mut(), [shape.head_len(), 0, 1]), parts: shape.parts }
    }

    /// `len` numbers from the `first`-th on of one part of a unit's state.
    ///
    /// # Safety
    /// No other slice of these numbers may exist, in this thread or another.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, unit: usize, part: usize, first: usize, len: usize) -> &mut [T] {
        let start: usize = self.parts[..part].iter().sum();
        // SAFETY: forwarded to the caller.
        unsafe { self.numbers.row(unit, 0, start + first, len) }
    }
}
