//! What must have no influence: the future on the past, padding on anything, one sequence on another, and the order of
//! keys where there are no positions.

use std::ops::Range;

use crate::accuracy::{self, forward_scale, gradient_terms};
use crate::case::{Case, Inputs, KeyMask};
use crate::compare::{Failure, close, close_gradients, ensure, same_bits, same_gradients};
use crate::execute::{self, Backward, Forward};
use crate::random::Random;
use crate::subject::{Number, Subject};

/// Results before a change, to be compared with those after it: to the bit, or to rounding where a kernel may split its
/// sums differently because a number is not finite or because sums are relative to the largest key.
struct Untouched<T> {
    forward: Forward<T>,
    backward: Backward<T>,
    forward_scale: Forward<f64>,
    backward_scale: Backward<f64>,
    terms: usize,
}

impl<T: Number> Untouched<T> {
    fn new(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<Self, Failure> {
        let forward_scale = accuracy::forward_scale(subject, case, inputs)?;
        let backward_scale = accuracy::backward_scale(subject, case, inputs)?;
        let inputs = inputs.cast::<T>();
        let (forward, backward) = execute::both(subject, case, &inputs)?;
        Ok(Self { forward, backward, forward_scale, backward_scale, terms: gradient_terms(case) })
    }

    fn compare(
        &self,
        what: &str,
        got: &[T],
        clean: &[T],
        scale: &[f64],
        span: Range<usize>,
        bits: bool,
    ) -> Result<(), Failure> {
        if bits {
            return same_bits(what, &got[span.clone()], &clean[span]);
        }
        let expected: Vec<f64> = clean[span.clone()].iter().map(|x| x.to_f64()).collect();
        close(what, &got[span.clone()], &expected, &scale[span], self.terms)
    }

    fn out(&self, what: &str, got: &Forward<T>, span: Range<usize>, bits: bool) -> Result<(), Failure> {
        self.compare(what, &got.out, &self.forward.out, &self.forward_scale.out, span, bits)
    }

    fn gradient(
        &self,
        what: &str,
        got: &Backward<T>,
        which: usize,
        span: Range<usize>,
        bits: bool,
    ) -> Result<(), Failure> {
        let (clean, scale) = (&self.backward.gradients[which], &self.backward_scale.gradients[which]);
        self.compare(what, &got.gradients[which], clean, scale, span, bits)
    }
}

/// A key changes only the rows that see it, even if it becomes NaN or infinite, forward and backward. And a value that
/// is not finite reaches the rows that see it.
pub fn unseen_keys_do_not_matter<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let key_dim = execute::key_dim(subject, dims);
    if dims.keys == 0 || dims.batch == 0 || dims.heads == 0 {
        return Ok(());
    }
    let inputs = execute::random(subject, case);
    let clean = Untouched::<T>::new(subject, case, &inputs)?;
    let inputs = inputs.cast::<T>();
    let mut random = Random::new(case.seed ^ 0xF);
    let (nan, infinite) = (execute::nan::<T>(), T::from_f64(f64::INFINITY));
    let (large, usual) = (T::from_f64(37.0), T::from_f64(-2.5));
    let before = subject.assumptions.queries_before;
    for (key, value) in [(large, large), (nan, nan), (usual, nan), (infinite, usual), (usual, infinite)] {
        let (batch, j) = (random.below(dims.batch), random.below(dims.keys));
        let mut changed = inputs.clone();
        changed.overwrite_key(dims, batch, j, key, value);
        let (got, back) = execute::both(subject, case, &changed)?;
        let finite = T::is_finite(key) && T::is_finite(value);
        for b in 0..dims.batch {
            let bits = b != batch || (finite && subject.assumptions.true_denominators);
            for head in 0..dims.heads {
                for i in 0..dims.queries {
                    let row = (b * dims.heads + head) * dims.queries + i;
                    let span = row * dims.value_dim..(row + 1) * dims.value_dim;
                    let what = |name: &str| format!("{name} row {i} of head {head}, key {j} = {key}, value {value}");
                    if b == batch && case.sees(b, i, j) {
                        let shows = subject.assumptions.positive_weights && !T::is_finite(value);
                        ensure(!shows || got.out[span].iter().all(|x| !x.is_finite()), || {
                            format!("{}: a value that is not finite left no trace", what("out"))
                        })?;
                        continue;
                    }
                    clean.out(&what("out"), &got, span, bits)?;
                    if b == batch && (i..dims.queries.min(i + before + 1)).any(|row| case.sees(b, row, j)) {
                        continue;
                    }
                    let span = row * dims.head_dim..(row + 1) * dims.head_dim;
                    clean.gradient(&what("dq"), &back, 0, span, bits)?;
                }
            }
            // Gradients of other batch entries do not change at all.
            if b != batch {
                for (name, n, width) in [("dk", 1, key_dim), ("dv", 2, dims.value_dim)] {
                    let entry = dims.kv_heads * dims.keys * width;
                    let what = format!("{name} of batch {b} after key {j} of batch {batch} became {key}, {value}");
                    clean.gradient(&what, &back, n, b * entry..(b + 1) * entry, true)?;
                }
            }
        }
    }
    Ok(())
}

