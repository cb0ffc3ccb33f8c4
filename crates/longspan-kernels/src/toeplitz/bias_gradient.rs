//! The gradients of the biases: a line for each task that meets keys, and their sum over all that share an entry.

use super::problem::Problem;
use crate::simd::Real;
use crate::threads;

/// Numbers of one line of biases' gradients: of each index of the line, then of the weights of the farthest keys before
/// and after where they are met by sums.
pub(super) fn line_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.line_width() + 2
}

/// Numbers of the lines of a unit, those of its heads in the first of its segments before others.
pub(super) fn unit_lines_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.segments() * problem.dims.group() * line_len(problem)
}

/// Numbers of the lines of all tasks, `[units, segments, group, line_len]`.
pub(super) fn lines_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.units() * unit_lines_len(problem)
}

/// The lines of a unit's heads in the first of its segments.
pub(super) fn unit_lines<'l, T: Real>(problem: &Problem<'_, T>, lines: &'l mut [T], unit: usize) -> &'l mut [T] {
    &mut lines[unit * unit_lines_len(problem)..][..problem.dims.group() * line_len(problem)]
}

/// Sums the lines of all tasks into the gradient of the tables.
pub(super) fn reduce<T: Real>(problem: &Problem<'_, T>, lines: &[T], d_bias: &mut [T]) {
    let (bias, len, group) = (&problem.toeplitz.bias, line_len(problem), problem.dims.group());
    let segments = problem.segments();
    let entry = |index: usize| match index.checked_sub(problem.line_width()) {
        None => problem.line_difference(index).and_then(|difference| bias.entry(difference)),
        Some(0) => bias.far(),
        Some(_) => bias.after().map(|(_, entry)| entry),
    };
    threads::share(d_bias.chunks_exact_mut(bias.entries()).enumerate(), |(head, to)| {
        to.fill(T::ZERO);
        let mut add = |entry: usize, sum: f64| {
            if let Some(to) = to.get_mut(entry) {
                *to += T::from_f64(sum);
            }
        };
        // No entry at first.
        let mut run = (usize::MAX, 0.0);
        for index in 0..len {
            let Some(entry) = entry(index) else { continue };
            if run.0 != entry {
                add(run.0, run.1);
                run = (entry, 0.0);
            }
            for sequence in 0..problem.sequences.len() {
                let unit = sequence * problem.dims.kv_heads + head / group;
                for segment in 0..segments {
                    run.1 += lines[((unit * segments + segment) * group + head % group) * len + index].to_f64();
                }
            }
        }
        add(run.0, run.1);
    });
}
