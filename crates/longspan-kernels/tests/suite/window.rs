//! The conformance suite over sliding-window attention, softmax attention with a window.

use longspan_kernels::{Dims, Kernel, SoftmaxAttention, Token};
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{
    Assumptions, Case, Subject, accuracy, execute, grid, isolation, rejection, state_gradients, threads,
};

fn subject(window: usize) -> Subject {
    // Weights beyond the window are 0.
    let assumptions = Assumptions { content: true, positions: true, ..Default::default() };
    Subject::new(SoftmaxAttention { window: Some(window), capacity: 0, ..Default::default() }, assumptions)
}

/// Runs a check over cases, with windows of one key, of a few, around the kernels' tiles of 64 keys, and beyond most sequences.
fn over(cases: &[Case], check: Check) {
    let subjects = [1, 2, 17, 63, 64, 65, 150].map(subject);
    assert_all(check, cases.iter().enumerate().map(|(n, case)| (&subjects[n % subjects.len()], case)));
}

fn cases(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    grid::kernelized(seed, count, lengths).into_iter().map(|(_, case)| Case { positive: false, ..case }).collect()
}

fn positive(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    cases(seed, count, lengths).into_iter().map(|case| Case { positive: true, ..case }).collect()
}

fn streams(seed: u64, count: usize) -> Vec<Case> {
    grid::streaming(seed, count).into_iter().map(|(_, case)| Case { positive: true, ..case }).collect()
}

longspan_testing::shared_tests!(over, positive, streams);

#[test]
fn forward_is_the_definition() {
    over(&cases(51, 400, &grid::LENGTHS), accuracy::forward::<f32>);
    over(&cases(52, 400, &grid::LENGTHS), accuracy::forward::<f64>);
}

#[test]
fn gradients_are_those_of_the_definition() {
    over(&cases(53, 200, &grid::SHORT_LENGTHS), accuracy::gradient);
}

#[test]
fn gradients_in_f32_are_those_in_f64() {
    over(&positive(54, 300, &grid::LENGTHS), accuracy::gradient_in_f32);
}

#[test]
fn packed_is_looped() {
    over(&positive(55, 300, &grid::LENGTHS), isolation::packed_is_looped::<f32>);
}

#[test]
fn threads_do_not_matter() {
    over(&cases(56, 60, &grid::LENGTHS), threads::threads_do_not_matter::<f32>);
    over(&streams(57, 30), state_gradients::threads_do_not_matter_to_state_gradients::<f32>);
}

/// A window that reaches every key is none.
#[test]
fn a_wide_window_is_softmax_attention() {
    let wide = subject(1000);
    let whole = Subject::new(SoftmaxAttention::default(), Assumptions::default());
    for case in cases(58, 60, &grid::LENGTHS) {
        let inputs = execute::random(&wide, &case).cast::<f32>();
        let case = Case { offset: case.offset.clamp(-300, 300), ..case };
        let [a, b] = [&wide, &whole].map(|subject| execute::forward(subject, &case, &inputs).unwrap());
        assert!(a.out.iter().zip(&b.out).all(|(a, b)| a.to_bits() == b.to_bits()), "{case:?}");
    }
}

/// A thousand steps in a window of three: the state does not grow, and a step reads its last three tokens alone.
#[test]
fn a_ring_never_fills() {
    let attention = SoftmaxAttention { window: Some(3), ..Default::default() };
    let mut state = attention.empty_state(&Dims::square(1, 1, 1, 1)).unwrap();
    let mut out = [0.0f32];
    for n in 0..1000 {
        let (k, v) = ([0.0], [n as f32]);
        attention.step(&Token { q: &[1.0], k: &k, v: &v, parameters: &[] }, &mut state, &mut out).unwrap();
        let first = (n - 2).max(0);
        let expected = (first..=n).sum::<i32>() as f32 / (n - first + 1) as f32;
        assert!((out[0] - expected).abs() < 1e-3, "{n}: {} for {expected}", out[0]);
    }
}

#[test]
fn wrong_calls_are_refused() {
    let case =
        Case::new(Dims { batch: 2, heads: 4, kv_heads: 2, queries: 5, keys: 6, head_dim: 3, value_dim: 2 }, true);
    rejection::wrong_calls::<f32>(&subject(4), &case).unwrap_or_else(|failure| panic!("{failure}"));
    for window in [0, (1 << 22) + 1, usize::MAX] {
        let refused = rejection::refuses::<f32>(&subject(window), &case, "window");
        refused.unwrap_or_else(|failure| panic!("{failure}"));
        let attention = SoftmaxAttention { window: Some(window), ..Default::default() };
        let error = Kernel::<f32>::empty_state(&attention, &case.dims).unwrap_err().to_string();
        assert!(error.contains("window"), "{error}");
    }
}

/// States of another window, and marks that no step writes.
#[test]
fn foreign_states_are_refused() {
    let [three, four] = [3, 4].map(|window| SoftmaxAttention { window: Some(window), ..Default::default() });
    let dims = Dims::square(1, 1, 1, 2);
    let state = Kernel::<f32>::empty_state(&three, &dims).unwrap();
    let token = Token { q: &[1.0f32, 0.0], k: &[0.5, 0.5], v: &[2.0, 3.0], parameters: &[] };
    four.step(&token, &mut state.clone(), &mut [0.0; 2]).unwrap_err();
    let full = SoftmaxAttention { capacity: 3, ..Default::default() };
    full.step(&token, &mut state.clone(), &mut [0.0; 2]).unwrap_err();
    let [keys, values, ..] = state.shape().parts;
    for (place, mark) in [(keys + values, 6.0), (keys + values, 0.5), (keys + values, -1.0), (keys + values + 1, 0.5)] {
        let mut numbers = state.numbers().to_vec();
        numbers[place] = mark;
        let mut wrong = longspan_kernels::State::from_numbers(state.shape(), numbers).unwrap();
        let error = three.step(&token, &mut wrong, &mut [0.0; 2]).unwrap_err().to_string();
        assert!(error.contains("state"), "{error}");
    }
}

/// What is outside every window reaches nothing, whatever it is.
#[test]
fn what_no_window_reaches_does_not_matter() {
    let dims = Dims::square(1, 2, 200, 4);
    let case = Case { seed: 3, ..Case::new(dims, true) };
    let subject = subject(10);
    let inputs = execute::random(&subject, &case).cast::<f32>();
    let expected = execute::forward(&subject, &case, &inputs).unwrap();
    let mut poisoned = inputs.clone();
    let rows = 50 * dims.head_dim..60 * dims.head_dim;
    poisoned.k[rows.clone()].fill(f32::NAN);
    poisoned.v[rows].fill(f32::INFINITY);
    let got = execute::forward(&subject, &case, &poisoned).unwrap();
    for (token, (a, b)) in got.out.chunks(4).zip(expected.out.chunks(4)).enumerate().take(200) {
        let reached = (50..69).contains(&token);
        let close = a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert_eq!(close, !reached, "token {token}: {a:?} for {b:?}");
    }
}
