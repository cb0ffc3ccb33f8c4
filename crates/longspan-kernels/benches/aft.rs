//! Attention-free transformers against their walls, by turns in one process.
//!
//! `cargo bench -p longspan-kernels --bench aft -- [--quick] [--threads N] [NAME]`. The wall of a call is a copy of its inputs and outputs
//! plus its exponentials, one a number of keys and one a gate; of aft-full, whose work is a matrix product, `4·d` operations a
//! pair that is seen (numerator and denominator) at the rate of the machine's own product of 1024³. A backward reads twice
//! as much, writes three gradients and takes the exponentials twice.

use std::time::Instant;

use longspan_bench::machine::Limits;
use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Call, Cotangent, Dims, Gradients, Mask, Mechanism, Output, Scratch, View, ViewMut};
use longspan_testing::random::Random;

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// One mechanism with its memory.
struct Subject {
    name: String,
    aft: Aft,
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
    fn new(name: &str, variant: Variant, length: usize, causal: bool) -> Self {
        let dims = Dims::square(1, HEADS, length, HEAD_DIM);
        let aft = Aft::new(variant);
        let mut random = Random::new(1);
        let mut draw =
            |len: usize, scale: f64| -> Vec<f32> { (0..len).map(|_| (scale * random.normal()) as f32).collect() };
        let len = HEADS * length * HEAD_DIM;
        let keys = HEADS * length * Mechanism::<f32>::key_dim(&aft, &dims);
        let shapes = Mechanism::<f32>::parameters(&aft, &dims);
        Self {
            name: format!("{name} {}", if causal { "masked" } else { "bidirectional" }),
            aft,
            dims,
            causal,
            inputs: [draw(len, 1.0), draw(keys, 1.0), draw(len, 1.0), draw(len, 1.0)],
            parameters: shapes.iter().map(|p| draw(p.len(), 0.1)).collect(),
            out: vec![1.0; len],
            denominators: vec![1.0; HEADS * length],
            gradients: [vec![1.0; len], vec![1.0; keys], vec![1.0; len]],
            d_parameters: shapes.iter().map(|p| vec![1.0; p.len()]).collect(),
            scratch: Scratch::new(),
            times: Default::default(),
        }
    }

    /// Runs forward, and then backward too.
    fn run(&mut self) {
        let shape = self.dims.q();
        let key_shape = [1, HEADS, self.dims.keys, Mechanism::<f32>::key_dim(&self.aft, &self.dims)];
        let parameters: Vec<&[f32]> = self.parameters.iter().map(Vec::as_slice).collect();
        let call = Call {
            dims: self.dims,
            q: View::contiguous(&self.inputs[0], shape),
            k: View::contiguous(&self.inputs[1], key_shape),
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
        self.aft.forward(&call, output, &mut self.scratch).expect("the benchmark's call makes sense");
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
            dk: ViewMut::contiguous(dk, key_shape),
            dv: ViewMut::contiguous(dv, shape),
            parameters: &mut d_parameters,
            initial_state: None,
        };
        let start = Instant::now();
        self.aft.backward(&call, &cotangent, gradients, &mut self.scratch).expect("the benchmark's call makes sense");
        self.times[1].push(start.elapsed().as_secs_f64());
    }

    fn walls(&self, copy: f64, exponential: f64, product: f64) -> [f64; 2] {
        let [q, k] = [self.out.len(), self.inputs[1].len()].map(|n| n as f64);
        if let Variant::Full { .. } = self.aft.variant {
            let length = self.dims.queries as f64;
            let pairs = HEADS as f64 * if self.causal { length * (length + 1.0) / 2.0 } else { length * length };
            let forward = pairs * 4.0 * HEAD_DIM as f64 / product;
            // The means anew, the sums of keys, and the biases of pairs.
            return [forward, 3.0 * forward];
        }
        let forward = copy * (3.0 * q + k) * 4.0 + exponential * (q + k);
        // Reads q, k, v, out and its gradient; writes three.
        let backward = copy * (6.0 * q + 2.0 * k) * 4.0 + exponential * (q + 2.0 * k);
        [forward, backward]
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let quick = arguments.iter().any(|a| a == "--quick");
    let threads = arguments.iter().position(|a| a == "--threads");
    let wanted = arguments.iter().enumerate().find(|(n, a)| !a.starts_with("--") && Some(*n) != threads.map(|t| t + 1));
    let wanted = wanted.map(|(_, name)| name);
    let threads = threads.and_then(|n| arguments.get(n + 1)?.parse().ok()).unwrap_or(2);
    let length = 4096;
    let mut subjects = Vec::new();
    for causal in [true, false] {
        for (name, variant) in [
            ("aft-simple", Variant::Simple),
            ("aft-conv-33", Variant::Conv { taps: 33, normalized: false }),
            ("aft-local-64", Variant::Local { window: 64, length: Some(length) }),
            ("aft-full", Variant::Full { length, rank: None }),
            ("aft-low-rank 64", Variant::Full { length, rank: Some(64) }),
        ] {
            if wanted.is_none_or(|wanted| name.contains(wanted.as_str())) {
                subjects.push(Subject::new(name, variant, length, causal));
            }
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
    pool.install(|| {
        let mut limits = Limits::new(1 << 25);
        for round in 0..if quick { 6 } else { 21 } {
            for subject in &mut subjects {
                subject.run();
                if round == 0 {
                    subject.times = Default::default();
                }
            }
            limits.measure();
            limits.measure_large();
        }
        let rates = limits.rates().expect("measured above");
        let product = rates.large.expect("measured above");
        println!(
            "B=1, H={HEADS}, L={length}, d={HEAD_DIM}, f32, {threads} threads, medians (least in brackets); copy {:.1} GB/s, product {:.0} GFLOP/s, {:.2} G exponentials/s",
            rates.copy / 1e9,
            product / 1e9,
            rates.exponentials / 1e9
        );
        println!("{:<32} {:>20} {:>8} {:>20} {:>8}", "", "forward ms", "x wall", "backward ms", "x wall");
        for subject in &subjects {
            let walls = subject.walls(1.0 / rates.copy, 1.0 / rates.exponentials, product);
            let [forward, backward] = [0, 1].map(|n| median(&subject.times[n]));
            let least = [0, 1].map(|n| subject.times[n].iter().copied().fold(f64::INFINITY, f64::min));
            println!(
                "{:<32} {:>11.2} ({:>6.2}) {:>8.2} {:>11.2} ({:>6.2}) {:>8.2}",
                subject.name,
                forward * 1e3,
                least[0] * 1e3,
                forward / walls[0],
                backward * 1e3,
                least[1] * 1e3,
                backward / walls[1]
            );
        }
    });
}
