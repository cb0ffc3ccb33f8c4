//! A mechanism as a Python object, and its calls on arrays.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use longspan_kernels::{
    self as kernels, AnyKernel, Cotangent, Dims, Gradients, Mask, Order, Output, Plan, Purpose, Token,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyTuple};

use crate::arrays::{Dtype, Precision, Shape, Tensor, key_padding, with_precision};
use crate::error;
use crate::inputs::{Boundaries, Inputs, OwnedMask};
use crate::mechanisms;
use crate::precise::Precise;
use crate::results::{Fresh, FreshTensor};
use crate::state::{Numbers, State};
use crate::threads;

/// What a call is given: q, k, v, parameters, whether it is causal, its offset, which keys are ignored, and boundaries.
#[derive(FromPyObject)]
struct Given<'py>(
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyTuple>,
    bool,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Boundaries>,
);

/// A mechanism with its options. Arrays are ``[batch, head, token, feature]``.
#[pyclass(frozen, module = "longspan._native")]
pub struct Mechanism {
    kernel: Arc<dyn AnyKernel>,
    /// The function that a user called, for errors.
    operation: String,
}

fn is_position(parameter: &kernels::Parameter) -> bool {
    parameter.name.ends_with("_positions")
}

/// Seconds of a forward call, whatever comes after it.
fn forward_seconds(plan: &Plan, purpose: Purpose) -> Option<f64> {
    Some(plan.chosen(purpose)?.seconds(Purpose::Inference))
}

/// Seconds of a backward call.
fn backward_seconds(plan: &Plan) -> Option<f64> {
    let estimate = plan.chosen(Purpose::Training)?;
    Some(estimate.seconds(Purpose::Training) - estimate.seconds(Purpose::Inference))
}

impl Mechanism {
    pub fn kernel(&self) -> &dyn AnyKernel {
        &*self.kernel
    }

    fn wrong(&self, argument: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> PyErr {
        error::value(&self.operation, argument, expected, got)
    }

    pub fn failed(&self, error: kernels::Error) -> PyErr {
        error::kernel(&self.operation, error)
    }

    /// Checks sizes of queries, keys and values, of which a step has one each without an axis for it. Also tells how many heads of
    /// values share one of queries and keys.
    fn sizes(&self, [q, k, v]: [&Tensor<'_>; 3], step: bool) -> PyResult<(Dims, usize)> {
        let axes = if step { "three axes [batch, head, feature]" } else { "four axes [batch, head, token, feature]" };
        let four = |argument, tensor: &Tensor<'_>| match *tensor.shape() {
            [batch, heads, tokens, width] if !step => Ok([batch, heads, tokens, width]),
            [batch, heads, width] if step => Ok([batch, heads, 1, width]),
            _ => Err(self.wrong(argument, axes, Shape(tensor.shape()))),
        };
        let [batch, query_heads, queries, head_dim] = four("q", q)?;
        let [_, key_heads, keys, _] = four("k", k)?;
        let [_, value_heads, _, value_dim] = four("v", v)?;
        // A number that does not divide counts as 1.
        let shares = self.kernel.shares_keys() && key_heads > 0 && value_heads.is_multiple_of(key_heads);
        let sharing = if shares { (value_heads / key_heads).max(1) } else { 1 };
        let [heads, kv_heads] = [query_heads, key_heads].map(|heads| heads * sharing);
        let dims = Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim };
        // Without features weights have no value under some maps.
        if self.kernel.compares() && head_dim == 0 && value_dim > 0 {
            return Err(self.wrong("q", "heads of 1 feature or more", 0));
        }
        let shapes = [[batch, key_heads, keys, self.kernel.key_dim(&dims)], [batch, kv_heads, keys, value_dim]];
        for ((argument, tensor), shape) in [("k", k), ("v", v)].into_iter().zip(shapes) {
            let of_token = [shape[0], shape[1], shape[3]];
            self.expect_shape(argument, tensor, if step { &of_token } else { &shape })?;
        }
        if query_heads == key_heads || (key_heads > 0 && query_heads.is_multiple_of(key_heads)) {
            return Ok((dims, sharing));
        }
        let expected = format!("a number of query heads that is a multiple of the {key_heads} key/value heads");
        Err(self.wrong("q", expected, format_args!("{query_heads} heads")))
    }

