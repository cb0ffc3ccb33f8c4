//! The published algorithm of the Linear Scalable Transformer, as an oracle beside the definition.
//!
//! Outer products of keys and values are cumulated over the keys and all of them kept; each row reads one. With
//! `v⁺ = [v, 1]` and `P_n = Σ_{j<n} φ(k_j) v⁺_jᵀ`, row `i` at key `t = i + offset` gives
//! `[N_i, D_i] = P_{c(t+1)}ᵀ φ(q_i)`, `c(x) = clip(x, 0, Lk)` (`P_Lk` without a causal mask). Relative positions add
//! `w_0 Σ_{j<m} v⁺_j + Σ_{m≤j<e} w_{j−t+R} v⁺_j + w_{2R} Σ_{j≥e} v⁺_j` with `w = φ(q_i) ρ(r)ᵀ`, `m = c(t−R+1)` and
//! `e = c(t+R)` (`c(t+1)` and no last term under a causal mask), from cumulated sums of `v⁺`. What is printed as that
//! algorithm lets each row see one key of its future, pads too little and counts the last term from the wrong end; this
//! is the sum that it means.
//!
//! It keeps keys · features · values numbers a head, which is why the kernels cut sequences into chunks instead.

use longspan_kernels::{FeatureMap, KernelizedAttention, RelativeMap};

use crate::case::{Case, Inputs};

/// The outputs, `[batch, heads, queries, value_dim]`; for elementwise maps without decay and calls over all keys.
pub fn forward(attention: &KernelizedAttention, case: &Case, inputs: &Inputs<f64>) -> Vec<f64> {
    let dims = &case.dims;
    let (d, width, keys) = (dims.head_dim, dims.value_dim + 1, dims.keys);
    let map = attention.feature_map;
    let features = |x: &[f64]| -> Vec<f64> { x.iter().map(|&x| map.apply(x)).collect() };
    let clip = |x: isize| x.clamp(0, keys as isize) as usize;
    let mut out = Vec::new();
    for (batch, head) in (0..dims.batch).flat_map(|batch| (0..dims.heads).map(move |head| (batch, head))) {
        let kv = batch * dims.kv_heads + head / dims.group();
        let value = |j: usize| {
            let v = &inputs.v[(kv * keys + j) * dims.value_dim..][..dims.value_dim];
            v.iter().copied().chain([1.0])
        };
        // P_n and Σ_{j<n} v⁺_j for every n.
        let (mut products, mut sums) = (vec![vec![0.0; d * width]], vec![vec![0.0; width]]);
        for j in 0..keys {
            let (mut product, mut sum) = (products[j].clone(), sums[j].clone());
            for (n, v) in value(j).enumerate() {
                sum[n] += v;
                for (f, k) in features(&inputs.k[(kv * keys + j) * d..][..d]).into_iter().enumerate() {
                    product[f * width + n] += k * v;
                }
            }
            products.push(product);
            sums.push(sum);
        }
        for i in 0..dims.queries {
            let q = features(&inputs.q[((batch * dims.heads + head) * dims.queries + i) * d..][..d]);
            let t = i as isize + case.offset;
            let seen = if case.causal { clip(t + 1) } else { keys };
            let mut sum = vec![0.0; width];
            if attention.score.content() {
                for (f, q) in q.iter().enumerate() {
                    for (n, sum) in sum.iter_mut().enumerate() {
                        *sum += q * products[seen][f * width + n];
                    }
                }
            }
            if let Some(shaw) = attention.score.shaw() {
                let radius = shaw.radius as isize;
                let table = if shaw.shared { 0 } else { head * shaw.rows() };
                let weight = |row: isize| -> f64 {
                    let r = &inputs.parameters[0][(table + row as usize) * d..][..d];
                    let rho = |x| if shaw.map == RelativeMap::Identity { x } else { map.apply(x) };
                    q.iter().zip(r).map(|(q, &r)| q * rho(r)).sum()
                };
                let near = clip(t - radius + 1).min(seen);
                let end = if case.causal { seen } else { clip(t + radius).max(near) };
                let (first, last) = (weight(0), weight(2 * radius));
                for (n, sum) in sum.iter_mut().enumerate() {
                    *sum += first * sums[near][n] + last * (sums[seen][n] - sums[end][n]);
                }
                for j in near..end {
                    let w = weight((j as isize - t + radius).clamp(0, 2 * radius));
                    sum.iter_mut().zip(value(j)).for_each(|(sum, v)| *sum += w * v);
                }
            }
            let denominator = if attention.normalize { sum[width - 1] } else { 1.0 };
            out.extend(sum[..width - 1].iter().map(|n| if denominator == 0.0 { 0.0 } else { n / denominator }));
        }
    }
    out
}

/// Whether [`forward`] computes this call.
pub fn computes(attention: &KernelizedAttention, case: &Case) -> bool {
    let map = attention.feature_map;
    let elementwise = map.is_elementwise() && map != FeatureMap::Exp;
    elementwise && attention.decay.is_none() && attention.score.fourier().is_none() && case.keys == crate::KeyMask::All
}
