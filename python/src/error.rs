//! Python exceptions that name the operation, the argument, what was expected and what came.

use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};

/// Arguments that have another name in Python than in the kernels.
const NAMES: [(&str, &str); 11] = [
    ("relative", "rel"),
    ("query_positions", "q_positions"),
    ("key_positions", "k_positions"),
    ("batch index", "indices"),
    ("initial state", "initial_state"),
    ("earlier state", "earlier"),
    ("later state", "later"),
    ("key padding", "key_padding_mask"),
    ("packed query boundaries", "cu_seqlens"),
    ("packed key boundaries", "cu_seqlens"),
    ("packed boundaries", "cu_seqlens"),
];

/// An argument of a wrong value or shape.
pub fn value(operation: &str, argument: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("{operation}: {argument}: expected {expected}, got {got}"))
}

/// An argument of a wrong type.
pub fn kind(operation: &str, argument: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> PyErr {
    PyTypeError::new_err(format!("{operation}: {argument}: expected {expected}, got {got}"))
}

/// What Python calls an argument of a kernel.
pub fn in_python(argument: &'static str) -> &'static str {
    NAMES.iter().find(|(name, _)| *name == argument).map_or(argument, |(_, known)| known)
}

/// What a kernel rejected, under the names of `operation`.
pub fn kernel(operation: &str, error: longspan_kernels::Error) -> PyErr {
    use longspan_kernels::Error;
    match error {
        Error::Argument { argument, expected, got, .. } => {
            value(operation, in_python(argument), in_words(&expected), in_words(&got))
        }
        Error::Unsupported { combination, help, .. } => {
            PyValueError::new_err(format!("{operation}: {combination} has no meaning; {help}"))
        }
        memory @ Error::Memory { .. } => PyMemoryError::new_err(format!("{operation}: {memory}")),
        other => PyValueError::new_err(format!("{operation}: {other}")),
    }
}

/// How the kernels and serde call Rust's types, and what Python calls them.
const TYPES: [(&str, &str); 3] = [("usize", "an integer from 0 on"), ("isize", "an integer"), ("f64", "a number")];

/// A message without Rust's types.
pub fn in_words(text: &str) -> String {
    TYPES.iter().fold(text.to_owned(), |text, (rust, python)| text.replace(rust, python))
}

/// An argument that is a size, or one of several.
pub fn size(operation: &str, argument: &str, given: &Bound<'_, PyAny>) -> PyResult<usize> {
    // To Python a truth value is an integer: a mask of entries would select the first two, over and over.
    let truth = given.is_instance_of::<PyBool>();
    match given.extract() {
        Ok(size) if !truth => Ok(size),
        _ => {
            let (expected, got) = ("an integer from 0 on", given.repr()?);
            let integer = !truth && (given.is_instance_of::<PyInt>() || given.hasattr("__index__")?);
            Err(if integer {
                value(operation, argument, expected, got)
            } else {
                kind(operation, argument, expected, got)
            })
        }
    }
}

/// An argument that is a list of sizes: any sequence, or an array or tensor of one axis.
pub fn sizes(operation: &str, argument: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let list = if given.hasattr("tolist")? { given.call_method0("tolist")? } else { given.clone() };
    let entries = match list.try_iter() {
        Ok(entries) if !list.is_instance_of::<PyString>() => entries,
        _ => return Err(kind(operation, argument, "a list of integers", given.repr()?)),
    };
    entries.map(|entry| size(operation, argument, &entry?)).collect()
}
