//! Fourier and rotary positions: the conformance suite, and what is peculiar to them.

use longspan_kernels::{
    Algorithm, Dims, Error, FeatureMap, Fourier, FourierNormalizer, Kernel, KernelizedAttention, Output, Positions,
    Score, Scratch, State, Token, ViewMut, Wave,
};
use longspan_testing::compare::worst;
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::suite::{over_kernelized as over, over_mechanisms};
use longspan_testing::{
    Case, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, memory, rejection, state_gradients, streaming,
    threads,
};

fn with(wave: Wave, normalizer: FourierNormalizer, positions: Positions) -> KernelizedAttention {
    KernelizedAttention { score: Score::Fourier(Fourier { wave, normalizer, positions }), ..Default::default() }
}

longspan_testing::tests! { over;
    forward_is_the_definition:
        grid::fourier(51, 300, &LENGTHS, true) => accuracy::forward::<f32>,
        grid::fourier(52, 200, &LENGTHS, true) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: grid::fourier(53, 120, &SHORT_LENGTHS, true) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: grid::fourier(54, 200, &LENGTHS, true) => accuracy::gradient_in_f32;
    what_is_not_seen_does_not_matter:
        grid::fourier(57, 90, &LENGTHS, true) => isolation::unseen_keys_do_not_matter::<f32>,
        grid::fourier(58, 90, &LENGTHS, true) => isolation::rows_are_independent::<f32>,
        grid::fourier(59, 120, &LENGTHS, true) => isolation::padding_does_not_matter::<f32>;
    packed_is_looped: grid::fourier(60, 240, &LENGTHS, false) => isolation::packed_is_looped::<f32>;
    memory_and_threads_do_not_matter:
        grid::fourier(61, 90, &LENGTHS, true) => memory::poison_does_not_matter::<f32>,
        grid::fourier(62, 60, &LENGTHS, true) => memory::strides_do_not_matter::<f64>,
        grid::fourier(63, 40, &LENGTHS, true) => threads::threads_do_not_matter::<f32>,
        long() => threads::threads_do_not_matter::<f32>;
    pieces_make_the_whole:
        streams(64, 90) => streaming::pieces_make_the_whole::<f32>,
        streams(65, 90) => streaming::pieces_make_the_whole::<f64>,
        streams(66, 90) => streaming::states_are_values::<f32>,
        streams(67, 90) => streaming::lengths_end_the_sequence::<f32>,
        streams(68, 90) => streaming::ignored_keys_keep_their_place::<f32>;
    /// Counted positions too: the later keys turn by the count of the earlier ones.
    states_add_up:
        streams(72, 120) => streaming::states_add_up::<f32>,
        streams(73, 120) => streaming::states_add_up::<f64>;
    gradients_pass_through_states:
        streams(69, 60) => state_gradients::gradients_pass_through_states::<f64>,
        grid::as_streams(70, grid::fourier(70, 30, &SHORT_LENGTHS, false)) =>
            state_gradients::state_gradients_are_difference_quotients,
        streams(71, 60) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
}

longspan_testing::tests! { over_mechanisms;
    algorithms_agree:
        grid::fourier(55, 60, &LENGTHS, true) => accuracy::algorithms_agree::<f32>,
        grid::fourier(55, 60, &LENGTHS, true) => accuracy::algorithms_agree::<f64>;
}

fn streams(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    grid::as_streams(seed, grid::fourier(seed, count, &LENGTHS, false))
}

/// Sequences of several segments.
fn long() -> Vec<(KernelizedAttention, Case)> {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, queries: 3000, keys: 3000, head_dim: 8, value_dim: 5 };
    let mut cases = Vec::new();
    for causal in [true, false] {
        for positions in [Positions::Counted, Positions::Given { axes: 2 }] {
            let dominant = with(Wave::Each, FourierNormalizer::Dominant, positions);
            let attention = KernelizedAttention { algorithm: Algorithm::Chunked, ..dominant };
            cases.push((attention, Case::new(dims, causal)));
        }
    }
    cases
}

#[test]
fn a_sum_of_states_takes_angles_of_its_shape() {
    let attention = with(Wave::Each, FourierNormalizer::OnePlus, Positions::Counted);
    let state: State<f32> = attention.empty_state(&Dims::square(1, 2, 1, 4)).expect("a state without tokens");
    let error = attention.combine(&state, &state, &[&[0.1; 7]]).expect_err("seven angles for two heads of four");
    assert!(error.to_string().contains(": a: "), "{error}");
}

/// Numbers of a call of one sequence and head-independent sizes, with their outputs and gradients.
fn run(attention: &KernelizedAttention, case: &Case, inputs: &Inputs<f64>) -> (execute::Forward<f64>, Vec<Vec<f64>>) {
    let subject = Subject::kernelized(attention);
    let (forward, backward) = execute::both(&subject, case, inputs).expect("a call that makes sense");
    (forward, backward.gradients)
}