    /// Checks arrays and mask of a call.
    fn inputs<'py>(&self, given: Given<'py>) -> PyResult<Inputs<'py>> {
        let Given(q, k, v, parameters, is_causal, offset, key_padding_mask, cu_seqlens) = given;
        let operation = &*self.operation;
        let q = Tensor::new(operation, "q", &q)?;
        let dtype = q.dtype();
        let k = Tensor::like(operation, "k", &k, dtype)?;
        let v = Tensor::like(operation, "v", &v, dtype)?;
        let (dims, sharing) = self.sizes([&q, &k, &v], false)?;
        let (parameters, positions) = self.parameters(&dims, dtype, &parameters)?;
        let truth = offset.is_instance_of::<PyBool>();
        let offset = offset
            .extract::<isize>()
            .ok()
            .filter(|_| !truth)
            .ok_or_else(|| error::kind(operation, "offset", "an integer that fits 64 bits", offset.to_string()))?;
        let ignored = key_padding_mask.map(|mask| key_padding(operation, &mask, dims.batch, dims.keys)).transpose()?;
        if ignored.is_some() && cu_seqlens.is_some() {
            return Err(self.wrong(
                "cu_seqlens",
                "None beside a key_padding_mask (packed sequences have no padding)",
                "both",
            ));
        }
        let order = if is_causal { Order::Causal } else { Order::Bidirectional };
        let mask = OwnedMask { order, offset, ignored, packed: cu_seqlens };
        Ok(Inputs { dims, sharing, q, k, v, parameters, positions, mask })
    }

    /// What the mechanism learns, and which of it are the queries' positions, if any.
    fn parameters<'py>(
        &self,
        dims: &Dims,
        dtype: Dtype,
        given: &Bound<'py, PyTuple>,
    ) -> PyResult<(Vec<Tensor<'py>>, Option<usize>)> {
        let expected = self.kernel.parameters(dims);
        if expected.len() != given.len() {
            let names: Vec<&str> = expected.iter().map(|p| p.name).collect();
            let expected = format!("{} ({})", names.len(), names.join(", "));
            return Err(self.wrong("parameters", expected, given.len()));
        }
        let check = |(parameter, value): (&kernels::Parameter, Bound<'py, PyAny>)| {
            let name = error::in_python(parameter.name);
            let mut tensor = Tensor::new(&self.operation, name, &value)?;
            // Positions may come in the precision of the sums: those of half precision are whole numbers from 256 or 2048 on.
            let finer = is_position(parameter) && tensor.dtype() == dtype.precision().dtype();
            if !finer {
                tensor = tensor.expect(&self.operation, name, dtype)?;
            }
            let tensor = tensor.row_major()?;
            self.expect_shape(name, &tensor, &parameter.shape)?;
            Ok(tensor)
        };
        let tensors = expected.iter().zip(given.iter()).map(check).collect::<PyResult<_>>()?;
        Ok((tensors, expected.iter().position(is_position)))
    }

    fn expect_shape(&self, argument: &str, tensor: &Tensor<'_>, expected: &[usize]) -> PyResult<()> {
        if tensor.shape() == expected {
            return Ok(());
        }
        Err(self.wrong(argument, Shape(expected), Shape(tensor.shape())))
    }

    fn forward_as<'py, T: Precise>(
        &self,
        py: Python<'py>,
        inputs: &Inputs<'py>,
        initial_state: Option<&State>,
        want: Want,
    ) -> PyResult<Outcome<'py>> {
        let initial_state = self.states_like::<T>("initial_state", initial_state)?;
        let dims = inputs.dims;
        let kernel = T::kernel(&*self.kernel);
        let mut out = FreshTensor::new(py, dims.out(), inputs.q.dtype(), want.token_major)?;
        let rows = kernel.denominators(&dims);
        let mut denominators = want.denominators.then(|| Fresh::new(py, &rows, T::PRECISION.dtype())).transpose()?;
        let empty_state = || kernel.empty_state(&dims).map_err(|e| self.failed(e));
        let mut final_state = want.final_state.then(empty_state).transpose()?;
        let output = match &mut denominators {
            Some(denominators) => Output::training(out.view_mut(), denominators.numbers_mut()),
            None => Output::new(out.view_mut()),
        };
        let output = output.with_final_state(final_state.as_mut());
        let purpose = if want.denominators { Purpose::Training } else { Purpose::Inference };
        let seconds = |plan: &Plan| forward_seconds(plan, purpose);
        inputs.run(py, self, initial_state, seconds, |kernel, call, scratch| kernel.forward(call, output, scratch))?;
        Ok((out.finish()?, denominators.map(|d| d.finish().into_any()), final_state.map(T::wrap)))
    }

    fn states_like<'a, T: Precise>(
        &self,
        argument: &str,
        state: Option<&'a State>,
    ) -> PyResult<Option<&'a kernels::State<T>>> {
        let Some(state) = state else { return Ok(None) };
        T::unwrap(state).map(Some).ok_or_else(|| self.other_precision::<T>(argument, state.precision()))
    }

    fn other_precision<T: Precise>(&self, argument: &str, given: Precision) -> PyErr {
        let expected = format!("a state of {} like q", T::PRECISION.name());
        error::kind(&self.operation, argument, expected, given.name())
    }

    fn backward_as<'py, T: Precise>(
        &self,
        py: Python<'py>,
        inputs: &Inputs<'py>,
        cotangent: [&Tensor<'py>; 3],
        states: [Option<&State>; 2],
        token_major: [bool; 3],
    ) -> PyResult<Bound<'py, PyTuple>> {
        let dims = inputs.dims;
        let initial_state = self.states_like::<T>("initial_state", states[0])?;
        let final_state = self.states_like::<T>("d_final_state", states[1])?;
        let kernel = T::kernel(&*self.kernel);
        let wanted = initial_state.map(|_| kernel.empty_state(&dims)).transpose();
        let mut d_initial = wanted.map_err(|e| self.failed(e))?;
        let [batch, kv_heads, keys, _] = dims.k();
        let key_dim = self.kernel.key_dim(&dims);
        let dtype = inputs.q.dtype();
        let mut dq = FreshTensor::new(py, dims.q(), dtype, token_major[0])?;
        let mut dk = FreshTensor::new(py, [batch, kv_heads, keys, key_dim], dtype, token_major[1])?;
        let mut dv = FreshTensor::new(py, dims.v(), dtype, token_major[2])?;
        let parameters = inputs.parameters.iter();
        let mut d_parameters =
            parameters.map(|p| Fresh::new(py, p.shape(), p.dtype())).collect::<PyResult<Vec<_>>>()?;
        let mut slices: Vec<&mut [T]> = d_parameters.iter_mut().map(Fresh::numbers_mut).collect();
        let [out, denominators, d_out] = cotangent;
        let cotangent =
            Cotangent { out: out.view(), denominators: denominators.numbers(), d_out: d_out.view(), final_state };
        let gradients = Gradients {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            parameters: &mut slices,
            initial_state: d_initial.as_mut(),
        };
        inputs.run(py, self, initial_state, backward_seconds, |kernel, call, scratch| {
            kernel.backward(call, &cotangent, gradients, scratch)
        })?;
        let parameters = PyList::new(py, d_parameters.into_iter().map(Fresh::finish))?;
        (dq.finish()?, dk.finish()?, dv.finish()?, parameters, d_initial.map(T::wrap)).into_pyobject(py)
    }

    fn combine_as<T: Precise>(
        &self,
        earlier: &kernels::State<T>,
        later: &kernels::State<T>,
        parameters: &[Tensor<'_>],
    ) -> PyResult<State> {
        let parameters: Vec<&[T]> = parameters.iter().map(Tensor::numbers).collect();
        let sum = T::kernel(&*self.kernel).combine(earlier, later, &parameters);
        sum.map(T::wrap).map_err(|e| self.failed(e))
    }

    fn combine_backward_as<T: Precise>(
        &self,
        py: Python<'_>,
        states: [&State; 3],
        given: &[Tensor<'_>],
    ) -> PyResult<(State, State, Vec<Py<PyAny>>)> {
        let [earlier, later, d_combined] =
            states.map(|state| T::unwrap(state).ok_or_else(|| self.other_precision::<T>("later", state.precision())));
        let parameters: Vec<&[T]> = given.iter().map(Tensor::numbers).collect();
        let found = T::kernel(&*self.kernel).combine_backward(earlier?, later?, &parameters, d_combined?);
        let found = found.map_err(|e| self.failed(e))?;
        let of_parameters = given.iter().zip(&found.parameters).map(|(tensor, numbers)| {
            let mut fresh = Fresh::new(py, tensor.shape(), T::PRECISION.dtype())?;
            fresh.numbers_mut().copy_from_slice(numbers);
            Ok(fresh.finish().into_any().unbind())
        });
        Ok((T::wrap(found.earlier), T::wrap(found.later), of_parameters.collect::<PyResult<_>>()?))
    }

    /// Parameters that have a part in a sum of states.
    fn parameters_of_sums<'py>(&self, precision: Precision, given: &Bound<'py, PyTuple>) -> PyResult<Vec<Tensor<'py>>> {
        let read = |value: Bound<'py, PyAny>| {
            let tensor = Tensor::new(&self.operation, "parameters", &value)?.row_major()?;
            if tensor.dtype().precision() == precision {
                return Ok(tensor);
            }
            let expected = format!("{} like the states", precision.name());
            Err(error::kind(&self.operation, "parameters", expected, tensor.dtype().name()))
        };
        given.iter().map(read).collect()
    }

    fn kernel_seconds_as<T: Precise>(&self, py: Python<'_>, inputs: &Inputs<'_>, repeats: usize) -> PyResult<Vec<f64>> {
        let mut out = FreshTensor::new(py, inputs.dims.out(), inputs.q.dtype(), false)?;
        let mut seconds = Vec::new();
        for _ in 0..repeats {
            let output = Output::new(out.view_mut::<T>());
            let predicted = |plan: &Plan| forward_seconds(plan, Purpose::Inference);
            seconds.push(inputs.run(py, self, None, predicted, |kernel, call, scratch| {
                let start = Instant::now();
                kernel.forward(call, output, scratch).map(|()| start.elapsed().as_secs_f64())
            })?);
        }
        Ok(seconds)
    }

    /// A state to be changed, if nobody else is changing it and it is of these sequences and heads.
    fn held<'py>(&self, state: &Bound<'py, State>, batch: usize, kv_heads: usize) -> PyResult<PyRefMut<'py, State>> {
        let held = state.try_borrow_mut().map_err(|_| {
            PyRuntimeError::new_err(format!(
                "{}: state: expected one that no other thread is using, got one in use",
                self.operation
            ))
        })?;
        let shape = held.shape();
        if (shape.batch, shape.kv_heads) != (batch, kv_heads) {
            let expected = format!("batch {batch} and {kv_heads} key/value heads");
            let got = format!("batch {} and {} key/value heads", shape.batch, shape.kv_heads);
            return Err(self.wrong("state", expected, got));
        }
        Ok(held)
    }

    fn step_as<'py, T: Precise>(
        &self,
        py: Python<'py>,
        token: [&Tensor<'py>; 3],
        parameters: &[Tensor<'py>],
        shape: &[usize],
        state: &mut State,
        sharing: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let given = state.precision();
        let state = T::unwrap_mut(state).ok_or_else(|| self.other_precision::<T>("state", given))?;
        let mut out = Fresh::new(py, shape, token[0].dtype())?;
        // No sequence says how wide its heads are.
        if shape[0] == 0 {
            return Ok(out.finish().into_any());
        }
        let numbers = out.numbers_mut::<T>();
        let parameters: Vec<&[T]> = parameters.iter().map(Tensor::numbers).collect();
        let [q, k] = [token[0], token[1]].map(|x| of_every_head::<T>(x, sharing));
        let token = Token { q: &q, k: &k, v: token[2].numbers(), parameters: &parameters };
        let kernel = T::kernel(&*self.kernel);
        // A step reads and writes its state once, at some numbers a nanosecond.
        let seconds = state.numbers().len() as f64 * 0.5e-9;
        py.detach(|| threads::run(seconds, || kernel.step(&token, state, numbers), None))
            .map_err(|e| self.failed(e))?;
        Ok(out.finish().into_any())
    }
}

