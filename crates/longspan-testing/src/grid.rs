//! Cases that hit every boundary of the kernels: lengths around a chunk, radii around a length, offsets, masks, shapes.
//!
//! The full product has millions of cases. A deck deals every level of a factor equally often in random order, so
//! that a few hundred cases hold each level many times and nearly every pair of levels.

use longspan_kernels::{
    Algorithm, Dims, FeatureMap, Fourier, FourierNormalizer, KernelizedAttention, Positions, RelativeMap, Score, Shaw,
    Wave,
};

use crate::case::{Case, KeyMask};
use crate::random::Random;
use crate::subject::{is_signed, kernelized_algorithms};

/// Deals the levels of a factor, each equally often.
struct Deck<T> {
    levels: Vec<T>,
    order: Vec<usize>,
}

impl<T: Clone> Deck<T> {
    fn new(levels: impl IntoIterator<Item = T>) -> Self {
        Self { levels: levels.into_iter().collect(), order: Vec::new() }
    }

    fn deal(&mut self, random: &mut Random) -> T {
        if self.order.is_empty() {
            self.order = (0..self.levels.len()).collect();
            random.shuffle(&mut self.order);
        }
        self.levels[self.order.pop().unwrap_or(0)].clone()
    }
}

/// Rows of a chunk of the kernels.
const CHUNK: usize = 64;

/// Lengths: none, a few, around one chunk, and a prime beyond two.
pub const LENGTHS: [usize; 10] = [0, 1, 2, 3, 8, 13, CHUNK - 1, CHUNK, CHUNK + 1, 131];

/// Lengths for checks that run many calls.
pub const SHORT_LENGTHS: [usize; 8] = [0, 1, 2, 3, 8, 13, CHUNK + 1, 97];

#[derive(Debug, Clone, Copy)]
enum MaskKind {
    All,
    Lengths,
    Padding,
    NothingThere,
    Packed,
}

/// `count` mechanisms with a case each.
pub fn kernelized(seed: u64, count: usize, lengths: &[usize]) -> Vec<(KernelizedAttention, Case)> {
    use MaskKind::{All, Lengths, NothingThere, Packed, Padding};
    let random = &mut Random::new(seed);
    let mut queries = Deck::new(lengths.iter().copied());
    let mut keys = Deck::new(lengths.iter().copied());
    let mut same_length = Deck::new([true, false, false]);
    let mut score = Deck::new(["content", "relative", "combined", "combined"]);
    // None: beyond the longer of the two sequences.
    let mut radius = Deck::new([Some(0), Some(1), Some(2), Some(3), Some(6), Some(20), None]);
    let mut shared = Deck::new([true, false]);
    let mut map = Deck::new([RelativeMap::Same, RelativeMap::Same, RelativeMap::Identity]);
    let mut feature_map = Deck::new(FeatureMap::ELEMENTWISE);
    let mut normalize = Deck::new([true, true, false]);
    let mut causal = Deck::new([true, true, false]);
    // None: the last query stands at the last key.
    let mut offset = Deck::new([Some(0), Some(0), None, Some(2), Some(-3)]);
    let mut mask = Deck::new([All, All, Lengths, Padding, NothingThere, Packed]);
    // (d, dv): narrow, wider than a vector register, one column, whole registers.
    let mut widths = Deck::new([(4, 4), (5, 3), (3, 17), (16, 16), (8, 1), (1, 5), (33, 7)]);
    let mut heads = Deck::new([(1, 1), (2, 2), (4, 2), (3, 1)]);
    let mut batch = Deck::new([1, 1, 2, 3]);
    let mut decay = Deck::new([false, false, true]);
    let mut algorithm = Deck::new(kernelized_algorithms());

    (0..count)
        .map(|n| {
            let same_length = same_length.deal(random);
            let queries = queries.deal(random);
            let keys = if same_length { queries } else { keys.deal(random) };
            let ((head_dim, value_dim), (heads, kv_heads)) = (widths.deal(random), heads.deal(random));
            let mask = mask.deal(random);
            let batch = if matches!(mask, Packed) { 1 } else { batch.deal(random) };
            let dims = Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim };
            let radius = radius.deal(random).unwrap_or(queries.max(keys) + 3);
            let shaw = Shaw { radius, map: map.deal(random), shared: shared.deal(random) };
            let score = match score.deal(random) {
                "content" => Score::Content,
                "relative" => Score::Relative(shaw),
                _ => Score::Combined(shaw),
            };
            let causal = causal.deal(random);
            // The fastest decay still leaves normal numbers in `f32` after the longest distance of the grid, 0.6¹³³
            // = 3e-30; decays beyond that have a test of their own.
            let decay = (decay.deal(random) && causal)
                .then(|| (0..kv_heads).map(|_| [1.0, 0.6, 0.97][random.below(3)]).collect());
            let attention = KernelizedAttention {
                feature_map: feature_map.deal(random),
                score,
                decay,
                gate: false,
                normalize: normalize.deal(random),
                algorithm: algorithm.deal(random),
            };
            let signed = attention.feature_map == FeatureMap::Identity
                || attention.score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Identity);
            let case = Case {
                dims,
                causal,
                offset: offset.deal(random).unwrap_or(keys as isize - queries as isize),
                keys: key_mask(random, mask, &dims),
                positive: signed && attention.normalize,
                seed: seed.wrapping_mul(1_000_003).wrapping_add(n as u64),
            };
            (attention, case)
        })
        .collect()
}

