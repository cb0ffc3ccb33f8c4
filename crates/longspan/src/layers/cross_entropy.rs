//! The loss of a vocabulary.

#![cfg_attr(
    feature = "flex",
    allow(
        deprecated,
        reason = "the dispatch that `backend_extension` generates names backends that Burn has deprecated"
    )
)]

use burn::nn::Linear;
use burn::tensor::activation::log_softmax;
use burn::tensor::module::linear;
use burn::tensor::{Tensor, TensorData};

use crate::error::{Result, argument};

/// Sums of losses over the tokens that count, `[1]` each.
#[derive(Debug, Clone)]
pub struct CrossEntropyLoss {
    /// `−log p` of what is right. It has no gradient on the CPU backend: only `smoothed` is learned from.
    pub plain: Tensor<1>,
    /// With label smoothing.
    pub smoothed: Tensor<1>,
}

/// The cross-entropy of the logits `x·W + b` that a last linear layer gives, with label smoothing `ε` over `V` entries:
/// `plain = −log p_t`, `smoothed = (1 − ε) plain − ε mean_v log p_v`, summed over the tokens that have a target. On the CPU
/// backend no more than a piece of the logits is ever held, and gradients are formed beside the loss.
///
/// # Shapes
/// `x`: `[batch, tokens, width]`; `targets`: `batch·tokens`, `None` where a token does not count.
///
/// # Errors
/// As many targets as tokens, targets below `V`, `ε` in [0, 1).
pub fn cross_entropy(
    x: Tensor<3>,
    output: &Linear,
    targets: Vec<Option<u32>>,
    smoothing: f64,
) -> Result<CrossEntropyLoss> {
    const NAME: &str = "cross_entropy";
    let ([batch, tokens, width], [_, vocabulary]) = (x.dims(), output.weight.dims());
    let (rows, got) = (batch * tokens, targets.len());
    argument(got == rows, NAME, "targets", || format!("{rows}, one a token"), || got.to_string())?;
    let beyond = targets.iter().flatten().find(|&&target| target as usize >= vocabulary);
    argument(
        beyond.is_none(),
        NAME,
        "targets",
        || format!("entries below {vocabulary}"),
        || beyond.map_or(String::new(), u32::to_string),
    )?;
    let fits = (0.0..1.0).contains(&smoothing);
    argument(fits, NAME, "smoothing", || "a number in [0, 1)".into(), || smoothing.to_string())?;
    let x = x.reshape([rows, width]);
    #[cfg(feature = "flex")]
    if super::flex::is_f32(&x) && super::flex::is_f32(&output.weight.val()) {
        let losses = fused::cross_entropy(x, output, targets, smoothing);
        let one = |n: usize| losses.clone().narrow(0, n, 1);
        return Ok(CrossEntropyLoss { plain: one(0).detach(), smoothed: one(1) });
    }
    let log_p = log_softmax(linear(x, output.weight.val(), output.bias.as_ref().map(|bias| bias.val())), 1);
    let device = log_p.device();
    let counted: Vec<f32> = targets.iter().map(|target| f32::from(u8::from(target.is_some()))).collect();
    let counted = Tensor::<2>::from_data(TensorData::new(counted, [rows, 1]), (&device, log_p.dtype()));
    let labels: Vec<i32> = targets.iter().map(|target| target.unwrap_or(0) as i32).collect();
    let labels = Tensor::<2, burn::tensor::Int>::from_data(TensorData::new(labels, [rows, 1]), &device);
    let plain = (log_p.clone().gather(1, labels) * counted.clone()).sum().neg();
    let spread = (log_p.sum_dim(1).div_scalar(vocabulary as f64) * counted).sum().neg();
    let smoothed = plain.clone().mul_scalar(1.0 - smoothing) + spread.mul_scalar(smoothing);
    Ok(CrossEntropyLoss { plain, smoothed })
}

#[cfg(feature = "flex")]
mod fused {
    use std::sync::Arc;

    use burn::backend::autodiff::checkpoint::base::Checkpointer;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
    use burn::nn::Linear;
    use burn::tensor::{Shape, Tensor};
    use burn_flex::FlexTensor;
    use longspan_kernels::layers::{CrossEntropy, Loss, LossGradients};

    use crate::layers::flex::{absent, numbers, tensor};