/// A query that is NaN, or whose output's gradient is, changes no other row, and no gradient of a key that it does not
/// see.
pub fn rows_are_independent<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let key_dim = execute::key_dim(subject, dims);
    if dims.queries == 0 || dims.batch == 0 || dims.heads == 0 {
        return Ok(());
    }
    let inputs = execute::random(subject, case);
    let clean = Untouched::<T>::new(subject, case, &inputs)?;
    let mut random = Random::new(case.seed ^ 0xA);
    let (batch, i) = (random.below(dims.batch), random.below(dims.queries));
    let mut changed = inputs.cast::<T>();
    for head in 0..dims.heads {
        let row = (batch * dims.heads + head) * dims.queries + i;
        changed.q[row * dims.head_dim..][..dims.head_dim].fill(execute::nan());
        changed.d_out[row * dims.value_dim..][..dims.value_dim].fill(execute::nan());
    }
    let (got, back) = execute::both(subject, case, &changed)?;
    // The rows that the query is a part of, and the queries that those are made of.
    let before = subject.assumptions.queries_before;
    let rows = i..dims.queries.min(i + before + 1);
    let queries = i.saturating_sub(before)..rows.end;
    let elsewhere = |row: usize, places: &Range<usize>| {
        !places.contains(&(row % dims.queries)) || row / (dims.queries * dims.heads) != batch
    };
    for row in 0..dims.batch * dims.heads * dims.queries {
        let what = |name: &str| format!("{name} row {row} after row {i} of batch {batch} became NaN");
        if elsewhere(row, &rows) {
            clean.out(&what("out"), &got, row * dims.value_dim..(row + 1) * dims.value_dim, true)?;
        }
        if elsewhere(row, &queries) {
            clean.gradient(&what("dq"), &back, 0, row * dims.head_dim..(row + 1) * dims.head_dim, true)?;
        }
    }
    for b in 0..dims.batch {
        let unseen = |&j: &usize| b != batch || !rows.clone().any(|row| case.sees(batch, row, j));
        for j in (0..dims.keys).filter(unseen) {
            for head in 0..dims.kv_heads {
                let token = (b * dims.kv_heads + head) * dims.keys + j;
                for (name, n, width) in [("dk", 1, key_dim), ("dv", 2, dims.value_dim)] {
                    let what =
                        format!("{name} of key {j} of batch {b}, which row {i} of batch {batch} (NaN) cannot see");
                    clean.gradient(&what, &back, n, token * width..(token + 1) * width, b != batch)?;
                }
            }
        }
    }
    Ok(())
}

