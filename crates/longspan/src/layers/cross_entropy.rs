//! The loss of a vocabulary.

use burn::nn::Linear;
use burn::tensor::activation::log_softmax;
use burn::tensor::module::linear;
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan_kernels::Error as KernelError;
use longspan_layers::{CrossEntropy, Loss, LossGradients};

use super::flex::{gradients, integers, is_f32, numbers, shape, tensor};
use crate::backend::operation::{Operation, run};
use crate::backend::tensor::widen;
use crate::cpu::{FlexTensor, is_flex};
use crate::error::{Error, Result, argument};

/// What is right for each row: a list, `None` where a row does not count, or a tensor of any shape with as many entries, below 0 where a row
/// does not count, as PyTorch's −100. A tensor on another device than the CPU stays there.
#[derive(Debug, Clone)]
pub enum Targets {
    /// On the host.
    List(Vec<Option<u32>>),
    /// On a device.
    Tensor(Box<Tensor<1, Int>>),
}

impl From<Vec<Option<u32>>> for Targets {
    fn from(targets: Vec<Option<u32>>) -> Self {
        Self::List(targets)
    }
}

impl<T: AsRef<[u32]> + ?Sized> From<&T> for Targets {
    fn from(targets: &T) -> Self {
        Self::List(targets.as_ref().iter().copied().map(Some).collect())
    }
}

impl<const D: usize> From<Tensor<D, Int>> for Targets {
    fn from(targets: Tensor<D, Int>) -> Self {
        let count = targets.shape().num_elements();
        // Burn reads a size of 0 as that of the axis before.
        let row = if count == 0 { Tensor::zeros([0], &targets.device()) } else { targets.reshape([count]) };
        Self::Tensor(Box::new(row))
    }
}

/// Sums of losses over the tokens that count, `[1]` each, of `f16` and `bf16` in `f32`.
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
/// `x`: `[batch, tokens, width]`; `targets`: `batch·tokens`.
///
/// # Errors
/// Rows of another width or number type than the layer's, not as many targets as tokens, `ε` outside [0, 1), and targets from `V` on. In a
/// tensor on another device than the CPU these make the loss NaN: nothing is read back.
pub fn cross_entropy(
    x: Tensor<3>,
    output: &Linear,
    targets: impl Into<Targets>,
    smoothing: f64,
) -> Result<CrossEntropyLoss> {
    const NAME: &str = "cross_entropy";
    super::check_rows(NAME, "x", &x, &output.weight)?;
    let ([batch, tokens, width], [_, vocabulary]) = (x.dims(), output.weight.dims());
    if let Some(bias) = &output.bias {
        super::check_like(NAME, "bias", &bias.val(), [vocabulary], &x)?;
    }
    let targets = targets.into().read(&output.weight.device())?;
    let (rows, got) = (batch * tokens, targets.len());
    argument(got == rows, NAME, "targets", || format!("{rows}, one a token"), || got.to_string())?;
    if let Targets::List(targets) = &targets {
        let beyond = targets.iter().flatten().find(|&&target| target as usize >= vocabulary);
        let expected = || format!("entries below {vocabulary}");
        argument(beyond.is_none(), NAME, "targets", expected, || beyond.map_or(String::new(), u32::to_string))?;
    }
    let fits = (0.0..1.0).contains(&smoothing);
    argument(fits, NAME, "smoothing", || "a number in [0, 1)".into(), || smoothing.to_string())?;
    let x = super::reshape(x, [rows, width]);
    let losses = |plain: Tensor<1>, smoothed: Tensor<1>| CrossEntropyLoss {
        plain: if smoothing == 0.0 { smoothed.clone() } else { plain.detach() },
        smoothed,
    };
    if let (Targets::List(targets), true, true) = (&targets, is_f32(&x), is_f32(&output.weight.val())) {
        let mut others = vec![output.weight.val().into_dispatch()];
        others.extend(output.bias.as_ref().map(|bias| bias.val().into_dispatch()));
        let operation = LossOperation { targets: targets.clone(), smoothing: smoothing as f32 };
        // The sums without smoothing and with it. Only the second has gradients.
        let both: Tensor<1> = run(operation, x.into_dispatch(), others)?;
        return Ok(losses(both.clone().narrow(0, 0, 1), both.narrow(0, 1, 1)));
    }
    if rows == 0 {
        // On the graph, so that a backward finds gradients of 0.
        let nothing = output.weight.val().sum().mul_scalar(0.0);
        return Ok(losses(nothing.clone(), nothing));
    }
    let logits = linear(x, output.weight.val(), output.bias.as_ref().map(|bias| bias.val()));
    let log_p = log_softmax(widen(logits), 1);
    let labels = targets.on(&log_p.device()).reshape([rows, 1]);
    let (ignored, beyond) = (labels.clone().lower_elem(0), labels.clone().greater_equal_elem(vocabulary as i64));
    let own = log_p.clone().gather(1, labels.clamp(0, vocabulary as i64 - 1));
    let plain = own.mask_fill(ignored.clone(), 0.0).mask_fill(beyond, f64::NAN).sum().neg();
    let spread = log_p.sum_dim(1).div_scalar(vocabulary as f64).mask_fill(ignored, 0.0).sum().neg();
    let smoothed = plain.clone().mul_scalar(1.0 - smoothing) + spread.mul_scalar(smoothing);
    Ok(losses(plain, smoothed))
}

impl Targets {
    fn len(&self) -> usize {
        match self {
            Self::List(targets) => targets.len(),
            Self::Tensor(targets) => targets.dims()[0],
        }
    }

    /// As a list where it lies on the CPU, or is for a layer there.
    fn read(self, layer: &Device) -> Result<Self> {
        match self {
            Self::Tensor(targets) if is_flex(&targets.device()) || is_flex(layer) => {
                let targets = targets.try_into_data().map_err(|error| Error::Device(error.to_string()))?;
                // What no number of 32 bits holds is beyond every vocabulary.
                let target = |target: i64| (target >= 0).then(|| u32::try_from(target).unwrap_or(u32::MAX));
                Ok(Self::List(integers(&targets).map(target).collect()))
            }
            other => Ok(other),
        }
    }

    fn on(self, device: &Device) -> Tensor<1, Int> {
        match self {
            Self::Tensor(targets) => targets.to_device(device),
            Self::List(targets) => {
                let numbers = targets.iter().map(|target| target.map_or(-1, |target| target as i32));
                let count = targets.len();
                Tensor::from_data(TensorData::new(numbers.collect::<Vec<_>>(), [count]), device)
            }
        }
    }
}

/// All but its tensors: the rows, the weight, the bias if there is one.
#[derive(Debug, Clone)]
struct LossOperation {
    targets: Vec<Option<u32>>,
    smoothing: f32,
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

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, KernelError> {
        self.call(tensors).loss().map(losses)
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, LossGradients), KernelError> {
        let (loss, gradients) = self.call(tensors).training()?;
        Ok((losses(loss), gradients))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        LossGradients { dh, d_weight, d_bias }: &LossGradients,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, KernelError> {
        let factor = numbers(&d_out)[1];
        let scaled = |gradient: &Vec<f32>| gradient.iter().map(|x| x * factor).collect();
        Ok(gradients([dh, d_weight, d_bias].map(scaled), tensors))
    }
}
