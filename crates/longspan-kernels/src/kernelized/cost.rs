//! What each algorithm would cost for a call, and which is the cheapest.

use super::naive::TILE;
use super::problem::CHUNK;
use super::{KernelizedAttention, Score};
use crate::algorithm::{Algorithm, Estimate, Plan};
use crate::mask::{Mask, Order};
use crate::mechanism::Mechanism;
use crate::shape::Dims;

/// What an algorithm does for one head; as rates, the seconds that each takes.
#[derive(Debug, Clone, Copy)]
struct Work {
    /// Begins, whatever the sizes.
    head: f64,
    /// Queries and keys.
    token: f64,
    /// Numbers of queries, keys, values and outputs.
    number: f64,
    /// The same once for each pass over them that only relative positions ask for.
    scan_token: f64,
    scan_number: f64,
    /// Numbers of the table.
    table: f64,
    /// Weights that stand in tiles.
    weight: f64,
    /// Numbers of `Σ φ(k) v⁺ᵀ`, as often as it is written.
    state: f64,
    flop: f64,
}

// Fits to the times of all three at 1 to 512 tokens of 16 to 128 features, 8 heads of `f32`, with and without a mask and
// with relative positions of radius 4, 16 and 64, on one thread of a Zen 5 core with AVX-512: there the choice was never
// more than 5 % slower than the fastest. Only their ratios decide.
const NAIVE: Work = Work {
    head: 162e-9,
    token: 3.4e-9,
    number: 0.169e-9,
    scan_token: 7.9e-9,
    scan_number: 0.0,
    table: 0.235e-9,
    weight: 0.138e-9,
    state: 0.0,
    flop: 3.51e-12,
};
/// What relative positions add to a weight of the naive algorithm.
const NAIVE_RELATIVE_WEIGHT: f64 = 0.102e-9;
/// Keys that a row of a tile computes beyond those that it sees, on average: half a register.
const ROUNDING: f64 = 8.0;
const CUMSUM: Work = Work {
    head: 69e-9,
    token: 48.9e-9,
    number: 0.33e-9,
    scan_token: 0.0,
    scan_number: 0.0,
    table: 0.186e-9,
    weight: 0.0,
    state: 0.048e-9,
    flop: 17.3e-12,
};
const CHUNKED: Work = Work {
    head: 444e-9,
    token: 5.9e-9,
    number: 0.132e-9,
    scan_token: 7.1e-9,
    scan_number: 0.147e-9,
    table: 0.339e-9,
    weight: 0.25e-9,
    state: 0.123e-9,
    flop: 3.91e-12,
};

impl Work {
    /// What every algorithm has to do, and nothing else.
    fn new(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Self {
        let tokens = (dims.queries + dims.keys) as f64;
        let numbers = tokens * (dims.head_dim + dims.value_dim) as f64;
        Self {
            head: 1.0,
            token: tokens,
            number: numbers,
            scan_token: 0.0,
            scan_number: 0.0,
            table: table_rows(attention, mask) * dims.head_dim as f64,
            weight: 0.0,
            state: 0.0,
            flop: 0.0,
        }
    }

    fn seconds(&self, rates: &Self) -> f64 {
        self.head * rates.head
            + self.token * rates.token
            + self.number * rates.number
            + self.scan_token * rates.scan_token
            + self.scan_number * rates.scan_number
            + self.table * rates.table
            + self.weight * rates.weight
            + self.state * rates.state
            + self.flop * rates.flop
    }
}

/// Compares the algorithms for one call.
pub(super) fn plan(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let mut estimates =
        vec![naive(attention, dims, mask), cumsum(attention, dims, mask), chunked(attention, dims, mask)];
    estimates.retain(|estimate| Mechanism::<f32>::algorithms(attention).contains(&estimate.algorithm));
    // Cumsum was never measured to be the fastest, and a call may have no room for it.
    let candidates = || estimates.iter().filter(|e| e.algorithm != Algorithm::Cumsum);
    let cheapest = candidates().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let (algorithm, reason) = match (attention.algorithm, cheapest) {
        (Algorithm::Auto, Some(best)) => {
            let other = candidates().filter(|e| e.algorithm != best.algorithm).map(|e| e.seconds);
            let other = other.fold(f64::INFINITY, f64::min);
            let ratio = if best.seconds > 0.0 { other / best.seconds } else { 1.0 };
            (best.algorithm, format!("predicted to be the fastest, {ratio:.1} × before the next"))
        }
        (Algorithm::Auto, None) => (Algorithm::Chunked, "there is no other".to_owned()),
        (forced, _) => (forced, "forced by the caller".to_owned()),
    };
    Plan { algorithm, estimates, reason }
}

/// Table rows that a row of queries meets.
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
    let work = Work::new(attention, dims, mask);
    let work = Work { scan_token: relative * work.token, weight: pairs, flop: flops(computed), ..work };
    let seconds = work.seconds(&NAIVE) + relative * pairs * NAIVE_RELATIVE_WEIGHT;
    let tile = queries.min(TILE as f64);
    Estimate {
        algorithm: Algorithm::Naive,
        flops: heads(dims) * flops(pairs),
        published_elements: (dims.queries * dims.keys) as f64,
        scratch_bytes: 4.0
            * (dims.keys as f64 * (2.0 * content * d + dv) + tile * (d + dv + TILE as f64 + rows) + 2.0 * rows * d),
        seconds: heads(dims) * seconds,
    }
}

