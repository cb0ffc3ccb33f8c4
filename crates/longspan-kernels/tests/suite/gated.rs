//! The conformance suite over gated linear attention and the delta rule.

use std::sync::Arc;

use longspan_kernels::{
    Call, Cotangent, Dims, Gate, GatedAttention, Gradients, Kernel, Mask, Mechanism, Output, Scratch, State, Token,
    Update, View, ViewMut,
};
use longspan_testing::suite::{Check, assert_all};
use longspan_testing::{
    Assumptions, Case, Inputs, KeyMask, Subject, accuracy, execute, grid, isolation, memory, per_key, subject::gates,
    threads,
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
fn cases(seed: u64, count: usize) -> Vec<Case> {
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
    grid::channels(seed, count, &LENGTHS).into_iter().enumerate().map(square).collect()
}

longspan_testing::tests! { over;
    forward_is_the_definition:
        cases(61, 400) => accuracy::forward::<f32>,
        cases(62, 400) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: cases(63, 400) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: cases(64, 400) => accuracy::gradient_in_f32;
    unseen_keys_do_not_matter: cases(65, 200) => isolation::unseen_keys_do_not_matter::<f32>;
    rows_are_independent: cases(66, 200) => isolation::rows_are_independent::<f32>;
    padding_does_not_matter: cases(67, 200) => isolation::padding_does_not_matter::<f64>;
    poison_does_not_matter: cases(68, 200) => memory::poison_does_not_matter::<f32>;
    strides_do_not_matter: cases(69, 200) => memory::strides_do_not_matter::<f32>;
    threads_do_not_matter: cases(70, 60) => threads::threads_do_not_matter::<f32>;
}

/// Draws numbers that look random.
fn draw(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|n| ((n * n + 37 * seed + 11) as f64 * 0.618).sin() * 1.7).collect()
}

/// Inputs of a causal call in the number type of the caller; each token's numbers stand together, head after head.
#[derive(Clone)]
struct Tokens {
    dims: Dims,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    parameters: Vec<Vec<f64>>,
    d_out: Vec<f64>,
}

/// What a call gives: output, gradients in the order of `named`, states.
struct Answer {
    out: Vec<f64>,
    final_state: State<f64>,
    gradients: Vec<Vec<f64>>,
    d_initial: Option<State<f64>>,
}

impl Tokens {
    fn new(attention: &GatedAttention, dims: Dims) -> Self {
        let numbers = |seed, shape: [usize; 4]| draw(seed, shape.iter().product());
        let parameters = attention.parameters(&dims).into_iter().map(|parameter| {
            let x = draw(4, parameter.len());
            let decay = parameter.name == "log_decay";
            x.iter().map(|x| if decay { -x.abs() * 0.4 } else { 1.0 + x.sin() }).collect()
        });
        Self {
            dims,
            q: numbers(1, dims.q()),
            k: numbers(2, dims.k()),
            v: numbers(3, dims.v()),
            parameters: parameters.collect(),
            d_out: numbers(5, dims.out()),
        }
    }

    /// The tokens of a range alone.
    fn part(&self, tokens: std::ops::Range<usize>) -> Self {
        let all = self.dims.keys;
        let rows = |x: &[f64], heads: usize| -> Vec<f64> {
            let width = x.len() / (heads * all).max(1);
            x.chunks(all * width).flat_map(|head| head[tokens.start * width..tokens.end * width].to_vec()).collect()
        };
        let (heads, kv_heads) = (self.dims.batch * self.dims.heads, self.dims.batch * self.dims.kv_heads);
        Self {
            dims: Dims { queries: tokens.len(), keys: tokens.len(), ..self.dims },
            q: rows(&self.q, heads),
            k: rows(&self.k, kv_heads),
            v: rows(&self.v, kv_heads),
            parameters: self.parameters.iter().map(|x| rows(x, kv_heads)).collect(),
            d_out: rows(&self.d_out, heads),
        }
    }

