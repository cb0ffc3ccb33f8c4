//! The definition in `f64`: what the fast path is tested against. Never optimised.

use super::ShortConvolution;
use crate::call::{Call, Compute, Dims, Keys, Mask, Reference};
use crate::error::{Error, expect};

/// `out_i = q_i ⊙ a(Σ_t c_t ⊙ k_j ⊙ v_j)` with `j = i + offset − t`, over the keys `j` that are there.
pub(super) fn reference(convolution: &ShortConvolution, call: &Call<'_, f64>) -> Result<Reference, Error> {
    Compute::check(convolution, call)?;
    let expected = || "none: prepend the earlier tokens instead".into();
    let got = || "a state".into();
    expect(call.initial_state.is_none(), "short-convolution reference", "initial_state", expected, got)?;
    let dims = &call.dims;
    let taps = call.parameters[0];
    let mut out = Vec::new();
    for batch in 0..dims.batch {
        for head in 0..dims.heads {
            let kv_head = head / dims.group();
            for i in 0..dims.queries {
                for channel in 0..dims.head_dim {
                    let q = call.q.rows(batch, head).row(i, dims.head_dim)[channel];
                    let k = |j| call.k.rows(batch, kv_head).row(j, dims.head_dim)[channel];
                    let v = |j| call.v.rows(batch, kv_head).row(j, dims.value_dim)[channel];
                    let tap = |t| taps[(kv_head * convolution.width + t) * dims.head_dim + channel];
                    let keys = (0..convolution.width).filter_map(|t| Some((t, key(&call.mask, dims, [batch, i, t])?)));
                    let sum: f64 = keys.map(|(t, j)| tap(t) * k(j) * v(j)).sum();
                    out.push(q * if convolution.silu { sum / (1.0 + (-sum).exp()) } else { sum });
                }
            }
        }
    }
    Ok(Reference { out, denominators: vec![1.0; dims.batch * dims.heads * dims.queries] })
}

/// The key that stands `t` places before row `i`, within its own sequence if several are packed.
fn key(mask: &Mask<'_>, dims: &Dims, [batch, i, t]: [usize; 3]) -> Option<usize> {
    let (first_query, keys) = match mask.keys {
        Keys::Packed { queries, keys } => {
            let next = (1..queries.len()).find(|&s| i < queries[s])?;
            (queries[next - 1], keys[next - 1]..keys[next])
        }
        _ => (0, 0..dims.keys),
    };
    let place = (i - first_query) as isize + mask.offset - t as isize;
    let j = keys.start + usize::try_from(place).ok()?;
    let ignored = match mask.keys {
        Keys::Lengths(lengths) => j >= lengths[batch],
        Keys::Padding(ignored) => j < dims.keys && ignored[batch * dims.keys + j],
        Keys::All | Keys::Packed { .. } => false,
    };
    (j < keys.end && !ignored).then_some(j)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::View;

    #[test]
    fn taps_weigh_the_latest_products() {
        let dims = Dims::square(1, 1, 3, 1);
        let (q, k, v) = ([1.0, 2.0, -1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 5.0]);
        let taps: &[f64] = &[10.0, 1.0];
        let [q, k, v] = [&q, &k, &v].map(|x| View::contiguous(x, dims.q()));
        let call = Call::new(dims, q, k, v).with_parameters(std::slice::from_ref(&taps));
        let plain = reference(&ShortConvolution { width: 2, silu: false }, &call).expect("a call that makes sense");
        assert_eq!(plain.out, [20.0, 2.0 * 32.0, -103.0]);
        let gated = reference(&ShortConvolution { width: 2, silu: true }, &call).expect("a call that makes sense");
        let silu = |x: f64| x / (1.0 + (-x).exp());
        assert!((gated.out[1] - 2.0 * silu(32.0)).abs() < 1e-12, "{gated:?}");
        let later =
            reference(&ShortConvolution { width: 2, silu: false }, &call.with_mask(Mask::causal().with_offset(1)));
        assert_eq!(later.expect("a call that makes sense").out, [32.0, 206.0, -10.0]);
    }
}
