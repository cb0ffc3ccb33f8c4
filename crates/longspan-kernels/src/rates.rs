//! What each thing that an algorithm does takes on a machine: the rates that cost models multiply their counts by.

use std::fmt;
use std::sync::OnceLock;

use crate::algorithm::Purpose;
use crate::error::{Error, expect};

/// What errors call the rates.
const OPERATION: &str = "rates";

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

            /// What it is where nothing else was [installed](Rates::install), in the order of [`Purpose::ALL`].
            pub fn built_in(self) -> [f64; 2] {
                match self { $(Self::$rate => $seconds,)* }
            }
        }
    };
}

// As `longspan calibrate` found them on a Zen 5 core with AVX-512: 4 to 3072 tokens, heads of 16, 64 and 128, with and without
// a mask. There the choice was within 10 % of the best algorithm at 483 of 485 sizes, with the backward at 478. Only ratios decide.
rates! {
    /// A call.
    NaiveCall = "kernelized.naive.call", [652e-9, 1550e-9];
    /// A head.
    NaiveHead = "kernelized.naive.head", [133e-9, 488e-9];
    /// A query or key.
    NaiveToken = "kernelized.naive.token", [10.7e-9, 37e-9];
    /// A number of queries, keys, values and outputs.
    NaiveNumber = "kernelized.naive.number", [76.3e-12, 200e-12];
    /// An angle of Fourier positions.
    NaiveAngle = "kernelized.naive.angle", [51.8e-9, 102e-9];
    /// A number of queries and keys that Fourier positions turn.
    NaiveTurned = "kernelized.naive.turned", [438e-12, 2.53e-9];
    /// A query or key of a call with relative positions.
    NaiveScanToken = "kernelized.naive.scan-token", [2.8e-9, 6.35e-9];
    /// A number of the table of relative positions.
    NaiveTable = "kernelized.naive.table", [188e-12, 788e-12];
    /// A pair that sees each other.
    NaiveWeight = "kernelized.naive.weight", [133e-12, 543e-12];
    /// What relative positions add to a pair.
    NaiveRelativeWeight = "kernelized.naive.relative-weight", [148e-12, 345e-12];
    /// A floating-point operation.
    NaiveFlop = "kernelized.naive.flop", [3.9e-12, 14.4e-12];
    /// A call.
    CumsumCall = "kernelized.cumsum.call", [595e-9, 1410e-9];
    /// A head.
    CumsumHead = "kernelized.cumsum.head", [0.0, 0.0];
    /// A query or key.
    CumsumToken = "kernelized.cumsum.token", [48.2e-9, 175e-9];
    /// A number of queries, keys, values and outputs.
    CumsumNumber = "kernelized.cumsum.number", [136e-12, 340e-12];
    /// A number of the table of relative positions.
    CumsumTable = "kernelized.cumsum.table", [17.8e-12, 0.0];
    /// A number of the cumulated `φ(k) v⁺ᵀ`.
    CumsumState = "kernelized.cumsum.state", [55.8e-12, 215e-12];
    /// A floating-point operation.
    CumsumFlop = "kernelized.cumsum.flop", [20.1e-12, 66.9e-12];
    /// A call.
    ChunkedCall = "kernelized.chunked.call", [653e-9, 1620e-9];
    /// A head.
    ChunkedHead = "kernelized.chunked.head", [319e-9, 1370e-9];
    /// A query or key.
    ChunkedToken = "kernelized.chunked.token", [8.44e-9, 32.1e-9];
    /// A number of queries, keys, values and outputs.
    ChunkedNumber = "kernelized.chunked.number", [96.8e-12, 251e-12];
    /// An angle of Fourier positions.
    ChunkedAngle = "kernelized.chunked.angle", [20.8e-9, 102e-9];
    /// A number of queries and keys that Fourier positions turn.
    ChunkedTurned = "kernelized.chunked.turned", [214e-12, 678e-12];
    /// A query or key, for each pass that relative positions ask for.
    ChunkedScanToken = "kernelized.chunked.scan-token", [7.26e-9, 17.8e-9];
    /// A number of queries, keys, values and outputs, for each such pass.
    ChunkedScanNumber = "kernelized.chunked.scan-number", [16.1e-12, 166e-12];
    /// A number of the table of relative positions.
    ChunkedTable = "kernelized.chunked.table", [210e-12, 1.09e-9];
    /// A pair inside a chunk or a near band.
    ChunkedWeight = "kernelized.chunked.weight", [311e-12, 1.28e-9];
    /// A number of the running `Σ φ(k) vᵀ`.
    ChunkedState = "kernelized.chunked.state", [122e-12, 399e-12];
    /// A floating-point operation.
    ChunkedFlop = "kernelized.chunked.flop", [4.21e-12, 15.3e-12];
    /// A call.
    TiledCall = "toeplitz.tiled.call", [577e-9, 1420e-9];
    /// A head.
    TiledHead = "toeplitz.tiled.head", [509e-9, 1840e-9];
    /// A number of queries, keys, values and outputs.
    TiledNumber = "toeplitz.tiled.number", [185e-12, 730e-12];
    /// A pair that sees each other.
    TiledWeight = "toeplitz.tiled.weight", [335e-12, 1.44e-9];
    /// A floating-point operation.
    TiledFlop = "toeplitz.tiled.flop", [3.27e-12, 11.3e-12];
    /// A call.
    FftCall = "toeplitz.fft.call", [0.0, 0.0];
    /// A head.
    FftHead = "toeplitz.fft.head", [11800e-9, 45800e-9];
    /// A floating-point operation of a transform in doubles, counted as 2.5 N log₂N.
    FftFlop = "toeplitz.fft.flop", [44.3e-12, 174e-12];
    /// A call.
    PiecewiseCall = "toeplitz.piecewise.call", [503e-9, 1180e-9];
    /// A head.
    PiecewiseHead = "toeplitz.piecewise.head", [727e-9, 2960e-9];
    /// A number of queries, keys, values and outputs.
    PiecewiseNumber = "toeplitz.piecewise.number", [201e-12, 869e-12];
    /// A pair of a row and a key near it.
    PiecewiseWeight = "toeplitz.piecewise.weight", [509e-12, 2.23e-9];
    /// A number of the sums carried from strip to strip.
    PiecewiseState = "toeplitz.piecewise.state", [28.2e-12, 126e-12];
    /// A floating-point operation of tiles.
    PiecewiseFlop = "toeplitz.piecewise.flop", [2.77e-12, 10.8e-12];
    /// A floating-point operation of keys that enter sums and rows that read them.
    PiecewiseFar = "toeplitz.piecewise.far", [5.24e-12, 19.1e-12];
    /// A call.
    AftCall = "aft.chunked.call", [399e-9, 1170e-9];
    /// A pair of a row and a key in its window.
    AftWeight = "aft.chunked.weight", [705e-12, 3.31e-9];
    /// A pair of a row and a key in its window, for a channel, in tiles.
    AftTiled = "aft.chunked.tiled", [14.9e-12, 61.5e-12];
    /// The same in a convolution's tiles.
    AftConvolved = "aft.chunked.convolved", [16.7e-12, 52.3e-12];
    /// The same where keys are joined one by one.
    AftJoined = "aft.chunked.joined", [285e-12, 1.28e-9];
    /// A number of queries and keys.
    AftNumber = "aft.chunked.number", [137e-12, 425e-12];
    /// A call.
    SoftmaxCall = "softmax.tiled.call", [394e-9, 1040e-9];
    /// A number of queries, keys, values and outputs.
    SoftmaxNumber = "softmax.tiled.number", [136e-12, 485e-12];
    /// A pair that sees each other.
    SoftmaxWeight = "softmax.tiled.weight", [311e-12, 944e-12];
    /// A floating-point operation.
    SoftmaxFlop = "softmax.tiled.flop", [3.21e-12, 10.7e-12];
}