    fn run(&self, attention: &GatedAttention, before: Option<&State<f64>>, d_after: Option<&State<f64>>) -> Answer {
        let parameters: Vec<&[f64]> = self.parameters.iter().map(Vec::as_slice).collect();
        let call = Call::row_major(self.dims, [&self.q, &self.k, &self.v]).with_parameters(&parameters);
        let call = call.with_mask(Mask::causal()).with_initial_state(before);
        let mut scratch = Scratch::new();
        let mut out = vec![0.0; self.d_out.len()];
        let mut denominators = vec![0.0; self.dims.batch * self.dims.heads * self.dims.queries];
        let mut final_state = Kernel::<f64>::empty_state(attention, &self.dims).unwrap();
        let to = Output::training(ViewMut::contiguous(&mut out, self.dims.out()), &mut denominators);
        attention.forward(&call, to.with_final_state(&mut final_state), &mut scratch).unwrap();
        let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
        let (mut dq, mut dk, mut dv) = (zeros(self.dims.q()), zeros(self.dims.k()), zeros(self.dims.v()));
        let mut d_parameters: Vec<Vec<f64>> = self.parameters.iter().map(|x| vec![0.0; x.len()]).collect();
        let mut d_initial = before.cloned();
        {
            let cotangent = Cotangent {
                out: View::contiguous(&out, self.dims.out()),
                denominators: &denominators,
                d_out: View::contiguous(&self.d_out, self.dims.out()),
                final_state: d_after,
            };
            let mut learned: Vec<&mut [f64]> = d_parameters.iter_mut().map(Vec::as_mut_slice).collect();
            let gradients = Gradients {
                dq: ViewMut::contiguous(&mut dq, self.dims.q()),
                dk: ViewMut::contiguous(&mut dk, self.dims.k()),
                dv: ViewMut::contiguous(&mut dv, self.dims.v()),
                parameters: &mut learned,
                initial_state: d_initial.as_mut(),
            };
            attention.backward(&call, &cotangent, gradients, &mut scratch).unwrap();
        }
        let gradients = [vec![dq, dk, dv], d_parameters].concat();
        Answer { out, final_state, gradients, d_initial }
    }
}

fn assert_close(what: &str, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-300f64, |most, x| most.max(x.abs()));
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst <= 1e-12 * scale, "{what}: off by {worst:e} of {scale:e}");
}

fn attentions() -> impl Iterator<Item = GatedAttention> {
    let gates = [Gate::Head, Gate::Channel, Gate::None];
    let both = gates.into_iter().flat_map(|gate| [Update::Delta, Update::Sum].map(|update| (update, gate)));
    both.map(|(update, gate)| GatedAttention { update, gate, l2_norm: true, scale: None })
}

const STREAM: Dims = Dims { batch: 2, heads: 4, kv_heads: 2, queries: 150, keys: 150, head_dim: 18, value_dim: 13 };

