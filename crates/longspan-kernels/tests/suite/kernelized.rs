//! The conformance suite over kernelized attention, with and without relative positions.

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Algorithm, Call, Dims, FeatureMap, Kernel, KernelizedAttention, Mask, RelativeMap, Score, Shaw, Token, View,
};
use longspan_testing::suite::{Check, Sample, assert_all};
use longspan_testing::{
    Case, Failure, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, memory, published, rejection,
    state_gradients, streaming, threads,
};

/// Runs a check over drawn cases.
fn over(cases: &[(KernelizedAttention, Case)], check: Check) {
    let subjects: Vec<Subject> = cases.iter().map(|(attention, _)| Subject::kernelized(attention)).collect();
    assert_all(check, subjects.iter().zip(cases.iter().map(|(_, case)| case)));
}

/// Runs a check that picks its own mechanism over drawn cases.
fn over_attentions(
    cases: &[(KernelizedAttention, Case)],
    check: fn(&KernelizedAttention, &Case) -> Result<(), Failure>,
) {
    for (attention, case) in cases {
        if let Err(failure) = check(attention, case) {
            panic!("{failure}\n    {attention:?}\n    {case:?}");
        }
    }
}

longspan_testing::shared_tests!(over, grid::kernelized, grid::streaming);

#[test]
fn forward_is_the_definition_in_f32() {
    over(&grid::kernelized(11, 400, &grid::LENGTHS), accuracy::forward::<f32>);
}

#[test]
fn forward_is_the_definition_in_f64() {
    over(&grid::kernelized(12, 400, &grid::LENGTHS), accuracy::forward::<f64>);
}

#[test]
fn gradients_are_those_of_the_definition() {
    over(&grid::kernelized(13, 150, &grid::SHORT_LENGTHS), accuracy::gradient);
}

#[test]
fn gradients_in_f32_are_those_in_f64() {
    over(&grid::kernelized(14, 400, &grid::LENGTHS), accuracy::gradient_in_f32);
}

#[test]
fn algorithms_agree() {
    over_attentions(&grid::kernelized(15, 60, &grid::LENGTHS), accuracy::algorithms_agree::<f32>);
    over_attentions(&grid::kernelized(16, 60, &grid::LENGTHS), accuracy::algorithms_agree::<f64>);
}

/// Two oracles, written apart, say the same.
#[test]
fn the_published_algorithm_is_the_definition() {
    let mut compared = 0;
    for (attention, case) in grid::kernelized(17, 600, &grid::LENGTHS) {
        if !published::computes(&attention, &case) {
            continue;
        }
        let check = || -> Result<(), Failure> {
            let subject = Subject::kernelized(&attention);
            let inputs = execute::random(&subject, &case);
            let (got, expected) =
                (published::forward(&attention, &case, &inputs), execute::reference(&subject, &case, &inputs)?);
            let scale = accuracy::forward_scale(&subject, &case, &inputs)?;
            longspan_testing::compare::close("out", &got, &expected.out, &scale.out, case.terms())
        };
        if let Err(failure) = check() {
            panic!("{failure}\n    {attention:?}\n    {case:?}");
        }
        compared += 1;
    }
    assert!(compared > 30, "{compared} cases");
}

/// Both directions, in pieces between the states of the keys before and after.
fn both_directions(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    let bidirectional =
        |(attention, case)| (KernelizedAttention { decay: None, ..attention }, Case { causal: false, ..case });
    grid::streaming(seed, count).into_iter().map(bidirectional).collect()
}

#[test]
fn pieces_of_both_directions_make_the_whole() {
    over(&both_directions(27, 300), streaming::pieces_of_both_directions::<f32>);
    over(&both_directions(28, 150), streaming::pieces_of_both_directions::<f64>);
    let whole = |case: &Case| case.keys == KeyMask::All && case.offset == 0 && !case.causal;
    let long: Vec<_> = long().into_iter().filter(|(_, case)| whole(case)).collect();
    over(&long, streaming::pieces_of_both_directions::<f32>);
}

#[test]
fn packed_is_looped() {
    over(&grid::kernelized(23, 300, &grid::LENGTHS), isolation::packed_is_looped::<f32>);
    over(&grid::kernelized(24, 300, &grid::LENGTHS), isolation::packed_is_looped::<f64>);
}

#[test]
fn order_does_not_matter_without_positions() {
    let cases = |seed| -> Vec<_> {
        let unordered = |(attention, case): (KernelizedAttention, Case)| {
            let positive = attention.feature_map == FeatureMap::Identity && attention.normalize;
            let case = Case { causal: false, keys: KeyMask::All, positive, ..case };
            (KernelizedAttention { score: Score::Content, decay: None, ..attention }, case)
        };
        grid::kernelized(seed, 60, &grid::LENGTHS).into_iter().map(unordered).collect()
    };
    over(&cases(25), isolation::order_does_not_matter_without_positions::<f32>);
    over(&cases(26), isolation::order_does_not_matter_without_positions::<f64>);
}

