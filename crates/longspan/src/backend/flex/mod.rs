//! The kernels on Burn's CPU backend: its tensors' numbers where they lie, without a copy.
//!
//! A projection gives `[batch, tokens, heads, head_dim]`, and attention wants `[batch, heads, tokens, head_dim]`: the
//! same numbers with two strides exchanged, which the kernels take. Outputs and gradients are written in the
//! projection's order, so that the way back is a view as well. Only a tensor whose rows are not adjacent numbers is
//! copied first, and `f16` and `bf16` are converted.

mod prefix;

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cpu::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};
use longspan_kernels as kernels;
use longspan_kernels::half::{Half, bf16, f16, narrow, widen};
use longspan_kernels::{Cotangent, Dims, Gradients, Kernel, Output, Parameter, Real, Scratch, State, View, ViewMut};
use longspan_layers::Stretches;

pub(super) use prefix::PrefixState;
pub(crate) use prefix::check_token;

use super::operation::Operation;
use super::state::{AttentionState, Inner};
use super::stretches::Stretch;
use super::{AnyKernel, Peers};
use crate::attention::AttentionMask;

/// All of a call but its tensors: queries, keys, values and, if the mechanism has any, its learned tensors as one.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub kernel: Arc<dyn AnyKernel>,
    pub mask: AttentionMask,
    /// The state of the tokens before, and where the one after the last is left.
    pub states: Option<States>,
    /// The states of keys before and after the call's own, which queries see too.
    pub outside: Option<Outside>,
}

impl Settings {
    /// A call of all keys, from no state.
    pub fn new(kernel: Arc<dyn AnyKernel>, mask: AttentionMask) -> Self {
        Self { kernel, mask, states: None, outside: None }
    }
}

/// The states of keys before and after those of a call. They are numbers: no gradient passes through them.
#[derive(Debug, Clone)]
pub(crate) struct Outside([Arc<PrefixState>; 2]);

impl Outside {
    /// Of calls in `f32`.
    pub fn new(states: [State<f32>; 2]) -> Self {
        Self(states.map(|state| Arc::new(f32::prefix(state))))
    }

    /// If they are of calls in `f32`.
    pub fn states(&self) -> Option<[&State<f32>; 2]> {
        let Self([before, after]) = self;
        Some([f32::state(before)?, f32::state(after)?])
    }

    /// Those of the batch entries `indices`.
    pub fn select(&self, indices: &[usize]) -> Result<Self, kernels::Error> {
        let [before, after] = self.0.each_ref().map(|state| state.select(indices).map(Arc::new));
        Ok(Self([before?, after?]))
    }
}

/// The states at both ends of a call. They are numbers: no gradient passes through them.
#[derive(Debug, Clone)]
pub(crate) struct States {
    before: Arc<PrefixState>,
    after: Arc<Mutex<Option<PrefixState>>>,
    /// The other stretches, where the sequences are cut.
    stretch: Option<Arc<Stretch>>,
}

impl States {
    /// A call after a state.
    pub(super) fn new(before: Arc<PrefixState>) -> Self {
        Self { before, after: Arc::default(), stretch: None }
    }

    /// The same between the stretches of other processes, of calls in `f32`.
    pub fn between(self, peers: Arc<dyn Peers>, kernel: Arc<dyn AnyKernel>) -> Result<Self, kernels::Error> {
        let first = self.before().map(State::try_clone).transpose()?;
        Ok(Self { stretch: first.map(|first| Arc::new(Stretch::new(peers, kernel, first))), ..self })
    }

    /// The other stretches, where the sequences are cut.
    pub fn stretches(&self) -> Option<&dyn Stretches> {
        self.stretch.as_deref().map(|stretch| stretch as &dyn Stretches)
    }

    /// The state before a call in `f32`.
    pub fn before(&self) -> Option<&State<f32>> {
        f32::state(&self.before)
    }

    /// The state after a call in `f32`.
    pub fn leave(&self, state: State<f32>) {
        self.set(f32::prefix(state));
    }

    fn set(&self, state: PrefixState) {
        *self.after.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
    }

    /// The state that the call left.
    pub fn into_state(self) -> AttentionState {
        let after = self.after.lock().unwrap_or_else(PoisonError::into_inner).take();
        after.map(|after| Inner::Kernels(Arc::new(after))).into()
    }
}

impl Operation for Settings {
    const NAME: &'static str = "attention";
    const TAKES_ALL: bool = true;