/// Pieces with states between them, and token by token: outputs, the last state, and gradients back through the states.
#[test]
fn pieces_make_the_whole_with_all_gradients() {
    for attention in attentions() {
        let tokens = Tokens::new(&attention, STREAM);
        let empty = Kernel::<f64>::empty_state(&attention, &STREAM).unwrap();
        let mut d_last = empty.clone();
        let numbers = draw(6, d_last.numbers().len());
        d_last = State::from_numbers(d_last.shape(), numbers).unwrap();
        let whole = tokens.run(&attention, Some(&empty), Some(&d_last));
        for cut in [1, 64, 70, 149] {
            let (first, second) = (tokens.part(0..cut), tokens.part(cut..150));
            let before = first.run(&attention, Some(&empty), None);
            let after = second.run(&attention, Some(&before.final_state), Some(&d_last));
            let back = first.run(&attention, Some(&empty), after.d_initial.as_ref());
            assert_close("state", after.final_state.numbers(), whole.final_state.numbers());
            assert_close(
                "d_state",
                back.d_initial.as_ref().unwrap().numbers(),
                whole.d_initial.as_ref().unwrap().numbers(),
            );
            let mut all = whole.gradients.clone();
            all.push(whole.out.clone());
            let joined = Tokens {
                q: all[0].clone(),
                k: all[1].clone(),
                v: all[2].clone(),
                d_out: whole.out.clone(),
                parameters: all[3..all.len() - 1].to_vec(),
                ..tokens.clone()
            };
            for (part, own) in [(joined.part(0..cut), &back), (joined.part(cut..150), &after)] {
                assert_close("out", &own.out, &part.d_out);
                let expected = [vec![part.q, part.k, part.v], part.parameters].concat();
                for (n, (got, expected)) in own.gradients.iter().zip(&expected).enumerate() {
                    assert_close(&format!("{attention:?} cut {cut}: gradient {n}"), got, expected);
                }
            }
        }
        let mut state = empty;
        for token in 0..150 {
            let one = tokens.part(token..token + 1);
            let parameters: Vec<&[f64]> = one.parameters.iter().map(Vec::as_slice).collect();
            let mut out = vec![0.0; one.d_out.len()];
            let input = Token { q: &one.q, k: &one.k, v: &one.v, parameters: &parameters };
            attention.step(&input, &mut state, &mut out).unwrap();
            let expected = Tokens { d_out: whole.out.clone(), ..tokens.clone() }.part(token..token + 1).d_out;
            assert_close(&format!("{attention:?}: step {token}"), &out, &expected);
        }
        assert_close("state after steps", state.numbers(), whole.final_state.numbers());
    }
}

/// States add up, with gradients, where a token's addition does not depend on those before it.
#[test]
fn states_of_sums_add_up() {
    for attention in attentions() {
        let tokens = Tokens::new(&attention, STREAM);
        let states = [0..70, 70..150, 0..150].map(|range| tokens.part(range).run(&attention, None, None).final_state);
        let [earlier, later, whole] = &states;
        let combined = attention.combine(earlier, later, &[]);
        if attention.update == Update::Delta {
            let error = combined.unwrap_err().to_string();
            assert!(error.contains("earlier state to the call"), "{error}");
            continue;
        }
        let combined = combined.unwrap();
        assert_close("sum", combined.numbers(), whole.numbers());
        let d = State::from_numbers(whole.shape(), draw(7, whole.numbers().len())).unwrap();
        let back = attention.combine_backward(earlier, later, &[], &d).unwrap();
        let used = STREAM.head_dim * STREAM.value_dim
            + attention.parameters(&STREAM).iter().map(|p| p.len() / 600).sum::<usize>();
        let loss = |earlier: &State<f64>, later: &State<f64>| -> f64 {
            let sum = attention.combine(earlier, later, &[]).unwrap();
            let heads = sum.numbers().chunks(sum.shape().head_len()).zip(d.numbers().chunks(sum.shape().head_len()));
            heads.flat_map(|(x, d)| x[..used].iter().zip(&d[..used])).map(|(x, d)| x * d).sum()
        };
        for at in [0, 1, 40, used - 1] {
            for (which, gradient) in [&back.earlier, &back.later].into_iter().enumerate() {
                let moved = |step: f64| {
                    let mut both = [earlier, later].map(|state| state.numbers().to_vec());
                    both[which][at] += step;
                    let [a, b] = both.map(|numbers| State::from_numbers(whole.shape(), numbers).unwrap());
                    loss(&a, &b)
                };
                let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!(
                    (gradient.numbers()[at] - expected).abs() < 1e-6 * expected.abs().max(1.0),
                    "{attention:?} {which} {at}"
                );
            }
        }
    }
}

