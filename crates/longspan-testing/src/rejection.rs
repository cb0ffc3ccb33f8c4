//! Wrong calls: each gives an error that names operation, argument, expected and got, and writes nothing.

use longspan_kernels::{
    Call, Cotangent, Dims, Error, Gradients, Kernel, Keys, Mask, Output, Scratch, State, Token, View, ViewMut,
};

use crate::case::{Case, Inputs};
use crate::compare::{Failure, ensure};
use crate::execute;
use crate::subject::{Number, Subject};

/// Fills outputs that must not be written.
const MARK: f64 = 1234.5;

/// Checks that an error names the operation and says what is wrong.
pub fn names_the_fault(what: &str, operation: &str, argument: &str, error: &Error) -> Result<(), Failure> {
    let text = error.to_string();
    match error {
        Error::Argument { operation: own, argument: at, expected, got } => {
            ensure(*own == operation && !expected.is_empty() && !got.is_empty(), || format!("{what}: {text}"))?;
            ensure(at.contains(argument), || format!("{what}: blames {at:?} instead of {argument:?}: {text}"))
        }
        Error::Unsupported { operation: own, combination, help } => {
            ensure(*own == operation && !help.is_empty(), || format!("{what}: {text}"))?;
            ensure(combination.contains(argument), || format!("{what}: blames {combination:?}, not {argument:?}"))
        }
        other => Err(Failure(format!("{what}: {other}"))),
    }
}

/// One wrong call: what is wrong, the argument that the error must name, and the change that makes a good call wrong.
type Spoil<T> = (&'static str, &'static str, for<'a> fn(&mut Call<'a, T>));

/// Calls with a wrong input.
fn spoilt_inputs<T: Number>() -> Vec<Spoil<T>> {
    vec![
        ("q too short", "q", |call| call.q = View::contiguous(&[], call.dims.q())),
        ("k too short", "k", |call| call.k = View::contiguous(&[], call.dims.k())),
        ("v too short", "v", |call| call.v = View::contiguous(&[], call.dims.v())),
        ("strides beyond q", "q", |call| call.q = View::strided(&[], [usize::MAX, usize::MAX, usize::MAX])),
        ("heads no multiple of key heads", "heads", |call| call.dims.kv_heads = 3),
        ("no key heads", "heads", |call| call.dims.kv_heads = 0),
        ("sizes beyond memory", "dims", |call| call.dims.queries = usize::MAX),
        ("too few key lengths", "key lengths", |call| call.mask.keys = Keys::Lengths(&[1])),
        ("a key length beyond the keys", "key lengths", |call| call.mask.keys = Keys::Lengths(&[1, 1000])),
        ("key padding too short", "key padding", |call| call.mask.keys = Keys::Padding(&[false; 3])),
        ("key padding too long", "key padding", |call| call.mask.keys = Keys::Padding(&[false; 99])),
        ("packed with a batch of 2", "batch", |call| {
            call.mask.keys = Keys::Packed { queries: &[0, 5], keys: &[0, 6] };
        }),
        ("offset beyond all bounds", "offset", |call| call.mask.offset = isize::MAX),
        ("offset beyond all bounds, below", "offset", |call| call.mask.offset = isize::MIN),
        ("parameters missing or too many", "parameters", |call| {
            call.parameters = if call.parameters.is_empty() { &[&[]] } else { &[] };
        }),
    ]
}

/// Calls with wrong boundaries of packed sequences, for a batch of 1.
fn spoilt_boundaries<T: Number>() -> Vec<Spoil<T>> {
    vec![
        ("packed boundaries of different number", "packed", |call| {
            call.mask.keys = Keys::Packed { queries: &[0, 5], keys: &[0, 3, 6] };
        }),
        ("packed boundaries that do not start at 0", "packed query boundaries", |call| {
            call.mask.keys = Keys::Packed { queries: &[1, 5], keys: &[0, 6] };
        }),
        ("packed boundaries that end early", "packed key boundaries", |call| {
            call.mask.keys = Keys::Packed { queries: &[0, 5], keys: &[0, 5] };
        }),
        ("packed boundaries that fall", "packed query boundaries", |call| {
            call.mask.keys = Keys::Packed { queries: &[0, 4, 2, 5], keys: &[0, 1, 2, 6] };
        }),
        ("no packed boundaries", "packed query boundaries", |call| {
            call.mask.keys = Keys::Packed { queries: &[], keys: &[] };
        }),
    ]
}

/// Outputs and gradients full of marks, to see that nothing was written.
struct Marked<'a, T> {
    mechanism: &'a dyn Kernel<T>,
    dims: &'a Dims,
    inputs: &'a Inputs<T>,
    out: Vec<T>,
    denominators: Vec<T>,
    gradients: [Vec<T>; 3],
    parameters: Vec<Vec<T>>,
}