    type Kept = Outcome;

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, kernels::Error> {
        // No denominators: asking for them makes kernels choose their algorithm for a backward too.
        Operands::new(tensors).output(self)
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Outcome), kernels::Error> {
        let outcome = Operands::new(tensors).forward(self)?;
        Ok((outcome.out.clone(), outcome))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        outcome: &Outcome,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, kernels::Error> {
        let Operands { q, k, v, parameters } = Operands::new(tensors).backward(self, outcome, d_out)?;
        Ok(vec![Some(q), Some(k), Some(v), parameters])
    }
}

/// The tensors of a call. `parameters` holds all learned tensors of the mechanism, one after the other in the kernel's
/// order; `None` where there is none.
#[derive(Debug, Clone)]
pub(super) struct Operands {
    pub q: FlexTensor,
    pub k: FlexTensor,
    pub v: FlexTensor,
    pub parameters: Option<FlexTensor>,
}

/// What the forward call gives: outputs `[batch, heads, queries, value_dim]` and denominators in the mechanism's shape.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub out: FlexTensor,
    pub denominators: FlexTensor,
}

/// A number type that Flex stores.
trait Stored: Copy + Default {
    const DTYPE: DType;
    fn storage(tensor: &FlexTensor) -> &[Self];
    fn bytes(numbers: Vec<Self>) -> Bytes;
}

macro_rules! stored {
    ($t:ident, $dtype:expr) => {
        impl Stored for $t {
            const DTYPE: DType = $dtype;
            fn storage(tensor: &FlexTensor) -> &[Self] {
                tensor.storage()
            }
            fn bytes(numbers: Vec<Self>) -> Bytes {
                Bytes::from_elems(numbers)
            }
        }
    };
}
stored!(f32, DType::F32);
stored!(f64, DType::F64);
stored!(f16, DType::F16);
stored!(bf16, DType::BF16);

/// A number type of both Flex and the kernels.
trait Number: Real + Stored {
    fn mechanism(kernel: &dyn AnyKernel) -> &dyn Kernel<Self>;
    fn scratch() -> &'static std::thread::LocalKey<Cell<Option<Scratch<Self>>>>;
    fn state(state: &PrefixState) -> Option<&State<Self>>;
    fn prefix(state: State<Self>) -> PrefixState;
}

macro_rules! number {
    ($t:ident, $scratch:ident, $variant:ident) => {
        thread_local! {
            static $scratch: Cell<Option<Scratch<$t>>> = const { Cell::new(None) };
        }

        impl Number for $t {
            fn mechanism(kernel: &dyn AnyKernel) -> &dyn Kernel<Self> {
                kernel
            }
            fn scratch() -> &'static std::thread::LocalKey<Cell<Option<Scratch<Self>>>> {
                &$scratch
            }
            fn state(state: &PrefixState) -> Option<&State<Self>> {
                match state {
                    PrefixState::$variant(state) => Some(state),
                    _ => None,
                }
            }
            fn prefix(state: State<Self>) -> PrefixState {
                PrefixState::$variant(state)
            }
        }
    };
}
number!(f32, SCRATCH_F32, F32);
number!(f64, SCRATCH_F64, F64);

/// A tensor of up to four axes, converted to the type that the kernels compute in.
fn widened(tensor: &FlexTensor) -> FlexTensor {
    match tensor.dtype() {
        DType::F16 => widened_from::<f16>(tensor),
        DType::BF16 => widened_from::<bf16>(tensor),
        _ => tensor.clone(),
    }
}

fn widened_from<H: Half + Stored>(tensor: &FlexTensor) -> FlexTensor {
    let tensor = adjacent_rows(tensor.clone());
    let layout = tensor.layout();
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    let missing = 4 - layout.shape().num_dims();
    for (axis, &stride) in layout.strides().iter().enumerate() {
        shape[missing + axis] = layout.shape()[axis];
        strides[missing + axis] = stride as usize;
    }
    let numbers = H::storage(&tensor);
    let from =
        View::strided(&numbers[layout.start_offset().min(numbers.len())..], [strides[0], strides[1], strides[2]]);
    let mut wide = vec![0.0; layout.num_elements()];
    widen(&from, shape, &mut wide).expect("a view of all that the tensor holds");
    FlexTensor::new(Bytes::from_elems(wide), Layout::contiguous(layout.shape().clone()), DType::F32)
}

/// A new tensor, of numbers that lie together in any order, rounded to another type.
fn rounded(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    match dtype {
        DType::F16 => rounded_to::<f16>(&tensor),
        DType::BF16 => rounded_to::<bf16>(&tensor),
        _ => tensor,
    }
}

fn rounded_to<H: Half + Stored>(tensor: &FlexTensor) -> FlexTensor {
    let wide: &[f32] = tensor.storage();
    let mut numbers = vec![H::default(); wide.len()];
    let shape = [1, 1, 1, wide.len()];
    narrow(wide, shape, &mut ViewMut::contiguous(&mut numbers, shape)).expect("as many numbers");
    FlexTensor::new(H::bytes(numbers), tensor.layout().clone(), H::DTYPE)
}

