//! Tensors of the CPU backend as slices, and back.

use crate::backend::place;
use crate::cpu::{FlexTensor, Layout, is_flex, to_flex};
use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::Linear;
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};
use longspan_layers::Weights;

/// Whether a tensor is of the CPU backend, with or without autodiff, and of `f32`.
pub(crate) fn is_f32<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && is_flex(&x.device())
}

/// Where all that a module has learned lies, and of which types it is.
pub(crate) fn places(module: &impl Module) -> Vec<(Device, DType)> {
    struct Places(Vec<(Device, DType)>);
    impl ModuleVisitor for Places {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(place(&param.val()));
        }
    }
    let mut places = Places(Vec::new());
    module.visit(&mut places);
    places.0
}

/// Whether [`is_f32`] holds of all that a module has learned.
pub(crate) fn are_f32(module: &impl Module) -> bool {
    places(module).iter().all(|(device, dtype)| *dtype == DType::F32 && is_flex(device))
}

/// A tensor's own numbers, contiguous, of one without autodiff.
pub(crate) fn taken<const D: usize>(x: Tensor<D>) -> FlexTensor {
    to_flex(x).unwrap_or_else(|error| panic!("{error:?}")).to_contiguous()
}

/// The numbers of a contiguous tensor to write to; copied first where another tensor shares them.
pub(crate) fn own(x: &mut FlexTensor) -> &mut [f32] {
    let (start, len) = (x.layout().start_offset(), x.layout().num_elements());
    &mut x.storage_mut::<f32>()[start..][..len]
}

/// Adds a layer's weight and, if it has one, its bias to the tensors of an operation; whether it has one.
pub(crate) fn push_layer(layer: &Linear, tensors: &mut Vec<DispatchTensor>) -> bool {
    tensors.push(layer.weight.val().into_dispatch());
    tensors.extend(layer.bias.as_ref().map(|bias| bias.val().into_dispatch()));
    layer.bias.is_some()
}

/// The numbers of a contiguous tensor.
pub(crate) fn numbers(tensor: &FlexTensor) -> &[f32] {
    let layout = tensor.layout();
    &tensor.storage::<f32>()[layout.start_offset()..][..layout.num_elements()]
}

/// Numbers of any type of integers; those that have no place in 64 bits with a sign are the largest that has.
pub(crate) fn integers(data: &TensorData) -> impl Iterator<Item = i64> {
    let wide = data.dtype() == DType::U64;
    let unsigned = wide.then(|| data.iter::<u64>().map(|x| i64::try_from(x).unwrap_or(i64::MAX)));
    unsigned.into_iter().flatten().chain((!wide).then(|| data.iter::<i64>()).into_iter().flatten())
}

/// Its sizes.
pub(crate) fn shape(tensor: &FlexTensor) -> Shape {
    tensor.layout().shape().clone()
}

/// A tensor of numbers.
pub(crate) fn tensor(numbers: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(numbers), Layout::contiguous(shape.into()), DType::F32)
}

/// A layer's weight and, if it has one, its bias, from the tensors of an operation.
pub(crate) fn weights<'a>(tensors: &mut impl Iterator<Item = &'a FlexTensor>, bias: bool) -> Weights<'a> {
    let weight = tensors.next().map_or(&[][..], numbers);
    Weights { weight, bias: bias.then(|| tensors.next().map(numbers)).flatten() }
}

/// The gradients of such a layer, one after the other.
pub(crate) fn of_layer([weight, bias]: [Vec<f32>; 2], biased: bool) -> impl Iterator<Item = Vec<f32>> {
    std::iter::once(weight).chain(biased.then_some(bias))
}

/// The gradients of an operation's tensors, in their order.
pub(crate) fn gradients(
    numbers: impl IntoIterator<Item = Vec<f32>>,
    tensors: &[FlexTensor],
) -> Vec<Option<FlexTensor>> {
    numbers.into_iter().zip(tensors).map(|(numbers, of)| Some(tensor(numbers, shape(of)))).collect()
}
