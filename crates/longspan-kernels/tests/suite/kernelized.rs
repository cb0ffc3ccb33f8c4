//! The conformance suite over kernelized attention, with and without relative positions.

use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Algorithm, Call, Dims, FeatureMap, Kernel, KernelizedAttention, Mask, Score, Shaw, Token};
use longspan_testing::compare::close;
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::suite::{over_extreme_keys, over_kernelized as over, over_mechanisms};
use longspan_testing::{
    Case, Failure, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, memory, published, rejection,
    state_gradients, streaming, threads,
};

/// Where all keys are alike rounding falls to one side; the mean of ones is one after a million tokens as after a thousand.
#[test]
fn rounding_does_not_grow_with_the_length() {
    let subject = Subject::kernelized(&KernelizedAttention::default());
    for length in [1_000, 1_000_000] {
        let case = Case::new(Dims { value_dim: 1, ..Dims::square(1, 1, length, 8) }, true);
        let mut inputs = execute::random(&subject, &case).cast::<f32>();
        inputs.v.fill(1.0);
        for rows in [&mut inputs.q, &mut inputs.k] {
            (8..rows.len()).for_each(|n| rows[n] = rows[n - 8]);
        }
        let out = execute::forward(&subject, &case, &inputs).unwrap().out;
        let error = out.iter().map(|x| (x - 1.0).abs()).fold(0.0, f32::max);
        println!("{length}: {error:e}");
        assert!(error <= 1e-5, "{length} tokens: off by {error:e}");
    }
}

longspan_testing::shared_tests!(over, grid::kernelized, grid::streaming);

