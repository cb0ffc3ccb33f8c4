//! The conformance suite over softmax attention, and what is peculiar to it: scores of any size, and a cache that ends.

use longspan_kernels::{Dims, Kernel, SoftmaxAttention, Token};
use longspan_testing::compare::ensure;
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::suite::{Check, Level, assert_all};
use longspan_testing::{
    Assumptions, Case, Failure, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, rejection,
    state_gradients, streaming, threads,
};

/// Room for every sequence of the grid.
const CAPACITY: usize = 210;

fn subject(scale: Option<f64>) -> Subject {
    let assumptions = Assumptions { content: true, positive_weights: true, ..Default::default() };
    Subject::new(SoftmaxAttention { scale, capacity: CAPACITY, ..Default::default() }, assumptions)
}

/// Runs a check over cases, with the usual scale and with others by turns: not larger ones, since `e^s` turns the rounding of a score
/// of 20, which without fused products is that of 33 sums, into a relative error of the weight that no tolerance here knows of.
fn over(cases: &[Case], check: Check) {
    let subjects = [None, Some(0.4), Some(-0.3), Some(0.0)].map(subject);
    assert_all(check, cases.iter().enumerate().map(|(n, case)| (&subjects[n % subjects.len()], case)));
}

longspan_testing::shared_tests!(over, positive, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        signed(11, 400, &LENGTHS) => accuracy::forward::<f32>,
        signed(12, 400, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: signed(13, 200, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64:
        positive(14, 300, &LENGTHS) => accuracy::gradient_in_f32,
        signed(15, 300, &LENGTHS) => gradients_in_f32_are_near;
    packed_is_looped:
        positive(23, 300, &LENGTHS) => isolation::packed_is_looped::<f32>,
        positive(24, 200, &LENGTHS) => isolation::packed_is_looped::<f64>;
    order_does_not_matter:
        unordered(25) => isolation::order_does_not_matter_without_positions::<f32>,
        unordered(25) => isolation::order_does_not_matter_without_positions::<f64>;
    threads_do_not_matter:
        signed(31, 60, &LENGTHS) => threads::threads_do_not_matter::<f32>,
        signed(32, 30, &LENGTHS) => threads::threads_do_not_matter::<f64>;
    keys_stay_ignored_across_pieces:
        streams(41, 100) => streaming::ignored_keys_keep_their_place::<f32>,
        streams(42, 100) => streaming::ignored_keys_keep_their_place::<f64>;
    threads_do_not_matter_to_state_gradients:
        streams(45, 30) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
}

/// Threads that take whole heads, and heads in parts, which a NaN, ignored keys and a window reach across.
#[test]
fn threads_do_not_matter_for_long_sequences() {
    for window in [None, Some(700)] {
        let assumptions = Assumptions { content: true, positive_weights: true, ..Default::default() };
        let softmax = SoftmaxAttention { capacity: 2400, window, ..Default::default() };
        let subject = Subject::new(softmax, assumptions);
        for ((heads, kv_heads), queries, causal) in [
            ((3, 1), 1100, true),
            ((3, 3), 1100, false),
            ((5, 5), 1100, true),
            ((2, 1), 70, true),
            ((2, 1), 1100, true),
        ] {
            let dims = Dims { batch: 1, heads, kv_heads, queries, keys: 1100, head_dim: 4, value_dim: 3 };
            let offset = if causal { 1100 - queries as isize } else { 0 };
            let case = Case { offset, ..Case::new(dims, causal) };
            let ignored = (0..1100).map(|key| key % 7 == 3 || (500..650).contains(&key)).collect();
            let padded = Case { keys: KeyMask::Padding(ignored), ..case.clone() };
            for case in [&case, &padded] {
                let mut inputs = execute::random(&subject, case).cast::<f32>();
                threads::threads_do_not_matter_of(&subject, case, &inputs).expect("the same bits");
                inputs.overwrite_key(&dims, 0, 700, f32::NAN, f32::INFINITY);
                threads::threads_do_not_matter_of(&subject, case, &inputs).expect("the same bits");
            }
            if causal && queries == 1100 {
                let same = state_gradients::threads_do_not_matter_to_state_gradients::<f32>(&subject, &case);
                same.expect("the same bits");
            }
        }
    }
}

/// Calls over signed numbers.
pub fn signed(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    grid::kernelized(seed, count, lengths).into_iter().map(|(_, case)| Case { positive: false, ..case }).collect()
}

/// Calls over positive queries and keys: the gradients of those are then sums whose terms keep one sign when those of the
/// values do, and the suite can tell the scale of their rounding errors.
pub fn positive(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    grid::kernelized(seed, count, lengths).into_iter().map(|(_, case)| Case { positive: true, ..case }).collect()
}

pub fn streams(seed: u64, count: usize) -> Vec<Case> {
    grid::streaming(seed, count).into_iter().map(|(_, case)| Case { positive: true, ..case }).collect()
}

fn unordered(seed: u64) -> Vec<Case> {
    let unordered = |case| Case { causal: false, keys: KeyMask::All, ..case };
    positive(seed, 60, &LENGTHS).into_iter().map(unordered).collect()
}

/// Relative to the largest number of each gradient.
fn gradients_in_f32_are_near(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(subject, case);
    let (_, expected) = execute::both::<f64>(subject, case, &inputs)?;
    let single = inputs.cast::<f32>();
    let (_, got) = execute::both(subject, case, &single)?;
    for ((name, got), expected) in got.named().zip(&expected.gradients) {
        let largest = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
        let near = got.iter().zip(expected).all(|(g, e)| (f64::from(*g) - e).abs() <= 2e-5 * largest);
        ensure(near, || format!("{name} is off by more than 2e-5 of {largest:e}"))?;
    }
    Ok(())
}

#[test]
fn wrong_calls_are_refused() {
    rejection::assert_wrong_calls(&subject(None), [3, 2]);
    for scale in [f64::NAN, f64::INFINITY] {
        rejection::assert_refused(&subject(Some(scale)), &Case::new(rejection::dims([3, 2]), true), "scale");
    }
}

/// Scores far beyond what a float can hold the exponential of.
#[test]
fn large_scores_do_not_overflow() {
    let dims = Dims::square(1, 2, 150, 4);
    let levels: [(&str, Level); 4] = [
        ("all at 1,000", |_| 1e3),
        ("rising", |j| j as f64 * 3.0),
        ("falling", |j| -(j as f64) * 3.0),
        ("at 500 for key 70", |j| if j == 70 { 500.0 } else { 0.0 }),
    ];
    for (name, level) in levels {
        for causal in [true, false] {
            let case = Case { seed: 7, positive: true, ..Case::new(dims, causal) };
            let subject = subject(Some(1.0));
            let mut inputs: Inputs<f64> = execute::random(&subject, &case);
            // Powers of two make the scores exact in both types: what is left are the roundings of the softmax.
            inputs.q.iter_mut().for_each(|q| *q = if *q > 0.7 { 1.0 } else { 0.5 });
            for (n, k) in inputs.k.iter_mut().enumerate() {
                *k = (*k * 8.0).round() / 8.0 + level(n / dims.head_dim % dims.keys);
            }
            accuracy::forward_of::<f32>(&subject, &case, &inputs)
                .unwrap_or_else(|failure| panic!("keys {name}, causal {causal}: {failure}"));
            let (_, back) = execute::both::<f32>(&subject, &case, &inputs.cast()).expect("a call that makes sense");
            assert!(back.gradients.iter().flatten().all(|x| x.is_finite()), "keys {name}, causal {causal}");
        }
    }
}

/// A full cache is an error that says what helps, and nothing is written.
#[test]
fn a_full_cache_is_refused() {
    let attention = SoftmaxAttention { capacity: 3, ..Default::default() };
    let dims = Dims::square(1, 1, 1, 2);
    let mut state = attention.empty_state(&dims).expect("a small state");
    let token = Token { q: &[1.0f32, 0.0], k: &[0.5, 0.5], v: &[2.0, 3.0], parameters: &[] };
    let mut out = [0.0; 2];
    for _ in 0..3 {
        attention.step(&token, &mut state, &mut out).expect("there is room");
        assert_eq!(out, [2.0, 3.0]);
    }
    let (before, mut after) = (state.clone(), [7.0; 2]);
    let error = attention.step(&token, &mut state, &mut after).expect_err("a fourth token in a cache of three");
    assert!(error.to_string().contains("at most 3") && error.to_string().contains("larger capacity"), "{error}");
    assert_eq!((state, after), (before.clone(), [7.0; 2]));
    let error = attention.combine(&before, &before, &[]).expect_err("six tokens in a cache of three");
    assert!(error.to_string().contains("larger capacity"), "{error}");

    let case = Case::new(Dims::square(1, 1, 4, 2), true);
    let subject = Subject::new(attention, Assumptions::default());
    let inputs = execute::random(&subject, &case);
    let error = execute::forward_state(&subject, &case, &inputs, None).expect_err("four tokens in a cache of three");
    assert!(error.to_string().contains("final_state") && error.to_string().contains("larger capacity"), "{error}");
    execute::forward(&subject, &case, &inputs).expect("without a state there is no cache");
}
