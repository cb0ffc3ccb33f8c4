//! Dropout from a counter: which numbers are dropped depends on a seed and their places alone.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

use super::products::Fresh;
use longspan_core::error::Error;
use longspan_core::threads::share;

/// Makes numbers 0 with a probability, and the others larger, so that their mean stays.
///
/// Place `n` of seed `s` is dropped if the bits `16·(n mod 4)…` of SplitMix64's number `⌊n/4⌋` from `s` on are below
/// `65,536 p`. So threads need no order, and a backward finds the same places.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Of 65,536.
    dropped: u64,
    seed: u64,
}

impl Dropout {
    /// Each number is dropped with `probability`, in [0, 1), rounded to a multiple of 1/65,536 below 1; `None` for another.
    pub fn new(probability: f64, seed: u64) -> Option<Self> {
        let dropped = (probability * 65_536.0).round().min(65_535.0);
        (0.0..1.0).contains(&probability).then_some(Self { dropped: dropped as u64, seed })
    }

    /// What is left of numbers, of which the first has the place 0.
    ///
    /// # Errors
    /// Memory that is not there.
    pub fn forward(self, x: &[f32]) -> Result<Vec<f32>, Error> {
        /// Numbers of a task.
        const PIECE: usize = 1 << 16;
        let mut out = Fresh::new(x.len())?;
        share(x.chunks(PIECE).zip(out.room().chunks_mut(PIECE)).enumerate(), |(n, (x, out))| {
            self.apply(n * PIECE, out.write_copy_of_slice(x));
        });
        // SAFETY: every piece has been written.
        Ok(unsafe { out.written() })
    }

    /// Drops from `numbers`, of which the first has the place `first`.
    pub(super) fn apply(self, first: usize, numbers: &mut [f32]) {
        let scale = 65_536.0 / (65_536 - self.dropped) as f32;
        let (begun, whole) = numbers.split_at_mut((first.next_multiple_of(4) - first).min(numbers.len()));
        let drop = |mut bits: u64, numbers: &mut [f32]| {
            for x in numbers {
                *x = if bits & 0xFFFF < self.dropped { 0.0 } else { *x * scale };
                bits >>= 16;
            }
        };
        drop(self.bits((first / 4) as u64) >> (16 * (first % 4)), begun);
        for (n, four) in whole.chunks_mut(4).enumerate() {
            drop(self.bits((first.div_ceil(4) + n) as u64), four);
        }
    }

    /// The `n`-th number of SplitMix64, without those before it.
    fn bits(self, n: u64) -> u64 {
        /// What its state grows by with each number.
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        SplitMix64::seed_from_u64(self.seed.wrapping_add(STEP.wrapping_mul(n))).next_u64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_dropped_as_asked_for_and_the_mean_stays() {
        for probability in [0.0, 0.1, 0.5, 0.9] {
            let dropout = Dropout::new(probability, 7).unwrap();
            let mut numbers = vec![1.0; 100_000];
            dropout.apply(0, &mut numbers);
            let dropped = numbers.iter().filter(|&&x| x == 0.0).count() as f64 / 1e5;
            let mean = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
            // Five standard deviations.
            let deviation = (probability * (1.0 - probability) / 1e5).sqrt();
            assert!((dropped - probability).abs() <= 5.0 * deviation, "{probability}: {dropped}");
            assert!((mean - 1.0).abs() <= 5.0 * deviation / (1.0 - probability) + 1e-4, "{probability}: mean {mean}");
        }
    }

    #[test]
    fn bits_are_those_of_the_generator_in_order() {
        let dropout = Dropout::new(0.5, 1234567).unwrap();
        let mut generator = SplitMix64::seed_from_u64(1234567);
        assert!((0..10).all(|n| dropout.bits(n) == generator.next_u64()));
    }

    #[test]
    fn a_place_does_not_depend_on_where_a_piece_begins() {
        let dropout = Dropout::new(0.3, 1).unwrap();
        let mut whole = vec![1.0; 64];
        dropout.apply(0, &mut whole);
        for first in [0, 1, 2, 39, 40, 63] {
            let mut part = vec![1.0; 64 - first];
            dropout.apply(first, &mut part);
            assert_eq!(part, whole[first..]);
        }
        let long = vec![1.0; 200_000];
        let mut expected = long.clone();
        dropout.apply(0, &mut expected);
        assert_eq!(dropout.forward(&long).unwrap(), expected);
        let mut other = vec![1.0; 64];
        Dropout::new(0.3, 2).unwrap().apply(0, &mut other);
        assert_ne!(other, whole);
    }

    #[test]
    fn probabilities_outside_0_to_1_are_refused() {
        for probability in [-0.1, 1.0, 2.0, f64::NAN] {
            assert_eq!(Dropout::new(probability, 0), None);
        }
    }
}
