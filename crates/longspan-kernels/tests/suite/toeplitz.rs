//! The conformance suite over Toeplitz relative positions, and what is hard for them alone.

use longspan_kernels::{Algorithm, Beyond, Bias, Dims, FeatureMap, Mechanism, Toeplitz};
use longspan_testing::compare::close_gradients;
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::random::Random;
use longspan_testing::suite::{Check, EXTREME_LENGTH, assert_all, assert_each, over_extreme_keys, over_mechanisms};
use longspan_testing::{
    Assumptions, Case, Failure, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, rejection,
    state_gradients, streaming, threads,
};

/// What the checks may assume.
fn subject(toeplitz: &Toeplitz) -> Subject {
    let identity = toeplitz.feature_map == FeatureMap::Identity;
    let assumptions = Assumptions {
        signed_features: identity,
        content: true,
        positions: true,
        positive_weights: !identity
            && toeplitz.feature_map != FeatureMap::Relu
            && !matches!(toeplitz.feature_map, FeatureMap::Dpfp { .. }),
        turned: !toeplitz.feature_map.is_elementwise(),
        ..Assumptions::default()
    };
    Subject::new(toeplitz.clone(), assumptions)
}

/// The algorithms that can be asked for.
fn algorithms() -> Vec<Algorithm> {
    let forced = Toeplitz::new(Bias::clipped(1)).algorithms();
    [Algorithm::Auto].iter().chain(forced).copied().collect()
}

/// A bias that has an entry for every distance of a case, or extends to it.
fn bias(random: &mut Random, case: &Case) -> Bias {
    let (queries, keys) = (case.dims.queries as isize, case.dims.keys as isize);
    match random.below(7) {
        // Exactly the distances of the call: what `[heads, Lq + Lk − 1]` says.
        0 => Bias::Table {
            first: 1 - queries - case.offset,
            count: (queries + keys - 1).max(1) as usize,
            beyond: Beyond::Error,
        },
        1 => Bias::Table { first: -300, count: 600, beyond: Beyond::Error },
        2 => Bias::symmetric((queries + keys) as usize + case.offset.unsigned_abs() + 1),
        3 => Bias::clipped([0, 1, 2, 3, 6, 20, 70, 140][random.below(8)]),
        4 => Bias::Table { first: [-9, 2, -40][random.below(3)], count: 1 + random.below(5), beyond: Beyond::Extend },
        5 => Bias::Buckets { buckets: 8, max_distance: 20, bidirectional: true },
        _ => Bias::Buckets { buckets: 7, max_distance: 50, bidirectional: false },
    }
}

/// An image whose pixels are the tokens of a case, and the case cut to it.
fn image(random: &mut Random, case: Case) -> (Bias, Case) {
    let (height, width) = [(1, 1), (1, 70), (70, 1), (2, 3), (5, 7), (9, 15), (13, 6)][random.below(7)];
    let offset = if random.chance(0.3) { 1.min(height * width - 1) } else { 0 };
    let queries = height * width - offset - random.below(2).min(height * width - offset);
    let dims = Dims { queries, keys: height * width, ..case.dims };
    let keys = match case.keys {
        KeyMask::Lengths(_) => KeyMask::Lengths((0..dims.batch).map(|_| random.below(dims.keys + 1)).collect()),
        KeyMask::Padding(_) => KeyMask::Padding((0..dims.batch * dims.keys).map(|_| random.chance(0.4)).collect()),
        _ => KeyMask::All,
    };
    (Bias::Grid { height, width }, Case { dims, offset: offset as isize, keys, ..case })
}

/// A map of whole rows for every third mechanism, over rows that it leaves a feature of; that of `other` for the rest.
fn feature_map(n: usize, other: FeatureMap, case: Case) -> (FeatureMap, Case) {
    const MAPS: [&str; 9] = [
        "nprf:7",
        "hedgehog",
        "prf:7",
        "taylor2",
        "hedgehog:exp",
        "prf:40:seed=2",
        "dpfp:2",
        "nprf:16:seed=3",
        "hedgehog:3",
    ];
    let map = MAPS[n / 3 % MAPS.len()].parse().expect("a name of this list");
    let head_dim = case.dims.head_dim.clamp(4, 16);
    if n % 3 == 1 { (map, Case { dims: Dims { head_dim, ..case.dims }, ..case }) } else { (other, case) }
}

