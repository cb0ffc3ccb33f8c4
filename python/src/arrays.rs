//! NumPy arrays as the kernels walk them: where they lie if rows are adjacent numbers, otherwise as a copy.

use longspan_kernels::{Real, View};
use numpy::npyffi::NPY_TYPES;
use numpy::{Element, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, dtype};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

use crate::error;

/// The two number types of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    F32,
    F64,
}

impl Precision {
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    fn of(descriptor: &Bound<'_, PyArrayDescr>) -> Option<Self> {
        match descriptor.num() {
            n if n == NPY_TYPES::NPY_FLOAT as i32 => Some(Self::F32),
            n if n == NPY_TYPES::NPY_DOUBLE as i32 => Some(Self::F64),
            _ => None,
        }
    }

    fn descriptor(self, py: Python<'_>) -> Bound<'_, PyArrayDescr> {
        match self {
            Self::F32 => dtype::<f32>(py),
            Self::F64 => dtype::<f64>(py),
        }
    }
}

/// A number type of both NumPy and the kernels.
pub trait Number: Real + Element {
    const PRECISION: Precision;
}

impl Number for f32 {
    const PRECISION: Precision = Precision::F32;
}

impl Number for f64 {
    const PRECISION: Precision = Precision::F64;
}

/// An array whose last axis is adjacent numbers and whose other strides are whole numbers of elements, not negative.
#[derive(Debug)]
pub struct Tensor<'py> {
    array: Bound<'py, PyUntypedArray>,
    precision: Precision,
    copied: bool,
}

fn any_array<'py>(operation: &str, argument: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    match value.cast::<PyUntypedArray>() {
        Ok(array) => Ok(array.clone()),
        Err(_) => Err(error::kind(operation, argument, "a numpy.ndarray", value.get_type().qualname()?)),
    }
}

impl<'py> Tensor<'py> {
    /// Takes `value` as `argument` of `operation`, in any precision that the kernels have.
    pub fn new(operation: &str, argument: &str, value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = any_array(operation, argument, value)?;
        let descriptor = array.dtype();
        let Some(precision) = Precision::of(&descriptor) else {
            return Err(error::kind(operation, argument, "float32 or float64", descriptor));
        };
        let walkable = descriptor.is_native_byteorder() != Some(false) && array.is_aligned() && {
            let size = descriptor.itemsize() as isize;
            let axes = array.shape().iter().zip(array.strides());
            // Where an axis has one entry its stride says nothing; NumPy may hold any number there.
            let leading = axes.rev().skip(1).all(|(&n, &stride)| n <= 1 || (stride >= 0 && stride % size == 0));
            let last = array.shape().last().zip(array.strides().last());
            leading && last.is_none_or(|(&n, &stride)| n <= 1 || stride == size)
        };
        if walkable {
            return Ok(Self { array, precision, copied: false });
        }
        Self::copy(array, precision)
    }

    fn copy(array: Bound<'py, PyUntypedArray>, precision: Precision) -> PyResult<Self> {
        let py = array.py();
        let options = [("order", "C")].into_py_dict(py)?;
        let copy = array.call_method(intern!(py, "astype"), (precision.descriptor(py),), Some(&options))?;
        Ok(Self { array: copy.cast_into::<PyUntypedArray>()?, precision, copied: true })
    }

    /// The same in a given precision, which another argument has set.
    pub fn like(operation: &str, argument: &str, value: &Bound<'py, PyAny>, precision: Precision) -> PyResult<Self> {
        let tensor = Self::new(operation, argument, value)?;
        if tensor.precision != precision {
            let expected = format_args!("{} like q", precision.name()).to_string();
            return Err(error::kind(operation, argument, expected, tensor.precision.name()));
        }
        Ok(tensor)
    }

    /// The same with all numbers adjacent, in row-major order.
    pub fn row_major(self) -> PyResult<Self> {
        if self.array.is_c_contiguous() { Ok(self) } else { Self::copy(self.array, self.precision) }
    }