/// Runs `work` with scratch memory that this thread keeps.
pub(crate) fn with_scratch<R>(work: impl FnOnce(&mut Scratch<f32>) -> R) -> R {
    scratch_of(work)
}

fn scratch_of<T: Number, R>(work: impl FnOnce(&mut Scratch<T>) -> R) -> R {
    // Taken, not borrowed: while this thread waits for the kernels' tasks it may run another call.
    let mut scratch = T::scratch().take().unwrap_or_default();
    let result = work(&mut scratch);
    T::scratch().set(Some(scratch));
    result
}

/// The learned tensors as the mechanism lists them, from one that holds them all. If its length is wrong, one slice, which the
/// kernel refuses.
pub(crate) fn split_parameters<'a, T: Real>(
    mechanism: &dyn Kernel<T>,
    dims: &Dims,
    all: Option<&'a [T]>,
) -> Vec<&'a [T]> {
    let Some(mut rest) = all else { return Vec::new() };
    let listed = mechanism.parameters(dims);
    if listed.iter().map(Parameter::len).sum::<usize>() != rest.len() {
        return vec![rest];
    }
    let part = |parameter: &Parameter| {
        let (first, others) = rest.split_at(parameter.len());
        rest = others;
        first
    };
    listed.iter().map(part).collect()
}

impl Operands {
    /// Of an operation's tensors: with adjacent rows, a view wherever possible.
    fn new(tensors: &[FlexTensor]) -> Self {
        let [q, k, v, parameters @ ..] = tensors else { unreachable!("queries, keys and values") };
        let (q, k, v) = (q.clone(), k.clone(), v.clone());
        Self { q, k, v, parameters: parameters.first().cloned() }.with_adjacent_rows()
    }

    /// The same numbers with adjacent rows.
    pub fn with_adjacent_rows(self) -> Self {
        Self {
            q: adjacent_rows(self.q),
            k: adjacent_rows(self.k),
            v: adjacent_rows(self.v),
            parameters: self.parameters.map(|all| if all.is_contiguous() { all } else { all.to_contiguous() }),
        }
    }

    /// The same, converted to the type that the kernels compute in.
    fn widened(&self) -> Self {
        let parameters = self.parameters.as_ref().map(widened);
        Self { q: widened(&self.q), k: widened(&self.k), v: widened(&self.v), parameters }
    }

