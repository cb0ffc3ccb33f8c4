//! Layer norm of tokens.

#![cfg_attr(
    feature = "flex",
    allow(
        deprecated,
        reason = "the dispatch that `backend_extension` generates names backends that Burn has deprecated"
    )
)]

use burn::nn::LayerNorm;
use burn::tensor::Tensor;

/// `norm` of each token, `[batch, tokens, width]`, where `norm` was made with this `epsilon`.
pub(crate) fn layer_norm(norm: &LayerNorm, epsilon: f64, x: Tensor<3>) -> Tensor<3> {
    let _ = epsilon;
    #[cfg(feature = "flex")]
    if let Some(beta) = &norm.beta
        && super::flex::is_f32(&x)
        && super::flex::is_f32(&norm.gamma.val())
    {
        return fused::layer_norm(x, norm.gamma.val(), beta.val(), epsilon);
    }
    norm.forward(x)
}

#[cfg(feature = "flex")]
mod fused {
    use burn::backend::autodiff::checkpoint::base::Checkpointer;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
    use burn::tensor::{Shape, Tensor};
    use burn_flex::FlexTensor;
    use longspan_kernels::layers::Norm;

    use crate::layers::flex::{numbers, tensor};

    /// Layer norm as one operation: Burn differentiates its own through some twenty passes over the tensor, which took a third
    /// of a training step on short sequences. It keeps nothing but its inputs.
    #[backend_extension(Flex, Autodiff)]
    pub trait FusedLayerNorm: Backend {
        /// `x`: `[.., width]`; `gamma` and `beta`: `[width]`.
        fn fused_layer_norm(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            epsilon: f64,
        ) -> FloatTensor<Self>;
    }

    /// Layer norm over the last axis.
    pub fn layer_norm(x: Tensor<3>, gamma: Tensor<1>, beta: Tensor<1>, epsilon: f64) -> Tensor<3> {
        Tensor::from_dispatch(<Dispatch as FusedLayerNorm>::fused_layer_norm(
            x.into_dispatch(),
            gamma.into_dispatch(),
            beta.into_dispatch(),
            epsilon,
        ))
    }

    fn call<'a>(x: &'a FlexTensor, gamma: &'a FlexTensor, beta: Option<&'a FlexTensor>, epsilon: f64) -> Norm<'a> {
        let (x, gamma, beta) = (numbers(x), numbers(gamma), beta.map(numbers));
        Norm { x, gamma, beta, centred: true, epsilon: epsilon as f32 }
    }

    impl FusedLayerNorm for Flex {
        fn fused_layer_norm(x: FlexTensor, gamma: FlexTensor, beta: FlexTensor, epsilon: f64) -> FlexTensor {
            let [x, gamma, beta] = [x, gamma, beta].map(|x| x.to_contiguous());
            let out = call(&x, &gamma, Some(&beta), epsilon).forward().unwrap_or_else(|error| panic!("{error}"));
            tensor(out, x.layout().shape().clone())
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
            let [x, gamma] = [x, gamma].map(|x| x.to_contiguous());
            let found = call(&x, &gamma, None, epsilon).backward(numbers(&d_out));
            let found = found.unwrap_or_else(|error| panic!("{error}"));
            let row = || Shape::from([found.d_gamma.len()]);
            let (gamma, beta) = (row(), row());
            let gradients = [
                tensor(found.dx, x.layout().shape().clone()),
                tensor(found.d_gamma, gamma),
                tensor(found.d_beta, beta),
            ];
            for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                if let Some(parent) = parent {
                    grads.register::<Flex>(parent.id, gradient);
                }
            }
        }
    }
}
