//! The loss of a vocabulary.

use burn::nn::Linear;
use burn::tensor::activation::log_softmax;
use burn::tensor::module::linear;
use burn::tensor::{Tensor, TensorData};

use crate::error::{Result, argument};

/// Sums of losses over the tokens that count, `[1]` each.
#[derive(Debug, Clone)]
pub struct CrossEntropyLoss {
    /// `−log p` of what is right. With smoothing it has no gradient: only `smoothed` is learned from. Without, they are one.
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
/// Rows of another width or number type than the layer's, not as many targets as tokens, targets from `V` on, `ε` outside [0, 1).
pub fn cross_entropy(
    x: Tensor<3>,
    output: &Linear,
    targets: Vec<Option<u32>>,
    smoothing: f64,
) -> Result<CrossEntropyLoss> {
    const NAME: &str = "cross_entropy";
    super::check_rows(NAME, "x", &x, &output.weight)?;
    let ([batch, tokens, width], [_, vocabulary]) = (x.dims(), output.weight.dims());
    if let Some(bias) = &output.bias {
        super::check_like(NAME, "bias", &bias.val(), [vocabulary], &x)?;
    }
    let (rows, got) = (batch * tokens, targets.len());
    argument(got == rows, NAME, "targets", || format!("{rows}, one a token"), || got.to_string())?;
    let beyond = targets.iter().flatten().find(|&&target| target as usize >= vocabulary);
    let expected = || format!("entries below {vocabulary}");
    argument(beyond.is_none(), NAME, "targets", expected, || beyond.map_or(String::new(), u32::to_string))?;
    let fits = (0.0..1.0).contains(&smoothing);
    argument(fits, NAME, "smoothing", || "a number in [0, 1)".into(), || smoothing.to_string())?;
    let x = super::reshape(x, [rows, width]);
    let losses = |plain: Tensor<1>, smoothed: Tensor<1>| CrossEntropyLoss {
        plain: if smoothing == 0.0 { smoothed.clone() } else { plain.detach() },
        smoothed,
    };
    if super::flex::is_f32(&x) && super::flex::is_f32(&output.weight.val()) {
        let both = fused::cross_entropy(x, output, targets, smoothing)?;
        return Ok(losses(both.clone().narrow(0, 0, 1), both.narrow(0, 1, 1)));
    }
    if rows == 0 {
        // On the graph, so that a backward finds gradients of 0.
        let nothing = output.weight.val().sum().mul_scalar(0.0);
        return Ok(losses(nothing.clone(), nothing));
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
    Ok(losses(plain, smoothed))
}

mod fused {
    use crate::cpu::FlexTensor;
    use burn::nn::Linear;
    use burn::tensor::{Shape, Tensor};
    use longspan_kernels::Error;
    use longspan_kernels::layers::{CrossEntropy, Loss, LossGradients};

    use crate::backend::operation::{Operation, run};
    use crate::layers::flex::{contiguous, numbers, shape, tensor};

    /// All but its tensors: the rows, the weight, the bias if there is one.
    #[derive(Debug, Clone)]
    struct LossOperation {
        targets: Vec<Option<u32>>,
        smoothing: f32,
    }

    /// `[2]`: the sums without smoothing and with it. Only the second has gradients.
    pub fn cross_entropy(
        x: Tensor<2>,
        output: &Linear,
        targets: Vec<Option<u32>>,
        smoothing: f64,
    ) -> Result<Tensor<1>, Error> {
        let mut others = vec![output.weight.val().into_dispatch()];
        others.extend(output.bias.as_ref().map(|bias| bias.val().into_dispatch()));
        let operation = LossOperation { targets, smoothing: smoothing as f32 };
        run(operation, x.into_dispatch(), others)
    }

    impl LossOperation {
        fn call<'a>(&'a self, tensors: &'a [FlexTensor]) -> CrossEntropy<'a> {
            let [h, weight, bias @ ..] = tensors else { unreachable!("rows and a weight") };
            let [width, vocabulary] = shape(weight).dims();
            let (h, weight, bias) = (numbers(h), numbers(weight), bias.first().map(numbers));
            CrossEntropy { h, weight, bias, targets: &self.targets, width, vocabulary, smoothing: self.smoothing }
        }
    }

    fn losses(loss: Loss) -> FlexTensor {
        tensor(vec![loss.plain as f32, loss.smoothed as f32], [2])
    }

    impl Operation for LossOperation {
        const NAME: &'static str = "loss";

        type Kept = LossGradients;

        fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
            self.call(&contiguous(tensors)).loss().map(losses)
        }

        fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, LossGradients), Error> {
            let (loss, gradients) = self.call(&contiguous(tensors)).training()?;
            Ok((losses(loss), gradients))
        }

        fn backward(
            &self,
            tensors: &[FlexTensor],
            LossGradients { dh, d_weight, d_bias }: &LossGradients,
            d_out: FlexTensor,
        ) -> Result<Vec<Option<FlexTensor>>, Error> {
            let d_out = d_out.to_contiguous();
            let factor = numbers(&d_out)[1];
            let shapes: Vec<Shape> = tensors.iter().map(shape).collect();
            let scaled = |(gradient, shape): (&Vec<f32>, Shape)| {
                Some(tensor(gradient.iter().map(|x| x * factor).collect(), shape))
            };
            Ok([dh, d_weight, d_bias].into_iter().zip(shapes).map(scaled).collect())
        }
    }
}
