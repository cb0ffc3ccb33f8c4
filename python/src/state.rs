//! The state of a prefix as a Python object.

use longspan_kernels::{self as kernels, StateShape};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{Precision, Tensor, with_precision};
use crate::precise::Precise;
use crate::{error, mechanisms};

#[derive(Debug, Clone, PartialEq)]
pub enum Numbers {
    F32(kernels::State<f32>),
    F64(kernels::State<f64>),
}

/// `$body` on the kernels' state, of whichever numbers it is.
macro_rules! of_either {
    ($numbers:expr, $state:ident => $body:expr) => {
        match $numbers {
            Numbers::F32($state) => $body,
            Numbers::F64($state) => $body,
        }
    };
}

/// All that later tokens need to know of earlier ones: a plain value whose size does not grow with their number.
///
/// Functions with ``output_final_state=True`` and `_step` functions return one. Clone it for beam search, pickle it, send it to
/// another process, add two up by `longspan.combine`. `State(...)` makes one of what the attributes gave, perhaps in another process.
///
/// Parameters
/// ----------
/// mechanism, options : str
///     The attributes of these names.
/// batch, kv_heads : int
///     Independent sequences; key and value heads.
/// parts : sequence of int
///     Numbers in each part of one head's state.
/// numbers : array of float32 or float64, or bytes of them
///     ``[batch, kv_heads, sum(parts)]``, which the state copies.
/// dtype : str, optional
///     ``"float32"`` or ``"float64"``, where ``numbers`` are bytes.
///
/// Raises
/// ------
/// TypeError, ValueError
///     For what no state can have given.
///
/// Examples
/// --------
/// >>> import pickle
/// >>> import numpy as np
/// >>> from longspan import State, ops
/// >>> x = np.ones((2, 4, 100, 8), np.float32)
/// >>> out, state = ops.kernelized_attention(x, x, x, is_causal=True, output_final_state=True)
/// >>> state
/// <longspan.State of kernelized, batch 2, 4 key/value heads, 80 numbers of float32 each>
/// >>> beams = state.select([0, 0, 1])
/// >>> beams.batch, state.nbytes
/// (3, 2560)
/// >>> pickle.loads(pickle.dumps(state)) == state.clone() == state
/// True
/// >>> facts = state.mechanism, state.options, state.batch, state.kv_heads, state.parts
/// >>> State(*facts, state.numbers) == state
/// True
#[pyclass(module = "longspan._native", eq)]
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    pub numbers: Numbers,
}

impl State {
    pub fn shape(&self) -> StateShape {
        of_either!(&self.numbers, state => state.shape())
    }

    pub fn precision(&self) -> Precision {
        match &self.numbers {
            Numbers::F32(_) => Precision::F32,
            Numbers::F64(_) => Precision::F64,
        }
    }
}

