//! New arrays for results, which the kernels write.

use longspan_kernels::ViewMut;
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::arrays::{Dtype, Wide};
use crate::buffer_pool;
use crate::precise::Precise;

/// A new array of any contents. Failure is a `MemoryError`.
fn empty<'py>(py: Python<'py>, shape: &[usize], dtype: Dtype) -> PyResult<Bound<'py, PyUntypedArray>> {
    let descriptor = dtype.descriptor(py)?;
    if let Some(array) = buffer_pool::array(py, shape, &descriptor) {
        return array;
    }
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let empty = EMPTY.import(py, "numpy", "empty")?;
    Ok(empty.call1((PyTuple::new(py, shape)?, descriptor))?.cast_into::<PyUntypedArray>()?)
}

/// A new array for a result. In half precision a single-precision copy comes with it, which is rounded into it at the end.
pub struct Fresh<'py> {
    array: Bound<'py, PyUntypedArray>,
    wide: Option<Wide>,
}

impl<'py> Fresh<'py> {
    pub fn new(py: Python<'py>, shape: &[usize], dtype: Dtype) -> PyResult<Self> {
        let array = empty(py, shape, dtype)?;
        let wide = matches!(dtype, Dtype::F16 | Dtype::Bf16).then(|| Wide::new(array.len())).transpose()?;
        Ok(Self { array, wide })
    }

    /// What the kernels write.
    pub fn numbers_mut<T: Precise>(&mut self) -> &mut [T] {
        if let Some(wide) = &mut self.wide {
            return wide.numbers_mut();
        }
        if self.array.is_empty() {
            return &mut [];
        }
        // SAFETY: made by `empty` for this type, so row-major, aligned and of `len` numbers, any bits of which are a
        // number; no other reference to it exists until the call returns it.
        unsafe {
            std::slice::from_raw_parts_mut((*self.array.as_array_ptr()).fields.data.cast::<T>(), self.array.len())
        }
    }

    pub fn finish(mut self) -> Bound<'py, PyUntypedArray> {
        if let Some(wide) = &self.wide {
            wide.round_into(&mut self.array);
        }
        self.array
    }
}

/// A [`Fresh`] tensor of four axes, in their order or with tokens before heads.
pub struct FreshTensor<'py> {
    fresh: Fresh<'py>,
    shape: [usize; 4],
    token_major: bool,
}

impl<'py> FreshTensor<'py> {
    pub fn new(py: Python<'py>, shape: [usize; 4], dtype: Dtype, token_major: bool) -> PyResult<Self> {
        let [batch, heads, tokens, width] = shape;
        let axes = if token_major { [batch, tokens, heads, width] } else { shape };
        Ok(Self { fresh: Fresh::new(py, &axes, dtype)?, shape, token_major })
    }

    pub fn view_mut<T: Precise>(&mut self) -> ViewMut<'_, T> {
        let [_, heads, tokens, width] = self.shape;
        let numbers = self.fresh.numbers_mut();
        if self.token_major {
            ViewMut::strided(numbers, [tokens * heads * width, width, heads * width])
        } else {
            ViewMut::contiguous(numbers, self.shape)
        }
    }

    /// The array as `[batch, head, token, feature]`.
    pub fn finish(self) -> PyResult<Bound<'py, PyAny>> {
        let array = self.fresh.finish();
        if self.token_major {
            array.call_method1(intern!(array.py(), "transpose"), (0, 2, 1, 3))
        } else {
            Ok(array.into_any())
        }
    }
}
