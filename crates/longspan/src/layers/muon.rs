//! Muon without copies of a parameter for each operation.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::{MomentumConfig, MomentumState};
use burn::optim::{AdjustLrFn, LearningRate, LionState, Muon, MuonConfig, MuonState, Optimizer};
use burn::tensor::{DType, Device, Tensor};

use super::adamw::runs_on_slices;
use super::flex::{numbers, own, taken};
use crate::cpu::from_flex;
use crate::profile::timed;

/// [`Muon`](burn::optim::Muon) with steps as large as AdamW's, for matrices. On the CPU backend in `f32` its products run on all threads.
///
/// ```
/// use burn::module::ParamGroup;
/// use burn::optim::ModuleOptimizer;
/// use longspan::layers::{FusedAdamW, FusedMuon};
///
/// let matrices = ParamGroup::from_regex(r"^blocks\.\d+\..*\.weight$").unwrap();
/// let optimizer = ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, 0.01))
///     .with_group(matrices, FusedMuon::new(0.95, 0.01), None);
/// ```
#[derive(Clone)]
pub struct FusedMuon {
    constants: longspan_layers::Muon,
    /// What other tensors are optimized by.
    plain: Muon,
}

impl FusedMuon {
    /// With the decay of the momentum, and that of weights.
    pub fn new(momentum: f32, weight_decay: f32) -> Self {
        let plain = MuonConfig::new()
            .with_momentum(MomentumConfig { momentum: momentum.into(), dampening: 0.0, nesterov: true })
            .with_weight_decay(Some(WeightDecayConfig::new(weight_decay)))
            .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW);
        Self { constants: longspan_layers::Muon { momentum, weight_decay }, plain: plain.build() }
    }
}

impl Optimizer for FusedMuon {
    /// Its velocity, by the name that Burn has for one moment of a parameter.
    type State<const D: usize> = LionState<D>;

    /// # Panics
    /// For parameters that are not matrices, as Burn's.
    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        values: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<LionState<D>>,
    ) -> (Tensor<D>, Option<LionState<D>>) {
        let velocity = state.map(|state| state.momentum);
        if D == 2 && runs_on_slices(&values, rate) {
            return timed("optimizer", || fused_step(&self.constants, rate, values, gradient, velocity));
        }
        // Burn's hides its velocity.
        let next = match &velocity {
            Some(velocity) => velocity.clone() * self.constants.momentum + gradient.clone(),
            None => gradient.clone(),
        };
        let state = velocity.map(|velocity| MuonState::new(MomentumState::new(velocity)));
        let (values, _) = self.plain.step(rate, values, gradient, state);
        (values, Some(LionState { momentum: next }))
    }

    fn to_device<const D: usize>(state: LionState<D>, device: &Device) -> LionState<D> {
        LionState { momentum: state.momentum.to_device(device) }
    }
}

/// A step on the CPU backend.
fn fused_step<const D: usize>(
    constants: &longspan_layers::Muon,
    rate: f64,
    values: Tensor<D>,
    gradient: Tensor<D>,
    velocity: Option<Tensor<D>>,
) -> (Tensor<D>, Option<LionState<D>>) {
    let dims = values.dims();
    let velocity = velocity.unwrap_or_else(|| Tensor::zeros(dims, (&values.device(), DType::F32)));
    let (mut values, gradient, mut velocity) = (taken(values), taken(gradient), taken(velocity));
    constants
        .step(rate, [dims[0], dims[1]], own(&mut values), numbers(&gradient), own(&mut velocity))
        .unwrap_or_else(|error| panic!("{error}"));
    (from_flex(values), Some(LionState { momentum: from_flex(velocity) }))
}
