//! Gradients that pass through states: a sequence in pieces has the gradients of the whole.

use std::ops::Range;

use longspan_kernels::{Dims, Scratch, State};

use crate::accuracy::{self, direction, gradient_terms, is_quotient};
use crate::case::{Case, Inputs, KeyMask};
use crate::compare::{Failure, close_gradients, ensure, same_bits, same_gradients};
use crate::execute::{self, Backward};
use crate::isolation::{add_of_keys, masked_part};
use crate::random::Random;
use crate::streaming::{pieces, relative_to};
use crate::subject::{Number, Subject};
use crate::threads::on_threads;

/// A state whose numbers are all `fill`.
fn filled<T: Number>(like: &State<T>, fill: T) -> Result<State<T>, Failure> {
    Ok(State::from_numbers(like.shape(), vec![fill; like.numbers().len()])?)
}

/// Gradients of a causal sequence taken in `pieces`: forward from state to state, then backward from the last piece to
/// the first, each handing the gradient of its initial state to the one before.
fn in_pieces<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    pieces: &[Range<usize>],
) -> Result<Backward<T>, Failure> {
    let dims = &case.dims;
    let mut states = vec![T::mechanism(subject).empty_state(dims)?];
    let mut outputs = Vec::new();
    for tokens in pieces {
        let (piece, numbers) = masked_part(case, inputs, tokens.clone(), tokens.clone());
        let (forward, state) = execute::forward_state(subject, &piece, &numbers, states.last())?;
        outputs.push(forward);
        states.push(state);
    }
    let mut whole = zeros(inputs);
    let mut d_state: Option<State<T>> = None;
    for (n, tokens) in pieces.iter().enumerate().rev() {
        let (piece, numbers) = masked_part(case, inputs, tokens.clone(), tokens.clone());
        let mut scratch = Scratch::new();
        let run = |scratch: &mut Scratch<T>| -> Result<_, Failure> {
            let mut d_initial = filled(&states[n], execute::nan())?;
            let states = (Some(&states[n]), d_state.as_ref(), Some(&mut d_initial));
            let nan = execute::nan();
            let backward =
                execute::backward_through_states(subject, &piece, &numbers, &outputs[n], states, nan, scratch)?;
            Ok((backward, d_initial))
        };
        let (backward, d_initial) = run(&mut scratch)?;
        let (poisoned, d_poisoned) = run(&mut execute::poisoned(&scratch))?;
        same_gradients("of a piece on poisoned scratch", &poisoned, &backward)?;
        same_bits("gradient of a state on poisoned scratch", d_poisoned.numbers(), d_initial.numbers())?;
        enter(&mut whole, subject, case, inputs, tokens, &backward);
        d_state = Some(d_initial);
    }
    Ok(Backward { gradients: whole })
}

/// Gradients of a case before anything has entered them.
fn zeros<T: Number>(inputs: &Inputs<T>) -> Vec<Vec<T>> {
    let inputs = [&inputs.q, &inputs.k, &inputs.v].into_iter().chain(&inputs.parameters);
    inputs.map(|x| vec![T::ZERO; x.len()]).collect()
}

/// Adds the gradients of a piece to those of the whole.
fn enter<T: Number>(
    whole: &mut [Vec<T>],
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    tokens: &Range<usize>,
    piece: &Backward<T>,
) {
    let dims = &case.dims;
    let widths = [dims.head_dim, execute::key_dim(subject, dims), dims.value_dim];
    let widths =
        widths.map(|width| (width, true)).into_iter().chain(inputs.per_key.iter().map(|&width| (width, false)));
    for ((to, from), (width, rows)) in whole.iter_mut().zip(&piece.gradients).zip(widths) {
        // Rows of no numbers are no learned tensor.
        if width > 0 || !rows {
            add_of_keys(to, from, [dims.keys, width], tokens);
        }
    }
}

