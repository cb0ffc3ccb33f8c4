//! What each algorithm would cost for a call, and which is the cheapest.

use super::fft::transform_length;
use super::piecewise::ROWS;
use super::problem::{STRIP, TILE};
use super::{Bias, Toeplitz};
use crate::algorithm::{Algorithm, Estimate, Plan};
use crate::mask::{Mask, Order};
use crate::shape::Dims;

/// Flops a second of weighed tiles on one thread. This and the other rates were measured by `benches/toeplitz.rs` on a
/// Zen 5 core with AVX-512 at 64 features in `f32`; only their ratios decide.
const TILE_RATE: f64 = 180e9;

/// Flops a second of transforms in doubles and the products around them on one thread, counted as 2.5 N log₂N a
/// transform.
const FFT_RATE: f64 = 6e9;

/// Flops a second of tiles and sums of short strips on one thread, and numbers of sums carried a second.
const PIECEWISE_RATE: f64 = 150e9;
const MOVE_RATE: f64 = 4e9;

/// Compares the algorithms for one call.
pub(super) fn plan(toeplitz: &Toeplitz, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let estimates = vec![tiled(dims, mask), fft(toeplitz, dims), piecewise(toeplitz, dims, mask)];
    let cheapest = estimates.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let (algorithm, reason) = match (toeplitz.algorithm, cheapest) {
        (Algorithm::Auto, Some(best)) => {
            let other = estimates.iter().filter(|e| e.algorithm != best.algorithm).map(|e| e.seconds);
            let other = other.fold(f64::INFINITY, f64::min);
            let ratio = if best.seconds > 0.0 { other / best.seconds } else { 1.0 };
            (best.algorithm, format!("predicted to be the fastest, {ratio:.1} × before the next"))
        }
        (Algorithm::Auto, None) => (Algorithm::Tiled, "there is no other".to_owned()),
        (forced, _) => (forced, "forced by the caller".to_owned()),
    };
    Plan { algorithm, estimates, reason }
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
    let tiles = dense.min(queries * width) * 2.0 * (d + dv);
    let far = sums * sides * (queries + keys) * 2.0 * d * (dv + 1.0);
    let flops = heads * (tiles + far);
    Estimate {
        algorithm: Algorithm::Piecewise,
        flops,
        published_elements: d * (dv + 1.0) * keys,
        scratch_bytes: 4.0 * (sides * strips * d * (dv + 2.0) + tiled(dims, mask).scratch_bytes / 4.0),
        // Sums are carried from strip to strip, and tiles load their keys for half as many rows as a long strip does.
        seconds: flops / PIECEWISE_RATE + heads * sides * strips * d * dv / MOVE_RATE,
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
    let transforms = heads * 2.0 * d * (dv + 1.0);
    let flops = transforms * 2.5 * length * length.log2();
    Estimate {
        algorithm: Algorithm::Fft,
        flops,
        published_elements: length * d * (dv + 1.0),
        // Columns of φ(q), φ(k), v and the sums in doubles, and one task's signal and spectra.
        scratch_bytes: 8.0 * ((dims.keys as f64 + dims.queries as f64) * (d + dv) + 4.0 * length),
        seconds: flops / FFT_RATE,
    }
}

fn tiled(dims: &Dims, mask: &Mask<'_>) -> Estimate {
    let (d, dv) = (dims.head_dim as f64, dims.value_dim as f64);
    let heads = (dims.batch * dims.heads) as f64;
    let flops = heads * mask.visible_pairs(dims) * 2.0 * (d + dv);
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
