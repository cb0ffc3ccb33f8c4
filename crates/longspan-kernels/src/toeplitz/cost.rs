//! What each algorithm would cost for a call, and which is the cheapest.

use super::fft::transform_length;
use super::piecewise::ROWS;
use super::problem::{STRIP, TILE};
use super::{Bias, Toeplitz};
use crate::algorithm::{Algorithm, Estimate, Plan};
use crate::mask::{Mask, Order};
use crate::rates::{Rate, Rates, Work};
use crate::shape::Dims;

/// Compares the algorithms for one call.
pub(super) fn plan(toeplitz: &Toeplitz, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let estimates = vec![tiled(dims, mask), fft(toeplitz, dims), piecewise(toeplitz, dims, mask)];
    Plan::new(toeplitz.algorithm, estimates)
}

/// Numbers of queries, keys, values and outputs of a head.
fn numbers(dims: &Dims) -> f64 {
    (dims.queries + dims.keys) as f64 * (dims.head_dim + dims.value_dim) as f64
}

/// Near keys by tiles that are a strip of rows wider than the table reaches; one sum a strip for the others.
fn piecewise(toeplitz: &Toeplitz, dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let heads = (dims.batch * dims.heads) as f64;
    let dense = mask.visible_pairs(dims);
    let (queries, keys) = (dims.queries as f64, dims.keys as f64);
    let causal = mask.order == Order::Causal;
    let sides = if causal { 1.0 } else { 2.0 };
    let strips = (dims.queries as f64 / ROWS as f64).ceil();
    let (near, sums) = match (toeplitz.bias.far(), toeplitz.bias.after()) {
        (Some(_), after) => {
            let after = if causal { 0 } else { after.map_or(0, |(distance, _)| distance.max(0)) };
            (toeplitz.bias.near() as f64 + after as f64, 1.0)
        }
        _ => (keys, 0.0),
    };
    // A strip's rows see half of its own keys under a causal mask.
    let width = near + if causal { ROWS as f64 / 2.0 } else { ROWS as f64 };
    let pairs = dense.min(queries * width);
    let tiles = pairs * 2.0 * (d + dv);
    let far = sums * sides * (queries + keys) * 2.0 * d * (dv + 1.0);
    let flops = heads * (tiles + far);
    // Sums are carried from strip to strip, and tiles load their keys for half as many rows as a long strip does.
    let counts = [
        (Rate::PiecewiseHead, 1.0),
        (Rate::PiecewiseNumber, numbers(dims)),
        (Rate::PiecewiseWeight, pairs),
        (Rate::PiecewiseState, sums * sides * strips * d * dv),
        (Rate::PiecewiseFlop, tiles + far),
    ];
    let work = Work::new(heads, Rate::PiecewiseCall, counts);
    Estimate {
        algorithm: Algorithm::Piecewise,
        flops,
        published_elements: d * (dv + 1.0) * keys,
        scratch_bytes: 4.0 * (sides * strips * d * (dv + 2.0) + tiled(dims, mask).scratch_bytes / 4.0),
        seconds: work.seconds(Rates::current()),
        work,
        // Where all keys are near these are tiles of shorter strips.
        automatic: sums > 0.0,
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
    let counts = [(Rate::FftHead, 1.0), (Rate::FftNumber, transforms * length), (Rate::FftFlop, flops)];
    let work = Work::new(heads, Rate::FftCall, counts);
    Estimate {
        algorithm: Algorithm::Fft,
        flops: heads * flops,
        published_elements: length * d * (dv + 1.0),
        // Columns of φ(q), φ(k), v and the sums in doubles, and one task's signal and spectra.
        scratch_bytes: 8.0 * ((dims.keys as f64 + dims.queries as f64) * (d + dv) + 4.0 * length),
        seconds: work.seconds(Rates::current()),
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
            * (STRIP as f64 * (d + dv)
                + (TILE * TILE) as f64
                + TILE as f64 * (2.0 * d + dv)
                + (dims.queries + dims.keys) as f64),
        seconds: work.seconds(Rates::current()),
        work,
        automatic: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clips_are_taken_in_linear_time_and_full_tables_by_tiles_until_transforms_win() {
        let chosen = |bias, length, algorithm| {
            let toeplitz = Toeplitz { algorithm, ..Toeplitz::new(bias) };
            plan(&toeplitz, &Dims::square(1, 1, length, 64), &Mask::bidirectional()).algorithm
        };
        assert_eq!(chosen(Bias::clipped(16), 8192, Algorithm::Auto), Algorithm::Piecewise);
        assert_eq!(chosen(Bias::symmetric(2048), 2048, Algorithm::Auto), Algorithm::Tiled);
        assert_eq!(chosen(Bias::symmetric(1 << 20), 1 << 20, Algorithm::Auto), Algorithm::Fft);
        assert_eq!(chosen(Bias::symmetric(2048), 2048, Algorithm::Fft), Algorithm::Fft);
    }
}
