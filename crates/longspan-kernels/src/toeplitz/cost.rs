//! What each algorithm would cost for a call, and which is the cheapest.

use super::Toeplitz;
use super::problem::{STRIP, TILE};
use crate::algorithm::{Algorithm, Estimate, Plan};
use crate::mask::{Mask, Order};
use crate::shape::Dims;

/// Flops a second of weighed tiles on one thread, measured with AVX-512 at 64 features.
const TILE_RATE: f64 = 80e9;

/// Compares the algorithms for one call.
pub(super) fn plan(toeplitz: &Toeplitz, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let estimates = vec![tiled(dims, mask)];
    let reason = match toeplitz.algorithm {
        Algorithm::Auto => "there is no other".to_owned(),
        _ => "forced by the caller".to_owned(),
    };
    Plan { algorithm: Algorithm::Tiled, estimates, reason }
}

/// Pairs of query and key that see each other, one head, if no key is ignored.
fn visible_pairs(dims: &Dims, mask: &Mask<'_>) -> f64 {
    let (queries, keys) = (dims.queries as f64, dims.keys as f64);
    match mask.order {
        Order::Bidirectional => queries * keys,
        Order::Causal => {
            // Row i sees clamp(i + offset + 1, 0, keys): the difference of two triangles.
            let triangle = |n: f64| if n > 0.0 { n * (n + 1.0) / 2.0 } else { 0.0 };
            let last = queries + mask.offset as f64;
            let first = mask.offset as f64;
            triangle(last) - triangle(first) - (triangle(last - keys) - triangle(first - keys))
        }
    }
}

fn tiled(dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let heads = (dims.batch * dims.heads) as f64;
    let flops = heads * visible_pairs(dims, mask) * 2.0 * (d + dv);
    Estimate {
        algorithm: Algorithm::Tiled,
        flops,
        published_elements: (dims.queries * dims.keys) as f64,
        scratch_bytes: 4.0
            * (STRIP as f64 * (d + dv)
                + (TILE * TILE) as f64
                + TILE as f64 * (2.0 * d + dv)
                + (dims.queries + dims.keys) as f64),
        seconds: flops / TILE_RATE,
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
}