impl<'a, T: Number> Marked<'a, T> {
    fn new(mechanism: &'a dyn Kernel<T>, case: &'a Case, inputs: &'a Inputs<T>) -> Self {
        let marks = |len: usize| vec![T::from_f64(MARK); len];
        Self {
            mechanism,
            dims: &case.dims,
            inputs,
            out: marks(inputs.d_out.len()),
            denominators: marks(execute::len(mechanism.denominators(&case.dims))),
            gradients: [marks(inputs.q.len()), marks(inputs.k.len()), marks(inputs.v.len())],
            parameters: inputs.parameters.iter().map(|p| marks(p.len())).collect(),
        }
    }

    /// A forward call into the marks. It is right except for what is wrong in `call`, in the state or in the marks.
    fn forward(&mut self, call: &Call<'_, T>, final_state: Option<&mut State<T>>) -> Result<(), Error> {
        let out = ViewMut::contiguous(&mut self.out, self.dims.out());
        let output = Output::training(out, &mut self.denominators).with_final_state(final_state);
        self.mechanism.forward(call, output, &mut Scratch::new())
    }

    /// A backward call into the marks. It is right except for what is wrong in `call`, in the states or in the marks.
    fn backward(
        &mut self,
        call: &Call<'_, T>,
        d_final_state: Option<&State<T>>,
        d_initial_state: Option<&mut State<T>>,
    ) -> Result<(), Error> {
        let (dims, inputs) = (self.dims, self.inputs);
        let rows = vec![T::ONE; self.denominators.len()];
        let cotangent = Cotangent {
            out: View::contiguous(&inputs.d_out, dims.out()),
            denominators: &rows,
            d_out: View::contiguous(&inputs.d_out, dims.out()),
            final_state: d_final_state,
        };
        let [dq, dk, dv] = &mut self.gradients;
        let mut slices: Vec<&mut [T]> = self.parameters.iter_mut().map(Vec::as_mut_slice).collect();
        let gradients = Gradients {
            dq: ViewMut::contiguous(dq, dims.q()),
            dk: ViewMut::contiguous(dk, inputs.key_shape(dims)),
            dv: ViewMut::contiguous(dv, dims.v()),
            parameters: &mut slices,
            initial_state: d_initial_state,
        };
        self.mechanism.backward(call, &cotangent, gradients, &mut Scratch::new())
    }

    /// Checks that a call on these marks was refused for `argument`, and wrote nothing.
    fn refused(&self, what: &str, argument: &str, result: Result<(), Error>) -> Result<(), Failure> {
        refused(what, self.mechanism.name(), argument, result)?;
        let written = self.gradients.iter().chain(&self.parameters).chain([&self.out, &self.denominators]);
        let intact = written.flatten().all(|x| x.to_f64() == MARK);
        ensure(intact, || format!("{what}: something was written before the error"))
    }
}

fn refused(what: &str, operation: &str, argument: &str, result: Result<(), Error>) -> Result<(), Failure> {
    match result {
        Ok(()) => Err(Failure(format!("{what}: was taken"))),
        Err(error) => names_the_fault(what, operation, argument, &error),
    }
}

/// Forward and backward on one call into marked memory; both must refuse.
fn both_refuse<T: Number>(
    what: &str,
    argument: &str,
    mechanism: &dyn Kernel<T>,
    call: &Call<'_, T>,
    case: &Case,
    inputs: &Inputs<T>,
) -> Result<(), Failure> {
    let mut marked = Marked::new(mechanism, case, inputs);
    refused(&format!("check: {what}"), mechanism.name(), argument, mechanism.check(call))?;
    let result = marked.forward(call, None);
    marked.refused(&format!("forward: {what}"), argument, result)?;
    let result = marked.backward(call, None, None);
    marked.refused(&format!("backward: {what}"), argument, result)
}

/// A call that must be refused because of the mechanism's options; both passes must name `argument`.
pub fn refuses<T: Number>(subject: &Subject, case: &Case, argument: &str) -> Result<(), Failure> {
    let inputs = execute::random(subject, case).cast::<T>();
    inputs.call(case, None, |call| both_refuse(&subject.label, argument, T::mechanism(subject), call, case, &inputs))
}

/// Panics unless the call is refused so.
pub fn assert_refused(subject: &Subject, case: &Case, argument: &str) {
    refuses::<f32>(subject, case, argument).unwrap_or_else(|failure| panic!("{failure}\n    {}", subject.label));
}

/// Sizes of a call that every kind of wrong call is made of.
pub fn dims([head_dim, value_dim]: [usize; 2]) -> Dims {
    Dims { batch: 2, heads: 4, kv_heads: 2, queries: 5, keys: 6, head_dim, value_dim }
}