/// In `f32`, relative to the largest output: the errors of a chunked call and of a token at a time, beside the recurrence in `f64`.
fn errors_of(attention: &GatedAttention, tokens: &Tokens) -> [f64; 2] {
    let narrow = |x: &[f64]| -> Vec<f32> { x.iter().map(|&x| x as f32).collect() };
    let rounded = |x: &[f64]| -> Vec<f64> { x.iter().map(|&x| f64::from(x as f32)).collect() };
    let [q, k, v] = [&tokens.q, &tokens.k, &tokens.v].map(|x| rounded(x));
    let parameters = tokens.parameters.iter().map(|x| rounded(x)).collect();
    let tokens = Tokens { q, k, v, parameters, ..tokens.clone() };
    let parameters: Vec<&[f64]> = tokens.parameters.iter().map(Vec::as_slice).collect();
    let call = Call::row_major(tokens.dims, [&tokens.q, &tokens.k, &tokens.v]).with_parameters(&parameters);
    let expected = attention.reference(&call.with_mask(Mask::causal())).unwrap().out;
    let cast = |tokens: &Tokens| {
        let parameters: Vec<Vec<f32>> = tokens.parameters.iter().map(|x| narrow(x)).collect();
        ([&tokens.q, &tokens.k, &tokens.v].map(|x| narrow(x)), parameters)
    };
    let ([q, k, v], parameters) = cast(&tokens);
    let of_f32: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
    let call = Call::row_major(tokens.dims, [&q, &k, &v]).with_parameters(&of_f32).with_mask(Mask::causal());
    let mut out = vec![0.0f32; expected.len()];
    let to = Output::new(ViewMut::contiguous(&mut out, tokens.dims.out()));
    attention.forward(&call, to, &mut Scratch::new()).unwrap();
    let scale = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let error = |got: &[f32], expected: &[f64]| {
        got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max) / scale
    };
    let expected = Tokens { d_out: expected, ..tokens.clone() };
    let mut state = Kernel::<f32>::empty_state(attention, &tokens.dims).unwrap();
    let by_steps = (0..tokens.dims.keys).map(|token| {
        let one = expected.part(token..token + 1);
        let ([q, k, v], parameters) = cast(&one);
        let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
        let mut out = vec![0.0; one.d_out.len()];
        attention.step(&Token { q: &q, k: &k, v: &v, parameters: &parameters }, &mut state, &mut out).unwrap();
        error(&out, &one.d_out)
    });
    [by_steps.fold(0.0, f64::max), error(&out, &expected.d_out)]
}

/// A chunk is as exact as the recurrence.
fn assert_as_exact_as_steps(attention: &GatedAttention, tokens: &Tokens, what: &str) {
    let [steps, chunked] = errors_of(attention, tokens);
    assert!(chunked <= 2.0 * steps + 1e-6, "{attention:?} {what}: {chunked:e}, token by token {steps:e}");
}

/// A gate that forgets at once beside ones that never do, `β` at its ends, keys that repeat: where the triangle of a chunk is
/// ill-conditioned, it is solved as exactly as the recurrence runs.
#[test]
fn awkward_gates_are_exact() {
    let dims = Dims::square(1, 2, 200, 16);
    for attention in attentions() {
        let mut tokens = Tokens::new(&attention, dims);
        let names: Vec<_> = attention.parameters(&dims).iter().map(|parameter| parameter.name).collect();
        for beta in [0.0, 1.0, 2.0] {
            for repeated in [false, true] {
                for (name, numbers) in names.iter().zip(&mut tokens.parameters) {
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
                    let first = tokens.k[..16].to_vec();
                    tokens.k.chunks_mut(16).for_each(|key| key.copy_from_slice(&first));
                }
                if attention.update == Update::Delta && beta == 0.0 {
                    continue;
                }
                assert_as_exact_as_steps(&attention, &tokens, &format!("β {beta} repeated {repeated}"));
            }
        }
    }
}