fn cumsum(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64 + 1.0);
    let (queries, keys) = (dims.queries as f64, dims.keys as f64);
    let (content, relative) = (content(attention), relative(attention));
    let rows = table_rows(attention, mask);
    let causal = mask.order == Order::Causal;
    let sums = if causal { keys } else { keys.min(1.0) };
    let flops = 2.0 * (queries * (content * d * dv + rows * (d + dv)) + content * keys * d * dv);
    let work = Work { state: content * sums * d * dv, flop: flops, ..Work::new(attention, dims, mask) };
    Estimate {
        algorithm: Algorithm::Cumsum,
        flops: heads(dims) * flops,
        published_elements: content * d * dv * if causal { queries.max(keys) } else { 1.0 }
            + published_relative(attention, dims, mask),
        scratch_bytes: 4.0 * (content * d * (sums * dv + keys) + keys * dv * (1.0 + 2.0 * relative) + 2.0 * rows * d),
        seconds: heads(dims) * work.seconds(&CUMSUM),
    }
}

/// Numbers that the published relative term keeps for one head.
fn published_relative(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> f64 {
    let rows = table_rows(attention, mask);
    relative(attention) * dims.queries as f64 * (rows + 4.0)
}

fn chunked(attention: &KernelizedAttention, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let (queries, keys, chunk) = (dims.queries as f64, dims.keys as f64, CHUNK as f64);
    let causal = mask.order == Order::Causal;
    let content = content(attention);
    let rows = table_rows(attention, mask);
    let longest = queries.max(keys).min(chunk);
    let in_chunk = if causal { longest / 2.0 } else { 0.0 };
    let state = if queries.max(keys) <= chunk && causal { 0.0 } else { d * dv };
    // Each row: the state, the tile's half, the near band through table and values; each key enters the state.
    let row = content * (state + in_chunk * (d + dv)) + rows * (d + dv);
    let flops = 2.0 * (queries * row + content * keys * d * dv);
    // Far values run along the rows, from both ends where there is no mask.
    let passes = relative(attention) * if causal { 1.0 } else { 2.0 };
    let work = Work::new(attention, dims, mask);
    let work = Work {
        scan_token: passes * work.token,
        scan_number: passes * work.number / 2.0,
        weight: queries * (content * in_chunk + rows),
        state: content * d * dv,
        flop: flops,
        ..work
    };
    let window = chunk + rows;
    Estimate {
        algorithm: Algorithm::Chunked,
        flops: heads(dims) * flops,
        published_elements: content * d * (dv + 1.0) + chunk * chunk + published_relative(attention, dims, mask),
        scratch_bytes: 4.0
            * (4.0 * d * dv + 3.0 * chunk * (d + dv) + window * (dv + chunk) + chunk * rows + 2.0 * rows * d),
        seconds: heads(dims) * work.seconds(&CHUNKED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
