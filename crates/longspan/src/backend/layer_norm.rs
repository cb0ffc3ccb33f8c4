//! Layer norm with a backward of its own on the CPU backend.
//!
//! `y = x̂ ⊙ γ + β` with `x̂ = (x − mean(x)) · s` and `s = 1/√(var(x) + ε)` over the last axis. With `h = g ⊙ γ` for
//! the gradient `g` of `y`: `dx = s (h − mean(h) − x̂ mean(h ⊙ x̂))`, `dγ = Σ g ⊙ x̂`, `dβ = Σ g`.
//!
//! Burn differentiates its own layer norm through some twenty passes over the tensor, which took a third of a training
//! step on short sequences; this is one pass, and keeps nothing but its inputs.

#![allow(
    deprecated,
    reason = "the dispatch that `backend_extension` generates names backends that Burn has deprecated"
)]

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::ModuleOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{Bytes, DType, Shape, Tensor};
use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;

/// Rows whose share of `dγ` and `dβ` one task sums up. Fixed, so that the bits do not depend on the number of threads.
const ROWS: usize = 64;

/// Independent sums of one row, so that they fit vector registers.
const LANES: usize = 16;

/// Layer norm as one operation.
#[backend_extension(Flex, Autodiff)]
pub(super) trait FusedLayerNorm: Backend {
    /// `x`: `[.., width]`; `gamma` and `beta`: `[width]`.
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

/// Layer norm over the last axis of a tensor of the CPU backend in `f32`.
pub(super) fn layer_norm(x: Tensor<3>, gamma: Tensor<1>, beta: Tensor<1>, epsilon: f64) -> Tensor<3> {
    Tensor::from_dispatch(<Dispatch as FusedLayerNorm>::fused_layer_norm(
        x.into_dispatch(),
        gamma.into_dispatch(),
        beta.into_dispatch(),
        epsilon,
    ))
}

impl FusedLayerNorm for Flex {
    fn fused_layer_norm(x: FlexTensor, gamma: FlexTensor, beta: FlexTensor, epsilon: f64) -> FlexTensor {
        <Flex as ModuleOps<Flex>>::layer_norm(x, gamma, Some(beta), epsilon)
    }
}

impl<C: CheckpointStrategy> FusedLayerNorm for Autodiff<Flex, C> {
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), gamma.node(), beta.node()];
        let preparation = Backward::<Flex, 3>::prepare::<C>(LayerNormBackward, nodes).compute_bound().stateful();
        let (x, gamma, beta) = (x.primitive().clone(), gamma.primitive().clone(), beta.primitive().clone());
        let out = Flex::fused_layer_norm(x.clone(), gamma.clone(), beta, epsilon);
        match preparation {
            OpsKind::Tracked(preparation) => preparation.finish((x, gamma, epsilon), out),
            OpsKind::UnTracked(preparation) => preparation.finish(out),
        }
    }
}

#[derive(Debug)]
struct LayerNormBackward;

