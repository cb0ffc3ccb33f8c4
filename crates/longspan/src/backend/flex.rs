//! The kernels on Burn's CPU backend: its tensors' numbers where they lie, without a copy.
//!
//! A projection gives `[batch, tokens, heads, head_dim]`, and attention wants `[batch, heads, tokens, head_dim]`: the same
//! numbers with two strides exchanged, which the kernels take. Outputs and gradients are written in the projection's order,
//! so that the way back is a view as well. Only a tensor whose rows are not adjacent numbers is copied first.

use std::cell::Cell;

use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{FlexTensor, Layout};
use longspan_kernels as kernels;
use longspan_kernels::{
    Cotangent, Dims, Gradients, KernelizedAttention, Mechanism, Output, Real, Scratch, State, Token, View, ViewMut,
};

use crate::attention::AttentionMask;

/// All of a call but its tensors.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub options: KernelizedAttention,
    pub mask: AttentionMask,
}

/// The tensors of a call. `table` is `None` without relative positions.
#[derive(Debug, Clone)]
pub(super) struct Operands {
    pub q: FlexTensor,
    pub k: FlexTensor,
    pub v: FlexTensor,
    pub table: Option<FlexTensor>,
}

/// What the forward call gives: outputs `[batch, heads, queries, value_dim]` and denominators `[batch, heads, queries]`.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub out: FlexTensor,
    pub denominators: FlexTensor,
}

/// A number type of both Flex and the kernels.
trait Number: Real {
    const DTYPE: DType;
    fn storage(tensor: &FlexTensor) -> &[Self];
    fn bytes(numbers: Vec<Self>) -> Bytes;
    fn scratch() -> &'static std::thread::LocalKey<Cell<Option<Scratch<Self>>>>;
}

macro_rules! number {
    ($t:ident, $dtype:expr, $scratch:ident) => {
        thread_local! {
            static $scratch: Cell<Option<Scratch<$t>>> = const { Cell::new(None) };
        }

        impl Number for $t {
            const DTYPE: DType = $dtype;
            fn storage(tensor: &FlexTensor) -> &[Self] {
                tensor.storage()
            }
            fn bytes(numbers: Vec<Self>) -> Bytes {
                Bytes::from_elems(numbers)
            }
            fn scratch() -> &'static std::thread::LocalKey<Cell<Option<Scratch<Self>>>> {
                &$scratch
            }
        }
    };
}
number!(f32, DType::F32, SCRATCH_F32);
number!(f64, DType::F64, SCRATCH_F64);

/// Whether the kernels compute in this type.
pub(super) fn supports(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64)
}

impl Operands {
    /// The same numbers with adjacent rows: a view wherever possible.
    pub fn with_adjacent_rows(self) -> Self {
        Self {
            q: adjacent_rows(self.q),
            k: adjacent_rows(self.k),
            v: adjacent_rows(self.v),
            table: self.table.map(|table| if table.is_contiguous() { table } else { table.to_contiguous() }),
        }
    }