    /// What is no tensor.
    #[derive(Debug, Clone)]
    pub struct Settings {
        targets: Arc<Vec<Option<u32>>>,
        smoothing: f32,
        bias: bool,
    }

    #[backend_extension(Flex, Autodiff)]
    pub trait FusedCrossEntropy: Backend {
        /// `[2]`: the sums without smoothing and with it. Only the second has gradients.
        fn fused_cross_entropy(
            h: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            settings: Settings,
        ) -> FloatTensor<Self>;
    }

    pub fn cross_entropy(x: Tensor<2>, output: &Linear, targets: Vec<Option<u32>>, smoothing: f64) -> Tensor<1> {
        let bias = output.bias.as_ref().map(|bias| bias.val());
        let settings = Settings { targets: Arc::new(targets), smoothing: smoothing as f32, bias: bias.is_some() };
        let bias = bias.unwrap_or_else(|| absent(&x));
        Tensor::from_dispatch(<Dispatch as FusedCrossEntropy>::fused_cross_entropy(
            x.into_dispatch(),
            output.weight.val().into_dispatch(),
            bias.into_dispatch(),
            settings,
        ))
    }

    fn call<'a>([h, weight, bias]: [&'a FlexTensor; 3], settings: &'a Settings) -> CrossEntropy<'a> {
        let [width, vocabulary] = weight.layout().shape().dims();
        let bias = settings.bias.then(|| numbers(bias));
        let (h, weight, smoothing) = (numbers(h), numbers(weight), settings.smoothing);
        CrossEntropy { h, weight, bias, targets: &settings.targets, width, vocabulary, smoothing }
    }

    fn losses(loss: Loss) -> FlexTensor {
        tensor(vec![loss.plain as f32, loss.smoothed as f32], Shape::from([2]))
    }

    impl FusedCrossEntropy for Flex {
        fn fused_cross_entropy(h: FlexTensor, weight: FlexTensor, bias: FlexTensor, settings: Settings) -> FlexTensor {
            let [h, weight, bias] = [h, weight, bias].map(|x| x.to_contiguous());
            losses(call([&h, &weight, &bias], &settings).loss().unwrap_or_else(|error| panic!("{error}")))
        }
    }

    impl<C: CheckpointStrategy> FusedCrossEntropy for Autodiff<Flex, C> {
        fn fused_cross_entropy(
            h: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            settings: Settings,
        ) -> FloatTensor<Self> {
            let nodes = [h.node(), weight.node(), bias.node()];
            let preparation = Backward::<Flex, 3>::prepare::<C>(LossBackward, nodes).compute_bound().stateful();
            let all = [&h, &weight, &bias].map(|x| x.primitive().to_contiguous());
            match preparation {
                OpsKind::Tracked(preparation) => {
                    let [h, weight, bias] = &all;
                    let call = call([h, weight, bias], &settings);
                    let (loss, gradients) = call.training().unwrap_or_else(|error| panic!("{error}"));
                    let shapes = all.each_ref().map(|x| x.layout().shape().clone());
                    preparation.finish(Saved { gradients, shapes, bias: settings.bias }, losses(loss))
                }
                OpsKind::UnTracked(preparation) => {
                    let [h, weight, bias] = all;
                    preparation.finish(Flex::fused_cross_entropy(h, weight, bias, settings))
                }
            }
        }
    }

    #[derive(Debug, Clone)]
    struct Saved {
        gradients: LossGradients,
        shapes: [Shape; 3],
        bias: bool,
    }

    #[derive(Debug)]
    struct LossBackward;

    impl Backward<Flex, 3> for LossBackward {
        type State = Saved;

        fn backward(self, ops: Ops<Saved, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            let d_out = grads.consume::<Flex>(&ops.node).to_contiguous();
            let factor = numbers(&d_out)[1];
            let Saved { gradients: LossGradients { dh, d_weight, d_bias }, shapes, bias } = ops.state;
            let [h, weight, own] = shapes;
            let found = [Some((dh, h)), Some((d_weight, weight)), bias.then_some((d_bias, own))];
            for (parent, found) in ops.parents.into_iter().zip(found) {
                if let (Some(parent), Some((mut gradient, shape))) = (parent, found) {
                    gradient.iter_mut().for_each(|x| *x *= factor);
                    grads.register::<Flex>(parent.id, tensor(gradient, shape));
                }
            }
        }
    }
}
