//! The definition in doubles, O(queries · keys): what every fast path is tested against. Never optimised.

use super::options::{Aft, Variant};
use crate::call::{Call, Mechanism, Order, Reference, check_reference, places};
use crate::error::Error;

/// `Y_i = σ(q_i) ⊙ Σ_j e^{k_j+w_ij} ⊙ v_j / Σ_j e^{k_j+w_ij}` over the keys `j` that row `i` sees, channel by channel.
pub(crate) fn reference(aft: &Aft, call: &Call<'_, f64>) -> Result<Reference, Error> {
    check_reference(aft, call)?;
    Ok(Reference::of_rows(&call.dims, |place| (row(aft, call, place), 1.0)))
}

fn row(aft: &Aft, call: &Call<'_, f64>, [batch, head, i]: [usize; 3]) -> Vec<f64> {
    let dims = &call.dims;
    let (kv_head, width) = (head / dims.group(), dims.head_dim);
    let q = call.q.rows(batch, head).row(i, width);
    let key_dim = aft.key_dim(dims);
    let seen: Vec<(usize, f64)> = (0..dims.keys)
        .filter_map(|j| {
            let (i, j_own) = places(call, [batch, i, j])?;
            Some((j, bias(aft, call, head, i, j_own)))
        })
        .collect();
    (0..width)
        .map(|channel| {
            let terms: Vec<[f64; 3]> = seen
                .iter()
                .map(|&(j, bias)| {
                    let k = call.k.rows(batch, kv_head).row(j, key_dim)[channel.min(key_dim - 1)];
                    [k, bias, call.v.rows(batch, kv_head).row(j, width)[channel]]
                })
                .collect();
            // e^k overflows where the quotient does not, and k + w loses digits of w that differences keep.
            let Some(&[k, bias, _]) = terms.iter().max_by(|a, b| (a[0] + a[1]).total_cmp(&(b[0] + b[1]))) else {
                return 0.0;
            };
            if k == f64::NEG_INFINITY {
                return 0.0;
            }
            let (mut numerator, mut denominator) = (0.0, 0.0);
            for term in &terms {
                let weight = ((term[0] - k) + (term[1] - bias)).exp();
                numerator += weight * term[2];
                denominator += weight;
            }
            let gate = if aft.gate { 1.0 / (1.0 + (-q[channel]).exp()) } else { 1.0 };
            gate * numerator / denominator
        })
        .collect()
}

/// `w_ij`.
fn bias(aft: &Aft, call: &Call<'_, f64>, head: usize, i: usize, j: usize) -> f64 {
    let position = i as isize + call.mask.offset;
    let distance = j as isize - position;
    // Tables that belong to one call are read by row, tables of a greatest length by position.
    let row = |length: Option<usize>| if length.is_some() { position as usize } else { i };
    match aft.variant {
        Variant::Simple => 0.0,
        Variant::Full { length, rank: None } => call.parameters[0][position as usize * length + j],
        Variant::Full { rank: Some(rank), .. } => {
            let (u, z) = (&call.parameters[0][position as usize * rank..], &call.parameters[1][j * rank..]);
            (0..rank).map(|n| u[n] * z[n]).sum()
        }
        Variant::Local { window, length } => {
            let columns = 2 * window - 1;
            let column = distance + window as isize - 1;
            if (0..columns as isize).contains(&column) {
                call.parameters[0][row(length) * columns + column as usize]
            } else {
                0.0
            }
        }
        Variant::Conv { taps, normalized } => {
            let before = if call.mask.order == Order::Causal { taps - 1 } else { (taps - 1) / 2 };
            let tap = distance + before as isize;
            if !(0..taps as isize).contains(&tap) {
                return 0.0;
            }
            kernel(call, head, taps, normalized, tap as usize)
        }
        Variant::Conv2d { image: [_, width], taps, normalized } => {
            let tap = |axis: usize, key: usize, own: usize| {
                let tap = (key + (taps[axis] - 1) / 2).checked_sub(own)?;
                (tap < taps[axis]).then_some(tap)
            };
            let (Some(y), Some(x)) = (tap(0, j / width, i / width), tap(1, j % width, i % width)) else { return 0.0 };
            kernel(call, head, taps[0] * taps[1], normalized, y * taps[1] + x)
        }
    }
}

fn kernel(call: &Call<'_, f64>, head: usize, taps: usize, normalized: bool, tap: usize) -> f64 {
    let w = &call.parameters[0][head * taps..][..taps];
    if !normalized {
        return w[tap];
    }
    let mean = w.iter().sum::<f64>() / taps as f64;
    let deviation = (w.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / taps as f64).sqrt();
    let unit = if deviation == 0.0 || w.iter().all(|x| *x == w[0]) { 0.0 } else { (w[tap] - mean) / deviation };
    call.parameters[1][head] * unit + call.parameters[2][head]
}
