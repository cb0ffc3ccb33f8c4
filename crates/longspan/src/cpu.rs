//! What this crate takes of Burn's CPU backend: its tensors, and operations of our own as nodes of its graph.

#![allow(
    deprecated,
    reason = "the dispatch that `backend_extension` generates names backends that Burn has deprecated"
)]

use std::any::Any;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

#[cfg(feature = "autodiff")]
use burn::backend::Autodiff;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, DispatchDevice, DispatchTensor, Flex, backend_extension};
use burn::tensor::{DType, Device, Tensor};
pub(crate) use burn_flex::{FlexTensor, Layout};
use longspan_kernels::Error;

use crate::backend::operation::Operation;
use crate::profile::timed;

/// Whether a device is the CPU backend, with or without autodiff.
pub(crate) fn is_flex(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), DispatchDevice::Flex(_))
}

/// The backend's own form of one of its tensors, without autodiff.
pub(crate) fn to_flex<const D: usize>(x: Tensor<D>) -> crate::Result<FlexTensor> {
    x.try_into_primitive::<Flex>().map_err(|error| crate::Error::Device(format!("{error:?}")))
}

/// The opposite of [`to_flex`].
pub(crate) fn from_flex<const D: usize>(x: FlexTensor) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(x)
}

/// Runs an operation on tensors of the CPU backend, on a device that trains or not.
///
/// # Errors
/// Those of the operation.
pub(crate) fn run<const D: usize>(
    operation: impl Operation,
    first: DispatchTensor,
    others: Vec<DispatchTensor>,
) -> Result<Tensor<D>, Error> {
    let call = OperationCall { operation: Arc::new(operation), count: 1 + others.len(), failure: Arc::default() };
    let mut others = others.into_iter();
    // In the place of tensors that this operation does not have stands its first.
    let mut next = || others.next().unwrap_or_else(|| first.clone());
    let [b, c, d, e, f, g, h, i, j] = std::array::from_fn(|_| next());
    let out = <Dispatch as CustomOperation>::custom_operation(first, b, c, d, e, f, g, h, i, j, call.clone());
    match call.failure.get() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(error) => Err(error.clone()),
    }
}

/// An operation with a place for its error, because Burn's backend operations cannot return one.
#[derive(Debug, Clone)]
pub(crate) struct OperationCall {
    operation: Arc<dyn AnyOperation>,
    /// How many tensors it has.
    count: usize,
    failure: Arc<OnceLock<Error>>,
}

impl OperationCall {
    /// A result, or `None` after an error, which is kept for [`run`] to return.
    fn keep<R>(&self, result: Result<R, Error>) -> Option<R> {
        result.map_err(|error| self.failure.set(error)).ok()
    }
}

type Kept = Arc<dyn Any + Send + Sync>;

/// [`Operation`] of any kind.
trait AnyOperation: Debug + Send + Sync {
    /// The tensors as the operation takes them.
    fn taken(&self, tensors: Vec<FlexTensor>) -> Result<Vec<FlexTensor>, Error>;
    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error>;
    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Kept), Error>;
    fn backward(
        &self,
        tensors: &[FlexTensor],
        kept: &Kept,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, Error>;
}

/// A tensor row-major: copied only where it is not.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    #[cfg(test)]
    if !tensor.is_contiguous() {
        crate::backend::count_copy();
    }
    tensor.to_contiguous()
}

impl<O: Operation> AnyOperation for O {
    fn taken(&self, tensors: Vec<FlexTensor>) -> Result<Vec<FlexTensor>, Error> {
        if O::TAKES_ALL {
            return Ok(tensors);
        }
        // A layer of which a user has cast a part.
        if let Some(other) = tensors.iter().map(FlexTensor::dtype).find(|&dtype| dtype != DType::F32) {
            let expected = "F32 everywhere, as its first tensors are; cast the others".into();
            let got = format!("{other:?}");
            return Err(Error::Argument { operation: O::NAME, argument: "number types", expected, got });
        }
        Ok(tensors.into_iter().map(contiguous).collect())
    }

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
        timed(O::NAME, || Operation::forward(self, tensors))
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, Kept), Error> {
        let (out, kept) = timed(O::NAME, || Operation::training(self, tensors))?;
        Ok((out, Arc::new(kept)))
    }

    fn backward(
        &self,
        tensors: &[FlexTensor],
        kept: &Kept,
        d_out: FlexTensor,
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let kept = kept.downcast_ref().expect("what this operation's own training kept");
        let d_out = if O::TAKES_ALL { d_out } else { d_out.to_contiguous() };
        timed(O::NAME, || Operation::backward(self, tensors, kept, d_out))
    }
}

