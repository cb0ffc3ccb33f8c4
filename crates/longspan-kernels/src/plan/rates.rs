//! What each thing that an algorithm does takes on a machine: the rates that cost models multiply their counts by.

use std::fmt;

use super::Purpose;

/// Generates [`Rate`], its names and the built-in values.
macro_rules! rates {
    ($( $(#[$doc:meta])* $rate:ident = $name:literal, $seconds:expr; )*) => {
        /// A rate of the cost models: the seconds that one of something takes an algorithm, in `f32` on one thread; for each
        /// [`Purpose`], since a backward does each thing again and more besides.
        ///
        /// A name says mechanism, algorithm, and what is counted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Rate { $( $(#[$doc])* $rate, )* }

        impl Rate {
            /// Every rate.
            pub const ALL: &'static [Self] = &[$(Self::$rate),*];

            /// The name in files and tables.
            pub fn name(self) -> &'static str {
                match self { $(Self::$rate => $name,)* }
            }

            /// Its value in seconds.
            pub fn seconds(self, purpose: Purpose) -> f64 {
                let [inference, training]: [f64; 2] = match self { $(Self::$rate => $seconds,)* };
                match purpose {
                    Purpose::Inference => inference,
                    Purpose::Training => training,
                }
            }
        }
    };
}

// Least squares of relative errors, over sweeps on a Zen 5 core and, for kernelized attention, on a Sapphire Rapids core too, both
// with AVX-512: 1 to 3,072 tokens, heads of 16, 64 and 128, with and without a mask. Only ratios decide. How often they decide
// well: `cargo bench -p longspan-bench --bench choice`.
rates! {
    /// A call.
    NaiveCall = "kernelized.naive.call", [301e-9, 683e-9];
    /// A head.
    NaiveHead = "kernelized.naive.head", [187e-9, 648e-9];
    /// A number of queries, keys, values and outputs.
    NaiveNumber = "kernelized.naive.number", [147e-12, 473e-12];
    /// An angle of Fourier positions.
    NaiveAngle = "kernelized.naive.angle", [21.7e-9, 44.3e-9];
    /// A number of queries and keys that Fourier positions turn.
    NaiveTurned = "kernelized.naive.turned", [426e-12, 2.94e-9];
    /// A query or key of a call with relative positions.
    NaiveScanToken = "kernelized.naive.scan-token", [12.7e-9, 40.7e-9];
    /// A number of the table of relative positions.
    NaiveTable = "kernelized.naive.table", [160e-12, 716e-12];
    /// A pair that sees each other.
    NaiveWeight = "kernelized.naive.weight", [316e-12, 1.2e-9];
    /// A floating-point operation.
    NaiveFlop = "kernelized.naive.flop", [3.83e-12, 13.6e-12];
    /// A call.
    ChunkedCall = "kernelized.chunked.call", [387e-9, 1040e-9];
    /// A head.
    ChunkedHead = "kernelized.chunked.head", [278e-9, 1150e-9];
    /// A number of queries, keys, values and outputs.
    ChunkedNumber = "kernelized.chunked.number", [236e-12, 849e-12];
    /// An angle of Fourier positions.
    ChunkedAngle = "kernelized.chunked.angle", [35.4e-9, 113e-9];
    /// A query or key, for each pass that relative positions ask for.
    ChunkedScanToken = "kernelized.chunked.scan-token", [10.7e-9, 33e-9];
    /// A number of the table of relative positions.
    ChunkedTable = "kernelized.chunked.table", [269e-12, 1.51e-9];
    /// A pair inside a chunk or a near band.
    ChunkedWeight = "kernelized.chunked.weight", [382e-12, 1.38e-9];
    /// A number of the running `Σ φ(k) vᵀ`.
    ChunkedState = "kernelized.chunked.state", [147e-12, 432e-12];
    /// A floating-point operation.
    ChunkedFlop = "kernelized.chunked.flop", [3.73e-12, 13.7e-12];
    /// A call.
    TiledCall = "toeplitz.tiled.call", [642e-9, 1320e-9];
    /// A head.
    TiledHead = "toeplitz.tiled.head", [552e-9, 2080e-9];
    /// A number of queries, keys, values and outputs.
    TiledNumber = "toeplitz.tiled.number", [181e-12, 728e-12];
    /// A pair that sees each other.
    TiledWeight = "toeplitz.tiled.weight", [354e-12, 1.54e-9];
    /// A floating-point operation.
    TiledFlop = "toeplitz.tiled.flop", [3.53e-12, 12.1e-12];
    /// A call.
    FftCall = "toeplitz.fft.call", [0.0, 0.0];
    /// A head.
    FftHead = "toeplitz.fft.head", [12500e-9, 48400e-9];
    /// A floating-point operation of a transform in f64, counted as 2.5 N log₂N.
    FftFlop = "toeplitz.fft.flop", [46.8e-12, 184e-12];
    /// A call.
    PiecewiseCall = "toeplitz.piecewise.call", [520e-9, 1250e-9];
    /// A head.
    PiecewiseHead = "toeplitz.piecewise.head", [793e-9, 3160e-9];
    /// A number of queries, keys, values and outputs.
    PiecewiseNumber = "toeplitz.piecewise.number", [202e-12, 888e-12];
    /// A pair of a row and a key near it.
    PiecewiseWeight = "toeplitz.piecewise.weight", [550e-12, 2.39e-9];
    /// A number of the sums carried from chunk to chunk.
    PiecewiseState = "toeplitz.piecewise.state", [30.6e-12, 138e-12];
    /// A floating-point operation of tiles.
    PiecewiseFlop = "toeplitz.piecewise.flop", [2.99e-12, 11.4e-12];
    /// A floating-point operation of keys that enter sums and rows that read them.
    PiecewiseFar = "toeplitz.piecewise.far", [5.46e-12, 20.5e-12];
    /// A call.
    AftCall = "aft.chunked.call", [434e-9, 1280e-9];
    /// A pair of a row and a key in its window.
    AftWeight = "aft.chunked.weight", [772e-12, 3.58e-9];
    /// A pair of a row and a key in its window, for a channel, in tiles.
    AftTiled = "aft.chunked.tiled", [15.6e-12, 64.8e-12];
    /// The same in a convolution's tiles.
    AftConvolved = "aft.chunked.convolved", [16.8e-12, 54.2e-12];
    /// The same where keys are joined one by one.
    AftJoined = "aft.chunked.joined", [304e-12, 1.34e-9];
    /// A number of queries and keys.
    AftNumber = "aft.chunked.number", [143e-12, 441e-12];
    /// A call.
    SoftmaxCall = "softmax.tiled.call", [458e-9, 989e-9];
    /// A number of queries, keys, values and outputs.
    SoftmaxNumber = "softmax.tiled.number", [142e-12, 516e-12];
    /// A pair that sees each other.
    SoftmaxWeight = "softmax.tiled.weight", [333e-12, 1.01e-9];
    /// A floating-point operation.
    SoftmaxFlop = "softmax.tiled.flop", [3.4e-12, 11.3e-12];
    /// A call.
    ConvolutionCall = "convolution.chunked.call", [458e-9, 989e-9];
    /// A number of queries, keys, values and outputs.
    ConvolutionNumber = "convolution.chunked.number", [212e-12, 686e-12];
    /// A tap of a query, for a channel.
    ConvolutionTap = "convolution.chunked.tap", [45e-12, 120e-12];
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The most things that one algorithm counts.
const MOST: usize = 10;

/// How often an algorithm does each thing that has a rate, forward. Things that it does not do are left out.
#[derive(Clone, Copy, PartialEq)]
pub struct Work {
    counts: [(Rate, f64); MOST],
    len: usize,
}

impl Work {
    /// From counts, of which those that are 0 are dropped; all times `heads`, but for the first, which is a call.
    pub(crate) fn new<const N: usize>(heads: f64, call: Rate, counts: [(Rate, f64); N]) -> Self {
        const { assert!(N < MOST, "more counts than a list of work holds") };
        let mut work = Self { counts: [(call, 1.0); MOST], len: 1 };
        for (rate, count) in counts {
            if count * heads > 0.0 {
                work.counts[work.len] = (rate, count * heads);
                work.len += 1;
            }
        }
        work
    }

    /// What is done, and how often.
    pub fn counts(&self) -> &[(Rate, f64)] {
        &self.counts[..self.len]
    }

    /// How long all of it takes, in seconds.
    pub fn seconds(&self, purpose: Purpose) -> f64 {
        self.counts().iter().map(|&(rate, count)| count * rate.seconds(purpose)).sum()
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.counts().iter().map(|(rate, count)| (rate.name(), count))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for (n, rate) in Rate::ALL.iter().enumerate() {
            assert!(Rate::ALL[n + 1..].iter().all(|other| other.name() != rate.name()), "{rate}");
        }
    }

    #[test]
    fn work_is_what_is_done_times_what_it_takes() {
        let work =
            Work::new(4.0, Rate::NaiveCall, [(Rate::NaiveHead, 1.0), (Rate::NaiveTable, 0.0), (Rate::NaiveFlop, 10.0)]);
        assert_eq!(work.counts(), [(Rate::NaiveCall, 1.0), (Rate::NaiveHead, 4.0), (Rate::NaiveFlop, 40.0)]);
        for purpose in Purpose::ALL {
            let seconds = |rate: Rate| rate.seconds(purpose);
            let sum = seconds(Rate::NaiveCall) + 4.0 * seconds(Rate::NaiveHead) + 40.0 * seconds(Rate::NaiveFlop);
            assert!((work.seconds(purpose) - sum).abs() < 1e-12 * sum);
        }
    }
}