/// Rounding does not grow with the length.
#[test]
fn long_sequences_keep_their_accuracy() {
    for attention in attentions() {
        let dims = Dims { value_dim: 4, ..Dims::square(1, 1, 65_536, 8) };
        let tokens = Tokens::new(&attention, dims);
        assert_as_exact_as_steps(&attention, &tokens, "65,536 tokens");
    }
}

/// A decay that leaves next to nothing has next to no gradient: one that is the small difference of large sums would be all rounding.
#[test]
fn gradients_of_strong_decays_are_exact() {
    for attention in attentions().filter(|attention| attention.gate != Gate::None) {
        let dims = Dims::square(1, 2, 150, 16);
        let mut tokens = Tokens::new(&attention, dims);
        tokens.parameters[0].iter_mut().enumerate().for_each(|(n, g)| *g = -6.0 - (n % 5) as f64);
        let subject = Subject::new(attention, Assumptions::default());
        let case = Case { causal: true, ..Case::new(dims, true) };
        let Tokens { q, k, v, parameters, d_out, .. } = tokens;
        let per_key = attention.parameters(&dims).iter().map(per_key).collect();
        let inputs = Inputs { q, k, v, parameters, per_key, d_out };
        let (_, expected) = execute::both::<f64>(&subject, &case, &inputs).unwrap();
        let (_, got) = execute::both::<f32>(&subject, &case, &inputs.cast()).unwrap();
        let (got, expected) = (&got.gradients[3], &expected.gradients[3]);
        let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let error = got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(error <= 2e-6 * largest, "{attention:?}: off by {error:e} of {largest:e}");
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
            let tokens = Tokens::new(&attention, dims);
            let empty = Kernel::<f64>::empty_state(&attention, &dims).unwrap();
            let answer = tokens.run(&attention, Some(&empty), Some(&empty));
            assert!(answer.out.iter().all(|&x| x == 0.0 || head_dim > 0), "{attention:?} {dims:?}");
            assert!(answer.gradients.iter().flatten().all(|x| x.is_finite()), "{attention:?} {dims:?}");
        }
    }
}

/// What is wrong is named.
#[test]
fn wrong_gates_are_refused() {
    let attention = GatedAttention::default();
    let tokens = Tokens::new(&attention, STREAM);
    let refused = |change: &dyn Fn(&mut Tokens), mask: Mask<'_>| -> String {
        let mut tokens = tokens.clone();
        change(&mut tokens);
        let parameters: Vec<&[f64]> = tokens.parameters.iter().map(Vec::as_slice).collect();
        let call = Call::row_major(tokens.dims, [&tokens.q, &tokens.k, &tokens.v]).with_parameters(&parameters);
        attention.check(&call.with_mask(mask)).unwrap_err().to_string()
    };
    let causal = Mask::causal();
    assert!(
        refused(&|t| t.parameters[0][7] = 0.5, causal)
            .contains("log_decay: expected numbers that are at most 0, got 0.5")
    );
    assert!(refused(&|t| t.parameters[1][7] = 2.5, causal).contains("beta: expected numbers from 0 to 2, got 2.5"));
    assert!(refused(&|t| t.parameters[1][7] = -0.5, causal).contains("got -0.5"));
    assert!(refused(&|t| _ = t.parameters[0].pop(), causal).contains("log_decay"));
    assert!(refused(&|_| (), Mask::bidirectional()).contains("causal"));
    assert!(refused(&|_| (), causal.with_offset(1)).contains("offset"));
    let other = GatedAttention { gate: Gate::None, ..attention };
    let state = Kernel::<f64>::empty_state(&other, &STREAM).unwrap();
    let parameters: Vec<&[f64]> = tokens.parameters.iter().map(Vec::as_slice).collect();
    let call = Call::row_major(tokens.dims, [&tokens.q, &tokens.k, &tokens.v]).with_parameters(&parameters);
    let error = attention.check(&call.with_mask(causal).with_initial_state(&state)).unwrap_err().to_string();
    assert!(error.contains("options"), "{error}");
}
