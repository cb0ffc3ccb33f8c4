//! Against the definition: outputs, denominators, gradients.

use longspan_kernels::{Error, KernelizedAttention};

use crate::case::{Case, Inputs};
use crate::compare::{Failure, close, close_gradients, ensure};
use crate::execute::{self, Backward, Forward};
use crate::random::Random;
use crate::subject::{Number, Subject};

/// Inputs without signs: their outputs and gradients are the sums of the magnitudes of the terms that `inputs` sum up.
fn magnitudes(subject: &Subject, inputs: &Inputs<f64>) -> Inputs<f64> {
    let absolute = |x: &[f64]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let features = |x: &[f64]| if subject.assumptions.signed_features { absolute(x) } else { x.to_vec() };
    let signed = subject.assumptions.signed_parameters;
    // Gates have the signs that they must have.
    let parameter =
        |(n, x): (usize, &Vec<f64>)| if n < signed && inputs.per_key[n] == 0 { absolute(x) } else { x.clone() };
    Inputs {
        q: features(&inputs.q),
        k: features(&inputs.k),
        v: absolute(&inputs.v),
        parameters: inputs.parameters.iter().enumerate().map(parameter).collect(),
        per_key: inputs.per_key.clone(),
        d_out: absolute(&inputs.d_out),
    }
}

