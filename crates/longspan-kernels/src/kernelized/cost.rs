//! What each algorithm would cost for a call, and which is the cheapest.

use super::problem::CHUNK;
use super::{KernelizedAttention, Score};
use crate::algorithm::{Algorithm, Estimate, Plan};
use crate::mask::{Mask, Order};
use crate::shape::Dims;

/// Flops a second of dense tiles on one thread. These constants are fits to times of both algorithms at 4 to 64 tokens
/// of 32 and 64 features on a Zen 5 core with AVX-512; only their ratios decide.
const TILE_RATE: f64 = 120e9;

/// Flops a second inside one pair.
const PAIR_RATE: f64 = 64e9;

/// Seconds for one pair whatever its width.
const PAIR_START: f64 = 8e-9;

/// Seconds that the chunked algorithm takes for a head before its first product, and for each number of its state: to
/// clear it, to carry it.
const CHUNKED_START: f64 = 0.5e-6;
const STATE_NUMBER: f64 = 1e-9;

/// Seconds of the cumsum algorithm for a row or key, and for a number of the cumulated sums.
const CUMSUM_ROW: f64 = 50e-9;
const CUMSUM_NUMBER: f64 = 0.5e-9;

/// Compares the algorithms for one call.
pub(super) fn plan(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let estimates = vec![naive(attention, dims, mask), cumsum(attention, dims, mask), chunked(attention, dims, mask)];
    let cheapest = estimates.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let (algorithm, reason) = match (attention.algorithm, cheapest) {
        (Algorithm::Auto, Some(best)) => {
            let other = estimates.iter().filter(|e| e.algorithm != best.algorithm).map(|e| e.seconds);
            let other = other.fold(f64::INFINITY, f64::min);
            let ratio = if best.seconds > 0.0 { other / best.seconds } else { 1.0 };
            (best.algorithm, format!("predicted to be the fastest, {ratio:.1} × before the next"))
        }
        (Algorithm::Auto, None) => (Algorithm::Chunked, "there is no other".to_owned()),
        (forced, _) => (forced, "forced by the caller".to_owned()),
    };
    Plan { algorithm, estimates, reason }
}

/// Pairs of query and key that see each other, one head, if no key is ignored.
fn visible_pairs(dims: &Dims, mask: &Mask<'_>) -> f64 {
    let (queries, keys) = (dims.queries as f64, dims.keys as f64);
    match mask.order {
        Order::Bidirectional => queries * keys,
        Order::Causal => {
            // Row i sees clamp(i + offset + 1, 0, keys): a ramp between two flat parts.
            let first = mask.offset as f64 + 1.0;
            let area = |rows: f64| {
                let top = (first + rows - 1.0).min(keys);
                let begin = first.max(1.0);
                let ramp = (top - begin + 1.0).max(0.0);
                let flat = (rows - (keys - first + 1.0).max(0.0)).clamp(0.0, rows);
                ramp * (begin + top) / 2.0 + flat * keys
            };
            area(queries)
        }
    }
}

/// Table rows that a row of queries meets.
fn table_rows(attention: &KernelizedAttention, mask: &Mask<'_>) -> f64 {
    let Some(shaw) = attention.score.shaw() else { return 0.0 };
    let radius = shaw.radius as f64;
    if mask.order == Order::Causal { radius + 1.0 } else { 2.0 * radius + 1.0 }
}

fn heads(dims: &Dims) -> f64 {
    (dims.batch * dims.heads) as f64
}

fn naive(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let terms = match attention.score {
        Score::Content | Score::Relative(_) => 1.0,
        Score::Combined(_) => 2.0,
    };
    let pairs = heads(dims) * visible_pairs(dims, mask);
    let flops = pairs * 2.0 * (terms * d + dv);
    Estimate {
        algorithm: Algorithm::Naive,
        flops,
        published_elements: (dims.queries * dims.keys) as f64,
        // φ(q) and φ(k) of one head, the mapped table.
        scratch_bytes: 4.0 * d * ((dims.queries + dims.keys) as f64 + table_rows(attention, mask)),
        seconds: flops / PAIR_RATE + pairs * PAIR_START,
    }
}

