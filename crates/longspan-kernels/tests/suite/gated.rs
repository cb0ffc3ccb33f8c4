//! The conformance suite over gated linear attention and the delta rule.

use std::sync::Arc;

use longspan_kernels::{Dims, Gate, GatedAttention, Kernel, Mechanism, Scratch, Update};
use longspan_testing::compare::worst;
use longspan_testing::subject::gates;
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{
    Assumptions, Case, Failure, Inputs, KeyMask, Number, Subject, accuracy, execute, grid, isolation, rejection,
    state_gradients, threads,
};

/// Gates and `β` in range: decays from none to nearly all, no correction to a reflection.
fn subject(attention: GatedAttention) -> Subject {
    let assumptions = Assumptions {
        signed_features: true,
        content: true,
        positions: true,
        turned: true,
        true_denominators: true,
        ..Default::default()
    };
    // Rows that keep their length would let the recurrence grow without end.
    let most = if attention.l2_norm { 2.0 } else { 0.02 };
    let mut subject = Subject::new(attention, assumptions);
    subject.prepare = Arc::new(move |parameter, numbers| match parameter.name {
        "log_decay" => gates(numbers),
        _ => numbers.iter_mut().for_each(|x| *x = 1e-3 + (most - 2e-3) * (0.5 + 0.5 * x.sin())),
    });
    subject
}

fn subjects() -> Vec<Subject> {
    let gates = [Gate::Head, Gate::Channel, Gate::None];
    let of = |update| gates.map(|gate| (update, gate));
    let both = [of(Update::Delta), of(Update::Sum)].concat();
    let options = both.into_iter().flat_map(|(update, gate)| {
        [true, false].map(|l2_norm| GatedAttention { update, gate, l2_norm, scale: (!l2_norm).then_some(0.7) })
    });
    options.map(subject).collect()
}

fn over(cases: &[Case], check: Check) {
    let subjects = subjects();
    assert_all(check, cases.iter().enumerate().map(|(n, case)| (&subjects[n % subjects.len()], case)));
}

/// Lengths around blocks and chunks.
const LENGTHS: [usize; 12] = [0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 130, 200];

/// Causal calls of as many queries as keys.
fn cases(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    let square = |(n, case): (usize, Case)| {
        let keys = match case.keys {
            KeyMask::Packed { keys, .. } => KeyMask::Packed { queries: keys.clone(), keys },
            others => others,
        };
        // Values of another width than keys in every other case.
        let value_dim = if n % 2 == 0 { case.dims.value_dim } else { case.dims.head_dim + n % 5 };
        // A row of one number divided by its length is its sign, whose gradient is nearly 0.
        let head_dim = case.dims.head_dim.max(2);
        let dims = Dims { queries: case.dims.keys, head_dim, value_dim, ..case.dims };
        Case { dims, causal: true, offset: 0, keys, positive: false, ..case }
    };
    grid::channels(seed, count, lengths).into_iter().enumerate().map(square).collect()
}

/// The same from the first token on, all of them there.
fn streams(seed: u64, count: usize) -> Vec<Case> {
    let stream = |case: Case| Case { keys: KeyMask::All, ..case };
    cases(seed, count, &LENGTHS).into_iter().filter(|case| case.dims.keys > 0).map(stream).collect()
}

/// Those whose states add up.
fn over_sums(cases: &[Case], check: Check) {
    let subjects = [Gate::Head, Gate::Channel, Gate::None]
        .map(|gate| subject(GatedAttention { update: Update::Sum, gate, ..Default::default() }));
    assert_all(check, cases.iter().enumerate().map(|(n, case)| (&subjects[n % subjects.len()], case)));
}