/// Gradients of a causal sequence whose `pieces` are taken side by side: the state of each formed apart, all combined, and the
/// gradients of what stands before each piece taken back through the sums. `None` of a mechanism whose sums have no gradients.
fn side_by_side<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    pieces: &[Range<usize>],
) -> Result<Option<Backward<T>>, Failure> {
    let mechanism = T::mechanism(subject);
    let parameters: Vec<&[T]> = inputs.parameters.iter().map(Vec::as_slice).collect();
    let mut before = vec![mechanism.empty_state(&case.dims)?];
    if mechanism.combine_backward(&before[0], &before[0], &parameters, &before[0]).is_err() {
        return Ok(None);
    }
    let mut formed = Vec::new();
    for (n, tokens) in pieces.iter().enumerate() {
        let (piece, numbers) = masked_part(case, inputs, 0..0, tokens.clone());
        formed.push(execute::forward_state(subject, &piece, &numbers, None)?);
        before.push(mechanism.combine(&before[n], &formed[n].1, &parameters)?);
    }
    let (mut whole, mut scratch, nan) = (zeros(inputs), Scratch::new(), execute::nan());
    // The gradient of the state after a piece.
    let mut d_after: Option<State<T>> = None;
    for (n, tokens) in pieces.iter().enumerate().rev() {
        let (piece, numbers) = masked_part(case, inputs, tokens.clone(), tokens.clone());
        let (forward, _) = execute::forward_state(subject, &piece, &numbers, Some(&before[n]))?;
        let mut d_before = filled(&before[n], nan)?;
        let states = (Some(&before[n]), None, Some(&mut d_before));
        let backward =
            execute::backward_through_states(subject, &piece, &numbers, &forward, states, nan, &mut scratch)?;
        enter(&mut whole, subject, case, inputs, tokens, &backward);
        if let Some(d_after) = d_after {
            let (forward, state) = &formed[n];
            let found = mechanism.combine_backward(&before[n], state, &parameters, &d_after)?;
            let (piece, numbers) = masked_part(case, inputs, 0..0, tokens.clone());
            let states = (None, Some(&found.later), None);
            let mut backward =
                execute::backward_through_states(subject, &piece, &numbers, forward, states, nan, &mut scratch)?;
            for (to, from) in backward.gradients[3..].iter_mut().zip(&found.parameters) {
                to.iter_mut().zip(from).for_each(|(to, &x)| *to += x);
            }
            enter(&mut whole, subject, case, inputs, tokens, &backward);
            let sum = d_before.numbers().iter().zip(found.earlier.numbers()).map(|(&a, &b)| a + b).collect();
            d_before = State::from_numbers(d_before.shape(), sum)?;
        }
        d_after = Some(d_before);
    }
    Ok(Some(Backward { gradients: whole }))
}

/// Pieces, and a mask with some keys ignored inside them, but none at their ends: trailing padding does not enter a
/// state.
fn plan(case: &Case) -> (Vec<Range<usize>>, Case) {
    let mut random = Random::new(case.seed ^ 0x6A);
    let pieces: Vec<_> = pieces(&mut random, case.dims.keys).into_iter().map(|(tokens, _)| tokens).collect();
    let ignored = (0..case.dims.batch * case.dims.keys)
        .map(|n| random.chance(0.2) && pieces.iter().all(|piece| piece.end != n % case.dims.keys + 1))
        .collect();
    let keys = if random.chance(0.5) { KeyMask::All } else { KeyMask::Padding(ignored) };
    (pieces, Case { keys, ..case.clone() })
}

/// Gradients of every input of a causal sequence in ragged pieces, chained by those of the states between them, are
/// those of the whole; so are those of pieces side by side, joined by those of the sums of their states. The case must have as many queries as keys, offset 0 and all keys.
pub fn gradients_pass_through_states<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    gradients_pass_through_states_of::<T>(subject, case, &execute::random(subject, case))
}

