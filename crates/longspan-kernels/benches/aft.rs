//! Attention-free transformers against their walls, by turns in one process.
//!
//! `cargo bench -p longspan-kernels --bench aft -- [--quick] [--processor] [--threads N] [--length L] [NAME]`. The wall of a call is a copy of its inputs and outputs
//! plus its exponentials, one a number of keys and one a gate; of aft-full, whose work is a matrix product, `4·d` operations a
//! pair that is seen (numerator and denominator) at the rate of the machine's own product of 1024³. A backward reads twice
//! as much, writes three gradients and takes the exponentials twice.
//!
//! Then one token at a time, after as many as there are in a call.

use std::sync::Arc;

use longspan_bench::machine::Limits;
use longspan_bench::on_threads;
use longspan_bench::turns::{Options, Turn};
use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Dims, Error, Mechanism, Order, Token};

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// Seconds of the wall, forward and backward, where a byte takes `copy`, an exponential `exponential`.
fn walls(aft: &Aft, dims: &Dims, causal: bool, copy: f64, exponential: f64, product: f64) -> [f64; 2] {
    if let Variant::Full { .. } = aft.variant {
        let length = dims.queries as f64;
        let pairs = HEADS as f64 * if causal { length * (length + 1.0) / 2.0 } else { length * length };
        let forward = pairs * 4.0 * HEAD_DIM as f64 / product;
        // The means anew, the sums of keys, and the biases of pairs.
        return [forward, 3.0 * forward];
    }
    let tokens = (HEADS * dims.queries) as f64;
    let (q, k) = (tokens * HEAD_DIM as f64, tokens * Mechanism::<f32>::key_dim(aft, dims) as f64);
    let forward = copy * (3.0 * q + k) * 4.0 + exponential * (q + k);
    // Reads q, k, v, out and its gradient; writes three.
    let backward = copy * (6.0 * q + 2.0 * k) * 4.0 + exponential * (q + 2.0 * k);
    [forward, backward]
}

/// Whether a token's time has a bound.
fn decodes(aft: &Aft) -> bool {
    !matches!(aft.variant, Variant::Full { .. })
}

/// Seconds of a token, the least of as many stretches as there are `rounds`, by `clock`.
fn decode(aft: &Aft, dims: &Dims, rounds: usize, clock: &dyn Fn(&mut dyn FnMut()) -> f64) -> Result<f64, Error> {
    // Tokens in a stretch; the numbers of a token repeat after so many channels.
    const TOKENS: usize = 512;
    let numbers = |len: usize, seed: f64| -> Vec<f32> { (0..len).map(|n| (n as f64 * seed).sin() as f32).collect() };
    let key_dim = Mechanism::<f32>::key_dim(aft, dims);
    let width = HEADS * HEAD_DIM;
    let stream = numbers(width + TOKENS, 0.7);
    let parameters: Vec<Vec<f32>> =
        Mechanism::<f32>::parameters(aft, dims).iter().map(|parameter| numbers(parameter.len(), 0.3)).collect();
    let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
    let mut state = Mechanism::<f32>::empty_state(aft, dims)?;
    let mut out = vec![0.0; width];
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let mut result = Ok(());
        let seconds = clock(&mut || {
            result = (0..TOKENS).try_for_each(|n| {
                let own = &stream[n..n + width];
                let token = Token { q: own, k: &own[..HEADS * key_dim], v: own, parameters: &parameters };
                aft.step(&token, &mut state, &mut out)
            });
        });
        result?;
        least = least.min(seconds / TOKENS as f64);
    }
    Ok(least)
}

fn main() -> Result<(), String> {
    let options = Options::of_program()?;
    let length = options.length;
    let dims = Dims::square(1, HEADS, length, HEAD_DIM);
    let mut subjects = Vec::new();
    for causal in [true, false] {
        for (name, variant) in [
            ("aft-simple", Variant::Simple),
            ("aft-conv-33", Variant::Conv { taps: 33, normalized: false }),
            ("aft-local-64", Variant::Local { window: 64, length: Some(length) }),
            ("aft-full", Variant::Full { length, rank: None }),
            ("aft-low-rank 64", Variant::Full { length, rank: Some(64) }),
        ] {
            if options.wants(name) {
                let aft = Aft::new(variant);
                let order = if causal { Order::Causal } else { Order::Bidirectional };
                let turn = Turn::new(Arc::new(aft), dims, order, true);
                subjects.push((
                    format!("{name} {}", if causal { "masked" } else { "bidirectional" }),
                    aft,
                    causal,
                    turn,
                ));
            }
        }
    }
    on_threads(options.threads, || {
        println!(
            "B=1, H={HEADS}, L={length}, d={HEAD_DIM}, f32, {} threads, medians (least in brackets)",
            options.threads
        );
        // In turns of their own: after some 20 ms of exponentials the processor here runs slower for a while, and takes 1.6 times as
        // long for what is bound by memory, while a copy in the same turns does not show it.
        let (mut short, mut long): (Vec<_>, Vec<_>) =
            subjects.iter_mut().partition(|(_, aft, ..)| matches!(aft.variant, Variant::Simple | Variant::Conv { .. }));
        for group in [&mut short, &mut long].into_iter().filter(|group| !group.is_empty()) {
            let mut limits = Limits::new(1 << 25);
            for round in 0..if options.quick { 6 } else { 21 } {
                for (.., turn) in group.iter_mut() {
                    turn.run(&|body| options.clock(body));
                    if round == 0 {
                        turn.times = Default::default();
                    }
                }
                limits.measure();
                limits.measure_large();
            }
            let rates = limits.rates().expect("measured above");
            let product = rates.large.expect("measured above");
            println!(
                "copy {:.1} GB/s, product {:.0} GFLOP/s, {:.2} G exponentials/s",
                rates.copy / 1e9,
                product / 1e9,
                rates.exponentials / 1e9
            );
            println!("{:<32} {:>20} {:>8} {:>20} {:>8}", "", "forward ms", "x wall", "backward ms", "x wall");
            for (name, aft, causal, turn) in group.iter() {
                let walls = walls(aft, &dims, *causal, 1.0 / rates.copy, 1.0 / rates.exponentials, product);
                let ([forward, backward], least) = (turn.medians(), turn.least());
                println!(
                    "{name:<32} {:>11.2} ({:>6.2}) {:>8.2} {:>11.2} ({:>6.2}) {:>8.2}",
                    forward * 1e3,
                    least[0] * 1e3,
                    forward / walls[0],
                    backward * 1e3,
                    least[1] * 1e3,
                    backward / walls[1]
                );
            }
        }
        println!("{:<32} {:>20}", "", "a token, µs (least)");
        for (name, aft, ..) in subjects.iter().filter(|(_, aft, causal, _)| *causal && decodes(aft)) {
            let rounds = (length / 512).min(8);
            // Published kernels are formed from their parameters at every token.
            let aft = match aft.variant {
                Variant::Conv { taps, .. } => &Aft::new(Variant::Conv { taps, normalized: true }),
                _ => aft,
            };
            match decode(aft, &dims, rounds, &|body| options.clock(body)) {
                Ok(seconds) => println!("{name:<32} {:>20.2}", seconds * 1e6),
                Err(error) => println!("{name:<32} {error}"),
            }
        }
    })
    .map_err(|error| error.to_string())
}