/// The contents of padding change no output and no gradient, to the bit.
pub fn padding_does_not_matter<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let filled = |key: f64, value: f64| {
        let mut inputs = execute::random(subject, case).cast::<T>();
        for batch in 0..dims.batch {
            for j in (0..dims.keys).filter(|&j| case.ignores(batch, j)) {
                inputs.overwrite_key(dims, batch, j, T::from_f64(key), T::from_f64(value));
            }
        }
        inputs
    };
    let inputs = filled(0.0, 0.0);
    let (clean, clean_back) = execute::both(subject, case, &inputs)?;
    for (key, value) in [(f64::NAN, f64::NAN), (1e30, -1e30), (f64::INFINITY, f64::INFINITY), (0.5, 0.5)] {
        let inputs = filled(key, value);
        let padded = format!("with padding of {key} and {value}");
        let got = execute::forward(subject, case, &inputs)?;
        same_bits(&format!("out {padded}"), &got.out, &clean.out)?;
        same_bits(&format!("denominators {padded}"), &got.denominators, &clean.denominators)?;
        let back = execute::backward(subject, case, &inputs, &got)?;
        same_gradients(&padded, &back, &clean_back)?;
        accuracy::no_gradient_where_nothing_is_seen(subject, case, &back)?;
    }
    Ok(())
}

/// The rows `tokens` of every head of a row-major tensor, whose heads have `length` rows of `width` numbers.
pub(crate) fn rows_of<T: Copy>(x: &[T], [length, width]: [usize; 2], tokens: &Range<usize>) -> Vec<T> {
    let heads = x.chunks((length * width).max(1));
    heads.flat_map(|head| &head[tokens.start * width..tokens.end * width]).copied().collect()
}

/// The parameters of a call on some keys alone.
fn of_keys<T: Number>(inputs: &Inputs<T>, length: usize, keys: &Range<usize>) -> Vec<Vec<T>> {
    let of = |(x, &width): (&Vec<T>, &usize)| if width == 0 { x.clone() } else { rows_of(x, [length, width], keys) };
    inputs.parameters.iter().zip(&inputs.per_key).map(of).collect()
}

/// Adds the gradient of a parameter of a call on some keys alone to that of all.
pub(crate) fn add_of_keys<A: Copy + std::ops::AddAssign>(
    to: &mut [A],
    from: &[A],
    [length, width]: [usize; 2],
    keys: &Range<usize>,
) {
    if width == 0 {
        return to.iter_mut().zip(from).for_each(|(to, &x)| *to += x);
    }
    let heads = to.chunks_mut((length * width).max(1)).zip(from.chunks((keys.len() * width).max(1)));
    for (to, from) in heads {
        to[keys.start * width..keys.end * width].iter_mut().zip(from).for_each(|(to, &x)| *to += x);
    }
}

/// A call on the tokens `queries` and `keys` of every head alone.
pub(crate) fn part<T: Number>(
    case: &Case,
    inputs: &Inputs<T>,
    queries: Range<usize>,
    keys: Range<usize>,
) -> (Case, Inputs<T>) {
    let dims = longspan_kernels::Dims { queries: queries.len(), keys: keys.len(), ..case.dims };
    let (all, key_dim) = (&case.dims, inputs.key_shape(&case.dims)[3]);
    let inputs = Inputs {
        q: rows_of(&inputs.q, [all.queries, all.head_dim], &queries),
        d_out: rows_of(&inputs.d_out, [all.queries, all.value_dim], &queries),
        k: rows_of(&inputs.k, [all.keys, key_dim], &keys),
        v: rows_of(&inputs.v, [all.keys, all.value_dim], &keys),
        parameters: of_keys(inputs, all.keys, &keys),
        per_key: inputs.per_key.clone(),
    };
    (Case { dims, keys: KeyMask::All, ..case.clone() }, inputs)
}

/// The same with the padding of the case.
pub(crate) fn masked_part<T: Number>(
    case: &Case,
    inputs: &Inputs<T>,
    queries: Range<usize>,
    keys: Range<usize>,
) -> (Case, Inputs<T>) {
    let (piece, numbers) = part(case, inputs, queries, keys.clone());
    let padding = match &case.keys {
        KeyMask::Padding(ignored) => KeyMask::Padding(rows_of(ignored, [case.dims.keys, 1], &keys)),
        _ => KeyMask::All,
    };
    (Case { keys: padding, ..piece }, numbers)
}

