//! Attention-free transformers against their rooflines.
//!
//! `cargo bench -p longspan-bench --bench aft -- [--quick] [--processor] [--threads N] [--length L] [NAME]`. The roofline of a
//! call is a copy of its inputs and outputs plus its exponentials, one a number of keys and one a gate; of aft-full, whose
//! work is a matrix product, `4·d` operations a pair that is seen (numerator and denominator) at the rate of the machine's own
//! product of 1024³. A backward reads twice as much, writes three gradients and takes the exponentials twice.
//!
//! Then one token at a time, after as many as there are in a call.

use longspan_bench::machine::{Limits, Rates};
use longspan_bench::turns::{Clock, HEAD_DIM, HEADS, Options, Turn, alternate};
use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Dims, Error as KernelError, Kernel, Mechanism, Order, Token};

/// Seconds of the roofline, forward and backward.
fn rooflines(turn: &Turn<Aft>, dims: &Dims, rates: &Rates) -> [f64; 2] {
    let aft = &turn.mechanism;
    if let Variant::Full { .. } = aft.variant {
        let length = dims.queries as f64;
        let pairs = if turn.order == Order::Causal { length * (length + 1.0) / 2.0 } else { length * length };
        let forward = HEADS as f64 * pairs * 4.0 * HEAD_DIM as f64 / rates.large.unwrap_or(rates.tiles);
        // The means anew, the sums of keys, and the biases of pairs.
        return [forward, 3.0 * forward];
    }
    let tokens = (HEADS * dims.queries) as f64;
    let (q, k) = (tokens * HEAD_DIM as f64, tokens * aft.key_dim(dims) as f64);
    let seconds = |numbers: f64, exponentials: f64| numbers * 4.0 / rates.copy + exponentials / rates.exponentials;
    // The backward reads q, k, v, out and its gradient, and writes three.
    [seconds(3.0 * q + k, q + k), seconds(6.0 * q + 2.0 * k, q + 2.0 * k)]
}

/// Seconds of a token, the least of `rounds` runs, by `clock`.
fn decode(aft: &Aft, dims: &Dims, rounds: usize, clock: Clock<'_>) -> Result<f64, KernelError> {
    // A table of biases has no row for a token beyond its length.
    let tokens = dims.queries.min(512);
    let numbers = |len: usize, seed: f64| -> Vec<f32> { (0..len).map(|n| (n as f64 * seed).sin() as f32).collect() };
    let key_dim = aft.key_dim(dims);
    let width = HEADS * HEAD_DIM;
    let stream = numbers(width + tokens, 0.7);
    let parameters: Vec<Vec<f32>> =
        aft.parameters(dims).iter().map(|parameter| numbers(parameter.len(), 0.3)).collect();
    let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
    let mut state = aft.empty_state(dims)?;
    let mut out = vec![0.0; width];
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let mut result = Ok(());
        let seconds = clock(&mut || {
            result = (0..tokens).try_for_each(|n| {
                let own = &stream[n..n + width];
                let token = Token { q: own, k: &own[..HEADS * key_dim], v: own, parameters: &parameters };
                aft.step(&token, &mut state, &mut out)
            });
        });
        result?;
        least = least.min(seconds / tokens as f64);
    }
    Ok(least)
}

fn main() -> Result<(), String> {
    let options = Options::of_program()?;
    let (length, dims) = (options.length, options.dims());
    let clock: Clock<'_> = &|body| options.clock(body);
    let conv = |normalized| Aft::new(Variant::Conv { taps: 33, normalized });
    let local = Aft::new(Variant::Local { window: 64, length: Some(length) });
    let full = |rank| Aft::new(Variant::Full { length, rank });
    // In turns of their own: after some 20 ms of exponentials the processor runs slower for a while, and takes 1.6 times as
    // long for what is bound by memory; a copy in the same turns does not show it.
    let mut groups = [
        options.turns(&[("aft-simple", Aft::new(Variant::Simple)), ("aft-conv-33", conv(false))]),
        options.turns(&[("aft-local-64", local), ("aft-full", full(None)), ("aft-low-rank-64", full(Some(64)))]),
    ];
    options.run(|| {
        println!(
            "B=1, H={HEADS}, L={length}, d={HEAD_DIM}, f32, {} threads, medians (least in brackets)",
            options.threads
        );
        for turns in groups.iter_mut().filter(|turns| !turns.is_empty()) {
            let rates =
                alternate(turns, Limits::new(1 << 25), if options.quick { 5 } else { 20 }, clock, Limits::measure_all)?;
            println!(
                "copy {:.1} GB/s, product {:.0} GFLOP/s, {:.2} G exponentials/s",
                rates.copy / 1e9,
                rates.large.unwrap_or(rates.tiles) / 1e9,
                rates.exponentials / 1e9
            );
            println!("{:<24} {:>20} {:>10} {:>20} {:>10}", "", "forward ms", "x roofline", "backward ms", "x roofline");
            for turn in turns {
                print!("{:<24}", turn.name);
                for ((median, least), roofline) in
                    turn.medians().into_iter().zip(turn.least()).zip(rooflines(turn, &dims, &rates))
                {
                    print!(" {:>11.2} ({:>6.2}) {:>10.2}", median * 1e3, least * 1e3, median / roofline);
                }
                println!();
            }
        }
        println!("{:<24} {:>20}", "", "a token, µs (least)");
        for turn in groups.iter().flatten().filter(|turn| turn.order == Order::Causal) {
            let aft = match turn.mechanism.variant {
                // Published kernels are formed from their parameters at every token.
                Variant::Conv { .. } => conv(true),
                // A token's time grows with the length.
                Variant::Full { .. } => continue,
                _ => turn.mechanism,
            };
            let seconds =
                decode(&aft, &dims, (length / 512).clamp(1, 8), clock).map_err(|error| turn.refused(error))?;
            println!("{:<24} {:>20.2}", turn.name, seconds * 1e6);
        }
        Ok(())
    })
}
