//! Kernelized attention, forward and backward apart, against its wall, by turns in one process.
//!
//! `cargo bench -p longspan-kernels --bench kernelized -- [--quick] [--least] [--threads N] [--length L] [NAME]`. The wall of a call is
//! the least products that the chunked algorithm needs, at the rate of the machine's own 64 × 64 × 64 products that stream
//! through memory, plus a copy of what it reads and writes. Feature maps, divisions and normalisers are not counted.
//!
//! Products of a row of the backward pass, with `d` features, `dv` values and chunks of `C` rows: the two states and the
//! three gradients that are read from them, `5·d·dv`; under a causal mask, half a tile of weights (`d`) and of their
//! gradients (`dv`), and what they give to queries, keys (`d` each) and values (`dv`): `C/2·(3·d + 2·dv)`; with `R` table rows
//! twice more `R·(d + dv)` for the near band and its gradients.

use std::time::Instant;

use longspan_bench::machine::Limits;
use longspan_kernels::kernelized::{KernelizedAttention, Score};
use longspan_kernels::{
    Algorithm, Call, Cotangent, Dims, Fourier, Gradients, Mask, Mechanism, Output, Scratch, Shaw, View, ViewMut,
};
use longspan_testing::random::Random;

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const CHUNK: f64 = 64.0;

/// One mechanism with its memory.
struct Subject {
    name: String,
    attention: KernelizedAttention,
    dims: Dims,
    causal: bool,
    inputs: [Vec<f32>; 4],
    parameters: Vec<Vec<f32>>,
    out: Vec<f32>,
    denominators: Vec<f32>,
    gradients: [Vec<f32>; 3],
    d_parameters: Vec<Vec<f32>>,
    scratch: Scratch<f32>,
    times: [Vec<f64>; 2],
}

impl Subject {
    fn new(name: &str, score: Score, length: usize, causal: bool) -> Self {
        let dims = Dims::square(1, HEADS, length, HEAD_DIM);
        let attention = KernelizedAttention { score, algorithm: Algorithm::Chunked, ..KernelizedAttention::default() };
        let mut random = Random::new(1);
        let mut draw =
            |len: usize, scale: f64| -> Vec<f32> { (0..len).map(|_| (scale * random.normal()) as f32).collect() };
        let len = HEADS * length * HEAD_DIM;
        let shapes = Mechanism::<f32>::parameters(&attention, &dims);
        Self {
            name: format!("{name}{}", if causal { ", masked" } else { "" }),
            attention,
            dims,
            causal,
            inputs: [draw(len, 1.0), draw(len, 1.0), draw(len, 1.0), draw(len, 1.0)],
            parameters: shapes.iter().map(|p| draw(p.len(), 0.1)).collect(),
            out: vec![1.0; len],
            denominators: vec![1.0; HEADS * length],
            gradients: [vec![1.0; len], vec![1.0; len], vec![1.0; len]],
            d_parameters: shapes.iter().map(|p| vec![1.0; p.len()]).collect(),
            scratch: Scratch::new(),
            times: Default::default(),
        }
    }

    /// Runs forward, and then backward too.
    fn run(&mut self) {
        let shape = self.dims.q();
        let parameters: Vec<&[f32]> = self.parameters.iter().map(Vec::as_slice).collect();
        let call = Call {
            dims: self.dims,
            q: View::contiguous(&self.inputs[0], shape),
            k: View::contiguous(&self.inputs[1], shape),
            v: View::contiguous(&self.inputs[2], shape),
            parameters: &parameters,
            mask: if self.causal { Mask::causal() } else { Mask::bidirectional() },
            initial_state: None,
        };
        let output = Output {
            out: ViewMut::contiguous(&mut self.out, shape),
            denominators: Some(&mut self.denominators),
            final_state: None,
        };
        let start = Instant::now();
        self.attention.forward(&call, output, &mut self.scratch).expect("the benchmark's call makes sense");
        self.times[0].push(start.elapsed().as_secs_f64());
        let cotangent = Cotangent {
            out: View::contiguous(&self.out, shape),
            denominators: &self.denominators,
            d_out: View::contiguous(&self.inputs[3], shape),
            final_state: None,
        };
        let mut d_parameters: Vec<&mut [f32]> = self.d_parameters.iter_mut().map(Vec::as_mut_slice).collect();
        let [dq, dk, dv] = &mut self.gradients;
        let gradients = Gradients {
            dq: ViewMut::contiguous(dq, shape),
            dk: ViewMut::contiguous(dk, shape),
            dv: ViewMut::contiguous(dv, shape),
            parameters: &mut d_parameters,
            initial_state: None,
        };
        let start = Instant::now();
        self.attention
            .backward(&call, &cotangent, gradients, &mut self.scratch)
            .expect("the benchmark's call makes sense");
        self.times[1].push(start.elapsed().as_secs_f64());
    }