/// The same on given numbers.
pub fn gradients_pass_through_states_of<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<f64>,
) -> Result<(), Failure> {
    assert!(case.causal && case.offset == 0 && case.dims.queries == case.dims.keys, "{case:?}");
    let (pieces, case) = plan(case);
    let (_, expected) = execute::both::<f64>(subject, &case, inputs)?;
    let scale = accuracy::backward_scale(subject, &case, inputs)?;
    let cast = inputs.cast::<T>();
    let got = [Some(in_pieces(subject, &case, &cast, &pieces)?), side_by_side(subject, &case, &cast, &pieces)?];
    for (how, got) in ["one after the other", "side by side"].into_iter().zip(got) {
        let Some(got) = got else { continue };
        let what = format!(" in pieces {pieces:?} {how} under {:?}", case.keys);
        close_gradients(&what, &got, &expected, &scale, gradient_terms(&case))?;
    }
    Ok(())
}

/// The same bits on any number of threads.
pub fn threads_do_not_matter_to_state_gradients<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(subject, case).cast::<T>();
    let middle = case.dims.keys / 3;
    let on = |threads| on_threads(threads, || in_pieces(subject, case, &inputs, &[0..middle, middle..case.dims.keys]));
    let one = on(1)?;
    for threads in [2, 8] {
        same_gradients(&format!("on {threads} threads"), &on(threads)?, &one)?;
    }
    Ok(())
}

/// One call between two states, and its loss.
struct Link<'a> {
    subject: &'a Subject,
    case: &'a Case,
    /// The initial state, and which of its numbers may be moved: sums, and the values of tokens in the ring.
    initial: Option<(&'a State<f64>, Vec<bool>)>,
    /// The final state of the call as it stands, and the gradient of the loss with respect to it.
    last: State<f64>,
    d_last: State<f64>,
}

impl Link<'_> {
    /// The loss and the sum of its terms' magnitudes.
    fn loss(&self, inputs: &Inputs<f64>, initial: Option<&State<f64>>) -> Result<(f64, f64), Failure> {
        let (forward, last) = execute::forward_state(self.subject, self.case, inputs, initial)?;
        let outputs = forward.out.iter().zip(&inputs.d_out).map(|(a, g)| a * g);
        let numbers = relative_to(&last, &self.last);
        let state = numbers.iter().zip(self.d_last.numbers()).filter(|(_, g)| **g != 0.0).map(|(a, g)| a * g);
        let terms: Vec<f64> = outputs.chain(state).collect();
        Ok((terms.iter().sum(), terms.iter().map(|x| x.abs()).sum()))
    }
}

/// Which numbers of a state have a gradient: all sums, and the keys and values of the tokens in the ring.
fn sums_and_values(state: &State<f64>, value_dim: usize) -> Vec<bool> {
    if state.shape().mechanism == "toeplitz" {
        return sums_and_tokens(state, value_dim);
    }
    let [sum, keys, marks, row, ring, passed] = state.shape().parts;
    if ["gated", "delta"].contains(&state.shape().mechanism) {
        // A sum of log decays may not rise above 0.
        let heads = state.numbers().chunks_exact(state.shape().head_len().max(1));
        return heads.flat_map(|head| (0..head.len()).map(|n| n < sum || n >= sum + keys + marks)).collect();
    }
    let mut moves = Vec::with_capacity(state.numbers().len());
    for head in state.numbers().chunks_exact(state.shape().head_len().max(1)) {
        // An exponent of −∞ means that the sums over keys are empty.
        moves.extend((0..sum + keys).map(|_| head[sum + keys].is_finite()));
        moves.extend((0..marks).map(|_| false).chain((0..row).map(|_| true)));
        for row in head[sum + keys + marks + row..][..ring].chunks_exact(row.max(1)) {
            let there = row.last().is_some_and(|&present| present != 0.0);
            // What is left of a row's weight falls with gates; else it is 1.
            moves.extend((0..row.len()).map(|n| there && (passed > 0 || n + 1 < row.len())));
        }
        moves.extend((0..passed).map(|_| false));
    }
    moves
}

