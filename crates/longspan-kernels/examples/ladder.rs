//! One mechanism in five versions, from its formula to registers, each checked against the first and timed: the way into the code of
//! this crate. Masked kernelized attention of one head, `out_i = Σ_{j≤i} φ(q_i)·φ(k_j) v_j / Σ_{j≤i} φ(q_i)·φ(k_j)`, `φ = elu + 1`.
//!
//! ```sh
//! cargo run --release -p longspan-kernels --example ladder
//! ```

use std::time::Instant;

use longspan_kernels::{Call, Dims, FeatureMap, Kernel, KernelizedAttention, Mask, Output, Scratch, ViewMut};

/// Numbers of a query, a key and a value.
const D: usize = 64;
/// Tokens of a chunk: a chunk's tile of weights, its rows and the state all fit a core's second cache.
const CHUNK: usize = 64;

type Row = [f32; D];

fn phi(x: &Row) -> Row {
    x.map(|x| FeatureMap::EluPlusOne.apply(x))
}

fn dot(a: &Row, b: &Row) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// 1. The formula: every pair, L²·d work.
fn formula(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row]) {
    let (queries, keys): (Vec<Row>, Vec<Row>) = (q.iter().map(phi).collect(), k.iter().map(phi).collect());
    for (i, out) in out.iter_mut().enumerate() {
        let (mut sum, mut total) = ([0f64; D], 0f64);
        for j in 0..=i {
            let weight = f64::from(dot(&queries[i], &keys[j]));
            total += weight;
            sum.iter_mut().zip(&v[j]).for_each(|(sum, &v)| *sum += weight * f64::from(v));
        }
        *out = sum.map(|sum| (sum / total) as f32);
    }
}

/// 2. The sum moves inside the product: `φ(q_i)·Σ_{j≤i} φ(k_j) v_jᵀ`. One running sum stands for all earlier keys: L·d² work, and the
///    state of streaming.
fn running_sum(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row]) {
    let (mut state, mut keys) = ([[0f32; D]; D], [0f32; D]);
    for i in 0..q.len() {
        let (query, key) = (phi(&q[i]), phi(&k[i]));
        for c in 0..D {
            keys[c] += key[c];
            state[c].iter_mut().zip(&v[i]).for_each(|(state, v)| *state += key[c] * v);
        }
        let mut sum = [0f32; D];
        for c in 0..D {
            sum.iter_mut().zip(&state[c]).for_each(|(sum, state)| *sum += query[c] * state);
        }
        let total = dot(&query, &keys);
        out[i] = sum.map(|sum| sum / total);
    }
}

/// 3. Chunks: pairs within a chunk by the formula, earlier chunks by the state. That is twice the arithmetic, but the state is read and
///    written once for 64 tokens, not for each, and what is left are matrix products.
fn chunks(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row]) {
    in_chunks(q, k, v, out, phi, product::<4, 8, false>);
}

/// 4. The same products in wider registers and with fused multiply-adds, if this machine has them, which is asked when the program runs:
///    the compiler may count on no more than the oldest processor has.
fn vectors(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row]) {
    in_chunks(q, k, v, out, phi, wide_product);
}

/// 5. Exponentials in registers too, as a polynomial: by the standard library they are now most of the time.
fn exponentials(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row]) {
    in_chunks(q, k, v, out, wide_phi, wide_product);
}

/// `to += a·b`. The sums of a few rows and columns stay in registers, so each operand is used more than once for every time it is read.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn product<const ROWS: usize, const COLUMNS: usize, const FUSED: bool>(a: &[Row], b: &[Row], to: &mut [Row]) {
    for (a, to) in a.chunks_exact(ROWS).zip(to.chunks_exact_mut(ROWS)) {
        let a: &[Row; ROWS] = a.try_into().expect("as many rows");
        for first in (0..D).step_by(COLUMNS) {
            let mut sums = [[0f32; COLUMNS]; ROWS];
            for n in 0..b.len().min(D) {
                let b: &[f32; COLUMNS] = b[n][first..][..COLUMNS].try_into().expect("as many columns");
                for r in 0..ROWS {
                    for c in 0..COLUMNS {
                        sums[r][c] =
                            if FUSED { a[r][n].mul_add(b[c], sums[r][c]) } else { a[r][n] * b[c] + sums[r][c] };
                    }
                }
            }
            for (to, sums) in to.iter_mut().zip(sums) {
                to[first..][..COLUMNS].iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
            }
        }
    }
}

fn wide_product(a: &[Row], b: &[Row], to: &mut [Row]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn of_256_bits(a: &[Row], b: &[Row], to: &mut [Row]) {
            product::<4, 16, true>(a, b, to);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { of_256_bits(a, b, to) };
        }
    }
    product::<4, 8, false>(a, b, to);
}

