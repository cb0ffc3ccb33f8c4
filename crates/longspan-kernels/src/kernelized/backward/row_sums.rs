//! The sums of rows that keys read their gradients from, `R = Σ φ(q) dNᵀ` and `z = Σ c φ(q)`.
//!
//! Without a causal mask every key reads the sums of all rows, so the pass over the rows forms them on its way and the walk
//! over the keys finds them.

use super::super::problem::Problem;
use super::super::summary::{Carry, Layout, Summary, SummaryRef};
use crate::call::SharedRows;
use crate::simd::Real;
use crate::simd::block::add_scaled;
use crate::simd::product::Product;
use crate::simd::rows::Ahead;

/// Lets rows enter the sums: features `q`, `dN` and `c` of each.
pub(super) fn absorb<T: Real>(
    problem: &Problem<'_, T>,
    rows: usize,
    (q, d, c): (&[T], &[T], &[T]),
    ahead: &[Ahead<T>],
    sums: &mut Summary<'_, T>,
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let sizes = [problem.depth, value_width, rows];
    Product::of_transposed((q, head_width), (d, value_width), (sums.sum(), value_width), sizes)
        .accumulate(true)
        .compute_with(None, ahead);
    let from = problem.layout.denominator();
    for row in 0..rows {
        let q = &q[row * head_width + from..][..head_width - from];
        add_scaled(&mut sums.keys()[from..], c[row], q);
    }
    sums.set_content();
}

/// The memory of one unit's sums: their total, what rounding took from it, and the sums of each segment. Segments of the first units come
/// one after the other and share one place.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowSums {
    layout: Layout,
    summary: usize,
    segments: usize,
    in_turn: usize,
}

impl RowSums {
    /// For units of at most `segments`, that come in turn in the first `in_turn` units; empty where keys form the sums themselves.
    pub fn new<T: Real>(problem: &Problem<'_, T>, segments: usize, in_turn: usize) -> Self {
        let layout = Layout::new(problem);
        let segments = if in_turn == problem.units() { 1 } else { segments };
        let wanted = problem.content && !problem.causal;
        Self { layout, summary: layout.len::<T>(), segments: if wanted { segments } else { 0 }, in_turn }
    }

    /// Numbers of a unit.
    pub fn len(&self) -> usize {
        if self.segments == 0 { 0 } else { (2 + self.segments) * self.summary }
    }

    /// Empties the total of a unit.
    pub fn clear<T: Real>(&self, unit: &mut [T]) {
        let (high, rest) = unit.split_at_mut(self.summary);
        Carry::new(self.layout, high, &mut rest[..self.summary]);
    }

    /// The total of a unit.
    pub fn total<'x, T: Real>(&self, unit: &'x [T]) -> SummaryRef<'x, T> {
        SummaryRef::new(self.layout, &unit[..self.summary])
    }

    /// A place to form the sums of a segment of a unit in.
    ///
    /// # Safety
    /// No other place of the same segment may live, and where segments come in turn no other of the unit.
    pub unsafe fn place<'s, T: Real>(
        &self,
        units: &'s SharedRows<'_, T>,
        unit: usize,
        segment: usize,
    ) -> Option<Place<'s, T>> {
        if self.segments == 0 {
            return None;
        }
        // SAFETY: the caller's promise; the units' numbers do not overlap.
        let (total, sums) = unsafe {
            if unit < self.in_turn {
                let (total, sums) = units.row(unit, 0, 0, 3 * self.summary).split_at_mut(2 * self.summary);
                (Some(total), sums)
            } else {
                (None, units.row(unit, 0, (2 + segment) * self.summary, self.summary))
            }
        };
        let mut sums = Summary::new(self.layout, sums);
        sums.clear();
        Some(Place { total, sums })
    }

    /// Adds up the segments of a unit, which were visited side by side.
    pub fn join<T: Real>(&self, problem: &Problem<'_, T>, segments: usize, memory: &mut [T]) {
        if self.segments == 0 {
            return;
        }
        let (total, rest) = memory.split_at_mut(2 * self.summary);
        for sums in rest.chunks_exact(self.summary).take(segments) {
            add(problem, total, SummaryRef::new(self.layout, sums));
        }
    }
}

pub(super) struct Place<'s, T> {
    pub sums: Summary<'s, T>,
    /// The unit's total and what rounding took from it, if segments come in turn.
    total: Option<&'s mut [T]>,
}

impl<T: Real> Place<'_, T> {
    /// Adds the sums to the total once the segment is over.
    pub fn end(&mut self, problem: &Problem<'_, T>) {
        if let Some(total) = &mut self.total {
            add(problem, total, self.sums.view());
        }
    }
}

fn add<T: Real>(problem: &Problem<'_, T>, total: &mut [T], sums: SummaryRef<'_, T>) {
    let (high, low) = total.split_at_mut(total.len() / 2);
    Carry::resume(Layout::new(problem), high, low).add(problem, [T::ONE; 2], sums);
}