/// `count` mechanisms over feature maps of whole rows and a case each: those of [`kernelized`], some with Fourier
/// positions instead.
pub fn row_maps(seed: u64, count: usize, lengths: &[usize]) -> Vec<(KernelizedAttention, Case)> {
    let random = &mut Random::new(seed ^ 0x3A);
    let maps = "prf:7 prf:40:seed=2 nprf:7 nprf:16:seed=3 dpfp dpfp:3 taylor2 hedgehog hedgehog:3 hedgehog:exp";
    let mut maps = Deck::new(maps.split(' '));
    let mut fourier = Deck::new([false, false, true]);
    kernelized(seed, count, lengths)
        .into_iter()
        .map(|(attention, case)| {
            let feature_map: FeatureMap = maps.deal(random).parse().expect("a name of this list");
            let score = if fourier.deal(random) { Score::Fourier(Fourier::default()) } else { attention.score };
            // With fewer than 4 numbers, rows may have no positive feature under DPFP.
            let dims = Dims { head_dim: case.dims.head_dim.clamp(4, 16), ..case.dims };
            // Rotated features have signs if the map's have, and weights near 0 if most features are 0.
            let few = matches!(feature_map, FeatureMap::Taylor2 | FeatureMap::Dpfp { .. });
            let signed = score.shaw().is_some_and(|shaw| shaw.map == RelativeMap::Identity)
                || (few && score.fourier().is_some());
            let case = Case { dims, positive: signed && attention.normalize, ..case };
            (KernelizedAttention { feature_map, score, ..attention }, case)
        })
        .collect()
}

/// `count` mechanisms with Fourier positions and a case each: those of [`kernelized`] with other scores.
pub fn fourier(seed: u64, count: usize, lengths: &[usize], given: bool) -> Vec<(KernelizedAttention, Case)> {
    let random = &mut Random::new(seed ^ 0xF0);
    let mut waves = Deck::new([
        (Wave::Each, FourierNormalizer::OnePlus),
        (Wave::Each, FourierNormalizer::OnePlus),
        (Wave::Each, FourierNormalizer::Literal),
        (Wave::Each, FourierNormalizer::Dominant),
        (Wave::Each, FourierNormalizer::Unrotated),
        (Wave::Each, FourierNormalizer::None),
        (Wave::Pairs, FourierNormalizer::Literal),
        (Wave::Pairs, FourierNormalizer::Unrotated),
        (Wave::Pairs, FourierNormalizer::None),
    ]);
    let positions = [Positions::Counted, Positions::Given { axes: 1 }, Positions::Given { axes: 3 }];
    let mut positions = Deck::new(positions.into_iter().take(if given { 3 } else { 1 }));
    kernelized(seed, count, lengths)
        .into_iter()
        .map(|(attention, case)| {
            let ((wave, normalizer), positions) = (waves.deal(random), positions.deal(random));
            let fourier = Fourier { wave, normalizer, positions };
            // Pairs need an even number of features; with fewer than four, all weights of a row may be near 0.
            let head_dim = case.dims.head_dim.next_multiple_of(if wave == Wave::Pairs { 2 } else { 1 }).max(4);
            // A denominator near 0 would make tolerances meaningless, so all features are well above 0.
            let feature_map = match (attention.feature_map, normalizer) {
                (FeatureMap::Relu | FeatureMap::Identity, _) if is_signed(&fourier) => FeatureMap::EluPlusOne,
                (FeatureMap::Relu, FourierNormalizer::OnePlus) => FeatureMap::Softplus,
                (map, _) => map,
            };
            let signed = feature_map == FeatureMap::Identity;
            let normalize = attention.normalize && normalizer != FourierNormalizer::None;
            let case = Case { dims: Dims { head_dim, ..case.dims }, positive: signed && normalize, ..case };
            (KernelizedAttention { feature_map, score: Score::Fourier(fourier), ..attention }, case)
        })
        .collect()
}

/// Turns each case into a causal call of as many queries as keys, whose tokens bring decays.
pub fn gated(cases: Vec<(KernelizedAttention, Case)>) -> Vec<(KernelizedAttention, Case)> {
    let gated = |(attention, case): (KernelizedAttention, Case)| {
        // Where a row's own key has features of 0, all that is left has the error of all gates since.
        let relu = attention.feature_map == FeatureMap::Relu;
        let feature_map = if relu { FeatureMap::EluPlusOne } else { attention.feature_map };
        let algorithm = Algorithm::Auto;
        let attention = KernelizedAttention { gate: true, decay: None, feature_map, algorithm, ..attention };
        let keys = match case.keys {
            KeyMask::Packed { keys, .. } => KeyMask::Packed { queries: keys.clone(), keys },
            others => others,
        };
        let dims = Dims { queries: case.dims.keys, ..case.dims };
        (attention, Case { dims, causal: true, offset: 0, keys, ..case })
    };
    cases.into_iter().map(gated).collect()
}