#[pymethods]
impl State {
    #[new]
    #[pyo3(signature = (mechanism, options, batch, kv_heads, parts, numbers, dtype=None))]
    fn new(
        mechanism: &str,
        options: &str,
        batch: &Bound<'_, PyAny>,
        kv_heads: &Bound<'_, PyAny>,
        parts: &Bound<'_, PyAny>,
        numbers: &Bound<'_, PyAny>,
        dtype: Option<&str>,
    ) -> PyResult<Self> {
        let operation = "State";
        let numbers = match dtype {
            Some(dtype) => numbers.py().import("numpy")?.call_method1("frombuffer", (numbers, dtype))?,
            None => numbers.clone(),
        };
        let batch = error::size(operation, "batch", batch)?;
        let kv_heads = error::size(operation, "kv_heads", kv_heads)?;
        let parts = error::sizes(operation, "parts", parts)?;
        let Some(mechanism) = mechanisms::state_name(mechanism) else {
            return Err(error::value(operation, "mechanism", "the name of a mechanism that has a state", mechanism));
        };
        let Some((version, fingerprint)) = options
            .split_once('.')
            .and_then(|(version, hex)| Some((version.parse().ok()?, u64::from_str_radix(hex, 16).ok()?)))
        else {
            return Err(error::value(operation, "options", "what the options of a state gave", options));
        };
        let given = parts.len();
        let parts = <[usize; 6]>::try_from(parts).map_err(|_| error::value(operation, "parts", "6 sizes", given))?;
        let head = parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part));
        let fits = head.and_then(|head| head.checked_mul(batch)).and_then(|n| n.checked_mul(kv_heads));
        if fits.is_none() {
            return Err(error::value(operation, "parts", "sizes that fit the address space", format!("{parts:?}")));
        }
        let shape = StateShape { mechanism, version, options: fingerprint, batch, kv_heads, parts };
        let numbers = Tensor::new(operation, "numbers", &numbers)?.row_major()?;
        let made = with_precision!(numbers.dtype().precision(), T => {
            kernels::State::<T>::from_numbers(shape, numbers.numbers().to_vec()).map(T::wrap)
        });
        made.map_err(|e| error::kernel(operation, e))
    }

    /// Name of the mechanism whose state it is.
    #[getter]
    fn mechanism(&self) -> &'static str {
        self.shape().mechanism
    }

    /// The version of its layout and a fingerprint of the options that made it: a mechanism with other options refuses it.
    #[getter]
    fn options(&self) -> String {
        let shape = self.shape();
        format!("{}.{:016x}", shape.version, shape.options)
    }

    /// Independent sequences.
    #[getter]
    fn batch(&self) -> usize {
        self.shape().batch
    }

    /// Key and value heads.
    #[getter]
    fn kv_heads(&self) -> usize {
        self.shape().kv_heads
    }

    /// Numbers in each part of one head's state.
    #[getter]
    fn parts(&self) -> Vec<usize> {
        self.shape().parts.to_vec()
    }

    /// ``"float32"`` or ``"float64"``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.precision().name()
    }

    /// A copy of all numbers, ``[batch, kv_heads, sum(parts)]``.
    #[getter]
    fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let shape = self.shape();
        let axes = [shape.batch, shape.kv_heads, shape.head_len()];
        Ok(of_either!(&self.numbers, state => PyArray1::from_slice(py, state.numbers()).reshape(axes)?.into_any()))
    }

    /// Bytes that the numbers take.
    #[getter]
    fn nbytes(&self) -> usize {
        of_either!(&self.numbers, state => state.bytes())
    }

    /// A state of its own with the same numbers.
    ///
    /// Returns
    /// -------
    /// State
    ///     What happens to one no longer changes the other.
    #[pyo3(name = "clone")]
    fn duplicate(&self) -> PyResult<Self> {
        let copy = of_either!(&self.numbers, state => state.try_clone().map(Precise::wrap));
        copy.map_err(|e| error::kernel("State.clone", e))
    }

    /// The states of some batch entries, such as the beams that survive.
    ///
    /// Parameters
    /// ----------
    /// indices : sequence of int, or tensor of integers
    ///     Entries from 0 to ``batch - 1``, in the order wanted; one may come several times.
    ///
    /// Returns
    /// -------
    /// State
    ///     Its ``batch`` is ``len(indices)``.
    ///
    /// Raises
    /// ------
    /// TypeError, ValueError
    ///     For other indices; negative ones are refused.
    /// MemoryError
    ///     Where there is no memory for so many; the state stays as it is.
    fn select(&self, indices: &Bound<'_, PyAny>) -> PyResult<Self> {
        let indices = error::sizes("State.select", "indices", indices)?;
        // Entry counts multiply; a list that asks for more than there can be is refused before memory is asked for.
        let entry = self.shape().kv_heads.saturating_mul(self.shape().head_len());
        if entry.checked_mul(indices.len()).is_none_or(|n| n > isize::MAX as usize / 8) {
            return Err(PyValueError::new_err("State.select: indices: more entries than fit the address space"));
        }
        let chosen = of_either!(&self.numbers, state => state.select(&indices).map(Precise::wrap));
        chosen.map_err(|e| error::kernel("State.select", e))
    }

    fn __copy__(&self) -> PyResult<Self> {
        self.duplicate()
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> PyResult<Self> {
        self.duplicate()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        // Bytes: `torch.load` with `weights_only` refuses NumPy's arrays.
        let numbers = self.numbers(py)?.call_method0("tobytes")?;
        let shape = self.shape();
        let (mechanism, parts) = (shape.mechanism, shape.parts.to_vec());
        let parts = (mechanism, self.options(), shape.batch, shape.kv_heads, parts, numbers, self.dtype());
        Ok((py.get_type::<Self>().into_any(), parts.into_pyobject(py)?))
    }

    fn __repr__(&self) -> String {
        let shape = self.shape();
        format!(
            "<longspan.State of {}, batch {}, {} key/value heads, {} numbers of {} each>",
            shape.mechanism,
            shape.batch,
            shape.kv_heads,
            shape.head_len(),
            self.dtype()
        )
    }
}