    /// Seconds of the products and of the copy, forward and backward.
    fn walls(&self, copy: f64, product: f64) -> [[f64; 2]; 2] {
        let d = HEAD_DIM as f64;
        // Fourier positions multiply the features; the state says by how much.
        let state =
            Mechanism::<f32>::empty_state(&self.attention, &self.dims).expect("the benchmark's sizes make sense");
        let features = state.shape().parts[0] as f64 / d;
        let half = if self.causal { CHUNK / 2.0 } else { 0.0 };
        let table = self.attention.score.shaw().map_or(0.0, |shaw| {
            let radius = shaw.radius as f64;
            if self.causal { radius + 1.0 } else { 2.0 * radius + 1.0 }
        });
        let forward = 2.0 * features * d + half * (features + d) + table * 2.0 * d;
        let backward = 5.0 * features * d + half * (3.0 * features + 2.0 * d) + table * 5.0 * d;
        let rows = (HEADS * self.dims.queries) as f64;
        let flops = |row: f64| 2.0 * row * rows / product;
        // q, k, v, out; then the gradient of out, and three more.
        let moved = |tensors: f64| tensors * rows * d * 4.0 / copy;
        [[flops(forward), moved(4.0)], [flops(backward), moved(8.0)]]
    }
}

/// The median, or the least: what a machine with other work can tell.
fn typical(times: &[f64], least: bool) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[if least { 0 } else { times.len() / 2 }]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let option = |name: &str, default: usize| {
        let place = arguments.iter().position(|a| a == name);
        place.map_or(default, |n| arguments.get(n + 1).and_then(|x| x.parse().ok()).expect("a number after the option"))
    };
    let (threads, length) = (option("--threads", 2), option("--length", 4096));
    let least = arguments.iter().any(|a| a == "--least");
    let quick = arguments.iter().any(|a| a == "--quick");
    let wanted = arguments.iter().find(|a| !a.starts_with("--") && a.parse::<usize>().is_err());
    let mut subjects = Vec::new();
    for causal in [true, false] {
        for (name, score) in [
            ("kernelized", Score::Content),
            ("shaw-16", Score::Combined(Shaw::new(16))),
            ("shaw-64", Score::Combined(Shaw::new(64))),
            ("fourier", Score::Fourier(Fourier::default())),
        ] {
            if wanted.is_none_or(|wanted| name.contains(wanted.as_str())) {
                subjects.push(Subject::new(name, score, length, causal));
            }
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
    pool.install(|| {
        let mut limits = Limits::new(4 * 4 * HEADS * length * HEAD_DIM);
        for round in 0..if quick { 11 } else { 41 } {
            for subject in &mut subjects {
                subject.run();
                if round == 0 {
                    subject.times = Default::default();
                }
            }
            limits.measure();
        }
        let rates = limits.rates().expect("measured above");
        println!(
            "B=1, H={HEADS}, L={length}, d={HEAD_DIM}, f32, {threads} threads, {}; copy {:.1} GB/s, 64³ products {:.0} GFLOP/s",
            if least { "least" } else { "medians" },
            rates.copy / 1e9,
            rates.tiles / 1e9
        );
        println!(
            "{:<20} {:>11} {:>7} {:>9} {:>12} {:>7} {:>9}",
            "", "forward ms", "x wall", "GFLOP/s", "backward ms", "x wall", "GFLOP/s"
        );
        for subject in &subjects {
            let walls = subject.walls(rates.copy, rates.tiles);
            print!("{:<20}", subject.name);
            for (times, [products, copy]) in subject.times.iter().zip(walls) {
                let time = typical(times, least);
                let rate = products * rates.tiles / time / 1e9;
                print!(" {:>11.2} {:>7.2} {:>9.0}", time * 1e3, time / (products + copy), rate);
            }
            println!();
        }
    });
}
