//! NumPy arrays as the kernels read them: in place if rows are contiguous, otherwise as a copy.

use longspan_kernels::half::{self, Half, bf16, f16};
use longspan_kernels::{View, ViewMut};
use numpy::npyffi::NPY_TYPES;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, dtype};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

use crate::buffer_pool::Buffer;
use crate::error;
use crate::precise::Precise;
use crate::threads;

/// The two number types of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    F32,
    F64,
}

/// What an array holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F64,
    F16,
    /// NumPy has no such type; the Python package passes it as two raw bytes, `V2`.
    Bf16,
}

impl Dtype {
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// What the kernels compute in.
    pub fn precision(self) -> Precision {
        match self {
            Self::F64 => Precision::F64,
            _ => Precision::F32,
        }
    }

    fn of(descriptor: &Bound<'_, PyArrayDescr>) -> Option<Self> {
        match descriptor.num() {
            n if n == NPY_TYPES::NPY_FLOAT as i32 => Some(Self::F32),
            n if n == NPY_TYPES::NPY_DOUBLE as i32 => Some(Self::F64),
            n if n == NPY_TYPES::NPY_HALF as i32 => Some(Self::F16),
            n if n == NPY_TYPES::NPY_VOID as i32 && descriptor.itemsize() == 2 && !descriptor.has_fields() => {
                Some(Self::Bf16)
            }
            _ => None,
        }
    }

    pub fn descriptor(self, py: Python<'_>) -> PyResult<Bound<'_, PyArrayDescr>> {
        match self {
            Self::F32 => Ok(dtype::<f32>(py)),
            Self::F64 => Ok(dtype::<f64>(py)),
            Self::F16 => PyArrayDescr::new(py, "f2"),
            Self::Bf16 => PyArrayDescr::new(py, "V2"),
        }
    }
}

/// `$body` with `$t` for the number type of a precision.
macro_rules! with_precision {
    ($precision:expr, $t:ident => $body:expr) => {
        match $precision {
            $crate::arrays::Precision::F32 => {
                type $t = f32;
                $body
            }
            $crate::arrays::Precision::F64 => {
                type $t = f64;
                $body
            }
        }
    };
}
pub(crate) use with_precision;

impl Precision {
    /// The type of arrays that hold what the kernels compute.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F64 => Dtype::F64,
        }
    }

    pub fn name(self) -> &'static str {
        self.dtype().name()
    }
}

/// Numbers in single precision that are stored in half precision.
#[derive(Debug)]
pub struct Wide {
    buffer: Buffer,
    len: usize,
}

impl Wide {
    /// `len` numbers of any value.
    pub fn new(len: usize) -> PyResult<Self> {
        Ok(Self { buffer: Buffer::new(len.saturating_mul(size_of::<f32>()))?, len })
    }

    fn of(tensor: &Tensor<'_>) -> PyResult<Self> {
        let mut wide = Self::new(tensor.array.len())?;
        match tensor.dtype {
            Dtype::F16 => wide.fill::<f16>(tensor),
            _ => wide.fill::<bf16>(tensor),
        }
        Ok(wide)
    }

    fn fill<H: Half>(&mut self, tensor: &Tensor<'_>) {
        let (shape, strides) = tensor.four_axes(size_of::<H>());
        let from = View::strided(tensor.elements::<H>(), strides);
        let py = tensor.array.py();
        py.detach(|| threads::run(self.seconds(), || half::widen(&from, shape, self.numbers_mut()), None))
            .expect("a view of all that the array holds");
    }

    /// Rounds into an array with as many numbers, row-major, which nobody else has seen.
    pub fn round_into(&self, array: &mut Bound<'_, PyUntypedArray>) {
        match Dtype::of(&array.dtype()) {
            Some(Dtype::F16) => self.round::<f16>(array),
            _ => self.round::<bf16>(array),
        }
    }

