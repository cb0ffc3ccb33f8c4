//! AdamW in one pass over each parameter.

use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, LearningRate, Optimizer};
use burn::tensor::{DType, Device, Tensor};

use super::flex::{is_f32, numbers, own, taken};
use crate::cpu::from_flex;
use crate::profile::timed;

/// [`AdamW`](burn::optim::AdamW), whose step on the CPU backend in `f32` is one pass over a parameter and its moments instead of
/// a dozen, on all threads. Its record is that of Burn's, so that either goes on with the other's.
///
/// ```
/// use burn::optim::ModuleOptimizer;
/// use longspan::layers::FusedAdamW;
///
/// let optimizer = ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, 0.01));
/// ```
#[derive(Clone)]
pub struct FusedAdamW {
    constants: longspan_layers::AdamW,
    /// What other tensors are optimized by.
    plain: AdamW,
    /// The same for parameters of one dimension.
    vectors: Option<Box<FusedAdamW>>,
}

impl FusedAdamW {
    /// With the decay of both moments, what keeps the division finite, and the decay of weights.
    pub fn new(beta_1: f32, beta_2: f32, epsilon: f32, weight_decay: f32) -> Self {
        let plain = AdamWConfig::new()
            .with_beta_1(beta_1)
            .with_beta_2(beta_2)
            .with_epsilon(epsilon)
            .with_weight_decay(weight_decay);
        Self {
            constants: longspan_layers::AdamW { beta_1, beta_2, epsilon, weight_decay },
            plain: plain.build(),
            vectors: None,
        }
    }

    /// The same without decay of parameters of one dimension: the gains of norms and biases, which decay would only draw away from
    /// where the data want them.
    #[must_use]
    pub fn without_decay_of_vectors(self) -> Self {
        let longspan_layers::AdamW { beta_1, beta_2, epsilon, .. } = self.constants;
        Self { vectors: Some(Box::new(Self::new(beta_1, beta_2, epsilon, 0.0))), ..self }
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        values: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        if let (1, Some(vectors)) = (D, &self.vectors) {
            return vectors.step(rate, values, gradient, state);
        }
        if runs_on_slices(&values, rate) {
            return timed("optimizer", || fused_step(&self.constants, rate, values, gradient, state));
        }
        self.plain.step(rate, values, gradient, state)
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        <AdamW as Optimizer>::to_device(state, device)
    }
}

/// Whether a step is one of the CPU backend's, in `f32`.
pub(super) fn runs_on_slices<const D: usize>(values: &Tensor<D>, rate: f64) -> bool {
    is_f32(values) && !values.device().is_autodiff() && rate.is_finite()
}

/// A step on the CPU backend.
fn fused_step<const D: usize>(
    constants: &longspan_layers::AdamW,
    rate: f64,
    values: Tensor<D>,
    gradient: Tensor<D>,
    state: Option<AdamWState<D>>,
) -> (Tensor<D>, Option<AdamWState<D>>) {
    let AdaptiveMomentumState { time, moment_1, moment_2, .. } = match state {
        Some(state) => state.momentum,
        None => {
            let zeros = || Tensor::zeros(values.dims(), (&values.device(), DType::F32));
            AdaptiveMomentumState::new(0, zeros(), zeros())
        }
    };
    let (mut values, gradient) = (taken(values), taken(gradient));
    let (mut m, mut v) = (taken(moment_1), taken(moment_2));
    let moments = [own(&mut m), own(&mut v)];
    constants
        .step(rate, time + 1, own(&mut values), numbers(&gradient), moments)
        .unwrap_or_else(|error| panic!("{error}"));
    let momentum = AdaptiveMomentumState::new(time + 1, from_flex(m), from_flex(v));
    (from_flex(values), Some(AdamWState::new(momentum)))
}
