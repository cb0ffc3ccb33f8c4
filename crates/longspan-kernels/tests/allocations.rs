//! A token through one layer takes no memory from the allocator, and a call with a map of whole rows none of the length
//! times the features.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Algorithm, Bias, Call, Cotangent, Dims, FeatureMap, Fourier, Gradients, Kernel, KernelizedAttention,
    LearnedGates, Mask, Mechanism, Output, Real, Score, Scratch, Shaw, ShortConvolution, SoftmaxAttention, Toeplitz,
    Token, View, ViewMut,
};

/// Counts what this thread asks for.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator; the count is a thread's own and needs no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get() + layout.size());
        // SAFETY: forwarded to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: forwarded to the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

/// Takes tokens until rings have gone round, and counts.
fn steps<T: Real>(mechanism: &dyn Kernel<T>) -> usize {
    let dims = Dims::square(1, 8, 1, 64);
    let numbers = |len: usize| -> Vec<T> { (0..len).map(|n| T::from_f64((n as f64).sin() / 4.0)).collect() };
    let parameters: Vec<Vec<T>> = mechanism.parameters(&dims).iter().map(|p| numbers(p.len())).collect();
    let parameters: Vec<&[T]> = parameters.iter().map(Vec::as_slice).collect();
    let (q, v) = (numbers(8 * 64), numbers(8 * 64));
    let k = numbers(8 * mechanism.key_dim(&dims));
    let mut out = numbers(8 * 64);
    let mut state = mechanism.empty_state(&dims).expect("a state of usual size");
    let mut step = || {
        let token = Token { q: &q, k: &k, v: &v, parameters: &parameters };
        mechanism.step(&token, &mut state, &mut out).expect("a token");
    };
    // The first call of a process chooses instructions. A cache of more tokens is read by all threads, which rayon has
    // memory for.
    step();
    allocations(|| (0..100).for_each(|_| step()))
}

fn check<M: Kernel<f32> + Kernel<f64>>(name: &str, mechanism: M) {
    assert_eq!(steps::<f32>(&mechanism), 0, "{name} in f32");
    assert_eq!(steps::<f64>(&mechanism), 0, "{name} in f64");
}

#[test]
fn the_count_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Vec::<f32>::with_capacity(7)))), 1);
}

#[test]
fn steps_of_kernelized_attention() {
    let kernelized = |score| KernelizedAttention { score, ..KernelizedAttention::default() };
    check("kernelized", kernelized(Score::Content));
    check("kernelized, exp", KernelizedAttention { feature_map: FeatureMap::Exp, ..kernelized(Score::Content) });
    check("Shaw, radius 16", kernelized(Score::Combined(Shaw::new(16))));
    check("Shaw, radius 64", kernelized(Score::Combined(Shaw::new(64))));
    check("Shaw alone", kernelized(Score::Relative(Shaw::new(10))));
}

#[test]
fn steps_of_fourier_positions() {
    let score = Score::Fourier(Fourier::default());
    check("fourier", KernelizedAttention { score, ..KernelizedAttention::default() });
}

#[test]
fn steps_of_gates_with_keys() {
    for convolution in [None, Some(4)] {
        check(
            &format!("gated delta, convolution {convolution:?}"),
            LearnedGates { convolution, ..LearnedGates::default() },
        );
    }
}

#[test]
fn steps_of_toeplitz_biases() {
    check("toeplitz", Toeplitz::new(Bias::clipped(64)));
    let exp = Toeplitz { feature_map: FeatureMap::Exp, ..Toeplitz::new(Bias::clipped(64)) };
    check("toeplitz, exp", exp);
    for name in ["prf", "nprf", "dpfp", "hedgehog", "hedgehog:exp"] {
        let feature_map = name.parse().expect("a name of this list");
        // Of 128 features some; a shorter ring keeps the state small enough for one thread.
        check(name, Toeplitz { feature_map, ..Toeplitz::new(Bias::clipped(16)) });
    }
}

/// Bytes that a forward and a backward call of one head take from the allocator, all scratch among them.
fn bytes(toeplitz: &Toeplitz, length: usize) -> usize {
    let dims = Dims { value_dim: 8, ..Dims::square(1, 1, length, 8) };
    let shape = dims.q();
    let numbers = |len: usize| -> Vec<f32> { (0..len).map(|n| (n as f32).sin()).collect() };
    let parameters: Vec<Vec<f32>> = toeplitz.parameters(&dims).iter().map(|p| numbers(p.len())).collect();
    let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
    let inputs = [(); 4].map(|()| numbers(length * 8));
    let [q, k, v, d_out] = inputs.each_ref().map(|numbers| View::contiguous(numbers, shape));
    let call = Call::new(dims, q, k, v).with_parameters(&parameters).with_mask(Mask::causal());
    let (mut out, mut denominators) = (numbers(length * 8), numbers(length));
    let mut gradients = [(); 3].map(|()| numbers(length * 8));
    let mut learned: Vec<Vec<f32>> = parameters.iter().map(|p| p.to_vec()).collect();
    let mut learned: Vec<&mut [f32]> = learned.iter_mut().map(Vec::as_mut_slice).collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool of one thread");
    // What this thread takes is counted, so the work is brought to the pool's.
    pool.install(|| {
        let before = BYTES.get();
        let mut scratch = Scratch::new();
        let output = Output::training(ViewMut::contiguous(&mut out, shape), &mut denominators);
        toeplitz.forward(&call, output, &mut scratch).expect("a call of usual size");
        let out = View::contiguous(&out, shape);
        let cotangent = Cotangent { out, denominators: &denominators, d_out, final_state: None };
        let [dq, dk, dv] = gradients.each_mut().map(|numbers| ViewMut::contiguous(numbers, shape));
        let gradients = Gradients { dq, dk, dv, parameters: &mut learned, initial_state: None };
        toeplitz.backward(&call, &cotangent, gradients, &mut scratch).expect("as the forward call");
        BYTES.get() - before
    })
}

/// Rows are mapped a tile at a time.
#[test]
fn maps_of_whole_rows_keep_no_features_of_a_call() {
    for name in ["prf:256", "nprf:256", "dpfp:16", "hedgehog:128", "hedgehog:128:exp"] {
        let feature_map: FeatureMap = name.parse().expect("a name of this list");
        let features = feature_map.features(8);
        let (short, long) = (1024, 3072);
        let toeplitz = Toeplitz { feature_map, algorithm: Algorithm::Tiled, ..Toeplitz::new(Bias::clipped(64)) };
        let more = bytes(&toeplitz, long).saturating_sub(bytes(&toeplitz, short));
        // Features of queries and keys would be twice this.
        let kept = (long - short) * features * size_of::<f32>();
        assert!(more < kept / 2, "{name}: {more} bytes more, beside {kept} of features");
    }
}

#[test]
fn steps_of_attention_free_transformers() {
    check("AFT-simple", Aft::new(Variant::Simple));
    check("AFT-local", Aft::new(Variant::Local { window: 64, length: Some(1000) }));
    check("AFT-conv", Aft::new(Variant::Conv { taps: 33, normalized: true }));
}

#[test]
fn steps_of_short_convolutions() {
    check("short convolution", ShortConvolution::default());
}

#[test]
fn steps_of_softmax_attention() {
    check("softmax", SoftmaxAttention { capacity: 500, ..SoftmaxAttention::default() });
    check("window", SoftmaxAttention { window: Some(20), ..SoftmaxAttention::default() });
}
