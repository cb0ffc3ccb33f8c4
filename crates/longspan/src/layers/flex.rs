//! Tensors of the CPU backend as slices, and back.

use burn::backend::DispatchDevice;
use burn::tensor::{Bytes, DType, Shape, Tensor};
use burn_flex::{FlexTensor, Layout};

/// Whether a tensor is of the CPU backend, with or without autodiff, and of `f32`.
pub(super) fn is_f32<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && matches!(x.device().inner().as_dispatch(), DispatchDevice::Flex(_))
}

/// Stands for a tensor that is not there: operations take no optional ones. It is never read.
pub(super) fn absent<const D: usize, const N: usize>(like: &Tensor<D>) -> Tensor<N> {
    Tensor::zeros([1; N], (&like.device().inner(), DType::F32))
}

/// The numbers of a contiguous tensor.
pub(super) fn numbers(tensor: &FlexTensor) -> &[f32] {
    let layout = tensor.layout();
    &tensor.storage::<f32>()[layout.start_offset()..][..layout.num_elements()]
}

/// A tensor of numbers.
pub(super) fn tensor(numbers: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(numbers), Layout::contiguous(shape), DType::F32)
}