    fn dims(&self) -> Dims {
        let shape = |tensor: &FlexTensor| -> [usize; 4] { tensor.layout().shape().dims() };
        let ([batch, heads, queries, head_dim], [_, kv_heads, keys, _]) = (shape(&self.q), shape(&self.k));
        Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim: shape(&self.v)[3] }
    }

    /// Runs `work` on the kernels' view of this call, with working memory that this thread keeps.
    fn with_call<T: Number, R>(
        &self,
        settings: &Settings,
        work: impl FnOnce(&kernels::Call<'_, T>, &mut Scratch<T>) -> R,
    ) -> R {
        let table = self.table.as_ref().map(|table| contiguous::<T>(table));
        let call = kernels::Call {
            dims: self.dims(),
            q: view(&self.q),
            k: view(&self.k),
            v: view(&self.v),
            parameters: table.as_slice(),
            mask: settings.mask.as_kernel(),
            initial_state: None,
        };
        // Taken, not borrowed: while the kernels wait for their tasks this thread may run another task that comes here.
        let mut scratch = T::scratch().take().unwrap_or_default();
        let result = work(&call, &mut scratch);
        T::scratch().set(Some(scratch));
        result
    }

    /// Outputs and denominators; rows must be adjacent.
    pub fn forward(&self, settings: &Settings) -> Result<Outcome, kernels::Error> {
        match self.q.dtype() {
            DType::F64 => self.forward_as::<f64>(settings),
            _ => self.forward_as::<f32>(settings),
        }
    }

    fn forward_as<T: Number>(&self, settings: &Settings) -> Result<Outcome, kernels::Error> {
        self.with_call::<T, _>(settings, |call, scratch| {
            let mut out = TokenMajor::new(call.dims.out());
            let rows = [call.dims.batch, call.dims.heads, call.dims.queries];
            let mut denominators = vec![T::ZERO; rows.iter().product()];
            let output = Output { out: out.view_mut(), denominators: Some(&mut denominators), final_state: None };
            settings.options.forward(call, output, scratch)?;
            let denominators = FlexTensor::new(T::bytes(denominators), Layout::contiguous(Shape::from(rows)), T::DTYPE);
            Ok(Outcome { out: out.into_tensor(), denominators })
        })
    }

    /// The gradients of q, k, v and the table, from that of the outputs; rows must be adjacent.
    pub fn backward(&self, settings: &Settings, outcome: &Outcome, d_out: FlexTensor) -> Result<Self, kernels::Error> {
        let d_out = adjacent_rows(d_out);
        match self.q.dtype() {
            DType::F64 => self.backward_as::<f64>(settings, outcome, &d_out),
            _ => self.backward_as::<f32>(settings, outcome, &d_out),
        }
    }

    fn backward_as<T: Number>(
        &self,
        settings: &Settings,
        outcome: &Outcome,
        d_out: &FlexTensor,
    ) -> Result<Self, kernels::Error> {
        self.with_call::<T, _>(settings, |call, scratch| {
            let (mut dq, mut dk, mut dv) =
                (TokenMajor::new(call.dims.q()), TokenMajor::new(call.dims.k()), TokenMajor::new(call.dims.v()));
            let mut d_table: Option<Vec<T>> = call.parameters.first().map(|table| vec![T::ZERO; table.len()]);
            let cotangent = Cotangent {
                out: view(&outcome.out),
                denominators: contiguous(&outcome.denominators),
                d_out: view(d_out),
                final_state: None,
            };
            let mut parameters: Vec<&mut [T]> = d_table.iter_mut().map(Vec::as_mut_slice).collect();
            let gradients = Gradients {
                dq: dq.view_mut(),
                dk: dk.view_mut(),
                dv: dv.view_mut(),
                parameters: &mut parameters,
                initial_state: None,
            };
            settings.options.backward(call, &cotangent, gradients, scratch)?;
            let table = d_table.zip(self.table.as_ref()).map(|(numbers, table)| {
                let layout = Layout::contiguous(table.layout().shape().clone());
                FlexTensor::new(T::bytes(numbers), layout, T::DTYPE)
            });
            Ok(Self { q: dq.into_tensor(), k: dk.into_tensor(), v: dv.into_tensor(), table })
        })
    }
}

/// The state of a prefix in the kernels' form.
#[derive(Debug, Clone)]
pub(super) enum PrefixState {
    F32(State<f32>),
    F64(State<f64>),
}

impl PrefixState {
    /// Before the first token of calls like this one.
    pub fn empty(options: &KernelizedAttention, operands: &Operands) -> Result<Self, kernels::Error> {
        let dims = operands.dims();
        Ok(match operands.q.dtype() {
            DType::F64 => Self::F64(options.empty_state(&dims)?),
            _ => Self::F32(options.empty_state(&dims)?),
        })
    }

