//! The conformance suite over kernelized attention whose tokens bring decays, with every kind of positions.

use longspan_kernels::{Algorithm, Dims, FeatureMap, Gate, GatedAttention, KernelizedAttention, Score, Shaw, Update};
use longspan_testing::compare::worst;
use longspan_testing::grid::{self, LENGTHS, SHORT_LENGTHS};
use longspan_testing::suite::over_kernelized as over;
use longspan_testing::{
    Assumptions, Case, KeyMask, Subject, accuracy, execute, isolation, rejection, state_gradients, streaming, threads,
};

/// With Shaw's positions, Fourier positions, and none.
fn cases(seed: u64, count: usize, lengths: &[usize]) -> Vec<(KernelizedAttention, Case)> {
    let mut cases = grid::kernelized(seed, count, lengths);
    cases.extend(grid::fourier(seed, count / 3, lengths, true));
    grid::gated(cases)
}

fn streams(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    let mut cases = grid::kernelized(seed, count, &LENGTHS);
    cases.extend(grid::fourier(seed, count / 3, &LENGTHS, false));
    grid::gated(grid::as_streams(seed, cases))
}

longspan_testing::shared_tests!(over, cases, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        cases(81, 300, &LENGTHS) => accuracy::forward::<f32>,
        cases(82, 300, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: cases(83, 150, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: cases(84, 300, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped:
        // Given positions are not split with the sequences.
        grid::gated(grid::kernelized(85, 300, &LENGTHS)) => isolation::packed_is_looped::<f32>,
        grid::gated(grid::fourier(86, 100, &LENGTHS, false)) => isolation::packed_is_looped::<f64>;
    state_gradients_are_difference_quotients: streams(87, 200) => state_gradients::state_gradients_are_difference_quotients;
    threads_do_not_matter: cases(88, 60, &LENGTHS) => threads::threads_do_not_matter::<f32>;
    threads_do_not_matter_for_long_sequences:
        long() => threads::threads_do_not_matter::<f32>,
        streams_of(long()) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
    long_sequences_stream: streams_of(long()) => streaming::pieces_make_the_whole::<f32>;
    gradients_of_long_sequences_pass_through_states:
        streams_of(long()) => state_gradients::gradients_pass_through_states::<f32>;
}

/// Sequences of several segments.
fn long() -> Vec<(KernelizedAttention, Case)> {
    let content = KernelizedAttention { gate: true, ..Default::default() };
    let combined = |radius| KernelizedAttention { score: Score::Combined(Shaw::new(radius)), ..content.clone() };
    let mechanisms = [
        content.clone(),
        KernelizedAttention { feature_map: FeatureMap::Exp, ..content.clone() },
        combined(0),
        combined(20),
        KernelizedAttention { normalize: false, ..combined(65) },
        KernelizedAttention { score: Score::Relative(Shaw::new(3)), ..content.clone() },
    ];
    let dims = Dims { batch: 1, heads: 3, kv_heads: 3, queries: 2500, keys: 2500, head_dim: 8, value_dim: 5 };
    let padding = KeyMask::Padding((0..2500).map(|j| j % 7 == 3 || (1000..1700).contains(&j)).collect());
    let case = Case { seed: 5, ..Case::new(dims, true) };
    let both = [case.clone(), Case { keys: padding, ..case }];
    mechanisms.into_iter().flat_map(|attention| both.clone().map(|case| (attention.clone(), case))).collect()
}

fn streams_of(mut cases: Vec<(KernelizedAttention, Case)>) -> Vec<(KernelizedAttention, Case)> {
    cases.retain(|(_, case)| case.keys == KeyMask::All);
    cases
}

/// Without normaliser and map it is [`GatedAttention`], by other code.
#[test]
fn the_plain_case_is_gated_linear_attention() {
    let kernelized =
        KernelizedAttention { feature_map: FeatureMap::Identity, normalize: false, gate: true, ..Default::default() };
    let gated = GatedAttention { update: Update::Sum, gate: Gate::Head, l2_norm: false, scale: Some(1.0) };
    for length in [2, 64, 200] {
        let case = Case::new(Dims { heads: 4, ..Dims::square(2, 2, length, 16) }, true);
        let one = Subject::kernelized(&kernelized);
        let other = Subject::new(gated, Assumptions::default());
        let inputs = execute::random(&one, &case);
        let (out, back) = execute::both::<f64>(&one, &case, &inputs).unwrap();
        let (expected, expected_back) = execute::both::<f64>(&other, &case, &inputs).unwrap();
        let errors = [worst(&[out.out], &[expected.out]), worst(&back.gradients, &expected_back.gradients)];
        assert!(errors[0] < 1e-13 && errors[1] < 1e-12, "{length} tokens: off by {errors:?} of the largest");
    }
}

#[test]
fn gates_without_meaning_are_refused() {
    let dims = Dims { queries: 3, keys: 3, ..rejection::dims([3, 2]) };
    let case = Case::new(dims, true);
    let gated = KernelizedAttention { gate: true, ..Default::default() };
    let refused = |attention: &KernelizedAttention, case: &Case, word: &str| {
        rejection::assert_refused(&Subject::kernelized(attention), case, word);
    };
    refused(&KernelizedAttention { decay: Some(vec![0.5; 2]), ..gated.clone() }, &case, "gates");
    refused(&KernelizedAttention { algorithm: Algorithm::Naive, ..gated.clone() }, &case, "naive");
    refused(&gated, &Case { causal: false, ..case.clone() }, "decay");
    refused(&gated, &Case { offset: 1, ..case.clone() }, "queries");
    refused(&gated, &Case { dims: Dims { queries: 2, ..dims }, ..case.clone() }, "queries");
    let mut rising = Subject::kernelized(&gated);
    rising.prepare = std::sync::Arc::new(|_, numbers| numbers.fill(0.5));
    rejection::assert_refused(&rising, &case, "log_decay");
}