/// Mechanisms with a case each, one in four over an image.
fn cases(seed: u64, count: usize, lengths: &[usize]) -> Vec<(Toeplitz, Case)> {
    let mut random = Random::new(seed ^ 0x70E);
    let algorithms = algorithms();
    grid::kernelized(seed, count, lengths)
        .into_iter()
        .enumerate()
        .map(|(n, (attention, case))| {
            let (bias, case) = if n % 4 == 0 && lengths.len() == LENGTHS.len() {
                image(&mut random, case)
            } else {
                (bias(&mut random, &case), case)
            };
            let (feature_map, case) = feature_map(n, attention.feature_map, case);
            let algorithm = algorithms[n % algorithms.len()];
            let toeplitz = Toeplitz { feature_map, bias, normalize: attention.normalize, algorithm };
            let positive = feature_map == FeatureMap::Identity && attention.normalize;
            (toeplitz, Case { positive, ..case })
        })
        .collect()
}

/// Mechanisms with a causal self-attention case each.
fn streams(seed: u64, count: usize) -> Vec<(Toeplitz, Case)> {
    let mut random = Random::new(seed ^ 0x57E);
    grid::streaming(seed, count)
        .into_iter()
        .enumerate()
        .map(|(n, (attention, case))| {
            let length = case.dims.queries;
            let bias = match random.below(6) {
                0 => Bias::Table { first: 1 - length as isize, count: length, beyond: Beyond::Error },
                1 => Bias::Table { first: -5, count: 2, beyond: Beyond::Extend },
                2 => Bias::Buckets { buckets: 7, max_distance: 50, bidirectional: false },
                3 => Bias::Grid { height: length.div_ceil(9), width: 9 },
                _ => Bias::clipped([0, 1, 2, 7, 64, 300][random.below(6)]),
            };
            let (feature_map, case) = feature_map(n, attention.feature_map, case);
            let toeplitz = Toeplitz { feature_map, bias, normalize: attention.normalize, algorithm: Algorithm::Auto };
            let positive = feature_map == FeatureMap::Identity && attention.normalize;
            (toeplitz, Case { positive, ..case })
        })
        .collect()
}

fn over(cases: &[(Toeplitz, Case)], check: Check) {
    let subjects: Vec<Subject> = cases.iter().map(|(toeplitz, _)| subject(toeplitz)).collect();
    assert_all(check, subjects.iter().zip(cases.iter().map(|(_, case)| case)));
}

longspan_testing::shared_tests!(over, cases, streams);