longspan_testing::shared_tests!(over, over_sums, cases, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        cases(61, 400, &LENGTHS) => accuracy::forward::<f32>,
        cases(62, 400, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: cases(63, 400, &LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: cases(64, 400, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped: cases(71, 200, &LENGTHS) => isolation::packed_is_looped::<f64>;
    threads_do_not_matter: cases(70, 60, &LENGTHS) => threads::threads_do_not_matter::<f32>;
    gradients_of_states_are_difference_quotients:
        streams(72, 100) => state_gradients::state_gradients_are_difference_quotients;
}

fn attentions() -> impl Iterator<Item = GatedAttention> {
    let gates = [Gate::Head, Gate::Channel, Gate::None];
    let both = gates.into_iter().flat_map(|gate| [Update::Delta, Update::Sum].map(|update| (update, gate)));
    both.map(|(update, gate)| GatedAttention { update, gate, l2_norm: true, scale: None })
}

/// Inputs of a causal call, evenly spread.
fn inputs(attention: GatedAttention, dims: Dims) -> (Subject, Case, Inputs<f64>) {
    let (subject, case) = (subject(attention), Case::new(dims, true));
    let mut inputs = execute::random(&subject, &case);
    for (seed, tensor) in [&mut inputs.q, &mut inputs.k, &mut inputs.v].into_iter().enumerate() {
        let number = |n: usize| ((n * n + 37 * (seed + 1) + 11) as f64 * 0.618).sin() * 1.7;
        tensor.iter_mut().enumerate().for_each(|(n, x)| *x = number(n));
    }
    (subject, case, inputs)
}

/// In `f32`, relative to the largest output: a chunk is as exact as the recurrence, beside the same in `f64`.
fn as_exact_as_steps(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<(), Failure> {
    let narrow = inputs.cast::<f32>();
    let expected = execute::reference(subject, case, &narrow.cast())?.out;
    let chunked = execute::forward(subject, case, &narrow)?.out;
    let mut state = f32::mechanism(subject).empty_state(&case.dims)?;
    let steps = execute::steps(subject, case, &narrow, 0..case.dims.keys, &mut state)?;
    let [chunked, steps] = [chunked, steps].map(|got| worst(&[got], std::slice::from_ref(&expected)));
    let label = &subject.label;
    if chunked <= 2.0 * steps + 1e-6 { Ok(()) } else { Err(Failure(format!("{label}: {chunked:e}, steps {steps:e}"))) }
}

/// A gate that forgets at once beside ones that never do, `β` at its ends, keys that repeat: where the triangle of a chunk is
/// ill-conditioned, it is solved as exactly as the recurrence runs.
#[test]
fn awkward_gates_are_exact() {
    let dims = Dims::square(1, 2, 200, 16);
    for attention in attentions() {
        let (subject, case, mut inputs) = inputs(attention, dims);
        let names: Vec<_> = attention.parameters(&dims).iter().map(|parameter| parameter.name).collect();
        for (beta, repeated) in [(0.0, false), (1.0, false), (2.0, false), (1.0, true), (2.0, true)] {
            for (name, numbers) in names.iter().zip(&mut inputs.parameters) {
                let channels = numbers.len() / (2 * 200);
                for (n, x) in numbers.iter_mut().enumerate() {
                    let (token, channel) = (n / channels % 200, n % channels);
                    *x = match *name {
                        "beta" => beta,
                        // One channel forgets each token at once, one never.
                        _ if channels > 1 && channel == 3 => -50.0,
                        _ if token % 40 == 17 && channel != 5 => -50.0,
                        _ => 0.0,
                    };
                }
            }
            if repeated {
                let first = inputs.k[..16].to_vec();
                inputs.k.chunks_mut(16).for_each(|key| key.copy_from_slice(&first));
            }
            if attention.update == Update::Sum || beta > 0.0 {
                as_exact_as_steps(&subject, &case, &inputs).unwrap();
            }
        }
    }
}

/// Rounding does not grow with the length.
#[test]
fn long_sequences_keep_their_accuracy() {
    for attention in attentions() {
        let (subject, case, inputs) = inputs(attention, Dims { value_dim: 4, ..Dims::square(1, 1, 65_536, 8) });
        as_exact_as_steps(&subject, &case, &inputs).unwrap();
    }
}

/// A decay that leaves next to nothing has next to no gradient: one that is the small difference of large sums would be all rounding.
#[test]
fn gradients_of_strong_decays_are_exact() {
    for attention in attentions().filter(|attention| attention.gate != Gate::None) {
        let (subject, case, mut inputs) = inputs(attention, Dims::square(1, 2, 150, 16));
        inputs.parameters[0].iter_mut().enumerate().for_each(|(n, g)| *g = -6.0 - (n % 5) as f64);
        let (_, expected) = execute::both::<f64>(&subject, &case, &inputs).unwrap();
        let (_, got) = execute::both::<f32>(&subject, &case, &inputs.cast()).unwrap();
        let error = worst(&got.gradients[3..4], &expected.gradients[3..4]);
        assert!(error <= 2e-6, "{attention:?}: off by {error:e} of the largest");
    }
}

/// Heads of no numbers, no tokens, no heads: answers as everywhere, and nothing else.
#[test]
fn nothing_is_no_fault() {
    for attention in attentions() {
        for (heads, length, head_dim, value_dim) in
            [(2, 5, 0, 3), (2, 5, 3, 0), (2, 0, 3, 3), (0, 5, 3, 3), (1, 70, 0, 0)]
        {
            let dims = Dims { head_dim, value_dim, ..Dims::square(1, heads, length, 1) };
            let (subject, case, inputs) = inputs(attention, dims);
            let empty = Kernel::<f64>::empty_state(&attention, &dims).unwrap();
            let (forward, _) = execute::forward_state(&subject, &case, &inputs, Some(&empty)).unwrap();
            let mut d_empty = empty.clone();
            let states = (Some(&empty), Some(&empty), Some(&mut d_empty));
            let scratch = &mut Scratch::new();
            let back = execute::backward_through_states(&subject, &case, &inputs, &forward, states, f64::NAN, scratch)
                .unwrap();
            assert!(forward.out.iter().all(|&x| x == 0.0 || head_dim > 0), "{attention:?} {dims:?}");
            assert!(back.gradients.iter().flatten().all(|x| x.is_finite()), "{attention:?} {dims:?}");
        }
    }
}

/// What is wrong is named.
#[test]
fn wrong_gates_are_refused() {
    let attention = GatedAttention::default();
    let (subject, case, good) = inputs(attention, Dims::square(2, 2, 70, 18));
    let refused = |word: &str, change: &dyn Fn(&mut Inputs<f64>)| {
        let mut inputs = good.clone();
        change(&mut inputs);
        let error = inputs.call(&case, None, |call| f64::mechanism(&subject).check(call)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused("log_decay: expected numbers that are at most 0, got 0.5", &|x| x.parameters[0][7] = 0.5);
    refused("beta: expected numbers from 0 to 2, got 2.5", &|x| x.parameters[1][7] = 2.5);
    refused("got -0.5", &|x| x.parameters[1][7] = -0.5);
    refused("log_decay", &|x| _ = x.parameters[0].pop());
    rejection::assert_refused(&subject, &Case { causal: false, ..case.clone() }, "a bidirectional mask or an offset");
    rejection::assert_refused(&subject, &Case { offset: 1, ..case.clone() }, "a bidirectional mask or an offset");
    let other = GatedAttention { gate: Gate::None, ..attention };
    let state = Kernel::<f64>::empty_state(&other, &case.dims).unwrap();
    let error = good.call(&case, Some(&state), |call| f64::mechanism(&subject).check(call)).unwrap_err().to_string();
    assert!(error.contains("options"), "{error}");
    let error = attention.combine(&state, &state, &[]).unwrap_err().to_string();
    assert!(error.contains("earlier state to the call"), "{error}");
}
