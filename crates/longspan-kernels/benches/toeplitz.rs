//! Toeplitz relative positions: tiles against the machine's own matrix product, transforms against themselves, and the
//! length from which transforms are faster. All by turns in one process.
//!
//! `cargo bench -p longspan-kernels --bench toeplitz`. Flops of a pair that is seen: `2·(d + dv)`; weighing is not
//! counted, so that the product has less to do than the kernel.

use std::hint::black_box;
use std::time::Instant;

use longspan_bench::machine::Limits;
use longspan_kernels::{
    Algorithm, Bias, Call, Cotangent, Dims, FeatureMap, Gradients, Mask, Mechanism, Output, Scratch, Toeplitz, View,
    ViewMut,
};
use longspan_testing::random::Random;
use realfft::RealFftPlanner;

const HEAD_DIM: usize = 64;

/// One call with its memory.
struct Subject {
    toeplitz: Toeplitz,
    dims: Dims,
    causal: bool,
    inputs: [Vec<f32>; 3],
    bias: Vec<f32>,
    out: Vec<f32>,
    denominators: Vec<f32>,
    gradients: [Vec<f32>; 3],
    d_bias: Vec<f32>,
    scratch: Scratch<f32>,
}

impl Subject {
    fn new(heads: usize, length: usize, causal: bool, algorithm: Algorithm, bias: Bias) -> Self {
        let dims = Dims::square(1, heads, length, HEAD_DIM);
        let toeplitz = Toeplitz { algorithm, ..Toeplitz::new(bias) };
        let mut random = Random::new(1);
        let mut draw = |len: usize| (0..len).map(|_| random.normal() as f32).collect::<Vec<f32>>();
        let len = heads * length * HEAD_DIM;
        let entries = Mechanism::<f32>::parameters(&toeplitz, &dims)[0].len();
        Self {
            toeplitz,
            dims,
            causal,
            inputs: [draw(len), draw(len), draw(len)],
            bias: draw(entries),
            out: vec![0.0; len],
            denominators: vec![0.0; heads * length],
            gradients: std::array::from_fn(|_| vec![0.0; len]),
            d_bias: vec![0.0; entries],
            scratch: Scratch::new(),
        }
    }

    /// Seconds of one forward run, and of one backward, if it is wanted.
    fn run(&mut self, backward: bool) -> [f64; 2] {
        let shape = self.dims.q();
        let call = Call {
            dims: self.dims,
            q: View::contiguous(&self.inputs[0], shape),
            k: View::contiguous(&self.inputs[1], shape),
            v: View::contiguous(&self.inputs[2], shape),
            parameters: &[&self.bias],
            mask: if self.causal { Mask::causal() } else { Mask::bidirectional() },
            initial_state: None,
        };
        let output = Output {
            out: ViewMut::contiguous(&mut self.out, shape),
            denominators: Some(&mut self.denominators),
            final_state: None,
        };
        let start = Instant::now();
        self.toeplitz.forward(&call, output, &mut self.scratch).expect("the benchmark's call makes sense");
        let forward = start.elapsed().as_secs_f64();
        if !backward {
            return [forward, 0.0];
        }
        let cotangent = Cotangent {
            out: View::contiguous(&self.out, shape),
            denominators: &self.denominators,
            d_out: View::contiguous(&self.inputs[0], shape),
            final_state: None,
        };
        let [dq, dk, dv] = &mut self.gradients;
        let gradients = Gradients {
            dq: ViewMut::contiguous(dq, shape),
            dk: ViewMut::contiguous(dk, shape),
            dv: ViewMut::contiguous(dv, shape),
            parameters: &mut [&mut self.d_bias],
            initial_state: None,
        };
        let start = Instant::now();
        self.toeplitz.backward(&call, &cotangent, gradients, &mut self.scratch).expect("as the forward call");
        [forward, start.elapsed().as_secs_f64()]
    }

    fn flops(&self) -> f64 {
        let (heads, length) = (self.dims.heads as f64, self.dims.queries as f64);
        let pairs = if self.causal { length * (length + 1.0) / 2.0 } else { length * length };
        heads * pairs * 4.0 * HEAD_DIM as f64
    }
}

