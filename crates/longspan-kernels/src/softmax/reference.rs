//! The definition in `f64`, O(queries · keys): what the fast path is tested against. Never optimised.

use super::SoftmaxAttention;
use crate::call::{Call, Reference, check_reference, distance};
use crate::error::Error;

/// `out_i = Σ_j e^{s·q_i·k_j} v_j / Σ_j e^{s·q_i·k_j}` over the keys `j` that row `i` sees, by mask and window.
pub(super) fn reference(attention: &SoftmaxAttention, call: &Call<'_, f64>) -> Result<Reference, Error> {
    check_reference(attention, call)?;
    let dims = &call.dims;
    let scale = attention.scale.unwrap_or(1.0 / (dims.head_dim as f64).sqrt());
    Ok(Reference::of_rows(dims, |[batch, head, i]| {
        let kv_head = head / dims.group();
        let q = call.q.rows(batch, head).row(i, dims.head_dim);
        let k = |j| call.k.rows(batch, kv_head).row(j, dims.head_dim);
        let v = |j| call.v.rows(batch, kv_head).row(j, dims.value_dim);
        let score = |j| scale * q.iter().zip(k(j)).map(|(q, k)| q * k).sum::<f64>();
        let near = |delta: isize| attention.window.is_none_or(|window| delta.unsigned_abs() < window);
        let seen = (0..dims.keys).filter(|&j| distance(call, [batch, i, j]).is_some_and(near));
        let scores: Vec<(usize, f64)> = seen.map(|j| (j, score(j))).collect();

        // e^s overflows where the quotient does not.
        let highest = scores.iter().map(|&(_, s)| s).fold(f64::NEG_INFINITY, f64::max);
        let mut numerator = vec![0.0; dims.value_dim];
        let mut denominator = 0.0;
        for &(j, s) in &scores {
            let weight = (s - highest).exp();
            numerator.iter_mut().zip(v(j)).for_each(|(n, v)| *n += weight * v);
            denominator += weight;
        }
        if scores.is_empty() {
            return (numerator, 0.0);
        }
        (numerator.into_iter().map(|n| n / denominator).collect(), denominator * highest.exp())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Dims, Mask};

    #[test]
    fn weights_are_exponentials_of_scaled_products() {
        let dims = Dims { queries: 2, keys: 2, ..Dims::square(1, 1, 0, 1) };
        let call = |mask| Call::row_major(dims, [&[1.0, 2.0], &[0.0, 3.0], &[10.0, 20.0]]).with_mask(mask);
        let attention = SoftmaxAttention { scale: Some(0.5), ..Default::default() };
        let (a, b) = (1.5f64.exp(), 3.0f64.exp());
        let all = reference(&attention, &call(Mask::bidirectional())).expect("a call that makes sense");
        let expected = [(10.0 + 20.0 * a) / (1.0 + a), (10.0 + 20.0 * b) / (1.0 + b)];
        assert!(all.out.iter().zip(expected).all(|(a, e)| (a - e).abs() < 1e-14), "{all:?}");
        assert!((all.denominators[1] - (1.0 + b)).abs() < 1e-13, "{all:?}");
        let causal = reference(&attention, &call(Mask::causal().with_offset(-1))).expect("a call that makes sense");
        assert_eq!((causal.out, causal.denominators), (vec![0.0, 10.0], vec![0.0, 1.0]));
    }
}
