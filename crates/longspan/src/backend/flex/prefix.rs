//! The states of prefixes that the kernels make, of either number type.

use crate::cpu::{FlexTensor, Layout};
use burn::tensor::{DType, Shape, TensorData};
use longspan_kernels as kernels;
use longspan_kernels::{Call, Dims, Kernel, Mask, State, StateShape, Token, View};

use super::{Number, Operands, contiguous, rounded, split_parameters, widened};
use crate::backend::AnyKernel;

/// The state of a prefix in the kernels' form.
#[derive(Debug, Clone)]
pub(in crate::backend) enum PrefixState {
    F32(State<f32>),
    F64(State<f64>),
}

/// The same work on a state of either number type.
macro_rules! either {
    ($prefix:expr, $state:ident => $work:expr) => {
        match $prefix {
            PrefixState::F32($state) => $work,
            PrefixState::F64($state) => $work,
        }
    };
}

impl PrefixState {
    /// In `f32`.
    pub fn as_f32(&mut self) -> Option<&mut State<f32>> {
        match self {
            Self::F32(state) => Some(state),
            Self::F64(_) => None,
        }
    }

    /// Before the first token of calls of these sizes.
    pub fn empty(kernel: &dyn AnyKernel, dims: &Dims, dtype: DType) -> Result<Self, kernels::Error> {
        Ok(match dtype {
            DType::F64 => Self::F64(f64::mechanism(kernel).empty_state(dims)?),
            _ => Self::F32(f32::mechanism(kernel).empty_state(dims)?),
        })
    }

    /// Checks that one token more fits it, with these learned tensors.
    pub fn check(
        &self,
        kernel: &dyn AnyKernel,
        dims: &Dims,
        learned: Option<&FlexTensor>,
    ) -> Result<(), kernels::Error> {
        let learned = learned.map(|learned| widened(&learned.to_contiguous()));
        let (single, double) = (f32::mechanism(kernel), f64::mechanism(kernel));
        match self {
            Self::F32(state) => {
                check_token(single, dims, &split_parameters(single, dims, learned.as_ref().map(contiguous)), state)
            }
            Self::F64(state) => {
                check_token(double, dims, &split_parameters(double, dims, learned.as_ref().map(contiguous)), state)
            }
        }
    }

    /// The states of the batch entries `indices`.
    pub fn select(&self, indices: &[usize]) -> Result<Self, kernels::Error> {
        either!(self, state => state.select(indices).map(Number::prefix))
    }

    /// The states of several batches as those of one.
    pub fn join(states: &[&Self]) -> Option<Result<Self, kernels::Error>> {
        fn joined<T: Number>(states: &[&PrefixState]) -> Option<Result<PrefixState, kernels::Error>> {
            let states: Vec<&State<T>> = states.iter().map(|state| T::state(state)).collect::<Option<_>>()?;
            let shape = states.first()?.shape();
            let alike = |state: &&State<T>| StateShape { batch: shape.batch, ..state.shape() } == shape;
            if !states.iter().all(alike) {
                return None;
            }
            let batch = states.iter().map(|state| state.shape().batch).sum();
            let numbers = states.iter().flat_map(|state| state.numbers()).copied().collect();
            Some(State::from_numbers(StateShape { batch, ..shape }, numbers).map(T::prefix))
        }
        match states.first()? {
            Self::F32(_) => joined::<f32>(states),
            Self::F64(_) => joined::<f64>(states),
        }
    }

    /// Its mechanism and sizes.
    pub fn shape(&self) -> StateShape {
        either!(self, state => state.shape())
    }

    /// Its number type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F64(_) => DType::F64,
        }
    }

    /// All its numbers.
    pub fn numbers(&self) -> TensorData {
        either!(self, state => TensorData::new(state.numbers().to_vec(), [state.numbers().len()]))
    }

    /// Rebuilds a state from its numbers.
    pub fn from_numbers(shape: StateShape, numbers: &TensorData) -> Result<Self, kernels::Error> {
        Ok(match numbers.dtype() {
            DType::F64 => Self::F64(State::from_numbers(shape, numbers.iter::<f64>().collect())?),
            _ => Self::F32(State::from_numbers(shape, numbers.iter::<f32>().collect())?),
        })
    }

    /// Takes one token in and gives its output, `[batch, heads, 1, value_dim]`.
    pub fn step(&mut self, kernel: &dyn AnyKernel, operands: &Operands) -> Result<FlexTensor, kernels::Error> {
        let out = either!(self, state => step_as(kernel, &operands.widened(), state))?;
        Ok(rounded(out, operands.q.dtype()))
    }
}

/// Checks that one token more of these sizes fits a state, by all that a step checks; nothing is computed.
pub(crate) fn check_token<T: kernels::Real>(
    kernel: &dyn Kernel<T>,
    dims: &Dims,
    parameters: &[&[T]],
    state: &State<T>,
) -> Result<(), kernels::Error> {
    let zeros = vec![T::ZERO; dims.head_dim.max(kernel.key_dim(dims)).max(dims.value_dim)];
    let rows = || View::strided(&zeros, [0; 3]);
    let call = Call::new(*dims, rows(), rows(), rows()).with_parameters(parameters);
    kernel.check(&call.with_mask(Mask::causal()).with_initial_state(Some(state)))
}

fn step_as<T: Number>(
    kernel: &dyn AnyKernel,
    operands: &Operands,
    state: &mut State<T>,
) -> Result<FlexTensor, kernels::Error> {
    // A token is a few numbers: copying it costs nothing.
    let row_major = |tensor: &FlexTensor| tensor.to_contiguous();
    let (q, k, v) = (row_major(&operands.q), row_major(&operands.k), row_major(&operands.v));
    let mechanism = T::mechanism(kernel);
    let dims = operands.dims();
    let parameters = split_parameters(mechanism, &dims, operands.parameters.as_ref().map(contiguous));
    let token = Token { q: contiguous(&q), k: contiguous(&k), v: contiguous(&v), parameters: &parameters };
    let shape = dims.out();
    let mut out = vec![T::ZERO; shape.iter().product()];
    mechanism.step(&token, state, &mut out)?;
    Ok(FlexTensor::new(T::bytes(out), Layout::contiguous(Shape::from(shape)), T::DTYPE))
}
