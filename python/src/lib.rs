//! The native half of the Python package `longspan`: the kernels of `longspan-kernels` on the memory of NumPy arrays.
//!
//! Reading order: [`mechanisms`] makes a kernel from a name and options; [`call`] runs it on arrays; [`arrays`] says which arrays
//! are read in place and which are copied; [`buffer_pool`] holds the memory of results; [`state`] is what streaming carries; [`threads`] and [`openmp`] say on which threads all of this runs, before and after a fork;
//! [`signals`] ends it at Ctrl-C. Names, defaults and PyTorch are in the Python package, `longspan/` beside this file.

mod arrays;
mod buffer_pool;
mod call;
mod error;
mod inputs;
mod mechanisms;
mod openmp;
mod precise;
mod results;
mod signals;
mod state;
mod threads;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use numpy::{PyArray1, PyArrayMethods};
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::call::Mechanism;
    #[pymodule_export]
    use crate::state::State;

    /// Every mechanism: name, one line on it, and the algorithms that can be forced.
    #[pyfunction]
    fn mechanisms() -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
        crate::mechanisms::TABLE.iter().map(|entry| (entry.name, entry.summary, entry.algorithms())).collect()
    }

    /// The random rows of a feature map for rows of ``head_dim`` numbers, ``[features, head_dim]``; none for most maps.
    #[pyfunction]
    fn random_rows<'py>(py: Python<'py>, feature_map: &str, head_dim: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let map = crate::mechanisms::feature_map(feature_map)?;
        let shape = [map.features(head_dim), head_dim];
        map.projection(head_dim).map(|rows| Ok(PyArray1::from_slice(py, &rows).reshape(shape)?.into_any())).transpose()
    }

    /// Sets the number of threads that kernels run on; results have the same bits for any number.
    ///
    /// Parameters
    /// ----------
    /// threads : int
    ///     From now on. 0 stands for the environment's ``LONGSPAN_NUM_THREADS`` or ``RAYON_NUM_THREADS``, else as many as
    ///     PyTorch uses where `longspan.torch` is imported, else as many as the machine has.
    ///
    /// Raises
    /// ------
    /// TypeError, ValueError
    ///     For anything but an integer from 0 on, or for too many.
    ///
    /// Examples
    /// --------
    /// >>> import longspan
    /// >>> longspan.set_num_threads(1)
    /// >>> longspan.get_num_threads()
    /// 1
    /// >>> longspan.set_num_threads(0)
    #[pyfunction]
    fn set_num_threads(threads: &Bound<'_, PyAny>) -> PyResult<()> {
        crate::threads::set(crate::error::size("set_num_threads", "threads", threads)?)
    }

    /// From now on kernels run on the threads of the OpenMP runtime that a loaded library uses, if there is one and it is not
    /// another number of threads than was wanted. `get_num_threads` is PyTorch's.
    #[pyfunction]
    fn use_openmp_of(library: &str, get_num_threads: Py<PyAny>) -> bool {
        crate::openmp::use_of(library, get_num_threads)
    }

    /// The number of threads that kernels run on.
    ///
    /// Returns
    /// -------
    /// int
    ///     What `set_num_threads` set, else its default. Small calls stay on the caller's thread all the same.
    ///
    /// Examples
    /// --------
    /// >>> import longspan
    /// >>> longspan.get_num_threads() >= 1
    /// True
    #[pyfunction]
    fn get_num_threads() -> usize {
        crate::threads::count()
    }

    /// Gives memory that results have stood on, and that is kept for the next ones, back to the system.
    ///
    /// Examples
    /// --------
    /// >>> import longspan
    /// >>> longspan.empty_cache()
    #[pyfunction]
    fn empty_cache() {
        crate::buffer_pool::empty();
    }

    /// How an array reaches the kernels: the address that they read it at, and whether that is a copy.
    #[pyfunction]
    fn seen_by_kernels(array: &Bound<'_, PyAny>) -> PyResult<(usize, bool)> {
        crate::arrays::seen_by_kernels(array)
    }
}