/// The same for Toeplitz states, whose ring holds keys beside values.
fn sums_and_tokens(state: &State<f64>, value_dim: usize) -> Vec<bool> {
    let [sum, keys, marks, ring_keys, exponents, ring_values] = state.shape().parts;
    let mut moves = Vec::with_capacity(state.numbers().len());
    for head in state.numbers().chunks_exact(state.shape().head_len().max(1)) {
        let begun = head[sum + keys + 2].is_finite();
        moves.extend((0..sum + keys).map(|_| begun).chain((0..marks).map(|_| false)));
        let values = &head[head.len() - ring_values..];
        let value = value_dim + 1;
        let key = ring_keys.checked_div(ring_values / value).unwrap_or(0);
        let there = |row: usize| values[(row + 1) * value - 1] != 0.0;
        moves.extend((0..ring_keys).map(|n| there(n / key)));
        moves.extend((0..exponents).map(|_| false));
        moves.extend((0..ring_values).map(|n| there(n / value) && (n + 1) % value != 0));
    }
    moves
}

/// In `f64`: every gradient of a call between two states, that of the initial state too, against difference quotients
/// along random directions. For kernelized and Toeplitz attention, whose states it knows. Cases that cannot have a
/// state are changed so that they can.
pub fn state_gradients_are_difference_quotients(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let mut random = Random::new(case.seed ^ 0x5D);
    let keys = if matches!(case.keys, KeyMask::Packed { .. }) { KeyMask::All } else { case.keys.clone() };
    let case = &Case { causal: true, offset: case.offset.abs(), keys, ..case.clone() };
    let inputs = execute::random(subject, case);
    let length = [0, 1, 5, 30, 70][random.below(5)];
    let dims = Dims { queries: length, keys: length, ..case.dims };
    let before = Case { dims, offset: 0, keys: KeyMask::All, seed: case.seed ^ 0xBEF0, ..case.clone() };
    let initial = execute::forward_state(subject, &before, &execute::random(subject, &before), None)?.1;
    // Without an initial state other algorithms may run.
    let initial = random.chance(0.8).then_some(&initial).map(|state| (state, sums_and_values(state, dims.value_dim)));
    let given = initial.as_ref().map(|(state, _)| *state);
    let (forward, last) = execute::forward_state(subject, case, &inputs, given)?;
    let moves = sums_and_values(&last, dims.value_dim);
    let d_last = moves.iter().map(|&moves| if moves { random.normal() } else { 0.0 }).collect();
    let d_last = State::from_numbers(last.shape(), d_last)?;
    let mut d_initial = initial.as_ref().map(|(state, _)| filled(state, execute::nan())).transpose()?;
    let backward = execute::backward_through_states(
        subject,
        case,
        &inputs,
        &forward,
        (given, Some(&d_last), d_initial.as_mut()),
        execute::nan(),
        &mut Scratch::new(),
    )?;
    let link = Link { subject, case, initial, last, d_last };
    let of_state = d_initial.iter().map(|state| ("gradient of the initial state".to_owned(), state.numbers()));
    let gradients = backward.named().map(|(name, gradient)| (name, gradient.as_slice())).chain(of_state);
    for (which, (name, gradient)) in gradients.enumerate() {
        let mut direction = direction(&mut random, gradient.len());
        let of_state = which == backward.gradients.len();
        if let Some((_, moves)) = link.initial.as_ref().filter(|_| of_state) {
            for ((step, &moves), &d) in direction.iter_mut().zip(moves).zip(gradient) {
                ensure(moves || d == 0.0, || format!("{name} is {d:e} for a number that has none"))?;
                *step = if moves { *step } else { 0.0 };
            }
        }
        is_quotient(&name, gradient, &direction, case.terms() + length, |step| {
            let state = link.initial.as_ref().map(|(state, _)| {
                let mut numbers = state.numbers().to_vec();
                if of_state {
                    numbers.iter_mut().zip(&direction).for_each(|(x, e)| *x += step * e);
                }
                State::from_numbers(state.shape(), numbers)
            });
            link.loss(&inputs.moved(which, step, &direction), state.transpose()?.as_ref())
        })?;
    }
    Ok(())
}
