//! Toeplitz relative positions: tiles against the machine's own matrix product, transforms against themselves, and the
//! length from which transforms are faster.
//!
//! `cargo bench -p longspan-bench --bench toeplitz -- [--quick] [--length L]`. With a length, one forward call of each way at that
//! length alone, which may take minutes. Flops of a pair that is seen: `2·(d + dv)`; weighing is not
//! counted, so that the product has less to do than the kernel.

use std::hint::black_box;

use longspan_bench::machine::Limits;
use longspan_bench::timing::seconds;
use longspan_bench::turns::{Clock, HEAD_DIM, Options, Turn, alternate};
use longspan_bench::{Error, Pass};
use longspan_kernels::{Algorithm, Bias, Dims, FeatureMap, Order, Toeplitz};
use realfft::RealFftPlanner;

/// One head.
fn turn(toeplitz: Toeplitz, length: usize, order: Order, pass: Pass) -> Turn<Toeplitz> {
    Turn::new("toeplitz".to_owned(), toeplitz, Dims::square(1, 1, length, HEAD_DIM), order, pass)
}

/// Of the pairs that are seen.
fn flops(length: usize, order: Order) -> f64 {
    let length = length as f64;
    let pairs = if order == Order::Causal { length * (length + 1.0) / 2.0 } else { length * length };
    pairs * 4.0 * HEAD_DIM as f64
}

/// Seconds of the transforms alone that a head of this length needs.
fn transforms(length: usize) -> f64 {
    let size = (2 * length - 1).next_power_of_two();
    let mut planner = RealFftPlanner::<f64>::new();
    let (forward, inverse) = (planner.plan_fft_forward(size), planner.plan_fft_inverse(size));
    let (mut signal, mut spectrum) = (vec![0.5; size], forward.make_output_vec());
    let mut scratch = vec![Default::default(); forward.get_scratch_len().max(inverse.get_scratch_len())];
    let time = seconds(|| {
        for _ in 0..HEAD_DIM * (HEAD_DIM + 1) {
            forward.process_with_scratch(&mut signal, &mut spectrum, &mut scratch).expect("lengths of the plan");
            inverse.process_with_scratch(&mut spectrum, &mut signal, &mut scratch).expect("lengths of the plan");
            signal.fill(0.5);
        }
    });
    black_box(&signal);
    time
}

/// Seconds of one forward call of each algorithm at one length.
fn at_length(length: usize) -> Result<(), Error> {
    println!("{length} tokens, one head, d = dv = {HEAD_DIM}, f32, one thread; seconds of a forward call");
    let (full, clip) = (Bias::symmetric(length), Bias::clipped(64));
    for order in [Order::Causal, Order::Bidirectional] {
        for (name, algorithm, bias) in [
            ("whole table, tiled", Algorithm::Tiled, full),
            ("whole table, fft", Algorithm::Fft, full),
            ("clipped at 64, piecewise", Algorithm::Piecewise, clip),
        ] {
            let mut turn = turn(Toeplitz { algorithm, ..Toeplitz::new(bias) }, length, order, Pass::Forward);
            turn.run(&|body| seconds(body))?;
            println!("{name:<26} {order:?}: {:.3}", turn.least()[0]);
        }
    }
    Ok(())
}

fn main() -> Result<(), String> {
    let mut options = Options::of_program()?;
    options.threads = 1;
    if options.length_is_given {
        return options.run(|| at_length(options.length));
    }
    let quick = options.quick;
    let clock: Clock<'_> = &|body| seconds(body);
    options.run(|| {
        println!("one thread, f32, d = dv = {HEAD_DIM}; the fastest of runs by turns, the products' medians");
        for order in [Order::Causal, Order::Bidirectional] {
            let toeplitz = Toeplitz { algorithm: Algorithm::Tiled, ..Toeplitz::new(Bias::symmetric(1024)) };
            let mut turns = [turn(toeplitz, 1024, order, Pass::Forward)];
            let rates =
                alternate(&mut turns, Limits::new(1 << 14), if quick { 20 } else { 60 }, clock, Limits::measure_all)?;
            let rate = flops(1024, order) / turns[0].least()[0];
            let large = rates.large.unwrap_or(rates.tiles);
            println!(
                "tiled {:13}: {:.1} GFLOP/s; product 1024³ {:.1}, 64³ {:.1}: {:.0} % of the faster",
                if order == Order::Causal { "causal" } else { "bidirectional" },
                rate / 1e9,
                large / 1e9,
                rates.tiles / 1e9,
                100.0 * rate / large.max(rates.tiles)
            );
        }
        println!("\nbidirectional, milliseconds; fft/own: over the transforms alone; clip: of radius 64, by sums");
        println!(
            "{:>7} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9} {:>14} {:>9}",
            "tokens", "tiled", "backward", "fft", "fft/own", "clip", "backward", "clip by tiles", "exp clip"
        );
        for length in if quick { vec![512, 2048] } else { vec![1024, 4096, 16384, 32768] } {
            let (full, clip) = (Bias::symmetric(length), Bias::clipped(64));
            let mut turns = [
                (Algorithm::Tiled, full, FeatureMap::default()),
                (Algorithm::Fft, full, FeatureMap::default()),
                (Algorithm::Piecewise, clip, FeatureMap::default()),
                (Algorithm::Tiled, clip, FeatureMap::default()),
                (Algorithm::Piecewise, clip, FeatureMap::Exp),
            ]
            .map(|(algorithm, bias, feature_map)| {
                // The gradient by transforms takes six of them where the output takes two.
                let pass = if algorithm == Algorithm::Fft { Pass::Forward } else { Pass::ForwardBackward };
                let toeplitz = Toeplitz { algorithm, feature_map, ..Toeplitz::new(bias) };
                turn(toeplitz, length, Order::Bidirectional, pass)
            });
            let mut own = f64::INFINITY;
            for _ in 0..if length > 8192 { 2 } else { 8 } {
                turns.iter_mut().try_for_each(|turn| turn.run(clock))?;
                own = own.min(transforms(length));
            }
            let [tiled, fft, clip, slow, exp] = turns.each_ref().map(|turn| turn.least().map(|time| time * 1e3));
            println!(
                "{length:>7} {:>9.2} {:>9.2} {:>9.2} {:>8.2} {:>9.2} {:>9.2} {:>14.2} {:>9.2}",
                tiled[0],
                tiled[1],
                fft[0],
                fft[0] / 1e3 / own,
                clip[0],
                clip[1],
                slow[0] + slow[1],
                exp[0] + exp[1],
            );
        }
        Ok(())
    })
}