/// `elu(x) + 1` by `eˣ = 2ⁿ eʳ`, `x = n ln 2 + r`, in operations that compilers turn into those of registers.
#[inline(always)]
fn polynomial_phi(x: &Row) -> Row {
    x.map(|x| {
        let bounded = x.clamp(-87.0, 0.0);
        // Adding 1.5·2²³ rounds to a whole number, which then stands in the lowest bits.
        let shifted = bounded * std::f32::consts::LOG2_E + 12_582_912.0;
        let r = bounded - (shifted - 12_582_912.0) * std::f32::consts::LN_2;
        let series = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
        let exp = series.iter().fold(0.0, |sum, c| sum * r + c)
            * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
        if x > 0.0 { x + 1.0 } else { exp }
    })
}

fn wide_phi(x: &Row) -> Row {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn of_256_bits(x: &Row) -> Row {
            polynomial_phi(x)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { of_256_bits(x) };
        }
    }
    polynomial_phi(x)
}

type Product = fn(&[Row], &[Row], &mut [Row]);

/// The walk over chunks that versions 3 to 5 share. Whole chunks only.
fn in_chunks(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row], phi: fn(&Row) -> Row, product: Product) {
    let (mut state, mut keys) = ([[0f32; D]; D], [0f32; D]);
    for first in (0..q.len()).step_by(CHUNK) {
        let here = first..first + CHUNK;
        let queries: Vec<Row> = q[here.clone()].iter().map(phi).collect();
        let features: Vec<Row> = k[here.clone()].iter().map(phi).collect();
        let across: Vec<Row> = (0..D).map(|c| std::array::from_fn(|j| features[j][c])).collect();
        // Weights of the pairs, of which no query sees those after it.
        let mut tile = [[0f32; CHUNK]; CHUNK];
        product(&queries, &across, &mut tile);
        tile.iter_mut().enumerate().for_each(|(i, row)| row[i + 1..].fill(0.0));
        let out = &mut out[here.clone()];
        out.fill([0.0; D]);
        product(&queries, &state, out);
        product(&tile, &v[here.clone()], out);
        for ((out, query), tile) in out.iter_mut().zip(&queries).zip(&tile) {
            let total = dot(query, &keys) + tile.iter().sum::<f32>();
            out.iter_mut().for_each(|x| *x /= total);
        }
        product(&across, &v[here], &mut state);
        features.iter().for_each(|key| keys.iter_mut().zip(key).for_each(|(sum, x)| *sum += x));
    }
}

/// The library: the walk of `kernelized/`, the products of `simd/product.rs`, maps while rows are read (`feature_map/elementwise.rs`), no
/// work for what is masked, and segments of the sequence on every core.
fn library(q: &[Row], k: &[Row], v: &[Row], out: &mut [Row]) {
    let dims = Dims::square(1, 1, q.len(), D);
    let call = Call::row_major(dims, [q.as_flattened(), k.as_flattened(), v.as_flattened()]).with_mask(Mask::causal());
    let to = Output::new(ViewMut::contiguous(out.as_flattened_mut(), dims.out()));
    KernelizedAttention::default().forward(&call, to, &mut Scratch::new()).expect("a call that makes sense");
}

type Version = fn(&[Row], &[Row], &[Row], &mut [Row]);

fn main() {
    let tokens = 4096;
    let mut seed = 1u64;
    let mut draw = || -> Vec<Row> {
        let mut number = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..tokens).map(|_| std::array::from_fn(|_| number())).collect()
    };
    let (q, k, v) = (draw(), draw(), draw());
    let versions: [(&str, Version); 6] = [
        ("1. formula", formula),
        ("2. running sum", running_sum),
        ("3. chunks", chunks),
        ("4. vectors", vectors),
        ("5. exponentials", exponentials),
        ("the library", library),
    ];
    let mut expected = Vec::new();
    println!("{tokens} tokens, one head of {D}: milliseconds, and the largest error beside the formula");
    for (name, version) in versions {
        let mut out = vec![[0f32; D]; tokens];
        let least = (0..if expected.is_empty() { 1 } else { 10 })
            .map(|_| {
                let start = Instant::now();
                version(&q, &k, &v, &mut out);
                start.elapsed().as_secs_f64()
            })
            .fold(f64::INFINITY, f64::min);
        if expected.is_empty() {
            expected.clone_from(&out);
        }
        let error =
            out.as_flattened().iter().zip(expected.as_flattened()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error < 1e-5, "{name}: {error:e}");
        println!("{name:<16}{:>9.2} ms  {error:.0e}", 1e3 * least);
    }
}
