//! Blocks over one sequence in both directions that is too long to be projected whole: its rows are replaced in place, segment by segment.
//!
//! A first pass, from the last segment to the first, leaves the state of all that comes after each segment. A second one, from the first to
//! the last, gives each segment its results between the state of all before and that of all after; rows that a mechanism sees one by one
//! ([`Mechanism::reach`](longspan_kernels::Mechanism::reach) on each side) are given as rows. The price is one more projection to keys and values.

use super::multi_head::MultiHead;
use super::products::try_zeros;
use longspan_core::error::{Error, expect};
use longspan_kernels::Scratch;

impl MultiHead<'_> {
    /// Replaces the rows of `x`, one sequence, by what `then` makes of the results of attention in both directions, given `segment` rows at
    /// a time. The call's own `x`, sizes and mask are not looked at. Memory beside `x` grows with the segment and by a state a segment.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), those of `then`, and a mechanism without a [reach](longspan_kernels::Mechanism::reach).
    pub fn in_segments(
        &self,
        x: &mut [f32],
        segment: usize,
        scratch: &mut Scratch<f32>,
        mut then: impl FnMut(Vec<f32>) -> Result<Vec<f32>, Error>,
    ) -> Result<(), Error> {
        let (width, name) = (self.width().max(1), self.kernel.name());
        let rows = x.len() / width;
        let reach = self.kernel.reach().ok_or(Error::Unsupported {
            operation: name,
            combination: "a sequence in segments in both directions",
            help: "take the sequence whole",
        })?;
        expect(segment > 0, name, "segment", || "at least 1 row".into(), || "0".into())?;
        let ends: Vec<usize> = (0..rows).step_by(segment).map(|start| (start + segment).min(rows)).collect();
        let sees = |end: usize| (end + reach).min(rows);

        // After each segment but the last, from the last on.
        let mut after = vec![self.over(&[]).empty_state()?];
        for pair in ends.windows(2).rev() {
            let (from, to) = (sees(pair[0]), sees(pair[1]));
            let state = self.over(&x[from * width..to * width]).state(scratch)?;
            let later = &after[after.len() - 1];
            after.push(self.kernel.combine(&state, later, self.parameters)?);
        }

        let mut before = self.over(&[]).empty_state()?;
        // Rows that the next segment sees and that have been replaced.
        let mut seen: Vec<f32> = Vec::new();
        let mut start = 0;
        for (end, after) in ends.into_iter().zip(after.iter().rev()) {
            let first = start - seen.len() / width;
            let mut stretch = try_zeros((sees(end) - first) * width)?;
            stretch[..seen.len()].copy_from_slice(&seen);
            stretch[seen.len()..].copy_from_slice(&x[start * width..sees(end) * width]);
            let next = end.saturating_sub(reach).max(first);
            let call = self.over(&stretch);
            let (results, state) = call.segment(start - first..end - first, [&before, after], next - first, scratch)?;
            before = state;
            seen.clear();
            seen.extend_from_slice(&stretch[(next - first) * width..(end - first) * width]);
            drop(stretch);
            let results = then(results)?;
            let expected = || format!("{} × {width} numbers", end - start);
            expect(results.len() == (end - start) * width, name, "results", expected, || results.len().to_string())?;
            x[start * width..end * width].copy_from_slice(&results);
            start = end;
        }
        Ok(())
    }

    /// The same of a stretch of one sequence.
    fn over<'s>(&'s self, x: &'s [f32]) -> MultiHead<'s> {
        MultiHead { x, queries: x.len() / self.width().max(1), batch: 1, memory: None, ..*self }
    }
}
