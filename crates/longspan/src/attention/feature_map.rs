//! What a feature map of whole rows learns.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor, TensorData};
use longspan_kernels::FeatureMap;

use super::Heads;
use crate::backend::tensor::flattened;

/// The learned matrices of [`FeatureMap::Hedgehog`].
#[derive(Module, Debug)]
pub struct LearnedMap {
    /// The matrices of the queries, `[heads, width, head_dim]`. They start as the identity if square, else at random
    /// with variance `1 / head_dim`.
    pub queries: Param<Tensor<3>>,
    /// The matrices of the keys, `[kv_heads, width, head_dim]`; they start likewise.
    pub keys: Param<Tensor<3>>,
}

impl LearnedMap {
    /// The fresh parameters of `map`; `None` if it learns nothing.
    pub(super) fn new(map: FeatureMap, heads: Heads, device: &Device) -> Option<Self> {
        let mut matrices = map.parameters(&heads.dims(1, 1, 1)).into_iter().map(|parameter| {
            let [heads, width, head_dim] = parameter.shape[..] else { unreachable!("a matrix for each head") };
            if width != head_dim {
                let std = (head_dim as f64).sqrt().recip();
                return Initializer::Normal { mean: 0.0, std }.init([heads, width, head_dim], device);
            }
            let square = width * width;
            let numbers = (0..heads * square).map(|at| f32::from(u8::from(at % square % (width + 1) == 0)));
            let numbers = TensorData::new(numbers.collect::<Vec<f32>>(), [heads, width, head_dim]);
            Param::from_tensor(Tensor::from_data(numbers, device))
        });
        Some(Self { queries: matrices.next()?, keys: matrices.next()? })
    }

    pub(super) fn tensors(&self) -> [Tensor<3>; 2] {
        [self.queries.val(), self.keys.val()]
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = Tensor<1>> {
        self.tensors().into_iter().map(flattened)
    }
}