/// A token's queries or keys, each once for every head that shares it.
fn of_every_head<'a, T: Precise>(tensor: &'a Tensor<'_>, sharing: usize) -> Cow<'a, [T]> {
    let (numbers, width) = (tensor.numbers::<T>(), tensor.shape()[2].max(1));
    if sharing == 1 {
        numbers.into()
    } else {
        numbers.chunks_exact(width).flat_map(|row| row.repeat(sharing)).collect()
    }
}

/// Outputs, and denominators and final state where they were wanted.
type Outcome<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<State>);

/// What a forward call is to give beside its output.
#[derive(Debug, Clone, Copy)]
struct Want {
    denominators: bool,
    final_state: bool,
    token_major: bool,
}

/// The sizes of a call as Python gives them, in the order of their names.
fn dims_of([batch, heads, kv_heads, queries, keys, head_dim, value_dim]: [usize; 7]) -> Dims {
    Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim }
}

#[pymethods]
impl Mechanism {
    /// The mechanism ``name`` with ``options``, a JSON object; ``operation`` is how errors call it.
    #[new]
    #[pyo3(signature = (name, options, operation=None))]
    fn new(name: &str, options: &str, operation: Option<String>) -> PyResult<Self> {
        let operation = operation.unwrap_or_else(|| name.to_owned());
        Ok(Self { kernel: mechanisms::build(name, options, &operation)?, operation })
    }

