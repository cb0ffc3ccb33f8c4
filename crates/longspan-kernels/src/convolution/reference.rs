//! The definition in `f64`: what the fast path is tested against. Never optimised.

use super::ShortConvolution;
use crate::call::{Call, Reference, check_reference, distance};
use crate::error::Error;

/// `out_i = q_i ⊙ a(b + Σ_t c_t ⊙ k_j ⊙ v_j)` with `j = i + offset − t`, over the keys `j` that are there; without gates `q = k = 1`.
pub(super) fn reference(convolution: &ShortConvolution, call: &Call<'_, f64>) -> Result<Reference, Error> {
    check_reference(convolution, call)?;
    let (dims, width) = (&call.dims, convolution.width);
    Ok(Reference::of_rows(dims, |[batch, head, i]| {
        let kv_head = head / dims.group();
        let tap_of = |j| distance(call, [batch, i, j]).and_then(|delta| usize::try_from(-delta).ok());
        let taps = (0..dims.keys).rev().filter_map(|j| tap_of(j).filter(|&t| t < width).map(|t| (t, j)));
        // The keys that the row sees, the latest first, each with the tap that weighs it.
        let seen: Vec<(usize, usize)> = taps.collect();
        let row = (0..dims.value_dim).map(|channel| {
            let gate = |row: &[f64]| if convolution.gated { row[channel] } else { 1.0 };
            let q = gate(call.q.rows(batch, head).row(i, dims.head_dim));
            let k = |j| gate(call.k.rows(batch, kv_head).row(j, dims.head_dim));
            let v = |j| call.v.rows(batch, kv_head).row(j, dims.value_dim)[channel];
            let tap = |t| call.parameters[0][(kv_head * width + t) * dims.value_dim + channel];
            let bias = if convolution.bias { call.parameters[1][kv_head * dims.value_dim + channel] } else { 0.0 };
            let sum = bias + seen.iter().map(|&(t, j)| tap(t) * k(j) * v(j)).sum::<f64>();
            q * if convolution.silu { sum / (1.0 + (-sum).exp()) } else { sum }
        });
        (row.collect(), 1.0)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Dims, Mask};

    #[test]
    fn taps_weigh_the_latest_products() {
        let dims = Dims::square(1, 1, 3, 1);
        let (q, k, v) = ([1.0, 2.0, -1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 5.0]);
        let taps: &[f64] = &[10.0, 1.0];
        let call = Call::row_major(dims, [&q, &k, &v]).with_parameters(std::slice::from_ref(&taps));
        let plain = reference(&ShortConvolution { width: 2, silu: false, ..Default::default() }, &call)
            .expect("a call that makes sense");
        assert_eq!(plain.out, [20.0, 2.0 * 32.0, -103.0]);
        let gated = reference(&ShortConvolution { width: 2, silu: true, ..Default::default() }, &call)
            .expect("a call that makes sense");
        let silu = |x: f64| x / (1.0 + (-x).exp());
        assert!((gated.out[1] - 2.0 * silu(32.0)).abs() < 1e-12, "{gated:?}");
        let later = reference(
            &ShortConvolution { width: 2, silu: false, ..Default::default() },
            &call.with_mask(Mask::causal().with_offset(1)),
        );
        assert_eq!(later.expect("a call that makes sense").out, [32.0, 206.0, -10.0]);
    }
}