/// `count` mechanisms with a causal self-attention case each, for streaming.
pub fn streaming(seed: u64, count: usize) -> Vec<(KernelizedAttention, Case)> {
    as_streams(seed, kernelized(seed, count, &LENGTHS))
}

/// Turns each case into causal self-attention over all keys.
pub fn as_streams(seed: u64, cases: Vec<(KernelizedAttention, Case)>) -> Vec<(KernelizedAttention, Case)> {
    let mut lengths = Deck::new([1, 2, 3, 8, 13, CHUNK - 1, CHUNK, CHUNK + 1, 131, 200]);
    let mut random = Random::new(seed ^ 0x5EED);
    cases
        .into_iter()
        .map(|(attention, case)| {
            let length = lengths.deal(&mut random);
            let dims = Dims { queries: length, keys: length, ..case.dims };
            (attention, Case { dims, causal: true, offset: 0, keys: KeyMask::All, ..case })
        })
        .collect()
}

/// `count` cases whose values are as wide as queries, for mechanisms that mix tokens channel by channel.
pub fn channels(seed: u64, count: usize, lengths: &[usize]) -> Vec<Case> {
    let narrow = |(_, case): (KernelizedAttention, Case)| {
        let dims = Dims { value_dim: case.dims.head_dim, ..case.dims };
        Case { dims, positive: false, ..case }
    };
    kernelized(seed, count, lengths).into_iter().map(narrow).collect()
}

fn key_mask(random: &mut Random, kind: MaskKind, dims: &Dims) -> KeyMask {
    match kind {
        MaskKind::All => KeyMask::All,
        MaskKind::Lengths => KeyMask::Lengths((0..dims.batch).map(|_| random.below(dims.keys + 1)).collect()),
        MaskKind::Padding => KeyMask::Padding((0..dims.batch * dims.keys).map(|_| random.chance(0.4)).collect()),
        MaskKind::NothingThere => KeyMask::Padding(vec![true; dims.batch * dims.keys]),
        MaskKind::Packed => {
            // Some sequences have no queries, some no keys.
            let sequences = 1 + random.below(4);
            let mut bounds = |tokens: usize| {
                let mut inner: Vec<usize> = (1..sequences).map(|_| random.below(tokens + 1)).collect();
                inner.sort_unstable();
                std::iter::once(0).chain(inner).chain([tokens]).collect::<Vec<_>>()
            };
            KeyMask::Packed { queries: bounds(dims.queries), keys: bounds(dims.keys) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_hundred_cases_hold_every_boundary() {
        let cases = kernelized(1, 400, &LENGTHS);
        for length in LENGTHS {
            assert!(cases.iter().any(|(_, c)| c.dims.queries == length && c.dims.keys != length));
            assert!(cases.iter().any(|(_, c)| c.dims.keys == length && c.dims.queries != length));
        }
        for radius in [0, 1, 2, 3, 6, 20] {
            for causal in [true, false] {
                assert!(cases.iter().any(|(a, c)| {
                    a.score.shaw().is_some_and(|shaw| shaw.radius == radius) && c.causal == causal && c.dims.keys > 60
                }));
            }
        }
        assert!(cases.iter().any(|(a, c)| a.score.shaw().is_some_and(|s| s.radius > c.dims.keys && c.dims.keys > 60)));
        for map in FeatureMap::ELEMENTWISE {
            for causal in [true, false] {
                assert!(cases.iter().any(|(a, c)| a.feature_map == map && c.causal == causal && c.dims.queries > 60));
            }
        }
        for algorithm in kernelized_algorithms() {
            assert!(cases.iter().any(|(a, c)| a.algorithm == algorithm && c.dims.queries > 60 && c.dims.keys > 60));
        }
        let kinds: [fn(&KeyMask) -> bool; 4] = [
            |k| matches!(k, KeyMask::Lengths(n) if n.iter().any(|&n| n > 1)),
            |k| matches!(k, KeyMask::Padding(p) if p.contains(&true) && p.contains(&false)),
            |k| matches!(k, KeyMask::Padding(p) if p.len() > 60 && !p.contains(&false)),
            |k| matches!(k, KeyMask::Packed { queries, .. } if queries.len() > 2),
        ];
        for kind in kinds {
            assert!(cases.iter().any(|(_, c)| kind(&c.keys) && c.causal && c.dims.keys > 60));
            assert!(cases.iter().any(|(_, c)| kind(&c.keys) && !c.causal && c.dims.keys > 60));
        }
        assert!(cases.iter().any(|(a, _)| a.decay.is_some()));
        assert!(cases.iter().any(|(a, _)| !a.normalize));
    }
}
