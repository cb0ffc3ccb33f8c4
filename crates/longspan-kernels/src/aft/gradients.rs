//! What a backward call starts from, and where it writes.

use super::keys::KeyItems;
use super::outputs::OutputRows;
use super::problem::Problem;
use super::state_gradient::Links;
use crate::call::{Cotangent, Mechanism, Sequence, SharedRows, View};
use crate::simd::Real;
use crate::simd::rows::Rows;

/// Heads are dealt into at most so many groups, each with a sum of its own for the gradients of biases: a number that
/// does not depend on threads, so that neither do the bits.
pub(super) const GROUPS: usize = 16;

/// Numbers that the rows of one block may take, if it has more than one head.
pub(super) const BLOCK_NUMBERS: usize = 1 << 20;

pub(super) struct Backward<'a, T: 'static> {
    pub problem: &'a Problem<'a, T>,
    pub cotangent: &'a Cotangent<'a, T>,
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
    pub links: Links<'a, T>,
}

impl<T: Real> Backward<'_, T> {
    /// What the forward kept of the mean of a row, where there is a table of all biases.
    pub fn kept(&self, batch: usize, head: usize, token: usize) -> &[T] {
        let shape = self.problem.aft.denominators(&self.problem.dims);
        View::contiguous(self.cotangent.denominators, shape).token(batch, head, token, shape[3])
    }

    /// `count` rows of a head from the sequence's row `from` on, from a column on.
    pub fn rows(
        &self,
        sequence: &Sequence<'_>,
        head: usize,
        from: usize,
        count: usize,
        column: usize,
    ) -> OutputRows<'_, T> {
        OutputRows {
            q: self.problem.aft.gate.then(|| rows_of(&self.problem.call.q, sequence, head, from, column)),
            d_out: rows_of(&self.cotangent.d_out, sequence, head, from, column),
            out: rows_of(&self.cotangent.out, sequence, head, from, column),
            count,
        }
    }

    /// Takes one key's gradient: `add(key, value, dk, dv)` adds to what stands in `dk` and `dv`. These are cleared before and get what
    /// the final state's ring gives if this is the `first` of its heads of queries.
    ///
    /// # Safety
    /// No two tasks may have the same key of a head at one time.
    pub unsafe fn add_to_key(
        &self,
        items: &KeyItems<'_, T>,
        sequence: &Sequence<'_>,
        kv_head: usize,
        key: isize,
        first: bool,
        add: impl FnOnce((&[T], &[T]), &mut [T], &mut [T]),
    ) {
        let (key_dim, head_dim) = (self.problem.key_dim, self.problem.dims.head_dim);
        // SAFETY: the caller's promise; the slices end here.
        let places = unsafe {
            if key < 0 {
                self.links.ring_row(sequence, kv_head, key.unsigned_abs())
            } else {
                let at = sequence.key_start + key as usize;
                let dk = self.dk.row(sequence.batch, kv_head, at, key_dim);
                Some((dk, self.dv.row(sequence.batch, kv_head, at, head_dim)))
            }
        };
        let Some((dk, dv)) = places else { return };
        if first {
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
        }
        let Some(token) = items.token(key) else { return };
        add(token, dk, dv);
        if let Some((d_key, d_value)) = self.links.kept(sequence, kv_head, key).filter(|_| first) {
            dv.iter_mut().zip(d_value).for_each(|(to, &d)| *to += d);
            dk.iter_mut().zip(d_key).for_each(|(to, &d)| *to += d);
        }
    }
}

/// The rows of a head of queries from the sequence's row `from` on, from a column on.
pub(super) fn rows_of<'v, T: Real>(
    view: &View<'v, T>,
    sequence: &Sequence<'_>,
    head: usize,
    from: usize,
    column: usize,
) -> Rows<'v, T> {
    view.rows(sequence.batch, head).skip(sequence.query_start + from).skip_columns(column)
}
