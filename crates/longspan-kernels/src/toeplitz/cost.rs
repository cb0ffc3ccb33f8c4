//! What each algorithm would cost for a call, and which is the cheapest.

use super::far::ROWS;
use super::fft::transform_length;
use super::problem::{CHUNK, TILE};
use super::{Bias, Toeplitz};
use crate::call::{Dims, Mask, Order};
use crate::plan::{Algorithm, Estimate, Plan, Rate, Work};

pub(super) fn plan(toeplitz: &Toeplitz, dims: &Dims, mask: &Mask<'_>) -> Plan {
    // Counted is what follows a map of whole rows, which takes the smaller part of the time.
    let dims = &Dims { head_dim: toeplitz.feature_map.features(dims.head_dim), ..*dims };
    let estimates = vec![tiled(dims, mask), fft(toeplitz, dims), piecewise(toeplitz, dims, mask)];
    Plan::new(toeplitz.algorithm, estimates)
}

/// Numbers of queries, keys, values and outputs of a head.
fn numbers(dims: &Dims) -> f64 {
    (dims.queries + dims.keys) as f64 * (dims.head_dim + dims.value_dim) as f64
}

/// Near keys by tiles that are a chunk of rows wider than the table reaches; one sum a chunk for the others.
fn piecewise(toeplitz: &Toeplitz, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let heads = (dims.batch * dims.heads) as f64;
    let Chunks { chunks, pairs, rows, summed } = Chunks::count(&toeplitz.bias, dims, mask);
    let sides = if mask.order == Order::Causal { 1.0 } else { 2.0 };
    let tiles = pairs * 2.0 * (d + dv);
    let far = (rows + summed) * 2.0 * d * (dv + 1.0);
    // Sums are carried from chunk to chunk, and tiles load their keys for half as many rows as a long chunk does.
    let state = sides * chunks * d * (dv + 1.0);
    let counts = [
        (Rate::PiecewiseHead, 1.0),
        (Rate::PiecewiseNumber, numbers(dims)),
        (Rate::PiecewiseWeight, pairs),
        (Rate::PiecewiseState, state),
        (Rate::PiecewiseFlop, tiles),
        (Rate::PiecewiseFar, far),
    ];
    let work = Work::new(heads, Rate::PiecewiseCall, counts);
    Estimate {
        algorithm: Algorithm::Piecewise,
        flops: heads * (tiles + far),
        published_elements: d * (dv + 1.0) * dims.keys as f64,
        scratch_bytes: 4.0 * state + tiled(dims, mask).scratch_bytes,
        work,
        // Where all keys are near these are tiles of shorter chunks.
        automatic: toeplitz.bias.far().is_some(),
    }
}

/// What the chunks of a head meet.
#[derive(Debug, PartialEq)]
struct Chunks {
    chunks: f64,
    /// Pairs in tiles.
    pairs: f64,
    /// Rows that read a sum, once for each that they read.
    rows: f64,
    /// Keys that enter sums.
    summed: f64,
}

impl Chunks {
    fn count(bias: &Bias, dims: &Dims, mask: &Mask<'_>) -> Self {
        let (queries, keys) = (dims.queries as isize, dims.keys as isize);
        let causal = mask.order == Order::Causal;
        let (mut pairs, mut rows, mut before, mut after) = (0, 0, 0, 0);
        for start in (0..queries).step_by(ROWS) {
            let count = (queries - start).min(ROWS as isize);
            let (first, last) = (start + mask.offset, start + count - 1 + mask.offset);
            let from = bias.far().map_or(0, |_| (first - bias.near() as isize + 1).clamp(0, keys));
            if causal {
                // Row by row one key more, from the first row that sees any to the last that does not see all.
                let seen = |row: isize| (row + 1 - from).clamp(0, keys - from);
                let (low, high) = (first.max(from), last.min(keys - 1));
                let rising = (high - low + 1).max(0);
                pairs += (seen(low) + seen(high)) * rising / 2 + (keys - from) * (last - high.max(first - 1)).max(0);
            } else {
                let to = bias.after().map_or(keys, |(distance, _)| (last + distance).clamp(from, keys));
                pairs += count * (to - from);
                if to < keys {
                    rows += count;
                    after = after.max(keys - to);
                }
            }
            if from > 0 {
                rows += count;
                before = before.max(from);
            }
        }
        Self {
            chunks: (dims.queries as f64 / ROWS as f64).ceil(),
            pairs: pairs as f64,
            rows: rows as f64,
            summed: (before + after) as f64,
        }
    }
}

