//! Seeded numbers, the same on every machine.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

pub(crate) struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// 1 or −1.
    pub fn sign(&mut self) -> f64 {
        if self.0.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller), rounded to `f32` so that both number types see the same, and
    /// at least 1/64 from zero, so that difference quotients do not straddle the kinks of feature maps.
    pub fn normal(&mut self) -> f64 {
        let x = (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos();
        f64::from((x + (1.0 / 64.0f64).copysign(x)) as f32)
    }

    /// `len` normal numbers times `scale`; long tensors repeat their first numbers, for drawing hundreds of millions takes
    /// longer than timing what is done with them.
    pub fn normals(&mut self, len: usize, scale: f64) -> Vec<f32> {
        // No multiple of a row's width, so that no two rows of a call are the same soon.
        const DRAWN: usize = (1 << 18) + 1;
        let mut numbers: Vec<f32> = (0..len.min(DRAWN)).map(|_| (scale * self.normal()) as f32).collect();
        while numbers.len() < len {
            let more = numbers.len().min(len - numbers.len());
            numbers.extend_from_within(..more);
        }
        numbers
    }
}
