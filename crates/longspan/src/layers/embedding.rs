//! Embeddings of tokens.

use burn::tensor::module::embedding as plain_embedding;
use burn::tensor::{Int, Tensor};
use longspan_kernels::Error as KernelError;
use longspan_layers::Embedding;

use super::flex::{gradients, integers, is_f32, numbers, shape, tensor};
use crate::backend::operation::{Operation, run};
use crate::cpu::{FlexTensor, is_flex};
use crate::error::{Error, Result, argument};

/// `scale · weight[token] + positions[place]` for each token, as one operation on the CPU backend; the gradient of `weight` is summed in
/// the order of tokens.
///
/// # Shapes
/// `tokens`: `[batch, tokens]`; `weight`: `[vocabulary, width]`; `positions`: `[tokens, width]`, which are not learned; output:
/// `[batch, tokens, width]`.
///
/// # Errors
/// Positions of another shape, and tokens outside the vocabulary. On other devices than the CPU these give rows of NaN: nothing is read back.
pub fn embedding(
    tokens: Tensor<2, Int>,
    weight: Tensor<2>,
    scale: f64,
    positions: Option<Tensor<2>>,
) -> Result<Tensor<3>> {
    let ([batch, count], [vocabulary, width]) = (tokens.dims(), weight.dims());
    if let Some(positions) = &positions {
        super::check_like("embedding", "positions", positions, [count, width], &weight)?;
    }
    if batch * count * width == 0 {
        return Ok(Tensor::zeros([batch, count, width], (&weight.device(), weight.dtype())));
    }
    let fused = is_f32(&weight);
    if fused || is_flex(&tokens.device()) {
        let ids = tokens.clone().try_into_data().map_err(|error| Error::Device(format!("{error:?}")))?;
        let beyond = integers(&ids).find(|&id| id < 0 || id >= vocabulary as i64);
        let (expected, got) =
            (|| format!("entries below {vocabulary}"), || beyond.map_or(String::new(), |id| id.to_string()));
        argument(beyond.is_none(), "embedding", "tokens", expected, got)?;
        if fused {
            let tokens = integers(&ids).map(|token| token as usize).collect();
            let positions = positions.map_or(Vec::new(), |positions| positions.into_data().iter::<f32>().collect());
            let lookup = Lookup { tokens, scale: scale as f32, positions };
            let rows: Tensor<2> = run(lookup, weight.into_dispatch(), Vec::new())?;
            return Ok(rows.reshape([batch, count, width]));
        }
    }
    let tokens = tokens.to_device(&weight.device());
    let last = vocabulary as i64 - 1;
    let outside = tokens.clone().lower_elem(0).bool_or(tokens.clone().greater_elem(last)).unsqueeze_dim::<3>(2);
    let rows = plain_embedding(weight, tokens.clamp(0, last)).mul_scalar(scale);
    let rows = rows.mask_fill(outside.expand([batch, count, width]), f64::NAN);
    Ok(match positions {
        Some(positions) => rows + positions.unsqueeze(),
        None => rows,
    })
}

/// All but its tensor, the table.
#[derive(Debug)]
struct Lookup {
    tokens: Vec<usize>,
    scale: f32,
    positions: Vec<f32>,
}

impl Lookup {
    fn call<'a>(&'a self, table: &'a FlexTensor) -> Embedding<'a> {
        let Self { tokens, scale, positions } = self;
        let [_, width] = shape(table).dims();
        Embedding { table: numbers(table), width, tokens, scale: *scale, positions }
    }
}

impl Operation for Lookup {
    const NAME: &'static str = "embeddings";

    type Kept = ();

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, KernelError> {
        let call = self.call(&tensors[0]);
        Ok(tensor(call.forward()?, [call.tokens.len(), call.width]))
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, ()), KernelError> {
        Ok((self.forward(tensors)?, ()))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        (): &(),
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, KernelError> {
        Ok(gradients([self.call(&tensors[0]).backward(numbers(&d_out))?], tensors))
    }
}