    /// The states of the batch entries `indices`.
    pub fn select(&self, indices: &[usize]) -> Result<Self, kernels::Error> {
        Ok(match self {
            Self::F32(state) => Self::F32(state.select(indices)?),
            Self::F64(state) => Self::F64(state.select(indices)?),
        })
    }

    /// Takes one token in and gives its output, `[batch, heads, 1, value_dim]`.
    pub fn step(&mut self, options: &KernelizedAttention, operands: &Operands) -> Result<FlexTensor, kernels::Error> {
        match self {
            Self::F32(state) => step_as(options, operands, state),
            Self::F64(state) => step_as(options, operands, state),
        }
    }
}

fn step_as<T: Number>(
    options: &KernelizedAttention,
    operands: &Operands,
    state: &mut State<T>,
) -> Result<FlexTensor, kernels::Error> {
    // A token is a few numbers: copying it costs nothing.
    let row_major = |tensor: &FlexTensor| tensor.to_contiguous();
    let (q, k, v) = (row_major(&operands.q), row_major(&operands.k), row_major(&operands.v));
    let table = operands.table.as_ref().map(|table| contiguous::<T>(table));
    let token = Token { q: contiguous(&q), k: contiguous(&k), v: contiguous(&v), parameters: table.as_slice() };
    let shape = operands.dims().out();
    let mut out = vec![T::ZERO; shape.iter().product()];
    options.step(&token, state, &mut out)?;
    Ok(FlexTensor::new(T::bytes(out), Layout::contiguous(Shape::from(shape)), T::DTYPE))
}

/// New numbers for a tensor `[batch, heads, tokens, width]` that lie in the order batch, token, head.
struct TokenMajor<T> {
    numbers: Vec<T>,
    shape: [usize; 4],
}

impl<T: Number> TokenMajor<T> {
    fn new(shape: [usize; 4]) -> Self {
        Self { numbers: vec![T::ZERO; shape.iter().product()], shape }
    }

    fn strides(&self) -> [usize; 3] {
        let [_, heads, tokens, width] = self.shape;
        [tokens * heads * width, width, heads * width]
    }

    fn view_mut(&mut self) -> ViewMut<'_, T> {
        let strides = self.strides();
        ViewMut::strided(&mut self.numbers, strides)
    }

    fn into_tensor(self) -> FlexTensor {
        let strides = self.strides().into_iter().chain([1]).map(|stride| stride as isize).collect();
        let layout = Layout::new(Shape::from(self.shape), strides, 0);
        FlexTensor::new(T::bytes(self.numbers), layout, T::DTYPE)
    }
}

/// The tensor itself where the kernels can walk it, otherwise a copy that they can.
fn adjacent_rows(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let (shape, strides) = (layout.shape(), layout.strides());
    let adjacent = shape[3] <= 1 || strides[3] == 1;
    if adjacent && strides.iter().all(|&stride| stride >= 0) {
        return tensor;
    }
    #[cfg(test)]
    copies::COUNT.with(|count| count.set(count.get() + 1));
    tensor.to_contiguous()
}

/// The kernels' view of a tensor with adjacent rows.
fn view<T: Number>(tensor: &FlexTensor) -> View<'_, T> {
    let layout = tensor.layout();
    let strides = layout.strides();
    let strides = std::array::from_fn(|axis| strides[axis] as usize);
    let numbers = T::storage(tensor);
    View::strided(&numbers[layout.start_offset().min(numbers.len())..], strides)
}

/// The numbers of a row-major tensor.
fn contiguous<T: Number>(tensor: &FlexTensor) -> &[T] {
    let layout = tensor.layout();
    &T::storage(tensor)[layout.start_offset()..][..layout.num_elements()]
}

/// Counts copies, for the test that there are none.
#[cfg(test)]
pub(super) mod copies {
    thread_local! {
        pub(in crate::backend) static COUNT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }
}
