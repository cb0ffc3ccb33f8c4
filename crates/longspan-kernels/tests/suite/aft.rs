//! The conformance suite over attention-free transformers, and the numerics that they are known to fail at.

use std::sync::Arc;

use longspan_kernels::aft::Variant;
use longspan_kernels::{Aft, Call, Dims, Kernel, Mask, Mechanism, Output, Scratch, Token, ViewMut};
use longspan_testing::execute::Backward;
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::subject::{Assumptions, ParameterScale};
use longspan_testing::suite::{Check, Level, assert_all, assert_each, over_extreme_keys};
use longspan_testing::{
    Case, Failure, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, rejection, state_gradients, streaming,
    threads,
};

/// `γ·(w − mean)/std + β`: what the gradient of the kernel becomes is at most this times the sum of its magnitudes, which
/// is the scale of the gradient of β.
fn normalized_kernel_scale(case: &Case, inputs: &Inputs<f64>, scale: &mut Backward<f64>) {
    let heads = case.dims.heads;
    let taps = inputs.parameters[0].len() / heads.max(1);
    for head in 0..heads {
        let w = &inputs.parameters[0][head * taps..][..taps];
        let mean = w.iter().sum::<f64>() / taps as f64;
        let deviation = (w.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / taps as f64).sqrt();
        let unit = |x: f64| if deviation == 0.0 { 0.0 } else { ((x - mean) / deviation).abs() };
        let largest = w.iter().map(|&x| unit(x)).fold(0.0, f64::max);
        let sum = scale.gradients[5][head];
        scale.gradients[4][head] = sum * largest;
        for (&x, to) in w.iter().zip(&mut scale.gradients[3][head * taps..][..taps]) {
            let slope = if deviation == 0.0 { 0.0 } else { inputs.parameters[1][head].abs() / deviation };
            *to = slope * sum * (1.0 + (1.0 + unit(x) * largest) / taps as f64);
        }
    }
}

/// `w = u·zᵀ`: the gradients of the factors are sums of magnitudes of those of the table.
fn factors_scale(rank: usize, gate: bool, case: &Case, inputs: &Inputs<f64>, scale: &mut Backward<f64>) {
    let [u, z] = [0, 1].map(|n| inputs.parameters[n].chunks_exact(rank).collect::<Vec<_>>());
    let length = u.len();
    let pair = |n: usize| (0..rank).map(|r| u[n / length][r] * z[n % length][r]).sum::<f64>();
    let dense = Inputs { parameters: vec![(0..length * length).map(pair).collect()], ..inputs.clone() };
    let full = subject(Aft { variant: Variant::Full { length, rank: None }, gate });
    let mut forward = execute::forward(&full, case, &dense).expect("the table of factors that are taken");
    forward.out.iter_mut().for_each(|out| *out = -*out);
    let backward = execute::backward(&full, case, &dense, &forward).expect("the table of factors that are taken");
    let table = &backward.gradients[3];
    let (d_u, d_z) = scale.gradients[3..].split_at_mut(1);
    d_u[0].fill(0.0);
    d_z[0].fill(0.0);
    for (n, d) in table.iter().enumerate() {
        for r in 0..rank {
            d_u[0][n / length * rank + r] += d.abs() * z[n % length][r].abs();
            d_z[0][n % length * rank + r] += d.abs() * u[n / length][r].abs();
        }
    }
}

fn parameter_scale(aft: Aft) -> Option<ParameterScale> {
    match aft.variant {
        Variant::Conv { normalized: true, .. } | Variant::Conv2d { normalized: true, .. } => {
            Some(Arc::new(normalized_kernel_scale))
        }
        Variant::Full { rank: Some(rank), .. } => {
            Some(Arc::new(move |case, inputs, scale| factors_scale(rank, aft.gate, case, inputs, scale)))
        }
        _ => None,
    }
}

fn subject(aft: Aft) -> Subject {
    let assumptions = Assumptions {
        content: true,
        positions: aft.variant != Variant::Simple,
        positive_weights: true,
        ..Default::default()
    };
    let mut subject = Subject::new(aft, assumptions);
    subject.parameter_scale = parameter_scale(aft);
    subject
}

