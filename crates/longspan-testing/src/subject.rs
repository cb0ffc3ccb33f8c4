//! A mechanism in both number types, with what the checks may assume of it.

use std::sync::Arc;

use crate::case::{Case, Inputs};
use crate::execute::Backward;
use longspan_kernels::{
    Algorithm, FeatureMap, Fourier, FourierNormalizer, Kernel, KernelizedAttention, Mechanism, Parameter, Real,
    RelativeMap, Score, Wave,
};

/// A number type that a [`Subject`] can be asked for.
pub trait Number: Real {
    /// The subject's mechanism over this type.
    fn mechanism(subject: &Subject) -> &dyn Kernel<Self>;
    /// The bits, for comparisons in which NaN equals NaN.
    fn bits(self) -> u64;
}

impl Number for f32 {
    fn mechanism(subject: &Subject) -> &dyn Kernel<Self> {
        &*subject.kernel_f32
    }
    fn bits(self) -> u64 {
        self.to_bits().into()
    }
}

impl Number for f64 {
    fn mechanism(subject: &Subject) -> &dyn Kernel<Self> {
        &*subject.kernel_f64
    }
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

/// Corrects the scales of parameters' gradients to the sum of the magnitudes of their terms, for mechanisms where the
/// gradient at inputs without signs is not that sum.
pub type ParameterScale = Arc<dyn Fn(&Case, &Inputs<f64>, &mut Backward<f64>) + Send + Sync>;

/// What the checks may assume of a mechanism.
#[derive(Debug, Clone, Copy, Default)]
pub struct Assumptions {
    /// Weights are linear in q and k, and so take their signs; otherwise a feature map makes them positive.
    pub signed_features: bool,
    /// Weights are linear in the first `signed_parameters` parameters.
    pub signed_parameters: usize,
    /// Weights depend on the keys.
    pub content: bool,
    /// Weights depend on positions.
    pub positions: bool,
    /// Every weight is positive, so that a NaN in a value that a query sees always reaches its output.
    pub positive_weights: bool,
    /// Features are rotated by positions, or mixed by the map: sums of them or of their gradients may cancel, whatever
    /// the signs of the inputs.
    pub turned: bool,
    /// Gradients of gates are differences of sums over all tokens, whose rounding each of them has.
    pub gates_from_sums: bool,
    /// A bias is added to what a row sees: one that sees nothing need not be 0.
    pub biased: bool,
    /// Denominators are those of the definition, not scaled by a running maximum.
    pub true_denominators: bool,
    /// A row is made of its own query and of so many right before it.
    pub queries_before: usize,
}

/// Whether rows are divided by a sum of weights that may have either sign.
pub fn is_signed(fourier: &Fourier) -> bool {
    fourier.normalizer == FourierNormalizer::Literal
        || (fourier.wave == Wave::Pairs && fourier.normalizer != FourierNormalizer::Unrotated)
}

/// Changes a drawn parameter in place.
pub type Prepare = Arc<dyn Fn(&Parameter, &mut [f64]) + Send + Sync>;

/// A mechanism in both number types.
#[derive(Clone)]
pub struct Subject {
    /// Its name in failures.
    pub label: String,
    /// What the checks may assume of it.
    pub assumptions: Assumptions,
    /// Brings a drawn parameter to a range where the mechanism is well-conditioned.
    pub prepare: Prepare,
    /// For parameters that are not used as they are, for example normalised ones.
    pub parameter_scale: Option<ParameterScale>,
    kernel_f32: Arc<dyn Kernel<f32>>,
    kernel_f64: Arc<dyn Kernel<f64>>,
}

/// Turns drawn numbers into log decays: from next to none to nearly all, a step of a difference quotient away from 0.
pub fn gates(numbers: &mut [f64]) {
    for (n, x) in numbers.iter_mut().enumerate() {
        *x = -1e-3 - x.abs() * [0.02, 0.3, 4.0][n % 3];
    }
}

impl Subject {
    /// Any mechanism.
    pub fn new<M>(mechanism: M, assumptions: Assumptions) -> Self
    where
        M: Kernel<f32> + Kernel<f64> + Clone + 'static,
    {
        Self {
            label: format!("{mechanism:?}"),
            assumptions,
            prepare: Arc::new(|_, _| {}),
            parameter_scale: None,
            kernel_f32: Arc::new(mechanism.clone()),
            kernel_f64: Arc::new(mechanism),
        }
    }

    /// The assumptions that hold for kernelized attention.
    pub fn assume(attention: &KernelizedAttention) -> Assumptions {
        let identity = attention.feature_map == FeatureMap::Identity;
        let raw_table = attention.score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Identity);
        Assumptions {
            signed_features: identity,
            signed_parameters: match (raw_table, identity) {
                (true, _) => 1,
                (false, true) => usize::MAX,
                (false, false) => 0,
            },
            content: attention.score.content(),
            positions: attention.score != Score::Content || attention.decay.is_some() || attention.gate,
            positive_weights: !identity
                && !raw_table
                && attention.feature_map != FeatureMap::Relu
                && !matches!(attention.feature_map, FeatureMap::Dpfp { .. })
                && attention.score.fourier().is_none_or(|fourier| fourier.normalizer == FourierNormalizer::Dominant),
            turned: attention.score.fourier().is_some() || !attention.feature_map.is_elementwise(),
            gates_from_sums: attention.gate,
            biased: false,
            true_denominators: !attention.feature_map.is_exponential(),
            queries_before: 0,
        }
    }

    /// Kernelized attention.
    pub fn kernelized(attention: &KernelizedAttention) -> Self {
        let subject = Self::new(attention.clone(), Self::assume(attention));
        let subject = match attention.score {
            // Keeps the sum of signed weights away from 0, where no tolerance would mean anything.
            Score::Fourier(fourier) if is_signed(&fourier) && attention.normalize => Self {
                prepare: Arc::new(|parameter, numbers| {
                    let factor = if parameter.name == "a" { 1e-3 } else { 0.15 };
                    for x in numbers.iter_mut() {
                        match parameter.name {
                            "a" | "b" => *x *= factor,
                            "c" => *x = x.abs(),
                            _ => {}
                        }
                    }
                }),
                ..subject
            },
            // The exponents of a learned map stay as small as those of the other maps.
            _ if matches!(attention.feature_map, FeatureMap::Hedgehog { .. }) => Self {
                prepare: Arc::new(|parameter, numbers| {
                    if parameter.name.starts_with("map_") {
                        numbers.iter_mut().for_each(|x| *x *= 0.5);
                    }
                }),
                ..subject
            },
            _ => subject,
        };
        let others = subject.prepare;
        let prepare: Prepare = Arc::new(move |parameter, numbers| match parameter.name {
            "log_decay" => gates(numbers),
            _ => others(parameter, numbers),
        });
        Self { prepare, ..subject }
    }

    /// Kernelized attention by `auto` and by each algorithm that can be forced.
    pub fn every_algorithm(attention: &KernelizedAttention) -> Vec<Self> {
        let by = |algorithm| Self::kernelized(&KernelizedAttention { algorithm, ..attention.clone() });
        algorithms_of(attention).into_iter().map(by).collect()
    }
}

/// The algorithms that kernelized attention can be asked for.
pub(crate) fn kernelized_algorithms() -> Vec<Algorithm> {
    algorithms_of(&KernelizedAttention::default())
}

fn algorithms_of(attention: &KernelizedAttention) -> Vec<Algorithm> {
    [Algorithm::Auto].iter().chain(attention.algorithms()).copied().collect()
}
