//! States: whole = chunk after chunk = token by token, and the states agree too.

use std::ops::Range;

use longspan_kernels::{Dims, Output, Scratch, State, ViewMut};

use crate::accuracy::{forward_scale, level};
use crate::case::{Case, Inputs, KeyMask};
use crate::compare::{Failure, close, ensure, same_bits};
use crate::execute;
use crate::isolation::{masked_part, part, rows_of};
use crate::random::Random;
use crate::subject::{Number, Subject};

/// The numbers of a state with its sums rescaled to the exponents of `to` and its ring rotated to the start of that of
/// `to`, so that states that differ in nothing else can be compared.
pub(crate) fn relative_to<T: Number>(state: &State<T>, to: &State<f64>) -> Vec<f64> {
    let shape = state.shape();
    let bring = match shape.mechanism {
        "toeplitz" => bring_keys,
        name if name.starts_with("aft-") => bring_channels,
        // Sums relative to nothing.
        "gated" | "delta" => |_: [usize; 6], _: &mut [f64], _: &[f64]| (),
        _ => bring_sums,
    };
    let mut numbers: Vec<f64> = state.numbers().iter().map(|x| x.to_f64()).collect();
    for (head, to) in numbers.chunks_exact_mut(shape.head_len()).zip(to.numbers().chunks_exact(shape.head_len())) {
        bring(shape.parts, head, to);
    }
    numbers
}

/// Brings the exponent `at` to that of `to`; returns the factor of what is relative to it.
fn bring_exponent(head: &mut [f64], to: &[f64], at: usize) -> f64 {
    let own = std::mem::replace(&mut head[at], to[at]);
    if own == to[at] { 1.0 } else { (own - to[at]).exp() }
}

/// One head's state of sums and a ring.
fn bring_sums([sum, keys, marks, row, ring, _]: [usize; 6], head: &mut [f64], to: &[f64]) {
    let sums = sum + keys;
    let factor = bring_exponent(head, to, sums);
    head[..sums].iter_mut().for_each(|x| *x *= factor);
    if ring > 0 {
        let (own, other) = (head[sums + 1] as usize, to[sums + 1] as usize);
        let start = sums + marks + row;
        head[start..][..ring].rotate_left(own * row);
        head[start..][..ring].rotate_right(other * row);
        head[sums + 1] = to[sums + 1];
    }
}

/// Of Toeplitz attention, in which each token of the ring has an exponent too, and its slot in the ring follows from its
/// position in the sequence.
fn bring_keys([sum, keys, marks, ring_keys, exponents, _]: [usize; 6], head: &mut [f64], to: &[f64]) {
    let ring = sum + keys + marks;
    let far = bring_exponent(head, to, sum + keys + 2);
    head[..sum + keys].iter_mut().for_each(|x| *x *= far);
    for row in 0..exponents {
        let own = bring_exponent(head, to, ring + ring_keys + row);
        let width = ring_keys / exponents;
        head[ring + row * width..][..width].iter_mut().for_each(|x| *x *= own);
    }
}

/// Of attention-free transformers, which have an exponent for each channel or one for all.
fn bring_channels([width, exponents, ..]: [usize; 6], head: &mut [f64], to: &[f64]) {
    for n in 0..exponents {
        let factor = bring_exponent(head, to, width + exponents + n);
        // An empty sum is 0 relative to any exponent.
        if head[width + n] == 0.0 {
            continue;
        }
        let channels = if exponents == width { n..n + 1 } else { 0..width };
        head[channels].iter_mut().for_each(|x| *x *= factor);
        head[width + n] *= factor;
    }
}

/// Checks a state against the one in `f64`, with the state of the magnitudes as scale.
fn close_states<T: Number>(
    what: &str,
    got: &State<T>,
    expected: &State<f64>,
    scale: &State<f64>,
    terms: usize,
) -> Result<(), Failure> {
    ensure(got.shape() == expected.shape(), || format!("{what}: shape {:?}", got.shape()))?;
    // Already rounded to T: the conversion back loses nothing.
    let got: Vec<T> = relative_to(got, expected).into_iter().map(T::from_f64).collect();
    close(what, &got, expected.numbers(), &relative_to(scale, expected), terms)
}