/// Packed sequences give what each gives alone. Passes where no sequences are packed.
pub fn packed_is_looped<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let KeyMask::Packed { queries, keys } = &case.keys else { return Ok(()) };
    let inputs = execute::random(subject, case);
    let packed = inputs.cast::<T>();
    let (forward, backward) = execute::both(subject, case, &packed)?;
    let packed = Inputs { d_out: forward.out, ..packed };
    let back = Inputs {
        q: backward.gradients[0].clone(),
        k: backward.gradients[1].clone(),
        v: backward.gradients[2].clone(),
        parameters: Vec::new(),
        per_key: Vec::new(),
        d_out: Vec::new(),
    };
    let mut sums: Vec<[Vec<f64>; 2]> =
        inputs.parameters.iter().map(|p| [vec![0.0; p.len()], vec![0.0; p.len()]]).collect();
    for (n, (q, k)) in queries.windows(2).zip(keys.windows(2)).enumerate() {
        let (alone, numbers) = part(case, &inputs, q[0]..q[1], k[0]..k[1]);
        let expected = execute::forward(subject, &alone, &numbers)?;
        let scale = forward_scale(subject, &alone, &numbers)?;
        let got = part(case, &packed, q[0]..q[1], k[0]..k[1]).1;
        close(&format!("out of packed sequence {n}"), &got.d_out, &expected.out, &scale.out, case.terms())?;
        let expected = execute::backward(subject, &alone, &numbers, &expected)?;
        let scale = accuracy::backward_scale(subject, &alone, &numbers)?;
        let back = Inputs { d_out: vec![T::ZERO; packed.d_out.len()], ..back.clone() };
        let got = part(case, &back, q[0]..q[1], k[0]..k[1]).1;
        let got = Backward { gradients: vec![got.q, got.k, got.v] };
        close_gradients(&format!(" of packed sequence {n}"), &got, &expected, &scale, gradient_terms(case))?;
        for (p, [sum, sum_scale]) in sums.iter_mut().enumerate() {
            let (sizes, keys) = ([case.dims.keys, inputs.per_key[p]], k[0]..k[1]);
            add_of_keys(sum, &expected.gradients[3 + p], sizes, &keys);
            add_of_keys(sum_scale, &scale.gradients[3 + p], sizes, &keys);
        }
    }
    for (p, [expected, scale]) in sums.iter().enumerate() {
        let what = format!("gradient of parameter {p}, packed");
        close(&what, &backward.gradients[3 + p], expected, scale, gradient_terms(case))?;
    }
    Ok(())
}

/// Without positions and without a causal mask, shuffled keys give the same outputs and shuffled gradients. Passes
/// elsewhere.
pub fn order_does_not_matter_without_positions<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let key_dim = execute::key_dim(subject, dims);
    if case.causal || subject.assumptions.positions || case.keys != KeyMask::All {
        return Ok(());
    }
    let inputs = execute::random(subject, case);
    let (expected, expected_back) = execute::both(subject, case, &inputs)?;
    let scale = forward_scale(subject, case, &inputs)?;
    let back_scale = accuracy::backward_scale(subject, case, &inputs)?;
    let mut order: Vec<usize> = (0..dims.keys).collect();
    Random::new(case.seed ^ 0x5).shuffle(&mut order);
    let shuffle = |x: &[f64], width: usize| -> Vec<f64> {
        let heads = dims.batch * dims.kv_heads;
        (0..heads)
            .flat_map(|h| order.iter().map(move |&j| h * dims.keys + j))
            .flat_map(|token| x[token * width..][..width].to_vec())
            .collect()
    };
    let shuffled = Inputs { k: shuffle(&inputs.k, key_dim), v: shuffle(&inputs.v, dims.value_dim), ..inputs.clone() };
    let shuffled = shuffled.cast::<T>();
    let got = execute::forward(subject, case, &shuffled)?;
    close("out of shuffled keys", &got.out, &expected.out, &scale.out, case.terms())?;
    let got = execute::backward(subject, case, &shuffled, &got)?;
    for (name, n, width) in [("dk", 1, key_dim), ("dv", 2, dims.value_dim)] {
        let (expected, scale) = (shuffle(&expected_back.gradients[n], width), shuffle(&back_scale.gradients[n], width));
        let what = format!("{name} of shuffled keys");
        close(&what, &got.gradients[n], &expected, &scale, gradient_terms(case))?;
    }
    Ok(())
}