impl Rate {
    /// Its place in the list of all.
    fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Values for every [`Rate`], in seconds, in the order of [`Purpose::ALL`].
#[derive(Clone, PartialEq)]
pub struct Rates([[f64; 2]; Rate::ALL.len()]);

/// Those that this process runs with.
static INSTALLED: OnceLock<Rates> = OnceLock::new();

impl Default for Rates {
    /// The built-in ones.
    fn default() -> Self {
        let mut rates = Self([[0.0; 2]; Rate::ALL.len()]);
        Rate::ALL.iter().for_each(|&rate| rates.0[rate.index()] = rate.built_in());
        rates
    }
}

impl Rate {
    /// Whether it can have this value.
    fn check(self, seconds: f64) -> Result<(), Error> {
        expect(
            seconds.is_finite() && seconds >= 0.0,
            OPERATION,
            self.name(),
            || "seconds, finite and not negative".into(),
            || seconds.to_string(),
        )
    }
}

impl Rates {
    /// Rates by name, each once, none missing: rates of two machines beside each other would compare nothing.
    ///
    /// # Errors
    /// For a name that no rate has, one that is missing or comes twice, and a value that is negative or not finite.
    pub fn from_names<'n>(named: impl IntoIterator<Item = (&'n str, [f64; 2])>) -> Result<Self, Error> {
        let mut found = [None; Rate::ALL.len()];
        for (name, seconds) in named {
            let Some(rate) = Rate::ALL.iter().find(|rate| rate.name() == name) else {
                let known = Rate::ALL.iter().map(|rate| rate.name()).collect::<Vec<_>>().join(", ");
                return Err(Error::UnknownName { kind: "rate", got: name.into(), known });
            };
            let place = &mut found[rate.index()];
            seconds.into_iter().try_for_each(|seconds| rate.check(seconds))?;
            expect(place.is_none(), OPERATION, rate.name(), || "one pair of values".into(), || "two".into())?;
            *place = Some(seconds);
        }
        let mut rates = Self::default();
        for &rate in Rate::ALL {
            let Some(seconds) = found[rate.index()] else {
                return Err(Error::Argument {
                    operation: OPERATION,
                    argument: rate.name(),
                    expected: "values for every rate".into(),
                    got: "none".into(),
                });
            };
            rates.0[rate.index()] = seconds;
        }
        Ok(rates)
    }

    /// The value of one.
    pub fn get(&self, rate: Rate, purpose: Purpose) -> f64 {
        self.0[rate.index()][purpose.index()]
    }

    /// The same with another value for one of them.
    ///
    /// # Errors
    /// For a value that is negative or not finite.
    pub fn with(mut self, rate: Rate, purpose: Purpose, seconds: f64) -> Result<Self, Error> {
        rate.check(seconds)?;
        self.0[rate.index()][purpose.index()] = seconds;
        Ok(self)
    }

    /// Every rate with its values.
    pub fn iter(&self) -> impl Iterator<Item = (Rate, [f64; 2])> + '_ {
        Rate::ALL.iter().map(|&rate| (rate, self.0[rate.index()]))
    }

    /// Those that the plans of this process read: the installed ones, else the built-in ones.
    pub fn current() -> &'static Self {
        INSTALLED.get_or_init(Self::default)
    }

    /// Makes these the rates of this process. They can be set once, before the first plan: a backward call must find the
    /// algorithm that its forward call ran.
    ///
    /// # Errors
    /// If rates were installed, or a call was planned, before.
    pub fn install(self) -> Result<(), Error> {
        INSTALLED.set(self).map_err(|_| Error::Unsupported {
            operation: OPERATION,
            combination: "installing rates a second time, or after a call",
            mend: "install them once, when the program starts",
        })
    }
}

