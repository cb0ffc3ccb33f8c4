//! The transforms of one sequence, and the kernels that its columns are convolved with.

use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};

use super::super::problem::Problem;
use super::spectrum::MultiplySpectrum;
use crate::call::{Arena, Sequence};
use crate::simd::block::{add_products, add_scaled, multiply};
use crate::simd::{Real, dispatch};

/// The least length of at least `n` with no prime factor above 5, and even, as transforms of real numbers like it.
fn smooth(n: usize) -> usize {
    (n.max(2)..)
        .find(|&n| {
            let mut rest = n;
            for prime in [2, 3, 5] {
                while rest.is_multiple_of(prime) {
                    rest /= prime;
                }
            }
            rest == 1 && n.is_multiple_of(2)
        })
        .unwrap_or(n)
}

/// The length of the transforms of a sequence: the places of keys and queries, less the one that both count.
pub(in super::super) fn transform_length(key_places: usize, query_places: usize) -> usize {
    let least = key_places.saturating_add(query_places).saturating_sub(1);
    // Beyond all memory the cost model alone asks.
    if least > 1 << 48 { least } else { smooth(least) }
}

/// The keys or the queries of a sequence.
pub(super) struct Tokens {
    pub count: usize,
    /// Place of each, counted from the first; `None` where they stand side by side.
    places: Option<Vec<usize>>,
}

impl Tokens {
    /// The tokens from `first` on.
    fn new<T: Real>(problem: &Problem<'_, T>, first: isize, count: usize) -> Self {
        let place = |n: usize| problem.toeplitz.bias.place(first + n as isize);
        let places = || (0..count).map(|n| (place(n) - place(0)) as usize).collect();
        Self { count, places: problem.is_grid().then(places) }
    }

    /// Places from the first to the last.
    fn range(&self) -> usize {
        self.places.as_ref().map_or(self.count, |places| places.last().map_or(0, |last| last + 1))
    }

    /// Writes the signal that has `a[n] · b[n]` (or `a[n]`) at the place of token `n`.
    fn spread(&self, a: &[f64], b: Option<&[f64]>, signal: &mut [f64]) {
        match &self.places {
            None => {
                let (filled, rest) = signal.split_at_mut(a.len());
                filled.copy_from_slice(a);
                rest.fill(0.0);
                if let Some(b) = b {
                    multiply(filled, b);
                }
            }
            Some(places) => {
                signal.fill(0.0);
                for (n, (&place, a)) in places.iter().zip(a).enumerate() {
                    signal[place] = a * b.map_or(1.0, |b| b[n]);
                }
            }
        }
    }

    /// `to[n] += factor[n] · signal` at the place of token `n`.
    pub fn add(&self, factor: Option<&[f64]>, signal: &[f64], to: &mut [f64]) {
        match (&self.places, factor) {
            (None, Some(factor)) => add_products(factor, signal, to),
            (None, None) => add_scaled(to, 1.0, signal),
            (Some(places), _) => {
                for (n, (&place, to)) in places.iter().zip(to).enumerate() {
                    *to += factor.map_or(1.0, |factor| factor[n]) * signal[place];
                }
            }
        }
    }
}

/// The tokens of one sequence on the line of places, and the transforms of its length.
pub(super) struct Line {
    pub keys: Tokens,
    pub queries: Tokens,
    /// The first query's place minus the first key's.
    origin: isize,
    pub length: usize,
    forward: Arc<dyn RealToComplex<f64>>,
    inverse: Arc<dyn ComplexToReal<f64>>,
}

pub(super) struct Work<'s> {
    pub signal: &'s mut [f64],
    pub spectrum: &'s mut [Complex<f64>],
    scratch: &'s mut [Complex<f64>],
}

/// Numbers as complex ones, half as many.
pub(super) fn complex(numbers: &mut [f64]) -> &mut [Complex<f64>] {
    // SAFETY: a complex number is its two parts in order (`repr(C)`), and `len / 2` of them lie in the slice.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len() / 2) }
}

impl Line {
    fn new<T: Real>(problem: &Problem<'_, T>, sequence: &Sequence<'_>, planner: &mut RealFftPlanner<f64>) -> Self {
        let place = |token: isize| problem.toeplitz.bias.place(token);
        let keys = Tokens::new(problem, 0, sequence.keys);
        let queries = Tokens::new(problem, problem.offset, sequence.queries);
        let length = transform_length(keys.range(), queries.range());
        Self {
            origin: place(problem.offset) - place(0),
            keys,
            queries,
            length,
            forward: planner.plan_fft_forward(length),
            inverse: planner.plan_fft_inverse(length),
        }
    }

    pub fn spectrum_len(&self) -> usize {
        2 * (self.length / 2 + 1)
    }

