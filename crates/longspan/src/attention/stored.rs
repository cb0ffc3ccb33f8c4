//! Multi-head attention as numbers, for calls without tensors.

use std::sync::Arc;

use crate::cpu::FlexTensor;
use longspan_kernels::{Kernel, Mask, State};
use longspan_layers::{MultiHead, NormWeights, Projected, StepBuffers};

use super::{AttentionState, Heads, MemoryState, MultiHeadAttention};
use crate::backend::{self, AnyKernel};
use crate::error::{Error, Result, argument};
use crate::layers::flex::{numbers, taken};
use crate::layers::stored::{StoredGatedNorm, StoredLayer};

/// The tensors of a [`MultiHeadAttention`].
#[derive(Debug)]
pub(crate) struct StoredAttention {
    pub heads: Heads,
    pub kernel: Arc<dyn AnyKernel>,
    /// What the mechanism has learned, as one.
    parameters: Option<FlexTensor>,
    projection: StoredLayer,
    gated_norm: Option<StoredGatedNorm>,
    output: StoredLayer,
}

impl StoredAttention {
    pub fn new(attention: &MultiHeadAttention) -> Result<Self> {
        let layer = attention.attention.layer();
        layer.ready()?;
        Ok(Self {
            heads: layer.heads(),
            kernel: layer.kernel(),
            parameters: backend::flat(layer, backend::place(&attention.query_key_value.weight.val()))?.map(taken),
            projection: StoredLayer::new(&attention.query_key_value),
            gated_norm: attention.gated_norm.as_ref().map(StoredGatedNorm::new),
            output: StoredLayer::new(&attention.output),
        })
    }

    /// Width of a token.
    pub fn width(&self) -> usize {
        self.heads.heads * self.heads.head_dim
    }

    /// What the mechanism has learned, tensor by tensor.
    pub fn parameters(&self) -> Vec<&[f32]> {
        let kernel: &dyn Kernel<f32> = &*self.kernel;
        backend::split_parameters(kernel, &self.heads.dims(1, 1, 1), self.parameters.as_ref().map(numbers))
    }

    /// Self-attention on the rows of `batch` sequences, which are added to its results.
    pub fn call<'a>(
        &'a self,
        x: &'a [f32],
        batch: usize,
        norm: Option<NormWeights<'a>>,
        parameters: &'a [&'a [f32]],
        mask: Mask<'a>,
    ) -> MultiHead<'a> {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        MultiHead {
            x,
            batch,
            queries: x.len() / (batch * self.width()).max(1),
            memory: None,
            heads,
            kv_heads,
            head_dim,
            norm,
            projection: self.projection.weights(),
            kernel: &*self.kernel,
            parameters,
            mask,
            initial_state: None,
            stretches: None,
            gated_norm: self.gated_norm.as_ref().map(StoredGatedNorm::weights),
            output: self.output.weights(),
            dropout: None,
            residual: true,
        }
    }

    /// Checks that a state of `batch` texts takes one token more, before a step changes anything.
    pub fn check_step(&self, batch: usize, state: &State<f32>) -> Result<()> {
        let kernel: &dyn Kernel<f32> = &*self.kernel;
        Ok(backend::check_token(kernel, &self.heads.dims(batch, 1, 1), &self.parameters(), state)?)
    }

    /// The state of `batch` texts' tokens so far.
    pub fn state_in<'s>(&self, state: &'s mut AttentionState, batch: usize) -> Result<&'s mut State<f32>> {
        let kernel: &dyn Kernel<f32> = &*self.kernel;
        state.in_kernels(|| Ok(kernel.empty_state(&self.heads.dims(batch, 1, 1))?))?.ok_or_else(|| Error::Argument {
            operation: kernel.name(),
            argument: "state",
            expected: "a state of f32 on the CPU backend, without autodiff".into(),
            got: "one of another".into(),
        })
    }

    /// Cross-attention of one query of each text, which stands at `position`, to a memory of [rows](MemoryState::rows); `x` is added.
    pub fn recall(
        &self,
        x: &[f32],
        [batch, position]: [usize; 2],
        norm: Option<NormWeights<'_>>,
        memory: &MemoryState,
        buffers: &mut StepBuffers,
        out: &mut [f32],
    ) -> Result<()> {
        let Some(rows) = memory.rows() else { unreachable!("a memory of rows") };
        let expected = || format!("queries before position {}, for which the memory was made", rows.longest);
        argument(position < rows.longest, self.kernel.name(), "position", expected, || position.to_string())?;
        let parameters = self.parameters();
        let mask = rows.mask.as_kernel().with_offset(position as isize);
        let keys = rows.k.layout().shape().dims::<4>()[2];
        let projected = Projected {
            k: backend::view_f32(&rows.k),
            v: backend::view_f32(&rows.v),
            keys,
            outside: rows.outside.and_then(|outside| outside.states()),
        };
        let call = self.call(x, batch, norm, &parameters, mask);
        Ok(backend::with_scratch(|scratch| call.recall(&projected, scratch, buffers, out))?)
    }
}