impl fmt::Debug for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(rate, seconds)| (rate.name(), seconds))).finish()
    }
}

/// The most things that one algorithm counts.
const MOST: usize = 12;

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

    /// How long all of it takes by these rates, in seconds.
    pub fn seconds(&self, rates: &Rates, purpose: Purpose) -> f64 {
        self.counts().iter().map(|&(rate, count)| count * rates.get(rate, purpose)).sum()
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

    fn named() -> Vec<(&'static str, [f64; 2])> {
        Rates::default().iter().map(|(rate, seconds)| (rate.name(), seconds)).collect()
    }

    #[test]
    fn names_are_unique_and_give_the_rates_back() {
        for (n, rate) in Rate::ALL.iter().enumerate() {
            assert_eq!(rate.index(), n);
            assert!(Rate::ALL[n + 1..].iter().all(|other| other.name() != rate.name()), "{rate}");
        }
        let mut reversed = named();
        reversed.reverse();
        assert_eq!(Rates::from_names(reversed), Ok(Rates::default()));
    }

    type Named = Vec<(&'static str, [f64; 2])>;

    #[test]
    fn names_and_values_that_mean_nothing_are_refused() {
        let refused = |change: &dyn Fn(&mut Named)| {
            let mut rates = named();
            change(&mut rates);
            Rates::from_names(rates).expect_err("rates that mean nothing").to_string()
        };
        let foreign = refused(&|rates| rates[3].0 = "kernelized.naive.coffee");
        assert!(foreign.contains("unknown rate") && foreign.contains("coffee"), "{foreign}");
        let missing = refused(&|rates| {
            rates.remove(3);
        });
        assert!(missing.contains(Rate::ALL[3].name()) && missing.contains("got none"), "{missing}");
        let twice = refused(&|rates| rates.push(rates[3]));
        assert!(twice.contains(Rate::ALL[3].name()) && twice.contains("got two"), "{twice}");
        for wrong in [-1.0, f64::NAN, f64::INFINITY] {
            for purpose in Purpose::ALL {
                let error = refused(&|rates| rates[3].1[purpose.index()] = wrong);
                assert!(error.contains(Rate::ALL[3].name()) && error.contains("not negative"), "{error}");
                Rates::default().with(Rate::NaiveFlop, purpose, wrong).expect_err("a rate that means nothing");
            }
        }
    }

    #[test]
    fn work_is_what_is_done_times_what_it_takes() {
        let work =
            Work::new(4.0, Rate::NaiveCall, [(Rate::NaiveHead, 1.0), (Rate::NaiveTable, 0.0), (Rate::NaiveFlop, 10.0)]);
        assert_eq!(work.counts(), [(Rate::NaiveCall, 1.0), (Rate::NaiveHead, 4.0), (Rate::NaiveFlop, 40.0)]);
        let rates = [(Rate::NaiveCall, 5.0), (Rate::NaiveHead, 2.0), (Rate::NaiveFlop, 0.5)];
        let rates = rates.into_iter().fold(Rates::default(), |all, (rate, s)| {
            let all = all.with(rate, Purpose::Output, s).expect("a rate");
            all.with(rate, Purpose::Gradient, 4.0 * s).expect("a rate")
        });
        assert_eq!(work.seconds(&rates, Purpose::Output), 5.0 + 8.0 + 20.0);
        assert_eq!(work.seconds(&rates, Purpose::Gradient), 4.0 * (5.0 + 8.0 + 20.0));
    }

    #[test]
    fn rates_are_installed_once() {
        // Whether another test has planned a call by now, the second time is one too many.
        let _ = Rates::default().install();
        assert!(Rates::default().install().expect_err("a second time").to_string().contains("when the program starts"));
    }
}