fn cumsum(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64 + 1.0);
    let (queries, keys) = (dims.queries as f64, dims.keys as f64);
    let (content, relative) = (attention.score.content(), attention.score.shaw().is_some());
    let content = if content { 1.0 } else { 0.0 };
    let rows = table_rows(attention, mask);
    let sums = if mask.order == Order::Causal { keys } else { keys.min(1.0) };
    let flops = heads(dims) * 2.0 * (queries * (content * d * dv + rows * (d + dv)) + content * keys * d * dv);
    // Every sum is formed and read once through the memory, a row and a key at a time.
    let traffic = heads(dims) * content * sums * d * dv;
    let starts = heads(dims) * (queries + keys) * if relative { 2.0 } else { 1.0 };
    Estimate {
        algorithm: Algorithm::Cumsum,
        flops,
        published_elements: content * d * dv * if mask.order == Order::Causal { queries.max(keys) } else { 1.0 }
            + published_relative(attention, dims, mask),
        scratch_bytes: 4.0 * (content * d * (sums * dv + keys) + keys * dv * if relative { 3.0 } else { 1.0 }),
        seconds: flops / TILE_RATE + starts * CUMSUM_ROW + traffic * CUMSUM_NUMBER,
    }
}

/// Numbers that the published relative term keeps for one head.
fn published_relative(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> f64 {
    let rows = table_rows(attention, mask);
    if attention.score.shaw().is_some() { dims.queries as f64 * (rows + 4.0) } else { 0.0 }
}

fn chunked(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let (queries, keys, chunk) = (dims.queries as f64, dims.keys as f64, CHUNK as f64);
    let causal = mask.order == Order::Causal;
    let content = if attention.score.content() { 1.0 } else { 0.0 };
    let rows = table_rows(attention, mask);
    let longest = queries.max(keys).min(chunk);
    let in_chunk = if causal { longest / 2.0 * (d + dv) } else { 0.0 };
    let state = if queries.max(keys) <= chunk && causal { 0.0 } else { d * dv };
    // Each row: the state, the tile's half, the near band through table and values; each key enters the state.
    let row = content * (state + in_chunk) + rows * (d + dv);
    let flops = heads(dims) * 2.0 * (queries * row + content * keys * d * dv);
    let window = chunk + rows;
    Estimate {
        algorithm: Algorithm::Chunked,
        flops,
        published_elements: content * d * (dv + 1.0) + chunk * chunk + published_relative(attention, dims, mask),
        scratch_bytes: 4.0
            * (4.0 * d * dv + 3.0 * chunk * (d + dv) + window * (dv + chunk) + chunk * rows + 2.0 * rows * d),
        seconds: flops / TILE_RATE + heads(dims) * (CHUNKED_START + content * d * dv * STATE_NUMBER),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_as_they_are_seen() {
        for (queries, keys) in [(0, 0), (1, 1), (5, 3), (3, 8), (8, 3), (7, 7)] {
            for offset in -4..6 {
                let dims = Dims { queries, keys, ..Dims::square(1, 1, 1, 4) };
                let mask = Mask::causal().with_offset(offset);
                let counted: isize = (0..queries as isize).map(|i| (i + offset + 1).clamp(0, keys as isize)).sum();
                assert_eq!(visible_pairs(&dims, &mask), counted as f64, "{queries} {keys} {offset}");
            }
        }
    }

    #[test]
    fn short_calls_are_naive_and_long_ones_chunked() {
        let attention = KernelizedAttention::default();
        let mask = Mask::bidirectional();
        assert_eq!(plan(&attention, &Dims::square(1, 1, 2, 64), &mask).algorithm, Algorithm::Naive);
        assert_eq!(plan(&attention, &Dims::square(1, 1, 4096, 64), &mask).algorithm, Algorithm::Chunked);
        let forced = KernelizedAttention { algorithm: Algorithm::Naive, ..attention };
        assert_eq!(plan(&forced, &Dims::square(1, 1, 4096, 64), &mask).algorithm, Algorithm::Naive);
    }
}