/// The state of the magnitudes: the scale of the numbers of the final state.
fn state_scale(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<State<f64>, Failure> {
    let mut absolute = inputs.clone();
    absolute.v.iter_mut().for_each(|x| *x = x.abs());
    if subject.assumptions.signed_features {
        absolute.k.iter_mut().for_each(|x| *x = x.abs());
    }
    let state = execute::forward_state(subject, case, &absolute, None)?.1;
    if !subject.assumptions.turned {
        return Ok(state);
    }
    let mut numbers = state.numbers().to_vec();
    // Only the sums over features, and the exponents of cached keys, may cancel.
    let [sum, keys, marks, ring, exponents, _] = state.shape().parts;
    let kept = state.shape().mechanism == "toeplitz";
    for head in numbers.chunks_mut(state.shape().head_len().max(1)) {
        level(&mut head[..sum + keys]);
        let exponents = if kept { &mut head[sum + keys + marks + ring..][..exponents] } else { &mut [] };
        let largest = exponents.iter().filter(|x| x.is_finite()).fold(0.0f64, |largest, x| largest.max(x.abs()));
        exponents.iter_mut().filter(|x| x.is_finite()).for_each(|x| *x = largest);
    }
    Ok(State::from_numbers(state.shape(), numbers)?)
}

/// Whether a piece of a sequence is one call or single steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece {
    Chunk,
    Steps,
}

/// Ragged pieces of a sequence: empty ones, single tokens, ones longer than a chunk of the kernels.
pub(crate) fn pieces(random: &mut Random, length: usize) -> Vec<(Range<usize>, Piece)> {
    let mut pieces = vec![(0..0, Piece::Chunk)];
    let mut start = 0;
    while start < length {
        let piece = if random.chance(0.3) { Piece::Steps } else { Piece::Chunk };
        let longest = if piece == Piece::Steps { 5 } else { [1, 7, 64, 65, 130][random.below(5)] };
        let end = (start + 1 + random.below(longest)).min(length);
        pieces.push((start..end, piece));
        start = end;
    }
    pieces.push((length..length, Piece::Chunk));
    pieces
}

/// Outputs and final state of a causal sequence are the same computed whole, in ragged chunks and steps, and step by
/// step. The case must have as many queries as keys, offset 0 and all keys.
pub fn pieces_make_the_whole<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(subject, case);
    pieces_make_the_whole_of::<T>(subject, case, &inputs)
}

/// The same on given numbers.
pub fn pieces_make_the_whole_of<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<f64>,
) -> Result<(), Failure> {
    let dims = &case.dims;
    assert!(case.causal && case.offset == 0 && dims.queries == dims.keys && case.keys == KeyMask::All, "{case:?}");
    let (expected, expected_state) = execute::forward_state(subject, case, inputs, None)?;
    let scale = forward_scale(subject, case, inputs)?;
    let state_scale = state_scale(subject, case, inputs)?;

    let cast = inputs.cast::<T>();
    let (whole, whole_state) = execute::forward_state(subject, case, &cast, None)?;
    close("out taken whole", &whole.out, &expected.out, &scale.out, case.terms())?;
    close_states("state taken whole", &whole_state, &expected_state, &state_scale, case.terms())?;

    let mut random = Random::new(case.seed ^ 0x57);
    let ragged = pieces(&mut random, dims.queries);
    let all_steps = vec![(0..dims.queries, Piece::Steps)];
    for plan in [ragged, all_steps] {
        let mut state = T::mechanism(subject).empty_state(dims)?;
        let mut out = vec![execute::nan::<T>(); whole.out.len()];
        for (tokens, piece) in &plan {
            let rows = match piece {
                Piece::Steps => execute::steps(subject, case, &cast, tokens.clone(), &mut state)?,
                Piece::Chunk => {
                    let (piece, numbers) = part(case, &cast, tokens.clone(), tokens.clone());
                    let (forward, next) = execute::forward_state(subject, &piece, &numbers, Some(&state))?;
                    state = next;
                    forward.out
                }
            };
            let width = tokens.len() * dims.value_dim;
            for head in 0..dims.batch * dims.heads {
                out[(head * dims.queries + tokens.start) * dims.value_dim..][..width]
                    .copy_from_slice(&rows[head * width..][..width]);
            }
        }
        let what = format!("out in pieces {plan:?}");
        close(&what, &out, &expected.out, &scale.out, case.terms())?;
        close_states(&format!("state after pieces {plan:?}"), &state, &expected_state, &state_scale, case.terms())?;
    }
    Ok(())
}

/// The states of ragged pieces, each computed from the empty state, add up to that of the whole in any order of
/// additions, and a sequence continues from a sum as it would from the state itself.
pub fn states_add_up<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    states_add_up_of::<T>(subject, case, &execute::random(subject, case))
}