/// A variant for every case: windows around nothing, a few keys, and more than there are.
fn with_variants(cases: Vec<Case>) -> Vec<(Subject, Case)> {
    let sizes = [1, 2, 3, 8, 20, 33];
    cases
        .into_iter()
        .enumerate()
        .map(|(n, case)| {
            let longest = case.dims.queries.max(case.dims.keys);
            let size = if n % 7 == 6 { longest + 2 } else { sizes[n / 4 % sizes.len()] };
            // A table by position has no row for a query before the first key that sees something.
            let by_position = case.causal || case.offset >= 0;
            let length = by_position.then_some(longest + case.offset.unsigned_abs() + 1).filter(|_| n % 3 > 0);
            let packed = matches!(case.keys, KeyMask::Packed { .. });
            // A table of all pairs has a place for every query and key.
            let places = longest + case.offset.unsigned_abs() + 1 + n % 3;
            let rank = [None, Some(1), Some(3), Some(17)][n / 5 % 4];
            let variant = match n % 5 {
                0 => Variant::Simple,
                4 if by_position => Variant::Full { length: places, rank },
                1 if by_position || !packed => {
                    let length = if packed { Some(longest + case.offset.unsigned_abs() + 1) } else { length };
                    Variant::Local { window: size, length }
                }
                _ => Variant::Conv { taps: size, normalized: n / 5 % 2 == 0 },
            };
            (subject(Aft { variant, gate: n % 6 > 0 }), case)
        })
        .collect()
}

/// Images of many shapes, bidirectional, with and without padding: taps around one place, wider or higher than the image.
fn images(seed: u64, count: usize) -> Vec<(Subject, Case)> {
    let sides = [[1, 1], [1, 9], [7, 1], [5, 6], [8, 16], [3, 64], [2, 70], [4, 33], [13, 5]];
    let taps = [[1, 1], [3, 3], [2, 4], [5, 1], [1, 7], [9, 9], [3, 66], [4, 2]];
    grid::channels(seed, count, &[1])
        .into_iter()
        .enumerate()
        .map(|(n, case)| {
            let image = sides[n % sides.len()];
            let length = image[0] * image[1];
            let dims = Dims { queries: length, keys: length, ..case.dims };
            let ignored = (0..dims.batch * length).map(|place| (place * 7 + n) % 11 < n % 4).collect();
            let keys = if n % 3 == 0 { KeyMask::Padding(ignored) } else { KeyMask::All };
            let variant = Variant::Conv2d { image, taps: taps[n / 2 % taps.len()], normalized: n % 4 == 1 };
            let case = Case { dims, causal: false, offset: 0, keys, ..case };
            (subject(Aft { variant, gate: n % 6 > 0 }), case)
        })
        .collect()
}

fn drawn(seed: u64, count: usize, lengths: &[usize]) -> Vec<(Subject, Case)> {
    let mut cases = with_variants(grid::channels(seed, count, lengths));
    cases.extend(images(seed ^ 0x2D, count / 5));
    cases
}

/// Causal self-attention, with tables by position.
fn streams(seed: u64, count: usize) -> Vec<(Subject, Case)> {
    grid::channels(seed, count, &LENGTHS[1..])
        .into_iter()
        .enumerate()
        .map(|(n, case)| {
            let dims = Dims { keys: case.dims.queries, ..case.dims };
            let size = [1, 2, 3, 8, 20, 33, 150][n / 3 % 7];
            let variant = match n % 4 {
                0 => Variant::Simple,
                1 => Variant::Local { window: size, length: Some(140) },
                2 => Variant::Full { length: 140, rank: [None, Some(4)][n / 4 % 2] },
                _ => Variant::Conv { taps: size, normalized: n % 2 == 0 },
            };
            (subject(Aft::new(variant)), Case { dims, causal: true, offset: 0, keys: KeyMask::All, ..case })
        })
        .collect()
}

fn over(cases: &[(Subject, Case)], check: Check) {
    assert_all(check, cases.iter().map(|(subject, case)| (subject, case)));
}