    /// Outputs, denominators if wanted, and the state after the last key if wanted.
    ///
    /// ``token_major`` lays the output out as ``[batch, token, head, feature]``, seen through a transposition.
    #[pyo3(signature = (call, initial_state=None, final_state=false, denominators=false, token_major=false))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        call: Given<'py>,
        initial_state: Option<PyRef<'py, State>>,
        final_state: bool,
        denominators: bool,
        token_major: bool,
    ) -> PyResult<Outcome<'py>> {
        let mut inputs = self.inputs(call)?;
        if initial_state.is_none() && !final_state {
            inputs.bring_positions_near()?;
        }
        let want = Want { denominators, final_state, token_major };
        let initial = initial_state.as_deref();
        with_precision!(inputs.q.dtype().precision(), T => self.forward_as::<T>(py, &inputs, initial, want))
    }

    /// Gradients ``(dq, dk, dv, [of each parameter], of the initial state if there is one)`` from that of the output, and
    /// of the final state where it was used. Where heads of values share those of queries and keys, ``dq`` and ``dk`` have one for each.
    #[pyo3(signature = (call, out, denominators, d_out, initial_state=None, d_final_state=None, *, token_major))]
    #[allow(clippy::too_many_arguments)]
    fn backward<'py>(
        &self,
        py: Python<'py>,
        call: Given<'py>,
        out: &Bound<'py, PyAny>,
        denominators: &Bound<'py, PyAny>,
        d_out: &Bound<'py, PyAny>,
        initial_state: Option<PyRef<'py, State>>,
        d_final_state: Option<PyRef<'py, State>>,
        token_major: [bool; 3],
    ) -> PyResult<Bound<'py, PyTuple>> {
        let mut inputs = self.inputs(call)?;
        if initial_state.is_none() && d_final_state.is_none() {
            inputs.bring_positions_near()?;
        }
        let operation = &*self.operation;
        let (dtype, precision) = (inputs.q.dtype(), inputs.q.dtype().precision());
        let dims = inputs.dims;
        let out = Tensor::like(operation, "out", out, dtype)?;
        self.expect_shape("out", &out, &dims.out())?;
        let denominators = Tensor::like(operation, "denominators", denominators, precision.dtype())?.row_major()?;
        self.expect_shape("denominators", &denominators, &self.kernel.denominators(&dims))?;
        let d_out = Tensor::like(operation, "d_out", d_out, dtype)?;
        self.expect_shape("d_out", &d_out, &dims.out())?;
        let cotangent = [&out, &denominators, &d_out];
        let states = [initial_state.as_deref(), d_final_state.as_deref()];
        with_precision!(precision, T => self.backward_as::<T>(py, &inputs, cotangent, states, token_major))
    }

    /// Takes one token, ``[batch, head, feature]``, into ``state`` (of no tokens if ``None``); gives its output and the
    /// state.
    #[pyo3(signature = (q, k, v, parameters, state=None))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        parameters: &Bound<'py, PyTuple>,
        state: Option<Bound<'py, State>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, State>)> {
        let operation = &*self.operation;
        let q = Tensor::new(operation, "q", q)?.row_major()?;
        let (dtype, precision) = (q.dtype(), q.dtype().precision());
        let k = Tensor::like(operation, "k", k, dtype)?.row_major()?;
        let v = Tensor::like(operation, "v", v, dtype)?.row_major()?;
        let (dims, sharing) = self.sizes([&q, &k, &v], true)?;
        let (parameters, _) = self.parameters(&dims, dtype, parameters)?;
        let empty = || with_precision!(precision, T => T::kernel(&*self.kernel).empty_state(&dims).map(T::wrap));
        let state = state.map_or_else(|| Bound::new(py, empty().map_err(|e| self.failed(e))?), Ok)?;
        let out = {
            let mut held = self.held(&state, dims.batch, dims.kv_heads)?;
            let token = [&q, &k, &v];
            let shape = [dims.batch, dims.heads, dims.value_dim];
            with_precision!(precision, T => self.step_as::<T>(py, token, &parameters, &shape, &mut held, sharing)?)
        };
        Ok((out, state))
    }

    /// The state before the first token of calls of these sizes.
    fn empty_state(&self, sizes: [usize; 7]) -> PyResult<State> {
        f32::kernel(&*self.kernel).empty_state(&dims_of(sizes)).map(f32::wrap).map_err(|e| self.failed(e))
    }

    /// The state after two segments of tokens from the state of each, ``later`` computed from no tokens on.
    #[pyo3(signature = (earlier, later, parameters))]
    fn combine(
        &self,
        earlier: PyRef<'_, State>,
        later: PyRef<'_, State>,
        parameters: &Bound<'_, PyTuple>,
    ) -> PyResult<State> {
        let precision = earlier.precision();
        let parameters = self.parameters_of_sums(precision, parameters)?;
        match (&earlier.numbers, &later.numbers) {
            (Numbers::F32(a), Numbers::F32(b)) => self.combine_as(a, b, &parameters),
            (Numbers::F64(a), Numbers::F64(b)) => self.combine_as(a, b, &parameters),
            _ => {
                let expected = format_args!("a state of {} like earlier", precision.name());
                Err(error::kind(&self.operation, "later", expected, later.precision().name()))
            }
        }
    }

    /// Gradients of both states and of the parameters from that of their sum.
    #[pyo3(signature = (earlier, later, parameters, d_combined))]
    fn combine_backward(
        &self,
        py: Python<'_>,
        earlier: PyRef<'_, State>,
        later: PyRef<'_, State>,
        parameters: &Bound<'_, PyTuple>,
        d_combined: PyRef<'_, State>,
    ) -> PyResult<(State, State, Vec<Py<PyAny>>)> {
        let precision = earlier.precision();
        let parameters = self.parameters_of_sums(precision, parameters)?;
        let states = [&*earlier, &*later, &*d_combined];
        with_precision!(precision, T => self.combine_backward_as::<T>(py, states, &parameters))
    }

    /// Seconds that the kernel itself takes for a forward call on these arrays, ``repeats`` times: what
    /// ``benchmarks/compare.py --overhead`` holds a whole call against.
    #[pyo3(signature = (call, repeats))]
    fn kernel_seconds<'py>(&self, py: Python<'py>, call: Given<'py>, repeats: usize) -> PyResult<Vec<f64>> {
        let inputs = self.inputs(call)?;
        with_precision!(inputs.q.dtype().precision(), T => self.kernel_seconds_as::<T>(py, &inputs, repeats))
    }

    /// Names and shapes of the parameters for a call of these sizes.
    fn parameter_shapes(&self, sizes: [usize; 7]) -> Vec<(&'static str, Vec<usize>)> {
        let parameters = self.kernel.parameters(&dims_of(sizes));
        parameters.into_iter().map(|p| (error::in_python(p.name), p.shape.to_vec())).collect()
    }

    /// Which algorithm a call of these sizes runs, and why.
    fn plan<'py>(
        &self,
        py: Python<'py>,
        sizes: [usize; 7],
        is_causal: bool,
        offset: isize,
        with_backward: bool,
    ) -> PyResult<(&'static str, String, Bound<'py, PyList>)> {
        let dims = dims_of(sizes);
        let mask = if is_causal { Mask::causal() } else { Mask::bidirectional() }.with_offset(offset);
        let plan = self.kernel.plan(&dims, &mask).map_err(|error| self.failed(error))?;
        let purpose = if with_backward { Purpose::Training } else { Purpose::Inference };
        let (algorithm, reason) = (plan.algorithm(purpose), plan.reason(purpose));
        let estimates = PyList::empty(py);
        for estimate in plan.estimates {
            let entry = PyDict::new(py);
            entry.set_item("algorithm", estimate.algorithm.name())?;
            entry.set_item("flops", estimate.flops)?;
            entry.set_item("published_elements", estimate.published_elements)?;
            entry.set_item("scratch_bytes", estimate.scratch_bytes)?;
            entry.set_item("seconds", estimate.seconds(purpose))?;
            estimates.append(entry)?;
        }
        Ok((algorithm.name(), reason, estimates))
    }
}