    fn round<H: Half>(&self, array: &mut Bound<'_, PyUntypedArray>) {
        if self.len == 0 {
            return;
        }
        let py = array.py();
        // SAFETY: a new array of this type, row-major and aligned, any bits of which are a number; nobody else refers to it.
        let to: &mut [H] =
            unsafe { std::slice::from_raw_parts_mut((*array.as_array_ptr()).fields.data.cast(), array.len()) };
        // Where rows begin does not matter here.
        let shape = [1, 1, 1, to.len()];
        let mut to = ViewMut::contiguous(to, shape);
        py.detach(|| threads::run(self.seconds(), || half::narrow(self.numbers(), shape, &mut to), None))
            .expect("as many numbers as the array has");
    }

    /// They are of single precision, whatever a call asks for.
    pub fn numbers<T: Precise>(&self) -> &[T] {
        assert!(T::PRECISION == Precision::F32, "half-precision numbers are computed in single precision");
        // SAFETY: as below.
        unsafe { std::slice::from_raw_parts(self.buffer.start().cast(), self.len) }
    }

    pub fn numbers_mut<T: Precise>(&mut self) -> &mut [T] {
        assert!(T::PRECISION == Precision::F32, "half-precision numbers are computed in single precision");
        // SAFETY: there is room for so many from a cache line on, any bits are a number, and nobody else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.start().cast(), self.len) }
    }

    /// Estimated time of a conversion on one thread.
    fn seconds(&self) -> f64 {
        self.len as f64 * 0.5e-9
    }
}

/// An array whose last axis is adjacent numbers and whose other strides are whole numbers of elements, not negative.
#[derive(Debug)]
pub struct Tensor<'py> {
    array: Bound<'py, PyUntypedArray>,
    dtype: Dtype,
    copied: bool,
    /// All numbers of a half-precision array, row-major.
    wide: Option<Wide>,
}

fn any_array<'py>(operation: &str, argument: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    match value.cast::<PyUntypedArray>() {
        Ok(array) => Ok(array.clone()),
        Err(_) => Err(error::kind(operation, argument, "a numpy.ndarray", value.get_type().qualname()?)),
    }
}

impl<'py> Tensor<'py> {
    /// Takes `value` as `argument` of `operation`: in place, copied or widened.
    pub fn new(operation: &str, argument: &str, value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = any_array(operation, argument, value)?;
        let descriptor = array.dtype();
        let Some(dtype) = Dtype::of(&descriptor) else {
            return Err(error::kind(operation, argument, "float32, float64, float16 or bfloat16", descriptor));
        };
        let walkable = descriptor.is_native_byteorder() != Some(false) && array.is_aligned() && {
            let size = descriptor.itemsize() as isize;
            let axes = array.shape().iter().zip(array.strides());
            // Where an axis has one entry its stride says nothing; NumPy may hold any number there.
            let leading = axes.rev().skip(1).all(|(&n, &stride)| n <= 1 || (stride >= 0 && stride % size == 0));
            let last = array.shape().last().zip(array.strides().last());
            leading && last.is_none_or(|(&n, &stride)| n <= 1 || stride == size)
        };
        let mut tensor =
            if walkable { Self { array, dtype, copied: false, wide: None } } else { Self::copy(array, dtype)? };
        // More axes are refused wherever an array is used.
        if matches!(dtype, Dtype::F16 | Dtype::Bf16) && tensor.array.ndim() <= 4 {
            tensor.wide = Some(Wide::of(&tensor)?);
            tensor.copied = true;
        }
        Ok(tensor)
    }

    fn copy(array: Bound<'py, PyUntypedArray>, dtype: Dtype) -> PyResult<Self> {
        let py = array.py();
        let options = [("order", "C")].into_py_dict(py)?;
        let copy = array.call_method(intern!(py, "astype"), (dtype.descriptor(py)?,), Some(&options))?;
        Ok(Self { array: copy.cast_into::<PyUntypedArray>()?, dtype, copied: true, wide: None })
    }

    /// The same in a given type, which another argument has set.
    pub fn like(operation: &str, argument: &str, value: &Bound<'py, PyAny>, dtype: Dtype) -> PyResult<Self> {
        Self::new(operation, argument, value)?.expect(operation, argument, dtype)
    }