/// The scale of every output for [`close`].
pub fn forward_scale(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<Forward<f64>, Error> {
    let mut scale = execute::forward(subject, case, &magnitudes(subject, inputs))?;
    if subject.assumptions.turned {
        level(&mut scale.out);
        level(&mut scale.denominators);
    }
    Ok(scale)
}

/// Sets all numbers to the largest magnitude among them.
pub(crate) fn level(numbers: &mut [f64]) {
    let largest = numbers.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    numbers.fill(largest);
}

/// The scale of every gradient for [`close`].
///
/// With values and `d_out` positive and the output negated, both terms of `G·v_j − G·A` are positive in every gradient,
/// so that it is the sum of the magnitudes of its terms.
pub fn backward_scale(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<Backward<f64>, Error> {
    let inputs = magnitudes(subject, inputs);
    let mut forward = execute::forward(subject, case, &inputs)?;
    for out in &mut forward.out {
        *out = -*out;
    }
    let mut backward = execute::backward(subject, case, &inputs, &forward)?;
    // A gradient with a single term, such as that of a gate, has the sign of that term.
    backward.gradients.iter_mut().flatten().for_each(|x| *x = x.abs());
    if subject.assumptions.gates_from_sums {
        let gates = backward.gradients.iter_mut().skip(3).zip(&inputs.per_key).filter(|(_, width)| **width > 0);
        gates.for_each(|(gradient, _)| level(gradient));
    }
    if subject.assumptions.turned {
        backward.gradients.iter_mut().for_each(|gradient| level(gradient));
        // The gradient of an angle is at most a feature, 4 as drawn, times the gradient of the feature; that of a rate
        // or of a position is the same times the other.
        let dims = &case.dims;
        let features = backward.gradients[..2].iter().flatten().fold(0.0f64, |largest, &x| largest.max(x));
        let reach = 4.0 * (dims.queries.max(dims.keys) as f64 + case.offset.unsigned_abs() as f64 + 4.0);
        backward.gradients[3..].iter_mut().for_each(|gradient| gradient.fill(features * reach));
    }
    if let Some(correct) = &subject.parameter_scale {
        correct(case, &inputs, &mut backward);
    }
    Ok(backward)
}

/// Terms of the sums that gradients are: a parameter may be shared by all heads and batch entries.
pub fn gradient_terms(case: &Case) -> usize {
    case.terms() * case.dims.batch.max(1) * case.dims.heads.max(1)
}

/// Outputs and denominators are those of the definition.
pub fn forward<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(subject, case);
    forward_of::<T>(subject, case, &inputs)
}

/// The same on given numbers.
pub fn forward_of<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<(), Failure> {
    let expected = execute::reference(subject, case, inputs)?;
    let mut scale = execute::reference(subject, case, &magnitudes(subject, inputs))?;
    if subject.assumptions.turned {
        level(&mut scale.out);
        level(&mut scale.denominators);
    }
    let got = execute::forward::<T>(subject, case, &inputs.cast())?;
    close("out", &got.out, &expected.out, &scale.out, case.terms())?;
    if subject.assumptions.true_denominators {
        close("denominators", &got.denominators, &expected.denominators, &scale.denominators, case.terms())?;
    }
    let dims = &case.dims;
    for row in 0..dims.batch * dims.heads * dims.queries {
        let (batch, i) = (row / (dims.heads * dims.queries), row % dims.queries);
        let out = &got.out[row * dims.value_dim..][..dims.value_dim];
        let sees = (0..dims.keys).any(|j| case.sees(batch, i, j));
        let sees = sees || subject.assumptions.biased;
        ensure(sees || out.iter().all(|&x| x == T::ZERO), || format!("row {row} sees nothing and gives {out:?}"))?;
    }
    Ok(())
}

/// Distance of the points of the difference quotient. Its truncation error falls with the fourth power of the ratio to
/// the smallest input that [`Random::normal`] gives, 1/64: below 2e-9.
const STEP: f64 = 1e-4;

/// The accuracy of the difference quotient, relative to the sum of the magnitudes of its terms.
const QUOTIENT: f64 = 1e-6;

/// 1 or −1 for each of so many numbers.
pub(crate) fn direction(random: &mut Random, len: usize) -> Vec<f64> {
    (0..len).map(|_| if random.chance(0.5) { 1.0 } else { -1.0 }).collect()
}

/// Checks a gradient along a direction against the difference quotient of `loss`, which gets a step in that direction and
/// gives the loss there with the sum of its terms' magnitudes.
pub(crate) fn is_quotient(
    name: &str,
    gradient: &[f64],
    direction: &[f64],
    terms: usize,
    loss: impl Fn(f64) -> Result<(f64, f64), Failure>,
) -> Result<(), Failure> {
    ensure(gradient.iter().all(|x| x.is_finite()), || format!("{name} is not finite or was not written"))?;
    let (near, size) = (loss(STEP)?.0 - loss(-STEP)?.0, loss(0.0)?.1);
    let far = loss(2.0 * STEP)?.0 - loss(-2.0 * STEP)?.0;
    let expected = (8.0 * near - far) / (12.0 * STEP);
    let got: f64 = gradient.iter().zip(direction).map(|(g, e)| g * e).sum();
    let scale: f64 = gradient.iter().map(|g| g.abs()).sum();
    let allowed = QUOTIENT * scale + 10.0 * f64::EPSILON * (terms as f64).sqrt() * size / STEP;
    ensure(scale > 0.0 || expected.abs() <= allowed, || {
        format!("{name} is zero, but the output moves by {expected:e} with its input")
    })?;
    ensure((got - expected).abs() <= allowed, || {
        format!("{name}: along a direction got {got:e}, expected {expected:e}, allowed {allowed:e}")
    })
}

/// In `f64`: gradients against difference quotients of the *definition*, along random directions for every input.
pub fn gradient(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(subject, case);
    let (_, backward) = execute::both::<f64>(subject, case, &inputs)?;
    let mut random = Random::new(case.seed ^ 0xD1FF);
    for (which, (name, gradient)) in backward.named().enumerate() {
        let direction = direction(&mut random, gradient.len());
        is_quotient(&name, gradient, &direction, case.terms(), |step| {
            let out = execute::reference(subject, case, &inputs.moved(which, step, &direction))?.out;
            let terms = out.iter().zip(&inputs.d_out).map(|(a, g)| a * g);
            Ok((terms.clone().sum(), terms.map(f64::abs).sum()))
        })?;
    }
    no_gradient_where_nothing_is_seen(subject, case, &backward)
}

/// Keys that no query sees, and all keys of a mechanism that does not depend on them, have gradients of exactly 0.
pub fn no_gradient_where_nothing_is_seen<T: Number>(
    subject: &Subject,
    case: &Case,
    backward: &Backward<T>,
) -> Result<(), Failure> {
    let dims = &case.dims;
    let key = (1, execute::key_dim(subject, dims), subject.assumptions.content);
    for (which, width, matters) in [key, (2, dims.value_dim, true)] {
        for (n, row) in backward.gradients[which].chunks(width.max(1)).enumerate() {
            let (batch, j) = (n / (dims.kv_heads * dims.keys), n % dims.keys);
            let zero = row.iter().all(|&x| x == T::ZERO);
            ensure(zero || (matters && case.is_seen(batch, j)), || {
                let name = ["dk", "dv"][which - 1];
                format!("{name} of key {j} of batch {batch}, which nothing sees, is {row:?}")
            })?;
        }
    }
    Ok(())
}

/// In `f32`: gradients are those in `f64`.
pub fn gradient_in_f32(subject: &Subject, case: &Case) -> Result<(), Failure> {
    gradient_in_f32_of(subject, case, &execute::random(subject, case))
}

/// The same on given numbers.
pub fn gradient_in_f32_of(subject: &Subject, case: &Case, inputs: &Inputs<f64>) -> Result<(), Failure> {
    let (_, expected) = execute::both::<f64>(subject, case, inputs)?;
    let scale = backward_scale(subject, case, inputs)?;
    let inputs = inputs.cast::<f32>();
    let (_, got) = execute::both(subject, case, &inputs)?;
    close_gradients("", &got, &expected, &scale, gradient_terms(case))?;
    no_gradient_where_nothing_is_seen(subject, case, &got)
}

/// Outputs and gradients of every subject are those of `expected` in `f64`.
pub fn agree<T: Number>(expected: &Subject, subjects: &[Subject], case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(expected, case);
    let (forward, backward) = execute::both::<f64>(expected, case, &inputs)?;
    let scale = forward_scale(expected, case, &inputs)?;
    let back_scale = backward_scale(expected, case, &inputs)?;
    let inputs = inputs.cast::<T>();
    for subject in subjects {
        let by = format!(" by {}", subject.label);
        let got = execute::forward(subject, case, &inputs)?;
        close(&format!("out{by}"), &got.out, &forward.out, &scale.out, case.terms())?;
        let got = execute::backward(subject, case, &inputs, &got)?;
        close_gradients(&by, &got, &backward, &back_scale, gradient_terms(case))?;
    }
    Ok(())
}

/// Every algorithm gives the outputs and gradients of every other.
pub fn algorithms_agree<T: Number>(attention: &KernelizedAttention, case: &Case) -> Result<(), Failure> {
    let subjects = Subject::every_algorithm(attention);
    agree::<T>(&subjects[0], &subjects, case)
}
