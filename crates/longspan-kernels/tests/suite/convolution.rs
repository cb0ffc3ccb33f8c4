//! The conformance suite over short convolutions, with gates and without.

use longspan_kernels::{Dims, Kernel, ShortConvolution, State, Token};
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{
    Assumptions, Case, KeyMask, Subject, accuracy, grid, isolation, rejection, state_gradients, threads,
};

fn subject(convolution: ShortConvolution) -> Subject {
    let assumptions = Assumptions {
        signed_features: true,
        biased: convolution.bias,
        signed_parameters: 1 + usize::from(convolution.bias),
        content: true,
        positions: true,
        true_denominators: true,
        ..Default::default()
    };
    Subject::new(convolution, assumptions)
}

/// Runs a check over cases, with one tap, the usual three and four, more than short sequences have tokens, and the most; half of them
/// have no gates, and so neither queries nor keys.
fn over(cases: &[Case], check: Check) {
    let form = |n: usize| {
        let bits = n / 6;
        let [silu, gated, bias] = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
        ShortConvolution { width: [1, 2, 3, 4, 7, 64][n % 6], silu, gated, bias }
    };
    let subjects: Vec<_> = (0..48).map(|n| (form(n), subject(form(n)))).collect();
    let cases: Vec<_> = cases
        .iter()
        .enumerate()
        .map(|(n, case)| {
            let (form, subject) = &subjects[n % subjects.len()];
            let head_dim = if form.gated { case.dims.head_dim } else { 0 };
            (subject, Case { dims: Dims { head_dim, ..case.dims }, ..case.clone() })
        })
        .collect();
    assert_all(check, cases.iter().map(|(subject, case)| (*subject, case)));
}

/// Lengths around the kernels' pieces of 256 tokens too.
const LENGTHS: [usize; 8] = [0, 1, 3, 13, 65, 255, 257, 600];

fn cases(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    grid::channels(seed, count, lengths)
}

fn streams(seed: u64, count: usize) -> Vec<Case> {
    let stream = |case: Case| {
        let dims = Dims { keys: case.dims.queries, ..case.dims };
        Case { dims, causal: true, offset: 0, keys: KeyMask::All, ..case }
    };
    cases(seed, count, &grid::LENGTHS[1..]).into_iter().map(stream).collect()
}

longspan_testing::shared_tests!(over, cases, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        cases(51, 300, &grid::LENGTHS) => accuracy::forward::<f32>,
        cases(52, 300, &grid::LENGTHS) => accuracy::forward::<f64>,
        cases(53, 60, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition:
        cases(54, 200, &grid::SHORT_LENGTHS) => accuracy::gradient,
        cases(55, 40, &LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: cases(56, 300, &grid::LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped:
        cases(57, 300, &grid::LENGTHS) => isolation::packed_is_looped::<f32>,
        cases(58, 200, &grid::LENGTHS) => isolation::packed_is_looped::<f64>;
    threads_do_not_matter:
        cases(59, 60, &LENGTHS) => threads::threads_do_not_matter::<f32>,
        streams(60, 30) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
    gradients_of_states_are_difference_quotients:
        cases(61, 200, &grid::SHORT_LENGTHS) => state_gradients::state_gradients_are_difference_quotients;
}

#[test]
fn wrong_calls_are_refused() {
    let four = ShortConvolution::default();
    rejection::assert_wrong_calls(&subject(four.clone()), [3, 3]);
    let dims = rejection::dims([3, 3]);
    for width in [0, 65] {
        let convolution = ShortConvolution { width, ..four.clone() };
        rejection::assert_refused(&subject(convolution.clone()), &Case::new(dims, true), "width");
        let error = Kernel::<f32>::empty_state(&convolution, &dims).unwrap_err().to_string();
        assert!(error.contains("width"), "{error}");
    }
    rejection::assert_refused(&subject(four.clone()), &Case::new(rejection::dims([3, 4]), true), "value_dim");
    rejection::assert_refused(&subject(ShortConvolution { gated: false, ..four }), &Case::new(dims, true), "head_dim");
}

/// States of another width, and counts that no step writes.
#[test]
fn foreign_states_are_refused() {
    let [three, four] = [3, 4].map(|width| ShortConvolution { width, silu: false, ..Default::default() });
    let state = Kernel::<f32>::empty_state(&three, &Dims::square(1, 1, 1, 2)).unwrap();
    let taps = [&[0.5f32; 8][..]];
    let token = Token { q: &[1.0f32, 0.0], k: &[0.5, 0.5], v: &[2.0, 3.0], parameters: &taps };
    let error = four.step(&token, &mut state.clone(), &mut [0.0; 2]).unwrap_err().to_string();
    assert!(error.contains("state"), "{error}");
    let taps = [&[0.5f32; 6][..]];
    let token = Token { parameters: &taps, ..token };
    three.step(&token, &mut state.clone(), &mut [0.0; 2]).unwrap();
    for count in [3.0, 0.5, -1.0, f32::NAN] {
        let mut numbers = state.numbers().to_vec();
        numbers[4] = count;
        let mut wrong = State::from_numbers(state.shape(), numbers).unwrap();
        let error = three.step(&token, &mut wrong, &mut [0.0; 2]).unwrap_err().to_string();
        assert!(error.contains("number of tokens"), "{error}");
    }
}
