//! The check before any time is taken: the speed of a wrong kernel means nothing.
//!
//! Short calls against the definition in f64: outputs, the gradient of every input along random directions by
//! difference quotients of the definition, f32 against f64, and token by token against the whole. The thorough
//! check is the conformance suite of the workspace; this one travels with the program and runs wherever it measures.

use longspan_kernels::{Dims, Error as KernelError, Kernel, Mask, Order, Real};

use crate::error::Error;
use crate::inputs::Inputs;
use crate::random::Random;
use crate::registry::Candidate;

/// Lengths and heads of the checks: inside a chunk, over one border of 64, over two.
pub const SIZES: [(usize, usize); 3] = [(13, 2), (70, 1), (150, 1)];

/// Up to so many pairs of numbers gradients are checked by difference quotients, which take the definition five times an
/// input.
const QUOTIENT_WORK: usize = 70 * 70 * 64;

/// Distance of the points of the difference quotient.
const STEP: f64 = 1e-4;

/// Error of the difference quotient, relative to the sum of the magnitudes of its terms.
const QUOTIENT: f64 = 1e-6;

/// Roundings that a term goes through: maps, angles, a product, a division, a rescaling, the transform of a convolution.
const ROUNDINGS: f64 = 64.0;

/// What a candidate does under a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// Forward and backward; `false` means that it says the mask is not for it.
    pub attends: bool,
    /// Token by token.
    pub decodes: bool,
}

/// Checks one candidate under one mask at several lengths.
///
/// # Errors
/// [`Error::Wrong`] names the candidate, the mask, the length and what differs.
pub fn verify(candidate: &Candidate, head_dim: usize, order: Order) -> Result<Abilities, Error> {
    let mut abilities = Abilities { attends: true, decodes: order == Order::Causal };
    for (length, heads) in SIZES {
        let wrong = |failure: String| Error::Wrong {
            candidate: candidate.to_string(),
            order: order_name(order),
            length,
            failure,
        };
        match check(candidate, Dims::square(1, heads, length, head_dim), order, &mut abilities) {
            Ok(()) => {}
            Err(Failure::Kernel(KernelError::Unsupported { .. })) => {
                return Ok(Abilities { attends: false, decodes: false });
            }
            Err(Failure::Kernel(error)) => return Err(wrong(format!("refused a call that makes sense: {error}"))),
            Err(Failure::Differs(what)) => return Err(wrong(what)),
        }
    }
    Ok(abilities)
}

/// As tables call it.
pub fn order_name(order: Order) -> &'static str {
    match order {
        Order::Causal => "causal",
        Order::Bidirectional => "bidirectional",
    }
}

enum Failure {
    Kernel(KernelError),
    Differs(String),
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        Self::Kernel(error)
    }
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure::Differs(message())) }
}

