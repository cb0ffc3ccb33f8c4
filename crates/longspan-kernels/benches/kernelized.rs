//! Kernelized attention, forward and backward apart, against its wall, by turns in one process.
//!
//! `cargo bench -p longspan-kernels --bench kernelized -- [--quick] [--processor] [--threads N] [--length L] [NAME]`; with
//! `--processor` the least processor time of one thread, which a machine with other work can tell too. The wall of a call is
//! the least products that the chunked algorithm needs, at the rate of the machine's own 64 × 64 × 64 products that stream
//! through memory, plus a copy of what it reads and writes. Feature maps, divisions and normalisers are not counted. Beside it
//! stands the time as a multiple of kernelized attention's under the same mask.
//!
//! Products of a row of the backward pass, with `d` features, `dv` values and chunks of `C` rows: the two states and the
//! three gradients that are read from them, `5·d·dv`; under a causal mask, half a tile of weights (`d`) and of their
//! gradients (`dv`), and what they give to queries, keys (`d` each) and values (`dv`): `C/2·(3·d + 2·dv)`; with `R` table rows
//! twice more `R·(d + dv)` for the near band and its gradients.

use std::sync::Arc;

use longspan_bench::machine::Limits;
use longspan_bench::on_threads;
use longspan_bench::turns::{Options, Turn};
use longspan_kernels::kernelized::{KernelizedAttention, Score};
use longspan_kernels::{Algorithm, Dims, Fourier, Mechanism, Order, Shaw};

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const CHUNK: f64 = 64.0;

/// Seconds of the products and of the copy, forward and backward.
fn walls(attention: &KernelizedAttention, dims: &Dims, causal: bool, copy: f64, product: f64) -> [[f64; 2]; 2] {
    let d = HEAD_DIM as f64;
    // Fourier positions multiply the features; the state says by how much.
    let state = Mechanism::<f32>::empty_state(attention, dims).expect("the benchmark's sizes make sense");
    let features = state.shape().parts[0] as f64 / d;
    let half = if causal { CHUNK / 2.0 } else { 0.0 };
    let table = attention.score.shaw().map_or(0.0, |shaw| {
        let radius = shaw.radius as f64;
        if causal { radius + 1.0 } else { 2.0 * radius + 1.0 }
    });
    let forward = 2.0 * features * d + half * (features + d) + table * 2.0 * d;
    let backward = 5.0 * features * d + half * (3.0 * features + 2.0 * d) + table * 5.0 * d;
    let rows = (HEADS * dims.queries) as f64;
    let flops = |row: f64| 2.0 * row * rows / product;
    // q, k, v, out; then the gradient of out, and three more.
    let moved = |tensors: f64| tensors * rows * d * 4.0 / copy;
    [[flops(forward), moved(4.0)], [flops(backward), moved(8.0)]]
}

fn main() -> Result<(), String> {
    let options = Options::of_program()?;
    let dims = Dims::square(1, HEADS, options.length, HEAD_DIM);
    let mut subjects = Vec::new();
    for causal in [true, false] {
        for (name, score) in [
            ("kernelized", Score::Content),
            ("shaw-16", Score::Combined(Shaw::new(16))),
            ("shaw-64", Score::Combined(Shaw::new(64))),
            ("fourier", Score::Fourier(Fourier::default())),
        ] {
            if options.wants(name) {
                let attention = KernelizedAttention { score, algorithm: Algorithm::Chunked, ..Default::default() };
                let order = if causal { Order::Causal } else { Order::Bidirectional };
                let turn = Turn::new(Arc::new(attention.clone()), dims, order, true);
                subjects.push((format!("{name}{}", if causal { ", masked" } else { "" }), attention, causal, turn));
            }
        }
    }
    on_threads(options.threads, || {
        let mut limits = Limits::new(4 * 4 * HEADS * options.length * HEAD_DIM);
        for round in 0..if options.quick { 11 } else { 41 } {
            for (.., turn) in &mut subjects {
                turn.run(&|body| options.clock(body));
                if round == 0 {
                    turn.times = Default::default();
                }
            }
            limits.measure();
        }
        let rates = limits.rates().expect("measured above");
        println!(
            "B=1, H={HEADS}, L={}, d={HEAD_DIM}, f32, {} threads, {}; copy {:.1} GB/s, 64³ products {:.0} GFLOP/s",
            options.length,
            options.threads,
            if options.processor { "least processor time" } else { "medians" },
            rates.copy / 1e9,
            rates.tiles / 1e9
        );
        println!(
            "{:<20} {:>11} {:>7} {:>9} {:>8} {:>12} {:>7} {:>9} {:>8}",
            "", "forward ms", "x wall", "GFLOP/s", "x plain", "backward ms", "x wall", "GFLOP/s", "x plain"
        );
        let times = |turn: &Turn| if options.processor { turn.least() } else { turn.medians() };
        for (name, attention, causal, turn) in &subjects {
            let walls = walls(attention, &dims, *causal, rates.copy, rates.tiles);
            print!("{name:<20}");
            let plain =
                subjects.iter().find(|(_, other, own, _)| matches!(other.score, Score::Content) && own == causal);
            let plain = plain.map_or([f64::NAN; 2], |(.., turn)| times(turn));
            for ((time, plain), [products, copy]) in times(turn).into_iter().zip(plain).zip(walls) {
                let rate = products * rates.tiles / time / 1e9;
                print!(" {:>11.2} {:>7.2} {rate:>9.0} {:>8.2}", time * 1e3, time / (products + copy), time / plain);
            }
            println!();
        }
    })
    .map_err(|error| error.to_string())
}
