//! Kernels against the machine's own matrix product and copy, measured by turns in one process; growth with length.
//!
//! `cargo bench -p longspan-kernels` prints a table, `-- --json` one JSON object a line, `-- --quick` stops at 16,384
//! tokens. Nothing is reported for a kernel that fails a check against the definition first.
//!
//! Flops counted for a token and head, with chunks of C = 64 rows, in a causal pass: `4·d·(dv+1)` for updating and reading
//! the running sum, `(C+1)·(d+dv+1)` for the scores inside a chunk, and with relative positions of radius R
//! `2·(R+1)·(d+dv+1)` for the weights of the table and the band of values. What feature maps and the division take is not
//! counted, so that the product has less to do than the kernel.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use gemm::Parallelism;
use longspan_kernels::{Call, Dims, KernelizedAttention, Mask, Mechanism, Output, Score, Scratch, Shaw, View, ViewMut};
use longspan_testing::random::Random;
use longspan_testing::{Case, Subject, accuracy};

/// Threads for every measurement.
const THREADS: usize = 2;
/// Rows of a chunk, for the count of flops.
const CHUNK: usize = 64;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// Counts what is allocated and remembers the peak.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every request goes to the system allocator as it came; the counters touch no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One call with its memory.
struct Subject32 {
    attention: KernelizedAttention,
    dims: Dims,
    inputs: [Vec<f32>; 3],
    table: Vec<f32>,
    out: Vec<f32>,
    scratch: Scratch<f32>,
}

impl Subject32 {
    fn new(radius: Option<usize>, length: usize) -> Self {
        let dims = Dims::square(1, HEADS, length, HEAD_DIM);
        let score = radius.map_or(Score::Content, |radius| Score::Combined(Shaw::new(radius)));
        let attention = KernelizedAttention { score, ..Default::default() };
        let mut random = Random::new(1);
        let mut draw = |len: usize| (0..len).map(|_| random.normal() as f32).collect::<Vec<f32>>();
        let len = HEADS * length * HEAD_DIM;
        let table = radius.map_or(0, |radius| HEADS * (2 * radius + 1) * HEAD_DIM);
        Self {
            attention,
            dims,
            inputs: [draw(len), draw(len), draw(len)],
            table: draw(table),
            out: vec![0.0; len],
            scratch: Scratch::new(),
        }
    }

    fn run(&mut self) {
        let shape = self.dims.q();
        let table = [self.table.as_slice()];
        let call = Call {
            dims: self.dims,
            q: View::contiguous(&self.inputs[0], shape),
            k: View::contiguous(&self.inputs[1], shape),
            v: View::contiguous(&self.inputs[2], shape),
            parameters: if self.table.is_empty() { &[] } else { &table },
            mask: Mask::causal(),
            initial_state: None,
        };
        let output = Output { out: ViewMut::contiguous(&mut self.out, shape), denominators: None, final_state: None };
        self.attention.forward(&call, output, &mut self.scratch).expect("the benchmark's call makes sense");
    }

    /// Bytes allocated at the peak of a call whose scratch starts empty.
    fn extra_bytes(&mut self) -> usize {
        self.scratch = Scratch::new();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        self.run();
        PEAK.load(Ordering::Relaxed) - before
    }

    /// As the top of this file counts them.
    fn flops(&self) -> f64 {
        let (d, dv) = (HEAD_DIM as f64, (HEAD_DIM + 1) as f64);
        let content = 4.0 * d * dv + (CHUNK + 1) as f64 * (d + dv);
        let relative = self.attention.score.shaw().map_or(0.0, |shaw| 2.0 * (shaw.radius + 1) as f64 * (d + dv));
        (content + relative) * (HEADS * self.dims.queries) as f64
    }
}