longspan_testing::shared_tests!(over, drawn, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        drawn(11, 400, &LENGTHS) => accuracy::forward::<f32>,
        drawn(12, 400, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: drawn(13, 150, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: drawn(14, 400, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped:
        drawn(23, 300, &LENGTHS) => isolation::packed_is_looped::<f32>,
        drawn(24, 300, &LENGTHS) => isolation::packed_is_looped::<f64>;
    order_does_not_matter_without_positions:
        unordered(25) => isolation::order_does_not_matter_without_positions::<f32>,
        unordered(26) => isolation::order_does_not_matter_without_positions::<f64>;
    threads_do_not_matter_to_state_gradients:
        streams(45, 20) => state_gradients::threads_do_not_matter_to_state_gradients::<f32>;
    threads_do_not_matter:
        with_states(39, 60) => threads::threads_do_not_matter::<f32>,
        with_states(40, 30) => threads::threads_do_not_matter::<f64>;
    long_sequences_are_the_definition:
        long() => accuracy::forward::<f32>,
        long() => accuracy::gradient_in_f32;
    threads_do_not_matter_to_long_sequences:
        long() => threads::threads_do_not_matter::<f32>,
        [unequal()] => threads::threads_do_not_matter::<f32>;
    unseen_keys_of_long_sequences_do_not_matter: long_windows() => isolation::unseen_keys_do_not_matter::<f32>;
}

fn unordered(seed: u64) -> Vec<(Subject, Case)> {
    let unordered = |(_, case): (Subject, Case)| {
        (subject(Aft::new(Variant::Simple)), Case { causal: false, keys: KeyMask::All, ..case })
    };
    drawn(seed, 60, &LENGTHS).into_iter().map(unordered).collect()
}

/// Under a causal mask some checks ask for states, which biases that belong to one call do not have.
fn with_states(seed: u64, count: usize) -> Vec<(Subject, Case)> {
    let mut cases = drawn(seed, count, &LENGTHS);
    cases.retain(|(subject, case)| !case.causal || !subject.label.contains("length: None"));
    cases
}

/// Sequences of several tiles of AFT-full and blocks of AFT-simple, with few heads, whose channels are then dealt to threads.
fn long() -> Vec<(Subject, Case)> {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, queries: 580, keys: 580, head_dim: 35, value_dim: 35 };
    let ignored = (0..dims.keys).map(|key| (200..210).contains(&key) || key % 97 == 3).collect();
    let wider = Dims { keys: 700, ..dims };
    let cases = [
        Case { seed: 5, ..Case::new(dims, true) },
        Case { seed: 6, ..Case::new(dims, false) },
        Case { seed: 7, keys: KeyMask::Padding(ignored), ..Case::new(dims, true) },
        Case { seed: 8, offset: 120, ..Case::new(wider, true) },
        Case { seed: 9, offset: -30, ..Case::new(dims, true) },
    ];
    let variants = [
        Variant::Simple,
        Variant::Full { length: 720, rank: None },
        Variant::Full { length: 710, rank: Some(5) },
        Variant::Local { window: 300, length: Some(720) },
        Variant::Conv { taps: 33, normalized: false },
    ];
    let all = variants.into_iter().flat_map(|variant| cases.iter().map(move |case| (variant, case.clone())));
    all.map(|(variant, case)| (subject(Aft::new(variant)), case)).collect()
}

/// Sequences whose chunks are of 128 and of 64 rows, over the same rows of a table; so large a table that all heads of both share one sum
/// of its gradient.
fn unequal() -> (Subject, Case) {
    let bounds = vec![0, 1150, 1500];
    let keys = KeyMask::Packed { queries: bounds.clone(), keys: bounds };
    let case = Case { seed: 21, keys, ..Case::new(Dims::square(1, 4, 1500, 6), true) };
    (subject(Aft::new(Variant::Full { length: 1500, rank: None })), case)
}

fn long_windows() -> Vec<(Subject, Case)> {
    let mut cases = long();
    cases.retain(|(subject, _)| subject.label.contains("Conv"));
    cases
}

/// Outputs and gradients in `f32` on given numbers.
fn is_accurate(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<(), Failure> {
    accuracy::forward_of::<f32>(subject, case, inputs)?;
    accuracy::gradient_in_f32_of(subject, case, inputs)
}

/// Biases and the keys of the heads in the middle range too far for one tile: these heads cut theirs, and others take the same biases
/// whole. Chunks are of 64 rows, and of 128 where there are 1,100.
#[test]
fn heads_may_cut_their_tiles_apart() {
    let of = |length, rank, causal| {
        let case = Case { seed: 21, ..Case::new(Dims::square(1, 4, length, 6), causal) };
        (subject(Aft::new(Variant::Full { length, rank })), case)
    };
    let calls = [(330, true), (330, false), (1100, true), (1100, false)].into_iter();
    let cases = calls.flat_map(|(length, causal)| [None, Some(3)].map(|rank| of(length, rank, causal)));
    let cases: Vec<_> = cases.chain([unequal()]).collect();
    let check: Check = |subject, case| {
        let dims = &case.dims;
        let mut inputs = execute::random(subject, case);
        for (n, k) in inputs.k.iter_mut().enumerate() {
            let (head, key) = (n / (dims.keys * dims.head_dim), n / dims.head_dim % dims.keys);
            let level = if (1..3).contains(&head) && (64..140).contains(&key) { -40.0 } else { 0.0 };
            *k = f64::from((*k + level) as f32);
        }
        // Of two factors the product: biases of some hundred lose the digits that are asked for.
        let scale = if inputs.parameters.len() == 2 { 4.0 } else { 8.0 };
        inputs.parameters.iter_mut().flatten().for_each(|w| *w = f64::from((scale * *w) as f32));
        threads::threads_do_not_matter_of(subject, case, &inputs.cast::<f32>())?;
        is_accurate(subject, case, &inputs)
    };
    assert_all(check, cases.iter().map(|(subject, case)| (subject, case)));
}

/// Chunks of AFT-conv whose weights may all be relative to one exponent beside others whose may not, and rows that stand where no
/// key of their chunk does.
#[test]
fn chunks_of_windows_may_be_walked_apart() {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, queries: 330, keys: 330, head_dim: 6, value_dim: 6 };
    let levels: [(&str, Level); 6] = [
        ("near each other", |_| 0.0),
        ("at 120 for key 200", |j| if j == 200 { 120.0 } else { 0.0 }),
        ("at 0 and 30 by turns of 64", |j| if j / 64 % 2 == 0 { 0.0 } else { 30.0 }),
        ("rising", |j| j as f64 * 0.4),
        ("falling", |j| -(j as f64) * 0.4),
        ("at −10,000 from 100 to 200", |j| if (100..200).contains(&j) { -1e4 } else { 0.0 }),
    ];
    let windows = [(33, 1.0), (33, 12.0), (2, 1.0), (64, 1.0)];
    let masks = [(true, 0), (true, -100), (true, 37), (false, 0), (false, 50)];
    let trials = windows.into_iter().flat_map(|window| levels.map(|level| (window, level)));
    assert_each(
        trials.flat_map(|(window, level)| masks.map(|mask| (window, level, mask))),
        |((taps, scale), (keys, _), (causal, offset))| {
            format!("{taps} taps × {scale}, keys {keys}, causal {causal}, offset {offset}")
        },
        |&((taps, scale), (_, level), (causal, offset))| {
            let subject = subject(Aft::new(Variant::Conv { taps, normalized: false }));
            let case = Case { seed: 31, offset, ..Case::new(dims, causal) };
            let mut inputs = execute::random(&subject, &case);
            inputs.raise_keys(&dims, level);
            inputs.parameters.iter_mut().flatten().for_each(|w| *w = f64::from((scale * *w) as f32));
            is_accurate(&subject, &case, &inputs)
        },
    );
}

/// Keys far beyond what a float can hold the exponential of.
fn with_extreme_keys(check: fn(&Subject, &Case, &Inputs<f64>) -> Result<(), Failure>) {
    let variants = [
        Variant::Simple,
        Variant::Local { window: 4, length: None },
        Variant::Local { window: 40, length: Some(150) },
        Variant::Full { length: 150, rank: None },
        Variant::Full { length: 151, rank: Some(5) },
        Variant::Conv { taps: 5, normalized: true },
        Variant::Conv { taps: 70, normalized: false },
        Variant::Conv2d { image: [10, 15], taps: [3, 5], normalized: true },
    ];
    over_extreme_keys(&variants.map(|variant| subject(Aft::new(variant))), [5, 5], |subject, case, inputs| {
        // An image is bidirectional.
        if case.causal && subject.label.contains("Conv2d") { Ok(()) } else { check(subject, case, inputs) }
    });
}

#[test]
fn extreme_keys_do_not_overflow() {
    with_extreme_keys(accuracy::forward_of::<f32>);
    with_extreme_keys(accuracy::forward_of::<f64>);
}

#[test]
fn gradients_of_extreme_keys_do_not_overflow() {
    with_extreme_keys(accuracy::gradient_in_f32_of);
}

#[test]
fn extreme_keys_stream() {
    with_extreme_keys(|subject, case, inputs| {
        // Biases that belong to one call have no state.
        if !case.causal || subject.label.contains("length: None") {
            return Ok(());
        }
        state_gradients::gradients_pass_through_states_of::<f32>(subject, case, inputs)?;
        streaming::pieces_make_the_whole_of::<f32>(subject, case, inputs)
    });
}

#[test]
fn wrong_calls_are_refused() {
    for variant in [
        Variant::Simple,
        Variant::Local { window: 2, length: Some(9) },
        Variant::Full { length: 9, rank: None },
        Variant::Full { length: 9, rank: Some(2) },
        Variant::Conv { taps: 3, normalized: true },
        Variant::Conv { taps: 3, normalized: false },
    ] {
        rejection::assert_wrong_calls(&subject(Aft::new(variant)), [3, 3]);
    }
}

/// Checks calls of 150 tokens, causal and bidirectional, on numbers that `change` makes awkward.
fn with_numbers(variant: Variant, keys: &KeyMask, change: impl Fn(&mut Inputs<f64>)) {
    let subject = subject(Aft::new(variant));
    for causal in [true, false] {
        let case = Case { keys: keys.clone(), ..Case::new(Dims::square(1, 1, 150, 1), causal) };
        let mut inputs = execute::random(&subject, &case);
        change(&mut inputs);
        is_accurate(&subject, &case, &inputs).unwrap_or_else(|failure| panic!("{case:?}: {failure}"));
    }
}

/// The published form, `Σ e^k + Σ (e^w − 1) e^k`, cancels to 0.0 here.
#[test]
fn a_bias_of_minus_30_on_the_dominant_key_leaves_the_others() {
    with_numbers(Variant::Local { window: 1, length: None }, &KeyMask::All, |inputs| {
        (inputs.k[70], inputs.parameters[0][70]) = (18.0, -30.0);
    });
}

/// Keys and biases that both range over more than a product of two exponentials can hold: what one takes away the other
/// gives back, pair by pair.
#[test]
fn opposite_ranges_of_keys_and_biases_cancel() {
    with_numbers(Variant::Full { length: 150, rank: None }, &KeyMask::All, |inputs| {
        // Whose sums are exact in f32.
        let moved = |x: f64, level: f64| (x * 256.0).round() / 256.0 + level;
        let level = |key: usize| if key.is_multiple_of(2) { 300.0 } else { -300.0 };
        inputs.k.iter_mut().enumerate().for_each(|(key, k)| *k = moved(*k, level(key)));
        inputs.parameters[0].iter_mut().enumerate().for_each(|(n, w)| *w = moved(*w, -level(n % 150)));
    });
}

/// A tile's biases are relative to the largest of each row, which may be that of a key that is not there: one of padding or of −∞.
#[test]
fn a_large_bias_of_an_ignored_key_leaves_the_others() {
    let padding = KeyMask::Padding((0..150).map(|key| key == 70).collect());
    for (keys, key) in [(padding, 0.0), (KeyMask::All, f64::NEG_INFINITY)] {
        with_numbers(Variant::Full { length: 150, rank: None }, &keys, |inputs| {
            inputs.k[70] = key;
            inputs.parameters[0].chunks_mut(150).for_each(|row| row[70] = 200.0);
        });
    }
}

/// Keys that are all larger by a number that `f32` adds exactly give the same bits.
#[test]
fn a_shift_of_all_keys_changes_nothing() {
    let local = Variant::Local { window: 5, length: None };
    for variant in [Variant::Simple, local, Variant::Full { length: 200, rank: None }] {
        let subject = subject(Aft::new(variant));
        for causal in [true, false] {
            let case = Case::new(Dims::square(1, 1, 200, 1), causal);
            let mut inputs = execute::random(&subject, &case).cast::<f32>();
            inputs.k.iter_mut().enumerate().for_each(|(n, k)| *k = ((n * 37 % 101) as f32 - 50.0) / 16.0);
            let run = |inputs: &_| execute::output_alone(&subject, &case, inputs, &mut Scratch::new()).unwrap();
            let expected = run(&inputs);
            for shift in [8192.0, -8192.0, 1.0] {
                let mut moved = inputs.clone();
                moved.k.iter_mut().for_each(|k| *k += shift);
                assert_eq!(run(&moved), expected, "{variant:?} causal {causal} {shift}");
            }
        }
    }
}

/// The cost model's working memory is what a call of one head takes on one thread.
#[test]
fn plans_say_how_much_memory_a_call_takes() {
    for (variant, length, causal) in [
        (Variant::Simple, 500, true),
        (Variant::Full { length: 500, rank: None }, 500, false),
        (Variant::Local { window: 5, length: None }, 500, true),
        (Variant::Local { window: 64, length: None }, 900, false),
        (Variant::Conv { taps: 33, normalized: false }, 4096, true),
        (Variant::Conv { taps: 150, normalized: false }, 500, false),
        (Variant::Conv2d { image: [20, 30], taps: [3, 5], normalized: false }, 600, false),
    ] {
        for head_dim in [64, 24] {
            let (aft, dims) = (Aft::new(variant), Dims::square(1, 1, length, head_dim));
            let mask = if causal { Mask::causal() } else { Mask::bidirectional() };
            let key_dim = aft.key_dim(&dims);
            let numbers = vec![0.5f32; length * head_dim];
            let parameters: Vec<Vec<f32>> = aft.parameters(&dims).iter().map(|w| vec![0.0; w.len()]).collect();
            let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
            let call = Call::row_major(dims, [&numbers, &numbers[..length * key_dim], &numbers]);
            let call = call.with_parameters(&parameters).with_mask(mask);
            let mut out = vec![0.0; numbers.len()];
            let mut scratch = Scratch::new();
            let output = Output::new(ViewMut::contiguous(&mut out, dims.out()));
            threads::on_threads(1, || aft.forward(&call, output, &mut scratch)).expect("a call that makes sense");
            let said = aft.plan(&dims, &mask).expect("sizes that make sense").estimates[0].scratch_bytes;
            let taken = scratch.bytes() as f64;
            assert!((said / taken - 1.0).abs() < 0.02, "{variant:?}, {head_dim} channels: {said} bytes, not {taken}");
        }
    }
}

#[test]
fn options_without_meaning_are_refused() {
    let dims = rejection::dims([3, 3]);
    let (causal, bidirectional) = (Case::new(dims, true), Case::new(dims, false));
    let wide = Case::new(Dims { value_dim: 4, ..dims }, true);
    let local = |window, length| Variant::Local { window, length };
    for (variant, case, argument) in [
        (Variant::Simple, &wide, "value_dim"),
        (local(0, None), &causal, "window"),
        (local(1 << 24, None), &causal, "window"),
        (local(usize::MAX, Some(usize::MAX)), &causal, "window"),
        (local(2, Some(usize::MAX)), &causal, "length"),
        (local(2, Some(4)), &causal, "queries"),
        (local(2, Some(6)), &Case { offset: 2, ..causal.clone() }, "queries"),
        (local(2, Some(9)), &Case { offset: -1, ..bidirectional.clone() }, "queries"),
        (Variant::Full { length: 0, rank: None }, &causal, "length"),
        (Variant::Full { length: usize::MAX, rank: Some(1) }, &causal, "length"),
        (Variant::Full { length: 9, rank: Some(0) }, &causal, "rank"),
        (Variant::Full { length: 4, rank: None }, &causal, "queries"),
        (Variant::Full { length: 5, rank: None }, &causal, "keys"),
        (Variant::Full { length: 9, rank: Some(2) }, &Case { offset: -1, ..bidirectional.clone() }, "queries"),
        (Variant::Conv { taps: 0, normalized: true }, &bidirectional, "taps"),
        (Variant::Conv { taps: usize::MAX, normalized: false }, &causal, "taps"),
        (Variant::Conv2d { image: [0, 5], taps: [1, 1], normalized: false }, &bidirectional, "image"),
        (Variant::Conv2d { image: [usize::MAX, 2], taps: [1, 1], normalized: false }, &bidirectional, "image"),
        (Variant::Conv2d { image: [1, 5], taps: [3, 0], normalized: false }, &bidirectional, "taps"),
        (Variant::Conv2d { image: [2, 3], taps: [3, 3], normalized: true }, &bidirectional, "queries"),
        (Variant::Conv2d { image: [5, 1], taps: [3, 3], normalized: true }, &bidirectional, "keys"),
    ] {
        // Calls that no numbers could be drawn for are spoilt by their options alone.
        let drawn = if matches!(argument, "queries" | "keys" | "value_dim") { variant } else { Variant::Simple };
        let check = |aft: Aft| {
            let inputs = execute::random(&subject(Aft::new(drawn)), case).cast::<f32>();
            inputs.call(case, None, |call| aft.check(call))
        };
        let error = check(Aft::new(variant)).expect_err("an option without meaning was taken");
        let name = Aft::new(variant).name();
        rejection::names_the_fault(&format!("{variant:?}"), name, argument, &error)
            .unwrap_or_else(|failure| panic!("{failure}"));
    }
    let error = Kernel::<f32>::empty_state(&Aft::new(local(2, None)), &dims).expect_err("a state for one call");
    assert!(error.to_string().contains("length"), "{error}");
}

/// An image has no order, no offset and no shorter neighbours, and so no state either.
#[test]
fn images_are_whole_and_looked_at_both_ways() {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 2, queries: 6, keys: 6, head_dim: 3, value_dim: 3 };
    let aft = Aft::new(Variant::Conv2d { image: [2, 3], taps: [3, 3], normalized: false });
    let whole = Case::new(dims, false);
    let packed = KeyMask::Packed { queries: vec![0, 6], keys: vec![0, 6] };
    for case in [
        Case::new(dims, true),
        Case { offset: 1, ..whole.clone() },
        Case { keys: KeyMask::Lengths(vec![6]), ..whole.clone() },
        Case { keys: packed, ..whole.clone() },
    ] {
        let inputs = execute::random(&subject(aft), &case).cast::<f32>();
        let error = inputs.call(&case, None, |call| aft.check(call)).expect_err("not an image");
        assert!(error.to_string().contains("an image under"), "{error}");
    }
    let inputs = execute::random(&subject(aft), &whole).cast::<f32>();
    inputs.call(&whole, None, |call| aft.check(call)).expect("an image");
    let error = Kernel::<f32>::empty_state(&aft, &dims).expect_err("a state of an image");
    assert!(error.to_string().contains("image"), "{error}");
}

/// A table by position ends: the step after its last row is refused, and changes nothing.
#[test]
fn steps_beyond_the_table_are_refused() {
    let aft = Aft::new(Variant::Local { window: 2, length: Some(3) });
    let mut state = aft.empty_state(&Dims::square(1, 1, 0, 2)).expect("a table by position");
    let token = Token { q: &[1.0, 2.0], k: &[1.0, 2.0], v: &[1.0, 2.0], parameters: &[&[0.5; 9]] };
    let mut out = [0.0; 2];
    for _ in 0..3 {
        aft.step(&token, &mut state, &mut out).expect("a row of the table");
    }
    let before = state.clone();
    let error = aft.step(&token, &mut state, &mut out).expect_err("no row of the table");
    assert!(error.to_string().contains("3 tokens"), "{error}");
    assert_eq!(state, before);
}