/// The fastest run: whatever else the machine does only ever adds time.
fn fastest(times: Vec<f64>) -> f64 {
    times.into_iter().fold(f64::INFINITY, f64::min)
}

/// Seconds of the transforms alone that a head of this length needs.
fn transforms(length: usize) -> f64 {
    let size = (2 * length - 1).next_power_of_two();
    let mut planner = RealFftPlanner::<f64>::new();
    let (forward, inverse) = (planner.plan_fft_forward(size), planner.plan_fft_inverse(size));
    let (mut signal, mut spectrum) = (vec![0.5; size], forward.make_output_vec());
    let mut scratch = vec![Default::default(); forward.get_scratch_len().max(inverse.get_scratch_len())];
    let start = Instant::now();
    for _ in 0..HEAD_DIM * (HEAD_DIM + 1) {
        forward.process_with_scratch(&mut signal, &mut spectrum, &mut scratch).expect("lengths of the plan");
        inverse.process_with_scratch(&mut spectrum, &mut signal, &mut scratch).expect("lengths of the plan");
        signal.fill(0.5);
    }
    black_box(&signal);
    start.elapsed().as_secs_f64()
}

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool of one thread");
    pool.install(|| {
        println!("one thread, f32, d = dv = {HEAD_DIM}; the fastest of runs by turns, the products' medians");
        let mut limits = Limits::new(1 << 14);
        for causal in [true, false] {
            let mut subject = Subject::new(1, 1024, causal, Algorithm::Tiled, Bias::symmetric(1024));
            let mut times = Vec::new();
            for _ in 0..if quick { 20 } else { 60 } {
                times.push(subject.run(false)[0]);
                limits.measure();
                limits.measure_large();
            }
            let rate = subject.flops() / fastest(times);
            let machine = limits.rates().expect("measured above");
            let large = machine.large.expect("measured above");
            println!(
                "tiled {}: {:.1} GFLOP/s; product 1024³ {:.1}, 64³ {:.1}: {:.0} % of the faster",
                if causal { "causal       " } else { "bidirectional" },
                rate / 1e9,
                large / 1e9,
                machine.tiles / 1e9,
                100.0 * rate / large.max(machine.tiles)
            );
        }
        println!("\nbidirectional, milliseconds; fft/own: over the transforms alone; clip: of radius 64, by sums");
        println!(
            "{:>8} {:>10} {:>10} {:>10} {:>8} {:>10} {:>10} {:>14} {:>14}",
            "tokens", "tiled", "backward", "fft", "fft/own", "clip", "backward", "clip by tiles", "exp clip"
        );
        for length in if quick { vec![512, 2048] } else { vec![1024, 4096, 16384, 32768] } {
            let (full, clip) = (Bias::symmetric(length), Bias::clipped(64));
            let mut subjects = [
                (Algorithm::Tiled, full),
                (Algorithm::Fft, full),
                (Algorithm::Piecewise, clip),
                (Algorithm::Tiled, clip),
                (Algorithm::Piecewise, clip),
            ]
            .map(|(algorithm, bias)| Subject::new(1, length, false, algorithm, bias));
            subjects[4].toeplitz.feature_map = FeatureMap::Exp;
            let mut times = [const { [Vec::new(), Vec::new()] }; 5];
            let mut own = Vec::new();
            for _ in 0..if length > 8192 { 2 } else { 8 } {
                for (n, (subject, times)) in subjects.iter_mut().zip(&mut times).enumerate() {
                    // The gradient by transforms takes six of them where the output takes two.
                    let [forward, backward] = subject.run(n != 1);
                    times[0].push(forward);
                    times[1].push(backward);
                }
                own.push(transforms(length));
            }
            let [tiled, fft, clip, slow, exp] = times.map(|times| times.map(|times| fastest(times) * 1e3));
            println!(
                "{length:>8} {:>10.2} {:>10.2} {:>10.2} {:>8.2} {:>10.2} {:>10.2} {:>14.2} {:>14.2}",
                tiled[0],
                tiled[1],
                fft[0],
                fft[0] / 1e3 / fastest(own),
                clip[0],
                clip[1],
                slow[0] + slow[1],
                exp[0] + exp[1],
            );
        }
    });
}