/// The same on given numbers.
pub fn states_add_up_of<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<(), Failure> {
    let dims = &case.dims;
    let mut random = Random::new(case.seed ^ 0xADD);
    let cast = inputs.cast::<T>();
    let mechanism = T::mechanism(subject);
    let parameters: Vec<&[T]> = cast.parameters.iter().map(Vec::as_slice).collect();
    let mut apart = Vec::new();
    for (tokens, piece) in pieces(&mut random, dims.keys) {
        let mut state = mechanism.empty_state(dims)?;
        if piece == Piece::Steps {
            execute::steps(subject, case, &cast, tokens.clone(), &mut state)?;
        } else {
            let (piece, numbers) = part(case, &cast, tokens.clone(), tokens.clone());
            state = execute::forward_state(subject, &piece, &numbers, None)?.1;
        }
        apart.push((tokens, state));
    }
    // Adds any two neighbours until one state is left; on the way, continues the sequence from some of the sums.
    while apart.len() > 1 {
        let at = random.below(apart.len() - 1);
        let (later, second) = apart.remove(at + 1);
        let (earlier, first) = &mut apart[at];
        *first = mechanism.combine(first, &second, &parameters)?;
        *earlier = earlier.start..later.end;
        let rest = earlier.end..(earlier.end + 70).min(dims.keys);
        if earlier.start == 0 && random.chance(0.5) && !rest.is_empty() {
            let (known, numbers) = part(case, inputs, 0..rest.end, 0..rest.end);
            let expected = execute::forward(subject, &known, &numbers)?;
            let scale = forward_scale(subject, &known, &numbers)?;
            let (piece, numbers) = part(case, &cast, rest.clone(), rest.clone());
            let (got, _) = execute::forward_state(subject, &piece, &numbers, Some(first))?;
            let cut = |x: &[f64]| rows_of(x, [rest.end, dims.value_dim], &rest);
            let what = format!("out of tokens {rest:?} from a sum of states");
            close(&what, &got.out, &cut(&expected.out), &cut(&scale.out), case.terms())?;
        }
    }
    let expected = execute::forward_state(subject, case, inputs, None)?.1;
    let scale = state_scale(subject, case, inputs)?;
    close_states("sum of the states of all pieces", &apart[0].1, &expected, &scale, case.terms())
}

/// Rows of a bidirectional sequence are the same where keys beyond a mechanism's reach are given as states. The case must have as
/// many queries as keys, offset 0 and all keys; passes where keys can't be given as states.
pub fn pieces_of_both_directions<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let (dims, mechanism) = (&case.dims, T::mechanism(subject));
    let Some(reach) = mechanism.reach() else { return Ok(()) };
    let inputs = execute::random(subject, case);
    let expected = execute::forward(subject, case, &inputs)?;
    let scale = forward_scale(subject, case, &inputs)?;
    let cast = inputs.cast::<T>();
    let state = |keys: Range<usize>| {
        let (piece, numbers) = part(&Case { causal: true, ..case.clone() }, &cast, 0..0, keys);
        Ok::<_, Failure>(execute::forward_state(subject, &piece, &numbers, None)?.1)
    };
    let mut random = Random::new(case.seed ^ 0xB0);
    for (rows, _) in pieces(&mut random, dims.queries) {
        let mut beyond = || reach + random.below(40);
        let keys = rows.start.saturating_sub(beyond())..(rows.end + beyond()).min(dims.keys);
        let outside = [state(0..keys.start)?, state(keys.end..dims.keys)?];
        let (piece, numbers) = part(case, &cast, rows.clone(), keys.clone());
        let piece = Case { offset: (rows.start - keys.start) as isize, ..piece };
        let mut out = vec![execute::nan::<T>(); execute::len(piece.dims.out())];
        numbers.call(&piece, None, |call| {
            let output = Output::new(ViewMut::contiguous(&mut out, piece.dims.out()));
            mechanism.forward(&call.with_outside(outside.each_ref()), output, &mut Scratch::new())
        })?;
        let cut = |x: &[f64]| rows_of(x, [dims.queries, dims.value_dim], &rows);
        let what = format!("rows {rows:?} of a call of the keys {keys:?}");
        close(&what, &out, &cut(&expected.out), &cut(&scale.out), case.terms())?;
    }
    Ok(())
}