    pub fn dims(&self) -> Dims {
        let ([batch, heads, queries, head_dim], [_, kv_heads, keys, _]) = (shape(&self.q), shape(&self.k));
        Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim: shape(&self.v)[3] }
    }

    /// Runs `work` on the kernels' view of this call, with scratch memory that this thread keeps.
    fn with_call<T: Number, R>(
        &self,
        settings: &Settings,
        work: impl FnOnce(&kernels::Call<'_, T>, &mut Scratch<T>) -> R,
    ) -> R {
        let dims = self.dims();
        let parameters =
            split_parameters(T::mechanism(&*settings.kernel), &dims, self.parameters.as_ref().map(contiguous));
        let call = kernels::Call::new(dims, view(&self.q), view(&self.k), view(&self.v))
            .with_parameters(&parameters)
            .with_mask(settings.mask.as_kernel())
            .with_initial_state(settings.states.as_ref().and_then(|states| T::state(&states.before)));
        let outside =
            settings.outside.as_ref().and_then(|Outside([before, after])| Some([T::state(before)?, T::state(after)?]));
        let call = outside.map_or(call, |outside| call.with_outside(outside));
        scratch_of(|scratch| work(&call, scratch))
    }

    /// Outputs alone; rows must be adjacent.
    pub fn output(&self, settings: &Settings) -> Result<FlexTensor, kernels::Error> {
        match self.q.dtype() {
            DType::F64 => self.forward_as::<f64>(settings, None),
            DType::F32 => self.forward_as::<f32>(settings, None),
            half => Ok(rounded(self.widened().forward_as::<f32>(settings, None)?, half)),
        }
    }

    /// Outputs and denominators, for a backward; rows must be adjacent.
    pub fn forward(&self, settings: &Settings) -> Result<Outcome, kernels::Error> {
        match self.q.dtype() {
            DType::F64 => self.outcome_as::<f64>(settings),
            DType::F32 => self.outcome_as::<f32>(settings),
            half => {
                let Outcome { out, denominators } = self.widened().outcome_as::<f32>(settings)?;
                Ok(Outcome { out: rounded(out, half), denominators })
            }
        }
    }

    fn outcome_as<T: Number>(&self, settings: &Settings) -> Result<Outcome, kernels::Error> {
        let rows = T::mechanism(&*settings.kernel).denominators(&self.dims());
        let mut denominators = vec![T::ZERO; rows.iter().product()];
        let out = self.forward_as::<T>(settings, Some(&mut denominators))?;
        let denominators = FlexTensor::new(T::bytes(denominators), Layout::contiguous(Shape::from(rows)), T::DTYPE);
        Ok(Outcome { out, denominators })
    }

    fn forward_as<T: Number>(
        &self,
        settings: &Settings,
        denominators: Option<&mut [T]>,
    ) -> Result<FlexTensor, kernels::Error> {
        self.with_call::<T, _>(settings, |call, scratch| {
            let mut out = TokenMajor::new(call.dims.out());
            let output = match denominators {
                Some(denominators) => Output::training(out.view_mut(), denominators),
                None => Output::new(out.view_mut()),
            };
            let kernel = T::mechanism(&*settings.kernel);
            let mut last = settings.states.as_ref().map(|_| kernel.empty_state(&call.dims)).transpose()?;
            kernel.forward(call, output.with_final_state(last.as_mut()), scratch)?;
            if let (Some(states), Some(last)) = (&settings.states, last) {
                states.set(T::prefix(last));
            }
            Ok(out.into_tensor())
        })
    }

    /// The gradients of q, k, v and the parameters, from that of the outputs; rows must be adjacent.
    pub fn backward(&self, settings: &Settings, outcome: &Outcome, d_out: FlexTensor) -> Result<Self, kernels::Error> {
        let d_out = adjacent_rows(d_out);
        match self.q.dtype() {
            DType::F64 => self.backward_as::<f64>(settings, outcome, &d_out),
            DType::F32 => self.backward_as::<f32>(settings, outcome, &d_out),
            half => {
                let wide = Outcome { out: widened(&outcome.out), denominators: outcome.denominators.clone() };
                let Self { q, k, v, parameters } =
                    self.widened().backward_as::<f32>(settings, &wide, &widened(&d_out))?;
                let round = |x| rounded(x, half);
                Ok(Self { q: round(q), k: round(k), v: round(v), parameters: parameters.map(round) })
            }
        }
    }

    fn backward_as<T: Number>(
        &self,
        settings: &Settings,
        outcome: &Outcome,
        d_out: &FlexTensor,
    ) -> Result<Self, kernels::Error> {
        self.with_call::<T, _>(settings, |call, scratch| {
            // By the tensors' own shapes: keys may be narrower than queries.
            let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| TokenMajor::new(shape(x)));
            let mut d_parameters = vec![T::ZERO; call.parameters.iter().map(|p| p.len()).sum()];
            let mut rest = d_parameters.as_mut_slice();
            let part = |given: &&[T]| {
                let (first, others) = std::mem::take(&mut rest).split_at_mut(given.len());
                rest = others;
                first
            };
            let mut parameters: Vec<&mut [T]> = call.parameters.iter().map(part).collect();
            let cotangent = Cotangent {
                out: view(&outcome.out),
                denominators: contiguous(&outcome.denominators),
                d_out: view(d_out),
                final_state: None,
            };
            let gradients = Gradients {
                dq: dq.view_mut(),
                dk: dk.view_mut(),
                dv: dv.view_mut(),
                parameters: &mut parameters,
                initial_state: None,
            };
            T::mechanism(&*settings.kernel).backward(call, &cotangent, gradients, scratch)?;
            let parameters = self.parameters.as_ref().map(|given| {
                let layout = Layout::contiguous(given.layout().shape().clone());
                FlexTensor::new(T::bytes(d_parameters), layout, T::DTYPE)
            });
            Ok(Self { q: dq.into_tensor(), k: dk.into_tensor(), v: dv.into_tensor(), parameters })
        })
    }
}

/// Batch, heads, tokens, width.
fn shape(tensor: &FlexTensor) -> [usize; 4] {
    tensor.layout().shape().dims()
}

/// A new tensor `[batch, heads, tokens, width]`, stored in the order batch, token, head.
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

/// The tensor itself where its rows are adjacent numbers, otherwise a contiguous copy.
pub(crate) fn adjacent_rows(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let (shape, strides) = (layout.shape(), layout.strides());
    let last = shape.num_dims() - 1;
    let adjacent = shape[last] <= 1 || strides[last] == 1;
    if adjacent && strides.iter().all(|&stride| stride >= 0) {
        return tensor;
    }
    #[cfg(test)]
    copies::count();
    tensor.to_contiguous()
}

/// The kernels' view of a tensor of `f32` with adjacent rows.
pub(crate) fn view_f32(tensor: &FlexTensor) -> View<'_, f32> {
    view(tensor)
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

    pub(crate) fn count() {
        COUNT.with(|count| count.set(count.get() + 1));
    }
}
