//! The machine: what it is, and what it can do with products and copies.

use std::collections::BTreeMap;
use std::hint::black_box;

use gemm::Parallelism;
use serde::{Deserialize, Serialize};

use crate::random::Random;
use crate::statistics::Spread;
use crate::timing::seconds;

/// What a reader must know of the machine to read the numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name as the system gives it, or its architecture.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// The vector instructions that the kernels run with.
    pub instructions: String,
    /// The operating system.
    pub system: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let architecture = std::env::consts::ARCH;
        let processor = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        });
        Self {
            processor: processor.unwrap_or_else(|| architecture.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            // Where they may not run, no call is measured, and its error says why.
            instructions: longspan_kernels::instructions().unwrap_or("none").to_owned(),
            system: std::env::consts::OS.to_owned(),
        }
    }
}

/// Side of a streaming tile.
const TILE: usize = 64;
/// Numbers in a tile.
const TILE_LEN: usize = TILE * TILE;
/// Pairs of tiles in one measurement: 2 × 4 MiB of `f32`, more than a core's own caches hold.
const TILES: usize = 256;
/// Side of the large product.
const LARGE: usize = 1024;
/// Least bytes of one measured copy; a smaller one would measure the clock.
const LEAST_COPY: usize = 1 << 14;

/// Numbers whose exponentials are one measurement: as many as fit a core's first cache, so often.
const EXPONENTIALS: (usize, usize) = (4096, 64);

/// Matrix products, exponentials and copies of this machine, measured alternately with kernels.
pub struct Limits {
    lhs: Vec<f32>,
    rhs: Vec<f32>,
    /// One tile for each thread.
    tiles: Vec<f32>,
    large: Vec<f32>,
    from: Vec<f32>,
    to: Vec<f32>,
    tile_times: Vec<f64>,
    large_times: Vec<f64>,
    copy_times: Vec<f64>,
    /// One block for each thread.
    exponents: Vec<f32>,
    exponential_times: Vec<f64>,
}

/// What [`Limits`] found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Flops a second in products of 64 × 64 × 64 that stream through memory.
    pub tiles: f64,
    /// Flops a second in one product of 1024³; `None` if it was not measured.
    pub large: Option<f64>,
    /// Seconds to read half of a call's inputs and outputs and write as much.
    pub copy_seconds: f64,
    /// Bytes a second of that, read and written.
    pub copy: f64,
    /// Exponentials a second of all threads, of numbers in their caches.
    pub exponentials: f64,
}

impl Limits {
    /// For calls whose inputs and outputs are `bytes`; measures on the current rayon pool.
    pub fn new(bytes: usize) -> Self {
        let mut random = Random::new(7);
        let len = TILES * TILE_LEN;
        let half = bytes.max(LEAST_COPY) / 2 / size_of::<f32>();
        let threads = rayon::current_num_threads();
        Self {
            lhs: random.normals(len, 1.0),
            rhs: random.normals(len, 1.0),
            tiles: vec![0.0; threads * TILE_LEN],
            large: vec![0.0; LARGE * LARGE],
            from: vec![1.0; half],
            to: vec![0.0; half],
            tile_times: Vec::new(),
            large_times: Vec::new(),
            copy_times: Vec::new(),
            exponents: vec![0.0; threads * EXPONENTIALS.0],
            exponential_times: Vec::new(),
        }
    }

    /// One measurement of tiles, exponentials and copy.
    pub fn measure(&mut self) {
        self.tile_times.push(seconds(|| stream_tiles(&mut self.tiles, &self.lhs, &self.rhs)));
        self.copy_times.push(seconds(|| copy(&mut self.to, &self.from)));
        self.exponential_times.push(seconds(|| {
            rayon::scope(|scope| {
                for block in self.exponents.chunks_exact_mut(EXPONENTIALS.0) {
                    scope.spawn(|_| (0..EXPONENTIALS.1).for_each(|_| exponentials(black_box(block))));
                }
            });
        }));
        black_box((&mut self.tiles, &mut self.to));
    }

    /// One measurement of everything.
    pub fn measure_all(&mut self) {
        self.measure();
        self.measure_large();
    }

    /// One measurement of the large product.
    pub fn measure_large(&mut self) {
        let time = seconds(|| product([LARGE; 3], &mut self.large, [&self.lhs, &self.rhs], all_threads()));
        self.large_times.push(time);
        black_box(&mut self.large);
    }

    /// The medians; `None` before the first measurement.
    pub fn rates(&self) -> Option<Rates> {
        let copy_seconds = Spread::of(&self.copy_times)?.median;
        Some(Rates {
            tiles: TILES as f64 * flops(TILE) / Spread::of(&self.tile_times)?.median,
            large: Spread::of(&self.large_times).map(|spread| flops(LARGE) / spread.median),
            copy_seconds,
            copy: (2 * std::mem::size_of_val(self.from.as_slice())) as f64 / copy_seconds,
            exponentials: (self.exponents.len() * EXPONENTIALS.1) as f64 / Spread::of(&self.exponential_times)?.median,
        })
    }
}

fn flops(side: usize) -> f64 {
    2.0 * (side as f64).powi(3)
}

/// All threads of the current rayon pool.
fn all_threads() -> Parallelism {
    match rayon::current_num_threads() {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    }
}