#[cfg_attr(feature = "autodiff", backend_extension(Flex, Autodiff))]
#[cfg_attr(not(feature = "autodiff"), backend_extension(Flex))]
pub(crate) trait CustomOperation: Backend {
    /// Burn's macro takes no list of tensors: as many as any operation has.
    #[allow(clippy::too_many_arguments)]
    fn custom_operation(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        d: FloatTensor<Self>,
        e: FloatTensor<Self>,
        f: FloatTensor<Self>,
        g: FloatTensor<Self>,
        h: FloatTensor<Self>,
        i: FloatTensor<Self>,
        j: FloatTensor<Self>,
        call: OperationCall,
    ) -> FloatTensor<Self>;
}

impl CustomOperation for Flex {
    fn custom_operation(
        a: FlexTensor,
        b: FlexTensor,
        c: FlexTensor,
        d: FlexTensor,
        e: FlexTensor,
        f: FlexTensor,
        g: FlexTensor,
        h: FlexTensor,
        i: FlexTensor,
        j: FlexTensor,
        call: OperationCall,
    ) -> FlexTensor {
        let first = a.clone();
        let tensors = [a, b, c, d, e, f, g, h, i, j].into_iter().take(call.count).collect();
        let result = call.operation.taken(tensors).and_then(|tensors| call.operation.forward(&tensors));
        // After an error `run` returns it and drops the tensor that is given here in place of a result.
        call.keep(result).unwrap_or(first)
    }
}

/// The operation as a node of the graph.
#[cfg(feature = "autodiff")]
mod graph {
    use burn::backend::autodiff::checkpoint::base::Checkpointer;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};

    use super::*;

    impl<C: CheckpointStrategy> CustomOperation for Autodiff<Flex, C> {
        fn custom_operation(
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            c: FloatTensor<Self>,
            d: FloatTensor<Self>,
            e: FloatTensor<Self>,
            f: FloatTensor<Self>,
            g: FloatTensor<Self>,
            h: FloatTensor<Self>,
            i: FloatTensor<Self>,
            j: FloatTensor<Self>,
            call: OperationCall,
        ) -> FloatTensor<Self> {
            let tensors = [a, b, c, d, e, f, g, h, i, j];
            // Burn's nodes have a constant number of parents.
            macro_rules! by_count {
                ($($count:literal)*) => {
                    match call.count {
                        $($count => node::<C, $count>(&tensors, call),)*
                        count => unreachable!("an operation of {count} tensors"),
                    }
                };
            }
            by_count!(1 2 3 4 5 6 7 8 9 10)
        }
    }

    fn node<C: CheckpointStrategy, const N: usize>(
        tensors: &[FloatTensor<Autodiff<Flex, C>>],
        call: OperationCall,
    ) -> FloatTensor<Autodiff<Flex, C>> {
        let nodes = std::array::from_fn(|n| tensors[n].node());
        let preparation = Backward::<Flex, N>::prepare::<C>(OperationBackward, nodes).compute_bound().stateful();
        let inputs = tensors[..N].iter().map(|tensor| tensor.primitive().clone()).collect();
        let Some(inputs) = call.keep(call.operation.taken(inputs)) else { return tensors[0].clone() };
        match preparation {
            OpsKind::Tracked(preparation) => match call.keep(call.operation.training(&inputs)) {
                None => tensors[0].clone(),
                Some((out, kept)) => {
                    let operation = call.operation.clone();
                    preparation.finish(Saved { operation, tensors: inputs, kept }, out)
                }
            },
            OpsKind::UnTracked(preparation) => match call.keep(call.operation.forward(&inputs)) {
                None => tensors[0].clone(),
                Some(out) => preparation.finish(out),
            },
        }
    }

    /// What a node keeps: its tensors, which are shared and not copied, and what the operation kept.
    #[derive(Debug, Clone)]
    struct Saved {
        operation: Arc<dyn AnyOperation>,
        tensors: Vec<FlexTensor>,
        kept: Kept,
    }

    #[derive(Debug)]
    struct OperationBackward;

    impl<const N: usize> Backward<Flex, N> for OperationBackward {
        type State = Saved;

        fn backward(self, ops: Ops<Saved, N>, grads: &mut Gradients, _: &mut Checkpointer) {
            let d_out = grads.consume::<Flex>(&ops.node);
            let Saved { operation, tensors, kept } = ops.state;
            let found = operation.backward(&tensors, &kept, d_out);
            // The forward took the same arguments; what is left is memory, of which Burn has no error either.
            let found = found.unwrap_or_else(|error| panic!("{error}"));
            for (parent, gradient) in ops.parents.into_iter().zip(found) {
                if let (Some(parent), Some(gradient)) = (parent, gradient) {
                    grads.register::<Flex>(parent.id, gradient);
                }
            }
        }
    }
}