/// Positions that are given as they would be counted change nothing, also in a packed call, under padding, from a state.
#[test]
fn counted_positions_may_be_given() {
    let dims = Dims { batch: 2, heads: 4, kv_heads: 2, queries: 90, keys: 90, head_dim: 6, value_dim: 3 };
    for (wave, normalizer) in [(Wave::Each, FourierNormalizer::OnePlus), (Wave::Pairs, FourierNormalizer::Unrotated)] {
        let counted = with(wave, normalizer, Positions::Counted);
        let given = with(wave, normalizer, Positions::Given { axes: 1 });
        let bounds = vec![0, 20, 20, 90];
        for (batch, keys) in [
            (2, KeyMask::All),
            (2, KeyMask::Padding((0..180).map(|n| n % 5 == 2).collect())),
            (1, KeyMask::Packed { queries: bounds.clone(), keys: bounds.clone() }),
        ] {
            let packed = matches!(keys, KeyMask::Packed { .. });
            let case = Case { keys, offset: 3, ..Case::new(Dims { batch, ..dims }, true) };
            let inputs = execute::random(&Subject::kernelized(&counted), &case);
            let start = |token: usize| bounds.iter().copied().filter(|&b| packed && b <= token).max().unwrap_or(0);
            let places = |offset: usize| -> Vec<f64> {
                (0..batch).flat_map(|_| (0..90).map(move |n| (n - start(n) + offset) as f64)).collect()
            };
            let mut with_positions = inputs.clone();
            with_positions.parameters.extend([places(3), places(0)]);
            let (expected, expected_gradients) = run(&counted, &case, &inputs);
            let (got, gradients) = run(&given, &case, &with_positions);
            let out = worst(&[got.out], &[expected.out]);
            assert!(out < 1e-12, "out is off by {out} of the largest");
            let error = worst(&gradients[..expected_gradients.len()], &expected_gradients);
            assert!(error < 1e-11, "gradients are off by {error} of the largest");
            assert!(gradients[gradients.len() - 1].iter().any(|&x| x != 0.0), "positions have gradients");
        }
    }
}

/// Token by token with given positions is the whole.
#[test]
fn given_positions_step() {
    let attention = with(Wave::Each, FourierNormalizer::Dominant, Positions::Given { axes: 2 });
    let dims = Dims { batch: 2, heads: 2, kv_heads: 1, queries: 70, keys: 70, head_dim: 5, value_dim: 3 };
    let case = Case::new(dims, true);
    let subject = Subject::kernelized(&attention);
    let inputs = execute::random(&subject, &case);
    let expected = execute::forward(&subject, &case, &inputs).expect("a call that makes sense").out;
    let mut state = attention.empty_state(&dims).expect("sizes that make sense");
    let row = |x: &[f64], width: usize, token: usize| -> Vec<f64> {
        x.chunks(70 * width).flat_map(|head| head[token * width..][..width].to_vec()).collect()
    };
    let positions = inputs.parameters.len() - 2;
    for token in 0..70 {
        let places = [positions, positions + 1].map(|n| row(&inputs.parameters[n], 2, token));
        let mut parameters: Vec<&[f64]> = inputs.parameters[..positions].iter().map(Vec::as_slice).collect();
        parameters.extend(places.iter().map(Vec::as_slice));
        let (q, k, v) = (row(&inputs.q, 5, token), row(&inputs.k, 5, token), row(&inputs.v, 3, token));
        let mut out = vec![f64::NAN; 2 * 2 * 3];
        let token_in = Token { q: &q, k: &k, v: &v, parameters: &parameters };
        attention.step(&token_in, &mut state, &mut out).expect("a step that makes sense");
        let error = worst(&[out], &[row(&expected, 3, token)]);
        assert!(error < 1e-12, "token {token} is off by {error} of the largest");
    }
}

/// At position 10⁷ the angles of `f32` calls are those of f64: counted, from an offset and from a state.
#[test]
fn angles_are_exact_at_position_ten_million() {
    for (wave, normalizer) in [(Wave::Each, FourierNormalizer::OnePlus), (Wave::Pairs, FourierNormalizer::Unrotated)] {
        let attention = KernelizedAttention {
            algorithm: Algorithm::Chunked,
            decay: Some(vec![0.9]),
            ..with(wave, normalizer, Positions::Counted)
        };
        let subject = Subject::kernelized(&attention);
        let dims = Dims { batch: 1, heads: 1, kv_heads: 1, queries: 100, keys: 100, head_dim: 8, value_dim: 4 };
        let case = Case::new(dims, true);
        let inputs = execute::random(&subject, &case);
        // Distances alone matter, so the first hundred tokens tell what the last hundred of ten million must give.
        let expected = execute::reference(&subject, &case, &inputs).expect("a call that makes sense").out;
        let empty = attention.empty_state(&dims).expect("sizes that make sense");
        let mut numbers = empty.numbers().to_vec();
        // Two digits to base 2²⁰, behind the sums and two other marks.
        let low = empty.shape().parts[..2].iter().sum::<usize>() + 2;
        let count = low..low + 2;
        numbers[count.clone()].copy_from_slice(&[562_816.0, 9.0]);
        let far = State::from_numbers(empty.shape(), numbers).expect("numbers that fit");
        let single = inputs.cast::<f32>();
        let (forward, state) =
            execute::forward_state(&subject, &case, &single, Some(&far)).expect("a call that makes sense");
        assert_eq!(state.numbers()[count.clone()], [562_916.0, 9.0], "the count goes on");
        let mut stepped = far;
        let steps = execute::steps(&subject, &case, &single, 0..100, &mut stepped).expect("steps that make sense");
        let error = worst(&[forward.out, steps], &[expected.clone(), expected]);
        assert!(error < 5e-6, "off by {error} of the largest after ten million tokens");
        assert_eq!(stepped.numbers()[count], [562_916.0, 9.0], "the count goes on");
    }
}