impl Backward<Flex, 3> for LayerNormBackward {
    type State = (FlexTensor, FlexTensor, f64);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<Flex>(&ops.node).to_contiguous();
        let (x, gamma, epsilon) = ops.state;
        let (x, gamma) = (x.to_contiguous(), gamma.to_contiguous());
        let shape = x.layout().shape().clone();
        let width = gamma.layout().num_elements();
        let (dx, d_gamma, d_beta) = gradients(numbers(&x), numbers(&gamma), numbers(&d_out), epsilon as f32);
        let row = || Shape::from([width]);
        for (parent, (gradient, shape)) in ops.parents.into_iter().zip([(dx, shape), (d_gamma, row()), (d_beta, row())])
        {
            if let Some(parent) = parent {
                let gradient = FlexTensor::new(Bytes::from_elems(gradient), Layout::contiguous(shape), DType::F32);
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

/// The numbers of a contiguous tensor.
fn numbers(tensor: &FlexTensor) -> &[f32] {
    let layout = tensor.layout();
    &tensor.storage::<f32>()[layout.start_offset()..][..layout.num_elements()]
}

/// `dx`, `dγ` and `dβ`.
fn gradients(x: &[f32], gamma: &[f32], d_out: &[f32], epsilon: f32) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let width = gamma.len();
    let mut dx = vec![0.0; x.len()];
    let (mut d_gamma, mut d_beta) = (vec![0.0; width], vec![0.0; width]);
    if x.is_empty() {
        return (dx, d_gamma, d_beta);
    }
    let block = ROWS * width;
    let parts: Vec<(Vec<f32>, Vec<f32>)> = x
        .par_chunks(block)
        .zip(d_out.par_chunks(block))
        .zip(dx.par_chunks_mut(block))
        .map(|((x, d_out), dx)| {
            let (mut d_gamma, mut d_beta) = (vec![0.0; width], vec![0.0; width]);
            let mut centred = vec![0.0; width];
            for ((x, g), dx) in x.chunks(width).zip(d_out.chunks(width)).zip(dx.chunks_mut(width)) {
                let mean = dot(x, None) / width as f32;
                for (c, x) in centred.iter_mut().zip(x) {
                    *c = x - mean;
                }
                let scale = 1.0 / (dot(&centred, Some(&centred)) / width as f32 + epsilon).sqrt();
                for (((c, dx), (g, gamma)), (d_gamma, d_beta)) in
                    centred.iter_mut().zip(&mut *dx).zip(g.iter().zip(gamma)).zip(d_gamma.iter_mut().zip(&mut d_beta))
                {
                    *c *= scale;
                    *dx = g * gamma;
                    *d_gamma += g * *c;
                    *d_beta += g;
                }
                let level = dot(dx, None) / width as f32;
                let slope = dot(dx, Some(&centred)) / width as f32;
                for (dx, c) in dx.iter_mut().zip(&centred) {
                    *dx = scale * (*dx - level - c * slope);
                }
            }
            (d_gamma, d_beta)
        })
        .collect();
    for (part_gamma, part_beta) in parts {
        for (sum, part) in d_gamma.iter_mut().zip(part_gamma).chain(d_beta.iter_mut().zip(part_beta)) {
            *sum += part;
        }
    }
    (dx, d_gamma, d_beta)
}

/// `Σ a`, or `Σ a ⊙ b`.
fn dot(a: &[f32], b: Option<&[f32]>) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    let mut sum = 0.0;
    match b {
        None => {
            for block in blocks {
                for (lane, x) in lanes.iter_mut().zip(block) {
                    *lane += x;
                }
            }
            sum += rest.iter().sum::<f32>();
        }
        Some(b) => {
            let (other_blocks, other_rest) = b.as_chunks::<LANES>();
            for (block, other) in blocks.iter().zip(other_blocks) {
                for (lane, (x, y)) in lanes.iter_mut().zip(block.iter().zip(other)) {
                    *lane += x * y;
                }
            }
            sum += rest.iter().zip(other_rest).map(|(x, y)| x * y).sum::<f32>();
        }
    }
    sum + lanes.iter().sum::<f32>()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;

    #[test]
    fn outputs_and_gradients_are_those_of_burn() {
        let device = Device::flex().autodiff();
        for shape in [[1, 1, 1], [2, 3, 5], [3, 70, 40], [1, 2, 128]] {
            let random = |count: usize| Tensor::<1>::random([count], Distribution::Normal(0.5, 2.0), &device);
            let count = shape.iter().product();
            let x = random(count).reshape(shape).detach().require_grad();
            let (gamma, beta) = (random(shape[2]).require_grad(), random(shape[2]).require_grad());
            let weights = random(count).reshape(shape);
            let both =
                [layer_norm, |x, gamma, beta, epsilon| burn::tensor::module::layer_norm(x, gamma, Some(beta), epsilon)];
            let [ours, theirs] = both.map(|norm: fn(Tensor<3>, Tensor<1>, Tensor<1>, f64) -> Tensor<3>| {
                let out = norm(x.clone(), gamma.clone(), beta.clone(), 1e-5);
                let gradients = (out.clone() * weights.clone()).sum().backward();
                let flat = |x: Tensor<1>| x.try_into_vec_as::<f32>().unwrap();
                [
                    flat(out.reshape([count]).inner()),
                    flat(x.grad(&gradients).unwrap().reshape([count])),
                    flat(gamma.grad(&gradients).unwrap()),
                    flat(beta.grad(&gradients).unwrap()),
                ]
            });
            for (which, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let largest = theirs.iter().fold(1.0_f32, |a, b| a.max(b.abs()));
                for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
                    assert!((a - b).abs() <= 2e-5 * largest, "{shape:?} {which} at {i}: {a}, not {b}");
                }
            }
        }
    }
}
