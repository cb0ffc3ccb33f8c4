//! A token through one layer takes no memory from the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Bias, Dims, FeatureMap, Fourier, KernelizedAttention, Mechanism, Real, Score, Shaw, SoftmaxAttention,
    Toeplitz, Token,
};

/// Counts what this thread asks for.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator; the count is a thread's own and needs no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
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
fn steps<T: Real>(mechanism: &dyn Mechanism<T>) -> usize {
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

fn check<M: Mechanism<f32> + Mechanism<f64>>(name: &str, mechanism: M) {
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
fn steps_of_toeplitz_biases() {
    check("toeplitz", Toeplitz::new(Bias::clipped(64)));
    let exp = Toeplitz { feature_map: FeatureMap::Exp, ..Toeplitz::new(Bias::clipped(64)) };
    check("toeplitz, exp", exp);
}

#[test]
fn steps_of_attention_free_transformers() {
    check("AFT-simple", Aft::new(Variant::Simple));
    check("AFT-local", Aft::new(Variant::Local { window: 64, length: Some(1000) }));
    check("AFT-conv", Aft::new(Variant::Conv { taps: 33, normalized: true }));
}

#[test]
fn steps_of_softmax_attention() {
    check("softmax", SoftmaxAttention { capacity: 500, ..SoftmaxAttention::default() });
}