/// With the literal normaliser at random initialisation more than a third of the rows have no positive denominator: they
/// are told, and give 0 with gradient 0 instead of nonsense.
#[test]
fn rows_with_negative_denominators_are_told() {
    for algorithm in [Algorithm::Naive, Algorithm::Chunked] {
        let literal = with(Wave::Each, FourierNormalizer::Literal, Positions::Counted);
        let attention = KernelizedAttention { feature_map: FeatureMap::Exp, algorithm, ..literal };
        let dims = Dims::square(2, 2, 100, 16);
        let case = Case::new(dims, true);
        let bare = Subject::new(attention.clone(), Subject::assume(&attention));
        let inputs = execute::random(&bare, &case);
        let expected = execute::reference(&bare, &case, &inputs).expect("the definition reports nothing");
        let negative: Vec<usize> = (0..400).filter(|&row| expected.denominators[row] < 0.0).collect();
        assert!(negative.len() > 100, "{} rows", negative.len());
        let (mut out, mut denominators) = (vec![f64::NAN; 400 * 16], vec![f64::NAN; 400]);
        let result = inputs.call(&case, None, |call| {
            let output = Output::training(ViewMut::contiguous(&mut out, dims.out()), &mut denominators);
            attention.forward(call, output, &mut Scratch::new())
        });
        let Err(Error::NegativeDenominators { operation, rows, batch, head, row }) = result else {
            panic!("{result:?}");
        };
        let first = negative[0];
        assert_eq!(
            (operation, rows, batch, head, row),
            ("fourier", negative.len(), first / 200, first / 100 % 2, first % 100)
        );
        for row in 0..400 {
            let negative = expected.denominators[row] < 0.0;
            assert_eq!(denominators[row] < 0.0, negative, "row {row}");
            assert_eq!(out[row * 16..][..16].iter().all(|&x| x == 0.0), negative, "row {row}");
        }
        let forward = execute::Forward { out, denominators };
        let gradients = execute::backward(&bare, &case, &inputs, &forward).expect("a call that makes sense").gradients;
        assert!(gradients.iter().flatten().all(|x| x.is_finite()));
        for &row in &negative {
            assert!(gradients[0][row * 16..][..16].iter().all(|&x| x == 0.0), "row {row}");
        }
    }
}

#[test]
fn wrong_calls_are_refused() {
    let counted = |wave, normalizer| Subject::kernelized(&with(wave, normalizer, Positions::Counted));
    rejection::assert_wrong_calls(&counted(Wave::Each, FourierNormalizer::Dominant), [4, 2]);
    rejection::assert_wrong_calls(&counted(Wave::Pairs, FourierNormalizer::Unrotated), [4, 2]);
    let odd = Case::new(rejection::dims([3, 2]), true);
    rejection::assert_refused(&counted(Wave::Pairs, FourierNormalizer::Unrotated), &odd, "head_dim");
    rejection::assert_refused(&counted(Wave::Pairs, FourierNormalizer::OnePlus), &odd, "pairs");
    rejection::assert_refused(&counted(Wave::Pairs, FourierNormalizer::Dominant), &odd, "pairs");
}

/// Positions must be finite where a query or a key is, and may be anything for ignored keys.
#[test]
fn positions_that_are_not_finite_are_refused() {
    let attention = with(Wave::Each, FourierNormalizer::OnePlus, Positions::Given { axes: 2 });
    let dims = Dims { batch: 2, heads: 1, kv_heads: 1, queries: 3, keys: 4, head_dim: 4, value_dim: 2 };
    let subject = Subject::kernelized(&attention);
    let padding = KeyMask::Padding([vec![false; 4], vec![false, true, false, true]].concat());
    let case = Case { keys: padding, ..Case::new(dims, false) };
    let good = execute::random(&subject, &case);
    let (_, expected) = run(&attention, &case, &good);
    for (tensor, place, name) in
        [(2, 5, Some("query_positions")), (3, 0, Some("key_positions")), (3, 10, None), (3, 15, None)]
    {
        for wrong in [f64::NAN, f64::INFINITY] {
            let mut inputs = good.clone();
            inputs.parameters[tensor][place] = wrong;
            let checked = inputs.call(&case, None, |call| attention.check(call));
            match name {
                Some(name) => {
                    let error = checked.expect_err("a position that is not finite").to_string();
                    assert!(error.contains(name) && error.contains("finite"), "{error}");
                }
                None => {
                    checked.expect("ignored keys have no position");
                    assert_eq!(run(&attention, &case, &inputs).1, expected, "an ignored key's position");
                }
            }
        }
    }
}