longspan_testing::tests! { over;
    forward_is_the_definition_in_f32: cases(11, 400, &LENGTHS) => accuracy::forward::<f32>;
    forward_is_the_definition_in_f64: cases(12, 400, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: cases(13, 200, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_are_those_of_the_definition_on_images: cases(113, 80, &LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: cases(14, 400, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped:
        sequences(23) => isolation::packed_is_looped::<f32>,
        sequences(24) => isolation::packed_is_looped::<f64>;
    threads_do_not_matter:
        reaching(39, 50) => threads::threads_do_not_matter::<f32>,
        reaching(40, 25) => threads::threads_do_not_matter::<f64>;
    threads_do_not_matter_for_long_sequences: by_all_algorithms() => threads::threads_do_not_matter::<f32>;
    /// Nothing comes out, but tokens are counted and their keys kept.
    tokens_without_values_enter_the_state: without_values(47, 60) => streaming::pieces_make_the_whole::<f32>;
    state_gradients_are_difference_quotients:
        linked(45, 250) => state_gradients::state_gradients_are_difference_quotients;
    gradients_of_long_sequences_pass_through_states:
        long_and_whole() => state_gradients::gradients_pass_through_states::<f32>,
        long_and_whole() => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
}

fn by(toeplitz: &Toeplitz, algorithm: Algorithm) -> Subject {
    subject(&Toeplitz { algorithm, ..toeplitz.clone() })
}

/// Every algorithm gives the outputs and gradients of every other.
#[test]
fn algorithms_agree() {
    over_mechanisms(&[cases(15, 80, &LENGTHS), long()].concat(), |toeplitz, case| {
        let subjects: Vec<Subject> = algorithms().into_iter().map(|algorithm| by(toeplitz, algorithm)).collect();
        accuracy::agree::<f32>(&by(toeplitz, Algorithm::Tiled), &subjects, case)
    });
}

/// In f64 rows, keys and distances of few pairs lose digits in transforms, which have none to spare, and go by tiles.
#[test]
fn transforms_keep_their_digits_in_f64() {
    over_mechanisms(&[long(), cases(16, 120, &LENGTHS)].concat(), |toeplitz, case| {
        let (tiled, fft) = (by(toeplitz, Algorithm::Tiled), by(toeplitz, Algorithm::Fft));
        let inputs = execute::random(&tiled, case);
        let (forward, expected) = execute::both::<f64>(&tiled, case, &inputs)?;
        let scale = accuracy::backward_scale(&tiled, case, &inputs)?;
        let got = execute::backward(&fft, case, &inputs, &forward)?;
        close_gradients("", &got, &expected, &scale, accuracy::gradient_terms(case))
    });
}

/// Without images, which are not packed.
fn sequences(seed: u64) -> Vec<(Toeplitz, Case)> {
    let mut cases = cases(seed, 300, &LENGTHS);
    cases.retain(|(toeplitz, _)| !matches!(toeplitz.bias, Bias::Grid { .. }));
    cases
}

/// A final state keeps all keys, which a table of exactly the distances between queries and keys may not reach.
fn reaching(seed: u64, count: usize) -> Vec<(Toeplitz, Case)> {
    let mut cases = cases(seed, count, &LENGTHS);
    cases.retain(|(toeplitz, case)| match toeplitz.bias {
        Bias::Table { first, beyond: Beyond::Error, .. } => first < 1 - case.dims.keys as isize,
        _ => true,
    });
    cases
}

fn without_values(seed: u64, count: usize) -> Vec<(Toeplitz, Case)> {
    let mut cases = streams(seed, count);
    cases.iter_mut().for_each(|(_, case)| case.dims.value_dim = 0);
    cases
}

#[test]
fn wrong_calls_are_refused() {
    for bias in [Bias::clipped(2), Bias::symmetric(9), Bias::Grid { height: 2, width: 3 }] {
        rejection::assert_wrong_calls(&subject(&Toeplitz::new(bias)), [3, 2]);
    }
}

#[test]
fn options_without_meaning_are_refused() {
    let dims = Dims { queries: 5, keys: 6, ..Dims::square(1, 2, 0, 3) };
    let (causal, bidirectional) = (Case::new(dims, true), Case::new(dims, false));
    let table = |first, count| Bias::Table { first, count, beyond: Beyond::Error };
    let buckets = |buckets, max_distance, bidirectional| Bias::Buckets { buckets, max_distance, bidirectional };
    for (bias, case) in [
        (table(-4, 0), &causal),
        (table(-3, 9), &causal),
        (table(-4, 4), &causal),
        (table(-4, 9), &bidirectional),
        (Bias::symmetric(0), &causal),
        (Bias::symmetric(4), &causal),
        (buckets(1, 8, false), &causal),
        (buckets(3, 8, true), &causal),
        (buckets(8, 4, false), &causal),
        (buckets(8, usize::MAX, false), &causal),
        (Bias::Grid { height: 0, width: 3 }, &causal),
        (Bias::Grid { height: 1, width: 5 }, &causal),
    ] {
        rejection::assert_refused(&subject(&Toeplitz::new(bias)), case, "bias");
    }
}

/// Outputs in both types, and gradients in `f32`, on given numbers.
fn is_accurate(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<(), Failure> {
    accuracy::forward_of::<f32>(subject, case, inputs)?;
    accuracy::forward_of::<f64>(subject, case, inputs)?;
    accuracy::gradient_in_f32_of(subject, case, inputs)
}

/// Over a range of e⁵⁷ and of its fourth power: the first rows see none of the large weights that the last do.
#[test]
fn a_bias_that_grows_with_distance_keeps_its_digits() {
    let sizes = [(500, 57.0), (131, 228.0)].into_iter().flat_map(|size| [(size, true), (size, false)]);
    assert_each(
        algorithms().into_iter().flat_map(|algorithm| sizes.clone().map(move |size| (algorithm, size))),
        |(algorithm, ((_, range), causal))| format!("{algorithm}, range {range}, causal {causal}"),
        |&(algorithm, ((length, range), causal))| {
            let subject = subject(&Toeplitz { algorithm, ..Toeplitz::new(Bias::symmetric(length)) });
            let case = Case::new(Dims::square(1, 2, length, 8), causal);
            let mut inputs = execute::random(&subject, &case);
            for (n, b) in inputs.parameters[0].iter_mut().enumerate() {
                let distance = (n % (2 * length - 1)).abs_diff(length - 1);
                *b = f64::from((distance as f64 * range / length as f64) as f32);
            }
            is_accurate(&subject, &case, &inputs)
        },
    );
}

/// Exponentials whose keys lie far beyond what a float can hold the exponential of.
#[test]
fn exponential_features_do_not_overflow() {
    let exp = |bias| Toeplitz { feature_map: FeatureMap::Exp, ..Toeplitz::new(bias) };
    let biases = [exp(Bias::symmetric(EXTREME_LENGTH)), exp(Bias::clipped(7))];
    let subjects: Vec<Subject> = algorithms()
        .into_iter()
        .flat_map(|algorithm| biases.each_ref().map(|toeplitz| by(toeplitz, algorithm)))
        .collect();
    over_extreme_keys(&subjects, [4, 3], |subject, case, inputs| {
        is_accurate(subject, case, inputs)?;
        if case.causal {
            streaming::pieces_make_the_whole_of::<f32>(subject, case, inputs)?;
            state_gradients::gradients_pass_through_states_of::<f32>(subject, case, inputs)?;
        }
        Ok(())
    });
}

/// Cases whose bias reaches back over a state of earlier tokens.
fn linked(seed: u64, count: usize) -> Vec<(Toeplitz, Case)> {
    let mut random = Random::new(seed ^ 0x71E);
    let reaching = |random: &mut Random| match random.below(6) {
        0 => Bias::symmetric(1000),
        1 => Bias::Grid { height: 30, width: 31 },
        2 => Bias::Table { first: [-9, 2, -40][random.below(3)], count: 1 + random.below(5), beyond: Beyond::Extend },
        3 => Bias::Buckets { buckets: 7, max_distance: 50, bidirectional: false },
        _ => Bias::clipped([0, 1, 2, 3, 6, 20, 70, 140][random.below(8)]),
    };
    // Where all features of a row's keys are 0, or none meets one of the query's, its output leaps: rectified ones, and
    // products of such, have no slope there.
    let leaps = |toeplitz: &Toeplitz| {
        toeplitz.normalize && matches!(toeplitz.feature_map, FeatureMap::Relu | FeatureMap::Dpfp { .. })
    };
    let cases = cases(seed, count, &SHORT_LENGTHS).into_iter().filter(|(toeplitz, _)| !leaps(toeplitz));
    cases.map(|(toeplitz, case)| (Toeplitz { bias: reaching(&mut random), ..toeplitz }, case)).collect()
}

/// Long sequences of which a call takes all keys.
fn long_and_whole() -> Vec<(Toeplitz, Case)> {
    let mut cases = long();
    cases.retain(|(_, case)| case.causal && case.offset == 0 && !matches!(case.keys, KeyMask::Packed { .. }));
    cases.iter_mut().for_each(|(_, case)| case.keys = KeyMask::All);
    cases
}

/// Cases of many strips and segments: short ones say nothing of how these are joined.
fn long() -> Vec<(Toeplitz, Case)> {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, queries: 1100, keys: 1100, head_dim: 4, value_dim: 3 };
    let mut cases = Vec::new();
    for bias in [
        Bias::symmetric(1500),
        Bias::clipped(5),
        Bias::Buckets { buckets: 12, max_distance: 150, bidirectional: true },
        Bias::Table { first: -70, count: 3, beyond: Beyond::Extend },
        Bias::Grid { height: 44, width: 25 },
    ] {
        for causal in [true, false] {
            let case = Case { seed: 5, ..Case::new(dims, causal) };
            let padding = KeyMask::Padding((0..1100).map(|j| j % 7 == 3 || (300..470).contains(&j)).collect());
            let bounds = vec![0, 10, 10, 690, 1100];
            let packed = KeyMask::Packed { queries: bounds.clone(), keys: bounds };
            let exp = Toeplitz { feature_map: FeatureMap::Exp, ..Toeplitz::new(bias) };
            cases.push((Toeplitz::new(bias), Case { keys: padding, ..case.clone() }));
            if !matches!(bias, Bias::Grid { .. }) {
                let ragged = Case { dims: Dims { queries: 700, ..dims }, offset: 400, ..case.clone() };
                cases.push((Toeplitz::new(bias), ragged));
                cases.push((Toeplitz::new(bias), Case { keys: packed, ..case.clone() }));
            }
            cases.push((exp, case));
        }
    }
    cases
}

/// Some of the long sequences by every algorithm.
fn by_all_algorithms() -> Vec<(Toeplitz, Case)> {
    let each = |(toeplitz, case): (Toeplitz, Case)| {
        algorithms().into_iter().map(move |algorithm| (Toeplitz { algorithm, ..toeplitz.clone() }, case.clone()))
    };
    long().into_iter().step_by(5).flat_map(each).collect()
}

/// Sums of ignored keys alone stay below those of keys that are all far below 0.
#[test]
fn padding_beside_small_exponentials_does_not_overflow() {
    let exp = |bias| Toeplitz { feature_map: FeatureMap::Exp, ..Toeplitz::new(bias) };
    let mut cases = Vec::new();
    for bias in [Bias::clipped(2), Bias::clipped(70), Bias::Table { first: -70, count: 3, beyond: Beyond::Extend }] {
        for ignored in [64, 130, 200] {
            let keys = KeyMask::Padding((0..400).map(|j| j < ignored).collect());
            cases.push((exp(bias), Case { keys, ..Case::new(Dims::square(1, 1, 400, 2), true) }));
        }
    }
    over_mechanisms(&cases, |toeplitz, case| {
        for subject in algorithms().into_iter().map(|algorithm| by(toeplitz, algorithm)) {
            let mut inputs = execute::random(&subject, case);
            inputs.raise_keys(&case.dims, |_| -100.0);
            is_accurate(&subject, case, &inputs)?;
        }
        Ok(())
    });
}