/// Panics unless every kind of wrong call is refused.
pub fn assert_wrong_calls(subject: &Subject, widths: [usize; 2]) {
    let case = Case::new(dims(widths), true);
    for check in [wrong_calls::<f32>, wrong_calls::<f64>] {
        check(subject, &case).unwrap_or_else(|failure| panic!("{failure}\n    {}", subject.label));
    }
}

/// Every kind of wrong call. The case must be causal with the sizes of [`dims`].
pub fn wrong_calls<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    assert_eq!(*dims, self::dims([dims.head_dim, dims.value_dim]), "the spoilt calls");
    let mechanism = T::mechanism(subject);
    let inputs = execute::random(subject, case).cast::<T>();
    for (what, argument, spoil) in spoilt_inputs::<T>() {
        inputs.call(case, None, |call| {
            let mut call = *call;
            spoil(&mut call);
            both_refuse(what, argument, mechanism, &call, case, &inputs)
        })?;
    }
    let alone = Case { dims: Dims { batch: 1, ..*dims }, ..case.clone() };
    let one = execute::random(subject, &alone).cast::<T>();
    for (what, argument, spoil) in spoilt_boundaries::<T>() {
        one.call(&alone, None, |call| {
            let mut call = *call;
            spoil(&mut call);
            both_refuse(what, argument, mechanism, &call, &alone, &one)
        })?;
    }
    for (n, parameter) in mechanism.parameters(dims).iter().enumerate() {
        for (what, longer) in [("a parameter one too short", false), ("a parameter one too long", true)] {
            let mut wrong = inputs.clone();
            if longer {
                wrong.parameters[n].push(T::ONE);
            } else {
                wrong.parameters[n].pop();
            }
            wrong.call(case, None, |call| both_refuse(what, parameter.name, mechanism, call, case, &inputs))?;
        }
    }
    outputs(subject, case, &inputs)?;
    gradients(subject, case, &inputs)?;
    states(subject, case, &inputs)?;
    steps(subject, case, &inputs)
}

/// Strides of a row-major tensor.
fn strides(shape: [usize; 4]) -> [usize; 3] {
    [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]]
}

fn outputs<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(), Failure> {
    let mechanism = T::mechanism(subject);
    let forward = |what: &str, argument: &str, len: usize, strides: [usize; 3], rows: usize| {
        let mut marked = Marked::new(mechanism, case, inputs);
        marked.out.truncate(len);
        marked.denominators.resize(rows, T::from_f64(MARK));
        let output = Output::training(ViewMut::strided(&mut marked.out, strides), &mut marked.denominators);
        let result = inputs.call(case, None, |call| mechanism.forward(call, output, &mut Scratch::new()));
        marked.refused(what, argument, result)
    };
    let good @ [batch, head, token] = strides(case.dims.out());
    let (len, rows) = (inputs.d_out.len(), execute::len(mechanism.denominators(&case.dims)));
    forward("an output too short", "out", len - 1, good, rows)?;
    forward("an output whose tokens overlap", "out", len, [batch, head, token - 1], rows)?;
    forward("an output whose heads are one", "out", len, [batch, 0, token], rows)?;
    forward("too few denominators", "denominators", len, good, rows - 1)?;
    forward("too many denominators", "denominators", len, good, rows + 1)
}

fn gradients<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(), Failure> {
    let (dims, mechanism) = (&case.dims, T::mechanism(subject));
    // The wrong argument, which the error must name.
    for name in ["out", "denominators", "d_out", "dq", "dk", "dv", "parameters"] {
        let mut marked = Marked::new(mechanism, case, inputs);
        let rows = vec![T::ONE; marked.denominators.len() - usize::from(name == "denominators")];
        let short = |wrong: bool| View::contiguous(&inputs.d_out[usize::from(wrong)..], dims.out());
        let cotangent = Cotangent {
            out: short(name == "out"),
            denominators: &rows,
            d_out: short(name == "d_out"),
            final_state: None,
        };
        let zero_if = |wrong: bool, shape: [usize; 4]| {
            let [batch, head, token] = strides(shape);
            [batch, if wrong { 0 } else { head }, token]
        };
        let [dq, dk, dv] = &mut marked.gradients;
        let mut slices: Vec<&mut [T]> = marked.parameters.iter_mut().map(Vec::as_mut_slice).collect();
        let mut extra = [T::from_f64(MARK)];
        if name == "parameters" {
            slices.push(&mut extra);
        }
        let gradients = Gradients {
            dq: ViewMut::strided(dq, zero_if(name == "dq", dims.q())),
            dk: ViewMut::strided(dk, zero_if(name == "dk", inputs.key_shape(dims))),
            dv: ViewMut::strided(dv, zero_if(name == "dv", dims.v())),
            parameters: &mut slices,
            initial_state: None,
        };
        let result =
            inputs.call(case, None, |call| mechanism.backward(call, &cotangent, gradients, &mut Scratch::new()));
        marked.refused(&format!("backward with {name} spoilt"), name, result)?;
    }
    if !inputs.parameters.is_empty() {
        let mut marked = Marked::new(mechanism, case, inputs);
        marked.parameters[0].pop();
        let result = inputs.call(case, None, |call| marked.backward(call, None, None));
        marked.refused("the gradient of a parameter one too short", "parameters", result)?;
    }
    Ok(())
}

