//! In the place of `cpu.rs` where this crate is built without Burn's CPU backend: names for tensors of which there are none. What takes
//! them is compiled all the same and never runs, since [`is_flex`] says so.

use burn::backend::DispatchTensor;
use burn::tensor::{Bytes, DType, Device, Shape, Tensor};
use longspan_kernels::Error;

use crate::backend::operation::Operation;

const NONE: &str = "no tensor is of a backend that is not built in";

pub(crate) fn is_flex(_: &Device) -> bool {
    false
}

pub(crate) fn to_flex<const D: usize>(_: Tensor<D>) -> crate::Result<FlexTensor> {
    Err(crate::Error::Device(NONE.into()))
}

pub(crate) fn from_flex<const D: usize>(_: FlexTensor) -> Tensor<D> {
    unreachable!("{NONE}")
}

pub(crate) fn run<const D: usize>(
    _: impl Operation,
    _: DispatchTensor,
    _: Vec<DispatchTensor>,
) -> Result<Tensor<D>, Error> {
    unreachable!("{NONE}")
}

#[derive(Debug, Clone)]
pub(crate) struct FlexTensor {
    layout: Layout,
    dtype: DType,
}

impl FlexTensor {
    pub fn new(_: Bytes, layout: Layout, dtype: DType) -> Self {
        Self { layout, dtype }
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn storage<E>(&self) -> &[E] {
        unreachable!("{NONE}")
    }

    pub fn storage_mut<E>(&mut self) -> &mut [E] {
        unreachable!("{NONE}")
    }

    pub fn is_contiguous(&self) -> bool {
        unreachable!("{NONE}")
    }

    pub fn to_contiguous(&self) -> Self {
        unreachable!("{NONE}")
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Layout {
    shape: Shape,
    strides: Vec<isize>,
    start: usize,
}

impl Layout {
    pub fn new(shape: Shape, strides: Vec<isize>, start: usize) -> Self {
        Self { shape, strides, start }
    }

    pub fn contiguous(shape: Shape) -> Self {
        Self { shape, strides: Vec::new(), start: 0 }
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    pub fn start_offset(&self) -> usize {
        self.start
    }

    pub fn num_elements(&self) -> usize {
        self.shape.num_elements()
    }
}
