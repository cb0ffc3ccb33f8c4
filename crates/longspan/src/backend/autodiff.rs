//! The fused operation as Burn sees it: dispatched to the CPU backend, with a backward of its own.

#![allow(
    deprecated,
    reason = "the dispatch that `backend_extension` generates names backends that Burn has deprecated"
)]

use std::sync::{Arc, OnceLock};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use longspan_kernels as kernels;

use super::flex::{Operands, Outcome, Settings};

/// A call with a place for its error, because Burn's backend operations cannot return one.
#[derive(Debug, Clone)]
pub(super) struct FusedCall {
    settings: Settings,
    /// Whether the mechanism has parameters.
    learns: bool,
    failure: Arc<OnceLock<kernels::Error>>,
}

/// Attention by the kernels. Only the CPU backend has it; the others compute in tensor operations.
#[backend_extension(Flex, Autodiff)]
pub(super) trait FusedAttention: Backend {
    /// Shapes as in [`attend`](super::attend); `parameters`, `[count]`, matters only if the mechanism has any.
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        parameters: FloatTensor<Self>,
        call: FusedCall,
    ) -> FloatTensor<Self>;
}

/// Attention on tensors of the CPU backend.
pub(super) fn attend(
    settings: Settings,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    parameters: Option<Tensor<1>>,
) -> Result<Tensor<4>, kernels::Error> {
    let call = FusedCall { settings, learns: parameters.is_some(), failure: Arc::default() };
    // The macro takes no optional tensors; this one is never read.
    let parameters = parameters.unwrap_or_else(|| Tensor::zeros([1], (&q.device().inner(), q.dtype())));
    let out = <Dispatch as FusedAttention>::fused_attention(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        parameters.into_dispatch(),
        call.clone(),
    );
    match call.failure.get() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(error) => Err(error.clone()),
    }
}

fn operands(q: FlexTensor, k: FlexTensor, v: FlexTensor, parameters: FlexTensor, call: &FusedCall) -> Operands {
    Operands { q, k, v, parameters: call.learns.then_some(parameters) }.with_adjacent_rows()
}

impl FusedCall {
    /// The kernels' result, or `None` after an error, which is kept for [`attend`] to return.
    fn keep<R>(&self, result: Result<R, kernels::Error>) -> Option<R> {
        result.map_err(|error| self.failure.set(error)).ok()
    }
}

impl FusedAttention for Flex {
    fn fused_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        parameters: FlexTensor,
        call: FusedCall,
    ) -> FlexTensor {
        let operands = operands(q, k, v, parameters, &call);
        call.keep(operands.output(&call.settings)).unwrap_or(operands.q)
    }
}

impl<C: CheckpointStrategy> FusedAttention for Autodiff<Flex, C> {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        parameters: FloatTensor<Self>,
        call: FusedCall,
    ) -> FloatTensor<Self> {
        let nodes = [q.node(), k.node(), v.node(), parameters.node()];
        let preparation = Backward::<Flex, 4>::prepare::<C>(FusedBackward, nodes).compute_bound().stateful();
        let operands = operands(
            q.primitive().clone(),
            k.primitive().clone(),
            v.primitive().clone(),
            parameters.primitive().clone(),
            &call,
        );
        // After an error `attend` returns it and drops `q`, which is given here in place of an output.
        match preparation {
            OpsKind::Tracked(preparation) => call.keep(operands.forward(&call.settings)).map_or(q, |outcome| {
                let out = outcome.out.clone();
                preparation.finish(Saved { operands, outcome, settings: call.settings.clone() }, out)
            }),
            // No denominators: asking for them makes kernels choose their algorithm for a backward too.
            OpsKind::UnTracked(preparation) => {
                call.keep(operands.output(&call.settings)).map_or(q, |out| preparation.finish(out))
            }
        }
    }
}

/// What the backward needs: inputs, which are shared and not copied, outputs and denominators.
#[derive(Debug, Clone)]
struct Saved {
    operands: Operands,
    outcome: Outcome,
    settings: Settings,
}

#[derive(Debug)]
struct FusedBackward;

impl Backward<Flex, 4> for FusedBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<Flex>(&ops.node);
        let Saved { operands, outcome, settings } = ops.state;
        let Operands { q, k, v, parameters } =
            operands.backward(&settings, &outcome, d_out).expect("the forward call took the same arguments");
        for (parent, gradient) in ops.parents.into_iter().zip([Some(q), Some(k), Some(v), parameters]) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
