//! Runs calls on poisoned memory: outputs, gradients and scratch start as NaN, which shows what a kernel fails to write
//! or reads before writing.

use longspan_kernels::{Cotangent, Dims, Error, Gradients, Output, Reference, Scratch, State, Token, View, ViewMut};

use crate::case::{Case, Inputs};
use crate::subject::{Number, Subject};

/// What a forward call gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward<T> {
    /// `[batch, heads, queries, value_dim]`.
    pub out: Vec<T>,
    /// `[batch, heads, queries]`.
    pub denominators: Vec<T>,
}

/// What a backward call gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward<T> {
    /// As q, k, v and then the parameters.
    pub gradients: Vec<Vec<T>>,
}

impl<T> Backward<T> {
    /// The gradients with their names.
    pub fn named(&self) -> impl Iterator<Item = (String, &Vec<T>)> {
        let name = |n: usize| match n {
            0..3 => ["dq", "dk", "dv"][n].to_owned(),
            _ => format!("gradient of parameter {}", n - 3),
        };
        self.gradients.iter().enumerate().map(move |(n, gradient)| (name(n), gradient))
    }
}

/// Scratch as large as `clean` has grown, filled with NaN.
pub(crate) fn poisoned<T: Number>(clean: &Scratch<T>) -> Scratch<T> {
    Scratch::filled(clean.bytes() / size_of::<T>(), nan())
}

/// NaN.
pub fn nan<T: Number>() -> T {
    T::from_f64(f64::NAN)
}

/// Elements of a tensor.
pub fn len(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

/// Random inputs for a case, with the subject's parameters in their range.
pub fn random(subject: &Subject, case: &Case) -> Inputs<f64> {
    let parameters = f64::mechanism(subject).parameters(&case.dims);
    let mut inputs = Inputs::random(case, key_dim(subject, &case.dims), &parameters);
    parameters
        .iter()
        .zip(&mut inputs.parameters)
        .for_each(|(parameter, numbers)| (subject.prepare)(parameter, numbers));
    inputs
}

/// Numbers in one key.
pub fn key_dim(subject: &Subject, dims: &Dims) -> usize {
    f64::mechanism(subject).key_dim(dims)
}

/// The definition.
pub fn reference(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<Reference, Error> {
    inputs.call(case, None, |call| f64::mechanism(subject).reference(call))
}

/// Forward into memory filled with `fill`, with scratch that the caller keeps.
pub fn forward_into<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    states: (Option<&State<T>>, Option<&mut State<T>>),
    fill: T,
    scratch: &mut Scratch<T>,
) -> Result<Forward<T>, Error> {
    let mut out = vec![fill; len(case.dims.out())];
    let mut denominators = vec![fill; len(T::mechanism(subject).denominators(&case.dims))];
    let (initial_state, final_state) = states;
    inputs.call(case, initial_state, |call| {
        let output = Output::training(ViewMut::contiguous(&mut out, case.dims.out()), &mut denominators)
            .with_final_state(final_state);
        T::mechanism(subject).forward(call, output, scratch)
    })?;
    Ok(Forward { out, denominators })
}

/// Forward on poisoned memory.
pub fn forward<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<Forward<T>, Error> {
    let mut scratch = Scratch::new();
    forward_into(subject, case, inputs, (None, None), nan(), &mut scratch)
}

/// The output of a call that asks for nothing else.
pub fn output_alone<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    scratch: &mut Scratch<T>,
) -> Result<Vec<T>, Error> {
    let mut out = vec![nan(); len(case.dims.out())];
    inputs.call(case, None, |call| {
        let output = Output::new(ViewMut::contiguous(&mut out, case.dims.out()));
        T::mechanism(subject).forward(call, output, scratch)
    })?;
    Ok(out)
}

/// Forward from one state to the next, on poisoned memory.
pub fn forward_state<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    initial_state: Option<&State<T>>,
) -> Result<(Forward<T>, State<T>), Error> {
    let mut state = T::mechanism(subject).empty_state(&case.dims)?;
    let mut scratch = Scratch::new();
    let forward = forward_into(subject, case, inputs, (initial_state, Some(&mut state)), nan(), &mut scratch)?;
    Ok((forward, state))
}