fn states<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(), Failure> {
    let (dims, mechanism) = (&case.dims, T::mechanism(subject));
    let state = mechanism.empty_state(dims)?;
    let wider = Dims { head_dim: dims.head_dim + 1, value_dim: dims.value_dim + 1, ..*dims };
    let wider = mechanism.empty_state(&wider)?;
    inputs.call(case, Some(&wider), |call| {
        both_refuse("an initial state of another shape", "initial_state", mechanism, call, case, inputs)
    })?;
    for (what, mask, initial) in [
        ("a final state of another shape", case.mask(), false),
        ("a final state under a bidirectional mask", Mask::bidirectional(), false),
        ("an initial state under a bidirectional mask", Mask::bidirectional(), true),
    ] {
        let mut marked = Marked::new(mechanism, case, inputs);
        let mut target = if mask == case.mask() { wider.clone() } else { state.clone() };
        let before = target.clone();
        let result = inputs.call(case, initial.then_some(&state), |call| {
            marked.forward(&call.with_mask(mask), (!initial).then_some(&mut target))
        });
        marked.refused(what, "state", result)?;
        ensure(target == before, || format!("{what}: the state was written before the error"))?;
    }
    for (what, mask, initial, last, first) in [
        ("a gradient of the final state of another shape", case.mask(), None, Some(&wider), false),
        ("a gradient of the final state under a bidirectional mask", Mask::bidirectional(), None, Some(&state), false),
        ("a gradient of the initial state of another shape", case.mask(), Some(&state), None, true),
        ("a gradient of an initial state that is not there", case.mask(), None, None, true),
    ] {
        let mut marked = Marked::new(mechanism, case, inputs);
        let mut target = if initial.is_some() { wider.clone() } else { state.clone() };
        let before = target.clone();
        let result = inputs
            .call(case, initial, |call| marked.backward(&call.with_mask(mask), last, first.then_some(&mut target)));
        marked.refused(what, "state", result)?;
        ensure(target == before, || format!("{what}: the gradient was written before the error"))?;
    }
    let sum = mechanism.combine(&state, &wider, &[]).map(drop);
    refused("a sum of states of different shapes", mechanism.name(), "state", sum)
}

fn steps<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(), Failure> {
    let (dims, mechanism) = (&case.dims, T::mechanism(subject));
    let parameters: Vec<&[T]> = inputs.parameters.iter().map(Vec::as_slice).collect();
    let sizes = [
        ("q", dims.batch * dims.heads * dims.head_dim),
        ("k", dims.batch * dims.kv_heads * mechanism.key_dim(dims)),
        ("v", dims.batch * dims.kv_heads * dims.value_dim),
        ("out", dims.batch * dims.heads * dims.value_dim),
    ];
    for wrong in ["q", "k", "v", "out", "parameters", "nothing"] {
        let tensors = sizes.map(|(name, len)| vec![T::from_f64(MARK); len + usize::from(name == wrong)]);
        let [q, k, v, mut out] = tensors;
        let given: &[&[T]] = match (wrong, parameters.is_empty()) {
            ("parameters", true) => &[&[]],
            ("parameters", false) => &[],
            _ => &parameters,
        };
        let mut state = mechanism.empty_state(dims)?;
        let before = state.clone();
        let result = mechanism.step(&Token { q: &q, k: &k, v: &v, parameters: given }, &mut state, &mut out);
        if wrong == "nothing" {
            // The sizes above make a good step; otherwise the refusals would prove nothing.
            result?;
            continue;
        }
        // The sizes of a step follow from q, k and v together, so the error may name any of them.
        let Err(error) = result else {
            return Err(Failure(format!("a step with {wrong} one too long was taken")));
        };
        ensure(error.to_string().starts_with(mechanism.name()), || format!("a step with {wrong} wrong: {error}"))?;
        ensure(state == before, || format!("a step with {wrong} wrong wrote to the state"))?;
        ensure(out.iter().all(|x| x.to_f64() == MARK), || format!("a step with {wrong} wrong wrote its output"))?;
    }
    Ok(())
}
