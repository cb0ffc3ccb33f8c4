//! What is done to all gradients between a backward and a step of the optimizer.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::flex::{is_f32, numbers, own, taken};
use crate::backend::tensor::{flattened, widen};
use crate::cpu::from_flex;
use crate::error::{Result, argument};

/// Scales the gradients of a module down so that their norm over all parameters is at most `limit`, and returns the norm before. A
/// norm that is not finite scales nothing.
///
/// # Errors
/// A limit that is negative or no number, which would turn the gradients round.
pub fn clip_gradients(module: &impl Module, gradients: &mut GradientsParams, limit: f64) -> Result<f64> {
    argument(limit >= 0.0, "clip_gradients", "limit", || "0 or more".into(), || limit.to_string())?;
    struct Norm<'a> {
        gradients: &'a GradientsParams,
        /// Of the CPU's tensors.
        squares: f64,
        /// The norms of all others, on their device: what is read back is one number.
        elsewhere: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for Norm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
            if is_f32(&gradient) {
                let own = taken(gradient);
                self.squares += longspan_layers::gradients::sum_of_squares(numbers(&own));
                return;
            }
            let own = norm_of(flattened(widen(gradient)));
            let like = self.elsewhere.first().unwrap_or(&own);
            self.elsewhere.push(own.clone().cast(like.dtype()).to_device(&like.device()));
        }
    }
    struct Scale<'a> {
        gradients: &'a mut GradientsParams,
        factor: f64,
    }
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.remove::<D>(param.id) {
                self.gradients.register(param.id, scaled(gradient, self.factor));
            }
        }
    }
    let mut norm = Norm { gradients, squares: 0.0, elsewhere: Vec::new() };
    module.visit(&mut norm);
    let Norm { squares, elsewhere, .. } = norm;
    let elsewhere = if elsewhere.is_empty() { 0.0 } else { norm_of(Tensor::cat(elsewhere, 0)).into_scalar::<f64>() };
    let norm = squares.sqrt().hypot(elsewhere);
    if norm.is_finite() && norm > limit {
        module.visit(&mut Scale { gradients, factor: limit / norm });
    }
    Ok(norm)
}

/// The norm, `[1]`, of numbers whose squares may have no place in their type.
fn norm_of(x: Tensor<1>) -> Tensor<1> {
    let largest = x.clone().abs().max();
    let unit = largest.clone().mask_fill(largest.clone().equal_elem(0.0), 1.0);
    (x / unit).powi_scalar(2).sum().sqrt() * largest
}

/// The sum of two gradients of a module, such as those of two parts of a batch.
pub fn add_gradients(module: &impl Module, one: GradientsParams, other: GradientsParams) -> GradientsParams {
    struct Add {
        one: GradientsParams,
        other: GradientsParams,
    }
    impl ModuleVisitor for Add {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(other) = self.other.remove::<D>(param.id) else { return };
            let sum = match self.one.remove::<D>(param.id) {
                Some(one) => sum(one, other),
                None => other,
            };
            self.one.register(param.id, sum);
        }
    }
    let mut add = Add { one, other };
    module.visit(&mut add);
    add.one
}

fn scaled<const D: usize>(x: Tensor<D>, by: f64) -> Tensor<D> {
    if is_f32(&x) {
        let mut x = taken(x);
        longspan_layers::gradients::scale(own(&mut x), by as f32);
        return from_flex(x);
    }
    x.mul_scalar(by)
}

fn sum<const D: usize>(one: Tensor<D>, other: Tensor<D>) -> Tensor<D> {
    if is_f32(&one) && is_f32(&other) && one.dims() == other.dims() {
        let mut sum = taken(one);
        let added = longspan_layers::gradients::add(own(&mut sum), numbers(&taken(other)));
        added.unwrap_or_else(|error| panic!("{error}"));
        return from_flex(sum);
    }
    one + other
}