/// Seconds of one run.
fn seconds(mut body: impl FnMut()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// `dst = lhs · rhs` of row-major matrices.
fn product(size: usize, dst: &mut [f32], lhs: &[f32], rhs: &[f32], parallelism: Parallelism) {
    assert!(dst.len() >= size * size && lhs.len() >= size * size && rhs.len() >= size * size);
    let row = size as isize;
    // SAFETY: the three slices hold size × size numbers each, checked above, and `dst` is borrowed alone.
    unsafe {
        gemm::gemm(
            size,
            size,
            size,
            dst.as_mut_ptr(),
            1,
            row,
            false,
            lhs.as_ptr(),
            1,
            row,
            rhs.as_ptr(),
            1,
            row,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Tiles of 64 × 64 × 64 streamed from memory, each thread its half; gives the flops.
fn tiles(dst: &mut [f32], lhs: &[f32], rhs: &[f32]) -> f64 {
    let tile = CHUNK * CHUNK;
    let half = lhs.len() / 2 / tile * tile;
    let run = |dst: &mut [f32], lhs: &[f32], rhs: &[f32]| {
        for (lhs, rhs) in lhs.chunks_exact(tile).zip(rhs.chunks_exact(tile)) {
            product(CHUNK, dst, lhs, rhs, Parallelism::None);
        }
    };
    let (first, second) = dst.split_at_mut(tile);
    rayon::join(|| run(first, &lhs[..half], &rhs[..half]), || run(second, &lhs[half..], &rhs[half..]));
    (lhs.len() / tile) as f64 * 2.0 * (CHUNK as f64).powi(3)
}

/// What the machine can do, from alternating runs.
struct Machine {
    tile_rate: f64,
    large_rate: f64,
    copy: f64,
}

/// One figure against its target.
struct Figure {
    name: &'static str,
    target: f64,
    time: f64,
    flops: f64,
    extra_bytes: usize,
}

/// Kernels, products and copy by turns, so that the machine's moods strike all alike.
fn figures(runs: usize) -> (Machine, Vec<Figure>) {
    const LENGTH: usize = 4096;
    let specs = [("kernelized, causal", None, 1.5), ("with Shaw radius 64", Some(64), 2.5)];
    let mut subjects: Vec<Subject32> = specs.iter().map(|spec| Subject32::new(spec.1, LENGTH)).collect();
    let extra: Vec<usize> = subjects.iter_mut().map(Subject32::extra_bytes).collect();
    let [lhs, rhs, _] = subjects[0].inputs.clone();
    let mut tile = vec![0.0; 2 * CHUNK * CHUNK];
    const LARGE: usize = 1024;
    let mut large = vec![0.0; LARGE * LARGE];
    // Half of the bytes of inputs and outputs are read and as many written: as much traffic as the call has at least.
    let mut to = vec![0.0f32; 2 * lhs.len()];
    let from = vec![1.0f32; 2 * lhs.len()];
    let mut times = vec![Vec::new(); subjects.len()];
    let (mut tile_times, mut large_times, mut copy_times) = (Vec::new(), Vec::new(), Vec::new());
    let mut tile_flops = 0.0;
    for _ in 0..runs {
        for (subject, times) in subjects.iter_mut().zip(&mut times) {
            times.push(seconds(|| subject.run()));
        }
        tile_times.push(seconds(|| tile_flops = tiles(&mut tile, &lhs, &rhs)));
        large_times.push(seconds(|| {
            product(LARGE, &mut large, &lhs[..LARGE * LARGE], &rhs[..LARGE * LARGE], Parallelism::Rayon(THREADS));
        }));
        copy_times.push(seconds(|| {
            let half = from.len() / 2;
            let (a, b) = to.split_at_mut(half);
            rayon::join(|| a.copy_from_slice(&from[..half]), || b.copy_from_slice(&from[half..]));
            black_box(&mut to);
        }));
        black_box((&mut tile, &mut large));
    }
    let machine = Machine {
        tile_rate: tile_flops / median(tile_times),
        large_rate: 2.0 * (LARGE as f64).powi(3) / median(large_times),
        copy: median(copy_times),
    };
    let figures = specs
        .iter()
        .zip(&subjects)
        .zip(times.into_iter().zip(extra))
        .map(|((spec, subject), (times, extra_bytes))| Figure {
            name: spec.0,
            target: spec.2,
            time: median(times),
            flops: subject.flops(),
            extra_bytes,
        })
        .collect();
    (machine, figures)
}

/// Length, seconds, bytes beyond inputs and outputs.
fn growth(radius: Option<usize>, longest: usize) -> Vec<(usize, f64, usize)> {
    let mut rows = Vec::new();
    let mut length = 1024;
    while length <= longest {
        let mut subject = Subject32::new(radius, length);
        let extra = subject.extra_bytes();
        let runs = (1 << 17) / length + 3;
        rows.push((length, median((0..runs).map(|_| seconds(|| subject.run())).collect()), extra));
        length *= 2;
    }
    rows
}

/// Slope of the line through (log x, log y), and the largest distance from it as a factor.
fn log_log(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let (mx, my) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let slope = logs.iter().map(|(x, y)| (x - mx) * (y - my)).sum::<f64>()
        / logs.iter().map(|(x, _)| (x - mx) * (x - mx)).sum::<f64>();
    let worst = logs.iter().map(|(x, y)| (y - my - slope * (x - mx)).abs()).fold(0.0, f64::max);
    (slope, worst.exp())
}

/// A kernel that is wrong has no speed.
fn conforms(radius: Option<usize>) -> Result<(), longspan_testing::Failure> {
    let score = radius.map_or(Score::Content, |radius| Score::Combined(Shaw::new(radius)));
    let subject = Subject::kernelized(&KernelizedAttention { score, ..Default::default() });
    let case = Case::new(Dims::square(1, 2, 200, HEAD_DIM), true);
    accuracy::forward::<f32>(&subject, &case)
}

fn report(json: bool, quick: bool) {
    let (machine, figures) = figures(if quick { 21 } else { 61 });
    let best = machine.tile_rate.max(machine.large_rate);
    if json {
        println!(
            r#"{{"threads":{THREADS},"tile_gflops":{:.1},"large_gflops":{:.1},"copy_ms":{:.4}}}"#,
            machine.tile_rate / 1e9,
            machine.large_rate / 1e9,
            machine.copy * 1e3
        );
    } else {
        println!("{THREADS} threads, B=1 H={HEADS} L=4096 d={HEAD_DIM}, f32, medians of alternating runs");
        println!(
            "matrix product: tiles of 64³ {:.1} GFLOP/s, 1024³ {:.1} GFLOP/s",
            machine.tile_rate / 1e9,
            machine.large_rate / 1e9
        );
        println!("copy of inputs and outputs: {:.3} ms\n", machine.copy * 1e3);
    }
    for f in &figures {
        let by = |rate: f64| f.time / (f.flops / rate + machine.copy);
        let megabytes = f.extra_bytes as f64 / 1e6;
        if json {
            println!(
                r#"{{"kernel":"{}","ms":{:.4},"gflop":{:.4},"ratio":{:.3},"ratio_to_tiles":{:.3},"target":{},"extra_mb":{megabytes:.3}}}"#,
                f.name,
                f.time * 1e3,
                f.flops / 1e9,
                by(best),
                by(machine.tile_rate),
                f.target
            );
        } else {
            let verdict = if by(best) <= f.target { "reached" } else { "missed" };
            println!(
                "{:20} {:7.3} ms for {:.3} GFLOP: {:.2} × (product + copy), target {} {verdict}; {:.2} × by 64³ tiles; {megabytes:.2} MB extra",
                f.name,
                f.time * 1e3,
                f.flops / 1e9,
                by(best),
                f.target,
                by(machine.tile_rate)
            );
        }
    }
    for (name, radius) in [("kernelized, causal", None), ("with Shaw radius 64", Some(64))] {
        let rows = growth(radius, if quick { 1 << 14 } else { 1 << 18 });
        let (time, time_off) = log_log(&rows.iter().map(|r| (r.0 as f64, r.1)).collect::<Vec<_>>());
        // All memory of a call: q, k, v and the output with what comes on top.
        let bytes = |r: &(usize, f64, usize)| (16 * HEADS * HEAD_DIM * r.0 + r.2) as f64;
        let (memory, memory_off) = log_log(&rows.iter().map(|r| (r.0 as f64, bytes(r))).collect::<Vec<_>>());
        if json {
            println!(
                r#"{{"kernel":"{name}","time_slope":{time:.4},"time_worst_factor":{time_off:.3},"memory_slope":{memory:.4},"memory_worst_factor":{memory_off:.3},"rows":{:?}}}"#,
                rows.iter().map(|r| [r.0 as f64, r.1, r.2 as f64]).collect::<Vec<_>>()
            );
            continue;
        }
        println!(
            "\n{name}: time ~ L^{time:.3} (worst point {time_off:.2} × off), memory ~ L^{memory:.3} ({memory_off:.2} ×)"
        );
        println!("{:>9} {:>10} {:>10} {:>9}", "tokens", "ms", "ns/token", "extra MB");
        for (length, time, extra) in rows {
            println!(
                "{length:>9} {:>10.3} {:>10.1} {:>9.2}",
                time * 1e3,
                time * 1e9 / length as f64,
                extra as f64 / 1e6
            );
        }
    }
}

fn main() -> ExitCode {
    let flag = |name: &str| std::env::args().any(|argument| argument == name);
    for radius in [None, Some(64)] {
        if let Err(failure) = conforms(radius) {
            eprintln!("no speed is reported for a kernel that is wrong (radius {radius:?}): {failure}");
            return ExitCode::FAILURE;
        }
    }
    match rayon::ThreadPoolBuilder::new().num_threads(THREADS).build() {
        Ok(pool) => pool.install(|| report(flag("--json"), flag("--quick"))),
        Err(error) => {
            eprintln!("no pool of {THREADS} threads: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