/// `dst = lhs · rhs` of row-major matrices, `m × k` by `k × n`.
fn product([m, k, n]: [usize; 3], dst: &mut [f32], [lhs, rhs]: [&[f32]; 2], parallelism: Parallelism) {
    let fit = dst.len() >= m * n && lhs.len() >= m * k && rhs.len() >= k * n;
    assert!(fit, "matrices of {m} × {k} and {k} × {n}");
    // SAFETY: the three slices hold as many numbers, checked above, and `dst` is borrowed alone.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            n as isize,
            false,
            lhs.as_ptr(),
            1,
            k as isize,
            rhs.as_ptr(),
            1,
            n as isize,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Seconds that products of these sizes, `m × k` by `k × n`, take one after the other on the current rayon pool: of each the least of
/// a few runs, in memory that is there.
pub fn product_seconds(sizes: &[[usize; 3]]) -> f64 {
    const RUNS: usize = 3;
    let most = |len: fn(&[usize; 3]) -> usize| sizes.iter().map(len).max().unwrap_or(0);
    let mut random = Random::new(11);
    let mut numbers =
        |len: usize| random.normals(len.min(1 << 20), 1.0).into_iter().cycle().take(len).collect::<Vec<f32>>();
    let (a, b) = (numbers(most(|[m, k, _]| m * k)), numbers(most(|[_, k, n]| k * n)));
    let mut c = vec![0.0_f32; most(|[m, _, n]| m * n)];
    let mut known = BTreeMap::new();
    let mut least = |size| {
        let runs = (0..RUNS).map(|_| seconds(|| product(size, &mut c, [&a, &b], all_threads())));
        runs.fold(f64::INFINITY, f64::min)
    };
    let sum = sizes.iter().map(|&size| *known.entry(size).or_insert_with(|| least(size))).sum();
    black_box(&mut c);
    sum
}

/// Products of all pairs of tiles, each thread its share, each into its own tile.
fn stream_tiles(dst: &mut [f32], lhs: &[f32], rhs: &[f32]) {
    let share = TILES.div_ceil(dst.len() / TILE_LEN) * TILE_LEN;
    rayon::scope(|scope| {
        for ((dst, lhs), rhs) in dst.chunks_exact_mut(TILE_LEN).zip(lhs.chunks(share)).zip(rhs.chunks(share)) {
            scope.spawn(move |_| {
                for (lhs, rhs) in lhs.chunks_exact(TILE_LEN).zip(rhs.chunks_exact(TILE_LEN)) {
                    product([TILE; 3], dst, [lhs, rhs], Parallelism::None);
                }
            });
        }
    });
}

/// Replaces every number by its exponential, in the widest registers of the machine.
fn exponentials(block: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(block: &mut [f32]) {
            exponentials_of(block, f32::mul_add);
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(block: &mut [f32]) {
            exponentials_of(block, f32::mul_add);
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions.
            return unsafe { avx512(block) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has the instructions.
            return unsafe { avx2(block) };
        }
    }
    exponentials_of(block, |a, b, c| a * b + c);
}

/// `2ⁿ·eʳ` with the polynomial of the kernels, in plain operations that a compiler turns into vectors.
#[inline(always)]
fn exponentials_of(block: &mut [f32], mul_add: impl Fn(f32, f32, f32) -> f32) {
    /// Ascending, from the square on.
    const SERIES: [f32; 5] = [0.500_000_06, 0.166_664_16, 0.041_666_355, 0.008_375_127, 0.001_394_110_8];
    // Adding it rounds to a whole number, which then stands in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    for x in block {
        let bounded = x.clamp(-87.0, 87.0);
        let rounded = mul_add(bounded, std::f32::consts::LOG2_E, ROUND);
        let r = mul_add(rounded - ROUND, -std::f32::consts::LN_2, bounded);
        let series = SERIES.into_iter().rev().fold(0.0, |sum, c| mul_add(sum, r, c));
        let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
        *x = mul_add(mul_add(series, r, 1.0), r, 1.0) * power;
    }
}

/// Copies, each thread its share; a copy that fits a core's own cache on one thread, which is faster.
fn copy(to: &mut [f32], from: &[f32]) {
    let threads = rayon::current_num_threads();
    if threads == 1 || from.len() < (1 << 16) {
        to.copy_from_slice(from);
        return;
    }
    let share = from.len().div_ceil(threads);
    rayon::scope(|scope| {
        for (to, from) in to.chunks_mut(share).zip(from.chunks(share)) {
            scope.spawn(move |_| to.copy_from_slice(from));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_and_copies_are_computed() {
        let mut random = Random::new(3);
        let (lhs, rhs) = (random.normals(TILES * TILE_LEN, 1.0), random.normals(TILES * TILE_LEN, 1.0));
        let mut dst = vec![f32::NAN; 2 * TILE_LEN];
        stream_tiles(&mut dst, &lhs, &rhs);
        // The last pair of the second share.
        let start = (TILES - 1) * TILE_LEN;
        let expected: f32 = (0..TILE).map(|k| lhs[start + k] * rhs[start + k * TILE]).sum();
        assert!((dst[TILE_LEN] - expected).abs() < 1e-4, "{} {expected}", dst[TILE_LEN]);
        let from = random.normals(100_001, 1.0);
        let mut to = vec![0.0; from.len()];
        copy(&mut to, &from);
        assert_eq!(to, from);
    }

    #[test]
    fn exponentials_are_computed() {
        let mut block: Vec<f32> = (-800..800).map(|n| n as f32 / 10.0).collect();
        exponentials(&mut block);
        for (n, got) in (-800..800).zip(block) {
            let expected = (n as f32 / 10.0).exp();
            assert!((got - expected).abs() < 1e-5 * expected, "{got} {expected}");
        }
    }

    #[test]
    fn rates_come_from_times() {
        let mut limits = Limits::new(1 << 20);
        assert_eq!(limits.rates(), None);
        limits.measure_all();
        let rates = limits.rates().unwrap();
        assert!(rates.tiles > 0.0 && rates.exponentials > 0.0 && rates.large.unwrap() > 0.0);
        assert!((rates.copy * rates.copy_seconds - f64::from(1 << 20)).abs() < 1.0);
    }
}
