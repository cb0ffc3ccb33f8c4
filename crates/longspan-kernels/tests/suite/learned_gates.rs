//! The conformance suite over gated attention whose gates come with the keys, in one direction and in both, with and without a convolution.

use std::sync::Arc;

use longspan_kernels::{Dims, Gate, GatedAttention, Kernel, LearnedGates, Parameter, Update};
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{
    Assumptions, Case, KeyMask, Subject, accuracy, grid, isolation, rejection, state_gradients, threads,
};

fn subject(update: Update, gate: Gate, beta_max: f64, convolution: Option<usize>) -> Subject {
    let assumptions = Assumptions {
        signed_features: true,
        content: true,
        positions: true,
        turned: true,
        true_denominators: true,
        queries_before: convolution.map_or(0, |width| width - 1),
        ..Default::default()
    };
    let attention = GatedAttention { update, gate, l2_norm: update == Update::Delta, scale: None };
    // Scales are results without signs: taps with signs would make them small.
    let unsigned = |parameter: &Parameter, numbers: &mut [f64]| {
        if parameter.name.ends_with("_taps") {
            numbers.iter_mut().for_each(|x| *x = x.abs());
        }
    };
    let mut subject = Subject::new(LearnedGates { attention, beta_max, convolution }, assumptions);
    subject.prepare = Arc::new(unsigned);
    subject
}

fn subjects() -> Vec<Subject> {
    let gates = [Gate::Head, Gate::Channel, Gate::None];
    let of = |update, beta_max, convolution| gates.map(|gate| subject(update, gate, beta_max, convolution));
    let convolved = [of(Update::Delta, 1.0, Some(4)), of(Update::Sum, 1.0, Some(3))];
    let plain = [of(Update::Delta, 1.0, None), of(Update::Sum, 1.0, None), of(Update::Delta, 2.0, None)];
    [plain.concat(), convolved.concat(), vec![subject(Update::Delta, Gate::Head, 1.0, Some(1))]].concat()
}

fn over(cases: &[Case], check: Check) {
    let subjects = subjects();
    assert_all(check, cases.iter().enumerate().map(|(n, case)| (&subjects[n % subjects.len()], case)));
}

/// Calls of as many queries as keys, in either order of time.
fn cases(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    let square = |case: Case| {
        let keys = match case.keys {
            KeyMask::Packed { keys, .. } => KeyMask::Packed { queries: keys.clone(), keys },
            others => others,
        };
        // A row of one number divided by its length is its sign, whose gradient is nearly 0.
        let dims = Dims { queries: case.dims.keys, head_dim: case.dims.head_dim.max(2), ..case.dims };
        Case { dims, offset: 0, keys, ..case }
    };
    grid::channels(seed, count, lengths).into_iter().map(square).collect()
}

fn streams(seed: u64, count: usize) -> Vec<Case> {
    let stream = |case: Case| Case { causal: true, keys: KeyMask::All, ..case };
    cases(seed, count, &grid::LENGTHS[1..]).into_iter().map(stream).collect()
}

/// The same of mechanisms whose states add up.
fn over_sums(cases: &[Case], check: Check) {
    let subjects = [Gate::Head, Gate::Channel, Gate::None].map(|gate| subject(Update::Sum, gate, 1.0, None));
    assert_all(check, cases.iter().enumerate().map(|(n, case)| (&subjects[n % subjects.len()], case)));
}

longspan_testing::shared_tests!(over, over_sums, cases, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        cases(91, 300, &grid::LENGTHS) => accuracy::forward::<f32>,
        cases(92, 300, &grid::LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: cases(93, 200, &grid::SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: cases(94, 300, &grid::LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped: cases(95, 300, &grid::LENGTHS) => isolation::packed_is_looped::<f64>;
    threads_do_not_matter:
        cases(96, 60, &grid::LENGTHS) => threads::threads_do_not_matter::<f32>,
        streams(97, 30) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
    gradients_of_states_are_difference_quotients:
        streams(98, 100) => state_gradients::state_gradients_are_difference_quotients;
}

#[test]
fn wrong_calls_are_refused() {
    let good = Case::new(Dims::square(2, 2, 5, 3), true);
    for subject in subjects() {
        for causal in [true, false] {
            let fewer = Case { causal, dims: Dims { queries: 4, ..good.dims }, ..good.clone() };
            rejection::assert_refused(&subject, &fewer, "queries");
            let ahead = Case { causal, offset: 1, ..good.clone() };
            rejection::assert_refused(&subject, &ahead, "offset");
        }
    }
    for width in [0, 65] {
        rejection::assert_refused(&subject(Update::Sum, Gate::Head, 1.0, Some(width)), &good, "convolution");
        // A step's state, too: it would have no place for the rows before.
        let learned = LearnedGates { convolution: Some(width), ..LearnedGates::default() };
        let refused = Kernel::<f32>::empty_state(&learned, &good.dims).unwrap_err().to_string();
        assert!(refused.contains("convolution: expected between 1 and 64"), "{refused}");
    }
    let fewer = Case { dims: Dims { queries: 0, ..good.dims }, ..good.clone() };
    rejection::assert_refused(&subject(Update::Sum, Gate::Head, 1.0, Some(4)), &fewer, "queries");
    for beta_max in [0.0, 2.5, f64::NAN] {
        rejection::assert_refused(&subject(Update::Delta, Gate::Head, beta_max, None), &good, "beta_max");
    }
}

/// A token has the same state as in a call with its gates given.
#[test]
fn states_are_those_of_gated_attention() {
    let dims = Dims::square(2, 4, 1, 6);
    for gate in [Gate::Head, Gate::Channel, Gate::None] {
        let attention = GatedAttention { gate, ..Default::default() };
        let learned = LearnedGates { attention, ..LearnedGates::default() };
        let [own, given] = [
            Kernel::<f32>::empty_state(&learned, &dims).unwrap(),
            Kernel::<f32>::empty_state(&attention, &dims).unwrap(),
        ];
        assert_eq!(own.shape(), given.shape());
    }
}

/// What the later tokens add depends on the rows right before them.
#[test]
fn states_behind_a_convolution_have_no_sum() {
    let attention = GatedAttention { update: Update::Sum, ..Default::default() };
    let learned = LearnedGates { attention, convolution: Some(4), ..LearnedGates::default() };
    let state = Kernel::<f32>::empty_state(&learned, &Dims::square(2, 4, 1, 6)).unwrap();
    let refused = learned.combine(&state, &state, &[]).unwrap_err().to_string();
    assert!(refused.contains("behind a convolution"), "{refused}");
}
