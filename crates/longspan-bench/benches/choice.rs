//! How often the cost model chooses well: every algorithm of a mechanism is forced in turn, and the one that `auto` takes is
//! compared with the fastest.
//!
//! `cargo bench -p longspan-bench --bench choice -- [--threads N] [NAME]`. Calls of 1 to 768 tokens, heads of 16, 64 and 128, one and
//! eight of them, with and without a mask. It prints each call whose choice takes over 1.1 times as long as the fastest, and for
//! each mechanism how many do not. Times are the least of several runs.

use std::time::{Duration, Instant};

use longspan_bench::timing::seconds;
use longspan_bench::turns::{Clock, Options, Turn};
use longspan_bench::{Error, Pass};
use longspan_kernels::kernelized::{KernelizedAttention, Score};
use longspan_kernels::{Algorithm, Bias, Dims, Fourier, Kernel, Mask, Order, Purpose, Shaw, Toeplitz};

const LENGTHS: [usize; 17] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768];
/// A choice is good if it takes at most so many times as long as the fastest.
const GOOD: f64 = 1.1;

/// The choices of one mechanism for one purpose.
#[derive(Default)]
struct Tally {
    calls: usize,
    good: usize,
    worst: f64,
}

/// Seconds of an algorithm, forward and with the backward.
fn times<M: Kernel<f32> + Clone + 'static>(mechanism: M, dims: Dims, order: Order) -> Result<[f64; 2], Error> {
    let mut turn = Turn::new("choice".to_owned(), mechanism, dims, order, Pass::ForwardBackward);
    let clock: Clock<'_> = &|body| seconds(body);
    let start = Instant::now();
    while turn.times[0].len() < 5 || (start.elapsed() < Duration::from_millis(20) && turn.times[0].len() < 2000) {
        turn.run(clock)?;
    }
    let [forward, backward] = turn.least();
    Ok([forward, forward + backward])
}

/// Prints what was chosen badly, and the tally.
fn check<M: Kernel<f32> + Clone + 'static>(
    name: &str,
    algorithms: &[Algorithm],
    forced: impl Fn(Algorithm) -> M,
) -> Result<(), Error> {
    let mut tallies = [Tally::default(), Tally::default()];
    for head_dim in [16, 64, 128] {
        for heads in [1, 8] {
            for (length, order) in LENGTHS.iter().flat_map(|&l| [(l, Order::Causal), (l, Order::Bidirectional)]) {
                let dims = Dims::square(1, heads, length, head_dim);
                let plan = forced(Algorithm::Auto).plan(&dims, &Mask { order, ..Mask::default() });
                let plan = plan.expect("sizes that make sense");
                let times: Vec<[f64; 2]> = algorithms
                    .iter()
                    .map(|&algorithm| times(forced(algorithm), dims, order))
                    .collect::<Result<_, _>>()?;
                for (n, purpose) in Purpose::ALL.into_iter().enumerate() {
                    let chosen = plan.algorithm(purpose);
                    let fastest = times.iter().map(|times| times[n]).fold(f64::INFINITY, f64::min);
                    let taken = algorithms.iter().position(|&algorithm| algorithm == chosen);
                    let ratio = taken.map_or(f64::INFINITY, |index| times[index][n] / fastest);
                    let tally = &mut tallies[n];
                    tally.calls += 1;
                    tally.worst = tally.worst.max(ratio);
                    if ratio <= GOOD {
                        tally.good += 1;
                    } else {
                        let all: Vec<_> = times.iter().map(|times| format!("{:.2}", times[n] * 1e6)).collect();
                        println!(
                            "{name}, {length} tokens, {heads} heads of {head_dim}, {order:?}, {purpose:?}: {chosen}, {ratio:.2} × \
                             the fastest; {algorithms:?} take {} µs",
                            all.join(", ")
                        );
                    }
                }
            }
        }
    }
    for (tally, purpose) in tallies.iter().zip(Purpose::ALL) {
        let Tally { calls, good, worst } = tally;
        println!("{name}, {purpose:?}: {good} of {calls} within {GOOD} × of the fastest, worst {worst:.2} ×");
    }
    Ok(())
}

fn main() -> Result<(), String> {
    let options = Options::of_program()?;
    options.run(|| {
        let scores = [
            ("kernelized", Score::Content),
            ("shaw-16", Score::Combined(Shaw::new(16))),
            ("shaw-64", Score::Combined(Shaw::new(64))),
            ("fourier", Score::Fourier(Fourier::default())),
        ];
        for (name, score) in scores.into_iter().filter(|(name, _)| options.wants(name)) {
            check(name, &[Algorithm::Naive, Algorithm::Chunked], |algorithm| KernelizedAttention {
                score,
                algorithm,
                ..Default::default()
            })?;
        }
        let biases = [("toeplitz", Bias::symmetric(1024)), ("toeplitz-clipped-64", Bias::clipped(64))];
        for (name, bias) in biases.into_iter().filter(|(name, _)| options.wants(name)) {
            check(name, &[Algorithm::Tiled, Algorithm::Fft, Algorithm::Piecewise], |algorithm| Toeplitz {
                algorithm,
                ..Toeplitz::new(bias)
            })?;
        }
        Ok(())
    })
}