    /// Refuses another type than that of q.
    pub fn expect(self, operation: &str, argument: &str, dtype: Dtype) -> PyResult<Self> {
        if self.dtype != dtype {
            let expected = format_args!("{} like q", dtype.name()).to_string();
            return Err(error::kind(operation, argument, expected, self.dtype.name()));
        }
        Ok(self)
    }

    /// The numbers of single precision, row-major, to be changed: a copy, if they are not one yet.
    pub fn singles_mut(&mut self) -> PyResult<&mut [f32]> {
        if self.wide.is_none() {
            let numbers = self.numbers::<f32>();
            let mut wide = Wide::new(numbers.len())?;
            wide.numbers_mut().copy_from_slice(numbers);
            self.wide = Some(wide);
        }
        Ok(self.wide.as_mut().expect("made above").numbers_mut())
    }

    /// The same with all numbers adjacent, in row-major order.
    pub fn row_major(self) -> PyResult<Self> {
        if self.wide.is_some() || self.array.is_c_contiguous() { Ok(self) } else { Self::copy(self.array, self.dtype) }
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn shape(&self) -> &[usize] {
        self.array.shape()
    }

    /// The numbers that the kernels see, from the first to the last.
    pub fn numbers<T: Precise>(&self) -> &[T] {
        if let Some(wide) = &self.wide {
            return wide.numbers();
        }
        assert!(T::PRECISION == self.dtype.precision(), "the precision of a call is that of all its arrays");
        self.elements()
    }

    /// The array's own elements, of type `E`, from the first to the last.
    fn elements<E>(&self) -> &[E] {
        if self.array.is_empty() {
            return &[];
        }
        let size = size_of::<E>();
        assert!(size == self.array.dtype().itemsize(), "elements of the array's own type");
        let axes = self.array.shape().iter().zip(self.array.strides());
        let last: usize = axes.map(|(&n, &stride)| if n <= 1 { 0 } else { (n - 1) * (stride as usize / size) }).sum();
        // SAFETY: `array` keeps the memory alive and unmoved while `self` lives (NumPy does not resize an array that
        // others refer to). It holds numbers of this size, any bits of which are one, at aligned places, as `new` looked
        // at; strides are not negative, so it begins at the data pointer and ends with the element at the largest index.
        // Another thread of the program that writes to it meanwhile races with this read as it would with any function
        // of NumPy.
        unsafe {
            let data = (*self.array.as_array_ptr()).fields.data.cast::<E>();
            std::slice::from_raw_parts(data, last + 1)
        }
    }

    /// Shape and strides of the array, in elements of `size` bytes, as if it had four axes; it has no more.
    fn four_axes(&self, size: usize) -> ([usize; 4], [usize; 3]) {
        let (mut shape, mut strides) = ([1; 4], [0; 3]);
        let missing = 4 - self.array.ndim();
        for (axis, (&n, &stride)) in self.array.shape().iter().zip(self.array.strides()).enumerate() {
            shape[missing + axis] = n;
            if missing + axis < 3 {
                strides[missing + axis] = if n <= 1 { 0 } else { stride as usize / size };
            }
        }
        (shape, strides)
    }

    /// The kernels' view of an array of four axes.
    pub fn view<T: Precise>(&self) -> View<'_, T> {
        match (&self.wide, <[usize; 4]>::try_from(self.shape())) {
            (Some(_), Ok(shape)) => View::contiguous(self.numbers(), shape),
            _ => View::strided(self.numbers(), self.four_axes(size_of::<T>()).1),
        }
    }
}

/// See the Python function of this name.
pub fn seen_by_kernels(value: &Bound<'_, PyAny>) -> PyResult<(usize, bool)> {
    let tensor = Tensor::new("seen_by_kernels", "array", value)?;
    let address = with_precision!(tensor.dtype().precision(), T => tensor.numbers::<T>().as_ptr().addr());
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
