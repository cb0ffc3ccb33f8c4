//! Python exceptions that name the operation, the argument, what was expected and what came.

use pyo3::PyErr;
use pyo3::exceptions::{PyTypeError, PyValueError};

/// Arguments that have another name in Python than in the kernels.
const NAMES: [(&str, &str); 4] = [
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

/// What a kernel rejected, under the names of `operation`.
pub fn kernel(operation: &str, error: longspan_kernels::Error) -> PyErr {
    use longspan_kernels::Error;
    match error {
        Error::Argument { argument, expected, got, .. } => {
            let argument = NAMES.iter().find(|(name, _)| *name == argument).map_or(argument, |(_, known)| known);
            value(operation, argument, expected, got)
        }
        Error::Unsupported { combination, mend, .. } => {
            PyValueError::new_err(format!("{operation}: {combination} has no meaning; {mend}"))
        }
        other => PyValueError::new_err(format!("{operation}: {other}")),
    }
}
