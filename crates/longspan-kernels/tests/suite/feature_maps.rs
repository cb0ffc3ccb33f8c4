//! Feature maps of whole rows: the conformance suite, and what is peculiar to them.

use longspan_kernels::{Dims, FeatureMap, HedgehogNorm, KernelizedAttention, RandomFeatures};
use longspan_testing::suite::{Check, Sample, assert_all};
use longspan_testing::{Case, Subject, accuracy, grid, isolation, rejection, threads};

fn over(cases: &[(KernelizedAttention, Case)], check: Check) {
    let subjects: Vec<Subject> = cases.iter().map(|(attention, _)| Subject::kernelized(attention)).collect();
    assert_all(check, subjects.iter().zip(cases.iter().map(|(_, case)| case)));
}

fn streams(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    grid::as_streams(seed, grid::row_maps(seed, count, &grid::LENGTHS))
}

#[test]
fn forward_is_the_definition() {
    over(&grid::row_maps(81, 400, &grid::LENGTHS), accuracy::forward::<f32>);
    over(&grid::row_maps(82, 300, &grid::LENGTHS), accuracy::forward::<f64>);
}

#[test]
fn gradients_are_those_of_the_definition() {
    over(&grid::row_maps(83, 150, &grid::SHORT_LENGTHS), accuracy::gradient);
}

#[test]
fn gradients_in_f32_are_those_in_f64() {
    over(&grid::row_maps(84, 200, &grid::LENGTHS), accuracy::gradient_in_f32);
}

#[test]
fn algorithms_agree() {
    let mut sample = Sample::default();
    for (attention, case) in grid::row_maps(85, 80, &grid::LENGTHS).into_iter().filter(|_| sample.takes_next()) {
        let agree = accuracy::algorithms_agree::<f32>(&attention, &case)
            .and_then(|()| accuracy::algorithms_agree::<f64>(&attention, &case));
        if let Err(failure) = agree {
            panic!("{failure}\n    {attention:?}\n    {case:?}");
        }
    }
}

longspan_testing::shared_tests!(over, grid::row_maps, streams);

#[test]
fn packed_is_looped() {
    over(&grid::row_maps(86, 240, &grid::LENGTHS), isolation::packed_is_looped::<f32>);
}

#[test]
fn threads_do_not_matter() {
    over(&grid::row_maps(87, 60, &grid::LENGTHS), threads::threads_do_not_matter::<f32>);
}

#[test]
fn what_has_no_meaning_is_refused() {
    let dims = Dims { batch: 2, heads: 4, kv_heads: 2, queries: 5, keys: 6, head_dim: 3, value_dim: 2 };
    let case = Case::new(dims, true);
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
        rejection::refuses::<f32>(&subject, &case, "feature_map").unwrap_or_else(|failure| panic!("{failure}"));
    }
}
