//! What a call takes.

use super::chunks::{CHUNK, chunk_len};
use super::items::REACH;
use super::options::{Aft, Variant};
use super::tiles::GRID;
use crate::call::{Dims, Mask, Order};
use crate::plan::{Algorithm, Estimate, Plan, Rate, Work};

pub(super) fn plan(aft: &Aft, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let causal = mask.order == Order::Causal;
    let (back, ahead) = aft.reach(causal);
    let full = matches!(aft.variant, Variant::Full { .. });
    let banded = match aft.variant {
        Variant::Conv { taps, .. } => Some(taps),
        Variant::Conv2d { taps, .. } => Some(taps[0].saturating_mul(taps[1])),
        _ => None,
    };
    let tiled = banded.is_some() || aft.tiled(causal);
    // A tile's rows share the keys of all their windows.
    let shared = if tiled { CHUNK } else { 1 };
    let window = banded.unwrap_or(back.saturating_add(ahead).saturating_add(shared));
    let near = window.min(dims.keys) as f64;
    let near = if full && causal { near / 2.0 } else { near };
    let channels = (dims.batch * dims.heads * dims.head_dim) as f64;
    let (rows, tokens) = (channels * dims.queries as f64, channels * (dims.queries + dims.keys) as f64);
    // Two products a pair in a tile; a join of one key is about twenty operations, most of them in its exponential.
    // With one key a head a pair has one weight for all channels, and so one product; it has no maximum to keep.
    let (pair_flops, weight, pair) = match (tiled, banded.is_some()) {
        (true, false) => (4.0, 1.0, Rate::AftTiled),
        (_, true) => (2.0, 0.0, Rate::AftConvolved),
        (false, false) => (20.0, 0.0, Rate::AftJoined),
    };
    let flops = rows * near * pair_flops + 20.0 * tokens;
    let joins = if near > 1.0 { rows * near } else { 0.0 };
    let weights = weight * joins / dims.head_dim.max(1) as f64;
    // Tiles on a mask's diagonal are cut down to 8 × 8 pairs, which are joined one by one: a row's share of halves and pairs.
    let cut = if tiled && banded.is_none() && causal && near > 1.0 { near.min(8.0) * rows } else { 0.0 };
    let counts = [(Rate::AftWeight, weights), (pair, joins), (Rate::AftJoined, cut), (Rate::AftNumber, tokens)];
    let work = Work::new(1.0, Rate::AftCall, counts);
    let estimate = Estimate {
        algorithm: Algorithm::Chunked,
        flops,
        published_elements: (dims.keys * dims.head_dim) as f64,
        scratch_bytes: 4.0 * scratch_numbers(aft, dims, causal),
        work,
        automatic: true,
    };
    // Means before, in and after the window are joined: the one algorithm.
    Plan::new(Algorithm::Auto, vec![estimate])
}

/// Numbers of working memory that one head's forward pass takes on one thread, in doubles because sizes have not been checked here. A
/// test holds it to what a call takes.
fn scratch_numbers(aft: &Aft, dims: &Dims, causal: bool) -> f64 {
    let (chunk, line) = (chunk_len(aft, dims.queries) as f64, 16.0);
    let width = (dims.head_dim as f64 / line).ceil() * line;
    let mean = 4.0 * width;
    let chunks = |tokens: usize| (tokens as f64 / chunk).ceil();
    let (back, ahead) = aft.reach(causal);
    let reach = back as f64 + ahead as f64;
    let (keys, of_chunk) = (dims.keys as f64, chunk + reach);
    // The means at the edges of chunks.
    let edges = 2.0 * chunks(dims.queries) * mean;
    let (grid, range) = (GRID as f64, REACH as f64);
    let tiled = || {
        let bias_tiles = (of_chunk.min(keys) / grid).ceil() * (grid * chunk + 2.0 * chunk + 2.0);
        let sums = 2.0 * chunk * width;
        (chunk + range) * mean + sums + 2.0 * chunk * range + 4.0 * range * width + bias_tiles + edges
    };
    match aft.variant {
        Variant::Simple => (chunk + 4.25) * mean,
        Variant::Full { .. } => tiled() + (keys / range).ceil() * 2.0 * range * width,
        Variant::Local { .. } if aft.tiled(causal) => tiled(),
        Variant::Local { .. } => (of_chunk.min(keys).max(chunk) + chunk + 3.0) * mean + edges,
        Variant::Conv { taps, .. } => convolved([1, dims.queries], [1, taps], width, causal),
        Variant::Conv2d { image, taps, .. } => convolved(image, taps, width, false),
    }
}

/// The same for AFT-conv over `lines` of so many places; a masked one keeps one sum and one block's.
fn convolved([lines, places]: [usize; 2], taps: [usize; 2], width: f64, masked: bool) -> f64 {
    let (chunk, line) = (CHUNK as f64, 16.0);
    let (in_view, pieces) = (taps[0].min(lines) as f64, (taps[1] as f64 / chunk).ceil());
    let columns = if lines > 1 { 1.0 } else { 0.0 };
    let exponents = 6.0 * chunk * (in_view * pieces + 2.0 * columns + 1.0);
    let rows = width * chunk * (2.0 * (2.0 + columns) + 2.0);
    let work = 2.0 * (12.0 * chunk + width) + exponents + rows + (chunk + 3.0) * chunk;
    // Of each line the sums of its blocks from either side, and where there are several, those of lines.
    let blocks = (places as f64 / chunk).ceil() + (taps[1].saturating_sub(1) as f64 / chunk).ceil() + 2.0;
    let blocks = if masked { 1.0 } else { blocks };
    work + 2.0 * lines as f64 * (blocks + columns) * (line + width)
}