longspan_testing::tests! { over;
    forward_is_the_definition_in_f32: grid::kernelized(11, 400, &LENGTHS) => accuracy::forward::<f32>;
    forward_is_the_definition_in_f64: grid::kernelized(12, 400, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: grid::kernelized(13, 150, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: grid::kernelized(14, 400, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped:
        grid::kernelized(23, 300, &LENGTHS) => isolation::packed_is_looped::<f32>,
        grid::kernelized(24, 300, &LENGTHS) => isolation::packed_is_looped::<f64>;
    order_does_not_matter_without_positions:
        unordered(25) => isolation::order_does_not_matter_without_positions::<f32>,
        unordered(26) => isolation::order_does_not_matter_without_positions::<f64>;
    pieces_of_both_directions_make_the_whole:
        both_directions(27, 300) => streaming::pieces_of_both_directions::<f32>,
        both_directions(28, 150) => streaming::pieces_of_both_directions::<f64>,
        long_and_whole(false) => streaming::pieces_of_both_directions::<f32>;
    /// Nothing comes out, but tokens are counted and their keys kept.
    tokens_without_values_enter_the_state: without_values(47, 60) => streaming::pieces_make_the_whole::<f32>;
    state_gradients_are_difference_quotients:
        grid::kernelized(45, 250, &LENGTHS) => state_gradients::state_gradients_are_difference_quotients;
    threads_do_not_matter:
        grid::kernelized(39, 40, &LENGTHS) => threads::threads_do_not_matter::<f32>,
        grid::kernelized(40, 20, &LENGTHS) => threads::threads_do_not_matter::<f64>;
    threads_do_not_matter_for_long_sequences:
        long() => threads::threads_do_not_matter::<f32>,
        odd_heads(true) => threads::threads_do_not_matter::<f32>,
        odd_heads(false) => threads::threads_do_not_matter::<f32>;
    poison_does_not_matter_for_long_sequences: long() => memory::poison_does_not_matter::<f32>;
    long_sequences_stream: long_and_whole(true) => streaming::pieces_make_the_whole::<f32>;
    gradients_of_long_sequences_pass_through_states:
        long_and_whole(true) => state_gradients::gradients_pass_through_states::<f32>,
        long_and_whole(true) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>,
        odd_heads(true) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
}

longspan_testing::tests! { over_mechanisms;
    algorithms_agree:
        grid::kernelized(15, 60, &LENGTHS) => accuracy::algorithms_agree::<f32>,
        grid::kernelized(16, 60, &LENGTHS) => accuracy::algorithms_agree::<f64>;
    /// The naive algorithm in f64, itself tested against the definition, stands in for it: the definition takes hours.
    long_sequences_are_those_of_the_naive_algorithm: long() => |attention, case| {
        let naive = KernelizedAttention { algorithm: Algorithm::Naive, ..attention.clone() };
        accuracy::agree::<f32>(&Subject::kernelized(&naive), &[Subject::kernelized(attention)], case)
    };
}

/// Two oracles, written apart, say the same.
#[test]
fn the_published_algorithm_is_the_definition() {
    let mut cases = grid::kernelized(17, 600, &LENGTHS);
    cases.retain(|(attention, case)| published::computes(attention, case));
    assert!(cases.len() > 30, "{} cases", cases.len());
    over_mechanisms(&cases, |attention, case| {
        let subject = Subject::kernelized(attention);
        let inputs = execute::random(&subject, case);
        let (got, expected) =
            (published::forward(attention, case, &inputs), execute::reference(&subject, case, &inputs)?);
        let scale = accuracy::forward_scale(&subject, case, &inputs)?;
        close("out", &got, &expected.out, &scale.out, case.terms())
    });
}

/// Both directions, in pieces between the states of the keys before and after.
fn both_directions(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    let bidirectional =
        |(attention, case)| (KernelizedAttention { decay: None, ..attention }, Case { causal: false, ..case });
    grid::streaming(seed, count).into_iter().map(bidirectional).collect()
}

/// Bidirectional calls without positions.
fn unordered(seed: u64) -> Vec<(KernelizedAttention, Case)> {
    let unordered = |(attention, case): (KernelizedAttention, Case)| {
        let positive = attention.feature_map == FeatureMap::Identity && attention.normalize;
        let case = Case { causal: false, keys: KeyMask::All, positive, ..case };
        (KernelizedAttention { score: Score::Content, decay: None, ..attention }, case)
    };
    grid::kernelized(seed, 60, &LENGTHS).into_iter().map(unordered).collect()
}

fn without_values(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    let mut cases = grid::streaming(seed, count);
    cases.iter_mut().for_each(|(_, case)| case.dims.value_dim = 0);
    cases
}

#[test]
fn a_shared_table_is_legal_without_heads() {
    let dims = Dims { batch: 1, heads: 0, kv_heads: 1, queries: 5, keys: 5, head_dim: 4, value_dim: 3 };
    let shaw = Shaw { shared: true, ..Shaw::new(2) };
    let with = |algorithm| {
        let score = Score::Combined(shaw);
        (KernelizedAttention { score, algorithm, ..Default::default() }, Case::new(dims, true))
    };
    let cases = [Algorithm::Auto, Algorithm::Chunked, Algorithm::Naive].map(with);
    over(&cases, accuracy::forward::<f32>);
    over(&cases, accuracy::gradient_in_f32);
}

/// Mechanisms for sequences of several segments: short ones say nothing of how segments are joined.
fn long() -> Vec<(KernelizedAttention, Case)> {
    let content = KernelizedAttention { algorithm: Algorithm::Chunked, ..Default::default() };
    let combined = |radius| KernelizedAttention { score: Score::Combined(Shaw::new(radius)), ..content.clone() };
    let mechanisms = [
        content.clone(),
        KernelizedAttention { feature_map: FeatureMap::Exp, ..content.clone() },
        KernelizedAttention { decay: Some(vec![0.9, 0.999]), ..content.clone() },
        combined(0),
        combined(20),
        combined(1500),
        KernelizedAttention { decay: Some(vec![0.97, 1.0]), normalize: false, ..combined(65) },
        KernelizedAttention { score: Score::Relative(Shaw::new(3)), ..content.clone() },
    ];
    let dims = Dims { batch: 1, heads: 2, kv_heads: 2, queries: 4500, keys: 4500, head_dim: 8, value_dim: 5 };
    let grouped = Dims { heads: 4, queries: 3000, ..dims };
    let mut cases = Vec::new();
    for attention in mechanisms {
        for causal in [true, false] {
            if !causal && attention.decay.is_some() {
                continue;
            }
            let case = Case { seed: 5, ..Case::new(dims, causal) };
            let ragged = Case { dims: grouped, offset: 1500, ..case.clone() };
            let padding = KeyMask::Padding((0..4500).map(|j| j % 7 == 3 || (1000..1700).contains(&j)).collect());
            let bounds = vec![0, 10, 10, 2600, 4500];
            let packed = KeyMask::Packed { queries: bounds.clone(), keys: bounds };
            cases.extend([
                (attention.clone(), ragged),
                (attention.clone(), Case { keys: padding, ..case.clone() }),
                (attention.clone(), Case { keys: packed, ..case.clone() }),
                (attention.clone(), case),
            ]);
        }
    }
    cases
}

/// Heads of which two threads take a round whole and the rest in segments.
fn odd_heads(causal: bool) -> Vec<(KernelizedAttention, Case)> {
    let mut cases = long_and_whole(causal);
    for (attention, case) in &mut cases {
        case.dims = Dims { heads: 3, kv_heads: 3, ..case.dims };
        attention.decay.iter_mut().for_each(|decay| decay.push(0.99));
    }
    cases
}

/// Long sequences of which a call takes all keys, with the first query at the first.
fn long_and_whole(causal: bool) -> Vec<(KernelizedAttention, Case)> {
    let mut cases = long();
    cases.retain(|(_, case)| case.causal == causal && case.offset == 0 && case.keys == KeyMask::All);
    cases
}

/// Exponentials whose keys lie far beyond what a float can hold the exponential of.
fn with_extreme_keys(check: fn(&Subject, &Case, &Inputs<f64>) -> Result<(), Failure>) {
    let exp = KernelizedAttention { feature_map: FeatureMap::Exp, ..Default::default() };
    let combined = KernelizedAttention { score: Score::Combined(Shaw::new(3)), ..exp.clone() };
    let subjects = [exp, combined].iter().flat_map(Subject::every_algorithm).collect::<Vec<_>>();
    over_extreme_keys(&subjects, [4, 3], check);
}

#[test]
fn exponential_features_do_not_overflow() {
    with_extreme_keys(accuracy::forward_of::<f32>);
    with_extreme_keys(accuracy::forward_of::<f64>);
}

#[test]
fn gradients_of_exponential_features_do_not_overflow() {
    with_extreme_keys(accuracy::gradient_in_f32_of);
}

#[test]
fn exponential_features_stream_without_overflow() {
    with_extreme_keys(|subject, case, inputs| {
        if !case.causal {
            return Ok(());
        }
        streaming::pieces_make_the_whole_of::<f32>(subject, case, inputs)?;
        streaming::states_add_up_of::<f32>(subject, case, inputs)?;
        state_gradients::gradients_pass_through_states_of::<f32>(subject, case, inputs)
    });
}

#[test]
fn wrong_calls_are_refused() {
    for score in [Score::Content, Score::Relative(Shaw::new(2)), Score::Combined(Shaw::new(2))] {
        rejection::assert_wrong_calls(
            &Subject::kernelized(&KernelizedAttention { score, ..Default::default() }),
            [3, 2],
        );
    }
}

#[test]
fn options_without_meaning_are_refused() {
    let [causal, bidirectional] = [true, false].map(|causal| Case::new(rejection::dims([3, 2]), causal));
    for (decay, case) in [
        (vec![0.5, 0.5], &bidirectional),
        (vec![0.5], &causal),
        (vec![0.5; 4], &causal),
        (vec![0.0, 0.5], &causal),
        (vec![0.5, 1.5], &causal),
        (vec![0.5, f64::NAN], &causal),
        (vec![-0.5, 0.5], &causal),
    ] {
        let attention = KernelizedAttention { decay: Some(decay), ..Default::default() };
        rejection::assert_refused(&Subject::kernelized(&attention), case, "decay");
    }
}

#[test]
fn keys_given_as_states_are_refused_where_they_have_no_place() {
    let shaw = KernelizedAttention { score: Score::Combined(Shaw::new(3)), ..Default::default() };
    let dims = Dims { batch: 1, heads: 1, kv_heads: 1, queries: 6, keys: 12, head_dim: 4, value_dim: 4 };
    let numbers = vec![0.5f32; 64];
    let table = vec![0.25f32; 7 * 4];
    let parameters = [table.as_slice()];
    let kernel: &dyn Kernel<f32> = &shaw;
    let empty = kernel.empty_state(&dims).unwrap();
    let mut full = empty.clone();
    let token = Token { q: &numbers[..4], k: &numbers[..4], v: &numbers[..4], parameters: &parameters };
    kernel.step(&token, &mut full, &mut [0.0; 4]).unwrap();
    let call = |mechanism: &dyn Kernel<f32>, mask: Mask<'_>, outside| {
        let parameters = if mechanism.name() == "shaw" { parameters.as_slice() } else { &[] };
        let call = Call::row_major(dims, [&numbers[..24], &numbers[..48], &numbers[..48]]);
        mechanism.check(&call.with_parameters(parameters).with_mask(mask).with_outside(outside))
    };
    let between = |offset| Mask::bidirectional().with_offset(offset);
    call(kernel, between(3), [&full, &full]).unwrap();
    call(kernel, between(0), [&empty, &full]).unwrap();
    call(kernel, between(6), [&full, &empty]).unwrap();
    let aft = Aft::new(Variant::Simple);
    for (mechanism, mask, outside, part) in [
        (kernel, between(2), [&full, &full], "at least 3 keys away"),
        (kernel, between(4), [&full, &full], "at least 3 keys away"),
        (kernel, Mask::causal().with_offset(3), [&full, &full], "outside the call"),
        (&aft, between(3), [&full, &full], "outside the call"),
    ] {
        let error = call(mechanism, mask, outside).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
