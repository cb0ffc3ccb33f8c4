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
    /// The bits, for comparisons that NaN must not escape.
    fn bits(self) -> u64;
}

impl Number for f32 {
    fn mechanism(subject: &Subject) -> &dyn Kernel<Self> {
        &*subject.single
    }
    fn bits(self) -> u64 {
        self.to_bits().into()
    }
}

impl Number for f64 {
    fn mechanism(subject: &Subject) -> &dyn Kernel<Self> {
        &*subject.double
    }
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

/// Raises the scale of parameters' gradients to the sum of the magnitudes of their terms, where that is not what the
/// gradient is for inputs without signs.
pub type ParameterScale = fn(&Case, &Inputs<f64>, &mut Backward<f64>);

/// What the checks may assume of a mechanism.
#[derive(Debug, Clone, Copy, Default)]
pub struct Assumptions {
    /// Weights are linear in q and k, so that their signs carry over; otherwise a map makes them positive.
    pub signed_features: bool,
    /// Weights are linear in so many of the parameters, the first ones.
    pub signed_parameters: usize,
    /// Keys have a part in the weights.
    pub content: bool,
    /// Weights depend on positions.
    pub positions: bool,
    /// Every weight that a query may give is positive, so that what it sees always shows.
    pub positive_weights: bool,
    /// Features are turned by positions, or mixed by the map: what they, or their gradients, add up to may cancel, whatever
    /// the signs of the inputs.
    pub turned: bool,
    /// Denominators are those of the definition, not relative to a maximum.
    pub true_denominators: bool,
    /// For parameters that are not used as they are, but normalised, say.
    pub parameter_scale: Option<ParameterScale>,
}

/// Whether rows are divided by the sum of weights of either sign.
pub fn is_signed(fourier: &Fourier) -> bool {
    fourier.normalizer == FourierNormalizer::Literal
        || (fourier.wave == Wave::Pairs && fourier.normalizer != FourierNormalizer::Unrotated)
}

/// What changes a drawn parameter in place.
pub type Prepare = Arc<dyn Fn(&Parameter, &mut [f64]) + Send + Sync>;

/// A mechanism in both number types.
#[derive(Clone)]
pub struct Subject {
    /// What a failure calls it.
    pub label: String,
    /// What the checks may assume of it.
    pub assumptions: Assumptions,
    /// Brings a drawn parameter to a range where the mechanism is well-conditioned.
    pub prepare: Prepare,
    single: Arc<dyn Kernel<f32>>,
    double: Arc<dyn Kernel<f64>>,
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
            single: Arc::new(mechanism.clone()),
            double: Arc::new(mechanism),
        }
    }

    /// What may be assumed of kernelized attention.
    pub fn assume(attention: &KernelizedAttention) -> Assumptions {
        let identity = attention.feature_map == FeatureMap::Identity;
        let raw_table = attention.score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Identity);
        Assumptions {
            signed_features: identity,
            signed_parameters: if raw_table {
                1
            } else if identity {
                usize::MAX
            } else {
                0
            },
            content: attention.score.content(),
            positions: attention.score != Score::Content || attention.decay.is_some(),
            positive_weights: !identity
                && !raw_table
                && attention.feature_map != FeatureMap::Relu
                && !matches!(attention.feature_map, FeatureMap::Dpfp { .. })
                && attention.score.fourier().is_none_or(|fourier| fourier.normalizer == FourierNormalizer::Dominant),
            turned: attention.score.fourier().is_some() || !attention.feature_map.is_elementwise(),
            true_denominators: !attention.feature_map.is_exponential(),
            parameter_scale: None,
        }
    }

    /// Kernelized attention.
    pub fn kernelized(attention: &KernelizedAttention) -> Self {
        let subject = Self::new(attention.clone(), Self::assume(attention));
        match attention.score {
            // The sum of signed weights must not come near 0, or no tolerance would mean anything.
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
        }
    }

    /// Kernelized attention by each algorithm that can be forced, and by the one that is chosen for it.
    pub fn every_algorithm(attention: &KernelizedAttention) -> Vec<Self> {
        [Algorithm::Auto]
            .iter()
            .chain(attention.algorithms())
            .map(|&algorithm| Self::kernelized(&KernelizedAttention { algorithm, ..attention.clone() }))
            .collect()
    }
}

/// The algorithms that kernelized attention can be asked for.
pub(crate) fn kernelized_algorithms() -> Vec<Algorithm> {
    let forced = KernelizedAttention::default().algorithms();
    [Algorithm::Auto].iter().chain(forced).copied().collect()
}