/// Nothing comes out, but tokens are counted and their keys kept.
#[test]
fn tokens_without_values_enter_the_state() {
    let cases: Vec<_> = grid::streaming(47, 60)
        .into_iter()
        .map(|(mechanism, case)| (mechanism, Case { dims: Dims { value_dim: 0, ..case.dims }, ..case }))
        .collect();
    over(&cases, streaming::pieces_make_the_whole::<f32>);
}

#[test]
fn state_gradients_are_difference_quotients() {
    over(&grid::kernelized(45, 250, &grid::LENGTHS), state_gradients::state_gradients_are_difference_quotients);
}

#[test]
fn threads_do_not_matter() {
    over(&grid::kernelized(39, 40, &grid::LENGTHS), threads::threads_do_not_matter::<f32>);
    over(&grid::kernelized(40, 20, &grid::LENGTHS), threads::threads_do_not_matter::<f64>);
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

#[test]
fn threads_do_not_matter_for_long_sequences() {
    over(&long(), threads::threads_do_not_matter::<f32>);
}

#[test]
fn poison_does_not_matter_for_long_sequences() {
    over(&long(), memory::poison_does_not_matter::<f32>);
}

/// The naive algorithm in f64, itself tested against the definition, stands in for it: the definition takes hours.
#[test]
fn long_sequences_are_those_of_the_naive_algorithm() {
    for (attention, case) in long() {
        let check = || -> Result<(), Failure> {
            let naive = KernelizedAttention { algorithm: Algorithm::Naive, ..attention.clone() };
            let (naive, chunked) = (Subject::kernelized(&naive), Subject::kernelized(&attention));
            let inputs = execute::random(&naive, &case);
            let expected = execute::forward(&naive, &case, &inputs)?;
            let scale = accuracy::forward_scale(&naive, &case, &inputs)?;
            let expected_back = execute::backward(&naive, &case, &inputs, &expected)?;
            let back_scale = accuracy::backward_scale(&naive, &case, &inputs)?;
            let single = inputs.cast::<f32>();
            let got = execute::forward(&chunked, &case, &single)?;
            let close = longspan_testing::compare::close;
            close("out", &got.out, &expected.out, &scale.out, case.terms())?;
            let got = execute::backward(&chunked, &case, &single, &got)?;
            for (n, name) in accuracy::gradient_names(&inputs).iter().enumerate() {
                let (expected, scale) = (&expected_back.gradients[n], &back_scale.gradients[n]);
                close(name, &got.gradients[n], expected, scale, accuracy::gradient_terms(&case))?;
            }
            Ok(())
        };
        if let Err(failure) = check() {
            panic!("{failure}\n    {attention:?}\n    {case:?}");
        }
    }
}

/// Behind 1,200 ignored keys, weights of 0.9^1200 are no numbers of `f32`: such a row sees nothing, and gives no infinity.
#[test]
fn a_gap_that_outlasts_the_decay_gives_no_infinity() {
    let attention = KernelizedAttention { decay: Some(vec![0.9]), ..Default::default() };
    let subject = Subject::kernelized(&attention);
    let padding = (0..1500).map(|j| (100..1400).contains(&j)).collect();
    let case = Case { keys: KeyMask::Padding(padding), ..Case::new(Dims::square(1, 1, 1500, 4), true) };
    let inputs = execute::random(&subject, &case).cast::<f32>();
    let forward = execute::forward(&subject, &case, &inputs).expect("a call that makes sense");
    assert!(forward.out.iter().all(|x| x.is_finite()));
    assert!(forward.out[1399 * 4..1400 * 4].iter().all(|&x| x == 0.0), "the last row of the gap sees nothing");
    let backward = execute::backward(&subject, &case, &inputs, &forward).expect("a call that makes sense");
    assert!(backward.gradients.iter().flatten().all(|x| x.is_finite()));
}

#[test]
fn long_sequences_stream() {
    let cases: Vec<_> =
        long().into_iter().filter(|(_, case)| case.causal && case.offset == 0 && case.keys == KeyMask::All).collect();
    over(&cases, streaming::pieces_make_the_whole::<f32>);
}

#[test]
fn gradients_of_long_sequences_pass_through_states() {
    let cases: Vec<_> =
        long().into_iter().filter(|(_, case)| case.causal && case.offset == 0 && case.keys == KeyMask::All).collect();
    over(&cases, state_gradients::gradients_pass_through_states::<f32>);
    over(&cases, state_gradients::threads_do_not_matter_to_state_gradients::<f32>);
}

/// Exponentials whose keys lie far beyond what a float can hold the exponential of.
fn with_extreme_keys(check: fn(&Subject, &Case, &Inputs<f64>) -> Result<(), Failure>) {
    let exp = KernelizedAttention { feature_map: FeatureMap::Exp, ..Default::default() };
    let combined = KernelizedAttention { score: Score::Combined(Shaw::new(3)), ..exp.clone() };
    let dims = Dims { batch: 2, heads: 2, kv_heads: 1, queries: 150, keys: 150, head_dim: 4, value_dim: 3 };
    type Level = fn(usize) -> f64;
    let levels: [(&str, Level); 6] = [
        ("all at 10,000", |_| 1e4),
        ("all at −10,000", |_| -1e4),
        ("at 10,000 and −10,000 by turns", |j| if j % 3 == 0 { 1e4 } else { -1e4 }),
        ("rising", |j| j as f64 * 4.0),
        ("falling", |j| -(j as f64) * 4.0),
        ("at 120 for key 70", |j| if j == 70 { 120.0 } else { 0.0 }),
    ];
    let (mut sample, mut failures) = (Sample::default(), Vec::new());
    for attention in [exp, combined] {
        for subject in Subject::every_algorithm(&attention) {
            for (name, level) in levels {
                for causal in [true, false] {
                    if !sample.takes_next() {
                        continue;
                    }
                    let case = Case { seed: 77, ..Case::new(dims, causal) };
                    let mut inputs = execute::random(&subject, &case);
                    for (n, k) in inputs.k.iter_mut().enumerate() {
                        *k = f64::from((*k + level(n / dims.head_dim % dims.keys)) as f32);
                    }
                    if let Err(failure) = check(&subject, &case, &inputs) {
                        failures.push(format!("keys {name}, causal {causal}: {failure}\n    {}", subject.label));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures[..failures.len().min(6)].join("\n"));
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
    let dims = Dims { batch: 2, heads: 4, kv_heads: 2, queries: 5, keys: 6, head_dim: 3, value_dim: 2 };
    let case = Case::new(dims, true);
    for score in [Score::Content, Score::Relative(Shaw::new(2)), Score::Combined(Shaw::new(2))] {
        let subject = Subject::kernelized(&KernelizedAttention { score, ..Default::default() });
        let refused = rejection::wrong_calls::<f32>(&subject, &case);
        let refused = refused.and_then(|()| rejection::wrong_calls::<f64>(&subject, &case));
        if let Err(failure) = refused {
            panic!("{failure}\n    {}", subject.label);
        }
    }
}

#[test]
fn options_without_meaning_are_refused() {
    let dims = Dims { batch: 2, heads: 4, kv_heads: 2, queries: 5, keys: 6, head_dim: 3, value_dim: 2 };
    let (causal, bidirectional) = (Case::new(dims, true), Case::new(dims, false));
    let with = |decay: Vec<f64>| KernelizedAttention { decay: Some(decay), ..Default::default() };
    for (attention, case) in [
        (with(vec![0.5, 0.5]), &bidirectional),
        (with(vec![0.5]), &causal),
        (with(vec![0.5; 4]), &causal),
        (with(vec![0.0, 0.5]), &causal),
        (with(vec![0.5, 1.5]), &causal),
        (with(vec![0.5, f64::NAN]), &causal),
        (with(vec![-0.5, 0.5]), &causal),
    ] {
        if let Err(failure) = rejection::refuses::<f32>(&Subject::kernelized(&attention), case, "decay") {
            panic!("{failure}");
        }
    }
}

/// A radius that no table can have must not overflow on the way to the error.
#[test]
fn a_radius_beyond_all_bounds_is_refused() {
    use longspan_kernels::{Call, Kernel, Mask, View};
    let shape = [1, 1, 1, 1];
    for radius in [usize::MAX, usize::MAX / 2, isize::MAX as usize, 1 << 40] {
        for shared in [true, false] {
            let shaw = Shaw { shared, map: RelativeMap::Same, radius };
            let attention = KernelizedAttention { score: Score::Combined(shaw), ..Default::default() };
            let call = Call::new(
                Dims::square(1, 1, 1, 1),
                View::contiguous(&[1.0f32], shape),
                View::contiguous(&[1.0], shape),
                View::contiguous(&[1.0], shape),
            )
            .with_parameters(&[&[1.0]])
            .with_mask(Mask::causal());
            let error = attention.check(&call).expect_err("a table of one row was taken");
            assert!(error.to_string().contains("relative") || error.to_string().contains("radius"), "{error}");
        }
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
    kernel
        .step(
            &Token { q: &numbers[..4], k: &numbers[..4], v: &numbers[..4], parameters: &parameters },
            &mut full,
            &mut [0.0; 4],
        )
        .unwrap();
    let call = |mechanism: &dyn Kernel<f32>, mask: Mask<'_>, outside| {
        let rows = |shape: [usize; 4]| View::contiguous(&numbers, shape);
        let parameters = if mechanism.name() == "shaw" { parameters.as_slice() } else { &[] };
        let call = Call::new(dims, rows(dims.q()), rows(dims.k()), rows(dims.v()));
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
