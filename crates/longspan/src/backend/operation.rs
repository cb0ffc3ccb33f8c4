//! An operation of our own on Burn's CPU backend, with a backward of its own: [`run`] makes it a node of the graph.

use std::fmt::Debug;

use longspan_kernels::Error;

use crate::cpu::FlexTensor;
pub(crate) use crate::cpu::run;

/// What an operation computes from its tensors.
pub(crate) trait Operation: Debug + Send + Sync + 'static {
    /// What [`profile`](crate::profile::profile) calls it.
    const NAME: &'static str;

    /// Whether tensors, and the gradient of the result, may be views and of other numbers than `f32`; else they come row-major.
    const TAKES_ALL: bool = false;

    /// What a backward needs beside the tensors.
    type Kept: Send + Sync + 'static;

    /// The result alone.
    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
        Ok(self.training(tensors)?.0)
    }

    /// The result, and what the backward needs.
    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Self::Kept), Error>;

    /// The gradient of each tensor, or `None` where there is none, from that of the result.
    fn backward(
        &self,
        tensors: &[FlexTensor],
        kept: &Self::Kept,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, Error>;
}