    pub fn work<'s>(&self, arena: &mut Arena<'s, f64>) -> Work<'s> {
        let scratch_len = 2 * self.forward.get_scratch_len().max(self.inverse.get_scratch_len());
        Work {
            signal: arena.take(self.length),
            spectrum: complex(arena.take(self.spectrum_len())),
            scratch: complex(arena.take(scratch_len)),
        }
    }

    /// What a transform loses of a signal, relative to its norm.
    pub fn rounding(&self) -> f64 {
        f64::EPSILON * (self.length as f64).log2()
    }

    /// Transforms the signal that has `a[n] · b[n]` (or `a[n]`) at the place of token `n`.
    pub fn transform(&self, tokens: &Tokens, a: &[f64], b: Option<&[f64]>, work: &mut Work<'_>) {
        tokens.spread(a, b, work.signal);
        self.forward_signal(work);
    }

    fn forward_signal(&self, work: &mut Work<'_>) {
        let Work { signal, spectrum, scratch } = work;
        let scratch = &mut scratch[..self.forward.get_scratch_len()];
        // Lengths are those of the plan.
        let done = self.forward.process_with_scratch(signal, spectrum, scratch);
        debug_assert!(done.is_ok());
    }

    pub fn inverse(&self, work: &mut Work<'_>) {
        let Work { signal, spectrum, scratch } = work;
        let scratch = &mut scratch[..self.inverse.get_scratch_len()];
        // What rounding left in the two numbers that are real.
        spectrum[0].im = 0.0;
        spectrum[self.length / 2].im = 0.0;
        let done = self.inverse.process_with_scratch(spectrum, signal, scratch);
        debug_assert!(done.is_ok());
    }

    /// Convolves what was transformed last with a kernel, or with a kernel reversed.
    pub fn convolve(&self, kernel: &Kernel<'_>, reversed: bool, work: &mut Work<'_>) {
        dispatch(MultiplySpectrum { x: work.spectrum, by: kernel.spectrum, conjugate: reversed });
        self.inverse(work);
    }

    /// `to_i = Σ_j c_ij x_j` of keys for queries, `c` the factors of a kernel; if `reversed`, of queries for keys.
    pub fn sum(&self, kernel: &Kernel<'_>, reversed: bool, x: &[f64], to: &mut [f64], work: &mut Work<'_>) {
        let (of, by) = if reversed { (&self.queries, &self.keys) } else { (&self.keys, &self.queries) };
        self.transform(of, x, None, work);
        self.convolve(kernel, reversed, work);
        to.fill(0.0);
        by.add(None, work.signal, to);
    }

    /// `Σ x_j y_i` over the pairs of a key and a query, by where their difference stands in the kernel.
    pub fn pairs(&self, x: &[f64], y: &[f64], work: &mut Work<'_>, spectrum: &mut [f64], to: &mut [f64]) {
        self.transform(&self.keys, x, None, work);
        let spectrum = complex(spectrum);
        spectrum.copy_from_slice(work.spectrum);
        self.transform(&self.queries, y, None, work);
        dispatch(MultiplySpectrum { x: work.spectrum, by: spectrum, conjugate: true });
        self.inverse(work);
        to.fill(0.0);
        add_scaled(to, 1.0 / self.length as f64, work.signal);
    }

    /// Where the factor of the difference `key − query` of places stands in the kernel that is convolved with keys.
    pub fn kernel_index(&self, difference: isize) -> usize {
        (-(difference + self.origin)).rem_euclid(self.length as isize) as usize
    }

    /// The differences `key − query` of places, from the least to the largest.
    pub fn differences(&self) -> std::ops::RangeInclusive<isize> {
        1 - self.queries.range() as isize - self.origin..=self.keys.range() as isize - 1 - self.origin
    }
}

/// The lines of all sequences that transforms may take.
pub(super) fn lines<T: Real>(problem: &Problem<'_, T>) -> Vec<Option<Line>> {
    let mut planner = RealFftPlanner::new();
    let line = |sequence: &Sequence<'_>| {
        let any = sequence.keys > 0 && sequence.queries > 0;
        any.then(|| Line::new(problem, sequence, &mut planner))
    };
    problem.sequences.iter().map(line).collect()
}

/// Numbers that a layout takes for the line that it takes most for.
pub(super) fn most<R>(lines: &[Option<Line>], layout: impl Fn(&Line, &mut Arena<'static, f64>) -> R) -> usize {
    lines.iter().flatten().map(|line| Arena::measure(|arena| layout(line, arena))).max().unwrap_or(0)
}

/// `e^{b − max b}` of one head over one sequence.
pub(super) struct Kernel<'s> {
    spectrum: &'s mut [Complex<f64>],
    /// `max b`.
    pub largest: f64,
    /// `‖c‖`.
    pub norm: f64,
}

impl<'s> Kernel<'s> {
    pub fn new(line: &Line, arena: &mut Arena<'s, f64>) -> Self {
        Self { spectrum: complex(arena.take(line.spectrum_len())), largest: 0.0, norm: 0.0 }
    }

    pub fn load<T: Real>(&mut self, problem: &Problem<'_, T>, line: &Line, biases: &[T], work: &mut Work<'_>) {
        let value = |difference: isize| biases[problem.line_index(difference) as usize].to_f64();
        let known = |difference: &isize| {
            let index = problem.line_index(*difference);
            (0..biases.len() as isize).contains(&index)
        };
        let largest = line.differences().filter(known).map(value).fold(f64::NEG_INFINITY, f64::max);
        self.largest = if largest.is_finite() { largest } else { 0.0 };
        work.signal.fill(0.0);
        let mut squares = 0.0;
        // A sequence with the length of its places has no difference outside the line.
        for difference in line.differences().filter(known) {
            let c = (value(difference) - self.largest).exp();
            squares += c * c;
            work.signal[line.kernel_index(difference)] = c / line.length as f64;
        }
        line.forward_signal(work);
        self.spectrum.copy_from_slice(work.spectrum);
        self.norm = squares.sqrt();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_smooth() {
        assert_eq!([1, 2, 7, 11, 127, 8191, 16383].map(smooth), [2, 2, 8, 12, 128, 8192, 16384]);
        assert!((1..2000).all(|n| smooth(n) >= n && smooth(n) < 2 * n + 2));
    }
}
