//! Kernelized attention, forward and backward apart, against its roofline.
//!
//! `cargo bench -p longspan-bench --bench kernelized -- [--quick] [--processor] [--threads N] [--length L] [NAME]`; with
//! `--processor` the least processor time of one thread, which other programs on the machine disturb less. The roofline of a
//! call is the least products that the chunked algorithm needs, at the rate of the machine's own 64 × 64 × 64 products that
//! stream through memory, plus a copy of what it reads and writes. Feature maps, divisions and normalisers are not counted.
//! Beside it stands the time as a multiple of plain kernelized attention's under the same mask.
//!
//! Products of a row of the backward pass, with `d` features, `dv` values and chunks of `C` rows: the two states and the
//! three gradients that are read from them, `5·d·dv`; under a causal mask, half a tile of weights (`d`) and of their
//! gradients (`dv`), and what they give to queries, keys (`d` each) and values (`dv`): `C/2·(3·d + 2·dv)`; with `R` table rows
//! twice more `R·(d + dv)` for the near band and its gradients.

use longspan_bench::Error;
use longspan_bench::machine::{Limits, Rates};
use longspan_bench::turns::{Clock, HEAD_DIM, HEADS, Options, Turn, alternate};
use longspan_kernels::kernelized::{KernelizedAttention, Score};
use longspan_kernels::{Algorithm, Dims, Fourier, Kernel, Order, Shaw};

const CHUNK: f64 = 64.0;

/// Seconds of the products and of the copy, forward and backward.
fn rooflines(turn: &Turn<KernelizedAttention>, dims: &Dims, rates: &Rates) -> Result<[[f64; 2]; 2], Error> {
    let (attention, causal) = (&turn.mechanism, turn.order == Order::Causal);
    let d = HEAD_DIM as f64;
    // Fourier positions multiply the features; the state says by how much.
    let state = Kernel::<f32>::empty_state(attention, dims).map_err(|error| turn.refused(error))?;
    let features = state.shape().parts[0] as f64 / d;
    let half = if causal { CHUNK / 2.0 } else { 0.0 };
    let table = attention.score.shaw().map_or(0.0, |shaw| {
        let radius = shaw.radius as f64;
        if causal { radius + 1.0 } else { 2.0 * radius + 1.0 }
    });
    let forward = 2.0 * features * d + half * (features + d) + table * 2.0 * d;
    let backward = 5.0 * features * d + half * (3.0 * features + 2.0 * d) + table * 5.0 * d;
    let rows = (HEADS * dims.queries) as f64;
    let products = |row: f64| 2.0 * row * rows / rates.tiles;
    // q, k, v, out; then the gradient of out, and three more.
    let copy = |tensors: f64| tensors * rows * d * 4.0 / rates.copy;
    Ok([[products(forward), copy(4.0)], [products(backward), copy(8.0)]])
}

fn main() -> Result<(), String> {
    let options = Options::of_program()?;
    let dims = options.dims();
    let mut turns = options.turns(
        &[
            ("kernelized", Score::Content),
            ("shaw-16", Score::Combined(Shaw::new(16))),
            ("shaw-64", Score::Combined(Shaw::new(64))),
            ("fourier", Score::Fourier(Fourier::default())),
        ]
        .map(|(name, score)| {
            (name, KernelizedAttention { score, algorithm: Algorithm::Chunked, ..Default::default() })
        }),
    );
    options.run(|| {
        let limits = Limits::new(4 * 4 * HEADS * options.length * HEAD_DIM);
        let clock: Clock<'_> = &|body| options.clock(body);
        let rates = alternate(&mut turns, limits, if options.quick { 10 } else { 40 }, clock, Limits::measure)?;
        println!(
            "B=1, H={HEADS}, L={}, d={HEAD_DIM}, f32, {} threads, {}; copy {:.1} GB/s, 64³ products {:.0} GFLOP/s",
            options.length,
            options.threads,
            if options.processor { "least processor time" } else { "medians" },
            rates.copy / 1e9,
            rates.tiles / 1e9
        );
        let columns =
            |pass| format!(" {:>11} {:>10} {:>9} {:>7}", format!("{pass} ms"), "x roofline", "GFLOP/s", "x plain");
        println!("{:<18}{}{}", "", columns("forward"), columns("backward"));
        let times = |turn: &Turn<KernelizedAttention>| if options.processor { turn.least() } else { turn.medians() };
        for turn in &turns {
            print!("{:<18}", turn.name);
            let plain = |other: &&Turn<KernelizedAttention>| {
                matches!(other.mechanism.score, Score::Content) && other.order == turn.order
            };
            let plain = turns.iter().find(plain).map_or([f64::NAN; 2], times);
            for ((time, plain), [products, copy]) in
                times(turn).into_iter().zip(plain).zip(rooflines(turn, &dims, &rates)?)
            {
                let rate = products * rates.tiles / time / 1e9;
                print!(" {:>11.2} {:>10.2} {rate:>9.0} {:>7.2}", time * 1e3, time / (products + copy), time / plain);
            }
            println!();
        }
        Ok(())
    })
}
