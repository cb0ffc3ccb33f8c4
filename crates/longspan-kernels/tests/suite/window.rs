//! The conformance suite over sliding-window attention, softmax attention with a window.

use longspan_kernels::{Dims, Kernel, SoftmaxAttention, State, Token};
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{Assumptions, Case, Subject, accuracy, execute, isolation, rejection, state_gradients, threads};

use crate::softmax::{positive, signed, streams};

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

longspan_testing::shared_tests!(over, positive, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        signed(51, 400, &LENGTHS) => accuracy::forward::<f32>,
        signed(52, 400, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: signed(53, 200, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: positive(54, 300, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped: positive(55, 300, &LENGTHS) => isolation::packed_is_looped::<f32>;
    threads_do_not_matter:
        signed(56, 60, &LENGTHS) => threads::threads_do_not_matter::<f32>,
        streams(57, 30) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
}

/// A window that reaches every key is none.
#[test]
fn a_wide_window_is_softmax_attention() {
    let wide = subject(1000);
    let whole = Subject::new(SoftmaxAttention::default(), Assumptions::default());
    for case in signed(58, 60, &LENGTHS) {
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
    rejection::assert_wrong_calls(&subject(4), [3, 2]);
    let case = Case::new(rejection::dims([3, 2]), true);
    for window in [0, (1 << 22) + 1, usize::MAX] {
        rejection::assert_refused(&subject(window), &case, "window");
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
        let mut wrong = State::from_numbers(state.shape(), numbers).unwrap();
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
