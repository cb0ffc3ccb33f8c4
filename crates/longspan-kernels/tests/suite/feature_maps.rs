//! Feature maps of whole rows: the conformance suite, and what is peculiar to them.

use longspan_kernels::{FeatureMap, HedgehogNorm, KernelizedAttention, RandomFeatures};
use longspan_testing::grid::{LENGTHS, SHORT_LENGTHS};
use longspan_testing::suite::{over_kernelized as over, over_mechanisms};
use longspan_testing::{Case, Subject, accuracy, grid, isolation, rejection, threads};

fn streams(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    grid::as_streams(seed, grid::row_maps(seed, count, &LENGTHS))
}

longspan_testing::shared_tests!(over, grid::row_maps, streams);

longspan_testing::tests! { over;
    forward_is_the_definition:
        grid::row_maps(81, 400, &LENGTHS) => accuracy::forward::<f32>,
        grid::row_maps(82, 300, &LENGTHS) => accuracy::forward::<f64>;
    gradients_are_those_of_the_definition: grid::row_maps(83, 150, &SHORT_LENGTHS) => accuracy::gradient;
    gradients_in_f32_are_those_in_f64: grid::row_maps(84, 200, &LENGTHS) => accuracy::gradient_in_f32;
    packed_is_looped: grid::row_maps(86, 240, &LENGTHS) => isolation::packed_is_looped::<f32>;
    threads_do_not_matter: grid::row_maps(87, 60, &LENGTHS) => threads::threads_do_not_matter::<f32>;
}

longspan_testing::tests! { over_mechanisms;
    algorithms_agree:
        grid::row_maps(85, 80, &LENGTHS) => accuracy::algorithms_agree::<f32>,
        grid::row_maps(85, 80, &LENGTHS) => accuracy::algorithms_agree::<f64>;
}

#[test]
fn what_has_no_meaning_is_refused() {
    let case = Case::new(rejection::dims([3, 2]), true);
    let none = RandomFeatures { features: Some(0), seed: 1 };
    let many = RandomFeatures { features: Some(usize::MAX), seed: 1 };
    for feature_map in [
        FeatureMap::Dpfp { order: 0 },
        FeatureMap::Dpfp { order: usize::MAX },
        FeatureMap::Nprf(none),
        FeatureMap::Prf(none),
        FeatureMap::Prf(many),
        FeatureMap::Hedgehog { width: Some(0), norm: HedgehogNorm::Softmax },
    ] {
        let subject = Subject::kernelized(&KernelizedAttention { feature_map, ..Default::default() });
        rejection::assert_refused(&subject, &case, "feature_map");
    }
}