/// Features times value columns, each of which goes through two transforms of a length that fits all distances.
fn fft(toeplitz: &Toeplitz, dims: &Dims) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let heads = (dims.batch * dims.heads) as f64;
    let places = |tokens: usize| match toeplitz.bias {
        // Rows of pixels stand about twice their width apart.
        Bias::Grid { width, .. } => tokens.div_ceil(width.max(1)).saturating_mul(2 * width.saturating_sub(1) + 1),
        _ => tokens,
    };
    let length = transform_length(places(dims.keys), places(dims.queries)) as f64;
    let transforms = 2.0 * d * (dv + 1.0);
    let flops = transforms * 2.5 * length * length.log2();
    let counts = [(Rate::FftHead, 1.0), (Rate::FftFlop, flops)];
    let work = Work::new(heads, Rate::FftCall, counts);
    Estimate {
        algorithm: Algorithm::Fft,
        flops: heads * flops,
        published_elements: length * d * (dv + 1.0),
        // Columns of φ(q), φ(k), v and the sums in `f64`, and one task's signal and spectra.
        scratch_bytes: 8.0 * ((dims.keys as f64 + dims.queries as f64) * (d + dv) + 4.0 * length),
        work,
        automatic: true,
    }
}

fn tiled(dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let heads = (dims.batch * dims.heads) as f64;
    let pairs = mask.visible_pairs(dims);
    let flops = pairs * 2.0 * (d + dv);
    let counts = [
        (Rate::TiledHead, 1.0),
        (Rate::TiledNumber, numbers(dims)),
        (Rate::TiledWeight, pairs),
        (Rate::TiledFlop, flops),
    ];
    let work = Work::new(heads, Rate::TiledCall, counts);
    Estimate {
        algorithm: Algorithm::Tiled,
        flops: heads * flops,
        published_elements: (dims.queries * dims.keys) as f64,
        scratch_bytes: 4.0
            * (CHUNK as f64 * (d + dv)
                + (TILE * TILE) as f64
                + TILE as f64 * (2.0 * d + dv)
                + (dims.queries + dims.keys) as f64),
        work,
        automatic: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Purpose;

    #[test]
    fn clips_are_taken_in_linear_time_and_full_tables_by_tiles_until_transforms_win() {
        let chosen = |bias, length, algorithm| {
            let toeplitz = Toeplitz { algorithm, ..Toeplitz::new(bias) };
            plan(&toeplitz, &Dims::square(1, 1, length, 64), &Mask::bidirectional()).algorithm(Purpose::Inference)
        };
        assert_eq!(chosen(Bias::clipped(16), 8192, Algorithm::Auto), Algorithm::Piecewise);
        assert_eq!(chosen(Bias::symmetric(2048), 2048, Algorithm::Auto), Algorithm::Tiled);
        assert_eq!(chosen(Bias::symmetric(1 << 20), 1 << 20, Algorithm::Auto), Algorithm::Fft);
        assert_eq!(chosen(Bias::symmetric(2048), 2048, Algorithm::Fft), Algorithm::Fft);
    }

    #[test]
    fn chunks_are_counted_as_they_are_walked() {
        for bias in [Bias::clipped(16), Bias::clipped(200), Bias::symmetric(900)] {
            for (queries, keys) in [(1, 1), (5, 300), (300, 5), (128, 128), (129, 129), (700, 700)] {
                for (order, offset) in
                    [(Order::Causal, 0), (Order::Causal, -40), (Order::Causal, 40), (Order::Bidirectional, 0)]
                {
                    let dims = Dims { queries, keys, ..Dims::square(1, 1, 1, 4) };
                    let mask = Mask { order, offset, ..Mask::default() };
                    let (mut pairs, mut rows) = (0, 0);
                    for row in 0..queries as isize {
                        let chunk = row / ROWS as isize * ROWS as isize;
                        let first = chunk + offset;
                        let last = (chunk + ROWS as isize).min(queries as isize) - 1 + offset;
                        let keys = 0..keys as isize;
                        let before = |key: &isize| bias.far().is_some() && *key <= first - bias.near() as isize;
                        let after = |key: &isize| match bias.after() {
                            Some((distance, _)) if order == Order::Bidirectional => *key >= last + distance,
                            _ => false,
                        };
                        let visible = |key: &isize| order == Order::Bidirectional || *key <= row + offset;
                        pairs += keys.clone().filter(|key| !before(key) && !after(key) && visible(key)).count();
                        rows += usize::from(keys.clone().any(|key| before(&key)));
                        rows += usize::from(keys.clone().any(|key| after(&key) && !before(&key)));
                    }
                    let counted = Chunks::count(&bias, &dims, &mask);
                    assert_eq!(
                        (counted.pairs, counted.rows),
                        (pairs as f64, rows as f64),
                        "{bias:?} {dims:?} {mask:?}"
                    );
                }
            }
        }
    }
}