/// A state that was stored and loaded, or whose batch entries were reordered and repeated, continues as the original
/// would.
pub fn states_are_values<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    if dims.queries < 2 || dims.batch == 0 {
        return Ok(());
    }
    let inputs = execute::random(subject, case).cast::<T>();
    let middle = dims.queries / 2;
    let (first, numbers) = part(case, &inputs, 0..middle, 0..middle);
    let state = execute::forward_state(subject, &first, &numbers, None)?.1;
    let mut loaded = State::from_numbers(state.shape(), state.numbers().to_vec())?;
    let mut original = state.clone();
    let expected = execute::steps(subject, case, &inputs, middle..dims.queries, &mut original)?;
    let got = execute::steps(subject, case, &inputs, middle..dims.queries, &mut loaded)?;
    same_bits("out after loading a state", &got, &expected)?;

    // The last entry first, then every entry from the first: one comes twice.
    let order: Vec<usize> = std::iter::once(dims.batch - 1).chain(0..dims.batch).collect();
    let mut beams = state.select(&order)?;
    let pick = |x: &[T]| -> Vec<T> {
        let entry = x.len() / dims.batch;
        order.iter().flat_map(|&b| x[b * entry..(b + 1) * entry].to_vec()).collect()
    };
    let picked = Inputs {
        q: pick(&inputs.q),
        k: pick(&inputs.k),
        v: pick(&inputs.v),
        d_out: pick(&inputs.d_out),
        parameters: inputs
            .parameters
            .iter()
            .zip(&inputs.per_key)
            .map(|(x, &n)| if n == 0 { x.clone() } else { pick(x) })
            .collect(),
        per_key: inputs.per_key.clone(),
    };
    let wide = Case { dims: Dims { batch: order.len(), ..*dims }, ..case.clone() };
    let got = execute::steps(subject, &wide, &picked, middle..dims.queries, &mut beams)?;
    same_bits("out of selected states", &got, &pick(&expected))
}

/// Sequences of different lengths leave the states that each would alone: trailing padding does not enter a state.
pub fn lengths_end_the_sequence<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let inputs = execute::random(subject, case).cast::<T>();
    let mut random = Random::new(case.seed ^ 0x1E);
    let lengths: Vec<usize> = (0..dims.batch).map(|_| random.below(dims.keys + 1)).collect();
    let padding: Vec<bool> = lengths.iter().flat_map(|&n| (0..dims.keys).map(move |j| j >= n)).collect();
    for keys in [KeyMask::Lengths(lengths.clone()), KeyMask::Padding(padding)] {
        let case = Case { keys, ..case.clone() };
        let state = execute::forward_state(subject, &case, &inputs, None)?.1;
        for (batch, &length) in lengths.iter().enumerate() {
            let (alone, numbers) = part(&case, &inputs, 0..length, 0..length);
            let expected = execute::forward_state(subject, &alone, &numbers, None)?.1.select(&[batch])?;
            let what = format!("state of batch {batch} of length {length} under {:?}", case.keys);
            same_bits(&what, state.select(&[batch])?.numbers(), expected.numbers())?;
        }
    }
    Ok(())
}

/// Ignored keys in the middle of a sequence still count as positions across chunks.
pub fn ignored_keys_keep_their_place<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let mut random = Random::new(case.seed ^ 0x9A);
    let cut = dims.keys / 2;
    // The last key of either part takes part, so that there is no trailing padding.
    let ignored: Vec<bool> = (0..dims.batch * dims.keys)
        .map(|n| random.chance(0.4) && ![cut, dims.keys].contains(&(n % dims.keys + 1)))
        .collect();
    let inputs = execute::random(subject, case);
    let whole = Case { keys: KeyMask::Padding(ignored), ..case.clone() };
    let expected = execute::forward(subject, &whole, &inputs)?;
    let scale = forward_scale(subject, &whole, &inputs)?;
    let cast = inputs.cast::<T>();
    let mut state = None;
    for tokens in [0..cut, cut..dims.keys] {
        let (piece, numbers) = masked_part(&whole, &cast, tokens.clone(), tokens.clone());
        let (forward, next) = execute::forward_state(subject, &piece, &numbers, state.as_ref())?;
        state = Some(next);
        let cut = |x: &[f64]| rows_of(x, [dims.queries, dims.value_dim], &tokens);
        let what = format!("out of tokens {tokens:?} with keys ignored");
        close(&what, &forward.out, &cut(&expected.out), &cut(&scale.out), case.terms())?;
    }
    Ok(())
}
