//! What each algorithm would cost for a call, and which is the cheapest.

use super::naive::TILE;
use super::problem::CHUNK;
use super::{KernelizedAttention, Score};
use crate::call::{Dims, Mask, Order};
use crate::plan::{Algorithm, Estimate, Plan, Rate, Work};

/// Keys that a row of a tile computes beyond those that it sees, on average: half a register.
const ROUNDING: f64 = 8.0;

pub(super) fn plan(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Plan {
    // What a map of whole rows itself costs is the same for both, unless the naive form does without it.
    let mapped = &Dims { head_dim: attention.feature_map.features(dims.head_dim), ..*dims };
    let of_pairs = if attention.is_polynomial() { dims } else { mapped };
    let written = if attention.is_polynomial() { tokens(mapped).0 * mapped.head_dim as f64 } else { 0.0 };
    let chunked = chunked(attention, mapped, of_pairs.head_dim as f64, written, mask);
    let naive = (!attention.gate).then(|| naive(attention, of_pairs, mask));
    Plan::new(attention.algorithm, naive.into_iter().chain([chunked]).collect())
}

/// Queries and keys, and the numbers of them, of values and of outputs, for one head.
fn tokens(dims: &Dims) -> (f64, f64) {
    let tokens = (dims.queries + dims.keys) as f64;
    (tokens, tokens * (dims.head_dim + dims.value_dim) as f64)
}

/// Angles of a head of Fourier positions, and the numbers of queries and keys that they turn.
fn turned(attention: &KernelizedAttention, dims: &Dims) -> (f64, f64) {
    let angles = attention.score.fourier().map_or(0.0, |fourier| fourier.angles(dims.head_dim) as f64);
    (angles, tokens(dims).0 * angles)
}

fn table_rows(attention: &KernelizedAttention, mask: &Mask<'_>) -> f64 {
    let Some(shaw) = attention.score.shaw() else { return 0.0 };
    let radius = shaw.radius as f64;
    if mask.order == Order::Causal { radius + 1.0 } else { 2.0 * radius + 1.0 }
}

/// Blocks of `head_dim` features that keys take part with; 0 if they do not.
fn content(attention: &KernelizedAttention) -> f64 {
    match attention.score {
        Score::Relative(_) => 0.0,
        Score::Content | Score::Combined(_) => 1.0,
        Score::Fourier(fourier) => fourier.blocks().0 as f64,
    }
}

/// 1 if there are relative positions, else 0.
fn relative(attention: &KernelizedAttention) -> f64 {
    if attention.score.shaw().is_some() { 1.0 } else { 0.0 }
}

fn heads(dims: &Dims) -> f64 {
    (dims.batch * dims.heads) as f64
}

fn naive(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv, queries) = (dims.head_dim as f64, dims.value_dim as f64, dims.queries as f64);
    let (content, relative) = (content(attention), relative(attention));
    let rows = table_rows(attention, mask);
    let pairs = mask.visible_pairs(dims);
    let flops = |pairs: f64| 2.0 * (pairs * (content * d + dv) + queries * rows * d);
    let computed = if mask.order == Order::Causal { pairs + ROUNDING * queries } else { pairs };
    let ((tokens, numbers), (angles, turned)) = (tokens(dims), turned(attention, dims));
    let counts = [
        (Rate::NaiveHead, 1.0),
        (Rate::NaiveNumber, numbers),
        (Rate::NaiveAngle, angles),
        (Rate::NaiveTurned, turned),
        (Rate::NaiveScanToken, relative * tokens),
        (Rate::NaiveTable, rows * d),
        (Rate::NaiveWeight, pairs),
        (Rate::NaiveFlop, flops(computed)),
    ];
    let work = Work::new(heads(dims), Rate::NaiveCall, counts);
    let tile = queries.min(TILE as f64);
    Estimate {
        algorithm: Algorithm::Naive,
        flops: heads(dims) * flops(pairs),
        published_elements: (dims.queries * dims.keys) as f64,
        scratch_bytes: 4.0
            * (dims.keys as f64 * (2.0 * content * d + dv) + tile * (d + dv + TILE as f64 + rows) + 2.0 * rows * d),
        work,
        automatic: true,
    }
}

/// Numbers that the published relative term keeps for one head.
fn published_relative(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> f64 {
    let rows = table_rows(attention, mask);
    relative(attention) * dims.queries as f64 * (rows + 4.0)
}

/// `pair` numbers make the weight of a pair; `written` numbers are those of a map that other algorithms do without: each costs
/// as much as one that is read.
fn chunked(attention: &KernelizedAttention, dims: &Dims, pair: f64, written: f64, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let (queries, keys, chunk) = (dims.queries as f64, dims.keys as f64, CHUNK as f64);
    let causal = mask.order == Order::Causal;
    let content = content(attention);
    let rows = table_rows(attention, mask);
    let longest = queries.max(keys).min(chunk);
    let in_chunk = if causal { longest / 2.0 } else { 0.0 };
    let state = if queries.max(keys) <= chunk && causal { 0.0 } else { d * dv };
    // Each row: the state, the tile's half, the near band through table and values; each key enters the state.
    let row = content * (state + in_chunk * (pair + dv)) + rows * (d + dv);
    let flops = 2.0 * (queries * row + content * keys * d * dv);
    // Far values run along the rows, from both ends where there is no mask.
    let passes = relative(attention) * if causal { 1.0 } else { 2.0 };
    let ((tokens, numbers), (angles, _)) = (tokens(dims), turned(attention, dims));
    let counts = [
        (Rate::ChunkedHead, 1.0),
        (Rate::ChunkedNumber, numbers + written),
        (Rate::ChunkedAngle, angles),
        (Rate::ChunkedScanToken, passes * tokens),
        (Rate::ChunkedTable, rows * d),
        (Rate::ChunkedWeight, queries * (content * in_chunk + rows)),
        (Rate::ChunkedState, content * d * dv),
        (Rate::ChunkedFlop, flops),
    ];
    let work = Work::new(heads(dims), Rate::ChunkedCall, counts);
    let window = chunk + rows;
    Estimate {
        algorithm: Algorithm::Chunked,
        flops: heads(dims) * flops,
        published_elements: content * d * (dv + 1.0) + chunk * chunk + published_relative(attention, dims, mask),
        scratch_bytes: 4.0
            * (4.0 * d * dv + 3.0 * chunk * (d + dv) + window * (dv + chunk) + chunk * rows + 2.0 * rows * d),
        work,
        automatic: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Purpose;

    #[test]
    fn short_calls_are_naive_and_long_ones_chunked() {
        let attention = KernelizedAttention::default();
        let mask = Mask::bidirectional();
        assert_eq!(plan(&attention, &Dims::square(1, 1, 2, 64), &mask).algorithm(Purpose::Inference), Algorithm::Naive);
        assert_eq!(
            plan(&attention, &Dims::square(1, 1, 4096, 64), &mask).algorithm(Purpose::Inference),
            Algorithm::Chunked
        );
        let forced = KernelizedAttention { algorithm: Algorithm::Naive, ..attention };
        assert_eq!(plan(&forced, &Dims::square(1, 1, 4096, 64), &mask).algorithm(Purpose::Inference), Algorithm::Naive);
    }
}