fn check(candidate: &Candidate, dims: Dims, order: Order, abilities: &mut Abilities) -> Result<(), Failure> {
    let (single, double) = (candidate.single(dims.queries), candidate.double(dims.queries));
    let (single, double) = (&*single, &*double);
    let inputs = Inputs::random(double, dims, Mask { order, ..Mask::default() });
    let expected = inputs.call(|call| double.reference(call))?.out;
    // With the values' magnitudes, and those of all that gives weights a sign, the definition gives the sum of the magnitudes of the
    // terms of each output.
    let mut positive = inputs.clone();
    let signed = positive.tensors.iter_mut().enumerate().filter(|(which, _)| candidate.signed || *which == 2);
    signed.for_each(|(_, tensor)| tensor.iter_mut().for_each(|x| *x = x.abs()));
    let mut scale = positive.call(|call| double.reference(call))?.out;
    if candidate.subtracts {
        scale.fill(expected.iter().fold(0.0, |most, x| x.abs().max(most)));
    }
    let terms = (dims.keys + dims.head_dim) as f64;

    let (out, gradients) = inputs.run(double)?;
    elements("output in f64", &out, &expected, &scale, terms)?;
    // With values and d_out positive and the output's sign turned, both terms of `d_out·v − d_out·out` are positive in
    // every gradient: what comes out is the sum of the magnitudes of its terms, where weights are positive.
    positive.d_out.iter_mut().for_each(|x| *x = x.abs());
    let (_, gradient_scale) = positive.run_with(double, |out| -out)?;
    let f32_inputs = inputs.to_f32();
    let (out, single_gradients) = f32_inputs.run(single)?;
    elements("output in f32", &out, &expected, &scale, terms)?;

    let name = |which: usize| format!("gradient of {}", inputs.names[which]);
    let mut random = Random::new(0xD1FF);
    for (which, gradient) in gradients.iter().enumerate() {
        ensure(gradient.iter().all(|x| x.is_finite()), || format!("{} is not finite or not written", name(which)))?;
        if dims.heads * dims.queries * dims.keys * dims.head_dim <= QUOTIENT_WORK {
            along_a_direction(&name(which), double, &inputs, which, gradient, &mut random)?;
        }
        norms(&name(which), &single_gradients[which], gradient, &gradient_scale[which], terms)?;
    }
    if abilities.decodes {
        match f32_inputs.steps(single) {
            Ok(out) => elements("output token by token", &out, &expected, &scale, terms)?,
            Err(KernelError::Unsupported { .. }) => abilities.decodes = false,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Every element within `c·eps·√terms·scale`.
fn elements<T: Real>(what: &str, got: &[T], expected: &[f64], scale: &[f64], terms: f64) -> Result<(), Failure> {
    let allowed = ROUNDINGS * T::EPSILON.to_f64() * terms.sqrt();
    for (n, ((got, expected), scale)) in got.iter().zip(expected).zip(scale).enumerate() {
        let error = (got.to_f64() - expected).abs();
        // Written so that NaN fails.
        ensure(error <= allowed * scale.abs() || got.to_f64() == *expected, || {
            format!("{what}: element {n} is {got} instead of {expected:e}")
        })?;
    }
    Ok(())
}

/// The distance of two gradients, by their norms, relative to that of the magnitudes of their terms.
fn norms(what: &str, got: &[f32], expected: &[f64], scale: &[f64], terms: f64) -> Result<(), Failure> {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(expected).map(|(&got, expected)| square(f64::from(got) - expected)).sum();
    let size: f64 = expected.iter().chain(scale).map(|&x| square(x)).sum();
    let allowed = ROUNDINGS * f64::from(f32::EPSILON) * terms.sqrt();
    ensure(error.sqrt() <= allowed * size.sqrt(), || {
        format!("{what}: f32 is {:e} of its scale from f64", (error / size).sqrt())
    })
}

/// A gradient times a random direction is the definition's difference quotient along it.
fn along_a_direction(
    what: &str,
    mechanism: &dyn Kernel<f64>,
    inputs: &Inputs<f64>,
    which: usize,
    gradient: &[f64],
    random: &mut Random,
) -> Result<(), Failure> {
    let direction: Vec<f64> = gradient.iter().map(|_| random.sign()).collect();
    let mut moved = inputs.clone();
    let mut loss = |step: f64| -> Result<(f64, f64), KernelError> {
        let start = inputs.tensors[which].iter().zip(&direction);
        moved.tensors[which].iter_mut().zip(start).for_each(|(to, (x, e))| *to = x + step * e);
        let out = moved.call(|call| mechanism.reference(call))?.out;
        let terms = out.iter().zip(&inputs.d_out).map(|(a, g)| a * g);
        Ok((terms.clone().sum(), terms.map(f64::abs).sum()))
    };
    let (ahead, size) = loss(STEP)?;
    let near = ahead - loss(-STEP)?.0;
    let far = loss(2.0 * STEP)?.0 - loss(-2.0 * STEP)?.0;
    let expected = (8.0 * near - far) / (12.0 * STEP);
    let got: f64 = gradient.iter().zip(&direction).map(|(g, e)| g * e).sum();
    let magnitude: f64 = gradient.iter().map(|g| g.abs()).sum();
    let terms = (inputs.dims.keys + inputs.dims.head_dim) as f64;
    let allowed = QUOTIENT * magnitude + 10.0 * f64::EPSILON * terms.sqrt() * size / STEP;
    ensure((got - expected).abs() <= allowed, || {
        format!("{what}: along a direction it is {got:e}, the definition moves by {expected:e}")
    })
}
