//! Multi-head attention as one operation of the CPU backend.

use std::sync::Arc;

use crate::cpu::FlexTensor;
use burn::tensor::Tensor;
use longspan_kernels::{Error, Kernel, Scratch, State};
use longspan_layers::{Dropout, KeptAttention, Memory, MultiHead, MultiHeadGradients};

use super::MultiHeadAttention;
use crate::attention::{AttentionMask, Heads};
use crate::backend::operation::{Operation, run};
use crate::backend::{self, AnyKernel, Layer, States, with_scratch};
use crate::error::Result;
use crate::layers::Around;
use crate::layers::dropout::drawn;
use crate::layers::flex::{gradients, numbers, of_layer, push_layer, shape, tensor, weights};
use crate::layers::gated_norm::GatedNormSettings;
use crate::layers::norm::NormSettings;

/// What the operation does. Its tensors: `x`, the memory, the norm's, of both layers the weight and, if it has one, the bias, the gated
/// norm's, and what the mechanism has learned as one.
#[derive(Debug, Clone)]
struct MultiHeadOperation {
    kernel: Arc<dyn AnyKernel>,
    mask: AttentionMask,
    heads: Heads,
    crossed: bool,
    norm: Option<NormSettings>,
    biases: [bool; 2],
    gated_norm: Option<GatedNormSettings>,
    dropout: Option<Dropout>,
    residual: bool,
    recompute: bool,
    states: Option<States>,
}

pub fn multi_head(
    module: &MultiHeadAttention,
    layer: &dyn Layer,
    x: Tensor<3>,
    memory: Option<Tensor<3>>,
    mask: &AttentionMask,
    around: Around<'_>,
    states: Option<&States>,
) -> Result<Tensor<3>> {
    layer.ready()?;
    let keys = memory.as_ref().unwrap_or(&x).dims()[1];
    let parameters = backend::flat(layer, backend::place(&x))?;
    let crossed = memory.is_some();
    let mut others: Vec<_> = memory.map(Tensor::into_dispatch).into_iter().collect();
    let norm = around.norm.map(|norm| NormSettings::push(norm, &mut others));
    let biases = [&module.query_key_value, &module.output].map(|layer| push_layer(layer, &mut others));
    let gated_norm = module.gated_norm.as_ref().map(|norm| GatedNormSettings::push(norm, &mut others));
    others.extend(parameters.map(Tensor::into_dispatch));
    let operation = MultiHeadOperation {
        kernel: layer.kernel(),
        mask: mask.listed(layer.name(), [x.dims()[0], keys])?,
        heads: module.heads,
        crossed,
        norm,
        biases,
        gated_norm,
        dropout: drawn(around.dropout, [&x.device(), &module.query_key_value.weight.device()]),
        residual: around.residual,
        recompute: around.recompute,
        states: states.cloned(),
    };
    Ok(run(operation, x.into_dispatch(), others)?)
}

impl MultiHeadOperation {
    /// Runs `work` on the kernels' form of this call.
    fn with_call<R>(
        &self,
        tensors: &[FlexTensor],
        work: impl FnOnce(&MultiHead<'_>, &mut Scratch<f32>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let [x, others @ ..] = tensors else { unreachable!("x") };
        let mut others = others.iter();
        let [batch, queries, _] = shape(x).dims();
        let memory = self.crossed.then(|| others.next()).flatten();
        let memory = memory.map(|memory| Memory { numbers: numbers(memory), keys: shape(memory)[1] });
        let norm = self.norm.map(|norm| norm.weights(&mut others));
        let [projection, output] = self.biases.map(|bias| weights(&mut others, bias));
        let gated_norm = self.gated_norm.map(|norm| norm.weights(&mut others));
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let kernel: &dyn Kernel<f32> = &*self.kernel;
        let keys = memory.map_or(queries, |memory| memory.keys);
        let dims = self.heads.dims(batch, queries, keys);
        let parameters = backend::split_parameters(kernel, &dims, others.next().map(numbers));
        let call = MultiHead {
            x: numbers(x),
            batch,
            queries,
            memory,
            heads,
            kv_heads,
            head_dim,
            norm,
            projection,
            kernel,
            parameters: &parameters,
            mask: self.mask.as_kernel(),
            initial_state: self.states.as_ref().and_then(States::before),
            stretches: self.states.as_ref().and_then(States::stretches),
            gated_norm,
            output,
            dropout: self.dropout,
            residual: self.residual,
        };
        with_scratch(|scratch| work(&call, scratch))
    }

    /// Runs `work` with a place for the state after the last token if it is wanted.
    fn with_last<R>(
        &self,
        call: &MultiHead<'_>,
        work: impl FnOnce(Option<&mut State<f32>>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let Some(states) = &self.states else { return work(None) };
        let mut last = call.empty_state()?;
        let result = work(Some(&mut last))?;
        states.leave(last);
        Ok(result)
    }
}

impl Operation for MultiHeadOperation {
    const NAME: &'static str = "attention parts";

    type Kept = Option<KeptAttention>;

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
        let out = self.with_call(tensors, |call, scratch| self.with_last(call, |last| call.forward(scratch, last)))?;
        Ok(tensor(out, shape(&tensors[0])))
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Self::Kept), Error> {
        let (out, kept) =
            self.with_call(tensors, |call, scratch| self.with_last(call, |last| call.training(scratch, last)))?;
        Ok((tensor(out, shape(&tensors[0])), (!self.recompute).then_some(kept)))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        kept: &Self::Kept,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let found = self.with_call(tensors, |call, scratch| call.backward(kept.as_ref(), numbers(&d_out), scratch))?;
        let MultiHeadGradients { dx, d_memory, d_norm, d_projection, d_parameters, d_gated_norm, d_output } = found;
        let ([projection, output], norm) = (self.biases, self.norm.map(|norm| norm.gradients(d_norm)));
        let inputs = [dx].into_iter().chain(self.crossed.then_some(d_memory)).chain(norm.into_iter().flatten());
        let layers = of_layer(d_projection, projection).chain(of_layer(d_output, output));
        let others = self.gated_norm.map(|_| d_gated_norm).into_iter().chain([d_parameters]);
        Ok(gradients(inputs.chain(layers).chain(others), tensors))
    }
}
