//! How many digits f32 keeps over a long sequence: each mechanism by each algorithm against the same in f64, and
//! f64 against the definition.

use std::fmt::Write;
use std::ops::ControlFlow;

use longspan_kernels::{Dims, Error as KernelError, Mask, Order};

use crate::conformance::order_name;
use crate::error::Error;
use crate::inputs::Inputs;
use crate::registry::{Candidate, Entry};
use crate::sweep::{Progress, Watch};

/// Largest error of an output in f32, relative to the largest output.
pub const OUTPUT_TARGET: f64 = 5e-6;

/// Largest error of a gradient in f32, relative to the largest number of that gradient.
pub const GRADIENT_TARGET: f64 = 2e-5;

/// The definition takes time quadratic in the length: it answers for so many rows at the end.
const DEFINED_ROWS: usize = 64;

/// The errors of one mechanism by one algorithm under one mask.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Mechanism and algorithm.
    pub candidate: String,
    /// Causal or bidirectional.
    pub order: Order,
    /// Outputs in f32 against f64.
    pub output: f64,
    /// The worst gradient in f32 against f64, and what it is the gradient of.
    pub gradient: (f64, &'static str),
    /// The last outputs in f64 against the definition.
    pub f64_error: f64,
}

/// Measures every candidate of `entries` over a call of so many tokens, heads, and numbers in a head.
///
/// # Errors
/// If a kernel refuses a call, but for masks that it has no meaning for.
pub fn measure(
    entries: &[Entry],
    (length, heads, head_dim): (usize, usize, usize),
    watch: Watch<'_>,
) -> Result<Vec<Row>, Error> {
    let candidates: Vec<_> = entries.iter().flat_map(Entry::candidates).collect();
    let trials: Vec<_> =
        candidates.iter().flat_map(|c| [Order::Causal, Order::Bidirectional].map(|order| (c, order))).collect();
    let mut rows = Vec::new();
    for (done, &(candidate, order)) in trials.iter().enumerate() {
        let label = format!("{candidate}, {}", order_name(order));
        if watch(&Progress { done, total: trials.len(), label }) == ControlFlow::Break(()) {
            break;
        }
        match row(candidate, Dims::square(1, heads, length, head_dim), order) {
            Ok(row) => rows.push(row),
            Err(KernelError::Unsupported { .. }) => {}
            Err(error) => return Err(candidate.refused(length)(error)),
        }
    }
    Ok(rows)
}

fn row(candidate: &Candidate, dims: Dims, order: Order) -> Result<Row, KernelError> {
    let (single, double) = (candidate.single(dims.queries), candidate.double(dims.queries));
    let inputs = Inputs::random(&*double, dims, Mask { order, ..Mask::default() });
    let (expected, expected_gradients) = inputs.run(&*double)?;
    let (out, gradients) = inputs.to_f32().run(&*single)?;
    let gradients = gradients.iter().zip(&expected_gradients).zip(&inputs.names);
    let gradient = gradients.map(|((got, expected), name)| (distance(got, expected), *name));
    let gradient =
        gradient.fold((0.0, "nothing"), |worst, one| if one.0 > worst.0 || one.0.is_nan() { one } else { worst });

    let rows = DEFINED_ROWS.min(dims.queries);
    let last = inputs.last_queries(rows);
    let defined = last.call(|call| double.reference(call))?.out;
    let width = dims.value_dim;
    let ends: Vec<f64> = expected
        .chunks_exact(dims.queries * width)
        .flat_map(|head| &head[(dims.queries - rows) * width..])
        .copied()
        .collect();
    Ok(Row {
        candidate: candidate.to_string(),
        order,
        output: distance(&out, &expected),
        gradient,
        f64_error: distance(&ends, &defined),
    })
}

/// The largest difference relative to the largest number expected.
fn distance<T: Into<f64> + Copy>(got: &[T], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let error = |(got, expected): (&T, &f64)| ((*got).into() - expected).abs();
    // Written so that NaN comes through.
    let worst = got.iter().zip(expected).map(error).fold(0.0, |worst, x| if x <= worst { worst } else { x });
    if worst == 0.0 { 0.0 } else { worst / largest }
}

/// The table, as Markdown.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| mechanism | mask | output | worst gradient | of | f64 against the definition |\n|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let told = |x: f64, target: f64| if x <= target { format!("{x:.1e}") } else { format!("**{x:.1e}**") };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {:.0e} |",
            row.candidate,
            order_name(row.order),
            told(row.output, OUTPUT_TARGET),
            told(row.gradient.0, GRADIENT_TARGET),
            row.gradient.1,
            row.f64_error,
        );
    }
    text
}