/// Backward from given outputs into memory filled with `fill`, with scratch that the caller keeps.
pub fn backward_into<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    forward: &Forward<T>,
    fill: T,
    scratch: &mut Scratch<T>,
) -> Result<Backward<T>, Error> {
    backward_through_states(subject, case, inputs, forward, (None, None, None), fill, scratch)
}

/// The same for a call with states: the initial state, the gradient of the final one, and where to write the gradient
/// of the initial one.
#[allow(clippy::type_complexity)]
pub fn backward_through_states<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    forward: &Forward<T>,
    states: (Option<&State<T>>, Option<&State<T>>, Option<&mut State<T>>),
    fill: T,
    scratch: &mut Scratch<T>,
) -> Result<Backward<T>, Error> {
    let dims = &case.dims;
    let (initial_state, d_final_state, d_initial_state) = states;
    let mut dq = vec![fill; inputs.q.len()];
    let mut dk = vec![fill; inputs.k.len()];
    let mut dv = vec![fill; inputs.v.len()];
    let mut parameters: Vec<Vec<T>> = inputs.parameters.iter().map(|p| vec![fill; p.len()]).collect();
    let mut slices: Vec<&mut [T]> = parameters.iter_mut().map(Vec::as_mut_slice).collect();
    inputs.call(case, initial_state, |call| {
        let cotangent = Cotangent {
            out: View::contiguous(&forward.out, dims.out()),
            denominators: &forward.denominators,
            d_out: View::contiguous(&inputs.d_out, dims.out()),
            final_state: d_final_state,
        };
        let gradients = Gradients {
            dq: ViewMut::contiguous(&mut dq, dims.q()),
            dk: ViewMut::contiguous(&mut dk, inputs.key_shape(dims)),
            dv: ViewMut::contiguous(&mut dv, dims.v()),
            parameters: &mut slices,
            initial_state: d_initial_state,
        };
        T::mechanism(subject).backward(call, &cotangent, gradients, scratch)
    })?;
    let mut gradients = vec![dq, dk, dv];
    gradients.extend(parameters);
    Ok(Backward { gradients })
}

/// Backward on poisoned memory.
pub fn backward<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    forward: &Forward<T>,
) -> Result<Backward<T>, Error> {
    backward_into(subject, case, inputs, forward, nan(), &mut Scratch::new())
}

/// Forward and backward on poisoned memory.
pub fn both<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(Forward<T>, Backward<T>), Error> {
    let forward = forward(subject, case, inputs)?;
    let backward = backward(subject, case, inputs, &forward)?;
    Ok((forward, backward))
}

/// Takes the tokens of a causal case with equally many queries and keys one by one.
pub fn steps<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &Inputs<T>,
    tokens: std::ops::Range<usize>,
    state: &mut State<T>,
) -> Result<Vec<T>, Error> {
    let dims = &case.dims;
    let gather = |x: &[T], heads: usize, length: usize, width: usize, token: usize| -> Vec<T> {
        (0..dims.batch * heads).flat_map(|h| x[(h * length + token) * width..][..width].to_vec()).collect()
    };
    let mut out = vec![nan(); dims.batch * dims.heads * tokens.len() * dims.value_dim];
    for (n, token) in tokens.clone().enumerate() {
        let mut row = vec![nan(); dims.batch * dims.heads * dims.value_dim];
        let (q, k, v) = (
            gather(&inputs.q, dims.heads, dims.queries, dims.head_dim, token),
            gather(&inputs.k, dims.kv_heads, dims.keys, inputs.key_shape(dims)[3], token),
            gather(&inputs.v, dims.kv_heads, dims.keys, dims.value_dim, token),
        );
        let parameters =
            inputs.parameters.iter().zip(&inputs.per_key).map(|(x, &width)| {
                if width == 0 { x.clone() } else { gather(x, dims.kv_heads, dims.keys, width, token) }
            });
        let parameters: Vec<Vec<T>> = parameters.collect();
        let parameters: Vec<&[T]> = parameters.iter().map(Vec::as_slice).collect();
        T::mechanism(subject).step(&Token { q: &q, k: &k, v: &v, parameters: &parameters }, state, &mut row)?;
        for head in 0..dims.batch * dims.heads {
            out[(head * tokens.len() + n) * dims.value_dim..][..dims.value_dim]
                .copy_from_slice(&row[head * dims.value_dim..][..dims.value_dim]);
        }
    }
    Ok(out)
}
