//! Embeddings of tokens.

use burn::tensor::module::embedding as plain_embedding;
use burn::tensor::{Int, Tensor};

use crate::error::{Error, Result, argument};

/// `scale · weight[token] + positions[place]` for each token, as one operation on the CPU backend; the gradient of `weight` is summed in
/// the order of tokens.
///
/// # Shapes
/// `tokens`: `[batch, tokens]`; `weight`: `[vocabulary, width]`; `positions`: `[tokens, width]`, which are not learned; output:
/// `[batch, tokens, width]`.
///
/// # Errors
/// Tokens outside the vocabulary, positions of another shape.
pub fn embedding(
    tokens: Tensor<2, Int>,
    weight: Tensor<2>,
    scale: f64,
    positions: Option<Tensor<2>>,
) -> Result<Tensor<3>> {
    let ([batch, count], [vocabulary, width]) = (tokens.dims(), weight.dims());
    if let Some(positions) = &positions {
        let expected = || format!("[tokens = {count}, width = {width}]");
        let fits = positions.dims() == [count, width];
        argument(fits, "embedding", "positions", expected, || format!("{:?}", positions.dims()))?;
    }
    #[cfg(feature = "flex")]
    if super::flex::is_f32(&weight) {
        let rows: Tensor<2> = fused::embedding(tokens, weight, scale as f32, positions)?;
        return Ok(super::reshape(rows, [batch, count, width]));
    }
    if batch * count == 0 {
        return Ok(Tensor::zeros([batch, count, width], (&weight.device(), weight.dtype())));
    }
    let beyond = tokens.clone().lower_elem(0).bool_or(tokens.clone().greater_equal_elem(vocabulary as i64)).any();
    let beyond =
        beyond.try_into_data().map_err(|error| Error::Device(format!("{error:?}")))?.iter::<bool>().any(|any| any);
    argument(!beyond, "embedding", "tokens", || format!("tokens below {vocabulary}"), || "others among them".into())?;
    let rows = plain_embedding(weight, tokens).mul_scalar(scale);
    Ok(match positions {
        Some(positions) => rows + positions.unsqueeze(),
        None => rows,
    })
}

#[cfg(feature = "flex")]
mod fused {
    use burn::tensor::{Int, Tensor};
    use burn_flex::FlexTensor;
    use longspan_kernels::Error;
    use longspan_kernels::layers::Embedding;

    use crate::backend::operation::{Operation, run};
    use crate::error::Result;
    use crate::layers::flex::{contiguous, numbers, shape, tensor};

    /// All but its tensor, the table.
    #[derive(Debug)]
    struct Lookup {
        tokens: Vec<usize>,
        scale: f32,
        positions: Vec<f32>,
    }

    pub fn embedding(
        tokens: Tensor<2, Int>,
        weight: Tensor<2>,
        scale: f32,
        positions: Option<Tensor<2>>,
    ) -> Result<Tensor<2>> {
        // What is negative lies beyond every table.
        let tokens =
            tokens.into_data().iter::<i64>().map(|token| usize::try_from(token).unwrap_or(usize::MAX)).collect();
        let positions = positions.map_or(Vec::new(), |positions| positions.into_data().iter::<f32>().collect());
        Ok(run(Lookup { tokens, scale, positions }, weight.into_dispatch(), Vec::new())?)
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

        fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
            let table = &contiguous(tensors)[0];
            let call = self.call(table);
            Ok(tensor(call.forward()?, [call.tokens.len(), call.width]))
        }

        fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, ()), Error> {
            Ok((self.forward(tensors)?, ()))
        }

        fn backward(
            &self,
            tensors: &[FlexTensor],
            (): &(),
            d_out: FlexTensor,
        ) -> Result<Vec<Option<FlexTensor>>, Error> {
            let table = &contiguous(tensors)[0];
            let gradient = self.call(table).backward(numbers(&d_out.to_contiguous()))?;
            Ok(vec![Some(tensor(gradient, shape(table)))])
        }
    }
}