    pub fn precision(&self) -> Precision {
        self.precision
    }

    pub fn shape(&self) -> &[usize] {
        self.array.shape()
    }

    /// The shape, if it has four axes.
    pub fn shape4(&self, operation: &str, argument: &str, axes: &str) -> PyResult<[usize; 4]> {
        self.shape().try_into().map_err(|_| error::value(operation, argument, axes, Shape(self.shape())))
    }

    /// The numbers from the first to the last.
    pub fn numbers<T: Number>(&self) -> &[T] {
        assert!(T::PRECISION == self.precision, "the precision of a call is that of all its arrays");
        if self.array.is_empty() {
            return &[];
        }
        let size = size_of::<T>();
        let axes = self.array.shape().iter().zip(self.array.strides());
        let last: usize = axes.map(|(&n, &stride)| if n <= 1 { 0 } else { (n - 1) * (stride as usize / size) }).sum();
        // SAFETY: `array` keeps the memory alive and unmoved while `self` lives (NumPy does not resize an array that
        // others refer to). It holds numbers of this type at aligned places, as `new` looked at; strides are not
        // negative, so it begins at the data pointer and ends with the element at the largest index. Another thread of
        // the program that writes to it meanwhile races with this read as it would with any function of NumPy.
        unsafe {
            let data = (*self.array.as_array_ptr()).fields.data.cast::<T>();
            std::slice::from_raw_parts(data, last + 1)
        }
    }

    /// The kernels' view of an array of four axes.
    pub fn view<T: Number>(&self) -> View<'_, T> {
        let (shape, strides) = (self.array.shape(), self.array.strides());
        let stride = |axis: usize| if shape[axis] <= 1 { 0 } else { strides[axis] as usize / size_of::<T>() };
        View::strided(self.numbers(), [stride(0), stride(1), stride(2)])
    }
}

/// See the Python function of this name.
pub fn seen_by_kernels(value: &Bound<'_, PyAny>) -> PyResult<(usize, bool)> {
    let tensor = Tensor::new("seen_by_kernels", "array", value)?;
    let address = match tensor.precision() {
        Precision::F32 => tensor.numbers::<f32>().as_ptr().addr(),
        Precision::F64 => tensor.numbers::<f64>().as_ptr().addr(),
    };
    Ok((address, tensor.copied))
}

/// Which keys are ignored, from an array of booleans `[batch, keys]`.
pub fn key_padding(operation: &str, value: &Bound<'_, PyAny>, batch: usize, keys: usize) -> PyResult<Vec<bool>> {
    let name = "key_padding_mask";
    let array = any_array(operation, name, value)?;
    if array.dtype().num() != NPY_TYPES::NPY_BOOL as i32 {
        return Err(error::kind(operation, name, "bool, True where a key is ignored", array.dtype()));
    }
    if array.shape() != [batch, keys] {
        return Err(error::value(operation, name, format!("shape ({batch}, {keys})"), Shape(array.shape())));
    }
    let strides = array.strides();
    let mut ignored = Vec::with_capacity(batch * keys);
    for b in 0..batch {
        for key in 0..keys {
            // SAFETY: the index lies inside the array's shape. Read as a byte, because an array that was made from
            // bytes by `view` may hold others than 0 and 1, which no `bool` may.
            let byte = unsafe {
                let data = (*array.as_array_ptr()).fields.data.cast::<u8>();
                *data.offset(b as isize * strides[0] + key as isize * strides[1])
            };
            ignored.push(byte != 0);
        }
    }
    Ok(ignored)
}

/// A shape as Python prints it.
pub struct Shape<'a>(pub &'a [usize]);

impl std::fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let axes: Vec<String> = self.0.iter().map(usize::to_string).collect();
        write!(f, "shape ({}{})", axes.join(", "), if axes.len() == 1 { "," } else { "" })
    }
}
